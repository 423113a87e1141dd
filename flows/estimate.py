"""How long a plan may take and what it may cost, from the seconds that earlier runs took.

A stage's seconds are a fixed part (starting, importing) and a part that grows with its work: answers sampled and
trained on, pairs, checkpoints judged. The work is read from the settings, those of the earlier run from dvc.lock.
What no setting says (a machine that has changed, a policy that answers at greater length) is not foreseen; the
range over earlier runs shows how much they differed. Without an earlier run of its kind nothing is guessed.
"""

from __future__ import annotations

import heapq
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.definitions import ABSENT, DEVICE_STAGES, find
from flows.plan import Stage
from rlhf import artifacts, presets
from rlhf.progress import TIMINGS

HISTORY = TIMINGS / "history.jsonl"
_KEPT = 10  # runs of each stage
_COMPARED = 8  # latest runs that an estimate looks at


@dataclass(frozen=True)
class Span:
    """Seconds (or money): the lowest, the middle and the highest of what earlier runs say."""

    low: float
    middle: float
    high: float

    def times(self, factor: float) -> Span:
        """All three multiplied."""
        return Span(self.low * factor, self.middle * factor, self.high * factor)


@dataclass(frozen=True)
class Run:
    """One earlier run of a stage."""

    stage: str
    kind: str
    algorithm: str | None
    family: str | None
    fixed: float
    """Seconds that do not grow with the work."""
    seconds: float
    work: float | None
    when: float


@dataclass(frozen=True)
class Estimate:
    """Of a whole plan. Stages without an earlier run count as 0 and are named in `unknown`."""

    seconds: dict[str, Span]
    basis: dict[str, str]
    unknown: list[str]
    wall: Span | None
    cost: Span | None

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


def estimate(
    plan: Sequence[Stage],
    pipeline: Mapping[str, Any],
    history: Sequence[Run],
    *,
    parallel: int,
    gpus: int = 0,
    cost_per_hour: float | None = None,
) -> Estimate:
    """Seconds of every stage that would run or may, wall time side by side, and cost.

    Args:
        plan: stages in order.
        pipeline: the content of pipeline.yaml.
        history: earlier runs, as `gather` gives them.
        parallel: stages that run side by side.
        gpus: GPU slots; a stage that computes takes one, so no more of these run at once.
        cost_per_hour: of a GPU; without GPUs of the machine, by wall time.
    """
    seconds, basis, unknown = {}, {}, []
    for stage in (stage for stage in plan if stage.runs):
        found = _of_stage(stage.name, pipeline, history)
        if found is None:
            unknown.append(stage.name)
        else:
            seconds[stage.name], basis[stage.name] = found
    wall = _wall(plan, seconds, parallel, gpus) if seconds else None
    if not seconds or cost_per_hour is None:
        cost = None
    elif gpus:
        used = [s for name, s in seconds.items() if name.split("@")[0] in DEVICE_STAGES]
        cost = _sum(used).times(cost_per_hour / 3600)
    else:
        assert wall is not None
        cost = wall.times(cost_per_hour / 3600)
    return Estimate(seconds, basis, unknown, wall, cost)


def _of_stage(
    name: str, pipeline: Mapping[str, Any], history: Sequence[Run]
) -> tuple[Span, str] | None:
    """Seconds of one stage and what they are taken from; None without an earlier run of its kind."""
    kind, _, _ = name.partition("@")
    algorithm, family = labels(name, lambda path: find(pipeline, path))
    of_kind = [run for run in history if run.kind == kind]
    label = kind if algorithm is None else f"{kind}, {algorithm}"
    chosen = [run for run in of_kind if run.algorithm == algorithm]
    if not chosen:
        label = f"{kind} by other algorithms"
        chosen = [run for run in of_kind if run.family == family]
    if not chosen:
        return None
    chosen = sorted(chosen, key=lambda run: run.when)[-_COMPARED:]
    work = work_of(name, lambda path: find(pipeline, path))
    values = [_scaled(run, work) for run in chosen]
    count = f"{len(chosen)} run{'s' if len(chosen) > 1 else ''}"
    return Span(min(values), statistics.median(values), max(values)), f"{count} of {label}"


def _scaled(run: Run, work: float | None) -> float:
    if not work or not run.work:
        return run.seconds
    return run.fixed + (run.seconds - run.fixed) * work / run.work


def _wall(plan: Sequence[Stage], seconds: Mapping[str, Span], parallel: int, gpus: int) -> Span:
    low, middle, high = (
        schedule(plan, {name: getattr(s, part) for name, s in seconds.items()}, parallel, gpus)
        for part in ("low", "middle", "high")
    )
    return Span(low, middle, high)


def schedule(
    plan: Sequence[Stage], seconds: Mapping[str, float], parallel: int, gpus: int = 0
) -> float:
    """Wall seconds when each stage starts as soon as those before it are done and a slot is free.

    Stages wait in the plan's order, as the flow submits them. One that is not in `seconds` takes no time.
    """
    waiting = {stage.name: len(stage.after) for stage in plan}
    behind: dict[str, list[str]] = {stage.name: [] for stage in plan}
    for stage in plan:
        for other in stage.after:
            behind[other].append(stage.name)
    ready = [name for name, count in waiting.items() if not count]
    running: list[tuple[float, str]] = []
    now, free, devices = 0.0, parallel, gpus

    def takes_device(name: str) -> bool:
        return gpus > 0 and name in seconds and name.split("@")[0] in DEVICE_STAGES

    while ready or running:
        held = []
        for name in ready:
            if name in seconds and (not free or (takes_device(name) and not devices)):
                held.append(name)
                continue
            free -= name in seconds
            devices -= takes_device(name)
            heapq.heappush(running, (now + seconds.get(name, 0.0), name))
        now, done = heapq.heappop(running)
        free += done in seconds
        devices += takes_device(done)
        ready = held
        for name in behind[done]:
            waiting[name] -= 1
            if not waiting[name]:
                ready.append(name)
    return now


def _sum(spans: Iterable[Span]) -> Span:
    spans = list(spans)
    return Span(sum(s.low for s in spans), sum(s.middle for s in spans), sum(s.high for s in spans))


# --- what earlier runs took ----------------------------------------------------------------------


def gather(folder: Path, lock: Mapping[str, Any], pipeline: Mapping[str, Any]) -> list[Run]:
    """Earlier runs: those kept in the history, and the timings that stages have written since.

    A stage writes its timings when it ends and DVC its settings right after, so the two belong together. New ones are
    added to `.scratch/timings/history.jsonl`, which keeps the last ten of each stage.
    """
    runs = _history(folder / HISTORY)
    known = {(run.stage, run.when) for run in runs}
    fresh = [
        run
        for path in sorted((folder / TIMINGS).glob("*.json"))
        if (run := _timed(path, lock, pipeline)) is not None and (run.stage, run.when) not in known
    ]
    if not fresh:
        return runs
    kept: dict[str, list[Run]] = {}
    for run in sorted([*runs, *fresh], key=lambda run: run.when):
        kept[run.stage] = [*kept.get(run.stage, []), run][-_KEPT:]
    runs = [run for some in kept.values() for run in some]
    with suppress(OSError, artifacts.StageFailed):
        lines = "".join(json.dumps(asdict(run)) + "\n" for run in runs)
        artifacts.write_text(folder / HISTORY, lines)
    return runs


def _history(path: Path) -> list[Run]:
    runs = []
    with suppress(OSError, UnicodeDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError):
                runs.append(Run(**json.loads(line)))
    return runs


def _timed(path: Path, lock: Mapping[str, Any], pipeline: Mapping[str, Any]) -> Run | None:
    """One timings file with the settings of its run; None if it is not one, or its stage did not finish."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        name, total = str(content["stage"]), float(content["total_seconds"])
        fixed = float(content["seconds"].get("imports", 0.0))
        when = path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if name not in lock:
        return None
    recorded: dict[str, Any] = {}
    for values in (lock[name].get("params") or {}).values():
        recorded.update(values)

    def setting(path: str) -> Any:
        for key, value in recorded.items():
            if path == key or path.startswith(f"{key}."):
                return find({"at": value}, "at" + path.removeprefix(key))
        return find(pipeline, path)

    algorithm, family = labels(name, setting)
    return Run(
        name,
        name.partition("@")[0],
        algorithm,
        family,
        min(fixed, total),
        total,
        work_of(name, setting),
        when,
    )


# --- the work that settings ask for --------------------------------------------------------------

Setting = Callable[[str], Any]
"""The value at a dotted path of pipeline.yaml, or ABSENT."""


def labels(name: str, setting: Setting) -> tuple[str | None, str | None]:
    """Algorithm and kind of a stage's candidate; (None, None) for a stage without one."""
    group, _, key = name.partition("@")
    candidate = setting(f"candidates.{key}")
    if group != "policy" or not isinstance(candidate, Mapping):
        return None, None
    return str(candidate.get("algorithm")), str(candidate.get("kind"))


def work_of(name: str, setting: Setting) -> float | None:
    """The work of a stage in units of its kind; None where settings do not say.

    preferences: answers. reward_model: answers scored in training. policy by rollouts: answers, once for sampling
    and once for each pass over them; from pairs: pairs trained on, at most. evaluate: answers per prompt over all
    checkpoints. sft: passes. data and promote: 1.
    """
    group, _, key = name.partition("@")
    try:
        return float(WORK[group](key, setting)) if group in WORK else None
    except (TypeError, KeyError, ZeroDivisionError):
        return None


def _sft(key: str, setting: Setting) -> float:
    return float(setting("sft.epochs"))


def _preferences(key: str, setting: Setting) -> float:
    s = setting(f"rounds.{key}.preferences")
    return float((s["num_groups"] + s["num_heldout_groups"]) * s["samples_per_prompt"])


def _reward_model(key: str, setting: Setting) -> float:
    s, pairs = setting(f"rounds.{key}.reward_model"), setting(f"rounds.{key}.preferences")
    answers = pairs["num_groups"] * pairs["samples_per_prompt"]  # carried-over ones are not counted
    return float(s["members"] * s["epochs"] * answers)


def _candidate(key: str, setting: Setting) -> dict[str, Any]:
    found = setting(f"candidates.{key}")
    if found is ABSENT:
        raise KeyError(key)
    return presets.resolve(found)


def _policy(key: str, setting: Setting) -> float:
    c = _candidate(key, setting)
    if "steps" in c:
        answers = c["steps"] * c["prompts_per_step"] * c["samples_per_prompt"]
        return float(answers * (1 + c["epochs_per_step"]))
    groups = setting(f"rounds.{c['round']}.preferences")["num_groups"]
    return float(c["epochs"] * c["pairs_per_group"] * groups)


def _evaluate(key: str, setting: Setting) -> float:
    c, s = _candidate(key, setting), setting("evaluation")
    if "steps" in c:
        steps = c["steps"]
    else:
        groups = setting(f"rounds.{c['round']}.preferences")["num_groups"]
        steps = c["epochs"] * c["pairs_per_group"] * groups / c["batch_size"]
    checkpoints = max(1, round(steps / c["checkpoint_every"]))
    on_the_way = (checkpoints - 1) * s["report_samples_per_prompt"]
    both_ends = 2 * s["final_samples_per_prompt"]
    return float((checkpoints + 1) * s["choose_samples_per_prompt"] + on_the_way + both_ends)


WORK: dict[str, Callable[[str, Setting], float]] = {
    "data": lambda key, setting: 1.0,
    "sft": _sft,
    "preferences": _preferences,
    "reward_model": _reward_model,
    "policy": _policy,
    "evaluate": _evaluate,
    "best_of_n": lambda key, setting: float(setting("evaluation")["best_of_n_samples"]),
    "promote": lambda key, setting: 1.0,
}


# --- in words ------------------------------------------------------------------------------------


def in_words(span: Span) -> str:
    """`about 4 min (3 min to 6 min)`; without the range where there is none."""
    middle, low, high = duration(span.middle), duration(span.low), duration(span.high)
    return f"about {middle}" + (f" ({low} to {high})" if low != high else "")


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
