"""Judging one candidate along its path: proxy, gold, KL, length, entropy, and win rate against the start."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf import artifacts, config, contracts, tracking
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import BadInput
from rlhf.evaluation import plots
from rlhf.evaluation.measure import Judges, measure, summarise
from rlhf.models.policy import device_of, load_policy
from rlhf.progress import Clock, Progress
from rlhf.rewards.committee import Committee
from rlhf.rewards.gold import load_gold
from tasks import common

INCOMING = "incoming"


def run(pipeline: config.Pipeline, name: str) -> None:
    """Reads the candidate's checkpoints; writes runs/<round>/evaluations/<candidate> and its metrics."""
    clock = Clock(f"evaluate@{name}")
    candidate, settings = common.of_candidate(pipeline, name), pipeline.evaluation
    common.prepare_torch(pipeline.resources.threads.evaluate)
    incoming = common.need(common.RUNS / candidate.from_ / "promoted")
    policies = common.need(common.RUNS / candidate.round / "policies" / name)
    rewards = common.need(common.RUNS / candidate.round / "reward_model")
    device = device_of(pipeline.model)
    codec = TextCodec(load_tokenizer(pipeline.model, incoming), pipeline.model)
    book = PromptBook(common.need(common.TABLES / "prompts.parquet"), codec)
    judges = Judges(
        Committee.load(rewards, codec, pipeline.model, device),
        load_gold(pipeline.gold) if pipeline.gold is not None else None,
    )
    reference = load_policy(incoming, device).eval()
    path = [
        {"checkpoint": INCOMING, "step": 0, "updates": 0},
        *_checkpoints(policies / "checkpoints.json"),
    ]
    with tracking.stage_run(
        pipeline,
        stage="evaluate",
        key=f"evaluate@{name}",
        round=candidate.round,
        kind="evaluation",
        name=f"{candidate.round}/{name.split('-', 1)[1]}",
        algorithm=candidate.algorithm,
        params={"evaluation": settings.model_dump(), "candidate": name, "seed": pipeline.seed},
    ) as tracked:
        tracked.dataset(common.TABLES / "prompts.parquet", "prompts", "evaluation")
        rows: list[dict[str, Any]] = []
        answers: dict[tuple[str, str], pd.DataFrame] = {}
        with Progress(f"evaluate@{name}", len(path), "checkpoints") as progress:
            for number, point in enumerate(path):
                at_start = point["checkpoint"] == INCOMING
                policy = (
                    reference if at_start else load_policy(policies / point["checkpoint"], device)
                )
                for split in ("choose", "report"):
                    found = measure(
                        policy.eval(),
                        reference,
                        book.of(split),
                        _samples(settings, split, ends=at_start or number == len(path) - 1),
                        book=book,
                        judges=judges,
                        model=pipeline.model,
                        evaluation=settings,
                        seed=pipeline.seed_for("evaluate", candidate.round, split),
                        clock=clock,
                    )
                    answers[point["checkpoint"], split] = found
                    row = summarise(
                        found,
                        answers[INCOMING, split],
                        judge=judges.name,
                        num_bootstrap=settings.num_bootstrap,
                        seed=pipeline.seed_for("evaluate", "bootstrap"),
                    )
                    rows.append(
                        {
                            "checkpoint": point["checkpoint"],
                            "step": point["step"],
                            "split": split,
                            **row,
                        }
                    )
                tracked.metrics(_curve(rows[-1]), point["updates"])
                tokens = sum(
                    int(answers[point["checkpoint"], s]["num_tokens"].sum())
                    for s in ("choose", "report")
                )
                judged = rows[-1]["gold_mean"] if judges.gold is not None else rows[-1]["win_rate"]
                progress.update(
                    number + 1, tokens=tokens, proxy=rows[-1]["proxy_mean"], gold=judged
                )
        table = pd.DataFrame(rows)
        chosen = select(table, settings.select)
        table["selected"] = table["checkpoint"] == chosen
        shown = _shown(
            answers[INCOMING, "report"], answers[chosen, "report"], book, settings.num_shown
        )
        out = common.RUNS / candidate.round / "evaluations" / name
        with artifacts.write_directory(out) as directory:
            contracts.write(table, directory / "evaluations.parquet", contracts.EVALUATIONS)
            contracts.write(shown, directory / "shown.parquet", contracts.SHOWN)
            plots.over_optimisation(table, name, directory / "over_optimisation.png")
            tracked.figure(directory / "over_optimisation.png")
        final = table[table["selected"] & (table["split"] == "report")].iloc[0]
        result = {key: final[key] for key in config.METRICS}
        artifacts.write_json(
            common.RUNS / candidate.round / "metrics" / f"{name}-evaluation.json",
            {"checkpoint": chosen, **result},
        )
        tracked.tags({"rlhf.checkpoint": chosen})
        tracked.summary({f"result/{key}": float(v) for key, v in result.items() if pd.notna(v)})
        tracked.table("evaluations", table.to_dict("records"))
        tracked.table("samples", shown.to_dict("records"))
    clock.write()


def _checkpoints(path: Path) -> list[dict[str, Any]]:
    """The candidate's path as its stage listed it, every directory there; else BadInput."""
    found = artifacts.read_json(path)
    kinds = {"checkpoint": str, "step": int, "updates": int}
    if (
        not isinstance(found, list)
        or not found
        or not all(
            isinstance(point, dict) and all(isinstance(point.get(k), t) for k, t in kinds.items())
            for point in found
        )
    ):
        raise BadInput(
            "not a list of checkpoints",
            where=str(path),
            rule=f"a list, not empty, of {{{', '.join(kinds)}}}",
            mend=f"make it again: {artifacts.remake(path)}",
        )
    for point in found:
        common.need(path.parent / point["checkpoint"])
    return found


def select(table: pd.DataFrame, rule: str) -> str:
    """The checkpoint that stands for the candidate, chosen on choose prompts only; never the incoming policy."""
    rows = table[(table["split"] == "choose") & (table["checkpoint"] != INCOMING)]
    column = {"last": "step", "best_proxy": "proxy_mean", "best_gold": "gold_mean"}[rule]
    return str(rows.loc[rows[column].idxmax(), "checkpoint"])


def _samples(settings: config.Evaluation, split: str, *, ends: bool) -> int:
    """Answers per prompt: more at both ends of the path on report prompts, where intervals matter."""
    if split == "choose":
        return settings.choose_samples_per_prompt
    return settings.final_samples_per_prompt if ends else settings.report_samples_per_prompt


CURVES = {
    "eval/gold": "gold_mean",
    "eval/proxy": "proxy_mean",
    "eval/kl_nats": "kl_nats",
    "eval/win_rate": "win_rate",
    "eval_text/length_tokens": "length_mean",
    "eval_text/entropy_nats": "entropy_nats",
    "eval_text/ended_fraction": "ended_fraction",
}
"""Names on the charts and columns of the table: the same for every algorithm, so that candidates overlay."""


def _curve(row: dict[str, Any]) -> dict[str, float]:
    """One point of every curve; the parts of gold are a section of their own."""
    parts = {key: key for key in row if key.startswith("gold/")}
    named = {**CURVES, **parts}
    return {name: float(row[key]) for name, key in named.items() if row[key] is not None}


def _shown(before: pd.DataFrame, after: pd.DataFrame, book: PromptBook, count: int) -> pd.DataFrame:
    """The first answer to prompts spread over the set, before and after."""
    first = before.groupby("prompt_id", sort=False).first()
    count = min(count, len(first))
    first = first.iloc[[i * len(first) // count for i in range(count)]]
    last = after.groupby("prompt_id", sort=False).first().loc[first.index]
    return pd.DataFrame(
        {
            "prompt_id": first.index,
            "prompt": [book.text(key) for key in first.index],
            "before": first["response"].to_numpy(),
            "after": last["response"].to_numpy(),
            "gold_before": first["gold"].to_numpy(),
            "gold_after": last["gold"].to_numpy(),
            "proxy_before": first["proxy"].to_numpy(),
            "proxy_after": last["proxy"].to_numpy(),
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidate", required=True, help="like r1-ppo")
    arguments = parser.parse_args()
    common.main(
        f"evaluate@{arguments.candidate}", lambda p: run(p, arguments.candidate), sees_gold=True
    )
