"""A committee of Bradley-Terry reward models, fitted to the round's pairs and judged on held-out ones."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.optimize import brentq
from torch import Tensor

from rlhf import artifacts, config, contracts, tracking
from rlhf.algos import parts
from rlhf.algos.reward_model_losses import pairwise_accuracy
from rlhf.algos.types import LossOutput
from rlhf.data.batching import chunks, length_sorted_batches
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import BadInput
from rlhf.evaluation import plots, statistics
from rlhf.learner import Learner
from rlhf.models.policy import (
    device_of,
    enable_gradient_checkpointing,
    load_policy,
    precision,
)
from rlhf.models.scalar import ScalarModel
from rlhf.models.sequences import Sequences
from rlhf.optimise.imported import reward_model_part
from rlhf.progress import Clock, Progress
from rlhf.rewards.committee import SCALE_FILE, Committee
from rlhf.rollout import sample
from tasks import common

TIE_RATE_FACTOR = 10.0  # one number among millions; at the weights' rate it would trail behind them


@dataclass(frozen=True)
class Group:
    """The compared answers to one question: each is scored once, however often it is compared."""

    prompt_id: str
    answers: list[tuple[str, bool]]
    """Text and whether it ended."""
    pairs: list[tuple[int, int]]
    """(chosen, rejected), positions in `answers`."""
    tied: list[bool]
    """For each pair, whether it is a tie; none is where the loss knows no ties and each tie stands in both orders."""


def run(pipeline: config.Pipeline, name: str) -> None:
    """Reads the round's pairs and incoming policy; writes runs/<round>/reward_model and its metrics."""
    clock = Clock(f"reward_model@{name}")
    declared = common.of_round(pipeline, name)
    settings, device = declared.reward_model, device_of(pipeline.model)
    common.prepare_torch(pipeline.resources.threads.reward_model)
    incoming = common.need(common.RUNS / declared.from_ / "promoted")
    tokenizer = load_tokenizer(pipeline.model, incoming)
    codec = TextCodec(tokenizer, pipeline.model)
    book = PromptBook(common.need(common.TABLES / "prompts.parquet"), codec)
    path = common.need(common.RUNS / name / "preferences" / "pairs.parquet")
    pairs = contracts.read(path, contracts.PAIRS)
    _check(pairs, name, path)
    loss = reward_model_part(settings)
    groups = _groups(pairs[~pairs["heldout"]], with_ties="tied" in parts.inputs(loss))

    with tracking.stage_run(
        pipeline,
        stage="reward_model",
        key=f"reward_model@{name}",
        round=name,
        kind="reward_model",
        name=f"{name}/reward_model",
        algorithm=settings.loss.kind,
        params={"reward_model": settings.model_dump(), "seed": pipeline.seed},
    ) as tracked:
        tracked.dataset(path, f"{name}/pairs", "training")
        members = []
        ties: dict[str, float] = {}
        total = (
            settings.members * settings.epochs * math.ceil(len(groups) / settings.groups_per_batch)
        )
        with Progress(f"reward_model@{name}", total, "updates") as progress:
            for number in range(settings.members):
                model = ScalarModel.from_directory(incoming, device)
                if pipeline.model.gradient_checkpointing:
                    enable_gradient_checkpointing(model.backbone)
                if "log_tie" in parts.inputs(loss):
                    start = torch.tensor(_log_tie(loss, groups), device=device)
                    model.register_parameter("log_tie", torch.nn.Parameter(start))
                done = number * total // settings.members
                seed = pipeline.seed_for(name, "reward_model", str(number))
                for step, tokens, metrics in _train(
                    model, loss, groups, book, codec, pipeline, settings, seed, clock
                ):
                    tracked.metrics(
                        {f"reward_model/member_{number}_{k}": v for k, v in metrics.items()}, step
                    )
                    progress.update(
                        done + step,
                        tokens=tokens,
                        loss=metrics["loss"],
                        accuracy=metrics["accuracy"],
                    )
                if hasattr(model, "log_tie"):
                    ties[f"member_{number}_log_tie"] = model.get_parameter("log_tie").item()
                    del model.log_tie
                members.append(model.eval())
        with clock("sampling"):
            prompts, completions = _reference(pipeline, name, book, codec, device)
        unscaled = Committee(members, [(0.0, 1.0)] * len(members), codec, pipeline.model)
        with clock("scoring"):
            raw = unscaled.member_scores(
                prompts, [codec.decode(c.ids) for c in completions], [c.ended for c in completions]
            )
            scales = [(float(s.mean()), max(float(s.std()), 1e-6)) for s in raw]
            heldout = pairs[pairs["heldout"]].reset_index(drop=True)
            chosen, rejected = _score_pairs(unscaled, heldout, book)
        report, table = judge(heldout, chosen, rejected, scales, codec, name)
        report |= ties
        out = common.RUNS / name / "reward_model"
        with artifacts.write_directory(out) as directory:
            for number, model in enumerate(members):
                model.save(directory / f"member_{number}", tokenizer)
            artifacts.write_json(
                directory / SCALE_FILE,
                {
                    "members": [
                        {"name": f"member_{i}", "mean": mean, "std": std}
                        for i, (mean, std) in enumerate(scales)
                    ]
                },
            )
            artifacts.write_json(directory / "report.json", report)
            plots.reliability(table, report["calibration_error"], directory / "reliability.png")
            tracked.figure(directory / "reliability.png")
        artifacts.write_json(common.RUNS / name / "metrics" / "reward_model.json", report)
        tracked.summary({f"reward_model_result/{k}": v for k, v in report.items() if v is not None})
        tracked.table("reliability", table.to_dict("records"))
    clock.write()


def _check(pairs: pd.DataFrame, name: str, path: Path) -> None:
    """Without a decided pair there is nothing to learn, without a held-out one of this round nothing to judge."""
    decided = pairs[~pairs["tie"]]
    own = decided["heldout"] & (decided["round"] == name)
    for absent, word in (
        (decided["heldout"].all(), "training"),
        (not own.any(), f"held-out ({name})"),
    ):
        if absent:
            raise BadInput(
                f"no decided {word} pair",
                where=str(path),
                rule="a reward model learns from decided pairs and is judged on held-out ones",
                mend=f"label more pairs, or make it again: {artifacts.remake(path)}",
            )


def _groups(pairs: pd.DataFrame, *, with_ties: bool) -> list[Group]:
    """Pairs by group, answers that occur in several pairs once."""
    groups = []
    some_tie = bool(pairs["tie"].any()) and not with_ties
    for _, rows in pairs.groupby("group_id", sort=False):
        answers: dict[tuple[str, bool], int] = {}
        compared: list[tuple[int, int]] = []
        tied: list[bool] = []
        for row in rows.itertuples():
            i = answers.setdefault((row.chosen, row.chosen_ended), len(answers))
            j = answers.setdefault((row.rejected, row.rejected_ended), len(answers))
            if i == j:
                continue
            if with_ties:
                compared.append((i, j))
                tied.append(bool(row.tie))
                continue
            # A tie says both orders are equally likely; others count twice then, so all weigh the same.
            found = [(i, j), (j, i)] if row.tie else [(i, j)] * (2 if some_tie else 1)
            compared += found
            tied += [False] * len(found)
        if compared:
            groups.append(Group(rows["prompt_id"].iloc[0], list(answers), compared, tied))
    return groups


def _log_tie(loss: Callable[..., LossOutput], groups: Sequence[Group]) -> float:
    """The tie parameter at which equal scores tie as often as the labels do.

    From there it has to follow the scores as they move apart.
    """
    tied = [tie for group in groups for tie in group.tied]
    share = min(max(sum(tied) / len(tied), 1e-4), 0.95)

    def surplus(log_tie: float) -> float:
        equal, decided = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bool)
        output = loss(equal, equal, decided, torch.tensor(log_tie), denominator=1.0)
        return float(output.metrics["expected_ties"]) - share

    return float(brentq(surplus, -20.0, 10.0, xtol=1e-6))


def _train(
    model: ScalarModel,
    loss: Callable[..., LossOutput],
    groups: Sequence[Group],
    book: PromptBook,
    codec: TextCodec,
    pipeline: config.Pipeline,
    settings: config.RewardModel,
    seed: int,
    clock: Clock,
) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yields (update, tokens, metrics). Every pair of a batch weighs the same."""
    device = next(model.parameters()).device
    encoded = [
        [codec.encode_response(text, ended) for text, ended in group.answers] for group in groups
    ]
    lengths = [
        len(book.tokens(group.prompt_id)) + max(len(row) for row in rows)
        for group, rows in zip(groups, encoded, strict=True)
    ]
    order = torch.Generator().manual_seed(seed)
    batches_per_epoch = math.ceil(len(groups) / settings.groups_per_batch)
    learner = Learner(
        model,
        settings,
        total_updates=batches_per_epoch * settings.epochs,
        ema_decay=settings.ema_decay,
        rate_factors={"log_tie": TIE_RATE_FACTOR} if hasattr(model, "log_tie") else {},
    )
    model.train()
    for epoch in range(settings.epochs):
        for rows in length_sorted_batches(lengths, settings.groups_per_batch, order):
            micro = chunks(rows, settings.micro_batch_size)
            num_pairs = sum(len(groups[i].pairs) for i in rows)

            def share(part: list[int], num_pairs: int = num_pairs) -> LossOutput:
                prompts = [book.tokens(groups[i].prompt_id) for i in part for _ in encoded[i]]
                responses = [row for i in part for row in encoded[i]]
                sequences = Sequences.from_rows(prompts, responses, codec.pad_id).to(device)
                with precision(pipeline.model, device):
                    scores = model.scores(sequences)
                chosen, rejected = _pair_indices([groups[i] for i in part])
                tied = [tie for i in part for tie in groups[i].tied]
                return parts.call(
                    loss,
                    {
                        "chosen_scores": scores[chosen],
                        "rejected_scores": scores[rejected],
                        "tied": torch.tensor(tied, device=device),
                        "log_tie": getattr(model, "log_tie", None),
                    },
                    denominator=num_pairs,
                    **settings.loss.arguments(),
                )

            with clock("training"):
                metrics = learner.update(
                    (
                        (
                            float(sum(len(groups[i].pairs) for i in part)),
                            lambda part=part: share(part),  # type: ignore[misc]
                        )
                        for part in micro
                    ),
                    name=f"epoch {epoch + 1}, groups {sorted(rows)[:8]}",
                )
            yield learner.updates, sum(len(row) for i in rows for row in encoded[i]), metrics
    if learner.ema is not None:
        model.load_state_dict(learner.ema.state_dict(), strict=False)


def _pair_indices(groups: Sequence[Group]) -> tuple[list[int], list[int]]:
    """Positions of chosen and rejected among the answers of all groups, one after another."""
    chosen, rejected, offset = [], [], 0
    for group in groups:
        chosen += [offset + i for i, _ in group.pairs]
        rejected += [offset + j for _, j in group.pairs]
        offset += len(group.answers)
    return chosen, rejected


def _reference(
    pipeline: config.Pipeline, name: str, book: PromptBook, codec: TextCodec, device: torch.device
) -> tuple[list[list[int]], list]:
    """Answers of the incoming policy, which set the scale of the scores."""
    declared = pipeline.rounds[name]
    policy = load_policy(common.RUNS / declared.from_ / "promoted", device)
    keys = book.of("preferences")
    count = declared.reward_model.num_reference_samples
    prompts = [book.tokens(keys[i % len(keys)]) for i in range(count)]
    completions = sample(
        policy,
        prompts,
        max_new_tokens=pipeline.model.max_response_tokens,
        dtype=pipeline.model.dtype,
        temperature=1.0,
        eos_id=codec.eos_id,
        pad_id=codec.pad_id,
        seed=pipeline.seed_for(name, "reward_model", "reference"),
        batch_size=declared.preferences.sampling_batch_size,
    )
    return prompts, completions


def _score_pairs(
    committee: Committee, pairs: pd.DataFrame, book: PromptBook
) -> tuple[Tensor, Tensor]:
    """(M, N) raw scores of chosen and of rejected."""
    prompts = [book.tokens(key) for key in pairs["prompt_id"]]
    return (
        committee.member_scores(prompts, pairs["chosen"].tolist(), pairs["chosen_ended"].tolist()),
        committee.member_scores(
            prompts, pairs["rejected"].tolist(), pairs["rejected_ended"].tolist()
        ),
    )


def judge(
    heldout: pd.DataFrame,
    chosen: Tensor,
    rejected: Tensor,
    scales: Sequence[tuple[float, float]],
    codec: TextCodec,
    name: str,
) -> tuple[dict[str, float | None], pd.DataFrame]:
    """How good the committee is on pairs it has not seen, those of this round; labelled ties apart.

    Returns: the report, and the reliability table of P(chosen) = sigmoid(score margin).
    """
    own = ((heldout["round"] == name) & ~heldout["tie"]).to_numpy(copy=True)
    pairs, chosen, rejected = heldout[own].reset_index(drop=True), chosen[:, own], rejected[:, own]
    mean_chosen, mean_rejected = chosen.mean(0), rejected.mean(0)
    accuracy, ties = pairwise_accuracy(mean_chosen, mean_rejected)
    hits = (mean_chosen > mean_rejected).numpy().astype(float)
    # A tied score is neither right nor wrong, here as in the accuracy.
    decided = (mean_chosen != mean_rejected).numpy()
    clusters = pairs["prompt_id"].to_numpy()[decided]
    lower, upper = None, None
    if len(set(clusters)) > 1:
        _, lower, upper = statistics.mean_interval(hits[decided], clusters, seed=0)
    # Which answer is called first must not depend on the label, or every outcome would be 1.
    first = (pairs["chosen"] < pairs["rejected"]).to_numpy()
    probability = torch.sigmoid(mean_chosen - mean_rejected).numpy().astype(float)
    probability = np.where(first, probability, 1 - probability)
    calibration = statistics.expected_calibration_error(probability, first.astype(float))
    table = statistics.reliability(probability, first.astype(float), bins=10)
    means = torch.tensor([m for m, _ in scales]), torch.tensor([s for _, s in scales])
    scaled = [
        ((part - means[0][:, None]) / means[1][:, None]).mean(0).numpy()
        for part in (chosen, rejected)
    ]
    lengths = [
        len(codec.encode_response(text, ended))
        for side in ("chosen", "rejected")
        for text, ended in zip(pairs[side], pairs[f"{side}_ended"], strict=True)
    ]
    slope, correlation = statistics.score_length(np.concatenate(scaled), np.array(lengths, float))
    per_member = [float(pairwise_accuracy(c, r)[0]) for c, r in zip(chosen, rejected, strict=True)]
    report: dict[str, float | None] = {
        "heldout_pairs": float(len(pairs)),
        "accuracy": float(accuracy),
        "accuracy_lower": lower,
        "accuracy_upper": upper,
        "ties": float(ties),
        "labelled_ties": float(heldout.loc[heldout["round"] == name, "tie"].sum()),
        "member_accuracy_min": min(per_member),
        "member_accuracy_max": max(per_member),
        "calibration_error": float(calibration),
        "length_slope_per_token": float(slope),
        "length_correlation": float(correlation),
        "gold_order_accuracy": None,
        "label_ceiling": None,
    }
    if pairs["gold_margin"].notna().all() and len(pairs):
        margin = pairs["gold_margin"].to_numpy()
        right = (mean_chosen > mean_rejected).numpy() == (margin > 0)
        ordered = decided & (margin != 0)
        report["gold_order_accuracy"] = float(right[ordered].mean()) if ordered.any() else None
        report["label_ceiling"] = float((margin > 0).mean())
    return report, table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--round", required=True, help="like r1")
    arguments = parser.parse_args()
    common.main(f"reward_model@{arguments.round}", lambda p: run(p, arguments.round))
