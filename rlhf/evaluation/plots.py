"""Figures, drawn without a display. Colours and markers stay apart for colour-blind people and in print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"  # Okabe and Ito


def _new(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})


def over_optimisation(table: pd.DataFrame, candidate: str, path: Path) -> None:
    """Proxy and gold against sqrt(KL) along a candidate's path, with 95 % intervals, on report prompts."""
    rows = table[table["split"] == "report"].sort_values("step")
    figure, axes = _new()
    x = rows["kl_nats"].clip(lower=0).pow(0.5)
    curves: list[tuple[str, str, str, str]] = [
        ("proxy", "o", BLUE, "proxy (reward-model committee)")
    ]
    if rows["gold_mean"].notna().all():
        curves.append(("gold", "s", ORANGE, "gold (what is meant)"))
    for name, marker, colour, label in curves:
        mean, error = rows[f"{name}_mean"], rows[f"{name}_se"].fillna(0) * 1.96
        axes.errorbar(
            x, mean, yerror_or_none(error), marker=marker, color=colour, label=label, capsize=3
        )
    chosen = rows[rows["selected"]]
    if len(chosen):
        at = float(x[chosen.index[0]])
        axes.axvline(
            at, color=GREY, linestyle=":", label=f"selected: {chosen['checkpoint'].iloc[0]}"
        )
    axes.set_xlabel("square root of KL to the incoming policy (nats per answer)")
    axes.set_ylabel("mean reward")
    prompts, answers = int(rows["num_prompts"].iloc[0]), int(rows["num_samples"].min())
    axes.set_title(
        f"{candidate}: what was optimised and what was meant\n"
        f"{prompts} report prompts, at least {answers} answers a point, bars 95 %",
        fontsize=10,
    )
    axes.legend(frameon=False)
    _save(figure, path)


def yerror_or_none(error: pd.Series) -> Any:
    """Error bars, unless there is no spread to show."""
    return error if (error > 0).any() else None


def reliability(table: pd.DataFrame, error: float | None, path: Path) -> None:
    """Predicted against observed preference in bins: the diagonal is a calibrated reward model."""
    rows = table[table["count"] > 0]
    figure, axes = _new(4.6, 4.4)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", label="calibrated")
    spread = (rows["mean_outcome"] * (1 - rows["mean_outcome"]) / rows["count"]).pow(0.5) * 1.96
    axes.errorbar(
        rows["mean_prob"],
        rows["mean_outcome"],
        spread,
        marker="o",
        color=BLUE,
        capsize=3,
        label="committee",
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("predicted probability that the first answer is preferred")
    axes.set_ylabel("observed share")
    shown = "" if error is None else f", calibration error {error:.3f}"
    axes.set_title(f"{int(rows['count'].sum())} held-out pairs{shown}\nbars 95 %", fontsize=10)
    axes.legend(frameon=False)
    _save(figure, path)


def rounds(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Gold and proxy of each round's policy, and below it the KL that its candidate moved away.

    Every round scores by its own committee, on a scale of its own: proxies are points, not a curve.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.4, 0.45 * len(rows) + 2), 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    x = list(range(len(rows)))

    def values(column: str) -> list[float]:
        return [math.nan if row[column] is None else float(row[column]) for row in rows]

    above.plot(x, values("gold"), marker="s", color=ORANGE, label="gold (what is meant)")
    above.plot(x, values("proxy"), "o", color=BLUE, label="proxy (the round's committee)")
    above.set_ylabel("mean reward")
    above.legend(frameon=False)
    below.bar(x, values("kl"), color=GREY, width=0.6)
    below.set_ylabel("KL (nats)")
    below.set_xticks(x, [str(row["round"]) for row in rows], rotation=90 if len(rows) > 12 else 0)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    _save(figure, path)
