"""Input and output of commands that process lines, from files, pipes or the command line."""

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

from dragoman.config.reference import load_reference
from dragoman.config.settings import override
from dragoman.errors import UserError
from dragoman.io import LONGEST_LINE, decode_lines, move_into_place, read_lines, report_write_errors, temporary_beside
from dragoman.progress import DETAIL, INFO, WARNING, ProgressBar, is_shown, log
from dragoman.recipe import Recipe

MAX_LOGGED_WARNINGS = 10  # warnings of each kind that are logged; further ones are only counted
SETTING_PATTERN = re.compile(r"(?:(\w+)\.)?(\w+)=\S*")
STDIN_PATHS = (None, Path("-"))
LINE_BREAKS = str.maketrans("\r\n", "  ")  # for str.translate: one line of input gives one line of output
Input = Path | Sequence[str] | None  # a file, lines from the command line, or stdin


class OutputLine(NamedTuple):
    """The output for one line of input."""

    text: str
    warnings: Sequence[str]
    flags: Sequence[str] = ()


@dataclass
class StreamLines:
    """Iterate over the lines of a stream, including line feeds; `has_next` tells whether reading would block.

    A line of more than `longest` bytes is yielded in parts, so that an endless line does not fill the memory.
    """

    stream: Any
    longest: float = math.inf
    lines: deque[bytes] = field(default_factory=deque)  # complete, not yet yielded
    rest: bytearray = field(default_factory=bytearray)  # the start of a line whose end has not arrived yet
    ended: bool = False

    def __iter__(self) -> Iterator[bytes]:
        while self.lines or not self.ended:
            if self.lines:
                yield self.lines.popleft()
            else:
                self.read_some()

    def has_next(self) -> bool:
        """Return whether a line, or the end of the stream, can be read without waiting."""
        with suppress(io.UnsupportedOperation):  # not a file but a stream in memory, which never blocks
            while not self.lines and not self.ended and select.select([self.stream.fileno()], [], [], 0)[0]:
                self.read_some()
            return bool(self.lines) or self.ended
        return True

    def read_some(self) -> None:
        """Read the bytes that have arrived, waiting for at least one, and split them into lines."""
        chunk = self.stream.read1(1 << 16)
        self.ended = not chunk
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            self.lines.append(bytes(self.rest) + part + b"\n")
            self.rest.clear()
        self.rest += rest
        if self.rest and (self.ended or len(self.rest) > self.longest):
            self.lines.append(bytes(self.rest))
            self.rest.clear()


def read_batches(given: Input, size: int) -> Iterator[list[str]]:
    """Yield up to `size` lines at a time. Only \\n and \\r\\n end a line.

    From a pipe or a terminal, yield the lines that have arrived: the writer may wait for their output before sending
    more.
    """
    if given not in STDIN_PATHS:
        lines = read_lines(given) if isinstance(given, Path) else iter(given or ())
        while group := list(islice(lines, size)):
            yield group
        return
    arriving = StreamLines(sys.stdin.buffer, LONGEST_LINE)
    lines = decode_lines(arriving, "the input")
    for line in lines:
        group = [line]
        while len(group) < size and arriving.has_next() and (more := next(lines, None)) is not None:
            group.append(more)
        yield group


@contextmanager
def open_output(path: Path | None) -> Iterator[IO[str]]:
    """Open stdout or a file. The file is written under a temporary name and renamed when it is complete.

    For a symbolic link, its target is replaced; a pipe or a device is written to directly.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        with report_write_errors(path, advice=""), ExitStack() as stack:
            direct = path.exists() and not path.is_file()
            target = path if direct else path.resolve()  # not for /dev/stdout: it may be a pipe, which has no path
            made = target if direct else stack.enter_context(temporary_beside(target))
            with made.open("w", encoding="utf-8", newline="\n") as file:
                yield file
            if not direct:
                move_into_place(made, target)
    except RuntimeError:  # raised by Path.resolve before Python 3.13
        if path.is_symlink():
            raise UserError(f"cannot write {str(path)!r} (it is a link to itself)") from None
        raise


def process_lines(
    process: Callable[[int, list[str]], Iterator[OutputLine]], given: Input, output_file: Path | None, batch: int
) -> None:
    """Print one line of output for every line of input.

    `process` is called with the number of lines processed so far and a batch of lines.
    """
    warned, start, number = WarningLog(), time.monotonic(), 0
    with ExitStack() as stack:
        sink, bar = stack.enter_context(open_output(output_file)), None
        if isinstance(given, Path) and given not in STDIN_PATHS and sys.stderr.isatty() and is_shown(INFO):
            total = sum(1 for _ in read_lines(given))
            bar = stack.enter_context(ProgressBar("processing", total=total, unit="lines"))
        for lines in read_batches(given, batch):
            for output in process(number, lines):
                number += 1
                print(output.text, file=sink)
                if output.warnings or output.flags:
                    warned.log(number, output.warnings, output.flags)
            sink.flush()
            if bar:
                bar.update(number)
    log_warning_counts(warned.lines)
    log(f"{number:,} line{'s' * (number != 1)} in {time.monotonic() - start:.1f} s", DETAIL)


def choose_input(texts: Sequence[str] | None, input_file: Path | None) -> Input:
    """Return the lines from the command line if there are any, else the file, else None for stdin."""
    if not texts:
        return input_file
    if input_file is not None:
        raise UserError("text on the command line cannot be combined with --input; leave one of them out")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{text!r} is not text in UTF-8") from None
        if len(text) < 256 and "\n" not in text and Path(text).is_file():
            log(f"{text!r} is used as text; use --input {text} to read the file of that name", WARNING)
    return [line for text in texts for line in text.split("\n")]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into texts and settings.

    A setting is one word that starts with the name of a section, such as `search.beam=8`; 'x = 5' and 'a.py=b' are
    texts. Settings of other sections than search are returned too; the caller refuses them.
    """
    texts: list[str] = []
    settings: list[str] = []
    search_names = [row.name for row in load_reference()["transformer"] if row.section == "search"]
    for argument in arguments:
        match = SETTING_PATTERN.fullmatch(argument)
        section, name = match.groups() if match else ("", "")
        if name in search_names and section not in Recipe.model_fields:
            right = f"search.{name}={argument.partition('=')[2]}"
            raise UserError(f"{argument!r} is not a setting of search; did you mean {right!r}?")
        (settings if section in Recipe.model_fields else texts).append(argument)
    return texts, settings


def parse_search_overrides(overrides: Sequence[str], initial: Mapping[str, Any]) -> dict[str, Any]:
    """Return `initial` with the overrides `search.a=b`. Other settings of a trained run cannot be changed."""
    values: dict[str, Any] = {"search": dict(initial)}
    for item in overrides:
        if not item.startswith("search."):
            raise UserError(f"{item!r} cannot be changed here; only settings of search can, such as search.beam=8")
        override(values, item)
    return dict(values["search"])


@dataclass
class WarningLog:
    """Log the first warnings of each kind, and count the lines with each kind of warning.

    LOGGED_WARNINGS is divided among the processes. Flags, which mark suspicious outputs, are only counted.
    """

    print: Callable[[str, int], None] = log
    processes: int = 1
    lines: Counter[str] = field(default_factory=Counter)  # by kind

    def log(self, number: int, warnings: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
        """Log and count the warnings of a line; return its distinct kinds of warnings and flags."""
        from dragoman.inference.postprocess import list_warning_kinds

        kinds, maximum = list_warning_kinds(warnings), max(MAX_LOGGED_WARNINGS // self.processes, 1)
        kinds_and_flags = list(dict.fromkeys([*kinds, *flags]))
        self.lines.update(kinds_and_flags)
        for warning in warnings:
            if self.lines[list_warning_kinds([warning])[0]] <= maximum:
                self.print(f"line {number}: {warning}", WARNING)
        for kind in kinds:
            if self.lines[kind] == maximum + 1:
                self.print(f"further lines {kind} are only counted; --json prints the warnings of every line", WARNING)
        return kinds_and_flags


def log_warning_counts(lines: Mapping[str, int]) -> None:
    """Log how many lines had each kind of warning."""
    if lines:
        log("; ".join(f"{count} line{'s' * (count > 1)} {kind}" for kind, count in lines.items()), WARNING)
