"""Losses over pairs against TRL's: the same tensors in, the same loss and gradient out.

The gradient is taken at the per-token log-probabilities, so masks and sums are compared as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.algos import parts
from rlhf.algos.logprobs import token_logprobs
from rlhf.algos.masking import masked_mean, masked_sum
from rlhf.algos.preference_losses import PREFERENCE_LOSSES, weighted_sum
from rlhf.algos.reward_model_losses import bradley_terry_loss, bradley_terry_margin_loss
from tests.parity import peer

pytestmark = pytest.mark.parity

PAIRS, SIZE = 4, 7


def draw(seed: int, pairs: int = PAIRS) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and reference log-probs (2B, S - 1), the chosen first; completion mask (2B, S)."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref = -3 * torch.rand(
        2, 2 * pairs, SIZE - 1, generator=generator, dtype=torch.float64
    )
    lengths = torch.randint(1, SIZE - peer.PROMPT + 1, (2 * pairs,), generator=generator)
    positions = torch.arange(SIZE) - peer.PROMPT
    return logprobs, ref, (positions >= 0) & (positions < lengths[:, None])


def ours(name: str, ref: Tensor, mask: Tensor, **options: Any) -> peer.Loss:
    part = PREFERENCE_LOSSES[name]
    return lambda logprobs: parts.call(part, peer.pair_inputs(logprobs, ref, mask), **options).loss


def theirs(name: str, ref: Tensor, mask: Tensor, **options: Any) -> peer.Loss:
    return lambda logprobs: peer.dpo(logprobs, ref, mask, name, **options)


@pytest.mark.parametrize(
    "name",
    ["sigmoid", "hinge", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "bco_pair"],
)
@pytest.mark.parametrize("beta", [0.05, 0.7])
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_of_the_same_name(name: str, beta: float, seed: int) -> None:
    """`bco_pair` of TRL has no running shift of the rewards: ours with the shift of the start, 0."""
    logprobs, ref, mask = draw(seed)
    peer.assert_parity(
        ours(name, ref, mask, beta=beta), theirs(name, ref, mask, beta=beta), logprobs
    )


@pytest.mark.parametrize("name", ["robust", "exo_pair"])
@pytest.mark.parametrize("label_smoothing", [0.01, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_with_label_smoothing(name: str, label_smoothing: float, seed: int) -> None:
    logprobs, ref, mask = draw(seed)
    options = {"beta": 0.3, "label_smoothing": label_smoothing}
    # TRL takes the logarithm of exo_pair's smoothing in float32.
    peer.assert_parity(
        ours(name, ref, mask, **options),
        theirs(name, ref, mask, **options),
        logprobs,
        tolerance=1e-7,
    )


@pytest.mark.parametrize(
    ("options", "trl_options"),
    [
        ({"divergence": "reverse_kl"}, {"f_divergence": "reverse_kl"}),
        ({"divergence": "forward_kl"}, {"f_divergence": "forward_kl"}),
        ({"divergence": "js"}, {"f_divergence": "js_divergence"}),
        ({"divergence": "alpha", "alpha": 0.3}, {"f_divergence": "alpha_divergence", "alpha": 0.7}),
    ],
    ids=["reverse_kl", "forward_kl", "js", "alpha"],
)
def test_divergences(options: dict[str, Any], trl_options: dict[str, Any]) -> None:
    logprobs, ref, mask = draw(0)
    single = options["divergence"] == "alpha"  # TRL's has no float64
    dtype, tolerance = (torch.float32, 1e-5) if single else (torch.float64, 1e-12)
    peer.assert_parity(
        ours("f_dpo", ref.to(dtype), mask, beta=0.2, **options),
        theirs("sigmoid", ref.to(dtype), mask, beta=0.2, **trl_options),
        logprobs.to(dtype),
        tolerance=tolerance,
    )


def test_forward_kl_of_a_fallen_response_differs() -> None:
    """A chosen response 100 nats below the reference: exp(100) is infinite in float32.

    TRL's loss is infinite there and its gradient NaN, which no later step repairs; ours goes on as
    the tangent, finite and pulling upwards.
    """
    mask = (torch.arange(SIZE) == peer.PROMPT).expand(2, SIZE)
    ref = torch.full((2, SIZE - 1), -1.0)
    logprobs = ref.clone()
    logprobs[0, peer.PROMPT - 1] -= 100
    leaf = logprobs.requires_grad_()
    other = theirs("sigmoid", ref, mask, beta=0.1, f_divergence="forward_kl")(leaf)
    assert not peer.gradient(other, leaf).isfinite().all()
    mine = ours("f_dpo", ref, mask, beta=0.1, divergence="forward_kl")(leaf)
    slope = peer.gradient(mine, leaf)[0, peer.PROMPT - 1]
    assert mine.isfinite()
    assert slope.isfinite()
    assert slope < 0


def test_label_smoothing_of_dpo() -> None:
    """TRL has no smoothed `sigmoid`; `aot` sorts the batch's margins, which for one pair is cDPO."""
    logprobs, ref, mask = draw(0, pairs=1)
    peer.assert_parity(
        ours("sigmoid", ref, mask, beta=0.3, label_smoothing=0.2),
        theirs("aot", ref, mask, beta=0.3, label_smoothing=0.2),
        logprobs,
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_ipo_of_one_token(seed: int) -> None:
    logprobs, ref, _ = draw(seed)
    one = (torch.arange(SIZE) == peer.PROMPT).expand(2 * PAIRS, SIZE)
    peer.assert_parity(ours("ipo", ref, one, beta=0.2), theirs("ipo", ref, one, beta=0.2), logprobs)


@pytest.mark.parametrize(("name", "trl_name"), [("ipo", "ipo"), ("sigmoid", "sigmoid_norm")])
@pytest.mark.parametrize("seed", [0, 1])
def test_length_normalised(name: str, trl_name: str, seed: int) -> None:
    """Ours on per-token means is TRL's `ipo`, and its `sigmoid_norm`."""
    logprobs, ref, mask = draw(seed)

    def means(x: Tensor) -> tuple[Tensor, Tensor]:
        of_all = masked_mean(x, mask[:, 1:], dim=1)
        return of_all[:PAIRS], of_all[PAIRS:]

    def mine(x: Tensor) -> Tensor:
        return PREFERENCE_LOSSES[name](*means(x), *means(ref), beta=0.7).loss

    peer.assert_parity(mine, theirs(trl_name, ref, mask, beta=0.7), logprobs)


def test_ipo_of_more_tokens_differs_by_the_length() -> None:
    """Ours sums the log-ratio over the response, as eq. 17 has it; TRL takes its per-token mean.

    With the sum, the optimum is the closed form log(pi_w / pi_l) - log(ref_w / ref_l) = 1 / (2 beta)
    of whole responses. With the mean, two responses of 3 tokens settle at 3 / (2 beta): the strength
    of the regularisation depends on the length.
    """
    three = (torch.arange(SIZE) >= peer.PROMPT) & (torch.arange(SIZE) < peer.PROMPT + 3)
    mask = three.expand(2, SIZE)
    ref = torch.full((2, SIZE - 1), -1.0, dtype=torch.float64)
    logprobs = ref.clone()
    logprobs[0] += 0.5 / 3  # the chosen's log-ratio is 0.5 in all
    logprobs[1] -= 0.5 / 3  # the margin is 1 = 1 / (2 beta) at beta = 0.5
    assert ours("ipo", ref, mask, beta=0.5)(logprobs).item() == pytest.approx(0.0)
    # TRL sees a margin of 1/3: (1/3 - 1)^2 = 4/9.
    assert theirs("ipo", ref, mask, beta=0.5)(logprobs).item() == pytest.approx(4 / 9)


def test_tail_of_apo_zero_in_float32_differs() -> None:
    """Where the chosen's log-ratio is large: 1 - sigmoid(x) is 0 from 17 on in float32.

    TRL's loss is flat there; sigmoid(-x) still has its exponential tail. (Both gradients are of no
    use at that size; the value is what a mean over pairs reports.)
    """
    mask = (torch.arange(SIZE) == peer.PROMPT).expand(2, SIZE)
    ref = torch.full((2, SIZE - 1), -30.0)
    logprobs = ref.clone()
    logprobs[0, peer.PROMPT - 1] += 20
    logprobs[1, peer.PROMPT - 1] -= 20
    tail = 2 * torch.tensor(-20.0, dtype=torch.float64).sigmoid().item()  # 4.1e-9
    assert ours("apo_zero", ref, mask, beta=1.0)(logprobs).item() == pytest.approx(tail)
    # The half of the rejected is sigmoid(-20) for both.
    assert theirs("apo_zero", ref, mask, beta=1.0)(logprobs).item() == pytest.approx(tail / 2)


@pytest.mark.parametrize("seed", [0, 1])
def test_simpo(seed: int) -> None:
    """TRL's `simpo_gamma` is divided by beta inside: it is the paper's gamma, as ours is."""
    logprobs, ref, mask = draw(seed)

    def trl(x: Tensor) -> Tensor:
        means = masked_mean(x, mask[:, 1:], dim=1)
        return peer.cpo(means[:PAIRS], means[PAIRS:], "simpo", beta=2.0, simpo_gamma=0.8)

    peer.assert_parity(ours("simpo", ref, mask, beta=2.0, gamma=0.8), trl, logprobs)


@pytest.mark.parametrize("seed", [0, 1])
def test_odds_ratio_of_orpo(seed: int) -> None:
    """TRL computes it in float32."""
    logprobs, ref, mask = draw(seed)

    def trl(x: Tensor) -> Tensor:
        means = masked_mean(x, mask[:, 1:], dim=1)
        penalty = peer.orpo_penalty(means[:PAIRS], means[PAIRS:], beta=0.4)
        return penalty - means[:PAIRS].mean()

    peer.assert_parity(ours("orpo", ref, mask, beta=0.4), trl, logprobs, tolerance=1e-6)


def test_supervised_term_of_orpo_differs() -> None:
    """ORPO's supervised term: ours is of the response (eq. 3), a mean over pairs; TRL's is of the
    prompt too, a mean over the batch's tokens.

    Training on the prompt teaches to write prompts, and a long prompt would drown the answer.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2 * PAIRS, SIZE, 5, generator=generator)
    ids = torch.randint(5, (2 * PAIRS, SIZE), generator=generator)
    mask = (torch.arange(SIZE) >= peer.PROMPT).expand(2 * PAIRS, SIZE)
    logprobs = token_logprobs(logits[:, :-1], ids[:, 1:])
    means = masked_mean(logprobs, mask[:, 1:], dim=1)
    penalty = peer.orpo_penalty(means[:PAIRS], means[PAIRS:], beta=0.4)
    whole = peer.orpo(logits, ids, mask, beta=0.4)
    torch.testing.assert_close(whole, penalty - logprobs[:PAIRS].mean())
    torch.testing.assert_close(
        ours("orpo", logprobs, mask, beta=0.4)(logprobs), penalty - means[:PAIRS].mean()
    )
    assert abs(logprobs[:PAIRS].mean() - means[:PAIRS].mean()) > 0.01


@pytest.mark.parametrize("length", [1, 4])
def test_sft_of_equal_lengths(length: int) -> None:
    logprobs, ref, _ = draw(0)
    positions = torch.arange(SIZE) - peer.PROMPT
    mask = ((positions >= 0) & (positions < length)).expand(2 * PAIRS, SIZE)
    peer.assert_parity(ours("sft", ref, mask), theirs("sft", ref, mask, beta=1.0), logprobs)


def test_sft_of_other_lengths_differs() -> None:
    """Chosen responses of 1 token (log-prob -1) and of 3 (log-prob -2 each).

    Ours: the mean over pairs, (1 + 2) / 2 = 1.5, as the pair losses it is added to. TRL: the mean
    over tokens, (1 + 6) / 4 = 1.75, so that pairs with long answers have more of the term.
    """
    positions = torch.arange(SIZE) - peer.PROMPT
    mask = (positions >= 0) & (positions < torch.tensor([1, 3, 1, 1])[:, None])
    logprobs = torch.tensor([-1.0, -2.0, -1.0, -1.0])[:, None].expand(4, SIZE - 1)
    assert ours("sft", logprobs, mask)(logprobs).item() == pytest.approx(1.5)
    assert theirs("sft", logprobs, mask, beta=1.0)(logprobs).item() == pytest.approx(1.75)


def test_a_weighted_sum() -> None:
    logprobs, ref, _ = draw(1)
    mask = (torch.arange(SIZE) >= peer.PROMPT).expand(2 * PAIRS, SIZE)
    weights = {"sigmoid": 1.0, "sft": 0.2}

    def mine(x: Tensor) -> Tensor:
        outputs = {
            "sigmoid": parts.call(
                PREFERENCE_LOSSES["sigmoid"], peer.pair_inputs(x, ref, mask), beta=0.3
            ),
            "sft": parts.call(PREFERENCE_LOSSES["sft"], peer.pair_inputs(x, ref, mask)),
        }
        return weighted_sum(outputs, weights).loss

    peer.assert_parity(
        mine,
        theirs("", ref, mask, beta=0.3, loss_types=tuple(weights.items())),
        logprobs,
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("labels", [[1, 0, 1, 1, 0, 0, 1, 0], [1] * 8, [0] * 8])
@pytest.mark.parametrize("kl_sign", [1, -1])
def test_kto(seed: int, labels: list[int], kl_sign: int) -> None:
    """The reference point is TRL's own estimate, the mean log-ratio of the mismatched, at least 0."""
    logprobs, ref, mask = draw(seed)
    desirable = torch.tensor(labels, dtype=torch.bool)
    ref_logps = masked_sum(ref, mask[:, 1:], dim=1)
    gap = kl_sign * torch.linspace(0, 0.8, 8, dtype=torch.float64)
    kl_nats = (gap.mean()).clamp(min=0)
    options = {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.4}

    def trl(x: Tensor) -> Tensor:
        mismatched = torch.full((8,), -5.0, dtype=torch.float64)
        loss, kl = peer.kto(x, ref_logps, mask, desirable, mismatched + gap, mismatched, **options)
        assert kl == pytest.approx(kl_nats.item())
        return loss

    def mine(x: Tensor) -> Tensor:
        logps = masked_sum(x, mask[:, 1:], dim=1)
        return PREFERENCE_LOSSES["kto"](logps, ref_logps, desirable, kl_nats, **options).loss

    peer.assert_parity(mine, trl, logprobs)


def test_apo_zero_of_single_responses() -> None:
    """TRL's `apo_zero_unpaired` is KTO with the reference point 0, and `apo_zero` taken apart."""
    logprobs, ref, mask = draw(2)
    desirable = torch.arange(2 * PAIRS) < PAIRS
    ref_logps = masked_sum(ref, mask[:, 1:], dim=1)
    nothing = torch.zeros((), dtype=torch.float64)

    def trl(x: Tensor) -> Tensor:
        unused = torch.zeros(1)
        return peer.kto(
            x, ref_logps, mask, desirable, unused, unused, beta=0.3, loss_type="apo_zero_unpaired"
        )[0]

    def mine(x: Tensor) -> Tensor:
        logps = masked_sum(x, mask[:, 1:], dim=1)
        return PREFERENCE_LOSSES["kto"](logps, ref_logps, desirable, nothing, beta=0.3).loss

    peer.assert_parity(mine, trl, logprobs)
    peer.assert_parity(lambda x: ours("apo_zero", ref, mask, beta=0.3)(x) / 2, trl, logprobs)


def scores(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(2 * PAIRS, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize("centering", [0.0, 0.01])
def test_bradley_terry(seed: int, with_margin: bool, centering: float) -> None:
    margins = torch.linspace(0, 1, PAIRS, dtype=torch.float64)

    def our_loss(x: Tensor) -> Tensor:
        pairs = (x[:PAIRS], x[PAIRS:])
        if with_margin:
            return bradley_terry_margin_loss(*pairs, margins, centering=centering).loss
        return bradley_terry_loss(*pairs, centering=centering).loss

    def their_loss(x: Tensor) -> Tensor:
        margin = margins if with_margin else None
        return peer.bradley_terry(x, margin=margin, centering=centering or None)[0]

    peer.assert_parity(our_loss, their_loss, scores(seed))


def test_accuracy_differs_where_scores_are_tied() -> None:
    """TRL counts a tie as wrong; ours leaves it out and reports it (an untrained model has many)."""
    tied = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 1.0])  # pairs (1, 1), (2, 1), (0, 1)
    _, theirs_metrics = peer.bradley_terry(tied)
    metrics = bradley_terry_loss(tied[:3], tied[3:]).metrics
    assert theirs_metrics["accuracy"] == [pytest.approx(1 / 3)]
    assert metrics["accuracy"].item() == pytest.approx(1 / 2)
    assert metrics["ties"].item() == pytest.approx(1 / 3)
    assert metrics["margin"].item() == pytest.approx(theirs_metrics["margin"][0])
