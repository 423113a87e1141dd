"""Spool to MLflow: points are neither lost nor doubled, whatever is rerun, resumed or killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from flows import lineage
from rlhf import config, tracking
from rlhf.errors import Interrupted
from rlhf.lifeline import ident

PIPELINE = Path(__file__).parents[1] / "pipeline.yaml"


@pytest.fixture
def folder(
    tmp_path: Path, empty_store: bytes, monkeypatch: pytest.MonkeyPatch, pipeline: config.Pipeline
) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv(tracking.FORWARDER_VARIABLE, raising=False)
    (tmp_path / "mlflow.db").write_bytes(empty_store)
    return tmp_path


@pytest.fixture
def pipeline() -> config.Pipeline:
    return config.load(PIPELINE)


def start(pipeline: config.Pipeline, folder: Path, **changes: Any) -> tracking.Run:
    settings: dict[str, Any] = {
        "stage": "policy",
        "key": "policy@r1-ppo",
        "round": "r1",
        "kind": "policy",
        "name": "r1/ppo",
        "algorithm": "ppo",
        "params": {"kl": {"coef": 0.15}, "adam_betas": [0.9, 0.95]},
        "folder": folder,
    }
    return tracking.stage_run(pipeline, **{**settings, **changes})


def runs(folder: Path) -> list[Any]:
    client = tracking._client(None, folder)
    experiment = client.get_experiment_by_name("reviews")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], order_by=["start_time ASC"]))


def curve(folder: Path, run: Any, name: str) -> list[tuple[int, float]]:
    history = tracking._client(None, folder).get_metric_history(run.info.run_id, name)
    return sorted((point.step, point.value) for point in history)


def test_a_stage_arrives_whole(pipeline: config.Pipeline, folder: Path) -> None:
    data = folder / "pairs"
    data.mkdir()
    (data / "a.txt").write_text("a")
    (folder / "curve.png").write_bytes(b"png")
    with start(pipeline, folder) as run:
        for step in range(3):
            run.metrics({"policy/reward": step / 2, "policy/kl_nats": 1.0}, step)
        run.summary({"final/reward": 1.0})
        run.dataset(data, "r1/preferences", "training")
        run.figure(folder / "curve.png")
        run.table("samples", [{"prompt": "a", "score": 1.5}, {"prompt": "b"}])
        run.link("policy", "runs/r1/policies/r1-ppo")
    (found,) = runs(folder)
    assert found.info.run_name == "r1/ppo"
    assert found.info.status == "FINISHED"
    assert curve(folder, found, "policy/reward") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert found.data.metrics["final/reward"] == 1.0
    assert found.data.params == {"kl.coef": "0.15", "adam_betas": "[0.9, 0.95]"}
    assert found.data.tags["rlhf.algorithm"] == "ppo"
    assert found.data.tags["rlhf.link.policy"] == "runs/r1/policies/r1-ppo"
    (dataset,) = found.inputs.dataset_inputs
    assert dataset.dataset.name == "r1/preferences"
    assert (
        dataset.dataset.digest == "1710014904e6b7e979d3965269bd0f83.dir"
    )  # what `dvc add` says of this directory
    place = folder / "mlartifacts" / found.info.run_id / "artifacts"
    assert (place / "figures/curve.png").read_bytes() == b"png"
    table = json.loads((place / "tables/samples.json").read_text())
    assert table == {"columns": ["prompt", "score"], "data": [["a", 1.5], ["b", None]]}


def test_the_same_settings_and_values_are_one_run_without_doubled_points(
    pipeline: config.Pipeline, folder: Path
) -> None:
    for _ in range(2):
        with start(pipeline, folder) as run:
            for step in range(4):
                run.metrics({"policy/reward": 0.1 * step}, step)
    (found,) = runs(folder)
    assert [step for step, _ in curve(folder, found, "policy/reward")] == [0, 1, 2, 3]


@pytest.mark.parametrize("live", [False, True])
def test_a_rerun_that_measures_other_values_leaves_the_finished_run(
    pipeline: config.Pipeline, folder: Path, live: bool
) -> None:
    for offset, last in ((0.0, 5), (0.5, 7)):
        with start(pipeline, folder) as run:
            for step in range(last):
                run.metrics({"policy/reward": (offset if step > 2 else 0) + step}, step)
                if live:
                    tracking.Forwarder(folder).drain()
    old, new = runs(folder)
    assert curve(folder, old, "policy/reward") == [(step, float(step)) for step in range(5)]
    assert curve(folder, new, "policy/reward")[2:4] == [(2, 2.0), (3, 3.5)]
    assert [run.info.status for run in (old, new)] == ["FINISHED", "FINISHED"]
    assert [run.data.tags["rlhf.current"] for run in (old, new)] == ["false", "true"]
    assert new.data.params["kl.coef"] == "0.15"


def test_a_rerun_that_is_killed_leaves_the_finished_run_until_it_is_continued(
    pipeline: config.Pipeline, folder: Path
) -> None:
    attempt(pipeline, folder, range(4))
    position = attempt(pipeline, folder, range(3), offset=0.5, checkpoint=1, ends=False)
    for _ in range(2):
        tracking.forward(folder)
    assert lasting(folder) == [(step, float(step)) for step in range(4)]
    attempt(pipeline, folder, range(2, 4), offset=0.5, position=position)
    old, new = runs(folder)
    assert curve(folder, old, "policy/reward") == [(step, float(step)) for step in range(4)]
    assert curve(folder, new, "policy/reward") == [(step, step + 0.5) for step in range(4)]
    assert [run.data.tags["rlhf.current"] for run in (old, new)] == ["false", "true"]


def killed(run: tracking.Run) -> None:
    """As after kill -9: no end is written."""
    tracking._open_runs.remove(run)
    if run._background is not None:
        run._background.stop()


def attempt(
    pipeline: config.Pipeline,
    folder: Path,
    steps: range,
    *,
    position: int | None = None,
    offset: float = 0.0,
    checkpoint: int | None = None,
    ends: bool = True,
) -> int:
    """Log `offset + step` at each step; returns the position after the step `checkpoint`."""
    run = start(pipeline, folder)
    run.__enter__()
    found = run.position()
    if position is not None:
        run.resume(position)
    for step in steps:
        run.metrics({"policy/reward": offset + step}, step)
        if step == checkpoint:
            found = run.position()
    if ends:
        run.__exit__(None, None, None)
    else:
        killed(run)
    return found


def lasting(folder: Path, name: str = "policy/reward") -> list[tuple[int, float]]:
    (found,) = runs(folder)
    assert found.info.status == "FINISHED"
    return curve(folder, found, name)


@pytest.mark.parametrize("sent", [True, False])
def test_a_resumed_stage_continues_the_run_of_the_killed_one(
    pipeline: config.Pipeline, folder: Path, sent: bool
) -> None:
    position = attempt(pipeline, folder, range(5), checkpoint=2, ends=False)
    if sent:
        tracking.forward(folder)
        first = runs(folder)[0].info.run_id
    attempt(pipeline, folder, range(3, 7), position=position)
    assert lasting(folder) == [(step, float(step)) for step in range(7)]
    if sent:
        assert runs(folder)[0].info.run_id == first


def test_what_was_measured_after_the_checkpoint_is_forgotten_whatever_its_step_or_name(
    pipeline: config.Pipeline, folder: Path
) -> None:
    """Members of a committee count their steps from the beginning, each."""
    run = start(pipeline, folder)
    run.__enter__()
    for step in range(3):
        run.metrics({"member_0": float(step)}, step)
    run.metrics({"member_1": 0.0}, 0)
    position = run.position()
    run.metrics({"member_1": 1.0, "odd": 1.0}, 1)
    run.summary({"early": 1.0})
    killed(run)
    tracking.forward(folder)
    with start(pipeline, folder) as run:
        run.resume(position)
        run.metrics({"member_1": 1.0}, 1)
    assert lasting(folder, "member_0") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert lasting(folder, "member_1") == [(0, 0.0), (1, 1.0)]
    assert set(runs(folder)[0].data.metrics) == {"member_0", "member_1"}


def test_many_kills_and_a_checkpoint_that_is_passed_over(
    pipeline: config.Pipeline, folder: Path
) -> None:
    early = attempt(pipeline, folder, range(4), checkpoint=1, ends=False)
    late = attempt(pipeline, folder, range(2, 6), position=early, checkpoint=4, ends=False)
    tracking.forward(folder)
    attempt(pipeline, folder, range(5, 9), position=late, ends=False)
    # The later checkpoint turned out damaged.
    attempt(pipeline, folder, range(2, 4), position=early, ends=False)
    tracking.forward(folder)
    attempt(pipeline, folder, range(5, 7), position=late)
    assert lasting(folder) == [(step, float(step)) for step in range(7)]


def test_an_attempt_that_does_not_resume_starts_over(
    pipeline: config.Pipeline, folder: Path
) -> None:
    attempt(pipeline, folder, range(5), ends=False)
    tracking.forward(folder)
    attempt(pipeline, folder, range(2, 4))
    assert lasting(folder) == [(2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("new_forwarder", [True, False])
def test_values_that_a_resumed_stage_measures_differently_replace_the_old(
    pipeline: config.Pipeline, folder: Path, new_forwarder: bool
) -> None:
    """As on a GPU. Whoever sends the rest may have recalled the run from the disk."""
    position = attempt(pipeline, folder, range(5), checkpoint=2, ends=False)
    tracking.forward(folder)
    run = start(pipeline, folder)
    run.__enter__()
    run.resume(position)
    forwarder = tracking.Forwarder(folder)
    forwarder.drain()
    run.metrics({"policy/reward": 3.25}, 3)
    if not new_forwarder:
        forwarder.drain()
    run.metrics({"policy/reward": 4.25}, 4)
    run.__exit__(None, None, None)
    assert lasting(folder) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.25), (4, 4.25)]
    assert runs(folder)[0].data.params["kl.coef"] == "0.15"


@pytest.mark.parametrize("last", [4, 7])
def test_a_wiped_spool_keeps_what_mlflow_has_of_the_steps_before(
    pipeline: config.Pipeline, folder: Path, last: int
) -> None:
    position = attempt(pipeline, folder, range(5), checkpoint=2, ends=False)
    tracking.forward(folder)
    for path in (folder / tracking.SPOOL).glob("*.json*"):
        path.unlink()
    attempt(pipeline, folder, range(3, last), position=position)
    assert lasting(folder) == [(step, float(step)) for step in range(last)]


def test_a_spool_and_a_store_that_are_both_gone_begin_anew(
    pipeline: config.Pipeline, folder: Path
) -> None:
    empty = (folder / "mlflow.db").read_bytes()
    position = attempt(pipeline, folder, range(500), checkpoint=400, ends=False)
    tracking.forward(folder)
    (folder / "mlflow.db").write_bytes(empty)
    next((folder / tracking.SPOOL).glob("*.jsonl")).unlink()  # what is known of the run stays
    attempt(pipeline, folder, range(3, 5), position=position)
    assert lasting(folder) == [(3, 3.0), (4, 4.0)]


def test_what_the_killed_attempt_wrote_but_did_not_send_is_sent(
    pipeline: config.Pipeline, folder: Path
) -> None:
    (folder / "curve.png").write_bytes(b"png")
    run = start(pipeline, folder)
    run.__enter__()
    run.figure(folder / "curve.png")
    run.dataset(folder / "curve.png", "pairs", "training")
    run.metrics({"policy/reward": float("nan")}, 0)
    position = run.position()
    run.tags({"odd": "1"})
    killed(run)
    with start(pipeline, folder) as run:
        run.dataset(folder / "curve.png", "pairs", "training")
        run.resume(position)
        run.metrics({"policy/reward": float("inf"), "policy/kl_nats": 1.0}, 1)
    (found,) = runs(folder)
    place = folder / "mlartifacts" / found.info.run_id / "artifacts"
    assert (place / "figures/curve.png").read_bytes() == b"png"
    assert found.data.tags["rlhf.non_finite"] == "policy/reward@0, policy/reward@1"
    assert "odd" not in found.data.tags
    assert set(found.data.metrics) == {"policy/kl_nats"}
    assert len(found.inputs.dataset_inputs) == 1


def test_a_stopped_run_that_is_continued_ends_finished_without_its_error(
    pipeline: config.Pipeline, folder: Path
) -> None:
    reached: list[int] = []

    def stage(steps: range, position: int | None = None) -> None:
        with start(pipeline, folder) as run:
            if position is not None:
                run.resume(position)
            for step in steps:
                run.metrics({"policy/reward": float(step)}, step)
                reached.append(run.position())
            if steps.stop < 6:
                raise Interrupted("stopped after a step")

    with pytest.raises(Interrupted):
        stage(range(3))
    tracking.forward(folder)
    (found,) = runs(folder)
    first = found.info.run_id
    assert (found.info.status, "rlhf.error" in found.data.tags) == ("KILLED", True)
    with pytest.raises(Interrupted):  # stopped again before it is as far as it was: nothing is lost
        stage(range(0), position=reached[1])
    tracking.forward(folder)
    stage(range(2, 6), position=reached[1])
    (found,) = runs(folder)
    assert found.info.run_id == first
    assert (found.info.status, "rlhf.error" in found.data.tags) == ("FINISHED", False)
    assert curve(folder, found, "policy/reward") == [(step, float(step)) for step in range(6)]


def test_a_changed_setting_is_another_run_also_when_it_resumes(
    pipeline: config.Pipeline, folder: Path
) -> None:
    position = attempt(pipeline, folder, range(3), checkpoint=2)
    with start(pipeline, folder, params={"kl": {"coef": 0.3}}) as run:
        run.resume(position)
        run.metrics({"policy/reward": 3.0}, 3)
    old, new = runs(folder)
    assert [len(curve(folder, run, "policy/reward")) for run in (old, new)] == [3, 1]
    assert new.data.params["kl.coef"] == "0.3"


def test_a_run_is_resumed_inside_its_block(pipeline: config.Pipeline, folder: Path) -> None:
    with pytest.raises(RuntimeError, match="with block"):
        start(pipeline, folder).resume(0)


def test_changed_settings_make_another_run_and_the_old_one_steps_back(
    pipeline: config.Pipeline, folder: Path
) -> None:
    for coef in (0.15, 0.3):
        with start(pipeline, folder, params={"kl": {"coef": coef}}) as run:
            run.metrics({"policy/reward": coef}, 0)
    old, new = runs(folder)
    assert (old.data.params["kl.coef"], new.data.params["kl.coef"]) == ("0.15", "0.3")
    assert (old.data.tags["rlhf.current"], new.data.tags["rlhf.current"]) == ("false", "true")


def lock(folder: Path, key: str, path: str, md5: str) -> None:
    """dvc.lock, where a stage has one output."""
    outs = {"outs": [{"path": path, "md5": md5}]}
    (folder / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {key: outs}}))


def evaluated(pipeline: config.Pipeline, folder: Path, inputs: str, gold: float) -> None:
    """An evaluation whose own settings are always the same."""
    settings: dict[str, Any] = {"key": "evaluate@r1-ppo", "kind": "evaluation", "inputs": inputs}
    with start(pipeline, folder, **settings) as run:
        run.metrics({"eval/gold": gold}, 0)
    lock(folder, "evaluate@r1-ppo", "runs/r1/evaluations/r1-ppo", inputs * 4)


def standing(folder: Path) -> list[tuple[float, str, str, str | None]]:
    return [
        (
            run.data.metrics["eval/gold"],
            run.info.status,
            run.data.tags["rlhf.current"],
            run.data.tags.get("dvc.md5"),
        )
        for run in runs(folder)
    ]


def test_other_inputs_are_another_run_and_going_back_makes_the_earlier_one_current(
    pipeline: config.Pipeline, folder: Path
) -> None:
    for inputs, gold in (("aaaa", 0.1), ("bbbb", 0.2)):
        evaluated(pipeline, folder, inputs, gold)
        tracking.tag_outputs(pipeline, "r1", folder)
    earlier, later = "aaaa" * 4, "bbbb" * 4
    assert standing(folder) == [
        (0.1, "FINISHED", "false", earlier),
        (0.2, "FINISHED", "true", later),
    ]
    lock(folder, "evaluate@r1-ppo", "runs/r1/evaluations/r1-ppo", earlier)
    tracking.tag_outputs(pipeline, "r1", folder)
    assert standing(folder) == [
        (0.1, "FINISHED", "true", earlier),
        (0.2, "FINISHED", "false", later),
    ]
    shown = [json.loads(p.read_text()) for p in (folder / tracking.SPOOL).glob("*.state.json")]
    assert [state["run_id"] for state in shown if state["current"]] == [runs(folder)[0].info.run_id]


def test_outputs_that_no_run_is_known_to_have_made_are_written_on_none(
    pipeline: config.Pipeline, folder: Path
) -> None:
    evaluated(pipeline, folder, "bbbb", 0.2)
    tracking.tag_outputs(pipeline, "r1", folder)
    lock(folder, "evaluate@r1-ppo", "runs/r1/evaluations/r1-ppo", "cccc")
    tracking.tag_outputs(pipeline, "r1", folder)
    assert standing(folder) == [(0.2, "FINISHED", "false", "bbbb" * 4)]
    assert tracking.links(pipeline, "r1", folder=folder) == {}


def test_a_forced_rerun_with_equal_results_is_the_same_run_whatever_its_files_are_now(
    pipeline: config.Pipeline, folder: Path
) -> None:
    """As after an update that writes the same numbers into another file."""
    evaluated(pipeline, folder, "aaaa", 0.1)
    tracking.tag_outputs(pipeline, "r1", folder)
    evaluated(pipeline, folder, "aaaa", 0.1)
    lock(folder, "evaluate@r1-ppo", "runs/r1/evaluations/r1-ppo", "cccc")
    tracking.tag_outputs(pipeline, "r1", folder)
    assert standing(folder) == [(0.1, "FINISHED", "true", "cccc")]


def test_what_a_stage_at_work_made_before_is_not_said_of_its_run(
    pipeline: config.Pipeline, folder: Path
) -> None:
    evaluated(pipeline, folder, "aaaa", 0.1)
    tracking.tag_outputs(pipeline, "r1", folder, at_work="evaluate@r1-ppo")
    assert standing(folder) == [(0.1, "FINISHED", "true", None)]


@pytest.mark.parametrize("named", [True, False])
def test_a_copy_of_dvc_exp_is_recorded_as_a_try_and_leaves_the_round_alone(
    pipeline: config.Pipeline, folder: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    evaluated(pipeline, folder, "aaaa", 0.1)
    tracking.tag_outputs(pipeline, "r1", folder)
    before = runs(folder)[0].to_dictionary()
    copy = folder / ".dvc/tmp/exps/tmpab12"
    copy.mkdir(parents=True)
    if named:
        monkeypatch.setenv("DVC_EXP_NAME", "sixth-yaud")
    for inputs, gold in (("aaaa", 0.1), ("bbbb", 0.2)):
        evaluated(pipeline, copy, inputs, gold)
        tracking.tag_outputs(pipeline, "r1", copy)
    tracking.register_champion(pipeline, copy)
    own, same, other = runs(folder)
    assert own.to_dictionary() == before
    name = "sixth-yaud" if named else "tmpab12"
    for run in (same, other):
        assert run.data.tags["rlhf.try"] == name
        assert run.data.tags["rlhf.kind"] == "try-evaluation"
        assert run.data.tags["rlhf.key"] == f"{name}:evaluate@r1-ppo"
    assert not tracking._client(None, folder).search_registered_models()


def test_what_is_not_finite_is_named_and_never_a_number(
    pipeline: config.Pipeline, folder: Path
) -> None:
    with start(pipeline, folder) as run:
        run.metrics({"policy/reward": float("nan"), "policy/kl_nats": 1.0}, 7)
        run.metrics({"policy/reward": float("inf"), "policy/kl_nats": 2.0}, 8)
    (found,) = runs(folder)
    assert set(found.data.metrics) == {"policy/kl_nats"}
    assert found.data.tags["rlhf.non_finite"] == "policy/reward@7, policy/reward@8"


def test_an_exception_marks_the_run_failed(pipeline: config.Pipeline, folder: Path) -> None:
    def stage() -> None:
        with start(pipeline, folder) as run:
            run.metrics({"policy/reward": 1.0}, 0)
            raise FloatingPointError("loss is nan at step 1")

    with pytest.raises(FloatingPointError):
        stage()
    (found,) = runs(folder)
    assert found.info.status == "FAILED"
    assert "loss is nan at step 1" in found.data.tags["rlhf.error"]


def test_a_summary_may_not_sit_on_a_curve(pipeline: config.Pipeline, folder: Path) -> None:
    run = start(pipeline, folder)
    run.metrics({"policy/reward": 1.0}, 3)
    with pytest.raises(ValueError, match="policy/reward"):
        run.summary({"policy/reward": 1.0})


def test_a_lost_store_is_filled_again(pipeline: config.Pipeline, folder: Path) -> None:
    empty = (folder / "mlflow.db").read_bytes()
    with start(pipeline, folder) as run:
        run.metrics({"policy/reward": 1.0}, 0)
        position = run.position()
    (folder / "mlflow.db").write_bytes(empty)
    with start(pipeline, folder) as run:
        run.resume(position)
        run.metrics({"policy/reward": 2.0}, 1)
    (found,) = runs(folder)
    assert curve(folder, found, "policy/reward") == [(0, 1.0), (1, 2.0)]


def test_a_lost_spool_does_not_double_points(pipeline: config.Pipeline, folder: Path) -> None:
    for _ in range(2):
        with start(pipeline, folder) as run:
            for step in (0, 1):
                run.metrics({"policy/reward": float(step)}, step)
        for path in (folder / tracking.SPOOL).glob("*.json*"):
            path.unlink()
    assert lasting(folder) == [(0, 0.0), (1, 1.0)]


def test_a_line_cut_short_by_a_kill_is_skipped(pipeline: config.Pipeline, folder: Path) -> None:
    with start(pipeline, folder) as run:
        run.metrics({"policy/reward": 1.0}, 0)
        with run._path.open("ab") as file:
            file.write(b'{"event": "metr')
        run.metrics({"policy/reward": 2.0}, 1)
    (found,) = runs(folder)
    assert curve(folder, found, "policy/reward") == [(0, 1.0), (1, 2.0)]


def test_settings_beyond_the_limits_become_an_artifact(
    pipeline: config.Pipeline, folder: Path
) -> None:
    with start(pipeline, folder, params={"long": "x" * 9000, "short": 1}):
        pass
    (found,) = runs(folder)
    assert set(found.data.params) == {"short", "config_sha256"}
    kept = folder / "mlartifacts" / found.info.run_id / "artifacts/config.json"
    assert json.loads(kept.read_text())["long"] == "x" * 9000


def test_output_hashes_and_links(pipeline: config.Pipeline, folder: Path) -> None:
    for key, name, kind in (
        ("policy@r1-ppo", "r1/ppo", "policy"),
        ("policy@r1-grpo", "r1/grpo", "policy"),
        ("evaluate@r1-ppo", "r1/ppo evaluation", "evaluation"),
        ("promote@r1", "r1", "round"),
    ):
        with start(pipeline, folder, key=key, name=name, kind=kind) as run:
            if kind != "round":
                run.metrics({f"{kind}/kl_nats": 1.0, f"{kind}/proxy_mean": 1.0}, 0)
    (folder / "dvc.lock").write_text(
        textwrap.dedent("""\
            schema: '2.0'
            stages:
              policy@r1-ppo:
                cmd: x
                outs:
                - path: runs/r1/policies/r1-ppo
                  md5: 0123456789abcdef0123456789abcdef.dir
        """)
    )
    tracking.tag_outputs(pipeline, "r1", folder)
    by_name = {run.info.run_name: run for run in runs(folder)}
    assert by_name["r1/ppo"].data.tags["dvc.md5"] == "0123456789abcdef0123456789abcdef.dir"
    assert "dvc.md5" not in by_name["r1/grpo"].data.tags
    found = tracking.links(pipeline, "r1", folder=folder)
    assert set(found) == {"candidates", "training", "metric", "round"}
    assert by_name["r1/ppo evaluation"].info.run_id in found["metric"]
    assert "proxy_mean" in found["metric"]
    assert by_name["r1"].info.run_id in found["round"]
    for name, kind in (("candidates", "evaluation"), ("training", "policy")):
        assert "/runs?workflowType=machine_learning&compareRunsMode=CHART&" in found[name]
        assert f"kind%60%20%3D%20%27{kind}%27" in found[name]


@pytest.mark.parametrize("declared", [True, False])
def test_links_lead_to_the_server_that_has_the_runs(
    pipeline: config.Pipeline, folder: Path, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    with start(pipeline, folder, key="evaluate@r1-ppo", kind="evaluation") as run:
        run.metrics({"evaluation/proxy_mean": 1.0}, 0)
    address = "https://who:secret@tracking.example:8443/mlflow/"
    if declared:
        pipeline = pipeline.model_copy(update={"tracking": config.Tracking(uri=address)})
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    reader = lineage._Reader(folder, disk=True)
    if declared:
        (state,) = (folder / tracking.SPOOL).glob("*.state.json")
        state.write_text(json.dumps({**json.loads(state.read_text()), "uri": address}))
    found = [
        *tracking.links(pipeline, "r1", folder=folder).values(),
        *tracking.try_links(pipeline, "r1", folder / "nowhere", folder=folder).values(),
        str(reader._link("evaluate@r1-ppo")),
    ]
    assert len(found) == 5
    assert all(url.startswith("https://tracking.example:8443/mlflow/#/") for url in found), found


def test_a_rounds_run_has_links_that_overlay_its_candidates_and_all_rounds(
    pipeline: config.Pipeline, folder: Path
) -> None:
    kinds = (("policy", "policy"), ("evaluate", "evaluation"))
    for round in ("r1", "r2"):
        for stage, kind in kinds:
            for name in ("ppo", "dpo"):
                key = f"{stage}@{round}-{name}"
                with start(pipeline, folder, key=key, round=round, name=key, kind=kind):
                    pass
        key = f"promote@{round}"
        with start(pipeline, folder, key=key, round=round, name=round, kind="round") as run:
            run.note("**promoted**" + " long" * 2000)
    (found,) = (run for run in runs(folder) if run.info.run_name == "r1")
    note = found.data.tags["mlflow.note.content"]
    assert note.startswith("**promoted**")
    relative = re.findall(r"^- \[.+\]\((#/experiments/.+)\)$", note, re.MULTILINE)
    names = ("candidates", "training", "rounds", "gate")
    assert [found.data.tags[f"rlhf.link.{name}"] for name in names] == [
        f"{tracking.UI}/{link}" for link in relative
    ]
    shown = [
        {"evaluate@r1-ppo", "evaluate@r1-dpo"},
        {"policy@r1-ppo", "policy@r1-dpo"},
        {f"evaluate@{round}-{name}" for round in ("r1", "r2") for name in ("ppo", "dpo")},
        {"r1", "r2"},
    ]
    client = tracking._client(None, folder)
    for link, expected in zip(relative, shown, strict=True):
        query = parse_qs(urlsplit(link.removeprefix("#")).query)
        listed = client.search_runs([found.info.experiment_id], query["searchFilter"][0])
        assert {run.info.run_name for run in listed} == expected


STAGE = """
import sys
from pathlib import Path
from rlhf import config, tracking
pipeline = config.load(sys.argv[1])
with tracking.stage_run(pipeline, stage="policy", key="k", round="r1", kind="policy", name="r1/k",
                        algorithm=None, params={}, folder=sys.argv[2]) as run:
    run.metrics({"policy/reward": 1.0}, 0)
    if len(sys.argv) > 3:
        import os
        os.kill(os.getpid(), 9)
print("mlflow" in sys.modules)
"""


def stage(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STAGE, str(PIPELINE), str(folder), *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_under_a_living_flow_a_stage_does_not_import_mlflow(folder: Path) -> None:
    result = stage(folder, ROUNDHOUSE_FORWARDER=ident(os.getpid()))
    assert result.stdout.strip() == "False", result.stderr
    tracking.Forwarder(folder).drain()
    assert len(runs(folder)) == 1


def test_a_dead_flow_does_not_keep_a_stage_from_forwarding(folder: Path) -> None:
    result = stage(folder, ROUNDHOUSE_FORWARDER="1:1")
    assert result.stdout.strip() == "True", result.stderr
    assert len(runs(folder)) == 1


def test_a_killed_stage_ends_as_killed_with_its_points_and_finished_once_it_is_continued(
    folder: Path,
) -> None:
    flow = ident(os.getpid())
    result = stage(folder, "die", ROUNDHOUSE_FORWARDER=flow)
    assert result.returncode == -9
    forwarder = tracking.Forwarder(folder)
    forwarder.drain()
    forwarder.drain()
    (found,) = runs(folder)
    assert found.info.status == "KILLED"
    assert curve(folder, found, "policy/reward") == [(0, 1.0)]
    stage(folder, ROUNDHOUSE_FORWARDER=flow)
    forwarder.drain()
    (again,) = runs(folder)
    assert (again.info.run_id, again.info.status) == (found.info.run_id, "FINISHED")
    assert lasting(folder) == [(0, 1.0)]


def test_a_server_that_does_not_answer_costs_a_warning_and_nothing_else(
    pipeline: config.Pipeline,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    began = time.monotonic()
    with start(pipeline, folder) as run:
        run.metrics({"policy/reward": 1.0}, 0)
    assert time.monotonic() - began < 30  # MLflow's own seven retries take minutes
    assert "MLflow did not take the metrics" in caplog.text
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking.forward(folder)
    (found,) = runs(folder)
    assert found.info.status == "FINISHED"
    assert curve(folder, found, "policy/reward") == [(0, 1.0)]
