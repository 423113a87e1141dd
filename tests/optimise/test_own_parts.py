"""Parts of one's own, named by import path: trained with, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from rlhf.optimise.preference import PreferenceTrainer
from rlhf.optimise.rl import RlTrainer
from rlhf.progress import Clock

OWN = '''
import torch

from rlhf.algos.masking import reduce
from rlhf.algos.types import Advantages, LossOutput

CALLS = []


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


def undivided(logprobs, advantages, response_mask, *, reduction):
    """Takes no denominator."""


def bare(chosen_logps, rejected_logps):
    """Takes nothing."""


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
            {"loss": {"kind": "users_parts.undivided"}},
            "loss=users_parts.undivided: takes no keyword 'denominator'; every part of its kind",
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


def test_a_preference_loss_that_does_not_fit_is_refused(own: Any) -> None:
    words = "losses: users_parts.bare: takes no keyword 'denominator'; every part of its kind does"
    with pytest.raises(ValueError, match=words):
        preference_trainer({"kind": "users_parts.bare"})


def preference_trainer(*losses: dict[str, Any], reference: str = "none") -> PreferenceTrainer:
    start = tiny.llama()
    return PreferenceTrainer(
        tiny.preference_candidate(
            losses=list(losses),
            reference=reference,
            epochs=16,
            batch_size=16,
            learning_rate=3e-3,
        ),
        tiny.model_settings(),
        policy=tiny.llama(),
        start=start,
        reference=None if reference == "none" else start,
        pairs=tiny.consistent_pairs(),
        pad_id=tiny.PAD,
        seed=0,
        clock=Clock("test"),
    )


def test_a_preference_loss_of_ones_own_learns(own: Any) -> None:
    term = {"kind": "users_parts.squared", "options": {"goal": 6.0}, "weight": 0.5}
    trainer, start = preference_trainer(term), tiny.llama()
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


def test_a_reference_that_no_loss_reads_is_refused(own: Any) -> None:
    term = {"kind": "users_parts.squared", "options": {"goal": 6.0}}
    with pytest.raises(ValueError, match="reference=previous: no loss reads it; set it to none"):
        preference_trainer(term, reference="previous")
