"""The plan says what DVC would do, and why."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import child_environment

from flows import plan as plans
from flows.definitions import Engine, Unusual
from flows.plan import Stage, lock_blocks, make_plan
from rlhf import yaml12
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


@pytest.fixture(scope="session")
def finished_template(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds that are up to date: every stub has run, and DVC has recorded what they left."""
    from flows.rounds import append_round

    folder = tmp_path_factory.mktemp("finished") / "project"
    shutil.copytree(template, folder)
    append_round(folder / "pipeline.yaml", "r2")
    for stage in make_plan(folder=folder):
        command = [sys.executable, "stub.py", stage.name, *stage.outputs]
        subprocess.run(command, cwd=folder, env=child_environment(), check=True)
    dvc = [sys.executable, "-m", "dvc", "commit", "--force", "--quiet"]
    subprocess.run(dvc, cwd=folder, env=child_environment(), check=True, capture_output=True)
    shutil.rmtree(folder / ".scratch")
    return folder


@pytest.fixture
def finished(finished_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "finished"
    shutil.copytree(finished_template, folder)
    monkeypatch.chdir(folder)
    return folder


def remembering(folder: Path, target: str | None = None) -> list[Stage]:
    with ExitStack() as stack:
        return plans._plan_remembering(folder, target, Engine(str(folder), stack))


def by_dvc(folder: Path, target: str | None = None) -> list[Stage]:
    with ExitStack() as stack:
        return plans._plan_by_dvc(Engine(str(folder), stack).repo, target)


def replace(path: str, pattern: str, new: str) -> None:
    """Change a file's text; nothing if the pattern is gone already."""
    text = Path(path).read_text()
    Path(path).write_text(re.sub(pattern, new, text, count=1))


def _cached(folder: Path, of: str) -> Path:
    """The cache's file of one that a directory holds."""
    import hashlib

    name = hashlib.md5(Path(of).read_bytes()).hexdigest()
    return folder / f".dvc/cache/files/md5/{name[:2]}/{name[2:]}"


def _drop_from_cache(folder: Path) -> None:
    _cached(folder, "runs/r1/policies/r1-dpo/made.txt").unlink(missing_ok=True)


def _drop_list_from_cache(folder: Path) -> None:
    """What DVC's cache knows of a directory: which files it has."""
    found = re.search(
        r"path: runs/r2/reward_model\n      hash: md5\n      md5: (\w+\.dir)",
        Path("dvc.lock").read_text(),
    )
    if found:
        (folder / f".dvc/cache/files/md5/{found[1][:2]}/{found[1][2:]}").unlink(missing_ok=True)


def _spoil_cache(folder: Path) -> None:
    path = _cached(folder, "runs/r1/preferences/made.txt")
    if path.exists():
        path.chmod(0o644)  # no longer DVC's to trust
        path.write_text("rot")


def _forget_entry(folder: Path) -> None:
    replace("dvc.lock", r"(?m)^  evaluate@r2-ppo:\n(?:    .*\n)+", "")


EDITS: dict[str, Callable[[Path], object]] = {
    "a number": lambda f: replace("pipeline.yaml", r"coef: 0\.15", "coef: 0.151"),
    "a key for all": lambda f: replace("pipeline.yaml", r"(?m)^seed: 0", "seed: 1"),
    "a new key": lambda f: replace("pipeline.yaml", r"  dtype:", "  gradient_checkpointing: true\n  dtype:"),
    "another start": lambda f: replace("pipeline.yaml", r"sample_from: r1", "sample_from: r0"),
    "what it learns from": lambda f: replace("pipeline.yaml", "from: r2/reward_model", "from: r1/reward_model"),
    "a candidate more": lambda f: replace("pipeline.yaml", r"(?m)^  (r2-dpo):\n((?:    .*\n)+)", r"\g<0>  \1_b:\n\2"),
    "a candidate less": lambda f: replace("pipeline.yaml", r"(?m)^  r1-dpo:\n(?:    .*\n)+", ""),
    "a comment": lambda f: replace("pipeline.yaml", "# ", "#  "),
    "a command": lambda f: replace("dvc.yaml", "stub.py promote", "stub.py  promote"),
    "a dependency": lambda f: replace("dvc.yaml", r"      - data/tables\n", "      - data/tables\n      - stub.py\n"),
    "an output gone": lambda f: shutil.rmtree("runs/r1/reward_model", ignore_errors=True),
    "an output edited": lambda f: Path("runs/r1/promoted/made.txt").write_text("tampered"),
    "an output grown": lambda f: Path("runs/r2/policies/r2-ppo/more.txt").write_text("x"),
    "a metric edited": lambda f: Path("runs/r1/metrics/preferences.json").write_text("{}"),
    "the world": lambda f: next(Path("rlhf").rglob("world.txt")).write_text("another"),
    "touched": lambda f: os.utime("runs/r2/preferences/made.txt"),
    "no lock": lambda f: Path("dvc.lock").unlink(missing_ok=True),
    "an entry less": _forget_entry,
    "not in cache": _drop_from_cache,
    "its list not in cache": _drop_list_from_cache,
    "rot": _spoil_cache,
    "ignored": lambda f: Path("runs/.dvcignore").write_text("more.txt\n"),
}  # fmt: skip


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] if n >= 5 else []) for n in range(10)]
)
def test_the_quick_plan_is_dvcs_own(finished: Path, seed: int) -> None:
    """After any edits, with or without a memory of the time before, for the whole and for a target."""
    choose = random.Random(seed)
    if seed % 2:
        assert not any(stage.runs for stage in remembering(finished))
    for _ in range(2):
        for name in choose.sample(sorted(EDITS), 2):
            if (finished / "dvc.lock").exists() or name not in (
                "an entry less",
                "its list not in cache",
            ):
                EDITS[name](finished)
        target = choose.choice([None, "promote@r2", "evaluate@r2-ppo"])
        quick = [stage.as_dict() | {"faults": []} for stage in remembering(finished, target)]
        assert quick == [stage.as_dict() for stage in by_dvc(finished, target)]


def test_every_edit_is_covered_and_seen(finished: Path) -> None:
    """Each edit alone changes the plan, but for those that change nothing DVC knows."""
    harmless = {"a candidate less", "a comment", "touched", "ignored"}
    for name, edit in EDITS.items():
        folder = finished.with_name(f"edit-{len(name)}")
        shutil.copytree(finished, folder)
        os.chdir(folder)
        edit(folder)
        assert any(stage.runs for stage in remembering(folder)) is (name not in harmless), name
        shutil.rmtree(folder)
    os.chdir(finished)


def test_a_second_plan_does_not_ask_dvc(finished: Path) -> None:
    remembering(finished)
    with ExitStack() as stack:
        engine = Engine(str(finished), stack)
        assert len(plans._plan_remembering(finished, None, engine)) == 18
        assert "repo" not in vars(engine)


def test_a_memory_that_is_damaged_or_of_another_place_is_not_used(finished: Path) -> None:
    before = [stage.as_dict() for stage in remembering(finished)]
    for path in (finished / ".scratch/plan").iterdir():
        path.write_text(path.read_text()[:-7])
    assert [stage.as_dict() for stage in remembering(finished)] == before
    moved = finished.with_name("moved away")
    finished.rename(moved)
    (moved / ".dvc/cache").rename(moved / ".dvc/elsewhere")
    os.chdir(moved)
    assert "output data/tables not in cache" in by_name(remembering(moved))["data"].reasons


def test_what_is_not_over_rounds_is_left_to_dvc(finished: Path) -> None:
    Path("raw.txt").write_text("raw")
    dvc = [sys.executable, "-m", "dvc", "add", "--quiet", "--no-commit", "raw.txt"]
    subprocess.run(dvc, check=True, env=child_environment(), capture_output=True)
    replace("dvc.yaml", r"    - \$\{data.source\}\n", "    - ${data.source}\n    - raw.txt\n")
    with pytest.raises(Unusual):
        remembering(finished)
    plan = by_name(make_plan())
    assert plan["data"].after == ["raw.txt.dvc"]
    Path("params.yaml").write_text("x: 1")
    assert plan["data"].reasons == by_name(make_plan())["data"].reasons


def test_what_may_run_is_told_from_what_will(finished: Path) -> None:
    replace("pipeline.yaml", r"coef: 0\.15", "coef: 0.151")
    plan = by_name(make_plan("promote@r2"))
    states = {name: stage.state for name, stage in plan.items()}
    assert states["policy@r1-ppo"] == "run"
    assert states["evaluate@r1-ppo"] == states["preferences@r2"] == "may run"
    assert states["sft"] == states["policy@r1-dpo"] == "keep"


@pytest.mark.parametrize("name", ["dvc.lock", "dvc.yaml", "pipeline.yaml"])
def test_conflict_markers_are_told_with_their_line(finished: Path, name: str) -> None:
    lines = (finished / name).read_text().splitlines(keepends=True)
    at = len(lines) // 2
    sides = ["<<<<<<< HEAD\n", lines[at], "=======\n", lines[at], ">>>>>>> theirs\n"]
    (finished / name).write_text("".join([*lines[:at], *sides, *lines[at + 1 :]]))
    with pytest.raises(BadInput, match=rf"{name} line {at + 1}: .*<<<<<<<(?s:.*)mend: "):
        make_plan()


def test_a_damaged_file_of_the_cache_is_named(finished: Path) -> None:
    """Also where DVC itself does not look: it trusts a file of its cache that is read-only."""
    make_plan()
    path = _cached(finished, "runs/r1/preferences/made.txt")
    path.chmod(0o644)
    path.write_text("rot")
    path.chmod(0o444)
    plan = by_name(make_plan())
    (fault,) = plan["preferences@r1"].faults
    assert str(path) in fault
    assert f"rm -f {path}" in fault
    assert not plan["preferences@r1"].runs
    assert by_name(make_plan())["preferences@r1"].faults == [fault]
    path.unlink()
    assert (
        "output runs/r1/preferences not in cache" in by_name(make_plan())["preferences@r1"].reasons
    )


def test_the_entries_of_a_lock_are_what_the_whole_holds(finished: Path) -> None:
    text = Path("dvc.lock").read_text()
    blocks = lock_blocks(text)
    assert blocks is not None
    assert len(blocks) == 18
    whole = yaml12.load(text)["stages"]
    assert {k: v for block in blocks for k, v in yaml12.load(block).items()} == whole
    for other in ("", "stages: {}", text.replace("  data:", "# x\n  data:"), f"{text}extra: 1\n"):
        assert lock_blocks(other) is None


def test_a_stage_that_the_lock_names_twice_is_dvcs_to_judge(finished: Path) -> None:
    text = Path("dvc.lock").read_text()
    blocks = lock_blocks(text)
    assert blocks is not None
    Path("dvc.lock").write_text(text + blocks[0])
    with pytest.raises(BadInput, match=r"dvc\.lock"):
        make_plan()


def test_a_plan_is_whole_json(finished: Path) -> None:
    replace("pipeline.yaml", r"coef: 0\.15", "coef: 0.151")
    done = subprocess.run(
        [sys.executable, "-m", "flows", "plan", "--round", "r1", "--json"],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["counts"] == {"run": 1, "may run": 2, "keep": 7}
    assert found["wall_seconds"] is None
    assert found["without_estimate"] == ["policy@r1-ppo", "evaluate@r1-ppo", "promote@r1"]


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
