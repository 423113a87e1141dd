"""What the policy stage keeps: checkpoints as declared, and none over the KL budget."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import torch

from rlhf import artifacts, config, contracts
from rlhf.errors import StageFailed
from rlhf.models.policy import load_policy, save_policy
from rlhf.models.sequences import Sequences
from rlhf.optimise.forward import divergence
from rlhf.optimise.preference import OnlinePreferenceTrainer
from rlhf.optimise.rl import RlTrainer
from rlhf.progress import Clock
from rlhf.resume import Scratch
from rlhf.rollout import sample
from tasks import policy as stage

MODEL = tiny.model_settings(max_response_tokens=6)
KL = {"where": "loss", "estimator": "k3", "coef": 0.1}


class Tracked:
    """A tracking run that remembers."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def dataset(self, *_: Any) -> None: ...


def new_job(folder: Path) -> Any:
    settings = config.Checkpoints(every_steps=99, every_minutes=99, keep=1, max_gigabytes=1)
    scratch = Scratch(folder / ".scratch", "policy@r1-x", settings)
    return types.SimpleNamespace(
        name="r1-x",
        policy=tiny.llama(),
        start=tiny.llama(),
        tracked=Tracked(),
        scratch=scratch,
        clock=Clock("test"),
        checkpoints=stage.Checkpoints(scratch.files, tiny.tokenizer()),
        reference_digest="abc",
    )


KINDS = {"rl": tiny.rl_candidate, "own pairs": tiny.online_candidate}


def follow(kind: str, folder: Path, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A job after a run of its trainer, and what it says of it."""
    job = new_job(folder)
    job.candidate = candidate = KINDS[kind](**changes)
    given: dict[str, Any] = {
        "policy": job.policy, "start": job.start, "score": tiny.share_of_w7, "codec": tiny.codec(),
        "prompts": tiny.PROMPTS, "seed": 0, "clock": Clock("test"),
        "reference": None if candidate.reference == "none" else job.start,
    }  # fmt: skip
    trainer: RlTrainer | OnlinePreferenceTrainer
    if isinstance(candidate, config.RlCandidate):
        trainer = RlTrainer(candidate, MODEL, critic=None, **given)
    else:
        trainer = OnlinePreferenceTrainer(candidate, MODEL, **given)
    try:
        return job, stage._follow(job, candidate, trainer)
    finally:
        job.scratch.release()


def saved(job: Any, out: Path) -> list[int]:
    """Steps on the list in the output; each has its directory there, and nothing else has one."""
    job.checkpoints.put_into(out)
    listed = artifacts.read_json(out / "checkpoints.json")
    names = {path.name for path in out.iterdir() if path.is_dir() and path.name != ".scratch"}
    assert names == {c["checkpoint"] for c in listed}
    assert [c["checkpoint"] for c in listed] == [f"step-{c['step']:05d}" for c in listed]
    return [c["step"] for c in listed]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_come_as_declared_and_with_the_last_step(kind: str, tmp_path: Path) -> None:
    job, summary = follow(kind, tmp_path, steps=5, checkpoint_every=2)
    assert saved(job, tmp_path) == [2, 4, 5]
    assert [step for step, _ in job.tracked.logged] == [1, 2, 3, 4, 5]
    assert summary["stopped_by_kl_budget_after"] is None
    assert summary["reference_sha256"] == "abc"
    assert summary["kl_nats_first"] == 0.0
    assert summary["kl_nats_last"] == job.tracked.logged[-1][1]["policy/kl_nats"]
    last = load_policy(tmp_path / "step-00005", tiny.CPU)
    assert tiny.same_weights(last, tiny.weights_of(job.policy))


def exact_kl(policy: Any, start: Any) -> float:
    """KL(policy || start) of whole answers, in nats, on answers of the policy."""
    prompts = tiny.PROMPTS * 40
    completions = sample(
        policy, prompts, max_new_tokens=6, temperature=1.0, eos_id=tiny.EOS, pad_id=tiny.PAD,
        seed=7, batch_size=240,
    )  # fmt: skip
    sequences = Sequences.from_rows(prompts, [c.ids for c in completions], tiny.PAD)
    return float(divergence(policy, start, sequences, MODEL, 240).kl.mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("every", "kept"), [(1, [1, 2]), (2, [2]), (3, [2]), (5, [2])])
def test_over_the_budget_only_what_is_within_it_stays(
    kind: str, every: int, kept: list[int], tmp_path: Path
) -> None:
    """The third step goes over it; checkpoints of the third are forgotten, the second is kept."""
    free, _ = follow(kind, tmp_path / "free", steps=5, checkpoint_every=1)
    kl = [metrics["policy/log_ratio_nats"] for _, metrics in free.tracked.logged]
    assert kl[0] < kl[1] < kl[2] < kl[3]
    limit = (kl[2] + kl[3]) / 2
    job, summary = follow(
        kind, tmp_path / "bounded", steps=5, checkpoint_every=every, kl_budget_nats=limit
    )
    assert saved(job, tmp_path / "bounded") == kept
    assert summary["stopped_by_kl_budget_after"] == 2
    assert job.checkpoints.saved[-1]["updates"] == 2
    found = load_policy(tmp_path / "bounded/step-00002", tiny.CPU)
    twin = load_policy(free.checkpoints.directory / "step-00002", tiny.CPU)
    assert tiny.same_weights(found, tiny.weights_of(twin))
    assert exact_kl(found, job.start) < limit


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_that_the_last_step_breaks_takes_that_step_back(kind: str, tmp_path: Path) -> None:
    free, _ = follow(kind, tmp_path / "free", steps=5, checkpoint_every=1)
    kl = [metrics["policy/log_ratio_nats"] for _, metrics in free.tracked.logged]
    job, summary = follow(
        kind, tmp_path / "bounded", steps=3, checkpoint_every=3, kl_budget_nats=(kl[2] + kl[3]) / 2
    )
    assert saved(job, tmp_path / "bounded") == [2]
    assert summary["stopped_by_kl_budget_after"] == 2


def test_averaged_weights_are_what_is_saved(tmp_path: Path) -> None:
    job, _ = follow("rl", tmp_path, steps=2, checkpoint_every=1, ema_decay=0.5)
    saved(job, tmp_path)
    first, second = (load_policy(tmp_path / f"step-0000{i}", tiny.CPU) for i in (1, 2))
    start = tiny.llama().state_dict()
    last = tiny.weights_of(job.policy)
    plain, _ = follow("rl", tmp_path / "plain", steps=1, checkpoint_every=1)
    after_one = tiny.weights_of(plain.policy)
    for name, value in first.state_dict().items():
        torch.testing.assert_close(value, 0.5 * start[name] + 0.5 * after_one[name])
    for name, value in second.state_dict().items():
        torch.testing.assert_close(value, 0.5 * first.state_dict()[name] + 0.5 * last[name])
    assert not tiny.same_weights(second, last)


def test_a_cut_forgets_what_came_after(tmp_path: Path) -> None:
    job = new_job(tmp_path)
    for step in (2, 4, 6):
        job.checkpoints.save(job.policy, step, 3 * step)
    job.checkpoints.cut(4)
    assert saved(job, tmp_path) == [2, 4]
    assert [job.checkpoints.has(step) for step in (2, 4, 6)] == [True, True, False]


def test_pairs_over_the_budget(tmp_path: Path) -> None:
    """Measured at checkpoints: the last one within it stays, and without one the run fails."""
    job = new_job(tmp_path)
    free, bounded = tiny.preference_candidate(), tiny.preference_candidate(kl_budget_nats=2.0)
    assert stage._over_budget(job, free, 1e9) is None
    assert stage._over_budget(job, bounded, 2.0) is None
    with pytest.raises(StageFailed, match=r"first checkpoint is 2.5 nats[\s\S]*kl_budget_nats=2\n"):
        stage._over_budget(job, bounded, 2.5)
    for update in (4, 8):
        job.checkpoints.save(job.policy, update, update)
    assert stage._over_budget(job, bounded, 2.5) == 8


@pytest.mark.parametrize("init", ["previous", "initial"])
def test_each_policy_is_the_one_its_name_says(
    init: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where candidates start, and what each reference is, in a round whose incoming policy is not r0's."""
    monkeypatch.chdir(tmp_path)
    for seed, name in ((5, "r0"), (6, "r1")):
        save_policy(tiny.llama(seed), tiny.tokenizer(), tmp_path / f"runs/{name}/promoted")
    contracts.write(
        pd.DataFrame(
            {"prompt_id": [contracts.prompt_id("w5")], "prompt": "w5", "messages": None, "split": "rl"}
        ),
        tmp_path / "data/tables/prompts.parquet",
        contracts.PROMPTS,
    )  # fmt: skip
    r0, r1 = (tiny.weights_of(tiny.llama(seed)) for seed in (5, 6))
    start, expected = (r1, {"previous": r1}) if init == "previous" else (r0, {"previous": r1})
    expected |= {"initial": r0, "ema": start}
    found = {}
    for reference in stage.REFERENCES:
        changes: dict[str, Any] = {"from": "r1", "round": "r2", "reference": reference}
        if reference != "none":
            changes["kl"] = KL
        if reference == "ema":
            changes["reference_decay"] = 0.5
        candidate = tiny.rl_candidate(**changes)
        pipeline: Any = types.SimpleNamespace(
            candidates={"r2-x": candidate},
            rounds={"r2": types.SimpleNamespace(init=init)},
            model=MODEL,
            seed_for=lambda *_: 0,
        )
        scratch = Scratch(tmp_path / "scratch", "x", new_job(tmp_path).scratch.settings)
        job = stage.Job(pipeline, "r2-x", Clock("x"), Tracked(), scratch)  # type: ignore[arg-type]
        assert tiny.same_weights(job.policy, start)
        assert tiny.same_weights(job.start, start)
        found[reference] = job.reference
        # One forward pass less where the reference is the start.
        assert (job.reference is job.start) == (reference == init)
    assert found.pop("none") is None
    assert set(found) == set(expected)
    for reference, policy in found.items():
        assert tiny.same_weights(policy, expected[reference])


def test_a_run_that_fails_leaves_its_last_good_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the stage had written is removed with its output; the weights are kept beside it, and named."""
    monkeypatch.chdir(tmp_path)
    job = new_job(tmp_path / "out")
    with torch.no_grad():
        for parameter in job.policy.parameters():
            parameter.add_(0.01)
    with pytest.raises(StageFailed, match=r"broken\n  the last good weights are in .*policy@r1-x"):
        with stage._kept_on_failure(job):
            raise StageFailed("broken")
    kept = load_policy(Path(".scratch/failed/policy@r1-x"), tiny.CPU)
    assert tiny.same_weights(kept, tiny.weights_of(job.policy))
    with stage._kept_on_failure(job):
        pass
