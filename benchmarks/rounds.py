"""What many rounds cost: planning, DVC's own checks, and orchestration per stage.

    python -m benchmarks.rounds               5, 50 and 200 rounds of 3 candidates; a table
    python -m benchmarks.rounds --rounds 5 50
    python -m benchmarks.rounds --json

Stages are stubs that only make their outputs, and the projects are made up to date without running 1800
processes: DVC saves and commits their outputs in one. Every number is kept as it is measured, in
.scratch/benchmarks, so that a run that is stopped goes on where it was; --fresh measures anew.

Seconds are of CPU, user and system, of a command and all it starts; on a shared machine the wall says what else
it does (--json has both). Compare ratios and growth, not seconds of different machines. DVC's own commands may
take hours at 200 rounds; one that takes longer than --patience is stopped, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import workspace

ROOT = workspace.ROOT
PLACE = ROOT / ".scratch/benchmarks/rounds"
CANDIDATES = 3
FILES = 8  # in every directory that a stage makes

STUB = '''"""Stands in for every stage: makes its outputs."""
import json, pathlib, sys
name, *outputs = sys.argv[1:]
round = name.partition("@")[2]
numbers = dict.fromkeys(("proxy_mean", "gold_mean", "kl_nats", "win_rate", "length_mean", "rank_score"), 0.5)
numbers |= {"win_rate_lower": 0.5, "win_rate_upper": 0.5}
row = {"candidate": f"{round}-ppo", "algorithm": "ppo", "checkpoint": "step-24", "passes": True, "failed_rules": []}
verdict = {"status": "promoted", "promoted": f"{round}-ppo", "reason": "it is a stub"}
decision = {"round": round, **verdict, "verdict": verdict, "decision": None, "leader": f"{round}-ppo",
            "incoming": numbers, "candidates": [row | numbers]}
for output in map(pathlib.Path, outputs):
    if output.suffix == ".json":
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(decision if output.name == "decision.json" else {"x": 1}))
    else:
        output.mkdir(parents=True, exist_ok=True)
        for i in range(FILES):
            (output / f"{i}.txt").write_text(f"{name} {output} {i}")
'''


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, nargs="+", default=[5, 50, 200])
    parser.add_argument("--repeats", type=int, default=3, help="the shortest counts")
    parser.add_argument("--patience", type=float, default=600, help="seconds for one command")
    parser.add_argument("--json", action="store_true", help="the numbers, for programs")
    parser.add_argument("--place", type=Path, default=PLACE, help="where the projects are kept")
    parser.add_argument("--build", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    arguments = parser.parse_args()
    if arguments.build:
        build()
        return
    place = arguments.place.resolve()
    if arguments.fresh:
        shutil.rmtree(place, ignore_errors=True)
    results = Results(place / "results.json")
    for count in arguments.rounds:
        folder = project(place / f"{count}-rounds", count)
        measure(folder, count, results, arguments.repeats, arguments.patience)
    if arguments.json:
        print(json.dumps(results.values, indent=1))
    else:
        print(table(results.values, arguments.rounds))


# --- projects ------------------------------------------------------------------------------------


def pipeline_text(count: int) -> str:
    """The default pipeline.yaml with its round so many times, each from the one before."""
    text = (ROOT / "pipeline.yaml").read_text(encoding="utf-8")
    text = re.sub(r"^  source: \S+", "  source: world.txt", text, count=1, flags=re.M)
    for section in ("rounds", "candidates"):
        found = re.search(rf"^{section}:\n((?:  .*\n|\n)*)", text, re.M)
        assert found is not None
        block = found[1].rstrip("\n") + "\n"
        copies = "".join(_moved(block, number) for number in range(1, count + 1))
        text = f"{text[: found.start(1)]}{copies}\n{text[found.end(1) :]}"
    return text


def _moved(block: str, number: int) -> str:
    """A round's text with its number changed, comments left out."""
    lines = [re.sub(r"\s+#.*", "", line) for line in block.splitlines()]
    moved = [
        re.sub(r"\br([01])(?=\b|-)", lambda m: f"r{number - 1 + int(m[1])}", line) for line in lines
    ]
    return "\n".join(moved) + "\n"


def stub_dvc_yaml() -> str:
    """The real dvc.yaml with every command replaced by one that only makes its outputs."""
    import yaml

    declared = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    for name, stage in declared["stages"].items():
        body = stage.get("do", stage)
        listed = [*body.get("outs", []), *body.get("metrics", [])]
        outputs = [item if isinstance(item, str) else next(iter(item)) for item in listed]
        label = f"{name}@${{key}}" if "foreach" in stage else name
        body["cmd"] = f"python stub.py {label} {' '.join(outputs)}"
    return str(yaml.safe_dump(declared, sort_keys=False, width=1000))


def project(folder: Path, count: int) -> Path:
    """A project of so many finished rounds; kept if it is there."""
    if (folder / "ready").is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "pipeline.yaml").write_text(pipeline_text(count), encoding="utf-8")
    (folder / "dvc.yaml").write_text(stub_dvc_yaml(), encoding="utf-8")
    (folder / "world.txt").write_text("world\n", encoding="utf-8")
    (folder / "stub.py").write_text(STUB.replace("FILES", str(FILES)), encoding="utf-8")
    (folder / ".dvcignore").write_text(".scratch\n.gitignore\n", encoding="utf-8")
    (folder / ".gitignore").write_text(
        "/.scratch\n/mlflow.db\n/data/*\n/runs/*/*\n!/runs/*/metrics\n", encoding="utf-8"
    )
    workspace.run(folder, "git", "init", "--quiet")
    workspace.run(folder, "dvc", "init", "--quiet")
    workspace.run(folder, "dvc", "config", "core.analytics", "false")
    workspace.run(folder, sys.executable, "-m", "benchmarks.rounds", "--build")
    (folder / "ready").touch()
    return folder


def build() -> None:
    """In the project's folder: make every output, and have DVC record it, all in one process.

    The outputs, their hashes, the cache and dvc.lock are as DVC's own; only its reading of parameters is replaced,
    which walks the whole of pipeline.yaml for each.
    """
    import dvc.dependency.param as parameters
    import networkx
    import yaml
    from dvc.repo import Repo
    from dvc.stage.serialize import to_lockfile

    from flows.definitions import ABSENT, find
    from rlhf import yaml12

    pipeline = yaml12.load(Path("pipeline.yaml").read_text(encoding="utf-8"))
    parameters.read_param_file = lambda fs, path, keys, **_: {
        key: value for key in keys if (value := find(pipeline, key)) is not ABSENT
    }
    stub = compile(Path("stub.py").read_text(encoding="utf-8"), "stub.py", "exec")
    entries = {}
    with Repo(".") as repo, repo.lock:
        graph = repo.index.graph
        for stage in networkx.topological_sort(graph.reverse()):
            sys.argv = stage.cmd.split()[1:]
            exec(stub, {"__name__": "__main__"})  # the file that `project` wrote
            stage.save()
            stage.commit()
            entries.update(json.loads(json.dumps(to_lockfile(stage))))
    text = yaml.dump({"schema": "2.0", "stages": entries}, Dumper=yaml.CSafeDumper, sort_keys=False)
    Path("dvc.lock").write_text(text, encoding="utf-8")


# --- measuring -----------------------------------------------------------------------------------


class Results:
    """Numbers by name and number of rounds, written as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, dict[str, Any]] = {}
        if path.is_file():
            self.values = json.loads(path.read_text(encoding="utf-8"))

    def take(self, name: str, count: int, measured: Callable[[], dict[str, float] | None]) -> None:
        """Measure unless it is known; None: it took too long."""
        if str(count) in self.values.setdefault(name, {}):
            return
        print(f"{count} rounds: {name} ...", file=sys.stderr, flush=True)
        self.values[name][str(count)] = measured()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.values, indent=1), encoding="utf-8")


def measure(folder: Path, count: int, results: Results, repeats: int, patience: float) -> None:
    """Everything that is measured on one project."""
    last = f"r{count}"
    flows = [sys.executable, "-m", "flows"]
    dvc = [sys.executable, "-m", "dvc"]
    plan = [*flows, "plan", "--round", last]
    memory = folder / ".scratch/plan"

    def best(
        command: list[str], before: Callable[[], object] = lambda: None, times: int = repeats
    ) -> dict[str, float] | None:
        found = []
        for _ in range(times):
            before()
            timed = seconds_of(command, folder, patience)
            if timed is None:
                return None
            found.append(timed)
        return min(found, key=lambda timed: timed["cpu"])

    def edit() -> None:
        path = folder / "pipeline.yaml"
        text = path.read_text(encoding="utf-8")
        other = re.sub(
            rf"(?m)(^  {last}-ppo:\n(?:    .*\n)*?    learning_rate: )(\S+)",
            lambda m: m[1] + ("7.0e-4" if m[2] != "7.0e-4" else "6.0e-4"),
            text,
        )
        path.write_text(other, encoding="utf-8")

    def once(name: str, command: list[str], times: int = 1) -> None:
        results.take(name, count, lambda: best(command, times=times))

    once("validate", [*flows, "validate"], repeats)
    results.take(
        "plan, first time",
        count,
        lambda: best(plan, lambda: shutil.rmtree(memory, ignore_errors=True), 1),
    )
    once("plan, nothing changed", plan, repeats)
    settings = folder / "pipeline.yaml"
    declared = settings.read_text(encoding="utf-8")
    try:
        results.take("plan, one number edited", count, lambda: best(plan, edit))
    finally:
        settings.write_text(declared, encoding="utf-8")
    stage = f"promote@{last}"
    once("one stage: its command alone", _command_of(folder, stage), repeats)
    once("one stage: dvc repro --single-item", [*dvc, "repro", "-q", "-f", "-s", stage])
    once("one stage: the flow's way", [sys.executable, "-c", _BY_RUNNER, stage])
    once("no-op: flows run", [*flows, "run", "--round", last, "--commit", "never"])
    once("no-op: dvc repro", [*dvc, "repro", "-q"])


_BY_RUNNER = """
import sys
from flows.runner import Runner
outcome = Runner(".").run(sys.argv[1], force=True)
sys.exit(0 if outcome and outcome.ok else outcome.message if outcome else "not started")
"""


def _command_of(folder: Path, stage: str) -> list[str]:
    """The words of a stage's command."""
    lock = (folder / "dvc.lock").read_text(encoding="utf-8")
    found = re.search(rf"(?m)^  {stage}:\n    cmd: ((?:.*\n)(?:      .*\n)*)", lock)
    assert found is not None
    return [sys.executable, *found[1].split()[1:]]


def seconds_of(command: list[str], folder: Path, patience: float) -> dict[str, float] | None:
    """CPU and wall seconds of a command and all it starts; None if it had to be stopped."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=workspace.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    known = os.times()
    try:
        _, printed = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        import psutil

        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.communicate()
        return None
    if process.returncode:
        sys.exit(f"{' '.join(command)} in {folder}:\n{printed[-3000:]}")
    now = os.times()
    cpu = now.children_user + now.children_system - known.children_user - known.children_system
    return {"cpu": round(cpu, 3), "wall": round(time.perf_counter() - start, 3)}


# --- showing -------------------------------------------------------------------------------------


def table(values: dict[str, dict[str, Any]], counts: list[int]) -> str:
    """CPU seconds by number of rounds, and how they grow: the exponent of a power of the number of stages."""
    stages = [2 + count * (3 + 2 * CANDIDATES) for count in counts]
    heads = [
        f"{count} rounds, {number} stages" for count, number in zip(counts, stages, strict=True)
    ]
    lines = [
        f"| CPU seconds | {' | '.join(heads)} | growth |",
        "|---|" + "---:|" * (len(counts) + 1),
    ]
    for name, by_count in values.items():
        found = [by_count.get(str(count), {}) for count in counts]
        cells = ["stopped" if f is None else f"{f['cpu']:.2f}" if f else "" for f in found]
        lines.append(f"| {name} | {' | '.join(cells)} | {_growth(stages, found)} |")
    return "\n".join(lines)


def _growth(stages: list[int], found: list[dict[str, float] | None]) -> str:
    """Like n^0.4, between the two largest projects that were measured."""
    import math

    known = [(n, f["cpu"]) for n, f in zip(stages, found, strict=True) if f and f["cpu"] > 0]
    if len(known) < 2:
        return ""
    (n1, t1), (n2, t2) = known[-2:]
    return f"n^{math.log(t2 / t1) / math.log(n2 / n1):.1f}"


if __name__ == "__main__":
    main()
