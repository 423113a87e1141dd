"""Deployed rounds: a real server and worker, really killed. Stub stages. `make test-deployed`; minutes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import child_environment

from flows import deployments
from rlhf import champion, config
from rlhf.lifeline import alive, ident

ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED", "PAUSED"}


class Deployed:
    """A project folder with its server and its worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""

    def environment(self) -> dict[str, str]:
        own = {"HOME": str(self.folder), "PREFECT_HOME": str(self.folder / ".scratch/prefect")}
        inherited = child_environment(**own, ROUNDHOUSE_GRACE="5", PYTHONUNBUFFERED="1")
        return {k: v for k, v in inherited.items() if k != "PREFECT_API_URL"}

    def flows(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flows", *words],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def start(self, name: str, ready: str) -> str:
        """Start `python -m flows server` or `worker`; returns what it said until it was ready."""
        log = self.log(name)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows", name],
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes[name] = process
        wait_until(lambda: ready in log.read_text() or process.poll() is not None, 300)
        assert process.poll() is None, log.read_text()
        return log.read_text()

    def start_worker(self) -> str:
        return self.start("worker", "ready;")

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.out"

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        process.wait(60)

    def family(self) -> list[psutil.Process]:
        """The worker's processes: Prefect's worker, flows, their DVC, their stages."""
        return psutil.Process(self.processes["worker"].pid).children(recursive=True)

    def one(self, words: str) -> psutil.Process:
        found = [p for p in self.family() if words in " ".join(p.cmdline())]
        assert len(found) == 1, found
        return found[0]

    # --- runs ---

    def ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        return deployments.ask(self.url, path, body, method)

    def run(self, flow: str = "rlhf-round", **parameters: Any) -> str:
        found = self.ask(f"/deployments/name/{flow}/default", method="GET")
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return str(self.ask(f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def state(self, run: str) -> dict[str, Any]:
        state: dict[str, Any] = self.ask(f"/flow_runs/{run}", method="GET")["state"]
        return state

    def end_of(self, run: str, seconds: float = 300) -> dict[str, Any]:
        wait_until(lambda: self.state(run)["type"] in ENDED, seconds)
        return self.state(run)

    def answer(self, run: str, **values: Any) -> dict[str, Any]:
        """Resume a suspended run; the server's verdict on the form."""
        before = self.state(run)["id"]
        found: dict[str, Any] = self.ask(f"/flow_runs/{run}/resume", {"run_input": values})
        if found["status"] == "ACCEPT":
            wait_until(lambda: self.state(run)["id"] != before)
            self.end_of(run)
        return found

    # --- the project ---

    def tell(self, order: str, stage: str) -> None:
        (self.folder / order).write_text(stage)

    def untell(self) -> None:
        for order in ("SLEEP", "STUBBORN", "NOPASS", "sleeping.pid"):
            (self.folder / order).unlink(missing_ok=True)

    def sleeping(self) -> str:
        """`pid:start` of the stage that was told to take long."""
        path = self.folder / "sleeping.pid"
        wait_until(path.exists, 300)
        wait_until(lambda: bool(path.read_text()))
        return ident(int(path.read_text()))

    def ran(self) -> list[str]:
        return (self.folder / "ran.txt").read_text().split()

    def next_round(self) -> str:
        return f"r{len(config.load(self.folder / 'pipeline.yaml').rounds) + 1}"

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def served(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed") / "a project"
    shutil.copytree(template, folder)
    path = folder / "pipeline.yaml"
    text = path.read_text().replace("on_fail: keep", "on_fail: ask")
    path.write_text(
        re.sub(r"^  r1-dpo:\n(?:    .*\n)+", "", text, flags=re.M)
    )  # stages cost seconds
    subprocess.run(["git", "commit", "-qam", "Ask"], cwd=folder, check=True)
    place = Deployed(folder)
    try:
        said = place.start("server", "PREFECT_API_URL=")
        place.url = said.split("PREFECT_API_URL=")[1].split()[0]
        place.start_worker()
        first = place.run(round="r1")
        assert place.end_of(first)["type"] == "COMPLETED", place.state(first)
        yield place
    finally:
        for name in list(place.processes):
            place.stop(name)


@pytest.fixture
def place(served: Deployed) -> Iterator[Deployed]:
    if "worker" not in served.processes:
        served.start_worker()
    yield served
    served.untell()


pytestmark = pytest.mark.deployed


# --- what is said ---


def test_a_round_is_committed_and_named(place: Deployed) -> None:
    name = place.next_round()
    run = place.run(overrides='{"candidates.ppo.kl.coef": 0.02}')
    state = place.end_of(run)
    assert state["type"] == "COMPLETED", state["message"]
    assert f"tag round/{name}" in state["message"]
    assert place.ask(f"/flow_runs/{run}", method="GET")["name"] == f"round-{name}"
    assert place.git("log", "-1", "--format=%s").startswith(f"Round {name}: promoted {name}-ppo")
    assert place.git("status", "--porcelain") == ""
    declared = config.load(place.folder / "pipeline.yaml").candidates
    assert declared[f"{name}-ppo"].kl.coef == 0.02  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"round": "r-2"}, "'r-2' is not a round"),
        ({"overrides": {"candidates.ppo.kl.cof": 0.02}}, "kl.cof"),
        ({"overrides": '{"candidates.ppo.kl.coef": -1}'}, "kl.coef=-1"),
        ({"overrides": "{not json"}, "JSON"),
        ({"template": "r77"}, "r77"),
    ],
)
def test_a_bad_wish_fails_with_our_message(
    place: Deployed, parameters: dict[str, Any], words: str
) -> None:
    before, rounds = place.ran(), place.next_round()
    state = place.end_of(place.run(**parameters))
    assert state["type"] == "FAILED"
    assert words in state["message"]
    assert "Traceback" not in state["message"]
    assert "Traceback" not in place.log("worker").read_text()
    assert place.ran() == before
    assert place.next_round() == rounds


def test_a_stage_by_itself(place: Deployed) -> None:
    before = place.git("rev-parse", "HEAD")
    done = place.end_of(place.run("rlhf-stage", stage="policy@r1-ppo"))
    assert done["message"] == "policy@r1-ppo is up to date"
    ran = place.ran()
    done = place.end_of(place.run("rlhf-stage", stage="policy@r1-ppo", force=True))
    assert done["type"] == "COMPLETED"
    assert place.ran()[len(ran) :] == ["policy@r1-ppo"]
    assert place.git("status", "--porcelain") == ""
    assert place.git("rev-parse", "HEAD") == before
    wrong = place.end_of(place.run("rlhf-stage", stage="policy@r1-pppo"))
    assert wrong["type"] == "FAILED"
    assert "use policy@r1-ppo" in wrong["message"]


def test_a_second_worker_of_a_folder_is_refused(place: Deployed) -> None:
    second = place.flows("worker")
    assert second.returncode == 1
    assert "a worker of this folder runs already" in second.stderr


def test_the_automation_is_made_once(place: Deployed) -> None:
    again = place.flows("automations")
    assert again.returncode == 0, again.stderr
    assert "is there already" in again.stdout
    found = place.ask("/automations/filter", {})
    assert [entry["name"] for entry in found] == [deployments.AUTOMATION]
    place.ask(f"/automations/{found[0]['id']}", {"enabled": False}, method="PATCH")
    assert "is made" in place.flows("automations").stdout
    assert [entry["enabled"] for entry in place.ask("/automations/filter", {})] == [True]


# --- kills ---


def test_kill_of_the_flow(place: Deployed) -> None:
    """No orphan, Crashed, its place goes to the run that waits, and that one goes on."""
    name = place.next_round()
    place.tell("SLEEP", f"policy@{name}-ppo")
    run = place.run()
    stage = place.sleeping()
    waiting = place.run()
    wait_until(lambda: place.state(waiting)["name"] == "AwaitingConcurrencySlot")
    victims = [ident(p.pid) for p in place.family() if "prefect.engine" in " ".join(p.cmdline())]
    assert len(victims) == 1
    place.untell()
    os.kill(int(victims[0].split(":")[0]), signal.SIGKILL)
    wait_until(lambda: not alive(stage), 5)
    wait_until(lambda: not [p for p in place.family() if "dvcrun" in " ".join(p.cmdline())], 10)
    assert place.end_of(run)["type"] == "CRASHED"
    before = place.ran()
    assert place.end_of(waiting)["type"] == "COMPLETED", place.state(waiting)
    assert place.ran()[len(before) :][0] == f"policy@{name}-ppo"
    assert champion.status(place.folder, name) == "promoted"
    assert place.next_round() == f"r{int(name[1:]) + 1}"


@pytest.mark.parametrize("which", ["flows", "prefect"])
def test_kill_of_the_worker(place: Deployed, which: str) -> None:
    """No orphan; a new worker frees the place at once, and the next run goes on."""
    name = place.next_round()
    place.tell("SLEEP", f"reward_model@{name}")
    run = place.run()
    stage = place.sleeping()
    family = [ident(process.pid) for process in place.family()]
    assert len(family) >= 4
    place.untell()
    victim = place.one("worker start") if which == "prefect" else None
    os.kill(victim.pid if victim else place.processes["worker"].pid, signal.SIGKILL)
    place.processes.pop("worker").wait(30)
    wait_until(lambda: not alive(stage), 10)
    wait_until(lambda: not any(alive(process) for process in family), 30)
    place.start_worker()
    assert place.state(run)["type"] in ("CRASHED", "FAILED")
    before = place.ran()
    following = place.run()
    state = place.end_of(following)
    assert state["type"] == "COMPLETED", state["message"]
    assert f"round/{name}" in place.git("tag")
    assert f"reward_model@{name}" in place.ran()[len(before) :]
    assert f"preferences@{name}" not in place.ran()[len(before) :]


def test_kill_of_dvc(place: Deployed) -> None:
    name = place.next_round()
    place.tell("SLEEP", f"preferences@{name}")
    run = place.run()
    stage = place.sleeping()
    place.untell()
    os.kill(place.one(f"--single-item preferences@{name}").pid, signal.SIGKILL)
    wait_until(lambda: not alive(stage), 5)
    state = place.end_of(run)
    assert state["type"] == "FAILED"
    assert f"preferences@{name} was killed (signal 9)" in state["message"]
    assert place.end_of(place.run())["type"] == "COMPLETED"


def test_a_cancelled_run_lets_its_stage_save(place: Deployed) -> None:
    name = place.next_round()
    place.tell("SLEEP", f"preferences@{name}")
    run = place.run()
    stage = place.sleeping()
    place.untell()
    state = {"type": "CANCELLING", "name": "Cancelling"}
    place.ask(f"/flow_runs/{run}/set_state", {"state": state})
    wait_until(lambda: not alive(stage), 30)
    assert place.end_of(run)["type"] == "CANCELLED"
    log = place.folder / f".scratch/logs/preferences@{name}.log"
    assert "stopped after step 7" in log.read_text()
    assert place.end_of(place.run())["type"] == "COMPLETED"


def test_a_stopped_worker_leaves_nothing_behind(place: Deployed) -> None:
    name = place.next_round()
    place.tell("SLEEP", f"preferences@{name}")
    run = place.run()
    place.sleeping()
    family = [ident(process.pid) for process in place.family()]
    place.untell()
    place.stop("worker")
    assert not [process for process in family if alive(process)]
    assert place.state(run)["type"] in ("CRASHED", "FAILED")
    place.start_worker()
    assert place.end_of(place.run())["type"] == "COMPLETED"


def test_without_a_new_worker_the_automation_ends_a_lost_run(place: Deployed) -> None:
    name = place.next_round()
    place.tell("SLEEP", f"preferences@{name}")
    run = place.run()
    place.sleeping()
    wait_until(lambda: heartbeats(place, run) > 0, 60)
    family = place.family()
    place.untell()
    for process in [psutil.Process(place.processes["worker"].pid), *family]:
        process.kill()
    place.processes.pop("worker").wait(30)
    state = place.end_of(run, 2 * 3 * deployments.HEARTBEAT_SECONDS)
    assert state["type"] == "CRASHED"
    assert "no heartbeat" in state["message"]
    place.start_worker()
    assert place.end_of(place.run())["type"] == "COMPLETED"


def heartbeats(place: Deployed, run: str) -> int:
    body = {
        "filter": {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run}"]},
        }
    }
    return int(place.ask("/events/filter", body)["total"])


# --- a person's word ---


def test_a_person_answers_the_form(place: Deployed) -> None:
    """Refused by the form; refused by us, and asked again with the reason; then taken, once."""
    name = place.next_round()
    place.tell("NOPASS", "")
    run = place.run()
    assert place.end_of(run)["name"] == "Suspended"
    assert place.ask(f"/flow_runs/{run}", method="GET")["name"] == f"round-{name}"
    wait_until(lambda: not [p for p in place.family() if "engine" in " ".join(p.cmdline())])
    tick = place.end_of(place.run())
    assert tick["message"] == f"{name} awaits a person's decision"
    assert place.answer(run, choice="perhaps", comment="x")["status"] == "REJECT"
    assert place.answer(run, choice="keep")["status"] == "REJECT"
    place.answer(run, choice="promote", candidate=f"{name}-pp", comment="x")
    assert place.state(run)["name"] == "Suspended"
    keyset = place.state(run)["state_details"]["run_input_keyset"]
    asked = place.ask(f"/flow_runs/{run}/input/{keyset['description']}", method="GET")
    assert f"{name}-pp was not judged" in asked
    assert f"--candidate {name}-ppo" in asked
    before = place.ran()
    place.answer(run, choice="promote", candidate=f"{name}-ppo", comment="better", by="Ann")
    state = place.state(run)
    assert state["type"] == "COMPLETED", state["message"]
    assert place.ran()[len(before) :] == [f"promote@{name}"]
    decided = config.load(place.folder / "pipeline.yaml").rounds[name].decision
    assert decided is not None
    assert (decided.by, decided.because) == ("Ann", "better")
    assert place.git("log", "-1", "--format=%s") == f"Round {name}: promoted {name}-ppo: better"
    assert place.git("status", "--porcelain") == ""
    # Others may be there: of runs that an earlier test has left without a process.
    assert run not in {path.stem for path in (place.folder / deployments.RUNS).iterdir()}


def test_a_decision_elsewhere_resumes_the_run(place: Deployed) -> None:
    name = place.next_round()
    place.tell("NOPASS", "")
    run = place.run()
    assert place.end_of(run)["name"] == "Suspended"
    said = place.flows("decide", name, "keep", "--because", "both drift")
    assert said.returncode == 0, said.stderr
    wait_until(lambda: place.state(run)["type"] == "COMPLETED", 200)
    assert place.git("log", "-1", "--format=%s") == f"Round {name}: promoted nothing: both drift"


def test_a_stopped_loop_appends_nothing_until_a_person_decides(place: Deployed) -> None:
    name = place.next_round()
    place.tell("NOPASS", "")
    run = place.run()
    assert place.end_of(run)["name"] == "Suspended"
    place.answer(run, choice="stop", comment="enough")
    assert place.state(run)["type"] == "COMPLETED"
    place.untell()
    tick = place.end_of(place.run())
    assert tick["type"] == "COMPLETED"
    assert f"stopped at {name}" in tick["message"]
    explicit = place.end_of(place.run(round=place.next_round()))
    assert explicit["type"] == "FAILED" or "stopped" in explicit["message"]
    assert list(config.load(place.folder / "pipeline.yaml").rounds)[-1] == name
    assert place.flows("decide", name, "keep", "--because", "go on").returncode == 0
    assert place.end_of(place.run())["type"] == "COMPLETED"
    assert list(config.load(place.folder / "pipeline.yaml").rounds)[-1] != name


def test_a_run_of_rounds_declared_ahead_asks_about_the_first(place: Deployed) -> None:
    """The answer concludes the round that was asked about; the next run takes the other."""
    name = place.next_round()
    for _ in range(2):
        assert place.flows("round", "add").returncode == 0
    other = list(config.load(place.folder / "pipeline.yaml").rounds)[-1]
    place.tell("NOPASS", "")
    run = place.run(round=other)
    assert place.end_of(run)["name"] == "Suspended"
    place.answer(run, choice="keep", comment="both drift")
    assert place.state(run)["type"] == "COMPLETED"
    assert place.git("tag", "--list", f"round/{name}") == f"round/{name}"
    assert f"promote@{other}" not in place.ran()
    place.untell()
    assert place.end_of(place.run())["type"] == "COMPLETED"
    assert f"promote@{other}" in place.ran()
