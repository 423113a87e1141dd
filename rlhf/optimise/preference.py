"""Learning from pairs directly (DPO and kin): labelled ones, or the policy's own labelled by a score."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.algos.masking import masked_sum
from rlhf.data.batching import Epochs, chunks, length_sorted_batches
from rlhf.data.text import TextCodec
from rlhf.learner import Learner
from rlhf.models.sequences import Sequences
from rlhf.optimise import preflight
from rlhf.optimise.anchor import Budget, follow, load_models_state, models_state
from rlhf.optimise.forward import by_length, logprobs_of, scatter
from rlhf.optimise.pairs import PairObjective, Pairs
from rlhf.optimise.reference import ReferenceCache, reference_key
from rlhf.optimise.rollouts import Rollout, Rollouts
from rlhf.progress import Clock
from rlhf.rewards.committee import Score


@dataclass(frozen=True)
class PairIds:
    """One comparison as token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class PreferenceTrainer:
    """One candidate's loop over labelled pairs. A fixed reference is asked once, before training.

    Args:
        policy: trained. start: the frozen policy it starts as; log-prob changes are measured to it.
        reference: the policy of the losses' log-ratios, which may be `start`, or None.
        cache: where log-probs of frozen policies are kept between runs, or None.
    """

    def __init__(
        self,
        settings: config.PreferenceCandidate,
        model: config.Model,
        *,
        policy: PreTrainedModel,
        start: PreTrainedModel,
        reference: PreTrainedModel | None,
        pairs: Sequence[PairIds],
        pad_id: int,
        seed: int,
        clock: Clock,
        cache: ReferenceCache | None = None,
    ) -> None:
        self.settings, self.model, self.policy, self.clock = settings, model, policy, clock
        self.reference, self.cache = reference, cache
        self.objective = PairObjective(
            settings, model,
            policy=policy, reference=reference, moving=settings.reference_decay is not None,
        )  # fmt: skip
        device = next(policy.parameters()).device
        prompts = [pair.prompt for pair in pairs]
        chosen = Sequences.from_rows(prompts, [p.chosen for p in pairs], pad_id).to(device)
        rejected = Sequences.from_rows(prompts, [p.rejected for p in pairs], pad_id).to(device)
        lengths = [len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs]
        order = torch.Generator().manual_seed(seed)
        self.batches = Epochs(lengths, settings.batch_size, settings.epochs, order)
        with clock("training"):
            at_start = self._frozen_logps(start, chosen, rejected)
            at_reference: tuple[Tensor | None, Tensor | None] = (None, None)
            if reference is not None and not self.objective.moving:
                at_reference = (
                    at_start
                    if reference is start
                    else self._frozen_logps(reference, chosen, rejected)
                )
        self.pairs = Pairs(chosen, rejected, *at_start, *at_reference)
        self.total_updates = self.batches.total
        self.learner = Learner(
            policy, settings, total_updates=self.total_updates, ema_decay=settings.ema_decay
        )
        self._preflight()

    def run(self) -> Iterator[tuple[int, int, dict[str, float]]]:
        """Yields (update, response tokens trained on, metrics); the first is 1, or the one after a loaded state."""
        s, pairs = self.settings, self.pairs
        self.policy.train()
        for epoch, rows in self.batches:
            with self.clock("training"):
                metrics = update(
                    self.objective, self.learner, pairs, rows, s.micro_batch_size,
                    name=f"epoch {epoch + 1}, pairs {sorted(rows)[:8]}",
                )  # fmt: skip
                if self.reference is not None and s.reference_decay is not None:
                    follow(self.reference, self.policy, s.reference_decay)
            tokens = int(pairs.chosen.lengths[rows].sum() + pairs.rejected.lengths[rows].sum())
            yield self.learner.updates, tokens, metrics

    def state_dict(self) -> dict[str, Any]:
        """All that `run` needs to go on after the update it is at, to the bit. Not copied."""
        return {
            "models": models_state(self.policy, self._moving),
            "learner": self.learner.state_dict(),
            "objective": self.objective.state_dict(),
            "batches": self.batches.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises ValueError if it is not of a trainer with these settings."""
        load_models_state(self.policy, self._moving, state["models"])
        self.learner.load_state_dict(state["learner"])
        self.objective.load_state_dict(state["objective"])
        self.batches.load_state_dict(state["batches"])

    @property
    def position(self) -> int:
        """Updates that are done."""
        return self.learner.updates

    @property
    def _moving(self) -> PreTrainedModel | None:
        return self.reference if self.objective.moving else None

    def _frozen_logps(
        self, policy: PreTrainedModel, chosen: Sequences, rejected: Sequences
    ) -> tuple[Tensor, Tensor]:
        """(N,) each, from the cache where the same was computed before."""
        size, device = self.settings.micro_batch_size, chosen.prompt_ids.device

        def compute() -> dict[str, Tensor]:
            return {
                "chosen": self.objective.all_logps(policy, chosen, size),
                "rejected": self.objective.all_logps(policy, rejected, size),
            }

        if self.cache is None:
            found = compute()
        else:
            key = reference_key(
                policy,
                [chosen, rejected],
                quantity="log-probs of whole responses in nats",
                dtype=self.model.dtype,
                micro_batch_size=size,
                chunk_tokens=self.model.logits_chunk_tokens,
            )
            found = self.cache.get_or_compute(key, compute)
        return found["chosen"].to(device), found["rejected"].to(device)

    def _preflight(self) -> None:
        """The policy starts as the start: the first batch's log-probs are equal in train mode."""
        rows = by_length(self.pairs.chosen, self.settings.micro_batch_size)[0]
        self.policy.train()
        with torch.no_grad():
            logps = self.objective.logps(self.policy, self.pairs.chosen.select(rows))
        everything = torch.ones_like(logps, dtype=torch.bool)
        preflight.check_reference(logps, self.pairs.start_chosen[rows], everything)


class OnlinePreferenceTrainer:
    """Sample, label by the score, learn from the pairs (online DPO, Guo et al. 2024, arXiv:2402.04792).

    Of each prompt's answers, the best-scored is chosen and the worst rejected; a prompt whose answers all
    score the same gives no pair. The pairs' margin is the difference of scores. Arguments are those of
    `rl.RlTrainer` and `PreferenceTrainer`.
    """

    def __init__(
        self,
        settings: config.OnlinePreferenceCandidate,
        model: config.Model,
        *,
        policy: PreTrainedModel,
        start: PreTrainedModel,
        reference: PreTrainedModel | None,
        score: Score,
        codec: TextCodec,
        prompts: Sequence[list[int]],
        seed: int,
        clock: Clock,
    ) -> None:
        self.settings, self.model, self.policy, self.clock = settings, model, policy, clock
        self.start, self.reference, self.codec = start, reference, codec
        self.objective = PairObjective(
            settings, model,
            policy=policy, reference=reference, moving=settings.reference_decay is not None,
            temperature=settings.temperature, has_margins=True,
        )  # fmt: skip
        self.rollouts = Rollouts(
            settings, model,
            policy=policy, score=score, codec=codec, prompts=prompts, seed=seed, clock=clock,
        )  # fmt: skip
        self.order = torch.Generator().manual_seed(seed + 1)
        updates = settings.epochs_per_step * settings.minibatches
        self.learner = Learner(
            policy, settings, total_updates=settings.steps * updates, ema_decay=settings.ema_decay
        )
        self.budget = Budget(settings.kl_budget_nats, policy)
        self.collected = 0
        self.steps_done = 0

    def run(self) -> Iterator[tuple[int, Rollout, dict[str, float]]]:
        """Yields (step, rollout, metrics) after each step; over the KL budget it ends.

        The first step is 1, or the one after a loaded state.
        """
        s = self.settings
        for step in range(self.steps_done + 1, s.steps + 1):
            rollout, pairs, metrics = self.collect()
            if not self._within_budget(metrics, step - 1):
                return
            metrics |= self._update(pairs)
            if self.reference is not None and s.reference_decay is not None:
                follow(self.reference, self.policy, s.reference_decay)
            self.steps_done = step
            yield step, rollout, metrics
        if s.kl_budget_nats is not None:
            self._within_budget(self.collect()[2], s.steps)

    def state_dict(self) -> dict[str, Any]:
        """All that `run` needs to go on after the step it is at, to the bit. Not copied."""
        return {
            "models": models_state(self.policy, self._moving),
            "learner": self.learner.state_dict(),
            "objective": self.objective.state_dict(),
            "rollouts": self.rollouts.state_dict(),
            "budget": self.budget.state_dict(),
            "order": self.order.get_state(),
            "collected": self.collected,
            "steps_done": self.steps_done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises ValueError if it is not of a trainer with these settings."""
        load_models_state(self.policy, self._moving, state["models"])
        self.learner.load_state_dict(state["learner"])
        self.objective.load_state_dict(state["objective"])
        self.rollouts.load_state_dict(state["rollouts"])
        self.budget.load_state_dict(state["budget"])
        self.order.set_state(state["order"])
        self.collected, self.steps_done = state["collected"], state["steps_done"]

    @property
    def position(self) -> int:
        """Steps that are done."""
        return self.steps_done

    @property
    def _moving(self) -> PreTrainedModel | None:
        return self.reference if self.objective.moving else None

    def _within_budget(self, metrics: dict[str, float], step: int) -> bool:
        kl_nats = metrics["policy/log_ratio_nats"]
        return self.budget.within(kl_nats, step=step, updates=self.learner.updates)

    def collect(self) -> tuple[Rollout, Pairs | None, dict[str, float]]:
        """Sample and label; None where no prompt gave a pair. The first batch is checked."""
        rollout = self.rollouts.collect()
        with self.clock("training"):
            pairs, metrics = self._labelled(rollout)
        self.collected += 1
        return rollout, pairs, metrics

    def _labelled(self, rollout: Rollout) -> tuple[Pairs | None, dict[str, float]]:
        s, device = self.settings, next(self.policy.parameters()).device
        groups = rollout.scores.view(-1, s.samples_per_prompt)
        first = torch.arange(len(groups)) * s.samples_per_prompt
        best, worst = groups.argmax(1) + first, groups.argmin(1) + first
        margins = rollout.scores[best] - rollout.scores[worst]
        decided = margins > 0
        sequences = Sequences.from_rows(
            rollout.prompts, [c.ids for c in rollout.completions], self.codec.pad_id
        ).to(device)
        batches = by_length(sequences, s.micro_batch_size)
        now, then = (
            scatter(sequences, batches, partial(self._logprobs, policy))
            for policy in (self.policy, self.start)
        )
        mask = sequences.response_mask
        metrics = {
            **rollout.described(sequences, now, then),
            "policy/pairs": float(decided.sum()),
        }
        if self.collected == 0:
            preflight.check_mask_selects_sampled(sequences, rollout.completions)
            preflight.check_reference(now, then, mask)
        if not bool(decided.any()):
            return None, metrics
        start = masked_sum(then.double(), mask, dim=1)
        chosen, rejected = best[decided], worst[decided]
        sides = sequences.select(chosen), sequences.select(rejected)
        ref: list[Tensor | None] = [None, None]
        if self.reference is self.start:
            ref = [start[chosen], start[rejected]]
        elif self.reference is not None and not self.objective.moving:
            size = s.micro_batch_size
            ref = [self.objective.all_logps(self.reference, side, size) for side in sides]
        pairs = Pairs(
            *sides, start[chosen], start[rejected], ref[0], ref[1], margins[decided].to(device)
        )
        return pairs, metrics

    def _update(self, pairs: Pairs | None) -> dict[str, float]:
        """All epochs and minibatches over the pairs; the mean of each metric."""
        if pairs is None:
            return {}
        s, found = self.settings, list[dict[str, float]]()
        size = -(-len(pairs) // s.minibatches)
        self.policy.train()
        lengths = (pairs.chosen.lengths + pairs.rejected.lengths).tolist()
        for epoch in range(s.epochs_per_step):
            for rows in length_sorted_batches(lengths, size, self.order):
                name = f"rollout {self.collected}, epoch {epoch + 1}, pairs {sorted(rows)[:8]}"
                with self.clock("training"):
                    found.append(
                        update(
                            self.objective, self.learner, pairs, rows, s.micro_batch_size, name=name
                        )
                    )
        return {key: sum(m[key] for m in found) / len(found) for key in found[0]}

    def _logprobs(self, policy: PreTrainedModel, part: Sequences) -> Tensor:
        return logprobs_of(policy, part, self.model, self.settings.temperature)


LOOKED_BACK = 20
"""Updates that `chosen_falls` takes the mean of; of earlier ones it needs the first only."""


def chosen_falls(history: Sequence[Mapping[str, float]], window: int = LOOKED_BACK) -> float | None:
    """How far the chosen answers' log-prob fell, nats, while the margin grew; None if it did not.

    A loss of the difference alone may lower both, and probability goes to answers that nobody
    compared (Pal et al. 2024, arXiv:2402.13228). Told from the means over the last `window` updates:
    the chosen lost by more than two standard errors, and the margin is above that of the first update.
    """
    if len(history) < 2 or "policy/margin" not in history[0]:
        return None
    last = history[-window:] if len(history) > window else history[1:]
    changes = [metrics["policy/chosen_logp_change_nats"] for metrics in last]
    mean = statistics.fmean(changes)
    error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
    margin = statistics.fmean(metrics["policy/margin"] for metrics in last)
    return -mean if mean < -2 * error and margin > history[0]["policy/margin"] else None


def update(
    objective: PairObjective,
    learner: Learner,
    pairs: Pairs,
    rows: list[int],
    micro_batch_size: int,
    *,
    name: str,
) -> dict[str, float]:
    """One optimizer step over a batch of pairs."""
    batch = objective.batch(pairs, rows, micro_batch_size)
    shares: list[tuple[float, Callable]] = [
        (float(len(micro)), partial(objective.loss, pairs, micro, batch))
        for micro in chunks(rows, micro_batch_size)
    ]
    metrics = learner.update(shares, name=name)
    objective.after(metrics, len(rows))
    return {f"policy/{key}": value for key, value in metrics.items()}
