"""What a person sees while stages run: bars on a terminal, one plain line per stage elsewhere."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rlhf.progress import describe


class Display:
    """Draws the progress files of the stages that run."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._files: dict[str, tuple[Path, TaskID]] = {}
        self._names: dict[str, float] = {}
        self._stop = threading.Event()
        self._mutex = threading.Lock()
        self._progress: Progress | None = None
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description:<24}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[count]}", justify="right"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[numbers]}", style="dim"),
                console=self.console,
                transient=True,
            )
        self._thread = threading.Thread(target=self._draw, name="display", daemon=True)

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars; may be called twice."""
        self._stop.set()
        if self._progress is not None:
            self._thread.join(timeout=2)
            self._progress.stop()

    def begin(self, name: str, progress_file: Path) -> None:
        """A stage starts."""
        with self._mutex:
            self._names.setdefault(name, time.monotonic())
            if self._progress is None:
                self.console.print(f"{name:<26} starts", style="dim", highlight=False)
            elif name not in self._files:
                task = self._progress.add_task(name, total=None, count="", numbers="")
                self._files[name] = (progress_file, task)

    def end(self, name: str, *, ok: bool) -> None:
        """A stage has ended."""
        with self._mutex:
            seconds = time.monotonic() - self._names.get(name, time.monotonic())
            if self._progress is not None and name in self._files:
                self._progress.remove_task(self._files.pop(name)[1])
        mark = "[green]done[/]" if ok else "[red]failed[/]"
        self.console.print(f"{name:<26} {mark}  {seconds:6.1f} s", highlight=False)

    def say(self, message: str) -> None:
        """One line of words, above the bars."""
        self.console.print(message, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> None:
        while not self._stop.wait(0.25):
            with self._mutex:
                for path, task in self._files.values():
                    self._draw_one(path, task)

    def _draw_one(self, path: Path, task: TaskID) -> None:
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        assert self._progress is not None
        self._progress.update(
            task,
            completed=state["done"],
            total=state["total"],
            count=f"{state['done']}/{state['total']} {state['unit']}",
            numbers=describe(state),
        )
