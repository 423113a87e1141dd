"""Edits of `pipeline.yaml` as text: what is not changed keeps every byte, comments and the spelling of numbers too.

A parser says where each value stands; the new text is spliced in there. Every edit is read back: the
intended change is there, and nothing else differs. Paths are dotted: `rounds.r3.decision`,
`candidates.r3-dpo.losses.0.beta`.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import yaml

from rlhf import artifacts, config, yaml12
from rlhf.errors import BadInput

_FILE = "pipeline.yaml"
Path_ = str | Sequence[str]
_WIDEST_INLINE = 72  # columns of a new mapping that is written as {a: 1, b: 2}


# --- what other modules use ----------------------------------------------------------------------


def set_value(text: str, path: Path_, value: Any, *, align: bool = False) -> str:
    """The text with one value replaced or added; a value that is already there changes nothing.

    Of a mapping only the keys that differ are touched. A comment at the end of the line stays, with `align` in
    its column. A key that is missing is added behind the others of its mapping, at the top level
    at the end of the file.

    Raises:
        BadInput: the path leads through something that is no mapping or list, or the text has anchors.
    """
    keys, value = _keys(path), _plain_python(value)
    old = yaml12.load(text)
    new = Document(text, align=align).changed(keys, old, value)
    _check(new, _with(old, keys, value), f"{'.'.join(keys)} could not be set")
    return new


def remove(text: str, path: Path_) -> str:
    """The text without a key, its value and the comment lines right above it."""
    keys = _keys(path)
    old = yaml12.load(text)
    new = Document(text).without(keys[:-1], [keys[-1]])
    _check(new, _without(old, keys[:-1], [keys[-1]]), f"{'.'.join(keys)} could not be removed")
    return new


def remove_entry(text: str, section: str, *names: str) -> str:
    """The text without some entries of a section, such as the candidates of a round."""
    old = yaml12.load(text)
    new = Document(text).without([section], names)
    _check(new, _without(old, [section], names), f"{', '.join(names)} could not be removed")
    return new


def append_entry(text: str, section: str, key: str, block: str | Mapping[str, Any]) -> str:
    """The text with an entry at the end of a section in block style.

    Args:
        text: of the file.
        section: `rounds` or `candidates`.
        key: the new entry's name.
        block: its settings, or the lines of the whole entry, its key included, at any indentation.
    """
    lines = block if isinstance(block, str) else _block({key: _plain_python(block)}, 0)
    return append_entries(text, {section: {key: lines}})


def append_entries(text: str, added: Mapping[str, Mapping[str, str]]) -> str:
    """The text with entries at the ends of sections: the lines of each by section and key."""
    old = yaml12.load(text)
    expected = dict(old)
    for section, entries in added.items():
        bodies = yaml12.load("".join(_indented(lines, 0) for lines in entries.values()))
        present = old.get(section) or {}
        if list(bodies) != list(entries) or bodies.keys() & present.keys():
            raise BadInput(f"{section}: {', '.join(entries)}: not new entries", where=_FILE)
        expected[section] = {**present, **bodies}
    new = Document(text).appended(added)
    _check(new, expected, f"{', '.join(k for e in added.values() for k in e)} could not be added")
    return new


def without_spans(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """The text without the characters between some places."""
    for start, end in sorted(spans, reverse=True):
        text = text[:start] + text[end:]
    return text


def save(path: str | Path, text: str) -> bool:
    """Check the text as a whole and put it in the file's place at once; returns whether the file changed.

    Raises:
        ConfigError: the text is no valid pipeline; all problems are named.
        BadInput: YAML 1.1 readers would read a new value otherwise, or the file's line ends are mixed.
    """
    path = Path(os.path.realpath(path))
    text = text.replace("\r\n", "\n")
    config.parse(yaml12.load(text), path.name)
    raw = path.read_bytes() if path.is_file() else b""
    _check_both_readings(raw.decode("utf-8"), text)
    content = text.encode("utf-8")
    returns = raw.count(b"\r\n")
    if returns and returns != raw.count(b"\n"):
        raise BadInput(
            "some lines end in CR LF, others in LF",
            where=path.name,
            rule="an edit keeps every byte of other lines",
            mend="give it one kind of line end: dos2unix, or your editor",
        )
    if returns:
        content = content.replace(b"\n", b"\r\n")
    if content == raw:
        return False
    for left in path.parent.glob(f".{path.name}.*.new"):  # of a process that was killed
        if not psutil.pid_exists(int(left.name.split(".")[-2])):
            left.unlink(missing_ok=True)
    with artifacts.temporary_file(path) as new:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if raw:
            new.chmod(path.stat().st_mode & 0o7777)
    return True


def disagreements(text: str) -> Counter[str]:
    """Scalars without quotes that YAML 1.1 and 1.2 read differently, and how often each is there."""
    events = yaml.parse(text, Loader=_Loader)
    return Counter(
        event.value
        for event in events
        if type(event) is yaml.ScalarEvent and not event.style and _disagree(event.value)
    )


# --- where things stand ----------------------------------------------------------------------------

_Loader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclass(frozen=True)
class _Splice:
    """Put `new` in the place of the characters from `start` to `end`."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class _Place:
    """A value in the text: its node, and how it hangs in its parent."""

    node: yaml.Node
    key: yaml.Node | None
    indent: int
    inside_flow: bool

    @property
    def flow(self) -> bool:
        """Whether the value's own parts are written between brackets."""
        return self.inside_flow or bool(getattr(self.node, "flow_style", False))

    def items(self) -> dict[str, _Place]:
        """The places of the values in a mapping or a list, by key or number."""
        if isinstance(self.node, yaml.SequenceNode):
            return {
                str(i): _Place(item, None, item.start_mark.column, self.flow)
                for i, item in enumerate(self.node.value)
            }
        if not isinstance(self.node, yaml.MappingNode):
            return {}
        return {
            key.value: _Place(value, key, key.start_mark.column, self.flow)
            for key, value in self.node.value
        }


class Document:
    """A document, and edits of it."""

    def __init__(self, text: str, *, align: bool = False) -> None:
        self.align = align
        self.text = text if text.endswith("\n") else text + "\n"
        if text.startswith("\ufeff"):
            raise BadInput(
                "begins with a byte-order mark", where=_FILE, mend="save it as UTF-8 without one"
            )
        try:
            _refuse_anchors(self.text)
            root = yaml.compose(self.text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise BadInput(
                f"not readable as YAML: {' '.join(str(error).split())}", where=_FILE
            ) from None
        if not isinstance(root, yaml.MappingNode) or root.flow_style:
            raise _not_block("the file")
        self.root = _Place(root, None, 0, False)

    def find(self, keys: Sequence[str]) -> tuple[_Place, int]:
        """The deepest place on the way that is there, and how many of the keys lead to it."""
        place = self.root
        for depth, key in enumerate(keys):
            items = place.items()
            if key not in items:
                return place, depth
            place = items[key]
        return place, len(keys)

    def changed(self, keys: Sequence[str], old: Any, value: Any) -> str:
        """The text with the value at a path."""
        place, depth = self.find(keys)
        for key in keys[:depth]:
            old = old[int(key)] if isinstance(old, list) else old.get(key)
        for key in reversed(keys[depth:]):
            value = {key: value}
        if depth < len(keys):
            if isinstance(place.node, yaml.MappingNode):
                return self._spliced([self._added(place, value)])
            if old is not None:
                at = ".".join(keys[:depth])
                kind = "a list" if isinstance(old, list) else f"{old!r}"
                raise BadInput(f"{at} is {kind}; it has no {keys[depth]}", where=_FILE)
        return self._spliced(self._changes(place, old, value))

    def without(self, keys: Sequence[str], names: Sequence[str]) -> str:
        """The text without some entries of the mapping at a path."""
        place, depth = self.find(keys)
        items = place.items()
        absent = [name for name in names if name not in items]
        if depth < len(keys) or absent or not isinstance(place.node, yaml.MappingNode):
            raise BadInput(f"{'.'.join([*keys, *absent])}: not there", where=_FILE)
        if len(items) == len(names):
            return self._spliced(self._replaced(place, "{}"))
        return self._spliced(self._removals(place, names))

    def appended(self, added: Mapping[str, Mapping[str, str]]) -> str:
        """The text with entries, as lines, at the ends of sections."""
        splices = []
        for section, entries in added.items():
            place, depth = self.find([section])
            if not depth or place.flow or not isinstance(place.node, yaml.MappingNode):
                raise _not_block(section)
            places = list(place.items().values())
            at = self._after_comments(self._line_after(self._end(places[-1].node)))
            apart = "\n" if len(places) > 1 and self._blank_above(_start(places[-1])) else ""
            new = "".join(apart + _indented(lines, places[0].indent) for lines in entries.values())
            splices.append(_Splice(at, at, new))
        return self._spliced(splices)

    def entry(self, section: str, key: str) -> str:
        """The lines of one entry of a section in block style, its key and comments included."""
        place, depth = self.find([section, key])
        if depth < 2:
            raise BadInput(f"{section}.{key}: not there", where=_FILE)
        if place.inside_flow:
            raise _not_block(section)
        return self.text[self._line_of(_start(place)) : self._line_after(self._end(place.node))]

    def comments(self) -> list[tuple[int, int]]:
        """Where comments start and end, in order."""
        texts = iter([*self._scalars(self.root.node), (len(self.text), len(self.text))])
        start, end = next(texts)
        found: list[tuple[int, int]] = []
        for match in re.finditer(r"(?:^|(?<=[ \t]))#", self.text, re.M):
            at = match.start()
            while end <= at:
                start, end = next(texts)
            if at < start and (not found or found[-1][1] < at):
                found.append((at, self.text.index("\n", at)))
        return found

    def readable(self) -> str:
        """The text with scalars rewritten that YAML 1.1 would read otherwise: 1e-5, yes, 010."""
        return self._spliced(
            [
                _Splice(start, end, scalar(_plain_python(yaml12.scalar(written))))
                for start, end in self._scalars(self.root.node, plain=True)
                if _disagree(written := self.text[start:end])
            ]
        )

    def _scalars(self, node: yaml.Node, plain: bool = False) -> Iterator[tuple[int, int]]:
        """Where keys and values start and end, in order; only those without quotes if `plain`."""
        if isinstance(node, yaml.ScalarNode):
            start, end = node.start_mark.index, self._end(node)
            if end > start and not (plain and node.style):
                yield start, end
            return
        for part in node.value:
            for inner in part if isinstance(part, tuple) else (part,):
                yield from self._scalars(inner, plain)

    # Each of these returns splices of the same text, which do not overlap.

    def _spliced(self, splices: list[_Splice]) -> str:
        text = self.text
        for splice in sorted(splices, key=lambda s: (-s.start, -s.end)):
            rest = text[splice.end :]
            if self.align and (gap := re.match(r" +(?=#)", rest)):
                grown = len(splice.new) - (splice.end - splice.start)
                rest = " " * max(1, gap.end() - grown) + rest[gap.end() :]
            text = text[: splice.start] + splice.new + rest
        return text

    def _changes(self, place: _Place, old: Any, new: Any) -> list[_Splice]:
        """Turn one value into another, touching what differs."""
        if same(old, new):
            return []
        items = place.items()
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) > 0:
            pairs = zip(items.values(), old, new, strict=True)
            return [splice for p, o, n in pairs for splice in self._changes(p, o, n)]
        if not (isinstance(old, dict) and isinstance(new, dict) and old.keys() & new.keys()):
            return self._rewritten(place, new)
        splices = [
            splice
            for key in old
            if key in new
            for splice in self._changes(items[key], old[key], new[key])
        ]
        gone = [key for key in old if key not in new]
        added = {key: value for key, value in new.items() if key not in old}
        if gone and (added or place.flow):  # splices would overlap: write the mapping anew
            return self._rewritten(place, new)
        splices += self._removals(place, gone) if gone else []
        return splices + ([self._added(place, added)] if added else [])

    def _rewritten(self, place: _Place, new: Any) -> list[_Splice]:
        inline = _inline(new)
        block_before = isinstance(place.node, yaml.CollectionNode) and not place.flow
        short = len(inline) <= _WIDEST_INLINE and not block_before
        flat = place.flow or place.key is None or not isinstance(new, dict) or not new
        if flat or (short and not any(isinstance(v, (dict, list)) for v in new.values())):
            return self._replaced(place, inline)
        assert place.key is not None
        return self._replaced(place, "", "\n" + _block(new, place.indent + 2).rstrip("\n"))

    def _replaced(self, place: _Place, inline: str, below: str = "") -> list[_Splice]:
        """Put a text on the line of the value's key, or lines below it; its comment stays."""
        start, end = place.node.start_mark.index, self._end(place.node)
        line_end = self.text.index("\n", place.key.end_mark.index if place.key else start)
        if place.key is None or (start < line_end and not below):
            empty = start == end  # `key:` alone
            return [_Splice(start, end, " " * empty + inline)]
        colon = self.text.index(":", place.key.end_mark.index) + 1
        if start < line_end:  # from the line of the key to lines below it
            last = self.text.index("\n", end)
            return [_Splice(colon, end, ""), _Splice(last, last, below)]
        return [
            _Splice(colon, colon, f" {inline}" if inline else ""),
            _Splice(line_end, self._line_after(end) - 1, below),
        ]

    def _added(self, place: _Place, new: dict[str, Any]) -> _Splice:
        """Add keys behind the last one of a mapping."""
        values = place.node.value
        if place.flow:
            inline = _inline(new)
            if not values:
                return _Splice(place.node.start_mark.index, place.node.end_mark.index, inline)
            end = self._end(values[-1][1])
            return _Splice(end, end, f", {inline[1:-1]}")
        at = self._line_after(self._end(values[-1][1]))
        if place is not self.root:
            return _Splice(at, at, _block(new, values[0][0].start_mark.column))
        if not re.search(r"^[^\s#]", self.text[at:], re.M):  # only comments follow
            at = len(self.text)
        return _Splice(at, at, "\n" + _block(new, 0))

    def _removals(self, place: _Place, names: Sequence[str]) -> list[_Splice]:
        if place.flow:
            return [self._out_of_brackets(place, names)]
        return [
            self._lines_of(p, first=i == 0)
            for i, (key, p) in enumerate(place.items().items())
            if key in names
        ]

    def _out_of_brackets(self, place: _Place, names: Sequence[str]) -> _Splice:
        """The inside of a mapping in brackets, without some keys."""
        kept = [
            self.text[key.start_mark.index : self._end(value)]
            for key, value in place.node.value
            if key.value not in names
        ]
        values = place.node.value
        start, end = values[0][0].start_mark.index, self._end(values[-1][1])
        return _Splice(start, end, ", ".join(kept))

    def _lines_of(self, place: _Place, *, first: bool) -> _Splice:
        """The lines of an entry, with the comment right above it and the blank lines before it."""
        start, end = self._line_of(_start(place)), self._line_after(self._end(place.node))
        if first:
            return _Splice(start, end, "")
        comment = re.compile(rf" {{{place.indent}}}#")
        while comment.match(self.text, above := self._line_of(start - 1)):
            start = above
        while not self.text[(above := self._line_of(start - 1)) : start].strip():
            start = above
        return _Splice(start, end, "")

    def _end(self, node: yaml.Node) -> int:
        """Where a value's own characters end; a parser's mark of a block is at what comes next."""
        if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
            last = node.value[-1]
            return self._end(last[1] if isinstance(last, tuple) else last)
        end = int(node.end_mark.index)
        if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
            end = len(self.text[:end].rstrip())
        return end

    def _line_of(self, index: int) -> int:
        return self.text.rfind("\n", 0, index) + 1

    def _line_after(self, index: int) -> int:
        return self.text.index("\n", index) + 1

    def _blank_above(self, index: int) -> bool:
        start = self._line_of(index)
        return not self.text[self._line_of(start - 1) : start].strip()

    def _after_comments(self, at: int) -> int:
        """Past comments that are indented, and so belong to what ends here."""
        match = re.compile(r"(?:[ \t]*\n)*[ \t]+#.*\n").match(self.text, at)
        return self._after_comments(match.end()) if match else at


def _start(place: _Place) -> int:
    assert place.key is not None
    return int(place.key.start_mark.index)


def _refuse_anchors(text: str) -> None:
    for event in yaml.parse(text, Loader=_Loader):
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            line = text.count("\n", 0, event.start_mark.index) + 1  # type: ignore[union-attr]
            raise BadInput(
                f"uses the anchor {anchor}",
                where=f"{_FILE}, line {line}",
                rule="rounds are written out in full; an anchor edited later would change history",
                mend="write the values out: python -m flows validate --resolved prints them",
            )


def _not_block(section: str) -> BadInput:
    return BadInput(
        f"{section} is not in block style",
        where=_FILE,
        rule="rounds and candidates are written in block style, one key a line",
        mend="write the section out: python -m flows validate --resolved prints it so",
    )


# --- values as text --------------------------------------------------------------------------------

_SAFE_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_YES_OR_NO = ("y", "Y", "n", "N")  # of YAML 1.1, though PyYAML takes them for text
_ANY_WORD = {*_YES_OR_NO, *["yes", "no", "on", "off", "true", "false", "null"]}
_ANY_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]+([eE][-+][0-9]+)?)?")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def scalar(value: Any) -> str:
    """A scalar that YAML 1.1 and 1.2 read as the same value: 1.0e-05, "2026-01-01", "yes"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadInput(f"{value} is not a number that can be written", where=_FILE)
        return config.written(value)
    plain = _SAFE_WORD.fullmatch(value) and value not in _YES_OR_NO
    if plain and _as_1_1(value) == value == yaml12.scalar(value):
        return str(value)
    quoted = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


def same(one: Any, other: Any) -> bool:
    """Equal in type too: 1, 1.0 and true are three values. The order of keys means nothing in YAML."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or one != one != other != other


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(k)}: {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return scalar(value)


def _block(mapping: Mapping[str, Any], indent: int) -> str:
    lines = []
    for key, value in mapping.items():
        head = " " * indent + scalar(key) + ":"
        inline = _inline(value)
        if not isinstance(value, dict) or not value or (indent and len(inline) <= _WIDEST_INLINE):
            lines.append(f"{head} {inline}\n")
        else:
            lines.append(f"{head}\n{_block(value, indent + 2)}")
    return "".join(lines)


def _indented(lines: str, indent: int) -> str:
    """Lines moved so that the first begins in this column; multi-line text moves along."""
    split = lines.rstrip("\n").split("\n")
    shift = indent - (len(split[0]) - len(split[0].lstrip(" ")))

    def moved(line: str) -> str:
        if not line.strip():
            return line
        return " " * shift + line if shift >= 0 else line[min(-shift, _spaces(line)) :]

    return "".join(f"{moved(line)}\n" for line in split)


def _spaces(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _plain_python(value: Any) -> Any:
    """Dicts with text keys, lists and scalars; a date becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain_python(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_python(inner) for inner in value]
    if isinstance(value, datetime.date):
        return value.isoformat()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BadInput(f"{value!r} cannot be written as YAML", where=_FILE)


@lru_cache(maxsize=1 << 14)
def _as_1_1(value: str) -> Any:
    try:
        return yaml.safe_load(f"- {value}\n")[0]
    except (yaml.YAMLError, ValueError, TypeError):
        return None


@lru_cache(maxsize=1 << 14)
def _disagree(value: str) -> bool:
    if _ANY_NUMBER.fullmatch(value):
        return False
    if _SAFE_WORD.fullmatch(value) and value.lower() not in _ANY_WORD:
        return False
    return value in _YES_OR_NO or not same(_as_1_1(value), yaml12.scalar(value))


# --- checks ----------------------------------------------------------------------------------------


def _keys(path: Path_) -> list[str]:
    keys = path.split(".") if isinstance(path, str) else [str(key) for key in path]
    if not all(keys):
        raise BadInput(f"{path!r} is no dotted path", where=_FILE, mend="write a.b.c")
    return keys


def _at(old: Any, keys: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """A copy in which the value at a path is changed; what is not on the path is shared."""
    if not keys:
        return change(old)
    if isinstance(old, list):
        new = list(old)
        new[int(keys[0])] = _at(old[int(keys[0])], keys[1:], change)
        return new
    mapping = old if isinstance(old, dict) else {}
    return {**mapping, keys[0]: _at(mapping.get(keys[0]), keys[1:], change)}


def _with(old: Any, keys: Sequence[str], value: Any) -> Any:
    return _at(old, keys, lambda _: value)


def _without(old: Any, keys: Sequence[str], names: Sequence[str]) -> Any:
    return _at(old, keys, lambda m: {k: v for k, v in m.items() if k not in names})


def _check(text: str, expected: Any, problem: str) -> None:
    """The text reads back as expected."""
    try:
        found = yaml12.load(text)
    except Exception as error:  # whatever a parser says of it, the edit went wrong
        found, problem = None, f"{problem}: {' '.join(str(error).split())[:200]}"
    if not same(found, expected):
        raise BadInput(
            f"{problem} without changing something else",
            where=_FILE,
            mend="edit it by hand; plain block style, one key a line, can always be edited",
        )


def _check_both_readings(old: str, new: str) -> None:
    extra = disagreements(new)
    if extra:
        extra -= disagreements(old)
    if extra:
        raise BadInput(
            f"{', '.join(extra)}: read differently by YAML 1.1 and 1.2",
            where=_FILE,
            mend="write floats as 1.0e-5, and quote words like on, off, yes, no",
        )
