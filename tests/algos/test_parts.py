"""Named parts: found, checked and called by their signatures."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest

from rlhf.algos import parts
from rlhf.algos.advantages import ADVANTAGES
from rlhf.algos.policy_losses import POLICY_LOSSES
from rlhf.algos.preference_losses import PREFERENCE_LOSSES
from rlhf.algos.reward_model_losses import REWARD_MODEL_LOSSES

OWN = """
NUMBER = 3


def plain(logprobs, *, slope, reduction, denominator):
    return slope


def squared(chosen_logps, *, denominator):
    return chosen_logps
"""


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
    assert parts.resolve(registry, "users_parts.plain", "loss") is example
    assert parts.resolve(registry, "users_parts.squared", "loss") is own.squared
    assert parts.resolve(ADVANTAGES, "gae", "advantage") is ADVANTAGES["gae"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gea", r"unknown part 'gea'; use one of one, two, or an import path like my_package\."),
        ("users_parts.nothing", r"'users_parts.nothing' cannot be imported: .*no attribute"),
        ("no_such_module.loss", r"'no_such_module.loss' cannot be imported: No module named"),
        ("users_parts.NUMBER", "'users_parts.NUMBER' is a int, not a function"),
        ("collections.OrderedDict", "'collections.OrderedDict' is a type, not a function"),
    ],
)
def test_what_is_no_part_is_named(own: Any, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^some.key: {words}"):
        parts.resolve({"one": example, "two": example}, name, "some.key")


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


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ({"reduction"}, "x: takes no keyword 'reduction'; every part of its kind does$"),
        (
            {"reduction", "denominator"},
            "x: takes no keyword 'reduction'; every part of its kind does$",
        ),
    ],
)
def test_what_its_caller_sets_it_must_take(shared: set[str], words: str) -> None:
    """Without its denominator, another split into micro-batches would give another gradient."""
    inputs = {"first", "second"}
    parts.check(example, "x", inputs, {"a": 1}, {"denominator"})
    parts.check(example, "x", inputs, {"a": 1})  # nothing is shared unless the caller says so
    with pytest.raises(ValueError, match=words):
        parts.check(example, "x", inputs, {"a": 1}, shared)


def test_all_that_is_missing_is_told_at_once() -> None:
    def bare(third: Any, *, a: float) -> Any:
        return third, a

    with pytest.raises(ValueError, match=r"^x: ") as caught:
        parts.check(bare, "x", {"first"}, {"b": 1}, {"reduction", "denominator"})
    assert str(caught.value) == (
        "x: reads 'third', which is not available here; there are first; "
        "takes no keyword 'denominator'; every part of its kind does; "
        "takes no keyword 'reduction'; every part of its kind does; "
        "option 'b' is not one of its own (a); remove it; "
        "option 'a' has no default; set it"
    )


def test_a_part_without_options_says_so() -> None:
    with pytest.raises(ValueError, match=r"option 'b' is not one of its own \(none\); remove it"):
        parts.check(lambda first: first, "x", {"first"}, {"b": 1})


def test_a_denominator_that_is_an_input_is_no_keyword() -> None:
    """By its position it would be asked of the inputs, where it is not."""

    def positional(first: Any, denominator: float) -> Any:
        return first / denominator

    with pytest.raises(ValueError, match="reads 'denominator', which is not available here"):
        parts.check(positional, "x", {"first"}, {}, {"denominator"})


def test_positional_only_parameters_are_inputs() -> None:
    def slashed(first: Any, /, second: Any, *, a: float = 1.0) -> Any:
        return first, second, a

    assert parts.inputs(slashed) == ("first", "second")
    assert parts.options(slashed) == {"a": 1.0}
    parts.check(slashed, "x", {"first", "second"}, {})
    with pytest.raises(ValueError, match="reads 'first', which is not available here"):
        parts.check(slashed, "x", {"second"}, {})
    assert parts.call(slashed, {"second": 2, "first": 1}, a=3) == (1, 2, 3)


def test_an_input_may_have_the_name_of_a_parameter_of_call() -> None:
    assert parts.call(lambda part, available: (part, available), {"available": 2, "part": 1}) == (
        1,
        2,
    )


@pytest.mark.parametrize("available", [{"first": 1}, {"first": 1, "second": None}])
def test_an_input_that_is_missing_is_named(available: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="example reads second, which is missing"):
        parts.call(example, available, a=3)


def test_a_part_without_a_name_is_shown() -> None:
    nameless = functools.partial(example, a=1)
    with pytest.raises(ValueError, match=r"^functools\.partial\(<function example .* reads second"):
        parts.call(nameless, {"first": 1})


@pytest.mark.parametrize(
    ("registry", "shared"),
    [
        (ADVANTAGES, set()),
        (POLICY_LOSSES, {"reduction", "denominator"}),
        (PREFERENCE_LOSSES, {"denominator"}),
        (REWARD_MODEL_LOSSES, {"denominator"}),
    ],
)
def test_every_built_in_part_shows_what_it_reads(
    registry: dict[str, Any], shared: set[str]
) -> None:
    for name, part in registry.items():
        options = {o: 1 for o in parts.options(part)}
        parts.check(part, name, set(parts.inputs(part)), options, shared)


def test_values_are_not_there_without_a_critic() -> None:
    with pytest.raises(ValueError, match="reads 'values', which is not available here"):
        parts.check(ADVANTAGES["gae"], "advantage=gae", frozenset({"rewards", "response_mask"}), {})
