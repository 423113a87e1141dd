"""One whole round on the CI-size world, run once by plain `dvc repro` and read by many tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import workspace
from rlhf import tracking


@pytest.fixture(scope="session")
def finished_round(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder in which round r1 is done."""
    folder = workspace.create(tmp_path_factory.mktemp("round"), workspace.small)
    workspace.run(folder, "dvc", "repro", "--quiet")
    return folder


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a fresh MLflow sqlite store: creating one takes seconds, copying none."""
    folder = tmp_path_factory.mktemp("store")
    tracking._client(None, folder).search_experiments()
    return (folder / "mlflow.db").read_bytes()
