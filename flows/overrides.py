"""Settings of a new round that differ from its template's: read, and led to their place in the file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhf import config, yaml12
from rlhf.config import ConfigError
from rlhf.errors import BadInput

_ROUND_KEYS = tuple(f.alias or name for name, f in config.Round.model_fields.items())
_EXAMPLE = 'write {"candidates.ppo.kl.coef": 0.02}'


def parse_overrides(given: Sequence[str] | str | Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as values by dotted path.

    Args:
        given: words `path=value`, their values in YAML 1.2 (1e-5 is a number, "1e-5" in quotes text); or
            JSON, as text or read already: {"candidates.ppo.kl.coef": 0.02}.

    Raises:
        ConfigError: names every word that is no override.
    """
    if isinstance(given, str):
        given = _json(given)
    if isinstance(given, Mapping):
        problems = [f"{key!r}: not a dotted path" for key in given if not _is_path(key)]
        found = dict(given)
    else:
        found, problems = _words(given)
    if problems:
        raise ConfigError("overrides", problems)
    return found


def _words(given: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    problems = []
    for word in given:
        try:
            key, value = _pair(word)
        except ValueError as error:
            problems.append(str(error))
            continue
        if key in found:
            problems.append(f"{key}: given twice; give it once")
        found[key] = value
    return found, problems


def _pair(word: str) -> tuple[str, Any]:
    key, equals, written = word.partition("=")
    key = key.strip()
    if not equals or not _is_path(key):
        raise ValueError(f"{word!r}: not an override; write path=value")
    if not written.strip():
        raise ValueError(f"{key}=: no value; write one, null for none")
    try:
        return key, yaml12.load(written)
    except Exception as error:  # whatever ruamel.yaml raises, the words are not YAML
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{key}={written}: not readable as YAML: {reason}") from None


def _json(text: str) -> Mapping[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
        if twice:
            raise ConfigError("overrides", [f"{key}: given twice; give it once" for key in twice])
        return dict(items)

    try:
        found = json.loads(text, object_pairs_hook=pairs)
    except ValueError as error:
        problem = f"not readable as JSON: {error}"
        raise BadInput(problem, where="overrides", mend=_EXAMPLE) from None
    if not isinstance(found, dict):
        raise BadInput("not a JSON object", where="overrides", mend=_EXAMPLE)
    return found


def _is_path(key: Any) -> bool:
    return isinstance(key, str) and bool(re.fullmatch(r"[^\s.=]+(\.[^\s.=]+)*", key))


def placed(
    overrides: Mapping[str, Any], name: str, candidates: Collection[str], raw: Mapping[str, Any]
) -> tuple[dict[str, list[str]], list[str]]:
    """For each override its place from the top of the file, and what is wrong with the others.

    Args:
        overrides: values by path.
        name: of the round that they are for.
        candidates: the names of its candidates, without the round.
        raw: the file, to tell what belongs to other rounds.
    """
    places: dict[str, list[str]] = {}
    problems: list[str] = []
    taken: dict[tuple[str, ...], str] = {}
    for path in overrides:
        try:
            keys = _place(path, name, candidates, raw)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            continue
        twice = taken.setdefault(tuple(keys), path)
        if twice != path:
            problems.append(f"{path}: the same key as {twice}; give it once")
        places[path] = keys
    for place, path in taken.items():
        above = [taken[place[:end]] for end in range(1, len(place)) if place[:end] in taken]
        problems += [f"{path}: below {other}, which is given too; give one" for other in above]
    return places, problems


def _place(path: str, name: str, candidates: Collection[str], raw: Mapping[str, Any]) -> list[str]:
    """The keys of a path from the top of the file. Raises ValueError with what is wrong, and a mend."""
    section, *keys = path.split(".")
    if section in _ROUND_KEYS:
        section, keys = "rounds", [name, section, *keys]
    if section not in ("rounds", "candidates"):
        if section in config.Pipeline.model_fields:
            raise ValueError(
                "not of the round, and a change would change every round's history; "
                "if that is meant, edit pipeline.yaml"
            )
        raise ValueError("unknown key; " + suggestion(section, [*_ROUND_KEYS, "candidates"]))
    if len(keys) < 2:
        raise ValueError(f"not one key; write {section}.NAME.KEY")
    if section == "candidates" and keys[0] in candidates:
        keys[0] = f"{name}-{keys[0]}"
    own = [name] if section == "rounds" else [f"{name}-{short}" for short in candidates]
    if keys[0] not in own:
        if keys[0] in raw[section]:
            raise ValueError(f"{keys[0]} is not of {name}, and a change would change its history")
        known = own if section == "rounds" else [*candidates]
        raise ValueError(f"no such {section[:-1]}; " + suggestion(keys[0], known))
    if section == "candidates" and keys[1] == "round":
        raise ValueError(f"it is {name}; leave it out")
    if section == "candidates" and keys[1] == "from":
        raise ValueError(f"as in its round; set rounds.{name}.from")
    if section == "rounds" and keys[1] == "decision":
        raise ValueError("a person decides after the round; use python -m flows decide")
    return [section, *keys]


def suggestion(asked: str, names: Collection[str]) -> str:
    """A near spelling, or else all there are."""
    near = difflib.get_close_matches(asked, list(names), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
