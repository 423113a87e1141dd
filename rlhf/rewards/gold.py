"""The gold reward: what is meant. Only labelling and evaluation may load it."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlhf import config
from rlhf.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

_RULE = (
    "a gold program is a module with score(prompts, responses, ended) -> pandas.DataFrame, "
    "one row per response, with a column `total`"
)


class Gold:
    """A gold program whose answers are checked before they are used."""

    def __init__(self, path: str, module: types.ModuleType, batch_size: int | None = None) -> None:
        self.path = path
        self._module = module
        self._batch_size = batch_size

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        ended: Sequence[bool],
        *,
        given: pd.DataFrame | None = None,
        on_call: Callable[[pd.DataFrame], None] | None = None,
    ) -> pd.DataFrame:
        """One row per response: float64 columns, `total` among them, all finite.

        The program is called once, or for `batch_size` responses at a time where that is declared.

        Args:
            prompts, responses: equally long texts. ended: False where a response was cut off.
            given: scores of the first responses, from an earlier attempt; they are not asked for again.
            on_call: called after each call with all scores so far, to save what may have cost money.
        Raises: BadInput naming the program and the row if its answer breaks the rule. What the
            program itself raises passes through as BadInput too: a score is never invented.
        """
        import pandas as pd

        if not len(prompts) == len(responses) == len(ended):
            raise ValueError(
                "prompts, responses and ended must be equally long, "
                f"got {len(prompts)}, {len(responses)} and {len(ended)}"
            )
        size = self._batch_size or max(1, len(prompts))
        table = given
        for start in range(0 if table is None else len(table), len(prompts), size):
            part = slice(start, start + size)
            found = self._call(prompts[part], responses[part], ended[part], start)
            if table is not None and list(found.columns) != list(table.columns):
                raise self._bad(
                    f"score returned columns {list(found.columns)} after {list(table.columns)}"
                )
            table = found if table is None else pd.concat([table, found], ignore_index=True)
            if on_call is not None:
                on_call(table)
        return self._call([], [], [], 0) if table is None else table

    def _call(
        self, prompts: Sequence[str], responses: Sequence[str], ended: Sequence[bool], start: int
    ) -> pd.DataFrame:
        """The program's checked answer for responses of which `start` others come before."""
        import numpy as np
        import pandas as pd

        try:
            table = self._module.score(list(prompts), list(responses), [bool(e) for e in ended])
        except (Exception, SystemExit) as error:
            raise self._bad(f"score raised {type(error).__name__}: {error}") from error
        if not isinstance(table, pd.DataFrame):
            raise self._bad(f"score returned a {type(table).__name__}")
        if len(table) != len(prompts):
            raise self._bad(f"score returned {len(table)} rows for {len(prompts)} responses")
        if "total" not in table.columns:
            raise self._bad(f"score returned no column `total`, only {list(table.columns)}")
        if not table.columns.is_unique:
            raise self._bad("score returned two columns of one name")
        try:
            table = table.reset_index(drop=True).astype("float64")
        except (TypeError, ValueError) as error:
            raise self._bad(f"score returned something other than numbers: {error}") from None
        rows, columns = np.nonzero(~np.isfinite(table.to_numpy()))
        if len(rows):
            name, value = table.columns[columns[0]], table.to_numpy()[rows[0], columns[0]]
            raise self._bad(
                f"score is not finite: row {start + rows[0]}, column `{name}` is {float(value)} "
                f"({len(rows)} such values)"
            )
        return table

    def _bad(self, what: str) -> BadInput:
        return BadInput(what, where=self.path, rule=_RULE, mend="correct the program")


def load_gold(gold: config.Gold) -> Gold:
    """Import the gold program that the pipeline names. Raises BadInput if that fails."""
    module = import_module(gold.path, where="gold.path")
    if not callable(getattr(module, "score", None)):
        raise BadInput(
            "the module has no function score",
            where=f"gold.path={gold.path}",
            rule=_RULE,
            mend="add the function, or name another module",
        )
    return Gold(gold.path, module, gold.batch_size)


def import_module(path: str, *, where: str) -> types.ModuleType:
    """Import a user's module; whatever goes wrong in it is BadInput that names the path."""
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:
        raise BadInput(
            f"cannot be imported: {type(error).__name__}: {error}",
            where=f"{where}={path}",
            rule="an import path that Python finds from the project's folder",
            mend="correct the path, install the package, or mend the error inside it",
        ) from error
