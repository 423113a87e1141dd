"""The one update loop: accumulate, check, clip, step, schedule. Every training stage uses it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from rlhf.algos.types import LossOutput, combine_metrics
from rlhf.config import Optimization
from rlhf.errors import StageFailed


class Learner:
    """AdamW over one model, with linear warm-up, declared decay and global-norm clipping.

    Weights are float32, under bfloat16 autocast too: updates below bfloat16's resolution add up.
    Losses of micro-batches must already be shares of the whole batch's loss (divide by the whole
    batch's denominator), so that any split gives the same gradient.

    `rate_factors` multiply the learning rate of single parameters, by name, which then have no weight
    decay. `ema` is the moving average of the weights, None unless its decay is given: who reads the
    average asks for it.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Optimization,
        *,
        total_updates: int,
        learning_rate: float | None = None,
        ema_decay: float | None = None,
        rate_factors: Mapping[str, float] | None = None,
    ) -> None:
        self.model = model
        self.max_grad_norm = settings.max_grad_norm
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        rate = settings.learning_rate if learning_rate is None else learning_rate
        self.optimizer = torch.optim.AdamW(
            _groups(model, rate, rate_factors or {}),
            lr=rate,
            betas=(settings.adam_betas[0], settings.adam_betas[1]),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: schedule_factor(
                step,
                settings.warmup_steps,
                total_updates,
                settings.final_lr_fraction,
                settings.schedule,
            ),
        )
        self.ema = None if ema_decay is None else Ema(model, ema_decay)
        self.updates = 0

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """The model holds the averaged weights inside, where an average is kept; to save or measure."""
        return contextlib.nullcontext() if self.ema is None else self.ema.swapped_in()

    def update(
        self, micro_batches: Iterable[tuple[float, Callable[[], LossOutput]]], *, name: str
    ) -> dict[str, float]:
        """One optimizer step over micro-batches of (weight, function that computes its loss share).

        Metrics are averaged by weight; `loss` is the sum of shares; `grad_norm` is before clipping.
        `name` says which batch this is, for the error. Raises StageFailed on the first non-finite
        loss or gradient, before it reaches the weights or the optimizer, and on weights that a step
        made non-finite. A metric may be non-finite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss, weights, metrics = 0.0, list[float](), list[dict[str, Tensor]]()
        for weight, compute in micro_batches:
            output = compute()
            weights.append(weight)
            metrics.append(output.metrics)
            value = float(output.loss.detach())
            if not math.isfinite(value):
                raise self._non_finite("the loss", value, name, output.metrics, _KEPT)
            output.loss.backward()
            loss += value
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))
        if not math.isfinite(norm):
            raise self._non_finite("the gradient's norm", norm, name, metrics[-1], _KEPT)
        rate = self.learning_rate
        self.optimizer.step()
        size = float(nn.utils.get_total_norm([p.detach() for p in self.parameters]))
        if not math.isfinite(size):  # a finite gradient can do that only by an enormous rate
            raise self._non_finite("the weights' norm", size, name, metrics[-1], _LOST)
        self.schedule.step()
        self.updates += 1
        if self.ema is not None:
            self.ema.update()
        joined = {key: float(value) for key, value in combine_metrics(metrics, weights).items()}
        return {**joined, "loss": loss, "grad_norm": norm, "learning_rate": rate}

    def state_dict(self) -> dict[str, Any]:
        """Everything of the loop except the weights, which are the model's own to save. Not copied."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "updates": self.updates,
            "ema": None if self.ema is None else self.ema.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, on the parameters' devices. Takes its tensors over.

        Raises ValueError if the state is not of a learner with these parameters.
        """
        if (self.ema is None) != (state["ema"] is None):
            raise ValueError("only one of the learner and its saved state averages the weights")
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.updates = state["updates"]
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])

    def _non_finite(
        self, what: str, value: float, name: str, metrics: Mapping[str, Tensor], consequence: str
    ) -> StageFailed:
        seen = ", ".join(f"{key}={float(number):.4g}" for key, number in metrics.items()) or "none"
        return StageFailed(
            f"{what} is {value} at update {self.updates + 1}, batch {name}\n"
            f"  metrics of that batch: {seen}\n"
            f"  {consequence}"
        )


def _groups(model: nn.Module, rate: float, factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """The trained parameters, and apart from them those with a rate of their own, without decay."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = [{"params": [p for n, p in trained.items() if n not in factors]}]
    for name, factor in factors.items():
        groups.append({"params": [trained[name]], "lr": rate * factor, "weight_decay": 0.0})
    return groups


_KEPT = (
    "the weights are those of the last good update; "
    "mend: lower learning_rate, or look at the named batch"
)
_LOST = "the step itself overflowed; mend: lower learning_rate"


class Ema:
    """Exponential moving average of a model's trained weights, at least float32.

    After each update: average = decay * average + (1 - decay) * weights. It starts at the weights
    as they are, so that it is a weighted mean of real weights from the first update on and needs no
    bias correction; the start's share after n updates is decay^n. float32 loses what moves the
    average by less than its last bit: differences under about 1e-7 / (1 - decay), relatively.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"ema_decay must lie between 0 and 1, got {decay}")
        self._step = get_ema_multi_avg_fn(decay)
        self._weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._average = {
            name: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in self._weights.items()
        }

    def update(self) -> None:
        """Take the model's present weights into the average."""
        averages = list(self._average.values())
        weights = [w.detach().to(a) for w, a in zip(self._weights.values(), averages, strict=True)]
        self._step(averages, weights, None)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model holds the averaged weights inside, and exactly its own again afterwards.

        Costs one more copy of the weights meanwhile. Do not train inside: that is undone.
        """
        kept = {name: weight.detach().clone() for name, weight in self._weights.items()}
        try:
            self._put(self._average)
            yield
        finally:
            self._put(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """The average by parameter name, not copied."""
        return dict(self._average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved average. Raises ValueError if names or shapes are not this model's."""
        own = {name: average.shape for name, average in self._average.items()}
        given = {name: average.shape for name, average in state.items()}
        if own != given:
            wrong = sorted(n for n in own | given if own.get(n) != given.get(n))
            raise ValueError(f"the average does not fit the model at {', '.join(wrong)}")
        for name, average in self._average.items():
            average.copy_(state[name])

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])


def schedule_factor(
    step: int, warmup: int, total: int, final: float, shape: str = "linear"
) -> float:
    """Factor on the learning rate at a step from 0: up over `warmup`, then down to `final` at `total`.

    The way up is linear. `shape` is the way down: `linear`, or `cosine`, a half wave (Loshchilov
    and Hutter 2017, arXiv:1608.03983, eq. 5, one cycle). Raises ValueError on another.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown schedule {shape!r}; use one of {', '.join(SHAPES)}")
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - (1.0 - final) * SHAPES[shape](progress)


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1.0 - math.cos(math.pi * progress)) / 2.0,
}
