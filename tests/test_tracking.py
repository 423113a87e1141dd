"""Spool to MLflow: points are neither lost nor doubled, whatever is rerun, resumed or killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf import config, tracking
from rlhf.lifeline import ident

PIPELINE = Path(__file__).parents[1] / "pipeline.yaml"


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a fresh sqlite store: creating one takes seconds, copying none."""
    folder = tmp_path_factory.mktemp("store")
    tracking._client(None, folder).search_experiments()
    return (folder / "mlflow.db").read_bytes()


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


def test_a_rerun_that_measures_other_values_replaces_its_run(
    pipeline: config.Pipeline, folder: Path
) -> None:
    for offset, last in ((0.0, 5), (0.5, 3)):
        with start(pipeline, folder) as run:
            for step in range(last):
                run.metrics({"policy/reward": offset + step}, step)
    (found,) = runs(folder)
    assert curve(folder, found, "policy/reward") == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert found.info.status == "FINISHED"
    assert found.data.params["kl.coef"] == "0.15"


def test_a_resumed_stage_keeps_what_came_before_its_checkpoint(
    pipeline: config.Pipeline, folder: Path
) -> None:
    run = start(pipeline, folder).__enter__()
    for step in range(4):
        run.metrics({"policy/reward": float(step)}, step)
    tracking._open_runs.remove(run)  # as after kill -9: no end is written
    tracking.forward(folder)
    with start(pipeline, folder) as run:  # the checkpoint was at step 2
        for step in range(2, 5):
            run.metrics({"policy/reward": step + 0.25}, step)
    (found,) = runs(folder)
    assert curve(folder, found, "policy/reward") == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.25),
        (3, 3.25),
        (4, 4.25),
    ]


def test_changed_settings_make_another_run_and_the_old_one_steps_back(
    pipeline: config.Pipeline, folder: Path
) -> None:
    for coef in (0.15, 0.3):
        with start(pipeline, folder, params={"kl": {"coef": coef}}) as run:
            run.metrics({"policy/reward": coef}, 0)
    old, new = runs(folder)
    assert (old.data.params["kl.coef"], new.data.params["kl.coef"]) == ("0.15", "0.3")
    assert (old.data.tags["rlhf.current"], new.data.tags["rlhf.current"]) == ("false", "true")


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
    (folder / "mlflow.db").write_bytes(empty)
    with start(pipeline, folder) as run:
        run.metrics({"policy/reward": 2.0}, 1)
    (found,) = runs(folder)
    assert curve(folder, found, "policy/reward") == [(0, 1.0), (1, 2.0)]


def test_a_lost_spool_does_not_double_points(pipeline: config.Pipeline, folder: Path) -> None:
    for step in (0, 1):
        with start(pipeline, folder) as run:
            run.metrics({"policy/reward": float(step)}, step)
        for path in (folder / tracking.SPOOL).glob("*.json*"):
            path.unlink()
    (found,) = runs(folder)
    assert curve(folder, found, "policy/reward") == [(0, 0.0), (1, 1.0)]


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


def test_the_champion_is_a_version_that_points_at_the_path(
    pipeline: config.Pipeline, folder: Path
) -> None:
    promoted = folder / "runs/r1/promoted"
    promoted.mkdir(parents=True)
    for _ in range(2):
        tracking.register_champion(pipeline, "r1", promoted, {"gold_mean": 0.5}, folder)
    client = tracking._client(None, folder)
    version = client.get_model_version_by_alias("reviews", "champion")
    assert (str(version.version), version.source) == ("1", promoted.as_uri())
    assert version.tags["rlhf.round"] == "r1"


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


def test_a_killed_stage_ends_as_killed_with_its_points(folder: Path) -> None:
    result = stage(folder, "die", ROUNDHOUSE_FORWARDER=ident(os.getpid()))
    assert result.returncode == -9
    forwarder = tracking.Forwarder(folder)
    forwarder.drain()
    forwarder.drain()
    (found,) = runs(folder)
    assert found.info.status == "KILLED"
    assert curve(folder, found, "policy/reward") == [(0, 1.0)]


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
