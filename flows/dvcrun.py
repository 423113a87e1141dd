"""`python -m flows.dvcrun WORDS`: DVC's command line, which ends with the flow and the worker that started it."""

from __future__ import annotations

import signal
import sys

from rlhf import lifeline


def main() -> None:
    """The guard first: it also covers the second that DVC takes to import.

    SIGTERM is for the whole tree; DVC waits for its stage to write a checkpoint, and lets go of its locks.
    """
    lifeline.hold()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from dvc.cli import main as dvc

    sys.exit(dvc(sys.argv[1:]))


if __name__ == "__main__":
    main()
