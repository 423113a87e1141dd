"""The two ways a command ends badly: the input was wrong (exit code 2), or the work failed (exit code 1)."""

from __future__ import annotations


class BadInput(Exception):
    """Something the user gave is wrong: what, where, the rule, and the mend. Exit code 2."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", rule: str = "", mend: str = "") -> None:
        parts = [f"{where}: {what}" if where else what]
        if rule:
            parts.append(f"rule: {rule}")
        if mend:
            parts.append(f"mend: {mend}")
        super().__init__("\n  ".join(parts))


class StageFailed(Exception):
    """The input was fine and the work could not be done (disk full, non-finite loss, killed). Exit code 1."""

    exit_code = 1
