"""Learning from pairs directly (DPO and kin): no reward model, no sampling in the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.algos.masking import masked_sum
from rlhf.algos.preference_losses import PREFERENCE_LOSSES
from rlhf.algos.types import LossOutput
from rlhf.data.batching import chunks, length_sorted_batches
from rlhf.learner import Learner
from rlhf.models.sequences import Sequences
from rlhf.optimise import preflight
from rlhf.optimise.forward import by_length, logprobs_of
from rlhf.progress import Clock


@dataclass(frozen=True)
class PairIds:
    """One comparison as token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class PreferenceTrainer:
    """One candidate's loop over pairs. The reference's log-probs are computed once, before training."""

    def __init__(
        self,
        settings: config.PreferenceCandidate,
        model: config.Model,
        *,
        policy: PreTrainedModel,
        reference: PreTrainedModel,
        pairs: Sequence[PairIds],
        pad_id: int,
        seed: int,
        clock: Clock,
    ) -> None:
        self.settings, self.model, self.policy, self.clock = settings, model, policy, clock
        device = next(policy.parameters()).device
        prompts = [pair.prompt for pair in pairs]
        self.chosen = Sequences.from_rows(prompts, [p.chosen for p in pairs], pad_id).to(device)
        self.rejected = Sequences.from_rows(prompts, [p.rejected for p in pairs], pad_id).to(device)
        self.lengths = [len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs]
        self.order = torch.Generator().manual_seed(seed)
        with clock("training"):
            self.ref_chosen = self._all_logps(reference, self.chosen)
            self.ref_rejected = self._all_logps(reference, self.rejected)
        per_epoch = -(-len(pairs) // settings.batch_size)
        self.total_updates = per_epoch * settings.epochs
        self.learner = Learner(policy, settings, total_updates=self.total_updates)
        self._preflight()

    def run(self) -> Iterator[tuple[int, int, dict[str, float]]]:
        """Yields (update from 1, response tokens trained on, metrics)."""
        s = self.settings
        self.policy.train()
        for epoch in range(s.epochs):
            for rows in length_sorted_batches(self.lengths, s.batch_size, self.order):
                shares = [
                    (float(len(micro)), partial(self._loss, micro, len(rows)))
                    for micro in chunks(rows, s.micro_batch_size)
                ]
                with self.clock("training"):
                    metrics = self.learner.update(
                        shares, name=f"epoch {epoch + 1}, pairs {sorted(rows)[:8]}"
                    )
                tokens = int(self.chosen.lengths[rows].sum() + self.rejected.lengths[rows].sum())
                yield self.learner.updates, tokens, {f"policy/{k}": v for k, v in metrics.items()}

    def _loss(self, rows: list[int], num_pairs: int) -> LossOutput:
        s = self.settings
        options: dict[str, Any] = (
            {"label_smoothing": s.label_smoothing} if s.label_smoothing else {}
        )
        return PREFERENCE_LOSSES[s.loss](
            self._logps(self.policy, self.chosen.select(rows)),
            self._logps(self.policy, self.rejected.select(rows)),
            self.ref_chosen[rows],
            self.ref_rejected[rows],
            beta=s.beta,
            denominator=num_pairs,
            **options,
        )

    def _logps(self, policy: PreTrainedModel, part: Sequences) -> Tensor:
        """(B,) log-prob of each whole response, nats; float64, so that padding does not change a sum."""
        return masked_sum(logprobs_of(policy, part, self.model).double(), part.response_mask, dim=1)

    def _all_logps(self, policy: PreTrainedModel, sequences: Sequences) -> Tensor:
        """(B,), batch by batch as training does."""
        device = sequences.prompt_ids.device
        result = torch.zeros(len(sequences), dtype=torch.float64, device=device)
        with torch.no_grad():
            for rows in by_length(sequences, self.settings.micro_batch_size):
                result[rows] = self._logps(policy, sequences.select(rows))
        return result

    def _preflight(self) -> None:
        """The policy starts as the reference: the first batch's log-probs are equal in train mode."""
        batch = by_length(self.chosen, self.settings.micro_batch_size)[0]
        part = self.chosen.select(batch)
        self.policy.train()
        with torch.no_grad():
            logps = self._logps(self.policy, part)
        everything = torch.ones_like(logps, dtype=torch.bool)
        preflight.check_reference(logps, self.ref_chosen[batch], everything)
