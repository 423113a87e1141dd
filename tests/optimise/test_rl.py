"""Reinforcement learning: every constant and loss by value, the checks before training, and learning."""

from __future__ import annotations

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
from rlhf.models.scalar import ScalarModel
from rlhf.models.sequences import Sequences
from rlhf.optimise import rl
from rlhf.optimise.rl import Experience, PromptStream, RlTrainer
from rlhf.progress import Clock
from rlhf.rollout import Completion

PROMPTS = [[5], [6, 7], [8, 9, 10], [11, 3], [12], [13, 14, 15, 16]]
WANTED = "w7"


def share_of_wanted(
    prompts: Sequence[list[int]], texts: Sequence[str], ended: Sequence[bool]
) -> Tensor:
    """The share of an answer's words that are w7; an empty answer has none."""
    return torch.tensor([t.split().count(WANTED) / max(1, len(t.split())) for t in texts])


def make(
    settings: config.RlCandidate | None = None,
    *,
    policy: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
    critic: ScalarModel | None = None,
    score: Callable[..., Tensor] = share_of_wanted,
    prompts: list[list[int]] = PROMPTS,
    seed: int = 0,
) -> RlTrainer:
    return RlTrainer(
        settings or tiny.rl_candidate(),
        tiny.model_settings(max_response_tokens=6),
        policy=policy if policy is not None else tiny.llama(),
        reference=reference if reference is not None else tiny.llama(),
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


# --- prompts ---


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    stream = PromptStream([[i] for i in range(10)], seed=0)
    taken = [
        stream.take(4) for _ in range(5)
    ]  # 20 prompts: two rounds, in steps that do not divide
    flat = [prompt[0] for step in taken for prompt in step]
    assert sorted(flat[:10]) == list(range(10)) == sorted(flat[10:])
    assert flat[:10] != flat[10:]
    assert flat[:10] != list(range(10))
    again = PromptStream([[i] for i in range(10)], seed=0)
    assert [again.take(4) for _ in range(5)] == taken
    assert PromptStream([[i] for i in range(10)], seed=1).take(10) != [[i] for i in flat[:10]]


def test_more_prompts_than_there_are() -> None:
    found = PromptStream([[3], [4], [5]], seed=0).take(7)
    assert sorted(Counter(p[0] for p in found).values()) == [2, 2, 3]


def test_every_prompt_is_sampled_exactly_g_times_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[list[int]]] = []
    original = rl.sample

    def record(model: Any, prompts: Any, **options: Any) -> list[Completion]:
        seen.append(list(prompts))
        return original(model, prompts, **options)

    monkeypatch.setattr(rl, "sample", record)
    trainer = make(
        tiny.rl_candidate(steps=4, prompts_per_step=3, samples_per_prompt=4, micro_batch_size=6)
    )
    list(trainer.run())
    for step in seen:
        assert len(step) == 12
        assert all(step[i] == step[i - i % 4] for i in range(12))
        assert set(Counter(map(tuple, step)).values()) == {4}
    # Six prompts, three a step: every two steps see each prompt G times.
    for first, second in ((0, 1), (2, 3)):
        together = Counter(map(tuple, seen[first] + seen[second]))
        assert together == {tuple(p): 4 for p in PROMPTS}


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


# --- ratios ---


def test_the_first_update_has_ratio_exactly_one_and_the_next_has_not() -> None:
    settings = tiny.rl_candidate(
        steps=3, epochs_per_step=2, minibatches=2, micro_batch_size=4, clip_high=0.4
    )
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
        make(policy=tiny.gpt2(dropout=0.1), reference=tiny.gpt2()),
    )
    next(make(policy=tiny.gpt2(), reference=tiny.gpt2()).run())


def test_a_reference_that_is_not_the_start_is_refused() -> None:
    refuse("differ from the reference's", make(reference=tiny.llama(seed=1)))


def test_a_sampler_at_another_temperature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = rl.sample
    monkeypatch.setattr(rl, "sample", lambda *a, **o: original(*a, **(o | {"temperature": 0.8})))
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
    prompts, completions = answers()
    return trainer._constants(prompts, completions, SCORES)


def two_by_four(**changes: Any) -> config.RlCandidate:
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "micro_batch_size": 8}
    return tiny.rl_candidate(**(sizes | changes))


@torch.no_grad()
def logprob_rows(model: PreTrainedModel, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs of the tokens of each answer, one unpadded sequence at a time."""
    found = []
    for prompt, completion in zip(*answers(), strict=True):
        ids = torch.tensor([prompt + completion.ids])
        logps = (model(ids).logits[0] / temperature).log_softmax(-1)
        start = len(prompt) - 1
        found.append(torch.stack([logps[start + t, i] for t, i in enumerate(completion.ids)]))
    return found


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
    rows, mask = list(range(8)), experience.sequences.response_mask
    loss = trainer._policy_loss(experience, rows, trainer._denominator(experience, rows)).loss
    close(loss.detach(), -experience.advantages[mask].mean())
    for i in range(8):
        close(rows_of(experience.old_logprobs, experience)[i], old[i])
        close(rows_of(experience.ref_logprobs, experience)[i], ref[i])
        penalties = 0.3 * (old[i] - ref[i])
        expected = SCORES[i] - penalties.flip(0).cumsum(0).flip(0)
        close(rows_of(experience.advantages, experience)[i], expected)
    kl_nats = (
        sum(float(((r - o).exp() - 1 + o - r).sum()) for o, r in zip(old, ref, strict=True)) / 8
    )
    assert experience.metrics["policy/kl_nats"] == pytest.approx(kl_nats, rel=1e-4)


def test_kl_in_the_loss_leaves_the_advantages_and_adds_its_term() -> None:
    policy, reference = tiny.llama(0), tiny.llama(1)
    kl = {"where": "loss", "estimator": "k3", "coef": 0.3}
    found = {}
    for coef in (0.0, 0.3):
        settings = two_by_four(advantage="reinforce", kl=kl | {"coef": coef})
        trainer = make(settings, policy=policy, reference=reference)
        experience = experience_of(trainer)
        for i in range(8):
            close(
                rows_of(experience.advantages, experience)[i],
                SCORES[i].expand(len(rows_of(experience.advantages, experience)[i])),
            )
        rows = list(range(8))
        found[coef] = trainer._policy_loss(
            experience, rows, trainer._denominator(experience, rows)
        ).loss
    old, ref = torch.cat(logprob_rows(policy)), torch.cat(logprob_rows(reference))
    k3 = (ref - old).exp() - 1 - (ref - old)
    close(found[0.3] - found[0.0], 0.3 * k3.sum() / len(old))  # 8 answers times their mean length
    # At ratio 1 the surrogate is minus the advantage of every token.
    tokens = torch.cat([SCORES[i].expand(len(c.ids)) for i, c in enumerate(answers()[1])])
    close(found[0.0], -tokens.sum() / len(tokens))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant_length"])
def test_the_clipped_loss_of_a_changed_policy_by_hand(reduction: str) -> None:
    """Half of the rollout is a minibatch; the constant length is the whole rollout's mean."""
    start = tiny.llama(0)
    settings = two_by_four(reduction=reduction, minibatches=2, micro_batch_size=4, clip_high=0.3)
    trainer = make(settings, policy=start)
    experience = experience_of(trainer)
    old = logprob_rows(start)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.add_(0.02 * torch.sign(parameter))
    new = logprob_rows(start)
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
        "constant_length": total / (4 * sum(lengths) / 8),
    }[reduction]
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
        rows = list(range(8))
        denominator = trainer._denominator(experience, rows)
        found[coef] = float(trainer._policy_loss(experience, rows, denominator).loss.detach())
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
        advantage="gae", gae_lambda=0.9, gamma=0.8, value=tiny.value_settings(coef=0.5),
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
        advantage="gae", value=tiny.value_settings(warmup_steps=3), steps=1, gae_lambda=0.95
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


def test_a_non_finite_score_stops_with_the_name_of_the_batch() -> None:
    def broken(prompts: Sequence[list[int]], texts: Sequence[str], ended: Any) -> Tensor:
        return torch.full((len(texts),), float("nan"))

    policy = tiny.llama()
    before = tiny.weights_of(policy)
    with pytest.raises(StageFailed, match=r"the loss is nan at update 1, batch rollout 1, epoch 1"):
        next(make(tiny.rl_candidate(advantage="reinforce"), policy=policy, score=broken).run())
    assert tiny.same_weights(policy, before)


# --- learning ---

RECIPES: dict[str, dict[str, Any]] = {
    "ppo": {
        "advantage": "gae", "gae_lambda": 0.95, "value": tiny.value_settings(clip=0.2),
        "epochs_per_step": 2, "minibatches": 2, "micro_batch_size": 16, "whiten_advantages": True,
        "kl": {"where": "reward", "estimator": "k1", "coef": 0.01},
    },
    "grpo": {
        "advantage": "group_std", "epochs_per_step": 2, "minibatches": 2, "micro_batch_size": 16,
        "kl": {"where": "loss", "estimator": "k3", "coef": 0.01},
    },
    "rloo": {"advantage": "rloo"},
    "reinforce": {"advantage": "reinforce", "loss": "reinforce", "whiten_advantages": True},
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_the_rewarded_word_becomes_frequent(name: str) -> None:
    settings = tiny.rl_candidate(
        **{
            "steps": 15, "prompts_per_step": 8, "samples_per_prompt": 8, "micro_batch_size": 64,
            "learning_rate": 1e-2,
        } | RECIPES[name]
    )  # fmt: skip
    critic = (
        ScalarModel(tiny.llama(7, initializer_range=0.1).base_model) if settings.value else None
    )
    policy, reference = (tiny.llama(0, initializer_range=0.1) for _ in range(2))
    trainer = make(settings, policy=policy, reference=reference, critic=critic)
    rewards = [metrics["policy/proxy"] for _, _, metrics in trainer.run()]
    assert sum(rewards[:2]) / 2 < 0.2
    assert sum(rewards[-2:]) / 2 > 0.5
