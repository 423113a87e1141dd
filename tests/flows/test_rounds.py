"""A round is added as text: the new part is right and the old part is untouched."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finished
import pytest
import yaml

from flows import editing, rounds
from flows.rounds import append_round, next_round, parse_overrides
from rlhf import config
from rlhf.errors import BadInput

ROOT = Path(__file__).parents[2]
Flows = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A project's pipeline.yaml, with the sources that it names."""
    (tmp_path / "rlhf/worlds/reviews").mkdir(parents=True)
    return Path(shutil.copy(ROOT / "pipeline.yaml", tmp_path))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# --- adding ---


def test_the_new_round_starts_where_the_last_one_ended(path: Path) -> None:
    old_lines = path.read_text().splitlines()
    old = config.load(path)
    assert append_round(path, "r2")
    new = config.load(path)
    assert list(new.rounds) == ["r1", "r2"]
    assert (new.rounds["r2"].from_, new.rounds["r2"].sample_from) == ("r1", "r1")
    assert new.rounds["r2"].reward_model == old.rounds["r1"].reward_model
    assert list(new.candidates)[len(old.candidates) :] == [
        key.replace("r1-", "r2-") for key in old.candidates
    ]
    for key, candidate in old.candidates.items():
        moved = new.candidates[key.replace("r1-", "r2-")]
        assert (moved.round, moved.from_) == ("r2", "r1")
        assert moved.learns_from == candidate.learns_from.replace("r1/", "r2/")
        assert moved.learning_rate == candidate.learning_rate
    # every old line is still there, in order, comments and all
    new_lines = iter(path.read_text().splitlines())
    assert all(line in new_lines for line in old_lines)
    assert path.read_text().count("answers per prompt, >= 2") == 2
    assert path.read_text().count("this one starts from; r0 is SFT") == 2
    assert path.read_text().count("kl: {where: reward, estimator: k1, coef: 0.15}   # where:") == 2


def test_rounds_can_be_added_again_and_again(path: Path) -> None:
    for name in ("r9", "r10", "r11"):
        append_round(path, name)
    pipeline = config.load(path)
    assert [body.from_ for body in pipeline.rounds.values()] == ["r0", "r1", "r9", "r10"]
    assert rounds.next_name(pipeline.rounds) == "r12"
    assert rounds.compare(pipeline, "r1", "r11") == []
    starts = [line for line in path.read_text().splitlines() if "    sample_from: r" in line]
    assert len({line.index(" # ") for line in starts}) == 1  # in their column, though r10 is longer


def test_any_declared_round_can_be_the_template(path: Path) -> None:
    append_round(path, "r2", overrides={"preferences.num_groups": 7, "candidates.dpo.epochs": 5})
    append_round(path, "r3", template="r1")
    append_round(path, "r4", template="r2")
    pipeline = config.load(path)
    groups = [pipeline.rounds[name].preferences.num_groups for name in ("r3", "r4")]
    assert groups == [1400, 7]
    assert [pipeline.rounds[name].from_ for name in ("r3", "r4")] == ["r2", "r3"]
    assert pipeline.candidates["r4-dpo"].from_ == "r3"
    assert pipeline.candidates["r4-dpo"].learns_from == "r4/preferences"
    with pytest.raises(BadInput, match=r"no round r9 to copy(?s:.*)use one of r1, r2, r3, r4"):
        append_round(path, "r5", template="r9")


def test_what_another_round_gave_stays_what_it_is(path: Path) -> None:
    """Answers and pairs of a round that is neither the template nor its start."""
    append_round(path, "r2")
    append_round(path, "r3", overrides={"sample_from": "r1"})
    text = editing.set_value(path.read_text(), "candidates.r3-dpo.learns_from", "r1/preferences")
    path.write_text(text)
    append_round(path, "r4")
    pipeline = config.load(path)
    assert (pipeline.rounds["r4"].from_, pipeline.rounds["r4"].sample_from) == ("r3", "r1")
    assert pipeline.candidates["r4-dpo"].learns_from == "r1/preferences"


def test_a_decision_is_not_copied(path: Path) -> None:
    word = {"choice": "keep", "candidate": None, "because": "b", "by": "c", "at": "2026-01-31"}
    path.write_text(editing.set_value(path.read_text(), "rounds.r1.decision", word))
    append_round(path, "r2")
    pipeline = config.load(path)
    assert pipeline.rounds["r2"].decision is None
    assert pipeline.rounds["r1"].decision is not None
    assert path.read_text().count("# a person's word over the gate's") == 2


def test_comments_that_name_the_template_are_not_copied(path: Path) -> None:
    append_round(path, "r2")
    text = path.read_text()
    start = text.index("  r2:\n")
    block = text[start:]
    for old, new in (
        ("  r2:\n", "  r2:   # r2 has fewer groups\n"),
        ("    from: r1  ", "    from: r1  # r1 was best; "),
        ("      members: 2 ", "      # why two:\n      # r2-ppo gamed one\n      members: 2 "),
        ("      epochs: 3\n", "      # 3 is enough\n      epochs: 3  # unlike pr2 and r22\n"),
        ("      temperature: 1.1\n", "      temperature: 1.1  # r0 wants 1.0\n"),
        ("      warmup_steps: 10\n", "      warmup_steps: 10  # as r2/reward_model\n"),
    ):
        assert old in block
        block = block.replace(old, new, 1)
    path.write_text(text[:start] + block)
    append_round(path, "r3")
    new = path.read_text()
    new = new[new.index("  r3:\n") : new.index("\ncandidates:")]
    assert new.startswith("  r3:\n    from: r2\n    sample_from: r2             # the round whose")
    assert "why two" not in new
    assert "gamed" not in new
    assert "      # 3 is enough\n      epochs: 3  # unlike pr2 and r22\n" in new
    assert "      temperature: 1.1  # r0 wants 1.0\n" in new
    assert "      warmup_steps: 10\n" in new
    assert path.read_text().startswith(text[:start] + block[: block.index("\ncandidates:")])


def test_numbers_that_older_readers_take_for_text_are_written_readably(path: Path) -> None:
    edit(path, "learning_rate: 1.0e-3", "learning_rate: 1e-3")
    append_round(path, "r2")
    text = path.read_text()
    assert text.count("learning_rate: 1e-3") == 1
    old = yaml.safe_load(text)["rounds"]
    read = [old[name]["reward_model"]["learning_rate"] for name in ("r1", "r2")]
    assert read == ["1e-3", 0.001]


def test_a_round_that_is_there_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    assert not append_round(path, "r1")
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["2", "r0", "round2", "r2-ppo", "", "r2 ", "R2"])
def test_what_is_no_round_is_refused_and_nothing_is_written(path: Path, name: str) -> None:
    before = path.read_bytes()
    with pytest.raises(BadInput, match="use r2"):
        append_round(path, name)
    assert path.read_bytes() == before


def test_a_file_without_a_final_newline_and_with_a_trailing_comment(path: Path) -> None:
    text = path.read_text().rstrip("\n") + "\n# the end"
    path.write_text(text)
    append_round(path, "r2")
    assert path.read_text().endswith("# the end\n")
    assert "r2" in config.load(path).rounds


def test_candidates_at_the_very_end_of_the_file(path: Path) -> None:
    text = path.read_text()
    start, end = text.index("\ncandidates:"), text.index("\nevaluation:")
    path.write_text(text[:start] + text[end:] + text[start:end])
    append_round(path, "r2")
    assert "r2-ppo" in config.load(path).candidates


def test_a_flow_style_section_is_refused_untouched(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())
    text = path.read_text()
    start, end = text.index("rounds:\n"), text.index("candidates:\n")
    path.write_text(text[:start] + f"rounds: {json.dumps(raw['rounds'])}\n\n" + text[end:])
    before = path.read_bytes()
    with pytest.raises(BadInput, match="block style"):
        append_round(path, "r2")
    assert path.read_bytes() == before


def test_anchors_are_refused_untouched(path: Path) -> None:
    edit(path, "    preferences:\n", "    preferences: &shared\n")
    before = path.read_bytes()
    with pytest.raises(BadInput, match=r"anchor shared(?s:.*)write the values out"):
        append_round(path, "r2")
    assert path.read_bytes() == before


# --- overrides ---


@pytest.mark.parametrize("key", ["candidates.ppo.kl.coef", "candidates.r2-ppo.kl.coef"])
@pytest.mark.parametrize("given", ["words", "json", "mapping"])
def test_an_override_has_several_forms(path: Path, key: str, given: str) -> None:
    forms: dict[str, Any] = {
        "words": [f"{key}=1e-5", "preferences.num_groups=100", "rounds.r2.init = initial"],
        "json": f'{{"{key}": 1e-5, "preferences.num_groups": 100, "rounds.r2.init": "initial"}}',
        "mapping": {key: 1e-5, "preferences.num_groups": 100, "rounds.r2.init": "initial"},
    }
    assert append_round(path, "r2", overrides=parse_overrides(forms[given]))
    changed = rounds.compare(config.load(path), "r1", "r2")
    assert changed == [
        ("init", "previous", "initial"),
        ("preferences.num_groups", 1400, 100),
        ("candidates.ppo.kl.coef", 0.15, 1e-5),
    ]
    assert "coef: 1.0e-05}   # where:" in path.read_text()


def test_an_override_reaches_every_kind_of_place(path: Path) -> None:
    edit(path, "    aggregate: {kind: mean}     # of", "    aggregate: mean     # of")
    overrides = {
        "candidates.dpo.losses.0.beta": 0.2,
        "candidates.ppo.kl": {"where": "loss", "estimator": "k3", "coef": 0.1},
        "candidates.ppo.aggregate.kind": "min",
        "candidates.grpo.entropy_coef": 0.01,
        "preferences.carry_over": {"last": 2},
        "reward_model.init": "previous",
        "reward_model.adam_betas": [0.8, 0.9],
    }
    append_round(path, "r2", overrides=overrides)
    raw = config.read_yaml(path)
    ppo, body = raw["candidates"]["r2-ppo"], raw["rounds"]["r2"]
    assert raw["candidates"]["r2-dpo"]["losses"][0] == {
        "kind": "sigmoid",
        "beta": 0.2,
        "label_smoothing": 0.0,
    }
    assert (ppo["kl"], ppo["aggregate"]) == (overrides["candidates.ppo.kl"], {"kind": "min"})
    assert raw["candidates"]["r2-grpo"]["entropy_coef"] == 0.01
    assert body["preferences"]["carry_over"] == {"last": 2}
    assert (body["reward_model"]["init"], body["reward_model"]["adam_betas"]) == ("previous", [0.8, 0.9])  # fmt: skip


def test_a_gate_is_of_its_round(path: Path) -> None:
    before = config.load(path).rounds["r1"].gate
    append_round(path, "r2", overrides={"gate.on_fail": "ask", "gate.rules.1.at_most": 8.0})
    rounds = config.load(path).rounds
    assert rounds["r1"].gate == before
    assert (rounds["r2"].gate.on_fail, rounds["r2"].gate.rules[1].at_most) == ("ask", 8.0)
    append_round(path, "r3")
    assert config.load(path).rounds["r3"].gate == rounds["r2"].gate


def test_another_start_takes_candidates_and_answers_along(path: Path) -> None:
    append_round(path, "r2")
    append_round(path, "r3", overrides={"from": "r1"})
    pipeline = config.load(path)
    assert (pipeline.rounds["r3"].from_, pipeline.rounds["r3"].sample_from) == ("r1", "r1")
    assert {body.from_ for body in pipeline.candidates_of("r3").values()} == {"r1"}


def test_candidates_can_be_added_and_dropped(path: Path) -> None:
    append_round(
        path,
        "r2",
        add={"grpo2": "grpo"},
        drop=["dpo", "grpo"],
        overrides={"candidates.grpo2.kl.coef": 0.5},
    )
    pipeline = config.load(path)
    assert list(pipeline.candidates_of("r2")) == ["r2-ppo", "r2-grpo2"]
    assert pipeline.candidates["r2-grpo2"].kl.coef == 0.5  # type: ignore[union-attr]
    assert config.read_yaml(path)["candidates"]["r1-grpo"]["kl"]["coef"] == 0.2


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"candidates.ppo.kl.coeff": 1.0},
        "candidates.r2-ppo.kl.coeff: unknown key; did you mean coef?",
    ),
    (
        {"candidates.ppo.kl.coef": "0.02"},
        "candidates.r2-ppo.kl.coef='0.02': must be a number, not text; remove the quotes (write 1.0e-5)",
    ),
    (
        {"candidates.ppo.kl.coef": -1.0},
        "candidates.r2-ppo.kl.coef=-1.0: input should be greater than 0",
    ),
    ({"candidates.ppo.steps": 2.5}, "candidates.r2-ppo.steps=2.5: input should be a valid integer"),
    ({"candidates.pppo.steps": 1}, "candidates.pppo.steps: no such candidate; did you mean ppo?"),
    (
        {"candidates.r1-ppo.steps": 1},
        "candidates.r1-ppo.steps: r1-ppo is not of r2, and a change would change its history",
    ),
    (
        {"rounds.r1.init": "initial"},
        "rounds.r1.init: r1 is not of r2, and a change would change its history",
    ),
    ({"rounds.r9.init": "initial"}, "rounds.r9.init: no such round; use one of r2"),
    ({"candidates.ppo": {}}, "candidates.ppo: not one key; write candidates.NAME.KEY"),
    ({"candidates.ppo.round": "r1"}, "candidates.ppo.round: it is r2; leave it out"),
    ({"candidates.ppo.from": "r1"}, "candidates.ppo.from: as in its round; set rounds.r2.from"),
    ({"decision": None}, "decision: a person decides after the round; use python -m flows decide"),
    (
        {"preferences.num_group": 1},
        "rounds.r2.preferences.num_group: unknown key; did you mean num_groups?",
    ),
    ({"prefs.num_groups": 1}, "prefs.num_groups: unknown key; did you mean preferences?"),
    (
        {"seed": 1},
        "seed: not of the round, and a change would change every round's history; if that is meant, edit pipeline.yaml",
    ),
    (
        {"evaluation.num_shown": 1},
        "evaluation.num_shown: not of the round, and a change would change every round's history; "
        "if that is meant, edit pipeline.yaml",
    ),
    ({"init": 1, "rounds.r2.init": 1}, "rounds.r2.init: the same key as init; give it once"),
    (
        {"candidates.ppo.steps.x": 1},
        "candidates.ppo.steps.x: candidates.r2-ppo.steps is 24; it has no x",
    ),
    (
        {"candidates.dpo.losses.1.beta": 1},
        "candidates.dpo.losses.1.beta: candidates.r2-dpo.losses is a list; it has no 1",
    ),
    ({"from": "r9"}, "rounds.r2.from=r9: not an earlier round; use one of r0, r1"),
    ({"from": 1}, "rounds.r2.from=1: a round name is text like r1, not a number; write r1"),
    (
        {"preferences.labeler": {"kind": "program", "path": "no_such.labels"}},
        "rounds.r2.preferences.labeler.path=no_such: no such module; "
        "write its import path as seen from the project's folder",
    ),
]


BELOW = [
    (
        {"candidates.ppo.kl": {"coef": 0.3}, "candidates.r2-ppo.kl.coef": 0.2},
        "candidates.r2-ppo.kl.coef: below candidates.ppo.kl, which is given too; give one",
    ),
    (
        {"candidates.ppo.kl.coef": 0.2, "candidates.ppo.kl": {"coef": 0.3}},
        "candidates.ppo.kl.coef: below candidates.ppo.kl, which is given too; give one",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), WRONG + BELOW)
def test_a_wrong_override_is_named(path: Path, overrides: dict[str, Any], line: str) -> None:
    before = path.read_bytes()
    with pytest.raises(config.ConfigError) as caught:
        append_round(path, "r2", overrides=overrides)
    assert line in caught.value.problems
    assert len(caught.value.problems) <= 2
    assert path.read_bytes() == before


def test_all_wrong_overrides_are_named_at_once(path: Path) -> None:
    wrong = [pair for pair in WRONG if not {"from", "preferences.labeler"} & pair[0].keys()]
    overrides = {key: value for pair, _ in wrong for key, value in pair.items()}
    overrides |= {"candidates.ppo.kl.coef": "x"}
    with pytest.raises(config.ConfigError) as caught:
        append_round(path, "r2", overrides=overrides, drop=["rloo"], add={"ppo": "grpo", "a": "b"})
    keys = {line.split(":")[0].split("=")[0] for line in caught.value.problems}
    expected = {line.split(":")[0].split("=")[0] for _, line in wrong}
    assert expected <= keys
    assert {"drop rloo", "add ppo", "add a"} <= keys


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["x"], "'x': not an override; write path=value"),
        (["a..b=1"], "'a..b=1': not an override"),
        (["init="], "init=: no value; write one, null for none"),
        (["init=[1"], "init=[1: not readable as YAML"),
        (["init=a", "init=b"], "init: given twice"),
        ("{", "not readable as JSON"),
        ("[1]", "not a JSON object"),
        ('{"init": 1, "init": 2}', "init: given twice"),
        ({3: 1}, "3: not a dotted path"),
    ],
)
def test_words_that_are_no_overrides(given: Any, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_overrides(given)
    assert words in str(caught.value)


def test_words_are_read_as_yaml_and_json_as_json() -> None:
    words = parse_overrides(["a=1e-5", "b='1e-5'", "c=yes", "d=null", "e={f: [1, true]}", "g==x=y"])
    assert words == {"a": 1e-5, "b": "1e-5", "c": "yes", "d": None, "e": {"f": [1, True]}, "g": "=x=y"}  # fmt: skip
    assert parse_overrides('{"a": "0.02", "b": 1e-5}') == {"a": "0.02", "b": 1e-5}


def test_the_same_wish_twice_is_one_round(path: Path) -> None:
    wish: dict[str, Any] = {
        "overrides": {"candidates.ppo.kl.coef": 0.02, "preferences.carry_over": {"last": 1}},
        "add": {"ppo2": "ppo"},
        "drop": ["dpo"],
    }
    assert append_round(path, "r2", **wish)
    once = path.read_bytes()
    assert not append_round(path, "r2", **wish)
    assert not append_round(path, "r2", template="r1", **wish)
    word = {"choice": "keep", "candidate": None, "because": "b", "by": "c", "at": "2026-01-31"}
    path.write_text(editing.set_value(path.read_text(), "rounds.r2.decision", word))
    assert append_round(path, "r3")
    assert not append_round(path, "r2", template="r1", **wish)  # though decided, and no longer last
    assert path.read_bytes().startswith(once[:1000])


@pytest.mark.parametrize(
    ("wish", "lines"),
    [
        (
            {"overrides": {"candidates.ppo.kl.coef": 0.3, "init": "initial"}},
            [
                "rounds.r2.init is previous, not initial",
                "candidates.r2-ppo.kl.coef is 0.02, not 0.3",
            ],
        ),
        (
            {"template": "r1"},
            [
                "candidates.r2-ppo.kl.coef is 0.02, not 0.15",
                "candidates.r2-dpo is (absent), not (present)",
            ],
        ),
        ({"drop": ["ppo"]}, ["candidates.r2-ppo is (present), not (absent)"]),
        ({"add": {"ppo2": "ppo"}}, ["candidates.r2-ppo2 is (absent), not (present)"]),
        (
            {"overrides": {"candidates.ppo.kl.coef": 2}},
            ["candidates.r2-ppo.kl.coef is 0.02, not 2.0"],
        ),
    ],
)
def test_a_name_that_is_taken_by_other_content_is_refused(
    path: Path, wish: dict[str, Any], lines: list[str]
) -> None:
    append_round(path, "r2", overrides={"candidates.ppo.kl.coef": 0.02}, drop=["dpo"])
    before = path.read_bytes()
    with pytest.raises(BadInput, match="r2 is there already with other content") as caught:
        append_round(path, "r2", **wish)
    found = [line.strip() for line in str(caught.value).splitlines()]
    assert found[1:-2] == lines
    assert "add r3 instead" in found[-1]
    assert path.read_bytes() == before


def test_a_wrong_wish_for_a_round_that_is_there_is_still_wrong(path: Path) -> None:
    with pytest.raises(config.ConfigError, match="did you mean coef"):
        append_round(path, "r1", overrides={"candidates.ppo.kl.coeff": 1})


# --- which round comes next ---


def decided(folder: Path, name: str, **changes: Any) -> None:
    """A decision.json as promote writes it."""
    kept = changes.pop("kept", False)
    finished.run(folder, name, "r0", kept=kept)
    path = folder / f"runs/{name}/metrics/decision.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_last_round_goes_on_until_it_is_decided(path: Path) -> None:
    folder = path.parent
    finished.start(folder)
    assert next_round(config.load(path), folder) == ("r1", False)
    decided(folder, "r1")
    assert next_round(config.load(path), folder) == ("r2", True)
    append_round(path, "r2")
    assert next_round(config.load(path), folder) == ("r2", False)
    decided(folder, "r2", kept=True)
    assert next_round(config.load(path), folder) == ("r3", True)


@pytest.mark.parametrize("status", ["stopped", "awaiting"])
def test_no_round_follows_before_a_person_decides(path: Path, status: str) -> None:
    folder = path.parent
    finished.start(folder)
    decided(folder, "r1", kept=True, status=status)
    with pytest.raises(BadInput, match=r"r1\n(?s:.*)python -m flows decide r1 keep"):
        next_round(config.load(path), folder)
    word = {"choice": "keep", "candidate": None, "because": "b", "by": "c", "at": "2026-01-31"}
    path.write_text(editing.set_value(path.read_text(), "rounds.r1.decision", word))
    assert next_round(config.load(path), folder) == ("r1", False)  # its gate has yet to hear it
    decided(folder, "r1", kept=True, decision=word)
    assert next_round(config.load(path), folder) == ("r2", True)
    decided(folder, "r1", kept=True, status="stopped", decision=word)
    with pytest.raises(BadInput, match="the loop is stopped at r1"):
        next_round(config.load(path), folder)


@pytest.mark.parametrize("status", ["stopped", "awaiting"])
def test_no_round_is_added_behind_one_that_a_person_has_to_decide(path: Path, status: str) -> None:
    folder = path.parent
    finished.start(folder)
    append_round(path, "r2")  # declared ahead
    append_round(path, "r3", overrides={"from": "r2"})
    decided(folder, "r1", kept=True, status=status)
    text = path.read_text()
    for wish in ({}, {"from": "r1"}):  # r4 would start from r3, which starts from r2, from r1
        with pytest.raises(BadInput, match=r" r1\n(?s:.*)python -m flows decide r1 keep"):
            append_round(path, "r4", overrides=wish)
    with pytest.raises(BadInput, match=r" r1\n(?s:.*)python -m flows decide r1 keep"):
        next_round(config.load(path), folder)
    assert path.read_text() == text
    append_round(path, "r4", overrides={"from": "r0"})  # not behind it
    assert next_round(config.load(path), folder) == ("r4", False)


def test_a_word_counts_before_the_gate_has_heard_it(path: Path) -> None:
    folder = path.parent
    finished.start(folder)
    append_round(path, "r2")
    decided(folder, "r1", kept=True, status="stopped")
    word = {"choice": "keep", "candidate": None, "because": "b", "by": "c", "at": "2026-01-31"}
    path.write_text(editing.set_value(path.read_text(), "rounds.r1.decision", word))
    assert next_round(config.load(path), folder) == ("r2", False)
    decided(folder, "r1", kept=True)
    path.write_text(editing.set_value(path.read_text(), "rounds.r1.decision.choice", "stop"))
    with pytest.raises(BadInput, match="the loop is stopped at r1"):
        next_round(config.load(path), folder)


def test_after_a_rollback_a_round_starts_from_where_it_went_back_to(path: Path) -> None:
    folder = path.parent
    finished.start(folder)
    for name in ("r1", "r2", "r3"):
        append_round(path, name)
        decided(folder, name)
    back = {"to": "r1", "after": "r3", "because": "b", "by": "c", "at": "2026-01-31"}
    path.write_text(editing.set_value(path.read_text(), "rollback", back))
    append_round(path, "r4")
    assert config.load(path).rounds["r4"].from_ == "r1"
    append_round(path, "r5")  # r4 comes from r1 already
    assert config.load(path).rounds["r5"].from_ == "r4"
    decided(folder, "r4")  # promotes: the rollback is history
    append_round(path, "r6")
    assert config.load(path).rounds["r6"].from_ == "r5"


def test_a_rollback_is_obeyed_though_a_round_of_the_abandoned_line_is_declared(path: Path) -> None:
    folder = path.parent
    finished.start(folder)
    for name in ("r1", "r2"):
        append_round(path, name)
        decided(folder, name)
    append_round(path, "r3")  # starts from r2, has not run
    back = {"to": "r0", "after": "r2", "because": "b", "by": "c", "at": "2026-01-31"}
    path.write_text(editing.set_value(path.read_text(), "rollback", back))
    append_round(path, "r4", drop=["grpo"])
    pipeline = config.load(path)
    assert pipeline.rounds["r4"].from_ == "r0"
    assert pipeline.candidates["r4-dpo"].from_ == "r0"


# --- comparing ---


def test_only_real_differences_are_told(path: Path) -> None:
    for name in ("r2", "r3"):
        append_round(path, name)
    pipeline = config.load(path)
    assert rounds.compare(pipeline, "r1", "r3") == []
    text = editing.set_value(path.read_text(), "rounds.r3.sample_from", "r1")
    text = editing.set_value(
        text, "candidates.r3-dpo.losses", [{"kind": "sigmoid"}, {"kind": "sft"}]
    )
    path.write_text(text)
    found = rounds.compare(config.load(path), "r1", "r3")
    assert [key for key, *_ in found] == ["sample_from", "candidates.dpo.losses"]
    assert found[0][1:] == ("(its start)", "r1")
    with pytest.raises(BadInput, match=r"no round r33(?s:.*)did you mean r3"):
        rounds.compare(pipeline, "r1", "r33")
