"""Write the results of bench/quality.py into docs/recipes.md and into the comments of recipes.

    python bench/publish_results.py

Reads bench/results/*-quality-*.json. In the page, tables are written between two HTML comments; in a recipe, the line
that starts with `# measured:` is replaced.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
RECIPES = ROOT / "recipes" / "translation"
MEASURED = re.compile(r"^# measured: .*$", flags=re.MULTILINE)

Result = dict[str, Any]


def hash_recipe(recipe: Path) -> str:
    """Return a digest of a recipe without its comments."""
    lines = [line for line in recipe.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def read_results(folder: Path) -> list[Result]:
    """Return all results, sorted by recipe; within a recipe those without changed settings first, then the newest."""
    paths = sorted(folder.glob("*-quality-*.json"), reverse=True)
    results = [{**json.loads(path.read_text(encoding="utf-8")), "file": path.name} for path in paths]
    return sorted(results, key=lambda result: (result["recipe"], result["settings"] != []))


def select_metrics(test: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics among the entries of a test."""
    return {name: entry for name, entry in test.items() if isinstance(entry, dict)}


def format_score(metric: dict[str, Any]) -> str:
    several = len(metric["values"]) > 1
    return f"{metric['mean']:.2f}" + (f" ({metric['min']:.2f} to {metric['max']:.2f})" if several else "")


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else "Nothing was measured yet."


def format_scores(results: Sequence[Result]) -> str:
    """Return a table with a row per result and test. Results in the table of methods are left out."""
    heads = ("recipe", "changed", "test", "scores", "seeds", "pairs", "parameters", "minutes", "machine")
    return format_table(
        heads, [row for result in results if not find_unchanged(result, results) for row in score_rows(result)]
    )


def score_rows(result: Result) -> Iterator[list[str]]:
    about = [f"{len(result['seeds'])}", f"{result['pairs']:,}", f"{result['parameters']:,}"]
    about += [f"{result['train_minutes']['mean']:.1f}", result["machine"]]
    for test in result["tests"]:
        scores = "; ".join(f"{name} {format_score(metric)}" for name, metric in select_metrics(test).items())
        yield [link_result(result), list_changes(result), test["test"], scores, *about]


def link_result(result: Result) -> str:
    return f"[`{Path(result['recipe']).stem}`](../bench/results/{result['file']})"


def list_changes(result: Result) -> str:
    """Return how the measured recipe differs from the current one."""
    path = ROOT / result["recipe"]
    old = not path.exists() or hash_recipe(path) != result["digest"]
    return ", ".join(["an earlier version"] * old + [f"`{setting}`" for setting in result["settings"]])


def format_methods(results: Sequence[Result]) -> str:
    """Return a table of changed settings: the first metric of every test, and the difference to the recipe."""
    rows = []
    for result in results:
        plain = find_unchanged(result, results)
        if plain is None:
            continue
        pairs = list(zip(first_metrics(result), first_metrics(plain), strict=True))
        now = " / ".join(f"{changed['mean']:.2f}" for changed, _ in pairs)
        gain = " / ".join(f"{changed['mean'] - base['mean']:+.2f}" for changed, base in pairs)
        rows.append([link_result(result), list_changes(result), now, gain, f"{len(result['seeds'])}"])
    return format_table(("recipe", "changed", "scores", "against the recipe as it stands", "seeds"), rows)


def find_unchanged(result: Result, results: Sequence[Result]) -> Result | None:
    """Return the result of the same recipe and number of pairs without the changed settings of `result`, if any."""
    same = [each for each in results if all(each[name] == result[name] for name in ("recipe", "digest", "pairs"))]
    return next((each for each in same if not each["settings"]), None) if result["settings"] else None


def first_metrics(result: Result) -> list[dict[str, Any]]:
    return [next(iter(select_metrics(test).values())) for test in result["tests"]]


def format_times(results: Sequence[Result]) -> str:
    """Return a table of the minutes of training until a score was reached, for each seed."""
    rows = []
    for result in results:
        for goal, times in result.get("reached", {}).items():
            minutes = ", ".join("never" if each is None else f"{each:.2f}" for each in times)
            name, test = next(iter(select_metrics(result["tests"][0]))), result["tests"][0]["test"]
            rows.append(
                [link_result(result), list_changes(result), f"{name} {goal} on {test}", minutes, result["machine"]]
            )
    return format_table(("recipe", "changed", "score", "minutes", "machine"), rows)


def format_comment(recipe: Path, results: Sequence[Result]) -> str:
    """Return the `# measured:` line of a recipe; results of earlier versions of the recipe are ignored."""
    own = [each for each in results if each["recipe"] == str(recipe.relative_to(ROOT))]
    result = next((each for each in own if each["digest"] == hash_recipe(recipe)), None)
    if result is None:
        return "# measured: not yet"
    names = list(select_metrics(result["tests"][0]))
    scores = "; ".join(
        f"{name} " + " / ".join(f"{test[name]['mean']:.2f}" for test in result["tests"]) for name in names
    )
    seeds = f"mean of {len(result['seeds'])} seeds" if len(result["seeds"]) > 1 else "one seed"
    how = f"{seeds}, {result['pairs']:,} pairs, {result['train_minutes']['mean']:.1f} minutes on {result['machine']}"
    other = f", with {' '.join(result['settings'])}" if result["settings"] else ""
    return f"# measured: {scores} ({how}{other}; bench/results/{result['file']})"


def update_page(text: str, results: Sequence[Result]) -> str:
    """Return the text of the page with new tables."""
    for name, format_part in (("scores", format_scores), ("methods", format_methods), ("reached", format_times)):
        begin, end = f"<!-- {name}: by bench/publish_results.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{format_part(results)}\n{end}{rest.split(end)[1]}"
    return text


def update_files(results: Sequence[Result]) -> Iterator[tuple[Path, str]]:
    """Yield every file that contains results, with its new text."""
    yield PAGE, update_page(PAGE.read_text(encoding="utf-8"), results)
    for path in sorted(RECIPES.glob("*.yaml")):
        line = format_comment(path, results)
        yield path, MEASURED.sub(line.replace("\\", r"\\"), path.read_text(encoding="utf-8"), count=1)


def main() -> None:
    for path, text in update_files(read_results(ROOT / "bench" / "results")):
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
