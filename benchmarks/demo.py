"""The embedded default over seeds: does every stage learn what docs/demo.md says, and does weak KL get gamed?

    python -m benchmarks.demo                    seeds 0 1 2, results into docs/demo.md and docs/figures/
    python -m benchmarks.demo --seeds 0 --check  one seed, exit code 1 if a threshold is missed

Each seed is a project of its own under .studies/demo/, run by plain `dvc repro`: an interrupted study goes on where it
stopped. Beside the default round it runs what the default leaves out: a zero-KL candidate, a second round, and the
second round's two controls (the old reward model; as many extra labels, but on the fine-tuned policy's samples).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import workspace
from rlhf import artifacts, config, tracking
from rlhf.lifeline import ident

STUDY = workspace.ROOT / ".studies" / "demo"
DOCS = workspace.ROOT / "docs"
NO_KL, SECOND, OLD_REWARD, MORE_LABELS = (
    "r1-ppo_no_kl",
    "r2-ppo",
    "r2-ppo_old_reward",
    "r2_more-ppo",
)


def extend(pipeline: dict[str, Any], seed: int) -> None:
    """The default, plus the zero-KL candidate, the second round and its controls."""
    rounds, candidates = pipeline["rounds"], pipeline["candidates"]
    pipeline["seed"] = seed
    pipeline["project"] = f"demo-seed-{seed}"
    for name, sample_from in (("r2", "r1"), ("r2_more", "r0")):
        rounds[name] = copy.deepcopy(rounds["r1"]) | {"from": "r1", "sample_from": sample_from}
    ppo = candidates["r1-ppo"]
    free = {"steps": 27, "checkpoint_every": 3, "kl": None, "reference": "none"}
    candidates[NO_KL] = copy.deepcopy(ppo) | free
    for name, home, source in (
        (SECOND, "r2", "r2/reward_model"),
        (OLD_REWARD, "r2", "r1/reward_model"),
        (MORE_LABELS, "r2_more", "r2_more/reward_model"),
    ):
        candidates[name] = copy.deepcopy(ppo) | {"round": home, "from": "r1", "learns_from": source}


def run_seed(seed: int) -> None:
    """Every stage of one seed. Zero-KL and controls are not for promotion: the gate reads the default ones."""
    folder = workspace.create(STUDY / f"seed-{seed}", lambda pipeline: extend(pipeline, seed))
    workspace.run(
        folder,
        "dvc",
        "repro",
        "--quiet",
        ROUNDHOUSE_FORWARDER=ident(os.getpid()),
        MLFLOW_TRACKING_URI="",
    )
    print(f"seed {seed}: done", file=sys.stderr)


# --- reading what was learned --------------------------------------------------------------------


def evaluation(folder: Path, candidate: str) -> pd.DataFrame:
    home = candidate.split("-")[0]
    return pd.read_parquet(
        folder / "runs" / home / "evaluations" / candidate / "evaluations.parquet"
    )


def report(folder: Path, candidate: str, checkpoint: str | None = None) -> pd.Series:
    """The report-prompt row of a checkpoint; the last one unless named."""
    table = evaluation(folder, candidate)
    rows = table[table["split"] == "report"].sort_values("step")
    return rows.iloc[-1] if checkpoint is None else rows.set_index("checkpoint").loc[checkpoint]


def summarise(seed: int) -> dict[str, Any]:
    folder = STUDY / f"seed-{seed}"
    reward = artifacts.read_json(folder / "runs/r1/metrics/reward_model.json")
    start = report(folder, "r1-ppo", "incoming")
    result: dict[str, Any] = {
        "seed": seed,
        "sft_gold": start["gold_mean"],
        "sft_gold_se": start["gold_se"],
        "reward_model_accuracy": reward["accuracy"],
        "reward_model_gold_order": reward["gold_order_accuracy"],
        "label_ceiling": reward["label_ceiling"],
        "calibration_error": reward["calibration_error"],
        "promoted": artifacts.read_json(folder / "runs/r1/metrics/decision.json")["promoted"],
    }
    for name in ("ppo", "grpo", "dpo"):
        row = report(folder, f"r1-{name}")
        result[name] = _numbers(row) | {"gain": row["gold_mean"] - start["gold_mean"]}
    result["no_kl"] = _gaming(folder, result["ppo"]["gold"])
    before = report(folder, SECOND, "incoming")
    for key, name in (("second", SECOND), ("old_reward", OLD_REWARD), ("more_labels", MORE_LABELS)):
        row = report(folder, name)
        result[key] = _numbers(row) | {"gain": row["gold_mean"] - before["gold_mean"]}
    result["second_start"] = before["gold_mean"]
    result["reward_models_on_r1_policy"] = _reward_models(folder)
    return json.loads(json.dumps(result, default=float))


def _numbers(row: pd.Series) -> dict[str, float]:
    names = {"gold": "gold_mean", "gold_se": "gold_se", "proxy": "proxy_mean", "kl": "kl_nats"}
    names |= {"win_rate": "win_rate", "win_lower": "win_rate_lower", "win_upper": "win_rate_upper"}
    return {short: float(row[name]) for short, name in names.items()}


def _gaming(folder: Path, with_kl: float) -> dict[str, Any]:
    """The zero-KL path: where gold peaks, where it ends, and what choosing by proxy costs."""
    table = evaluation(folder, NO_KL)
    by_split = {
        split: table[table["split"] == split].sort_values("step").set_index("checkpoint")
        for split in ("choose", "report")
    }
    path = by_split["report"]
    peak, end = path.loc[path["gold_mean"].idxmax()], path.iloc[-1]
    choose = by_split["choose"].drop("incoming")
    by_gold, by_proxy = choose["gold_mean"].idxmax(), choose["proxy_mean"].idxmax()
    return {
        "peak_gold": peak["gold_mean"],
        "peak_kl": peak["kl_nats"],
        "peak_step": peak["step"],
        "end_gold": end["gold_mean"],
        "end_kl": end["kl_nats"],
        "proxy_at_peak": peak["proxy_mean"],
        "proxy_end": end["proxy_mean"],
        "below_with_kl": with_kl - end["gold_mean"],
        "report_gold_chosen_by_gold": path.loc[by_gold, "gold_mean"],
        "report_gold_chosen_by_proxy": path.loc[by_proxy, "gold_mean"],
    }


def _reward_models(folder: Path) -> dict[str, float]:
    """Gold-order accuracy of three committees on held-out pairs of the round-1 policy's answers."""
    import torch

    from rlhf.data.book import PromptBook
    from rlhf.data.text import TextCodec, load_tokenizer
    from rlhf.rewards.committee import Committee

    os.chdir(folder)
    pipeline = config.load("pipeline.yaml")
    codec = TextCodec(load_tokenizer(pipeline.model, Path("runs/r1/promoted")), pipeline.model)
    book = PromptBook(Path("data/tables/prompts.parquet"), codec)
    pairs = pd.read_parquet("runs/r2/preferences/pairs.parquet")
    pairs = pairs[pairs["heldout"] & (pairs["round"] == "r2") & (pairs["gold_margin"] != 0)]
    prompts = [book.tokens(key) for key in pairs["prompt_id"]]
    result = {"pairs": float(len(pairs))}
    for name in ("r1", "r2_more", "r2"):
        committee = Committee.load(
            Path(f"runs/{name}/reward_model"), codec, pipeline.model, torch.device("cpu")
        )
        score = committee.scorer(config.Part(kind="mean"))
        chosen, rejected = (
            score(prompts, pairs[side].tolist(), pairs[f"{side}_ended"].tolist())
            for side in ("chosen", "rejected")
        )
        right = (chosen > rejected).numpy() == (pairs["gold_margin"] > 0).to_numpy()
        result[name] = float(right.mean())
    return result


# --- thresholds ----------------------------------------------------------------------------------


def thresholds(r: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, value, least) for each claim of docs/demo.md about the default; margins are wide on purpose."""
    free = r["no_kl"]
    return [
        ("reward-model accuracy on held-out labels", r["reward_model_accuracy"], 0.66),
        ("reward-model accuracy against gold order", r["reward_model_gold_order"], 0.67),
        (
            "label ceiling above the reward model's accuracy",
            r["label_ceiling"] - r["reward_model_accuracy"],
            0.0,
        ),
        ("gold gain of ppo", r["ppo"]["gain"], 0.5),
        ("gold gain of grpo", r["grpo"]["gain"], 0.4),
        ("gold gain of dpo", r["dpo"]["gain"], 0.35),
        (
            "zero KL: proxy at the end over proxy at gold's peak",
            free["proxy_end"] - free["proxy_at_peak"],
            0.2,
        ),
        ("zero KL: gold's peak over its end", free["peak_gold"] - free["end_gold"], 0.7),
        ("zero KL: gold at the end below the run with KL", free["below_with_kl"], 0.8),
        ("zero KL: proxy at the end", free["proxy_end"], 1.2),
        (
            "zero KL: choosing by gold over choosing by proxy, report gold",
            free["report_gold_chosen_by_gold"] - free["report_gold_chosen_by_proxy"],
            0.5,
        ),
        ("gold gain of round 2 over round 1", r["second"]["gain"], 0.2),
    ]


def missed(results: list[dict[str, Any]]) -> list[str]:
    return [
        f"seed {r['seed']}: {what} is {value:.3f}, must be at least {least:g}"
        for r in results
        for what, value, least in thresholds(r)
        if not value >= least
    ]


# --- writing -------------------------------------------------------------------------------------


def write(results: list[dict[str, Any]]) -> None:
    """Tables between the markers of docs/demo.md, curves into docs/figures/."""
    page = DOCS / "demo.md"
    text = page.read_text(encoding="utf-8")
    start, end = "<!-- results: written by benchmarks/demo.py -->", "<!-- end of results -->"
    before, after = text.split(start)[0], text.split(end)[1]
    artifacts.write_text(page, f"{before}{start}\n\n{tables(results)}\n{end}{after}")
    artifacts.write_json(DOCS / "figures" / "demo.json", results)
    draw(results, DOCS / "figures" / "demo.png")


def tables(results: list[dict[str, Any]]) -> str:
    seeds = " | ".join(f"seed {r['seed']}" for r in results)
    lines = [f"| quantity | {seeds} |", "|---|" + "---|" * len(results)]

    def row(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    row(
        "gold after SFT (standard error)",
        [f"{r['sft_gold']:.2f} ({r['sft_gold_se']:.2f})" for r in results],
    )
    row(
        "reward model: accuracy on held-out labels (ceiling of the labels)",
        [f"{r['reward_model_accuracy']:.3f} ({r['label_ceiling']:.3f})" for r in results],
    )
    row(
        "reward model: accuracy against gold's order",
        [f"{r['reward_model_gold_order']:.3f}" for r in results],
    )
    row("reward model: calibration error", [f"{r['calibration_error']:.3f}" for r in results])
    for name in ("ppo", "grpo", "dpo"):
        row(
            f"{name}: gold / proxy / KL (nats)",
            [
                f"{r[name]['gold']:.2f} / {r[name]['proxy']:.2f} / {r[name]['kl']:.1f}"
                for r in results
            ],
        )
        row(
            f"{name}: win rate against SFT (95 %)",
            [
                f"{r[name]['win_rate']:.2f} ({r[name]['win_lower']:.2f} to {r[name]['win_upper']:.2f})"
                for r in results
            ],
        )
    row("promoted", [str(r["promoted"]) for r in results])
    free = [r["no_kl"] for r in results]
    row(
        "ppo without KL: gold's peak at KL (step)",
        [f"{f['peak_gold']:.2f} at {f['peak_kl']:.1f} ({f['peak_step']:.0f})" for f in free],
    )
    row(
        "ppo without KL: gold / proxy / KL at the end",
        [f"{f['end_gold']:.2f} / {f['proxy_end']:.2f} / {f['end_kl']:.0f}" for f in free],
    )
    row(
        "ppo without KL: proxy at gold's peak, at the end",
        [f"{f['proxy_at_peak']:.2f}, {f['proxy_end']:.2f}" for f in free],
    )
    row(
        "ppo without KL: report gold of the checkpoint chosen by gold / by proxy",
        [
            f"{f['report_gold_chosen_by_gold']:.2f} / {f['report_gold_chosen_by_proxy']:.2f}"
            for f in free
        ],
    )
    row("round 2: gold at the start", [f"{r['second_start']:.2f}" for r in results])
    for key, label in (
        ("second", "round 2: gold with new labels"),
        ("more_labels", "control: as many extra labels on the fine-tuned policy's samples"),
        ("old_reward", "control: the old reward model, no new labels"),
    ):
        row(
            f"{label} (standard error)",
            [f"{r[key]['gold']:.2f} ({r[key]['gold_se']:.2f})" for r in results],
        )
    for other, label in (("old_reward", "old reward model"), ("more_labels", "extra labels")):
        row(
            f"round 2 over the {label} control (standard error)",
            [_difference(r, other) for r in results],
        )
    rm = [r["reward_models_on_r1_policy"] for r in results]
    row(
        "gold-order accuracy on the round-1 policy's pairs: first / extra labels / round 2",
        [f"{m['r1']:.3f} / {m['r2_more']:.3f} / {m['r2']:.3f}" for m in rm],
    )
    lines += ["", "| claim | least | " + seeds + " |", "|---|---|" + "---|" * len(results)]
    for index, (what, _, least) in enumerate(thresholds(results[0])):
        cells = [f"{thresholds(r)[index][1]:.3f}" for r in results]
        lines.append(f"| {what} | {least:g} | " + " | ".join(cells) + " |")
    failures = missed(results)
    lines += ["", "Missed: " + ("; ".join(failures) if failures else "none.")]
    return "\n".join(lines) + "\n"


def _difference(r: dict[str, Any], other: str) -> str:
    value = r["second"]["gold"] - r[other]["gold"]
    error = math.hypot(r["second"]["gold_se"], r[other]["gold_se"])
    return f"{value:+.2f} ({error:.2f})"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Gold and proxy against sqrt(KL): the three candidates, and PPO without KL, a column per seed."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(4.2 * len(results), 6.4), layout="constrained")
    grid = figure.subplots(2, len(results), sharey="row", squeeze=False)
    styles = {
        "r1-ppo": ("#0072B2", "o", "ppo"),
        "r1-grpo": ("#009E73", "^", "grpo"),
        "r1-dpo": ("#CC79A7", "D", "dpo"),
        NO_KL: ("#D55E00", "s", "ppo without KL"),
    }
    for column, result in enumerate(results):
        folder = STUDY / f"seed-{result['seed']}"
        for line, quantity in enumerate(("gold", "proxy")):
            axes = grid[line][column]
            for name, (colour, marker, label) in styles.items():
                table = evaluation(folder, name)
                rows = table[table["split"] == "report"].sort_values("step")
                axes.errorbar(
                    rows["kl_nats"].clip(lower=0) ** 0.5,
                    rows[f"{quantity}_mean"],
                    1.96 * rows[f"{quantity}_se"],
                    color=colour,
                    marker=marker,
                    markersize=4,
                    capsize=2,
                    label=label,
                )
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            axes.set_title(f"{quantity}, seed {result['seed']}", fontsize=10)
            axes.set_xlabel("square root of KL to SFT (nats per answer)")
        grid[0][column].legend(frameon=False, fontsize=8)
    grid[0][0].set_ylabel("gold: what is meant")
    grid[1][0].set_ylabel("proxy: what is optimised")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="seeds side by side")
    parser.add_argument(
        "--check", action="store_true", help="only check the thresholds, write nothing"
    )
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run_seed, arguments.seeds))
    for seed in arguments.seeds:
        tracking.Forwarder(STUDY / f"seed-{seed}").drain()
    results = [summarise(seed) for seed in arguments.seeds]
    if not arguments.check:
        write(results)
    print(tables(results))
    if missed(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
