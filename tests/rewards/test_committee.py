"""The committee: scores of each answer by definition, scaled, aggregated, in the order given."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from rlhf import artifacts
from rlhf.errors import BadInput
from rlhf.models.scalar import HEAD_FILE, ScalarModel
from rlhf.rewards import committee as module
from rlhf.rewards.committee import SCALE_FILE, Committee

SCALES = [(0.5, 2.0), (-1.0, 0.25), (3.0, 1.0)]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [4, 4], [8], [17]]
ANSWERS = ["w11 w12", "", "w15 w16 w3 w4 w5", "w17", "w3 w3 w3", ""]
ENDED = [True, True, False, True, False, False]


def member(seed: int) -> ScalarModel:
    model = ScalarModel(tiny.llama(seed).base_model).eval()
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.head.weight)
    return model


def committee(size: int = 3) -> Committee:
    return Committee(
        [member(i) for i in range(size)], SCALES[:size], tiny.codec(), tiny.model_settings()
    )


@torch.no_grad()
def by_definition() -> torch.Tensor:
    """(M, B), one unpadded answer at a time: (the head at the last token - mean) / std."""
    scores = torch.empty(3, len(PROMPTS))
    for m, (mean, std) in enumerate(SCALES):
        model = member(m)
        for i, (prompt, text, ended) in enumerate(zip(PROMPTS, ANSWERS, ENDED, strict=True)):
            ids = prompt + [int(word[1:]) for word in text.split()] + [tiny.EOS] * ended
            hidden = model.backbone(torch.tensor([ids])).last_hidden_state[0, -1]
            scores[m, i] = (hidden @ model.head.weight[0] - mean) / std
    return scores


@pytest.mark.parametrize("batch", [1, 2, 4, 256])
def test_scores_by_definition_in_the_order_given(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of mixed lengths, an empty one among them, in batches of any size."""
    monkeypatch.setattr(module, "SCORING_BATCH", batch)
    found = committee().member_scores(PROMPTS, ANSWERS, ENDED)
    torch.testing.assert_close(found, by_definition(), atol=1e-4, rtol=1e-5)


def test_shuffled_answers_get_their_own_scores() -> None:
    order = [4, 0, 5, 2, 1, 3]
    straight = committee().member_scores(PROMPTS, ANSWERS, ENDED)
    shuffled = committee().member_scores(
        [PROMPTS[i] for i in order], [ANSWERS[i] for i in order], [ENDED[i] for i in order]
    )
    torch.testing.assert_close(shuffled, straight[:, order], atol=1e-4, rtol=1e-5)


def test_an_answer_that_ended_is_another_answer() -> None:
    whole, cut = committee().member_scores([[8], [8]], ["w5", "w5"], [True, False])[0]
    assert abs(whole - cut) > 0.01


def test_only_empty_answers_are_scored_by_their_prompts() -> None:
    found = committee().member_scores([[5, 6, 7], [8]], ["", ""], [False, False])
    assert found[0, 0] != found[0, 1]
    assert torch.isfinite(found).all()


def test_aggregates_by_hand() -> None:
    scores = by_definition()
    for name, expected in {
        "mean": scores.mean(0),
        "min": scores.min(0).values,
        "mean_minus_variance": scores.mean(0) - 0.5 * scores.var(0, correction=0),
    }.items():
        found = committee().score(PROMPTS, ANSWERS, ENDED, aggregate=name)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)


def test_columns_of_different_lengths_are_refused() -> None:
    for prompts, texts, ended in (
        (PROMPTS[:1], ANSWERS[:2], ENDED[:2]),
        (PROMPTS[:3], ANSWERS[:2], ENDED[:2]),
        (PROMPTS[:2], ANSWERS[:2], ENDED[:1]),
    ):
        with pytest.raises(ValueError, match="zip"):
            committee().member_scores(prompts, texts, ended)


def saved(directory: Path) -> Committee:
    made = committee(2)
    for i, model in enumerate(made.members):
        model.save(directory / f"member_{i}", tiny.tokenizer())
    rows = [{"name": f"member_{i}", "mean": m, "std": s} for i, (m, s) in enumerate(made.scales)]
    artifacts.write_json(directory / SCALE_FILE, {"members": rows})
    return made


def test_saved_and_loaded_scores_are_equal_to_the_bit(tmp_path: Path) -> None:
    made = saved(tmp_path)
    loaded = Committee.load(tmp_path, tiny.codec(), tiny.model_settings(), tiny.CPU)
    before, after = (c.member_scores(PROMPTS, ANSWERS, ENDED) for c in (made, loaded))
    assert torch.equal(before, after)
    assert not any(m.training or m.backbone.training for m in loaded.members)


def test_a_member_without_its_head_is_refused_and_never_scores_zero(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "member_1" / HEAD_FILE).unlink()
    with pytest.raises(BadInput, match=f"member_1/{HEAD_FILE}"):
        Committee.load(tmp_path, tiny.codec(), tiny.model_settings(), tiny.CPU)
