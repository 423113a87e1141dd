"""The gate between rounds.

Promotes the best candidate that passes every rule, or keeps the incoming policy; a person's word,
`rounds.<round>.decision`, goes before the gate's.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf import artifacts, champion, config, contracts, tracking
from rlhf.champion import LINEAGE, policy_digest
from rlhf.errors import BadInput
from rlhf.progress import Clock
from rlhf.report import findings, page
from rlhf.resume import content_digest, fingerprint
from tasks import common

NUM_BOOTSTRAP = 1000
PAGE = "report.html"


def run(pipeline: config.Pipeline, name: str) -> None:
    """Reads the round's evaluations; writes runs/<round>/promoted and metrics/decision.json. Always decides."""
    clock = Clock(f"promote@{name}")
    declared = common.of_round(pipeline, name)
    incoming = common.need(common.RUNS / declared.from_ / "promoted")
    _need_evaluations(pipeline, name)
    rows = [_row(pipeline, name, key, c) for key, c in pipeline.candidates_of(name).items()]
    decision = decide(declared.gate, rows, declared.from_, declared.decision) | {
        "round": name,
        "incoming": _incoming(name, declared.from_, rows),
    }
    best = next((row for row in rows if row["candidate"] == decision["promoted"]), None)
    source = incoming
    if best is not None:
        source = common.need(
            common.RUNS / name / "policies" / best["candidate"] / best["checkpoint"]
        )
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
        params={"gate": declared.gate.model_dump(), "from": declared.from_},
        inputs=_inputs(pipeline, name),
    ) as tracked:
        with artifacts.write_directory(out) as directory:
            shutil.copytree(source, directory, dirs_exist_ok=True)
            if best is not None:
                artifacts.write_json(directory / LINEAGE, lineage(pipeline, name, best, source))
        artifacts.write_json(common.RUNS / name / "metrics" / "decision.json", decision)
        told = write_report(pipeline, name, decision)
        by, because, _ = champion.whose_word(decision)
        tracked.tags(
            {
                "rlhf.promoted": decision["promoted"] or "none",
                "rlhf.status": decision["status"],
                "rlhf.decision": declared.decision.choice if declared.decision else "none",
                "rlhf.by": by,
                "rlhf.because": because,
            }
        )
        tracked.summary(_gate_metrics(rows, decision["promoted"]))
        tracked.table("candidates", rows)
        tracked.artifact(common.RUNS / name / "metrics" / "decision.json")
        tracked.artifact(told)
        for key, figure in figures.items():
            with artifacts.temporary_file(Path(".scratch") / f"{key}.png") as copy:
                shutil.copyfile(figure, copy)
                tracked.figure(copy)
        for key in pipeline.candidates_of(name):
            tracked.dataset(_evaluations(name, key) / "evaluations.parquet", key, "evaluation")
        tracked.note(_note(decision, rows))
        tracking.register_champion(pipeline)
    tracking.tag_outputs(pipeline, name, at_work=f"promote@{name}")
    clock.write()


# --- the decision --------------------------------------------------------------------------------


def decide(
    gate: config.Gate,
    rows: list[dict[str, Any]],
    start: str,
    word: config.Decision | None = None,
) -> dict[str, Any]:
    """Apply the gate to the candidates' rows, and a person's word over it.

    Args:
        rows: of the candidates, in the file's order.
        start: the round whose policy stays where none is promoted.
        word: what a person decided, if one did.

    Returns: status (promoted, kept, stopped or awaiting), promoted (candidate or None), reason; the
        gate's own `verdict` (the same three); `decision`, the person's word; `leader`, the candidate
        ranked first whether or not it passes, None where only the file's order would tell; gate;
        candidates.
    """
    verdict = judge(gate, rows, start)
    known = [row for row in rows if row["rank_score"] is not None]
    first, _ = rank(gate, known) if known else ([], "")
    leader = first[0]["candidate"] if len(first) == 1 else None
    return {
        **(verdict if word is None else _overruled(word, verdict, rows, start)),
        "verdict": verdict,
        "decision": None if word is None else word.model_dump(),
        "leader": verdict["promoted"] or leader,
        "gate": gate.model_dump(),
        "candidates": rows,
    }


def judge(gate: config.Gate, rows: list[dict[str, Any]], start: str) -> dict[str, Any]:
    """The gate's own verdict: status, promoted, reason."""
    passing = [row for row in rows if row["passes"]]
    if passing:
        best, how = rank(gate, passing)
        reason = how + ("" if len(best) == 1 else f"; {best[0]['candidate']} is declared first")
        return {"status": "promoted", "promoted": best[0]["candidate"], "reason": reason}
    failures = "; ".join(f"{r['candidate']}: {', '.join(r['failed_rules'])}" for r in rows)
    status, then = {
        "keep": ("kept", ""),
        "stop": ("stopped", ", and no further round starts"),
        "ask": ("awaiting", " until a person decides"),
    }[gate.on_fail]
    reason = f"no candidate passes every rule, the policy of {start} stays{then} ({failures})"
    return {"status": status, "promoted": None, "reason": reason}


def rank(gate: config.Gate, rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Those ranked first, more than one where nothing tells them apart, and how in words.

    By `gate.metric` on choose prompts; among those within `gate.margin` of the best by each tie-break on
    report prompts in turn, where a value that is not known comes last.
    """
    top = max(row["rank_score"] for row in rows)
    left = [row for row in rows if _within(top - row["rank_score"], gate.margin)]
    if len(rows) == 1:
        return left, f"{rows[0]['candidate']} is the only candidate that passes every rule"
    if len(left) == 1:
        return left, (
            f"{left[0]['candidate']} has the highest {gate.metric} on choose prompts "
            f"({top:.3f}) of {len(rows)} candidates that pass every rule"
        )
    scores = ", ".join(f"{row['candidate']} {row['rank_score']:.3f}" for row in left)
    within = f"within {gate.margin:g} of the best" if gate.margin else "equal"
    words = [f"{within} by {gate.metric} on choose prompts: {scores}"]
    for tie in gate.tie_break:
        values = [_known(row[tie.metric]) for row in left]
        known = [value for value in values if value is not None]
        if not known or len(left) == 1:
            continue
        best = min(known) if tie.prefer == "lower" else max(known)
        kept = [row for row, value in zip(left, values, strict=True) if value == best]
        if len(kept) < len(left):
            names = " and ".join(row["candidate"] for row in kept)
            words.append(f"{names} by the {tie.prefer} {tie.metric} ({best:.6g})")
        left = kept
    if len(left) > 1:
        tried = f" in {', '.join(tie.metric for tie in gate.tie_break)}" if gate.tie_break else ""
        words.append(" and ".join(row["candidate"] for row in left) + f" stay equal{tried}")
    return left, "; ".join(words)


def failed_rules(gate: config.Gate, row: dict[str, Any]) -> list[str]:
    """The rules a candidate's report row breaks, in words. A value that is missing breaks its rule."""
    failed = []
    for rule in gate.rules:
        value = _known(row.get(rule.metric))
        if value is None:
            failed.append(f"{rule.metric} is not known")
        elif rule.at_least is not None and value < rule.at_least:
            failed.append(f"{rule.metric} {value:.6g} < {rule.at_least:g}")
        elif rule.at_most is not None and value > rule.at_most:
            failed.append(f"{rule.metric} {value:.6g} > {rule.at_most:g}")
    return failed


def _overruled(
    word: config.Decision, verdict: dict[str, Any], rows: list[dict[str, Any]], start: str
) -> dict[str, Any]:
    """What a person's word makes of the verdict: status, promoted, reason."""
    if word.choice == "promote":
        row = next((row for row in rows if row["candidate"] == word.candidate), None)
        if row is None:
            raise BadInput(
                f"{word.candidate} has no evaluation",
                where="pipeline.yaml decision",
                rule="a candidate is judged before it is promoted",
                mend=f"use one of {', '.join(row['candidate'] for row in rows)}",
            )
        status, what = "promoted", ""
        if row["failed_rules"]:
            what = f", overruling {', '.join(row['failed_rules'])}"
    else:
        status = "kept" if word.choice == "keep" else "stopped"
        what = f", the policy of {start} stays"
        what += ", and no further round starts" if word.choice == "stop" else ""
    if (status, word.candidate) != (verdict["status"], verdict["promoted"]):
        gate = {
            "promoted": f"would promote {verdict['promoted']}",
            "kept": "would keep the incoming policy",
            "stopped": "would stop",
            "awaiting": "asked",
        }[verdict["status"]]
        what += f" (the gate {gate})"
    return {
        "status": status,
        "promoted": word.candidate,
        "reason": f"decided by {word.by}{what}: {word.because}",
    }


def _within(distance: float, margin: float) -> bool:
    """Whether a distance is at most the margin, but for the rounding of a difference."""
    return distance <= margin or math.isclose(distance, margin, rel_tol=1e-9)


def _known(value: Any) -> float | None:
    """A finite number, or None."""
    if value is None or pd.isna(value) or not math.isfinite(value):
        return None
    return float(value)


# --- what it is made from ------------------------------------------------------------------------


def lineage(
    pipeline: config.Pipeline, name: str, row: dict[str, Any], weights: Path
) -> dict[str, Any]:
    """What a promoted policy was made from, all of which DVC tracks for this stage.

    Settings of the gate and of the evaluation are not part of it: they choose among policies and make
    none, and later rounds would rerun whenever they change. Hashes are sha256; those of policies are
    of every file but `lineage.json`, so that a policy has one hash wherever it lies.
    """
    round_settings = pipeline.rounds[name].model_dump(by_alias=True)
    del round_settings["gate"], round_settings["decision"]
    settings = common.RUNS / name / "policies" / row["candidate"] / "candidate.json"
    candidate = artifacts.read_json(settings)
    committee = common.need(common.RUNS / name / "reward_model")
    return {
        "round": name,
        "candidate": row["candidate"],
        "checkpoint": row["checkpoint"],
        "algorithm": row["algorithm"],
        "learns_from": candidate["learns_from"],
        "weights": policy_digest(weights),
        "parent": _parent(pipeline.rounds[name]),
        "reward_model": {
            path.name: content_digest(path) for path in sorted(committee.iterdir()) if path.is_dir()
        },
        "data": {
            path.name: content_digest(path) for path in sorted(common.need(common.TABLES).iterdir())
        },
        "config": {
            "seed": pipeline.seed,
            "model": config.digest(pipeline.model),
            "round": config.digest(round_settings),
            "candidate": config.digest(candidate),
        },
    }


def _parent(declared: config.Round) -> dict[str, Any]:
    """The policy that the candidates of a round started as: whose it is, and its hash."""
    start = {"round": "r0", "candidate": None}
    if declared.init == "initial":
        return {**start, "weights": common.initial_weights()}
    policy = common.need(common.RUNS / declared.from_ / "promoted")
    if (policy / LINEAGE).exists():
        written = artifacts.read_json(policy / LINEAGE)
        start = {key: written[key] for key in start}
    return {**start, "weights": policy_digest(policy)}


# --- the report ----------------------------------------------------------------------------------


def write_report(pipeline: config.Pipeline, name: str, decision: dict[str, Any]) -> Path:
    """Write runs/<round>/report; returns its page."""
    declared = pipeline.rounds[name]
    found = findings.find(
        common.RUNS / name,
        name,
        {key: candidate.algorithm for key, candidate in pipeline.candidates_of(name).items()},
        starts_as=findings.INITIAL if declared.init == "initial" else findings.INCOMING,
        num_bootstrap=NUM_BOOTSTRAP,
        seed=pipeline.seed_for("report", name),
    )
    prompts = contracts.read(common.TABLES / "prompts.parquet", contracts.PROMPTS)
    text = page.render(
        found,
        decision,
        project=pipeline.project,
        start=declared.from_,
        prompts=dict(zip(prompts["prompt_id"], prompts["prompt"], strict=True)),
        warnings={row["candidate"]: row["warnings"] for row in decision["candidates"]},
        seed=pipeline.seed,
        packages={package: version(package) for package in ("torch", "transformers")},
    )
    out = common.RUNS / name / "report"
    with artifacts.write_directory(out) as directory:
        artifacts.write_text(directory / PAGE, text)
    return out / PAGE


# --- reading -------------------------------------------------------------------------------------


def _inputs(pipeline: config.Pipeline, name: str) -> str:
    """Digest of what the decision and its report depend on.

    Of the candidates' policies only what they say of themselves is read: the evaluations were made of their weights.
    """
    declared, home = pipeline.rounds[name], common.RUNS / name
    paths = [common.TABLES, common.RUNS / declared.from_ / "promoted", common.INITIAL_METRICS]
    paths += [home / "reward_model", home / "best_of_n"]
    for key in pipeline.candidates_of(name):
        paths += [_evaluations(name, key), *sorted((home / "policies" / key).glob("*.json"))]
    return fingerprint(paths, {"seed": pipeline.seed, "round": declared.model_dump(mode="json")})


def _need_evaluations(pipeline: config.Pipeline, name: str) -> None:
    """Every candidate's evaluation must be there; all that are missing are named at once."""
    tables = {
        key: _evaluations(name, key) / "evaluations.parquet" for key in pipeline.candidates_of(name)
    }
    missing = [key for key, path in tables.items() if not path.exists()]
    if len(missing) == len(tables):
        raise BadInput(
            f"no candidate of {name} has an evaluation: {', '.join(missing)}",
            where=str(common.RUNS / name / "evaluations"),
            rule="the gate compares what evaluate measured",
            mend=f"dvc repro promote@{name}",
        )
    for key in missing:
        common.need(tables[key])


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
    numbers = {name: _known(report.get(name)) for name in config.METRICS}
    gate = pipeline.rounds[round_name].gate
    score = _known(choose.get(gate.metric))
    failed = failed_rules(gate, numbers)
    if score is None:
        failed.append(f"{gate.metric} on choose prompts is not known")
    return {
        "candidate": key,
        "algorithm": candidate.algorithm,
        "checkpoint": str(report["checkpoint"]),
        **numbers,
        "rank_score": score,
        "judge": str(report["judge"]),
        "warnings": _warnings(common.RUNS / round_name / "policies" / key / "alarms.json"),
        "passes": not failed,
        "failed_rules": failed,
    }


def _warnings(path: Path) -> list[str]:
    """What training warned of, in words; `alarms` is their number."""
    if not path.is_file():
        return []
    return [str(alarm["message"]) for alarm in artifacts.read_json(path)]


def _incoming(round_name: str, start: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The incoming policy's own numbers on report prompts, as every candidate's evaluation holds them."""
    path = _evaluations(round_name, rows[0]["candidate"]) / "evaluations.parquet"
    table = contracts.read(path, contracts.EVALUATIONS)
    row = _only(table[table["checkpoint"] == "incoming"], path, "incoming", "report")
    numbers = {name: _known(row.get(name)) for name in config.METRICS}
    promoted = common.RUNS / start / "promoted" / LINEAGE
    policy = artifacts.read_json(promoted)["candidate"] if promoted.exists() else "r0"
    return {"candidate": f"incoming ({start})", "from": start, "policy": policy, **numbers}


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
        f"**{f'promoted {winner}' if winner else decision['status']}**: {decision['reason']}",
        "",
    ]
    if decision["decision"] is not None:
        lines += [f"The gate's own verdict: {decision['verdict']['reason']}", ""]
    lines += [
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
