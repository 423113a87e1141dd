"""Candidates of every kind, killed and continued, end with the policies of an undisturbed run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from attempts import Project, Strike, survives_kills

from rlhf import artifacts
from rlhf.resume import content_digest

Edit = Callable[[dict[str, Any]], None]


def ppo(candidate: dict[str, Any]) -> None:
    """As it is: a critic of its own schedule, two steps of warm-up."""


def adaptive(candidate: dict[str, Any]) -> None:
    """What keeps a state: the KL coefficient, averaged weights, a moving reference, groups drawn anew."""
    candidate |= {
        "kl": {"where": "loss", "estimator": "k3", "coef": 0.2, "target": {"nats": 0.5, "horizon": 100}},
        "reference": "ema", "reference_decay": 0.9, "ema_decay": 0.8, "resample_batches": 2, "schedule": "cosine",
        "warmup_steps": 3, "final_lr_fraction": 0.1, "steps": 5,
        "samples_per_prompt": 2, "prompts_per_step": 8, "temperature": 0.1,  # many groups have no spread
    }  # fmt: skip


def pairs(candidate: dict[str, Any]) -> None:
    candidate |= {
        "losses": [{"kind": "sigmoid", "beta": 0.1}, {"kind": "bco_pair", "beta": 0.1, "weight": 0.5}],
        "reference": "ema", "reference_decay": 0.9, "ema_decay": 0.8, "epochs": 2, "batch_size": 8,
        "micro_batch_size": 8,
    }  # fmt: skip


def budget(candidate: dict[str, Any]) -> None:
    """Over it at the fifth step or so: the run goes back to weights that it kept."""
    candidate |= {"kl_budget_nats": 1.25, "learning_rate": 2e-3, "steps": 9, "checkpoint_every": 4}


def pairs_within_a_budget(candidate: dict[str, Any]) -> None:
    candidate |= {"kl_budget_nats": 1.4, "learning_rate": 3e-3, "checkpoint_every": 2, "epochs": 2}


def online(candidate: dict[str, Any]) -> None:
    for name in ("advantage", "loss", "kl", "truncated", "reduction", "length_constant"):
        candidate.pop(name)
    candidate |= {
        "kind": "online_preference", "algorithm": "online_dpo", "reference": "ema", "reference_decay": 0.9,
        "losses": [{"kind": "sigmoid", "beta": 0.1}], "steps": 5, "micro_batch_size": 2,
    }  # fmt: skip


CASES: dict[str, tuple[str, Edit]] = {
    "ppo": ("r1-ppo", ppo),
    "adaptive grpo": ("r1-grpo", adaptive),
    "dpo": ("r1-dpo", pairs),
    "online dpo": ("r1-grpo", online),
    "budget": ("r1-grpo", budget),
    "pairs within a budget": ("r1-dpo", pairs_within_a_budget),
}


def outputs(candidate: str) -> list[str]:
    return [f"runs/r1/policies/{candidate}", f"runs/r1/metrics/{candidate}-policy.json"]


def changed(project: Project, case: str) -> str:
    """The candidate's name, its settings in place."""
    name, edit = CASES[case]
    project.change(lambda pipeline: edit(pipeline["candidates"][name]))
    return name


@pytest.fixture(scope="module")
def straight(
    world: Project, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, str]]:
    """Hashes of a candidate's outputs after a run that nothing disturbed."""

    @cache
    def of(candidate: str) -> dict[str, str]:
        project = world.copy(tmp_path_factory.mktemp("straight") / "a project")
        project.done("policy", "--candidate", candidate)
        return project.digest(*outputs(candidate))

    return of


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.recovery] if "budget" in case else [])
        for case in CASES
    ],
)
def test_killed_at_random_points(case: str, project: Project) -> None:
    name = changed(project, case)
    attempts = survives_kills(project, "policy", "--candidate", name, outputs=outputs(name))
    assert "continues after" in attempts[-1].log
    assert not project.checkpoints(f"policy@{name}")
    report = artifacts.read_json(project.folder / outputs(name)[1])
    assert (report["stopped_by_kl_budget_after"] is not None) == ("budget" in case)


@pytest.mark.recovery
@pytest.mark.parametrize("case", CASES)
def test_killed_again_and_again(case: str, project: Project) -> None:
    name = changed(project, case)
    survives_kills(project, "policy", "--candidate", name, outputs=outputs(name), kills=12)


def test_killed_in_the_warm_up_of_the_critic(project: Project, straight: Any) -> None:
    command, out = ("policy", "--candidate", "r1-ppo"), outputs("r1-ppo")
    struck = project.run(
        *command, strike=Strike(1, signal.SIGTERM, inside="RlTrainer._value_update")
    )
    assert struck.code == 75, struck.log
    assert "stopped after step 1;" in struck.log
    assert "continues after step 1\n" in project.done(*command).log
    assert project.digest(*out) == straight(command[-1])


def test_without_memory_it_ends_and_continues(project: Project, straight: Any) -> None:
    """While answers are sampled in the second step."""
    command, out = ("policy", "--candidate", "r1-ppo"), outputs("r1-ppo")
    calls = project.run(*command, strike=Strike(10**9, inside="_sample_batch")).calls
    project.remove(*out)
    struck = project.run(*command, strike=Strike(calls // 2, inside="_sample_batch", memory=True))
    assert struck.code == 1
    assert "out of memory" in struck.log
    assert "continues after step" in project.done(*command).log
    assert project.digest(*out) == straight(command[-1])


@pytest.mark.parametrize("inside", ["Checkpoints.save", "Checkpoints.put_into", "Scratch.finish"])
def test_killed_while_files_are_put_in_place(inside: str, project: Project, straight: Any) -> None:
    """Of a policy along the path, of the output, and when the checkpoints go: nothing half is left or used."""
    command, out = ("policy", "--candidate", "r1-dpo"), outputs("r1-dpo")
    assert project.run(*command, strike=Strike(40, inside=inside)).code == -signal.SIGKILL
    project.remove(*out)
    project.done(*command)
    assert project.digest(*out) == straight(command[-1])
    left = list((project.folder / "runs/r1/policies").glob(".*"))
    assert not left


def test_a_lost_policy_of_the_path_is_made_again(project: Project, straight: Any) -> None:
    """A checkpoint that refers to files which are gone is passed over."""
    command, out = ("policy", "--candidate", "r1-dpo"), outputs("r1-dpo")
    struck = project.run(*command, strike=Strike(1, inside="Checkpoints.put_into"))
    assert struck.code == -signal.SIGKILL
    newest = project.checkpoints("policy@r1-dpo")[-1]
    lost = newest.parent / "files/step-00004/model.safetensors"
    lost.write_bytes(lost.read_bytes()[:-1])
    log = project.done(*command).log
    assert "(its file step-00004/model.safetensors is missing or cut short)" in log
    assert "falling back to that of step 3\n" in log
    assert project.digest(*out) == straight(command[-1])


def test_what_training_warned_of_is_kept(project: Project) -> None:
    project.done("policy", "--candidate", "r1-ppo")
    folder = project.folder / "runs/r1/policies"
    assert artifacts.read_json(folder / "r1-ppo/alarms.json") == []
    for learning_rate, fell in ((3e-4, False), (3e-2, True)):
        project.change(
            lambda pipeline, rate=learning_rate: pipeline["candidates"]["r1-dpo"].update(
                {"learning_rate": rate, "epochs": 4}
            )
        )
        project.done("policy", "--candidate", "r1-dpo")
        alarms = artifacts.read_json(folder / "r1-dpo/alarms.json")
        value = artifacts.read_json(project.folder / outputs("r1-dpo")[1])["alarm_chosen_fell_nats"]
        assert (value is not None) == fell
        assert [(a["name"], a["value"]) for a in alarms] == (
            [("chosen_fell", value)] if fell else []
        )


def test_another_policy_of_r0_is_another_start(project: Project) -> None:
    """r0's weights reach the key by their hash in the report of fine-tuning, which names them."""
    assert content_digest(project.folder / "runs/r0/promoted")
    struck = project.run(
        "policy", "--candidate", "r1-dpo", strike=Strike(1, inside="Checkpoints.put_into")
    )
    assert struck.code == -signal.SIGKILL
    report = project.folder / "runs/r0/metrics/sft.json"
    artifacts.write_json(report, {**artifacts.read_json(report), "weights_sha256": "another"})
    assert "continues" not in project.done("policy", "--candidate", "r1-dpo").log
