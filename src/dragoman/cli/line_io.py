"""Input and output of commands that process lines, from files, pipes or the command line.

`choose_input` decides where the lines come from, `read_batches` reads them, `open_output` opens the file that results
are written to, and `process_lines` combines these into a loop. `WarningLog` logs and counts warnings about lines.
"""

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

from rich.text import Text

from dragoman.config.reference import load_settings_reference
from dragoman.config.settings import apply_override
from dragoman.errors import UserError
from dragoman.io import LONGEST_LINE, decode_lines, move_into_place, read_lines, report_write_errors, temporary_beside
from dragoman.progress import DETAIL, INFO, WARNING, ProgressBar, is_shown, log, results_console
from dragoman.recipe import Recipe

MAX_LOGGED_WARNINGS = 10  # warnings of each kind that are logged; further ones are only counted
SETTING_PATTERN = re.compile(r"(?:(\w+)\.)?(\w+)=\S*")  # section.name=value or name=value
STDIN_PATHS = (None, Path("-"))
LINE_BREAKS = str.maketrans("\r\n", "  ")  # for str.translate: line breaks become spaces, so that output is one line
InputSource = Path | Sequence[str] | None  # a file, lines from the command line, or stdin


class OutputLine(NamedTuple):
    """The output for one line of input."""

    text: str
    warnings: Sequence[str]  # logged, and counted by kind: "cut" is the kind of "cut at 256 tokens"
    flags: Sequence[str] = ()  # signs of errors, such as repeated words; only counted
    drawing: Text | None = None  # the alignment, printed after the text on a terminal


@dataclass
class StreamLines:
    """Iterate over the lines of a stream, including line feeds; `has_next` returns whether reading would not block.

    A line of more than `longest` bytes is yielded in parts, so that an endless line does not fill the memory.
    """

    stream: Any
    longest: float = math.inf
    lines: deque[bytes] = field(default_factory=deque)  # complete lines that have not been yielded yet
    partial_line: bytearray = field(default_factory=bytearray)  # the start of a line whose end has not arrived yet
    ended: bool = False

    def __iter__(self) -> Iterator[bytes]:
        while self.lines or not self.ended:
            if self.lines:
                yield self.lines.popleft()
            else:
                self.read_chunk()

    def has_next(self) -> bool:
        """Return whether a line, or the end of the stream, can be read without waiting."""
        with suppress(io.UnsupportedOperation):  # raised by `fileno` of a stream in memory, which never blocks
            while not self.lines and not self.ended and select.select([self.stream.fileno()], [], [], 0)[0]:
                self.read_chunk()
            return bool(self.lines) or self.ended
        return True

    def read_chunk(self) -> None:
        """Read the bytes that have arrived, waiting for at least one, and split them into lines."""
        chunk = self.stream.read1(1 << 16)  # 64 KiB, the capacity of a pipe on Linux
        self.ended = not chunk
        *line_ends, next_start = chunk.split(b"\n")
        for line_end in line_ends:
            self.lines.append(bytes(self.partial_line) + line_end + b"\n")
            self.partial_line.clear()
        self.partial_line += next_start
        if self.partial_line and (self.ended or len(self.partial_line) > self.longest):
            self.lines.append(bytes(self.partial_line))
            self.partial_line.clear()


def read_batches(source: InputSource, size: int) -> Iterator[list[str]]:
    """Yield batches of up to `size` lines. Only \\n and \\r\\n end a line.

    A batch from stdin has only the lines that have already arrived: the program at the other end of a pipe may wait
    for their output before it sends more.
    """
    if source not in STDIN_PATHS:
        lines = read_lines(source) if isinstance(source, Path) else iter(source or ())
        while batch := list(islice(lines, size)):
            yield batch
        return
    stream_lines = StreamLines(sys.stdin.buffer, LONGEST_LINE)
    lines = decode_lines(stream_lines, "the input")
    for line in lines:
        batch = [line]
        while len(batch) < size and stream_lines.has_next() and (next_line := next(lines, None)) is not None:
            batch.append(next_line)
        yield batch


@contextmanager
def open_output(path: Path | None) -> Iterator[IO[str]]:
    """Open a file for writing, or stdout if `path` is None.

    The file is written under a temporary name and renamed when it is complete. If `path` is a symbolic link, the file
    that it points to is replaced. A pipe or a device is opened under its own name.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        with report_write_errors(path, advice=""), ExitStack() as stack:
            is_special = path.exists() and not path.is_file()  # a pipe or a device
            target = path if is_special else path.resolve()  # /dev/stdout may resolve to a pipe, which has no path
            temporary = target if is_special else stack.enter_context(temporary_beside(target))
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                yield file
            if not is_special:
                move_into_place(temporary, target)
    except RuntimeError:  # Path.resolve raises it for a circular link before Python 3.13
        if path.is_symlink():
            raise UserError(f"cannot write {str(path)!r} (it is a link to itself)") from None
        raise


def process_lines(
    process: Callable[[int, list[str]], Iterator[OutputLine]], source: InputSource, output_file: Path | None, batch: int
) -> None:
    """Print one line of output for every line of input.

    `process` is called with the number of lines processed so far and a list of up to `batch` lines.
    """
    warning_log, start, line_number = WarningLog(), time.monotonic(), 0
    with ExitStack() as stack:
        file, bar = stack.enter_context(open_output(output_file)), None
        if isinstance(source, Path) and source not in STDIN_PATHS and sys.stderr.isatty() and is_shown(INFO):
            total = sum(1 for _ in read_lines(source))
            bar = stack.enter_context(ProgressBar("processing", total=total, unit="lines"))
        for lines in read_batches(source, batch):
            for output in process(line_number, lines):
                line_number += 1
                print(output.text, file=file)
                if output.drawing:
                    results_console().print(output.drawing)
                if output.warnings or output.flags:
                    warning_log.log(line_number, output.warnings, output.flags)
            file.flush()
            if bar:
                bar.set_done(line_number)
    log_warning_counts(warning_log.line_counts)
    log(f"{line_number:,} line{'s' * (line_number != 1)} in {time.monotonic() - start:.1f} s", DETAIL)


def choose_input(texts: Sequence[str] | None, input_file: Path | None) -> InputSource:
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
        if len(text) < 256 and "\n" not in text and Path(text).is_file():  # file names have at most 255 bytes
            log(f"{text!r} is used as text; use --input {text} to read the file of that name", WARNING)
    return [line for text in texts for line in text.split("\n")]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into texts and settings.

    A setting has no spaces and starts with the name of a section of recipes, such as `search.beam=8`; 'x = 5' and
    'a.py=b' are texts. Settings of all sections are returned; `parse_search_overrides` refuses those that are not of
    the section search.
    """
    texts: list[str] = []
    settings: list[str] = []
    # The search settings are the same for every kind of model, so any kind will do.
    search_names = [row.name for row in load_settings_reference()["transformer"] if row.section == "search"]
    for argument in arguments:
        match = SETTING_PATTERN.fullmatch(argument)
        section, name = match.groups() if match else ("", "")
        if name in search_names and section not in Recipe.model_fields:
            suggestion = f"search.{name}={argument.partition('=')[2]}"
            raise UserError(f"{argument!r} is not a setting of search; did you mean {suggestion!r}?")
        (settings if section in Recipe.model_fields else texts).append(argument)
    return texts, settings


def parse_search_overrides(overrides: Sequence[str], initial: Mapping[str, Any]) -> dict[str, Any]:
    """Return the search settings `initial`, updated by the overrides `search.a=b`.

    Overrides of other sections are refused, since they cannot change a model that is already trained.
    """
    values: dict[str, Any] = {"search": dict(initial)}
    for item in overrides:
        if not item.startswith("search."):
            raise UserError(f"{item!r} cannot be changed here; only settings of search can, such as search.beam=8")
        apply_override(values, item)
    return dict(values["search"])


@dataclass
class WarningLog:
    """Log the first warnings of each kind, and count the lines with each kind of warning.

    With several processes, each logs an equal part of MAX_LOGGED_WARNINGS. Flags are counted, but not logged.
    """

    emit: Callable[[str, int], None] = log  # takes a message and its level
    processes: int = 1
    item: str = "line"  # what the numbers count
    line_counts: Counter[str] = field(default_factory=Counter)  # number of lines by kind of warning or flag

    def log(self, number: int, warnings: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
        """Log and count the warnings of line `number`; return its distinct kinds of warnings and flags."""
        from dragoman.inference.postprocess import get_warning_kind

        kinds, maximum = list(map(get_warning_kind, warnings)), max(MAX_LOGGED_WARNINGS // self.processes, 1)
        kinds_and_flags = list(dict.fromkeys([*kinds, *flags]))
        self.line_counts.update(kinds_and_flags)
        for warning, kind in zip(warnings, kinds, strict=True):
            if self.line_counts[kind] <= maximum:
                self.emit(f"{self.item} {number}: {warning}", WARNING)
        for kind in dict.fromkeys(kinds):
            if self.line_counts[kind] == maximum + 1:
                where = "; --json prints the warnings of every line" if self.item == "line" else ""
                self.emit(f"further {self.item}s {kind} are only counted{where}", WARNING)
        return kinds_and_flags


def log_warning_counts(line_counts: Mapping[str, int], item: str = "line") -> None:
    """Log the number of lines with each kind of warning, such as "2 lines cut"."""
    if line_counts:
        log("; ".join(f"{count} {item}{'s' * (count > 1)} {kind}" for kind, count in line_counts.items()), WARNING)
