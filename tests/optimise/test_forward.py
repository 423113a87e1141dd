"""Passes over many sequences: rows back in their places, log-probs and KL by definition."""

from __future__ import annotations

import math

import pytest
import tiny
import torch

from rlhf.models.sequences import Sequences
from rlhf.optimise.forward import by_length, divergence, logprobs_of, scatter

SETTINGS = tiny.model_settings()
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
