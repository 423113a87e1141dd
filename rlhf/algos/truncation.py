"""Responses cut by the length limit: keep them, leave them out of the losses, or lower their score.

A response that was cut has no end-of-sequence token, and its score judges half an answer. TRUNCATION
names what is done about it, before advantages are estimated:

- `keep`: nothing. Right where the score can judge a cut response. Otherwise it teaches the policy
  by noise, for or against whatever the limit cut.
- `mask`: the losses do not see the sequence; its score still counts in its group's baseline. It
  removes the noise, and the pressure to stay short with it: nothing speaks against long responses.
- `missing_eos`: a constant is taken off the score. A step at the limit, so that only responses that
  come to it learn from it.
- `soft_overlong`: a penalty that grows over the last tokens before the limit, for finished responses
  too (DAPO). The policy feels the limit before it meets it.

Both penalties change the objective: a right answer that needs the length is worth less.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algos.masking import check_mask


def mask_truncated(response_mask: Tensor, ended: Tensor) -> Tensor:
    """The mask without the sequences that were cut: their rows are False throughout.

    It is for the losses, whose denominators then count what is left. Advantages are estimated with
    the whole mask, so that a sequence that was cut still counts in its group's baseline.

    Args:
        response_mask: (B, T) bool.
        ended: (B,) bool, False where the length limit cut the response.

    Returns: (B, T) bool.

    Raises: ValueError if shapes, types or devices do not fit.
    """
    check_mask(response_mask)
    check_mask(ended, response_mask.any(dim=1))
    return response_mask & ended[:, None]


def missing_eos_penalty(scores: Tensor, ended: Tensor, *, penalty: float) -> Tensor:
    """The score, less a constant where the response was cut before its end-of-sequence token.

    Args:
        scores: (B,).
        ended: (B,) bool, False where the length limit cut the response.
        penalty: >= 0, in units of the score.

    Returns: (B,).

    Raises: ValueError if shapes, types or devices do not fit or the penalty is negative.
    """
    check_mask(ended, scores)
    _check_penalty(penalty)
    return torch.where(ended, scores, scores - penalty)


def soft_overlong_penalty(
    lengths: Tensor, *, max_length: int, buffer: int, penalty: float = 1.0
) -> Tensor:
    """What DAPO adds to the score of a long response (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    -penalty * clip((length - (max_length - buffer)) / buffer, 0, 1): 0 up to max_length - buffer
    tokens, then falling in a line to -penalty at max_length, and -penalty beyond.

    Args:
        lengths: (B,) raw number of response tokens >= 0, the end-of-sequence token included.
        max_length: tokens; usually the limit that cuts responses.
        buffer: tokens over which the penalty grows, 1 to max_length.
        penalty: >= 0, in units of the score.

    Returns: (B,) float32, from -penalty to 0, to be added to the scores.

    Raises: ValueError if a length is negative or an option out of its bounds.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"need 1 <= buffer <= max_length, got {buffer} and {max_length}")
    _check_penalty(penalty)
    if bool((lengths < 0).any()):
        raise ValueError(f"lengths must be >= 0, got {lengths.tolist()}")
    return -penalty * ((lengths - (max_length - buffer)) / buffer).clamp(0, 1)


class Truncation(NamedTuple):
    """What is made of a batch's scores, and which sequences its losses may see.

    scores: (B,). keep: (B,) bool, or None for all. metrics: detached scalars (): truncated_fraction
    in [0, 1], the share of responses that were cut, and truncation_penalty_mean >= 0, what the mean
    score has lost, in its units.
    """

    scores: Tensor
    keep: Tensor | None
    metrics: dict[str, Tensor]


def _truncation(scores: Tensor, changed: Tensor, ended: Tensor, keep: Tensor | None) -> Truncation:
    check_mask(ended, scores)
    if not len(ended):
        raise ValueError("there are no sequences")
    metrics = {
        "truncated_fraction": 1 - ended.to(scores.dtype).mean(),
        "truncation_penalty_mean": (scores - changed).mean().detach(),
    }
    return Truncation(changed, keep, metrics)


def _keep(scores: Tensor, ended: Tensor) -> Truncation:
    return _truncation(scores, scores, ended, None)


def _mask(scores: Tensor, ended: Tensor) -> Truncation:
    return _truncation(scores, scores, ended, ended)


def _missing_eos(scores: Tensor, ended: Tensor, *, penalty: float) -> Truncation:
    changed = missing_eos_penalty(scores, ended, penalty=penalty)
    return _truncation(scores, changed, ended, None)


def _soft_overlong(
    scores: Tensor,
    ended: Tensor,
    lengths: Tensor,
    max_length: int,
    *,
    buffer: int,
    penalty: float = 1.0,
) -> Truncation:
    check_mask(ended, scores, lengths)
    offset = soft_overlong_penalty(lengths, max_length=max_length, buffer=buffer, penalty=penalty)
    return _truncation(scores, scores + offset.to(scores.dtype), ended, None)


def _check_penalty(penalty: float) -> None:
    if not penalty >= 0:
        raise ValueError(f"penalty must be >= 0, got {penalty}")


TRUNCATION: dict[str, Callable[..., Truncation]] = {
    "keep": _keep,
    "mask": _mask,
    "missing_eos": _missing_eos,
    "soft_overlong": _soft_overlong,
}
