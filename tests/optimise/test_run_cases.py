"""Kinds of fault that broke others: hostile candidates, and numbers of a run that must not depend on its layout."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf import config
from rlhf.models.scalar import ScalarModel
from rlhf.optimise.imported import check_imported
from rlhf.optimise.preference import chosen_falls
from rlhf.optimise.rl import RlTrainer
from rlhf.optimise.rollouts import Rollouts
from rlhf.progress import Clock

RAW = config.read_yaml(Path(__file__).parents[2] / "pipeline.yaml")
PPO, DPO = "r1-ppo", "r1-dpo"
OURS = "rlhf.algos.policy_losses.clipped_policy_loss"
MODULES = {
    "hostile_lab": "VALUE = 3\n\n\ndef everything(*args, **kwargs):\n    pass\n",
    "class_lab": (
        "class Loss:\n"
        "    def __init__(self, logprobs, response_mask, *, reduction, denominator):\n"
        "        pass\n"
    ),
    "raising_lab": "raise RuntimeError('boom')\n",
    "syntax_lab": "def f(:\n",
    "leaving_lab": "import sys\n\nsys.exit(3)\n",
}


@pytest.fixture
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of a user outside the project."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def problems(name: str, changes: dict[str, Any]) -> list[str]:
    """Everything that is said of a candidate with these keys changed; [] if it is taken."""
    raw = copy.deepcopy(RAW)
    raw["candidates"][name] |= changes
    try:
        check_imported(config.parse(raw))
    except config.ConfigError as error:
        return error.problems
    return []


NAN = float("nan")
HOSTILE: dict[str, tuple[str, dict[str, Any], str]] = {
    "kind_of_another_table": (PPO, {"advantage": {"kind": "ppo_clip"}}, "advantage.kind=ppo_clip"),
    "kind_that_is_a_list": (PPO, {"advantage": {"kind": ["gae"]}}, "advantage.kind=['gae']"),
    "kind_that_is_a_mapping": (PPO, {"loss": {"kind": {"a": 1}}}, "loss.kind={'a': 1}"),
    "part_that_is_null": (PPO, {"loss": None}, "loss=None: must be a mapping"),
    "part_that_is_a_list": (PPO, {"advantage": ["gae", "rloo"]}, "advantage: must be a mapping"),
    "option_of_another_part": (
        PPO,
        {"loss": {"kind": "ppo_clip", "tau_positive": 1.0}},
        "loss.tau_positive: unknown key; remove it",
    ),
    "nested_typo": (
        PPO,
        {"kl": {"where": "reward", "estimator": "k1", "coeff": 0.2}},
        "kl.coeff: unknown key; did you mean coef?",
    ),
    "losses_that_are_null": (DPO, {"losses": None}, "losses=None"),
    "losses_that_are_no_list": (DPO, {"losses": {"kind": "sigmoid"}}, "losses: "),
    "terms_that_are_no_parts": (
        DPO,
        {"losses": [["sigmoid"], None, 3]},
        "losses.0: must be a mapping",
    ),
    "nan": (PPO, {"kl": {"where": "reward", "estimator": "k1", "coef": NAN}}, "kl.coef=nan"),
    "nan_bound": (PPO, {"loss": {"kind": "ppo_clip", "clip_low": NAN}}, "loss.clip_low=nan"),
    "infinite_cap": (PPO, {"correction": {"cap": float("inf")}}, "correction.cap=inf"),
    "huge_buffer": (
        PPO,
        {"truncated": {"kind": "soft_overlong", "buffer": 10**9}},
        "truncated.buffer=1000000000: more than model.max_response_tokens",
    ),
    "path_to_a_number": (PPO, {"loss": {"kind": "hostile_lab.VALUE"}}, "loss: 'hostile_lab.VALUE'"),
    "path_to_a_module": (PPO, {"loss": {"kind": "torch.nn"}}, "loss: 'torch.nn' is a module"),
    "path_to_nothing": (
        PPO,
        {"loss": {"kind": "hostile_lab.gone"}},
        "loss: 'hostile_lab.gone' cannot be imported",
    ),
    "path_that_hides_its_inputs": (
        PPO,
        {"loss": {"kind": "hostile_lab.everything"}},
        "loss=hostile_lab.everything: *args hides what it reads",
    ),
    "malformed_path": (PPO, {"loss": {"kind": "hostile_lab..f"}}, "loss.kind=hostile_lab..f"),
    "options_that_are_a_list": (
        PPO,
        {"loss": {"kind": OURS, "options": ["clip_low"]}},
        "loss.options: must be a mapping",
    ),
    "options_of_the_trainer": (
        PPO,
        {"loss": {"kind": OURS, "options": {"denominator": 3}}},
        f"loss={OURS}: option 'denominator' is not one of its own (clip_low, clip_high)",
    ),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_a_hostile_candidate_is_told_path_and_rule(case: str, labs: None) -> None:
    name, changes, words = HOSTILE[case]
    label = {} if name == DPO else {"algorithm": "mine"}
    lines = problems(name, label | changes)
    assert any(line.startswith(f"candidates.{name}.{words}") for line in lines), lines
    assert not any("\n" in line or "Traceback" in line for line in lines)


@pytest.mark.parametrize("module", ["raising_lab", "syntax_lab"])
def test_a_module_that_fails_on_import_is_told_like_one_that_is_missing(
    module: str, labs: None
) -> None:
    lines = problems(PPO, {"algorithm": "mine", "loss": {"kind": f"{module}.f"}})
    assert [line.startswith(f"candidates.{PPO}.loss: '{module}.f'") for line in lines] == [True]


@pytest.mark.parametrize("path", ["torch.add", "functools.partial"])
def test_a_function_without_a_signature_is_told_with_its_path(path: str) -> None:
    lines = problems(PPO, {"algorithm": "mine", "loss": {"kind": path}})
    assert [line.startswith(f"candidates.{PPO}.loss") and path in line for line in lines] == [True]


def test_a_class_is_no_function(labs: None) -> None:
    lines = problems(PPO, {"algorithm": "mine", "loss": {"kind": "class_lab.Loss"}})
    assert [line.startswith(f"candidates.{PPO}.loss") for line in lines] == [True]


# --- runs ---

TIED_HALF = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0])


def make(settings: config.RlCandidate, *, reference: PreTrainedModel | None = None) -> RlTrainer:
    """Scores are those of TIED_HALF: two groups of two without spread, two with."""
    start = tiny.llama()
    critic = None
    if settings.value is not None:
        critic = ScalarModel(tiny.llama(3).base_model).eval()
    return RlTrainer(
        settings,
        tiny.model_settings(max_response_tokens=6),
        policy=tiny.llama(),
        start=start,
        reference=reference or start,
        critic=critic,
        score=lambda prompts, responses, ended: TIED_HALF[: len(prompts)],
        codec=tiny.codec(),
        prompts=tiny.PROMPTS,
        seed=0,
        clock=Clock("test"),
    )


SIZES = {"prompts_per_step": 4, "samples_per_prompt": 2}


def test_warming_up_the_critic_leaves_the_kl_coefficient() -> None:
    target = {"nats": 1.0, "horizon": 8}
    settings = tiny.rl_candidate(
        **SIZES, micro_batch_size=8, advantage="gae", value=tiny.value_settings(warmup_steps=5),
        kl={"where": "reward", "estimator": "k1", "coef": 0.2, "target": target},
    )  # fmt: skip
    _step, experience, _metrics = next(make(settings).run())
    assert experience.kl_coef == 0.2


def _kl_metric(micro_batch_size: int) -> float:
    kl = {"where": "loss", "estimator": "k2", "coef": 0.2, "zero_spread_groups": "skip"}
    settings = tiny.rl_candidate(
        **SIZES, micro_batch_size=micro_batch_size, reference="initial", kl=kl
    )
    trainer = make(settings, reference=tiny.llama(5))
    return trainer._update(trainer.collect(), policy=True)["policy/kl_ref_nats"]


def test_the_kl_metric_does_not_depend_on_the_micro_batches_where_groups_are_skipped() -> None:
    whole = _kl_metric(8)
    assert whole > 0.1
    assert [_kl_metric(size) for size in (4, 2, 1)] == pytest.approx([whole] * 3, rel=1e-4)


def test_length_statistics_are_those_of_raw_answers() -> None:
    """Masked or not, an answer counts with all that was sampled."""
    found = []
    for truncated in ("keep", "mask"):
        settings = tiny.rl_candidate(**SIZES, micro_batch_size=8, truncated=truncated)
        trainer = make(settings)
        rollout = trainer.rollouts.collect()
        assert not bool(rollout.ended.all())
        metrics = trainer._constants(rollout).metrics
        mean = sum(len(c.ids) for c in rollout.completions) / 8
        found.append((metrics["policy/length_tokens"], mean))
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(found[0][1])


def test_what_is_logged_of_a_resampled_batch_is_that_of_the_groups_with_spread() -> None:
    """The policy itself scores higher: groups that all pass are not in the batch."""
    seen: list[Tensor] = []

    def score(prompts: Any, responses: Any, ended: Any) -> Tensor:
        scores = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
        seen.append(scores)
        return scores

    rollouts = Rollouts(
        tiny.rl_candidate(**SIZES, micro_batch_size=8, resample_batches=3),
        tiny.model_settings(max_response_tokens=6),
        policy=tiny.llama(), score=score, codec=tiny.codec(), prompts=tiny.PROMPTS, seed=0,
        clock=Clock("test"),
    )  # fmt: skip
    rollout = rollouts.collect()
    assert float(rollout.scores.mean()) == 0.5
    assert float(torch.cat(seen).mean()) == 7 / 8


def course(chosen: list[float], margin: list[float]) -> list[dict[str, float]]:
    return [
        {"policy/chosen_logp_change_nats": c, "policy/margin": m}
        for c, m in zip(chosen, margin, strict=True)
    ]


@pytest.mark.parametrize(
    ("chosen", "margin", "fallen"),
    [
        ([0, -1, -2, -3], [0, 1, 2, 3], 2.0),  # mean -2, standard error 1 / sqrt(3)
        ([0, -1, -2, -3], [0, 0, 0, 0], None),  # the margin did not grow
        ([0, 1, 2, 3], [0, 1, 2, 3], None),  # the chosen gained
        ([0, -3, 2, -1], [0, 1, 2, 3], None),  # mean -.67, standard error 1.45
        ([0], [0], None),
    ],
)
def test_chosen_answers_that_fall_while_the_margin_grows_are_told(
    chosen: list[float], margin: list[float], fallen: float | None
) -> None:
    """C61."""
    assert chosen_falls(course(chosen, margin)) == fallen


def test_only_the_last_updates_decide_whether_the_chosen_fall() -> None:
    early = course([-50.0] * 10, [0.0] * 10)
    assert chosen_falls(early + course([1.0, 1.1, 0.9], [5.0] * 3), window=3) is None
    late = course([-1.0, -1.1, -0.9], [5.0] * 3)
    assert chosen_falls(course([9.0] * 10, [0.0] * 10) + late, window=3) == pytest.approx(1.0)


def test_losses_without_a_margin_have_no_such_alarm() -> None:
    assert chosen_falls([{"policy/nll_nats": 1.0}, {"policy/nll_nats": 0.5}]) is None
