"""The plan with its estimate, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import estimate
from flows.estimate import Estimate
from flows.plan import Memory, Stage, make_plan
from rlhf import config
from rlhf.errors import BadInput

if TYPE_CHECKING:
    from rich.console import RenderableType

_MARKS = {"run": "[bold yellow]run[/]", "may run": "[yellow]may run[/]", "keep": "[green]keep[/]"}
_NUM_REASONS = 6
_NUM_NAMED = 30


@dataclass(frozen=True)
class View:
    """A plan, and what it would take."""

    round: str | None
    stages: list[Stage]
    estimate: Estimate
    cost_per_hour: float | None
    parallel: int

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        states = [stage.state for stage in self.stages]
        seconds = self.estimate.as_dict()
        return {
            "round": self.round,
            "counts": {state: states.count(state) for state in _MARKS},
            "stages": [
                {
                    **stage.as_dict(),
                    "seconds": seconds["seconds"].get(stage.name),
                    "estimated_from": self.estimate.basis.get(stage.name),
                }
                for stage in self.stages
            ],
            "wall_seconds": seconds["wall"],
            "cost": seconds["cost"],
            "cost_per_hour": self.cost_per_hour,
            "parallel": self.parallel,
            "without_estimate": self.estimate.unknown,
        }

    def parts(self, *, everything: bool = False) -> Iterator[RenderableType]:
        """What people see, from top to bottom."""
        faults = [fault for stage in self.stages for fault in stage.faults]
        running = [stage for stage in self.stages if stage.runs]
        if running or everything:
            yield self._table(self.stages if everything else running)
        kept = [stage.name for stage in self.stages if not stage.runs]
        if kept and not everything:
            named = ", ".join(kept[-_NUM_NAMED:])
            more = f"{len(kept) - _NUM_NAMED} others (--all names them), " * (
                len(kept) > _NUM_NAMED
            )
            yield f"[green]up to date[/]: {more}{named}"
        for fault in faults:
            yield f"[bold red]damaged[/] {_escaped(fault)}"
        yield from self._sums(running)

    def _table(self, stages: list[Stage]) -> RenderableType:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for header, justify in (("", "left"), ("stage", "left"), ("takes", "right")):
            table.add_column(header, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("why", overflow="fold")
        for stage in stages:
            span = self.estimate.seconds.get(stage.name)
            takes = estimate.duration(span.middle) if span else "?" if stage.runs else ""
            table.add_row(_MARKS[stage.state], stage.name, takes, _escaped(_why(stage)))
        return table

    def _sums(self, running: list[Stage]) -> Iterator[str]:
        certain = sum(stage.certain for stage in running)
        words = f"{certain} of {len(self.stages)} stages would run"
        if len(running) > certain:
            words += (
                f", {len(running) - certain} may: DVC stops where an output comes out unchanged"
            )
        yield f"[bold]{words}[/]"
        if not running:
            return
        found = self.estimate
        if found.wall is None:
            yield "no earlier run to estimate from"
            return
        more = ""
        if found.unknown:
            more = f", and without an earlier run {', '.join(found.unknown[:6])}"
            more += " ..." * (len(found.unknown) > 6)
        yield f"{estimate.in_words(found.wall)}, {self.parallel} side by side{more}"
        if found.cost is not None:
            yield (
                f"cost about {found.cost.middle:.2f} ({found.cost.low:.2f} to {found.cost.high:.2f}) "
                f"at resources.cost_per_hour={self.cost_per_hour:g}"
            )


def look(round: str | None, folder: str | Path = ".") -> View:
    """Check pipeline.yaml, plan and estimate.

    Args:
        round: like `r3`, with all that it depends on; None for everything.
        folder: the project's folder.

    Raises:
        BadInput: no such round, or a folder or file that cannot be planned from.
    """
    folder = Path(folder).resolve()
    memory = Memory(folder)
    raw = memory.pipeline()
    pipeline = config.parse(raw)
    if round is not None and round not in pipeline.rounds:
        names = list(pipeline.rounds)
        shown = ", ".join(names if len(names) <= 12 else ["...", *names[-12:]])
        raise BadInput(
            f"no round {round}",
            where="pipeline.yaml rounds",
            rule="a round is declared under rounds:",
            mend="python -m flows plan --round with one of " + shown
            if round == "r0"
            else f"use one of {shown}, or add it: python -m flows round add {round}",
        )
    stages = make_plan(f"promote@{round}" if round else None, folder)
    resources = pipeline.resources
    found = estimate.estimate(
        stages,
        raw,
        estimate.gather(folder, memory.entries(), raw),
        parallel=resources.parallel,
        gpus=resources.gpus,
        cost_per_hour=resources.cost_per_hour,
    )
    return View(round, stages, found, resources.cost_per_hour, resources.parallel)


def _why(stage: Stage) -> str:
    """The reasons, a line each; what it waits for on one line."""
    before = [name for name in stage.after if f"{name} runs before it" in stage.reasons]
    lines = [r for r in stage.reasons if not r.endswith(" runs before it")]
    if len(lines) > _NUM_REASONS:
        lines[_NUM_REASONS:] = [f"and {len(lines) - _NUM_REASONS} more (--json has all)"]
    if before:
        shown = ", ".join(before[:3]) + f" and {len(before) - 3} more" * (len(before) > 3)
        lines.append(f"after {shown}")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
