"""One candidate's optimisation: by reinforcement learning on the committee's score, or from pairs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlhf import artifacts, config, contracts, resume, tracking
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import BadInput, StageFailed
from rlhf.models.policy import device_of, enable_gradient_checkpointing, load_policy, save_policy
from rlhf.models.scalar import ScalarModel
from rlhf.optimise.anchor import following
from rlhf.optimise.preference import (
    LOOKED_BACK,
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

INITIAL = common.RUNS / "r0/promoted"
Trainer = RlTrainer | PreferenceTrainer | OnlinePreferenceTrainer

NUM_PROBES = 64  # answers sampled at a checkpoint where training itself samples none


def run(pipeline: config.Pipeline, name: str) -> None:
    """Reads the incoming policy and what it learns from; writes runs/<round>/policies/<candidate>."""
    clock = Clock(f"policy@{name}")
    candidate = common.of_candidate(pipeline, name)
    init = common.of_round(pipeline, candidate.round).init
    if "initial" in (init, candidate.reference):
        common.initial_weights()
    common.prepare_torch(pipeline.resources.threads.policy)
    settings = {
        "candidate": candidate.model_dump(by_alias=True),
        "init": init,
        "seed": pipeline.seed,
    }
    inputs = [
        common.TABLES, common.RUNS / candidate.from_ / "promoted", common.INITIAL_METRICS,
        common.RUNS / candidate.learns_from,
    ]  # fmt: skip
    with resume.open_scratch(
        pipeline,
        f"policy@{name}",
        inputs=map(common.need, inputs),
        params={
            **settings,
            "model": pipeline.model.model_dump(),
            "threads": pipeline.resources.threads.policy,
        },
    ) as scratch:
        with tracking.stage_run(
            pipeline,
            stage="policy",
            key=f"policy@{name}",
            round=candidate.round,
            kind="policy",
            name=f"{candidate.round}/{name.split('-', 1)[1]} training",
            algorithm=candidate.algorithm,
            params=settings,
            inputs=scratch.key,
        ) as tracked:
            _optimise(Job(pipeline, name, clock, tracked, scratch))
        scratch.finish()
    clock.write()


def _optimise(job: Job) -> None:
    candidate, folder = job.candidate, common.RUNS / job.candidate.round
    with _kept_on_failure(job):
        summary = KINDS[candidate.kind](job, candidate)
    with artifacts.write_directory(folder / "policies" / job.name) as directory:
        job.checkpoints.put_into(directory)
        artifacts.write_json(directory / "candidate.json", candidate.model_dump(by_alias=True))
        artifacts.write_json(directory / "alarms.json", job.alarms)
    artifacts.write_json(folder / "metrics" / f"{job.name}-policy.json", summary)


@contextlib.contextmanager
def _kept_on_failure(job: Job) -> Iterator[None]:
    """A stage that fails has no output; the last good weights go where the error says."""
    try:
        yield
    except StageFailed as error:
        kept = Path(".scratch/failed") / f"policy@{job.name}"
        save_policy(job.policy, job.checkpoints.tokenizer, kept)
        raise StageFailed(f"{error}\n  the last good weights are in {kept}") from error


class Checkpoints:
    """The policy along its path, one directory each, and the list that evaluation reads.

    They lie in a directory that outlives a kill, until `put_into` makes them part of the output.
    """

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        self.directory, self.tokenizer = directory, tokenizer
        self.saved: list[dict[str, Any]] = []

    def save(self, policy: PreTrainedModel, step: int, updates: int) -> None:
        """Keep the policy after `step` steps, which were `updates` optimizer updates."""
        name = f"step-{step:05d}"
        with artifacts.write_directory(self.directory / name) as directory:
            save_policy(policy, self.tokenizer, directory)
        self.saved.append({"checkpoint": name, "step": step, "updates": updates})

    def resume(self, saved: list[dict[str, Any]]) -> None:
        """Go on with these; what a killed process wrote after them is removed."""
        self.saved = saved
        names = {checkpoint["checkpoint"] for checkpoint in saved}
        for left in self.directory.iterdir():
            if left.name not in names:
                shutil.rmtree(left)

    def cut(self, step: int) -> None:
        """Forget the checkpoints after `step`."""
        self.saved = [c for c in self.saved if c["step"] <= step]

    def has(self, step: int) -> bool:
        return any(c["step"] == step for c in self.saved)

    def put_into(self, directory: Path) -> None:
        """Those on the list, and the list. They stay where they are too: a kill may still come."""
        for checkpoint in self.saved:
            source = self.directory / checkpoint["checkpoint"]
            shutil.copytree(source, directory / source.name, copy_function=_link)
        artifacts.write_json(directory / "checkpoints.json", self.saved)


def _link(source: str, target: str) -> None:
    """The same file under another name, which costs no space; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class Job:
    """What every kind of candidate needs."""

    def __init__(
        self,
        pipeline: config.Pipeline,
        name: str,
        clock: Clock,
        tracked: tracking.Run,
        scratch: resume.Scratch,
    ) -> None:
        self.pipeline, self.name, self.clock = pipeline, name, clock
        self.tracked, self.scratch = tracked, scratch
        self.candidate = pipeline.candidates[name]
        self.init = pipeline.rounds[self.candidate.round].init
        self.incoming = common.RUNS / self.candidate.from_ / "promoted"
        self.start_directory = self.incoming if self.init == "previous" else INITIAL
        self.seed = pipeline.seed_for("policy", name)
        tokenizer = load_tokenizer(pipeline.model, self.incoming)
        self.checkpoints = Checkpoints(scratch.files, tokenizer)
        self.codec = TextCodec(tokenizer, pipeline.model)
        self.book = PromptBook(common.TABLES / "prompts.parquet", self.codec)
        self.device = device_of(pipeline.model)
        self.policy = load_policy(common.need(self.start_directory), self.device)
        if pipeline.model.gradient_checkpointing:
            enable_gradient_checkpointing(self.policy)
        # Not requires_grad_(False): torch multiplies frozen weights another way, which rounds another
        # way, and the KL at the start would not be 0. Nothing here runs the start under autograd.
        self.start = load_policy(self.start_directory, self.device).eval()
        self.reference = REFERENCES[self.candidate.reference](self)
        self.reference_digest = (
            None if self.reference is None else state_digest(self.reference.state_dict())
        )
        self.alarms: list[dict[str, Any]] = []

    def alarm(self, name: str, value: float, message: str) -> None:
        """Warn, and keep it for whoever decides about the candidate."""
        log.warning("policy@%s: %s", self.name, message)
        self.alarms.append({"name": name, "value": value, "message": message})


def _initial(job: Job) -> PreTrainedModel:
    if job.init == "initial":
        return job.start
    return load_policy(common.need(INITIAL), job.device).eval()


def _previous(job: Job) -> PreTrainedModel:
    if job.init == "previous":
        return job.start
    return load_policy(job.incoming, job.device).eval()


REFERENCES: dict[str, Callable[[Job], PreTrainedModel | None]] = {
    "none": lambda job: None,
    "previous": _previous,
    "initial": _initial,
    "ema": lambda job: following(job.start),
}


class Course:
    """A trainer's way through its steps: continued from the last checkpoint, told to MLflow, saved when due."""

    def __init__(self, job: Job, trainer: Trainer, source: Path) -> None:
        self.job, self.trainer = job, trainer
        self.history: list[dict[str, float]] = []
        """Metrics of the first update and of the last ones."""
        if not job.scratch.restore(self._apply):
            job.checkpoints.resume([])
            job.tracked.dataset(source, job.candidate.learns_from, "training")

    def note(self, metrics: dict[str, float], updates: int) -> None:
        """Metrics after so many optimizer updates."""
        self.job.tracked.metrics(metrics, updates)
        self.history = [*self.history[:1], *self.history[1:][1 - LOOKED_BACK :], metrics]

    def stepped(self) -> None:
        """The trainer's step is done, with all that belongs to it. Raises Interrupted if asked to stop."""
        self.job.scratch.step(self.trainer.position, self._collect)

    def _collect(self) -> dict[str, Any]:
        return {
            "trainer": self.trainer.state_dict(),
            "history": self.history,
            "checkpoints": self.job.checkpoints.saved,
            "clock": self.job.clock.state_dict(),
            "tracked": self.job.tracked.position(),
        }

    def _apply(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(state["trainer"])
        self.history = state["history"]
        self.job.checkpoints.resume(state["checkpoints"])
        self.job.clock.load_state_dict(state["clock"])
        self.job.tracked.resume(state["tracked"])


def reinforce(job: Job, candidate: config.RlCandidate) -> dict[str, Any]:
    """Sample, score, update. x of every curve is optimizer updates, the same for all candidates."""
    source = common.need(common.RUNS / candidate.learns_from)
    committee = Committee.load(source, job.codec, job.pipeline.model, job.device)
    critic = None
    if candidate.value is not None:
        critic = _critic(candidate.value, committee, source, job)
    trainer = RlTrainer(
        candidate, job.pipeline.model, critic=critic, **_sampling(job, candidate, committee)
    )
    return _follow(job, candidate, trainer)


def learn_from_own_pairs(job: Job, candidate: config.OnlinePreferenceCandidate) -> dict[str, Any]:
    """Sample, label by the committee, learn from the pairs."""
    source = common.need(common.RUNS / candidate.learns_from)
    committee = Committee.load(source, job.codec, job.pipeline.model, job.device)
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
    course = Course(job, trainer, common.RUNS / candidate.learns_from)
    if isinstance(trainer, RlTrainer):
        for _ in trainer.warm_up():
            course.stepped()
    stage, done = f"policy@{job.name}", trainer.steps_done
    with Progress(stage, candidate.steps, done=done) as progress:
        for step, batch, metrics in trainer.run():
            updates = trainer.learner.updates
            course.note(metrics, updates)
            progress.update(
                step,
                tokens=batch.num_tokens,
                proxy=metrics["policy/proxy"],
                kl=metrics["policy/kl_nats"],
            )
            if step % candidate.checkpoint_every == 0 or step == candidate.steps:
                with trainer.learner.averaged():
                    job.checkpoints.save(job.policy, step, updates)
            course.stepped()
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
    first, last = course.history[0], course.history[-1]
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
        critic = ScalarModel.from_directory(job.start_directory, job.device)
    else:
        critic = ScalarModel.from_directory(source / "member_0", job.device)
        critic.rescale_(*committee.scales[0])
    if job.pipeline.model.gradient_checkpointing:
        enable_gradient_checkpointing(critic.backbone)
    return critic


def learn_from_pairs(job: Job, candidate: config.PreferenceCandidate) -> dict[str, Any]:
    """Updates on the round's pairs; where training samples nothing, a small probe keeps the curves comparable."""
    path = common.need(common.RUNS / candidate.learns_from / "pairs.parquet")
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
    course = Course(job, trainer, path)
    stage, done = f"policy@{job.name}", trainer.position
    with Progress(stage, trainer.total_updates, "updates", done=done) as progress:
        for update, tokens, metrics in trainer.run():
            if update % candidate.checkpoint_every == 0 or update == trainer.total_updates:
                with trainer.learner.averaged():
                    found = _probe(job)
                    stopped = _over_budget(job, candidate, found["policy/kl_nats"])
                    if stopped is None:
                        job.checkpoints.save(job.policy, update, update)
                metrics |= found
            course.note(metrics, update)
            shown = {"loss": metrics["policy/loss"]}
            if "policy/accuracy" in metrics:
                shown["accuracy"] = metrics["policy/accuracy"]
            progress.update(update, tokens=tokens, **shown)
            if stopped is not None:
                break
            course.stepped()
    first, last = course.history[0], course.history[-1]
    fallen = chosen_falls(course.history)
    if fallen is not None:
        job.alarm(
            "chosen_fell",
            fallen,
            f"the chosen answers lost {fallen:.2f} nats while the margin grew, so probability goes to "
            "answers that nobody compared; add a term {kind: sft}, or lower learning_rate",
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
