"""Options that several commands have, and the loop from lines to answers that they share."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from dragoman.console import counting, input_lines, output_to, say

FEW = 10  # warnings of a kind that are said in full
Said = tuple[str, Sequence[str]]  # an answer and its warnings
Run = Annotated[Path, typer.Argument(help="a run folder", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
Beam = Annotated[int | None, typer.Option(min=1, help="width of the beam; 1 is greedy; by default the run's own")]
Conllu = Annotated[
    Path | None, typer.Option(help="trees of the lines, for runs with model.position=tree", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="settings to change", show_default=False)
]
SourceFile = Annotated[
    Path | None, typer.Option("--source", help="plain text, one sentence a line", show_default=False)
]
InputFile = Annotated[Path | None, typer.Option("--input", help="by default stdin", show_default=False)]
OutputFile = Annotated[Path | None, typer.Option("--output", help="by default stdout", show_default=False)]
Batch = Annotated[int, typer.Option(min=1, help="lines taken at a time; never changes an answer")]
Engine = Annotated[str, typer.Option(help="auto, torch, torch-bf16, torch-int8, ctranslate2, ctranslate2-int8")]
Tag = Annotated[
    str, typer.Option(help="for runs that were trained with tags, such as de for German", show_default=False)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]


def answer_lines(
    answer: Callable[[int, list[str]], Iterator[Said]], input_file: Path | None, output_file: Path | None, batch: int
) -> None:
    """One answer out for every line in. `answer` is given how many lines came before, and some lines."""
    if input_file is None and sys.stdin.isatty():
        batch = 1  # who types a line waits for its answer
    warned = Warned()
    with output_to(output_file) as sink, counting(input_file) as tick:
        number = 0
        lines = input_lines(input_file)
        while some := list(islice(lines, batch)):
            for text, warnings in answer(number, some):
                number += 1
                print(text, file=sink)
                warned.tell(number, warnings)
            sink.flush()
            tick(number)
    say_counts(warned.lines)


class Warned:
    """Says what there is to say of lines: the first few of each kind in full, then that others are only counted.

    Of several processes each says its share of them.
    """

    def __init__(self, say: Callable[[str], None] = say, processes: int = 1) -> None:
        self.say, self.few = say, max(FEW // processes, 1)
        self.lines: Counter[str] = Counter()  # of each kind

    def tell(self, number: int, warnings: Sequence[str]) -> None:
        from dragoman.door import kinds

        self.lines.update(kinds(warnings))
        for warning in warnings:
            if self.lines[kinds([warning])[0]] <= self.few:
                self.say(f"line {number}: {warning}")
        for kind in kinds(warnings):
            if self.lines[kind] == self.few + 1:
                self.say(f"further lines {kind} are only counted; answers with --json have the warnings of every line")


def say_counts(warned: Counter[str]) -> None:
    if warned:
        say("; ".join(f"{count} line{'s' * (count > 1)} {what}" for what, count in warned.items()))


def one_line(text: str) -> str:
    """A line break inside an answer would break the promise of one line out for one line in."""
    return text.replace("\r", " ").replace("\n", " ")
