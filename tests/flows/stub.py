"""Stands in for every stage of a project.

Instant, deterministic, and able to fail or to take long when told.

    python stub.py STAGE [NAME] OUTPUT...       a file FAIL or SLEEP in the folder names a stage
    that fails or sleeps
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    name, *outputs = sys.argv[1:]
    with open("ran.txt", "a", encoding="utf-8") as file:
        file.write(f"{name}\n")
    for order in ("FAIL", "SLEEP"):
        path = Path(order)
        if path.exists() and path.read_text().strip() == name:
            if order == "FAIL":
                sys.exit(f"stub {name} was told to fail")
            Path("sleeping.pid").write_text(str(os.getpid()))
            time.sleep(120)
    for output in outputs:
        path = Path(output)
        if path.suffix == ".json":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(decision(name) if path.stem == "decision" else {"x": 1}))
        else:
            path.mkdir(parents=True, exist_ok=True)
            (path / "made.txt").write_text(name)


def decision(name: str) -> dict[str, object]:
    """What promote writes."""
    round = name.split("@")[1]
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
        "passes": True,
        "failed_rules": [],
    }
    other = {
        **entry,
        "candidate": f"{round}-dpo",
        "passes": False,
        "failed_rules": ["kl_nats at_most 12.0"],
    }
    return {
        "round": round,
        "promoted": f"{round}-ppo",
        "reason": "best gold_mean of those that pass",
        "incoming": {"gold_mean": 0.1, "proxy_mean": 0.0},
        "candidates": [entry, other],
    }


if __name__ == "__main__":
    main()
