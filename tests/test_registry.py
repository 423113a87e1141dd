"""MLflow's alias `champion` in a real store: always the champion, one version for each promotion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf import artifacts, champion, config, tracking

BASE = config.load(Path(__file__).parents[1] / "pipeline.yaml")


@pytest.fixture
def folder(tmp_path: Path, empty_store: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, in a folder with a space in its name, in which the fine-tuned start is there."""
    for name in ("MLFLOW_TRACKING_URI", tracking.FORWARDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "my project"
    place.mkdir()
    (place / "mlflow.db").write_bytes(empty_store)
    policy(place, "r0", "start")
    return place


def policy(folder: Path, round: str, weights: str) -> None:
    place = folder / f"runs/{round}/promoted"
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.safetensors").write_text(weights)


def declare(folder: Path, *names: str, rollback: tuple[str, str] | None = None) -> config.Pipeline:
    """pipeline.yaml with these rounds in a row, and a rollback (to, after)."""
    starts = dict(zip(names, ("r0", *names), strict=False))
    rounds = {n: BASE.rounds["r1"].model_copy(update={"from_": s}) for n, s in starts.items()}
    candidates = {
        f"{n}-dpo": BASE.candidates["r1-dpo"].model_copy(
            update={"round": n, "from_": s, "learns_from": f"{n}/preferences"}
        )
        for n, s in starts.items()
    }
    found = None
    if rollback is not None:
        found = config.Rollback(
            to=rollback[0], after=rollback[1], because="it got worse", by="Ada", at="2026-01-01"
        )
    pipeline = BASE.model_copy(
        update={"rounds": rounds, "candidates": candidates, "rollback": found}
    )
    (folder / "pipeline.yaml").write_text(config.as_yaml(pipeline))
    return pipeline


def promote(
    folder: Path, pipeline: config.Pipeline, round: str, status: str = "promoted", weights: str = ""
) -> None:
    """What the stage leaves and tells; a promotion writes weights of its own."""
    chosen = f"{round}-dpo" if status == "promoted" else None
    if chosen is not None:
        policy(folder, round, weights or f"weights of {round}")
    else:
        start = folder / f"runs/{pipeline.rounds[round].from_}/promoted/model.safetensors"
        policy(folder, round, start.read_text())
    artifacts.write_json(
        folder / f"runs/{round}/metrics/decision.json",
        {
            "round": round,
            "status": status,
            "promoted": chosen,
            "reason": f"why {round}",
            "decision": None,
            "candidates": [{"candidate": f"{round}-dpo", "gold_mean": 0.5, "alarms": None}],
        },
    )
    tracking.register_champion(pipeline, folder)


def versions(folder: Path) -> list[Any]:
    found = tracking._client(None, folder).search_model_versions("name = 'reviews'")
    return sorted(found, key=lambda version: int(version.version))


def alias(folder: Path) -> tuple[str, str]:
    """Round and candidate of the version that the alias points at."""
    version = tracking._client(None, folder).get_model_version_by_alias("reviews", "champion")
    return version.tags["rlhf.round"], version.tags["rlhf.candidate"]


def model_tags(folder: Path) -> dict[str, str]:
    return dict(tracking._client(None, folder).get_registered_model("reviews").tags)


def test_a_promotion_is_a_version_that_points_at_its_path(folder: Path) -> None:
    pipeline = declare(folder, "r1")
    for _ in range(2):
        promote(folder, pipeline, "r1")
    (version,) = versions(folder)
    assert version.source == (folder / "runs/r1/promoted").as_uri()
    assert version.tags == {
        "rlhf.round": "r1",
        "rlhf.candidate": "r1-dpo",
        "rlhf.kind": "promotion",
        "rlhf.by": "gate",
        "rlhf.because": "why r1",
        "rlhf.path": "runs/r1/promoted",
        "rlhf.weights": champion.policy_digest(folder / "runs/r1/promoted"),
        "rlhf.metrics": json.dumps({"gold_mean": 0.5}),
    }
    assert alias(folder) == ("r1", "r1-dpo")


def test_other_weights_of_the_same_round_are_another_version(folder: Path) -> None:
    pipeline = declare(folder, "r1")
    promote(folder, pipeline, "r1", weights="first")
    promote(folder, pipeline, "r1", weights="second")
    assert len(versions(folder)) == 2
    current = tracking._client(None, folder).get_model_version_by_alias("reviews", "champion")
    assert current.version == versions(folder)[1].version


def test_a_policy_that_is_kept_makes_no_version_and_moves_no_alias(folder: Path) -> None:
    pipeline = declare(folder, "r1", "r2", "r3")
    promote(folder, pipeline, "r1", "kept")
    assert alias(folder) == ("r0", "none")
    promote(folder, pipeline, "r2")
    promote(folder, pipeline, "r3", "awaiting")
    assert alias(folder) == ("r2", "r2-dpo")
    assert [version.tags["rlhf.kind"] for version in versions(folder)] == ["initial", "promotion"]


def test_an_old_promote_that_is_run_again_does_not_move_the_alias(folder: Path) -> None:
    pipeline = declare(folder, "r1", "r2")
    for round in ("r1", "r2", "r1"):
        promote(folder, pipeline, round)
    assert alias(folder) == ("r2", "r2-dpo")
    assert len(versions(folder)) == 2


def test_a_rollback_goes_back_to_the_older_version_and_a_promotion_ends_it(folder: Path) -> None:
    pipeline = declare(folder, "r1", "r2")
    for round in ("r1", "r2"):
        promote(folder, pipeline, round)
    back = declare(folder, "r1", "r2", rollback=("r1", "r2"))
    tracking.register_champion(back, folder)
    assert alias(folder) == ("r1", "r1-dpo")
    assert model_tags(folder) == {
        "champion.round": "r1",
        "champion.candidate": "r1-dpo",
        "champion.kind": "rollback",
        "champion.by": "Ada",
        "champion.because": "it got worse",
    }
    assert {version.tags["rlhf.because"] for version in versions(folder)} == {"why r1", "why r2"}
    promote(folder, back, "r2")  # run again: the rollback stands
    assert alias(folder) == ("r1", "r1-dpo")
    promote(folder, declare(folder, "r1", "r2", "r3", rollback=("r1", "r2")), "r3")
    assert alias(folder) == ("r3", "r3-dpo")
    assert model_tags(folder)["champion.because"] == "why r3"
    assert len(versions(folder)) == 3


def test_a_stage_that_began_before_a_rollback_follows_it(folder: Path) -> None:
    pipeline = declare(folder, "r1", "r2", "r3")
    for round in ("r1", "r2"):
        promote(folder, pipeline, round)
    declare(folder, "r1", "r2", "r3", rollback=("r1", "r3"))
    promote(folder, pipeline, "r3", "kept")  # with the settings it has read at its start
    assert alias(folder) == ("r1", "r1-dpo")


def test_without_mlflow_the_alias_follows_later_and_every_promotion_has_its_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = declare(folder, "r1", "r2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for round in ("r1", "r2"):
        promote(folder, pipeline, round)
    assert "MLflow did not take" in caplog.text
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking.forward(folder)
    assert alias(folder) == ("r2", "r2-dpo")
    assert [version.tags["rlhf.round"] for version in versions(folder)] == ["r1", "r2"]


@pytest.mark.parametrize("broken", ["decision", "policy"])
def test_what_is_broken_elsewhere_costs_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    pipeline = declare(folder, "r1", "r2")
    promote(folder, pipeline, "r1")
    if broken == "decision":
        (folder / "runs/r1/metrics/decision.json").write_text("{")
    else:
        (folder / "runs/r1/promoted").rename(folder / "runs/elsewhere")
    tracking.register_champion(pipeline, folder)
    assert "alias champion stays where it is" in caplog.text
    assert alias(folder) == ("r1", "r1-dpo")
