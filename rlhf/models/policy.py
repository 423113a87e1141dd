"""Policies: causal language models by `transformers`, loaded, run over `Sequences`, and saved as safetensors."""

from __future__ import annotations

import contextlib
import inspect
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
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
    inputs = _inputs(model, sequences)
    if "logits_to_keep" in parameters_accepted(model):
        inputs["logits_to_keep"] = num_tokens + 1
    return response_outputs(model(**inputs).logits, num_tokens)


def response_hidden(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Last hidden states, whose `head_of` logits predict each response token: (B, T, H).

    The same pass as `response_logits` without the (B, T, V) table. Raises BadInput where the
    model's logits are not that linear head's.
    """
    head_of(model)
    hidden = model.base_model(**_inputs(model.base_model, sequences)).last_hidden_state
    return response_outputs(hidden, sequences.response_ids.shape[1])


def head_of(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight (V, H) and bias (V,) or None of the map from last hidden state to logits.

    Raises BadInput if the model's logits are anything but that map's (a soft cap, a scale, several
    heads). That is seen once per model, on one short input.
    """
    head = model.get_output_embeddings()
    if model not in _LINEAR:
        problem = _not_linear(model, head)
        if problem:
            raise BadInput(
                f"{type(model).__name__} {problem}",
                where="pipeline.yaml model.logits_chunk_tokens",
                rule="chunked log-probs need logits that are a linear map of the last hidden state",
                mend="set model.logits_chunk_tokens: null",
            )
        _LINEAR.add(model)
    assert isinstance(head, nn.Linear)
    return head.weight, head.bias


_LINEAR: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models that `head_of` has seen
_LOUD = 100.0  # a soft cap hardly shows on the small logits of a fresh model


@torch.no_grad()
def _not_linear(model: PreTrainedModel, head: nn.Module | None) -> str | None:
    """What is wrong with the claim that logits = head(last hidden state); None if it holds.

    The head's output is made louder on its way, so that whatever follows it shows.
    """
    if not isinstance(head, nn.Linear) or model.base_model is model:
        return "has no linear output layer over a body of its own"
    device = head.weight.device
    ids = (torch.arange(8, device=device) % head.weight.shape[0])[None]
    hidden = model.base_model(ids, use_cache=False).last_hidden_state
    expected = _LOUD * functional.linear(hidden, head.weight, head.bias)
    hook = head.register_forward_hook(lambda module, inputs, output: _LOUD * output)
    try:
        found = model(ids, use_cache=False).logits
    finally:
        hook.remove()
    gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return None if gap <= 1e-3 else f"changes its logits after the output layer (by {gap:.2g})"


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Keep each layer's input only and compute the layer again in the backward pass.

    Values and gradients stay the same to the bit. It acts in train mode under autograd, where our
    passes use no cache; sampling keeps its cache. Raises BadInput for a model that cannot do it.
    """
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise BadInput(
            f"{type(model).__name__} cannot compute its layers again",
            where="pipeline.yaml model.gradient_checkpointing=true",
            rule="transformers supports gradient checkpointing for the architecture",
            mend="set model.gradient_checkpointing: false",
        ) from error


def _inputs(model: nn.Module, sequences: Sequences) -> dict[str, Any]:
    """What a pass over whole sequences feeds the model."""
    mask = sequences.attention_mask
    inputs: dict[str, Any] = {"input_ids": sequences.input_ids, "attention_mask": mask.long()}
    if "position_ids" in parameters_accepted(model):
        inputs["position_ids"] = position_ids(mask)
    return inputs | {"use_cache": False}


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
