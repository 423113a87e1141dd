"""What DVC killed while it writes leaves: the old dvc.lock, and a list of readers and writers that it can read."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


# DVC's own way to say what a stage reads and writes, stopped while it writes that down.
READS_AND_WRITES = """
import json, sys, time
from pathlib import Path
from dvc.fs import localfs
from dvc.rwlock import rwlock
import dvc.rwlock
pace, ours = sys.argv[1:]
if ours == "ours":
    from flows.dvcrun import write_whole
    write_whole()
whole = json.dump
def dump(data, stream):
    if pace == "slow":
        stream.write('{"wri')
        stream.flush()
        Path("half").touch()
        time.sleep(60)
    whole(data, stream)
dvc.rwlock.json.dump = dump
with rwlock(".", localfs, "a stage", ["in"], ["out"], False):
    print(Path("rwlock").read_text())
"""


def read_and_write(folder: Path, pace: str, whose: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", READS_AND_WRITES, pace, whose]
    return subprocess.Popen(words, cwd=folder, text=True, stdout=subprocess.PIPE)


@pytest.mark.parametrize("whose", ["ours", "plain"])
def test_a_kill_while_dvc_writes_who_reads_and_writes_stops_nobody(
    tmp_path: Path, whose: str
) -> None:
    """`plain`: a `dvc` that no flow has started leaves half the file."""
    assert read_and_write(tmp_path, "quick", whose).wait() == 0
    before = (tmp_path / "rwlock").read_text()
    process = read_and_write(tmp_path, "slow", whose)
    while not (tmp_path / "half").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "rwlock").read_text() == (before if whose == "ours" else '{"wri')

    process = read_and_write(tmp_path, "quick", "ours")
    printed, _ = process.communicate()
    assert process.returncode == 0
    assert '"out": {"pid": ' in printed
    assert {path.name for path in tmp_path.iterdir()} == {"rwlock", "rwlock.lock", "half"}
