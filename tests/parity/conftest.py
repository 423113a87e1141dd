"""Every test here compares with TRL, so without TRL there is nothing to do."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _trl() -> None:
    pytest.importorskip("trl", reason="TRL is not installed; `make parity` installs it")
