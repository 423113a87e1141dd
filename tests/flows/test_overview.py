"""The rounds side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import finished
import pytest

from flows import overview
from flows.rounds import append_round
from rlhf import config, tracking
from rlhf.config import Pipeline
from rlhf.errors import BadInput

STAGES = ("preferences@{0}", "reward_model@{0}", "policy@{0}-ppo", "policy@{0}-dpo",
          "evaluate@{0}-ppo", "evaluate@{0}-dpo", "best_of_n@{0}", "promote@{0}")  # fmt: skip


def timings(folder: Path, stages: Mapping[str, tuple[float, int]]) -> None:
    for stage, (seconds, tokens) in stages.items():
        content = {"stage": stage, "total_seconds": seconds, "tokens": tokens}
        finished.write(folder / f".scratch/timings/{stage}.json", content)


@pytest.fixture
def rounds(project: Path) -> Pipeline:
    """r1 promotes, r2 keeps, r3 has not run."""
    finished.start(project)
    finished.run(project, "r1", "r0")
    append_round(project / "pipeline.yaml", "r2")
    append_round(project / "pipeline.yaml", "r3")
    finished.run(project, "r2", "r1", kept=True)
    timings(project, {"data": (1.0, 0), "sft": (2.5, 1000)})
    timings(project, {stage.format("r1"): (10.0, 100) for stage in STAGES})
    return config.load(project / "pipeline.yaml")


def by_round(rounds: Pipeline, folder: Path) -> dict[str, dict[str, Any]]:
    table = overview.rows(rounds, folder)
    assert [row["round"] for row in table] == ["r0", "r1", "r2", "r3"]
    return {row["round"]: row for row in table}


def test_one_row_per_round(rounds: Pipeline, project: Path) -> None:
    table = by_round(rounds, project)
    assert [row["status"] for row in table.values()] == ["initial", "promoted", "kept", "unrun"]
    assert [row["policy"] for row in table.values()] == ["r0", "r1-ppo", "r1-ppo", None]
    assert [row["champion"] for row in table.values()] == [False, True, False, False]
    assert [row["by"] for row in table.values()] == [None, "gate", "gate", None]

    first = table["r1"]
    assert (first["gold"], first["proxy"], first["kl"]) == (0.5, 1.0, 6.0)
    assert (first["win_rate"], first["win_rate_lower"], first["win_rate_upper"]) == (
        0.625,
        0.6,
        0.65,
    )
    assert (first["win_rate_initial"], first["win_rate_initial_upper"]) == (0.75, 0.8)
    assert (first["pairs"], first["carried"]) == (35, 0)
    assert (first["tokens"], first["seconds"]) == (800, 80.0)


def test_a_round_whose_start_is_another_now_is_marked(rounds: Pipeline, project: Path) -> None:
    """r2 kept r1-ppo and was measured on it; then r1 is decided anew, and keeps r0."""
    path = project / "runs/r2/metrics/decision.json"
    decision = json.loads(path.read_text())
    decision["incoming"]["policy"] = "r1-ppo"
    finished.write(path, decision)
    assert [row["out_of_date"] for row in by_round(rounds, project).values()] == [False] * 4
    first = project / "runs/r1/metrics/decision.json"
    finished.write(first, json.loads(first.read_text()) | {"status": "kept", "promoted": None})
    table = by_round(rounds, project)
    assert (table["r1"]["policy"], table["r2"]["policy"]) == ("r0", "r1-ppo")
    assert table["r2"]["gold"] == decision["incoming"]["gold_mean"]
    assert [row["out_of_date"] for row in table.values()] == [False, False, True, False]
    assert overview._cells(table["r2"], compact=False)["status"] == "kept, out of date"


def test_the_start_is_as_the_first_round_judged_it(rounds: Pipeline, project: Path) -> None:
    start = by_round(rounds, project)["r0"]
    assert (start["gold"], start["proxy"]) == (0.1, 0.0)
    assert start["win_rate_initial"] is start["kl"] is start["pairs"] is None
    assert (start["tokens"], start["seconds"]) == (1000, 3.5)


def test_a_round_that_kept_its_policy_has_the_policys_numbers_and_moved_nowhere(
    rounds: Pipeline, project: Path
) -> None:
    kept = by_round(rounds, project)["r2"]
    assert (kept["gold"], kept["win_rate_initial"], kept["carried"]) == (0.5, 0.75, 35)
    assert kept["kl"] is kept["win_rate"] is kept["win_rate_lower"] is None


def test_a_person_who_decided_is_named(rounds: Pipeline, project: Path) -> None:
    word = {"choice": "promote", "because": "I like it", "by": "Grace", "at": "2031-01-02"}
    finished.run(project, "r3", "r2", word=word)
    last = by_round(rounds, project)["r3"]
    assert (last["by"], last["because"], last["champion"]) == ("Grace", "I like it", True)


def test_seconds_are_not_known_unless_every_stage_ran_here(rounds: Pipeline, project: Path) -> None:
    (project / ".scratch/timings/evaluate@r1-dpo.json").unlink()
    finished.write(project / ".scratch/timings/sft.json", {"total_seconds": 2.5})  # without tokens
    table = by_round(rounds, project)
    assert (table["r1"]["seconds"], table["r1"]["tokens"]) == (None, None)
    assert (table["r0"]["seconds"], table["r0"]["tokens"]) == (3.5, None)
    finished.write(project / ".scratch/timings/sft.json", "cut sho")
    assert by_round(rounds, project)["r0"]["seconds"] is None


def test_before_anything_has_run(project: Path) -> None:
    table = overview.rows(config.load(project / "pipeline.yaml"), project)
    assert [row["status"] for row in table] == ["initial", "unrun"]
    assert table[0]["champion"]
    assert table[0]["gold"] is table[1]["gold"] is table[1]["pairs"] is None


def test_a_damaged_decision_is_named(rounds: Pipeline, project: Path) -> None:
    finished.write(project / "runs/r1/metrics/decision.json", {"round": "r1"})
    with pytest.raises(BadInput, match="dvc repro promote@r1"):
        overview.rows(rounds, project)


def test_what_is_printed(rounds: Pipeline, project: Path) -> None:
    from rich.console import Console

    finished.write(
        project / "runs/r1/metrics/preferences.json",
        {"train_pairs": 120000, "heldout_pairs": 4000, "carried_pairs": 360000},
    )
    timings(project, {"policy@r1-ppo": (8000.0, 1_000_000_000)})

    def lines(width: int, compact: bool) -> dict[str, str]:
        console = Console(width=width)
        with console.capture() as caught:
            console.print(overview.as_table(overview.rows(rounds, project), compact=compact))
        assert "…" not in caught.get()
        return {line.split()[0]: line for line in caught.get().splitlines() if line.strip()}

    wide = lines(120, compact=False)
    for words in (
        "r1-ppo *",
        "gate",
        "+0.50",
        "0.75 [0.70,0.80]",
        "0.62 [0.60,0.65]",
        "1.00G",
        "8070",
    ):
        assert words in wide["r1"]
    assert "35 +35" in wide["r2"]
    assert "*" not in wide["r2"]
    assert wide["r3"].split() == ["r3", "unrun"]
    narrow = lines(80, compact=True)
    assert "0.62" in narrow["r1"]
    assert " 124k " in narrow["r1"]
    assert overview._count(999_999) == "1.00M"
    assert "[" not in narrow["r1"]


def test_the_table_and_its_figure_are_on_the_newest_decided_round(
    rounds: Pipeline, project: Path, empty_store: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv(tracking.FORWARDER_VARIABLE, raising=False)
    (project / "mlflow.db").write_bytes(empty_store)

    assert not overview.log(rounds, project)  # the rounds ran elsewhere: no run here to put it on
    for name in ("r1", "r2"):
        with tracking.stage_run(
            rounds, stage="promote", key=f"promote@{name}", round=name, kind="round", name=name,
            algorithm=None, params={}, folder=project,
        ):  # fmt: skip
            pass
    assert overview.log(rounds, project)
    assert not overview.log(rounds, project)  # nothing new

    client = MlflowClient(tracking.tracking_uri(None, project))
    experiment = client.get_experiment_by_name(rounds.project)
    runs = {
        run.data.tags["rlhf.round"]: run for run in client.search_runs([experiment.experiment_id])
    }
    assert runs["r2"].info.status == "FINISHED"
    assert not client.list_artifacts(runs["r1"].info.run_id)
    run_id = runs["r2"].info.run_id
    assert [f.path for f in client.list_artifacts(run_id, "figures")] == ["figures/rounds.png"]
    content = json.loads(Path(client.download_artifacts(run_id, "tables/rounds.json")).read_text())
    cells = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    assert [(row["round"], row["gold"]) for row in cells] == [("r0", 0.1), ("r1", 0.5), ("r2", 0.5)]
    assert {"path": "tables/rounds.json", "type": "table"} in json.loads(
        runs["r2"].data.tags["mlflow.loggedArtifacts"]
    )

    timings(project, {stage.format("r2"): (1.0, 1) for stage in STAGES})
    assert overview.log(rounds, project)
    content = json.loads(Path(client.download_artifacts(run_id, "tables/rounds.json")).read_text())
    assert content["data"][2][content["columns"].index("seconds")] == 8.0
