"""Losses over pairs: DPO, IPO, Bradley-Terry; accuracy, ties and committees."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algos.preference_losses import PREFERENCE_LOSSES, dpo_loss, ipo_loss
from rlhf.algos.reward_model_losses import (
    AGGREGATES,
    bradley_terry_loss,
    committee_mean_minus_variance,
    pairwise_accuracy,
)
from rlhf.algos.types import LossOutput, combine_metrics


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_of_the_reference_itself() -> None:  # C62
    chosen, rejected = vector(-1, -5), vector(-2, -3)
    output = dpo_loss(chosen, rejected, chosen, rejected, beta=0.1)
    assert output.loss.item() == pytest.approx(math.log(2), abs=1e-12)  # .6931
    assert output.metrics["ties"].item() == 1
    assert output.metrics["accuracy"].item() == 0.5
    assert output.metrics["margin"].item() == 0


def test_dpo_by_hand() -> None:  # C62
    # Log-ratios 3 - 2 = 1 apart, beta .1: -log sigmoid(.1) = .6444.
    chosen = vector(-1).requires_grad_()
    rejected = vector(-4).requires_grad_()
    output = dpo_loss(chosen, rejected, vector(-4), vector(-6), beta=0.1)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-math.log(sigmoid(0.1)), abs=1e-12)
    assert output.loss.item() == pytest.approx(0.6444, abs=5e-5)
    # Slope -beta * sigmoid(-.1) to the chosen, the opposite to the rejected.
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.1 * sigmoid(-0.1), abs=1e-12)
    assert rejected.grad.item() == pytest.approx(0.1 * sigmoid(-0.1), abs=1e-12)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics == pytest.approx(
        {
            "accuracy": 1,
            "ties": 0,
            "margin": 0.1,
            "chosen_reward": 0.3,
            "rejected_reward": 0.2,
            "chosen_logp_change_nats": 3,
        },
        abs=1e-12,
    )


def test_falling_chosen_logprobs_show_while_the_margin_grows() -> None:
    output = dpo_loss(vector(-3), vector(-9), vector(-2), vector(-2), beta=0.5)
    assert output.metrics["margin"].item() == 3  # .5 * (-1 + 7)
    assert output.metrics["chosen_logp_change_nats"].item() == -1


def test_dpo_label_smoothing_by_hand() -> None:
    # h = 2: -.9 log sigmoid(2) - .1 log sigmoid(-2)
    output = dpo_loss(vector(2), vector(0), vector(0), vector(0), beta=1.0, label_smoothing=0.1)
    expected = -0.9 * math.log(sigmoid(2)) - 0.1 * math.log(sigmoid(-2))
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)


def test_ipo_by_hand() -> None:
    # Difference of log-ratios 3 - 1 = 2; (2 - 1 / (2 * .1))^2 = 9.
    output = ipo_loss(vector(3), vector(1), vector(0), vector(0), beta=0.1)
    assert output.loss.item() == pytest.approx(9, abs=1e-12)
    assert output.metrics["margin"].item() == pytest.approx(0.2, abs=1e-12)


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = vector(2, 0), vector(1, 3)
    # Differences 1 and -3.
    expected = -(math.log(sigmoid(1)) + math.log(sigmoid(-3))) / 2
    output = bradley_terry_loss(chosen, rejected)
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics == {"accuracy": 0.5, "ties": 0, "margin": -1, "score_mean": 1.5}
    # Margins 1 and 1: differences 0 and -4.
    expected = -(math.log(0.5) + math.log(sigmoid(-4))) / 2
    actual = bradley_terry_loss(chosen, rejected, margin=vector(1, 1)).loss.item()
    assert actual == pytest.approx(expected, abs=1e-12)
    # Centring adds .5 * ((2 + 1)^2 + (0 + 3)^2) / 2 = 4.5.
    centred = bradley_terry_loss(chosen, rejected, centering=0.5).loss
    assert centred.item() - output.loss.item() == pytest.approx(4.5, abs=1e-12)


def test_bradley_terry_label_smoothing_with_margin_by_hand() -> None:
    # If the label is wrong, it is the rejected that must lead by the margin.
    output = bradley_terry_loss(vector(2), vector(0), margin=vector(1), label_smoothing=0.2)
    expected = -0.8 * math.log(sigmoid(2 - 1)) - 0.2 * math.log(sigmoid(-2 - 1))
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(lead=st.floats(1e-3, 30))
def test_right_order_costs_less_than_a_coin(lead: float) -> None:  # T5
    loss = bradley_terry_loss(vector(lead), vector(0)).loss.item()
    assert 0 < loss < math.log(2)
    assert bradley_terry_loss(vector(0), vector(lead)).loss.item() > math.log(2)


def test_extreme_scores_have_finite_losses_and_gradients() -> None:
    rejected = vector(1e4).requires_grad_()
    output = bradley_terry_loss(vector(-1e4), rejected)
    output.loss.backward()
    assert output.loss.item() == 2e4
    assert rejected.grad is not None
    assert rejected.grad.item() == 1


def test_ties_are_their_own_number() -> None:  # T10
    # Won, won, lost, tied: 2 of 3 decided, 1 of 4 tied.
    accuracy, ties = pairwise_accuracy(vector(3, 2, 0, 1), vector(1, 1, 1, 1))
    assert accuracy.item() == pytest.approx(2 / 3)
    assert ties.item() == 0.25
    accuracy, ties = pairwise_accuracy(vector(1, 1), vector(1, 1))
    assert (accuracy.item(), ties.item()) == (0.5, 1)


def test_committees_by_hand() -> None:
    # Members' scores of two responses: (1, 4), (3, 4). Variance (ddof 0): 1 and 0.
    scores = torch.tensor([[1.0, 4.0], [3.0, 4.0]])
    assert AGGREGATES["mean"](scores).tolist() == [2, 4]
    assert AGGREGATES["min"](scores).tolist() == [1, 4]
    assert AGGREGATES["mean_minus_variance"](scores, variance_coef=0.25).tolist() == [1.75, 4]


@pytest.mark.parametrize("name", list(AGGREGATES))
def test_a_committee_of_one_is_its_member(name: str) -> None:
    scores = torch.tensor([[1.0, -2.0, 3.0]])
    assert torch.equal(AGGREGATES[name](scores), scores[0])
    with pytest.raises(ValueError, match=r"\(M, B\)"):
        AGGREGATES[name](scores[0])


def pair_loss(name: str, chosen: Tensor, rejected: Tensor, denominator: int | None) -> LossOutput:
    if name == "bradley_terry":
        return bradley_terry_loss(chosen, rejected, centering=0.1, denominator=denominator)
    ref_chosen, ref_rejected = 0.5 * chosen.detach(), 0.5 * rejected.detach()
    return PREFERENCE_LOSSES[name](
        chosen, rejected, ref_chosen, ref_rejected, beta=0.3, denominator=denominator
    )


@pytest.mark.parametrize("name", [*PREFERENCE_LOSSES, "bradley_terry"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), cut=st.integers(1, 5))
def test_order_and_split_change_nothing(name: str, seed: int, cut: int) -> None:  # C39, C40
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    rejected = torch.randn(6, generator=generator, dtype=torch.float64)
    whole = pair_loss(name, chosen, rejected, None)
    (gradient,) = torch.autograd.grad(whole.loss, chosen)

    order = torch.randperm(6, generator=generator)
    moved = pair_loss(name, chosen[order], rejected[order], None)
    torch.testing.assert_close(moved.loss, whole.loss)

    parts = [
        pair_loss(name, chosen[part], rejected[part], 6) for part in (slice(0, cut), slice(cut, 6))
    ]
    (split_gradient,) = torch.autograd.grad(parts[0].loss + parts[1].loss, chosen)
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    torch.testing.assert_close(split_gradient, gradient)
    joined = combine_metrics([part.metrics for part in parts], [cut, 6 - cut])
    for metric, value in whole.metrics.items():
        torch.testing.assert_close(joined[metric], value, check_dtype=False)


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_the_reference_is_a_constant(name: str) -> None:
    logps = [vector(-1, -2).requires_grad_() for _ in range(4)]
    PREFERENCE_LOSSES[name](*logps, beta=0.1).loss.backward()
    assert [x.grad is not None for x in logps] == [True, True, False, False]


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_preference_refusals(name: str) -> None:
    loss, x = PREFERENCE_LOSSES[name], vector(1, 2)
    with pytest.raises(ValueError, match="at least one pair"):
        loss(x[:0], x[:0], x[:0], x[:0], beta=0.1)
    with pytest.raises(ValueError, match="shapes differ"):
        loss(x, x, x, x[:1], beta=0.1)
    with pytest.raises(ValueError, match="beta must be positive"):
        loss(x, x, x, x, beta=0.0)


def test_other_refusals() -> None:
    x = vector(1, 2)
    with pytest.raises(ValueError, match="label_smoothing"):
        dpo_loss(x, x, x, x, beta=0.1, label_smoothing=0.5)
    with pytest.raises(ValueError, match="label_smoothing"):
        bradley_terry_loss(x, x, label_smoothing=-0.1)
    with pytest.raises(ValueError, match="centering"):
        bradley_terry_loss(x, x, centering=-0.1)
    with pytest.raises(ValueError, match="shapes differ"):
        bradley_terry_loss(x, x, margin=x[:1])
    with pytest.raises(ValueError, match="shapes differ"):
        pairwise_accuracy(x, x[:1])
    with pytest.raises(ValueError, match="variance_coef"):
        committee_mean_minus_variance(x[None], variance_coef=-1.0)


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
