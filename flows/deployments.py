"""What a Prefect server is told and asked about deployed rounds, over its REST interface. No import of Prefect.

A run whose process was killed stays Running on the server and keeps its place in the queue. Two things
end it: an automation on the server, when no heartbeat comes any more, and a worker that starts and finds
that the process a run has noted under `.scratch/runs` is gone.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.errors import BadInput, StageFailed
from rlhf.lifeline import alive, ident
from rlhf.progress import write_json

FLOWS = ("rlhf-round", "rlhf-stage")
RUNS = Path(".scratch/runs")
WORKER = Path(".scratch/worker.json")
AUTOMATION = "roundhouse: no heartbeat"
HEARTBEAT_SECONDS = 30  # Prefect's least; environment.py tells it to the flows
_SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS
_TRIES = 5  # a server on SQLite answers 503 when it is busy


# --- the note that a flow leaves ---


def note_run(folder: Path, run: str, round: str | None = None) -> None:
    """Note this process as the one that works on a run, and the round it works on."""
    path = folder / RUNS / f"{run}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    write_json(path, {"process": ident(os.getpid()), "host": host, "round": round})


def round_of_run(folder: Path, run: str) -> str | None:
    """The round that an earlier process of the same run worked on."""
    return _note(folder, run).get("round")


def forget_run(folder: Path, run: str) -> None:
    """The run has ended."""
    (folder / RUNS / f"{run}.json").unlink(missing_ok=True)


def _note(folder: Path, run: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / RUNS / f"{run}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# --- the worker ---


def worker_of(folder: Path) -> tuple[str | None, bool]:
    """The process that last was this folder's worker, as `pid:start`, and whether it runs."""
    try:
        owner = str(json.loads((folder / WORKER).read_text(encoding="utf-8"))["process"])
        return owner, alive(owner)
    except (OSError, ValueError, KeyError, TypeError):
        return None, False


def note_worker(folder: Path, pid: int) -> None:
    """Note this folder's worker."""
    path = folder / WORKER
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"process": ident(pid)})


def end_lost_runs(url: str, folder: Path) -> list[str]:
    """Set runs whose process is gone to Crashed, so that their place is free; returns their names."""
    predecessor, runs = worker_of(folder)
    lost = []
    for run in _runs(url, ["RUNNING", "CANCELLING", "PENDING"]):
        note = _note(folder, run["id"])
        if note.get("host", socket.gethostname()) != socket.gethostname():
            continue  # the automation sees to it
        if "process" in note:
            gone = not alive(note["process"])
        else:  # it had not begun; did the worker that took it end, with no other in its place?
            gone = run["state_type"] == "PENDING" and predecessor is not None and not runs
        if gone:
            state = {
                "type": "CRASHED",
                "name": "Crashed",
                "message": "its process is gone; run it again and it goes on from what is finished",
            }
            ask(url, f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
            lost.append(str(run["name"]))
    return lost


def _runs(url: str, types: list[str], name: str | None = None) -> Iterator[dict[str, Any]]:
    wanted: dict[str, Any] = {"state": {"type": {"any_": types}}}
    if name is not None:
        wanted["name"] = {"any_": [name]}
    body = {"flows": {"name": {"any_": list(FLOWS)}}, "flow_runs": wanted}
    yield from ask(url, "/flow_runs/filter", body)


# --- a person's answer ---


def suspended_runs(url: str, round: str) -> list[str]:
    """Ids of the runs that wait for a person's word on a round."""
    found = _runs(url, ["PAUSED"], f"round-{round}")
    return [str(run["id"]) for run in found if run["state"]["name"] == "Suspended"]


def resume_decided(folder: str | Path, round: str, url: str | None = None) -> bool:
    """Let runs go on that wait for a person's word on a round, once pipeline.yaml has it.

    For who decides outside Prefect's pages. Best effort: False if there is no server or no such run.
    """
    from flows import server
    from rlhf import config

    url = url or os.environ.get("PREFECT_API_URL") or server.running_url(folder)
    declared = config.load(Path(folder) / "pipeline.yaml").rounds[round].decision
    if not url or declared is None:
        return False
    answer = {
        "choice": declared.choice,
        "candidate": declared.candidate,
        "comment": declared.because,
        "by": declared.by,
    }
    try:
        waiting = suspended_runs(url, round)
        for run in waiting:
            ask(url, f"/flow_runs/{run}/resume", {"run_input": answer})
    except StageFailed:
        return False
    return bool(waiting)


# --- the automation ---


def ensure_automation(url: str) -> bool:
    """Have the server end runs whose heartbeat stopped; False if it does so already."""
    body = _automation()
    found = ask(url, "/automations/filter", {"automations": {"name": {"any_": [AUTOMATION]}}})
    same = [entry for entry in found if _includes(entry, body)]
    for entry in found:
        if entry not in same[:1]:
            ask(url, f"/automations/{entry['id']}", method="DELETE")
    if not same:
        ask(url, "/automations/", body)
    return not same


def _automation() -> dict[str, Any]:
    return {
        "name": AUTOMATION,
        "description": f"A run that says nothing for {_SILENCE_SECONDS} s has lost its process. "
        "Made by `python -m flows automations`.",
        "enabled": True,
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "for_each": ["prefect.resource.id"],
            "after": ["prefect.flow-run.heartbeat"],
            "expect": ["prefect.flow-run.*"],  # another heartbeat, or any other state
            "threshold": 1,
            "within": _SILENCE_SECONDS,
        },
        "actions": [
            {
                "type": "change-flow-run-state",
                "state": "CRASHED",
                "message": f"no heartbeat for {_SILENCE_SECONDS} s: its process is gone, or its host slept",
            }
        ],
    }


def _includes(found: Any, wanted: Any) -> bool:
    """Whether the server has what is wanted; it adds fields, and may reorder lists."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            key in found and _includes(found[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(any(_includes(other, item) for other in found) for item in wanted)
        )
    return bool(found == wanted) or found == [wanted]


# --- prefect.yaml ---


def check_declared(folder: str | Path = ".") -> None:
    """`prefect.yaml` before it is deployed: schedules that are none are told here, not by a traceback."""
    from rlhf import config

    path = Path(folder) / "prefect.yaml"
    if not path.is_file():
        raise BadInput(
            "not there",
            where=str(path),
            rule="prefect.yaml declares the deployments",
            mend="git checkout prefect.yaml",
        )
    declared = config.read_yaml(path).get("deployments")
    if not isinstance(declared, list) or not declared:
        raise BadInput(
            "no deployments", where=str(path), rule="a list", mend="git checkout prefect.yaml"
        )
    for number, entry in enumerate(declared):
        if not isinstance(entry, dict):
            raise BadInput(
                "not a mapping",
                where=f"{path} deployments[{number}]",
                mend="git checkout prefect.yaml",
            )
        for i, schedule in enumerate(entry.get("schedules") or []):
            _check_schedule(schedule, f"{path} deployments[{number}].schedules[{i}]")


def _check_schedule(schedule: dict[str, Any], where: str) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    if "cron" not in schedule:
        return
    cron, zone = schedule["cron"], schedule.get("timezone")
    try:
        CronSchedule(cron=cron, timezone=zone)
    except ValueError as error:
        about = f"timezone={zone}" if "timezone" in str(error).lower() else f"cron={cron}"
        raise BadInput(
            about,
            where=where,
            rule="cron has five fields: minute, hour, day of month, month, day of week; "
            "timezone is a name like Europe/Berlin",
            mend='like cron: "0 3 * * *" with timezone: UTC',
        ) from None


# --- REST ---


def ask(url: str, path: str, body: Any = None, method: str = "POST") -> Any:
    """One request to the server's API; tries again while it is busy."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if os.environ.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {os.environ['PREFECT_API_KEY']}"
    last = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(attempt)
        request = urllib.request.Request(url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            last = f"{error.code} {error.read().decode(errors='replace')[:300]}"
            if error.code < 500:
                break
        except (urllib.error.URLError, OSError) as error:
            last = str(error)
    raise StageFailed(f"Prefect's server at {url} did not take {method} {path}: {last}")
