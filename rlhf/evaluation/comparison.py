"""Which of several policies is better: every pair, without the share of length, on one scale, and what could be seen.

Policies answer the same prompts, so everything is paired by prompt, and intervals resample prompts. Scores are
compared within a prompt only; a tie is half a win.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from rlhf.evaluation.statistics import Interval, finite, win_rate

Floats = NDArray[np.float64]

ELO_PER_LOGIT = 400 / math.log(10)
"""Elo points of one unit of Bradley and Terry's scale: 400 points are odds of ten to one."""


def win_shares(ours: ArrayLike, theirs: ArrayLike) -> Floats:
    """(P,) share of comparisons won on each prompt, all of (P, S) against all of (P, S') answers.

    Raises: ValueError if the prompts do not match or a score is not finite.
    """
    a, b = finite("ours", ours, 2), finite("theirs", theirs, 2)
    if len(a) != len(b):
        raise ValueError(f"ours has {len(a)} prompts, theirs {len(b)}")
    return np.asarray((0.5 + 0.5 * np.sign(a[:, :, None] - b[:, None, :])).mean(axis=(1, 2)))


def win_matrix(
    scores: Mapping[str, ArrayLike], *, num_bootstrap: int = 1000, seed: int
) -> pd.DataFrame:
    """Every policy against every other.

    Args:
        scores: of each policy (P, S) scores, the same prompts in the same order; S may differ.
        num_bootstrap: resamples of prompts.
        seed: of the resampling.

    Returns: one row per ordered pair: policy, against, win_rate, lower, upper (95 %), p_value (two-sided, of no
        difference), p_adjusted (`holm`, over all pairs of policies).

    Raises: ValueError as `win_rate` does, and if there are fewer than two policies.
    """
    names = list(scores)
    if len(names) < 2:
        raise ValueError(f"nothing to compare: {len(names)} policies")
    rows = []
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            found = win_rate(scores[name], scores[other], num_bootstrap=num_bootstrap, seed=seed)
            p = no_difference(win_shares(scores[name], scores[other]))
            rows.append((name, other, *found, p))
    adjusted = holm([row[-1] for row in rows])
    columns = ["policy", "against", "win_rate", "lower", "upper", "p_value", "p_adjusted"]
    there = pd.DataFrame(
        [(*row, a) for row, a in zip(rows, adjusted, strict=True)], columns=columns
    )
    back = there.rename(columns={"policy": "against", "against": "policy"}).assign(
        win_rate=1 - there["win_rate"], lower=1 - there["upper"], upper=1 - there["lower"]
    )
    both = pd.concat([there, back], ignore_index=True)[columns]
    order = {name: number for number, name in enumerate(names)}
    return both.sort_values(
        ["policy", "against"], key=lambda column: column.map(order), ignore_index=True
    )


def no_difference(shares: ArrayLike) -> float:
    """Two-sided p-value of a win rate of one half, from (P,) shares won per prompt.

    Student's t over prompts; the sign test where every prompt has the same share.

    Raises: ValueError if there are fewer than two prompts or a share is not finite.
    """
    array = finite("shares", shares, 1)
    if len(array) < 2:
        raise ValueError("a test over prompts needs at least two of them, got one")
    if np.ptp(array) == 0:
        return 1.0 if array[0] == 0.5 else float(2 * 0.5 ** len(array))
    return float(stats.ttest_1samp(array, 0.5).pvalue)


def holm(p_values: ArrayLike) -> Floats:
    """p-values adjusted so that the chance of any false finding among them is bounded (Holm 1979).

    The i-th smallest of m is multiplied with m - i + 1, never to less than the one before it, and cut at 1.

    Args:
        p_values: (m,) in [0, 1].

    Returns: (m,) in the order given.
    """
    p = finite("p_values", p_values, 1)
    if p.min() < 0 or p.max() > 1:
        raise ValueError("p_values must lie in [0, 1]")
    order = np.argsort(p, kind="stable")
    scaled = np.minimum(p[order] * np.arange(len(p), 0, -1), 1.0)
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted


def length_controlled_win_rate(
    ours: ArrayLike,
    theirs: ArrayLike,
    our_lengths: ArrayLike,
    their_lengths: ArrayLike,
    *,
    num_bootstrap: int = 1000,
    seed: int,
) -> Interval:
    """The win rate that equally long answers would have (Dubois et al. 2024, arXiv:2404.04475, eq. 1).

    A logistic regression of "ours wins" on tanh of the difference in length over its standard deviation; the
    result is its prediction at no difference. Of the paper's terms the one for the difficulty of each prompt is
    left out: it has mean zero and needs many models.

    Args:
        ours: (P, S) scores.
        theirs: (P, S') scores.
        our_lengths: (P, S) tokens.
        their_lengths: (P, S') tokens.
        num_bootstrap: resamples of prompts.
        seed: of the resampling.

    Raises: ValueError if shapes differ, a value is not finite, there are fewer than two prompts, or the sign of
        the difference in length decides every comparison, so that nothing is left to control.
    """
    plain = win_rate(ours, theirs, num_bootstrap=num_bootstrap, seed=seed)
    a, b = finite("ours", ours, 2), finite("theirs", theirs, 2)
    x, y = finite("our_lengths", our_lengths, 2), finite("their_lengths", their_lengths, 2)
    if a.shape != x.shape or b.shape != y.shape:
        raise ValueError(f"scores {a.shape}, {b.shape} and lengths {x.shape}, {y.shape} differ")
    longer = (x[:, :, None] - y[:, None, :]).reshape(len(a), -1)
    won = (0.5 + 0.5 * np.sign(a[:, :, None] - b[:, None, :])).reshape(len(a), -1)
    if plain.value in (0.0, 1.0) or np.ptp(longer) == 0:
        return plain
    by_length = np.tanh(longer / longer.std())
    if _separated(by_length, won):
        raise ValueError("length decides every comparison: its share cannot be taken out")
    rng = np.random.default_rng(seed)
    equal = np.ones((1, len(a)))
    resampled = []
    for start in range(0, num_bootstrap, 64):
        count = min(64, num_bootstrap - start)
        draws = rng.multinomial(len(a), np.full(len(a), 1 / len(a)), size=count)
        resampled.append(_logistic(by_length, won, draws.astype(np.float64)))
    low, high = np.quantile(np.concatenate(resampled), [0.025, 0.975])
    value = float(special.expit(_logistic(by_length, won, equal)[0]))
    return Interval(value, float(special.expit(low)), float(special.expit(high)))


def _separated(x: Floats, won: Floats) -> bool:
    """Whether a threshold on x parts wins from losses, so that the regression has no finite solution."""
    wins, losses = x[won > 0.5], x[won < 0.5]
    if (won == 0.5).any() or not len(wins) or not len(losses):
        return False
    return bool(wins.min() >= losses.max() or wins.max() <= losses.min())


def _logistic(x: Floats, won: Floats, weights: Floats) -> Floats:
    """(B,) intercepts of B logistic regressions of (P, N) outcomes on x, prompts weighted by (B, P).

    Newton's method with a ridge of 1e-3 prompts, which keeps resamples that are separated finite.
    """
    per = x.shape[1]
    coefficients = np.zeros((len(weights), 2))
    for _ in range(50):
        p = special.expit(coefficients[:, 0, None, None] + coefficients[:, 1, None, None] * x)
        slope = (won - p) / per
        curvature = p * (1 - p) / per

        def over(values: Floats) -> Floats:
            return np.asarray((weights * values.sum(axis=2)).sum(axis=1))

        gradient = np.stack([over(slope), over(slope * x)], axis=1) - 1e-3 * coefficients
        aa, ab, bb = over(curvature) + 1e-3, over(curvature * x), over(curvature * x * x) + 1e-3
        determinant = aa * bb - ab * ab
        step = (
            np.stack(
                [
                    bb * gradient[:, 0] - ab * gradient[:, 1],
                    aa * gradient[:, 1] - ab * gradient[:, 0],
                ],
                axis=1,
            )
            / determinant[:, None]
        )
        size = np.abs(step).max(axis=1, keepdims=True)
        coefficients += step / np.maximum(
            size, 1.0
        )  # no step over one unit: far out Newton overshoots
        if size.max() < 1e-10:
            break
    return np.asarray(coefficients[:, 0])


def ratings(
    scores: Mapping[str, ArrayLike], *, anchor: str, num_bootstrap: int = 1000, seed: int
) -> pd.DataFrame:
    """All policies on Bradley and Terry's scale (1952), in Elo points over one of them.

    Every pair is compared on every prompt, prompts weigh the same, and each pair has half a win more on either
    side: a policy that always wins has a finite rating.

    Args:
        scores: of each policy (P, S) scores, the same prompts in the same order.
        anchor: the policy at 0.
        num_bootstrap: resamples of prompts.
        seed: of the resampling.

    Returns: one row per policy, best first: policy, elo, lower, upper (95 %; none for the anchor).

    Raises: ValueError if there are fewer than two policies or prompts, the prompts do not match, the anchor is
        not among them, or a score is not finite.
    """
    names = list(scores)
    if len(names) < 2 or anchor not in names:
        raise ValueError(f"need two policies or more and {anchor} among them, got {names}")
    shares = np.stack([[win_shares(scores[a], scores[b]) for b in names] for a in names])  # K K P
    num_prompts = shares.shape[2]
    if num_prompts < 2:
        raise ValueError("an interval over prompts needs at least two of them, got one")
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_bootstrap
    ).astype(np.float64)
    weights = np.concatenate([np.ones((1, num_prompts)), draws])
    wins = np.einsum("bp,ijp->bij", weights, shares) + 0.5
    found = _bradley_terry(wins) * ELO_PER_LOGIT
    at = names.index(anchor)
    found -= found[:, [at]]
    lower, upper = np.quantile(found[1:], [0.025, 0.975], axis=0)
    table = pd.DataFrame({"policy": names, "elo": found[0], "lower": lower, "upper": upper})
    return table.sort_values("elo", ascending=False, kind="stable", ignore_index=True)


def _bradley_terry(wins: Floats) -> Floats:
    """(B, K) log-strengths, mean 0, from (B, K, K) wins of i over j, all positive (diagonals do not count).

    Newton's method on the concave likelihood of sum_ij wins_ij log sigmoid(theta_i - theta_j).
    """
    count = wins.shape[1]
    off = 1 - np.eye(count)
    wins = wins * off
    games = wins + wins.swapaxes(1, 2)
    theta = np.zeros(wins.shape[:2])
    for _ in range(100):
        p = special.expit(theta[:, :, None] - theta[:, None, :]) * off
        gradient = (wins - games * p).sum(axis=2)
        flow = games * p * p.swapaxes(1, 2)
        hessian = np.eye(count) * flow.sum(axis=2)[:, :, None] - flow
        # Ratings are determined up to a shift: adding it to the Hessian keeps the mean at 0.
        step = np.linalg.solve(hessian + 1.0 / count, gradient[:, :, None])[:, :, 0]
        size = np.abs(step).max(axis=1, keepdims=True)
        theta += step / np.maximum(size, 1.0)
        if size.max() < 1e-10:
            break
    return np.asarray(theta - theta.mean(axis=1, keepdims=True))


def detectable_difference(
    shares: ArrayLike, *, power: float = 0.8, alpha: float = 0.05, prompts: int | None = None
) -> float:
    """Smallest distance of a win rate from one half that is found with a chance of `power`.

    (z of 1 - alpha/2 + z of power) times the standard error over prompts.

    Args:
        shares: (P,) shares won per prompt, whose spread is taken.
        power: in (0, 1).
        alpha: of the two-sided test, in (0, 1).
        prompts: how many there would be; those of `shares` by default.

    Raises: ValueError if there are fewer than two prompts, or power or alpha is outside (0, 1).
    """
    array = finite("shares", shares, 1)
    if len(array) < 2:
        raise ValueError("a spread over prompts needs at least two of them, got one")
    if not (0 < power < 1 and 0 < alpha < 1):
        raise ValueError(f"power and alpha must lie in (0, 1), got {power} and {alpha}")
    z = float(special.ndtri(1 - alpha / 2) + special.ndtri(power))
    return z * float(array.std(ddof=1)) / math.sqrt(prompts or len(array))
