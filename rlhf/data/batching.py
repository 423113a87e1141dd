"""Rows of token ids as padded tensors, and batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

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


class Epochs:
    """Epoch after epoch of `length_sorted_batches`, from any place in them.

    Iterating gives (epoch from 0, rows) of what is still to come; the batch given out last counts as done.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, num_epochs: int, generator: torch.Generator
    ) -> None:
        self.lengths, self.batch_size, self.num_epochs = lengths, batch_size, num_epochs
        self.generator = generator
        self.epoch, self.batches_done = 0, 0
        self._before = generator.get_state()  # the present epoch was drawn

    @property
    def total(self) -> int:
        """Batches in all epochs together."""
        return -(-len(self.lengths) // self.batch_size) * self.num_epochs

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        while self.epoch < self.num_epochs:
            self._before = self.generator.get_state()
            batches = length_sorted_batches(self.lengths, self.batch_size, self.generator)
            for rows in batches[self.batches_done :]:
                self.batches_done += 1
                yield self.epoch, rows
            self.epoch, self.batches_done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The place, to go on from."""
        return {
            "epoch": self.epoch, "batches_done": self.batches_done, "generator": self._before
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place."""
        self.epoch, self.batches_done = state["epoch"], state["batches_done"]
        self._before = state["generator"]
        self.generator.set_state(self._before)
