"""The data stage: book, splits, contamination, limits, imported pairs, determinism."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlhf import artifacts, config, contracts
from rlhf.errors import BadInput
from rlhf.worlds.reviews import write_tokenizer
from tasks import data as stage

ROOT = Path(__file__).parents[2]
WORDS = ["camera", "battery", "good", "bad", "nice", "fine", "great", "the", "is", "a"]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pipeline(**sections: dict[str, Any]) -> config.Pipeline:
    raw = config.read_yaml(ROOT / "pipeline.yaml")
    for name, changes in sections.items():
        raw[name] = {**raw[name], **changes}
    return config.parse(raw)


def save(path: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "file", "path": path}


def users(
    *,
    demonstrations: list[dict[str, Any]] | None = None,
    prompts: list[dict[str, Any]] | None = None,
    pairs: list[dict[str, Any]] | None = None,
    **model: Any,
) -> config.Pipeline:
    """A project with a user's own files; every table is legal unless given."""
    write_tokenizer(Path("mine/tokenizer"))
    rows = demonstrations or [
        {"prompt": f"the camera {'nice ' * i}:", "response": "good ."} for i in range(1, 5)
    ]
    listed = prompts or [
        {"prompt": f"the battery {'nice ' * i}:", "split": split}
        for i, split in enumerate(["preferences", "rl", "choose", "report"])
    ]
    demo_spec: dict[str, Any] = save("mine/demonstrations.jsonl", rows)
    if "split" in rows[0]:
        demo_spec["split"] = "split"
    prompt_spec: dict[str, Any] = save("mine/prompts.jsonl", listed)
    if "split" in listed[0]:
        prompt_spec["split"] = "split"
    sections: dict[str, Any] = {
        "source": "mine",
        "world": None,
        "world_options": {},
        "demonstrations": demo_spec,
        "prompts": prompt_spec,
        "preferences": save("mine/pairs.jsonl", pairs) if pairs else None,
    }
    return pipeline(data=sections, model={"tokenizer": "mine/tokenizer", **model})


def table(name: str) -> pd.DataFrame:
    path = Path(f"data/tables/{name}.parquet")
    return contracts.read(path, getattr(contracts, name.upper()))


def imported_pairs() -> pd.DataFrame:
    return contracts.read("runs/r0/preferences/pairs.parquet", contracts.PAIRS)


def hashes() -> dict[str, str]:
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest()
        for folder in ("data", "runs")
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file()
    }


def test_the_world_becomes_tables_with_the_same_bytes_each_time(project: Path) -> None:
    options = {"num_things": 2, "num_demonstrations": 60, "num_heldout": 10}
    chosen = pipeline(data={"source": ".", "world_options": options})
    stage.run(chosen)
    first = hashes()
    stage.run(chosen)
    assert hashes() == first

    prompts, demonstrations = table("prompts"), table("demonstrations")
    assert set(prompts["split"]) == {"sft", "preferences", "rl", "choose", "report"}
    assert demonstrations["split"].value_counts().to_dict() == {"train": 60, "heldout": 10}
    assert demonstrations["ended"].all()
    assert set(demonstrations["prompt_id"]) <= set(prompts["prompt_id"])
    split = dict(zip(prompts["prompt_id"], prompts["split"], strict=True))
    train = demonstrations[demonstrations["split"] == "train"]
    assert {split[name] for name in train["prompt_id"]} == {"sft"}
    assert len(table("too_long")) == 0
    assert len(imported_pairs()) == 0
    samples = contracts.read("runs/r0/preferences/samples.parquet", contracts.SAMPLES)
    assert len(samples) == 0
    assert len(contracts.read("runs/r0/preferences/earlier.parquet", contracts.PAIRS)) == 0
    assert artifacts.read_json("runs/r0/reward_model/scale.json") == {"members": []}

    other = pipeline(data={"source": ".", "world_options": options})
    stage.run(other.model_copy(update={"seed": 1}))
    assert hashes() != first


def test_options_the_world_does_not_have_are_bad_input(project: Path) -> None:
    with pytest.raises(BadInput, match="no_such"):
        stage.run(pipeline(data={"source": ".", "world_options": {"no_such": 1}}))
    absent = {"source": ".", "world": "no_such_world", "world_options": {}}
    with pytest.raises(BadInput, match=r"data\.world=no_such_world"):
        stage.run(pipeline(data=absent))
    assert not Path("data/source").exists()


def test_a_users_files_become_the_book_and_a_manifest(project: Path) -> None:
    stage.run(users())
    book = table("prompts")
    assert book["split"].tolist() == ["preferences", "rl", "choose", "report"] + ["sft"] * 4
    assert book["prompt_id"].tolist() == [contracts.prompt_id(p) for p in book["prompt"]]
    assert table("demonstrations")["split"].value_counts().to_dict() == {"train": 3, "heldout": 1}
    manifest = artifacts.read_json("data/source/manifest.json")
    content = Path("mine/prompts.jsonl").read_bytes()
    entry = {"path": "mine/prompts.jsonl", "sha256": hashlib.sha256(content).hexdigest()}
    assert entry in manifest["files"]


def test_prompts_without_split_fall_by_their_text(project: Path) -> None:
    texts = [f"{a} {b} {c} :" for a in WORDS for b in WORDS for c in WORDS]
    stage.run(users(prompts=[{"prompt": text} for text in texts]))
    got = table("prompts").iloc[: len(texts)]
    fractions = got["split"].value_counts(normalize=True).to_dict()
    declared = {"sft": 0.35, "preferences": 0.2, "rl": 0.2, "choose": 0.1, "report": 0.15}
    # 1000 draws: standard error < .016
    assert fractions == pytest.approx(declared, abs=0.05)
    # the same split whatever else is listed
    few = texts[500:]
    stage.run(users(prompts=[{"prompt": text} for text in few]))
    again = table("prompts").iloc[: len(few)]
    assert again["split"].tolist() == got["split"].tolist()[500:]


def test_split_by_hand() -> None:
    digest = hashlib.sha256(b"v1 camera").hexdigest()
    expected = int(digest[:12], 16) / 16**12
    assert stage.position("camera") == pytest.approx(expected, abs=1e-15)
    only = dict.fromkeys(config.SPLITS, 0.0) | {"rl": 1.0}
    assert {stage.split_of(word, only) for word in WORDS} == {"rl"}


def test_held_out_at_least_one_never_all() -> None:
    names = [f"{i:016x}" for i in range(2000)]
    assert len(stage.heldout_prompts(names, 0.05)) == pytest.approx(100, abs=40)
    assert len(stage.heldout_prompts(names[:2], 1e-9)) == 1
    assert len(stage.heldout_prompts(names[:2], 1.0)) == 1
    assert stage.heldout_prompts(names[:1], 0.5) == set()
    assert stage.heldout_prompts(reversed(names), 0.05) == stage.heldout_prompts(names, 0.05)


# --- contamination --------------------------------------------------------------------------------

EVALUATED = ["the battery nice nice :", "the battery nice nice nice :"]  # choose, report


@pytest.mark.parametrize("prompt", EVALUATED)
def test_training_on_an_evaluation_prompt_is_bad_input(project: Path, prompt: str) -> None:
    rows = [
        {"prompt": "the camera :", "response": "good .", "split": "train"},
        {"prompt": prompt, "response": "good .", "split": "train"},
        {"prompt": "a camera :", "response": "good .", "split": "heldout"},
    ]
    with pytest.raises(BadInput, match=rf"demonstrations\.jsonl row 2 '{prompt}': train"):
        stage.run(users(demonstrations=rows))
    assert not Path("data/tables").exists()


@pytest.mark.parametrize("prompt", EVALUATED)
def test_an_imported_pair_of_an_evaluation_prompt_is_bad_input(project: Path, prompt: str) -> None:
    pairs = [{"prompt": "the camera :", "chosen": "good .", "rejected": "bad ."}]
    pairs += [{"prompt": prompt, "chosen": "good .", "rejected": "bad ."}]
    with pytest.raises(BadInput, match=r"pairs\.jsonl row 2"):
        stage.run(users(pairs=pairs))


def test_heldout_demonstrations_may_be_of_choose_and_not_of_report(project: Path) -> None:
    train = {"prompt": "the camera :", "response": "good .", "split": "train"}
    heldout = {"response": "good .", "split": "heldout"}
    stage.run(users(demonstrations=[train, {"prompt": EVALUATED[0], **heldout}]))
    assert table("prompts")["split"].tolist()[2] == "choose"
    with pytest.raises(BadInput, match="heldout demonstration, prompt of report"):
        stage.run(users(demonstrations=[train, {"prompt": EVALUATED[1], **heldout}]))
    same = {"prompt": "the camera :", "response": "bad .", "split": "heldout"}
    with pytest.raises(BadInput, match="in no train demonstration"):
        stage.run(users(demonstrations=[train, same]))


def test_a_prompt_in_two_splits_is_bad_input(project: Path) -> None:
    rows = [
        {"prompt": f"p{i} :", "split": s} for i, s in enumerate(["preferences", "choose", "report"])
    ]
    with pytest.raises(BadInput, match="row 1 preferences, row 4 report"):
        stage.run(users(prompts=[*rows, {"prompt": "p0 :", "split": "report"}]))
    with pytest.raises(BadInput, match="no prompt is in split report"):
        stage.run(users(prompts=rows[:2]))


# --- limits ---------------------------------------------------------------------------------------

LONG = [
    {"prompt": "the camera :", "response": "good ."},
    {"prompt": "a camera :", "response": "good good good bad bad ."},  # 7 tokens with the end
    {"prompt": "the nice good fine camera :", "response": "bad ."},  # 6 prompt tokens
    {"prompt": "camera :", "response": "good good good good"},  # 5 with the end
]
LIMITS = {"max_prompt_tokens": 5, "max_response_tokens": 5}
SHORT = [
    {"prompt": "nice :", "split": "preferences"},
    {"prompt": "battery :", "split": "rl"},
    {"prompt": "good :", "split": "choose"},
    {"prompt": "bad :", "split": "report"},
]


def test_too_long_rows_are_listed(project: Path) -> None:
    with pytest.raises(BadInput) as error:
        stage.run(users(demonstrations=LONG, prompts=SHORT, **LIMITS, too_long="error"))
    message = str(error.value)
    assert "2 problems" in message
    assert "demonstrations.jsonl row 2: 3 prompt tokens, 7 response tokens" in message
    assert "demonstrations.jsonl row 3: 6 prompt tokens, 3 response tokens" in message


def test_too_long_rows_are_dropped_and_noted(project: Path) -> None:
    stage.run(users(demonstrations=LONG, prompts=SHORT, **LIMITS, too_long="drop"))
    assert sorted(table("demonstrations")["prompt"]) == ["camera :", "the camera :"]
    assert "a camera :" not in set(table("prompts")["prompt"])
    ledger = table("too_long")
    assert ledger.to_numpy().tolist() == [
        ["demonstrations", 2, 3, 7, "drop"],
        ["demonstrations", 3, 6, 3, "drop"],
    ]


def test_too_long_rows_are_truncated_and_noted(project: Path) -> None:
    stage.run(users(demonstrations=LONG, prompts=SHORT, **LIMITS, too_long="truncate"))
    got = table("demonstrations")
    assert got["prompt"].tolist()[2] == "nice good fine camera :"
    assert got["response"].tolist()[1] == "good good good bad bad"
    assert got["ended"].tolist() == [True, False, True, True]
    assert got["prompt_id"].tolist()[2] == contracts.prompt_id("nice good fine camera :")
    assert table("too_long")["action"].tolist() == ["truncate", "truncate"]


def test_truncation_that_meets_an_evaluation_prompt_is_bad_input(project: Path) -> None:
    prompts = [*SHORT, {"prompt": "nice good fine camera :", "split": "report"}]
    rows = [{**row, "split": "train"} for row in LONG]
    rows[0]["split"] = "heldout"
    with pytest.raises(BadInput, match="row 3"):
        stage.run(users(demonstrations=rows, prompts=prompts, **LIMITS, too_long="truncate"))


def test_truncated_prompts_that_meet_are_one(project: Path) -> None:
    long = [{"prompt": f"{w} a a a a :", "split": "rl"} for w in ("good", "bad")]
    stage.run(users(prompts=[*SHORT, *long], **LIMITS, too_long="truncate"))
    assert table("prompts")["prompt"].tolist().count("a a a a :") == 1


def test_pairs_made_equal_by_truncation_go(project: Path) -> None:
    pairs = [
        {"prompt": "fine :", "chosen": "a a a a a good", "rejected": "a a a a a bad"},
        {"prompt": "fine :", "chosen": "good a a a a a", "rejected": "bad ."},
    ]
    stage.run(users(prompts=SHORT, pairs=pairs, **LIMITS, too_long="truncate"))
    got = imported_pairs()
    assert got[["chosen", "rejected", "chosen_ended", "rejected_ended"]].to_numpy().tolist() == [
        ["good a a a a", "bad .", False, True]
    ]
    ledger = table("too_long").query("table == 'preferences'")
    assert ledger[["row", "action"]].to_numpy().tolist() == [[1, "drop_equal"], [2, "truncate"]]


def test_nothing_left_is_bad_input(project: Path) -> None:
    rows = [{"prompt": p, "response": "a a a a a a"} for p in ("a :", "the :")]
    with pytest.raises(BadInput, match=r"demonstrations\.jsonl: no row is left"):
        stage.run(users(demonstrations=rows, prompts=SHORT, **LIMITS, too_long="drop"))


@pytest.mark.parametrize("token", ["<eos>", "<pad>"])
def test_responses_that_spell_the_end_token_are_bad_input(project: Path, token: str) -> None:
    rows = [{"prompt": "a :", "response": "good ."}, {"prompt": "the :", "response": f"a {token}"}]
    with pytest.raises(BadInput, match=f"row 2, column response: holds {token}"):
        stage.run(users(demonstrations=rows))


def test_chats_without_a_template_are_bad_input(project: Path) -> None:
    chat = [{"role": "user", "content": "the camera"}]
    rows = [{"prompt": "a :", "response": "good ."}, {"prompt": chat, "response": "good ."}]
    with pytest.raises(BadInput, match=r"demonstrations\.jsonl row 2: chat messages"):
        stage.run(users(demonstrations=rows))


# --- imported pairs -------------------------------------------------------------------------------


def test_imported_pairs_are_round_r0(project: Path) -> None:
    pairs = [
        {"prompt": f"{a} {b} :", "chosen": f"{c} .", "rejected": f"{c} {c} ."}
        for a in WORDS
        for b in WORDS
        for c in ("good", "fine")
    ]
    stage.run(users(pairs=pairs))
    got = imported_pairs()
    assert len(got) == 200
    assert set(got["round"]) == {"r0"}
    assert set(got["labeler"]) == {"imported"}
    assert got["group_id"].nunique() == 100
    assert got.groupby("group_id")["heldout"].nunique().max() == 1
    # 100 groups at 10 %: standard error 3
    assert got.drop_duplicates("group_id")["heldout"].sum() == pytest.approx(10, abs=9)
    assert got["chosen"].tolist()[:2] == ["good .", "fine ."]
    assert set(got["prompt_id"]) <= set(table("prompts")["prompt_id"])
    learned = table("prompts").set_index("prompt_id").loc[got["prompt_id"], "split"]
    assert set(learned) == {"preferences"}


def test_no_demonstration_to_hold_out_is_bad_input(project: Path) -> None:
    rows = [{"prompt": "a :", "response": "good ."}, {"prompt": "a :", "response": "bad ."}]
    with pytest.raises(BadInput, match="no demonstration is in split heldout"):
        stage.run(users(demonstrations=rows))
