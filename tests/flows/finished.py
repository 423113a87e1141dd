"""A project whose rounds are done, without running them: outputs written by hand, recorded by a real DVC."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf.champion import policy_digest
from rlhf.resume import content_digest


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"git {words}: {done.stdout}{done.stderr}"
    return done.stdout.rstrip("\n")


def dvc(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"dvc {words}: {done.stdout}{done.stderr}"
    return done.stdout


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))


def start(folder: Path) -> None:
    """What `data` and `sft` leave."""
    for name in ("prompts", "demonstrations"):
        write(folder / f"data/tables/{name}.parquet", f"table {name}")
    write(folder / "data/source/prompts.jsonl", "prompts")
    write(folder / "runs/r0/preferences/pairs.parquet", "no pairs")
    write(folder / "runs/r0/reward_model/none.txt", "no members")
    write(folder / "runs/r0/promoted/model.safetensors", "weights of r0")
    write(folder / "runs/r0/metrics/sft.json", {"heldout_loss_nats": 1.5})


def run(folder: Path, name: str, before: str, *, kept: bool = False, word: Any = None) -> None:
    """What the stages of a round leave; `kept`: no candidate passed."""
    home = folder / "runs" / name
    write(home / "preferences/pairs.parquet", f"pairs {name}")
    write(
        home / "metrics/preferences.json",
        {"train_pairs": 30, "heldout_pairs": 5, "carried_pairs": 0 if name == "r1" else 35},
    )
    for number in (0, 1):
        write(home / f"reward_model/member_{number}/model.safetensors", f"member {number} {name}")
    write(home / "reward_model/report.json", {})
    write(home / "metrics/reward_model.json", {"accuracy": 0.7})
    write(home / "best_of_n/best_of_n.parquet", "numbers of best-of-n")
    write(home / "metrics/best_of_n.json", {"x": 1})
    rows = []
    for kind in ("ppo", "dpo"):
        candidate = f"{name}-{kind}"
        place = home / "policies" / candidate
        write(place / "step-00024/model.safetensors", f"weights {candidate}")
        write(place / "candidate.json", {"learns_from": f"{name}/reward_model"})
        write(home / f"metrics/{candidate}-policy.json", {"x": 1})
        write(home / f"metrics/{candidate}-evaluation.json", {"x": 1})
        write(home / f"evaluations/{candidate}/evaluations.parquet", f"numbers {candidate}")
        rows.append(row(candidate, passes=kind == "ppo" and not kept))
    status = "kept" if kept else "promoted"
    verdict = {
        "status": status,
        "promoted": None if kept else f"{name}-ppo",
        "reason": "no candidate passes" if kept else "best gold_mean of those that pass",
    }
    decision = {
        "round": name,
        **verdict,
        "verdict": verdict,
        "decision": word,
        "leader": None,
        "incoming": {
            "from": before,
            "gold_mean": 0.1 if before == "r0" else 0.5,
            "proxy_mean": 0.0,
            "kl_nats": 0.0,
            "win_rate": 0.5,
            "win_rate_initial": 0.75,
        },
        "candidates": rows,
    }
    write(home / "metrics/decision.json", decision)
    write(home / "report/report.html", f"<p>{name}</p>")
    promoted = home / "promoted"
    incoming = folder / "runs" / before / "promoted"
    if kept:
        for file in incoming.iterdir():
            write(promoted / file.name, file.read_text())
        return
    write(promoted / "model.safetensors", f"weights {name}-ppo")
    parent = {"round": "r0", "candidate": None}
    if (incoming / "lineage.json").exists():
        written = json.loads((incoming / "lineage.json").read_text())
        parent = {key: written[key] for key in parent}
    members = sorted(path for path in (home / "reward_model").iterdir() if path.is_dir())
    write(
        promoted / "lineage.json",
        {
            "round": name,
            "candidate": f"{name}-ppo",
            "checkpoint": "step-00024",
            "algorithm": "ppo",
            "learns_from": f"{name}/reward_model",
            "weights": policy_digest(promoted),
            "parent": {**parent, "weights": policy_digest(incoming)},
            "reward_model": {path.name: content_digest(path) for path in members},
            "data": {p.name: content_digest(p) for p in sorted((folder / "data/tables").iterdir())},
            "config": {"seed": 0},
        },
    )


def row(candidate: str, *, passes: bool) -> dict[str, Any]:
    return {
        "candidate": candidate,
        "algorithm": candidate.split("-")[1],
        "checkpoint": "step-00024",
        "proxy_mean": 1.0,
        "gold_mean": 0.5,
        "kl_nats": 6.0,
        "win_rate": 0.625,
        "win_rate_lower": 0.6,
        "win_rate_upper": 0.65,
        "win_rate_initial": 0.75,
        "win_rate_initial_lower": 0.7,
        "win_rate_initial_upper": 0.8,
        "passes": passes,
        "failed_rules": [] if passes else ["kl_nats 6 > 3"],
    }
