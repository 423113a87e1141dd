"""Kinds of fault that broke others, tried on whole families of functions at once."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.algos import logprobs as module
from rlhf.algos import parts
from rlhf.algos.advantages import (
    ADVANTAGES,
    group_mean,
    reinforce_plus_plus_advantages,
    reward_to_go,
    token_rewards,
    whiten,
)
from rlhf.algos.kl import KL_ESTIMATORS, full_kl, full_kl_loss, kl_loss
from rlhf.algos.logprobs import chunked_logprobs, token_entropy, token_logprobs
from rlhf.algos.masking import reduction_denominator
from rlhf.algos.policy_losses import (
    POLICY_LOSSES,
    clipped_value_loss,
    entropy_bonus,
    sapo_loss,
)
from rlhf.algos.preference_losses import PREFERENCE_LOSSES
from rlhf.algos.reward_model_losses import bradley_terry_loss
from rlhf.algos.truncation import TRUNCATION
from rlhf.algos.types import LossOutput

NAN = float("nan")

# --- log-probs and entropies against plain autograd ---

IDS = torch.tensor([[0, 5, 2, 2], [3, 3, 1, 4], [5, 0, 4, 1]])


def _plain_logprobs(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1).gather(-1, IDS[..., None])[..., 0]


def _plain_entropy(logits: Tensor, temperature: float) -> Tensor:
    logps = (logits / temperature).log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def _ours(name: str, logits: Tensor, temperature: float) -> Tensor:
    if name == "entropy":
        return token_entropy(logits, temperature=temperature)
    return token_logprobs(logits, IDS, temperature=temperature)


PLAIN: dict[str, Callable[[Tensor, float], Tensor]] = {
    "logprobs": _plain_logprobs,
    "entropy": _plain_entropy,
}
both = pytest.mark.parametrize("name", list(PLAIN))


def draw_logits(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)).to(dtype)


def value_and_gradient(
    compute: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    value = compute(x)
    (gradient,) = torch.autograd.grad((value * weight).sum(), x)
    return value.detach(), gradient


@both
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.3])
# All at once; a whole sequence and a bit; two tokens; a row at a time, though one is more than that.
@pytest.mark.parametrize("piece", [2**22, 30, 12, 1])
def test_value_and_gradient_are_those_of_plain_autograd(
    name: str, temperature: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    logits = draw_logits()
    weight = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
    weight[0], weight[1, 2] = 0.0, 0.0  # a sequence and a token without a gradient
    ours = value_and_gradient(lambda x: _ours(name, x, temperature), logits, weight)
    plain = value_and_gradient(lambda x: PLAIN[name](x, temperature), logits, weight)
    torch.testing.assert_close(ours, plain)
    assert torch.equal(ours[1][weight == 0], torch.zeros(5, 6, dtype=torch.float64))


@both
def test_derivatives_of_views_and_of_shared_rows(name: str) -> None:
    x = draw_logits().permute(2, 1, 0).contiguous().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: _ours(name, y.permute(2, 1, 0), 0.7), (x,))
    row = draw_logits()[:1].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: _ours(name, y.expand(3, 4, 6), 0.7), (row,))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_have_the_gradient_of_wide_ones(
    name: str, dtype: torch.dtype
) -> None:
    logits, weight = draw_logits(dtype=dtype), torch.ones(3, 4)
    value, gradient = value_and_gradient(lambda x: _ours(name, x, 0.7), logits, weight)
    wide = value_and_gradient(lambda x: PLAIN[name](x, 0.7), logits.float(), weight)
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(value, wide[0])
    torch.testing.assert_close(gradient, wide[1].to(dtype))


@both
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_banned_token_is_one_that_is_not_there(name: str, temperature: float) -> None:
    logits, weight = draw_logits(), torch.ones(3, 4, dtype=torch.float64)
    banned = torch.cat([logits, torch.full((3, 4, 2), -math.inf, dtype=torch.float64)], dim=2)
    value, gradient = value_and_gradient(lambda x: _ours(name, x, temperature), banned, weight)
    without = value_and_gradient(lambda x: PLAIN[name](x, temperature), logits, weight)
    torch.testing.assert_close((value, gradient[..., :6]), without)
    assert torch.equal(gradient[..., 6:], torch.zeros(3, 4, 2, dtype=torch.float64))


def test_full_kl_does_not_see_a_token_that_both_ban() -> None:
    logits, ref_logits = draw_logits(0), draw_logits(1)
    weight = torch.ones(3, 4, dtype=torch.float64)
    pad = torch.full((3, 4, 2), -math.inf, dtype=torch.float64)
    value, gradient = value_and_gradient(
        lambda x: full_kl(x, torch.cat([ref_logits, pad], dim=2), 0.7),
        torch.cat([logits, pad], dim=2),
        weight,
    )
    without = value_and_gradient(lambda x: full_kl(x, ref_logits, 0.7), logits, weight)
    torch.testing.assert_close((value, gradient[..., :6]), without)
    assert torch.equal(gradient[..., 6:], torch.zeros(3, 4, 2, dtype=torch.float64))


@both
def test_a_graph_can_be_walked_twice_and_gives_the_same(name: str) -> None:
    logits = draw_logits().requires_grad_()
    total = _ours(name, logits, 0.7).sum()
    (first,) = torch.autograd.grad(total, logits, retain_graph=True)
    (second,) = torch.autograd.grad(total, logits)
    assert torch.equal(first, second)


@pytest.mark.parametrize(("num_sequences", "num_tokens"), [(1, 1), (2, 3), (0, 3), (3, 0)])
def test_where_nothing_is_selected_all_gradients_are_zero(
    num_sequences: int, num_tokens: int
) -> None:
    hidden = torch.full((num_sequences, num_tokens, 5), NAN, requires_grad=True)
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    nothing = torch.zeros(num_sequences, num_tokens, dtype=torch.bool)
    ids = torch.full(nothing.shape, -100)
    output = chunked_logprobs(hidden, weight, ids, nothing, entropy_gradient=True)
    (output.logprobs.sum() + output.entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


# --- every loss over tokens ---

SHAPE = (4, 6)


def _full(x: list[Tensor], mask: Tensor, **kwargs: object) -> LossOutput:
    logits, ref_logits = (torch.stack([y, -2 * y], dim=-1) for y in x[:2])
    return full_kl_loss(logits, ref_logits, mask, **kwargs)  # type: ignore[arg-type]


def _policy(loss: Callable[..., LossOutput]) -> Callable[..., LossOutput]:
    return lambda x, mask, **kwargs: loss(x[0], x[1], x[2], mask, **kwargs)


def _kl(estimator: str) -> Callable[..., LossOutput]:
    return lambda x, mask, **kwargs: kl_loss(x[0], x[1], mask, estimator=estimator, **kwargs)


TOKEN_LOSSES: dict[str, Callable[..., LossOutput]] = {
    **{name: _policy(loss) for name, loss in POLICY_LOSSES.items()},
    **{f"kl_{name}": _kl(name) for name in KL_ESTIMATORS},
    "kl_full": _full,
    "value": lambda x, mask, **kwargs: clipped_value_loss(
        x[0], x[1], x[2], mask, clip=0.2, **kwargs
    ),
    "entropy": lambda x, mask, **kwargs: entropy_bonus(x[0], mask, **kwargs),
}
every_token_loss = pytest.mark.parametrize("name", list(TOKEN_LOSSES))


def draw_tokens(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [0.3 * torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(SHAPE, generator=generator) < 0.6
    mask[0, 0], mask[2] = True, False
    return [x.to(dtype) for x in inputs], mask


@every_token_loss
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant_length"])
def test_a_micro_batch_of_nothing_but_nan_padding_adds_zero(name: str, reduction: str) -> None:
    first = torch.full(SHAPE, NAN, requires_grad=True)
    rest = torch.full(SHAPE, NAN)
    nothing = torch.zeros(SHAPE, dtype=torch.bool)
    output = TOKEN_LOSSES[name](
        [first, rest, rest], nothing, reduction=reduction, denominator=torch.tensor(7.0)
    )
    (gradient,) = torch.autograd.grad(output.loss, first)
    assert output.loss == 0
    assert torch.equal(gradient, torch.zeros(SHAPE))
    assert all(bool(value.isfinite()) for value in output.metrics.values())


@every_token_loss
def test_only_the_first_input_learns_and_none_is_changed(name: str) -> None:
    inputs, mask = draw_tokens()
    inputs = [x.requires_grad_() for x in inputs]
    kept = [x.detach().clone() for x in inputs]
    TOKEN_LOSSES[name](inputs, mask).loss.backward()
    assert inputs[0].grad is not None
    assert [x.grad for x in inputs[1:]] == [None, None]
    assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True))


@every_token_loss
def test_one_token_alone(name: str) -> None:
    inputs, mask = draw_tokens()
    one = [x[:1, :1].clone() for x in inputs]
    places = torch.zeros(SHAPE, dtype=torch.bool)
    places[0, 0] = True
    alone = TOKEN_LOSSES[name](one, mask[:1, :1])
    among_others = TOKEN_LOSSES[name](inputs, places)
    torch.testing.assert_close(alone.loss, among_others.loss)


@every_token_loss
def test_constants_of_another_type_and_views_are_the_same_numbers(name: str) -> None:
    inputs, mask = draw_tokens()
    plain = TOKEN_LOSSES[name](inputs, mask).loss
    mixed = TOKEN_LOSSES[name]([inputs[0], inputs[1].float(), inputs[2].float()], mask).loss
    torch.testing.assert_close(mixed.double(), plain, rtol=1e-5, atol=1e-6)
    views = [torch.stack([x, x], dim=-1)[..., 0] for x in inputs]
    torch.testing.assert_close(TOKEN_LOSSES[name](views, mask.T.contiguous().T).loss, plain)
    shared = [x[:1].expand(SHAPE) for x in inputs]
    rows = mask[:1].expand(SHAPE)
    one = TOKEN_LOSSES[name]([x[:1] for x in inputs], mask[:1]).loss
    torch.testing.assert_close(TOKEN_LOSSES[name](shared, rows).loss, one)


@every_token_loss
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_a_mask_of_numbers_is_refused(name: str, dtype: torch.dtype) -> None:
    inputs, mask = draw_tokens()
    with pytest.raises(ValueError, match="mask must be bool"):
        TOKEN_LOSSES[name](inputs, mask.to(dtype))


# --- every preference loss ---

REQUIRED = {"robust": {"label_smoothing": 0.1}, "r_dpo": {"alpha": 0.1}}
POLICY_INPUTS = frozenset(
    {"chosen_logps", "rejected_logps", "chosen_mean_logps", "rejected_mean_logps", "logps"}
)


def draw_pairs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [*sorted(POLICY_INPUTS), "ref_chosen_logps", "ref_rejected_logps", "ref_logps"]
    found = {name: torch.randn(4, generator=generator, dtype=torch.float64) - 5 for name in names}
    return found | {
        "margins": torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64),
        "chosen_lengths": torch.tensor([3, 4, 5, 6]),
        "rejected_lengths": torch.tensor([6, 2, 5, 1]),
        "reward_shift": torch.tensor(0.3, dtype=torch.float64),
        "kl_nats": torch.tensor(0.2, dtype=torch.float64),
        "desirable": torch.tensor([True, False, True, True]),
    }


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_float32_constants_beside_float64_log_probs(name: str) -> None:
    pairs = draw_pairs()
    loss, options = PREFERENCE_LOSSES[name], REQUIRED.get(name, {})
    narrow = {
        key: x.float() if x.is_floating_point() and key not in POLICY_INPUTS else x
        for key, x in pairs.items()
    }
    plain = parts.call(loss, pairs, **options).loss
    mixed = parts.call(loss, narrow, **options).loss
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_no_preference_loss_changes_what_it_reads(name: str) -> None:
    pairs = draw_pairs()
    kept = {key: x.clone() for key, x in pairs.items()}
    parts.call(PREFERENCE_LOSSES[name], pairs, **REQUIRED.get(name, {}))
    assert all(torch.equal(x, kept[key]) for key, x in pairs.items())


# --- every advantage ---


def estimate(name: str, rewards: Tensor, group_size: int) -> Tensor:
    inputs = {
        "rewards": rewards,
        "scores": rewards.sum(dim=1),
        "values": torch.zeros_like(rewards),
        "final_values": rewards.new_zeros(len(rewards)),
        "response_mask": torch.ones(rewards.shape, dtype=torch.bool),
        "group_size": group_size,
        "state": torch.zeros(0),
    }
    options = {"baseline": 0.5} if name == "constant_baseline" else {}
    found: Tensor = parts.call(ADVANTAGES[name], inputs, **options).advantages
    return found


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_a_batch_of_one_group_of_one_token_answers(name: str) -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    if name == "max_rl" or "group" in name or name in ("rloo", "reinforce_plus_plus_baseline"):
        advantages = estimate(name, rewards, 3)
        assert advantages[0, 0] > advantages[1, 0] == advantages[2, 0]
    else:
        alone = estimate(name, rewards[:1], 1)
        assert alone.shape == (1, 1)
        assert bool(alone.isfinite().all())


# --- rows that no other test of this folder names ---


def test_statistics_of_length_come_from_raw_lengths() -> None:
    """A cut answer counts with all its tokens, and one past the limit costs the whole penalty."""
    scores, ended = torch.zeros(3), torch.tensor([True, False, False])
    found = TRUNCATION["soft_overlong"](
        scores, ended, torch.tensor([4, 8, 11]), 10, buffer=4, penalty=2.0
    )
    # 10 - 4 = 6 tokens are free; 8 costs 2 (8 - 6) / 4.
    torch.testing.assert_close(found.scores, torch.tensor([0.0, -1.0, -2.0]))


def test_all_masked_part_of_a_group_counts_in_the_baseline_only() -> None:
    """Masked for its length, an answer of 0 still makes its peers' 1 worth more than the mean."""
    mask = torch.ones(4, 2, dtype=torch.bool)
    scores, ended = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([True, True, True, False])
    treated = TRUNCATION["mask"](scores, ended)
    rewards = token_rewards(treated.scores, torch.zeros(4, 2), mask, kl_coef=0.0)
    found = parts.call(
        ADVANTAGES["group_mean"],
        {"rewards": rewards, "scores": treated.scores, "response_mask": mask, "group_size": 4},
    )
    torch.testing.assert_close(found.advantages[:, 0], torch.tensor([0.25, 0.25, 0.25, -0.75]))
    assert treated.keep is ended
    assert reduction_denominator(mask & treated.keep[:, None], "token_mean") == 6


# --- known faults: each turns green when it is mended ---


def test_full_kl_of_near_policies_keeps_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(1, 50, 2000, generator=generator)
    logits = ref + 1e-4 * torch.randn(1, 50, 2000, generator=generator)
    weight = torch.ones(1, 50)
    _, gradient = value_and_gradient(lambda x: full_kl(x, ref), logits, weight)
    _, exact = value_and_gradient(
        lambda x: full_kl(x, ref.double()), logits.double(), weight.double()
    )
    assert float((gradient - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize(("level", "size"), [(0.7, 13), (100.3, 64), (12345.6, 64)])
def test_equal_values_whiten_to_zero(level: float, size: int) -> None:
    found = whiten(torch.full((1, size), level), torch.ones(1, size, dtype=torch.bool))
    assert float(found.abs().max()) < 1e-6


def test_equal_scores_teach_reinforce_plus_plus_nothing() -> None:
    rewards = torch.zeros(16, 20)
    rewards[:, -1] = 100.3
    found = reinforce_plus_plus_advantages(rewards, torch.ones(16, 20, dtype=torch.bool))
    assert float(found.advantages.abs().max()) < 1e-6


@pytest.mark.parametrize(
    "compute",
    [
        lambda: reward_to_go(
            torch.tensor([[0, 1, 1]]), torch.ones(1, 3, dtype=torch.bool), gamma=0.5
        ),
        lambda: token_rewards(
            torch.tensor([0.5]),
            torch.zeros(1, 2, dtype=torch.int64),
            torch.ones(1, 2, dtype=torch.bool),
            kl_coef=0.0,
        ),
        lambda: sapo_loss(
            torch.tensor([[0.5]]),
            torch.zeros(1, 1),
            torch.tensor([[-1]]),
            torch.ones(1, 1, dtype=torch.bool),
        ),
        lambda: group_mean(torch.tensor([1, 0]), 2),
        lambda: group_mean(torch.tensor([True, False]), 2),
    ],
    ids=["reward_to_go", "token_rewards", "sapo", "group_of_integers", "group_of_bools"],
)
def test_integers_are_refused(compute: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="floating"):
        compute()


@pytest.mark.parametrize("name", ["bradley_terry", "sft", "orpo", "best_of_group"])
def test_integers_are_refused_and_not_cut_off(name: str) -> None:
    ints = torch.tensor([-1, -2])
    table, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
    calls = {
        "bradley_terry": lambda: bradley_terry_loss(ints, ints),
        "sft": lambda: PREFERENCE_LOSSES["sft"](ints),
        "orpo": lambda: PREFERENCE_LOSSES["orpo"](ints, ints),
        "best_of_group": lambda: ADVANTAGES["best_of_group"](table, ints.float(), mask, 2),
    }
    with pytest.raises(ValueError, match=r"need floating point numbers, got torch\.int64"):
        calls[name]()


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_a_batch_without_a_token_has_no_advantage(name: str) -> None:
    table, mask = torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.bool)
    available = {
        "rewards": table, "scores": torch.ones(4), "values": table, "final_values": torch.ones(4),
        "response_mask": mask, "group_size": 2, "state": torch.zeros(0),
    }  # fmt: skip
    options = {"constant_baseline": {"baseline": 0.0}}.get(name, {})
    with pytest.raises(ValueError, match="the mask selects nothing, so there is no advantage"):
        parts.call(ADVANTAGES[name], available, **options)
    mask[1, 0] = True
    assert parts.call(ADVANTAGES[name], available, **options).advantages.shape == (4, 3)
