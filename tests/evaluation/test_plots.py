"""Figures: written, the same bytes for the same numbers, and robust at the edges of what is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rlhf.evaluation import plots, statistics

PNG = b"\x89PNG\r\n\x1a\n"


def path_of(**columns: Any) -> pd.DataFrame:
    """The incoming policy and two checkpoints, on both splits."""
    values: dict[str, Any] = {
        "checkpoint": ["incoming", "step-00001", "step-00002"],
        "step": [0, 1, 2],
        "kl_nats": [0.0, 1.0, 4.0],
        "proxy_mean": [0.0, 0.5, 0.9],
        "proxy_se": [0.1, 0.1, 0.1],
        "gold_mean": [1.0, 1.2, 1.1],
        "gold_se": [0.05, 0.05, 0.05],
        "num_prompts": [10, 10, 10],
        "num_samples": [40, 20, 40],
        "selected": [False, False, True],
    }
    report = pd.DataFrame(values | columns)
    choose = report.assign(split="choose", proxy_mean=99.0)
    return pd.concat([choose, report.assign(split="report")], ignore_index=True)


def drawn(tmp_path: Path, table: pd.DataFrame, name: str = "figure.png") -> bytes:
    plots.over_optimisation(table, "r1-ppo", tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(PNG)
    return content


def test_the_same_numbers_give_the_same_bytes_and_others_do_not(tmp_path: Path) -> None:
    first = drawn(tmp_path, path_of())
    assert drawn(tmp_path, path_of(), "again.png") == first
    assert drawn(tmp_path, path_of().sample(frac=1, random_state=1)) == first
    assert drawn(tmp_path, path_of(gold_mean=[1.0, 1.2, 1.4])) != first
    assert drawn(tmp_path, path_of(selected=[False, True, False])) != first


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[t["checkpoint"] == "step-00002"],  # one checkpoint
        lambda t: t.assign(gold_mean=None, gold_se=None),
        lambda t: t.assign(gold_mean=np.nan, gold_se=np.nan),
        lambda t: t.assign(kl_nats=0.0),
        lambda t: t.assign(kl_nats=-1e-9),
        lambda t: t.assign(proxy_se=None, gold_se=None),
        lambda t: t.assign(proxy_se=0.0, gold_se=0.0),
        lambda t: t.assign(selected=False),
        lambda t: t.assign(proxy_mean=0.0, gold_mean=0.0, kl_nats=0.0),
        lambda t: t.assign(kl_nats=[0, 1e6, 1e9] * 2),
    ],
)
def test_edges_are_drawn(tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    assert len(drawn(tmp_path, change(path_of()))) > 5000


def test_without_gold_there_is_no_gold_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[list[str]] = []

    def look(figure: Any, path: Path) -> None:
        labels.append([text.get_text() for text in figure.axes[0].get_legend().get_texts()])

    monkeypatch.setattr(plots, "_save", look)
    plots.over_optimisation(path_of(), "r1-ppo", tmp_path / "x.png")
    plots.over_optimisation(path_of(gold_mean=np.nan), "r1-ppo", tmp_path / "x.png")
    assert any("gold" in label for label in labels[0])
    assert not any("gold" in label for label in labels[1])
    assert any("step-00002" in label for label in labels[0])


def test_what_is_drawn_are_report_rows_at_the_root_of_kl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: seen.append(figure.axes[0]))
    plots.over_optimisation(path_of(), "r1-ppo", tmp_path / "x.png")
    curve = next(c for c in seen[0].containers if "proxy" in c.get_label())
    assert curve.lines[0].get_xdata().tolist() == [0.0, 1.0, 2.0]
    assert curve.lines[0].get_ydata().tolist() == [0.0, 0.5, 0.9]


@pytest.mark.parametrize("error", [None, 0.123])
@pytest.mark.parametrize(
    ("probability", "outcome"),
    [([0.1, 0.2, 0.8, 0.9], [0.0, 0.0, 1.0, 1.0]), ([0.5], [1.0]), ([0.0, 1.0], [1.0, 0.0])],
)
def test_reliability_is_drawn(
    tmp_path: Path, probability: list[float], outcome: list[float], error: float | None
) -> None:
    table = statistics.reliability(probability, outcome, bins=10)
    for name in ("a.png", "b.png"):
        plots.reliability(table, error, tmp_path / name)
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(PNG)
    assert content == (tmp_path / "b.png").read_bytes()
