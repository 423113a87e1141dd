"""Sampling within a stage: prompts in, scored answers out, the samples of a prompt next to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.algos.advantages import has_spread
from rlhf.algos.kl import k1, k3
from rlhf.algos.masking import masked_sum
from rlhf.data.text import TextCodec
from rlhf.errors import StageFailed
from rlhf.models.sequences import Sequences
from rlhf.progress import Clock
from rlhf.rewards.committee import Score
from rlhf.rollout import Completion, sample


class PromptStream:
    """Prompts in random order without end: each is seen once before any is seen again."""

    def __init__(self, prompts: Sequence[list[int]], seed: int) -> None:
        self.prompts = prompts
        self.generator = torch.Generator().manual_seed(seed)
        self.queue: list[int] = []

    def take(self, count: int) -> list[list[int]]:
        """The next `count` prompts."""
        while len(self.queue) < count:
            self.queue += torch.randperm(len(self.prompts), generator=self.generator).tolist()
        taken, self.queue = self.queue[:count], self.queue[count:]
        return [self.prompts[i] for i in taken]

    def state_dict(self) -> dict[str, Any]:
        """What is still to come."""
        return {"queue": list(self.queue), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.queue = list(state["queue"])
        self.generator.set_state(state["generator"])


@dataclass(frozen=True)
class Rollout:
    """B answers, the samples of a prompt next to each other. scores: (B,) on the CPU."""

    prompts: list[list[int]]
    completions: list[Completion]
    scores: Tensor
    metrics: dict[str, float]

    @property
    def ended(self) -> Tensor:
        """(B,) bool, False where the answer was cut by the limit."""
        return torch.tensor([completion.ended for completion in self.completions])

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.ids) for completion in self.completions)

    def described(self, sequences: Sequences, logprobs: Tensor, start: Tensor) -> dict[str, float]:
        """What is logged of every rollout batch; log-probs (B, T) of the policy and of its start."""
        mask = sequences.response_mask
        return {
            "policy/proxy": float(self.scores.mean()),
            "policy/proxy_std": float(self.scores.std(correction=0)),
            "policy/kl_nats": float(masked_sum(k3(logprobs, start), mask, dim=1).mean()),
            "policy/log_ratio_nats": float(masked_sum(k1(logprobs, start), mask, dim=1).mean()),
            "policy/length_tokens": float(sequences.lengths.float().mean()),
            "policy/ended_fraction": float(self.ended.float().mean()),
            **{f"policy/{key}": value for key, value in self.metrics.items()},
        }


class Rollouts:
    """Draws rollout batches from the policy that is being trained.

    With `resample_batches`, groups whose answers all score the same are replaced by the groups of further
    batches (dynamic sampling, Yu et al. 2025, arXiv:2503.14476), until `prompts_per_step` have spread or
    that many further batches were drawn; then the batch is smaller, or, without any spread, as drawn first.
    """

    def __init__(
        self,
        settings: config.RlCandidate | config.OnlinePreferenceCandidate,
        model: config.Model,
        *,
        policy: PreTrainedModel,
        score: Score,
        codec: TextCodec,
        prompts: Sequence[list[int]],
        seed: int,
        clock: Clock,
    ) -> None:
        self.settings, self.model, self.policy = settings, model, policy
        self.score, self.codec, self.clock, self.seed = score, codec, clock, seed
        self.stream = PromptStream(prompts, seed)
        self.drawn = 0

    def collect(self) -> Rollout:
        """The next rollout batch."""
        s = self.settings
        first = self._draw()
        if not s.resample_batches:
            return first
        kept, drawn = self._with_spread(first), [first]
        while len(kept) < s.prompts_per_step and len(drawn) <= s.resample_batches:
            drawn.append(self._draw())
            kept += self._with_spread(drawn[-1])
        metrics = {
            "rollout_batches": float(len(drawn)),
            "groups": float(len(kept)),
            "proxy_drawn": float(torch.cat([batch.scores for batch in drawn]).mean()),
        }
        if not kept:
            return Rollout(first.prompts, first.completions, first.scores, metrics)
        kept = kept[: s.prompts_per_step]
        metrics["groups"] = float(len(kept))
        return Rollout(
            [prompt for group in kept for prompt in group.prompts],
            [completion for group in kept for completion in group.completions],
            torch.cat([group.scores for group in kept]),
            metrics,
        )

    def state_dict(self) -> dict[str, Any]:
        """Which prompts come next, and the place in the sequence of seeds."""
        return {"stream": self.stream.state_dict(), "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.stream.load_state_dict(state["stream"])
        self.drawn = state["drawn"]

    def _draw(self) -> Rollout:
        s = self.settings
        prompts = [
            prompt for prompt in self.stream.take(s.prompts_per_step)
            for _ in range(s.samples_per_prompt)
        ]  # fmt: skip
        with self.clock("sampling"):
            completions = sample(
                self.policy,
                prompts,
                max_new_tokens=self.model.max_response_tokens,
                dtype=self.model.dtype,
                temperature=s.temperature,
                eos_id=self.codec.eos_id,
                pad_id=self.codec.pad_id,
                seed=self.seed + 1000 + self.drawn,
                batch_size=s.sampling_batch_size or len(prompts),
            )
        with self.clock("scoring"):
            texts = [self.codec.decode(completion.ids) for completion in completions]
            scores = self.score(prompts, texts, [c.ended for c in completions])
        self.drawn += 1
        wrong = (~torch.isfinite(scores)).nonzero().flatten().tolist()
        if wrong:
            raise StageFailed(
                f"the score of an answer is {float(scores[wrong[0]])} in draw {self.drawn}\n"
                f"  answer: {texts[wrong[0]]!r} to prompt ids {prompts[wrong[0]]}\n"
                "  rule: every answer has a finite score"
            )
        return Rollout(prompts, completions, scores, {})

    def _with_spread(self, rollout: Rollout) -> list[Rollout]:
        """The groups that have spread, one Rollout each."""
        size = self.settings.samples_per_prompt
        starts = range(0, len(rollout.prompts), size)
        spread = has_spread(rollout.scores, size)[::size].tolist()
        return [
            Rollout(
                rollout.prompts[start : start + size],
                rollout.completions[start : start + size],
                rollout.scores[start : start + size],
                {},
            )
            for start, has in zip(starts, spread, strict=True)
            if has
        ]
