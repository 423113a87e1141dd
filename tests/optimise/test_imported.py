"""Parts by import path are checked before anything runs: all problems at once, with round and key."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf import config
from rlhf.algos.reward_model_losses import REWARD_MODEL_LOSSES
from rlhf.optimise.imported import check_imported, reward_model_part

RAW = config.read_yaml(Path(__file__).parents[2] / "pipeline.yaml")
MODULE = '''
def of_scores(chosen_scores, rejected_scores, tied, log_tie, *, slope=1.0, denominator):
    """A reward model's loss."""


def of_margins(chosen_scores, margins, *, denominator):
    """Reads what the stage does not have."""


def bare(chosen_scores, rejected_scores):
    """Takes no denominator."""


def advantage(values, response_mask):
    """Reads a critic's values."""


def policy(logprobs, advantages, response_mask, *, reduction, denominator):
    """A policy's loss."""


def pairs(ref_chosen_logps, *, denominator):
    """A preference loss with a reference."""


def clearer(margins, *, denominator):
    """A preference loss of scored pairs."""
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's module outside the project, not imported yet."""
    (tmp_path / "my_checked.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_checked"
    sys.modules.pop("my_checked", None)


def pipeline(**loss: Any) -> dict[str, Any]:
    """The repository's pipeline, with this loss of the reward model."""
    raw = copy.deepcopy(RAW)
    if loss:
        raw["rounds"]["r1"]["reward_model"]["loss"] = loss
    return raw


def problems(raw: dict[str, Any]) -> list[str]:
    """What the check says of a file that reads; [] if nothing."""
    parsed = config.parse(raw)
    try:
        check_imported(parsed, "mine.yaml")
    except config.ConfigError as error:
        found = error
    else:
        return []
    assert str(found).startswith(f"mine.yaml: {len(found.problems)} problem")
    assert found.exit_code == 2
    return found.problems


# --- the reward model's loss ---


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            {"kind": "my_checked.gone"},
            ": 'my_checked.gone' cannot be imported: module 'my_checked' has no attribute 'gone'",
        ),
        (
            {"kind": "no_such_module.loss"},
            ": 'no_such_module.loss' cannot be imported: No module named 'no_such_module'",
        ),
        (
            {"kind": "my_checked.bare"},
            "=my_checked.bare: takes no keyword 'denominator'; every part of its kind does",
        ),
        (
            {"kind": "my_checked.of_margins"},
            "=my_checked.of_margins: reads 'margins', which is not available "
            "here; there are chosen_scores, log_tie, rejected_scores, tied",
        ),
        (
            {"kind": "my_checked.of_scores", "options": {"slop": 2.0}},
            "=my_checked.of_scores: option 'slop' is not one of its own (slope); remove it",
        ),
    ],
)
def test_a_reward_models_loss_is_refused_with_round_and_key(
    mine: str, loss: dict[str, Any], words: str
) -> None:
    assert problems(pipeline(**loss)) == [f"rounds.r1.reward_model.loss{words}"]


def test_a_reward_models_loss_that_fits(mine: str) -> None:
    raw = pipeline(kind="my_checked.of_scores", options={"slope": 2.0})
    assert problems(raw) == []
    part = reward_model_part(config.parse(raw).rounds["r1"].reward_model)
    assert part is sys.modules["my_checked"].of_scores


@pytest.mark.parametrize("kind", REWARD_MODEL_LOSSES)
def test_the_built_in_ones_fit_but_for_margins(kind: str) -> None:
    raw = pipeline(kind="bradley_terry")
    settings = config.parse(raw).rounds["r1"].reward_model
    part = config.Part(kind=kind)
    given = settings.model_copy(update={"loss": part})
    if kind == "bradley_terry_margin":
        with pytest.raises(ValueError, match="reads 'margins'"):
            reward_model_part(given)
    else:
        assert reward_model_part(given) is REWARD_MODEL_LOSSES[kind]


# --- candidates ---


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "r1-ppo",
            {"loss": {"kind": "my_checked.gone"}},
            "loss: 'my_checked.gone' cannot be imported: module 'my_checked' has no attribute",
        ),
        (
            "r1-grpo",
            {"loss": {"kind": "no_such_module.loss"}},
            "loss: 'no_such_module.loss' cannot be imported: No module named 'no_such_module'",
        ),
        (
            "r1-grpo",
            {"advantage": {"kind": "my_checked.advantage"}},
            "advantage=my_checked.advantage: reads 'values', which is not available here",
        ),
        (
            "r1-grpo",
            {"advantage": {"kind": "my_checked.nowhere"}},
            "advantage: 'my_checked.nowhere' cannot be imported",
        ),
        (
            "r1-grpo",
            {"loss": {"kind": "my_checked.pairs"}},
            "loss=my_checked.pairs: reads 'ref_chosen_logps', which is not available here; there "
            "are advantages, logprobs, old_logprobs, response_mask; takes no keyword 'reduction'",
        ),
        (
            "r1-dpo",
            {"losses": ["sigmoid", {"kind": "my_checked.gone"}]},
            "losses: 'my_checked.gone' cannot be imported",
        ),
        (
            "r1-dpo",
            {"losses": [{"kind": "my_checked.bare"}]},
            "losses: my_checked.bare: reads 'chosen_scores', which is not available here",
        ),
        (
            "r1-dpo",
            {"losses": ["sigmoid", {"kind": "my_checked.clearer"}]},
            "losses: my_checked.clearer: reads 'margins', which is not available here",
        ),
        (
            "r1-dpo",
            {"losses": ["simpo", {"kind": "my_checked.pairs"}], "reference": "none"},
            "losses: my_checked.pairs: reads 'ref_chosen_logps', which is not available here",
        ),
    ],
)
def test_a_candidate_is_refused_with_its_name_and_key(
    mine: str, name: str, changes: dict[str, Any], words: str
) -> None:
    raw = pipeline()
    raw["candidates"][name] |= {"algorithm": "mine", **changes}
    (line,) = problems(raw)
    assert line.startswith(f"candidates.{name}.{words}")


def test_candidates_that_fit(mine: str) -> None:
    raw = pipeline()
    raw["candidates"]["r1-ppo"] |= {
        "algorithm": "mine",
        "advantage": {"kind": "my_checked.advantage"},
        "loss": {"kind": "my_checked.policy"},
    }
    raw["candidates"]["r1-dpo"] |= {"algorithm": "mine", "losses": [{"kind": "my_checked.pairs"}]}
    assert problems(raw) == []


def test_scores_are_there_where_the_policy_labels_its_own_pairs(mine: str) -> None:
    raw = pipeline()
    grpo = raw["candidates"]["r1-grpo"]
    of_rl = ("kind", "advantage", "loss", "reduction", "length_constant", "kl", "truncated")
    raw["candidates"]["r1-own"] = {
        **{key: value for key, value in grpo.items() if key not in of_rl},
        "algorithm": "online_dpo",
        "losses": ["sigmoid", {"kind": "my_checked.clearer"}],
        "micro_batch_size": 4,
    }
    assert problems(raw) == []


# --- all of them, and none ---


def test_the_file_is_called_by_its_name(mine: str) -> None:
    with pytest.raises(config.ConfigError, match=r"^pipeline\.yaml: 1 problem"):
        check_imported(config.parse(pipeline(kind="my_checked.bare")))


def test_every_problem_is_told_at_once(mine: str) -> None:
    raw = pipeline(kind="my_checked.bare")
    raw["candidates"]["r1-grpo"] |= {"algorithm": "mine", "loss": {"kind": "my_checked.gone"}}
    first, second = problems(raw)
    assert first.startswith("candidates.r1-grpo.loss: 'my_checked.gone' cannot be imported")
    assert second.startswith("rounds.r1.reward_model.loss=my_checked.bare: takes no keyword")


def test_nothing_is_imported_where_all_parts_are_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf.optimise import imported as module

    def fail(*_: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(module, "_problems", fail)
    monkeypatch.setattr(module, "_reward_model_problems", fail)
    assert problems(pipeline()) == []
