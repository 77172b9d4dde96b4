"""Ctrl-C from the first moment of a command to the last: exit code 130, and no traceback.

Python turns Ctrl-C into KeyboardInterrupt. While modules are imported and while the interpreter shuts down, nobody
catches that, and some libraries turn it into an error of their own. This module imports almost nothing, so that its
handler is installed before the rest of Dragoman is imported.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

EXIT_CODE = 130
is_caught = False  # whether a caller catches KeyboardInterrupt; if not, Ctrl-C ends the process
was_raised = False  # whether KeyboardInterrupt was raised: an error that follows may be what a library made of it


def install() -> None:
    """Handle Ctrl-C, unless the parent process made the command ignore it, as nohup and scripts do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def _handle(number: int, frame: FrameType | None) -> None:
    global was_raised
    if not is_caught:
        with suppress(OSError):
            os.write(2, b"dragoman: stopped\n")
        os._exit(EXIT_CODE)
    was_raised = True
    signal.default_int_handler(number, frame)
