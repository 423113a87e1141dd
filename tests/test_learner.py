"""The update loop: any split of a batch is one batch, norms, schedules, and a stop on non-finite numbers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlhf import config
from rlhf.algos.types import LossOutput
from rlhf.errors import StageFailed
from rlhf.learner import Ema, Learner, schedule_factor

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


def test_one_by_eight_and_eight_by_one_have_one_norm_also_where_it_is_clipped() -> None:
    """The norm is of the whole batch's gradient, before clipping, and the step is of the clipped one."""
    whole, (of_whole, *_) = updates([8], max_grad_norm=0.5)
    split, (of_split, *_) = updates([1] * 8, max_grad_norm=0.5)
    model = network()
    share(model, list(range(8)), 8).loss.backward()
    squares = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    assert math.sqrt(squares) > 1
    assert of_whole["grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-9)
    assert of_split["grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-9)
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


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


def test_cosine_schedule_by_hand() -> None:
    # Half a wave from 1 to .2 over 4 updates: .2 + .8 (1 + cos(pi k / 4)) / 2, cos(pi / 4) = .70711.
    found = [schedule_factor(step, 2, 6, 0.2, "cosine") for step in range(8)]
    expected = [0.5, 1, 1, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447, 0.2, 0.2]
    assert found == pytest.approx(expected, abs=1e-6)
    assert schedule_factor(6, 2, 6, 0.0, "cosine") == 0.0
    assert [schedule_factor(step, 0, 3, 1.0, "cosine") for step in range(4)] == [1, 1, 1, 1]
    assert schedule_factor(3, 2, 6, 0.2) == schedule_factor(3, 2, 6, 0.2, "linear") == 0.8


@pytest.mark.parametrize("step", [0, 5])
def test_an_unknown_schedule_is_refused_during_warmup_too(step: int) -> None:
    with pytest.raises(ValueError, match="unknown schedule 'step'; use one of linear, cosine"):
        schedule_factor(step, 2, 6, 0.2, "step")


def test_the_declared_schedule_is_used() -> None:
    changes: dict[str, Any] = {"warmup_steps": 0, "final_lr_fraction": 0.0, "learning_rate": 0.4}
    _, found = updates([8], count=4, schedule="cosine", **changes)
    # .4 (1 + cos(pi k / 4)) / 2.
    expected = [0.4, 0.4 * 0.853553, 0.2, 0.4 * 0.146447]
    assert [m["learning_rate"] for m in found] == pytest.approx(expected, abs=1e-6)


def test_learning_rate_follows_the_schedule_and_is_reported() -> None:
    _, found = updates([8], count=4, warmup_steps=2, final_lr_fraction=0.0, learning_rate=0.4)
    # Factors 1/2, 1, 1, 1/2 of .4.
    assert [m["learning_rate"] for m in found] == pytest.approx([0.2, 0.4, 0.4, 0.2])


def test_the_rate_of_the_critic_replaces_the_declared_one() -> None:
    learner = Learner(network(), settings(), total_updates=1, learning_rate=0.5)
    assert learner.learning_rate == 0.5


def _state(learner: Learner) -> dict[str, Tensor]:
    """Every number that an update changes: weights, the optimizer's moments and steps, the average."""
    moments = learner.optimizer.state_dict()["state"]
    return {
        **tiny.weights_of(learner.model),
        **{f"{i}/{name}": v.clone() for i, of in moments.items() for name, v in of.items()},
        **{f"ema/{n}": v.clone() for n, v in (learner.ema.state_dict() if learner.ema else {}).items()},
        "rate": torch.tensor(learner.learning_rate),
        "updates": torch.tensor(learner.updates),
    }  # fmt: skip


def _same_state(learner: Learner, before: dict[str, Tensor]) -> bool:
    now = _state(learner)
    return now.keys() == before.keys() and all(torch.equal(now[n], before[n]) for n in before)


def _bad_loss(model: nn.Module) -> Tensor:
    return next(model.parameters()).sum() * math.nan


def _infinite_loss(model: nn.Module) -> Tensor:
    return next(model.parameters()).sum() * 0 - math.inf


def _bad_gradient(model: nn.Module) -> Tensor:
    """A finite loss whose gradient is NaN: sqrt at 0, times 0."""
    return (next(model.parameters()).sum() * 0).sqrt()


def _infinite_gradient(model: nn.Module) -> Tensor:
    """A finite loss whose gradient is infinite: sqrt at 0."""
    weight = next(model.parameters())
    return (weight - weight.detach()).sqrt().sum()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (_bad_loss, "the loss is nan"),
        (_infinite_loss, "the loss is -inf"),
        (_bad_gradient, "gradient's norm is nan"),
        (_infinite_gradient, "gradient's norm is inf"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_non_finite_stops_names_the_batch_and_leaves_weights_and_optimizer(
    bad: Callable[[nn.Module], Tensor], words: str, first: bool
) -> None:
    model = network()
    learner = Learner(model, settings(final_lr_fraction=0.5), total_updates=4, ema_decay=0.9)
    good = (4.0, partial(share, model, [0, 1, 2, 3], 8))
    learner.update([good], name="fine")
    before = _state(learner)
    metrics = {"error": torch.tensor(0.25), "error_max": torch.tensor(0.5)}
    broken = (4.0, lambda: LossOutput(bad(model), metrics))
    with pytest.raises(StageFailed) as caught:
        learner.update([broken, good] if first else [good, broken], name="pairs [3, 5]")
    message = str(caught.value)
    assert words in message
    assert "update 2, batch pairs [3, 5]" in message
    if "loss" in words or not first:
        assert "error=0.25" in message
    assert "the weights are those of the last good update" in message
    assert _same_state(learner, before)
    # What is left behind does not spoil the next update: it is that of a learner that saw no fault.
    learner.update([good], name="fine")
    other = Learner(network(), settings(final_lr_fraction=0.5), total_updates=4, ema_decay=0.9)
    for _ in range(2):
        other.update([(4.0, partial(share, other.model, [0, 1, 2, 3], 8))], name="fine")
    assert _same_state(learner, _state(other))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_metric_does_not_stop(value: float) -> None:
    model = network()
    learner = Learner(model, settings(), total_updates=4)
    before = tiny.weights_of(model)

    def compute() -> LossOutput:
        loss, metrics = share(model, list(range(8)), 8)
        return LossOutput(loss, {**metrics, "odd": torch.tensor(value)})

    found = learner.update([(8.0, compute)], name="b")
    assert found["odd"] == pytest.approx(value, nan_ok=True)
    assert math.isfinite(found["error"])
    assert not tiny.same_weights(model, before)


def test_a_step_that_overflows_the_weights_stops() -> None:
    """The step lr * sign(g) = 3e38 makes a weight whose norm float32 does not hold; the gradient is 1."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    learner = Learner(model, settings(learning_rate=3e38), total_updates=9, ema_decay=0.5)
    step = (1.0, lambda: LossOutput(-model.weight.sum(), {"x": torch.tensor(7.0)}))
    with pytest.raises(
        StageFailed, match=r"weights' norm is inf at update 1, batch b\n.*x=7"
    ) as caught:
        learner.update([step], name="b")
    assert "the step itself overflowed; mend: lower learning_rate" in str(caught.value)
    assert learner.ema is not None
    assert learner.ema.state_dict()["weight"].item() == 1.0  # the average is still good


EXPONENTS = st.integers(-45, 38)


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(EXPONENTS, EXPONENTS), min_size=1, max_size=3),
    st.sampled_from([1e-3, 1.0, 1e9]),
    st.sampled_from([[0.9, 0.999], [0.0, 0.0], [0.99, 0.5]]),
)
def test_no_finite_gradient_makes_weights_non_finite(
    steps: list[tuple[int, int]], limit: float, betas: list[float]
) -> None:
    """From the smallest float32 to the largest: an update, or a stop before it."""
    model = nn.Linear(2, 1, bias=False)
    changes: dict[str, Any] = {"max_grad_norm": limit, "adam_betas": betas, "learning_rate": 1.0}
    learner = Learner(model, settings(**changes), total_updates=len(steps))
    for exponents in steps:
        gradient = torch.tensor([[10.0**e for e in exponents]])
        before = tiny.weights_of(model)

        def compute(gradient: Tensor = gradient) -> LossOutput:
            zero = model.weight - model.weight.detach()  # so that the loss is finite
            return LossOutput((zero * gradient).sum(), {})

        stopped = False
        try:
            learner.update([(1.0, compute)], name="b")
        except StageFailed:
            stopped = True
        assert not stopped or tiny.same_weights(model, before)
        assert stopped == (10.0 ** max(exponents) > 1.4e19)  # whose square is above float32
        assert model.weight.isfinite().all()


def test_updates_below_the_resolution_of_bfloat16_add_up() -> None:
    """Under autocast the weights stay float32: 1 + 64 steps of 1e-4 is 1.0064; bfloat16 knows 1 and 1.0078."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    learner = Learner(model, settings(learning_rate=1e-4), total_updates=64)

    def compute() -> LossOutput:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(torch.ones(1, 1))
        assert output.dtype == torch.bfloat16
        return LossOutput(-output.float().sum(), {})

    learner.update([(1.0, compute)], name="b")
    assert model.weight.dtype == torch.float32
    assert model.weight.bfloat16().item() == 1.0  # one step alone would be lost
    for _ in range(63):
        learner.update([(1.0, compute)], name="b")
    assert model.weight.item() == pytest.approx(1.0064, abs=1e-5)
    moments = learner.optimizer.state[model.weight]
    assert moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.float32


# --- the moving average ---


def _averaging(weight: float, decay: float, learning_rate: float = 1.0) -> Learner:
    """A learner of one weight, which `_step` moves by the learning rate."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(weight)
    return Learner(
        model, settings(learning_rate=learning_rate), total_updates=9, ema_decay=decay
    )  # fmt: skip


def _step(learner: Learner, sign: float = 1.0) -> None:
    weight = learner.model.weight
    assert isinstance(weight, Tensor)
    learner.update([(1.0, lambda: LossOutput(-sign * weight.sum(), {}))], name="b")


def test_average_by_hand() -> None:
    learner = _averaging(4.0, 0.75)
    assert learner.ema is not None
    found = [learner.ema.state_dict()["weight"].item()]
    for _ in range(3):
        _step(learner)
        found.append(learner.ema.state_dict()["weight"].item())
    # Weights 4, 5, 6, 7: 4; .75 * 4 + .25 * 5 = 4.25; .75 * 4.25 + 1.5 = 4.6875;
    # .75 * 4.6875 + 1.75 = 5.265625.
    assert found == pytest.approx([4, 4.25, 4.6875, 5.265625], abs=1e-5)


def test_averaging_does_not_change_training() -> None:
    plain, _ = updates([3, 5])
    model = network()
    learner = Learner(model, settings(), total_updates=3, ema_decay=0.5)
    for _ in range(3):
        parts = [(float(len(p)), partial(share, model, p, 8)) for p in ([0, 1, 2], [3, 4, 5, 6, 7])]
        learner.update(parts, name="b")
        with learner.averaged():
            pass
    assert tiny.same_weights(model, tiny.weights_of(plain))


def test_swapped_in_holds_the_average_and_gives_the_weights_back_to_the_bit() -> None:
    learner = _averaging(0.1, 0.5, learning_rate=0.3)
    assert learner.ema is not None
    _step(learner)
    before = learner.model.weight.detach().clone()  # type: ignore[operator]
    with learner.averaged():
        assert learner.model.weight.item() == learner.ema.state_dict()["weight"].item()  # type: ignore[operator]
        assert learner.model.weight.item() == pytest.approx(0.25)  # type: ignore[operator]
        with learner.ema.swapped_in():
            assert learner.model.weight.item() == pytest.approx(0.25)  # type: ignore[operator]
        assert learner.model.weight.item() == pytest.approx(0.25)  # type: ignore[operator]
    assert torch.equal(learner.model.weight, before)  # type: ignore[arg-type]
    assert learner.ema.state_dict()["weight"].item() == pytest.approx(0.25)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_weights_come_back_after_an_error(error: type[BaseException]) -> None:
    learner = _averaging(0.1, 0.5)
    _step(learner)
    before = tiny.weights_of(learner.model)
    with pytest.raises(error):
        with learner.averaged():
            raise error
    assert tiny.same_weights(learner.model, before)


def test_without_a_decay_there_is_no_average() -> None:
    learner = Learner(network(), settings(), total_updates=1)
    assert learner.ema is None
    before = tiny.weights_of(learner.model)
    with learner.averaged():
        assert tiny.same_weights(learner.model, before)


def test_the_average_of_low_precision_weights_is_float32_and_of_wide_ones_float64() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = Ema(model, 0.99)
    with torch.no_grad():
        model.weight.fill_(1.0078125)  # the next number that bfloat16 knows
    ema.update()
    assert ema.state_dict()["weight"].item() == pytest.approx(1.000078125, abs=1e-7)
    kept = model.weight.detach().clone()
    with ema.swapped_in():
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.item() == 1.0
    assert torch.equal(model.weight, kept)
    assert Ema(network(), 0.9).state_dict()["0.weight"].dtype == torch.float64


def test_a_shared_weight_is_averaged_once_and_a_frozen_one_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    ema = Ema(model, 0.5)
    assert set(ema.state_dict()) == {"0.weight", "2.weight"}
    with torch.no_grad():
        start = model[0].weight.clone()
        model[0].weight.add_(1.0)
    ema.update()
    with ema.swapped_in():
        torch.testing.assert_close(model[1].weight, start + 0.5)


def test_a_loaded_average_goes_on_to_the_bit() -> None:
    model, other = network(), network()
    straight, resumed = Ema(model, 0.9), Ema(other, 0.9)
    weights = list(zip(model.parameters(), other.parameters(), strict=True))

    def move() -> None:
        with torch.no_grad():
            for one, two in weights:
                one.mul_(1.1)
                two.copy_(one)

    move()
    straight.update()
    saved = {name: value.clone() for name, value in straight.state_dict().items()}
    resumed.load_state_dict(saved)
    move()
    straight.update()
    resumed.update()
    now = resumed.state_dict()
    assert all(torch.equal(value, now[name]) for name, value in straight.state_dict().items())
    # A copy: what it was loaded from stays.
    assert not any(torch.equal(value, now[name]) for name, value in saved.items())


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("cut", [0, 1, 3, 7])
def test_a_loaded_learner_goes_on_to_the_bit(schedule: str, cut: int) -> None:
    """Saved in the warm-up, at its end and on the way down: moments, rates and averages are those of one run."""

    def learner() -> Learner:
        options = settings(
            warmup_steps=3, schedule=schedule, final_lr_fraction=0.1, weight_decay=0.1
        )
        factors = {"2.bias": 10.0}
        return Learner(
            network(), options, total_updates=8, ema_decay=0.9, rate_factors=factors
        )  # fmt: skip

    def update(learner: Learner) -> dict[str, float]:
        return learner.update([(8.0, partial(share, learner.model, list(range(8)), 8))], name="b")

    straight, first, resumed = learner(), learner(), learner()
    expected = [update(straight) for _ in range(8)]
    for _ in range(cut):
        update(first)
    file = io.BytesIO()
    torch.save([first.state_dict(), dict(first.model.state_dict())], file)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert resumed.updates == cut
    assert resumed.learning_rate == pytest.approx(schedule_factor(cut, 3, 8, 0.1, schedule) * 0.01)
    assert [update(resumed) for _ in range(cut, 8)] == expected[cut:]
    assert tiny.same_weights(resumed.model, tiny.weights_of(straight.model))
    with straight.averaged(), resumed.averaged():
        assert tiny.same_weights(resumed.model, tiny.weights_of(straight.model))


@pytest.mark.parametrize("saved", [None, 0.9])
def test_the_state_of_a_learner_with_another_average_is_refused(saved: float | None) -> None:
    state = Learner(network(), settings(), total_updates=1, ema_decay=saved).state_dict()
    other = Learner(network(), settings(), total_updates=1, ema_decay=None if saved else 0.9)
    with pytest.raises(ValueError, match="averages the weights"):
        other.load_state_dict(state)


def test_an_average_of_another_model_is_refused() -> None:
    ema = Ema(network(), 0.9)
    state = ema.state_dict()
    for wrong in (
        {n: v for n, v in state.items() if n != "2.bias"},
        {**state, "2.bias": torch.zeros(7)},
    ):
        with pytest.raises(ValueError, match=r"does not fit the model at 2\.bias"):
            ema.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"at other"):
        ema.load_state_dict({**state, "other": torch.zeros(1)})


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_decay_outside_0_to_1_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="ema_decay must lie between 0 and 1"):
        Learner(network(), settings(), total_updates=1, ema_decay=decay)


def test_frozen_parameters_stay() -> None:
    model = network()
    frozen = next(model.parameters()).requires_grad_(False)
    before = frozen.clone()
    learner = Learner(model, settings(weight_decay=0.5), total_updates=1)
    learner.update([(8.0, partial(share, model, list(range(8)), 8))], name="b")
    assert torch.equal(frozen, before)


def test_a_parameter_with_a_rate_of_its_own() -> None:
    """Adam's first step is the learning rate, whatever the gradient's size; no decay of that one."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    settings = config.Optimization(**tiny.optimization(learning_rate=0.01, weight_decay=0.5))
    learner = Learner(model, settings, total_updates=2, rate_factors={"bias": 10.0})
    total = partial(_total, model)
    found = learner.update([(1.0, total)], name="one")
    assert found["learning_rate"] == 0.01
    # 1 - .01 - .01 * .5, and 1 - .1.
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[0.985]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(model.bias.detach(), torch.tensor([0.9]), atol=1e-5, rtol=0)


def _total(model: torch.nn.Linear) -> LossOutput:
    return LossOutput(model(torch.ones(1, 1)).sum(), {})
