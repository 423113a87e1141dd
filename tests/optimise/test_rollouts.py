"""Sampling within a stage: each prompt G times side by side, seeds by draw, and groups that are replaced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from rlhf.errors import StageFailed
from rlhf.models.sequences import Sequences
from rlhf.optimise import rollouts as module
from rlhf.optimise.rollouts import PromptStream, Rollout, Rollouts
from rlhf.progress import Clock
from rlhf.rollout import Completion


def make(
    *,
    score: Callable[..., Tensor] = tiny.share_of_w7,
    prompts: list[list[int]] = tiny.PROMPTS,
    seed: int = 0,
    **changes: Any,
) -> Rollouts:
    return Rollouts(
        tiny.rl_candidate(**({"prompts_per_step": 3, "micro_batch_size": 12} | changes)),
        tiny.model_settings(max_response_tokens=6),
        policy=tiny.llama(),
        score=score,
        codec=tiny.codec(),
        prompts=prompts,
        seed=seed,
        clock=Clock("test"),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the sampler was asked, with the prompts and what it answered."""
    seen: list[dict[str, Any]] = []
    original = module.sample

    def record(model: Any, prompts: Any, **options: Any) -> list[Completion]:
        found = original(model, prompts, **options)
        seen.append({**options, "prompts": list(prompts), "found": found})
        return found

    monkeypatch.setattr(module, "sample", record)
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


def test_every_prompt_is_sampled_exactly_g_times_side_by_side(calls: list[dict[str, Any]]) -> None:
    rollouts = make(samples_per_prompt=4)
    for _ in range(4):
        rollouts.collect()
    seen = [call["prompts"] for call in calls]
    for step in seen:
        assert len(step) == 12
        assert all(step[i] == step[i - i % 4] for i in range(12))
        assert set(Counter(map(tuple, step)).values()) == {4}
    # Six prompts, three a step: every two steps see each prompt G times.
    for first, second in ((0, 1), (2, 3)):
        together = Counter(map(tuple, seen[first] + seen[second]))
        assert together == {tuple(p): 4 for p in tiny.PROMPTS}


def test_each_draw_has_a_seed_of_its_own_and_so_has_each_run(calls: list[dict[str, Any]]) -> None:
    for seed in (0, 1):
        rollouts = make(prompts=[[5]], seed=seed, resample_batches=2)
        for _ in range(3):
            rollouts.collect()
    by_run = [[c["seed"] for c in calls[: len(calls) // 2]], [c["seed"] for c in calls[-3:]]]
    assert len(set(by_run[0])) == len(by_run[0])
    answers = [tuple(tuple(c.ids) for c in call["found"]) for call in calls]
    assert len(set(answers[:3])) == 3  # one prompt only: the seed alone tells the draws apart
    make(prompts=[[5]], seed=0).collect()
    assert tuple(tuple(c.ids) for c in calls[-1]["found"]) == answers[0]


def test_another_run_draws_with_other_seeds(calls: list[dict[str, Any]]) -> None:
    for seed in (0, 1):
        make(prompts=[[5]], seed=seed).collect()
    one, other = calls
    assert one["seed"] != other["seed"]
    assert [c.ids for c in one["found"]] != [c.ids for c in other["found"]]


def test_the_sampler_is_asked_as_declared(calls: list[dict[str, Any]]) -> None:
    make(temperature=0.6).collect()
    (call,) = calls
    assert (call["temperature"], call["max_new_tokens"]) == (0.6, 6)
    assert (call["eos_id"], call["pad_id"], call["dtype"]) == (tiny.EOS, tiny.PAD, "float32")


def test_a_rollout_knows_what_ended_and_how_many_tokens_it_has() -> None:
    completions = [Completion([7, 1], [-1.0] * 2, True), Completion([8, 9, 3], [-1.0] * 3, False)]
    rollout = Rollout([[5], [5]], completions, torch.tensor([1.0, 2.0]), {})
    assert rollout.ended.tolist() == [True, False]
    assert rollout.num_tokens == 5


def test_what_is_logged_of_a_rollout_by_hand() -> None:
    completions = [Completion([7, 1], [-1.0] * 2, True), Completion([8, 9, 3], [-1.0] * 3, False)]
    rollout = Rollout([[5], [6, 4]], completions, torch.tensor([1.0, 4.0]), {"groups": 2.0})
    sequences = Sequences.from_rows(rollout.prompts, [c.ids for c in completions], tiny.PAD)
    nan = float("nan")
    old = torch.tensor([[-1.0, -2.0, nan], [-1.0, -1.0, -3.0]])
    start = torch.tensor([[-2.0, -1.0, nan], [-1.0, -3.0, -3.0]])
    found = rollout.described(sequences, old, start)
    # Log-ratios 1, -1 and 0, 2, 0; k3 of d is exp(-d) - 1 + d.
    k3 = (math.exp(-1) + math.exp(1) - 2) + (math.exp(-2) + 1)
    assert found == pytest.approx(
        {
            "policy/proxy": 2.5,
            "policy/proxy_std": 1.5,
            "policy/kl_nats": k3 / 2,
            "policy/log_ratio_nats": 1.0,
            "policy/length_tokens": 2.5,
            "policy/ended_fraction": 0.5,
            "policy/groups": 2.0,
        }
    )


@pytest.mark.parametrize(("declared", "asked"), [(None, 12), (5, 5)])
def test_answers_in_flight_at_once(
    declared: int | None, asked: int, calls: list[dict[str, Any]]
) -> None:
    make(sampling_batch_size=declared).collect()
    assert [call["batch_size"] for call in calls] == [asked]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_refused_with_its_answer(wrong: float) -> None:
    seen: list[str] = []

    def broken(prompts: Sequence[list[int]], texts: Sequence[str], ended: Any) -> Tensor:
        seen.append(f"answer: {texts[9]!r} to prompt ids {prompts[9]}")
        assert len({*texts}) > 3
        return torch.where(torch.arange(len(texts)) >= 9, wrong, 0.0)

    with pytest.raises(StageFailed, match=f"score of an answer is {wrong} in draw 1\n") as caught:
        make(score=broken).collect()
    assert seen[0] in str(caught.value)


def test_what_is_scored_is_what_was_sampled(calls: list[dict[str, Any]]) -> None:
    asked: list[tuple[Any, ...]] = []

    def score(prompts: Sequence[list[int]], texts: Sequence[str], ended: Sequence[bool]) -> Tensor:
        asked.append((list(prompts), list(texts), list(ended)))
        return torch.arange(len(texts)).float()

    make(score=score).collect()
    (call,), ((prompts, texts, ended),) = calls, asked
    assert prompts == call["prompts"]
    assert texts == [tiny.codec().decode(c.ids) for c in call["found"]]
    assert ended == [c.ended for c in call["found"]]
    assert set(ended) == {True, False}


# --- dynamic sampling ---


class Spread:
    """Scores by draw and group: the groups named have spread, all others tie."""

    def __init__(self, *draws: set[int], size: int = 4) -> None:
        self.draws, self.size, self.count = draws, size, 0

    def __call__(self, prompts: Sequence[list[int]], texts: Any, ended: Any) -> Tensor:
        with_spread = self.draws[self.count] if self.count < len(self.draws) else set()
        self.count += 1
        groups = len(prompts) // self.size
        scores = torch.full((groups, self.size), 10.0 * self.count)
        for group in with_spread:
            scores[group, 0] += 1
        return (scores + torch.arange(groups)[:, None]).flatten()


def scores_of(rollout: Rollout) -> list[float]:
    """The first score of each group: 10 * draw + group, 1 more where it has spread."""
    return rollout.scores.view(-1, 4)[:, 1].tolist()


def resampled(batches: int, groups: int, spread: int) -> Any:
    """Metrics of that many draws, `spread` groups of which have spread; draw d scores 10 d + 1 and 1/12 each."""
    drawn = sum(10 * (d + 1) + 1 for d in range(batches)) / batches + spread / 12 / batches
    return pytest.approx(
        {"rollout_batches": float(batches), "groups": float(groups), "proxy_drawn": drawn}
    )


def test_groups_without_spread_are_replaced_in_order(calls: list[dict[str, Any]]) -> None:
    rollouts = make(score=Spread({1}, {0, 2}, {0, 1, 2}), resample_batches=5)
    rollout = rollouts.collect()
    # Draw 1 keeps group 1; draw 2 its groups 0 and 2: three, enough.
    assert scores_of(rollout) == [11.0, 20.0, 22.0]
    assert rollout.metrics == resampled(2, 3, spread=3)
    expected = [calls[0]["prompts"][4]] * 4
    expected += [calls[1]["prompts"][0]] * 4 + [calls[1]["prompts"][8]] * 4
    assert rollout.prompts == expected
    found = calls[0]["found"][4:8] + calls[1]["found"][:4] + calls[1]["found"][8:]
    assert rollout.completions == found
    assert scores_of(rollouts.collect()) == [30.0, 31.0, 32.0]  # nothing is carried over


def test_of_more_than_enough_the_first_are_kept() -> None:
    rollout = make(score=Spread({0, 2}, {0, 1, 2}), resample_batches=5).collect()
    assert scores_of(rollout) == [10.0, 12.0, 20.0]
    assert rollout.metrics == resampled(2, 3, spread=5)
    assert len(rollout.prompts) == len(rollout.completions) == len(rollout.scores) == 12


def test_enough_at_once_draws_once(calls: list[dict[str, Any]]) -> None:
    rollout = make(score=Spread({0, 1, 2}), resample_batches=5).collect()
    assert len(calls) == 1
    assert rollout.metrics == resampled(1, 3, spread=3)


@pytest.mark.parametrize(("bound", "draws"), [(1, 2), (2, 3)])
def test_the_bound_ends_with_a_smaller_batch(
    bound: int, draws: int, calls: list[dict[str, Any]]
) -> None:
    rollout = make(score=Spread({2}, set(), set(), {0, 1, 2}), resample_batches=bound).collect()
    assert len(calls) == draws
    assert scores_of(rollout) == [12.0]
    assert rollout.metrics == resampled(draws, 1, spread=1)


def test_without_any_spread_the_first_batch_stays_as_drawn(calls: list[dict[str, Any]]) -> None:
    rollout = make(score=Spread(), resample_batches=2).collect()
    assert len(calls) == 3
    assert rollout.prompts == calls[0]["prompts"]
    assert rollout.completions == calls[0]["found"]
    assert scores_of(rollout) == [10.0, 11.0, 12.0]
    assert rollout.metrics == resampled(3, 0, spread=0)


def test_without_dynamic_sampling_ties_stay(calls: list[dict[str, Any]]) -> None:
    rollout = make(score=Spread({1})).collect()
    assert len(calls) == 1
    assert scores_of(rollout) == [10.0, 11.0, 12.0]
    assert rollout.metrics == {}
