"""Sampling: the distribution that is claimed, the log-probs that are reported, the order and the ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from scipy import stats
from transformers import PreTrainedModel

from rlhf.algos.logprobs import token_logprobs
from rlhf.models.policy import response_logits
from rlhf.models.sequences import Sequences
from rlhf.rollout import Completion, Sampling, sample, sampler

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [4, 4], [8], [17], [3, 5, 1, 6], [12, 13]]


def draw(
    model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, **changes: Any
) -> list[Completion]:
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "temperature": 1.0,
        "eos_id": tiny.EOS,
        "pad_id": tiny.PAD,
        "seed": 0,
        "batch_size": len(prompts),
    }
    return sample(model, prompts, **(options | changes))


@torch.no_grad()
def mismatch(
    model: PreTrainedModel, prompts: list[list[int]], found: list[Completion], temperature: float
) -> float:
    """Largest difference in nats between reported log-probs and teacher forcing."""
    batch = Sequences.from_rows(prompts, [c.ids for c in found], tiny.PAD)
    logits = response_logits(model, batch)
    expected = token_logprobs(logits, batch.response_ids, temperature=temperature)
    reported = torch.tensor([p for c in found for p in c.logprobs])
    return float((expected[batch.response_mask] - reported).abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("compact_below", [0.0, 0.8, 1.1])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_log_probs_are_those_of_teacher_forcing(
    name: str, compact_below: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether ended rows stay in the batch, leave sometimes, or leave at once."""
    monkeypatch.setattr(sampler, "COMPACT_BELOW", compact_below)
    model = tiny.ARCHITECTURES[name]()
    prompts = PROMPTS * 4
    found = draw(model, prompts, temperature=temperature)
    assert any(c.ended for c in found)
    assert len({len(c.ids) for c in found}) > 2
    for completion in found:  # the end token ends the answer, and nothing else does
        assert completion.ended == (completion.ids[-1] == tiny.EOS)
        assert tiny.EOS not in completion.ids[:-1]
        assert completion.ended or len(completion.ids) == 12
    assert mismatch(model, prompts, found, temperature) < 1e-4
    other = 0.7 if temperature == 1.0 else 1.0
    assert mismatch(model, prompts, found, other) > 0.05


def test_same_seed_same_answers_other_seed_others() -> None:
    model = tiny.llama()
    assert draw(model) == draw(model)
    assert draw(model) != draw(model, seed=1)


class Stopped(Exception): ...


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_sampling_that_was_saved_and_continued_is_the_same_to_the_bit(
    after: int, tmp_path: Path
) -> None:
    """Eight prompts, three at a time: stopped after no batch, or after one, two or all of them."""
    model, state, seen = tiny.llama(), Sampling(), list[int]()

    def stop(done: int, tokens: int) -> None:
        if done == min(3 * after, 8):
            torch.save(state.state_dict(), tmp_path / "state.pt")
            raise Stopped

    if after:
        with pytest.raises(Stopped):
            draw(model, batch_size=3, state=state, on_batch=stop)
    else:
        torch.save(state.state_dict(), tmp_path / "state.pt")
    again = Sampling()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    found = draw(model, batch_size=3, state=again, on_batch=lambda done, _: seen.append(done))
    assert found == draw(model, batch_size=3)
    assert seen == [3, 6, 8][after:]


def test_equal_prompts_get_answers_of_their_own() -> None:
    found = draw(tiny.llama(), [[8]] * 16)
    assert len({tuple(c.ids) for c in found}) > 8


def always(next_token: Callable[[int], int]) -> PreTrainedModel:
    """A real Llama whose answer is a function of the last token alone."""
    size = tiny.VOCABULARY
    model = tiny.llama(
        hidden_size=size, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.base_model.norm.weight.fill_(1.0)
        model.get_input_embeddings().weight.copy_(torch.eye(size))
        for token in range(size):
            model.get_output_embeddings().weight[next_token(token), token] = 100.0
    return model


@pytest.mark.parametrize("compact_below", [0.0, 0.8, 1.1])
def test_end_token_is_counted_once_and_included(
    compact_below: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "COMPACT_BELOW", compact_below)
    # 9 is followed by 8, ... 4 by 3, 3 by the end token.
    model = always(lambda token: token - 1 if token > 3 else tiny.EOS)
    prompts = [[9], [12, 4], [6, 6, 6], [3]]
    found = draw(model, prompts, max_new_tokens=7)
    assert [c.ids for c in found] == [[8, 7, 6, 5, 4, 3, 1], [3, 1], [5, 4, 3, 1], [1]]
    assert all(c.ended for c in found)
    assert all(len(c.logprobs) == len(c.ids) for c in found)
    assert max(abs(p) for c in found for p in c.logprobs) < 1e-4  # there was no choice


def test_longest_answer_without_end_token_has_not_ended() -> None:
    model = always(lambda token: token - 1 if token > 3 else tiny.EOS)
    (cut,) = draw(model, [[9]], max_new_tokens=6)
    assert (cut.ids, cut.ended) == ([8, 7, 6, 5, 4, 3], False)
    (one,) = draw(model, [[9]], max_new_tokens=1)
    assert (one.ids, one.ended) == ([8], False)
    (end,) = draw(model, [[3]], max_new_tokens=1)
    assert (end.ids, end.ended) == ([1], True)


def test_end_and_padding_tokens_inside_a_prompt_do_not_end_it() -> None:
    model = always(lambda token: token - 1 if token > 3 else tiny.EOS)
    found = draw(model, [[1, 5], [0, 0, 4], [7]], pad_id=tiny.EOS)
    assert [c.ids for c in found] == [[4, 3, 1], [3, 1], [6, 5, 4, 3, 1]]


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_order_is_kept_however_the_prompts_are_batched(name: str, batch_size: int) -> None:
    model = tiny.ARCHITECTURES[name]()
    done: list[tuple[int, int]] = []
    found = draw(model, batch_size=batch_size, on_batch=lambda n, tokens: done.append((n, tokens)))
    # A log-prob fits its own prompt only.
    assert mismatch(model, PROMPTS, found, 1.0) < 1e-4
    assert mismatch(model, PROMPTS[::-1], found, 1.0) > 0.1
    assert [n for n, _ in done] == sorted({min(8, k * batch_size) for k in range(1, 9)})
    assert sum(tokens for _, tokens in done) == sum(len(c.ids) for c in found)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_frequencies_are_the_softmax(name: str, temperature: float) -> None:
    model = tiny.ARCHITECTURES[name]()
    prompt, count = [5, 9], 4000
    found = draw(model, [prompt] * count, max_new_tokens=1, temperature=temperature)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1] / temperature
    expected = logits.double().softmax(-1) * count
    observed = torch.bincount(torch.tensor([c.ids[0] for c in found]), minlength=len(expected))
    often = expected >= 5
    groups = [
        torch.cat([x[often].double(), x[~often].sum().double()[None]]).numpy() + 1e-9
        for x in (observed, expected)
    ]
    assert stats.chisquare(*groups).pvalue > 1e-3
    # The test can tell: it refuses the softmax of another temperature.
    wrong = (logits.double() * 0.8).softmax(-1) * count
    wrong_group = torch.cat([wrong[often], wrong[~often].sum()[None]]).numpy() + 1e-9
    assert stats.chisquare(groups[0], wrong_group).pvalue < 1e-3


def test_compaction_does_not_change_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of answers, with ended rows kept and with ended rows dropped at once."""
    model = tiny.llama(seed=2)
    lengths = []
    for share in (0.0, 1.1):
        monkeypatch.setattr(sampler, "COMPACT_BELOW", share)
        found = draw(model, PROMPTS * 100, max_new_tokens=8)
        lengths.append([len(c.ids) for c in found])
    assert stats.ks_2samp(*lengths, method="asymp").pvalue > 1e-3
    shorter = [n - 1 for n in lengths[1]]
    assert stats.ks_2samp(lengths[0], shorter, method="asymp").pvalue < 1e-3


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_put_back_and_dropout_never_samples(training: bool) -> None:
    model = tiny.gpt2(dropout=0.5).train(training)
    found = draw(model)
    assert model.training is training
    assert mismatch(model.eval(), PROMPTS, found, 1.0) < 1e-4


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        draw(tiny.llama(), [[5], []])


def test_bfloat16_samples_from_nearly_the_same_policy() -> None:
    model = tiny.llama()
    prompts = [[3, 4, 5], [6, 7]] * 8
    options = {"max_new_tokens": 6, "temperature": 1.0, "eos_id": 1, "pad_id": 0, "seed": 0}
    exact = sample(model, prompts, batch_size=16, **options)
    rough = sample(model, prompts, batch_size=16, dtype="bfloat16", **options)
    first = [
        (a.logprobs[0], b.logprobs[0])
        for a, b in zip(exact, rough, strict=True)
        if a.ids[0] == b.ids[0]
    ]
    assert len(first) >= 8
    assert max(abs(a - b) for a, b in first) < 0.1
    assert any(a != b for a, b in first)
