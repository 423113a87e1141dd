"""The flow on a stub project, with a real Prefect server that it starts itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import finished
import pytest
import stub
from conftest import child_environment

from flows import deployments
from flows.plan import Stage
from flows.rounds import append_round
from flows.runner import Runner
from flows.session import LoopStopped, Request, Session, open_session
from rlhf import champion, config
from rlhf.errors import BadInput, StageFailed
from rlhf.lifeline import alive, ident

Flows = Callable[..., "subprocess.CompletedProcess[str]"]


def ran(project: Path) -> list[str]:
    path = project / "ran.txt"
    return path.read_text().split() if path.exists() else []


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests: making one takes seconds."""
    return str(tmp_path_factory.mktemp("prefect"))


def test_a_failed_stage_halts_the_rest_and_shows_its_log(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    runner = Runner(project, parallel=2)
    assert runner.run("data") == runner.run(
        "data"
    )  # the second call awaits the first one's outcome
    (project / "FAIL").write_text("sft")
    outcome = runner.run("sft")
    assert outcome is not None
    assert not outcome.ok
    assert "stub sft was told to fail" in outcome.message
    assert runner.run("preferences@r1") is None
    assert ran(project) == ["data", "sft"]
    assert (project / "data/tables/made.txt").exists()


def test_a_stage_that_takes_too_long_is_ended_with_its_children(project: Path) -> None:
    (project / "SLEEP").write_text("data")
    outcome = Runner(project, timeout=6).run("data")
    assert outcome is not None
    assert "took longer than 6 s" in outcome.message
    pid = int((project / "sleeping.pid").read_text())
    _wait_until(lambda: not _runs(pid), seconds=10)


def _runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_round_runs_once_a_failure_keeps_what_came_before_and_r2_goes_on(
    project: Path, flows: Flows, prefect_home: str
) -> None:
    # A stage fails: earlier ones stay, later ones do not start, the log's end is shown.
    (project / "FAIL").write_text("evaluate@r1-ppo")
    failed = flows("run", "--round", "r1", PREFECT_HOME=prefect_home, HOME=str(project))
    assert failed.returncode == 1, failed.stderr
    assert "stub evaluate@r1-ppo was told to fail" in failed.stderr
    assert ".scratch/logs/evaluate@r1-ppo.log" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "promote@r1" not in ran(project)
    assert (project / "runs/r1/reward_model/made.txt").exists()
    before = ran(project)
    assert before[0] == "data"
    assert len(before) == len(set(before))

    # Mended, it goes on from there.
    (project / "FAIL").unlink()
    done = flows("run", "--round", "r1", PREFECT_HOME=prefect_home, HOME=str(project))
    assert done.returncode == 0, done.stderr
    assert "data" not in ran(project)[len(before) :]
    assert "evaluate@r1-ppo" in ran(project)[len(before) :]
    assert ran(project)[-1] == "promote@r1"
    assert "promoted r1-ppo" in done.stdout
    assert "fails" in done.stdout
    assert done.stderr == ""

    # The same again runs nothing.
    before = ran(project)
    again = flows("run", "--round", "r1", PREFECT_HOME=prefect_home, HOME=str(project))
    assert again.returncode == 0, again.stderr
    assert ran(project) == before
    assert "up to date" in again.stdout
    assert git(project, "tag") == "round/r1"
    assert len(git(project, "log", "--format=%s").splitlines()) == 2
    assert git(project, "status", "--porcelain") == ""


@pytest.mark.slow
def test_a_new_round_is_appended_and_starts_from_the_last(
    project: Path, flows: Flows, prefect_home: str
) -> None:
    for words in (("--round", "r1"), ("--set", "candidates.ppo.kl.coef=0.02")):
        result = flows("run", *words, PREFECT_HOME=prefect_home, HOME=str(project))
        assert result.returncode == 0, result.stderr
    assert "tag round/r2" in result.stdout
    assert config.load(project / "pipeline.yaml").candidates["r2-ppo"].kl.coef == 0.02  # type: ignore[union-attr]
    assert ran(project).count("data") == 1
    assert ran(project)[-1] == "promote@r2"
    assert "r2-ppo:" in (project / "pipeline.yaml").read_text()


def test_a_busy_checkout_is_refused_and_an_ended_flow_leaves_no_stage(
    project: Path, flows: Flows, prefect_home: str
) -> None:
    (project / "SLEEP").write_text("data")
    flow = subprocess.Popen(
        [sys.executable, "-m", "flows", "run"],
        cwd=project,
        env=child_environment(PREFECT_HOME=prefect_home, HOME=str(project)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_until((project / "sleeping.pid").exists)
        stage = ident(int((project / "sleeping.pid").read_text()))
        busy = flows("run")
        assert busy.returncode == 1
        assert f"busy: held by pid {flow.pid}" in busy.stderr
        os.kill(flow.pid, signal.SIGINT)
        _, said = flow.communicate(timeout=60)
        assert flow.returncode == 1
        assert said == "stopped; finished stages are kept, run again to go on\n"
        _wait_until(lambda: not alive(stage), 5)
    finally:
        if flow.poll() is None:
            os.killpg(flow.pid, signal.SIGKILL)
        flow.wait()
    assert ran(project) == ["data"]


# --- which round, and what must be right before it runs ---


def decide(project: Path, round: str = "r1", **changes: object) -> None:
    """A round that came to its gate."""
    path = project / f"runs/{round}/metrics/decision.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stub.decision(f"promote@{round}") | changes))


def git(project: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=project, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def chosen(project: Path, **wishes: object) -> str:
    with open_session(Request(**{"commit": "never", **wishes}), project) as session:  # type: ignore[arg-type]
        return session.round


def test_the_last_round_goes_on_until_it_is_decided_and_then_comes_one_more(project: Path) -> None:
    assert chosen(project) == "r1"
    decide(project)
    assert chosen(project) == "r2"
    assert chosen(project) == "r2"  # appended by an earlier tick, and not finished
    assert list(config.load(project / "pipeline.yaml").rounds) == ["r1", "r2"]


def test_wishes_for_a_round_that_is_there_must_be_what_it_is(project: Path) -> None:
    """A run that is resumed passes them again; another run may not change a round's settings by them."""
    decide(project)
    wish = {"candidates.ppo.kl.coef": 0.02}
    assert chosen(project, overrides=wish) == "r2"
    text = (project / "pipeline.yaml").read_text()
    assert chosen(project, overrides=json.dumps(wish)) == "r2"
    with pytest.raises(BadInput, match="r2 is there already"):
        chosen(project, overrides={"candidates.ppo.kl.coef": 0.03})
    assert (project / "pipeline.yaml").read_text() == text


def test_a_bad_wish_changes_nothing(project: Path) -> None:
    decide(project)
    text = (project / "pipeline.yaml").read_text()
    for wish in ({"candidates.ppo.kl.cof": 1}, '{"candidates.ppo.kl.coef": "much"}', "[1]", "{"):
        with pytest.raises(BadInput):
            chosen(project, overrides=wish)
    with pytest.raises(BadInput, match="commit=perhaps"):
        chosen(project, commit="perhaps")
    assert (project / "pipeline.yaml").read_text() == text
    assert not (project / "ran.txt").exists()


def test_no_round_follows_one_that_a_person_has_still_to_decide(project: Path) -> None:
    decide(project, status="awaiting", promoted=None)
    assert chosen(project) == "r1"
    with pytest.raises(BadInput, match="r1"):
        chosen(project, round="r2")
    decide(project, status="stopped", promoted=None)
    with pytest.raises(LoopStopped, match="stopped at r1"):
        chosen(project)
    with pytest.raises(LoopStopped, match="stopped at r1"):
        chosen(project, round="r2")
    assert chosen(project, round="r1") == "r1"  # a round by its name may run again
    assert list(config.load(project / "pipeline.yaml").rounds) == ["r1"]


def test_a_round_that_is_declared_waits_for_the_person_too(project: Path) -> None:
    append_round(project / "pipeline.yaml", "r2")
    decide(project, status="awaiting", promoted=None)
    assert chosen(project) == "r1"  # whose question it is
    with pytest.raises(BadInput, match="awaited on r1"):
        chosen(project, round="r2")
    decide(project, status="stopped", promoted=None)
    for wish in ({}, {"round": "r2"}, {"round": "r3"}):
        with pytest.raises(LoopStopped, match="stopped at r1"):
            chosen(project, **wish)
    assert list(config.load(project / "pipeline.yaml").rounds) == ["r1", "r2"]


@pytest.mark.parametrize("status", ["promoted", "stopped", "awaiting"])
def test_of_rounds_declared_ahead_none_starts_behind_one_that_a_person_decides(
    project: Path, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import round as flow

    append_round(project / "pipeline.yaml", "r2")
    ran: dict[str, list[str]] = {}

    def stand_in(session: Session, name: str, plan: list[Stage]) -> None:
        ran[name] = [stage.name for stage in plan]
        decide(
            project, name, **({} if status == "promoted" else {"status": status, "promoted": None})
        )

    concluded: list[str] = []
    monkeypatch.setattr(flow, "_run_stages", stand_in)
    monkeypatch.setattr(Session, "conclude", lambda _, name: concluded.append(name))
    with open_session(Request(commit="never"), project) as session:
        assert flow._run_rounds(session) is None
        assert concluded == [name for name in ran if status != "awaiting"]
        if status == "promoted":
            assert (session.round, session.rounds) == ("r2", ["r1", "r2"])
            assert "data" not in ran["r2"]
            assert ran["r2"][-1] == "promote@r2"
            return
        assert (session.round, session.rounds, session.status) == ("r1", ["r1"], status)
        assert list(ran) == ["r1"]
        assert "promote@r1" in session.stages
        assert "promote@r2" not in session.stages


def lines(project: Path, revision: str) -> list[str]:
    """The paths that a commit changes."""
    return git(project, "show", "--pretty=", "--name-only", f"{revision}^{{commit}}").split()


def locked(project: Path, revision: str) -> set[str]:
    """The rounds that have entries in a commit's dvc.lock."""
    text = git(project, "show", f"{revision}:dvc.lock")
    return set(re.findall(r"^  \w+@(r\d+)", text, re.M))


@pytest.mark.slow
def test_each_round_declared_ahead_is_committed_before_the_next_one_starts(
    project: Path, flows: Flows, prefect_home: str
) -> None:
    assert flows("round", "add", HOME=str(project)).returncode == 0
    done = flows("run", "--round", "r2", PREFECT_HOME=prefect_home, HOME=str(project))
    assert done.returncode == 0, done.stderr
    words = re.findall(
        r"^committed as \w+, tag (\S+)$|^(preferences@r2) +starts", done.stdout, re.M
    )
    assert ["".join(found) for found in words] == ["round/r1", "preferences@r2", "round/r2"]
    assert not [path for path in lines(project, "round/r1") if path.startswith("runs/r2/")]
    assert locked(project, "round/r1") == {"r1"}
    own = [path for path in lines(project, "round/r2") if path.startswith("runs/")]
    assert {"runs/r2/metrics/decision.json", "runs/r2/metrics/r2-ppo-evaluation.json"} < {*own}
    assert all(path.startswith("runs/r2/") for path in own)
    assert locked(project, "round/r2") == {"r1", "r2"}
    subjects = git(project, "log", "--reverse", "--format=%s").splitlines()[1:]
    assert [subject.split(":")[0] for subject in subjects] == ["Round r1", "Round r2"]
    assert git(project, "status", "--porcelain") == ""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("fails", 1), ("awaits", 3)])
def test_a_round_is_committed_though_the_next_one_is_not_decided(
    project: Path, flows: Flows, prefect_home: str, end: str, code: int
) -> None:
    assert flows("round", "add", HOME=str(project)).returncode == 0
    if end == "fails":
        (project / "FAIL").write_text("evaluate@r2-ppo")
    else:
        (project / "NOPASS").touch()
        path = project / "pipeline.yaml"
        before, keep, after = path.read_text().rpartition("on_fail: keep")
        assert keep
        path.write_text(f"{before}on_fail: ask{after}")
    result = flows("run", "--round", "r2", PREFECT_HOME=prefect_home, HOME=str(project))
    assert result.returncode == code, result.stderr
    assert re.search(r"^committed as \w+, tag round/r1$", result.stdout, re.M)
    assert git(project, "tag") == "round/r1"
    assert git(project, "log", "-1", "--format=%s").startswith("Round r1: ")
    assert not [path for path in lines(project, "HEAD") if path.startswith("runs/r2/")]
    assert locked(project, "HEAD") == {"r1"}
    if end == "awaits":
        assert "python -m flows decide r2 promote" in result.stdout


def run_by_hand(
    project: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str | None = None
) -> None:
    """r1 and r2 are declared; stages are stood in for, and a kill comes when a round's would start."""
    from flows import round as flow

    def stand_in(session: Session, name: str, plan: list[Stage]) -> None:
        if name == killed_at:
            raise KeyboardInterrupt
        if name == "r1":
            finished.start(project)
        finished.run(project, name, session.pipeline.rounds[name].from_)
        finished.dvc(project, "commit", "--force", *(stage.name for stage in plan))

    append_round(project / "pipeline.yaml", "r2")
    monkeypatch.setattr("flows.overview.log", lambda *_: None)
    monkeypatch.setattr(flow, "_run_stages", stand_in)


def test_a_kill_between_two_rounds_leaves_the_first_one_committed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import round as flow

    run_by_hand(project, monkeypatch, killed_at="r2")
    with open_session(Request(), project) as session, pytest.raises(KeyboardInterrupt):
        flow._run_rounds(session)
    assert git(project, "tag") == "round/r1"
    assert locked(project, "round/r1") == {"r1"}


def test_a_kill_between_decision_and_commit_is_made_good_in_true_words(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from flows import round as flow

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    run_by_hand(project, monkeypatch)
    with monkeypatch.context() as patch, open_session(Request(), project) as session:
        patch.setattr(Session, "conclude", killed)
        with pytest.raises(KeyboardInterrupt):
            flow._run_rounds(session)
    assert git(project, "tag") == ""
    capfd.readouterr()
    assert chosen(project, commit="always") == "r2"
    said = capfd.readouterr().out
    assert re.search(r"^r1 was decided earlier and is in git now: committed as \w+, tag", said)
    assert git(project, "tag") == "round/r1"
    assert locked(project, "round/r1") == {"r1"}


@pytest.mark.parametrize("commit", ["always", "able"])
def test_a_round_that_git_refuses_stops_no_later_one_and_is_committed_before_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, commit: Literal["always", "able"]
) -> None:
    from flows import round as flow

    hook = project / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\n! git diff --cached --name-only | grep -q runs/r1/\n")
    hook.chmod(0o755)
    run_by_hand(project, monkeypatch)
    with open_session(Request(commit=commit), project) as session:
        state = flow._run_rounds(session)
        words = "r2 is done, but not in git: r1 is committed first"
        if commit == "always":
            assert state is not None
            assert "r1 is done, but not in git: git commit failed" in str(state.message)
            assert words in str(state.message)
        else:
            assert state is None
            assert session.committed == words
    assert champion.status(project, "r2") == "promoted"
    assert git(project, "tag") == ""
    hook.unlink()
    assert chosen(project, commit="always") == "r3"
    assert git(project, "tag").split() == ["round/r1", "round/r2"]
    assert not [path for path in lines(project, "round/r1") if path.startswith("runs/r2/")]
    assert "runs/r2/metrics/decision.json" in lines(project, "round/r2")


@pytest.mark.parametrize("others", [0, 1])
def test_rounds_that_were_run_without_a_flow_are_concluded_first(
    project: Path, others: int
) -> None:
    finished.start(project)
    finished.run(project, "r1", "r0")
    if others:
        append_round("pipeline.yaml", "r2")
        finished.run(project, "r2", "r1")
    finished.dvc(project, "commit", "--force")
    declared = (project / "pipeline.yaml").read_text()
    assert chosen(project) == f"r{others + 2}"  # nothing is committed where that is turned off
    (project / "pipeline.yaml").write_text(declared)
    assert git(project, "tag") == ""
    assert chosen(project, commit="always") == f"r{others + 2}"
    names = ["r1", "r2"][: others + 1]
    assert git(project, "tag").split() == [f"round/{name}" for name in names]
    assert git(project, "show", "round/r1:pipeline.yaml").strip() == declared.strip()
    for name in names:
        record = json.loads(git(project, "show", f"round/{name}:runs/{name}/metrics/lineage.json"))
        assert record["round"] == name
    subjects = git(project, "log", "--reverse", "--format=%s").splitlines()[1:]
    assert [subject.split(":")[0] for subject in subjects] == [f"Round {name}" for name in names]


def test_a_result_that_dvc_has_not_recorded_is_not_concluded(project: Path) -> None:
    finished.start(project)
    finished.run(project, "r1", "r0")
    finished.dvc(project, "commit", "--force")
    decide(project, status="kept", promoted=None)
    assert chosen(project, commit="always") == "r2"
    assert git(project, "tag") == ""


def test_a_run_that_is_resumed_keeps_its_round(project: Path) -> None:
    decide(project)
    with open_session(Request(commit="never"), project, continues="r1") as session:
        assert session.round == "r1"
    deployments.note_run(project, "some-run", "r1")
    assert deployments.round_of_run(project, "some-run") == "r1"
    assert deployments.round_of_run(project, "another") is None
    deployments.forget_run(project, "some-run")
    assert deployments.round_of_run(project, "some-run") is None


def test_a_dirty_tree_is_refused_unless_told(project: Path) -> None:
    path = project / "pipeline.yaml"
    path.write_text(path.read_text().replace("parallel: 2", "parallel: 1"))
    with pytest.raises(BadInput, match=r"resources\.parallel"):
        chosen(project, commit="always")
    with open_session(Request(commit="able"), project) as session:
        assert "resources.parallel" in str(session.not_committed)
    with open_session(Request(allow_dirty=True), project) as session:
        assert session.not_committed is None
    path.write_text(path.read_text().replace("commit: true", "commit: false"))
    with open_session(Request(), project) as session:
        assert "lineage.commit" in str(session.not_committed)


def test_settings_edited_during_a_run_are_not_committed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.overview.log", lambda *_: None)
    path = project / "pipeline.yaml"
    declared = path.read_text()
    with open_session(Request(), project) as session:
        finished.start(project)
        finished.run(project, "r1", "r0")
        finished.dvc(project, "commit", "--force")
        path.write_text(declared.replace("parallel: 2", "parallel: 1"))
        with pytest.raises(StageFailed, match=r"r1 is done, but not in git: pipeline\.yaml"):
            session.conclude()
    assert git(project, "tag") == ""
    path.write_text(declared)
    with open_session(Request(round="r1"), project):
        assert git(project, "tag") == "round/r1"


def test_a_run_that_commits_if_it_can_says_why_it_could_not(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.overview.log", lambda *_: None)
    with open_session(Request(commit="able"), project) as session:
        finished.start(project)
        finished.run(project, "r1", "r0")
        finished.dvc(project, "commit", "--force")
        (project / "dvc.yaml").open("a").write("# edited\n")
        session.conclude()
        assert "r1 is done, but not in git: dvc.yaml" in session.committed
    assert git(project, "tag") == ""


def test_a_left_round_whose_settings_were_edited_is_made_anew_not_committed(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finished.start(project)
    finished.run(project, "r1", "r0")
    finished.dvc(project, "commit", "--force")
    path = project / "pipeline.yaml"
    path.write_text(re.sub(r"(  r1-ppo:\n(?:    .*\n)*?    steps:) \d+", r"\1 3", path.read_text()))
    git(project, "commit", "-qm", "edited", "pipeline.yaml")
    with open_session(Request(round="r1"), project) as session:
        assert "policy@r1-ppo" in [name for name, stage in session.stages.items() if stage.runs]
    assert git(project, "tag") == ""
    said = "".join(capfd.readouterr())
    assert "r1 is decided, but not in git" in said
    assert "policy@r1-ppo" in said


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"round": 3}, "round=3 is of type int"),
        ({"round": True}, "round=True"),
        ({"round": 3.0}, "round=3.0"),
        ({"template": 1}, "template=1"),
        ({"stage": ["data"]}, "stage=['data']"),
        (
            {"overrides": [1]},
            "overrides=[1] is of type list\n  rule: text or a mapping or nothing\n  mend: write {",
        ),
        (
            {"allow_dirty": "no"},
            "allow_dirty='no' is of type str\n  rule: a boolean\n  mend: write true or false",
        ),
        ({"force": 1}, "force=1"),
        ({"round": "r02"}, "without leading zeros"),
    ],
)
def test_a_parameter_of_another_type_is_refused(
    project: Path, wish: dict[str, object], words: str
) -> None:
    with pytest.raises(BadInput) as caught:
        chosen(project, **wish)
    assert words in str(caught.value)
    assert "mend:" in str(caught.value)


def test_a_stage_by_itself_reads_what_is_up_to_date(project: Path) -> None:
    with pytest.raises(BadInput, match="use policy@r1-ppo"):
        chosen(project, stage="policy@r1-pppo")
    with pytest.raises(BadInput, match="data, sft would run before preferences@r1"):
        chosen(project, stage="preferences@r1")
    with open_session(Request(stage="data"), project) as session:
        assert list(session.stages) == ["data"]
        assert "no round" in str(session.not_committed)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('cron: "0 3 * * *"', 'cron: "0 25 * * *"', "schedules\\[0\\]: cron=0 25"),
        ('cron: "0 3 * * *"', "cron: nightly", "cron=nightly"),
        ('cron: "0 3 * * *"', "cron: 3", "cron=3"),
        ("timezone: UTC", "timezone: Atlantis/Poseidonis", "timezone=Atlantis"),
        ("deployments:", "deploys:", "no deployments"),
    ],
)
def test_a_schedule_that_is_none_is_refused_before_it_is_deployed(
    project: Path, old: str, new: str, words: str
) -> None:
    deployments.check_declared(project)
    path = project / "prefect.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BadInput, match=words):
        deployments.check_declared(project)


def test_only_runs_whose_process_is_gone_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["sleep", "60"])
    was = ident(gone.pid)
    notes = {
        "alive": {"process": ident(os.getpid())},
        "dead": {"process": was},
        "elsewhere": {"process": was, "host": "another"},
    }
    folder = tmp_path / deployments.RUNS
    folder.mkdir(parents=True)
    for run, note in notes.items():
        (folder / f"{run}.json").write_text(json.dumps(note))
    (folder / "broken.json").write_text("{")
    states = dict.fromkeys([*notes, "broken", "without"], "RUNNING") | {"taken": "PENDING"}
    ended: list[str] = []

    def ask(url: str, path: str, body: object = None, method: str = "POST") -> object:
        if path.endswith("/set_state"):
            ended.append(path.split("/")[2])
            return None
        return [{"id": run, "name": run, "state_type": state} for run, state in states.items()]

    monkeypatch.setattr(deployments, "ask", ask)
    gone.kill()
    gone.wait()
    deployments.end_lost_runs("url", tmp_path)
    assert ended == [
        "dead"
    ]  # nobody knows of a worker here before this one: "taken" may be another's
    worker = tmp_path / deployments.WORKER
    worker.write_text(json.dumps({"process": was}))
    ended.clear()
    deployments.end_lost_runs("url", tmp_path)
    assert ended == ["dead", "taken"]
    deployments.note_worker(tmp_path, os.getpid())
    ended.clear()
    deployments.end_lost_runs("url", tmp_path)
    assert ended == ["dead"]


def test_a_person_is_waited_for_with_a_code_of_its_own(project: Path, flows: Flows) -> None:
    """Nothing to run, so that no server is needed: the round is awaiting, and stays uncommitted."""
    path = project / "pipeline.yaml"
    path.write_text(path.read_text().replace("on_fail: keep", "on_fail: ask"))
    git(project, "commit", "-qam", "Ask")
    (project / "NOPASS").touch()
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "-q"],
        cwd=project,
        env=child_environment(),
        check=True,
        capture_output=True,
    )
    result = flows("run", PREFECT_HOME=str(project), HOME=str(project))
    assert result.returncode == 3, result.stderr
    assert "python -m flows decide r1 promote --candidate" in result.stdout
    assert git(project, "tag") == ""
    decided = flows("decide", "r1", "keep", "--because", "both drift", HOME=str(project))
    assert decided.returncode == 0, decided.stderr
    assert git(project, "tag") == "round/r1"
    assert "r1 is not committed" not in flows("run", "--round", "r1", HOME=str(project)).stdout


def _wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
