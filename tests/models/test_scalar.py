"""Scalar models: read at the right token, whoever stands beside; scaled, saved and loaded exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from rlhf.models import policy
from rlhf.models.scalar import ScalarModel
from rlhf.models.sequences import Sequences

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [4, 4]]
RESPONSES = [[11, 12, 13, 1], [14], [15, 1], []]


def scalar(name: str, seed: int = 0) -> ScalarModel:
    model = ScalarModel(tiny.ARCHITECTURES[name](seed).base_model).eval()
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.head.bias)
    return model


def by_definition(model: ScalarModel, ids: list[int]) -> torch.Tensor:
    """The head's output at every token of one unpadded sequence."""
    hidden = model.backbone(torch.tensor([ids])).last_hidden_state[0]
    return hidden @ model.head.weight[0] + model.head.bias


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.no_grad()
def test_scores_are_read_at_the_last_real_token_whoever_stands_beside(name: str) -> None:
    model = scalar(name)
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    expected = torch.stack(
        [by_definition(model, p + r)[-1] for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    )
    torch.testing.assert_close(model.scores(batch), expected, atol=1e-5, rtol=0)
    for rows in ([0], [3, 1], [2, 0, 3], [1]):
        found = model.scores(batch.select(rows))
        torch.testing.assert_close(found, expected[rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.no_grad()
def test_scores_do_not_depend_on_the_padding_side(name: str) -> None:
    model = scalar(name)
    expected = by_definition(model, [5, 6, 7, 8, 1])[-1]
    for left, right in ((0, 0), (0, 4), (4, 0), (2, 3)):
        batch = Sequences(
            torch.tensor([[tiny.PAD] * left + [5, 6, 7]]),
            torch.tensor([[False] * left + [True] * 3]),
            torch.tensor([[8, 1] + [tiny.PAD] * right]),
            torch.tensor([[True] * 2 + [False] * right]),
        )
        torch.testing.assert_close(model.scores(batch)[0], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_end_token_is_read_when_padding_is_the_end_token() -> None:
    model = scalar("llama")
    ended = Sequences.from_rows([[5, 6], [5]], [[7, tiny.EOS], [7, 8, 9, 10]], tiny.EOS)
    cut = Sequences.from_rows([[5, 6], [5]], [[7], [7, 8, 9, 10]], tiny.EOS)
    with_end, without = (
        by_definition(model, [5, 6, 7, tiny.EOS])[-1],
        by_definition(model, [5, 6, 7])[-1],
    )
    torch.testing.assert_close(model.scores(ended)[0], with_end, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.scores(cut)[0], without, atol=1e-5, rtol=0)
    assert abs(with_end - without) > 0.1


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.no_grad()
def test_values_stand_before_each_response_token(name: str) -> None:
    model = scalar(name)
    batch = Sequences.from_rows(PROMPTS[:3], RESPONSES[:3], tiny.PAD)
    values = model.values(batch)
    assert values.shape == batch.response_mask.shape
    for i in range(3):
        outputs = by_definition(model, PROMPTS[i] + RESPONSES[i])
        for t in range(len(RESPONSES[i])):
            expected = outputs[len(PROMPTS[i]) - 1 + t]  # has seen the tokens before t, not t
            torch.testing.assert_close(values[i, t], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_value_does_not_know_the_token_that_follows() -> None:
    model = scalar("llama")
    one = model.values(Sequences.from_rows([[5, 6]], [[7, 8, 9]], tiny.PAD))
    other = model.values(Sequences.from_rows([[5, 6]], [[7, 10, 11]], tiny.PAD))
    assert torch.equal(one[:, :2], other[:, :2])
    assert not torch.equal(one[:, 2], other[:, 2])


@torch.no_grad()
def test_rescaling_the_head_rescales_the_output() -> None:
    model = scalar("llama")
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    before = model.scores(batch)
    model.rescale_(3.0, 0.5)
    torch.testing.assert_close(model.scores(batch), (before - 3.0) / 0.5, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_new_head_outputs_zero() -> None:
    model = ScalarModel(tiny.llama().base_model)
    assert not model.outputs(Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)).any()


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.no_grad()
def test_saved_and_loaded_is_the_same_model_to_the_bit(name: str, tmp_path: Path) -> None:
    model = scalar(name)
    model.save(tmp_path / "member", tiny.tokenizer())
    loaded = ScalarModel.from_directory(tmp_path / "member", tiny.CPU).eval()
    assert tiny.same_weights(loaded, tiny.weights_of(model))
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    assert torch.equal(loaded.scores(batch), model.scores(batch))


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@torch.no_grad()
def test_a_policy_lends_its_body(name: str, tmp_path: Path) -> None:
    source = tiny.ARCHITECTURES[name](seed=3)
    policy.save_policy(source, tiny.tokenizer(), tmp_path / "policy")
    model = ScalarModel.from_directory(tmp_path / "policy", tiny.CPU)
    assert tiny.same_weights(model.backbone, tiny.weights_of(source.base_model))
    assert not model.head.weight.any()
    assert not model.head.bias.any()


@torch.no_grad()
def test_outputs_keep_float32_steps_under_bfloat16_arithmetic() -> None:
    """A score of bfloat16 has 8 bits: close answers would tie."""
    model = scalar("llama")
    batch = Sequences.from_rows(PROMPTS, RESPONSES, tiny.PAD)
    exact = model.outputs(batch)
    with policy.precision(tiny.model_settings(dtype="bfloat16"), tiny.CPU):
        found = model.outputs(batch)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    assert float((found - exact)[batch.attention_mask].abs().max()) < 0.3
