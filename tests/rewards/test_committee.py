"""The committee: scores of each answer by definition, scaled, aggregated, in the order given."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from rlhf import artifacts, config
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


def part(kind: str, **options: float) -> config.Part:
    return tiny.rl_candidate(aggregate={"kind": kind, **options}).aggregate


def test_aggregates_by_hand() -> None:
    scores = by_definition()
    variance = ((scores - scores.mean(0)) ** 2).sum(0) / 3
    for aggregate, expected in (
        (part("mean"), scores.mean(0)),
        (part("min"), scores.min(0).values),
        (part("mean_minus_variance"), scores.mean(0) - 0.5 * variance),
        (part("mean_minus_variance", variance_coef=0.125), scores.mean(0) - 0.125 * variance),
        (part("mean_minus_variance", variance_coef=0.0), scores.mean(0)),
    ):
        found = committee().scorer(aggregate)(PROMPTS, ANSWERS, ENDED)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)


# --- the members' mean weights ---


@torch.no_grad()
def test_weight_average_is_the_model_of_the_mean_rescaled_weights() -> None:
    """Heads are put on their own scales first: (w h + b - mean) / std is a head, too."""
    models = [member(i) for i in range(3)]
    for model, bias in zip(models, (0.5, -0.25, 2.0), strict=True):
        model.head.bias.fill_(bias)
    backbone = tiny.llama(9).base_model.eval()
    for name, value in backbone.named_parameters():
        value.copy_(sum(dict(m.backbone.named_parameters())[name] for m in models) / 3)
    scaled = list(zip(models, SCALES, strict=True))
    weight = sum(m.head.weight[0] / std for m, (_, std) in scaled) / 3
    bias = sum((m.head.bias[0] - mean) / std for m, (mean, std) in scaled) / 3
    expected = []
    for prompt, text, ended in zip(PROMPTS, ANSWERS, ENDED, strict=True):
        ids = prompt + [int(word[1:]) for word in text.split()] + [tiny.EOS] * ended
        hidden = backbone(torch.tensor([ids])).last_hidden_state[0, -1]
        expected.append(hidden @ weight + bias)
    whole = Committee(models, SCALES, tiny.codec(), tiny.model_settings())
    found = whole.scorer(part("weight_average"))(PROMPTS, ANSWERS, ENDED)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=1e-4)
    plain = whole.scorer(part("mean"))(PROMPTS, ANSWERS, ENDED)
    assert not torch.allclose(found, plain, atol=1e-2)


def test_the_mean_of_identical_members_is_the_member() -> None:
    twins = Committee([member(1)] * 2, [SCALES[1]] * 2, tiny.codec(), tiny.model_settings())
    alone = Committee([member(1)], [SCALES[1]], tiny.codec(), tiny.model_settings())
    found = twins.scorer(part("weight_average"))(PROMPTS, ANSWERS, ENDED)
    expected = alone.member_scores(PROMPTS, ANSWERS, ENDED)[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_averaging_leaves_the_members_as_they_were() -> None:
    whole = committee()
    before = whole.member_scores(PROMPTS, ANSWERS, ENDED)
    whole.scorer(part("weight_average"))(PROMPTS, ANSWERS, ENDED)
    assert torch.equal(whole.member_scores(PROMPTS, ANSWERS, ENDED), before)
    assert whole.scales == SCALES


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
