"""The ways to look for answers. Each takes a request and gives every sentence its answers, best first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.config.settings import Menus, SearchSettings, pick_all
from dragoman.decoding.beam import STOP_RULES, beam_search
from dragoman.decoding.constrained import search_constrained
from dragoman.decoding.diverse import search_diverse
from dragoman.decoding.mbr import MBR_METRICS, rank_by_agreement
from dragoman.decoding.protocol import LENGTH_NORMS, SearchResult
from dragoman.decoding.request import Request, sample_key
from dragoman.decoding.rules import make_rules
from dragoman.decoding.sampling import sample_translations, search_greedy
from dragoman.errors import UserError

MAX_PARALLEL_SAMPLES = 32  # samples of a sentence


def decode(request: Request[Any]) -> list[list[SearchResult]]:
    """Up to `settings.nbest` answers to every sentence, by the method that the settings name.

    Sentences whose wish names terms that must appear are searched for those first; one that cannot have them all is
    answered like the others, and whoever asked for terms looks for them in the text.
    """
    found = search_constrained(request)
    rest = [not answers for answers in found]
    if not any(rest):
        return found
    others = METHODS[request.settings.method](request.only(rest))
    return [some or other for some, other in zip(found, others, strict=True)]


def decode_beam(request: Request[Any]) -> list[list[SearchResult]]:
    """The best few prefixes, side by side."""
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
    """The likeliest token, again and again: a beam of one."""
    if request.watch:
        return decode_beam(replace(request, settings=request.settings.model_copy(update={"beam": 1, "stop": "enough"})))
    return search_greedy(request.model, request.source_BS, request.keep_BS, request.limit_B, **_scoring(request))


def decode_samples(request: Request[Any]) -> list[list[SearchResult]]:
    """Each token drawn, by its probability. Answers come in the order they were drawn in."""
    return draw_samples(request, request.settings.nbest)


def decode_mbr(request: Request[Any]) -> list[list[SearchResult]]:
    """The answer that is most like all others: of samples, or of the answers of a beam, weighed by probability."""
    settings = request.settings
    if settings.candidates == "samples":
        found = draw_samples(request, settings.samples)
        weights = [[1.0] * len(some) for some in found]
    else:
        found = decode_beam(replace(request, settings=settings.model_copy(update={"nbest": settings.beam})))
        weights = [[math.exp(one.logp - max(each.logp for each in some)) for one in some] for some in found]
    texts = [[request.decode(one.tokens) for one in some] for some in found]
    rows = zip(found, texts, weights, strict=True)
    return [rank_by_agreement(some, said, weight, settings.metric)[: settings.nbest] for some, said, weight in rows]


def draw_samples(request: Request[Any], count: int) -> list[list[SearchResult]]:
    """So many samples of every sentence, a few at a time."""
    W = min(count, MAX_PARALLEL_SAMPLES)
    found: list[list[SearchResult]] = [[] for _ in request.constraints]
    for first in range(0, count, W):
        draw_BWT = make_uniforms(request, range(first, first + W))
        grids = request.source_BS, request.keep_BS, request.limit_B, draw_BWT
        for answers, some in zip(
            found, sample_translations(request.model, *grids, request.settings, **_scoring(request))
        ):
            answers += some[: count - first]
    return found


def make_uniforms(request: Request[Any], numbers: range) -> Tensor:
    """What the samples of these numbers are drawn with: by seed, text and number alone, whoever the neighbours are."""
    draw_BWT = np.zeros((len(request.constraints), len(numbers), request.longest))
    for row, (wish, limit) in enumerate(zip(request.constraints, request.limit_B.tolist(), strict=True)):
        for place, number in enumerate(numbers):
            rng = np.random.default_rng(sample_key(request.settings.seed, wish.text, number))
            draw_BWT[row, place, :limit] = rng.random(limit)
    return torch.from_numpy(draw_BWT)


def _scoring(request: Request[Any]) -> dict[str, Any]:
    settings = request.settings
    return {"alpha": settings.length_penalty, "norm": settings.length_norm, "rules": make_rules(request)}


def check_search_settings(settings: SearchSettings) -> None:
    """Refuse what cannot work before any work is done."""
    pick_all(SEARCH_REGISTRIES, settings, "search")
    count, beam, groups = settings.nbest, settings.beam, settings.groups
    drawing = settings.method == "sample" or (settings.method == "mbr" and settings.candidates == "samples")
    if settings.method == "greedy" and count > 1:
        raise UserError(f"{count} answers cannot come from greedy search; set search.method to beam, diverse or sample")
    if settings.method == "mbr" and drawing and count > settings.samples:
        raise UserError(
            f"{count} answers cannot come from search.samples={settings.samples}; set it to {count} or more"
        )
    if not drawing and settings.method != "greedy" and count > beam:
        raise UserError(f"{count} answers cannot come from a beam of {beam}; ask for --beam {count} or more")
    if settings.method == "diverse" and beam % groups:
        more = groups * (beam // groups + 1)
        raise UserError(f"a beam of {beam} cannot be shared out to search.groups={groups}; ask for --beam {more}")


METHODS: dict[str, Callable[[Request[Any]], list[list[SearchResult]]]] = {
    "beam": decode_beam,
    "greedy": decode_greedy,
    "sample": decode_samples,
    "mbr": decode_mbr,
    "diverse": search_diverse,
}
SEARCH_REGISTRIES: Menus = {"method": METHODS, "length_norm": LENGTH_NORMS, "stop": STOP_RULES, "metric": MBR_METRICS}
