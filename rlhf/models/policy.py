"""Policies: causal language models by `transformers`, loaded, run over `Sequences`, and saved as safetensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf import config
from rlhf.algos.logprobs import response_outputs
from rlhf.errors import BadInput
from rlhf.models.sequences import Sequences, position_ids


def device_of(model: config.Model) -> torch.device:
    """The declared device; `auto` is CUDA when there is one."""
    if model.device == "cuda" and not torch.cuda.is_available():
        raise BadInput(
            "no CUDA device is visible",
            where="pipeline.yaml model.device=cuda",
            mend="use device: auto or cpu",
        )
    name = model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def new_policy(model: config.Model, tokenizer: Any, seed: int) -> PreTrainedModel:
    """A small Llama with new weights, sized by `model.demo`, over the tokenizer's vocabulary."""
    sizes = model.demo
    assert sizes is not None
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=sizes.hidden_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_heads,
            intermediate_size=sizes.intermediate_size,
            max_position_embeddings=sizes.max_positions,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    )


def load_base(model: config.Model, tokenizer: Any, seed: int) -> PreTrainedModel:
    """The base model that SFT starts from: demo, directory, GGUF file or hub id."""
    if model.base == "demo":
        return new_policy(model, tokenizer, seed)
    path = Path(model.base)
    arguments: dict[str, Any] = {"dtype": torch.float32}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BadInput("no such file", where=f"model.base={model.base}", mend="check the path")
        loaded = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, **arguments
        )
        _forget_gguf(loaded)
    elif path.exists() or model.base.startswith((".", "/", "~")):
        loaded = _load_directory(path, **arguments)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(
            model.base, revision=model.revision, trust_remote_code=False, **arguments
        )
    _check_context(loaded, model)
    _check_vocabulary(loaded, tokenizer, model)
    return loaded


def load_policy(directory: Path, device: torch.device) -> PreTrainedModel:
    """A policy this pipeline saved. Weights stay float32; bfloat16 is a matter of autocast."""
    return _load_directory(directory, dtype=torch.float32).to(device)  # type: ignore[arg-type]


def save_policy(model: PreTrainedModel, tokenizer: Any, directory: Path) -> None:
    """Weights (safetensors), config and tokenizer, loadable by any transformers program."""
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer.save_pretrained(directory)


def context_length(model: PreTrainedModel) -> int | None:
    """Longest sequence in tokens the architecture declares, if it declares one."""
    return getattr(model.config, "max_position_embeddings", None)


def parameters_accepted(model: nn.Module) -> frozenset[str]:
    """Names of `forward`'s parameters: architectures differ in what they accept."""
    return frozenset(inspect.signature(model.forward).parameters)


def response_logits(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Logits that predict each response token: (B, T, V).

    Position t holds the distribution over `response_ids[:, t]` given everything before it.
    Only response positions are projected onto the vocabulary.
    """
    num_tokens = sequences.response_ids.shape[1]
    accepted = parameters_accepted(model)
    mask = sequences.attention_mask
    inputs: dict[str, Any] = {"input_ids": sequences.input_ids, "attention_mask": mask.long()}
    if "position_ids" in accepted:
        inputs["position_ids"] = position_ids(mask)
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = num_tokens + 1
    return response_outputs(model(**inputs, use_cache=False).logits, num_tokens)


@contextlib.contextmanager
def precision(model: config.Model, device: torch.device) -> Iterator[None]:
    """bfloat16 arithmetic over float32 weights where declared; float32 otherwise."""
    if model.dtype == "bfloat16":
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield
    else:
        yield


def _load_directory(path: Path, **arguments: Any) -> PreTrainedModel:
    if not path.is_dir():
        raise BadInput("no such model directory", where=str(path), mend="check the path")
    weights = [*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")]
    if not (path / "config.json").is_file() or not weights:
        missing = "config.json" if weights else "weights (*.safetensors)"
        raise BadInput(
            f"the directory holds no {missing}",
            where=str(path),
            rule="a model directory has config.json and safetensors weights",
            mend="save it with save_pretrained(..., safe_serialization=True)",
        )
    return AutoModelForCausalLM.from_pretrained(
        str(path), local_files_only=True, use_safetensors=True, trust_remote_code=False, **arguments
    )


def _check_context(loaded: PreTrainedModel, model: config.Model) -> None:
    limit, wanted = context_length(loaded), model.max_prompt_tokens + model.max_response_tokens
    if limit is not None and wanted > limit:
        raise BadInput(
            f"max_prompt_tokens + max_response_tokens = {wanted} tokens",
            where="pipeline.yaml model",
            rule=f"{model.base} reads at most {limit} tokens",
            mend="lower the two limits",
        )


def _check_vocabulary(loaded: PreTrainedModel, tokenizer: Any, model: config.Model) -> None:
    size = int(loaded.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    if len(tokenizer) > size:
        raise BadInput(
            f"the tokenizer has {len(tokenizer)} tokens",
            where=f"model.tokenizer={model.tokenizer}",
            rule=f"{model.base} knows {size}",
            mend="use the tokenizer that belongs to the model (tokenizer: null)",
        )


def _forget_gguf(model: PreTrainedModel) -> None:
    """A model read from GGUF is in full precision again; without this it refuses to be saved."""
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            setattr(model, name, None)
    model.is_quantized = False  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
