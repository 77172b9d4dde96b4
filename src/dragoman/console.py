"""How commands read and speak: results on stdout, everything else on stderr, files whole or not there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from dragoman.io import move_into_place, temporary_beside
from dragoman.types import UserError

UNBROKEN = 1 << 30  # signs of a line: more than any table has
QUICK = 1.0  # seconds: what takes no longer needs no word about its progress
SELDOM = 10.0  # seconds between two words where there is no terminal
ERROR, WARNING, NOTE, DETAIL = range(4)  # levels of messages
_verbosity = NOTE  # messages above this level are not printed
said = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def set_verbosity(level: int) -> None:
    """Print messages up to this level: -q sets WARNING, -qq ERROR and -v DETAIL."""
    global _verbosity
    _verbosity = level


def is_shown(level: int) -> bool:
    """Tell whether messages of this level are printed. Progress is shown where notes are."""
    return level <= _verbosity


def say(message: str, level: int = NOTE) -> None:
    """Print a message to stderr, on a line of its own even where a count of lines is running."""
    if not is_shown(level):
        return
    said.print(("\r\x1b[K" if said.is_terminal else "") + message, markup=False)


class Pipe(Console):
    """What is printed goes to a file or a program: no line is wrapped, for that breaks programs, or ends in spaces."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as held:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in held.get().split("\n")))
        self.file.flush()


def paper() -> Console:
    """stdout. Tables are fitted to a terminal, and elsewhere as wide as they are."""
    if sys.stdout.isatty():
        return Console(highlight=False, emoji=False, soft_wrap=True)
    return Pipe(highlight=False, emoji=False, soft_wrap=True, width=UNBROKEN)


def input_lines(path: Path | None) -> Iterator[str]:
    """Lines of a file or of stdin. Only a line feed ends a line, with or without a carriage return."""
    from dragoman.text.corpus import lines_of, read_lines

    return read_lines(path) if path is not None else lines_of(sys.stdin.buffer, "the input")


@contextmanager
def output_to(path: Path | None) -> Iterator[IO[str]]:
    """Open stdout, or a file that takes its name only when it is complete.

    A link is written through to its target; a pipe or a device is written to directly.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        target = path.resolve()
        with ExitStack() as held:
            direct = target.exists() and not target.is_file()
            made = target if direct else held.enter_context(temporary_beside(target))
            with made.open("w", encoding="utf-8", newline="\n") as file:
                yield file
            if not direct:
                move_into_place(made, target)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r} ({error.strerror})") from None


def ticker(what: str, total: int = 0) -> Callable[[int], None]:
    """Tells how far a long work is, and how much is left where the total is known. On a terminal it is gone in the end;
    elsewhere it is a line now and then."""
    begun = spoke = time.monotonic()

    def tick(done: int) -> None:
        nonlocal spoke
        if not is_shown(NOTE):
            return
        now, terminal = time.monotonic(), sys.stderr.isatty()
        left = f" of {total:,}, {(total - done) * (now - begun) / done:.0f} s left" if total else ""
        if terminal and now - begun >= QUICK:
            sys.stderr.write("\r\x1b[K" if done == total else f"\r{what}: {done:,}{left}\x1b[K")
            sys.stderr.flush()
        elif not terminal and now - spoke >= SELDOM and done != total:
            spoke = now
            say(f"{what}: {done:,}{left}")

    return tick


@contextmanager
def counting(path: Path | None) -> Iterator[Any]:
    """Lines done, speed and time left on a terminal, when the input is a file."""
    begun = time.monotonic()
    total = sum(1 for _ in input_lines(path)) if path is not None and sys.stderr.isatty() and is_shown(NOTE) else 0

    def tick(done: int) -> None:
        if total:
            speed = done / (time.monotonic() - begun)
            sys.stderr.write(
                f"\r{done:,} of {total:,} lines, {speed:,.1f}/s, {(total - done) / speed:.0f} s left\x1b[K"
            )
            sys.stderr.flush()

    yield tick
    if total:
        sys.stderr.write("\n")
