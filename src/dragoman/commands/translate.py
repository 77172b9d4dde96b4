"""What `dragoman translate` does with lines, once its arguments are read: answers in batches, or word by word."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from dragoman.answers.asking import settings_for
from dragoman.answers.glossary import read_dictionary, read_glossary
from dragoman.commands.options import Said, answer_lines, one_line, say_counts
from dragoman.config import override
from dragoman.console import input_lines, output_to, say
from dragoman.door import kinds
from dragoman.text.trees import Grove
from dragoman.translator import TREELESS, Translator
from dragoman.types import Hypothesis, Line, Mistake


def search_changes(overrides: list[str], dictionary: Path | None) -> dict[str, Any]:
    """`search.a=b` as settings; what else a run was trained with cannot be changed any more."""
    values: dict[str, Any] = {"search": {"unknown": "dictionary"} if dictionary else {}}
    for item in overrides:
        if not item.startswith("search."):
            raise Mistake(f"{item!r} cannot be changed here; translate takes settings of search, such as search.beam=8")
        override(values, item)
    changes: dict[str, Any] = values["search"]
    return changes


class Asking:
    """A translator, and all that is asked of it but the lines. What cannot work is refused before any is read."""

    def __init__(
        self,
        translator: Translator,
        changes: dict[str, Any],
        beam: int | None,
        nbest: int | None,
        glossary: Path | None,
        dictionary: Path | None,
    ) -> None:
        self.translator, self.changes = translator, changes
        self.settings = settings_for(translator.recipe.search, changes, beam=beam, count=nbest)
        self.glossary = read_glossary(glossary) if glossary else None
        self.dictionary = read_dictionary(dictionary) if dictionary else None

    def answer_lines(
        self, input_file: Path | None, output_file: Path | None, *, batch: int, conllu: Path | None, as_json: bool
    ) -> None:
        grove = Grove(conllu, str(input_file or "the input")) if conllu else None
        if self.translator.asks_for_trees and not grove:
            say("no trees were given with --conllu: words are known by their places alone")
        flags: Counter[str] = Counter()

        def answer(before: int, lines: list[str]) -> Iterator[Said]:
            found = self.translator.nbest(
                [self.line(line) for line in lines],
                trees=[grove.tree_of(line) for line in lines] if grove else None,
                search=self.settings.model_dump(),
                dictionary=self.dictionary,
                align=as_json,
            )
            for number, (line, answers) in enumerate(zip(lines, found, strict=True), before + 1):
                warnings = [one for one in answers[0].warnings if grove or one != TREELESS]  # said of all lines, above
                flags.update(answers[0].flags)
                yield said_as(number, line, answers, self.settings.nbest, as_json), warnings

        answer_lines(answer, input_file, output_file, batch)
        say_counts(flags)
        if grove:
            grove.end()

    def stream_lines(self, input_file: Path | None, output_file: Path | None) -> None:
        """One line at a time, word by word."""
        counts: Counter[str] = Counter()
        with output_to(output_file) as sink:
            for number, line in enumerate(input_lines(input_file), 1):
                search = self.settings.model_dump()
                answer = spoken(
                    self.translator.stream(self.line(line), search=search, dictionary=self.dictionary), sink
                )
                for warning in answer.warnings:
                    say(f"line {number}: {warning}")
                counts.update([*kinds(answer.warnings), *answer.flags])
        say_counts(counts)

    def line(self, text: str) -> Line:
        return self.glossary.line(Line(text)) if self.glossary else Line(text)


def spoken(pieces: Generator[str, None, Hypothesis], sink: IO[str]) -> Hypothesis:
    """Print the pieces of an answer as they come, on one line."""
    while True:
        try:
            print(one_line(next(pieces)), end="", file=sink, flush=True)
        except StopIteration as end:
            print(file=sink, flush=True)
            answer: Hypothesis = end.value
            return answer


def said_as(number: int, line: str, answers: list[Hypothesis], nbest: int, as_json: bool) -> str:
    if as_json:
        many = {"nbest": [asdict(one) for one in answers]} if nbest > 1 else {}
        return json.dumps({"source": line, **asdict(answers[0]), **many}, ensure_ascii=False)
    if nbest > 1:
        return "\n".join(f"{number - 1} ||| {one_line(one.text)} ||| {one.score:.4f}" for one in answers)
    return one_line(answers[0].text)
