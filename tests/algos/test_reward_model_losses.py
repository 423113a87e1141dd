"""Losses over scores: pairs, ties, rankings, steps; accuracy, committees and averaged weights."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_by_definition import minimise
from torch import Tensor

from rlhf.algos import parts
from rlhf.algos.reward_model_losses import (
    AGGREGATES,
    REWARD_MODEL_LOSSES,
    average_weights,
    bradley_terry_loss,
    bradley_terry_margin_loss,
    committee_mean_minus_variance,
    davidson_loss,
    mean_of,
    pairwise_accuracy,
    plackett_luce_loss,
    process_loss,
    rao_kupper_loss,
)
from rlhf.algos.types import LossOutput, combine_metrics

NAN, INF = float("nan"), float("inf")
TIE_LOSSES = {"davidson": davidson_loss, "rao_kupper": rao_kupper_loss}
every_tie_loss = pytest.mark.parametrize("name", list(TIE_LOSSES))


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = vector(2, 0), vector(1, 3)
    # Differences 1 and -3.
    expected = -(math.log(sigmoid(1)) + math.log(sigmoid(-3))) / 2
    output = bradley_terry_loss(chosen, rejected)
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics == {"accuracy": 0.5, "ties": 0, "margin": -1, "score_mean": 1.5}
    # Margins 1 and 1: differences 0 and -4.
    expected = -(math.log(0.5) + math.log(sigmoid(-4))) / 2
    actual = bradley_terry_margin_loss(chosen, rejected, vector(1, 1)).loss.item()
    assert actual == pytest.approx(expected, abs=1e-12)
    # Centring adds .5 * ((2 + 1)^2 + (0 + 3)^2) / 2 = 4.5.
    centred = bradley_terry_loss(chosen, rejected, centering=0.5).loss
    assert centred.item() - output.loss.item() == pytest.approx(4.5, abs=1e-12)


def test_bradley_terry_label_smoothing_with_margin_by_hand() -> None:
    # If the label is wrong, it is the rejected that must lead by the margin.
    output = bradley_terry_margin_loss(vector(2), vector(0), vector(1), label_smoothing=0.2)
    expected = -0.8 * math.log(sigmoid(2 - 1)) - 0.2 * math.log(sigmoid(-2 - 1))
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(lead=st.floats(1e-3, 30))
def test_right_order_costs_less_than_a_coin(lead: float) -> None:  # T5
    loss = bradley_terry_loss(vector(lead), vector(0)).loss.item()
    assert 0 < loss < math.log(2)
    assert bradley_terry_loss(vector(0), vector(lead)).loss.item() > math.log(2)


def test_extreme_scores_have_finite_losses_and_gradients() -> None:
    rejected = vector(1e4).requires_grad_()
    output = bradley_terry_loss(vector(-1e4), rejected)
    output.loss.backward()
    assert output.loss.item() == 2e4
    assert rejected.grad is not None
    assert rejected.grad.item() == 1


def test_ties_are_their_own_number() -> None:  # T10
    # Won, won, lost, tied: 2 of 3 decided, 1 of 4 tied.
    accuracy, ties = pairwise_accuracy(vector(3, 2, 0, 1), vector(1, 1, 1, 1))
    assert accuracy.item() == pytest.approx(2 / 3)
    assert ties.item() == 0.25
    accuracy, ties = pairwise_accuracy(vector(1, 1), vector(1, 1))
    assert (accuracy.item(), ties.item()) == (0.5, 1)
    accuracy, ties = pairwise_accuracy(vector(1, 2), vector(1, 1))
    assert (accuracy.item(), ties.item()) == (1, 0.5)


def test_committees_by_hand() -> None:
    # Members' scores of two responses: (1, 4), (3, 4). Variance (ddof 0): 1 and 0.
    scores = torch.tensor([[1.0, 4.0], [3.0, 4.0]])
    assert AGGREGATES["mean"](scores).tolist() == [2, 4]
    assert AGGREGATES["min"](scores).tolist() == [1, 4]
    assert AGGREGATES["mean_minus_variance"](scores, variance_coef=0.25).tolist() == [1.75, 4]


@pytest.mark.parametrize("name", list(AGGREGATES))
def test_a_committee_of_one_is_its_member(name: str) -> None:
    scores = torch.tensor([[1.0, -2.0, 3.0]])
    assert torch.equal(AGGREGATES[name](scores), scores[0])
    with pytest.raises(ValueError, match=r"\(M, B\)"):
        AGGREGATES[name](scores[0])


def numbers(output: LossOutput) -> dict[str, float]:
    return {name: value.item() for name, value in output.metrics.items()}


def test_margin_is_a_constant_and_bradley_terry_has_none() -> None:
    scores, margins = vector(1, 2).requires_grad_(), vector(3, 0.5).requires_grad_()
    for label_smoothing in (0.0, 0.1):
        bradley_terry_margin_loss(
            scores, vector(0, 0), margins, label_smoothing=label_smoothing
        ).loss.backward()
        assert margins.grad is None
    plain = bradley_terry_loss(scores, vector(0, 3), label_smoothing=0.1, centering=0.2)
    zero = bradley_terry_margin_loss(
        scores, vector(0, 3), vector(0, 0), label_smoothing=0.1, centering=0.2
    )
    assert torch.equal(plain.loss, zero.loss)
    assert numbers(plain) == numbers(zero)


def test_label_smoothing_of_bradley_terry_by_hand() -> None:
    # d = 2: -.9 log sigmoid(2) - .1 log sigmoid(-2)
    output = bradley_terry_loss(vector(2), vector(0), label_smoothing=0.1)
    expected = -0.9 * math.log(sigmoid(2)) - 0.1 * math.log(sigmoid(-2))
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)


def test_davidson_by_hand() -> None:
    # nu = .5; d = 2, then 0 and tied: e, .5, 1/e and 1, .5, 1.
    output = davidson_loss(
        vector(2, 1), vector(0, 1), torch.tensor([False, True]), torch.tensor(math.log(0.5))
    )
    total = math.e + 0.5 + 1 / math.e
    expected = -(math.log(math.e / total) + math.log(0.5 / 2.5)) / 2
    assert output.loss.item() == pytest.approx(expected, abs=1e-7)
    assert numbers(output) == pytest.approx(
        {
            "accuracy": 0.5,  # the win is the likeliest of the first; of the second, a decision is
            "labelled_ties": 0.5,
            "expected_ties": (0.5 / total + 0.2) / 2,
            "score_mean": 1,
        },
        abs=1e-7,
    )


def test_rao_kupper_by_hand() -> None:
    # eta = .5; d = 2: sigmoid(1.5), sigmoid(-2.5), the rest. d = 0: tanh(.25) of ties.
    output = rao_kupper_loss(
        vector(2, 1), vector(0, 1), torch.tensor([False, True]), torch.tensor(math.log(0.5))
    )
    tie = 1 - sigmoid(1.5) - sigmoid(-2.5)
    expected = -(math.log(sigmoid(1.5)) + math.log(math.tanh(0.25))) / 2
    assert output.loss.item() == pytest.approx(expected, abs=1e-7)
    assert numbers(output) == pytest.approx(
        {
            "accuracy": 0.5,
            "labelled_ties": 0.5,
            "expected_ties": (tie + math.tanh(0.25)) / 2,
            "score_mean": 1,
        },
        abs=1e-7,
    )


@every_tie_loss
@settings(max_examples=30, deadline=None)
@given(lead=st.floats(-20, 20), log_tie=st.floats(-5, 2.5))
def test_outcomes_are_all_there_are(name: str, lead: float, log_tie: float) -> None:
    def probability(first: float, second: float, tied: bool) -> float:
        output = TIE_LOSSES[name](
            vector(first), vector(second), torch.tensor([tied]), vector(log_tie)[0]
        )
        return math.exp(-output.loss.item())

    win, loss = probability(lead, 0, False), probability(0, lead, False)
    tie = probability(lead, 0, True)
    assert tie == pytest.approx(probability(0, lead, True), rel=1e-9)
    assert win + tie + loss == pytest.approx(1, abs=1e-9)


@every_tie_loss
@pytest.mark.parametrize("log_tie", [-30.0, -80.0, -1000.0])
def test_without_ties_they_are_bradley_terry(name: str, log_tie: float) -> None:
    chosen, rejected = vector(2, 0, 1).requires_grad_(), vector(1, 3, 1)
    loss = TIE_LOSSES[name](
        chosen, rejected, torch.zeros(3, dtype=torch.bool), vector(log_tie)[0], centering=0.3
    ).loss
    plain = bradley_terry_loss(chosen, rejected, centering=0.3).loss
    assert loss.item() == pytest.approx(plain.item(), abs=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(loss, chosen)[0], torch.autograd.grad(plain, chosen)[0]
    )


@every_tie_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_tie", [-1000.0, -60.0, -19.0, 0.0, 5.0])
def test_extreme_scores_and_ties_are_finite(name: str, log_tie: float, dtype: torch.dtype) -> None:
    chosen = torch.tensor([1e3, -1e3, 1e3, 0.0], dtype=dtype, requires_grad=True)
    rejected = -chosen.detach()
    tie = torch.tensor(log_tie, dtype=dtype, requires_grad=True)
    output = TIE_LOSSES[name](chosen, rejected, torch.tensor([False, False, True, True]), tie)
    output.loss.backward()
    assert output.loss.isfinite()
    assert chosen.grad is not None
    assert chosen.grad.isfinite().all()
    assert tie.grad is not None
    assert tie.grad.isfinite()
    # Two labelled ties of a model that knows none: a slope of -1 each of 4 at least.
    if log_tie < -50:
        assert tie.grad.item() == pytest.approx(-0.5, abs=1e-6)
        assert output.loss.item() > 10


@pytest.mark.parametrize("log_tie", [-22.0, -20.0, -19.2, -19.1, -18.0, -10.0, -1.0, 1.0, 4.0])
def test_rao_kupper_ties_for_small_and_large_thresholds(log_tie: float) -> None:
    # Equal scores tie with tanh(eta / 2), whose logarithm has the slope eta / sinh(eta).
    eta = math.exp(log_tie)
    tie = vector(log_tie)[0].requires_grad_()
    loss = rao_kupper_loss(vector(1), vector(1), torch.tensor([True]), tie).loss
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(math.tanh(eta / 2)), rel=1e-9, abs=1e-12)
    assert tie.grad is not None
    assert tie.grad.item() == pytest.approx(-eta / math.sinh(eta), rel=1e-7)


@pytest.mark.parametrize(
    ("name", "lead", "tied", "accuracy"),
    [
        ("davidson", 3.0, False, 1),
        ("davidson", -3.0, False, 0),
        ("davidson", 0.1, False, 0),  # a tie is likelier
        ("davidson", 0.1, True, 1),
        ("davidson", 3.0, True, 0),
        ("davidson", -3.0, True, 0),
        ("davidson", 2 * math.log(2), False, 0.5),  # e^(d/2) = nu = 2
        ("davidson", 2 * math.log(2), True, 0.5),
        ("rao_kupper", 9.0, False, 1),
        ("rao_kupper", -9.0, True, 0),
        ("rao_kupper", 0.1, True, 1),
    ],
)
def test_accuracy_is_that_of_three_outcomes(
    name: str, lead: float, tied: bool, accuracy: float
) -> None:
    output = TIE_LOSSES[name](vector(lead), vector(0), torch.tensor([tied]), vector(math.log(2))[0])
    assert output.metrics["accuracy"].item() == accuracy
    assert output.metrics["labelled_ties"].item() == tied


TRUE_SCORES = vector(1.0, 0.2, -0.5, 2.0)
FIRST, SECOND = torch.tensor(list(itertools.combinations(range(4), 2))).T


@every_tie_loss
def test_optimum_recovers_scores_and_ties(name: str) -> None:
    # Every pair with each outcome, weighed by its true probability.
    log_tie = -0.4
    lead = TRUE_SCORES[FIRST] - TRUE_SCORES[SECOND]
    if name == "davidson":
        shares = torch.stack([lead / 2, torch.full_like(lead, log_tie), -lead / 2]).softmax(0)
    else:
        eta = math.exp(log_tie)
        win, loss = (lead - eta).sigmoid(), (-lead - eta).sigmoid()
        shares = torch.stack([win, 1 - win - loss, loss])
    yes, no = torch.tensor([True]), torch.tensor([False])

    def objective(x: Tensor) -> Tensor:
        scores, tie, total = x[:4], x[4], 1e-9 * x[:4].sum().square()
        for k, (i, j) in enumerate(zip(FIRST.tolist(), SECOND.tolist(), strict=True)):
            a, b = scores[i : i + 1], scores[j : j + 1]
            total = total + shares[0, k] * TIE_LOSSES[name](a, b, no, tie).loss
            total = total + shares[1, k] * TIE_LOSSES[name](a, b, yes, tie).loss
            total = total + shares[2, k] * TIE_LOSSES[name](b, a, no, tie).loss
        return total

    found = minimise(objective, 5)
    actual = found[:4] - found[:4].mean()
    torch.testing.assert_close(actual, TRUE_SCORES - TRUE_SCORES.mean(), rtol=0, atol=1e-5)
    assert found[4].item() == pytest.approx(log_tie, abs=1e-5)


@every_tie_loss
def test_the_parameter_of_ties_is_read_in_the_type_of_the_scores(name: str) -> None:
    half = torch.tensor([1.5], dtype=torch.float64)
    tied, no = torch.tensor([True]), torch.zeros(1, dtype=torch.float64)
    low = TIE_LOSSES[name](half, no, tied, torch.tensor(1.0, dtype=torch.bfloat16))
    high = TIE_LOSSES[name](half, no, tied, torch.tensor(1.0, dtype=torch.float64))
    assert torch.equal(low.loss, high.loss)
    single = TIE_LOSSES[name](half.float(), no.float(), tied, torch.tensor(1.0).double())
    assert single.loss.dtype == torch.float32


def test_davidson_expects_as_many_ties_as_there_are() -> None:
    chosen, rejected = vector(2, 0, 1, 5, -1), vector(1, 3, 1, 2, 0)
    tied = torch.tensor([True, False, False, True, False])
    tie = minimise(lambda x: davidson_loss(chosen, rejected, tied, x[0]).loss, 1)[0]
    output = davidson_loss(chosen, rejected, tied, tie)
    assert output.metrics["expected_ties"].item() == pytest.approx(0.4, abs=1e-6)
    assert output.metrics["labelled_ties"].item() == pytest.approx(0.4)


def test_plackett_luce_by_hand() -> None:
    # Scores 2, 1, 0: log(e^2 + e + 1) - 2 and log(e + 1) - 1. A ranking of two: log(1 + e^-3).
    scores = torch.tensor([[2.0, 1.0, 0.0], [1.0, NAN, -2.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, True]])
    output = plackett_luce_loss(scores, mask)
    three = math.log(math.e**2 + math.e + 1) - 2 + math.log(math.e + 1) - 1
    two = math.log(1 + math.exp(-3))
    assert output.loss.item() == pytest.approx((three + two) / 2, abs=1e-12)
    assert numbers(output) == pytest.approx({"accuracy": 1, "ties": 0, "score_mean": 0.4})
    # Pairs 1 > 3 wrong, 1 > 1 tied, 3 > 1 right; and 0 > 5 wrong.
    scores = torch.tensor([[1.0, 3.0, 1.0], [0.0, NAN, 5.0]])
    metrics = plackett_luce_loss(scores, mask).metrics
    assert metrics["accuracy"].item() == pytest.approx(1 / 3)
    assert metrics["ties"].item() == pytest.approx(1 / 4)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_ranking_of_two_is_bradley_terry(seed: int) -> None:
    scores = torch.randn(5, 2, generator=torch.Generator().manual_seed(seed)).double() * 10
    ranking = plackett_luce_loss(scores, torch.ones(5, 2, dtype=torch.bool))
    pairs = bradley_terry_loss(scores[:, 0], scores[:, 1])
    torch.testing.assert_close(ranking.loss, pairs.loss)
    for name in ("accuracy", "ties", "score_mean"):
        torch.testing.assert_close(ranking.metrics[name], pairs.metrics[name])


def test_plackett_luce_probabilities_sum_to_one_and_recover_the_scores() -> None:
    orders = torch.tensor(list(itertools.permutations(range(4))))
    mask = torch.ones(1, 4, dtype=torch.bool)

    def losses(scores: Tensor) -> Tensor:
        return torch.stack([plackett_luce_loss(scores[o][None], mask).loss for o in orders])

    probs = (-losses(TRUE_SCORES)).exp()
    assert probs.sum().item() == pytest.approx(1, abs=1e-12)
    found = minimise(lambda x: (probs * losses(x)).sum() + 1e-9 * x.sum().square(), 4)
    torch.testing.assert_close(
        found - found.mean(), TRUE_SCORES - TRUE_SCORES.mean(), rtol=0, atol=1e-5
    )


def test_plackett_luce_masked_and_extreme_places() -> None:
    scores = torch.tensor([[1e3, -1e3, NAN, 1e3], [NAN, 0.0, INF, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True], [False, True, False, True]])
    scores.requires_grad_()
    loss = plackett_luce_loss(scores, mask).loss
    loss.backward()
    # Log(e^1000 + e^-1000 + e^1000) - 1000 = log 2, then 1000 + 1000; log(1 + e) - 0.
    assert loss.item() == pytest.approx((math.log(2) + 2000 + math.log(1 + math.e)) / 2)
    assert scores.grad is not None
    assert scores.grad[~mask].tolist() == [0, 0, 0]
    # sigmoid: -(1 - e^0 / (e^0 + e^1)) / 2 to the first of the second ranking.
    assert scores.grad[1, 1].item() == pytest.approx(-sigmoid(1) / 2)
    assert scores.grad[0].sum().item() == pytest.approx(0, abs=1e-12)


def test_process_loss_by_hand() -> None:
    # Steps: z 2, y 1: -log sigmoid(2); z -1, y .25: -.25 log sigmoid(-1) - .75 log sigmoid(1);
    # z 0, y 0: log 2. The mean of three.
    logits = torch.tensor([[2.0, NAN, -1.0], [0.0, INF, NAN]], dtype=torch.float64)
    labels = torch.tensor([[1.0, 7.0, 0.25], [0.0, NAN, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [True, False, False]])
    logits.requires_grad_()
    output = process_loss(logits, labels, mask)
    output.loss.backward()
    terms = [
        -math.log(sigmoid(2)),
        -0.25 * math.log(sigmoid(-1)) - 0.75 * math.log(sigmoid(1)),
        math.log(2),
    ]
    assert output.loss.item() == pytest.approx(sum(terms) / 3, abs=1e-12)
    assert logits.grad is not None
    slopes = [(sigmoid(2) - 1) / 3, 0, (sigmoid(-1) - 0.25) / 3, 0.5 / 3, 0, 0]
    assert logits.grad.flatten().tolist() == pytest.approx(slopes, abs=1e-12)
    assert numbers(output) == pytest.approx(
        {
            "accuracy": 2.5 / 3,
            "label_mean": 1.25 / 3,
            "probability_mean": (sigmoid(2) + sigmoid(-1) + 0.5) / 3,
        },
        abs=1e-12,
    )
    wrong = process_loss(logits.detach(), 1 - labels, mask)
    assert wrong.metrics["accuracy"].item() == pytest.approx(0.5 / 3)


def test_a_step_that_annotators_are_split_on_is_half_right() -> None:
    labels, mask = torch.tensor([[0.5, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
    output = process_loss(torch.tensor([[3.0, 3.0]]), labels, mask)
    assert output.metrics["accuracy"].item() == 0.75


def test_labels_of_steps_are_constants() -> None:
    logits = torch.tensor([[3.0, 3.0]], requires_grad=True)
    labels, mask = torch.tensor([[0.5, 1.0]], requires_grad=True), torch.ones(1, 2).bool()
    process_loss(logits, labels, mask).loss.backward()
    assert logits.grad is not None
    assert labels.grad is None


def test_process_loss_is_finite_at_extreme_logits() -> None:
    logits = torch.tensor([[1e3, -1e3]], requires_grad=True)
    output = process_loss(logits, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool))
    output.loss.backward()
    assert output.loss.item() == 1e3
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.5, -0.5]]


def test_average_weights_by_hand() -> None:
    members = [
        {"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor(3)},
        {"w": torch.tensor([3.0, 6.0], requires_grad=True), "steps": torch.tensor(3)},
    ]
    equal = average_weights(members)
    assert equal["w"].tolist() == [2, 4]
    assert equal["steps"].tolist() == 3
    assert equal["steps"].dtype == torch.int64
    assert not equal["w"].requires_grad
    # 1/4 and 3/4, scaled to a sum of 1.
    assert average_weights(members, [1, 3])["w"].tolist() == [2.5, 5]
    # A member of weight 0 may hold anything.
    members[1]["w"] = torch.tensor([NAN, INF])
    assert average_weights(members, [2, 0])["w"].tolist() == [1, 2]
    # New memory.
    alone = average_weights(members[:1])
    alone["w"][0] = 9
    alone["steps"] += 1
    assert members[0]["w"].tolist() == [1, 2]
    assert members[0]["steps"].tolist() == 3


def test_average_weights_keeps_types_and_sums_in_float32() -> None:
    # In float16, 60000 + 60000 overflows; in bfloat16 the mean of 256 and 1 is rounded once.
    halves = average_weights([{"w": torch.tensor([1.2e5 / 2], dtype=torch.float16)}] * 3)
    assert halves["w"].dtype == torch.float16
    assert halves["w"].item() == 60000
    double = average_weights([{"w": vector(1e-9)}, {"w": vector(1)}])
    assert double["w"].dtype == torch.float64
    assert double["w"].item() == (1 + 1e-9) / 2
    # (.125 + 2 * .25) / 3 = .2083; with terms in bfloat16 it is rounded to .2090.
    two = [{"w": torch.tensor([w], dtype=torch.bfloat16)} for w in (0.125, 0.25)]
    expected = torch.tensor(0.625 / 3, dtype=torch.bfloat16).item()
    assert average_weights(two, [1, 2])["w"].item() == expected
    many = [{"w": torch.tensor([256.0 if i == 0 else 1.0], dtype=torch.bfloat16)} for i in range(8)]
    assert average_weights(many)["w"].item() == torch.tensor(263 / 8, dtype=torch.bfloat16).item()


def test_average_weights_refusals() -> None:
    w = {"w": torch.zeros(2)}
    for members, weights, match in (
        ([], None, "at least one"),
        ([w, w], [1.0], "2 state dicts but 1 weights"),
        ([w, w], [1.0, -1.0], "finite, >= 0 and not all 0"),
        ([w, w], [0.0, 0.0], "finite, >= 0 and not all 0"),
        ([w, w], [NAN, 1.0], "finite, >= 0 and not all 0"),
        ([w, w], [INF, 1.0], "finite, >= 0 and not all 0"),
        ([w, {"v": torch.zeros(2)}], None, "name different tensors"),
        ([w, {**w, "v": torch.zeros(2)}], None, "name different tensors"),
        ([w, {"w": torch.zeros(3)}], None, "w: shapes or types"),
        ([w, {"w": torch.zeros(2).double()}], None, "w: shapes or types"),
        ([w, {"w": torch.zeros(2, device="meta")}], None, "devices differ"),
        ([{"n": torch.tensor(1)}, {"n": torch.tensor(2)}], None, "n: not floating point"),
    ):
        with pytest.raises(ValueError, match=match):
            average_weights(members, weights)


CASES = [*REWARD_MODEL_LOSSES, "plackett_luce", "process"]


def run(name: str, x: Tensor, rows: Tensor | slice, denominator: float | None) -> LossOutput:
    """The loss of those rows of x, (6, 2), the last inputs made up from it."""
    odd = torch.tensor([False, True, False, True, True, False])
    if name == "plackett_luce":
        wide = torch.cat([x, x[:, :1].detach().sin()], dim=1)
        return plackett_luce_loss(
            wide[rows], torch.ones(6, 3, dtype=torch.bool)[rows], denominator=denominator
        )
    if name == "process":
        mask = torch.stack([torch.ones_like(odd), odd], dim=1)
        total = None if denominator is None else float(mask.sum())
        return process_loss(x[rows], x.detach().sigmoid()[rows], mask[rows], denominator=total)
    available = {
        "chosen_scores": x[rows, 0],
        "rejected_scores": x[rows, 1],
        "margins": x.detach()[rows, 0].abs(),
        "tied": odd[rows],
        "log_tie": torch.tensor(0.1),
    }
    return parts.call(REWARD_MODEL_LOSSES[name], available, centering=0.1, denominator=denominator)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), cut=st.integers(1, 5))
def test_order_and_split_change_nothing(name: str, seed: int, cut: int) -> None:  # C39, C40
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 2, generator=generator, dtype=torch.float64).requires_grad_()
    whole = run(name, x, slice(None), None)
    (gradient,) = torch.autograd.grad(whole.loss, x)
    moved = run(name, x, torch.randperm(6, generator=generator), None)
    torch.testing.assert_close(moved.loss, whole.loss)
    split = [run(name, x, part, 6.0) for part in (slice(0, cut), slice(cut, 6))]
    (split_gradient,) = torch.autograd.grad(split[0].loss + split[1].loss, x)
    torch.testing.assert_close(split[0].loss + split[1].loss, whole.loss)
    torch.testing.assert_close(split_gradient, gradient)
    steps = torch.tensor([1, 2, 1, 2, 2, 1])
    weights = [steps[:cut].sum(), steps[cut:].sum()] if name == "process" else [cut, 6 - cut]
    joined = combine_metrics([part.metrics for part in split], weights)
    for metric, value in whole.metrics.items():
        torch.testing.assert_close(joined[metric], value, check_dtype=False)
        assert not value.requires_grad


@pytest.mark.parametrize("name", ["bradley_terry", "davidson", "rao_kupper", "plackett_luce"])
def test_only_differences_count(name: str) -> None:
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    available = {"tied": torch.arange(6) % 2 == 0, "log_tie": torch.tensor(0.1)}

    def loss(x: Tensor) -> Tensor:
        if name == "plackett_luce":
            return plackett_luce_loss(x, torch.ones(6, 2, dtype=torch.bool)).loss
        scores = {"chosen_scores": x[:, 0], "rejected_scores": x[:, 1]}
        return parts.call(REWARD_MODEL_LOSSES[name], {**available, **scores}).loss

    torch.testing.assert_close(loss(x + 7), loss(x))
    assert abs(loss(x * 2) - loss(x)) > 1e-3


@pytest.mark.parametrize("name", list(REWARD_MODEL_LOSSES))
def test_centering_by_hand_and_refusals(name: str) -> None:
    x = vector(1, 2)
    available = {
        "chosen_scores": x, "rejected_scores": x - 3, "margins": x,
        "tied": torch.tensor([True, False]), "log_tie": torch.tensor(0.0),
    }  # fmt: skip
    part = REWARD_MODEL_LOSSES[name]
    plain = parts.call(part, available).loss
    # .5 * ((1 - 2)^2 + (2 - 1)^2) / 2 = .5
    centred = parts.call(part, available, centering=0.5).loss
    assert (centred - plain).item() == pytest.approx(0.5, abs=1e-12)
    assert parts.call(part, available, denominator=4).loss.item() == pytest.approx(plain.item() / 2)
    for wrong in (-0.1, NAN):
        with pytest.raises(ValueError, match="centering must be >= 0"):
            parts.call(part, available, centering=wrong)
    for denominator in (0, -1.0, NAN):
        with pytest.raises(ValueError, match="denominator must be positive"):
            parts.call(part, available, denominator=denominator)
    for key in set(parts.inputs(part)) - {"log_tie"}:
        with pytest.raises(ValueError, match="shapes differ"):
            parts.call(part, {**available, key: available[key][:1]})
        with pytest.raises(ValueError, match="devices differ"):
            parts.call(part, {**available, key: available[key].to("meta")})
    empty = {key: value[:0] if value.ndim else value for key, value in available.items()}
    with pytest.raises(ValueError, match="at least one pair"):
        parts.call(part, empty)


@every_tie_loss
def test_tie_refusals(name: str) -> None:
    x, tied, tie = vector(1, 2), torch.tensor([True, False]), torch.tensor(0.0)
    with pytest.raises(ValueError, match="tied must be bool"):
        TIE_LOSSES[name](x, x, tied.float(), tie)
    with pytest.raises(ValueError, match="log_tie must be a scalar"):
        TIE_LOSSES[name](x, x, tied, tie[None])
    with pytest.raises(ValueError, match="devices differ"):
        TIE_LOSSES[name](x, x, tied, tie.to("meta"))


def test_what_the_entries_read_and_their_options() -> None:
    pair = ("chosen_scores", "rejected_scores")
    assert {name: parts.inputs(part) for name, part in REWARD_MODEL_LOSSES.items()} == {
        "bradley_terry": pair,
        "bradley_terry_margin": (*pair, "margins"),
        "davidson": (*pair, "tied", "log_tie"),
        "rao_kupper": (*pair, "tied", "log_tie"),
    }
    smoothed, plain = {"label_smoothing": 0.0, "centering": 0.0}, {"centering": 0.0}
    assert {name: parts.options(part) for name, part in REWARD_MODEL_LOSSES.items()} == {
        "bradley_terry": smoothed,
        "bradley_terry_margin": smoothed,
        "davidson": plain,
        "rao_kupper": plain,
    }


def test_refusals() -> None:
    x, both = vector(1, 2), torch.ones(2, 2, dtype=torch.bool)
    for wrong in (-0.1, 0.5, NAN):
        with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 0.5\)"):
            bradley_terry_loss(x, x, label_smoothing=wrong)
    with pytest.raises(ValueError, match="as \\(B,\\)"):
        bradley_terry_loss(x[None], x[None])
    with pytest.raises(ValueError, match="shapes differ"):
        pairwise_accuracy(x, x[:1])
    for wrong in (-1.0, NAN):
        with pytest.raises(ValueError, match="variance_coef"):
            committee_mean_minus_variance(x[None], variance_coef=wrong)
    with pytest.raises(ValueError, match="denominator must be positive"):
        mean_of(x, 0.0)
    assert mean_of(x, 0.5).item() == 6
    scores = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="two answers in each"):
        plackett_luce_loss(scores, torch.tensor([[True, True], [True, False]]))
    with pytest.raises(ValueError, match="at least one ranking"):
        plackett_luce_loss(scores[:0], both[:0])
    with pytest.raises(ValueError, match="shapes differ"):
        plackett_luce_loss(scores, both[:1])
    with pytest.raises(ValueError, match="must be bool"):
        plackett_luce_loss(scores, both.float())
    with pytest.raises(ValueError, match="devices differ"):
        plackett_luce_loss(scores.to("meta"), both)
    with pytest.raises(ValueError, match="denominator must be positive"):
        plackett_luce_loss(scores, both, denominator=0)
    for wrong in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            process_loss(scores, torch.full((2, 2), wrong), both)
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):  # a single one
            process_loss(scores, torch.tensor([[0.0, 1.0], [0.5, wrong]]), both)
    with pytest.raises(ValueError, match="selects nothing"):
        process_loss(scores, scores, both & False)
    with pytest.raises(ValueError, match="shapes differ"):
        process_loss(scores, scores[:1], both)
    with pytest.raises(ValueError, match="devices differ"):
        process_loss(scores, scores.to("meta"), both)
    with pytest.raises(ValueError, match="devices differ"):
        process_loss(scores.to("meta"), scores, both)
    with pytest.raises(ValueError, match="shapes differ"):
        process_loss(scores[:1], scores, both)
    with pytest.raises(ValueError, match="must be bool"):
        process_loss(scores, scores, both.float())


def test_committees_need_a_table_of_scores() -> None:
    # By default half a unit of variance: mean 2, variance 1.
    assert committee_mean_minus_variance(torch.tensor([[1.0], [3.0]])).tolist() == [1.5]
    assert committee_mean_minus_variance(torch.tensor([[1.0], [3.0]]), variance_coef=0).item() == 2
    for aggregate in AGGREGATES.values():
        with pytest.raises(ValueError, match=r"\(M, B\)"):
            aggregate(torch.zeros(0, 3))
