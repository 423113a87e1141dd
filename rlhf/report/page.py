"""The report as one HTML file that needs nothing else: text, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rlhf.evaluation.over_optimisation import Fit
from rlhf.evaluation.statistics import Interval
from rlhf.report import figures
from rlhf.report.findings import INCOMING, INITIAL, Comparison, Findings, Maybe, Missing, Path_

MAX_SHOWN = 6
"""Prompts whose answers are printed."""


@dataclass(frozen=True)
class Answer:
    """One answer of one policy, with what gold says of it and of its parts."""

    policy: str
    text: str
    gold: float | None
    proxy: float
    parts: list[tuple[str, float, float]]
    """Name, value, and its place among all answers' values of the part, from -1 (lowest) to 1 (highest)."""


@dataclass(frozen=True)
class Example:
    """A prompt with the answers of every policy."""

    prompt: str
    answers: list[Answer]


def render(
    found: Findings,
    decision: Mapping[str, Any],
    *,
    project: str,
    start: str,
    prompts: Mapping[str, str],
    warnings: Mapping[str, Sequence[str]],
    seed: int,
    packages: Mapping[str, str],
) -> str:
    """The page.

    Args:
        decision: what `promote` decided, as in `decision.json`.
        project: its name.
        start: the round whose policy this one starts from.
        prompts: text of each prompt by id.
        warnings: what training warned of, by candidate.
        seed: of the pipeline.
        packages: versions to name.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(interval=_interval, number=_number, percent=_percent, kl=_kl)
    environment.tests["missing"] = lambda value: isinstance(value, Missing)
    drawn = [(path, _svg(figures.path(path)), verdict(path)) for path in found.paths]
    model, best = found.reward_model, found.best_of_n
    page = environment.get_template("page.html").render(
        found=found,
        decision=decision,
        project=project,
        start=start,
        seed=seed,
        packages=packages,
        drawn=drawn,
        frontier=_svg(figures.frontier(found.paths, found.best_of_n)),
        best_of_n=best if isinstance(best, Missing) else _svg(figures.best_of_n(best)),
        disagreement=_svg(figures.disagreement(found)),
        calibration=model if isinstance(model, Missing) else _svg(figures.calibration(model)),
        accuracy=model if isinstance(model, Missing) else _svg(figures.accuracy(model)),
        matrix=matrix(found.comparison),
        names={name: _name(name, start) for name in [INCOMING, INITIAL, *_candidates(found)]},
        part_names=_part_names(found),
        examples=examples(found, prompts),
        warnings=warnings,
        incoming=INCOMING,
    )
    return page


def _part_names(found: Findings) -> list[str]:
    """All parts of gold, in the order of the first candidate that has them."""
    names = [
        p.name for path in found.paths if not isinstance(path.parts, Missing) for p in path.parts
    ]
    return list(dict.fromkeys(names))


def _candidates(found: Findings) -> list[str]:
    return [path.candidate for path in found.paths]


def _name(policy: str, start: str) -> str:
    """What a reader calls a policy."""
    known = {INCOMING: f"incoming ({start})", INITIAL: "initial (r0)"}
    return known.get(policy, policy)


def verdict(path: Path_) -> list[str]:
    """What a path says, in sentences."""
    said = []
    chosen = path.chosen
    if isinstance(path.parted, Interval):
        part = path.parted
        if part.upper < 0:
            said.append(
                f"Proxy and gold part: from the start to {chosen.checkpoint} gold rose by {-part.value:.2f} "
                f"standard deviations less than the proxy [{-part.upper:.2f}, {-part.lower:.2f}]."
            )
        else:
            said.append(
                f"No sign that proxy and gold part at {chosen.checkpoint}: gold's rise less the proxy's is "
                f"{_interval(part)} standard deviations."
            )
    gold = path.gold
    if isinstance(gold, Missing):
        said.append(f"No curve of gold: {gold.reason}.")
    elif gold.peak is None:
        said.append(
            "The curve of gold has no peak: as far as was measured, more distance gave more gold."
        )
    elif gold.peak_is_measured:
        said.append(
            f"The curve of gold peaks at {gold.peak_kl:.1f} nats "
            f"[{gold.peak.lower**2:.1f}, {_squared(gold.peak.upper)}]: that is where to stop."
        )
    else:
        said.append(
            f"The curve of gold has not peaked within what was measured ({gold.reach**2:.1f} nats); its peak "
            "lies beyond and is an extrapolation."
        )
    if isinstance(path.left, Interval) and not isinstance(path.best, Missing):
        if path.best == chosen.checkpoint:
            said.append(f"{chosen.checkpoint} is the checkpoint with the highest gold.")
        elif path.left.lower > 0:
            said.append(
                f"{path.best} has {_interval(path.left)} more gold than {chosen.checkpoint}: left on the table "
                "(at most: the best of several noisy means is too high)."
            )
        else:
            said.append(
                f"{path.best} has the highest gold, but not surely more than {chosen.checkpoint} "
                f"({_interval(path.left)})."
            )
    if not isinstance(path.parts, Missing):
        fell = [f"{part.name} ({_interval(part.change)})" for part in path.parts if part.gamed]
        if fell:
            said.append(f"Parts of gold that fell while the proxy rose: {', '.join(fell)}.")
    return said


def _squared(value: float) -> str:
    return f"{value**2:.1f}" if math.isfinite(value) else "no end"


def matrix(found: Maybe[Comparison]) -> Maybe[dict[tuple[str, str], dict[str, Any]]]:
    """Cells of the table of win rates, by policy and opponent."""
    if isinstance(found, Missing):
        return found
    rows = found.matrix.to_dict("records")
    return {(row["policy"], row["against"]): row for row in rows}


def examples(found: Findings, prompts: Mapping[str, str]) -> list[Example]:
    """The same prompts through every policy: spread over the prompts, the first answer of each."""
    if not found.answers:
        return []
    first = {
        name: table.groupby("prompt_id", sort=False).first()
        for name, table in found.answers.items()
    }
    keys = next(iter(first.values())).index
    count = min(MAX_SHOWN, len(keys))
    keys = [keys[i * len(keys) // count] for i in range(count)]
    everything = pd.concat(found.answers.values())
    parts = [c for c in everything.columns if c.startswith("gold/")]
    span = {c: float(everything[c].abs().quantile(0.95)) or 1.0 for c in parts}
    return [
        Example(
            prompts[key],
            [
                Answer(
                    name,
                    str(table.loc[key, "response"]),
                    None if pd.isna(table.loc[key, "gold"]) else float(table.loc[key, "gold"]),
                    float(table.loc[key, "proxy"]),
                    [
                        (
                            c.removeprefix("gold/"),
                            float(table.loc[key, c]),
                            float(max(-1.0, min(1.0, table.loc[key, c] / span[c]))),
                        )
                        for c in parts
                        if pd.notna(table.loc[key, c]) and abs(table.loc[key, c]) > 1e-9
                    ],
                )
                for name, table in first.items()
            ],
        )
        for key in keys
    ]


def _svg(drawn: str | Missing) -> Markup | Missing:
    # Made by matplotlib from numbers and names that are checked; names are escaped there.
    return drawn if isinstance(drawn, Missing) else Markup(drawn)


def _interval(value: Interval, digits: int = 2) -> str:
    """1.03 [0.95, 1.11]."""
    ends = ", ".join(_number(end, digits) for end in (value.lower, value.upper))
    return f"{_number(value.value, digits)} [{ends}]"


def _number(value: float | None, digits: int = 2) -> str:
    if value is None or math.isnan(value):
        return "not known"
    if math.isinf(value):
        return "no end" if value > 0 else "no start"
    shown = f"{value:.{digits}f}"
    return shown.removeprefix("-") if float(shown) == 0 else shown


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _kl(fit: Fit) -> str:
    """Where a curve peaks, in nats; beyond three times the distance that was measured no number is worth printing."""
    if fit.peak is None:
        return "none"
    if fit.peak_is_measured:
        return f"{fit.peak.value**2:.1f} [{fit.peak.lower**2:.1f}, {_squared(fit.peak.upper)}]"
    if fit.peak.value > 3 * fit.reach:
        return f"beyond {fit.reach**2:.1f}"
    return f"{fit.peak.value**2:.1f} (extrapolated)"
