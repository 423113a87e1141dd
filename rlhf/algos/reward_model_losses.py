"""Reward models from comparisons: their loss, their accuracy, and committees of them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf.algos.types import LossOutput


def check_pairs(first: Tensor, *others: Tensor) -> None:
    """Raises ValueError unless all are (B,) of one length of at least 1."""
    if first.ndim != 1 or not len(first):
        raise ValueError(f"need at least one pair, as (B,); got shape {tuple(first.shape)}")
    for other in others:
        if other.shape != first.shape:
            raise ValueError(f"shapes differ: {tuple(first.shape)}, {tuple(other.shape)}")


def check_label_smoothing(label_smoothing: float) -> None:
    """Raises ValueError unless the share of wrong labels lies in [0, 0.5)."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")


def pairwise_accuracy(chosen_scores: Tensor, rejected_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Share of decided pairs in which the chosen scores higher, and share of ties among all pairs.

    A tie is neither right nor wrong and does not enter the accuracy; where every pair is tied, the
    accuracy is 0.5, that of a coin.

    Args:
        chosen_scores: (B,).
        rejected_scores: (B,).

    Returns: accuracy () and ties (), each in [0, 1], detached.

    Raises: ValueError if shapes differ or there is no pair.
    """
    check_pairs(chosen_scores, rejected_scores)
    right = (chosen_scores > rejected_scores).sum()
    tied = (chosen_scores == rejected_scores).sum()
    decided = len(chosen_scores) - tied
    accuracy = torch.where(decided > 0, right / decided.clamp(min=1), 0.5)
    return accuracy, tied / len(chosen_scores)


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | None = None,
    label_smoothing: float = 0.0,
    centering: float = 0.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Negative log-likelihood of the choices (Bradley and Terry 1952), d = chosen - rejected.

    Per pair: -(1 - s) log sigmoid(d - margin) - s log sigmoid(-d - margin), s = label_smoothing
    being the share of labels taken to be wrong, plus centering * (chosen + rejected)^2, which fixes
    the free constant of the scores (Eisenstein et al. 2023, arXiv:2312.09244).

    Args:
        chosen_scores: (B,), gradient flows.
        rejected_scores: (B,), gradient flows.
        margin: (B,) constant by which the better one must lead (Touvron et al. 2023,
            arXiv:2307.09288), or None for 0.
        label_smoothing: in [0, 0.5).
        centering: >= 0.
        denominator: number of pairs of an accumulated batch, or None for B.

    Returns: loss () and detached metrics: accuracy, ties (see `pairwise_accuracy`), margin (mean d)
        and score_mean.

    Raises: ValueError if shapes differ, there is no pair or a number is out of bounds.
    """
    check_pairs(chosen_scores, rejected_scores)
    check_label_smoothing(label_smoothing)
    if not centering >= 0:
        raise ValueError(f"centering must be >= 0, got {centering}")
    if margin is None:
        margin = torch.zeros_like(chosen_scores)
    check_pairs(chosen_scores, margin)
    difference = chosen_scores - rejected_scores
    kept = logsigmoid(difference - margin.detach())
    flipped = logsigmoid(-difference - margin.detach())
    per_pair = -(1 - label_smoothing) * kept - label_smoothing * flipped
    per_pair = per_pair + centering * (chosen_scores + rejected_scores).square()
    loss = per_pair.sum() / (len(per_pair) if denominator is None else denominator)
    accuracy, ties = pairwise_accuracy(chosen_scores, rejected_scores)
    metrics = {
        "accuracy": accuracy,
        "ties": ties,
        "margin": difference.detach().mean(),
        "score_mean": torch.cat([chosen_scores, rejected_scores]).detach().mean(),
    }
    return LossOutput(loss, metrics)


def _check_committee(scores: Tensor) -> None:
    if scores.ndim != 2 or not len(scores):
        raise ValueError(f"need scores of a committee as (M, B), got {tuple(scores.shape)}")


def committee_mean(scores: Tensor) -> Tensor:
    """Mean over the members: (M, B) -> (B,). Raises ValueError unless the scores are (M, B)."""
    _check_committee(scores)
    return scores.mean(dim=0)


def committee_min(scores: Tensor) -> Tensor:
    """Worst case over the members (Coste et al. 2023, arXiv:2310.02743): (M, B) -> (B,).

    Raises: ValueError unless the scores are (M, B).
    """
    _check_committee(scores)
    return scores.amin(dim=0)


def committee_mean_minus_variance(scores: Tensor, *, variance_coef: float = 0.5) -> Tensor:
    """Mean - variance_coef * variance over the members (Coste et al. 2023, arXiv:2310.02743).

    Args:
        scores: (M, B); the variance has ddof 0, so one member alone is its own aggregate.
        variance_coef: >= 0, per unit of the score; tie it to the scores' scale.

    Returns: (B,).

    Raises: ValueError unless the scores are (M, B) and variance_coef >= 0.
    """
    _check_committee(scores)
    if not variance_coef >= 0:
        raise ValueError(f"variance_coef must be >= 0, got {variance_coef}")
    return scores.mean(dim=0) - variance_coef * scores.var(dim=0, correction=0)


AGGREGATES: dict[str, Callable[..., Tensor]] = {
    "mean": committee_mean,
    "min": committee_min,
    "mean_minus_variance": committee_mean_minus_variance,
}
