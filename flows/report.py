"""What a round came to: one table, a few answers before and after, and where to look further."""

from __future__ import annotations

import math
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf.artifacts import read_json, remake
from rlhf.config import Pipeline
from rlhf.errors import BadInput
from rlhf.tracking import links

_NUM_SHOWN = 3
_MAX_CHARACTERS = 220


def read_decision(round: str, folder: str | Path = ".") -> dict[str, Any]:
    """`runs/<round>/metrics/decision.json`."""
    path = Path(folder) / f"runs/{round}/metrics/decision.json"
    if not path.is_file():
        raise BadInput(
            f"{round} has no decision yet",
            where=str(path),
            mend=f"python -m flows run --round {round}",
        )
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("candidates"), list):
        raise BadInput(
            "not a decision",
            where=str(path),
            rule="as promote writes it",
            mend=f"make it again: dvc repro promote@{round}",
        )
    return content


def verdict(decision: dict[str, Any]) -> str:
    """One line: who was promoted and why."""
    promoted = decision.get("promoted")
    who = f"promoted {promoted}" if _is_candidate(decision) else "promoted nothing"
    return f"{who}: {decision.get('reason', '')}".rstrip(": ")


def legend(decision: dict[str, Any]) -> str:
    """What the columns are measured on."""
    metric = decision.get("gate", {}).get("metric", "the gate's metric")
    return f"On report prompts, KL in nats; `choose` is {metric} on choose prompts, which ranks."


def rows(decision: dict[str, Any]) -> list[list[str]]:
    """The table's cells: the incoming policy first, then the candidates."""
    table = []
    for entry in [_incoming(decision), *decision.get("candidates", [])]:
        low, high = entry.get("win_rate_lower"), entry.get("win_rate_upper")
        win = _number(entry.get("win_rate"), ".2f")
        if low is not None and high is not None:
            win += f" [{_number(low, '.2f')},{_number(high, '.2f')}]"
        table.append(
            [
                str(entry.get("candidate", "")),
                _number(entry.get("proxy_mean"), "+.2f"),
                _number(entry.get("gold_mean"), "+.2f"),
                _number(entry.get("kl_nats"), ".2f"),
                win,
                _number(entry.get("rank_score"), "+.2f"),
                _decision_words(entry, decision),
            ]
        )
    return table


HEADINGS = ["candidate", "proxy", "gold", "KL", "win rate [95 %]", "choose", "decision"]


def print_report(
    pipeline: Pipeline, round: str, folder: str | Path = ".", console: Console | None = None
) -> None:
    """Print the round's end: table, samples, where to look."""
    console = console or Console()
    decision = read_decision(round, folder)
    table = Table(title=f"round {round}", title_justify="left", title_style="bold")
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if 0 < i < len(HEADINGS) - 1 else "left")
    for row in rows(decision):
        chosen = row[0] == decision.get("promoted")
        table.add_row(*row, style="bold green" if chosen else "")
    console.print()
    console.print(table)
    console.print(legend(decision), style="dim", markup=False, highlight=False)
    console.print(verdict(decision), markup=False, highlight=False)
    _print_samples(decision, round, Path(folder), console)
    console.print("\nLook further:", style="bold")
    for line in _further(pipeline, round, folder):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def markdown(pipeline: Pipeline, round: str, folder: str | Path = ".") -> str:
    """The same as Markdown, for Prefect's artifact."""
    decision = read_decision(round, folder)
    lines = [
        f"# Round {round}",
        "",
        f"**{verdict(decision)}**",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" + "|---:" * (len(HEADINGS) - 2) + "|---|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows(decision)]
    lines += ["", legend(decision)]
    found = links(pipeline, round, folder=folder)
    if found:
        lines += ["", *(f"- [{name} in MLflow]({url})" for name, url in found.items())]
    return "\n".join(lines)


def _print_samples(decision: dict[str, Any], round: str, folder: Path, console: Console) -> None:
    name = decision.get("promoted") if _is_candidate(decision) else None
    if name is None:
        best = max(
            decision.get("candidates", []), key=lambda c: c.get("gold_mean") or -1e9, default=None
        )
        name = best["candidate"] if best else None
    path = folder / f"runs/{round}/evaluations/{name}/shown.parquet"
    if not path.is_file():
        return
    import pyarrow.parquet

    try:
        shown = pyarrow.parquet.read_table(path).slice(0, _NUM_SHOWN).to_pylist()
    except pyarrow.ArrowException as error:
        raise BadInput(
            f"not readable as Parquet: {error}",
            where=str(path),
            mend=f"make it again: {remake(path)}",
        ) from error
    console.print(f"\nBefore and after ({name}):", style="bold")
    for row in shown:
        texts = {"prompt": ("", row["prompt"])}
        for column in ("before", "after"):
            gold = _number(row.get(f"gold_{column}"), "+.2f")
            texts[column] = (f"[gold {gold}] " if gold else "", row[column])
        for name, (mark, text) in texts.items():
            line = textwrap.fill(
                f"  {name:<7} {mark}{_short(text)}", console.width, subsequent_indent=" " * 10
            )
            console.print(line, markup=False, highlight=False)
        console.print()


def _further(pipeline: Pipeline, round: str, folder: str | Path) -> list[str]:
    programs = _programs()
    lines = [
        f"{'runs/' + round + '/promoted':<45} the promoted policy, a transformers directory",
        f"{'runs/' + round + '/evaluations/*/over_optimisation.png':<45} proxy and gold against KL",
        f"{'runs/' + round + '/metrics/decision.json':<45} the decision, with every number",
        f"{programs + 'python -m flows report --round ' + round:<45} this page again",
        f"{programs + 'python -m flows plan':<45} what would run now, and why",
        f"{programs + 'python -m flows ui':<45} MLflow and Prefect in the browser; then open",
    ]
    found = links(pipeline, round, folder=folder)
    words = {"candidates": "candidates, judged", "training": "training curves", "round": "the gate"}
    lines += [f"  {words[name]}: {url}" for name, url in found.items() if name in words]
    return lines


def _programs() -> str:
    """How the environment's programs are called from here: `.venv/bin/`, or nothing when it is active."""
    folder = Path(sys.executable).parent
    if str(folder) in os.environ.get("PATH", "").split(os.pathsep):
        return ""
    shown = os.path.relpath(folder)
    return f"{folder if shown.startswith('..') else shown}/"


def _incoming(decision: dict[str, Any]) -> dict[str, Any]:
    incoming = decision.get("incoming")
    if isinstance(incoming, dict):
        return {"candidate": "incoming", **incoming}
    return {"candidate": f"incoming ({incoming})" if incoming else "incoming"}


def _is_candidate(decision: dict[str, Any]) -> bool:
    return any(c.get("candidate") == decision.get("promoted") for c in decision["candidates"])


def _decision_words(entry: dict[str, Any], decision: dict[str, Any]) -> str:
    if "passes" not in entry:
        return "" if _is_candidate(decision) else "kept"
    if entry.get("candidate") == decision.get("promoted"):
        return "promoted"
    if entry["passes"]:
        return "passes"
    failed = entry.get("failed_rules") or []
    return "fails " + ", ".join(str(rule) for rule in failed) if failed else "fails"


def _number(value: Any, form: str) -> str:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return ""
    return format(value, form) if math.isfinite(value) else str(value)


def _short(text: Any) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= _MAX_CHARACTERS else words[: _MAX_CHARACTERS - 1] + "…"
