"""Algorithms against their definitions, on policies small enough to enumerate.

A policy over tokens 0, 1, 2 writes at most two of them and stops after a 0. Its seven sequences
and their probabilities give every expectation exactly: what an estimator says on average is
compared with autograd of the objective it is an estimator of.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlhf.algos import parts
from rlhf.algos.advantages import ADVANTAGES, token_rewards
from rlhf.algos.kl import k1, kl_loss
from rlhf.algos.logprobs import token_logprobs
from rlhf.algos.masking import masked_sum
from rlhf.algos.policy_losses import POLICY_LOSSES
from rlhf.algos.preference_losses import dpo_loss, ipo_loss
from rlhf.algos.reward_model_losses import bradley_terry_loss
from rlhf.algos.types import LossOutput

SEQUENCES = [[0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
IDS = torch.tensor([(sequence + [0])[:2] for sequence in SEQUENCES])
MASK = torch.tensor([[True, len(sequence) == 2] for sequence in SEQUENCES])
# On samples of the policy itself, the gradients of these losses are the policy gradient.
ON_POLICY = ["reinforce", "importance_weighted", "ppo_clip", "ppo_dual_clip", "cispo"]
SCORES = torch.tensor([0.3, -1.0, 2.0, 0.5, 1.5, -0.7, 0.1], dtype=torch.float64)


class Policy(NamedTuple):
    """Logits of the first token (3,), and of the second after each first (3, 3)."""

    first: Tensor
    second: Tensor

    def logprobs(self) -> Tensor:
        """(7, 2) nats of the tokens of every sequence."""
        logits = torch.stack([self.first.expand(7, 3), self.second[IDS[:, 0]]], dim=1)
        return token_logprobs(logits, IDS)

    def probs(self) -> Tensor:
        """(7,) probabilities of the sequences."""
        return masked_sum(self.logprobs(), MASK, dim=1).exp()


def policy(seed: int) -> Policy:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return Policy(weights[0].clone().requires_grad_(), weights[1:].clone().requires_grad_())


def gradient(objective: Tensor, of: Policy) -> Tensor:
    """(12,) gradient to all logits."""
    parts = torch.autograd.grad(objective, [of.first, of.second])
    return torch.cat([part.flatten() for part in parts])


PI, REF = policy(0), policy(1)
VALUES = torch.linspace(-1, 1, 14, dtype=torch.float64).view(7, 2)
# A baseline must not know the token it precedes: the same before every first token, and before the
# second one a function of the first.
VALUES = torch.stack([torch.full((7,), 0.4, dtype=torch.float64), VALUES[IDS[:, 0], 1]], dim=1)


OPTIONS = {"gae_lambda": 1.0, "baseline": 0.7}


def expected_ascent(
    group_size: int, kl_coef: float, advantage: str, loss: Callable[..., LossOutput]
) -> Tensor:
    """Minus the gradient of a loss per sequence, averaged over all groups the policy may sample."""
    logprobs, ref_logprobs, probs = PI.logprobs(), REF.logprobs().detach(), PI.probs().detach()
    kl = k1(logprobs.detach(), ref_logprobs)
    total = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(7), repeat=group_size):
        rows = list(group)
        mask, scores = MASK[rows], SCORES[rows]
        part = ADVANTAGES[advantage]
        available = {
            "rewards": token_rewards(scores, kl[rows], mask, kl_coef=kl_coef),
            "scores": scores,
            "values": VALUES[rows],
            "response_mask": mask,
            "group_size": group_size,
            "state": torch.tensor([0.3, 0.5]),
        }
        options = {key: OPTIONS[key] for key in parts.options(part) if key in OPTIONS}
        advantages = parts.call(part, available, **options).advantages
        output = loss(
            logprobs[rows],
            logprobs[rows].detach(),
            advantages,
            mask,
            reduction="constant_length",
            denominator=float(group_size),
        )
        total = total + probs[rows].prod() * output.loss
    return -gradient(total, PI)


def true_ascent(kl_coef: float) -> Tensor:
    """Gradient of E score - kl_coef * KL(policy || reference), by autograd through the sums."""
    probs = PI.probs()
    log_ratio = masked_sum(PI.logprobs() - REF.logprobs().detach(), MASK, dim=1)
    return gradient((probs * (SCORES - kl_coef * log_ratio)).sum(), PI)


def test_the_sequences_are_all_there_are() -> None:
    assert PI.probs().sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("loss", ON_POLICY)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(
    ("advantage", "group_size", "factor"),
    [
        ("reinforce", 1, 1.0),
        ("constant_baseline", 1, 1.0),
        ("ema_baseline", 1, 1.0),
        ("gae", 1, 1.0),
        ("rloo", 2, 1.0),
        ("group_mean", 2, 1 / 2),  # (G - 1) / G: the baseline contains the sample itself
    ],
)
def test_expected_policy_gradient(
    advantage: str, group_size: int, factor: float, kl_coef: float, loss: str
) -> None:
    actual = expected_ascent(group_size, kl_coef, advantage, POLICY_LOSSES[loss])
    expected = factor * true_ascent(kl_coef)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize(("advantage", "factor"), [("rloo", 1.0), ("group_mean", 2 / 3)])
def test_expected_policy_gradient_of_groups_of_three(advantage: str, factor: float) -> None:
    actual = expected_ascent(3, 0.0, advantage, POLICY_LOSSES["reinforce"])
    torch.testing.assert_close(actual, factor * true_ascent(0.0), rtol=0, atol=1e-12)


def test_dividing_by_the_deviation_changes_the_objective() -> None:
    actual = expected_ascent(2, 0.0, "group_std", POLICY_LOSSES["reinforce"])
    true = true_ascent(0.0)
    cosine = torch.nn.functional.cosine_similarity(actual, true, dim=0)
    assert 0.5 < cosine < 0.999


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_straight_through"])
def test_expected_value_of_sequence_kl(estimator: str) -> None:
    # For k3, whose sum over tokens is not k3 of the sum, the expectation is by the chain rule.
    probs = PI.probs().detach()
    value = torch.zeros((), dtype=torch.float64)
    for i in range(7):
        row = slice(i, i + 1)
        term = kl_loss(
            PI.logprobs()[row], REF.logprobs()[row], MASK[row], estimator=estimator,
            reduction="constant_length", denominator=1.0,
        )  # fmt: skip
        value = value + probs[i] * term.loss
    exact = (probs * (probs.log() - REF.probs().log())).sum()
    assert value.item() == pytest.approx(exact.item(), abs=1e-12)
    assert exact.item() > 0.1


# Four responses to one prompt. Annotators follow Bradley-Terry on REWARDS.
REWARDS = torch.tensor([1.0, 0.2, -0.5, 2.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
PAIRS = torch.tensor(list(itertools.permutations(range(4), 2)))
CHOSEN, REJECTED = PAIRS[:, 0], PAIRS[:, 1]
CHOICE_PROBS = torch.sigmoid(REWARDS[CHOSEN] - REWARDS[REJECTED])


def minimise(objective: Callable[[Tensor], Tensor], size: int) -> Tensor:
    x = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [x], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(x)
        value.backward()
        return value

    optimizer.step(closure)
    return x.detach()


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_dpo_optimum_is_the_tilted_reference(beta: float) -> None:
    def objective(logits: Tensor) -> Tensor:
        logps, ref_logps = logits.log_softmax(0), REFERENCE.log()
        losses = [
            dpo_loss(
                logps[i : i + 1], logps[j : j + 1], ref_logps[i : i + 1], ref_logps[j : j + 1],
                beta=beta,
            ).loss
            for i, j in PAIRS.tolist()
        ]  # fmt: skip
        return (CHOICE_PROBS * torch.stack(losses)).sum()

    tilted = REFERENCE * (REWARDS / beta).exp()
    optimum = minimise(objective, 4).softmax(0)
    torch.testing.assert_close(optimum, tilted / tilted.sum(), rtol=0, atol=1e-6)


def test_ipo_optimum_stops_where_it_should() -> None:
    # With choice probability p, the best log-ratio difference is (2 p - 1) / (2 beta).
    p, beta = 0.8, 0.25

    def objective(logits: Tensor) -> Tensor:
        logps, ref_logps = logits.log_softmax(0), REFERENCE[:2].log()
        a, b, ref_a, ref_b = logps[:1], logps[1:], ref_logps[:1], ref_logps[1:]
        right = ipo_loss(a, b, ref_a, ref_b, beta=beta).loss
        wrong = ipo_loss(b, a, ref_b, ref_a, beta=beta).loss
        return p * right + (1 - p) * wrong

    logits = minimise(objective, 2)
    difference = (logits[0] - logits[1]) - (REFERENCE[0] / REFERENCE[1]).log()
    assert difference.item() == pytest.approx((2 * p - 1) / (2 * beta), abs=1e-6)


def test_bradley_terry_optimum_recovers_the_rewards() -> None:
    def objective(scores: Tensor) -> Tensor:
        losses = [
            bradley_terry_loss(scores[i : i + 1], scores[j : j + 1], centering=1e-9).loss
            for i, j in PAIRS.tolist()
        ]
        return (CHOICE_PROBS * torch.stack(losses)).sum()

    scores = minimise(objective, 4)
    actual, expected = scores - scores.mean(), REWARDS - REWARDS.mean()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
