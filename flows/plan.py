"""What would run, in which order, and why.

From DVC's own graph and status, never from a second list.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf import config
from rlhf.errors import BadInput

if TYPE_CHECKING:
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.stage import PipelineStage


@dataclass(frozen=True)
class Stage:
    """One node of the plan."""

    name: str
    inputs: list[str]
    outputs: list[str]
    after: list[str] = field(metadata={"doc": "stages that must have finished"})
    reasons: list[str]

    @property
    def runs(self) -> bool:
        """Whether it would run now."""
        return bool(self.reasons)

    @property
    def label(self) -> str:
        """A name for MLflow and Prefect keys: lower case and dashes."""
        return self.name.replace("@", "-").replace("_", "-").lower()

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "runs": self.runs}


def check_workspace(folder: str | Path = ".") -> None:
    """One clear message for each of the ways a folder is not ready."""
    folder = Path(folder)
    if not (folder / "pipeline.yaml").is_file():
        raise BadInput(
            "no pipeline.yaml here",
            where=str(folder.resolve()),
            rule="commands run in the folder that holds pipeline.yaml",
            mend="change into the project's folder",
        )
    if not (folder / "dvc.yaml").is_file():
        raise BadInput(
            "no dvc.yaml here",
            where=str(folder.resolve()),
            rule="dvc.yaml declares the stages",
            mend="git checkout dvc.yaml",
        )
    inside = subprocess.run(
        ["git", "rev-parse", "--is-inside-work-tree"], cwd=folder, capture_output=True, check=False
    )
    if inside.returncode:
        raise BadInput(
            "not a git repository",
            where=str(folder.resolve()),
            rule="code, settings and dvc.lock are versioned together",
            mend="git init",
        )
    if not (folder / ".dvc").is_dir():
        raise BadInput(
            "not a DVC project (no folder .dvc)",
            where=str(folder.resolve()),
            rule="DVC keeps every stage's outputs",
            mend="dvc init" + ("" if (folder / ".git").exists() else " --subdir"),
        )


def make_plan(target: str | None = None, folder: str | Path = ".") -> list[Stage]:
    """The stages in an order that respects their edges, each with the reasons why it would run.

    Args:
        target: only this stage and what it depends on, like `promote@r1`; None for all stages.
        folder: the project's folder.
    """
    check_workspace(folder)
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo

    try:
        with Repo(str(folder)) as repo:
            with repo.lock:
                return _make(repo, target)
    except LockError as error:
        raise BadInput(
            "another process holds DVC's lock",
            where=".dvc/tmp/lock",
            rule=str(error).splitlines()[0],
            mend="wait until it has finished (a round may be running), then try again",
        ) from None
    except DvcException as error:
        raise _unreadable(error) from None


def _unreadable(error: DvcException) -> BadInput:
    """DVC's complaint with its cause, the file it is about, and how to get that file back."""
    from dvc.config import ConfigError

    cause = error.__cause__
    words = _first_words(error) + (f": {_first_words(cause)}" if cause is not None else "")
    where = os.path.normpath(getattr(error, "path", None) or "dvc.yaml")
    if isinstance(error, ConfigError):
        where = ".dvc/config"
    return BadInput(
        words,
        where=where,
        mend=f"correct the file, or take the last committed one: git checkout {where}",
    )


def _make(repo: Repo, target: str | None) -> list[Stage]:
    import networkx

    graph = repo.index.graph  # edges lead from a stage to what it depends on
    rounds = config.read_yaml(Path(repo.root_dir) / "pipeline.yaml").get("rounds") or {}
    absent = {f"promote@{name}" for name in rounds} - {stage.addressing for stage in graph}
    if absent:
        raise BadInput(
            f"no stage {', '.join(sorted(absent))}",
            where="dvc.yaml",
            rule="every round of pipeline.yaml ends with its stage promote",
            mend="take the last committed file: git checkout dvc.yaml",
        )
    if target is not None:
        found = [stage for stage in graph if stage.addressing == target]
        if not found:
            raise BadInput(
                f"no stage {target}",
                where="dvc.yaml",
                rule="a round is declared under rounds: in pipeline.yaml",
                mend="python -m flows plan",
            )
        graph = graph.subgraph({*found, *networkx.descendants(graph, found[0])})
    position = {stage: i for i, stage in enumerate(repo.index.stages)}
    order = list(
        networkx.lexicographical_topological_sort(graph.reverse(), key=position.__getitem__)
    )
    plan: dict[str, Stage] = {}
    for stage in order:
        after = sorted(
            (parent.addressing for parent in graph.successors(stage)),
            key=[s.addressing for s in order].index,
        )
        reasons = list(_reasons(stage))
        reasons += [f"{name} runs before it" for name in after if plan[name].runs]
        plan[stage.addressing] = Stage(
            name=stage.addressing,
            inputs=[str(dep.def_path) for dep in stage.deps if not _is_params(dep)],
            outputs=[str(out.def_path) for out in stage.outs],
            after=after,
            reasons=reasons,
        )
    return list(plan.values())


def _is_params(dep: Any) -> bool:
    return bool(hasattr(dep, "params"))


def _reasons(stage: PipelineStage) -> Iterator[str]:
    """Why DVC would run a stage, in words."""
    locked = any(item.hash_info for item in [*stage.deps, *stage.outs])
    if not locked:
        yield "it has not run yet"
        return
    if stage.cmd_changed:
        yield "its command changed"
    for dep in stage.deps:
        if _is_params(dep):
            yield from _param_reasons(dep)
        else:
            for path, state in dep.status().items():
                yield f"input {path} {_state_words(state)}"
    for out in stage.outs:
        for path, state in out.status().items():
            yield f"output {path} {_state_words(state)}"


def _param_reasons(dep: Any) -> Iterator[str]:
    recorded = (dep.hash_info.value or {}) if dep.hash_info else {}
    actual = dep.read_params()
    for name in dep.params:
        if name not in actual:
            yield f"parameter {name} is missing"
        elif name not in recorded:
            yield f"parameter {name} is new"
        elif recorded[name] != actual[name]:
            for path, old, new in _differences(recorded[name], actual[name], name):
                yield f"parameter {path}: {old} -> {new}"


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """The leaves in which two values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if old.get(key, _ABSENT) != new.get(key, _ABSENT):
                yield from _differences(
                    old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}"
                )
    else:
        yield path, _shown(old), _shown(new)


_ABSENT = object()


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    return "null" if value is None else str(value)


def _state_words(state: Any) -> str:
    words = {"deleted": "is missing", "new": "is new", "modified": "changed"}
    if isinstance(state, dict):  # of a directory
        return ", ".join(words.get(str(value), str(value)) for value in state.values())
    return words.get(str(state), str(state))


def _first_words(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
