"""dvc.lock is replaced in one step: DVC killed while it writes leaves the old one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

OLD = "schema: '2.0'\nstages:\n  a:\n    cmd: one\n"

# DVC's own way to add an entry, with a dumper that stops in the middle.
ADDS_AN_ENTRY = """
import sys, time
from pathlib import Path
from dvc.utils.serialize import _yaml, modify_yaml
from flows.dvcrun import write_whole
write_whole()
whole = _yaml._dump
def dump(data, stream):
    if sys.argv[2] == "slow":
        stream.write("sch")
        stream.flush()
        Path("half").touch()
        time.sleep(60)
    whole(data, stream)
_yaml._dump = dump
with modify_yaml(sys.argv[1]) as lock:
    lock["stages"]["b"] = {"cmd": "two"}
"""


def add_entry(folder: Path, pace: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", ADDS_AN_ENTRY, str(folder / "dvc.lock"), pace]
    return subprocess.Popen(words, cwd=folder)


def test_a_kill_while_dvc_writes_its_lock_leaves_the_old_one(tmp_path: Path) -> None:
    lock = tmp_path / "dvc.lock"
    lock.write_text(OLD)
    lock.chmod(0o640)
    process = add_entry(tmp_path, "slow")
    while not (tmp_path / "half").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert lock.read_text() == OLD

    assert add_entry(tmp_path, "quick").wait() == 0
    assert lock.read_text() == OLD + "  b:\n    cmd: two\n"
    assert lock.stat().st_mode & 0o777 == 0o640
    assert list((tmp_path / ".scratch").iterdir()) == []
