"""YAML 1.2 as DVC reads it (ruamel.yaml), an order of magnitude sooner where the file is plain.

ruamel.yaml's parser is pure Python: about 4 s for the 20,000 lines of 200 rounds. libyaml's, which PyYAML
brings, takes a tenth of a second but knows YAML 1.1. Its events are used where both versions agree. A file with
anchors, tags, merge keys, directives, marks of documents, tabs, block text (`|`, `>`) or repeated keys, or one
that libyaml does not accept, goes to ruamel.yaml, whose word and whose messages count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import yaml


def load(text: str) -> Any:
    """What the one document of a text holds, as ruamel.yaml's safe loader gives it. Raises what that raises."""
    try:
        return _quick(text)
    except _NotPlainError:
        return _ruamel(text)


def scalar(text: str) -> Any:
    """What a scalar without quotes stands for."""
    try:
        return _plain(text)
    except _NotPlainError:
        return text


class _NotPlainError(Exception):
    """Only ruamel.yaml can tell."""


def _ruamel(text: str) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)


# Directives, marks of documents, keys with a question mark, and what YAML 1.1 takes for other white space or line ends.
_ELSEWHERE = re.compile("^(?:%|---|[.]{3})|[\\[{,]\\s*\\?|[\\t\\x85\\u2028\\u2029\\ufeff]", re.M)


def _quick(text: str) -> Any:
    if not yaml.__with_libyaml__ or _ELSEWHERE.search(text):
        raise _NotPlainError
    try:
        events = iter(yaml.parse(text, Loader=yaml.CSafeLoader))
        next(events), next(events)  # the stream and the document begin
        value = _value(next(events), events)
        next(events)
        if not isinstance(next(events), yaml.StreamEndEvent):
            raise _NotPlainError
    except (yaml.YAMLError, RecursionError, StopIteration, TypeError, ValueError):
        raise _NotPlainError from None
    return value


def _value(event: Any, events: Iterator[Any]) -> Any:
    """The value that begins with an event; takes the events that belong to it."""
    kind = type(event)
    if kind not in _BEGIN or event.anchor is not None or event.tag is not None:
        raise _NotPlainError
    if kind is yaml.ScalarEvent:
        if event.style in ("|", ">"):
            raise _NotPlainError
        return event.value if event.style else _plain(event.value)
    if kind is yaml.SequenceStartEvent:
        items: list[Any] = []
        while type(event := next(events)) is not yaml.SequenceEndEvent:
            items.append(_value(event, events))
        return items
    mapping: dict[Any, Any] = {}
    while type(event := next(events)) is not yaml.MappingEndEvent:
        key = _value(event, events)
        if key in mapping:
            raise _NotPlainError
        mapping[key] = _value(next(events), events)
    return mapping


_BEGIN = (yaml.ScalarEvent, yaml.SequenceStartEvent, yaml.MappingStartEvent)
_WORD = re.compile(r"[A-Za-z_/][\w./ -]*")
_NO_WORDS = ("null", "true", "false")
_INT = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]+([eE][-+]?[0-9]+)?")


@lru_cache(maxsize=1 << 14)
def _plain(value: str) -> Any:
    """What YAML 1.2 makes of a scalar without quotes; of all but plain words and numbers, ruamel.yaml's word."""
    if _WORD.fullmatch(value) and value.lower() not in _NO_WORDS:
        return value
    if _INT.fullmatch(value):
        return int(value)
    if _FLOAT.fullmatch(value):
        return float(value)
    try:
        found = _ruamel(f"- {value}\n")
    except Exception:
        raise _NotPlainError from None
    if len(found) != 1 or isinstance(found[0], (list, dict)) or "\n" in value:
        raise _NotPlainError
    return found[0]
