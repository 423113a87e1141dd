"""Losses of the policy and of its value function during reinforcement learning.

Every entry of POLICY_LOSSES is called as `loss(logprobs, old_logprobs, advantages, response_mask,
reduction=..., denominator=..., **own)` and reports the same metrics, which are means over the
selected tokens whatever the reduction:

- `clip_fraction` in [0, 1]: tokens whose gradient the clip cuts (0 for a loss without one), those
  of every cut sequence for `gspo`, and those whose weight is bounded for `cispo`.
- `kl_old_nats` >= 0: k3 estimate of KL(old policy || policy), on samples of the old policy.
- `ratio_max`, `ratio_deviation_max`: the largest token ratio and the largest |ratio - 1|.

At ratio 1, on samples of the current policy, they all have the gradient of `reinforce`; they differ
in what they do once the policy has moved. Off-policy all of them take the prefixes as the old
policy wrote them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algos.masking import check_floating, check_mask, reduce, select, token_metric
from rlhf.algos.types import LossOutput

FAR_NATS = 80.0  # a log-ratio past every bound, whose exponential is still finite in float32


def _log_ratio(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Log ratio, gradient flowing to `logprobs`, and advantages; both 0 outside the mask."""
    check_mask(response_mask, logprobs, old_logprobs)
    check_floating(logprobs, old_logprobs, advantages)
    log_ratio = select(logprobs - old_logprobs.detach(), response_mask)
    return log_ratio, select(advantages.detach(), response_mask)


def _k3_of_old(log_ratio: Tensor) -> Tensor:
    """k3 of KL(old || policy) from samples of the old policy: r - 1 - log r, r = policy / old."""
    return (torch.expm1(log_ratio) - log_ratio).clamp(min=0)


def _policy_metrics(log_ratio: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The metrics that every loss reports, from a log-ratio that is 0 outside the mask."""
    log_ratio = log_ratio.detach()
    deviation = torch.expm1(log_ratio)
    return {
        "clip_fraction": token_metric(clipped.to(log_ratio.dtype), mask),
        "kl_old_nats": token_metric((deviation - log_ratio).clamp(min=0), mask),
        "ratio_max": torch.where(mask, log_ratio, -math.inf).max().exp(),
        "ratio_deviation_max": deviation.abs().max(),
    }


def _ratio(log_ratio: Tensor, bounded: Tensor) -> Tensor:
    """The ratio, but finite where `bounded`: there the loss no longer depends on one so large.

    An infinite ratio that a minimum or a factor of 0 discards still turns the gradient into NaN.
    """
    return log_ratio.clamp(max=torch.where(bounded, FAR_NATS, math.inf)).exp()


def _check_clips(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"need 0 <= clip_low <= 1 and clip_high >= 0: {clip_low}, {clip_high}")


def _clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Per-token min(r A, clip(r) A), and where the clipped term is the smaller one."""
    _check_clips(clip_low, clip_high)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.minimum(unclipped, clipped), clipped < unclipped


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Per token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - old_logprobs).
    For A < 0 and a large ratio it is unbounded; see `dual_clip_policy_loss`.

    Args:
        logprobs: (B, T) nats, gradient flows.
        old_logprobs: (B, T), constants.
        advantages: (B, T), constants.
        response_mask: (B, T) bool; values elsewhere are never read.
        clip_low: in [0, 1].
        clip_high: >= 0.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () and detached metrics: clip_fraction in [0, 1], kl_old_nats >= 0 (k3),
        ratio_max, ratio_deviation_max.

    Raises: ValueError if shapes differ, response_mask selects nothing or a bound is illegal.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    ratio = _ratio(log_ratio, advantages >= 0)
    objective, clipped = _clipped_objective(ratio, advantages, clip_low, clip_high)
    loss = reduce(-objective, response_mask, reduction, denominator=denominator)
    return LossOutput(loss, _policy_metrics(log_ratio, clipped, response_mask))


def dual_clip_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Clipped surrogate with a floor for A < 0 (Ye et al. 2020, arXiv:1912.09729).

    Per token, where A < 0: -max(min(r A, clip(r) A), dual_clip A), else `clipped_policy_loss`.

    Args:
        logprobs: (B, T) nats, gradient flows.
        old_logprobs: (B, T), constants.
        advantages: (B, T), constants.
        response_mask: (B, T) bool; values elsewhere are never read.
        clip_low: in [0, 1].
        clip_high: >= 0.
        dual_clip: ratio > 1 + clip_high from which on a token with A < 0 is left alone.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () and detached metrics: clip_fraction in [0, 1], kl_old_nats >= 0 (k3),
        ratio_max, ratio_deviation_max.

    Raises: ValueError if shapes differ, response_mask selects nothing or a bound is illegal.
    """
    _check_clips(clip_low, clip_high)
    if not dual_clip > 1 + clip_high:
        raise ValueError(f"dual_clip must be above 1 + clip_high, got {dual_clip}")
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    ratio = log_ratio.clamp(max=FAR_NATS).exp()
    objective, clipped = _clipped_objective(ratio, advantages, clip_low, clip_high)
    floor = dual_clip * advantages
    floored = (advantages < 0) & (floor > objective)
    objective = torch.where(floored, floor, objective)
    loss = reduce(-objective, response_mask, reduction, denominator=denominator)
    return LossOutput(loss, _policy_metrics(log_ratio, clipped | floored, response_mask))


def reinforce_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Score-function estimator (Williams 1992), per token -A log pi.

    Its gradient is the policy gradient only on samples of the current policy: one update per
    rollout. `old_logprobs` serve the metrics, which show when that no longer holds.

    Args:
        logprobs: (B, T) nats, gradient flows.
        old_logprobs: (B, T), constants.
        advantages: (B, T), constants.
        response_mask: (B, T) bool; values elsewhere are never read.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () and detached metrics: clip_fraction (0), kl_old_nats >= 0 (k3), ratio_max,
        ratio_deviation_max.

    Raises: ValueError if shapes differ or response_mask selects nothing.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    loss = reduce(-advantages * logprobs, response_mask, reduction, denominator=denominator)
    metrics = _policy_metrics(log_ratio, torch.zeros_like(response_mask), response_mask)
    return LossOutput(loss, metrics)


def nll_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Weighted maximum likelihood, per token -A log pi, for sequences that were chosen.

    The formula is that of `reinforce`, the meaning is not: the weights A say how much a sequence
    counts, usually 1 or 0, and any number of passes over the same sequences is right, since nothing
    is claimed about the policy that wrote them. With the best of n, or all above a threshold, this
    is the training step of rejection sampling (RAFT: Dong et al. 2023, arXiv:2304.06767). It has
    no bound for A < 0, where the likelihood of a sequence falls for ever.

    Args:
        logprobs: (B, T) nats, gradient flows.
        old_logprobs: (B, T), constants.
        advantages: (B, T), the weights, constants; >= 0 for a loss with a minimum.
        response_mask: (B, T) bool; values elsewhere are never read.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () and detached metrics: clip_fraction (0), kl_old_nats >= 0 (k3), ratio_max,
        ratio_deviation_max.

    Raises: ValueError if shapes differ or response_mask selects nothing.
    """
    return reinforce_loss(
        logprobs,
        old_logprobs,
        advantages,
        response_mask,
        reduction=reduction,
        denominator=denominator,
    )


def importance_weighted_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Policy gradient with importance weights, per token -r A, r = exp(logprobs - old_logprobs).

    The surrogate that PPO clips (Schulman et al. 2017, arXiv:1707.06347, eq. 6). r corrects for the
    token, not for the prefix before it: the gradient is unbiased off-policy for one-token responses,
    and for longer ones up to the prefixes, which stay those of the old policy. Nothing bounds r,
    and its variance grows fast with the distance between the policies.

    Args:
        logprobs: (B, T) nats, gradient flows.
        old_logprobs: (B, T), constants.
        advantages: (B, T), constants.
        response_mask: (B, T) bool; values elsewhere are never read.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () and detached metrics: clip_fraction (0), kl_old_nats >= 0 (k3), ratio_max,
        ratio_deviation_max.

    Raises: ValueError if shapes differ or response_mask selects nothing.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    objective = _ratio(log_ratio, advantages == 0) * advantages
    loss = reduce(-objective, response_mask, reduction, denominator=denominator)
    metrics = _policy_metrics(log_ratio, torch.zeros_like(response_mask), response_mask)
    return LossOutput(loss, metrics)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Clipped surrogate with the ratio of the sequence (Zheng et al. 2025, arXiv:2507.18071).

    Per token: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), where s = exp(mean over the
    sequence's selected tokens of logprobs - old_logprobs), eq. 7. The value of s is that of the
    sequence, its gradient at a token s * grad logprobs, as in eq. 14 (GSPO-token): so advantages
    may differ from token to token. With one advantage per sequence and `sequence_mean` it is eq. 5
    in value and gradient; a sequence is then cut as a whole. `constant_length` leaves out eq. 5's
    1 / |y|, and so its bias to short right and long wrong answers. s is the length-normalised ratio
    (a geometric mean), not the importance weight of the sequence: off-policy the gradient is biased.
    The defaults are the paper's; s moves far less than a token's ratio.

    Args:
        logprobs: (B, T) nats, gradient flows.
        old_logprobs: (B, T), constants.
        advantages: (B, T), constants.
        response_mask: (B, T) bool; values elsewhere are never read.
        clip_low: in [0, 1].
        clip_high: >= 0.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () and detached metrics: clip_fraction in [0, 1], the share of tokens whose s is
        cut; of the token ratios, as for every loss, kl_old_nats >= 0 (k3), ratio_max,
        ratio_deviation_max.

    Raises: ValueError if shapes differ, response_mask selects nothing or a bound is illegal.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    counts = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = log_ratio.detach().sum(dim=1, keepdim=True) / counts
    ratio = _ratio(mean + (log_ratio - log_ratio.detach()), advantages >= 0)
    objective, clipped = _clipped_objective(ratio, advantages, clip_low, clip_high)
    loss = reduce(-objective, response_mask, reduction, denominator=denominator)
    return LossOutput(loss, _policy_metrics(log_ratio, clipped, response_mask))


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Score function with a bounded importance weight (MiniMax-M1 2025, arXiv:2506.13585, eq. 4).

    Per token: -w A log pi, where w = clip(r, 1 - clip_low, 1 + clip_high) is a constant. A bounded
    weight limits the variance, and unlike PPO's clip no token loses its gradient, the rare ones
    that change most included. The price is bias towards the old policy where w is cut.

    Both bounds are offsets from 1, as in the paper, which sets no lower one: clip_low = 1. Code that
    takes the bound itself, as TRL's epsilon_high, means 1 + clip_high: 5, proposed by ScaleRL
    (arXiv:2510.13786), is clip_high = 4, the default here. The paper's reduction is `token_mean`.

    Args:
        logprobs: (B, T) nats, gradient flows.
        old_logprobs: (B, T), constants.
        advantages: (B, T), constants.
        response_mask: (B, T) bool; values elsewhere are never read.
        clip_low: in [0, 1]; 1 sets no lower bound.
        clip_high: >= 0.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () and detached metrics: clip_fraction in [0, 1], the share of tokens whose weight
        is bounded (they keep a gradient), kl_old_nats >= 0 (k3), ratio_max, ratio_deviation_max.

    Raises: ValueError if shapes differ, response_mask selects nothing or a bound is illegal.
    """
    _check_clips(clip_low, clip_high)
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    ratio = log_ratio.detach().exp()
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = reduce(
        -weights * advantages * logprobs, response_mask, reduction, denominator=denominator
    )
    return LossOutput(loss, _policy_metrics(log_ratio, weights != ratio, response_mask))


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Surrogate with a soft gate instead of a clip (SAPO, Gao et al. 2025, arXiv:2511.20347).

    Per token: -(4 / tau) sigmoid(tau (r - 1)) A with tau_positive where A > 0, else tau_negative.
    Its gradient is that of -r A times 4 p (1 - p), p = sigmoid(tau (r - 1)): 1 at r = 1, falling
    smoothly to both sides, the faster the larger tau. At r = 1 the gradient is that of `reinforce`
    and the value -2 A / tau, so values with different tau do not compare. Away from r = 1 it damps
    on both sides: tokens on their way back to the old policy are damped, too, unlike in PPO.

    Args:
        logprobs: (B, T) nats, gradient flows.
        old_logprobs: (B, T), constants.
        advantages: (B, T), constants.
        response_mask: (B, T) bool; values elsewhere are never read.
        tau_positive: > 0.
        tau_negative: > 0; larger than tau_positive, since pushing a token down lifts all others.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () and detached metrics: clip_fraction (0), kl_old_nats >= 0 (k3), ratio_max,
        ratio_deviation_max.

    Raises: ValueError if shapes differ, response_mask selects nothing or a tau is not positive.
    """
    if not (0 < tau_positive < math.inf and 0 < tau_negative < math.inf):
        raise ValueError(f"tau must be positive and finite, got {tau_positive}, {tau_negative}")
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    # Past FAR_NATS the gate is 1 and its slope 0, as in the limit.
    gate = torch.sigmoid(tau * torch.expm1(log_ratio.clamp(max=FAR_NATS))) * 4 / tau
    loss = reduce(-gate * advantages, response_mask, reduction, denominator=denominator)
    metrics = _policy_metrics(log_ratio, torch.zeros_like(response_mask), response_mask)
    return LossOutput(loss, metrics)


POLICY_LOSSES: dict[str, Callable[..., LossOutput]] = {
    "ppo_clip": clipped_policy_loss,
    "ppo_dual_clip": dual_clip_policy_loss,
    "reinforce": reinforce_loss,
    "nll": nll_loss,
    "importance_weighted": importance_weighted_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
}


class ImportanceCorrection(NamedTuple):
    """weights (B, T) in [0, cap], constants, 0 outside the mask; metrics: detached scalars ()."""

    weights: Tensor
    metrics: dict[str, Tensor]


@torch.no_grad()
def importance_correction(
    logprobs: Tensor, sampler_logprobs: Tensor, response_mask: Tensor, *, cap: float
) -> ImportanceCorrection:
    """Truncated importance weights between rollout engine and trainer (Yao et al. 2025).

    "Your efficient RL framework secretly brings you off-policy RL training": the engine that
    samples and the trainer disagree on the probabilities of the same weights. The expectation over
    the engine's tokens becomes that over the trainer's with w = min(exp(logprobs -
    sampler_logprobs), cap). Multiply the advantages, after whitening, with w. For w >= 0,
    min(r w A, clip(r) w A) = w min(r A, clip(r) A), and no choice by the sign of A changes: so
    weighted advantages are the same as a weighted loss, for every policy loss, and the loss's own
    ratio stays that between two states of the trainer.

    Uncapped weights correct the token, not the prefix before it: exact for one-token responses.
    The cap bounds the variance and leaves a bias towards the engine's policy.

    Args:
        logprobs: (B, T) nats of the trainer before the first update, at the sampling temperature.
        sampler_logprobs: (B, T) nats as the rollout engine reported them, of the distribution that
            it sampled from.
        response_mask: (B, T) bool; values elsewhere are never read.
        cap: >= 1; infinity for none.

    Returns: weights, and metrics over the selected tokens: mismatch_nats >= 0 (k3 estimate of
        KL(sampler || trainer), on samples of the sampler), mismatch_ratio_max (before the cap),
        capped_fraction in [0, 1].

    Raises: ValueError if shapes differ, response_mask selects nothing or cap is below 1.
    """
    if not cap >= 1:
        raise ValueError(f"cap must be at least 1, got {cap}")
    check_mask(response_mask, logprobs, sampler_logprobs)
    if not bool(response_mask.any()):
        raise ValueError("the mask selects nothing, so there is nothing to correct")
    log_ratio = logprobs - sampler_logprobs
    ratio = select(log_ratio.exp(), response_mask)
    metrics = {
        "mismatch_nats": token_metric(_k3_of_old(log_ratio), response_mask),
        "mismatch_ratio_max": ratio.max(),
        "capped_fraction": token_metric((ratio > cap).to(ratio.dtype), response_mask),
    }
    return ImportanceCorrection(ratio.clamp(max=cap), metrics)


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip: float | None,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Half the squared error of the value function, clipped as in PPO's reference code.

    Per token: max((v - R)^2, (old + clamp(v - old, -clip, clip) - R)^2) / 2, or (v - R)^2 / 2.

    Args:
        values: (B, T), gradient flows.
        old_values: (B, T), constants.
        returns: (B, T), constants.
        response_mask: (B, T) bool; values elsewhere are never read.
        clip: > 0, in units of the value, or None for the plain error.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () and detached metrics: value_clip_fraction in [0, 1], value_mean, return_mean.

    Raises: ValueError if shapes differ, response_mask selects nothing or clip is not positive.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive or None, got {clip}")
    values = select(values, response_mask)
    old_values = select(old_values.detach(), response_mask)
    returns = select(returns.detach(), response_mask)
    error = (values - returns).square()
    clipped = torch.zeros_like(response_mask)
    if clip is not None:
        near_old = old_values + (values - old_values).clamp(-clip, clip)
        clipped_error = (near_old - returns).square()
        clipped = (clipped_error > error) & ((values - old_values).abs() > clip)
        error = torch.maximum(error, clipped_error)
    loss = reduce(0.5 * error, response_mask, reduction, denominator=denominator)
    metrics = {
        "value_clip_fraction": token_metric(clipped.to(error.dtype), response_mask),
        "value_mean": token_metric(values, response_mask),
        "return_mean": token_metric(returns, response_mask),
    }
    return LossOutput(loss, metrics)


def entropy_bonus(
    entropy: Tensor,
    response_mask: Tensor,
    *,
    reduction: str = "token_mean",
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Minus the entropy: added to a loss with a positive coefficient, it raises the entropy.

    Args:
        entropy: (B, T) nats, see `logprobs.token_entropy`; gradient flows.
        response_mask: (B, T) bool; values elsewhere are never read.
        reduction: see `masking.reduce`.
        denominator: see `masking.reduce`.

    Returns: loss () <= 0 and detached metric entropy_nats >= 0, the mean per token.

    Raises: ValueError if shapes differ or response_mask selects nothing.
    """
    loss = reduce(-entropy, response_mask, reduction, denominator=denominator)
    return LossOutput(loss, {"entropy_nats": token_metric(entropy, response_mask)})
