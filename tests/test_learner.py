"""The update loop: any split of a batch is one batch, norms, schedules, and a stop on non-finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from rlhf import config
from rlhf.algos.types import LossOutput
from rlhf.errors import StageFailed
from rlhf.learner import Learner, schedule_factor

INPUTS = torch.linspace(-2, 3, 24, dtype=torch.float64).reshape(8, 3)
TARGETS = torch.tensor([1.0, -2, 3, 0, 5, -1, 2, 4], dtype=torch.float64)


def settings(**changes: Any) -> config.Optimization:
    return config.Optimization(**tiny.optimization(**changes))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def share(model: nn.Module, rows: list[int], total: int) -> LossOutput:
    """These rows' share of the batch's mean squared error, with two metrics over the rows."""
    error = (model(INPUTS[rows]).squeeze(1) - TARGETS[rows]).square()
    metrics = {"error": error.detach().mean(), "error_max": error.detach().max()}
    return LossOutput(error.sum() / total, metrics)


def updates(
    sizes: list[int], count: int = 3, **changes: Any
) -> tuple[nn.Module, list[dict[str, float]]]:
    """`count` updates on all eight rows, split into micro-batches of these sizes."""
    model = network()
    learner = Learner(model, settings(**changes), total_updates=count)
    found = []
    for _ in range(count):
        rows = list(range(8))
        parts = [[rows.pop(0) for _ in range(size)] for size in sizes]
        found.append(
            learner.update(
                [(float(len(p)), partial(share, model, p, 8)) for p in parts], name="all rows"
            )
        )
    return model, found


@pytest.mark.parametrize("sizes", [[1] * 8, [3, 5], [4, 4], [7, 1]])
def test_accumulation_does_not_depend_on_the_split(sizes: list[int]) -> None:
    whole, whole_metrics = updates([8])
    split, split_metrics = updates(sizes)
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert not torch.allclose(next(network().parameters()), next(whole.parameters()), atol=1e-3)
    for one, other in zip(whole_metrics, split_metrics, strict=True):
        assert one == pytest.approx(other, abs=1e-6)  # the mean by weight, and the maximum


def test_metrics_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False)
    learner = Learner(model, settings(), total_updates=1)

    def compute(loss: float, metric: float) -> LossOutput:
        metrics = {"x": torch.tensor(metric), "x_max": torch.tensor(metric)}
        return LossOutput(model.weight.sum() * 0 + loss, metrics)

    found = learner.update(
        [(1.0, partial(compute, 0.5, 8.0)), (3.0, partial(compute, 2.0, 4.0))], name="b"
    )
    assert found["x"] == 5.0  # (1 * 8 + 3 * 4) / 4
    assert found["x_max"] == 8.0
    assert found["loss"] == 2.5
    assert found["grad_norm"] == 0.0


def linear(
    weight: list[float], gradient: list[float], **changes: Any
) -> tuple[Tensor, dict[str, float]]:
    """The weights after one update with this gradient."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weight]))
    learner = Learner(model, settings(**changes), total_updates=10)
    loss = partial(lambda: LossOutput((model.weight * torch.tensor([gradient])).sum(), {}))
    return model.weight.detach(), learner.update([(1.0, loss)], name="b")


def test_gradient_norm_is_that_before_clipping() -> None:
    _, metrics = linear([0.0, 0.0], [3.0, 4.0], max_grad_norm=1.0)
    assert metrics["grad_norm"] == pytest.approx(5.0)


def test_clipping_scales_the_whole_gradient() -> None:
    """AdamW's first step is lr * sign; its second moment shows the size: use two updates by hand."""
    model = nn.Linear(2, 1, bias=False)
    learner = Learner(model, settings(max_grad_norm=1.0), total_updates=10)
    gradient = torch.tensor([[3.0, 4.0]])
    learner.update([(1.0, lambda: LossOutput((model.weight * gradient).sum(), {}))], name="b")
    # Clipped to norm 1: (.6, .8); the first moment is (1 - .9) of it.
    first = learner.optimizer.state[model.weight]["exp_avg"]
    torch.testing.assert_close(first, torch.tensor([[0.06, 0.08]]), atol=1e-5, rtol=0)


def test_a_small_gradient_is_not_scaled_up() -> None:
    model = nn.Linear(2, 1, bias=False)
    learner = Learner(model, settings(max_grad_norm=1.0), total_updates=10)
    gradient = torch.tensor([[0.03, 0.04]])
    learner.update([(1.0, lambda: LossOutput((model.weight * gradient).sum(), {}))], name="b")
    first = learner.optimizer.state[model.weight]["exp_avg"]
    torch.testing.assert_close(first, torch.tensor([[0.003, 0.004]]), atol=1e-6, rtol=0)


def test_weight_decay_is_decoupled() -> None:
    # w <- w (1 - lr * decay) - lr * sign(g): 2 * (1 - .01 * .5) - .01 = 1.98
    weight, _ = linear([2.0, 2.0], [1.0, 1.0], weight_decay=0.5, max_grad_norm=100.0)
    torch.testing.assert_close(weight, torch.tensor([[1.98, 1.98]]), atol=1e-5, rtol=0)


def test_gradients_of_one_update_do_not_leak_into_the_next() -> None:
    model = nn.Linear(1, 1, bias=False)
    learner = Learner(model, settings(max_grad_norm=1e9), total_updates=10)
    for size in (7.0, 2.0):
        found = learner.update(
            [(1.0, partial(lambda g: LossOutput(model.weight.sum() * g, {}), size))], name="b"
        )
        assert found["grad_norm"] == pytest.approx(size)


def test_schedule_by_hand() -> None:
    # Warm-up over 4 of 12 updates, then linear down to .2: a drop of .8 / 8 = .1 per update.
    found = [schedule_factor(step, 4, 12, 0.2) for step in range(14)]
    expected = [0.25, 0.5, 0.75, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2]
    assert found == pytest.approx(expected)
    assert [schedule_factor(step, 0, 3, 1.0) for step in range(3)] == [1, 1, 1]
    assert schedule_factor(5, 10, 3, 0.0) == pytest.approx(0.6)  # warm-up longer than training


def test_learning_rate_follows_the_schedule_and_is_reported() -> None:
    _, found = updates([8], count=4, warmup_steps=2, final_lr_fraction=0.0, learning_rate=0.4)
    # Factors 1/2, 1, 1, 1/2 of .4.
    assert [m["learning_rate"] for m in found] == pytest.approx([0.2, 0.4, 0.4, 0.2])


def test_the_rate_of_the_critic_replaces_the_declared_one() -> None:
    learner = Learner(network(), settings(), total_updates=1, learning_rate=0.5)
    assert learner.learning_rate == 0.5


def _bad_loss(model: nn.Module) -> Tensor:
    return next(model.parameters()).sum() * math.nan


def _bad_gradient(model: nn.Module) -> Tensor:
    """A finite loss whose gradient is infinite: sqrt at 0."""
    return (next(model.parameters()).sum() * 0).sqrt()


@pytest.mark.parametrize(
    ("bad", "words"), [(_bad_loss, "the loss is nan"), (_bad_gradient, "gradient's norm is nan")]
)
def test_non_finite_stops_names_the_batch_and_leaves_the_weights(
    bad: Callable[[nn.Module], Tensor], words: str
) -> None:
    model = network()
    learner = Learner(model, settings(), total_updates=4)
    good = (4.0, partial(share, model, [0, 1, 2, 3], 8))
    learner.update([good], name="fine")
    before, rate = tiny.weights_of(model), learner.learning_rate
    broken = (4.0, lambda: LossOutput(bad(model), {"accuracy": torch.tensor(0.25)}))
    with pytest.raises(StageFailed) as caught:
        learner.update([good, broken], name="pairs [3, 5]")
    message = str(caught.value)
    assert words in message
    assert "update 2" in message
    assert "pairs [3, 5]" in message
    assert "accuracy=0.25" in message
    assert tiny.same_weights(model, before)
    assert (learner.updates, learner.learning_rate) == (1, rate)
    # What is left behind does not spoil the next update.
    again = learner.update([good], name="fine")
    assert math.isfinite(again["grad_norm"])


def test_frozen_parameters_stay() -> None:
    model = network()
    frozen = next(model.parameters()).requires_grad_(False)
    before = frozen.clone()
    learner = Learner(model, settings(weight_decay=0.5), total_updates=1)
    learner.update([(8.0, partial(share, model, list(range(8)), 8))], name="b")
    assert torch.equal(frozen, before)
