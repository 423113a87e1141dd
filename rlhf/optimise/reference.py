"""The reference's log-probs on disk, under a key made of everything that decides their bits.

The reference is frozen, so its log-probs of a fixed set of sequences never change: a rerun, another
seed of the order, or a candidate with another loss reads them instead of computing them. A key is
never told apart by path, name or time, so there is nothing to invalidate.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.artifacts import temporary_file
from rlhf.models.sequences import Sequences

DIRECTORY = Path(".scratch/reference")
FORMAT = 1  # raise it with any change of the code that computes what is kept

_log = logging.getLogger(__name__)


class ReferenceCache:
    """Named tensors by key, one safetensors file each: `<directory>/<key>.safetensors`.

    A file appears whole or not at all, so writers of one key may race. At most `max_files` files
    are kept; the one not read for longest goes first.
    """

    def __init__(self, directory: Path = DIRECTORY, *, max_files: int = 32) -> None:
        if max_files < 1:
            raise ValueError(f"max_files must be at least 1, got {max_files}")
        self.directory, self.max_files = directory, max_files

    def get_or_compute(
        self, key: str, compute: Callable[[], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The tensors kept under the key, else those of `compute()`, which are kept; on the CPU.

        A file that is damaged is reported in the log, computed again and replaced.
        """
        path = self.directory / f"{key}.safetensors"
        found = _read(path)
        if found is not None:
            os.utime(path)
            return found
        made = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in compute().items()
        }
        with temporary_file(path) as new:
            save_file(made, new, metadata={"sha256": state_digest(made)})
        self._trim()
        return made

    def _trim(self) -> None:
        """Drop the oldest files; what killed writers left behind ages with the others."""
        files = sorted(self.directory.iterdir(), key=_last_use)
        for path in files[: max(0, len(files) - self.max_files)]:
            path.unlink(missing_ok=True)


def reference_key(
    reference: PreTrainedModel,
    parts: Sequence[Sequences],
    *,
    quantity: str,
    dtype: str,
    micro_batch_size: int,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> str:
    """sha256 over what decides the bits of the reference's log-probs of these sequences.

    That is: the weights and the architecture (content, not path); every prompt's and response's
    token ids in order, with their boundaries, not their padding (so template, length limit, subset
    and order count); the arithmetic, the batches, and the versions, device and threads that run it.

    Args:
        parts: the tables of sequences, in order; chosen and rejected answers for pairs.
        quantity: what is kept for each sequence, like "sequence log-probs in nats".
        dtype, micro_batch_size, temperature, chunk_tokens: as the computation uses them.

    Returns: 64 hexadecimal digits.
    """
    architecture = reference.config.to_dict()
    architecture.pop("_name_or_path", None)
    device = reference.device
    settings = {
        "format": FORMAT,
        "quantity": quantity,
        "dtype": dtype,
        "micro_batch_size": micro_batch_size,
        "temperature": temperature,
        "chunk_tokens": chunk_tokens,
        "class": type(reference).__name__,
        "architecture": architecture,  # holds the version of transformers
        "attention": reference.config._attn_implementation,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    whole = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    whole.update(state_digest(reference.state_dict()).encode())
    for part in parts:
        for ids, mask in (
            (part.prompt_ids, part.prompt_mask),
            (part.response_ids, part.response_mask),
        ):
            table = {"lengths": mask.sum(1), "ids": ids[mask]}
            whole.update(state_digest(table).encode())
    return whole.hexdigest()


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, types, shapes and bytes."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _read(path: Path) -> dict[str, Tensor] | None:
    """The tensors of a file, or None where there is none or it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = (file.metadata() or {}).get("sha256")
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        problem = str(error)
    else:
        if expected == state_digest(tensors):
            return tensors
        problem = "its content is not what was written"
    _log.warning("%s: damaged (%s); computing it again", path, problem)
    return None


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process dropped it
        return 0.0
