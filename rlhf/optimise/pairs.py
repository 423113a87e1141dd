"""A weighted sum of preference losses over a table of pairs, wherever the pairs come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.algos import parts
from rlhf.algos.masking import masked_sum
from rlhf.algos.preference_losses import PREFERENCE_LOSSES, weighted_sum
from rlhf.algos.types import LossOutput
from rlhf.data.batching import chunks
from rlhf.errors import StageFailed
from rlhf.models.sequences import Sequences
from rlhf.optimise.forward import by_length, logprobs_of

OF_PAIRS = frozenset(
    {"chosen_logps", "rejected_logps", "chosen_mean_logps", "rejected_mean_logps"}
    | {"chosen_lengths", "rejected_lengths"}
)
OF_REFERENCE = frozenset({"ref_chosen_logps", "ref_rejected_logps", "reward_shift"})
OF_EXAMPLES = frozenset({"logps", "desirable"})
OF_REFERENCE_EXAMPLES = frozenset({"ref_logps", "kl_nats"})


@dataclass(frozen=True)
class Pairs:
    """N pairs on the policy's device. start_*, ref_*: (N,) nats, constants; margins: (N,) >= 0 or None.

    ref_* are None without a reference, or where it moves and is asked anew for each batch.
    """

    chosen: Sequences
    rejected: Sequences
    start_chosen: Tensor
    start_rejected: Tensor
    ref_chosen: Tensor | None
    ref_rejected: Tensor | None
    margins: Tensor | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    def select(self, rows: list[int]) -> Pairs:
        """Some of the pairs."""
        return Pairs(**{f.name: _rows(getattr(self, f.name), rows) for f in fields(self)})


@dataclass(frozen=True)
class Batch:
    """What the losses need of a whole batch, the same for each of its micro-batches."""

    num_pairs: int
    kl_nats: Tensor | None
    reward_shift: Tensor


class PairObjective:
    """The declared losses, called with what each reads.

    Args:
        settings: losses, length_normalized.
        policy: trained. reference: of the log-ratios, or None.
        moving: the reference follows the policy, so that its log-probs are asked for each batch.
    """

    def __init__(
        self,
        settings: config.PreferenceCandidate | config.OnlinePreferenceCandidate,
        model: config.Model,
        *,
        policy: PreTrainedModel,
        reference: PreTrainedModel | None,
        moving: bool,
        temperature: float = 1.0,
        has_margins: bool = False,
    ) -> None:
        self.settings, self.model = settings, model
        self.policy, self.reference, self.moving = policy, reference, moving
        self.temperature = temperature
        self.terms = pair_parts(
            settings, has_reference=reference is not None, has_margins=has_margins
        )
        self.reads = {name for _, part in self.terms for name in parts.inputs(part)}
        self.shift_total, self.shift_count = 0.0, 0

    def logps(self, policy: PreTrainedModel, part: Sequences) -> Tensor:
        """(B,) log-prob of each whole response, nats; float64, so that padding does not change a sum."""
        logprobs = logprobs_of(policy, part, self.model, self.temperature)
        return masked_sum(logprobs.double(), part.response_mask, dim=1)

    @torch.no_grad()
    def all_logps(self, policy: PreTrainedModel, sequences: Sequences, size: int) -> Tensor:
        """(N,) on the sequences' device, `size` of similar length at a time."""
        device = sequences.prompt_ids.device
        result = torch.zeros(len(sequences), dtype=torch.float64, device=device)
        for rows in by_length(sequences, size):
            result[rows] = self.logps(policy, sequences.select(rows))
        return result

    def batch(self, pairs: Pairs, rows: list[int], size: int) -> Batch:
        """The constants of one batch; `size` pairs at a time where a forward pass is needed."""
        device = pairs.chosen.prompt_ids.device
        mean = self.shift_total / self.shift_count if self.shift_count else 0.0
        shift = torch.tensor(mean, dtype=torch.float64, device=device)
        kl = self._mismatched_kl(pairs.chosen, rows, size) if "kl_nats" in self.reads else None
        return Batch(len(rows), kl, shift)

    def loss(self, pairs: Pairs, rows: list[int], batch: Batch) -> LossOutput:
        """The share of some rows in the loss of their batch; metrics are means over them.

        With several terms, `<kind>_loss` is each one's own, before its weight.
        """
        part_of = pairs.select(rows)
        chosen = self.logps(self.policy, part_of.chosen)
        rejected = self.logps(self.policy, part_of.rejected)
        available = self._inputs(part_of, chosen, rejected)
        available |= {"kl_nats": batch.kl_nats, "reward_shift": batch.reward_shift}
        outputs: dict[str, LossOutput] = {}
        metrics: dict[str, Tensor] = {}
        for term, part in self.terms:
            of_examples = bool(OF_EXAMPLES.intersection(parts.inputs(part)))
            output = parts.call(
                part,
                available,
                denominator=batch.num_pairs * (2 if of_examples else 1),
                **term.arguments(),
            )
            outputs[term.kind.rpartition(".")[2]] = output
            if "reward_shift" in parts.inputs(part):
                metrics["reward_level"] = _level(term.kind, output.metrics)
        weights = {name: term.weight for name, (term, _) in zip(outputs, self.terms, strict=True)}
        loss, found = weighted_sum(outputs, weights, share=len(rows) / batch.num_pairs)
        if len(outputs) == 1:
            del found[f"{next(iter(outputs))}_loss"]  # the loss itself
        metrics |= found
        metrics["chosen_logp_change_nats"] = (chosen.detach() - part_of.start_chosen).mean()
        metrics["rejected_logp_change_nats"] = (rejected.detach() - part_of.start_rejected).mean()
        return LossOutput(loss, metrics)

    def after(self, metrics: dict[str, float], num_pairs: int) -> None:
        """Takes the batch's implicit rewards into the running mean that `reward_shift` reads."""
        if "reward_shift" in self.reads:
            self.shift_total += metrics["reward_level"] * num_pairs
            self.shift_count += num_pairs

    def state_dict(self) -> dict[str, Any]:
        """The running mean that `reward_shift` reads."""
        return {"shift_total": self.shift_total, "shift_count": self.shift_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.shift_total, self.shift_count = state["shift_total"], state["shift_count"]

    def _inputs(self, part: Pairs, chosen: Tensor, rejected: Tensor) -> dict[str, Any]:
        lengths = part.chosen.lengths, part.rejected.lengths
        ref = self._reference(part)
        found: dict[str, Any] = {
            "chosen_mean_logps": chosen / lengths[0],
            "rejected_mean_logps": rejected / lengths[1],
            "chosen_lengths": lengths[0],
            "rejected_lengths": lengths[1],
            "margins": part.margins,
        }
        if self.settings.length_normalized:
            chosen, rejected = found["chosen_mean_logps"], found["rejected_mean_logps"]
            ref = None if ref is None else (ref[0] / lengths[0], ref[1] / lengths[1])
        desirable = torch.zeros(2 * len(part), dtype=torch.bool, device=chosen.device)
        desirable[: len(part)] = True
        found |= {
            "chosen_logps": chosen,
            "rejected_logps": rejected,
            "logps": torch.cat([chosen, rejected]),
            "desirable": desirable,
        }
        if ref is not None:
            found |= {
                "ref_chosen_logps": ref[0],
                "ref_rejected_logps": ref[1],
                "ref_logps": torch.cat(ref),
            }
        return found

    def _reference(self, part: Pairs) -> tuple[Tensor, Tensor] | None:
        if self.reference is None:
            return None
        if self.moving:
            with torch.no_grad():
                return (
                    self.logps(self.reference, part.chosen),
                    self.logps(self.reference, part.rejected),
                )
        assert part.ref_chosen is not None and part.ref_rejected is not None
        return part.ref_chosen, part.ref_rejected

    @torch.no_grad()
    def _mismatched_kl(self, chosen: Sequences, rows: list[int], size: int) -> Tensor:
        """Mean log-ratio, at least 0, of prompts with the chosen answer to another (KTO, eq. 6).

        The answer is the next one in the batch that was given to another prompt; a batch with one
        prompt only has no mismatch to measure, and its reference point is 0.
        """
        assert self.reference is not None
        total = torch.zeros((), dtype=torch.float64, device=chosen.prompt_ids.device)
        partners = _of_another_prompt(chosen, rows)
        if not partners:
            return total
        prompts, answers = map(list, zip(*partners, strict=True))
        swapped = Sequences(
            chosen.prompt_ids[prompts],
            chosen.prompt_mask[prompts],
            chosen.response_ids[answers],
            chosen.response_mask[answers],
        )
        for micro in chunks(list(range(len(partners))), size):
            part = swapped.select(micro)
            ratio = self.logps(self.policy, part) - self.logps(self.reference, part)
            if self.settings.length_normalized:
                ratio = ratio / part.lengths
            total = total + ratio.sum()
        return (total / len(partners)).clamp(min=0)


def _of_another_prompt(sequences: Sequences, rows: list[int]) -> list[tuple[int, int]]:
    """Each row with the next one, round and round, that has another prompt."""
    prompts = {
        row: tuple(sequences.prompt_ids[row][sequences.prompt_mask[row]].tolist()) for row in rows
    }
    found = []
    for i, row in enumerate(rows):
        others = (o for o in rows[i + 1 :] + rows[:i] if prompts[o] != prompts[row])
        found += [(row, other) for other in [next(others, None)] if other is not None]
    return found


def pair_parts(
    settings: config.PreferenceCandidate | config.OnlinePreferenceCandidate,
    *,
    has_reference: bool,
    has_margins: bool,
) -> list[tuple[config.Term, Callable[..., LossOutput]]]:
    """The declared terms with their functions. Raises ValueError if a part of yours does not fit."""
    available = OF_PAIRS | OF_EXAMPLES
    if has_reference:
        available |= OF_REFERENCE | OF_REFERENCE_EXAMPLES
    if has_margins:
        available |= {"margins"}
    found = []
    for term in settings.losses:
        part = parts.resolve(PREFERENCE_LOSSES, term.kind, "losses")
        parts.check(part, f"losses: {term.kind}", available, term.arguments(), {"denominator"})
        found.append((term, part))
    reads = {name for _, part in found for name in parts.inputs(part)}
    if has_reference and not reads & (OF_REFERENCE | OF_REFERENCE_EXAMPLES):
        raise ValueError(f"reference={settings.reference}: no loss reads it; set it to none")
    return found


def _level(kind: str, metrics: Mapping[str, Tensor]) -> Tensor:
    """Mean implicit reward of the answers, in the units of the loss that reads `reward_shift`."""
    try:
        return (metrics["chosen_reward"] + metrics["rejected_reward"]) / 2
    except KeyError as error:
        raise StageFailed(
            f"losses: {kind} reads reward_shift and does not report {error}\n"
            "  mend: report chosen_reward and rejected_reward, whose mean the shift follows"
        ) from None


def _rows(column: Sequences | Tensor | None, rows: list[int]) -> Any:
    if isinstance(column, Sequences):
        return column.select(rows)
    return None if column is None else column[rows]
