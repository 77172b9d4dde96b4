"""The interface of all engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from dragoman.config.settings import SearchSettings
from dragoman.decoding.protocol import SearchResult
from dragoman.decoding.request import Job


class Engine(Protocol):
    """Decode jobs with a model, whatever library runs it."""

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[SearchResult]]:
        """Return up to `search.nbest` different results per job, best first."""
        ...

    def iter_results(self, jobs: Sequence[Job], search: SearchSettings) -> Iterator[tuple[int, list[SearchResult]]]:
        """Yield the results of each job with its number, in any order, so that callers can process the first ones
        while an asynchronous engine computes the others."""
        yield from enumerate(self.search(jobs, search))
