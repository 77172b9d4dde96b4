"""The settings reference: every setting with its default, choices and description, as `dragoman settings` prints it.

The reference is read from settings.json, because importing the settings classes of models would import PyTorch, which
takes seconds. `python -m dragoman.cli.settings` writes that file from the settings classes, and a test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.config.settings import SETTING_SYNONYMS, format_yaml, pick, suggest_name
from dragoman.errors import UserError

FILE = Path(__file__).with_name("settings.json")
CORPUS = "corpus"  # the section of the settings that each corpus of data.train, data.dev and data.test has
COLUMN = 32  # the column in which comments begin
Reference = dict[str, list["Setting"]]  # settings by kind of model, such as transformer or lm/rnn


class Setting(NamedTuple):
    """A setting in the reference."""

    section: str
    name: str
    default: Any
    choices: list[str]
    meaning: str

    @property
    def path(self) -> str:
        """The full name of the setting in a recipe. For a setting of a corpus, it is that in data.train."""
        return f"data.train.{self.name}" if self.section == CORPUS else f"{self.section}.{self.name}"

    def row(self) -> str:
        """Return the setting as a line of a recipe, with choices and meaning as a comment."""
        indent = "  #   " if self.section == CORPUS else "  "
        on_one_line = isinstance(self.default, list | dict)
        text = f"{self.name}: {json.dumps(self.default)}" if on_one_line else format_yaml({self.name: self.default})
        comment = "; ".join(part for part in (" | ".join(self.choices), self.meaning) if part)
        line = f"{indent}{text.strip()}"
        return f"{line.ljust(COLUMN)}  # {comment}" if comment else line

    def record(self) -> dict[str, Any]:
        """Return the setting as `dragoman settings --json` prints it."""
        about = {"default": self.default, "choices": self.choices, "description": self.meaning}
        return {"name": self.path, "section": self.section, **about}


def load_reference() -> Reference:
    """Read settings.json. It lists each setting once, and for each kind of model the indices of its settings."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    rows = [Setting(*row) for row in content["rows"]]
    return {kind: [rows[index] for index in indices] for kind, indices in content["kinds"].items()}


def save_reference(reference: Reference) -> None:
    """Write settings.json with one setting per line, so that diffs are easy to read."""
    rows_of = {kind: [json.dumps(row, ensure_ascii=False) for row in rows] for kind, rows in reference.items()}
    rows = list(dict.fromkeys(row for some in rows_of.values() for row in some))
    index_of = {row: index for index, row in enumerate(rows)}
    kinds = [f"  {json.dumps(kind)}: {json.dumps([index_of[row] for row in some])}" for kind, some in rows_of.items()]
    lines = ['{"rows": [', ",\n".join(f"  {row}" for row in rows), '], "kinds": {', ",\n".join(kinds), "}}"]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_kind(reference: Reference, model: dict[str, str]) -> str:
    """Return the kind of model in the reference, such as lm/rnn, for the settings `kind` and `backbone` of a model."""
    kind = model.get("kind", "transformer")
    pick({name.partition("/")[0]: None for name in reference}, kind, "model.kind")
    if kind in reference:
        return kind
    backbones = {name.partition("/")[2]: name for name in reference if name.startswith(f"{kind}/")}
    return pick(backbones, model.get("backbone", "transformer"), "model.backbone")


def find_settings(reference: Reference, kind: str, words: Sequence[str]) -> Reference:
    """Return the settings of this kind of model that match one of the words; all its settings if there are no words.

    A word matches a section, a setting with or without its section, the name of a setting in another toolkit, or a part
    of a name or description. If a word matches no setting of this kind of model, the other kinds are searched.
    """
    if not words:
        return {kind: reference[kind]}
    found: dict[str, set[str]] = {}
    for word in words:
        for each, matches in [(each, matches) for matches in make_matchers(word) for each in (kind, *reference)]:
            if paths := {row.path for row in reference[each] if matches(row)}:
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
    """Yield functions that return whether a word matches a setting, the strictest first."""
    synonym, lower = SETTING_SYNONYMS.get(word.replace("-", "_"), ""), word.lower()
    yield lambda row: word == row.section or (word == "data" and row.section == CORPUS)
    yield lambda row: word in (row.name, row.path)
    yield lambda row: bool(synonym) and synonym in (row.name, row.path)
    yield lambda row: lower in row.path.lower()
    yield lambda row: lower in row.choices or lower in row.meaning.lower()


def render_settings(found: Reference, kind: str) -> str:
    """Return settings as a recipe. Settings of other kinds of model follow a line that names the kind."""
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
