"""Users' tables: JSONL, JSON, CSV, TSV or Parquet files, or a pinned dataset of the hub.

Files are read through Hugging Face `datasets`. Everything that is wrong with a table is reported at
once, with row (from 1, without a CSV's header) and rule.
"""

from __future__ import annotations

import csv
import difflib
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf import config
from rlhf.contracts import canonical_prompt, listing, quiet_datasets, short
from rlhf.data.text import readable_chat
from rlhf.errors import BadInput

BUILDERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_MEND = "correct these rows, then run again"


def read_demonstrations(
    spec: config.FileDemonstrations | config.HubDemonstrations, *, repeats: bool = False
) -> pd.DataFrame:
    """Columns row, prompt, messages (None for a text prompt), response and, if declared, split.

    Args:
        repeats: let equal rows pass; else they are refused.
    """
    rows, where = _rows(spec)
    problems = _Problems(rows)
    columns = _prompt_columns(rows, where, spec.prompt, problems)
    columns["response"] = _texts(rows, where, spec.response, problems)
    if spec.split is not None:
        columns["split"] = _choices(rows, where, spec.split, ("train", "heldout"), problems)
    if not repeats:
        problems.equal_rows(columns, ("prompt", "response"))
    return problems.settle(columns, where)


def read_prompts(spec: config.FilePrompts | config.HubPrompts) -> pd.DataFrame:
    """Columns row, prompt, messages (None for a text prompt) and, if declared, split."""
    rows, where = _rows(spec)
    problems = _Problems(rows)
    columns = _prompt_columns(rows, where, spec.prompt, problems)
    if spec.split is not None:
        columns["split"] = _choices(rows, where, spec.split, config.SPLITS, problems)
        problems.equal_rows(columns, ("prompt", "split"))
    else:
        problems.equal_rows(columns, ("prompt",))
    return problems.settle(columns, where)


def read_preferences(spec: config.FilePreferences | config.HubPreferences) -> pd.DataFrame:
    """Columns row, prompt, messages (None for a text prompt), chosen and rejected."""
    rows, where = _rows(spec)
    problems = _Problems(rows)
    columns = _prompt_columns(rows, where, spec.prompt, problems)
    for name, column in (("chosen", spec.chosen), ("rejected", spec.rejected)):
        columns[name] = _texts(rows, where, column, problems)
    for i, (chosen, rejected) in enumerate(
        zip(columns["chosen"], columns["rejected"], strict=True)
    ):
        if chosen is not None and chosen == rejected:
            problems.add(
                i, f"columns {spec.chosen}, {spec.rejected}: equal texts; a pair compares two"
            )
    problems.equal_rows(columns, ("prompt", "chosen", "rejected"))
    return problems.settle(columns, where)


# --- checking -------------------------------------------------------------------------------------


class _Problems:
    """What is wrong, by row."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._num_rows = len(rows)
        self._found: list[tuple[int, str]] = []

    def add(self, index: int, text: str) -> None:
        self._found.append((index, text))

    def equal_rows(self, columns: Mapping[str, list[Any]], names: tuple[str, ...]) -> None:
        first: dict[tuple[str, ...], int] = {}
        chats = columns["messages"]
        for i in range(self._num_rows):
            if any(columns[name][i] is None for name in names):
                continue
            prompt = canonical_prompt(columns["prompt"][i], chats[i])
            key = (prompt, *(columns[name][i] for name in names[1:]))
            if key in first:
                self.add(i, f"repeats row {first[key] + 1} ({', '.join(names)}); each row once")
            first.setdefault(key, i)

    def settle(self, columns: dict[str, list[Any]], where: str) -> pd.DataFrame:
        """The table, or BadInput with everything that was found."""
        if self._found:
            lines = [f"row {i + 1}, {text}" for i, text in sorted(self._found, key=lambda f: f[0])]
            raise BadInput(
                listing(lines),
                where=where,
                rule="filled text in every declared column",
                mend=_MEND,
            )
        table = pd.DataFrame({"row": range(1, self._num_rows + 1)})
        for name, values in columns.items():
            table[name] = pd.Series(values, dtype="object")
        return table


def _column(rows: list[dict[str, Any]], where: str, name: str) -> list[Any]:
    names = list(rows[0])
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise BadInput(
            f"no column {name}",
            where=where,
            rule=f"the columns are {', '.join(names)}",
            mend=f"{hint}name the column in pipeline.yaml under data",
        )
    return [row[name] for row in rows]


def _texts(
    rows: list[dict[str, Any]], where: str, name: str, problems: _Problems
) -> list[str | None]:
    """The column's texts; None where a row is wrong, which is then noted."""
    values = _column(rows, where, name)
    for i, value in enumerate(values):
        wrong = _text_problem(value)
        if wrong:
            problems.add(i, f"column {name}{wrong}")
    return [None if _text_problem(value) else value for value in values]


def _choices(
    rows: list[dict[str, Any]],
    where: str,
    name: str,
    allowed: tuple[str, ...],
    problems: _Problems,
) -> list[str | None]:
    values = _column(rows, where, name)
    for i, value in enumerate(values):
        if value not in allowed:
            problems.add(i, f"column {name}={short(value)}: must be one of {', '.join(allowed)}")
    return [value if value in allowed else None for value in values]


def _prompt_columns(
    rows: list[dict[str, Any]], where: str, name: str, problems: _Problems
) -> dict[str, list[Any]]:
    """Columns prompt (readable text) and messages (JSON, or None) of every row."""
    prompts: list[str | None] = []
    chats: list[str | None] = []
    for i, value in enumerate(_column(rows, where, name)):
        prompt, chat = None, None
        if isinstance(value, list):
            wrong = _chat_problem(value)
            if not wrong:
                chat = json.dumps(
                    [{k: v for k, v in message.items() if v is not None} for message in value],
                    ensure_ascii=False,
                    sort_keys=True,
                )
                prompt = readable_chat(chat)
        else:
            wrong = _text_problem(value)
            prompt = None if wrong else value
        if wrong:
            problems.add(i, f"column {name}{wrong}")
        prompts.append(prompt)
        chats.append(chat)
    return {"prompt": prompts, "messages": chats}


def _text_problem(value: Any) -> str | None:
    if value is None or (isinstance(value, float) and value != value):
        return ": null; must be text"
    if not isinstance(value, str):
        return f"={short(value)}: {_kind(value)}; must be text"
    if not value.strip():
        return f"={short(value)}: empty; must be text that is not blank"
    if any("\ud800" <= char <= "\udfff" for char in value):
        return f"={short(value)}: half a surrogate pair; must be valid Unicode"
    return None


def _chat_problem(value: list[Any]) -> str | None:
    rule = "must be text, or a list of {role, content} messages"
    if not value:
        return f": an empty list; {rule}"
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            return f"={short(value)}: {rule}"
        for key in ("role", "content"):
            wrong = _text_problem(message[key])
            if wrong:
                return f", {key} of a message{wrong}"
    if value[-1]["role"] == "assistant":
        return ": the last message is the assistant's; a prompt ends before the response"
    return None


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", bool: "true or false", int: "a number"}
    return names.get(type(value), "a number" if isinstance(value, float) else "not text")


# --- reading --------------------------------------------------------------------------------------


def _rows(spec: config.FileTable | config.HubTable) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file or hub dataset, and the name messages give it."""
    if isinstance(spec, config.HubTable):
        where = f"{spec.name}@{spec.revision}"
        rows = _hub_rows(spec, where)
    else:
        where = spec.path
        rows = _file_rows(Path(spec.path))
    if not rows:
        raise BadInput("the table is empty", where=where, rule="at least one row", mend="add rows")
    return rows, where


def _hub_rows(spec: config.HubTable, where: str) -> list[dict[str, Any]]:
    datasets = quiet_datasets()
    try:
        dataset = datasets.load_dataset(
            spec.name, spec.subset, split=spec.part, revision=spec.revision
        )
    except Exception as error:  # the library and the network raise many kinds
        raise BadInput(
            f"cannot be loaded: {_reason(error)}",
            where=where,
            rule="what datasets.load_dataset(name, subset, split=part, revision=...) finds",
            mend="correct name, subset, part or revision; check the network and HF_TOKEN; "
            "or save it as a file and use kind: file",
        ) from error
    return _rows_of(dataset)


def _file_rows(path: Path) -> list[dict[str, Any]]:
    builder = BUILDERS.get(path.suffix.lower())
    if not path.is_file():
        raise BadInput(
            "is a directory" if path.is_dir() else "no such file",
            where=str(path),
            rule="a file of rows",
            mend="correct the path in pipeline.yaml under data",
        )
    if builder is None:
        raise BadInput(
            f"unknown kind of file: {path.suffix or 'no suffix'}",
            where=str(path),
            rule=f"one of {', '.join(BUILDERS)}",
            mend="convert the file, or rename it to its kind",
        )
    if path.stat().st_size == 0:
        raise BadInput(
            "the file is empty", where=str(path), rule="at least one row", mend="add rows"
        )
    options = _csv_options(path) if builder == "csv" else {}
    try:
        dataset = _load(builder, path, options)
        rows = _rows_of(dataset)
    except Exception as error:  # the library wraps its parsers' errors in kinds of its own
        if builder == "json":
            return _plain_json_rows(path)
        if "corresponds to no data" in _reason(error):
            return []
        raise BadInput(
            f"not readable as {builder}: {_reason(error)}",
            where=str(path),
            rule=f"a complete {builder} file",
            mend="correct the file",
        ) from error
    if builder == "json" and any("timestamp" in str(kind) for kind in dataset.features.values()):
        return _plain_json_rows(path)  # texts that look like dates stay texts
    return rows


def _load(builder: str, path: Path, options: dict[str, Any]) -> Any:
    """The dataset in memory; its cache lives only as long as the reading."""
    datasets = quiet_datasets()
    with tempfile.TemporaryDirectory() as cache:
        # A plain name, since the library reads *, ? and [ in paths as patterns.
        link = Path(cache) / f"table{path.suffix.lower()}"
        link.symlink_to(path.resolve())
        return datasets.load_dataset(
            builder,
            data_files=str(link),
            split="train",
            cache_dir=f"{cache}/cache",
            keep_in_memory=True,
            **options,
        )


def _rows_of(dataset: Any) -> list[dict[str, Any]]:
    columns = dataset[:]
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _csv_options(path: Path) -> dict[str, Any]:
    """Every column as text: neither "NA" nor "007" becomes something else.

    Raises: BadInput for rows with more or fewer fields than the header, which parsers shift.
    """
    datasets = quiet_datasets()
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = (fields for fields in csv.reader(file, delimiter=separator) if fields)
            names = next(lines, [])
            ragged = [
                f"row {row}, {len(fields)} fields: must be {len(names)}, as in the header"
                for row, fields in enumerate(lines, start=1)
                if len(fields) != len(names)
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(
            f"not readable as csv: {error}",
            where=str(path),
            rule="a complete csv file in UTF-8",
            mend="correct the file",
        ) from None
    if len(set(names)) != len(names):
        ragged.insert(0, f"header, two columns of one name in {', '.join(names)}")
    if ragged:
        raise BadInput(
            listing(ragged),
            where=str(path),
            rule="a header of unique names, and every row with a field for each",
            mend='put texts that hold the separator in "quotes"',
        )
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {
        "sep": separator,
        "features": features,
        "keep_default_na": False,
        "encoding": "utf-8-sig",
    }


def _plain_json_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON file that `datasets` cannot take, or BadInput that names the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"not UTF-8: {error}", where=str(path), mend="save it as UTF-8") from None
    values: Iterable[Any]
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        values = _parse(text, str(path), "")
    else:
        lines = enumerate(text.split("\n"), start=1)
        values = [_parse(line, str(path), f"line {n}: ") for n, line in lines if line.strip()]
    rows = list(values)
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadInput(
                f"row {i + 1} is {_kind(row)}: {short(row)}",
                where=str(path),
                rule="each row is a JSON object with the declared columns",
                mend=_MEND,
            )
    names = list(dict.fromkeys(name for row in rows for name in row))
    if rows and not names:
        raise BadInput("the objects have no columns", where=str(path), mend=_MEND)
    return [{name: row.get(name) for name in names} for row in rows]


def _parse(text: str, where: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{place}not JSON: {error}",
            where=where,
            rule="JSONL: one JSON object a line; JSON: one list of objects",
            mend="correct the file",
        ) from None


def _reason(error: BaseException) -> str:
    """The innermost cause in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
