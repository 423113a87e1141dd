"""One round's run of a checkout: settings, lock, plan, and what watches over the stages.

No Prefect here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flows.display import Display
from flows.plan import Stage, check_workspace, make_plan
from flows.rounds import append_round
from flows.runner import Runner, workspace_lock
from rlhf import config, tracking
from rlhf.config import Pipeline
from rlhf.optimise.imported import check_imported


@dataclass
class Session:
    """What the flow works with."""

    folder: Path
    pipeline: Pipeline
    round: str
    stages: dict[str, Stage]
    runner: Runner
    display: Display
    _forwarding: ExitStack = field(default_factory=ExitStack)

    def start_ahead(self) -> None:
        """Run the first stages while Prefect's server still starts.

        The flow's tasks then take them up. Only where there is no choice to make: one stage at a
        time, no GPU to share.
        """
        if self.pipeline.resources.gpus:
            return
        finished = {name for name, stage in self.stages.items() if not stage.runs}
        chain: list[str] = []
        while True:
            ready = [
                name
                for name, stage in self.stages.items()
                if name not in finished and finished.issuperset(stage.after)
            ]
            if len(ready) != 1:
                break
            chain += ready
            finished.update(ready)

        def work() -> None:
            for name in chain:
                outcome = self.runner.run(name)
                if outcome is None or not outcome.ok:
                    return

        threading.Thread(target=work, name="ahead", daemon=True).start()

    @property
    def anything_to_run(self) -> bool:
        """Whether any stage is out of date."""
        return any(stage.runs for stage in self.stages.values())

    def forward(self) -> None:
        """Send what stages measure to MLflow from now on."""
        if self.anything_to_run:
            self._forwarding.enter_context(tracking.forwarding(self.folder))

    def forwarded(self) -> None:
        """Return when MLflow has everything written so far."""
        self._forwarding.close()


_opened: list[Session] = []


def current_session() -> Session:
    """The session that this process has open."""
    return _opened[-1]


@contextmanager
def open_session(round: str | None = None, folder: str | Path = ".") -> Iterator[Session]:
    """Check, lock, append the round if it is new, plan; on leaving, end what still runs.

    A session that this process has already opened is taken up again.
    """
    if _opened:
        yield _opened[-1]
        return
    folder = Path(folder).resolve()
    check_workspace(folder)
    path = folder / "pipeline.yaml"
    declared = config.load(path)
    config.check_files(declared, folder)
    check_imported(declared)
    with ExitStack() as stack:
        stack.enter_context(workspace_lock(folder))
        if round is not None:
            append_round(path, round)
        pipeline = config.load(path)
        name = round or list(pipeline.rounds)[-1]
        stages = {stage.name: stage for stage in make_plan(f"promote@{name}", folder)}
        display = stack.enter_context(Display())
        runner = Runner(
            folder,
            parallel=pipeline.resources.parallel,
            gpus=pipeline.resources.gpus,
            timeout=float(os.environ.get("ROUNDHOUSE_STAGE_TIMEOUT", 24 * 3600)),
            on_begin=lambda name: display.begin(name, runner.progress_path(name)),
            on_end=lambda name, ok: display.end(name, ok=ok),
        )
        stack.callback(runner.end_all)
        session = Session(folder, pipeline, name, stages, runner, display)
        stack.callback(session.forwarded)
        _opened.append(session)
        stack.callback(_opened.remove, session)
        yield session
