"""The flow on a stub project, with a real Prefect server that it starts itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import child_environment

from flows.runner import Runner
from rlhf.lifeline import alive, ident

Flows = Callable[..., "subprocess.CompletedProcess[str]"]


def ran(project: Path) -> list[str]:
    path = project / "ran.txt"
    return path.read_text().split() if path.exists() else []


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests: making one takes seconds."""
    return str(tmp_path_factory.mktemp("prefect"))


def test_a_failed_stage_halts_the_rest_and_shows_its_log(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    runner = Runner(project, parallel=2)
    assert runner.run("data") == runner.run(
        "data"
    )  # the second call awaits the first one's outcome
    (project / "FAIL").write_text("sft")
    outcome = runner.run("sft")
    assert outcome is not None
    assert not outcome.ok
    assert "stub sft was told to fail" in outcome.message
    assert runner.run("preferences@r1") is None
    assert ran(project) == ["data", "sft"]
    assert (project / "data/tables/made.txt").exists()


def test_a_stage_that_takes_too_long_is_ended_with_its_children(project: Path) -> None:
    (project / "SLEEP").write_text("data")
    outcome = Runner(project, timeout=6).run("data")
    assert outcome is not None
    assert "took longer than 6 s" in outcome.message
    pid = int((project / "sleeping.pid").read_text())
    _wait_until(lambda: not _runs(pid), seconds=10)


def _runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_round_runs_once_a_failure_keeps_what_came_before_and_r2_goes_on(
    project: Path, flows: Flows, prefect_home: str
) -> None:
    # A stage fails: earlier ones stay, later ones do not start, the log's end is shown.
    (project / "FAIL").write_text("evaluate@r1-ppo")
    failed = flows("run", "--round", "r1", PREFECT_HOME=prefect_home, HOME=str(project))
    assert failed.returncode == 1, failed.stderr
    assert "stub evaluate@r1-ppo was told to fail" in failed.stderr
    assert ".scratch/logs/evaluate@r1-ppo.log" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "promote@r1" not in ran(project)
    assert (project / "runs/r1/reward_model/made.txt").exists()
    before = ran(project)
    assert before[0] == "data"
    assert len(before) == len(set(before))

    # Mended, it goes on from there.
    (project / "FAIL").unlink()
    done = flows("run", "--round", "r1", PREFECT_HOME=prefect_home, HOME=str(project))
    assert done.returncode == 0, done.stderr
    assert "data" not in ran(project)[len(before) :]
    assert "evaluate@r1-ppo" in ran(project)[len(before) :]
    assert ran(project)[-1] == "promote@r1"
    assert "promoted r1-ppo" in done.stdout
    assert "fails" in done.stdout
    assert done.stderr == ""

    # The same again runs nothing.
    before = ran(project)
    again = flows("run", PREFECT_HOME=prefect_home, HOME=str(project))
    assert again.returncode == 0, again.stderr
    assert ran(project) == before
    assert "up to date" in again.stdout


@pytest.mark.slow
def test_a_new_round_is_appended_and_starts_from_the_last(
    project: Path, flows: Flows, prefect_home: str
) -> None:
    for name in ("r1", "r2"):
        result = flows("run", "--round", name, PREFECT_HOME=prefect_home, HOME=str(project))
        assert result.returncode == 0, result.stderr
    assert ran(project).count("data") == 1
    assert ran(project)[-1] == "promote@r2"
    assert "r2-ppo:" in (project / "pipeline.yaml").read_text()


def test_a_busy_checkout_is_refused_and_an_ended_flow_leaves_no_stage(
    project: Path, flows: Flows, prefect_home: str
) -> None:
    (project / "SLEEP").write_text("data")
    flow = subprocess.Popen(
        [sys.executable, "-m", "flows", "run"],
        cwd=project,
        env=child_environment(PREFECT_HOME=prefect_home, HOME=str(project)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_until((project / "sleeping.pid").exists)
        stage = ident(int((project / "sleeping.pid").read_text()))
        busy = flows("run")
        assert busy.returncode == 1
        assert f"busy: held by pid {flow.pid}" in busy.stderr
        os.kill(flow.pid, signal.SIGINT)
        _, said = flow.communicate(timeout=60)
        assert flow.returncode == 1
        assert said == "stopped; finished stages are kept, run again to go on\n"
        _wait_until(lambda: not alive(stage), 5)
    finally:
        if flow.poll() is None:
            os.killpg(flow.pid, signal.SIGKILL)
        flow.wait()
    assert ran(project) == ["data"]


def _wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
