"""Stages that sample, killed within a sampling and elsewhere: nothing is lost, nothing is asked twice."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attempts import Project, Strike

STAGES: dict[str, tuple[list[str], list[str], str]] = {
    # arguments, outputs, and the function in which a killed stage is killed at random
    "preferences": (
        ["--round", "r1"],
        ["runs/r1/preferences", "runs/r1/metrics/preferences.json"],
        "_sample_batch",
    ),
    "reward_model": (
        ["--round", "r1"],
        ["runs/r1/reward_model", "runs/r1/metrics/reward_model.json"],
        "Learner.update",
    ),
    "evaluate": (
        ["--candidate", "r1-dpo"],
        ["runs/r1/evaluations/r1-dpo", "runs/r1/metrics/r1-dpo-evaluation.json"],
        "measure",
    ),
    "best_of_n": (
        ["--round", "r1"],
        ["runs/r1/best_of_n", "runs/r1/metrics/best_of_n.json"],
        "measure",
    ),
}
NEVER = 10**9


@pytest.fixture(scope="module")
def trained(world: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The world with a candidate, checkpoints at every step, and samplings of more than one batch."""
    project = world.copy(tmp_path_factory.mktemp("trained") / "a project")
    project.done("policy", "--candidate", "r1-dpo")

    def edit(pipeline: dict[str, Any]) -> None:
        pipeline["resources"]["checkpoints"]["every_steps"] = 1
        pipeline["evaluation"]["sampling_batch_size"] = 16
        pipeline["rounds"]["r1"]["reward_model"]["num_reference_samples"] = 96

    project.change(edit)
    return project


@pytest.fixture
def there(trained: Project, tmp_path: Path) -> Project:
    return trained.copy(tmp_path / "a project")


Straight = Callable[[str], tuple[dict[str, str], int]]


@pytest.fixture(scope="module")
def straight(trained: Project, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Hashes of a stage's outputs in a run that nothing disturbs, and the calls it makes where it is killed."""
    known: dict[str, tuple[dict[str, str], int]] = {}

    def find(stage: str) -> tuple[dict[str, str], int]:
        if stage not in known:
            project = trained.copy(tmp_path_factory.mktemp("straight") / "a project")
            arguments, outputs, inside = STAGES[stage]
            project.remove(*outputs)
            calls = project.done(stage, *arguments, strike=Strike(NEVER, inside=inside)).calls
            known[stage] = project.digest(*outputs), calls
            assert "" not in known[stage][0].values()
        return known[stage]

    return find


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_random_points_it_ends_as_if_nothing_had_happened(
    there: Project, straight: Straight, stage: str
) -> None:
    arguments, outputs, inside = STAGES[stage]
    expected, calls = straight(stage)
    seed = time.time_ns()
    dice = random.Random(seed)
    for _ in range(3):
        there.remove(*outputs)
        at = int(calls * dice.uniform(0.2, 0.3))
        print(f"{stage}: seed={seed}, killed at call {at} of {calls}")
        attempt = there.run(stage, *arguments, strike=Strike(at, inside=inside))
        assert attempt.code == -signal.SIGKILL, attempt.log
    there.remove(*outputs)
    assert "continues after step" in there.done(stage, *arguments).log
    assert there.digest(*outputs) == expected
    assert not there.checkpoints(f"{stage}@{arguments[1]}")


@pytest.mark.recovery
@pytest.mark.parametrize("stage", STAGES)
def test_struck_within_a_sampling_and_while_it_writes(
    there: Project, straight: Straight, stage: str
) -> None:
    arguments, outputs, _ = STAGES[stage]
    expected, _ = straight(stage)
    saved = False
    for strike in (
        Strike(30, inside="Scratch._write"),
        Strike(400, signal.SIGTERM, inside="_sample_batch"),
        Strike(400, inside="_sample_batch"),
        Strike(40, inside="write_directory"),
        Strike(12, inside="Scratch.finish"),
    ):
        there.remove(*outputs)
        attempt = there.run(stage, *arguments, strike=strike)
        assert attempt.code == (75 if strike.signal == signal.SIGTERM else -9), (
            strike,
            attempt.log,
        )
        assert not saved or "continues after step" in attempt.log, (strike, attempt.log)
        saved = saved or strike.signal == signal.SIGTERM
    there.remove(*outputs)
    there.done(stage, *arguments)
    assert there.digest(*outputs) == expected


ASKED = """
from pathlib import Path

def score(prompts, responses, ended):
    import pandas as pd
    with Path("asked.txt").open("a") as file:
        file.writelines(f"gold {p} | {r}\\n" for p, r in zip(prompts, responses))
    return pd.DataFrame({"total": [float(len(r)) for r in responses]})

def label(prompts, first, second):
    with Path("asked.txt").open("a") as file:
        file.writelines(f"label {a} {b}\\n" for a, b in zip(first.ids, second.ids))
    return ["first" if len(a) > len(b) else "second" for a, b in zip(first.responses, second.responses)]
"""


def asked(project: Project, kind: str) -> list[str]:
    path = project.folder / "asked.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(kind)]


def programs(project: Project, batch_size: int | None) -> None:
    """A labeler and a gold of the user's own, which write down what they are asked."""
    (project.folder / "judges.py").write_text(ASKED)

    def edit(pipeline: dict[str, Any]) -> None:
        pipeline["resources"]["checkpoints"]["every_steps"] = 1000
        pipeline["gold"] = {"kind": "program", "path": "judges", "batch_size": batch_size}
        pipeline["rounds"]["r1"]["preferences"]["labeler"] = {
            "kind": "program", "path": "judges.label", "batch_size": batch_size
        }  # fmt: skip

    project.change(edit)


@pytest.mark.parametrize("batch_size", [None, 50])
def test_what_a_program_has_said_is_not_asked_again(there: Project, batch_size: int | None) -> None:
    """Killed in labelling and after it: with declared batches only the unanswered one is asked again."""
    outputs = STAGES["preferences"][1]
    programs(there, batch_size)
    command = ("preferences", "--round", "r1")
    there.remove(*outputs)
    there.done(*command)
    expected, questions = there.digest(*outputs), Counter(asked(there, ""))
    assert sum(line.startswith("label") for line in questions) > 150
    (there.folder / "asked.txt").unlink()
    there.remove(*outputs)
    struck = there.run(*command, strike=Strike(150, inside="label"))  # while it answers
    assert struck.code == -9
    before = len(asked(there, "label"))
    there.remove(*outputs)
    assert there.run(*command, strike=Strike(1, inside="_summary")).code == -9
    there.remove(*outputs)
    there.done(*command)
    assert there.digest(*outputs) == expected
    again = Counter(asked(there, ""))
    assert set(again) == set(questions)
    assert [
        line for line, n in again.items() if line.startswith("gold") and n > questions[line]
    ] == []
    twice = sum(again.values()) - sum(questions.values())
    assert twice <= (before if batch_size is None else batch_size)


def test_what_gold_has_said_of_a_candidate_is_not_asked_again(there: Project) -> None:
    outputs = STAGES["evaluate"][1]
    programs(there, 20)
    command = ("evaluate", "--candidate", "r1-dpo")
    there.done(*command)
    expected, questions = there.digest(*outputs), Counter(asked(there, "gold"))
    (there.folder / "asked.txt").unlink()
    there.remove(*outputs)
    for at in (400, 500):
        assert there.run(*command, strike=Strike(at, inside="score")).code == -9
    there.done(*command)
    assert there.digest(*outputs) == expected
    again = Counter(asked(there, "gold"))
    assert set(again) == set(questions)
    assert sum(again.values()) - sum(questions.values()) <= 2 * 20


@pytest.mark.parametrize("stage", ["data", "promote"])
def test_a_short_stage_runs_again_from_the_start(there: Project, stage: str) -> None:
    outputs = ["data/source", "data/tables", "runs/r0/preferences", "runs/r0/reward_model"]
    command: list[str] = [stage]
    if stage == "promote":
        outputs = ["runs/r1/promoted", "runs/r1/metrics/decision.json"]
        command += ["--round", "r1"]
        there.change(lambda p: [p["candidates"].pop(name) for name in ("r1-ppo", "r1-grpo")])
        there.done("evaluate", "--candidate", "r1-dpo")
    calls = there.done(*command, strike=Strike(NEVER, inside="run")).calls
    expected = there.digest(*outputs)
    assert "" not in expected.values()
    for share in (0.3, 0.6, 0.9):
        there.remove(*outputs)
        attempt = there.run(*command, strike=Strike(int(calls * share), inside="run"))
        assert attempt.code == -signal.SIGKILL
    there.done(*command)
    assert there.digest(*outputs) == expected
    place = (there.folder / outputs[-1]).parent
    assert [p.name for p in place.glob(".*.new")] == []
