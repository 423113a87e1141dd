"""Estimates and intervals: by hand, by brute force, and by how often they are right."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlhf.evaluation.statistics import (
    best_of_n,
    best_of_n_kl,
    expected_calibration_error,
    mean_interval,
    reliability,
    score_length,
    wilson,
    win_rate,
)


def test_win_rate_by_hand() -> None:
    # Prompt 0: 1 < 2, 1 < 3, 3 > 2, 3 = 3: (0 + 0 + 1 + .5) / 4 = .375.
    # Prompt 1: all four won: 1. Mean .6875; two prompts resampled give .375, .6875 or 1.
    result = win_rate([[1, 3], [5, 6]], [[2, 3], [0, 0]], seed=0)
    assert result == (0.6875, 0.375, 1.0)


def test_win_rate_of_other_numbers_of_samples() -> None:
    # Prompt 0: 2 against 1, 2, 3: (1 + .5 + 0) / 3 = .5. Prompt 1: all lost.
    assert win_rate([[2], [0]], [[1, 2, 3], [1, 2, 3]], seed=0).value == pytest.approx(0.25)


scores = arrays(np.float64, (5, 3), elements=st.integers(-2, 2).map(float))


@settings(max_examples=30, deadline=None)
@given(ours=scores, theirs=scores)
def test_win_rate_is_antisymmetric_and_knows_only_order(
    ours: np.ndarray, theirs: np.ndarray
) -> None:
    one = win_rate(ours, theirs, num_bootstrap=50, seed=0)
    other = win_rate(theirs, ours, num_bootstrap=50, seed=0)
    assert one.value + other.value == pytest.approx(1)
    assert one.lower - 1e-12 <= one.value <= one.upper + 1e-12
    assert win_rate(np.exp(ours), np.exp(theirs), num_bootstrap=50, seed=0) == one
    assert win_rate(ours, ours, num_bootstrap=50, seed=0).value == 0.5


def test_win_rate_interval_is_over_prompts() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=(30, 1)), rng.normal(size=(30, 1))
    plain = win_rate(ours, theirs, seed=1)
    repeated = win_rate(np.repeat(ours, 50, axis=1), np.repeat(theirs, 50, axis=1), seed=1)
    assert repeated == pytest.approx(plain)  # 50 copies of a sample are no new evidence
    assert plain.upper - plain.lower > 0.2


def test_win_rate_seed() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=(30, 2)), rng.normal(size=(30, 2))
    assert win_rate(ours, theirs, seed=1) == win_rate(ours, theirs, seed=1)
    assert win_rate(ours, theirs, seed=1) != win_rate(ours, theirs, seed=2)


def test_a_few_prompts_all_won_are_not_certain() -> None:
    won = win_rate([[1.0]] * 4, [[0.0]] * 4, seed=0)
    # Wilson with 4 of 4: 1 / (1 + z^2 / 4), z = 1.96.
    assert won == pytest.approx((1, 1 / (1 + 1.96**2 / 4), 1), abs=1e-4)
    lost = win_rate([[0.0]] * 4, [[1.0]] * 4, seed=0)
    assert lost.upper == pytest.approx(1 - won.lower)


def test_mean_interval_by_hand() -> None:
    # Clusters a: 1, 3 and b: 8. Mean 4; resamples: a a = 2, a b = 4, b b = 8.
    result = mean_interval([1, 8, 3], ["a", "b", "a"], seed=0)
    assert result == (4, 2, 8)


def test_mean_interval_covers_as_often_as_it_says() -> None:
    # 25 clusters of 4 values that share a cluster's offset.
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(25), 4)
    runs, by_cluster, by_value = 200, 0, 0
    for seed in range(runs):
        values = np.repeat(rng.normal(size=25), 4) + 0.3 * rng.normal(size=100)
        _, lower, upper = mean_interval(values, clusters, num_bootstrap=300, seed=seed)
        by_cluster += lower <= 0 <= upper
        _, lower, upper = mean_interval(values, np.arange(100), num_bootstrap=300, seed=seed)
        by_value += lower <= 0 <= upper
    assert 0.88 < by_cluster / runs < 0.98
    assert by_value / runs < 0.8  # what ignoring the clusters would claim


def test_mean_interval_stays_between_the_cluster_means() -> None:
    # Sizes 1 to 8 and means 10 or 11: a cluster's sum and its size are resampled together.
    sizes = np.arange(1, 9)
    clusters = np.repeat(sizes, sizes)
    _, lower, upper = mean_interval(10.0 + clusters % 2, clusters, seed=0)
    assert 10 <= lower < upper <= 11


def test_mean_interval_of_a_constant() -> None:
    assert mean_interval([2.0, 2.0, 2.0], [0, 1, 1], seed=0) == (2, 2, 2)


def test_wilson_by_hand() -> None:
    # z = 1.96, z^2 = 3.8415: centre (.8 + .19207) / 1.38415 = .71674,
    # half-width 1.96 * sqrt(.8 * .2 / 10 + 3.8415 / 400) / 1.38415 = .22659.
    assert wilson(8, 10) == pytest.approx((0.8, 0.49015, 0.94333), abs=2e-5)
    assert wilson(0, 5).lower == 0


def test_reliability_by_hand() -> None:
    prob, outcome = [0.1, 0.3, 0.5, 0.9, 1.0], [0, 1, 1, 1, 0]
    table = reliability(prob, outcome, bins=2)
    # Below .5: .1, .3, outcomes 0, 1. From .5: .5, .9, 1, outcomes 1, 1, 0.
    assert table["lower"].tolist() == [0, 0.5]
    assert table["upper"].tolist() == [0.5, 1]
    assert table["count"].tolist() == [2, 3]
    assert table["mean_prob"].tolist() == pytest.approx([0.2, 0.8])
    assert table["mean_outcome"].tolist() == pytest.approx([0.5, 2 / 3])
    # .4 * |.2 - .5| + .6 * |.8 - 2/3| = .12 + .08
    assert expected_calibration_error(prob, outcome, bins=2) == pytest.approx(0.2)


def test_empty_bins_are_shown_and_cost_nothing() -> None:
    table = reliability([0.95, 1.0], [1, 1], bins=10)
    assert table["count"].tolist() == [0] * 9 + [2]
    assert table["mean_prob"].isna().tolist() == [True] * 9 + [False]
    assert expected_calibration_error([0.95, 1.0], [1, 1]) == pytest.approx(0.025)


def test_calibrated_probabilities_have_a_small_error() -> None:
    rng = np.random.default_rng(0)
    prob = rng.uniform(size=20_000)
    outcome = rng.uniform(size=20_000) < prob
    assert expected_calibration_error(prob, outcome) < 0.02
    assert expected_calibration_error(prob, ~outcome) > 0.4


@settings(max_examples=25, deadline=None)
@given(
    proxy=arrays(np.float64, (2, 5), elements=st.integers(0, 3).map(float)),
    target=arrays(np.float64, (2, 5), elements=st.floats(-5, 5)),
)
def test_best_of_n_is_the_mean_over_all_subsets(proxy: np.ndarray, target: np.ndarray) -> None:
    table = best_of_n(proxy, target, [1, 2, 3, 5]).set_index("n")
    for n in (1, 2, 3, 5):
        proxies, targets = [], []
        for row in range(2):
            for subset in map(list, itertools.combinations(range(5), n)):
                best = proxy[row, subset].max()
                proxies.append(best)
                # Ties by proxy are broken at random: the mean target of the tied.
                targets.append(target[row, subset][proxy[row, subset] == best].mean())
        assert table.loc[n, "proxy"] == pytest.approx(np.mean(proxies))
        assert table.loc[n, "target"] == pytest.approx(np.mean(targets), abs=1e-9)


def test_best_of_n_by_hand() -> None:
    # Of 3 samples ordered by proxy, best of 2: weights 0, 1/3, 2/3. Targets 6, 3, 0.
    table = best_of_n([[1, 2, 3]], [[6, 3, 0]], [1, 2, 3])
    assert table["proxy"].tolist() == pytest.approx([2, 8 / 3, 3])
    assert table["target"].tolist() == pytest.approx([3, 1, 0])
    expected = [0, math.log(2) - 1 / 2, math.log(3) - 2 / 3]
    assert table["kl_bound_nats"].tolist() == pytest.approx(expected)


def test_best_of_n_does_not_know_the_order_of_tied_samples() -> None:
    # All tied: a random one is best, so the target is its mean whatever n.
    assert best_of_n([[1, 1, 1]], [[6, 3, 0]], [1, 2, 3])["target"].tolist() == [3, 3, 3]
    one = best_of_n([[1, 2, 2]], [[0, 5, 1]], [2])["target"].item()
    other = best_of_n([[2, 1, 2]], [[1, 0, 5]], [2])["target"].item()
    assert one == other == pytest.approx(3)  # a pair always has one of the tied


def test_best_of_n_of_many_samples() -> None:
    ranks = np.arange(1.0, 3001)[None]
    table = best_of_n(ranks, -ranks, [1, 1500, 3000])
    # The expected maximum of n of 1..N without replacement is n (N + 1) / (n + 1).
    expected = [n * 3001 / (n + 1) for n in (1, 1500, 3000)]
    assert table["proxy"].tolist() == pytest.approx(expected, rel=1e-8)
    assert table["target"].tolist() == pytest.approx([-x for x in expected], rel=1e-8)


def enumerated_kl(probs: np.ndarray, scores: np.ndarray, n: int) -> float:
    """KL of the best of n to a policy over a few answers, ties broken at random."""
    at_most = np.array([probs[scores <= s].sum() for s in scores])
    less = np.array([probs[scores < s].sum() for s in scores])
    ratio = (at_most**n - less**n) / (at_most - less)
    return float((probs * ratio * np.log(ratio)).sum())


@pytest.mark.parametrize(
    "spread", [0.3, 1.0, 3.0]
)  # from many answers alike to one that has most of the weight
@pytest.mark.parametrize("ties", [False, True])
def test_kl_of_the_best_of_n_equals_enumeration(spread: float, ties: bool) -> None:
    """A policy over 40 answers; 400 prompts of 128 samples each stand for many draws of the same prompt."""
    rng = np.random.default_rng(int(10 * spread))
    logits = spread * rng.normal(size=40)
    probs = np.exp(logits) / np.exp(logits).sum()
    scores = rng.permutation(40) // (4 if ties else 1)
    drawn = rng.choice(40, p=probs, size=(400, 128))
    ns = [1, 2, 8, 32, 64]
    found = best_of_n_kl(scores[drawn], np.log(probs)[drawn], ns)
    expected = np.array([enumerated_kl(probs, scores, n) for n in ns])
    assert (found >= expected - 0.06).all()
    assert (found <= expected + 0.2).all()
    bounds = best_of_n(scores[drawn], scores[drawn], ns)["kl_bound_nats"]
    assert (found <= bounds).all()
    if spread == 3.0:  # where answers have weight, the bound is not the value
        assert found[-1] < bounds.iloc[-1] - 0.3


def test_kl_of_the_best_of_n_is_the_bound_where_no_answer_has_weight() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 64))
    ns = [1, 4, 16, 64]
    found = best_of_n_kl(scores, np.full((3, 64), -40.0), ns)
    assert found == pytest.approx([math.log(n) - (n - 1) / n for n in ns], abs=1e-9)


def test_kl_of_the_best_of_a_certain_answer_is_zero() -> None:
    assert best_of_n_kl([[1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0]], [1, 2, 3]) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="above 0"):
        best_of_n_kl([[1.0]], [[0.1]], [1])
    with pytest.raises(ValueError, match="shapes differ"):
        best_of_n_kl([[1.0]], [[-1.0, -1.0]], [1])


def test_score_length_by_hand() -> None:  # C56
    # Lengths 1, 2, 3, scores 1, 2, 2: Sxy = 1, Sxx = 2, Syy = 2/3.
    result = score_length([1, 2, 2], [1, 2, 3])
    assert result.slope == pytest.approx(0.5)
    assert result.pearson == pytest.approx(1 / math.sqrt(2 * 2 / 3))


def test_score_length_without_spread() -> None:
    slope, pearson = score_length([1, 2], [7, 7])
    assert math.isnan(slope)
    assert math.isnan(pearson)
    slope, pearson = score_length([3, 3], [1, 2])
    assert slope == 0
    assert math.isnan(pearson)


def test_refusals() -> None:
    nan = float("nan")
    with pytest.raises(ValueError, match="at least two"):
        win_rate([[1, 2]], [[1, 2]], seed=0)
    with pytest.raises(ValueError, match="candidate has 1 values that are not finite"):
        win_rate([[1.0], [nan]], [[1], [2]], seed=0)
    with pytest.raises(ValueError, match="baseline must be a filled 2-d array"):
        win_rate([[1], [2]], np.zeros((2, 0)), seed=0)
    with pytest.raises(ValueError, match="candidate has 2 prompts, baseline 3"):
        win_rate([[1], [2]], [[1], [2], [3]], seed=0)
    with pytest.raises(ValueError, match="num_bootstrap"):
        win_rate([[1], [2]], [[1], [2]], num_bootstrap=0, seed=0)
    with pytest.raises(ValueError, match="at least two"):
        mean_interval([1, 2], ["a", "a"], seed=0)
    with pytest.raises(ValueError, match="shapes differ"):
        mean_interval([1, 2], ["a"], seed=0)
    with pytest.raises(ValueError, match="missing labels"):
        mean_interval([1, 2, 3], np.array(["a", None, "b"], dtype=object), seed=0)
    with pytest.raises(ValueError, match="not finite"):
        mean_interval([1, math.inf], [0, 1], seed=0)
    with pytest.raises(ValueError, match="successes <= n"):
        wilson(3, 2)
    with pytest.raises(ValueError, match="n >= 1"):
        wilson(0, 0)
    with pytest.raises(ValueError, match="prob must lie"):
        reliability([1.5], [1])
    with pytest.raises(ValueError, match="outcome must lie"):
        expected_calibration_error([0.5], [2])
    with pytest.raises(ValueError, match="shapes differ"):
        reliability([0.5], [1, 0])
    with pytest.raises(ValueError, match="filled 1-d"):
        reliability([], [])
    with pytest.raises(ValueError, match="bins"):
        reliability([0.5], [1], bins=0)
    with pytest.raises(ValueError, match="shapes differ"):
        best_of_n([[1, 2]], [[1]], [1])
    no_ns: list[int] = []
    for ns in (no_ns, [0], [3]):
        with pytest.raises(ValueError, match=r"integers in 1\.\.2"):
            best_of_n([[1, 2]], [[1, 2]], ns)
    with pytest.raises(ValueError, match="not finite"):
        best_of_n([[1, nan]], [[1, 2]], [1])
    with pytest.raises(ValueError, match="two or more"):
        score_length([1], [1])
    with pytest.raises(ValueError, match="not finite"):
        score_length([1, nan], [1, 2])
