"""Keeps the gold reward out of training: a stage that learns cannot import it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALWAYS_FORBIDDEN = ("rlhf.rewards.gold", "rlhf.labelers")


class GoldFirewall(MetaPathFinder):
    """Refuses to find the named modules and everything below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None (let others find it), or ImportError for a forbidden module."""
        if self.forbids(fullname):
            raise ImportError(
                f"training stages may not import gold or labelers: {fullname}", name=fullname
            )
        return None

    def forbids(self, name: str) -> bool:
        """Whether the module is a forbidden one or lies below one."""
        return any(name == own or name.startswith(own + ".") for own in self.names)


def forbid(gold_path: str | None) -> GoldFirewall:
    """From now on, importing the gold program or anything that loads it raises ImportError.

    Call it first in a training stage's process. It cannot take back what is already imported, so
    that raises too.
    """
    wall = GoldFirewall([*ALWAYS_FORBIDDEN, *([gold_path] if gold_path else [])])
    loaded = sorted(name for name in sys.modules if wall.forbids(name))
    if loaded:
        raise ImportError(
            f"training stages may not import gold or labelers; already imported: {loaded[0]}",
            name=loaded[0],
        )
    sys.meta_path.insert(0, wall)
    return wall
