"""One batch layout for every model: prompts padded left, responses padded right, masks from lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data.batching import pad


@dataclass(frozen=True)
class Sequences:
    """B prompts and responses. Masks are True where a token counts; ids elsewhere are never read.

    prompt_ids, prompt_mask: (B, P), padded left. response_ids, response_mask: (B, T), padded right.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor

    @classmethod
    def from_rows(
        cls, prompts: Sequence[list[int]], responses: Sequence[list[int]], pad_id: int
    ) -> Sequences:
        """Pad B prompts and B responses. Raises ValueError if the counts differ."""
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts but {len(responses)} responses")
        prompt_ids, prompt_mask = pad(list(prompts), pad_id, side="left")
        response_ids, response_mask = pad(list(responses), pad_id, side="right")
        return cls(prompt_ids, prompt_mask, response_ids, response_mask)

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    def input_ids(self) -> Tensor:
        """(B, P + T)."""
        return torch.cat([self.prompt_ids, self.response_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """(B, P + T) bool."""
        return torch.cat([self.prompt_mask, self.response_mask], dim=1)

    @property
    def lengths(self) -> Tensor:
        """(B,) response tokens."""
        return self.response_mask.sum(1)

    def select(self, rows: Tensor | list[int]) -> Sequences:
        """Some rows, with padding that none of them needs cut off."""
        index = torch.as_tensor(rows)
        prompt_mask, response_mask = self.prompt_mask[index], self.response_mask[index]
        width_p = max(1, int(prompt_mask.sum(1).max()))
        width_t = max(1, int(response_mask.sum(1).max()))
        start = self.prompt_ids.shape[1] - width_p
        return Sequences(
            self.prompt_ids[index, start:],
            prompt_mask[:, start:],
            self.response_ids[index, :width_t],
            response_mask[:, :width_t],
        )

    def to(self, device: torch.device | str) -> Sequences:
        return Sequences(
            self.prompt_ids.to(device),
            self.prompt_mask.to(device),
            self.response_ids.to(device),
            self.response_mask.to(device),
        )


def position_ids(attention_mask: Tensor) -> Tensor:
    """(B, S) positions that count real tokens only, so padding side does not matter."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)
