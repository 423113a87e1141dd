"""Losses over preferences: values by hand, properties that all share, and refusals."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algos import parts
from rlhf.algos.preference_losses import PREFERENCE_LOSSES, weighted_sum
from rlhf.algos.types import LossOutput, combine_metrics

POLICY = {"chosen_logps", "rejected_logps", "chosen_mean_logps", "rejected_mean_logps", "logps"}
CONSTANTS = {"kl_nats", "reward_shift"}
WITH_REFERENCE = [
    name for name, loss in PREFERENCE_LOSSES.items() if "ref_chosen_logps" in parts.inputs(loss)
]
PAIRED = [*WITH_REFERENCE, "simpo", "orpo"]
REQUIRED: dict[str, dict[str, Any]] = {"robust": {"label_smoothing": 0.1}, "r_dpo": {"alpha": 0.02}}
VARIANTS = [(name, REQUIRED.get(name, {})) for name in PREFERENCE_LOSSES]
VARIANTS += [
    ("f_dpo", {"divergence": "forward_kl"}),
    ("f_dpo", {"divergence": "js"}),
    ("f_dpo", {"divergence": "alpha", "alpha": 0.3}),
    ("sigmoid", {"label_smoothing": 0.2}),
    ("kto", {"desirable_weight": 2.0, "undesirable_weight": 0.5}),
]
IDS = ["-".join([name, *map(str, options.values())]) for name, options in VARIANTS]
every_loss = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def call(name: str, inputs: dict[str, Tensor], **options: Any) -> LossOutput:
    return parts.call(PREFERENCE_LOSSES[name], inputs, **options)


def pair(u_chosen: float, u_rejected: float) -> dict[str, Tensor]:
    """One pair with these log-ratios to the reference."""
    return {
        "chosen_logps": vector(-10 + u_chosen),
        "rejected_logps": vector(-20 + u_rejected),
        "ref_chosen_logps": vector(-10),
        "ref_rejected_logps": vector(-20),
    }


def means(chosen: float, rejected: float) -> dict[str, Tensor]:
    return {"chosen_mean_logps": vector(chosen), "rejected_mean_logps": vector(rejected)}


def batch(name: str, seed: int, size: int = 6, dtype: torch.dtype = torch.float64) -> dict:
    """Random inputs of one loss, the policy's with gradient."""
    generator = torch.Generator().manual_seed(seed)

    def logps(mean: float) -> Tensor:
        return -mean * torch.rand(size, generator=generator, dtype=dtype)

    offered = {
        "chosen_logps": logps(20),
        "rejected_logps": logps(20),
        "ref_chosen_logps": logps(20),
        "ref_rejected_logps": logps(20),
        "chosen_mean_logps": logps(2),
        "rejected_mean_logps": logps(2),
        "chosen_lengths": torch.randint(1, 50, (size,), generator=generator),
        "rejected_lengths": torch.randint(1, 50, (size,), generator=generator),
        "margins": -logps(3),
        "reward_shift": torch.tensor(0.3, dtype=dtype),
        "logps": logps(20),
        "ref_logps": logps(20),
        "desirable": torch.rand(size, generator=generator) < 0.5,
        "kl_nats": torch.tensor(0.7, dtype=dtype),
    }
    inputs = {key: offered[key] for key in parts.inputs(PREFERENCE_LOSSES[name])}
    for key in POLICY & inputs.keys():
        inputs[key].requires_grad_()
    return inputs


def rows(inputs: dict[str, Tensor], index: Any) -> dict[str, Tensor]:
    return {key: x if x.ndim == 0 else x[index] for key, x in inputs.items()}


def gradients(loss: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    keys = sorted(POLICY & inputs.keys())
    return dict(zip(keys, torch.autograd.grad(loss, [inputs[key] for key in keys]), strict=True))


# Values by hand ---------------------------------------------------------------------------------

# Log-ratios 3 and 1 at beta 1/2 are rewards 1.5 and .5 and a margin h of 1.
# -log sigmoid(1) = .3132616875, -log sigmoid(-1) = 1.3132616875, sigmoid(-1) = .2689414214.
BY_HAND = [
    # slope -beta sigmoid(-h)
    ("sigmoid", {}, pair(3, 1), 0.3132616875, (-0.1344707107, 0.1344707107)),
    # .9 * .3132616875 + .1 * 1.3132616875; slope beta (-.9 * .2689414214 + .1 * .7310585786)
    ("sigmoid", {"label_smoothing": 0.1}, pair(3, 1), 0.4132616875, (-0.0844707107, 0.0844707107)),
    # (.9 * .3132616875 - .1 * 1.3132616875) / .8
    # slope beta (-.9 * .2689414214 - .1 * .7310585786) / .8
    ("robust", {"label_smoothing": 0.1}, pair(3, 1), 0.1882616875, (-0.1969707107, 0.1969707107)),
    # (3 - 0 - 1 / (2 * .5))^2 = 4, slope 2 * 2
    ("ipo", {}, pair(3, 0), 4, (4, -4)),
    # 1 - .5 * (1 - 0) = .5, slope -beta
    ("hinge", {}, pair(1, 0), 0.5, (-0.5, 0.5)),
    # .7310585786 (-.3132616875 - log .9) + .2689414214 (-1.3132616875 - log .1)
    # slope beta * .7310585786 * .2689414214 * (1 - log 9)
    ("exo_pair", {"label_smoothing": 0.1}, pair(3, 1), 0.1140821077, (-0.1176943193, 0.1176943193)),
    # -log sigmoid(1.5) - .5 log sigmoid(-1.5) - .5 log sigmoid(-.5)
    #   = .2014132780 + .5 * 1.7014132780 + .5 * .9740769842
    # slopes .5 (-.1824255238 + .5 * .8175744762) and .5 * .5 * .6224593312
    ("nca_pair", {}, pair(3, 1), 1.5391584091, (0.1131808571, 0.1556148328)),
    # (3 - 1)^2 + (1 + 1)^2
    ("sppo_hard", {}, pair(3, 1), 8, (4, 4)),
    # sigmoid(-1.5) + sigmoid(.5) = .1824255238 + .6224593312
    # slopes -.5 * .1824255238 * .8175744762 and .5 * .6224593312 * .3775406688
    ("apo_zero", {}, pair(3, 1), 0.8048848550, (-0.0745732262, 0.1175018561)),
    # sigmoid(1.5) + sigmoid(-1) = .8175744762 + .2689414214
    # slopes .5 (.1491464521 - .1966119332) and .5 * .1966119332
    ("apo_down", {}, pair(3, 1), 1.0865158976, (-0.0237327406, 0.0983059666)),
    # shift .5: -log sigmoid(1.5 - .5) - log sigmoid(.5 - .5); slopes -.5 * .2689414214 and .5 / 2
    (
        "bco_pair",
        {},
        pair(3, 1) | {"reward_shift": torch.tensor(0.5)},
        0.3132616875 + math.log(2),
        (-0.1344707107, 0.25),
    ),
    # The chosen lost 1 nat: rewards -.5 and -1.5, h = 1 - 2 * .5 = 0; slope -.5 (1 + 2) / 2.
    ("dpop", {"penalty": 2.0}, pair(-1, -3), math.log(2), (-0.75, 0.25)),
    # It lost nothing: DPO.
    ("dpop", {"penalty": 2.0}, pair(3, 1), 0.3132616875, (-0.1344707107, 0.1344707107)),
    # h = 1 + .1 * (5 - 15) = 0
    (
        "r_dpo",
        {"alpha": 0.1},
        pair(3, 1) | {"chosen_lengths": torch.tensor([5]), "rejected_lengths": torch.tensor([15])},
        math.log(2),
        (-0.25, 0.25),
    ),
    # h = 1 - .5 * 4 = -1
    (
        "odpo",
        {"alpha": 0.5},
        pair(3, 1) | {"margins": vector(4)},
        1.3132616875,
        (-0.3655292893, 0.3655292893),
    ),
    # Policy / reference is 2 for the chosen and 1/2 for the rejected.
    # 1 - 1/2 and 1 - 2: h = .5 * 1.5; log(1 + exp(-.75)) = .3868712, sigmoid(-.75) = .3208213.
    # Slopes beta * .3208213 * (1/2 and 2).
    (
        "f_dpo",
        {"divergence": "forward_kl"},
        pair(math.log(2), -math.log(2)),
        0.3868709,
        (-0.0802053, 0.3208213),
    ),
    # log(4/3) and log(2/3): h = .5 log 2; log(1 + 1 / sqrt 2) = .5347996, sigmoid(-h) = .4142136.
    # Slopes beta * .4142136 * (1/3 and 2/3).
    (
        "f_dpo",
        {"divergence": "js"},
        pair(math.log(2), -math.log(2)),
        0.5347999,
        (-0.0690356, 0.1380712),
    ),
    # (1 - 2^-.5) / .5 = .5857864 and (1 - 2^.5) / .5 = -.8284271: h = .7071068;
    # log(1 + exp(-.7071068)) = .4008, sigmoid(-h) = .3302385; slopes beta * that * (2^-.5 and 2^.5)
    (
        "f_dpo",
        {"divergence": "alpha", "alpha": 0.5},
        pair(math.log(2), -math.log(2)),
        0.4008336,
        (-0.1167569, 0.2335139),
    ),
]


@pytest.mark.parametrize(
    ("name", "options", "inputs", "loss", "slopes"),
    BY_HAND,
    ids=[f"{row[0]}-{i}" for i, row in enumerate(BY_HAND)],
)
def test_by_hand(
    name: str, options: dict, inputs: dict[str, Tensor], loss: float, slopes: tuple[float, float]
) -> None:
    inputs = {key: x.clone() for key, x in inputs.items()}
    for key in POLICY & inputs.keys():
        inputs[key].requires_grad_()
    output = call(name, inputs, beta=0.5, **options)
    assert output.loss.item() == pytest.approx(loss, abs=2e-7)
    slope = gradients(output.loss, inputs)
    assert slope["chosen_logps"].item() == pytest.approx(slopes[0], abs=2e-7)
    assert slope["rejected_logps"].item() == pytest.approx(slopes[1], abs=2e-7)


def test_every_loss_with_a_reference_is_done_by_hand() -> None:
    assert {row[0] for row in BY_HAND} | {"simpo", "orpo", "kto", "sft"} == set(PREFERENCE_LOSSES)


@pytest.mark.parametrize("name", [x for x in WITH_REFERENCE if x != "f_dpo"])
def test_rewards_are_beta_times_the_log_ratio(name: str) -> None:
    # Rewards 1.5 and .5, then -1 and 2: margins 1 and -3. Offsets and penalties do not enter.
    inputs = batch(name, 0, size=2) | {
        "chosen_logps": vector(-7, -12),
        "rejected_logps": vector(-19, -16),
        "ref_chosen_logps": vector(-10, -10),
        "ref_rejected_logps": vector(-20, -20),
    }
    metrics = call(name, inputs, beta=0.5, **REQUIRED.get(name, {})).metrics
    assert {key: x.item() for key, x in metrics.items()} == pytest.approx(
        {"accuracy": 0.5, "ties": 0, "margin": -1, "chosen_reward": 0.25, "rejected_reward": 1.25}
    )


@pytest.mark.parametrize(
    ("options", "chosen", "rejected"),
    [
        ({}, math.log(2), -math.log(2)),
        ({"divergence": "forward_kl"}, 0.5, -1),
        ({"divergence": "js"}, math.log(4 / 3), math.log(2 / 3)),
        ({"divergence": "alpha", "alpha": 0.5}, 2 - math.sqrt(2), 2 - 2 * math.sqrt(2)),
    ],
)
def test_rewards_of_a_divergence(options: dict, chosen: float, rejected: float) -> None:
    metrics = call("f_dpo", pair(math.log(2), -math.log(2)), beta=0.5, **options).metrics
    assert metrics["chosen_reward"].item() == pytest.approx(0.5 * chosen)
    assert metrics["rejected_reward"].item() == pytest.approx(0.5 * rejected)
    assert metrics["margin"].item() == pytest.approx(0.5 * (chosen - rejected))
    assert (metrics["accuracy"].item(), metrics["ties"].item()) == (1, 0)


@pytest.mark.parametrize("name", ["sigmoid", "f_dpo"])
def test_dpo_of_the_reference_itself(name: str) -> None:  # C62
    output = call(name, pair(0, 0), beta=0.1)
    assert output.loss.item() == pytest.approx(math.log(2), abs=1e-12)  # .6931
    assert output.metrics["ties"].item() == 1
    assert output.metrics["accuracy"].item() == 0.5
    assert output.metrics["margin"].item() == 0


def test_dpo_a_nat_apart() -> None:  # C62
    output = call("sigmoid", pair(3, 2))  # -log sigmoid(.1), the default beta being .1
    assert output.loss.item() == pytest.approx(0.6444, abs=5e-5)


def test_simpo_by_hand() -> None:
    # 2 * (-1 + 2) - 1 = 1: .3132616875; slope -2 sigmoid(-1). Rewards -2 and -4.
    inputs = {key: x.requires_grad_() for key, x in means(-1, -2).items()}
    output = call("simpo", inputs, beta=2.0, gamma=1.0)
    assert output.loss.item() == pytest.approx(0.3132616875)
    slopes = gradients(output.loss, inputs)
    assert slopes["chosen_mean_logps"].item() == pytest.approx(-2 * sigmoid(-1))
    assert slopes["rejected_mean_logps"].item() == pytest.approx(2 * sigmoid(-1))
    assert {key: x.item() for key, x in output.metrics.items()} == {
        "accuracy": 1,
        "ties": 0,
        "margin": 2,
        "chosen_reward": -2,
        "rejected_reward": -4,
    }


def test_orpo_by_hand() -> None:
    # Odds .8 / .2 = 4 and 1: -log(.8) - .5 log sigmoid(log 4), and sigmoid(log 4) = .8.
    inputs = {key: x.requires_grad_() for key, x in means(math.log(0.8), math.log(0.5)).items()}
    output = call("orpo", inputs, beta=0.5)
    assert output.loss.item() == pytest.approx(-1.5 * math.log(0.8))
    # d odds / d log p = 1 / (1 - p), 5 and 2: -1 - .5 * .2 * 5 and .5 * .2 * 2
    slopes = gradients(output.loss, inputs)
    assert slopes["chosen_mean_logps"].item() == pytest.approx(-1.5)
    assert slopes["rejected_mean_logps"].item() == pytest.approx(0.2)
    assert {key: x.item() for key, x in output.metrics.items()} == pytest.approx(
        {
            "accuracy": 1,
            "ties": 0,
            "margin": math.log(4),
            "chosen_reward": math.log(4),
            "rejected_reward": 0,
            "nll_nats": -math.log(0.8),
        },
        abs=1e-12,
    )


def test_sft_by_hand() -> None:
    # Per pair, whatever the lengths: (1 + 3) / 2.
    x = vector(-1, -3).requires_grad_()
    output = call("sft", {"chosen_mean_logps": x})
    output.loss.backward()
    assert output.loss.item() == 2
    assert output.metrics.keys() == {"nll_nats"}
    assert output.metrics["nll_nats"].item() == 2
    assert x.grad is not None
    assert x.grad.tolist() == [-0.5, -0.5]


def kto_inputs() -> dict[str, Tensor]:
    """Log-ratios 3 (desirable), 1 and 4 (not), against a KL of 1."""
    return {
        "logps": vector(-7, -19, -26).requires_grad_(),
        "ref_logps": vector(-10, -20, -30),
        "desirable": torch.tensor([True, False, False]),
        "kl_nats": torch.tensor(1.0),
    }


def test_kto_by_hand() -> None:
    # beta .5: gains .5 * 2 = 1, -.5 * 0 = 0 and -.5 * 3 = -1.5.
    # 2 sigmoid(-1) + 3 sigmoid(0) + 3 sigmoid(1.5), over 3.
    inputs = kto_inputs()
    output = call("kto", inputs, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    expected = (2 * 0.2689414214 + 3 * 0.5 + 3 * 0.8175744762) / 3
    assert output.loss.item() == pytest.approx(expected)
    # Slopes of sigmoid: .1966119332, .25, .1491464521.
    expected_slopes = [-0.5 * 2 * 0.1966119332 / 3, 0.5 * 0.25, 0.5 * 0.1491464521]
    slopes = gradients(output.loss, inputs)["logps"]
    assert slopes.tolist() == pytest.approx(expected_slopes)
    # Rewards 1.5, .5 and 2; sums over the class / 3; one right, one wrong, one tied.
    assert {key: x.item() for key, x in output.metrics.items()} == pytest.approx(
        {
            "accuracy": 0.5,
            "ties": 1 / 3,
            "margin": (1 + 0 - 1.5) / 3,
            "desirable_reward": 1.5 / 3,
            "undesirable_reward": 2.5 / 3,
            "desirable_share": 1 / 3,
        }
    )


@pytest.mark.parametrize(("index", "missing"), [([0], "undesirable"), ([1, 2], "desirable")])
def test_kto_of_one_class_has_finite_metrics(index: list[int], missing: str) -> None:
    metrics = call("kto", rows(kto_inputs(), index), beta=0.5).metrics
    assert metrics[f"{missing}_reward"].item() == 0
    assert all(x.isfinite() for x in metrics.values())


def test_kto_ignores_what_stands_in_the_other_class() -> None:
    inputs = kto_inputs()
    with torch.no_grad():
        inputs["logps"][1:] = torch.inf
    output = call("kto", inputs, beta=0.5)
    slopes = gradients(output.loss, inputs)["logps"]
    assert slopes[0].item() == pytest.approx(-0.5 * 0.1966119332 / 3)
    assert output.metrics["desirable_reward"].item() == pytest.approx(0.5)


DEFAULTS: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.1, "label_smoothing": 0.0},
    "robust": {"beta": 0.1},
    "ipo": {"beta": 0.1},
    "hinge": {"beta": 0.05},
    "exo_pair": {"beta": 0.1, "label_smoothing": 0.001},
    "nca_pair": {"beta": 0.01},
    "sppo_hard": {"beta": 0.001},
    "apo_zero": {"beta": 0.1},
    "apo_down": {"beta": 0.1},
    "bco_pair": {"beta": 0.1},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "orpo": {"beta": 0.1},
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "dpop": {"beta": 0.3, "penalty": 50.0},
    "r_dpo": {"beta": 0.1},
    "odpo": {"beta": 0.1, "alpha": 1.0},
    "f_dpo": {"beta": 0.1, "divergence": "reverse_kl", "alpha": None},
    "sft": {},
}


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_defaults_are_the_published_settings(name: str) -> None:
    inputs = batch(name, 3)
    if name == "dpop":
        inputs["ref_chosen_logps"] = inputs["chosen_logps"].detach() + 0.01  # the penalty is on
    required = REQUIRED.get(name, {})
    left_out = call(name, inputs, **required)
    given_out = call(name, inputs, **DEFAULTS[name], **required)
    assert left_out.loss.item() == given_out.loss.item()
    known = parts.options(PREFERENCE_LOSSES[name])
    assert known.keys() == DEFAULTS[name].keys() | required.keys()
    for option, value in DEFAULTS[name].items():
        assert known[option] == value


# Properties -------------------------------------------------------------------------------------


@every_loss
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), cut=st.integers(1, 5))
def test_order_and_split_change_nothing(name: str, options: dict, seed: int, cut: int) -> None:
    inputs = batch(name, seed)  # C39, C40
    whole = call(name, inputs, **options)
    slopes = gradients(whole.loss, inputs)

    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    moved = call(name, rows(inputs, order), **options)
    torch.testing.assert_close(moved.loss, whole.loss)

    pieces = [slice(0, cut), slice(cut, 6)]
    split = [call(name, rows(inputs, piece), denominator=6, **options) for piece in pieces]
    total = split[0].loss + split[1].loss
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(gradients(total, inputs), slopes)
    joined = combine_metrics([piece.metrics for piece in split], [cut, 6 - cut])
    torch.testing.assert_close(joined, whole.metrics, check_dtype=False)


@every_loss
def test_only_the_policy_learns(name: str, options: dict) -> None:
    inputs = batch(name, 1)
    for x in inputs.values():
        if x.is_floating_point():
            x.requires_grad_()
    output = call(name, inputs, **options)
    output.loss.backward()
    learned = {key for key, x in inputs.items() if x.grad is not None}
    assert learned == POLICY & inputs.keys()
    assert all(not x.requires_grad and x.ndim == 0 for x in output.metrics.values())


@pytest.mark.parametrize("name", PAIRED)
def test_pair_losses_report_the_same_names(name: str) -> None:
    metrics = call(name, batch(name, 1), **REQUIRED.get(name, {})).metrics
    own = {"nll_nats"} if name == "orpo" else set()
    common = {"accuracy", "ties", "margin", "chosen_reward", "rejected_reward"}
    assert metrics.keys() == common | own
    difference = metrics["chosen_reward"] - metrics["rejected_reward"]
    assert metrics["margin"].item() == pytest.approx(difference.item())


ANCHORED = {"nca_pair", "sppo_hard", "apo_zero", "apo_down", "bco_pair", "dpop"}


@pytest.mark.parametrize("name", WITH_REFERENCE)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.floats(10, 20))
def test_what_a_shift_of_the_log_probs_changes(name: str, seed: int, shift: float) -> None:
    options = REQUIRED.get(name, {})
    inputs = {key: x.detach() for key, x in batch(name, seed).items()}
    loss = call(name, inputs, beta=0.3, **options).loss
    # Of policy and reference alike: nothing.
    keys = ["chosen_logps", "ref_chosen_logps"]
    both = inputs | {key: inputs[key] - shift for key in keys}
    torch.testing.assert_close(call(name, both, beta=0.3, **options).loss, loss)
    # Of the policy at chosen and rejected alike, down past the reference: only an anchored loss sees it.
    keys = ["chosen_logps", "rejected_logps"]
    level = call(name, inputs | {key: inputs[key] - shift for key in keys}, beta=0.3, **options)
    assert (abs(level.loss.item() - loss.item()) > 1e-9) == (name in ANCHORED)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_have_finite_losses_and_gradients(
    name: str, options: dict, dtype: torch.dtype
) -> None:
    # All signs of log-ratios of 1000 nats; token means from -1000 to 0.
    inputs = batch(name, 0, size=4, dtype=dtype)
    extremes = {
        "chosen_logps": [1000, 1000, -1000, -1000],
        "rejected_logps": [1000, -1000, 1000, -1000],
        "logps": [1000, 1000, -1000, -1000],
        "chosen_mean_logps": [0, 0, -1000, -1000],
        "rejected_mean_logps": [0, -1000, 0, -1000],
        "desirable": [True, False, True, False],
    }
    for key in inputs.keys() & extremes.keys():
        kind = torch.bool if key == "desirable" else dtype
        inputs[key] = torch.tensor(extremes[key], dtype=kind)
        inputs[key].requires_grad_(key in POLICY)
    for key in inputs.keys() & {"ref_chosen_logps", "ref_rejected_logps", "ref_logps"}:
        inputs[key] = torch.zeros(4, dtype=dtype)
    output = call(name, inputs, **options)
    assert output.loss.dtype == dtype
    assert output.loss.isfinite()
    assert all(x.isfinite() for x in output.metrics.values())
    for slope in gradients(output.loss, inputs).values():
        assert slope.isfinite().all()


@pytest.mark.parametrize("x", [-50, -3, -1e-2, -1e-5])
def test_log_odds_keep_their_digits(x: float) -> None:
    # Against the rejected's odds of 1, in float32 and by the series of 1 - exp(x) in float64.
    below = -x * (1 + x / 2 + x**2 / 6 + x**3 / 24) if x > -0.1 else 1 - math.exp(x)
    output = call("orpo", {key: v.float() for key, v in means(x, math.log(0.5)).items()})
    assert output.metrics["margin"].item() == pytest.approx(x - math.log(below), rel=1e-6)


def test_certain_tokens_have_large_odds() -> None:
    # Held at a probability of 1 - eps: log((1 - eps) / eps), 36.04 in float64.
    metrics = call("orpo", means(0, math.log(0.5))).metrics
    assert metrics["margin"].item() == pytest.approx(52 * math.log(2))


def test_a_fallen_response_is_still_pulled_back() -> None:
    # Beyond the held power (44 nats in float32, 354.9 in float64): finite, ordered and with slope.
    chosen = vector(-400, -800, -1000).requires_grad_()
    zeros = torch.zeros_like(chosen)
    output = call(
        "f_dpo",
        {
            "chosen_logps": chosen,
            "rejected_logps": zeros.detach(),
            "ref_chosen_logps": zeros,
            "ref_rejected_logps": zeros,
        },
        divergence="forward_kl",
        beta=1.0,
    )
    (slope,) = torch.autograd.grad(output.loss * 3, chosen)
    held = math.log(torch.finfo(torch.float64).max) / 2
    assert slope.tolist() == pytest.approx([-math.exp(held)] * 3)
    rewards = [
        call("f_dpo", pair(u, 0), divergence="forward_kl", beta=1.0).metrics["chosen_reward"].item()
        for u in (-held + 1, -400.0, -1000.0)
    ]
    assert rewards[0] == pytest.approx(1 - math.exp(held - 1), rel=1e-9)
    expected = [-math.exp(held) * (1 + u - held) for u in (400, 1000)]
    assert rewards[1:] == pytest.approx(expected, rel=1e-9)


def test_a_power_next_to_the_reference_keeps_its_digits() -> None:
    # (1 - exp(-.001 u)) / .001 is nearly u = .5; in float32 the plain formula loses 4 digits.
    inputs = {key: x.float() for key, x in pair(0.5, 0).items()}
    metrics = call("f_dpo", inputs, divergence="alpha", alpha=0.001, beta=1.0).metrics
    assert metrics["chosen_reward"].item() == pytest.approx(0.5 - 0.000125, abs=1e-6)


def test_odpo_without_margins_and_dpop_without_penalty_are_dpo() -> None:
    inputs = batch("odpo", 5)
    expected = call("sigmoid", inputs, beta=0.3).loss
    torch.testing.assert_close(call("odpo", inputs, beta=0.3, alpha=0.0).loss, expected)
    torch.testing.assert_close(call("dpop", inputs, beta=0.3, penalty=0.0).loss, expected)
    torch.testing.assert_close(call("f_dpo", inputs, beta=0.3).loss, expected)


# Weighted sums ----------------------------------------------------------------------------------


def test_weighted_sum_by_hand() -> None:
    # DPO of h = 1 and 2 times an NLL of 1.5.
    a = call("sigmoid", pair(3, 1), beta=0.5)
    b = call("sft", {"chosen_mean_logps": vector(-1.5)})
    output = weighted_sum({"sigmoid": a, "sft": b}, {"sft": 2.0, "sigmoid": 0.5})
    assert output.loss.item() == pytest.approx(0.5 * 0.3132616875 + 2 * 1.5)
    assert output.metrics.keys() == a.metrics.keys() | {"nll_nats", "sigmoid_loss", "sft_loss"}
    assert output.metrics["sigmoid_loss"].item() == pytest.approx(0.3132616875)
    assert output.metrics["sft_loss"].item() == 1.5
    assert output.metrics["nll_nats"].item() == 1.5


def test_weighted_sum_takes_metrics_of_the_first() -> None:
    a = call("sigmoid", pair(3, 1), beta=0.5)
    b = call("hinge", pair(3, 1), beta=0.1)
    weights = {"a": 1.0, "b": 1.0}
    assert weighted_sum({"a": a, "b": b}, weights).metrics["margin"].item() == pytest.approx(1)
    assert weighted_sum({"b": b, "a": a}, weights).metrics["margin"].item() == pytest.approx(0.2)


def test_weighted_sum_of_a_split() -> None:
    inputs = batch("sigmoid", 2) | batch("sft", 2)

    def both(part: dict[str, Tensor], denominator: int, share: float) -> LossOutput:
        outputs = {name: call(name, part, denominator=denominator) for name in ("sigmoid", "sft")}
        return weighted_sum(outputs, {"sigmoid": 1.0, "sft": 0.2}, share=share)

    whole = both(inputs, 6, 1.0)
    split = [both(rows(inputs, slice(*ends)), 6, n / 6) for ends, n in (((0, 2), 2), ((2, 6), 4))]
    total = split[0].loss + split[1].loss
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(gradients(total, inputs), gradients(whole.loss, inputs))
    joined = combine_metrics([part.metrics for part in split], [2, 4])
    torch.testing.assert_close(joined, whole.metrics, check_dtype=False)
    assert all(not x.requires_grad for x in whole.metrics.values())


def test_weighted_sum_refusals() -> None:
    a = call("sigmoid", pair(3, 1))
    with pytest.raises(ValueError, match="one weight per loss"):
        weighted_sum({}, {})
    with pytest.raises(ValueError, match="one weight per loss"):
        weighted_sum({"a": a}, {"b": 1.0})
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a must be positive and finite"):
            weighted_sum({"a": a}, {"a": weight})
    for share in (0.0, -0.1, 1.01, math.nan):
        with pytest.raises(ValueError, match=r"share must lie in \(0, 1\]"):
            weighted_sum({"a": a}, {"a": 1.0}, share=share)


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_refuses_bad_tensors(name: str) -> None:
    options, inputs = REQUIRED.get(name, {}), batch(name, 0)
    with pytest.raises(ValueError, match="at least one pair"):
        call(name, rows(inputs, slice(0, 0)), **options)
    with pytest.raises(ValueError, match="at least one pair"):
        call(name, {key: x[None] if x.ndim else x for key, x in inputs.items()}, **options)
    for key, x in inputs.items():
        if key in CONSTANTS:
            with pytest.raises(
                ValueError, match=rf"^{key} must be a scalar \(\), got shape \(1,\)"
            ):
                call(name, inputs | {key: x[None]}, **options)
        elif len(inputs) > 1:
            with pytest.raises(ValueError, match="shapes differ"):
                call(name, inputs | {key: x[:5]}, **options)
        if len(inputs) > 1:
            with pytest.raises(ValueError, match="devices differ"):
                call(name, inputs | {key: x.to("meta")}, **options)


def test_lengths_need_one_number_per_pair() -> None:
    one = torch.tensor([5])
    inputs = batch("r_dpo", 0) | {"chosen_lengths": one, "rejected_lengths": one}
    with pytest.raises(ValueError, match="shapes differ"):
        call("r_dpo", inputs, alpha=0.1)


def test_the_length_term_keeps_the_digits_of_the_log_probs() -> None:
    # h = 1 + .1 * 3, log(1 + exp(-1.3)) = .24100845...; in float32 .1 * 3 is off by 1e-8.
    lengths = {"chosen_lengths": torch.tensor([8]), "rejected_lengths": torch.tensor([5])}
    output = call("r_dpo", pair(3, 1) | lengths, alpha=0.1, beta=0.5)
    assert output.loss.item() == pytest.approx(math.log1p(math.exp(-1.3)), rel=0, abs=1e-12)


def test_kto_needs_labels_as_bool() -> None:
    inputs = kto_inputs()
    with pytest.raises(ValueError, match="desirable must be bool, got"):
        call("kto", inputs | {"desirable": inputs["desirable"].double()})


@pytest.mark.parametrize("name", list(PREFERENCE_LOSSES))
def test_refuses_a_denominator_that_is_not_positive(name: str) -> None:
    for denominator in (0, -1.0, math.nan, torch.tensor(0.0)):
        with pytest.raises(ValueError, match="denominator must be positive"):
            call(name, batch(name, 0), denominator=denominator, **REQUIRED.get(name, {}))


POSITIVE = [(name, "beta") for name in PREFERENCE_LOSSES if name != "sft"]
POSITIVE += [("kto", "desirable_weight"), ("kto", "undesirable_weight")]
NOT_NEGATIVE = [("simpo", "gamma"), ("dpop", "penalty"), ("r_dpo", "alpha"), ("odpo", "alpha")]


def refused(name: str, option: str, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(name, batch(name, 0), **(REQUIRED.get(name, {}) | {option: value}))


@pytest.mark.parametrize(("name", "option"), POSITIVE)
def test_options_that_must_be_positive(name: str, option: str) -> None:
    for value in (0.0, -0.1, math.nan, math.inf):
        refused(name, option, value, f"{option} must be positive and finite")
    assert call(name, batch(name, 0), **(REQUIRED.get(name, {}) | {option: 1.5})).loss.isfinite()


@pytest.mark.parametrize(("name", "option"), NOT_NEGATIVE)
def test_options_that_must_not_be_negative(name: str, option: str) -> None:
    for value in (-1e-9, math.nan, math.inf):
        refused(name, option, value, f"{option} must be >= 0 and finite")
    for value in (0.0, 2.0):
        assert call(name, batch(name, 0), **{option: value}).loss.isfinite()


@pytest.mark.parametrize("name", ["sigmoid", "robust", "exo_pair"])
def test_label_smoothing_has_bounds(name: str) -> None:
    for value in (-0.01, 0.5, 0.7, math.nan):
        refused(name, "label_smoothing", value, r"label_smoothing must lie in \[0, 0.5\)")
    assert call(name, batch(name, 0), label_smoothing=0.49).loss.isfinite()


def test_exo_needs_label_smoothing() -> None:
    refused("exo_pair", "label_smoothing", 0.0, "label_smoothing must be positive")


@pytest.mark.parametrize("value", [None, 0.0, 1.0, -0.1, 1.1, math.nan])
def test_alpha_divergence_needs_its_alpha(value: float | None) -> None:
    with pytest.raises(ValueError, match=r"divergence 'alpha' needs alpha in \(0, 1\)"):
        call("f_dpo", batch("f_dpo", 0), divergence="alpha", alpha=value)


def test_other_divergences_have_no_alpha() -> None:
    for divergence in ("reverse_kl", "forward_kl", "js"):
        with pytest.raises(ValueError, match=f"'{divergence}' has no alpha; remove it"):
            call("f_dpo", batch("f_dpo", 0), divergence=divergence, alpha=0.5)
    with pytest.raises(ValueError, match="use one of reverse_kl, forward_kl, js, alpha"):
        call("f_dpo", batch("f_dpo", 0), divergence="jensen_shannon")
