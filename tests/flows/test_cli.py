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


def test_validate_is_light(project: Path) -> None:
    code = (
        "import sys\n"
        "from flows.__main__ import main\n"
        "sys.argv = ['flows', 'validate']\n"
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
    assert "pipeline.yaml is valid" in result.stdout


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
    assert plan[0]["name"] == "data"
    assert plan[0]["runs"] is True


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


def test_round_add(project: Path, flows: Flows) -> None:
    assert flows("round-add", "r2").returncode == 0
    assert "r2-ppo:" in (project / "pipeline.yaml").read_text()
    again = flows("round-add", "r2")
    assert again.returncode == 0
    assert "already" in again.stdout
    wrong = flows("round-add", "2")
    assert wrong.returncode == 2
    assert "use r3" in wrong.stderr


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
