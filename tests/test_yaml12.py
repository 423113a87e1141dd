"""The quick reader gives what ruamel.yaml gives: same values and types, same refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from rlhf import yaml12

ROOT = Path(__file__).parents[1]


def both(text: str) -> tuple[Any, Any]:
    def shown(read: Any) -> str:
        try:
            return repr(read(text))  # with types: 1 is not 1.0 is not True
        except Exception as error:
            return type(error).__name__

    return shown(yaml12.load), shown(lambda t: YAML(typ="safe", pure=True).load(t))


@pytest.mark.parametrize(
    "text",
    [
        *["a: 1e-5", "a: 1.0e-5", "a: on", "a: 0777", "a: 0o17", "a: 0x1F", "a: 0b11", "a: 1_000", "a: 2001-01-01"],
        *["a: .5", "a: 5.", "a: +1", "a: -0", "a: 08", "a: 1E+3", "a: .inf", "a: -.inf", "a: .nan", "a: 1:30"],
        *["a: ~", "a:", "a: Null", "a: y", "a: no", "a: TRUE", "a: '1'", 'a: "\\u00e9"', "a: =", "a: .e1"],
        *["a: 1\na: 2", "a: &x {b: 1}\nc: *x", "a: &x {b: 1}\nc:\n  <<: *x", "a: !!str 1", "a: !mine 1"],
        *["%YAML 1.1\n---\na: on", "a: {b: 1:30}", "a: {b", "? [a]\n: b", "1: a\ntrue: b\n~: c", "", "- 1\n- [2, {}]"],
        *["a: |\n  x\n\n  y\nb: >-\n  x\n  y", "a: b\n---\nc: d", "a: 'x\n  y'", "\ta: 1", "a: @x", "a: b: c"],
    ],
)  # fmt: skip
def test_notations_one_by_one(text: str) -> None:
    quick, slow = both(text)
    assert quick == slow


def test_the_repositorys_files() -> None:
    for name in ("pipeline.yaml", "dvc.yaml", "prefect.yaml"):
        quick, slow = both((ROOT / name).read_text(encoding="utf-8"))
        assert quick == slow


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12)
)
DATA = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(DATA)
def test_whatever_dvc_writes_is_read_the_same(data: Any) -> None:
    from dvc.utils.serialize import dumps_yaml

    quick, slow = both(dumps_yaml({"data": data}))
    assert quick == slow


@given(st.text(alphabet="0123456789.eE+-_oxbfniaNI:", max_size=10))
def test_whatever_looks_like_a_number_is_read_the_same(text: str) -> None:
    quick, slow = both(f"a: {text}")
    assert quick == slow


def test_a_pipeline_is_plain_enough_for_the_quick_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(text: str) -> Any:
        raise AssertionError("read by ruamel.yaml")

    monkeypatch.setattr(yaml12, "_ruamel", slow)
    assert yaml12.load((ROOT / "pipeline.yaml").read_text(encoding="utf-8"))["version"] == 1


PIECES = [
    *" \n:,[]{}#-?!&*|>'\"%@=<~.\\+\t\r", "1e-5", "010", "12:30", "yes", "null", "2024-01-31", "<<: ", ": ", "- ", "? ",
    "\n  ", "\n- ", "---\n", "...\n", "&a ", "*a", "!t ", "!!str ", "%YAML 1.1\n", "\x85", "\u2028", "\ufeff", "\x00",
]  # fmt: skip
STARTS = [
    "a: 1\nb: {c: x, d: [1, 2.5]}  # note\ne:\n  - f: 'q'\n  - \"g\\n\"\n",
    "r1:\n  from: r0   # c\n  kl: {where: reward, coef: 0.15}\n  x: |\n    line\n  y: >-\n    fold\n    ed\n",
    "[a, b: c, {d: e}]\n",
    "k: plain\n  continued\n\n  para\nl: ~\nm:\nn: 1.0e-5\n",
]
EDITS = st.lists(
    st.tuples(st.integers(0, 80), st.sampled_from(PIECES), st.integers(0, 2)), max_size=3
)


@given(st.sampled_from(STARTS), EDITS)
@example("a: \t1\n", [])
@example("[-, a]\n", [])
@example("[a,?::c d]\n", [])
@example("{&a: b}\n", [])
@example("a: ! b\nc: !\n", [])
@example("a: !!str 1\n", [])
@example("a: >#-\n  b\n", [])
@example("k:\n  y: >-\n  \n    x\n", [])
@example("a: 1\n...\n...\n", [])
def test_texts_with_errors_and_oddities(start: str, edits: list[tuple[int, str, int]]) -> None:
    """The examples are read otherwise by libyaml."""
    text = start
    for place, piece, length in edits:
        text = text[:place] + piece + text[place + length :]
    quick, slow = both(text)
    assert quick == slow
