"""The built-in batched sampler: a key-value cache, and rows that ended leave the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf.data.batching import pad
from rlhf.models.policy import parameters_accepted
from rlhf.models.sequences import position_ids

COMPACT_BELOW = 0.8  # drop ended rows once fewer than this share of the batch is alive


@dataclass(frozen=True)
class Completion:
    """One sampled answer. `ids` includes end-of-sequence when `ended`; `logprobs` are in nats."""

    ids: list[int]
    logprobs: list[float]
    ended: bool


class Sampling:
    """How far a call of `sample` is, for checkpoints: what it has drawn, and its generator's state."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []
        """In the order of sampling, which is not that of the prompts."""
        self.generator: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        found = self.completions
        return {
            "ids": torch.tensor([i for c in found for i in c.ids], dtype=torch.int64),
            "logprobs": torch.tensor([p for c in found for p in c.logprobs], dtype=torch.float32),
            "lengths": torch.tensor([len(c.ids) for c in found], dtype=torch.int64),
            "ended": torch.tensor([c.ended for c in found], dtype=torch.bool),
            "generator": self.generator,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        lengths = state["lengths"].tolist()
        rows = zip(
            state["ids"].split(lengths),
            state["logprobs"].split(lengths),
            state["ended"].tolist(),
            strict=True,
        )
        self.completions = [Completion(i.tolist(), p.tolist(), e) for i, p, e in rows]
        self.generator = state["generator"]


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    eos_id: int,
    pad_id: int,
    seed: int,
    batch_size: int,
    dtype: str = "float32",
    on_batch: Callable[[int, int], None] | None = None,
    state: Sampling | None = None,
) -> list[Completion]:
    """One answer to each prompt, by ancestral sampling at a temperature; the result keeps the order.

    Args:
        model: any causal language model of transformers.
        prompts: token ids, not padded.
        max_new_tokens: longest answer, end-of-sequence included.
        temperature: > 0; log-probs are those of the distribution sampled from.
        eos_id: ends an answer. pad_id: fills; it is never attended to.
        seed: fixes the answers, together with the prompts, their order and `batch_size`.
        batch_size: answers in flight at once.
        dtype: float32, or bfloat16 to compute in it over float32 weights, as training does.
        on_batch: called after each batch with (answers done, tokens sampled in the batch).
        state: where it is after each batch; one that was saved by a call with the same arguments is
            continued, with the same result.

    Returns: one Completion per prompt, at least one token each.
    Raises: ValueError if a prompt is empty.
    """
    if any(not prompt for prompt in prompts):
        raise ValueError("an empty prompt has no token to continue from")
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    state = state or Sampling()
    if state.generator is not None:
        generator.set_state(state.generator)
    was_training = model.training
    model.eval()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(len(state.completions), len(order), batch_size):
        rows = order[start : start + batch_size]
        ids, mask = pad([prompts[i] for i in rows], pad_id, side="left")
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            completions = _sample_batch(
                model,
                ids.to(device),
                mask.to(device),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                eos_id=eos_id,
                generator=generator,
            )
        state.completions += completions
        state.generator = generator.get_state()
        if on_batch is not None:
            on_batch(len(state.completions), sum(len(c.ids) for c in completions))
    model.train(was_training)
    results = dict(zip(order, state.completions, strict=True))
    return [results[i] for i in range(len(prompts))]


def _sample_batch(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    eos_id: int,
    generator: torch.Generator,
) -> list[Completion]:
    num_rows, device = prompt_ids.shape[0], prompt_ids.device
    accepted = parameters_accepted(model)
    cache = DynamicCache(config=model.config)
    ids = torch.full((num_rows, max_new_tokens), eos_id, device=device)
    logprobs = torch.zeros((num_rows, max_new_tokens), device=device)
    lengths = torch.full((num_rows,), max_new_tokens, device=device)
    ended = torch.zeros(num_rows, dtype=torch.bool, device=device)
    alive = torch.arange(num_rows, device=device)  # rows of the output still in the batch
    mask, inputs = prompt_mask.long(), prompt_ids
    for step in range(max_new_tokens):
        logits = _next_logits(model, accepted, inputs, mask, cache)
        if temperature != 1.0:
            logits = logits / temperature
        tokens, token_logprobs = _draw(logits, generator)
        ids[alive, step], logprobs[alive, step] = tokens, token_logprobs
        stops = (tokens == eos_id) & ~ended[alive]
        lengths[alive[stops]] = step + 1
        ended[alive[stops]] = True
        keep = ~ended[alive]
        num_kept = int(keep.sum())
        if num_kept == 0 or step == max_new_tokens - 1:
            break
        if num_kept < COMPACT_BELOW * len(alive):
            rows = keep.nonzero().squeeze(1)
            cache.batch_select_indices(rows)
            alive, mask, tokens = alive[rows], mask[rows], tokens[rows]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        inputs = tokens[:, None]
    columns = zip(ids.tolist(), logprobs.tolist(), lengths.tolist(), ended.tolist(), strict=True)
    return [Completion(i[:n], p[:n], e) for i, p, n, e in columns]


def _next_logits(
    model: PreTrainedModel,
    accepted: frozenset[str],
    inputs: Tensor,
    mask: Tensor,
    cache: DynamicCache,
) -> Tensor:
    """(rows, V) float32 logits of the next token."""
    arguments: dict[str, Any] = {"input_ids": inputs, "attention_mask": mask, "use_cache": True}
    arguments["cache" if "cache" in accepted else "past_key_values"] = cache
    if "position_ids" in accepted:
        arguments["position_ids"] = position_ids(mask)[:, -inputs.shape[1] :]
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = 1
    return model(**arguments).logits[:, -1].float()


def _draw(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample each row by the exponential race; returns tokens and their log-probs, (rows,) each."""
    probs = torch.softmax(logits, dim=-1)
    race = torch.empty_like(probs).exponential_(generator=generator)
    tokens = (probs / race).argmax(dim=-1)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens, chosen - torch.logsumexp(logits, dim=-1)
