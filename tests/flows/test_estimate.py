"""Estimates: scaled by what the settings say, honest where there is no earlier run, side by side as slots allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows import estimate
from flows.definitions import find
from flows.estimate import Run, Span
from flows.plan import Stage
from flows.plan_view import View
from rlhf import config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pipeline() -> dict[str, Any]:
    return config.read_yaml(ROOT / "pipeline.yaml")


def stage(name: str, *after: str, reasons: tuple[str, ...] = ("x",)) -> Stage:
    return Stage(name, [], [], list(after), list(reasons))


def past(
    name: str, seconds: float, *, work: float | None = 1.0, fixed: float = 0.0, algorithm: str | None = None,
    when: float = 0.0,
) -> Run:  # fmt: skip
    kind = name.partition("@")[0]
    family = "rl" if algorithm in ("ppo", "grpo") else algorithm and "preference"
    return Run(name, kind, algorithm, family, fixed, seconds, work, when)


def estimated(plan: list[Stage], pipeline: dict[str, Any], history: list[Run], **more: Any) -> Any:
    return estimate.estimate(plan, pipeline, history, **{"parallel": 1, **more})


def test_the_work_of_the_default_by_hand(pipeline: dict[str, Any]) -> None:
    def work(name: str) -> float | None:
        return estimate.work_of(name, lambda path: find(pipeline, path))

    assert work("policy@r1-ppo") == 24 * 128 * 1 * (1 + 2)
    assert work("policy@r1-grpo") == 24 * 16 * 8 * (1 + 2)
    assert work("policy@r1-dpo") == 2 * 2 * 1400
    assert work("preferences@r1") == (1400 + 400) * 4
    assert work("reward_model@r1") == 2 * 3 * 1400 * 4
    # 24 / 6 = 4 checkpoints and the start: 2 choose answers each, 2 report answers on the 3 between, 4 at both ends
    assert work("evaluate@r1-ppo") == 5 * 2 + 3 * 2 + 2 * 4
    assert work("promote@r1") == 1
    assert work("policy@r9-ppo") is None
    assert work("mine@r1") is None


def test_what_grows_with_the_work_is_scaled_and_what_does_not_is_not(
    pipeline: dict[str, Any],
) -> None:
    run = past("policy@r0-ppo", 110.0, work=24 * 128 * 3 / 2, fixed=10.0, algorithm="ppo")
    found = estimated([stage("policy@r1-ppo")], pipeline, [run])
    assert found.seconds["policy@r1-ppo"] == Span(210.0, 210.0, 210.0)
    assert found.basis["policy@r1-ppo"] == "1 run of policy, ppo"


def test_the_same_algorithm_comes_first_then_its_family_then_nothing(
    pipeline: dict[str, Any],
) -> None:
    work = 24 * 128 * 3
    ppo = past("policy@a", 50.0, work=work, algorithm="ppo")
    grpo = past("policy@b", 70.0, work=work, algorithm="grpo")
    plan = [stage("policy@r1-ppo"), stage("policy@r1-dpo")]
    both = estimated(plan, pipeline, [ppo, grpo])
    assert both.seconds["policy@r1-ppo"].middle == 50
    other = estimated(plan, pipeline, [grpo])
    assert other.seconds["policy@r1-ppo"].middle == 70
    assert other.basis["policy@r1-ppo"] == "1 run of policy by other algorithms"
    assert other.unknown == ["policy@r1-dpo"]
    none = estimated(plan, pipeline, [])
    assert (none.wall, none.cost, none.unknown) == (None, None, [s.name for s in plan])


def test_several_runs_give_a_range_and_only_the_latest_count(pipeline: dict[str, Any]) -> None:
    runs = [past("promote@r1", float(s), when=float(s)) for s in (500, 600, *range(700, 708))]
    found = estimated([stage("promote@r1")], pipeline, runs)
    assert found.seconds["promote@r1"] == Span(700.0, 703.5, 707.0)


def test_slots_and_edges_decide_the_wall_time() -> None:
    #  a(4) -> b(3), c(2), d(2) -> e(1)
    plan = [
        stage("a"), stage("b", "a"), stage("c", "a"), stage("d", "a"), stage("e", "b", "c", "d"),
    ]  # fmt: skip
    seconds = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 2.0, "e": 1.0}
    assert estimate.schedule(plan, seconds, 1) == 12
    assert estimate.schedule(plan, seconds, 2) == 4 + 4 + 1
    assert estimate.schedule(plan, seconds, 3) == 4 + 3 + 1
    assert estimate.schedule(plan, {"b": 3.0}, 1) == 3


def test_stages_that_compute_wait_for_a_gpu_and_others_do_not() -> None:
    plan = [stage("policy@x"), stage("policy@y"), stage("promote@z")]
    seconds = {"policy@x": 5.0, "policy@y": 5.0, "promote@z": 10.0}
    assert estimate.schedule(plan, seconds, 3, gpus=1) == 10
    assert estimate.schedule(plan, {**seconds, "promote@z": 1.0}, 3, gpus=2) == 5


def test_cost_is_the_machines_wall_time_or_the_gpus_hours(pipeline: dict[str, Any]) -> None:
    plan = [stage("policy@r1-ppo"), stage("policy@r1-grpo"), stage("promote@r1")]
    runs = [past("policy@p", 1800.0, work=9216.0, algorithm=a) for a in ("ppo", "grpo")]
    runs.append(past("promote@r0", 360.0))
    machine = estimated(plan, pipeline, runs, parallel=3, cost_per_hour=2.0)
    assert machine.cost.middle == pytest.approx(1.0)  # half an hour
    gpus = estimated(plan, pipeline, runs, parallel=3, gpus=2, cost_per_hour=2.0)
    assert gpus.cost.middle == pytest.approx(2.0)  # two GPUs for half an hour each
    assert estimated(plan, pipeline, runs).cost is None


def test_stages_that_are_kept_take_no_time(pipeline: dict[str, Any]) -> None:
    plan = [stage("promote@r1", reasons=()), stage("promote@r2", "promote@r1")]
    found = estimated(plan, pipeline, [past("promote@r0", 7.0)])
    assert list(found.seconds) == ["promote@r2"]
    assert found.wall.middle == 7


def timing(folder: Path, name: str, seconds: float) -> None:
    path = folder / estimate.TIMINGS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"stage": name, "seconds": {"imports": 2.0}, "total_seconds": seconds}
    path.write_text(json.dumps(content))


def test_a_run_is_kept_with_the_settings_it_ran_with(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    """The lock has them; the file may say something else by now. A later run does not drop it."""
    then = {**pipeline["candidates"]["r1-ppo"], "steps": 12}
    lock = {"policy@r1-ppo": {"params": {"pipeline.yaml": {"candidates.r1-ppo": then, "seed": 0}}}}
    timing(tmp_path, "policy@r1-ppo", 62.0)
    timing(tmp_path, "policy@r1-dpo", 9.0)  # not in the lock: it did not finish
    (run,) = estimate.gather(tmp_path, lock, pipeline)
    assert (run.work, run.fixed, run.seconds) == (12 * 128 * 3, 2.0, 62.0)
    found = estimated([stage("policy@r1-ppo")], pipeline, [run])
    assert found.seconds["policy@r1-ppo"].middle == 2 + 60 * 2

    timing(tmp_path, "policy@r1-ppo", 92.0)
    seconds = [run.seconds for run in estimate.gather(tmp_path, lock, pipeline)]
    assert seconds == [62.0, 92.0]
    assert [run.seconds for run in estimate.gather(tmp_path, {}, pipeline)] == seconds


def test_the_history_is_bounded_and_survives_a_torn_line(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    lock: dict[str, Any] = {"promote@r1": {}}
    for i in range(15):
        timing(tmp_path, "promote@r1", float(i))
        runs = estimate.gather(tmp_path, lock, pipeline)
    assert [run.seconds for run in runs] == [float(i) for i in range(5, 15)]
    path = tmp_path / estimate.HISTORY
    path.write_text(path.read_text()[:-20])
    assert len(estimate.gather(tmp_path, {}, pipeline)) == 9
    (tmp_path / estimate.TIMINGS / "broken.json").write_text('{"stage": ')
    assert len(estimate.gather(tmp_path, lock, pipeline)) == 10


def test_people_are_told_what_is_not_known(pipeline: dict[str, Any]) -> None:
    plan = [
        stage("promote@r1"),
        stage("policy@r1-ppo", "promote@r1", reasons=("[odd] coef: 1 -> 2",)),
    ]
    found = estimated(
        plan, pipeline, [past("promote@r0", s) for s in (60.0, 120.0)], cost_per_hour=6.0
    )
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in View("r1", plan, found, 6.0, 2).parts():
        console.print(part)
    text = console.export_text()
    assert "[odd] coef: 1 -> 2" in text
    assert (
        "about 90 s (60 s to 2 min), 2 side by side, and without an earlier run policy@r1-ppo"
        in text
    )
    assert "cost about 0.15 (0.10 to 0.20) at resources.cost_per_hour=6" in text
