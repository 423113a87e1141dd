"""The command `try`: reads the grid, runs it and shows what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flows import tries
from flows.display import Display
from flows.plan import check_workspace
from rlhf import config, tracking
from rlhf.errors import StageFailed


def carry_out(
    words: Sequence[str],
    *,
    name: str | None,
    keep: bool,
    limit: int,
    as_json: bool,
    folder: str | Path = ".",
) -> None:
    """Run a grid and print its results. Raises BadInput before anything is computed, StageFailed after."""
    folder = Path(folder).resolve()
    check_workspace(folder, needs_git=False)
    pipeline = config.load(folder / "pipeline.yaml")
    raw = config.read_yaml(folder / "pipeline.yaml")
    grid = tries.read_grid(words, pipeline, raw, name=name, limit=limit)
    place = folder / tries.PLACE / grid.name
    console = Console(highlight=False, stderr=as_json)
    progress = place / ".scratch/progress"
    try:
        with Display(console) as display:
            tries.run_grid(
                grid,
                pipeline,
                folder,
                keep=keep,
                on_begin=lambda stage: display.begin(stage, progress / f"{stage}.json"),
                on_end=lambda stage, ok: display.end(stage, ok=ok),
            )
    except StageFailed:
        _show(grid, pipeline, folder, console, as_json=as_json)
        raise
    _show(grid, pipeline, folder, console, as_json=as_json)


def _show(
    grid: tries.Grid, pipeline: config.Pipeline, folder: Path, console: Console, *, as_json: bool
) -> None:
    place = folder / tries.PLACE / grid.name
    rows = tries.results(grid, pipeline, folder)
    links = tracking.try_links(pipeline, grid.round, place, folder=folder)
    if as_json:
        print(json.dumps({"try": grid.name, "round": grid.round, "rows": rows, "links": links}))
        return
    console.print(tries.table(rows, pipeline.rounds[grid.round].gate.metric))
    judged = [row for row in rows if row["changes"] and row["rank_score"] is not None]
    best = next((row for row in judged if not row["failed_rules"]), None) or next(
        iter(judged), None
    )
    if best is not None:
        console.print("to use the best of these in the next round:", style="bold")
        print(f"  python -m flows round add --from-template {grid.round} {best['words']}")
    for kind, url in links.items():
        print(f"  {kind}: {url}")
    print(f"  results: {place.relative_to(folder) / tries.RESULTS}")
