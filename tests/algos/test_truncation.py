"""Responses that the length limit cut: kept, masked, or paid for in score."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.algos import parts
from rlhf.algos.masking import reduce, reduction_denominator
from rlhf.algos.truncation import (
    TRUNCATION,
    Truncation,
    mask_truncated,
    missing_eos_penalty,
    soft_overlong_penalty,
)

NAN = float("nan")
ENDED = torch.tensor([True, False, True])
SCORES = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
LENGTHS = torch.tensor([5, 10, 8])


def test_a_row_that_was_cut_is_left_out_whole() -> None:  # C31
    # The first row has 4 tokens, the second, cut, 6: the mean is over 4.
    response_mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    mask = mask_truncated(response_mask, torch.tensor([True, False]))
    assert mask.tolist() == [[True] * 4 + [False] * 2, [False] * 6]
    per_token = torch.tensor([[0.0, 1, 2, 3, NAN, NAN], [NAN] * 6], requires_grad=True)
    loss = reduce(per_token, mask)
    loss.backward()
    assert loss.item() == 1.5  # (0 + 1 + 2 + 3) / 4
    assert per_token.grad is not None
    assert per_token.grad.tolist() == [[0.25] * 4 + [0] * 2, [0] * 6]
    assert reduction_denominator(mask, "sequence_mean").item() == 1


def test_a_batch_that_was_cut_throughout_adds_nothing() -> None:  # C31
    mask = mask_truncated(torch.ones(2, 3, dtype=torch.bool), torch.tensor([False, False]))
    per_token = torch.full((2, 3), NAN, requires_grad=True)
    loss = reduce(per_token, mask, denominator=4.0)
    loss.backward()
    assert loss.item() == 0
    assert per_token.grad is not None
    assert not per_token.grad.any()
    with pytest.raises(ValueError, match="selects nothing"):
        reduce(per_token, mask)


def test_the_penalty_for_a_missing_end_is_taken_off() -> None:
    assert missing_eos_penalty(SCORES, ENDED, penalty=1.5).tolist() == [1, 0.5, -3]
    assert missing_eos_penalty(SCORES, ENDED, penalty=0.0).tolist() == [1, 2, -3]


@pytest.mark.parametrize(
    ("length", "offset"),
    [
        # max 20, buffer 8: 0 to 12 tokens, then an eighth per token, -1 from 20 on.
        (0, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (19, -0.875), (20, -1.0), (30, -1.0),
    ],
)  # fmt: skip
def test_soft_overlong_penalty_by_hand(length: int, offset: float) -> None:
    lengths = torch.tensor([length])
    actual = soft_overlong_penalty(lengths, max_length=20, buffer=8)
    assert actual.dtype == torch.float32
    assert actual.tolist() == [offset]
    tripled = soft_overlong_penalty(lengths, max_length=20, buffer=8, penalty=3.0)
    assert tripled.tolist() == [3 * offset]


def test_the_buffer_may_be_all_or_one_token() -> None:
    lengths = torch.tensor([0, 1, 3, 4])
    whole = soft_overlong_penalty(lengths, max_length=4, buffer=4)
    assert whole.tolist() == [0, -0.25, -0.75, -1]
    step = soft_overlong_penalty(lengths, max_length=4, buffer=1)
    assert step.tolist() == [0, 0, 0, -1]


def treated(name: str, **options: float) -> Truncation:
    available = {"scores": SCORES, "ended": ENDED, "lengths": LENGTHS, "max_length": 10}
    parts.check(TRUNCATION[name], name, frozenset(available), options)
    result = parts.call(TRUNCATION[name], available, **options)
    assert isinstance(result, Truncation)
    return result


@pytest.mark.parametrize(
    ("name", "options", "scores", "keep", "penalty"),
    [
        ("keep", {}, [1, 2, -3], None, 0.0),
        ("mask", {}, [1, 2, -3], [True, False, True], 0.0),
        ("missing_eos", {"penalty": 1.5}, [1, 0.5, -3], None, 0.5),  # 1.5 / 3
        # Of lengths 5, 10, 8 with max 10 and buffer 4: 0, 1 and 1/2; mean 1/2.
        ("soft_overlong", {"buffer": 4}, [1, 1, -3.5], None, 0.5),
        (
            "soft_overlong",
            {"buffer": 4, "penalty": 2.0},
            [1, 0, -4],
            None,
            1.0,
        ),
    ],
)
def test_treatments_by_hand(
    name: str,
    options: dict[str, float],
    scores: list[float],
    keep: list[bool] | None,
    penalty: float,
) -> None:
    result = treated(name, **options)
    assert result.scores.dtype == torch.float64
    assert result.scores.tolist() == scores
    assert (None if result.keep is None else result.keep.tolist()) == keep
    assert result.metrics.keys() == {"truncated_fraction", "truncation_penalty_mean"}
    assert result.metrics["truncated_fraction"].item() == pytest.approx(1 / 3, abs=1e-12)
    assert result.metrics["truncation_penalty_mean"].item() == pytest.approx(penalty, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scores_keep_their_type(dtype: torch.dtype) -> None:
    available = {"scores": SCORES.to(dtype), "ended": ENDED, "lengths": LENGTHS, "max_length": 10}
    result = parts.call(TRUNCATION["soft_overlong"], available, buffer=4)
    assert result.scores.dtype == dtype


def test_every_treatment_is_tested() -> None:
    assert list(TRUNCATION) == ["keep", "mask", "missing_eos", "soft_overlong"]
    assert SCORES.tolist() == [1, 2, -3]  # nothing was changed in place


@pytest.mark.parametrize("name", list(TRUNCATION))
def test_metrics_carry_no_graph(name: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "missing_eos": {"penalty": 1.0},
        "soft_overlong": {"buffer": 2},
    }
    available = {
        "scores": SCORES.clone().requires_grad_(),
        "ended": ENDED,
        "lengths": LENGTHS,
        "max_length": 10,
    }
    result = parts.call(TRUNCATION[name], available, **options.get(name, {}))
    assert all(x.shape == () and not x.requires_grad for x in result.metrics.values())


def refusal(name: str, scores: Tensor, ended: Tensor, lengths: Tensor, **options: float) -> str:
    with pytest.raises(ValueError, match=r"\S") as error:
        parts.call(
            TRUNCATION[name],
            {"scores": scores, "ended": ended, "lengths": lengths, "max_length": 10},
            **options,
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("keep", {}),
        ("mask", {}),
        ("missing_eos", {"penalty": 1.0}),
        ("soft_overlong", {"buffer": 4}),
    ],
)
def test_refusals_of_treatments(name: str, options: dict[str, float]) -> None:
    def why(scores: Tensor = SCORES, ended: Tensor = ENDED, lengths: Tensor = LENGTHS) -> str:
        return refusal(name, scores, ended, lengths, **options)

    assert "shapes differ" in why(scores=SCORES[:2])
    assert "must be bool" in why(ended=ENDED.long())
    assert "devices differ" in why(scores=SCORES.to("meta"))
    assert why(SCORES[:0], ENDED[:0], LENGTHS[:0]) == "there are no sequences"
    if name == "soft_overlong":
        assert "shapes differ" in why(lengths=LENGTHS[:2])


def test_refusals() -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    for fault, refused in (
        ("shapes differ", lambda: mask_truncated(mask, ENDED[:2])),
        ("must be bool", lambda: mask_truncated(mask, ENDED.long())),
        ("must be bool", lambda: mask_truncated(mask.long(), ENDED)),
        ("devices differ", lambda: mask_truncated(mask, ENDED.to("meta"))),
        ("shapes differ", lambda: missing_eos_penalty(SCORES, ENDED[:2], penalty=1.0)),
        (
            "penalty must be >= 0, got -0.1",
            lambda: missing_eos_penalty(SCORES, ENDED, penalty=-0.1),
        ),
        ("penalty must be >= 0, got nan", lambda: missing_eos_penalty(SCORES, ENDED, penalty=NAN)),
        (
            "1 <= buffer <= max_length, got 0 and 9",
            lambda: soft_overlong_penalty(LENGTHS, max_length=9, buffer=0),
        ),
        (
            "1 <= buffer <= max_length, got 10 and 9",
            lambda: soft_overlong_penalty(LENGTHS, max_length=9, buffer=10),
        ),
        (
            "penalty must be >= 0",
            lambda: soft_overlong_penalty(LENGTHS, max_length=9, buffer=1, penalty=-1.0),
        ),
        (
            r"lengths must be >= 0, got \[3, -1\]",
            lambda: soft_overlong_penalty(torch.tensor([3, -1]), max_length=9, buffer=1),
        ),
    ):
        with pytest.raises(ValueError, match=fault):
            refused()
