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
from dragoman.decoding.beam import STOPS, beam_search
from dragoman.decoding.constrained import constrained
from dragoman.decoding.diverse import diverse
from dragoman.decoding.mbr import METRICS, agreed
from dragoman.decoding.protocol import NORMS, Found
from dragoman.decoding.request import Request, key_of
from dragoman.decoding.rules import rules_of
from dragoman.decoding.sampling import greedy, samples
from dragoman.errors import UserError

SIDE_BY_SIDE = 32  # samples of a sentence


def find(request: Request[Any]) -> list[list[Found]]:
    """Up to `settings.nbest` answers to every sentence, by the method that the settings name.

    Sentences whose wish names terms that must appear are searched for those first; one that cannot have them all is
    answered like the others, and whoever asked for terms looks for them in the text.
    """
    found = constrained(request)
    rest = [not answers for answers in found]
    if not any(rest):
        return found
    others = METHODS[request.settings.method](request.only(rest))
    return [some or other for some, other in zip(found, others, strict=True)]


def by_beam(request: Request[Any]) -> list[list[Found]]:
    """The best few prefixes, side by side."""
    settings = request.settings
    if settings.beam == 1 and settings.stop == "enough" and not request.watch:
        return by_greed(request)
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


def by_greed(request: Request[Any]) -> list[list[Found]]:
    """The likeliest token, again and again: a beam of one."""
    if request.watch:
        return by_beam(replace(request, settings=request.settings.model_copy(update={"beam": 1, "stop": "enough"})))
    return greedy(request.model, request.source_BS, request.keep_BS, request.limit_B, **_scoring(request))


def by_chance(request: Request[Any]) -> list[list[Found]]:
    """Each token drawn, by its probability. Answers come in the order they were drawn in."""
    return drawn(request, request.settings.nbest)


def by_agreement(request: Request[Any]) -> list[list[Found]]:
    """The answer that is most like all others: of samples, or of the answers of a beam, weighed by probability."""
    settings = request.settings
    if settings.candidates == "samples":
        found = drawn(request, settings.samples)
        weights = [[1.0] * len(some) for some in found]
    else:
        found = by_beam(replace(request, settings=settings.model_copy(update={"nbest": settings.beam})))
        weights = [[math.exp(one.logp - max(each.logp for each in some)) for one in some] for some in found]
    texts = [[request.decode(one.tokens) for one in some] for some in found]
    rows = zip(found, texts, weights, strict=True)
    return [agreed(some, said, weight, settings.metric)[: settings.nbest] for some, said, weight in rows]


def drawn(request: Request[Any], count: int) -> list[list[Found]]:
    """So many samples of every sentence, a few at a time."""
    W = min(count, SIDE_BY_SIDE)
    found: list[list[Found]] = [[] for _ in request.wishes]
    for first in range(0, count, W):
        draw_BWT = draws(request, range(first, first + W))
        grids = request.source_BS, request.keep_BS, request.limit_B, draw_BWT
        for answers, some in zip(found, samples(request.model, *grids, request.settings, **_scoring(request))):
            answers += some[: count - first]
    return found


def draws(request: Request[Any], numbers: range) -> Tensor:
    """What the samples of these numbers are drawn with: by seed, text and number alone, whoever the neighbours are."""
    draw_BWT = np.zeros((len(request.wishes), len(numbers), request.longest))
    for row, (wish, limit) in enumerate(zip(request.wishes, request.limit_B.tolist(), strict=True)):
        for place, number in enumerate(numbers):
            rng = np.random.default_rng(key_of(request.settings.seed, wish.text, number))
            draw_BWT[row, place, :limit] = rng.random(limit)
    return torch.from_numpy(draw_BWT)


def _scoring(request: Request[Any]) -> dict[str, Any]:
    settings = request.settings
    return {"alpha": settings.length_penalty, "norm": settings.length_norm, "rules": rules_of(request)}


def check(settings: SearchSettings) -> None:
    """Refuse what cannot work before any work is done."""
    pick_all(MENUS, settings, "search")
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


METHODS: dict[str, Callable[[Request[Any]], list[list[Found]]]] = {
    "beam": by_beam,
    "greedy": by_greed,
    "sample": by_chance,
    "mbr": by_agreement,
    "diverse": diverse,
}
MENUS: Menus = {"method": METHODS, "length_norm": NORMS, "stop": STOPS, "metric": METRICS}
