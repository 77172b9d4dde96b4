"""How commands read and speak: results on stdout, everything else on stderr, files whole or not there.

Progress of a command that goes through many items: a bar and the time left on a terminal, elsewhere a line now and
then. Light to import: commands on corpora need no PyTorch.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

UNBROKEN = 1 << 30  # signs of a line: more than any table has
QUICK = 1.0  # seconds: what takes no longer needs no word about its progress
SELDOM = 10.0  # seconds between two words where there is no terminal
ERROR, WARNING, NOTE, DETAIL = range(4)  # levels of messages
UNDECODED = re.compile(r"\\u(dc[89a-f][0-9a-f])")  # a byte of a file name, as repr() shows it
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
    said.print(("\r\x1b[K" if said.is_terminal else "") + decode_names(message), markup=False)


def decode_names(message: str) -> str:
    """Decode file names that Python could not decode, such as without UTF-8 in the locale: '\\udcc3\\udcbc' is 'ü'."""
    text = UNDECODED.sub(lambda found: chr(int(found[1], 16)), message)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


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


T = TypeVar("T")
EVERY = 256  # items between two looks at the clock
REFRESH = 0.2  # seconds between two states of the bar
WIDTH = 24  # characters of the bar


class ProgressBar:
    """Count items as they are taken, and estimate the time left.

    How much is done is known from the number of items, where `items` says how many there will be, or from how far
    `files` are read: pass `watch` on to `read_pairs`. Files that are read several times count as `passes` says.

    progress = Progress("cleaning", files=["train.en.gz", "train.de.gz"])
    for pair in progress.count(read_pairs(corpus, watch=progress.watch)):
        ...
    """

    def __init__(self, what: str, *, items: int = 0, files: Sequence[str] = (), passes: int = 1) -> None:
        self.what, self.items, self.passes = what, items * passes, passes
        paths = [Path(name) for name in files]
        regular = all(path.is_file() for path in paths)  # a pipe has no size
        self.bytes = passes * sum(path.stat().st_size for path in paths) if regular else 0
        self.counted = 0
        self.positions: list[Callable[[], int]] = []
        self.begun = self.shown = time.monotonic()

    def watch(self, position: Callable[[], int]) -> None:
        """Take a function that returns how many bytes of a file are read."""
        self.positions.append(position)

    def count(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the same items, and show the progress when it takes longer than a second."""
        try:
            for item in items:
                yield item
                self.counted += 1
                if self.counted % EVERY == 0:
                    self.show(time.monotonic())
        finally:
            if sys.stderr.isatty() and self.shown > self.begun:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()

    def share(self) -> float:
        """Return how much is done, from 0 to 1; 0 where that is not known."""
        if self.items:
            return min(self.counted / self.items, 1.0)
        return min(sum(position() for position in self.positions) / self.bytes, 1.0) if self.bytes else 0.0

    def show(self, now: float) -> None:
        terminal = sys.stderr.isatty()
        soon = now - self.begun < QUICK or now - self.shown < (REFRESH if terminal else SELDOM)
        if soon or not is_shown(NOTE):
            return
        self.shown = now
        share, seconds = self.share(), now - self.begun
        told = [f"{share:.0%}"] if share else []
        if self.passes == 1:
            told += [f"{self.counted:,} pairs", f"{self.counted / seconds:,.0f}/s"]
        told += [f"{seconds * (1 - share) / share:.0f} s left"] if share else []
        if terminal:
            bar = f" {'━' * round(share * WIDTH):─<{WIDTH}}" if share else ""
            sys.stderr.write(f"\r{self.what}{bar} {', '.join(told)}\x1b[K")
            sys.stderr.flush()
        else:
            say(f"{self.what}: {', '.join(told)}")


QUIET_SECONDS = 10.0  # without a terminal, a line at most so often


class Report:
    """Messages go to stderr: results own stdout. Without a terminal there is no bar, only a line now and then."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet  # another process prints the messages
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        self.progress: Progress | None = None
        self.task = TaskID(0)
        self.spoke = time.monotonic()

    def say(self, message: str, level: int = NOTE) -> None:
        """Print a message of one of the levels of console.py."""
        if is_shown(level) and not self.quiet:
            self.console.print(message, markup=False)

    def counted(self, items: Iterable[T], what: str) -> Iterator[T]:
        """The same items, with a count that is shown when it takes long."""
        begun = shown = time.monotonic()
        count = 0
        for count, item in enumerate(items, 1):
            yield item
            if count % 1024 == 0 and time.monotonic() - shown > (0.5 if self.console.is_terminal else QUIET_SECONDS):
                shown = time.monotonic()
                self.count(f"{what}: {count:,} ({count / (shown - begun):,.0f}/s)")
        if shown > begun and self.console.is_terminal:
            self.count("")

    def count(self, said: str) -> None:
        """On a terminal the last count gives way to the next; elsewhere each stands on its own line."""
        if self.quiet or not is_shown(NOTE):
            return
        if self.console.is_terminal:
            sys.stderr.write(f"\r{said}\x1b[K")
            sys.stderr.flush()
        else:
            self.say(said)

    def begin(self, total: int, done: int, what: str = "training") -> None:
        self.spoke = time.monotonic()  # the first step says little of how long the others take
        if self.console.is_terminal and not self.quiet and is_shown(NOTE):
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[said]}"),
            )
            self.progress = Progress(*columns, console=self.console, transient=True)
            self.task = self.progress.add_task(what, total=total or None, completed=done, said="")
            self.progress.start()

    def step(self, done: float, said: str) -> None:
        if self.progress:
            self.progress.update(self.task, completed=done, said=said)
        elif time.monotonic() - self.spoke > QUIET_SECONDS:
            self.spoke = time.monotonic()
            self.say(said)

    def end(self) -> None:
        if self.progress:
            self.progress.stop()
            self.progress = None
