"""The settings reference: every setting with its default, choices and description, as `dragoman settings` prints it.

The reference is read from settings.json, because importing the settings classes of models would import PyTorch, which
takes seconds. `python -m dragoman.cli.settings` writes that file from the settings classes, and a test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.config.settings import SETTING_SYNONYMS, format_yaml, get_entry, suggest_name
from dragoman.errors import UserError

REFERENCE_FILE = Path(__file__).with_name("settings.json")
CORPUS = "corpus"  # the section of the settings that each corpus of data.train, data.dev and data.test has
COMMENT_COLUMN = 32  # where comments begin in a rendered line
Reference = dict[str, list["Setting"]]  # settings by kind of model and backbone, such as transformer or lm/rnn


class Setting(NamedTuple):
    """A setting in the reference."""

    section: str
    name: str
    default: Any
    choices: list[str]
    description: str

    @property
    def path(self) -> str:
        """The full name of the setting in a recipe. The settings of a corpus are listed under data.train."""
        return f"data.train.{self.name}" if self.section == CORPUS else f"{self.section}.{self.name}"

    def render(self) -> str:
        """Return the setting as a line of a recipe, with choices and description as a comment."""
        *parents, name = self.name.split(".")
        # A corpus is an item of a list, so its settings are shown as comments.
        indent = "  #   " if self.section == CORPUS else "  " + "  " * len(parents)
        on_one_line = isinstance(self.default, list | dict)
        text = f"{name}: {json.dumps(self.default)}" if on_one_line else format_yaml({name: self.default})
        comment = "; ".join(part for part in (" | ".join(self.choices), self.description) if part)
        line = f"{indent}{text.strip()}"
        return f"{line.ljust(COMMENT_COLUMN)}  # {comment}" if comment else line

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as `dragoman settings --json` prints it."""
        values = {"default": self.default, "choices": self.choices, "description": self.description}
        return {"name": self.path, "section": self.section, **values}


def load_settings_reference() -> Reference:
    """Read settings.json. It lists each setting once, and for each kind of model the indices of its settings."""
    content = json.loads(REFERENCE_FILE.read_text(encoding="utf-8"))
    settings = [Setting(*row) for row in content["rows"]]
    return {kind: [settings[index] for index in indices] for kind, indices in content["kinds"].items()}


def save_reference(reference: Reference) -> None:
    """Write settings.json with one setting per line, so that diffs are easy to read."""
    rows_by_kind = {kind: [json.dumps(row, ensure_ascii=False) for row in rows] for kind, rows in reference.items()}
    all_rows = list(dict.fromkeys(row for rows in rows_by_kind.values() for row in rows))
    index_of = {row: index for index, row in enumerate(all_rows)}
    indices = {kind: json.dumps([index_of[row] for row in rows]) for kind, rows in rows_by_kind.items()}
    kinds = [f"  {json.dumps(kind)}: {listed}" for kind, listed in indices.items()]
    lines = ['{"rows": [', ",\n".join(f"  {row}" for row in all_rows), '], "kinds": {', ",\n".join(kinds), "}}"]
    REFERENCE_FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_kind(reference: Reference, model: dict[str, str]) -> str:
    """Return the kind of model in the reference, such as lm/rnn, for the settings `kind` and `backbone` of a model."""
    kind = model.get("kind", "transformer")
    get_entry({name.partition("/")[0]: None for name in reference}, kind, "model.kind")
    if kind in reference:
        return kind
    backbones = {name.partition("/")[2]: name for name in reference if name.startswith(f"{kind}/")}
    return get_entry(backbones, model.get("backbone", "transformer"), "model.backbone")


def find_settings(reference: Reference, kind: str, words: Sequence[str]) -> Reference:
    """Return the settings of this kind of model that match one of the words; all its settings if there are no words.

    A word matches a section, a setting with or without its section, the name of a setting in another toolkit, or a part
    of a name or description. If a word matches no setting of this kind of model, the other kinds are searched. A word
    that is the name of a setting also finds those of other kinds with this name and other choices, as `attention` does.
    """
    if not words:
        return {kind: reference[kind]}
    found: dict[str, set[str]] = {}
    for word in words:
        for searched, path in find_choices(reference, kind, word).items():
            found.setdefault(searched, set()).add(path)
        # A stricter match in another kind of model takes precedence over a less strict one in this kind.
        for matches, searched in product(make_matchers(word), (kind, *reference)):
            if paths := {setting.path for setting in reference[searched] if matches(setting)}:
                found.setdefault(searched, set()).update(paths)
                break
        else:
            names = [name for setting in reference[kind] for name in (setting.section, setting.name, setting.path)]
            raise UserError(
                f"no section, setting or description contains {word!r}{suggest_name(word, dict.fromkeys(names))} "
                f"(sections: {', '.join(dict.fromkeys(setting.section for setting in reference[kind]))})"
            )
    return {name: [setting for setting in reference[name] if setting.path in paths] for name, paths in found.items()}


def find_choices(reference: Reference, kind: str, name: str) -> dict[str, str]:
    """Return the kinds of model whose setting of this name has choices unlike those before, with its path."""
    known: list[list[str]] = []
    found = {}
    for searched in (kind, *reference):
        for setting in reference[searched]:
            if name in (setting.name, setting.path) and setting.choices and setting.choices not in known:
                known.append(setting.choices)
                found[searched] = setting.path
    return found


def make_matchers(word: str) -> Iterable[Callable[[Setting], bool]]:
    """Yield functions that return whether a word matches a setting, the strictest first."""
    synonym, lower = SETTING_SYNONYMS.get(word.replace("-", "_"), ""), word.lower()
    yield lambda setting: word == setting.section or (word == "data" and setting.section == CORPUS)
    yield lambda setting: word in (setting.name, setting.path, setting.name.rpartition(".")[2])
    yield lambda setting: bool(synonym) and synonym in (setting.name, setting.path)
    yield lambda setting: lower in setting.path.lower()
    yield lambda setting: lower in setting.choices or lower in setting.description.lower()


def render_settings(found: Reference, kind: str) -> str:
    """Return settings as a recipe. Settings of other kinds of model follow a line that names the kind."""
    lines: list[str] = []
    for found_kind, settings in found.items():
        if found_kind != kind:
            name, _, backbone = found_kind.partition("/")
            lines.append(f"# with model.kind={name}" + (f" and model.backbone={backbone}" if backbone else "") + ":")
        section = parent = ""  # of the previous setting
        for setting in settings:
            if setting.section == CORPUS and section != CORPUS:
                lines += [] if section == "data" else ["data:"]
                lines.append("  # each corpus of train, dev and test:")
            elif setting.section != section:
                lines.append(f"{setting.section}:")
            new_parent = setting.name.rpartition(".")[0]  # of align.ibm1: align
            if new_parent and (setting.section, new_parent) != (section, parent):
                lines.append(f"  {new_parent}:")
            section, parent = setting.section, new_parent
            lines.append(setting.render())
    return "\n".join(lines) + "\n"
