"""`dragoman settings`: every setting with its default, what else it may be and what it means, as a recipe in YAML.

Nothing is listed here: defaults and meanings are read from the settings' own records, names from the menus.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from dragoman.answers.hypotheses import UNKNOWN
from dragoman.config import CorpusSettings, Menus, Recipe, Settings, build, override, pick
from dragoman.models.build import MODELS, kind_of, settings_of
from dragoman.score.metrics import fitting
from dragoman.search.methods import MENUS as SEARCH
from dragoman.text.phrasebook import DIRECTIONS
from dragoman.text.tokenizer import TOKENIZERS
from dragoman.train.consistency import CONSISTENCY
from dragoman.train.loss import LOSSES
from dragoman.train.optim import OPTIMIZERS, SCHEDULES
from dragoman.train.parallel import PARALLEL
from dragoman.yaml_text import as_yaml

COMMENT = re.compile(r"^    (\w+): .*  # (?!type:|noqa)(.+)$", re.MULTILINE)  # behind a field of a record
COLUMN = 32  # where comments begin


def catalogue(sections: Sequence[str] = (), overrides: Sequence[str] = ()) -> str:
    """The sections of these names, by default all, of a recipe with `a.b=c` laid over its defaults."""
    values: dict[str, Any] = {}
    for item in overrides:
        override(values, item)
    recipe = build(Recipe, values)
    records = {name: getattr(recipe, name) for name in Recipe.model_fields} | {"model": settings_of(recipe.model)}
    for name in sections:
        pick(records, name, "section")
    lines: list[str] = []
    for name in sections or records:
        lines += [f"{name}:", *rows(records[name], menus(recipe)[name], "  ")]
        if name == "data":
            lines += ["  # each corpus of train, dev and test:", *rows(CorpusSettings(), {}, "  #   ")]
    return "\n".join(lines) + "\n"


def menus(recipe: Recipe) -> dict[str, Menus]:
    """What the settings of each section choose from."""
    kind = kind_of(recipe.model)
    backbones = MODELS[recipe.model.get("kind", "transformer")]
    answers = fitting(kind.task)
    return {
        "data": {"metrics": answers, "direction": dict.fromkeys(DIRECTIONS)},
        "tokenizer": {"kind": TOKENIZERS, **({"target_kind": TOKENIZERS} if kind.task == "translate" else {})},
        "model": {"kind": MODELS, **({} if "" in backbones else {"backbone": backbones}), **kind.settings.menus()},
        "train": {
            "optimizer": OPTIMIZERS,
            "schedule": SCHEDULES,
            "loss": LOSSES,
            "consistency": CONSISTENCY,
            "parallel": PARALLEL,
            "metric": {"auto": None, "loss": None, **answers},
        },
        "search": {**SEARCH, "unknown": UNKNOWN},
    }


def rows(record: Settings, menus: Menus, indent: str) -> Iterator[str]:
    """A line for each setting of a record, those first that decide which others there are."""
    meanings = dict(commented(type(record)))
    values = sorted(
        record.model_dump(mode="json").items(), key=lambda item: item[0] not in ("kind", "backbone", "method")
    )
    for name, value in values:
        written = f"{name}: {json.dumps(value)}" if isinstance(value, list | dict) else as_yaml({name: value}).strip()
        choices = list(menus.get(name, ())) or literals(type(record).model_fields[name].annotation)
        parts = [" | ".join(choices), meanings.get(name, "")]
        comment = "; ".join(part for part in parts if part)
        yield f"{indent}{written}".ljust(COLUMN) + f"  # {comment}" if comment else f"{indent}{written}"


def commented(record: type[Settings]) -> Iterator[tuple[str, str]]:
    """The comments behind the fields of a record and of those that it is made from, whose own come last."""
    for each in reversed(record.__mro__):
        if issubclass(each, Settings):
            yield from COMMENT.findall(inspect.getsource(each))


def literals(kind: Any) -> list[str]:
    """What a setting may be where its type says so; that one which is true may be false goes without saying."""
    if get_origin(kind) is Literal:
        return [str(each) for each in get_args(kind)]
    members = () if isinstance(kind, type) else get_args(kind)
    return [name for each in members for name in (["true", "false"] if each is bool else literals(each))]
