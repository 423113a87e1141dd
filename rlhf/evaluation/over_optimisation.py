"""How reward depends on the distance from the initial policy, and where it should have stopped.

Gao, Schulman and Hilton (2022, arXiv:2210.10760, eqs. 1 and 2) describe the gold reward by d, the square root of
the KL to the initial policy in nats, with R(0) = 0:

    reinforcement learning   R(d) = d (alpha - beta log d)   peak at d* = exp(alpha / beta - 1),  R(d*) = beta d*
    best-of-n                R(d) = d (alpha - beta d)       peak at d* = alpha / (2 beta),       R(d*) = alpha d* / 2

Both are linear in alpha and beta. Intervals resample prompts, the same ones at every point of a path because every
policy answers the same prompts, and whole runs where there are several seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlhf.evaluation.statistics import Interval

Floats = NDArray[np.float64]
Form = Literal["rl", "bon"]

MIN_POINTS = 3
"""Points that two coefficients need to be more than drawn through."""


class Coefficients(NamedTuple):
    """alpha and beta, in reward per unit of d (and for best-of-n, beta per unit of d squared)."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Fit:
    """A fitted curve with 95 % intervals.

    Attributes:
        form: `rl` or `bon`.
        alpha, beta: coefficients.
        peak: d*, square root of nats; None where the curve has no maximum. An end that is infinite: some
            resampled curves have none.
        peak_reward: reward at d* over the initial policy's; None with `peak`.
        first, reach: the smallest and largest d that were measured. A peak beyond reach is extrapolated.
        residual: root mean square of what the curve leaves of the measured rewards.
        points: measured points that the curve was fitted to.
        prompts, seeds: that were resampled. With one seed the intervals do not hold what differs between runs.
    """

    form: Form
    alpha: Interval
    beta: Interval
    peak: Interval | None
    peak_reward: Interval | None
    first: float
    reach: float
    residual: float
    points: int
    prompts: int
    seeds: int

    @property
    def peak_is_measured(self) -> bool:
        """Whether the peak lies within what was measured."""
        return self.peak is not None and self.peak.value <= self.reach

    @property
    def peak_kl(self) -> float | None:
        """KL at the peak, in nats."""
        return None if self.peak is None else self.peak.value**2


def curve(distance: ArrayLike, coefficients: Coefficients, form: Form) -> Floats:
    """R(d) of a form; 0 at d = 0.

    Args:
        distance: any shape, d >= 0.
    """
    d = np.asarray(distance, dtype=np.float64)
    first, second = _basis(d, form)
    return np.asarray(coefficients.alpha * first + coefficients.beta * second)


def solve(distance: ArrayLike, reward: ArrayLike, form: Form) -> Coefficients:
    """Least squares of R(d) through measured points.

    Args:
        distance: (K,) d >= 0; points at d = 0 tell nothing and are left out.
        reward: (K,) over the initial policy's reward.

    Raises: ValueError if fewer than three points have d > 0, or all of them the same d.
    """
    d, r = np.asarray(distance, dtype=np.float64), np.asarray(reward, dtype=np.float64)
    away = d > 0
    if away.sum() < MIN_POINTS:
        raise ValueError(
            f"a curve needs {MIN_POINTS} points away from the initial policy, got {away.sum()}"
        )
    if np.ptp(d[away]) <= 1e-9 * d[away].max():
        raise ValueError("all points are at the same distance from the initial policy")
    return Coefficients(*map(float, _least_squares(d[None], r[None], form)[0]))


def peak(coefficients: Coefficients, form: Form) -> tuple[float, float]:
    """d* and R(d*) of a curve; (inf, inf) if it only rises, (0, 0) if it only falls."""
    distances, rewards = _peaks(np.array([coefficients]), form)
    return float(distances[0]), float(rewards[0])


def fit(
    kl: ArrayLike,
    reward: ArrayLike,
    *,
    form: Form,
    num_bootstrap: int = 1000,
    seed: int,
) -> Fit:
    """Fit a curve to the paths of one candidate or several seeds of it.

    Args:
        kl: (S, K, P) mean KL to the initial policy of the answers to each prompt, in nats: S seeds, K points of
            the path, of which the first is the initial policy itself, P prompts. NaN for points that a seed has
            not (its whole row).
        reward: (S, K, P) mean reward of the same answers, by gold or proxy.
        form: `rl` or `bon`.
        num_bootstrap: resamples.
        seed: of the resampling.

    Raises: ValueError if shapes differ, there are fewer than two prompts or three points away from the initial
        policy, those are all at one distance, or a value is not finite.
    """
    nats, scores = np.asarray(kl, dtype=np.float64), np.asarray(reward, dtype=np.float64)
    if nats.ndim != 3 or nats.shape != scores.shape:
        raise ValueError(
            f"need two arrays (seeds, points, prompts), got {nats.shape}, {scores.shape}"
        )
    num_seeds, _, num_prompts = nats.shape
    if num_prompts < 2:
        raise ValueError("an interval over prompts needs at least two of them, got one")
    there: NDArray[np.bool_] = ~np.asarray(np.isnan(nats).all(axis=2))
    if not there[:, 0].all():
        raise ValueError("the first point of every path is the initial policy")
    if not (np.isfinite(nats[there]).all() and np.isfinite(scores[there]).all()):
        raise ValueError("kl or reward has values that are not finite")
    if num_bootstrap < 1:
        raise ValueError(f"num_bootstrap must be at least 1, got {num_bootstrap}")
    equal = np.full((1, num_prompts), 1.0 / num_prompts)
    d, r = _points(nats, scores, there, equal, np.arange(num_seeds)[None])
    found = solve(d[0], r[0], form)
    resampled = _resample(nats, scores, there, form, num_bootstrap, np.random.default_rng(seed))
    distances, rewards = _peaks(resampled, form)
    at, height = peak(found, form)
    return Fit(
        form=form,
        alpha=_interval(found.alpha, resampled[:, 0]),
        beta=_interval(found.beta, resampled[:, 1]),
        peak=_interval(at, distances) if 0 < at < math.inf else None,
        peak_reward=_interval(height, rewards) if 0 < at < math.inf else None,
        first=float(d[d > 0].min()),
        reach=float(d.max()),
        residual=float(np.sqrt(np.mean((r[0] - curve(d[0], found, form))[d[0] > 0] ** 2))),
        points=int((d[0] > 0).sum()),
        prompts=num_prompts,
        seeds=num_seeds,
    )


def _basis(d: Floats, form: Form) -> tuple[Floats, Floats]:
    """What alpha and beta are multiplied with."""
    if form == "rl":
        return d, -d * np.log(np.where(d > 0, d, 1.0))
    if form == "bon":
        return d, -d * d
    raise ValueError(f"form must be rl or bon, got {form!r}")


def _least_squares(d: Floats, r: Floats, form: Form) -> Floats:
    """(B, 2) coefficients of B curves through (B, K) points each; NaN where they are not determined."""
    first, second = _basis(d, form)
    aa, bb, ab = (
        (x * y).sum(axis=1) for x, y in ((first, first), (second, second), (first, second))
    )
    ra, rb = (first * r).sum(axis=1), (second * r).sum(axis=1)
    determinant = aa * bb - ab * ab
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.stack([(bb * ra - ab * rb), (aa * rb - ab * ra)], axis=1) / determinant[:, None]
    found[determinant <= 1e-12 * aa * bb] = np.nan
    return np.asarray(found)


def _peaks(coefficients: Floats, form: Form) -> tuple[Floats, Floats]:
    """(B,) d* and R(d*) of (B, 2) curves."""
    alpha, beta = coefficients[:, 0], coefficients[:, 1]
    falls = beta > 0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if form == "rl":
            at = np.exp(alpha / beta - 1)
            height = beta * at
        else:
            at = np.maximum(alpha, 0) / (2 * beta)
            height = np.maximum(alpha, 0) * at / 2
    return np.where(falls, at, np.inf), np.where(falls, height, np.inf)


def _points(
    kl: Floats, reward: Floats, there: NDArray[np.bool_], weights: Floats, seeds: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """(B, S K) distances and rewards over the initial policy's, for (B, P) weights of prompts and (B, S) seeds.

    Points that are not there lie at distance 0 with reward 0, where they do not count.
    """
    nats, scores = (np.where(there[:, :, None], x, 0.0) for x in (kl, reward))
    mean_kl = np.einsum("bp,skp->bsk", weights, nats)
    mean_reward = np.einsum("bp,skp->bsk", weights, scores)
    mean_reward = np.where(there, mean_reward - mean_reward[:, :, :1], 0.0)
    rows = np.arange(len(weights))[:, None]
    d = np.sqrt(np.maximum(mean_kl, 0.0))[rows, seeds]
    return d.reshape(len(weights), -1), mean_reward[rows, seeds].reshape(len(weights), -1)


def _resample(
    kl: Floats,
    reward: Floats,
    there: NDArray[np.bool_],
    form: Form,
    num_bootstrap: int,
    rng: np.random.Generator,
) -> Floats:
    """(B', 2) coefficients of resampled prompts and seeds; those that determine no curve are left out."""
    num_seeds, _, num_prompts = kl.shape
    found = []
    for start in range(0, num_bootstrap, 256):
        count = min(256, num_bootstrap - start)
        counts = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=count)
        seeds = rng.integers(num_seeds, size=(count, num_seeds))
        d, r = _points(kl, reward, there, counts / num_prompts, seeds)
        found.append(_least_squares(d, r, form))
    solved = np.concatenate(found)
    solved = solved[np.isfinite(solved).all(axis=1)]
    if not len(solved):
        raise ValueError("all points are at the same distance from the initial policy")
    return np.asarray(solved)


def _interval(value: float, resampled: Floats) -> Interval:
    """95 % by percentiles, without interpolation where an infinite value would spoil it."""
    ends: Sequence[float] = np.quantile(resampled, [0.025, 0.975], method="nearest").tolist()
    return Interval(value, *ends)
