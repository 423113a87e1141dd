"""Sampling answers. Engines share one interface: prompts as ids in, `Completion`s out, in order."""

from rlhf.rollout.sampler import Completion, Sampling, sample

__all__ = ["Completion", "Sampling", "sample"]
