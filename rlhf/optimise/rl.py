"""Reinforcement learning on a score. An algorithm is three names: an advantage, a loss, a place for KL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.algos.advantages import estimate, token_rewards, whiten
from rlhf.algos.kl import KL_ESTIMATORS, k3, kl_loss
from rlhf.algos.logprobs import token_entropy, token_logprobs
from rlhf.algos.masking import masked_mean, masked_sum, reduction_denominator
from rlhf.algos.policy_losses import POLICY_LOSSES, clipped_value_loss, entropy_bonus
from rlhf.algos.types import LossOutput
from rlhf.data.batching import chunks
from rlhf.data.text import TextCodec
from rlhf.learner import Learner
from rlhf.models.policy import precision, response_logits
from rlhf.models.scalar import ScalarModel
from rlhf.models.sequences import Sequences
from rlhf.optimise import preflight
from rlhf.optimise.forward import by_length, logprobs_of, scatter
from rlhf.progress import Clock
from rlhf.rollout import Completion, sample

Score = Callable[[Sequence[list[int]], Sequence[str], Sequence[bool]], Tensor]


@dataclass(frozen=True)
class Experience:
    """A rollout batch of B answers, the samples of a prompt next to each other. Constants to the losses.

    scores: (B,). old_logprobs, ref_logprobs, advantages: (B, T). values, returns: (B, T) or None.
    minibatches: rows of each update, of similar length, cut into micro-batches.
    """

    sequences: Sequences
    scores: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor | None
    returns: Tensor | None
    minibatches: list[list[list[int]]]
    metrics: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return int(self.sequences.response_mask.sum())


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


class RlTrainer:
    """One candidate's loop: sample, score, estimate advantages, update policy and critic.

    Args:
        policy: trained. reference: the frozen start. critic: values, or None without `gae`.
        score: (prompt ids, responses, ended) -> (B,) scores.
        seed: fixes sampling and order.
    """

    def __init__(
        self,
        settings: config.RlCandidate,
        model: config.Model,
        *,
        policy: PreTrainedModel,
        reference: PreTrainedModel,
        critic: ScalarModel | None,
        score: Score,
        codec: TextCodec,
        prompts: Sequence[list[int]],
        seed: int,
        clock: Clock,
    ) -> None:
        self.settings, self.model = settings, model
        self.policy, self.reference, self.critic = policy, reference, critic
        self.score, self.codec, self.clock, self.seed = score, codec, clock, seed
        self.stream = PromptStream(prompts, seed)
        self.order = torch.Generator().manual_seed(seed + 1)
        updates = settings.epochs_per_step * settings.minibatches
        self.learner = Learner(policy, settings, total_updates=settings.steps * updates)
        self.critic_learner = None
        if critic is not None and settings.value is not None:
            total = (settings.steps + settings.value.warmup_steps) * updates
            self.critic_learner = Learner(
                critic, settings, total_updates=total, learning_rate=settings.value.learning_rate
            )
        self.rollouts = 0

    def run(self) -> Iterator[tuple[int, Experience, dict[str, float]]]:
        """Yields (step, experience, metrics) after each step from 1; the caller saves and logs."""
        warmup = self.settings.value.warmup_steps if self.settings.value else 0
        for _ in range(warmup):
            self._update(self.collect(), policy=False)
        for step in range(1, self.settings.steps + 1):
            experience = self.collect()
            yield step, experience, self._update(experience, policy=True)

    # --- experience ---

    def collect(self) -> Experience:
        """Sample a batch and compute every constant the losses need. The first batch is checked."""
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
                seed=self.seed + 1000 + self.rollouts,
                batch_size=len(prompts),
            )
        with self.clock("scoring"):
            texts = [self.codec.decode(completion.ids) for completion in completions]
            scores = self.score(prompts, texts, [c.ended for c in completions])
        with self.clock("training"):
            experience = self._constants(prompts, completions, scores)
        if self.rollouts == 0:
            self._preflight(experience, completions)
        self.rollouts += 1
        return experience

    def _constants(
        self, prompts: list[list[int]], completions: list[Completion], scores: Tensor
    ) -> Experience:
        s = self.settings
        device = next(self.policy.parameters()).device
        sequences = Sequences.from_rows(
            prompts, [c.ids for c in completions], self.codec.pad_id
        ).to(device)
        if self.rollouts == 0:  # everything below relies on it
            preflight.check_mask_selects_sampled(sequences, completions)
        scores, mask = scores.to(device), sequences.response_mask
        size = len(prompts) // s.minibatches
        minibatches = [chunks(rows, s.micro_batch_size) for rows in by_length(sequences, size)]
        batches = [micro for minibatch in minibatches for micro in minibatch]
        old = scatter(sequences, batches, lambda part: self._logprobs(self.policy, part))
        ref = scatter(sequences, batches, lambda part: self._logprobs(self.reference, part))
        values = None
        if self.critic is not None:
            values = scatter(sequences, batches, self._values)
        in_reward = s.kl.coef if s.kl.where == "reward" else 0.0
        rewards = token_rewards(
            scores, KL_ESTIMATORS[s.kl.estimator](old, ref), mask, kl_coef=in_reward
        )
        estimated = estimate(
            s.advantage,
            rewards=rewards,
            scores=scores,
            values=values,
            response_mask=mask,
            group_size=s.samples_per_prompt,
            gamma=s.gamma,
            gae_lambda=s.gae_lambda,
        )
        advantages = (
            whiten(estimated.advantages, mask) if s.whiten_advantages else estimated.advantages
        )
        metrics = {
            "policy/proxy": float(scores.mean()),
            "policy/proxy_std": float(scores.std(correction=0)),
            "policy/kl_nats": float(masked_sum(k3(old, ref), mask, dim=1).mean()),
            "policy/length_tokens": float(sequences.lengths.float().mean()),
            "policy/ended_fraction": sum(c.ended for c in completions) / len(completions),
            "policy/sampler_mismatch_nats": _mismatch(old, completions, mask),
            **{f"policy/{key}": float(value) for key, value in estimated.metrics.items()},
        }
        if estimated.returns is not None and values is not None:
            metrics["value/explained_variance"] = _explained(values[mask], estimated.returns[mask])
        return Experience(
            sequences,
            scores,
            old,
            ref,
            advantages,
            values,
            estimated.returns,
            minibatches,
            metrics,
        )

    def _logprobs(self, policy: PreTrainedModel, part: Sequences) -> Tensor:
        return logprobs_of(policy, part, self.model, self.settings.temperature)

    def _values(self, part: Sequences) -> Tensor:
        assert self.critic is not None
        with precision(self.model, part.prompt_ids.device):
            return self.critic.values(part)

    def _preflight(self, experience: Experience, completions: list[Completion]) -> None:
        """Ratio 1, KL 0, sampler and trainer agree; through the very forward pass that training uses."""
        sequences, mask = experience.sequences, experience.sequences.response_mask
        batches = [micro for minibatch in experience.minibatches for micro in minibatch]
        self.policy.train()
        again = scatter(sequences, batches, lambda part: self._logprobs(self.policy, part))
        preflight.check_ratio(again, experience.old_logprobs, mask)
        preflight.check_reference(experience.old_logprobs, experience.ref_logprobs, mask)
        sampled = torch.zeros_like(again)
        sampled[mask] = torch.tensor(
            [p for c in completions for p in c.logprobs], device=sampled.device
        )
        preflight.check_sampler(experience.old_logprobs, sampled, mask, self.model.dtype)

    # --- updates ---

    def _update(self, experience: Experience, *, policy: bool) -> dict[str, float]:
        """All epochs and minibatches over one batch; returns each metric's mean, a `*_max`'s maximum."""
        s = self.settings
        collected: list[dict[str, float]] = []
        with self.clock("training"):
            for epoch in range(s.epochs_per_step):
                order = torch.randperm(len(experience.minibatches), generator=self.order).tolist()
                for index in order:
                    minibatch = experience.minibatches[index]
                    rows = [row for micro in minibatch for row in micro]
                    name = f"rollout {self.rollouts}, epoch {epoch + 1}, minibatch {index + 1}"
                    denominator = self._denominator(experience, rows)
                    found: dict[str, float] = {}
                    if policy:
                        found |= self._policy_update(experience, minibatch, denominator, name)
                    if self.critic_learner is not None:
                        found |= self._value_update(experience, minibatch, denominator, name)
                    collected.append(found)
        joined = {
            key: max(m[key] for m in collected)
            if key.endswith("_max")
            else sum(m[key] for m in collected) / len(collected)
            for key in collected[0]
        }
        return {**experience.metrics, **joined}

    def _denominator(self, experience: Experience, rows: list[int]) -> float:
        """What a minibatch's sum is divided by; `constant_length` takes the rollout's mean length."""
        mask = experience.sequences.response_mask
        if self.settings.reduction == "constant_length":
            return len(rows) * experience.num_tokens / len(mask)
        return float(reduction_denominator(mask[rows], self.settings.reduction))

    def _policy_update(
        self, experience: Experience, minibatch: list[list[int]], denominator: float, name: str
    ) -> dict[str, float]:
        metrics = self.learner.update(
            (
                (
                    float(experience.sequences.response_mask[rows].sum()),
                    lambda rows=rows: self._policy_loss(experience, rows, denominator),  # type: ignore[misc]
                )
                for rows in minibatch
            ),
            name=name,
        )
        return {f"policy/{key}": value for key, value in metrics.items()}

    def _policy_loss(self, e: Experience, rows: list[int], denominator: float) -> LossOutput:
        s, part = self.settings, e.sequences.select(rows)
        width = part.response_ids.shape[1]
        with precision(self.model, part.prompt_ids.device):
            logits = response_logits(self.policy, part)
        logprobs = token_logprobs(logits, part.response_ids, temperature=s.temperature)
        shared: dict[str, Any] = {"reduction": s.reduction, "denominator": denominator}
        clips = {"clip_low": s.clip_low, "clip_high": s.clip_high} if s.loss == "ppo_clip" else {}
        loss, metrics = POLICY_LOSSES[s.loss](
            logprobs,
            e.old_logprobs[rows, :width],
            e.advantages[rows, :width],
            part.response_mask,
            **shared,
            **clips,
        )
        # Without a coefficient it is only reported; autograd would keep tables of (B, T, V) for it.
        with torch.set_grad_enabled(s.entropy_coef > 0):
            entropy = token_entropy(logits, temperature=s.temperature)
        bonus = entropy_bonus(entropy, part.response_mask, **shared)
        metrics = {**metrics, **bonus.metrics}
        if s.entropy_coef:
            loss = loss + s.entropy_coef * bonus.loss
        if s.kl.where == "loss" and s.kl.coef:
            penalty = kl_loss(
                logprobs,
                e.ref_logprobs[rows, :width],
                part.response_mask,
                estimator=s.kl.estimator,
                **shared,
            )
            loss = loss + s.kl.coef * penalty.loss
        return LossOutput(loss, metrics)

    def _value_update(
        self, experience: Experience, minibatch: list[list[int]], denominator: float, name: str
    ) -> dict[str, float]:
        assert self.critic_learner is not None
        metrics = self.critic_learner.update(
            (
                (
                    float(experience.sequences.response_mask[rows].sum()),
                    lambda rows=rows: self._value_loss(experience, rows, denominator),  # type: ignore[misc]
                )
                for rows in minibatch
            ),
            name=f"{name} (critic)",
        )
        return {f"value/{key.removeprefix('value_')}": value for key, value in metrics.items()}

    def _value_loss(self, e: Experience, rows: list[int], denominator: float) -> LossOutput:
        value = self.settings.value
        assert value is not None and e.values is not None and e.returns is not None
        part = e.sequences.select(rows)
        width = part.response_ids.shape[1]
        loss, metrics = clipped_value_loss(
            self._values(part),
            e.values[rows, :width],
            e.returns[rows, :width],
            part.response_mask,
            clip=value.clip,
            reduction=self.settings.reduction,
            denominator=denominator,
        )
        return LossOutput(value.coef * loss, metrics)


def _mismatch(logprobs: Tensor, completions: list[Completion], mask: Tensor) -> float:
    """Mean |trainer - sampler| log-prob in nats."""
    sampled = torch.zeros_like(logprobs)
    sampled[mask] = torch.tensor([p for c in completions for p in c.logprobs], device=mask.device)
    return float(masked_mean((logprobs - sampled).abs(), mask))


def _explained(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant."""
    variance = float(returns.var())
    return 1 - float((returns - values).var()) / variance if variance > 0 else 0.0
