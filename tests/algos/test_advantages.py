"""Token rewards and advantages: by hand, at the edges, and untouched by padding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algos.advantages import (
    ADVANTAGES,
    NEEDS_GROUPS,
    NEEDS_VALUES,
    estimate,
    gae,
    group_mean,
    group_std,
    has_spread,
    reward_to_go,
    rloo,
    token_rewards,
    whiten,
)
from rlhf.algos.types import Advantages

NAN = float("nan")


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def mask_row(*flags: int) -> Tensor:
    return torch.tensor([flags], dtype=torch.bool)


def call(name: str, rewards: Tensor, scores: Tensor, mask: Tensor, group_size: int) -> Advantages:
    values = torch.zeros_like(rewards) if name in NEEDS_VALUES else None
    return estimate(
        name,
        rewards=rewards,
        scores=scores,
        values=values,
        response_mask=mask,
        group_size=group_size,
        gamma=1.0,
        gae_lambda=1.0,
    )


def test_gae_never_reads_masked_values() -> None:  # T1
    # t=1: 1 + 0 - 0 = 1. t=0: 0 + 0 - 0 + .95 * 1 = .95. The value 100 is padding.
    advantages, returns = gae(
        row(0, 1, 0), row(0, 0, 100), mask_row(1, 1, 0), gamma=1.0, gae_lambda=0.95
    )
    assert advantages.tolist() == [[0.95, 1, 0]]
    assert returns.tolist() == [[0.95, 1, 0]]


def test_gae_by_hand() -> None:
    # gamma .5, lambda .5, V = [1, 2, 4], r = [0, 0, 8].
    # delta_2 = 8 - 4 = 4;           A_2 = 4
    # delta_1 = .5 * 4 - 2 = 0;      A_1 = 0 + .25 * 4 = 1
    # delta_0 = .5 * 2 - 1 = 0;      A_0 = 0 + .25 * 1 = .25
    advantages, returns = gae(
        row(0, 0, 8), row(1, 2, 4), mask_row(1, 1, 1), gamma=0.5, gae_lambda=0.5
    )
    assert advantages.tolist() == [[0.25, 1, 4]]
    assert returns.tolist() == [[1.25, 3, 8]]


def test_gae_steps_over_holes() -> None:
    # As by hand above, with an unread position between the first and the second token.
    advantages, returns = gae(
        row(0, NAN, 0, 8), row(1, NAN, 2, 4), mask_row(1, 0, 1, 1), gamma=0.5, gae_lambda=0.5
    )
    assert advantages.tolist() == [[0.25, 0, 1, 4]]
    assert returns.tolist() == [[1.25, 0, 3, 8]]


def test_gae_extremes() -> None:
    rewards, values = row(1, 2, 4), row(3, 5, 7)
    mask = mask_row(1, 1, 1)
    # lambda 1: reward-to-go minus value, 7 - 3, 6 - 5, 4 - 7.
    assert gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)[0].tolist() == [[4, 1, -3]]
    # lambda 0: one-step error, 1 + 5 - 3, 2 + 7 - 5, 4 - 7.
    assert gae(rewards, values, mask, gamma=1.0, gae_lambda=0.0)[0].tolist() == [[3, 4, -3]]


def test_reward_to_go_by_hand() -> None:
    # gamma .5: 4; 2 + .5 * 4 = 4; 1 + .5 * 4 = 3; the hole does not discount.
    actual = reward_to_go(row(1, NAN, 2, 4), mask_row(1, 0, 1, 1), gamma=0.5)
    assert actual.tolist() == [[3, 0, 4, 4]]


def test_last_trainable_token_gets_the_score() -> None:  # C11
    mask = mask_row(1, 1, 0, 0)
    rewards = token_rewards(torch.tensor([5.0]), torch.zeros(1, 4), mask, kl_coef=0.0)
    assert reward_to_go(rewards, mask, gamma=0.0).tolist() == [[0, 5, 0, 0]]
    assert reward_to_go(rewards, mask, gamma=1.0).tolist() == [[5, 5, 0, 0]]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (mask_row(1, 1, 1, 0), [0, 0, 7, 0]),  # C6: [a, b, EOS, PAD]
        (mask_row(0, 1, 1, 1), [0, 0, 0, 7]),
        (mask_row(1, 1, 1, 1), [0, 0, 0, 7]),
        (mask_row(1, 0, 1, 0), [0, 0, 7, 0]),
        (mask_row(0, 0, 0, 0), [0, 0, 0, 0]),  # C14
    ],
)
def test_score_stands_at_the_last_response_token(mask: Tensor, expected: list[float]) -> None:
    kl = torch.full((1, 4), NAN).masked_fill(mask, 0.0)
    actual = token_rewards(torch.tensor([7.0]), kl, mask, kl_coef=0.1)
    assert actual.tolist() == [expected]


def test_token_rewards_with_kl_by_hand() -> None:
    # -.1 * 2 = -.2; 7 - .1 * 3 = 6.7; the KL of padding is never read.
    actual = token_rewards(row(7)[0], row(2, 3, NAN), mask_row(1, 1, 0), kl_coef=0.1)
    assert actual[0].tolist() == pytest.approx([-0.2, 6.7, 0], abs=1e-12)


def test_groups_by_hand() -> None:  # C37
    scores = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0], dtype=torch.float64)
    # Mean 3/8. Variance (3 * (5/8)^2 + 5 * (3/8)^2) / 7 = 15/56.
    deviation = math.sqrt(15 / 56)
    assert group_mean(scores, 8).tolist() == [0.625] * 3 + [-0.375] * 5
    actual = group_std(scores, 8, eps=0.0)
    expected = [0.625 / deviation] * 3 + [-0.375 / deviation] * 5  # 1.2076, -.7246
    assert actual.tolist() == pytest.approx(expected, abs=1e-12)
    assert group_std(scores, 8).tolist() == pytest.approx(expected, abs=1e-5)
    # The others' mean is 2/7 for a 1 and 3/7 for a 0.
    assert rloo(scores, 8).tolist() == pytest.approx([5 / 7] * 3 + [-3 / 7] * 5, abs=1e-12)


@pytest.mark.parametrize("baseline", [group_mean, group_std, rloo])
def test_groups_without_spread_are_exactly_zero(baseline) -> None:  # type: ignore[no-untyped-def]
    # T2, C35, C38. The float32 mean of three times .1 is not .1.
    assert baseline(torch.tensor([1.0, 1.0, 0.0, 0.0]), 2).tolist() == [0, 0, 0, 0]
    assert baseline(torch.full((3,), 0.1), 3).tolist() == [0, 0, 0]
    assert baseline(torch.full((6,), 1e6 + 0.1), 3).abs().max().item() == 0


@pytest.mark.parametrize("baseline", [group_mean, group_std, rloo, has_spread])
def test_a_group_needs_two_samples(baseline) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="at least 2 samples"):  # T2
        baseline(torch.tensor([1.0, 2.0]), 1)
    with pytest.raises(ValueError, match="groups of 2"):
        baseline(torch.tensor([1.0, 2.0, 3.0]), 2)
    with pytest.raises(ValueError, match="groups of 2"):
        baseline(torch.tensor([]), 2)


def test_spread_is_of_the_group() -> None:
    assert has_spread(torch.tensor([1.0, 1.0, 2.0, 3.0]), 2).tolist() == [False, False, True, True]


def test_groups_share_of_zero_spread_is_counted() -> None:  # C35
    mask = torch.ones(6, 2, dtype=torch.bool)
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0])
    rewards = token_rewards(scores, torch.zeros(6, 2), mask, kl_coef=0.0)
    for name in NEEDS_GROUPS:
        output = call(name, rewards, scores, mask, 2)
        assert output.metrics["zero_spread_groups"].item() == pytest.approx(2 / 3)
        assert output.advantages[[0, 1, 4, 5]].abs().max().item() == 0
        assert output.advantages[3, 0].item() > 0 > output.advantages[2, 0].item()


def test_group_scores_contain_the_kl_of_the_reward() -> None:
    # Scores 1 and 1; KL sums 2 and 4 at .5 per nat: totals 0 and -1, mean -.5.
    mask = torch.tensor([[True, True], [True, False]])
    kl = torch.tensor([[1.0, 1.0], [4.0, NAN]])
    scores = torch.tensor([1.0, 1.0])
    rewards = token_rewards(scores, kl, mask, kl_coef=0.5)
    output = call("group_mean", rewards, scores, mask, 2)
    assert output.advantages.tolist() == [[0.5, 0.5], [-0.5, 0]]
    assert output.metrics["zero_spread_groups"].item() == 1  # of the raw scores


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_an_empty_completion_is_a_zero_row_and_leaves_its_peers(name: str) -> None:  # C14
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    outputs = []
    for score in (10.0, 0.0):
        scores = torch.tensor([0.0, score, 1.0, 2.0])
        rewards = token_rewards(scores, torch.zeros(4, 3), mask, kl_coef=0.0)
        outputs.append(call(name, rewards, scores, mask, 2))
    assert torch.equal(outputs[0].advantages, outputs[1].advantages)
    assert outputs[0].advantages[:2].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert outputs[0].advantages[3, 0].item() > 0
    assert outputs[0].metrics == outputs[1].metrics


def test_whiten_by_hand() -> None:
    # Mean 2, deviation (ddof 1) of 1, 2, 3 is 1.
    x, mask = row(1, 2, 3, NAN), mask_row(1, 1, 1, 0)
    assert whiten(x, mask)[0].tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-7)
    assert whiten(x, mask, shift_mean=False)[0].tolist() == pytest.approx([1, 2, 3, 0], abs=1e-7)
    # Of 2, 4, 6 the deviation is 2.
    assert whiten(2 * x, mask)[0].tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-7)


@pytest.mark.parametrize("mask", [mask_row(0, 1, 0), mask_row(0, 0, 0)])
def test_whiten_leaves_fewer_than_two_alone(mask: Tensor) -> None:  # T4
    x = row(NAN, 5, NAN)
    expected = torch.where(mask, x, 0)
    assert torch.equal(whiten(x, mask), expected)
    assert torch.equal(whiten(x, mask, shift_mean=False), expected)


def test_whiten_of_equal_values_is_finite() -> None:
    assert whiten(row(3, 3), mask_row(1, 1)).tolist() == [[0, 0]]


def test_estimate_refusals() -> None:
    rewards, scores = torch.zeros(2, 3), torch.zeros(2)
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="unknown advantage 'grpo'"):
        call("grpo", rewards, scores, mask, 2)
    for name in NEEDS_GROUPS:
        with pytest.raises(ValueError, match="at least 2 samples"):
            call(name, rewards, scores, mask, 1)
    with pytest.raises(ValueError, match="shapes differ"):
        call("reinforce", rewards, scores, mask[:, :2], 2)
    with pytest.raises(ValueError, match="do not fit"):
        call("reinforce", rewards, scores[:1], mask, 2)
    with pytest.raises(ValueError, match="needs values"):
        ADVANTAGES["gae"](
            rewards=rewards,
            scores=scores,
            values=None,
            response_mask=mask,
            group_size=1,
            gamma=1.0,
            gae_lambda=1.0,
        )
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\]"):
        reward_to_go(rewards, mask, gamma=1.1)
    with pytest.raises(ValueError, match="gae_lambda must lie"):
        gae(rewards, rewards, mask, gamma=1.0, gae_lambda=-0.1)
    with pytest.raises(ValueError, match="kl_coef must be"):
        token_rewards(scores, rewards, mask, kl_coef=-0.1)
    with pytest.raises(ValueError, match="do not fit"):
        token_rewards(scores[:1], rewards, mask, kl_coef=0.1)


@pytest.mark.parametrize("name", list(ADVANTAGES))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), left=st.integers(0, 3), right=st.integers(0, 3))
def test_masked_places_padding_and_order_change_nothing(
    name: str, seed: int, left: int, right: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups, size, length = 3, 2, 5
    shape = (groups * size, length)
    mask = torch.rand(shape, generator=generator) < 0.6
    rewards = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    scores = torch.randn(shape[0], generator=generator, dtype=torch.float64)

    def advantages(rewards: Tensor, values: Tensor, scores: Tensor, mask: Tensor) -> Advantages:
        return estimate(
            name,
            rewards=rewards,
            scores=scores,
            values=values,
            response_mask=mask,
            group_size=size,
            gamma=0.9,
            gae_lambda=0.8,
        )

    def padded(x: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(x, (left, right), value=value)

    plain = advantages(rewards, values, scores, mask)
    assert plain.advantages[~mask].abs().sum().item() == 0
    assert (plain.returns is not None) == (name in NEEDS_VALUES)

    nan_rewards = torch.where(mask, rewards, NAN)
    nan_values = torch.where(mask, values, NAN)
    other = advantages(
        padded(nan_rewards, NAN), padded(nan_values, NAN), scores, padded(mask, False)
    )
    torch.testing.assert_close(other.advantages[:, left : left + length], plain.advantages)
    if plain.returns is not None and other.returns is not None:
        torch.testing.assert_close(other.returns[:, left : left + length], plain.returns)
        assert plain.returns[~mask].abs().sum().item() == 0

    # Prompts in another order, and the two samples of each prompt swapped.
    order = torch.tensor([5, 4, 1, 0, 3, 2])
    moved = advantages(rewards[order], values[order], scores[order], mask[order])
    torch.testing.assert_close(moved.advantages, plain.advantages[order])
    assert moved.metrics.keys() == plain.metrics.keys()
    for metric, value in plain.metrics.items():
        torch.testing.assert_close(moved.metrics[metric], value)


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_advantages_are_constants(name: str) -> None:
    rewards = torch.randn(4, 3, requires_grad=True)
    values = torch.randn(4, 3, requires_grad=True)
    output = estimate(
        name,
        rewards=rewards,
        scores=rewards.sum(1),
        values=values,
        response_mask=torch.ones(4, 3, dtype=torch.bool),
        group_size=2,
        gamma=1.0,
        gae_lambda=0.95,
    )
    assert not output.advantages.requires_grad
    assert output.returns is None or not output.returns.requires_grad
