"""What a round takes from the rounds before it: pairs, reward models, the policies it is measured against."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file
from test_training import RAW, Tracked, pairs, prompts
from test_training import pipeline as small

from rlhf import artifacts, config, contracts, resume, tracking
from rlhf.champion import policy_digest
from rlhf.data.book import PromptBook
from rlhf.errors import BadInput
from rlhf.models.policy import save_policy
from rlhf.models.scalar import HEAD_FILE, ScalarModel
from rlhf.rewards.committee import Committee
from tasks import best_of_n, data, evaluate, preferences, reward_model
from tasks import policy as policies

ROOT = Path(__file__).parents[2]


class Run(Tracked):
    def tags(self, *_: Any) -> None: ...


def rounds(**changes: dict[str, Any]) -> config.Pipeline:
    """Rounds r1 to r4 on the tiny model, each from the one before; dotted names of each are changed."""
    raw = small().model_dump(by_alias=True, mode="json")
    raw["gold"], raw["rounds"]["r1"]["gate"]["metric"] = None, "proxy_mean"
    first, candidate = raw["rounds"]["r1"], raw["candidates"]["r1-dpo"]
    first["preferences"]["labeler"] = {"kind": "program", "path": "judges.label"}
    raw["rounds"], raw["candidates"] = {}, {}
    for number in range(1, 5):
        start = f"r{number - 1}"
        body = copy.deepcopy(first) | {"from": start, "sample_from": start}
        for name, value in changes.get(f"r{number}", {}).items():
            section, _, key = name.rpartition(".")
            (body[section] if section else body)[key] = value
        raw["rounds"][f"r{number}"] = body
        raw["candidates"][f"r{number}-dpo"] = candidate | {
            "round": f"r{number}", "from": start, "learns_from": f"r{number}/preferences"
        }  # fmt: skip
    raw["evaluation"] |= {
        "choose_samples_per_prompt": 1, "report_samples_per_prompt": 2, "final_samples_per_prompt": 4,
        "sampling_batch_size": 8, "num_bootstrap": 100, "num_shown": 2, "best_of_n_samples": 4,
    }  # fmt: skip
    return config.parse(raw)


# --- carry_over ---


def of(name: str, training: int = 6, heldout: int = 2, ties: int = 2) -> pd.DataFrame:
    """A round's pairs: decided ones, ties, and held-out ones."""
    count = training + ties + heldout
    return pd.DataFrame(
        {
            "pair_id": [f"{name}-{i}" for i in range(count)],
            "group_id": [f"{name}-{i}" for i in range(count)],
            "prompt_id": contracts.prompt_id("w6 w12"),
            "prompt": "w6 w12",
            "chosen": "w7",
            "rejected": "w8",
            "chosen_ended": True,
            "rejected_ended": True,
            "tie": [training <= i < training + ties for i in range(count)],
            "heldout": [i >= training + ties for i in range(count)],
            "round": name,
            "labeler": "test",
            "gold_margin": None,
        }
    )


EARLIER = pd.concat([of("r0"), of("r1"), of("r2")], ignore_index=True)


def carried(rule: Any, seed: int = 0) -> pd.DataFrame:
    return EARLIER[preferences.carry(EARLIER, rule, seed)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("all", ["r0", "r1", "r2"]),
        ("none", []),
        (config.CarryOver(last=1), ["r2"]),
        (config.CarryOver(last=2), ["r1", "r2"]),
        (config.CarryOver(last=9), ["r0", "r1", "r2"]),
    ],
)
def test_whole_rounds_are_carried(rule: Any, expected: list[str]) -> None:
    found = carried(rule)
    assert found["round"].unique().tolist() == expected
    assert len(found) == 10 * len(expected)


def test_a_sample_is_of_decided_pairs_to_learn_from_and_keeps_what_was_held_out() -> None:
    found = carried(config.CarryOver(sample=5))
    training = found[~found["heldout"]]
    assert len(training) == 5
    assert not training["tie"].any()
    assert found["heldout"].sum() == 6
    assert found.equals(carried(config.CarryOver(sample=5)))
    assert not found.equals(carried(config.CarryOver(sample=5), seed=1))


def test_a_sample_of_more_than_there_are_is_all_of_them() -> None:
    found = carried(config.CarryOver(sample=999))
    assert len(found[~found["heldout"]]) == 18
    assert found.index.is_monotonic_increasing


def test_a_sample_favours_no_round() -> None:
    counts = pd.Series(0.0, index=["r0", "r1", "r2"])
    for seed in range(200):
        found = carried(config.CarryOver(sample=3), seed)
        counts += found[~found["heldout"]]["round"].value_counts().reindex(counts.index).fillna(0)
    assert counts.sum() == 600
    assert counts.between(150, 250).all()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    contracts.write(prompts(["w6 w12"]), Path("data/tables/prompts.parquet"), contracts.PROMPTS)
    return tmp_path


@pytest.fixture
def book(folder: Path) -> PromptBook:
    return PromptBook(Path("data/tables/prompts.parquet"), tiny.codec())


def write_pairs(name: str, table: pd.DataFrame, earlier: pd.DataFrame | None) -> None:
    place = Path("runs") / name / "preferences"
    contracts.write(table, place / "pairs.parquet", contracts.PAIRS)
    if earlier is not None:
        contracts.write(earlier, place / "earlier.parquet", contracts.PAIRS)


def test_what_a_round_leaves_out_later_rounds_can_still_use(book: PromptBook) -> None:
    rules: dict[str, Any] = {
        "r1": {"sample": 2}, "r2": "none", "r3": {"last": 2}, "r4": "all"
    }  # fmt: skip
    pipeline = rounds(**{k: {"preferences.carry_over": rule} for k, rule in rules.items()})
    write_pairs("r0", of("r0"), contracts.empty(contracts.PAIRS))
    seen: dict[str, list[str]] = {}
    for number, name in enumerate(rules, 1):
        used, unused = preferences._earlier(pipeline, name, book)
        both = pd.concat([used, unused])
        written = pd.concat([of(f"r{i}") for i in range(number)], ignore_index=True)
        # Nothing is lost, doubled or changed.
        again = both.sort_values("pair_id").reset_index(drop=True)
        assert again.drop(columns="gold_margin").equals(
            written.sort_values("pair_id").reset_index(drop=True).drop(columns="gold_margin")
        )
        seen[name] = used["round"].unique().tolist()
        write_pairs(name, pd.concat([used, of(name)], ignore_index=True), unused)
    assert seen == {"r1": ["r0"], "r2": [], "r3": ["r1", "r2"], "r4": ["r0", "r1", "r2", "r3"]}


def test_a_round_made_before_there_was_a_choice_has_no_rest(book: PromptBook) -> None:
    write_pairs("r0", of("r0"), None)
    used, unused = preferences._earlier(rounds(), "r1", book)
    assert (len(used), len(unused)) == (10, 0)


def test_pairs_to_learn_from_with_a_report_prompt_are_refused_and_held_out_ones_are_not(
    book: PromptBook,
) -> None:
    report = "w9 w12"
    assert book.split(contracts.prompt_id(report)) == "report"
    table = of("r0")
    table.loc[[3, 9], "prompt_id"] = contracts.prompt_id(report)
    write_pairs("r0", table[table["heldout"]], table[~table["heldout"]])
    with pytest.raises(BadInput, match="pair r0-3: prompt of report") as caught:
        preferences._earlier(rounds(), "r1", book)
    assert "r0-9" not in str(caught.value)
    table.loc[3, "prompt_id"] = contracts.prompt_id("w6 w12")
    write_pairs("r0", table, table.iloc[:0])
    assert len(preferences._earlier(rounds(), "r1", book)[0]) == 10


def test_a_pair_that_is_in_both_files_is_refused(book: PromptBook) -> None:
    write_pairs("r0", of("r0"), of("r0").iloc[:1])
    with pytest.raises(BadInput, match="pair_id"):
        preferences._earlier(rounds(), "r1", book)


# --- reward models that start as the previous ones ---


@pytest.fixture
def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracked]:
    """Tables, policies of r0 and r1, pairs of r1 and r2, and r1's reward model of two unlike members."""
    table = pairs()
    texts = sorted(set(table["prompt"]))
    contracts.write(prompts(texts), Path("data/tables/prompts.parquet"), contracts.PROMPTS)
    Path("source.txt").write_text("a source")
    policy(Path("runs/r0/promoted"))
    policy(Path("runs/r1/promoted"), 0.03)
    write_sft()
    for name in ("r1", "r2"):
        write_pairs(name, table.assign(round=name), None)
    for number in range(2):
        save_member(Path(f"runs/r1/reward_model/member_{number}"), seed=5 + number)
    artifacts.write_json(
        Path("runs/r1/reward_model/scale.json"),
        {"members": [{"name": f"member_{i}", "mean": 0.0, "std": 1.0} for i in range(2)]},
    )
    run = Run()
    monkeypatch.setattr(tracking, "stage_run", lambda *_, **__: run)
    yield run
    torch.use_deterministic_algorithms(False)


def policy(place: Path, shift: float = 0.0) -> None:
    model = tiny.llama(initializer_range=0.1)
    tiny.shift(model, shift)
    save_policy(model, tiny.tokenizer(), place)


def write_sft() -> None:
    digest = policy_digest(Path("runs/r0/promoted"))
    artifacts.write_json(Path("runs/r0/metrics/sft.json"), {"weights_sha256": digest})


def save_member(place: Path, seed: int, **changes: Any) -> None:
    model = ScalarModel(tiny.llama(seed, initializer_range=0.1, **changes).base_model)
    torch.nn.init.normal_(model.head.weight)
    model.save(place, tiny.tokenizer())


def fitted(init: str, learning_rate: float) -> list[dict[str, torch.Tensor]]:
    """Weights of r2's members, heads included."""
    settings = {"init": init, "learning_rate": learning_rate, "final_lr_fraction": 1.0}
    reward_model.run(rounds(r2={f"reward_model.{k}": v for k, v in settings.items()}), "r2")
    return [weights(Path(f"runs/r2/reward_model/member_{i}")) for i in range(2)]


def weights(place: Path) -> dict[str, torch.Tensor]:
    return load_file(place / "model.safetensors") | load_file(place / HEAD_FILE)


def test_members_start_as_those_of_the_same_number_and_their_scale_is_measured_anew(
    project: Tracked,
) -> None:
    found = fitted("previous", 1e-9)
    for number, member in enumerate(found):
        start = weights(Path(f"runs/r1/reward_model/member_{number}"))
        for name, value in member.items():
            torch.testing.assert_close(value, start[name], atol=1e-6, rtol=0, msg=name)
    scales = artifacts.read_json(Path("runs/r2/reward_model/scale.json"))["members"]
    assert all(scale["std"] != 1.0 and scale["mean"] != 0.0 for scale in scales)


def test_members_that_start_as_the_policy_have_a_new_head(project: Tracked) -> None:
    start = load_file(Path("runs/r1/promoted/model.safetensors"))
    for member in fitted("policy", 1e-9):
        assert float(member["weight"].abs().max()) < 1e-6
        torch.testing.assert_close(
            member["embed_tokens.weight"], start["model.embed_tokens.weight"], atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("what", ["absent", "size", "kind", "vocabulary"])
def test_a_previous_member_that_does_not_fit_is_refused(project: Tracked, what: str) -> None:
    place = Path("runs/r1/reward_model/member_1")
    rule = {
        "absent": "no such member",
        "size": "another architecture or size",
        "kind": "another architecture or size",
        "vocabulary": "vocabulary differs",
    }[what]
    if what == "absent":
        (place / HEAD_FILE).unlink()
    elif what == "size":
        save_member(place, seed=0, intermediate_size=40)
    elif what == "kind":
        ScalarModel(tiny.qwen2().base_model).save(place, tiny.tokenizer())
    else:
        path = place / "tokenizer.json"
        path.write_text(path.read_text().replace('"w9"', '"v9"'))
    with pytest.raises(BadInput, match=rule) as caught:
        fitted("previous", 1e-3)
    assert "member_1" in str(caught.value)
    assert "init: policy" in str(caught.value)


def test_r0_has_a_reward_model_without_members(folder: Path) -> None:
    artifacts.write_json(data.REWARD_MODEL / "scale.json", {"members": []})
    with pytest.raises(BadInput, match="without members"):
        Committee.load(data.REWARD_MODEL, tiny.codec(), tiny.model_settings(), tiny.CPU)


# --- evaluation against the incoming policy, the start and r0's ---


def candidate(name: str, shift: float, alarms: int | None = None) -> None:
    place = Path(f"runs/{name}/policies/{name}-dpo")
    policy(place / "step-00001", shift)
    listed = [{"checkpoint": "step-00001", "step": 1, "updates": 1}]
    artifacts.write_json(place / "checkpoints.json", listed)
    if alarms is not None:
        warned = [{"name": "a", "value": 1.0, "message": "b"}] * alarms
        artifacts.write_json(place / "alarms.json", warned)


def evaluated(name: str, init: str = "previous") -> pd.DataFrame:
    """Rows on report prompts, by checkpoint."""
    raw = rounds(**{name: {"init": init}}).model_dump(by_alias=True, mode="json")
    raw["data"]["source"] = "source.txt"
    evaluate.run(config.parse(raw), f"{name}-dpo")
    path = Path(f"runs/{name}/evaluations/{name}-dpo/evaluations.parquet")
    table = contracts.read(path, contracts.EVALUATIONS)
    return table[table["split"] == "report"].set_index("checkpoint")


def test_in_the_first_round_the_incoming_policy_is_the_initial_one(project: Tracked) -> None:
    candidate("r1", 0.05, alarms=2)
    rows = evaluated("r1")
    for ending in ("", "_lower", "_upper"):
        assert rows[f"win_rate_initial{ending}"].equals(
            rows[f"win_rate{ending}"].rename(f"win_rate_initial{ending}")
        )
    assert rows["alarms"].to_dict() == {"incoming": 0, "step-00001": 2}
    assert {"eval/win_rate_initial", "eval/win_rate"} <= set(project.logged[-1][1])
    report = artifacts.read_json(Path("runs/r1/metrics/r1-dpo-evaluation.json"))
    assert report["alarms"] == 2
    assert report["win_rate_initial"] == rows.loc["step-00001", "win_rate"]


def r2() -> None:
    """A reward model in r2, and a candidate that has gone back to r0's weights."""
    artifacts.write_json(
        Path("runs/r2/reward_model/scale.json"),
        {"members": [{"name": "member_0", "mean": 0.0, "std": 1.0}]},
    )
    save_member(Path("runs/r2/reward_model/member_0"), seed=5)
    candidate("r2", 0.0)


def test_later_rounds_are_also_measured_against_r0(project: Tracked) -> None:
    r2()
    rows = evaluated("r2")
    incoming, back = rows.loc["incoming"], rows.loc["step-00001"]
    assert (incoming["win_rate"], incoming["kl_nats"]) == (0.5, 0)
    assert incoming["win_rate_initial"] != 0.5
    assert (back["win_rate_initial"], back["win_rate_initial_lower"]) == (0.5, 0.5)
    assert back["win_rate"] == pytest.approx(1 - incoming["win_rate_initial"])
    assert back["kl_nats"] > 0.1
    assert pd.isna(back["alarms"])  # trained before there were alarms


def test_a_candidate_that_starts_as_r0_is_measured_from_there(project: Tracked) -> None:
    r2()
    before, rows = evaluated("r2"), evaluated("r2", init="initial")
    assert rows.loc["step-00001", "kl_nats"] == 0
    assert rows.loc["incoming", "kl_nats"] > 0.1
    others = [c for c in rows if not c.startswith("kl_")]
    assert rows[others].equals(before[others])


def test_where_the_incoming_policy_is_r0s_nothing_more_is_sampled(
    project: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round kept it: the same weights, with a lineage of their own."""
    r2()
    calls: list[object] = []
    original = evaluate.measure

    def counted(policy: Any, *arguments: Any, **options: Any) -> pd.DataFrame:
        calls.append(policy)
        return original(policy, *arguments, **options)

    monkeypatch.setattr(evaluate, "measure", counted)
    evaluated("r2")
    assert len(calls) == 6  # incoming, r0's and the checkpoint, on both prompt sets
    policy(Path("runs/r1/promoted"))
    artifacts.write_json(Path("runs/r1/promoted/lineage.json"), {"round": "r0"})
    calls.clear()
    rows = evaluated("r2")
    assert len(calls) == 4
    assert rows.loc["incoming", "win_rate_initial"] == 0.5


def test_another_policy_in_r0s_place_is_refused(project: Tracked) -> None:
    r2()
    policy(Path("runs/r0/promoted"), 0.1)
    with pytest.raises(BadInput, match="not the one that its metrics name"):
        evaluated("r2")


@pytest.mark.parametrize(
    ("section", "key"), [("rounds", "init"), ("candidates", "reference")], ids=lambda w: w
)
def test_a_start_that_does_not_name_its_weights_is_refused_before_training(
    project: Tracked, section: str, key: str
) -> None:
    """As an earlier version left it: what DVC watches for r0's policy would not pin it."""
    artifacts.write_json(Path("runs/r0/metrics/sft.json"), {"heldout_loss_nats": 1.0})
    raw = rounds().model_dump(by_alias=True, mode="json")
    raw[section]["r2" if section == "rounds" else "r2-dpo"][key] = "initial"
    with pytest.raises(BadInput, match=r"weights_sha256 is missing(?s:.*)dvc repro --force sft"):
        policies.run(config.parse(raw), "r2-dpo")
    assert not Path(".scratch/resume").exists()


def test_alarms_that_are_not_a_list_are_refused(project: Tracked) -> None:
    candidate("r1", 0.05)
    artifacts.write_json(Path("runs/r1/policies/r1-dpo/alarms.json"), {"name": "a"})
    with pytest.raises(BadInput, match="not a list of alarms"):
        evaluated("r1")


# --- what a stage's checkpoints hang on ---


@pytest.mark.parametrize(
    ("module", "name"),
    [(preferences, "r2"), (reward_model, "r2"), (evaluate, "r2-dpo"), (best_of_n, "r2")],
)
def test_checkpoints_hang_on_what_dvc_says_the_stage_hangs_on(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, seen = rounds(), dict[str, Any]()

    def record(_: Any, stage: str, **options: Any) -> contextlib.AbstractContextManager[None]:
        seen.update(options, stage=stage)
        return contextlib.nullcontext()

    monkeypatch.setattr(resume, "open_scratch", record)
    with module._scratch(pipeline, name):
        pass
    stage = module.__name__.removeprefix("tasks.")
    declared = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"][stage]["do"]
    item = pipeline.model_dump(by_alias=True)["candidates" if "-" in name else "rounds"][name]
    words = {"key": name, "data.source": pipeline.data.source} | {
        f"item.{k}": str(v) for k, v in item.items()
    }

    def filled(text: str) -> str:
        return re.sub(r"\$\{([^}]*)\}", lambda found: words[found[1]], text)

    (params,) = declared["params"]
    assert seen["stage"] == f"{stage}@{name}"
    assert {Path(p) for p in seen["inputs"]} == {Path(filled(d)) for d in declared["deps"]}
    assert set(seen["params"]) == {filled(p) for p in params["pipeline.yaml"]}
    assert seen["params"]["seed"] == RAW["seed"]
