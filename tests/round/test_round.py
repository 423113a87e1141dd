"""A round end to end: what each stage learned, what reruns and what does not, and what is recorded."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ruamel.yaml import YAML

from benchmarks import workspace
from rlhf import config, contracts
from rlhf.champion import policy_digest

CANDIDATES = ("r1-ppo", "r1-grpo", "r1-dpo")


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / name).read_text())


def evaluation(folder: Path, candidate: str) -> pd.DataFrame:
    path = folder / "runs/r1/evaluations" / candidate / "evaluations.parquet"
    return contracts.read(path, contracts.EVALUATIONS)


def report_rows(folder: Path, candidate: str) -> pd.DataFrame:
    table = evaluation(folder, candidate)
    return table[table["split"] == "report"].sort_values("step").reset_index(drop=True)


def hashes(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


# --- what was learned ---


def test_sft_learns_the_demonstrations(finished_round: Path) -> None:
    result = read(finished_round, "r0/metrics/sft.json")
    assert result["heldout_loss_nats"] < 1.5  # a unigram guess over 203 words is above 3
    assert result["heldout_perplexity"] == pytest.approx(2.718281828 ** result["heldout_loss_nats"])


def test_reward_model_beats_chance_and_not_the_labels(finished_round: Path) -> None:
    result = read(finished_round, "r1/metrics/reward_model.json")
    assert result["accuracy"] >= 0.62
    assert result["gold_order_accuracy"] >= 0.62
    assert result["accuracy"] <= result["label_ceiling"]
    assert result["accuracy_lower"] < result["accuracy"] < result["accuracy_upper"]
    assert 0 <= result["calibration_error"] < 0.2


def test_ppo_gains_gold_within_its_kl(finished_round: Path) -> None:
    rows = report_rows(finished_round, "r1-ppo")
    start, end = rows.iloc[0], rows.iloc[-1]
    assert end["gold_mean"] - start["gold_mean"] >= 0.3
    assert end["proxy_mean"] - start["proxy_mean"] >= 0.6
    assert end["win_rate_lower"] > 0.5
    assert 0.5 < end["kl_nats"] < 8


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_every_path_starts_at_the_incoming_policy(finished_round: Path, candidate: str) -> None:
    start = report_rows(finished_round, candidate).iloc[0]
    assert start["checkpoint"] == "incoming"
    assert start["kl_nats"] == 0
    assert start["win_rate"] == 0.5
    assert abs(start["proxy_mean"]) < 0.4  # the scale: mean 0, standard deviation 1 on its answers


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_kl_and_proxy_rise_along_every_path(finished_round: Path, candidate: str) -> None:
    rows = report_rows(finished_round, candidate)
    assert len(rows) >= 3
    assert rows["kl_nats"].iloc[-1] > rows["kl_nats"].iloc[0] + 0.05
    assert rows["proxy_mean"].iloc[-1] > rows["proxy_mean"].iloc[0] + 0.1


def test_choosing_by_proxy_gains_proxy_and_gold(finished_round: Path) -> None:
    path = finished_round / "runs/r1/best_of_n/best_of_n.parquet"
    table = contracts.read(path, contracts.BEST_OF_N).set_index("n")
    assert table.index.tolist() == [1, 2, 4, 8, 16]
    assert table["proxy"].is_monotonic_increasing
    assert table["gold"][8] > table["gold"][1] + 0.3
    assert (table["kl_nats"] <= table["kl_bound_nats"] + 1e-9).all()
    assert table["kl_nats"][16] > 0.9 * table["kl_bound_nats"][16]  # no review has much weight


def test_the_report_says_what_was_decided(finished_round: Path) -> None:
    text = (finished_round / "runs/r1/report/report.html").read_text(encoding="utf-8")
    decision = read(finished_round, "r1/metrics/decision.json")
    assert f"{decision['promoted']} is promoted" in text
    assert text.count("<svg") == 7  # three paths, frontier, best of n, accuracy, calibration
    assert text.count("Cannot be said") == 1
    assert "Cannot be said: a committee of one has no spread." in text
    assert len(text) < 1_000_000


def test_gold_parts_sum_to_gold(finished_round: Path) -> None:
    table = evaluation(finished_round, "r1-ppo")
    parts = [name for name in table.columns if name.startswith("gold/")]
    assert len(parts) == 10
    assert table[parts].sum(axis=1).to_numpy() == pytest.approx(table["gold_mean"].to_numpy())


# --- data ---


def test_prompt_sets_are_disjoint_and_used_as_declared(finished_round: Path) -> None:
    prompts = contracts.read(finished_round / "data/tables/prompts.parquet", contracts.PROMPTS)
    split = dict(zip(prompts["prompt_id"], prompts["split"], strict=True))
    assert len(split) == len(prompts) == 256
    samples = contracts.read(
        finished_round / "runs/r1/preferences/samples.parquet", contracts.SAMPLES
    )
    used = samples.groupby("heldout")["prompt_id"].agg(lambda keys: {split[key] for key in keys})
    assert used[False] == {"preferences"}
    assert used[True] == {"report"}


def test_gold_is_not_written_where_training_reads(finished_round: Path) -> None:
    folder = finished_round / "runs/r1/preferences"
    pairs = contracts.read(folder / "pairs.parquet", contracts.PAIRS)
    samples = contracts.read(folder / "samples.parquet", contracts.SAMPLES)
    assert pairs.loc[~pairs["heldout"], "gold_margin"].isna().all()
    assert samples.loc[~samples["heldout"], "gold"].isna().all()
    assert pairs.loc[pairs["heldout"], "gold_margin"].notna().all()


# --- the decision ---


def test_decision_follows_from_the_evaluations(finished_round: Path) -> None:
    decision = read(finished_round, "r1/metrics/decision.json")
    ranks = {}
    for name in CANDIDATES:
        table = evaluation(finished_round, name)
        rows = table[table["selected"]].set_index("split")
        if rows.loc["report", "win_rate_lower"] >= 0.5 and rows.loc["report", "kl_nats"] <= 12:
            ranks[name] = rows.loc["choose", "gold_mean"]
    assert decision["promoted"] == max(ranks, key=lambda name: ranks[name])
    best = next(c for c in decision["candidates"] if c["candidate"] == decision["promoted"])
    source = finished_round / "runs/r1/policies" / best["candidate"] / best["checkpoint"]
    promoted = hashes(finished_round / "runs/r1/promoted")
    del promoted["lineage.json"]
    assert promoted == hashes(source)


def test_the_promoted_policy_says_what_it_was_made_from(finished_round: Path) -> None:
    found = read(finished_round, "r1/promoted/lineage.json")
    decision = read(finished_round, "r1/metrics/decision.json")
    assert found["candidate"] == decision["promoted"]
    assert found["weights"] == policy_digest(finished_round / "runs/r1/promoted")
    start = read(finished_round, "r0/metrics/sft.json")["weights_sha256"]
    assert found["parent"] == {"round": "r0", "candidate": None, "weights": start}
    pipeline = config.load(finished_round / "pipeline.yaml")
    assert found["config"]["candidate"] == config.digest(pipeline.candidates[found["candidate"]])


def test_mlflow_holds_a_flat_run_per_stage(finished_round: Path) -> None:
    with sqlite3.connect(finished_round / "mlflow.db") as database:
        names = {name for (name,) in database.execute("select name from runs")}
        parents = database.execute(
            "select count(*) from tags where key = 'mlflow.parentRunId'"
        ).fetchone()
        shared = database.execute(
            "select r.name, count(distinct m.key) from metrics m join runs r on m.run_uuid = r.run_uuid "
            "where m.key in ('eval/proxy', 'eval/gold', 'eval/kl_nats') "
            "group by r.name"
        ).fetchall()
        champion = database.execute("select alias from registered_model_aliases").fetchall()
    assert {
        "r0/sft",
        "r1/preferences",
        "r1/reward_model",
        "r1/best_of_n",
        "r1/ppo training",
        "r1/ppo",
        "r1/grpo",
        "r1/dpo",
        "r1",
    } <= names
    assert parents == (0,)
    assert sorted(shared) == [(f"r1/{name}", 3) for name in ("dpo", "grpo", "ppo")]
    assert champion == [("champion",)]


# --- DVC: what reruns ---


def test_a_second_repro_runs_nothing(finished_round: Path) -> None:
    printed = workspace.run(finished_round, "dvc", "repro")
    assert "Running stage" not in printed
    assert "Data and pipelines are up to date" in printed


def test_a_changed_learning_rate_touches_one_candidate(finished_round: Path) -> None:
    path = finished_round / "pipeline.yaml"
    before = path.read_text()
    try:
        yaml = YAML()
        yaml.width = 4096
        pipeline = yaml.load(before)
        pipeline["candidates"]["r1-dpo"]["learning_rate"] = 2.9e-4
        with path.open("w") as file:
            yaml.dump(pipeline, file)
        status = json.loads(workspace.run(finished_round, "dvc", "status", "--json"))
    finally:
        path.write_text(before)
    # What hangs on it is found by DVC when the output changes: evaluate@r1-dpo and promote@r1.
    assert list(status) == ["policy@r1-dpo"]


@pytest.mark.parametrize(
    ("stage", "out"),
    [
        ("policy@r1-dpo", "policies/r1-dpo"),
        ("evaluate@r1-dpo", "evaluations/r1-dpo"),
        ("promote@r1", "promoted"),
    ],
)
def test_the_same_inputs_give_the_same_hash(finished_round: Path, stage: str, out: str) -> None:
    place = finished_round / "runs/r1" / out
    before = hashes(place)
    workspace.run(finished_round, "dvc", "repro", "--quiet", "--single-item", "--force", stage)
    assert hashes(place) == before


def test_pipeline_of_the_repository_is_valid() -> None:
    pipeline = config.load(workspace.ROOT / "pipeline.yaml")
    assert set(pipeline.candidates) == set(CANDIDATES)


def test_every_logged_metric_is_documented(finished_round: Path) -> None:
    page = (workspace.ROOT / "docs/metrics.md").read_text()
    patterns = [
        re.escape(name).replace("_N_", r"_\d+_").replace("NAME", r"\w+").replace("PART", r"\w+")
        for name in re.findall(r"`([a-z_]+/[A-Za-z_]+)`", page)
    ]
    with sqlite3.connect(finished_round / "mlflow.db") as database:
        logged = {key for (key,) in database.execute("select distinct key from metrics")}
    assert len(logged) > 60
    assert [key for key in sorted(logged) if not any(re.fullmatch(p, key) for p in patterns)] == []
