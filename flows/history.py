"""What git keeps of a round: one commit of pipeline.yaml, dvc.lock and runs/*/metrics, and a tag.

Everything else in the working tree, staged or not, stays as it is. Nothing is pushed.

The tag `round/r3` is on a commit whose dvc.lock holds the newest result of r3. When r3 is run or
decided again and its outputs differ, the tag moves, and what it named before stays reachable as
`round/r3.1`, then `round/r3.2`. A run that changes nothing makes no commit and moves no tag.

Git itself does the work, so that hooks, signing, worktrees and locks mean what they always do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf import yaml12
from rlhf.errors import BadInput, StageFailed

PIPELINE, LOCK, STAGES = "pipeline.yaml", "dvc.lock", "dvc.yaml"
METRICS = "runs/*/metrics"
_SECONDS_FOR_LOCK = 15.0
_SECONDS_FOR_GIT = 300.0  # hooks may be slow
_WRITES = ("add", "commit", "rm", "tag")
_GITRUN = Path(__file__).with_name("gitrun.py")
_MARKER = re.compile(r"^(?:<{7}|\|{7}|={7}|>{7})(?: .*)?$", re.M)
_UNDER_WAY = {
    "MERGE_HEAD": ("merge", "git merge --abort"),
    "rebase-merge": ("rebase", "git rebase --abort"),
    "rebase-apply": ("rebase", "git rebase --abort"),
    "CHERRY_PICK_HEAD": ("cherry-pick", "git cherry-pick --abort"),
    "REVERT_HEAD": ("revert", "git revert --abort"),
}
# Of a hook that started us. Settings (GIT_CONFIG_*) and names (GIT_AUTHOR_*) are kept.
_MISLEADING = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_INTERNAL_SUPER_PREFIX",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)


# --- what a flow calls ---------------------------------------------------------------------------


def check(folder: str | Path = ".", *, allow_dirty: bool = False) -> None:
    """Refuse, before anything is computed, a repository that could not take the round's commit.

    Settings and results that no commit holds are refused too, except what the round itself leaves
    when it is killed: new rounds with their candidates, decisions, the rollback, and lock entries of
    new stages or made with the settings as they are.

    Args:
        folder: the project's folder, at the repository's root or below it.
        allow_dirty: take uncommitted changes of pipeline.yaml into the round's commit.

    Raises:
        BadInput: what is in the way, and the mend.
    """
    problem = _problem(Git(folder), allow_dirty)
    if problem is not None:
        raise problem


def obstacle(folder: str | Path = ".", allow_dirty: bool = False) -> str | None:
    """What `check` would refuse, as words."""
    problem = _problem(Git(folder), allow_dirty)
    return None if problem is None else str(problem)


def commit_round(
    folder: str | Path, round: str, message: str, *, allow_dirty: bool = False
) -> str | None:
    """Commit pipeline.yaml, dvc.lock and runs/*/metrics, and tag the commit `round/<round>`.

    Metrics of rounds declared after it are left to their own commits.

    Args:
        folder: the project's folder.
        round: like `r3`; its result must be in dvc.lock.
        message: the verdict; of the commit and of the tag.
        allow_dirty: take uncommitted changes of pipeline.yaml along, as `check` does.

    Returns: the new commit's hash; None if nothing had changed (a tag that is missing is made).

    Raises:
        BadInput: the round has no result.
        StageFailed: git refused, or settings were edited since `check`. The round stays done; the next run commits it.
    """
    git = Git(folder)
    if not outputs_now(git.folder, round):
        raise BadInput(
            f"{round} has no result",
            where=str(git.folder / LOCK),
            rule="a round is committed once it has run",
            mend=f"python -m flows run --round {round}",
        )
    what = f"{round} is done, but not in git"
    problem = _problem(git, allow_dirty) or _misfit(git, round)
    if problem is not None:
        raise StageFailed(f"{what}: {problem}")
    _tag_left_behind(git, what)
    made = _commit(git, _of_a_round(git, round), f"{message}\n\nRound: {round}", what)
    _tag(git, round, message, what)
    return made


def commit_paths(
    folder: str | Path,
    paths: Iterable[str | Path],
    message: str,
    *,
    gone: Iterable[str] = (),
) -> str | None:
    """Commit these files, and no other change.

    Args:
        folder: the project's folder.
        paths: files, relative to it; those that do not exist are passed over.
        message: the commit's message.
        gone: directories that were removed; what git has of them goes.

    Returns: the new commit's hash; None if nothing had changed.

    Raises:
        StageFailed: git refused; the files stay as they are.
    """
    names = [Path(path).as_posix() for path in paths]
    what = f"{', '.join(names)}: written, but not in git"
    return _commit(Git(folder), names, message, what, gone=gone)


def never_committed(folder: str | Path, rounds: Iterable[str]) -> list[str]:
    """Those of the rounds that have no tag and no commit of their own behind HEAD."""
    git = Git(folder)
    tags = git.text("for-each-ref", "--format=%(refname:lstrip=3)", f"refs/tags/{tag('')}") or ""
    left = [round for round in rounds if round not in tags.split()]
    if not left:
        return []
    form = ("--format=%(trailers:key=Round,valueonly)", "--grep=^Round: ")
    committed = (git.text("log", *form, "HEAD") or "").split()  # a clone may be without tags
    return [round for round in left if round not in committed]


def misfit(folder: str | Path, round: str) -> str | None:
    """As words, that the round's results were made with other settings than pipeline.yaml has."""
    problem = _misfit(Git(folder), round)
    return None if problem is None else str(problem)


def check_settings(folder: str | Path, round: str) -> None:
    """Raises BadInput if the round's results were made with other settings than pipeline.yaml has now.

    Those of its `promote` may differ: it is what follows a decision, or a gate that was edited.
    """
    problem = _misfit(Git(folder), round, but=f"promote@{round}")
    if problem is not None:
        raise problem


def is_uncommitted(folder: str | Path, key: str) -> bool:
    """Whether a section of pipeline.yaml is not as the last commit has it."""
    git = Git(folder)
    now, then = (
        _mapping(text or "") or {}
        for text in (_read(git.folder / PIPELINE), git.show("HEAD", PIPELINE))
    )
    return bool(now.get(key) != then.get(key))


def outputs_now(folder: str | Path, round: str) -> dict[str, dict[str, str]]:
    """What dvc.lock has of a round, as `outputs` gives it, without reading all of the file."""
    text = _read(Path(folder) / LOCK) or ""
    return outputs(_stages(_part(text, _names(round))), round)


def holds(folder: str | Path, round: str) -> bool:
    """Whether the last commit has a round's settings, results or files; False without git."""
    try:
        git = Git(folder)
        if git.commit_of("HEAD") is None:
            return False
    except BadInput:
        return False
    settings = _mapping(git.show("HEAD", PIPELINE) or "") or {}
    return (
        round in (settings.get("rounds") or {})
        or bool(git.text("ls-tree", "HEAD", "--", f"runs/{round}"))
        or bool(_outputs_at(git, "HEAD", round))
    )


def tag(round: str) -> str:
    """Name of the tag of a round."""
    return f"round/{round}"


# --- git -----------------------------------------------------------------------------------------


class Git:
    """The repository that a folder is in. Paths are relative to the folder."""

    def __init__(self, folder: str | Path = ".") -> None:
        self.folder = Path(folder).resolve()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A git command, never asking anything; whatever its exit code."""
        environment = {k: v for k, v in os.environ.items() if k not in _MISLEADING}
        environment |= {"LANGUAGE": "en", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
        literal = (
            [] if words[0] == "check-ignore" else ["--literal-pathspecs"]
        )  # it refuses the option
        command = ["git", *literal, *words]
        if words[0] in _WRITES:
            command = [sys.executable, "-I", str(_GITRUN), str(os.getpid()), *command]
        try:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="surrogateescape",
            )
        except FileNotFoundError as error:
            if not self.folder.is_dir():
                raise BadInput("no such folder", where=str(self.folder)) from error
            raise BadInput(
                "git is not installed",
                rule="code, settings and dvc.lock are versioned together",
                mend="install git",
            ) from error
        try:
            out, err = process.communicate(timeout=_SECONDS_FOR_GIT)
        except BaseException as error:
            process.terminate()  # SIGTERM: git removes its locks
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise StageFailed(
                    f"git {words[0]} took longer than {_SECONDS_FOR_GIT:g} s and was ended\n"
                    "  rule: hooks and signing may not wait for a person\n"
                    "  mend: run `git commit` by hand to see what it waits for"
                ) from None
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def text(self, *words: str) -> str | None:
        """A command's output without its last line end; None if it failed."""
        done = self.run(*words)
        return None if done.returncode else done.stdout.removesuffix("\n")

    def show(self, revision: str, path: str) -> str | None:
        """A file's content in a commit, or in the index for an empty revision; None if absent."""
        done = self.run("cat-file", "blob", f"{revision}:./{path}")
        return None if done.returncode else done.stdout

    def commit_of(self, revision: str) -> str | None:
        """The full hash of the commit that a revision names."""
        return self.text("rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}") or None

    def files(self, pattern: str) -> list[str]:
        """Existing files that match a pattern of the folder."""
        found = (path for path in self.folder.glob(pattern) if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def status(self, paths: Sequence[str]) -> dict[str, str]:
        """Two letters (index, working tree) of every path that differs from HEAD; `??` is untracked."""
        if not paths:
            return {}
        form = ("--porcelain=v2", "-z", "--untracked-files=all", "--no-renames")
        done = self.run("status", *form, "--", *paths)
        if done.returncode:
            raise StageFailed(f"git status failed: {done.stderr.strip()}")
        prefix = self.text("rev-parse", "--show-prefix") or ""  # paths are told from the root
        states: dict[str, str] = {}
        for line in filter(None, done.stdout.split("\0")):
            kind = line[0]
            words = line.split(" ", {"1": 8, "u": 10}.get(kind, 1))
            path, state = words[-1].removeprefix(prefix), "??" if kind == "?" else words[1]
            # Removed from the index alone, a file is told twice: as deleted, and as untracked.
            states[path] = "D?" if {state, states.get(path)} == {"??", "D."} else state
        return states


# --- what is in the way --------------------------------------------------------------------------


def _problem(git: Git, allow_dirty: bool) -> BadInput | None:
    problem = _cannot_commit(git)
    if problem is None and not allow_dirty:
        problem = _dirty(git)
    return problem


def _cannot_commit(git: Git) -> BadInput | None:
    """Why git would not take a commit, or why it would be lost."""
    return (
        no_repository(git.folder)
        or _under_way(git)
        or _nobody(git)
        or _detached(git)
        or _conflict(git)
        or _ignored(git)
        or _tag_in_the_way(git)
    )


def no_repository(folder: str | Path) -> BadInput | None:
    """Why a folder is not in a git repository's working tree, if it is not."""
    git = Git(folder)
    inside = git.run("rev-parse", "--is-inside-work-tree")
    said = inside.stderr
    if inside.stdout.strip() == "true":
        return None
    if inside.returncode == 0:
        return BadInput(
            "a bare repository, without a working tree",
            where=str(git.folder),
            rule="a round commits the files of a working tree",
            mend="git clone it, and work in the clone",
        )
    if "dubious ownership" in said:
        root = re.search(r"repository at '(.*)'", said)
        return BadInput(
            "git does not trust this repository: it belongs to another user",
            where=str(git.folder),
            rule="git works in repositories of the own user, or named in safe.directory",
            mend=f"git config --global --add safe.directory '{root[1] if root else git.folder}'",
        )
    if "not a git repository" in said:
        return BadInput(
            "not a git repository",
            where=str(git.folder),
            rule="code, settings and dvc.lock are versioned together",
            mend="git init",
        )
    return BadInput(
        f"git cannot read this repository: {said.strip()}",
        where=str(git.folder),
        mend="git status shows the same; mend it first",
    )


def _under_way(git: Git) -> BadInput | None:
    asked = [word for name in _UNDER_WAY for word in ("--git-path", name)]
    found = (git.text("rev-parse", *asked) or "").splitlines()
    for path, (what, abort) in zip(found, _UNDER_WAY.values(), strict=False):
        if (git.folder / path).exists():
            return BadInput(
                f"a {what} is in progress",
                where=str(git.folder),
                rule=f"a round's commit would become part of the {what}",
                mend=f"finish it, or {abort}",
            )
    return None


def _nobody(git: Git) -> BadInput | None:
    for role in ("AUTHOR", "COMMITTER"):
        done = git.run("var", f"GIT_{role}_IDENT")
        if done.returncode:
            return BadInput(
                "git does not know who commits",
                where=str(git.folder),
                rule="a commit names its author",
                mend="git config user.name 'Your Name' && git config user.email you@example.org",
            )
    return None


def _detached(git: Git) -> BadInput | None:
    if git.text("symbolic-ref", "--quiet", "HEAD") is not None:
        return None
    return BadInput(
        "HEAD is detached: no branch is checked out",
        where=str(git.folder),
        rule="a commit on no branch is lost at the next checkout",
        mend="git switch BRANCH, or git switch --create NEW_BRANCH",
    )


def _conflict(git: Git) -> BadInput | None:
    unmerged = git.text("ls-files", "--unmerged", "--", PIPELINE, LOCK, STAGES) or ""
    for name in (PIPELINE, LOCK, STAGES):
        problem = unfinished_merge(git.folder / name)
        if problem is None and f"\t{name}\n" in f"{unmerged}\n":
            problem = _not_merged("git has two versions of it", str(git.folder / name), name)
        if problem is not None:
            return problem
    return None


def refuse_unfinished_merge(folder: Path) -> None:
    """Raises BadInput if the pipeline, its stages or their lock hold what a merge left, committed or not."""
    for name in (PIPELINE, STAGES, LOCK):
        problem = unfinished_merge(folder / name)
        if problem is not None:
            raise problem


def unfinished_merge(path: Path) -> BadInput | None:
    """The first marker that git left in a file of a merge that somebody has to finish; None if there is none."""
    text = _read(path) or ""
    found = _MARKER.search(text)
    if found is None:
        return None
    line = text.count("\n", 0, found.start()) + 1
    return _not_merged(f"conflict marker {found[0][:60]}", f"{path} line {line}", path.name)


def _not_merged(what: str, where: str, name: str) -> BadInput:
    mend = f"keep one side of each conflict, remove the markers, then git add {name}"
    if name == LOCK:
        mend = (
            f"take one side (git checkout --ours {LOCK}, or --theirs), git add {LOCK}, then look at the plan: "
            "what the other side had made runs again, or comes back from DVC's cache"
        )
    rule = "a merge is finished before anything is planned or run"
    return BadInput(what, where=where, rule=rule, mend=mend)


def _tag_in_the_way(git: Git) -> BadInput | None:
    """A tag `round` takes the place of the folder that tags `round/r1` lie in."""
    if git.commit_of("refs/tags/round") is None:
        return None
    return BadInput(
        "a tag is named round",
        where=str(git.folder),
        rule="decided rounds are tagged round/r1 and so on, which git does not allow beside it",
        mend="give it another name: git tag NEW round && git tag -d round",
    )


def _ignored(git: Git) -> BadInput | None:
    wanted = (PIPELINE, LOCK, "runs/r1/metrics/decision.json")
    ignored = (git.text("check-ignore", "--", *wanted) or "").splitlines()
    if not ignored:
        return None
    place, _, _ = (git.text("check-ignore", "--verbose", "--", ignored[0]) or "").partition("\t")
    return BadInput(
        "git ignores it",
        where=ignored[0],
        rule="pipeline.yaml, dvc.lock and runs/*/metrics are what git keeps of a round",
        mend=f"remove the pattern ({place}), or name outputs one by one as the template does",
    )


def _dirty(git: Git) -> BadInput | None:
    """Settings or results that no commit holds and that a round did not leave itself."""
    if git.commit_of("HEAD") is None:
        return None
    states = git.status([PIPELINE, STAGES, LOCK])
    for name in (PIPELINE, STAGES, LOCK):
        if states.get(name) == "D?":
            return _uncommitted(name, "removed from git's index, and still in the folder")
    for name in (PIPELINE, STAGES):
        if states.get(name) in ("??", "A.", "AM"):
            return _uncommitted(name, "no commit holds it")
    if STAGES in states:
        return _uncommitted(STAGES, "uncommitted changes")
    if "." not in states.get(PIPELINE, "."):
        return _uncommitted(PIPELINE, "what is staged differs from what is in the folder")
    text = _read(git.folder / PIPELINE) or ""
    now = _mapping(text)
    if now is None:
        return _uncommitted(PIPELINE, "uncommitted changes, not readable as YAML")
    if PIPELINE in states:
        changes = list(_foreign(_mapping(git.show("HEAD", PIPELINE) or "") or {}, now))
        if changes:
            return _uncommitted(PIPELINE, f"uncommitted changes: {some(changes)}")
    if LOCK in states and states[LOCK] != "??":
        return _dirty_lock(git, now)
    return None


def _dirty_lock(git: Git, pipeline: Mapping[str, Any]) -> BadInput | None:
    """Of dvc.lock, entries that are new, or were made with the settings as they are, are the round's own."""
    texts = [git.show("HEAD", LOCK) or "", _read(git.folder / LOCK) or ""]
    same = set.intersection(*({*_blocks(text)[1]} for text in texts))
    before, now = (_stages(_part(text, lambda block: block not in same)) for text in texts)
    names = {*(pipeline.get("rounds") or {}), *(pipeline.get("candidates") or {})}
    gone = [
        stage
        for stage in before
        if stage not in now and ("@" not in stage or stage.split("@")[1] in names)
    ]
    if gone:
        return _uncommitted(LOCK, f"results of the last commit are missing: {some(gone)}")
    other = [
        stage
        for stage, entry in now.items()
        if stage in before and entry != before[stage] and not _fits(entry, pipeline)
    ]
    if other:
        return _uncommitted(LOCK, f"uncommitted results of other settings: {some(other)}")
    return None


def _misfit(git: Git, round: str, but: str | None = None) -> BadInput | None:
    """Results of the round, or of the stages before all rounds, that the settings as they are would not give."""
    pipeline = _mapping(_read(git.folder / PIPELINE) or "") or {}
    declared = {*(pipeline.get("rounds") or {}), *(pipeline.get("candidates") or {})}
    of_round = _names(round)
    text = _read(git.folder / LOCK) or ""
    found = _stages(_part(text, lambda block: of_round(block) or "@" not in block.split(":")[0]))
    own = [name for name in outputs(found, round) if name.partition("@")[2] in declared]
    stages = [name for name in found if "@" not in name] + own
    other = [name for name in stages if name != but and not _fits(found[name], pipeline)]
    if not other:
        return None
    return BadInput(
        f"results of other settings than {PIPELINE} has: {some(other)}",
        where=LOCK,
        rule="a round's tag holds the settings that its results were made with",
        mend="undo the edit, or keep it and have these stages made anew; then run the same again",
    )


def _uncommitted(name: str, what: str) -> BadInput:
    return BadInput(
        what,
        where=name,
        rule="a round's commit holds what the round changed, and its settings are in git",
        mend=f'undo the edit, or git add {name} && git commit -m "..." {name}; then run the same '
        "again (or with --allow-dirty)",
    )


def _foreign(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Dotted paths of the settings that differ, but for what rounds write themselves."""
    added = {*(new.get("rounds") or {})} - {*(old.get("rounds") or {})}
    for path in _differing(old, new):
        section, _, rest = path.partition(".")
        name, _, inside = rest.partition(".")
        if section == "rollback":
            continue
        if section == "rounds" and inside.split(".")[0] == "decision":
            continue
        if section == "candidates" and name not in (old.get(section) or {}):
            name = new[section][name].get("round")
        if section in ("rounds", "candidates") and name in added:
            continue
        yield path


def _differing(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Dotted paths at which two mappings differ; of what only one has, the key itself."""
    absent = object()
    if not isinstance(old, dict) or not isinstance(new, dict):
        if old != new:
            yield path
        return
    for key in dict.fromkeys([*old, *new]):
        inside = f"{path}.{key}" if path else str(key)
        yield from _differing(old.get(key, absent), new.get(key, absent), inside)


def _fits(entry: Mapping[str, Any], pipeline: Mapping[str, Any]) -> bool:
    """Whether a lock entry was made with the settings that the pipeline has."""
    params = (entry.get("params") or {}).get(PIPELINE) or {}
    return all(_at(pipeline, path) == value for path, value in params.items())


def _at(mapping: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(mapping, dict) or key not in mapping:
            return None
        mapping = mapping[key]
    return mapping


# --- committing ----------------------------------------------------------------------------------


def _of_a_round(git: Git, round: str) -> list[str]:
    """What a round's commit takes; metrics of rounds declared after it are left to their own."""
    declared = list((_mapping(_read(git.folder / PIPELINE) or "") or {}).get("rounds") or {})
    later = declared[declared.index(round) + 1 :] if round in declared else []
    names = [name for name in (PIPELINE, LOCK) if (git.folder / name).is_file()]
    if git.commit_of("HEAD") is None and (git.folder / STAGES).is_file():
        names.append(STAGES)  # a first commit that could not be checked out and run helps nobody
    metrics = git.files(f"{METRICS}/**/*")
    return names + [path for path in metrics if path.split("/")[1] not in later]


def _commit(
    git: Git, paths: Sequence[str], message: str, what: str, gone: Iterable[str] = ()
) -> str | None:
    """Commit these files and leave index and working tree alike otherwise."""
    problem = _cannot_commit(git)
    if problem is not None:
        raise StageFailed(f"{what}: {problem}")
    states = git.status([*(path for path in paths if (git.folder / path).exists()), *gone])
    if not states:
        return None
    untracked = [path for path, state in states.items() if state == "??"]
    try:
        if untracked:  # `commit --only` takes paths that git knows
            _locked(git, what, "add", "--intent-to-add", "--", *untracked)
        words = ("--only", "--quiet", "--cleanup=whitespace", f"--message={message}")
        _locked(git, what, "commit", *words, "--", *states)
    except BaseException:
        if untracked:
            git.run("rm", "--cached", "--force", "--quiet", "--ignore-unmatch", "--", *untracked)
        raise
    return git.commit_of("HEAD")


def _tag_left_behind(git: Git, what: str) -> None:
    """Tag the last commit if it is a round's and the process was killed before its tag."""
    trailer = git.text("log", "-1", "--format=%(trailers:key=Round,valueonly)%n%s", "HEAD") or ""
    left, _, subject = trailer.strip().partition("\n")
    if re.fullmatch(r"r\d+\w*", left) and git.commit_of(f"refs/tags/{tag(left)}") is None:
        _tag(git, left, subject.strip(), what)


def _tag(git: Git, round: str, message: str, what: str) -> None:
    """Put the round's tag on HEAD, unless what it is on has the same result."""
    name = tag(round)
    old = git.commit_of(f"refs/tags/{name}")
    if old is not None:
        if _outputs_at(git, old, round) == _outputs_at(git, "HEAD", round):
            return
        _keep(git, name, old, what)
    _locked(git, what, "tag", "--annotate", "--force", f"--message={message}", name, "HEAD")


def _keep(git: Git, name: str, commit: str, what: str) -> None:
    """Leave a numbered tag where the round's tag moves away from."""
    number = 1
    while (kept := git.commit_of(f"refs/tags/{name}.{number}")) is not None:
        if kept == commit:
            return
        number += 1
    said = git.text("for-each-ref", "--format=%(contents)", f"refs/tags/{name}") or ""
    message = f"Run or decided again since\n\n{said}"
    _locked(git, what, "tag", "--annotate", f"--message={message}", f"{name}.{number}", commit)


def _locked(git: Git, what: str, *words: str) -> None:
    """A git command that writes; while another one holds a lock it is tried again for a while."""
    end = time.monotonic() + _SECONDS_FOR_LOCK
    while True:
        done = git.run(*words)
        if done.returncode == 0:
            return
        said = "\n".join(filter(None, [done.stdout.strip(), done.stderr.strip()]))
        lock = re.search(r"Unable to create '(.*\.lock)'", said)
        if (lock or "cannot lock ref" in said) and time.monotonic() < end:
            time.sleep(0.2)
            continue
        said = "\n".join(f"    {line}" for line in said.splitlines()[-20:])
        mend = "mend what it says (a hook? signing?)"
        if lock:
            mend = f"if no git command runs, remove {lock[1]}"
        raise StageFailed(
            f"{what}: git {words[0]} failed\n{said}\n  mend: {mend}, then run the same again"
        )


# --- small parts ---------------------------------------------------------------------------------


def read_lock(folder: str | Path) -> dict[str, Any]:
    """The stages of dvc.lock, empty without one. Raises BadInput if it cannot be read."""
    path = Path(folder) / LOCK
    text = _read(path)
    content = _mapping(text) if text else {}
    if content is None:
        raise BadInput(
            "not readable as YAML",
            where=str(path),
            rule="DVC writes it",
            mend="take the last committed one (git checkout dvc.lock), then dvc repro",
        )
    return _stages(content)


def lock_at(git: Git, revision: str) -> dict[str, Any]:
    """The stages of dvc.lock in a commit; empty where it has none."""
    return _stages(_mapping(git.show(revision, LOCK) or ""))


def outputs(stages: Mapping[str, Any], round: str) -> dict[str, dict[str, str]]:
    """Stage -> {path of an output: its md5}, of the stages that write into a round."""
    found = {}
    for name, entry in stages.items():
        paths = {out["path"]: str(out.get("md5")) for out in entry.get("outs") or []}
        if any(path.startswith(f"runs/{round}/") for path in paths):
            found[name] = paths
    return found


def _outputs_at(git: Git, revision: str, round: str) -> dict[str, dict[str, str]]:
    return outputs(_stages(_part(git.show(revision, LOCK) or "", _names(round))), round)


def _names(round: str) -> Callable[[str], bool]:
    """Whether a stage's block in dvc.lock has to do with a round."""
    return lambda block: f"runs/{round}/" in block


def _part(text: str, wanted: Callable[[str], bool]) -> dict[str, Any] | None:
    """Some of the stages of a dvc.lock: reading all of two hundred rounds takes seconds."""
    head, blocks = _blocks(text)
    return _mapping(head + "".join(block for block in blocks if wanted(block)))


def _blocks(text: str) -> tuple[str, list[str]]:
    """The text of a dvc.lock, as DVC writes it, cut before every stage."""
    head, *blocks = re.split(r"^(?=  [^\s#])", text, flags=re.M)
    return (head, blocks) if head.rstrip().endswith("stages:") else (text, [])


def _stages(lock: Any) -> dict[str, Any]:
    return (lock.get("stages") or {}) if isinstance(lock, dict) else {}


def _mapping(text: str) -> dict[str, Any] | None:
    from ruamel.yaml.error import YAMLError

    try:
        content = yaml12.load(text)
    except (YAMLError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None


def some(names: Sequence[str], count: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
