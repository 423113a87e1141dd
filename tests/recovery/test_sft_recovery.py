"""Supervised fine-tuning, struck in every way, ends with the weights of an undisturbed run."""

from __future__ import annotations

import signal

import pytest
from attempts import Project, Strike, survives_kills

from rlhf import artifacts

OUTPUTS = ["runs/r0/promoted", "runs/r0/metrics/sft.json"]


@pytest.fixture
def straight(world: Project) -> dict[str, str]:
    """Hashes of a run that nothing disturbed."""
    return world.digest(*OUTPUTS)


@pytest.fixture
def fresh(project: Project) -> Project:
    """A project whose fine-tuning is to be done."""
    project.remove(*OUTPUTS)
    return project


def continues(project: Project, step: int | None = None) -> str:
    """Run it to the end; what it said."""
    attempt = project.done("sft")
    if step is not None:
        assert f"sft: continues after step {step}\n" in attempt.log
    assert not project.checkpoints("sft")
    return attempt.log


def test_killed_at_random_points(project: Project, straight: dict[str, str]) -> None:
    attempts = survives_kills(project, "sft", outputs=OUTPUTS)
    assert project.digest(*OUTPUTS) == straight
    assert "continues after" in attempts[-1].log


@pytest.mark.recovery
def test_killed_again_and_again(project: Project, straight: dict[str, str]) -> None:
    survives_kills(project, "sft", outputs=OUTPUTS, kills=20)
    assert project.digest(*OUTPUTS) == straight


def test_averaged_weights_and_patience(project: Project) -> None:
    project.change(
        lambda pipeline: pipeline["sft"].update(
            {"ema_decay": 0.8, "patience": 2, "evaluate_every": 1, "learning_rate": 0.5}
        )
    )
    survives_kills(project, "sft", outputs=OUTPUTS)
    report = artifacts.read_json(project.folder / OUTPUTS[1])
    assert report["stopped_early"]
    assert report["best_update"] < report["updates"]


# What happens inside Scratch._write: the data are under way, or there without their hash.
@pytest.mark.parametrize("inside", ["_save", "Scratch._sync_files", "Scratch._drop_old"])
def test_killed_while_a_checkpoint_is_written(
    inside: str, fresh: Project, straight: dict[str, str]
) -> None:
    strike = Strike(60 if inside == "_save" else 2, inside=inside)
    assert fresh.run("sft", strike=strike).code == -signal.SIGKILL
    log = continues(fresh)
    # `_drop_old` comes once the checkpoint is whole.
    assert ("continues after step 1\n" in log) == (inside == "Scratch._drop_old")
    assert fresh.digest(*OUTPUTS) == straight


def test_sigterm_ends_with_a_checkpoint(fresh: Project, straight: dict[str, str]) -> None:
    fresh.change(lambda p: p["resources"]["checkpoints"].update({"every_steps": 1000}))
    attempt = fresh.run("sft", strike=Strike(3, signal.SIGTERM, inside="Learner.update"))
    assert attempt.code == 75
    assert "sft: stopped after step 1; run it again, and it continues from step 1\n" in attempt.log
    assert len(fresh.checkpoints("sft")) == 1
    continues(fresh, 1)
    assert fresh.digest(*OUTPUTS) == straight


def test_sigterm_before_training_ends_at_once(fresh: Project) -> None:
    attempt = fresh.run("sft", strike=Strike(3, signal.SIGTERM, inside="load_base"))
    assert attempt.code == 1
    assert attempt.log == "sft: stopped; finished stages are kept, run again to go on\n"
    assert not fresh.checkpoints("sft")


def test_sigterm_after_training_lets_it_finish(fresh: Project, straight: dict[str, str]) -> None:
    attempt = fresh.run("sft", strike=Strike(3, signal.SIGTERM, inside="save_policy"))
    assert attempt.code == 0, attempt.log
    assert fresh.digest(*OUTPUTS) == straight


def test_a_full_disk_costs_the_checkpoints_alone(fresh: Project, straight: dict[str, str]) -> None:
    """A disk of its own under `.scratch/resume`, with room for two checkpoints less a little."""
    fresh.run("sft", strike=Strike(3, signal.SIGTERM, inside="Learner.update"))
    (first,) = fresh.checkpoints("sft")
    attempt = fresh.run("sft", disk=int(1.7 * first.stat().st_size))
    if attempt.code == 99:
        pytest.skip("no file system can be mounted here without root")
    assert attempt.code == 0, attempt.log
    assert "no checkpoint at step" in attempt.log
    assert "full; the stage goes on, and if it ends now it continues from step 1\n" in attempt.log
    assert fresh.digest(*OUTPUTS) == straight


# In the middle of training, and while the first checkpoint is written.
@pytest.mark.parametrize("inside", ["Learner.update", "_save"])
def test_without_memory_it_ends_and_continues(
    inside: str, fresh: Project, straight: dict[str, str]
) -> None:
    at = 60
    if inside == "Learner.update":
        at = fresh.done("sft", strike=Strike(10**9, inside=inside)).calls // 2
        fresh.remove(*OUTPUTS)
    attempt = fresh.run("sft", strike=Strike(at, inside=inside, memory=True))
    assert attempt.code == 1
    assert "out of memory" in attempt.log
    assert "mend: lower micro_batch_size" in attempt.log
    log = continues(fresh)
    assert ("continues after step" in log) == (inside == "Learner.update")
    assert fresh.digest(*OUTPUTS) == straight


def test_a_damaged_checkpoint_is_passed_over(fresh: Project, straight: dict[str, str]) -> None:
    fresh.run("sft", strike=Strike(1, inside="_Best.offer"))  # at update 6
    older, newest = fresh.checkpoints("sft")
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    log = continues(fresh, 4)
    assert older.stem == "000000004"
    assert f"{newest.relative_to(fresh.folder)}: the checkpoint of step 5 cannot be used" in log
    assert "(its content is not what was written); falling back to that of step 4\n" in log
    assert fresh.digest(*OUTPUTS) == straight


def test_other_settings_start_over(fresh: Project) -> None:
    fresh.run("sft", strike=Strike(1, inside="_Best.offer"))
    fresh.change(lambda pipeline: pipeline["sft"].update({"learning_rate": 1e-3}))
    assert "continues" not in continues(fresh)


def test_the_report_names_the_weights(world: Project) -> None:
    named = artifacts.read_json(world.folder / OUTPUTS[1])["weights_sha256"]
    assert named == world.digest(OUTPUTS[0])[OUTPUTS[0]]
