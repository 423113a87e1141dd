"""Ten rounds as a team runs them: a server, a worker, and `prefect deployment run` without naming a round.

    python -m benchmarks.deployed             10 rounds on the minimal world, under .studies/deployed/
    python -m benchmarks.deployed --rounds 3

Afterwards: `dvc repro` has nothing to run; `dvc repro --force` of a policy in the middle gives the same hash; a
clone elsewhere pulls every round from the DVC remote and verifies it. Exit code 1 if one of these fails. A run that
was stopped goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import workspace
from benchmarks.soak import outputs, project

STUDY = workspace.ROOT / ".studies" / "deployed"


@contextlib.contextmanager
def service(folder: Path, name: str, ready: str, **extra: str) -> Iterator[str]:
    """A long-running command of `python -m flows`; yields what it printed until it was ready."""
    log = folder.parent / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows", name],
            cwd=folder,
            env={**workspace.environment(), "PYTHONUNBUFFERED": "1", **extra},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while ready not in log.read_text(errors="replace"):
            if process.poll() is not None:
                sys.exit(f"{name} ended: {log.read_text(errors='replace')}")
            time.sleep(0.3)
        yield log.read_text(errors="replace")
    finally:
        process.terminate()
        process.wait(60)


def prepare(folder: Path) -> None:
    """The deployments, a DVC remote beside the project, and a push after every stage; committed."""
    if "store" in workspace.run(folder, "dvc", "remote", "list"):
        return
    store = str(folder.parent / "store")
    workspace.run(folder, "dvc", "remote", "add", "--default", "store", store)
    shutil.copyfile(workspace.ROOT / "prefect.yaml", folder / "prefect.yaml")
    path = folder / "pipeline.yaml"
    path.write_text(re.sub(r"^(  push: )false", r"\1true", path.read_text(), flags=re.M))
    workspace.run(folder, "git", "add", "--all")
    workspace.run(folder, "git", "commit", "--quiet", "--message", "Deployments and a DVC remote")


def run_rounds(folder: Path, count: int, url: str) -> None:
    prefect = [sys.executable, "-m", "prefect"]
    for number in range(1, count + 1):
        if f"round/r{number}" in workspace.run(folder, "git", "tag").split():
            continue
        began = time.monotonic()
        words = ["deployment", "run", "rlhf-round/default", "--watch"]
        workspace.run(folder, *prefect, *words, PREFECT_API_URL=url)
        if f"round/r{number}" not in workspace.run(folder, "git", "tag").split():
            sys.exit(f"the run ended, but r{number} is not tagged; see {folder.parent}/worker.log")
        print(f"r{number}: {time.monotonic() - began:.0f} s", flush=True)


def check(folder: Path, count: int) -> list[str]:
    problems = []
    printed = workspace.run(folder, "dvc", "repro")
    if "Running stage" in printed:
        problems.append(f"dvc repro ran something: {printed}")
    middle = f"policy@r{(count + 1) // 2}-ppo"
    before = outputs(folder)
    workspace.run(folder, "dvc", "repro", "--quiet", "--single-item", "--force", middle)
    after = outputs(folder)
    problems += [
        f"{middle} again: {path} differs" for path in before if before[path] != after[path]
    ]
    status = workspace.run(folder, "git", "status", "--porcelain").strip()
    if status:
        problems.append(f"git status: {status}")
    clone = folder.parent / "clone"
    shutil.rmtree(clone, ignore_errors=True)
    workspace.run(folder.parent, "git", "clone", "--quiet", str(folder), str(clone))
    for number in range(1, count + 1):
        print(workspace.run(clone, sys.executable, "-m", "flows", "verify", f"r{number}").strip())
    print(workspace.run(clone, sys.executable, "-m", "flows", "lineage", f"r{count}"))
    print(workspace.run(folder, sys.executable, "-m", "flows", "rounds"))
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    folder = project(STUDY / "project")
    prepare(folder)
    with service(folder, "server", "PREFECT_API_URL=") as printed:
        found = re.search(r"PREFECT_API_URL=(\S+)", printed)
        assert found is not None
        os.environ["PREFECT_API_URL"] = found[1]
        with service(folder, "worker", "prefect deployment run"):
            run_rounds(folder, arguments.rounds, found[1])
    problems = check(folder, arguments.rounds)
    print("\n".join(problems) or "everything holds")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
