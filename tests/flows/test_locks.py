"""Side by side on one checkout: slots for processors and GPUs, and other DVC processes. Stub stages, real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, child_environment
from ruamel.yaml import YAML

from flows.editing import set_value
from flows.plan import make_plan
from flows.runner import Outcome, Runner, _how_it_ended, devices, workspace_lock
from flows.session import Request, open_session, order_lock
from rlhf.errors import BadInput, StageFailed

TARGETS = ("reward_model@r1", "evaluate@r1-dpo")
Flows = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def place(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A project whose stages find this code, with GPU locks of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    locks = tmp_path / "tmp"
    locks.mkdir()
    monkeypatch.setenv("TMPDIR", str(locks))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return project


def side_by_side(runner: Runner, *names: str, gpu: bool = False) -> dict[str, Outcome | None]:
    found: dict[str, Outcome | None] = {}
    threads = [
        threading.Thread(target=lambda n=name: found.update({n: runner.run(n, gpu=gpu)}))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return found


def run_all(runner: Runner, project: Path) -> None:
    """Every stage as soon as what it depends on has ended, as the flow does it."""
    done: set[str] = set()
    plan = {s.name: s for target in TARGETS for s in make_plan(target, project)}.values()
    while len(done) < len(plan):
        ready = [s.name for s in plan if s.name not in done and done.issuperset(s.after)]
        outcomes = side_by_side(runner, *ready)
        assert all(outcome is not None and outcome.ok for outcome in outcomes.values()), outcomes
        done.update(ready)


def dvc(project: Path, *words: str, **extra: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dvc", *words],
        cwd=project,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **extra,
    )


def ran(project: Path) -> list[str]:
    return (project / "ran.txt").read_text().split()


def intervals(project: Path) -> dict[str, tuple[float, float]]:
    """When each SLOW stage began and ended."""
    words = (project / "times.txt").read_text().split()
    found: dict[str, list[float]] = {}
    for name, moment in zip(words[::2], words[1::2], strict=True):
        found.setdefault(name, []).append(float(moment))
    return {name: (min(times), max(times)) for name, times in found.items()}


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# --- slots ---


def test_stages_side_by_side_leave_what_a_serial_repro_leaves(place: Path, tmp_path: Path) -> None:
    serial = tmp_path / "serial"
    shutil.copytree(place, serial)
    process = dvc(serial, "repro", "-q", *TARGETS)
    (place / "SLOW").write_text("policy@r1-dpo reward_model@r1")
    run_all(Runner(place, parallel=3), place)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    times = intervals(place)
    assert times["policy@r1-dpo"][0] < times["reward_model@r1"][1]
    assert times["reward_model@r1"][0] < times["policy@r1-dpo"][1]
    shuffle(place / "dvc.lock")
    order_lock(place)
    assert (place / "dvc.lock").read_text() == (serial / "dvc.lock").read_text()
    for folder in ("data", "runs"):
        files = [p.relative_to(serial) for p in (serial / folder).rglob("*") if p.is_file()]
        assert files
        for file in files:
            assert (place / file).read_bytes() == (serial / file).read_bytes()


def shuffle(path: Path) -> None:
    """Another order of the stages, as chance may bring it about."""
    from dvc.utils.serialize import modify_yaml

    with modify_yaml(str(path)) as lock:
        for name in sorted(lock["stages"], key=lambda name: name[::-1]):
            lock["stages"].move_to_end(name)


def test_a_stage_sees_its_own_gpu_only_and_waits_when_all_are_taken(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three stages for two GPUs, with more processor slots than that."""
    names = ("a", "b", "c")
    (place / "SLOW").write_text(" ".join(names))
    program = "import sys, stub; sys.argv = [sys.argv[0], sys.argv[-1]]; stub.main()"
    monkeypatch.setattr("flows.runner._DVC", [sys.executable, "-c", program])
    notes: list[str] = []
    runner = Runner(place, parallel=4, gpus=2, on_note=lambda name, words: notes.append(words))
    side_by_side(runner, *names, gpu=True)
    runner.run("without")
    seen = {name: (place / "saw" / name).read_text() for name in names}
    assert set(seen.values()) == {"0", "1"}
    assert (place / "saw/without").read_text() == ""
    times = intervals(place)
    for one in names:
        for other in names:
            if one < other and seen[one] == seen[other]:
                first, second = sorted((times[one], times[other]))
                assert first[1] <= second[0]
    assert notes == ["waits for a GPU (0, 1)"]


def test_which_gpu_a_stage_is_given(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The declared ones; none to a stage that takes no slot; and no say where no GPU is declared."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    with Runner(place, gpus=2)._device("x", True) as first:
        with Runner(place, gpus=2)._device("y", True) as second:  # another flow, another checkout
            assert (first, second) == ("GPU-a", "GPU-b")
        with Runner(place, gpus=2)._device("z", False) as third:
            assert third == ""
    with Runner(place, gpus=0)._device("x", True) as free:
        assert free is None


@pytest.mark.parametrize("hidden", ["", " ", "-1", "-1,0"])
def test_hidden_gpus_are_not_handed_out(
    place: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert devices(0) == []
    set_gpus(place, 2)
    before = (place / "pipeline.yaml").read_bytes()
    with pytest.raises(BadInput, match=r"resources\.gpus is 2, and CUDA_VISIBLE_DEVICES"):
        with open_session(Request(commit="never"), place):
            pass
    assert (place / "pipeline.yaml").read_bytes() == before


def set_gpus(place: Path, count: int) -> None:
    path = place / "pipeline.yaml"
    path.write_text(set_value(path.read_text(), "resources.gpus", count))


def test_who_waits_for_a_gpu_leaves_the_slot_to_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "SLEEP").write_text("first")
    program = "import sys, stub; sys.argv = [sys.argv[0], sys.argv[-1]]; stub.main()"
    monkeypatch.setattr("flows.runner._DVC", [sys.executable, "-c", program])
    waits = threading.Event()
    runner = Runner(place, parallel=2, gpus=1, on_note=lambda name, words: waits.set())
    threads = [
        threading.Thread(target=runner.run, args=(name,), kwargs={"gpu": gpu})
        for name, gpu in (("first", True), ("second", True), ("third", False))
    ]
    threads[0].start()
    wait_until((place / "sleeping.pid").exists)
    threads[1].start()
    assert waits.wait(30)
    threads[2].start()
    try:
        wait_until(lambda: "third" in runner.outcomes, 10)
        assert set(runner.outcomes) == {"third"}
    finally:
        (place / "GO").touch()
        for thread in threads:
            thread.join(timeout=60)
    assert all(runner.outcomes[name].ok for name in ("first", "second", "third"))


# --- other processes on the same checkout ---


@pytest.fixture
def held_stage(place: Path) -> Iterator[subprocess.Popen[str]]:
    """A `dvc repro data` by hand that takes until it is told otherwise."""
    (place / "SLEEP").write_text("data")
    process = dvc(place, "repro", "data", start_new_session=True)
    wait_until((place / "sleeping.pid").exists)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_stage_waits_for_a_repro_by_hand_and_then_finds_it_done(
    place: Path, held_stage: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.runner._SECONDS_BETWEEN_TRIES", 0.2)
    notes: list[str] = []

    def on_note(name: str, words: str) -> None:
        notes.append(words)
        (place / "SLEEP").unlink()  # the stage by hand ends as soon as the flow's has been told
        (place / "GO").touch()

    outcome = Runner(place, on_note=on_note).run("data")
    assert outcome is not None
    assert outcome.ok, outcome.message
    assert len(notes) == 1
    assert "another process is at it (PID " in notes[0]
    out, _ = held_stage.communicate(timeout=60)
    assert held_stage.returncode == 0, out
    assert ran(place) == ["data"]


def test_waiting_for_a_repro_by_hand_has_an_end(
    place: Path, held_stage: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.runner._SECONDS_BETWEEN_TRIES", 0.2)
    outcome = Runner(place, timeout=4).run("data")
    assert outcome is not None
    assert "is busy, it is being blocked by" in outcome.message
    assert held_stage.poll() is None
    assert ran(place) == ["data"]


def test_two_repros_by_hand_one_is_told_who_is_at_it(
    place: Path, held_stage: subprocess.Popen[str]
) -> None:
    second = dvc(place, "repro", "data")
    out, _ = second.communicate(timeout=60)
    assert second.returncode
    assert "is busy, it is being blocked by" in out
    (place / "SLEEP").unlink()
    (place / "GO").touch()
    held_stage.communicate(timeout=60)
    lock = YAML(typ="safe").load((place / "dvc.lock").read_text())
    assert list(lock["stages"]) == ["data"]
    assert (place / "data/tables/made.txt").read_text() == "data"


def test_a_flow_that_may_wait_takes_the_checkout_when_it_is_free(place: Path) -> None:
    code = (
        "from flows.runner import workspace_lock\n"
        "with workspace_lock():\n    print('held', flush=True)\n    input()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=place,
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    try:
        with pytest.raises(StageFailed, match=f"busy: held by pid {holder.pid}"):
            with workspace_lock(place):
                pass
        told: list[str] = []

        def free(words: str) -> None:
            told.append(words)
            holder.communicate("\n")

        with workspace_lock(place, wait=30, on_wait=free):
            pass
        assert f"held by pid {holder.pid}" in told[0]
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize("name", ["pipeline.yaml", "dvc.yaml", "dvc.lock"])
def test_conflict_markers_are_refused_with_their_line(place: Path, name: str) -> None:
    path = place / name
    text = path.read_text() if path.exists() else "schema: '2.0'\nstages:\n"
    path.write_text(f"{text}<<<<<<< HEAD\na: 1\n=======\na: 2\n>>>>>>> other\n")
    line = len(text.splitlines()) + 1
    with pytest.raises(BadInput, match=f"{name} line {line}: conflict marker <<<<<<< HEAD"):
        with open_session(Request(commit="never"), place):
            pass
    assert not (place / "ran.txt").exists()


# --- how stages end ---


@pytest.mark.parametrize(
    ("lines", "code", "by_kernel", "words"),
    [
        (["sft: stopped after step 40; run it again", "ERROR: failed to run: x, exited with 75"], 255,
         False, "was interrupted; run again, it continues from step 40"),
        (["ERROR: failed to run: x, exited with 75"], 255, False, "from its last checkpoint"),
        (["ERROR: failed to run: x, exited with -9"], 255, False, "killed (signal 9): out of memory, or kill -9"),
        (["ERROR: failed to run: x, exited with 137"], 255, False, "killed (signal 9): out of memory, or kill -9"),
        (["ERROR: failed to run: x, exited with -9"], 255, True, "killed by the kernel: out of memory"),
        ([], -9, False, "killed (signal 9)"),
        (["ERROR: failed to run: x, exited with -15"], 255, False, "ended by signal 15"),
        (["ERROR: failed to run: x, exited with 1"], 255, False, "failed"),
        (["x exited with 75 apples", "ERROR: failed to run: x, exited with 2"], 255, False, "failed"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_stage_that_ended(
    lines: list[str], code: int, by_kernel: bool, words: str
) -> None:
    assert words in _how_it_ended(lines, code, by_kernel)


def test_an_interrupted_stage_is_no_failure_in_words(place: Path) -> None:
    (place / "SLEEP").write_text("data")
    runner = Runner(place)
    found: list[Outcome | None] = []
    thread = threading.Thread(target=lambda: found.append(runner.run("data")))
    thread.start()
    wait_until((place / "sleeping.pid").exists)
    os.kill(int((place / "sleeping.pid").read_text()), signal.SIGTERM)
    thread.join(timeout=30)
    assert found[0] is not None
    assert found[0].message == "data was interrupted; run again, it continues from step 7"


def test_a_stage_has_its_grace_before_it_is_killed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_GRACE", "1")
    (place / "STUBBORN").write_text("data")
    runner = Runner(place)
    thread = threading.Thread(target=lambda: runner.run("data"))
    thread.start()
    wait_until((place / "sleeping.pid").exists)
    began = time.monotonic()
    runner.end_all()
    thread.join(timeout=30)
    assert time.monotonic() - began >= 1
    pid = int((place / "sleeping.pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 5)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_grace_that_is_none_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_GRACE", value)
    with pytest.raises(BadInput, match="ROUNDHOUSE_GRACE"):
        Runner(place)


# --- DVC remotes ---


def test_a_push_after_every_stage_needs_a_remote(place: Path) -> None:
    push_on(place)
    with pytest.raises(BadInput, match="dvc remote add --default"):
        with open_session(Request(commit="never"), place):
            pass


def test_a_finished_stage_is_pushed_and_a_failed_push_is_a_warning(place: Path) -> None:
    store = place.parent / "store"
    add = ["remote", "add", "--default", "store", str(store)]
    dvc(place, *add).communicate(timeout=60)
    outcome = Runner(place, push=True).run("data")
    assert outcome is not None
    assert outcome.ok
    assert any(path.is_file() for path in store.rglob("*"))
    shutil.rmtree(store)
    store.write_text("no folder")
    notes: list[str] = []
    runner = Runner(place, push=True, on_note=lambda name, words: notes.append(words))
    outcome = runner.run("sft")
    assert outcome is not None
    assert outcome.ok
    assert "mend: dvc push sft" in notes[0]


def push_on(place: Path) -> None:
    path = place / "pipeline.yaml"
    path.write_text(path.read_text().replace("push: false", "push: true"))
