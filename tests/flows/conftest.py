"""A project of stub stages, with the repository's pipeline.yaml and the shape of its dvc.yaml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def stub_dvc_yaml() -> str:
    """The real dvc.yaml with every command replaced by one that only makes its outputs."""
    import yaml

    declared = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    for name, stage in declared["stages"].items():
        body = stage.get("do", stage)
        declared_outputs = [*body.get("outs", []), *body.get("metrics", [])]
        outputs = [o if isinstance(o, str) else next(iter(o)) for o in declared_outputs]
        label = f"{name}@${{key}}" if "foreach" in stage else name
        body["cmd"] = f"python stub.py {label} {' '.join(outputs)}"
    return str(yaml.safe_dump(declared, sort_keys=False, width=1000))


def _without_candidate(name: str) -> str:
    """The repository's pipeline.yaml with one candidate less: each costs seconds."""
    text = (ROOT / "pipeline.yaml").read_text(encoding="utf-8")
    return re.sub(rf"^  {name}:\n(?:    .*\n)+", "", text, flags=re.M)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; tests work on copies."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "pipeline.yaml").write_text(_without_candidate("r1-grpo"), encoding="utf-8")
    shutil.copy(ROOT / "prefect.yaml", folder)
    shutil.copy(Path(__file__).with_name("stub.py"), folder)
    (folder / "dvc.yaml").write_text(stub_dvc_yaml(), encoding="utf-8")
    source = re.search(r"^  source: (\S+)", (folder / "pipeline.yaml").read_text(), re.M)
    assert source is not None
    (folder / source[1]).mkdir(parents=True)
    (folder / source[1] / "world.txt").write_text("world")
    orders = (
        "/FAIL /GO /SLEEP /STUBBORN /SLOW /NOPASS /saw /ran.txt /times.txt /sleeping.pid /*.out"
    )
    ignored = f"/.scratch /mlflow.db /mlartifacts /runs/*/* !/runs/*/metrics /data/* {orders}"
    (folder / ".dvcignore").write_text(".gitignore\n.scratch\n")
    (folder / ".gitignore").write_text("\n".join(ignored.split()) + "\n")
    for words in (
        ["git", "init", "-q"],
        ["git", "config", "user.name", "A Person"],
        ["git", "config", "user.email", "person@example.org"],
        [sys.executable, "-m", "dvc", "init", "-q"],
        ["git", "add", "--all"],
        ["git", "commit", "-q", "-m", "A project of stubs"],
    ):
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PREFECT_HOME", str(folder / ".scratch/prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return folder


@pytest.fixture
def flows(project: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m flows ...` in the project."""

    def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flows", *words],
            cwd=project,
            env=child_environment(**environment),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return call


def child_environment(**changes: str) -> dict[str, Any]:
    """The environment in which the project's processes find this code and this Python."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        **changes,
    }
