"""What finds answers: the same question to every engine, whatever runs underneath."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeVar

from dragoman.config import SearchSettings
from dragoman.search.request import Wish
from dragoman.search.step import Found
from dragoman.types import Links

T = TypeVar("T")


class Job(NamedTuple):
    """A source to answer: its ids without marks, and the most tokens that an answer may have, its end mark counted."""

    ids: list[int]
    limit: int
    wish: Wish = Wish()  # what else is asked of the answer
    links: Links | None = None  # of the source's tree, for models that ask for trees


def in_order(found: Iterable[tuple[int, T]]) -> list[T]:
    """What came by its number, by number."""
    return [each for _, each in sorted(found, key=itemgetter(0))]


class Engine(Protocol):
    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[Found]]:
        """For every job up to `search.nbest` different answers, best first."""
        ...

    def each(self, jobs: Sequence[Job], search: SearchSettings) -> Iterator[tuple[int, list[Found]]]:
        """The same by the numbers of the jobs, in any order: an engine that has some sooner than others gives those
        first, and goes on while they are looked at."""
        yield from enumerate(self.search(jobs, search))
