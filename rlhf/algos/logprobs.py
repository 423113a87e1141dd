"""Log-probabilities and entropy from logits, aligned with the tokens that they predict."""

import torch
from torch import Tensor

from rlhf.algos.masking import check_mask, masked_sum


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

    Raises: ValueError if shapes do not fit or the temperature is not positive.
    """
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit ids {tuple(ids.shape)}")
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
