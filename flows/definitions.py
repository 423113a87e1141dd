"""The stages of dvc.yaml as DVC resolves them, remembered between plans.

DVC's resolver notes which values of pipeline.yaml a stage's definition used. What it gave is taken again while dvc.yaml
and these values are the same, so that a plan resolves what is new and nothing else.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dvc.repo import Repo

PIPELINE = "pipeline.yaml"
DEVICE_STAGES = ("sft", "preferences", "reward_model", "policy", "evaluate", "best_of_n")
"""Stages that run a model: each takes a GPU slot where there are any."""
_KEYS = {"cmd", "deps", "params", "outs", "metrics", "plots", "desc", "meta"}
_OUTPUT_KEYS = {"cache", "desc", "labels", "meta", "persist", "push", "type"}
_COLLECTION = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


class Unusual(Exception):
    """Something that only DVC's whole way, `Repo.index`, knows how to read."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One stage: its command, the paths it reads and writes, and the parameters DVC tracks for it."""

    name: str
    cmd: str
    deps: list[str]
    params: dict[str, list[str]]
    outs: dict[str, bool]
    """Path -> whether DVC keeps it in its cache."""


class Engine:
    """DVC itself, opened under its lock when something is asked that is not remembered."""

    def __init__(self, folder: str, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    @cached_property
    def repo(self) -> Repo:
        from dvc.repo import Repo

        repo = self._stack.enter_context(Repo(self._folder))
        self._stack.enter_context(repo.lock)
        return repo


def names(declared: Mapping[str, Any], pipeline: Mapping[str, Any]) -> list[str]:
    """Every stage's name, in DVC's order. Raises Unusual for what foreach over a mapping does not cover."""
    found = []
    if declared.get("vars") != [PIPELINE]:
        raise Unusual("vars")
    for group, body in declared.get("stages", {}).items():
        if not isinstance(body, dict) or "matrix" in body:
            raise Unusual(group)
        if "foreach" in body:
            found += [f"{group}@{key}" for key in _collection(body, pipeline)]
        else:
            found.append(group)
    return found


def load(
    remembered: dict[str, Any],
    declared: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    engine: Engine,
) -> dict[str, Definition]:
    """Every stage's definition, in DVC's order.

    Args:
        remembered: what an earlier call left, for the same dvc.yaml and the same DVC; brought up to date.
        declared: the content of dvc.yaml.
        pipeline: the content of pipeline.yaml.
        engine: resolves what is not remembered.
    """
    wanted = names(declared, pipeline)
    stale = [
        name
        for name in wanted
        if name not in remembered
        or any(find(pipeline, path) != value for path, value in remembered[name]["uses"].items())
    ]
    for name in remembered.keys() - set(wanted):
        del remembered[name]
    if stale:
        remembered.update(_resolve(stale, declared, pipeline, engine))
    return {
        name: Definition(name, r["cmd"], r["deps"], r["params"], r["outs"])
        for name, r in ((name, remembered[name]) for name in wanted)
    }


ABSENT = object()


def find(data: Any, path: str) -> Any:
    """The value at a dotted path, or ABSENT."""
    for part in path.split("."):
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            return ABSENT
    return data


def _collection(body: Mapping[str, Any], pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage's foreach runs over."""
    match = _COLLECTION.fullmatch(str(body["foreach"]))
    found = find(pipeline, match[1]) if match else ABSENT
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise Unusual(f"foreach {body['foreach']}")
    return found


def _resolve(
    stale: list[str],
    declared: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    engine: Engine,
) -> dict[str, Any]:
    """Definitions from DVC's resolver, with the values of pipeline.yaml that each used."""
    from dvc.exceptions import DvcException

    try:
        return _resolve_in(_part(stale, declared, pipeline), stale, engine)
    except DvcException:  # a template that names another round, or a fault: DVC sees everything
        return _resolve_in(pipeline, stale, engine)


def _part(
    stale: list[str], declared: Mapping[str, Any], pipeline: Mapping[str, Any]
) -> dict[str, Any]:
    """pipeline.yaml with those entries only that the stale stages are made from.

    DVC wraps every value in an object; of two hundred rounds that takes longer than all else.
    """
    part = dict(pipeline)
    keys: dict[str, set[str]] = {}
    for name in stale:
        group, _, key = name.partition("@")
        match = _COLLECTION.fullmatch(str(declared["stages"][group].get("foreach", "")))
        if match and "." not in match[1]:
            keys.setdefault(match[1], set()).add(key)
    for section in keys:
        part[section] = {k: v for k, v in pipeline[section].items() if k in keys[section]}
    return part


def _resolve_in(context: Mapping[str, Any], stale: list[str], engine: Engine) -> dict[str, Any]:
    from dvc.dvcfile import ProjectFile
    from dvc.parsing import DataResolver
    from dvc.parsing.context import Context, Meta

    repo = engine.repo
    contents = dict(ProjectFile(repo, posixpath.join(repo.root_dir, "dvc.yaml")).contents)
    contents.pop("vars", None)
    resolver = DataResolver(repo, repo.root_dir, contents)
    if resolver.context:  # of a file params.yaml, which DVC reads unasked
        raise Unusual("params.yaml")
    resolver.context.merge_update(Context(context, meta=Meta(source=PIPELINE, local=False)))
    found = {}
    for name in stale:
        body = resolver.resolve_one(name)[name]
        used = resolver.tracked_vars.get(name, {})
        if used.keys() - {PIPELINE}:
            raise Unusual(f"{name} uses {', '.join(used)}")
        found[name] = {**_plain(name, body), "uses": dict(used.get(PIPELINE, {}))}
    return found


def _plain(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    if body.keys() - _KEYS or not isinstance(body.get("cmd"), str) or not body.get("deps"):
        raise Unusual(name)
    deps = [_path(dep) for dep in body["deps"]]
    outs = dict(
        _output(item)
        for section in ("outs", "metrics", "plots")
        for item in body.get(section) or []
    )
    declared = sum(len(body.get(section) or []) for section in ("outs", "metrics", "plots"))
    if len({*deps, *outs}) != len(deps) + declared:
        raise Unusual(f"{name} names a path twice")
    return {"cmd": body["cmd"], "deps": deps, "params": _params(body), "outs": outs}


def _params(body: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for item in body.get("params") or []:
        if not isinstance(item, dict):
            raise Unusual("a parameter of params.yaml")
        for path, keys in item.items():
            if not keys or not str(path).endswith((".yaml", ".yml")):
                raise Unusual(f"parameters of {path}")
            found.setdefault(_path(path), []).extend(keys)
    return {path: list(dict.fromkeys(keys)) for path, keys in found.items()}


def _output(item: Any) -> tuple[str, bool]:
    if isinstance(item, str):
        return _path(item), True
    ((path, options),) = item.items()
    if options.keys() - _OUTPUT_KEYS:
        raise Unusual(f"output {path}")
    return _path(path), bool(options.get("cache", True))


def _path(path: Any) -> str:
    plain = isinstance(path, str) and "://" not in path and not path.startswith(("/", "~", ".."))
    if not plain or posixpath.normpath(path) != path:
        raise Unusual(f"path {path}")
    return str(path)


def check_only_dvc_yaml(inputs: Iterable[str], folder: str) -> None:
    """Raises Unusual if a file of DVC's beside these inputs may be what makes them."""
    import os

    places = {""}
    for path in inputs:
        while path := posixpath.dirname(path):
            places.add(path)
    for place in places:
        try:
            listed = os.listdir(os.path.join(folder, place))
        except OSError:
            continue
        if any(f.endswith(".dvc") and f != ".dvc" for f in listed) or (
            place and "dvc.yaml" in listed
        ):
            raise Unusual(f"files of DVC in {place or '.'}")
