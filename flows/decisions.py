"""A person's word over the gate's, and the way back to an earlier champion.

Both are data in `pipeline.yaml`, so that git has who and why, and `dvc repro` gives the same result
with no server.
"""

from __future__ import annotations

import getpass
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows import deployments, editing, history
from flows.rounds import start_of_next
from flows.runner import Runner, workspace_lock
from rlhf import champion, config, tracking
from rlhf.config import Pipeline
from rlhf.errors import BadInput, StageFailed

CHOICES = ("promote", "keep", "stop", "gate")
"""`gate` takes a person's word back."""
NOWHERE = "none"
"""The target of a rollback that takes the declared one back."""


def decide(
    folder: str | Path,
    round: str,
    choice: str,
    *,
    because: str,
    by: str | None = None,
    candidate: str | None = None,
) -> bool:
    """Write `rounds.<round>.decision` in pipeline.yaml; returns whether it said something else.

    Args:
        folder: the project's folder.
        round: one that has come to its gate.
        choice: promote, keep, stop, or gate for the gate's own verdict again.
        because: why, for those who read it later.
        by: who; None: git's user.name, else the login name.
        candidate: whom to promote; None: whom the gate ranks first.

    Raises:
        BadInput: the round has not come to its gate, or the candidate is none of those it judged.
    """
    path = Path(folder) / "pipeline.yaml"
    _one_of("choice", choice, CHOICES)
    because = _words("because", because)
    with workspace_lock(folder):
        pipeline = config.load(path)
        judged = _judged(pipeline, folder, round)
        if candidate is not None and choice != "promote":
            raise BadInput(f"a candidate is named with promote, not with {choice}")
        word = None
        if choice != "gate":
            chosen = _candidate(judged, candidate) if choice == "promote" else None
            word = {
                "choice": choice,
                "candidate": chosen,
                "because": because,
                "by": _words("by", by or _name(folder)),
            }
        if word == _without_time(pipeline.rounds[round].decision):
            return False
        if word is not None:
            word["at"] = _now()
        _write(path, f"rounds.{round}.decision", word)
    return True


def rollback(folder: str | Path, to: str, *, because: str, by: str | None = None) -> bool:
    """Write `rollback` in pipeline.yaml; returns whether the champion was not that policy already.

    It stands until a round that is appended later, or one not yet run that starts from `to`, promotes a
    candidate. `none` removes it; then returns whether there was one.

    Raises:
        BadInput: no such round, or one that has not been decided.
    """
    path = Path(folder) / "pipeline.yaml"
    because = _words("because", because)
    with workspace_lock(folder):
        pipeline = config.load(path)
        if to == NOWHERE:
            if pipeline.rollback is not None:
                editing.save(path, editing.remove(path.read_text(encoding="utf-8"), "rollback"))
            return pipeline.rollback is not None
        _one_of("round", to, ["r0", *pipeline.rounds, NOWHERE])
        _promoted(folder, to)
        best = champion.champion(pipeline, folder)
        after = _last_before(pipeline, folder, to)
        word = {
            "to": to,
            "after": after,
            "because": because,
            "by": _words("by", by or _name(folder)),
        }
        declared = pipeline.model_copy(update={"rollback": config.Rollback(**word, at=_now())})
        target = champion.champion(declared, folder)
        if (best.round, best.candidate) == (target.round, target.candidate):
            return False
        _write(path, "rollback", {**word, "at": _now()})
    return True


# --- commands ------------------------------------------------------------------------------------


def carry_out_decision(
    folder: str | Path,
    round: str,
    choice: str,
    *,
    because: str,
    by: str | None = None,
    candidate: str | None = None,
    allow_dirty: bool = False,
) -> list[str]:
    """Decide, run the round's gate again, let MLflow and git know; returns what to tell, line by line."""
    folder = Path(folder)
    with workspace_lock(folder):
        pipeline = config.load(folder / "pipeline.yaml")
        before = _judged(pipeline, folder, round)
        _check_git(pipeline, folder, allow_dirty)
        if pipeline.lineage.commit:
            history.check_settings(folder, round)
        taken_back = choice == "gate" and pipeline.rounds[round].decision is not None
        changed = decide(folder, round, choice, because=because, by=by, candidate=candidate)
        outcome = Runner(folder).run(f"promote@{round}")
        if outcome is None or not outcome.ok:
            why = outcome.message if outcome is not None else "it was ended before it started"
            raise StageFailed(
                f"the decision is in pipeline.yaml, and promote@{round} has still to follow it\n{why}"
            )
        after = _judged(pipeline, folder, round)
        tracking.tag_outputs(pipeline, round, folder)
        tell_mlflow(folder)
        why = f"{by or _name(folder)} leaves it to the gate again: {because}" if taken_back else ""
        committed = _commit_round(pipeline, folder, round, after, allow_dirty, why)
    resumed = deployments.resume_decided(folder, round)
    told = [] if changed else [f"{round} was decided so already; nothing new is written"]
    if committed:
        told.append(f"committed as {committed[:10]}")
    if resumed:
        told.append("the flow run that waited for this goes on")
    if before["promoted"] != after["promoted"]:
        later = [
            name
            for name in _descendants(pipeline, [round])
            if champion.status(folder, name) != "unrun"
        ]
        if later:
            told.append(
                f"out of date, because they started from {round}: {', '.join(later)}; "
                "`python -m flows plan` shows what would run again"
            )
    return told


def carry_out_rollback(
    folder: str | Path,
    to: str,
    *,
    because: str,
    by: str | None = None,
    allow_dirty: bool = False,
) -> list[str]:
    """Roll back, let MLflow and git know; returns what to tell, line by line."""
    folder = Path(folder)
    with workspace_lock(folder):
        pipeline = config.load(folder / "pipeline.yaml")
        _check_git(pipeline, folder, allow_dirty)
        changed = rollback(folder, to, because=because, by=by)
        pipeline = tell_mlflow(folder)
        best = champion.champion(pipeline, folder)
        if pipeline.lineage.commit and history.is_uncommitted(folder, "rollback"):
            did = "Rollback taken back" if to == NOWHERE else f"Rollback to {to}"
            history.commit_paths(folder, ["pipeline.yaml"], f"{did}: {because}")
    policy = f"{best.candidate or 'the fine-tuned start'} (runs/{best.round}/promoted)"
    if not changed:
        return [
            f"no rollback is declared; champion: {policy}"
            if to == NOWHERE
            else f"{policy} is the champion already"
        ]
    told = [
        f"champion: {policy}",
        f"the next round that is appended starts from {start_of_next(pipeline, folder)}",
    ]
    if pipeline.rollback is None:
        return told
    names = list(pipeline.rounds)
    counted = names[: names.index(pipeline.rollback.after) + 1]
    unrun = [name for name in counted if champion.status(folder, name) == "unrun"]
    if unrun:
        told.append(
            f"not yet run, and no descendants of {to}: {', '.join(unrun)}; what they promote does not "
            f"become the champion (to drop one: python -m flows round remove {unrun[-1]})"
        )
    return told


# --- parts ---------------------------------------------------------------------------------------


def _judged(pipeline: Pipeline, folder: str | Path, round: str) -> dict[str, Any]:
    """The decision of a declared round that has come to its gate, or BadInput."""
    _one_of("round", round, list(pipeline.rounds))
    found = champion.read_decision(folder, round)
    if found is None:
        raise BadInput(
            f"{round} has not come to its gate",
            where=f"runs/{round}/metrics/decision.json",
            rule="a round is decided once its candidates have been evaluated",
            mend=f"python -m flows run --round {round}",
        )
    return found


def _candidate(judged: dict[str, Any], name: str | None) -> str:
    """The candidate to promote: the one named, else the one that the gate ranks first."""
    known = [row["candidate"] for row in judged["candidates"]]
    if name is None and judged.get("leader") in known:
        return str(judged["leader"])
    if name not in known:
        raise BadInput(
            f"{name} was not judged in {judged['round']}" if name else "several are ranked first",
            where=f"runs/{judged['round']}/metrics/decision.json",
            rule="a candidate of the round that has been evaluated is promoted",
            mend=f"--candidate with one of {', '.join(known)}",
        )
    return str(name)


def _promoted(folder: str | Path, round: str) -> None:
    """A round's promoted policy must be there, and nobody still asked about it."""
    status = "kept" if round == "r0" else champion.status(folder, round)
    place = Path(folder) / "runs" / round / "promoted"
    if status in ("unrun", "awaiting") or not place.is_dir():
        awaiting = status == "awaiting"
        first = "sft" if round == "r0" else f"promote@{round}"
        command = f'python -m flows decide {round} promote --because "..."'
        raise BadInput(
            f"{round} awaits a decision" if awaiting else f"{round} has promoted no policy yet",
            where=str(place.relative_to(folder)),
            rule="one goes back to a round that has been decided",
            mend=command
            if awaiting
            else f"dvc repro {first} (or, if it has run: dvc pull {first})",
        )


def _last_before(pipeline: Pipeline, folder: str | Path, to: str) -> str:
    """The last declared round but those not yet run that start from `to`, which count as later."""
    later = {to}
    last = "r0"
    for name, declared in pipeline.rounds.items():
        if champion.status(folder, name) == "unrun" and declared.from_ in later:
            later.add(name)
        else:
            last = name
    return last


def _descendants(pipeline: Pipeline, names: Iterable[str]) -> list[str]:
    """The rounds that start from, or sample from, one of these rounds or of their descendants."""
    found = list(names)
    count = len(found)
    for name, declared in pipeline.rounds.items():
        if name not in found and {declared.from_, declared.sample_from} & set(found):
            found.append(name)
    return found[count:]


def _without_time(decision: config.Decision | None) -> dict[str, Any] | None:
    return None if decision is None else decision.model_dump(exclude={"at"})


def _write(path: Path, key: str, value: Any) -> None:
    text = path.read_text(encoding="utf-8")
    editing.save(path, editing.set_value(text, key, value))


def tell_mlflow(folder: Path) -> Pipeline:
    """Alias and overview follow what pipeline.yaml says now, also where DVC restored promote's result."""
    from flows import overview

    pipeline = config.load(folder / "pipeline.yaml")
    tracking.register_champion(pipeline, folder)
    overview.log(pipeline, folder)
    return pipeline


def _check_git(pipeline: Pipeline, folder: Path, allow_dirty: bool) -> None:
    if pipeline.lineage.commit:
        history.check(folder, allow_dirty=allow_dirty)


def _commit_round(
    pipeline: Pipeline,
    folder: Path,
    round: str,
    decision: dict[str, Any],
    allow_dirty: bool,
    why: str,
) -> str | None:
    from flows import lineage
    from flows.report import verdict

    lineage.write_record(folder, round)
    if not pipeline.lineage.commit:
        return None
    message = f"Round {round}: {verdict(decision)}" + (f"\n\n{why}" if why else "")
    return history.commit_round(folder, round, message, allow_dirty=allow_dirty)


def _one_of(what: str, value: str, known: Iterable[str]) -> None:
    names = list(known)
    if value not in names:
        raise BadInput(f"no {what} {value}", mend=f"use one of {', '.join(names)}")


def _words(what: str, value: str) -> str:
    text = " ".join(value.split())
    if not text or not text.isprintable():
        raise BadInput(
            f"--{what} is {value!r}",
            rule="it is read in the file, in git, in MLflow and in the report",
            mend="write a line of text",
        )
    return text


def _name(folder: str | Path) -> str:
    """Who decides: git's user.name, else the login name."""
    try:
        found = subprocess.run(
            ["git", "config", "user.name"], cwd=folder, capture_output=True, text=True, check=False
        ).stdout.strip()
        return found or getpass.getuser()
    except (OSError, KeyError):  # no git; no such user in a container
        return "unknown"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
