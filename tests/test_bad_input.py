"""Whatever is wrong, a command ends with one message and the right exit code, and keeps what was there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import typer

from rlhf import artifacts, contracts
from rlhf.data.book import PromptBook
from rlhf.errors import BadInput, StageFailed, explain
from rlhf.models.policy import load_policy, save_policy
from rlhf.models.scalar import HEAD_FILE, ScalarModel
from rlhf.rewards.committee import SCALE_FILE, Committee
from rlhf.rewards.gold import Gold
from tasks import common, evaluate, preferences, promote, reward_model

FULL_ELSEWHERE = "Error while serializing: I/O error: No space left on device (os error 28)"

# --- the last word of a command -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (BadInput("what", where="there", rule="so", mend="thus"), 2, "there: what"),
        (StageFailed("the loss is nan"), 1, "the loss is nan"),
        (KeyboardInterrupt(), 1, "finished stages are kept"),
        (MemoryError(), 1, "mend: lower micro_batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 1, "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 1, "a/b: the disk is full"),
        (RuntimeError(FULL_ELSEWHERE), 1, "the disk is full"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), 1, "a/b: not allowed to write"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a/b"), 1, "a/b: No such"),
    ],
)
def test_a_foreseen_error_is_one_message_without_traceback(
    error: BaseException, code: int, words: str
) -> None:
    message, found = explain(error)
    assert found == code
    assert words in message
    assert "Traceback" not in message


def test_an_unforeseen_error_keeps_its_traceback_above_the_message() -> None:
    try:
        {}["members"]
    except KeyError as error:
        message, code = explain(error)
    assert code == 1
    assert message.startswith("Traceback")
    last = message.splitlines()[-3:]
    assert last[0] == "unforeseen KeyError: 'members'"
    assert last[2].startswith("  mend: ")


def run_stage(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> int:
    """The exit code of a stage that does this."""
    monkeypatch.setattr(common.config, "load", lambda: types.SimpleNamespace(gold=None))
    with pytest.raises(SystemExit) as ended:
        common.main("sft", lambda pipeline: work())
    return int(str(ended.value.code))


def test_a_stage_asked_to_end_says_so_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()

    def work() -> None:
        with artifacts.write_directory(tmp_path / "out") as new:
            (new / "half").touch()
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("it went on")

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run_stage(monkeypatch, work) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.startswith("sft: stopped")
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == ["out", "out/old"]


def test_a_fault_in_a_stage_names_the_stage_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise KeyError("members")

    assert run_stage(monkeypatch, work) == 1
    assert "unforeseen KeyError" in capsys.readouterr().err.splitlines()[-3]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 1, "stopped; finished stages are kept"),
        (BadInput("what"), 2, "error: what"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 1, "the disk is full"),
        (typer.Exit(3), 3, ""),
    ],
)
def test_the_command_line_ends_with_the_errors_code(
    error: BaseException,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from flows import __main__ as command

    app = typer.Typer()

    @app.command()
    def only() -> None:
        raise error

    monkeypatch.setattr(command, "app", app)
    monkeypatch.setattr("sys.argv", ["flows"])
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [("database or disk is full\n", "database or disk is full"), ("", r"empty; \d+ MB of disk")],
)
def test_a_server_that_does_not_start_shows_its_log_or_the_room_left(
    tmp_path: Path, content: str, words: str
) -> None:
    from flows.server import Server

    log = tmp_path / "prefect-server.log"
    log.write_text(content)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        with pytest.raises(StageFailed, match=words):
            Server("http://127.0.0.1:9/api", process, str(log)).wait()


def test_whoever_started_a_process_learns_that_it_was_ended() -> None:
    from flows.runner import end_trees

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        end_trees([process.pid])
        assert process.wait(timeout=5) == -signal.SIGTERM


# --- files between stages -------------------------------------------------------------------------


def test_a_full_disk_told_by_another_language_fails_the_stage(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (
        pytest.raises(StageFailed, match="disk is full"),
        artifacts.write_directory(tmp_path / "out"),
    ):
        raise RuntimeError(FULL_ELSEWHERE)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_stage_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    for name in (".out.abc.new", ".out.abc.old", ".other.abc.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    with artifacts.write_directory(tmp_path / "out") as new:
        (new / "whole").touch()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.abc.new", "out"]


@pytest.mark.parametrize(
    ("path", "stage"),
    [
        ("runs/r0/promoted", "sft"),
        ("runs/r2/promoted", "promote@r2"),
        ("runs/r1/reward_model", "reward_model@r1"),
        ("runs/r1/policies/r1-ppo/step-00002", "policy@r1-ppo"),
        ("data/tables/prompts.parquet", "data"),
        ("runs/r1/metrics/decision.json", "promote@r1"),
    ],
)
def test_what_is_absent_names_the_stage_that_makes_it(
    path: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        BadInput, match=rf"{path}: not there\n.*made by {stage}\n.*dvc repro {stage}$"
    ):
        common.need(Path(path))


def saved_policy(project: Path) -> Path:
    directory = project / "runs/r0/promoted"
    save_policy(tiny.llama(), tiny.tokenizer(), directory)
    return directory


@pytest.mark.parametrize("load", [load_policy, ScalarModel.from_directory])
@pytest.mark.parametrize("damage", ["truncated", "no weights", "no config"])
def test_a_damaged_policy_names_the_stage_that_makes_it(
    tmp_path: Path, load: Callable[..., Any], damage: str
) -> None:
    directory = saved_policy(tmp_path)
    if damage == "truncated":
        os.truncate(directory / "model.safetensors", 1000)
    else:
        (
            directory / {"no weights": "model.safetensors", "no config": "config.json"}[damage]
        ).unlink()
    with pytest.raises(BadInput, match=r"runs/r0/promoted: (?s:.*)make it again: dvc repro sft$"):
        load(directory, tiny.CPU)


def test_a_damaged_head_names_the_stage_that_makes_it(tmp_path: Path) -> None:
    directory = tmp_path / "runs/r1/reward_model/member_0"
    ScalarModel(tiny.llama().base_model).save(directory, tiny.tokenizer())
    os.truncate(directory / HEAD_FILE, 10)
    with pytest.raises(BadInput, match="make it again: dvc repro reward_model@r1"):
        ScalarModel.from_directory(directory, tiny.CPU)


@pytest.mark.parametrize("content", [{}, [], {"members": [{"name": "m"}]}, {"members": 3}])
def test_a_scale_of_another_form_names_its_stage(tmp_path: Path, content: Any) -> None:
    directory = tmp_path / "runs/r1/reward_model"
    artifacts.write_json(directory / SCALE_FILE, content)
    with pytest.raises(BadInput, match="make it again: dvc repro reward_model@r1"):
        Committee.load(directory, tiny.codec(), tiny.model_settings(), tiny.CPU)


@pytest.mark.parametrize(
    "content", [{}, [], [{}], [{"checkpoint": 3, "step": 1, "updates": 1}], ["step-00001"], None]
)
def test_checkpoints_of_another_form_name_their_stage(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "runs/r1/policies/r1-ppo/checkpoints.json"
    artifacts.write_json(path, content)
    with pytest.raises(BadInput, match=r"not a list of checkpoints(?s:.*)dvc repro policy@r1-ppo"):
        evaluate._checkpoints(path)


def test_a_listed_checkpoint_that_is_gone_names_its_stage(tmp_path: Path) -> None:
    path = tmp_path / "runs/r1/policies/r1-ppo/checkpoints.json"
    listed = [{"checkpoint": f"step-0000{i}", "step": i, "updates": i} for i in (1, 2)]
    artifacts.write_json(path, listed)
    (path.parent / "step-00001").mkdir()
    with pytest.raises(BadInput, match=r"step-00002: not there(?s:.*)dvc repro policy@r1-ppo"):
        evaluate._checkpoints(path)
    (path.parent / "step-00002").mkdir()
    assert evaluate._checkpoints(path) == listed


@pytest.mark.parametrize("splits", [[], ["choose"], ["report", "report"]])
def test_an_evaluation_without_its_one_row_names_its_stage(splits: list[str]) -> None:
    rows = pd.DataFrame({"split": pd.Series(splits, dtype="object")})
    with pytest.raises(BadInput, match=r"selected checkpoints on report(?s:.*)evaluate@r1-ppo"):
        promote._only(
            rows, Path("runs/r1/evaluations/r1-ppo/evaluations.parquet"), "selected", "report"
        )


def pairs(**columns: Any) -> pd.DataFrame:
    whole = {"tie": [False, False], "heldout": [False, True], "round": ["r1", "r1"]}
    return pd.DataFrame(whole | columns)


@pytest.mark.parametrize(
    ("table", "absent"),
    [
        (pairs().iloc[:0], "training"),
        (pairs(heldout=[True, True]), "training"),
        (pairs(tie=[True, False]), "training"),
        (pairs(heldout=[False, False]), "held-out"),
        (pairs(tie=[False, True]), "held-out"),
        (pairs(round=["r1", "r0"]), "held-out"),
    ],
)
def test_a_reward_model_without_pairs_says_which_are_absent(
    table: pd.DataFrame, absent: str
) -> None:
    path = Path("runs/r1/preferences/pairs.parquet")
    reward_model._check(pairs(), "r1", path)
    with pytest.raises(BadInput, match=f"no decided {absent}(?s:.*)dvc repro preferences@r1"):
        reward_model._check(table, "r1", path)


def test_a_prompt_that_the_book_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "data/tables/prompts.parquet"
    table = pd.DataFrame(
        {
            "prompt_id": [contracts.prompt_id("w3")],
            "prompt": ["w3"],
            "messages": [None],
            "split": "rl",
        }
    )
    contracts.write(table, path, contracts.PROMPTS)
    book = PromptBook(path, tiny.codec())
    assert book.tokens(contracts.prompt_id("w3")) == [3]
    with pytest.raises(BadInput, match=r"no prompt 0000(?s:.*)dvc repro data"):
        book.tokens("0" * 16)


# --- the user's programs --------------------------------------------------------------------------


def test_a_gold_program_that_exits_is_bad_input() -> None:
    def score(*texts: Any) -> Any:
        raise SystemExit(3)

    with pytest.raises(BadInput, match="score raised SystemExit: 3"):
        Gold("mine", types.SimpleNamespace(score=score)).score(["p"], ["r"], [True])  # type: ignore[arg-type]


def test_programs_are_imported_before_anything_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(*arguments: Any) -> None:
        raise AssertionError("sampled first")

    for name in ("load_tokenizer", "TextCodec", "PromptBook", "load_policy", "device_of"):
        monkeypatch.setattr(preferences, name, lambda *arguments: None)
    monkeypatch.setattr(common, "prepare_torch", lambda threads: None)
    monkeypatch.setattr(common, "need", lambda path: path)
    monkeypatch.setattr(preferences, "_sample", sampled)
    monkeypatch.setattr(preferences, "_earlier", lambda *arguments: ([], []))
    pipeline = common.config.load(Path(__file__).parents[1] / "pipeline.yaml")
    wrong = pipeline.gold.model_copy(update={"path": "no_such_module"})  # type: ignore[union-attr]
    with pytest.raises(BadInput, match="no_such_module: cannot be imported"):
        preferences.run(pipeline.model_copy(update={"gold": wrong}), "r1")


def test_a_python_without_the_packages_says_how_to_get_them(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; import tasks"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=Path(__file__).parents[1],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "source .venv/bin/activate" in done.stderr
    assert "Traceback" not in done.stderr
