"""Numbers with their uncertainty: win rates, means, calibration, best-of-n, score against length.

Samples of one prompt are alike, so intervals resample prompts (clusters), never single samples.
Every function refuses empty input and values that are not finite with a ValueError.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate and the ends of its 95 % interval."""

    value: float
    lower: float
    upper: float


class ScoreLength(NamedTuple):
    """Slope of score on length (score per token) and Pearson's correlation of the two."""

    slope: float
    pearson: float


def finite(name: str, values: ArrayLike, ndim: int) -> Floats:
    """As a float64 array; ValueError if it is empty, of other dimensions, or not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != ndim or not array.size:
        raise ValueError(f"{name} must be a filled {ndim}-d array, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has {np.sum(~np.isfinite(array))} values that are not finite")
    return array


def by_prompt(answers: pd.DataFrame, column: str) -> Floats:
    """(P, S): the answers of each prompt in a row, prompts in order of appearance; as many answers to each."""
    prompts = answers["prompt_id"].nunique()
    return np.asarray(answers[column].to_numpy(np.float64).reshape(prompts, -1))


def _ratio(sums: Floats, counts: Floats, axis: int = -1) -> Floats:
    return np.asarray(sums.sum(axis=axis) / counts.sum(axis=axis))


def _cluster_bootstrap(sums: Floats, counts: Floats, num_bootstrap: int, seed: int) -> Interval:
    """Mean over all elements with a percentile interval over clusters given by sum and count."""
    if len(sums) < 2:
        raise ValueError("an interval over clusters needs at least two of them, got one")
    if num_bootstrap < 1:
        raise ValueError(f"num_bootstrap must be at least 1, got {num_bootstrap}")
    value = float(_ratio(sums, counts))
    if np.ptp(sums / counts) == 0:  # every resample gives the same mean, up to rounding
        return Interval(value, value, value)
    result = stats.bootstrap(
        (sums, counts),
        _ratio,
        n_resamples=num_bootstrap,
        paired=True,
        vectorized=True,
        method="percentile",
        batch=256,
        rng=np.random.default_rng(seed),
    )
    return Interval(
        value, float(result.confidence_interval.low), float(result.confidence_interval.high)
    )


def win_rate(
    candidate: ArrayLike, baseline: ArrayLike, *, num_bootstrap: int = 1000, seed: int
) -> Interval:
    """Probability that a candidate's sample scores above a baseline's on the same prompt.

    All candidate-baseline pairs of samples within a prompt are compared, a tie counting one half;
    prompts weigh the same, and the interval comes from resampling prompts. Where every pair is won
    (or lost), resampling sees no spread and Wilson's interval over prompts is given instead.

    Args:
        candidate: (P, S) scores.
        baseline: (P, S') scores, same prompts in the same order.
        num_bootstrap: resamples.
        seed: of the resampling.

    Returns: win rate in [0, 1] with its 95 % interval.

    Raises: ValueError if the prompts do not match, there are fewer than two, or a score is not
        finite.
    """
    ours, theirs = finite("candidate", candidate, 2), finite("baseline", baseline, 2)
    if len(ours) != len(theirs):
        raise ValueError(f"candidate has {len(ours)} prompts, baseline {len(theirs)}")
    difference = ours[:, :, None] - theirs[:, None, :]
    per_prompt = (0.5 + 0.5 * np.sign(difference)).mean(axis=(1, 2))
    interval = _cluster_bootstrap(per_prompt, np.ones_like(per_prompt), num_bootstrap, seed)
    if interval.value in (0.0, 1.0):
        return wilson(int(interval.value) * len(per_prompt), len(per_prompt))
    return interval


def mean_interval(
    values: ArrayLike, clusters: ArrayLike, *, num_bootstrap: int = 1000, seed: int
) -> Interval:
    """Mean of all values, with an interval from resampling whole clusters.

    Args:
        values: (N,).
        clusters: (N,) label of each value's cluster, usually its prompt.
        num_bootstrap: resamples.
        seed: of the resampling.

    Returns: mean with its 95 % interval.

    Raises: ValueError if shapes differ, there are fewer than two clusters or a value is not finite.
    """
    array, labels = finite("values", values, 1), np.asarray(clusters)
    if labels.shape != array.shape:
        raise ValueError(f"shapes differ: values {array.shape}, clusters {labels.shape}")
    codes, _ = pd.factorize(labels)
    if (codes < 0).any():
        raise ValueError("clusters has missing labels")
    counts = np.bincount(codes).astype(np.float64)
    sums = np.asarray(np.bincount(codes, weights=array), dtype=np.float64)
    return _cluster_bootstrap(sums, counts, num_bootstrap, seed)


def wilson(successes: int, n: int) -> Interval:
    """Share of successes among n independent trials with Wilson's 95 % interval.

    Raises: ValueError unless n >= 1 and 0 <= successes <= n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"need n >= 1 and 0 <= successes <= n, got {successes} of {n}")
    bounds = stats.binomtest(successes, n).proportion_ci(method="wilson")
    return Interval(successes / n, float(bounds.low), float(bounds.high))


def reliability(prob: ArrayLike, outcome: ArrayLike, bins: int = 10) -> pd.DataFrame:
    """Predicted against observed frequency in bins of equal width.

    For a reward model, prob is sigmoid(score of A - score of B) with A and B in an order that does
    not know the label; with A always the chosen one, outcome is always 1 and nothing is measured.

    Args:
        prob: (N,) in [0, 1].
        outcome: (N,) in [0, 1], 1 where the event happened, .5 for a tie.
        bins: number of bins; the last one contains 1.

    Returns: one row a bin: lower, upper, count, mean_prob, mean_outcome (NaN where count is 0).

    Raises: ValueError if shapes differ, a value lies outside [0, 1], or bins < 1.
    """
    predicted, happened = finite("prob", prob, 1), finite("outcome", outcome, 1)
    if predicted.shape != happened.shape:
        raise ValueError(f"shapes differ: prob {predicted.shape}, outcome {happened.shape}")
    for name, array in (("prob", predicted), ("outcome", happened)):
        if array.min() < 0 or array.max() > 1:
            raise ValueError(f"{name} must lie in [0, 1]")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    edges = np.linspace(0, 1, bins + 1)
    index = np.searchsorted(edges[1:-1], predicted, side="right")
    table = pd.DataFrame({"mean_prob": predicted, "mean_outcome": happened}).groupby(index)
    means = table.mean().reindex(range(bins))
    count = np.bincount(index, minlength=bins)
    return means.assign(lower=edges[:-1], upper=edges[1:], count=count)[
        ["lower", "upper", "count", "mean_prob", "mean_outcome"]
    ]


def expected_calibration_error(prob: ArrayLike, outcome: ArrayLike, bins: int = 10) -> float:
    """Mean over samples of their bin's |predicted - observed frequency| (arXiv:1706.04599, eq. 3).

    Args:
        prob: see `reliability`.
        outcome: see `reliability`.
        bins: see `reliability`.

    Returns: error in [0, 1]; 0 is calibrated.

    Raises: ValueError as `reliability` does.
    """
    table = reliability(prob, outcome, bins)
    gap = (table["mean_prob"] - table["mean_outcome"]).abs()
    return float((gap * table["count"]).sum() / table["count"].sum())


def best_of_n(proxy: ArrayLike, target: ArrayLike, ns: Sequence[int]) -> pd.DataFrame:
    """Mean scores of the best of n by proxy, from N samples a prompt, averaged over all n-subsets.

    With the samples in ascending order of proxy, the i-th (from 1) is the best of
    C(i-1, n-1) of the C(N, n) subsets (Nakano et al. 2021, arXiv:2112.09332, app. I); samples tied
    by proxy share their weight, as if ties were broken at random. log n - (n-1)/n is an upper bound
    of the KL to the sampling policy, not its value (Beirami et al. 2024, arXiv:2401.01879).

    Args:
        proxy: (P, N) scores that choose.
        target: (P, N) scores that are reported.
        ns: values of n, 1 to N.

    Returns: one row per n: n, proxy, target (means over prompts), kl_bound_nats.

    Raises: ValueError if shapes differ, a score is not finite, ns is empty or an n is not in 1..N.
    """
    chooser, meant = finite("proxy", proxy, 2), finite("target", target, 2)
    if chooser.shape != meant.shape:
        raise ValueError(f"shapes differ: proxy {chooser.shape}, target {meant.shape}")
    rows = [
        {
            "n": int(n),
            "proxy": float((weights * chooser).sum(axis=1).mean()),
            "target": float((weights * meant).sum(axis=1).mean()),
            "kl_bound_nats": float(np.log(n) - (n - 1) / n),
        }
        for n, weights in zip(ns, _subset_weights(chooser, ns), strict=True)
    ]
    return pd.DataFrame(rows)


def best_of_n_by_prompt(chooser: ArrayLike, target: ArrayLike, ns: Sequence[int]) -> Floats:
    """(len(ns), P) mean target of the best of n on each prompt; `best_of_n` has their means.

    Args:
        chooser: (P, N) scores that choose.
        target: (P, N) scores that are reported.
        ns: values of n, 1 to N.
    """
    choosing, meant = finite("chooser", chooser, 2), finite("target", target, 2)
    if choosing.shape != meant.shape:
        raise ValueError(f"shapes differ: chooser {choosing.shape}, target {meant.shape}")
    return np.stack([(w * meant).sum(axis=1) for w in _subset_weights(choosing, ns)])


def best_of_n_kl(proxy: ArrayLike, logprobs: ArrayLike, ns: Sequence[int]) -> Floats:
    """KL of the best of n by proxy to the policy that samples, in nats, mean over prompts.

    The best of n is y with probability (F^n - G^n) m_y / m, where F and G are the chances that an answer scores
    at most, and less than, what y does, m = F - G, and m_y is y's own probability (Beirami et al. 2024,
    arXiv:2401.01879, lemma 1). F is estimated from the samples, whose probabilities say how much of m is known.
    Where single answers have no weight this is log n - (n-1)/n, the bound of `best_of_n`; where they have, less.
    Where they weigh about 1/N it is estimated too high, by less than .2 nats at n = N/2.

    Args:
        proxy: (P, N) scores that choose.
        logprobs: (P, N) of the same answers under the policy, in nats, summed over tokens.
        ns: values of n, 1 to N.

    Returns: (len(ns),).

    Raises: ValueError as `best_of_n` does, and if a log-probability is above 0.
    """
    chooser, logs = finite("proxy", proxy, 2), finite("logprobs", logprobs, 2)
    if chooser.shape != logs.shape:
        raise ValueError(f"shapes differ: proxy {chooser.shape}, logprobs {logs.shape}")
    if logs.max() > 1e-6:
        raise ValueError("a log-probability is above 0")
    weights = _subset_weights(chooser, ns)
    total = np.zeros(len(ns))
    for row in range(len(chooser)):
        log_f, part = _at_most(chooser[row], logs[row])
        for number, n in enumerate(ns):
            # log((F^n - G^n) / m) = log n + (n-1) log F + log((1 - (1 - part)^n) / (n part))
            spread = np.where(part > 1e-9, -np.expm1(n * np.log1p(-part)) / (n * part), 1.0)
            ratio = np.log(n) + (n - 1) * log_f + np.log(spread)
            total[number] += (weights[number][row] * ratio).sum()
    bound = [np.log(n) - (n - 1) / n for n in ns]
    return np.minimum(total / len(chooser), bound)


def _at_most(scores: Floats, logprobs: Floats) -> tuple[Floats, Floats]:
    """(N,) log F, F being the chance of a score that is at most this one's, and (F - G) / F, the part that ties.

    Where the answers seen are nearly all there are, from their probabilities. Else an answer that is one of many
    lies where an order statistic does, in the mean at digamma(i) - digamma(N + 1); one that comes again and again
    has a known probability, and what remains is shared by the samples below and above it.
    """
    count = len(scores)
    seen = pd.DataFrame({"score": scores, "logprob": logprobs}).drop_duplicates()
    mass = np.exp(seen["logprob"]).groupby(seen["score"]).sum().clip(upper=1.0)
    at = mass.index.get_indexer(scores)
    ties = mass.to_numpy()[at]
    if mass.sum() > 0.99:
        at_most = (mass.cumsum() / mass.sum()).to_numpy()[at]
        return np.log(at_most), np.minimum(ties / at_most, 1 - 1e-15)
    lowest, highest = (stats.rankdata(scores, how) for how in ("min", "max"))
    below = (lowest - 1) / np.maximum(count - (highest - lowest + 1), 1) * (1 - ties)
    order = special.digamma(highest) - special.digamma(count + 1)
    log_f = np.where(ties * count >= 1, np.log(below + ties), order)
    return log_f, np.minimum(ties / np.exp(log_f), 1 - 1e-15)


def _subset_weights(chooser: Floats, ns: Sequence[int]) -> list[Floats]:
    """For each n, (P, N) chances that a sample is the best of n of them, ties broken at random."""
    num_samples = chooser.shape[1]
    if not len(ns) or any(n != int(n) or not 1 <= n <= num_samples for n in ns):
        raise ValueError(f"ns must be integers in 1..{num_samples}, got {list(ns)}")
    lowest, highest = stats.rankdata(chooser, "min", axis=1), stats.rankdata(chooser, "max", axis=1)
    weights = []
    for n in ns:
        # Share of subsets whose best has rank <= i, i = 0..N: C(i, n) / C(N, n).
        below = np.concatenate([np.zeros(n), np.exp(_log_comb(np.arange(n, num_samples + 1), n))])
        below /= below[-1]
        group = below[highest.astype(int)] - below[lowest.astype(int) - 1]
        weights.append(np.asarray(group / (highest - lowest + 1)))
    return weights


def _log_comb(total: NDArray[np.int64], n: int) -> Floats:
    """Log C(total, n) - log C(max(total), n), so that exponentials stay at or below 1."""
    logs = special.gammaln(total + 1) - special.gammaln(total - n + 1)
    return np.asarray(logs - logs.max())


def score_length(scores: ArrayLike, lengths: ArrayLike) -> ScoreLength:
    """How much of a score is length: slope (score per token) and correlation.

    Args:
        scores: (N,).
        lengths: (N,) tokens of the untruncated responses.

    Returns: slope and Pearson's correlation in [-1, 1]; NaN where they are undefined: the slope
        if all lengths are equal, the correlation if all lengths or all scores are.

    Raises: ValueError if shapes differ, there are fewer than two, or a value is not finite.
    """
    y, x = finite("scores", scores, 1), finite("lengths", lengths, 1)
    if y.shape != x.shape or len(x) < 2:
        raise ValueError(f"need two or more scores with a length each: {y.shape}, {x.shape}")
    if np.ptp(x) == 0:
        return ScoreLength(float("nan"), float("nan"))
    if np.ptp(y) == 0:
        return ScoreLength(0.0, float("nan"))
    fit = stats.linregress(x, y)
    return ScoreLength(float(fit.slope), float(fit.rvalue))
