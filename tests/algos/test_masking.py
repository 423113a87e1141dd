"""Masks select, lengths make masks, and one reduction serves every loss."""

import pytest
import torch
from torch import Tensor

from rlhf.algos.kl import kl_loss
from rlhf.algos.masking import (
    check_devices,
    check_mask,
    last_index,
    mask_from_lengths,
    masked_mean,
    masked_sum,
    place,
    reduce,
    reduction_denominator,
    select,
    token_metric,
    turn_masks,
)

NAN = float("nan")


def table() -> tuple[Tensor, Tensor]:
    """Row means 2 and 10, with NaN outside the mask."""
    x = torch.tensor([[1.0, 2.0, 3.0], [10.0, NAN, NAN]], dtype=torch.float64)
    return x, torch.tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize(
    ("reduction", "length", "expected"),
    [
        ("token_mean", None, 4.0),  # (1 + 2 + 3 + 10) / 4 tokens
        ("sequence_mean", None, 6.0),  # ((1 + 2 + 3) / 3 + 10 / 1) / 2 sequences
        ("constant_length", 8, 1.0),  # (1 + 2 + 3 + 10) / (2 sequences * 8 tokens)
    ],
)
def test_reduce_by_hand(reduction: str, length: int | None, expected: float) -> None:
    x, mask = table()
    denominator = reduction_denominator(mask, reduction, length=length)
    assert reduce(x, mask, reduction, denominator=denominator).item() == expected
    if length is None:
        assert reduce(x, mask, reduction).item() == expected


def test_kept_four_masked_six_divides_by_four() -> None:  # C31
    x = torch.arange(10.0, dtype=torch.float64)[None]
    mask = mask_from_lengths(torch.tensor([4]), 10)
    for reduction in ("token_mean", "sequence_mean"):
        assert reduce(x, mask, reduction).item() == 1.5  # (0 + 1 + 2 + 3) / 4


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant_length"])
def test_all_masked_part_of_a_batch_adds_nothing(reduction: str) -> None:  # C31
    x = torch.full((2, 3), NAN, requires_grad=True)
    loss = reduce(x, torch.zeros(2, 3, dtype=torch.bool), reduction, denominator=7.0)
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(2, 3))


def test_an_empty_sequence_is_not_a_sequence_of_zeros() -> None:
    x = torch.tensor([[3.0, 5.0], [NAN, NAN]])
    mask = torch.tensor([[True, True], [False, False]])
    assert reduce(x, mask, "sequence_mean").item() == 4  # not (4 + 0) / 2
    # The constant is one: it counts every sequence, so that a token weighs the same in any batch.
    assert reduction_denominator(mask, "constant_length", length=8).item() == 16


def test_refusals() -> None:
    x, mask = table()
    nothing = torch.zeros_like(mask)
    with pytest.raises(ValueError, match="selects nothing"):
        reduce(x, nothing)
    with pytest.raises(ValueError, match="selects nothing"):
        masked_mean(x, nothing)
    with pytest.raises(ValueError, match="selects nothing"):
        masked_mean(x, torch.tensor([[True, True, True], [False, False, False]]), dim=1)
    with pytest.raises(ValueError, match="shapes differ"):
        reduce(x, mask[:1])
    with pytest.raises(ValueError, match="must be bool"):
        reduce(x, mask.long())
    with pytest.raises(ValueError, match="unknown reduction 'mean'"):
        reduce(x, mask, "mean")
    with pytest.raises(ValueError, match="constant_length needs its denominator"):
        reduce(x, mask, "constant_length")
    with pytest.raises(ValueError, match="length of at least 1"):
        reduction_denominator(mask, "constant_length")
    with pytest.raises(ValueError, match="unknown reduction"):
        reduction_denominator(mask, "mean")
    with pytest.raises(ValueError, match="must be positive"):
        reduce(x, mask, denominator=0.0)


def test_masked_sum_and_mean_along_a_dimension() -> None:
    x, mask = table()
    assert masked_sum(x, mask).item() == 16
    assert masked_sum(x, mask, dim=1).tolist() == [6, 10]
    assert masked_mean(x, mask, dim=1).tolist() == [2, 10]
    assert masked_sum(x, mask, dim=0).tolist() == [11, 2, 3]


def test_gradient_outside_the_mask_is_exactly_zero() -> None:  # C13, C18
    x, mask = table()
    x.requires_grad_()
    masked_mean(x, mask).backward()
    # 1/4 at each of the four selected elements.
    assert x.grad is not None
    assert x.grad.tolist() == [[0.25, 0.25, 0.25], [0.25, 0, 0]]


def test_selecting_stops_nan_before_it_meets_a_function_with_infinite_slope() -> None:
    x = torch.tensor([[4.0, NAN]], requires_grad=True)
    select(x, torch.tensor([[True, False]])).exp().sum().backward()
    assert x.grad is not None
    assert x.grad[0, 1].item() == 0


def test_mask_comes_from_the_length_without_an_end_token() -> None:  # C8
    # The response [5, 6, 7, PAD, PAD] was cut before an end-of-sequence token: 3 tokens count.
    assert mask_from_lengths(torch.tensor([3]), 5).tolist() == [[True, True, True, False, False]]


def test_end_token_counts_though_it_is_the_padding_token() -> None:  # C9
    end = pad = 2
    response_ids = torch.tensor([[5, end, pad, pad], [5, 6, 7, end]])
    mask = mask_from_lengths(torch.tensor([2, 4]), 4)
    assert response_ids[mask].tolist() == [5, end, 5, 6, 7, end]


@pytest.mark.parametrize("length", [-1, 5])
def test_a_length_outside_the_row_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.4"):
        mask_from_lengths(torch.tensor([2, length]), 4)


def test_last_index_on_any_padding_side() -> None:  # T3
    mask = torch.tensor(
        [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool
    )
    assert last_index(mask).tolist() == [1, 3, 3, 2, -1]


def test_the_last_token_read_is_the_end_token() -> None:  # C3, C5
    end, pad = 2, 0
    right = torch.tensor([[7, 8, end, pad, pad]])
    left = torch.tensor([[pad, pad, 7, 8, end]])
    for ids, attention_mask in (
        (right, mask_from_lengths(torch.tensor([3]), 5)),
        (left, mask_from_lengths(torch.tensor([3]), 5).flip(1)),
    ):
        assert ids.gather(1, last_index(attention_mask)[:, None]).item() == end


def test_tensors_on_another_device_than_the_mask_are_refused() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    here, elsewhere = torch.zeros(2, 3), torch.zeros(2, 3, device="meta")
    check_mask(mask, here, here)
    check_devices(elsewhere, elsewhere)
    for refused in (
        lambda: check_mask(mask, elsewhere),
        lambda: check_mask(mask, here, elsewhere),
        lambda: check_devices(here, here, elsewhere),
        lambda: select(elsewhere, mask),
        lambda: masked_mean(here, mask.to("meta")),
        lambda: reduce(elsewhere, mask),
        lambda: reduce(here, mask.to("meta")),
        lambda: place(elsewhere.flatten(), mask),
    ):
        with pytest.raises(ValueError, match=r"devices differ: .*; move all to one"):
            refused()


def test_place_is_the_inverse_of_selecting_rows() -> None:
    mask = torch.tensor([[False, True, True], [True, False, False]])
    chosen = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    placed = place(chosen, mask)
    assert placed.dtype == torch.float64
    assert placed.tolist() == [[0, 1, 2], [3, 0, 0]]
    (placed * torch.tensor([[NAN, 5, 6], [7, NAN, NAN]])).nan_to_num().sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [5, 6, 7]
    for wrong in (chosen[:2], torch.zeros(4), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="for a mask that selects 3"):
            place(wrong, mask)
    with pytest.raises(ValueError, match="must be bool"):
        place(chosen, mask.long())


def test_turn_masks_by_hand() -> None:
    # Row 0: the policy writes 2 tokens, a tool answers with 1, the policy writes 2 more; one pad.
    # Row 1: one action only. Row 2: a tool speaks first and last. Row 3: nothing.
    turns = [
        [(2, True), (1, False), (2, True)],
        [(3, True)],
        [(1, False), (0, True), (4, True), (1, False)],
        [],
    ]
    masks = turn_masks(turns, 6)
    assert masks.response_mask.int().tolist() == [
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0],
    ]
    assert masks.action_mask.int().tolist() == [
        [1, 1, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert torch.equal(masks.value_mask, masks.action_mask)  # C16
    assert all(mask.dtype == torch.bool for mask in masks)
    assert (masks.action_mask <= masks.response_mask).all()


def test_turn_masks_can_be_changed_apart_and_live_on_a_device() -> None:
    masks = turn_masks([[(1, True)]], 1)
    masks.value_mask[0, 0] = False
    assert masks.action_mask.item() is True
    assert masks.response_mask.item() is True
    assert all(mask.device.type == "cpu" for mask in masks)
    assert all(mask.device.type == "meta" for mask in turn_masks([[(1, True)]], 1, device="meta"))


@pytest.mark.parametrize("turns", [[(3, True), (2, False)], [(5, False)], [(2, True), (-1, True)]])
def test_turns_that_do_not_fit_are_refused(turns: list[tuple[int, bool]]) -> None:
    with pytest.raises(ValueError, match=r"at most 4 together, row 1 has \["):
        turn_masks([[(4, True)], turns], 4)


def test_observations_enter_neither_loss_nor_kl_nor_the_place_of_the_reward() -> None:  # C6, C11
    # [a, b, tool, tool, c, EOS, tool, PAD]: the policy's last token is EOS at 5, not the tool's.
    masks = turn_masks([[(2, True), (2, False), (2, True), (1, False)]], 8)
    assert last_index(masks.action_mask).item() == 5
    assert last_index(masks.response_mask).item() == 6
    # What the tool wrote has log-prob NaN here and has no part in the mean: (1 + 2 + 3 + 4) / 4.
    per_token = torch.tensor([[1.0, 2, NAN, NAN, 3, 4, NAN, NAN]], requires_grad=True)
    loss = reduce(per_token, masks.action_mask)
    loss.backward()
    assert loss.item() == 2.5
    assert per_token.grad is not None
    assert per_token.grad.tolist() == [[0.25, 0.25, 0, 0, 0.25, 0.25, 0, 0]]
    kl = kl_loss(per_token.detach(), torch.zeros(1, 8), masks.action_mask, estimator="k1")
    assert kl.loss.item() == 2.5


def test_metric_of_nothing_is_zero() -> None:
    x, mask = table()
    assert token_metric(x.requires_grad_(), mask).item() == 4
    assert not token_metric(x, mask).requires_grad
    assert token_metric(x, torch.zeros_like(mask)).item() == 0


def test_denominators_are_single_precision_numbers() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    for reduction, expected in (("token_mean", 3), ("sequence_mean", 2), ("constant_length", 2)):
        denominator = reduction_denominator(mask, reduction, length=1)
        assert denominator.dtype == torch.float32
        assert denominator.item() == expected
    with pytest.raises(ValueError, match="length of at least 1 token, got 0"):
        reduction_denominator(mask, "constant_length", length=0)
    with pytest.raises(ValueError, match="must be positive, got nan"):
        reduce(torch.zeros(2, 2), mask, denominator=NAN)


def test_one_element_has_a_mean_and_a_mask_has_to_be_one() -> None:
    x = torch.tensor([[3.0, NAN]])
    assert masked_mean(x, torch.tensor([[True, False]])).item() == 3
    for refused in (lambda: last_index(x), lambda: reduction_denominator(x, "token_mean")):
        with pytest.raises(ValueError, match="must be bool"):
            refused()


def test_lengths_of_nothing_and_of_the_whole_row() -> None:
    assert last_index(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [-1, -1]
    assert mask_from_lengths(torch.tensor([0, 2]), 2).tolist() == [[False, False], [True, True]]
    assert mask_from_lengths(torch.zeros(0, dtype=torch.long), 2).shape == (0, 2)
