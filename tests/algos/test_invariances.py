"""What must not matter to any token loss: masked places, padding, order, micro-batches."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algos.kl import KL_ESTIMATORS, full_kl_loss, kl_loss
from rlhf.algos.masking import REDUCTIONS, reduction_denominator
from rlhf.algos.policy_losses import POLICY_LOSSES, clipped_value_loss, entropy_bonus
from rlhf.algos.types import LossOutput, combine_metrics

NAN = float("nan")
LENGTH = 9  # the constant of constant_length

# Each takes (3, B, T) inputs of which the first carries the gradient, a mask and keyword arguments.
TokenLoss = Callable[..., LossOutput]


def _policy(loss: TokenLoss) -> TokenLoss:
    return lambda x, mask, **kwargs: loss(x[0], x[1], x[2], mask, **kwargs)


def _kl(estimator: str) -> TokenLoss:
    return lambda x, mask, **kwargs: kl_loss(x[0], x[1], mask, estimator=estimator, **kwargs)


def _value(clip: float | None) -> TokenLoss:
    return lambda x, mask, **kwargs: clipped_value_loss(x[0], x[1], x[2], mask, clip=clip, **kwargs)


def _full_kl(x: Tensor, mask: Tensor, **kwargs: object) -> LossOutput:
    """Of two three-token distributions per place."""
    logits, ref_logits = (torch.stack([y, -2 * y, 0.5 * y], dim=-1) for y in x[:2])
    return full_kl_loss(logits, ref_logits, mask, **kwargs)  # type: ignore[arg-type]


TOKEN_LOSSES: dict[str, TokenLoss] = {
    **{name: _policy(loss) for name, loss in POLICY_LOSSES.items()},
    **{f"kl_{name}": _kl(name) for name in KL_ESTIMATORS},
    "kl_full": _full_kl,
    "value_clipped": _value(0.5),
    "value": _value(None),
    "entropy": lambda x, mask, **kwargs: entropy_bonus(x[0], mask, **kwargs),
}

every_loss = pytest.mark.parametrize("name", list(TOKEN_LOSSES))
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
quick = settings(max_examples=8, deadline=None)


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs (3, 5, 6) and a mask with holes whose first row has a True and whose last is empty."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3, 5, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 6, generator=generator) < 0.5
    mask[0, 2] = True
    mask[4] = False
    return inputs, mask


def outcome(
    name: str, inputs: Tensor, mask: Tensor, reduction: str, denominator: Tensor | None = None
) -> tuple[LossOutput, Tensor]:
    """The loss and its gradient (B, T) to the first input."""
    if denominator is None:
        denominator = reduction_denominator(mask, reduction, length=LENGTH)
    first = inputs[0].clone().requires_grad_()
    output = TOKEN_LOSSES[name](
        [first, inputs[1], inputs[2]], mask, reduction=reduction, denominator=denominator
    )
    (gradient,) = torch.autograd.grad(output.loss, first)
    return output, gradient


def assert_same(actual: LossOutput, expected: LossOutput) -> None:
    torch.testing.assert_close(actual.loss, expected.loss)
    assert actual.metrics.keys() == expected.metrics.keys()
    for metric, value in expected.metrics.items():
        torch.testing.assert_close(actual.metrics[metric], value)


@every_loss
@every_reduction
@quick
@given(seed=st.integers(0, 2**31), junk=st.sampled_from([NAN, float("inf"), 1e30]))
def test_masked_places_change_nothing(name: str, reduction: str, seed: int, junk: float) -> None:
    inputs, mask = draw(seed)  # C13, C18
    plain, gradient = outcome(name, inputs, mask, reduction)
    spoilt, spoilt_gradient = outcome(name, torch.where(mask, inputs, junk), mask, reduction)
    assert_same(spoilt, plain)
    assert torch.equal(spoilt_gradient, gradient)
    assert torch.equal(gradient[~mask], torch.zeros_like(gradient[~mask]))
    assert plain.loss.isfinite()


@every_loss
@every_reduction
@quick
@given(seed=st.integers(0, 2**31), left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_changes_nothing(
    name: str, reduction: str, seed: int, left: int, right: int
) -> None:
    inputs, mask = draw(seed)
    plain, gradient = outcome(name, inputs, mask, reduction)
    padded, padded_gradient = outcome(
        name,
        torch.nn.functional.pad(inputs, (left, right), value=NAN),
        torch.nn.functional.pad(mask, (left, right), value=False),
        reduction,
    )
    assert_same(padded, plain)
    torch.testing.assert_close(padded_gradient[:, left : left + 6], gradient)


@every_loss
@every_reduction
@quick
@given(seed=st.integers(0, 2**31), order=st.permutations(range(5)))
def test_order_changes_nothing(name: str, reduction: str, seed: int, order: list[int]) -> None:
    inputs, mask = draw(seed)
    plain, gradient = outcome(name, inputs, mask, reduction)
    moved, moved_gradient = outcome(name, inputs[:, order], mask[order], reduction)
    assert_same(moved, plain)
    torch.testing.assert_close(moved_gradient, gradient[order])


@every_loss
@every_reduction
@quick
@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 4)))
def test_micro_batches_add_up(name: str, reduction: str, seed: int, cuts: set[int]) -> None:
    inputs, mask = draw(seed)  # C39, C40
    plain, gradient = outcome(name, inputs, mask, reduction)
    edges = [0, *sorted(cuts), 5]
    parts = [slice(start, end) for start, end in itertools.pairwise(edges)]
    denominator = torch.stack(
        [reduction_denominator(mask[part], reduction, length=LENGTH) for part in parts]
    ).sum()
    outcomes = [
        outcome(name, inputs[:, part], mask[part], reduction, denominator) for part in parts
    ]
    total = torch.stack([output.loss for output, _ in outcomes]).sum()
    torch.testing.assert_close(total, plain.loss)
    torch.testing.assert_close(torch.cat([part for _, part in outcomes]), gradient)
    weights = [mask[part].sum() for part in parts]
    joined = combine_metrics([output.metrics for output, _ in outcomes], weights)
    assert_same(LossOutput(total, joined), plain)


@every_loss
def test_ten_and_ninety_tokens_are_one_batch_of_a_hundred(name: str) -> None:  # C39, C40
    inputs = torch.randn(3, 2, 90, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(2, 90, dtype=torch.bool)
    mask[0, 10:] = False
    whole, gradient = outcome(name, inputs, mask, "token_mean")
    hundred = torch.tensor(100.0)
    short, short_gradient = outcome(name, inputs[:, :1], mask[:1], "token_mean", hundred)
    long, long_gradient = outcome(name, inputs[:, 1:], mask[1:], "token_mean", hundred)
    torch.testing.assert_close(short.loss + long.loss, whole.loss)
    torch.testing.assert_close(torch.cat([short_gradient, long_gradient]), gradient)
    # Averaging two means instead would weigh each of the 10 tokens nine times as much.
    _alone, alone_gradient = outcome(name, inputs[:, :1], mask[:1], "token_mean")
    torch.testing.assert_close(alone_gradient, 10 * short_gradient)


@every_loss
def test_selected_places_do_matter(name: str) -> None:
    inputs, mask = draw(0)
    plain, gradient = outcome(name, inputs, mask, "token_mean")
    assert gradient[mask].abs().max() > 0
    inputs[0] += mask * torch.linspace(0.1, 0.5, 6)
    changed, _ = outcome(name, inputs, mask, "token_mean")
    assert abs(changed.loss.item() - plain.loss.item()) > 1e-3


@every_loss
def test_metrics_carry_no_graph_and_are_scalars(name: str) -> None:
    output, _ = outcome(name, *draw(0), "token_mean")
    assert output.loss.shape == ()
    for value in output.metrics.values():
        assert not value.requires_grad
        assert value.shape == ()
