"""A committee of reward models: members, their common scale, and the one number that is optimised."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlhf import config
from rlhf.algos.reward_model_losses import AGGREGATES, average_weights
from rlhf.artifacts import read_json, remake
from rlhf.data.text import TextCodec
from rlhf.errors import BadInput
from rlhf.models.policy import precision
from rlhf.models.scalar import HEAD_FILE, ScalarModel
from rlhf.models.sequences import Sequences

Score = Callable[[Sequence[list[int]], Sequence[str], Sequence[bool]], Tensor]

SCALE_FILE = "scale.json"
SCORING_BATCH = 256
SCORING_TOKENS = 2**15  # at once, padding included


class Committee:
    """M reward models read from one directory; scores are scaled so that the incoming policy has mean 0, sd 1.

    Answers arrive as text and are tokenised here, so training and serving read the same ids.
    """

    def __init__(
        self,
        members: Sequence[ScalarModel],
        scales: Sequence[tuple[float, float]],
        codec: TextCodec,
        model: config.Model,
    ) -> None:
        self.members = list(members)
        self.scales = list(scales)
        self.codec = codec
        self.model = model

    @classmethod
    def load(
        cls, directory: Path, codec: TextCodec, model: config.Model, device: torch.device
    ) -> Committee:
        try:
            listed = read_json(directory / SCALE_FILE)["members"]
            scales = {str(m["name"]): (float(m["mean"]), float(m["std"])) for m in listed}
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"not the committee's scale: {type(error).__name__} {error}",
                where=str(directory / SCALE_FILE),
                rule="members, each with name, mean and std",
                mend=f"make it again: {remake(directory / SCALE_FILE)}",
            ) from error
        if not scales:
            raise BadInput(
                "a committee without members",
                where=str(directory / SCALE_FILE),
                rule="r0 has no reward model; rounds have one",
                mend="learn from a round's reward model",
            )
        for name in scales:
            # Without its head a member would be read as an untrained one, and score 0.
            if not (directory / name / HEAD_FILE).is_file():
                raise BadInput(
                    "no such file",
                    where=str(directory / name / HEAD_FILE),
                    rule=f"every member in {SCALE_FILE} has its head",
                    mend=remake(directory / SCALE_FILE),
                )
        members = [ScalarModel.from_directory(directory / name, device).eval() for name in scales]
        return cls(members, list(scales.values()), codec, model)

    @torch.inference_mode()
    def member_scores(
        self,
        prompt_ids: Sequence[list[int]],
        responses: Sequence[str],
        ended: Sequence[bool],
    ) -> Tensor:
        """(M, B) scaled scores on the CPU, in the order given."""
        rows = [
            self.codec.encode_response(text, end)
            for _, text, end in zip(prompt_ids, responses, ended, strict=True)
        ]
        order = sorted(range(len(rows)), key=lambda i: len(prompt_ids[i]) + len(rows[i]))
        longest = max((len(p) for p in prompt_ids), default=0) + max(map(len, rows), default=0)
        size = max(1, min(SCORING_BATCH, SCORING_TOKENS // max(1, longest)))
        scores = torch.empty(len(self.members), len(rows))
        device = self.members[0].head.weight.device
        for start in range(0, len(order), size):
            index = order[start : start + size]
            batch = Sequences.from_rows(
                [prompt_ids[i] for i in index], [rows[i] for i in index], self.codec.pad_id
            ).to(device)
            for m, (member, (mean, std)) in enumerate(zip(self.members, self.scales, strict=True)):
                with precision(self.model, device):
                    raw = member.scores(batch)
                scores[m, index] = ((raw - mean) / std).cpu()
        return scores

    def scorer(self, aggregate: config.Part) -> Score:
        """What turns answers into the one score (B,) that is optimised."""
        if aggregate.kind == "weight_average":
            return self._averaged().scorer(_ONE_MEMBER)
        combine = partial(AGGREGATES[aggregate.kind], **aggregate.arguments())

        def score(
            prompt_ids: Sequence[list[int]], responses: Sequence[str], ended: Sequence[bool]
        ) -> Tensor:
            return combine(self.member_scores(prompt_ids, responses, ended))

        return score

    def _averaged(self) -> Committee:
        """One model with the members' mean weights (WARM), each head first put on its own scale.

        The mean of weights is no mean of scores: its scale on the incoming policy's answers is close to
        the members', not equal.
        """
        single = copy.deepcopy(self.members[0])
        states = []
        for member, (mean, std) in zip(self.members, self.scales, strict=True):
            single.load_state_dict(member.state_dict())
            single.rescale_(mean, std)
            states.append({k: v.clone() for k, v in single.state_dict().items()})
        single.load_state_dict(average_weights(states))
        return Committee([single], [(0.0, 1.0)], self.codec, self.model)


_ONE_MEMBER = config.Part(kind="mean")
