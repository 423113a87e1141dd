"""The sum of preference losses: each by hand on a policy that has moved, whatever the split."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.algos.types import LossOutput
from rlhf.errors import StageFailed
from rlhf.optimise import pairs as module
from rlhf.optimise.anchor import following
from rlhf.optimise.pairs import Batch, PairObjective
from rlhf.optimise.preference import PairIds, PreferenceTrainer
from rlhf.optimise.reference import ReferenceCache
from rlhf.progress import Clock

ROWS = [3, 8, 1, 14]
PAIRS = tiny.consistent_pairs()


def make(
    *losses: dict[str, Any],
    refers_to: str = "previous",
    other: PreTrainedModel | None = None,
    pairs: list[PairIds] = PAIRS,
    cache: ReferenceCache | None = None,
    **changes: Any,
) -> PreferenceTrainer:
    """`refers_to`: the reference by its name in pipeline.yaml; `other` is that of initial."""
    start = tiny.llama()
    references = {
        "previous": start, "initial": other, "ema": following(start), "none": None
    }  # fmt: skip
    decay = {"reference_decay": 0.75} if refers_to == "ema" else {}
    return PreferenceTrainer(
        tiny.preference_candidate(losses=list(losses), reference=refers_to, **decay, **changes),
        tiny.model_settings(),
        policy=tiny.llama(),
        start=start,
        reference=references[refers_to],
        pairs=pairs,
        pad_id=tiny.PAD,
        seed=0,
        clock=Clock("test"),
        cache=cache,
    )


def moved(trainer: PreferenceTrainer, size: float = 0.02) -> PreferenceTrainer:
    tiny.shift(trainer.policy, size)
    return trainer


def whole(
    trainer: PreferenceTrainer, rows: list[int] = ROWS, size: int = 4, split: int | None = None
) -> tuple[float, list[LossOutput]]:
    """The loss of a batch, in micro-batches of `split`, and what each reported."""
    objective, found = trainer.objective, []
    batch = objective.batch(trainer.pairs, rows, size)
    step = split or len(rows)
    for first in range(0, len(rows), step):
        found.append(objective.loss(trainer.pairs, rows[first : first + step], batch))
    return sum(float(output.loss.detach()) for output in found), found


# --- by hand ---


class Numbers:
    """Of a pair under a policy and its reference: sums c, r (nats), lengths, and the reference's sums."""

    def __init__(self, pair: PairIds, policy: Any, reference: Any, *, normalized: bool) -> None:
        self.lengths = len(pair.chosen), len(pair.rejected)
        answers = pair.chosen, pair.rejected
        sums = [float(tiny.token_logps(policy, pair.prompt, a).sum()) for a in answers]
        refs = [float(tiny.token_logps(reference, pair.prompt, a).sum()) for a in answers]
        self.means = [s / n for s, n in zip(sums, self.lengths, strict=True)]
        if normalized:
            sums, refs = self.means, [s / n for s, n in zip(refs, self.lengths, strict=True)]
        self.chosen, self.rejected = sums[0] - refs[0], sums[1] - refs[1]


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0)


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


BY_HAND: list[tuple[dict[str, Any], Callable[[Numbers], float]]] = [
    ({"kind": "sigmoid", "beta": 0.25}, lambda n: softplus(-0.25 * (n.chosen - n.rejected))),
    (
        {"kind": "sigmoid", "beta": 0.25, "label_smoothing": 0.2},
        lambda n: (
            0.8 * softplus(-0.25 * (n.chosen - n.rejected))
            + 0.2 * softplus(0.25 * (n.chosen - n.rejected))
        ),
    ),
    ({"kind": "ipo", "beta": 0.25}, lambda n: (n.chosen - n.rejected - 2.0) ** 2),
    ({"kind": "hinge", "beta": 0.25}, lambda n: max(0.0, 1 - 0.25 * (n.chosen - n.rejected))),
    (
        {"kind": "dpop", "beta": 0.25, "penalty": 3.0},
        lambda n: softplus(-0.25 * (n.chosen - n.rejected - 3.0 * max(0.0, -n.chosen))),
    ),
    (
        {"kind": "r_dpo", "beta": 0.25, "alpha": 0.3},
        lambda n: softplus(
            -0.25 * (n.chosen - n.rejected) - 0.3 * (n.lengths[0] - n.lengths[1])
        ),
    ),
    (
        {"kind": "bco_pair", "beta": 0.25},  # the first batch, with a shift of 0
        lambda n: softplus(-0.25 * n.chosen) + softplus(0.25 * n.rejected),
    ),
]  # fmt: skip


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("loss", "expected"), BY_HAND)
def test_the_loss_of_a_changed_policy_by_hand(
    loss: dict[str, Any], expected: Callable[[Numbers], float], normalized: bool
) -> None:
    """The reference is neither the policy nor the start."""
    reference = tiny.llama(1)
    trainer = moved(make(loss, refers_to="initial", other=reference, length_normalized=normalized))
    numbers = [Numbers(PAIRS[i], trainer.policy, reference, normalized=normalized) for i in ROWS]
    value, (output,) = whole(trainer)
    assert value == pytest.approx(sum(map(expected, numbers)) / 4, rel=1e-4)
    beta = loss["beta"]
    margins = [beta * (n.chosen - n.rejected) for n in numbers]
    assert float(output.metrics["margin"]) == pytest.approx(sum(margins) / 4, abs=1e-4)
    assert float(output.metrics["accuracy"]) == sum(m > 0 for m in margins) / 4


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (
            {"kind": "simpo", "beta": 2.0, "gamma": 0.5},
            lambda n: softplus(-2.0 * (n.means[0] - n.means[1]) + 0.5),
        ),
        (
            {"kind": "orpo", "beta": 0.3},
            lambda n: -n.means[0] + 0.3 * softplus(-(log_odds(n.means[0]) - log_odds(n.means[1]))),
        ),
        ({"kind": "sft"}, lambda n: -n.means[0]),
    ],
)
def test_losses_without_a_reference_by_hand(
    loss: dict[str, Any], expected: Callable[[Numbers], float]
) -> None:
    trainer = moved(make(loss, refers_to="none"))
    numbers = [Numbers(PAIRS[i], trainer.policy, tiny.llama(), normalized=False) for i in ROWS]
    value, (output,) = whole(trainer)
    assert value == pytest.approx(sum(map(expected, numbers)) / 4, rel=1e-4)
    # How far log-probs have moved is told against the start even so.
    assert float(output.metrics["chosen_logp_change_nats"]) == pytest.approx(
        sum(n.chosen for n in numbers) / 4, abs=1e-4
    )
    assert float(output.metrics["rejected_logp_change_nats"]) == pytest.approx(
        sum(n.rejected for n in numbers) / 4, abs=1e-4
    )
    assert abs(float(output.metrics["chosen_logp_change_nats"])) > 0.1


def mismatched_kl(
    policy: PreTrainedModel, reference: PreTrainedModel, rows: list[int], *, normalized: bool
) -> float:
    """Mean log-ratio of each prompt with the next pair's chosen answer; not yet held at 0.

    Here all prompts differ; see SHARED for others.
    """
    assert len({tuple(PAIRS[i].prompt) for i in rows}) == len(rows)
    total = 0.0
    for here, after in zip(rows, [*rows[1:], rows[0]], strict=True):
        prompt, answer = PAIRS[here].prompt, PAIRS[after].chosen
        ratio = tiny.token_logps(policy, prompt, answer) - tiny.token_logps(
            reference, prompt, answer
        )
        total += float(ratio.mean() if normalized else ratio.sum())
    return total / len(rows)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_kto_by_hand_with_its_mismatched_kl(swapped: bool, normalized: bool) -> None:
    """Swapped policies turn the log-ratio's sign: a KL above 0 once, held at 0 the other time."""
    loss = {
        "kind": "kto", "beta": 0.25, "desirable_weight": 1.5, "undesirable_weight": 0.5
    }  # fmt: skip
    policy, reference = (tiny.llama(1), tiny.llama()) if swapped else (tiny.llama(), tiny.llama(1))
    trainer = make(loss, refers_to="initial", other=reference, length_normalized=normalized)
    trainer.policy.load_state_dict(policy.state_dict())
    rows = [3, 8, 1, 14, 5]
    raw = mismatched_kl(policy, reference, rows, normalized=normalized)
    assert abs(raw) > 0.05
    kl = max(raw, 0.0)
    assert (kl > 0) == swapped
    batch = trainer.objective.batch(trainer.pairs, rows, 2)
    assert batch.kl_nats is not None
    assert float(batch.kl_nats) == pytest.approx(kl, abs=1e-4)
    expected, right = 0.0, 0
    for i in rows:
        n = Numbers(PAIRS[i], policy, reference, normalized=normalized)
        gains = 0.25 * (n.chosen - kl), -0.25 * (n.rejected - kl)
        expected += 1.5 / (1 + math.exp(gains[0])) + 0.5 / (1 + math.exp(gains[1]))
        right += sum(gain > 0 for gain in gains)
    value, (output,) = whole(trainer, rows, size=2)
    assert value == pytest.approx(expected / 10, rel=1e-4)  # five pairs are ten examples
    assert float(output.metrics["accuracy"]) == pytest.approx(right / 10)


A, B, C = [5], [6, 7], [tiny.PAD, 5]  # C is A to whoever takes its first token for padding
SHARED = [
    PairIds(prompt, pair.chosen[: 1 + i % 3], pair.rejected)
    for i, (prompt, pair) in enumerate(zip((A, A, B, A, C, B), PAIRS[:6], strict=True))
]
SHARED = [PairIds(p.prompt, [8 + i, *p.chosen], p.rejected) for i, p in enumerate(SHARED)]


def kto_of_shared(*, length_normalized: bool = False) -> PreferenceTrainer:
    """A trainer whose log-ratios are above 0, so that nothing is cut off."""
    trainer = make(
        {"kind": "kto", "beta": 0.25}, refers_to="initial", other=tiny.llama(3), pairs=SHARED,
        length_normalized=length_normalized,
    )  # fmt: skip
    trainer.policy.load_state_dict(tiny.llama(4).state_dict())
    return trainer


def kl_of(trainer: PreferenceTrainer, rows: list[int], size: int) -> float:
    batch = trainer.objective.batch(trainer.pairs, rows, size)
    assert batch.kl_nats is not None
    assert batch.kl_nats.shape == ()
    return float(batch.kl_nats)


@pytest.mark.parametrize(
    ("rows", "answers"),
    [
        # Prompts A A B A C B: each with the answer to the next one that is another.
        ([0, 1, 2, 3, 4, 5], [2, 2, 3, 4, 5, 0]),
        ([5, 4, 3, 2, 1, 0], [4, 3, 2, 1, 5, 5]),
        ([1, 0, 3, 2], [2, 2, 2, 1]),
        ([2, 0, 5], [0, 5, 0]),
        ([0, 4], [4, 0]),
    ],
)
@pytest.mark.parametrize("normalized", [False, True])
def test_the_mismatched_answer_is_the_next_one_to_another_prompt(
    rows: list[int], answers: list[int], normalized: bool
) -> None:
    trainer, total = kto_of_shared(length_normalized=normalized), 0.0
    for here, other in zip(rows, answers, strict=True):
        prompt, answer = SHARED[here].prompt, SHARED[other].chosen
        ratio = tiny.token_logps(trainer.policy, prompt, answer)
        ratio = ratio - tiny.token_logps(tiny.llama(3), prompt, answer)
        total += float(ratio.mean() if normalized else ratio.sum())
    assert total / len(rows) > 0.05
    for size in (1, 2, 6):
        assert kl_of(trainer, rows, size) == pytest.approx(total / len(rows), abs=1e-4)


@pytest.mark.parametrize("rows", [[0, 1, 3], [3], [2, 5]])
def test_one_prompt_alone_has_no_mismatch(rows: list[int]) -> None:
    trainer = kto_of_shared()
    assert kl_of(trainer, rows, 2) == 0.0
    expected = 0.0
    for i in rows:
        n = Numbers(SHARED[i], trainer.policy, tiny.llama(3), normalized=False)
        expected += 1 / (1 + math.exp(0.25 * n.chosen)) + 1 / (1 + math.exp(-0.25 * n.rejected))
    assert whole(trainer, rows, size=2)[0] == pytest.approx(expected / (2 * len(rows)), rel=1e-4)


def test_with_shared_prompts_kto_does_not_depend_on_the_micro_batches() -> None:
    rows, found = [1, 3, 0, 5, 4, 2], []
    for split in (6, 3, 1):
        trainer = kto_of_shared()
        value, outputs = whole(trainer, rows, size=split, split=split)
        sum(output.loss for output in outputs).backward()  # type: ignore[union-attr]
        gradient = [p.grad.flatten() for p in trainer.policy.parameters() if p.grad is not None]
        found.append((value, torch.cat(gradient)))
    for value, gradient in found[1:]:
        assert value == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-5, rtol=1e-4)
    assert float(found[0][1].norm()) > 0.01


def test_a_weighted_sum_by_hand() -> None:
    trainer = moved(
        make(
            {"kind": "sigmoid", "beta": 0.25, "weight": 2.0},
            {"kind": "sft", "weight": 0.5},
            {"kind": "kto", "beta": 0.5},
        )
    )
    numbers = [Numbers(PAIRS[i], trainer.policy, tiny.llama(), normalized=False) for i in ROWS]
    kl = max(0.0, mismatched_kl(trainer.policy, tiny.llama(), ROWS, normalized=False))
    dpo = sum(softplus(-0.25 * (n.chosen - n.rejected)) for n in numbers) / 4
    sft = -sum(n.means[0] for n in numbers) / 4
    kto = sum(
        1 / (1 + math.exp(0.5 * (n.chosen - kl))) + 1 / (1 + math.exp(-0.5 * (n.rejected - kl)))
        for n in numbers
    ) / 8  # fmt: skip
    value, (output,) = whole(trainer)
    assert value == pytest.approx(2.0 * dpo + 0.5 * sft + kto, rel=1e-4)
    shares = {key: float(output.metrics[f"{key}_loss"]) for key in ("sigmoid", "sft", "kto")}
    assert shares == pytest.approx({"sigmoid": dpo, "sft": sft, "kto": kto}, rel=1e-4)
    # Metrics of one name are those of the first loss that has them.
    margin = sum(0.25 * (n.chosen - n.rejected) for n in numbers) / 4
    assert float(output.metrics["margin"]) == pytest.approx(margin, abs=1e-4)
    assert float(output.metrics["nll_nats"]) == pytest.approx(sft, rel=1e-4)


def test_one_loss_alone_has_no_share() -> None:
    _, (output,) = whole(make({"kind": "sigmoid", "beta": 0.25}))
    assert not [key for key in output.metrics if key.endswith("_loss")]


# --- splits ---

SUMS: list[list[dict[str, Any]]] = [
    [{"kind": "sigmoid", "beta": 0.1}],
    [{"kind": "kto", "beta": 0.3}],
    [{"kind": "bco_pair", "beta": 0.1}, {"kind": "sft", "weight": 0.3}, {"kind": "kto"}],
]


@pytest.mark.parametrize("losses", SUMS)
def test_the_gradient_does_not_depend_on_the_micro_batches(losses: list[dict[str, Any]]) -> None:
    """Rows in any order and of any length; KTO's reference point is the whole batch's."""
    rows, found = [0, 5, 2, 9, 11, 3, 14, 7], []
    for split in (8, 4, 3, 1):
        trainer = moved(make(*losses))
        value, outputs = whole(trainer, rows, size=split, split=split)
        sum(output.loss for output in outputs).backward()  # type: ignore[union-attr]
        gradient = torch.cat(
            [p.grad.flatten() for p in trainer.policy.parameters() if p.grad is not None]
        )
        counts = [len(rows[i : i + split]) for i in range(0, 8, split)]
        means = {
            key: sum(float(o.metrics[key]) * n for o, n in zip(outputs, counts, strict=True)) / 8
            for key in outputs[0].metrics
        }
        found.append((value, gradient, means))
    for value, gradient, means in found[1:]:
        assert value == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-5, rtol=1e-4)
        assert means == pytest.approx(found[0][2], abs=1e-4)
    assert float(found[0][1].norm()) > 0.1


def test_padding_of_partners_does_not_change_a_pairs_loss() -> None:
    dpo = {"kind": "sigmoid", "beta": 0.1}
    alone, together = moved(make(dpo, pairs=[PAIRS[3]])), moved(make(dpo))
    assert whole(alone, [0])[0] == pytest.approx(whole(together, [3])[0], abs=1e-5)


# --- the running shift ---


def seen_shifts(trainer: PreferenceTrainer) -> tuple[list[float], list[dict[str, float]]]:
    """The shift of each update, and its metrics."""
    shifts: list[float] = []
    original = trainer.objective.batch

    def record(*arguments: Any) -> Batch:
        batch = original(*arguments)
        shifts.append(float(batch.reward_shift))
        return batch

    trainer.objective.batch = record  # type: ignore[method-assign]
    return shifts, [metrics for *_, metrics in trainer.run()]


def test_the_shift_is_the_running_mean_of_earlier_rewards() -> None:
    trainer = make({"kind": "bco_pair", "beta": 0.5}, epochs=2, batch_size=6, micro_batch_size=3)
    shifts, metrics = seen_shifts(trainer)
    sizes = [trainer.objective.shift_count]
    assert sizes == [32]
    assert shifts[0] == 0.0
    levels = [(m["policy/chosen_reward"] + m["policy/rejected_reward"]) / 2 for m in metrics]
    assert max(map(abs, levels)) > 0.05
    # Batches of 6, 6 and 4 pairs, the smallest anywhere in an epoch: two levels tell the order.
    counts = batch_sizes(epochs=2)
    for update in range(1, len(shifts)):
        seen = sum(n * x for n, x in zip(counts[:update], levels[:update], strict=True))
        assert shifts[update] == pytest.approx(seen / sum(counts[:update]), abs=1e-6)


def batch_sizes(epochs: int) -> list[int]:
    """Pairs in each update of that run: the same seed, the same order."""
    trainer = make(
        {"kind": "bco_pair", "beta": 0.5}, epochs=epochs, batch_size=6, micro_batch_size=3
    )
    counts: list[int] = []
    original = trainer.objective.after

    def record(metrics: dict[str, float], num_pairs: int) -> None:
        counts.append(num_pairs)
        original(metrics, num_pairs)

    trainer.objective.after = record  # type: ignore[method-assign]
    list(trainer.run())
    return counts


def test_the_shift_is_in_the_units_of_the_loss_that_reads_it() -> None:
    """Beside a loss with another beta, whose rewards are the ones that are reported."""
    bco = {"kind": "bco_pair", "beta": 0.5}
    trainer = make({"kind": "sigmoid", "beta": 0.05}, bco, epochs=2, batch_size=8)
    shifts, metrics = seen_shifts(trainer)
    levels = [(m["policy/chosen_reward"] + m["policy/rejected_reward"]) / 2 for m in metrics]
    assert shifts[3] == pytest.approx(10 * sum(levels[:3]) / 3, rel=1e-4)
    assert abs(shifts[3]) > 0.01


def test_the_shift_enters_the_loss() -> None:
    trainer = moved(make({"kind": "bco_pair", "beta": 0.25}))
    trainer.objective.after({"reward_level": 1.5}, 2)
    trainer.objective.after({"reward_level": -0.5}, 6)
    numbers = [Numbers(PAIRS[i], trainer.policy, tiny.llama(), normalized=False) for i in ROWS]
    shift = (2 * 1.5 - 6 * 0.5) / 8
    assert shift == 0
    trainer.objective.after({"reward_level": 2.0}, 8)  # now 1
    expected = sum(
        softplus(-(0.25 * n.chosen - 1.0)) + softplus(-(1.0 - 0.25 * n.rejected)) for n in numbers
    ) / 4  # fmt: skip
    assert whole(trainer)[0] == pytest.approx(expected, rel=1e-4)


def test_a_loss_that_reads_the_shift_must_say_where_its_rewards_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(
        chosen_logps: Tensor, reward_shift: Tensor, *, beta: float, denominator: float
    ) -> LossOutput:
        return LossOutput(-(chosen_logps - reward_shift).sum() / denominator, {})

    monkeypatch.setitem(module.PREFERENCE_LOSSES, "hinge", silent)
    trainer = make({"kind": "hinge", "beta": 0.1})
    words = r"hinge reads reward_shift and does not report 'chosen_reward'"
    with pytest.raises(StageFailed, match=words):
        whole(trainer)


# --- references ---


def test_a_following_reference_is_asked_anew() -> None:
    trainer = make({"kind": "sigmoid", "beta": 0.25}, refers_to="ema")
    assert trainer.pairs.ref_chosen is None
    updates = trainer.run()
    next(updates)
    next(updates)  # the reference follows before the second update
    reference = trainer.reference
    assert reference is not None
    numbers = [Numbers(PAIRS[i], trainer.policy, reference, normalized=False) for i in ROWS]
    expected = sum(softplus(-0.25 * (n.chosen - n.rejected)) for n in numbers) / 4
    assert whole(trainer)[0] == pytest.approx(expected, rel=1e-4)
    start = sum(
        softplus(-0.25 * (n.chosen - n.rejected))
        for n in (Numbers(PAIRS[i], trainer.policy, tiny.llama(), normalized=False) for i in ROWS)
    ) / 4  # fmt: skip
    assert abs(start - expected) > 1e-4


def test_a_following_reference_follows_by_its_decay_after_every_update() -> None:
    trainer = make({"kind": "sigmoid", "beta": 0.25}, refers_to="ema")
    expected = tiny.weights_of(tiny.llama())
    reference = trainer.reference
    assert reference is not None
    count = 0
    for _ in trainer.run():
        now = tiny.weights_of(trainer.policy)
        expected = {name: 0.75 * expected[name] + 0.25 * now[name] for name in now}
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)
        count += 1
    assert count == 2


def test_without_a_reference_nothing_of_one_is_computed() -> None:
    trainer = make({"kind": "orpo"}, refers_to="none")
    assert (trainer.pairs.ref_chosen, trainer.pairs.ref_rejected) == (None, None)
    with pytest.raises(ValueError, match="losses: sigmoid: reads 'ref_chosen_logps', which is not"):
        PairObjective(
            tiny.preference_candidate(), tiny.model_settings(),
            policy=tiny.llama(), reference=None, moving=False,
        )  # fmt: skip


def test_margins_are_there_only_where_scores_are() -> None:
    odpo = tiny.online_candidate(losses=[{"kind": "odpo"}])
    given: dict[str, Any] = {
        "policy": tiny.llama(), "reference": tiny.llama(), "moving": False
    }  # fmt: skip
    PairObjective(odpo, tiny.model_settings(), has_margins=True, **given)
    with pytest.raises(ValueError, match="losses: odpo: reads 'margins', which is not available"):
        PairObjective(odpo, tiny.model_settings(), **given)


# --- the cache ---


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    original = PairObjective.all_logps

    def record(self: PairObjective, *arguments: Any) -> Tensor:
        calls.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(PairObjective, "all_logps", record)
    return calls


def test_a_hit_is_what_would_be_computed_and_any_change_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, dpo = counted(monkeypatch), {"kind": "sigmoid", "beta": 0.1}
    first = make(dpo, cache=ReferenceCache(tmp_path))
    assert len(calls) == 2  # chosen and rejected, once: the reference is the start
    plain = make(dpo)
    assert len(calls) == 4
    again = make({"kind": "ipo"}, cache=ReferenceCache(tmp_path))  # another loss, the same numbers
    assert len(calls) == 4
    for one in (first, again):
        for name in ("start_chosen", "start_rejected", "ref_chosen", "ref_rejected"):
            assert torch.equal(getattr(one.pairs, name), getattr(plain.pairs, name)), name
    changed = list(PAIRS)
    changed[5] = PairIds(PAIRS[5].prompt, PAIRS[5].chosen, [*PAIRS[5].rejected[:-1], 4])
    missed = make(dpo, pairs=changed, cache=ReferenceCache(tmp_path))
    assert len(calls) == 6
    assert not torch.equal(missed.pairs.ref_rejected, plain.pairs.ref_rejected)  # type: ignore[arg-type]
    make(dpo, pairs=PAIRS[:-1], cache=ReferenceCache(tmp_path))
    assert len(calls) == 8
    make(dpo, micro_batch_size=2, cache=ReferenceCache(tmp_path))
    assert len(calls) == 10


def test_another_reference_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, dpo = counted(monkeypatch), {"kind": "sigmoid", "beta": 0.1}
    cache = ReferenceCache(tmp_path)
    make(dpo, cache=cache)
    for seed in (1, 2):
        found = make(dpo, refers_to="initial", other=tiny.llama(seed), cache=cache)
        assert len(calls) == 2 + 2 * seed  # the start is there, this reference is not
        expected = [
            float(tiny.token_logps(tiny.llama(seed), p.prompt, p.chosen).sum()) for p in PAIRS
        ]
        assert found.pairs.ref_chosen is not None
        assert found.pairs.ref_chosen.tolist() == pytest.approx(expected, abs=1e-4)
