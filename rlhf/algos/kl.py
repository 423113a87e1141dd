"""KL(policy || reference) in nats: estimators from samples of the policy, and the exact value.

An estimator has a value and, inside a loss, a gradient, and they are chosen separately. With
expectations over samples of the policy and r = log pi - log ref (Schulman 2020, "Approximating KL
divergence"):

    name                 value per sample  expected value  expected gradient in a loss
    k1                   r                 KL(pi || ref)   0
    k2                   r^2 / 2           biased, >= 0    that of KL(pi || ref)
    k3                   exp(-r) - 1 + r   KL(pi || ref)   that of KL(ref || pi)
    k3_straight_through  that of k3        KL(pi || ref)   that of KL(pi || ref), by k2

In the reward only the value is used; in the loss the gradient is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.algos.logprobs import _scaled
from rlhf.algos.masking import check_mask, reduce, select, token_metric
from rlhf.algos.types import LossOutput


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The log-ratio r. Value: unbiased, either sign. Gradient in a loss: 0 in expectation.

    Args:
        logprobs: (B, T) nats, of tokens sampled from the current policy.
        ref_logprobs: (B, T) nats, of the same tokens under the reference.

    Returns: (B, T) nats, an estimate of KL(policy || reference).
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """r^2 / 2. Value: biased, >= 0. Gradient in a loss: unbiased for KL(policy || reference).

    Args:
        logprobs: (B, T) nats, of tokens sampled from the current policy.
        ref_logprobs: (B, T) nats, of the same tokens under the reference.

    Returns: (B, T) nats.
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(-r) - 1 + r. Value: unbiased, >= 0. Gradient in a loss: that of KL(reference || policy).

    Args:
        logprobs: (B, T) nats, of tokens sampled from the current policy.
        ref_logprobs: (B, T) nats, of the same tokens under the reference.

    Returns: (B, T) nats, an estimate of KL(policy || reference).
    """
    log_ratio = logprobs - ref_logprobs
    return (torch.expm1(-log_ratio) + log_ratio).clamp(min=0)


def k3_straight_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Value of k3 (unbiased, >= 0), gradient of k2 (unbiased for KL(policy || reference)).

    Args:
        logprobs: (B, T) nats, of tokens sampled from the current policy.
        ref_logprobs: (B, T) nats, of the same tokens under the reference.

    Returns: (B, T) nats, an estimate of KL(policy || reference).
    """
    squared = k2(logprobs, ref_logprobs)
    return k3(logprobs, ref_logprobs).detach() + (squared - squared.detach())


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_straight_through": k3_straight_through,
}


def full_kl(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Exact KL(policy || reference) of each next-token distribution, summed over the vocabulary.

    No samples are involved, so value and gradient are both exact at each position.

    Args:
        logits: (B, T, V), gradient flows.
        ref_logits: (B, T, V), constant.
        temperature: > 0, of both policies.

    Returns: (B, T) nats >= 0; infinite where the policy goes where the reference cannot.

    Raises: ValueError if shapes differ or the temperature is not positive.
    """
    if logits.shape != ref_logits.shape:
        raise ValueError(f"shapes differ: {tuple(logits.shape)}, {tuple(ref_logits.shape)}")
    logps = _scaled(logits, temperature).log_softmax(dim=-1)
    ref_logps = _scaled(ref_logits.detach(), temperature).log_softmax(dim=-1)
    probs = logps.exp()
    possible = probs > 0
    log_ratio = torch.where(possible, logps, 0) - torch.where(possible, ref_logps, 0)
    return (probs * log_ratio).sum(dim=-1).clamp(min=0)


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    estimator: str = "k3_straight_through",
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """KL(policy || reference) as a term of the loss, from samples of the current policy.

    What it does to the policy is the estimator's gradient: `k1` does nothing in expectation, `k3`
    pulls along KL(reference || policy). To leave sequences out, such as groups without spread, mask
    them and pass the whole batch's `denominator`.

    Args:
        logprobs: (B, T) nats, gradient flows.
        ref_logprobs: (B, T) nats, constant.
        response_mask: (B, T) bool; values elsewhere are never read.
        estimator: one of KL_ESTIMATORS.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () nats and detached metric kl_ref_nats (k3, >= 0, mean per token).

    Raises: ValueError if shapes differ, a name is unknown or the mask selects nothing.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}; use one of {', '.join(KL_ESTIMATORS)}")
    check_mask(response_mask, logprobs, ref_logprobs)
    logprobs = select(logprobs, response_mask)
    ref_logprobs = select(ref_logprobs.detach(), response_mask)
    per_token = KL_ESTIMATORS[estimator](logprobs, ref_logprobs)
    loss = reduce(per_token, response_mask, reduction, denominator=denominator)
    value = k3(logprobs.detach(), ref_logprobs)
    return LossOutput(loss, {"kl_ref_nats": token_metric(value, response_mask)})
