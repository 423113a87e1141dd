"""How far a stage is, for people; and where its seconds went, for whoever makes it faster.

Both stay outside the hashed outputs: a progress file is overwritten, timings go to
`.scratch/timings`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PROGRESS_VARIABLE = "ROUNDHOUSE_PROGRESS"
TIMINGS = Path(".scratch/timings")
_NUM_SHOWN = 2
_SECONDS_BETWEEN_WRITES = 0.2


class Progress:
    """A bar with tokens per second and the two numbers that matter.

    Three ways to show it: into the file named by ROUNDHOUSE_PROGRESS (a flow draws it), as a bar
    when standard error is a terminal, else as one plain line at the end.

    Args:
        stage: what is running, like `policy r1-ppo`.
        total: how many units there are; may be changed later by assigning `total`.
        unit: what is counted.
        done: units that an earlier process finished; seconds and tokens are of this one alone.
    """

    def __init__(self, stage: str, total: int, unit: str = "steps", *, done: int = 0) -> None:
        self.stage = stage
        self.total = total
        self.unit = unit
        self.done = self.before = done
        self.tokens = 0
        self.numbers: dict[str, float] = {}
        self._start = time.monotonic()
        self._written = float("-inf")
        self._file = Path(os.environ[PROGRESS_VARIABLE]) if _variable() else None
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._write(force=True)
        elif sys.stderr.isatty():
            self._open_bar()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._write(force=True, ended=kind is None)
        elif self._bar is not None:
            self._bar.stop()
        elif kind is None:
            print(f"{self.stage}: {self.text()}", file=sys.stderr, flush=True)

    def update(self, done: int, *, tokens: int = 0, **numbers: float) -> None:
        """Tell where the stage is.

        Args:
            done: units finished so far, of `total`.
            tokens: tokens worked through since the last call.
            **numbers: latest values; the first two are shown.
        """
        self.done = done
        self.tokens += tokens
        if Clock.current is not None:
            Clock.current.tokens += tokens
        self.numbers.update(numbers)
        if self._file is not None:
            self._write(force=done >= self.total)
        elif self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, completed=done, total=self.total, numbers=describe(self.as_dict())
            )

    @property
    def seconds(self) -> float:
        """Wall seconds since the start."""
        return time.monotonic() - self._start

    def as_dict(self) -> dict[str, Any]:
        """What the progress file holds."""
        seconds = self.seconds
        return {
            "stage": self.stage,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "seconds": round(seconds, 1),
            "tokens_per_second": round(self.tokens / seconds) if seconds > 0 else 0,
            "numbers": dict(list(self.numbers.items())[:_NUM_SHOWN]),
        }

    def text(self) -> str:
        """One plain line."""
        own = f", the last {self.done - self.before}" if self.before else ""
        parts = [f"{self.done}/{self.total} {self.unit}{own} in {self.seconds:.1f} s"]
        return ", ".join([*parts, *filter(None, [describe(self.as_dict())])])

    def _write(self, *, force: bool = False, ended: bool = False) -> None:
        now = time.monotonic()
        if self._file is None or (not force and now - self._written < _SECONDS_BETWEEN_WRITES):
            return
        self._written = now
        write_json(self._file, {**self.as_dict(), "ended": ended})

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", style="dim"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._bar.start()
        self._task = self._bar.add_task(
            self.stage, total=self.total, completed=self.before, numbers=""
        )


def describe(state: dict[str, Any]) -> str:
    """`1,234 tokens/s, reward 0.42, kl 1.3` of a progress file's content."""
    parts = []
    if state.get("tokens_per_second"):
        parts.append(f"{state['tokens_per_second']:,} tokens/s")
    parts.extend(f"{name} {value:.3g}" for name, value in state.get("numbers", {}).items())
    return ", ".join(parts)


class Clock:
    """Wall seconds per named part of a stage.

        clock = Clock("policy@r1-ppo")  # first line of run(): what came before counts as "imports"
        with clock("sampling"): ...
        clock.write()                   # .scratch/timings/policy@r1-ppo.json

    A part inside another is counted in both. Tokens that a `Progress` is told of are counted along.
    """

    current: ClassVar[Clock | None] = None

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.tokens = 0
        Clock.current = self
        self.seconds: dict[str, float] = {"imports": _process_age()}
        self._start = time.perf_counter() - self.seconds["imports"]

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time a block; several blocks of one name add up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def as_dict(self) -> dict[str, Any]:
        """Seconds per part and in total since the process started, tokens, and the peak memory in MB."""
        return {
            "stage": self.stage,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "total_seconds": round(time.perf_counter() - self._start, 3),
            "tokens": self.tokens,
            "peak_rss_mb": round(_peak_rss_mb(), 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far."""
        return {
            "seconds": dict(self.seconds),
            "total": time.perf_counter() - self._start,
            "tokens": self.tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count what an earlier process measured, up to its checkpoint, in."""
        for name, seconds in state["seconds"].items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._start -= state["total"]
        self.tokens += state["tokens"]

    def write(self, path: str | Path | None = None) -> Path:
        """Write the timings as JSON; by default to `.scratch/timings/<stage>.json`."""
        path = Path(path) if path is not None else TIMINGS / f"{self.stage.replace('/', '-')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.as_dict())
        return path


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file in one step: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, path)


def _variable() -> bool:
    return bool(os.environ.get(PROGRESS_VARIABLE))


def _process_age() -> float:
    """Seconds since this process started."""
    if sys.platform.startswith("linux"):
        with open("/proc/self/stat", "rb") as file:
            text = file.read()
        started = int(text[text.rindex(b")") + 2 :].split()[19]) / os.sysconf("SC_CLK_TCK")
        with open("/proc/uptime", "rb") as file:
            return max(0.0, float(file.read().split()[0]) - started)
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())


def _peak_rss_mb() -> float:
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
