"""TRL's own loss code, called on tensors that we choose.

TRL keeps its losses inside methods of trainers. A trainer here is made without its `__init__` and
given only the attributes that the method reads; the "model" hands out prepared log-probabilities
as TRL's fused head would: (B, S - 1), zero where the label is -100. Nothing of the arithmetic is
replaced. TRL is imported when a function is called, not before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlhf.algos.masking import masked_mean, masked_sum

PROMPT = 2  # tokens before the response, in every batch made here


class OneProcess:
    """What the methods ask of an accelerator, where there is one process."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    is_main_process = True
    sync_gradients = True

    def gather(self, x: Tensor) -> Tensor:
        return x

    def gather_for_metrics(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        return x

    def unwrap_model(self, model: Any) -> Any:
        return model


def bare(trainer_class: type, **attributes: Any) -> Any:
    """A trainer that has these attributes and those that every loss of TRL reads."""
    trainer: Any = object.__new__(trainer_class)
    common = {
        "accelerator": OneProcess(),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    trainer.__dict__.update({**common, **attributes})
    return trainer


def _head_output(logprobs: Tensor, labels: Tensor) -> SimpleNamespace:
    """What TRL's fused head returns for these log-probabilities of tokens 1 to S - 1."""
    scored = labels[:, 1:] != -100
    nothing = torch.zeros_like(logprobs)
    return SimpleNamespace(
        log_probs=logprobs.masked_fill(~scored, 0.0),
        entropy=nothing,
        mean_logits=nothing,
        is_top1=torch.zeros_like(scored),
        log_sum_sq_probs=nothing,
    )


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, leaf)
    return found


# Pairs


def pair_inputs(logprobs: Tensor, ref: Tensor, completion_mask: Tensor) -> dict[str, Tensor]:
    """What a preference loss of ours may read, from the same token tables."""
    mask = completion_mask[:, 1:]
    logps, ref_logps = masked_sum(logprobs, mask, dim=1), masked_sum(ref, mask, dim=1)
    means, lengths = masked_mean(logprobs, mask, dim=1), mask.sum(dim=1)
    pairs = len(logprobs) // 2
    halves = {
        "logps": logps,
        "mean_logps": means,
        "lengths": lengths,
    }
    available = {
        f"{side}_{name}": x[rows]
        for name, x in halves.items()
        for side, rows in (("chosen", slice(0, pairs)), ("rejected", slice(pairs, None)))
    }
    return {
        **available,
        "ref_chosen_logps": ref_logps[:pairs],
        "ref_rejected_logps": ref_logps[pairs:],
        "margins": torch.zeros(pairs, dtype=logprobs.dtype),
        "reward_shift": torch.zeros((), dtype=logprobs.dtype),
    }


def dpo(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    completion_mask: Tensor,
    loss_type: str,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    alpha: float = 0.5,
    loss_types: tuple[tuple[str, float], ...] = (),
) -> Tensor:
    """`DPOTrainer._compute_loss`.

    Args:
        logprobs: (2B, S - 1), the chosen first. ref_logprobs: likewise.
        completion_mask: (2B, S).
        loss_type: TRL's name, or the weighted names of `loss_types` instead.
    """
    from trl.trainer.dpo_trainer import DPOTrainer

    weighted = loss_types or ((loss_type, 1.0),)
    trainer = bare(
        DPOTrainer,
        beta=beta,
        label_smoothing=label_smoothing,
        f_divergence_type=f_divergence,
        f_alpha_divergence_coef=alpha,
        loss_types=[name for name, _ in weighted],
        loss_weights=[weight for _, weight in weighted],
        ld_alpha=None,
        use_weighting=False,
        precompute_ref_logps=True,
    )
    pairs = len(logprobs) // 2
    ref = (ref_logprobs * completion_mask[:, 1:]).sum(dim=1)
    inputs = {
        "input_ids": torch.ones_like(completion_mask, dtype=torch.long),
        "attention_mask": torch.ones_like(completion_mask, dtype=torch.long),
        "completion_mask": completion_mask.long(),
        "ref_chosen_logps": ref[:pairs],
        "ref_rejected_logps": ref[pairs:],
    }

    def model(*, labels: Tensor, **_: Any) -> SimpleNamespace:
        return _head_output(logprobs, labels)

    return trainer._compute_loss(model, inputs, False)


def kto(
    logprobs: Tensor,
    ref_logps: Tensor,
    completion_mask: Tensor,
    desirable: Tensor,
    kl_logps: Tensor,
    ref_kl_logps: Tensor,
    *,
    beta: float,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, float]:
    """`KTOTrainer._compute_loss`: the loss, and the KL estimate that it found.

    Args:
        logprobs: (N, S - 1). ref_logps: (N,), summed over the response.
        completion_mask: (N, S). desirable: (N,) bool.
        kl_logps, ref_kl_logps: (N,) of mismatched prompts and answers.
    """
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = bare(
        KTOTrainer,
        beta=beta,
        loss_type=loss_type,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        calculate_KL=loss_type == "kto",
        precompute_ref_logps=True,
    )
    mismatched = torch.ones(len(kl_logps), 2, dtype=torch.long)
    inputs = {
        "input_ids": torch.ones_like(completion_mask, dtype=torch.long),
        "attention_mask": torch.ones_like(completion_mask, dtype=torch.long),
        "completion_mask": completion_mask.long(),
        "KL_input_ids": mismatched,
        "KL_attention_mask": mismatched,
        "KL_completion_mask": mismatched,
        "label": desirable,
        "ref_logps": ref_logps,
        "ref_KL_logps": ref_kl_logps,
    }

    def model(*, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        if input_ids is mismatched:
            return _head_output(kl_logps[:, None], labels)
        return _head_output(logprobs, labels)

    loss = trainer._compute_loss(model, inputs, False)
    return loss, trainer._metrics["train"]["kl"][-1]


def cpo(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    loss_type: str,
    *,
    beta: float,
    simpo_gamma: float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`CPOTrainer.cpo_loss`, the mean over pairs. For `simpo` the log-probs are per-token means."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    trainer = bare(
        CPOTrainer,
        alpha=0.0,
        loss_type=loss_type,
        beta=beta,
        simpo_gamma=simpo_gamma,
        label_smoothing=label_smoothing,
    )
    return trainer.cpo_loss(chosen_logps, rejected_logps)[0].mean()


def orpo_penalty(chosen_mean_logps: Tensor, rejected_mean_logps: Tensor, *, beta: float) -> Tensor:
    """`ORPOTrainer.odds_ratio_loss` with the sign and mean of `get_batch_loss_metrics`.

    Its other term is the cross-entropy of the chosen sequence, see `orpo`.
    """
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    trainer = bare(ORPOTrainer, beta=beta)
    return -trainer.odds_ratio_loss(chosen_mean_logps, rejected_mean_logps)[0].mean()


def orpo(logits: Tensor, ids: Tensor, completion_mask: Tensor, *, beta: float) -> Tensor:
    """`ORPOTrainer.get_batch_loss_metrics` on a model that returns `logits` (2B, S, V)."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    trainer = bare(ORPOTrainer, beta=beta, is_encoder_decoder=False, padding_value=0)
    labels = ids.masked_fill(~completion_mask, -100)
    pairs = len(ids) // 2
    batch = {}
    for name, rows in (("chosen", slice(0, pairs)), ("rejected", slice(pairs, None))):
        batch[f"{name}_input_ids"] = ids[rows]
        batch[f"{name}_attention_mask"] = torch.ones_like(ids[rows])
        batch[f"{name}_labels"] = labels[rows]
    model = lambda *_, **__: SimpleNamespace(logits=logits)  # noqa: E731
    return trainer.get_batch_loss_metrics(model, batch)[0]


def bradley_terry(
    scores: Tensor, *, margin: Tensor | None = None, centering: float | None = None
) -> tuple[Tensor, dict[str, list[float]]]:
    """`RewardTrainer.compute_loss` on scores (2B,), the chosen first: loss and metrics."""
    from trl.trainer.reward_trainer import RewardTrainer

    trainer = bare(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=centering))
    inputs = {"attention_mask": torch.ones(len(scores), 1)}
    if margin is not None:
        inputs["margin"] = margin
    loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=scores[:, None]), inputs)
    return loss, trainer._metrics["train"]


# Rollouts


def grpo(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropies: Tensor | None = None,
    correction: Tensor | None = None,
    level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    bias_corrected_kl: bool = False,
    entropy_coef: float = 0.0,
    max_completion_length: int = 1,
    num_items: Tensor | None = None,
    accumulation: int = 1,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
) -> tuple[Tensor, dict[str, list[float]]]:
    """`GRPOTrainer._compute_loss`: the loss of one micro-batch, and its metrics.

    Args:
        logprobs, old_logprobs, ref_logprobs, entropies: (B, T). advantages: (B,) or (B, T).
        mask: (B, T), TRL's product of completion mask and tool mask.
        correction: (B, T) or (B, 1), its `importance_sampling_ratio` for another rollout engine.
        num_items: tokens of the whole batch, for the loss types that divide by them.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    entropies = torch.zeros_like(logprobs) if entropies is None else entropies
    trainer = bare(
        GRPOTrainer,
        loss_type=loss_type,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        beta=beta,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=correction is not None,
        current_gradient_accumulation_steps=accumulation,
        max_completion_length=max_completion_length,
        _entropy_bonus_enabled=entropy_coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=bias_corrected_kl,
            sapo_temperature_pos=sapo_temperatures[0],
            sapo_temperature_neg=sapo_temperatures[1],
            steps_per_generation=accumulation,
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
    )
    inputs = {
        "prompt_ids": torch.ones(len(mask), PROMPT, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), PROMPT, dtype=torch.long),
        "completion_ids": torch.ones_like(mask, dtype=torch.long),
        "completion_mask": torch.ones_like(mask, dtype=torch.long),
        "tool_mask": mask.long(),
        "advantages": advantages,
        "num_items_in_batch": mask.sum() if num_items is None else num_items,
    }
    optional = {
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": ref_logprobs,
        "importance_sampling_ratio": correction,
    }
    inputs.update({name: x for name, x in optional.items() if x is not None})
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss, trainer._metrics["train"]


def rloo(
    logprobs: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Tensor:
    """`RLOOTrainer._compute_loss`: (B, T) log-probs; old_logps and advantages (B,)."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    trainer = bare(
        RLOOTrainer,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
    )
    inputs = {
        "prompt_ids": torch.ones(len(mask), PROMPT, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), PROMPT, dtype=torch.long),
        "completion_ids": torch.ones_like(mask, dtype=torch.long),
        "completion_mask": mask.long(),
        "old_logps": old_logps,
        "advantages": advantages,
    }
    return trainer._compute_loss(trainer.model, inputs)


def _scored(trainer_class: type, rewards: Tensor, group_size: int, **attributes: Any) -> Any:
    """Runs `_generate_and_score_completions` on completions of one token with these rewards."""
    count = len(rewards)
    logs: dict[str, Any] = defaultdict(list)
    logs["rewards"], logs["extra"] = defaultdict(list), defaultdict(list)
    zeros = torch.zeros(count, 1, dtype=rewards.dtype)
    defaults = {
        "num_generations": group_size,
        "reward_weights": torch.ones(1, dtype=rewards.dtype),
        "reward_funcs": [None],
        "reward_func_names": ["given"],
        "_calculate_rewards": lambda *_: rewards[:, None].clone(),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (zeros, None, None),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "beta": 0.0,
        "num_iterations": 1,
        "_logs": logs,
        "_pending_extra_logs": defaultdict(list),
        "_pending_metrics": defaultdict(list),
        "log_multimodal": False,
        "args": SimpleNamespace(
            per_device_train_batch_size=count,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
    }
    trainer = bare(trainer_class, **{**defaults, **attributes})
    output = trainer._generate_and_score_completions([{"prompt": "p"}] * count)
    return output, trainer._metrics["train"]


def grpo_advantages(
    rewards: Tensor, group_size: int, *, scale: str
) -> tuple[Tensor, dict[str, list[float]]]:
    """`GRPOTrainer._generate_and_score_completions`: advantages (B,) of rewards (B,)."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    ids = [[1]] * len(rewards)
    output, metrics = _scored(
        GRPOTrainer,
        rewards,
        group_size,
        scale_rewards=scale,
        multi_objective_aggregation="sum_then_normalize",
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _generate=lambda _: (ids, ids, None, [""] * len(ids), None, {}, None, None),
    )
    return output["advantages"], metrics


def rloo_advantages(rewards: Tensor, group_size: int, *, normalize: bool = False) -> Tensor:
    """`RLOOTrainer._generate_and_score_completions`: advantages (B,) of rewards (B,)."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    ids = [[1]] * len(rewards)
    output, _ = _scored(
        RLOOTrainer,
        rewards,
        group_size,
        reward_clip_range=None,
        normalize_advantages=normalize,
        _generate=lambda _: (ids, ids, [""] * len(ids)),
    )
    return output["advantages"]


def engine_correction(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """`GRPOTrainer._generate_and_score_completions`: its ratio of trainer to rollout engine.

    Args:
        old_logprobs: (B, T) of the trainer. sampling_logprobs: (B, T) of the engine.
        mode: `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    count, length = old_logprobs.shape
    ids = [[1] * length] * count
    output, _ = _scored(
        GRPOTrainer,
        torch.zeros(count),
        count,
        scale_rewards="group",
        multi_objective_aggregation="sum_then_normalize",
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=clip_min,
        vllm_importance_sampling_clip_max=clip_max,
        _get_per_token_logps_and_entropies=lambda *_, **__: (old_logprobs, None, None),
        _generate=lambda _: (
            ids,
            ids,
            None,
            [""] * count,
            sampling_logprobs.tolist(),
            {},
            None,
            None,
        ),
    )
    return output["importance_sampling_ratio"]


Loss = Callable[[Tensor], Tensor]


def assert_parity(ours: Loss, theirs: Loss, at: Tensor, *, tolerance: float = 1e-12) -> None:
    """The same loss and the same gradient to `at`; the gradient is not zero.

    Args:
        ours, theirs: the loss () as a function of the tensor that carries the gradient.
        at: where to compare. tolerance: relative and absolute; float64 unless told otherwise.
    """
    leaf = at.detach().clone().requires_grad_()
    our_loss, their_loss = ours(leaf), theirs(leaf)
    torch.testing.assert_close(our_loss, their_loss, rtol=tolerance, atol=tolerance)
    expected = gradient(their_loss, leaf)
    assert expected.abs().max() > 0
    torch.testing.assert_close(gradient(our_loss, leaf), expected, rtol=tolerance, atol=tolerance)
