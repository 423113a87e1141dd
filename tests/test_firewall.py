"""Training never sees gold: at run time, and in the import graph, whose arrows go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.rewards.firewall import GoldFirewall

ROOT = Path(__file__).parents[1]
SEES_GOLD = {
    "rlhf/labelers.py",
    "rlhf/rewards/gold.py",
    "tasks/preferences.py",
    "tasks/evaluate.py",
    "tasks/best_of_n.py",
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import rlhf.worlds.reviews.gold",
        "from rlhf.worlds.reviews import gold",
        "import rlhf.rewards.gold",
        "from rlhf import labelers",
        "import importlib; importlib.import_module('rlhf.worlds.reviews.gold')",
        "import runpy; runpy.run_module('rlhf.worlds.reviews.gold')",
        "import tasks.preferences",
    ],
)
def test_forbidden_imports_raise(statement: str) -> None:
    if "tasks.preferences" in statement and not (ROOT / "tasks/preferences.py").exists():
        pytest.skip("tasks/preferences.py is not there")
    start = "from rlhf.rewards.firewall import forbid; forbid('rlhf.worlds.reviews.gold')\n"
    result = run(start + statement)
    assert result.returncode == 1
    assert "training stages may not import gold" in result.stderr
    if "tasks" not in statement:  # seconds of imports, and its own tests import it
        assert run(statement).returncode == 0


def test_the_rest_may_be_imported() -> None:
    code = (
        "from rlhf.rewards.firewall import forbid; forbid('rlhf.worlds.reviews.gold')\n"
        "import rlhf.worlds.reviews, rlhf.rewards, rlhf.config, rlhf.errors\n"
        "import golden\n"
    )
    result = run(code)
    assert "No module named 'golden'" in result.stderr


@pytest.mark.parametrize("name", ["rlhf.labelers", "rlhf.worlds.reviews.gold"])
def test_what_is_already_imported_raises(name: str) -> None:
    code = f"import {name}\nfrom rlhf.rewards.firewall import forbid\n"
    result = run(code + "forbid('rlhf.worlds.reviews.gold')")
    assert result.returncode == 1
    assert f"already imported: {name}" in result.stderr


def test_what_is_forbidden() -> None:
    wall = GoldFirewall(["my.gold"])
    assert wall.forbids("my.gold")
    assert wall.forbids("my.gold.parts")
    assert not wall.forbids("my.golden")
    assert not wall.forbids("my")


# --- the import graph -----------------------------------------------------------------------------


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports_of(source: str, package: str) -> Iterator[str]:
    """Every module a source may import, wherever in it; `from a import b` counts as a and a.b.

    Calls of import_module and __import__ with a written-out name count too; what stands under
    `if TYPE_CHECKING` never runs and does not count.
    """
    for node in running_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__"):
                yield str(node.args[0].value)


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from running_nodes(other)
        else:
            yield from running_nodes(child)


def imports(path: Path) -> list[str]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return list(imports_of(path.read_text(encoding="utf-8"), package))


def offenders(paths: list[Path], bad: object) -> list[str]:
    assert callable(bad)
    return [f"{p.relative_to(ROOT)}: {name}" for p in paths for name in imports(p) if bad(name)]


def test_the_walk_sees_every_form() -> None:
    source = (
        "import a.gold\nfrom b import gold\nfrom . import gold as g\nfrom ..c import labelers\n"
        "def f():\n    import d.gold as x\n    importlib.import_module('e.gold')\n"
        "if TYPE_CHECKING:\n    import typed.gold\nelse:\n    import f.gold\n"
    )
    found = set(imports_of(source, "rlhf.rewards"))
    assert {"a.gold", "b.gold", "rlhf.rewards.gold", "rlhf.c.labelers"} <= found
    assert {"d.gold", "e.gold", "f.gold"} <= found
    assert "typed.gold" not in found


def test_only_labelling_and_evaluation_import_gold() -> None:
    paths = [p for p in sources("rlhf", "tasks") if str(p.relative_to(ROOT)) not in SEES_GOLD]
    assert len(paths) > 10
    assert offenders(paths, lambda name: {"gold", "labelers"} & set(name.split("."))) == []
    assert any("gold" in name.split(".") for name in imports(ROOT / "rlhf/labelers.py"))


def test_algorithms_import_torch_and_themselves_alone() -> None:
    allowed = sys.stdlib_module_names | {"torch"}

    def foreign(name: str) -> bool:
        root = name.split(".")[0]
        own = name == "rlhf" or f"{name}.".startswith("rlhf.algos.")
        return root not in allowed and not own

    assert offenders(sources("rlhf/algos"), foreign) == []


def test_arrows_go_from_flows_to_tasks_to_rlhf() -> None:
    def into(*roots: str) -> object:
        return lambda name: name.split(".")[0] in roots

    assert offenders(sources("rlhf"), into("tasks", "flows")) == []
    assert offenders(sources("tasks"), into("flows")) == []


def test_one_module_imports_mlflow_and_only_flows_prefect() -> None:
    paths = sources("rlhf", "tasks", "flows")
    elsewhere = [p for p in paths if p != ROOT / "rlhf/tracking.py"]
    assert offenders(elsewhere, lambda name: name.split(".")[0] == "mlflow") == []
    paths = sources("rlhf", "tasks")
    assert offenders(paths, lambda name: name.split(".")[0].startswith("prefect")) == []


def test_config_stays_light() -> None:
    code = (
        "import sys, rlhf.config, rlhf.errors\n"
        "sys.exit(','.join({'torch', 'pandas', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    result = run(code)
    assert result.stderr.strip() == ""
