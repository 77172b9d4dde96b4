"""Which model translates from one language to another: the directions of all loaded models.

A model whose languages are unknown has the direction from "" to "". It takes requests for any languages, after all
models that are known to translate between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dragoman.inference.directions import Direction, describe_code
from dragoman.language_codes import find_code, is_same_language, match_language, name_language
from dragoman.serving.errors import RequestError

UNDETERMINED = "und"  # the code of an unknown language (ISO 639-2), for clients that need a code
LISTED_LANGUAGES = 20  # in error messages
# Codes of LibreTranslate for languages that others call pt-BR and zh-Hant.
ALIASES = {"pb": "pt-BR", "zt": "zh-Hant", UNDETERMINED: ""}


@dataclass(frozen=True, slots=True)
class Route:
    """A model and the direction in which it translates."""

    model: str
    direction: Direction


@dataclass(frozen=True, slots=True)
class ServedLanguage:
    """A source language, and the languages into which it is translated."""

    code: str
    name: str
    targets: tuple[str, ...]


class LanguageIndex:
    """The directions of models, by name of the model; "" stands for all models, of which the first one is chosen."""

    def __init__(self, directions: Mapping[str, Sequence[Direction]]) -> None:
        # model -> source -> target -> route
        self.tables: dict[str, dict[str, dict[str, Route]]] = {"": {}}
        for model, its_directions in directions.items():
            for direction in its_directions:
                route = Route(model, direction)
                for table in (self.tables.setdefault(model, {}), self.tables[""]):
                    table.setdefault(direction.source, {}).setdefault(direction.target, route)
        # model -> all its targets
        self.targets = {
            model: tuple(dict.fromkeys(target for targets in table.values() for target in targets))
            for model, table in self.tables.items()
        }

    def list_languages(self) -> list[ServedLanguage]:
        """Return the source languages of all models, those that are known first."""
        return [
            ServedLanguage(
                code or UNDETERMINED,
                name_code(code),
                tuple(target or UNDETERMINED for target in sorted(targets, key=lambda target: (not target, target))),
            )
            for code, targets in sorted(self.tables[""].items(), key=lambda item: (not item[0], item[0]))
        ]

    def list_targets(self) -> list[str]:
        """Return the known target languages of all models."""
        return sorted(filter(None, self.targets[""]))

    def list_codes(self) -> list[str]:
        """Return all known languages, sources and targets."""
        return sorted({*filter(None, self.tables[""]), *self.list_targets()})

    def list_sources(self, target: str, model: str) -> list[str]:
        """Return the sources from which a model translates into `target` (into any language if that is "")."""
        table = self.tables[model]
        matched = {self.match_target(target, model), ""}
        return [source for source, targets in table.items() if not target or matched & targets.keys()]

    def is_known(self, code: str, model: str = "") -> bool:
        """Return whether models translate from or into a language, or may do so, since theirs are unknown."""
        known = {*self.tables[model], *self.targets[model]}
        return "" in known or match_language(code, known) is not None

    def match_source(self, source: str, model: str) -> str:
        """Return the source language of the models that suits a given one best."""
        table = self.tables[model]
        matched = match_language(source, filter(None, table))
        if matched is None and "" not in table:
            choices = describe_codes(table)
            raise RequestError(
                400, "unsupported_source", f"no model translates from {describe_code(source)}; there are: {choices}"
            )
        return matched or ""

    def match_target(self, target: str, model: str) -> str:
        """Return the target language of the models that suits a given one best."""
        targets = self.targets[model]
        matched = match_language(target, filter(None, targets)) if target else ""
        if matched is None and "" not in targets:
            choices = describe_codes(targets)
            raise RequestError(
                400, "unsupported_target", f"no model translates to {describe_code(target)}; there are: {choices}"
            )
        return matched or ""

    def find_route_unless_same(self, source: str, target: str, model: str) -> Route | None:
        """Return what `find_route` does, but None if it finds no model and both are one language that is known."""
        try:
            return self.find_route(source, target, model)
        except RequestError:
            if not (target and is_same_language(source, target) and self.is_known(source, model)):
                raise
            return None

    def find_route(self, source: str, target: str, model: str) -> Route:
        """Return the model and direction for two languages, of which `target` may be "": the only one there is."""
        self.match_target(target, model)  # a target that no source has is the more useful complaint
        matched_source = self.match_source(source, model)
        fallback = self.tables[model].get("", {})
        targets = self.tables[model].get(matched_source, fallback)
        if not target:
            if len(targets) == 1:
                return next(iter(targets.values()))
            message = f"choose a target language for {describe_code(source)}: {describe_codes(targets)}"
            raise RequestError(400, "missing_target", message)
        matched = match_language(target, filter(None, targets))
        for table, code in ((targets, matched), (targets, ""), (fallback, "")):
            if code is not None and code in table:
                return table[code]
        raise RequestError(
            400,
            "unsupported_pair",
            f"no model translates from {describe_code(source)} to {describe_code(target)}; "
            f"from {describe_code(source)} there are: {describe_codes(targets)}",
        )


def parse_code(code: str, field: str) -> str:
    """Return the usual notation of the language code in a field of a request; "" stays ""."""
    code = ALIASES.get(code.strip().lower(), code.strip())
    if code and not (found := find_code(code)):
        message = f"{field} {code[:20]!r} is not a language code; give one such as en, de or pt-BR"
        raise RequestError(400, f"unsupported_{field}", message)
    return found if code else ""


def name_code(code: str) -> str:
    return name_language(code) if code else "Unknown language"


def describe_codes(codes: Mapping[str, object] | Sequence[str]) -> str:
    """Return languages as text, at most LISTED_LANGUAGES of them."""
    known = sorted(filter(None, codes))
    more = f" and {len(known) - LISTED_LANGUAGES} others" if len(known) > LISTED_LANGUAGES else ""
    return ", ".join(map(describe_code, known[:LISTED_LANGUAGES])) + more
