"""Judging one candidate along its path: proxy, gold, KL, length, entropy, and win rate against the start."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

from rlhf import artifacts, config, contracts, resume, tracking
from rlhf.champion import policy_digest
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import BadInput
from rlhf.evaluation import plots
from rlhf.evaluation.measure import Judges, Measurement, measure, summarise
from rlhf.models.policy import device_of, load_policy
from rlhf.progress import Clock, Progress
from rlhf.rewards.committee import Committee
from rlhf.rewards.gold import load_gold
from tasks import common

INCOMING = "incoming"
INITIAL = "initial"
"""r0's policy."""
START = "start"
"""The policy that the round's candidates start as."""


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
    checkpoints = _checkpoints(policies / "checkpoints.json")
    path = [{"checkpoint": INCOMING, "step": 0, "updates": 0}, *checkpoints]
    initial = initial_policy(candidate.from_)
    # A round may have kept the policy it started from.
    apart = initial != incoming and policy_digest(initial) != policy_digest(incoming)
    start = initial if apart and pipeline.rounds[candidate.round].init == "initial" else incoming
    places = {INCOMING: incoming, INITIAL: initial, START: start}
    policy_of = _policies(
        places | {c["checkpoint"]: policies / c["checkpoint"] for c in checkpoints}, device
    )
    ends = {INCOMING, INITIAL, path[-1]["checkpoint"]}
    alarms = _alarms(policies / "alarms.json")
    with (
        _scratch(pipeline, name) as scratch,
        tracking.stage_run(
            pipeline,
            stage="evaluate",
            key=f"evaluate@{name}",
            round=candidate.round,
            kind="evaluation",
            name=f"{candidate.round}/{name.split('-', 1)[1]}",
            algorithm=candidate.algorithm,
            params={
                "evaluation": settings.model_dump(),
                "candidate": name,
                "init": pipeline.rounds[candidate.round].init,
                "seed": pipeline.seed,
            },
            inputs=scratch.key,
        ) as tracked,
    ):
        work = Work(scratch, tracked, clock)
        if scratch.resumed_at is None:
            tracked.dataset(common.TABLES / "prompts.parquet", "prompts", "evaluation")

        def answers(checkpoint: str, split: str) -> pd.DataFrame:
            """Answers and scores, measured if they are not there yet."""
            if (checkpoint, split) not in work.measured:
                work.measured[checkpoint, split] = measure(
                    policy_of(checkpoint),
                    policy_of(START),
                    book.of(split),
                    _samples(settings, split, ends=checkpoint in ends),
                    book=book,
                    judges=judges,
                    model=pipeline.model,
                    evaluation=settings,
                    seed=pipeline.seed_for("evaluate", candidate.round, split),
                    clock=clock,
                    state=work.current,
                    on_step=work.step,
                )
                work.current = Measurement()
            return work.measured[checkpoint, split]

        rows: list[dict[str, Any]] = []
        with Progress(f"evaluate@{name}", len(path), "checkpoints", done=work.logged) as progress:
            for number, point in enumerate(path):
                for split in ("choose", "report"):
                    row = summarise(
                        answers(point["checkpoint"], split),
                        answers(INCOMING, split),
                        answers(INITIAL, split) if apart else None,
                        judge=judges.name,
                        num_bootstrap=settings.num_bootstrap,
                        seed=pipeline.seed_for("evaluate", "bootstrap"),
                    )
                    known = {key: point[key] for key in ("checkpoint", "step")}
                    warned = 0.0 if point["checkpoint"] == INCOMING else alarms
                    rows.append({**known, "split": split, **row, "alarms": warned})
                if number < work.logged:
                    continue
                tracked.metrics(_curve(rows[-1]), point["updates"])
                work.logged = number + 1
                tokens = sum(
                    int(work.measured[point["checkpoint"], s]["num_tokens"].sum())
                    for s in ("choose", "report")
                )
                judged = rows[-1]["gold_mean"] if judges.gold is not None else rows[-1]["win_rate"]
                progress.update(
                    number + 1, tokens=tokens, proxy=rows[-1]["proxy_mean"], gold=judged
                )
                work.step(False)
        table = pd.DataFrame(rows)
        chosen = select(table, settings.select)
        table["selected"] = table["checkpoint"] == chosen
        shown = _shown(
            answers(INCOMING, "report"), answers(chosen, "report"), book, settings.num_shown
        )
        out = common.RUNS / candidate.round / "evaluations" / name
        with artifacts.write_directory(out) as directory:
            contracts.write(table, directory / "evaluations.parquet", contracts.EVALUATIONS)
            contracts.write(shown, directory / "shown.parquet", contracts.SHOWN)
            contracts.write(_all(work.measured), directory / "answers.parquet", contracts.ANSWERS)
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
        scratch.finish()
    clock.write()


def _scratch(
    pipeline: config.Pipeline, name: str
) -> contextlib.AbstractContextManager[resume.Scratch]:
    candidate = pipeline.candidates[name]
    return resume.open_scratch(
        pipeline,
        f"evaluate@{name}",
        inputs=[
            pipeline.data.source,
            common.TABLES,
            common.RUNS / candidate.from_ / "promoted",
            common.RUNS / "r0" / "metrics" / "sft.json",
            common.RUNS / candidate.round / "reward_model",
            common.RUNS / candidate.round / "policies" / name,
        ],
        params=common.settings(
            pipeline,
            "seed",
            "model",
            "gold",
            "evaluation",
            "resources.threads.evaluate",
            f"rounds.{candidate.round}.init",
        ),
    )


class Work:
    """How far the stage is: what was measured, and the measurement under way; saved, and read back at the start."""

    def __init__(self, scratch: resume.Scratch, tracked: tracking.Run, clock: Clock) -> None:
        self._scratch, self._tracked, self._clock = scratch, tracked, clock
        self.measured: dict[tuple[str, str], pd.DataFrame] = {}
        self.current = Measurement()
        self.logged = 0
        """Points of the path whose curves were logged."""
        scratch.restore(self._apply)
        self._count = scratch.resumed_at or 0

    def step(self, precious: bool) -> None:
        """Something is done; what is precious is saved whether or not that is due."""
        self._count += 1
        if precious:
            self._scratch.save(self._count, self._collect())
        self._scratch.step(self._count, self._collect)

    def _collect(self) -> dict[str, Any]:
        return {
            "measured": [
                [checkpoint, split, {str(c): table[c].tolist() for c in table.columns}]
                for (checkpoint, split), table in self.measured.items()
            ],
            "current": self.current.state_dict(),
            "logged": self.logged,
            "clock": self._clock.state_dict(),
            "tracked": self._tracked.position(),
        }

    def _apply(self, state: dict[str, Any]) -> None:
        for checkpoint, split, columns in state["measured"]:
            self.measured[checkpoint, split] = pd.DataFrame(columns)
        self.current.load_state_dict(state["current"])
        self.logged = state["logged"]
        self._clock.load_state_dict(state["clock"])
        self._tracked.resume(state["tracked"])


def initial_policy(round_name: str) -> Path:
    """r0's policy, for a round that starts from `round_name`: the one that r0's metrics name, which DVC watches."""
    promoted = common.need(common.RUNS / "r0" / "promoted")
    if round_name == "r0":
        return promoted
    path = common.need(common.RUNS / "r0" / "metrics" / "sft.json")
    named = artifacts.read_json(path).get("weights_sha256")
    if named is not None and named != policy_digest(promoted):
        raise BadInput(
            "r0's policy is not the one that its metrics name",
            where=str(promoted),
            rule=f"weights_sha256 of {path}",
            mend="dvc checkout runs/r0/promoted, or make both again: dvc repro sft",
        )
    return promoted


def _policies(places: dict[str, Path], device: torch.device) -> Callable[[str], PreTrainedModel]:
    """Loads policies by name, and keeps the two it gave last."""

    @functools.lru_cache(maxsize=2)
    def load(place: Path) -> PreTrainedModel:
        return load_policy(place, device).eval()

    return lambda name: load(places[name])


def _alarms(path: Path) -> float | None:
    """How many things training warned of; None where it did not say."""
    if not path.is_file():
        return None
    found = artifacts.read_json(path)
    if not isinstance(found, list):
        raise BadInput(
            "not a list of alarms",
            where=str(path),
            rule="a list of {name, value, message}",
            mend=f"make it again: {artifacts.remake(path)}",
        )
    return float(len(found))


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
    "eval/win_rate_initial": "win_rate_initial",
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


def _all(measured: dict[tuple[str, str], pd.DataFrame]) -> pd.DataFrame:
    """Every answer, with whose it is and to which prompts."""
    tables = [
        table.assign(checkpoint=checkpoint, split=split)
        for (checkpoint, split), table in measured.items()
    ]
    return pd.concat(tables, ignore_index=True)


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
