"""All rounds side by side: one row per round, from what git keeps of them and from this folder's timings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf import artifacts, champion
from rlhf.config import Pipeline
from rlhf.progress import TIMINGS

if TYPE_CHECKING:
    from rich.table import Table

LEGEND = (
    "On report prompts, KL in nats; vs: win rates; * is the champion. Proxies of different rounds are not "
    "on one scale."
)
_NUMBERS = {  # column of a row -> number of an evaluation
    "gold": "gold_mean",
    "proxy": "proxy_mean",
    "kl": "kl_nats",
    "win_rate_initial": "win_rate_initial",
    "win_rate_initial_lower": "win_rate_initial_lower",
    "win_rate_initial_upper": "win_rate_initial_upper",
    "win_rate": "win_rate",
    "win_rate_lower": "win_rate_lower",
    "win_rate_upper": "win_rate_upper",
}
_OF_A_MOVE = ("kl", "win_rate", "win_rate_lower", "win_rate_upper")
_STAGES = ("preferences", "reward_model", "best_of_n", "promote")  # once a round
_STAGES_OF_CANDIDATES = ("policy", "evaluate")


def rows(pipeline: Pipeline, folder: str | Path = ".") -> list[dict[str, Any]]:
    """One row per declared round, r0 first; what is not known is None.

    Keys: round, from, policy (whose the round's promoted policy is: a candidate, or r0), status
    (initial, unrun, promoted, kept, stopped, awaiting), out_of_date (whether the policy that the round
    started from is another now: its numbers are of the earlier one), champion (whether it is the round whose
    promotion is the champion now), by, because, gold, proxy, kl (nats, to the incoming policy),
    win_rate_initial and win_rate (against r0 and against the incoming policy), both with _lower and
    _upper (95 %), pairs (labelled in the round), carried (pairs of earlier rounds), tokens (worked
    through by all stages), seconds (of all stages, as if one after the other).

    Numbers are of report prompts. A round that kept its incoming policy has moved nowhere: no kl and
    no win_rate. Every round's committee is scaled so that the incoming policy has mean proxy 0: proxies of
    different rounds are not on one scale.
    """
    folder = Path(folder)
    decisions = {name: champion.read_decision(folder, name) for name in pipeline.rounds}
    best = champion.champion(pipeline, folder)
    table = [_start(pipeline, folder, decisions)]
    for name in pipeline.rounds:
        table.append(_row(pipeline, folder, name, decisions))
    for row in table:
        row["champion"] = row["round"] == best.round
    return table


def origin(
    pipeline: Pipeline, round: str, decision_of: Callable[[str], dict[str, Any] | None]
) -> tuple[str, str | None]:
    """Round and candidate that a round's policy comes from, past rounds that kept theirs; r0 has no candidate."""
    while round in pipeline.rounds:
        decision = decision_of(round)
        if decision is not None and decision["status"] == "promoted":
            return round, str(decision["promoted"])
        round = pipeline.rounds[round].from_
    return "r0", None


def as_table(table: Sequence[Mapping[str, Any]], *, compact: bool = False) -> Table:
    """The rows to print; `*` marks the champion. Compact fits into 80 columns, with less."""
    from rich import box
    from rich.table import Table

    left = ("round", "policy", "status", "by")
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    cells = [_cells(row, compact) for row in table]
    for heading in cells[0]:
        shown.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for row, texts in zip(table, cells, strict=True):
        unrun = row["status"] == "unrun"
        style = "bold green" if row["champion"] else ("dim" if unrun else "")
        shown.add_row(*texts.values(), style=style)
    return shown


def log(pipeline: Pipeline, folder: str | Path = ".") -> bool:
    """Put the table and its figure on the newest decided round's run in MLflow; whether it was new."""
    from rlhf import tracking
    from rlhf.evaluation import plots

    table = [row for row in rows(pipeline, folder) if row["status"] != "unrun"]
    if len(table) == 1:
        return False
    newest = table[-1]["round"]
    return tracking.log_rounds(
        pipeline, newest, table, lambda path: plots.rounds(table, path), folder
    )


# --- parts ---------------------------------------------------------------------------------------


def _start(
    pipeline: Pipeline, folder: Path, decisions: Mapping[str, dict[str, Any] | None]
) -> dict[str, Any]:
    """r0, as the first round that started from it judged it."""
    judged: Mapping[str, Any] = next(
        (
            decision["incoming"]
            for name, decision in decisions.items()
            if decision is not None and pipeline.rounds[name].from_ == "r0"
        ),
        {},
    )
    numbers = {
        column: judged.get(name) if column in ("gold", "proxy") else None
        for column, name in _NUMBERS.items()
    }
    return {
        "round": "r0",
        "from": None,
        "policy": "r0",
        "status": "initial",
        "out_of_date": False,
        "by": None,
        "because": None,
        **numbers,
        "pairs": None,
        "carried": None,
        **_spent(folder, ["data", "sft"]),
    }


def _row(
    pipeline: Pipeline,
    folder: Path,
    name: str,
    decisions: Mapping[str, dict[str, Any] | None],
) -> dict[str, Any]:
    decision = decisions[name]
    by, because, recorded = None, None, None
    judged: Mapping[str, Any] = {}
    moved = decision is not None and decision["status"] == "promoted"
    if decision is not None:
        by, because, _ = champion.whose_word(decision)
        found = [r for r in decision["candidates"] if r["candidate"] == decision["promoted"]]
        incoming = decision.get("incoming") or {}
        judged = found[0] if found else incoming
        recorded = incoming.get("policy")
    start = pipeline.rounds[name].from_
    numbers = {
        column: judged.get(key) if moved or column not in _OF_A_MOVE else None
        for column, key in _NUMBERS.items()
    }
    stages = [f"{stage}@{name}" for stage in _STAGES]
    stages += [
        f"{stage}@{candidate}"
        for candidate in pipeline.candidates_of(name)
        for stage in _STAGES_OF_CANDIDATES
    ]
    return {
        "round": name,
        "from": start,
        "policy": None
        if decision is None
        else (not moved and recorded) or origin(pipeline, name, decisions.get)[1] or "r0",
        "status": "unrun" if decision is None else decision["status"],
        "out_of_date": recorded is not None
        and recorded != (origin(pipeline, start, decisions.get)[1] or "r0"),
        "by": by,
        "because": because,
        **numbers,
        **_pairs(folder, name),
        **_spent(folder, stages),
    }


def _pairs(folder: Path, name: str) -> dict[str, int | None]:
    path = folder / f"runs/{name}/metrics/preferences.json"
    content = artifacts.read_json(path) if path.is_file() else {}
    own = [content.get(key) for key in ("train_pairs", "heldout_pairs")]
    known = [int(count) for count in own if count is not None]
    return {"pairs": sum(known) if known else None, "carried": content.get("carried_pairs")}


def _spent(folder: Path, stages: Sequence[str]) -> dict[str, float | int | None]:
    """Tokens and seconds of stages; None unless every one has run in this folder."""
    seconds: float | None = 0.0
    tokens: int | None = 0
    for stage in stages:
        timing = _timing(folder / TIMINGS / f"{stage}.json")
        spent, counted = timing.get("total_seconds"), timing.get("tokens")
        seconds = None if seconds is None or spent is None else seconds + float(spent)
        tokens = None if tokens is None or counted is None else tokens + int(counted)
    return {"tokens": tokens, "seconds": None if seconds is None else round(seconds, 1)}


def _timing(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _cells(row: Mapping[str, Any], compact: bool) -> dict[str, str]:
    """Heading -> text."""
    carried = f" +{_count(row['carried'])}" if row["carried"] and not compact else ""
    interval = "" if compact else " [95 %]"
    cells = {
        "round": row["round"],
        "policy": f"{row['policy'] or ''}{' *' if row['champion'] else ''}",
        "status": row["status"] + (", out of date" if row["out_of_date"] else ""),
        "by": row["by"] or "",
        "gold": _number(row["gold"], "+.2f"),
        "proxy": _number(row["proxy"], "+.2f"),
        "KL": _number(row["kl"], ".2f"),
        f"vs r0{interval}": _win_rate(row, "win_rate_initial", compact),
        f"vs prev{interval}": _win_rate(row, "win_rate", compact),
        "pairs": _count(row["pairs"]) + carried,
        "tokens": _count(row["tokens"]),
        "seconds": _number(row["seconds"], ".0f"),
    }
    return {name: text for name, text in cells.items() if not compact or name not in _WIDE}


_WIDE = ("by", "tokens")


def _win_rate(row: Mapping[str, Any], name: str, compact: bool) -> str:
    text = _number(row[name], ".2f")
    low, high = row[f"{name}_lower"], row[f"{name}_upper"]
    return text if compact or low is None or high is None else f"{text} [{low:.2f},{high:.2f}]"


def _number(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _count(value: int | None) -> str:
    """1234, 12.3k, 1.23M, 4.56G."""
    if value is None or value < 10_000:
        return "" if value is None else str(value)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + letter
    raise AssertionError(value)
