"""Many rounds while processes are killed at random, against the same rounds left alone.

    python -m benchmarks.soak                 10 rounds, a kill about every 20 s, table into docs/recovery.md
    python -m benchmarks.soak --rounds 3      fewer, nothing written
    python -m benchmarks.soak --seed 1        other moments and victims, nothing written

Two projects under .studies/soak/, real git repositories on the minimal world, at the same time: in one every round is
run by `python -m flows run`, in the other too, but again and again the flow, its DVC or the stage at work is killed
with SIGKILL and the round is run anew until it is done. Then every hash in both dvc.lock must be the same, no
process may be left over, every round must be committed and tagged once, and MLflow may hold no point twice. A study
that was stopped goes on where it stopped. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import workspace
from rlhf import artifacts

STUDY = workspace.ROOT / ".studies" / "soak"
PAGE = workspace.ROOT / "docs" / "recovery.md"
SECONDS_TO_END = 60.0  # what is left of a killed run has to be gone by then
_BEGIN, _END = "<!-- benchmarks.soak: begin -->\n", "<!-- benchmarks.soak: end -->\n"


def project(folder: Path) -> Path:
    """A git project on the minimal world, committed; kept if it is there."""
    if (folder / ".git").is_dir():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    workspace.run(folder, "git", "init", "--quiet", "--initial-branch", "main")
    for name, value in {"name": "Soak", "email": "soak@localhost"}.items():
        workspace.run(folder, "git", "config", f"user.{name}", value)
    workspace.run(folder, "dvc", "init", "--quiet")
    workspace.run(folder, "dvc", "config", "core.analytics", "false")
    workspace.create(folder, one_candidate)
    for name in (".gitignore", ".dvcignore"):
        (folder / name).write_text((workspace.ROOT / name).read_text(encoding="utf-8"))
    workspace.run(folder, "git", "add", "--all")
    workspace.run(folder, "git", "commit", "--quiet", "--message", "A project on the minimal world")
    return folder


def one_candidate(pipeline: dict[str, Any]) -> None:
    """The minimal world with the candidate that has most to remember, and more steps to be killed in."""
    workspace.minimal(pipeline)
    ppo = pipeline["candidates"]["r1-ppo"]
    pipeline["candidates"] = {"r1-ppo": ppo | {"steps": 18, "checkpoint_every": 6}}
    pipeline["resources"]["checkpoints"] |= {"every_steps": 2}


def done(folder: Path, name: str) -> bool:
    """Whether the round is decided, committed and tagged."""
    tags = workspace.run(folder, "git", "tag", "--list", f"round/{name}").split()
    return (folder / f"runs/{name}/metrics/decision.json").is_file() and bool(tags)


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    log = folder.parent / f"{folder.name}-{name}.log"
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "flows", "run", "--round", name],
            cwd=folder,
            env=workspace.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def undisturbed(folder: Path, rounds: list[str]) -> None:
    for name in rounds:
        if not done(folder, name):
            began = time.monotonic()
            code = start(folder, name).wait()
            if code:
                raise SystemExit(f"{name} failed; see {folder.parent}/{folder.name}-{name}.log")
            note(folder, {"round": name, "seconds": time.monotonic() - began})


def disturbed(folder: Path, rounds: list[str], every: float, chance: random.Random) -> None:
    for name in rounds:
        while not done(folder, name):
            process = start(folder, name)
            family = {process.pid: psutil.Process(process.pid)}
            began = time.monotonic()
            event: dict[str, Any] = {"round": name, "victim": None}
            wait = every * chance.uniform(0.25, 1.75)
            while process.poll() is None and time.monotonic() - began < wait:
                family.update(below(process.pid))
                time.sleep(0.1)
            if process.poll() is None:
                family.update(below(process.pid))
                event |= kill(process.pid, chance)
            code = process.wait()
            event |= {"code": code, "seconds": time.monotonic() - began}
            event["left_over"] = left_over(list(family.values()))
            event["continued"] = continued(folder, since=time.time() - (time.monotonic() - began))
            note(folder, event)
            print(json.dumps(event), flush=True)
            if event["victim"] is None and code:
                raise SystemExit(
                    f"{name} failed by itself; see {folder.parent}/{folder.name}-{name}.log"
                )


def below(pid: int) -> dict[int, psutil.Process]:
    try:
        return {child.pid: child for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return {}


def kill(pid: int, chance: random.Random) -> dict[str, Any]:
    """SIGKILL to the flow, to a DVC under it or to a stage at work, each as likely as the others."""
    found: dict[str, list[tuple[psutil.Process, str]]] = {"flow": [(psutil.Process(pid), "")]}
    for child in below(pid).values():
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        task = next((w for w in words if w.startswith("tasks.")), None)
        if "flows.dvcrun" in words:
            found.setdefault("dvc", []).append((child, words[-1]))
        elif task:
            found.setdefault("stage", []).append((child, " ".join([task, *words[-1:]])))
    victim = chance.choice(sorted(found))
    process, what = chance.choice(found[victim])
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return {"victim": None}
    return {"victim": victim, "what": what}


def left_over(family: list[psutil.Process]) -> list[str]:
    """What of a run outlives it: an empty list as it should be."""
    end = time.monotonic() + SECONDS_TO_END
    alive = family
    while alive and time.monotonic() < end:
        time.sleep(0.2)
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return [" ".join(process.cmdline()) for process in alive]


def continued(folder: Path, since: float) -> dict[str, int]:
    """Stages that went on from a checkpoint, with its step."""
    found = {}
    for log in (folder / ".scratch/logs").glob("*@*.log"):
        if log.stat().st_mtime >= since:
            match = re.search(r"continues after step (\d+)", log.read_text(errors="replace"))
            if match:
                found[log.stem] = int(match[1])
    return found


def note(folder: Path, event: dict[str, Any]) -> None:
    with folder.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def notes(folder: Path) -> list[dict[str, Any]]:
    path = folder.with_suffix(".jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# --- what is compared ---


def outputs(folder: Path) -> dict[str, str]:
    """Every output's hash in dvc.lock."""
    stages = yaml.safe_load((folder / "dvc.lock").read_text())["stages"]
    return {out["path"]: out["md5"] for stage in stages.values() for out in stage["outs"]}


def inputs(folder: Path) -> dict[str, str]:
    """Every dependency's hash in dvc.lock, by stage."""
    stages = yaml.safe_load((folder / "dvc.lock").read_text())["stages"]
    return {
        f"{name} {dep['path']}": dep["md5"]
        for name, stage in stages.items()
        for dep in stage.get("deps", [])
    }


def doubled_points(folder: Path) -> int:
    """Points of a curve that MLflow holds more than once in runs that count."""
    with sqlite3.connect(folder / "mlflow.db") as database:
        query = (
            "select count(*) from (select 1 from metrics m join runs r on r.run_uuid = m.run_uuid "
            "where r.lifecycle_stage = 'active' group by m.run_uuid, m.key, m.step having count(*) > 1)"
        )
        return int(database.execute(query).fetchone()[0])


def unfinished_runs(folder: Path) -> list[str]:
    """Runs of MLflow that count and that are not FINISHED."""
    with sqlite3.connect(folder / "mlflow.db") as database:
        query = "select name from runs where lifecycle_stage = 'active' and status != 'FINISHED'"
        return [name for (name,) in database.execute(query)]


def compare(straight: Path, disturbed_: Path, rounds: list[str]) -> dict[str, Any]:
    """What must hold at the end; `problems` is empty then."""
    problems = []
    for what, read in (("output", outputs), ("input", inputs)):
        one, other = read(straight), read(disturbed_)
        differing = sorted(k for k in one | other if one.get(k) != other.get(k))
        problems += [f"{what} {name} differs" for name in differing]
    events = notes(disturbed_)
    problems += [f"left over: {word}" for event in events for word in event["left_over"]]
    for name in rounds:
        tagged = workspace.run(disturbed_, "git", "tag", "--list", f"round/{name}").split()
        if tagged != [f"round/{name}"]:
            problems.append(f"{name} is not tagged once: {tagged}")
    status = workspace.run(disturbed_, "git", "status", "--porcelain").strip()
    if status:
        problems.append(f"git status: {status}")
    if "Running stage" in workspace.run(disturbed_, "dvc", "repro"):
        problems.append("dvc repro ran a stage again")
    if doubled_points(disturbed_):
        problems.append(f"{doubled_points(disturbed_)} points are doubled in MLflow")
    problems += [f"MLflow run {name} is not FINISHED" for name in unfinished_runs(disturbed_)]
    killed = [event for event in events if event["victim"]]
    spared = {"flow", "dvc", "stage"} - {event["victim"] for event in killed}
    problems += [f"no {victim} was ever killed: run more rounds" for victim in sorted(spared)]
    return {
        "rounds": len(rounds),
        "hashes": len(outputs(straight)),
        "kills": dict(Counter(event["victim"] for event in killed)),
        "kills_by_stage": dict(Counter(event.get("what", "").split(" ")[0] for event in killed)),
        "seconds_to_kill": sum(event["seconds"] for event in killed) / max(1, len(killed)),
        "continued": sum(len(event["continued"]) for event in events),
        "problems": problems,
    }


def table(result: dict[str, Any]) -> str:
    kills = ", ".join(f"{victim} {count}" for victim, count in sorted(result["kills"].items()))
    rows = [
        ("rounds", result["rounds"]),
        ("output hashes compared", result["hashes"]),
        ("of these different", sum("output" in p for p in result["problems"])),
        ("mean seconds of a run before a SIGKILL", f"{result['seconds_to_kill']:.0f}"),
        ("SIGKILLs", f"{sum(result['kills'].values())} ({kills})"),
        ("stages that went on from a checkpoint", result["continued"]),
        ("processes left over", sum("left over" in p for p in result["problems"])),
        ("points doubled in MLflow", sum("doubled" in p for p in result["problems"])),
    ]
    return "| | |\n|---|---:|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def write(text: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    artifacts.write_text(PAGE, before + _BEGIN + text + _END + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims")
    arguments = parser.parse_args()
    rounds = [f"r{number + 1}" for number in range(arguments.rounds)]
    default = vars(arguments) == vars(parser.parse_args([]))
    name = f"soak-{arguments.rounds}-{arguments.every:g}-{arguments.seed}"
    home = STUDY if default else STUDY.with_name(name)
    folders = project(home / "straight"), project(home / "disturbed")
    work: list[Callable[[], None]] = [
        lambda: undisturbed(folders[0], rounds),
        lambda: disturbed(
            folders[1],
            rounds,
            arguments.every,
            random.Random(arguments.seed + len(notes(folders[1]))),
        ),
    ]
    with ThreadPoolExecutor(len(work)) as together:
        for running in [together.submit(step) for step in work]:
            running.result()
    result = compare(*folders, rounds)
    artifacts.write_json(home / "result.json", result)
    print(table(result))
    for problem in result["problems"]:
        print(problem)
    if default:
        write(table(result))
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
