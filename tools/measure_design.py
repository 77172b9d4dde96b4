"""Measure the design of the source code: size, packages, imports, duplicate names, functions per sentence.

python tools/measure_design.py                 measure the source text only, which takes a second
python tools/measure_design.py --train         also train two steps, count how often the model section is parsed,
                                               and count the functions called to translate one sentence
python tools/measure_design.py --run RUN       count the functions called by `dragoman translate RUN --engine torch`
python tools/measure_design.py --json          print JSON

The last column is the required value. The duration of `make test` also has a limit, which is not checked here.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1] / "src" / "dragoman"
CODE_LINES_BEFORE = 20_792  # at commit 31601d4, the last one before the redesign
# Packages and files that were added after that commit, for new features. They do not count as code lines and files, and
# imports from and of these packages do not count as edges. Of `inspection`, two small files are older; they do count.
LATER_FEATURES = {
    "smt",
    "serving",
    "labs",
    "inspection",
    "cli/align.py",
    "cli/inspect.py",
    "decoding/exhaustive.py",
    "inference/attention_alignment.py",
    "inference/phrase_translator.py",
    "metrics/alignment.py",
    "training/prober.py",
    "training/statistical.py",
}
EARLIER_FILES = {"inspection/attention_maps.py", "inspection/gradient_flow.py"}
REQUIRED = {
    "code lines": f"at most {CODE_LINES_BEFORE * 85 // 100}",
    "code lines against commit 31601d4": "at most -15%",
    "docstrings and comments": "15% to 20%",
    "files": "at most 120",
    "top-level modules": "at most 10",
    "packages": "at most 16",
    "import edges between packages": "at most 60",
    "levels of packages": "at most 12",
    "names defined in two or more modules": "at most 15",
    "parses of the model section in train": "1",
    "functions for one sentence": "at most 210",
    "files for one sentence": "at most 32",
}
RECIPE = """
data: {{train: {{phrasebook: 100}}, dev: {{phrasebook: 10}}, cache: {cache}}}
tokenizer: {{kind: char}}
model: {{kind: transformer, layers: 1, width: 16, heads: 2}}
train: {{steps: 2, tokens: 128, device: cpu}}
"""


def count_lines(path: Path) -> Counter[str]:
    """Count all lines of a module ("total"), lines with code ("code"), and those with docstrings or comments ("doc").

    A line with code and a comment counts as both.
    """
    text = path.read_text(encoding="utf-8")
    lines: dict[str, set[int]] = {"code": set(), "doc": set()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if first and ast.get_docstring(node, clean=False) is not None:
                lines["doc"].update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    no_code = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
    docstrings = frozenset(lines["doc"])
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        span = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            lines["doc"].update(span)
        elif token.type not in no_code and not docstrings.issuperset(span):
            lines["code"].update(span)
    return Counter(total=text.count("\n"), code=len(lines["code"]), doc=len(lines["doc"]))


def find_imported_packages(path: Path) -> Iterator[str]:
    """Yield the package or top-level module of dragoman that each import of a file names, also inside functions."""
    own_package = ["dragoman", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = own_package[: len(own_package) + 1 - node.level] if node.level else []  # of a relative import
            module = [*base, *(node.module or "").split(".")] if node.module else base
            names = [".".join([*module, alias.name]) for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("dragoman."))


def find_duplicate_names(modules: list[Path]) -> list[str]:
    """Return public module-level functions, classes and constants that two or more modules define."""
    definitions: Counter[str] = Counter()
    for path in modules:
        names = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
        definitions.update(name for name in names if not name.startswith("_"))
    return sorted(name for name, count in definitions.items() if count > 1)


def count_levels(edges: set[tuple[str, str]]) -> int:
    """Return the number of packages on the longest chain of imports. A cycle raises an error."""
    imports: dict[str, set[str]] = {}
    for importer, imported in edges:
        imports.setdefault(importer, set()).add(imported)
    level: dict[str, int] = {}
    for name in TopologicalSorter(imports).static_order():
        level[name] = 1 + max((level[imported] for imported in imports.get(name, ())), default=0)
    return max(level.values(), default=1)


def measure_source() -> dict[str, object]:
    """Return the measures that need only the source text."""
    modules = sorted(ROOT.rglob("*.py"))
    lines = sum(map(count_lines, modules), Counter[str]())
    paths = {module: module.relative_to(ROOT) for module in modules}
    compared = [
        module
        for module, path in paths.items()
        if path.as_posix() in EARLIER_FILES or not {path.parts[0], path.as_posix()} & LATER_FEATURES
    ]
    code = sum(count_lines(path)["code"] for path in compared)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    edges = {
        (path.parts[0], imported)
        for module, path in paths.items()
        for imported in find_imported_packages(module)
        if path.parts[0] != imported and {path.parts[0], imported} <= packages - LATER_FEATURES
    }
    duplicates = find_duplicate_names(modules)
    return {
        "code lines": code,
        "code lines against commit 31601d4": f"{code / CODE_LINES_BEFORE - 1:+.1%}",
        "docstrings and comments": f"{lines['doc'] / lines['total']:.1%}",
        "files": len(compared),
        "top-level modules": len(list(ROOT.glob("*.py"))),
        "packages": len(packages),
        "import edges between packages": len(edges),
        "levels of packages": count_levels(edges),
        "names defined in two or more modules": len(duplicates),
        "list of these names": duplicates,
    }


def count_parses(folder: Path) -> dict[str, object]:
    """Train two steps, twice, and count how often the model section is parsed in the second training.

    The second run folder is `folder` / "run". Each pydantic model class of Dragoman gets a validator that collects its
    instances. The validator must be installed before the classes are created, so this function must be called before
    the first import of dragoman.
    """
    import pydantic
    from pydantic_core import CoreSchema, core_schema

    assert "dragoman" not in sys.modules
    parsed: dict[int, Any] = {}  # by id, since the validator also runs when an instance is put into another one

    def collect(record: Any) -> Any:
        parsed[id(record)] = record
        return record

    def make_schema(_: type[Any], source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_after_validator_function(collect, handler(source))

    def install_validator(cls: type[Any], /, **_: Any) -> None:
        if cls.__module__.startswith("dragoman."):
            cls.__get_pydantic_core_schema__ = classmethod(make_schema)

    pydantic.BaseModel.__init_subclass__ = classmethod(install_validator)  # type: ignore[assignment]
    import dragoman

    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(cache=folder / "cache"), encoding="utf-8")
    counts = []
    for run in ("warm-up", "run"):  # the first one also imports modules, whose default values are parsed then
        with redirect_stderr(io.StringIO()):
            dragoman.train(recipe, out=folder / run)
        counts.append(sum(getattr(record, "kind", "") == "transformer" for record in parsed.values()))
    return {"parses of the model section in train": counts[1] - counts[0]}


def count_functions(run: Path) -> dict[str, object]:
    """Count the functions called to translate one line, and their files, in the second `translate` of this process."""
    from dragoman.cli import main as cli

    line = "The old dog sees the small house."
    called: set[tuple[str, str]] = set()  # file and function

    def record_call(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            called.add((code.co_filename, code.co_qualname))

    for profile in (None, record_call):  # the first translation imports modules and fills caches
        sys.argv = ["dragoman", "translate", str(run), "--engine", "torch"]
        sys.stdin = io.TextIOWrapper(io.BytesIO(line.encode() + b"\n"), encoding="utf-8")
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        sys.setprofile(profile)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                cli.main()
        except SystemExit as end:
            if end.code:
                sys.exit(f"translate ended with {end.code}")
        finally:
            sys.setprofile(None)
    return {"functions for one sentence": len(called), "files for one sentence": len({file for file, _ in called})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="also train two steps and translate one sentence")
    parser.add_argument("--run", type=Path, help="a trained run folder to translate the sentence with")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measures = measure_source()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.train:
            measures |= count_parses(Path(folder))
        if arguments.train or arguments.run:
            measures |= count_functions(arguments.run or Path(folder) / "run")
    if arguments.json:
        print(json.dumps(measures))
        return
    for name, value in measures.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{name:40} {shown!s:10} {REQUIRED.get(name, '')}".rstrip())


if __name__ == "__main__":
    main()
