"""Learning from pairs: ln 2 at the start, the declared loss by hand, every pair once an epoch, learning."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.errors import StageFailed
from rlhf.optimise.preference import PairIds, PreferenceTrainer
from rlhf.progress import Clock


def consistent(count: int = 16) -> list[PairIds]:
    """The answer with more of token 7 is chosen; lengths differ."""
    torch.manual_seed(0)
    pairs = []
    for i in range(count):
        prompt = torch.randint(3, 20, (1 + i % 4,)).tolist()
        chosen = [7] * (1 + i % 3) + [8] * (i % 2) + [tiny.EOS]
        rejected = torch.randint(9, 20, (1 + i % 5,)).tolist() + [tiny.EOS] * (i % 2)
        pairs.append(PairIds(prompt, chosen, rejected))
    return pairs


def make(
    settings: config.PreferenceCandidate | None = None,
    *,
    policy: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
    pairs: list[PairIds] | None = None,
    seed: int = 0,
) -> PreferenceTrainer:
    return PreferenceTrainer(
        settings or tiny.preference_candidate(),
        tiny.model_settings(),
        policy=policy if policy is not None else tiny.llama(),
        reference=reference if reference is not None else tiny.llama(),
        pairs=consistent() if pairs is None else pairs,
        pad_id=tiny.PAD,
        seed=seed,
        clock=Clock("test"),
    )


@torch.no_grad()
def logp(model: PreTrainedModel, prompt: list[int], response: list[int]) -> float:
    """Log-prob of a whole answer, one unpadded sequence."""
    logps = model(torch.tensor([prompt + response])).logits[0].double().log_softmax(-1)
    return sum(float(logps[len(prompt) - 1 + t, i]) for t, i in enumerate(response))


def test_reference_log_probs_by_definition() -> None:
    reference, trainer = tiny.llama(), make()
    for i, pair in enumerate(consistent()):
        chosen = logp(reference, pair.prompt, pair.chosen)
        rejected = logp(reference, pair.prompt, pair.rejected)
        assert float(trainer.ref_chosen[i]) == pytest.approx(chosen, abs=1e-4)
        assert float(trainer.ref_rejected[i]) == pytest.approx(rejected, abs=1e-4)


def test_the_loss_starts_at_ln_2_and_the_reference_stays() -> None:
    trainer = make(tiny.preference_candidate(epochs=3))
    chosen, rejected = trainer.ref_chosen.clone(), trainer.ref_rejected.clone()
    (update, _, first), *_, (last_update, _, last) = trainer.run()
    assert (update, last_update) == (1, 6)
    assert first["policy/loss"] == pytest.approx(math.log(2), abs=1e-5)  # .6931
    assert first["policy/margin"] == pytest.approx(0, abs=1e-5)
    assert last["policy/loss"] < math.log(2) - 0.01
    assert torch.equal(trainer.ref_chosen, chosen)
    assert torch.equal(trainer.ref_rejected, rejected)


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0)


@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_the_loss_of_a_changed_policy_by_hand(loss: str, smoothing: float) -> None:
    policy, reference, pairs = tiny.llama(), tiny.llama(), consistent()
    settings = tiny.preference_candidate(loss=loss, label_smoothing=smoothing, beta=0.25)
    trainer = make(settings, policy=policy, reference=reference)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.sign(parameter))
    rows, expected, margins = [3, 8, 1, 14], 0.0, []
    for i in rows:
        p = pairs[i]
        gain = [
            logp(policy, p.prompt, r) - logp(reference, p.prompt, r) for r in (p.chosen, p.rejected)
        ]
        d = gain[0] - gain[1]
        margins.append(0.25 * d)
        if loss == "ipo":
            expected += (d - 1 / (2 * 0.25)) ** 2
        else:
            h = 0.25 * d
            expected += (1 - smoothing) * softplus(-h) + smoothing * softplus(h)
    output = trainer._loss(rows, 10)  # four of a batch of ten
    assert float(output.loss.detach()) == pytest.approx(expected / 10, rel=1e-4)
    assert float(output.metrics["margin"]) == pytest.approx(sum(margins) / 4, abs=1e-4)
    assert float(output.metrics["accuracy"]) == sum(m > 0 for m in margins) / 4


def used(trainer: PreferenceTrainer) -> list[list[int]]:
    """The rows of every micro-batch, in order."""
    seen: list[list[int]] = []
    original = trainer._loss

    def record(rows: list[int], num_pairs: int) -> Any:
        seen.append(rows)
        return original(rows, num_pairs)

    trainer._loss = record  # type: ignore[method-assign]
    list(trainer.run())
    return seen


def test_every_pair_comes_once_an_epoch_and_epochs_reshuffle() -> None:
    settings = tiny.preference_candidate(epochs=3, batch_size=6, micro_batch_size=2)
    trainer = make(settings, pairs=consistent(15))
    seen = used(trainer)
    assert all(len(rows) <= 2 for rows in seen)
    epochs = [[i for rows in seen for i in rows][15 * e : 15 * e + 15] for e in range(3)]
    for epoch in epochs:
        assert Counter(epoch) == dict.fromkeys(range(15), 1)
    assert epochs[0] != epochs[1]
    assert trainer.total_updates == trainer.learner.updates == 9  # 6 + 6 + 3 pairs an epoch
    again = used(make(settings, pairs=consistent(15)))
    assert seen == again
    assert seen != used(make(settings, pairs=consistent(15), seed=1))


def test_tokens_are_those_of_both_answers() -> None:
    pairs = consistent()
    tokens = sum(tokens for _, tokens, _ in make().run())
    assert tokens == sum(len(p.chosen) + len(p.rejected) for p in pairs)


def test_the_gradient_does_not_depend_on_the_micro_batches() -> None:
    gradients = []
    for size in (8, 4, 1):
        policy = tiny.llama()
        trainer = make(tiny.preference_candidate(micro_batch_size=size), policy=policy)
        rows = [0, 5, 2, 9, 11, 3, 14, 7]
        for start in range(0, 8, size):
            trainer._loss(rows[start : start + size], 8).loss.backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        )
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-5, rtol=1e-4)
    assert float(gradients[0].norm()) > 0.1


def test_consistent_pairs_are_learned() -> None:
    settings = tiny.preference_candidate(epochs=8, learning_rate=3e-3)
    metrics = [m for _, _, m in make(settings).run()]
    early, late = metrics[1], metrics[-1]
    assert late["policy/accuracy"] == 1.0
    assert late["policy/margin"] > early["policy/margin"] + 0.5
    assert late["policy/loss"] < 0.4


def test_swapped_pairs_are_learned_the_other_way() -> None:
    """The sign: what is called chosen becomes likelier than what is called rejected."""
    pairs = [PairIds(p.prompt, p.rejected, p.chosen) for p in consistent()]
    policy, reference = tiny.llama(), tiny.llama()
    list(
        make(
            tiny.preference_candidate(epochs=8, learning_rate=3e-3), policy=policy, pairs=pairs
        ).run()
    )

    def gain(pair: PairIds, response: list[int]) -> float:
        return logp(policy, pair.prompt, response) - logp(reference, pair.prompt, response)

    assert all(gain(p, p.chosen) > gain(p, p.rejected) for p in pairs)


@pytest.mark.parametrize("wrong", ["dropout", "reference"])
def test_a_policy_that_does_not_start_as_the_reference_is_refused(wrong: str) -> None:
    models = {
        "dropout": {"policy": tiny.gpt2(dropout=0.1), "reference": tiny.gpt2(dropout=0.1)},
        "reference": {"reference": tiny.llama(seed=1)},
    }
    with pytest.raises(StageFailed, match="differ from the reference's"):
        make(**models[wrong])
    make(policy=tiny.gpt2(), reference=tiny.gpt2())


def test_a_non_finite_loss_names_the_pairs() -> None:
    policy = tiny.llama()
    trainer = make(policy=policy)
    trainer.ref_chosen[5] = math.nan
    seen = [tiny.weights_of(policy)]
    steps = (tiny.weights_of(policy) for _ in trainer.run())
    with pytest.raises(StageFailed, match=r"batch epoch 1, pairs \[.*\b5\b"):
        seen.extend(steps)
    assert tiny.same_weights(policy, seen[-1])


def test_padding_of_partners_does_not_change_a_pairs_loss() -> None:
    pairs = consistent()
    alone = make(pairs=[pairs[3]])
    together = make(pairs=pairs)

    def loss(trainer: PreferenceTrainer, row: int) -> Tensor:
        with torch.no_grad():
            for parameter in trainer.policy.parameters():
                parameter.add_(0.01 * torch.sign(parameter))
        return trainer._loss([row], 1).loss.detach()

    torch.testing.assert_close(loss(alone, 0), loss(together, 3), atol=1e-5, rtol=0)
