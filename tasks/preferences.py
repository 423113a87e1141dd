"""Sampling answers and having them compared: the pairs that a round learns from."""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from rlhf import artifacts, config, contracts, labelers, tracking
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import BadInput
from rlhf.models.policy import device_of, load_policy
from rlhf.progress import Clock, Progress
from rlhf.rewards.gold import Gold, load_gold
from rlhf.rollout import sample
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
    # Before sampling, which may take hours: their programs can be wrong.
    gold = load_gold(pipeline.gold) if pipeline.gold is not None else None
    labeler = labelers.build(
        settings.labeler, pipeline.gold, pipeline.seed_for(name, "preferences", "labels")
    )

    with tracking.stage_run(
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
    ) as tracked:
        samples = _sample(pipeline, name, book, policy, codec, gold, clock)
        with clock("scoring"):
            pairs = _label(pipeline, name, samples, labeler)
        pairs = pd.concat([_carried(declared), pairs], ignore_index=True)
        _check(pairs, name)
        # Gold is for judging the reward model on held-out answers; training rows do not carry it.
        samples.loc[~samples["heldout"], "gold"] = None
        pairs.loc[~pairs["heldout"], "gold_margin"] = None
        result = _summary(samples, pairs, name)
        out = common.RUNS / name / "preferences"
        with artifacts.write_directory(out) as directory:
            contracts.write(samples, directory / "samples.parquet", contracts.SAMPLES)
            contracts.write(pairs, directory / "pairs.parquet", contracts.PAIRS)
        artifacts.write_json(common.RUNS / name / "metrics" / "preferences.json", result)
        tracked.summary({f"preferences/{key}": float(value) for key, value in result.items()})
        tracked.dataset(out / "pairs.parquet", f"{name}/pairs", "labelled")
        tracked.table("pairs", pairs[pairs["round"] == name].head(50).to_dict("records"))
    clock.write()


def _sample(
    pipeline: config.Pipeline,
    name: str,
    book: PromptBook,
    policy: PreTrainedModel,
    codec: TextCodec,
    gold: Gold | None,
    clock: Clock,
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
    with Progress(f"preferences@{name}", len(prompts), "answers") as progress:
        total = 0

        def on_batch(done: int, tokens: int) -> None:
            nonlocal total
            total += tokens
            progress.update(done, tokens=tokens, length=total / done)

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
            table["prompt"].tolist(), table["response"].tolist(), table["ended"].tolist()
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
    pipeline: config.Pipeline, name: str, samples: pd.DataFrame, labeler: labelers.Labeler
) -> pd.DataFrame:
    """The declared pairs of each group, as the declared labeler judges them."""
    settings = pipeline.rounds[name].preferences
    first, second = [], []
    for _, indices in samples.groupby("group_id", sort=False).indices.items():
        for i, j in labelers.choose_pairs(settings.pairs, samples.iloc[indices]):
            first.append(indices[i])
            second.append(indices[j])
    a, b = samples.iloc[first].reset_index(drop=True), samples.iloc[second].reset_index(drop=True)
    labels = pd.Series(labeler.label(a["prompt"].tolist(), _answers(a), _answers(b)))
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


def _carried(declared: config.Round) -> pd.DataFrame:
    """The pairs of earlier rounds that this round also learns from."""
    path = common.RUNS / declared.from_ / "preferences" / "pairs.parquet"
    earlier = contracts.read(common.need(path), contracts.PAIRS)
    return earlier if declared.preferences.carry_over == "all" else earlier.iloc[:0]


def _check(pairs: pd.DataFrame, name: str) -> None:
    """A round without a training or a held-out pair cannot go on."""
    for heldout, word in ((False, "training"), (True, "held-out")):
        own = pairs[(pairs["round"] == name) & (pairs["heldout"] == heldout) & ~pairs["tie"]]
        if own.empty:
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
