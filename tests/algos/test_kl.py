"""KL estimators: their value and their gradient, against sums over the whole vocabulary."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from rlhf.algos.kl import KL_ESTIMATORS, adapt_kl_coef, full_kl, full_kl_loss, kl_loss

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


def expected_reward_gradient(estimator: str) -> Tensor:
    """Expectation under P of estimate * grad log P: what the term does where it is in the reward."""
    logits = P.log().requires_grad_()
    logps = logits.log_softmax(0)
    estimates = KL_ESTIMATORS[estimator](logps, Q.log()).detach()
    return torch.autograd.grad((P * estimates * logps).sum(), logits)[0]


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [
        # k1: that of KL(p || q). k3: less that of KL(q || p), which is p - q = (.3, 0, -.3).
        # k2: with l = log^2 2.5 / 2 = .4198 at both ends, 0 in the middle and mean .7 l = .2939,
        # p (l - .2939) = (.06297, -.08816, .02519).
        ("k1", [0.3207, -0.0825, -0.2382]),
        ("k2", [0.06297, -0.08816, 0.02519]),
        ("k3", [0.0207, -0.0825, 0.0618]),
        ("k3_straight_through", [0.0207, -0.0825, 0.0618]),
    ],
)
def test_expected_gradient_in_the_reward(estimator: str, gradient: list[float]) -> None:
    assert expected_reward_gradient(estimator).tolist() == pytest.approx(gradient, abs=1e-4)


def test_value_gradient_is_that_of_the_reward_plus_that_of_the_loss() -> None:
    # d E k = E[k grad log p] + E[grad k]: for k2 the sum is the gradient of its biased value.
    for estimator in KL_ESTIMATORS:
        logits = P.log().requires_grad_()
        logps = logits.log_softmax(0)
        name = "k3" if estimator == "k3_straight_through" else estimator
        value = (logps.exp() * KL_ESTIMATORS[name](logps, Q.log())).sum()
        true = torch.autograd.grad(value, logits)[0]
        both = expected_reward_gradient(name) + expected_value_and_gradient(name)[1]
        torch.testing.assert_close(both, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # At r = 1000: k1 1000, k2 500000, k3 e^-1000 - 1 + 1000. Slopes 1, 1000, 1 - e^-1000.
        ("k1", 1000.0, 1.0),
        ("k2", 500_000.0, 1000.0),
        ("k3", 999.0, 1.0),
        ("k3_straight_through", 999.0, 1000.0),
    ],
)
def test_a_policy_far_above_its_reference_is_finite(
    estimator: str, value: float, slope: float
) -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    estimate = KL_ESTIMATORS[estimator](logprobs, torch.tensor([-1000.0]))
    estimate.sum().backward()
    assert estimate.item() == value
    assert logprobs.grad is not None
    assert logprobs.grad.item() == slope


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


def test_full_kl_loss_by_hand() -> None:
    # KL(p || q) = .3 log 2.5 at one token, KL(q || p) = the same by symmetry at another, 0 at the
    # third; the mean over three. The fourth is NaN and masked.
    k = 0.3 * math.log(2.5)
    policy = torch.stack([P.log(), Q.log(), Q.log(), P * math.nan])[None].requires_grad_()
    reference = torch.stack([Q.log(), P.log(), Q.log(), P * math.nan])[None].requires_grad_()
    mask = torch.tensor([[True, True, True, False]])
    output = full_kl_loss(policy, reference, mask)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(2 * k / 3, abs=1e-12)
    assert output.metrics["kl_ref_nats"].item() == pytest.approx(2 * k / 3, abs=1e-12)
    assert not output.metrics["kl_ref_nats"].requires_grad
    assert policy.grad is not None
    assert reference.grad is None
    assert policy.grad[0, 0].tolist() == pytest.approx(
        [0.3207 / 3, -0.0825 / 3, -0.2382 / 3], abs=1e-4
    )
    assert policy.grad[0, 2].abs().max().item() == pytest.approx(0, abs=1e-12)
    assert policy.grad[0, 3].tolist() == [0, 0, 0]
    one = full_kl_loss(policy, reference, mask, denominator=10.0)
    assert one.loss.item() == pytest.approx(2 * k / 10, abs=1e-12)
    assert one.metrics["kl_ref_nats"].item() == pytest.approx(2 * k / 3, abs=1e-12)


def test_full_kl_loss_takes_temperature_and_reduction() -> None:
    # At temperature 1/2, 21/38 log(25/4) per token where they differ, see above. Two sequences, of
    # one such token and of one such and one equal token: the mean of 1 and 1/2.
    policy = torch.stack([torch.stack([P.log(), P.log()]), torch.stack([P.log(), Q.log()])])
    reference = Q.log().expand(2, 2, 3)
    mask = torch.tensor([[True, False], [True, True]])
    output = full_kl_loss(policy, reference, mask, temperature=0.5, reduction="sequence_mean")
    assert output.loss.item() == pytest.approx(0.75 * 21 / 38 * math.log(25 / 4), abs=1e-12)


def test_full_kl_loss_refusals() -> None:
    logits, mask = torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool)
    for fault, refused in (
        ("shapes differ", lambda: full_kl_loss(logits, logits[..., :2], mask)),
        ("shapes differ", lambda: full_kl_loss(logits, logits, mask[:, :1])),
        ("selects nothing", lambda: full_kl_loss(logits, logits, ~mask)),
        ("must be bool", lambda: full_kl_loss(logits, logits, mask.long())),
        ("temperature", lambda: full_kl_loss(logits, logits, mask, temperature=0.0)),
        ("unknown reduction", lambda: full_kl_loss(logits, logits, mask, reduction="mean")),
        ("devices differ", lambda: full_kl_loss(logits.to("meta"), logits, mask)),
        ("devices differ", lambda: full_kl_loss(logits, logits.to("meta"), mask)),
        ("devices differ", lambda: full_kl(logits, logits.to("meta"))),
        ("devices differ", lambda: kl_loss(P[None], Q[None].to("meta"), ALL_IDS)),
    ):
        with pytest.raises(ValueError, match=fault):
            refused()


def coefficient(kl_nats: float, coef: float = 0.1, **changed: float) -> float:
    options = {"target_nats": 6.0, "horizon": 1000, "num_samples": 100, **changed}
    return adapt_kl_coef(coef, kl_nats, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kl_nats", "expected"),
    [
        # .1 * (1 + e * 100 / 1000), e = clip(kl / 6 - 1, -.2, .2).
        (6.0, 0.1),
        (6.6, 0.101),  # e = .1
        (5.4, 0.099),
        (7.2, 0.102),  # e = .2, the bound
        (60.0, 0.102),
        (math.inf, 0.102),
        (4.8, 0.098),
        (0.0, 0.098),
        (-3.0, 0.098),
    ],
)
def test_kl_coefficient_by_hand(kl_nats: float, expected: float) -> None:
    assert coefficient(kl_nats) == pytest.approx(expected, rel=1e-12)


def test_kl_coefficient_finds_its_target() -> None:
    # A policy whose KL is 1 / coefficient: the target 6 is met at 1/6.
    coef = 0.05
    for _ in range(1000):
        coef = coefficient(1 / coef, coef)
    assert coef == pytest.approx(1 / 6, rel=1e-3)


def test_kl_coefficient_bounds() -> None:
    assert coefficient(7.2, horizon=100) == pytest.approx(0.12)
    assert coefficient(7.2, num_samples=1) == pytest.approx(0.1 * 1.0002)
    assert coefficient(0.5, target_nats=0.5) == pytest.approx(0.1)
    for fault, changed in (
        ("coef and target_nats must be positive, got 0.0", {"coef": 0.0}),
        ("coef and target_nats must be positive", {"coef": -0.1}),
        ("coef and target_nats must be positive", {"coef": math.nan}),
        ("coef and target_nats must be positive", {"coef": math.inf}),
        ("coef and target_nats must be positive", {"target_nats": 0.0}),
        ("coef and target_nats must be positive", {"target_nats": math.nan}),
        ("coef and target_nats must be positive", {"target_nats": math.inf}),
        ("num_samples <= horizon", {"num_samples": 0}),
        ("num_samples <= horizon", {"horizon": 99}),
        ("not a number", {"kl_nats": math.nan}),
    ):
        with pytest.raises(ValueError, match=fault):
            coefficient(**{"kl_nats": 6.0, **changed})


def test_full_kl_of_near_policies_is_not_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 500, 40, generator=generator)
    near = logits + 1e-5 * torch.randn(1, 500, 40, generator=generator)
    assert (full_kl(logits, near) >= 0).all()


def test_the_reference_learns_nothing() -> None:
    logprobs, ref = P.log()[None].requires_grad_(), Q.log()[None].requires_grad_()
    for estimator in KL_ESTIMATORS:
        kl_loss(logprobs, ref, ALL_IDS, estimator=estimator).loss.backward()
        assert ref.grad is None
    assert logprobs.grad is not None


def test_kl_loss_takes_a_reduction() -> None:
    # k1 of 1, then of 2 and 3: means per sequence 1 and 2.5, their mean 1.75; the metric, k3 =
    # exp(-r) - 1 + r, stays a mean over tokens.
    logprobs = torch.tensor([[1.0, 0.0], [2.0, 3.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, True]])
    output = kl_loss(
        logprobs, torch.zeros_like(logprobs), mask, estimator="k1", reduction="sequence_mean"
    )
    assert output.loss.item() == 1.75
    k3_mean = (math.exp(-1) + math.exp(-2) + math.exp(-3) + 3) / 3
    assert output.metrics["kl_ref_nats"].item() == pytest.approx(k3_mean, abs=1e-12)


def test_no_sample_is_negative_where_expm1_is_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last bit may be wrong, as on a GPU; then exp(-r) - 1 + r alone falls below 0."""
    expm1 = torch.expm1
    down = torch.tensor(-math.inf)
    monkeypatch.setattr(torch, "expm1", lambda x: torch.nextafter(expm1(x), down))
    near = torch.tensor([[1e-8, -1e-8, 3e-8]])
    for estimator in ("k3", "k3_straight_through"):
        assert (KL_ESTIMATORS[estimator](near, torch.zeros(1, 3)) >= 0).all()


def test_full_kl_loss_refuses_devices_whichever_is_elsewhere() -> None:
    logits, mask = torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool)
    places = itertools.product(("cpu", "meta"), repeat=3)
    for one, two, three in places:
        if not one == two == three:
            with pytest.raises(ValueError, match="devices differ"):
                full_kl_loss(logits.to(one), logits.to(two), mask.to(three))
