"""What would run, in which order, and why.

From DVC's own graph and status, never from a second list.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import definitions, history
from flows.contents import Contents
from flows.definitions import Definition, Engine, Unusual
from rlhf import artifacts, config, yaml12
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
    certain: bool = True
    """False: it runs only if what runs before it comes out changed; DVC stops at an output that does not."""
    faults: list[str] = field(default_factory=list)
    """Files of DVC's cache that are damaged, with the mend."""

    @property
    def runs(self) -> bool:
        """Whether it would run now, or may."""
        return bool(self.reasons)

    @property
    def state(self) -> str:
        """`run`, `may run` or `keep`."""
        return ("run" if self.certain else "may run") if self.reasons else "keep"

    @property
    def label(self) -> str:
        """A name for MLflow and Prefect keys: lower case and dashes."""
        return self.name.replace("@", "-").replace("_", "-").lower()

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "runs": self.runs, "state": self.state}


def check_workspace(folder: str | Path = ".", *, needs_git: bool = True) -> None:
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
    problem = history.no_repository(folder) if needs_git else None
    if problem is not None:
        raise problem
    if not (folder / ".dvc").is_dir():
        raise BadInput(
            "not a DVC project (no folder .dvc)",
            where=str(folder.resolve()),
            rule="DVC keeps every stage's outputs",
            mend="dvc init" + ("" if (folder / ".git").exists() else " --subdir"),
        )


def make_plan(
    target: str | None = None, folder: str | Path = ".", *, needs_git: bool = True
) -> list[Stage]:
    """The stages in an order that respects their edges, each with the reasons why it would run.

    Args:
        target: only this stage and what it depends on, like `promote@r1`; None for all stages.
        folder: the project's folder.
        needs_git: whether a folder outside git is refused.
    """
    check_workspace(folder, needs_git=needs_git)
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    folder = Path(folder).resolve()
    history.refuse_unfinished_merge(folder)
    with _clear_messages(), ExitStack() as stack:
        engine = Engine(str(folder), stack)
        try:
            return _plan_remembering(folder, target, engine)
        except Unusual:
            return _plan_by_dvc(engine.repo, target)


@contextmanager
def _clear_messages() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("dvc", "dvc_data", "dvc_objects"):
            raise
        from dvc.exceptions import DvcException
        from dvc.lock import LockError

        if isinstance(error, LockError):
            raise BadInput(
                "another process holds DVC's lock",
                where=".dvc/tmp/lock",
                rule=str(error).splitlines()[0],
                mend="wait until it has finished (a round may be running), then try again",
            ) from None
        if isinstance(error, DvcException):
            raise _unreadable(error) from None
        raise


def _plan_remembering(folder: Path, target: str | None, engine: Engine) -> list[Stage]:
    """The plan from what DVC resolved and hashed, now or for an earlier plan. Raises Unusual."""
    memory = Memory(folder)
    pipeline = memory.pipeline()
    stages = memory.stages(pipeline, engine)
    _check_target(stages, pipeline, target)
    lock = memory.lock()
    graph = _Graph(stages)
    order = graph.order(target)
    definitions.check_only_dvc_yaml(
        {path for name in order for path in graph.raw_inputs(name)}, str(folder)
    )
    contents = Contents(str(folder), memory.contents(), engine)
    params = {definitions.PIPELINE: pipeline}
    plan: dict[str, Stage] = {}
    for name in order:
        stage = stages[name]
        for path in stage.params.keys() - params.keys():
            params[path] = config.read_yaml(folder / path)
        _add(
            plan,
            name,
            inputs=stage.deps,
            outputs=[*stage.outs],
            after=graph.after(name),
            reasons=list(_reasons(stage, lock.get(name, {}), params, contents)),
            faults=_faults(stage, lock.get(name, {}), contents),
        )
    memory.keep(contents)
    return list(plan.values())


def _add(
    plan: dict[str, Stage],
    name: str,
    *,
    inputs: list[str],
    outputs: list[str],
    after: list[str],
    reasons: list[str],
    faults: list[str] | None = None,
    waits: bool = True,
) -> None:
    """Put a stage at the plan's end."""
    before = [f"{other} runs before it" for other in after if plan[other].runs] if waits else []
    plan[name] = Stage(
        name, inputs, outputs, after, [*reasons, *before], bool(reasons) or not before, faults or []
    )


class _Graph:
    """Which stage makes what another reads: the same path, one above it or one below it, as DVC has it."""

    def __init__(self, stages: Mapping[str, Definition]) -> None:
        self._stages = stages
        self._position = {name: i for i, name in enumerate(stages)}
        makers = [(f"{path}/", name) for name, stage in stages.items() for path in stage.outs]
        makers.sort()
        for (path, _), (following, _) in pairwise(makers):
            if following.startswith(path):
                raise Unusual(f"{following} is made twice")
        self._paths = [path for path, _ in makers]
        self._makers = dict(makers)
        self._after: dict[str, list[str]] = {}

    def after(self, name: str) -> list[str]:
        """The stages right before one, in DVC's order."""
        if name not in self._after:
            found = {maker for path in self._stages[name].deps for maker in self._made_by(path)}
            self._after[name] = sorted(found, key=self._position.__getitem__)
        return self._after[name]

    def raw_inputs(self, name: str) -> list[str]:
        """What a stage reads and no stage makes."""
        return [path for path in self._stages[name].deps if not self._made_by(path)]

    def _made_by(self, path: str) -> list[str]:
        start = f"{path}/"
        found = [
            self._makers[start[: i + 1]]
            for i, letter in enumerate(start)
            if letter == "/" and start[: i + 1] in self._makers
        ]
        if found:
            return found
        i = bisect.bisect_left(self._paths, start)
        while i < len(self._paths) and self._paths[i].startswith(start):
            found.append(self._makers[self._paths[i]])
            i += 1
        return found

    def order(self, target: str | None) -> list[str]:
        """All stages, or the target and those before it, each behind those it waits for."""
        wanted, open_ends = set(), [target] if target else list(self._stages)
        while open_ends:
            name = open_ends.pop()
            if name not in wanted:
                wanted.add(name)
                open_ends += self.after(name)
        waiting = {name: len(self.after(name)) for name in wanted}
        behind: dict[str, list[str]] = {name: [] for name in wanted}
        for name in wanted:
            for other in self.after(name):
                behind[other].append(name)
        ready = [self._position[name] for name, count in waiting.items() if not count]
        heapq.heapify(ready)
        names, found = list(self._stages), []
        while ready:
            name = names[heapq.heappop(ready)]
            found.append(name)
            for other in behind[name]:
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, self._position[other])
        if len(found) < len(wanted):
            raise Unusual("a cycle")  # DVC names its stages
        return found


def _faults(stage: Definition, entry: Mapping[str, Any], contents: Contents) -> list[str]:
    """Damaged files of DVC's cache that hold a stage's outputs, with what to do."""
    if not contents.damaged:
        return []
    return [
        f"{path}: the content is not what its name says (output {item['path']})\n"
        "  rule: DVC finds files in its cache by the hash of their content\n"
        f"  mend: rm -f {path}, then dvc pull {stage.name} (with a remote) or dvc commit {stage.name} "
        "(when its output is up to date); else it is made again"
        for item in entry.get("outs", [])
        for path in contents.damaged_of(item["md5"])
    ]


# --- what earlier plans found --------------------------------------------------------------------


class Memory:
    """What earlier plans read, in `.scratch/plan`: parsed files by their content, hashes by the files' stamps.

    Everything here can be computed again; a file that cannot be read counts as empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = folder / ".scratch/plan"
        self._read: dict[str, dict[str, Any]] = {}
        self._key = [_FORMAT, str(folder), version("dvc"), _digest(_settings(folder).encode())]

    def _load(self, name: str) -> dict[str, Any]:
        """One file of the memory; empty if it was written under other settings of DVC."""
        if name not in self._read:
            try:
                found = json.loads((self._place / f"{name}.json").read_bytes())
            except (OSError, ValueError):
                found = {}
            fits = isinstance(found, dict) and found.get("key") == self._key
            self._read[name] = found if fits else {"key": self._key}
        return self._read[name]

    def _save(self, name: str) -> None:
        """Keep what is exact as JSON; a folder that cannot be written to costs time only."""
        text = json.dumps(self._read[name])
        with suppress(OSError):
            self._place.mkdir(parents=True, exist_ok=True)
            artifacts.write_text(self._place / f"{name}.json", text)

    def pipeline(self) -> dict[str, Any]:
        """The content of pipeline.yaml."""
        path = self._folder / definitions.PIPELINE
        if not path.is_file():
            return config.read_yaml(path)  # raises, in its own words
        memory, digest = self._load("pipeline"), _digest(path.read_bytes())
        if memory.get("digest") != digest:
            content = config.read_yaml(path)
            if not _exact(content):
                return content
            memory.update(digest=digest, content=content)
            self._save("pipeline")
        return dict(memory["content"])

    def stages(self, pipeline: Mapping[str, Any], engine: Engine) -> dict[str, Definition]:
        """Every stage's definition."""
        text = (self._folder / "dvc.yaml").read_bytes()
        memory, digest = self._load("stages"), _digest(text)
        try:
            declared = yaml12.load(text.decode())
        except Exception:
            raise Unusual("dvc.yaml") from None  # DVC says what is wrong with it
        if not isinstance(declared, dict):
            raise Unusual("dvc.yaml")
        if memory.get("digest") != digest:
            memory.update(digest=digest, stages={})
        before = dict(memory["stages"])
        found = definitions.load(memory["stages"], declared, pipeline, engine)
        if memory["stages"] != before:
            self._save("stages")
        return found

    def lock(self) -> dict[str, Any]:
        """The entries of dvc.lock, stage by stage. Only those that changed are parsed."""
        try:
            text = (self._folder / "dvc.lock").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except UnicodeDecodeError:
            raise Unusual("dvc.lock") from None
        memory = self._load("lock")
        blocks = lock_blocks(text)
        if blocks is None:
            return _entries(text)
        known = memory.setdefault("blocks", {})
        digests = [_digest(block.encode()) for block in blocks]
        fresh = [b for b, digest in zip(blocks, digests, strict=True) if digest not in known]
        if not fresh:
            found = dict(known[digest] for digest in digests)
        else:
            try:
                parsed = _entries(f"{_LOCK_HEAD}{''.join(fresh)}")
            except Unusual:
                parsed = {}
            if len(parsed) != len(fresh) or not _exact(parsed):
                return _entries(text)
            items = iter(parsed.items())
            pairs = {d: known.get(d) or list(next(items)) for d in digests}
            found = dict(pairs.values())
            memory["blocks"] = pairs
            self._save("lock")
        if len(found) != len(blocks):
            return _entries(text)  # a stage twice: DVC refuses the file
        return found

    def entries(self) -> dict[str, Any]:
        """The entries of dvc.lock; none where DVC has to read them in its own way."""
        try:
            return self.lock()
        except Unusual:
            return {}

    def contents(self) -> dict[str, Any]:
        """What is known of files."""
        return self._load("contents")

    def keep(self, contents: Contents) -> None:
        """Remember what was looked at."""
        if contents.changed:
            self._save("contents")


_FORMAT = 1
_LOCK_HEAD = "schema: '2.0'\nstages:\n"


def lock_blocks(text: str) -> list[str] | None:
    """The text of each stage's entry of dvc.lock; None if it is not laid out as DVC writes it."""
    body = text.removeprefix(_LOCK_HEAD)
    if len(body) == len(text) or re.search(r"^(?!  \S|    |\s*$)", body, re.M):
        return None
    starts = [found.start() for found in re.finditer(r"^  \S", body, re.M)]
    if not starts or starts[0]:
        return None
    return [body[start:end] for start, end in pairwise([*starts, len(body)])]


def _entries(text: str) -> dict[str, Any]:
    """The stages of a dvc.lock. Raises Unusual for what DVC has to judge: its message is the better one."""
    try:
        content = yaml12.load(text)
    except Exception:
        raise Unusual("dvc.lock") from None
    if not isinstance(content, dict) or content.get("schema") != "2.0":
        raise Unusual("dvc.lock")
    stages = content.get("stages", {})
    if content.keys() - {"schema", "stages", "datasets"} or not isinstance(stages, dict):
        raise Unusual("dvc.lock")
    if not all(map(_is_entry, stages.values())):
        raise Unusual("dvc.lock")
    return stages


def _is_entry(entry: Any) -> bool:
    """Whether it is one that DVC's present versions write."""
    if not isinstance(entry, dict) or entry.keys() - {"cmd", "deps", "outs", "params"}:
        return False
    items = [*(entry.get("deps") or []), *(entry.get("outs") or [])]
    return (
        "cmd" in entry
        and all(isinstance(item, dict) and item.get("hash") == "md5" for item in items)
        and all(isinstance(item.get("path"), str) and "md5" in item for item in items)
        and all(
            item.keys() <= {"path", "hash", "md5", "size", "nfiles", "isexec"} for item in items
        )
        and all(isinstance(p, dict) for p in entry.get("params", {}).values())
    )


def _exact(content: Any) -> bool:
    """Whether JSON gives the very same back."""
    try:
        return bool(json.loads(json.dumps(content)) == content)
    except (TypeError, ValueError):
        return False


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _settings(folder: Path) -> str:
    """Everything outside the project's stages that decides what DVC sees: its settings and the ignored paths."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    places = [folder / ".dvc/config", folder / ".dvc/config.local", home / "dvc/config"]
    lines = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("DVC_", "XDG_"))]
    for path in places:
        with suppress(OSError):
            lines.append(f"{path}\n{path.read_text(encoding='utf-8', errors='replace')}")
    return "\n".join(lines)


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


def _check_target(names: Collection[str], pipeline: Mapping[str, Any], target: str | None) -> None:
    """Every declared round has its stages, and the target is one of them."""
    rounds = pipeline.get("rounds") or {}
    absent = {f"promote@{name}" for name in rounds}.difference(names)
    if absent:
        raise BadInput(
            f"no stage {', '.join(sorted(absent))}",
            where="dvc.yaml",
            rule="every round of pipeline.yaml ends with its stage promote",
            mend="take the last committed file: git checkout dvc.yaml",
        )
    if target is None or target in names:
        return
    group, _, key = target.partition("@")
    if group == "promote":
        raise BadInput(
            f"no round {key}, so no stage {target}",
            where=f"{definitions.PIPELINE} rounds",
            rule="a round is declared under rounds: in pipeline.yaml",
            mend=f"use one of {_some([*rounds])}, or add it: python -m flows round add {key}",
        )
    raise BadInput(
        f"no stage {target}",
        where="dvc.yaml",
        rule="a stage is declared in dvc.yaml, once for each round or candidate of pipeline.yaml",
        mend=f"use one of {_some([n for n in names if n.startswith(group)] or [*names])}",
    )


def _some(names: list[str], most: int = 12) -> str:
    """Names to choose from; the last ones if there are many."""
    return ", ".join(names) if len(names) <= most else "..., " + ", ".join(names[-most:])


def _plan_by_dvc(repo: Repo, target: str | None) -> list[Stage]:
    """The plan from DVC's own graph and status: exact for whatever DVC can hold, and slow with many rounds."""
    import networkx

    graph = repo.index.graph  # edges lead from a stage to what it depends on
    pipeline = config.read_yaml(Path(repo.root_dir) / definitions.PIPELINE)
    _check_target({stage.addressing for stage in graph}, pipeline, target)
    if target is not None:
        found = [stage for stage in graph if stage.addressing == target]
        graph = graph.subgraph({*found, *networkx.descendants(graph, found[0])})
    position = {stage: i for i, stage in enumerate(repo.index.stages)}
    order = list(
        networkx.lexicographical_topological_sort(graph.reverse(), key=position.__getitem__)
    )
    plan: dict[str, Stage] = {}
    for stage in order:
        after = [s.addressing for s in sorted(graph.successors(stage), key=position.__getitem__)]
        _add(
            plan,
            stage.addressing,
            inputs=[str(dep.def_path) for dep in stage.deps if not hasattr(dep, "params")],
            outputs=[str(out.def_path) for out in stage.outs],
            after=after,
            reasons=list(_reasons_by_dvc(stage)),
            waits=not stage.frozen,
        )
    return list(plan.values())


def _reasons_by_dvc(stage: PipelineStage) -> Iterator[str]:
    if stage.always_changed or stage.is_callback:
        yield "it is declared to run always"
    if not any(item.hash_info for item in [*stage.deps, *stage.outs]):
        yield NOT_RUN
        return
    if getattr(stage, "cmd_changed", False):
        yield COMMAND
    for dep in [] if stage.frozen else stage.deps:
        if hasattr(dep, "params"):
            recorded = (dep.hash_info.value or {}) if dep.hash_info else {}
            yield from _of_params(dep.params, recorded, dep.read_params())
        else:
            yield from _of_path("input", dep, dep.status())
    for out in stage.outs:
        yield from _of_path("output", out, out.status())


def _of_path(kind: str, item: Any, status: Mapping[str, Any]) -> Iterator[str]:
    words = {"deleted": MISSING, "modified": CHANGED if item.hash_info else NEW, "new": NEW}
    for path, state in status.items():
        yield f"{kind} {path} {words.get(str(state), str(state))}"


# --- reasons, in words ---------------------------------------------------------------------------

NOT_RUN, COMMAND = "it has not run yet", "its command changed"
MISSING, CHANGED, NEW, UNCACHED = "is missing", "changed", "is new", "not in cache"


def _reasons(
    stage: Definition, entry: Mapping[str, Any], params: Mapping[str, Any], contents: Contents
) -> Iterator[str]:
    """Why DVC would run a stage, by what dvc.lock says of its last run."""
    recorded = {
        kind: {item["path"]: item["md5"] for item in entry.get(kind, [])}
        for kind in ("deps", "outs")
    }
    values = {
        path: {k: v for k, v in (entry.get("params", {}).get(path) or {}).items() if k in keys}
        for path, keys in stage.params.items()
    }
    hashes = [recorded["deps"].get(p) for p in stage.deps]
    hashes += [recorded["outs"].get(p) for p in stage.outs]
    if not any(hashes) and not any(values.values()):
        yield NOT_RUN
        return
    if entry.get("cmd") != stage.cmd:
        yield COMMAND
    for path in stage.deps:
        yield from _of_content("input", path, recorded["deps"].get(path), contents)
    for path, keys in stage.params.items():
        actual = {key: definitions.find(params[path], key) for key in keys}
        present = {key: v for key, v in actual.items() if v is not definitions.ABSENT}
        yield from _of_params(keys, values[path], present)
    for path, cached in stage.outs.items():
        before = recorded["outs"].get(path)
        if before is not None and cached and not contents.in_cache(before):
            yield f"output {path} {UNCACHED}"
        else:
            yield from _of_content("output", path, before, contents)


def _of_content(kind: str, path: str, before: str | None, contents: Contents) -> Iterator[str]:
    now = contents.hash_of(path)
    if now is None:
        yield f"{kind} {path} {MISSING}"
    elif now != before:
        yield f"{kind} {path} {CHANGED if before else NEW}"


def _of_params(
    names: list[str], recorded: Mapping[str, Any], actual: Mapping[str, Any]
) -> Iterator[str]:
    for name in names:
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


def _first_words(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
