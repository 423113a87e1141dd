"""Who says which of two answers is better, and which answers are compared."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from rlhf import config
from rlhf.errors import BadInput
from rlhf.rewards.gold import Gold, import_module, load_gold

if TYPE_CHECKING:
    import pandas as pd

Label = Literal["first", "second", "tie"]
PairRule = Literal["all", "adjacent", "best_worst"]


@dataclass(frozen=True)
class Answers:
    """One side of a list of comparisons: equally long columns."""

    ids: Sequence[str]
    """sample_id of each answer."""
    responses: Sequence[str]
    ended: Sequence[bool]
    """False where an answer was cut off."""
    gold: Sequence[float] | None = None
    """Gold totals, where they are known already; only the simulated labeler reads them."""

    def __post_init__(self) -> None:
        sizes = [len(self.ids), len(self.responses), len(self.ended)]
        sizes += [] if self.gold is None else [len(self.gold)]
        if len(set(sizes)) != 1:
            raise ValueError(f"the columns of Answers must be equally long, got {sizes}")

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Answers:
        """Those from `start` to before `stop`."""
        return Answers(
            self.ids[start:stop],
            self.responses[start:stop],
            self.ended[start:stop],
            None if self.gold is None else self.gold[start:stop],
        )


class Labeler(Protocol):
    """Compares answers to the same prompts."""

    @property
    def name(self) -> str:
        """Goes into the `labeler` column of the pairs."""

    @property
    def batch_size(self) -> int | None:
        """Comparisons per call; None: all at once."""

    def label(self, prompts: Sequence[str], first: Answers, second: Answers) -> list[Label]:
        """The better answer of each comparison, or "tie"."""


class SimulatedLabeler:
    """A Bradley-Terry annotator: P(i > j) = (1 - 2 flip) sigmoid((g_i - g_j) / noise) + flip.

    A comparison's draw depends on the seed and on the two sample ids alone: not on the order of
    the rows, on which answer comes first, or on what else is compared. Equal answers are a tie.
    """

    def __init__(self, gold: Gold, noise: float, flip: float, seed: int) -> None:
        if not (noise > 0 and math.isfinite(noise)):
            raise ValueError(f"noise must be finite and > 0, got {noise}")
        if not 0 <= flip < 0.5:
            raise ValueError(f"flip must be in [0, 0.5), got {flip}")
        self.name, self.batch_size = "simulated", None
        self._gold, self._noise, self._flip, self._seed = gold, noise, flip, seed

    def label(self, prompts: Sequence[str], first: Answers, second: Answers) -> list[Label]:
        """The preferred answer of each comparison."""
        _check_lengths(prompts, first, second)
        scores = [self._scores(prompts, answers) for answers in (first, second)]
        labels: list[Label] = []
        for i, (gold_first, gold_second) in enumerate(zip(*scores, strict=True)):
            if (first.responses[i], first.ended[i]) == (second.responses[i], second.ended[i]):
                labels.append("tie")
                continue
            low, high = sorted((first.ids[i], second.ids[i]))
            sign = 1.0 if low == first.ids[i] else -1.0
            low_wins = self._draw(low, high) < self.probability(sign * (gold_first - gold_second))
            labels.append("first" if low_wins == (sign > 0) else "second")
        return labels

    def probability(self, gold_margin: float) -> float:
        """P(i > j) for the margin g_i - g_j."""
        z = gold_margin / self._noise
        sigmoid = 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))
        return (1 - 2 * self._flip) * sigmoid + self._flip

    def _scores(self, prompts: Sequence[str], answers: Answers) -> list[float]:
        if answers.gold is not None:
            return [float(value) for value in answers.gold]
        table = self._gold.score(prompts, answers.responses, answers.ended)
        return [float(value) for value in table["total"]]

    def _draw(self, low: str, high: str) -> float:
        """A number in [0, 1) that the seed and the two ids fix."""
        text = f"label/{self._seed}/{low}/{high}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


class ProgramLabeler:
    """A user's function `(prompts, first: Answers, second: Answers) -> list of labels`."""

    def __init__(self, path: str, batch_size: int | None = None) -> None:
        self.name, self.batch_size = path, batch_size
        self._function = _import_function(path)

    def label(self, prompts: Sequence[str], first: Answers, second: Answers) -> list[Label]:
        """The function's labels. Raises BadInput naming the function where they are not labels."""
        _check_lengths(prompts, first, second)
        try:
            raw = list(self._function(list(prompts), first, second))
        except (Exception, SystemExit) as error:
            raise self._bad(f"raised {type(error).__name__}: {error}") from error
        if len(raw) != len(prompts):
            raise self._bad(f"returned {len(raw)} labels for {len(prompts)} comparisons")
        for i, value in enumerate(raw):
            if value not in get_args(Label):
                raise self._bad(f"returned {value!r} for comparison {i}")
        return raw

    def _bad(self, what: str) -> BadInput:
        return BadInput(
            what,
            where=f"labeler.path={self.name}",
            rule='one of "first", "second", "tie" for each comparison',
            mend="correct the function",
        )


def build(
    labeler: config.SimulatedLabeler | config.ProgramLabeler, gold: config.Gold | None, seed: int
) -> Labeler:
    """The labeler that a round declares."""
    if isinstance(labeler, config.ProgramLabeler):
        return ProgramLabeler(labeler.path, labeler.batch_size)
    if gold is None:
        raise BadInput(
            "kind=simulated needs gold, and gold is null",
            where="labeler",
            mend="declare gold, or use labeler.kind=program",
        )
    return SimulatedLabeler(load_gold(gold), labeler.noise, labeler.flip, seed)


def label_all(
    labeler: Labeler,
    prompts: Sequence[str],
    first: Answers,
    second: Answers,
    *,
    given: Sequence[Label] = (),
    on_call: Callable[[list[Label]], None] | None = None,
) -> list[Label]:
    """The labeler's word on every comparison, asked in calls of its `batch_size`.

    Args:
        given: labels of the first comparisons, from an earlier attempt; they are not asked for again.
        on_call: called after each call with all labels so far, to save what may have cost money.
    """
    labels = list(given)
    size = labeler.batch_size or max(1, len(prompts))
    for start in range(len(labels), len(prompts), size):
        stop = start + size
        labels += labeler.label(
            prompts[start:stop], first.part(start, stop), second.part(start, stop)
        )
        if on_call is not None:
            on_call(labels)
    return labels


def choose_pairs(rule: PairRule, group: pd.DataFrame) -> list[tuple[int, int]]:
    """Which answers of one group are compared, as positions of its rows.

    - all: every pair, (0, 1), (0, 2), ...
    - adjacent: (0, 1), (2, 3), ...; an odd last answer stays out.
    - best_worst: the highest and the lowest of the column `gold` (the first of equals); none if
      all are equal.
    """
    size = len(group)
    if rule == "all":
        return list(itertools.combinations(range(size), 2))
    if rule == "adjacent":
        return [(i, i + 1) for i in range(0, size - 1, 2)]
    if rule == "best_worst":
        scores = [float(value) for value in group["gold"]]
        if any(math.isnan(score) for score in scores):
            raise ValueError("best_worst needs a gold score for every answer of the group")
        if size < 2 or max(scores) == min(scores):
            return []
        return [(scores.index(max(scores)), scores.index(min(scores)))]
    raise ValueError(f"rule must be one of {', '.join(get_args(PairRule))}, got {rule!r}")


def _check_lengths(prompts: Sequence[str], first: Answers, second: Answers) -> None:
    if not len(prompts) == len(first) == len(second):
        raise ValueError(
            "prompts, first and second must be equally long, "
            f"got {len(prompts)}, {len(first)} and {len(second)}"
        )


def _import_function(path: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise BadInput(
            "not an import path of a function",
            where=f"labeler.path={path}",
            mend="write package.module.function",
        )
    function: Callable[..., Any] | None = getattr(
        import_module(module_name, where="labeler.path"), name, None
    )
    if function is None or not callable(function):
        raise BadInput(
            f"{module_name} has no function {name}",
            where=f"labeler.path={path}",
            mend="correct the path, or add the function",
        )
    return function
