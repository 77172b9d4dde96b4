"""Puts what bench/quality.py found into docs/recipes.md and the heads of recipes, so that no figure is typed by hand.

    python bench/tell.py

It reads bench/results/*-quality-*.json. In the page a table stands between two marks; in a recipe what was measured is
the line that begins with `# measured:`.
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


def digest(recipe: Path) -> str:
    """Of what a recipe asks for: all its lines but those that are comments."""
    lines = [line for line in recipe.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def results(folder: Path) -> list[Result]:
    """All that was found, by recipe; first the recipe as it stands, then with settings changed; the newest first
    (of one day, the last by name)."""
    paths = sorted(folder.glob("*-quality-*.json"), reverse=True)
    found = [{**json.loads(path.read_text(encoding="utf-8")), "file": path.name} for path in paths]
    return sorted(found, key=lambda one: (one["recipe"], one["settings"] != []))


def metrics_of(test: dict[str, Any]) -> dict[str, Any]:
    return {name: held for name, held in test.items() if isinstance(held, dict)}


def score(held: dict[str, Any]) -> str:
    many = len(held["values"]) > 1
    return f"{held['mean']:.2f}" + (f" ({held['min']:.2f} to {held['max']:.2f})" if many else "")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else "Nothing was measured yet."


def scores(found: Sequence[Result]) -> str:
    """A row for each result and test, but for those of changed settings that stand in the table of methods."""
    heads = ("recipe", "changed", "test", "scores", "seeds", "pairs", "parameters", "minutes", "machine")
    return table(heads, [row for one in found if not as_it_stands(one, found) for row in score_rows(one)])


def score_rows(one: Result) -> Iterator[list[str]]:
    about = [f"{len(one['seeds'])}", f"{one['pairs']:,}", f"{one['parameters']:,}"]
    about += [f"{one['train_minutes']['mean']:.1f}", one["machine"]]
    for test in one["tests"]:
        told = "; ".join(f"{name} {score(held)}" for name, held in metrics_of(test).items())
        yield [linked(one), changed(one), test["test"], told, *about]


def linked(one: Result) -> str:
    return f"[`{Path(one['recipe']).stem}`](../bench/results/{one['file']})"


def changed(one: Result) -> str:
    """What was not as the recipe has it now."""
    path = ROOT / one["recipe"]
    old = not path.exists() or digest(path) != one["digest"]
    return ", ".join(["an earlier version"] * old + [f"`{setting}`" for setting in one["settings"]])


def methods(found: Sequence[Result]) -> str:
    """What each changed setting brought: the first metric of every test, against the recipe as it stands."""
    rows = []
    for one in found:
        plain = as_it_stands(one, found)
        if plain is None:
            continue
        pairs = list(zip(first_metrics(one), first_metrics(plain), strict=True))
        now = " / ".join(f"{mine['mean']:.2f}" for mine, _ in pairs)
        gain = " / ".join(f"{mine['mean'] - theirs['mean']:+.2f}" for mine, theirs in pairs)
        rows.append([linked(one), changed(one), now, gain, f"{len(one['seeds'])}"])
    return table(("recipe", "changed", "scores", "against the recipe as it stands", "seeds"), rows)


def as_it_stands(one: Result, found: Sequence[Result]) -> Result | None:
    """Of a result with changed settings the one of the same recipe, on the same number of pairs, without them."""
    same = [each for each in found if all(each[name] == one[name] for name in ("recipe", "digest", "pairs"))]
    return next((each for each in same if not each["settings"]), None) if one["settings"] else None


def first_metrics(one: Result) -> list[dict[str, Any]]:
    return [next(iter(metrics_of(test).values())) for test in one["tests"]]


def reached(found: Sequence[Result]) -> str:
    """Minutes of training until a score, seed by seed."""
    rows = []
    for one in found:
        for goal, times in one.get("reached", {}).items():
            told = ", ".join("never" if each is None else f"{each:.2f}" for each in times)
            name, test = next(iter(metrics_of(one["tests"][0]))), one["tests"][0]["test"]
            rows.append([linked(one), changed(one), f"{name} {goal} on {test}", told, one["machine"]])
    return table(("recipe", "changed", "score", "minutes", "machine"), rows)


def measured(recipe: Path, found: Sequence[Result]) -> str:
    """The line for the head of a recipe. What an earlier version of it scored says little of this one."""
    own = [each for each in found if each["recipe"] == str(recipe.relative_to(ROOT))]
    one = next((each for each in own if each["digest"] == digest(recipe)), None)
    if one is None:
        return "# measured: not yet"
    names = list(metrics_of(one["tests"][0]))
    told = "; ".join(f"{name} " + " / ".join(f"{test[name]['mean']:.2f}" for test in one["tests"]) for name in names)
    seeds = f"mean of {len(one['seeds'])} seeds" if len(one["seeds"]) > 1 else "one seed"
    how = f"{seeds}, {one['pairs']:,} pairs, {one['train_minutes']['mean']:.1f} minutes on {one['machine']}"
    other = f", with {' '.join(one['settings'])}" if one["settings"] else ""
    return f"# measured: {told} ({how}{other}; bench/results/{one['file']})"


def page(text: str, found: Sequence[Result]) -> str:
    for name, made in (("scores", scores), ("methods", methods), ("reached", reached)):
        begin, end = f"<!-- {name}: by bench/tell.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{made(found)}\n{end}{rest.split(end)[1]}"
    return text


def told(found: Sequence[Result]) -> Iterator[tuple[Path, str]]:
    """Every file that speaks of results, and what it should say."""
    yield PAGE, page(PAGE.read_text(encoding="utf-8"), found)
    for path in sorted(RECIPES.glob("*.yaml")):
        line = measured(path, found)
        yield path, MEASURED.sub(line.replace("\\", r"\\"), path.read_text(encoding="utf-8"), count=1)


def main() -> None:
    for path, text in told(results(ROOT / "bench" / "results")):
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
