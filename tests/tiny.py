"""Small random models of several architectures, a word-level tokenizer, and settings, for many tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhf import config, presets
from rlhf.data.text import TextCodec
from rlhf.optimise.preference import PairIds

PAD, EOS, UNK = 0, 1, 2
WORDS = [f"w{i}" for i in range(3, 20)]  # the word w7 is token 7
VOCABULARY = 3 + len(WORDS)
# Wide weights, so that a wrong position, mask or token changes an output plainly.
SPREAD = {"initializer_range": 0.3}
CPU = torch.device("cpu")
torch.set_num_threads(1)  # more only wait for each other on models this small


def tokenizer(*, pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    backend = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<eos>" if pad_is_eos else "<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def model_settings(**changes: Any) -> config.Model:
    values: dict[str, Any] = {
        "base": "somewhere",
        "revision": None,
        "demo": None,
        "tokenizer": None,
        "chat_template": "none",
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
        "too_long": "error",
        "dtype": "float32",
        "device": "cpu",
    }
    return config.Model(**(values | changes))


def codec(**changes: Any) -> TextCodec:
    return TextCodec(tokenizer(), model_settings(**changes))


def llama(seed: int = 0, vocabulary: int = VOCABULARY, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | SPREAD | changes))).eval()


def qwen2(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=64,
            **SPREAD,
        )
    ).eval()


def gpt2(seed: int = 0, dropout: float = 0.0) -> PreTrainedModel:
    """Learned absolute positions."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **SPREAD,
        )
    ).eval()


def neox(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=64,
            **SPREAD,
        )
    ).eval()


ARCHITECTURES = {"llama": llama, "qwen2": qwen2, "gpt2": gpt2, "neox": neox}


def optimization(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "learning_rate": 1e-2,
        "warmup_steps": 0,
        "final_lr_fraction": 1.0,
        "weight_decay": 0.0,
        "adam_betas": [0.9, 0.95],
        "max_grad_norm": 1.0,
    }
    return values | changes


def rl_candidate(**changes: Any) -> config.RlCandidate:
    """GRPO without a deviation or a KL term, unless told otherwise; parts may be names alone."""
    values: dict[str, Any] = {
        "round": "r1",
        "from": "r0",
        "learns_from": "r1/reward_model",
        "kind": "rl",
        "algorithm": "test",
        "advantage": "group_mean",
        "loss": "ppo_clip",
        "kl": None,
        "reference": "previous" if changes.get("kl") else "none",
        "aggregate": "mean",
        "truncated": "keep",
        "steps": 2,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "temperature": 1.0,
        "epochs_per_step": 1,
        "minibatches": 1,
        "micro_batch_size": 16,
        "reduction": "constant_length",
        "checkpoint_every": 1,
    }
    values |= optimization() | changes
    if values["reduction"] == "constant_length":
        values.setdefault("length_constant", "batch_mean")
    return config.RlCandidate(**presets.resolve(values))


def value_settings(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "learning_rate": 1e-2,
        "coef": 1.0,
        "clip": None,
        "warmup_steps": 0,
        "init": "policy",
    }
    return values | changes


def preference_candidate(**changes: Any) -> config.PreferenceCandidate:
    values: dict[str, Any] = {
        "round": "r1",
        "from": "r0",
        "learns_from": "r1/preferences",
        "kind": "preference",
        "algorithm": "test",
        "losses": [{"kind": "sigmoid", "beta": 0.1}],
        "reference": "previous",
        "pairs_per_group": 2,
        "epochs": 1,
        "batch_size": 8,
        "micro_batch_size": 4,
        "checkpoint_every": 1,
    }
    return config.PreferenceCandidate(**(values | optimization(learning_rate=1e-3) | changes))


def online_candidate(**changes: Any) -> config.OnlinePreferenceCandidate:
    values: dict[str, Any] = {
        "round": "r1",
        "from": "r0",
        "learns_from": "r1/reward_model",
        "kind": "online_preference",
        "algorithm": "test",
        "losses": [{"kind": "sigmoid", "beta": 0.1}],
        "reference": "previous",
        "aggregate": "mean",
        "steps": 2,
        "prompts_per_step": 6,
        "samples_per_prompt": 4,
        "temperature": 1.0,
        "epochs_per_step": 1,
        "minibatches": 1,
        "micro_batch_size": 6,
        "checkpoint_every": 1,
    }
    return config.OnlinePreferenceCandidate(**presets.resolve(values | optimization() | changes))


PROMPTS = [[5], [6, 7], [8, 9, 10], [11, 3], [12], [13, 14, 15, 16]]


def share_of_w7(
    prompts: Sequence[list[int]], texts: Sequence[str], ended: Sequence[bool]
) -> torch.Tensor:
    """The share of an answer's words that are w7; an empty answer has none."""
    return torch.tensor([t.split().count("w7") / max(1, len(t.split())) for t in texts])


def consistent_pairs(count: int = 16) -> list[PairIds]:
    """The answer with more of token 7 is chosen; lengths differ."""
    torch.manual_seed(0)
    pairs = []
    for i in range(count):
        prompt = torch.randint(3, 20, (1 + i % 4,)).tolist()
        chosen = [7] * (1 + i % 3) + [8] * (i % 2) + [EOS]
        rejected = torch.randint(9, 20, (1 + i % 5,)).tolist() + [EOS] * (i % 2)
        pairs.append(PairIds(prompt, chosen, rejected))
    return pairs


@torch.no_grad()
def token_logps(
    model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of an answer's tokens, by definition: one unpadded sequence, float64."""
    logits = model(torch.tensor([prompt + response])).logits[0].double() / temperature
    table = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return table.gather(1, torch.tensor(response)[:, None]).squeeze(1)


@torch.no_grad()
def shift(model: torch.nn.Module, size: float = 0.02) -> None:
    """Another policy: every weight moves away from 0."""
    for parameter in model.parameters():
        parameter.add_(size * torch.sign(parameter))


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same_weights(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
