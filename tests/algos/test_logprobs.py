"""Log-probabilities belong to the right token, whatever the padding, type or temperature."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.algos import logprobs
from rlhf.algos.logprobs import (
    chunked_logprobs,
    response_outputs,
    selected_logprobs,
    sequence_logprobs,
    token_entropy,
    token_logprobs,
)
from rlhf.algos.masking import last_index, select
from rlhf.algos.policy_losses import POLICY_LOSSES, entropy_bonus

VOCABULARY = 7


class CausalModel:
    """Logits at s depend on all attended tokens up to s and their order, not on padding."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, 5, generator=generator)
        self.head = torch.randn(5, VOCABULARY, generator=generator)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        state = torch.zeros(len(input_ids), 5)
        logits = []
        for ids, attended in zip(input_ids.T, attention_mask.T, strict=True):
            state = torch.where(attended[:, None], 0.5 * state + self.embedding[ids], state)
            logits.append(state @ self.head)
        return torch.stack(logits, dim=1)


def test_token_logprobs_by_hand() -> None:
    # Odds 1 : 3 give log 1/4 and log 3/4; at temperature 1/2 odds are squared, 1 : 9.
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, math.log(3)]]], dtype=torch.float64)
    ids = torch.tensor([[0, 1]])
    expected = torch.tensor([[math.log(1 / 4), math.log(3 / 4)]], dtype=torch.float64)
    torch.testing.assert_close(token_logprobs(logits, ids), expected, rtol=0, atol=1e-12)
    expected = torch.tensor([[math.log(1 / 10), math.log(9 / 10)]], dtype=torch.float64)
    actual = token_logprobs(logits, ids, temperature=0.5)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_token_logprobs_in_half_precision_are_computed_in_single() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, 1, 2], [3, 4, 49]])
    actual = token_logprobs(logits, ids)
    expected = logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


def test_token_logprobs_of_extreme_logits_are_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    logps = token_logprobs(logits, torch.tensor([[1]]))
    logps.sum().backward()
    assert logps.item() == -2e4
    assert logits.grad is not None
    assert logits.grad.tolist() == [[[-1, 1, 0]]]  # one-hot minus softmax


def test_refusals() -> None:
    logits, ids = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(logits, ids[:, :1])
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_logprobs(logits, ids, temperature=0.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_entropy(logits, temperature=-1.0)
    for num_response_tokens in (0, 2):
        with pytest.raises(ValueError, match="leaves no prompt"):
            response_outputs(logits, num_response_tokens)
    for flags in ([[True, True]], [[True, False]], [[False, True], [True, False]]):
        mask = torch.tensor(flags)
        with pytest.raises(ValueError, match="column 0"):
            sequence_logprobs(logits.expand(len(mask), 2, 3), ids.expand(len(mask), 2), mask)
    with pytest.raises(ValueError, match="shapes differ"):
        sequence_logprobs(logits, ids, torch.tensor([[False]]))
    with pytest.raises(ValueError, match="must be bool"):
        sequence_logprobs(logits, ids, torch.tensor([[0.0, 1.0]]))
    with pytest.raises(ValueError, match=r"must be \(B, T, V\)"):
        token_entropy(logits[0])
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(logits[0], ids[0])
    for temperature in (0.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be positive"):
            token_entropy(logits, temperature=temperature)


def test_sequence_logprobs_by_hand() -> None:
    # Odds 1 : 3 at every place: log 3/4, log 1/4, and at temperature 1/2, odds 1 : 9, log 9/10.
    logits = torch.tensor([0.0, math.log(3)], dtype=torch.float64).expand(2, 3, 2)
    ids = torch.tensor([[0, 1, 0], [1, 1, 1]])
    mask = torch.tensor([[False, True, True], [False, False, True]])
    expected = [math.log(3 / 4) + math.log(1 / 4), math.log(3 / 4)]
    assert sequence_logprobs(logits, ids, mask).tolist() == pytest.approx(expected, abs=1e-12)
    hot = sequence_logprobs(logits, ids, mask, temperature=0.5)
    assert hot.tolist() == pytest.approx([math.log(9 / 100), math.log(9 / 10)], abs=1e-12)


def test_a_response_may_be_a_single_token() -> None:
    assert response_outputs(torch.arange(2.0)[None], 1).tolist() == [[0]]


def test_a_response_has_one_logprob_per_token() -> None:  # C2
    model = CausalModel()
    prompt, response = [1, 2, 3], [4, 5, 6, 1]
    ids = torch.tensor([prompt + response])
    logits = model(ids, torch.ones_like(ids, dtype=torch.bool))
    logps = token_logprobs(response_outputs(logits, 4), ids[:, 3:])
    assert logps.shape == (1, 4)
    for t, token in enumerate(response):
        prefix = torch.tensor([prompt + response[:t]])
        next_logits = model(prefix, torch.ones_like(prefix, dtype=torch.bool))[0, -1]
        assert logps[0, t].item() == pytest.approx(next_logits.log_softmax(0)[token].item())


def test_values_stand_before_their_token() -> None:  # C16
    # The output at s is named s. Of 6 tokens the last 3 are the response, at 3, 4 and 5; the states
    # before them are those at 2, 3 and 4.
    values = torch.arange(6.0)[None]
    assert response_outputs(values, 3).tolist() == [[2, 3, 4]]


def test_padding_side_does_not_change_logprobs_or_scores() -> None:  # C1, C3, T3
    model = CausalModel()
    prompt, response = [3, 1, 4], [1, 5]
    scores, logprobs = [], []
    for left, right in ((0, 0), (2, 0), (0, 3), (1, 4)):
        ids = torch.tensor([[0] * left + prompt + response + [0] * right])
        positions = torch.arange(ids.shape[1])
        attention_mask = ((positions >= left) & (positions < left + 5))[None]
        action_mask = ((positions >= left + 3) & (positions < left + 5))[None]
        logits = model(ids, attention_mask)
        logprobs.append(sequence_logprobs(logits, ids, action_mask))
        last = last_index(attention_mask)[:, None]
        scores.append(logits[..., 0].gather(1, last))
    for logps, score in zip(logprobs[1:], scores[1:], strict=True):
        torch.testing.assert_close(logps, logprobs[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(score, scores[0], rtol=0, atol=1e-5)


def test_the_length_of_a_partner_does_not_change_logprobs() -> None:  # C3
    model = CausalModel()
    ids = torch.tensor([[3, 1, 4, 0, 0, 0], [3, 1, 4, 1, 5, 2]])
    attention_mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6], dtype=torch.bool)
    action_mask = attention_mask.clone()
    action_mask[:, :2] = False
    together = sequence_logprobs(model(ids, attention_mask), ids, action_mask)
    alone = sequence_logprobs(
        model(ids[:1, :3], attention_mask[:1, :3]), ids[:1, :3], action_mask[:1, :3]
    )
    torch.testing.assert_close(together[:1], alone, rtol=0, atol=1e-5)


def test_sampling_temperature_gives_ratio_one() -> None:  # C47, C49
    logits = 3 * torch.randn(4, 5, VOCABULARY, generator=torch.Generator().manual_seed(2))
    ids = torch.randint(VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(3))
    sampler = (logits / 0.5).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mask, advantages = torch.ones(4, 5, dtype=torch.bool), torch.ones(4, 5)
    for loss in POLICY_LOSSES.values():
        trainer = token_logprobs(logits, ids, temperature=0.5)
        assert loss(trainer, sampler, advantages, mask).metrics["ratio_deviation_max"] < 1e-5
        forgot = token_logprobs(logits, ids)
        assert loss(forgot, sampler, advantages, mask).metrics["ratio_deviation_max"] > 0.1


def test_entropy_by_hand() -> None:
    # Uniform over 4: log 4. Half, quarter, quarter: 1/2 log 2 + 2 * 1/4 log 4 = 3/2 log 2. Sure: 0.
    probs = torch.tensor([[[1, 1, 1, 1], [2, 1, 1, 0], [1, 0, 0, 0]]], dtype=torch.float64)
    logits = probs.log().requires_grad_()
    entropy = token_entropy(logits)
    expected = torch.tensor([[math.log(4), 1.5 * math.log(2), 0]], dtype=torch.float64)
    torch.testing.assert_close(entropy, expected, rtol=0, atol=1e-12)
    entropy.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_entropy_is_not_negative_and_knows_no_padding() -> None:  # C7
    logits = 30 * torch.randn(3, 6, 100, generator=torch.Generator().manual_seed(4))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1] * 6], dtype=torch.bool)
    entropy = token_entropy(logits)
    assert (entropy >= 0).all()
    padded = torch.where(mask[..., None], logits, float("nan"))
    one = entropy_bonus(entropy, mask)
    other = entropy_bonus(token_entropy(padded), mask)
    assert one.metrics["entropy_nats"].item() == other.metrics["entropy_nats"].item() > 0


def test_entropy_bonus_raises_entropy() -> None:  # T7
    logits = torch.tensor([[[2.0, 0.0, -1.0]]], requires_grad=True)
    mask = torch.tensor([[True]])
    before = token_entropy(logits)
    bonus = entropy_bonus(before, mask)
    assert bonus.loss.item() == -before.item()
    bonus.loss.backward()
    assert logits.grad is not None
    after = token_entropy(logits.detach() - 0.1 * logits.grad)
    assert after.item() > before.item() + 1e-3


def test_tensors_on_different_devices_are_refused() -> None:
    logits, ids, mask = torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), torch.ones(1, 2).bool()
    hidden, weight, bias = torch.zeros(1, 2, 4), torch.zeros(3, 4), torch.zeros(3)
    for refused in (
        lambda: token_logprobs(logits.to("meta"), ids),
        lambda: selected_logprobs(logits.to("meta"), ids, mask),
        lambda: selected_logprobs(logits, ids.to("meta"), mask),
        lambda: chunked_logprobs(hidden.to("meta"), weight, ids, mask),
        lambda: chunked_logprobs(hidden, weight.to("meta"), ids, mask),
        lambda: chunked_logprobs(hidden, weight, ids.to("meta"), mask),
        lambda: chunked_logprobs(hidden, weight, ids, mask, bias=bias.to("meta")),
        lambda: selected_logprobs(logits, ids.to("meta"), mask.to("meta")),
        lambda: chunked_logprobs(hidden, weight, ids.to("meta"), mask.to("meta")),
        lambda: chunked_logprobs(hidden, weight.to("meta"), ids.to("meta"), mask.to("meta")),
        lambda: sequence_logprobs(logits, ids, mask.to("meta")),
        lambda: sequence_logprobs(logits.to("meta"), ids, mask & False),
    ):
        with pytest.raises(ValueError, match="devices differ"):
            refused()


# --- pieces of a table, and the gradient made by hand ---


def test_pieces_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "PIECE", 12)

    def pieces(*shape: int) -> list[tuple[range, range]]:
        """The rows and columns of each."""
        num_sequences, num_tokens, _ = shape
        return [
            (range(num_sequences)[b], range(num_tokens)[t])
            for b, t in logprobs._pieces(torch.zeros(shape))
        ]

    r = range
    # Of 3 columns 4 places fit: two sequences of two tokens, or four tokens of one.
    assert pieces(3, 2, 3) == [(r(2), r(2)), (r(2, 3), r(2))]
    assert pieces(2, 5, 3) == [
        (r(1), r(4)), (r(1), r(4, 5)), (r(1, 2), r(4)), (r(1, 2), r(4, 5))
    ]  # fmt: skip
    # Of 5 columns two, of 13 (more than a piece) one, of one column all 12.
    assert pieces(1, 3, 5) == [(r(1), r(2)), (r(1), r(2, 3))]
    assert pieces(2, 2, 13) == [(r(b, b + 1), r(t, t + 1)) for b in r(2) for t in r(2)]
    assert pieces(3, 6, 1) == [(r(2), r(6)), (r(2, 3), r(6))]
    assert pieces(5, 1, 3) == [(r(4), r(1)), (r(4, 5), r(1))]
    # Of nothing, none, or one without a place.
    assert pieces(0, 4, 3) == pieces(4, 0, 0) == []
    assert pieces(0, 0, 3) == []


def test_pieces_have_four_million_entries() -> None:
    assert logprobs.PIECE == 2**22


def test_places_without_a_gradient_are_left_out_without_a_copy_where_there_are_none() -> None:
    assert logprobs._with_gradient(torch.tensor([[1.0, -1.0]])) == slice(None)
    here = logprobs._with_gradient(torch.tensor([[1.0, 0.0]]))
    assert isinstance(here, Tensor)
    assert here.tolist() == [[True, False]]


def test_wide_logits_at_temperature_one_are_not_copied() -> None:
    for dtype in (torch.float32, torch.float64):
        logits = torch.zeros(1, 2, 3, dtype=dtype)
        assert logprobs._scaled(logits, 1.0) is logits


def by_autograd(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy by the formulas, with autograd's own gradient, in float64."""
    logps = (logits.double() / temperature).log_softmax(-1)
    return logps.gather(-1, ids[..., None])[..., 0], -(logps.exp() * logps).sum(-1)


@pytest.mark.parametrize("piece", [1, 7, 12, 21, 45, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pieces_and_their_gradients_are_the_formulas(
    piece: int, temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "PIECE", piece)
    generator = torch.Generator().manual_seed(piece)
    logits = (2 * torch.randn(3, 5, VOCABULARY, generator=generator)).to(dtype).requires_grad_()
    ids = torch.randint(VOCABULARY, (3, 5), generator=generator)
    slopes = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    slopes[:, 1, 2:] = 0  # a few places, and one whole sequence, have no gradient
    slopes[:, 2] = 0
    actual = (
        token_logprobs(logits, ids, temperature=temperature),
        token_entropy(logits, temperature=temperature),
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    rounding = torch.finfo(dtype).eps
    for one, true, slope in zip(actual, by_autograd(logits, ids, temperature), slopes, strict=True):
        assert one.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(one.double(), true, rtol=0, atol=tolerance)
        (gradient,) = torch.autograd.grad((slope * one).sum(), logits)
        (expected,) = torch.autograd.grad((slope * true).sum(), logits, retain_graph=True)
        assert gradient.dtype == dtype
        torch.testing.assert_close(
            gradient.double(), expected.double(), rtol=rounding, atol=4 * tolerance
        )
        assert not gradient[2].any()


@pytest.mark.parametrize("piece", [1, 14, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_derivatives_by_differences(
    piece: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "PIECE", piece)
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.tensor([[0, 1, 2], [3, 3, 0]])
    logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, ids, temperature=temperature), logits
    )
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, temperature=temperature), logits)


@pytest.mark.parametrize("piece", [1, 6, 10**6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_where_no_gradient_comes_in_none_goes_out_whatever_stands_there(
    piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:  # C18
    monkeypatch.setattr(logprobs, "PIECE", piece)
    mask = torch.tensor([[True, False, True], [False, False, True], [False, False, False]])
    clean = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([[0, 1, 1], [0, 0, 1], [1, 1, 1]])
    for junk in (math.nan, math.inf, -math.inf):
        spoilt = torch.where(mask[..., None], clean, junk).requires_grad_()
        whole = clean.clone().requires_grad_()
        for function in (lambda x: token_logprobs(x, ids), token_entropy):
            (actual,) = torch.autograd.grad(select(function(spoilt), mask).sum(), spoilt)
            (expected,) = torch.autograd.grad(select(function(whole), mask).sum(), whole)
            assert torch.equal(actual, expected)
            assert not actual[~mask].any()
            assert actual[mask].any()


def test_impossible_tokens_have_no_gradient() -> None:
    # p = (1/2, 1/2, 0), entropy log 2: its slope -p (log p + H) is 0 everywhere; one-hot - p.
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]], dtype=torch.float64, requires_grad=True)
    entropy = token_entropy(logits)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-12)
    (slope,) = torch.autograd.grad(entropy.sum(), logits)
    assert slope[0, 0].tolist() == pytest.approx([0, 0, 0], abs=1e-12)
    logps = token_logprobs(logits, torch.tensor([[1]]))
    (slope,) = torch.autograd.grad(logps.sum(), logits)
    assert slope.tolist() == [[[-0.5, 0.5, 0]]]


def test_a_second_derivative_is_refused() -> None:
    """A wrong one would be worse than none. Of a sum, whose slope is 1, the first is a constant."""
    logits = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    for function in (lambda x: token_logprobs(x, torch.tensor([[0, 1]])), token_entropy):
        (slope,) = torch.autograd.grad(function(logits).square().sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.square().sum().backward()
        (slope,) = torch.autograd.grad(function(logits).sum(), logits, create_graph=True)
        assert not slope.requires_grad


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_tables_of_no_place(shape: tuple[int, ...]) -> None:
    logits = torch.zeros(shape, requires_grad=True)
    ids = torch.zeros(shape[:2], dtype=torch.long)
    for result in (token_logprobs(logits, ids), token_entropy(logits)):
        assert result.shape == shape[:2]
        (gradient,) = torch.autograd.grad(result.sum(), logits)
        assert gradient.shape == shape


def test_inputs_are_left_as_they_are() -> None:
    """Some steps work in place, on memory of their own."""
    ids = torch.tensor([[0, 1, 2], [3, 3, 0]])
    for dtype in (torch.float32, torch.float64):
        logits = torch.randn(2, 3, 4, dtype=dtype).requires_grad_()
        before, weights = logits.detach().clone(), torch.ones(2, 3, dtype=dtype)
        for function in (lambda x: token_logprobs(x, ids), token_entropy):
            function(logits).backward(weights)
            assert torch.equal(logits.detach(), before)
            assert torch.equal(weights, torch.ones_like(weights))


# --- positions selected first, and chunks of them ---


class Case:
    """States, head and ids of 3 sequences of 5 tokens, 4 states wide, and a mask with holes.

    Outside the mask states are NaN and ids are -100; `clean` states and ids hold numbers there.
    """

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, density: float = 0.6) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.clean = torch.randn(3, 5, 4, generator=generator).to(dtype)
        self.weight = torch.randn(VOCABULARY, 4, generator=generator).to(dtype).requires_grad_()
        self.bias = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_()
        self.mask = torch.rand(3, 5, generator=generator) < density
        self.clean_ids = torch.randint(VOCABULARY, (3, 5), generator=generator)
        self.ids = torch.where(self.mask, self.clean_ids, -100)
        self.hidden = torch.where(self.mask[..., None], self.clean, float("nan")).requires_grad_()
        self.clean.requires_grad_()
        self.slopes = torch.randn(2, 3, 5, generator=generator).to(dtype)

    def gradients(self, logprobs: Tensor, entropy: Tensor | None, states: Tensor) -> list[Tensor]:
        """Of a sum with random slopes, to the states, the weight and the bias."""
        total = (self.slopes[0] * logprobs).sum()
        if entropy is not None:
            total = total + (self.slopes[1] * entropy).sum()
        return list(torch.autograd.grad(total, [states, self.weight, self.bias]))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    density=st.sampled_from([0.3, 0.6, 1.1]),
    chunk_size=st.integers(1, 16),
    temperature=st.sampled_from([1.0, 0.5, 3.0]),
    entropy_gradient=st.booleans(),
)
def test_chunks_are_the_full_logits(
    seed: int,
    dtype: torch.dtype,
    density: float,
    chunk_size: int,
    temperature: float,
    entropy_gradient: bool,
) -> None:
    case = Case(seed, dtype, density)
    logits = case.clean @ case.weight.T + case.bias
    logprobs = select(token_logprobs(logits, case.clean_ids, temperature=temperature), case.mask)
    entropy = select(token_entropy(logits, temperature=temperature), case.mask)
    expected = case.gradients(logprobs, entropy if entropy_gradient else None, case.clean)
    chunked = chunked_logprobs(
        case.hidden,
        case.weight,
        case.ids,
        case.mask,
        bias=case.bias,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy_gradient=entropy_gradient,
    )
    torch.testing.assert_close(chunked.logprobs, logprobs)
    torch.testing.assert_close(chunked.entropy, entropy)
    assert chunked.entropy.requires_grad == entropy_gradient
    actual = case.gradients(
        chunked.logprobs, chunked.entropy if entropy_gradient else None, case.hidden
    )
    for part, true in zip(actual, expected, strict=True):
        torch.testing.assert_close(part, true)
    outside = actual[0][~case.mask]  # C18
    assert torch.equal(outside, torch.zeros_like(outside))


def test_chunks_without_a_bias_and_with_every_default() -> None:
    case = Case(0)
    logits = case.clean @ case.weight.T
    chunked = chunked_logprobs(case.hidden, case.weight, case.ids, case.mask)
    expected = select(token_logprobs(logits, case.clean_ids), case.mask)
    torch.testing.assert_close(chunked.logprobs, expected)
    torch.testing.assert_close(chunked.entropy, select(token_entropy(logits), case.mask))
    assert not chunked.entropy.requires_grad


def test_chunks_have_right_derivatives() -> None:
    case = Case(1)
    states = case.clean.detach()

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(
            hidden, weight, case.ids, case.mask, bias=bias, chunk_size=4, entropy_gradient=True
        )

    assert torch.autograd.gradcheck(both, (states.requires_grad_(), case.weight, case.bias))


def test_chunks_of_nothing_keep_their_place_in_the_graph() -> None:
    case = Case(2)
    nothing = torch.zeros_like(case.mask)
    chunked = chunked_logprobs(case.hidden, case.weight, case.ids, nothing, entropy_gradient=True)
    (chunked.logprobs + chunked.entropy).sum().backward()
    assert torch.equal(chunked.logprobs, torch.zeros(3, 5, dtype=torch.float64))
    assert case.hidden.grad is not None
    assert torch.equal(case.hidden.grad, torch.zeros(3, 5, 4, dtype=torch.float64))
    assert case.weight.grad is not None
    assert not case.weight.grad.any()


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_chunks_without_a_graph(guard: Callable[[], Any]) -> None:
    case = Case(3)
    with guard():
        chunked = chunked_logprobs(
            case.hidden, case.weight, case.ids, case.mask, entropy_gradient=True
        )
    assert not chunked.logprobs.requires_grad
    assert not chunked.entropy.requires_grad
    logits = (case.clean @ case.weight.T).detach()
    expected = select(token_logprobs(logits, case.clean_ids), case.mask)
    torch.testing.assert_close(chunked.logprobs, expected)


def test_chunks_under_autocast_are_the_head_under_autocast() -> None:
    case = Case(4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.nn.functional.linear(case.clean, case.weight, case.bias)
        chunked = chunked_logprobs(
            case.hidden, case.weight, case.ids, case.mask, bias=case.bias, chunk_size=2,
            entropy_gradient=True,
        )  # fmt: skip
    assert logits.dtype == torch.bfloat16
    logprobs = select(token_logprobs(logits, case.clean_ids), case.mask)
    entropy = select(token_entropy(logits), case.mask)
    assert chunked.logprobs.dtype == chunked.entropy.dtype == torch.float32
    torch.testing.assert_close(chunked.logprobs, logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(chunked.entropy, entropy, rtol=0, atol=1e-6)
    expected = case.gradients(logprobs, entropy, case.clean)
    actual = case.gradients(chunked.logprobs, chunked.entropy, case.hidden)
    for part, true in zip(actual, expected, strict=True):
        # The order of a sum in bfloat16, which has 8 bits.
        torch.testing.assert_close(part, true, rtol=0.05, atol=0.05)


def test_half_precision_in_gives_single_precision_out() -> None:
    case = Case(5, torch.bfloat16)
    chunked = chunked_logprobs(case.hidden, case.weight, case.ids, case.mask)
    logits = case.clean @ case.weight.T
    selected = selected_logprobs(logits, case.ids, case.mask)
    true = logits.double().log_softmax(-1).gather(-1, case.clean_ids[..., None])[..., 0]
    for actual in (chunked.logprobs, selected, token_logprobs(logits, case.clean_ids)):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(
            select(actual, case.mask).double(), select(true, case.mask), rtol=0, atol=1e-5
        )
    assert chunked.entropy.dtype == token_entropy(logits).dtype == torch.float32


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), temperature=st.sampled_from([1.0, 0.5]))
def test_selected_logprobs_are_those_of_the_whole_table(seed: int, temperature: float) -> None:
    case = Case(seed)
    logits = (case.clean @ case.weight.T).detach().requires_grad_()
    spoilt = torch.where(case.mask[..., None], logits.detach(), float("nan")).requires_grad_()
    expected = select(token_logprobs(logits, case.clean_ids, temperature=temperature), case.mask)
    actual = selected_logprobs(spoilt, case.ids, case.mask, temperature=temperature)
    torch.testing.assert_close(actual, expected)
    (case.slopes[0] * expected).sum().backward()
    (case.slopes[0] * actual).sum().backward()
    assert spoilt.grad is not None
    assert logits.grad is not None
    torch.testing.assert_close(spoilt.grad, logits.grad)
    assert torch.equal(spoilt.grad[~case.mask], torch.zeros_like(spoilt.grad[~case.mask]))


def test_selected_logprobs_take_temperature_one_by_default() -> None:
    logits = torch.tensor([[[0.0, math.log(3)]]], dtype=torch.float64)
    ids, mask = torch.tensor([[1]]), torch.tensor([[True]])
    assert selected_logprobs(logits, ids, mask).item() == pytest.approx(math.log(3 / 4), abs=1e-12)


class Tables(TorchDispatchMode):
    """The tables made while it is on that are as wide as the vocabulary.

    peak_bytes: the most that they took at any one time. rows: the most that one of a type had.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.peak_bytes = width, 0
        self.rows: dict[torch.dtype, int] = {}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.ndim and x.shape[-1] == self.width:
                storage = StorageWeakRef(x.untyped_storage())
                self.live[storage.cdata] = (storage, x.untyped_storage().nbytes())
                rows = x.numel() // self.width
                self.rows[x.dtype] = max(self.rows.get(x.dtype, 0), rows)
        self.live = {key: one for key, one in self.live.items() if not one[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.live.values()))
        return result


def peak_bytes(num_tokens: int, path: str) -> int:
    """Of tables with a column per token of the vocabulary, over forward and backward."""
    vocabulary = 611
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, num_tokens, 3, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 3, generator=generator, requires_grad=True)
    ids = torch.randint(vocabulary, (2, num_tokens), generator=generator)
    mask = torch.ones(2, num_tokens, dtype=torch.bool)
    with Tables(vocabulary) as tables:
        if path == "full":
            logits = hidden @ weight.T
            logprobs, entropy = token_logprobs(logits, ids), token_entropy(logits)
        else:
            logprobs, entropy = chunked_logprobs(
                hidden, weight, ids, mask, chunk_size=16, entropy_gradient=path == "with entropy"
            )
        total = logprobs.sum()
        (total + entropy.sum() if entropy.requires_grad else total).backward()
    return tables.peak_bytes


@pytest.mark.parametrize("path", ["without", "with entropy"])
def test_chunked_memory_does_not_grow_with_the_sequence(path: str) -> None:
    one_chunk = 16 * 611 * 4
    short, long = peak_bytes(32, path), peak_bytes(256, path)
    assert short == long
    assert one_chunk <= long <= 8 * one_chunk
    # The measure can fail: the full table grows, and is far above.
    assert peak_bytes(256, "full") > 7 * peak_bytes(32, "full")
    assert peak_bytes(256, "full") > 10 * long


def test_default_chunks_are_a_sixteenth_of_2048_tokens() -> None:
    ids = torch.zeros(1, 2048, dtype=torch.long)
    hidden, weight = torch.zeros(1, 2048, 2), torch.zeros(VOCABULARY, 2)
    with Tables(VOCABULARY) as tables:
        chunked_logprobs(hidden, weight, ids, torch.ones_like(ids, dtype=torch.bool))
    assert tables.rows[torch.float32] == 128


def test_only_selected_logits_are_widened() -> None:
    logits = torch.zeros(4, 8, 50, dtype=torch.bfloat16)
    ids, mask = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 8, dtype=torch.bool)
    mask[0, 1:] = True
    with Tables(50) as tables:
        selected_logprobs(logits, ids, mask)
    assert tables.rows[torch.float32] == 7
    with Tables(50) as tables:
        token_logprobs(logits, ids)
    assert tables.rows[torch.float32] == 32


def test_refusals_of_selecting_paths() -> None:
    hidden, weight = torch.zeros(1, 2, 4), torch.zeros(3, 4)
    ids, mask = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool)
    logits = torch.zeros(1, 2, 3)
    for fault, refused in (
        (
            "hidden .* do not fit the mask",
            lambda: chunked_logprobs(hidden[:, :1], weight, ids, mask),
        ),
        (
            "hidden .* do not fit the mask",
            lambda: chunked_logprobs(hidden[..., 0], weight, ids, mask),
        ),
        ("weight .* does not fit hidden", lambda: chunked_logprobs(hidden, weight.T, ids, mask)),
        ("weight .* does not fit hidden", lambda: chunked_logprobs(hidden, weight[0], ids, mask)),
        (
            "bias .* does not fit weight",
            lambda: chunked_logprobs(hidden, weight, ids, mask, bias=torch.zeros(4)),
        ),
        ("shapes differ", lambda: chunked_logprobs(hidden, weight, ids[:, :1], mask)),
        ("must be bool", lambda: chunked_logprobs(hidden, weight, ids, mask.long())),
        (
            "chunk_size must be at least 1 token, got 0",
            lambda: chunked_logprobs(hidden, weight, ids, mask, chunk_size=0),
        ),
        (
            "temperature must be positive",
            lambda: chunked_logprobs(hidden, weight, ids, mask, temperature=0.0),
        ),
        (
            "temperature must be positive",
            lambda: chunked_logprobs(hidden, weight, ids, mask, temperature=math.nan),
        ),
        ("logits .* do not fit the mask", lambda: selected_logprobs(logits[:, :1], ids, mask)),
        ("logits .* do not fit the mask", lambda: selected_logprobs(logits[..., 0], ids, mask)),
        ("shapes differ", lambda: selected_logprobs(logits, ids[:, :1], mask)),
        ("temperature", lambda: selected_logprobs(logits, ids, mask, temperature=-1.0)),
    ):
        with pytest.raises(ValueError, match=fault):
            refused()
