"""Log-probabilities belong to the right token, whatever the padding, type or temperature."""

import math

import pytest
import torch
from torch import Tensor

from rlhf.algos.logprobs import (
    response_outputs,
    sequence_logprobs,
    token_entropy,
    token_logprobs,
)
from rlhf.algos.masking import last_index
from rlhf.algos.policy_losses import POLICY_LOSSES, entropy_bonus

VOCABULARY = 7


class CausalModel:
    """Logits at s depend on all attended tokens up to s and their order, not on padding."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, 5, generator=generator)
        self.head = torch.randn(5, VOCABULARY, generator=generator)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        state = torch.zeros(len(input_ids), 5)
        logits = []
        for ids, attended in zip(input_ids.T, attention_mask.T, strict=True):
            state = torch.where(attended[:, None], 0.5 * state + self.embedding[ids], state)
            logits.append(state @ self.head)
        return torch.stack(logits, dim=1)


def test_token_logprobs_by_hand() -> None:
    # Odds 1 : 3 give log 1/4 and log 3/4; at temperature 1/2 odds are squared, 1 : 9.
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, math.log(3)]]], dtype=torch.float64)
    ids = torch.tensor([[0, 1]])
    expected = torch.tensor([[math.log(1 / 4), math.log(3 / 4)]], dtype=torch.float64)
    torch.testing.assert_close(token_logprobs(logits, ids), expected, rtol=0, atol=1e-12)
    expected = torch.tensor([[math.log(1 / 10), math.log(9 / 10)]], dtype=torch.float64)
    actual = token_logprobs(logits, ids, temperature=0.5)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_token_logprobs_in_half_precision_are_computed_in_single() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, 1, 2], [3, 4, 49]])
    actual = token_logprobs(logits, ids)
    expected = logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


def test_token_logprobs_of_extreme_logits_are_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    logps = token_logprobs(logits, torch.tensor([[1]]))
    logps.sum().backward()
    assert logps.item() == -2e4
    assert logits.grad is not None
    assert logits.grad.tolist() == [[[-1, 1, 0]]]  # one-hot minus softmax


def test_refusals() -> None:
    logits, ids = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(logits, ids[:, :1])
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_logprobs(logits, ids, temperature=0.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_entropy(logits, temperature=-1.0)
    with pytest.raises(ValueError, match="leaves no prompt"):
        response_outputs(logits, 2)
    with pytest.raises(ValueError, match="column 0"):
        sequence_logprobs(logits, ids, torch.tensor([[True, True]]))


def test_a_response_has_one_logprob_per_token() -> None:  # C2
    model = CausalModel()
    prompt, response = [1, 2, 3], [4, 5, 6, 1]
    ids = torch.tensor([prompt + response])
    logits = model(ids, torch.ones_like(ids, dtype=torch.bool))
    logps = token_logprobs(response_outputs(logits, 4), ids[:, 3:])
    assert logps.shape == (1, 4)
    for t, token in enumerate(response):
        prefix = torch.tensor([prompt + response[:t]])
        next_logits = model(prefix, torch.ones_like(prefix, dtype=torch.bool))[0, -1]
        assert logps[0, t].item() == pytest.approx(next_logits.log_softmax(0)[token].item())


def test_values_stand_before_their_token() -> None:  # C16
    # The output at s is named s. Of 6 tokens the last 3 are the response, at 3, 4 and 5; the states
    # before them are those at 2, 3 and 4.
    values = torch.arange(6.0)[None]
    assert response_outputs(values, 3).tolist() == [[2, 3, 4]]


def test_padding_side_does_not_change_logprobs_or_scores() -> None:  # C1, C3, T3
    model = CausalModel()
    prompt, response = [3, 1, 4], [1, 5]
    scores, logprobs = [], []
    for left, right in ((0, 0), (2, 0), (0, 3), (1, 4)):
        ids = torch.tensor([[0] * left + prompt + response + [0] * right])
        positions = torch.arange(ids.shape[1])
        attention_mask = ((positions >= left) & (positions < left + 5))[None]
        action_mask = ((positions >= left + 3) & (positions < left + 5))[None]
        logits = model(ids, attention_mask)
        logprobs.append(sequence_logprobs(logits, ids, action_mask))
        last = last_index(attention_mask)[:, None]
        scores.append(logits[..., 0].gather(1, last))
    for logps, score in zip(logprobs[1:], scores[1:], strict=True):
        torch.testing.assert_close(logps, logprobs[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(score, scores[0], rtol=0, atol=1e-5)


def test_the_length_of_a_partner_does_not_change_logprobs() -> None:  # C3
    model = CausalModel()
    ids = torch.tensor([[3, 1, 4, 0, 0, 0], [3, 1, 4, 1, 5, 2]])
    attention_mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6], dtype=torch.bool)
    action_mask = attention_mask.clone()
    action_mask[:, :2] = False
    together = sequence_logprobs(model(ids, attention_mask), ids, action_mask)
    alone = sequence_logprobs(
        model(ids[:1, :3], attention_mask[:1, :3]), ids[:1, :3], action_mask[:1, :3]
    )
    torch.testing.assert_close(together[:1], alone, rtol=0, atol=1e-5)


def test_sampling_temperature_gives_ratio_one() -> None:  # C47, C49
    logits = 3 * torch.randn(4, 5, VOCABULARY, generator=torch.Generator().manual_seed(2))
    ids = torch.randint(VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(3))
    sampler = (logits / 0.5).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mask, advantages = torch.ones(4, 5, dtype=torch.bool), torch.ones(4, 5)
    for loss in POLICY_LOSSES.values():
        trainer = token_logprobs(logits, ids, temperature=0.5)
        assert loss(trainer, sampler, advantages, mask).metrics["ratio_deviation_max"] < 1e-5
        forgot = token_logprobs(logits, ids)
        assert loss(forgot, sampler, advantages, mask).metrics["ratio_deviation_max"] > 0.1


def test_entropy_by_hand() -> None:
    # Uniform over 4: log 4. Half, quarter, quarter: 1/2 log 2 + 2 * 1/4 log 4 = 3/2 log 2. Sure: 0.
    probs = torch.tensor([[[1, 1, 1, 1], [2, 1, 1, 0], [1, 0, 0, 0]]], dtype=torch.float64)
    logits = probs.log().requires_grad_()
    entropy = token_entropy(logits)
    expected = torch.tensor([[math.log(4), 1.5 * math.log(2), 0]], dtype=torch.float64)
    torch.testing.assert_close(entropy, expected, rtol=0, atol=1e-12)
    entropy.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_entropy_is_not_negative_and_knows_no_padding() -> None:  # C7
    logits = 30 * torch.randn(3, 6, 100, generator=torch.Generator().manual_seed(4))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1] * 6], dtype=torch.bool)
    entropy = token_entropy(logits)
    assert (entropy >= 0).all()
    padded = torch.where(mask[..., None], logits, float("nan"))
    one = entropy_bonus(entropy, mask)
    other = entropy_bonus(token_entropy(padded), mask)
    assert one.metrics["entropy_nats"].item() == other.metrics["entropy_nats"].item() > 0


def test_entropy_bonus_raises_entropy() -> None:  # T7
    logits = torch.tensor([[[2.0, 0.0, -1.0]]], requires_grad=True)
    mask = torch.tensor([[True]])
    before = token_entropy(logits)
    bonus = entropy_bonus(before, mask)
    assert bonus.loss.item() == -before.item()
    bonus.loss.backward()
    assert logits.grad is not None
    after = token_entropy(logits.detach() - 0.1 * logits.grad)
    assert after.item() > before.item() + 1e-3
