"""Checkpoints from which a killed stage continues, bit for bit.

DVC removes a stage's outputs before it runs the stage, so these live apart, in
`.scratch/resume/<stage>/<key>`. The key is a hash of everything that the stage's result depends on:
the same inputs continue, other inputs start at the beginning. A checkpoint is one file of tensors
and plain values and, written after it, a small JSON file with its size and sha256; one that was cut
or damaged is passed over, aloud, for the one before it. A stage that finished removes its checkpoints.

    with resume.open_scratch(pipeline, "sft", inputs=[TABLES], params={...}) as scratch:
        state = scratch.load()              # None: from the beginning
        ...
        scratch.step(n, collect)            # after step n; saves when due, or when asked to stop
        ...
        scratch.finish()                    # once the outputs are in place

From `load` on SIGTERM and SIGINT do not stop the process at once: the step is finished, `step` saves
and raises `Interrupted`; a stage that is past its last step finishes. The same signal again stops it
where it is, unless it comes within 2 seconds: a flow that ends, DVC and the lifeline each ask once.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from rlhf import artifacts, lifeline
from rlhf.errors import OUT_OF_MEMORY, BadInput, Interrupted, disk_problem

if TYPE_CHECKING:
    from filelock import FileLock

    from rlhf.config import Checkpoints, Pipeline

FOLDER = Path(".scratch/resume")
FORMAT = 1
_SECONDS_BEYOND_GRACE = 35.0
_SECONDS_OF_ONE_REQUEST = 2.0

log = logging.getLogger("roundhouse")


class Stateful(Protocol):
    """What a checkpoint can hold: tensors, numbers, text, and lists and dicts of them."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@contextmanager
def open_scratch(
    pipeline: Pipeline,
    stage: str,
    *,
    inputs: Iterable[str | Path],
    params: Mapping[str, Any],
    folder: str | Path = ".",
) -> Iterator[Scratch]:
    """A stage's place for checkpoints.

    Waits for a predecessor that still writes its last one (it lost its owner and is ending).

    Args:
        pipeline: gives `resources.checkpoints`.
        stage: the stage's name in DVC, like `policy@r1-ppo`.
        inputs: files and directories that the stage reads; their content counts.
        params: settings that the stage reads, as JSON takes them.
        folder: the project's folder.
    """
    from filelock import FileLock, Timeout

    folder = Path(folder)
    home = folder / FOLDER / re.sub(r"[^\w.-]", "-", stage)
    key = fingerprint([folder / path for path in inputs], {"stage": stage, "params": params})
    with artifacts.disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(home / ".lock")
    try:
        with artifacts.disk_errors(home):
            lock.acquire(timeout=0)
    except Timeout:
        log.warning("%s: waits for the process that still runs it to end", stage)
        _wait_for(lock, stage, home)
    scratch = Scratch(home / key, stage, pipeline.resources.checkpoints)
    try:
        for other in home.iterdir():  # of other inputs: nothing will ask for them again
            if other.is_dir() and other.name != key:
                shutil.rmtree(other, ignore_errors=True)
        yield scratch
    finally:
        scratch.release()
        lock.release()


def _wait_for(lock: FileLock, stage: str, home: Path) -> None:
    from filelock import Timeout

    try:
        lock.acquire(timeout=lifeline.grace() + _SECONDS_BEYOND_GRACE)
    except Timeout:
        raise BadInput(
            f"another process runs {stage} in this folder",
            where=str(home),
            rule="one process at a time runs a stage",
            mend="wait until it has ended, or end it, then run again",
        ) from None


class Scratch:
    """Checkpoints of one stage with one set of inputs. Made by `open_scratch`."""

    def __init__(self, place: Path, stage: str, settings: Checkpoints) -> None:
        self.place, self.stage, self.settings = place, stage, settings
        self.resumed_at: int | None = None
        """Step of the checkpoint that was loaded."""
        self._asked: dict[int, float] = {}  # signal -> when it first came
        self._handlers: dict[int, Any] = {}
        self._last_step = 0  # of a checkpoint, written or tried
        self._last_time = time.monotonic()
        self._too_large = False
        self._synced: dict[str, int] = {}
        _code_digest()  # of the code that runs, not of what it is edited to meanwhile

    @property
    def key(self) -> str:
        """Hash of what the stage's result depends on."""
        return self.place.name

    @property
    def files(self) -> Path:
        """A directory for files of the stage's own that its checkpoints refer to. `finish` removes it.

        A checkpoint counts as whole only while each file that was there when it was written still is,
        and is at least as long. Names that begin with a dot do not count.
        """
        path = self.place / "files"
        with artifacts.disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def load(self) -> dict[str, Any] | None:
        """The state of the newest whole checkpoint, random generators set as they were; None without one.

        From here on the stage ends at a step only.
        """
        self._defer_signals()
        self._last_time = time.monotonic()
        steps = sorted(self._steps(), reverse=True)
        for step, before in itertools.pairwise([*steps, None]):
            assert step is not None
            try:
                state = self._read(step)
            except _UNREADABLE as error:
                self._tell_damage(step, error, before)
                self._remove(step)
                continue
            self.resumed_at = self._last_step = step
            _set_random_state(state.pop("_random"))
            log.warning("%s: continues after step %d", self.stage, step)
            return state
        return None

    def restore(self, apply: Callable[[dict[str, Any]], object]) -> bool:
        """`load`, and `apply` to what it found. Whether there was anything.

        Raises BadInput if the state is of another version of the code and does not fit this one.
        """
        state = self.load()
        if state is None:
            return False
        try:
            apply(state)
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            if any(words in repr(error) for words in OUT_OF_MEMORY):
                raise
            raise BadInput(
                f"the checkpoint of step {self.resumed_at} does not fit this version of the stage: "
                f"{type(error).__name__}: {error}",
                where=str(self.place),
                rule="a stage continues with the code that wrote its checkpoint",
                mend="go back to that code, or remove the folder, and the stage starts over",
            ) from error
        return True

    def step(self, number: int, collect: Callable[[], Mapping[str, Any]]) -> None:
        """Tell that step `number` (from 1, rising) is done; saves what `collect` returns when that is due.

        Raises Interrupted, after saving, if the stage was asked to stop.
        """
        due = (
            number - self._last_step >= self.settings.every_steps
            or time.monotonic() - self._last_time >= 60 * self.settings.every_minutes
        )
        if due or (self._asked and number != self._last_step):
            self.save(number, collect())
        if self._asked:
            raise Interrupted(
                f"stopped after step {number}; run it again, and it continues from {self._newest()}"
            )

    def save(self, number: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint now. A disk that is full costs the checkpoint, with a warning, not the run."""
        if self._too_large:
            return
        try:
            self._write(number, {**state, "_random": _random_state()})
        except Exception as error:
            problem = disk_problem(error) or (error.__cause__ and disk_problem(error.__cause__))
            if not problem:
                raise
            self._remove(number)
            log.warning(
                "%s: no checkpoint at step %d: %s; the stage goes on, and if it ends now it "
                "continues from %s\n  mend: %s",
                self.stage,
                number,
                problem[0],
                self._newest(),
                problem[1],
            )
        self._last_step, self._last_time = number, time.monotonic()

    def finish(self) -> None:
        """The stage's outputs are in place: forget the checkpoints."""
        shutil.rmtree(self.place, ignore_errors=True)

    def release(self) -> None:
        """Signals act at once again."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    # --- files ---

    def _steps(self) -> list[int]:
        return [int(path.stem) for path in self.place.glob("*.json") if path.stem.isdigit()]

    def _newest(self) -> str:
        steps = self._steps()
        return f"step {max(steps)}" if steps else "the beginning"

    def _data(self, step: int) -> Path:
        return self.place / f"{step:09d}.pt"

    def _meta(self, step: int) -> Path:
        return self.place / f"{step:09d}.json"

    def _remove(self, step: int) -> None:
        self._meta(step).unlink(missing_ok=True)
        self._data(step).unlink(missing_ok=True)

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        self._sweep()
        size = tensor_bytes(state)
        if size > self.settings.max_gigabytes * 1e9:
            self._too_large = True
            log.warning(
                "%s: a checkpoint takes %.3g GB, so none is written, and if the stage ends it continues "
                "from %s\n  rule: resources.checkpoints.max_gigabytes=%g\n  mend: raise it",
                self.stage,
                size / 1e9,
                self._newest(),
                self.settings.max_gigabytes,
            )
            return
        # Do not first fill the disk up for everybody. Some file systems do not know, and say 0.
        if 0 < shutil.disk_usage(self.place).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.place))
        with artifacts.temporary_file(self._data(step)) as new:
            digest, size = _save(state, new)
        meta = {
            "format": FORMAT,
            "stage": self.stage,
            "step": step,
            "bytes": size,
            "sha256": digest,
            "files": self._sync_files(),
            "code": _code_digest(),
            "versions": _versions(),
        }
        artifacts.write_json(self._meta(step), meta)
        _sync(self._meta(step))
        _sync(self.place)
        self._drop_old(step, size)

    def _sweep(self) -> None:
        """Remove what a process left that was killed while it wrote."""
        for left in self.place.glob(".*.new"):
            left.unlink(missing_ok=True)
        for data in self.place.glob("*.pt"):
            if not data.with_suffix(".json").exists():
                data.unlink(missing_ok=True)

    def _sync_files(self) -> dict[str, int]:
        """Bytes of each of the stage's own files, all of them on the disk."""
        root, found = self.place / "files", {}
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root)
            if not path.is_file() or any(part.startswith(".") for part in name.parts):
                continue
            size = found[name.as_posix()] = path.stat().st_size
            if self._synced.get(name.as_posix()) != size:
                _sync(path)
                _sync(path.parent)
        self._synced = found
        return found

    def _drop_old(self, newest: int, size: int) -> None:
        """Keep the declared number, within the declared size."""
        kept, total = 1, float(size)
        for step in sorted((s for s in self._steps() if s != newest), reverse=True):
            total += self._data(step).stat().st_size if self._data(step).exists() else 0
            if kept >= self.settings.keep or total > self.settings.max_gigabytes * 1e9:
                self._remove(step)
            kept += 1

    def _read(self, step: int) -> dict[str, Any]:
        """The state of a checkpoint; an error of `_UNREADABLE` if it is not whole."""
        import torch

        path = self._data(step)
        meta = artifacts.read_json(self._meta(step))
        if meta["format"] != FORMAT:
            raise ValueError(f"it has format {meta['format']}, this version reads {FORMAT}")
        if not path.is_file() or path.stat().st_size != meta["bytes"]:
            raise ValueError("it is cut short")
        for name, size in meta["files"].items():
            file = self.place / "files" / name
            if not file.is_file() or file.stat().st_size < size:
                raise ValueError(f"its file {name} is missing or cut short")
        if _sha256(path) != meta["sha256"]:
            raise ValueError("its content is not what was written")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for what, now, words in (
            ("code", _code_digest(), "code"),
            ("versions", _versions(), "versions of packages, or on another kind of machine"),
        ):
            if meta[what] != now:
                log.warning(
                    "%s: the checkpoint of step %d was written by other %s; the result may differ "
                    "from that of a run without a stop (to start over: remove %s)",
                    self.stage,
                    step,
                    words,
                    self.place,
                )
        return state

    def _tell_damage(self, step: int, error: BaseException, before: int | None) -> None:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        log.warning(
            "%s: the checkpoint of step %d cannot be used (%s); falling back to %s",
            self._data(step),
            step,
            words,
            "the beginning" if before is None else f"that of step {before}",
        )

    # --- signals ---

    def _defer_signals(self) -> None:
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return

        def ask(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if now - self._asked.setdefault(number, now) >= _SECONDS_OF_ONE_REQUEST:
                raise KeyboardInterrupt

        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, ask)


_UNREADABLE = (
    BadInput, ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, RuntimeError,
    pickle.UnpicklingError,
)  # fmt: skip


def fingerprint(paths: Iterable[Path], values: Mapping[str, Any]) -> str:
    """sha256, 24 hexadecimal digits, of the content of files and directories and of JSON values."""
    hasher = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode())
    for path in paths:
        hasher.update(f"\n{content_digest(path)}".encode())
    return hasher.hexdigest()[:24]


def content_digest(path: Path, without: Collection[str] = ()) -> str:
    """sha256 of a file, or of the names and contents of a directory's files; where it lies does not matter.

    Python's `__pycache__` does not count: it appears when code that is an input is imported.

    Args:
        without: files to leave out, by their names from the directory.
    """
    if path.is_file():
        return _sha256(path)
    hasher = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        if not file.is_file() or "__pycache__" in name.parts or name.as_posix() in without:
            continue
        hasher.update(f"{name.as_posix()}\0{_sha256(file)}\n".encode())
    return hasher.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Sink:
    """A file to write to that knows the sha256 and the bytes of what was written, and what went wrong."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hasher, self.size = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            count = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hasher.update(data)
        self.size += count
        return count

    def flush(self) -> None:
        self.file.flush()


def _save(state: Mapping[str, Any], path: Path) -> tuple[str, int]:
    """Write a state to the disk; sha256 and bytes. Raises OSError where torch says that a position is unexpected."""
    import torch

    with path.open("wb") as file:
        sink = _Sink(file)
        try:
            torch.save(dict(state), cast(BinaryIO, sink))
        except RuntimeError as error:
            raise sink.error or error from error
        file.flush()
        os.fsync(file.fileno())
    return sink.hasher.hexdigest(), sink.size


def tensor_bytes(state: Any) -> int:
    """What a state's tensors take on the disk; those that share memory count once."""
    import torch

    found: dict[tuple[str, int], int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[str(value.device), storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            for item in value.values():
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    visit(state)
    return sum(found.values())


def _sync(path: Path) -> None:
    """Have the operating system write it to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@functools.cache
def _code_digest() -> str:
    """Of the modules that compute."""
    root = Path(__file__).resolve().parents[1]
    hasher = hashlib.sha256()
    for package in ("rlhf", "tasks"):
        for path in sorted((root / package).rglob("*.py")):
            hasher.update(path.read_bytes())
    return hasher.hexdigest()[:16]


@functools.cache
def _versions() -> dict[str, str]:
    """Of what else decides the bits of a result."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        **{name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


# --- random generators ---


def _random_state() -> dict[str, Any]:
    """Of every global generator; generators of a stage's own are part of its state."""
    import numpy as np
    import torch

    bits: dict[str, Any] = dict(np.random.get_state(legacy=False))  # type: ignore[arg-type]
    inner = bits["state"]
    state = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {
            **{key: bits[key] for key in ("bit_generator", "has_gauss", "gauss")},
            "key": torch.from_numpy(inner["key"].astype("int64")),
            "pos": int(inner["pos"]),
        },
        "python": [state[0], list(state[1]), state[2]],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    import numpy as np
    import torch

    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    bits = dict(state["numpy"])
    inner = {"key": bits.pop("key").numpy().astype("uint32"), "pos": bits.pop("pos")}
    np.random.set_state({**bits, "state": inner})
    version_, internal, gauss = state["python"]
    random.setstate((version_, tuple(internal), gauss))
