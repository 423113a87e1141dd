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

from rlhf import champion
from rlhf.artifacts import remake
from rlhf.config import Pipeline
from rlhf.errors import BadInput
from rlhf.tracking import links

_NUM_SHOWN = 3
_MAX_CHARACTERS = 220


def read_decision(round: str, folder: str | Path = ".") -> dict[str, Any]:
    """`runs/<round>/metrics/decision.json`."""
    decision = champion.read_decision(folder, round)
    if decision is None:
        raise BadInput(
            f"{round} has no decision yet",
            where=str(Path(folder) / f"runs/{round}/metrics/decision.json"),
            mend=f"python -m flows run --round {round}",
        )
    return decision


def verdict(decision: dict[str, Any]) -> str:
    """One line: what the round came to and why."""
    words = {
        "promoted": f"promoted {decision['promoted']}",
        "kept": "promoted nothing",
        "stopped": "stopped",
        "awaiting": "awaits a decision",
    }
    return f"{words[decision['status']]}: {decision['reason']}"


def by_whom(decision: dict[str, Any]) -> str | None:
    """Who decided in place of the gate, when, and what the gate said; None where the gate decided."""
    if decision["decision"] is None:
        return None
    by, _, at = champion.whose_word(decision)
    when = f" at {at}" if at else ""
    return f"{by} decided{when}; the gate by itself: {decision['verdict']['reason']}"


def warnings(decision: dict[str, Any]) -> list[str]:
    """What training warned of, a line each."""
    return [
        f"alarm of {row['candidate']}: {message}"
        for row in decision["candidates"]
        for message in row.get("warnings", [])
    ]


def next_step(decision: dict[str, Any], round: str) -> list[str]:
    """Commands for a round that waits or has stopped the loop; none for others."""
    if decision["status"] not in ("awaiting", "stopped"):
        return []
    because = '--because "..."'
    best = decision.get("leader")
    candidates = [row["candidate"] for row in decision["candidates"]]
    lines = [
        f"python -m flows decide {round} promote --candidate {name} {because}"
        for name in ([best] if best else candidates)
    ]
    lines.append(f"python -m flows decide {round} keep {because}")
    if decision["status"] == "awaiting":
        lines.append(f"python -m flows decide {round} stop {because}")
    return lines


def rules(decision: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the rules, a row for each candidate: its values, marked where a rule is broken."""
    declared = decision.get("gate", {}).get("rules", [])
    headings = ["candidate", *(_rule_words(rule) for rule in declared)]
    table = []
    for row in decision["candidates"]:
        cells = []
        for rule in declared:
            value = _number(row.get(rule["metric"]), ".4g") or "not known"
            cells.append(value if _holds(rule, row.get(rule["metric"])) else f"{value} ✗")
        table.append([row["candidate"], *cells])
    return headings, table


def legend(decision: dict[str, Any]) -> str:
    """What the columns are measured on."""
    metric = decision.get("gate", {}).get("metric", "the gate's metric")
    return f"On report prompts, KL in nats; `choose` is {metric} on choose prompts, which ranks."


def headings(decision: dict[str, Any]) -> list[str]:
    """Of the table: with the win rate against r0 and the alarms where they say something."""
    extra = _extra(decision)
    return [*HEADINGS[:5], *(_EXTRA[name][0] for name in extra), *HEADINGS[5:]]


def rows(decision: dict[str, Any]) -> list[list[str]]:
    """The table's cells: the incoming policy first, then the candidates."""
    table = []
    extra = _extra(decision)
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
                *(_number(entry.get(name), _EXTRA[name][1]) for name in extra),
                _number(entry.get("rank_score"), "+.2f"),
                _decision_words(entry, decision),
            ]
        )
    return table


HEADINGS = ["candidate", "proxy", "gold", "KL", "win rate [95 %]", "choose", "decision"]
_EXTRA = {"win_rate_initial": ("vs r0", ".2f"), "alarms": ("alarms", ".0f")}


def print_report(
    pipeline: Pipeline, round: str, folder: str | Path = ".", console: Console | None = None
) -> None:
    """Print the round's end: table, samples, where to look."""
    console = console or Console()
    decision = read_decision(round, folder)
    table = Table(title=f"round {round}", title_justify="left", title_style="bold")
    names = headings(decision)
    for i, heading in enumerate(names):
        number = 0 < i < len(names) - 1
        table.add_column(heading, justify="right" if number else "left", no_wrap=number)
    for row in rows(decision):
        chosen = row[0] == decision.get("promoted")
        table.add_row(*row, style="bold green" if chosen else "")
    console.print()
    console.print(table)
    console.print(legend(decision), style="dim", markup=False, highlight=False)
    _print_rules(decision, console)
    for line in (*warnings(decision), verdict(decision), by_whom(decision)):
        if line is not None:
            console.print(line, markup=False, highlight=False)
    commands = next_step(decision, round)
    if commands:
        console.print("\nTo decide:", style="bold")
    for line in commands:
        console.print(f"  {_programs()}{line}", markup=False, highlight=False, soft_wrap=True)
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
    ]
    who = by_whom(decision)
    if who is not None:
        lines += [who, ""]
    commands = next_step(decision, round)
    if commands:
        lines += ["To decide:", "", "```", *commands, "```", ""]
    lines += [*_markdown_table(headings(decision), rows(decision)), "", legend(decision)]
    if warnings(decision):
        lines += ["", *(f"- {line}" for line in warnings(decision))]
    names, cells = rules(decision)
    if len(names) > 1:
        lines += ["", "Rules, on report prompts:", "", *_markdown_table(names, cells)]
    found = links(pipeline, round, folder=folder)
    if found:
        lines += ["", *(f"- [{name} in MLflow]({url})" for name, url in found.items())]
    return "\n".join(lines)


def _markdown_table(headings: list[str], cells: list[list[str]]) -> list[str]:
    def line(row: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"

    return [line(headings), "|---" + "|---:" * (len(headings) - 2) + "|---|", *map(line, cells)]


def _print_rules(decision: dict[str, Any], console: Console) -> None:
    names, cells = rules(decision)
    if len(names) == 1:
        return
    table = Table(title="rules", title_justify="left", title_style="bold")
    for i, heading in enumerate(names):
        table.add_column(heading, justify="right" if i else "left")
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _rule_words(rule: dict[str, Any]) -> str:
    if rule.get("at_least") is not None:
        return f"{rule['metric']} >= {rule['at_least']:g}"
    return f"{rule['metric']} <= {rule['at_most']:g}"


def _holds(rule: dict[str, Any], value: Any) -> bool:
    if not isinstance(value, (int, float)):
        return False
    if rule.get("at_least") is not None:
        return bool(value >= rule["at_least"])
    return bool(value <= rule["at_most"])


def _extra(decision: dict[str, Any]) -> list[str]:
    """Columns that say something: in the first round r0 is the incoming policy itself."""
    shown = []
    for name in _EXTRA:
        known = [c[name] for c in decision["candidates"] if c.get(name)]
        first = name == "win_rate_initial" and _incoming(decision).get("from") == "r0"
        if known and not first:
            shown.append(name)
    return shown


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
        f"{'runs/' + round + '/report/report.html':<45} was the reward gamed? open it in a browser",
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
        return {"promoted": "", "awaiting": "kept meanwhile"}.get(decision["status"], "kept")
    broken = [str(rule).split()[0] for rule in entry.get("failed_rules") or []]
    failed = ", ".join(dict.fromkeys(broken))  # with their values in the table of rules
    if entry.get("candidate") == decision.get("promoted"):
        return "promoted" if entry["passes"] else f"promoted, fails {failed}"
    return "passes" if entry["passes"] else f"fails {failed}".strip()


def _number(value: Any, form: str) -> str:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return ""
    return format(value, form) if math.isfinite(value) else str(value)


def _short(text: Any) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= _MAX_CHARACTERS else words[: _MAX_CHARACTERS - 1] + "…"
