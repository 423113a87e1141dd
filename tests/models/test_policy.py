"""Policies: log-probs that padding does not change, weights that survive a disk, refusals in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import PreTrainedModel

from rlhf.algos.logprobs import token_logprobs
from rlhf.errors import BadInput
from rlhf.models import policy
from rlhf.models.sequences import Sequences

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [4, 4]]
RESPONSES = [[11, 12, 13, 1], [14], [15, 16], [17, 18, 19, 3, 5, 1]]


def by_definition(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log pi(response_t | everything before), one unpadded sequence, no mask, no positions given."""
    logits = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
    places = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    return torch.stack([logits[s, t] for s, t in zip(places, response, strict=True)])


def logprobs(model: PreTrainedModel, batch: Sequences) -> torch.Tensor:
    return token_logprobs(policy.response_logits(model, batch), batch.response_ids)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.no_grad()
def test_padded_rows_have_the_log_probs_of_unpadded_ones(name: str) -> None:
    model = tiny.ARCHITECTURES[name]()
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    together = logprobs(model, batch)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = by_definition(model, prompt, response)
        found = together[i][batch.response_mask[i]]
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        alone = logprobs(model, batch.select([i]))[0, : len(response)]
        torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.no_grad()
def test_padding_side_does_not_matter(name: str) -> None:
    """The same tokens with all padding on the right, or most of it on the left."""
    model = tiny.ARCHITECTURES[name]()
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        expected = by_definition(model, prompt, response)
        for left, right in ((0, 3), (4, 0), (2, 5)):
            batch = Sequences(
                torch.tensor([[tiny.PAD] * left + prompt]),
                torch.tensor([[False] * left + [True] * len(prompt)]),
                torch.tensor([response + [tiny.PAD] * right]),
                torch.tensor([[True] * len(response) + [False] * right]),
            )
            found = logprobs(model, batch)[0, : len(response)]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_what_stands_in_the_padding_is_never_read() -> None:
    model = tiny.llama()
    clean = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    dirty = Sequences(
        torch.where(clean.prompt_mask, clean.prompt_ids, 17),
        clean.prompt_mask,
        torch.where(clean.response_mask, clean.response_ids, 18),
        clean.response_mask,
    )
    mask = clean.response_mask
    assert torch.equal(logprobs(model, clean)[mask], logprobs(model, dirty)[mask])


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_gradient_through_left_padding_is_that_without_padding(name: str) -> None:
    model = tiny.ARCHITECTURES[name]()
    logprobs(model, Sequences.from_rows([[8]], [[14, 3]], tiny.PAD)).sum().backward()
    expected = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    batch = Sequences.from_rows([[8], [9, 10, 11, 12]], [[14, 3], [15]], tiny.PAD)
    found = logprobs(model, batch)
    torch.where(batch.response_mask, found, 0)[0].sum().backward()
    for key, parameter in model.named_parameters():
        if key in expected:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected[key], atol=2e-4, rtol=1e-3)


def test_an_answer_without_a_prompt_is_refused() -> None:
    batch = Sequences.from_rows([[], []], [[5], [6]], tiny.PAD)
    with pytest.raises(ValueError, match="no prompt"):
        policy.response_logits(tiny.llama(), batch)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_saved_and_loaded_is_the_same_policy_to_the_bit(name: str, tmp_path: Path) -> None:
    model = tiny.ARCHITECTURES[name]()
    policy.save_policy(model, tiny.tokenizer(), tmp_path / "policy")
    loaded = policy.load_policy(tmp_path / "policy", tiny.CPU)
    assert tiny.same_weights(loaded, tiny.weights_of(model))
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    with torch.no_grad():
        before, after = (policy.response_logits(m, batch) for m in (model, loaded.eval()))
    assert torch.equal(before, after)
    assert not list((tmp_path / "policy").glob("*.bin"))  # no pickle


def test_two_saves_have_the_same_bytes(tmp_path: Path) -> None:
    model = tiny.llama()
    for name in ("a", "b"):
        policy.save_policy(model, tiny.tokenizer(), tmp_path / name)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_new_policy_follows_seed_and_sizes() -> None:
    demo = {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "intermediate_size": 24,
        "max_positions": 16,
    }
    from rlhf import config

    settings = tiny.model_settings(base="demo", tokenizer="x", demo=config.DemoModel(**demo))
    first, again, other = (policy.load_base(settings, tiny.tokenizer(), seed) for seed in (1, 1, 2))
    assert tiny.same_weights(again, tiny.weights_of(first))
    assert not tiny.same_weights(other, tiny.weights_of(first))
    assert first.config.vocab_size == tiny.VOCABULARY
    assert policy.context_length(first) == 16
    assert first.get_input_embeddings().weight is first.get_output_embeddings().weight


def test_a_model_with_too_short_a_context_is_refused(tmp_path: Path) -> None:
    policy.save_policy(tiny.llama(), tiny.tokenizer(), tmp_path / "base")
    settings = tiny.model_settings(base=str(tmp_path / "base"), max_response_tokens=57)
    with pytest.raises(BadInput, match=r"= 65 tokens[\s\S]*at most 64 tokens"):
        policy.load_base(settings, tiny.tokenizer(), 0)
    policy.load_base(settings.model_copy(update={"max_response_tokens": 56}), tiny.tokenizer(), 0)


def test_a_tokenizer_with_tokens_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    policy.save_policy(tiny.llama(vocabulary=12), tiny.tokenizer(), tmp_path / "base")
    settings = tiny.model_settings(base=str(tmp_path / "base"))
    with pytest.raises(BadInput, match=r"the tokenizer has 20 tokens[\s\S]*knows 12"):
        policy.load_base(settings, tiny.tokenizer(), 0)


def test_directories_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such model directory"):
        policy.load_policy(tmp_path / "nothing", tiny.CPU)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"no weights \(\*\.safetensors\)"):
        policy.load_policy(tmp_path / "empty", tiny.CPU)
    (tmp_path / "empty" / "model.safetensors").touch()
    with pytest.raises(BadInput, match=r"no config\.json"):
        policy.load_policy(tmp_path / "empty", tiny.CPU)
    with pytest.raises(BadInput, match="no such file"):
        policy.load_base(tiny.model_settings(base=str(tmp_path / "x.gguf")), tiny.tokenizer(), 0)
