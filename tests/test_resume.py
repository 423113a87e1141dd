"""Checkpoints: when they are written and kept, what is made of damaged ones, and how a stage is asked to stop."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf import config, resume
from rlhf.errors import BadInput, Interrupted, explain
from rlhf.resume import Scratch


def settings(**changes: Any) -> config.Checkpoints:
    values = {"every_steps": 1, "every_minutes": 1e6, "keep": 2, "max_gigabytes": 1.0}
    return config.Checkpoints(**(values | changes))


def state(step: int) -> dict[str, Any]:
    """About 8 kB that tell the step."""
    return {"step": step, "weights": torch.full((1000,), float(step), dtype=torch.float64)}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Scratch]]:
    made: list[Scratch] = []

    def build(**changes: Any) -> Scratch:
        made.append(Scratch(tmp_path / "stage/key", "policy@r1-x", settings(**changes)))
        return made[-1]

    yield build
    for scratch in made:
        scratch.release()


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "roundhouse")
    return caplog


def saved(scratch: Scratch) -> list[int]:
    """Steps of the whole checkpoints; nothing else lies beside them."""
    names = sorted(path.name for path in scratch.place.iterdir() if path.name != "files")
    steps = sorted({int(name.split(".")[0]) for name in names})
    assert names == sorted(f"{step:09d}.{end}" for step in steps for end in ("json", "pt"))
    return steps


# --- what is kept ---


def test_a_state_comes_back_with_every_random_generator(make: Callable[..., Scratch]) -> None:
    value = {
        "tensor": torch.tensor([1.5, float("nan")]),
        "long": torch.tensor(2**60),
        "nested": [{"a": None, "b": [True, "text", 0.1]}, (1, 2)],
    }
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    torch.rand(5), np.random.normal(), random.gauss(0, 1)
    scratch = make()
    scratch.save(7, value)
    expected = [torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1)]
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)
    again = make()
    found = again.load()
    assert found is not None
    assert [torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1)] == expected  # fmt: skip
    assert torch.equal(found.pop("tensor")[:1], torch.tensor([1.5]))
    assert found.pop("long").item() == 2**60
    assert found == {"nested": value["nested"]}
    assert again.resumed_at == 7


def test_without_a_checkpoint_there_is_nothing_to_load(make: Callable[..., Scratch]) -> None:
    scratch = make()
    assert scratch.load() is None
    assert scratch.resumed_at is None


def test_steps_and_minutes_make_a_checkpoint_due(
    make: Callable[..., Scratch], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    scratch = make(every_steps=4, every_minutes=2, keep=99)
    scratch.load()
    taken: list[int] = []
    for step in range(1, 14):
        if step in (6, 11):
            now += 120
        scratch.step(step, lambda step=step: taken.append(step) or state(step))  # type: ignore[misc]
    assert taken == [4, 6, 10, 11]  # each counts from the one before
    assert saved(scratch) == taken


def test_the_steps_of_a_continued_stage_count_from_its_checkpoint(
    make: Callable[..., Scratch],
) -> None:
    make().save(5, state(5))
    scratch = make(every_steps=4, keep=99)
    scratch.load()
    for step in range(6, 14):
        scratch.step(step, lambda step=step: state(step))  # type: ignore[misc]
    assert saved(scratch) == [5, 9, 13]


@pytest.mark.parametrize(("keep", "kept"), [(1, [9]), (2, [8, 9]), (4, [6, 7, 8, 9])])
def test_the_last_ones_are_kept(make: Callable[..., Scratch], keep: int, kept: list[int]) -> None:
    scratch = make(keep=keep)
    for step in range(1, 10):
        scratch.save(step, state(step))
    assert saved(scratch) == kept
    assert (make().load() or {})["step"] == 9


def test_fewer_are_kept_where_they_would_be_too_large(make: Callable[..., Scratch]) -> None:
    size = make()
    size.save(1, state(1))
    one = (size.place / "000000001.pt").stat().st_size
    size.finish()
    for room, kept in ((3.5, [7, 8, 9]), (2.5, [8, 9]), (1.5, [9])):
        scratch = make(keep=9, max_gigabytes=room * one / 1e9)
        for step in range(1, 10):
            scratch.save(step, state(step))
        assert saved(scratch) == kept
        scratch.finish()


def test_one_that_is_too_large_is_not_written(
    make: Callable[..., Scratch], said: pytest.LogCaptureFixture
) -> None:
    scratch = make()
    scratch.save(1, state(1))
    small = make(max_gigabytes=7e-6)
    for step in (2, 3):
        small.save(step, state(step))
    assert saved(small) == [1]
    (message,) = said.messages
    assert "a checkpoint takes 1.8e-05 GB" in message  # 8 kB, and the generators' 10
    assert "if the stage ends it continues from step 1" in message
    assert "resources.checkpoints.max_gigabytes=7e-06" in message


def test_tensors_that_share_memory_count_once() -> None:
    whole = torch.zeros(100, dtype=torch.float32)
    state = {
        "a": whole,
        "b": [whole[3:], {"c": whole.view(10, 10)}],
        "d": (torch.zeros(3),),
        "e": 1,
    }
    assert resume.tensor_bytes(state) == 400 + 12


def test_a_finished_stage_leaves_no_checkpoint(make: Callable[..., Scratch]) -> None:
    scratch = make()
    (scratch.files / "a").write_text("b")
    scratch.save(1, state(1))
    scratch.finish()
    assert not scratch.place.exists()
    assert make().load() is None


# --- damage ---


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def other_content(path: Path) -> None:
    """A file of the right hash that torch cannot read."""
    path.write_bytes(b"nothing")
    digest = resume.content_digest(path)
    edit(path.with_suffix(".json"), bytes=7, sha256=digest)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "cut": ("pt", cut, "it is cut short"),
    "flipped": ("pt", flip, "its content is not what was written"),
    "gone": ("pt", Path.unlink, "it is cut short"),
    "not torch's": ("pt", other_content, ""),
    "no JSON": ("json", lambda path: path.write_text("{"), "not readable as JSON"),
    "empty": ("json", lambda path: path.write_bytes(b""), "not readable as JSON"),
    "other JSON": ("json", lambda path: path.write_text("[]"), ""),
    "another format": ("json", lambda path: edit(path, format=99), "it has format 99, this version reads 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_aloud(
    name: str, make: Callable[..., Scratch], said: pytest.LogCaptureFixture
) -> None:
    ending, damage, why = DAMAGES[name]
    scratch = make(keep=3)
    for step in (5, 6, 10):
        scratch.save(step, state(step))
    damage(scratch.place / f"000000010.{ending}")
    again = make(keep=3)
    found = again.load()
    assert found is not None
    assert found["step"] == 6
    assert torch.equal(found["weights"], state(6)["weights"])
    assert "the checkpoint of step 10 cannot be used" in said.messages[0]
    assert why in said.messages[0]
    assert said.messages[0].endswith("falling back to that of step 5") is False
    assert said.messages[0].endswith("falling back to that of step 6")
    assert said.messages[1] == "policy@r1-x: continues after step 6"
    assert saved(again) == [5, 6]


def test_with_all_damaged_it_starts_at_the_beginning(
    make: Callable[..., Scratch], said: pytest.LogCaptureFixture
) -> None:
    scratch = make()
    for step in (5, 6):
        scratch.save(step, state(step))
        cut(scratch.place / f"{step:09d}.pt")
    assert make().load() is None
    assert [message.rpartition("; ")[2] for message in said.messages] == [
        "falling back to that of step 5",
        "falling back to the beginning",
    ]
    assert saved(scratch) == []


def test_what_a_killed_process_left_does_not_count_and_goes(make: Callable[..., Scratch]) -> None:
    scratch = make(keep=9)
    scratch.save(1, state(1))
    (scratch.place / ".000000002.pt.77.new").write_bytes(b"half")
    (scratch.place / "000000002.pt").write_bytes(b"whole, but its JSON was not written")
    again = make(keep=9)
    assert (again.load() or {})["step"] == 1
    again.save(3, state(3))
    assert saved(again) == [1, 3]


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_checkpoint_whose_files_are_lost_is_damaged(
    damage: Callable[[Path], object], make: Callable[..., Scratch], said: pytest.LogCaptureFixture
) -> None:
    scratch = make()
    (scratch.files / "sub").mkdir()
    (scratch.files / "sub/rows").write_text("one")
    scratch.save(1, state(1))
    (scratch.files / "sub/rows").write_text("one two")
    (scratch.files / ".half").write_text("of something that is being written")
    scratch.save(2, state(2))
    (scratch.files / ".half").unlink()
    assert (make().load() or {})["step"] == 2
    damage(scratch.files / "sub/rows")
    expected = 1 if damage is cut else None  # "one tw" still holds what the first one knew
    assert (make().load() or {}).get("step") == expected
    assert "its file sub/rows is missing or cut short" in said.text


def test_a_state_of_another_version_is_refused_with_the_way_out(
    make: Callable[..., Scratch],
) -> None:
    make().save(4, state(4))
    with pytest.raises(
        BadInput, match=r"step 4 does not fit this version .*KeyError: 'critic'"
    ) as e:
        make().restore(lambda found: found["critic"])
    assert "remove the folder, and the stage starts over" in str(e.value)
    assert saved(make()) == [4]

    def too_much(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        make().restore(too_much)
    taken: list[int] = []
    assert make().restore(lambda found: taken.append(found["step"]))
    assert taken == [4]


@pytest.mark.parametrize("what", ["code", "versions"])
def test_other_code_or_packages_are_told(
    what: str, make: Callable[..., Scratch], said: pytest.LogCaptureFixture
) -> None:
    scratch = make()
    scratch.save(1, state(1))
    make().load()
    assert said.messages == ["policy@r1-x: continues after step 1"]
    edit(scratch.place / "000000001.json", **{what: "other"})
    assert (make().load() or {})["step"] == 1
    assert f"was written by other {what}" in said.messages[1]
    assert "the result may differ" in said.messages[1]


def test_a_clock_that_jumps_back_does_not_matter(
    make: Callable[..., Scratch], monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = make(keep=3)
    for step in (1, 2, 3):
        scratch.save(step, state(step))
        os.utime(scratch.place / f"{step:09d}.pt", (1e9 - step, 1e9 - step))
        os.utime(scratch.place / f"{step:09d}.json", (1e9 - step, 1e9 - step))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    again = make(keep=2)
    assert (again.load() or {})["step"] == 3
    again.step(4, lambda: state(4))
    assert saved(again) == [3, 4]


# --- disks ---


def test_a_full_disk_costs_the_checkpoint_alone(
    make: Callable[..., Scratch], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = make()
    scratch.step(1, lambda: state(1))

    class Full(resume._Sink):
        """After 5 kB the disk is full."""

        def __init__(self, file: Any) -> None:
            super().__init__(types.SimpleNamespace(write=self.put))  # type: ignore[arg-type]
            self.real = file

        def put(self, data: bytes) -> int:
            if self.size > 5000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.real.write(data))

    with monkeypatch.context() as patch:
        patch.setattr(resume, "_Sink", Full)
        scratch.step(2, lambda: state(2))
    assert saved(scratch) == [1]
    assert said.messages[0].startswith(
        "policy@r1-x: no checkpoint at step 2: the disk is full; the stage goes on, and if it ends now "
        "it continues from step 1\n  mend: free some space"
    )
    scratch.step(3, lambda: state(3))
    assert saved(scratch) == [1, 3]


def test_a_disk_without_room_is_not_filled_up(
    make: Callable[..., Scratch], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=7999))
    monkeypatch.setattr(resume, "_save", lambda *_: pytest.fail("it was written"))
    scratch = make()
    scratch.save(1, state(1))
    assert "the disk is full; the stage goes on" in said.text
    assert "continues from the beginning" in said.text
    assert saved(scratch) == []


def test_a_folder_that_may_not_be_written_to_costs_the_checkpoint_alone(
    make: Callable[..., Scratch], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    scratch = make()
    with monkeypatch.context() as patch:
        patch.setattr(resume, "_save", forbidden)
        scratch.save(1, state(1))
    assert "no checkpoint at step 1: not allowed to write" in said.text
    assert saved(scratch) == []


def test_any_other_error_is_not_hidden(make: Callable[..., Scratch]) -> None:
    with pytest.raises((AttributeError, TypeError)):
        make().save(1, {"a": lambda: None})


# --- signals ---


def test_asked_to_stop_it_finishes_the_step_and_saves(make: Callable[..., Scratch]) -> None:
    scratch = make(every_steps=100)
    scratch.load()
    scratch.step(1, lambda: state(1))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(
        Interrupted, match=r"stopped after step 2; .* continues from step 2"
    ) as error:
        scratch.step(2, lambda: state(2))
    assert saved(scratch) == [2]
    assert explain(error.value) == (str(error.value), 75)
    with pytest.raises(Interrupted):  # what is saved is not saved again
        scratch.step(2, lambda: pytest.fail("twice"))


def test_asked_to_stop_on_a_full_disk_it_says_from_where_it_continues(
    make: Callable[..., Scratch], monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = make()
    scratch.load()
    scratch.step(1, lambda: state(1))
    monkeypatch.setattr(resume.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1))
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted, match=r"stopped after step 2; .* continues from step 1"):
        scratch.step(2, lambda: state(2))


def test_before_it_loads_and_after_it_is_released_signals_act_at_once(
    make: Callable[..., Scratch],
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    scratch = make()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    scratch.load()
    assert signal.getsignal(signal.SIGTERM) not in before
    scratch.finish()  # what still follows may not be cut short
    assert signal.getsignal(signal.SIGTERM) not in before
    scratch.release()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_the_same_signal_again_stops_it_at_once(
    make: Callable[..., Scratch], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    make().load()
    os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, to everything in the terminal
    now += 5
    os.kill(os.getpid(), signal.SIGTERM)  # the flow ends what it started
    now += 0.5
    os.kill(os.getpid(), signal.SIGTERM)  # the lifeline: DVC is gone
    now += 1.5
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_in_a_thread_signals_stay_as_they_are(make: Callable[..., Scratch]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=make().load)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


# --- keys and places ---


PIPELINE: Any = types.SimpleNamespace(resources=types.SimpleNamespace(checkpoints=settings()))


def place(
    folder: Path, stage: str = "sft", inputs: tuple[str, ...] = ("in",), **params: Any
) -> Path:
    """Where its checkpoints would be, from the folder."""
    with resume.open_scratch(
        PIPELINE, stage, inputs=inputs, params=params, folder=folder
    ) as scratch:
        return scratch.place.relative_to(folder)


def test_the_key_follows_from_content_and_settings_alone(tmp_path: Path) -> None:
    for name in ("one", "other place"):
        (tmp_path / name / "in/sub").mkdir(parents=True)
        (tmp_path / name / "in/sub/a").write_text("1")
        (tmp_path / name / "file").write_text("1")
    one, other = tmp_path / "one", tmp_path / "other place"
    first = place(one, rate=0.1)
    assert first.parts[:3] == (".scratch", "resume", "sft")
    os.utime(one / "in/sub/a", (1, 1))
    assert place(one, rate=0.1) == place(other, rate=0.1) == first
    others = [
        place(one, rate=0.2),
        place(one, rate="0.1"),
        place(one, stage="policy@r1-x", rate=0.1),
        place(one, inputs=("in", "file"), rate=0.1),
    ]
    (one / "in/sub/a").write_text("2")
    others.append(place(one, rate=0.1))
    (other / "in/sub/a").rename(other / "in/sub/b")
    others.append(place(other, rate=0.1))
    assert len({path.name for path in [first, *others]}) == 7
    assert others[2].parts[2] == "policy-r1-x"


def test_checkpoints_of_other_inputs_are_removed(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("1")
    old = tmp_path / place(tmp_path, rate=1)
    old.mkdir()
    (old / "000000001.pt").write_text("x")
    other = tmp_path / place(tmp_path, stage="evaluate", rate=1)
    other.mkdir()
    assert place(tmp_path, rate=1) == old.relative_to(tmp_path)
    assert old.exists()
    place(tmp_path, rate=2)
    assert not old.exists()
    assert other.exists()


def _hold(folder: Path, seconds: float, ready: Any) -> None:
    with resume.open_scratch(PIPELINE, "sft", inputs=[], params={}, folder=folder):
        ready.set()
        time.sleep(seconds)


@pytest.mark.parametrize("ends", [True, False])
def test_one_process_at_a_time_runs_a_stage(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    """The second waits for one that is ending; one that does not end is told."""
    monkeypatch.setenv("ROUNDHOUSE_GRACE", "60" if ends else "0")
    monkeypatch.setattr(resume, "_SECONDS_BEYOND_GRACE", 0.2)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, 0.5 if ends else 60, ready))
    process.start()
    try:
        assert ready.wait(20)
        opened = resume.open_scratch(PIPELINE, "sft", inputs=[], params={}, folder=tmp_path)
        if ends:
            with opened:
                pass
        else:
            with pytest.raises(BadInput, match="another process runs sft in this folder"):
                opened.__enter__()
        assert said.messages == ["sft: waits for the process that still runs it to end"]
    finally:
        process.kill()
        process.join()
    place(tmp_path, inputs=())  # whoever was killed holds nothing


def test_an_error_gives_the_stage_free_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    def attempt() -> dict[str, Any] | None:
        with resume.open_scratch(PIPELINE, "x", inputs=[], params={}, folder=tmp_path) as scratch:
            found = scratch.load()
            scratch.save(3, state(3))
            if found is None:
                raise MemoryError
            return found

    with pytest.raises(MemoryError):
        attempt()
    assert (attempt() or {})["step"] == 3
