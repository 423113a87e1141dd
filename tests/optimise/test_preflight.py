"""The checks before the first update: each passes what is right and refuses what is off."""

from __future__ import annotations

import math

import pytest
import tiny
import torch

from rlhf.errors import StageFailed
from rlhf.models.sequences import Sequences
from rlhf.optimise import preflight
from rlhf.rollout import Completion

MASK = torch.tensor([[True, True, False], [True, True, True]])
LOGPROBS = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -0.25, -3.0]])


def shifted(amount: float) -> torch.Tensor:
    other = LOGPROBS.clone()
    other[1, 2] += amount
    return other


def test_equal_numbers_pass_and_padding_is_not_read() -> None:
    other = torch.where(MASK, LOGPROBS, 99.0)
    assert preflight.check_ratio(LOGPROBS, other, MASK) == 0
    assert preflight.check_reference(LOGPROBS, other, MASK) == 0
    assert preflight.check_sampler(LOGPROBS, other, MASK, "float32") == 0


@pytest.mark.parametrize("amount", [1e-5, -1e-5, 3.0, math.nan, math.inf, -math.inf])
def test_one_token_off_is_refused(amount: float) -> None:
    with pytest.raises(StageFailed, match="ratio to the sampling policy"):
        preflight.check_ratio(LOGPROBS, shifted(amount), MASK)
    with pytest.raises(StageFailed, match="differ from the reference"):
        preflight.check_reference(LOGPROBS, shifted(amount), MASK)


def test_the_ratio_itself_is_measured() -> None:
    # The reported deviation is |e^.5 - 1|, not the log-ratio.
    with pytest.raises(StageFailed, match=r"off 1 by 0\.649"):
        preflight.check_ratio(shifted(0.5), LOGPROBS, MASK)


def test_sampler_has_a_tolerance_by_precision() -> None:
    assert preflight.check_sampler(shifted(9e-4), LOGPROBS, MASK, "float32") > 8e-4
    with pytest.raises(StageFailed, match="sampler and trainer differ"):
        preflight.check_sampler(shifted(2e-3), LOGPROBS, MASK, "float32")
    preflight.check_sampler(shifted(0.4), LOGPROBS, MASK, "bfloat16")
    for amount in (0.6, math.nan):
        with pytest.raises(StageFailed, match="sampler and trainer differ"):
            preflight.check_sampler(shifted(amount), LOGPROBS, MASK, "bfloat16")


def completions(*rows: list[int]) -> list[Completion]:
    return [Completion(ids, [-1.0] * len(ids), ids[-1] == tiny.EOS) for ids in rows]


def test_the_mask_selects_exactly_what_was_sampled() -> None:
    sampled = completions([5, 6, 1], [7], [1])
    good = Sequences.from_rows([[3]] * 3, [[5, 6, 1], [7], [1]], tiny.EOS)
    preflight.check_mask_selects_sampled(good, sampled)
    mask = good.response_mask
    without_end = Sequences(
        good.prompt_ids, good.prompt_mask, good.response_ids, mask & (good.response_ids != 1)
    )
    with pytest.raises(StageFailed, match="row 0: the response mask selects 2 tokens"):
        preflight.check_mask_selects_sampled(without_end, sampled)
    one_more = mask.clone()
    one_more[1, 1] = True
    with_padding = Sequences(good.prompt_ids, good.prompt_mask, good.response_ids, one_more)
    with pytest.raises(StageFailed, match="row 1: the response mask selects 2 tokens"):
        preflight.check_mask_selects_sampled(with_padding, sampled)
    other = Sequences.from_rows([[3]] * 3, [[5, 7, 1], [7], [1]], tiny.EOS)
    with pytest.raises(StageFailed, match="row 0"):
        preflight.check_mask_selects_sampled(other, sampled)
