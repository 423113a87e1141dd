"""Parts named by import path, checked before anything is computed: they import, and fit their signature."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf import config
from rlhf.candidates import Imported


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
    if problems:
        raise config.ConfigError(path, problems)


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
