"""Where one default round's time and memory go.

    python -m benchmarks.round            a fresh project folder, `python -m flows run --round r1`, a table
    python -m benchmarks.round --repro    the same by plain `dvc repro`

Seconds are wall time of one run; compare shares and ratios, not absolute times of different machines or days.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import workspace

WORK = ("sampling", "training", "scoring", "evaluation")


class Peak:
    """Largest memory of a process and all below it, sampled: each process alone, and all together (MB)."""

    def __init__(self, pid: int) -> None:
        self.process, self.alone, self.together = psutil.Process(pid), 0.0, 0.0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.stop.wait(0.5):
            sizes = []
            try:
                for process in [self.process, *self.process.children(recursive=True)]:
                    try:
                        sizes.append(process.memory_full_info().pss / 2**20)
                    except psutil.Error:
                        continue
            except psutil.Error:
                return
            if sizes:
                self.alone = max(self.alone, *sizes)
                self.together = max(self.together, sum(sizes))


def timed(folder: Path, *command: str) -> tuple[float, Peak]:
    """Run a command in the folder; wall seconds and peak memory."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=workspace.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    peak = Peak(process.pid)
    printed, _ = process.communicate()
    peak.stop.set()
    if process.returncode:
        sys.exit(printed[-6000:])
    return time.perf_counter() - start, peak


def stages(folder: Path) -> list[dict[str, Any]]:
    """What each stage wrote about itself, in order of ending."""
    files = (folder / ".scratch/timings").glob("*.json")
    found = [(path.stat().st_mtime, json.loads(path.read_text())) for path in files]
    return [
        content for _, content in sorted(found, key=lambda item: item[0]) if "seconds" in content
    ]


def table(rows: list[dict[str, Any]]) -> str:
    parts = ["imports", *WORK]
    lines = [
        "| stage | " + " | ".join(parts) + " | other | total (s) | peak (MB) |",
        "|---|" + "---:|" * (len(parts) + 3),
    ]
    sums = dict.fromkeys([*parts, "other", "total"], 0.0)
    for row in rows:
        seconds = {part: row["seconds"].get(part, 0.0) for part in parts}
        seconds["other"] = row["total_seconds"] - sum(seconds.values())
        seconds["total"] = row["total_seconds"]
        for key, value in seconds.items():
            sums[key] += value
        cells = " | ".join(f"{seconds[key]:.1f}" for key in [*parts, "other", "total"])
        lines.append(f"| {row['stage']} | {cells} | {row['peak_rss_mb']:.0f} |")
    cells = " | ".join(f"{sums[key]:.1f}" for key in [*parts, "other", "total"])
    lines.append(f"| all stages, added up | {cells} | |")
    return "\n".join(lines)


def covered(rows: list[dict[str, Any]], length: str) -> float:
    """Seconds in which at least one stage was in its last `length` seconds; side by side counts once."""
    spans = sorted((row["end"] - row[length], row["end"]) for row in rows)
    total, reach = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repro", action="store_true", help="plain dvc repro instead of the flow")
    parser.add_argument("--small", action="store_true", help="the CI-size world")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="roundhouse-benchmark-"))
    try:
        change = workspace.small if arguments.small else lambda pipeline: None
        workspace.create(folder, change)
        workspace.run(folder, "git", "init", "--quiet")
        flow = (sys.executable, "-m", "flows", "run", "--round", "r1")
        command = ("dvc", "repro", "--quiet") if arguments.repro else flow
        wall, peak = timed(folder, *command)
        again, _ = timed(folder, "dvc", "repro", "--quiet")
        rows = stages(folder)
        for row in rows:
            # A stage works at the end of its life, after its imports.
            row["work"] = sum(row["seconds"].get(part, 0.0) for part in WORK)
            row["end"] = (folder / ".scratch/timings" / f"{row['stage']}.json").stat().st_mtime
        print(
            f"whole round: {wall:.1f} s by `{' '.join(command[-4:])}`; a second `dvc repro`: {again:.1f} s"
        )
        print(
            f"peak memory (PSS): {peak.alone:.0f} MB in one process, {peak.together:.0f} MB in all together\n"
        )
        print(table(rows))
        work, alive = covered(rows, "work"), covered(rows, "total_seconds")
        print(f"\nof {wall:.0f} s of wall time, side by side counted once:")
        print(f"  {work / wall:4.0%}  some stage samples, trains or scores")
        print(f"  {(alive - work) / wall:4.0%}  stages only import, read, write or draw")
        print(
            f"  {1 - alive / wall:4.0%}  no stage runs: planning, DVC's own work, Prefect, MLflow, the report"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
