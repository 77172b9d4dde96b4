"""Messages about wrong settings: the errors that pydantic finds as sentences with key, value and remedy."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Tag

from dragoman.errors import UserError

TAG = "kind="  # how tags of the members of a discriminated union begin
EXPECTED = {  # by the type of error, where pydantic's own words would not do
    "model_type": "settings written as name: value",
    "dict_type": "settings written as name: value",
    "union_tag_not_found": "settings written as name: value",
    "missing": "set",
    "tuple_type": "a list",
    "too_long": "a list of {max_length}",
    "value_error": "{error}",
}
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def read_synonyms(kind: str) -> dict[str, str]:
    """Return our name for each name of a setting or a value in other toolkits and in papers (synonyms.tsv)."""
    text = Path(__file__).with_name("synonyms.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if line.startswith(kind)]
    return {theirs: ours for _, ours, names in rows for theirs in names.split()}


SETTING_SYNONYMS, VALUE_SYNONYMS = read_synonyms("setting"), read_synonyms("value")


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Return '; did you mean ...?' if one of the names means the same or is spelt alike, else nothing."""
    entries = [entry for entry in names if entry]
    synonym = VALUE_SYNONYMS.get(str(name).lower(), "")
    if name not in entries and synonym in entries:
        return f"; did you mean {synonym!r}?"
    found = difflib.get_close_matches(str(name), entries, 1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def describe_error(cls: type[BaseModel], errors: Any, where: str, line_of: Mapping[str, int]) -> str:
    """Return a sentence about the first of the errors that pydantic found in the settings of a record."""
    first = errors[0]
    if isinstance(error := first.get("ctx", {}).get("error"), UserError):
        return str(error)
    path = _path(first)
    key = ".".join([*([where] if where else []), *path])
    line = f" (line {line_of[key]})" if key in line_of else ""
    if first["type"] == "extra_forbidden":
        return _describe_unknown(cls, first["loc"], key, line)
    expected = []  # a union has an error per member
    for one in errors:
        if _path(one) == path:
            message = str(one["msg"]).removeprefix("Input should be ")
            template = EXPECTED.get(one["type"])
            expected.append(template.format(**one.get("ctx", {})) if template else message[:1].lower() + message[1:])
    return f"{key}{line}: should be {' or '.join(expected)}, got {shorten_value(first['input'])}"


def _describe_unknown(cls: type[BaseModel], location: Iterable[Any], key: str, line: str) -> str:
    """Return a sentence about a setting that does not exist.

    It suggests what other toolkits call a setting, then sections that have one of this name, then a similar spelling.
    """
    fields = {name: dict(_records(field.annotation)) for name, field in cls.model_fields.items()}
    sections = {name: list(found[""].model_fields) if "" in found else [] for name, found in fields.items() if found}
    record, tag, members = cls, "", dict[str, type[BaseModel]]()
    *parents, name = map(str, location)
    for parent in parents:  # keys, indices and tags
        if parent.startswith(TAG):
            record, tag = members[parent], tag or parent
        elif parent in record.model_fields:
            members = dict(_records(record.model_fields[parent].annotation))
            record = members.get("", record)
    section, names = key.rpartition(".")[0], list(record.model_fields)
    synonym = SETTING_SYNONYMS.get(name.lower().replace("-", "_"), "")
    home, _, setting = synonym.rpartition(".")
    homes = [f"{other}.{name}" for other, known in sections.items() if other != section and name in known]
    if setting and (setting in names if home in ("", section) else home in sections):
        homes = [synonym]
    meant = f"; did you mean {' or '.join(map(repr, homes))}?" if homes else suggest_name(name, names)
    of_kind = f"with {section}.{tag.partition('/')[0]} " if tag else ""  # another kind may have the setting
    return f"{of_kind}there is no setting {key!r}{line}{meant} (there are: {', '.join(names)})"


def _path(error: Any) -> list[str]:
    """Return the keys that lead to an error, without what pydantic adds for unions and validators."""
    *parents, last = [str(part) for part in error["loc"]] or [""]
    marks = ("literal[", "function-", "bool", "tuple[", TAG)
    kept = [part for part in parents if not part.startswith(marks)]
    return [*kept, last] if error["type"] == "extra_forbidden" or not last.startswith(marks) else kept


def _records(kind: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the records in the type of a field, each with its tag if the type is a discriminated union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield "", kind
    elif tags := [note.tag for note in getattr(kind, "__metadata__", ()) if isinstance(note, Tag)]:
        yield tags[0], get_args(kind)[0]
    else:
        for inner in get_args(kind):
            yield from _records(inner)


def shorten_value(value: Any) -> str:
    """Return a value as text that is short enough for a message."""
    return _SHORT.repr(value)
