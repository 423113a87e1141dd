"""What a function makes stands where its inputs stand, whatever the default device is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rlhf.algos.advantages import best_of_group_advantages, token_rewards
from rlhf.algos.logprobs import chunked_logprobs, token_entropy, token_logprobs
from rlhf.algos.masking import last_index, mask_from_lengths, reduction_denominator
from rlhf.algos.recurrent import td_mask
from rlhf.algos.reward_model_losses import plackett_luce_loss
from rlhf.algos.types import combine_metrics

NUMBERS = torch.tensor([[1.0, 4.0, 2.0], [3.0, 0.0, 5.0]])
SCORES = torch.tensor([2.0, 1.0])
MASK = torch.tensor([[True, True, False], [True, True, True]])
IDS = torch.tensor([[0, 1, 2], [2, 1, 0]])
LOGITS = torch.tensor([0.5, -1.0, 2.0]).expand(2, 3, 3)


def with_gradient(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    logits = LOGITS.detach().requires_grad_()
    result = function(logits)
    return result, torch.autograd.grad(result.square().sum(), logits)[0]


CALLS: dict[str, Callable[[], Any]] = {
    "token_rewards": lambda: token_rewards(SCORES, NUMBERS, MASK, kl_coef=0.1),
    "best_of_group": lambda: best_of_group_advantages(NUMBERS, SCORES, MASK, 2)[:2],
    "token_logprobs": lambda: with_gradient(lambda x: token_logprobs(x, IDS)),
    "token_entropy": lambda: with_gradient(token_entropy),
    "chunked_logprobs": lambda: with_gradient(
        lambda x: chunked_logprobs(x, NUMBERS.new_ones(4, 3), IDS, MASK, chunk_size=2).logprobs
    ),
    "mask_from_lengths": lambda: mask_from_lengths(MASK.sum(dim=1), 3),
    "last_index": lambda: last_index(MASK),
    "denominators": lambda: [
        reduction_denominator(MASK, "constant_length", length=7),
        reduction_denominator(MASK, "token_mean"),
        reduction_denominator(MASK, "sequence_mean"),
    ],
    "td_mask": lambda: td_mask(MASK & False, MASK, burn_in=1),
    "plackett_luce": lambda: plackett_luce_loss(NUMBERS, MASK),
    "combine_metrics": lambda: combine_metrics([{"a": SCORES[0]}, {"a": SCORES[1]}], [1, 3]),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_the_default_device_does_not_matter(name: str) -> None:
    expected = tree_leaves(CALLS[name]())
    with torch.device("meta"):
        actual = tree_leaves(CALLS[name]())
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
