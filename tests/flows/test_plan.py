"""The plan says what DVC would do, and why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import child_environment

from flows.plan import Stage, make_plan
from rlhf.errors import BadInput


def repro(project: Path, *targets: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "-q", *targets],
        cwd=project,
        env=child_environment(),
        check=True,
        capture_output=True,
    )


def by_name(plan: list[Stage]) -> dict[str, Stage]:
    return {stage.name: stage for stage in plan}


def test_a_fresh_project_runs_everything_in_order(project: Path) -> None:
    plan = make_plan()
    assert all(stage.reasons[0] == "it has not run yet" for stage in plan)
    seen: set[str] = set()
    for stage in plan:
        assert seen.issuperset(stage.after)
        seen.add(stage.name)
    last = by_name(plan)["promote@r1"]
    assert "evaluate@r1-dpo" in last.after  # an edge through a directory
    assert "promote@r1 runs before it" not in last.reasons
    assert by_name(plan)["sft"].outputs[0] == "runs/r0/promoted"


def test_a_target_leaves_out_what_it_does_not_need(project: Path) -> None:
    names = {stage.name for stage in make_plan("reward_model@r1")}
    assert names == {"data", "sft", "preferences@r1", "reward_model@r1"}


def test_an_unknown_round_is_named(project: Path) -> None:
    with pytest.raises(BadInput, match="promote@r9"):
        make_plan("promote@r9")


def test_reasons_after_a_run(project: Path) -> None:
    repro(project)
    assert [stage.name for stage in make_plan() if stage.runs] == []

    path = project / "pipeline.yaml"
    text = path.read_text()
    coef = text.split("estimator: k1, coef: ")[1].split("}")[0]
    path.write_text(text.replace(f"estimator: k1, coef: {coef}", "estimator: k1, coef: 0.77"))
    plan = by_name(make_plan())
    ppo = plan["policy@r1-ppo"].reasons
    assert ppo == [f"parameter candidates.r1-ppo.kl.coef: {float(coef)} -> 0.77"]
    assert plan["evaluate@r1-ppo"].reasons == ["policy@r1-ppo runs before it"]
    assert [name for name, stage in plan.items() if stage.runs] == [
        "policy@r1-ppo",
        "evaluate@r1-ppo",
        "promote@r1",
    ]
    path.write_text(text)

    # The folder of data.source may hold the gold program: what labels and judges with it reruns.
    world = project / "rlhf/worlds/reviews/world.txt"
    before = world.read_text()
    world.write_text("another gold")
    plan = by_name(make_plan())
    for name in ("data", "preferences@r1", "evaluate@r1-ppo"):
        assert "input rlhf/worlds/reviews changed" in plan[name].reasons
    world.write_text(before)

    shutil.rmtree(project / "runs/r1/reward_model")
    (project / "runs/r0/promoted/made.txt").write_text("tampered")
    plan = by_name(make_plan())
    assert "output runs/r1/reward_model is missing" in plan["reward_model@r1"].reasons
    assert "output runs/r0/promoted changed" in plan["sft"].reasons
    assert "input runs/r0/promoted changed" in plan["policy@r1-dpo"].reasons


@pytest.mark.parametrize(
    ("missing", "mend"),
    [("pipeline.yaml", "project's folder"), (".git", "git init"), (".dvc", "dvc init")],
)
def test_a_folder_that_is_not_ready_says_what_to_do(project: Path, missing: str, mend: str) -> None:
    place = project / missing
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    with pytest.raises(BadInput, match=mend):
        make_plan()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("dvc.lock", "{{{", "dvc.lock: .*corrupted"),
        ("dvc.lock", "", r"dvc.lock: .*required key not provided @ data\['schema'\]"),
        ("dvc.yaml", "stages: {data: {cmd: x, dep: [y]}}", r"dvc.yaml: .*\['data'\]\['dep'\]"),
        ("dvc.yaml", "", "dvc.yaml: no stage promote@r1"),
        (".dvc/config", "[core\n", ".dvc/config: .*line 1"),
    ],
)
def test_a_damaged_file_of_dvc_is_named_with_its_fault(
    project: Path, file: str, content: str, words: str
) -> None:
    (project / file).write_text(content)
    with pytest.raises(BadInput, match=rf"{words}(?s:.*)git checkout {file}"):
        make_plan()
