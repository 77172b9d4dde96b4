"""Ctrl-C from the first moment of a command to the last: exit code 130, and no traceback.

Python turns Ctrl-C into KeyboardInterrupt. While modules are imported and while the interpreter shuts down, nobody
catches that, and some libraries turn it into an error of their own. This module imports next to nothing, so that its
handler is there before the rest of Dragoman is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPED = 130
_catching = _came = False  # whether somebody catches KeyboardInterrupt, and whether one was raised


def install() -> None:
    """Handle Ctrl-C, unless the command was told to ignore it, as nohup and scripts do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


@contextmanager
def catching() -> Iterator[None]:
    """Raise KeyboardInterrupt inside, which the caller catches; outside, Ctrl-C ends the process."""
    global _catching, _came
    _catching, _came = True, False
    try:
        yield
    finally:
        _catching = False


def came() -> bool:
    """Whether Ctrl-C came since `catching` began: an error that followed may be what a library made of it."""
    return _came


def _handle(number: int, frame: FrameType | None) -> None:
    global _came
    if not _catching:
        with suppress(OSError):
            os.write(2, b"dragoman: stopped\n")
        os._exit(STOPPED)
    _came = True
    signal.default_int_handler(number, frame)
