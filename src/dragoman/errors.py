"""Errors that a command reports without a traceback. Also handles Ctrl-C: exit code 130, no traceback.

Python turns Ctrl-C into KeyboardInterrupt. While modules are imported and while the interpreter shuts down, nothing
catches it, and some libraries turn it into another exception. This module imports almost nothing, so that its
handler is installed before the rest of Dragoman is imported.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType


class UserError(ValueError):
    """A problem the user can fix (input, settings or environment), shown without a traceback.

    The message is one sentence that says what is wrong, where, and what to do.
    """


class Stop(Exception):
    """The command ends early, by a signal or because another process died. Checkpoints already written are intact.

    `code` is the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


INTERRUPTED = 130  # exit code
interrupt_is_caught = False  # whether a caller catches KeyboardInterrupt; if not, Ctrl-C ends the process
# Whether KeyboardInterrupt was raised: a library may have turned it into the exception that arrives later.
interrupt_was_raised = False


def handle_interrupts() -> None:
    """Handle Ctrl-C, unless the parent process (nohup, or a script) started this one with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise_interrupt)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    global interrupt_was_raised
    if not interrupt_is_caught:
        with suppress(OSError):
            os.write(2, b"dragoman: stopped\n")
        os._exit(INTERRUPTED)
    interrupt_was_raised = True
    signal.default_int_handler(number, frame)
