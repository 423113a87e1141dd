"""What losses and advantage estimators return, and how metrics of micro-batches are joined."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LossOutput(NamedTuple):
    """A loss () with its graph, and detached scalar metrics () by name."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Advantages(NamedTuple):
    """Constants for the policy and value losses, all 0 where the response mask is False.

    advantages: (B, T). returns: (B, T), the value function's target, or None where the estimator
    has no value function. metrics: detached scalars (). keep: (B,) bool, the sequences that the
    losses may see, or None for all. state: what an estimator with a memory hands to its next call.
    """

    advantages: Tensor
    returns: Tensor | None
    metrics: dict[str, Tensor]
    keep: Tensor | None = None
    state: Tensor | None = None


def combine_metrics(
    metrics: Sequence[Mapping[str, Tensor]], weights: Sequence[Tensor | float]
) -> dict[str, Tensor]:
    """Joins the metrics of micro-batches: the weighted mean, or the maximum of a `*_max`.

    With each micro-batch's number of response tokens (of pairs, for a loss over pairs) as its
    weight, the result is that of the whole batch. A micro-batch of weight 0 is left out.

    Args:
        metrics: one dict of scalars () per micro-batch, the same names in each.
        weights: one number >= 0 per micro-batch.

    Returns: one dict of scalars ().

    Raises: ValueError if the lengths or the names differ, a weight is negative, or all are 0.
    """
    if len(metrics) != len(weights):
        raise ValueError(f"{len(metrics)} metrics but {len(weights)} weights")
    shares = [float(weight) for weight in weights]
    if any(share < 0 for share in shares) or sum(shares) == 0:
        raise ValueError(f"weights must be >= 0 and not all 0, got {shares}")
    if any(one.keys() != metrics[0].keys() for one in metrics):
        raise ValueError("micro-batches report different metrics")
    counted = [(one, share) for one, share in zip(metrics, shares, strict=True) if share > 0]
    joined = {}
    for name in metrics[0]:
        values = torch.stack([one[name].detach() for one, _ in counted])
        if name.endswith("_max"):
            joined[name] = values.max()
        else:
            share = values.new_tensor([share for _, share in counted])
            joined[name] = (values * share).sum() / share.sum()
    return joined
