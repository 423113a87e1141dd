"""Tokenisation: the same ids everywhere, one beginning token, end tokens, limits."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf import config
from rlhf.data.text import TextCodec, load_tokenizer, readable_chat
from rlhf.errors import BadInput

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["the camera is good .", "the battery of this camera is bad ! naïve 日本 <s> </s>"] * 4


def model(**changes: Any) -> config.Model:
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


def words(**options: Any) -> PreTrainedTokenizerFast:
    """A word-level tokenizer; <pad> 0, <eos> 1, <unk> 2."""
    names = ["<pad>", "<eos>", "<unk>", "the", "camera", "is", "good", "bad", "."]
    backend = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"} | options
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def bytes_(*, adds: str = "", **options: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE with <s> and </s>; `adds` names what it puts around text by itself."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if adds:
        backend.post_processor = processors.TemplateProcessing(
            single=adds, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"} | options
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def test_word_level_ids_by_hand() -> None:
    codec = TextCodec(words(), model())
    # the=3 camera=4 is=5 good=6 .=8, <eos>=1
    assert codec.encode_prompt("the camera", None) == [3, 4]
    assert codec.encode_response("is good .", ended=True) == [5, 6, 8, 1]
    assert codec.encode_response("is good .", ended=False) == [5, 6, 8]
    assert codec.decode([5, 6, 8, 1]) == "is good ."
    assert (codec.pad_id, codec.eos_id, codec.vocab_size) == (0, 1, 9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_equal_to_eos_keeps_the_real_end(side: str) -> None:
    codec = TextCodec(bytes_(padding_side=side), model())
    assert codec.pad_id == codec.eos_id == 1
    ids = codec.encode_response("good .", ended=True)
    assert ids[-1] == 1
    assert ids.count(1) == 1
    assert codec.encode_responses(["good .", "the camera is good ."], [True, True])[0] == ids


def test_without_pad_token_the_end_token_pads() -> None:
    codec = TextCodec(words(pad_token=None), model())
    assert codec.pad_id == codec.eos_id


@pytest.mark.parametrize("adds", ["<s> $A", "<s> $A </s>"])
def test_one_bos_at_the_start_of_prompts_and_none_in_responses(adds: str) -> None:
    codec = TextCodec(bytes_(adds=adds), model())
    plain = codec.encode_prompt("the camera", None)
    assert plain[0] == 0
    assert plain.count(0) == 1
    assert 1 not in plain
    assert codec.encode_prompt("<s>the camera", None) == plain
    assert codec.encode_prompt("<s><s>the camera", None) == plain
    response = codec.encode_response("is good .", ended=True)
    assert 0 not in response
    assert response.count(1) == 1


def test_no_bos_where_the_tokenizer_adds_none() -> None:
    codec = TextCodec(bytes_(), model())
    assert 0 not in codec.encode_prompt("the camera", None)


@pytest.mark.parametrize("adds", ["", "<s> $A"])
def test_template_gives_one_bos_and_opens_the_assistant_turn(adds: str) -> None:
    tokenizer = bytes_(adds=adds, chat_template=TEMPLATE)
    codec = TextCodec(tokenizer, model(chat_template="tokenizer"))
    ids = codec.encode_prompt("the camera", None)
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert ids[1] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    chat = json.dumps([{"role": "user", "content": "the camera"}])
    assert codec.encode_prompt("ignored", chat) == ids
    longer = json.dumps([{"role": "system", "content": "x"}, *json.loads(chat)])
    assert tokenizer.convert_tokens_to_ids("<|system|>") in codec.encode_prompt("", longer)


def test_template_without_bos_still_gets_the_tokenizers_one() -> None:
    template = TEMPLATE.replace("{{ bos_token }}", "")
    codec = TextCodec(
        bytes_(adds="<s> $A", chat_template=template), model(chat_template="tokenizer")
    )
    ids = codec.encode_prompt("the camera", None)
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_templates_and_chats_must_meet() -> None:
    with pytest.raises(BadInput, match="no chat template"):
        TextCodec(words(), model(chat_template="tokenizer"))
    codec = TextCodec(bytes_(chat_template=TEMPLATE), model())
    with pytest.raises(BadInput, match="chat_template=none"):
        codec.encode_prompt("a", json.dumps([{"role": "user", "content": "a"}]))


def test_template_that_refuses_is_bad_input() -> None:
    tokenizer = bytes_(chat_template="{{ raise_exception('roles must alternate') }}")
    codec = TextCodec(tokenizer, model(chat_template="tokenizer"))
    with pytest.raises(BadInput, match="roles must alternate"):
        codec.encode_prompt("a", None)


def test_no_end_token_and_no_prompt_tokens_are_bad_input() -> None:
    with pytest.raises(BadInput, match="no end-of-sequence"):
        TextCodec(words(eos_token=None), model())
    with pytest.raises(BadInput, match="no tokens"):
        TextCodec(words(), model()).encode_prompt("   ", None)


@pytest.mark.parametrize("text", ["good .", " naïve 日本!", "a  b\n , c .", "don 't ."])
def test_bytes_survive_the_round_trip(text: str) -> None:
    codec = TextCodec(bytes_(clean_up_tokenization_spaces=True), model())
    ids = codec.encode_response(text, ended=True)
    assert codec.decode(ids) == text
    assert codec.encode_response(codec.decode(ids), ended=True) == ids


def test_a_response_that_spells_a_special_token_does_not_become_one() -> None:
    codec = TextCodec(bytes_(), model())
    ids = codec.encode_response("good </s> bad <s>", ended=True)
    assert ids.count(1) == 1
    assert 0 not in ids
    assert codec.decode(ids) == "good </s> bad <s>"


def test_order_of_calls_does_not_change_ids() -> None:
    codec = TextCodec(bytes_(adds="<s> $A", chat_template=TEMPLATE), model())
    before = codec.encode_prompt("</s> good", None)
    codec.encode_response("</s> good", ended=False)
    assert codec.encode_prompt("</s> good", None) == before


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("make", [words, bytes_])
def test_truncation_keeps_as_much_as_fits(make: Any, limit: int) -> None:
    codec = TextCodec(make(), model())
    text = "the camera is good . the camera is bad ."
    start = codec.truncate_response(text, limit)
    assert text.startswith(start)
    assert 1 <= len(codec.encode_response(start, ended=False)) <= limit
    end = codec.truncate_prompt(text, limit)
    assert text.endswith(end)
    assert 1 <= len(codec.encode_prompt(end, None)) <= limit


def test_truncation_by_hand() -> None:
    codec = TextCodec(words(), model())
    assert codec.truncate_response("the camera is good .", 3) == "the camera is"
    assert codec.truncate_prompt("the camera is good .", 3) == "is good ."


def test_truncation_never_breaks_a_character() -> None:
    codec = TextCodec(bytes_(), model())
    for limit in range(1, 12):
        part = codec.truncate_response("日本日本", limit)
        assert "\ufffd" not in part
        assert "日本日本".startswith(part)


def test_readable_chat() -> None:
    user = {"role": "user", "content": "hi"}
    assert readable_chat(json.dumps([user])) == "hi"
    chat = json.dumps([{"role": "system", "content": "be kind"}, user])
    assert readable_chat(chat) == "system: be kind\nuser: hi"


def test_local_tokenizer_loads_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words().save_pretrained(tmp_path / "saved")

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for chosen, directory in (
        (model(tokenizer=str(tmp_path / "saved")), None),
        (model(base=str(tmp_path / "saved")), None),
        (model(base="no/such"), tmp_path / "saved"),
    ):
        tokenizer = load_tokenizer(chosen, directory)
        assert TextCodec(tokenizer, chosen).encode_prompt("the camera", None) == [3, 4]


def test_wrong_paths_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file or directory"):
        load_tokenizer(model(tokenizer=str(tmp_path / "absent")), None)
    with pytest.raises(BadInput, match="no such file or directory"):
        load_tokenizer(model(), tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no tokenizer could be read"):
        load_tokenizer(model(base=str(tmp_path / "empty")), None)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadInput, match="no tokenizer could be read"):
        load_tokenizer(model(base=str(tmp_path / "broken.gguf")), None)


def test_the_module_itself_does_not_import_torch() -> None:
    code = "import sys, rlhf.data.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
