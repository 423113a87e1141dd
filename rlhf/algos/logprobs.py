"""Log-probabilities and entropy from logits, aligned with the tokens that they predict."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf.algos.masking import check_devices, check_mask, masked_sum, place


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits / temperature, in float32 or, if they are so already, float64."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1.0 else wide / temperature


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log pi(ids_t) of each token, as the chosen logit minus the log-sum-exp of all.

    No log-softmax table is kept: float32 logits at temperature 1 are used where they stand.
    Sampling at a temperature samples another policy; pass the sampler's temperature, so that the
    ratio to the sampling policy starts at 1.

    Args:
        logits: (B, T, V), those at t predict `ids` at t (see `response_outputs`); gradient flows.
        ids: (B, T) integer.
        temperature: > 0.

    Returns: (B, T) nats <= 0, float32 (float64 for float64 logits).

    Raises: ValueError if shapes or devices do not fit or the temperature is not positive.
    """
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit ids {tuple(ids.shape)}")
    check_devices(logits, ids)
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, ids.long()[..., None])[..., 0]
    return chosen - scaled.logsumexp(dim=-1)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy -sum p log p of each next-token distribution; a logit of -inf adds 0.

    Args:
        logits: (B, T, V), gradient flows.
        temperature: > 0.

    Returns: (B, T) nats, from 0 to log V.

    Raises: ValueError if the temperature is not positive.
    """
    logps = _scaled(logits, temperature).log_softmax(dim=-1)
    probs = logps.exp()
    return -(probs * torch.where(probs > 0, logps, 0)).sum(dim=-1)


def selected_logprobs(
    logits: Tensor, ids: Tensor, mask: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """`token_logprobs` at the places of the mask alone: nothing else is widened to float32.

    Where logits come in half precision and a part of the places count, this saves the float32
    table of all the others. `chunked_logprobs` saves the table of logits, too.

    Args:
        logits: (B, T, V), those at t predict `ids` at t; gradient flows, exactly 0 at other places.
        ids: (B, T) integer; what stands outside the mask is never read.
        mask: (B, T) bool.
        temperature: > 0.

    Returns: (B, T) nats <= 0, 0 outside the mask; float32 (float64 for float64 logits).

    Raises: ValueError if shapes or devices do not fit or the temperature is not positive.
    """
    check_mask(mask, ids)
    if logits.ndim != 3 or logits.shape[:2] != mask.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit the mask {tuple(mask.shape)}")
    check_devices(mask, logits)
    return place(
        token_logprobs(logits[mask][None], ids[mask][None], temperature=temperature)[0], mask
    )


class ChunkedLogprobs(NamedTuple):
    """logprobs (B, T) nats <= 0 and entropy (B, T) nats >= 0, both 0 outside the mask."""

    logprobs: Tensor
    entropy: Tensor


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 512,
    entropy_gradient: bool = False,
) -> ChunkedLogprobs:
    """Log-probs and entropy from the states before the output head; no (B, T, V) table ever exists.

    Only the places of the mask are projected, `chunk_size` of them at a time. A chunk's logits are
    forgotten at once and projected again in the backward pass. The tables of V columns that exist
    together have `chunk_size` rows, a handful of them, however long the sequences; the price is one
    more product of states and weight. Under autocast the product is in its type, as in the head
    itself; what follows is float32. In the backward pass the gradients of the weight are added up
    chunk by chunk in the weight's own type.

    Args:
        hidden: (B, T, H) states, those at t predict `ids` at t (see `response_outputs`); gradient
            flows, exactly 0 outside the mask, where they are never read.
        weight: (V, H) of the output head, gradient flows.
        ids: (B, T) integer; what stands outside the mask is never read.
        mask: (B, T) bool.
        bias: (V,) of the output head, gradient flows.
        temperature: > 0.
        chunk_size: tokens >= 1 that are projected at a time.
        entropy_gradient: whether the entropy carries one, which makes the backward pass dearer;
            otherwise it is a constant, for metrics.

    Returns: see `ChunkedLogprobs`; float32 (float64 for float64 states and weight).

    Raises: ValueError if shapes or devices do not fit, the temperature is not positive or
        chunk_size is below 1.
    """
    check_mask(mask, ids)
    if hidden.ndim != 3 or hidden.shape[:2] != mask.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} do not fit the mask {tuple(mask.shape)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[2]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit hidden {tuple(hidden.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
    check_devices(mask, hidden, weight, *([] if bias is None else [bias]))
    if not chunk_size >= 1:
        raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")

    def project(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scaled = _scaled(torch.nn.functional.linear(states, weight, bias), temperature)[None]
        logprobs = token_logprobs(scaled, tokens[None])[0]
        # Last, since the backward pass projects again only as far as it needs to.
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            return logprobs, token_entropy(scaled)[0]

    chunks = [
        checkpoint(project, states, tokens, use_reentrant=False, preserve_rng_state=False)
        for states, tokens in zip(
            hidden[mask].split(chunk_size), ids[mask].split(chunk_size), strict=True
        )
    ]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return ChunkedLogprobs(place(logprobs, mask), place(entropy, mask))


def response_outputs(outputs: Tensor, num_response_tokens: int) -> Tensor:
    """The model's outputs at the positions that precede each token of the response.

    The output at position s has seen tokens up to s: its logits predict token s + 1, and a critic's
    value there is that of the state before token s + 1. The response is the last
    `num_response_tokens` columns; the prompt before it is padded on the left.

    Args:
        outputs: (B, S, ...) logits or values.
        num_response_tokens: T, 1 to S - 1.

    Returns: (B, T, ...), a view.

    Raises: ValueError if no column stands before the response.
    """
    size = outputs.shape[1]
    if not 1 <= num_response_tokens < size:
        raise ValueError(f"a response of {num_response_tokens} of {size} tokens leaves no prompt")
    return outputs[:, size - num_response_tokens - 1 : -1]


def sequence_logprobs(
    logits: Tensor, input_ids: Tensor, action_mask: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Log-probability of the marked tokens of each sequence, whatever the padding side.

    Args:
        logits: (B, S, V), those at s predict the token at s + 1; gradient flows.
        input_ids: (B, S) integer.
        action_mask: (B, S) bool, True at the tokens to sum over, not at column 0, which nothing
            predicts.
        temperature: > 0.

    Returns: (B,) nats <= 0; 0 for a sequence without a marked token.

    Raises: ValueError if shapes do not fit or column 0 is marked.
    """
    check_mask(action_mask, input_ids)
    if bool(action_mask[:, 0].any()):
        raise ValueError("action_mask marks column 0, which no logits predict")
    logps = token_logprobs(logits[:, :-1], input_ids[:, 1:], temperature=temperature)
    return masked_sum(logps, action_mask[:, 1:], dim=1)
