"""The errors that a command reports without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Input that cannot work. The message is one sentence: what is wrong, where, and what to do."""


class Stop(Exception):
    """An early end, by a signal or because another process is gone. Everything saved is complete.

    `code` is the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
