"""Token rewards and advantages: by hand, at the edges, and untouched by padding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algos import parts
from rlhf.algos.advantages import (
    ADVANTAGES,
    clip_advantages,
    gae,
    group_mean,
    group_std,
    groups_with_spread,
    has_spread,
    max_rl,
    reward_to_go,
    rloo,
    token_rewards,
    whiten,
)
from rlhf.algos.types import Advantages

NAN, INF = float("nan"), float("inf")
GROUPED = [name for name, part in ADVANTAGES.items() if "group_size" in parts.inputs(part)]
VALUED = [name for name, part in ADVANTAGES.items() if "values" in parts.inputs(part)]
CENTRED = ["group_mean", "group_std", "rloo", "max_rl", "reinforce_plus_plus_baseline"]


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def mask_row(*flags: int) -> Tensor:
    return torch.tensor([flags], dtype=torch.bool)


def call(
    name: str, rewards: Tensor, scores: Tensor, mask: Tensor, group_size: int = 1, **more: object
) -> Advantages:
    """The entry on these inputs; what else is given is an input if the entry names it, or an option."""
    part = ADVANTAGES[name]
    available = {
        "rewards": rewards,
        "scores": scores,
        "values": torch.zeros_like(rewards),
        "final_values": torch.zeros_like(scores),
        "response_mask": mask,
        "group_size": group_size,
        "state": torch.zeros(0),
        **more,
    }
    options = {key: value for key, value in more.items() if key in parts.options(part)}
    if name == "constant_baseline":
        options.setdefault("baseline", 0.5)
    return parts.call(part, available, **options)


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


def test_token_rewards_have_the_type_of_the_kl() -> None:
    rewards = token_rewards(row(7)[0], row(2, 3).float(), mask_row(1, 1), kl_coef=0.1)
    assert rewards.dtype == torch.float32


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


def test_the_deviation_has_a_floor() -> None:
    # 1 / (sqrt 2 + 1); by default 1e-6: .5e-6 / (.7071e-6 + 1e-6).
    scores = torch.tensor([0, 2], dtype=torch.float64)
    floor = 1 / (math.sqrt(2) + 1)
    assert group_std(scores, 2, eps=1.0).tolist() == pytest.approx([-floor, floor], abs=1e-12)
    small = 0.5 / (math.sqrt(0.5) + 1)
    assert group_std(scores / 2e6, 2).tolist() == pytest.approx([-small, small], abs=1e-9)


@pytest.mark.parametrize("baseline", [group_mean, group_std, rloo, lambda x, g: max_rl(x / 2e6, g)])
def test_groups_without_spread_are_exactly_zero(baseline) -> None:  # type: ignore[no-untyped-def]
    # T2, C35, C38. The float32 mean of three times .1 is not .1.
    assert baseline(torch.tensor([1.0, 1.0, 0.0, 0.0]), 2).tolist() == [0, 0, 0, 0]
    assert baseline(torch.full((3,), 0.1), 3).tolist() == [0, 0, 0]
    assert baseline(torch.full((6,), 1e6 + 0.1), 3).abs().max().item() == 0


@pytest.mark.parametrize(
    "baseline", [group_mean, group_std, rloo, max_rl, has_spread, groups_with_spread]
)
def test_a_group_needs_two_samples(baseline) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="at least 2 samples"):  # T2
        baseline(torch.tensor([1.0, 2.0]), 1)
    with pytest.raises(ValueError, match="groups of 2"):
        baseline(torch.tensor([1.0, 2.0, 3.0]), 2)
    with pytest.raises(ValueError, match="groups of 2"):
        baseline(torch.tensor([]), 2)


@pytest.mark.parametrize("baseline", [group_mean, group_std, rloo, max_rl])
def test_group_baselines_are_constants(baseline) -> None:  # type: ignore[no-untyped-def]
    advantages = baseline(torch.tensor([0.0, 1.0, 1.0, 1.0], requires_grad=True), 2)
    assert advantages.any()
    assert not advantages.requires_grad


def test_spread_is_of_the_group() -> None:
    scores = torch.tensor([1.0, 1.0, 2.0, 3.0])
    assert has_spread(scores, 2).tolist() == [False, False, True, True]
    assert groups_with_spread(scores, 2).tolist() == [False, True]


@pytest.mark.parametrize("name", CENTRED)
def test_groups_share_of_zero_spread_is_counted(name: str) -> None:  # C35
    mask = torch.ones(6, 2, dtype=torch.bool)
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 0.5])
    rewards = token_rewards(scores, torch.zeros(6, 2), mask, kl_coef=0.0)
    output = call(name, rewards, scores, mask, 2)
    assert output.metrics["zero_spread_groups"].item() == pytest.approx(2 / 3)
    assert output.advantages[[0, 1, 4, 5]].abs().max().item() == 0
    assert output.advantages[3, 0].item() > 0 > output.advantages[2, 0].item()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Totals 1, 0, 0, 1 | .5, .5, .5, .5: mean 1/2, deviation (ddof 1) sqrt(1/3).
        ("group_mean", [0.5, -0.5, -0.5, 0.5]),
        ("group_std", [0.8660, -0.8660, -0.8660, 0.8660]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),  # the others' mean is 1/3 and 2/3
        ("max_rl", [1, -1, -1, 1]),
        # Over 8 tokens of mean 0: variance 4 * .25 / 7, so .5 sqrt(7).
        ("reinforce_plus_plus_baseline", [1.3229, -1.3229, -1.3229, 1.3229]),
        ("best_of_group", [1, 0, 0, 0]),
    ],
)
def test_group_entries_by_hand(name: str, expected: list[float]) -> None:
    scores = torch.tensor([1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    mask = torch.ones(8, 1, dtype=torch.bool)
    output = call(name, scores[:, None], scores, mask, 4)
    flat = [0, 0, 0, 0] if name != "best_of_group" else [1, 0, 0, 0]
    assert output.advantages[:, 0].tolist() == pytest.approx(expected + flat, abs=1e-4)
    assert output.metrics["zero_spread_groups"].item() == 0.5
    assert output.returns is None


def test_every_token_of_a_response_gets_its_groups_advantage() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    scores = torch.tensor([3.0, 1.0])
    rewards = token_rewards(scores, torch.zeros(2, 3), mask, kl_coef=0.0)
    assert call("group_mean", rewards, scores, mask, 2).advantages.tolist() == [
        [1, 0, 1],
        [0, -1, 0],
    ]


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
    for score, junk in ((10.0, 0.0), (0.0, NAN)):
        scores = torch.tensor([0.0, score, 0.25, 1.0])
        rewards = token_rewards(scores, torch.full((4, 3), junk), mask, kl_coef=0.0)
        rewards = torch.where(mask, rewards, junk)
        finals = torch.tensor([0.0, junk, 0.0, 0.0])
        outputs.append(call(name, rewards, scores, mask, 2, final_values=finals))
    assert torch.equal(outputs[0].advantages, outputs[1].advantages)
    assert outputs[0].advantages[1].tolist() == [0, 0, 0]
    if name in CENTRED:  # 0 for no token is no better than a score of 0
        assert outputs[0].advantages[0].tolist() == [0, 0, 0]
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


def test_whiten_of_equal_values_keeps_a_mean_that_stays() -> None:
    kept = whiten(row(3, NAN, 3), mask_row(1, 0, 1), shift_mean=False)
    assert kept.tolist() == [[3, 0, 3]]


def test_whiten_has_a_floor() -> None:
    # Variance 2 * (a / 2)^2 = 1e-8 and 1e-8 more: half of what stands is a / 2 / sqrt(2e-8) = .5.
    a = math.sqrt(2) * 1e-4
    assert whiten(row(0, a), mask_row(1, 1))[0].tolist() == pytest.approx([-0.5, 0.5], abs=1e-9)


def test_gae_refuses_integers() -> None:
    x, mask = row(1, 2), mask_row(1, 1)
    for rewards, values in ((x.long(), x), (x, x.long())):
        with pytest.raises(ValueError, match="need floating point numbers"):
            gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)


def test_bootstrapped_gae_by_hand() -> None:
    # Cut by length: V of the state after the last token is 6. gamma .5, lambda .5, V = [1, 2].
    # delta_1 = 0 + .5 * 6 - 2 = 1;   A_1 = 1
    # delta_0 = 1 + .5 * 2 - 1 = 1;   A_0 = 1 + .25 * 1 = 1.25
    # The second row ended: delta_0 = 3 - 1 = 2. Across holes, whatever stands in them.
    output = call(
        "gae_bootstrap",
        torch.tensor([[1, NAN, 0.0, NAN], [3, NAN, NAN, NAN]], dtype=torch.float64),
        torch.zeros(2),
        torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool),
        values=torch.tensor([[1, NAN, 2, NAN], [1, NAN, NAN, NAN]], dtype=torch.float64),
        final_values=torch.tensor([6.0, 0.0]),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert output.advantages.tolist() == [[1.25, 0, 1, 0], [2, 0, 0, 0]]
    assert output.returns is not None
    assert output.returns.tolist() == [[2.25, 0, 3, 0], [3, 0, 0, 0]]


def test_the_last_value_counts_in_the_type_of_the_values() -> None:
    # delta = 0 + .9 * 1 - 0. In the type of the bfloat16 critic .9 would be .8984.
    output = call(
        "gae_bootstrap", row(0), torch.zeros(1), mask_row(1), values=row(0), gamma=0.9,
        final_values=torch.ones(1, dtype=torch.bfloat16),
    )  # fmt: skip
    assert output.advantages.tolist() == [[0.9]]


def test_gae_entry_by_hand() -> None:
    # As test_gae_by_hand, and lambda .95 by default: A_2 = 4, A_1 = (4 - 2) + .95 * 4 = 5.8,
    # A_0 = (2 - 1) + .95 * 5.8 = 6.51.
    rewards, values, mask = row(0, 0, 8), row(1, 2, 4), mask_row(1, 1, 1)
    more = {"values": values, "gamma": 0.5, "gae_lambda": 0.5}
    output = call("gae", rewards, rewards[:, 0], mask, **more)
    assert output.advantages.tolist() == [[0.25, 1, 4]]
    assert output.returns is not None
    assert output.returns.tolist() == [[1.25, 3, 8]]
    for name in VALUED:
        default = call(name, rewards, rewards[:, 0], mask, values=values)
        assert default.advantages[0].tolist() == pytest.approx([6.51, 5.8, 4], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("reinforce", [3, 4, 4]), ("constant_baseline", [2.5, 3.5, 3.5]), ("ema_baseline", [3, 4, 4])],
)
def test_reward_to_go_entries_by_hand(name: str, expected: list[float]) -> None:
    # gamma .5: 4; 2 + .5 * 4 = 4; 1 + .5 * 4 = 3. Baselines: none, .5, 0 at first.
    rewards, mask = row(1, NAN, 2, 4), mask_row(1, 0, 1, 1)
    output = call(name, rewards, rewards[:, 0], mask, gamma=0.5)
    expected = [expected[0], 0, *expected[1:]]
    assert output.advantages.tolist() == [expected]
    # gamma 1 by default: 4, 6, 7 minus the baseline.
    shift = 0.5 if name == "constant_baseline" else 0
    assert call(name, rewards, rewards[:, 0], mask).advantages.tolist() == [
        [7 - shift, 0, 6 - shift, 4 - shift]
    ]


def test_running_baseline_by_hand() -> None:
    # Reward-to-go 4 and 2 on one token each: mean 3. Default decay .9: m = .3, w = .1, b = 3.
    mask = torch.tensor([[True], [True]])

    def step(first: float, second: float, state: Tensor, **more: float) -> Advantages:
        rewards = torch.tensor([[first], [second]], dtype=torch.float64)
        return call("ema_baseline", rewards, rewards[:, 0], mask, state=state, **more)

    one = step(4, 2, torch.zeros(0))
    assert one.advantages.tolist() == [[4], [2]]
    assert one.metrics["baseline"].item() == 0
    assert one.state is not None
    assert one.state.tolist() == pytest.approx([0.3, 0.1], abs=1e-12)
    # The batch itself, of mean 15, is not in its baseline.
    two = step(10, 20, one.state)
    assert two.metrics["baseline"].item() == pytest.approx(3, abs=1e-12)
    assert two.advantages.flatten().tolist() == pytest.approx([7, 17], abs=1e-12)
    # m = .9 * .3 + .1 * 15 = 1.77, w = .19: b = 9.3158
    assert two.state is not None
    three = step(0, 0, two.state)
    assert three.metrics["baseline"].item() == pytest.approx(1.77 / 0.19, abs=1e-12)
    # decay 0 knows the last batch alone.
    last = step(0, 0, step(10, 20, one.state, decay=0.0).state, decay=0.0)  # type: ignore[arg-type]
    assert last.metrics["baseline"].item() == 15


def test_running_baseline_is_kept_in_the_type_of_the_rewards() -> None:
    state = torch.tensor([0.3, 0.1])
    output = call("ema_baseline", row(1), torch.zeros(1), mask_row(1), state=state)
    assert output.metrics["baseline"].dtype == torch.float64
    assert output.state is not None
    assert output.state.dtype == torch.float64


def test_running_baseline_is_a_mean_over_tokens() -> None:
    # Reward-to-go 8, 8, 8 and 4: mean over tokens 7.
    rewards = torch.tensor([[0.0, 0.0, 8.0], [4.0, NAN, NAN]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    one = call("ema_baseline", rewards, rewards[:, 0], mask)
    assert one.metrics["baseline"].item() == 0
    two = call("ema_baseline", rewards, rewards[:, 0], mask, state=one.state)
    assert two.metrics["baseline"].item() == pytest.approx(7, abs=1e-5)


def test_reinforce_plus_plus_by_hand() -> None:
    # Reward-to-go 1, 1 | 4: mean 2, variance (1 + 1 + 4) / 2 = 3.
    rewards = torch.tensor([[0.0, 1.0], [4.0, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    output = call("reinforce_plus_plus", rewards, rewards[:, 0], mask)
    expected = [-1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3), 0]
    assert output.advantages.flatten().tolist() == pytest.approx(expected, abs=1e-7)
    # gamma 0: 0, 1 | 4: mean 5/3, variance (25 + 4 + 49) / 9 / 2 = 13/3.
    output = call("reinforce_plus_plus", rewards, rewards[:, 0], mask, gamma=0.0)
    deviation = math.sqrt(13 / 3)
    expected = [-5 / 3 / deviation, -2 / 3 / deviation, 7 / 3 / deviation, 0]
    assert output.advantages.flatten().tolist() == pytest.approx(expected, abs=1e-7)


def test_reinforce_plus_plus_with_group_baseline_whitens_over_tokens() -> None:
    # Centred totals 1, 1, 1 | -1 on their tokens: mean 1/2, variance (3 * .25 + 2.25) / 3 = 1.
    scores = torch.tensor([2.0, 0.0], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards = token_rewards(scores, torch.zeros(2, 3, dtype=torch.float64), mask, kl_coef=0.0)
    output = call("reinforce_plus_plus_baseline", rewards, scores, mask, 2)
    expected = [0.5, 0.5, 0.5, -1.5, 0, 0]
    assert output.advantages.flatten().tolist() == pytest.approx(expected, abs=1e-7)


def test_max_rl_by_hand() -> None:
    # Pass rates 1/4, 0, 1: r / mean - 1.
    scores = torch.tensor([0.0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1])
    assert max_rl(scores, 4).tolist() == [-1, 3, -1, -1, *[0] * 8]
    # Means .5 and .25 of partial credit.
    assert max_rl(torch.tensor([0.25, 0.75, 0.0, 0.5]), 2).tolist() == [-0.5, 0.5, -1, 1]
    for wrong in ([1.0, 1.01], [-0.01, 1.0], [NAN, 1.0]):
        with pytest.raises(ValueError, match=r"max_rl needs rewards in \[0, 1\]"):
            max_rl(torch.tensor(wrong), 2)


def test_max_rl_refuses_the_kl_term_in_the_reward() -> None:
    mask, scores = torch.ones(2, 2, dtype=torch.bool), torch.tensor([0.0, 1.0])
    rewards = token_rewards(scores, torch.ones(2, 2), mask, kl_coef=0.1)
    with pytest.raises(ValueError, match="KL term in the loss"):
        call("max_rl", rewards, scores, mask, 2)


def test_best_of_group_keeps_one_response_of_each_group() -> None:
    scores = torch.tensor([1.0, 3.0, 3.0, -5.0, -5.0, -5.0, 9.0, -2.0, -3.0, 7.0, 8.0, 9.0])
    mask = torch.ones(12, 2, dtype=torch.bool)
    mask[6] = False  # no token: never the best
    mask[9:] = False  # a group of such
    mask[1, 0] = False
    rewards = token_rewards(scores, torch.zeros(12, 2), mask, kl_coef=0.0)
    output = call("best_of_group", rewards, scores, mask, 3)
    assert output.keep is not None
    assert output.keep.dtype == torch.bool
    assert output.keep.nonzero().flatten().tolist() == [1, 3, 7]  # the first of equals
    assert torch.equal(output.advantages, (mask & output.keep[:, None]).float())
    # Scores 1, 3, 3 | -5, -5, -5 | 0 (no token), -2, -3 | 0, 0, 0
    assert output.metrics["zero_spread_groups"].item() == 0.5


def test_best_of_group_ranks_by_the_reward_with_its_kl_term() -> None:
    scores, mask = torch.tensor([1.0, 2.0]), torch.ones(2, 1, dtype=torch.bool)
    kl = torch.tensor([[0.0], [30.0]])  # 2 - .1 * 30 = -1
    rewards = token_rewards(scores, kl, mask, kl_coef=0.1)
    output = call("best_of_group", rewards, scores, mask, 2)
    assert output.keep is not None
    assert output.keep.tolist() == [True, False]
    assert output.metrics["zero_spread_groups"].item() == 0


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "best_of_group"])
def test_others_keep_all(name: str) -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    output = call(name, torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0]), mask, 2)
    assert output.keep is None
    assert (output.state is not None) == (name == "ema_baseline")


def test_process_scores_add_up_with_the_rest_by_hand() -> None:
    # -.5 * 2 + 1 = 0; -.5 * 4 + 3 + 7 = 8
    actual = token_rewards(
        torch.tensor([7.0]), torch.tensor([[2.0, 4.0, NAN]]), mask_row(1, 1, 0),
        kl_coef=0.5, token_scores=torch.tensor([[1.0, 3.0, NAN]]),
    )  # fmt: skip
    assert actual.tolist() == [[0, 8, 0]]
    scores, kl = torch.ones(1, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    constant = token_rewards(scores, kl, mask_row(1, 1), kl_coef=0.5, token_scores=kl)
    assert not constant.requires_grad
    # An empty completion has no place for a process score either.
    empty = token_rewards(
        torch.tensor([7.0]), torch.zeros(1, 2), mask_row(0, 0),
        kl_coef=0.0, token_scores=torch.ones(1, 2),
    )  # fmt: skip
    assert empty.tolist() == [[0, 0]]


def test_clip_by_hand() -> None:
    advantages = torch.tensor([[-3.0, 0.0, 2.0, 5.0]], requires_grad=True)
    clipped = clip_advantages(advantages, limit=2.5)
    assert clipped.tolist() == [[-2.5, 0, 2, 2.5]]
    assert not clipped.requires_grad
    assert clip_advantages(advantages, limit=0.5).tolist() == [[-0.5, 0, 0.5, 0.5]]
    for wrong in (0.0, -1.0, NAN, INF):
        with pytest.raises(ValueError, match="limit must be positive and finite"):
            clip_advantages(advantages, limit=wrong)


@pytest.mark.parametrize("name", GROUPED)
def test_group_entries_refuse_what_is_no_group(name: str) -> None:
    rewards, scores, mask = torch.zeros(3, 2), torch.zeros(3), torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="at least 2 samples"):
        call(name, rewards, scores, mask, 1)
    with pytest.raises(ValueError, match="groups of 2"):
        call(name, rewards, scores, mask, 2)
    with pytest.raises(ValueError, match="do not fit"):
        call(name, rewards, scores[:2], mask, 3)
    with pytest.raises(ValueError, match="devices differ"):
        call(name, rewards, scores.to("meta"), mask, 3)


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_entries_refuse_other_shapes_devices_and_masks(name: str) -> None:
    rewards, scores, mask = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="shapes differ"):
        call(name, rewards, scores, mask[:, :2], 2)
    with pytest.raises(ValueError, match="devices differ"):
        call(name, rewards.to("meta"), scores, mask, 2, values=rewards)
    with pytest.raises(ValueError, match="must be bool"):
        call(name, rewards, scores, mask.float(), 2)


@pytest.mark.parametrize("name", VALUED)
def test_value_entries_refuse_other_values(name: str) -> None:
    rewards, scores, mask = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="shapes differ"):
        call(name, rewards, scores, mask, values=rewards[:, :2])
    with pytest.raises(ValueError, match="devices differ"):
        call(name, rewards, scores, mask, values=rewards.to("meta"))
    with pytest.raises(ValueError, match="reads values, which is missing"):
        call(name, rewards, scores, mask, values=None)
    if name == "gae_bootstrap":
        with pytest.raises(ValueError, match="do not fit"):
            call(name, rewards, scores, mask, final_values=scores[:1])
        with pytest.raises(ValueError, match="devices differ"):
            call(name, rewards, scores, mask, final_values=scores.to("meta"))


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("option", ["gamma", "gae_lambda"])
def test_discounts_have_bounds(name: str, option: str) -> None:
    if option not in parts.options(ADVANTAGES[name]):
        return
    rewards, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for legal in (0.0, 1.0):
        assert (
            call(name, rewards, rewards[:, 0], mask, **{option: legal}).advantages.isfinite().all()
        )
    for wrong in (-0.01, 1.01, NAN):
        with pytest.raises(ValueError, match=rf"{option} must lie in \[0, 1\]"):
            call(name, rewards, rewards[:, 0], mask, **{option: wrong})


def test_other_refusals() -> None:
    rewards, scores, mask = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool)
    for wrong in (NAN, INF, -INF):
        with pytest.raises(ValueError, match="baseline must be finite"):
            call("constant_baseline", rewards, scores, mask, baseline=wrong)
    for wrong in (-0.01, 1.0, NAN):
        with pytest.raises(ValueError, match=r"decay must lie in \[0, 1\)"):
            call("ema_baseline", rewards, scores, mask, decay=wrong)
    for shape in ((1,), (3,), (), (2, 1)):
        with pytest.raises(ValueError, match="state must have shape"):
            call("ema_baseline", rewards, scores, mask, state=torch.zeros(shape))
    for wrong in (-0.1, NAN):
        with pytest.raises(ValueError, match="kl_coef must be"):
            token_rewards(scores, rewards, mask, kl_coef=wrong)
        with pytest.raises(ValueError, match="eps must be"):
            group_std(scores, 2, eps=wrong)
    with pytest.raises(ValueError, match="do not fit"):
        token_rewards(scores[:1], rewards, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match="devices differ"):
        token_rewards(scores.to("meta"), rewards, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match="shapes differ"):
        token_rewards(scores, rewards, mask, kl_coef=0.1, token_scores=rewards[:, :2])
    for kl_coef in (0.0, 0.1):
        with pytest.raises(ValueError, match="shapes differ"):
            token_rewards(scores, rewards[:, :2], mask, kl_coef=kl_coef)
    with pytest.raises(ValueError, match="must be bool"):
        token_rewards(scores, rewards, mask.float(), kl_coef=0.0)
    with pytest.raises(ValueError, match="gamma must lie"):
        reward_to_go(rewards, mask, gamma=1.1)


def test_what_the_entries_read_and_their_options() -> None:
    reads = {name: set(parts.inputs(part)) for name, part in ADVANTAGES.items()}
    to_go = {"rewards", "response_mask"}
    grouped = {"rewards", "scores", "response_mask", "group_size"}
    assert reads == {
        "gae": to_go | {"values"},
        "gae_bootstrap": to_go | {"values", "final_values"},
        "reinforce": to_go,
        "constant_baseline": to_go,
        "ema_baseline": to_go | {"state"},
        "reinforce_plus_plus": to_go,
        **{name: grouped for name in CENTRED},
        "best_of_group": grouped,
    }
    options = {name: set(parts.options(part)) for name, part in ADVANTAGES.items()}
    assert options == {
        "gae": {"gamma", "gae_lambda"},
        "gae_bootstrap": {"gamma", "gae_lambda"},
        "reinforce": {"gamma"},
        "constant_baseline": {"gamma", "baseline"},
        "ema_baseline": {"gamma", "decay"},
        "reinforce_plus_plus": {"gamma"},
        **{name: set() for name in CENTRED},
        "best_of_group": set(),
    }


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
    rewards = torch.rand(shape, generator=generator, dtype=torch.float64) / length  # sums <= 1
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    finals = torch.randn(shape[0], generator=generator, dtype=torch.float64)
    scores = torch.randn(shape[0], generator=generator, dtype=torch.float64)

    def advantages(
        rewards: Tensor, values: Tensor, scores: Tensor, mask: Tensor, finals: Tensor
    ) -> Advantages:
        return call(
            name, rewards, scores, mask, size, values=values, final_values=finals,
            state=torch.tensor([0.2, 0.5]), gamma=0.9, gae_lambda=0.8,
        )  # fmt: skip

    def padded(x: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(x, (left, right), value=value)

    plain = advantages(rewards, values, scores, mask, finals)
    assert plain.advantages[~mask].abs().sum().item() == 0
    assert (plain.returns is not None) == (name in VALUED)

    nan_rewards = torch.where(mask, rewards, NAN)
    nan_values = torch.where(mask, values, NAN)
    other = advantages(
        padded(nan_rewards, NAN), padded(nan_values, NAN), scores, padded(mask, False), finals
    )
    torch.testing.assert_close(other.advantages[:, left : left + length], plain.advantages)
    if plain.returns is not None and other.returns is not None:
        torch.testing.assert_close(other.returns[:, left : left + length], plain.returns)
        assert plain.returns[~mask].abs().sum().item() == 0

    # Prompts in another order, and the two samples of each prompt swapped.
    order = torch.tensor([5, 4, 1, 0, 3, 2])
    moved = advantages(rewards[order], values[order], scores[order], mask[order], finals[order])
    torch.testing.assert_close(moved.advantages, plain.advantages[order])
    assert moved.metrics.keys() == plain.metrics.keys()
    for metric, value in plain.metrics.items():
        torch.testing.assert_close(moved.metrics[metric], value)


@pytest.mark.parametrize(
    ("name", "shift_free", "scale_power"),
    [
        ("group_mean", True, 1),
        ("rloo", True, 1),
        ("group_std", True, 0),
        ("reinforce_plus_plus_baseline", True, 0),
        ("max_rl", False, 0),
        ("best_of_group", True, 0),
        ("reinforce_plus_plus", True, 0),
        ("reinforce", False, 1),
    ],
)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.floats(0.1, 0.3), scale=st.floats(0.1, 0.5))
def test_shift_and_scale_of_the_score(
    name: str, shift_free: bool, scale_power: int, seed: int, shift: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(6, generator=generator, dtype=torch.float64) / 2 + 0.1
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[:2, 1] = False

    def advantages(scores: Tensor) -> Tensor:
        rewards = token_rewards(scores, torch.zeros_like(mask, dtype=scores.dtype), mask, kl_coef=0)
        return call(name, rewards, scores, mask, 3).advantages

    plain = advantages(scores)
    shifted, scaled = advantages(scores + shift), advantages(scores * scale)
    assert torch.allclose(shifted, plain, atol=1e-4) == shift_free
    # The constants in the deviations (1e-6, 1e-8) show a little for small scales.
    torch.testing.assert_close(scaled, plain * scale**scale_power, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_advantages_are_constants(name: str) -> None:
    rewards = torch.randn(4, 3, requires_grad=True)
    values = torch.randn(4, 3, requires_grad=True)
    output = call(
        name,
        rewards.sigmoid() / 3,
        rewards.sum(1),
        torch.ones(4, 3, dtype=torch.bool),
        2,
        values=values,
        final_values=values[:, 0],
        state=rewards[0, :2].abs(),
    )
    for x in (output.advantages, output.returns, output.state, *output.metrics.values()):
        assert x is None or not x.requires_grad
