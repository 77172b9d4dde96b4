"""What finds answers: the same question to every engine, whatever runs underneath."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Protocol, TypeVar

from dragoman.config.settings import SearchSettings
from dragoman.decoding.protocol import SearchResult
from dragoman.decoding.request import Job

T = TypeVar("T")


def in_order(found: Iterable[tuple[int, T]]) -> list[T]:
    """What came by its number, by number."""
    return [each for _, each in sorted(found, key=itemgetter(0))]


class Engine(Protocol):
    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[SearchResult]]:
        """For every job up to `search.nbest` different answers, best first."""
        ...

    def each(self, jobs: Sequence[Job], search: SearchSettings) -> Iterator[tuple[int, list[SearchResult]]]:
        """The same by the numbers of the jobs, in any order: an engine that has some sooner than others gives those
        first, and goes on while they are looked at."""
        yield from enumerate(self.search(jobs, search))
