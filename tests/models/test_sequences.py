"""The batch layout: padding from lengths, positions of real tokens, rows cut to what they need."""

from __future__ import annotations

import pytest
import tiny
import torch

from rlhf.models.sequences import Sequences, position_ids


def example() -> Sequences:
    return Sequences.from_rows([[5, 6, 7], [8], [9, 10]], [[11], [12, 13, 1], []], tiny.PAD)


def test_layout_by_hand() -> None:
    batch = example()
    assert batch.prompt_ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 10]]
    assert batch.prompt_mask.int().tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert batch.response_ids.tolist() == [[11, 0, 0], [12, 13, 1], [0, 0, 0]]
    assert batch.response_mask.int().tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert batch.input_ids[1].tolist() == [0, 0, 8, 12, 13, 1]
    assert batch.attention_mask[1].int().tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.lengths.tolist() == [1, 3, 0]
    assert len(batch) == 3


def test_real_end_tokens_stay_when_padding_is_the_end_token() -> None:
    batch = Sequences.from_rows([[1, 5], [6, 7, 8]], [[9, 1], [1, 1, 1, 4]], pad_id=1)
    assert batch.prompt_mask.int().tolist() == [[0, 1, 1], [1, 1, 1]]
    assert batch.response_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_select_cuts_padding_that_nobody_needs_and_keeps_the_order() -> None:
    part = example().select([2, 1])
    assert part.prompt_ids.tolist() == [[9, 10], [0, 8]]
    assert part.response_ids.tolist() == [[0, 0, 0], [12, 13, 1]]
    short = example().select([0])
    assert (short.prompt_ids.tolist(), short.response_ids.tolist()) == ([[5, 6, 7]], [[11]])
    assert short.response_mask.tolist() == [[True]]


def test_select_of_an_empty_answer_keeps_one_masked_column() -> None:
    part = example().select([2])
    assert part.response_mask.tolist() == [[False]]
    assert part.prompt_mask.tolist() == [[True, True]]


def test_different_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 prompts but 1 responses"):
        Sequences.from_rows([[3], [4]], [[5]], tiny.PAD)


def test_positions_count_real_tokens_whatever_the_padding_side() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    found = position_ids(mask)
    assert found[0, 2:].tolist() == [0, 1, 2]
    assert found[1, :3].tolist() == [0, 1, 2]
    assert found[2].tolist() == [0, 1, 2, 3, 4]
    assert found.min() == 0
