"""Reward from demonstrations: by hand, and by definition on trajectories that can be counted."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_by_definition import minimise
from torch import Tensor

from rlhf.algos.imitation import (
    airl_discriminator_loss,
    airl_f,
    airl_logits,
    airl_reward,
    gail_discriminator_loss,
    gail_reward,
    max_ent_irl_loss,
    mixture_logprobs,
)
from rlhf.algos.types import LossOutput, combine_metrics

NAN, INF = float("nan"), float("inf")


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def numbers(output: LossOutput) -> dict[str, float]:
    assert all(value.shape == () and not value.requires_grad for value in output.metrics.values())
    return {name: value.item() for name, value in output.metrics.items()}


# --- maximum entropy ---


def test_max_ent_irl_by_hand() -> None:
    # Rewards 0 and log 3 sampled with 1/2 and 1/4: e^r / q = 2 and 12, log Z = log 7, w = 1/7, 6/7.
    expert = vector(1, 2).requires_grad_()
    sampled = vector(0, math.log(3)).requires_grad_()
    logprobs = vector(math.log(0.5), math.log(0.25)).requires_grad_()
    output = max_ent_irl_loss(expert, sampled, logprobs)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.log(7) - 1.5, abs=1e-12)
    assert expert.grad is not None
    assert sampled.grad is not None
    assert expert.grad.tolist() == pytest.approx([-0.5, -0.5], abs=1e-12)
    # Just the weights: nothing flows through them, nor to who sampled.
    assert sampled.grad.tolist() == pytest.approx([1 / 7, 6 / 7], abs=1e-12)
    assert logprobs.grad is None
    assert numbers(output) == pytest.approx(
        {
            "effective_sample_fraction": 49 / 37 / 2,
            "log_partition_nats": math.log(7),
            "expert_reward_mean": 1.5,
            "model_reward_mean": 6 / 7 * math.log(3),
        },
        abs=1e-12,
    )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.floats(-50, 50))
def test_rewards_are_free_up_to_a_constant_and_samples_up_to_order(seed: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    expert, sampled, logprobs = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in (4, 6, 6)
    )
    plain = max_ent_irl_loss(expert, sampled, logprobs)
    moved = max_ent_irl_loss(expert + shift, sampled + shift, logprobs)
    torch.testing.assert_close(moved.loss, plain.loss)
    order = torch.randperm(6, generator=generator)
    other = max_ent_irl_loss(expert.flip(0), sampled[order], logprobs[order])
    torch.testing.assert_close(other.loss, plain.loss)
    assert 1 / 6 - 1e-12 <= plain.metrics["effective_sample_fraction"].item() <= 1 + 1e-12


def test_weights_of_a_far_sampler_are_finite_and_show() -> None:
    sampled = vector(-1000, 1000, 0).requires_grad_()
    output = max_ent_irl_loss(vector(0), sampled, vector(1000, -1000, 0))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(2000 - math.log(3))
    assert sampled.grad is not None
    assert sampled.grad.tolist() == [0, 1, 0]
    assert output.metrics["effective_sample_fraction"].item() == pytest.approx(1 / 3)
    even = max_ent_irl_loss(vector(0), vector(5, 5, 5), vector(1, 1, 1))
    assert even.metrics["effective_sample_fraction"].item() == pytest.approx(1)


# Four trajectories. Each stands as often as it is expected to, so means are expectations.
EXPERT_COUNTS, SAMPLER_COUNTS = torch.tensor([4, 3, 2, 1]), torch.tensor([1, 2, 3, 4])
EXPERT = EXPERT_COUNTS.double() / 10
SAMPLER = SAMPLER_COUNTS.double() / 10
DEMONSTRATIONS = torch.arange(4).repeat_interleave(EXPERT_COUNTS)
SAMPLES = torch.arange(4).repeat_interleave(SAMPLER_COUNTS)


def irl(rewards: Tensor) -> Tensor:
    return max_ent_irl_loss(rewards[DEMONSTRATIONS], rewards[SAMPLES], SAMPLER.log()[SAMPLES]).loss


def test_irl_recovers_the_experts_policy_whoever_samples() -> None:
    found = minimise(irl, 4)
    torch.testing.assert_close(found.softmax(0), EXPERT, rtol=0, atol=1e-6)
    # At the optimum the loss is the expert's entropy.
    entropy = -(EXPERT * EXPERT.log()).sum()
    assert irl(found).item() == pytest.approx(entropy.item(), abs=1e-9)


def test_irl_gradient_is_zero_only_where_the_soft_optimal_policy_is_the_experts() -> None:
    for rewards in (EXPERT.log() + 3, vector(0, 1, -1, 0.5)):
        rewards = rewards.requires_grad_()
        (gradient,) = torch.autograd.grad(irl(rewards), rewards)
        # What the model does too often, minus what the expert does.
        expected = rewards.detach().softmax(0) - EXPERT
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-7)


def test_the_probabilities_of_the_environment_cancel() -> None:
    # Two actions; after each, heads with 1/4. Trajectories (action, coin); rewards of both.
    environment = vector(0.25, 0.75, 0.25, 0.75)
    actions = vector(0.4, 0.4, 0.6, 0.6)  # the sampler's
    counts = (environment * actions * 20).round().long()  # 2, 6, 3, 9
    samples = torch.arange(4).repeat_interleave(counts)
    rewards = vector(1.0, -0.5, 0.3, 0.8).requires_grad_()
    demonstrations = torch.tensor([0, 1, 2, 2])
    output = max_ent_irl_loss(rewards[demonstrations], rewards[samples], actions.log()[samples])
    model = environment * rewards.exp()
    assert output.metrics["log_partition_nats"].item() == pytest.approx(
        model.sum().log().item(), abs=1e-12
    )
    (gradient,) = torch.autograd.grad(output.loss, rewards)
    expected = (model / model.sum()).detach() - vector(0.25, 0.25, 0.5, 0)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_mixture_by_hand() -> None:
    # 3 of 4 samples from the first policy: .75 * .2 + .25 * .6 = .3, .75 * .8 + .25 * .4 = .7.
    logprobs = torch.tensor([[0.2, 0.8], [0.6, 0.4]], dtype=torch.float64).log().requires_grad_()
    mixed = mixture_logprobs(logprobs, torch.tensor([3, 1]))
    assert mixed.exp().tolist() == pytest.approx([0.3, 0.7], abs=1e-12)
    assert not mixed.requires_grad
    # A policy that drew nothing is not in the mixture, whatever it thinks.
    spoilt = torch.cat([logprobs.detach(), torch.full((1, 2), NAN)])
    assert torch.equal(mixture_logprobs(spoilt, torch.tensor([3, 1, 0])), mixed)


def test_a_pool_with_the_demonstrations_in_it_has_the_same_partition_function() -> None:
    # 10 samples of the sampler and the 10 demonstrations.
    rewards = vector(0, 1, -1, 0.5)
    pool = torch.cat([SAMPLES, DEMONSTRATIONS])
    logprobs = torch.stack([SAMPLER.log()[pool], EXPERT.log()[pool]])
    mixed = mixture_logprobs(logprobs, torch.tensor([10, 10]))
    output = max_ent_irl_loss(rewards[:1], rewards[pool], mixed)
    expected = rewards.logsumexp(0).item()
    assert output.metrics["log_partition_nats"].item() == pytest.approx(expected, abs=1e-6)


def test_the_mixture_of_a_single_sample_is_its_policy() -> None:
    assert mixture_logprobs(vector(-1, -2)[:, None], torch.tensor([1, 0])).tolist() == [-1]


# --- adversarial ---


def test_gail_and_airl_rewards_by_hand() -> None:  # C90
    # Logit 2: D = .8808, -log(1 - D) = log(1 + e^2) = 2.1269; log D - log(1 - D) = 2.
    logits = vector(2).requires_grad_()
    assert gail_reward(logits).item() == pytest.approx(2.1269, abs=5e-5)
    assert gail_reward(logits).item() == pytest.approx(-math.log(1 - sigmoid(2)), abs=1e-12)
    assert not gail_reward(logits).requires_grad
    f, logprobs = vector(-1).requires_grad_(), vector(-3).requires_grad_()
    assert airl_logits(f, logprobs).item() == 2
    assert airl_reward(f, logprobs).item() == 2
    assert not airl_reward(f, logprobs).requires_grad
    airl_logits(f, logprobs).backward()
    assert f.grad is not None
    assert f.grad.item() == 1
    assert logprobs.grad is None
    # More like the expert is more reward, and it is finite far out.
    assert gail_reward(vector(-1000, 0, 1000)).tolist() == pytest.approx([0, math.log(2), 1000])


def test_discriminator_by_hand() -> None:
    # Experts 2 and 0, one sample of the policy at -1.
    expert, policy = vector(2, 0).requires_grad_(), vector(-1).requires_grad_()
    output = gail_discriminator_loss(expert, policy)
    output.loss.backward()
    loss = -(math.log(sigmoid(2)) + math.log(0.5)) / 2 - math.log(1 - sigmoid(-1))
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert expert.grad is not None
    assert policy.grad is not None
    assert expert.grad.tolist() == pytest.approx([-sigmoid(-2) / 2, -0.25], abs=1e-12)
    assert policy.grad.item() == pytest.approx(sigmoid(-1), abs=1e-12)
    assert numbers(output) == {
        "expert_accuracy": 0.75,  # 0 is a coin
        "policy_accuracy": 1,
        "expert_logit_mean": 1,
        "policy_logit_mean": -1,
    }
    # Undecided everywhere: 2 log 2.
    coin = gail_discriminator_loss(vector(0, 0), vector(0))
    assert coin.loss.item() == pytest.approx(2 * math.log(2), abs=1e-12)
    far = gail_discriminator_loss(vector(-1000), vector(1000))
    assert far.loss.item() == 2000
    assert numbers(far)["expert_accuracy"] == numbers(far)["policy_accuracy"] == 0


def test_discriminator_optimum_tells_the_densities_apart() -> None:
    policy = vector(0.1, 0.2, 0.3, 0.4)
    logits = minimise(lambda x: gail_discriminator_loss(x[DEMONSTRATIONS], x[SAMPLES]).loss, 4)
    expected = EXPERT / (EXPERT + policy)
    torch.testing.assert_close(logits.sigmoid(), expected, rtol=0, atol=1e-6)


def airl(f: Tensor, logprobs: Tensor, samples: Tensor) -> Tensor:
    return airl_discriminator_loss(
        f[DEMONSTRATIONS], logprobs[DEMONSTRATIONS], f[samples], logprobs[samples]
    ).loss


def test_airl_recovers_the_experts_log_probabilities_whoever_samples() -> None:
    found = minimise(lambda f: airl(f, SAMPLER.log(), SAMPLES), 4)
    torch.testing.assert_close(found, EXPERT.log(), rtol=0, atol=1e-5)


def test_airl_is_undecided_exactly_where_the_policy_is_the_soft_optimum() -> None:
    # The expert's own policy: f = log pi is stationary with D = 1/2, a shifted or other f is not.
    logprobs = EXPERT.log()
    for f, still in ((logprobs, True), (logprobs + 0.1, False), (vector(0, 0, 0, 0), False)):
        f = f.clone().requires_grad_()
        loss = airl(f, logprobs, DEMONSTRATIONS)
        (gradient,) = torch.autograd.grad(loss, f)
        assert (gradient.abs().max().item() < 1e-12) == still
        undecided = (airl_logits(f, logprobs).sigmoid() - 0.5).abs().max() < 1e-12
        assert bool(undecided) == still
        assert (loss.item() == pytest.approx(2 * math.log(2), abs=1e-12)) == still


def test_airl_reward_descends_the_divergence_from_the_model() -> None:
    logits, f = vector(0.3, -1, 0.5, 2).requires_grad_(), vector(1, 0, -1, 0.5)
    logprobs = logits.log_softmax(0)
    probs = logprobs.exp().detach()
    ascent = torch.autograd.grad((probs * airl_reward(f, logprobs) * logprobs).sum(), logits)[0]
    logprobs = logits.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - f.log_softmax(0))).sum()
    descent = -torch.autograd.grad(divergence, logits)[0]
    torch.testing.assert_close(ascent, descent, rtol=0, atol=1e-12)
    assert descent.abs().max() > 0.01


def test_airl_f_by_hand() -> None:
    # 1 + .5 * 4 - 3 = 0; at the end 2 - 1 = 1, whatever the next value.
    rewards, values = vector(1, 2).requires_grad_(), vector(3, 1).requires_grad_()
    following = vector(4, NAN).requires_grad_()
    f = airl_f(rewards, values, following, torch.tensor([False, True]), gamma=0.5)
    assert f.tolist() == [0, 1]
    f.sum().backward()
    gradients = [x.grad.tolist() for x in (rewards, values, following) if x.grad is not None]
    assert gradients == [[1, 1], [-1, -1], [0.5, 0]]


def test_shaping_telescopes() -> None:
    # Over an episode, sum gamma^t f_t = sum gamma^t r_t - V(s_0): no policy gains by V.
    rewards, values = vector(1, -2, 0.5), vector(3, 7, -4)
    following = torch.cat([values[1:], vector(100)])
    f = airl_f(rewards, values, following, torch.tensor([False, False, True]), gamma=0.9)
    discounts = 0.9 ** torch.arange(3)
    expected = (discounts * rewards).sum() - values[0]
    assert (discounts * f).sum().item() == pytest.approx(expected.item(), abs=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), cut=st.integers(1, 5))
def test_order_and_split_change_nothing(seed: int, cut: int) -> None:  # C39, C40
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    whole = airl_discriminator_loss(*x)
    (gradient,) = torch.autograd.grad(whole.loss, x)
    moved = airl_discriminator_loss(*x[:, torch.randperm(6, generator=generator)])
    torch.testing.assert_close(moved.loss, whole.loss)
    split = [airl_discriminator_loss(*part, denominator=6) for part in (x[:, :cut], x[:, cut:])]
    torch.testing.assert_close(split[0].loss + split[1].loss, whole.loss)
    (split_gradient,) = torch.autograd.grad(split[0].loss + split[1].loss, x)
    torch.testing.assert_close(split_gradient, gradient)
    joined = combine_metrics([part.metrics for part in split], [cut, 6 - cut])
    for metric, value in whole.metrics.items():
        torch.testing.assert_close(joined[metric], value, check_dtype=False)


x, meta = vector(1, 2), vector(1, 2).to("meta")
ends = torch.tensor([False, True])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: max_ent_irl_loss(x[:0], x, x), "at least one demonstration"),
        (lambda: max_ent_irl_loss(x, x[:0], x[:0]), "at least one sample"),
        (lambda: max_ent_irl_loss(x[None], x, x), "at least one demonstration"),
        (lambda: max_ent_irl_loss(x, x, x[:1]), "shapes differ"),
        (lambda: max_ent_irl_loss(x, x, meta), "devices differ"),
        (lambda: max_ent_irl_loss(meta, x, x), "devices differ"),
        (lambda: mixture_logprobs(x, x), "do not fit"),
        (lambda: mixture_logprobs(x[None], x), "do not fit"),
        (lambda: mixture_logprobs(x[:, None], meta), "devices differ"),
        (lambda: mixture_logprobs(x[:, None], vector(1, -1)), "counts must be >= 0"),
        (lambda: mixture_logprobs(x[:, None], vector(3, -1)), "counts must be >= 0"),
        (lambda: mixture_logprobs(x[:, None], vector(0, 0)), "not all 0"),
        (lambda: mixture_logprobs(x[:, None], vector(NAN, 1)), "counts must be"),
        (lambda: gail_discriminator_loss(x[:0], x), "at least one expert logit"),
        (lambda: gail_discriminator_loss(x, x[:0]), "at least one policy logit"),
        (lambda: gail_discriminator_loss(x, meta), "devices differ"),
        (lambda: gail_discriminator_loss(x, x, denominator=0), "denominator must be positive"),
        (lambda: airl_discriminator_loss(x, x[:1], x, x), "shapes differ"),
        (lambda: airl_discriminator_loss(x, x, x, x[:1]), "shapes differ"),
        (lambda: airl_logits(x, x[:1]), "shapes differ"),
        (lambda: airl_logits(x, meta), "devices differ"),
        (lambda: airl_f(x, x[:1], x, ends, gamma=1.0), "shapes differ"),
        (lambda: airl_f(x, x, x[:1], ends, gamma=1.0), "shapes differ"),
        (lambda: airl_f(x[:1], x, x, ends, gamma=1.0), "shapes differ"),
        (lambda: airl_f(x, x, x, ends.float(), gamma=1.0), "must be bool"),
        (lambda: airl_f(x, x, x, ends, gamma=1.01), r"gamma must lie in \[0, 1\]"),
        (lambda: airl_f(x, x, x, ends, gamma=-0.01), r"gamma must lie in \[0, 1\]"),
        (lambda: airl_f(x, x, x, ends, gamma=NAN), r"gamma must lie in \[0, 1\]"),
    ],
)
def test_refusals(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def test_discounts_at_their_bounds() -> None:
    assert airl_f(x, x, x, ends, gamma=0.0).tolist() == [0, 0]
    assert airl_f(x, x, x, ends, gamma=1.0).tolist() == [1, 0]
