"""`python -m flows.dvcrun WORDS`: DVC's command line, which ends with the flow and the worker that started it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO

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
    """Have DVC replace dvc.lock and `.dvc/tmp/rwlock` in one step, in this process.

    DVC 3 truncates these files and dumps into them; killed meanwhile it leaves a part of one, or nothing. Of
    dvc.lock, which takes seconds to write once there are many stages, no stage is known to be up to date any
    more then; with half an rwlock, the list of who reads and writes what, DVC refuses to do anything. Here the
    text is written aside and renamed. Half an rwlock that a DVC by itself has left is removed.
    """
    from dvc import rwlock
    from dvc.utils.serialize import _common, _yaml

    plain_dump, plain_edit = _common._dump_data, rwlock._edit_rwlock

    def dump(path: Any, data: Any, dumper: Any, fs: Any = None, **arguments: Any) -> None:
        target = Path(path)
        if target.name != "dvc.lock":
            plain_dump(path, data, dumper, fs=fs, **arguments)
            return
        with _replacing(target, target.parent / ".scratch", _UNFINISHED) as file:
            dumper(data, file, **arguments)

    @contextmanager
    def edit(lock_dir: str, fs: Any, hardlink: bool) -> Iterator[Any]:
        _remove_half(Path(lock_dir), hardlink)
        with plain_edit(lock_dir, _WholeFiles(fs), hardlink) as lock:
            yield lock

    _common._dump_data = dump
    _yaml._dump_data = dump  # type: ignore[attr-defined]
    rwlock._edit_rwlock = edit


@contextmanager
def _replacing(target: Path, aside: Path, unfinished: str) -> Iterator[TextIO]:
    """A file to write, in a folder aside, that takes the target's place once it is whole.

    One process at a time writes the target, under a lock of DVC's: what else is unfinished was left by a kill.
    """
    aside.mkdir(exist_ok=True)
    for left in aside.glob(unfinished):
        left.unlink(missing_ok=True)
    new = aside / unfinished.replace("*", str(os.getpid()))
    try:
        with new.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            new.chmod(target.stat().st_mode & 0o777)
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)


class _WholeFiles:
    """A file system of DVC's whose files are replaced when they are written."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def open(self, path: str, mode: str = "r", **arguments: Any) -> AbstractContextManager[Any]:
        if mode != "w":
            opened: AbstractContextManager[Any] = self._fs.open(path, mode, **arguments)
            return opened
        return _replacing(Path(path), Path(path).parent, "rwlock-*.new")


def _remove_half(lock_dir: Path, hardlink: bool) -> None:
    """Remove an rwlock that is no JSON, under the lock that whoever writes it holds."""
    from dvc import rwlock
    from dvc.lock import make_lock

    path = lock_dir / rwlock.RWLOCK_FILE
    if _is_json(path):
        return
    guard = make_lock(
        str(lock_dir / rwlock.RWLOCK_LOCK), tmp_dir=str(lock_dir), hardlink_lock=hardlink
    )
    with guard:
        if not _is_json(path):
            path.unlink(missing_ok=True)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
