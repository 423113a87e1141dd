"""Policy losses and KL placements against their definitions, on a policy that can be enumerated.

A policy over tokens 0, 1, 2 writes at most two of them and stops after a 0: seven sequences, whose
probabilities give every expectation exactly. What a loss does on average is compared with autograd
of the objective that it stands for; where it is biased, with what its text says it does instead.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlhf.algos.kl import KL_ESTIMATORS, full_kl, full_kl_loss, kl_loss
from rlhf.algos.logprobs import token_logprobs
from rlhf.algos.masking import masked_sum, select
from rlhf.algos.policy_losses import (
    POLICY_LOSSES,
    importance_correction,
    importance_weighted_loss,
    reinforce_loss,
)
from rlhf.algos.types import LossOutput

SEQUENCES = [[0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
IDS = torch.tensor([(sequence + [0])[:2] for sequence in SEQUENCES])
MASK = torch.tensor([[True, len(sequence) == 2] for sequence in SEQUENCES])
SCORES = torch.tensor([0.3, -1.0, 2.0, 0.5, 1.5, -0.7, 0.1], dtype=torch.float64)
FIRST = MASK & torch.tensor([True, False])


class Policy(NamedTuple):
    """Logits of the first token (3,), and of the second after each first (3, 3)."""

    first: Tensor
    second: Tensor

    def logits(self) -> Tensor:
        """(7, 2, 3) that predict the tokens of every sequence."""
        return torch.stack([self.first.expand(7, 3), self.second[IDS[:, 0]]], dim=1)

    def logprobs(self) -> Tensor:
        """(7, 2) nats of the tokens of every sequence."""
        return token_logprobs(self.logits(), IDS)

    def probs(self) -> Tensor:
        """(7,) probabilities of the sequences."""
        return masked_sum(self.logprobs(), MASK, dim=1).exp()


def policy(seed: int) -> Policy:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return Policy(weights[0].clone().requires_grad_(), weights[1:].clone().requires_grad_())


def gradient(objective: Tensor, of: Policy) -> Tensor:
    """(12,) gradient to all logits."""
    parts = torch.autograd.grad(objective, [of.first, of.second], allow_unused=True)
    pairs = zip(parts, of, strict=True)
    return torch.cat([(x.new_zeros(x.shape) if g is None else g).flatten() for g, x in pairs])


PI, REF, OLD = policy(0), policy(1), policy(2)
PER_SEQUENCE = SCORES[:, None].expand(7, 2)


def mean_ascent(
    loss: Callable[..., LossOutput],
    advantages: Tensor,
    *,
    sampler: Policy = PI,
    old_logprobs: Tensor | None = None,
    mask: Tensor = MASK,
    reduction: str = "constant_length",
) -> Tensor:
    """Minus the gradient of the loss of one sequence, averaged over those that the sampler writes."""
    logprobs, probs = PI.logprobs(), sampler.probs().detach()
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    terms = [
        loss(
            logprobs[i : i + 1], old[i : i + 1], advantages[i : i + 1], mask[i : i + 1],
            reduction=reduction, denominator=1.0,
        ).loss
        for i in range(7)
    ]  # fmt: skip
    return -gradient((probs * torch.stack(terms)).sum(), PI)


def true_ascent() -> Tensor:
    return gradient((PI.probs() * SCORES).sum(), PI)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 0.01


def assert_apart(actual: Tensor, other: Tensor) -> None:
    assert (actual - other).abs().max() > 0.01


# --- policy losses ---


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_on_policy_every_loss_has_the_true_gradient(name: str) -> None:
    assert_equal(mean_ascent(POLICY_LOSSES[name], PER_SEQUENCE), true_ascent())


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_on_policy_advantages_of_tokens_keep_their_token(name: str) -> None:
    # A baseline at the second token that depends on the first changes nothing on average; a loss
    # that gave the first token the second one's advantage would lose this.
    baseline = torch.tensor([0.0, 3.0, -2.0], dtype=torch.float64)[IDS[:, 0]]
    advantages = PER_SEQUENCE - torch.stack([torch.full_like(baseline, 0.7), baseline], dim=1)
    assert_equal(mean_ascent(POLICY_LOSSES[name], advantages), true_ascent())


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_on_policy_sequence_mean_weighs_by_one_over_length(name: str) -> None:
    # The gradient of E[score / length] with the length held constant: not the true one.
    shares = SCORES / MASK.sum(1)
    expected = gradient((PI.probs() * shares).sum(), PI)
    actual = mean_ascent(POLICY_LOSSES[name], PER_SEQUENCE, reduction="sequence_mean")
    assert_equal(actual, expected)
    assert_apart(actual, true_ascent())


@pytest.mark.parametrize("name", ["importance_weighted", "cispo"])
def test_off_policy_one_token_is_unbiased(name: str) -> None:
    # The first token alone, scored by itself; no ratio here comes near cispo's bound of 5.
    scores = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)[IDS[:, 0]]
    true = gradient((PI.probs() * scores).sum(), PI)
    old = OLD.logprobs().detach()
    assert (PI.logprobs() - old)[FIRST].exp().max() < 4
    arguments = {"sampler": OLD, "old_logprobs": old, "mask": FIRST}
    advantages = scores[:, None].expand(7, 2)
    assert_equal(mean_ascent(POLICY_LOSSES[name], advantages, **arguments), true)  # type: ignore[arg-type]
    assert_apart(mean_ascent(reinforce_loss, advantages, **arguments), true)  # type: ignore[arg-type]


def test_off_policy_tokens_keep_the_prefixes_of_the_old_policy() -> None:
    # At each token the policy's own choice, at prefixes and with continuations of the old policy.
    old_probs = OLD.probs().detach()
    old = OLD.logprobs().detach()
    first_probs = PI.first.softmax(0)[IDS[:, 0]] / OLD.first.detach().softmax(0)[IDS[:, 0]]
    second_probs = (PI.logprobs() - old)[:, 1].exp()
    surrogate = first_probs + torch.where(MASK[:, 1], second_probs, 0)
    expected = gradient((old_probs * SCORES * surrogate).sum(), PI)
    actual = mean_ascent(importance_weighted_loss, PER_SEQUENCE, sampler=OLD, old_logprobs=old)
    assert_equal(actual, expected)
    assert_apart(actual, true_ascent())


def test_off_policy_weights_of_whole_sequences_are_unbiased() -> None:
    weights = (PI.probs() / OLD.probs()).detach()
    actual = mean_ascent(reinforce_loss, weights[:, None] * PER_SEQUENCE, sampler=OLD)
    assert_equal(actual, true_ascent())


def test_an_engine_that_differs_is_corrected_for_one_token() -> None:
    scores = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)[IDS[:, 0]]
    advantages = scores[:, None].expand(7, 2)
    true = gradient((PI.probs() * scores).sum(), PI)
    trainer, engine = PI.logprobs().detach(), OLD.logprobs().detach()
    weights, metrics = importance_correction(trainer, engine, FIRST, cap=float("inf"))
    arguments = {"sampler": OLD, "mask": FIRST}
    for loss in POLICY_LOSSES.values():
        assert_equal(mean_ascent(loss, advantages * weights, **arguments), true)  # type: ignore[arg-type]
    assert_apart(mean_ascent(reinforce_loss, advantages, **arguments), true)  # type: ignore[arg-type]
    capped, capped_metrics = importance_correction(trainer, engine, FIRST, cap=1.0)
    assert 0 < capped_metrics["capped_fraction"] < 1
    assert metrics["capped_fraction"] == 0
    biased = mean_ascent(reinforce_loss, advantages * capped, **arguments)  # type: ignore[arg-type]
    assert_apart(biased, true)


def test_mismatch_is_the_divergence_of_the_engine_from_the_trainer() -> None:
    trainer, engine, probs = PI.logprobs().detach(), OLD.logprobs().detach(), OLD.probs().detach()
    nats = torch.zeros((), dtype=torch.float64)
    for i in range(7):
        row = slice(i, i + 1)
        found = importance_correction(trainer[row], engine[row], MASK[row], cap=2.0)
        nats = nats + probs[i] * found.metrics["mismatch_nats"] * MASK[i].sum()
    exact = (probs * (probs.log() - PI.probs().detach().log())).sum()
    assert nats.item() == pytest.approx(exact.item(), abs=1e-12)
    assert exact > 0.1


# --- KL of sequences: in the loss and in the reward ---


def sequence_kl() -> Tensor:
    probs = PI.probs()
    return (probs * (probs.log() - REF.probs().detach().log())).sum()


def local_kl_gradient() -> Tensor:
    """Of the exact KL at every prefix, the prefixes being constants."""
    apart = full_kl(PI.logits(), REF.logits())
    return gradient((PI.probs().detach() * masked_sum(apart, MASK, dim=1)).sum(), PI)


def mean_loss_gradient(term: Callable[[slice], LossOutput]) -> Tensor:
    losses = torch.stack([term(slice(i, i + 1)).loss for i in range(7)])
    return gradient((PI.probs().detach() * losses).sum(), PI)


def in_loss(estimator: str) -> Tensor:
    logprobs, ref = PI.logprobs(), REF.logprobs()
    return mean_loss_gradient(
        lambda row: kl_loss(
            logprobs[row], ref[row], MASK[row], estimator=estimator,
            reduction="constant_length", denominator=1.0,
        )
    )  # fmt: skip


def in_reward(estimator: str) -> Tensor:
    """Gradient of the loss whose advantage is minus the KL terms from the token on."""
    terms = KL_ESTIMATORS[estimator](PI.logprobs().detach(), REF.logprobs().detach())
    to_go = select(terms, MASK).flip(1).cumsum(1).flip(1)
    return -mean_ascent(reinforce_loss, -to_go)


def test_k1_in_the_reward_has_the_gradient_of_sequence_kl() -> None:
    assert_equal(in_reward("k1"), gradient(sequence_kl(), PI))


def test_k1_in_the_loss_does_nothing() -> None:
    assert in_loss("k1").abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k2", "k3_straight_through"])
def test_in_the_loss_the_kl_of_each_prefix_falls(estimator: str) -> None:
    assert_equal(in_loss(estimator), local_kl_gradient())
    # Not that of sequences: a first token does not answer for the KL that comes after it.
    assert_apart(in_loss(estimator), gradient(sequence_kl(), PI))


def test_k3_in_the_loss_pulls_along_the_other_direction() -> None:
    apart = full_kl(REF.logits().detach(), PI.logits())  # constant in the second: only its value
    logps, ref = PI.logits().log_softmax(-1), REF.logits().detach().log_softmax(-1)
    other = (ref.exp() * (ref - logps)).sum(-1)
    torch.testing.assert_close(other.detach(), apart)
    expected = gradient((PI.probs().detach() * masked_sum(other, MASK, dim=1)).sum(), PI)
    assert_equal(in_loss("k3"), expected)
    assert_apart(in_loss("k3"), local_kl_gradient())


@pytest.mark.parametrize("estimator", ["k3", "k3_straight_through"])
def test_k3_in_the_reward_is_biased_by_its_own_gradient(estimator: str) -> None:
    assert_equal(in_reward(estimator), gradient(sequence_kl(), PI) - in_loss("k3"))
    assert_apart(in_reward(estimator), gradient(sequence_kl(), PI))


def test_k2_in_the_reward_has_the_gradient_of_its_value_less_that_in_the_loss() -> None:
    squares = KL_ESTIMATORS["k2"](PI.logprobs(), REF.logprobs().detach())
    value = (PI.probs() * masked_sum(squares, MASK, dim=1)).sum()
    assert_equal(in_reward("k2"), gradient(value, PI) - in_loss("k2"))
    assert_apart(in_reward("k2"), gradient(sequence_kl(), PI))


def test_exact_kl_in_the_loss_has_value_and_gradient_of_each_prefix() -> None:
    logits, ref_logits = PI.logits(), REF.logits()

    def term(row: slice) -> LossOutput:
        return full_kl_loss(
            logits[row], ref_logits[row], MASK[row], reduction="constant_length", denominator=1.0
        )

    assert_equal(mean_loss_gradient(term), local_kl_gradient())
    value = sum(PI.probs()[i].item() * term(slice(i, i + 1)).loss.item() for i in range(7))
    assert value == pytest.approx(sequence_kl().item(), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_straight_through"])
def test_values_add_up_to_sequence_kl(estimator: str) -> None:
    terms = KL_ESTIMATORS[estimator](PI.logprobs(), REF.logprobs())
    value = (PI.probs() * masked_sum(terms, MASK, dim=1)).sum()
    assert value.item() == pytest.approx(sequence_kl().item(), abs=1e-12)
    assert sequence_kl() > 0.1
