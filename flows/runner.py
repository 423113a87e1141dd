"""Runs stages as child processes, `dvc repro --single-item`, and ends them whole. No Prefect."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import BadInput, Interrupted, StageFailed
from rlhf.lifeline import OWNERS_VARIABLE, ident
from rlhf.lifeline import grace as grace_seconds
from rlhf.progress import PROGRESS_VARIABLE
from rlhf.tracking import FLOW_RUN_VARIABLES, FORWARDER_VARIABLE

if TYPE_CHECKING:
    import psutil
    from filelock import BaseFileLock as FileLock

LOGS = Path(".scratch/logs")
PROGRESS = Path(".scratch/progress")
_LOCK = Path(".scratch/flow.lock")
_NUM_TAIL_LINES = 25
_SECONDS_BETWEEN_TRIES = 2.0  # while another DVC process holds a stage
_DVC = [sys.executable, "-m", "flows.dvcrun"]
_BUSY = "is busy, it is being blocked by"


@contextmanager
def workspace_lock(
    folder: str | Path = ".",
    *,
    wait: float = 0.0,
    on_wait: Callable[[str], None] = lambda message: None,
) -> Iterator[None]:
    """Hold this checkout: one flow at a time adds rounds and runs stages.

    A killed holder frees the lock at once. Taking it twice in one process is allowed.

    Args:
        folder: the project's folder.
        wait: seconds to wait for another holder.
        on_wait: called once with who holds it, when that is another.
    """
    from filelock import FileLock, Timeout

    path = Path(folder).resolve() / _LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = path.with_suffix(".owner")
    lock = FileLock(path, timeout=0, is_singleton=True)
    try:
        try:
            lock.acquire()
        except Timeout:
            if wait <= 0:
                raise
            on_wait(f"waits up to {wait:g} s: this checkout is held by {_holder(owner)}")
            lock.acquire(timeout=wait, poll_interval=0.2)
    except Timeout:
        raise StageFailed(
            f"busy: held by {_holder(owner)}\n"
            "  mend: wait until it has finished, or stop it, then try again"
        ) from None
    try:
        owner.write_text(f"pid {os.getpid()} ({' '.join(sys.argv)[:200]})\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def _holder(owner: Path) -> str:
    try:
        return owner.read_text(encoding="utf-8").strip()
    except OSError:
        return "another process"


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
        gpus: devices to hand out, one to each stage that asks. The others see none. BadInput if none is visible.
        timeout: seconds a stage may take, and may wait for another DVC process that is at it.
        push: whether a finished stage's outputs go to the DVC remote.
        halt_on_failure: whether nothing more starts once a stage has failed.
        on_begin: called with a stage's name when its process starts.
        on_end: called with its name and whether it succeeded.
        on_note: called with a stage's name and what people should know about it, in words.
    """

    def __init__(
        self,
        folder: str | Path = ".",
        *,
        parallel: int = 1,
        gpus: int = 0,
        timeout: float = 24 * 3600,
        push: bool = False,
        halt_on_failure: bool = True,
        on_begin: Callable[[str], None] = lambda name: None,
        on_end: Callable[[str, bool], None] = lambda name, ok: None,
        on_note: Callable[[str, str], None] = lambda name, message: None,
    ) -> None:
        self.folder = Path(folder).resolve()
        self.timeout = timeout
        self.push = push
        self.halt_on_failure = halt_on_failure
        self.grace = grace_seconds()
        self.flow_run_id = ""
        self.outcomes: dict[str, Outcome] = {}
        self._slots = threading.BoundedSemaphore(parallel)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, float] = {}
        self._turns: dict[str, threading.Lock] = {}
        self._mutex = threading.Lock()
        self._on_begin, self._on_end, self._on_note = on_begin, on_end, on_note
        self._halt = threading.Event()
        self._devices = devices(gpus)

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

    def run(self, name: str, *, gpu: bool = False, force: bool = False) -> Outcome | None:
        """Run a stage to its end when a slot is free; None if it was not started any more.

        A second call for the same stage awaits the first one's outcome.

        Args:
            name: like `policy@r1-ppo`.
            gpu: whether it is given a device, if there are any.
            force: whether it runs though it is up to date.
        """
        with self._mutex:
            turn = self._turns.setdefault(name, threading.Lock())
        with turn:
            if name in self.outcomes:
                return self.outcomes[name]
            outcome = self._run(name, gpu, force)
            if outcome is None:
                return None
            self.outcomes[name] = outcome
        if not outcome.ok and self.halt_on_failure:
            self._halt.set()
        self._on_end(name, outcome.ok)
        return outcome

    def forget(self, names: Iterable[str]) -> None:
        """Let these stages run again."""
        for name in names:
            self.outcomes.pop(name, None)

    def end_all(self) -> None:
        """Start nothing more, and end what runs: SIGTERM to whole trees, SIGKILL to what stays."""
        self._halt.set()
        with self._mutex:
            processes = list(self._processes.values())
        end_trees([p.pid for p in processes if p.poll() is None], self.grace)

    def _run(self, name: str, gpu: bool, force: bool) -> Outcome | None:
        """Run a stage in a slot, again while another DVC process is at it."""
        # In this order: who waits for a GPU leaves the slots to others, and who has a slot waits for nothing.
        with self._device(name, gpu) as device, self._slots:
            began = time.monotonic()
            told = False
            while True:
                if not self._start(name, device, force):
                    return None
                if not told:
                    self._on_begin(name)
                outcome = self._wait(name)
                waited = time.monotonic() - began
                if outcome.ok or not self._is_busy(outcome.log) or waited > self.timeout:
                    break
                if not told:
                    self._on_note(name, f"waits: {self._is_busy(outcome.log)}")
                    told = True
                if self._halt.wait(_SECONDS_BETWEEN_TRIES):
                    return None
            if outcome.ok and self.push:
                self._push(name)
        return replace(outcome, seconds=time.monotonic() - began)

    @contextmanager
    def _device(self, name: str, gpu: bool) -> Iterator[str | None]:
        """A device for as long as the stage runs; "" if it is to see none, None if there is no choice to make."""
        if not self._devices or not gpu:
            yield "" if self._devices else None
            return
        lock, device = None, ""
        told = False
        while lock is None and not self.halted:
            lock, device = self._free_device()
            if lock is None:
                if not told:
                    self._on_note(name, f"waits for a GPU ({', '.join(self._devices)})")
                told = True
                self._halt.wait(0.2)
        try:
            yield device
        finally:
            if lock is not None:
                lock.release()

    def _free_device(self) -> tuple[FileLock | None, str]:
        """A device that no stage of this host has, with its lock, which a killed holder frees."""
        from filelock import FileLock as Lock
        from filelock import Timeout

        folder = Path(tempfile.gettempdir()) / f"roundhouse-gpus-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        for device in self._devices:
            lock = Lock(folder / f"{re.sub('[^A-Za-z0-9-]', '_', device)}.lock", timeout=0)
            with suppress(Timeout):
                lock.acquire()
                return lock, device
        return None, ""

    def _start(self, name: str, device: str | None, force: bool) -> bool:
        """Start a stage's process, unless the run is being ended."""
        with self._mutex:
            if self.halted:
                return False
            log, progress = self.log_path(name), self.progress_path(name)
            for path in (log, progress):
                path.parent.mkdir(parents=True, exist_ok=True)
            progress.unlink(missing_ok=True)
            words = ["--wait-for-lock", "repro", "--single-item", *(["--force"] if force else [])]
            with log.open("wb") as output:  # a file: a pipe would break when this process dies
                self._processes[name] = subprocess.Popen(
                    [*_DVC, *words, name],
                    cwd=self.folder,
                    env=self._environment(name, device),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            self._started[name] = time.monotonic()
            return True

    def _wait(self, name: str) -> Outcome:
        process, started = self._processes[name], self._started[name]
        log, kills = self.log_path(name), _kernel_kills()
        late = False
        try:
            code = process.wait(timeout=max(0.0, self.timeout - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            late = True
            end_trees([process.pid], self.grace)
            code = process.wait()
        except BaseException:
            end_trees([process.pid], self.grace)
            raise
        seconds = time.monotonic() - started
        if code == 0 and not late:
            return Outcome(name, True, seconds, log)
        shown = os.path.relpath(log, self.folder)
        why = f"took longer than {self.timeout:g} s" if late else ""
        why = why or _how_it_ended(tail_of(log), code, _kernel_kills() > kills)
        message = f"{name} {why}"
        if INTERRUPTED not in why:
            message += f"; the end of {shown}:\n{end_of(log)}"
        return Outcome(name, False, seconds, log, message)

    def _is_busy(self, log: Path) -> str:
        """Who holds the stage, if that is why DVC did not start it."""
        lines = tail_of(log)
        if not any(_BUSY in line for line in lines):
            return ""
        found = re.search(r"\(PID \d+\)[^\n]*", "\n".join(lines))
        return f"another process is at it {found[0]}" if found else "another process is at it"

    def _push(self, name: str) -> None:
        log = self.folder / LOGS / f"push {name}.log"
        with log.open("wb") as output:
            pushed = subprocess.run(
                [*_DVC, "push", name],
                cwd=self.folder,
                env=self._environment(name, None),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if pushed.returncode:
            self._on_note(
                name,
                f"was not pushed to the DVC remote; its outputs are kept here\n{end_of(log, 4)}\n"
                f"  mend: dvc push {name}",
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


INTERRUPTED = "was interrupted"


def _how_it_ended(lines: list[str], code: int, killed_by_kernel: bool) -> str:
    """Why a stage or its DVC ended badly, from the end of its log and DVC's exit code."""
    text = "\n".join(lines)
    said = re.findall(r"exited with (-?\d+)", text)
    stage_code = int(said[-1]) if said else 0
    step = re.search(r"stopped after step (\d+)", text)
    if step or stage_code == Interrupted.exit_code:
        return f"{INTERRUPTED}; run again, it continues from " + (
            f"step {step[1]}" if step else "its last checkpoint"
        )
    number = next((-c for c in (stage_code, code) if c < 0), max(stage_code - 128, 0))
    if number == 9:
        memory = (
            " by the kernel: out of memory\n  mend: lower micro_batch_size or resources.parallel"
        )
        return "was killed" + (
            memory if killed_by_kernel else " (signal 9): out of memory, or kill -9"
        )
    if number:
        return f"was ended by signal {number}; run again, it continues from its last checkpoint"
    return "failed"


def _kernel_kills() -> int:
    """Processes of this process's control group that the kernel killed for want of memory; 0 where nobody counts."""
    with suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rsplit("::", 1)[1]
        events = Path(f"/sys/fs/cgroup{group}/memory.events").read_text(encoding="utf-8")
        return int(events.split("oom_kill ")[1].split()[0])
    return 0


def devices(count: int) -> list[str]:
    """The first devices that this process may use. Raises BadInput where all are hidden and some are wanted."""
    declared = os.environ.get("CUDA_VISIBLE_DEVICES")
    if declared is None:
        return [str(number) for number in range(count)]
    visible = list(takewhile(lambda d: d not in ("", "-1"), map(str.strip, declared.split(","))))
    if count and not visible:
        raise BadInput(
            f"resources.gpus is {count}, and CUDA_VISIBLE_DEVICES={declared!r} hides every GPU",
            where="pipeline.yaml resources.gpus",
            rule="a stage that takes a GPU slot is given a visible device",
            mend="unset CUDA_VISIBLE_DEVICES, or name devices in it, or set resources.gpus: 0",
        )
    return visible[:count]


def end_trees(pids: list[int], grace: float | None = None) -> None:
    """End processes and all below them: SIGTERM, time to write a checkpoint, SIGKILL."""
    import psutil

    grace = grace_seconds() if grace is None else grace

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
