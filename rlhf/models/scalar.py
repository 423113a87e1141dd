"""A backbone with one number per position: the critic's values and the reward model's scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from rlhf.algos.logprobs import response_outputs
from rlhf.algos.masking import last_index
from rlhf.models.policy import parameters_accepted, whole
from rlhf.models.sequences import Sequences, position_ids

HEAD_FILE = "head.safetensors"


class ScalarModel(nn.Module):
    """A transformer body and a linear head that starts at zero, so that its first targets are not noise."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_directory(cls, directory: Path, device: torch.device) -> ScalarModel:
        """From a policy's directory (head at zero) or a saved scalar model (head as trained)."""
        with whole(directory):
            backbone = AutoModel.from_pretrained(
                str(directory), local_files_only=True, use_safetensors=True, dtype=torch.float32
            )
            model = cls(backbone)
            if (directory / HEAD_FILE).is_file():
                model.head.load_state_dict(load_file(directory / HEAD_FILE))
        return model.to(device)

    def save(self, directory: Path, tokenizer: Any) -> None:
        """Body, head and tokenizer, all without pickle."""
        self.backbone.save_pretrained(directory, safe_serialization=True)
        save_file(self.head.state_dict(), directory / HEAD_FILE)
        tokenizer.save_pretrained(directory)

    def rescale_(self, mean: float, std: float) -> None:
        """Change the head so that the output is (output - mean) / std."""
        with torch.no_grad():
            self.head.weight.div_(std)
            self.head.bias.sub_(mean).div_(std)

    def outputs(self, sequences: Sequences) -> Tensor:
        """(B, P + T) float32: one number at every position."""
        accepted = parameters_accepted(self.backbone)
        mask = sequences.attention_mask
        inputs: dict[str, Any] = {"input_ids": sequences.input_ids, "attention_mask": mask.long()}
        if "position_ids" in accepted:
            inputs["position_ids"] = position_ids(mask)
        hidden = self.backbone(**inputs, use_cache=False).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):  # bfloat16 numbers tie too often
            return self.head(hidden.float()).squeeze(-1)

    def scores(self, sequences: Sequences) -> Tensor:
        """(B,): the output at the last real token: EOS, or the last token of a cut answer."""
        last = last_index(sequences.attention_mask)
        return self.outputs(sequences).gather(1, last[:, None]).squeeze(1)

    def values(self, sequences: Sequences) -> Tensor:
        """(B, T): V(s_t), read at the token before response token t."""
        return response_outputs(self.outputs(sequences), sequences.response_ids.shape[1])
