"""The training stages on a small labelled set: ties that are learned, averaged weights, and what saves memory."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf import artifacts, config, contracts, tracking
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.learner import Learner
from rlhf.models.policy import enable_gradient_checkpointing, load_policy, save_policy
from rlhf.models.scalar import HEAD_FILE, ScalarModel
from rlhf.models.sequences import Sequences
from rlhf.optimise.rl import Experience, RlTrainer
from rlhf.rewards.committee import Committee
from tasks import policy, reward_model, sft

RAW = config.read_yaml(Path(__file__).parents[2] / "pipeline.yaml")
SPLITS = ["sft", "preferences", "rl", "choose", "report"]


class Tracked:
    """A tracking run that remembers its curves, and takes everything else."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summaries: dict[str, float] = {}

    def __enter__(self) -> Tracked:
        return self

    def __exit__(self, *_: object) -> None: ...

    def metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def summary(self, values: dict[str, float]) -> None:
        self.summaries |= values

    def curve(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self.logged if name in metrics]

    def dataset(self, *_: Any) -> None: ...

    figure = table = resume = dataset

    def position(self) -> int:
        return 0


def answer(good: int, kind: int) -> str:
    """Three words, `good` of them w7."""
    return " ".join(["w7"] * good + [f"w{8 + kind}", f"w{9 + kind}", f"w{10 + kind}"][good:])


def pairs() -> pd.DataFrame:
    """Answers to a question, two by two: win, tie and loss by Davidson's odds of the counts of w7."""
    generator, rows = torch.Generator().manual_seed(0), []
    for group in range(60):
        prompt = f"w{3 + group % 4} w4"
        goods = [(group + i * (1 + group % 2)) % 4 for i in range(3)] + [(group * 3) % 4]
        answers = [answer(good, number % 2) for number, good in enumerate(goods)]
        for first, second in ((0, 1), (1, 2), (2, 3), (3, 0)):
            lead = 0.75 * (goods[first] - goods[second])
            odds = torch.tensor([lead, -0.5, -lead]).exp()
            outcome = int(torch.multinomial(odds, 1, generator=generator))
            better, worse = (second, first) if outcome == 2 else (first, second)
            rows.append(
                {
                    "pair_id": f"{group}-{first}",
                    "group_id": str(group),
                    "prompt_id": contracts.prompt_id(prompt),
                    "prompt": prompt,
                    "chosen": answers[better],
                    "rejected": answers[worse],
                    "chosen_ended": True,
                    "rejected_ended": True,
                    "tie": outcome == 1,
                    "heldout": group >= 48,
                    "round": "r1",
                    "labeler": "test",
                    "gold_margin": float(goods[better] - goods[worse]),
                }
            )
    table = pd.DataFrame(rows)
    return table[table["chosen"] != table["rejected"]]


def prompts(extra: list[str]) -> pd.DataFrame:
    listed = {f"w{5 + i} w{12 + j}": split for i, split in enumerate(SPLITS) for j in range(4)}
    listed |= {text: "preferences" for text in extra}
    return pd.DataFrame(
        {
            "prompt_id": [contracts.prompt_id(text) for text in listed],
            "prompt": list(listed),
            "messages": None,
            "split": list(listed.values()),
        }
    )


def demonstrations() -> pd.DataFrame:
    texts = [f"w{5 + i % 5} w{12 + i % 4}" for i in range(20)]
    return pd.DataFrame(
        {
            "prompt_id": [contracts.prompt_id(text) for text in texts],
            "prompt": texts,
            "response": [answer(i % 4, i % 3) + " w3" * (i % 3) for i in range(20)],
            "ended": True,
            "split": ["heldout" if i % 5 == 4 else "train" for i in range(20)],
        }
    )


def write_project(folder: Path) -> None:
    table = pairs()
    contracts.write(
        prompts(sorted(set(table["prompt"]))), folder / "data/tables/prompts.parquet", contracts.PROMPTS
    )  # fmt: skip
    contracts.write(
        demonstrations(), folder / "data/tables/demonstrations.parquet", contracts.DEMONSTRATIONS
    )
    contracts.write(table, folder / "runs/r1/preferences/pairs.parquet", contracts.PAIRS)
    save_policy(tiny.llama(initializer_range=0.1), tiny.tokenizer(), folder / "base")
    save_policy(tiny.llama(initializer_range=0.1), tiny.tokenizer(), folder / "runs/r0/promoted")
    artifacts.write_json(folder / "runs/r0/metrics/sft.json", {})


def pipeline(
    model: dict[str, Any] | None = None,
    sft: dict[str, Any] | None = None,
    reward_model: dict[str, Any] | None = None,
    **candidates: dict[str, Any],
) -> config.Pipeline:
    """The repository's pipeline on that model and those tables."""
    raw = copy.deepcopy(RAW)
    raw["model"] |= {
        "base": "base", "demo": None, "tokenizer": None, "max_prompt_tokens": 8, "max_response_tokens": 8,
        **(model or {}),
    }  # fmt: skip
    raw["data"] |= {"world": None, "world_options": {}}
    raw["resources"]["threads"] = dict.fromkeys(raw["resources"]["threads"], 1)
    raw["sft"] |= {
        "epochs": 2, "batch_size": 8, "micro_batch_size": 4, "warmup_steps": 0,
        "evaluate_every": 1, "patience": 99, **(sft or {}),
    }  # fmt: skip
    raw["rounds"]["r1"]["preferences"] |= {"ties": "keep", "sampling_batch_size": 16}
    raw["rounds"]["r1"]["reward_model"] |= {
        "members": 2, "epochs": 1, "groups_per_batch": 8, "micro_batch_size": 4,
        "learning_rate": 1e-2, "warmup_steps": 0, "final_lr_fraction": 0.1,
        "num_reference_samples": 16, **(reward_model or {}),
    }  # fmt: skip
    shared = {
        "warmup_steps": 0, "checkpoint_every": 9, "micro_batch_size": 4, "learning_rate": 1e-3
    }  # fmt: skip
    raw["candidates"] = {
        f"r1-{name}": {**RAW["candidates"][f"r1-{base}"], **shared, **body}
        for name, body in candidates.items()
        for base in [body.pop("like")]
    }
    raw["candidates"] = raw["candidates"] or {"r1-dpo": RAW["candidates"]["r1-dpo"]}
    return config.parse(raw)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with tables, policies and a reward model of two members."""
    folder = tmp_path_factory.mktemp("training")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(tracking, "stage_run", lambda *_, **__: Tracked())
        write_project(folder)
        reward_model.run(pipeline(), "r1")
    yield folder
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def tracked(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracked:
    """In a copy of the project; what its stages log."""
    shutil.copytree(template, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    run = Tracked()
    monkeypatch.setattr(tracking, "stage_run", lambda *_, **__: run)
    monkeypatch.setattr(policy, "NUM_PROBES", 8)
    return run


def committee(settings: config.Pipeline) -> Committee:
    out = Path("runs/r1/reward_model")
    codec = TextCodec(load_tokenizer(settings.model, out / "member_0"), settings.model)
    return Committee.load(out, codec, settings.model, tiny.CPU)


# --- ties ---


@pytest.mark.parametrize("kind", ["davidson", "rao_kupper"])
def test_a_model_of_ties_learns_scores_and_how_often_answers_tie(
    kind: str, tracked: Tracked
) -> None:
    sizes = {"epochs": 8, "members": 1, "learning_rate": 1e-2, "final_lr_fraction": 0.3}
    settings = pipeline(reward_model={"loss": {"kind": kind}, **sizes})
    reward_model.run(settings, "r1")
    table = pairs()
    share = float(table[~table["heldout"]]["tie"].mean())
    assert 0.1 < share < 0.25
    report = artifacts.read_json(Path("runs/r1/metrics/reward_model.json"))
    assert report == artifacts.read_json(Path("runs/r1/reward_model/report.json"))
    expected, labelled, loss = (
        tracked.curve(f"reward_model/member_0_{name}")
        for name in ("expected_ties", "labelled_ties", "loss")
    )
    assert len(loss) == 8 * 6  # 48 training groups, 8 an update
    last = slice(-12, None)
    assert sum(labelled[last]) / 12 == pytest.approx(share, abs=0.02)
    assert sum(expected[last]) / 12 == pytest.approx(share, abs=0.04)
    assert expected[0] == pytest.approx(share, abs=1e-4)  # scores start equal
    assert min(expected[6:18]) < share - 0.01  # as they move apart they tie less, until it learns
    assert sum(loss[last]) / 12 < 0.85 * loss[0]
    assert -1.5 < report["member_0_log_tie"] < -0.1
    assert tracked.summaries["reward_model_result/member_0_log_tie"] == report["member_0_log_tie"]
    heldout = table[table["heldout"]]
    assert report["labelled_ties"] == heldout["tie"].sum() > 0
    assert report["gold_order_accuracy"] > 0.9  # labels are noisier than that
    # The members are plain reward models: what stands for a tie is in the report alone.
    assert set(load_file(f"runs/r1/reward_model/member_0/{HEAD_FILE}")) == {"weight", "bias"}
    scores = committee(settings).member_scores(
        [[5]] * 4, [answer(good, 1) for good in range(4)], [True] * 4
    )
    assert scores.shape == (1, 4)
    assert bool((scores.diff(dim=1) > 0).all())


def test_without_a_model_of_ties_there_is_nothing_about_ties_in_the_report(
    tracked: Tracked,
) -> None:
    reward_model.run(pipeline(reward_model={"members": 1}), "r1")
    report = artifacts.read_json(Path("runs/r1/metrics/reward_model.json"))
    assert not [key for key in report if "log_tie" in key]
    assert not tracked.curve("reward_model/member_0_expected_ties")


# --- averaged weights ---


@pytest.fixture
def averages(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Tensor]]]:
    """By learner: the moving average by hand with decay 0.75, before the first update and after each."""
    found: list[list[dict[str, Tensor]]] = []

    class Recorded(Learner):
        def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(model, *arguments, **options)
            self.history = [copy.deepcopy(dict(model.named_parameters()))]
            found.append(self.history)

        def update(self, *arguments: Any, **options: Any) -> dict[str, float]:
            metrics = super().update(*arguments, **options)
            with torch.no_grad():
                self.history.append(
                    {
                        name: 0.75 * self.history[-1][name] + 0.25 * now
                        for name, now in self.model.named_parameters()
                    }
                )
            return metrics

    for stage in (sft, reward_model):
        monkeypatch.setattr(stage, "Learner", Recorded)
    return found


def test_a_reward_models_averaged_weights_are_saved(
    tracked: Tracked, averages: list[list[dict[str, Tensor]]]
) -> None:
    loss = {"kind": "davidson", "centering": 0.0}
    reward_model.run(pipeline(reward_model={"ema_decay": 0.75, "loss": loss}), "r1")
    report = artifacts.read_json(Path("runs/r1/metrics/reward_model.json"))
    assert report["member_0_log_tie"] != report["member_1_log_tie"]
    assert len(averages) == 2
    for number, history in enumerate(averages):
        path = Path(f"runs/r1/reward_model/member_{number}")
        saved = dict(ScalarModel.from_directory(path, tiny.CPU).named_parameters())
        assert len(history) == 1 + 6
        assert set(history[-1]) == {*saved, "log_tie"}
        for name, weight in saved.items():
            torch.testing.assert_close(weight, history[-1][name], atol=1e-6, rtol=1e-5)
        assert report[f"member_{number}_log_tie"] == pytest.approx(history[-1]["log_tie"].item())


def test_the_averaged_weights_of_fine_tuning_are_judged_and_saved(
    tracked: Tracked, averages: list[list[dict[str, Tensor]]]
) -> None:
    settings = pipeline(sft={"ema_decay": 0.75})
    sft.run(settings)
    (history,) = averages
    result = artifacts.read_json(sft.METRICS)
    saved = load_policy(Path("runs/r0/promoted"), tiny.CPU)
    for name, weight in saved.named_parameters():
        torch.testing.assert_close(
            weight, history[result["best_update"]][name], atol=1e-6, rtol=1e-5
        )
    tokens = TextCodec(load_tokenizer(settings.model), settings.model)
    heldout = sft._read(Path("data/tables"), tokens)[1]
    loss = sft.heldout_loss(saved, heldout, settings.model, 4)
    assert result["heldout_loss_nats"] == pytest.approx(loss, rel=1e-5)
    assert min(tracked.curve("sft/heldout_loss_nats")) == result["heldout_loss_nats"]


# --- what saves memory ---

SAVING = {"gradient_checkpointing": True, "logits_chunk_tokens": 3}
RL: dict[str, Any] = {
    "like": "grpo", "steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4
}  # fmt: skip
PAIRS: dict[str, Any] = {"like": "dpo", "batch_size": 8, "epochs": 1}
STAGES: dict[str, tuple[Callable[..., None], str]] = {
    "sft": (sft.run, "sft/loss"),
    "reward_model": (lambda p: reward_model.run(p, "r1"), "reward_model/member_1_loss"),
    "pairs": (lambda p: policy.run(p, "r1-x"), "policy/loss"),
    "rl": (lambda p: policy.run(p, "r1-x"), "policy/loss"),
    "ppo": (lambda p: policy.run(p, "r1-x"), "value/loss"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_what_saves_memory_gives_the_same_losses(
    stage: str, tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer again in the backward pass, a few tokens' logits at a time."""
    run, name = STAGES[stage]
    likes = {"rl": RL, "ppo": RL | {"like": "ppo"}}
    body = likes.get(stage, PAIRS)
    enabled: list[Any] = []
    found = []

    def enable(model: Any) -> None:
        enabled.append(model)
        enable_gradient_checkpointing(model)

    for model in ({}, SAVING):
        with monkeypatch.context() as patch:
            for module in (sft, reward_model, policy):
                patch.setattr(module, "enable_gradient_checkpointing", enable)
            run(pipeline(model=model, x=dict(body)))
        found.append(tracked.curve(name))
        tracked.logged.clear()
        assert bool(enabled) == bool(model)
    assert all(one.is_gradient_checkpointing for one in enabled)
    assert len(found[0]) >= 2
    assert found[1] == pytest.approx(found[0], rel=2e-3, abs=1e-4)
    assert found[0][0] != found[0][-1]


# --- aggregates, as the policy stage uses them ---


def average_by_hand(made: Committee, sequences: Sequences) -> Tensor:
    """The score of the mean of both members' weights, heads on their own scales first."""
    single = copy.deepcopy(made.members[0])
    with torch.no_grad():
        for name, weight in single.backbone.named_parameters():
            first, second = (dict(m.backbone.named_parameters())[name] for m in made.members)
            weight.copy_((first + second) / 2)
        (one, (mean, std)), (two, (other_mean, other_std)) = zip(
            made.members, made.scales, strict=True
        )
        single.head.weight.copy_((one.head.weight / std + two.head.weight / other_std) / 2)
        biases = (one.head.bias - mean) / std, (two.head.bias - other_mean) / other_std
        single.head.bias.copy_((biases[0] + biases[1]) / 2)
        return single.scores(sequences)


def as_text(sampled: Sequences) -> Sequences:
    """Answers as the committee reads them: words, and the end token where they ended."""
    prompts = [r[m].tolist() for r, m in zip(sampled.prompt_ids, sampled.prompt_mask, strict=True)]
    rows = [
        row[mask].tolist()
        for row, mask in zip(sampled.response_ids, sampled.response_mask, strict=True)
    ]
    words = [
        [t for t in row if t > tiny.UNK] + [t for t in row[-1:] if t == tiny.EOS] for row in rows
    ]
    return Sequences.from_rows(prompts, words, tiny.PAD)


AGGREGATES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor] | None]] = {
    "mean": ({"kind": "mean"}, lambda s: (s[0] + s[1]) / 2),
    "min": ({"kind": "min"}, lambda s: torch.where(s[0] < s[1], s[0], s[1])),
    # Of two members the variance is a quarter of the squared difference.
    "default": ({"kind": "mean_minus_variance"}, lambda s: (s[0] + s[1]) / 2 - (s[0] - s[1]) ** 2 / 8),
    "coef": (
        {"kind": "mean_minus_variance", "variance_coef": 2.0},
        lambda s: (s[0] + s[1]) / 2 - (s[0] - s[1]) ** 2 / 2,
    ),
    "weight_average": ({"kind": "weight_average"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", AGGREGATES)
def test_the_declared_aggregate_is_what_the_policy_is_scored_by(
    name: str, tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregate, by_hand = AGGREGATES[name]
    seen: list[Experience] = []

    class Recorded(RlTrainer):
        def collect(self) -> Experience:
            seen.append(super().collect())
            return seen[-1]

    monkeypatch.setattr(policy, "RlTrainer", Recorded)
    settings = pipeline(x=RL | {"steps": 1, "aggregate": aggregate})
    policy.run(settings, "r1-x")
    (experience,) = seen
    sequences, made = as_text(experience.sequences), committee(settings)
    with torch.no_grad():
        scaled = torch.stack(
            [
                (member.scores(sequences) - mean) / std
                for member, (mean, std) in zip(made.members, made.scales, strict=True)
            ]
        )
    expected = by_hand(scaled) if by_hand else average_by_hand(made, sequences)
    torch.testing.assert_close(experience.scores, expected, atol=1e-4, rtol=1e-4)
    assert tracked.curve("policy/proxy") == pytest.approx([float(expected.mean())], abs=1e-4)
    if name != "mean":
        assert float((expected - scaled.mean(0)).abs().max()) > 1e-3
