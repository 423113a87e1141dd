"""A person's word: what is written, what it changes, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import child_environment

from flows import decisions, report
from flows.runner import workspace_lock
from rlhf import champion, config, tracking
from rlhf.errors import BadInput, StageFailed

Flows = Callable[..., "subprocess.CompletedProcess[str]"]


def judged(folder: Path, round: str, status: str = "kept", **changes: Any) -> None:
    """A round that came to its gate."""
    promoted = f"{round}-ppo" if status == "promoted" else None
    verdict = {"status": status, "promoted": promoted, "reason": "by the rules"}
    rows = [
        {
            "candidate": f"{round}-{name}",
            "gold_mean": 0.5,
            "kl_nats": kl,
            "win_rate_lower": 0.6,
            "passes": kl <= 12,
            "failed_rules": [] if kl <= 12 else [f"kl_nats {kl} > 12"],
        }
        for name, kl in (("ppo", 13.0), ("dpo", 14.0))
    ]
    content = {
        "round": round,
        **verdict,
        "verdict": verdict,
        "decision": None,
        "leader": f"{round}-dpo",
        "gate": {
            "metric": "gold_mean",
            "rules": [
                {"metric": "kl_nats", "at_least": None, "at_most": 12.0},
                {"metric": "alarms", "at_least": None, "at_most": 0.0},
            ],
        },
        "incoming": {"candidate": "incoming (r0)", "from": "r0", "gold_mean": 0.1},
        "candidates": rows,
    } | changes
    path = folder / f"runs/{round}/metrics/decision.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    (folder / f"runs/{round}/promoted").mkdir(parents=True, exist_ok=True)
    (folder / f"runs/{round}/promoted/model.safetensors").write_text(promoted or "incoming")


def word(folder: Path, round: str = "r1") -> config.Decision | None:
    return config.load(folder / "pipeline.yaml").rounds[round].decision


def more_rounds(folder: Path, count: int, **starts: str) -> None:
    """Copies of r1 as r2 ... in a row, or from the round that is named."""
    from rlhf import yaml12

    raw = yaml12.load((folder / "pipeline.yaml").read_text())
    for number in range(2, count + 1):
        name, start = f"r{number}", starts.get(f"r{number}", f"r{number - 1}")
        raw["rounds"][name] = raw["rounds"]["r1"] | {"from": start, "sample_from": start}
        for key in ("ppo", "dpo"):
            body = raw["candidates"][f"r1-{key}"]
            learns = body["learns_from"].replace("r1", name)
            raw["candidates"][f"{name}-{key}"] = body | {
                "round": name,
                "from": start,
                "learns_from": learns,
            }
    (folder / "pipeline.yaml").write_text(config.as_yaml(config.parse(raw)))


# --- decide: what is written ---


def test_a_word_is_written_with_who_and_why_and_nothing_else_changes(project: Path) -> None:
    judged(project, "r1")
    before = (project / "pipeline.yaml").read_text().splitlines()
    because = 'it reads better: "warm", #1 of 10, 50 % — ja'
    assert decisions.decide(project, "r1", "promote", because=because, by="Ada", candidate="r1-ppo")
    found = word(project)
    assert found is not None
    assert (found.choice, found.candidate, found.because, found.by) == (
        "promote",
        "r1-ppo",
        because,
        "Ada",
    )
    assert found.at.endswith("+00:00")
    after = (project / "pipeline.yaml").read_text().splitlines()
    start = next(i for i, line in enumerate(before) if "decision: null" in line)
    assert after[:start] == before[:start]
    tail = before[start + 1 :]
    assert after[len(after) - len(tail) :] == tail


def test_the_same_word_twice_is_nothing_to_do(project: Path) -> None:
    judged(project, "r1")
    assert decisions.decide(project, "r1", "keep", because="too long", by="Ada")
    text = (project / "pipeline.yaml").read_text()
    assert not decisions.decide(project, "r1", "keep", because=" too\n long ", by="Ada")
    assert (project / "pipeline.yaml").read_text() == text
    assert decisions.decide(project, "r1", "keep", because="too long", by="Bob")
    assert decisions.decide(project, "r1", "stop", because="too long", by="Bob")
    found = word(project)
    assert found is not None
    assert (found.choice, found.by) == ("stop", "Bob")


def test_a_word_is_taken_back(project: Path) -> None:
    text = (project / "pipeline.yaml").read_text()
    judged(project, "r1")
    assert not decisions.decide(project, "r1", "gate", because="no")
    decisions.decide(project, "r1", "keep", because="too long", by="Ada")
    assert decisions.decide(project, "r1", "gate", because="I was wrong")
    assert word(project) is None
    assert (project / "pipeline.yaml").read_text() == text


def test_without_a_name_it_is_gits_user_or_the_login(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(project, "r1")
    unset = ["git", "config", "--local", "--unset-all", "user.name"]
    subprocess.run(unset, cwd=project, check=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.setenv("LOGNAME", "someone")
    decisions.decide(project, "r1", "keep", because="so")
    found = word(project)
    assert found is not None
    assert found.by == "someone"
    subprocess.run(["git", "config", "user.name", "Grace H."], cwd=project, check=True)
    decisions.decide(project, "r1", "keep", because="so")
    found = word(project)
    assert found is not None
    assert found.by == "Grace H."


def test_without_a_candidate_it_is_the_one_that_the_gate_ranks_first(project: Path) -> None:
    judged(project, "r1", "awaiting")
    decisions.decide(project, "r1", "promote", because="so", by="Ada")
    found = word(project)
    assert found is not None
    assert found.candidate == "r1-dpo"


# --- decide: what is refused ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("r1", "promote", None), r"several are ranked first(?s:.*)one of r1-ppo, r1-dpo"),
        (("r1", "promote", "r1-grpo"), r"r1-grpo was not judged in r1(?s:.*)r1-ppo, r1-dpo"),
        (("r1", "keep", "r1-ppo"), "named with promote, not with keep"),
        (("r1", "maybe", None), "no choice maybe(?s:.*)promote, keep, stop, gate"),
        (("r9", "keep", None), "no round r9(?s:.*)use one of r1"),
        (("r0", "keep", None), "no round r0"),
    ],
)
def test_what_cannot_be_decided_changes_nothing(
    project: Path, arguments: tuple[str, str, str | None], message: str
) -> None:
    judged(project, "r1", leader=None)
    text = (project / "pipeline.yaml").read_text()
    round, choice, candidate = arguments
    with pytest.raises(BadInput, match=message):
        decisions.decide(project, round, choice, because="so", candidate=candidate)
    assert (project / "pipeline.yaml").read_text() == text


def test_a_round_before_its_gate_cannot_be_decided(project: Path) -> None:
    with pytest.raises(BadInput, match=r"not come to its gate(?s:.*)flows run --round r1"):
        decisions.decide(project, "r1", "keep", because="so")


@pytest.mark.parametrize("because", ["", "  \n", "a\x00b", "red \x1b[31m"])
def test_a_reason_is_a_line_of_text(project: Path, because: str) -> None:
    judged(project, "r1")
    with pytest.raises(BadInput, match="--because"):
        decisions.decide(project, "r1", "keep", because=because)


def test_while_a_flow_holds_the_checkout_nothing_is_written(project: Path) -> None:
    judged(project, "r1")
    program = (
        "import sys, time\nfrom flows.runner import workspace_lock\n"
        "with workspace_lock('.'):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=project,
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StageFailed, match="busy: held by pid"):
            decisions.decide(project, "r1", "keep", because="so")
    finally:
        holder.kill()
        holder.wait()
    with workspace_lock(project):  # but a flow may answer for itself
        assert decisions.decide(project, "r1", "keep", because="so")


# --- rollback ---


def test_a_rollback_is_written_with_the_last_round_that_it_goes_before(project: Path) -> None:
    more_rounds(project, 3)
    (project / "runs/r0/promoted").mkdir(parents=True)
    for name in ("r1", "r2"):
        judged(project, name, "promoted")
    assert decisions.rollback(project, "r1", because="it flatters", by="Ada")
    pipeline = config.load(project / "pipeline.yaml")
    assert pipeline.rollback is not None
    # r3 was declared before and starts from r2: what it promotes descends from what was rolled back.
    assert (pipeline.rollback.to, pipeline.rollback.after) == ("r1", "r3")
    assert champion.champion(pipeline, project) == champion.Champion("r1", "r1-ppo", "rollback")
    text = (project / "pipeline.yaml").read_text()
    assert not decisions.rollback(project, "r1", because="it flatters", by="Ada")
    assert (project / "pipeline.yaml").read_text() == text
    assert decisions.rollback(project, "r0", because="and so does this", by="Ada")
    pipeline = config.load(project / "pipeline.yaml")
    assert champion.champion(pipeline, project) == champion.Champion("r0", None, "rollback")


def test_a_rollback_is_taken_back_whole(project: Path) -> None:
    text = (project / "pipeline.yaml").read_text()
    judged(project, "r1", "promoted")
    (project / "runs/r0/promoted").mkdir(parents=True)
    assert not decisions.rollback(project, "none", because="so")
    assert decisions.rollback(project, "r0", because="it flatters", by="Ada")
    assert decisions.rollback(project, "none", because="it does not")
    assert (project / "pipeline.yaml").read_text() == text


def test_a_declared_round_that_starts_there_counts_as_later(project: Path) -> None:
    more_rounds(project, 3, r3="r1")
    for name in ("r1", "r2"):
        judged(project, name, "promoted")
    decisions.rollback(project, "r1", because="it flatters", by="Ada")
    judged(project, "r3", "promoted")
    pipeline = config.load(project / "pipeline.yaml")
    assert champion.champion(pipeline, project) == champion.Champion("r3", "r3-ppo", "promotion")


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("r9", "no round r9(?s:.*)r0, r1, r2, r3"),
        ("r3", "r3 has promoted no policy yet(?s:.*)dvc repro promote@r3"),
        ("r2", "r2 awaits a decision(?s:.*)flows decide r2"),
        ("r0", "r0 has promoted no policy yet(?s:.*)dvc repro sft"),
    ],
)
def test_one_goes_back_only_to_a_round_that_was_decided(
    project: Path, to: str, message: str
) -> None:
    more_rounds(project, 3)
    judged(project, "r1", "promoted")
    judged(project, "r2", "awaiting")
    text = (project / "pipeline.yaml").read_text()
    with pytest.raises(BadInput, match=message):
        decisions.rollback(project, to, because="so")
    assert (project / "pipeline.yaml").read_text() == text


def test_the_champion_is_no_rollback(project: Path) -> None:
    more_rounds(project, 2)
    judged(project, "r1", "promoted")
    judged(project, "r2", "kept")
    for name in ("r1", "r2"):  # r2 passed it on
        assert not decisions.rollback(project, name, because="so")
    assert config.load(project / "pipeline.yaml").rollback is None


# --- the report ---


@pytest.mark.parametrize("status", ["awaiting", "stopped"])
def test_a_report_of_a_round_that_needs_a_person_gives_the_commands(
    project: Path, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(project, "r1", status)
    pipeline = config.load(project / "pipeline.yaml")
    report.print_report(pipeline, "r1", project)
    for text in (capsys.readouterr().out, report.markdown(pipeline, "r1", project)):
        assert 'python -m flows decide r1 promote --candidate r1-dpo --because "..."' in text
        assert ("decide r1 stop" in text) == (status == "awaiting")
        assert "kl_nats <= 12" in text
        assert "13 ✗" in text
        assert "not known ✗" in text


def test_a_report_says_who_overruled_the_gate(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"choice": "promote", "candidate": "r1-ppo", "because": "so", "by": "Ada", "at": "today"}
    gates = {"status": "kept", "promoted": None, "reason": "nobody passes"}
    judged(project, "r1", "promoted", decision=said, verdict=gates)
    pipeline = config.load(project / "pipeline.yaml")
    report.print_report(pipeline, "r1", project)
    for text in (capsys.readouterr().out, report.markdown(pipeline, "r1", project)):
        assert "Ada decided at today; the gate by itself: nobody passes" in text
        assert "flows decide" not in text
    shown = report.rows(report.read_decision("r1", project))
    assert [row[-1] for row in shown] == [
        "",
        "promoted, fails kl_nats",
        "fails kl_nats",
    ]


def test_alarms_are_a_column_where_training_counts_them(project: Path) -> None:
    judged(project, "r1")
    decision = report.read_decision("r1", project)
    assert "alarms" not in report.headings(decision)
    decision["candidates"][0] |= {"alarms": 2.0, "warnings": ["it fell", "it rose"]}
    decision["candidates"][1]["alarms"] = 0.0
    assert report.warnings(decision) == ["alarm of r1-ppo: it fell", "alarm of r1-ppo: it rose"]
    column = report.headings(decision).index("alarms")
    assert [row[column] for row in report.rows(decision)] == ["", "2", "0"]
    assert all(len(row) == len(report.headings(decision)) for row in report.rows(decision))


# --- from end to end ---


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_decision_reaches_dvc_git_and_mlflow_and_can_be_taken_back(
    project: Path, flows: Flows, empty_store: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command: r1 is promoted by the gate, kept by a person, and the gate's again."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (project / "mlflow.db").write_bytes(empty_store)
    for key, value in (("user.name", "Grace"), ("user.email", "grace@example.org")):
        git(project, "config", key, value)
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "-q", "promote@r1"],
        cwd=project,
        env=child_environment(),
        check=True,
    )
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "the project")
    (project / "notes.txt").write_text("mine")
    git(project, "add", "notes.txt")

    result = flows("decide", "r1", "keep", "--because", "it flatters")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "promoted nothing: " in result.stdout
    assert "Grace decided at" in result.stdout
    assert champion.status(project, "r1") == "kept"
    assert "it flatters" in git(project, "log", "-1", "--format=%B")
    assert sorted(git(project, "diff", "--name-only", "HEAD~1", "HEAD").split()) == [
        "dvc.lock",
        "pipeline.yaml",
        "runs/r1/metrics/decision.json",
        "runs/r1/metrics/lineage.json",
    ]
    assert "A  notes.txt" in git(project, "status", "--porcelain").splitlines()
    client = tracking._client(None, project)
    version = client.get_model_version_by_alias("reviews", "champion")
    assert version.tags["rlhf.round"] == "r0"
    status = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "-q"], cwd=project, env=child_environment()
    )
    assert status.returncode == 0

    for key in ("PATH", "PYTHONPATH"):
        monkeypatch.setenv(key, child_environment()[key])
    told = decisions.carry_out_decision(".", "r1", "gate", because="it does not")
    assert [line[:12] for line in told] == ["committed as"]
    assert champion.status(project, "r1") == "promoted"
    assert "Grace leaves it to the gate again: it does not" in git(
        project, "log", "-1", "--format=%B"
    )
    version = client.get_model_version_by_alias("reviews", "champion")
    assert version.tags["rlhf.candidate"] == "r1-ppo"

    told = decisions.carry_out_rollback(".", "r0", because="start over", by="Ada")
    assert told[-1] == "the next round that is appended starts from r0"
    version = client.get_model_version_by_alias("reviews", "champion")
    assert version.tags["rlhf.round"] == "r0"
    assert client.get_registered_model("reviews").tags["champion.by"] == "Ada"
    assert "start over" in git(project, "log", "-1", "--format=%B")

    told = decisions.carry_out_rollback(".", "none", because="it was not it", by="Ada")
    assert told == [
        "champion: r1-ppo (runs/r1/promoted)",
        "the next round that is appended starts from r1",
    ]
    assert client.get_model_version_by_alias("reviews", "champion").tags["rlhf.round"] == "r1"
    subject = git(project, "log", "-1", "--format=%s").strip()
    assert subject == "Rollback taken back: it was not it"
    told = decisions.carry_out_rollback(".", "none", because="it was not it")
    assert told == ["no rollback is declared; champion: r1-ppo (runs/r1/promoted)"]

    # A commit that git refused is made by the same command once it can be.
    hook = project / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(StageFailed, match="run the same again"):
        decisions.carry_out_rollback(".", "r0", because="games length", by="Ada")
    assert "pipeline.yaml" in git(project, "status", "--porcelain")
    hook.unlink()
    told = decisions.carry_out_rollback(".", "r0", because="games length", by="Ada")
    assert told == ["the fine-tuned start (runs/r0/promoted) is the champion already"]
    assert git(project, "log", "-1", "--format=%s").strip() == "Rollback to r0: games length"
    assert "pipeline.yaml" not in git(project, "status", "--porcelain")

    # Settings that the results were not made with: nothing is written before it is refused.
    text = (project / "pipeline.yaml").read_text().replace("steps: 24 ", "steps: 25 ", 1)
    (project / "pipeline.yaml").write_text(text)
    git(project, "commit", "-qm", "an edit", "pipeline.yaml")
    with pytest.raises(BadInput, match=r"other settings than pipeline\.yaml has: policy@r1-ppo"):
        decisions.carry_out_decision(".", "r1", "keep", because="stale")
    assert (project / "pipeline.yaml").read_text() == text
    assert champion.status(project, "r1") == "promoted"


def test_a_wrong_command_is_exit_code_2_without_a_traceback(project: Path, flows: Flows) -> None:
    result = flows("decide", "r1", "promote", "--because", "so")
    assert result.returncode == 2
    assert "has not come to its gate" in result.stderr
    assert "Traceback" not in result.stderr
    result = flows("rollback", "r5", "--because", "so")
    assert result.returncode == 2
    assert "use one of r0, r1" in result.stderr
