"""Advantage estimators against the objective that each climbs, by enumerating all groups.

The policy is that of `test_by_definition`: seven sequences of at most two of three tokens. All
groups that it may sample stand in one batch, weighted by their probabilities.
"""

import itertools
from functools import lru_cache

import pytest
import torch
from test_by_definition import IDS, MASK, PI, SCORES, gradient, true_ascent
from torch import Tensor

from rlhf.algos import parts
from rlhf.algos.advantages import ADVANTAGES, token_rewards
from rlhf.algos.masking import masked_sum
from rlhf.algos.policy_losses import POLICY_LOSSES
from rlhf.algos.types import Advantages

PASSES = torch.tensor([1, 0, 0, 1, 0, 0, 0], dtype=torch.float64)  # a verifier's verdicts


@lru_cache
def groups(size: int) -> Tensor:
    """(7^G * G,) sequences of every group of that size, one group after another."""
    return torch.tensor(list(itertools.product(range(7), repeat=size))).flatten()


def advantages_of(name: str, rows: Tensor, scores: Tensor, **more: object) -> Advantages:
    mask = MASK[rows]
    available = {
        "rewards": token_rewards(scores[rows], torch.zeros(len(rows), 2).double(), mask, kl_coef=0),
        "scores": scores[rows],
        "response_mask": mask,
        **more,
    }
    options = {key: more[key] for key in parts.options(ADVANTAGES[name]) if key in more}
    return parts.call(ADVANTAGES[name], available, **options)


def expected_ascent(name: str, size: int, scores: Tensor, loss: str = "reinforce") -> Tensor:
    """Expected gradient of sum A log pi / G over groups, in one batch of them all."""
    rows = groups(size)
    output = advantages_of(name, rows, scores, group_size=size)
    weights = PI.probs().detach()[rows].view(-1, size).prod(dim=1).repeat_interleave(size) / size
    keep = torch.ones_like(rows, dtype=torch.bool) if output.keep is None else output.keep
    logprobs = PI.logprobs()[rows]
    weighted = output.advantages * weights[:, None]
    result = POLICY_LOSSES[loss](
        logprobs[keep], logprobs[keep].detach(), weighted[keep], MASK[rows][keep],
        reduction="constant_length", denominator=1.0,
    )  # fmt: skip
    return -gradient(result.loss, PI)


def assert_gradients(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["rloo", "group_mean"])
def test_mean_baselines(name: str, size: int) -> None:
    # A baseline that contains the sample itself takes 1 / G of the gradient away.
    factor = 1.0 if name == "rloo" else (size - 1) / size
    assert_gradients(expected_ascent(name, size, SCORES), factor * true_ascent(0.0))


def test_group_std_of_two_climbs_the_win_rate_against_itself() -> None:
    # Of two, (r - r') / 2 over |r - r'| / sqrt 2: only the sign counts, not by how much.
    probs = PI.probs()
    wins = (SCORES[:, None] - SCORES[None, :]).sign()
    win_rate = (probs[:, None] * probs.detach()[None, :] * wins).sum() / 2**0.5
    actual = expected_ascent("group_std", 2, SCORES)
    expected = gradient(win_rate, PI)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)  # eps 1e-6 in the deviation
    cosine = torch.nn.functional.cosine_similarity(expected, true_ascent(0.0), dim=0)
    assert 0.5 < cosine < 0.999


@pytest.mark.parametrize("size", [2, 3, 4])
def test_max_rl_climbs_the_truncated_log_pass_rate(size: int) -> None:
    # log p = -sum_k (1 - p)^k / k; of a group of G the first G - 1 terms are seen.
    passed = (PI.probs() * PASSES).sum()
    truncated = -torch.stack([(1 - passed) ** k / k for k in range(1, size)]).sum()
    assert_gradients(expected_ascent("max_rl", size, PASSES), gradient(truncated, PI))


def test_max_rl_comes_closer_to_the_log_pass_rate_with_larger_groups() -> None:
    exact = gradient((PI.probs() * PASSES).sum().log(), PI)
    norms = [
        float(expected_ascent("max_rl", size, PASSES).norm() / exact.norm()) for size in (2, 3, 4)
    ]
    assert norms[0] < norms[1] < norms[2] < 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_best_of_group_with_likelihood_climbs_that_of_the_best_of_n(size: int) -> None:
    # Best of n: P(all n score at most s) - P(all n score below s).
    probs = PI.probs().detach()
    below = (probs[None, :] * (SCORES[None, :] < SCORES[:, None])).sum(dim=1)
    best_of_n = (below + probs) ** size - below**size
    assert best_of_n.sum().item() == pytest.approx(1, abs=1e-12)
    likelihood = (best_of_n * masked_sum(PI.logprobs(), MASK, dim=1)).sum()
    actual = size * expected_ascent("best_of_group", size, SCORES, loss="nll")  # one kept of G
    assert_gradients(actual, gradient(likelihood, PI))


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_global_whitening_is_biased(name: str) -> None:
    # Its statistics are of the batch that it whitens, so each batch goes in alone.
    total = torch.zeros(12, dtype=torch.float64)
    for group in itertools.product(range(7), repeat=2):
        rows = torch.tensor(group)
        output = advantages_of(name, rows, SCORES, group_size=2)
        logprobs = masked_sum(PI.logprobs()[rows] * output.advantages, MASK[rows], dim=1)
        total += PI.probs().detach()[rows].prod() * gradient(logprobs.mean(), PI)
    cosine = torch.nn.functional.cosine_similarity(total, true_ascent(0.0), dim=0)
    assert 0.5 < cosine < 0.999


TRUE_VALUES = torch.stack(
    [
        # Before the first token: the expected score. Before the second: given the first.
        (PI.probs().detach() * SCORES).sum().expand(7),
        torch.stack(
            [
                (PI.probs().detach() * SCORES)[MASK[:, 1]][3 * i : 3 * i + 3].sum()
                / PI.probs().detach()[MASK[:, 1]][3 * i : 3 * i + 3].sum()
                for i in (0, 0, 0, 0, 1, 1, 1)
            ]
        ),
    ],
    dim=1,
)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gae", "gae_bootstrap"])
def test_gae_with_true_values_is_unbiased_for_any_lambda(name: str, gae_lambda: float) -> None:
    rows = torch.arange(7)
    output = advantages_of(
        name, rows, SCORES,
        values=TRUE_VALUES, final_values=torch.zeros(7), gae_lambda=gae_lambda, gamma=1.0,
    )  # fmt: skip
    weighted = (PI.probs().detach()[:, None] * output.advantages * PI.logprobs()).sum()
    assert_gradients(gradient(weighted, PI), true_ascent(0.0))


def test_gae_below_lambda_one_inherits_the_error_of_its_values() -> None:
    wrong = TRUE_VALUES.clone()
    wrong[:, 1] += torch.tensor([0.0, 1.0, -2.0])[IDS[:, 0]]  # wrong, though blind to the action
    errors = []
    for gae_lambda in (0.0, 1.0):
        output = advantages_of(
            "gae", torch.arange(7), SCORES, values=wrong, gae_lambda=gae_lambda, gamma=1.0
        )
        weighted = (PI.probs().detach()[:, None] * output.advantages * PI.logprobs()).sum()
        errors.append((gradient(weighted, PI) - true_ascent(0.0)).abs().max().item())
    assert errors[0] > 0.05
    assert errors[1] < 1e-10


@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
def test_bootstrapping_makes_up_for_a_cut(gae_lambda: float) -> None:
    # Each response is cut after its first token; what would have come is the value there.
    cut = MASK & torch.tensor([True, False])
    ended = ~MASK[:, 1]
    part = ADVANTAGES["gae_bootstrap"]
    rewards = torch.where(ended[:, None], torch.stack([SCORES, SCORES * 0], dim=1), 0)
    output = part(
        rewards, TRUE_VALUES, torch.where(ended, 0, TRUE_VALUES[:, 1]), cut, gae_lambda=gae_lambda
    )
    weighted = (PI.probs().detach()[:, None] * output.advantages * PI.logprobs()).sum()
    actual = torch.autograd.grad(weighted, PI.first)[0]
    assert_gradients(actual, true_ascent(0.0)[:3])
    lost = part(rewards, TRUE_VALUES, torch.zeros(7), cut, gae_lambda=gae_lambda)
    weighted = (PI.probs().detach()[:, None] * lost.advantages * PI.logprobs()).sum()
    without = torch.autograd.grad(weighted, PI.first)[0]
    assert (without - true_ascent(0.0)[:3]).abs().max() > 0.05
