""""""

from __future__ import annotations


class UserError(ValueError):
    """What the user gave cannot work. The message is one plain sentence: the culprit, and what would be right."""


class Stop(Exception):
    """Work ends before its time, by a signal or because others are gone; what is saved is whole.

    `code` is what a shell expects of it.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
