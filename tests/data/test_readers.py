"""What people bring, and what is refused: always BadInput with row and rule, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlhf import config
from rlhf.data import readers
from rlhf.errors import BadInput

GOOD = [{"prompt": "a", "response": "x"}, {"prompt": "b", "response": "y"}]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def demonstrations(path: str, **names: Any) -> pd.DataFrame:
    return readers.read_demonstrations(config.FileDemonstrations(kind="file", path=path, **names))


def prompts(path: str, **names: Any) -> pd.DataFrame:
    return readers.read_prompts(config.FilePrompts(kind="file", path=path, **names))


def pairs(path: str, **names: Any) -> pd.DataFrame:
    return readers.read_preferences(config.FilePreferences(kind="file", path=path, **names))


def refused(rows: list[Any], tmp_path: Path, read: Any = demonstrations, **names: Any) -> str:
    with pytest.raises(BadInput) as error:
        read(jsonl(tmp_path / "t.jsonl", rows), **names)
    return str(error.value)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_every_format_gives_the_same_table(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table.{suffix}"
    table = pd.DataFrame(GOOD)
    if suffix == "jsonl":
        jsonl(path, GOOD)
    elif suffix == "json":
        path.write_text(json.dumps(GOOD), encoding="utf-8")
    elif suffix == "parquet":
        table.to_parquet(path)
    else:
        table.to_csv(path, sep="\t" if suffix == "tsv" else ",", index=False)
    got = demonstrations(str(path))
    assert got["row"].tolist() == [1, 2]
    assert got["prompt"].tolist() == ["a", "b"]
    assert got["messages"].tolist() == [None, None]
    assert got["response"].tolist() == ["x", "y"]


def test_columns_are_named_by_the_declaration(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"q": "a", "best": "x", "worst": "y", "other": 1}])
    got = pairs(path, prompt="q", chosen="best", rejected="worst")
    assert got[["prompt", "chosen", "rejected"]].to_numpy().tolist() == [["a", "x", "y"]]


def test_csv_is_text_throughout(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('\ufeffprompt,response\nNA,007\n"a\nb","1,5"\n', encoding="utf-8")
    got = demonstrations(str(path))
    assert got["prompt"].tolist() == ["NA", "a\nb"]
    assert got["response"].tolist() == ["007", "1,5"]


def test_texts_that_look_like_dates_stay_texts(tmp_path: Path) -> None:
    got = prompts(jsonl(tmp_path / "t.jsonl", [{"prompt": "2024-01-01"}]))
    assert got["prompt"].tolist() == ["2024-01-01"]


def test_names_that_look_like_patterns(tmp_path: Path) -> None:
    (tmp_path / "a [1]*").mkdir()
    assert len(prompts(jsonl(tmp_path / "a [1]*" / "t?.jsonl", [{"prompt": "a"}]))) == 1


def test_chats_and_texts_may_mix(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    got = prompts(jsonl(tmp_path / "t.jsonl", [{"prompt": chat}, {"prompt": "text"}]))
    assert got["prompt"].tolist() == ["system: be kind\nuser: hi", "text"]
    assert json.loads(got["messages"][0]) == chat
    assert got["messages"][1] is None


def test_reading_leaves_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    demonstrations(jsonl(tmp_path / "t.jsonl", GOOD))
    assert list(cache.rglob("*")) == []


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (None, "null"),
        ("", "empty"),
        (" \n\t", "empty"),
        (3, "a number"),
        (1.5, "a number"),
        (True, "true or false"),
        ({"text": "x"}, "a mapping"),
        (["x"], "a list"),
        ("\ud800", "surrogate"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_response_that_is_not_text(tmp_path: Path, value: object, rule: str, alone: bool) -> None:
    rows = [{"prompt": "a", "response": value}]
    row = 1
    if not alone:
        rows, row = [*GOOD, *rows], 3
    message = refused(rows, tmp_path)
    assert f"row {row}, column response" in message
    assert rule in message
    assert "t.jsonl" in message


@pytest.mark.parametrize(
    "value",
    [
        [],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": " "}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ["a"],
        {"role": "user", "content": "a"},
    ],
)
def test_prompts_that_are_no_chat(tmp_path: Path, value: object) -> None:
    message = refused([{"prompt": "a"}, {"prompt": value}], tmp_path, prompts)
    assert "row 2, column prompt" in message


def test_missing_column_suggests_the_near_name(tmp_path: Path) -> None:
    message = refused([{"prompt": "a", "respons": "x"}], tmp_path)
    assert "no column response" in message
    assert "did you mean respons?" in message


def test_duplicate_rows(tmp_path: Path) -> None:
    message = refused([*GOOD, GOOD[0]], tmp_path)
    assert "row 3, repeats row 1" in message
    same = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}]
    assert "row 2, repeats row 1" in refused(same, tmp_path, prompts)
    two_answers = [{"prompt": "a", "response": "x"}, {"prompt": "a", "response": "y"}]
    assert len(demonstrations(jsonl(tmp_path / "two.jsonl", two_answers))) == 2


def test_chosen_equal_to_rejected(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "x", "rejected": "y"},
        {"prompt": "b", "chosen": "x", "rejected": "x"},
    ]
    message = refused(rows, tmp_path, pairs)
    assert "row 2, columns chosen, rejected: equal" in message
    assert "row 1" not in message


def test_split_must_be_known(tmp_path: Path) -> None:
    rows = [GOOD[0] | {"part": "train"}, GOOD[1] | {"part": "test"}]
    message = refused(rows, tmp_path, split="part")
    assert "row 2, column part='test': must be one of train, heldout" in message


def test_all_problems_at_once_ten_written_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "response": None if i % 2 else ""} for i in range(25)]
    message = refused(rows, tmp_path)
    assert "25 problems" in message
    assert message.count("row ") == 10
    assert "and 15 more" in message


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("a.jsonl", "", "empty"),
        ("a.jsonl", "\n\n", "empty"),
        ("a.json", "[]", "empty"),
        ("a.csv", "prompt,response\n", "empty"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt":', "line 2: not JSON"),
        ("a.jsonl", "1\n2\n", "row 1 is a number"),
        ("a.jsonl", "{}\n{}\n", "no columns"),
        ("a.json", '[{"prompt": "a"},', "not JSON"),
        ("a.csv", "prompt,response\na,b,c\n", "row 1, 3 fields"),
        ("a.csv", "prompt,response\na,b\nc\n", "row 2, 1 fields"),
        ("a.csv", "prompt,prompt\na,b\n", "two columns of one name"),
        ("a.parquet", "PAR1 and no more", "not readable as parquet"),
        ("a.xlsx", "x", "unknown kind of file"),
        ("a", "x", "unknown kind of file"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: str, rule: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadInput, match=rule) as error:
        demonstrations(str(path))
    assert str(path) in str(error.value)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    for name, text in (("a.csv", "prompt,response\na,é\n"), ("a.jsonl", '{"prompt": "é"}\n')):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        with pytest.raises(BadInput, match=r"(?i)utf-8"):
            demonstrations(str(tmp_path / name))


def test_empty_parquet_and_absent_file_and_directory(tmp_path: Path) -> None:
    pd.DataFrame(GOOD).iloc[:0].to_parquet(tmp_path / "z.parquet")
    with pytest.raises(BadInput, match="empty"):
        demonstrations(str(tmp_path / "z.parquet"))
    with pytest.raises(BadInput, match="no such file"):
        demonstrations(str(tmp_path / "absent.jsonl"))
    with pytest.raises(BadInput, match="is a directory"):
        demonstrations(str(tmp_path))


def test_hub_dataset_is_pinned_and_its_failure_is_bad_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    asked: list[Any] = []

    def load(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return datasets.Dataset.from_list(GOOD)

    spec = config.HubDemonstrations(kind="hub", name="own/set", revision="abc", part="test")
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert readers.read_demonstrations(spec)["response"].tolist() == ["x", "y"]
    assert asked == [(("own/set", None), {"split": "test", "revision": "abc"})]

    def fail(*args: Any, **options: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(BadInput, match="no route"):
        readers.read_demonstrations(spec)
