"""Policy and value losses by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.algos.policy_losses import (
    POLICY_LOSSES,
    cispo_loss,
    clipped_policy_loss,
    clipped_value_loss,
    dual_clip_policy_loss,
    entropy_bonus,
    gspo_loss,
    importance_correction,
    importance_weighted_loss,
    nll_loss,
    reinforce_loss,
    sapo_loss,
)
from rlhf.algos.types import LossOutput

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
@pytest.mark.parametrize("sign", [1, -1])  # the mirror image, where the clip is a lower one
def test_clipped_value_loss_by_hand(
    value: float, loss: float, slope: float, clipped: float, sign: int
) -> None:
    values = row(sign * value).requires_grad_()
    output = clipped_value_loss(values, row(sign), row(3 * sign), ONE, clip=0.5)
    output.loss.backward()
    slope = sign * slope
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["value_clip_fraction"].item() == clipped


def test_values_are_clipped_around_the_old_ones_on_both_sides() -> None:
    # old 1, clip .5: 0 moves to .5, 1.5 from R = -1, so max(1, 2.25) / 2.
    output = clipped_value_loss(row(0), row(1), row(-1), ONE, clip=0.5)
    assert output.loss.item() == 1.125
    assert output.metrics["value_clip_fraction"].item() == 1


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


def test_every_loss_has_its_name() -> None:
    losses = {
        "ppo_clip": clipped_policy_loss,
        "ppo_dual_clip": dual_clip_policy_loss,
        "reinforce": reinforce_loss,
        "nll": nll_loss,
        "importance_weighted": importance_weighted_loss,
        "gspo": gspo_loss,
        "cispo": cispo_loss,
        "sapo": sapo_loss,
    }
    assert losses == POLICY_LOSSES


def test_likelihood_loss_by_hand() -> None:
    # Chosen with weight 2, not chosen: -(2 * -1 + 0 * -4) / 2 = 1; slopes -1 and 0, whatever the
    # policy was that wrote them.
    logprobs = row(-1, -4).requires_grad_()
    output = nll_loss(logprobs, row(-7, -2), row(2, 0), BOTH)
    output.loss.backward()
    assert output.loss.item() == 1
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1, 0]]
    assert output.metrics["clip_fraction"].item() == 0
    half = nll_loss(logprobs, row(-7, -2), row(2, 0), BOTH, denominator=4.0)
    assert half.loss.item() == 0.5
    sequences = nll_loss(
        torch.tensor([[-1.0, -3.0], [-5.0, NAN]]),
        torch.zeros(2, 2),
        torch.ones(2, 2),
        torch.tensor([[True, True], [True, False]]),
        reduction="sequence_mean",
    )
    assert sequences.loss.item() == 3.5  # ((1 + 3) / 2 + 5) / 2


def test_importance_weighted_loss_by_hand() -> None:
    # -(1.5 * 2 + .5 * -4) / 2 = -.5; slopes -r A / 2, with no clip at any ratio.
    logprobs = log_row(1.5, 0.5).requires_grad_()
    output = importance_weighted_loss(logprobs, row(0, 0), row(2, -4), BOTH)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-0.5, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([-1.5, 1], abs=1e-12)
    assert output.metrics["clip_fraction"].item() == 0
    far = importance_weighted_loss(log_row(100), row(0), row(1), ONE)
    assert far.loss.item() == pytest.approx(-100, abs=1e-9)


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "slope"),
    [
        # s = sqrt(r1 r2); -min(s A, clip(s, .8, 1.2) A); the slope at either token of two is that
        # to log s, over 2, so that of the sequence is shared out.
        ((2.0, 0.5), 1.0, -1.0, -0.5),  # s = 1: token ratios 2 and .5 cancel, nothing is cut
        ((2.0, 0.605), 1.0, -1.1, -0.55),  # s = 1.1
        ((8.0, 0.5), 1.0, -1.2, 0.0),  # s = 2, cut
        ((8.0, 0.5), -1.0, 2.0, 1.0),  # s = 2, a bad sequence
        ((0.5, 0.5), -1.0, 0.8, 0.0),  # s = .5, cut from below
        ((0.5, 0.5), 1.0, -0.5, -0.25),
    ],
)
def test_gspo_loss_by_hand(
    ratios: tuple[float, float], advantage: float, loss: float, slope: float
) -> None:
    # A third token is masked; it counts in neither mean nor length.
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.cat([log_row(*ratios) - 1, row(NAN)], dim=1).requires_grad_()
    output = gspo_loss(
        logprobs, row(-1, -1, NAN), row(advantage, advantage, NAN), mask,
        clip_low=0.2, clip_high=0.2, reduction="sequence_mean",
    )  # fmt: skip
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([slope, slope, 0], abs=1e-12)
    assert output.metrics["clip_fraction"].item() == (1.0 if slope == 0 else 0.0)
    # The ratios that it reports are those of tokens, as for every loss.
    assert output.metrics["ratio_max"].item() == pytest.approx(max(ratios), abs=1e-12)


def test_gspo_of_sequences_is_equation_5() -> None:
    # Autograd of the mean over sequences of min(s A, clip(s) A), with s as one number a sequence.
    generator = torch.Generator().manual_seed(0)
    logprobs, old = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64) * 0.3
    logprobs.requires_grad_()
    advantages = torch.tensor([1.0, -1, 2, -2, 0.5, -0.5], dtype=torch.float64)
    mask = torch.tensor([[True] * n + [False] * (4 - n) for n in (4, 3, 2, 4, 1, 4)])
    s = torch.stack([(logprobs[i, mask[i]] - old[i, mask[i]]).mean().exp() for i in range(6)])
    direct = -torch.minimum(s * advantages, s.clamp(0.9, 1.15) * advantages).mean()
    (expected,) = torch.autograd.grad(direct, logprobs)
    output = gspo_loss(
        logprobs, old, advantages[:, None].expand(6, 4), mask,
        clip_low=0.1, clip_high=0.15, reduction="sequence_mean",
    )  # fmt: skip
    (actual,) = torch.autograd.grad(output.loss, logprobs)
    torch.testing.assert_close(output.loss, direct)
    torch.testing.assert_close(actual, expected)
    rows = expected.abs().sum(1) == 0
    assert 0 < rows.sum() < 6
    share = mask[rows].sum() / mask.sum()
    assert output.metrics["clip_fraction"].item() == pytest.approx(share.item(), abs=1e-6)


def test_gspo_bounds_are_those_of_the_paper() -> None:
    # Just inside and outside 1 - 3e-4 and 1 + 4e-4.
    for ratio, advantage, cut in (
        (1.00039, 1.0, 0.0), (1.00041, 1.0, 1.0), (0.99971, -1.0, 0.0), (0.99969, -1.0, 1.0),
    ):  # fmt: skip
        output = gspo_loss(log_row(ratio), row(0), row(advantage), ONE)
        assert output.metrics["clip_fraction"].item() == cut


def test_ppo_bounds_are_a_fifth() -> None:
    for loss in (clipped_policy_loss, dual_clip_policy_loss):
        for ratio, advantage, cut in (
            (1.199, 1.0, 0.0), (1.201, 1.0, 1.0), (0.801, -1.0, 0.0), (0.799, -1.0, 1.0),
        ):  # fmt: skip
            output = loss(log_row(ratio), row(0), row(advantage), ONE)
            assert output.metrics["clip_fraction"].item() == cut
    # The floor of the dual clip starts at ratio 3.
    for ratio, cut in ((2.99, 0.0), (3.01, 1.0)):
        output = dual_clip_policy_loss(log_row(ratio), row(0), row(-1), ONE)
        assert output.metrics["clip_fraction"].item() == cut


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "bounded"),
    [
        # log pi = -2. -w A log pi = 2 w A, w = clip(r, .8, 1.5); slope -w A, never 0.
        (1.0, 3.0, 6.0, -3.0, 0.0),
        (1.4, 1.0, 2.8, -1.4, 0.0),
        (4.0, 1.0, 3.0, -1.5, 1.0),
        (4.0, -1.0, -3.0, 1.5, 1.0),
        (0.1, 1.0, 1.6, -0.8, 1.0),
        (0.1, -1.0, -1.6, 0.8, 1.0),
    ],
)
def test_cispo_loss_by_hand(
    ratio: float, advantage: float, loss: float, slope: float, bounded: float
) -> None:
    logprobs = row(-2).requires_grad_()
    output = cispo_loss(
        logprobs, row(-2) - log_row(ratio), row(advantage), ONE, clip_low=0.2, clip_high=0.5
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["clip_fraction"].item() == bounded


def test_cispo_bounds_a_weight_by_five_and_has_no_lower_bound() -> None:
    # Slopes -w / 3 at ratios 7, 4.9 and 1e-6.
    logprobs = log_row(7, 4.9, 1e-6).requires_grad_()
    every = torch.tensor([[True, True, True]])
    output = cispo_loss(logprobs, row(0, 0, 0), row(1, 1, 1), every)
    output.loss.backward()
    assert logprobs.grad is not None
    slopes = [-5 / 3, -4.9 / 3, -1e-6 / 3]
    assert logprobs.grad.tolist()[0] == pytest.approx(slopes, rel=1e-9)
    assert output.metrics["clip_fraction"].item() == pytest.approx(1 / 3, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # tau 2 for A > 0, 4 otherwise. p = sigmoid(tau (r - 1)): r = 1 gives 1/2, and log 3 / tau
        # more or less 3/4 or 1/4, where 4 p (1 - p) = 3/4. Loss -4 p A / tau, slope -4 p (1-p) r A.
        (1.0, 3.0, -3.0, -3.0),
        (1.0, -3.0, 1.5, 3.0),
        (1 + math.log(3) / 2, 1.0, -1.5, -0.75 * (1 + math.log(3) / 2)),
        (1 - math.log(3) / 2, 1.0, -0.5, -0.75 * (1 - math.log(3) / 2)),
        (1 + math.log(3) / 4, -1.0, 0.75, 0.75 * (1 + math.log(3) / 4)),
        (1 - math.log(3) / 4, -1.0, 0.25, 0.75 * (1 - math.log(3) / 4)),
    ],
)
def test_sapo_loss_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    logprobs = log_row(ratio).requires_grad_()
    output = sapo_loss(logprobs, row(0), row(advantage), ONE, tau_positive=2.0, tau_negative=4.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["clip_fraction"].item() == 0


def test_sapo_temperatures_are_those_of_the_paper() -> None:
    # At r = 1 the value is -2 A / tau: tau 1 for A > 0 and 1.05 for A < 0.
    assert sapo_loss(row(0), row(0), row(1), ONE).loss.item() == -2
    assert sapo_loss(row(0), row(0), row(-1), ONE).loss.item() == pytest.approx(2 / 1.05, 1e-12)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_ratios_stay_finite_where_the_formula_does(name: str, dtype: torch.dtype) -> None:
    # Log-ratios of 1000 and -1000 with A of either sign, and 0. Unbounded by formula are only the
    # ratio e^1000 for A < 0 under PPO's clip and GSPO, and for any A != 0 without a bound.
    unbounded = {"ppo_clip": (-1.0,), "gspo": (-1.0,), "importance_weighted": (-1.0, 1.0)}
    for log_ratio in (1000.0, -1000.0):
        for advantage in (1.0, 0.0, -1.0):
            logprobs = torch.tensor([[log_ratio]], dtype=dtype, requires_grad=True)
            zero = torch.zeros(1, 1, dtype=dtype)
            output = POLICY_LOSSES[name](logprobs, zero, zero + advantage, ONE)
            output.loss.backward()
            assert logprobs.grad is not None
            if log_ratio > 0 and advantage in unbounded.get(name, ()):
                assert output.loss.item() == -advantage * math.inf  # seen by a non-finite guard
            else:
                assert output.loss.isfinite()
                assert logprobs.grad.isfinite().all()
                if advantage == 0:
                    assert output.loss.item() == logprobs.grad.item() == 0


def test_far_ratios_are_cut_where_a_bound_cuts_them() -> None:
    far = torch.tensor([[1000.0]])
    zero = torch.zeros(1, 1)
    for loss, advantage, value in (
        (clipped_policy_loss, 1.0, -1.2),
        (dual_clip_policy_loss, 1.0, -1.2),
        (dual_clip_policy_loss, -1.0, 3.0),
        (gspo_loss, 1.0, -1.0004),
        (sapo_loss, 1.0, -4.0),
        (sapo_loss, -1.0, 4 / 1.05),
        (cispo_loss, 1.0, -5000.0),
    ):
        output = loss(far, zero, zero + advantage, ONE)
        assert output.loss.item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_a_second_update_sees_another_ratio(name: str) -> None:  # C52
    logits = row(0, 1, 2)
    old = logits.log_softmax(-1)[:, 1:2]
    deviations = []
    for _ in range(2):
        logits = logits.detach().requires_grad_()
        output = POLICY_LOSSES[name](logits.log_softmax(-1)[:, 1:2], old, row(1), ONE)
        (slope,) = torch.autograd.grad(output.loss, logits)
        logits = logits - 0.01 * slope
        deviations.append(output.metrics["ratio_deviation_max"].item())
    assert deviations[0] == 0
    # The log-ratio moves by .01 (1 - 2 p_1 + p . p) = .0102, p = (.0900, .2447, .6652).
    assert deviations[1] == pytest.approx(0.0102, abs=1e-4)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_devices_are_checked(name: str) -> None:
    x = torch.zeros(1, 2)
    for inputs in ((x.to("meta"), x, x), (x, x.to("meta"), x), (x, x, x.to("meta"))):
        with pytest.raises(ValueError, match="devices differ"):
            POLICY_LOSSES[name](*inputs, BOTH)


@pytest.mark.parametrize(
    "loss", [clipped_policy_loss, dual_clip_policy_loss, gspo_loss, cispo_loss]
)
def test_clips_are_checked(loss: Callable[..., LossOutput]) -> None:
    x = torch.zeros(1, 2)
    for clips in (
        {"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -0.1},
        {"clip_low": NAN}, {"clip_high": NAN},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="need 0 <= clip_low <= 1 and clip_high >= 0"):
            loss(x, x, x, BOTH, **clips)
    for clips in ({"clip_low": 0.0, "clip_high": 0.0}, {"clip_low": 1.0, "clip_high": 1.9}):
        assert loss(x, x, x, BOTH, **clips).loss.item() == 0


def test_taus_are_checked() -> None:
    x = torch.zeros(1, 2)
    for tau in (0.0, -1.0, NAN, math.inf):
        with pytest.raises(ValueError, match="tau must be positive and finite"):
            sapo_loss(x, x, x, BOTH, tau_positive=tau)
        with pytest.raises(ValueError, match="tau must be positive and finite"):
            sapo_loss(x, x, x, BOTH, tau_negative=tau)


def test_dual_clip_starts_above_the_clip() -> None:
    x = torch.zeros(1, 2)
    dual_clip_policy_loss(x, x, x, BOTH, clip_high=0.5, dual_clip=1.51)
    for dual_clip in (1.5, NAN):
        with pytest.raises(ValueError, match=r"dual_clip must be above 1 \+ clip_high"):
            dual_clip_policy_loss(x, x, x, BOTH, clip_high=0.5, dual_clip=dual_clip)


def test_importance_correction_by_hand() -> None:
    # Trainer over sampler: 3, .5 and 1; the fourth is masked. Weights min(r, 2). k3 of
    # KL(sampler || trainer), r - 1 - log r: 2 - log 3, -.5 + log 2, 0. One of three is capped.
    mask = torch.tensor([[True, True, True, False]])
    trainer = torch.cat([log_row(3, 0.5, 1) - 1, row(NAN)], dim=1).requires_grad_()
    weights, metrics = importance_correction(trainer, row(-1, -1, -1, NAN), mask, cap=2.0)
    assert weights.tolist()[0] == pytest.approx([2, 0.5, 1, 0], abs=1e-12)
    assert not weights.requires_grad
    assert metrics.keys() == {"mismatch_nats", "mismatch_ratio_max", "capped_fraction"}
    nats = (2 - math.log(3) - 0.5 + math.log(2)) / 3
    assert metrics["mismatch_nats"].item() == pytest.approx(nats, abs=1e-12)
    assert metrics["mismatch_ratio_max"].item() == pytest.approx(3, abs=1e-12)
    assert metrics["capped_fraction"].item() == pytest.approx(1 / 3, abs=1e-12)
    uncapped = importance_correction(trainer, row(-1, -1, -1, NAN), mask, cap=math.inf)
    assert uncapped.weights[0, 0].item() == pytest.approx(3, abs=1e-12)
    assert uncapped.metrics["capped_fraction"].item() == 0


def test_an_engine_that_agrees_needs_no_correction() -> None:
    logprobs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 4, dtype=torch.bool)
    weights, metrics = importance_correction(logprobs, logprobs.clone(), mask, cap=1.0)
    assert torch.equal(weights, torch.ones(3, 4))
    assert metrics["mismatch_nats"].item() == 0
    assert metrics["mismatch_ratio_max"].item() == 1
    assert metrics["capped_fraction"].item() == 0


def test_a_masked_ratio_is_no_maximum() -> None:
    mask = torch.tensor([[True, False]])
    found = importance_correction(log_row(0.5, 7), row(0, 0), mask, cap=2.0)
    assert found.metrics["mismatch_ratio_max"].item() == pytest.approx(0.5, abs=1e-12)


def test_an_absurd_mismatch_is_capped() -> None:
    found = importance_correction(row(1000, -1000), row(0, 0), BOTH, cap=2.0)
    assert found.weights.tolist() == [[2, 0]]


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_weighted_advantages_are_a_weighted_loss(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 1, 40, generator=generator, dtype=torch.float64)
    weights = 2 * torch.rand(1, 40, generator=generator, dtype=torch.float64)
    logprobs, slopes = (old + 0.3 * logprobs).requires_grad_(), []
    losses = []
    for inside in (True, False):
        total = torch.zeros((), dtype=torch.float64)
        for t in range(40):
            here = torch.zeros(1, 40, dtype=torch.bool)
            here[0, t] = True
            w = weights[0, t]
            output = POLICY_LOSSES[name](logprobs, old, advantages * (w if inside else 1), here)
            total = total + output.loss * (1 if inside else w)
        losses.append(total)
        slopes.append(torch.autograd.grad(total, logprobs)[0])
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(slopes[0], slopes[1])


def test_importance_correction_refusals() -> None:
    x = torch.zeros(1, 2)
    for fault, refused in (
        ("cap must be at least 1, got 0.9", lambda: importance_correction(x, x, BOTH, cap=0.9)),
        ("cap must be at least 1, got nan", lambda: importance_correction(x, x, BOTH, cap=NAN)),
        ("selects nothing", lambda: importance_correction(x, x, ~BOTH, cap=2.0)),
        ("shapes differ", lambda: importance_correction(x[:, :1], x, BOTH, cap=2.0)),
        ("shapes differ", lambda: importance_correction(x, x[:, :1], BOTH, cap=2.0)),
        ("devices differ", lambda: importance_correction(x, x.to("meta"), BOTH, cap=2.0)),
    ):
        with pytest.raises(ValueError, match=fault):
            refused()


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_only_the_policy_learns_from_its_loss(name: str) -> None:
    logprobs, old, advantages = (row(-1, -2).requires_grad_() for _ in range(3))
    POLICY_LOSSES[name](logprobs, old, advantages, BOTH).loss.backward()
    assert logprobs.grad is not None
    assert old.grad is None
    assert advantages.grad is None


def test_only_the_value_function_learns_from_its_loss() -> None:
    values, old_values, returns = (row(1, 2).requires_grad_() for _ in range(3))
    clipped_value_loss(values, old_values, returns, BOTH, clip=0.5).loss.backward()
    assert values.grad is not None
    assert old_values.grad is None
    assert returns.grad is None


def test_a_value_as_far_as_its_clip_is_not_counted() -> None:
    # old 1, clip .5, R 1.75: 2.0 and its clip 1.5 are equally wrong, nothing is cut.
    output = clipped_value_loss(row(2), row(1), row(1.75), ONE, clip=0.5)
    assert output.metrics["value_clip_fraction"].item() == 0
    # .2 + (.9 - .2) is .8999999999999999, which is further from 1 than .9.
    output = clipped_value_loss(row(0.9), row(0.2), row(1), ONE, clip=0.9 - 0.2)
    assert output.metrics["value_clip_fraction"].item() == 0


def test_value_and_entropy_losses_take_a_reduction() -> None:
    # Errors 2, then 2 and 4 of R = 0: halves of squares 2, then 2 and 8: (2 + 5) / 2.
    x = torch.tensor([[2.0, NAN], [2.0, 4.0]], dtype=torch.float64)
    mask, zeros = torch.tensor([[True, False], [True, True]]), torch.zeros(2, 2)
    output = clipped_value_loss(x, zeros, zeros, mask, clip=None, reduction="sequence_mean")
    assert output.loss.item() == 3.5
    # Means 2 and 3.
    assert entropy_bonus(x, mask, reduction="sequence_mean").loss.item() == -2.5


def test_the_share_of_clipped_values_has_the_type_of_the_values() -> None:
    output = clipped_value_loss(row(2), row(1), row(3), ONE, clip=0.5)
    assert output.metrics["value_clip_fraction"].dtype == torch.float64


def test_a_ratio_as_large_as_the_dual_clip_is_not_counted() -> None:
    # r A = dual_clip A exactly: nothing is cut, the gradient is still -r A = e.
    logprobs = row(1).requires_grad_()
    bound = row(1).exp().item()
    output = dual_clip_policy_loss(logprobs, row(0), row(-1), ONE, dual_clip=bound)
    output.loss.backward()
    assert output.metrics["clip_fraction"].item() == 0
    assert logprobs.grad is not None
    assert logprobs.grad.item() == bound


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_no_nan_arises_even_on_the_way(name: str) -> None:
    """So that the anomaly mode of autograd, which looks for one, finds those of a fault alone."""
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [False, False]])
    with torch.autograd.set_detect_anomaly(True):
        POLICY_LOSSES[name](logprobs, torch.zeros(2, 2), torch.ones(2, 2), mask).loss.backward()


def test_divergence_from_the_old_policy_is_not_negative_where_expm1_is_rounded_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expm1 = torch.expm1
    down = torch.tensor(-math.inf)
    monkeypatch.setattr(torch, "expm1", lambda x: torch.nextafter(expm1(x), down))
    near, zeros = torch.tensor([[1e-8, 2e-8]]), torch.zeros(1, 2)
    output = clipped_policy_loss(near, zeros, zeros, BOTH)
    assert output.metrics["kl_old_nats"].item() == 0
    correction = importance_correction(near, zeros, BOTH, cap=2.0)
    assert correction.metrics["mismatch_nats"].item() == 0


def test_value_loss_refuses_shapes_and_devices() -> None:
    x = torch.zeros(1, 2)
    for i in range(3):
        for wrong, fault in ((x[:, :1], "shapes differ"), (x.to("meta"), "devices differ")):
            inputs = [x, x, x]
            inputs[i] = wrong
            with pytest.raises(ValueError, match=fault):
                clipped_value_loss(inputs[0], inputs[1], inputs[2], BOTH, clip=0.2)


def test_small_taus_are_allowed() -> None:
    # At r = 1 the value is -2 A / tau.
    output = sapo_loss(row(0, 0), row(0, 0), row(1, -1), BOTH, tau_positive=0.5, tau_negative=0.8)
    assert output.loss.item() == pytest.approx((-4 + 2.5) / 2, abs=1e-12)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_integers_are_refused(name: str) -> None:
    for i in range(3):
        inputs = [torch.zeros(1, 2)] * 3
        inputs[i] = inputs[i].long()
        with pytest.raises(ValueError, match="need floating point numbers"):
            POLICY_LOSSES[name](*inputs, BOTH)
