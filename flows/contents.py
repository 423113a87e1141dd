"""What lies in the workspace and in DVC's cache, by content; remembered by the files' stamps between plans.

Hashes are DVC's own. One is asked for again when a file's size, time of change or inode differ from when it was
computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import stat
from functools import cached_property
from typing import Any

from flows.definitions import Engine

_PROTECTED = 0o444  # DVC's sign of a file in its cache whose hash it has checked
_BLOCK = 1 << 20


class Contents:
    """Looks at paths of one project.

    Args:
        folder: the project's folder.
        remembered: what an earlier one left; brought up to date.
        engine: gives hashes that are not remembered.
    """

    def __init__(self, folder: str, remembered: dict[str, Any], engine: Engine) -> None:
        self._folder, self._engine = folder, engine
        self._paths: dict[str, Any] = remembered.setdefault("paths", {})
        self._objects: dict[str, Any] = remembered.setdefault("objects", {})
        self._trees: dict[str, Any] = remembered.setdefault("trees", {})
        self._remembered = remembered
        self._seen: dict[str, str | None] = {}
        self._kept: dict[str, bool] = {}
        self._ignores: dict[str, str] = {}
        self.damaged: dict[str, str] = {}
        """Files of DVC's cache whose content is not what their name says: object -> path."""
        self.changed = False
        """Whether there is something new to remember."""

    def hash_of(self, path: str) -> str | None:
        """The hash by which DVC knows a file or directory; None where there is none."""
        if path not in self._seen:
            self._seen[path] = self._hash_of(path)
        return self._seen[path]

    def _hash_of(self, path: str) -> str | None:
        before = self._stamp(path)
        if before is None:
            return None
        known = self._paths.get(path)
        if known is not None and known[0] == before:
            return str(known[1]) if known[1] is not None else None
        found = self._compute(path)
        self.changed = True
        if self._stamp(path) == before:
            self._paths[path] = [before, found]
        else:  # it is being written
            self._paths.pop(path, None)
        return found

    def _compute(self, path: str) -> str | None:
        from dvc_data.hashfile.build import build

        repo = self._engine.repo
        full = os.path.join(repo.root_dir, *path.split("/"))
        if repo.dvcignore.is_ignored(repo.fs, full):
            return None
        _, _, found = build(
            repo.cache.repo, full, repo.fs, "md5", ignore=repo.dvcignore, dry_run=True
        )
        return str(found.hash_info.value)

    def _stamp(self, path: str) -> str | None:
        """Changes whenever the content of a file, or of one below a directory, may have changed."""
        full = os.path.join(self._folder, path)
        try:
            info = os.stat(full)
        except OSError:
            return None
        if not stat.S_ISDIR(info.st_mode):
            return f"{info.st_mtime_ns} {info.st_size} {info.st_ino}{self._ignore(path)}"
        lines: list[str] = []
        _list(full, "", lines, {(info.st_dev, info.st_ino)})
        lines.sort()
        text = "\n".join([*lines, self._ignore(path)])
        return hashlib.md5(text.encode(errors="surrogateescape"), usedforsecurity=False).hexdigest()

    def _ignore(self, path: str) -> str:
        """Stamps of the files .dvcignore above a path, which decide what counts."""
        parent = posixpath.dirname(path)
        if parent not in self._ignores:
            place = os.path.join(self._folder, parent, ".dvcignore")
            own = _stamp_of(place) if os.path.exists(place) else ""
            self._ignores[parent] = own + (self._ignore(parent) if parent else "")
        return self._ignores[parent]

    # --- DVC's cache ---

    @cached_property
    def _place(self) -> str:
        """Where DVC keeps objects."""
        if "place" not in self._remembered:
            self._remembered["place"] = str(self._engine.repo.cache.repo.path)
            self.changed = True
        return str(self._remembered["place"])

    def in_cache(self, found: str) -> bool:
        """Whether DVC's cache holds a file or a whole directory of this hash."""
        if not self._holds(found):
            return False
        if not found.endswith(".dir"):
            return True
        if found not in self._trees:
            listed = _tree(self._file(found))
            if listed is None:
                return False
            self._trees[found] = listed
            self.changed = True
        # no shortcut: every damaged file is to be named
        return all([self._holds(member) for member in self._trees[found]])

    def damaged_of(self, found: str) -> list[str]:
        """Paths of the damaged files among those that hold a file or directory of this hash."""
        return [
            self.damaged[name]
            for name in [found, *self._trees.get(found, [])]
            if name in self.damaged
        ]

    def _file(self, name: str) -> str:
        return f"{self._place}{os.sep}{name[:2]}{os.sep}{name[2:]}"

    def _holds(self, name: str) -> bool:
        if name not in self._kept:
            self._kept[name] = self._look(name)
        return self._kept[name]

    def _look(self, name: str) -> bool:
        """As DVC checks an object, and one step further: a read-only file that has changed is read again."""
        try:
            info = os.stat(self._file(name))
        except OSError:
            return False
        stamp = [info.st_mtime_ns, info.st_size, info.st_ino]
        known = self._objects.get(name)
        if known == stamp:
            return True
        protected = stat.S_IMODE(info.st_mode) == _PROTECTED
        doubtful = known is not None or not protected
        if doubtful and _md5(self._file(name)) != name.removesuffix(".dir"):
            self.damaged[name] = self._file(name)
            return protected
        self._objects[name] = stamp
        self.changed = True
        return True


def _list(folder: str, prefix: str, lines: list[str], above: set[tuple[int, int]]) -> None:
    """Every file below a folder with its stamp; links are followed, as DVC follows them."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            try:
                info = entry.stat()
            except OSError:
                lines.append(f"{name} broken")
                continue
            if not stat.S_ISDIR(info.st_mode):
                lines.append(f"{name} {info.st_mtime_ns} {info.st_size} {info.st_ino}")
            elif (info.st_dev, info.st_ino) not in above:
                _list(entry.path, f"{name}/", lines, above | {(info.st_dev, info.st_ino)})


def _stamp_of(path: str) -> str:
    info = os.stat(path)
    return f" {info.st_mtime_ns} {info.st_size} {info.st_ino}"


def _tree(path: str) -> list[str] | None:
    """The objects of a directory, from the list that DVC keeps of it; None if that cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return [str(item["md5"]) for item in json.load(file)]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _md5(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
