"""Passes over many sequences: rows back in their places, log-probs and KL by definition."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.algos.logprobs import token_entropy
from rlhf.errors import BadInput
from rlhf.models.policy import response_logits
from rlhf.models.sequences import Sequences
from rlhf.optimise.forward import by_length, divergence, logprobs_of, scatter, token_stats

SETTINGS = tiny.model_settings()


def in_chunks(tokens: int | None, settings: config.Model = SETTINGS) -> config.Model:
    return settings.model_copy(update={"logits_chunk_tokens": tokens})


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [4, 4], [8]]
RESPONSES = [[11, 12, 13, 1], [14], [15, 16], [17, 18, 19, 3, 5, 1], [3, 3]]


def batch() -> Sequences:
    return Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)


def test_by_length_is_a_partition_shortest_first() -> None:
    # Prompt and response: 7, 2, 7, 8, 3 tokens.
    assert by_length(batch(), 2) == [[1, 4], [0, 2], [3]]
    assert by_length(batch(), 100) == [[1, 4, 0, 2, 3]]


def test_scatter_puts_rows_back_and_zero_elsewhere() -> None:
    sequences = batch()
    table = scatter(sequences, [[3, 1], [4], [2, 0]], lambda part: part.response_ids.float() * 10)
    expected = torch.where(sequences.response_mask, sequences.response_ids * 10.0, 0)
    assert torch.equal(table, expected)


def test_scatter_carries_no_gradient() -> None:
    model = tiny.llama()
    table = scatter(batch(), [[0, 1, 2, 3, 4]], lambda p: logprobs_of(model, p, SETTINGS))
    assert not table.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@torch.no_grad()
def test_log_probs_by_definition(temperature: float) -> None:
    model = tiny.llama()
    found = logprobs_of(model, batch(), SETTINGS, temperature)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = model(torch.tensor([prompt + response])).logits[0] / temperature
        for t, token in enumerate(response):
            expected = logits[len(prompt) - 1 + t].log_softmax(-1)[token]
            torch.testing.assert_close(found[i, t], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@torch.no_grad()
def test_divergence_by_definition(temperature: float, batch_size: int) -> None:
    """KL summed over the answer, entropy averaged over it, at the sampler's temperature."""
    policy, reference = tiny.llama(0), tiny.llama(1)
    found = divergence(policy, reference, batch(), SETTINGS, batch_size, temperature)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids, kl, entropy = torch.tensor([prompt + response]), 0.0, 0.0
        p = (policy(ids).logits[0].double() / temperature).softmax(-1)
        q = (reference(ids).logits[0].double() / temperature).softmax(-1)
        for s in range(len(prompt) - 1, len(prompt) + len(response) - 1):
            kl += float((p[s] * (p[s] / q[s]).log()).sum())
            entropy -= float((p[s] * p[s].log()).sum())
        assert float(found.kl[i]) == pytest.approx(kl, abs=1e-4)
        assert float(found.entropy[i]) == pytest.approx(entropy / len(response), abs=1e-4)


def test_divergence_from_itself_is_exactly_zero() -> None:
    model = tiny.llama()
    assert not divergence(model, model, batch(), SETTINGS, 2).kl.any()
    # A copy with the same weights too, and never a negative number.
    assert divergence(model, tiny.llama(), batch(), SETTINGS, 2).kl.abs().max() == 0
    assert (divergence(model, tiny.llama(5), batch(), SETTINGS, 2).kl > 0.1).all()


def test_entropy_of_a_uniform_policy_is_log_vocabulary() -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    found = divergence(model, model, batch(), SETTINGS, 2)
    assert found.entropy.tolist() == pytest.approx([math.log(tiny.VOCABULARY)] * 5, abs=1e-5)


@torch.no_grad()
def test_bfloat16_arithmetic_is_close_and_comes_back_in_float32() -> None:
    model = tiny.llama(initializer_range=0.05)
    exact = logprobs_of(model, batch(), SETTINGS)
    found = logprobs_of(model, batch(), tiny.model_settings(dtype="bfloat16"))
    assert found.dtype == torch.float32
    assert 0 < float((found - exact).abs().max()) < 0.1


# --- log-probs and entropy of one pass, all at once or in chunks ---


def laid_out(left: int, right: int) -> Sequences:
    """One sequence with this much padding."""
    prompt, response = [9, 10, 11, 12], [17, 18, 19, 3, 1]
    return Sequences(
        torch.tensor([[13] * left + prompt]),
        torch.tensor([[False] * left + [True] * len(prompt)]),
        torch.tensor([response + [14] * right]),
        torch.tensor([[True] * len(response) + [False] * right]),
    )


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@torch.no_grad()
def test_chunks_have_the_values_of_all_at_once(chunk_tokens: int, temperature: float) -> None:
    model, sequences = tiny.llama(), batch()
    mask = sequences.response_mask
    whole = token_stats(model, sequences, SETTINGS, temperature=temperature, with_entropy=True)
    found = token_stats(
        model,
        sequences,
        in_chunks(chunk_tokens),
        temperature=temperature,
        with_entropy=True,
    )
    assert whole.entropy is not None and found.entropy is not None
    assert found.logprobs.shape == found.entropy.shape == mask.shape
    torch.testing.assert_close(found.logprobs[mask], whole.logprobs[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy[mask], whole.entropy[mask], atol=1e-5, rtol=0)
    # The shorter name computes the same.
    assert torch.equal(logprobs_of(model, sequences, SETTINGS, temperature), whole.logprobs)
    chunked = logprobs_of(model, sequences, in_chunks(chunk_tokens), temperature)
    assert torch.equal(chunked, found.logprobs)


@torch.no_grad()
def test_entropy_is_that_of_the_logits_and_absent_unless_asked_for() -> None:
    model, sequences = tiny.llama(), batch()
    found = token_stats(model, sequences, SETTINGS, temperature=0.7, with_entropy=True).entropy
    assert found is not None
    expected = token_entropy(response_logits(model, sequences), temperature=0.7)
    assert torch.equal(found, expected)
    for chunk_tokens in (None, 2):
        stats = token_stats(model, sequences, in_chunks(chunk_tokens))
        assert stats.entropy is None
        at_one = token_stats(model, sequences, in_chunks(chunk_tokens), temperature=1.0)
        assert torch.equal(stats.logprobs, at_one.logprobs)


@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_padding_side_does_not_change_them(tied: bool, chunk_tokens: int | None) -> None:
    model = tiny.llama(tie_word_embeddings=tied)
    alone = token_stats(model, laid_out(0, 0), SETTINGS, with_entropy=True)
    assert alone.entropy is not None
    for left, right in ((4, 0), (0, 3), (2, 5)):
        padded = token_stats(
            model, laid_out(left, right), in_chunks(chunk_tokens), with_entropy=True
        )
        assert padded.entropy is not None
        torch.testing.assert_close(padded.logprobs[:, :5], alone.logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(padded.entropy[:, :5], alone.entropy, atol=1e-5, rtol=0)


def gradients(
    model: PreTrainedModel, sequences: Sequences, chunk_tokens: int | None, entropy: float
) -> dict[str, Tensor]:
    """Of a loss that weighs every token differently, with or without an entropy term."""
    model.zero_grad()
    stats = token_stats(
        model, sequences, in_chunks(chunk_tokens), temperature=0.8, with_entropy=True
    )
    assert stats.entropy is not None
    mask = sequences.response_mask
    weights = torch.linspace(-1, 2, int(mask.sum()))
    ((stats.logprobs[mask] + entropy * stats.entropy[mask]) * weights).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("entropy", [0.0, 0.5])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_chunks_have_the_gradients_of_all_at_once(name: str, entropy: float) -> None:
    model = tiny.ARCHITECTURES[name]()
    whole = gradients(model, batch(), None, entropy)
    found = gradients(model, batch(), 3, entropy)
    assert found.keys() == whole.keys() and len(whole) > 10
    for key, expected in whole.items():
        size = float(expected.abs().max())
        torch.testing.assert_close(found[key], expected, atol=1e-4 * (1 + size), rtol=1e-4)


def test_a_bias_of_the_head_counts_and_learns() -> None:
    model = tiny.llama()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, tiny.VOCABULARY))
    whole, found = (gradients(model, batch(), size, 0.5)["lm_head.bias"] for size in (None, 3))
    assert float(whole.abs().max()) > 0.1
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_a_tied_weight_gets_the_gradient_of_both_its_uses(chunk_tokens: int | None) -> None:
    """As the embedding and as the head: the sum of what the two get in a model that has them apart."""
    tied, apart = tiny.llama(tie_word_embeddings=True), tiny.llama()
    apart.load_state_dict(
        {n: tied.state_dict()[n] for n in apart.state_dict()}
    )  # the head too, copied
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight
    both = gradients(apart, batch(), None, 0.5)
    embedding, head = both["model.embed_tokens.weight"], both["lm_head.weight"]
    assert min(float(embedding.abs().max()), float(head.abs().max())) > 0.1
    found = gradients(tied, batch(), chunk_tokens, 0.5)["model.embed_tokens.weight"]
    size = float((embedding + head).abs().max())
    torch.testing.assert_close(found, embedding + head, atol=1e-4 * (1 + size), rtol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_the_entropy_carries_a_gradient_unless_told_otherwise(chunk_tokens: int | None) -> None:
    model = tiny.llama()
    stats = token_stats(model, batch(), in_chunks(chunk_tokens), with_entropy=True)
    assert stats.entropy is not None and stats.entropy.requires_grad
    for wanted in (True, False):
        stats = token_stats(
            model,
            batch(),
            in_chunks(chunk_tokens),
            with_entropy=True,
            entropy_gradient=wanted,
        )
        assert stats.entropy is not None
        assert stats.entropy.requires_grad == wanted
        assert stats.logprobs.requires_grad
    with torch.no_grad():
        stats = token_stats(model, batch(), in_chunks(chunk_tokens), with_entropy=True)
    assert stats.entropy is not None and not stats.entropy.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_the_first_ratio_is_exactly_1(chunk_tokens: int | None, dtype: str) -> None:
    """Constants are computed without a graph, training with one: the same bits."""
    model, settings = tiny.llama(), tiny.model_settings(dtype=dtype)
    with torch.no_grad():
        old = token_stats(model, batch(), in_chunks(chunk_tokens, settings)).logprobs
    new = token_stats(model.train(), batch(), in_chunks(chunk_tokens, settings)).logprobs
    mask = batch().response_mask
    assert torch.equal(new[mask], old[mask])


@torch.no_grad()
def test_chunks_under_bfloat16_are_those_of_all_at_once() -> None:
    """The head multiplies in bfloat16 in both, and what follows is float32."""
    model, settings = tiny.llama(), tiny.model_settings(dtype="bfloat16")
    whole = logprobs_of(model, batch(), settings)
    found = logprobs_of(model, batch(), in_chunks(3, settings))
    assert found.dtype == torch.float32
    mask = batch().response_mask
    torch.testing.assert_close(found[mask], whole[mask], atol=1e-4, rtol=0)
    assert not torch.allclose(whole[mask], logprobs_of(model, batch(), SETTINGS)[mask], atol=1e-4)


@torch.no_grad()
def test_chunks_of_a_model_whose_head_is_not_linear_are_refused() -> None:
    model = tiny.llama()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.tanh())
    token_stats(model, batch(), SETTINGS)
    with pytest.raises(BadInput, match="logits_chunk_tokens"):
        token_stats(model, batch(), in_chunks(3))


@torch.no_grad()
def test_chunks_never_hold_a_table_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor with V columns has more rows than a chunk."""
    vocabulary = 997
    model = tiny.llama(vocabulary=vocabulary)
    from torch.utils._python_dispatch import TorchDispatchMode

    rows: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.ndim > 1 and result.shape[-1] == vocabulary:
                rows.append(result.numel() // vocabulary)
            return result

    sequences = batch()
    token_stats(model, sequences, in_chunks(4), with_entropy=True)  # examines the head
    for chunk_tokens, most in ((4, 4), (None, sequences.response_ids.numel())):
        rows.clear()
        with Watch():
            token_stats(model, sequences, in_chunks(chunk_tokens), with_entropy=True)
        # The head's weight (V, H) transposed has V columns, too: H of them is one view.
        assert max(row for row in rows if row != 32) >= most
        if chunk_tokens is not None:
            assert max(row for row in rows if row != 32) == most
