"""Masks that select, and the one reduction from a token table to a scalar.

A mask is boolean and True where the element counts. Masked elements are replaced before they are
used, never multiplied by 0 (NaN * 0 is NaN): what stands there changes neither value nor gradient.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

REDUCTIONS = ("token_mean", "sequence_mean", "constant_length")


def check_devices(first: Tensor, *others: Tensor) -> None:
    """Raises ValueError unless all tensors are on the device of the first."""
    for x in others:
        if x.device != first.device:
            raise ValueError(f"devices differ: {first.device} and {x.device}; move all to one")


def check_mask(mask: Tensor, *tensors: Tensor) -> None:
    """Raises ValueError unless `mask` is boolean and every tensor has its shape and its device."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    for x in tensors:
        if x.shape != mask.shape:
            raise ValueError(f"shapes differ: mask {tuple(mask.shape)}, tensor {tuple(x.shape)}")
    check_devices(mask, *tensors)


def check_floating(*tensors: Tensor) -> None:
    """Raises ValueError unless all are floating point: integers would cut results off."""
    for x in tensors:
        if not x.is_floating_point():
            raise ValueError(f"need floating point numbers, got {x.dtype}; convert them first")


def select(x: Tensor, mask: Tensor) -> Tensor:
    """The tensor where `mask` is True and 0 elsewhere, where its gradient is exactly 0 too.

    Raises: ValueError if shapes differ or `mask` is not boolean.
    """
    check_mask(mask, x)
    return torch.where(mask, x, 0)


def place(chosen: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `x[mask]`: a table of `chosen` where `mask` is True, row by row, 0 elsewhere.

    What is computed on `x[mask]` alone, and placed back, has never met the other elements of x:
    their gradient is exactly 0, whatever stands there.

    Args:
        chosen: (N,), gradient flows; N is the number of True in `mask`.
        mask: (B, T) bool.

    Returns: (B, T) of the type of `chosen`.

    Raises: ValueError if `mask` is not boolean, N differs or the devices do.
    """
    check_mask(mask)
    check_devices(mask, chosen)
    if chosen.shape != (int(mask.sum()),):
        raise ValueError(f"{tuple(chosen.shape)} values for a mask that selects {int(mask.sum())}")
    return chosen.new_zeros(mask.shape).masked_scatter(mask, chosen)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the selected elements, over `dim` or over all; 0 where nothing is selected.

    Raises: ValueError if shapes differ or `mask` is not boolean.
    """
    return select(x, mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the selected elements, over `dim` or over all.

    Raises: ValueError if shapes differ, `mask` is not boolean, or a mean would be of nothing.
    """
    check_mask(mask, x)
    count = mask.sum(dim)
    if bool((count == 0).any()):
        raise ValueError("the mask selects nothing, so there is no mean")
    return masked_sum(x, mask, dim) / count


def mask_from_lengths(lengths: Tensor, size: int) -> Tensor:
    """(B, size) mask of right-padded rows, True for the first `lengths[b]` elements of row b.

    Masks come from lengths, never from ids: where the padding token is the end-of-sequence token,
    ids cannot tell the one from the other.

    Args:
        lengths: (B,) integer number of tokens, 0 to `size`.
        size: number of columns.

    Raises: ValueError if a length lies outside 0..size.
    """
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= size:
        raise ValueError(f"lengths must lie in 0..{size}, got {lengths.tolist()}")
    return torch.arange(size, device=lengths.device) < lengths[:, None]


class TurnMasks(NamedTuple):
    """Masks of a conversation after its first prompt, (B, T) bool each, aligned with its tokens.

    response_mask: every real token, whoever wrote it; the model attends to them all.
    action_mask: the tokens that the policy wrote. Loss, KL, entropy, importance ratios and token
    counts take this one: what a tool or a user wrote is read, not learnt, and has no ratio.
    value_mask: where the value of the state before the token is needed. These are the places of
    the actions, once values are aligned with tokens (`logprobs.response_outputs`): an observation
    belongs to the state before the next action, so GAE steps over it, from an action's value to
    that of the next action. The value of the last state, where the policy was cut off, stands
    before no token and is in no mask.
    """

    response_mask: Tensor
    action_mask: Tensor
    value_mask: Tensor


def turn_masks(
    turns: Sequence[Sequence[tuple[int, bool]]],
    size: int,
    *,
    device: torch.device | str | None = None,
) -> TurnMasks:
    """Masks of right-padded conversations in which tools or users answer between the actions.

    Args:
        turns: per row, the segments after the first prompt in order, each (number of tokens >= 0,
            True if the policy wrote it). A row without segments is empty.
        size: number of columns T.
        device: of the masks.

    Returns: see `TurnMasks`; action_mask is a part of response_mask, value_mask equals it.

    Raises: ValueError if a segment is negative or a row is longer than `size`.
    """
    response_mask = torch.zeros(len(turns), size, dtype=torch.bool)
    action_mask = torch.zeros_like(response_mask)
    for row, segments in enumerate(turns):
        counts = [num_tokens for num_tokens, _ in segments]
        if any(count < 0 for count in counts) or sum(counts) > size:
            raise ValueError(
                f"segments must be >= 0 tokens and at most {size} together, row {row} has {counts}"
            )
        end = 0
        for num_tokens, is_action in segments:
            start, end = end, end + num_tokens
            response_mask[row, start:end] = True
            action_mask[row, start:end] = is_action
    response_mask, action_mask = response_mask.to(device=device), action_mask.to(device=device)
    return TurnMasks(response_mask, action_mask, action_mask.clone())


def last_index(mask: Tensor) -> Tensor:
    """(B,) position of the last True of each row, whatever the padding side; -1 for an empty row.

    Args:
        mask: (B, T) bool.

    Raises: ValueError if `mask` is not boolean.
    """
    check_mask(mask)
    positions = torch.arange(mask.shape[1], device=mask.device)
    before_first = positions.new_full((mask.shape[0], 1), -1)
    return torch.cat([before_first, torch.where(mask, positions, -1)], dim=1).amax(dim=1)


def reduction_denominator(mask: Tensor, reduction: str, *, length: int | None = None) -> Tensor:
    """What `reduce` divides by: add it up over micro-batches and pass the total to each.

    - `token_mean`: the number of selected tokens.
    - `sequence_mean`: the number of sequences with a selected token.
    - `constant_length`: B * length, empty sequences included (Liu et al. 2025, arXiv:2503.20783).

    Args:
        mask: (B, T) bool.
        reduction: one of REDUCTIONS.
        length: tokens, the constant of `constant_length`, usually the longest response allowed.

    Returns: float32 ().

    Raises: ValueError on an unknown reduction, or if `constant_length` comes without a length.
    """
    check_mask(mask)
    if reduction == "token_mean":
        return mask.sum().float()
    if reduction == "sequence_mean":
        return mask.any(dim=1).sum().float()
    if reduction == "constant_length":
        if length is None or length < 1:
            raise ValueError(f"constant_length needs a length of at least 1 token, got {length}")
        return torch.tensor(float(mask.shape[0] * length), device=mask.device)
    raise ValueError(f"unknown reduction {reduction!r}; use one of {', '.join(REDUCTIONS)}")


def reduce(
    per_token: Tensor,
    mask: Tensor,
    reduction: str = "token_mean",
    *,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """The one way from a token table to a scalar.

    - `token_mean`: the sum over selected tokens / their number. Long sequences weigh more.
    - `sequence_mean`: the mean over sequences of the mean over their selected tokens.
    - `constant_length`: the sum over selected tokens / `denominator`, which is required.

    A sequence without a selected token counts in neither sum nor number. With `denominator`, the
    total of `reduction_denominator` over an accumulated batch, micro-batches add up to the loss
    and gradient of the whole batch however it is split; one that selects nothing then adds 0.

    Args:
        per_token: (B, T), gradient flows; values outside the mask are never read.
        mask: (B, T) bool.
        reduction: one of REDUCTIONS.
        denominator: > 0, or None for this call's own.

    Returns: scalar ().

    Raises: ValueError if shapes differ, the reduction is unknown, the denominator is not positive
        or is missing for `constant_length`, or it is None and the mask selects nothing.
    """
    check_mask(mask, per_token)
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}; use one of {', '.join(REDUCTIONS)}")
    if denominator is None:
        if reduction == "constant_length":
            raise ValueError("constant_length needs its denominator; see reduction_denominator")
        if not bool(mask.any()):
            raise ValueError("the mask selects nothing, so there is no mean")
        denominator = reduction_denominator(mask, reduction)
    elif not float(denominator) > 0:
        raise ValueError(f"denominator must be positive, got {float(denominator)}")
    chosen = select(per_token, mask)
    if reduction == "sequence_mean":
        return (chosen.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / denominator
    return chosen.sum() / denominator


def token_metric(per_token: Tensor, mask: Tensor) -> Tensor:
    """Detached mean () over the selected tokens, 0 where nothing is selected; for metrics only."""
    return masked_sum(per_token.detach(), mask) / mask.sum().clamp(min=1)
