"""Named parts: found, checked and called by their signatures; and parts of one's own, trained with."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import tiny

from rlhf.algos import parts
from rlhf.algos.advantages import ADVANTAGES
from rlhf.algos.policy_losses import POLICY_LOSSES
from rlhf.algos.preference_losses import PREFERENCE_LOSSES
from rlhf.optimise.preference import PreferenceTrainer
from rlhf.optimise.rl import RlTrainer
from rlhf.progress import Clock

OWN = '''
import torch

from rlhf.algos.masking import masked_sum, reduce
from rlhf.algos.types import Advantages, LossOutput

CALLS = []
NUMBER = 3


def centred(scores, response_mask, *, scale=1.0):
    """Scores less their mean, on every token."""
    CALLS.append(("centred", scale))
    level = (scale * (scores - scores.mean()))[:, None]
    return Advantages(torch.where(response_mask, level, 0), None, {"centre": scores.mean()})


def plain(logprobs, advantages, response_mask, *, slope, reduction, denominator):
    """Minus advantage times log-prob."""
    CALLS.append(("plain", slope))
    loss = reduce(-slope * advantages * logprobs, response_mask, reduction, denominator=denominator)
    return LossOutput(loss, {})


def squared(chosen_logps, rejected_logps, *, goal, denominator):
    """Squared distance of the difference of log-probs from a goal."""
    CALLS.append(("squared", goal))
    gap = chosen_logps - rejected_logps
    return LossOutput((gap - goal).square().sum() / denominator, {"gap": gap.detach().mean()})


def greedy(secret, *, reduction=None, denominator=None):
    """Asks for what nobody has."""
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's module outside the project."""
    import importlib
    import sys

    (tmp_path / "users_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("users_parts")
    del sys.modules["users_parts"]


def example(first: Any, second: Any, *, a: float, b: float = 2.0, denominator: float = 1.0) -> Any:
    return first, second, a, b, denominator


# --- resolve ---


def test_a_name_of_the_registry_comes_first_then_a_path(own: Any) -> None:
    registry = {"users_parts.plain": example}
    assert parts.resolve(registry, "users_parts.plain") is example
    assert parts.resolve(registry, "users_parts.squared") is own.squared
    assert parts.resolve(ADVANTAGES, "gae") is ADVANTAGES["gae"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gea", r"unknown part 'gea'; use one of one, two, or an import path like my_package\."),
        ("users_parts.nothing", r"'users_parts.nothing' cannot be imported: .*no attribute"),
        ("no_such_module.loss", r"'no_such_module.loss' cannot be imported: No module named"),
        ("users_parts.NUMBER", "'users_parts.NUMBER' is a int, not a function"),
    ],
)
def test_what_is_no_part_is_named(own: Any, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parts.resolve({"one": example, "two": example}, name)


# --- signatures ---


def test_inputs_are_the_positional_parameters_and_options_the_others() -> None:
    assert parts.inputs(example) == ("first", "second")
    assert parts.options(example) == {"a": inspect.Parameter.empty, "b": 2.0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "x: option 'a' has no default; set it"),
        ({"a": 1, "c": 2}, r"x: option 'c' is not one of its own \(a, b\); remove it"),
        ({"a": 1, "denominator": 2}, r"x: option 'denominator' is not one of its own \(a, b\)"),
        ({"c": 2}, r"x: option 'c' .*; option 'a' has no default"),
    ],
)
def test_options_are_checked(given: dict[str, Any], words: str) -> None:
    parts.check(example, "x", frozenset({"first", "second"}), {"a": 1})
    with pytest.raises(ValueError, match=words):
        parts.check(example, "x", frozenset({"first", "second"}), given)


def test_inputs_are_checked() -> None:
    words = "x: reads 'second', which is not available here; there are first, third$"
    with pytest.raises(ValueError, match=words):
        parts.check(example, "x", frozenset({"third", "first"}), {"a": 1})


@pytest.mark.parametrize("part", [lambda *tensors: 0, lambda first, **options: 0])
def test_a_signature_that_hides_what_it_reads_is_refused(part: Any) -> None:
    with pytest.raises(ValueError, match=r"x: \*(tensors|options) hides what it reads"):
        parts.check(part, "x", frozenset({"first"}), {})


# --- call ---


def test_a_part_gets_what_it_names_by_name() -> None:
    available = {"second": 2, "other": 9, "first": 1}
    assert parts.call(example, available, a=3) == (1, 2, 3, 2.0, 1.0)
    assert parts.call(example, available, a=3, b=4, denominator=5) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("keyword", ["reduction", "c"])
def test_a_keyword_that_it_does_not_take_is_never_dropped(keyword: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        parts.call(example, {"first": 1, "second": 2}, a=3, **{keyword: 4})


def test_what_its_caller_sets_it_must_take() -> None:
    """Without its denominator, another split into micro-batches would give another gradient."""
    inputs = frozenset({"first", "second"})
    parts.check(example, "x", inputs, {"a": 1}, frozenset({"denominator"}))
    words = "x: takes no keyword 'reduction'; every part of its kind does"
    with pytest.raises(ValueError, match=words):
        parts.check(example, "x", inputs, {"a": 1}, frozenset({"reduction", "denominator"}))


@pytest.mark.parametrize("available", [{"first": 1}, {"first": 1, "second": None}])
def test_an_input_that_is_missing_is_named(available: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="example reads second, which is missing"):
        parts.call(example, available, a=3)


@pytest.mark.parametrize("registry", [ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES])
def test_every_built_in_part_shows_what_it_reads(registry: dict[str, Any]) -> None:
    for name, part in registry.items():
        options = {o: 1 for o in parts.options(part)}
        parts.check(part, name, frozenset(parts.inputs(part)), options)


# --- parts of one's own ---


def rl_trainer(**changes: Any) -> RlTrainer:
    sizes = {"steps": 8, "prompts_per_step": 8, "samples_per_prompt": 8, "micro_batch_size": 64}
    start = tiny.llama(initializer_range=0.1)
    return RlTrainer(
        tiny.rl_candidate(**(sizes | changes)),
        tiny.model_settings(max_response_tokens=6),
        policy=tiny.llama(initializer_range=0.1),
        start=start,
        reference=None,
        critic=None,
        score=tiny.share_of_w7,
        codec=tiny.codec(),
        prompts=tiny.PROMPTS,
        seed=0,
        clock=Clock("test"),
    )


def test_an_advantage_and_a_loss_of_ones_own_learn(own: Any) -> None:
    trainer = rl_trainer(
        advantage={"kind": "users_parts.centred", "options": {"scale": 3.0}},
        loss={"kind": "users_parts.plain", "options": {"slope": 2.0}},
        reduction="token_mean",
    )
    metrics = [m for *_, m in trainer.run()]
    assert set(own.CALLS) == {("centred", 3.0), ("plain", 2.0)}
    assert metrics[0]["policy/centre"] == pytest.approx(metrics[0]["policy/proxy"])
    assert metrics[0]["policy/proxy"] < 0.15
    assert metrics[-1]["policy/proxy"] > 0.5


def test_the_loss_of_ones_own_is_the_one_that_is_minimised(own: Any) -> None:
    """With the built-in score function's value, on the same samples."""
    mine = rl_trainer(
        loss={"kind": "users_parts.plain", "options": {"slope": 2.0}}, reduction="token_mean"
    )
    builtin = rl_trainer(loss="reinforce", reduction="token_mean")
    first, second = next(mine.run())[2], next(builtin.run())[2]
    assert first["policy/loss"] == pytest.approx(2 * second["policy/loss"], rel=1e-5)
    assert abs(second["policy/loss"]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"loss": {"kind": "users_parts.greedy", "options": {}}},
            "loss=users_parts.greedy: reads 'secret', which is not available here; there are",
        ),
        (
            {"loss": {"kind": "users_parts.plain", "options": {}}},
            "loss=users_parts.plain: option 'slope' has no default; set it",
        ),
        (
            {"advantage": {"kind": "users_parts.centred", "options": {"scal": 1.0}}},
            r"advantage=users_parts.centred: option 'scal' is not one of its own \(scale\)",
        ),
        (
            {"advantage": {"kind": "users_parts.gone"}},
            "'users_parts.gone' cannot be imported",
        ),
    ],
)
def test_a_part_that_does_not_fit_is_refused_before_anything_is_sampled(
    own: Any, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        rl_trainer(**changes)


def test_values_are_not_there_without_a_critic() -> None:
    with pytest.raises(ValueError, match="reads 'values', which is not available here"):
        parts.check(ADVANTAGES["gae"], "advantage=gae", frozenset({"rewards", "response_mask"}), {})


def test_a_preference_loss_of_ones_own_learns(own: Any) -> None:
    losses = [{"kind": "users_parts.squared", "options": {"goal": 6.0}, "weight": 0.5}]
    start = tiny.llama()
    trainer = PreferenceTrainer(
        tiny.preference_candidate(losses=losses, epochs=16, batch_size=16, learning_rate=3e-3),
        tiny.model_settings(),
        policy=tiny.llama(),
        start=start,
        reference=start,
        pairs=tiny.consistent_pairs(),
        pad_id=tiny.PAD,
        seed=0,
        clock=Clock("test"),
    )
    gaps = [
        sum(
            float(tiny.token_logps(start, p.prompt, answer).sum()) * sign
            for answer, sign in ((p.chosen, 1), (p.rejected, -1))
        )
        for p in tiny.consistent_pairs()
    ]
    metrics = [m for *_, m in trainer.run()]
    assert set(own.CALLS) == {("squared", 6.0)}
    expected = 0.5 * sum((gap - 6.0) ** 2 for gap in gaps) / 16
    assert metrics[0]["policy/loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics[0]["policy/gap"] == pytest.approx(sum(gaps) / 16, abs=1e-3)
    assert metrics[-1]["policy/gap"] == pytest.approx(6.0, abs=1.5)
    assert metrics[-1]["policy/loss"] < 0.2 * metrics[0]["policy/loss"]
