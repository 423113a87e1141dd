"""The gate between rounds: promote the best candidate that passes every rule, or keep the incoming policy."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf import artifacts, config, contracts, tracking
from rlhf.errors import BadInput
from rlhf.progress import Clock
from tasks import common


def run(pipeline: config.Pipeline, name: str) -> None:
    """Reads the round's evaluations; writes runs/<round>/promoted and metrics/decision.json. Always decides."""
    clock = Clock(f"promote@{name}")
    declared = common.of_round(pipeline, name)
    incoming = common.need(common.RUNS / declared.from_ / "promoted")
    rows = [_row(pipeline, name, key, c) for key, c in pipeline.candidates_of(name).items()]
    decision = decide(pipeline.gate, rows, declared.from_) | {
        "round": name,
        "incoming": _incoming(name, declared.from_, rows),
    }
    source = incoming
    if decision["promoted"] is not None:
        best = next(row for row in rows if row["candidate"] == decision["promoted"])
        source = common.RUNS / name / "policies" / best["candidate"] / best["checkpoint"]
        common.need(source)
    figures = {
        key: common.need(_evaluations(name, key) / "over_optimisation.png")
        for key in pipeline.candidates_of(name)
    }
    out = common.RUNS / name / "promoted"
    with tracking.stage_run(
        pipeline,
        stage="promote",
        key=f"promote@{name}",
        round=name,
        kind="round",
        name=name,
        algorithm=None,
        params={"gate": pipeline.gate.model_dump(), "from": declared.from_},
    ) as tracked:
        with artifacts.write_directory(out) as directory:
            shutil.copytree(source, directory, dirs_exist_ok=True)
        artifacts.write_json(common.RUNS / name / "metrics" / "decision.json", decision)
        tracked.tags({"rlhf.promoted": decision["promoted"] or "none"})
        tracked.summary(_gate_metrics(rows, decision["promoted"]))
        tracked.table("candidates", rows)
        tracked.artifact(common.RUNS / name / "metrics" / "decision.json")
        for key, figure in figures.items():
            with artifacts.temporary_file(Path(".scratch") / f"{key}.png") as copy:
                shutil.copyfile(figure, copy)
                tracked.figure(copy)
        for key in pipeline.candidates_of(name):
            tracked.dataset(_evaluations(name, key) / "evaluations.parquet", key, "evaluation")
        tracked.note(_note(decision, rows))
        tracking.register_champion(pipeline, name, out, _gate_metrics(rows, decision["promoted"]))
    tracking.tag_outputs(pipeline, name)
    clock.write()


def decide(gate: config.Gate, rows: list[dict[str, Any]], incoming: str) -> dict[str, Any]:
    """Apply the gate to the candidates' rows.

    Rules are read on report prompts, the ranking on choose prompts; equal ranks go to the smaller KL.

    Returns: promoted (candidate or None), reason, gate, candidates.
    """
    passing = [row for row in rows if row["passes"]]
    if passing:
        best = max(passing, key=lambda row: (row["rank_score"], -row["kl_nats"]))
        reason = (
            f"{best['candidate']} has the highest {gate.metric} on choose prompts "
            f"({best['rank_score']:.3f}) of {len(passing)} candidates that pass every rule"
        )
        promoted = best["candidate"]
    else:
        promoted = None
        failures = "; ".join(f"{r['candidate']}: {', '.join(r['failed_rules'])}" for r in rows)
        reason = f"no candidate passes every rule, the policy of {incoming} stays ({failures})"
    return {
        "promoted": promoted,
        "reason": reason,
        "gate": gate.model_dump(),
        "candidates": rows,
    }


def failed_rules(gate: config.Gate, row: dict[str, Any]) -> list[str]:
    """The rules a candidate's report row breaks, in words. A value that is missing breaks its rule."""
    failed = []
    for rule in gate.rules:
        value = row[rule.metric]
        if value is None or pd.isna(value):
            failed.append(f"{rule.metric} is not known")
        elif rule.at_least is not None and value < rule.at_least:
            failed.append(f"{rule.metric} {value:.6g} < {rule.at_least:g}")
        elif rule.at_most is not None and value > rule.at_most:
            failed.append(f"{rule.metric} {value:.6g} > {rule.at_most:g}")
    return failed


def _row(
    pipeline: config.Pipeline,
    round_name: str,
    key: str,
    candidate: config.AnyCandidate,
) -> dict[str, Any]:
    path = common.need(_evaluations(round_name, key) / "evaluations.parquet")
    table = contracts.read(path, contracts.EVALUATIONS)
    selected = table[table["selected"]]
    report, choose = (_only(selected, path, "selected", split) for split in ("report", "choose"))
    numbers = {
        name: None if pd.isna(report[name]) else float(report[name]) for name in config.METRICS
    }
    score = choose[pipeline.gate.metric]
    failed = failed_rules(pipeline.gate, numbers)
    if pd.isna(score):
        failed.append(f"{pipeline.gate.metric} is not known")
    return {
        "candidate": key,
        "algorithm": candidate.algorithm,
        "checkpoint": str(report["checkpoint"]),
        **numbers,
        "rank_score": None if pd.isna(score) else float(score),
        "judge": str(report["judge"]),
        "passes": not failed,
        "failed_rules": failed,
    }


def _incoming(round_name: str, start: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The incoming policy's own numbers on report prompts, as every candidate's evaluation holds them."""
    path = _evaluations(round_name, rows[0]["candidate"]) / "evaluations.parquet"
    table = contracts.read(path, contracts.EVALUATIONS)
    row = _only(table[table["checkpoint"] == "incoming"], path, "incoming", "report")
    numbers = {n: None if pd.isna(row[n]) else float(row[n]) for n in config.METRICS}
    return {"candidate": f"incoming ({start})", "from": start, **numbers}


def _only(rows: pd.DataFrame, path: Path, what: str, split: str) -> pd.Series[Any]:
    """The one row of that split, or BadInput."""
    found = rows[rows["split"] == split]
    if len(found) != 1:
        raise BadInput(
            f"{len(found)} {what} checkpoints on {split} prompts",
            where=str(path),
            rule="an evaluation has one incoming and one selected checkpoint on either split",
            mend=f"make it again: {artifacts.remake(path)}",
        )
    return found.iloc[0]


def _evaluations(round_name: str, candidate: str) -> Path:
    return common.RUNS / round_name / "evaluations" / candidate


def _gate_metrics(rows: list[dict[str, Any]], promoted: str | None) -> dict[str, float]:
    """The champion's numbers, under names no curve has."""
    best = next((row for row in rows if row["candidate"] == promoted), None)
    found = {"gate/promoted": float(promoted is not None)}
    if best is not None:
        found |= {f"gate/{key}": best[key] for key in config.METRICS if best[key] is not None}
    return found


def _note(decision: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    winner = decision["promoted"]
    lines = [
        f"**{f'promoted {winner}' if winner else 'nothing promoted'}**: {decision['reason']}",
        "",
        "| candidate | proxy | gold | KL (nats) | win rate | 95 % | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = "passes" if row["passes"] else ", ".join(row["failed_rules"])
        lines.append(
            f"| {row['candidate']} | {number(row['proxy_mean'])} | {number(row['gold_mean'])} | "
            f"{number(row['kl_nats'])} | {number(row['win_rate'])} | "
            f"{number(row['win_rate_lower'])} to {number(row['win_rate_upper'])} | {verdict} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--round", required=True, help="like r1")
    arguments = parser.parse_args()
    common.main(f"promote@{arguments.round}", lambda p: run(p, arguments.round), sees_gold=True)
