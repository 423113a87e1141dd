"""Stands in for every stage of a project.

Instant, deterministic, and able to fail or to take long when told.

    python stub.py STAGE OUTPUT...

A file in the folder may name a stage (several in SLOW), and then
    FAIL    it fails
    SLEEP   it takes long, until there is a file GO; its process id is in sleeping.pid. SIGTERM: it ends with code
            75, as a stage that saved
    STUBBORN  it takes long and ignores SIGTERM
    SLOW    it takes two seconds
    NOPASS  (any content) no candidate passes the gate
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    name, *outputs = sys.argv[1:]
    with open("ran.txt", "a", encoding="utf-8") as file:
        file.write(f"{name}\n")
    Path("saw").mkdir(exist_ok=True)
    Path("saw", name).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
    if told("FAIL", name):
        sys.exit(f"stub {name} was told to fail")
    if told("SLOW", name):
        with open("times.txt", "a") as file:
            file.write(f"{name} {time.time()} ")
        time.sleep(2)
        with open("times.txt", "a") as file:
            file.write(f"{name} {time.time()}\n")
    if told("SLEEP", name) or told("STUBBORN", name):
        hold(name)
    for output in outputs:
        path = Path(output)
        if path.suffix == ".json":
            path.parent.mkdir(parents=True, exist_ok=True)
            content = decision(name) if path.stem == "decision" else {"x": 1}
            path.write_text(json.dumps(content))
        else:
            path.mkdir(parents=True, exist_ok=True)
            (path / "made.txt").write_text(name)


def told(order: str, name: str) -> bool:
    path = Path(order)
    return path.exists() and name in path.read_text().split()


def hold(name: str) -> None:
    """Take long, as a stage does that is tied to its owners and saves when it is asked to end."""
    from rlhf import lifeline

    def save(*_: object) -> None:
        if told("STUBBORN", name):
            return
        sys.stderr.write(
            f"{name}: stopped after step 7; run it again and it continues from there\n"
        )
        sys.exit(75)

    signal.signal(signal.SIGTERM, save)
    lifeline.hold(every=0.1)
    Path("sleeping.pid").write_text(str(os.getpid()))
    for _ in range(1200):
        if Path("GO").exists():
            return
        time.sleep(0.1)


def decision(name: str) -> dict[str, object]:
    """What promote writes."""
    from ruamel.yaml import YAML

    round = name.split("@")[1]
    declared = YAML(typ="safe", pure=True).load(Path("pipeline.yaml").read_text(encoding="utf-8"))
    word = declared["rounds"][round]["decision"]
    passes = not Path("NOPASS").exists()
    on_fail = declared["rounds"][round]["gate"]["on_fail"]
    status = {"keep": "kept", "stop": "stopped", "ask": "awaiting"}[on_fail]
    status, promoted = ("promoted", f"{round}-ppo") if passes else (status, None)
    if word is not None:
        status = {"promote": "promoted", "keep": "kept", "stop": "stopped"}[word["choice"]]
        promoted = word["candidate"]
    entry = {
        "candidate": f"{round}-ppo",
        "algorithm": "ppo",
        "checkpoint": "step-24",
        "proxy_mean": 1.0,
        "gold_mean": 0.5,
        "kl_nats": 6.0,
        "win_rate": 0.75,
        "win_rate_lower": 0.7,
        "win_rate_upper": 0.8,
        "length_mean": 30.0,
        "passes": passes,
        "failed_rules": [] if passes else ["kl_nats at_most 3.0"],
    }
    other = {
        **entry,
        "candidate": f"{round}-dpo",
        "passes": False,
        "failed_rules": ["kl_nats at_most 12.0"],
    }
    verdict = {
        "status": status,
        "promoted": promoted,
        "reason": word["because"] if word else "best gold_mean of those that pass",
    }
    return {
        "round": round,
        **verdict,
        "verdict": verdict,
        "decision": word,
        "leader": f"{round}-ppo",
        "incoming": {"gold_mean": 0.1, "proxy_mean": 0.0},
        "candidates": [entry, other],
    }


if __name__ == "__main__":
    main()
