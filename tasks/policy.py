"""One candidate's optimisation: by reinforcement learning on the committee's score, or from pairs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf import artifacts, config, contracts, tracking
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import BadInput
from rlhf.models.policy import device_of, load_policy, save_policy
from rlhf.models.scalar import ScalarModel
from rlhf.optimise.preference import PairIds, PreferenceTrainer
from rlhf.optimise.rl import RlTrainer
from rlhf.progress import Clock, Progress
from rlhf.rewards.committee import Committee
from rlhf.rollout import sample
from tasks import common

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
        summary = KINDS[candidate.kind](job, candidate)
        job.checkpoints.finish()
        artifacts.write_json(
            common.RUNS / candidate.round / "metrics" / f"{name}-policy.json", summary
        )
    clock.write()


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
        # Not requires_grad_(False): torch multiplies frozen weights another way, which rounds another
        # way, and the KL at the start would not be 0. Nothing here runs the reference under autograd.
        self.reference = load_policy(incoming, device).eval()


def reinforce(job: Job, candidate: config.RlCandidate) -> dict[str, float]:
    """Sample, score, update. x of every curve is optimizer updates, the same for all candidates."""
    model = job.pipeline.model
    source = common.need(common.RUNS / candidate.learns_from)
    committee = Committee.load(source, job.codec, model, job.device)
    critic = None
    if candidate.value is not None:
        critic = _critic(candidate.value, committee, source, job)
    trainer = RlTrainer(
        candidate,
        model,
        policy=job.policy,
        reference=job.reference,
        critic=critic,
        score=lambda prompts, texts, ended: committee.score(
            prompts, texts, ended, aggregate=candidate.aggregate
        ),
        codec=job.codec,
        prompts=[job.book.tokens(key) for key in job.book.of("rl")],
        seed=job.seed,
        clock=job.clock,
    )
    job.tracked.dataset(source, candidate.learns_from, "training")
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    with Progress(f"policy@{job.name}", candidate.steps) as progress:
        for step, experience, metrics in trainer.run():
            updates = trainer.learner.updates
            job.tracked.metrics(metrics, updates)
            progress.update(
                step,
                tokens=experience.num_tokens,
                proxy=metrics["policy/proxy"],
                kl=metrics["policy/kl_nats"],
            )
            if step % candidate.checkpoint_every == 0 or step == candidate.steps:
                job.checkpoints.save(job.policy, step, updates)
            first, last = first or metrics, metrics
    names = {
        "proxy": "policy/proxy",
        "kl_nats": "policy/kl_nats",
        "length_tokens": "policy/length_tokens",
    }
    result = {f"{key}_first": first[name] for key, name in names.items()}
    return result | {f"{key}_last": last[name] for key, name in names.items()}


def _critic(value: config.Value, committee: Committee, source: Path, job: Job) -> ScalarModel:
    """From the committee's first member, on the committee's scale, or from the policy with a head at zero."""
    if value.init == "policy":
        return ScalarModel.from_directory(job.incoming, job.device)
    critic = ScalarModel.from_directory(source / "member_0", job.device)
    critic.rescale_(*committee.scales[0])
    return critic


def learn_from_pairs(job: Job, candidate: config.PreferenceCandidate) -> dict[str, float]:
    """Updates on the round's pairs; where training samples nothing, a small probe keeps the curves comparable."""
    path = common.need(common.RUNS / candidate.learns_from / "pairs.parquet")
    job.tracked.dataset(path, candidate.learns_from, "training")
    trainer = PreferenceTrainer(
        candidate,
        job.pipeline.model,
        policy=job.policy,
        reference=job.reference,
        pairs=_pairs(path, candidate, job),
        pad_id=job.codec.pad_id,
        seed=job.seed,
        clock=job.clock,
    )
    first: dict[str, float] = {}
    with Progress(f"policy@{job.name}", trainer.total_updates, "updates") as progress:
        for update, tokens, metrics in trainer.run():
            if update % candidate.checkpoint_every == 0 or update == trainer.total_updates:
                job.checkpoints.save(job.policy, update, update)
                metrics |= _probe(job)
            job.tracked.metrics(metrics, update)
            progress.update(
                update,
                tokens=tokens,
                loss=metrics["policy/loss"],
                accuracy=metrics["policy/accuracy"],
            )
            first, last = first or metrics, metrics
    names = ("loss", "accuracy", "margin", "chosen_logp_change_nats")
    result = {f"{key}_first": first[f"policy/{key}"] for key in names}
    return result | {f"{key}_last": last[f"policy/{key}"] for key in names}


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
    """KL to the reference, length and ending of a few fresh answers to training prompts."""
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
        found = divergence(job.policy, job.reference, sequences, model, batch_size=NUM_PROBES)
    return {
        "policy/kl_nats": float(found.kl.mean()),
        "policy/length_tokens": float(sequences.lengths.float().mean()),
        "policy/ended_fraction": sum(c.ended for c in completions) / NUM_PROBES,
    }


KINDS: dict[str, Callable[[Job, Any], dict[str, float]]] = {
    "rl": reinforce,
    "preference": learn_from_pairs,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidate", required=True, help="like r1-ppo")
    arguments = parser.parse_args()
    common.main(f"policy@{arguments.candidate}", lambda p: run(p, arguments.candidate))
