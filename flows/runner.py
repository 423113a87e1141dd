"""Runs stages as child processes, `dvc repro --single-item`, and ends them whole. No Prefect."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import StageFailed
from rlhf.lifeline import OWNERS_VARIABLE, ident
from rlhf.progress import PROGRESS_VARIABLE
from rlhf.tracking import FLOW_RUN_VARIABLES, FORWARDER_VARIABLE

if TYPE_CHECKING:
    import psutil

LOGS = Path(".scratch/logs")
PROGRESS = Path(".scratch/progress")
_LOCK = Path(".scratch/flow.lock")
_SECONDS_TO_CHECKPOINT = 25.0
_NUM_TAIL_LINES = 25


@contextmanager
def workspace_lock(folder: str | Path = ".") -> Iterator[None]:
    """Hold this checkout: one flow at a time adds rounds and runs stages.

    A killed holder frees the lock at once. Taking it twice in one process is allowed.
    """
    from filelock import FileLock, Timeout

    path = Path(folder).resolve() / _LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = path.with_suffix(".owner")
    lock = FileLock(path, timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except Timeout:
        try:
            text = owner.read_text(encoding="utf-8").strip()
        except OSError:
            text = "another process"
        raise StageFailed(
            f"busy: held by {text}\n  mend: wait until it has finished, or stop it, then try again"
        ) from None
    try:
        owner.write_text(f"pid {os.getpid()} ({' '.join(sys.argv)[:200]})\n", encoding="utf-8")
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class Outcome:
    """How a stage ended."""

    name: str
    ok: bool
    seconds: float
    log: Path
    message: str = ""


class Runner:
    """Starts, awaits and ends stages.

    Args:
        folder: the project's folder.
        parallel: stages side by side.
        gpus: devices to hand out, one to each stage that asks.
        timeout: seconds a stage may take.
        on_begin: called with a stage's name when its process starts.
        on_end: called with its name and whether it succeeded.
    """

    def __init__(
        self,
        folder: str | Path = ".",
        *,
        parallel: int = 1,
        gpus: int = 0,
        timeout: float = 24 * 3600,
        on_begin: Callable[[str], None] = lambda name: None,
        on_end: Callable[[str, bool], None] = lambda name, ok: None,
    ) -> None:
        self.folder = Path(folder).resolve()
        self.timeout = timeout
        self.flow_run_id = ""
        self.outcomes: dict[str, Outcome] = {}
        self._slots = threading.BoundedSemaphore(parallel)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, float] = {}
        self._turns: dict[str, threading.Lock] = {}
        self._mutex = threading.Lock()
        self._on_begin, self._on_end = on_begin, on_end
        self._halt = threading.Event()
        visible = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
        self._devices = (visible or [str(i) for i in range(gpus)])[:gpus]

    @property
    def halted(self) -> bool:
        """Whether no further stage starts, because one failed or the flow ends."""
        return self._halt.is_set()

    @property
    def running(self) -> list[str]:
        """Names of the stages at work."""
        return [name for name, process in self._processes.items() if process.poll() is None]

    @property
    def failures(self) -> list[Outcome]:
        """The stages that failed, in the order they did."""
        return [outcome for outcome in self.outcomes.values() if not outcome.ok]

    def log_path(self, name: str) -> Path:
        """Where a stage's output goes."""
        return self.folder / LOGS / f"{name}.log"

    def progress_path(self, name: str) -> Path:
        """Where a stage says how far it is."""
        return self.folder / PROGRESS / f"{name}.json"

    def _start(self, name: str, device: str | None) -> None:
        """Start a stage's process, unless the run is being ended."""
        with self._mutex:
            if self.halted:
                return
            log, progress = self.log_path(name), self.progress_path(name)
            for path in (log, progress):
                path.parent.mkdir(parents=True, exist_ok=True)
            progress.unlink(missing_ok=True)
            command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item"]
            with log.open("wb") as output:  # a file: a pipe would break when this process dies
                self._processes[name] = subprocess.Popen(
                    [*command, name],
                    cwd=self.folder,
                    env=self._environment(name, device),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self._started[name] = time.monotonic()

    def run(self, name: str, *, gpu: bool = False) -> Outcome | None:
        """Run a stage to its end when a slot is free; None if it was not started any more.

        A second call for the same stage awaits the first one's outcome.
        """
        with self._mutex:
            turn = self._turns.setdefault(name, threading.Lock())
        with turn:
            if name in self.outcomes:
                return self.outcomes[name]
            with self._slots:
                device = None
                if gpu:
                    with self._mutex:
                        device = self._devices.pop(0) if self._devices else None
                try:
                    self._start(name, device)
                    if name not in self._processes:
                        return None
                    self._on_begin(name)
                    outcome = self._wait(name)
                finally:
                    if device is not None:
                        self._devices.append(device)
            self.outcomes[name] = outcome
        if not outcome.ok:
            self._halt.set()
        self._on_end(name, outcome.ok)
        return outcome

    def end_all(self) -> None:
        """Start nothing more, and end what runs: SIGTERM to whole trees, SIGKILL to what stays."""
        self._halt.set()
        with self._mutex:
            processes = list(self._processes.values())
        end_trees([process.pid for process in processes if process.poll() is None])

    def _wait(self, name: str) -> Outcome:
        process, started = self._processes[name], self._started[name]
        log = self.log_path(name)
        late = False
        try:
            code = process.wait(timeout=max(0.0, self.timeout - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            late = True
            end_trees([process.pid])
            code = process.wait()
        except BaseException:
            end_trees([process.pid])
            raise
        seconds = time.monotonic() - started
        if code == 0 and not late:
            return Outcome(name, True, seconds, log)
        why = f"took longer than {self.timeout:g} s" if late else "failed"
        shown = os.path.relpath(log, self.folder)
        return Outcome(
            name, False, seconds, log, f"{name} {why}; the end of {shown}:\n{end_of(log)}"
        )

    def _environment(self, name: str, device: str | None) -> dict[str, str]:
        owners = [ident(os.getpid())]
        if os.environ.get("PREFECT__FLOW_RUN_ID"):
            owners.append(ident(os.getppid()))  # the worker
        environment = {
            **os.environ,
            OWNERS_VARIABLE: " ".join(owners),
            FORWARDER_VARIABLE: ident(os.getpid()),
            PROGRESS_VARIABLE: str(self.progress_path(name)),
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "DVC_NO_ANALYTICS": "1",
        }
        if self.flow_run_id:
            environment[FLOW_RUN_VARIABLES[0]] = self.flow_run_id
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        return environment


def end_trees(pids: list[int], grace: float = _SECONDS_TO_CHECKPOINT) -> None:
    """End processes and all below them: SIGTERM, time to write a checkpoint, SIGKILL."""
    import psutil

    members: list[psutil.Process] = []
    for pid in pids:
        try:
            root = psutil.Process(pid)
            members += [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            continue
    for member in members:
        _signal(member, "terminate")
    left = _outlasting(members, grace)
    for member in left:
        _signal(member, "kill")
    _outlasting(left, 5)


def _outlasting(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after so many seconds.

    Looks without reaping, as psutil's own wait would: who started a process learns its exit code.
    """
    import psutil

    def runs(process: psutil.Process) -> bool:
        try:
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    end = time.monotonic() + seconds
    left = [process for process in processes if runs(process)]
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [process for process in left if runs(process)]
    return left


def _signal(process: object, name: str) -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):
        getattr(process, name)()


def end_of(log: Path, lines: int = _NUM_TAIL_LINES) -> str:
    """The last lines of a log, indented; of an empty one, the likely reason: a full disk leaves no log."""
    free = shutil.disk_usage(log.parent).free // 2**20
    found = tail_of(log, lines) or [f"(empty; {free} MB of disk are left)"]
    return "\n".join(f"    {line}" for line in found)


def tail_of(log: Path, lines: int = _NUM_TAIL_LINES) -> list[str]:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64_000))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
