"""A gold program for tests: about eight words, one sentence, and an end."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

TARGET_WORDS = 8


def score(prompts: Sequence[str], responses: Sequence[str], ended: Sequence[bool]) -> pd.DataFrame:
    """One row per response: `total` and the parts it is the sum of."""
    words = [len(response.split()) for response in responses]
    parts = pd.DataFrame(
        {
            "length": [-min(abs(count - TARGET_WORDS), 16) / 8 for count in words],
            "end": [0.5 if end else -0.5 for end in ended],
        }
    )
    parts["total"] = parts.sum(axis=1)
    return parts
