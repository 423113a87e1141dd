"""Files that appear whole or not at all, with the same bytes for the same content."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import BadInput, StageFailed, disk_problem


@contextlib.contextmanager
def write_directory(path: str | Path) -> Iterator[Path]:
    """A new directory to fill; renamed onto `path` on success, removed on failure.

    What was at `path` stays until the new directory is complete, and is then replaced. One process
    at a time writes a path.
    """
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for ending in ("new", "old"):  # of a process that was killed
            for left in path.parent.glob(f".{glob.escape(path.name)}.*.{ending}"):
                shutil.rmtree(left, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent))
        try:
            new.chmod(0o777 & ~_umask())
            yield new
            _replace_directory(new, path)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text with unix line ends, under a temporary name that is renamed to `path`."""
    with temporary_file(path) as new:
        new.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, obj: Any) -> None:
    """Write JSON with sorted keys. NaN and infinities, which JSON does not have, become null."""
    text = json.dumps(_finite(obj), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_json(path: str | Path) -> Any:
    """The content of a JSON file. Raises BadInput if it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "no such file"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        what = f"not readable as JSON: {error}"
    raise BadInput(what, where=str(path), mend=f"make it again: {remake(path)}")


@contextlib.contextmanager
def temporary_file(path: str | Path) -> Iterator[Path]:
    """A name beside `path` to write to; renamed onto `path` on success, removed on failure."""
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            yield new
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turn "disk full" and "not allowed to write" into StageFailed: what, where, mend."""
    try:
        yield
    except Exception as error:
        problem = disk_problem(error)
        if problem is None or isinstance(error, (BadInput, StageFailed)):
            raise
        raise StageFailed(
            f"{path}: {problem[0]}; nothing was changed there\n  mend: {problem[1]}"
        ) from error


def remake(path: str | Path) -> str:
    """The command that makes the file again, from its place in the project."""
    parts = Path(path).parts
    for start in ("runs", "data"):
        if start in parts:
            inside = parts[parts.index(start) :]
            break
    else:
        return "dvc repro"
    if inside[2:] == ("metrics", "decision.json"):
        return f"dvc repro promote@{inside[1]}"
    if inside[0] == "data" or inside[1:3] in (("r0", "preferences"), ("r0", "reward_model")):
        return "dvc repro data"
    if len(inside) >= 3 and inside[1] == "r0":
        return "dvc repro sft"
    if len(inside) >= 4 and inside[2] in ("policies", "evaluations"):
        stage = {"policies": "policy", "evaluations": "evaluate"}[inside[2]]
        return f"dvc repro {stage}@{inside[3]}"
    if len(inside) >= 3 and inside[2] in (
        "preferences",
        "reward_model",
        "best_of_n",
        "promoted",
        "report",
    ):
        stage = "promote" if inside[2] in ("promoted", "report") else inside[2]
        return f"dvc repro {stage}@{inside[1]}"
    return "dvc repro"


def _replace_directory(new: Path, path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    if not path.exists():
        os.replace(new, path)
        return
    old = new.with_suffix(".old")
    os.replace(path, old)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _finite(obj: Any) -> Any:
    """The same, in JSON's own types: numpy numbers become Python's, non-finite ones None."""
    if isinstance(obj, Mapping):
        return {str(key): _finite(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_finite(value) for value in obj]
    if not isinstance(obj, (str, bytes)) and hasattr(obj, "tolist"):
        return _finite(obj.tolist())
    if isinstance(obj, float) and not math.isfinite(obj):
        return None
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    return obj
