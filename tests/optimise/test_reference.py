"""Reference log-probs on disk: whatever decides their bits is in the key, and no damaged file is believed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.models import policy
from rlhf.models.sequences import Sequences
from rlhf.optimise.forward import by_length, logprobs_of, scatter
from rlhf.optimise.reference import ReferenceCache, reference_key

PROMPTS = [[5, 6, 7], [8], [9, 10, 11]]
CHOSEN = [[11, 12, 1], [14], [15, 16]]
REJECTED = [[12, 1], [13, 3], [4]]
OPTIONS: dict[str, Any] = {
    "quantity": "token log-probs",
    "dtype": "float32",
    "micro_batch_size": 2,
    "temperature": 1.0,
    "chunk_tokens": None,
}


def rows(prompts: list[list[int]], responses: list[list[int]]) -> Sequences:
    return Sequences.from_rows(prompts, responses, tiny.PAD)


def key(
    model: PreTrainedModel | None = None, parts: list[Sequences] | None = None, **changes: Any
) -> str:
    model = tiny.llama() if model is None else model
    parts = [rows(PROMPTS, CHOSEN), rows(PROMPTS, REJECTED)] if parts is None else parts
    return reference_key(model, parts, **(OPTIONS | changes))


# --- the key ---


def test_the_key_is_of_the_content() -> None:
    assert re.fullmatch("[0-9a-f]{64}", key())
    assert key() == key()


def test_the_key_does_not_depend_on_the_path_or_the_padding(tmp_path: Path) -> None:
    keys = set()
    for name in ("a", "b"):
        policy.save_policy(tiny.llama(), tiny.tokenizer(), tmp_path / name)
        keys.add(key(policy.load_policy(tmp_path / name, tiny.CPU)))
    assert len(keys) == 1
    wide = Sequences(
        torch.tensor([[17, 17, 5, 6, 7]]),
        torch.tensor([[False, False, True, True, True]]),
        torch.tensor([[11, 12, 18]]),
        torch.tensor([[True, True, False]]),
    )
    assert key(parts=[wide]) == key(parts=[rows([[5, 6, 7]], [[11, 12]])])


def _nudged() -> PreTrainedModel:
    """One weight differs in its last bit."""
    model = tiny.llama()
    with torch.no_grad():
        weight = model.model.layers[1].mlp.down_proj.weight
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))
    return model


def _eager() -> PreTrainedModel:
    model = tiny.llama()
    model.set_attn_implementation("eager")
    return model


C, R = CHOSEN, REJECTED
OTHER_KEYS: dict[str, Callable[[], str]] = {
    "model": lambda: key(_nudged()),
    # The same weights read another way.
    "architecture": lambda: key(tiny.llama(rope_theta=5000.0)),
    "norm": lambda: key(tiny.llama(rms_norm_eps=1e-5)),
    "attention": lambda: key(_eager()),
    # A template puts a token before or after every prompt; a length limit cuts answers or prompts.
    "template": lambda: key(parts=[rows([[3, *p] for p in PROMPTS], x) for x in (C, R)]),
    "response length": lambda: key(parts=[rows(PROMPTS, [y[:2] for y in x]) for x in (C, R)]),
    "prompt length": lambda: key(parts=[rows([p[-2:] for p in PROMPTS], x) for x in (C, R)]),
    "subset": lambda: key(parts=[rows(PROMPTS[:2], C[:2]), rows(PROMPTS[:2], R[:2])]),
    "order": lambda: key(parts=[rows(PROMPTS[::-1], C[::-1]), rows(PROMPTS[::-1], R[::-1])]),
    "chosen and rejected": lambda: key(parts=[rows(PROMPTS, R), rows(PROMPTS, C)]),
    "one of two": lambda: key(parts=[rows(PROMPTS, C)]),
    "quantity": lambda: key(quantity="sequence log-probs"),
    "dtype": lambda: key(dtype="bfloat16"),
    "micro-batch": lambda: key(micro_batch_size=3),
    "temperature": lambda: key(temperature=0.5),
    "chunk": lambda: key(chunk_tokens=64),
}


@pytest.mark.parametrize("name", OTHER_KEYS)
def test_any_change_is_a_new_key(name: str) -> None:
    assert OTHER_KEYS[name]() != key()


def test_changes_are_told_from_each_other() -> None:
    assert len({make() for make in OTHER_KEYS.values()}) == len(OTHER_KEYS)


def test_boundaries_count() -> None:
    """The same tokens in a row, cut at other places."""
    cuts = [
        [rows([[5, 6]], [[7, 8]])],
        [rows([[5]], [[6, 7, 8]])],
        [rows([[5], [7]], [[6], [8]])],
        [rows([[5]], [[6]]), rows([[7]], [[8]])],
        [rows([[5, 7]], [[6, 8]])],
    ]
    assert len({key(parts=parts) for parts in cuts}) == len(cuts)


def test_what_runs_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key()]
    for owner, name, value in (
        (torch, "__version__", "2.0.0"),
        (torch, "get_num_threads", lambda: 64),
        (torch, "get_float32_matmul_precision", lambda: "medium"),
        (torch, "are_deterministic_algorithms_enabled", lambda: "of course"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "abacus"),
        (PreTrainedModel, "device", torch.device("meta")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.append(key())
    assert len(set(keys)) == len(keys)


# --- the files ---


class Computer:
    """Counts how often the log-probs were computed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Tensor]:
        self.calls += 1
        batch, model = rows(PROMPTS, CHOSEN), tiny.llama()
        table = scatter(
            batch, by_length(batch, 2), lambda p: logprobs_of(model, p, tiny.model_settings())
        )
        return {"chosen": table, "sums": table.double().sum(1)}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name])
        for name in expected
    )


def test_what_is_kept_is_what_was_computed_to_the_bit(tmp_path: Path) -> None:
    compute = Computer()
    cache = ReferenceCache(tmp_path / "new" / "folder")
    first = cache.get_or_compute("k", compute)
    second = ReferenceCache(tmp_path / "new" / "folder").get_or_compute("k", compute)
    assert compute.calls == 1
    assert same(first, Computer()())
    assert same(second, first)
    assert [p.name for p in cache.directory.iterdir()] == ["k.safetensors"]
    # Another key knows nothing of it.
    cache.get_or_compute("l", compute)
    assert compute.calls == 2


def test_what_a_caller_does_to_its_tensors_does_not_reach_the_file(tmp_path: Path) -> None:
    cache, compute = ReferenceCache(tmp_path), Computer()
    for _ in range(2):
        cache.get_or_compute("k", compute)["chosen"].zero_()
    assert same(cache.get_or_compute("k", compute), Computer()())


def test_tensors_with_a_graph_or_a_shared_storage_are_kept(tmp_path: Path) -> None:
    base = torch.arange(6.0, requires_grad=True)
    made = {"a": (base * 2).view(2, 3).t(), "b": base[:2], "c": base[1:]}
    cache = ReferenceCache(tmp_path)
    found = cache.get_or_compute("k", lambda: made)
    assert not any(tensor.requires_grad for tensor in found.values())
    assert same(found, {name: tensor.detach() for name, tensor in made.items()})
    assert same(cache.get_or_compute("k", Computer()), found)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip_the_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _text(path: Path) -> None:
    path.write_text("not tensors")


def _no_checksum(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"chosen": torch.zeros(3)}, path)


@pytest.mark.parametrize("damage", [_truncate, _empty, _flip_the_last_byte, _text, _no_checksum])
def test_a_damaged_file_is_reported_computed_again_and_replaced(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, compute = ReferenceCache(tmp_path), Computer()
    cache.get_or_compute("k", compute)
    path = tmp_path / "k.safetensors"
    whole = path.read_bytes()
    damage(path)
    with caplog.at_level(logging.WARNING):
        found = cache.get_or_compute("k", compute)
    assert "k.safetensors: damaged" in caplog.text
    assert compute.calls == 2
    assert same(found, Computer()())
    assert path.read_bytes() == whole
    caplog.clear()
    cache.get_or_compute("k", compute)
    assert (compute.calls, caplog.text) == (2, "")


def test_a_writer_that_is_killed_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    """In a process that dies in the middle of its write, and one whose computation fails."""
    cache, compute = ReferenceCache(tmp_path), Computer()
    child = os.fork()
    if child == 0:
        import rlhf.optimise.reference as module

        def half(tensors: Any, new: Path, **_: Any) -> None:
            new.write_bytes(b"\x40\0\0\0\0\0\0\0{")
            os._exit(9)

        module.save_file = half
        cache.get_or_compute("k", lambda: {"chosen": torch.zeros(2)})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [p.suffix for p in tmp_path.iterdir()] == [".new"]

    def fails() -> dict[str, Tensor]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get_or_compute("k", fails)
    assert same(cache.get_or_compute("k", compute), Computer()())
    assert compute.calls == 1


def test_another_writer_of_the_same_key_does_no_harm(tmp_path: Path) -> None:
    """One that finishes while this one computes."""
    cache, inner = ReferenceCache(tmp_path), Computer()

    def slow() -> dict[str, Tensor]:
        ReferenceCache(tmp_path).get_or_compute("k", inner)
        return inner()

    assert same(cache.get_or_compute("k", slow), Computer()())
    assert same(cache.get_or_compute("k", inner), Computer()())
    assert inner.calls == 2


def _age(path: Path, seconds: int) -> None:
    os.utime(path, (1e9 - seconds, 1e9 - seconds))


def test_only_so_many_files_are_kept_and_the_one_not_read_for_longest_goes(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path, max_files=3)
    for age, name in ((30, "a"), (20, "b"), (10, "c")):
        cache.get_or_compute(name, lambda: {"x": torch.zeros(1)})
        _age(tmp_path / f"{name}.safetensors", age)
    assert len(list(tmp_path.iterdir())) == 3
    cache.get_or_compute("a", Computer())  # read: now the youngest
    cache.get_or_compute("d", lambda: {"x": torch.zeros(1)})
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["a", "c", "d"]
    # What a killed writer left behind goes in its turn.
    (tmp_path / ".e.safetensors.1.new").touch()
    _age(tmp_path / ".e.safetensors.1.new", 40)
    cache.get_or_compute("f", lambda: {"x": torch.zeros(1)})
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["a", "d", "f"]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ReferenceCache(tmp_path, max_files=0)


def test_by_default_32_files_in_the_scratch_folder() -> None:
    cache = ReferenceCache()
    assert (cache.directory, cache.max_files) == (Path(".scratch/reference"), 32)
