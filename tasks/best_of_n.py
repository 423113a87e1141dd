"""Best-of-n from the policy that a round's candidates start as: what choosing by the proxy gains, without training."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import pandas as pd

from rlhf import artifacts, config, contracts, resume, tracking
from rlhf.champion import policy_digest
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.evaluation import statistics
from rlhf.evaluation.measure import Judges, measure
from rlhf.models.policy import device_of, load_policy
from rlhf.progress import Clock, Progress
from rlhf.rewards.committee import Committee
from rlhf.rewards.gold import load_gold
from tasks import common
from tasks.evaluate import START, Work, initial_policy


def run(pipeline: config.Pipeline, name: str) -> None:
    """Samples the round's start on report prompts; writes runs/<round>/best_of_n and its metrics."""
    clock = Clock(f"best_of_n@{name}")
    declared, settings = common.of_round(pipeline, name), pipeline.evaluation
    common.prepare_torch(pipeline.resources.threads.evaluate)
    start = common.need(common.RUNS / declared.from_ / "promoted")
    if declared.init == "initial":
        initial = initial_policy(declared.from_)
        start = initial if policy_digest(initial) != policy_digest(start) else start
    rewards = common.need(common.RUNS / name / "reward_model")
    device = device_of(pipeline.model)
    codec = TextCodec(load_tokenizer(pipeline.model, start), pipeline.model)
    book = PromptBook(common.need(common.TABLES / "prompts.parquet"), codec)
    judges = Judges(
        Committee.load(rewards, codec, pipeline.model, device),
        load_gold(pipeline.gold) if pipeline.gold is not None else None,
    )
    policy = load_policy(start, device).eval()
    with (
        _scratch(pipeline, name) as scratch,
        tracking.stage_run(
            pipeline,
            stage="best_of_n",
            key=f"best_of_n@{name}",
            round=name,
            kind="best_of_n",
            name=f"{name}/best_of_n",
            algorithm="best_of_n",
            params={"evaluation": settings.model_dump(), "seed": pipeline.seed},
            inputs=scratch.key,
        ) as tracked,
    ):
        work = Work(scratch, tracked, clock)
        with Progress(f"best_of_n@{name}", 1, "policies") as progress:
            answers = measure(
                policy,
                policy,
                book.of("report"),
                settings.best_of_n_samples,
                book=book,
                judges=judges,
                model=pipeline.model,
                evaluation=settings,
                seed=pipeline.seed_for("best_of_n", name),
                clock=clock,
                state=work.current,
                on_step=work.step,
            )
            progress.update(1, tokens=int(answers["num_tokens"].sum()))
        table = best_of(answers, has_gold=judges.gold is not None)
        out = common.RUNS / name / "best_of_n"
        with artifacts.write_directory(out) as directory:
            kept = answers.assign(checkpoint=START, split="report")
            contracts.write(kept, directory / "answers.parquet", contracts.ANSWERS)
            contracts.write(table, directory / "best_of_n.parquet", contracts.BEST_OF_N)
        result = {key: _known(value) for key, value in table.iloc[-1].items()}
        artifacts.write_json(common.RUNS / name / "metrics" / "best_of_n.json", result)
        tracked.summary(
            {f"best_of_n/{key}": float(v) for key, v in result.items() if v is not None}
        )
        tracked.table("best_of_n", table.to_dict("records"))
        scratch.finish()
    clock.write()


def best_of(answers: pd.DataFrame, *, has_gold: bool) -> pd.DataFrame:
    """`contracts.BEST_OF_N` for n = 1, 2, 4, ... up to the number of answers to a prompt."""
    proxy, gold, logprob = (statistics.by_prompt(answers, c) for c in ("proxy", "gold", "logprob"))
    ns = powers(proxy.shape[1])
    table = statistics.best_of_n(proxy, gold if has_gold else proxy, ns)
    table = table.rename(columns={"target": "gold"})
    if not has_gold:
        table["gold"] = float("nan")
    table["kl_nats"] = statistics.best_of_n_kl(proxy, logprob, ns).clip(min=0)
    return table


def powers(count: int) -> list[int]:
    """1, 2, 4, ... and the count itself."""
    return [*(2**i for i in range(count.bit_length()) if 2**i < count), count]


def _scratch(
    pipeline: config.Pipeline, name: str
) -> contextlib.AbstractContextManager[resume.Scratch]:
    declared = pipeline.rounds[name]
    return resume.open_scratch(
        pipeline,
        f"best_of_n@{name}",
        inputs=[
            pipeline.data.source,
            common.TABLES,
            common.RUNS / declared.from_ / "promoted",
            common.RUNS / "r0" / "metrics" / "sft.json",
            common.RUNS / name / "reward_model",
        ],
        params=common.settings(
            pipeline,
            "seed",
            "model",
            "gold",
            "evaluation",
            "resources.threads.evaluate",
            f"rounds.{name}.init",
        ),
    )


def _known(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--round", required=True, help="like r1")
    arguments = parser.parse_args()
    common.main(f"best_of_n@{arguments.round}", lambda p: run(p, arguments.round), sees_gold=True)
