"""Print the measures of the design that we watch: size, packages, imports, doubled names, hops, parses.

python tools/measure_design.py                 what the source text tells, in a second
python tools/measure_design.py --train         also train two steps, and count the parses of the model section
                                               and the functions that one translated sentence passes
python tools/measure_design.py --run RUN       follow the sentence through `dragoman translate RUN --engine torch`
python tools/measure_design.py --json          for programs

The last column says what is required. The time of `make test` is a measure too, and is not taken here.
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
LATER_PACKAGES = {"smt", "serving", "labs"}  # features that came later: not counted as code lines and files
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
    """Count the lines of a module by kind: code, documentation (docstrings and comments) and blank ones.

    A line with code and a comment counts as both, so kinds may add up to more than the total.
    """
    text = path.read_text(encoding="utf-8")
    lines: dict[str, set[int]] = {"code": set(), "doc": set()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines["doc"].update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    quiet = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
    docstrings = frozenset(lines["doc"])
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        span = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            lines["doc"].update(span)
        elif token.type not in quiet and not docstrings.issuperset(span):
            lines["code"].update(span)
    return Counter(total=text.count("\n"), code=len(lines["code"]), doc=len(lines["doc"]))


def imported_parts(path: Path) -> Iterator[str]:
    """Yield the first component below `dragoman` of everything that a module imports, wherever the import stands."""
    home = ["dragoman", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) + 1 - node.level] if node.level else []
            module = [*base, *(node.module or "").split(".")] if node.module else base
            names = [".".join([*module, alias.name]) for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("dragoman."))


def find_doubled_names(modules: list[Path]) -> list[str]:
    """Return public module-level functions, classes and constants that two or more modules define."""
    homes: Counter[str] = Counter()
    for path in modules:
        names = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
        homes.update(name for name in names if not name.startswith("_"))
    return sorted(name for name, count in homes.items() if count > 1)


def longest_chain(edges: set[tuple[str, str]]) -> int:
    """Return the number of packages on the longest chain of imports; a cycle is an error."""
    imported: dict[str, set[str]] = {}
    for importer, other in edges:
        imported.setdefault(importer, set()).add(other)
    level: dict[str, int] = {}
    for name in TopologicalSorter(imported).static_order():
        level[name] = 1 + max((level[other] for other in imported.get(name, ())), default=0)
    return max(level.values(), default=1)


def measure_source() -> dict[str, object]:
    """Measure what can be read off the source text."""
    modules = sorted(ROOT.rglob("*.py"))
    lines = sum(map(count_lines, modules), Counter[str]())
    compared = [path for path in modules if path.relative_to(ROOT).parts[0] not in LATER_PACKAGES]
    code = sum(count_lines(path)["code"] for path in compared)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    edges = {
        (path.relative_to(ROOT).parts[0], part)
        for path in modules
        for part in imported_parts(path)
        if path.relative_to(ROOT).parts[0] in packages and part in packages and path.relative_to(ROOT).parts[0] != part
    }
    doubled = find_doubled_names(modules)
    return {
        "code lines": code,
        "code lines against commit 31601d4": f"{code / CODE_LINES_BEFORE - 1:+.1%}",
        "docstrings and comments": f"{lines['doc'] / lines['total']:.1%}",
        "files": len(compared),
        "top-level modules": len(list(ROOT.glob("*.py"))),
        "packages": len(packages),
        "import edges between packages": len(edges),
        "levels of packages": longest_chain(edges),
        "names defined in two or more modules": len(doubled),
        "such names": doubled,
    }


def count_parses(folder: Path) -> dict[str, object]:
    """Train two steps, the second time into `folder` / "run", and count how often the model section is parsed.

    Each pydantic record of Dragoman gets a validator that sees it after it was parsed, by itself or inside another. It
    must be there before the record's class is made, so this comes before the first import of dragoman.
    """
    import pydantic
    from pydantic_core import CoreSchema, core_schema

    assert "dragoman" not in sys.modules
    parsed: dict[int, Any] = {}  # by identity: the validator also sees a record that is passed on as it is

    def see(record: Any) -> Any:
        parsed[id(record)] = record
        return record

    def make_schema(_: type[Any], source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_after_validator_function(see, handler(source))

    def watch(cls: type[Any], /, **_: Any) -> None:
        if cls.__module__.startswith("dragoman."):
            cls.__get_pydantic_core_schema__ = classmethod(make_schema)

    pydantic.BaseModel.__init_subclass__ = classmethod(watch)  # type: ignore[assignment]
    import dragoman

    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(cache=folder / "cache"), encoding="utf-8")
    counts = []
    for run in ("warm-up", "run"):  # the first one also imports modules, which may have records as defaults
        with redirect_stderr(io.StringIO()):
            dragoman.train(recipe, out=folder / run)
        counts.append(sum(getattr(record, "kind", "") == "transformer" for record in parsed.values()))
    return {"parses of the model section in train": counts[1] - counts[0]}


def follow_sentence(run: Path) -> dict[str, object]:
    """Count the functions and files that one line passes in a second `translate` of this process."""
    from dragoman.cli import main as cli

    line = "The old dog sees the small house."
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_qualname))

    for profile in (None, note):
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
    return {"functions for one sentence": len(seen), "files for one sentence": len({file for file, _ in seen})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="also train two steps and follow one sentence")
    parser.add_argument("--run", type=Path, help="a trained run folder to follow the sentence through")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measures = measure_source()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.train:
            measures |= count_parses(Path(folder))
        if arguments.train or arguments.run:
            measures |= follow_sentence(arguments.run or Path(folder) / "run")
    if arguments.json:
        print(json.dumps(measures))
        return
    for name, value in measures.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{name:40} {shown!s:10} {REQUIRED.get(name, '')}".rstrip())


if __name__ == "__main__":
    main()
