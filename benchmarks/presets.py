"""Every preset on the embedded default: does the reward rise, within its KL?

    python -m benchmarks.presets                 all of them, table into docs/algorithms.md, figure into docs/figures/
    python -m benchmarks.presets --only ppo dpo  some of them, nothing written
    python -m benchmarks.presets --seed 1        another seed, nothing written

One project under .studies/presets/ with one candidate per preset, run as any round is; a study that was stopped
goes on where it stopped. The sizes below are this world's, not part of a preset. Exit code 1 if a preset fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import workspace
from rlhf import artifacts
from rlhf.presets import PRESETS

STUDY = workspace.ROOT / ".studies" / "presets"
DOCS = workspace.ROOT / "docs"
MOST_NATS = (
    12.0  # the default gate's bound; presets without a KL term run under a budget of their own
)

_ADAM = {
    "final_lr_fraction": 1.0,
    "weight_decay": 0.0,
    "adam_betas": [0.9, 0.95],
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
}
_SAMPLING = {
    "learns_from": "r1/reward_model",
    "steps": 24,
    "prompts_per_step": 16,
    "samples_per_prompt": 8,
    "temperature": 1.0,
    "epochs_per_step": 2,
    "minibatches": 2,
    "micro_batch_size": 64,
    "learning_rate": 6.0e-4,
    "checkpoint_every": 12,
    **_ADAM,
}
_ONE_ANSWER = {"prompts_per_step": 128, "samples_per_prompt": 1}
_ON_POLICY = {"epochs_per_step": 1, "minibatches": 1, "learning_rate": 1.5e-3}
_NO_KL_TERM = {"learning_rate": 3.0e-4, "kl_budget_nats": 8.0}
_PAIRS = {
    "learns_from": "r1/preferences",
    "pairs_per_group": 2,
    "epochs": 2,
    "batch_size": 64,
    "micro_batch_size": 64,
    "learning_rate": 3.0e-4,
    "checkpoint_every": 44,
    **_ADAM,
    "warmup_steps": 10,
    "final_lr_fraction": 0.05,
}
SIZES: dict[str, dict[str, Any]] = {
    "ppo": {
        **_ONE_ANSWER,
        "kl": {"coef": 0.15},
        "value": {"learning_rate": 1.0e-3, "warmup_steps": 3},
    },
    "a2c": {
        **_ONE_ANSWER,
        **_ON_POLICY,
        "kl": {"coef": 0.15},
        "value": {"learning_rate": 1.0e-3, "warmup_steps": 3},
    },
    "reinforce": {**_ONE_ANSWER, **_ON_POLICY, "kl": {"coef": 0.15}},
    "rloo": {**_ON_POLICY, "kl": {"coef": 0.15}},
    "grpo": {"kl": {"coef": 0.2}},
    "dr_grpo": _NO_KL_TERM,
    "dapo": _NO_KL_TERM,
    "gspo": _NO_KL_TERM,
    "cispo": {**_NO_KL_TERM, "learning_rate": 1.0e-4},
    "sapo": _NO_KL_TERM,
    "reinforce_plus_plus": {**_ONE_ANSWER, "kl": {"coef": 0.15}},
    "rejection_sampling": {
        "steps": 12,
        "prompts_per_step": 64,
        "micro_batch_size": 32,
        "learning_rate": 3.0e-4,
        "checkpoint_every": 6,
        "kl_budget_nats": 8.0,
    },
    "best_of_n": {
        "prompts_per_step": 512,
        "epochs_per_step": 4,
        "minibatches": 8,
        "learning_rate": 3.0e-4,
        "checkpoint_every": 1,
    },
    "dpo": {},
    "ipo": {},
    "simpo": {},
    "orpo": {"losses": [{"kind": "orpo", "beta": 1.0}], "learning_rate": 6.0e-4},
    "kto": {},
    "online_dpo": {
        "prompts_per_step": 64,
        "samples_per_prompt": 2,
        "epochs_per_step": 1,
        "minibatches": 1,
        "learning_rate": 3.0e-4,
        "micro_batch_size": 64,
    },
}


def candidate(algorithm: str) -> dict[str, Any]:
    """The preset by name, with this world's sizes."""
    sizes = dict(_PAIRS if PRESETS[algorithm]["kind"] == "preference" else _SAMPLING)
    own = {**sizes, **SIZES[algorithm]}
    fixed = [key for key in own if key in PRESETS[algorithm] and key not in SIZES[algorithm]]
    return {
        "round": "r1",
        "from": "r0",
        "algorithm": algorithm,
        **{key: value for key, value in own.items() if key not in fixed},
    }


def run(folder: Path, seed: int, algorithms: list[str]) -> None:
    """One round with a candidate per preset, by the flow."""

    def extend(pipeline: dict[str, Any]) -> None:
        pipeline["seed"] = seed
        pipeline["project"] = f"presets-seed-{seed}"
        pipeline["candidates"] = {f"r1-{name}": candidate(name) for name in algorithms}

    workspace.create(folder, extend)
    workspace.run(folder, sys.executable, "-m", "flows", "run", "--round", "r1")


def read(folder: Path, algorithm: str) -> dict[str, Any]:
    """Start and end on the report prompts, and the path between."""
    place = folder / "runs" / "r1" / "evaluations" / f"r1-{algorithm}" / "evaluations.parquet"
    path = pd.read_parquet(place)
    path = path[path["split"] == "report"].sort_values("step")
    start, end = path.iloc[0], path.iloc[-1]
    summary = artifacts.read_json(folder / "runs/r1/metrics" / f"r1-{algorithm}-policy.json")
    return {
        "algorithm": algorithm,
        "proxy_start": start["proxy_mean"],
        "proxy": end["proxy_mean"],
        "proxy_se": (start["proxy_se"] ** 2 + end["proxy_se"] ** 2) ** 0.5,
        "gold_start": start["gold_mean"],
        "gold": end["gold_mean"],
        "gold_se": (start["gold_se"] ** 2 + end["gold_se"] ** 2) ** 0.5,
        "kl": end["kl_nats"],
        "win": [end["win_rate"], end["win_rate_lower"], end["win_rate_upper"]],
        "length": end["length_ratio"],
        "stopped": summary["stopped_by_kl_budget_after"],
        "curve": [
            {"kl": row["kl_nats"], "gold": row["gold_mean"], "proxy": row["proxy_mean"]}
            for _, row in path.iterrows()
        ],
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """What a preset did not do: raise the score by three standard errors, beat the start, stay near it."""
    name, gain = result["algorithm"], result["proxy"] - result["proxy_start"]
    found = []
    if not gain > 3 * result["proxy_se"]:
        found.append(
            f"{name}: the score rose by {gain:.2f}, standard error {result['proxy_se']:.2f}"
        )
    if not result["win"][1] > 0.5:
        found.append(f"{name}: wins at least {result['win'][1]:.2f} against its start, not over .5")
    if not result["kl"] <= MOST_NATS:
        found.append(f"{name}: {result['kl']:.1f} nats from its start, more than {MOST_NATS:g}")
    return found


def table(results: list[dict[str, Any]], seed: int) -> str:
    start = results[0]
    lines = [
        f"Seed {seed}, {start['proxy_start']:.2f} proxy and {start['gold_start']:.2f} gold at the start; report "
        "prompts, last checkpoint; gains with the standard error of a difference.",
        "",
        "| preset | proxy gain | gold gain | KL (nats) | win rate (95 %) | length ratio | ended by the budget |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        win, lower, upper = r["win"]
        stopped = "no" if r["stopped"] is None else f"after step {r['stopped']}"
        lines.append(
            f"| `{r['algorithm']}` | {r['proxy'] - r['proxy_start']:+.2f} ({r['proxy_se']:.2f}) "
            f"| {r['gold'] - r['gold_start']:+.2f} ({r['gold_se']:.2f}) | {r['kl']:.1f} "
            f"| {win:.2f} ({lower:.2f} to {upper:.2f}) | {r['length']:.2f} | {stopped} |"
        )
    missed = [line for r in results for line in failures(r)]
    lines += ["", "Failed: " + ("; ".join(missed) if missed else "none.")]
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Gold gain against KL: where each preset ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for r in results:
        kind = PRESETS[r["algorithm"]]["kind"]
        colour = {"rl": "#3b6fb6", "preference": "#c2562d", "online_preference": "#3a8f5c"}[kind]
        curve = [(p["kl"], p["gold"] - r["gold_start"]) for p in r["curve"]]
        axes.plot(*zip(*curve, strict=True), color=colour, alpha=0.3, linewidth=1)
        axes.plot(*curve[-1], "o", color=colour)
        axes.annotate(
            r["algorithm"], curve[-1], xytext=(4, 3), textcoords="offset points", fontsize=8
        )
    axes.set(
        xlabel="KL to the start, nats per answer",
        ylabel="gain in gold reward",
        title="Where each preset ends (blue: RL, orange: pairs, green: own pairs)",
    )
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def write(results: list[dict[str, Any]], seed: int) -> None:
    page = DOCS / "algorithms.md"
    text = page.read_text(encoding="utf-8")
    start, end = "<!-- presets: written by benchmarks/presets.py -->", "<!-- end of presets -->"
    before, after = text.split(start)[0], text.split(end)[1]
    artifacts.write_text(page, f"{before}{start}\n\n{table(results, seed)}\n{end}{after}")
    draw(results, DOCS / "figures" / "presets.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    arguments = parser.parse_args()
    folder = STUDY / f"seed-{arguments.seed}"
    run(folder, arguments.seed, arguments.only)
    results = [read(folder, name) for name in arguments.only]
    if arguments.seed == 0 and arguments.only == list(PRESETS):
        write(results, arguments.seed)
    print(table(results, arguments.seed))
    if any(failures(r) for r in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
