"""The gate: rules, ranks, ties, and nothing promoted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlhf import config
from tasks.promote import decide, failed_rules

GATE = config.Gate(
    metric="gold_mean",
    rules=[
        config.Rule(metric="win_rate_lower", at_least=0.5),
        config.Rule(metric="kl_nats", at_most=12.0),
    ],
)


def row(candidate: str, rank: float | None, **numbers: Any) -> dict[str, Any]:
    """A candidate's row, with the rules applied to its numbers."""
    values = dict.fromkeys(config.METRICS, 1.0) | {"win_rate_lower": 0.6, "kl_nats": 5.0} | numbers
    failed = failed_rules(GATE, values)
    return {
        "candidate": candidate,
        "rank_score": rank,
        **values,
        "passes": not failed,
        "failed_rules": failed,
    }


def promoted(*rows: dict[str, Any]) -> str | None:
    return decide(GATE, list(rows), "r0")["promoted"]


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


@pytest.mark.parametrize("missing", [None, math.nan, np.float64("nan")])
def test_a_missing_value_breaks_its_rule_and_no_other(missing: Any) -> None:
    assert failed_rules(GATE, {"win_rate_lower": missing, "kl_nats": 1.0}) == [
        "win_rate_lower is not known"
    ]


def test_zero_is_a_value() -> None:
    gate = config.Gate(
        metric="win_rate",
        rules=[
            config.Rule(metric="gold_mean", at_least=0.0),
            config.Rule(metric="kl_nats", at_most=0.0),
        ],
    )
    assert failed_rules(gate, {"gold_mean": 0.0, "kl_nats": 0.0}) == []
    assert failed_rules(gate, {"gold_mean": -0.1, "kl_nats": 0.1}) == [
        "gold_mean -0.1 < 0",
        "kl_nats 0.1 > 0",
    ]


def test_no_rules_pass_everything() -> None:
    assert failed_rules(config.Gate(metric="win_rate", rules=[]), {}) == []


def test_the_highest_rank_that_passes_is_promoted() -> None:
    assert promoted(row("a", 1.0), row("b", 3.0), row("c", 2.0)) == "b"
    # The best of all breaks a rule.
    assert promoted(row("a", 1.0), row("b", 3.0, kl_nats=20.0), row("c", 2.0)) == "c"
    assert promoted(row("a", -3.0), row("b", -2.0)) == "b"


def test_rank_and_rules_are_read_apart() -> None:
    """The rank comes from choose prompts: the report's own gold does not matter."""
    assert promoted(row("a", 1.0, gold_mean=99.0), row("b", 2.0, gold_mean=0.0)) == "b"


def test_equal_ranks_go_to_the_smaller_kl_then_to_the_first() -> None:
    assert promoted(row("a", 2.0, kl_nats=3.0), row("b", 2.0, kl_nats=2.0)) == "b"
    assert promoted(row("b", 2.0, kl_nats=2.0), row("a", 2.0, kl_nats=3.0)) == "b"
    assert promoted(row("a", 2.0), row("b", 2.0)) == "a"


def test_nobody_passes_and_every_reason_is_told() -> None:
    rows = [row("a", 5.0, kl_nats=13.0), row("b", 6.0, win_rate_lower=None)]
    decision = decide(GATE, rows, "r7")
    assert decision["promoted"] is None
    assert "the policy of r7 stays" in decision["reason"]
    assert "a: kl_nats 13 > 12" in decision["reason"]
    assert "b: win_rate_lower is not known" in decision["reason"]
    assert decision["candidates"] == rows
    assert decision["gate"] == GATE.model_dump()


def test_the_reason_counts_those_that_pass() -> None:
    decision = decide(GATE, [row("a", 1.5), row("b", 2.25), row("c", 9.0, kl_nats=99.0)], "r0")
    assert "b has the highest gold_mean" in decision["reason"]
    assert "(2.250) of 2 candidates" in decision["reason"]
