"""Passes of models over many sequences, in the micro-batches that training uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.algos.kl import full_kl
from rlhf.algos.logprobs import chunked_logprobs, token_entropy, token_logprobs
from rlhf.algos.masking import masked_sum
from rlhf.data.batching import chunks
from rlhf.models.policy import head_of, precision, response_hidden, response_logits
from rlhf.models.sequences import Sequences

LOGITS_AT_ONCE = 2**25  # entries of one (rows, T, V) table: 128 MiB in float32


def by_length(sequences: Sequences, size: int) -> list[list[int]]:
    """Rows of similar length together, in chunks of `size`, shortest first."""
    total = sequences.attention_mask.sum(1)
    order = torch.argsort(total, stable=True).tolist()
    return chunks(order, size)


@torch.no_grad()
def scatter(
    sequences: Sequences, batches: Sequence[Sequence[int]], compute: Callable[[Sequences], Tensor]
) -> Tensor:
    """(B, T) table put together from `compute(rows) -> (b, t)` of each batch; 0 elsewhere."""
    result = torch.zeros(sequences.response_ids.shape, device=sequences.response_ids.device)
    for rows in batches:
        part = compute(sequences.select(list(rows)))
        result[list(rows), : part.shape[1]] = part.float()
    return result


class TokenStats(NamedTuple):
    """(B, T) each, in nats: log-probs of the response tokens, and entropies of their distributions."""

    logprobs: Tensor
    entropy: Tensor | None


def token_stats(
    policy: PreTrainedModel,
    sequences: Sequences,
    model: config.Model,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
) -> TokenStats:
    """One forward pass's numbers at every response token; what stands outside the mask is unspecified.

    Args:
        model: dtype, and logits_chunk_tokens, the tokens that are projected onto the vocabulary at a
            time, which bounds memory; None: all at once. The same to the last bits of float32, not to
            the bit.
        temperature: > 0, on both.
        with_entropy: whether the entropy is computed.
        entropy_gradient: whether it carries one; autograd keeps tables of (B, T, V) for it.

    Raises: BadInput if `logits_chunk_tokens` is given and the model's head is not linear.
    """
    with precision(model, sequences.prompt_ids.device):
        if model.logits_chunk_tokens is not None:
            hidden = response_hidden(policy, sequences)
            weight, bias = head_of(policy)
            found = chunked_logprobs(
                hidden,
                weight,
                sequences.response_ids,
                sequences.response_mask,
                bias=bias,
                temperature=temperature,
                chunk_size=model.logits_chunk_tokens,
                entropy_gradient=with_entropy and entropy_gradient,
            )
            return TokenStats(found.logprobs, found.entropy if with_entropy else None)
        logits = response_logits(policy, sequences)
    logprobs = token_logprobs(logits, sequences.response_ids, temperature=temperature)
    if not with_entropy:
        return TokenStats(logprobs, None)
    if not entropy_gradient:
        logits = logits.detach()
    return TokenStats(logprobs, token_entropy(logits, temperature=temperature))


def logprobs_of(
    policy: PreTrainedModel,
    sequences: Sequences,
    model: config.Model,
    temperature: float = 1.0,
) -> Tensor:
    """(B, T) log-probs in nats of the response tokens under the policy; see `token_stats`."""
    return token_stats(policy, sequences, model, temperature=temperature).logprobs


@dataclass(frozen=True)
class Divergence:
    """Per sequence, (B,) each, in nats: exact KL(policy || reference) summed over the sampled path, mean entropy,
    and the log-probability of the sequence under the policy.
    """

    kl: Tensor
    entropy: Tensor
    logprob: Tensor


@torch.inference_mode()
def divergence(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    sequences: Sequences,
    model: config.Model,
    batch_size: int,
    temperature: float = 1.0,
) -> Divergence:
    """Full-vocabulary KL at every sampled prefix: the Rao-Blackwellised estimate of sequence KL.

    It is that of the distributions at the temperature that the sequences were sampled with.
    At most `batch_size` sequences at once, fewer where answers are long and the vocabulary large.
    """
    kl, entropy, logprob = (torch.zeros(len(sequences)) for _ in range(3))
    vocabulary = int(policy.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    per_row = vocabulary * max(1, sequences.response_ids.shape[1])
    for rows in by_length(sequences, max(1, min(batch_size, LOGITS_AT_ONCE // per_row))):
        part = sequences.select(rows)
        with precision(model, part.prompt_ids.device):
            logits = response_logits(policy, part)
            ref_logits = logits if reference is policy else response_logits(reference, part)
        apart = full_kl(logits, ref_logits, temperature)
        kl[rows] = masked_sum(apart, part.response_mask, dim=1).cpu()
        spread = token_entropy(logits, temperature=temperature)
        mean = masked_sum(spread, part.response_mask, dim=1) / part.lengths.clamp(min=1)
        entropy[rows] = mean.cpu()
        tokens = token_logprobs(logits, part.response_ids, temperature=temperature)
        logprob[rows] = masked_sum(tokens, part.response_mask, dim=1).cpu()
    return Divergence(kl, entropy, logprob)
