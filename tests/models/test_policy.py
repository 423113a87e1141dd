"""Policies: log-probs that padding does not change, weights that survive a disk, refusals in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

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


# --- the head by itself ---

SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def phi() -> PreTrainedModel:
    """A head with a bias."""
    torch.manual_seed(0)
    model = PhiForCausalLM(PhiConfig(**(SIZES | tiny.SPREAD | {"num_key_value_heads": 4}))).eval()
    nn.init.normal_(model.lm_head.bias)
    return model


def gemma2(cap: float | None, spread: float = 0.3) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES, head_dim=8, final_logit_softcapping=cap, initializer_range=spread
    )
    return Gemma2ForCausalLM(config).eval()


def cohere(scale: float) -> PreTrainedModel:
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=scale)).eval()


def granite(scaling: float) -> PreTrainedModel:
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=scaling)).eval()


LINEAR: dict[str, Callable[[], PreTrainedModel]] = {
    **tiny.ARCHITECTURES,
    "tied": lambda: tiny.llama(tie_word_embeddings=True),
    "phi": phi,
    "no cap": lambda: gemma2(None),
    "no scale": lambda: cohere(1.0),
    "no scaling": lambda: granite(1.0),
}


@pytest.mark.parametrize("name", LINEAR)
@torch.no_grad()
def test_head_of_hidden_states_gives_the_logits(name: str) -> None:
    model = LINEAR[name]()
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    hidden = policy.response_hidden(model, batch)
    assert hidden.shape == (*batch.response_ids.shape, 32)
    weight, bias = policy.head_of(model)
    expected = policy.response_logits(model, batch)
    found = nn.functional.linear(hidden, weight, bias)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert weight is model.get_output_embeddings().weight
    assert (bias is not None) == (name == "phi")


NOT_LINEAR: dict[str, Callable[[], PreTrainedModel]] = {
    "soft cap": lambda: gemma2(30.0),
    # Its logits are small, so that the cap changes them by less than rounding does.
    "soft cap of a fresh model": lambda: gemma2(30.0, spread=0.02),
    "scale": lambda: cohere(0.0625),
    "scaling": lambda: granite(8.0),
    "scaling by little": lambda: granite(1.01),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_model_that_changes_its_logits_after_the_head_is_refused(name: str) -> None:
    model = NOT_LINEAR[name]()
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    for function in (policy.head_of, lambda m: policy.response_hidden(m, batch)):
        with pytest.raises(BadInput, match=r"changes its logits[\s\S]*logits_chunk_tokens: null"):
            function(model)


def test_a_model_without_a_linear_head_is_refused() -> None:
    body = tiny.llama().model
    odd = tiny.llama()
    odd.set_output_embeddings(nn.Sequential(odd.lm_head))
    bodiless = tiny.llama()
    bodiless.base_model_prefix = "none"
    for model in (body, odd, bodiless):
        with pytest.raises(BadInput, match=r"no linear output layer[\s\S]*logits_chunk_tokens"):
            policy.head_of(model)


def test_the_head_is_examined_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tiny.llama(), tiny.llama(1)
    seen: list[Any] = []
    examine = policy._not_linear
    monkeypatch.setattr(policy, "_not_linear", lambda *a: seen.append(a[0]) or examine(*a))
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    for model in (first, first, second):
        policy.head_of(model)
        policy.response_hidden(model, batch)
    assert [id(model) for model in seen] == [id(first), id(second)]


def test_examining_the_head_leaves_no_trace() -> None:
    """Under autocast and in train mode too: no gradient, no hook, no other logits, no random number."""
    model = tiny.llama().train()
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    before, state = policy.response_logits(model, batch), torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        policy.head_of(model)
    assert model.training
    assert not model.lm_head._forward_hooks
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(policy.response_logits(model, batch), before)
    assert torch.equal(torch.get_rng_state(), state)


# --- gradient checkpointing ---


def saved_and_gradients(
    model: PreTrainedModel, dtype: str
) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
    """Bytes that autograd keeps for the backward pass (weights apart), the loss, the gradients."""
    model.train()
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with policy.precision(tiny.model_settings(dtype=dtype), tiny.CPU):
            found = logprobs(model, batch)
        loss = torch.where(batch.response_mask, found, 0).sum()
        size = sum(kept.values())
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return size, loss.detach(), gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_checkpointing_keeps_less_and_changes_no_bit(name: str, dtype: str) -> None:
    model, plain = tiny.ARCHITECTURES[name](), tiny.ARCHITECTURES[name]()
    policy.enable_gradient_checkpointing(model)
    size, loss, gradients = saved_and_gradients(model, dtype)
    plain_size, plain_loss, plain_gradients = saved_and_gradients(plain, dtype)
    assert torch.equal(loss, plain_loss)
    assert gradients.keys() == plain_gradients.keys()
    for key, gradient in gradients.items():
        assert torch.equal(gradient, plain_gradients[key]), key
    assert size < plain_size / 2


def test_checkpointing_trains_layers_above_frozen_embeddings() -> None:
    model, plain = tiny.llama(), tiny.llama()
    policy.enable_gradient_checkpointing(model)
    for each in (model, plain):
        each.get_input_embeddings().requires_grad_(False)
    found, expected = (saved_and_gradients(each, "float32")[2] for each in (model, plain))
    assert found.keys() == expected.keys() and len(expected) > 10
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_checkpointing_leaves_sampling_and_the_saved_config_alone(tmp_path: Path) -> None:
    model, plain = tiny.llama(), tiny.llama()
    policy.enable_gradient_checkpointing(model)
    prompt = torch.tensor([[5, 6, 7]])
    assert model(prompt, use_cache=True).past_key_values.get_seq_length() == 3
    for name, saved in (("a", model), ("b", plain)):
        policy.save_policy(saved, tiny.tokenizer(), tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_checkpointing_that_the_model_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(BadInput, match=r"LlamaForCausalLM[\s\S]*gradient_checkpointing: false"):
        policy.enable_gradient_checkpointing(model)
