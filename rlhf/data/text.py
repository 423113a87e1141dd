"""Text to token ids and back, one way for training, reward models and sampling alike.

A prompt and its response are always encoded separately and joined as ids. So the same text gives
the same ids wherever it is used, and the first response token never merges into the prompt.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf import config
from rlhf.artifacts import remake
from rlhf.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def load_tokenizer(model: config.Model, directory: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a saved policy if `directory` is given, else the one the pipeline names.

    A local path (directory or .gguf file) is read without network. Code from the hub never runs.
    Raises: BadInput if there is no such tokenizer, or it cannot be read.
    """
    if directory is not None:
        name, where, revision = str(directory), "tokenizer", None
    elif model.tokenizer is not None:
        name, where, revision = model.tokenizer, "model.tokenizer", None
        if model.tokenizer == model.base:
            revision = model.revision
    else:
        name, where, revision = model.base, "model.base", model.revision
    path = Path(name)
    is_local = path.exists()
    if not is_local and (directory is not None or not _HUB_ID.fullmatch(name)):
        raise BadInput(
            "no such file or directory",
            where=f"{where}={name}",
            rule="a directory with tokenizer.json, a .gguf file, or a hub id like owner/name",
            mend="correct the path, or run the stage that makes it (dvc repro data)",
        )

    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": False}
    place = name
    if is_local:
        options["local_files_only"] = True
        if path.is_file():
            place, options["gguf_file"] = str(path.parent), path.name
    elif revision is not None:
        options["revision"] = revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:  # each backend raises kinds of its own
        problem = " ".join(str(error).split())[:300]
        raise BadInput(
            f"no tokenizer could be read: {type(error).__name__}: {problem}",
            where=f"{where}={name}",
            rule="a directory with tokenizer.json, a .gguf file, or a hub id like owner/name",
            mend=f"make it again: {remake(name)}"
            if directory is not None
            else "correct the path"
            if is_local
            else "correct the name, check the network, or download it and name the directory",
        ) from error
    if tokenizer.eos_token_id is None:
        raise BadInput(
            "the tokenizer has no end-of-sequence token",
            where=f"{where}={name}",
            rule="responses end with one",
            mend="set eos_token in its tokenizer_config.json",
        )
    return tokenizer


def readable_chat(messages: str) -> str:
    """A chat as text: its only message if that is the user's, else "role: content" lines."""
    chat = json.loads(messages)
    if len(chat) == 1 and chat[0]["role"] == "user":
        return str(chat[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in chat)


def _fixed_date(form: str) -> str:
    """The date for templates that name today's: the same prompt gives the same ids on every day."""
    return datetime.date(2024, 7, 26).strftime(form)


class TextCodec:
    """Encodes and decodes with one tokenizer and the pipeline's template and limits.

    Padding masks come from lengths, never from ids: the pad token may be the end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: config.Model) -> None:
        if tokenizer.eos_token_id is None:
            raise BadInput(
                "the tokenizer has no end-of-sequence token",
                where="model.tokenizer",
                rule="responses end with one",
                mend="set eos_token in its tokenizer_config.json",
            )
        self._has_template = model.chat_template == "tokenizer"
        if self._has_template and not tokenizer.chat_template:
            raise BadInput(
                "the tokenizer has no chat template",
                where="model.chat_template=tokenizer",
                mend="use chat_template: none, or a tokenizer with a template",
            )
        self.tokenizer = tokenizer
        self.model = model
        self.eos_id = int(tokenizer.eos_token_id)
        pad_id = tokenizer.pad_token_id
        self.pad_id = self.eos_id if pad_id is None else int(pad_id)
        self.vocab_size = len(tokenizer)
        bos = tokenizer.bos_token_id
        first = tokenizer("a", add_special_tokens=True)["input_ids"][:1]
        self.bos_id = int(bos) if bos is not None and first == [bos] else None
        """The beginning token, where the tokenizer puts one by itself."""

    def encode_prompt(self, prompt: str, messages: str | None = None) -> list[int]:
        """Token ids of a prompt, with exactly one beginning token where the tokenizer uses one.

        Args:
            prompt: readable text. messages: the chat as JSON, which then replaces the text.
        Raises: BadInput for a chat without a template, or a prompt of no tokens.
        """
        return self.encode_prompts([prompt], [messages])[0]

    def encode_prompts(
        self, prompts: Sequence[str], messages: Sequence[str | None] | None = None
    ) -> list[list[int]]:
        """`encode_prompt` of many."""
        chats = messages if messages is not None else [None] * len(prompts)
        texts = [self._prompt_text(p, c) for p, c in zip(prompts, chats, strict=True)]
        rows = [self._one_bos(ids) for ids in self._encode(texts)]
        for prompt, ids in zip(prompts, rows, strict=True):
            if not ids:
                raise BadInput(
                    f"the prompt {prompt!r} has no tokens",
                    where="model.tokenizer",
                    rule="a prompt has at least one token",
                    mend="remove the prompt, or use a tokenizer that knows its characters",
                )
        return rows

    def encode_response(self, text: str, ended: bool) -> list[int]:
        """Token ids of a response, and the end token if it ended. No beginning token.

        Text that spells a special token is encoded as its letters where the tokenizer can do so.
        """
        return self.encode_responses([text], [ended])[0]

    def encode_responses(self, texts: Sequence[str], ended: Sequence[bool]) -> list[list[int]]:
        """`encode_response` of many."""
        rows = self._encode(texts, split_special_tokens=True)
        return [[*ids, self.eos_id] if end else ids for ids, end in zip(rows, ended, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens; spaces stay as the tokenizer writes them."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of many."""
        return [self.decode(ids) for ids in rows]

    def truncate_prompt(self, prompt: str, limit: int) -> str:
        """The longest end of a text prompt, cut between tokens, that encodes to at most `limit`."""
        cuts = [start for start, _ in self._offsets(prompt)]
        return self._longest(
            [prompt[cut:].lstrip() for cut in cuts],
            lambda text: len(self.encode_prompt(text)) <= limit,
        )

    def truncate_response(self, text: str, limit: int) -> str:
        """The longest beginning of a response, cut between tokens, of at most `limit` tokens."""
        cuts = [end for _, end in self._offsets(text)]
        return self._longest(
            [text[:cut].rstrip() for cut in reversed(cuts)],
            lambda part: len(self.encode_response(part, ended=False)) <= limit,
        )

    @staticmethod
    def _longest(candidates: list[str], fits: Any) -> str:
        """The first non-blank candidate that fits, else ""; candidates get shorter."""
        low, high = 0, len(candidates)
        while low < high:
            middle = (low + high) // 2
            text = candidates[middle]
            low, high = (low, middle) if not text or fits(text) else (middle + 1, high)
        while low < len(candidates) and candidates[low] and not fits(candidates[low]):
            low += 1
        return candidates[low] if low < len(candidates) else ""

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of the text starts and ends; single characters where that is unknown."""
        if not self.tokenizer.is_fast:
            return [(i, i + 1) for i in range(len(text))]
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(int(a), int(b)) for a, b in encoding["offset_mapping"]]

    def _prompt_text(self, prompt: str, messages: str | None) -> str:
        if not self._has_template:
            if messages is not None:
                raise BadInput(
                    f"the prompt {prompt[:60]!r} is a list of chat messages",
                    where="model.chat_template=none",
                    rule="chat messages need a template",
                    mend="set model.chat_template: tokenizer, or write prompts as text",
                )
            return prompt
        chat = [{"role": "user", "content": prompt}] if messages is None else json.loads(messages)
        try:
            text = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, strftime_now=_fixed_date
            )
        except Exception as error:  # templates raise jinja errors of their own
            raise BadInput(
                f"the chat template refuses {prompt[:60]!r}: {error}",
                where="model.chat_template=tokenizer",
                mend="correct the messages' roles and order",
            ) from error
        return str(text)

    def _encode(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
            **{"split_special_tokens": False, **options},
        )
        return [[int(i) for i in ids] for ids in encoded["input_ids"]]

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Ids that start with exactly one beginning token, where the tokenizer has its own."""
        bos = self.tokenizer.bos_token_id
        start = 0
        while bos is not None and start < len(ids) and ids[start] == bos:
            start += 1
        if self.bos_id is not None:
            return [self.bos_id, *ids[start:]]
        return ids if start <= 1 else ids[start - 1 :]
