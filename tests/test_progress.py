"""What a stage tells about itself."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlhf import progress
from rlhf.progress import Clock, Progress


def test_a_flow_gets_a_file_it_can_read_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep/policy.json"
    monkeypatch.setenv("ROUNDHOUSE_PROGRESS", str(path))
    with Progress("policy r1-ppo", 4) as bar:
        assert json.loads(path.read_text())["done"] == 0
        bar.update(4, tokens=100, reward=0.5, kl=1.5, entropy=9.0)
        state = json.loads(path.read_text())
        assert (state["done"], state["total"], state["unit"]) == (4, 4, "steps")
        assert state["numbers"] == {"reward": 0.5, "kl": 1.5}
        assert not state["ended"]
    assert json.loads(path.read_text())["ended"]
    assert [file.name for file in path.parent.iterdir()] == ["policy.json"]
    assert capsys.readouterr() == ("", "")


def test_writes_are_at_most_five_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDHOUSE_PROGRESS", str(tmp_path / "p.json"))
    writes = []
    monkeypatch.setattr(progress, "write_json", lambda path, content: writes.append(content))
    with Progress("sft", 1000) as bar:
        for done in range(500):
            bar.update(done)
        time.sleep(0.25)
        bar.update(501)
    assert [write["done"] for write in writes] == [0, 501, 501]  # start, after a pause, end


def test_without_a_terminal_there_is_one_plain_line_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ROUNDHOUSE_PROGRESS", raising=False)
    with Progress("sft", 2, unit="updates") as bar:
        bar.update(1, tokens=5, loss=2.0)
        bar.update(2, tokens=5, loss=1.0)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.startswith("sft: 2/2 updates in ")
    assert "loss 1" in shown
    assert "tokens/s" in shown


def test_a_stage_that_continues_shows_where_it_is_and_its_own_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    path = tmp_path / "sft.json"
    monkeypatch.setenv("ROUNDHOUSE_PROGRESS", str(path))
    with Progress("sft", 30, "updates", done=20) as bar:
        assert json.loads(path.read_text())["done"] == 20
        now += 4
        bar.update(21, tokens=200)
        assert json.loads(path.read_text())["tokens_per_second"] == 50
    monkeypatch.delenv("ROUNDHOUSE_PROGRESS")
    with Progress("sft", 30, "updates", done=20) as bar:
        now += 4
        bar.update(30, tokens=200)
    assert capsys.readouterr().err == "sft: 30/30 updates, the last 10 in 4.0 s, 50 tokens/s\n"


def test_a_clock_counts_what_an_earlier_process_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    monkeypatch.setattr(progress, "_process_age", lambda: 2.0)
    first = Clock("sft")
    with first("training"):
        now += 10
    state = first.state_dict()
    now += 500  # lost
    second = Clock("sft")
    second.load_state_dict(json.loads(json.dumps(state)))
    with second("training"):
        now += 5
    with second("evaluation"):
        now += 1
    found = second.as_dict()
    assert found["seconds"] == {"imports": 4.0, "training": 15.0, "evaluation": 1.0}
    assert found["total_seconds"] == 20.0


def test_a_clock_adds_up_and_counts_the_imports(tmp_path: Path) -> None:
    clock = Clock("policy@r1-ppo")
    for _ in range(2):
        with clock("sampling"):
            time.sleep(0.05)
    content = json.loads(clock.write(tmp_path / "t.json").read_text())
    seconds = content["seconds"]
    assert 0.1 <= seconds["sampling"] < 1.0
    assert seconds["imports"] > 0.05  # this process lives since before pytest was imported
    assert content["total_seconds"] >= seconds["imports"] + seconds["sampling"] - 0.002  # rounded
    assert 10 < content["peak_rss_mb"] < 100_000


def test_a_clock_counts_the_tokens_of_its_stage_over_an_interruption() -> None:
    Clock("an earlier stage of this process").tokens = 7
    first = Clock("sft")
    Progress("sft", 2).update(1, tokens=5)
    Progress("sft, again", 2).update(1, tokens=6)
    assert first.as_dict()["tokens"] == 11
    second = Clock("sft")
    second.load_state_dict(first.state_dict())
    Progress("sft", 2).update(2, tokens=4)
    assert second.as_dict()["tokens"] == 15
    assert first.tokens == 11
