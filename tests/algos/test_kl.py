"""KL estimators: their value and their gradient, against sums over the whole vocabulary."""

import math

import pytest
import torch
from torch import Tensor

from rlhf.algos.kl import KL_ESTIMATORS, full_kl, kl_loss

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
ALL_IDS = torch.ones(1, 3, dtype=torch.bool)


def expected_value_and_gradient(estimator: str) -> tuple[Tensor, Tensor]:
    """Expectation under P, the policy, of an estimator and of its gradient to P's logits."""
    logits = P.log().requires_grad_()
    estimates = KL_ESTIMATORS[estimator](logits.log_softmax(0), Q.log())
    value = (P * estimates).sum()
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


@pytest.mark.parametrize(
    ("estimator", "value"),
    [
        # KL = .5 log 2.5 + .2 log .4 = .3 log 2.5; k2 is half the mean of log^2 2.5 over .7.
        ("k1", 0.3 * math.log(2.5)),
        ("k2", 0.35 * math.log(2.5) ** 2),
        ("k3", 0.3 * math.log(2.5)),
        ("k3_straight_through", 0.3 * math.log(2.5)),
    ],
)
def test_expected_value(estimator: str, value: float) -> None:  # C44: .2749, .2939
    assert expected_value_and_gradient(estimator)[0].item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [
        ("k1", [0, 0, 0]),
        ("k2", [0.3207, -0.0825, -0.2382]),
        ("k3", [0.3, 0, -0.3]),
        ("k3_straight_through", [0.3207, -0.0825, -0.2382]),
    ],
)
def test_expected_gradient(estimator: str, gradient: list[float]) -> None:  # T8
    assert expected_value_and_gradient(estimator)[1].tolist() == pytest.approx(gradient, abs=1e-4)


def test_gradients_are_those_of_the_divergences() -> None:  # T8
    logits = P.log().requires_grad_()
    (forward,) = torch.autograd.grad(full_kl(logits[None, None], Q.log()[None, None]).sum(), logits)
    reverse_kl = (Q * (Q.log() - logits.log_softmax(0))).sum()
    (reverse,) = torch.autograd.grad(reverse_kl, logits)
    for estimator, true in (("k2", forward), ("k3_straight_through", forward), ("k3", reverse)):
        actual = expected_value_and_gradient(estimator)[1]
        torch.testing.assert_close(actual, true, rtol=0, atol=1e-12)


def test_straight_through_has_the_value_of_k3_at_every_sample() -> None:
    logprobs, ref_logprobs = P.log(), Q.log()
    actual = KL_ESTIMATORS["k3_straight_through"](logprobs, ref_logprobs)
    # -log r - 1 + 1/r style by hand: q/p - 1 + log p/q = .4 - 1 + log 2.5; 0; 2.5 - 1 + log .4.
    expected = [0.4 - 1 + math.log(2.5), 0, 2.5 - 1 + math.log(0.4)]
    assert actual.tolist() == pytest.approx(expected, abs=1e-12)


def test_full_kl() -> None:
    value = full_kl(P.log()[None, None], Q.log()[None, None])
    assert value.shape == (1, 1)
    assert value.item() == pytest.approx(0.3 * math.log(2.5), abs=1e-12)
    # At temperature 1/2 probabilities are squared: (25, 9, 4)/38 and (4, 9, 25)/38.
    hot = full_kl(P.log()[None, None], Q.log()[None, None], temperature=0.5)
    assert hot.item() == pytest.approx(21 / 38 * math.log(25 / 4), abs=1e-12)


def test_full_kl_where_a_token_is_impossible() -> None:
    some = torch.tensor([[[0.0, 0.0, -math.inf]]], requires_grad=True)
    every = torch.zeros(1, 1, 3)
    value = full_kl(some, every)
    value.sum().backward()
    assert value.item() == pytest.approx(math.log(1.5), abs=1e-6)  # log (1/2) / (1/3)
    assert some.grad is not None
    assert some.grad.isfinite().all()
    assert full_kl(every, some.detach()).item() == math.inf


def test_full_kl_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        full_kl(torch.zeros(1, 2, 3), torch.zeros(1, 1, 3))


@pytest.mark.parametrize("estimator", list(KL_ESTIMATORS))
def test_kl_of_a_policy_to_itself_is_zero(estimator: str) -> None:  # C44, C45
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    logprobs = logits.log_softmax(-1)[..., 0]
    mask = torch.ones(2, 3, dtype=torch.bool)
    output = kl_loss(logprobs, logprobs.clone(), mask, estimator=estimator)
    assert output.loss.item() == 0
    assert output.metrics["kl_ref_nats"].item() == 0
    assert full_kl(logits, logits.clone()).abs().max().item() == 0


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_straight_through"])
def test_no_sample_is_negative(estimator: str) -> None:  # C44
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (-8 * torch.rand(20_000, generator=generator))  # nearly equal ones, too
    log_ratio = size * torch.randn(20_000, generator=generator)
    assert (KL_ESTIMATORS[estimator](log_ratio, torch.zeros(20_000)) >= 0).all()


@pytest.mark.parametrize("estimator", ["k3", "k3_straight_through"])
def test_small_divergences_keep_their_digits(estimator: str) -> None:
    # For small r, k3 is r^2 / 2 - r^3 / 6: 5e-9 at 1e-4, far below the float32 spacing at 1.
    actual = KL_ESTIMATORS[estimator](torch.tensor([1e-4, -1e-4]), torch.zeros(2))
    assert actual.tolist() == pytest.approx([5e-9, 5e-9], rel=1e-2)


def test_kl_loss_is_the_mean_of_its_estimator() -> None:
    # k1 of the three tokens: log 2.5, 0, log .4; the third is masked.
    mask = torch.tensor([[True, True, False]])
    ref = torch.tensor([[Q[0].log().item(), Q[1].log().item(), math.nan]], dtype=torch.float64)
    output = kl_loss(P.log()[None], ref, mask, estimator="k1")
    assert output.loss.item() == pytest.approx(math.log(2.5) / 2, abs=1e-12)
    # The metric is k3 whatever the estimator: (q/p - 1 + log p/q) = .4 - 1 + log 2.5.
    k3_mean = (0.4 - 1 + math.log(2.5)) / 2
    assert output.metrics["kl_ref_nats"].item() == pytest.approx(k3_mean, abs=1e-12)


def test_kl_on_groups_without_spread_is_the_callers_choice() -> None:  # C36
    # Two sequences of one token, k2 = 2^2/2 = 2 and 4^2/2 = 8; the second has no spread.
    logprobs, ref = torch.tensor([[0.0], [0.0]]), torch.tensor([[-2.0], [-4.0]])
    every = torch.tensor([[True], [True]])
    kept = every & torch.tensor([True, False])[:, None]
    on_all = kl_loss(logprobs, ref, every, estimator="k2", denominator=2.0).loss
    without = kl_loss(logprobs, ref, kept, estimator="k2", denominator=2.0).loss
    assert (on_all.item(), without.item()) == (5, 1)


def test_kl_loss_refusals() -> None:
    with pytest.raises(ValueError, match="unknown estimator 'kl'"):
        kl_loss(P[None], Q[None], ALL_IDS, estimator="kl")
    with pytest.raises(ValueError, match="selects nothing"):
        kl_loss(P[None], Q[None], ~ALL_IDS)
    with pytest.raises(ValueError, match="shapes differ"):
        kl_loss(P[None], Q[None, :2], ALL_IDS)
