"""pipeline.yaml: what is right is read, what is wrong is told with path, value, rule and mend, all at once."""

from __future__ import annotations

import copy
import datetime
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhf import config
from rlhf.errors import BadInput

ROOT = Path(__file__).parents[1]
RAW = config.read_yaml(ROOT / "pipeline.yaml")
Change = Callable[[dict[str, Any]], Any]


def inside(raw: Any, key: str) -> Any:
    return raw[int(key)] if isinstance(raw, list) else raw[key]


def put(path: str, value: Any) -> Change:
    """Sets the value at a dotted path."""

    def change(raw: dict[str, Any]) -> None:
        *places, last = path.split(".")
        for place in places:
            raw = inside(raw, place)
        raw[last] = value

    return change


def drop(path: str) -> Change:
    def change(raw: dict[str, Any]) -> None:
        *places, last = path.split(".")
        for place in places:
            raw = inside(raw, place)
        del raw[last]

    return change


def problems(*changes: Change) -> list[str]:
    """What is said about the repository's pipeline after these changes; [] if nothing."""
    raw = copy.deepcopy(RAW)
    for change in changes:
        change(raw)
    try:
        config.parse(raw)
    except config.ConfigError as error:
        found = error
    else:
        return []
    assert found.exit_code == 2
    assert str(found).startswith(f"pipeline.yaml: {len(found.problems)} problem")
    assert all(line in str(found) for line in found.problems)
    return found.problems


# --- what is right ---


def yaml_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.yaml", "*.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    names = listed or ["pipeline.yaml", "dvc.yaml", "prefect.yaml"]
    return [ROOT / name for name in names if (ROOT / name).exists()]


def test_every_yaml_file_of_the_repository_reads() -> None:
    files = yaml_files()
    assert {"pipeline.yaml", "dvc.yaml", "prefect.yaml"} <= {f.name for f in files}
    for file in files:
        assert list(yaml.safe_load_all(file.read_text(encoding="utf-8"))), file
        if file.name.startswith("pipeline"):
            config.load(file)


def test_both_yaml_readers_see_the_same_pipeline() -> None:
    """DVC's reader and PyYAML differ on 1e-5, yes and 010; the file avoids all of them."""
    assert yaml.safe_load((ROOT / "pipeline.yaml").read_text(encoding="utf-8")) == RAW


def test_what_is_read_is_what_is_written() -> None:
    pipeline = config.parse(RAW)
    assert pipeline.model_dump(by_alias=True, exclude_unset=True) == RAW
    assert config.parse(json.loads(pipeline.model_dump_json(by_alias=True))) == pipeline


def test_nothing_can_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config.parse(RAW).seed = 3  # type: ignore[misc]


def test_candidates_of_a_round_in_the_files_order() -> None:
    assert list(config.parse(RAW).candidates_of("r1")) == ["r1-ppo", "r1-grpo", "r1-dpo"]
    assert config.parse(RAW).candidates_of("r9") == {}


def test_seeds_differ_by_purpose_and_by_the_pipelines_seed() -> None:
    one, other = config.parse(RAW), config.parse(RAW | {"seed": 1})
    seeds = [p.seed_for(*parts) for p in (one, other) for parts in (("a", "b"), ("a",), ("ab",))]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)
    # sha256("0/a/b") begins with these four bytes, halved.
    import hashlib

    assert one.seed_for("a", "b") == int(hashlib.sha256(b"0/a/b").hexdigest()[:8], 16) // 2


def test_digest_depends_on_values_and_not_on_the_order_of_keys() -> None:
    section = config.parse(RAW).sft
    reordered = dict(reversed(section.model_dump(by_alias=True).items()))
    assert config.digest(section) == config.digest(reordered)
    assert config.digest(section) != config.digest(section.model_copy(update={"epochs": 9}))


# --- keys ---


def keys(value: Any, place: str = "") -> Iterator[str]:
    """Every dotted path to a key whose section has fixed keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            path = f"{place}.{key}" if place else str(key)
            if isinstance(inner, list):
                for number, item in enumerate(inner):
                    yield from keys(item, f"{path}.{number}")
            free = place in ("rounds", "candidates", "data.world_options")
            if not free and place != "data.split_fractions":
                yield path
            if path != "data.world_options":
                yield from keys(inner, path)


# Keys that may be left out, because a default is declared for them.
DEFAULTS = re.compile(
    r"data\.(world_options|preferences)|data\.(demonstrations|prompts)\.(?!path)\w+"
    r"|.*\.(whiten_advantages|length_constant|value)|.*\.value\.\w+"
    r"|.*\.(advantage|loss|losses\.0)\.(?!kind)\w+|rounds\.r1\.gate\.rules\.\d\.at_(least|most)"
    r"|resources\.cost_per_hour|.*\.reward_model\.(label_smoothing|centering)"
)


@pytest.mark.parametrize("path", list(keys(RAW)))
def test_a_misspelt_key_is_named_at_every_level(path: str) -> None:
    """Of candidates that no preset fills in."""
    wrong = f"{path}x"
    raw = copy.deepcopy(RAW)
    for candidate in raw["candidates"].values():
        candidate["algorithm"] = "ownwork"
    here: Any = raw
    *places, last = path.split(".")
    for place in places:
        here = inside(here, place)
    value = here.pop(last)
    here[f"{last}x"] = value
    with pytest.raises(config.ConfigError) as caught:
        config.parse(raw)
    found = caught.value.problems
    if last == "kind":
        assert any(
            line.startswith(f"{path}: required and missing; write one of") for line in found
        ) or (f"{path}: required and missing; add it" in found)
        return
    assert f"{wrong}: unknown key; did you mean {last}?" in found
    missing = f"{path}: required and missing; add it"
    told = any(line.startswith(missing) for line in found)
    assert told != bool(DEFAULTS.fullmatch(path)), found


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (put("candidates.r1-ppo.beta", 0.1), "candidates.r1-ppo.beta: unknown key; remove it"),
        (
            put(
                "rounds.r1.gate.rules",
                [{"metrc": "win_rate", "metric": "win_rate", "at_least": 0.5}],
            ),
            "rounds.r1.gate.rules.0.metrc: unknown key; did you mean metric?",
        ),
        (
            put("candidates.r1-dpo.losses.0.bta", 0.1),
            "candidates.r1-dpo.losses.0.bta: unknown key; did you mean beta?",
        ),
        (
            put("data.split_fractions.sftt", 0.1),
            "data.split_fractions.sftt: unknown key; use 'sft', 'preferences', 'rl', 'choose' or 'report'",
        ),
        (put("rounds.r1.from_", "r0"), "rounds.r1.from_: unknown key; did you mean from?"),
        (put("zzzz", 1), "zzzz: unknown key; remove it"),
    ],
)
def test_a_suggestion_is_a_key_of_that_section(change: Change, line: str) -> None:
    assert line in problems(change)


def test_a_key_has_one_spelling() -> None:
    """`from` is the key; the name it has in Python is not."""
    raw = copy.deepcopy(RAW)
    raw["rounds"]["r1"]["from_"] = raw["rounds"]["r1"].pop("from")
    with pytest.raises(config.ConfigError):
        config.parse(raw)


# --- values ---

PPO, GRPO, DPO = "candidates.r1-ppo", "candidates.r1-grpo", "candidates.r1-dpo"
PREFERENCES, REWARD = "rounds.r1.preferences", "rounds.r1.reward_model"


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        # Types: nothing is coerced.
        (put("sft.epochs", "2"), ["sft.epochs='2': must be a number, not text; remove the quotes"]),
        (
            put("sft.learning_rate", "1e-5"),
            ["sft.learning_rate='1e-5': must be a number, not text"],
        ),
        (put("sft.epochs", 2.0), ["sft.epochs=2.0: input should be a valid integer"]),
        (put("sft.epochs", True), ["sft.epochs=True: input should be a valid integer"]),
        (
            put("sft.learning_rate", True),
            ["sft.learning_rate=True: input should be a valid number"],
        ),
        (put("sft.epochs", None), ["sft.epochs=None: input should be a valid integer"]),
        (put("sft", None), ["sft=None: must be a mapping of keys to values"]),
        (put("sft", 3), ["sft=3: must be a mapping of keys to values"]),
        (put("candidates", []), ["candidates: must be a mapping", "rounds.r1: has no candidate"]),
        (put(PPO, 3), [f"{PPO}=3: must be a mapping of keys to values"]),
        (put("rounds.r1", ["a"]), ["rounds.r1: must be a mapping of keys to values"]),
        (put("project", 3), ["project=3: input should be a valid string"]),
        (put("rounds.r1.gate.rules", {}), ["rounds.r1.gate.rules: input should be a valid list"]),
        (put("sft.adam_betas", [0.9]), ["sft.adam_betas: list should have at least 2 items"]),
        (put("sft.adam_betas", ["0.9", 0.9]), ["sft.adam_betas.0='0.9': must be a number"]),
        (
            put("data.split_fractions.rl", "0.2"),
            ["data.split_fractions.rl='0.2': must be a number"],
        ),
        (put("version", "1"), ["version='1': must be one of 1"]),
        (put("version", 2), ["version=2: must be one of 1"]),
        # Bounds.
        (put("sft.epochs", 0), ["sft.epochs=0: input should be greater than or equal to 1"]),
        (put("seed", -1), ["seed=-1: input should be greater than or equal to 0"]),
        (put("sft.adam_betas", [0.9, 1.0]), ["sft.adam_betas.1=1.0: input should be less than 1"]),
        (
            put(f"{DPO}.losses.0.beta", 0.0),
            [f"{DPO}.losses.0.beta=0.0: input should be greater than 0"],
        ),
        (
            put(f"{DPO}.losses.0.label_smoothing", 0.5),
            [f"{DPO}.losses.0.label_smoothing=0.5: input should be less than"],
        ),
        (
            put(f"{PREFERENCES}.samples_per_prompt", 1),
            [f"{PREFERENCES}.samples_per_prompt=1: input"],
        ),
        (put("model.dtype", "float16"), ["model.dtype='float16': must be one of 'float32' or"]),
        (put("gold.path", "a/b.py"), ["gold.path=a/b.py: string should match pattern"]),
        (put("project", "a b"), ["project=a b: string should match pattern"]),
        # Kinds.
        (
            put(f"{PPO}.kind", "ppo"),
            [
                f"{PPO}.kind=ppo: must be one of 'rl', 'preference', 'online_preference'",
                f"{PPO}.kind=ppo: algorithm=ppo is of kind=rl; leave kind out",
            ],
        ),
        (
            lambda r: (put(f"{PPO}.algorithm", "ownwork")(r), drop(f"{PPO}.kind")(r)),
            [
                f"{PPO}.kind: required and missing; write one of 'rl', 'preference', 'online_preference'"
            ],
        ),
        (
            put(f"{PREFERENCES}.labeler", {"noise": 1.0}),
            [
                f"{PREFERENCES}.labeler.kind: required and missing; write one of 'simulated', 'program'"
            ],
        ),
        # Parts that do not fit.
        (
            put("sft.micro_batch_size", 6),
            [
                "sft.micro_batch_size=6 does not divide batch_size=64; use one of 1, 2, 4, 8, 16, 32, 64"
            ],
        ),
        (
            put(f"{REWARD}.micro_batch_size", 5),
            [
                f"{REWARD}.micro_batch_size=5 does not divide groups_per_batch=32; use one of 1, 2, 4"
            ],
        ),
        (
            put(f"{DPO}.micro_batch_size", 5),
            [f"{DPO}.micro_batch_size=5 does not divide batch_size=64"],
        ),
        (
            put(f"{PPO}.micro_batch_size", 3),
            [f"{PPO}.micro_batch_size=3 does not divide sequences per minibatch=64"],
        ),
        (
            put(f"{PPO}.minibatches", 3),
            [f"{PPO}.minibatches=3 does not divide prompts_per_step * samples_per_prompt=128"],
        ),
        (put("model.demo.num_heads", 5), ["model.demo.num_heads=5 does not divide hidden_size=96"]),
        (
            put("model.demo.max_positions", 79),
            ["model.demo.max_positions=79 is less than max_prompt_tokens + max_response_tokens=80"],
        ),
        (put("model.demo", None), ["model.base=demo needs the section model.demo"]),
        (put("model.tokenizer", None), ["model.base=demo has no tokenizer of its own"]),
        (
            put(f"{GRPO}.samples_per_prompt", 1),
            [
                f"{GRPO}.micro_batch_size=64 does not divide",
                f"{GRPO}.advantage=group_std compares answers to one prompt; set samples_per_prompt >= 2",
            ],
        ),
        (
            put(f"{PPO}.value", None),
            [f"{PPO}: value belongs to advantage=gae or gae_bootstrap and to no other"],
        ),
        (
            put(f"{GRPO}.value", RAW["candidates"]["r1-ppo"]["value"]),
            [f"{GRPO}: value belongs to advantage=gae"],
        ),
        (
            put(f"{PPO}.kl.where", "loss"),
            [f"{PPO}.kl.estimator=k1 in the loss has an expected gradient of zero; use k2"],
        ),
        (
            put(f"{PPO}.loss", "reinforce"),
            [
                f"{PPO}.loss=reinforce is on-policy only; set epochs_per_step: 1",
                f"{PPO}.loss=reinforce: algorithm=ppo has loss=ppo_clip; name the algorithm otherwise",
            ],
        ),
        (
            put(f"{PPO}.learns_from", "r1/preferences"),
            [f"{PPO}: learns_from of kind=rl names a reward model"],
        ),
        (
            put(f"{DPO}.learns_from", "r1/reward_model"),
            [f"{DPO}: learns_from of kind=preference names pairs"],
        ),
        (
            put("rounds.r1.gate.rules", [{"metric": "win_rate"}]),
            ["rounds.r1.gate.rules.0: a rule has one bound"],
        ),
        (
            put("rounds.r1.gate.rules", [{"metric": "win_rate", "at_least": 0.1, "at_most": 0.2}]),
            ["rounds.r1.gate.rules.0: a rule has one bound"],
        ),
        # Options that nothing reads.
        (
            put(f"{GRPO}.advantage.gae_lambda", 0.9),
            [f"{GRPO}.advantage.gae_lambda: unknown key; remove it"],
        ),
        (
            put(f"{GRPO}.advantage.gamma", 0.9),
            [f"{GRPO}.advantage.gamma: unknown key; remove it"],
        ),
        (
            lambda r: (
                put(f"{DPO}.algorithm", "ipo")(r),
                put(f"{DPO}.losses", [{"kind": "ipo", "label_smoothing": 0.1}])(r),
            ),
            [f"{DPO}.losses.0.label_smoothing: unknown key; remove it"],
        ),
        (put("data.world", None), ["data: world_options is set but world is null"]),
        # Splits.
        (
            put("data.split_fractions.rl", 0.3),
            [
                "data: split_fractions must name sft, preferences, rl, choose, report and sum to 1; they sum to 1.1"
            ],
        ),
        (drop("data.split_fractions.rl"), ["data: split_fractions must name"]),
        (
            put("data.split_fractions.rl", 1.5),
            ["data.split_fractions.rl=1.5: input should be less than or equal to 1"],
        ),
        # Gold.
        (
            put("gold", None),
            [
                f"{PREFERENCES}.labeler.kind=simulated: needs gold",
                "rounds.r1.gate: uses gold_mean but no gold",
            ],
        ),
        (
            lambda r: (put("gold", None)(r), put("evaluation.select", "best_gold")(r)),
            [
                f"{PREFERENCES}.labeler.kind",
                "evaluation.select=best_gold: no gold is declared",
                "rounds.r1.gate: uses gold_mean",
            ],
        ),
        (
            lambda r: (
                put(f"{PREFERENCES}.labeler", {"kind": "program", "path": "a.b"})(r),
                put(f"{PREFERENCES}.pairs", "best_worst")(r),
            ),
            [f"{PREFERENCES}.pairs=best_worst needs a labeler that scores"],
        ),
        # Rounds and candidates.
        (
            put("rounds.r1.from", "r7"),
            [
                "rounds.r1.from=r7: not an earlier round; use one of r0",
                f"{PPO}.from=r0: differs",
                f"{GRPO}.from=r0",
                f"{DPO}.from=r0",
            ],
        ),
        (put("rounds.r1.sample_from", "r1"), ["rounds.r1.sample_from=r1: not an earlier round"]),
        (put(f"{PPO}.from", "r5"), [f"{PPO}.from=r5: differs from rounds.r1.from=r0; write r0"]),
        (put(f"{PPO}.round", "r9"), [f"{PPO}.round=r9: no such round; use one of r1"]),
        (
            put(f"{PPO}.learns_from", "r2/reward_model"),
            [f"{PPO}.learns_from=r2/reward_model: r2 is not r1 or an earlier round"],
        ),
        (
            lambda r: r["candidates"].update({"ppo": r["candidates"].pop("r1-ppo")}),
            ["candidates.ppo: the name must be r1-<name>"],
        ),
        (
            put("rounds", None),
            [
                "rounds=None: must be a mapping",
                f"{PPO}.round=r1: no such round; declare it",
                f"{GRPO}.round",
                f"{DPO}.round",
            ],
        ),
        (
            put("rounds", {}),
            [
                "rounds: empty; declare at least 1",
                f"{PPO}.round=r1: no such round; declare it",
                f"{GRPO}.round",
                f"{DPO}.round",
            ],
        ),
        (
            put("candidates", {}),
            [
                "candidates: empty; declare at least 1",
                "rounds.r1: has no candidate, so nothing to promote; add candidates.r1-...",
            ],
        ),
        (
            lambda r: r["rounds"].update({2: r["rounds"]["r1"]}),
            ["rounds.2: a round name is text like r2, not a number"],
        ),
        (
            lambda r: r["rounds"].update({"R2": r["rounds"]["r1"]}),
            ["rounds.R2: a round is named r1, r2", "rounds.R2: has no candidate"],
        ),
        (
            lambda r: r["rounds"].update({"r02": r["rounds"]["r1"]}),
            [
                "rounds.r02: a round is named r1, r2, ... or r2_variant, without leading zeros",
                "rounds.r02: has no candidate",
            ],
        ),
        (
            lambda r: r["rounds"].update({"r0": r["rounds"]["r1"]}),
            ["rounds.r0: a round is named r1, r2", "rounds.r0: has no candidate"],
        ),
        (dict.clear, [f"{key}: required and missing; add it" for key in RAW]),
    ],
)
def test_each_misconfiguration_is_named(change: Change, lines: list[str]) -> None:
    found = problems(change)
    assert len(found) == len(lines), found
    for line in lines:
        assert sum(problem.startswith(line) for problem in found) == 1, found


WORD = {
    "choice": "keep",
    "candidate": None,
    "because": "b",
    "by": "c",
    "at": "2026-01-31T09:30:00Z",
}
BACK = {"to": "r0", "after": "r1", "because": "b", "by": "c", "at": "2026-01-31"}
CARRY = f"{PREFERENCES}.carry_over"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        # What a person decided.
        (
            put("rounds.r1.decision", WORD | {"choice": "promot"}),
            "rounds.r1.decision.choice='promot': must be one of 'promote', 'keep' or 'stop'; did you mean promote?",
        ),
        (
            put("rounds.r1.decision", WORD | {"choice": "promote"}),
            "rounds.r1.decision.choice=promote: names no candidate; write which under candidate",
        ),
        (
            put("rounds.r1.decision", WORD | {"candidate": "r1-ppo"}),
            "rounds.r1.decision.choice=keep: promotes no candidate; write candidate: null, or choice: promote",
        ),
        (
            put("rounds.r1.decision", WORD | {"choice": "promote", "candidate": "ppo"}),
            "rounds.r1.decision.candidate=ppo: not a candidate of r1; use one of r1-ppo, r1-grpo, r1-dpo",
        ),
        (
            put("rounds.r1.decision", WORD | {"because": ""}),
            "rounds.r1.decision.because=: string should have at least 1 character",
        ),
        (
            put("rounds.r1.decision", WORD | {"at": "yesterday"}),
            "rounds.r1.decision.at: 'yesterday' is no date and time; write it like 2026-01-31T09:30:00+00:00",
        ),
        (
            put("rounds.r1.decision", WORD | {"at": datetime.date(2026, 1, 31)}),
            'rounds.r1.decision.at=2026-01-31: must be text, not a date; write it in quotes: "2026-01-31"',
        ),
        # The way back.
        (put("rollback", BACK | {"to": "r9"}), "rollback.to=r9: no such round; use one of r0, r1"),
        (
            put("rollback", BACK | {"after": "r9"}),
            "rollback.after=r9: no such round; use one of r0, r1",
        ),
        (
            put("rollback", BACK | {"to": "r1", "after": "r0"}),
            "rollback.to=r1: comes after rollback.after=r0; a rollback goes back to an earlier round",
        ),
        (
            put("rollback", BACK | {"to": 1}),
            "rollback.to=1: a round name is text like r1, not a number; write r1",
        ),
        # Earlier rounds' pairs.
        (
            put(CARRY, "some"),
            f"{CARRY}=some: must be all, none, {{last: N}} rounds or {{sample: N}} pairs",
        ),
        (
            put(CARRY, None),
            f"{CARRY}=None: must be all, none, {{last: N}} rounds or {{sample: N}} pairs",
        ),
        (put(CARRY, {"lst": 2}), f"{CARRY}.lst: unknown key; did you mean last?"),
        (put(CARRY, {"last": 0}), f"{CARRY}.last=0: input should be greater than or equal to 1"),
        (
            put(CARRY, {"last": 2, "sample": 2}),
            f"{CARRY}: has one key; write {{last: N}} rounds or {{sample: N}} pairs",
        ),
        (put(CARRY, {}), f"{CARRY}: has one key; write {{last: N}} rounds or {{sample: N}} pairs"),
        # Starts.
        (
            put("rounds.r1.from", 0),
            "rounds.r1.from=0: a round name is text like r0, not a number; write r0",
        ),
        (
            put("rounds.r1.init", "r0"),
            "rounds.r1.init='r0': must be one of 'initial' or 'previous'",
        ),
        (
            put(f"{REWARD}.init", "previous"),
            f"{REWARD}.init=previous: r0 has no reward model to start from; use policy",
        ),
        (
            put(f"{PPO}.round", 1),
            f"{PPO}.round=1: a round name is text like r1, not a number; write r1",
        ),
        # The gate.
        (
            put("rounds.r1.gate.on_fail", "aks"),
            "rounds.r1.gate.on_fail='aks': must be one of 'keep', 'stop' or 'ask'; did you mean ask?",
        ),
        (
            put("rounds.r1.gate.margin", -0.1),
            "rounds.r1.gate.margin=-0.1: input should be greater than or equal to 0",
        ),
        (
            put("rounds.r1.gate.margin", "inf"),
            "rounds.r1.gate.margin=inf: input should be a finite number",
        ),
        (
            drop("rounds.r1.gate"),
            "rounds.r1.gate: required and missing; add it: `gate: {metric: gold_mean, margin: 0.0, "
            "tie_break: [], rules: [], on_fail: keep}`",
        ),
        (put("lineage.commit", "yes"), "lineage.commit=yes: input should be a valid boolean"),
    ],
)
def test_what_a_round_comes_to_is_checked(change: Change, line: str) -> None:
    assert problems(change) == [line]


@pytest.mark.parametrize("value", [{"last": 1}, {"sample": 5000}, "all", "none"])
def test_carry_over_has_four_forms(value: Any) -> None:
    """In the first round too, where there may be nothing to carry."""
    raw = copy.deepcopy(RAW)
    put(CARRY, value)(raw)
    assert resolved_twice(raw).rounds["r1"].preferences.model_dump(exclude_none=True)[
        "carry_over"
    ] == (value)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("gold_win_rate.lower", "win_rate_lower"), ("winrate", "win_rate"), ("kl", "kl_nats")],
)
@pytest.mark.parametrize(
    "place",
    ["rounds.r1.gate.metric", "rounds.r1.gate.rules.0.metric", "rounds.r1.gate.tie_break.0.metric"],
)
def test_a_column_that_does_not_exist_names_a_near_one(place: str, asked: str, meant: str) -> None:
    (line,) = problems(put(place, asked))
    assert line.startswith(f"{place}='{asked}': must be one of 'gold_mean', 'proxy_mean'")
    assert line.endswith(f"; did you mean {meant}?")


def test_a_gate_above_the_rounds_is_told_where_it_belongs() -> None:
    found = problems(lambda raw: raw.update(gate=raw["rounds"]["r1"].pop("gate")))
    assert found == [
        "rounds.r1.gate: required and missing; add it: "
        "`gate: {metric: gold_mean, margin: 0.0, tie_break: [], rules: [], on_fail: keep}`",
        "gate: unknown key; it belongs to a round; write it below each, as rounds.NAME.gate",
    ]


def test_a_tie_break_on_gold_needs_gold() -> None:
    no_gold = [
        put("gold", None),
        put(f"{PREFERENCES}.labeler", {"kind": "program", "path": "a.b"}),
        put("rounds.r1.gate.metric", "proxy_mean"),
    ]
    assert problems(*no_gold) == []
    on_gold = put("rounds.r1.gate.tie_break.0.metric", "gold_mean")
    assert problems(*no_gold, on_gold) == [
        "rounds.r1.gate: uses gold_mean but no gold is declared; use win_rate or proxy_mean"
    ]


def second_round(**changes: Any) -> dict[str, Any]:
    """The repository's pipeline with an r2 that starts from r1."""
    raw = copy.deepcopy(RAW)
    raw["rounds"]["r2"] = copy.deepcopy(raw["rounds"]["r1"]) | {"from": "r1", "sample_from": "r1"}
    raw["candidates"]["r2-dpo"] = raw["candidates"]["r1-dpo"] | {
        "round": "r2",
        "from": "r1",
        "learns_from": "r2/preferences",
    }
    for path, value in changes.items():
        put(path.replace("__", "."), value)(raw)
    return raw


def test_a_warm_start_needs_a_committee_of_the_same_size() -> None:
    config.parse(second_round(rounds__r2__reward_model__init="previous"))
    raw = second_round(
        rounds__r2__reward_model__init="previous", rounds__r2__reward_model__members=3
    )
    with pytest.raises(
        config.ConfigError, match=r"rounds\.r1 has 2 members, this one 3; use as many"
    ):
        config.parse(raw)


def test_rounds_that_start_from_each_other_are_refused() -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.parse(second_round(rounds__r1__from="r2"))
    assert caught.value.problems[0] == "rounds.r1.from=r2: not an earlier round; use one of r0"
    with pytest.raises(config.ConfigError, match=r"rounds\.r2\.from=r2: not an earlier round"):
        config.parse(second_round(rounds__r2__from="r2"))


ADDED_LATER = [
    "resources.checkpoints", "rounds.r1.init", "rounds.r1.reward_model.init", "rounds.r1.decision",
    "rounds.r1.gate.margin", "rounds.r1.gate.tie_break", "rounds.r1.gate.on_fail", "lineage",
]  # fmt: skip


def test_a_file_from_before_a_key_is_told_the_line_to_add() -> None:
    found = problems(*map(drop, ADDED_LATER))
    assert len(found) == len(ADDED_LATER)
    raw = copy.deepcopy(RAW)
    for path in ADDED_LATER:
        (line,) = (line for line in found if line.startswith(f"{path}: required and missing"))
        written = yaml.safe_load(line.split("`")[1])
        drop(path)(raw)
        put(path, written[path.rpartition(".")[2]])(raw)
    config.parse(raw)


def test_a_candidate_of_a_round_before_may_learn_from_an_earlier_round_only() -> None:
    raw = copy.deepcopy(RAW)
    raw["rounds"]["r2"] = copy.deepcopy(raw["rounds"]["r1"]) | {"from": "r1", "sample_from": "r1"}
    raw["candidates"]["r2-dpo"] = raw["candidates"]["r1-dpo"] | {"round": "r2", "from": "r1"}
    config.parse(raw)
    raw["candidates"]["r2-dpo"]["learns_from"] = "r2/preferences"
    config.parse(raw)
    raw["candidates"]["r1-dpo"]["learns_from"] = "r2/preferences"
    raw["rounds"]["r1"]["from"] = "r2"
    with pytest.raises(config.ConfigError) as caught:
        config.parse(raw)
    text = str(caught.value)
    assert "candidates.r1-dpo.learns_from=r2/preferences: r2 is not r1 or an earlier round" in text
    assert "rounds.r1.from=r2: not an earlier round; use one of r0" in text


@pytest.mark.parametrize("buffer", [1, 56, 57])
def test_an_overlong_buffer_is_part_of_the_answer(buffer: int) -> None:
    limit = RAW["model"]["max_response_tokens"]
    assert limit == 56
    found = problems(
        put("candidates.r1-ppo.truncated", {"kind": "soft_overlong", "buffer": buffer})
    )
    expected = [
        "candidates.r1-ppo.truncated.buffer=57: more than model.max_response_tokens=56; lower it"
    ]
    assert found == (expected if buffer > limit else [])


def resolved_twice(raw: dict[str, Any]) -> config.Pipeline:
    """What a file says, which its full form says too."""
    before = copy.deepcopy(raw)
    pipeline = config.parse(raw)
    assert raw == before
    assert config.parse(yaml.safe_load(config.as_yaml(pipeline))) == pipeline
    assert config.parse(config.resolved(raw)) == pipeline
    assert config.resolved(config.resolved(raw)) == config.resolved(raw)
    return pipeline


def test_losses_may_be_names_alone() -> None:
    raw = copy.deepcopy(RAW)
    put("candidates.r1-dpo.losses", ["sigmoid", {"kind": "sft", "weight": 0.5}])(raw)
    put("candidates.r1-dpo.losses", ["sigmoid", "sft"])(other := copy.deepcopy(RAW))
    found, names = resolved_twice(raw), resolved_twice(other)
    first = found.candidates["r1-dpo"]
    assert isinstance(first, config.PreferenceCandidate)
    assert first.losses[0].model_dump() == {
        "kind": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "weight": 1.0
    }  # fmt: skip
    second = names.candidates["r1-dpo"]
    assert isinstance(second, config.PreferenceCandidate)
    assert [(term.kind, term.weight) for term in second.losses] == [("sigmoid", 1), ("sft", 1)]
    (line,) = problems(put("candidates.r1-dpo.losses", ["sigmoit"]))[:1]
    assert line.startswith("candidates.r1-dpo.losses.0.kind=sigmoit: must be one of 'sigmoid'")


@pytest.mark.parametrize("kind", ["bradley_terry", "davidson", "rao_kupper"])
def test_a_reward_models_loss_may_be_a_name_alone(kind: str) -> None:
    raw = copy.deepcopy(RAW)
    put("rounds.r1.reward_model.loss", kind)(raw)
    put("rounds.r1.preferences.ties", "keep")(raw)
    loss = resolved_twice(raw).rounds["r1"].reward_model.loss
    assert loss.kind == kind
    assert loss.arguments()["centering"] == 0.0


def test_a_reward_models_loss_that_is_no_part_is_refused() -> None:
    place = "rounds.r1.reward_model.loss"
    assert problems(put(place, "bradley_tery"))[0].startswith(f"{place}.kind=bradley_tery: must be")
    assert problems(put(place, ["bradley_terry"]))
    assert problems(drop(place)) == [f"{place}: required and missing; add it"]


@pytest.mark.parametrize("kind", ["davidson", "rao_kupper"])
def test_a_loss_of_ties_needs_the_ties(kind: str) -> None:
    loss = put("rounds.r1.reward_model.loss", {"kind": kind, "centering": 0.0})
    assert problems(loss) == [
        f"rounds.r1.reward_model.loss={kind} learns how often answers tie, and "
        "preferences.ties=drop removes ties; set it to keep, or use bradley_terry"
    ]
    assert problems(loss, put("rounds.r1.preferences.ties", "keep")) == []


def numbers(value: Any, place: str = "") -> Iterator[str]:
    """Every dotted path to a fraction or rate."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "world_options":
                yield from numbers(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, float):
        yield place


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", [*numbers(RAW), "sft.epochs", "seed"])
def test_no_number_may_be_nan_or_infinite(path: str, value: float) -> None:
    found = problems(put(path, value))
    assert any(line.startswith(f"{path}={value}: ") for line in found), found


@pytest.mark.parametrize("bound", ["at_least", "at_most"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_rule_that_nothing_can_break_is_refused(bound: str, value: float) -> None:
    (line,) = problems(put("rounds.r1.gate.rules", [{"metric": "win_rate", bound: value}]))
    assert line == f"rounds.r1.gate.rules.0.{bound}={value}: input should be a finite number"


def test_all_problems_are_told_at_once() -> None:
    found = problems(
        put("sft.epochs", "2"),
        put("modle", {}),
        put("model.demo.num_heads", 5),
        put(f"{PPO}.kl.where", "loss"),
        put(f"{GRPO}.loss.clip_high", -1.0),
        put(f"{DPO}.round", "r4"),
        put(
            "rounds.r1.gate.rules",
            [{"metric": "win_rate", "at_least": math.nan}, {"metric": "nothing"}],
        ),
        drop("tracking"),
    )
    starts = [
        "sft.epochs='2'", "modle: unknown key; did you mean model?", "model.demo.num_heads=5",
        f"{PPO}.kl.estimator=k1", f"{GRPO}.loss.clip_high=-1.0: input should be greater than 0", f"{DPO}.round=r4",
        "rounds.r1.gate.rules.0.at_least=nan", "rounds.r1.gate.rules.1.metric='nothing'",
        "tracking: required and missing",
    ]  # fmt: skip
    assert len(found) == len(starts), found
    for start in starts:
        assert any(line.startswith(start) for line in found), start


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@given(st.sampled_from([*keys(RAW), "rounds.r1", "candidates.r1-ppo"]), junk)
def test_junk_anywhere_is_read_or_refused_in_words(path: str, value: Any) -> None:
    for line in problems(put(path, value)):
        assert ": " in line or "=" in line
        assert len(line) > len("x: y")


# --- the file ---


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        config.load(path)
    return str(caught.value)


TEXT = (ROOT / "pipeline.yaml").read_text(encoding="utf-8")


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    text = refused(tmp_path, TEXT + "\nseed: 3\n")
    assert 'duplicate key "seed"' in text
    assert "pipeline.yaml" in text
    assert 'duplicate key "epochs"' in refused(
        tmp_path, TEXT.replace("  epochs: 2 ", "  epochs: 2\n  epochs: 3 #", 1)
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "- a\n", "3\n", "a: [1\n", "a: 1\n\tb: 2\n", "a: \x07\n", "a: !!python/object:os.system x\n",
        "seed: 2024-99-99\n", "a: !!int x\n", "a: !!float x\n", "a: 1\n---\nb: 1\n", "a: *nowhere\n",
    ],
)  # fmt: skip
def test_what_is_not_a_mapping_in_yaml_is_refused_in_words(tmp_path: Path, text: str) -> None:
    message = refused(tmp_path, text)
    assert message.startswith(str(tmp_path / "pipeline.yaml"))
    assert "not readable as YAML" in message or "not a mapping" in message


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(BadInput, match="not readable as YAML"):
        config.load(tmp_path / "pipeline.yaml")


@pytest.mark.parametrize("name", ["nothing.yaml", "."])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"no such file[\s\S]*change into the project's folder"):
        config.load(tmp_path / name)


def test_files_and_modules_that_are_not_there_are_named_at_once(tmp_path: Path) -> None:
    raw = config.read_yaml(ROOT / "pipeline.yaml")
    raw["gold"]["path"] = "mine.gold"
    raw["data"] |= {"source": "nowhere", "world": None, "world_options": {}}
    raw["rounds"]["r1"]["preferences"]["labeler"] = {
        "kind": "program",
        "path": "mine.labels.choose",
    }
    pipeline = config.parse(raw)
    with pytest.raises(config.ConfigError) as caught:
        config.check_files(pipeline, tmp_path)
    keys = [problem.split("=")[0] for problem in caught.value.problems]
    assert keys == [
        "data.source",
        "data.demonstrations.path",
        "data.prompts.path",
        "gold.path",
        "rounds.r1.preferences.labeler.path",
    ]
    for name in ("nowhere", "data/source/demonstrations.jsonl", "data/source/prompts.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "mine").mkdir()
    for name in ("gold.py", "labels.py"):
        (tmp_path / "mine" / name).write_text("raise RuntimeError('a check runs no user code')")
    config.check_files(pipeline, tmp_path)


def test_the_check_passes_where_gold_is_forbidden(tmp_path: Path) -> None:
    code = (
        "from rlhf import config; from rlhf.rewards.firewall import forbid;"
        "p = config.load(); forbid(p.gold.path); config.check_files(p)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_one_member_has_nothing_to_aggregate() -> None:
    changes = [put(f"{REWARD}.members", 1), put(f"{PPO}.aggregate", {"kind": "min"})]
    assert problems(*changes) == [
        f"{PPO}.aggregate=min: rounds.r1.reward_model.members=1, and of one member there is nothing to "
        "aggregate; use mean, or more members"
    ]
    assert problems(put(f"{REWARD}.members", 1)) == []


@pytest.mark.parametrize("name", ["dpo_", "dappo"])
def test_a_preset_that_is_misspelt_is_told_once(name: str) -> None:
    sizes = {k: v for k, v in RAW["candidates"]["r1-dpo"].items() if k not in ("kind", "losses")}
    (line,) = problems(put(DPO, {**sizes, "algorithm": name.lower()}))
    assert "no preset of that name; did you mean" in line


def test_departures_from_a_preset_are_listed() -> None:
    from rlhf import presets

    assert presets.differences(RAW["candidates"]["r1-dpo"]) == []
    changed = RAW["candidates"]["r1-grpo"] | {"algorithm": "dapo", "loss": {"clip_high": 0.2}}
    found = presets.differences(changed)
    assert "loss.clip_high=0.2 (0.28)" in found
    assert "reduction=constant_length (token_mean)" in found
    assert "kl={where: loss, estimator: k3, coef: 0.2} (null)" in found
    assert presets.differences({"algorithm": "mine"}) == []


def test_writing_yaml_leaves_the_writers_of_others_alone() -> None:
    from io import StringIO

    from ruamel.yaml import YAML

    def by_ruamel() -> str:
        text = StringIO()
        YAML().dump({"nothing": None, "rate": 1e-05}, text)
        return text.getvalue()

    assert config.to_yaml({"nothing": None, "rate": 1e-05}) == "nothing: null\nrate: 1.0e-05\n"
    assert by_ruamel() == "nothing:\nrate: 1e-05\n"  # as dvc.lock is written
