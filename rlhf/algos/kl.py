"""KL(policy || reference) in nats: estimators from samples of the policy, and the exact value.

An estimator has a value and a gradient, and they are chosen separately. With expectations over
samples of the policy, r = log pi - log ref (Schulman 2020, "Approximating KL divergence"), and
KL = KL(pi || ref), the expected value, and what the term adds in expectation to the gradient of
the loss where it stands in the loss, and where it is taken off the reward:

    name                 expected value  gradient in the loss  gradient in the reward
    k1 = r               KL              0                     that of KL
    k2 = r^2 / 2         biased, >= 0    that of KL            that of E k2 less that of KL
    k3 = exp(-r) - 1 + r KL              that of KL(ref || pi) that of KL less that of KL(ref || pi)
    k3_straight_through  KL              that of KL, by k2     as k3
    full KL, exact       KL              that of KL            0 at its own position

So k1 belongs in the reward; k2 or k3_straight_through in the loss. A gradient in the loss is that
of each next-token distribution at the prefixes that were sampled: it leaves out that a token now
changes which prefixes come later. A term in the reward sees that, through the advantages of earlier
tokens: k1 there gives the gradient of the KL of whole sequences. All of it holds for samples of the
current policy; once updates have moved it away, values and gradients are those of other prefixes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.algos.logprobs import _scaled
from rlhf.algos.masking import check_devices, check_mask, place, reduce, select, token_metric
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

    Raises: ValueError if shapes or devices differ or the temperature is not positive.
    """
    if logits.shape != ref_logits.shape:
        raise ValueError(f"shapes differ: {tuple(logits.shape)}, {tuple(ref_logits.shape)}")
    check_devices(logits, ref_logits)
    logps = _scaled(logits, temperature).log_softmax(dim=-1)
    ref_logps = _scaled(ref_logits.detach(), temperature).log_softmax(dim=-1)
    probs = logps.exp()
    possible = probs > 0
    log_ratio = torch.where(possible, logps, 0) - torch.where(possible, ref_logps, 0)
    kl = (probs * log_ratio).sum(dim=-1)
    return torch.where(kl < 0, kl - kl.detach(), kl)  # rounding: 0, but with its gradient


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
    logprobs = select(logprobs, response_mask)
    ref_logprobs = select(ref_logprobs.detach(), response_mask)
    per_token = KL_ESTIMATORS[estimator](logprobs, ref_logprobs)
    loss = reduce(per_token, response_mask, reduction, denominator=denominator)
    value = k3(logprobs.detach(), ref_logprobs)  # no graph for a metric
    return LossOutput(loss, {"kl_ref_nats": token_metric(value, response_mask)})


def full_kl_loss(
    logits: Tensor,
    ref_logits: Tensor,
    response_mask: Tensor,
    *,
    temperature: float = 1.0,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Exact KL(policy || reference) of the next-token distributions as a term of the loss.

    Only the prefixes are samples, of whatever policy: at each of them value and gradient are exact,
    without the noise of the sampled token. That is the gradient of k2 in expectation, and like it
    leaves out how a token changes later prefixes. Several float32 tables of (tokens, V) are kept
    for the backward pass: for a small V.

    Args:
        logits: (B, T, V), those at t predict the token at t; gradient flows, exactly 0 outside the
            mask, where they are never read.
        ref_logits: (B, T, V), constant.
        response_mask: (B, T) bool.
        temperature: > 0, of both policies.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () nats >= 0 and detached metric kl_ref_nats >= 0, the exact mean per token;
        infinite where the policy goes where the reference cannot.

    Raises: ValueError if shapes or devices differ, the temperature is not positive or the mask
        selects nothing.
    """
    check_mask(response_mask)
    if logits.shape != ref_logits.shape or logits.shape[:-1] != response_mask.shape:
        raise ValueError(
            f"shapes differ: mask {tuple(response_mask.shape)}, logits {tuple(logits.shape)}, "
            f"reference {tuple(ref_logits.shape)}"
        )
    check_devices(response_mask, logits, ref_logits)
    chosen = full_kl(logits[response_mask], ref_logits[response_mask], temperature)
    per_token = place(chosen, response_mask)
    loss = reduce(per_token, response_mask, reduction, denominator=denominator)
    return LossOutput(loss, {"kl_ref_nats": token_metric(per_token, response_mask)})


def adapt_kl_coef(
    coef: float, kl_nats: float, *, target_nats: float, horizon: int, num_samples: int
) -> float:
    """The coefficient for the next batch, steered to a target KL (Ziegler et al. 2019).

    arXiv:1909.08593, section 2.2: coef * (1 + e * num_samples / horizon), where the relative error
    e = clip(kl_nats / target_nats - 1, -0.2, 0.2). It moves by at most a fifth, up where the policy
    is further from the reference than wanted. It is proportional and multiplicative: from a start
    that is wrong by orders of magnitude it takes many batches, and 0 would stay 0.

    Args:
        coef: > 0, reward or loss per nat.
        kl_nats: KL(policy || reference) of the last batch, in the unit of the target: both per
            sequence, or both per token. A sampled mean may lie below 0.
        target_nats: > 0.
        horizon: sequences over which a steady error e changes the coefficient by about the factor
            exp(e); at least `num_samples`, so that the factor stays positive.
        num_samples: sequences >= 1 in the last batch.

    Returns: the next coefficient, > 0.

    Raises: ValueError if a number is out of its bounds or kl_nats is not a number.
    """
    if not (0 < coef < math.inf and 0 < target_nats < math.inf):
        raise ValueError(f"coef and target_nats must be positive, got {coef} and {target_nats}")
    if not 1 <= num_samples <= horizon:
        raise ValueError(
            f"need 1 <= num_samples <= horizon, got num_samples {num_samples}, horizon {horizon}"
        )
    if math.isnan(kl_nats):
        raise ValueError("kl_nats is not a number")
    error = min(max(kl_nats / target_nats - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
