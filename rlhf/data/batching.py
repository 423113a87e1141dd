"""Rows of token ids as padded tensors, and batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch


def pad(
    rows: Sequence[Sequence[int]], pad_id: int, *, side: Literal["left", "right"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as one tensor (B, S), and a mask that is True at the rows' own tokens.

    The mask comes from the rows' lengths: a row may hold pad_id itself.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be left or right, got {side!r}")
    if not rows:
        raise ValueError("pad needs at least one row")
    width = max(len(row) for row in rows)
    lengths = torch.tensor([len(row) for row in rows])
    places = torch.arange(width).expand(len(rows), width)
    offset = width - lengths[:, None]
    mask = places >= offset if side == "left" else places < lengths[:, None]
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    flat = [token for row in rows for token in row]
    ids[mask] = torch.tensor(flat, dtype=torch.long)
    return ids, mask


def chunks(rows: list[int], size: int) -> list[list[int]]:
    """The rows in order, `size` at a time; the last chunk may be shorter."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def length_sorted_batches(
    lengths: Sequence[int], batch_size: int, generator: torch.Generator
) -> list[list[int]]:
    """One epoch: every index once, in batches of similar length, in random order.

    The generator alone decides the order; each call draws anew from it. Rows of equal length meet
    different partners in every epoch. The one batch that is not full, if any, holds any lengths'
    remainder and may come anywhere in the order.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    full = len(shuffled) - len(shuffled) % batch_size
    ordered = sorted(shuffled[:full], key=lambda index: lengths[index])
    batches = chunks(ordered, batch_size)
    if full < len(shuffled):
        batches.append(shuffled[full:])
    order = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in order]
