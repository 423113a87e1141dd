"""Reinforcement learning: every constant and loss by value, the checks before training, and learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.algos.types import Advantages, LossOutput
from rlhf.errors import StageFailed
from rlhf.models.policy import enable_gradient_checkpointing
from rlhf.models.scalar import ScalarModel
from rlhf.models.sequences import Sequences
from rlhf.optimise import rl, rollouts
from rlhf.optimise.anchor import following
from rlhf.optimise.forward import by_length
from rlhf.optimise.rl import Experience, RlTrainer
from rlhf.optimise.rollouts import Rollout
from rlhf.progress import Clock
from rlhf.rollout import Completion

PROMPTS = tiny.PROMPTS


def make(
    settings: config.RlCandidate | None = None,
    *,
    policy: PreTrainedModel | None = None,
    start: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
    critic: ScalarModel | None = None,
    score: Callable[..., Tensor] = tiny.share_of_w7,
    prompts: list[list[int]] = PROMPTS,
    seed: int = 0,
    **model: Any,
) -> RlTrainer:
    """The reference is the start where there is a KL term, unless told otherwise."""
    settings = settings or tiny.rl_candidate()
    start = start if start is not None else tiny.llama()
    if reference is None and settings.kl is not None:
        reference = start
    return RlTrainer(
        settings,
        tiny.model_settings(max_response_tokens=6, **model),
        policy=policy if policy is not None else tiny.llama(),
        start=start,
        reference=reference,
        critic=critic,
        score=score,
        codec=tiny.codec(),
        prompts=prompts,
        seed=seed,
        clock=Clock("test"),
    )


def new_critic(seed: int = 7, head: float = 0.3) -> ScalarModel:
    critic = ScalarModel(tiny.llama(seed).base_model).eval()
    torch.manual_seed(seed)
    torch.nn.init.normal_(critic.head.weight, std=head)
    return critic


def spied(trainer: RlTrainer, name: str = "learner") -> list[dict[str, float]]:
    """The metrics of every single update from here on."""
    learner, seen = getattr(trainer, name), []
    update = learner.update

    def record(micro_batches: Any, *, name: str) -> dict[str, float]:
        seen.append(update(micro_batches, name=name))
        return seen[-1]

    learner.update = record
    return seen


# --- the rollout ---


def test_scores_belong_to_their_answers() -> None:
    calls: list[tuple[Any, ...]] = []

    def number(prompts: Sequence[list[int]], texts: Sequence[str], ended: Sequence[bool]) -> Tensor:
        calls.append((list(prompts), list(texts), list(ended)))
        return torch.arange(len(texts)).float()

    experience = make(score=number).collect()
    prompts, texts, ended = calls[0]
    assert experience.scores.tolist() == list(range(16))
    for i in range(16):
        ids = experience.sequences.response_ids[i][experience.sequences.response_mask[i]].tolist()
        shown = experience.sequences.prompt_ids[i][experience.sequences.prompt_mask[i]].tolist()
        assert shown == prompts[i]
        assert texts[i].split() == [f"w{t}" for t in ids if t > 2]
        assert ended[i] == (ids[-1] == tiny.EOS)


def test_minibatches_are_a_partition_of_the_rollout() -> None:
    settings = tiny.rl_candidate(minibatches=2, micro_batch_size=4, epochs_per_step=2)
    experience = make(settings).collect()
    assert [len(m) for m in experience.minibatches] == [2, 2]
    rows = [row for m in experience.minibatches for micro in m for row in micro]
    assert sorted(rows) == list(range(16))


def cut_of(trainer: RlTrainer) -> tuple[list[list[int]], Sequences]:
    """The rows of each minibatch of the next rollout, in their order, and the rollout."""
    experience = trainer.collect()
    flat = [[row for micro in m for row in micro] for m in experience.minibatches]
    return flat, experience.sequences


def of_reduction(reduction: str, **changes: Any) -> config.RlCandidate:
    sizes = {"minibatches": 4, "micro_batch_size": 2}
    return tiny.rl_candidate(**(sizes | changes), reduction=reduction)


def test_minibatches_of_a_token_mean_are_made_by_chance() -> None:
    """Sorted ones would divide short answers by few tokens and long ones by many."""
    found = {}
    for run, seed in (("first", 0), ("again", 0), ("other", 1)):
        trainer = make(of_reduction("token_mean"), prompts=[[5]], seed=seed)
        found[run] = [cut_of(trainer), cut_of(trainer)]
        for minibatches, sequences in found[run]:
            assert [len(rows) for rows in minibatches] == [4] * 4
            assert sorted(row for rows in minibatches for row in rows) == list(range(16))
            lengths = sequences.lengths.tolist()
            assert len(set(lengths)) > 3
            # Sorted within a minibatch, which saves padding, and not across.
            assert all(
                [lengths[i] for i in m] == sorted(lengths[i] for i in m) for m in minibatches
            )
            assert [lengths[i] for m in minibatches for i in m] != sorted(lengths)
    sets = {run: [[set(m) for m in cut] for cut, _ in cuts] for run, cuts in found.items()}
    assert sets["again"] == sets["first"]
    assert sets["first"][0] != sets["first"][1]  # chance again for each rollout
    assert sets["other"][0] != sets["first"][0]


@pytest.mark.parametrize(
    ("reduction", "minibatches"),
    [("sequence_mean", 4), ("constant_length", 4), ("token_mean", 1)],
)
def test_other_minibatches_are_of_similar_length(reduction: str, minibatches: int) -> None:
    trainer = make(of_reduction(reduction, minibatches=minibatches))
    state = trainer.order.get_state()
    found, sequences = cut_of(trainer)
    assert found == by_length(sequences, 16 // minibatches)
    assert torch.equal(trainer.order.get_state(), state)  # nothing was left to chance


def test_random_minibatches_start_at_ratio_exactly_one() -> None:
    trainer = make(of_reduction("token_mean", steps=3, epochs_per_step=2))
    seen = spied(trainer)
    list(trainer.run())
    assert len(seen) == 3 * 2 * 4
    for step in range(3):
        first, *others = [m["ratio_deviation_max"] for m in seen[8 * step : 8 * step + 8]]
        assert first == 0.0
        assert min(others) > 1e-4


def test_random_minibatches_leave_out_what_may_not_train() -> None:
    """Cut answers are masked: each of the others is in one minibatch, no cut one in any."""
    changes = {"truncated": "mask", "minibatches": 2, "micro_batch_size": 4}
    experience = experience_of(make(two_by_four(reduction="token_mean", **changes)))
    rows = [[row for micro in m for row in micro] for m in experience.minibatches]
    assert [len(m) for m in rows] == [3, 2]
    assert sorted(rows[0] + rows[1]) == [0, 2, 3, 4, 7]


# --- ratios ---


def test_the_first_update_has_ratio_exactly_one_and_the_next_has_not() -> None:
    settings = tiny.rl_candidate(
        steps=3, epochs_per_step=2, minibatches=2, micro_batch_size=4,
        loss={"kind": "ppo_clip", "clip_high": 0.4},
    )  # fmt: skip
    trainer = make(settings)
    seen = spied(trainer)
    list(trainer.run())
    assert len(seen) == 3 * 2 * 2 == trainer.learner.updates == 12
    for step in range(3):
        first, *others = [m["ratio_deviation_max"] for m in seen[4 * step : 4 * step + 4]]
        assert first == 0.0
        assert min(others) > 1e-4


def test_a_rollouts_largest_ratio_is_the_largest_of_its_updates() -> None:
    trainer = make(tiny.rl_candidate(steps=1, epochs_per_step=3))
    seen = spied(trainer)
    ((_, _, metrics),) = trainer.run()
    assert metrics["policy/ratio_max"] == max(m["ratio_max"] for m in seen)
    assert metrics["policy/loss"] == pytest.approx(sum(m["loss"] for m in seen) / 3)


def test_sampling_at_a_temperature_still_starts_at_ratio_one() -> None:
    trainer = make(tiny.rl_candidate(temperature=0.5, steps=2))
    seen = spied(trainer)
    metrics = [m for _, _, m in trainer.run()]
    assert [m["ratio_deviation_max"] for m in seen] == [0.0, 0.0]
    assert max(m["policy/sampler_mismatch_nats"] for m in metrics) < 1e-5


def test_without_learning_nothing_drifts() -> None:
    policy = tiny.llama()
    before = tiny.weights_of(policy)
    trainer = make(tiny.rl_candidate(learning_rate=1e-30, steps=4), policy=policy)
    metrics = [m for _, _, m in trainer.run()]
    assert tiny.same_weights(policy, before)
    assert all(m["policy/kl_nats"] == 0 for m in metrics)
    assert all(0 < m["policy/sampler_mismatch_nats"] < 2e-6 for m in metrics)


def test_same_seed_same_weights_other_seed_others() -> None:
    found = []
    for seed in (0, 0, 1):
        policy = tiny.llama()
        list(make(policy=policy, seed=seed).run())
        found.append(tiny.weights_of(policy))
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])
    assert not all(torch.equal(found[0][k], found[2][k]) for k in found[0])


def test_the_seed_and_the_rollout_decide_the_answers() -> None:
    """One prompt, so that its order says nothing."""

    def answers_of(trainer: RlTrainer) -> list[list[int]]:
        sequences = trainer.collect().sequences
        return [
            row[mask].tolist()
            for row, mask in zip(sequences.response_ids, sequences.response_mask, strict=True)
        ]

    one, again, other = (make(prompts=[[5]], seed=seed) for seed in (0, 0, 1))
    first = answers_of(one)
    assert answers_of(again) == first
    assert answers_of(other) != first
    assert answers_of(one) != first  # the next rollout


# --- checks before the first update ---


def refuse(words: str, trainer: RlTrainer) -> None:
    before = tiny.weights_of(trainer.policy)
    with pytest.raises(StageFailed, match=words):
        next(trainer.run())
    assert tiny.same_weights(trainer.policy, before)
    assert trainer.learner.updates == 0


def test_dropout_is_refused() -> None:
    refuse(
        "ratio to the sampling policy is off 1",
        make(policy=tiny.gpt2(dropout=0.1), start=tiny.gpt2()),
    )
    next(make(policy=tiny.gpt2(), start=tiny.gpt2()).run())


def test_a_start_that_is_not_where_the_policy_starts_is_refused() -> None:
    refuse("differ from the reference's", make(start=tiny.llama(seed=1)))


def test_a_sampler_at_another_temperature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = rollouts.sample
    monkeypatch.setattr(
        rollouts, "sample", lambda *a, **o: original(*a, **(o | {"temperature": 0.8}))
    )
    refuse("sampler and trainer differ", make())


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row[:-1] if len(row) > 1 else row,  # the end token is left out
        lambda row: [*row, tiny.PAD],  # a padding token counts
        lambda row: row[::-1],
    ],
)
def test_a_mask_that_selects_other_tokens_is_refused(
    damage: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaged(Sequences):
        @classmethod
        def from_rows(cls, prompts: Any, responses: Any, pad_id: int) -> Sequences:
            return Sequences.from_rows(prompts, [damage(row) for row in responses], pad_id)

    monkeypatch.setattr(rl, "Sequences", Damaged)
    refuse("the response mask selects", make())


# --- constants and losses by value ---


def answers() -> tuple[list[list[int]], list[Completion]]:
    """Four prompts with two answers each, of different lengths."""
    rows = [
        [7, 1],
        [9, 8, 3, 4, 5],
        [1],
        [7, 7, 7, 1],
        [15, 16, 1],
        [3],
        [4, 6, 8, 10, 12, 14],
        [5, 1],
    ]
    prompts = [prompt for prompt in PROMPTS[:4] for _ in range(2)]
    return prompts, [Completion(row, [-1.0] * len(row), row[-1] == tiny.EOS) for row in rows]


SCORES = torch.tensor([1.0, -2.0, 0.5, 0.5, 3.0, 0.0, -1.0, 4.0])


def experience_of(trainer: RlTrainer) -> Experience:
    return trainer._constants(Rollout(*answers(), SCORES, {}))


def two_by_four(**changes: Any) -> config.RlCandidate:
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "micro_batch_size": 8}
    return tiny.rl_candidate(**(sizes | changes))


def logprob_rows(model: PreTrainedModel, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs of the tokens of each answer, one unpadded sequence at a time."""
    return [
        tiny.token_logps(model, prompt, completion.ids, temperature)
        for prompt, completion in zip(*answers(), strict=True)
    ]


def whole_loss(trainer: RlTrainer, experience: Experience) -> Tensor:
    """The policy's loss on all rows that it may see, as one batch; detached."""
    rows = [row for minibatch in experience.minibatches for micro in minibatch for row in micro]
    denominator = trainer._denominator(experience, rows)
    return trainer._policy_loss(experience, rows, denominator).loss.detach()


def rows_of(table: Tensor, experience: Experience) -> list[Tensor]:
    return [row[m] for row, m in zip(table, experience.sequences.response_mask, strict=True)]


def close(found: Tensor | float, expected: Tensor | float, atol: float = 2e-5) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found).float(), torch.as_tensor(expected).float(), atol=atol, rtol=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_in_the_reward_lowers_each_token_by_what_is_to_come(temperature: float) -> None:
    kl = {"where": "reward", "estimator": "k1", "coef": 0.3}
    policy, reference = tiny.llama(0), tiny.llama(1)
    settings = two_by_four(advantage="reinforce", kl=kl, temperature=temperature)
    trainer = make(settings, policy=policy, reference=reference)
    experience = experience_of(trainer)
    old, ref = logprob_rows(policy, temperature), logprob_rows(reference, temperature)
    # The loss has no term for it: at ratio 1 it is minus the mean advantage.
    mask = experience.sequences.response_mask
    close(whole_loss(trainer, experience), -experience.advantages[mask].mean())
    for i in range(8):
        close(rows_of(experience.old_logprobs, experience)[i], old[i])
        close(rows_of(experience.ref_logprobs, experience)[i], ref[i])
        penalties = 0.3 * (old[i] - ref[i])
        expected = SCORES[i] - penalties.flip(0).cumsum(0).flip(0)
        close(rows_of(experience.advantages, experience)[i], expected)
    kl_nats = (
        sum(float(((r - o).exp() - 1 + o - r).sum()) for o, r in zip(old, ref, strict=True)) / 8
    )
    assert experience.metrics["policy/kl_reference_nats"] == pytest.approx(kl_nats, rel=1e-4)
    assert experience.metrics["policy/kl_nats"] == 0  # to the start, which is the policy


def test_kl_in_the_loss_leaves_the_advantages_and_adds_its_term() -> None:
    policy, reference = tiny.llama(0), tiny.llama(1)
    found = {}
    for kl in (None, {"where": "loss", "estimator": "k3", "coef": 0.3}):
        trainer = make(two_by_four(advantage="reinforce", kl=kl), reference=kl and reference)
        experience = experience_of(trainer)
        for i, row in enumerate(rows_of(experience.advantages, experience)):
            close(row, SCORES[i].expand(len(row)))
        found[kl is not None] = whole_loss(trainer, experience)
    old, ref = torch.cat(logprob_rows(policy)), torch.cat(logprob_rows(reference))
    k3 = (ref - old).exp() - 1 - (ref - old)
    close(
        found[True] - found[False], 0.3 * k3.sum() / len(old)
    )  # 8 answers times their mean length
    metrics = trainer._policy_loss(experience, list(range(8)), 8.0).metrics
    close(metrics["kl_ref_nats"], k3.mean())
    # At ratio 1 the surrogate is minus the advantage of every token.
    tokens = torch.cat([SCORES[i].expand(len(c.ids)) for i, c in enumerate(answers()[1])])
    close(found[False], -tokens.sum() / len(tokens))


@pytest.mark.parametrize(
    ("reduction", "constant"),
    [
        ("token_mean", None),
        ("sequence_mean", None),
        ("constant_length", "batch_mean"),
        ("constant_length", "max_response_tokens"),
    ],
)
def test_the_clipped_loss_of_a_changed_policy_by_hand(reduction: str, constant: str | None) -> None:
    """Half of the rollout is a minibatch; the constant length is the whole rollout's mean, or 6."""
    policy = tiny.llama(0)
    settings = two_by_four(
        reduction=reduction, length_constant=constant, minibatches=2, micro_batch_size=4,
        loss={"kind": "ppo_clip", "clip_high": 0.3},
    )  # fmt: skip
    trainer = make(settings, policy=policy)
    experience = experience_of(trainer)
    old = logprob_rows(policy)
    tiny.shift(policy)
    new = logprob_rows(policy)
    advantages = [1.5, -1.5, 0, 0, 1.5, -1.5, -2.5, 2.5]  # score minus its pair's mean
    rows = [row for micro in experience.minibatches[1] for row in micro]
    per_row, clipped = [], 0
    for i in rows:
        ratio, a = (new[i] - old[i]).exp(), advantages[i]
        objective = torch.minimum(ratio * a, ratio.clamp(0.8, 1.3) * a)
        clipped += int((objective < ratio * a).sum())
        per_row.append(-objective)
    assert clipped > 0
    total = torch.cat(per_row).sum()
    lengths = [len(c.ids) for c in answers()[1]]
    expected = {
        "token_mean": total / sum(lengths[i] for i in rows),
        "sequence_mean": torch.stack([row.mean() for row in per_row]).mean(),
        "batch_mean": total / (4 * sum(lengths) / 8),
        "max_response_tokens": total / (4 * 6),
    }[constant or reduction]
    denominator = trainer._denominator(experience, rows)
    output = trainer._policy_loss(experience, rows, denominator)
    close(output.loss.detach(), expected)
    assert float(output.metrics["clip_fraction"]) == pytest.approx(
        clipped / sum(lengths[i] for i in rows)
    )


def test_the_entropy_bonus_by_hand() -> None:
    policy = tiny.llama(0)
    found = {}
    for coef in (0.0, 0.5):
        trainer = make(two_by_four(entropy_coef=coef, temperature=0.7), policy=policy)
        experience = experience_of(trainer)
        found[coef] = float(whole_loss(trainer, experience))
    entropies = []
    for prompt, completion in zip(*answers(), strict=True):
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + completion.ids])).logits[0] / 0.7
        p = logits[len(prompt) - 1 : -1].softmax(-1)
        entropies.append(-(p * p.log()).sum(-1))
    assert found[0.5] - found[0.0] == pytest.approx(
        -0.5 * float(torch.cat(entropies).mean()), abs=2e-5
    )


def test_values_advantages_and_the_value_loss_by_hand() -> None:
    critic = new_critic()
    settings = two_by_four(
        advantage={"kind": "gae", "gae_lambda": 0.9, "gamma": 0.8}, value=tiny.value_settings(coef=0.5),
    )  # fmt: skip
    trainer = make(settings, critic=critic)
    experience = experience_of(trainer)
    assert experience.values is not None
    assert experience.returns is not None
    errors, values_all, returns_all = [], [], []
    for i, (prompt, completion) in enumerate(zip(*answers(), strict=True)):
        with torch.no_grad():
            hidden = critic.backbone(torch.tensor([prompt + completion.ids])).last_hidden_state[0]
            v = (hidden @ critic.head.weight[0])[len(prompt) - 1 : -1]
        advantage, later = [], 0.0
        for t in reversed(range(len(v))):
            reward = float(SCORES[i]) if t == len(v) - 1 else 0.0
            follow = float(v[t + 1]) if t < len(v) - 1 else 0.0
            later = reward + 0.8 * follow - float(v[t]) + 0.8 * 0.9 * later
            advantage.insert(0, later)
        close(rows_of(experience.values, experience)[i], v)
        close(rows_of(experience.advantages, experience)[i], torch.tensor(advantage), atol=1e-4)
        close(rows_of(experience.returns, experience)[i], torch.tensor(advantage) + v, atol=1e-4)
        errors.append(torch.tensor(advantage).square())
        values_all.append(v)
        returns_all.append(torch.tensor(advantage) + v)
    rows = list(range(8))
    loss = trainer._value_loss(experience, rows, trainer._denominator(experience, rows)).loss
    close(loss.detach(), 0.5 * 0.5 * torch.cat(errors).mean(), atol=1e-4)
    values, returns = torch.cat(values_all), torch.cat(returns_all)
    explained = 1 - float((returns - values).var() / returns.var())
    assert experience.metrics["value/explained_variance"] == pytest.approx(explained, abs=1e-4)


def test_whitened_advantages_have_mean_zero_and_deviation_one() -> None:
    experience = experience_of(make(two_by_four(advantage="reinforce", whiten_advantages=True)))
    chosen = experience.advantages[experience.sequences.response_mask]
    assert float(chosen.mean()) == pytest.approx(0, abs=1e-6)
    assert float(chosen.std()) == pytest.approx(1, abs=1e-5)


def test_a_group_without_spread_teaches_nothing_and_is_counted() -> None:
    experience = experience_of(make(two_by_four(advantage="group_std")))
    found = rows_of(experience.advantages, experience)
    assert not found[2].any()
    assert not found[3].any()
    # 1 and -2: deviations of 1.5 from their mean over 2.1213, the deviation with ddof 1.
    close(found[0], torch.full((2,), 0.70711), atol=1e-5)
    assert experience.metrics["policy/zero_spread_groups"] == 0.25


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant_length"])
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_gradient_does_not_depend_on_the_micro_batches(reduction: str, where: str) -> None:
    gradients = []
    for size in (8, 4, 2, 1):
        policy, critic = tiny.llama(0), new_critic()
        settings = two_by_four(
            advantage="gae", value=tiny.value_settings(), micro_batch_size=size, reduction=reduction,
            kl={"where": where, "estimator": "k2", "coef": 0.2}, entropy_coef=0.1,
        )  # fmt: skip
        trainer = make(settings, policy=policy, reference=tiny.llama(1), critic=critic)
        experience = experience_of(trainer)
        rows = [row for micro in experience.minibatches[0] for row in micro]
        denominator = trainer._denominator(experience, rows)
        for micro in experience.minibatches[0]:
            assert len(micro) == size
            trainer._policy_loss(experience, micro, denominator).loss.backward()
            trainer._value_loss(experience, micro, denominator).loss.backward()
        both = [*policy.parameters(), *critic.parameters()]
        gradients.append(torch.cat([p.grad.flatten() for p in both if p.grad is not None]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=2e-5, rtol=1e-4)
    assert float(gradients[0].norm()) > 0.1


# --- the critic's warm-up ---


def test_value_warm_up_trains_the_critic_and_leaves_the_policy() -> None:
    policy, critic = tiny.llama(), new_critic()
    settings = tiny.rl_candidate(
        advantage="gae", value=tiny.value_settings(warmup_steps=3), steps=1
    )
    trainer = make(settings, policy=policy, critic=critic)
    before, critic_before = tiny.weights_of(policy), tiny.weights_of(critic)
    policy_updates = spied(trainer)
    critic_updates = spied(trainer, "critic_learner")
    original, at_first_step = trainer._policy_update, []

    def first(*arguments: Any) -> dict[str, float]:
        at_first_step.append(tiny.same_weights(policy, before))
        return original(*arguments)

    trainer._policy_update = first  # type: ignore[method-assign]
    ((step, _, metrics),) = trainer.run()
    assert at_first_step == [True]
    assert (step, len(policy_updates), len(critic_updates)) == (1, 1, 4)
    assert not tiny.same_weights(critic, critic_before)
    assert not tiny.same_weights(policy, before)
    assert {"value/loss", "value/explained_variance", "policy/loss"} <= metrics.keys()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_non_finite_loss_stops_with_the_name_of_the_batch(wrong: float) -> None:
    policy = tiny.llama()
    before = tiny.weights_of(policy)
    trainer = make(policy=policy)
    loss = trainer.loss
    trainer.loss = lambda logprobs, old_logprobs, advantages, response_mask, **options: LossOutput(
        wrong * loss(logprobs, old_logprobs, advantages, response_mask, **options).loss, {}
    )
    words = rf"the loss is -?{wrong} at update 1, batch rollout 1, epoch 1, minibatch 1"
    trainer.estimator = lambda rewards: Advantages(torch.ones_like(rewards), None, {})
    with pytest.raises(StageFailed, match=words):
        next(trainer.run())
    assert tiny.same_weights(policy, before)


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_a_score_that_is_not_finite_stops_and_shows_the_answer(wrong: float) -> None:
    """Before anything is made of it: the best of a group would be the NaN."""

    def broken(prompts: Sequence[list[int]], texts: Sequence[str], ended: Any) -> Tensor:
        return torch.where(torch.arange(len(texts)) == 5, wrong, 1.0)

    refuse(
        rf"score of an answer is {wrong} in draw 1\n  answer: '.*' to prompt ids \[",
        make(score=broken),
    )


# --- answers that were cut ---


def one_kept_one_cut(**changes: Any) -> tuple[RlTrainer, Experience]:
    """One prompt, an answer of 4 tokens that ended and one of 6 that was cut; scores 3 and -1."""
    settings = tiny.rl_candidate(
        **{
            "prompts_per_step": 1, "samples_per_prompt": 2, "micro_batch_size": 2,
            "truncated": "mask", "advantage": "reinforce",
        } | changes
    )  # fmt: skip
    trainer = make(settings)
    completions = [
        Completion([7, 7, 7, 1], [-1.0] * 4, True),
        Completion([4, 6, 8, 10, 12, 14], [-1.0] * 6, False),
    ]
    rollout = Rollout([[5], [5]], completions, torch.tensor([3.0, -1.0]), {})
    return trainer, trainer._constants(rollout)


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({"reduction": "token_mean"}, -3.0),  # 4 tokens of advantage 3, over 4
        ({"reduction": "sequence_mean"}, -3.0),  # one sequence
        ({"length_constant": "batch_mean"}, -12 / 5),  # one sequence of the rollout's 5 tokens
        ({"length_constant": "max_response_tokens"}, -12 / 6),
        ({"reduction": "token_mean", "advantage": "group_mean"}, -2.0),  # the baseline is 1
        ({"reduction": "token_mean", "truncated": "keep"}, -(12 - 6) / 10),
    ],
)
def test_a_masked_answer_is_in_neither_sum_nor_number(changes: dict[str, Any], loss: float) -> None:
    trainer, experience = one_kept_one_cut(**changes)
    assert float(whole_loss(trainer, experience)) == pytest.approx(loss, abs=1e-5)
    assert experience.metrics["policy/truncated_fraction"] == 0.5
    assert experience.metrics.get("policy/kept_fraction", 1.0) == (
        1.0 if changes.get("truncated") == "keep" else 0.5
    )


def cut_all(monkeypatch: pytest.MonkeyPatch, draws: int) -> None:
    """The sampler says of its first batches that every answer was cut."""
    original, calls = rollouts.sample, []

    def cut(*arguments: Any, **options: Any) -> list[Completion]:
        calls.append(1)
        found = original(*arguments, **options)
        return [replace(c, ended=False) for c in found] if len(calls) <= draws else found

    monkeypatch.setattr(rollouts, "sample", cut)


def test_where_all_is_masked_nothing_is_learned_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_all(monkeypatch, draws=1)
    policy = tiny.llama()
    before = tiny.weights_of(policy)
    critic = new_critic()
    settings = tiny.rl_candidate(
        truncated="mask", advantage="gae", value=tiny.value_settings(), whiten_advantages=True,
        correction={"cap": 2.0},
    )  # fmt: skip
    trainer = make(settings, policy=policy, critic=critic)
    steps = trainer.run()
    _, _, metrics = next(steps)
    assert tiny.same_weights(policy, before)
    assert trainer.learner.updates == 0
    assert metrics["policy/kept_fraction"] == 0.0
    assert "policy/loss" not in metrics
    _, _, metrics = next(steps)
    assert trainer.learner.updates == 1
    assert not tiny.same_weights(policy, before)
    assert metrics["policy/ratio_deviation_max"] == 0.0


def test_the_checks_are_made_on_the_first_rollout_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_all(monkeypatch, draws=1)
    trainer = make(
        tiny.rl_candidate(truncated="mask"), policy=tiny.gpt2(dropout=0.1), start=tiny.gpt2()
    )
    steps = trainer.run()
    next(steps)
    with pytest.raises(StageFailed, match="ratio to the sampling policy is off 1"):
        next(steps)


@pytest.mark.parametrize(
    ("truncated", "lost"),
    [
        # Answers 1 (5 tokens), 5 (1 token) and 6 (6 tokens) were cut.
        ({"kind": "missing_eos", "penalty": 2.0}, {1: 2.0, 5: 2.0, 6: 2.0}),
        # The last 2 of 6 tokens cost up to 1.5: 5 tokens half of it, 6 all.
        ({"kind": "soft_overlong", "buffer": 2, "penalty": 1.5}, {1: 0.75, 6: 1.5}),
    ],
)
def test_a_penalty_lowers_the_score_that_is_optimised_and_not_the_one_that_is_shown(
    truncated: dict[str, Any], lost: dict[int, float]
) -> None:
    experience = experience_of(make(two_by_four(advantage="reinforce", truncated=truncated)))
    for i, row in enumerate(rows_of(experience.advantages, experience)):
        close(row, (SCORES[i] - lost.get(i, 0.0)).expand(len(row)))
    assert torch.equal(experience.scores, SCORES)
    assert experience.metrics["policy/proxy"] == pytest.approx(6 / 8)
    assert experience.metrics["policy/truncation_penalty_mean"] == pytest.approx(
        sum(lost.values()) / 8
    )
    assert "policy/kept_fraction" not in experience.metrics


def test_the_value_after_a_cut_answer_is_bootstrapped_and_after_an_ended_one_is_not() -> None:
    critic = new_critic()
    settings = two_by_four(
        advantage={"kind": "gae_bootstrap", "gae_lambda": 0.9, "gamma": 0.8},
        value=tiny.value_settings(), micro_batch_size=4,
    )  # fmt: skip
    experience = experience_of(make(settings, critic=critic))
    follow_on = []
    for i, (prompt, completion) in enumerate(zip(*answers(), strict=True)):
        with torch.no_grad():
            hidden = critic.backbone(torch.tensor([prompt + completion.ids])).last_hidden_state[0]
            v = (hidden @ critic.head.weight[0])[len(prompt) - 1 :]  # one more: after the last
        after = 0.0 if completion.ended else float(v[-1])
        follow_on.append(after)
        advantage, later, n = [], 0.0, len(completion.ids)
        for t in reversed(range(n)):
            reward = float(SCORES[i]) if t == n - 1 else 0.0
            following_value = float(v[t + 1]) if t < n - 1 else after
            later = reward + 0.8 * following_value - float(v[t]) + 0.8 * 0.9 * later
            advantage.insert(0, later)
        close(rows_of(experience.advantages, experience)[i], torch.tensor(advantage), atol=1e-4)
    assert [abs(x) > 0.01 for x in follow_on] == [i in (1, 5, 6) for i in range(8)]


# --- parts around the loss ---


def test_the_correction_multiplies_the_advantages_after_whitening() -> None:
    plain = experience_of(make(two_by_four(whiten_advantages=True)))
    trainer = make(two_by_four(whiten_advantages=True, correction={"cap": 1.2}))
    prompts, completions = answers()
    sampled = [replace(c, logprobs=[-3.0] * len(c.ids)) for c in completions]
    corrected = trainer._constants(Rollout(prompts, sampled, SCORES, {}))
    weights = [(old + 3.0).exp() for old in logprob_rows(tiny.llama())]
    assert any(float(w.max()) > 1.2 for w in weights)
    for i, weight in enumerate(weights):
        expected = rows_of(plain.advantages, plain)[i] * weight.clamp(max=1.2)
        close(rows_of(corrected.advantages, corrected)[i], expected)
    flat = torch.cat(weights)
    found = corrected.metrics
    assert found["policy/capped_fraction"] == pytest.approx(float((flat > 1.2).float().mean()))
    k3 = (flat - 1 - flat.log()).mean()  # on samples of the sampler
    assert found["policy/mismatch_nats"] == pytest.approx(float(k3), rel=1e-4)
    assert "policy/mismatch_nats" not in plain.metrics


def test_clipped_advantages() -> None:
    plain = experience_of(make(two_by_four(advantage="reinforce"))).advantages
    clipped = experience_of(make(two_by_four(advantage="reinforce", clip_advantages=1.25)))
    assert torch.equal(clipped.advantages, plain.clamp(-1.25, 1.25))
    assert float(plain.max()) == 4.0


@pytest.mark.parametrize(
    ("target", "factor"),
    [
        (1e-3, 1 + 0.2 * 8 / 40),  # too far away: up by a fifth of 8 in 40
        (1e6, 1 - 0.2 * 8 / 40),
    ],
)
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_coefficient_is_steered_to_its_target(where: str, target: float, factor: float) -> None:
    """One rollout has one coefficient, in rewards and losses; the next has another."""
    kl = {
        "where": where, "estimator": "k2", "coef": 0.5,
        "target": {"nats": target, "horizon": 40},
    }  # fmt: skip
    trainer = away(two_by_four(advantage="reinforce", kl=kl))
    fixed = away(
        two_by_four(advantage="reinforce", kl={k: v for k, v in kl.items() if k != "target"})
    )
    first, second = experience_of(trainer), experience_of(trainer)
    assert first.metrics["policy/kl_coef"] == 0.5
    assert second.metrics["policy/kl_coef"] == pytest.approx(0.5 * factor)
    close(first.advantages, experience_of(fixed).advantages)
    close(whole_loss(trainer, first), whole_loss(fixed, experience_of(fixed)))
    moved = float(whole_loss(trainer, second) - whole_loss(trainer, first))
    assert (moved > 0.01) == (factor > 1)
    assert (moved < -0.01) == (factor < 1)


def away(settings: config.RlCandidate) -> RlTrainer:
    """A trainer to whose policy the answers are likelier than to its reference."""
    policy, start = tiny.llama(1), tiny.llama(1)
    return make(settings, policy=policy, start=start, reference=tiny.llama())


def test_the_coefficient_follows_the_mean_log_ratio() -> None:
    """Of k1, whose mean is the KL at any distance; here a k3 that says the opposite."""
    kl = {"where": "loss", "estimator": "k2", "coef": 0.5, "target": {"nats": 1.0, "horizon": 40}}
    trainer = make(two_by_four(kl=kl), reference=tiny.llama(1))
    rows = zip(logprob_rows(tiny.llama()), logprob_rows(tiny.llama(1)), strict=True)
    assert sum(float((old - ref).sum()) for old, ref in rows) / 8 < 0.8
    assert experience_of(trainer).metrics["policy/kl_reference_nats"] > 100
    assert trainer.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 8 / 40))


def test_the_target_is_of_the_reference_that_the_term_pulls_to() -> None:
    kl = {"where": "loss", "estimator": "k2", "coef": 0.5, "target": {"nats": 1.0, "horizon": 40}}
    at_reference = make(two_by_four(kl=kl))
    experience_of(at_reference)
    assert at_reference.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 8 / 40))  # it stands on it
    far = away(two_by_four(kl=kl))
    experience_of(far)
    assert far.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 8 / 40))


@pytest.mark.parametrize(("limit", "updates"), [(1e-12, 2), (1e6, 6)])
def test_passes_end_once_the_policy_has_moved_far_enough(limit: float, updates: int) -> None:
    """The first update is at ratio 1, where nothing has moved; the second sees that it has."""
    settings = tiny.rl_candidate(
        steps=2, epochs_per_step=3, minibatches=2, micro_batch_size=4, stop_epochs_nats=limit
    )
    trainer = make(settings)
    metrics = [m for _, _, m in trainer.run()]
    assert [m["policy/updates_per_step"] for m in metrics] == [updates, updates]
    assert trainer.learner.updates == 2 * updates


def test_a_loss_that_does_not_say_how_far_it_moved_cannot_stop_passes() -> None:
    trainer = make(tiny.rl_candidate(epochs_per_step=2, stop_epochs_nats=0.1))
    loss = trainer.loss
    trainer.loss = lambda logprobs, old_logprobs, advantages, response_mask, **options: LossOutput(
        loss(logprobs, old_logprobs, advantages, response_mask, **options).loss, {}
    )
    with pytest.raises(StageFailed, match=r"needs the metric kl_old_nats[\s\S]*leave stop_epochs"):
        next(trainer.run())


@pytest.mark.parametrize(("choice", "counted"), [("keep", range(8)), ("skip", [0, 1, 4, 5, 6, 7])])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_kl_on_groups_without_spread_is_a_choice(
    choice: str, counted: Sequence[int], reduction: str
) -> None:
    """Answers 2 and 3 score the same. What is skipped leaves the sum, not the number."""
    reference = tiny.llama(1)
    kl = {"where": "loss", "estimator": "k3", "coef": 0.3, "zero_spread_groups": choice}
    with_kl = make(two_by_four(kl=kl, reduction=reduction), reference=reference)
    without = make(two_by_four(reduction=reduction))
    term = whole_loss(with_kl, experience_of(with_kl)) - whole_loss(without, experience_of(without))
    old, ref = logprob_rows(tiny.llama(0)), logprob_rows(reference)
    rows = [(r - o).exp() - 1 - (r - o) for o, r in zip(old, ref, strict=True)]
    if reduction == "token_mean":
        expected = sum(rows[i].sum() for i in counted) / sum(map(len, rows))
    else:
        expected = sum(rows[i].mean() for i in counted) / 8
    close(term, 0.3 * expected)


def test_spread_is_that_of_the_scores_that_are_optimised() -> None:
    """Answers 2 and 3 tie until a penalty on length tells them apart."""
    kl = {"where": "loss", "estimator": "k3", "coef": 0.3, "zero_spread_groups": "skip"}
    penalised = {"kind": "soft_overlong", "buffer": 4, "penalty": 1.0}
    for truncated, counts in (("keep", False), (penalised, True)):
        experience = experience_of(make(two_by_four(kl=kl, truncated=truncated)))
        assert bool(experience.kl_mask[2:4].any()) == counts


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_full_kl_in_the_loss_by_hand(temperature: float) -> None:
    policy, reference = tiny.llama(0), tiny.llama(1)
    kl = {"where": "loss", "estimator": "full", "coef": 0.3}
    changes = {"advantage": "reinforce", "temperature": temperature, "reduction": "token_mean"}
    with_kl = make(two_by_four(kl=kl, **changes), policy=policy, reference=reference)
    without = make(two_by_four(**changes))
    experience = experience_of(with_kl)
    term = whole_loss(with_kl, experience) - whole_loss(without, experience_of(without))
    per_token = []
    for prompt, completion in zip(*answers(), strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt + completion.ids])
            p, q = (
                (m(ids).logits[0, len(prompt) - 1 : -1] / temperature).softmax(-1)
                for m in (policy, reference)
            )
        per_token.append((p * (p / q).log()).sum(-1))
    close(term, 0.3 * torch.cat(per_token).mean())
    rows = list(range(8))
    found = with_kl._policy_loss(experience, rows, with_kl._denominator(experience, rows))
    close(found.metrics["kl_ref_nats"], torch.cat(per_token).mean())
    found.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in reference.parameters())


# --- references ---


def test_how_far_the_reference_is_is_logged_where_the_loss_says_it() -> None:
    """0 before the first update, which starts at the reference, and more after it."""
    kl = {"where": "loss", "estimator": "k3", "coef": 0.1}
    trainer = make(tiny.rl_candidate(kl=kl, steps=1, epochs_per_step=2))
    seen = spied(trainer)
    ((_, _, metrics),) = trainer.run()
    assert seen[0]["kl_ref_nats"] == 0.0
    assert seen[1]["kl_ref_nats"] > 1e-5
    assert metrics["policy/kl_ref_nats"] == pytest.approx(seen[1]["kl_ref_nats"] / 2)
    for other in (None, {"where": "reward", "estimator": "k1", "coef": 0.1}):
        ((_, _, metrics),) = make(tiny.rl_candidate(kl=other, steps=1)).run()
        assert "policy/kl_ref_nats" not in metrics


def test_another_reference_than_the_start() -> None:
    """reference: initial, in a later round: it trains, with two KLs told apart."""
    settings = tiny.rl_candidate(
        steps=2, reference="initial", kl={"where": "loss", "estimator": "k3", "coef": 0.1}
    )
    reference = tiny.llama(1)
    before = tiny.weights_of(reference)
    metrics = [m for _, _, m in make(settings, reference=reference).run()]
    assert metrics[0]["policy/kl_nats"] == 0
    assert metrics[0]["policy/kl_reference_nats"] > 1
    assert metrics[1]["policy/kl_nats"] > 0
    assert tiny.same_weights(reference, before)
    previous = tiny.rl_candidate(kl={"where": "loss", "estimator": "k3", "coef": 0.1})
    assert "policy/kl_reference_nats" not in next(make(previous).run())[2]


def test_a_following_reference_moves_after_each_step() -> None:
    start, policy = tiny.llama(), tiny.llama()
    settings = tiny.rl_candidate(
        steps=2, reference="ema", reference_decay=0.75,
        kl={"where": "reward", "estimator": "k1", "coef": 0.1},
    )  # fmt: skip
    reference = following(start)
    trainer = make(settings, policy=policy, start=start, reference=reference)
    expected = tiny.weights_of(start)
    metrics = []
    for _, _, found in trainer.run():  # after each step, once the reference has followed
        now = tiny.weights_of(policy)
        expected = {name: 0.75 * expected[name] + 0.25 * now[name] for name in expected}
        assert all(
            torch.allclose(value, expected[name], atol=1e-6)
            for name, value in reference.state_dict().items()
        )
        metrics.append(found)
    assert all(
        torch.allclose(value, expected[name], atol=1e-6)
        for name, value in reference.state_dict().items()
    )
    assert tiny.same_weights(start, tiny.weights_of(tiny.llama()))
    # A quarter of the way behind the policy: nearer to it than the start is.
    assert 0 < metrics[1]["policy/kl_reference_nats"] < metrics[1]["policy/kl_nats"]


# --- chosen answers ---


def test_only_the_best_of_each_group_is_learned_from() -> None:
    policy = tiny.llama()
    settings = two_by_four(
        advantage="best_of_group", loss="nll", reduction="token_mean", micro_batch_size=2
    )
    trainer = make(settings, policy=policy)
    experience = experience_of(trainer)
    rows = sorted(row for m in experience.minibatches for micro in m for row in micro)
    assert rows == [0, 2, 4, 7]  # of equals the first
    assert experience.metrics["policy/kept_fraction"] == 0.5
    assert experience.metrics["policy/proxy"] == pytest.approx(6 / 8)
    chosen = torch.cat([logprob_rows(policy)[i] for i in rows])
    close(whole_loss(trainer, experience), -chosen.mean())


def test_of_chosen_answers_the_ratio_still_starts_at_exactly_one() -> None:
    """Other batches round otherwise: old log-probs are those of the batches that train."""
    settings = tiny.rl_candidate(
        advantage="best_of_group", loss="nll", steps=3, prompts_per_step=6, samples_per_prompt=5,
        micro_batch_size=3, minibatches=2,
    )  # fmt: skip
    trainer = make(settings)
    seen = spied(trainer)
    list(trainer.run())
    assert [m["ratio_deviation_max"] for m in seen[::2]] == [0.0] * 3
    assert min(m["ratio_deviation_max"] for m in seen[1::2]) > 1e-4


# --- memory ---


def loss_and_gradient(trainer: RlTrainer) -> tuple[Tensor, Tensor, Experience]:
    experience = experience_of(trainer)
    rows = list(range(8))
    trainer.policy.train()
    output = trainer._policy_loss(experience, rows, trainer._denominator(experience, rows))
    output.loss.backward()
    gradient = [p.grad.flatten() for p in trainer.policy.parameters() if p.grad is not None]
    return output.loss.detach(), torch.cat(gradient), experience


@pytest.mark.parametrize("how", ["logits_chunk_tokens", "gradient_checkpointing"])
def test_what_saves_memory_changes_neither_loss_nor_gradient(how: str) -> None:
    settings = two_by_four(
        entropy_coef=0.3, temperature=0.7, kl={"where": "loss", "estimator": "k2", "coef": 0.2}
    )
    plain = make(settings, reference=tiny.llama(1))
    if how == "logits_chunk_tokens":
        saving = make(settings, reference=tiny.llama(1), logits_chunk_tokens=3)
    else:
        policy = tiny.llama()
        enable_gradient_checkpointing(policy)
        saving = make(settings, policy=policy, reference=tiny.llama(1))
        assert policy.is_gradient_checkpointing
    expected, found = loss_and_gradient(plain), loss_and_gradient(saving)
    close(found[0], expected[0], atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=2e-5, rtol=1e-4)
    for one, other in zip(
        *(rows_of(e.old_logprobs, e) for _, _, e in (found, expected)), strict=True
    ):
        close(one, other, atol=1e-5)
    assert float(expected[1].norm()) > 0.1


def test_a_run_in_chunks_starts_at_ratio_one() -> None:
    trainer = make(tiny.rl_candidate(steps=2), logits_chunk_tokens=5)
    seen = spied(trainer)
    list(trainer.run())
    assert [m["ratio_deviation_max"] for m in seen] == [0.0, 0.0]


# --- what is kept ---


def test_the_averaged_weights_are_those_of_the_updates() -> None:
    policy = tiny.llama()
    trainer = make(tiny.rl_candidate(ema_decay=0.6, steps=3), policy=policy)
    expected = tiny.weights_of(policy)
    for _ in trainer.run():
        now = tiny.weights_of(policy)
        expected = {name: 0.6 * expected[name] + 0.4 * now[name] for name in now}
    last = tiny.weights_of(policy)
    with trainer.learner.averaged():
        for name, value in policy.state_dict().items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)
        assert not tiny.same_weights(policy, last)
    assert tiny.same_weights(policy, last)


def kl_per_step(policy: PreTrainedModel) -> list[float]:
    """KL to the start after 0, 1, 2, ... steps of a run without a budget."""
    return [
        m["policy/log_ratio_nats"]
        for _, _, m in make(tiny.rl_candidate(steps=5), policy=policy).run()
    ]


def test_a_run_over_its_budget_ends_with_the_last_weights_within_it() -> None:
    kl = kl_per_step(tiny.llama())
    assert sorted(kl) == kl
    policy, weights = tiny.llama(), []
    limit = (kl[2] + kl[3]) / 2
    trainer = make(tiny.rl_candidate(steps=5, kl_budget_nats=limit), policy=policy)
    steps = []
    for step, _, _ in trainer.run():
        steps.append(step)
        weights.append(tiny.weights_of(policy))
    assert steps == [1, 2, 3]  # the third is found to be over it before a fourth
    assert trainer.budget.stopped_at == (2, 2)
    assert tiny.same_weights(policy, weights[1])


def test_the_last_step_is_measured_too() -> None:
    kl = kl_per_step(tiny.llama())
    policy, weights = tiny.llama(), []
    limit = (kl[2] + kl[3]) / 2
    trainer = make(tiny.rl_candidate(steps=3, kl_budget_nats=limit), policy=policy)
    for _ in trainer.run():
        weights.append(tiny.weights_of(policy))
    assert len(weights) == 3
    assert trainer.budget.stopped_at == (2, 2)
    assert tiny.same_weights(policy, weights[1])
    free = make(tiny.rl_candidate(steps=3, kl_budget_nats=1e6))
    list(free.run())
    assert free.budget.stopped_at is None


def test_a_first_step_over_the_budget_is_refused() -> None:
    trainer = make(tiny.rl_candidate(kl_budget_nats=1e-9))
    steps = trainer.run()
    next(steps)
    with pytest.raises(StageFailed, match=r"one step takes the policy .* nats from its start"):
        next(steps)


# --- what the parts hand on ---


def test_whitening_is_over_the_answers_that_train() -> None:
    settings = two_by_four(advantage="reinforce", truncated="mask", whiten_advantages=True)
    experience = experience_of(make(settings))
    kept = torch.cat([rows_of(experience.advantages, experience)[i] for i in (0, 2, 3, 4, 7)])
    assert float(kept.mean()) == pytest.approx(0, abs=1e-6)
    assert float(kept.std()) == pytest.approx(1, abs=1e-5)


def test_an_advantage_with_a_memory_gets_back_what_it_handed_on() -> None:
    trainer = make(two_by_four(advantage="ema_baseline"))
    first, second = experience_of(trainer), experience_of(trainer)
    tokens = torch.cat([SCORES[i].expand(len(c.ids)) for i, c in enumerate(answers()[1])])
    for i, row in enumerate(rows_of(first.advantages, first)):
        close(row, SCORES[i].expand(len(row)))
        close(rows_of(second.advantages, second)[i], row - tokens.mean())
    assert second.metrics["policy/baseline"] == pytest.approx(float(tokens.mean()))


def test_old_log_probs_of_chosen_answers_are_those_of_the_batches_that_train() -> None:
    settings = two_by_four(advantage="best_of_group", loss="nll", micro_batch_size=8)
    trainer = make(settings)
    original = trainer._logprobs

    def by_batch(policy: PreTrainedModel, part: Sequences) -> Tensor:
        return original(policy, part) + 0.125 * len(part)  # as if the batch changed the rounding

    trainer._logprobs = by_batch  # type: ignore[method-assign]
    experience = experience_of(trainer)
    (rows,) = [micro for minibatch in experience.minibatches for micro in minibatch]
    assert sorted(rows) == [0, 2, 4, 7]
    for i in rows:  # four at once, not eight
        close(
            rows_of(experience.old_logprobs, experience)[i],
            logprob_rows(tiny.llama())[i] + 4 * 0.125,
        )
