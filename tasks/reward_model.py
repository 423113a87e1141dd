"""A committee of Bradley-Terry reward models, fitted to the round's pairs and judged on held-out ones."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import brentq
from torch import Tensor
from transformers import AutoConfig, AutoModel

from rlhf import artifacts, config, contracts, resume, tracking
from rlhf.algos import parts
from rlhf.algos.reward_model_losses import pairwise_accuracy
from rlhf.algos.types import LossOutput
from rlhf.data.batching import Epochs, chunks
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
    whole,
)
from rlhf.models.scalar import HEAD_FILE, ScalarModel
from rlhf.models.sequences import Sequences
from rlhf.optimise.imported import reward_model_part
from rlhf.progress import Clock, Progress
from rlhf.rewards.committee import SCALE_FILE, Committee
from rlhf.rollout import Completion, Sampling, sample
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


@dataclass(frozen=True)
class Job:
    """What every member is made from."""

    pipeline: config.Pipeline
    name: str
    incoming: Path
    loss: Callable[..., LossOutput]
    groups: Sequence[Group]
    book: PromptBook
    codec: TextCodec
    device: torch.device

    @property
    def settings(self) -> config.RewardModel:
        return self.pipeline.rounds[self.name].reward_model

    @functools.cached_property
    def encoded(self) -> list[list[list[int]]]:
        """Token ids of every group's answers."""
        return [
            [self.codec.encode_response(text, ended) for text, ended in group.answers]
            for group in self.groups
        ]


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
    if settings.init == "previous":
        _check_previous(_previous(declared), settings.members, incoming, tokenizer, pipeline.model)
    loss = reward_model_part(settings)
    groups = _groups(pairs[~pairs["heldout"]], with_ties="tied" in parts.inputs(loss))
    job = Job(pipeline, name, incoming, loss, groups, book, codec, device)

    with (
        _scratch(pipeline, name) as scratch,
        tracking.stage_run(
            pipeline,
            stage="reward_model",
            key=f"reward_model@{name}",
            round=name,
            kind="reward_model",
            name=f"{name}/reward_model",
            algorithm=settings.loss.kind,
            params={"reward_model": settings.model_dump(), "seed": pipeline.seed},
            inputs=scratch.key,
        ) as tracked,
    ):
        work = Work(job, scratch, tracked, clock)
        if scratch.resumed_at is None:
            tracked.dataset(path, f"{name}/pairs", "training")
        members, ties = _fit_all(job, work, tracked, clock)
        with clock("sampling"):
            prompts, completions = _reference(pipeline, name, book, codec, device, work)
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
            contracts.write(
                scored_pairs(heldout, chosen, rejected, scales, codec),
                directory / "scored_pairs.parquet",
                contracts.SCORED_PAIRS,
            )
            plots.reliability(table, report["calibration_error"], directory / "reliability.png")
            tracked.figure(directory / "reliability.png")
        artifacts.write_json(common.RUNS / name / "metrics" / "reward_model.json", report)
        tracked.summary({f"reward_model_result/{k}": v for k, v in report.items() if v is not None})
        tracked.table("reliability", table.to_dict("records"))
        scratch.finish()
    clock.write()


def _scratch(
    pipeline: config.Pipeline, name: str
) -> contextlib.AbstractContextManager[resume.Scratch]:
    start = pipeline.rounds[name].from_
    return resume.open_scratch(
        pipeline,
        f"reward_model@{name}",
        inputs=[
            common.TABLES,
            common.RUNS / name / "preferences",
            common.RUNS / start / "promoted",
            common.RUNS / start / "reward_model",
        ],
        params=common.settings(
            pipeline,
            "seed",
            "model",
            "resources.threads.reward_model",
            f"rounds.{name}.preferences.sampling_batch_size",
            f"rounds.{name}.reward_model",
        ),
    )


class Fit:
    """One member in training."""

    def __init__(self, job: Job, number: int) -> None:
        settings = job.settings
        self.number = number
        declared = job.pipeline.rounds[job.name]
        warm = settings.init == "previous"
        start = _previous(declared) / f"member_{number}" if warm else job.incoming
        self.model = ScalarModel.from_directory(start, job.device)
        if job.pipeline.model.gradient_checkpointing:
            enable_gradient_checkpointing(self.model.backbone)
        if "log_tie" in parts.inputs(job.loss):
            log_tie = torch.tensor(_log_tie(job.loss, job.groups), device=job.device)
            self.model.register_parameter("log_tie", torch.nn.Parameter(log_tie))
        lengths = [
            len(job.book.tokens(group.prompt_id)) + max(len(row) for row in rows)
            for group, rows in zip(job.groups, job.encoded, strict=True)
        ]
        seed = job.pipeline.seed_for(job.name, "reward_model", str(number))
        self.batches = Epochs(
            lengths,
            settings.groups_per_batch,
            settings.epochs,
            torch.Generator().manual_seed(seed),
        )
        self.learner = Learner(
            self.model,
            settings,
            total_updates=self.batches.total,
            ema_decay=settings.ema_decay,
            rate_factors={"log_tie": TIE_RATE_FACTOR} if hasattr(self.model, "log_tie") else {},
        )
        self.model.train()

    def state_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "model": dict(self.model.state_dict()),
            "learner": self.learner.state_dict(),
            "batches": self.batches.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.learner.load_state_dict(state["learner"])
        self.batches.load_state_dict(state["batches"])

    def finish(self) -> tuple[ScalarModel, float | None]:
        """The fitted member, averaged where that is declared, and its tie parameter."""
        if self.learner.ema is not None:
            self.model.load_state_dict(self.learner.ema.state_dict(), strict=False)
        log_tie = None
        if hasattr(self.model, "log_tie"):
            log_tie = self.model.get_parameter("log_tie").item()
            del self.model.log_tie
        return self.model.eval(), log_tie


class Work:
    """How far the stage is: finished members, the one in training, reference answers; saved, and read back.

    A finished member is a file beside the checkpoints, written once.
    """

    def __init__(
        self, job: Job, scratch: resume.Scratch, tracked: tracking.Run, clock: Clock
    ) -> None:
        self._job, self._scratch, self._tracked, self._clock = job, scratch, tracked, clock
        self.members: list[ScalarModel] = []
        self.ties: dict[str, float] = {}
        self.fit: Fit | None = None
        self.sampling = Sampling()
        scratch.restore(self._apply)
        self.count = scratch.resumed_at or 0

    def step(self) -> None:
        """An update, or a batch of answers, is done."""
        self.count += 1
        self._scratch.step(self.count, self._collect)

    def begin(self, number: int) -> Fit:
        """The training of a member, from where it is."""
        if self.fit is None or self.fit.number != number:
            self.fit = Fit(self._job, number)
        return self.fit

    def finish(self, fit: Fit) -> None:
        """A member is done."""
        model, log_tie = fit.finish()
        if log_tie is not None:
            self.ties[f"member_{fit.number}_log_tie"] = log_tie
        with artifacts.temporary_file(self._file(fit.number)) as new:
            save_file(model.state_dict(), new)
        self.members.append(model)
        self.fit = None

    def _file(self, number: int) -> Path:
        return self._scratch.files / f"member_{number}.safetensors"

    def _collect(self) -> dict[str, Any]:
        return {
            "members": len(self.members),
            "ties": dict(self.ties),
            "fit": None if self.fit is None else self.fit.state_dict(),
            "sampling": self.sampling.state_dict(),
            "clock": self._clock.state_dict(),
            "tracked": self._tracked.position(),
        }

    def _apply(self, state: dict[str, Any]) -> None:
        with torch.random.fork_rng(devices=[]):  # a new head draws numbers, and forgets them
            for number in range(state["members"]):
                model = ScalarModel.from_directory(self._job.incoming, self._job.device)
                model.load_state_dict(load_file(self._file(number)))
                self.members.append(model.eval())
            if state["fit"] is not None:
                self.fit = Fit(self._job, state["fit"]["number"])
                self.fit.load_state_dict(state["fit"])
        self.ties = state["ties"]
        self.sampling.load_state_dict(state["sampling"])
        self._clock.load_state_dict(state["clock"])
        self._tracked.resume(state["tracked"])


def _previous(declared: config.Round) -> Path:
    return common.RUNS / declared.from_ / "reward_model"


def _check_previous(
    directory: Path, members: int, incoming: Path, tokenizer: Any, model: config.Model
) -> None:
    """Members can go on from those of `directory` if there are as many, of this architecture and vocabulary."""
    expected = _shape(incoming)
    for number in range(members):
        place = directory / f"member_{number}"
        problem = None
        if not (place / HEAD_FILE).is_file():
            problem = "there is no such member"
        elif _shape(place) != expected:
            problem = f"it is of another architecture or size than the policy {incoming}"
        elif load_tokenizer(model, place).get_vocab() != tokenizer.get_vocab():
            problem = f"its vocabulary differs from that of the policy {incoming}"
        if problem is not None:
            raise BadInput(
                problem,
                where=str(place),
                rule="reward_model.init: previous starts each member as the one of that number in `from`",
                mend="use init: policy, or members, architecture and vocabulary as in `from`",
            )


def _shape(directory: Path) -> tuple[str, dict[str, torch.Size]]:
    """A model's class and the shapes of its weights, from its configuration alone."""
    with whole(directory), torch.device("meta"):
        settings = AutoConfig.from_pretrained(str(directory), local_files_only=True)
        body = AutoModel.from_config(settings)
    return type(body).__name__, {name: weight.shape for name, weight in body.named_parameters()}


def _fit_all(
    job: Job, work: Work, tracked: tracking.Run, clock: Clock
) -> tuple[list[ScalarModel], dict[str, float]]:
    """The members, fitted one after another, and their tie parameters."""
    settings = job.settings
    each = settings.epochs * math.ceil(len(job.groups) / settings.groups_per_batch)
    done = len(work.members) * each + (work.fit.learner.updates if work.fit else 0)
    total = settings.members * each
    with Progress(f"reward_model@{job.name}", total, "updates", done=done) as progress:
        for number in range(len(work.members), settings.members):
            fit = work.begin(number)
            for step, tokens, metrics in _train(job, fit, clock):
                tracked.metrics(
                    {f"reward_model/member_{number}_{k}": v for k, v in metrics.items()}, step
                )
                progress.update(
                    number * each + step,
                    tokens=tokens,
                    loss=metrics["loss"],
                    accuracy=metrics["accuracy"],
                )
                work.step()
            work.finish(fit)
    return work.members, work.ties


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


def _train(job: Job, fit: Fit, clock: Clock) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yields (update, tokens, metrics). Every pair of a batch weighs the same."""
    settings, groups, book, model = job.settings, job.groups, job.book, fit.model
    encoded = job.encoded
    for epoch, rows in fit.batches:
        micro = chunks(rows, settings.micro_batch_size)
        num_pairs = sum(len(groups[i].pairs) for i in rows)

        def share(part: list[int], num_pairs: int = num_pairs) -> LossOutput:
            prompts = [book.tokens(groups[i].prompt_id) for i in part for _ in encoded[i]]
            responses = [row for i in part for row in encoded[i]]
            sequences = Sequences.from_rows(prompts, responses, job.codec.pad_id).to(job.device)
            with precision(job.pipeline.model, job.device):
                scores = model.scores(sequences)
            chosen, rejected = _pair_indices([groups[i] for i in part])
            tied = [tie for i in part for tie in groups[i].tied]
            return parts.call(
                job.loss,
                {
                    "chosen_scores": scores[chosen],
                    "rejected_scores": scores[rejected],
                    "tied": torch.tensor(tied, device=job.device),
                    "log_tie": getattr(model, "log_tie", None),
                },
                denominator=num_pairs,
                **settings.loss.arguments(),
            )

        with clock("training"):
            metrics = fit.learner.update(
                (
                    (
                        float(sum(len(groups[i].pairs) for i in part)),
                        lambda part=part: share(part),  # type: ignore[misc]
                    )
                    for part in micro
                ),
                name=f"epoch {epoch + 1}, groups {sorted(rows)[:8]}",
            )
        yield fit.learner.updates, sum(len(row) for i in rows for row in encoded[i]), metrics


def _pair_indices(groups: Sequence[Group]) -> tuple[list[int], list[int]]:
    """Positions of chosen and rejected among the answers of all groups, one after another."""
    chosen, rejected, offset = [], [], 0
    for group in groups:
        chosen += [offset + i for i, _ in group.pairs]
        rejected += [offset + j for _, j in group.pairs]
        offset += len(group.answers)
    return chosen, rejected


def _reference(
    pipeline: config.Pipeline,
    name: str,
    book: PromptBook,
    codec: TextCodec,
    device: torch.device,
    work: Work,
) -> tuple[list[list[int]], list[Completion]]:
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
        on_batch=lambda *_: work.step(),
        state=work.sampling,
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


def scored_pairs(
    heldout: pd.DataFrame,
    chosen: Tensor,
    rejected: Tensor,
    scales: Sequence[tuple[float, float]],
    codec: TextCodec,
) -> pd.DataFrame:
    """Every held-out pair with its (M, N) raw scores of chosen and rejected: `contracts.SCORED_PAIRS`."""
    margins = (chosen - rejected).double().numpy()
    columns = ["pair_id", "prompt_id", "round", "tie", "gold_margin"]
    return heldout[columns].assign(
        margin=margins.mean(0),
        **{f"margin/member_{i}": row for i, row in enumerate(margins)},
        chosen_score=_scaled(chosen, scales).astype(float),
        rejected_score=_scaled(rejected, scales).astype(float),
        chosen_tokens=_lengths(heldout, "chosen", codec),
        rejected_tokens=_lengths(heldout, "rejected", codec),
        chosen_first=heldout["chosen"] < heldout["rejected"],
    )


def _scaled(scores: Tensor, scales: Sequence[tuple[float, float]]) -> np.ndarray:
    """(N,) committee's scores of (M, N) raw ones, as policies see them."""
    means, deviations = (torch.tensor(part)[:, None] for part in zip(*scales, strict=True))
    return np.asarray(((scores - means) / deviations).mean(0).numpy())


def _lengths(pairs: pd.DataFrame, side: str, codec: TextCodec) -> list[int]:
    """Tokens of one side's answers."""
    return [
        len(codec.encode_response(text, ended))
        for text, ended in zip(pairs[side], pairs[f"{side}_ended"], strict=True)
    ]


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
    scaled = [_scaled(part, scales) for part in (chosen, rejected)]
    lengths = [n for side in ("chosen", "rejected") for n in _lengths(pairs, side, codec)]
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
