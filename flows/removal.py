"""Taking a round out of a project: its text, its outputs, its entries of dvc.lock; and the way back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows import decisions, editing, history, rounds
from flows.history import Git
from flows.runner import workspace_lock
from rlhf import artifacts, config, yaml12
from rlhf.config import Pipeline
from rlhf.errors import BadInput

REMOVED = Path(".scratch/removed")
"""Where the blocks of removed rounds are kept."""
_FILE = "pipeline.yaml"


def carry_out_removal(
    folder: str | Path, name: str, *, force: bool = False, allow_dirty: bool = False
) -> list[str]:
    """Remove a round, let MLflow and git know; returns what to tell, line by line.

    A commit is made where git has something of the round.

    Raises:
        BadInput: as `remove_round`, or git is not ready for the commit.
        StageFailed: git refused it; the round is removed.
    """
    folder = Path(folder)
    with workspace_lock(folder):
        path = folder / _FILE
        pipeline = config.load(path)
        has_run = _check(pipeline, folder, name, force)
        in_git = history.holds(folder, name)
        if in_git and pipeline.lineage.commit:
            history.check(folder, allow_dirty=allow_dirty)
        back = _way_back(folder, name, has_run) if in_git else _restore(name, has_run)
        told = remove_round(path, name, force=force)
        if has_run:
            decisions.tell_mlflow(folder)
        if in_git and pipeline.lineage.commit:
            files = [_FILE, history.LOCK]
            made = history.commit_paths(
                folder, files, f"Round {name} removed", gone=[f"runs/{name}"]
            )
            if made is not None:
                told.append(f"committed as {made[:10]}")
                back = f"git revert --no-edit {made[:10]}" + (" && dvc checkout" * has_run)
    return [*told, f"to get it back: {back}"]


def remove_round(path: str | Path, name: str, *, force: bool = False) -> list[str]:
    """Take a round and its candidates out of `pipeline.yaml`; returns what was done, line by line.

    A round that has run goes only with `force`, and with it runs/NAME and its entries in dvc.lock. Killed
    half-way, it is still declared, and can be removed again. Its block is left in `.scratch/removed`.

    Raises:
        BadInput: a later round needs it, it is the only one, or it has run and `force` is not given.
    """
    path = Path(path)
    raw = config.read_yaml(path)
    _check(config.parse(raw, str(path)), path.parent, name, force)
    own = rounds.own_candidates(raw, name)
    outputs, lock = path.parent / "runs" / name, path.parent / history.LOCK
    stages = _locked(lock, {name, *own.values()})
    text = path.read_text(encoding="utf-8")
    block = _block(text, raw, name)
    text = editing.remove_entry(text, "candidates", *own.values())
    text = editing.remove_entry(text, "rounds", name)
    config.parse(yaml12.load(text), str(path))
    done = [f"{name} and {', '.join(own.values())} removed from {_FILE}"]
    (path.parent / REMOVED).mkdir(parents=True, exist_ok=True)
    artifacts.write_text(path.parent / REMOVED / f"{name}.yaml", block)
    if outputs.exists():
        shutil.rmtree(outputs)
        done.append(
            f"runs/{name} removed from the workspace; DVC's cache keeps what its stages made"
        )
    if stages:
        locked = lock.read_text(encoding="utf-8")
        artifacts.write_text(lock, editing.remove_entry(locked, "stages", *stages))
        done.append(f"{', '.join(stages)} removed from dvc.lock")
    editing.save(path, text)
    return done


def restore_round(folder: str | Path, name: str) -> None:
    """Append a removed round to `pipeline.yaml` as it was. Raises BadInput if none of the name was removed here."""
    saved = Path(folder) / REMOVED / f"{name}.yaml"
    if not config.ROUND_NAME.fullmatch(name) or not saved.is_file():
        raise BadInput(
            f"no removed round {name}",
            where=str(saved),
            rule="a round that was removed in this folder is restored",
            mend=f"python -m flows round add {name}",
        )
    with workspace_lock(folder):
        rounds.restore_round(Path(folder) / _FILE, name, saved.read_text(encoding="utf-8"))


# --- checks --------------------------------------------------------------------------------------


def _check(pipeline: Pipeline, folder: Path, name: str, force: bool) -> bool:
    """Refuse what may not go; returns whether the round has run."""
    rounds.check_declared(pipeline.rounds, name)
    _check_free(pipeline, name)
    outputs = (folder / "runs" / name).exists()
    stages = _locked(folder / history.LOCK, {name, *pipeline.candidates_of(name)})
    if (stages or outputs) and not force:
        raise BadInput(
            f"{name} has run: {len(stages)} stages in dvc.lock, "
            + (f"runs/{name}" if outputs else "no outputs"),
            where=_FILE,
            rule="what has run is history",
            mend=f"python -m flows round remove {name} --force takes its outputs away too",
        )
    return bool(stages or outputs)


def _check_free(pipeline: Pipeline, name: str) -> None:
    """Nothing that stays speaks of the round."""
    users = [
        f"rounds.{other}.{key}"
        for other, body in pipeline.rounds.items()
        for key, value in (("from", body.from_), ("sample_from", body.sample_from))
        if value == name
    ]
    users += [
        f"candidates.{key}.learns_from"
        for key, body in pipeline.candidates.items()
        if body.round != name and body.learns_from.split("/")[0] == name
    ]
    mends = ["remove those first, the last round before the others"] if users else []
    if pipeline.rollback is not None:
        rollback = pipeline.rollback
        named = [f"rollback.{key}" for key in ("to", "after") if getattr(rollback, key) == name]
        users += named
        mends += ['python -m flows rollback none --because "..."'] if named else []
    if users:
        raise BadInput(
            f"{name} is needed by {', '.join(users)}",
            where=_FILE,
            rule="a round stays as long as another needs it",
            mend="; ".join(mends),
        )
    if len(pipeline.rounds) == 1:
        raise BadInput(
            f"{name} is the only round",
            where=_FILE,
            rule="a pipeline has at least one round",
            mend="change its settings, or add another round first",
        )


# --- parts ---------------------------------------------------------------------------------------


def _locked(lock: Path, keys: set[str]) -> list[str]:
    """Stages in dvc.lock of a round and its candidates."""
    if not lock.is_file():
        return []
    stages = config.read_yaml(lock).get("stages") or {}
    return [stage for stage in stages if stage.partition("@")[2] in keys]


def _block(text: str, raw: Mapping[str, Any], name: str) -> str:
    """A document of the round and its candidates alone."""
    names = {"rounds": [name], "candidates": [*rounds.own_candidates(raw, name).values()]}
    doc = editing.Document(text)
    try:
        return "".join(
            f"{section}:\n" + "".join(doc.entry(section, key) for key in keys)
            for section, keys in names.items()
        )
    except BadInput:  # written between brackets
        return config.to_yaml({s: {key: raw[s][key] for key in keys} for s, keys in names.items()})


def _way_back(folder: Path, name: str, has_run: bool) -> str:
    """The command that takes a round from git's last commit, where its removal is not committed."""
    git = Git(folder)
    wanted = [_FILE, history.LOCK, f"runs/{name}/metrics"] if has_run else [_FILE]
    files = [path for path in wanted if git.text("ls-tree", "HEAD", "--", path)]
    checkout = f"git checkout {git.text('rev-parse', '--short', 'HEAD')} -- {' '.join(files)}"
    return checkout + (" && dvc checkout" if has_run else "")


def _restore(name: str, has_run: bool) -> str:
    """The command that takes a round from where its block is kept."""
    rerun = ", then run it: DVC takes what it has cached" if has_run else ""
    return f"python -m flows round restore {name}{rerun}"
