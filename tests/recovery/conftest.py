"""A small project whose stages are killed and run again.

def test_it(project):  # a fresh copy in which data, sft, preferences and reward model are made
    attempts.survives_kills(project, "sft", outputs=["runs/r0/promoted", "runs/r0/metrics/sft.json"])
    attempt = project.run("sft", strike=Strike(1000, signal.SIGTERM))  # code, log, calls
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attempts import Project

from benchmarks import workspace


def _saving_at_each_step(pipeline: dict[str, Any]) -> None:
    workspace.minimal(pipeline)
    pipeline["resources"]["checkpoints"]["every_steps"] = 1


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The minimal world with everything that candidates learn from. Not to be changed; see `project`."""
    folder = tmp_path_factory.mktemp("recovery") / "a project"
    project = Project(workspace.write(folder, _saving_at_each_step))
    project.done("data")
    project.done("sft")
    for stage in ("preferences", "reward_model"):
        project.done(stage, "--round", "r1")
    return project


@pytest.fixture
def project(world: Project, tmp_path: Path) -> Project:
    """A copy of it."""
    return world.copy(tmp_path / "a project")
