"""Decoding methods. Each takes a request and returns the results of every sentence, best first.

A `Method` also carries what the rest of the package has to know about it, so nothing else asks for a method by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.config.settings import Registries, SearchSettings, check_names
from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES, beam_search
from dragoman.decoding.mbr import MBR_METRICS, rank_by_agreement
from dragoman.decoding.protocol import SearchResult
from dragoman.decoding.request import Request, sample_key
from dragoman.decoding.rules import make_rules
from dragoman.decoding.sampling import sample_translations, search_greedy
from dragoman.decoding.sentence_beam import search_constrained, search_diverse
from dragoman.errors import UserError

MAX_PARALLEL_SAMPLES = 32  # of one sentence


def decode(request: Request[Any]) -> list[list[SearchResult]]:
    """Return up to `settings.nbest` results per sentence, by the method that the settings name.

    Sentences with terms that must appear go through constrained beam search first. If that finds nothing with all
    terms, the sentence is decoded like the others, and the caller looks for the terms in the text.
    """
    results = search_constrained(request)
    rest = [not some for some in results]
    if not any(rest):
        return results
    others = METHODS[request.settings.method].decode(request.only(rest))
    return [some or other for some, other in zip(results, others, strict=True)]


def decode_beam(request: Request[Any]) -> list[list[SearchResult]]:
    """Run beam search; a beam of 1 that stops at its first result is greedy search, which is faster."""
    settings = request.settings
    if settings.beam == 1 and settings.stop == "enough" and not request.watch:
        return decode_greedy(request)
    return beam_search(
        request.model,
        request.source_BS,
        request.keep_BS,
        request.limit_B,
        width=settings.beam,
        nbest=settings.nbest,
        stop=settings.stop,
        watch=request.watch or (lambda _: None),
        **_scoring(request),
    )


def decode_greedy(request: Request[Any]) -> list[list[SearchResult]]:
    """Take the likeliest token at every step: beam search of width 1. An observer sees it as one."""
    if request.watch:
        return decode_beam(replace(request, settings=apply_fixed_settings(request.settings)))
    return search_greedy(request.model, request.source_BS, request.keep_BS, request.limit_B, **_scoring(request))


def decode_samples(request: Request[Any]) -> list[list[SearchResult]]:
    """Sample every token by its probability. Results stay in the order they were sampled in."""
    return draw_samples(request, request.settings.nbest)


def decode_mbr(request: Request[Any]) -> list[list[SearchResult]]:
    """Return the results most like all others: of samples, or of a beam's results weighted by probability."""
    settings = request.settings
    if settings.candidates == "samples":
        results = draw_samples(request, settings.samples)
        weights = [[1.0] * len(some) for some in results]
    else:
        results = decode_beam(replace(request, settings=settings.model_copy(update={"nbest": settings.beam})))
        weights = [[math.exp(one.logp - max(each.logp for each in some)) for one in some] for some in results]
    texts = [[request.decode(one.tokens) for one in some] for some in results]
    rows = zip(results, texts, weights, strict=True)
    return [rank_by_agreement(*row, settings.metric)[: settings.nbest] for row in rows]


def draw_samples(request: Request[Any], count: int) -> list[list[SearchResult]]:
    """Return `count` samples per sentence, computed at most MAX_PARALLEL_SAMPLES at a time."""
    W = min(count, MAX_PARALLEL_SAMPLES)
    results: list[list[SearchResult]] = [[] for _ in request.constraints]
    scoring = _scoring(request)
    for first in range(0, count, W):
        uniform_BWT = make_uniforms(request, range(first, first + W))
        sampled = sample_translations(
            request.model,
            request.source_BS,
            request.keep_BS,
            request.limit_B,
            uniform_BWT,
            request.settings,
            **scoring,
        )
        for some, new in zip(results, sampled, strict=True):
            some += new[: count - first]
    return results


def make_uniforms(request: Request[Any], numbers: range) -> Tensor:
    """Return the random numbers of these samples. They depend on seed, text and sample number, not on the batch."""
    uniform_BWT = np.zeros((len(request.constraints), len(numbers), request.longest))
    for row, (constraints, limit) in enumerate(zip(request.constraints, request.limit_B.tolist(), strict=True)):
        for column, number in enumerate(numbers):
            rng = np.random.default_rng(sample_key(request.settings.seed, constraints.text, number))
            uniform_BWT[row, column, :limit] = rng.random(limit)
    return torch.from_numpy(uniform_BWT)


def _scoring(request: Request[Any]) -> dict[str, Any]:
    settings = request.settings
    return {"alpha": settings.length_penalty, "norm": settings.length_norm, "rules": make_rules(request)}


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

    decode: Callable[[Request[Any]], list[list[SearchResult]]]
    check: Callable[[SearchSettings], None] = lambda _: None  # refuses settings that it cannot follow
    is_beam_search: bool = False  # plain beam search: runs in slots and in CTranslate2, and can be streamed
    reranks: bool = False  # asks the search for the whole beam when results are deduplicated or reranked
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that it overrides


METHODS = {
    "beam": Method(decode_beam, check_beam, is_beam_search=True, reranks=True),
    "greedy": Method(decode_greedy, check_greedy, is_beam_search=True, fixed={"beam": 1, "stop": "enough"}),
    "sample": Method(decode_samples),
    "mbr": Method(decode_mbr, check_mbr),
    "diverse": Method(search_diverse, check_diverse),
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
