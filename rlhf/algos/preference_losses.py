"""Learning a policy from pairs directly: the log-ratio to the reference is the reward.

Every entry of PREFERENCE_LOSSES is called as `loss(chosen_logps, rejected_logps, ref_chosen_logps,
ref_rejected_logps, beta=..., **own)` and reports the same metrics, means over pairs:

- `accuracy`, `ties`: of the implicit rewards, see `reward_model_losses.pairwise_accuracy`.
- `chosen_reward`, `rejected_reward`: beta * log-ratio to the reference; `margin`: their difference.
- `chosen_logp_change_nats`: log-ratio of the chosen; below 0, the policy unlearns what was chosen.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf.algos.reward_model_losses import check_label_smoothing, check_pairs, pairwise_accuracy
from rlhf.algos.types import LossOutput


def _log_ratios(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Log-ratios to the reference of the chosen and of the rejected, (B,) each."""
    check_pairs(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    return chosen_logps - ref_chosen_logps.detach(), rejected_logps - ref_rejected_logps.detach()


def _pair_output(
    per_pair: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    beta: float,
    denominator: Tensor | float | None,
) -> LossOutput:
    loss = per_pair.sum() / (len(per_pair) if denominator is None else denominator)
    chosen, rejected = chosen.detach(), rejected.detach()
    accuracy, ties = pairwise_accuracy(chosen, rejected)
    metrics = {
        "accuracy": accuracy,
        "ties": ties,
        "margin": beta * (chosen - rejected).mean(),
        "chosen_reward": beta * chosen.mean(),
        "rejected_reward": beta * rejected.mean(),
        "chosen_logp_change_nats": chosen.mean(),
    }
    return LossOutput(loss, metrics)


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    Per pair: -(1 - s) log sigmoid(h) - s log sigmoid(-h), with h = beta * (log-ratio of the chosen
    minus that of the rejected) and s = label_smoothing, the share of labels taken to be wrong.
    Where preferences follow Bradley-Terry on a reward, its optimum is the reference tilted by
    exp(reward / beta).

    Args:
        chosen_logps: (B,) nats, summed over the response; gradient flows.
        rejected_logps: (B,) nats, summed over the response; gradient flows.
        ref_chosen_logps: (B,) nats, constants.
        ref_rejected_logps: (B,) nats, constants.
        beta: > 0.
        label_smoothing: in [0, 0.5).
        denominator: number of pairs of an accumulated batch, or None for B.

    Returns: loss () and detached metrics, see the module.

    Raises: ValueError if shapes differ, there is no pair or a number is out of bounds.
    """
    check_label_smoothing(label_smoothing)
    chosen, rejected = _log_ratios(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    h = beta * (chosen - rejected)
    per_pair = -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)
    return _pair_output(per_pair, chosen, rejected, beta, denominator)


def ipo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Identity preference optimisation (Azar et al. 2023, arXiv:2310.12036, eq. 17).

    Per pair: (d - 1 / (2 beta))^2, d = log-ratio of the chosen minus that of the rejected, both
    summed over the response. The margin has a target: certain labels do not drive it to infinity.

    Args:
        chosen_logps: (B,) nats, summed over the response; gradient flows.
        rejected_logps: (B,) nats, summed over the response; gradient flows.
        ref_chosen_logps: (B,) nats, constants.
        ref_rejected_logps: (B,) nats, constants.
        beta: > 0.
        denominator: number of pairs of an accumulated batch, or None for B.

    Returns: loss () and detached metrics, see the module.

    Raises: ValueError if shapes differ, there is no pair or beta is not positive.
    """
    chosen, rejected = _log_ratios(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta
    )
    per_pair = (chosen - rejected - 1 / (2 * beta)).square()
    return _pair_output(per_pair, chosen, rejected, beta, denominator)


PREFERENCE_LOSSES: dict[str, Callable[..., LossOutput]] = {"sigmoid": dpo_loss, "ipo": ipo_loss}
