"""What is wrong with settings, as a sentence: from the faults that pydantic finds, the key, the value, the remedy."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel


def near(name: str, menu: Iterable[str]) -> str:
    """'; did you mean ...?' when a name on the menu is close, else nothing."""
    found = difflib.get_close_matches(str(name), list(menu), 1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def sentence(cls: type[BaseModel], faults: Any, where: str, line_of: Mapping[str, int]) -> str:
    fault = faults[0]
    path = _path(fault)
    key = ".".join([*([where] if where else []), *path])
    line = f" (line {line_of[key]})" if key in line_of else ""
    if fault["type"] == "extra_forbidden":
        menu = _record_at(cls, path[:-1]).model_fields
        return f"there is no setting {key!r}{line}{near(path[-1], menu)} (there are: {', '.join(menu)})"
    wanted = " or ".join(_wanted(other) for other in faults if _path(other) == path)  # a union has a fault per member
    return f"{key}{line}: should be {wanted}, got {short(fault['input'])}"


def _path(fault: Any) -> list[str]:
    """The keys that lead to a fault, without the marks that pydantic leaves of unions and validators."""
    *parents, last = [str(part) for part in fault["loc"]] or [""]
    marks = ("literal[", "function-", "bool", "tuple[")
    kept = [part for part in parents if not part.startswith(marks)]
    unknown = fault["type"] == "extra_forbidden"
    return [*kept, last] if unknown or not last.startswith(marks) else kept


WANTED = {  # by the kind of fault, where pydantic's own words would not do
    "model_type": "settings written as name: value",
    "dict_type": "settings written as name: value",
    "missing": "set",
    "tuple_type": "a list",
    "too_long": "a list of {max_length}",
}


def _wanted(fault: Any) -> str:
    if fault["type"] in WANTED:
        return WANTED[fault["type"]].format(**fault.get("ctx", {}))
    message: str = fault["msg"]
    return message.removeprefix("Input should be ")[:1].lower() + message.removeprefix("Input should be ")[1:]


def short(value: Any) -> str:
    """A value as a sentence can hold it."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def _record_at(cls: type[BaseModel], path: list[str]) -> type[BaseModel]:
    for name in path:
        if name.isdigit():
            continue
        kind: Any = cls.model_fields[name].annotation
        for inner in (kind, *getattr(kind, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                cls = inner
    return cls
