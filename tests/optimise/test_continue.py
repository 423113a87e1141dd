"""A trainer that is saved after any step and loaded into a fresh one goes on as if nothing had been."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch

from rlhf.models.scalar import ScalarModel
from rlhf.optimise.anchor import following
from rlhf.optimise.preference import OnlinePreferenceTrainer, PreferenceTrainer
from rlhf.optimise.rl import RlTrainer
from rlhf.progress import Clock

MODEL = tiny.model_settings(max_response_tokens=5)
Trainer = Any

EMA = {"reference": "ema", "reference_decay": 0.75, "ema_decay": 0.5}
RL: dict[str, dict[str, Any]] = {
    "plain": {"steps": 4, "learning_rate": 0.02, "warmup_steps": 2, "final_lr_fraction": 0.1},
    "critic": {
        "steps": 2, "advantage": {"kind": "gae", "gamma": 1.0, "gae_lambda": 0.9}, "minibatches": 2,
        "epochs_per_step": 2, "micro_batch_size": 4, "reduction": "token_mean", "length_constant": None,
        "value": tiny.value_settings(warmup_steps=1, clip=0.2), "schedule": "cosine", "final_lr_fraction": 0.0,
    },
    "adaptive": {
        **EMA, "steps": 4, "learning_rate": 0.03, "stop_epochs_nats": 0.05, "epochs_per_step": 3,
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.1, "target": {"nats": 1.0, "horizon": 20}},
    },
    "drawn anew": {
        "steps": 4, "samples_per_prompt": 2, "temperature": 0.5, "resample_batches": 3, "micro_batch_size": 8,
    },
    "baseline": {"steps": 4, "advantage": {"kind": "ema_baseline", "decay": 0.8}},
    "budget": {"steps": 5, "learning_rate": 0.01, "kl_budget_nats": 3.0},
}  # fmt: skip
PAIRS: dict[str, dict[str, Any]] = {
    "fixed": {"epochs": 3, "batch_size": 6, "micro_batch_size": 3, "warmup_steps": 3, "schedule": "cosine"},
    "following": {
        **EMA, "epochs": 2, "learning_rate": 0.02,
        "losses": [{"kind": "sigmoid", "beta": 0.1}, {"kind": "bco_pair", "beta": 0.1, "weight": 0.5}],
    },
}  # fmt: skip
ONLINE: dict[str, dict[str, Any]] = {
    "fixed": {"steps": 3, "minibatches": 2, "micro_batch_size": 3},
    "following": {**EMA, "steps": 4, "losses": [{"kind": "bco_pair", "beta": 0.1}]},
    "budget": {"steps": 5, "learning_rate": 0.01, "kl_budget_nats": 3.0},
}


def parts(candidate: Any) -> dict[str, Any]:
    """Fresh, the same each time."""
    start = tiny.llama()
    reference = {"none": None, "previous": start, "ema": following(start)}[candidate.reference]
    return {
        "policy": tiny.llama(), "start": start, "reference": reference, "seed": 3, "clock": Clock("x")
    }  # fmt: skip


def sampling() -> dict[str, Any]:
    return {"score": tiny.share_of_w7, "codec": tiny.codec(), "prompts": tiny.PROMPTS}


def rl(changes: dict[str, Any]) -> Trainer:
    candidate = tiny.rl_candidate(**changes)
    critic = None
    if candidate.value is not None:
        critic = ScalarModel(tiny.llama(7).base_model).eval()
        torch.manual_seed(7)
        torch.nn.init.normal_(critic.head.weight, std=0.3)
    return RlTrainer(candidate, MODEL, critic=critic, **sampling(), **parts(candidate))


def pairs(changes: dict[str, Any]) -> Trainer:
    candidate = tiny.preference_candidate(**changes)
    return PreferenceTrainer(
        candidate, MODEL, pairs=tiny.consistent_pairs(14), pad_id=tiny.PAD, **parts(candidate)
    )


def online(changes: dict[str, Any]) -> Trainer:
    candidate = tiny.online_candidate(**changes)
    return OnlinePreferenceTrainer(candidate, MODEL, **sampling(), **parts(candidate))


CASES = [
    pytest.param(build, changes, id=f"{build.__name__}: {name}")
    for build, cases in ((rl, RL), (pairs, PAIRS), (online, ONLINE))
    for name, changes in cases.items()
]


def stored(trainer: Trainer) -> dict[str, Any]:
    """Its state, as from a file."""
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def models(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every weight that training moves."""
    found = {"policy": trainer.policy, "reference": trainer.reference}
    found["critic"] = getattr(trainer, "critic", None)
    weights = {
        f"{name}.{key}": value
        for name, model in found.items()
        if model is not None
        for key, value in tiny.weights_of(model).items()
    }
    with trainer.learner.averaged():
        return weights | {f"averaged.{k}": v for k, v in tiny.weights_of(trainer.policy).items()}


def run(
    trainer: Trainer, after: Callable[[Trainer], None] = lambda _: None
) -> list[dict[str, float]]:
    """The metrics of each step; `after` is called after each, the critic's own included."""
    for _ in getattr(trainer, "warm_up", list)():
        after(trainer)
    found = []
    for _, _, metrics in trainer.run():
        found.append(dict(metrics))
        after(trainer)
    return found


def test_the_cases_reach_what_they_are_for() -> None:
    metrics = run(rl(RL["drawn anew"]))
    assert len({found["policy/rollout_batches"] for found in metrics}) > 1
    for build, changes in ((rl, RL["budget"]), (online, ONLINE["budget"])):
        trainer = build(changes)
        assert 2 <= len(run(trainer)) < 5
        assert trainer.budget.stopped_at is not None
    trainer = rl(RL["adaptive"])
    run(trainer)
    assert trainer.kl_coef != 0.1
    trainer = rl(RL["baseline"])
    run(trainer)
    assert trainer.advantage_state.numel() > 0
    for build, changes in ((pairs, PAIRS["following"]), (online, ONLINE["following"])):
        trainer = build(changes)
        run(trainer)
        assert trainer.objective.shift_count > 0


@pytest.mark.parametrize(("build", "changes"), CASES)
def test_saved_after_any_step_it_goes_on_to_the_bit(
    build: Callable[[dict[str, Any]], Trainer], changes: dict[str, Any]
) -> None:
    states: list[dict[str, Any]] = []
    straight = build(changes)
    expected = run(straight, lambda trainer: states.append(stored(trainer)))
    weights = models(straight)
    warm_up = len(states) - len(expected)
    for number, state in enumerate(states):
        trainer = build(changes)
        torch.manual_seed(99)  # no global generator takes part
        trainer.load_state_dict(state)
        assert trainer.position == number + 1
        assert run(trainer) == expected[max(0, number + 1 - warm_up) :]
        found = models(trainer)
        assert [key for key in weights if not torch.equal(weights[key], found[key])] == []
        assert getattr(trainer, "budget", None) is None or (
            trainer.budget.stopped_at == straight.budget.stopped_at
        )


def test_saving_changes_nothing() -> None:
    one, other = rl(RL["plain"]), rl(RL["plain"])
    assert run(one) == run(other, lambda trainer: stored(trainer) and None)


@pytest.mark.parametrize(
    ("build", "changes", "other", "what"),
    [
        (rl, RL["plain"], RL["critic"], "critic"),
        (rl, RL["plain"], RL["plain"] | {"ema_decay": 0.5}, "averages the weights"),
        (pairs, PAIRS["fixed"], PAIRS["following"], "reference that moves"),
        (online, ONLINE["following"], ONLINE["fixed"], "reference that moves"),
    ],
)
def test_the_state_of_other_settings_is_refused(
    build: Callable[[dict[str, Any]], Trainer],
    changes: dict[str, Any],
    other: dict[str, Any],
    what: str,
) -> None:
    with pytest.raises(ValueError, match=what):
        build(changes).load_state_dict(stored(build(other)))


def test_the_mode_of_the_policy_comes_back() -> None:
    """Layers that are computed again in the backward pass are so in training mode only."""
    trainer = rl(RL["plain"])
    next(trainer.run())
    assert trainer.policy.training
    fresh = rl(RL["plain"])
    assert not fresh.policy.training
    fresh.load_state_dict(stored(trainer))
    assert fresh.policy.training
