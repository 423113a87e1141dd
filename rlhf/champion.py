"""Which policy is the champion: a pure function of what the rounds decided and of a declared rollback.

The last promotion, in the order in which `pipeline.yaml` declares the rounds, is the champion. A
`rollback` puts the policy of an earlier round in its place, until a round after `rollback.after`
promotes another. Nothing else counts: not the order in which stages ran, nor a clock, nor a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf import artifacts
from rlhf.errors import BadInput
from rlhf.resume import content_digest

if TYPE_CHECKING:
    from rlhf.config import Pipeline

Status = Literal["unrun", "promoted", "kept", "stopped", "awaiting"]
GATE = "gate"
"""Who decided where no person did."""
LINEAGE = "lineage.json"
"""In a promoted policy's directory: what it was made from."""
_DECIDED = ("promoted", "kept", "stopped", "awaiting")


@dataclass(frozen=True)
class Champion:
    """The round whose `runs/<round>/promoted` it is; r0 has no candidate."""

    round: str
    candidate: str | None
    kind: Literal["initial", "promotion", "decision", "rollback"]


@dataclass(frozen=True)
class Decided:
    """A round that came to its gate, by whose word, and the champion from then on."""

    round: str
    status: Status
    candidate: str | None
    by: str
    because: str
    at: str | None
    champion: Champion


def champion(pipeline: Pipeline, folder: str | Path = ".") -> Champion:
    """The champion now."""
    return _course(pipeline, _decisions(pipeline, folder))[-1]


def status(folder: str | Path, round: str) -> Status:
    """What a round came to; `unrun` before its gate."""
    decision = read_decision(folder, round)
    return "unrun" if decision is None else decision["status"]


def history(pipeline: Pipeline, folder: str | Path = ".") -> list[Decided]:
    """One entry for each round that came to its gate, in declared order."""
    found = _decisions(pipeline, folder)
    entries = []
    for name, current in zip(found, _course(pipeline, found)[1:], strict=True):
        decision = found[name]
        if decision is not None:
            by, because, at = whose_word(decision)
            entries.append(
                Decided(name, decision["status"], decision["promoted"], by, because, at, current)
            )
    return entries


def read_decision(folder: str | Path, round: str) -> dict[str, Any] | None:
    """`runs/<round>/metrics/decision.json`, None where the round has none. Raises BadInput if it is broken."""
    path = Path(folder) / "runs" / round / "metrics" / "decision.json"
    if not path.is_file():
        return None
    content = artifacts.read_json(path)
    problem = _problem(content, round)
    if problem is not None:
        raise BadInput(
            f"not a decision: {problem}",
            where=str(path),
            rule="as promote writes it",
            mend=f"make it again: {artifacts.remake(path)}",
        )
    return dict(content)


def whose_word(decision: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Who decided (`gate`, or a person's name), why, and when a person did."""
    word = decision["decision"]
    if word is None:
        return GATE, decision["reason"], None
    return word["by"], word["because"], word["at"]


def _problem(content: Any, round: str) -> str | None:
    if not isinstance(content, dict):
        return "it is not a mapping"
    if content.get("round") != round:
        return f"it is of round {content.get('round')}"
    if content.get("status") not in _DECIDED:
        return f"status is {content.get('status')}, not one of {', '.join(_DECIDED)}"
    rows = content.get("candidates")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("candidate"), str) for row in rows
    ):
        return "candidates is not a list of them"
    names = [row["candidate"] for row in rows]
    promoted = content.get("promoted")
    if (promoted in names) != (content["status"] == "promoted"):
        return f"status is {content['status']} and promoted is {promoted}"
    if content["status"] != "promoted" and promoted is not None:
        return f"promoted is {promoted}, which is none of its candidates"
    word = content.get("decision")
    if word is not None and not (
        isinstance(word, dict) and all(isinstance(word.get(k), str) for k in ("by", "because"))
    ):
        return "decision does not say by whom and because of what"
    if not isinstance(content.get("reason"), str):
        return "it gives no reason"
    return None


def _decisions(pipeline: Pipeline, folder: str | Path) -> dict[str, dict[str, Any] | None]:
    return {name: read_decision(folder, name) for name in pipeline.rounds}


def _course(pipeline: Pipeline, found: Mapping[str, dict[str, Any] | None]) -> list[Champion]:
    """The champion before the first round and after each."""
    rollback = pipeline.rollback
    current = Champion("r0", None, "initial")
    course = []
    for name in ["r0", *found]:
        decision = found.get(name)
        if decision is not None and decision["status"] == "promoted":
            kind: Any = "promotion" if decision["decision"] is None else "decision"
            current = Champion(name, decision["promoted"], kind)
        if rollback is not None and rollback.after == name:
            current = Champion(*_origin(rollback.to, pipeline, found), "rollback")
        course.append(current)
    return course


def _origin(
    round: str, pipeline: Pipeline, found: Mapping[str, dict[str, Any] | None]
) -> tuple[str, str | None]:
    """Round and candidate that a round's promoted policy comes from: a round that kept it only passed it on."""
    while round in pipeline.rounds:
        decision = found.get(round)
        if decision is None or decision["status"] == "promoted":
            return round, decision["promoted"] if decision is not None else None
        round = pipeline.rounds[round].from_
    return "r0", None


def policy_digest(directory: str | Path) -> str:
    """sha256 of a policy's files, its lineage apart: the same wherever the policy lies."""
    return content_digest(Path(directory), without=(LINEAGE,))
