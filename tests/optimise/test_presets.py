"""Every preset: what it fills in, what may be changed, and that it learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from pydantic import TypeAdapter

from rlhf import candidates, config, presets
from rlhf.models.scalar import ScalarModel
from rlhf.optimise.preference import OnlinePreferenceTrainer, PairIds, PreferenceTrainer
from rlhf.optimise.rl import RlTrainer
from rlhf.presets import PRESETS, resolve
from rlhf.progress import Clock

COMMON: dict[str, Any] = {
    "round": "r1",
    "from": "r0",
    "checkpoint_every": 1,
    "micro_batch_size": 8,
    **tiny.optimization(),
}
SAMPLING: dict[str, Any] = {
    "learns_from": "r1/reward_model",
    "prompts_per_step": 8,
    "samples_per_prompt": 8,
    "temperature": 1.0,
}
SIZES: dict[str, dict[str, Any]] = {
    "rl": SAMPLING,
    "online_preference": SAMPLING,
    "preference": {
        "learns_from": "r1/preferences",
        "pairs_per_group": 2,
        "epochs": 2,
        "batch_size": 8,
    },
}
COUNTS = {"steps": 8, "epochs_per_step": 1, "minibatches": 1}
READ: TypeAdapter[candidates.AnyCandidate] = TypeAdapter(candidates.Candidate)


def written(name: str, **changes: Any) -> dict[str, Any]:
    """A candidate that names the preset and adds sizes only, those that the preset leaves open."""
    preset = PRESETS[name]
    sizes = COMMON | SIZES[preset["kind"]]
    if preset["kind"] != "preference":
        sizes = {**sizes, **{k: v for k, v in COUNTS.items() if k not in preset}}
    return sizes | {"algorithm": name} | changes


def read(name: str, **changes: Any) -> candidates.AnyCandidate:
    return READ.validate_python(resolve(written(name, **changes)))


# --- what they fill in ---


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_are_all_that_a_preset_needs(name: str) -> None:
    assert list(presets.problems("r1-x", written(name))) == []
    candidate = read(name)
    assert candidate.algorithm == name
    assert candidate.kind == PRESETS[name]["kind"]


@pytest.mark.parametrize("name", PRESETS)
def test_resolved_it_shows_every_key_and_reads_as_itself_again(name: str) -> None:
    candidate = read(name)
    shown = candidate.model_dump(by_alias=True)
    assert set(shown) == {f.alias or n for n, f in type(candidate).model_fields.items()}
    again = READ.validate_python(resolve(shown))
    assert again == candidate
    assert again.model_dump(by_alias=True) == shown
    assert list(presets.problems("r1-x", shown)) == []
    tables = {
        "advantage": candidates.ADVANTAGES, "loss": candidates.POLICY_LOSSES,
        "aggregate": candidates.AGGREGATES, "truncated": candidates.TRUNCATION,
    }  # fmt: skip
    for key, table in tables.items():
        if key in shown:
            assert set(shown[key]) == {"kind", *table[shown[key]["kind"]]}
    for term in shown.get("losses", []):
        assert set(term) == {"kind", "weight", *candidates.PREFERENCE_LOSSES[term["kind"]]}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_writes_out_every_option_of_its_parts(name: str) -> None:
    """The algorithm's numbers stand in one place, and a changed default does not change them."""
    preset = PRESETS[name]
    for key, table in (("advantage", candidates.ADVANTAGES), ("loss", candidates.POLICY_LOSSES)):
        if key in preset:
            assert set(preset[key]) == {"kind", *table[preset[key]["kind"]]}
    for term in preset.get("losses", []):
        assert set(term) == {"kind", *candidates.PREFERENCE_LOSSES[term["kind"]]}


def test_a_preset_is_never_changed_by_who_uses_it() -> None:
    before = repr(PRESETS)
    found = resolve({"algorithm": "grpo"})
    found["loss"]["clip_low"] = 0.5
    found["kl"]["coef"] = 9.0
    assert repr(PRESETS) == before
    assert resolve({"algorithm": "grpo"})["loss"]["clip_low"] == 0.2


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("ppo", "advantage.gae_lambda", 0.95),
        ("a2c", "advantage.gae_lambda", 1.0),  # returns minus values
        ("reinforce", "advantage.decay", 0.9),
        ("grpo", "kl.estimator", "k3"),
        ("grpo", "kl.coef", 0.04),
        ("dapo", "loss.clip_low", 0.2),
        ("dapo", "loss.clip_high", 0.28),
        ("gspo", "loss.clip_low", 3e-4),
        ("gspo", "loss.clip_high", 4e-4),
        ("cispo", "loss.clip_high", 4.0),
        ("sapo", "loss.tau_positive", 1.0),
        ("sapo", "loss.tau_negative", 1.05),
        ("simpo", "losses.0.beta", 2.0),
        ("simpo", "losses.0.gamma", 1.0),
    ],
)
def test_the_numbers_of_the_papers(name: str, place: str, value: Any) -> None:
    found: Any = PRESETS[name]
    for key in place.split("."):
        found = found[int(key)] if key.isdigit() else found[key]
    assert found == value


# --- what may be changed ---


def test_what_is_written_wins_key_by_key() -> None:
    found = resolve(
        written("grpo", loss={"clip_high": 0.3}, kl={"coef": 0.2}, temperature=0.7, reference="ema")
    )
    assert found["loss"] == {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3}
    assert found["kl"] == {"where": "loss", "estimator": "k3", "coef": 0.2}
    assert found["reference"] == "ema"
    assert found["temperature"] == 0.7
    assert found["advantage"] == {"kind": "group_std"}
    kl = resolve(written("grpo", kl={"estimator": "k2", "target": {"nats": 3.0, "horizon": 900}}))
    assert kl["kl"]["coef"] == 0.04
    assert kl["kl"]["target"] == {"nats": 3.0, "horizon": 900}
    assert kl["kl"]["estimator"] == "k2"


def test_null_takes_a_section_away() -> None:
    candidate = read("grpo", kl=None, reference="none")
    assert isinstance(candidate, config.RlCandidate)
    assert candidate.kl is None


def test_a_part_of_another_kind_replaces_the_presets() -> None:
    """Nothing of its options is left over."""
    found = resolve(written("ppo", truncated={"kind": "missing_eos", "penalty": 2.0}))
    assert found["truncated"] == {"kind": "missing_eos", "penalty": 2.0}
    assert resolve(written("dapo", truncated="keep"))["truncated"] == {"kind": "keep"}
    other = {"kind": "mean_minus_variance", "variance_coef": 0.3}
    assert resolve(written("ppo", aggregate=other))["aggregate"] == other
    assert resolve(written("ppo", loss={"kind": "cispo"}))["loss"] == {"kind": "cispo"}


@pytest.mark.parametrize("key", ["advantage", "loss", "aggregate", "truncated"])
def test_a_name_alone_is_a_part(key: str) -> None:
    assert resolve({"algorithm": "mine", key: "abc"})[key] == {"kind": "abc"}
    assert resolve(written("grpo", loss="ppo_clip"))["loss"]["clip_low"] == 0.2
    assert resolve({"algorithm": "mine", key: ["abc"]})[key] == ["abc"]  # wrong, and left to say so


def test_of_a_round_a_name_alone_is_a_part() -> None:
    body = {"from": "r0", "reward_model": {"members": 2, "loss": "davidson"}}
    found = presets.spelled_out_round(body)
    assert found == {"from": "r0", "reward_model": {"members": 2, "loss": {"kind": "davidson"}}}
    assert body["reward_model"] == {"members": 2, "loss": "davidson"}
    assert presets.spelled_out_round(found) == found
    for left_alone in ({"from": "r0"}, {"reward_model": {"members": 2}}, {"reward_model": "x"}):
        assert presets.spelled_out_round(left_alone) == left_alone


def test_losses_are_replaced_as_a_whole() -> None:
    terms = [{"kind": "sigmoid", "beta": 0.3}, {"kind": "sft", "weight": 0.2}]
    assert resolve(written("dpo", losses=terms))["losses"] == terms
    assert list(presets.problems("r1-x", written("dpo", losses=terms))) == []


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        (
            "grpo",
            {"advantage": "rloo"},
            "candidates.r1-x.advantage=rloo: algorithm=grpo has advantage=group_std; "
            "name the algorithm otherwise and write its parts out",
        ),
        (
            "grpo",
            {"loss": {"kind": "my.loss", "options": {}}},
            "candidates.r1-x.loss=my.loss: algorithm=grpo has loss=ppo_clip; "
            "name the algorithm otherwise and write its parts out",
        ),
        (
            "dpo",
            {"losses": [{"kind": "ipo", "beta": 0.1}]},
            "candidates.r1-x.losses: algorithm=dpo has losses=sigmoid; name the algorithm otherwise",
        ),
        (
            "grpo",
            {"kind": "preference"},
            "candidates.r1-x.kind=preference: algorithm=grpo is of kind=rl; leave kind out",
        ),
    ],
)
def test_what_its_name_says_cannot_be_changed(
    name: str, changes: dict[str, Any], line: str
) -> None:
    assert list(presets.problems("r1-x", written(name, **changes))) == [line]


@pytest.mark.parametrize(
    ("algorithm", "parts", "suggestion"),
    [
        ("gropo", {}, "grpo"),
        ("reinforce_plusplus", {}, "reinforce_plus_plus"),
        ("online_dop", {}, "online_dpo"),
        ("mine", {}, None),  # near to nothing
        ("gropo", {"loss": "ppo_clip"}, None),  # a name of one's own, with its parts
        ("dpo2", {"losses": [{"kind": "sigmoid"}]}, None),
        (3, {}, None),
    ],
)
def test_a_name_near_to_a_preset_is_suggested(
    algorithm: Any, parts: dict[str, Any], suggestion: str | None
) -> None:
    found = list(presets.problems("r1-x", {"algorithm": algorithm, **parts}))
    if suggestion is None:
        assert found == []
        return
    assert found == [
        f"candidates.r1-x.algorithm={algorithm}: no preset of that name; did you mean {suggestion}?"
    ]


def test_a_kind_that_is_no_text_is_left_to_the_schema() -> None:
    assert list(presets.problems("r1-x", written("ppo", loss={"kind": 3}))) == []


def test_a_pipeline_reads_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    raw = config.read_yaml(Path(__file__).parents[2] / "pipeline.yaml")
    raw["candidates"] = {"r1-x": written("dr_grpo"), "r1-y": written("simpo")}
    pipeline = config.parse(raw)
    found = pipeline.candidates["r1-x"]
    assert isinstance(found, config.RlCandidate)
    assert (found.kl, found.length_constant) == (None, "max_response_tokens")
    assert config.parse(pipeline.model_dump(by_alias=True)) == pipeline
    raw["candidates"]["r1-x"]["algorithm"] = "dr_gpro"
    with pytest.raises(config.ConfigError) as caught:
        config.parse(raw)
    words = "candidates.r1-x.algorithm=dr_gpro: no preset of that name; did you mean dr_grpo?"
    assert words in caught.value.problems


# --- that they learn ---


def near_uniform(seed: int = 0) -> Any:
    return tiny.llama(seed, initializer_range=0.1)


PASSES = {"epochs_per_step": 2, "minibatches": 2, "micro_batch_size": 16}
GENTLE = {"kl": {"coef": 0.01}}
LEARNING: dict[str, dict[str, Any]] = {
    "ppo": PASSES | GENTLE,
    "a2c": GENTLE,
    "reinforce": GENTLE,
    "rloo": GENTLE,
    "grpo": PASSES,
    "dr_grpo": PASSES,
    "dapo": PASSES | {"resample_batches": 1},
    "gspo": PASSES,
    "cispo": PASSES,
    "sapo": PASSES,
    "reinforce_plus_plus": PASSES | GENTLE,
    "rejection_sampling": {"micro_batch_size": 64},
    "best_of_n": {"epochs_per_step": 15, "micro_batch_size": 64},
    "online_dpo": {"micro_batch_size": 8},
}


def path(name: str, **changes: Any) -> Iterator[dict[str, float]]:
    """The metrics of a small run, step by step."""
    candidate = read(name, **({"micro_batch_size": 64} | changes))
    start = near_uniform()
    given: dict[str, Any] = {
        "policy": near_uniform(), "start": start, "score": tiny.share_of_w7,
        "codec": tiny.codec(), "prompts": tiny.PROMPTS, "seed": 0, "clock": Clock("test"),
        "reference": None if candidate.reference == "none" else start,
    }  # fmt: skip
    model = tiny.model_settings(max_response_tokens=6)
    trainer: RlTrainer | OnlinePreferenceTrainer
    if isinstance(candidate, config.RlCandidate):
        critic = ScalarModel(near_uniform(7).base_model) if candidate.value else None
        trainer = RlTrainer(candidate, model, critic=critic, **given)
    else:
        assert isinstance(candidate, config.OnlinePreferenceCandidate)
        trainer = OnlinePreferenceTrainer(candidate, model, **given)
    for *_, metrics in trainer.run():
        yield metrics
    if candidate.steps == 1:
        collected = trainer.collect()
        yield collected.metrics if not isinstance(collected, tuple) else collected[2]


@pytest.mark.parametrize("name", LEARNING)
def test_the_rewarded_word_becomes_frequent(name: str) -> None:
    shares = [metrics["policy/proxy"] for metrics in path(name, **LEARNING[name])]
    assert shares[0] < 0.15
    if name == "best_of_n":  # one set of samples, of which the best of eight has about a third
        assert shares[-1] > 0.3
    else:
        assert sum(shares[-2:]) / 2 > 0.5


def learn_pairs(name: str, pairs: list[PairIds]) -> list[dict[str, float]]:
    candidate = read(name, epochs=8, learning_rate=3e-3)
    assert isinstance(candidate, config.PreferenceCandidate)
    start = tiny.llama()
    trainer = PreferenceTrainer(
        candidate, tiny.model_settings(), policy=tiny.llama(), start=start,
        reference=None if candidate.reference == "none" else start,
        pairs=pairs, pad_id=tiny.PAD, seed=0, clock=Clock("test"),
    )  # fmt: skip
    return [metrics for *_, metrics in trainer.run()]


@pytest.mark.parametrize("name", [n for n, p in PRESETS.items() if p["kind"] == "preference"])
@pytest.mark.parametrize("swapped", [False, True])
def test_pairs_are_learned_whichever_way_they_are_labelled(name: str, swapped: bool) -> None:
    pairs = tiny.consistent_pairs()
    if swapped:
        pairs = [PairIds(p.prompt, p.rejected, p.chosen) for p in pairs]
    metrics = learn_pairs(name, pairs)
    first, last = metrics[:2], metrics[-2:]  # both batches of an epoch

    def mean(of: list[dict[str, float]], key: str) -> float:
        return sum(m[f"policy/{key}"] for m in of) / len(of)

    # KTO's is of single answers, against its reference point.
    assert mean(last, "accuracy") >= (0.8 if name == "kto" else 0.9)
    assert mean(last, "accuracy") >= mean(first, "accuracy")
    assert mean(last, "margin") > mean(first, "margin") + LEAST_GAIN[name]
    assert mean(last, "loss") < 0.8 * mean(first, "loss")


# The margin's unit is each loss's own; IPO wants no more than 1/2.
LEAST_GAIN = {"dpo": 0.5, "ipo": 0.2, "simpo": 0.5, "orpo": 0.5, "kto": 0.2}


def test_every_preset_is_tried() -> None:
    by_pairs = {n for n, p in PRESETS.items() if p["kind"] == "preference"}
    assert by_pairs == set(LEAST_GAIN)
    assert set(PRESETS) == by_pairs | set(LEARNING)


def test_a_seed_fixes_a_presets_path() -> None:
    one, again = ([m["policy/proxy"] for m in path("dapo", steps=3)] for _ in range(2))
    assert one == again
    assert torch.tensor(one).isfinite().all()
