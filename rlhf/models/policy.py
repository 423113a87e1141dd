"""Policies: causal language models by `transformers`, loaded, run over `Sequences`, and saved as safetensors."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf import config
from rlhf.algos.logprobs import response_outputs
from rlhf.artifacts import remake
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
    loaded: Any
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BadInput("no such file", where=f"model.base={model.base}", mend="check the path")
        with _named_errors(model, "a GGUF file of an architecture that transformers reads"):
            loaded = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True, **arguments
            )
        _forget_gguf(loaded)
    elif path.exists() or model.base.startswith((".", "/", "~")):
        with _named_errors(model, "a causal language model whose config.json fits its weights"):
            loaded = _load_directory(path, **arguments)
    else:
        with _named_errors(model, "a directory, a .gguf file, or a hub id like owner/name"):
            loaded = AutoModelForCausalLM.from_pretrained(
                model.base,
                revision=model.revision,
                trust_remote_code=False,
                use_safetensors=True,
                **arguments,
            )
    _check_context(loaded, model)
    _check_vocabulary(loaded, tokenizer, model)
    _drop_dropout(loaded)
    _agree_on_the_end(loaded, tokenizer)
    return loaded


def load_policy(directory: Path, device: torch.device) -> PreTrainedModel:
    """A policy this pipeline saved. Weights stay float32; bfloat16 is a matter of autocast."""
    with whole(directory):
        loaded = _load_directory(directory, dtype=torch.float32)
    return loaded.to(device)  # type: ignore[arg-type]


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


@contextlib.contextmanager
def whole(directory: Path) -> Iterator[None]:
    """What is wrong with a model directory of the pipeline's own, as one message with the stage that makes it."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # each reader raises kinds of its own
        problem = str(error).split("\n")[0][:300]
        raise BadInput(
            f"the model cannot be read: {problem or type(error).__name__}",
            where=str(directory),
            rule="config.json and safetensors weights, as the stage wrote them",
            mend=f"make it again: {remake(directory)}",
        ) from error


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


@contextlib.contextmanager
def _named_errors(model: config.Model, rule: str) -> Iterator[None]:
    """What `transformers`, its readers and the network raise, as one message that names the model."""
    try:
        yield
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # each reader raises kinds of its own
        problem = " ".join(str(error).split())[:300]
        raise BadInput(
            f"no model could be read: {type(error).__name__}: {problem}",
            where=f"model.base={model.base}",
            rule=rule,
            mend="correct the name or path; for a hub id check revision and network, "
            "or download it and name the directory",
        ) from error


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


def _drop_dropout(model: PreTrainedModel) -> None:
    """Off in every module and in the saved config: the ratio to the sampling policy must start at 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for holder in (model.config, *model.modules()):
        for name, value in vars(holder).items():
            if re.search("dropout|pdrop", name) and isinstance(value, float):
                setattr(holder, name, 0.0)


def _agree_on_the_end(model: PreTrainedModel, tokenizer: Any) -> None:
    """Plain `generate` on the saved model stops where answers end here, and may be saved as it is."""
    settings = model.generation_config
    if settings is None:
        return
    ends = settings.eos_token_id
    known = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if tokenizer.eos_token_id not in known:
        settings.eos_token_id = [tokenizer.eos_token_id, *known]
    if settings.pad_token_id is None:
        pad_id = tokenizer.pad_token_id
        settings.pad_token_id = tokenizer.eos_token_id if pad_id is None else pad_id
    if any(getattr(settings, name, None) is not None for name in ("temperature", "top_p", "top_k")):
        settings.do_sample = True  # without it transformers refuses to save these


def _forget_gguf(model: PreTrainedModel) -> None:
    """A model read from GGUF is in full precision again; without this it refuses to be saved."""
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            setattr(model, name, None)
    model.is_quantized = False  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
