"""Labels from gold: their frequencies, what a draw depends on, users' functions, which pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlhf import config, labelers
from rlhf.errors import BadInput
from rlhf.labelers import Answers, SimulatedLabeler, choose_pairs
from rlhf.rewards.gold import Gold, load_gold


def gold_of(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Gold:
    """A gold program in a module of its own; names must differ between tests."""
    (tmp_path / f"{name}.py").write_text("import pandas as pd\n" + body, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return load_gold(config.Gold(kind="program", path=name))


def answers(prefix: str, gold: list[float]) -> Answers:
    ids = [f"{prefix}{i}" for i in range(len(gold))]
    return Answers(ids, [f"text {name}" for name in ids], [True] * len(ids), gold)


def simulated(noise: float = 0.4, flip: float = 0.0, seed: int = 0) -> SimulatedLabeler:
    return SimulatedLabeler(None, noise, flip, seed)  # type: ignore[arg-type]  # gold is given


@pytest.mark.parametrize(
    ("margin", "noise", "flip", "expected"),
    [
        (0.0, 0.4, 0.0, 0.5),
        # sigmoid(.4 / .4) = 1 / (1 + e^-1) = .731059
        (0.4, 0.4, 0.0, 0.731059),
        # (1 - .2) .731059 + .1 = .684847
        (0.4, 0.4, 0.1, 0.684847),
        (-0.4, 0.4, 0.1, 0.315153),
        (1e6, 0.4, 0.1, 0.9),
        (-1e6, 0.4, 0.0, 0.0),
    ],
)
def test_probability_by_hand(margin: float, noise: float, flip: float, expected: float) -> None:
    assert simulated(noise, flip).probability(margin) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("flip", [0.0, 0.2])
def test_frequencies_are_bradley_terry(flip: float, swap: bool) -> None:
    size = 6000
    better, worse = answers("b", [0.4] * size), answers("w", [0.0] * size)
    sides = (worse, better) if swap else (better, worse)
    labels = simulated(0.4, flip).label(["q"] * size, *sides)
    wins = labels.count("second" if swap else "first") / size
    expected = (1 - 2 * flip) / (1 + math.exp(-1)) + flip
    # standard error < .0065
    assert wins == pytest.approx(expected, abs=0.026)
    assert "tie" not in labels


def test_a_draw_depends_on_seed_and_pair_alone() -> None:
    size = 300
    one, two = answers("a", [0.1] * size), answers("b", [0.0] * size)
    prompts = ["q"] * size
    labels = simulated().label(prompts, one, two)

    other = {"first": "second", "second": "first"}
    assert [other[x] for x in simulated().label(prompts, two, one)] == labels

    def backwards(side: Answers) -> Answers:
        columns = (side.ids, side.responses, side.ended, side.gold or [])
        return Answers(*(list(reversed(column)) for column in columns))

    assert simulated().label(prompts, backwards(one), backwards(two))[::-1] == labels
    assert simulated(seed=1).label(prompts, one, two) != labels


def test_equal_answers_are_a_tie_and_equal_gold_is_not() -> None:
    first = Answers(["a", "c", "e"], ["x", "x", "x"], [True, True, True], [1.0, 1.0, 1.0])
    second = Answers(["b", "d", "f"], ["x", "x", "y"], [True, False, True], [1.0, 1.0, 1.0])
    labels = simulated().label(["q"] * 3, first, second)
    assert labels[0] == "tie"
    assert "tie" not in labels[1:]


def test_gold_is_asked_where_answers_bring_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "def score(p, r, e): return pd.DataFrame({'total': [float(len(x)) for x in r]})"
    gold = gold_of(body, tmp_path, monkeypatch, "gold_length")
    labeler = SimulatedLabeler(gold, noise=1e-3, flip=0.0, seed=0)
    labels = labeler.label(
        ["q", "q"],
        Answers(["a", "b"], ["long text", "no"], [True, True]),
        Answers(["c", "d"], ["no", "long text"], [True, True]),
    )
    assert labels == ["first", "second"]


def test_unequal_lengths_raise() -> None:
    with pytest.raises(ValueError, match="equally long"):
        Answers(["a"], [], [True])
    with pytest.raises(ValueError, match="equally long"):
        simulated().label(["q"], answers("a", [0.0]), answers("b", [0.0, 1.0]))
    for noise, flip in ((0.0, 0.0), (math.nan, 0.0), (1.0, 0.5), (1.0, -0.1)):
        with pytest.raises(ValueError, match=r"noise|flip"):
            simulated(noise, flip)


# --- programs -------------------------------------------------------------------------------------


def program(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    (tmp_path / f"{name}.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    declared = config.ProgramLabeler(kind="program", path=f"{name}.judge")
    return labelers.build(declared, None, seed=0)


def test_a_program_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        "def judge(prompts, first, second):\n"
        "    return ['first' if len(a) > len(b) else 'second' if len(b) > len(a) else 'tie'\n"
        "            for a, b in zip(first.responses, second.responses)]\n"
    )
    labeler = program(body, tmp_path, monkeypatch, "judge_good")
    one = Answers(["a", "b", "c"], ["xx", "x", "x"], [True] * 3)
    two = Answers(["d", "e", "f"], ["x", "xx", "y"], [True] * 3)
    assert labeler.label(["q"] * 3, one, two) == ["first", "second", "tie"]
    assert labeler.name == "judge_good.judge"


@pytest.mark.parametrize(
    ("name", "body", "rule"),
    [
        ("judge_few", "def judge(*a): return ['first']", "1 labels for 2"),
        ("judge_word", "def judge(*a): return ['first', 'better']", "'better' for comparison 1"),
        ("judge_list", "def judge(*a): return ['first', []]", "for comparison 1"),
        ("judge_raise", "def judge(*a): raise KeyError('x')", "raised KeyError"),
        ("judge_none", "def judge(*a): return None", "raised TypeError"),
        ("judge_other", "def other(): ...", "has no function judge"),
        ("judge_syntax", "def", "cannot be imported: SyntaxError"),
    ],
)
def test_programs_that_are_wrong_are_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str, rule: str
) -> None:
    side = Answers(["a", "b"], ["x", "y"], [True, True])
    with pytest.raises(BadInput, match=rule) as error:
        program(body, tmp_path, monkeypatch, name).label(["q", "q"], side, side)
    assert name in str(error.value)


@pytest.mark.parametrize("size", [None, 1, 2, 5, 9])
@pytest.mark.parametrize("given", [0, 2, 5])
def test_a_labeler_is_asked_in_calls_of_its_size_and_never_twice(
    size: int | None, given: int
) -> None:
    calls: list[list[str]] = []

    class Asked:
        name, batch_size = "asked", size

        def label(
            self, prompts: Sequence[str], first: Answers, second: Answers
        ) -> list[labelers.Label]:
            assert [p for p in prompts] == [i.replace("b", "q") for i in first.ids]
            assert first.gold is not None and len(first.gold) == len(prompts)
            calls.append(list(second.ids))
            return ["first" if int(i[1:]) % 2 else "second" for i in first.ids]

    everything: list[labelers.Label] = ["second", "first", "second", "first", "second"]
    seen: list[int] = []
    found = labelers.label_all(
        Asked(),
        [f"q{i}" for i in range(5)],
        answers("b", [1.0] * 5),
        answers("w", [0.0] * 5),
        given=everything[:given],
        on_call=lambda labels: seen.append(len(labels)),
    )
    assert found == everything
    assert [i for call in calls for i in call] == [f"w{i}" for i in range(given, 5)]
    assert max(map(len, calls), default=0) <= (size or 5)
    assert len(calls) == -(-(5 - given) // (size or 5))
    assert seen == [min(given + (size or 5) * k, 5) for k in range(1, len(calls) + 1)]


COUNTED = """
def score(prompts, responses, ended):
    with open({path!r}, "a") as file:
        file.write(f"{{len(prompts)}} ")
    return pd.DataFrame({{"total": [float(r) for r in responses], "again": 1.0}})
"""


@pytest.mark.parametrize(
    ("size", "given", "asked"), [(None, 0, "5 "), (2, 0, "2 2 1 "), (2, 3, "2 "), (2, 5, "")]
)
def test_gold_is_asked_in_calls_of_its_size_and_never_twice(
    size: int | None, given: int, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.touch()
    name = f"counted_{size}_{given}"
    gold_of(COUNTED.format(path=str(log)), tmp_path, monkeypatch, name)
    gold = load_gold(config.Gold(kind="program", path=name, batch_size=size))
    texts = [str(i) for i in range(5)]
    known = pd.DataFrame({"total": [float(i) for i in range(given)], "again": 1.0})
    saved: list[int] = []
    found = gold.score(
        ["q"] * 5, texts, [True] * 5, given=known if given else None,
        on_call=lambda table: saved.append(len(table)),
    )  # fmt: skip
    assert found["total"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(found.columns) == ["total", "again"]
    assert log.read_text() == asked
    assert saved == ([5] if asked and size is None else [2, 4, 5] if not given else saved[-1:])


def test_gold_names_the_row_of_all_answers_and_keeps_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
def score(prompts, responses, ended):
    return pd.DataFrame({"total": [float(r) for r in responses], **({"x": 0.0} if "3" in responses else {})})
"""
    gold_of(body, tmp_path, monkeypatch, "changing")
    gold = load_gold(config.Gold(kind="program", path="changing", batch_size=2))
    with pytest.raises(BadInput, match="row 2, column `total` is nan"):
        gold.score(["q"] * 3, ["0", "1", "nan"], [True] * 3)
    with pytest.raises(BadInput, match=r"columns \['total', 'x'\] after \['total'\]"):
        gold.score(["q"] * 4, ["0", "1", "2", "3"], [True] * 4)


def test_simulated_needs_gold() -> None:
    declared = config.SimulatedLabeler(kind="simulated", noise=0.4, flip=0.0)
    with pytest.raises(BadInput, match="needs gold"):
        labelers.build(declared, None, seed=0)
    gold = config.Gold(kind="program", path="rlhf.worlds.reviews.gold")
    assert labelers.build(declared, gold, seed=0).name == "simulated"


# --- gold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "body", "rule"),
    [
        ("gold_none", "def score(p, r, e): return None", "returned a NoneType"),
        ("gold_rows", "def score(p, r, e): return pd.DataFrame({'total': [1.0]})", "1 rows for 2"),
        ("gold_name", "def score(p, r, e): return pd.DataFrame({'sum': [1.0, 2]})", "no column"),
        (
            "gold_nan",
            "def score(p, r, e): return pd.DataFrame({'total': [1.0, float('nan')]})",
            "row 1, column `total` is nan",
        ),
        (
            "gold_inf",
            "def score(p, r, e): return pd.DataFrame({'a': [-1e999, 0], 'total': [1.0, 2]})",
            "row 0, column `a` is -inf",
        ),
        (
            "gold_text",
            "def score(p, r, e): return pd.DataFrame({'total': ['x', 'y']})",
            "other than numbers",
        ),
        ("gold_raise", "def score(p, r, e): raise ValueError('form')", "ValueError: form"),
    ],
)
def test_gold_answers_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str, rule: str
) -> None:
    gold = gold_of(body, tmp_path, monkeypatch, name)
    with pytest.raises(BadInput, match=rule) as error:
        gold.score(["q", "q"], ["a", "b"], [True, False])
    assert name in str(error.value)


def test_gold_that_cannot_be_loaded_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"gold\.path=no_such_module"):
        load_gold(config.Gold(kind="program", path="no_such_module"))
    with pytest.raises(BadInput, match="no function score"):
        gold_of("x = 1", tmp_path, monkeypatch, "gold_empty")
    with pytest.raises(BadInput, match="ZeroDivisionError"):
        gold_of("1 / 0", tmp_path, monkeypatch, "gold_breaks")


def test_the_embedded_gold_scores() -> None:
    gold = load_gold(config.Gold(kind="program", path="rlhf.worlds.reviews.gold"))
    from rlhf.worlds.reviews import grammar

    prompt = next(iter(grammar.all_prompts(grammar.THINGS[:2])))
    table = gold.score([prompt], ["this camera is good ."], [True])
    assert table.shape[0] == 1
    assert math.isfinite(table["total"].item())


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "gold", "expected"),
    [
        ("all", [1, 2, 3], [(0, 1), (0, 2), (1, 2)]),
        ("all", [1], []),
        ("adjacent", [1, 2, 3, 4, 5], [(0, 1), (2, 3)]),
        ("best_worst", [1, 3, 0, 3, 0], [(1, 2)]),
        ("best_worst", [2, 2, 2], []),
        ("best_worst", [2], []),
    ],
)
def test_choose_pairs(rule: Any, gold: list[float], expected: list[tuple[int, int]]) -> None:
    group = pd.DataFrame({"gold": gold}, index=range(10, 10 + len(gold)))
    assert choose_pairs(rule, group) == expected


def test_choose_pairs_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="gold score for every answer"):
        choose_pairs("best_worst", pd.DataFrame({"gold": [1.0, None]}))
    with pytest.raises(ValueError, match="one of all, adjacent, best_worst"):
        choose_pairs("some", pd.DataFrame({"gold": [1.0]}))  # type: ignore[arg-type]
