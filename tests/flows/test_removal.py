"""A round is taken out whole, what stays is right, and the way back that is told works."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finished
import pytest
import yaml

from flows import decisions, editing, removal
from flows.removal import carry_out_removal, remove_round, restore_round
from flows.rounds import append_round
from rlhf import champion, config, tracking
from rlhf.errors import BadInput

ROOT = Path(__file__).parents[2]
Flows = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A project's pipeline.yaml, with the sources that it names; no git."""
    (tmp_path / "rlhf/worlds/reviews").mkdir(parents=True)
    return Path(shutil.copy(ROOT / "pipeline.yaml", tmp_path))


def test_a_round_that_is_removed_leaves_the_file_as_it_was(path: Path) -> None:
    before = path.read_bytes()
    append_round(path, "r2", add={"ppo2": "ppo"}, drop=["dpo"])
    text = path.read_text().replace("  r2:\n", "  r2:  # the wide one\n")
    path.write_text(editing.set_value(text, "candidates.r2-ppo2.kl.coef", 0.02))
    added = path.read_bytes()
    done = carry_out_removal(path.parent, "r2")
    assert path.read_bytes() == before
    assert done == [
        "r2 and r2-ppo, r2-grpo, r2-ppo2 removed from pipeline.yaml",
        "to get it back: python -m flows round restore r2",
    ]
    restore_round(path.parent, "r2")
    assert path.read_bytes() == added
    with pytest.raises(BadInput, match="r2 is there already"):
        restore_round(path.parent, "r2")


@pytest.mark.parametrize(
    ("change", "user"),
    [
        ({"rounds.r3.from": "r2"}, "rounds.r3.from"),
        ({"rounds.r3.sample_from": "r2"}, "rounds.r3.sample_from"),
        ({"candidates.r3-dpo.learns_from": "r2/preferences"}, "candidates.r3-dpo.learns_from"),
        (
            {
                "rollback": {
                    "to": "r0",
                    "after": "r2",
                    "because": "b",
                    "by": "c",
                    "at": "2026-01-31",
                }
            },
            "rollback.after",
        ),
    ],
)
def test_a_round_that_another_needs_stays(path: Path, change: dict[str, Any], user: str) -> None:
    append_round(path, "r2")
    append_round(path, "r3", overrides={"from": change.get("rounds.r3.from", "r1")})
    text = path.read_text()
    for key, value in change.items():
        text = editing.set_value(text, key, value)
    path.write_text(text)
    config.load(path)
    with pytest.raises(BadInput, match="r2 is needed by ") as caught:
        remove_round(path, "r2", force=True)
    assert user in str(caught.value)
    assert path.read_text() == text


def test_the_only_round_and_a_round_that_is_not_there_stay(path: Path) -> None:
    with pytest.raises(BadInput, match="r1 is the only round"):
        remove_round(path, "r1", force=True)
    with pytest.raises(BadInput, match="no round r7"):
        remove_round(path, "r7")


def test_a_rollback_that_names_the_round_says_how_to_take_it_back(path: Path) -> None:
    append_round(path, "r2")
    back = {"to": "r0", "after": "r2", "because": "b", "by": "c", "at": "2026-01-31"}
    path.write_text(editing.set_value(path.read_text(), "rollback", back))
    with pytest.raises(BadInput, match=r"rollback\.after") as caught:
        remove_round(path, "r2")
    assert str(caught.value).endswith('mend: python -m flows rollback none --because "..."')
    assert decisions.rollback(path.parent, "none", because="r2 goes")
    remove_round(path, "r2")


def test_a_removed_round_between_brackets_is_kept_too(path: Path) -> None:
    append_round(path, "r2")
    raw = config.read_yaml(path)
    flat = {key: raw["rounds"][key] for key in ("r1", "r2")}
    section = re.compile(r"^rounds:\n.*?(?=^\w)", re.M | re.S)
    path.write_text(section.sub(f"rounds: {json.dumps(flat)}\n", path.read_text()))
    remove_round(path, "r2")
    kept = config.read_yaml(path.parent / removal.REMOVED / "r2.yaml")
    assert kept["rounds"] == {"r2": flat["r2"]}


def test_the_alias_follows_when_the_champion_is_removed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        tracking, "register_champion", lambda p, f: told.append(champion.champion(p, f).round)
    )
    monkeypatch.setattr("flows.overview.log", lambda *_: None)
    append_round("pipeline.yaml", "r2")
    finished.start(project)
    for name, before in (("r1", "r0"), ("r2", "r1")):
        finished.run(project, name, before)
    done = carry_out_removal(project, "r2", force=True)
    assert told == ["r1"]
    assert done[-1].endswith("round restore r2, then run it: DVC takes what it has cached")
    assert finished.git(project, "log", "--format=%s") == "A project of stubs"  # git had none of it


def test_a_removal_that_cannot_be_committed_changes_nothing(project: Path) -> None:
    append_round("pipeline.yaml", "r2")
    finished.git(project, "commit", "-qam", "r2 declared")
    finished.git(project, "checkout", "-q", "--detach")
    text = (project / "pipeline.yaml").read_text()
    with pytest.raises(BadInput, match="HEAD is detached"):
        carry_out_removal(project, "r2")
    assert (project / "pipeline.yaml").read_text() == text


@pytest.mark.parametrize("commits", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_round_that_has_run_goes_by_force_and_comes_back(
    project: Path, flows: Flows, commits: bool
) -> None:
    path = project / "pipeline.yaml"
    path.write_text(path.read_text().replace("commit: true", f"commit: {str(commits).lower()}"))
    assert flows("round", "add", "r2").returncode == 0
    finished.start(project)
    for name, before in (("r1", "r0"), ("r2", "r1")):
        finished.run(project, name, before)
    finished.dvc(project, "commit", "--force")
    finished.git(project, "add", "--all")
    finished.git(project, "commit", "-qm", "two rounds")
    texts = {name: (project / name).read_text() for name in ("pipeline.yaml", "dvc.lock")}
    refused = flows("round", "remove", "r2")
    assert refused.returncode == 2
    assert "r2 has run: 8 stages in dvc.lock, runs/r2" in refused.stderr
    assert path.read_text() == texts["pipeline.yaml"]
    removed = flows("round", "remove", "r2", "--force")
    assert removed.returncode == 0, removed.stderr
    assert not (project / "runs/r2").exists()
    stages = yaml.safe_load((project / "dvc.lock").read_text())["stages"]
    assert "promote@r1" in stages
    assert not [stage for stage in stages if "@r2" in stage]
    if commits:
        assert finished.git(project, "status", "--porcelain") == ""
        assert finished.git(project, "log", "-1", "--format=%s") == "Round r2 removed"
        assert finished.git(project, "ls-files", "runs/r2") == ""
    back = removed.stdout.splitlines()[-1].partition("to get it back: ")[2]
    command, dvc = back.split(" && ")
    assert dvc == "dvc checkout"
    finished.git(project, *shlex.split(command)[1:])
    finished.dvc(project, "checkout")
    assert {name: (project / name).read_text() for name in texts} == texts
    assert finished.dvc(project, "status") == "Data and pipelines are up to date.\n"
