"""Errors that a command reports without a traceback, and the handler of Ctrl-C (exit code 130, no traceback).

Python turns Ctrl-C into KeyboardInterrupt. No code catches that exception while modules are imported or while the
interpreter shuts down, and some libraries turn it into another exception. This module imports almost nothing, so that
its handler can be installed before the rest of Dragoman is imported.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType


class UserError(ValueError):
    """A problem the user can fix (input, settings or environment), shown without a traceback.

    The message is one sentence that says what is wrong, where, and what to do. It may quote user input, so control
    characters are escaped: the message is always one line.
    """

    def __init__(self, message: object) -> None:
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in str(message)))


class Stop(Exception):
    """Raised to end a command early, after a signal or because another process died. Written checkpoints are intact.

    `code` is the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


INTERRUPTED = 130  # exit code after Ctrl-C: 128 + SIGINT, as shells report a process that a signal has ended
REPEAT_SECONDS = 0.05  # after which Ctrl-C is handled again if that was not possible at once
TERMINATED = 143  # exit code after SIGTERM: 128 + SIGTERM
interrupt_is_caught = False  # set by a caller that catches KeyboardInterrupt; otherwise Ctrl-C ends the process
# Whether KeyboardInterrupt was raised. If so, a later exception may be one into which a library converted it.
interrupt_was_raised = False


def handle_interrupts() -> None:
    """Install the handler of Ctrl-C, unless the parent process (nohup, or a script) has made this one ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise_interrupt)


def _raise_interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt if a caller catches it; otherwise end the process at once."""
    global interrupt_was_raised
    if not interrupt_is_caught:
        with suppress(OSError):
            os.write(2, b"dragoman: stopped\n")
        os._exit(INTERRUPTED)
    interrupt_was_raised = True
    if is_in_destructor(frame):  # Python ignores exceptions there, so that Ctrl-C would be lost
        repeat = threading.Timer(REPEAT_SECONDS, signal.pthread_kill, [threading.get_ident(), signal_number])
        repeat.daemon = True
        repeat.start()
    else:
        signal.default_int_handler(signal_number, frame)


def is_in_destructor(frame: FrameType | None) -> bool:
    """Return whether a frame, or one that has called it, is that of a `__del__` method."""
    while frame and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
