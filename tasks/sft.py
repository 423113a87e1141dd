"""Supervised fine-tuning: the base model learns the demonstrations and becomes the policy of round r0."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf import artifacts, config, contracts, resume, tracking
from rlhf.algos.masking import masked_sum, reduce
from rlhf.algos.types import LossOutput
from rlhf.champion import policy_digest
from rlhf.data.batching import Epochs, chunks
from rlhf.data.book import PromptBook
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import StageFailed
from rlhf.learner import Learner
from rlhf.models.policy import device_of, enable_gradient_checkpointing, load_base, save_policy
from rlhf.models.sequences import Sequences
from rlhf.optimise.forward import by_length, logprobs_of
from rlhf.progress import Clock, Progress
from tasks import common

OUT = common.RUNS / "r0" / "promoted"
METRICS = common.RUNS / "r0" / "metrics" / "sft.json"


def run(pipeline: config.Pipeline) -> None:
    """Reads data/source and data/tables; writes runs/r0/promoted and its metrics."""
    clock = Clock("sft")
    common.prepare_torch(pipeline.resources.threads.sft)
    with resume.open_scratch(
        pipeline,
        "sft",
        inputs=[common.SOURCE, common.need(common.TABLES)],
        params={
            "seed": pipeline.seed,
            "model": pipeline.model.model_dump(),
            "sft": pipeline.sft.model_dump(),
            "threads": pipeline.resources.threads.sft,
        },
    ) as scratch:
        with tracking.stage_run(
            pipeline,
            stage="sft",
            key="sft",
            round="r0",
            kind="sft",
            name="r0/sft",
            algorithm="sft",
            params={
                "sft": pipeline.sft.model_dump(),
                "model": pipeline.model.model_dump(),
                "seed": pipeline.seed,
            },
            inputs=scratch.key,
        ) as tracked:
            _train(pipeline, scratch, tracked, clock)
        scratch.finish()
    clock.write()


def _train(
    pipeline: config.Pipeline, scratch: resume.Scratch, tracked: tracking.Run, clock: Clock
) -> None:
    settings, device = pipeline.sft, device_of(pipeline.model)
    tokenizer = load_tokenizer(pipeline.model, None)
    codec = TextCodec(tokenizer, pipeline.model)
    with clock("data"):
        train, heldout = _read(common.TABLES, codec)
    model = load_base(pipeline.model, tokenizer, pipeline.seed_for("sft", "weights"))
    model.to(device)  # type: ignore[arg-type]
    if pipeline.model.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    train, heldout = train.to(device), heldout.to(device)

    order = torch.Generator().manual_seed(pipeline.seed_for("sft", "order"))
    lengths = train.attention_mask.sum(1).tolist()
    batches = Epochs(lengths, settings.batch_size, settings.epochs, order)
    total = batches.total
    learner = Learner(model, settings, total_updates=total, ema_decay=settings.ema_decay)
    model.train()  # what is loaded comes in evaluation mode
    best = _Best(settings.patience)
    parts: dict[str, resume.Stateful] = {
        "learner": learner, "batches": batches, "best": best, "clock": clock
    }  # fmt: skip

    def collect() -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in parts.items()}
        return {**states, "model": dict(model.state_dict()), "tracked": tracked.position()}

    def apply(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
        tracked.resume(state["tracked"])

    if not scratch.restore(apply):
        tracked.dataset(common.TABLES / "demonstrations.parquet", "demonstrations", "training")
    with Progress("sft", total, "updates", done=learner.updates) as progress:
        for _, rows in batches:
            with clock("training"):
                metrics = _update(learner, model, train, rows, settings, pipeline.model)
            tokens = int(train.lengths[rows].sum())
            step = learner.updates
            tracked.metrics({f"sft/{k}": v for k, v in metrics.items()}, step)
            if step % settings.evaluate_every == 0 or step == total:
                with clock("evaluation"), learner.averaged():
                    loss = heldout_loss(model, heldout, pipeline.model, settings.micro_batch_size)
                    best.offer(loss, step, model)
                tracked.metrics(
                    {"sft/heldout_loss_nats": loss, "sft/heldout_perplexity": math.exp(loss)}, step
                )
            progress.update(
                step, tokens=tokens, loss=metrics["loss"], heldout=best.latest or metrics["loss"]
            )
            if best.exhausted:
                break
            scratch.step(step, collect)
    model.load_state_dict(best.weights)
    with artifacts.write_directory(OUT) as directory:
        save_policy(model, tokenizer, directory)
    result = {
        "heldout_loss_nats": best.loss,
        "heldout_perplexity": math.exp(best.loss),
        "best_update": best.step,
        "updates": learner.updates,
        "stopped_early": best.exhausted,
    }
    tracked.summary({f"sft_result/{k}": float(v) for k, v in result.items()})
    artifacts.write_json(METRICS, {**result, "weights_sha256": policy_digest(OUT)})


def heldout_loss(
    model: PreTrainedModel, sequences: Sequences, settings: config.Model, batch_size: int
) -> float:
    """Mean negative log-likelihood of response tokens, nats per token."""
    model.eval()
    total = 0.0
    with torch.inference_mode():
        for rows in by_length(sequences, batch_size):
            part = sequences.select(rows)
            logprobs = logprobs_of(model, part, settings)
            total -= float(masked_sum(logprobs, part.response_mask))
    model.train()
    return total / int(sequences.response_mask.sum())


class _Best:
    """The weights with the lowest held-out loss so far, and when to give up on a lower one."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.loss, self.step, self.latest, self.worse = math.inf, 0, 0.0, 0
        self.weights: dict[str, torch.Tensor] = {}

    @property
    def exhausted(self) -> bool:
        return self.worse >= self.patience

    def offer(self, loss: float, step: int, model: torch.nn.Module) -> None:
        if not math.isfinite(loss):
            raise StageFailed(
                f"the held-out loss is {loss} at update {step}\n  mend: lower learning_rate"
            )
        self.latest = loss
        if loss < self.loss:
            self.loss, self.step, self.worse = loss, step, 0
            self.weights = copy.deepcopy(model.state_dict())
        else:
            self.worse += 1

    def state_dict(self) -> dict[str, Any]:
        """All of it, the weights not copied."""
        return {"weights": dict(self.weights), **{name: getattr(self, name) for name in _OF_BEST}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.weights = state["weights"]
        for name in _OF_BEST:
            setattr(self, name, state[name])


_OF_BEST = ("loss", "step", "latest", "worse")


def _update(
    learner: Learner,
    model: PreTrainedModel,
    train: Sequences,
    rows: list[int],
    settings: config.Sft,
    model_settings: config.Model,
) -> dict[str, float]:
    """One update on a batch: token-mean negative log-likelihood of the responses only."""
    num_tokens = float(train.lengths[rows].sum())

    def share(micro: list[int]) -> LossOutput:
        part = train.select(micro)
        logprobs = logprobs_of(model, part, model_settings)
        return LossOutput(reduce(-logprobs, part.response_mask, denominator=num_tokens), {})

    parts = chunks(rows, settings.micro_batch_size)
    return learner.update(
        ((float(len(part)), lambda part=part: share(part)) for part in parts),  # type: ignore[misc]
        name=f"demonstrations {sorted(rows)[:8]}",
    )


def _read(tables: Path, codec: TextCodec) -> tuple[Sequences, Sequences]:
    """Training and held-out demonstrations as tokens; the end token is part of the response."""
    book = PromptBook(common.need(tables / "prompts.parquet"), codec)
    table = contracts.read(tables / "demonstrations.parquet", contracts.DEMONSTRATIONS)
    parts = []
    for split in ("train", "heldout"):
        rows = table[table["split"] == split]
        parts.append(
            Sequences.from_rows(
                [book.tokens(key) for key in rows["prompt_id"]],
                [
                    codec.encode_response(text, ended)
                    for text, ended in zip(rows["response"], rows["ended"], strict=True)
                ],
                codec.pad_id,
            )
        )
    return parts[0], parts[1]


if __name__ == "__main__":
    common.main("sft", run)
