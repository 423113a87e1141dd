"""Named parts: a registry entry or an import path, called with exactly the tensors it asks for.

The signature of a part says everything about it. Its positional parameters name the inputs it reads
(`chosen_logps`, `values`, ...): a caller offers all it has and the part gets those it names. Its
keyword-only parameters are its options: those of `pipeline.yaml`, and the ones every part of its kind
shares (`SHARED`). So a part of your own is one function, named `my_pkg.my_module.my_loss`, and
nothing else has to know of it.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SHARED = frozenset({"reduction", "denominator"})  # keyword-only, set by the trainer


def resolve(registry: Mapping[str, F], name: str, place: str) -> F:
    """The part of that name: an entry of the registry, or the function at an import path.

    Args:
        registry: built-in parts by name.
        name: a key of `registry`, or `package.module.function`.
        place: key under which the file names it, for the error.

    Raises: ValueError if the name is no key, cannot be imported or is no function.
    """
    if name in registry:
        return registry[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(
            f"{place}: unknown part {name!r}; use one of {', '.join(registry)}, or an import path like "
            "my_package.my_module.my_function"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever a module of yours does on import
        raise ValueError(f"{place}: {name!r} cannot be imported: {error}") from error
    if inspect.isclass(found) or not callable(found):
        raise ValueError(f"{place}: {name!r} is a {type(found).__name__}, not a function")
    return found


def inputs(part: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters: the tensors that the part reads."""
    return tuple(
        name
        for name, parameter in inspect.signature(part).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    )


def options(part: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters that are not SHARED, with their defaults (`Parameter.empty` for none)."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(part).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in SHARED
    }


def check(
    part: Callable[..., Any],
    name: str,
    available: Set[str],
    given: Mapping[str, Any],
    shared: Set[str] = frozenset(),
) -> None:
    """Refuses a part that asks for what its caller does not have, or options it does not know.

    Args:
        part: the function. name: how the file names it, for the error.
        available: names of the inputs that the caller can offer.
        given: options by name.
        shared: those of SHARED that the caller sets. A loss that did not take its `denominator`
            would give another gradient for another split into micro-batches.

    Raises: ValueError that lists every problem.
    """
    try:
        signature = inspect.signature(part).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"{name}: its signature cannot be read; wrap it in a function") from None
    problems = [
        f"*{parameter.name} hides what it reads; name its parameters"
        for parameter in signature
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    for wanted in inputs(part):
        if wanted not in available:
            problems.append(
                f"reads {wanted!r}, which is not available here; "
                f"there are {', '.join(sorted(available))}"
            )
    for keyword in sorted(shared - inspect.signature(part).parameters.keys()):
        problems.append(f"takes no keyword {keyword!r}; every part of its kind does")
    known = options(part)
    for option in given:
        if option not in known:
            listed = ", ".join(known) or "none"
            problems.append(f"option {option!r} is not one of its own ({listed}); remove it")
    for option, default in known.items():
        if default is inspect.Parameter.empty and option not in given:
            problems.append(f"option {option!r} has no default; set it")
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))


def call(part: Callable[..., Any], available: Mapping[str, Any], /, **keywords: Any) -> Any:
    """The part's result on the inputs that it names, out of all that are available.

    Raises: ValueError if an input is missing, or None.
    """
    wanted = inputs(part)
    missing = [name for name in wanted if available.get(name) is None]
    if missing:
        title = getattr(part, "__name__", repr(part))
        raise ValueError(f"{title} reads {', '.join(missing)}, which is missing")
    return part(*(available[name] for name in wanted), **keywords)
