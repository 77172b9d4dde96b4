"""Decoding methods. Each takes a request and returns the results of every sentence, best first.

A `Method` also carries what the rest of the package has to know about it, so nothing else asks for a method by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dragoman.config.settings import Registries, SearchSettings, check_names
from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES, BeamSearch
from dragoman.decoding.mbr import MBR_METRICS, rank_by_agreement
from dragoman.decoding.protocol import DecodingConstraints, Job, SearchResult
from dragoman.decoding.sampling import SampleSearch
from dragoman.decoding.search import SearchFactory
from dragoman.decoding.sentence_beam import ConstrainedBeam, DiverseBeam, SentenceSearches
from dragoman.errors import UserError

MAX_PARALLEL_SAMPLES = 32  # of one sentence
MAX_WIDTH = 64  # beams of a sentence in constrained search


@dataclass(frozen=True)
class Request:
    """Jobs to decode, and the function that runs one search for them: `run(jobs, make_search)`."""

    jobs: Sequence[Job]
    settings: SearchSettings
    run: Callable[[Sequence[Job], SearchFactory], list[list[SearchResult]]]
    decode: Callable[[Sequence[int]], str]  # from tokens to text

    def only(self, chosen: Sequence[bool]) -> Request:
        """Return the same request with results for these jobs only."""
        pairs = zip(self.jobs, chosen, strict=True)
        return replace(self, jobs=[job if keep else job._replace(limit=0) for job, keep in pairs])


def decode(request: Request) -> list[list[SearchResult]]:
    """Return up to `settings.nbest` results per job, by the method that the settings name.

    Sentences with terms that must appear go through constrained beam search first. If that finds nothing with all
    terms, the sentence is decoded like the others, and the caller looks for the terms in the text.
    """
    request = replace(request, settings=apply_fixed_settings(request.settings))
    decode_others = METHODS[request.settings.method].decode
    if not any(job.constraints.must for job in request.jobs):
        return decode_others(request)
    results = decode_constrained(request)
    others = decode_others(request.only([not some for some in results]))
    return [some or other for some, other in zip(results, others, strict=True)]


def decode_constrained(request: Request) -> list[list[SearchResult]]:
    """Return results with all required terms; an empty list where no term is required or none was found."""
    settings, results = request.settings, [list[SearchResult]() for _ in request.jobs]
    widths = [choose_width(job.constraints, settings.beam) for job in request.jobs]
    for width in sorted(set(widths) - {0}):
        some = request.only([each == width for each in widths])
        found = request.run(some.jobs, partial(SentenceSearches, ConstrainedBeam, settings, width))
        results = [old or new for old, new in zip(results, found, strict=True)]
    return results


def choose_width(constraints: DecodingConstraints, beam: int) -> int:
    """Return the beams of a sentence, some for each bank, or 0 if no term is required.

    They depend on its own constraints, not on the batch.
    """
    if not constraints.spellable:
        return 0
    width = max(beam, 8)
    while width < min(beam + constraints.needed_tokens, MAX_WIDTH):
        width *= 2
    return width


def decode_beam(request: Request) -> list[list[SearchResult]]:
    """Run beam search. Greedy search is a beam of 1 that stops at its first result."""
    return request.run(request.jobs, partial(BeamSearch, request.settings))


def decode_diverse(request: Request) -> list[list[SearchResult]]:
    """Run diverse beam search."""
    settings = request.settings
    return request.run(request.jobs, partial(SentenceSearches, DiverseBeam, settings, settings.beam))


def decode_samples(request: Request) -> list[list[SearchResult]]:
    """Return `nbest` samples in the order of their numbers, computed at most MAX_PARALLEL_SAMPLES at a time."""
    settings, results = request.settings, [list[SearchResult]() for _ in request.jobs]
    W = min(settings.nbest, MAX_PARALLEL_SAMPLES)
    for first in range(0, settings.nbest, W):
        sampled = request.run(request.jobs, partial(SampleSearch, settings, range(first, first + W)))
        results = [(some + new)[: settings.nbest] for some, new in zip(results, sampled, strict=True)]
    return results


def decode_mbr(request: Request) -> list[list[SearchResult]]:
    """Return the results most like all others: of samples, or of a beam's results weighted by probability."""
    settings, by_beam = request.settings, request.settings.candidates == "beam"
    count = settings.beam if by_beam else settings.samples
    candidates = replace(request, settings=settings.model_copy(update={"nbest": count}))
    ranked = []
    for some in decode_beam(candidates) if by_beam else decode_samples(candidates):
        best = max((one.logp for one in some), default=0.0)
        weights = [math.exp(one.logp - best) if by_beam else 1.0 for one in some]
        texts = [request.decode(one.tokens) for one in some]
        ranked.append(rank_by_agreement(some, texts, weights, settings.metric)[: settings.nbest])
    return ranked


def check_beam(settings: SearchSettings) -> None:
    """Refuse more results than the beam is wide."""
    count, beam = settings.nbest, settings.beam
    if count > beam:
        raise UserError(f"{count} answers cannot come from a beam of {beam}; ask for --beam {count} or more")


def check_greedy(settings: SearchSettings) -> None:
    """Refuse more than one result."""
    if settings.nbest > 1:
        raise UserError(
            f"{settings.nbest} answers cannot come from greedy search; set search.method to beam, diverse or sample"
        )


def check_mbr(settings: SearchSettings) -> None:
    """Refuse more results than there are candidates."""
    count = settings.nbest
    if settings.candidates != "samples":
        check_beam(settings)
    elif count > settings.samples:
        raise UserError(
            f"{count} answers cannot come from search.samples={settings.samples}; set it to {count} or more"
        )


def check_diverse(settings: SearchSettings) -> None:
    """Refuse a beam that the groups cannot share evenly."""
    check_beam(settings)
    beam, groups = settings.beam, settings.groups
    if beam % groups:
        more = groups * (beam // groups + 1)
        raise UserError(f"a beam of {beam} cannot be shared out to search.groups={groups}; ask for --beam {more}")


@dataclass(frozen=True)
class Method:
    """A decoding method and its properties."""

    decode: Callable[[Request], list[list[SearchResult]]]
    check: Callable[[SearchSettings], None] = lambda _: None  # refuses settings that it cannot follow
    is_beam_search: bool = False  # plain beam search: runs in CUDA graphs and in CTranslate2, and can be streamed
    reranks: bool = False  # asks the search for the whole beam when results are deduplicated or reranked
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that it overrides


METHODS = {
    "beam": Method(decode_beam, check_beam, is_beam_search=True, reranks=True),
    "greedy": Method(decode_beam, check_greedy, is_beam_search=True, fixed={"beam": 1, "stop": "enough"}),
    "sample": Method(decode_samples),
    "mbr": Method(decode_mbr, check_mbr),
    "diverse": Method(decode_diverse, check_diverse),
}
SEARCH_REGISTRIES: Registries = {
    "method": METHODS,
    "length_norm": LENGTH_NORMS,
    "stop": STOP_RULES,
    "metric": MBR_METRICS,
}


def check_search_settings(settings: SearchSettings) -> None:
    """Refuse settings that cannot work, before any work is done."""
    check_names(SEARCH_REGISTRIES, settings, "search")
    METHODS[settings.method].check(settings)


def apply_fixed_settings(settings: SearchSettings) -> SearchSettings:
    """Return the settings with those that the method itself fixes."""
    fixed = METHODS[settings.method].fixed
    return settings.model_copy(update=dict(fixed)) if fixed else settings
