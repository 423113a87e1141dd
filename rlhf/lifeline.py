"""A stage ends with its owners: no orphan keeps a GPU or writes into outputs that nobody guards.

The owners are every ancestor process up to DVC, and those named in ROUNDHOUSE_OWNERS (the flow and
its worker) as `pid:start` words. The start time makes the pair safe against reused process ids. A
thread looks twice a second; when an owner is gone it sends this process SIGTERM, so that the stage
saves its checkpoint, and SIGKILL when that takes longer than ROUNDHOUSE_GRACE seconds.

Call `hold()` before importing torch: the seconds an import takes are guarded too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.errors import BadInput

OWNERS_VARIABLE = "ROUNDHOUSE_OWNERS"
GRACE_VARIABLE = "ROUNDHOUSE_GRACE"
_GRACE = 25.0  # Prefect's worker kills a cancelled run after 30 s
_PROGRAMS = ("dvc", "flows.dvcrun")


@dataclass(frozen=True)
class _Process:
    parent: int
    start: int
    dead: bool


def ident(pid: int) -> str:
    """`pid:start` of a running process; ProcessLookupError when there is none."""
    process = _look(pid)
    if process is None:
        raise ProcessLookupError(pid)
    return f"{pid}:{process.start}"


def alive(owner: str) -> bool:
    """Whether the process `pid:start` still runs.

    A zombie, and another process with its id, do not count.
    """
    pid, start = (int(part) for part in owner.split(":"))
    process = _look(pid)
    return process is not None and process.start == start and not process.dead


def owners() -> list[str] | None:
    """The processes this one depends on; None when one of them ended while we looked."""
    found = []
    pid = os.getppid()
    while pid > 1:
        process = _look(pid)
        if process is None:
            return None
        found.append(f"{pid}:{process.start}")
        if _is_dvc(pid):
            break
        pid = process.parent
    else:
        found = found[:1]  # started by hand: only the direct parent is an owner
    return found + os.environ.get(OWNERS_VARIABLE, "").split()


def grace() -> float:
    """Seconds that a process has between SIGTERM and SIGKILL to finish its step and save: ROUNDHOUSE_GRACE, else 25."""
    text = os.environ.get(GRACE_VARIABLE, "")
    try:
        seconds = float(text or _GRACE)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise BadInput(
            f"{GRACE_VARIABLE}={text}",
            where="environment",
            rule="seconds between SIGTERM and SIGKILL, >= 0",
            mend=f"unset it (then {_GRACE:g}), or give it the seconds that a step and its checkpoint take",
        )
    return seconds


def hold(every: float = 0.5, grace: float | None = None) -> bool:
    """Tie this process to its owners, if DVC or a flow started it. Returns whether it is tied.

    Args:
        every: seconds between looks.
        grace: seconds between SIGTERM and SIGKILL; None: as `grace()` says.
    """
    if not (os.environ.get("DVC_STAGE") or os.environ.get(OWNERS_VARIABLE)):
        return False
    watch(owners(), every=every, grace=grace)
    return True


def watch(owners: Sequence[str] | None, every: float = 0.5, grace: float | None = None) -> None:
    """End this process, as `hold` does, when one of these `pid:start` owners ends; None: it has ended already."""
    seconds = _grace_of_a_stage() if grace is None else grace

    def look() -> None:
        while owners is not None and all(alive(owner) for owner in owners):
            time.sleep(every)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    threading.Thread(target=look, name="lifeline", daemon=True).start()


def _grace_of_a_stage() -> float:
    """A wrong ROUNDHOUSE_GRACE is told by the flow; a stage by itself takes the default."""
    try:
        return grace()
    except BadInput:
        return _GRACE


def _look(pid: int) -> _Process | None:
    if not sys.platform.startswith("linux"):
        return _look_portable(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold spaces
    return _Process(parent=int(fields[1]), start=int(fields[19]), dead=fields[0] in b"ZX")


def _look_portable(pid: int) -> _Process | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return _Process(
            parent=process.ppid(),
            start=int(process.create_time() * 100),
            dead=process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD),
        )
    except psutil.Error:
        return None


def _command_line(pid: int) -> list[str]:
    if sys.platform.startswith("linux"):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return file.read().decode(errors="replace").split("\0")
        except OSError:
            return []
    import psutil

    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def _is_dvc(pid: int) -> bool:
    return any(os.path.basename(word) in _PROGRAMS for word in _command_line(pid)[:3])
