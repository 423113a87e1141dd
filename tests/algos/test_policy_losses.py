"""Policy and value losses by hand."""

import math

import pytest
import torch
from torch import Tensor

from rlhf.algos.policy_losses import (
    POLICY_LOSSES,
    clipped_policy_loss,
    clipped_value_loss,
    dual_clip_policy_loss,
    entropy_bonus,
    reinforce_loss,
)

NAN = float("nan")


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def log_row(*ratios: float) -> Tensor:
    return row(*ratios).log()


ONE = torch.tensor([[True]])
BOTH = torch.tensor([[True, True]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # -min(r A, clip(r, .8, 1.2) A) and its derivative to log r, which is -r A or 0 if clipped.
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # clipped from above
        (0.5, 2.0, -1.0, -1.0),  # a good token that became unlikely still pulls
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became likely still pushes
        (0.5, -2.0, 1.6, 0.0),  # clipped from below
        (5.0, -1.0, 5.0, 5.0),  # T6: the objective is -5, unbounded
    ],
)
def test_clipped_policy_loss_by_hand(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    logprobs = (log_row(ratio) - 1).requires_grad_()
    output = clipped_policy_loss(logprobs, row(-1), row(advantage), ONE)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["clip_fraction"].item() == (1.0 if slope == 0 else 0.0)


def test_clip_bounds_are_separate() -> None:
    # clip(.5, .9, 1.3) = .9 with A = -1; clip(1.5, .9, 1.3) = 1.3 with A = 2: (.9 - 2.6) / 2.
    output = clipped_policy_loss(
        log_row(0.5, 1.5), row(0, 0), row(-1, 2), BOTH, clip_low=0.1, clip_high=0.3
    )
    assert output.loss.item() == pytest.approx(-0.85, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (5.0, -1.0, -3.0, 0.0),  # T6
        (2.0, -1.0, -2.0, 2.0),  # below the floor's ratio
        (0.5, -1.0, -0.8, 0.0),
        (5.0, 1.0, 1.2, 0.0),  # A > 0 knows no floor
        (1.0, 1.0, 1.0, -1.0),
    ],
)
def test_dual_clip_by_hand(ratio: float, advantage: float, objective: float, slope: float) -> None:
    logprobs = log_row(ratio).requires_grad_()
    output = dual_clip_policy_loss(logprobs, row(0), row(advantage), ONE, dual_clip=3.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-objective, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["clip_fraction"].item() == (1.0 if slope == 0 else 0.0)


def test_reinforce_loss_by_hand() -> None:
    # -(2 * -1 + -3 * -4) / 2 = -5, slopes -A / 2.
    logprobs = row(-1, -4).requires_grad_()
    output = reinforce_loss(logprobs, row(-1, -4), row(2, -3), BOTH)
    output.loss.backward()
    assert output.loss.item() == -5
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1, 1.5]]
    assert output.metrics["clip_fraction"].item() == 0


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_metrics_by_hand(name: str) -> None:
    # Ratios 2 and .25 count, 100 is padding. k3 of KL(old || policy): r - 1 - log r, so
    # 1 - log 2 and -.75 + log 4, mean (.25 + log 2) / 2. |r - 1|: 1 and .75.
    output = POLICY_LOSSES[name](
        log_row(2, 0.25, 100),
        row(0, 0, 0),
        row(0, 0, 0),
        torch.tensor([[True, True, False]]),
    )
    assert set(output.metrics) == {
        "clip_fraction",
        "kl_old_nats",
        "ratio_max",
        "ratio_deviation_max",
    }
    expected = (0.25 + math.log(2)) / 2
    assert output.metrics["kl_old_nats"].item() == pytest.approx(expected, abs=1e-12)
    assert output.metrics["ratio_max"].item() == pytest.approx(2, abs=1e-12)
    assert output.metrics["ratio_deviation_max"].item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_ratio_is_one_before_the_first_update(name: str) -> None:  # C49
    logprobs = torch.randn(3, 4).requires_grad_()
    mask = torch.ones(3, 4, dtype=torch.bool)
    same = POLICY_LOSSES[name](logprobs, logprobs, torch.ones(3, 4), mask)
    assert same.metrics["ratio_deviation_max"].item() < 1e-6
    assert same.metrics["kl_old_nats"].item() == 0
    # The old policy is a constant even when it is the same tensor: the gradient does not cancel.
    same.loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad < 0).all()
    # One ratio below 1 shows, too, though the largest ratio stays 1.
    old = logprobs.detach().clone()
    old[0, 0] += 0.01
    moved = POLICY_LOSSES[name](logprobs, old, torch.ones(3, 4), mask)
    assert moved.metrics["ratio_deviation_max"].item() == pytest.approx(1 - math.exp(-0.01), 1e-3)


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [
        # old = 1, R = 3, clip .5. Plain error (v - 3)^2 / 2; near old: (clamp(v, .5, 1.5) - 3)^2/2.
        (1.2, 1.62, -1.8, 0.0),  # inside the clip: both are 1.8^2 / 2
        (2.0, 1.125, 0.0, 1.0),  # max(1, 1.5^2) / 2: moved far enough
        (0.0, 4.5, -3.0, 0.0),  # max(9, 2.5^2) / 2: away from R, not clipped
    ],
)
def test_clipped_value_loss_by_hand(
    value: float, loss: float, slope: float, clipped: float
) -> None:
    values = row(value).requires_grad_()
    output = clipped_value_loss(values, row(1), row(3), ONE, clip=0.5)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["value_clip_fraction"].item() == clipped


def test_values_near_the_old_ones_are_not_counted_as_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    old_values, returns = torch.randn(2, 100, 300, generator=generator)
    values = old_values + 0.9 * torch.rand(100, 300, generator=generator) - 0.45
    mask = torch.ones(100, 300, dtype=torch.bool)
    output = clipped_value_loss(values, old_values, returns, mask, clip=0.5)
    assert output.metrics["value_clip_fraction"].item() == 0


def test_value_loss_without_clip() -> None:
    # ((2 - 3)^2 + (5 - 3)^2) / 2 / 2 tokens
    output = clipped_value_loss(row(2, 5, NAN), row(1, 1, 1), row(3, 3, 3),
                                torch.tensor([[True, True, False]]), clip=None)  # fmt: skip
    assert output.loss.item() == 1.25
    assert output.metrics["value_mean"].item() == 3.5
    assert output.metrics["return_mean"].item() == 3
    assert output.metrics["value_clip_fraction"].item() == 0


def test_entropy_bonus_is_minus_the_mean() -> None:
    output = entropy_bonus(row(1, 2, NAN), torch.tensor([[True, True, False]]))
    assert output.loss.item() == -1.5
    assert output.metrics["entropy_nats"].item() == 1.5


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_refusals(name: str) -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="selects nothing"):
        POLICY_LOSSES[name](x, x, x, ~BOTH)
    with pytest.raises(ValueError, match="shapes differ"):
        POLICY_LOSSES[name](x, x[:, :1], x, BOTH)
    with pytest.raises(ValueError, match="shapes differ"):
        POLICY_LOSSES[name](x, x, x[:, :1], BOTH)
    with pytest.raises(ValueError, match="must be bool"):
        POLICY_LOSSES[name](x, x, x, torch.ones(1, 2))
    with pytest.raises(ValueError, match="unknown reduction"):
        POLICY_LOSSES[name](x, x, x, BOTH, reduction="mean")


def test_bounds_are_checked() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="clip_low"):
        clipped_policy_loss(x, x, x, BOTH, clip_low=1.1)
    with pytest.raises(ValueError, match="clip_high"):
        clipped_policy_loss(x, x, x, BOTH, clip_high=-0.1)
    with pytest.raises(ValueError, match="dual_clip"):
        dual_clip_policy_loss(x, x, x, BOTH, dual_clip=1.0)
    with pytest.raises(ValueError, match="clip must be"):
        clipped_value_loss(x, x, x, BOTH, clip=0.0)
    with pytest.raises(ValueError, match="selects nothing"):
        clipped_value_loss(x, x, x, ~BOTH, clip=0.2)
    with pytest.raises(ValueError, match="selects nothing"):
        entropy_bonus(x, ~BOTH)
