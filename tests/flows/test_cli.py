"""The command line: exit codes, messages without tracebacks, light imports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import child_environment
from ruamel.yaml import YAML

from flows.report import read_decision
from rlhf import config
from rlhf.errors import BadInput

Flows = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(
    "words",
    [["validate"], ["round", "add"], ["round", "list"], ["round", "diff", "r1", "r1"]],
    ids=" ".join,
)
def test_a_light_command_imports_nothing_heavy(project: Path, words: list[str]) -> None:
    code = (
        "import sys\n"
        "from flows.__main__ import main\n"
        f"sys.argv = ['flows', *{words}]\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert not error.code\n"
        "heavy = {'torch', 'mlflow', 'prefect', 'transformers', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "r1" in result.stdout or "valid" in result.stdout


def test_a_wrong_value_is_exit_code_2_with_its_path(project: Path, flows: Flows) -> None:
    path = project / "pipeline.yaml"
    path.write_text(path.read_text().replace("parallel: 2", "parallel: 0"))
    result = flows("validate")
    assert result.returncode == 2
    assert "resources.parallel=0" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_part_that_cannot_be_imported_is_exit_code_2(project: Path, flows: Flows) -> None:
    path, text = project / "pipeline.yaml", (project / "pipeline.yaml").read_text()
    path.write_text(text.replace("{kind: bradley_terry,", "{kind: mine.loss, options: {}} #"))
    (project / "mine.py").write_text("def other(chosen_scores, *, denominator): ...\n")
    result = flows("validate", PYTHONPATH=f"{project}:{child_environment()['PYTHONPATH']}")
    assert result.returncode == 2
    assert "1 problem" in result.stderr
    assert "rounds.r1.reward_model.loss: 'mine.loss' cannot be imported" in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


def test_the_resolved_file_reads_back_as_the_same_pipeline(project: Path, flows: Flows) -> None:
    """Presets, defaults and parts that are names alone are written out in full."""
    path = project / "pipeline.yaml"
    yaml = YAML()
    raw = yaml.load(path.read_text())
    raw["rounds"]["r1"]["preferences"]["ties"] = "keep"
    raw["rounds"]["r1"]["reward_model"]["loss"] = "davidson"
    raw["candidates"]["r1-dpo"]["losses"] = ["sigmoid", "sft"]
    for key in ("advantage", "loss", "truncated"):
        del raw["candidates"]["r1-ppo"][key]
    with path.open("w") as file:
        yaml.dump(raw, file)
    before = config.load(path)
    result = flows("validate", "--resolved")
    assert result.returncode == 0, result.stderr
    shown = YAML(typ="safe").load(result.stdout)
    assert shown["rounds"]["r1"]["reward_model"]["loss"] == {"kind": "davidson", "centering": 0.0}
    assert [term["kind"] for term in shown["candidates"]["r1-dpo"]["losses"]] == ["sigmoid", "sft"]
    assert shown["candidates"]["r1-ppo"]["advantage"]["gae_lambda"] == 0.95
    path.write_text(result.stdout)
    assert config.load(path) == before
    again = flows("validate", "--resolved")
    assert again.stdout == result.stdout
    plain = flows("validate")
    assert plain.returncode == 0
    first, ppo, _ = plain.stdout.splitlines()
    assert first == "pipeline.yaml is valid: 1 round(s), 2 candidate(s)"
    assert ppo.startswith(
        "  r1-ppo is ppo but for reduction=constant_length (token_mean), kl.coef="
    )


def test_resolved_does_not_show_a_file_that_is_wrong(project: Path, flows: Flows) -> None:
    path = project / "pipeline.yaml"
    path.write_text(path.read_text().replace("parallel: 2", "parallel: 0"))
    result = flows("validate", "--resolved")
    assert result.returncode == 2
    assert not result.stdout


@pytest.mark.parametrize("command", ["validate", "plan", "run", "report", "ui"])
def test_without_a_pipeline_every_command_says_where_to_go(
    project: Path, flows: Flows, command: str
) -> None:
    (project / "pipeline.yaml").unlink()
    result = flows(command)
    assert result.returncode == 2
    assert "pipeline.yaml" in result.stderr
    assert "mend:" in result.stderr
    assert "Traceback" not in result.stderr


def test_run_outside_git_says_so_before_anything_starts(project: Path, flows: Flows) -> None:
    shutil.rmtree(project / ".git")
    result = flows("run")
    assert result.returncode == 2
    assert "git init" in result.stderr
    assert not (project / "ran.txt").exists()


def test_plan_for_programs(project: Path, flows: Flows) -> None:
    result = flows("plan", "--round", "r1", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["stages"][0]["name"] == "data"
    assert plan["stages"][0]["runs"] is True


def test_plan_while_dvc_is_locked(project: Path, flows: Flows) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from dvc.repo import Repo\n"
            "with Repo('.') as repo:\n"
            "    with repo.lock:\n"
            "        print('held', flush=True)\n"
            "        import time; time.sleep(60)\n",
        ],
        cwd=project,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        result = flows("plan")
    finally:
        holder.kill()
        holder.wait()
    assert result.returncode == 2
    assert "another process holds DVC's lock" in result.stderr
    assert "Traceback" not in result.stderr


def test_rounds_by_command(project: Path, flows: Flows) -> None:
    path = project / "pipeline.yaml"
    before = path.read_text()
    added = flows("round", "add", "--set", "candidates.ppo.kl.coef=1e-2", "--add", "ppo2=ppo")
    assert added.returncode == 0, added.stderr
    assert added.stdout.splitlines() == [
        "r2 added to pipeline.yaml: starts from r1, made from r1",
        "  candidates.ppo.kl.coef: 0.15 -> 0.01",
        "  candidates.ppo2: (absent) -> (present)",
    ]
    again = flows("round", "add", "r2", "--set", "candidates.ppo.kl.coef=0.01")
    assert (again.returncode, again.stdout) == (0, "r2 is already in pipeline.yaml\n")
    other = flows("round", "add", "r2", "--set", "candidates.ppo.kl.coef=0.3")
    assert other.returncode == 2
    assert "candidates.r2-ppo.kl.coef is 0.01, not 0.3" in other.stderr
    shown = flows("round", "show", "r2")
    as_json = flows("round", "show", "r2", "--json")
    block = YAML(typ="safe").load(shown.stdout)
    assert block == json.loads(as_json.stdout)
    assert list(block["candidates"]) == ["r2-ppo", "r2-dpo", "r2-ppo2"]
    assert block["candidates"]["r2-ppo"]["kl"]["coef"] == 0.01
    difference = flows("round", "diff", "r1", "r2", "--json")
    assert json.loads(difference.stdout)[0] == {
        "path": "candidates.ppo.kl.coef",
        "r1": 0.15,
        "r2": 0.01,
    }
    assert flows("round", "diff", "r1", "r1").stdout == "r1 and r1 have the same settings\n"
    rows = json.loads(flows("round", "list", "--json").stdout)
    assert [(row["round"], row["from"], row["status"]) for row in rows] == [
        ("r1", "r0", "unrun"),
        ("r2", "r1", "unrun"),
    ]
    removed = flows("round", "remove", "r2")
    assert removed.returncode == 0, removed.stderr
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("add", "2"), "use r2"),
        (("add", "r2", "--from-template", "r5"), "no round r5 to copy"),
        (("add", "--set", "kl=1"), "kl: unknown key"),
        (("add", "--set", "init"), "write path=value"),
        (("add", "--add", "ppo2"), "write --add grpo2=grpo"),
        (("show", "r9"), "no round r9"),
        (("diff", "r1", "r9"), "no round r9"),
        (("remove", "r9"), "no round r9"),
        (("remove", "r1"), "r1 is the only round"),
    ],
)
def test_a_wrong_round_is_exit_code_2(
    project: Path,
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from flows import __main__ as command

    before = (project / "pipeline.yaml").read_bytes()
    monkeypatch.setattr("sys.argv", ["flows", "round", *words])
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert (project / "pipeline.yaml").read_bytes() == before
    assert message in capsys.readouterr().err


def test_a_report_of_a_round_that_has_not_run(project: Path, flows: Flows) -> None:
    result = flows("report", "--round", "r1")
    assert result.returncode == 2
    assert "python -m flows run --round r1" in result.stderr


def test_a_worker_without_a_server_says_which_to_start(project: Path, flows: Flows) -> None:
    result = flows("worker", HOME=str(project))
    assert result.returncode == 2
    assert "python -m flows server" in result.stderr


def test_an_unknown_command_is_exit_code_2(flows: Flows) -> None:
    result = flows("fly")
    assert result.returncode == 2
    assert "No such command" in result.stderr


@pytest.mark.parametrize("content", ["x", "{}", "[]"])
def test_a_damaged_decision_names_the_stage_that_makes_it(project: Path, content: str) -> None:
    path = project / "runs/r1/metrics/decision.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(BadInput, match="dvc repro promote@r1"):
        read_decision("r1", project)


def test_our_warnings_are_seen_though_prefects_console_is_silent(project: Path) -> None:
    program = """
import logging, os
os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
from flows import __main__ as command
command._show_warnings()
import prefect
prefect.logging.configuration.setup_logging()
logging.getLogger("rlhf.tracking").warning("MLflow does not answer")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr.endswith("MLflow does not answer\n")
