"""The tables that cross a stage, as strict pandera schemas, and how they are read and written.

Rows count from 1 in messages. Tables are Parquet, read through Hugging Face `datasets` in memory
(no cache directory), and written so that the same rows give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pandera.pandas as pa

from rlhf import artifacts
from rlhf.config import SPLITS
from rlhf.errors import BadInput

if TYPE_CHECKING:
    import pyarrow

_MAX_LISTED = 10

# --- prompts and their ids ------------------------------------------------------------------------


def canonical_prompt(prompt: str, messages: str | None) -> str:
    """The text that identifies a prompt: the text itself, or the chat in canonical JSON.

    A chat of one user message is the same prompt as its text.
    """
    if messages is None:
        return prompt
    chat = json.loads(messages)
    if len(chat) == 1 and set(chat[0]) == {"role", "content"} and chat[0]["role"] == "user":
        return str(chat[0]["content"])
    return json.dumps(chat, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def prompt_id(prompt: str, messages: str | None = None) -> str:
    """The first 16 hexadecimal digits of the canonical prompt's sha256."""
    return hashlib.sha256(canonical_prompt(prompt, messages).encode()).hexdigest()[:16]


# --- schemas --------------------------------------------------------------------------------------


def _rule(error: str, function: Any, **options: Any) -> pa.Check:
    return pa.Check(function, error=error, **options)


def _filled() -> pa.Check:
    return _rule("text that is not blank", lambda s: s.str.strip().str.len() > 0)


def _one_of(*values: str) -> pa.Check:
    return _rule(f"one of {', '.join(values)}", lambda s: s.isin(values))


def _between(low: float, high: float) -> pa.Check:
    rule = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
    return _rule(rule, lambda s: (s >= low) & (s <= high))


def _finite() -> pa.Check:
    return _rule("a finite number", lambda s: s.abs() < math.inf)


def _text(*checks: pa.Check, **options: Any) -> pa.Column:
    return pa.Column(str, checks=list(checks), **options)


def _number(*checks: pa.Check, **options: Any) -> pa.Column:
    return pa.Column(float, checks=[_finite(), *checks], **options)


def _whole() -> pa.Column:
    return pa.Column(int, checks=[_between(0, math.inf)])


def _flag() -> pa.Column:
    return pa.Column(bool)


def _is_chat(value: str) -> bool:
    try:
        chat = json.loads(value)
    except ValueError:
        return False
    return (
        isinstance(chat, list)
        and bool(chat)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in chat)
    )


_INF = math.inf
_HEX = r"[0-9a-f]{16}"
_ROUND = r"r[0-9]+(_[a-z0-9]+)*"


def _prompt_id(**options: Any) -> pa.Column:
    return _text(_rule("16 hexadecimal digits", lambda s: s.str.fullmatch(_HEX)), **options)


def _round() -> pa.Column:
    return _text(_rule("a round like r0, r1, r2_variant", lambda s: s.str.fullmatch(_ROUND)))


def _schema(
    name: str, columns: dict[str, pa.Column], *checks: pa.Check, **options: Any
) -> pa.DataFrameSchema:
    return pa.DataFrameSchema(columns, checks=list(checks), strict=True, name=name, **options)


PROMPTS = _schema(
    "prompts",
    {
        "prompt_id": _prompt_id(unique=True),
        "prompt": _text(_filled()),
        "messages": _text(
            _rule("a JSON list of chat messages", lambda s: s.map(_is_chat)), nullable=True
        ),
        "split": _text(_one_of(*SPLITS)),
    },
)
"""The book of all prompts, those of demonstrations and imported pairs too."""

DEMONSTRATIONS = _schema(
    "demonstrations",
    {
        "prompt_id": _prompt_id(),
        "prompt": _text(_filled()),
        "response": _text(_filled()),
        "ended": _flag(),
        "split": _text(_one_of("train", "heldout")),
    },
)
"""Responses to imitate. ended: the end token follows; False where the response was truncated."""

SAMPLES = _schema(
    "samples",
    {
        "sample_id": _text(_filled(), unique=True),
        "group_id": _text(_filled()),
        "prompt_id": _prompt_id(),
        "prompt": _text(_filled()),
        "response": _text(),
        "ended": _flag(),
        "num_tokens": _whole(),
        "round": _round(),
        "heldout": _flag(),
        "gold": _number(nullable=True),
    },
)
"""Answers that a policy wrote; those to one question share a group_id."""

PAIRS = _schema(
    "pairs",
    {
        "pair_id": _text(_filled(), unique=True),
        "group_id": _text(_filled()),
        "prompt_id": _prompt_id(),
        "prompt": _text(_filled()),
        "chosen": _text(),
        "rejected": _text(),
        "chosen_ended": _flag(),
        "rejected_ended": _flag(),
        "tie": _flag(),
        "heldout": _flag(),
        "round": _round(),
        "labeler": _text(_filled()),
        "gold_margin": _number(nullable=True),
    },
    _rule(
        "chosen differs from rejected unless it is a tie",
        lambda t: (t["chosen"] != t["rejected"]) | t["tie"],
    ),
    _rule(
        "a group lies wholly in training or wholly in heldout",
        lambda t: t.groupby("group_id")["heldout"].transform("nunique") <= 1,
    ),
)
"""Compared answers. heldout pairs judge the reward model and never train it."""

EVALUATIONS = _schema(
    "evaluations",
    {
        "checkpoint": _text(_filled()),
        "step": _whole(),
        "split": _text(_one_of("choose", "report")),
        "num_prompts": pa.Column(int, checks=[_between(1, _INF)]),
        "num_samples": pa.Column(int, checks=[_between(1, _INF)]),
        "proxy_mean": _number(),
        "proxy_se": _number(_between(0, _INF), nullable=True),
        "proxy_std_members": _number(_between(0, _INF), nullable=True),
        "gold_mean": _number(nullable=True),
        "gold_se": _number(_between(0, _INF), nullable=True),
        "kl_nats": _number(),
        "kl_se": _number(_between(0, _INF), nullable=True),
        "length_mean": _number(_between(0, _INF)),
        "length_ratio": _number(_between(0, _INF)),
        "entropy_nats": _number(_between(0, _INF)),
        "ended_fraction": _number(_between(0, 1)),
        "alarms": _number(_between(0, _INF), nullable=True),
        "win_rate": _number(_between(0, 1)),
        "win_rate_lower": _number(_between(0, 1)),
        "win_rate_upper": _number(_between(0, 1)),
        "win_rate_initial": _number(_between(0, 1)),
        "win_rate_initial_lower": _number(_between(0, 1)),
        "win_rate_initial_upper": _number(_between(0, 1)),
        "judge": _text(_filled()),
        "selected": _flag(),
        r"^gold/.+$": pa.Column(
            float, checks=[_finite()], nullable=True, regex=True, required=False
        ),
    },
    _rule(
        "win_rate_lower <= win_rate <= win_rate_upper",
        lambda t: t["win_rate"].between(t["win_rate_lower"] - 1e-9, t["win_rate_upper"] + 1e-9),
    ),
    _rule(
        "win_rate_initial_lower <= win_rate_initial <= win_rate_initial_upper",
        lambda t: t["win_rate_initial"].between(
            t["win_rate_initial_lower"] - 1e-9, t["win_rate_initial_upper"] + 1e-9
        ),
    ),
    unique=["checkpoint", "split"],
)
"""One row per checkpoint and prompt split, with a column gold/<part> per part of gold.

win_rate and length_ratio are against the incoming policy, win_rate_initial against r0's; kl_nats is to the policy
that candidates start as. alarms: how many things training warned of, 0 for the incoming policy; null where the
candidate was trained before there were alarms.
"""

ANSWERS = _schema(
    "answers",
    {
        "checkpoint": _text(_filled()),
        "split": _text(_one_of("choose", "report")),
        "prompt_id": _prompt_id(),
        "response": _text(),
        "ended": _flag(),
        "num_tokens": _whole(),
        "proxy": _number(),
        "proxy_std": _number(_between(0, _INF)),
        r"^proxy/member_[0-9]+$": pa.Column(float, checks=[_finite()], regex=True, required=False),
        "gold": _number(nullable=True),
        r"^gold/.+$": pa.Column(
            float, checks=[_finite()], nullable=True, regex=True, required=False
        ),
        "kl": _number(),
        "entropy": _number(_between(0, _INF)),
        "logprob": _number(),
    },
)
"""Every answer that an evaluation sampled: of each checkpoint, the incoming policy, and r0's where that is another.

A checkpoint's answers to one prompt stand next to each other, its prompts in the same order as every other's. kl is
summed over an answer's tokens, entropy the mean over them, logprob the answer's under its own policy, in nats.
"""

BEST_OF_N = _schema(
    "best_of_n",
    {
        "n": pa.Column(int, checks=[_between(1, _INF)], unique=True),
        "proxy": _number(),
        "gold": _number(nullable=True),
        "kl_nats": _number(_between(0, _INF)),
        "kl_bound_nats": _number(_between(0, _INF)),
    },
)
"""Means over report prompts of the best of n answers by proxy. kl_nats: from the answers' probabilities."""

SHOWN = _schema(
    "shown",
    {
        "prompt_id": _prompt_id(),
        "prompt": _text(_filled()),
        "before": _text(),
        "after": _text(),
        "gold_before": _number(nullable=True),
        "gold_after": _number(nullable=True),
        "proxy_before": _number(),
        "proxy_after": _number(),
    },
)
"""Answers to the same prompts before and after a round."""

SCORED_PAIRS = _schema(
    "scored_pairs",
    {
        "pair_id": _text(_filled(), unique=True),
        "prompt_id": _prompt_id(),
        "round": _round(),
        "tie": _flag(),
        "margin": _number(),
        r"^margin/member_[0-9]+$": pa.Column(float, checks=[_finite()], regex=True, required=False),
        "chosen_score": _number(),
        "rejected_score": _number(),
        "chosen_tokens": _whole(),
        "rejected_tokens": _whole(),
        "chosen_first": _flag(),
        "gold_margin": _number(nullable=True),
    },
)
"""Held-out pairs as the committee scores them.

margin: score of chosen less that of rejected, as it was trained, mean over members; its sigmoid is the predicted
chance of the label. The scores are scaled as policies see them: mean 0 and deviation 1 over reference answers.
chosen_first: an order of the two answers that does not depend on the label, for calibration.
"""

TOO_LONG = _schema(
    "too_long",
    {
        "table": _text(_one_of("prompts", "demonstrations", "preferences")),
        "row": pa.Column(int, checks=[_between(1, _INF)]),
        "prompt_tokens": _whole(),
        "response_tokens": _whole(),
        "action": _text(_one_of("drop", "truncate", "drop_equal")),
    },
)
"""Ledger of the rows over the model's limits, in raw token counts, and what was done with each."""


# --- check, read, write ---------------------------------------------------------------------------


def check(table: pd.DataFrame, schema: pa.DataFrameSchema, where: str | Path) -> pd.DataFrame:
    """The table in its schema's types and column order.

    Args:
        where: the file or stage that a message names.
    Raises: BadInput with every failure: row (from 1), column, value, rule. Ten are written out.
    """
    table = table.reset_index(drop=True)
    failures = [*_failures_of_columns(table, schema)]
    if not failures:
        table, failures = _as_types(table, schema)
    if not failures:
        try:
            table = schema.validate(table, lazy=True)
        except pa.errors.SchemaErrors as error:
            failures = _readable(error.failure_cases, table)
    if failures:
        raise BadInput(
            listing(failures),
            where=f"{where} (table {schema.name})",
            rule="rlhf/contracts.py states the columns of every table",
            mend=f"make it again: {artifacts.remake(where)}",
        )
    return table[_ordered(table, schema)]


def read(path: str | Path, schema: pa.DataFrameSchema) -> pd.DataFrame:
    """A checked table from a Parquet file. Raises BadInput if it is missing, damaged or wrong."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    datasets = quiet_datasets()
    path = Path(path)
    mend = f"make it again: {artifacts.remake(path)}"
    if not path.is_file():
        raise BadInput("no such file", where=str(path), mend=mend)
    try:
        with path.open("rb") as file:
            rows = parquet.read_table(file, use_threads=False)
        table = datasets.Dataset(rows.replace_schema_metadata(None)).to_pandas()
    except (arrow.ArrowException, OSError, ValueError, TypeError) as error:
        problem = " ".join(str(error).split())[:300]
        raise BadInput(
            f"not readable as Parquet: {problem}",
            where=str(path),
            rule="a complete Parquet file",
            mend=mend,
        ) from error
    return check(table, schema, path)


def write(table: pd.DataFrame, path: str | Path, schema: pa.DataFrameSchema) -> None:
    """Check the table and write it as Parquet: atomic, and the same rows give the same bytes."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    table = check(table, schema, path)
    fields = [arrow.field(name, _arrow_type(arrow, schema, name)) for name in table.columns]
    rows = arrow.Table.from_pandas(
        table, schema=arrow.schema(fields), preserve_index=False, nthreads=1
    ).replace_schema_metadata(None)
    with artifacts.temporary_file(path) as new:
        parquet.write_table(rows, new, compression="zstd", row_group_size=1 << 20)


def empty(schema: pa.DataFrameSchema) -> pd.DataFrame:
    """A table of zero rows with the schema's required columns and types."""
    return pd.DataFrame(
        {
            name: pd.Series([], dtype=_pandas_type(column))
            for name, column in schema.columns.items()
            if not column.regex
        }
    )


def listing(failures: list[str]) -> str:
    """The first ten failures, one a line, and how many there are."""
    count = f"{len(failures)} problem{'s' if len(failures) > 1 else ''}"
    rest = len(failures) - _MAX_LISTED
    more = [f"... and {rest} more"] if rest > 0 else []
    return "\n    ".join([count, *failures[:_MAX_LISTED], *more])


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value.item() if hasattr(value, "item") else value)
    return text if len(text) <= 60 else text[:57] + "..."


def quiet_datasets() -> Any:
    """The `datasets` library without progress bars and chatter."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _column_of(schema: pa.DataFrameSchema, name: str) -> pa.Column | None:
    columns: dict[str, pa.Column] = schema.columns
    if name in columns and not columns[name].regex:
        return columns[name]
    for pattern, column in columns.items():
        if column.regex and re.fullmatch(pattern, name):
            return column
    return None


def _failures_of_columns(table: pd.DataFrame, schema: pa.DataFrameSchema) -> list[str]:
    names = [str(name) for name in table.columns]
    missing = [n for n, c in schema.columns.items() if c.required and n not in names]
    failures = [f"column {name}: missing" for name in missing]
    for name in dict.fromkeys(names):
        if _column_of(schema, name) is None:
            failures.append(f"column {name}: not a column of this table")
        elif names.count(name) > 1:
            failures.append(f"column {name}: appears {names.count(name)} times")
    return failures


def _pandas_type(column: pa.Column) -> str:
    kind = str(column.dtype)
    return {"float64": "float64", "int64": "int64", "bool": "bool"}.get(kind, "str")


def _as_types(table: pd.DataFrame, schema: pa.DataFrameSchema) -> tuple[pd.DataFrame, list[str]]:
    """Bring columns to their types where nothing is lost or guessed; the rest are failures."""
    converted: dict[str, pd.Series] = {}
    failures: list[str] = []
    for name in table.columns:
        column = _column_of(schema, name)
        assert column is not None
        kind, series = _pandas_type(column), table[name]
        nulls = series.isna()
        if nulls.any() and not column.nullable:
            failures += [f"row {i + 1}, column {name}: null; must be set" for i in _where(nulls)]
            continue
        wrong = ~nulls & ~series.map(lambda value, kind=kind: _is(value, kind)).astype(bool)
        if wrong.any():
            failures += [
                f"row {i + 1}, column {name}={short(series.iloc[i])}: must be {_KINDS[kind]}"
                for i in _where(wrong)
            ]
            continue
        converted[name] = series.astype(kind)
    return (pd.DataFrame(converted), failures) if not failures else (table, failures)


_KINDS = {"str": "text", "float64": "a number", "int64": "a whole number", "bool": "true or false"}


def _is(value: Any, kind: str) -> bool:
    import numpy as np

    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, (bool, np.bool_))
    if isinstance(value, (bool, np.bool_)):
        return False
    if kind == "int64":
        return isinstance(value, (int, np.integer))
    return isinstance(value, (int, float, np.integer, np.floating))


def _where(mask: pd.Series) -> list[int]:
    return [i for i, hit in enumerate(mask.to_numpy(dtype=bool)) if hit]


def _readable(cases: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """One line per failing row and rule."""
    lines: dict[tuple[float, str], None] = {}
    for case in cases.to_dict("records"):
        rule = str(case["check"])
        row = -1 if pd.isna(case["index"]) else int(case["index"])
        if rule in ("field_uniqueness", "multiple_fields_uniqueness"):
            rule = "no two rows may share it"
        if case["schema_context"] == "Column":
            value = table[case["column"]].iloc[row] if row >= 0 else case["failure_case"]
            place = f"column {case['column']}={short(value)}"
        else:
            place = "this row"
        lines[
            (row, f"row {row + 1}, {place}: must be {rule}" if row >= 0 else f"{place}: {rule}")
        ] = None
    return [text.replace("must be no two", "no two") for _, text in sorted(lines)]


def _ordered(table: pd.DataFrame, schema: pa.DataFrameSchema) -> list[str]:
    fixed = [name for name, column in schema.columns.items() if not column.regex]
    return fixed + sorted(name for name in table.columns if name not in fixed)


def _arrow_type(arrow: Any, schema: pa.DataFrameSchema, name: str) -> pyarrow.DataType:
    column = _column_of(schema, name)
    assert column is not None
    kinds = {"str": arrow.string(), "float64": arrow.float64(), "int64": arrow.int64()}
    return kinds.get(_pandas_type(column), arrow.bool_())
