"""What holds a policy back: a reference that follows by hand, and a budget that puts weights back bit by bit."""

from __future__ import annotations

import pytest
import tiny
import torch

from rlhf.errors import StageFailed
from rlhf.optimise.anchor import Budget, follow, following


def test_a_following_reference_starts_as_the_start_and_is_its_own() -> None:
    start = tiny.llama().train()
    reference = following(start)
    assert not reference.training
    assert tiny.same_weights(reference, tiny.weights_of(start))
    tiny.shift(reference)
    assert tiny.same_weights(start, tiny.weights_of(tiny.llama()))


def test_follow_by_hand() -> None:
    reference, policy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    with torch.no_grad():
        reference.weight.copy_(torch.tensor([[1.0, -2.0]]))
        policy.weight.copy_(torch.tensor([[3.0, 2.0]]))
        reference.bias.fill_(0.0)
        policy.bias.fill_(8.0)
    follow(reference, policy, 0.75)  # type: ignore[arg-type]
    assert reference.weight.tolist() == [[1.5, -1.0]]  # .75 * 1 + .25 * 3; .75 * -2 + .25 * 2
    assert reference.bias.item() == 2.0
    assert policy.weight.tolist() == [[3.0, 2.0]]
    follow(reference, policy, 0.5)  # type: ignore[arg-type]
    assert reference.weight.tolist() == [[2.25, 0.5]]
    assert reference.weight.grad_fn is None


def test_following_ends_at_a_policy_that_stands_still() -> None:
    reference, policy = following(tiny.llama()), tiny.llama(1)
    for _ in range(60):
        follow(reference, policy, 0.5)
    for mine, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_within_the_budget_up_to_the_bound_itself() -> None:
    policy = tiny.llama()
    budget = Budget(2.0, policy)
    for step, kl in enumerate([0.0, 1.0, 2.0]):
        assert budget.within(kl, step=step, updates=4 * step)
    assert budget.stopped_at is None
    assert tiny.same_weights(policy, tiny.weights_of(tiny.llama()))


def test_over_the_budget_the_last_good_weights_come_back_to_the_bit() -> None:
    policy = tiny.llama()
    budget = Budget(2.0, policy)
    assert budget.within(0.0, step=0, updates=0)
    tiny.shift(policy, 0.01)
    assert budget.within(1.5, step=1, updates=4)
    good = tiny.weights_of(policy)
    tiny.shift(policy, 0.01)
    assert not tiny.same_weights(policy, good)
    assert not budget.within(2.000001, step=2, updates=8)
    assert tiny.same_weights(policy, good)
    assert budget.stopped_at == (1, 4)


@pytest.mark.parametrize("steps_within", [0, 1])
def test_a_first_step_over_the_budget_is_refused_and_nothing_is_put_back(steps_within: int) -> None:
    """There is nothing to keep but the start itself."""
    policy = tiny.llama()
    budget = Budget(2.0, policy)
    if steps_within:
        assert budget.within(0.0, step=0, updates=0)
    tiny.shift(policy)
    moved = tiny.weights_of(policy)
    with pytest.raises(
        StageFailed, match=r"policy 3 nats[\s\S]*kl_budget_nats=2[\s\S]*mend: lower"
    ):
        budget.within(3.0, step=1, updates=4)
    assert tiny.same_weights(policy, moved)
    assert budget.stopped_at is None


def test_a_kl_that_is_no_number_is_over_every_budget() -> None:
    budget = Budget(2.0, tiny.llama())
    assert budget.within(0.0, step=0, updates=0)
    assert budget.within(0.5, step=1, updates=1)
    assert not budget.within(float("nan"), step=2, updates=2)


def test_without_a_budget_nothing_is_over_it_and_nothing_is_kept() -> None:
    budget = Budget(None, tiny.llama())
    assert budget.within(1e9, step=1, updates=1)
    assert budget.good is None
