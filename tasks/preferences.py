"""Sampling answers and having them compared: the pairs that a round learns from."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from rlhf import artifacts, config, contracts, labelers, resume, tracking
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import BadInput
from rlhf.models.policy import device_of, load_policy
from rlhf.progress import Clock, Progress
from rlhf.rewards.gold import Gold, load_gold
from rlhf.rollout import Sampling, sample
from tasks import common


def run(pipeline: config.Pipeline, name: str) -> None:
    """Reads the prompts, the sampling policy and the previous pairs; writes runs/<round>/preferences."""
    clock = Clock(f"preferences@{name}")
    declared = common.of_round(pipeline, name)
    settings, device = declared.preferences, device_of(pipeline.model)
    common.prepare_torch(pipeline.resources.threads.preferences)
    source = common.need(common.RUNS / declared.sample_from / "promoted")
    codec = TextCodec(load_tokenizer(pipeline.model, source), pipeline.model)
    book = PromptBook(common.need(common.TABLES / "prompts.parquet"), codec)
    policy = load_policy(source, device)
    # Before sampling, which may take hours: programs and tables can be wrong.
    gold = load_gold(pipeline.gold) if pipeline.gold is not None else None
    labeler = labelers.build(
        settings.labeler, pipeline.gold, pipeline.seed_for(name, "preferences", "labels")
    )
    carried, unused = _earlier(pipeline, name, book)

    with (
        _scratch(pipeline, name) as scratch,
        tracking.stage_run(
            pipeline,
            stage="preferences",
            key=f"preferences@{name}",
            round=name,
            kind="preferences",
            name=f"{name}/preferences",
            algorithm=None,
            params={
                "preferences": settings.model_dump(),
                "sample_from": declared.sample_from,
                "seed": pipeline.seed,
            },
            inputs=scratch.key,
        ) as tracked,
    ):
        work = Work(scratch, tracked, clock)
        samples = _sample(pipeline, name, book, policy, codec, gold, clock, work)
        with clock("scoring"):
            own = _label(pipeline, name, samples, labeler, work)
        _check(own, name, work)
        pairs = pd.concat([carried, own], ignore_index=True)
        # Gold is for judging the reward model on held-out answers; training rows do not carry it.
        samples.loc[~samples["heldout"], "gold"] = None
        pairs.loc[~pairs["heldout"], "gold_margin"] = None
        result = _summary(samples, pairs, name) | {"unused_pairs": len(unused)}
        out = common.RUNS / name / "preferences"
        with artifacts.write_directory(out) as directory:
            contracts.write(samples, directory / "samples.parquet", contracts.SAMPLES)
            contracts.write(pairs, directory / "pairs.parquet", contracts.PAIRS)
            contracts.write(unused, directory / common.EARLIER, contracts.PAIRS)
        artifacts.write_json(common.RUNS / name / "metrics" / "preferences.json", result)
        tracked.summary({f"preferences/{key}": float(value) for key, value in result.items()})
        tracked.dataset(out / "pairs.parquet", f"{name}/pairs", "labelled")
        tracked.table("pairs", pairs[pairs["round"] == name].head(50).to_dict("records"))
        scratch.finish()
    clock.write()


def _scratch(
    pipeline: config.Pipeline, name: str
) -> contextlib.AbstractContextManager[resume.Scratch]:
    declared = pipeline.rounds[name]
    return resume.open_scratch(
        pipeline,
        f"preferences@{name}",
        inputs=[
            pipeline.data.source,
            common.TABLES,
            common.RUNS / declared.from_ / "preferences",
            common.RUNS / declared.sample_from / "promoted",
        ],
        params=common.settings(
            pipeline,
            "seed",
            "model",
            "gold",
            "resources.threads.preferences",
            f"rounds.{name}.preferences",
        ),
    )


class Work:
    """How far the stage is: answers sampled, their gold, their labels; saved as it grows, read back at the start.

    Answers are saved before anybody is asked about them, and what was said about them once it is known: a
    person or a judge is never asked the same thing again.
    """

    def __init__(self, scratch: resume.Scratch, tracked: tracking.Run, clock: Clock) -> None:
        self._scratch, self._tracked, self._clock = scratch, tracked, clock
        self.sampling = Sampling()
        self.gold: pd.DataFrame | None = None
        self.labels: list[labelers.Label] = []
        scratch.restore(self._apply)
        self._count = scratch.resumed_at or 0

    def sampled(self, *, all_done: bool) -> None:
        """A batch of answers is there."""
        self._count += 1
        if all_done:
            self._scratch.save(self._count, self._collect())
        self._scratch.step(self._count, self._collect)

    def scored(self, table: pd.DataFrame) -> None:
        """Gold has answered, for these first answers."""
        self.gold = table
        self._told()

    def labelled(self, labels: list[labelers.Label]) -> None:
        """The labeler has answered, for these first comparisons."""
        self.labels = labels
        self._told()

    def ask_again(self) -> None:
        """The labels will not do: another attempt asks for new ones."""
        self.labels = []
        self._count += 1
        self._scratch.save(self._count, self._collect())

    def _told(self) -> None:
        self._count += 1
        self._scratch.save(self._count, self._collect())
        self._scratch.step(self._count, self._collect)

    def _collect(self) -> dict[str, Any]:
        return {
            "sampling": self.sampling.state_dict(),
            "gold": None if self.gold is None else self.gold.to_dict("list"),
            "labels": list(self.labels),
            "clock": self._clock.state_dict(),
            "tracked": self._tracked.position(),
        }

    def _apply(self, state: dict[str, Any]) -> None:
        self.sampling.load_state_dict(state["sampling"])
        gold = state["gold"]
        self.gold = None if gold is None else pd.DataFrame(gold, dtype="float64")
        self.labels = state["labels"]
        self._clock.load_state_dict(state["clock"])
        self._tracked.resume(state["tracked"])


def _sample(
    pipeline: config.Pipeline,
    name: str,
    book: PromptBook,
    policy: PreTrainedModel,
    codec: TextCodec,
    gold: Gold | None,
    clock: Clock,
    work: Work,
) -> pd.DataFrame:
    """Answers to every group's prompt, `samples_per_prompt` each; training groups first."""
    settings = pipeline.rounds[name].preferences
    groups: list[tuple[str, str, bool]] = []
    for split, count in (
        ("preferences", settings.num_groups),
        ("report", settings.num_heldout_groups),
    ):
        keys = _spread(book.of(split), count, pipeline.seed_for(name, "preferences", split))
        for number, key in enumerate(keys):
            groups.append((f"{name}-{split}-{number:06d}", key, split == "report"))
    per = settings.samples_per_prompt
    prompts = [book.tokens(key) for _, key, _ in groups for _ in range(per)]
    before = work.sampling.completions
    with Progress(f"preferences@{name}", len(prompts), "answers", done=len(before)) as progress:
        total = sum(len(completion.ids) for completion in before)

        def on_batch(done: int, tokens: int) -> None:
            nonlocal total
            total += tokens
            progress.update(done, tokens=tokens, length=total / done)
            work.sampled(all_done=done == len(prompts))

        with clock("sampling"):
            completions = sample(
                policy,
                prompts,
                max_new_tokens=pipeline.model.max_response_tokens,
                dtype=pipeline.model.dtype,
                temperature=settings.temperature,
                eos_id=codec.eos_id,
                pad_id=codec.pad_id,
                seed=pipeline.seed_for(name, "preferences", "sampling"),
                batch_size=settings.sampling_batch_size,
                on_batch=on_batch,
                state=work.sampling,
            )
    rows = []
    for index, completion in enumerate(completions):
        group, key, heldout = groups[index // per]
        rows.append(
            {
                "sample_id": f"{group}-{index % per}",
                "group_id": group,
                "prompt_id": key,
                "prompt": book.text(key),
                "response": codec.decode(completion.ids),
                "ended": completion.ended,
                "num_tokens": len(completion.ids),
                "round": name,
                "heldout": heldout,
                "gold": None,
            }
        )
    table = pd.DataFrame(rows)
    if gold is not None:
        scores = gold.score(
            table["prompt"].tolist(),
            table["response"].tolist(),
            table["ended"].tolist(),
            given=work.gold,
            on_call=work.scored,
        )
        table["gold"] = scores["total"].to_numpy()
    return table


def _spread(keys: list[str], count: int, seed: int) -> list[str]:
    """`count` prompts: all in random order, again and again, so that each appears equally often."""
    generator = torch.Generator().manual_seed(seed)
    chosen: list[int] = []
    while len(chosen) < count:
        chosen += torch.randperm(len(keys), generator=generator).tolist()
    return [keys[i] for i in chosen[:count]]


def _label(
    pipeline: config.Pipeline,
    name: str,
    samples: pd.DataFrame,
    labeler: labelers.Labeler,
    work: Work,
) -> pd.DataFrame:
    """The declared pairs of each group, as the declared labeler judges them."""
    settings = pipeline.rounds[name].preferences
    first, second = [], []
    for _, indices in samples.groupby("group_id", sort=False).indices.items():
        for i, j in labelers.choose_pairs(settings.pairs, samples.iloc[indices]):
            first.append(indices[i])
            second.append(indices[j])
    a, b = samples.iloc[first].reset_index(drop=True), samples.iloc[second].reset_index(drop=True)
    labels = pd.Series(
        labelers.label_all(
            labeler,
            a["prompt"].tolist(),
            _answers(a),
            _answers(b),
            given=work.labels,
            on_call=work.labelled,
        )
    )
    labels[a["response"] == b["response"]] = "tie"
    swap = (labels == "second").to_numpy()
    chosen, rejected = _pick(b, a, swap), _pick(a, b, swap)
    pairs = pd.DataFrame(
        {
            "pair_id": [f"{x}:{y}" for x, y in zip(a["sample_id"], b["sample_id"], strict=True)],
            "group_id": a["group_id"],
            "prompt_id": a["prompt_id"],
            "prompt": a["prompt"],
            "chosen": chosen["response"],
            "rejected": rejected["response"],
            "chosen_ended": chosen["ended"].astype(bool),
            "rejected_ended": rejected["ended"].astype(bool),
            "tie": labels == "tie",
            "heldout": a["heldout"].astype(bool),
            "round": name,
            "labeler": labeler.name,
            "gold_margin": (chosen["gold"] - rejected["gold"]).astype("float64")
            if pipeline.gold is not None
            else float("nan"),
        }
    )
    return pairs if settings.ties == "keep" else pairs[~pairs["tie"]].reset_index(drop=True)


def _pick(yes: pd.DataFrame, no: pd.DataFrame, where: np.ndarray) -> pd.DataFrame:
    """Row by row, from `yes` where the mask is true and from `no` elsewhere."""
    names = ["response", "ended", "gold"]
    return pd.DataFrame({name: np.where(where, yes[name], no[name]) for name in names})


def _answers(side: pd.DataFrame) -> labelers.Answers:
    gold = None if side["gold"].isna().any() else side["gold"].tolist()
    return labelers.Answers(
        side["sample_id"].tolist(), side["response"].tolist(), side["ended"].tolist(), gold
    )


def _earlier(
    pipeline: config.Pipeline, name: str, book: PromptBook
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The pairs of earlier rounds that this round learns from, and those that it leaves to later ones."""
    declared = pipeline.rounds[name]
    folder = common.need(common.RUNS / declared.from_ / "preferences")
    table = contracts.read(common.need(folder / "pairs.parquet"), contracts.PAIRS)
    if (folder / common.EARLIER).exists():  # rounds made before there was a choice have none
        left = contracts.read(folder / common.EARLIER, contracts.PAIRS)
        table = contracts.check(pd.concat([table, left]), contracts.PAIRS, folder)
    _refuse_evaluation_prompts(table, book, folder)
    chain = _chain(pipeline, name)
    order = table["round"].map(lambda of: chain.index(of) if of in chain else -1)
    table = table.loc[order.sort_values(kind="stable").index].reset_index(drop=True)
    used = carry(
        table, declared.preferences.carry_over, pipeline.seed_for(name, "preferences", "carry_over")
    )
    return table[used].reset_index(drop=True), table[~used].reset_index(drop=True)


def _refuse_evaluation_prompts(table: pd.DataFrame, book: PromptBook, folder: Path) -> None:
    home = table["prompt_id"].map(book.split)
    wrong = table[~table["heldout"] & home.isin(["choose", "report"])]
    if len(wrong):
        raise BadInput(
            contracts.listing(
                [f"pair {pair}: prompt of {home[i]}" for i, pair in wrong["pair_id"].items()]
            ),
            where=f"{folder}, pairs to learn from",
            rule="no prompt of choose or report is learned from",
            mend=f"make it again: {artifacts.remake(folder / 'pairs.parquet')}",
        )


def _chain(pipeline: config.Pipeline, name: str) -> list[str]:
    """The rounds before this one, from r0 on."""
    found: list[str] = []
    while name in pipeline.rounds:
        name = pipeline.rounds[name].from_
        found.insert(0, name)
    return found


def carry(table: pd.DataFrame, rule: str | config.CarryOver, seed: int) -> pd.Series[bool]:
    """Which of the earlier rounds' pairs, in the rounds' order, a round learns from, as a mask.

    `sample` draws decided pairs to learn from, all if there are fewer, and keeps every held-out one.
    """
    if isinstance(rule, str):
        return pd.Series(rule == "all", index=table.index, dtype=bool)
    if rule.last is not None:
        return table["round"].isin(table["round"].unique()[-rule.last :])
    drawn = table["heldout"].copy()
    decided = table.index[~table["heldout"] & ~table["tie"]]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(decided), generator=generator)[: rule.sample]
    drawn[decided[chosen.numpy()]] = True
    return drawn


def _check(own: pd.DataFrame, name: str, work: Work) -> None:
    """A round without a training or a held-out pair cannot go on."""
    for heldout, word in ((False, "training"), (True, "held-out")):
        if own[(own["heldout"] == heldout) & ~own["tie"]].empty:
            work.ask_again()
            raise BadInput(
                f"no {word} pair with a decision is left",
                where=f"preferences@{name}",
                rule="answers must differ and the labeler must prefer one of them",
                mend="raise temperature or num_groups, or look at the labeler",
            )


def _summary(samples: pd.DataFrame, pairs: pd.DataFrame, name: str) -> dict[str, float]:
    own = pairs[pairs["round"] == name]
    train, heldout = own[~own["heldout"]], own[own["heldout"] & ~own["tie"]]
    result: dict[str, float] = {
        "train_pairs": len(train),
        "heldout_pairs": len(own) - len(train),
        "carried_pairs": len(pairs) - len(own),
        "ties": int(own["tie"].sum()),
        "distinct_answers_fraction": float(
            samples.drop_duplicates(["prompt_id", "response"]).shape[0] / len(samples)
        ),
        "length_mean_tokens": float(samples["num_tokens"].mean()),
        "ended_fraction": float(samples["ended"].mean()),
    }
    if heldout["gold_margin"].notna().any():
        # What a reward model that always picks the better answer could reach on these labels.
        result["label_agreement_with_gold"] = float((heldout["gold_margin"] > 0).mean())
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--round", required=True, help="like r1")
    arguments = parser.parse_args()
    common.main(f"preferences@{arguments.round}", lambda p: run(p, arguments.round), sees_gold=True)
