"""What a run tells people while it goes: messages and a progress line on stderr, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dragoman.console import NOTE, is_shown
from dragoman.store import unwritable, write_text
from dragoman.types import UserError

T = TypeVar("T")
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


class Metrics:
    """metrics.jsonl, one record a line, and the same numbers for TensorBoard. Cut back to the step resumed from."""

    def __init__(self, path: Path, *, step: int, board: bool) -> None:
        self.path, self.wants_board = path, board
        self.file: IO[str] | None = None
        self.board: Any = None
        self.cut(step)

    def cut(self, step: int) -> None:
        """Forget what came after this step."""
        self.close()
        kept = [line for line in _lines(self.path) if _step(line) <= step]
        write_text(self.path, "".join(line + "\n" for line in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.board = _board(self.path.parent / "tensorboard", step) if self.wants_board else None

    def write(self, event: str, step: int, **values: Any) -> None:
        """One more record. What is not a number is null: JSON knows neither NaN nor infinity."""
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        assert self.file is not None
        try:
            self.file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
            self.file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from None
        if self.board:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        for sink in (self.file, self.board):
            if sink:
                with suppress(OSError):  # a disk that is full was said already
                    sink.close()
        self.file = self.board = None


class Unwritten(Metrics):
    """Those of a process that does not write: the first one does."""

    def __init__(self) -> None:
        """There is no file."""

    def cut(self, step: int) -> None:
        """There is nothing to forget."""

    def write(self, event: str, step: int, **values: Any) -> None:
        """Nowhere."""

    def close(self) -> None:
        """There is nothing to close."""


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")  # a torn line: not kept


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("train.tensorboard=true needs TensorBoard: pip install 'dragoman[board]'") from None
    return SummaryWriter(str(folder), purge_step=step + 1)
