"""The architecture, written once and checked: which package may import which, and how large parts may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dragoman

ROOT = Path(dragoman.__file__).parent
# Modules at the top, by level: each may import those of the levels before it, and every package may import all of
# BASE. A new edge between packages is a decision: record it in docs/decisions/.
BASE = ["errors", "types", "io", "progress", "hardware", "process_group", "language_codes"]
BASE_EDGES = {
    "errors": [],
    "types": [],
    "io": ["errors"],
    "progress": ["errors", "io"],
    "hardware": ["errors"],
    "process_group": ["errors", "io", "progress"],
    "language_codes": [],
}
MAY_IMPORT = {
    "config": [],
    "kernels": [],
    "documents": [],
    "phrasebook": ["config"],
    "metrics": ["config"],
    "data": ["config", "documents", "phrasebook"],
    "modules": ["config", "kernels"],
    "models": ["config", "kernels", "modules"],
    "decoding": ["config", "data"],
    "smt": ["config", "data"],
    "recipe": ["config", "data", "models", "decoding", "smt"],
    "run_dir": ["config", "recipe"],
    "inference": [
        "documents",
        "config",
        "recipe",
        "run_dir",
        "kernels",
        "phrasebook",
        "metrics",
        "data",
        "modules",
        "models",
        "decoding",
        "smt",
    ],
    "evaluation": ["recipe", "phrasebook", "metrics", "data", "inference"],
    "inspection": ["phrasebook", "metrics", "data", "modules", "models", "decoding", "smt", "inference", "evaluation"],
    "training": [
        "config",
        "recipe",
        "run_dir",
        "kernels",
        "phrasebook",
        "metrics",
        "data",
        "modules",
        "models",
        "inference",
        "inspection",
        "smt",
    ],
    "augmentation": ["config", "recipe", "run_dir", "metrics", "data", "inference", "training"],
    "compare": [
        "config",
        "recipe",
        "run_dir",
        "phrasebook",
        "metrics",
        "data",
        "inference",
        "evaluation",
        "inspection",
        "training",
    ],
    "labs": [
        "config",
        "recipe",
        "kernels",
        "phrasebook",
        "metrics",
        "data",
        "modules",
        "models",
        "decoding",
        "smt",
        "inference",
        "evaluation",
        "inspection",
        "training",
    ],
    "serving": ["config", "run_dir", "documents", "decoding", "inference", "inspection"],
    "cli": [
        "config",
        "recipe",
        "run_dir",
        "phrasebook",
        "metrics",
        "data",
        "decoding",
        "inference",
        "evaluation",
        "inspection",
        "training",
        "augmentation",
        "compare",
        "labs",
        "smt",
        "serving",
    ],
    "__main__": ["cli"],
}
LINES, FUNCTION_LINES = 600, 60


def part_of(path: Path, root: Path) -> str:
    """Return the package, or the top-level module, that a file belongs to."""
    return path.relative_to(root).parts[0].removesuffix(".py")


def imported_parts(node: ast.AST, path: Path, root: Path) -> Iterator[str]:
    """Yield the packages and top-level modules that an import names, wherever it stands and however it is written."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        home = ["dragoman", *path.relative_to(root).parts[:-1]]
        base = [*home[: len(home) + 1 - node.level], *(node.module or "").split(".")] if node.level else [node.module]
        names = [".".join([*(part for part in base if part), alias.name]) for alias in node.names]
    else:
        return
    for first, *rest in (name.split(".") for name in names):
        if first == "dragoman":
            yield rest[0] if rest else "__init__"


def allowed_imports(part: str) -> list[str]:
    if part in BASE_EDGES:
        return BASE_EDGES[part]
    return [*MAY_IMPORT.get(part, []), *BASE]


def violations(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        where, text = path.relative_to(root), path.read_text(encoding="utf-8")
        if len(text.splitlines()) > LINES:
            yield f"{where}: over {LINES} lines"
        if path.name == "__init__.py" and path.parent != root and text.strip():
            yield f"{where}: not empty"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= FUNCTION_LINES:
                    yield f"{where}: {node.name} is over {FUNCTION_LINES} lines"
            if path == root / "__init__.py":
                continue
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).endswith(
                ("import_module", "__import__")
            ):
                yield f"{where}:{node.lineno}: hides what it imports"
            here = part_of(path, root)
            for other in imported_parts(node, path, root):
                if other != here and other not in allowed_imports(here):
                    yield f"{where}:{getattr(node, 'lineno', 0)}: {here} may not import {other}"


def test_imports_follow_the_table() -> None:
    assert list(violations(ROOT)) == []


def test_the_table_names_every_part() -> None:
    assert {part_of(path, ROOT) for path in ROOT.rglob("*.py")} - {"__init__"} == {*MAY_IMPORT, *BASE}


def test_every_edge_of_the_table_is_used() -> None:
    used = {
        (part_of(path, ROOT), other)
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for other in imported_parts(node, path, ROOT)
    }
    assert [(part, other) for part, others in MAY_IMPORT.items() for other in others if (part, other) not in used] == []


def test_there_is_no_cycle() -> None:
    order = list(TopologicalSorter({**BASE_EDGES, **MAY_IMPORT}).static_order())
    assert set(order) == {*MAY_IMPORT, *BASE}


@pytest.mark.parametrize(("low", "high"), [("decoding", "models"), ("models", "decoding"), ("models", "data")])
def test_packages_that_never_meet(low: str, high: str) -> None:
    below, reached = [low], set()
    while below:
        reached.add(name := below.pop())
        below += MAY_IMPORT.get(name, [])
    assert high not in reached


def test_training_is_imported_from_above_only() -> None:
    assert {name for name, parts in MAY_IMPORT.items() if "training" in parts} == {
        "augmentation",
        "compare",
        "labs",
        "cli",
    }


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("modules/a.py", "import dragoman.training.loss\n", "modules/a.py:1: modules may not import training"),
        ("modules/a.py", "from dragoman.models import registry\n", "modules/a.py:1: modules may not import models"),
        ("modules/a.py", "from dragoman import run_dir\n", "modules/a.py:1: modules may not import run_dir"),
        ("modules/a.py", "from dragoman import load\n", "modules/a.py:1: modules may not import load"),
        ("modules/a.py", "import dragoman\n", "modules/a.py:1: modules may not import __init__"),
        ("modules/a.py", "from ..data.batches import x\n", "modules/a.py:1: modules may not import data"),
        ("modules/a.py", "from .. import data\n", "modules/a.py:1: modules may not import data"),
        ("types.py", "from .config import near\n", "types.py:1: types may not import config"),
        ("types.py", "def f():\n    from dragoman.config import x\n", "types.py:2: types may not import config"),
        ("types.py", "import importlib\nimportlib.import_module('x')\n", "types.py:2: hides what it imports"),
        ("attic.py", "import dragoman.models\n", "attic.py:1: attic may not import models"),
        ("modules/__init__.py", "x = 1\n", "modules/__init__.py: not empty"),
        ("types.py", "x = 1\n" * (LINES + 1), f"types.py: over {LINES} lines"),
        ("types.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES, f"types.py: f is over {FUNCTION_LINES} lines"),
    ],
)
def test_a_violation_is_seen(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert list(violations(tmp_path)) == [complaint]


@pytest.mark.parametrize("text", ["from .dropout import Dropout\n", "from dragoman.types import Pair\n", "import os\n"])
def test_what_is_allowed_is_no_violation(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "block.py").write_text(text)
    assert list(violations(tmp_path)) == []


HEAVY = {"torch", "numpy", "sentencepiece", "sacrebleu", "fastapi", "starlette", "uvicorn"}
COMPILER = {"torch._dynamo", "torch._inductor"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("dragoman", HEAVY),
        ("dragoman.cli.main", HEAVY),
        ("dragoman.config.settings", HEAVY),
        ("dragoman.recipe", HEAVY),
        ("dragoman.run_dir", HEAVY),
        ("dragoman.data.preparation", {"torch", "sentencepiece", "sacrebleu"}),
        ("dragoman.data.sampling_workers", {"torch", "numpy"}),
        ("dragoman.inference.loading", COMPILER),
    ],
)
def test_imports_are_quick(module: str, heavy: set[str]) -> None:
    """Help and error messages come at once, models too: nothing heavy is imported before it is needed."""
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_importing_changes_nothing() -> None:
    code = "import os; before = dict(os.environ); import dragoman; assert before == dict(os.environ)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_there() -> None:
    for name in dragoman.__all__:
        assert callable(getattr(dragoman, name))
        assert getattr(dragoman, name).__name__ == name
    with pytest.raises(AttributeError, match="trian"):
        dragoman.trian  # noqa: B018
