"""`python -m flows.dvcrun WORDS`: DVC's command line, which ends with the flow and the worker that started it."""

from __future__ import annotations

import os
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

from rlhf import lifeline

_UNFINISHED = "dvc-*.new"


def main() -> None:
    """The guard first: it also covers the second that DVC takes to import.

    SIGTERM is for the whole tree; DVC waits for its stage to write a checkpoint, and lets go of its locks.
    """
    lifeline.hold()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from dvc.cli import main as dvc

    write_whole()
    sys.exit(dvc(sys.argv[1:]))


@cache
def write_whole() -> None:
    """Have DVC replace dvc.lock in one step, in this process.

    DVC 3 truncates the file and dumps into it, which takes seconds once there are many stages; killed
    meanwhile it leaves a part of it, or nothing, and no stage is known to be up to date any more. Here
    the text is written aside, in `.scratch`, and renamed.
    """
    from dvc.utils.serialize import _common, _yaml

    plain = _common._dump_data

    def dump(path: Any, data: Any, dumper: Any, fs: Any = None, **arguments: Any) -> None:
        target = Path(path)
        if target.name != "dvc.lock":
            plain(path, data, dumper, fs=fs, **arguments)
            return
        aside = target.parent / ".scratch"
        aside.mkdir(exist_ok=True)
        for left in aside.glob(_UNFINISHED):  # of a killed process: one at a time holds DVC's lock
            left.unlink(missing_ok=True)
        new = aside / f"dvc-{os.getpid()}.new"
        try:
            with new.open("w", encoding="utf-8") as file:
                dumper(data, file, **arguments)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                new.chmod(target.stat().st_mode & 0o777)
            os.replace(new, target)
        finally:
            new.unlink(missing_ok=True)

    _common._dump_data = dump
    _yaml._dump_data = dump  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
