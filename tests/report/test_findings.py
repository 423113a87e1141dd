"""What the report finds in rounds of which the truth is known, and what it leaves unsaid where data are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import made
import numpy as np
import pandas as pd
import pytest

from rlhf import contracts
from rlhf.evaluation.over_optimisation import Fit
from rlhf.evaluation.statistics import Interval
from rlhf.report import findings
from rlhf.report.findings import BestOfN, Comparison, Findings, Missing, RewardModel, find

PPO = {"r1-ppo": "ppo"}


def found(folder: Path, candidates: dict[str, str] | None = None, **options: Any) -> Findings:
    settings: dict[str, Any] = {"starts_as": "incoming", "num_bootstrap": 300, "seed": 0, **options}
    return find(folder, "r1", candidates or PPO, **settings)


@pytest.fixture(scope="module")
def gamed(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """A candidate that went past gold's peak, and one that stopped before it."""
    folder = tmp_path_factory.mktemp("gamed")
    made.candidate(folder, "r1-ppo")
    made.candidate(folder, "r1-grpo", (0.0, 0.3, 0.6, 0.9, 1.5), seed=1)
    made.reward_model(folder)
    made.best_of_n(folder)
    return found(folder, {**PPO, "r1-grpo": "grpo"})


def inside(interval: Any, value: float) -> bool:
    assert isinstance(interval, Interval), interval
    return interval.lower <= value <= interval.upper


def test_the_curves_of_gold_and_proxy(gamed: Findings) -> None:
    path = gamed.paths[0]
    assert isinstance(path.gold, Fit)
    assert isinstance(path.proxy, Fit)
    assert inside(path.gold.alpha, made.GOLD[0])
    assert inside(path.gold.beta, made.GOLD[1])
    assert path.gold.peak_is_measured
    assert inside(path.gold.peak, np.exp(made.GOLD[0] / made.GOLD[1] - 1))
    assert inside(path.proxy.alpha, made.PROXY[0])
    assert not path.proxy.peak_is_measured  # at exp(8) root nats
    assert [p.checkpoint for p in path.points] == [f"step-{n:05d}" for n in range(1, 7)]
    for point, d in zip(path.points, (0.7, 1.4, 2.2, 3.0, 4.0, 5.0), strict=True):
        assert point.distance == pytest.approx(d, rel=0.1)
        assert inside(point.kl, d**2) or point.kl.value == pytest.approx(d**2, rel=0.1)
        assert len(point.members) == 2


def test_what_was_left_on_the_table(gamed: Findings) -> None:
    path, other = gamed.paths
    assert path.best in ("step-00003", "step-00004")
    assert path.chosen.checkpoint == "step-00006"
    lost = made.reward(2.2, made.GOLD) - made.reward(5.0, made.GOLD)
    assert isinstance(path.left, Interval)
    assert path.left.lower > 0
    assert path.left.value == pytest.approx(lost, abs=0.3)
    assert other.best == other.chosen.checkpoint == "step-00004"
    assert other.left == Interval(0.0, 0.0, 0.0)


def test_proxy_and_gold_part_where_they_do(gamed: Findings) -> None:
    path, other = gamed.paths
    assert isinstance(path.parted, Interval)
    assert isinstance(other.parted, Interval)
    assert path.parted.upper < 0
    assert other.parted.value > path.parted.value


def test_the_part_of_gold_that_fell_is_named(gamed: Findings) -> None:
    parts = {part.name: part for part in gamed.paths[0].parts}  # type: ignore[union-attr]
    assert parts["rep"].gamed
    assert parts["rep"].change.value == pytest.approx(-0.3 * 5, abs=0.05)
    assert isinstance(parts["topic"].after_best, Interval)
    assert "gold was highest at the last" in gamed.paths[1].parts[0].after_best.reason  # type: ignore[union-attr, index]


def test_the_distance_is_to_the_policy_that_candidates_start_as(tmp_path: Path) -> None:
    """With `init: initial` that is r0's, and the incoming policy is no point of the path."""
    made.candidate(tmp_path, "r1-ppo")
    place = tmp_path / "evaluations/r1-ppo/answers.parquet"
    table = contracts.read(place, contracts.ANSWERS)
    initial = table[table["checkpoint"] == "incoming"].assign(checkpoint="initial")
    shifted = initial.assign(gold=initial["gold"] - 2.0)
    contracts.write(pd.concat([table, shifted], ignore_index=True), place, contracts.ANSWERS)
    to_incoming = found(tmp_path).paths[0]
    to_initial = found(tmp_path, starts_as="initial").paths[0]
    assert (to_incoming.start, to_initial.start) == ("incoming", "initial")
    for one, other in zip(to_incoming.points, to_initial.points, strict=True):
        assert other.gold.value == pytest.approx(one.gold.value + 2)  # type: ignore[union-attr]


def test_who_won(gamed: Findings) -> None:
    who = gamed.comparison
    assert isinstance(who, Comparison)
    assert who.policies == ["incoming", "r1-ppo", "r1-grpo"]
    assert who.ratings["policy"].iloc[0] == "r1-grpo"
    assert len(who.matrix) == 6
    assert set(who.controlled) == {"r1-ppo", "r1-grpo"}
    assert 0.02 < who.detectable < 0.2
    assert who.prompts == 60


def test_length_is_taken_out_of_the_win_rate(tmp_path: Path) -> None:
    """Scores that grow with length, and a candidate whose answers are longer and no better."""

    def by_length(table: pd.DataFrame) -> pd.DataFrame:
        noise = np.random.default_rng(len(table)).normal(0, 1.5, len(table))
        return table.assign(gold=0.3 * table["num_tokens"] + noise[::-1] + table["gold/topic"])

    made.candidate(
        tmp_path, "r1-ppo", (0.0, 0.001, 0.002, 0.003),
        change=lambda t: by_length(t.assign(num_tokens=t["num_tokens"] + (2 if t["kl"].sum() > 0 else 0))),
    )  # fmt: skip
    longer = found(tmp_path).comparison
    assert isinstance(longer, Comparison)
    rate = longer.matrix.set_index(["policy", "against"]).loc[("r1-ppo", "incoming"), "win_rate"]
    assert rate > 0.6
    controlled = longer.controlled["r1-ppo"]
    assert isinstance(controlled, Interval)
    assert abs(controlled.value - 0.5) < rate - 0.5


def test_what_the_reward_model_knows(gamed: Findings) -> None:
    model = gamed.reward_model
    assert isinstance(model, RewardModel)
    assert model.pairs == 400
    assert 0.6 < model.accuracy.value < 0.95
    assert isinstance(model.ceiling, float)
    assert model.ceiling > model.accuracy.lower
    assert not isinstance(model.by_margin, Missing)
    assert [b.count for b in model.by_margin] == [100] * 4
    accuracies = [b.accuracy.value for b in model.by_margin]
    assert accuracies[-1] > accuracies[0]
    assert not isinstance(model.by_length, Missing)
    assert sum(b.count for b in model.by_length) == 400


def test_the_best_of_n(gamed: Findings) -> None:
    best = gamed.best_of_n
    assert isinstance(best, BestOfN)
    assert best.ns == [1, 2, 4, 8, 16, 32]
    assert best.samples == 32
    assert best.best in (2, 4)  # a gold that falls where the proxy exceeds 1
    assert best.kl == pytest.approx(best.bound)  # no answer has weight
    assert [p.value for p in best.proxy] == sorted(p.value for p in best.proxy)
    assert best.proxy[0].value == pytest.approx(0)
    # The mean of the highest of n normal variables: .564 for two, 1.029 for four.
    assert inside(best.proxy[1], 0.564)
    assert inside(best.proxy[2], 1.029)
    assert isinstance(best.fitted, Fit)
    assert best.fitted.form == "bon"
    assert best.fitted.peak is not None


# --- what cannot be said ---


def reason(value: Any) -> str:
    assert isinstance(value, Missing), value
    return value.reason


def test_no_gold(tmp_path: Path) -> None:
    made.candidate(tmp_path, "r1-ppo", gold=False)
    made.reward_model(tmp_path, gold=False)
    made.best_of_n(tmp_path, gold=False)
    result = found(tmp_path)
    (path,) = result.paths
    assert not result.has_gold
    for value in (path.gold, path.best, path.left, path.parts, path.parted, path.points[0].gold):
        assert reason(value) == "no gold is declared"
    assert isinstance(path.proxy, Fit)
    assert isinstance(result.comparison, Comparison)  # by the proxy, which the page says
    assert isinstance(result.reward_model, RewardModel)
    assert reason(result.reward_model.ceiling) == "no gold is declared"
    assert isinstance(result.best_of_n, BestOfN)
    assert reason(result.best_of_n.gold) == "no gold is declared"
    assert result.best_of_n.best is None


def test_one_checkpoint(tmp_path: Path) -> None:
    made.candidate(tmp_path, "r1-ppo", (0.0, 1.0))
    (path,) = found(tmp_path).paths
    assert "needs 3 points" in reason(path.gold)
    assert path.best == path.chosen.checkpoint


def test_kl_of_zero_everywhere(tmp_path: Path) -> None:
    made.candidate(tmp_path, "r1-ppo", (0.0, 0.0, 0.0, 0.0, 0.0))
    (path,) = found(tmp_path).paths
    assert "needs 3 points" in reason(path.gold)
    assert {point.distance for point in path.points} == {0.0}


def test_one_prompt(tmp_path: Path) -> None:
    made.candidate(tmp_path, "r1-ppo", prompts=1)
    result = found(tmp_path)
    assert "at least two of them" in result.failed["r1-ppo"]
    assert result.paths == []
    assert isinstance(result.comparison, Missing)


def test_scores_that_are_all_equal(tmp_path: Path) -> None:
    def flat(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(
            **{
                c: 1.0
                for c in table.columns
                if c.startswith(("gold", "proxy")) and c != "proxy_std"
            }
        )

    made.candidate(tmp_path, "r1-ppo", change=flat)
    result = found(tmp_path)
    (path,) = result.paths
    assert reason(path.parted) == "all answers of the start score alike"
    assert isinstance(path.gold, Fit)
    assert path.gold.alpha.value == pytest.approx(0)
    assert path.gold.peak is None or not path.gold.peak_is_measured
    who = result.comparison
    assert isinstance(who, Comparison)
    assert (who.matrix["win_rate"] == 0.5).all()
    assert (who.matrix["p_adjusted"] == 1).all()


def test_a_candidate_that_failed(tmp_path: Path) -> None:
    made.candidate(tmp_path, "r1-ppo")
    result = found(tmp_path, {**PPO, "r1-dpo": "dpo"})
    assert [path.candidate for path in result.paths] == ["r1-ppo"]
    assert "r1-dpo/answers.parquet is not there" in result.failed["r1-dpo"]
    assert "scored_pairs.parquet is not there" in reason(result.reward_model)
    assert "best_of_n/answers.parquet is not there" in reason(result.best_of_n)


def test_nothing_at_all(tmp_path: Path) -> None:
    result = found(tmp_path)
    assert reason(result.comparison) == "no candidate was evaluated"
    assert result.paths == []
    assert result.answers == {}


def test_gold_that_is_not_known_of_every_answer(tmp_path: Path) -> None:
    def holes(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(gold=table["gold"].where(np.arange(len(table)) != 185))

    made.candidate(tmp_path, "r1-ppo")
    place = tmp_path / "evaluations/r1-ppo/answers.parquet"
    contracts.write(holes(contracts.read(place, contracts.ANSWERS)), place, contracts.ANSWERS)
    (path,) = found(tmp_path).paths
    assert "not known of every answer" in reason(path.gold)
    assert findings.INCOMING == "incoming"
