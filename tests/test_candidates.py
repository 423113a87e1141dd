"""Candidates: the tables are the functions' signatures, and each rule of a candidate in its own words."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from rlhf import candidates, config
from rlhf.algos import parts
from rlhf.algos.advantages import ADVANTAGES
from rlhf.algos.policy_losses import POLICY_LOSSES
from rlhf.algos.preference_losses import PREFERENCE_LOSSES
from rlhf.algos.reward_model_losses import AGGREGATES
from rlhf.algos.truncation import TRUNCATION

ROOT = Path(__file__).parents[1]
RAW = config.read_yaml(ROOT / "pipeline.yaml")
REGISTRIES: dict[str, dict[str, Callable[..., Any]]] = {
    "ADVANTAGES": ADVANTAGES,
    "POLICY_LOSSES": POLICY_LOSSES,
    "PREFERENCE_LOSSES": PREFERENCE_LOSSES,
    "AGGREGATES": AGGREGATES,
    "TRUNCATION": TRUNCATION,
}


# --- the tables ---


@pytest.mark.parametrize("name", REGISTRIES)
def test_a_table_has_the_kinds_of_its_registry(name: str) -> None:
    of_models = {"weight_average"} if name == "AGGREGATES" else set()  # of weights, not of scores
    assert set(getattr(candidates, name)) == set(REGISTRIES[name]) | of_models


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in REGISTRIES for kind in REGISTRIES[name]]
)
def test_options_and_defaults_are_those_of_the_function(name: str, kind: str) -> None:
    declared = {
        option: inspect.Parameter.empty if default is candidates.REQUIRED else default
        for option, (_, default) in getattr(candidates, name)[kind].items()
    }
    assert declared == parts.options(REGISTRIES[name][kind])


def reading(registry: dict[str, Callable[..., Any]], *names: str) -> set[str]:
    return {kind for kind, part in registry.items() if set(names) & set(parts.inputs(part))}


def test_the_sets_of_kinds_are_what_the_functions_read() -> None:
    assert reading(ADVANTAGES, "values", "final_values") == candidates.VALUE_KINDS
    assert reading(ADVANTAGES, "group_size") == candidates.GROUP_KINDS
    assert reading(PREFERENCE_LOSSES, "margins") == candidates.NEED_MARGINS
    reads_reference = reading(
        PREFERENCE_LOSSES, "ref_chosen_logps", "ref_rejected_logps", "ref_logps", "kl_nats"
    )
    assert set(PREFERENCE_LOSSES) == candidates.REFERENCE_FREE | reads_reference
    assert not candidates.REFERENCE_FREE & reads_reference
    assert set(ADVANTAGES) > candidates.WHITENED_KINDS


def test_only_the_score_function_is_bound_to_its_own_policy() -> None:
    """Its loss does not depend on the old log-probs; nll, its twin, claims nothing about them."""
    import torch

    logprobs, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
    advantages = torch.tensor([[1.0, 0.5]])
    blind = {
        kind
        for kind, loss in POLICY_LOSSES.items()
        if loss(logprobs, logprobs, advantages, mask).loss
        == loss(logprobs, logprobs - 0.5, advantages, mask).loss
    }
    assert blind - {"nll"} == candidates.ON_POLICY_ONLY


def test_the_tables_are_read_without_torch() -> None:
    code = "import sys; from rlhf import candidates, presets; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- parts ---

REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {
    "constant_baseline": {"baseline": 0.5},
    "robust": {"label_smoothing": 0.1},
    "r_dpo": {"alpha": 0.1},
    "missing_eos": {"penalty": 1.0},
    "soft_overlong": {"buffer": 4},
}
PLACES = {
    "ADVANTAGES": ("r1-x", "advantage"),
    "POLICY_LOSSES": ("r1-x", "loss"),
    "PREFERENCE_LOSSES": ("r1-y", "losses"),
    "AGGREGATES": ("r1-x", "aggregate"),
    "TRUNCATION": ("r1-x", "truncated"),
}
RL: dict[str, Any] = tiny.rl_candidate(advantage="group_mean").model_dump(by_alias=True)
PAIRS: dict[str, Any] = tiny.preference_candidate().model_dump(by_alias=True)
ONLINE: dict[str, Any] = tiny.online_candidate().model_dump(by_alias=True)


def problems(name: str, body: dict[str, Any], **changes: Any) -> list[str]:
    """What is said about the repository's pipeline with this one candidate; [] if nothing."""
    raw = copy.deepcopy(RAW)
    raw["candidates"] = {name: {**copy.deepcopy(body), **changes}}
    try:
        config.parse(raw)
    except config.ConfigError as error:
        return error.problems
    return []


def rl(**changes: Any) -> list[str]:
    return problems("r1-x", RL, **changes)


def pairs(**changes: Any) -> list[str]:
    return problems("r1-y", PAIRS, **changes)


def online(**changes: Any) -> list[str]:
    return problems("r1-z", ONLINE, **changes)


def of_kind(table: str, kind: str, **options: Any) -> list[str]:
    """A candidate with that part, and whatever else it needs."""
    part = {"kind": kind, **REQUIRED_OPTIONS.get(kind, {}), **options}
    changes: dict[str, Any] = {}
    if kind in candidates.VALUE_KINDS:
        changes["value"] = {}
    if kind == "nll":
        changes["advantage"] = "best_of_group"
    if table != "PREFERENCE_LOSSES":
        return rl(**{PLACES[table][1]: part}, **changes)
    if kind in candidates.REFERENCE_FREE:
        changes["reference"] = "none"
    if kind in candidates.NEED_MARGINS:
        return online(losses=[part], **changes)
    return pairs(losses=[part], **changes)


ALL = [(table, kind) for table in PLACES for kind in getattr(candidates, table)]


def test_the_candidates_to_change_are_right() -> None:
    assert rl() == pairs() == online() == []


@pytest.mark.parametrize(("table", "kind"), [pair for pair in ALL if pair[1] != "max_rl"])
def test_every_kind_is_accepted_with_what_it_requires(table: str, kind: str) -> None:
    """All but max_rl, whose rewards no committee gives."""
    assert of_kind(table, kind) == []


@pytest.mark.parametrize(("table", "kind"), ALL)
def test_an_option_that_a_part_does_not_have_is_an_error(table: str, kind: str) -> None:
    name, place = PLACES[table]
    if kind in candidates.NEED_MARGINS:
        name = "r1-z"
    where = f"candidates.{name}.{place}" + (".0" if place == "losses" else "")
    assert of_kind(table, kind, zzz=1.0) == [f"{where}.zzz: unknown key; remove it"]


@pytest.mark.parametrize("kind", REQUIRED_OPTIONS)
def test_an_option_without_a_default_must_be_there(kind: str) -> None:
    (table,) = (t for t in PLACES if kind in getattr(candidates, t))
    name, place = PLACES[table]
    where = f"candidates.{name}.{place}" + (".0" if place == "losses" else "")
    option = next(iter(REQUIRED_OPTIONS[kind]))
    part: Any = {"kind": kind}
    found = pairs(losses=[part]) if place == "losses" else rl(**{place: part})
    assert found == [f"{where}.{option}: required and missing; add it"]


def test_options_reach_the_function_and_weights_do_not() -> None:
    term = tiny.preference_candidate(
        losses=[{"kind": "exo_pair", "beta": 0.2, "weight": 3.0}]
    ).losses[0]
    assert (term.weight, term.arguments()) == (3.0, {"beta": 0.2, "label_smoothing": 1e-3})
    own = tiny.rl_candidate(loss={"kind": "my_pkg.losses.mine", "options": {"a": 1, "b": "x"}}).loss
    assert own.kind == "my_pkg.losses.mine"
    assert own.arguments() == {"a": 1, "b": "x"}


# --- bounds ---


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"loss": {"kind": "ppo_clip", "clip_high": -1.0}},
            "loss.clip_high=-1.0: input should be greater than 0",
        ),
        (
            {"loss": {"kind": "ppo_clip", "clip_low": 1.0}},
            "loss.clip_low=1.0: input should be less than 1",
        ),
        (
            {"loss": {"kind": "cispo", "clip_low": 1.5}},
            "loss.clip_low=1.5: input should be less than or equal to 1",
        ),
        (
            {"loss": {"kind": "sapo", "tau_negative": 0.0}},
            "loss.tau_negative=0.0: input should be greater than 0",
        ),
        (
            {"loss": {"kind": "ppo_dual_clip", "dual_clip": 1.0}},
            "loss.dual_clip=1.0: input should be greater than 1",
        ),
        (
            {"loss": {"kind": "ppo_clip", "clip_low": "0.2"}},
            "loss.clip_low='0.2': must be a number, not text; remove the quotes (write 1.0e-5)",
        ),
        (
            {"advantage": {"kind": "reinforce", "gamma": 1.1}},
            "advantage.gamma=1.1: input should be less than or equal to 1",
        ),
        (
            {"advantage": {"kind": "ema_baseline", "decay": 1.0}},
            "advantage.decay=1.0: input should be less than 1",
        ),
        (
            {"advantage": {"kind": "constant_baseline", "baseline": float("nan")}},
            "advantage.baseline=nan: input should be a finite number",
        ),
        (
            {"truncated": {"kind": "soft_overlong", "buffer": 0}},
            "truncated.buffer=0: input should be greater than or equal to 1",
        ),
        (
            {"truncated": {"kind": "missing_eos", "penalty": 0.0}},
            "truncated.penalty=0.0: input should be greater than 0",
        ),
        (
            {"aggregate": {"kind": "mean_minus_variance", "variance_coef": -0.1}},
            "aggregate.variance_coef=-0.1: input should be greater than or equal to 0",
        ),
        (
            {"correction": {"cap": 0.9}},
            "correction.cap=0.9: input should be greater than or equal to 1",
        ),
        ({"ema_decay": 1.0}, "ema_decay=1.0: input should be less than 1"),
        ({"kl_budget_nats": 0.0}, "kl_budget_nats=0.0: input should be greater than 0"),
        ({"clip_advantages": 0.0}, "clip_advantages=0.0: input should be greater than 0"),
        ({"resample_batches": -1}, "resample_batches=-1: input should be greater than or equal to 0"),
        ({"entropy_coef": -0.1}, "entropy_coef=-0.1: input should be greater than or equal to 0"),
        ({"schedule": "step"}, "schedule='step': must be one of 'linear' or 'cosine'"),
        (
            {"reference": "start"},
            "reference='start': must be one of 'previous', 'initial', 'ema' or 'none'",
        ),
        (
            {"kl": {"where": "loss", "estimator": "k3", "coef": 0.0}},
            "kl.coef=0.0: input should be greater than 0",
        ),
    ],
)  # fmt: skip
def test_a_number_out_of_its_bounds(change: dict[str, Any], line: str) -> None:
    assert rl(**change) == [f"candidates.r1-x.{line}"]


@pytest.mark.parametrize(
    ("term", "line"),
    [
        ({"kind": "sigmoid", "beta": 0.0}, "beta=0.0: input should be greater than 0"),
        ({"kind": "sigmoid", "label_smoothing": 0.5}, "label_smoothing=0.5: input should be less than 0.5"),
        ({"kind": "exo_pair", "label_smoothing": 0.0}, "label_smoothing=0.0: input should be greater than 0"),
        ({"kind": "kto", "desirable_weight": 0.0}, "desirable_weight=0.0: input should be greater than 0"),
        ({"kind": "dpop", "penalty": -1.0}, "penalty=-1.0: input should be greater than or equal to 0"),
        ({"kind": "sft", "weight": 0.0}, "weight=0.0: input should be greater than 0"),
        (
            {"kind": "f_dpo", "divergence": "kl"},
            "divergence='kl': must be one of 'reverse_kl', 'forward_kl', 'js' or 'alpha'",
        ),
        ({"kind": "f_dpo", "divergence": "alpha", "alpha": 1.0}, "alpha=1.0: input should be less than 1"),
    ],
)  # fmt: skip
def test_a_number_of_a_term_out_of_its_bounds(term: dict[str, Any], line: str) -> None:
    assert pairs(losses=[{"kind": "ipo"}, term]) == [f"candidates.r1-y.losses.1.{line}"]


@pytest.mark.parametrize(
    ("place", "change"),
    [("loss", "ppo"), ("advantage", "gea"), ("truncated", "cut"), ("aggregate", "max")],
)
def test_an_unknown_kind_lists_those_there_are(place: str, change: str) -> None:
    (line,) = rl(**{place: change})
    assert line.startswith(f"candidates.r1-x.{place}.kind={change}: must be one of '")
    table = {p: t for t, (_, p) in PLACES.items()}[place]
    assert all(f"'{kind}'" in line for kind in getattr(candidates, table))


def test_a_path_may_stand_where_functions_are_called_and_nowhere_else() -> None:
    own = {"kind": "my_pkg.mine", "options": {"scale": 2.0}}
    assert rl(loss=own) == rl(advantage=own) == pairs(losses=[own]) == online(losses=[own]) == []
    assert pairs(losses=[{**own, "weight": 0.5}, {"kind": "sft"}]) == []
    assert rl(advantage=own, value={}) == []  # whether it reads values is known once it is called
    for place in ("truncated", "aggregate"):
        (line,) = rl(**{place: own})
        assert line.startswith(f"candidates.r1-x.{place}.kind=my_pkg.mine: must be one of")
    assert rl(loss={"kind": "my_pkg.mine", "scale": 2.0}) == [
        "candidates.r1-x.loss.scale: unknown key; write it under options:"
    ]
    (line,) = rl(loss={"kind": "my-pkg.mine"})
    assert line.startswith("candidates.r1-x.loss.kind=my-pkg.mine: string should match pattern")


# --- rules between parts ---

KL_LOSS = {"where": "loss", "estimator": "k3", "coef": 0.1}
KL_REWARD = {"where": "reward", "estimator": "k1", "coef": 0.1}
WITH_KL = {"reference": "previous"}
MAX_RL = (
    ".advantage=max_rl takes rewards in [0, 1], like passed or not, which a committee's scores "
    "are not; use group_mean or rloo"
)
GROUPS_OF_ONE = {"prompts_per_step": 16, "samples_per_prompt": 1, "advantage": "reinforce"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        # The Kl section.
        (
            {**WITH_KL, "kl": {**KL_LOSS, "estimator": "k1"}},
            ".kl.estimator=k1 in the loss has an expected gradient of zero; "
            "use k2, k3 or k3_straight_through, or where: reward",
        ),
        (
            {**WITH_KL, "kl": {**KL_REWARD, "estimator": "full"}},
            ".kl.estimator=full is a term of the loss; use where: loss, or k1",
        ),
        (
            {**WITH_KL, "kl": {**KL_REWARD, "estimator": "k3_straight_through"}},
            ".kl.estimator=k3_straight_through differs from k3 by its gradient, which a reward "
            "does not use; use k1",
        ),
        (
            {**WITH_KL, "kl": {**KL_REWARD, "zero_spread_groups": "skip"}},
            ".kl: zero_spread_groups is about the loss; leave it out with where: reward",
        ),
        # The reference.
        (
            {"kl": KL_LOSS},
            ": kl needs a reference, and a reference a kl; set kl: null with reference: none",
        ),
        (
            {"reference": "previous"},
            ": kl needs a reference, and a reference a kl; set kl: null with reference: none",
        ),
        (
            {"kl": KL_LOSS, "reference": "ema"},
            ": reference_decay belongs to reference=ema and to no other; set both or neither",
        ),
        (
            {"kl": KL_LOSS, "reference": "initial", "reference_decay": 0.9},
            ": reference_decay belongs to reference=ema and to no other; set both or neither",
        ),
        (
            {**WITH_KL, "kl": {**KL_LOSS, "target": {"nats": 1.0, "horizon": 15}}},
            ".kl.target.horizon=15 is less than the 16 answers of one step, which would turn the "
            "coefficient over; raise it",
        ),
        (
            {"ema_decay": 0.9, "kl_budget_nats": 3.0},
            ": kl_budget_nats bounds the policy that samples, and ema_decay saves another; "
            "leave one of them out",
        ),
        # Sizes.
        (
            {"minibatches": 3},
            ".minibatches=3 does not divide prompts_per_step * samples_per_prompt=16; "
            "use one of 1, 2, 4, 8, 16",
        ),
        (
            {"minibatches": 2, "micro_batch_size": 3},
            ".micro_batch_size=3 does not divide sequences per minibatch=8; use one of 1, 2, 4, 8",
        ),
        # Advantages.
        (
            {**GROUPS_OF_ONE, "advantage": "rloo"},
            ".advantage=rloo compares answers to one prompt; set samples_per_prompt >= 2",
        ),
        (
            {**GROUPS_OF_ONE, "resample_batches": 1},
            ": resample_batches is about groups; set samples_per_prompt >= 2, or 0 batches",
        ),
        (
            {"advantage": "gae"},
            ": value belongs to advantage=gae or gae_bootstrap and to no other; "
            "set both or neither",
        ),
        (
            {"value": {}},
            ": value belongs to advantage=gae or gae_bootstrap and to no other; "
            "set both or neither",
        ),
        (
            {"advantage": "reinforce_plus_plus", "whiten_advantages": True},
            ".whiten_advantages=True: advantage=reinforce_plus_plus whitens already; "
            "set it to false",
        ),
        (
            {
                **WITH_KL,
                "kl": {**KL_LOSS, "zero_spread_groups": "skip"},
                "advantage": "reinforce",
            },
            ": kl.zero_spread_groups: advantage=reinforce has no groups; leave it out",
        ),
        (
            {
                **GROUPS_OF_ONE,
                **WITH_KL,
                "advantage": {"kind": "my.own"},
                "kl": {**KL_LOSS, "zero_spread_groups": "skip"},
            },
            ": kl.zero_spread_groups is about groups; set samples_per_prompt >= 2",
        ),
        ({"advantage": "max_rl"}, MAX_RL),
        ({**WITH_KL, "kl": KL_REWARD, "advantage": "max_rl"}, MAX_RL),
        ({**WITH_KL, "kl": KL_LOSS, "advantage": "max_rl"}, MAX_RL),
        # Losses.
        (
            {"loss": "reinforce", "epochs_per_step": 2},
            ".loss=reinforce is on-policy only; set epochs_per_step: 1 and minibatches: 1",
        ),
        (
            {"loss": "reinforce", "minibatches": 2, "micro_batch_size": 8},
            ".loss=reinforce is on-policy only; set epochs_per_step: 1 and minibatches: 1",
        ),
        (
            {"loss": {"kind": "ppo_dual_clip", "clip_high": 0.5, "dual_clip": 1.5}},
            ".loss.dual_clip=1.5 must be above 1 + clip_high; raise it",
        ),
        (
            {"reduction": "token_mean"},
            ": length_constant belongs to reduction=constant_length and to no other; "
            "set both or neither",
        ),
        (
            {"length_constant": None},
            ": length_constant belongs to reduction=constant_length and to no other; "
            "set both or neither",
        ),
        (
            {"stop_epochs_nats": 0.1},
            ": stop_epochs_nats: there is one update per step, nothing to stop; leave it out",
        ),
        (
            {"learns_from": "r1/preferences"},
            ": learns_from of kind=rl names a reward model, like r1/reward_model",
        ),
    ],
)
def test_what_does_not_fit_in_rl(changes: dict[str, Any], line: str) -> None:
    assert rl(**changes) == [f"candidates.r1-x{line}"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"losses": []},
            ".losses: list should have at least 1 item after validation, not 0",
        ),
        (
            {"losses": [{"kind": "ipo"}, {"kind": "ipo", "beta": 0.3}]},
            ": losses: ipo stands there twice; add up the weights",
        ),
        (
            {"reference": "none"},
            ".reference=none: losses.sigmoid reads a reference; use previous",
        ),
        (
            {"losses": [{"kind": "simpo"}]},
            ".reference=previous is not used by simpo; set it to none",
        ),
        (
            {"losses": [{"kind": "orpo"}], "reference": "none", "length_normalized": True},
            ": length_normalized is not used by orpo; set it to false",
        ),
        (
            {"losses": [{"kind": "f_dpo", "divergence": "js", "alpha": 0.5}]},
            ": losses: alpha is not used by divergence=js; leave it out",
        ),
        (
            {"losses": [{"kind": "f_dpo", "divergence": "alpha"}]},
            ": losses: divergence=alpha needs alpha; set it between 0 and 1",
        ),
        (
            {"losses": [{"kind": "odpo"}]},
            ": losses: odpo reads how far apart the answers are, which labelled pairs do not say; "
            "use kind: online_preference, where scores do",
        ),
        (
            {"micro_batch_size": 3},
            ".micro_batch_size=3 does not divide batch_size=8; use one of 1, 2, 4, 8",
        ),
        (
            {"learns_from": "r1/reward_model"},
            ": learns_from of kind=preference names pairs, like r1/preferences",
        ),
        (
            {"reference_decay": 0.9},
            ": reference_decay belongs to reference=ema and to no other; set both or neither",
        ),
    ],
)
def test_what_does_not_fit_in_pairs(changes: dict[str, Any], line: str) -> None:
    assert pairs(**changes) == [f"candidates.r1-y{line}"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"samples_per_prompt": 1},
            ".samples_per_prompt=1: a pair is two answers to a prompt; set it to at least 2",
        ),
        (
            {"minibatches": 4},
            ".minibatches=4 does not divide prompts_per_step=6; use one of 1, 2, 3, 6",
        ),
        (
            {"minibatches": 2},
            ".micro_batch_size=6 does not divide pairs per minibatch=3; use one of 1, 3",
        ),
        (
            {"learns_from": "r1/preferences"},
            ": learns_from of kind=online_preference names a reward model, like r1/reward_model",
        ),
        (
            {"losses": [{"kind": "simpo"}]},
            ".reference=previous is not used by simpo; set it to none",
        ),
        (
            {"ema_decay": 0.9, "kl_budget_nats": 3.0},
            ": kl_budget_nats bounds the policy that samples, and ema_decay saves another; "
            "leave one of them out",
        ),
    ],
)
def test_what_does_not_fit_in_own_pairs(changes: dict[str, Any], line: str) -> None:
    assert online(**changes) == [f"candidates.r1-z{line}"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"resample_batches": 2, "advantage": "reinforce"},
            "resample_batches is about groups, which",
        ),
        ({"loss": "nll"}, "loss=nll fits chosen answers, and advantage=group_mean chooses none"),
        (
            {"loss": "nll", "advantage": "best_of_group", "whiten_advantages": True},
            "advantage=best_of_group gives every answer it keeps the advantage 1",
        ),
        (
            {"loss": "nll", "advantage": "best_of_group", "clip_advantages": 2.0},
            "advantage=best_of_group gives every answer it keeps the advantage 1",
        ),
    ],
)
def test_parts_that_would_do_nothing_or_another_thing(changes: dict[str, Any], words: str) -> None:
    (line,) = rl(**{"advantage": "group_mean", **changes})
    assert words in line


def test_what_does_fit() -> None:
    """The other side of the bounds above."""
    assert rl(**WITH_KL, kl={**KL_LOSS, "target": {"nats": 1.0, "horizon": 16}}) == []
    assert rl(**WITH_KL, kl={**KL_LOSS, "zero_spread_groups": "skip"}) == []
    assert rl(kl=KL_LOSS, reference="ema", reference_decay=0.9) == []
    assert rl(stop_epochs_nats=0.1, epochs_per_step=2) == []
    assert rl(resample_batches=3, correction={"cap": 1.0}, ema_decay=0.9) == []
    assert rl(loss={"kind": "ppo_dual_clip", "clip_high": 0.5, "dual_clip": 1.6}) == []
    assert rl(**GROUPS_OF_ONE) == []
    assert pairs(losses=[{"kind": "simpo"}, {"kind": "sigmoid"}], length_normalized=True) == []
    assert pairs(losses=[{"kind": "f_dpo", "divergence": "alpha", "alpha": 0.3}]) == []
    assert pairs(losses=[{"kind": "simpo"}, {"kind": "sft"}], reference="none") == []
    assert online(losses=[{"kind": "odpo"}], reference="ema", reference_decay=0.5) == []


def test_full_kl_and_logits_in_chunks_exclude_each_other() -> None:
    raw = copy.deepcopy(RAW)
    raw["model"]["logits_chunk_tokens"] = 64
    kl = {"where": "loss", "estimator": "full", "coef": 0.1}
    raw["candidates"] = {"r1-x": {**RL, **WITH_KL, "kl": kl}}
    with pytest.raises(config.ConfigError) as caught:
        config.parse(raw)
    (line,) = caught.value.problems
    assert line.startswith("candidates.r1-x.kl.estimator=full: needs all logits at once")
    raw["model"]["logits_chunk_tokens"] = None
    config.parse(raw)


def test_everything_wrong_with_a_candidate_is_told_at_once() -> None:
    """Bounds first, since rules between parts need parts that are right."""
    found = rl(
        loss={"kind": "ppo_clip", "clip_high": -1.0, "clip_hgh": 0.1},
        advantage={"kind": "constant_baseline"},
        correction={"cap": 0.0},
        temperature=0.0,
    )
    starts = [
        "loss.clip_high=-1.0: input should be greater than 0",
        "loss.clip_hgh: unknown key; did you mean clip_high?",
        "advantage.baseline: required and missing; add it",
        "correction.cap=0.0: input",
        "temperature=0.0: input",
    ]
    assert len(found) == len(starts)
    for start in starts:
        assert sum(line.startswith(f"candidates.r1-x.{start}") for line in found) == 1, found
    found = rl(kl=KL_LOSS, length_constant=None, minibatches=3, advantage="gae")
    assert len(found) == 4, found
