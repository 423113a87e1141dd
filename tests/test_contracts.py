"""Tables between stages: what is refused and how, bytes, damaged files, atomic writes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rlhf import artifacts, contracts
from rlhf.errors import BadInput, StageFailed

SCHEMAS = {
    schema.name: schema
    for schema in (
        contracts.PROMPTS,
        contracts.DEMONSTRATIONS,
        contracts.SAMPLES,
        contracts.PAIRS,
        contracts.EVALUATIONS,
        contracts.SHOWN,
        contracts.TOO_LONG,
    )
}
ID = contracts.prompt_id("q")


def pair(**changes: Any) -> dict[str, Any]:
    values = {
        "pair_id": "p1",
        "group_id": "g1",
        "prompt_id": ID,
        "prompt": "q",
        "chosen": "a",
        "rejected": "b",
        "chosen_ended": True,
        "rejected_ended": False,
        "tie": False,
        "heldout": False,
        "round": "r1",
        "labeler": "simulated",
        "gold_margin": None,
    }
    return values | changes


def evaluation(**changes: Any) -> dict[str, Any]:
    values = {
        name: 0.5 for name, c in contracts.EVALUATIONS.columns.items() if str(c.dtype) == "float64"
    }
    values.pop("^gold/.+$")
    values |= {
        "checkpoint": "step-1",
        "step": 1,
        "split": "choose",
        "num_prompts": 2,
        "num_samples": 4,
        "judge": "gold",
        "selected": True,
    }
    return values | changes


def refused(rows: list[dict[str, Any]], name: str) -> str:
    with pytest.raises(BadInput) as error:
        contracts.check(pd.DataFrame(rows), SCHEMAS[name], "runs/r1/some.parquet")
    return str(error.value)


def test_prompt_id_by_hand() -> None:
    # printf q | sha256sum
    assert ID == "8e35c2cd3bf6641b"
    chat = json.dumps([{"content": "q", "role": "user"}])
    assert contracts.prompt_id("anything", chat) == ID
    two = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    swapped = [dict(reversed(m.items())) for m in two]
    assert contracts.prompt_id("", json.dumps(two)) == contracts.prompt_id("", json.dumps(swapped))
    assert contracts.prompt_id("", json.dumps(two)) != ID


@pytest.mark.parametrize("name", SCHEMAS)
def test_zero_rows_are_written_and_read(tmp_path: Path, name: str) -> None:
    table = contracts.empty(SCHEMAS[name])
    contracts.write(table, tmp_path / "t.parquet", SCHEMAS[name])
    got = contracts.read(tmp_path / "t.parquet", SCHEMAS[name])
    pd.testing.assert_frame_equal(got, table)


def test_rows_survive_and_bytes_are_the_same(tmp_path: Path) -> None:
    rows = [pair(), pair(pair_id="p2", chosen="é\n日本", gold_margin=1.5)]
    table = pd.DataFrame(rows)
    contracts.write(table, tmp_path / "a.parquet", contracts.PAIRS)
    shuffled = table[sorted(table.columns)].set_axis([7, 3])  # other column order, other index
    contracts.write(shuffled, tmp_path / "b.parquet", contracts.PAIRS)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    got = contracts.read(tmp_path / "a.parquet", contracts.PAIRS)
    assert got["chosen"].tolist() == ["a", "é\n日本"]
    assert got["gold_margin"].isna().tolist() == [True, False]
    assert got["tie"].dtype == bool
    contracts.write(got, tmp_path / "c.parquet", contracts.PAIRS)
    assert (tmp_path / "c.parquet").read_bytes() == (tmp_path / "a.parquet").read_bytes()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"prompt": None}, ["row 2, column prompt: null"]),
        ({"prompt": " "}, ["row 2, column prompt=' '", "not blank"]),
        ({"chosen": {"text": "a"}}, ["row 2, column chosen={'text': 'a'}", "text"]),
        ({"chosen": "b"}, ["row 2", "chosen differs from rejected unless it is a tie"]),
        ({"tie": None}, ["row 2, column tie: null"]),
        ({"tie": "no"}, ["row 2, column tie='no'", "true or false"]),
        ({"round": "1"}, ["row 2, column round='1'", "a round like r0"]),
        ({"prompt_id": "abc"}, ["row 2, column prompt_id='abc'", "16 hexadecimal"]),
        ({"pair_id": "p1"}, ["row 2, column pair_id='p1'", "no two rows"]),
        ({"gold_margin": np.inf}, ["row 2, column gold_margin=inf", "finite"]),
        ({"gold_margin": "1"}, ["row 2, column gold_margin='1'", "a number"]),
        ({"heldout": True}, ["row 2", "wholly"]),
        ({"extra": 1}, ["column extra: not a column"]),
    ],
)
def test_broken_pairs(changes: dict[str, Any], parts: list[str]) -> None:
    message = refused([pair(), pair(pair_id="p2") | changes], "pairs")
    for part in [*parts, "runs/r1/some.parquet"]:
        assert part in message


def test_a_tie_may_be_of_equal_texts() -> None:
    table = pd.DataFrame([pair(chosen="b", tie=True)])
    assert len(contracts.check(table, contracts.PAIRS, "here")) == 1


def test_missing_column() -> None:
    row = pair()
    del row["rejected"]
    assert "column rejected: missing" in refused([row], "pairs")


def test_every_failure_counts_and_ten_are_listed() -> None:
    message = refused([pair(pair_id=f"p{i}", round="x") for i in range(30)], "pairs")
    assert "30 problems" in message
    assert message.count("column round") == 10
    assert "row 10," in message
    assert "and 20 more" in message


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"split": "rl"}, "one of choose, report"),
        ({"win_rate": 1.5}, "between 0 and 1"),
        ({"win_rate_lower": 0.6}, "win_rate_lower <= win_rate"),
        ({"kl_nats": None}, "null"),
        ({"kl_nats": np.inf}, "finite"),
        ({"step": -1}, "at least 0"),
        ({"step": 1.5}, "a whole number"),
        ({"gold/length": "x"}, "a number"),
        ({"silver/length": 1.0}, "not a column"),
        ({"entropy_nats": -0.1}, "at least 0"),
        ({"alarms": -1.0}, "at least 0"),
        ({"win_rate_initial": 1.5, "win_rate_initial_upper": 1.5}, "between 0 and 1"),
        ({"win_rate_initial": 0.4}, "win_rate_initial_lower <="),
        ({"win_rate_upper": 0.4}, "win_rate_lower <="),
    ],
)
def test_broken_evaluations(changes: dict[str, Any], rule: str) -> None:
    assert rule in refused([evaluation(**changes)], "evaluations")


def test_evaluations_with_and_without_gold(tmp_path: Path) -> None:
    rows = [
        evaluation(**{"gold/z": 1.0, "gold/a": None}),
        evaluation(split="report", gold_mean=None, gold_se=None, **{"gold/z": 2.0, "gold/a": 0.0}),
    ]
    contracts.write(pd.DataFrame(rows), tmp_path / "t.parquet", contracts.EVALUATIONS)
    got = contracts.read(tmp_path / "t.parquet", contracts.EVALUATIONS)
    assert list(got.columns)[-2:] == ["gold/a", "gold/z"]
    assert got["gold/z"].tolist() == [1.0, 2.0]
    assert "no two rows" in refused([evaluation(), evaluation()], "evaluations")


def test_prompts_messages() -> None:
    row = {"prompt_id": ID, "prompt": "q", "messages": None, "split": "rl"}
    assert len(contracts.check(pd.DataFrame([row]), contracts.PROMPTS, "here")) == 1
    for wrong in ("no json", "[]", '{"role": "user"}', "[1]"):
        assert "JSON list of chat" in refused([row | {"messages": wrong}], "prompts")


@pytest.mark.parametrize("cut", [0, 3, 100, -1, -9])
def test_damaged_files_name_the_stage_that_mends(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "runs/r1/preferences/pairs.parquet"
    contracts.write(pd.DataFrame([pair()]), path, contracts.PAIRS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadInput, match=r"dvc repro preferences@r1"):
        contracts.read(path, contracts.PAIRS)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        contracts.read(tmp_path / "absent.parquet", contracts.PAIRS)
    with pytest.raises(BadInput, match="no such file"):
        contracts.read(tmp_path, contracts.PAIRS)


def test_another_stages_table_is_refused(tmp_path: Path) -> None:
    contracts.write(pd.DataFrame([pair()]), tmp_path / "t.parquet", contracts.PAIRS)
    with pytest.raises(BadInput, match="column response: missing"):
        contracts.read(tmp_path / "t.parquet", contracts.DEMONSTRATIONS)


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("data/tables/prompts.parquet", "dvc repro data"),
        ("/home/me/p/data/tables/prompts.parquet", "dvc repro data"),
        ("runs/r0/preferences/pairs.parquet", "dvc repro data"),
        ("runs/r0/promoted/x", "dvc repro sft"),
        ("runs/r2/preferences/pairs.parquet", "dvc repro preferences@r2"),
        ("runs/r2/reward_model/x", "dvc repro reward_model@r2"),
        ("runs/r2/policies/r2-ppo/x", "dvc repro policy@r2-ppo"),
        ("runs/r2/evaluations/r2-ppo/x", "dvc repro evaluate@r2-ppo"),
        ("runs/r2/promoted/x", "dvc repro promote@r2"),
        ("elsewhere/x", "dvc repro"),
    ],
)
def test_what_makes_a_file_again(path: str, command: str) -> None:
    assert artifacts.remake(path) == command


# --- artifacts ------------------------------------------------------------------------------------


def test_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with artifacts.write_directory(target) as new:
        (new / "a").write_text("1")
        assert not target.exists()
        assert new.parent == target.parent
    assert (target / "a").read_text() == "1"

    class Stop(BaseException):
        pass

    def write_half() -> None:
        with artifacts.write_directory(target) as new:
            (new / "b").write_text("2")
            raise Stop

    with pytest.raises(Stop):
        write_half()
    assert [p.name for p in target.iterdir()] == ["a"]
    with artifacts.write_directory(target) as new:
        (new / "b").write_text("2")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in target.parent.iterdir()] == ["out"]


def test_json_is_sorted_finite_and_atomic(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    artifacts.write_json(path, {"b": np.float64("nan"), "a": [1.5, float("inf")], "c": np.int64(3)})
    assert path.read_text() == '{\n "a": [\n  1.5,\n  null\n ],\n "b": null,\n "c": 3\n}\n'
    with pytest.raises(TypeError):
        artifacts.write_json(path, {"a": object()})
    assert artifacts.read_json(path) == {"a": [1.5, None], "b": None, "c": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]
    path.write_text("{")
    with pytest.raises(BadInput, match="not readable as JSON"):
        artifacts.read_json(path)
    with pytest.raises(BadInput, match="no such file"):
        artifacts.read_json(tmp_path / "absent.json")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_fails_the_stage_with_a_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "m.json"
    artifacts.write_json(path, 1)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(code, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StageFailed, match=r"m\.json: the disk is full(?s:.*)mend"):
        artifacts.write_json(path, 2)
    monkeypatch.undo()
    assert artifacts.read_json(path) == 1
    with pytest.raises(StageFailed, match="disk is full"), artifacts.write_directory(path):
        full()
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]
