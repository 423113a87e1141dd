"""Policy, KL, entropy losses and group advantages against TRL's GRPO and RLOO trainers.

TRL 1.16 has no PPO trainer: GAE, the value loss and masked whitening have no counterpart there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.algos import parts
from rlhf.algos.advantages import group_mean, group_std, has_spread, rloo
from rlhf.algos.kl import full_kl_loss, k3, kl_loss
from rlhf.algos.masking import masked_sum, reduction_denominator
from rlhf.algos.policy_losses import (
    cispo_loss,
    clipped_policy_loss,
    dual_clip_policy_loss,
    entropy_bonus,
    gspo_loss,
    importance_correction,
    importance_weighted_loss,
    reinforce_loss,
    sapo_loss,
)
from rlhf.algos.truncation import soft_overlong_penalty
from tests.parity import peer

pytestmark = pytest.mark.parity

B, T, LENGTH = 4, 6, 9
DOUBLE = torch.float64
NAN = float("nan")

# TRL's names of the ways from a token table to a scalar, and ours.
REDUCTION = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant_length",
}
every_reduction = pytest.mark.parametrize("loss_type", list(REDUCTION))


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old and reference ones, (B, T); advantages (B,); a mask with holes, no row empty.

    Ratios spread over both clips, advantages over both signs.
    """
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(B, T, generator=generator, dtype=DOUBLE)
    logprobs = old + 0.4 * torch.randn(B, T, generator=generator, dtype=DOUBLE)
    ref = old + 0.3 * torch.randn(B, T, generator=generator, dtype=DOUBLE)
    advantages = torch.randn(B, generator=generator, dtype=DOUBLE)
    mask = torch.rand(B, T, generator=generator) < 0.7
    mask[:, 2] = True
    return logprobs, old, ref, advantages, mask


def broadcast(advantages: Tensor) -> Tensor:
    """A sequence's advantage at each of its tokens, as our estimators hand it out."""
    return advantages[:, None].expand(B, T)


def reduce_as(loss_type: str, mask: Tensor) -> dict[str, Any]:
    name = REDUCTION[loss_type]
    return {
        "reduction": name,
        "denominator": reduction_denominator(mask, name, length=LENGTH),
    }


def theirs(mask: Tensor, advantages: Tensor, loss_type: str, **options: Any) -> peer.Loss:
    return lambda logprobs: peer.grpo(
        logprobs, advantages, mask, loss_type=loss_type, max_completion_length=LENGTH, **options
    )[0]


@every_reduction
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("clips", [(0.2, 0.2), (0.2, 0.28), (0.05, 0.4)])
def test_clipped_loss(loss_type: str, seed: int, clips: tuple[float, float]) -> None:
    logprobs, old, _, advantages, mask = draw(seed)
    low, high = clips
    peer.assert_parity(
        lambda x: (
            clipped_policy_loss(
                x,
                old,
                broadcast(advantages),
                mask,
                clip_low=low,
                clip_high=high,
                **reduce_as(loss_type, mask),
            ).loss
        ),
        theirs(mask, advantages, loss_type, old_logprobs=old, epsilon_low=low, epsilon_high=high),
        logprobs,
    )


@every_reduction
def test_advantages_per_token(loss_type: str) -> None:
    logprobs, old, _, _, mask = draw(2)
    advantages = torch.randn(B, T, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    peer.assert_parity(
        lambda x: clipped_policy_loss(x, old, advantages, mask, **reduce_as(loss_type, mask)).loss,
        theirs(mask, advantages, loss_type, old_logprobs=old),
        logprobs,
    )


@every_reduction
@pytest.mark.parametrize("dual_clip", [1.3, 2.0])
def test_dual_clip(loss_type: str, dual_clip: float) -> None:
    """TRL's `delta` also caps the ratio where A > 0, but there the upper clip is the smaller one."""
    logprobs, old, _, advantages, mask = draw(3)
    logprobs = old + 3 * (logprobs - old)  # ratios beyond the floor
    assert ((logprobs - old).exp()[mask & (broadcast(advantages) < 0)] > dual_clip).any()
    peer.assert_parity(
        lambda x: (
            dual_clip_policy_loss(
                x,
                old,
                broadcast(advantages),
                mask,
                dual_clip=dual_clip,
                **reduce_as(loss_type, mask),
            ).loss
        ),
        theirs(mask, advantages, loss_type, old_logprobs=old, delta=dual_clip),
        logprobs,
    )


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_importance_weighted(loss_type: str) -> None:
    """TRL has it as a clip too wide to matter."""
    logprobs, old, _, advantages, mask = draw(3)
    peer.assert_parity(
        lambda x: (
            importance_weighted_loss(
                x, old, broadcast(advantages), mask, **reduce_as(loss_type, mask)
            ).loss
        ),
        theirs(mask, advantages, loss_type, old_logprobs=old, epsilon_low=1e9, epsilon_high=1e9),
        logprobs,
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("clips", [(3e-4, 4e-4), (0.1, 0.2)])
def test_gspo(seed: int, clips: tuple[float, float]) -> None:
    """TRL's `grpo` with the ratio of the sequence: a mean over sequences."""
    logprobs, old, _, advantages, mask = draw(seed)
    low, high = clips
    peer.assert_parity(
        lambda x: (
            gspo_loss(
                x,
                old,
                broadcast(advantages),
                mask,
                clip_low=low,
                clip_high=high,
                reduction="sequence_mean",
            ).loss
        ),
        theirs(
            mask,
            advantages,
            "grpo",
            old_logprobs=old,
            level="sequence",
            epsilon_low=low,
            epsilon_high=high,
        ),
        logprobs,
    )


def test_gspo_with_a_mean_over_tokens() -> None:
    logprobs, old, _, advantages, mask = draw(1)
    peer.assert_parity(
        lambda x: gspo_loss(x, old, broadcast(advantages), mask, clip_low=0.1, clip_high=0.2).loss,
        theirs(
            mask,
            advantages,
            "dapo",
            old_logprobs=old,
            level="sequence",
            epsilon_low=0.1,
            epsilon_high=0.2,
        ),
        logprobs,
    )


def test_gspo_with_advantages_per_token_differs() -> None:
    """A response of two tokens with the advantages 1 and 0, at ratio 1: the loss is -1/2 for both.

    TRL's ratio hands each token the sequence's mean: the gradient is -1/4 at both, so what only the
    first deserves is shared. Ours is GSPO-token (eq. 14): -1/2 at the first, 0 at the second.
    """
    leaf = torch.full((1, 2), -1.0, dtype=DOUBLE, requires_grad=True)
    advantages = torch.tensor([[1.0, 0.0]], dtype=DOUBLE)
    mask = torch.ones(1, 2, dtype=torch.bool)
    other = theirs(mask, advantages, "dapo", old_logprobs=leaf.detach(), level="sequence")(leaf)
    mine = gspo_loss(leaf, leaf.detach(), advantages, mask).loss
    assert other.item() == mine.item() == pytest.approx(-0.5)
    assert peer.gradient(other, leaf).tolist() == [[-0.25, -0.25]]
    assert peer.gradient(mine, leaf).tolist() == [[-0.5, 0.0]]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("bound", [1.2, 5.0])
def test_cispo(seed: int, bound: float) -> None:
    """TRL's `epsilon_high` is the bound itself, ours the paper's offset from 1."""
    logprobs, old, _, advantages, mask = draw(seed)
    peer.assert_parity(
        lambda x: cispo_loss(x, old, broadcast(advantages), mask, clip_high=bound - 1).loss,
        theirs(mask, advantages, "cispo", old_logprobs=old, epsilon_high=bound),
        logprobs,
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("taus", [(1.0, 1.05), (2.0, 0.5)])
def test_sapo(seed: int, taus: tuple[float, float]) -> None:
    logprobs, old, _, advantages, mask = draw(seed)
    peer.assert_parity(
        lambda x: (
            sapo_loss(
                x,
                old,
                broadcast(advantages),
                mask,
                tau_positive=taus[0],
                tau_negative=taus[1],
                reduction="sequence_mean",
            ).loss
        ),
        theirs(mask, advantages, "sapo", old_logprobs=old, sapo_temperatures=taus),
        logprobs,
        tolerance=1e-6,  # TRL's temperatures are float32
    )


def test_default_options_are_those_of_trl() -> None:
    """Where the numbers differ, ours are said here."""
    from trl import GRPOConfig

    theirs = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    policy = parts.options(clipped_policy_loss)
    assert policy["clip_low"] == theirs["epsilon"]
    assert theirs["epsilon_high"] is None  # the lower one
    assert policy["clip_high"] == theirs["epsilon"]
    assert parts.options(sapo_loss) == {
        "tau_positive": theirs["sapo_temperature_pos"],
        "tau_negative": theirs["sapo_temperature_neg"],
    }
    assert theirs["delta"] is None  # no floor


def test_correction_of_the_rollout_engine() -> None:
    """TRL weighs the loss with min(trainer / engine, cap), ours the advantages with the same."""
    logprobs, old, engine, advantages, mask = draw(5)
    every = torch.ones_like(mask)
    weights = peer.engine_correction(
        old, engine, mode="token_truncate", clip_min=None, clip_max=1.1
    )
    mine = importance_correction(old, engine, every, cap=1.1)
    # TRL reads the engine's log-probs as float32.
    torch.testing.assert_close(mine.weights, weights, rtol=1e-6, atol=1e-6)
    assert 0 < mine.metrics["capped_fraction"] < 1
    peer.assert_parity(
        lambda x: clipped_policy_loss(x, old, broadcast(advantages) * mine.weights, mask).loss,
        theirs(mask, advantages, "dapo", old_logprobs=old, correction=mine.weights),
        logprobs,
    )


def test_clip_fraction() -> None:
    logprobs, old, _, advantages, mask = draw(4)
    _, metrics = peer.grpo(logprobs, advantages, mask, loss_type="dapo", old_logprobs=old)
    output = clipped_policy_loss(logprobs, old, broadcast(advantages), mask)
    fraction = output.metrics["clip_fraction"].item()
    assert 0 < fraction < 1
    assert fraction == pytest.approx(metrics["clip_ratio/region_mean"][0])


def test_first_update_is_reinforce() -> None:
    """At ratio 1 TRL's surrogate has the value -A and the gradient of REINFORCE's -A log pi."""
    logprobs, _, _, advantages, mask = draw(5)
    leaf = logprobs.clone().requires_grad_()
    surrogate = peer.grpo(leaf, advantages, mask, loss_type="dapo")[0]
    plain = reinforce_loss(leaf, logprobs, broadcast(advantages), mask).loss
    torch.testing.assert_close(peer.gradient(plain, leaf), peer.gradient(surrogate, leaf))
    assert surrogate.item() == pytest.approx(-broadcast(advantages)[mask].mean().item())


def test_an_empty_sequence_counts_in_trls_mean_of_sequences_only() -> None:
    """A response without a token adds a 0 to TRL's mean; ours averages the sequences that have one.

    A filtered sequence would else shrink the step of the others. With the batch's number of rows as
    `denominator` ours is the same as TRL's.
    """
    logprobs, old, _, advantages, mask = draw(6)
    mask[1] = False
    arguments = (logprobs, old, broadcast(advantages), mask)
    other = theirs(mask, advantages, "grpo", old_logprobs=old)(logprobs)
    mine = clipped_policy_loss(*arguments, reduction="sequence_mean").loss
    torch.testing.assert_close(mine * (B - 1) / B, other)
    declared = clipped_policy_loss(*arguments, reduction="sequence_mean", denominator=B).loss
    torch.testing.assert_close(declared, other)


def test_micro_batches_of_bnpo_differ_from_the_whole_batch() -> None:
    """10 + 90 tokens in two micro-batches against 100 tokens in one.

    TRL's `bnpo` averages the two means, so each of the 10 tokens weighs nine times as much as one of
    the 90; its `dapo` divides by the tokens of the whole batch, and so does ours.
    """
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(2, 90, dtype=torch.bool)
    mask[0, :10], mask[1, :] = True, True
    logprobs = -torch.rand(2, 90, generator=generator, dtype=DOUBLE)
    old = logprobs - 0.1 * torch.rand(2, 90, generator=generator, dtype=DOUBLE)
    advantages = torch.tensor([1.0, -0.5], dtype=DOUBLE)

    def trl(loss_type: str, rows: slice, steps: int) -> Tensor:
        return peer.grpo(
            logprobs[rows],
            advantages[rows],
            mask[rows],
            loss_type=loss_type,
            old_logprobs=old[rows],
            accumulation=steps,
            num_items=mask.sum(),
        )[0]

    def ours(rows: slice) -> Tensor:
        per_token = advantages[rows, None].expand(-1, 90)
        return clipped_policy_loss(
            logprobs[rows], old[rows], per_token, mask[rows], denominator=mask.sum()
        ).loss

    whole, first, second = slice(0, 2), slice(0, 1), slice(1, 2)
    torch.testing.assert_close(ours(first) + ours(second), ours(whole))
    torch.testing.assert_close(
        trl("dapo", first, 2) + trl("dapo", second, 2), trl("dapo", whole, 1)
    )
    torch.testing.assert_close(ours(whole), trl("dapo", whole, 1))
    torch.testing.assert_close(ours(whole), trl("bnpo", whole, 1))
    split = trl("bnpo", first, 2) + trl("bnpo", second, 2)
    assert abs(split.item() - ours(whole).item()) > 0.1


def test_nan_at_a_masked_place_differs() -> None:
    """TRL multiplies by the mask, and NaN * 0 is NaN; ours selects."""
    logprobs, old, _, advantages, mask = draw(7)
    old = torch.where(mask, old, NAN)
    assert theirs(mask, advantages, "dapo", old_logprobs=old)(logprobs).isnan()
    output = clipped_policy_loss(logprobs, old, broadcast(advantages), mask)
    clean = clipped_policy_loss(logprobs, old.nan_to_num(), broadcast(advantages), mask)
    assert output.loss.isfinite()
    assert output.loss == clean.loss


def test_sequence_ratio_of_rloo() -> None:
    """TRL's RLOO clips the ratio of whole responses: ours, each response being one token."""
    logprobs, old, _, advantages, mask = draw(8)
    old_logps = masked_sum(old, mask, dim=1)
    every = torch.ones(B, 1, dtype=torch.bool)

    def ours(x: Tensor) -> Tensor:
        whole = masked_sum(x, mask, dim=1)[:, None]
        return clipped_policy_loss(whole, old_logps[:, None], advantages[:, None], every).loss

    peer.assert_parity(ours, lambda x: peer.rloo(x, old_logps, advantages, mask), logprobs)


@every_reduction
@pytest.mark.parametrize("seed", [0, 1])
def test_kl_in_the_loss(loss_type: str, seed: int) -> None:
    logprobs, old, ref, advantages, mask = draw(seed)

    def ours(x: Tensor) -> Tensor:
        reduction = reduce_as(loss_type, mask)
        policy = clipped_policy_loss(x, old, broadcast(advantages), mask, **reduction).loss
        return policy + 0.3 * kl_loss(x, ref, mask, estimator="k3", **reduction).loss

    peer.assert_parity(
        ours,
        theirs(mask, advantages, loss_type, old_logprobs=old, ref_logprobs=ref, beta=0.3),
        logprobs,
    )


def test_the_default_kl_differs_in_gradient() -> None:
    """TRL differentiates k3; our default has its value, but the gradient of KL(policy || reference).

    On tokens of the policy p = (.5, .3, .2) with the reference q = (.2, .3, .5), in expectation over
    the token, with respect to the logits: TRL's gradient is p - q, that of KL(q || p); ours is that
    of KL(p || q), p (log(p/q) - KL), which is what the value reported is of.
    """
    p = torch.tensor([0.5, 0.3, 0.2], dtype=DOUBLE)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=DOUBLE)
    logits = p.log().requires_grad_()
    logprobs = logits.log_softmax(dim=0)[:, None]  # each token once, (3, 1)
    ref, every = q.log()[:, None], torch.ones(3, 1, dtype=torch.bool)
    kl = (p * (p / q).log()).sum()
    # The weights p make the sum over tokens an expectation; they enter as rows of their own.
    rows = [
        peer.grpo(
            logprobs[i : i + 1],
            torch.zeros(1, dtype=DOUBLE),
            every[:1],
            loss_type="dapo",
            ref_logprobs=ref[i : i + 1],
            beta=1.0,
        )[0]
        for i in range(3)
    ]
    mine = [kl_loss(logprobs[i : i + 1], ref[i : i + 1], every[:1]).loss for i in range(3)]
    their_value, our_value = (p * torch.stack(rows)).sum(), (p * torch.stack(mine)).sum()
    torch.testing.assert_close(their_value, kl)
    torch.testing.assert_close(our_value, kl)
    (theirs_found,) = torch.autograd.grad(their_value, logits, retain_graph=True)
    (ours_found,) = torch.autograd.grad(our_value, logits)
    torch.testing.assert_close(theirs_found, p - q)
    torch.testing.assert_close(ours_found, p * ((p / q).log() - kl))


def test_exact_kl() -> None:
    """The distillation loss of TRL at beta 1 is KL(student || teacher): ours, exact over V."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, B, T, 7, generator=generator, dtype=DOUBLE)
    mask = draw(0)[-1]
    labels = torch.zeros(B, T, dtype=torch.long).masked_fill(~mask, -100)
    peer.assert_parity(
        lambda x: full_kl_loss(x, ref_logits, mask, temperature=0.7).loss,
        lambda x: GKDTrainer.generalized_jsd_loss(
            x, ref_logits, labels=labels, beta=1, temperature=0.7
        ),
        logits,
    )


def test_small_kl_in_float32_differs() -> None:
    """k3 of a log-ratio of 1e-4 is 5e-9. TRL's exp(x) - x - 1 loses it; ours uses expm1.

    1 + 1e-4 keeps 3 digits of the 1e-4 in float32, so the difference is noise of size 1e-7.
    """
    ref = torch.full((1, 1), -1.0)
    logprobs = ref - 1e-4
    gap = (ref - logprobs).double()
    exact = (torch.expm1(gap) - gap).item()
    every = torch.ones(1, 1, dtype=torch.bool)
    _, metrics = peer.grpo(
        logprobs, torch.zeros(1), every, loss_type="dapo", ref_logprobs=ref, beta=1.0
    )
    assert exact == pytest.approx(5e-9, rel=1e-2)
    assert k3(logprobs, ref).item() == pytest.approx(exact, rel=0.01)
    assert abs(metrics["kl"][0] - exact) > 0.5 * exact


@every_reduction
def test_entropy_bonus(loss_type: str) -> None:
    """TRL's bonus is a mean over tokens whatever the policy's reduction."""
    logprobs, old, _, advantages, mask = draw(9)
    table = torch.rand(B, T, generator=torch.Generator().manual_seed(9), dtype=DOUBLE)

    def ours(x: Tensor) -> Tensor:
        policy = clipped_policy_loss(
            logprobs, old, broadcast(advantages), mask, **reduce_as(loss_type, mask)
        ).loss
        return policy + 0.1 * entropy_bonus(x, mask).loss

    def trl(x: Tensor) -> Tensor:
        return theirs(mask, advantages, loss_type, old_logprobs=old, entropies=x, entropy_coef=0.1)(
            logprobs
        )

    peer.assert_parity(ours, trl, table)


REWARDS = torch.tensor(
    [1, 1, 1, 0, 0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 3, -1, 2, 7, 0, 0, 1, -4],
    dtype=DOUBLE,
)


@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_group_advantages(group_size: int) -> None:
    exact = {"rtol": 1e-12, "atol": 1e-12}
    scaled, metrics = peer.grpo_advantages(REWARDS, group_size, scale="group")
    # TRL's deviation has its factor G / (G - 1) in float32.
    torch.testing.assert_close(
        group_std(REWARDS, group_size, eps=1e-4), scaled, rtol=1e-7, atol=1e-7
    )
    centred, _ = peer.grpo_advantages(REWARDS, group_size, scale="none")
    torch.testing.assert_close(group_mean(REWARDS, group_size), centred, **exact)
    left_out = peer.rloo_advantages(REWARDS, group_size)
    torch.testing.assert_close(rloo(REWARDS, group_size), left_out, **exact)
    share = 1 - has_spread(REWARDS, group_size).double().mean()
    assert share.item() == pytest.approx(metrics["frac_reward_zero_std"][0])


def test_the_default_eps_of_group_std_differs() -> None:
    """TRL adds 1e-4 to the deviation, ours 1e-6: rewards of another unit keep their advantages.

    Rewards 0 and 2e-4 (an error rate, say) deviate by 1.414e-4. Over it, the advantages are +-0.707;
    ours are +-0.702, TRL's +-0.414.
    """
    rewards = torch.tensor([0.0, 2e-4], dtype=DOUBLE)
    theirs, _ = peer.grpo_advantages(rewards, 2, scale="group")
    assert theirs[1].item() == pytest.approx(1e-4 / (2**0.5 * 1e-4 + 1e-4))  # 0.414
    assert group_std(rewards, 2)[1].item() == pytest.approx(1e-4 / (2**0.5 * 1e-4 + 1e-6))  # 0.702


def test_equal_rewards_in_float32_differ() -> None:
    """The mean of equal float32 numbers need not be that number.

    TRL divides the rest by eps, so a group in which nothing is better than anything else is pushed
    by 1e-3 or less; ours is exactly 0.
    """
    found = []
    for size in range(2, 40):
        rewards = torch.full((size,), 0.7)
        found.append(peer.grpo_advantages(rewards, size, scale="group")[0].abs().max().item())
        assert torch.equal(group_std(rewards, size), torch.zeros(size))
    assert 0 < max(found) < 1e-2


def test_soft_overlong_penalty() -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = torch.tensor([0, 5, 12, 13, 18, 20, 21, 90])
    theirs = get_soft_overlong_punishment(20, 8)([[1] * n for n in lengths.tolist()])
    mine = soft_overlong_penalty(lengths, max_length=20, buffer=8)
    torch.testing.assert_close(mine, torch.tensor(theirs))
