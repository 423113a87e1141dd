"""Reinforcement learning on a score. An algorithm is named parts: an advantage, a loss, a place for KL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.algos import parts
from rlhf.algos.advantages import ADVANTAGES, clip_advantages, has_spread, token_rewards, whiten
from rlhf.algos.kl import KL_ESTIMATORS, adapt_kl_coef, full_kl_loss, k1, k3, kl_loss
from rlhf.algos.logprobs import token_entropy, token_logprobs
from rlhf.algos.masking import masked_mean, masked_sum, reduction_denominator, select
from rlhf.algos.policy_losses import (
    POLICY_LOSSES,
    clipped_value_loss,
    entropy_bonus,
    importance_correction,
)
from rlhf.algos.truncation import TRUNCATION
from rlhf.algos.types import LossOutput
from rlhf.data.batching import chunks
from rlhf.data.text import TextCodec
from rlhf.errors import StageFailed
from rlhf.learner import Learner
from rlhf.models.policy import precision, response_logits
from rlhf.models.scalar import ScalarModel
from rlhf.models.sequences import Sequences
from rlhf.optimise import preflight
from rlhf.optimise.anchor import Budget, follow, load_models_state, models_state
from rlhf.optimise.forward import by_length, logprobs_of, scatter, token_stats
from rlhf.optimise.rollouts import Rollout, Rollouts
from rlhf.progress import Clock
from rlhf.rewards.committee import Score
from rlhf.rollout import Completion

ADVANTAGE_INPUTS = frozenset(
    {"rewards", "scores", "values", "final_values", "response_mask", "group_size", "state"}
)
LOSS_INPUTS = frozenset({"logprobs", "old_logprobs", "advantages", "response_mask"})
_COUNTS = ("kl_coef", "collected", "checked", "warmed_up", "steps_done")


@dataclass(frozen=True)
class Experience:
    """A rollout batch of B answers, the samples of a prompt next to each other. Constants to the losses.

    scores: (B,). old_logprobs, advantages: (B, T). ref_logprobs: (B, T) or None without a reference.
    values, returns: (B, T) or None. kl_mask: (B, T) bool, the tokens on which the KL term counts;
    kl_coef: its strength, the same in the rewards and in every update on this batch.
    minibatches: rows of each update, of similar length, cut into micro-batches; rows that the losses
    may not see are in none.
    """

    sequences: Sequences
    scores: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    values: Tensor | None
    returns: Tensor | None
    kl_mask: Tensor
    kl_coef: float
    minibatches: list[list[list[int]]]
    metrics: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return int(self.sequences.response_mask.sum())


class RlTrainer:
    """One candidate's loop: sample, score, estimate advantages, update policy and critic.

    Args:
        policy: trained. start: the frozen policy it starts as, to which `kl_nats` is measured.
        reference: the policy of the KL term, which may be `start`, or None.
        critic: values, for an advantage that reads them.
        score: (prompt ids, responses, ended) -> (B,) scores.
        seed: fixes sampling and order.
    """

    def __init__(
        self,
        settings: config.RlCandidate,
        model: config.Model,
        *,
        policy: PreTrainedModel,
        start: PreTrainedModel,
        reference: PreTrainedModel | None,
        critic: ScalarModel | None,
        score: Score,
        codec: TextCodec,
        prompts: Sequence[list[int]],
        seed: int,
        clock: Clock,
    ) -> None:
        self.settings, self.model = settings, model
        self.policy, self.start, self.reference, self.critic = policy, start, reference, critic
        self.codec, self.clock = codec, clock
        self.estimator, self.loss = rl_parts(settings, has_critic=critic is not None)
        self.rollouts = Rollouts(
            settings, model,
            policy=policy, score=score, codec=codec, prompts=prompts, seed=seed, clock=clock,
        )  # fmt: skip
        self.order = torch.Generator().manual_seed(seed + 1)
        updates = settings.epochs_per_step * settings.minibatches
        self.learner = Learner(
            policy, settings, total_updates=settings.steps * updates, ema_decay=settings.ema_decay
        )
        self.critic_learner = None
        if critic is not None and settings.value is not None:
            total = (settings.steps + settings.value.warmup_steps) * updates
            self.critic_learner = Learner(
                critic, settings, total_updates=total, learning_rate=settings.value.learning_rate
            )
        self.kl_coef = settings.kl.coef if settings.kl is not None else 0.0
        self.advantage_state = torch.zeros(0)
        self.budget = Budget(settings.kl_budget_nats, policy)
        self.collected = 0
        self.checked = False
        self.warmed_up = 0
        """Steps of the critic alone that are done."""
        self.steps_done = 0

    def run(self) -> Iterator[tuple[int, Experience, dict[str, float]]]:
        """Yields (step, experience, metrics) after each step; the caller saves and logs.

        The first step is 1, or the one after a loaded state. Over the KL budget it ends, with the last
        weights that were within it; see `budget`.
        """
        s = self.settings
        for _ in self.warm_up():
            pass
        for step in range(self.steps_done + 1, s.steps + 1):
            experience = self.collect()
            if not self._within_budget(experience.metrics, step - 1):
                return
            metrics = self._update(experience, policy=True)
            if self.reference is not None and s.reference_decay is not None:
                follow(self.reference, self.policy, s.reference_decay)
            self.steps_done = step
            yield step, experience, metrics
        if s.kl_budget_nats is not None:
            self._within_budget(self.collect().metrics, s.steps)

    def warm_up(self) -> Iterator[int]:
        """The critic learns while the policy stands still; yields each step's number. `run` does what is left of it."""
        value = self.settings.value
        for step in range(self.warmed_up + 1, (value.warmup_steps if value else 0) + 1):
            coef = self.kl_coef
            self._update(self.collect(), policy=False)
            self.kl_coef = coef  # a policy that stands still says nothing about it
            self.warmed_up = step
            yield step

    def state_dict(self) -> dict[str, Any]:
        """All that `run` needs to go on after the step it is at, to the bit. Not copied."""
        critic = self.critic_learner
        return {
            "models": models_state(self.policy, self._moving),
            "critic": None if self.critic is None else dict(self.critic.state_dict()),
            "learner": self.learner.state_dict(),
            "critic_learner": None if critic is None else critic.state_dict(),
            "rollouts": self.rollouts.state_dict(),
            "budget": self.budget.state_dict(),
            "order": self.order.get_state(),
            "advantage_state": self.advantage_state,
            "advantage_state_on": self.advantage_state.device.type,
            **{name: getattr(self, name) for name in _COUNTS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises ValueError if it is not of a trainer with these settings."""
        if (self.critic is None) != (state["critic"] is None):
            raise ValueError("only one of the run and its saved state has a critic")
        load_models_state(self.policy, self._moving, state["models"])
        self.learner.load_state_dict(state["learner"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        if self.critic_learner is not None:
            self.critic_learner.load_state_dict(state["critic_learner"])
        self.rollouts.load_state_dict(state["rollouts"])
        self.budget.load_state_dict(state["budget"])
        self.order.set_state(state["order"])
        device = next(self.policy.parameters()).device
        here = "cpu" if state["advantage_state_on"] == "cpu" else device
        self.advantage_state = state["advantage_state"].to(here)
        for name in _COUNTS:
            setattr(self, name, state[name])

    @property
    def position(self) -> int:
        """Steps that are done, the critic's own included."""
        return self.warmed_up + self.steps_done

    @property
    def _moving(self) -> PreTrainedModel | None:
        return self.reference if self.settings.reference_decay is not None else None

    def _within_budget(self, metrics: dict[str, float], step: int) -> bool:
        kl_nats = metrics["policy/log_ratio_nats"]
        return self.budget.within(kl_nats, step=step, updates=self.learner.updates)

    # --- experience ---

    def collect(self) -> Experience:
        """Sample a batch and compute every constant the losses need. The first that trains is checked."""
        rollout = self.rollouts.collect()
        with self.clock("training"):
            experience = self._constants(rollout)
        if not self.checked and experience.minibatches:
            self._preflight(experience, rollout.completions)
            self.checked = True
        self.collected += 1
        return experience

    def _constants(self, rollout: Rollout) -> Experience:
        s = self.settings
        device = next(self.policy.parameters()).device
        sequences = Sequences.from_rows(
            rollout.prompts, [c.ids for c in rollout.completions], self.codec.pad_id
        ).to(device)
        if self.collected == 0:  # everything below relies on it
            preflight.check_mask_selects_sampled(sequences, rollout.completions)
        raw, ended = rollout.scores.to(device), rollout.ended.to(device)
        mask = sequences.response_mask
        minibatches = self._cut(sequences, list(range(len(sequences))))
        batches = _flat(minibatches)
        old = scatter(sequences, batches, lambda part: self._logprobs(self.policy, part))
        start = scatter(sequences, batches, lambda part: self._logprobs(self.start, part))
        ref = self._reference_logprobs(sequences, batches, start)
        values, final_values = self._all_values(sequences, batches, ended)
        truncation = parts.call(
            TRUNCATION[s.truncated.kind],
            {
                "scores": raw,
                "ended": ended,
                "lengths": sequences.lengths,
                "max_length": self.model.max_response_tokens,
            },
            **s.truncated.arguments(),
        )
        estimated = parts.call(
            self.estimator,
            {
                "rewards": self._rewards(truncation.scores, old, ref, mask),
                "scores": truncation.scores,
                "values": values,
                "final_values": final_values,
                "response_mask": mask,
                "group_size": s.samples_per_prompt,
                "state": self.advantage_state,
            },
            **s.advantage.arguments(),
        )
        if values is not None and estimated.returns is None:
            raise StageFailed(
                f"advantage={s.advantage.kind} reads values and returned none to learn from\n"
                "  rule: Advantages.returns is the critic's target, (B, T)"
            )
        if estimated.state is not None:
            self.advantage_state = estimated.state
        keep = torch.ones_like(ended)
        for allowed in (truncation.keep, estimated.keep):
            keep = keep if allowed is None else keep & allowed
        if not bool(keep.all()):
            # The ratio starts at 1 only if old log-probs come from the batches that training uses.
            minibatches = self._cut(sequences, keep.nonzero().flatten().tolist())
            again = scatter(
                sequences, _flat(minibatches), lambda part: self._logprobs(self.policy, part)
            )
            old = torch.where(keep[:, None], again, old)
        advantages = estimated.advantages
        if s.whiten_advantages:
            advantages = whiten(advantages, mask & keep[:, None])
        if s.clip_advantages is not None:
            advantages = clip_advantages(advantages, limit=s.clip_advantages)
        sampled = _sampler_logprobs(old, rollout.completions, mask)
        found = {**truncation.metrics, **estimated.metrics}
        if s.correction is not None:
            weights, corrected = importance_correction(old, sampled, mask, cap=s.correction.cap)
            advantages = select(advantages * weights, mask)
            found |= corrected
        metrics = {
            **rollout.described(sequences, old, start),
            "policy/sampler_mismatch_nats": float(masked_mean((old - sampled).abs(), mask)),
            **{f"policy/{key}": float(value) for key, value in found.items()},
        }
        if not bool(keep.all()):
            metrics["policy/kept_fraction"] = float(keep.float().mean())
        if ref is not None and self.reference is not self.start:
            metrics["policy/kl_reference_nats"] = float(
                masked_sum(k3(old, ref), mask, dim=1).mean()
            )
        kl_coef = self.kl_coef
        if s.kl is not None and s.kl.target is not None:
            metrics["policy/kl_coef"] = kl_coef
            self.kl_coef = adapt_kl_coef(
                kl_coef,
                float(masked_sum(k1(old, start if ref is None else ref), mask, dim=1).mean()),
                target_nats=s.kl.target.nats,
                horizon=s.kl.target.horizon,
                num_samples=len(sequences),
            )
        if estimated.returns is not None and values is not None:
            metrics["value/explained_variance"] = _explained(values[mask], estimated.returns[mask])
        return Experience(
            sequences, raw, old, ref, advantages, values, estimated.returns,
            self._kl_mask(truncation.scores, mask), kl_coef, minibatches, metrics,
        )  # fmt: skip

    def _cut(self, sequences: Sequences, rows: list[int]) -> list[list[list[int]]]:
        """As many minibatches as declared, in micro-batches of similar length.

        Minibatches are of similar length too, which saves padding, unless the loss is a mean over a
        minibatch's tokens: those of short answers would then weigh more, so chance makes them.
        """
        s = self.settings
        if not rows:
            return []
        size = -(-len(rows) // s.minibatches)
        if s.reduction == "token_mean" and s.minibatches > 1:
            shuffled = torch.randperm(len(rows), generator=self.order).tolist()
            minibatches = chunks([rows[i] for i in shuffled], size)
        else:
            minibatches = [rows]
        return [
            chunks([minibatch[i] for i in ordered], s.micro_batch_size)
            for minibatch in minibatches
            for ordered in by_length(sequences.select(minibatch), size)
        ]

    def _rewards(self, scores: Tensor, old: Tensor, ref: Tensor | None, mask: Tensor) -> Tensor:
        kl = self.settings.kl
        if kl is None or kl.where != "reward" or ref is None:
            return token_rewards(scores, torch.zeros_like(old), mask, kl_coef=0.0)
        return token_rewards(
            scores, KL_ESTIMATORS[kl.estimator](old, ref), mask, kl_coef=self.kl_coef
        )

    def _reference_logprobs(
        self, sequences: Sequences, batches: list[list[int]], start: Tensor
    ) -> Tensor | None:
        reference = self.reference
        if reference is None or reference is self.start:
            return None if reference is None else start
        return scatter(sequences, batches, lambda part: self._logprobs(reference, part))

    def _all_values(
        self, sequences: Sequences, batches: list[list[int]], ended: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """V of the state before each token (B, T); V after the last one where the answer was cut (B,)."""
        critic = self.critic
        if critic is None:
            return None, None
        values = scatter(sequences, batches, self._values)
        if "final_values" not in parts.inputs(self.estimator):
            return values, None
        final = torch.zeros(len(sequences), device=values.device)
        with torch.no_grad(), precision(self.model, values.device):
            for rows in batches:
                final[rows] = critic.scores(sequences.select(rows)).float()
        return values, torch.where(ended, 0.0, final)

    def _kl_mask(self, scores: Tensor, mask: Tensor) -> Tensor:
        kl = self.settings.kl
        if kl is None or kl.zero_spread_groups != "skip":
            return mask
        return mask & has_spread(scores, self.settings.samples_per_prompt)[:, None]

    def _logprobs(self, policy: PreTrainedModel, part: Sequences) -> Tensor:
        return logprobs_of(policy, part, self.model, self.settings.temperature)

    def _values(self, part: Sequences) -> Tensor:
        assert self.critic is not None
        with precision(self.model, part.prompt_ids.device):
            return self.critic.values(part)

    def _preflight(self, experience: Experience, completions: list[Completion]) -> None:
        """Ratio 1, KL 0, sampler and trainer agree; through the very forward pass that training uses."""
        sequences, batches = experience.sequences, _flat(experience.minibatches)
        seen = torch.zeros_like(sequences.response_mask)
        seen[[row for batch in batches for row in batch]] = True
        mask = sequences.response_mask & seen
        self.policy.train()
        again = scatter(sequences, batches, lambda part: self._logprobs(self.policy, part))
        preflight.check_ratio(again, experience.old_logprobs, mask)
        start = scatter(sequences, batches, lambda part: self._logprobs(self.start, part))
        preflight.check_reference(experience.old_logprobs, start, mask)
        sampled = _sampler_logprobs(again, completions, sequences.response_mask)
        preflight.check_sampler(experience.old_logprobs, sampled, mask, self.model.dtype)

    # --- updates ---

    def _update(self, experience: Experience, *, policy: bool) -> dict[str, float]:
        """All epochs and minibatches over one batch; returns each metric's mean, a `*_max`'s maximum."""
        updates = list(self._updates(experience, policy=policy))
        joined = {
            key: max(m[key] for m in updates)
            if key.endswith("_max")
            else sum(m[key] for m in updates) / len(updates)
            for key in (updates[0] if updates else {})
        }
        if self.settings.stop_epochs_nats is not None:
            joined["policy/updates_per_step"] = float(len(updates))
        return {**experience.metrics, **joined}

    def _updates(self, experience: Experience, *, policy: bool) -> Iterator[dict[str, float]]:
        """One minibatch after another, until all are done or the policy is too far from the sampler."""
        s = self.settings
        for epoch in range(s.epochs_per_step):
            order = torch.randperm(len(experience.minibatches), generator=self.order).tolist()
            for index in order:
                minibatch = experience.minibatches[index]
                rows = [row for micro in minibatch for row in micro]
                name = f"rollout {self.collected}, epoch {epoch + 1}, minibatch {index + 1}"
                denominator = self._denominator(experience, rows)
                found: dict[str, float] = {}
                with self.clock("training"):
                    if policy:
                        found |= self._policy_update(experience, minibatch, denominator, name)
                    if self.critic_learner is not None:
                        found |= self._value_update(experience, minibatch, denominator, name)
                yield found
                if policy and s.stop_epochs_nats is not None and _moved(found) > s.stop_epochs_nats:
                    return

    def _denominator(self, experience: Experience, rows: list[int]) -> float:
        """What a minibatch's sum is divided by."""
        mask, s = experience.sequences.response_mask, self.settings
        if s.length_constant == "batch_mean":
            return len(rows) * experience.num_tokens / len(mask)
        return float(
            reduction_denominator(mask[rows], s.reduction, length=self.model.max_response_tokens)
        )

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
        shared: dict[str, Any] = {"reduction": s.reduction, "denominator": denominator}
        logprobs, entropy, logits = self._forward(part)
        loss, metrics = parts.call(
            self.loss,
            {
                "logprobs": logprobs,
                "old_logprobs": e.old_logprobs[rows, :width],
                "advantages": e.advantages[rows, :width],
                "response_mask": part.response_mask,
            },
            **shared,
            **s.loss.arguments(),
        )
        bonus = entropy_bonus(entropy, part.response_mask, **shared)
        metrics = {**metrics, **bonus.metrics}
        if s.entropy_coef:
            loss = loss + s.entropy_coef * bonus.loss
        if s.kl is not None and s.kl.where == "loss":
            kl_mask = e.kl_mask[rows, :width]
            if logits is not None:
                assert self.reference is not None
                with torch.no_grad(), precision(self.model, logits.device):
                    ref_logits = response_logits(self.reference, part)
                penalty = full_kl_loss(
                    logits, ref_logits, kl_mask, temperature=s.temperature, **shared
                )
            else:
                assert e.ref_logprobs is not None
                ref = e.ref_logprobs[rows, :width]
                penalty = kl_loss(logprobs, ref, kl_mask, estimator=s.kl.estimator, **shared)
            loss = loss + e.kl_coef * penalty.loss
            # Over all response tokens, as micro-batches are joined; skipped ones count 0.
            share = kl_mask.sum() / part.response_mask.sum().clamp(min=1)
            metrics |= {key: value * share for key, value in penalty.metrics.items()}
        return LossOutput(loss, metrics)

    def _forward(self, part: Sequences) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs and entropy (b, t), and the logits (b, t, V) where the KL term needs them all."""
        s = self.settings
        # Without a coefficient entropy is only reported; autograd would keep (B, T, V) tables for it.
        wanted = s.entropy_coef > 0
        if s.kl is None or s.kl.estimator != "full":
            stats = token_stats(
                self.policy,
                part,
                self.model,
                temperature=s.temperature,
                with_entropy=True,
                entropy_gradient=wanted,
            )
            assert stats.entropy is not None
            return stats.logprobs, stats.entropy, None
        with precision(self.model, part.prompt_ids.device):
            logits = response_logits(self.policy, part)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            entropy = token_entropy(logits, temperature=s.temperature)
        logprobs = token_logprobs(logits, part.response_ids, temperature=s.temperature)
        return logprobs, entropy, logits

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


def rl_parts(settings: config.RlCandidate, *, has_critic: bool) -> tuple[Any, Any]:
    """The functions of advantage and loss. Raises ValueError if a part of yours does not fit."""
    estimator = parts.resolve(ADVANTAGES, settings.advantage.kind, "advantage")
    available = ADVANTAGE_INPUTS if has_critic else ADVANTAGE_INPUTS - {"values", "final_values"}
    parts.check(
        estimator, f"advantage={settings.advantage.kind}", available, settings.advantage.arguments()
    )
    if has_critic and not {"values", "final_values"}.intersection(parts.inputs(estimator)):
        raise ValueError(f"advantage={settings.advantage.kind} reads no values; set value: null")
    loss = parts.resolve(POLICY_LOSSES, settings.loss.kind, "loss")
    parts.check(
        loss,
        f"loss={settings.loss.kind}",
        LOSS_INPUTS,
        settings.loss.arguments(),
        {"reduction", "denominator"},
    )
    return estimator, loss


def _flat(minibatches: list[list[list[int]]]) -> list[list[int]]:
    return [micro for minibatch in minibatches for micro in minibatch]


def _sampler_logprobs(like: Tensor, completions: Sequence[Completion], mask: Tensor) -> Tensor:
    """(B, T) log-probs in nats that the sampler gave its tokens; 0 elsewhere."""
    sampled = torch.zeros_like(like)
    sampled[mask] = torch.tensor(
        [p for c in completions for p in c.logprobs], device=mask.device, dtype=sampled.dtype
    )
    return sampled


def _moved(metrics: dict[str, float]) -> float:
    if "policy/kl_old_nats" not in metrics:
        raise StageFailed(
            "stop_epochs_nats needs the metric kl_old_nats, which this loss does not report\n"
            "  mend: report it, or leave stop_epochs_nats out"
        )
    return metrics["policy/kl_old_nats"]


def _explained(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant."""
    variance = float(returns.var())
    return 1 - float((returns - values).var()) / variance if variance > 0 else 0.0
