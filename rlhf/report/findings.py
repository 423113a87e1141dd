"""What a round's evaluations say about over-optimisation, in numbers with intervals.

Whatever the data do not support is `Missing`, with the reason; nothing is invented in its place. All numbers are
on report prompts, which chose no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import pandas as pd
from scipy import special

from rlhf import contracts
from rlhf.evaluation import comparison, over_optimisation, statistics
from rlhf.evaluation.over_optimisation import Fit
from rlhf.evaluation.statistics import Interval

INCOMING, INITIAL = "incoming", "initial"
"""Names, among checkpoints, of the promoted policy that a round starts from, and of r0's."""


@dataclass(frozen=True)
class Missing:
    """What cannot be said, and why."""

    reason: str


T = TypeVar("T")
Maybe: TypeAlias = T | Missing


@dataclass(frozen=True)
class Point:
    """One policy of a candidate's path.

    Attributes:
        distance: square root of the mean KL to the start, with the ends of its 95 % interval.
        proxy, gold: over the start's, paired by prompt.
        members: the same of each member of the committee.
    """

    checkpoint: str
    step: int
    kl: Interval
    proxy: Interval
    gold: Maybe[Interval]
    members: list[float]
    disagreement: float
    length: float
    entropy: float
    selected: bool

    @property
    def distance(self) -> float:
        """Square root of KL, in root nats."""
        return math.sqrt(max(self.kl.value, 0.0))


@dataclass(frozen=True)
class Part:
    """A part of gold: its change from the start to the chosen checkpoint, and from gold's best to the last one."""

    name: str
    change: Interval
    after_best: Maybe[Interval]

    @property
    def gamed(self) -> bool:
        """Whether it surely fell."""
        return self.change.upper < 0


@dataclass(frozen=True)
class Path_:
    """One candidate: its path, curves, and what its chosen checkpoint left on the table.

    Attributes:
        start: the policy that candidates start as, at distance 0.
        left: gold of the best checkpoint of the path less that of the chosen one, paired by prompt. The best of
            several noisy means is too high: this is an upper estimate.
        parted: gold's change less proxy's, from the start to the chosen checkpoint, each in standard deviations of
            the start's answers.
        best: the checkpoint with the highest gold.
    """

    candidate: str
    algorithm: str
    start: str
    points: list[Point]
    proxy: Maybe[Fit]
    gold: Maybe[Fit]
    best: Maybe[str]
    left: Maybe[Interval]
    parted: Maybe[Interval]
    parts: Maybe[list[Part]]

    @property
    def chosen(self) -> Point:
        """The checkpoint that stands for the candidate."""
        return next(point for point in self.points if point.selected)


@dataclass(frozen=True)
class Comparison:
    """Who is better.

    Attributes:
        matrix: `comparison.win_matrix` of all policies.
        ratings: `comparison.ratings`, anchored at the incoming policy.
        controlled: of each candidate against the incoming policy, the win rate at equal length.
        detectable: smallest distance from one half found with a chance of .8, of the largest spread.
        prompts: compared on.
    """

    policies: list[str]
    matrix: pd.DataFrame
    ratings: pd.DataFrame
    controlled: dict[str, Maybe[Interval]]
    detectable: float
    prompts: int


@dataclass(frozen=True)
class Bin:
    """Accuracy of a share of the held-out pairs."""

    label: str
    count: int
    accuracy: Interval


@dataclass(frozen=True)
class RewardModel:
    """What the committee gets right on pairs that it never saw.

    Attributes:
        accuracy: share of pairs in the label's order.
        ceiling: share of labels in gold's order, the most that can be had; Missing without gold.
        by_margin: by the difference in gold, in quarters of the pairs.
        by_length: by how much longer the chosen answer is.
        calibration: `statistics.reliability`; error, its expected calibration error.
        length_slope: score per token; length_correlation: of score and length.
    """

    pairs: int
    accuracy: Interval
    members: list[float]
    ceiling: Maybe[float]
    by_margin: Maybe[list[Bin]]
    by_length: Maybe[list[Bin]]
    calibration: pd.DataFrame
    error: float
    length_slope: float
    length_correlation: float


@dataclass(frozen=True)
class BestOfN:
    """What choosing the best of n answers of the start by proxy gains, without training.

    Attributes:
        ns: values of n.
        kl: to the start, from the answers' probabilities; bound, log n - (n-1)/n, which it does not exceed.
        proxy, gold: over the start's, one per n.
        fitted: the curve of gold d (alpha - beta d).
    """

    samples: int
    ns: list[int]
    kl: list[float]
    bound: list[float]
    proxy: list[Interval]
    gold: Maybe[list[Interval]]
    fitted: Maybe[Fit]

    @property
    def best(self) -> int | None:
        """N with the highest gold."""
        if isinstance(self.gold, Missing):
            return None
        return self.ns[int(np.argmax([g.value for g in self.gold]))]


@dataclass(frozen=True)
class Findings:
    """Everything that the report of a round draws and says."""

    round: str
    judge: str
    has_gold: bool
    prompts: int
    paths: list[Path_]
    failed: dict[str, str]
    comparison: Maybe[Comparison]
    best_of_n: Maybe[BestOfN]
    reward_model: Maybe[RewardModel]
    answers: dict[str, pd.DataFrame] = field(repr=False)
    """Of each policy on report prompts: incoming, r0's where it is another, each candidate's chosen checkpoint."""


def find(
    folder: Path,
    round: str,
    candidates: Mapping[str, str],
    *,
    starts_as: str,
    num_bootstrap: int,
    seed: int,
) -> Findings:
    """Read a round's outputs.

    Args:
        folder: with `evaluations/<candidate>` and `reward_model`, like `runs/r1`.
        candidates: algorithm by name.
        starts_as: `incoming` or `initial`, the policy that candidates start as.
        num_bootstrap: resamples of every interval.
        seed: of the resampling.
    """
    tables, failed = {}, {}
    for name in candidates:
        place = folder / "evaluations" / name
        if (place / "answers.parquet").is_file():
            rows = contracts.read(place / "evaluations.parquet", contracts.EVALUATIONS)
            answers = contracts.read(place / "answers.parquet", contracts.ANSWERS)
            tables[name] = rows, answers[answers["split"] == "report"]
        else:
            failed[name] = f"{place}/answers.parquet is not there: it failed, or was not run"
    options = _Options(num_bootstrap, seed)
    paths = []
    for name, table in tables.items():
        path = _said(
            lambda name=name, table=table: _path(  # type: ignore[misc]
                name, candidates[name], table[0], table[1], starts_as, options
            )
        )
        if isinstance(path, Missing):
            failed[name] = path.reason
        else:
            paths.append(path)
    policies = _policies(paths, {name: answers for name, (_, answers) in tables.items()})
    judge = next((str(rows["judge"].iloc[0]) for rows, _ in tables.values()), "none")
    has_gold = judge not in ("proxy", "none")
    return Findings(
        round=round,
        judge=judge,
        has_gold=has_gold,
        prompts=next((a["prompt_id"].nunique() for a in policies.values()), 0),
        paths=paths,
        failed=failed,
        comparison=_said(lambda: _compare(policies, "gold" if has_gold else "proxy", options)),
        best_of_n=_said(lambda: _best_of_n(folder / "best_of_n", options)),
        reward_model=_said(lambda: _reward_model(folder / "reward_model", round, options)),
        answers=policies,
    )


@dataclass(frozen=True)
class _Options:
    num_bootstrap: int
    seed: int

    def mean(self, values: np.ndarray) -> Interval:
        """Of (P,) values, one per prompt."""
        return statistics.mean_interval(
            values, np.arange(len(values)), num_bootstrap=self.num_bootstrap, seed=self.seed
        )


def _said(find: Callable[[], T]) -> Maybe[T]:
    """What is found, or why it cannot be."""
    try:
        return find()
    except ValueError as error:
        return Missing(str(error))


# --- one candidate ---


def _path(
    candidate: str,
    algorithm: str,
    rows: pd.DataFrame,
    answers: pd.DataFrame,
    starts_as: str,
    options: _Options,
) -> Path_:
    of = {name: table for name, table in answers.groupby("checkpoint", sort=False)}
    start = INITIAL if starts_as == INITIAL and INITIAL in of else INCOMING
    steps = rows[(rows["split"] == "report") & (rows["checkpoint"] != INCOMING)].sort_values("step")
    base = of[start]
    gold, no_gold = not answers["gold"].isna().any(), _NO_GOLD
    if not gold and not answers["gold"].isna().all():
        no_gold = Missing("gold is not known of every answer")

    def change(table: pd.DataFrame, column: str) -> np.ndarray:
        return np.asarray(
            statistics.by_prompt(table, column).mean(1) - statistics.by_prompt(base, column).mean(1)
        )

    points = []
    for row in steps.to_dict("records"):
        table = of[row["checkpoint"]]
        members = [c for c in table.columns if c.startswith("proxy/")]
        points.append(
            Point(
                checkpoint=row["checkpoint"],
                step=row["step"],
                kl=options.mean(statistics.by_prompt(table, "kl").mean(1)),
                proxy=options.mean(change(table, "proxy")),
                gold=options.mean(change(table, "gold")) if gold else no_gold,
                members=[float(change(table, c).mean()) for c in members],
                disagreement=float(table["proxy_std"].mean()),
                length=float(table["num_tokens"].mean()),
                entropy=float(table["entropy"].mean()),
                selected=bool(row["selected"]),
            )
        )
    tables = [base, *(of[point.checkpoint] for point in points)]

    def curve(column: str) -> Maybe[Fit]:
        def fitted() -> Fit:
            kl, reward = (
                np.stack([statistics.by_prompt(table, name).mean(1) for table in tables])[None]
                for name in ("kl", column)
            )
            kl[:, 0] = 0.0
            return over_optimisation.fit(
                kl, reward, form="rl", num_bootstrap=options.num_bootstrap, seed=options.seed
            )

        return _said(fitted)

    chosen = next(point for point in points if point.selected)
    best = points[int(np.argmax([p.gold.value for p in points]))] if gold else None  # type: ignore[union-attr]
    left: Maybe[Interval] = no_gold
    parts: Maybe[list[Part]] = no_gold
    parted: Maybe[Interval] = no_gold
    if best is not None:
        left = options.mean(
            change(of[best.checkpoint], "gold") - change(of[chosen.checkpoint], "gold")
        )
        names = [c for c in base.columns if c.startswith("gold/") and not base[c].isna().any()]
        last = points[-1]
        same = best.checkpoint == last.checkpoint
        parts = [
            Part(
                name.removeprefix("gold/"),
                options.mean(change(of[chosen.checkpoint], name)),
                Missing("gold was highest at the last checkpoint")
                if same
                else options.mean(
                    change(of[last.checkpoint], name) - change(of[best.checkpoint], name)
                ),
            )
            for name in names
        ] or Missing("the gold program has one part only")
        spread = {c: float(base[c].std()) for c in ("gold", "proxy")}
        if min(spread.values()) > 0:
            parted = options.mean(
                change(of[chosen.checkpoint], "gold") / spread["gold"]
                - change(of[chosen.checkpoint], "proxy") / spread["proxy"]
            )
        else:
            parted = Missing("all answers of the start score alike")
    return Path_(
        candidate=candidate,
        algorithm=algorithm,
        start=start,
        points=points,
        proxy=curve("proxy"),
        gold=curve("gold") if gold else no_gold,
        best=best.checkpoint if best is not None else no_gold,
        left=left,
        parted=parted,
        parts=parts,
    )


_NO_GOLD = Missing("no gold is declared")


# --- all of them ---


def _policies(paths: list[Path_], answers: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Answers of each policy to the report prompts."""
    found: dict[str, pd.DataFrame] = {}
    for path in paths:
        table = answers[path.candidate]
        for name in (INITIAL, INCOMING):
            part = table[table["checkpoint"] == name]
            if len(part):
                found.setdefault(name, part)
    for path in paths:
        table = answers[path.candidate]
        found[path.candidate] = table[table["checkpoint"] == path.chosen.checkpoint]
    return found


def _compare(policies: Mapping[str, pd.DataFrame], score: str, options: _Options) -> Comparison:
    if len(policies) < 2:
        raise ValueError("no candidate was evaluated")
    scores = {name: statistics.by_prompt(table, score) for name, table in policies.items()}
    lengths = {name: statistics.by_prompt(table, "num_tokens") for name, table in policies.items()}
    ours = [name for name in policies if name not in (INCOMING, INITIAL)]
    chances = {"num_bootstrap": options.num_bootstrap, "seed": options.seed}
    shares = [comparison.win_shares(scores[name], scores[INCOMING]) for name in ours]
    return Comparison(
        policies=list(policies),
        matrix=comparison.win_matrix(scores, **chances),
        ratings=comparison.ratings(scores, anchor=INCOMING, **chances),
        controlled={
            name: _said(
                lambda name=name: comparison.length_controlled_win_rate(  # type: ignore[misc]
                    scores[name],
                    scores[INCOMING],
                    lengths[name],
                    lengths[INCOMING],
                    **chances,
                )
            )
            for name in ours
        },
        detectable=max(comparison.detectable_difference(share) for share in shares),
        prompts=len(next(iter(scores.values()))),
    )


# --- best of n ---


def _best_of_n(folder: Path, options: _Options) -> BestOfN:
    path = folder / "answers.parquet"
    if not path.is_file():
        raise ValueError(f"{path} is not there")
    answers = contracts.read(path, contracts.ANSWERS)
    table = contracts.read(folder / "best_of_n.parquet", contracts.BEST_OF_N)
    proxy, gold = (statistics.by_prompt(answers, column) for column in ("proxy", "gold"))
    ns = table["n"].tolist()
    has_gold = not answers["gold"].isna().any()

    def over_start(target: np.ndarray) -> np.ndarray:
        best = statistics.best_of_n_by_prompt(proxy, target, ns)
        return np.asarray(best - target.mean(1))

    def fitted() -> Fit:
        gains = np.concatenate([np.zeros((1, len(gold))), over_start(gold)[1:]])
        kl = np.repeat(table["kl_nats"].to_numpy()[:, None], len(gold), axis=1)
        return over_optimisation.fit(
            kl[None],
            gains[None],
            form="bon",
            num_bootstrap=options.num_bootstrap,
            seed=options.seed,
        )

    return BestOfN(
        samples=proxy.shape[1],
        ns=ns,
        kl=table["kl_nats"].tolist(),
        bound=table["kl_bound_nats"].tolist(),
        proxy=[options.mean(row) for row in over_start(proxy)],
        gold=[options.mean(row) for row in over_start(gold)] if has_gold else _NO_GOLD,
        fitted=_said(fitted) if has_gold else _NO_GOLD,
    )


# --- the reward model ---


def _reward_model(folder: Path, round: str, options: _Options) -> RewardModel:
    path = folder / "scored_pairs.parquet"
    if not path.is_file():
        raise ValueError(f"{path} is not there")
    table = contracts.read(path, contracts.SCORED_PAIRS)
    pairs = table[(table["round"] == round) & ~table["tie"]]
    if pairs["prompt_id"].nunique() < 2:
        raise ValueError(f"{len(pairs)} held-out pairs are too few for intervals over prompts")
    margin = pairs["margin"].to_numpy()
    members = [c for c in pairs.columns if c.startswith("margin/")]

    def accuracy(part: pd.DataFrame) -> Interval:
        decided = part[part["margin"] != 0]
        return statistics.mean_interval(
            (decided["margin"] > 0).to_numpy(float),
            decided["prompt_id"].to_numpy(),
            num_bootstrap=options.num_bootstrap,
            seed=options.seed,
        )

    def bins(column: pd.Series, words: Callable[[float, float], str]) -> list[Bin]:
        groups = pd.qcut(column, 4, duplicates="drop")
        found = []
        for interval, part in pairs.groupby(groups, observed=True):
            value = _said(lambda part=part: accuracy(part))  # type: ignore[misc]
            if isinstance(value, Interval):
                found.append(Bin(words(interval.left, interval.right), len(part), value))
        return found

    has_gold = bool(pairs["gold_margin"].notna().all())
    longer = (pairs["chosen_tokens"] - pairs["rejected_tokens"]).astype(float)
    first = pairs["chosen_first"].to_numpy()
    predicted = special.expit(np.where(first, margin, -margin))
    both = np.concatenate([pairs["chosen_score"], pairs["rejected_score"]])
    tokens = np.concatenate([pairs["chosen_tokens"], pairs["rejected_tokens"]])
    slope, correlation = statistics.score_length(both, tokens)
    by_length = bins(longer, lambda low, high: f"{low:+.0f} to {high:+.0f} tokens")
    return RewardModel(
        pairs=len(pairs),
        accuracy=accuracy(pairs),
        members=[float((pairs[c] > 0).mean()) for c in members],
        ceiling=float((pairs["gold_margin"] > 0).mean()) if has_gold else _NO_GOLD,
        by_margin=bins(
            pairs["gold_margin"].abs(), lambda low, high: f"{max(low, 0):.1f} to {high:.1f}"
        )
        if has_gold
        else _NO_GOLD,
        by_length=by_length or Missing("answers of all pairs are equally long"),
        calibration=statistics.reliability(predicted, first.astype(float)),
        error=statistics.expected_calibration_error(predicted, first.astype(float)),
        length_slope=slope,
        length_correlation=correlation,
    )
