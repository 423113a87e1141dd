"""The book of prompts: every prompt of the project by its id, as text and as tokens."""

from __future__ import annotations

from pathlib import Path

from rlhf import contracts
from rlhf.artifacts import remake
from rlhf.data.text import TextCodec
from rlhf.errors import BadInput


class PromptBook:
    """Prompts by id. Tokens are made once per prompt."""

    def __init__(self, path: Path, codec: TextCodec) -> None:
        table = contracts.read(path, contracts.PROMPTS)
        self.path, self.codec = path, codec
        self._text = dict(zip(table["prompt_id"], table["prompt"], strict=True))
        self._messages = {
            key: None if not isinstance(value, str) else value
            for key, value in zip(table["prompt_id"], table["messages"], strict=True)
        }
        self._split = dict(zip(table["prompt_id"], table["split"], strict=True))
        self._ids: dict[str, list[int]] = {}

    def of(self, split: str) -> list[str]:
        """The ids of the prompts of one split, in the table's order. BadInput if there is none."""
        found = [key for key, value in self._split.items() if value == split]
        if not found:
            raise BadInput(
                f"no prompt in split {split}",
                where=str(self.path),
                rule="sft, preferences, rl, choose and report prompts are disjoint and not empty",
                mend="bring more prompts, or give the split a share in data.split_fractions",
            )
        return found

    def split(self, prompt_id: str) -> str | None:
        """The split of a prompt, None if the book does not have it."""
        return self._split.get(prompt_id)

    def text(self, prompt_id: str) -> str:
        """The prompt as a person reads it."""
        return self._text[prompt_id]

    def tokens(self, prompt_id: str) -> list[int]:
        """The prompt as every model reads it. BadInput if the book does not have it."""
        if prompt_id not in self._text:
            raise BadInput(
                f"no prompt {prompt_id}",
                where=str(self.path),
                rule="every demonstration's and pair's prompt is in the book",
                mend=f"make both tables again: {remake(self.path)}, then dvc repro",
            )
        if prompt_id not in self._ids:
            self._ids[prompt_id] = self.codec.encode_prompt(
                self._text[prompt_id], self._messages[prompt_id]
            )
        return self._ids[prompt_id]
