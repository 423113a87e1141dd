"""Rewards per token and advantage estimators.

`estimate` calls an estimator by name. Each entry of ADVANTAGES takes the same keyword arguments and
uses what it needs, so no caller asks which estimator it has. Everything here is a constant to the
losses: no gradient flows.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rlhf.algos.masking import check_mask, last_index, masked_sum, select
from rlhf.algos.types import Advantages


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """-kl_coef * kl at each response token, plus the score at the last one.

    A sequence without a response token gets a row of zeros: there is no token to reward.

    Args:
        scores: (B,) raw rewards.
        kl: (B, T) nats, an estimate per token.
        response_mask: (B, T) bool; kl elsewhere is never read.
        kl_coef: >= 0, reward per nat; 0 if the KL term sits in the loss or nowhere.

    Returns: (B, T) rewards, 0 outside the mask.

    Raises: ValueError if shapes differ or kl_coef is negative.
    """
    check_mask(response_mask, kl)
    if scores.shape != response_mask.shape[:1]:
        raise ValueError(f"scores {tuple(scores.shape)} do not fit {tuple(response_mask.shape)}")
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must be >= 0, got {kl_coef}")
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    is_last = positions == last_index(response_mask)[:, None]
    penalty = select(kl, response_mask) * -kl_coef if kl_coef else torch.zeros_like(kl)
    return penalty + torch.where(is_last, scores[:, None].to(kl.dtype), 0)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma gae_lambda A_next, where next is
    the row's next position in the mask, across holes; after the last one both are 0.

    Args:
        rewards: (B, T).
        values: (B, T), V of the state before token t.
        response_mask: (B, T) bool; rewards and values elsewhere are never read.
        gamma: discount per response token, in [0, 1].
        gae_lambda: weight of longer returns, in [0, 1]; 1 trusts the rewards, 0 the values.

    Returns: advantages and returns = advantages + values, both (B, T), 0 outside the mask.

    Raises: ValueError if shapes differ or a discount lies outside [0, 1].
    """
    check_mask(response_mask, rewards, values)
    _check_discount("gamma", gamma)
    _check_discount("gae_lambda", gae_lambda)
    rewards, values = select(rewards, response_mask), select(values, response_mask)
    advantages = torch.zeros_like(values)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        here = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = select(advantage, here)
        next_value = torch.where(here, values[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
    return advantages, advantages + values


@torch.no_grad()
def reward_to_go(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each token on, stepping over holes in the mask.

    Args:
        rewards: (B, T).
        response_mask: (B, T) bool; rewards elsewhere are never read.
        gamma: discount per response token, in [0, 1].

    Returns: (B, T), 0 outside the mask.

    Raises: ValueError if shapes differ or gamma lies outside [0, 1].
    """
    # A value function that is 0 everywhere turns GAE with lambda 1 into the discounted sum.
    nothing = torch.zeros_like(rewards)
    return gae(rewards, nothing, response_mask, gamma=gamma, gae_lambda=1.0)[0]


def _check_discount(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def _groups(scores: Tensor, group_size: int) -> Tensor:
    """(P, G) view of the scores, one row a prompt; ValueError if they do not form groups."""
    if group_size < 2:
        raise ValueError(f"a group baseline needs at least 2 samples per prompt, got {group_size}")
    if scores.ndim != 1 or not len(scores) or len(scores) % group_size:
        raise ValueError(f"scores {tuple(scores.shape)} do not split into groups of {group_size}")
    return scores.detach().reshape(-1, group_size)


def has_spread(scores: Tensor, group_size: int) -> Tensor:
    """(B,) bool, True where the scores of the sequence's group are not all equal.

    Args:
        scores: (B,), the samples of a prompt next to each other.
        group_size: G >= 2.

    Raises: ValueError if the scores do not split into groups of at least 2.
    """
    groups = _groups(scores, group_size)
    spread = groups.amax(dim=1) != groups.amin(dim=1)
    return spread.repeat_interleave(group_size)


def group_mean(scores: Tensor, group_size: int) -> Tensor:
    """Score minus the mean of its group (Liu et al. 2025, arXiv:2503.20783: GRPO without std).

    The baseline contains the sample itself: the expected gradient is (G-1)/G of the true one.

    Args:
        scores: (B,), the samples of a prompt next to each other.
        group_size: G >= 2.

    Returns: (B,), exactly 0 for a group without spread.

    Raises: ValueError if the scores do not split into groups of at least 2.
    """
    groups = _groups(scores, group_size)
    centred = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    return select(centred, has_spread(scores, group_size))


def group_std(scores: Tensor, group_size: int, *, eps: float = 1e-6) -> Tensor:
    """Score minus the mean of its group, over its deviation (GRPO, Shao et al. 2024, 2402.03300).

    The deviation has ddof 1. Dividing by it weighs prompts by how sure their outcome is: the
    expected gradient is not that of the expected score.

    Args:
        scores: (B,), the samples of a prompt next to each other.
        group_size: G >= 2.
        eps: added to the deviation, in units of the score.

    Returns: (B,), exactly 0 for a group without spread.

    Raises: ValueError if the scores do not split into groups of at least 2.
    """
    deviation = _groups(scores, group_size).std(dim=1).repeat_interleave(group_size)
    return group_mean(scores, group_size) / (deviation + eps)


def rloo(scores: Tensor, group_size: int) -> Tensor:
    """Score minus the mean of the others of its group (Ahmadian et al. 2024, arXiv:2402.14740).

    The baseline is independent of the sample, so the expected gradient is the true one.

    Args:
        scores: (B,), the samples of a prompt next to each other.
        group_size: G >= 2.

    Returns: (B,), exactly 0 for a group without spread.

    Raises: ValueError if the scores do not split into groups of at least 2.
    """
    return group_mean(scores, group_size) * group_size / (group_size - 1)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Scales the selected elements to variance 1 (ddof 1) and, unless told otherwise, mean 0.

    Fewer than two selected elements have no variance and keep their values.

    Args:
        x: (B, T).
        mask: (B, T) bool; values elsewhere are never read.
        shift_mean: False keeps the mean.

    Returns: (B, T), 0 outside the mask.

    Raises: ValueError if shapes differ or `mask` is not boolean.
    """
    x, count = select(x, mask), int(mask.sum())
    if count < 2:
        return x
    mean = x.sum() / count
    variance = masked_sum((x - mean).square(), mask) / (count - 1)
    scaled = (x - mean) * torch.rsqrt(variance + 1e-8)
    return select(scaled if shift_mean else scaled + mean, mask)


class Estimator(Protocol):
    """The one calling convention of ADVANTAGES; see `estimate`."""

    def __call__(
        self,
        *,
        rewards: Tensor,
        scores: Tensor,
        values: Tensor | None,
        response_mask: Tensor,
        group_size: int,
        gamma: float,
        gae_lambda: float,
    ) -> Advantages:
        """Returns the advantages of every response token."""


def _from_values(
    *,
    rewards: Tensor,
    scores: Tensor,
    values: Tensor | None,
    response_mask: Tensor,
    group_size: int,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    if values is None:
        raise ValueError("gae needs values")
    advantages, returns = gae(rewards, values, response_mask, gamma=gamma, gae_lambda=gae_lambda)
    return Advantages(advantages, returns, {})


def _from_returns(
    *,
    rewards: Tensor,
    scores: Tensor,
    values: Tensor | None,
    response_mask: Tensor,
    group_size: int,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    return Advantages(reward_to_go(rewards, response_mask, gamma=gamma), None, {})


def _from_group(baseline: Callable[[Tensor, int], Tensor]) -> Estimator:
    """The estimator that gives every token of a sequence its group's `baseline` advantage."""

    @torch.no_grad()
    def estimator(
        *,
        rewards: Tensor,
        scores: Tensor,
        values: Tensor | None,
        response_mask: Tensor,
        group_size: int,
        gamma: float,
        gae_lambda: float,
    ) -> Advantages:
        # Rewards may carry a KL term, so a response counts with their sum, and one without a token,
        # which has none, with 0.
        per_sequence = baseline(masked_sum(rewards, response_mask, dim=1), group_size)
        advantages = select(per_sequence[:, None].expand_as(response_mask), response_mask)
        scored = select(scores, response_mask.any(dim=1))
        without_spread = 1 - has_spread(scored, group_size).to(rewards.dtype).mean()
        return Advantages(advantages, None, {"zero_spread_groups": without_spread})

    return estimator


ADVANTAGES: dict[str, Estimator] = {
    "gae": _from_values,
    "group_mean": _from_group(group_mean),
    "group_std": _from_group(group_std),
    "rloo": _from_group(rloo),
    "reinforce": _from_returns,
}
NEEDS_VALUES = frozenset({"gae"})
NEEDS_GROUPS = frozenset({"group_mean", "group_std", "rloo"})


def estimate(
    name: str,
    *,
    rewards: Tensor,
    scores: Tensor,
    values: Tensor | None,
    response_mask: Tensor,
    group_size: int,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    """Advantages of every response token by the estimator of that name, not whitened.

    `gae` discounts the rewards against the values; `reinforce` is the plain reward-to-go without a
    baseline; the group estimators compare the sums of rewards over a prompt's samples and give all
    tokens of a response the same advantage.

    Args:
        name: one of ADVANTAGES.
        rewards: (B, T), see `token_rewards`.
        scores: (B,) raw rewards.
        values: (B, T), or None for an estimator that is not in NEEDS_VALUES.
        response_mask: (B, T) bool; rewards and values elsewhere are never read.
        group_size: G; for NEEDS_GROUPS at least 2, a prompt's samples next to each other.
        gamma: discount in [0, 1], for `gae` and `reinforce`.
        gae_lambda: in [0, 1], for `gae`.

    Returns: advantages (B, T); returns (B, T) or None; for NEEDS_GROUPS the metric
        zero_spread_groups in [0, 1], the share of groups whose raw scores are all equal
        (0 for a response without a token).

    Raises: ValueError if the name is unknown, shapes differ, or the estimator lacks its values or
        its groups.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"unknown advantage {name!r}; use one of {', '.join(ADVANTAGES)}")
    check_mask(response_mask, rewards)
    if scores.shape != response_mask.shape[:1]:
        raise ValueError(f"scores {tuple(scores.shape)} do not fit {tuple(response_mask.shape)}")
    return ADVANTAGES[name](
        rewards=rewards,
        scores=scores,
        values=values,
        response_mask=response_mask,
        group_size=group_size,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
