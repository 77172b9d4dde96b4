"""What finds answers: the same question to every engine, whatever runs underneath."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dragoman.config import SearchSettings
from dragoman.search.request import Wish
from dragoman.search.step import Found
from dragoman.types import Links


class Job(NamedTuple):
    """A source to answer: its ids without marks, and the most tokens that an answer may have, its end mark counted."""

    ids: list[int]
    limit: int
    wish: Wish = Wish()  # what else is asked of the answer
    links: Links | None = None  # of the source's tree, for models that ask for trees


class Engine(Protocol):
    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[Found]]:
        """For every job up to `search.nbest` different answers, best first."""
        ...
