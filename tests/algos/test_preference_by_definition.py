"""Preference losses against their definitions: optima in closed form, on policies we can enumerate.

The policy writes the seven sequences of `test_by_definition`. Annotators follow Bradley-Terry with
whole-number strengths: of the 5 comparisons of a response of strength 3 with one of strength 2, the
first wins 3. So a batch that holds each outcome as often as it happens is the exact expectation.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_by_definition import MASK, REF, Policy, minimise
from torch import Tensor

from rlhf.algos import parts
from rlhf.algos.masking import masked_sum
from rlhf.algos.preference_losses import PREFERENCE_LOSSES
from rlhf.algos.types import LossOutput

STRENGTHS = torch.tensor([2, 1, 5, 3, 4, 1, 2])
REWARDS = STRENGTHS.double().log()
OUTCOMES = [
    outcome
    for i, j in itertools.permutations(range(7), 2)
    for outcome in [(i, j)] * int(STRENGTHS[i])
]
CHOSEN, REJECTED = torch.tensor(OUTCOMES).T
LENGTHS = MASK.sum(dim=1)
REF_LOGPS = masked_sum(REF.logprobs(), MASK, dim=1).detach()
ANY_PAIR_LOSS = [
    name for name, loss in PREFERENCE_LOSSES.items() if "ref_chosen_logps" in parts.inputs(loss)
]
REQUIRED: dict[str, dict[str, Any]] = {"robust": {"label_smoothing": 0.1}, "r_dpo": {"alpha": 0.0}}


def call(name: str, inputs: dict[str, Tensor], **options: Any) -> LossOutput:
    return parts.call(PREFERENCE_LOSSES[name], inputs, **options)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def sequence_logps(weights: Tensor) -> Tensor:
    """(7,) log-probs of the sequences under logits (12,)."""
    policy = Policy(weights[:3], weights[3:].view(3, 3))
    return masked_sum(policy.logprobs(), MASK, dim=1)


def optimum(name: str, **options: Any) -> Tensor:
    """(7,) probabilities of the sequences where the expected loss is least."""

    def objective(weights: Tensor) -> Tensor:
        logps = sequence_logps(weights)
        inputs = {
            "chosen_logps": logps[CHOSEN],
            "rejected_logps": logps[REJECTED],
            "ref_chosen_logps": REF_LOGPS[CHOSEN],
            "ref_rejected_logps": REF_LOGPS[REJECTED],
            "chosen_lengths": LENGTHS[CHOSEN],
            "rejected_lengths": LENGTHS[REJECTED],
        }
        return call(name, inputs, **options).loss

    return sequence_logps(minimise(objective, 12)).exp()


def tilted(rewards: Tensor, beta: float) -> Tensor:
    return (REF_LOGPS + rewards / beta).softmax(0)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_dpo_optimum_is_the_reference_tilted_by_the_reward(beta: float) -> None:
    expected = tilted(REWARDS, beta)
    torch.testing.assert_close(optimum("sigmoid", beta=beta), expected, rtol=0, atol=1e-6)
    assert (expected - REF_LOGPS.exp()).abs().max() > 0.05


def test_r_dpo_optimum_is_tilted_by_the_reward_less_a_price_per_token() -> None:
    actual = optimum("r_dpo", beta=0.8, alpha=0.6)
    expected = tilted(REWARDS - 0.6 * LENGTHS, 0.8)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    # Both lengths occur, and the price tells: more of the one-token sequence than under DPO.
    assert expected[0] > 1.1 * tilted(REWARDS, 0.8)[0]


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {  # f of u = policy / reference, f(1) = 0
    "reverse_kl": lambda u: u * u.log(),
    "forward_kl": lambda u: -u.log(),
    "js": lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
    "alpha": lambda u: (u**0.6 - 0.6 * u - 0.4) / (0.4 * -0.6),  # alpha .4
}


@pytest.mark.parametrize("divergence", list(DIVERGENCES))
def test_f_dpo_optimum_maximises_reward_less_the_divergence(divergence: str) -> None:
    beta, ref = 0.7, REF_LOGPS.exp()

    def cost(weights: Tensor) -> Tensor:
        probs = sequence_logps(weights).exp()
        return beta * (ref * DIVERGENCES[divergence](probs / ref)).sum() - (probs * REWARDS).sum()

    expected = sequence_logps(minimise(cost, 12)).exp()
    options = {"alpha": 0.4} if divergence == "alpha" else {}
    actual = optimum("f_dpo", beta=beta, divergence=divergence, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    # Not the optimum of DPO, unless it is DPO.
    far = (actual - tilted(REWARDS, beta)).abs().max().item()
    assert (far < 1e-5) == (divergence == "reverse_kl")


# Response A beats B in `wins` of wins + losses comparisons; both log-probs are free (there are
# other responses to take or give mass). Where the loss is least: the margin, and the reward of A.
OPTIMA = [
    ("sigmoid", {}, 3, 1, math.log(3), None),
    # Labels are right with .9 * 3/4 + .1 * 1/4 = .7 ...
    ("sigmoid", {"label_smoothing": 0.1}, 3, 1, logit(0.7), None),
    # ... and of 5/8 seen with 1/4 flipped, 3/4 are true: 3/4 * 3/4 + 1/4 * 1/4 = 5/8.
    ("robust", {"label_smoothing": 0.25}, 5, 3, math.log(3), None),
    # (2 p - 1) / 2 in units of reward
    ("ipo", {}, 3, 1, 0.25, None),
    # Reverse KL to a mixture of log-probabilities: q / (1 - q) = ((1 - s) / s)^(2 p - 1).
    ("exo_pair", {"label_smoothing": 0.1}, 1, 0, math.log(9), None),
    ("exo_pair", {"label_smoothing": 0.1}, 3, 1, 0.5 * math.log(9), None),
    # exp(reward) = 2 p: 3/2 and 1/2
    ("nca_pair", {}, 3, 1, math.log(3), math.log(1.5)),
    # p - 1/2: 1/4 and -1/4
    ("sppo_hard", {}, 3, 1, 0.5, 0.25),
    ("sppo_hard", {}, 1, 0, 1.0, 0.5),
    # Each response is a coin of its own, around the shift.
    ("bco_pair", {}, 3, 1, 2 * math.log(3), math.log(3) + 0.2),
]


@pytest.mark.parametrize(("name", "options", "wins", "losses", "margin", "reward"), OPTIMA)
def test_optimum_of_one_pair(
    name: str, options: dict, wins: int, losses: int, margin: float, reward: float | None
) -> None:
    beta, ref = 0.5, torch.tensor([-3.0, -5.0], dtype=torch.float64)
    chosen = torch.tensor([0] * wins + [1] * losses)

    def output(logps: Tensor) -> LossOutput:
        inputs = {
            "chosen_logps": logps[chosen],
            "rejected_logps": logps[1 - chosen],
            "ref_chosen_logps": ref[chosen],
            "ref_rejected_logps": ref[1 - chosen],
            "reward_shift": torch.tensor(0.2, dtype=torch.float64),
        }
        return call(name, inputs, beta=beta, **options)

    best = beta * (minimise(lambda logps: output(logps).loss, 2) - ref)
    assert (best[0] - best[1]).item() == pytest.approx(margin, abs=1e-6)
    if reward is not None:
        assert best[0].item() == pytest.approx(reward, abs=1e-6)


def logps(seed: int, size: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ["chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps"]
    x = 3 * torch.randn(4, size, generator=generator, dtype=torch.float64)
    inputs = dict(zip(names, x, strict=True))
    for name in names[:2]:
        inputs[name].requires_grad_()
    return inputs


def swapped(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same pairs with every label flipped."""
    other = {"chosen": "rejected", "rejected": "chosen"}
    return {
        "_".join(other.get(word, word) for word in name.split("_")): x for name, x in inputs.items()
    }


def slopes(loss: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    chosen, rejected = torch.autograd.grad(
        loss, [inputs["chosen_logps"], inputs["rejected_logps"]], retain_graph=True
    )
    return chosen, rejected


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), flipped=st.floats(0, 0.45))
def test_robust_is_unbiased_under_flipped_labels(seed: int, flipped: float) -> None:
    inputs = logps(seed)
    right = call("robust", inputs, label_smoothing=flipped, beta=0.7).loss
    wrong = call("robust", swapped(inputs), label_smoothing=flipped, beta=0.7).loss
    expected_loss = (1 - flipped) * right + flipped * wrong
    clean = call("sigmoid", inputs, beta=0.7).loss
    torch.testing.assert_close(expected_loss, clean)
    torch.testing.assert_close(slopes(expected_loss, inputs), slopes(clean, inputs))


def test_exo_is_the_reverse_and_dpo_the_forward_divergence() -> None:
    inputs, beta, s = logps(3), 0.4, 0.2
    log_ratios = [inputs[f"{x}_logps"] - inputs[f"ref_{x}_logps"] for x in ("chosen", "rejected")]
    q = (beta * torch.stack(log_ratios)).softmax(0)
    labels = torch.tensor([[1 - s], [s]], dtype=torch.float64)
    reverse = (q * (q.log() - labels.log())).sum(0).mean()
    cross_entropy = -(labels * q.log()).sum(0).mean()
    exo = call("exo_pair", inputs, beta=beta, label_smoothing=s).loss
    dpo = call("sigmoid", inputs, beta=beta, label_smoothing=s).loss
    torch.testing.assert_close(exo, reverse)
    torch.testing.assert_close(dpo, cross_entropy)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.floats(-5, 5))
def test_bco_bounds_dpo_from_above_whatever_the_shift(seed: int, shift: float) -> None:
    inputs = logps(seed, size=1) | {"reward_shift": torch.tensor(shift, dtype=torch.float64)}
    assert call("bco_pair", inputs, beta=0.5).loss > call("sigmoid", inputs, beta=0.5).loss


def test_hinge_pulls_until_the_margin_is_one() -> None:
    # beta .5: the target is 2 nats. Pairs at 1.9, 2, 2.1 and, hopeless, at -50.
    zero = torch.zeros(4, dtype=torch.float64)
    chosen = torch.tensor([1.9, 2.0, 2.1, -50.0], dtype=torch.float64, requires_grad=True)
    rejected = zero.clone().requires_grad_()
    inputs = {
        "chosen_logps": chosen,
        "rejected_logps": rejected,
        "ref_chosen_logps": zero,
        "ref_rejected_logps": zero,
    }
    pulls, pushes = slopes(call("hinge", inputs, beta=0.5, denominator=1).loss, inputs)
    assert pulls.tolist() == [-0.5, 0, 0, -0.5]
    assert pushes.tolist() == [0.5, 0, 0, 0.5]


def test_simpo_at_its_target_margin_is_a_coin() -> None:
    # beta * (mean chosen - mean rejected) = gamma: sigmoid 1/2, slopes -+beta / 2.
    chosen = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    inputs = {"chosen_mean_logps": chosen, "rejected_mean_logps": rejected}
    loss = call("simpo", inputs, beta=1.4, gamma=1.4).loss
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-0.7)
    assert rejected.grad is not None and rejected.grad.item() == pytest.approx(0.7)


def test_orpo_compares_odds() -> None:
    # Responses of one token, so that the mean log-prob is that of the response.
    probs = torch.tensor([[0.9, 0.3, 0.01], [0.2, 0.6, 0.5]], dtype=torch.float64)
    odds = probs / (1 - probs)
    ratio = odds[0] / odds[1]
    expected = (-probs[0].log() - 0.3 * (ratio / (1 + ratio)).log()).mean()
    chosen, rejected = probs.log()
    inputs = {"chosen_mean_logps": chosen, "rejected_mean_logps": rejected}
    output = call("orpo", inputs, beta=0.3)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.metrics["margin"], ratio.log().mean())


def kahneman_tversky_loss(
    log_ratio: float, desirable: bool, kl: float, beta: float, weights: tuple[float, float]
) -> float:
    """Weight minus the value of an outcome against the reference point, as the paper has it."""
    weight = weights[0] if desirable else weights[1]
    gain = log_ratio - kl if desirable else kl - log_ratio
    return weight - weight * sigmoid(beta * gain)


@settings(max_examples=20, deadline=None)
@given(
    log_ratio=st.floats(-20, 20),
    desirable=st.booleans(),
    kl=st.sampled_from([0.0, 1.5]),
)
def test_kto_is_the_loss_of_value(log_ratio: float, desirable: bool, kl: float) -> None:
    inputs = {
        "logps": torch.tensor([log_ratio - 7], dtype=torch.float64),
        "ref_logps": torch.tensor([-7.0], dtype=torch.float64),
        "desirable": torch.tensor([desirable]),
        "kl_nats": torch.tensor(kl, dtype=torch.float64),
    }
    options = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    actual = call("kto", inputs, beta=0.3, **options).loss.item()
    expected = kahneman_tversky_loss(log_ratio, desirable, kl, 0.3, (1.5, 0.5))
    assert actual == pytest.approx(expected, abs=1e-12)


def test_kto_without_kl_on_both_sides_of_pairs_is_half_of_apo_zero() -> None:
    inputs = logps(4)
    single = {
        "logps": torch.cat([inputs["chosen_logps"], inputs["rejected_logps"]]),
        "ref_logps": torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]]),
        "desirable": torch.arange(10) < 5,
        "kl_nats": torch.tensor(0.0),
    }
    kto, apo = call("kto", single, beta=0.3).loss, call("apo_zero", inputs, beta=0.3).loss
    torch.testing.assert_close(2 * kto, apo)
    torch.testing.assert_close(slopes(2 * kto, inputs), slopes(apo, inputs))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_apo_zero_raises_the_chosen_and_lowers_the_rejected(seed: int) -> None:
    inputs = logps(seed)
    pulls, pushes = slopes(call("apo_zero", inputs).loss, inputs)
    assert (pulls < 0).all() and (pushes > 0).all()


@settings(max_examples=20, deadline=None)
@given(lead=st.floats(0.01, 20), level=st.floats(-20, 0))
def test_apo_down_lowers_both_and_the_rejected_more(lead: float, level: float) -> None:
    # The chosen has fallen less than its lead: it falls, and the rejected falls faster (the two
    # slopes add up to that of sigmoid(r chosen), which is > 0).
    chosen = max(level, -0.9 * lead)
    inputs = {
        "chosen_logps": torch.tensor([chosen], dtype=torch.float64, requires_grad=True),
        "rejected_logps": torch.tensor([chosen - lead], dtype=torch.float64, requires_grad=True),
        "ref_chosen_logps": torch.zeros(1, dtype=torch.float64),
        "ref_rejected_logps": torch.zeros(1, dtype=torch.float64),
    }
    down, more = slopes(call("apo_down", inputs, beta=1.0).loss, inputs)
    assert down.item() > 0 and more.item() > 0
    p = sigmoid(chosen)
    assert (down + more).item() == pytest.approx(p * (1 - p))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_dpop_is_dpo_until_the_chosen_falls(seed: int) -> None:
    inputs = logps(seed)
    dpo, dpop = call("sigmoid", inputs, beta=0.3), call("dpop", inputs, beta=0.3, penalty=5.0)
    fallen = (inputs["chosen_logps"] < inputs["ref_chosen_logps"]).tolist()
    before, after = slopes(dpo.loss, inputs)[0], slopes(dpop.loss, inputs)[0]
    for i, fell in enumerate(fallen):
        if fell:
            assert after[i] < before[i]  # pulled up more
        else:
            assert after[i].item() == pytest.approx(before[i].item(), abs=1e-12)


@pytest.mark.parametrize("name", ANY_PAIR_LOSS)
def test_first_step_from_the_reference(name: str) -> None:
    """Descent raises the chosen's log-ratio and lowers the rejected's, on the policy itself."""
    weights = torch.cat([REF.first, REF.second.flatten()]).detach().requires_grad_()
    log_probs = sequence_logps(weights)
    for i, j in [(2, 5), (0, 4)]:
        inputs = {
            "chosen_logps": log_probs[i : i + 1],
            "rejected_logps": log_probs[j : j + 1],
            "ref_chosen_logps": REF_LOGPS[i : i + 1],
            "ref_rejected_logps": REF_LOGPS[j : j + 1],
            "chosen_lengths": LENGTHS[i : i + 1],
            "rejected_lengths": LENGTHS[j : j + 1],
            "margins": torch.tensor([0.5], dtype=torch.float64),
            "reward_shift": torch.tensor(0.0, dtype=torch.float64),
        }
        output = call(name, inputs, **REQUIRED.get(name, {}))
        pull, push = slopes(output.loss, inputs)
        assert pull.item() == pytest.approx(0) if name == "apo_down" else pull.item() < 0
        assert push.item() > 0
        (step,) = torch.autograd.grad(output.loss, weights, retain_graph=True)
        moved = sequence_logps(weights.detach() - 1e-3 * step / step.norm()) - REF_LOGPS
        assert moved[i] > moved[j]
        assert moved[j] < 0
