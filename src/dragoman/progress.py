"""Messages and progress bars on stderr, and the console for results on stdout.

`log` prints messages, `ProgressBar` shows the progress of a long operation, and `Report` does both or, except in the
main process of torchrun, nothing. It does not import PyTorch, so that commands on corpora start quickly.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

ERROR, WARNING, INFO, DETAIL = range(4)  # levels of messages, most important first
UNDECODED = re.compile(r"\\u(dc[89a-f][0-9a-f])")  # byte of a file name that Python could not decode, in repr()
NO_WRAP = 1 << 30  # console width in characters: wider than any table, so that no line is wrapped
CLEAR_LINE = "\r\x1b[K"
BAR_WIDTH = 24  # characters
MIN_SHOWN_SECONDS = 1.0  # on a terminal, shorter operations show no progress
REFRESH_SECONDS = 0.2  # between two updates on a terminal
LOG_SECONDS = 10.0  # between two lines of progress if stderr is not a terminal
ITEMS_PER_UPDATE = 256  # items between two calls of `set_done` in `iterate`

T = TypeVar("T")
_verbosity = INFO  # less important messages are not printed


def set_verbosity(level: int) -> None:
    """Print messages up to this level. The option -q sets WARNING, -qq sets ERROR and -v sets DETAIL."""
    global _verbosity
    _verbosity = level


def is_shown(level: int) -> bool:
    """Return whether messages of this level are printed. Progress bars are shown if INFO messages are."""
    return level <= _verbosity


def log(message: str, level: int = INFO) -> None:
    """Print a message to stderr. On a terminal it replaces the progress bar, which the next update draws below it."""
    if level > _verbosity:
        return
    # Restore bytes of file names that Python could not decode, e.g. in a locale without UTF-8: '\\udcc3\\udcbc' is 'ü'.
    text = UNDECODED.sub(lambda match: chr(int(match[1], 16)), message)
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    console.print((CLEAR_LINE if sys.stderr.isatty() else "") + text, markup=False)


class PipeConsole(Console):
    """A console for output to a file or another program. Lines are not wrapped and have no trailing spaces."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))
        self.file.flush()


def results_console() -> Console:
    """Return a console for stdout. On a terminal, tables fit its width; elsewhere they are as wide as needed."""
    if sys.stdout.isatty():
        return Console(highlight=False, emoji=False, soft_wrap=True)
    return PipeConsole(highlight=False, emoji=False, soft_wrap=True, width=NO_WRAP)


class ProgressBar:
    """Show the progress of an operation: a bar with the time left on a terminal, otherwise a line every few seconds.

    The fraction done is computed from `total`, the number of items. For `files` it is computed from the number of bytes
    read, which readers report through `watch`. Without either, only a count is shown. `passes` is how often all items
    are processed; if more than 1, no count is shown.

        with ProgressBar("scoring", total=1000, unit="lines") as bar:
            bar.set_done(250)

        bar = ProgressBar("cleaning", files=["train.en.gz", "train.de.gz"])
        for pair in bar.iterate(read_pairs(corpus, watch=bar.watch)):
            ...
    """

    def __init__(
        self,
        name: str,
        *,
        total: float = 0,
        unit: str = "pairs",
        files: Sequence[str] = (),
        passes: int = 1,
        visible: bool = True,
        log: Callable[[str], None] = log,
    ) -> None:
        self.log = log  # prints the progress lines if there is no terminal
        self.name, self.total, self.unit, self.passes, self.visible = name, total * passes, unit, passes, visible
        paths = [Path(file) for file in files]
        regular = all(path.is_file() for path in paths)  # a pipe has no size
        self.total_bytes = passes * sum(path.stat().st_size for path in paths) if regular else 0
        self.positions: list[Callable[[], int]] = []  # one function per file: bytes read so far
        self.done: float = 0  # items
        self.skipped: float = 0  # items done before an interruption, which do not count for the speed
        self.on_screen = False
        self.start_time = self.refresh_time = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, position: Callable[[], int]) -> None:
        """Register a function that returns how many bytes of a file have been read."""
        self.positions.append(position)

    def iterate(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items and count them as done. Counting continues after the items of earlier passes."""
        before = count = int(self.done)
        try:
            for count, item in enumerate(items, before + 1):
                yield item
                if count % ITEMS_PER_UPDATE == 0:
                    self.set_done(count)
        finally:
            self.done = count
            self.close()

    def skip(self, count: int) -> None:
        """Count items as done that were done before an interruption."""
        self.done, self.skipped = self.done + count, self.skipped + count

    def advance(self, count: int) -> None:
        self.set_done(self.done + count)

    def set_done(self, done: float, text: str = "") -> None:
        """Set how many items are done, and refresh the display at intervals. `text` replaces count and speed."""
        self.done = done
        now, terminal = time.monotonic(), sys.stderr.isatty()
        seconds, idle_seconds = now - self.start_time, now - self.refresh_time
        interval, delay = (REFRESH_SECONDS, MIN_SHOWN_SECONDS) if terminal else (LOG_SECONDS, 0.0)
        if not self.visible or not is_shown(INFO) or idle_seconds <= interval or seconds < delay:
            return
        self.refresh_time, fraction = now, self.fraction()
        details = text or self.describe(fraction, seconds)
        if not terminal:
            self.log(text or f"{self.name}: {details}")
            return
        bar = f" {'━' * round(fraction * BAR_WIDTH):─<{BAR_WIDTH}}" if fraction else ""
        line, width = f"{self.name}{bar} {details}", terminal_width()
        line = line if len(line) < width else details[: width - 1]  # a line that wraps cannot be overwritten
        sys.stderr.write(f"\r{line}\x1b[K")
        sys.stderr.flush()
        self.on_screen = True

    def fraction(self) -> float:
        """Return the fraction of the work that is done, from 0 to 1; 0 if unknown."""
        if self.total:
            return min(self.done / self.total, 1.0)
        return min(sum(position() for position in self.positions) / self.total_bytes, 1.0) if self.total_bytes else 0.0

    def describe(self, fraction: float, seconds: float) -> str:
        """Return percentage, count, speed and remaining time, as far as they are known."""
        parts = [f"{fraction:.0%}"] if fraction else []
        if self.passes == 1:
            speed = (self.done - self.skipped) / seconds
            count = f"{self.done:,} of {self.total:,}" if self.total else f"{self.done:,}"
            parts += [f"{count} {self.unit}", f"{speed:,.{0 if speed >= 10 else 1}f}/s"]
        new_fraction = fraction - (self.skipped / self.total if self.total else 0)  # without the skipped items
        if new_fraction > 0:
            left = seconds * (1 - fraction) / new_fraction
            parts.append(f"{left:.0f} s left" if left < 100 else f"{timedelta(seconds=round(left))} left")
        return ", ".join(parts)

    def close(self) -> None:
        if self.on_screen:
            sys.stderr.write(CLEAR_LINE)
            sys.stderr.flush()
            self.on_screen = False


def terminal_width() -> int:
    """Return the number of columns of the terminal of stderr; 80 if unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class Report:
    """Print messages and show progress bars. A quiet report shows nothing, for example because another process does."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def log(self, message: str, level: int = INFO) -> None:
        """Print a message of one of the levels ERROR, WARNING, INFO and DETAIL, unless this report is quiet."""
        if not self.quiet:
            log(message, level)

    def progress(self, name: str, *, total: float = 0, unit: str = "lines") -> ProgressBar:
        return ProgressBar(name, total=total, unit=unit, visible=not self.quiet, log=self.log)
