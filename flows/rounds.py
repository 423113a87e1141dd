"""Rounds as data: blocks of `pipeline.yaml` that are added, compared and removed as text.

What was written before stays as it was, byte for byte. A new round is the block of an earlier one and
its candidates' blocks, comments included, with the names moved on: r2 starts where r1 ended. The
result is read back and checked before the file is touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import editing
from flows.overrides import parse_overrides as parse_overrides
from flows.overrides import placed, suggestion
from rlhf import champion, config, yaml12
from rlhf.config import ConfigError, Pipeline
from rlhf.errors import BadInput
from rlhf.optimise.imported import check_imported

_FILE = "pipeline.yaml"
_UNDECIDED = ("stopped", "awaiting")
_PARTS = ("advantage", "loss", "aggregate", "truncated")  # may be written as a name alone


# --- adding --------------------------------------------------------------------------------------


def append_round(
    path: str | Path,
    name: str,
    *,
    template: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    add: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
) -> bool:
    """Append a round made from an earlier one; returns whether the file changed.

    The round starts from the last declared one, or after a rollback from the round that was gone back to.

    Args:
        path: the pipeline file.
        name: like `r2`. A round of this name with the same content is left as it is.
        template: the round to copy; None: the last one.
        overrides: values by path, as `parse_overrides` gives them: `candidates.ppo.kl.coef` or
            `candidates.r2-ppo.kl.coef` of a candidate, `rounds.r2.init` or `init` of the round.
        add: further candidates by name, each with the candidate that it is a copy of: {grpo2: grpo}.
        drop: candidates of the template that the round is to be without.

    Raises:
        BadInput: the name is not a round's or is taken by a round of other content, the round that it starts
            from is stopped or awaits a decision, or the file cannot be extended safely.
        ConfigError: what is wrong with the overrides, or with the round that they would make.
    """
    path = Path(path)
    raw = config.read_yaml(path)
    pipeline = config.parse(raw, str(path))
    wish = _Wish(name, template, overrides or {}, add or {}, drop)
    text = path.read_text(encoding="utf-8")
    if name in raw["rounds"]:
        if template or overrides or add or drop:
            _check_same(text, raw, wish, path)
        return False
    if name == "r0" or not config.ROUND_NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} is not a round",
            where=str(path),
            rule="a round is named r1, r2, ... or r2_variant, without leading zeros "
            "(r0 is the fine-tuned start)",
            mend=f"use {next_name(raw['rounds'])}",
        )
    block, problems = _block(text, raw, wish, start_of_next(pipeline, path.parent))
    return _append(path, raw, pipeline, name, block, problems)


def restore_round(path: str | Path, name: str, block: str) -> None:
    """Append a round and its candidates as a document of them alone has them.

    Raises BadInput as `append_round` does.
    """
    path = Path(path)
    raw = config.read_yaml(path)
    if name in raw["rounds"]:
        raise BadInput(
            f"{name} is there already",
            where=str(path),
            rule="what is there is not replaced",
            mend=f"python -m flows round remove {name} first",
        )
    _append(path, raw, config.parse(raw, str(path)), name, block, [])


def _append(
    path: Path,
    raw: Mapping[str, Any],
    pipeline: Pipeline,
    name: str,
    block: str,
    problems: Sequence[str],
) -> bool:
    found = yaml12.load(block)
    new = _check_new(pipeline, _joined(raw, found), problems, path, name)
    holder = awaited(new, path.parent, name)
    if holder is not None:
        raise undecided(path.parent, holder)
    doc = editing.Document(block)
    lines = {section: {key: doc.entry(section, key) for key in found[section]} for section in found}
    text = path.read_text(encoding="utf-8")
    return editing.save(path, editing.append_entries(text, lines))


@dataclass(frozen=True)
class _Wish:
    """What a round is to be."""

    name: str
    template: str | None
    overrides: Mapping[str, Any]
    add: Mapping[str, str]
    drop: Sequence[str]


def _check_same(text: str, raw: Mapping[str, Any], wish: _Wish, path: Path) -> None:
    """A round that is there already has what is wished of it."""
    name, start = wish.name, raw["rounds"][wish.name]["from"]
    present = [
        short for short in own_candidates(raw, name) if short in wish.add and wish.template is None
    ]
    absent = [
        short for short in wish.drop if short not in own_candidates(raw, wish.template or name)
    ]
    add = {short: source for short, source in wish.add.items() if short not in present}
    drop = [short for short in wish.drop if short not in absent]
    again = _Wish(name, wish.template or name, wish.overrides, add, drop)
    block, problems = _block(text, raw, again, start)
    asked = yaml12.load(block)
    asked["rounds"][name]["decision"] = raw["rounds"][name]["decision"]
    others = {key: body for key, body in raw["candidates"].items() if body["round"] != name}
    new = _joined({**raw, "candidates": others}, asked)
    here = config.parse(raw)
    there = _check_new(here, new, problems, path, name)
    differing = [
        f"{key} is {shown(mine)}, not {shown(its)}"
        for key, mine, its in differences(block_of(here, name), block_of(there, name))
    ]
    if differing:
        raise BadInput(
            "\n  ".join([f"{name} is there already with other content:", *differing]),
            where=str(path),
            rule="a round keeps the settings that it was added with",
            mend=f"add {next_name(raw['rounds'])} instead, or edit pipeline.yaml",
        )


def _check_new(
    old: Pipeline, raw: Mapping[str, Any], problems: Sequence[str], path: Path, name: str
) -> Pipeline:
    """The file with the round, which is valid; everything that is wrong is told at once."""
    new, told = old, list(problems)
    try:
        new = config.parse(raw, str(path))
    except ConfigError as error:
        told += error.problems
    for check in (lambda p: config.check_files(p, path.parent), check_imported):
        known = _problems(check, old)
        told += [line for line in _problems(check, new) if line not in known]
    if told:
        raise ConfigError(f"{path.name} with {name}", told)
    return new


def _problems(check: Any, pipeline: Pipeline) -> list[str]:
    try:
        check(pipeline)
    except ConfigError as error:
        return error.problems
    return []


# --- a round's block as a document of its own ------------------------------------------------------


def _block(text: str, raw: Mapping[str, Any], wish: _Wish, start: str) -> tuple[str, list[str]]:
    """A document of the new round and its candidates alone, and what is wrong with the wish."""
    template = wish.template or list(raw["rounds"])[-1]
    if template not in raw["rounds"]:
        raise BadInput(
            f"no round {template} to copy",
            where=_FILE,
            rule="a template is a declared round",
            mend=suggestion(template, raw["rounds"]),
        )
    copies, problems = _copies(raw, template, wish)
    places, misplaced = placed(wish.overrides, wish.name, copies, raw)
    for path, keys in places.items():
        if keys[2:] == ["from"] and isinstance(wish.overrides[path], str):
            start = wish.overrides[path]
    block = _moved_on(_copied(text, raw, template, wish.name, copies), template, wish.name, start)
    block = editing.Document(block).readable()
    problems += misplaced
    for path, keys in places.items():
        try:
            block = _overridden(block, keys, wish.overrides[path])
        except BadInput as error:
            problems.append(f"{path}: {str(error).removeprefix(f'{_FILE}: ').splitlines()[0]}")
    return block, problems


def _copies(raw: Mapping[str, Any], template: str, wish: _Wish) -> tuple[dict[str, str], list[str]]:
    """The new round's candidates, each with the template's that it is a copy of; names without rounds."""
    old = own_candidates(raw, template)
    problems = [
        f"drop {short}: no such candidate in {template}; {suggestion(short, old)}"
        for short in wish.drop
        if short not in old
    ]
    copies = {short: short for short in old if short not in wish.drop}
    for short, source in wish.add.items():
        if source not in old:
            mend = suggestion(source, old)
            problems.append(f"add {short}={source}: no such candidate in {template}; {mend}")
        elif short in copies:
            problems.append(f"add {short}={source}: {short} is there already; name it otherwise")
        else:
            copies[short] = source
    if not copies:
        problems.append(f"drop: {wish.name} would have no candidate; keep one")
    return copies or {short: short for short in old}, problems


def _copied(
    text: str, raw: Mapping[str, Any], template: str, name: str, copies: Mapping[str, str]
) -> str:
    """The template's blocks under the new names."""
    doc = editing.Document(text)
    old = own_candidates(raw, template)
    entries = [
        _renamed(doc.entry("candidates", old[source]), old[source], f"{name}-{short}")
        for short, source in copies.items()
    ]
    head = _renamed(doc.entry("rounds", template), template, name)
    return "".join(["rounds:\n", head, "candidates:\n", *entries])


def _renamed(entry: str, old: str, new: str) -> str:
    """The lines of an entry under another key."""
    return re.sub(rf"^(\s*[\"']?){re.escape(old)}", lambda match: match[1] + new, entry, count=1)


def _moved_on(block: str, template: str, name: str, start: str) -> str:
    """The block with the names of rounds in its values moved on, and comments on the template dropped."""
    raw = yaml12.load(block)
    body = raw["rounds"][name]
    moved = {body["from"]: start, template: name}
    new = {
        ("rounds", name, "from"): start,
        ("rounds", name, "sample_from"): moved.get(body["sample_from"], body["sample_from"]),
    }
    for key, candidate in raw["candidates"].items():
        source, slash, kind = candidate["learns_from"].partition("/")
        new["candidates", key, "round"] = name
        new["candidates", key, "from"] = start
        new["candidates", key, "learns_from"] = moved.get(source, source) + slash + kind
    if name != template:
        new["rounds", name, "decision"] = None
        block = _honest(block, {template, body["from"]} - {"r0"})
    for keys, value in new.items():
        block = editing.set_value(block, keys, value, align=True)
    return block


def _honest(block: str, names: set[str]) -> str:
    """A block without the comments that name these rounds: they would be read as about another round.

    Of lines that are comments only, the whole paragraph goes.
    """
    mention = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, sorted(names)))})(?!\w)")
    spans: list[tuple[int, int]] = []
    paragraph: list[tuple[int, int]] = []
    for start, end in editing.Document(block).comments():
        line = block.rfind("\n", 0, start) + 1
        before = block[line:start]
        if before.strip():
            kept = line + len(before.rstrip())
            spans += [(kept, end)] if mention.search(block, start, end) else []
            continue
        if paragraph and paragraph[-1][1] != line:
            spans += _if_any(mention, block, paragraph)
            paragraph = []
        paragraph.append((line, end + 1))
    return editing.without_spans(block, spans + _if_any(mention, block, paragraph))


def _if_any(
    mention: re.Pattern[str], text: str, spans: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    return spans if any(mention.search(text, *span) for span in spans) else []


def _overridden(block: str, keys: list[str], value: Any) -> str:
    """The block with one value set; a part that is written as its name alone is spelled out for that."""
    here: Any = yaml12.load(block)
    for depth, key in enumerate(keys):
        part = keys[depth - 1] in _PARTS or (depth > 1 and keys[depth - 2] == "losses")
        if isinstance(here, str) and part:
            for inner in reversed(keys[depth:]):
                value = {inner: value}
            return editing.set_value(block, keys[:depth], {"kind": here, **value}, align=True)
        here = here.get(key) if isinstance(here, dict) else _item(here, key)
    return editing.set_value(block, keys, value, align=True)


def _item(value: Any, key: str) -> Any:
    is_there = isinstance(value, list) and key.isdigit() and int(key) < len(value)
    return value[int(key)] if is_there else None


# --- which round comes next ------------------------------------------------------------------------


def next_round(pipeline: Pipeline, folder: str | Path = ".") -> tuple[str, bool]:
    """The round to run now, and whether it is still to be appended.

    The last declared round goes on until it has been decided; then comes a new one.

    Raises:
        BadInput: that round would start from one, or come after one, that is stopped or awaits a decision.
    """
    holder = awaited(pipeline, folder)
    if holder is not None:
        raise undecided(folder, holder)
    last = list(pipeline.rounds)[-1]
    if champion.status(folder, last) == "unrun" or is_decided_anew(pipeline, folder, last):
        return last, False
    return next_name(pipeline.rounds), True


def awaited(pipeline: Pipeline, folder: str | Path = ".", name: str | None = None) -> str | None:
    """The stopped or awaiting round that a person must decide before `name` may run for the first time.

    Args:
        pipeline: declares the rounds.
        folder: the project's folder.
        name: a declared round; None: the last one, or the next if that has been decided.
    """
    last = list(pipeline.rounds)[-1]
    if champion.status(folder, name or last) == "unrun":
        start = pipeline.rounds[name or last].from_
    elif name is not None or is_decided_anew(pipeline, folder, last):
        return None
    elif champion.status(folder, last) in _UNDECIDED:
        return last
    else:
        start = start_of_next(pipeline, folder)
    while start in pipeline.rounds:
        status = _standing(pipeline, folder, start)
        if status != "unrun":
            return start if status in _UNDECIDED else None
        start = pipeline.rounds[start].from_
    return None


def undecided(folder: str | Path, name: str) -> BadInput:
    """That no round starts from this one before a person decides."""
    status = champion.status(folder, name)
    words = (
        "a person's decision is awaited on" if status == "awaiting" else "the loop is stopped at"
    )
    return BadInput(
        f"{words} {name}",
        where=f"runs/{name}/metrics/decision.json",
        rule="no further round starts before a person decides",
        mend=f'python -m flows decide {name} keep --because "..." (or promote)',
    )


def _standing(pipeline: Pipeline, folder: str | Path, name: str) -> champion.Status:
    """What a round came to, or will once its gate has heard what a person said since."""
    status = champion.status(folder, name)
    word = pipeline.rounds[name].decision
    if status == "unrun" or not is_decided_anew(pipeline, folder, name):
        return status
    return "stopped" if word is not None and word.choice == "stop" else "unrun"


def is_decided_anew(pipeline: Pipeline, folder: str | Path, name: str) -> bool:
    """Whether a person has decided the round since its gate ran."""
    declared = pipeline.rounds[name].decision
    decision = champion.read_decision(folder, name)
    heard = decision.get("decision") if decision is not None else None
    return (None if declared is None else declared.model_dump()) != heard


def next_name(names: Sequence[str] | Mapping[str, Any]) -> str:
    """One number above the highest."""
    numbers = [int(re.match(r"r(\d+)", name)[1]) for name in names]  # type: ignore[index]
    return f"r{max(numbers) + 1}"


def start_of_next(pipeline: Pipeline, folder: str | Path = ".") -> str:
    """The round that a new one starts from: the last one, or the one that a rollback went back to.

    A rollback counts until the last declared round comes from its target, or another policy is promoted.
    """
    names = ["r0", *pipeline.rounds]
    last, rollback = names[-1], pipeline.rollback
    if rollback is None or champion.champion(pipeline, folder).kind != "rollback":
        return last
    name = last
    while names.index(name) > names.index(rollback.after):
        name = pipeline.rounds[name].from_
    return last if name == rollback.to else rollback.to


# --- looking ---------------------------------------------------------------------------------------

ABSENT = "(absent)"
"""Stands for a value that one of two rounds does not have."""
_HERE = "(present)"


def _is_candidate(place: str, value: Any) -> bool:
    return isinstance(value, Mapping) and re.fullmatch(r"candidates\.[^.]+", place) is not None


def shown(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    return value if value in (ABSENT, _HERE) else editing.scalar(value)


def differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path and both values of every leaf in which two structures differ."""
    pairs: Iterator[tuple[str, Any, Any]]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = ((k, one.get(k, ABSENT), other.get(k, ABSENT)) for k in {**one, **other})
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = ((str(i), *both) for i, both in enumerate(zip(one, other, strict=True)))
    else:
        if not editing.same(one, other):
            here, there = (_HERE if _is_candidate(place, side) else side for side in (one, other))
            yield place, here, there
        return
    for key, mine, its in pairs:
        yield from differences(mine, its, f"{place}.{key}" if place else str(key))


def block_of(pipeline: Pipeline, name: str) -> dict[str, Any]:
    """A round and its candidates in full, presets and defaults filled in. Raises BadInput if it is not declared."""
    check_declared(pipeline.rounds, name)
    own = pipeline.candidates_of(name)
    return {
        "rounds": {name: pipeline.rounds[name].model_dump(by_alias=True)},
        "candidates": {key: body.model_dump(by_alias=True) for key, body in own.items()},
    }


def compare(pipeline: Pipeline, one: str, other: str) -> list[tuple[str, Any, Any]]:
    """Path and both values of every setting in which two rounds differ; candidates are matched by name.

    That a round has its own name and starts from the one before is no difference.
    """
    return list(differences(_nameless(pipeline, one), _nameless(pipeline, other)))


def _nameless(pipeline: Pipeline, name: str) -> dict[str, Any]:
    block = block_of(pipeline, name)
    body = block["rounds"][name]
    names = {body["from"]: "(its start)", name: "(itself)"}
    body["sample_from"] = names.get(body["sample_from"], body["sample_from"])
    decision = body["decision"]
    if decision is not None and decision["candidate"] is not None:
        decision["candidate"] = decision["candidate"].removeprefix(f"{name}-")
    candidates = {}
    for key, candidate in block["candidates"].items():
        source, slash, kind = candidate["learns_from"].partition("/")
        candidate["learns_from"] = names.get(source, source) + slash + kind
        own = {k: v for k, v in candidate.items() if k not in ("round", "from")}
        candidates[key.removeprefix(f"{name}-")] = own
    return {**{k: v for k, v in body.items() if k != "from"}, "candidates": candidates}


def listed(pipeline: Pipeline, folder: str | Path = ".") -> list[dict[str, Any]]:
    """One row for each round: where it starts, its candidates, what it came to."""
    best = champion.champion(pipeline, folder)
    return [
        {
            "round": name,
            "from": declared.from_,
            "candidates": [k.removeprefix(f"{name}-") for k in pipeline.candidates_of(name)],
            "status": champion.status(folder, name),
            "champion": name == best.round,
        }
        for name, declared in pipeline.rounds.items()
    ]


def check_declared(rounds: Mapping[str, Any], name: str) -> None:
    if name not in rounds:
        raise BadInput(
            f"no round {name}",
            where=_FILE,
            rule="a round is declared under rounds:",
            mend=suggestion(name, rounds),
        )


def own_candidates(raw: Mapping[str, Any], name: str) -> dict[str, str]:
    """A round's candidates: what the file calls them, by their names without the round."""
    return {
        key.removeprefix(f"{name}-"): key
        for key, body in raw["candidates"].items()
        if body["round"] == name
    }


def _joined(raw: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """The file with a round's block in it."""
    return {**raw, **{section: {**raw[section], **block[section]} for section in block}}
