"""Reward models from comparisons and rankings: losses, accuracy, and committees of models.

An entry of REWARD_MODEL_LOSSES names the inputs that it reads and, keyword-only, its options (see
`parts`):

- `chosen_scores`, `rejected_scores` (B,): gradient flows; where a pair is tied, either order.
- `margins` (B,): constants >= 0, by how much the better one must lead.
- `tied` (B,) bool: the label says that neither is better.
- `log_tie` (): the models of ties have a parameter that says how common ties are; gradient flows,
  so that it can be learned with the scores. Start from 0.

Scores enter by their differences alone: their level is free until `centering` fixes it.

Bradley-Terry knows no ties. A tied pair may stand in the data once in each order, which draws its
scores together, however rare ties are; the models of ties tell a tie from two close scores.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from rlhf.algos.masking import check_devices, check_floating, reduce, select, token_metric
from rlhf.algos.types import LossOutput


def check_pairs(first: Tensor, *others: Tensor) -> None:
    """Raises ValueError unless all are (B,) of one length of at least 1, on one device."""
    if first.ndim != 1 or not len(first):
        raise ValueError(f"need at least one pair, as (B,); got shape {tuple(first.shape)}")
    check_floating(first)
    for other in others:
        if other.shape != first.shape:
            raise ValueError(f"shapes differ: {tuple(first.shape)}, {tuple(other.shape)}")
    check_devices(first, *others)


def mean_of(terms: Tensor, denominator: Tensor | float | None) -> Tensor:
    """Sum of the terms (N,) over the denominator, or over N for None.

    Raises: ValueError if the denominator is not positive.
    """
    if denominator is None:
        return terms.sum() / len(terms)
    if not float(denominator) > 0:
        raise ValueError(f"denominator must be positive, got {float(denominator)}")
    return terms.sum() / denominator


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
    accuracy = torch.where(decided > 0, right / decided, 0.5)
    return accuracy, tied / len(chosen_scores)


def _mean_of_pairs(
    per_pair: Tensor,
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    centering: float,
    denominator: Tensor | float | None,
) -> Tensor:
    """Sum over pairs, with the term that fixes the level of the scores, over the denominator."""
    if not centering >= 0:
        raise ValueError(f"centering must be >= 0, got {centering}")
    if centering:
        per_pair = per_pair + centering * (chosen_scores + rejected_scores).square()
    return mean_of(per_pair, denominator)


def bradley_terry_margin_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margins: Tensor,
    *,
    label_smoothing: float = 0.0,
    centering: float = 0.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Bradley-Terry with a lead to keep (Touvron et al. 2023, arXiv:2307.09288, eq. 2).

    Per pair, with d = chosen - rejected: -(1 - s) log sigmoid(d - margin) - s log sigmoid(-d -
    margin), s = label_smoothing being the share of labels taken to be wrong, plus centering *
    (chosen + rejected)^2, which fixes the free level of the scores (Eisenstein et al. 2023,
    arXiv:2312.09244). With margins the scores are no log-odds: sigmoid(d) is not calibrated.

    Args:
        chosen_scores: (B,), gradient flows.
        rejected_scores: (B,), gradient flows.
        margins: (B,), constants in units of the score, larger for a clearer label.
        label_smoothing: in [0, 0.5).
        centering: >= 0.
        denominator: number of pairs of an accumulated batch, or None for B.

    Returns: loss () and detached metrics: accuracy, ties (see `pairwise_accuracy`), margin (mean d)
        and score_mean.

    Raises: ValueError if shapes or devices differ, there is no pair or a number is out of bounds.
    """
    check_pairs(chosen_scores, rejected_scores, margins)
    check_label_smoothing(label_smoothing)
    difference = chosen_scores - rejected_scores
    per_pair = -(1 - label_smoothing) * logsigmoid(difference - margins.detach())
    if label_smoothing:
        per_pair = per_pair - label_smoothing * logsigmoid(-difference - margins.detach())
    loss = _mean_of_pairs(per_pair, chosen_scores, rejected_scores, centering, denominator)
    accuracy, ties = pairwise_accuracy(chosen_scores, rejected_scores)
    metrics = {
        "accuracy": accuracy,
        "ties": ties,
        "margin": difference.detach().mean(),
        "score_mean": _score_mean(chosen_scores, rejected_scores),
    }
    return LossOutput(loss, metrics)


def _score_mean(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    return torch.cat([chosen_scores, rejected_scores]).detach().mean()


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    label_smoothing: float = 0.0,
    centering: float = 0.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Negative log-likelihood of the choices (Bradley and Terry 1952), d = chosen - rejected.

    Per pair: -(1 - s) log sigmoid(d) - s log sigmoid(-d), s = label_smoothing being the share of
    labels taken to be wrong, plus centering * (chosen + rejected)^2, which fixes the free level of
    the scores (Eisenstein et al. 2023, arXiv:2312.09244). At the optimum sigmoid(d) is the share
    of annotators who choose the chosen.

    Args:
        chosen_scores: (B,), gradient flows.
        rejected_scores: (B,), gradient flows.
        label_smoothing: in [0, 0.5).
        centering: >= 0.
        denominator: number of pairs of an accumulated batch, or None for B.

    Returns: loss () and detached metrics: accuracy, ties (see `pairwise_accuracy`), margin (mean d)
        and score_mean.

    Raises: ValueError if shapes or devices differ, there is no pair or a number is out of bounds.
    """
    return bradley_terry_margin_loss(
        chosen_scores,
        rejected_scores,
        torch.zeros_like(chosen_scores),
        label_smoothing=label_smoothing,
        centering=centering,
        denominator=denominator,
    )


def _outcome_loss(
    outcomes: Tensor,
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    tied: Tensor,
    centering: float,
    denominator: Tensor | float | None,
) -> LossOutput:
    """Minus log-probability of what happened, of `outcomes` (B, 3): chosen wins, tie, it loses."""
    actual = torch.where(tied, outcomes[:, 1], outcomes[:, 0])
    loss = _mean_of_pairs(-actual, chosen_scores, rejected_scores, centering, denominator)
    probs = outcomes.detach().exp()
    others = torch.where(tied, probs[:, [0, 2]].amax(dim=1), probs[:, 1:].amax(dim=1))
    metrics = {
        "accuracy": ((1 + (actual.detach().exp() - others).sign()) / 2).mean(),
        "labelled_ties": tied.to(probs.dtype).mean(),
        "expected_ties": probs[:, 1].mean(),
        "score_mean": _score_mean(chosen_scores, rejected_scores),
    }
    return LossOutput(loss, metrics)


def _check_ties(
    chosen_scores: Tensor, rejected_scores: Tensor, tied: Tensor, log_tie: Tensor
) -> None:
    check_pairs(chosen_scores, rejected_scores, tied)
    if tied.dtype != torch.bool:
        raise ValueError(f"tied must be bool, got {tied.dtype}")
    if log_tie.shape != ():
        raise ValueError(f"log_tie must be a scalar (), got shape {tuple(log_tie.shape)}")
    check_devices(chosen_scores, log_tie)


def davidson_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    tied: Tensor,
    log_tie: Tensor,
    *,
    centering: float = 0.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Negative log-likelihood of wins and ties (Davidson 1970), d = chosen - rejected.

    P(win) : P(tie) : P(loss) = exp(d / 2) : nu : exp(-d / 2), nu = exp(log_tie) >= 0. Equal scores
    tie with nu / (2 + nu); the odds of a win against a loss stay those of Bradley-Terry, which
    nu = 0 is. At the best nu the model expects as many ties as there are. Per pair: -log P(tie)
    where tied, else -log P(win); plus centering * (chosen + rejected)^2.

    Args:
        chosen_scores: (B,), gradient flows.
        rejected_scores: (B,), gradient flows.
        tied: (B,) bool.
        log_tie: (), log nu, gradient flows.
        centering: >= 0, see `bradley_terry_loss`.
        denominator: number of pairs of an accumulated batch, or None for B.

    Returns: loss () and detached metrics: accuracy, the share of pairs whose label is the likeliest
        of the three outcomes (1/2 where it shares that place); labelled_ties and expected_ties, the
        shares of ties in the labels and in the model; score_mean.

    Raises: ValueError if shapes or devices differ, there is no pair, `tied` is not boolean or a
        number is out of bounds.
    """
    _check_ties(chosen_scores, rejected_scores, tied, log_tie)
    half = (chosen_scores - rejected_scores) / 2
    outcomes = torch.stack([half, log_tie.to(half).expand_as(half), -half], dim=1).log_softmax(1)
    return _outcome_loss(outcomes, chosen_scores, rejected_scores, tied, centering, denominator)


def _log_expm1_of_exp(x: Tensor) -> Tensor:
    """log(exp(2 exp(x)) - 1), without underflow for small x, where it is x + log 2."""
    twice = 2 * x.exp()
    tiny = twice < 1e-8
    inside = torch.where(tiny, 1.0, twice)
    return torch.where(tiny, x + math.log(2), inside + (-torch.expm1(-inside)).log())


def rao_kupper_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    tied: Tensor,
    log_tie: Tensor,
    *,
    centering: float = 0.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Negative log-likelihood of wins and ties (Rao and Kupper 1967), d = chosen - rejected.

    A lead that the judge perceives as smaller than eta = exp(log_tie) is a tie: P(win) =
    sigmoid(d - eta), P(loss) = sigmoid(-d - eta), P(tie) = (exp(2 eta) - 1) P(win) P(loss), the
    rest. Equal scores tie with tanh(eta / 2); eta = 0 is Bradley-Terry. Per pair: -log P(tie) where
    tied, else -log P(win); plus centering * (chosen + rejected)^2.

    Args:
        chosen_scores: (B,), gradient flows.
        rejected_scores: (B,), gradient flows.
        tied: (B,) bool.
        log_tie: (), log eta, eta in units of the score; gradient flows.
        centering: >= 0, see `bradley_terry_loss`.
        denominator: number of pairs of an accumulated batch, or None for B.

    Returns: as `davidson_loss`.

    Raises: ValueError if shapes or devices differ, there is no pair, `tied` is not boolean or a
        number is out of bounds.
    """
    _check_ties(chosen_scores, rejected_scores, tied, log_tie)
    difference = chosen_scores - rejected_scores
    log_tie = log_tie.to(difference)
    win, loss = logsigmoid(difference - log_tie.exp()), logsigmoid(-difference - log_tie.exp())
    outcomes = torch.stack([win, _log_expm1_of_exp(log_tie) + win + loss, loss], dim=1)
    return _outcome_loss(outcomes, chosen_scores, rejected_scores, tied, centering, denominator)


REWARD_MODEL_LOSSES: dict[str, Callable[..., LossOutput]] = {
    "bradley_terry": bradley_terry_loss,
    "bradley_terry_margin": bradley_terry_margin_loss,
    "davidson": davidson_loss,
    "rao_kupper": rao_kupper_loss,
}


def plackett_luce_loss(
    scores: Tensor, ranked_mask: Tensor, *, denominator: Tensor | float | None = None
) -> LossOutput:
    """Negative log-likelihood of rankings (Plackett 1975, Luce 1959).

    The best is drawn with softmax(scores), the next one from those left, and so on. Per ranking:
    the sum over places k of logsumexp(s_k, s_k+1, ...) - s_k. Two answers make Bradley-Terry; a
    ranking of K weighs as K - 1 choices, where all its pairs would count K (K - 1) / 2 as if they
    were independent.

    Args:
        scores: (B, K), best first in each row, gradient flows.
        ranked_mask: (B, K) bool, True where an answer stands; scores elsewhere are never read.
        denominator: number of rankings of an accumulated batch, or None for B.

    Returns: loss () and detached metrics: accuracy and ties over all pairs of a ranking (see
        `pairwise_accuracy`) and score_mean.

    Raises: ValueError if shapes or devices differ, a ranking has fewer than two answers or there is
        none.
    """
    scores = select(scores, ranked_mask)
    if not len(scores) or int(ranked_mask.sum(dim=1).min()) < 2:
        raise ValueError("need at least one ranking, and two answers in each")
    size = scores.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu()
    itself = torch.eye(size, dtype=torch.bool, device=scores.device)
    remaining = later & (ranked_mask[:, None, :] | itself)  # from place k on; never nothing
    log_totals = torch.where(remaining, scores[:, None, :], -math.inf).logsumexp(dim=2)
    loss = mean_of(select(log_totals - scores, ranked_mask).sum(dim=1), denominator)
    row, better, worse = (
        later & ~itself & ranked_mask[:, None, :] & ranked_mask[:, :, None]
    ).nonzero(as_tuple=True)
    accuracy, ties = pairwise_accuracy(scores[row, better], scores[row, worse])
    score_mean = token_metric(scores, ranked_mask)
    return LossOutput(loss, {"accuracy": accuracy, "ties": ties, "score_mean": score_mean})


def process_loss(
    logits: Tensor,
    labels: Tensor,
    step_mask: Tensor,
    *,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Binary cross-entropy on the ends of steps (Lightman et al. 2023, arXiv:2305.20050).

    Per marked token: -y log sigmoid(z) - (1 - y) log sigmoid(-z); then the mean over all marked
    tokens, so a solution weighs as many times as it has steps. sigmoid(z) is the probability that
    the step is right; a mask that marks every token makes a token-level reward.

    Args:
        logits: (B, T), gradient flows.
        labels: (B, T) constants in [0, 1], the share of annotators (or of completions from here,
            Wang et al. 2024, arXiv:2312.08935) that call the step right.
        step_mask: (B, T) bool, True at the last token of each step; values elsewhere are never
            read.
        denominator: number of steps of an accumulated batch, or None for this call's.

    Returns: loss () and detached metrics: accuracy, the share of steps whose logit and label stand
        on the same side of one half (1/2 where either stands on it); label_mean and
        probability_mean.

    Raises: ValueError if shapes or devices differ, a label leaves [0, 1] or, without a
        denominator, no step is marked.
    """
    logits = select(logits, step_mask)
    labels = select(labels.detach(), step_mask).to(logits.dtype)
    if not bool(((labels >= 0) & (labels <= 1)).all()):
        raise ValueError("labels of steps must lie in [0, 1]")
    per_step = binary_cross_entropy_with_logits(logits, labels, reduction="none")
    metrics = {
        "accuracy": token_metric((1 + logits.sign() * (labels - 0.5).sign()) / 2, step_mask),
        "label_mean": token_metric(labels, step_mask),
        "probability_mean": token_metric(logits.sigmoid(), step_mask),
    }
    return LossOutput(reduce(per_step, step_mask, denominator=denominator), metrics)


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


def average_weights(
    state_dicts: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """One model from the weighted mean of several's weights (WARM, Rame et al. 2024, 2401.12187).

    As cheap as one member, and less easily fooled than any. It works for members fine-tuned from
    the same start, which can be joined by a straight line; of unrelated models the mean is noise.

    Args:
        state_dicts: one or more, with the same names, shapes, types and devices. What is not
            floating point (counters) must be equal.
        weights: one number >= 0 per member, not all 0, scaled to a sum of 1; None for equal ones.

    Returns: new detached tensors of the members' type; the mean is taken in float32 or wider.

    Raises: ValueError if there is no member, members do not match or the weights are illegal.
    """
    if not state_dicts:
        raise ValueError("need at least one state dict to average")
    shares = [1.0] * len(state_dicts) if weights is None else [float(share) for share in weights]
    if len(shares) != len(state_dicts):
        raise ValueError(f"{len(state_dicts)} state dicts but {len(shares)} weights")
    if not all(0 <= share < math.inf for share in shares) or not sum(shares) > 0:
        raise ValueError(f"weights must be finite, >= 0 and not all 0, got {shares}")
    first = state_dicts[0]
    if any(other.keys() != first.keys() for other in state_dicts):
        raise ValueError("state dicts name different tensors; average members of one architecture")
    return {
        name: _average(name, [member[name].detach() for member in state_dicts], shares)
        for name in first
    }


def _average(name: str, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    first = tensors[0]
    if any((x.shape, x.dtype) != (first.shape, first.dtype) for x in tensors):
        raise ValueError(f"{name}: shapes or types of the members differ")
    check_devices(*tensors)
    if not first.is_floating_point():
        if any(not torch.equal(x, first) for x in tensors):
            raise ValueError(f"{name}: not floating point, so it must be equal in all members")
        return first.clone()
    wide = torch.promote_types(first.dtype, torch.float32)
    total = sum(shares)
    mean = torch.zeros_like(first, dtype=wide)
    for x, share in zip(tensors, shares, strict=True):
        if share:  # a member of weight 0 may hold anything
            mean += x.to(wide) * (share / total)
    return mean.to(first.dtype)
