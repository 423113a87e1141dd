"""The champion as a function of what was decided: by example, and against a model that keeps only a log."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf import champion, config
from rlhf.champion import Champion
from rlhf.errors import BadInput

ROOT = Path(__file__).parents[1]
BASE = config.load(ROOT / "pipeline.yaml")


def pipeline(starts: dict[str, str], rollback: tuple[str, str] | None = None) -> config.Pipeline:
    """Rounds by name, each with the round that it starts from; a rollback (to, after)."""
    one = BASE.rounds["r1"]
    rounds = {name: one.model_copy(update={"from_": start}) for name, start in starts.items()}
    found = None
    if rollback is not None:
        found = config.Rollback(
            to=rollback[0], after=rollback[1], because="it got worse", by="Ada", at="2026-01-01"
        )
    return BASE.model_copy(update={"rounds": rounds, "rollback": found})


def decided(folder: Path, round: str, status: str, *, by_person: bool = False) -> None:
    """What promote writes."""
    chosen = f"{round}-a" if status == "promoted" else None
    word = {"choice": "keep", "candidate": chosen, "because": "so", "by": "Ada", "at": "2026-01-01"}
    path = folder / f"runs/{round}/metrics/decision.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "round": round,
        "status": status,
        "promoted": chosen,
        "reason": "by the rules",
        "candidates": [{"candidate": f"{round}-a"}, {"candidate": f"{round}-b"}],
        "decision": word if by_person else None,
    }
    path.write_text(json.dumps(content))


LINE = {"r1": "r0", "r2": "r1", "r3": "r2"}


def test_before_any_round_it_is_the_fine_tuned_start(tmp_path: Path) -> None:
    assert champion.champion(pipeline(LINE), tmp_path) == Champion("r0", None, "initial")
    assert champion.status(tmp_path, "r1") == "unrun"
    assert champion.history(pipeline(LINE), tmp_path) == []


@pytest.mark.parametrize("status", ["kept", "stopped", "awaiting"])
def test_a_round_that_promotes_nothing_leaves_it(tmp_path: Path, status: str) -> None:
    decided(tmp_path, "r1", "promoted", by_person=True)
    decided(tmp_path, "r2", status)
    assert champion.status(tmp_path, "r2") == status
    assert champion.champion(pipeline(LINE), tmp_path) == Champion("r1", "r1-a", "decision")


def test_the_order_is_the_declared_one_and_not_that_of_the_files(tmp_path: Path) -> None:
    decided(tmp_path, "r3", "promoted")
    decided(tmp_path, "r1", "promoted")  # an old round run again
    assert champion.champion(pipeline(LINE), tmp_path) == Champion("r3", "r3-a", "promotion")


def test_a_rollback_stands_until_a_later_promotion(tmp_path: Path) -> None:
    for name in ("r1", "r2"):
        decided(tmp_path, name, "promoted")
    back = pipeline(LINE, ("r1", "r2"))
    assert champion.champion(back, tmp_path) == Champion("r1", "r1-a", "rollback")
    decided(tmp_path, "r3", "kept")
    assert champion.champion(back, tmp_path) == Champion("r1", "r1-a", "rollback")
    decided(tmp_path, "r3", "promoted")
    assert champion.champion(back, tmp_path) == Champion("r3", "r3-a", "promotion")


def test_a_rollback_to_r0_and_to_a_round_that_passed_a_policy_on(tmp_path: Path) -> None:
    decided(tmp_path, "r1", "promoted")
    decided(tmp_path, "r2", "kept")
    decided(tmp_path, "r3", "promoted")
    assert champion.champion(pipeline(LINE, ("r0", "r3")), tmp_path) == Champion(
        "r0", None, "rollback"
    )
    assert champion.champion(pipeline(LINE, ("r2", "r3")), tmp_path) == Champion(
        "r1", "r1-a", "rollback"
    )


def test_history_says_who_why_and_the_champion_from_then_on(tmp_path: Path) -> None:
    decided(tmp_path, "r1", "promoted")
    decided(tmp_path, "r3", "kept", by_person=True)
    first, second = champion.history(pipeline(LINE), tmp_path)
    assert (first.round, first.status, first.candidate, first.by, first.because, first.at) == (
        "r1", "promoted", "r1-a", "gate", "by the rules", None,
    )  # fmt: skip
    assert (second.round, second.status, second.candidate, second.by, second.because, second.at) == (
        "r3", "kept", None, "Ada", "so", "2026-01-01",
    )  # fmt: skip
    assert first.champion == second.champion == Champion("r1", "r1-a", "promotion")


@pytest.mark.parametrize(
    "change",
    [
        {"status": "won"},
        {"status": None},
        {"status": "kept"},  # and yet it promotes
        {"promoted": None},
        {"promoted": "r2-z"},
        {"round": "r3"},
        {"candidates": {}},
        {"candidates": [{}]},
        {"decision": {"choice": "keep"}},
        {"decision": "keep"},
        {"reason": None},
    ],
)
def test_a_broken_decision_names_the_stage_that_makes_it(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    decided(tmp_path, "r2", "promoted")
    path = tmp_path / "runs/r2/metrics/decision.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for ask in (
        lambda: champion.champion(pipeline(LINE), tmp_path),
        lambda: champion.status(tmp_path, "r2"),
    ):
        with pytest.raises(BadInput, match=r"not a decision(?s:.*)dvc repro promote@r2"):
            ask()


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "\x00"])
def test_a_decision_cut_short_names_the_stage_that_makes_it(tmp_path: Path, content: str) -> None:
    decided(tmp_path, "r2", "promoted")
    (tmp_path / "runs/r2/metrics/decision.json").write_text(content)
    with pytest.raises(BadInput, match="dvc repro promote@r2"):
        champion.status(tmp_path, "r2")


@st.composite
def events(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Rounds that end in some way, and rollbacks to rounds that are there."""
    found: list[tuple[str, int]] = []
    rounds = 0
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["promoted", "kept", "stopped", "rollback"]))
        if kind == "rollback":
            found.append((kind, draw(st.integers(0, rounds))))
        else:
            found.append((kind, draw(st.integers(0, rounds))))  # the round that it starts from
            rounds += 1
    return found


@given(events(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_any_sequence_ends_with_the_champion_that_a_log_of_it_names(
    sequence: list[tuple[str, int]], random: Any
) -> None:
    """The log knows the order of events; the function sees only the file and the decisions."""
    folder = Path(tempfile.mkdtemp(prefix="champion-"))
    starts: dict[str, str] = {}
    holds: dict[str, tuple[str, str | None]] = {"r0": ("r0", None)}  # what runs/<round>/promoted is
    rollback: tuple[str, str] | None = None
    expected = Champion("r0", None, "initial")
    try:
        for kind, number in sequence:
            if kind == "rollback":
                rollback = (f"r{number}", f"r{len(starts)}")
                expected = Champion(*holds[f"r{number}"], "rollback")
                continue
            name = f"r{len(starts) + 1}"
            starts[name] = f"r{number}"
            holds[name] = holds[f"r{number}"]
            decided(folder, name, kind)
            if kind == "promoted":
                holds[name] = (name, f"{name}-a")
                expected = Champion(name, f"{name}-a", "promotion")
        if not starts:
            return
        declared = pipeline(starts, rollback)
        assert champion.champion(declared, folder) == expected
        again = random.choice(list(starts))  # an old promote run again writes the same decision
        decided(folder, again, champion.status(folder, again))
        assert champion.champion(declared, folder) == expected
        assert [entry.round for entry in champion.history(declared, folder)] == list(starts)
        assert champion.history(declared, folder)[-1].champion == expected
    finally:
        shutil.rmtree(folder)


def test_a_policy_has_one_hash_wherever_it_lies(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place / "inner").mkdir(parents=True)
        (tmp_path / place / "model.safetensors").write_text("weights")
        (tmp_path / place / "inner/lineage.json").write_text("a file of its own")
    (tmp_path / "b/lineage.json").write_text("{}")
    first = champion.policy_digest(tmp_path / "a")
    assert champion.policy_digest(tmp_path / "b") == first
    (tmp_path / "b/inner/lineage.json").write_text("another")
    assert champion.policy_digest(tmp_path / "b") != first
