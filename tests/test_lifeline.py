"""Real processes, really killed: a stage does not outlive its owners."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf import lifeline

ROOT = Path(__file__).parents[1]

STAGE = """
import pathlib, signal, sys, time
from rlhf import lifeline
held = lifeline.hold(every=0.1, grace=float(sys.argv[2]))
place = pathlib.Path(sys.argv[1])
def save(*_):
    (place / "saved").write_text("checkpoint")
    if sys.argv[3] == "stubborn":
        return
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
(place / "held").write_text(f"{held}")
while True:
    time.sleep(0.05)
"""

PARENT = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], start_new_session=True)
(pathlib.Path(sys.argv[1]) / "pid").write_text(str(child.pid))
time.sleep(60)
"""


def start(place: Path, *, grace: str = "20", mood: str = "meek", **environment: str) -> tuple:  # type: ignore[type-arg]
    """A parent and the stage below it; returns (parent, pid of the stage)."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(place), STAGE, str(place), grace, mood],
        env={**_clean(), "PYTHONPATH": str(ROOT), **environment},
    )
    wait_until(lambda: (place / "held").exists() and bool((place / "held").read_text()))
    return parent, int((place / "pid").read_text())


def _clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("DVC_STAGE", "ROUNDHOUSE_OWNERS")}


def wait_until(condition, seconds: float = 15.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return not lifeline.alive(lifeline.ident(pid))
    except ProcessLookupError:
        return True


def kill(pid: int) -> None:
    if not gone(pid):
        os.kill(pid, signal.SIGKILL)


def test_a_stage_saves_and_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent, stage = start(tmp_path, DVC_STAGE="policy@r1-ppo")
    try:
        assert not gone(stage)
        parent.kill()
        parent.wait()
        wait_until(lambda: gone(stage), 5)
        assert (tmp_path / "saved").exists()
    finally:
        kill(stage)


def test_a_stage_that_does_not_end_is_killed_after_the_grace(tmp_path: Path) -> None:
    parent, stage = start(tmp_path, grace="0.5", mood="stubborn", DVC_STAGE="x")
    try:
        parent.kill()
        parent.wait()
        wait_until(lambda: gone(stage), 5)
        assert (tmp_path / "saved").exists()
    finally:
        kill(stage)


def test_a_stage_ends_with_a_far_owner_while_its_parent_lives(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    parent, stage = start(tmp_path, ROUNDHOUSE_OWNERS=lifeline.ident(owner.pid))
    try:
        assert not gone(stage)
        owner.kill()
        owner.wait()
        wait_until(lambda: (tmp_path / "saved").exists(), 5)
        assert parent.poll() is None
    finally:
        kill(stage)
        parent.kill()
        parent.wait()


def test_a_stage_started_by_hand_is_left_alone(tmp_path: Path) -> None:
    parent, stage = start(tmp_path)
    try:
        assert (tmp_path / "held").read_text() == "False"
        parent.kill()
        parent.wait()
        time.sleep(1)
        assert not gone(stage)
    finally:
        kill(stage)


def test_a_zombie_and_a_reused_process_id_do_not_count_as_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    owner = lifeline.ident(child.pid)
    wait_until(lambda: not lifeline.alive(owner))  # ended, and not yet waited for
    child.wait()
    pid, started = lifeline.ident(os.getpid()).split(":")
    assert lifeline.alive(f"{pid}:{started}")
    assert not lifeline.alive(f"{pid}:{int(started) + 1}")
    with pytest.raises(ProcessLookupError):
        lifeline.ident(child.pid)


def test_owners_reach_up_to_dvc_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "dvc").write_text(
        "import subprocess, sys\nsubprocess.run(['/bin/sh', '-c', sys.argv[1] + '; true'])\n"
    )  # a shell in between, as dash leaves it
    code = "from rlhf import lifeline; print(len(lifeline.owners()))"
    result = subprocess.run(
        [sys.executable, str(tmp_path / "dvc"), f'"{sys.executable}" -c "{code}"'],
        env={**_clean(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "2"  # the shell and dvc
