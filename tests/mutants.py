"""Mutation tests of rlhf/algos: does a test fail when the code is changed?

    python -m tests.mutants run [PATTERN ...]       # masking, 'policy_losses.x_gspo*'; all if none
    python -m tests.mutants survivors [MODULE ...]  # counts, and the changes no test noticed

mutmut makes the changes, and a few more here (a dropped `.detach()`, min for max); its settings are
in pyproject.toml. It works in the ignored folder `mutants/`, on a copy of the sources that differs
in one way: mutmut leaves decorated functions alone, so `@torch.no_grad()` is applied after the
definition instead. Code outside of functions is not changed.

A run that was interrupted goes on where it was. After a change of a function its mutants run again;
after a change of tests, name the modules to run again, or delete the folder.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKSPACE = ROOT / "mutants"
NO_GRAD = "torch.no_grad()"
KILLED = {"killed", "timeout"}
DROPPED = {"detach", "clamp", "abs", "square", "exp", "log", "sigmoid", "relu"}
SWAPPED = {
    one: other
    for pair in (("minimum", "maximum"), ("min", "max"), ("amin", "amax"), ("any", "all"))
    for one, other in (pair, pair[::-1])
} | {"sum": "mean", "mean": "sum", "log1p": "log", "expm1": "exp"}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "ROUNDHOUSE_MUTATION": "1",
}


def undecorated(source: str) -> str:
    """The same module, with `@torch.no_grad()` of its functions applied after their definition."""
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if not isinstance(node, ast.FunctionDef):
            continue
        if [ast.unparse(decorator) for decorator in node.decorator_list] == [NO_GRAD]:
            lines.insert(node.end_lineno or 0, f"\n\n{node.name} = {NO_GRAD}({node.name})")
            del lines[node.decorator_list[0].lineno - 1]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> bool:
    """Writes only what differs, and says so: mutmut makes the mutants of newer files again."""
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True


def prepare() -> None:
    """Brings the workspace up to date with sources, tests and settings."""
    changed = False
    for package in ("rlhf/algos", "tests/algos"):
        wanted = {path.relative_to(ROOT) for path in (ROOT / package).glob("*.py")}
        for name in wanted:
            source = (ROOT / name).read_text()
            text = undecorated(source) if name.parts[0] == "rlhf" else source
            changed |= _write(WORKSPACE / name, text)
        for copy in (WORKSPACE, WORKSPACE / "mutants"):
            for old in (copy / package).glob("*.py"):
                if old.relative_to(copy) not in wanted:
                    old.unlink()
    for file in ("rlhf/__init__.py", "pyproject.toml"):
        changed |= _write(WORKSPACE / file, (ROOT / file).read_text())
    if changed:  # which test calls which function is only looked up for tests of a new name
        (WORKSPACE / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)


def _operators() -> list[tuple[type, Callable[[Any], Iterator[Any]]]]:
    """Changes that mutmut does not know and losses are prone to."""
    import libcst as cst

    def name_of(node: cst.Call) -> cst.Name | None:
        found = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        return found if isinstance(found, cst.Name) else None

    def drop(node: cst.Call) -> Iterator[cst.BaseExpression]:
        name = name_of(node)
        if isinstance(node.func, cst.Attribute) and name and name.value in DROPPED:
            yield node.func.value

    def swap(node: cst.Call) -> Iterator[cst.Call]:
        name = name_of(node)
        if name and name.value in SWAPPED:
            yield node.with_deep_changes(name, value=SWAPPED[name.value])

    return [(cst.Call, drop), (cst.Call, swap)]


def run(patterns: list[str], children: int) -> None:
    """Runs the mutants that have no result yet, or those of the patterns."""
    prepare()
    os.environ.update(ENVIRONMENT)
    os.chdir(WORKSPACE)
    sys.dont_write_bytecode = True
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    from mutmut.__main__ import cli
    from mutmut.mutation.mutators import mutation_operators

    mutation_operators.extend(_operators())  # type: ignore[attr-defined]
    wanted = [f"rlhf.algos.{name}" if "*" in name else f"rlhf.algos.{name}.*" for name in patterns]
    cli(["run", f"--max-children={children}", *wanted])


def survivors(modules: list[str]) -> None:
    """Prints the score of each module, and the lines of each change that no test noticed."""
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code

    os.chdir(WORKSPACE)
    total: Counter[str] = Counter()
    for path in sorted(Path("rlhf/algos").glob("*.py")):
        if modules and path.stem not in modules:
            continue
        data = SourceFileMutationData(path=path)
        data.load()
        mutants = WORKSPACE / "mutants" / path  # results of an older, longer function stay on
        defined = set(re.findall(r"^def (\w+)", mutants.read_text(), re.MULTILINE))
        found = {
            name: status_by_exit_code[code]
            for name, code in data.exit_code_by_key.items()
            if name.rpartition(".")[2] in defined
        }
        counts = Counter(found.values())
        total += counts
        print(f"## {path.stem}: {_score(counts)}")
        for name, status in found.items():
            if status not in KILLED and status != "not checked":
                diff = filter(None, get_diff_for_mutant(name, path=path).splitlines()[2:])
                print(f"\n{name.rpartition('.')[2]} ({status})")
                print(
                    "\n".join(f"  {line[0]} {line[1:].strip()}" for line in diff if line[0] in "+-")
                )
        print()
    print(f"all: {_score(total)}")


def _score(counts: Counter[str]) -> str:
    checked = sum(counts.values()) - counts["not checked"]
    killed = sum(counts[status] for status in KILLED)
    share = f"{100 * killed / checked:.1f} %" if checked else "nothing"
    listed = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{share} killed of {checked} ({listed or 'no mutants'})"


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("patterns", nargs="*")
    runner.add_argument("--children", type=int, default=os.cpu_count(), help="processes")
    commands.add_parser("survivors").add_argument("modules", nargs="*")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.patterns, arguments.children)
    else:
        survivors(arguments.modules)


if __name__ == "__main__":
    main()
