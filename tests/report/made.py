"""Rounds made of numbers, with what is true of them known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlhf import contracts
from rlhf.evaluation.measure import summarise

GOLD = (1.6, 0.9)  # alpha, beta: a peak at exp(1.6 / .9 - 1) = 2.2, 4.7 nats
PROXY = (0.9, 0.1)


def reward(d: float, coefficients: tuple[float, float]) -> float:
    alpha, beta = coefficients
    return 0.0 if d == 0 else d * (alpha - beta * np.log(d))


def answers(
    rng: np.random.Generator,
    d: float,
    *,
    prompts: int = 60,
    samples: int = 3,
    level: np.ndarray | None = None,
    gold: bool = True,
    longer: float = 0.0,
    shift: float = 0.0,
) -> pd.DataFrame:
    """Answers of a policy at distance d; `rep` is the part of gold that falls, `topic` the one that rises."""
    level = np.zeros(prompts) if level is None else level
    rows = prompts * samples
    total = reward(d, GOLD) + shift + np.repeat(level, samples) + rng.normal(0, 0.7, rows)
    rep = -0.3 * d + rng.normal(0, 0.1, rows)
    members = [reward(d, PROXY) + rng.normal(0, 0.5, rows) for _ in range(2)]
    return pd.DataFrame(
        {
            "prompt_id": np.repeat([contracts.prompt_id(f"prompt {i}") for i in range(prompts)], samples),
            "response": [f"answer {i} <b>&" for i in range(rows)],
            "ended": True,
            "num_tokens": np.maximum(1, np.round(20 + longer + rng.normal(0, 3, rows))).astype(int),
            "proxy": np.mean(members, axis=0),
            "proxy_std": np.std(members, axis=0),
            "proxy/member_0": members[0],
            "proxy/member_1": members[1],
            "gold": total if gold else np.nan,
            **({"gold/rep": rep, "gold/topic": total - rep} if gold else {}),
            "kl": d**2 * rng.gamma(4, 0.25, rows),
            "entropy": 2.0,
            "logprob": -40.0,
        }
    )  # fmt: skip


def candidate(
    folder: Path,
    name: str,
    distances: Sequence[float] = (0.0, 0.7, 1.4, 2.2, 3.0, 4.0, 5.0),
    *,
    seed: int = 0,
    change: Callable[[pd.DataFrame], pd.DataFrame] = lambda table: table,
    **options: Any,
) -> None:
    """The evaluation of a candidate whose first distance is the start's, and whose last checkpoint is chosen."""
    rng = np.random.default_rng(seed)
    prompts = options.get("prompts", 60)
    level = np.random.default_rng(99).normal(0, 1, prompts)
    tables = {}
    for number, d in enumerate(distances):
        checkpoint = "incoming" if number == 0 else f"step-{number:05d}"
        # The incoming policy's answers are the same whichever candidate they are compared with.
        source = np.random.default_rng(8) if number == 0 else rng
        table = change(answers(source, d, level=level, **options))
        for split in ("choose", "report"):
            tables[checkpoint, split] = table
    rows = []
    for (checkpoint, split), table in tables.items():
        summary = (
            summarise(
                table,
                tables["incoming", split],
                judge="gold:made" if options.get("gold", True) else "proxy",
                num_bootstrap=100,
                seed=0,
            )
            if prompts > 1
            else _summary(table, options.get("gold", True))
        )
        step = 0 if checkpoint == "incoming" else int(checkpoint[5:])
        rows.append(
            {"checkpoint": checkpoint, "step": step, "split": split, **summary, "alarms": 0.0}
        )
    table = pd.DataFrame(rows)
    table["selected"] = table["checkpoint"] == f"step-{len(distances) - 1:05d}"
    place = folder / "evaluations" / name
    place.mkdir(parents=True)
    contracts.write(table, place / "evaluations.parquet", contracts.EVALUATIONS)
    together = pd.concat(
        [t.assign(checkpoint=c, split=s) for (c, s), t in tables.items()], ignore_index=True
    )
    contracts.write(together, place / "answers.parquet", contracts.ANSWERS)


def _summary(table: pd.DataFrame, gold: bool) -> dict[str, Any]:
    """What `summarise` refuses to give for one prompt."""
    none = dict.fromkeys(["proxy_se", "gold_se", "kl_se"])
    wins = {
        f"win_rate{which}{end}": 0.5
        for which in ("", "_initial")
        for end in ("", "_lower", "_upper")
    }
    return {
        "num_prompts": 1, "num_samples": len(table), "proxy_mean": table["proxy"].mean(),
        "proxy_std_members": 0.1, "gold_mean": table["gold"].mean() if gold else None, **none, **wins,
        "kl_nats": table["kl"].mean(), "length_mean": 20.0, "length_ratio": 1.0, "entropy_nats": 2.0,
        "ended_fraction": 1.0, "judge": "gold:made" if gold else "proxy",
    }  # fmt: skip


def best_of_n(folder: Path, *, prompts: int = 60, samples: int = 32, gold: bool = True) -> None:
    """Gold follows the proxy up to a value, and falls beyond it."""
    from tasks.best_of_n import best_of

    rng = np.random.default_rng(5)
    table = answers(rng, 0.0, prompts=prompts, samples=samples)
    proxy = rng.normal(0, 1, len(table))
    meant = np.where(proxy < 1, proxy, 2 - 2 * (proxy - 0.5)) + rng.normal(0, 0.2, len(table))
    table = table.drop(columns=["gold/rep", "gold/topic"]).assign(
        proxy=proxy, gold=meant if gold else np.nan
    )
    place = folder / "best_of_n"
    place.mkdir(parents=True)
    kept = table.assign(checkpoint="start", split="report")
    contracts.write(kept, place / "answers.parquet", contracts.ANSWERS)
    contracts.write(best_of(table, has_gold=gold), place / "best_of_n.parquet", contracts.BEST_OF_N)


def reward_model(folder: Path, *, pairs: int = 400, gold: bool = True, prompts: int = 50) -> None:
    """A committee whose margin is gold's with noise; labels are noisy too."""
    rng = np.random.default_rng(3)
    true = rng.normal(0, 1.5, pairs)
    label = np.where(rng.random(pairs) < 1 / (1 + np.exp(-2 * true)), 1, -1)
    margins = label * true + rng.normal(0, 0.8, (2, pairs))
    chosen = rng.integers(10, 40, pairs)
    table = pd.DataFrame(
        {
            "pair_id": [f"pair-{i}" for i in range(pairs)],
            "prompt_id": [contracts.prompt_id(f"prompt {i % prompts}") for i in range(pairs)],
            "round": "r1",
            "tie": False,
            "margin": margins.mean(0),
            "margin/member_0": margins[0],
            "margin/member_1": margins[1],
            "chosen_score": margins.mean(0) / 2,
            "rejected_score": -margins.mean(0) / 2,
            "chosen_tokens": chosen,
            "rejected_tokens": rng.integers(10, 40, pairs),
            "chosen_first": rng.random(pairs) < 0.5,
            "gold_margin": label * true if gold else np.nan,
        }
    )
    place = folder / "reward_model"
    place.mkdir(parents=True)
    contracts.write(table, place / "scored_pairs.parquet", contracts.SCORED_PAIRS)
