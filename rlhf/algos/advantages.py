"""Rewards per token and advantage estimators.

An entry of ADVANTAGES names the inputs that it reads and, keyword-only, its options (see `parts`):

- `rewards` (B, T): per token, see `token_rewards`; never read outside the mask.
- `scores` (B,): raw rewards.
- `values` (B, T): V of the state before each token; never read outside the mask.
- `final_values` (B,): V of the state after the last token of a response that was cut by length, 0
  for one that ended.
- `response_mask` (B, T) bool.
- `group_size`: G, the samples per prompt, which stand next to each other.
- `state`: what the entry handed back last time, of shape (0,) at the first call.

It returns `Advantages`, not whitened unless it says so. A response without a token gets a row of
zeros. Group estimators compare the sums of rewards (so a KL term in the reward counts), give every
token of a response the same advantage, exactly 0 in a group without spread, and report
`zero_spread_groups` in [0, 1]: the share of groups whose raw scores are all equal, where a response
without a token scores 0. All raise ValueError if shapes or devices differ, no token is
selected, an option is out of bounds, or groups do not form. Everything here is a constant to the
losses: no gradient flows.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.algos.masking import (
    check_devices,
    check_floating,
    check_mask,
    last_index,
    masked_mean,
    masked_sum,
    select,
)
from rlhf.algos.types import Advantages


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    kl: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    token_scores: Tensor | None = None,
) -> Tensor:
    """-kl_coef * kl at each response token, plus the score at the last one.

    A sequence without a response token gets a row of zeros: there is no token to reward.

    Args:
        scores: (B,) raw rewards.
        kl: (B, T) nats, an estimate per token.
        response_mask: (B, T) bool; kl and token_scores elsewhere are never read.
        kl_coef: >= 0, reward per nat; 0 if the KL term sits in the loss or nowhere.
        token_scores: (B, T) rewards of a process (of steps, of single tokens), added where they
            stand, or None.

    Returns: (B, T) rewards, 0 outside the mask.

    Raises: ValueError if shapes or devices differ or kl_coef is negative.
    """
    check_mask(response_mask, kl)
    check_floating(kl)
    _check_scores(scores, response_mask)
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must be >= 0, got {kl_coef}")
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    is_last = positions == last_index(response_mask)[:, None]
    penalty = select(kl, response_mask) * -kl_coef if kl_coef else torch.zeros_like(kl)
    rewards = penalty + torch.where(is_last, scores[:, None].to(kl.dtype), 0)
    if token_scores is None:
        return rewards
    return rewards + select(token_scores, response_mask)


def _check_scores(scores: Tensor, response_mask: Tensor) -> None:
    if scores.shape != response_mask.shape[:1]:
        raise ValueError(f"scores {tuple(scores.shape)} do not fit {tuple(response_mask.shape)}")
    check_devices(response_mask, scores)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma gae_lambda A_next, where next is
    the row's next position in the mask, across holes. After the last one A is 0, and so is V unless
    `final_values` says otherwise.

    Args:
        rewards: (B, T).
        values: (B, T), V of the state before token t.
        response_mask: (B, T) bool; rewards and values elsewhere are never read.
        gamma: discount per response token, in [0, 1].
        gae_lambda: weight of longer returns, in [0, 1]; 1 trusts the rewards, 0 the values.
        final_values: (B,), V of the state after the last token, or None for 0.

    Returns: advantages and returns = advantages + values, both (B, T), 0 outside the mask.

    Raises: ValueError if shapes or devices differ or a discount lies outside [0, 1].
    """
    _check_discount("gamma", gamma)
    _check_discount("gae_lambda", gae_lambda)
    check_floating(rewards, values)
    _check_not_empty(response_mask)
    rewards, values = select(rewards, response_mask), select(values, response_mask)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    if final_values is not None:
        _check_scores(final_values, response_mask)
        next_value = final_values.to(values.dtype)
    advantages = torch.zeros_like(values)
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


def _check_not_empty(response_mask: Tensor) -> None:
    """A response without a token is a row of zeros; a batch without one is a mistake."""
    if not bool(response_mask.any()):
        raise ValueError("the mask selects nothing, so there is no advantage")


def _check_discount(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def _groups(scores: Tensor, group_size: int) -> Tensor:
    """(P, G) view of the scores, one row a prompt; ValueError if they do not form groups."""
    if group_size < 2:
        raise ValueError(f"a group baseline needs at least 2 samples per prompt, got {group_size}")
    if scores.ndim != 1 or not len(scores) or len(scores) % group_size:
        raise ValueError(f"scores {tuple(scores.shape)} do not split into groups of {group_size}")
    check_floating(scores)
    return scores.detach().reshape(-1, group_size)


def groups_with_spread(scores: Tensor, group_size: int) -> Tensor:
    """(P,) bool, True where the scores of the prompt's samples are not all equal.

    Only these prompts teach a group estimator anything: dynamic sampling (Yu et al. 2025,
    arXiv:2503.14476) keeps them and draws others in place of the rest.

    Args:
        scores: (B,), the samples of a prompt next to each other.
        group_size: G >= 2.

    Raises: ValueError if the scores do not split into groups of at least 2.
    """
    groups = _groups(scores, group_size)
    return groups.amax(dim=1) != groups.amin(dim=1)


def has_spread(scores: Tensor, group_size: int) -> Tensor:
    """(B,) bool, True where the scores of the sequence's group are not all equal.

    Args:
        scores: (B,), the samples of a prompt next to each other.
        group_size: G >= 2.

    Raises: ValueError if the scores do not split into groups of at least 2.
    """
    return groups_with_spread(scores, group_size).repeat_interleave(group_size)


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
        eps: >= 0, added to the deviation, in units of the score.

    Returns: (B,), exactly 0 for a group without spread.

    Raises: ValueError if the scores do not split into groups of at least 2 or eps is negative.
    """
    if not eps >= 0:
        raise ValueError(f"eps must be >= 0, got {eps}")
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


def max_rl(scores: Tensor, group_size: int) -> Tensor:
    """Score over the mean of its group, minus 1 (Tajwar et al. 2026, arXiv:2602.02710: MaxRL).

    For scores of 0 and 1 with pass rate p, the expected gradient is that of the logarithm of p,
    expanded in failures and cut after G - 1 terms: sum over k < G of grad pass@k / k. So G = 2 is
    plain policy gradient, and rarely solved prompts weigh more as G grows, up to 1 / p.

    Args:
        scores: (B,) in [0, 1], the samples of a prompt next to each other.
        group_size: G >= 2.

    Returns: (B,), exactly 0 for a group without spread, so also where none passes.

    Raises: ValueError if the scores do not split into groups of at least 2 or leave [0, 1].
    """
    groups = _groups(scores, group_size)
    if not bool(((groups >= 0) & (groups <= 1)).all()):
        raise ValueError(
            "max_rl needs rewards in [0, 1], such as pass or fail; put the KL term in the loss"
        )
    mean = groups.mean(dim=1).repeat_interleave(group_size)
    return group_mean(scores, group_size) / torch.where(mean > 0, mean, 1)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Scales the selected elements to variance 1 (ddof 1) and, unless told otherwise, mean 0.

    Fewer than two selected elements have no variance and keep their values; elements that are all
    equal become 0, or keep their values too if the mean stays.

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
    chosen = x[mask]
    if bool((chosen == chosen[0]).all()):  # the mean of equal floats need not be that float
        return torch.zeros_like(x) if shift_mean else x
    mean = x.sum() / count
    variance = masked_sum((x - mean).square(), mask) / (count - 1)
    scaled = (x - mean) * torch.rsqrt(variance + 1e-8)
    return select(scaled if shift_mean else scaled + mean, mask)


@torch.no_grad()
def clip_advantages(advantages: Tensor, *, limit: float) -> Tensor:
    """Advantages moved into [-limit, limit], so that no single token dominates an update.

    Clipping is not symmetric in its effect unless the advantages are: it biases the gradient.

    Args:
        advantages: (B, T) or any other shape.
        limit: > 0 and finite.

    Returns: the same shape.

    Raises: ValueError if the limit is not positive and finite.
    """
    if not 0 < limit < math.inf:
        raise ValueError(f"limit must be positive and finite, got {limit}")
    return advantages.clamp(-limit, limit)


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> Advantages:
    """`gae`: the rewards against a value function, which is 0 after the last token.

    Unbiased for `gae_lambda` 1, whatever the values; below, as far as the values are true.

    Args:
        rewards: see the module.
        values: see the module.
        response_mask: see the module.
        gamma: in [0, 1].
        gae_lambda: in [0, 1].

    Returns: Advantages with returns, the value function's target.
    """
    advantages, returns = gae(rewards, values, response_mask, gamma=gamma, gae_lambda=gae_lambda)
    return Advantages(advantages, returns, {})


def gae_bootstrap_advantages(
    rewards: Tensor,
    values: Tensor,
    final_values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> Advantages:
    """`gae` where a response cut by length goes on with the value of its next state.

    For limits on length that are not part of the task (Pardo et al. 2018, arXiv:1712.00378). The
    score of a cut response is still its last token's reward; leave it out if the value stands for
    it. Unbiased as far as `final_values` are true.

    Args:
        rewards: see the module.
        values: see the module.
        final_values: see the module; not read for a response without a token.
        response_mask: see the module.
        gamma: in [0, 1].
        gae_lambda: in [0, 1].

    Returns: Advantages with returns, the value function's target.
    """
    advantages, returns = gae(
        rewards, values, response_mask,
        gamma=gamma, gae_lambda=gae_lambda, final_values=final_values,
    )  # fmt: skip
    return Advantages(advantages, returns, {})


def reinforce_advantages(
    rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0
) -> Advantages:
    """Reward-to-go without a baseline (Williams 1992): unbiased, of large variance.

    Args:
        rewards: see the module.
        response_mask: see the module.
        gamma: in [0, 1].
    """
    return Advantages(reward_to_go(rewards, response_mask, gamma=gamma), None, {})


def constant_baseline_advantages(
    rewards: Tensor, response_mask: Tensor, *, baseline: float, gamma: float = 1.0
) -> Advantages:
    """Reward-to-go minus a constant: unbiased for any constant.

    Args:
        rewards: see the module.
        response_mask: see the module.
        baseline: finite, in units of the reward, such as a mean score known beforehand.
        gamma: in [0, 1].
    """
    if not math.isfinite(baseline):
        raise ValueError(f"baseline must be finite, got {baseline}")
    returns = reward_to_go(rewards, response_mask, gamma=gamma)
    return Advantages(select(returns - baseline, response_mask), None, {})


@torch.no_grad()
def ema_baseline_advantages(
    rewards: Tensor,
    response_mask: Tensor,
    state: Tensor,
    *,
    gamma: float = 1.0,
    decay: float = 0.9,
) -> Advantages:
    """Reward-to-go minus its running mean over earlier batches, 0 for the first one.

    b = m / w with m <- decay m + (1 - decay) mean and w <- decay w + (1 - decay) after each batch,
    both from 0: as in Adam, the mean is not drawn to 0 at the start. `mean` is over the batch's
    response tokens. No batch enters its own baseline, so the estimate is unbiased.

    Args:
        rewards: see the module.
        response_mask: see the module.
        state: (2,) m and w, or (0,) at the first call.
        gamma: in [0, 1].
        decay: in [0, 1); the mean reaches back about 1 / (1 - decay) batches, 0 for the last alone.

    Returns: Advantages with state and the metric baseline, in units of the reward.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay must lie in [0, 1), got {decay}")
    if state.shape not in ((0,), (2,)):
        raise ValueError(f"state must have shape (0,) or (2,), got {tuple(state.shape)}")
    returns = reward_to_go(rewards, response_mask, gamma=gamma)
    state = state.to(returns) if len(state) else returns.new_zeros(2)
    baseline = torch.where(state[1] > 0, state[0] / state[1], 0)
    mean = masked_mean(returns, response_mask)
    state = decay * state + (1 - decay) * torch.stack([mean, torch.ones_like(mean)])
    advantages = select(returns - baseline, response_mask)
    return Advantages(advantages, None, {"baseline": baseline}, state=state)


def reinforce_plus_plus_advantages(
    rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0
) -> Advantages:
    """Reward-to-go, whitened over all response tokens (Hu et al. 2025, arXiv:2501.03262).

    The KL term belongs in the reward. Mean and deviation contain the sample itself, a bias that
    falls as 1 / B; the scale of the rewards drops out. Do not whiten again.

    Args:
        rewards: see the module; of the whole batch, not of a micro-batch.
        response_mask: see the module.
        gamma: in [0, 1].
    """
    returns = reward_to_go(rewards, response_mask, gamma=gamma)
    return Advantages(whiten(returns, response_mask), None, {})


def _totals(rewards: Tensor, scores: Tensor, response_mask: Tensor) -> Tensor:
    """(B,) sums of rewards: they may carry a KL term, which scores do not; 0 without a token."""
    _check_scores(scores, response_mask)
    check_floating(rewards)
    _check_not_empty(response_mask)
    return masked_sum(rewards, response_mask, dim=1)


def _group_advantages(
    per_sequence: Tensor, scores: Tensor, response_mask: Tensor, group_size: int
) -> Advantages:
    """The same advantage for every token of a response, and the share of groups without spread."""
    advantages = select(per_sequence[:, None].expand_as(response_mask), response_mask)
    scored = select(scores, response_mask.any(dim=1))
    without_spread = 1 - has_spread(scored, group_size).to(advantages.dtype).mean()
    return Advantages(advantages, None, {"zero_spread_groups": without_spread})


def group_mean_advantages(
    rewards: Tensor, scores: Tensor, response_mask: Tensor, group_size: int
) -> Advantages:
    """`group_mean` of the sums of rewards: the true gradient times (G - 1) / G.

    Args:
        rewards: see the module.
        scores: see the module.
        response_mask: see the module.
        group_size: at least 2.
    """
    per_sequence = group_mean(_totals(rewards, scores, response_mask), group_size)
    return _group_advantages(per_sequence, scores, response_mask, group_size)


def group_std_advantages(
    rewards: Tensor, scores: Tensor, response_mask: Tensor, group_size: int
) -> Advantages:
    """`group_std` of the sums of rewards: scale-free, and biased towards sure prompts.

    Args:
        rewards: see the module.
        scores: see the module.
        response_mask: see the module.
        group_size: at least 2.
    """
    per_sequence = group_std(_totals(rewards, scores, response_mask), group_size)
    return _group_advantages(per_sequence, scores, response_mask, group_size)


def rloo_advantages(
    rewards: Tensor, scores: Tensor, response_mask: Tensor, group_size: int
) -> Advantages:
    """`rloo` of the sums of rewards: unbiased.

    Args:
        rewards: see the module.
        scores: see the module.
        response_mask: see the module.
        group_size: at least 2.
    """
    per_sequence = rloo(_totals(rewards, scores, response_mask), group_size)
    return _group_advantages(per_sequence, scores, response_mask, group_size)


def max_rl_advantages(
    rewards: Tensor, scores: Tensor, response_mask: Tensor, group_size: int
) -> Advantages:
    """`max_rl` of the sums of rewards, which must lie in [0, 1]: climbs log pass rate.

    Args:
        rewards: see the module; without a KL term.
        scores: see the module.
        response_mask: see the module.
        group_size: at least 2.
    """
    per_sequence = max_rl(_totals(rewards, scores, response_mask), group_size)
    return _group_advantages(per_sequence, scores, response_mask, group_size)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, scores: Tensor, response_mask: Tensor, group_size: int
) -> Advantages:
    """`group_mean`, then whitened over all response tokens (Hu et al. 2025, arXiv:2501.03262).

    Unlike `group_std`, one deviation for the whole batch keeps prompts in proportion. Mean and
    deviation contain the sample itself, a bias that falls as 1 / B. Where the paper's last shift
    would give a group without spread an advantage, it stays 0 here. Do not whiten again.

    Args:
        rewards: see the module; of the whole batch, not of a micro-batch.
        scores: see the module.
        response_mask: see the module.
        group_size: at least 2.
    """
    totals = _totals(rewards, scores, response_mask)
    centred = _group_advantages(group_mean(totals, group_size), scores, response_mask, group_size)
    whitened = whiten(centred.advantages, response_mask)
    informative = response_mask & has_spread(totals, group_size)[:, None]
    return centred._replace(advantages=select(whitened, informative))


def best_of_group_advantages(
    rewards: Tensor, scores: Tensor, response_mask: Tensor, group_size: int
) -> Advantages:
    """1 on every token of the best response of its group, and the others are not kept.

    With a loss of plain log-likelihood this is rejection sampling (RAFT, Dong et al. 2023,
    arXiv:2304.06767): it moves the policy towards its own best of G. Of equals the first is taken,
    so a group without spread still keeps one. A response without a token is never the best; a group
    of such responses keeps none.

    Args:
        rewards: see the module.
        scores: see the module.
        response_mask: see the module.
        group_size: at least 2.

    Returns: Advantages with keep (B,), True for the best response of each group.
    """
    totals = _totals(rewards, scores, response_mask)
    written = response_mask.any(dim=1)
    ranked = _groups(torch.where(written, totals, -math.inf), group_size)
    places = torch.arange(group_size, device=ranked.device)
    best = (places == ranked.argmax(dim=1, keepdim=True)).flatten() & written
    output = _group_advantages(best.to(totals.dtype), scores, response_mask, group_size)
    return output._replace(keep=best)


ADVANTAGES: dict[str, Callable[..., Advantages]] = {
    "gae": gae_advantages,
    "gae_bootstrap": gae_bootstrap_advantages,
    "reinforce": reinforce_advantages,
    "constant_baseline": constant_baseline_advantages,
    "ema_baseline": ema_baseline_advantages,
    "reinforce_plus_plus": reinforce_plus_plus_advantages,
    "group_mean": group_mean_advantages,
    "group_std": group_std_advantages,
    "rloo": rloo_advantages,
    "max_rl": max_rl_advantages,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline_advantages,
    "best_of_group": best_of_group_advantages,
}
