"""Stages as processes of their own that can be struck at any point, started in milliseconds.

They are forked from a process that has imported everything, and run the stage's module as `python -m` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ruamel.yaml import YAML

from rlhf import tracking
from rlhf.lifeline import OWNERS_VARIABLE, ident
from rlhf.progress import PROGRESS_VARIABLE
from rlhf.resume import FOLDER, content_digest

SLOW_TO_IMPORT = (
    "datasets", "pandera.pandas", "transformers.models.llama.modeling_llama", "transformers.core_model_loading"
)  # fmt: skip
BEGINS = "Scratch.load"
PRELOADED = (
    "sft",
    "reward_model",
    "policy",
)  # stages that may not see gold refuse a process that has
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000


@dataclass(frozen=True)
class Strike:
    """A signal that a stage gets at its `at`-th call of a Python function, from 1, after it looked for checkpoints.

    With `inside`, a function's qualified name, only calls below that function count, whenever they come. The
    same stage with the same inputs makes the same calls, so a strike can be repeated. With `memory`, there is none
    left at that call, as torch tells it, instead of a signal.
    """

    at: int
    signal: int = signal.SIGKILL
    inside: str | None = None
    memory: bool = False


@dataclass(frozen=True)
class Attempt:
    """How a process ended: exit code (minus the signal's number), what it printed, calls it made."""

    code: int
    log: str
    calls: int


class Project:
    """A folder with pipeline.yaml, in which stages run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def copy(self, folder: Path) -> Project:
        """The same project elsewhere."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project(folder)

    def change(self, edit: Callable[[dict[str, Any]], None]) -> None:
        """Edit pipeline.yaml."""
        path, yaml = self.folder / "pipeline.yaml", YAML()
        yaml.width = 4096
        pipeline = yaml.load(path.read_text(encoding="utf-8"))
        edit(pipeline)
        with path.open("w", encoding="utf-8") as file:
            yaml.dump(pipeline, file)

    def run(
        self,
        stage: str,
        *arguments: str,
        strike: Strike | None = None,
        count: bool = False,
        disk: int | None = None,
        timeout: float = 300.0,
    ) -> Attempt:
        """Run `python -m tasks.<stage> <arguments>` here, to its end.

        Args:
            stage: module of `tasks/`.
            strike: what hits it.
            count: count its calls, which a strike needs to know; slower.
            disk: bytes of room under `.scratch/resume`, by a file system of the process's own.
            timeout: seconds.
        """
        log = self.folder / ".attempt.log"
        plan = {
            "folder": self.folder, "stage": stage, "arguments": arguments, "log": log,
            "strike": strike, "count": count or strike is not None, "disk": disk, "owner": ident(os.getpid()),
        }  # fmt: skip
        process = _context().Process(target=_child, args=(plan,))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"{stage} took over {timeout} s\n{log.read_text()}")
        calls = log.with_suffix(".calls")
        made = json.loads(calls.read_text()) if calls.exists() else 0
        calls.unlink(missing_ok=True)
        assert process.exitcode is not None
        return Attempt(process.exitcode, log.read_text(encoding="utf-8"), made)

    def done(self, stage: str, *arguments: str, **options: Any) -> Attempt:
        """As `run`; fails with what it printed unless it ended well."""
        attempt = self.run(stage, *arguments, **options)
        assert attempt.code == 0, f"{stage} {arguments} ended with {attempt.code}\n{attempt.log}"
        return attempt

    def digest(self, *outputs: str) -> dict[str, str]:
        """Hash of each output, a file or a directory; "" where it is missing."""
        return {
            name: content_digest(self.folder / name) if (self.folder / name).exists() else ""
            for name in outputs
        }

    def points(self, stage: str) -> list[tuple[str, int, str, float]]:
        """What a stage (its name in DVC) told MLflow and still stands: curve or summary, step, metric, value."""
        spools = (self.folder / tracking.SPOOL).glob(f"{tracking._file_name(stage)}-*.jsonl")
        path = max(spools, key=lambda spool: spool.stat().st_mtime_ns)  # others: of other settings
        attempts = tracking._Attempts()
        for event in tracking._Tail(path).read(0)[0]:
            attempts.note(event)
        return sorted(
            (event["event"], event.get("step", 0), name, value)
            for event in attempts.events
            if event["event"] in ("metrics", "summary")
            for name, value in event["values"].items()
        )

    def checkpoints(self, stage: str) -> list[Path]:
        """The whole checkpoints of a stage (its name in DVC), oldest first."""
        home = self.folder / FOLDER / stage.replace("@", "-")
        return sorted(p for p in home.glob("*/*.pt") if p.with_suffix(".json").exists())

    def remove(self, *outputs: str) -> None:
        """Remove outputs, as DVC does before it runs a stage."""
        for name in outputs:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def survives_kills(
    project: Project,
    stage: str,
    *arguments: str,
    outputs: Sequence[str],
    kills: int = 3,
    seed: int | None = None,
) -> list[Attempt]:
    """The stage, killed at random points and run again, ends as a run that nothing disturbs: outputs and curves.

    The first kill comes about half way, when a step is done and saved; the later ones a little after the run went
    on. Before a rerun the outputs are removed, as DVC does. Returns the attempts after the kills.

    Args:
        outputs: files and directories, from the project's folder.
        seed: of the points; by default another one each time, printed, so that a failure can be repeated.
    """
    straight = project.done(stage, *arguments, count=True)
    expected = project.digest(*outputs)
    assert "" not in expected.values(), expected
    name = "@".join([stage, *arguments[1:]])
    points = project.points(name)
    assert len({point[:3] for point in points}) == len(points) > 0
    seed = time.time_ns() if seed is None else seed
    dice = random.Random(seed)
    print(f"{stage} {arguments}: seed={seed}, {straight.calls} calls")
    attempts = []
    for number in range(kills):
        project.remove(*outputs)
        share = dice.uniform(0.4, 0.65) if number == 0 else dice.uniform(0.01, 0.4 / kills)
        at = max(1, int(straight.calls * share))
        attempts.append(project.run(stage, *arguments, strike=Strike(at)))
        print(f"kill at call {at}: {attempts[-1].log.strip()}")
        assert attempts[-1].code == -signal.SIGKILL, attempts[-1].log
    project.remove(*outputs)
    attempts.append(project.done(stage, *arguments))
    assert project.digest(*outputs) == expected
    assert project.points(name) == points
    return attempts[1:]


_prepared: Any = None


def _context() -> Any:
    global _prepared
    if _prepared is None:
        # The server inherits these: threads that are not there at the fork, and no look at CUDA.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _prepared = multiprocessing.get_context("forkserver")
        modules = [f"tasks.{name}" for name in PRELOADED]
        _prepared.set_forkserver_preload([__name__, *modules, *SLOW_TO_IMPORT])
    return _prepared


def _child(plan: dict[str, Any]) -> None:
    _redirect(plan["log"])
    os.chdir(plan["folder"])
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    for name in (OWNERS_VARIABLE, PROGRESS_VARIABLE, "DVC_STAGE"):
        os.environ.pop(name, None)
    os.environ[tracking.FORWARDER_VARIABLE] = plan["owner"]  # no MLflow in the stage
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if plan["disk"] is not None:
        _bounded_disk(plan["folder"] / FOLDER, plan["disk"])
    sys.argv = [f"tasks.{plan['stage']}", *plan["arguments"]]
    counter = _Counter(plan["strike"], plan["log"].with_suffix(".calls"))
    warnings.simplefilter("ignore")  # of runpy: the module is imported already
    with counter if plan["count"] else contextlib.nullcontext():
        runpy.run_module(f"tasks.{plan['stage']}", run_name="__main__", alter_sys=True)


class _Counter:
    """Counts calls of Python functions, and strikes at the declared one."""

    def __init__(self, strike: Strike | None, path: Path) -> None:
        self.strike, self.path = strike, path
        self.calls = self.depth = 0
        self.counts = strike is not None and strike.inside is not None

    def __enter__(self) -> None:
        sys.setprofile(self._event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.path.write_text(json.dumps(self.calls))

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        strike = self.strike
        if strike is not None and strike.inside is not None:
            if event in ("call", "return") and frame.f_code.co_qualname == strike.inside:
                self.depth += 1 if event == "call" else -1
            if not self.depth:
                return
        if event != "call":
            return
        self.counts = self.counts or frame.f_code.co_qualname == BEGINS
        self.calls += self.counts
        if strike is not None and self.calls == strike.at and self.counts:
            if strike.memory:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
            os.kill(os.getpid(), strike.signal)


def _redirect(log: Path) -> None:
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _bounded_disk(place: Path, size: int) -> None:
    """A memory file system at `place`, seen by this process only. Ends with code 99 where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    place.mkdir(parents=True, exist_ok=True)
    try:
        _check(libc.unshare(_NEW_USER | _NEW_MOUNTS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _check(libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={size}".encode()))
    except OSError:
        traceback.print_exc()
        os._exit(99)


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
