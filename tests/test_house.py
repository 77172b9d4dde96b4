"""The plan of the house, written once and checked: which room may use which, and how large things may grow."""

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
MAY_USE = {
    "types": [],
    "io": ["types"],
    "yaml_text": ["types"],
    "faults": [],
    "config": ["types", "yaml_text", "faults"],
    "console": ["types", "io", "text"],
    "store": ["types", "io", "config", "yaml_text"],
    "phrasebook": ["types", "config"],
    "text": ["types", "faults", "config", "phrasebook"],
    "recipe_files": [],
    "hardware": ["types"],
    "cores": [],
    "group": ["types", "console"],
    "nn": ["types", "config"],
    "score": ["types", "config"],
    "search": ["types", "config"],  # meets models only through a protocol
    "data": ["types", "io", "cores", "text"],
    "models": ["types", "config", "nn"],
    "answers": ["types", "config", "text", "search"],
    "door": ["types", "config", "text", "models", "answers"],
    "ensemble": ["types", "models", "search", "door"],
    "exchange": ["types", "config", "store", "text", "nn", "models"],
    "engines": ["types", "io", "config", "hardware", "text", "data", "models", "search", "door", "exchange"],
    "scoring": ["types", "data", "models", "door"],
    "translator": [
        "types", "faults", "config", "text", "data", "models", "search", "answers", "door", "scoring", "engines",
    ],
    "classifier": ["types", "data", "models", "door"],
    "generator": ["types", "config", "data", "models", "search", "door"],
    "loading": [
        "types", "io", "console", "engines", "store", "text", "models", "answers", "door", "ensemble", "translator",
        "classifier", "generator",
    ],
    "lens": ["types", "models"],
    "evaluation": [
        "types", "config", "phrasebook", "text", "score", "translator", "door", "classifier", "generator", "loading",
    ],
    "card": ["types", "config", "store", "models", "score", "loading"],
    "train": [
        "types", "io", "hardware", "group", "config", "console", "store", "phrasebook", "text", "data", "nn",
        "models", "score", "answers", "engines", "translator", "door", "loading",
    ],
    "progress": ["console"],
    "corpora": ["types", "io", "config", "console", "progress", "phrasebook", "text", "yaml_text"],
    "settings_reference": ["types", "config", "faults", "yaml_text"],
    "catalogue": [
        "config", "models", "score", "phrasebook", "text", "search", "answers", "train", "settings_reference",
    ],
    "demo": [
        "types", "yaml_text", "config", "store", "phrasebook", "text", "models", "translator", "lens", "evaluation",
        "train", "loading", "recipe_files",
    ],
    "compare": [
        "types", "cores", "yaml_text", "config", "store", "phrasebook", "text", "data", "models", "score",
        "translator", "lens", "evaluation", "card", "train", "door", "loading", "console",
    ],
    "shards": ["types", "io", "store", "data", "group", "train"],
    "lessons": ["types", "door", "translator", "shards"],
    "backtranslation": [
        "types", "config", "text", "answers", "translator", "loading", "group", "train", "shards", "lessons"
    ],
    "distil": [
        "types", "io", "config", "store", "text", "models", "score", "translator", "loading", "group", "train",
        "shards", "lessons",
    ],
    "export": [
        "types", "callable_module", "card", "config", "console", "store", "score", "phrasebook", "text", "engines",
        "exchange", "loading", "translator",
    ],
    "callable_module": ["api"],
    "api": ["types", "config", "text", "score", "train", "door", "generator", "translator", "loading", "evaluation"],
    "interrupts": [],
    "outcome": ["types", "console", "interrupts"],
    "commands": [
        "types", "faults", "recipe_files", "io", "config", "console", "store", "text", "score", "answers", "door",
        "translator", "generator", "classifier", "loading", "evaluation", "train", "corpora", "distil", "export",
        "group", "shards", "backtranslation",
    ],
    "cli": [
        "types", "recipe_files", "cores", "console", "commands", "train", "compare", "card", "catalogue",
        "settings_reference", "demo", "outcome",
    ],
    "__main__": ["cli", "interrupts"],
}  # fmt: skip
LINES, FUNCTION_LINES = 400, 60


def room(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def used(node: ast.AST, path: Path, root: Path) -> Iterator[str]:
    """The rooms that an import names, wherever it stands and however it is written."""
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


def faults(root: Path) -> Iterator[str]:
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
            here = room(path, root)
            for other in used(node, path, root):
                if other != here and other not in MAY_USE.get(here, []):
                    yield f"{where}:{getattr(node, 'lineno', 0)}: {here} may not use {other}"


def test_the_house_is_as_planned() -> None:
    assert list(faults(ROOT)) == []


def test_every_room_is_on_the_plan() -> None:
    rooms = {room(path, ROOT) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert rooms == set(MAY_USE)


def test_no_stairs_lead_round() -> None:
    order = list(TopologicalSorter(MAY_USE).static_order())
    assert set(order) == set(MAY_USE)


@pytest.mark.parametrize(("low", "high"), [("search", "models"), ("models", "search"), ("models", "data")])
def test_rooms_that_never_meet(low: str, high: str) -> None:
    below, reach = [low], set()
    while below:
        reach.add(name := below.pop())
        below += MAY_USE[name]
    assert high not in reach


def test_training_is_used_from_above_only() -> None:
    above = {"api", "catalogue", "demo", "compare", "shards", "backtranslation", "distil", "commands", "cli"}
    assert {name for name, rooms in MAY_USE.items() if "train" in rooms} == above


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("nn/mask.py", "import dragoman.train.loss\n", "nn/mask.py:1: nn may not use train"),
        ("nn/mask.py", "from dragoman.models import build\n", "nn/mask.py:1: nn may not use models"),
        ("nn/mask.py", "from dragoman import store\n", "nn/mask.py:1: nn may not use store"),
        ("nn/mask.py", "from dragoman import load\n", "nn/mask.py:1: nn may not use load"),
        ("nn/mask.py", "import dragoman\n", "nn/mask.py:1: nn may not use __init__"),
        ("nn/mask.py", "from ..data.batch import lay\n", "nn/mask.py:1: nn may not use data"),
        ("nn/mask.py", "from .. import data\n", "nn/mask.py:1: nn may not use data"),
        ("types.py", "from .config import near\n", "types.py:1: types may not use config"),
        ("types.py", "def f():\n    from dragoman.config import near\n", "types.py:2: types may not use config"),
        ("types.py", "import importlib\nimportlib.import_module('x')\n", "types.py:2: hides what it imports"),
        ("attic.py", "import dragoman.types\n", "attic.py:1: attic may not use types"),
        ("nn/__init__.py", "x = 1\n", "nn/__init__.py: not empty"),
        ("types.py", "x = 1\n" * (LINES + 1), f"types.py: over {LINES} lines"),
        ("types.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES, f"types.py: f is over {FUNCTION_LINES} lines"),
    ],
)
def test_a_fault_is_seen(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert list(faults(tmp_path)) == [complaint]


@pytest.mark.parametrize(
    "text", ["from .dropout import Dropout\n", "from dragoman.types import UserError\n", "import os\n"]
)
def test_what_is_allowed_is_no_fault(tmp_path: Path, text: str) -> None:
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn" / "block.py").write_text(text)
    assert list(faults(tmp_path)) == []


HEAVY = {"torch", "numpy", "sentencepiece", "sacrebleu", "matplotlib", "jinja2"}
COMPILER = {"torch._dynamo", "torch._inductor"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("dragoman", HEAVY),
        ("dragoman.cli", HEAVY),
        ("dragoman.config", HEAVY),
        ("dragoman.corpora", {"torch", "sentencepiece", "sacrebleu"}),
        ("dragoman.data.samplers", {"torch", "numpy"}),
        ("dragoman.loading", COMPILER),
        ("dragoman.compare.compare", {"matplotlib"}),
        ("dragoman.evaluation.report", {"torch", "matplotlib", "jinja2"}),
    ],
)
def test_a_quick_start(module: str, heavy: set[str]) -> None:
    """Help and complaints come at once, models too: nothing heavy is imported before it is needed."""
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_public_names_are_there() -> None:
    for name in dragoman.__all__:
        assert callable(getattr(dragoman, name))
        assert getattr(dragoman, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="trian"):
        dragoman.trian  # noqa: B018
