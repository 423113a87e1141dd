"""`python gitrun.py OWNER WORDS`: a command that ends, hooks included, when the process OWNER does.

An orphan would keep git's locks for as long as its hook takes. It is run by its path, from any
folder, so it imports nothing of the project.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil

_SECONDS_TO_END = 5.0


def main(owner: int, words: Sequence[str]) -> int:
    """Run the command as a child of OWNER's child; returns its exit code, as a shell gives it."""
    if os.getppid() != owner:
        return 1
    child = psutil.Popen(words)
    signal.signal(signal.SIGTERM, lambda *_: _end(child))
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the command itself
    while True:
        try:
            code = child.wait(timeout=0.3)
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            if os.getppid() != owner:
                _end(child)
        else:
            return int(code if code >= 0 else 128 - code)


def _end(child: psutil.Popen) -> None:
    """SIGTERM, upon which git removes its locks; SIGKILL for what goes on."""
    try:
        family = [child, *child.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for send in ("terminate", "kill"):
        for process in family:
            try:
                getattr(process, send)()
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=_SECONDS_TO_END)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
