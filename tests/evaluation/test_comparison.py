"""Comparing policies: by hand, by definition, against scikit-learn and SciPy; intervals cover."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, special, stats

from rlhf.evaluation import comparison
from rlhf.evaluation.comparison import (
    ELO_PER_LOGIT,
    detectable_difference,
    holm,
    length_controlled_win_rate,
    no_difference,
    ratings,
    win_matrix,
    win_shares,
)
from rlhf.evaluation.statistics import win_rate


def test_shares_by_hand() -> None:
    """(2, 0) against (1,): one of two; (3, 3) against (3,): ties; (1, 1) against (2,): none."""
    assert win_shares([[2, 0], [3, 3], [1, 1]], [[1], [3], [2]]).tolist() == [0.5, 0.5, 0.0]
    with pytest.raises(ValueError, match="ours has 2 prompts, theirs 1"):
        win_shares([[1], [2]], [[1]])


# --- every pair ---


def scores(rng: np.random.Generator, means: dict[str, float], prompts: int = 80) -> dict[str, np.ndarray]:  # fmt: skip
    level = rng.normal(size=(prompts, 1))
    return {name: level + rng.normal(mean, 1, (prompts, 3)) for name, mean in means.items()}


def test_the_matrix_has_every_pair_both_ways() -> None:
    found = scores(np.random.default_rng(0), {"a": 0.0, "b": 1.0, "c": 0.0})
    table = win_matrix(found, num_bootstrap=200, seed=5)
    pairs = list(zip(table["policy"], table["against"], strict=True))
    assert pairs == [("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")]
    by = table.set_index(["policy", "against"])
    for one, other in pairs:
        row, back = by.loc[(one, other)], by.loc[(other, one)]
        assert row["win_rate"] + back["win_rate"] == pytest.approx(1)
        assert row["lower"] == pytest.approx(1 - back["upper"])
        assert row["p_value"] == back["p_value"]
    assert by.loc[("b", "c"), ["win_rate", "lower", "upper"]].tolist() == pytest.approx(
        win_rate(found["b"], found["c"], num_bootstrap=200, seed=5)
    )
    assert by.loc[("a", "b"), "p_adjusted"] < 0.01
    assert by.loc[("a", "c"), "p_adjusted"] > 0.05
    with pytest.raises(ValueError, match="nothing to compare"):
        win_matrix({"a": found["a"]}, seed=0)


def test_no_difference() -> None:
    shares = np.array([0.2, 0.9, 0.7, 0.6])
    t = (shares.mean() - 0.5) / (shares.std(ddof=1) / 2)
    assert no_difference(shares) == pytest.approx(2 * stats.t.sf(abs(t), 3))
    assert no_difference([0.5, 0.5]) == 1.0
    assert no_difference([1.0] * 5) == pytest.approx(2 / 32)  # the sign test
    with pytest.raises(ValueError, match="got one"):
        no_difference([0.3])


def test_holm_by_hand() -> None:
    """.01 x 4, .02 x 3, .03 x 2 = .06, .04 x 1 lifted to .06."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        holm([1.2])


def test_holm_bounds_false_findings() -> None:
    """Of worlds with six equal policies, at most 5 % show any difference; without it about a third do."""
    rng = np.random.default_rng(1)
    plain = adjusted = 0
    for _ in range(300):
        equal = scores(rng, dict.fromkeys("abcdef", 0.0), prompts=40)
        names = list(equal)
        p = [
            no_difference(win_shares(equal[a], equal[b]))
            for i, a in enumerate(names)
            for b in names[i + 1 :]
        ]
        plain += min(p) < 0.05
        adjusted += min(holm(p)) < 0.05
    assert adjusted / 300 <= 0.08
    assert plain / 300 >= 0.2


# --- length ---


def pairs(
    rng: np.random.Generator, better: float, per_token: float, longer: float, prompts: int = 150
) -> tuple[np.ndarray, ...]:
    """Scores of answers whose quality is `better` and whose score also grows by `per_token`."""
    lengths = rng.normal(30 + longer, 6, (prompts, 2)), rng.normal(30, 6, (prompts, 2))
    ours = rng.logistic(size=(prompts, 2)) + better + per_token * lengths[0]
    theirs = rng.logistic(size=(prompts, 2)) + per_token * lengths[1]
    return ours, theirs, *lengths


def test_a_win_by_length_alone_is_none() -> None:
    world = pairs(np.random.default_rng(0), better=0.0, per_token=0.3, longer=5)
    plain = win_rate(world[0], world[1], seed=0)
    controlled = length_controlled_win_rate(*world, num_bootstrap=200, seed=0)
    assert plain.lower > 0.6
    assert controlled.lower < 0.5 < controlled.upper


def test_a_win_by_quality_stays() -> None:
    world = pairs(np.random.default_rng(0), better=1.5, per_token=0.0, longer=5)
    assert length_controlled_win_rate(*world, num_bootstrap=200, seed=0).lower > 0.6


def test_the_intercept_is_that_of_a_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression

    ours, theirs, x, y = pairs(np.random.default_rng(2), better=0.5, per_token=0.1, longer=3)
    longer = (x[:, :, None] - y[:, None, :]).ravel()
    won = (ours[:, :, None] > theirs[:, None, :]).ravel()
    feature = np.tanh(longer / longer.std())[:, None]
    fitted = LogisticRegression(C=np.inf, tol=1e-10).fit(feature, won)
    found = length_controlled_win_rate(ours, theirs, x, y, num_bootstrap=50, seed=0)
    assert found.value == pytest.approx(special.expit(fitted.intercept_[0]), abs=2e-5)


def test_without_length_it_is_the_win_rate() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(0.5, 1, (30, 2)), rng.normal(0, 1, (30, 2))
    same = np.full((30, 2), 20.0)
    plain = win_rate(ours, theirs, seed=3)
    assert length_controlled_win_rate(ours, theirs, same, same, seed=3) == plain
    lengths = rng.normal(20, 3, (30, 2))
    always = length_controlled_win_rate(ours + 9, theirs, lengths, same, seed=3)
    assert always.value == 1.0


def test_length_that_decides_everything_is_refused() -> None:
    lengths = np.array([[10.0], [30.0], [12.0], [40.0]])
    theirs = np.full((4, 1), 20.0)
    with pytest.raises(ValueError, match="length decides"):
        length_controlled_win_rate(lengths, theirs, lengths, theirs, seed=0)
    with pytest.raises(ValueError, match="differ"):
        length_controlled_win_rate(lengths, theirs, lengths, np.ones((4, 2)), seed=0)


def test_its_intervals_cover() -> None:
    """The truth by a very large world; 200 small ones."""
    rng = np.random.default_rng(4)
    truth = length_controlled_win_rate(
        *pairs(rng, 0.6, 0.1, 4, prompts=20_000), num_bootstrap=2, seed=0
    ).value
    inside = 0
    for number in range(200):
        found = length_controlled_win_rate(
            *pairs(rng, 0.6, 0.1, 4, prompts=60), num_bootstrap=200, seed=number
        )
        inside += found.lower <= truth <= found.upper
    assert 0.89 <= inside / 200 <= 0.99


# --- one scale ---


def test_two_policies_by_hand() -> None:
    """Three prompts, two won: log((2 + .5) / (1 + .5)) in Elo points."""
    table = ratings({"base": [[0], [0], [0]], "new": [[1], [1], [-1]]}, anchor="base", seed=0)
    assert table["policy"].tolist() == ["new", "base"]
    assert table["elo"].tolist() == pytest.approx([ELO_PER_LOGIT * math.log(2.5 / 1.5), 0.0])
    assert pytest.approx(math.log(10)) == 400 / ELO_PER_LOGIT


def test_it_is_the_maximum_of_the_likelihood() -> None:
    rng = np.random.default_rng(0)
    wins = rng.uniform(1, 20, (1, 5, 5))

    def minus_likelihood(theta: np.ndarray) -> float:
        gap = theta[:, None] - theta[None, :]
        return -float((wins[0] * np.log(special.expit(gap)))[~np.eye(5, dtype=bool)].sum())

    best = optimize.minimize(minus_likelihood, np.zeros(5), tol=1e-12).x
    assert comparison._bradley_terry(wins)[0] == pytest.approx(best - best.mean(), abs=1e-5)


def test_strengths_are_found_within_their_intervals() -> None:
    """Differences of Gumbel scores are logistic, so Bradley and Terry's model holds exactly."""
    rng = np.random.default_rng(1)
    means = {"r0": 0.0, "r1": 0.5, "r2": 1.2, "r3": 1.0}

    def world(prompts: int) -> dict[str, np.ndarray]:
        return {name: rng.gumbel(mean, 1, (prompts, 2)) for name, mean in means.items()}

    inside = 0
    for number in range(100):
        table = ratings(world(100), anchor="r0", num_bootstrap=200, seed=number).set_index("policy")
        for name, mean in means.items():
            row = table.loc[name]
            inside += row["lower"] - 1e-9 <= mean * ELO_PER_LOGIT <= row["upper"] + 1e-9
    assert 0.93 <= inside / 400 <= 0.99  # the anchor's is exact
    large = ratings(world(20_000), anchor="r0", num_bootstrap=2, seed=0).set_index("policy")
    assert large["elo"]["r2"] == pytest.approx(1.2 * ELO_PER_LOGIT, abs=5)


def test_a_policy_that_always_wins_has_a_finite_rating() -> None:
    always = {"a": np.zeros((20, 1)), "b": np.ones((20, 1)), "c": np.full((20, 1), 2.0)}
    table = ratings(always, anchor="a", num_bootstrap=50, seed=0)
    assert table["policy"].tolist() == ["c", "b", "a"]
    assert np.isfinite(table[["elo", "lower", "upper"]].to_numpy()).all()
    assert isinstance(table, pd.DataFrame)


def test_ratings_refuse_what_has_no_scale() -> None:
    one = {"a": [[1.0], [2.0]]}
    with pytest.raises(ValueError, match="two policies or more"):
        ratings(one, anchor="a", seed=0)
    with pytest.raises(ValueError, match="and b among them"):
        ratings({**one, "c": [[1.0], [2.0]]}, anchor="b", seed=0)
    with pytest.raises(ValueError, match="got one"):
        ratings({"a": [[1.0]], "b": [[2.0]]}, anchor="a", seed=0)


# --- what could be seen ---


def test_the_detectable_difference_is_detected_with_its_power() -> None:
    rng = np.random.default_rng(0)
    sample = rng.normal(0.5, 0.2, 50)
    difference = detectable_difference(sample)
    found = 0
    for _ in range(2000):
        shares = rng.normal(0.5 + difference, sample.std(ddof=1), 50)
        found += no_difference(shares) < 0.05
    assert 0.77 <= found / 2000 <= 0.83


def test_it_falls_with_the_root_of_the_prompts() -> None:
    """(1.96 + .8416) x .5 / 10 for a coin and 100 prompts."""
    coin = [0.0, 1.0] * 50
    sd = np.std(coin, ddof=1)
    assert detectable_difference(coin) == pytest.approx(2.801585 * sd / 10, rel=1e-5)
    assert detectable_difference(coin, prompts=400) == pytest.approx(
        detectable_difference(coin) / 2
    )
    with pytest.raises(ValueError, match="must lie in"):
        detectable_difference(coin, power=1.0)
    with pytest.raises(ValueError, match="got one"):
        detectable_difference([0.5])
