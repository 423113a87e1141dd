"""The report's figures as SVG text, for a page that opens offline.

Colours are Okabe and Ito's, and markers and dashes differ too, so that figures can be read in grey and by
colour-blind people. The same numbers give the same bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.evaluation.over_optimisation import Coefficients, Fit, curve
from rlhf.evaluation.statistics import Interval
from rlhf.report.findings import BestOfN, Findings, Maybe, Missing, Path_, RewardModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")


def _draw(width: float, height: float, plot: Callable[[Axes], None]) -> str:
    """SVG of one pair of axes; text stays text, so that it is small, can be searched, and follows the reader's zoom."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as New

    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "roundhouse", "font.family": "sans-serif"}
    ):
        figure: Figure = New(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        plot(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # A width and a height in points would not shrink on a phone; the viewBox has the shape.
    return re.sub(
        r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r' height="[^"]*pt"', "", svg, count=1)
    )


def _bars(axes: Axes, x: Sequence[float], values: Sequence[Interval], **style: Any) -> None:
    below = [v.value - v.lower for v in values]
    above = [v.upper - v.value for v in values]
    axes.errorbar(x, [v.value for v in values], [below, above], capsize=2.5, **style)


def _line(axes: Axes, fit: Fit, colour: str) -> None:
    """A fitted curve where there are measurements, dotted before the first; a mark at a peak that was measured."""
    coefficients = Coefficients(fit.alpha.value, fit.beta.value)
    for ends, style in (((fit.first, fit.reach), "-"), ((0.0, fit.first), ":")):
        d = np.linspace(*ends, 100)
        axes.plot(
            d, curve(d, coefficients, fit.form), style, color=colour, linewidth=1.2, alpha=0.7
        )
    if fit.peak is not None and fit.peak_reward is not None and fit.peak_is_measured:
        axes.plot([fit.peak.value], [fit.peak_reward.value], "*", color=colour, markersize=11)


DISTANCE = "square root of KL to the start (√nat per answer)"


def path(found: Path_) -> str:
    """Proxy and gold over the start's against distance, with fitted curves."""

    def plot(axes: Axes) -> None:
        x = [point.distance for point in found.points]
        _bars(
            axes,
            x,
            [p.proxy for p in found.points],
            fmt="o",
            color=BLUE,
            label="proxy: the committee",
        )
        if isinstance(found.proxy, Fit):
            _line(axes, found.proxy, BLUE)
        gold = [p.gold for p in found.points if isinstance(p.gold, Interval)]
        if gold:
            _bars(axes, x, gold, fmt="s", color=ORANGE, label="gold: what is meant")
        if isinstance(found.gold, Fit):
            _line(axes, found.gold, ORANGE)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.axvline(
            found.chosen.distance,
            color=GREY,
            linestyle=":",
            label=f"chosen: {found.chosen.checkpoint}",
        )
        axes.set_xlim(left=0)
        axes.set_xlabel(DISTANCE)
        axes.set_ylabel("reward over the start's")
        axes.set_title(f"{found.candidate} ({found.algorithm})", fontsize=10)
        axes.legend(frameon=False, fontsize=8)

    return _draw(5.2, 3.6, plot)


def frontier(paths: Sequence[Path_], best_of: Maybe[BestOfN]) -> str | Missing:
    """Gold over the start's against distance, all candidates and best-of-n."""
    if not paths or any(isinstance(point.gold, Missing) for path in paths for point in path.points):
        return Missing("no gold is declared")

    def plot(axes: Axes) -> None:
        for number, found in enumerate(paths):
            colour = SERIES[number % len(SERIES)]
            values = [p.gold for p in found.points if isinstance(p.gold, Interval)]
            x = [p.distance for p in found.points]
            _bars(
                axes, x, values, fmt=MARKERS[number % len(MARKERS)], color=colour, label=found.candidate,
                linestyle=DASHES[number % len(DASHES)], linewidth=1.0,
            )  # fmt: skip
            at = found.chosen
            if isinstance(at.gold, Interval):
                axes.plot(
                    at.distance, at.gold.value, "o", markersize=13, fillstyle="none", color=colour
                )
        if isinstance(best_of, BestOfN) and not isinstance(best_of.gold, Missing):
            _bars(
                axes, [math.sqrt(kl) for kl in best_of.kl], best_of.gold, fmt="*", color="black",
                label=f"best of n, to {best_of.samples}", linestyle=":", linewidth=1.0,
            )  # fmt: skip
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_xlim(left=0)
        axes.set_xlabel(DISTANCE)
        axes.set_ylabel("gold over the start's")
        axes.set_title("What was meant, at equal distance; rings: chosen", fontsize=10)
        axes.legend(frameon=False, fontsize=8)

    return _draw(6.0, 3.8, plot)


def best_of_n(found: BestOfN) -> str:
    """Proxy and gold of the best of n, against n."""

    def plot(axes: Axes) -> None:
        _bars(axes, found.ns, found.proxy, fmt="o-", color=BLUE, label="proxy, which chooses")
        if not isinstance(found.gold, Missing):
            _bars(axes, found.ns, found.gold, fmt="s--", color=ORANGE, label="gold: what is meant")
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(found.ns, [str(n) for n in found.ns])
        axes.minorticks_off()
        axes.set_xlabel("n answers, of which the proxy chooses one")
        axes.set_ylabel("reward over the start's")
        axes.legend(frameon=False, fontsize=8)

    return _draw(5.2, 3.6, plot)


def calibration(found: RewardModel) -> str:
    """Predicted against observed preference."""
    rows = found.calibration[found.calibration["count"] > 0]

    def plot(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", label="calibrated")
        spread = 1.96 * (rows["mean_outcome"] * (1 - rows["mean_outcome"]) / rows["count"]) ** 0.5
        axes.errorbar(
            rows["mean_prob"], rows["mean_outcome"], spread, fmt="o", color=BLUE, capsize=2.5,
            label="committee",
        )  # fmt: skip
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("predicted chance that the first is preferred")
        axes.set_ylabel("observed share")
        axes.set_title(f"{found.pairs} held-out pairs, error {found.error:.3f}", fontsize=10)
        axes.legend(frameon=False, fontsize=8)

    return _draw(5.2, 3.6, plot)


def accuracy(found: RewardModel) -> str | Missing:
    """Accuracy by the gold margin and by the difference in length."""
    groups = [
        (title, bins)
        for title, bins in (
            ("gold margin", found.by_margin),
            ("chosen is longer by", found.by_length),
        )
        if not isinstance(bins, Missing)
    ]
    if not groups:
        return Missing("there is neither gold nor a difference in length")

    def plot(axes: Axes) -> None:
        labels: list[str] = []
        for number, (title, bins) in enumerate(groups):
            x = list(range(len(labels), len(labels) + len(bins)))
            labels += [f"{b.label}" for b in bins]
            _bars(
                axes,
                x,
                [b.accuracy for b in bins],
                fmt=MARKERS[number],
                color=SERIES[number],
                label=title,
            )
        axes.axhline(0.5, color=GREY, linestyle=":", label="chance")
        axes.axhline(found.accuracy.value, color=GREY, linewidth=0.8, label="all pairs")
        axes.set_xticks(range(len(labels)), labels, rotation=35, ha="right", fontsize=8)
        axes.set_ylim(min(0.4, *axes.get_ylim()), 1)
        axes.set_ylabel("accuracy")
        axes.legend(frameon=False, fontsize=8, loc="lower right")

    return _draw(5.2, 3.6, plot)


def disagreement(found: Findings) -> str | Missing:
    """Spread of the committee's members along the paths."""
    if not found.paths or all(len(p.points[0].members) < 2 for p in found.paths):
        return Missing("a committee of one has no spread")

    def plot(axes: Axes) -> None:
        for number, candidate in enumerate(found.paths):
            axes.plot(
                [p.distance for p in candidate.points],
                [p.disagreement for p in candidate.points],
                marker=MARKERS[number % len(MARKERS)],
                linestyle=DASHES[number % len(DASHES)],
                color=SERIES[number % len(SERIES)],
                label=candidate.candidate,
            )
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.set_xlabel(DISTANCE)
        axes.set_ylabel("deviation between members")
        axes.legend(frameon=False, fontsize=8)

    return _draw(5.2, 3.2, plot)
