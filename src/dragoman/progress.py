"""Progress of a command that goes through many items: a bar and the time left on a terminal, elsewhere a line now and
then. Light to import: commands on corpora need no PyTorch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from dragoman.console import NOTE, QUICK, SELDOM, is_shown, say

T = TypeVar("T")
EVERY = 256  # items between two looks at the clock
REFRESH = 0.2  # seconds between two states of the bar
WIDTH = 24  # characters of the bar


class Progress:
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
