"""Checks on the first batch, before the first update. A run that fails one does not train.

They catch what otherwise shows only as a policy that learns badly: shifted masks, dropout, another
temperature, a template that differs between sampling and training, a reference that is not the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlhf.errors import StageFailed
from rlhf.models.sequences import Sequences
from rlhf.rollout import Completion

RATIO_TOLERANCE = 1e-6
KL_TOLERANCE_NATS = 1e-6
SAMPLER_TOLERANCE_NATS = {"float32": 1e-3, "bfloat16": 0.5}


def check_mask_selects_sampled(sequences: Sequences, completions: Sequence[Completion]) -> None:
    """The mask must select exactly the tokens that were sampled, in order."""
    for row, completion in enumerate(completions):
        selected = sequences.response_ids[row][sequences.response_mask[row]].tolist()
        if selected != completion.ids:
            raise StageFailed(
                f"preflight: row {row}: the response mask selects {len(selected)} tokens that are "
                f"not the {len(completion.ids)} sampled ones\n"
                "  rule: training sees exactly what was sampled, end-of-sequence included"
            )


def check_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> float:
    """Largest |ratio - 1| before the first update; it must be 0."""
    worst = float((logprobs - old_logprobs)[mask].expm1().abs().max())
    if not worst <= RATIO_TOLERANCE:
        raise StageFailed(
            f"preflight: the ratio to the sampling policy is off 1 by {worst:.3g} before any update\n"
            "  rule: the same weights give the same log-probs\n"
            "  mend: set the model's dropout to 0; check that nothing in it is random"
        )
    return worst


def check_reference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> float:
    """Largest difference in nats to the reference at the start; the policy starts as the reference."""
    worst = float((logprobs - ref_logprobs)[mask].abs().max())
    if not worst <= KL_TOLERANCE_NATS:
        raise StageFailed(
            f"preflight: the log-probs differ from the reference's by {worst:.3g} nats before any "
            "update\n  rule: KL to the reference is 0 at the start"
        )
    return worst


def check_sampler(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, dtype: str) -> float:
    """Largest difference in nats between the sampler's log-probs and the trainer's."""
    worst = float((logprobs - sampler_logprobs)[mask].abs().max())
    limit = SAMPLER_TOLERANCE_NATS[dtype]
    if not worst <= limit:
        raise StageFailed(
            f"preflight: sampler and trainer differ by {worst:.3g} nats on the same tokens\n"
            f"  rule: at most {limit:g} nats in {dtype}\n"
            "  mend: check temperature, chat template and padding; they must be the same in both"
        )
    return worst
