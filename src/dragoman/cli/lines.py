"""Lines in, lines out: read from a file, a pipe or the command line, and write to stdout or a file."""

from __future__ import annotations

import io
import math
import re
import select
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from dragoman.config.settings import SearchSettings
from dragoman.errors import UserError
from dragoman.io import LONGEST_LINE, lines_of, move_into_place, read_lines, report_write_errors, temporary_beside
from dragoman.progress import DETAIL, INFO, WARNING, ProgressBar, is_shown, log
from dragoman.recipe import Recipe

LOGGED_WARNINGS = 10  # of each kind that are logged in full
SETTING = re.compile(r"(?:(\w+)\.)?(\w+)=\S*")
STDIN = (None, Path("-"))
LINE_BREAKS = str.maketrans("\r\n", "  ")  # for str.translate: one line in is one line out
Input = Path | Sequence[str] | None  # a file, lines that were given with the command, or stdin


class OutputLine(NamedTuple):
    """The output for one line of input."""

    text: str
    warnings: Sequence[str]
    flags: Sequence[str] = ()


@dataclass
class ArrivingLines:
    """The lines of a stream, with their line feeds, and whether the next one has arrived.

    A line of more than `longest` bytes is yielded in parts, so that an endless one does not fill the memory.
    """

    stream: Any
    longest: float = math.inf
    lines: deque[bytes] = field(default_factory=deque)  # read but not yielded yet
    begun: list[bytes] = field(default_factory=list)  # parts of a line whose end has not come yet
    size: int = 0  # bytes in these parts
    ended: bool = False

    def __iter__(self) -> Iterator[bytes]:
        while self.lines or not self.ended:
            if self.lines:
                yield self.lines.popleft()
            else:
                self.read_some()

    def has_next(self) -> bool:
        """Return whether a line, or the end, can be read without waiting."""
        with suppress(io.UnsupportedOperation):  # not a file: all of it is in memory
            while not self.lines and not self.ended and select.select([self.stream.fileno()], [], [], 0)[0]:
                self.read_some()
            return bool(self.lines) or self.ended
        return True

    def read_some(self) -> None:
        """Read what has arrived, at least one byte, and split it into lines."""
        chunk = self.stream.read1(1 << 16)
        *complete, rest = chunk.split(b"\n")
        if complete:
            first = b"".join([*self.begun, complete[0]])
            self.lines.extend(line + b"\n" for line in (first, *complete[1:]))
            self.begun, self.size = [], 0
        if rest:
            self.begun.append(rest)
            self.size += len(rest)
        if self.size > self.longest:
            self.lines.append(b"".join(self.begun))
            self.begun, self.size = [], 0
        if not chunk:
            self.ended = True
            if self.begun:
                self.lines.append(b"".join(self.begun))


def input_groups(given: Input, size: int) -> Iterator[list[str]]:
    """Yield up to `size` lines at a time. Only a line feed ends a line, with or without a carriage return.

    From a pipe or a terminal, yield the lines that have arrived: the writer may wait for an answer before the next one.
    """
    if given not in STDIN:
        lines = read_lines(given) if isinstance(given, Path) else iter(given or ())
        while group := list(islice(lines, size)):
            yield group
        return
    arriving = ArrivingLines(sys.stdin.buffer, LONGEST_LINE)
    lines = lines_of(arriving, "the input")
    for line in lines:
        group = [line]
        while len(group) < size and arriving.has_next() and (more := next(lines, None)) is not None:
            group.append(more)
        yield group


@contextmanager
def output_to(path: Path | None) -> Iterator[IO[str]]:
    """Open stdout, or a file that takes its name only when it is complete.

    A link is written through to its target; a pipe or a device is written to directly.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        with report_write_errors(path, advice=""), ExitStack() as stack:
            direct = path.exists() and not path.is_file()
            target = path if direct else path.resolve()  # /dev/stdout leads to a pipe, which has no name of its own
            made = target if direct else stack.enter_context(temporary_beside(target))
            with made.open("w", encoding="utf-8", newline="\n") as file:
                yield file
            if not direct:
                move_into_place(made, target)
    except RuntimeError:  # of Path.resolve, before Python 3.13
        if path.is_symlink():
            raise UserError(f"cannot write {str(path)!r} (it is a link to itself)") from None
        raise


def process_lines(
    process: Callable[[int, list[str]], Iterator[OutputLine]], given: Input, output_file: Path | None, batch: int
) -> None:
    """Print one line of output for every line of input.

    `process` gets the number of lines before a batch, and the batch.
    """
    warned, start, number = LineWarnings(), time.monotonic(), 0
    with ExitStack() as stack:
        sink, bar = stack.enter_context(output_to(output_file)), None
        if isinstance(given, Path) and given not in STDIN and sys.stderr.isatty() and is_shown(INFO):
            total = sum(1 for _ in read_lines(given))
            bar = stack.enter_context(ProgressBar("answering", total=total, unit="lines"))
        for lines in input_groups(given, batch):
            for output in process(number, lines):
                number += 1
                print(output.text, file=sink)
                warned.log(number, output.warnings, output.flags)
            sink.flush()
            if bar:
                bar.update(number)
    log_counts(warned.lines)
    log(f"{number:,} line{'s' * (number != 1)} in {time.monotonic() - start:.1f} s", DETAIL)


def choose_input(texts: Sequence[str] | None, input_file: Path | None) -> Input:
    """Return the lines on the command line, else the file, else None for stdin."""
    if not texts:
        return input_file
    if input_file is not None:
        raise UserError("text stands on the command line and --input names a file; leave one of them out")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{text!r} is not text in UTF-8") from None
        if len(text) < 256 and "\n" not in text and Path(text).is_file():
            log(f"{text!r} is taken as text; --input {text} would read the file of that name", WARNING)
    return [line for text in texts for line in text.split("\n")]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return texts and settings.

    A setting is one word, such as `search.beam=8`, that begins with a section. Settings of other
    sections than search are returned too, and refused later; 'x = 5' and 'a.py=b' are texts.
    """
    texts: list[str] = []
    settings: list[str] = []
    for argument in arguments:
        match = SETTING.fullmatch(argument)
        section, name = match.groups() if match else ("", "")
        if name in SearchSettings.model_fields and section not in Recipe.model_fields:
            right = f"search.{name}={argument.partition('=')[2]}"
            raise UserError(f"{argument!r} is not a setting of search; did you mean {right!r}?")
        (settings if section in Recipe.model_fields else texts).append(argument)
    return texts, settings


@dataclass
class LineWarnings:
    """Log the first warnings of each kind in full, and count the lines of each kind.

    Several processes share the number that is logged. Flags, which point out odd outputs, are only counted.
    """

    print: Callable[[str, int], None] = log
    processes: int = 1
    lines: Counter[str] = field(default_factory=Counter)  # by kind

    def log(self, number: int, warnings: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
        """Log and count a line; return the kinds of its warnings and its flags, each once."""
        from dragoman.inference.postprocess import warning_kinds

        kinds, most = warning_kinds(warnings), max(LOGGED_WARNINGS // self.processes, 1)
        found = list(dict.fromkeys([*kinds, *flags]))
        self.lines.update(found)
        for warning in warnings:
            if self.lines[warning_kinds([warning])[0]] <= most:
                self.print(f"line {number}: {warning}", WARNING)
        for kind in kinds:
            if self.lines[kind] == most + 1:
                self.print(
                    f"further lines {kind} are only counted; answers with --json have the warnings of every line",
                    WARNING,
                )
        return found


def log_counts(lines: Mapping[str, int]) -> None:
    """Log how many lines had each kind of warning."""
    if lines:
        log("; ".join(f"{count} line{'s' * (count > 1)} {kind}" for kind, count in lines.items()), WARNING)
