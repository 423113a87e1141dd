"""The two ways a command ends badly: the input was wrong (exit code 2), or the work failed (exit code 1)."""

from __future__ import annotations

import errno
import traceback


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


class Interrupted(BaseException):
    """The stage was asked to stop and saved a checkpoint first. Exit code 75: run it again to continue.

    Not an Exception, as KeyboardInterrupt is not one: nothing on the way may take it for a failure.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


FULL = "the disk is full"
_FULL_CODES = (errno.ENOSPC, errno.EDQUOT)
_FULL_WORDS = ("No space left on device", "disk is full", "Disk quota exceeded")
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "_ALLOC_FAILED")
"""Words in which torch says so, of a GPU, of the CPU and in its libraries."""
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_MENDS = {
    FULL: "free some space (dvc gc --workspace removes old outputs), then run again",
    "not allowed to write": "make the folder writable, then run again",
}


def disk_problem(error: BaseException) -> tuple[str, str] | None:
    """What is wrong with the disk and the mend, if that is what an error is about; else None.

    Libraries written in other languages (safetensors, SQLite) say it in words of their own.
    """
    code = error.errno if isinstance(error, OSError) else None
    if code in _FULL_CODES or any(words in str(error) for words in _FULL_WORDS):
        return FULL, _MENDS[FULL]
    if code in _FORBIDDEN:
        return "not allowed to write", _MENDS["not allowed to write"]
    return None


def explain(error: BaseException) -> tuple[str, int]:
    """What a command says at its end because of an error, and its exit code.

    A fault that nobody foresaw keeps its traceback, above the message.
    """
    if isinstance(error, (BadInput, StageFailed, Interrupted)):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped; finished stages are kept, run again to go on", 1
    if isinstance(error, MemoryError) or any(words in repr(error) for words in OUT_OF_MEMORY):
        return (
            "out of memory\n"
            "  mend: lower micro_batch_size, and the stage starts over; or end what else uses it and run "
            "again, and the stage continues from its last checkpoint",
            1,
        )
    problem = disk_problem(error)
    if problem is not None:
        name = getattr(error, "filename", None)
        return f"{f'{name}: ' if name else ''}{problem[0]}\n  mend: {problem[1]}", 1
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}", 1
    trace = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    return (
        f"{trace}unforeseen {kind}: {error}\n"
        "  rule: a fault of the program, or of a file that something else has changed\n"
        "  mend: `python -m flows plan` names changed outputs, `dvc repro` makes them again",
        1,
    )
