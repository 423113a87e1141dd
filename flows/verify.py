"""Whether the files of a round are, to the byte, those that its tag records; in this checkout or a clone.

What counts is dvc.lock in the commit that `round/rN` names. Files are read and hashed: neither their
dates nor DVC's own notes of hashes are trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import history
from flows.history import Git
from rlhf.errors import BadInput

if TYPE_CHECKING:
    from dvc.repo import Repo

_BLOCK = 1 << 20
_NUM_NAMED = 20


@dataclass
class Verification:
    """What was compared with what, and every difference."""

    round: str
    commit: str
    rounds: list[str]
    """Names of the rounds whose files were read: the one asked for, and its ancestors if asked."""
    num_outputs: int = 0
    num_files: int = 0
    pulled: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def tag(self) -> str:
        """What the files were compared with."""
        return history.tag(self.round)

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**self.__dict__, "ok": self.ok}


def verify(
    folder: str | Path, round: str, *, pull: bool = True, ancestors: bool = False
) -> Verification:
    """Hash every file of a round and compare it with what the tag `round/<round>` records.

    Args:
        folder: the project's folder, of this checkout or a clone.
        round: like `r3`.
        pull: fetch outputs that are missing from the DVC remote. Files that are there but differ are
            never replaced.
        ancestors: also every output that the round was made from, down to the data.

    Raises:
        BadInput: the round has no tag here, or the folder is no DVC project.
    """
    folder = Path(folder).resolve()
    git = Git(folder)
    name = history.tag(round)
    commit = git.commit_of(f"refs/tags/{name}")
    if commit is None:
        raise BadInput(
            f"no tag {name} here",
            where=str(folder),
            rule="a round is verified against the commit that its tag names",
            mend="r0 has no tag: it is verified with any round's --all-ancestors"
            if round == "r0"
            else f"git fetch --tags; if {round} is declared here, python -m flows run --round {round} makes it",
        )
    recorded = history.lock_at(git, commit)
    stages = _stages_of(recorded, round, ancestors)
    found = Verification(round, commit, _rounds_of(recorded, stages))
    expected = _expected(recorded, stages)
    with _dvc(folder) as repo:
        reader = _Reader(folder, repo)
        problems = {path: reader.compare(path, md5) for path, md5 in expected.items()}
        gone = [path for path, lines in problems.items() if lines and all(_is_missing(lines))]
        if pull and gone:
            found.problems += _pull(folder, gone, recorded, found)
            for path in found.pulled:
                problems[path] = reader.compare(path, expected[path])
    found.num_outputs, found.num_files = len(expected), reader.num_files
    for path in expected:
        found.problems += _shortened(path, problems[path])
    return found


def _stages_of(recorded: Mapping[str, Any], round: str, ancestors: bool) -> list[str]:
    """The stages that write into the round and, if asked, all that they read from."""
    wanted = list(history.outputs(recorded, round))
    if not wanted:
        raise BadInput(
            f"dvc.lock at {history.tag(round)} has no stage of {round}",
            where=history.LOCK,
            mend=f"python -m flows run --round {round}",
        )
    makers = {
        out["path"]: name for name, entry in recorded.items() for out in entry.get("outs") or []
    }
    for name in wanted if ancestors else ():  # grows while it is walked
        for dep in recorded[name].get("deps") or []:
            for path, maker in makers.items():
                if maker not in wanted and _overlap(path, dep["path"]):
                    wanted.append(maker)
    return [name for name in recorded if name in wanted]


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _rounds_of(recorded: Mapping[str, Any], stages: list[str]) -> list[str]:
    paths = [out["path"].split("/") for name in stages for out in recorded[name].get("outs") or []]
    return list(dict.fromkeys(parts[1] for parts in paths if parts[0] == "runs"))


def _expected(recorded: Mapping[str, Any], stages: list[str]) -> dict[str, str]:
    return {
        out["path"]: str(out.get("md5"))
        for name in stages
        for out in recorded[name].get("outs") or []
    }


# --- reading -------------------------------------------------------------------------------------


@contextmanager
def _dvc(folder: Path) -> Iterator[Repo]:
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        repo = Repo(str(folder))
    except DvcException as error:
        raise BadInput(
            str(error).splitlines()[0],
            where=str(folder),
            rule="DVC's settings are in the commit that is checked out",
            mend="check out a commit that has .dvc/config, or dvc init",
        ) from None
    with repo:
        yield repo


class _Reader:
    """Hashes outputs as DVC does; names the files where DVC's cache knows what a directory should hold."""

    def __init__(self, folder: Path, repo: Repo) -> None:
        self.folder, self.repo = folder, repo
        self.num_files = 0

    def compare(self, path: str, md5: str) -> list[tuple[str, str]]:
        """(file, what is wrong with it) of an output; nothing where it is as recorded."""
        place = self.folder / path
        if not place.exists():
            return [(path, "missing")]
        if not md5.endswith(".dir"):
            self.num_files += 1
            actual = _md5(place) if place.is_file() else "of a directory"
            return [] if actual == md5 else [(path, "differs")]
        if not place.is_dir():
            return [(path, "is no directory")]
        actual_files = self._files(place)
        self.num_files += len(actual_files)
        if _directory_md5(actual_files) == md5:
            return []
        listed = self._listed(md5)
        if listed is None:
            return [(path, "differs")]
        return [
            (f"{path}/{name}", _difference(listed.get(name), actual_files.get(name)))
            for name in sorted({*listed, *actual_files})
            if listed.get(name) != actual_files.get(name)
        ]

    def _files(self, place: Path) -> dict[str, str]:
        """File -> md5, of the files that DVC counts."""
        from dvc.fs import LocalFileSystem

        names = self.repo.dvcignore.find(LocalFileSystem(), str(place))
        return {Path(name).relative_to(place).as_posix(): _md5(Path(name)) for name in names}

    def _listed(self, md5: str) -> dict[str, str] | None:
        """What a directory should hold, of DVC's cache; None where the cache has no sound list."""
        try:
            text = Path(self.repo.cache.local.oid_to_path(md5)).read_bytes()
        except OSError:
            return None
        if hashlib.md5(text, usedforsecurity=False).hexdigest() != md5.removesuffix(".dir"):
            return None
        return {entry["relpath"]: entry["md5"] for entry in json.loads(text)}


def _difference(expected: str | None, actual: str | None) -> str:
    if actual is None:
        return "missing"
    return "differs" if expected is not None else "is not part of it"


def _directory_md5(files: Mapping[str, str]) -> str:
    """DVC's hash of a directory: of its list of files, in order."""
    entries = [{"md5": files[name], "relpath": name} for name in sorted(files)]
    text = json.dumps(entries, sort_keys=True).encode()
    return hashlib.md5(text, usedforsecurity=False).hexdigest() + ".dir"


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _is_missing(problems: list[tuple[str, str]]) -> Iterator[bool]:
    return (what == "missing" for _, what in problems)


def _shortened(path: str, problems: list[tuple[str, str]]) -> list[str]:
    lines = [f"{file}: {what}" for file, what in problems[:_NUM_NAMED]]
    if len(problems) > _NUM_NAMED:
        lines.append(f"{path}: {len(problems) - _NUM_NAMED} more files")
    return lines


# --- pulling -------------------------------------------------------------------------------------


def _pull(
    folder: Path, paths: list[str], recorded: Mapping[str, Any], found: Verification
) -> list[str]:
    """Fetch outputs whose hash here is the recorded one; returns what stood in the way."""
    here = _expected(now := history.read_lock(folder), list(now))
    there = _expected(recorded, list(recorded))
    able = [path for path in paths if here.get(path) == there[path] and not _kept_by_git(path)]
    problems = []
    if other := [path for path in paths if here.get(path) != there[path]]:
        problems.append(
            f"not pulled, because dvc.lock here has another result than {history.tag(found.round)}: "
            f"{', '.join(other)} (git checkout {history.tag(found.round)} has it)"
        )
    if not able:
        return problems
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "pull", *able],
        cwd=folder,
        env={**os.environ, "DVC_NO_ANALYTICS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    found.pulled = able
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        problems.append("dvc pull failed: " + " ".join(said)[:600])
    return problems


def _kept_by_git(path: str) -> bool:
    """Small metrics are git's, not DVC's."""
    return Path(path).match(f"{history.METRICS}/*")
