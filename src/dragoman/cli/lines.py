""""""

from __future__ import annotations

import io
import math
import select
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from dragoman.errors import UserError
from dragoman.io import move_into_place, temporary_beside


class ArrivingLines:
    """Lines of a stream, with their line feeds, that knows whether the next one is there without waiting for it.

    A line of more than `longest` bytes is given in parts, so that an endless one does not fill the memory.
    """

    def __init__(self, stream: Any, longest: float = math.inf) -> None:
        self.stream, self.longest = stream, longest
        self.lines: deque[bytes] = deque()
        self.begun: list[bytes] = []  # parts of a line whose end has not come yet
        self.size = 0  # bytes in these parts
        self.ended = False

    def __iter__(self) -> ArrivingLines:
        return self

    def __next__(self) -> bytes:
        while not self.lines:
            if self.ended:
                raise StopIteration
            self.read_some()
        return self.lines.popleft()

    def has_next(self) -> bool:
        """Tell whether a line, or the end, can be had without waiting."""
        while not self.lines and not self.ended and self.is_readable():
            self.read_some()
        return bool(self.lines) or self.ended

    def is_readable(self) -> bool:
        try:
            return bool(select.select([self.stream.fileno()], [], [], 0)[0])
        except io.UnsupportedOperation:  # not a file: all of it is in memory
            return True

    def read_some(self) -> None:
        chunk = self.stream.read1(1 << 16)
        *whole, rest = chunk.split(b"\n")
        if whole:
            first = b"".join([*self.begun, whole[0]])
            self.lines.extend(line + b"\n" for line in (first, *whole[1:]))
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


Input = Path | Sequence[str] | None  # a file, lines that were given with the command, or stdin


def is_stdin(path: Path | None) -> bool:
    return path is None or str(path) == "-"


def input_lines(given: Input) -> Iterator[str]:
    """Lines of a file or of stdin. Only a line feed ends a line, with or without a carriage return."""
    return (line for group in input_groups(given, 1) for line in group)


def input_groups(given: Input, size: int) -> Iterator[list[str]]:
    """Up to `size` lines at a time. From a pipe or a terminal come those that are there, so that nobody who waits for
    an answer before writing the next line waits in vain."""
    from dragoman.io import LONGEST_LINE, lines_of, read_lines

    if not isinstance(given, Path | None) or not is_stdin(given):
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
        direct = path.exists() and not path.is_file()
        target = path if direct else path.resolve()  # /dev/stdout leads to a pipe, which has no name of its own
        with ExitStack() as held:
            made = target if direct else held.enter_context(temporary_beside(target))
            with made.open("w", encoding="utf-8", newline="\n") as file:
                yield file
            if not direct:
                move_into_place(made, target)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r} ({error.strerror})") from None
    except RuntimeError:  # of Path.resolve, before Python 3.13
        if path.is_symlink():
            raise UserError(f"cannot write {str(path)!r} (it is a link to itself)") from None
        raise
