"""The gate: rules, ranks, margins, ties, a person's word, and what a promoted policy says it is made from."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf import artifacts, champion, config, contracts, tracking
from rlhf.errors import BadInput
from tasks import promote
from tasks.promote import decide, failed_rules

ROOT = Path(__file__).parents[2]
GATE = config.Gate(
    metric="gold_mean",
    margin=0.0,
    tie_break=[config.TieBreak(metric="kl_nats", prefer="lower")],
    rules=[
        config.Rule(metric="win_rate_lower", at_least=0.5),
        config.Rule(metric="kl_nats", at_most=12.0),
    ],
    on_fail="keep",
)


def gate(**changes: Any) -> config.Gate:
    return GATE.model_copy(update=changes)


def row(candidate: str, score: float | None, **numbers: Any) -> dict[str, Any]:
    """A candidate's row, with the rules applied to its numbers."""
    values = dict.fromkeys(config.METRICS, 1.0) | {"win_rate_lower": 0.6, "kl_nats": 5.0} | numbers
    failed = failed_rules(GATE, values)
    if score is None:
        failed.append("gold_mean on choose prompts is not known")
    return {
        "candidate": candidate,
        "rank_score": score,
        **values,
        "passes": not failed,
        "failed_rules": failed,
    }


def promoted(*rows: dict[str, Any], by: config.Gate = GATE) -> str | None:
    return decide(by, list(rows), "r0")["promoted"]


def word(choice: str, candidate: str | None = None) -> config.Decision:
    return config.Decision(
        choice=choice,  # type: ignore[arg-type]
        candidate=candidate,
        because="I read the answers",
        by="Ada",
        at="2026-01-02T03:04:05+00:00",
    )


# --- rules ---


def test_bounds_are_kept_from_both_sides_and_reached_by_equality() -> None:
    assert failed_rules(GATE, {"win_rate_lower": 0.5, "kl_nats": 12.0}) == []
    assert failed_rules(GATE, {"win_rate_lower": 0.4, "kl_nats": 13.5}) == [
        "win_rate_lower 0.4 < 0.5",
        "kl_nats 13.5 > 12",
    ]


def test_a_near_miss_reads_as_a_miss() -> None:
    assert failed_rules(GATE, {"win_rate_lower": 0.49996, "kl_nats": 12.0004}) == [
        "win_rate_lower 0.49996 < 0.5",
        "kl_nats 12.0004 > 12",
    ]


@pytest.mark.parametrize("missing", [None, math.nan, np.float64("nan"), math.inf, -math.inf])
def test_a_missing_value_breaks_its_rule_and_no_other(missing: Any) -> None:
    assert failed_rules(GATE, {"win_rate_lower": missing, "kl_nats": 1.0}) == [
        "win_rate_lower is not known"
    ]


def test_a_column_that_the_evaluation_lacks_breaks_its_rule() -> None:
    assert failed_rules(GATE, {"kl_nats": 1.0}) == ["win_rate_lower is not known"]


def test_one_alarm_is_too_many_where_none_is_allowed() -> None:
    no_alarm = gate(rules=[config.Rule(metric="alarms", at_most=0.0)])
    assert failed_rules(no_alarm, {"alarms": 0.0}) == []
    assert failed_rules(no_alarm, {"alarms": 1.0}) == ["alarms 1 > 0"]


def test_zero_is_a_value() -> None:
    both = gate(
        rules=[
            config.Rule(metric="gold_mean", at_least=0.0),
            config.Rule(metric="kl_nats", at_most=0.0),
        ]
    )
    assert failed_rules(both, {"gold_mean": 0.0, "kl_nats": 0.0}) == []
    assert failed_rules(both, {"gold_mean": -0.1, "kl_nats": 0.1}) == [
        "gold_mean -0.1 < 0",
        "kl_nats 0.1 > 0",
    ]


def test_no_rules_pass_everything() -> None:
    assert failed_rules(gate(rules=[]), {}) == []


# --- ranking ---


def test_the_highest_rank_that_passes_is_promoted() -> None:
    assert promoted(row("a", 1.0), row("b", 3.0), row("c", 2.0)) == "b"
    # The best of all breaks a rule.
    assert promoted(row("a", 1.0), row("b", 3.0, kl_nats=20.0), row("c", 2.0)) == "c"
    assert promoted(row("a", -3.0), row("b", -2.0)) == "b"


def test_rank_and_rules_are_read_apart() -> None:
    """The rank comes from choose prompts: the report's own gold does not matter."""
    assert promoted(row("a", 1.0, gold_mean=99.0), row("b", 2.0, gold_mean=0.0)) == "b"


def test_equal_ranks_go_to_the_tie_break_then_to_the_first() -> None:
    assert promoted(row("a", 2.0, kl_nats=3.0), row("b", 2.0, kl_nats=2.0)) == "b"
    assert promoted(row("b", 2.0, kl_nats=2.0), row("a", 2.0, kl_nats=3.0)) == "b"
    decision = decide(GATE, [row("a", 2.0), row("b", 2.0)], "r0")
    assert decision["promoted"] == "a"
    assert decision["reason"] == (
        "equal by gold_mean on choose prompts: a 2.000, b 2.000; a and b stay equal in kl_nats; "
        "a is declared first"
    )


def test_within_the_margin_the_tie_break_decides() -> None:
    rows = [row("a", 2.0, kl_nats=6.0), row("b", 1.9, kl_nats=3.0), row("c", 1.89, kl_nats=1.0)]
    assert promoted(*rows) == "a"
    near = decide(gate(margin=0.1), rows, "r0")  # 2.0 - 1.9 in binary is over 0.1
    assert near["promoted"] == "b"
    assert near["reason"] == (
        "within 0.1 of the best by gold_mean on choose prompts: a 2.000, b 1.900; "
        "b by the lower kl_nats (3)"
    )
    assert promoted(*rows, by=gate(margin=0.11)) == "c"


def test_the_margin_is_measured_from_the_best_and_not_from_neighbour_to_neighbour() -> None:
    rows = [row("a", 2.0, kl_nats=6.0), row("b", 1.95, kl_nats=5.0), row("c", 1.9, kl_nats=1.0)]
    assert promoted(*rows, by=gate(margin=0.05)) == "b"


def test_a_later_tie_break_decides_only_what_earlier_ones_left() -> None:
    breaks = [
        config.TieBreak(metric="win_rate", prefer="higher"),
        config.TieBreak(metric="length_ratio", prefer="lower"),
    ]
    rows = [
        row("a", 1.0, win_rate=0.7, length_ratio=1.3),
        row("b", 1.0, win_rate=0.7, length_ratio=1.1),
        row("c", 1.0, win_rate=0.6, length_ratio=0.9),
    ]
    decision = decide(gate(tie_break=breaks), rows, "r0")
    assert decision["promoted"] == "b"
    assert decision["reason"].endswith(
        "a and b by the higher win_rate (0.7); b by the lower length_ratio (1.1)"
    )


def test_in_a_tie_what_is_not_known_comes_last() -> None:
    assert promoted(row("a", 1.0, length_ratio=None), row("b", 1.0, length_ratio=9.0),
                    by=gate(tie_break=[config.TieBreak(metric="length_ratio", prefer="lower")])) == "b"  # fmt: skip
    nobody = gate(tie_break=[config.TieBreak(metric="length_ratio", prefer="lower")])
    assert (
        promoted(row("a", 1.0, length_ratio=None), row("b", 1.0, length_ratio=math.nan), by=nobody)
        == "a"
    )


def test_a_tie_break_never_reaches_past_the_margin_or_a_rule() -> None:
    rows = [
        row("a", 2.0, kl_nats=6.0),
        row("b", 1.0, kl_nats=0.1),
        row("c", 2.0, kl_nats=0.1, win_rate_lower=0.1),
    ]
    assert promoted(*rows) == "a"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 1.0]),
            st.sampled_from([1.0, 2.0, 20.0]),
            st.sampled_from([0.4, 0.6]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([0.0, 0.5, 2.0]),
)
def test_the_winner_is_the_smallest_of_an_order_by_definition(
    numbers: list[tuple[float, float, float]], margin: float
) -> None:
    rows = [
        row(f"c{i}", rank, kl_nats=kl, win_rate_lower=low)
        for i, (rank, kl, low) in enumerate(numbers)
    ]
    legal = [(r, kl, i) for i, (r, kl, low) in enumerate(numbers) if kl <= 12 and low >= 0.5]
    best = max((r for r, _, _ in legal), default=0.0)
    near = [(kl, i) for r, kl, i in legal if best - r <= margin]
    expected = f"c{min(near)[1]}" if near else None
    assert promoted(*rows, by=gate(margin=margin)) == expected


# --- nobody passes ---


@pytest.mark.parametrize(
    ("on_fail", "status", "words"),
    [
        ("keep", "kept", "the policy of r7 stays ("),
        ("stop", "stopped", "the policy of r7 stays, and no further round starts ("),
        ("ask", "awaiting", "the policy of r7 stays until a person decides ("),
    ],
)
def test_nobody_passes_and_every_reason_is_told(on_fail: str, status: str, words: str) -> None:
    rows = [row("a", 5.0, kl_nats=13.0), row("b", 6.0, win_rate_lower=None)]
    decision = decide(gate(on_fail=on_fail), rows, "r7")
    assert (decision["status"], decision["promoted"]) == (status, None)
    assert words in decision["reason"]
    assert "a: kl_nats 13 > 12" in decision["reason"]
    assert "b: win_rate_lower is not known" in decision["reason"]
    assert decision["candidates"] == rows
    assert decision["gate"] == gate(on_fail=on_fail).model_dump()
    assert decision["leader"] == "b"


@pytest.mark.parametrize("on_fail", ["keep", "stop", "ask"])
def test_what_happens_on_failure_does_not_matter_when_one_passes(on_fail: str) -> None:
    decision = decide(gate(on_fail=on_fail), [row("a", 1.0)], "r0")
    assert (decision["status"], decision["promoted"]) == ("promoted", "a")
    assert decision["reason"] == "a is the only candidate that passes every rule"


def test_there_is_no_leader_where_only_the_order_of_the_file_would_tell() -> None:
    high = {"kl_nats": 13.0}
    assert decide(GATE, [row("a", 1.0, **high), row("b", 1.0, **high)], "r0")["leader"] is None
    assert decide(GATE, [row("a", None), row("b", None)], "r0")["leader"] is None
    assert decide(GATE, [row("a", None), row("b", 1.0, **high)], "r0")["leader"] == "b"
    # Whom the gate promotes goes before a better one that breaks a rule.
    assert decide(GATE, [row("a", 1.0), row("b", 2.0, **high)], "r0")["leader"] == "a"


def test_a_candidate_of_unknown_rank_is_not_promoted() -> None:
    assert promoted(row("a", None), row("b", 1.0)) == "b"


def test_the_reason_counts_those_that_pass() -> None:
    decision = decide(GATE, [row("a", 1.5), row("b", 2.25), row("c", 9.0, kl_nats=99.0)], "r0")
    assert "b has the highest gold_mean" in decision["reason"]
    assert "(2.250) of 2 candidates" in decision["reason"]


# --- a person's word ---


def test_a_person_promotes_what_the_gate_did_not() -> None:
    rows = [row("a", 1.0), row("b", 3.0, kl_nats=20.0)]
    decision = decide(GATE, rows, "r0", word("promote", "b"))
    assert (decision["status"], decision["promoted"]) == ("promoted", "b")
    assert decision["reason"] == (
        "decided by Ada, overruling kl_nats 20 > 12 (the gate would promote a): I read the answers"
    )
    assert decision["verdict"] == {
        "status": "promoted",
        "promoted": "a",
        "reason": "a is the only candidate that passes every rule",
    }
    assert decision["decision"] == word("promote", "b").model_dump()


@pytest.mark.parametrize(
    ("choice", "status", "words"),
    [
        ("keep", "kept", "decided by Ada, the policy of r2 stays (the gate would promote a)"),
        (
            "stop",
            "stopped",
            "decided by Ada, the policy of r2 stays, and no further round starts (the gate would promote a)",
        ),
    ],
)
def test_a_person_keeps_or_stops(choice: str, status: str, words: str) -> None:
    decision = decide(GATE, [row("a", 1.0)], "r2", word(choice))
    assert (decision["status"], decision["promoted"]) == (status, None)
    assert decision["reason"] == f"{words}: I read the answers"
    assert decision["verdict"]["promoted"] == "a"


def test_a_person_who_agrees_is_named_all_the_same() -> None:
    decision = decide(GATE, [row("a", 1.0)], "r0", word("promote", "a"))
    assert decision["reason"] == "decided by Ada: I read the answers"
    assert champion.whose_word(decision) == ("Ada", "I read the answers", word("keep").at)


def test_an_answer_ends_the_waiting_and_the_verdict_says_that_it_was_asked() -> None:
    rows = [row("a", 1.0, kl_nats=13.0)]
    decision = decide(gate(on_fail="ask"), rows, "r0", word("keep"))
    assert decision["status"] == "kept"
    assert decision["verdict"]["status"] == "awaiting"
    assert "(the gate asked)" in decision["reason"]


def test_a_person_cannot_promote_what_was_not_judged() -> None:
    with pytest.raises(BadInput, match=r"z has no evaluation(?s:.*)use one of a"):
        decide(GATE, [row("a", 1.0)], "r0", word("promote", "z"))


# --- the stage ---


def evaluation(path: Path, gold: float, **numbers: float) -> None:
    """A candidate's evaluation: the incoming policy and one checkpoint, the same on either prompt set."""
    values: dict[str, Any] = {
        "num_prompts": 4, "num_samples": 4, "proxy_mean": 1.0, "proxy_se": 0.1,
        "proxy_std_members": 0.1, "gold_mean": gold, "gold_se": 0.1, "kl_nats": 2.0, "kl_se": 0.1,
        "length_mean": 9.0, "length_ratio": 1.0, "entropy_nats": 1.0, "ended_fraction": 1.0,
        "win_rate": 0.7, "win_rate_lower": 0.6, "win_rate_upper": 0.8, "judge": "gold",
        "win_rate_initial": 0.7, "win_rate_initial_lower": 0.6, "win_rate_initial_upper": 0.8,
        "alarms": 0.0,
    }  # fmt: skip
    known = {*contracts.EVALUATIONS.columns}
    rows = [
        {
            "checkpoint": name,
            "step": step,
            "split": split,
            **values,
            **numbers,
            "selected": step > 0,
        }
        for (name, step), split in itertools.product(
            (("incoming", 0), ("step-00002", 2)), ("choose", "report")
        )
    ]
    table = pd.DataFrame(rows)
    path.mkdir(parents=True)
    table = table[[name for name in table.columns if name in known]]
    dtypes = {n: c.dtype.type for n, c in contracts.EVALUATIONS.columns.items() if n in table}
    table = table.astype({n: t for n, t in dtypes.items() if t is not None and n == "alarms"})
    contracts.write(table, path / "evaluations.parquet", contracts.EVALUATIONS)
    (path / "over_optimisation.png").write_bytes(b"png")


def directory(path: Path, content: str) -> None:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text(content)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> config.Pipeline:
    """A round in which ppo and dpo were judged; MLflow is not spoken to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "forward", lambda folder=".": True)
    pipeline = config.load(ROOT / "pipeline.yaml")
    names = ("r1-ppo", "r1-dpo")
    candidates = {key: pipeline.candidates[key] for key in names}
    pipeline = pipeline.model_copy(update={"candidates": candidates})
    directory(Path("runs/r0/promoted"), "start")
    directory(Path("runs/r1/reward_model/member_0"), "scores")
    Path("data/tables").mkdir(parents=True)
    prompt = "write a review"
    book = {
        "prompt_id": [contracts.prompt_id(prompt)],
        "prompt": [prompt],
        "messages": [None],
        "split": ["report"],
    }
    contracts.write(pd.DataFrame(book), "data/tables/prompts.parquet", contracts.PROMPTS)
    for key, gold in zip(names, (1.0, 2.0), strict=True):
        policy = Path("runs/r1/policies") / key
        directory(policy / "step-00002", key)
        artifacts.write_json(policy / "candidate.json", candidates[key].model_dump(by_alias=True))
        evaluation(Path("runs/r1/evaluations") / key, gold)
    return pipeline


def with_round(pipeline: config.Pipeline, **changes: Any) -> config.Pipeline:
    rounds = {"r1": pipeline.rounds["r1"].model_copy(update=changes)}
    return pipeline.model_copy(update={"rounds": rounds})


def with_word(pipeline: config.Pipeline, decision: config.Decision | None) -> config.Pipeline:
    return with_round(pipeline, decision=decision)


def lineage() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("runs/r1/promoted/lineage.json").read_text())
    return found


def test_the_stage_promotes_with_a_lineage(project: config.Pipeline) -> None:
    promote.run(project, "r1")
    assert Path("runs/r1/promoted/model.safetensors").read_text() == "r1-dpo"
    decision = champion.read_decision(".", "r1")
    assert decision is not None
    assert (decision["status"], decision["promoted"]) == ("promoted", "r1-dpo")
    found = lineage()
    assert (found["round"], found["candidate"], found["checkpoint"]) == (
        "r1",
        "r1-dpo",
        "step-00002",
    )
    assert found["learns_from"] == "r1/preferences"
    assert found["weights"] == champion.policy_digest("runs/r1/policies/r1-dpo/step-00002")
    assert found["weights"] == champion.policy_digest("runs/r1/promoted")
    assert found["parent"] == {
        "round": "r0",
        "candidate": None,
        "weights": champion.policy_digest("runs/r0/promoted"),
    }
    assert set(found["reward_model"]) == {"member_0"}
    assert set(found["data"]) == {"prompts.parquet"}


def test_the_lineage_follows_from_what_made_the_policy_and_from_nothing_else(
    project: config.Pipeline,
) -> None:
    promote.run(project, "r1")
    first = Path("runs/r1/promoted/lineage.json").read_bytes()
    promote.run(with_word(project, word("promote", "r1-dpo")), "r1")
    assert Path("runs/r1/promoted/lineage.json").read_bytes() == first
    promote.run(with_round(project, gate=gate(rules=[], margin=0.01)), "r1")
    assert Path("runs/r1/promoted/lineage.json").read_bytes() == first
    before = lineage()
    for change in ({"seed": 99}, {"model": project.model.model_copy(update={"revision": "x"})}):
        promote.run(project.model_copy(update=change), "r1")
        (key,) = change
        assert [k for k, v in lineage()["config"].items() if v != before["config"][k]] == [key]
    (Path("runs/r1/reward_model/member_0") / "model.safetensors").write_text("other scores")
    promote.run(project, "r1")
    assert [k for k, v in lineage().items() if v != before[k]] == ["reward_model"]


def test_a_policy_that_is_kept_keeps_its_own_lineage(project: config.Pipeline) -> None:
    promote.run(with_word(project, word("keep")), "r1")
    assert not Path("runs/r1/promoted/lineage.json").exists()  # r0's own has none
    artifacts.write_json("runs/r0/promoted/lineage.json", {"round": "r0_x", "candidate": "r0_x-a"})
    promote.run(with_word(project, word("keep")), "r1")
    assert lineage() == {"round": "r0_x", "candidate": "r0_x-a"}
    promote.run(project, "r1")  # now it is the parent
    assert lineage()["parent"]["candidate"] == "r0_x-a"
    assert lineage()["parent"]["weights"] == champion.policy_digest("runs/r0/promoted")


def test_the_parent_of_a_round_that_starts_from_r0_is_r0(project: config.Pipeline) -> None:
    """`init: initial`, though the policy to beat is another round's."""
    directory(Path("runs/r2_x/promoted"), "another")
    artifacts.write_json("runs/r0/metrics/sft.json", {"weights_sha256": "a hash"})
    settings = project.rounds["r1"].model_copy(update={"from_": "r2_x", "init": "initial"})
    promote.run(project.model_copy(update={"rounds": {"r1": settings}}), "r1")
    assert lineage()["parent"] == {"round": "r0", "candidate": None, "weights": "a hash"}
    settings = settings.model_copy(update={"init": "previous"})
    promote.run(project.model_copy(update={"rounds": {"r1": settings}}), "r1")
    assert lineage()["parent"]["weights"] == champion.policy_digest("runs/r2_x/promoted")


def test_a_start_that_does_not_name_its_weights_is_made_again(project: config.Pipeline) -> None:
    artifacts.write_json("runs/r0/metrics/sft.json", {"heldout_loss_nats": 1.0})
    settings = project.rounds["r1"].model_copy(update={"init": "initial"})
    with pytest.raises(BadInput, match="dvc repro --force sft"):
        promote.run(project.model_copy(update={"rounds": {"r1": settings}}), "r1")


def test_awaiting_writes_the_incoming_policy(project: config.Pipeline) -> None:
    strict = gate(rules=[config.Rule(metric="kl_nats", at_most=1.0)], on_fail="ask")
    promote.run(with_round(project, gate=strict), "r1")
    assert champion.status(".", "r1") == "awaiting"
    assert Path("runs/r1/promoted/model.safetensors").read_text() == "start"


def test_what_training_warned_of_is_told(project: config.Pipeline) -> None:
    alarm = {"name": "chosen_fell", "value": -2.0, "message": "the chosen answers lost 2 nats"}
    artifacts.write_json("runs/r1/policies/r1-dpo/alarms.json", [alarm])
    promote.run(project, "r1")
    decision = champion.read_decision(".", "r1")
    assert decision is not None
    ppo, dpo = decision["candidates"]
    assert (ppo["warnings"], dpo["warnings"]) == ([], ["the chosen answers lost 2 nats"])


def test_no_candidate_has_an_evaluation(project: config.Pipeline) -> None:
    for key in project.candidates:
        (Path("runs/r1/evaluations") / key / "evaluations.parquet").unlink()
    with pytest.raises(BadInput, match="no candidate of r1 has an evaluation: r1-ppo, r1-dpo"):
        promote.run(project, "r1")
    assert not Path("runs/r1/promoted").exists()


def test_one_candidate_without_an_evaluation_is_named(project: config.Pipeline) -> None:
    (Path("runs/r1/evaluations/r1-dpo/evaluations.parquet")).unlink()
    with pytest.raises(BadInput, match=r"dvc repro evaluate@r1-dpo"):
        promote.run(project, "r1")
