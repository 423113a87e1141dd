"""Adds a round to `pipeline.yaml` as text: what was written before stays as it was, byte for byte.

The new round is the last one's block and its candidates' blocks, comments included, with the names
moved on: r2 starts where r1 ended. The result is read back and checked before the file is touched.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from rlhf import config
from rlhf.errors import BadInput

_NAMES = ("round", "from", "sample_from", "learns_from")


def append_round(path: str | Path, name: str) -> bool:
    """Append a round made from the last one; returns whether the file changed.

    Args:
        path: the pipeline file.
        name: like `r2`. A round of this name that is already there is left as it is.

    Raises:
        BadInput: the name is not a round's, or the file cannot be extended safely.
    """
    path = Path(path)
    raw = config.read_yaml(path)
    config.parse(raw, str(path))
    if name in raw["rounds"]:
        return False
    if name == "r0" or not config.ROUND_NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} is not a round",
            where=str(path),
            rule="a round is named r1, r2, ... or r2_variant (r0 is the fine-tuned start)",
            mend=f"use {_next_name(list(raw['rounds']))}",
        )
    text = path.read_text(encoding="utf-8")
    extended = _extend(text, raw, name)
    _check(raw, extended, name, path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(extended, encoding="utf-8")
    os.replace(temporary, path)
    return True


def _next_name(names: list[str]) -> str:
    numbers = [int(re.match(r"r(\d+)", name)[1]) for name in names]  # type: ignore[index]
    return f"r{max(numbers) + 1}"


def _extend(text: str, raw: dict[str, Any], name: str) -> str:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    last = list(raw["rounds"])[-1]
    older = raw["rounds"][last]["from"]
    candidates = [key for key, body in raw["candidates"].items() if body["round"] == last]
    new_candidates = [
        line
        for key in candidates
        for line in _renamed(_block(lines, "candidates", key), last, older, name)
    ]
    new_round = _renamed(_block(lines, "rounds", last), last, older, name)
    for section, block in sorted(
        (("candidates", new_candidates), ("rounds", new_round)),
        key=lambda item: -_section(lines, item[0])[0],
    ):  # from the bottom up, so that line numbers above stay true
        end = _section(lines, section)[1]
        lines[end:end] = block
    return "".join(lines)


def _section(lines: list[str], name: str) -> tuple[int, int]:
    """Numbers of the first line after `name:` and of the first line past its last entry."""
    heads = [i for i, line in enumerate(lines) if re.match(rf"{name}:\s*(#.*)?$", line)]
    if len(heads) != 1:
        raise BadInput(
            f"found no line that is only `{name}:`",
            where="pipeline.yaml",
            rule="rounds and candidates are written in block style, one key a line",
            mend="write the section out, or add the round by hand",
        )
    start = heads[0] + 1
    end = start
    while end < len(lines) and not re.match(r"[^\s#]", lines[end]):
        end += 1
    while end > start and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1  # blank lines and comments that belong to what follows
    return start, end


def _block(lines: list[str], section: str, key: str) -> list[str]:
    """The lines of one entry of a section, with its own comments."""
    start, end = _section(lines, section)
    first = next(
        (i for i in range(start, end) if re.match(rf"\s+[\"']?{re.escape(key)}[\"']?:", lines[i])),
        None,
    )
    if first is None:
        raise BadInput(f"found no block {section}.{key}", where="pipeline.yaml")
    indent = _indent(lines[first])
    last = first + 1
    while last < end and (not lines[last].strip() or _indent(lines[last]) > indent):
        last += 1
    while not lines[last - 1].strip():
        last -= 1
    return lines[first:last]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _renamed(block: list[str], last: str, older: str, name: str) -> list[str]:
    """A block with its names moved on.

    `last` becomes `name`, and what it started from becomes `last`.
    """
    moved = {last: name, older: last}

    def value(match: re.Match[str]) -> str:
        return match[1] + moved.get(match[2], match[2]) + match[3]

    keys = "|".join(_NAMES)
    fields = re.compile(rf"^(\s+(?:{keys}):\s+[\"']?)(r[0-9]+(?:_[a-z0-9]+)*)(.*)$", re.S)
    head = re.compile(rf"^(\s+[\"']?){re.escape(last)}(?=[-:\"'])")
    return [
        head.sub(lambda match: match[1] + name, line) if i == 0 else fields.sub(value, line)
        for i, line in enumerate(block)
    ]


def _check(old: dict[str, Any], text: str, name: str, path: Path) -> None:
    """Nothing written before has changed, the new round is whole, and YAML 1.1 readers agree."""
    import yaml
    from ruamel.yaml import YAML

    new = YAML(typ="safe", pure=True).load(text)
    added_rounds = {key: body for key, body in new["rounds"].items() if key == name}
    added = {key: body for key, body in new["candidates"].items() if body["round"] == name}
    without = {
        **new,
        "rounds": {key: body for key, body in new["rounds"].items() if key != name},
        "candidates": {key: body for key, body in new["candidates"].items() if key not in added},
    }
    if without != old or not added or len(added_rounds) != 1:
        raise BadInput(
            f"{name} could not be added without changing what is there",
            where=str(path),
            mend="add it by hand, in block style",
        )
    older = yaml.safe_load(text)
    if older["rounds"][name] != added_rounds[name] or any(
        older["candidates"][key] != body for key, body in added.items()
    ):
        raise BadInput(
            f"the settings of {name} read differently in YAML 1.1 and 1.2",
            where=str(path),
            mend="write floats as 1.0e-5, and quote words like on, off, yes, no",
        )
    config.parse(new, str(path))
