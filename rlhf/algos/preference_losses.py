"""Learning a policy from preferences directly: no reward model, no sampling in the loop.

A loss reads those of these inputs that it names (see `parts`). Policy terms carry the gradient; the
rest are constants.

- `chosen_logps`, `rejected_logps`, `ref_chosen_logps`, `ref_rejected_logps`: (B,) nats of the
  policy and of the reference, summed over the response.
- `chosen_mean_logps`, `rejected_mean_logps`: (B,) nats per token, <= 0.
- `chosen_lengths`, `rejected_lengths`: (B,) tokens. `margins`: (B,) >= 0, strength of the label.
- `reward_shift`: (), running mean of the implicit rewards of earlier batches, 0 at first.
- `logps`, `ref_logps`: (N,) as above, of single responses; `desirable`: (N,) bool, their labels.
- `kl_nats`: () >= 0, mean log-ratio to the reference of responses to other prompts.

`simpo`, `orpo` and `sft` read means over tokens. All others are derived for sums: with `beta` per
nat of the whole response. Length-normalised log-probs are the caller's business, who hands in means
in the place of sums: `beta` is then per nat per token, larger by about a response's length, and the
optima stated here no longer hold.

Every loss is the sum over pairs (for `kto`, over examples) divided by `denominator`, the number of
them in the accumulated batch, or by their number in this call where it is None.

Every loss over pairs reports the same metrics, detached means over pairs:

- `chosen_reward`, `rejected_reward`: implicit rewards, beta * (log-prob - reference's log-prob),
  and of `f_dpo`, `simpo` and `orpo` as each says; `margin`: their difference. Offsets, targets
  and penalties are not part of them, so that the same numbers are compared for all losses.
- `accuracy`, `ties`: of these rewards, see `reward_model_losses.pairwise_accuracy`.

`orpo` adds `nll_nats`, `sft` has nothing else, and `kto` has its own. Over micro-batches of
different numbers of ties `accuracy` is joined only approximately, all else exactly.

Every function raises ValueError if shapes or devices differ, there is no pair, or an option is out
of bounds, infinite or NaN.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf.algos.masking import check_devices
from rlhf.algos.reward_model_losses import (
    check_label_smoothing,
    check_pairs,
    mean_of,
    pairwise_accuracy,
)
from rlhf.algos.types import LossOutput


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def _check_not_negative(**options: float) -> None:
    for name, value in options.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be >= 0 and finite, got {value}")


def _check_constant(constant: Tensor, name: str, beside: Tensor) -> None:
    """Raises ValueError unless it is a scalar () on the device of the others."""
    if constant.ndim:
        raise ValueError(f"{name} must be a scalar (), got shape {tuple(constant.shape)}")
    check_devices(beside, constant)


def _log_ratios(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-ratios to the reference of the chosen and of the rejected, (B,) nats each."""
    check_pairs(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return chosen_logps - ref_chosen_logps.detach(), rejected_logps - ref_rejected_logps.detach()


def _rewards(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Implicit rewards of the chosen and of the rejected, beta * log-ratio, (B,) each."""
    _check_positive(beta=beta)
    chosen, rejected = _log_ratios(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps
    )
    return beta * chosen, beta * rejected


def _logistic(h: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)


def _pair_output(
    per_pair: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    denominator: Tensor | float | None,
) -> LossOutput:
    chosen, rejected = chosen_rewards.detach(), rejected_rewards.detach()
    accuracy, ties = pairwise_accuracy(chosen, rejected)
    metrics = {
        "accuracy": accuracy,
        "ties": ties,
        "margin": (chosen - rejected).mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
    }
    return LossOutput(mean_of(per_pair, denominator), metrics)


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    Per pair: -(1 - s) log sigmoid(h) - s log sigmoid(-h), with h = beta * (log-ratio of the chosen
    minus that of the rejected) and s = label_smoothing, the share of labels taken to be wrong
    (cDPO, Mitchell 2023). Where preferences follow Bradley-Terry on a reward, its optimum for s = 0
    is the reference tilted by exp(reward / beta).

    Only the difference counts: both log-probs may fall, the mass going to responses that nobody
    compared. Certain labels drive h to infinity for s = 0, to log((1 - s) / s) for s > 0, where
    smoothing also shrinks honest margins (see `robust_dpo_loss`).

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0, per nat.
        label_smoothing: in [0, 0.5).
        denominator: see the module.

    Returns: loss () and metrics, see the module.
    """
    check_label_smoothing(label_smoothing)
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    per_pair = _logistic(chosen - rejected, label_smoothing)
    return _pair_output(per_pair, chosen, rejected, denominator)


def robust_dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    label_smoothing: float,
    beta: float = 0.1,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """DPO that is unbiased under flipped labels (Chowdhury et al. 2024, arXiv:2403.00409).

    Per pair: (-(1 - s) log sigmoid(h) + s log sigmoid(-h)) / (1 - 2 s), h as in `dpo_loss`. If each
    label is flipped with probability s, its expectation is DPO's loss on the true labels. This is
    label smoothing by the negative share -s / (1 - 2 s).

    Unbiased, not bounded: on one fixed label it falls to minus infinity as h grows, and its
    variance grows as 1 / (1 - 2 s)^2. A guess of s above the true rate overfits what it meant to
    mend.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        label_smoothing: in [0, 0.5), the rate of flipped labels. Known or estimated: no default.
        beta: > 0, per nat.
        denominator: see the module.

    Returns: loss () and metrics, see the module.
    """
    check_label_smoothing(label_smoothing)
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    share = -label_smoothing / (1 - 2 * label_smoothing)
    per_pair = _logistic(chosen - rejected, share)
    return _pair_output(per_pair, chosen, rejected, denominator)


def ipo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Identity preference optimisation (Azar et al. 2023, arXiv:2310.12036, eq. 17).

    Per pair, beta its tau: (d - 1 / (2 beta))^2, d = log-ratio of the chosen minus that of the
    rejected, both summed over the response. If the chosen wins with probability p, the best d is (2
    p - 1) / (2 beta): certain labels do not drive it to infinity, the margin stops at 1/2.

    TRL divides both log-ratios by their lengths. That is another loss, with another beta: its
    margin is per token. Here the sum is kept, as eq. 17 has it; the loss scales as 1 / beta^2.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0, per nat.
        denominator: see the module.

    Returns: loss () and metrics, see the module.
    """
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    per_pair = ((chosen - rejected - 0.5) / beta).square()
    return _pair_output(per_pair, chosen, rejected, denominator)


def hinge_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.05,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Hinge loss on log-ratios (SLiC, Zhao et al. 2023, arXiv:2305.10425).

    Per pair: max(0, 1 - h), h as in `dpo_loss`, as normalised by the reference in RSO (Liu et al.
    2023, arXiv:2309.06657, whose gamma is beta). The gradient is constant until the margin is 1,
    that is 1 / beta nats, and 0 from there on: an easy pair no longer counts, a hopeless one counts
    no more than the rest.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0, per nat.
        denominator: see the module.

    Returns: loss () and metrics, see the module.
    """
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    per_pair = (1 - (chosen - rejected)).relu()
    return _pair_output(per_pair, chosen, rejected, denominator)


def exo_pair_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Exact optimisation, two responses (Ji et al. 2024, arXiv:2402.00856, eq. 16).

    Per pair: the reverse KL(q || (1 - s, s)), q = (sigmoid(h), sigmoid(-h)), h as in `dpo_loss`,
    where DPO with smoothing has the forward one; beta is beta_pi. Its minimum, 0, is at h = log((1
    - s) / s).

    The gradient vanishes on both sides: a pair far on the wrong side is not brought back, one far
    beyond the target hardly. For s = 0 the loss would be infinite.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0, per nat.
        label_smoothing: in (0, 0.5), the share of labels taken to be wrong.
        denominator: see the module.

    Returns: loss () and metrics, see the module.
    """
    check_label_smoothing(label_smoothing)
    _check_positive(label_smoothing=label_smoothing)
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    h = chosen - rejected
    right = h.sigmoid() * (logsigmoid(h) - math.log1p(-label_smoothing))
    wrong = (-h).sigmoid() * (logsigmoid(-h) - math.log(label_smoothing))
    per_pair = right + wrong
    return _pair_output(per_pair, chosen, rejected, denominator)


def nca_pair_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.01,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Noise contrastive alignment, two responses (Chen et al. 2024, arXiv:2402.05369).

    Per pair, r = beta * log-ratio: -log sigmoid(r chosen) - 1/2 log sigmoid(-r chosen) - 1/2 log
    sigmoid(-r rejected). Each response is a sample told from noise, so the level of r counts, not
    only the difference: a response that wins with probability p has its optimum at exp(r) = 2 p.

    A certain winner stops at r = log 2; a certain loser has no floor. At r = 0 the pull on the
    rejected and on the chosen are equal, so in the beginning it acts as DPO does.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0, per nat.
        denominator: see the module.

    Returns: loss () and metrics, see the module.
    """
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    noise = logsigmoid(-chosen) + logsigmoid(-rejected)
    per_pair = -logsigmoid(chosen) - 0.5 * noise
    return _pair_output(per_pair, chosen, rejected, denominator)


def sppo_hard_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 1e-3,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Self-play preference optimisation (Wu et al. 2024, arXiv:2405.00675, eq. 4.7), hard labels.

    Per pair, u = log-ratio and beta = 1 / eta: (u chosen - 1 / (2 beta))^2 + (u rejected +
    1 / (2 beta))^2, eq. 4.7 with win rates 1 and 0. The rewards end at 1/2 and -1/2; that of a
    response that wins with probability p, at p - 1/2.

    The paper's reference is the policy of the round before, which generated the responses, and its
    normaliser is taken to be 1. The default beta sets a target of 500 nats, never reached: the
    gradient is then nearly that of the log-probs alone, and the loss scales as 1 / beta^2.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0, per nat.
        denominator: see the module.

    Returns: loss () and metrics, see the module.
    """
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    per_pair = ((chosen - 0.5) / beta).square() + ((rejected + 0.5) / beta).square()
    return _pair_output(per_pair, chosen, rejected, denominator)


def apo_zero_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Anchored preference optimisation, zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7).

    Per pair, r = beta * log-ratio: sigmoid(-r chosen) + sigmoid(r rejected). Raises the chosen and
    lowers the rejected, each by itself; for data better than the policy's own.

    Bounded in (0, 2): the gradient vanishes for a pair that is far off, on the wrong side as well.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0, per nat.
        denominator: see the module.

    Returns: loss () and metrics, see the module.
    """
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    per_pair = (-chosen).sigmoid() + rejected.sigmoid()
    return _pair_output(per_pair, chosen, rejected, denominator)


def apo_down_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Anchored preference optimisation, down (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8).

    Per pair, r = beta * log-ratio: sigmoid(r chosen) + sigmoid(r rejected - r chosen). Lowers both,
    the rejected more; for data worse than the policy's own. At the reference the two terms' pulls
    on the chosen cancel, so that only the rejected moves at first.

    On other data it unlearns good responses. Bounded in (0, 2), with the vanishing gradients of
    `apo_zero_loss`.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0, per nat.
        denominator: see the module.

    Returns: loss () and metrics, see the module.
    """
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    per_pair = chosen.sigmoid() + (rejected - chosen).sigmoid()
    return _pair_output(per_pair, chosen, rejected, denominator)


def bco_pair_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    reward_shift: Tensor,
    *,
    beta: float = 0.1,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Binary classifier optimisation on pairs (Jung et al. 2024, arXiv:2404.04656).

    Per pair, r = beta * log-ratio and d = reward_shift, the mean of both rewards:
    -log sigmoid(r chosen - d) - log sigmoid(d - r rejected). Each response is classified by itself;
    whatever the shift, an upper bound of DPO's loss.

    Within one pair that is labelled both ways, the optimal margin is twice that of DPO. The shift
    follows the rewards: hand it back the running mean of (chosen_reward + rejected_reward) / 2.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        reward_shift: (), constant, in the rewards' unit.
        beta: > 0, per nat.
        denominator: see the module.

    Returns: loss () and metrics, see the module; the rewards before the shift.
    """
    _check_constant(reward_shift, "reward_shift", chosen_logps)
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    shift = reward_shift.detach()
    per_pair = -logsigmoid(chosen - shift) - logsigmoid(shift - rejected)
    return _pair_output(per_pair, chosen, rejected, denominator)


def kto_loss(
    logps: Tensor,
    ref_logps: Tensor,
    desirable: Tensor,
    kl_nats: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306), unpaired.

    Per example: w * sigmoid(-y beta (log-ratio - kl_nats)), with y = 1 and w = desirable_weight for
    a desirable response, y = -1 and w = undesirable_weight for another: w minus the value of the
    paper, whose reference point is the KL to the reference.

    The value saturates on both sides: neither what is learnt nor what is hopeless has a gradient.
    The reference point is a constant, and a biased estimate of a KL. The paper keeps
    (desirable_weight * number desirable) / (undesirable_weight * number undesirable) in [1, 4/3].

    Args:
        logps: (N,), see the module; gradient flows.
        ref_logps: (N,), see the module.
        desirable: (N,) bool.
        kl_nats: (), constant >= 0.
        beta: > 0, per nat.
        desirable_weight: > 0.
        undesirable_weight: > 0.
        denominator: number of examples of an accumulated batch, or None for N.

    Returns: loss () and detached metrics. The rewards are beta * log-ratio. All are sums over the
        class divided by N, the number of all examples, so that they need no example of a class and
        join exactly over micro-batches; divide by `desirable_share`, or by 1 minus it, for the mean
        of a class.

        - `desirable_reward`, `undesirable_reward`: 0 where there is none.
        - `desirable_share`: in [0, 1].
        - `margin`: mean of y (reward - beta * kl_nats).
        - `accuracy`, `ties`: of y (reward - beta * kl_nats) against 0.
    """
    _check_positive(
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    check_pairs(logps, ref_logps, desirable)
    _check_constant(kl_nats, "kl_nats", logps)
    if desirable.dtype != torch.bool:
        raise ValueError(f"desirable must be bool, got {desirable.dtype}")
    log_ratio = logps - ref_logps.detach()
    gain = beta * (log_ratio - kl_nats.detach())
    gain = torch.where(desirable, gain, -gain)
    per_example = (-gain).sigmoid()
    per_example = torch.where(
        desirable, desirable_weight * per_example, undesirable_weight * per_example
    )
    reward, gain = beta * log_ratio.detach(), gain.detach()
    accuracy, ties = pairwise_accuracy(gain, torch.zeros_like(gain))
    metrics = {
        "accuracy": accuracy,
        "ties": ties,
        "margin": gain.mean(),
        "desirable_reward": torch.where(desirable, reward, 0).mean(),
        "undesirable_reward": torch.where(desirable, 0, reward).mean(),
        "desirable_share": desirable.to(reward.dtype).mean(),
    }
    return LossOutput(mean_of(per_example, denominator), metrics)


def _log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logps), held finite next to p = 1."""
    held = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    return logps - (-torch.expm1(held)).log()


def orpo_loss(
    chosen_mean_logps: Tensor,
    rejected_mean_logps: Tensor,
    *,
    beta: float = 0.1,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691, eq. 6).

    Per pair, beta its lambda: -m chosen - beta * log sigmoid(o chosen - o rejected), with m the
    mean log-prob of a token and o = m - log(1 - exp(m)) the log-odds of the geometric mean of the
    tokens' probabilities. It contains its own supervised term and has no reference to stay close
    to: start from a base or SFT model and watch the KL.

    From a mean log-prob of -eps of the dtype upwards, where the odds are infinite, the odds are
    held.

    Args:
        chosen_mean_logps, rejected_mean_logps: see the module.
        beta: > 0, weight of the odds ratio; it does not scale the rewards.
        denominator: see the module.

    Returns: loss () and metrics, see the module; the rewards are the log-odds, and
        `nll_nats` is the mean over pairs of -m chosen.
    """
    _check_positive(beta=beta)
    check_pairs(chosen_mean_logps, rejected_mean_logps)
    chosen, rejected = _log_odds(chosen_mean_logps), _log_odds(rejected_mean_logps)
    per_pair = -chosen_mean_logps - beta * logsigmoid(chosen - rejected)
    output = _pair_output(per_pair, chosen, rejected, denominator)
    nll = -chosen_mean_logps.detach().mean()
    return LossOutput(output.loss, {**output.metrics, "nll_nats": nll})


def simpo_loss(
    chosen_mean_logps: Tensor,
    rejected_mean_logps: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734, eq. 6).

    Per pair: -log sigmoid(beta * (mean log-prob of the chosen - that of the rejected) - gamma). No
    reference: nothing but a small learning rate keeps the policy near its start. The margin per
    token does not favour long responses, and does not forbid them.

    Args:
        chosen_mean_logps, rejected_mean_logps: see the module.
        beta: > 0, per nat per token.
        gamma: >= 0, the margin to reach, in the unit of the rewards.
        denominator: see the module.

    Returns: loss () and metrics, see the module; the rewards are beta * mean log-prob.
    """
    _check_positive(beta=beta)
    _check_not_negative(gamma=gamma)
    check_pairs(chosen_mean_logps, rejected_mean_logps)
    chosen, rejected = beta * chosen_mean_logps, beta * rejected_mean_logps
    per_pair = -logsigmoid(chosen - rejected - gamma)
    return _pair_output(per_pair, chosen, rejected, denominator)


def dpop_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.3,
    penalty: float = 50.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """DPO-positive (Pal et al. 2024, arXiv:2402.13228; penalty is its lambda).

    Per pair: -log sigmoid(h - beta * penalty * max(0, -log-ratio of the chosen)), h as in
    `dpo_loss`: DPO as long as the chosen is at least as likely as under the reference. With a large
    penalty a chosen response that has fallen takes the whole gradient.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0, per nat.
        penalty: >= 0, per nat that the chosen has lost; 0 is DPO.
        denominator: see the module.

    Returns: loss () and metrics, see the module; the rewards without the penalty.
    """
    _check_not_negative(penalty=penalty)
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    lost = (-chosen).relu()
    per_pair = -logsigmoid(chosen - rejected - penalty * lost)
    return _pair_output(per_pair, chosen, rejected, denominator)


def r_dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    alpha: float,
    beta: float = 0.1,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Length-regularised DPO (Park et al. 2024, arXiv:2403.19159).

    Per pair: -log sigmoid(h + alpha * (tokens of the chosen - tokens of the rejected)), h as in
    `dpo_loss`. The optimum is that of a reward less alpha per token: the reference tilted by
    exp((reward - alpha * tokens) / beta). What length already explains of a choice is not learnt.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        chosen_lengths, rejected_lengths: see the module.
        alpha: >= 0, reward per token. It depends on the lengths of the data: no default.
        beta: > 0, per nat.
        denominator: see the module.

    Returns: loss () and metrics, see the module; the rewards without the length term.
    """
    _check_not_negative(alpha=alpha)
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    check_pairs(chosen_logps, chosen_lengths, rejected_lengths)
    longer = (chosen_lengths - rejected_lengths).to(chosen.dtype)
    per_pair = -logsigmoid(chosen - rejected + alpha * longer)
    return _pair_output(per_pair, chosen, rejected, denominator)


def odpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    margins: Tensor,
    *,
    beta: float = 0.1,
    alpha: float = 1.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """DPO with an offset (Amini et al. 2024, arXiv:2402.10571).

    Per pair: -log sigmoid(h - alpha * margin), h as in `dpo_loss`: a stronger preference must lead
    by more. The paper also takes the logarithm of a difference of scores as the margin; that is the
    caller's choice. A wrong label with a large margin pulls the harder.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        margins: see the module.
        beta: > 0, per nat.
        alpha: >= 0, reward per unit of the margin; 0 is DPO.
        denominator: see the module.

    Returns: loss () and metrics, see the module; the rewards without the offset.
    """
    _check_not_negative(alpha=alpha)
    chosen, rejected = _rewards(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    check_pairs(chosen_logps, margins)
    per_pair = -logsigmoid(chosen - rejected - alpha * margins.detach())
    return _pair_output(per_pair, chosen, rejected, denominator)


def _power_slope(log_ratio: Tensor, alpha: float) -> Tensor:
    """(1 - u^-alpha) / alpha of u = exp(log_ratio), in the end a tangent: see `f_dpo_loss`."""
    x = -alpha * log_ratio
    held = x.clamp(max=math.log(torch.finfo(x.dtype).max) / 2)
    return -(held.expm1() + held.exp() * (x - held)) / alpha


_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse_kl": lambda log_ratio: log_ratio,
    "forward_kl": lambda log_ratio: _power_slope(log_ratio, 1.0),
    "js": lambda log_ratio: math.log(2) + logsigmoid(log_ratio),
}


def _divergence_slope(log_ratio: Tensor, divergence: str, alpha: float | None) -> Tensor:
    """f'(u) - f'(1) of u = exp(log_ratio), see `f_dpo_loss`."""
    if divergence == "alpha":
        if alpha is None or not 0 < alpha < 1:
            raise ValueError(f"divergence 'alpha' needs alpha in (0, 1), got {alpha}")
        return _power_slope(log_ratio, alpha)
    if divergence not in _SLOPES:
        known = ", ".join([*_SLOPES, "alpha"])
        raise ValueError(f"unknown divergence {divergence!r}; use one of {known}")
    if alpha is not None:
        raise ValueError(f"divergence {divergence!r} has no alpha; remove it")
    return _SLOPES[divergence](log_ratio)


def f_dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    divergence: str = "reverse_kl",
    alpha: float | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """DPO under another divergence from the reference (Wang et al. 2023, arXiv:2309.16240).

    Per pair: -log sigmoid(beta * (g chosen - g rejected)), with g = f'(u) - f'(1) of the ratio
    u = policy / reference:

    - `reverse_kl`: log u, which is DPO.
    - `forward_kl`: 1 - 1 / u.
    - `js` (Jensen-Shannon): log(2 u / (1 + u)).
    - `alpha`: (1 - u^-alpha) / alpha, between reverse KL (0) and forward KL (1). TRL's
      coefficient is 1 - alpha.

    Where preferences follow Bradley-Terry on a reward, the optimum has beta * g = reward +
    constant: it maximises the expected reward - beta * divergence. `forward_kl` and `js` bound what
    a rising response can earn (g < 1, g < log 2); margins beyond that come from the rejected
    falling.

    Once a response has fallen so far that 1 / u^alpha exceeds the square root of the dtype's
    largest number (44 nats for forward KL in float32), the power continues as its tangent: finite,
    still ordered, and with a gradient.

    Args:
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: see the module.
        beta: > 0.
        divergence: one of the four.
        alpha: in (0, 1) for `alpha`, None for the others.
        denominator: see the module.

    Returns: loss () and metrics, see the module; the rewards are beta * g, 0 at the reference.
    """
    _check_positive(beta=beta)
    chosen, rejected = _log_ratios(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps
    )
    chosen = beta * _divergence_slope(chosen, divergence, alpha)
    rejected = beta * _divergence_slope(rejected, divergence, alpha)
    per_pair = -logsigmoid(chosen - rejected)
    return _pair_output(per_pair, chosen, rejected, denominator)


def sft_loss(
    chosen_mean_logps: Tensor,
    *,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Supervised term on the chosen (RPO, Pang et al. 2024, arXiv:2404.19733), to add to another.

    Per pair: minus the mean log-prob of the chosen's tokens (RPO's weight is 1), so short and long
    responses weigh the same; TRL's term of this name is a mean over the tokens of the batch, which
    favours long ones.

    Args:
        chosen_mean_logps: see the module.
        denominator: see the module.

    Returns: loss () and the metric `nll_nats`, its mean over pairs.
    """
    check_pairs(chosen_mean_logps)
    per_pair = -chosen_mean_logps
    return LossOutput(mean_of(per_pair, denominator), {"nll_nats": per_pair.detach().mean()})


PREFERENCE_LOSSES: dict[str, Callable[..., LossOutput]] = {
    "sigmoid": dpo_loss,
    "robust": robust_dpo_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
    "exo_pair": exo_pair_loss,
    "nca_pair": nca_pair_loss,
    "sppo_hard": sppo_hard_loss,
    "apo_zero": apo_zero_loss,
    "apo_down": apo_down_loss,
    "bco_pair": bco_pair_loss,
    "kto": kto_loss,
    "orpo": orpo_loss,
    "simpo": simpo_loss,
    "dpop": dpop_loss,
    "r_dpo": r_dpo_loss,
    "odpo": odpo_loss,
    "f_dpo": f_dpo_loss,
    "sft": sft_loss,
}


def weighted_sum(
    outputs: Mapping[str, LossOutput],
    weights: Mapping[str, float],
    *,
    share: float = 1.0,
) -> LossOutput:
    """Several losses of the same pairs as one, sum of weight * loss: DPO with an SFT term, for one.

    Args:
        outputs: what each loss returned, by the name it is to be reported under.
        weights: one number > 0 for each of these names.
        share: in (0, 1], the share of the accumulated batch that these pairs are: their number
            divided by the losses' denominator.

    Returns: loss () and detached metrics: each metric from the first output that has it, and
        `<name>_loss`, each loss before its weight. That one is divided by share, a mean over
        these pairs as the other metrics are, so that micro-batches join to the batch's loss.

    Raises: ValueError if there is no loss, the names differ or a number is out of bounds.
    """
    if not outputs or outputs.keys() != weights.keys():
        raise ValueError(f"need one weight per loss: {list(outputs)}, {list(weights)}")
    _check_positive(**weights)
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    metrics: dict[str, Tensor] = {}
    for name, output in outputs.items():
        metrics = {**output.metrics, **metrics, f"{name}_loss": output.loss.detach() / share}
    terms = [weights[name] * output.loss for name, output in outputs.items()]
    return LossOutput(torch.stack(terms).sum(), metrics)
