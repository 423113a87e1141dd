"""Under mutation (see tests/mutants.py) a few examples, the same each time, must do."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

if os.environ.get("ROUNDHOUSE_MUTATION"):
    settings.register_profile(
        "mutation",
        max_examples=5,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # a found example need not be made smaller
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")
