"""One whole round on the CI-size world, run once by plain `dvc repro` and read by many tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import workspace


@pytest.fixture(scope="session")
def finished_round(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder in which round r1 is done."""
    folder = workspace.create(tmp_path_factory.mktemp("round"), workspace.small)
    workspace.run(folder, "dvc", "repro", "--quiet")
    return folder
