"""`python -m flows try`: a small grid of settings for a round's candidates, beside the round and never in it.

Each point of the grid is a candidate of its own in a folder of their own, `.scratch/tries/NAME`: pipeline.yaml with
the points added, dvc.yaml, a dvc.lock of the points alone, and DVC's cache shared with the project. What the points
learn from is linked from the workspace, so nothing before them runs; their `policy` and `evaluate` run as the round's
own do, with checkpoints to continue from and an MLflow run each, tagged `rlhf.try`. The project's pipeline.yaml,
dvc.lock, runs and git state are not touched, and git need not be there.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.definitions import Definition, Engine, Unusual
from flows.overrides import parse_overrides
from rlhf import artifacts, config, yaml12
from rlhf.config import ConfigError, Pipeline
from rlhf.errors import BadInput, StageFailed

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flows.runner import Runner

PLACE = Path(".scratch/tries")
RESULTS = "results.json"
LIMIT = 16
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_LONGEST = 48
_COLUMNS = {"gold_mean": "gold", "proxy_mean": "proxy", "kl_nats": "kl", "win_rate": "win rate"}
_MANAGED = (".scratch", ".git", ".dvc", "pipeline.yaml", "dvc.yaml", "dvc.lock")


@dataclass(frozen=True)
class Point:
    """One candidate to try: what it is named, whose copy it is, and what differs."""

    name: str
    of: str
    changes: dict[str, Any]
    """Settings by dotted path below the candidate."""
    body: dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """All points of one call."""

    name: str
    round: str
    points: list[Point]

    @property
    def originals(self) -> list[str]:
        """The round's own candidates that the points are copies of."""
        return list(dict.fromkeys(point.of for point in self.points))


# --- reading the grid ----------------------------------------------------------------------------


def read_grid(
    words: Sequence[str],
    pipeline: Pipeline,
    raw: Mapping[str, Any],
    *,
    name: str | None,
    limit: int,
) -> Grid:
    """The points that `--set path=value,value` words ask for: every combination of a candidate's values.

    Args:
        words: like `candidates.r2-ppo.kl.coef=0.01,0.05`. Values are YAML; a value that is a list is written with
            its brackets, text with a comma in quotes.
        pipeline: the checked configuration.
        raw: the same as written.
        name: of the try; None: named after the candidates.
        limit: the most points.

    Raises:
        BadInput: names every word that is wrong, or every setting that the file would not take either.
    """
    axes: dict[str, dict[str, list[Any]]] = {}
    problems: list[str] = []
    for word in words:
        try:
            candidate, path, values = _axis(word, pipeline)
            if path in axes.setdefault(candidate, {}):
                raise ValueError("given twice; write all its values once")
            axes[candidate][path] = values
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"{word}: {error}")
    if not problems and not axes:
        problems.append("nothing to try; write --set candidates.NAME.KEY=value,value")
    rounds = {pipeline.candidates[candidate].round for candidate in axes}
    if len(rounds) > 1:
        problems.append(f"candidates of {' and '.join(sorted(rounds))}; try one round at a time")
    if problems:
        raise ConfigError("--set", problems)
    name = name or "-".join(axes)[:40].rstrip("-_")
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} is not the name of a try",
            where="--name",
            rule="a-z, 0-9, _ and -, at most 40 letters",
            mend="use another name",
        )
    count = sum(_product(values) for values in axes.values())
    if count > limit:
        raise BadInput(
            f"{count} combinations",
            where="--set",
            rule=f"at most {limit}, because each is trained and judged",
            mend=f"leave some values out, or raise it: --limit {count}",
        )
    points = [point for c, values in axes.items() for point in _points(c, values, raw, problems)]
    if problems:
        raise ConfigError("--set", problems)
    points = list({point.name: point for point in points}.values())
    _check(points, raw)
    return Grid(name, rounds.pop(), points)


def _axis(word: str, pipeline: Pipeline) -> tuple[str, str, list[Any]]:
    """Candidate, path below it, values. Raises ValueError with what is wrong."""
    path, equals, written = word.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 3 or keys[0] != "candidates":
        raise ValueError("not a setting to try; write candidates.NAME.KEY=value,value")
    if keys[1] not in pipeline.candidates:
        raise ValueError(f"no candidate {keys[1]}; use one of {_some(list(pipeline.candidates))}")
    if keys[2] in ("round", "from"):
        raise ValueError(f"{keys[2]} is the round's; try settings of the candidate")
    parts = split_values(written)
    if not all(parts):
        raise ValueError("an empty value; write one or more values, commas between them")
    values: list[Any] = []
    for part in parts:
        (value,) = parse_overrides([f"{path.strip()}={part}"]).values()
        if not any(_same(value, other) for other in values):
            values.append(value)
    return keys[1], ".".join(keys[2:]), values


def split_values(text: str) -> list[str]:
    """The parts between commas that are not in brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not parts[-1].strip():
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _product(axes: Mapping[str, list[Any]]) -> int:
    count = 1
    for values in axes.values():
        count *= len(values)
    return count


def _points(
    candidate: str,
    axes: Mapping[str, list[Any]],
    raw: Mapping[str, Any],
    problems: list[str],
) -> Iterator[Point]:
    for values in itertools.product(*axes.values()):
        changes = dict(zip(axes, values, strict=True))
        body = copy.deepcopy(raw["candidates"][candidate])
        try:
            for path, value in changes.items():
                _put(body, path.split("."), value)
        except ValueError as error:
            problems.append(f"candidates.{candidate}.{error}")
            continue
        yield Point(_name_of(candidate, changes, raw), candidate, changes, body)


def _put(body: Any, keys: list[str], value: Any) -> None:
    """Set a value at a path; sections that are not written out are made. Raises ValueError."""
    for i, key in enumerate(keys):
        last = i == len(keys) - 1
        if isinstance(body, list):
            if not key.isdigit() or int(key) >= len(body):
                raise ValueError(f"{'.'.join(keys[: i + 1])}: no such item of a list")
            key = int(key)  # type: ignore[assignment]
        elif not isinstance(body, dict):
            raise ValueError(
                f"{'.'.join(keys[: i + 1])}: {'.'.join(keys[:i])} is {body!r}, not a section; "
                f"write {'.'.join(keys[:i])}={{kind: {body}, {key}: {value}}}"
            )
        if last:
            body[key] = value  # type: ignore[index]
        elif isinstance(body, dict):
            body = body.setdefault(key, {})
        else:
            body = body[key]  # type: ignore[index]


def _name_of(candidate: str, changes: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """Says what differs, the same each time: r2-ppo_coef_0_01."""
    words = [f"{path.rpartition('.')[2]}_{_written(value)}" for path, value in changes.items()]
    text = re.sub(r"[^a-z0-9]+", "_", "_".join(words).lower()).strip("_")
    name = f"{candidate}_{text}"
    exact = json.dumps([candidate, changes], sort_keys=True, default=str)
    if len(name) > _LONGEST or name in raw["candidates"] or _is_ambiguous(changes):
        import hashlib

        name = f"{name[: _LONGEST - 7]}_{hashlib.sha256(exact.encode()).hexdigest()[:6]}"
    return name


def _is_ambiguous(changes: Mapping[str, Any]) -> bool:
    """Whether another value could be spelled the same in a name."""
    return any(
        not isinstance(value, (int, float)) or value < 0 or float(f"{value:g}") != value
        for value in changes.values()
    )


def _written(value: Any) -> str:
    """1e-06 and 1e+06 are told apart: a name has neither sign."""
    return f"{value:g}".replace("e+", "e") if isinstance(value, float) else str(value)


def _check(points: list[Point], raw: Mapping[str, Any]) -> None:
    """The file with the points in it, as strictly as the file itself."""
    with_points = {**raw["candidates"], **{point.name: point.body for point in points}}
    config.parse({**raw, "candidates": with_points}, "--set")


def _some(names: list[str], most: int = 12) -> str:
    return ", ".join(names if len(names) <= most else ["...", *names[-most:]])


# --- the folder ----------------------------------------------------------------------------------


def prepare(grid: Grid, folder: Path) -> Path:
    """The try's folder, with all that its stages read. Nothing of the project is written to.

    Raises BadInput where the round has not come so far that its candidates could be trained.
    """
    stages = check_ready(grid, folder)
    place = folder / PLACE / grid.name
    place.mkdir(parents=True, exist_ok=True)
    _write_settings(grid, folder, place)
    own = {
        path
        for original in grid.originals
        for kind in ("policy", "evaluate")
        for path in stages[f"{kind}@{original}"].outs
    }
    made = {path for stage in stages.values() for path in stage.outs}
    needed = {
        path
        for original in grid.originals
        for kind in ("policy", "evaluate")
        for path in stages[f"{kind}@{original}"].deps
    }
    for point in grid.points:  # a changed learns_from
        source = point.body.get("learns_from")
        if isinstance(source, str) and f"runs/{source}" in made:
            needed.add(f"runs/{source}")
    for path in sorted((needed & made) - own):
        _link_tree(folder / path, place / path)
    _link_rest(folder, place, {path.split("/")[0] for path in made})
    return place


def check_ready(grid: Grid, folder: Path) -> dict[str, Definition]:
    """Every stage's definition. Raises BadInput unless what the candidates start from is up to date."""
    from flows.plan import Memory, make_plan

    for original in grid.originals:
        own = {f"policy@{original}", f"evaluate@{original}"}
        for stage in make_plan(f"evaluate@{original}", folder, needs_git=False):
            if stage.runs and stage.name not in own:
                raise BadInput(
                    f"{stage.name} is not up to date: {stage.reasons[0]}",
                    where=grid.round,
                    rule="a try starts from what the round has made, and makes nothing of it again",
                    mend=f"python -m flows run --round {grid.round}, or the part that is missing: "
                    f"dvc repro {stage.name}",
                )
    memory = Memory(folder)
    with ExitStack() as stack:
        try:
            return memory.stages(memory.pipeline(), Engine(str(folder), stack))
        except Unusual as error:
            raise BadInput(
                f"a try cannot be made from this dvc.yaml ({error})",
                where="dvc.yaml",
                rule="its stages are declared by foreach over rounds and candidates",
                mend="use dvc exp run -S",
            ) from None


def _write_settings(grid: Grid, folder: Path, place: Path) -> None:
    from flows.editing import append_entry

    text = (folder / "pipeline.yaml").read_text(encoding="utf-8")
    for point in grid.points:
        text = append_entry(text, "candidates", point.name, point.body)
    artifacts.write_text(place / "pipeline.yaml", text)
    shutil.copyfile(folder / "dvc.yaml", place / "dvc.yaml")
    if (folder / ".dvcignore").is_file():
        shutil.copyfile(folder / ".dvcignore", place / ".dvcignore")
    dvc = place / ".dvc"
    dvc.mkdir(exist_ok=True)
    for name in ("config", "config.local"):
        if (folder / ".dvc" / name).is_file():
            shutil.copy(folder / ".dvc" / name, dvc / name)  # mode too: it may hold secrets
    _share_cache(folder, dvc)


def _share_cache(folder: Path, dvc: Path) -> None:
    """Same cache, no git: a try is nobody's commit."""
    from dvc.config import Config
    from dvc.repo import Repo

    with Repo(str(folder)) as repo:
        cache = str(Path(repo.cache.local_cache_dir).resolve())
    settings = Config(str(dvc), validate=False)
    with settings.edit("local") as local:
        local.setdefault("core", {}).update(no_scm=True, autostage=False, analytics=False)
        local.setdefault("cache", {})["dir"] = cache


def _link_tree(source: Path, target: Path) -> None:
    """Hard links, which stay as they are when the project's own are made again; copies where none can be."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link)
    else:
        target.unlink(missing_ok=True)
        _link(str(source), str(target))


def _link(source: str, target: str) -> str:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _link_rest(folder: Path, place: Path, roots: set[str]) -> None:
    """Whatever else lies in the project, so that relative paths and modules are found from the try's folder too."""
    for entry in folder.iterdir():
        hidden = entry.name.startswith((".", "mlflow.db", "mlartifacts", "mlruns"))
        if hidden or entry.name in _MANAGED:
            continue
        if entry.name in roots and entry.is_dir():
            (place / entry.name).mkdir(exist_ok=True)
            if entry.name != "runs":
                _link_rest_of(entry, place / entry.name)
        elif not os.path.lexists(place / entry.name):
            (place / entry.name).symlink_to(entry)


def _link_rest_of(entry: Path, target: Path) -> None:
    """What lies beside stages' outputs in a folder."""
    for child in entry.iterdir():
        if child.name not in (".gitignore",) and not os.path.lexists(target / child.name):
            (target / child.name).symlink_to(child)


# --- running -------------------------------------------------------------------------------------


def run_grid(
    grid: Grid,
    pipeline: Pipeline,
    folder: Path,
    *,
    keep: bool,
    on_begin: Callable[[str], None] = lambda name: None,
    on_end: Callable[[str, bool], None] = lambda name, ok: None,
) -> list[dict[str, Any]]:
    """Train and judge every point that is not done yet; the rows of the results, best first.

    Args:
        grid: what to try.
        pipeline: the project's configuration.
        folder: the project's folder.
        keep: leave the trained policies in the try's folder; else DVC's cache alone has them.
        on_begin: called with a stage's name when it starts.
        on_end: called with its name and whether it succeeded.

    Raises:
        StageFailed: points failed; the others' results are written.
    """
    from flows.runner import Runner, devices, workspace_lock
    from rlhf import tracking

    devices(pipeline.resources.gpus)
    home = folder / PLACE / grid.name
    home.mkdir(parents=True, exist_ok=True)
    check_ready(grid, folder)
    with workspace_lock(home), _environment(pipeline, folder, grid.name):
        place = prepare(grid, folder)
        runner = Runner(
            place,
            parallel=pipeline.resources.parallel,
            gpus=pipeline.resources.gpus,
            timeout=float(os.environ.get("ROUNDHOUSE_STAGE_TIMEOUT", 24 * 3600)),
            on_begin=on_begin,
            on_end=on_end,
            halt_on_failure=False,
        )
        gpu = pipeline.resources.gpus > 0
        try:
            with tracking.forwarding(place), ThreadPoolExecutor(len(grid.points)) as pool:
                list(pool.map(lambda point: _run_point(point, runner, gpu), grid.points))
        except BaseException:
            runner.end_all()
            raise
        rows = results(grid, pipeline, folder)
        artifacts.write_json(place / RESULTS, {"try": grid.name, "round": grid.round, "rows": rows})
        if not keep:
            for point in grid.points:
                shutil.rmtree(
                    place / f"runs/{grid.round}/policies/{point.name}", ignore_errors=True
                )
    if runner.failures:
        words = "\n".join(outcome.message for outcome in runner.failures)
        raise StageFailed(f"{words}\n  the other points' results: {place / RESULTS}")
    return rows


def _run_point(point: Point, runner: Runner, gpu: bool) -> None:
    for kind in ("policy", "evaluate"):
        outcome = runner.run(f"{kind}@{point.name}", gpu=gpu)
        if outcome is None or not outcome.ok:
            return


@contextmanager
def _environment(pipeline: Pipeline, folder: Path, name: str) -> Iterator[None]:
    """What the stages find by the environment: the project's MLflow and modules, and whose try they are."""
    from rlhf import tracking

    tracking.prepare_experiment(pipeline, folder)
    modules = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    new = {
        "MLFLOW_TRACKING_URI": tracking.tracking_uri(pipeline.tracking.uri, folder),
        "PYTHONPATH": os.pathsep.join(modules),
        tracking.TRY_VARIABLE: name,
    }
    before = {key: os.environ.get(key) for key in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


# --- results -------------------------------------------------------------------------------------


def results(grid: Grid, pipeline: Pipeline, folder: Path) -> list[dict[str, Any]]:
    """A row for every point and for the round's own candidates, by the gate's metric on choose prompts."""
    place = folder / PLACE / grid.name
    rows = [_row(pipeline, grid.round, name, name, {}, folder) for name in grid.originals]
    rows += [
        _row(pipeline, grid.round, point.name, point.of, point.changes, place)
        for point in grid.points
    ]
    return sorted(rows, key=lambda row: -_or_least(row["rank_score"]))


def _or_least(value: float | None) -> float:
    return float("-inf") if value is None else value


def _row(
    pipeline: Pipeline, round: str, name: str, of: str, changes: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """One line of the results; `state` is own, done or missing."""
    row: dict[str, Any] = {
        "candidate": name,
        "of": of,
        "changes": changes,
        "state": "done" if changes else "own",
        "rank_score": None,
        **dict.fromkeys(config.METRICS),
        "failed_rules": [],
        "words": "" if not changes else words_to_add(of, changes),
    }
    path = folder / f"runs/{round}/evaluations/{name}/evaluations.parquet"
    if not path.is_file():
        return {**row, "state": "missing"}
    import pandas as pd

    from tasks.promote import failed_rules

    table = pd.read_parquet(path)
    selected = table[table["selected"]].set_index("split")
    report, choose = selected.loc["report"], selected.loc["choose"]
    numbers = {metric: _number(report.get(metric)) for metric in config.METRICS}
    gate = pipeline.rounds[round].gate
    return {
        **row,
        **numbers,
        "rank_score": _number(choose.get(gate.metric)),
        "failed_rules": failed_rules(gate, numbers),
    }


def _number(value: Any) -> float | None:
    import math

    return None if value is None or not math.isfinite(float(value)) else float(value)


def words_to_add(candidate: str, changes: Mapping[str, Any]) -> str:
    """The words of `round add` that give the next round a point's settings."""
    short = candidate.partition("-")[2]
    words = [f"--set 'candidates.{short}.{path}={_yaml(value)}'" for path, value in changes.items()]
    return " ".join(words)


def _yaml(value: Any) -> str:
    """A value in one line of YAML that reads back the same."""
    text = config.written(value) if isinstance(value, float) else json.dumps(value)
    assert _same(yaml12.load(text), value)
    return text


def table(rows: list[dict[str, Any]], metric: str) -> RenderableType:
    """The results for people, ranked by the metric of the round's gate."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, collapse_padding=True)
    shown.add_column("candidate", no_wrap=True)
    for header in (f"{metric}*", *_COLUMNS.values()):
        shown.add_column(header, justify="right", no_wrap=True)
    shown.add_column("verdict", overflow="fold")
    for row in rows:
        verdict = "passes" if not row["failed_rules"] else ", ".join(row["failed_rules"])
        if row["state"] == "missing":
            verdict = "failed" if row["changes"] else "not run"
        elif not row["changes"]:
            verdict = f"the round's own; {verdict}"
        numbers = [row["rank_score"], *(row[column] for column in _COLUMNS)]
        cells = ["" if n is None else f"{n:.3f}" for n in numbers]
        style = None if row["changes"] else "bold"
        shown.add_row(row["candidate"], *cells, verdict, style=style)
    shown.caption = (
        "* on choose prompts, by which the gate ranks; the other numbers are on report prompts"
    )
    shown.caption_justify = "left"
    return shown
