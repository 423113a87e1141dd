"""Log-probabilities and entropy against TRL's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf.algos.logprobs import (
    chunked_logprobs,
    response_outputs,
    sequence_logprobs,
    token_entropy,
    token_logprobs,
)
from tests.parity import peer

pytestmark = pytest.mark.parity

B, S, V, H = 3, 6, 11, 5


def draw(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, S, V), ids (B, S), weights (B, S) that make a scalar of a table."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(B, S, V, generator=generator, dtype=torch.float64)
    ids = torch.randint(V, (B, S), generator=generator)
    return logits.to(dtype), ids, torch.randn(B, S, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=["f64", "f32"]
)
def test_selective_log_softmax(temperature: float, dtype: torch.dtype, tolerance: float) -> None:
    from trl.trainer.utils import selective_log_softmax

    logits, ids, weights = draw(0, dtype)
    weights = weights.to(dtype)
    peer.assert_parity(
        lambda x: (weights * token_logprobs(x, ids, temperature=temperature)).sum(),
        lambda x: (weights * selective_log_softmax(x, ids, temperature=temperature)).sum(),
        logits,
        tolerance=tolerance,
    )


def test_bfloat16_logits_are_ours_in_float32() -> None:
    """TRL normalises bfloat16 logits in bfloat16; ours widens first.

    Between -8 and -4 a bfloat16 moves in steps of 1/32, so the ratio of two such log-probs is off by
    up to 3 %; ours stays within float32 of the exact value.
    """
    from trl.trainer.utils import selective_log_softmax

    logits, ids, _ = draw(1, torch.bfloat16)
    exact = token_logprobs(logits.double(), ids)
    mine, other = token_logprobs(logits, ids), selective_log_softmax(logits, ids)
    assert mine.dtype == torch.float32
    assert (mine.double() - exact).abs().max() < 1e-5
    assert (other.double() - exact).abs().max() > 1e-3
    torch.testing.assert_close(other.float(), mine, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=["f64", "f32"]
)
def test_entropy(dtype: torch.dtype, tolerance: float) -> None:
    from trl.trainer.utils import entropy_from_logits

    logits, _, weights = draw(2, dtype)
    weights = weights.to(dtype)
    peer.assert_parity(
        lambda x: (weights * token_entropy(x)).sum(),
        lambda x: (weights * entropy_from_logits(x)).sum(),
        logits,
        tolerance=tolerance,
    )


def test_entropy_at_a_temperature() -> None:
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logits, ids, weights = draw(3)
    peer.assert_parity(
        lambda x: (weights * token_entropy(x, temperature=0.6)).sum(),
        lambda x: (weights * selective_log_softmax_and_entropy(x, ids, temperature=0.6)[1]).sum(),
        logits,
    )


def test_entropy_with_an_impossible_token_differs() -> None:
    """A banned token (logit -inf) adds 0 * -inf = NaN to TRL's entropy, and p log p -> 0 to ours."""
    from trl.trainer.utils import entropy_from_logits

    logits = torch.tensor([[[0.0, 0.0, -float("inf")]]])
    assert entropy_from_logits(logits).isnan().all()
    assert token_entropy(logits).item() == pytest.approx(0.6931472)  # log 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_logps_of_a_response(side: str) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    logits, ids, weights = draw(4)
    columns = torch.arange(S)
    mask = (columns >= 2) & (columns < 5) if side == "right" else columns >= 3
    mask = mask.repeat(B, 1)
    mask[0, 4] = False
    labels = ids.masked_fill(~mask, -100)
    peer.assert_parity(
        lambda x: (weights[:, 0] * sequence_logprobs(x, ids, mask)).sum(),
        lambda x: (weights[:, 0] * CPOTrainer.get_batch_logps(x, labels)).sum(),
        logits,
    )


def hidden_and_head(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(B, S, H, generator=generator),
        torch.randn(V, H, generator=generator),
        torch.randn(V, generator=generator),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_kernel_of_trl(temperature: float) -> None:
    """`ChunkedLogProbFunction` tiles the vocabulary; the logits that ours reads give the same."""
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight, bias = hidden_and_head(5)
    _, ids, weights = draw(5, torch.float32)
    weights = weights.float()

    def theirs(x: Tensor) -> Tensor:
        flat = ChunkedLogProbFunction.apply(
            x.reshape(-1, H), weight, bias, ids.reshape(-1), temperature, 4, None, 1.0, ()
        )[0]
        return (weights * flat.view(B, S)).sum()

    def full(x: Tensor) -> Tensor:
        logps = token_logprobs(x @ weight.T + bias, ids, temperature=temperature)
        return (weights * logps).sum()

    def chunked(x: Tensor) -> Tensor:
        every = torch.ones(B, S, dtype=torch.bool)
        logps = chunked_logprobs(
            x, weight, ids, every, bias=bias, temperature=temperature, chunk_size=4
        ).logprobs
        return (weights * logps).sum()

    peer.assert_parity(full, theirs, hidden, tolerance=1e-5)
    peer.assert_parity(chunked, theirs, hidden, tolerance=1e-5)


def test_chunked_entropy_and_head_gradient() -> None:
    """The gradient of the output head, and the entropy's, against TRL's kernel."""
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight, bias = hidden_and_head(7)
    _, ids, weights = draw(7, torch.float32)
    weights = weights.float()
    every = torch.ones(B, S, dtype=torch.bool)

    def theirs(head: Tensor) -> Tensor:
        flat = ChunkedLogProbFunction.apply(
            hidden.reshape(-1, H), head, bias, ids.reshape(-1), 0.7, 4, None, 1.0, ("entropy",)
        )
        return (weights * (flat[0] + 2 * flat[1]).view(B, S)).sum()

    def ours(head: Tensor) -> Tensor:
        found = chunked_logprobs(
            hidden,
            head,
            ids,
            every,
            bias=bias,
            temperature=0.7,
            chunk_size=5,
            entropy_gradient=True,
        )
        return (weights * (found.logprobs + 2 * found.entropy)).sum()

    peer.assert_parity(ours, theirs, weight, tolerance=2e-5)


@pytest.mark.parametrize("padding", [0, 2])
def test_completion_logprobs_of_a_model(padding: int) -> None:
    """`GRPOTrainer._get_per_token_logps_and_entropies` through a transformer with TRL's fused head.

    The prompt is padded on the left by `padding` tokens, the response has `T` = 3.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    _, ids, _ = draw(6)
    attention = (torch.arange(S) >= padding).long().expand(B, S)
    logits = model(input_ids=ids, attention_mask=attention).logits
    response = ids[:, -3:]
    mine = token_logprobs(response_outputs(logits, 3), response, temperature=0.8)
    entropy = token_entropy(response_outputs(logits, 3), temperature=0.8)
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    trainer = peer.bare(GRPOTrainer)
    trainer.accelerator.autocast = torch.no_grad
    theirs, their_entropy, _ = trainer._get_per_token_logps_and_entropies(
        model, ids, attention, 3, compute_entropy=True
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, their_entropy, rtol=1e-5, atol=1e-5)
