"""Padding on either side, and epochs of batches of similar length."""

from __future__ import annotations

import itertools

import pytest
import torch

from rlhf.data.batching import Epochs, length_sorted_batches, pad


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("side", "ids", "mask"),
    [
        ("right", [[5, 6, 9], [7, 9, 9]], [[1, 1, 1], [1, 0, 0]]),
        ("left", [[5, 6, 9], [9, 9, 7]], [[1, 1, 1], [0, 0, 1]]),
    ],
)
def test_pad_by_hand(side: str, ids: list[list[int]], mask: list[list[int]]) -> None:
    # 9 is pad and end token at once: the first row's own 9 counts
    padded, where = pad([[5, 6, 9], [7]], 9, side=side)
    assert padded.tolist() == ids
    assert padded.dtype == torch.long
    assert where.dtype == torch.bool
    assert where.int().tolist() == mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_masked_ids_are_the_rows(side: str) -> None:
    rows = [[1, 2, 3], [], [0, 0], [4]]
    padded, mask = pad(rows, 0, side=side)
    assert [padded[i][mask[i]].tolist() for i in range(4)] == rows


def test_pad_of_nothing_and_of_empty_rows() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        pad([], 0, side="left")
    assert pad([[], []], 0, side="right")[0].shape == (2, 0)
    with pytest.raises(ValueError, match="side"):
        pad([[1]], 0, side="middle")


@pytest.mark.parametrize(("size", "batch_size"), [(0, 4), (1, 4), (4, 4), (10, 4), (103, 8)])
def test_every_index_once_and_full_batches(size: int, batch_size: int) -> None:
    lengths = [(i * 37) % 23 for i in range(size)]
    batches = length_sorted_batches(lengths, batch_size, seeded(0))
    assert sorted(i for batch in batches for i in batch) == list(range(size))
    assert len(batches) == -(-size // batch_size)
    assert sum(len(batch) < batch_size for batch in batches) == bool(size % batch_size)


def test_deterministic_in_the_generator_and_new_each_epoch() -> None:
    lengths = [i % 7 for i in range(64)]
    one, two = seeded(3), seeded(3)
    first = length_sorted_batches(lengths, 8, one)
    second = length_sorted_batches(lengths, 8, one)
    assert first == length_sorted_batches(lengths, 8, two)
    assert second == length_sorted_batches(lengths, 8, two)
    assert first != second
    assert {frozenset(b) for b in first} != {frozenset(b) for b in second}


def test_a_generators_state_resumes_the_epoch() -> None:
    lengths = list(range(40))
    generator = seeded(1)
    length_sorted_batches(lengths, 4, generator)
    state = generator.get_state()
    expected = length_sorted_batches(lengths, 4, generator)
    resumed = torch.Generator()
    resumed.set_state(state)
    assert length_sorted_batches(lengths, 4, resumed) == expected


@pytest.mark.parametrize("size", [12, 13])
def test_epochs_go_on_from_any_place(size: int) -> None:
    """Batch 4 of 3, and a place between two epochs: what follows is what would have followed."""
    lengths = [i % 5 for i in range(size)]

    def epochs() -> Epochs:
        return Epochs(lengths, 4, 3, seeded(2))

    whole = list(epochs())
    assert len(whole) == epochs().total == 3 * -(-size // 4)
    assert [epoch for epoch, _ in whole] == sorted([0, 1, 2] * (len(whole) // 3))
    order = seeded(2)
    assert [rows for _, rows in whole] == [
        rows for _ in range(3) for rows in length_sorted_batches(lengths, 4, order)
    ]
    for cut in range(len(whole) + 1):
        first, second = epochs(), epochs()
        list(itertools.islice(first, cut))
        second.load_state_dict(first.state_dict())
        assert list(second) == whole[cut:]


def test_batches_are_of_similar_length_in_random_order() -> None:
    lengths = [(i * 61) % 128 for i in range(128)]  # a permutation of 0..127
    batches = length_sorted_batches(lengths, 8, seeded(0))
    spreads = [max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in batches]
    assert max(spreads) == 7
    shortest = [min(lengths[i] for i in b) for b in batches]
    assert shortest != sorted(shortest)
    assert shortest != sorted(shortest, reverse=True)


def test_batch_size_has_a_bound() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        length_sorted_batches([1], 0, seeded(0))
