"""Parts of the stages, by hand: groups of answers, the reward model's judgement, spreads and choices."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
import torch

from rlhf import config
from rlhf.errors import StageFailed
from tasks.evaluate import _samples, select
from tasks.preferences import _pick, _spread
from tasks.reward_model import Group, _groups, _pair_indices, judge
from tasks.sft import _Best

# --- preferences ---


@pytest.mark.parametrize("count", [1, 5, 7, 10, 23])
def test_spread_uses_every_prompt_equally_often(count: int) -> None:
    keys = list("abcde")
    found = _spread(keys, count, seed=0)
    assert len(found) == count
    counts = Counter(found)
    assert max(counts.values()) - min(counts[key] for key in keys) <= 1
    assert found == _spread(keys, count, seed=0)


def test_spread_is_in_random_order() -> None:
    keys = [str(i) for i in range(30)]
    found = _spread(keys, 60, seed=0)
    assert sorted(found[:30]) == sorted(keys)
    assert found[:30] != keys
    assert found[:30] != found[30:]
    assert found != _spread(keys, 60, seed=1)


def test_pick_row_by_row() -> None:
    yes = pd.DataFrame({"response": ["a", "b"], "ended": [True, False], "gold": [1.0, 2.0]})
    no = pd.DataFrame({"response": ["c", "d"], "ended": [False, True], "gold": [3.0, 4.0]})
    found = _pick(yes, no, np.array([True, False]))
    assert found["response"].tolist() == ["a", "d"]
    assert found["ended"].tolist() == [True, True]
    assert found["gold"].tolist() == [1.0, 4.0]


# --- reward model ---


def pairs(*rows: tuple[str, str, str], **columns: Any) -> pd.DataFrame:
    """(group, chosen, rejected), where a `=` before the rejected is a tie and a `~` an answer cut off."""
    table = []
    for number, (group, chosen, rejected) in enumerate(rows):
        tie = rejected.startswith("=")
        rejected = rejected.lstrip("=")
        table.append(
            {
                "pair_id": str(number),
                "group_id": group,
                "prompt_id": f"prompt of {group}",
                "prompt": "?",
                "chosen": chosen.lstrip("~"),
                "rejected": rejected.lstrip("~"),
                "chosen_ended": not chosen.startswith("~"),
                "rejected_ended": not rejected.startswith("~"),
                "tie": tie,
                "heldout": True,
                "round": "r1",
                "labeler": "test",
                "gold_margin": math.nan,
            }
        )
    return pd.DataFrame(table).assign(**columns)


def test_an_answer_in_several_pairs_is_scored_once() -> None:
    found = _groups(
        pairs(("g", "a", "b"), ("h", "x", "y"), ("g", "c", "a"), ("g", "c", "b")), with_ties=False
    )
    a, b, c = ("a", True), ("b", True), ("c", True)
    assert found == [
        Group("prompt of g", [a, b, c], [(0, 1), (2, 0), (2, 1)], [False] * 3),
        Group("prompt of h", [("x", True), ("y", True)], [(0, 1)], [False]),
    ]


def test_the_same_text_cut_off_is_another_answer() -> None:
    (group,) = _groups(pairs(("g", "a", "~a"), ("g", "a", "b")), with_ties=False)
    assert group.answers == [("a", True), ("a", False), ("b", True)]
    assert group.pairs == [(0, 1), (0, 2)]


def test_a_tie_stands_in_both_orders_and_weighs_as_much_as_a_decision() -> None:
    (group,) = _groups(pairs(("g", "a", "b"), ("g", "a", "=c")), with_ties=False)
    assert group.pairs == [(0, 1), (0, 1), (0, 2), (2, 0)]


def test_for_a_loss_of_ties_a_tie_is_one_pair_that_says_so() -> None:
    table = pairs(("g", "a", "b"), ("g", "a", "=c"), ("g", "b", "=b"), ("h", "x", "=y"))
    first, second = _groups(table, with_ties=True)
    assert (first.pairs, first.tied) == ([(0, 1), (0, 2)], [False, True])
    assert (second.pairs, second.tied) == ([(0, 1)], [True])
    both, _ = _groups(table, with_ties=False)
    assert (both.pairs, both.tied) == ([(0, 1), (0, 1), (0, 2), (2, 0)], [False] * 4)


def test_ties_of_equal_answers_and_groups_of_nothing_else_are_left_out() -> None:
    found = _groups(pairs(("g", "a", "=a"), ("h", "a", "b"), ("h", "b", "=b")), with_ties=False)
    assert [(g.prompt_id, len(g.answers)) for g in found] == [("prompt of h", 2)]
    assert set(found[0].pairs) == {(0, 1)}


def test_duplicate_pairs_count_twice() -> None:
    (group,) = _groups(pairs(("g", "a", "b"), ("g", "a", "b")), with_ties=False)
    assert group.pairs == [(0, 1), (0, 1)]


def test_pair_indices_point_into_the_answers_of_all_groups() -> None:
    groups = _groups(
        pairs(("g", "a", "b"), ("g", "c", "a"), ("h", "x", "y"), ("i", "p", "q")), with_ties=False
    )
    flat = [answer for group in groups for answer, _ in group.answers]
    chosen, rejected = _pair_indices(groups)
    assert [flat[i] for i in chosen] == ["a", "c", "x", "p"]
    assert [flat[i] for i in rejected] == ["b", "a", "y", "q"]
    assert _pair_indices([]) == ([], [])


def judged(
    table: pd.DataFrame,
    chosen: list[list[float]],
    rejected: list[list[float]],
    scales: list[tuple[float, float]] | None = None,
) -> tuple[dict[str, float | None], pd.DataFrame]:
    return judge(
        table,
        torch.tensor(chosen),
        torch.tensor(rejected),
        scales or [(0.0, 1.0)] * len(chosen),
        tiny.codec(),
        "r1",
    )


def test_accuracy_and_calibration_by_hand() -> None:
    # Margins of the two members' mean: 1, -1, 2, 0 (a tie). Chosen comes first in the alphabet in
    # the first and the last pair only.
    table = pairs(("g", "w3", "w4"), ("h", "w6", "w5"), ("i", "w9", "w8"), ("j", "w3", "w5"))
    report, bins = judged(
        table, [[2.0, 0.0, 5.0, 1.0], [0.0, 0.0, 1.0, 3.0]], [[0.0, 1.0, 1.0, 2.0], [0.0, 1.0, 1.0, 2.0]]
    )  # fmt: skip
    assert report["heldout_pairs"] == 4
    assert report["accuracy"] == pytest.approx(2 / 3)  # the tie is neither right nor wrong
    assert report["ties"] == 0.25
    # Member 0: right, wrong, right, wrong. Member 1: tie, wrong, tie, right.
    assert report["member_accuracy_max"] == 0.5
    assert report["member_accuracy_min"] == 0.5
    # P(first in the alphabet): s(1) = .7311 happened; 1 - s(-1) = .7311 did not; 1 - s(2) = .1192
    # did not; s(0) = .5 happened. Bins: .7311 twice, half happened; .1192; .5.
    s = [1 / (1 + math.exp(-x)) for x in (1.0, 2.0)]
    expected = (2 * (s[0] - 0.5) + (1 - s[1]) + 0.5) / 4
    assert report["calibration_error"] == pytest.approx(expected, abs=1e-6)
    assert bins["count"].sum() == 4
    seen = bins[bins["count"] > 0]
    assert seen["mean_outcome"].tolist() == [0.0, 1.0, 0.5]
    assert seen["mean_prob"].tolist() == pytest.approx([1 - s[1], 0.5, s[0]], abs=1e-6)


def test_a_sure_and_right_committee_is_calibrated_and_a_sure_and_wrong_one_is_not() -> None:
    table = pairs(("g", "w3", "w4"), ("h", "w6", "w5"))
    right, _ = judged(table, [[30.0, 30.0]], [[-30.0, -30.0]])
    wrong, _ = judged(table, [[-30.0, -30.0]], [[30.0, 30.0]])
    assert (right["accuracy"], right["calibration_error"]) == (1.0, pytest.approx(0.0, abs=1e-6))
    assert (wrong["accuracy"], wrong["calibration_error"]) == (0.0, pytest.approx(1.0, abs=1e-6))


def test_the_interval_is_of_the_accuracy_it_stands_beside() -> None:
    """Many tied scores: they must not pull the interval below the accuracy."""
    rows = [(f"g{i}", "w3", "w4") for i in range(40)]
    scores = [1.0] * 9 + [-1.0] + [0.0] * 30
    report, _ = judged(pairs(*rows), [scores], [[0.0] * 40])
    assert report["accuracy"] == pytest.approx(0.9)
    assert report["accuracy_lower"] is not None
    assert report["accuracy_upper"] is not None
    assert report["accuracy_lower"] <= 0.9 <= report["accuracy_upper"] <= 1.0
    assert report["accuracy_lower"] > 0.4


def test_groups_of_one_prompt_are_one_cluster() -> None:
    rows = [(f"g{i}", "w3", "w4") for i in range(20)]
    scores = [1.0] * 10 + [-1.0] * 10
    alike = pairs(*rows, prompt_id=["p"] * 10 + ["q"] * 10)
    report, _ = judged(alike, [scores], [[0.0] * 20])
    assert (report["accuracy_lower"], report["accuracy_upper"]) == (0.0, 1.0)
    spread, _ = judged(pairs(*rows), [scores], [[0.0] * 20])
    assert spread["accuracy_lower"] > 0.1  # type: ignore[operator]


def test_one_prompt_has_no_interval() -> None:
    report, _ = judged(pairs(("g", "w3", "w4")), [[1.0]], [[0.0]])
    assert report["accuracy"] == 1.0
    assert (report["accuracy_lower"], report["accuracy_upper"]) == (None, None)


def test_only_decided_pairs_of_this_round_are_judged() -> None:
    table = pairs(
        ("g", "w3", "w4"), ("h", "w3", "w4"), ("i", "w3", "=w4"), ("j", "w3", "w4"), ("k", "w3", "=w4"),
        round=["r1", "r0", "r1", "r1", "r0"],
    )  # fmt: skip
    report, bins = judged(table, [[1.0, -9.0, -9.0, 1.0, -9.0]], [[0.0] * 5])
    assert report["heldout_pairs"] == 2
    assert report["accuracy"] == 1.0
    assert report["labelled_ties"] == 1
    assert bins["count"].sum() == 2


def test_agreement_with_gold_by_hand() -> None:
    # Gold margins of (chosen, rejected): the label is against gold in the second and third pair.
    table = pairs(
        *[(f"g{i}", "w3", "w4") for i in range(5)], gold_margin=[1.0, -1.0, -2.0, 0.0, 3.0]
    )
    report, _ = judged(table, [[1.0, 1.0, -1.0, 1.0, 0.0]], [[0.0] * 5])
    # Of the pairs that gold and score both order: right, wrong, right.
    assert report["gold_order_accuracy"] == pytest.approx(2 / 3)
    assert report["label_ceiling"] == pytest.approx(2 / 5)
    nothing, _ = judged(table.assign(gold_margin=0.0), [[1.0] * 5], [[0.0] * 5])
    assert nothing["gold_order_accuracy"] is None
    without, _ = judged(table.assign(gold_margin=math.nan), [[1.0] * 5], [[0.0] * 5])
    assert (without["gold_order_accuracy"], without["label_ceiling"]) == (None, None)


def test_slope_on_length_is_in_the_common_scale() -> None:
    # Tokens with the end token: 2 and 4. Raw scores 4 a token apart, deviation 2: slope 2.
    table = pairs(("g", "w3 w4 w5", "w3"), ("h", "w3 w4 w5", "w3"))
    report, _ = judged(table, [[13.0, 13.0]], [[5.0, 5.0]], [(1.0, 2.0)])
    assert report["length_slope_per_token"] == pytest.approx(2.0)
    assert report["length_correlation"] == pytest.approx(1.0)


# --- evaluate ---


def evaluations() -> pd.DataFrame:
    rows = []
    for step, (proxy, gold) in enumerate([(9.0, 9.0), (1.0, 3.0), (2.0, 5.0), (3.0, 4.0)]):
        name = "incoming" if step == 0 else f"step-{step:05d}"
        for split in ("choose", "report"):
            sign = 1 if split == "choose" else -1
            rows.append(
                {
                    "checkpoint": name,
                    "step": step,
                    "split": split,
                    "proxy_mean": sign * proxy,
                    "gold_mean": sign * gold,
                }
            )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("rule", "step"), [("last", 3), ("best_proxy", 3), ("best_gold", 2)])
def test_the_checkpoint_is_chosen_on_choose_prompts_and_is_never_the_incoming(
    rule: str, step: int
) -> None:
    table = evaluations()
    assert select(table, rule) == f"step-{step:05d}"
    assert (
        select(table.sample(frac=1, random_state=3).reset_index(drop=True), rule)
        == f"step-{step:05d}"
    )


def test_of_equal_checkpoints_the_earliest_is_chosen() -> None:
    assert select(evaluations().assign(proxy_mean=1.0), "best_proxy") == "step-00001"


def test_answers_per_prompt() -> None:
    settings = config.Evaluation(
        choose_samples_per_prompt=1, report_samples_per_prompt=2, final_samples_per_prompt=4,
        temperature=1.0, sampling_batch_size=8, select="last", num_bootstrap=100, num_shown=1, best_of_n_samples=4,
    )  # fmt: skip
    assert [_samples(settings, "choose", ends=e) for e in (False, True)] == [1, 1]
    assert [_samples(settings, "report", ends=e) for e in (False, True)] == [2, 4]


# --- fine-tuning ---


def test_the_best_weights_are_kept_and_patience_runs_out() -> None:
    model = torch.nn.Linear(1, 1)
    best = _Best(patience=2)
    for step, loss in enumerate([3.0, 2.0, 2.5]):
        with torch.no_grad():
            model.weight.fill_(float(step))
        best.offer(loss, step, model)
        assert not best.exhausted
    best.offer(2.0, 3, model)  # equal is not better
    assert best.exhausted
    assert (best.loss, best.step, best.latest) == (2.0, 1, 2.0)
    assert float(best.weights["weight"]) == 1.0  # a copy, not the model's later weights


def test_a_better_loss_renews_patience() -> None:
    model, best = torch.nn.Linear(1, 1), _Best(patience=2)
    for step, loss in enumerate([3.0, 4.0, 2.0, 4.0]):
        best.offer(loss, step, model)
    assert not best.exhausted


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite_stops(loss: float) -> None:
    with pytest.raises(StageFailed, match=r"held-out loss is (nan|inf) at update 7"):
        _Best(patience=2).offer(loss, 7, torch.nn.Linear(1, 1))
