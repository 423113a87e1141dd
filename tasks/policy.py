"""One candidate's optimisation: by reinforcement learning on the committee's score, or from pairs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf import artifacts, config, contracts, tracking
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import BadInput, StageFailed
from rlhf.models.policy import device_of, enable_gradient_checkpointing, load_policy, save_policy
from rlhf.models.scalar import ScalarModel
from rlhf.optimise.anchor import following
from rlhf.optimise.preference import (
    OnlinePreferenceTrainer,
    PairIds,
    PreferenceTrainer,
    chosen_falls,
)
from rlhf.optimise.reference import ReferenceCache, state_digest
from rlhf.optimise.rl import RlTrainer
from rlhf.progress import Clock, Progress
from rlhf.rewards.committee import Committee
from rlhf.rollout import sample
from tasks import common

log = logging.getLogger("roundhouse")

NUM_PROBES = 64  # answers sampled at a checkpoint where training itself samples none


def run(pipeline: config.Pipeline, name: str) -> None:
    """Reads the incoming policy and what it learns from; writes runs/<round>/policies/<candidate>."""
    clock = Clock(f"policy@{name}")
    candidate = common.of_candidate(pipeline, name)
    common.prepare_torch(pipeline.resources.threads.policy)
    incoming = common.need(common.RUNS / candidate.from_ / "promoted")
    tokenizer = load_tokenizer(pipeline.model, incoming)
    codec = TextCodec(tokenizer, pipeline.model)
    book = PromptBook(common.need(common.TABLES / "prompts.parquet"), codec)
    device = device_of(pipeline.model)
    with (
        tracking.stage_run(
            pipeline,
            stage="policy",
            key=f"policy@{name}",
            round=candidate.round,
            kind="policy",
            name=f"{candidate.round}/{name.split('-', 1)[1]} training",
            algorithm=candidate.algorithm,
            params={"candidate": candidate.model_dump(by_alias=True), "seed": pipeline.seed},
        ) as tracked,
        artifacts.write_directory(common.RUNS / candidate.round / "policies" / name) as directory,
    ):
        job = Job(
            pipeline, name, codec, book, incoming, device, clock, tracked,
            Checkpoints(directory, tokenizer),
        )  # fmt: skip
        artifacts.write_json(directory / "candidate.json", candidate.model_dump(by_alias=True))
        with _kept_on_failure(job, tokenizer):
            summary = KINDS[candidate.kind](job, candidate)
        job.checkpoints.finish()
        artifacts.write_json(
            common.RUNS / candidate.round / "metrics" / f"{name}-policy.json", summary
        )
    clock.write()


@contextlib.contextmanager
def _kept_on_failure(job: Job, tokenizer: Any) -> Iterator[None]:
    """A stage that fails loses its output; the last good weights go where the error says."""
    try:
        yield
    except StageFailed as error:
        kept = Path(".scratch/failed") / f"policy@{job.name}"
        save_policy(job.policy, tokenizer, kept)
        raise StageFailed(f"{error}\n  the last good weights are in {kept}") from error


class Checkpoints:
    """The policy along its path, one directory each, and the list that evaluation reads."""

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        self.directory, self.tokenizer = directory, tokenizer
        self.saved: list[dict[str, Any]] = []

    def save(self, policy: PreTrainedModel, step: int, updates: int) -> None:
        """Keep the policy after `step` steps, which were `updates` optimizer updates."""
        name = f"step-{step:05d}"
        save_policy(policy, self.tokenizer, self.directory / name)
        self.saved.append({"checkpoint": name, "step": step, "updates": updates})

    def cut(self, step: int) -> None:
        """Forget the checkpoints after `step`."""
        for gone in [c for c in self.saved if c["step"] > step]:
            shutil.rmtree(self.directory / gone["checkpoint"])
        self.saved = [c for c in self.saved if c["step"] <= step]

    def has(self, step: int) -> bool:
        return any(c["step"] == step for c in self.saved)

    def finish(self) -> None:
        artifacts.write_json(self.directory / "checkpoints.json", self.saved)


class Job:
    """What both kinds of candidate need."""

    def __init__(
        self,
        pipeline: config.Pipeline,
        name: str,
        codec: TextCodec,
        book: PromptBook,
        incoming: Path,
        device: torch.device,
        clock: Clock,
        tracked: tracking.Run,
        checkpoints: Checkpoints,
    ) -> None:
        self.pipeline, self.name, self.codec, self.book = pipeline, name, codec, book
        self.incoming, self.device, self.clock = incoming, device, clock
        self.tracked, self.checkpoints = tracked, checkpoints
        self.seed = pipeline.seed_for("policy", name)
        self.policy = load_policy(incoming, device)
        if pipeline.model.gradient_checkpointing:
            enable_gradient_checkpointing(self.policy)
        # Not requires_grad_(False): torch multiplies frozen weights another way, which rounds another
        # way, and the KL at the start would not be 0. Nothing here runs the start under autograd.
        self.start = load_policy(incoming, device).eval()
        candidate = pipeline.candidates[name]
        self.reference = REFERENCES[candidate.reference](self)
        self.reference_digest = (
            None if self.reference is None else state_digest(self.reference.state_dict())
        )


REFERENCES: dict[str, Callable[[Job], PreTrainedModel | None]] = {
    "none": lambda job: None,
    "previous": lambda job: job.start,
    "initial": lambda job: load_policy(common.need(common.RUNS / "r0/promoted"), job.device).eval(),
    "ema": lambda job: following(job.start),
}


def reinforce(job: Job, candidate: config.RlCandidate) -> dict[str, Any]:
    """Sample, score, update. x of every curve is optimizer updates, the same for all candidates."""
    source = common.need(common.RUNS / candidate.learns_from)
    committee = Committee.load(source, job.codec, job.pipeline.model, job.device)
    critic = None
    if candidate.value is not None:
        critic = _critic(candidate.value, committee, source, job)
    job.tracked.dataset(source, candidate.learns_from, "training")
    trainer = RlTrainer(
        candidate, job.pipeline.model, critic=critic, **_sampling(job, candidate, committee)
    )
    return _follow(job, candidate, trainer)


def learn_from_own_pairs(job: Job, candidate: config.OnlinePreferenceCandidate) -> dict[str, Any]:
    """Sample, label by the committee, learn from the pairs."""
    source = common.need(common.RUNS / candidate.learns_from)
    committee = Committee.load(source, job.codec, job.pipeline.model, job.device)
    job.tracked.dataset(source, candidate.learns_from, "training")
    trainer = OnlinePreferenceTrainer(
        candidate, job.pipeline.model, **_sampling(job, candidate, committee)
    )
    return _follow(job, candidate, trainer)


def _sampling(
    job: Job,
    candidate: config.RlCandidate | config.OnlinePreferenceCandidate,
    committee: Committee,
) -> dict[str, Any]:
    """What a trainer with samples of its own is given."""
    return {
        "policy": job.policy,
        "start": job.start,
        "reference": job.reference,
        "score": committee.scorer(candidate.aggregate),
        "codec": job.codec,
        "prompts": [job.book.tokens(key) for key in job.book.of("rl")],
        "seed": job.seed,
        "clock": job.clock,
    }


def _follow(
    job: Job,
    candidate: config.RlCandidate | config.OnlinePreferenceCandidate,
    trainer: RlTrainer | OnlinePreferenceTrainer,
) -> dict[str, Any]:
    """Runs a trainer's steps: logs, saves checkpoints, and ends within the KL budget."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    with Progress(f"policy@{job.name}", candidate.steps) as progress:
        for step, batch, metrics in trainer.run():
            updates = trainer.learner.updates
            job.tracked.metrics(metrics, updates)
            progress.update(
                step,
                tokens=batch.num_tokens,
                proxy=metrics["policy/proxy"],
                kl=metrics["policy/kl_nats"],
            )
            if step % candidate.checkpoint_every == 0 or step == candidate.steps:
                with trainer.learner.averaged():
                    job.checkpoints.save(job.policy, step, updates)
            first, last = first or metrics, metrics
    stopped = None
    if trainer.budget.stopped_at is not None:
        stopped, updates = trainer.budget.stopped_at
        job.checkpoints.cut(stopped)
        if not job.checkpoints.has(stopped):
            job.checkpoints.save(job.policy, stopped, updates)
    names = {
        "proxy": "policy/proxy",
        "kl_nats": "policy/kl_nats",
        "length_tokens": "policy/length_tokens",
    }
    return {
        **{f"{key}_first": first[name] for key, name in names.items()},
        **{f"{key}_last": last[name] for key, name in names.items()},
        **_outcome(job, stopped),
    }


def _outcome(job: Job, stopped: int | None) -> dict[str, Any]:
    """What every candidate's summary says of its reference and its budget."""
    return {"reference_sha256": job.reference_digest, "stopped_by_kl_budget_after": stopped}


def _critic(value: config.Value, committee: Committee, source: Path, job: Job) -> ScalarModel:
    """From the committee's first member, on the committee's scale, or from the policy with a head at zero."""
    if value.init == "policy":
        critic = ScalarModel.from_directory(job.incoming, job.device)
    else:
        critic = ScalarModel.from_directory(source / "member_0", job.device)
        critic.rescale_(*committee.scales[0])
    if job.pipeline.model.gradient_checkpointing:
        enable_gradient_checkpointing(critic.backbone)
    return critic


def learn_from_pairs(job: Job, candidate: config.PreferenceCandidate) -> dict[str, Any]:
    """Updates on the round's pairs; where training samples nothing, a small probe keeps the curves comparable."""
    path = common.need(common.RUNS / candidate.learns_from / "pairs.parquet")
    job.tracked.dataset(path, candidate.learns_from, "training")
    trainer = PreferenceTrainer(
        candidate,
        job.pipeline.model,
        policy=job.policy,
        start=job.start,
        reference=job.reference,
        pairs=_pairs(path, candidate, job),
        pad_id=job.codec.pad_id,
        seed=job.seed,
        clock=job.clock,
        cache=ReferenceCache(),
    )
    stopped = None
    history: list[dict[str, float]] = []
    with Progress(f"policy@{job.name}", trainer.total_updates, "updates") as progress:
        for update, tokens, metrics in trainer.run():
            if update % candidate.checkpoint_every == 0 or update == trainer.total_updates:
                with trainer.learner.averaged():
                    found = _probe(job)
                    stopped = _over_budget(job, candidate, found["policy/kl_nats"])
                    if stopped is None:
                        job.checkpoints.save(job.policy, update, update)
                metrics |= found
            job.tracked.metrics(metrics, update)
            shown = {"loss": metrics["policy/loss"]}
            if "policy/accuracy" in metrics:
                shown["accuracy"] = metrics["policy/accuracy"]
            progress.update(update, tokens=tokens, **shown)
            history.append(metrics)
            if stopped is not None:
                break
    first, last = history[0], history[-1]
    fallen = chosen_falls(history)
    if fallen is not None:
        log.warning(
            "policy@%s: the chosen answers lost %.2f nats while the margin grew, so probability goes "
            "to answers that nobody compared; add a term {kind: sft}, or lower learning_rate",
            job.name,
            fallen,
        )
    names = [
        name
        for name in ("loss", "accuracy", "margin", "chosen_logp_change_nats")
        if f"policy/{name}" in first
    ]
    return {
        **{f"{key}_first": first[f"policy/{key}"] for key in names},
        **{f"{key}_last": last[f"policy/{key}"] for key in names},
        "alarm_chosen_fell_nats": fallen,
        **_outcome(job, stopped),
    }


def _over_budget(job: Job, candidate: config.PreferenceCandidate, kl_nats: float) -> int | None:
    """The update of the last checkpoint if the policy is over its budget now, else None."""
    limit = candidate.kl_budget_nats
    if limit is None or kl_nats <= limit:
        return None
    if not job.checkpoints.saved:
        raise StageFailed(
            f"the first checkpoint is {kl_nats:.3g} nats from the start\n"
            f"  rule: kl_budget_nats={limit:g}\n"
            "  mend: lower checkpoint_every or learning_rate, or raise the budget"
        )
    return int(job.checkpoints.saved[-1]["step"])


def _pairs(path: Path, candidate: config.PreferenceCandidate, job: Job) -> list[PairIds]:
    """Training pairs as tokens: decided ones, at most `pairs_per_group` of each group, chosen at random."""
    table = contracts.read(path, contracts.PAIRS)
    table = table[~table["heldout"] & ~table["tie"]]
    if table.empty:
        raise BadInput("no decided training pair", where=str(path), mend="label more pairs")
    shuffled = table.sample(frac=1.0, random_state=job.seed % 2**32)
    kept = shuffled.groupby("group_id", sort=False).head(candidate.pairs_per_group).sort_index()
    return [
        PairIds(
            job.book.tokens(row.prompt_id),
            job.codec.encode_response(row.chosen, row.chosen_ended),
            job.codec.encode_response(row.rejected, row.rejected_ended),
        )
        for row in kept.itertuples()
    ]


def _probe(job: Job) -> dict[str, float]:
    """KL to the start, length and ending of a few fresh answers to training prompts."""
    from rlhf.models.sequences import Sequences
    from rlhf.optimise.forward import divergence

    model, keys = job.pipeline.model, job.book.of("rl")
    prompts = [job.book.tokens(keys[i % len(keys)]) for i in range(NUM_PROBES)]
    with job.clock("sampling"):
        completions = sample(
            job.policy,
            prompts,
            max_new_tokens=model.max_response_tokens,
            dtype=model.dtype,
            temperature=1.0,
            eos_id=job.codec.eos_id,
            pad_id=job.codec.pad_id,
            seed=job.seed,
            batch_size=NUM_PROBES,
        )
    sequences = Sequences.from_rows(prompts, [c.ids for c in completions], job.codec.pad_id)
    sequences = sequences.to(job.device)
    with job.clock("scoring"):
        found = divergence(job.policy, job.start, sequences, model, batch_size=NUM_PROBES)
    return {
        "policy/kl_nats": float(found.kl.mean()),
        "policy/length_tokens": float(sequences.lengths.float().mean()),
        "policy/ended_fraction": sum(c.ended for c in completions) / NUM_PROBES,
    }


KINDS: dict[str, Callable[[Job, Any], dict[str, Any]]] = {
    "rl": reinforce,
    "preference": learn_from_pairs,
    "online_preference": learn_from_own_pairs,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidate", required=True, help="like r1-ppo")
    arguments = parser.parse_args()
    common.main(f"policy@{arguments.candidate}", lambda p: run(p, arguments.candidate))
