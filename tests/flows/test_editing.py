"""An edit changes what it is to change, and every other byte stays."""

from __future__ import annotations

import datetime
import difflib
import math
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flows import editing
from rlhf import config, yaml12
from rlhf.errors import BadInput

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "pipeline.yaml").read_text(encoding="utf-8")
PPO, DPO = "candidates.r1-ppo", "candidates.r1-dpo"
WORD = {
    "choice": "promote",
    "candidate": "r1-ppo",
    "because": 'gold: "up", KL # and\nlength fine',
    "by": "Zoë <z@b>",
    "at": "2026-01-31T09:30:00+00:00",
}


def changed_lines(new: str, old: str = TEXT) -> list[str]:
    """Removed and added lines, with their signs."""
    found = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return [line for line in found if line[:3] not in ("---", "+++") and line[:2] != "@@"]


def at(text: str, path: str) -> Any:
    value = yaml12.load(text)
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


# --- one value ---


KL = "    kl: {where: reward, estimator: k1, coef: 0.15}   # where:"
SIGMOID = "      - {kind: sigmoid, beta: 0.1, label_smoothing: 0.0}"
SAMPLED = "      carry_over: all           # earlier"


@pytest.mark.parametrize(
    ("path", "value", "old", "new"),
    [
        ("seed", 7, "seed: 0      ", "seed: 7      "),
        (f"{PPO}.kl.coef", 1e-5, KL, KL.replace("0.15", "1.0e-05")),
        (f"{PPO}.kl.target", 0.5, KL, KL.replace("0.15", "0.15, target: 0.5")),
        (f"{PPO}.kl", None, KL, "    kl: null   # where:"),
        (f"{DPO}.losses.0.beta", 3e20, SIGMOID, SIGMOID.replace("0.1,", "3.0e+20,")),
        (f"{DPO}.losses", [{"kind": "sft"}], SIGMOID, "      - {kind: sft}"),
        (
            "rounds.r1.preferences.carry_over",
            {"last": 2},
            SAMPLED,
            SAMPLED.replace("all", "{last: 2}"),
        ),
        (
            "rounds.r1.gate.rules.1",
            {"metric": "alarms", "at_most": 0.0},
            "        - {metric: kl_nats, at_most: 12.0}",
            "        - {metric: alarms, at_most: 0.0}",
        ),
        ("sft.adam_betas.1", 0.99, "  adam_betas: [0.9, 0.98]", "  adam_betas: [0.9, 0.99]"),
        ("model.revision", "0123", "  revision: null  ", '  revision: "0123"  '),
        ("resources.cost_per_hour", 2, "  cost_per_hour: null  ", "  cost_per_hour: 2  "),
    ],
)
def test_one_line_changes_and_its_comment_stays(path: str, value: Any, old: str, new: str) -> None:
    text = editing.set_value(TEXT, path, value)
    removed, added = changed_lines(text)
    assert removed.startswith(f"-{old}")
    assert added == f"+{new}{removed[1 + len(old) :]}"
    assert at(text, path) == value


def test_a_list_of_another_length_is_written_on_the_line_of_its_key() -> None:
    text = editing.set_value(TEXT, f"{DPO}.losses", [{"kind": "sigmoid", "beta": 0.1}, "sft"])
    assert changed_lines(text)[-1].startswith(
        "+    losses: [{kind: sigmoid, beta: 0.1}, sft]                     # a weighted sum"
    )


def test_a_new_key_comes_behind_the_others() -> None:
    text = editing.set_value(TEXT, f"{PPO}.entropy_coef", 0.01)
    assert changed_lines(text) == ["+    entropy_coef: 0.01"]
    assert list(at(text, PPO))[-1] == "entropy_coef"


def test_a_value_that_is_there_already_keeps_its_spelling() -> None:
    """Of a mapping too: 1.0e-3 stays where 0.001 is asked for."""
    body = at(TEXT, "rounds.r1.reward_model")
    assert editing.set_value(TEXT, "rounds.r1.reward_model", dict(reversed(body.items()))) == TEXT
    new = editing.set_value(TEXT, "rounds.r1.reward_model", {**body, "epochs": 4})
    assert [line.strip() for line in changed_lines(new)] == ["-      epochs: 3", "+      epochs: 4"]


def test_equal_is_of_the_same_type() -> None:
    assert len(changed_lines(editing.set_value(TEXT, "rounds.r1.gate.margin", 0))) == 2
    assert len(changed_lines(editing.set_value(TEXT, "seed", False))) == 2


def test_a_decision_is_lines_of_its_own_and_goes_without_a_trace() -> None:
    new = editing.set_value(TEXT, "rounds.r1.decision", WORD)
    first, *below = [line[1:] for line in changed_lines(new) if line[0] == "+"]
    assert first.startswith("    decision:  ")
    assert first.endswith("# a person's word over the gate's; written by `python -m flows decide`")
    assert [line.partition(":")[0] for line in below] == [f"      {key}" for key in WORD]
    assert at(new, "rounds.r1.decision") == WORD
    again = editing.set_value(new, "rounds.r1.decision.because", "yes")
    assert [line.strip() for line in changed_lines(again, new)][1:] == ['+      because: "yes"']
    assert editing.set_value(new, "rounds.r1.decision", None) == TEXT


def test_an_optional_section_is_written_at_the_end_of_the_file() -> None:
    back = {"to": "r0", "after": "r1", "because": "on", "by": "me", "at": "2026-01-31"}
    for text in (TEXT, TEXT + "\n# the end\n", TEXT.rstrip("\n")):
        new = editing.set_value(text, "rollback", back)
        assert new.startswith(text)
        assert new.endswith(
            '\n\nrollback:\n  to: r0\n  after: r1\n  because: "on"\n  by: me\n  at: "2026-01-31"\n'
        )
        assert editing.remove(new, "rollback") == text.rstrip("\n") + "\n"
        assert editing.set_value(text, "rollback.to", "r1").endswith("\n\nrollback:\n  to: r1\n")


@pytest.mark.parametrize(
    "style",
    ["decision: null", "decision:", "decision: ~  # why", "decision:\n      # a\n      null", '"decision": null # c'],
)  # fmt: skip
def test_a_null_may_be_written_in_any_way(style: str) -> None:
    text = "\n".join(
        f"    {style}" if line.startswith("    decision:") else line for line in TEXT.split("\n")
    )
    new = editing.set_value(text, "rounds.r1.decision", WORD)
    assert at(new, "rounds.r1.decision") == WORD
    kept = [line for line in text.splitlines() if "decision" not in line]
    if "\n" not in style:
        assert [line for line in new.splitlines() if line in kept] == kept


def test_a_mapping_in_brackets_stays_in_brackets() -> None:
    path = "rounds.r1.preferences.labeler"
    new = editing.set_value(TEXT, path, {"kind": "program", "path": "mine.label"})
    assert "      labeler: {kind: program, path: mine.label}  # P(i > j)" in new
    fewer = editing.set_value(TEXT, path, {"kind": "simulated", "noise": 0.4})
    assert "      labeler: {kind: simulated, noise: 0.4}  # P(i > j)" in fewer
    assert editing.remove(TEXT, f"{path}.kind").count("labeler: {noise: 0.4, flip: 0.0}  #") == 1


def test_other_characters_count_as_one() -> None:
    """A parser that counts bytes would cut elsewhere."""
    text = TEXT.replace("# whole number", "# Zoë 語 🙂 number")
    new = editing.set_value(text, f"{PPO}.steps", 25)
    assert [line[:14] for line in changed_lines(new, text)] == ["-    steps: 24", "+    steps: 25"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rounds.r1.from.x", "rounds.r1.from is 'r0'; it has no x"),
        ("rounds.r1.gate.rules.9.metric", "rounds.r1.gate.rules is a list; it has no 9"),
        ("rounds.r1.gate.rules.x", "rounds.r1.gate.rules is a list; it has no x"),
        ("rounds..x", "no dotted path"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        editing.set_value(TEXT, path, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, object()])
def test_what_cannot_be_written_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="written"):
        editing.set_value(TEXT, "rounds.r1.gate.margin", value)


def test_anchors_are_refused_with_their_line() -> None:
    text = TEXT.replace("  demo:  ", "  demo: &sizes  ")
    line = next(i for i, row in enumerate(text.splitlines(), 1) if "&sizes" in row)
    with pytest.raises(
        BadInput, match=rf"line {line}: uses the anchor sizes(?s:.*)write the values out"
    ):
        editing.set_value(text, "seed", 1)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(["yes", "No", "y", "1e-5", "1.0e-5", "010", "2026-01-31", "12:30", "<<", "=", "~", "a: b", "- a",
                       "a #b", "#", "{a", "null", "r1/preferences", "\x85", "\u2028", "\ufeff", " a ", "%", "@a"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text("abyn1:", min_size=1, max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
SMALL = "a: 1   # one\nb:\n  c: {d: x, e: [1, 2]}  # two\n  f: null   # three\ng:\n- h: 1\n  i: 2\n# end\n"


PLACES = [
    "a",
    "b",
    "b.c",
    "b.c.d",
    "b.c.e",
    "b.c.e.0",
    "b.f",
    "b.new",
    "b.c.new",
    "new",
    "g",
    "g.0",
]


@settings(max_examples=60)
@given(
    st.sampled_from(PLACES),
    values,
    values,
)  # fmt: skip
def test_any_value_anywhere_is_read_back_by_both_yamls(path: str, first: Any, second: Any) -> None:
    """Twice, so that what was written is also taken away again; comments stay."""
    text = SMALL
    for value in (first, second):
        text = editing.set_value(text, path, value)
        expected = editing._with(yaml12.load(SMALL), path.split("."), value)
        assert editing.same(yaml12.load(text), expected)
        assert editing.same(yaml.safe_load(text), expected)
        comments = ["# one", "# end"] + (["# two", "# three"] if path != "b" else [])
        assert all(text.count(comment) >= 1 for comment in comments)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("1: a\nb: 1\n", "1", "could not be set without changing something else"),
        ("? a\n: 1\n", "a", "could not be set"),
        ("\ufeffa: 1\n", "a", "byte-order mark"),
    ],
)
def test_what_would_come_out_otherwise_is_refused(text: str, path: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        editing.set_value(text, path, {"x": "y", "z": {"long": "v" * 80}})


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("y", '"y"'),
        ("N", '"N"'),
        ("yes", '"yes"'),
        ("mean", "mean"),
        ("r1/x", "r1/x"),
        (True, "true"),
    ],
)
def test_words_that_mean_yes_or_no_are_quoted(value: Any, written: str) -> None:
    """By the letter of YAML 1.1 too, which PyYAML does not follow."""
    assert editing.scalar(value) == written


def test_dates_become_text() -> None:
    new = editing.set_value(SMALL, "a", datetime.date(2026, 1, 31))
    assert new.startswith('a: "2026-01-31"   # one')


# --- entries ---


def test_an_entry_is_added_at_the_end_of_its_section_and_taken_away_again() -> None:
    body = at(TEXT, DPO)
    new = editing.append_entry(TEXT, "candidates", "r1-dpo2", body)
    assert list(at(new, "candidates"))[-1] == "r1-dpo2"
    assert at(new, "candidates.r1-dpo2") == body
    assert all(line[0] == "+" for line in changed_lines(new))
    assert editing.remove_entry(new, "candidates", "r1-dpo2") == TEXT


def test_an_entrys_own_comment_and_blank_line_go_with_it() -> None:
    text = "s:\n  # of a\n  a: 1\n\n  # of b, two\n  # lines\n  b: 2  # b\n\n  c: 3\nt: 1\n"
    assert editing.remove_entry(text, "s", "b") == "s:\n  # of a\n  a: 1\n\n  c: 3\nt: 1\n"
    assert editing.remove_entry(text, "s", "c", "b") == "s:\n  # of a\n  a: 1\nt: 1\n"
    assert editing.remove_entry(text, "s", "a", "b", "c") == "s: {}\nt: 1\n"
    with pytest.raises(BadInput, match=r"s\.d: not there"):
        editing.remove_entry(text, "s", "d")


def test_entries_that_stand_apart_are_kept_apart() -> None:
    text = "s:\n    a: 1\n\n    b: 2\n    # of the section\n\n# of t\nt: 1\n"
    new = editing.append_entry(text, "s", "c", "c:   # new\n  d: 1\n")
    assert new == (
        "s:\n    a: 1\n\n    b: 2\n    # of the section\n\n    c:   # new\n      d: 1\n\n# of t\nt: 1\n"
    )
    assert editing.remove_entry(new, "s", "c") == text


@pytest.mark.parametrize("text", ["s: {a: 1}\n", "s: null\n", "t: 1\n", "{s: {a: 1}}\n"])
def test_a_section_that_is_not_in_block_style_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="block style"):
        editing.append_entry(text, "s", "c", {"d": 1})


def test_an_entry_that_is_there_is_not_added_twice() -> None:
    with pytest.raises(BadInput, match="not new"):
        editing.append_entry(TEXT, "rounds", "r1", at(TEXT, "rounds.r1"))


# --- the file ---


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a folder" / "pipeline.yaml"
    path.parent.mkdir()
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_file_keeps_its_mode_its_line_ends_and_where_it_lies(path: Path, tmp_path: Path) -> None:
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    path.chmod(0o640)
    link = tmp_path / "pipeline.yaml"
    link.symlink_to(path)
    text = editing.set_value(link.read_text(encoding="utf-8"), "seed", 5)
    assert editing.save(link, text)
    assert link.is_symlink()
    assert path.read_bytes() == text.replace("\n", "\r\n").encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(path.parent) == ["pipeline.yaml"]
    assert not editing.save(link, text)


def test_what_a_killed_process_left_is_cleared(path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    for pid in (process.pid, os.getppid()):
        (path.parent / f".pipeline.yaml.{pid}.new").write_text("half")
    editing.save(path, editing.set_value(TEXT, "seed", 5))
    left = sorted(os.listdir(path.parent))
    assert left == [f".pipeline.yaml.{os.getppid()}.new", "pipeline.yaml"]


def test_mixed_line_ends_are_refused(path: Path) -> None:
    content = TEXT.replace("\n", "\r\n", 3).encode()
    path.write_bytes(content)
    with pytest.raises(BadInput, match="some lines end in CR LF"):
        editing.save(path, editing.set_value(TEXT, "seed", 5))
    assert path.read_bytes() == content


def test_what_is_no_pipeline_is_not_written(path: Path) -> None:
    with pytest.raises(config.ConfigError, match=r"seed=-1.*\n.*sft\.epochs=0"):
        editing.save(path, editing.set_value(editing.set_value(TEXT, "seed", -1), "sft.epochs", 0))
    assert path.read_text(encoding="utf-8") == TEXT


def test_a_value_that_older_readers_take_for_another_is_not_written(path: Path) -> None:
    wrong = TEXT.replace("learning_rate: 6.0e-4", "learning_rate: 6e-4")
    with pytest.raises(BadInput, match=r"6e-4: read differently by YAML 1\.1"):
        editing.save(path, wrong)
    path.write_text(wrong, encoding="utf-8")  # what the user wrote so may stay
    assert editing.save(path, editing.set_value(wrong, "seed", 3))
