"""Joining the metrics of micro-batches."""

import math

import pytest
import torch

from rlhf.algos.types import combine_metrics


def test_combine_metrics_by_hand() -> None:
    # (1 * 10 + 3 * 30) / 40 = 2.5; the largest 7; a part of weight 0 may hold anything.
    parts = [
        {"a": torch.tensor(1.0), "ratio_max": torch.tensor(7.0)},
        {"a": torch.tensor(3.0), "ratio_max": torch.tensor(2.0)},
        {"a": torch.tensor(math.nan), "ratio_max": torch.tensor(99.0)},
    ]
    joined = combine_metrics(parts, [10, torch.tensor(30), 0])
    assert joined["a"].item() == 2.5
    assert joined["ratio_max"].item() == 7
    with pytest.raises(ValueError, match="not all 0"):
        combine_metrics(parts, [0, 0, 0])
    with pytest.raises(ValueError, match="3 metrics but 1 weights"):
        combine_metrics(parts, [1])
    with pytest.raises(ValueError, match="different metrics"):
        combine_metrics([*parts, {}], [1, 1, 1, 1])


def test_combine_metrics_refuses_a_single_negative_weight() -> None:
    parts = [{"a": torch.tensor(1.0)}, {"a": torch.tensor(3.0)}]
    with pytest.raises(ValueError, match="weights must be >= 0"):
        combine_metrics(parts, [3, -1])
    # A share below 1 is a weight, too: (1 * .25 + 3 * .25) / .5
    assert combine_metrics(parts, [0.25, 0.25])["a"].item() == 2


def test_joined_metrics_carry_no_graph() -> None:
    parts = [{"a": torch.tensor(1.0, requires_grad=True), "a_max": torch.tensor(1.0)}]
    parts[0]["a_max"].requires_grad_()
    assert not any(x.requires_grad for x in combine_metrics(parts, [1]).values())
