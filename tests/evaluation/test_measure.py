"""What is measured answer by answer, and the row that sums it up, by hand."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from transformers import PreTrainedModel

from rlhf import config, contracts
from rlhf.data.book import PromptBook
from rlhf.errors import BadInput
from rlhf.evaluation.measure import Judges, measure, standard_error, summarise
from rlhf.models.scalar import ScalarModel
from rlhf.progress import Clock
from rlhf.rewards.committee import Committee
from rlhf.rewards.gold import Gold

TEXTS = ["w5", "w6 w7", "w8 w9 w10", "w11 w3", "w12"]


def gold_program() -> types.ModuleType:
    """Counts w7, and the words of prompt and answer together."""
    module = types.ModuleType("a_gold")

    def score(prompts: list[str], responses: list[str], ended: list[bool]) -> pd.DataFrame:
        wanted = [float(r.split().count("w7")) for r in responses]
        words = [float(len(f"{p} {r}".split())) for p, r in zip(prompts, responses, strict=True)]
        total = [a + 0.1 * b for a, b in zip(wanted, words, strict=True)]
        return pd.DataFrame({"total": total, "wanted": wanted, "words": words})

    module.score = score  # type: ignore[attr-defined]
    return module


@pytest.fixture
def book(tmp_path: Path) -> PromptBook:
    table = pd.DataFrame(
        {
            "prompt_id": [contracts.prompt_id(text) for text in TEXTS],
            "prompt": TEXTS,
            "messages": None,
            "split": ["report"] * len(TEXTS),
        }
    )
    contracts.write(table, tmp_path / "prompts.parquet", contracts.PROMPTS)
    return PromptBook(tmp_path / "prompts.parquet", tiny.codec())


def judges(*, gold: bool = True) -> Judges:
    members = []
    for seed in (3, 4):
        member = ScalarModel(tiny.llama(seed).base_model).eval()
        torch.nn.init.normal_(member.head.weight)
        members.append(member)
    committee = Committee(members, [(0.5, 2.0), (0.0, 1.0)], tiny.codec(), tiny.model_settings())
    return Judges(committee, Gold("a_gold", gold_program()) if gold else None)


def evaluation(**changes: Any) -> config.Evaluation:
    values: dict[str, Any] = {
        "choose_samples_per_prompt": 2,
        "report_samples_per_prompt": 2,
        "final_samples_per_prompt": 4,
        "temperature": 1.0,
        "sampling_batch_size": 7,
        "select": "last",
        "best_of_n_samples": 4,
        "num_bootstrap": 200,
        "num_shown": 2,
    }
    return config.Evaluation(**(values | changes))


def measured(
    book: PromptBook,
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    samples: int = 3,
    *,
    judge: Judges | None = None,
    **changes: Any,
) -> pd.DataFrame:
    return measure(
        policy,
        reference,
        book.of("report"),
        samples,
        book=book,
        judges=judge or judges(),
        model=tiny.model_settings(),
        evaluation=evaluation(**changes),
        seed=0,
        clock=Clock("test"),
    )


def summary(
    answers: pd.DataFrame, baseline: pd.DataFrame, judge: str = "gold:a_gold"
) -> dict[str, Any]:
    return summarise(answers, baseline, judge=judge, num_bootstrap=200, seed=0)


def test_a_policy_against_itself_is_all_ties(book: PromptBook) -> None:
    policy = tiny.llama()
    answers, baseline = measured(book, policy, policy), measured(book, tiny.llama(), policy)
    assert answers.equals(baseline)
    row = summary(answers, baseline)
    assert (row["win_rate"], row["win_rate_lower"], row["win_rate_upper"]) == (0.5, 0.5, 0.5)
    assert (row["kl_nats"], row["kl_se"]) == (0, 0)
    assert row["length_ratio"] == 1
    assert summary(answers, baseline, "proxy")["win_rate"] == 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kl_and_entropy_by_definition_at_the_sampling_temperature(
    book: PromptBook, temperature: float
) -> None:
    policy, reference = tiny.llama(0), tiny.llama(1)
    answers = measured(book, policy, reference, temperature=temperature)
    assert (answers["kl"] >= 0).all()
    for row in answers.itertuples():
        prompt, ids = book.tokens(row.prompt_id), []
        ids = [int(word[1:]) for word in row.response.split()] + [tiny.EOS] * row.ended
        if len(ids) != row.num_tokens:
            continue  # a special token was sampled, which the text does not show
        tokens = torch.tensor([prompt + ids])
        with torch.no_grad():
            p, q = (
                (m(tokens).logits[0, len(prompt) - 1 : -1].double() / temperature).softmax(-1)
                for m in (policy, reference)
            )
        assert row.kl == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-3)
        assert row.entropy == pytest.approx(float(-(p * p.log()).sum(-1).mean()), abs=1e-4)


def test_answers_stand_by_prompt_and_every_score_is_of_its_own_answer(book: PromptBook) -> None:
    judge = judges()
    answers = measured(book, tiny.llama(0), tiny.llama(1), judge=judge)
    assert answers["prompt_id"].tolist() == [key for key in book.of("report") for _ in range(3)]
    for row in answers.itertuples():
        scores = judge.committee.member_scores(
            [book.tokens(row.prompt_id)], [row.response], [row.ended]
        )[:, 0]
        assert row.proxy == pytest.approx(float(scores.mean()), abs=1e-4)
        assert row.proxy_std == pytest.approx(float((scores[0] - scores[1]).abs() / 2), abs=1e-4)
        words = len(f"{book.text(row.prompt_id)} {row.response}".split())
        wanted = row.response.split().count("w7")
        assert row.gold == pytest.approx(wanted + 0.1 * words)
    assert answers["gold/words"].notna().all()


def table(**columns: Any) -> pd.DataFrame:
    """Two prompts of two answers each."""
    values: dict[str, Any] = {
        "prompt_id": ["a", "a", "b", "b"],
        "ended": [True, True, True, False],
        "num_tokens": [2, 4, 6, 8],
        "proxy": [1.0, 2.0, 3.0, 6.0],
        "proxy_std": [0.1, 0.2, 0.3, 0.4],
        "gold": [0.0, 1.0, 5.0, 4.0],
        "kl": [0.5, 1.5, 2.0, 4.0],
        "entropy": [1.0, 1.0, 2.0, 2.0],
        "gold/wanted": [1.0, 0.0, 2.0, 3.0],
    }
    return pd.DataFrame(values | columns)


def test_the_row_by_hand() -> None:
    baseline = table(num_tokens=[1, 1, 1, 1], gold=[0.0, 2.0, 1.0, 4.5])
    row = summary(table(), baseline)
    assert (row["num_prompts"], row["num_samples"]) == (2, 4)
    assert row["proxy_mean"] == 3.0
    # Prompt means 1.5 and 4.5: deviation 2.1213 over the root of 2.
    assert row["proxy_se"] == pytest.approx(1.5)
    assert row["proxy_std_members"] == pytest.approx(0.25)
    assert row["gold_mean"] == 2.5
    assert row["gold_se"] == pytest.approx(2.0)
    assert row["kl_nats"] == 2.0
    assert row["kl_se"] == pytest.approx(1.0)
    assert (row["length_mean"], row["length_ratio"]) == (5.0, 5.0)
    assert row["entropy_nats"] == 1.5
    assert row["ended_fraction"] == 0.75
    assert row["gold/wanted"] == 1.5
    # a: 0 and 1 against 0 and 2: tie, loss, win, loss: 1.5 of 4. b: 5 and 4 against 1 and 4.5:
    # win, win, win, loss: 3 of 4.
    assert row["win_rate"] == pytest.approx((1.5 / 4 + 3 / 4) / 2)
    assert row["win_rate_lower"] <= row["win_rate"] <= row["win_rate_upper"]


def test_without_gold_the_proxy_decides() -> None:
    nothing = {"gold": np.nan}
    without = table(**nothing).drop(columns="gold/wanted")
    baseline = without.assign(proxy=[0.0, 0.0, 9.0, 9.0])
    row = summary(without, baseline, "proxy")
    assert (row["gold_mean"], row["gold_se"]) == (None, None)
    assert row["win_rate"] == 0.5  # a is won, b is lost
    assert row["judge"] == "proxy"


def test_names_of_judges() -> None:
    assert judges().name == "gold:a_gold"
    assert judges(gold=False).name == "proxy"


def test_standard_error_is_over_prompts() -> None:
    # One prompt answered a thousand times is one prompt.
    many = pd.DataFrame(
        {"prompt_id": ["a"] * 1000 + ["b"] * 1000, "x": [0.0] * 1000 + [1.0] * 1000}
    )
    assert standard_error(many, "x") == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert standard_error(many[:1000], "x") is None


def test_another_order_of_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="different prompts"):
        summary(table(), table(prompt_id=["b", "b", "a", "a"]))


def test_one_prompt_is_refused_in_words() -> None:
    one = table(prompt_id=["a"] * 4)
    with pytest.raises(BadInput, match="only one prompt"):
        summary(one, one)
