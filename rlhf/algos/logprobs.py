"""Log-probabilities and entropy from logits, aligned with the tokens that they predict."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf.algos.masking import check_devices, check_mask, place

PIECE = 2**22  # entries of a table of V columns that are worked on at a time


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits / temperature, in float32 or, if they are so already, float64."""
    _check_temperature(temperature)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1.0 else wide / temperature


def _pieces(table: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cuts (B, T, V) into parts of at most PIECE entries, or of one row where that is more."""
    num_sequences, num_tokens, size = table.shape
    rows = max(1, PIECE // max(1, size))
    tokens = min(max(1, num_tokens), rows)
    sequences = max(1, rows // tokens)
    for b in range(0, num_sequences, sequences):
        for t in range(0, num_tokens, tokens):
            yield slice(b, b + sequences), slice(t, t + tokens)


def _with_gradient(grad: Tensor) -> Tensor | slice:
    """Index of the places with a gradient; all of them without a copy, where all have one."""
    here = grad != 0
    return slice(None) if bool(here.all()) else here


def _normalised(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The chosen logit and the log-sum-exp of all, (B, T) each, piece by piece."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    chosen = torch.empty(ids.shape, dtype=wide, device=logits.device)
    normaliser = torch.empty_like(chosen)
    for piece in _pieces(logits):
        scaled = _scaled(logits[piece], temperature)
        chosen[piece] = scaled.gather(-1, ids[piece][..., None])[..., 0]
        normaliser[piece] = scaled.logsumexp(dim=-1)
    return chosen, normaliser


def _logprobs_gradient(
    grad: Tensor, logits: Tensor, ids: Tensor, normaliser: Tensor, temperature: float
) -> Tensor:
    """(B, T, V): grad * (one-hot of the chosen - softmax) / temperature; 0 where grad (B, T) is."""
    result = torch.zeros_like(logits)
    for piece in _pieces(logits):
        here = _with_gradient(grad[piece])
        weight = grad[piece][here][..., None]
        scaled = _scaled(logits[piece][here], temperature)
        part = (scaled - normaliser[piece][here][..., None]).exp_().mul_(-weight)
        part.scatter_add_(-1, ids[piece][here][..., None], weight)
        result[piece][here] = _divided_(part, temperature).to(result.dtype)
    return result


def _entropies(logits: Tensor, temperature: float) -> Tensor:
    """(B, T) entropies, piece by piece."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    entropy = torch.empty(logits.shape[:2], dtype=wide, device=logits.device)
    for piece in _pieces(logits):
        probs, logps = _distribution(logits[piece], temperature)
        entropy[piece] = -probs.mul_(logps).sum(dim=-1)
    return entropy


def _entropy_gradient(grad: Tensor, logits: Tensor, entropy: Tensor, temperature: float) -> Tensor:
    """(B, T, V): -grad * p (log p + entropy) / temperature; 0 where grad (B, T) is."""
    result = torch.zeros_like(logits)
    for piece in _pieces(logits):
        here = _with_gradient(grad[piece])
        probs, logps = _distribution(logits[piece][here], temperature)
        part = logps.add_(entropy[piece][here][..., None]).mul_(probs)
        part.mul_(-grad[piece][here][..., None])
        result[piece][here] = _divided_(part, temperature).to(result.dtype)
    return result


class _TokenLogprobs(torch.autograd.Function):
    """What autograd would do with the same formulas, but with no table beside the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        chosen, normaliser = _normalised(logits, ids, temperature)
        ctx.save_for_backward(logits, ids, normaliser)
        ctx.temperature = temperature
        return chosen - normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, normaliser = ctx.saved_tensors
        return _logprobs_gradient(grad, logits, ids, normaliser, ctx.temperature), None, None


class _TokenEntropy(torch.autograd.Function):
    """The same for the entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        entropy = _entropies(logits, temperature)
        ctx.save_for_backward(logits, entropy)
        ctx.temperature = temperature
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, entropy = ctx.saved_tensors
        return _entropy_gradient(grad, logits, entropy, ctx.temperature), None


def _distribution(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Probabilities and their logarithms, which are finite, so that p log p is 0 at p = 0."""
    logps = _scaled(logits, temperature).log_softmax(dim=-1)
    probs = logps.exp()
    return probs, logps.clamp_(min=torch.finfo(logps.dtype).min)


def _divided_(x: Tensor, temperature: float) -> Tensor:
    return x if temperature == 1.0 else x.div_(temperature)


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log pi(ids_t) of each token, as the chosen logit minus the log-sum-exp of all.

    No table of log-probs or probabilities is made: beside the logits there is only their gradient.
    Sampling at a temperature samples another policy; pass the sampler's temperature, so that the
    ratio to the sampling policy starts at 1.

    Args:
        logits: (B, T, V), those at t predict `ids` at t (see `response_outputs`); gradient flows,
            once: there is no second derivative. A place whose log-prob has no gradient gets exactly
            0, whatever stands there.
        ids: (B, T) integer.
        temperature: > 0.

    Returns: (B, T) nats <= 0, float32 (float64 for float64 logits).

    Raises: ValueError if shapes or devices do not fit or the temperature is not positive.
    """
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit ids {tuple(ids.shape)}")
    check_devices(logits, ids)
    _check_temperature(temperature)
    return _TokenLogprobs.apply(logits, ids.long(), temperature)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy -sum p log p of each next-token distribution; a logit of -inf adds 0.

    Args:
        logits: (B, T, V), gradient flows, once.
        temperature: > 0.

    Returns: (B, T) nats, from 0 to log V, float32 (float64 for float64 logits).

    Raises: ValueError if logits are no (B, T, V) or the temperature is not positive.
    """
    if logits.ndim != 3:
        raise ValueError(f"logits must be (B, T, V), got {tuple(logits.shape)}")
    _check_temperature(temperature)
    return _TokenEntropy.apply(logits, temperature)


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


def _project(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(1, N, V) logits of states (N, H), in the type of autocast where it is on."""
    return torch.nn.functional.linear(states, weight, bias)[None]


def _numbers(states: Tensor, weight: Tensor, count: int) -> Tensor:
    """(count, N) for what is computed of the logits, at least float32."""
    wide = torch.promote_types(torch.promote_types(states.dtype, weight.dtype), torch.float32)
    return torch.empty(count, len(states), dtype=wide, device=states.device)


def _head_gradient(
    grads: tuple[Tensor, Tensor | None],
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    constants: tuple[Tensor, Tensor],
    temperature: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of states (N, H), weight (V, H) and any bias (V,), summed up chunk by chunk in place.

    Args:
        grads: (N,) of the log-probs, and of the entropies or None.
        constants: (N,) log-sum-exp and entropy of the forward pass.
    """
    of_states, of_weight = torch.empty_like(states), torch.zeros_like(weight)
    of_bias = None if bias is None else torch.zeros_like(bias)
    for start in range(0, len(states), chunk_size):
        rows = slice(start, start + chunk_size)
        logits, here = _project(states[rows], weight, bias), ids[rows][None]
        normaliser, entropy = (constant[rows][None] for constant in constants)
        table = _logprobs_gradient(grads[0][rows][None], logits, here, normaliser, temperature)
        if grads[1] is not None:
            table += _entropy_gradient(grads[1][rows][None], logits, entropy, temperature)
        of_states[rows] = table[0] @ weight
        _add_product_(of_weight, table[0].T, states[rows])
        if of_bias is not None:
            of_bias += table[0].sum(dim=0)
    return of_states, of_weight, of_bias


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b, without a table of its own where all are of one type."""
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class _ChunkedHead(torch.autograd.Function):
    """Log-probs and entropies (N,) of states (N, H); no chunk's logits outlive it."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        chunk_size: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        # Filled in place: a small result kept between two large tables keeps their memory from reuse.
        chosen, normaliser, entropy = _numbers(states, weight, 3)
        for start in range(0, len(states), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _project(states[rows], weight, bias)
            (chosen[rows],), (normaliser[rows],) = _normalised(logits, ids[rows][None], temperature)
            (entropy[rows],) = _entropies(logits, temperature)
        ctx.save_for_backward(states, weight, bias, ids, normaliser, entropy)
        ctx.options = temperature, chunk_size
        device = states.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, ids, normaliser, entropy = ctx.saved_tensors
        grads = grad, entropy_grad if ctx.entropy_gradient else None
        device, dtype, enabled = ctx.autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            gradients = _head_gradient(
                grads, states, weight, bias, ids, (normaliser, entropy), *ctx.options
            )
        return *gradients, None, None, None, None


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
    chunk_size: int = 128,
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

    logprobs, entropy = _ChunkedHead.apply(
        hidden[mask], weight, bias, ids[mask].long(), temperature, chunk_size, entropy_gradient
    )
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
    return selected_logprobs(
        logits[:, :-1], input_ids[:, 1:], action_mask[:, 1:], temperature=temperature
    ).sum(dim=1)
