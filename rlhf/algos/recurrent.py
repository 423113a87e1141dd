"""Q-learning where the state is a history: a recurrent network over sequences of observations.

Rows are pieces of episodes, one episode a row, in order; a policy that sees one observation at a
time needs the whole history to have a value at all, so steps are never shuffled out of their row.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from rlhf.algos.masking import check_devices, check_mask, reduce, select, token_metric
from rlhf.algos.types import LossOutput

State = TypeVar("State")


@torch.no_grad()
def burn_in_state(
    core: Callable[[Tensor], tuple[Tensor, State]], inputs: Tensor, *, burn_in: int
) -> State:
    """The hidden state after the burn-in, without a graph (Kapturowski et al. 2019, R2D2).

    A stored or zero state is stale; the first steps of a row bring it up to date and train nothing.
    Run the network on from here, `core(inputs[:, burn_in:], state)`, and no gradient goes back into
    the burn-in; cutting the loss alone would let it through the hidden state.

    Args:
        core: as `torch.nn.GRU(..., batch_first=True)`: inputs to (outputs, state).
        inputs: (B, T, H).
        burn_in: steps, 1 to T - 1.

    Returns: what `core` returns as its state.

    Raises: ValueError if burn_in leaves no step before or after it.
    """
    if not 1 <= burn_in < inputs.shape[1]:
        raise ValueError(f"need 1 <= burn_in < T = {inputs.shape[1]}, got {burn_in}")
    return core(inputs[:, :burn_in])[1]


def recurrent_td_loss(
    q_values: Tensor,
    target_q_values: Tensor,
    actions: Tensor,
    rewards: Tensor,
    dones: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    burn_in: int,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Squared temporal-difference error of DRQN (Hausknecht and Stone 2015, arXiv:1507.06527).

    Per step t >= burn_in: (Q(t, a_t) - y_t)^2, y_t = r_t + gamma max_a Q_target(t + 1, a), or r_t
    alone where the episode ended. The mean is over the steps that have a target: those of the mask
    which end the episode, even at the end of the row, or are followed by another step of the mask.

    The step that only bootstraps and the padding after an end are left out by selecting. The values
    of the burn-in get no gradient; for the hidden state that they hand on, see `burn_in_state`. The
    maximum over noisy values is too high on average; see `recurrent_double_td_loss`.

    Args:
        q_values: (B, T, A), gradient flows.
        target_q_values: (B, T, A) of the target network on the same rows, constants.
        actions: (B, T) integer, 0 to A - 1.
        rewards: (B, T).
        dones: (B, T) bool, True where the episode ended with this step (not where it was cut off).
        mask: (B, T) bool, True at the steps of the episode; nothing is read elsewhere.
        gamma: in [0, 1].
        burn_in: steps at the start of a row without a loss, 0 to T - 2.
        denominator: number of steps with a target in an accumulated batch, or None for this call's;
            see `td_mask`.

    Returns: loss () and detached metrics: q_mean, target_mean and td_error_abs, means over the same
        steps.

    Raises: ValueError if shapes or devices differ, T - 1 <= burn_in, an action or gamma is out of
        bounds, a row goes on after an end or, without a denominator, no step has a target.
    """
    greedy = _best_actions(target_q_values)
    return _td_loss(
        q_values, target_q_values, greedy, actions, rewards, dones, mask,
        gamma=gamma, burn_in=burn_in, denominator=denominator,
    )  # fmt: skip


def recurrent_double_td_loss(
    q_values: Tensor,
    target_q_values: Tensor,
    actions: Tensor,
    rewards: Tensor,
    dones: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    burn_in: int,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """`recurrent_td_loss` with double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461).

    y_t = r_t + gamma Q_target(t + 1, argmax_a Q(t + 1, a)): one network chooses the next action and
    the other one values it, so that noise no longer chooses its own maximum.

    Args:
        q_values: (B, T, A), gradient flows, though not through the choice of the next action.
        target_q_values: (B, T, A), constants.
        actions: see `recurrent_td_loss`.
        rewards: see `recurrent_td_loss`.
        dones: see `recurrent_td_loss`.
        mask: see `recurrent_td_loss`.
        gamma: in [0, 1].
        burn_in: see `recurrent_td_loss`.
        denominator: see `recurrent_td_loss`.

    Returns: as `recurrent_td_loss`.

    Raises: ValueError as `recurrent_td_loss`.
    """
    greedy = _best_actions(q_values)
    return _td_loss(
        q_values, target_q_values, greedy, actions, rewards, dones, mask,
        gamma=gamma, burn_in=burn_in, denominator=denominator,
    )  # fmt: skip


def td_mask(dones: Tensor, mask: Tensor, *, burn_in: int) -> Tensor:
    """(B, T) bool, True at the steps that have a target and come after the burn-in.

    Args:
        dones: (B, T) bool.
        mask: (B, T) bool.
        burn_in: steps, 0 to T - 2.

    Raises: ValueError if shapes, types or devices differ, T - 1 <= burn_in, or a row goes on after
        an end.
    """
    check_mask(mask, dones)
    check_mask(dones)
    size = mask.shape[1]
    if not 0 <= burn_in < size - 1:
        raise ValueError(
            f"need 0 <= burn_in < T - 1 = {size - 1}, got {burn_in}: no step would be left"
        )
    ends = dones & mask
    ended_before = ends.cumsum(dim=1) - ends.to(torch.int64) > 0
    if bool((ended_before & mask).any()):
        raise ValueError("the mask goes on after an end; a row holds one episode")
    after_burn_in = torch.arange(size, device=mask.device) >= burn_in
    return mask & (dones | _next(mask)) & after_burn_in


def _next(x: Tensor) -> Tensor:
    """(B, T) shifted by one, so that t holds what stands at t + 1; 0 at the end."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _best_actions(values: Tensor) -> Tensor:
    if values.ndim != 3:
        raise ValueError(f"need values as (B, T, A), got {tuple(values.shape)}")
    return values.argmax(dim=2)


def _at(values: Tensor, actions: Tensor) -> Tensor:
    """(B, T) the value of one action per step."""
    return values.gather(2, actions[..., None])[..., 0]


def _td_loss(
    q_values: Tensor,
    target_q_values: Tensor,
    greedy: Tensor,
    actions: Tensor,
    rewards: Tensor,
    dones: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    burn_in: int,
    denominator: Tensor | float | None,
) -> LossOutput:
    if q_values.shape != target_q_values.shape:
        raise ValueError(f"shapes differ: {tuple(q_values.shape)}, {tuple(target_q_values.shape)}")
    check_devices(q_values, target_q_values)  # all else must fit the mask that selects it
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    counted = td_mask(dones, mask, burn_in=burn_in)
    actions = select(actions, counted).long()
    if not bool(((actions >= 0) & (actions < q_values.shape[2])).all()):
        raise ValueError(f"actions must lie in 0..{q_values.shape[2] - 1}")
    next_values = _next(_at(target_q_values.detach(), greedy))
    targets = select(rewards.detach(), counted) + gamma * select(next_values, counted & ~dones)
    chosen = select(_at(q_values, actions), counted)
    errors = chosen - targets
    metrics = {
        "q_mean": token_metric(chosen, counted),
        "target_mean": token_metric(targets, counted),
        "td_error_abs": token_metric(errors.abs(), counted),
    }
    return LossOutput(reduce(errors.square(), counted, denominator=denominator), metrics)
