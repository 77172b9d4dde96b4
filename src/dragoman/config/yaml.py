"""YAML without the surprises of YAML 1.1: 1e-3 is a number; 1:30, no, on and 2026-01-01 are text.

A key stands once, and what is wrong is said with its line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from dragoman.errors import UserError


class _Loader(yaml.SafeLoader):
    """Reads plain scalars as the core schema of YAML 1.2 does, with two exceptions.

    0b101 and 1_000 are numbers, as in YAML 1.1. What begins with a zero, such as 010 and 0o17, is text: YAML 1.1 and
    1.2 read 010 as different numbers, and labels such as 007 are text.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML copies it before adding to it


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that YAML 1.1 or `_Loader` would read otherwise, and escapes the rarer ends of lines."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if set(text) & set("\x85\u2028\u2029") else None
    ),
)
_EXPONENT = r"[eE][-+]?[0-9]+"
_PLAIN = {  # what a scalar without quotes is, and the characters that it may begin with
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)", [*"-+0123456789"]),
    "float": (
        rf"[-+]?([0-9][0-9_]*\.[0-9_]*({_EXPONENT})?|[0-9][0-9_]*{_EXPONENT}|\.[0-9][0-9_]*({_EXPONENT})?)"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "merge": (r"<<", ["<"]),
}
for _name, (_pattern, _first) in _PLAIN.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^({_pattern})$"), _first)


def parse_yaml(text: str, name: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        culprit = repr(chr(error.character))
        raise UserError(f"{name} line {line} is not valid YAML: it holds the character {culprit}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{name}{where} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise UserError(f"{name} is not valid YAML: it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError) as error:  # a value that is not what its form or tag says
        raise UserError(f"{name} is not valid YAML: it holds a value that cannot be read ({error})") from None


def lines_of_keys(text: str) -> dict[str, int]:
    """The line on which each key stands, so that a complaint can point at it. A key that stands twice is refused."""
    found: dict[str, int] = {}
    seen: set[int] = set()  # an alias leads back to a node, maybe to one that it stands in

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name, line = f"{prefix}{key.value}", key.start_mark.line + 1
                if name in found:
                    raise UserError(f"{name!r} is set twice, on lines {found[name]} and {line}; keep one of them")
                found[name] = line
                walk(value, name + ".")
        else:
            for i, value in enumerate(node.value):
                walk(value, f"{prefix}{i}.")

    walk(yaml.compose(text, Loader=_Loader), "")
    return found


def read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no {what} file {str(path)!r}") from None
    except IsADirectoryError:
        raise UserError(f"{str(path)!r} is a folder, but a {what} file is wanted") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{str(path)!r} is not UTF-8 text (line {line}), so it cannot be a {what} file") from None
    except OSError as error:
        raise UserError(f"the {what} file {str(path)!r} cannot be read: {error.strerror}") from None


def as_yaml(values: dict[str, Any]) -> str:
    """Text from which `parse_yaml` makes the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
