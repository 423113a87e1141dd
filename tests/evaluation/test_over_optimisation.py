"""Gao's curves: exact where nothing is noisy, peaks where the maximum is, intervals that cover."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf.evaluation.over_optimisation import (
    Coefficients,
    Fit,
    Form,
    curve,
    fit,
    peak,
    solve,
)

FORMS: tuple[Form, ...] = ("rl", "bon")
TRUE = {"rl": Coefficients(1.2, 0.5), "bon": Coefficients(1.2, 0.3)}


def paths(
    form: Form,
    *,
    rng: np.random.Generator,
    seeds: int = 1,
    prompts: int = 60,
    noise: float = 1.0,
    between: float = 0.0,
    points: int = 8,
) -> tuple[np.ndarray, np.ndarray]:
    """(S, K, P) KL and rewards around the true curve; prompts differ in level, in noise and in KL."""
    d = np.linspace(0, 5, points)
    level = rng.normal(0, 2, prompts)
    share = rng.gamma(4, 0.25, prompts)
    kl = np.broadcast_to(d[:, None] ** 2 * share, (seeds, points, prompts))
    alpha = TRUE[form].alpha + between * rng.normal(size=(seeds, 1, 1))
    slope = Coefficients(1.0, 0.0)
    mean = (
        curve(d, TRUE[form], form)[None, :, None]
        + (alpha - TRUE[form].alpha) * curve(d, slope, form)[None, :, None]
    )
    reward = mean + level + rng.normal(0, noise, (seeds, points, prompts))
    return kl.copy(), reward


@pytest.mark.parametrize("form", FORMS)
def test_points_on_a_curve_give_it_back(form: Form) -> None:
    d = np.array([0.0, 0.3, 1.0, 2.5, 4.0])
    found = solve(d, curve(d, TRUE[form], form), form)
    assert found == pytest.approx(TRUE[form], rel=1e-9)


def test_by_hand() -> None:
    """d (alpha - beta log d) at e: e (alpha - beta); d (alpha - beta d) at 2: 2 alpha - 4 beta; R(0) = 0."""
    assert curve([0.0, math.e], Coefficients(2.0, 0.5), "rl") == pytest.approx([0, 1.5 * math.e])
    assert curve([0.0, 2.0], Coefficients(2.0, 0.5), "bon") == pytest.approx([0, 2.0])
    assert peak(Coefficients(2.0, 0.5), "bon") == (2.0, 2.0)
    assert peak(Coefficients(0.5, 0.5), "rl") == (1.0, 0.5)


@pytest.mark.parametrize("form", FORMS)
def test_the_peak_is_where_the_curve_is_highest(form: Form) -> None:
    at, height = peak(TRUE[form], form)
    d = np.linspace(0, 2 * at, 20_001)
    values = curve(d, TRUE[form], form)
    assert d[values.argmax()] == pytest.approx(at, abs=2e-3)
    assert values.max() == pytest.approx(height, abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_curve_that_only_rises_has_no_peak(form: Form) -> None:
    assert peak(Coefficients(1.0, 0.0), form) == (math.inf, math.inf)
    assert peak(Coefficients(1.0, -0.1), form) == (math.inf, math.inf)
    d = np.linspace(0, 4, 6)
    kl = np.repeat((d**2)[None, :, None], 4, axis=2)
    reward = np.repeat(curve(d, Coefficients(1.0, -0.1), form)[None, :, None], 4, axis=2)
    found = fit(kl, reward, form=form, num_bootstrap=20, seed=0)
    assert (found.peak, found.peak_reward, found.peak_kl, found.peak_is_measured) == (
        None,
        None,
        None,
        False,
    )
    assert found.beta.value == pytest.approx(-0.1)


def test_best_of_n_that_only_falls_peaks_at_the_start() -> None:
    assert peak(Coefficients(-1.0, 0.5), "bon") == (0.0, 0.0)


@pytest.mark.parametrize("form", FORMS)
def test_without_noise_every_resample_is_the_curve(form: Form) -> None:
    d = np.linspace(0, 3, 7)
    kl = np.repeat((d**2)[None, :, None], 5, axis=2)
    reward = np.repeat(curve(d, TRUE[form], form)[None, :, None], 5, axis=2) + np.arange(5.0)
    found = fit(kl, reward, form=form, num_bootstrap=50, seed=1)
    for interval, value in zip((found.alpha, found.beta), TRUE[form], strict=True):
        assert interval == pytest.approx((value, value, value), rel=1e-9)
    at, height = peak(TRUE[form], form)
    assert found.peak == pytest.approx((at, at, at), rel=1e-8)
    assert found.peak_reward == pytest.approx((height, height, height), rel=1e-8)
    assert found.peak_kl == pytest.approx(at**2, rel=1e-8)
    assert found.residual == pytest.approx(0, abs=1e-12)
    assert (found.points, found.prompts, found.seeds) == (6, 5, 1)
    assert (found.first, found.reach) == (0.5, 3.0)
    assert found.peak_is_measured == (at <= 3.0)


def coverage(form: Form, runs: int, **world: object) -> dict[str, float]:
    rng = np.random.default_rng(7)
    inside = {"alpha": 0, "beta": 0, "peak": 0, "peak_reward": 0}
    at, height = peak(TRUE[form], form)
    truth = {"alpha": TRUE[form].alpha, "beta": TRUE[form].beta, "peak": at, "peak_reward": height}
    for number in range(runs):
        kl, reward = paths(form, rng=rng, **world)  # type: ignore[arg-type]
        found: Fit = fit(kl, reward, form=form, num_bootstrap=300, seed=number)
        for name, value in truth.items():
            interval = getattr(found, name)
            inside[name] += interval is not None and interval.lower <= value <= interval.upper
    return {name: count / runs for name, count in inside.items()}


@pytest.mark.parametrize("form", FORMS)
def test_intervals_cover_what_is_true(form: Form) -> None:
    """500 worlds of 60 prompts: binomial error of .95 is .01; percentile intervals are a little narrow."""
    for name, share in coverage(form, 500).items():
        assert 0.91 <= share <= 0.98, (name, share)


def test_seeds_that_differ_widen_the_interval() -> None:
    """With the prompts alone resampled, what differs between runs would be missed."""
    shares = coverage("rl", 200, seeds=8, between=0.2)
    assert shares["alpha"] >= 0.85, shares
    rng = np.random.default_rng(3)
    kl, reward = paths("rl", rng=rng, seeds=8, between=0.2)
    together = fit(kl, reward, form="rl", num_bootstrap=300, seed=0)
    alone = fit(kl[:1], reward[:1], form="rl", num_bootstrap=300, seed=0)
    each = [
        fit(kl[[s]], reward[[s]], form="rl", num_bootstrap=1, seed=0).alpha.value for s in range(8)
    ]
    spread = np.std(each, ddof=1)
    half = (together.alpha.upper - together.alpha.lower) / 2
    assert half >= 1.4 * spread / math.sqrt(8)
    assert alone.seeds == 1


def test_a_path_that_is_shorter_counts_with_what_it_has() -> None:
    rng = np.random.default_rng(0)
    kl, reward = paths("rl", rng=rng, seeds=2, noise=0.0)
    kl[:] = np.linspace(0, 5, 8)[:, None] ** 2
    kl[1, 5:] = np.nan
    reward[1, 5:] = np.nan
    found = fit(kl, reward, form="rl", num_bootstrap=20, seed=0)
    assert found.points == 7 + 4
    assert found.alpha.value == pytest.approx(TRUE["rl"].alpha, rel=1e-9)


def test_the_same_prompts_are_drawn_at_every_point() -> None:
    """Prompts differ far more than points: with prompts drawn apart at each point nothing could be said."""
    rng = np.random.default_rng(0)
    kl, reward = paths("rl", rng=rng, noise=0.01)
    reward += 100 * rng.normal(size=reward.shape[2])
    found = fit(kl, reward, form="rl", num_bootstrap=100, seed=0)
    assert found.alpha.upper - found.alpha.lower < 0.5


def bad(kl: np.ndarray, reward: np.ndarray) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        fit(kl, reward, form="rl", num_bootstrap=10, seed=0)
    return str(caught.value)


def test_what_cannot_be_fitted_is_refused() -> None:
    rng = np.random.default_rng(0)
    kl, reward = paths("rl", rng=rng)
    assert "needs 3 points" in bad(kl[:, :3], reward[:, :3])
    assert "needs 3 points" in bad(kl * 0, reward)  # KL 0 everywhere
    assert "at the same distance" in bad(np.where(kl > 0, 4.0, 0.0), reward)
    assert "at least two of them, got one" in bad(kl[:, :, :1], reward[:, :, :1])
    assert "(seeds, points, prompts)" in bad(kl[0], reward[0])
    assert "not finite" in bad(kl, np.where(reward == reward[0, 3, 3], np.nan, reward))
    hole = kl.copy()
    hole[0, 2, 0] = np.nan
    assert "not finite" in bad(hole, reward)
    lost = kl.copy()
    lost[0, 0] = np.nan
    assert "first point" in bad(lost, reward)
    with pytest.raises(ValueError, match="num_bootstrap"):
        fit(kl, reward, form="rl", num_bootstrap=0, seed=0)
    with pytest.raises(ValueError, match="form must be rl or bon"):
        solve([1, 2, 3], [1, 2, 3], "ppo")  # type: ignore[arg-type]
