"""Parts named by import path, checked before anything is computed: they import, and fit their signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlhf import config
from rlhf.candidates import Imported

if TYPE_CHECKING:
    from rlhf.algos.types import LossOutput


def check_imported(pipeline: config.Pipeline, path: str = "pipeline.yaml") -> None:
    """Imports every part named by import path and compares it with what the file gives it.

    Raises ConfigError with every problem. Does nothing, and imports nothing, where all parts are built in.
    """
    problems = [
        f"candidates.{name}.{problem}"
        for name, candidate in pipeline.candidates.items()
        if any(isinstance(part, Imported) for part in _parts(candidate))
        for problem in _problems(candidate)
    ]
    for name, declared in pipeline.rounds.items():
        if isinstance(declared.reward_model.loss, Imported):
            problems += [f"rounds.{name}.{p}" for p in _reward_model_problems(declared)]
    if problems:
        raise config.ConfigError(path, problems)


def reward_model_part(settings: config.RewardModel) -> Callable[..., LossOutput]:
    """The function of the reward model's loss. Raises ValueError if a part of yours does not fit."""
    from rlhf.algos import parts
    from rlhf.algos.reward_model_losses import REWARD_MODEL_LOSSES

    place = "reward_model.loss"
    loss = parts.resolve(REWARD_MODEL_LOSSES, settings.loss.kind, place)
    available = frozenset({"chosen_scores", "rejected_scores", "tied", "log_tie"})
    name = f"{place}={settings.loss.kind}"
    parts.check(loss, name, available, settings.loss.arguments(), {"denominator"})
    return loss


def _reward_model_problems(declared: config.Round) -> Iterator[str]:
    try:
        reward_model_part(declared.reward_model)
    except ValueError as error:
        yield str(error)


def _parts(candidate: config.AnyCandidate) -> list[config.Part]:
    if isinstance(candidate, config.RlCandidate):
        return [candidate.advantage, candidate.loss]
    return list(candidate.losses)


def _problems(candidate: config.AnyCandidate) -> Iterator[str]:
    from rlhf.optimise.pairs import pair_parts
    from rlhf.optimise.rl import rl_parts

    try:
        if isinstance(candidate, config.RlCandidate):
            rl_parts(candidate, has_critic=candidate.value is not None)
        else:
            pair_parts(
                candidate,
                has_reference=candidate.reference != "none",
                has_margins=isinstance(candidate, config.OnlinePreferenceCandidate),
            )
    except ValueError as error:
        yield str(error)
