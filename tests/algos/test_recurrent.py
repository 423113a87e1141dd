"""The recurrent TD loss: by hand, at ends and padding, and what the burn-in must not do."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algos.recurrent import (
    burn_in_state,
    recurrent_double_td_loss,
    recurrent_td_loss,
    td_mask,
)
from rlhf.algos.types import LossOutput, combine_metrics

NAN, INF = float("nan"), float("inf")
LOSSES = {"td": recurrent_td_loss, "double": recurrent_double_td_loss}
every_loss = pytest.mark.parametrize("loss", list(LOSSES.values()), ids=list(LOSSES))


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def flags(*numbers: int) -> Tensor:
    return torch.tensor([numbers], dtype=torch.bool)


# Three steps, two actions.
Q = torch.tensor([[[1.0, 2.0], [3.0, 1.0], [0.5, 4.0]]], dtype=torch.float64)
TARGET = torch.tensor([[[9.0, 9.0], [2.0, 6.0], [5.0, 1.0]]], dtype=torch.float64)
ACTIONS = torch.tensor([[0, 1, 0]])
REWARDS = row(1, 2, 3)
NEVER, ALL = flags(0, 0, 0), flags(1, 1, 1)


def test_td_by_hand() -> None:
    # gamma .5. t=0: 1 - (1 + .5 * 6) = -3. t=1: 1 - (2 + .5 * 5) = -3.5. t=2 has no next step.
    q, target = Q.clone().requires_grad_(), TARGET.clone().requires_grad_()
    rewards = REWARDS.clone().requires_grad_()
    output = recurrent_td_loss(q, target, ACTIONS, rewards, NEVER, ALL, gamma=0.5, burn_in=0)
    output.loss.backward()
    assert output.loss.item() == (9 + 12.25) / 2
    assert q.grad is not None
    assert q.grad.tolist() == [[[-3, 0], [0, -3.5], [0, 0]]]
    assert target.grad is rewards.grad is None
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics == {"q_mean": 1, "target_mean": 4.25, "td_error_abs": 3.25}


def test_double_td_by_hand() -> None:
    # The online network chooses 0 at t=1 and 1 at t=2; the target values them 2 and 1.
    # t=0: 1 - (1 + .5 * 2) = -1. t=1: 1 - (2 + .5 * 1) = -1.5.
    q, target = Q.clone().requires_grad_(), TARGET.clone().requires_grad_()
    output = recurrent_double_td_loss(q, target, ACTIONS, REWARDS, NEVER, ALL, gamma=0.5, burn_in=0)
    output.loss.backward()
    assert output.loss.item() == (1 + 2.25) / 2
    assert q.grad is not None
    assert q.grad.tolist() == [[[-1, 0], [0, -1.5], [0, 0]]]
    assert target.grad is None


@every_loss
def test_the_last_reward_of_an_episode_is_learned(loss: Callable[..., LossOutput]) -> None:
    # It ends with the row: t=2 has the target 3 alone, .5 - 3 = -2.5.
    ended = loss(Q, TARGET, ACTIONS, REWARDS, flags(0, 0, 1), ALL, gamma=0.5, burn_in=1)
    cut = loss(Q, TARGET, ACTIONS, REWARDS, NEVER, ALL, gamma=0.5, burn_in=1)
    assert ended.loss.item() == pytest.approx((cut.loss.item() + 6.25) / 2)


@every_loss
def test_padding_after_an_end_is_never_read(loss: Callable[..., LossOutput]) -> None:
    # It ends at t=1: 1 - 2 = -1, and nothing of t=2 counts, whatever stands there.
    q, target = Q.clone(), TARGET.clone()
    q[0, 2], target[0, 2] = NAN, INF
    q.requires_grad_()
    actions, rewards = torch.tensor([[0, 1, -7]]), row(1, 2, NAN)
    output = loss(q, target, actions, rewards, flags(0, 1, 1), flags(1, 1, 0), gamma=0.5, burn_in=0)
    output.loss.backward()
    first = 1 - (1 + 0.5 * (6 if loss is recurrent_td_loss else 2))
    assert output.loss.item() == (first**2 + 1) / 2
    assert q.grad is not None
    assert q.grad.tolist() == [[[first, 0], [0, -1], [0, 0]]]


def test_steps_with_a_target() -> None:
    dones = flags(0, 0, 0, 0, 0, 1)
    whole = flags(1, 1, 1, 1, 1, 1)
    assert td_mask(dones, whole, burn_in=0).tolist() == [[True] * 6]
    assert td_mask(dones, whole, burn_in=4).tolist() == [[False] * 4 + [True] * 2]
    never = torch.zeros_like(dones)
    assert td_mask(never, whole, burn_in=2).tolist() == [[False] * 2 + [True] * 3 + [False]]
    # A hole has no target and gives none to the step before it.
    hole = flags(1, 1, 0, 1, 1, 1)
    assert td_mask(dones, hole, burn_in=0).tolist() == [[True, False, False, True, True, True]]
    # An end in a hole is none.
    assert td_mask(flags(0, 1, 1, 0, 0, 0), flags(1, 0, 0, 1, 1, 0), burn_in=0).tolist() == [
        [False, False, False, True, False, False]
    ]


@every_loss
def test_burn_in_carries_no_gradient_and_no_error(loss: Callable[..., LossOutput]) -> None:  # T9
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64).requires_grad_()
    target = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    actions = torch.randint(3, (2, 6), generator=generator)
    rewards = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, 6, dtype=torch.bool)
    arguments = (target, actions, rewards, mask & False, mask)
    output = loss(q, *arguments, gamma=0.9, burn_in=3)
    (gradient,) = torch.autograd.grad(output.loss, q)
    assert gradient[:, :3].abs().max().item() == 0
    assert (gradient[:, 3:5].abs().sum(dim=(0, 2)) > 0).all()
    rest = loss(q[:, 3:], *(x[:, 3:] for x in arguments), gamma=0.9, burn_in=0)
    torch.testing.assert_close(rest.loss, output.loss)
    # T - 1 = 5 steps have a target, so a burn-in of 4 leaves one and of 5 none.
    assert loss(q, *arguments, gamma=0.9, burn_in=4).loss.isfinite()
    for burn_in in (5, 6, -1):
        with pytest.raises(ValueError, match=r"0 <= burn_in < T - 1 = 5"):
            loss(q, *arguments, gamma=0.9, burn_in=burn_in)


def test_burn_in_state_stops_the_gradient_that_cutting_the_loss_lets_through() -> None:
    torch.manual_seed(0)
    core = torch.nn.GRU(2, 3, batch_first=True)
    inputs = torch.randn(1, 5, 2, requires_grad=True)
    state = burn_in_state(core, inputs, burn_in=2)
    outputs, _ = core(inputs[:, 2:], state)
    whole, _ = core(inputs)
    torch.testing.assert_close(outputs, whole[:, 2:])
    (stopped,) = torch.autograd.grad(outputs.sum(), inputs)
    (through,) = torch.autograd.grad(whole[:, 2:].sum(), inputs)
    assert stopped[:, :2].abs().max().item() == 0
    assert stopped[:, 2:].abs().min().item() > 0
    assert through[:, :2].abs().max().item() > 0
    torch.testing.assert_close(burn_in_state(core, inputs, burn_in=1), core(inputs[:, :1])[1])
    # An LSTM's state is a pair.
    hidden, cell = burn_in_state(torch.nn.LSTM(2, 3, batch_first=True), inputs, burn_in=4)
    assert not hidden.requires_grad
    assert not cell.requires_grad
    for burn_in in (0, 5):
        with pytest.raises(ValueError, match="1 <= burn_in < T = 5"):
            burn_in_state(core, inputs, burn_in=burn_in)


def draw(seed: int) -> tuple[Tensor, ...]:
    """Five rows of up to six steps; the first two end, the others are cut off."""
    generator = torch.Generator().manual_seed(seed)
    q, target = torch.randn(2, 5, 6, 3, generator=generator, dtype=torch.float64)
    actions = torch.randint(3, (5, 6), generator=generator)
    rewards = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    lengths = torch.randint(3, 7, (5, 1), generator=generator)
    places = torch.arange(6)
    mask = places < lengths
    dones = (places == lengths - 1) & (torch.arange(5) < 2)[:, None]
    return q, target, actions, rewards, dones, mask


@every_loss
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), cut=st.integers(1, 4), pad=st.integers(0, 3))
def test_masked_places_padding_order_and_split_change_nothing(
    loss: Callable[..., LossOutput], seed: int, cut: int, pad: int
) -> None:
    arguments = draw(seed)
    mask = arguments[-1]
    q = arguments[0].clone().requires_grad_()

    def run(*arguments: Tensor, denominator: Tensor | None = None) -> LossOutput:
        return loss(*arguments, gamma=0.9, burn_in=1, denominator=denominator)

    plain = run(q, *arguments[1:])
    (gradient,) = torch.autograd.grad(plain.loss, q)
    assert gradient.abs().max() > 0
    assert gradient[~mask].abs().max().item() == 0 or mask.all()

    # NaN in masked places, and more of them.
    junk = [
        torch.where(
            mask[..., None] if x.ndim == 3 else mask, x, NAN if x.is_floating_point() else 1
        )
        for x in arguments[1:5]
    ]
    spoilt_q = torch.where(mask[..., None], q, NAN)
    wide = [
        torch.cat([x, x[:, -1:].expand(-1, pad, *x.shape[2:])], dim=1)
        for x in (spoilt_q, *junk[:3], junk[3].bool())
    ]
    more = torch.nn.functional.pad(mask, (0, pad), value=False)
    spoilt = run(*wide, more)
    torch.testing.assert_close(spoilt.loss, plain.loss)
    (spoilt_gradient,) = torch.autograd.grad(spoilt.loss, q)
    torch.testing.assert_close(spoilt_gradient, gradient)

    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    moved = run(*(x[order] for x in arguments))
    torch.testing.assert_close(moved.loss, plain.loss)

    counted = td_mask(arguments[4], mask, burn_in=1).sum(dim=1)
    split = [
        run(q[part], *(x[part] for x in arguments[1:]), denominator=counted.sum())
        for part in (slice(0, cut), slice(cut, 5))
    ]
    torch.testing.assert_close(split[0].loss + split[1].loss, plain.loss)
    (split_gradient,) = torch.autograd.grad(split[0].loss + split[1].loss, q)
    torch.testing.assert_close(split_gradient, gradient)
    joined = combine_metrics(
        [part.metrics for part in split], [counted[:cut].sum(), counted[cut:].sum()]
    )
    for metric, value in plain.metrics.items():
        torch.testing.assert_close(joined[metric], value)
        assert not value.requires_grad


def test_the_fixed_point_is_the_value_of_the_history() -> None:
    # Two histories show the same last observation: after A it pays 1, after B it pays 0. Values
    # that see the history have no error; one value for both observations cannot.
    q = torch.tensor([[[0.5], [1.0]], [[0.0], [0.0]]])
    rewards, dones = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[False, True]] * 2)
    mask, actions = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.long)
    output = recurrent_td_loss(q, q, actions, rewards, dones, mask, gamma=0.5, burn_in=0)
    assert output.loss.item() == 0
    blind = torch.tensor([[[0.5], [0.5]], [[0.0], [0.5]]])
    output = recurrent_td_loss(blind, blind, actions, rewards, dones, mask, gamma=0.5, burn_in=0)
    assert output.loss.item() > 0.1


@every_loss
def test_refusals(loss: Callable[..., LossOutput]) -> None:
    def run(**changed: object) -> None:
        arguments: dict[str, object] = {
            "q_values": Q, "target_q_values": TARGET, "actions": ACTIONS, "rewards": REWARDS,
            "dones": NEVER, "mask": ALL, "gamma": 0.5, "burn_in": 0, **changed,
        }  # fmt: skip
        loss(**arguments)

    for name, value in (
        ("q_values", Q[:, :2]), ("target_q_values", TARGET[..., :1]), ("actions", ACTIONS[:, :2]),
        ("rewards", REWARDS[:, :2]), ("dones", NEVER[:, :2]), ("mask", ALL[:, :2]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="shapes differ"):
            run(**{name: value})
    for name in ("q_values", "target_q_values", "actions", "rewards", "dones"):
        tensors = {"q_values": Q, "target_q_values": TARGET, "actions": ACTIONS, "rewards": REWARDS,
                   "dones": NEVER}  # fmt: skip
        with pytest.raises(ValueError, match="devices differ"):
            run(**{name: tensors[name].to("meta")})
    with pytest.raises(ValueError, match=r"as \(B, T, A\)"):
        run(q_values=Q[0], target_q_values=TARGET[0])
    for wrong in (torch.tensor([[0, 2, 0]]), torch.tensor([[-1, 0, 0]])):
        with pytest.raises(ValueError, match=r"actions must lie in 0..1"):
            run(actions=wrong)
    for gamma in (-0.01, 1.01, NAN):
        with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\]"):
            run(gamma=gamma)
    for gamma in (0.0, 1.0):
        run(gamma=gamma)
    with pytest.raises(ValueError, match="a row holds one episode"):
        run(dones=flags(1, 0, 0))
    with pytest.raises(ValueError, match="must be bool"):
        run(dones=NEVER.float())
    with pytest.raises(ValueError, match="must be bool"):
        run(mask=ALL.float())
    with pytest.raises(ValueError, match="selects nothing"):
        run(mask=flags(1, 0, 0))
    with pytest.raises(ValueError, match="denominator must be positive"):
        run(denominator=0.0)
    run(denominator=1.0, mask=flags(1, 0, 0))
