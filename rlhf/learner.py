"""The one update loop: accumulate, check, clip, step, schedule. Every training stage uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from rlhf.algos.types import LossOutput, combine_metrics
from rlhf.config import Optimization
from rlhf.errors import StageFailed


class Learner:
    """AdamW over one model, with linear warm-up, linear decay and global-norm clipping.

    Weights are float32. Losses of micro-batches must already be shares of the whole batch's loss
    (divide by the whole batch's denominator), so that any split gives the same gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Optimization,
        *,
        total_updates: int,
        learning_rate: float | None = None,
    ) -> None:
        self.model = model
        self.max_grad_norm = settings.max_grad_norm
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate if learning_rate is None else learning_rate,
            betas=(settings.adam_betas[0], settings.adam_betas[1]),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: schedule_factor(
                step, settings.warmup_steps, total_updates, settings.final_lr_fraction
            ),
        )
        self.updates = 0

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def update(
        self, micro_batches: Iterable[tuple[float, Callable[[], LossOutput]]], *, name: str
    ) -> dict[str, float]:
        """One optimizer step over micro-batches of (weight, function that computes its loss share).

        Metrics are averaged by weight; `loss` is the sum of shares; `grad_norm` is before clipping.
        `name` says which batch this is, for the error. Raises StageFailed on the first non-finite
        loss or gradient, before it reaches the weights.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss, weights, metrics = 0.0, list[float](), list[dict[str, Tensor]]()
        for weight, compute in micro_batches:
            output = compute()
            weights.append(weight)
            metrics.append(output.metrics)
            value = float(output.loss.detach())
            if not math.isfinite(value):
                raise self._non_finite("the loss", value, name, output.metrics)
            output.loss.backward()
            loss += value
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))
        if not math.isfinite(norm):
            raise self._non_finite("the gradient's norm", norm, name, metrics[-1])
        rate = self.learning_rate
        self.optimizer.step()
        self.schedule.step()
        self.updates += 1
        joined = {key: float(value) for key, value in combine_metrics(metrics, weights).items()}
        return {**joined, "loss": loss, "grad_norm": norm, "learning_rate": rate}

    def _non_finite(
        self, what: str, value: float, name: str, metrics: dict[str, Tensor]
    ) -> StageFailed:
        seen = ", ".join(f"{key}={float(number):.4g}" for key, number in metrics.items()) or "none"
        return StageFailed(
            f"{what} is {value} at update {self.updates + 1}, batch {name}\n"
            f"  metrics of that batch: {seen}\n"
            "  the weights are those of the last good update; "
            "mend: lower learning_rate, or look at the named batch"
        )


def schedule_factor(step: int, warmup: int, total: int, final: float) -> float:
    """Factor on the learning rate at a step from 0: linear up over `warmup`, linear down to `final`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - (1.0 - final) * progress
