"""The settings reference: every setting with its default, what else it may be and what it means.

It is read from settings.json, so that `dragoman settings` does not wait for PyTorch. `python -m dragoman.cli.settings`
writes that file from the settings themselves, and a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.config.settings import SETTING_SYNONYMS, format_yaml, pick, suggest_name
from dragoman.errors import UserError

FILE = Path(__file__).with_name("settings.json")
CORPUS = "corpus"  # the section of those settings that each corpus of data.train, data.dev and data.test has
COLUMN = 32  # where comments begin
Reference = dict[str, list["Setting"]]  # by kind of model, such as transformer or lm/rnn


class Setting(NamedTuple):
    section: str
    name: str
    default: Any
    choices: list[str]
    meaning: str

    @property
    def path(self) -> str:
        """Return the name that a recipe knows it by; a setting of a corpus stands for those of all splits."""
        return f"data.train.{self.name}" if self.section == CORPUS else f"{self.section}.{self.name}"

    def row(self) -> str:
        """Return the setting as a line of a recipe, with choices and meaning as a comment."""
        indent = "  #   " if self.section == CORPUS else "  "
        listed = isinstance(self.default, list | dict)
        written = (
            f"{self.name}: {json.dumps(self.default)}" if listed else format_yaml({self.name: self.default}).strip()
        )
        comment = "; ".join(part for part in (" | ".join(self.choices), self.meaning) if part)
        return f"{indent}{written}".ljust(COLUMN) + f"  # {comment}" if comment else f"{indent}{written}"

    def record(self) -> dict[str, Any]:
        """Return what --json prints of it."""
        about = {"default": self.default, "choices": self.choices, "description": self.meaning}
        return {"name": self.path, "section": self.section, **about}


def load_reference() -> Reference:
    """Read settings.json: rows that are listed once, and the numbers of those that each kind of model has."""
    held = json.loads(FILE.read_text(encoding="utf-8"))
    rows = [Setting(*row) for row in held["rows"]]
    return {kind: [rows[number] for number in numbers] for kind, numbers in held["kinds"].items()}


def save_reference(reference: Reference) -> None:
    """Write settings.json with one row a line, so that changes are easy to see."""
    rows = list(dict.fromkeys(json.dumps(row, ensure_ascii=False) for some in reference.values() for row in some))
    number = {row: i for i, row in enumerate(rows)}
    kinds = [
        f"  {json.dumps(kind)}: {json.dumps([number[json.dumps(row, ensure_ascii=False)] for row in some])}"
        for kind, some in reference.items()
    ]
    lines = ['{"rows": [', ",\n".join(f"  {row}" for row in rows), '], "kinds": {', ",\n".join(kinds), "}}"]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_kind(reference: Reference, model: dict[str, str]) -> str:
    """Return the name in the reference of a kind of model, given as `kind` and `backbone`."""
    kind = model.get("kind", "transformer")
    pick({name.partition("/")[0]: None for name in reference}, kind, "model.kind")
    if kind in reference:
        return kind
    backbones = {name.partition("/")[2]: name for name in reference if name.startswith(f"{kind}/")}
    return pick(backbones, model.get("backbone", "transformer"), "model.backbone")


def find_settings(reference: Reference, kind: str, words: Sequence[str]) -> Reference:
    """Return the settings that words ask for, all of them without words, by the kinds of model that have them.

    A word is a section, a setting with or without its section, what another toolkit calls one, or a word in a name or
    a description. Other kinds of model than the one wanted count only where that one has nothing of the sort.
    """
    if not words:
        return {kind: reference[kind]}
    found: dict[str, set[str]] = {}
    for word in words:
        for each, fits in [(each, fits) for fits in make_matchers(word) for each in (kind, *reference)]:
            if paths := {row.path for row in reference[each] if fits(row)}:
                found.setdefault(each, set()).update(paths)
                break
        else:
            names = [name for row in reference[kind] for name in (row.section, row.name, row.path)]
            raise UserError(
                f"no section, setting or description has {word!r}{suggest_name(word, dict.fromkeys(names))} "
                f"(sections: {', '.join(dict.fromkeys(row.section for row in reference[kind]))})"
            )
    return {each: [row for row in reference[each] if row.path in paths] for each, paths in found.items()}


def make_matchers(word: str) -> Iterable[Callable[[Setting], bool]]:
    """Yield what a word may mean, the most exact meaning first."""
    synonym, low = SETTING_SYNONYMS.get(word.replace("-", "_"), ""), word.lower()
    yield lambda row: word == row.section or (word == "data" and row.section == CORPUS)
    yield lambda row: word in (row.name, row.path)
    yield lambda row: bool(synonym) and synonym in (row.name, row.path)
    yield lambda row: low in row.path.lower()
    yield lambda row: low in row.choices or low in row.meaning.lower()


def render_settings(found: Reference, kind: str) -> str:
    """Return settings as a recipe. Those that another kind of model has come after a line that names it."""
    lines: list[str] = []
    for each, settings in found.items():
        if each != kind:
            name, _, backbone = each.partition("/")
            lines.append(f"# with model.kind={name}" + (f" and model.backbone={backbone}" if backbone else "") + ":")
        section = ""
        for setting in settings:
            if setting.section == CORPUS and section != CORPUS:
                lines += [] if section == "data" else ["data:"]
                lines.append("  # each corpus of train, dev and test:")
            elif setting.section != section:
                lines.append(f"{setting.section}:")
            section = setting.section
            lines.append(setting.row())
    return "\n".join(lines) + "\n"
