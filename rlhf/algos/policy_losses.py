"""Losses of the policy and of its value function during reinforcement learning.

Every entry of POLICY_LOSSES is called as `loss(logprobs, old_logprobs, advantages, response_mask,
reduction=..., denominator=..., **own)` and reports the same metrics, which are means over the
selected tokens whatever the reduction:

- `clip_fraction` in [0, 1]: tokens whose gradient the clip cuts (0 for a loss without one).
- `kl_old_nats` >= 0: k3 estimate of KL(old policy || policy), on samples of the old policy.
- `ratio_max`, `ratio_deviation_max`: the largest ratio and the largest |ratio - 1|.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.algos.masking import check_mask, reduce, select, token_metric
from rlhf.algos.types import LossOutput


def _log_ratio(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Log ratio, gradient flowing to `logprobs`, and advantages; both 0 outside the mask."""
    check_mask(response_mask, logprobs, old_logprobs, advantages)
    log_ratio = select(logprobs - old_logprobs.detach(), response_mask)
    return log_ratio, select(advantages.detach(), response_mask)


def _policy_metrics(log_ratio: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Tensor]:
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    kl_old = (torch.expm1(log_ratio) - log_ratio).clamp(min=0)
    return {
        "clip_fraction": token_metric(clipped.to(ratio.dtype), mask),
        "kl_old_nats": token_metric(kl_old, mask),
        "ratio_max": select(ratio, mask).max(),
        "ratio_deviation_max": select(torch.expm1(log_ratio).abs(), mask).max(),
    }


def _clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Per-token min(r A, clip(r) A), and where the clipped term is the smaller one."""
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"need 0 <= clip_low <= 1 and clip_high >= 0: {clip_low}, {clip_high}")
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
    objective, clipped = _clipped_objective(log_ratio.exp(), advantages, clip_low, clip_high)
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
    if not dual_clip > 1 + clip_high:
        raise ValueError(f"dual_clip must be above 1 + clip_high, got {dual_clip}")
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages, response_mask)
    objective, clipped = _clipped_objective(log_ratio.exp(), advantages, clip_low, clip_high)
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


POLICY_LOSSES: dict[str, Callable[..., LossOutput]] = {
    "ppo_clip": clipped_policy_loss,
    "ppo_dual_clip": dual_clip_policy_loss,
    "reinforce": reinforce_loss,
}


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
    check_mask(response_mask, values, old_values, returns)
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
