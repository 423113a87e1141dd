"""Learning from pairs: ln 2 at the start, the declared loss by hand, every pair once an epoch, learning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.errors import StageFailed
from rlhf.models.sequences import Sequences
from rlhf.optimise.anchor import following
from rlhf.optimise.pairs import Batch, Pairs
from rlhf.optimise.preference import OnlinePreferenceTrainer, PairIds, PreferenceTrainer
from rlhf.optimise.rollouts import Rollout
from rlhf.progress import Clock
from rlhf.rollout import Completion


def make(
    settings: config.PreferenceCandidate | None = None,
    *,
    policy: PreTrainedModel | None = None,
    start: PreTrainedModel | None = None,
    pairs: list[PairIds] | None = None,
    seed: int = 0,
) -> PreferenceTrainer:
    """The start is the reference."""
    start = start if start is not None else tiny.llama()
    return PreferenceTrainer(
        settings or tiny.preference_candidate(),
        tiny.model_settings(),
        policy=policy if policy is not None else tiny.llama(),
        start=start,
        reference=start,
        pairs=tiny.consistent_pairs() if pairs is None else pairs,
        pad_id=tiny.PAD,
        seed=seed,
        clock=Clock("test"),
    )


def logp(model: PreTrainedModel, prompt: list[int], response: list[int]) -> float:
    """Log-prob of a whole answer."""
    return float(tiny.token_logps(model, prompt, response).sum())


def test_reference_log_probs_by_definition() -> None:
    reference, trainer = tiny.llama(), make()
    for i, pair in enumerate(tiny.consistent_pairs()):
        chosen = logp(reference, pair.prompt, pair.chosen)
        rejected = logp(reference, pair.prompt, pair.rejected)
        table = trainer.pairs
        for first, second in (
            (table.ref_chosen, table.ref_rejected),
            (table.start_chosen, table.start_rejected),
        ):
            assert first is not None
            assert second is not None
            assert float(first[i]) == pytest.approx(chosen, abs=1e-4)
            assert float(second[i]) == pytest.approx(rejected, abs=1e-4)


def test_the_loss_starts_at_ln_2_and_the_reference_stays() -> None:
    trainer = make(tiny.preference_candidate(epochs=3))
    before = trainer.pairs.ref_chosen, trainer.pairs.ref_rejected
    chosen, rejected = (table.clone() for table in before if table is not None)
    (update, _, first), *_, (last_update, _, last) = trainer.run()
    assert (update, last_update) == (1, 6)
    assert first["policy/loss"] == pytest.approx(math.log(2), abs=1e-5)  # .6931
    assert first["policy/margin"] == pytest.approx(0, abs=1e-5)
    assert last["policy/loss"] < math.log(2) - 0.01
    assert first["policy/chosen_logp_change_nats"] == pytest.approx(0, abs=1e-5)
    assert torch.equal(trainer.pairs.ref_chosen, chosen)  # type: ignore[arg-type]
    assert torch.equal(trainer.pairs.ref_rejected, rejected)  # type: ignore[arg-type]


def used(trainer: PreferenceTrainer) -> list[list[int]]:
    """The rows of every micro-batch, in order."""
    seen: list[list[int]] = []
    original = trainer.objective.loss

    def record(pairs: Pairs, rows: list[int], batch: Batch) -> Any:
        seen.append(rows)
        return original(pairs, rows, batch)

    trainer.objective.loss = record  # type: ignore[method-assign]
    list(trainer.run())
    return seen


def test_every_pair_comes_once_an_epoch_and_epochs_reshuffle() -> None:
    settings = tiny.preference_candidate(epochs=3, batch_size=6, micro_batch_size=2)
    trainer = make(settings, pairs=tiny.consistent_pairs(15))
    seen = used(trainer)
    assert all(len(rows) <= 2 for rows in seen)
    epochs = [[i for rows in seen for i in rows][15 * e : 15 * e + 15] for e in range(3)]
    for epoch in epochs:
        assert Counter(epoch) == dict.fromkeys(range(15), 1)
    assert epochs[0] != epochs[1]
    assert trainer.total_updates == trainer.learner.updates == 9  # 6 + 6 + 3 pairs an epoch
    again = used(make(settings, pairs=tiny.consistent_pairs(15)))
    assert seen == again
    assert seen != used(make(settings, pairs=tiny.consistent_pairs(15), seed=1))


def test_tokens_are_those_of_both_answers() -> None:
    pairs = tiny.consistent_pairs()
    tokens = sum(tokens for _, tokens, _ in make().run())
    assert tokens == sum(len(p.chosen) + len(p.rejected) for p in pairs)


def test_consistent_pairs_are_learned() -> None:
    settings = tiny.preference_candidate(epochs=8, learning_rate=3e-3)
    metrics = [m for _, _, m in make(settings).run()]
    early, late = metrics[1], metrics[-1]
    assert late["policy/accuracy"] == 1.0
    assert late["policy/margin"] > early["policy/margin"] + 0.5
    assert late["policy/loss"] < 0.4


def test_swapped_pairs_are_learned_the_other_way() -> None:
    """The sign: what is called chosen becomes likelier than what is called rejected."""
    pairs = [PairIds(p.prompt, p.rejected, p.chosen) for p in tiny.consistent_pairs()]
    policy, reference = tiny.llama(), tiny.llama()
    list(
        make(
            tiny.preference_candidate(epochs=8, learning_rate=3e-3), policy=policy, pairs=pairs
        ).run()
    )

    def gain(pair: PairIds, response: list[int]) -> float:
        return logp(policy, pair.prompt, response) - logp(reference, pair.prompt, response)

    assert all(gain(p, p.chosen) > gain(p, p.rejected) for p in pairs)


@pytest.mark.parametrize("wrong", ["dropout", "start"])
def test_a_policy_that_does_not_start_as_the_start_is_refused(wrong: str) -> None:
    models = {
        "dropout": {"policy": tiny.gpt2(dropout=0.1), "start": tiny.gpt2(dropout=0.1)},
        "start": {"start": tiny.llama(seed=1)},
    }
    with pytest.raises(StageFailed, match="differ from the reference's"):
        make(**models[wrong])
    make(policy=tiny.gpt2(), start=tiny.gpt2())


def test_a_non_finite_loss_names_the_pairs() -> None:
    policy = tiny.llama()
    trainer = make(policy=policy)
    assert trainer.pairs.ref_chosen is not None
    trainer.pairs.ref_chosen[5] = math.nan
    seen = [tiny.weights_of(policy)]
    steps = (tiny.weights_of(policy) for _ in trainer.run())
    with pytest.raises(StageFailed, match=r"batch epoch 1, pairs \[.*\b5\b"):
        seen.extend(steps)
    assert tiny.same_weights(policy, seen[-1])


def test_the_averaged_weights_are_those_of_the_updates() -> None:
    policy = tiny.llama()
    trainer = make(tiny.preference_candidate(ema_decay=0.6, epochs=2), policy=policy)
    expected = tiny.weights_of(policy)
    for _ in trainer.run():
        now = tiny.weights_of(policy)
        expected = {name: 0.6 * expected[name] + 0.4 * now[name] for name in now}
    with trainer.learner.averaged():
        for name, value in policy.state_dict().items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


# --- pairs of the policy's own ---


def online(
    settings: config.OnlinePreferenceCandidate | None = None,
    *,
    policy: PreTrainedModel | None = None,
    start: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
    score: Callable[..., Tensor] = tiny.share_of_w7,
    seed: int = 0,
) -> OnlinePreferenceTrainer:
    settings = settings or tiny.online_candidate()
    start = start if start is not None else tiny.llama()
    if reference is None and settings.reference == "previous":
        reference = start
    return OnlinePreferenceTrainer(
        settings,
        tiny.model_settings(max_response_tokens=6),
        policy=policy if policy is not None else tiny.llama(),
        start=start,
        reference=reference,
        score=score,
        codec=tiny.codec(),
        prompts=tiny.PROMPTS,
        seed=seed,
        clock=Clock("test"),
    )


ANSWERS = [
    [7, 1], [9, 8, 3, 4, 5], [1],
    [7, 7, 7, 1], [15, 16, 1], [3],
    [4, 6, 8, 10, 12, 14], [5, 1], [5, 6, 1],
]  # fmt: skip


def rollout(scores: list[float]) -> Rollout:
    """Three prompts with three answers each."""
    prompts = [prompt for prompt in tiny.PROMPTS[:3] for _ in range(3)]
    completions = [Completion(row, [-1.0] * len(row), row[-1] == tiny.EOS) for row in ANSWERS]
    return Rollout(prompts, completions, torch.tensor(scores), {})


def ids(sequences: Sequences) -> list[list[int]]:
    tables = zip(sequences.response_ids, sequences.response_mask, strict=True)
    return [row[mask].tolist() for row, mask in tables]


def three_by_three(**changes: Any) -> config.OnlinePreferenceCandidate:
    return tiny.online_candidate(
        **({"prompts_per_step": 3, "samples_per_prompt": 3, "micro_batch_size": 3} | changes)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_best_of_each_prompt_is_chosen_over_the_worst(temperature: float) -> None:
    trainer = online(three_by_three(temperature=temperature))
    pairs, metrics = trainer._labelled(rollout([0.5, 2.0, -1.0, 1.0, 1.0, 1.0, -3.0, -3.5, 0.0]))
    assert pairs is not None
    # The second prompt's answers tie: no pair.
    assert ids(pairs.chosen) == [ANSWERS[1], ANSWERS[8]]
    assert ids(pairs.rejected) == [ANSWERS[2], ANSWERS[7]]
    prompts = [
        row[m].tolist()
        for row, m in zip(pairs.chosen.prompt_ids, pairs.chosen.prompt_mask, strict=True)
    ]
    assert prompts == [tiny.PROMPTS[0], tiny.PROMPTS[2]]
    assert pairs.margins is not None
    assert pairs.margins.tolist() == [3.0, 3.5]
    assert metrics["policy/pairs"] == 2
    assert metrics["policy/proxy"] == pytest.approx(-2 / 9)
    # Log-probs are of the distribution that was sampled from.
    expected = [
        float(tiny.token_logps(tiny.llama(), prompt, ANSWERS[i], temperature).sum())
        for prompt, i in zip(prompts, (1, 8), strict=True)
    ]
    for table in (pairs.start_chosen, pairs.ref_chosen):
        assert table is not None
        assert table.tolist() == pytest.approx(expected, abs=1e-4)


def test_without_a_pair_there_is_no_update() -> None:
    policy = tiny.llama()
    before = tiny.weights_of(policy)
    calls: list[int] = []

    def tie_once(prompts: Any, texts: Sequence[str], ended: Any) -> Tensor:
        calls.append(1)
        return torch.ones(len(texts)) if len(calls) == 1 else torch.arange(float(len(texts)))

    trainer = online(policy=policy, score=tie_once)
    steps = trainer.run()
    _, _, metrics = next(steps)
    assert tiny.same_weights(policy, before)
    assert trainer.learner.updates == 0
    assert metrics["policy/pairs"] == 0
    assert "policy/loss" not in metrics
    _, _, metrics = next(steps)
    assert trainer.learner.updates == 1
    assert metrics["policy/pairs"] == 6
    assert metrics["policy/loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_every_pair_comes_once_a_pass() -> None:
    settings = tiny.online_candidate(steps=1, epochs_per_step=2, minibatches=2, micro_batch_size=1)
    trainer, seen = online(settings, score=lambda p, t, e: torch.arange(float(len(t)))), []
    original = trainer.objective.loss

    def record(pairs: Pairs, rows: list[int], batch: Batch) -> Any:
        seen.append((rows, batch.num_pairs))
        return original(pairs, rows, batch)

    trainer.objective.loss = record  # type: ignore[method-assign]
    list(trainer.run())
    rows = [row for micro, _ in seen for row in micro]
    assert Counter(rows[:6]) == Counter(rows[6:]) == dict.fromkeys(range(6), 1)
    assert {count for _, count in seen} == {3}
    assert trainer.learner.updates == 4


def test_a_margin_is_the_difference_of_scores() -> None:
    """ODPO: -log sigmoid(beta * (log-ratios) - alpha * margin), at the start without log-ratios."""
    settings = three_by_three(losses=[{"kind": "odpo", "beta": 0.2, "alpha": 0.5}], steps=1)
    trainer = online(settings, score=lambda p, t, e: torch.arange(9.0) ** 2)
    ((_, _, metrics),) = trainer.run()
    # Scores 0 1 4, 9 16 25, 36 49 64: margins of 4, 16 and 28.
    expected = sum(math.log1p(math.exp(0.5 * m)) for m in (4, 16, 28)) / 3
    assert metrics["policy/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("refers_to", ["ema", "none", "initial"])
def test_references_of_own_pairs(refers_to: str) -> None:
    start = tiny.llama()
    reference = {"ema": following(start), "none": None, "initial": tiny.llama(1)}[refers_to]
    losses = [{"kind": "orpo"} if refers_to == "none" else {"kind": "sigmoid", "beta": 0.25}]
    decay = {"reference_decay": 0.5} if refers_to == "ema" else {}
    settings = tiny.online_candidate(losses=losses, reference=refers_to, steps=2, **decay)
    trainer = online(settings, start=start, reference=reference)
    metrics = [m for *_, m in trainer.run()]
    assert [m["policy/kl_nats"] > 0 for m in metrics] == [False, True]
    if refers_to == "ema":
        assert reference is not None
        assert not tiny.same_weights(reference, tiny.weights_of(start))
    if refers_to == "initial":
        assert abs(metrics[0]["policy/loss"] - math.log(2)) > 1e-3


def test_a_policy_of_another_start_is_refused() -> None:
    with pytest.raises(StageFailed, match="differ from the reference's"):
        next(online(start=tiny.llama(1)).run())


def test_own_pairs_end_within_the_budget() -> None:
    free = [m["policy/log_ratio_nats"] for *_, m in online(tiny.online_candidate(steps=4)).run()]
    assert sorted(free) == free
    policy, weights = tiny.llama(), []
    limit = (free[2] + free[3]) / 2
    trainer = online(tiny.online_candidate(steps=4, kl_budget_nats=limit), policy=policy)
    for _ in trainer.run():
        weights.append(tiny.weights_of(policy))
    assert trainer.budget.stopped_at == (2, 2)
    assert len(weights) == 3
    assert tiny.same_weights(policy, weights[1])


def test_same_seed_same_weights_other_seed_others() -> None:
    found = []
    for seed in (0, 0, 1):
        policy = tiny.llama()
        list(online(policy=policy, seed=seed).run())
        found.append(tiny.weights_of(policy))
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])
    assert not all(torch.equal(found[0][k], found[2][k]) for k in found[0])
