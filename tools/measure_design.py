"""Print the measures of the design that we watch: size, packages, imports, doubled names, hops, documentation.

python tools/measure_design.py                 what the source text tells, in a second
python tools/measure_design.py --run RUN       also follow one sentence through `dragoman translate RUN --engine torch`
python tools/measure_design.py --json          for programs
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1] / "src" / "dragoman"


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
    """Return the number of packages on the longest chain of imports; the graph has no cycle."""
    below: dict[str, set[str]] = {}
    for one, other in edges:
        below.setdefault(one, set()).add(other)

    def depth(name: str) -> int:
        return 1 + max(map(depth, below.get(name, ())), default=0)

    return max(map(depth, below), default=1)


def measure_source() -> dict[str, object]:
    """Measure what can be read off the source text."""
    modules = sorted(ROOT.rglob("*.py"))
    lines = sum(map(count_lines, modules), Counter())
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    edges = {
        (path.relative_to(ROOT).parts[0], part)
        for path in modules
        for part in imported_parts(path)
        if path.relative_to(ROOT).parts[0] in packages and part in packages and path.relative_to(ROOT).parts[0] != part
    }
    doubled = find_doubled_names(modules)
    return {
        "code lines": lines["code"],
        "docstrings and comments": f"{lines['doc'] / lines['total']:.1%}",
        "files": len(modules),
        "top-level modules": len(list(ROOT.glob("*.py"))),
        "packages": len(packages),
        "import edges between packages": len(edges),
        "levels of packages": longest_chain(edges),
        "names defined in two or more modules": len(doubled),
        "such names": doubled,
    }


def follow_sentence(run: Path) -> dict[str, object]:
    """Count the functions and files that one line passes in a second `translate` of this process."""
    from dragoman import cli

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
    parser.add_argument("--run", type=Path, help="a trained run folder to follow one sentence through")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measures = measure_source() | (follow_sentence(arguments.run) if arguments.run else {})
    if arguments.json:
        print(json.dumps(measures))
        return
    for name, value in measures.items():
        print(f"{name:40} {', '.join(value) if isinstance(value, list) else value}")


if __name__ == "__main__":
    main()
