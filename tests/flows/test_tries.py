"""A grid of settings beside a round: what it asks for, what it runs, and that the round is as it was."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import child_environment

from flows import tries, try_command
from flows.plan import make_plan
from rlhf import config, tracking
from rlhf.errors import BadInput

STUB = """
import json, os, pathlib, sys, time
import yaml
name, *outputs = sys.argv[1:]
with open("ran.txt", "a") as file:
    file.write(name + "\\n")
kind, _, key = name.partition("@")
settings = yaml.safe_load(open("pipeline.yaml"))["candidates"].get(key, {})
if kind == "policy" and settings["kl"]["coef"] == 0.5:
    sys.exit("the loss is not finite")
while os.path.exists("HOLD") and kind == "policy":
    time.sleep(0.05)
for output in map(pathlib.Path, outputs):
    if output.suffix == ".json":
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"x": 1}))
        continue
    output.mkdir(parents=True, exist_ok=True)
    (output / "made.txt").write_text(name)
    if kind == "evaluate":
        import pandas as pd
        score = 1 - settings["kl"]["coef"]
        rows = [{"split": s, "selected": True, "checkpoint": "step-24", "gold_mean": score + (s == "report"),
                 "win_rate_lower": 0.6, "kl_nats": 3.0, "alarms": 0.0} for s in ("choose", "report")]
        pd.DataFrame(rows).to_parquet(output / "evaluations.parquet")
"""


@pytest.fixture(scope="session")
def ran_template(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A round of stubs that evaluate, with one candidate, done; in a path with spaces."""
    folder = tmp_path_factory.mktemp("ran") / "a project"
    shutil.copytree(template, folder)
    (folder / "stub.py").write_text(STUB)
    path = folder / "pipeline.yaml"
    text = path.read_text()
    start = text.index("  r1-dpo:")
    path.write_text(text[:start] + text[text.index("\nevaluation:") + 1 :])
    for stage in make_plan(folder=folder):
        command = [sys.executable, "stub.py", stage.name, *stage.outputs]
        subprocess.run(command, cwd=folder, env=child_environment(), check=True)
    dvc = [sys.executable, "-m", "dvc", "commit", "--force", "--quiet"]
    subprocess.run(dvc, cwd=folder, env=child_environment(), check=True, capture_output=True)
    (folder / "ran.txt").unlink()
    return folder


@pytest.fixture
def ran(ran_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a project"
    shutil.copytree(ran_template, folder)
    monkeypatch.chdir(folder)
    return folder


def attempt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows", "try", *words],
        cwd=folder,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def fingerprint(folder: Path) -> dict[str, str]:
    """Everything but scratch and DVC's cache, by content."""
    outside = (".scratch", ".dvc", ".git", "mlflow.db", "mlartifacts")
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in outside
    }


def git_state(folder: Path) -> str:
    words = ["git", "status", "--porcelain", "--branch"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


COEF = "candidates.r1-ppo.kl.coef"


def test_a_grid_runs_beside_the_round_and_the_same_grid_runs_nothing(ran: Path) -> None:
    secrets = ran / ".dvc/config.local"
    secrets.write_text("[core]\n    analytics = false\n")
    secrets.chmod(0o600)
    before, git = fingerprint(ran), git_state(ran)
    words = ["--set", f"{COEF}=0.05,0.3", "--json"]
    first = attempt(ran, *words)
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    place = ran / ".scratch/tries/r1-ppo"
    assert (place / ".dvc/config.local").stat().st_mode & 0o777 == 0o600
    names = ["r1-ppo_coef_0_05", "r1-ppo", "r1-ppo_coef_0_3"]  # by the gate's metric
    assert [row["candidate"] for row in found["rows"]] == names
    assert [row["rank_score"] for row in found["rows"]] == pytest.approx([0.95, 0.85, 0.7])
    assert found["rows"][0]["changes"] == {"kl.coef": 0.05}
    assert found["rows"][0]["words"] == "--set 'candidates.ppo.kl.coef=0.05'"
    assert json.loads((place / "results.json").read_text())["rows"] == found["rows"]
    stages = sorted((place / "ran.txt").read_text().split())
    tried = [name for name in names if name != "r1-ppo"]
    assert stages == sorted(f"{kind}@{name}" for kind in ("policy", "evaluate") for name in tried)
    assert fingerprint(ran) == before
    assert git_state(ran) == git
    assert not any(stage.runs for stage in make_plan("promote@r1"))

    again = attempt(ran, *words)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["rows"] == found["rows"]
    assert sorted((place / "ran.txt").read_text().split()) == stages


def test_a_point_that_fails_leaves_the_others_their_results(ran: Path) -> None:
    done = attempt(ran, "--set", f"{COEF}=0.5,0.05", "--keep")
    assert done.returncode == 1
    assert "the loss is not finite" in done.stderr
    rows = json.loads((ran / ".scratch/tries/r1-ppo/results.json").read_text())["rows"]
    states = {row["candidate"]: row["state"] for row in rows}
    assert states == {"r1-ppo": "own", "r1-ppo_coef_0_05": "done", "r1-ppo_coef_0_5": "missing"}
    assert (ran / ".scratch/tries/r1-ppo/runs/r1/policies/r1-ppo_coef_0_05").is_dir()


def test_a_killed_try_goes_on_without_git(ran: Path) -> None:
    shutil.rmtree(ran / ".git")
    settings = (ran / ".dvc/config").read_text()
    (ran / ".dvc/config").write_text(f"{settings}\n[core]\n    no_scm = true\n")
    (ran / "HOLD").touch()
    words = [sys.executable, "-m", "flows", "try", "--set", f"{COEF}=0.05,0.3"]
    process = subprocess.Popen(words, cwd=ran, env=child_environment(), stderr=subprocess.PIPE)
    log = ran / ".scratch/tries/r1-ppo/ran.txt"
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().split()) < 2:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    busy = attempt(ran, "--set", f"{COEF}=0.05")
    assert busy.returncode == 1
    assert "busy" in busy.stderr
    process.kill()
    process.communicate()
    (ran / "HOLD").unlink()
    (ran / ".scratch/tries/r1-ppo/HOLD").unlink()
    done = attempt(ran, "--set", f"{COEF}=0.05,0.3")
    assert done.returncode == 0, done.stderr
    assert "r1-ppo_coef_0_05" in done.stdout
    assert "python -m flows round add --from-template r1" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([f"{COEF}=0.05,"], "an empty value"),
        ([f"{COEF}="], "an empty value"),
        ([COEF], "write candidates.NAME.KEY=value,value"),
        (["rounds.r1.init=initial"], "write candidates.NAME.KEY=value,value"),
        (["candidates.r9-ppo.kl.coef=1.0"], "no candidate r9-ppo; use one of r1-ppo"),
        (["candidates.r1-ppo.round=r2"], "round is the round's"),
        (["candidates.r1-ppo.kl.coeff=0.1"], "kl.coeff: unknown key; did you mean coef"),
        (["candidates.r1-ppo.kl.coef=-1.0"], "kl.coef=-1.0"),
        (["candidates.r1-ppo.kl.coef=x,y"], "2 problems"),
        (["candidates.r1-ppo.kl.coef.deep=1"], "kl.coef is 0.15, not a section"),
        ([f"{COEF}=0.1", f"{COEF}=0.2"], "given twice"),
        ([f"{COEF}={','.join(f'0.{i}1' for i in range(17))}"], "--limit 17"),
        ([], "nothing to try"),
    ],
)
def test_what_cannot_be_tried_is_told_before_anything_runs(
    ran_template: Path, words: list[str], says: str
) -> None:
    pipeline = config.load(ran_template / "pipeline.yaml")
    raw = config.read_yaml(ran_template / "pipeline.yaml")
    with pytest.raises(BadInput, match=says):
        tries.read_grid(words, pipeline, raw, name=None, limit=tries.LIMIT)


def test_a_round_that_has_not_run_is_told(ran: Path) -> None:
    shutil.rmtree(ran / "runs/r1/reward_model")
    says = "reward_model@r1 is not up to date(?s:.*)python -m flows run --round r1"
    with pytest.raises(BadInput, match=says):
        tries.check_ready(grid(ran, f"{COEF}=0.05"), ran)
    assert not (ran / ".scratch/tries").exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0.1,1e-5", ["0.1", "1e-5"]),
        ("[0.9,0.95],[0.9, 0.99]", ["[0.9,0.95]", "[0.9, 0.99]"]),
        ("{kind: mean}, {kind: min}", ["{kind: mean}", "{kind: min}"]),
        ("\"a,b\",'c,d',it's", ['"a,b"', "'c,d'", "it's"]),
        ("a,,b", ["a", "", "b"]),
    ],
)
def test_values_are_split_at_commas_outside_brackets_and_quotes(
    text: str, parts: list[str]
) -> None:
    assert tries.split_values(text) == parts


def grid(folder: Path, *words: str) -> tries.Grid:
    pipeline = config.load(folder / "pipeline.yaml")
    raw = config.read_yaml(folder / "pipeline.yaml")
    return tries.read_grid(words, pipeline, raw, name=None, limit=tries.LIMIT)


def test_every_combination_is_a_candidate_that_says_what_differs(ran_template: Path) -> None:
    found = grid(
        ran_template, f"{COEF}=0.1,0.2", "candidates.r1-ppo.adam_betas=[0.9,0.95],[0.9,0.99]"
    )
    changes = [(point.changes["kl.coef"], point.changes["adam_betas"][1]) for point in found.points]
    assert changes == [(0.1, 0.95), (0.1, 0.99), (0.2, 0.95), (0.2, 0.99)]
    assert len({point.name for point in found.points}) == 4
    for point in found.points:
        assert point.body["kl"]["coef"] == point.changes["kl.coef"]
        assert point.body["kl"]["where"] == "reward"


def test_no_point_is_lost_to_a_name(ran_template: Path) -> None:
    """Values that six digits, or a name without signs, would make the same."""
    made = grid(
        ran_template,
        "candidates.r1-ppo.kl.coef=0.1234567,0.1234568",
        "candidates.r1-ppo.learning_rate=1.0e-6,1.0e+6",
    )
    assert len({point.name for point in made.points}) == 4
    (small,) = grid(ran_template, "candidates.r1-ppo.learning_rate=1.0e-6").points
    assert small.name == "r1-ppo_learning_rate_1e_06"


def test_names_are_the_same_each_time_and_apart_for_apart_values(ran_template: Path) -> None:
    first: Any = grid(ran_template, "candidates.r1-ppo.learning_rate=1e-5,1.0e-4,0.00001,1")
    names = [point.name for point in first.points]
    assert names == [
        "r1-ppo_learning_rate_1e_05",
        "r1-ppo_learning_rate_0_0001",
        "r1-ppo_learning_rate_1",
    ]
    again = grid(ran_template, "candidates.r1-ppo.learning_rate=1.0e-4")
    assert again.points[0].name == names[1]


def test_runs_of_a_try_stay_out_of_the_rounds_charts(
    ran_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tracking.Run:
        return tracking.stage_run(
            config.load(ran_template / "pipeline.yaml"),
            stage="policy",
            key="policy@r1-ppo",
            round="r1",
            kind="policy",
            name="r1/ppo",
            algorithm="ppo",
            params={},
            folder=tmp_path,
        )

    own = run()
    monkeypatch.setenv(tracking.TRY_VARIABLE, "less-kl")
    tried = run()
    tags = tried._start["tags"]
    assert (tags["rlhf.try"], tags["rlhf.kind"]) == ("less-kl", "try-policy")
    assert tried.fingerprint != own.fingerprint
    assert "rlhf.try" not in own._start["tags"]


def test_experiments_in_dvcs_copies_share_the_projects_mlflow(tmp_path: Path) -> None:
    copy = tmp_path / "project/.dvc/tmp/exps/tmpab12"
    own = tracking.tracking_uri(None, tmp_path / "project")
    assert tracking.tracking_uri(None, copy) == own
    assert tracking.tracking_uri(None, tmp_path / "project/deeper") != own


def test_people_are_shown_the_best_that_passes(
    ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best of the gate's metric breaks a rule here, so the words are those of the second."""
    import pandas as pd
    from rich.console import Console

    found = grid(ran, f"{COEF}=0.05,0.3")
    for point, gold, kl in zip(found.points, (0.9, 0.8), (50.0, 3.0), strict=True):
        place = ran / f".scratch/tries/r1-ppo/runs/r1/evaluations/{point.name}"
        place.mkdir(parents=True)
        numbers = {"gold_mean": gold, "kl_nats": kl, "win_rate_lower": 0.6, "alarms": 0.0}
        rows = [{"split": s, "selected": True, **numbers} for s in ("choose", "report")]
        pd.DataFrame(rows).to_parquet(place / "evaluations.parquet")
    pipeline = config.load("pipeline.yaml")
    try_command._show(found, pipeline, ran, Console(width=100, highlight=False), as_json=False)
    shown = capsys.readouterr().out
    assert shown.index("_coef_0_05 ") < shown.index("_coef_0_3 ")
    assert "kl_nats 50 > 12" in shown
    assert "round add --from-template r1 --set 'candidates.ppo.kl.coef=0.3'" in shown
