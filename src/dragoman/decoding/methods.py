"""Decoding methods. Each takes a request and returns the results of every sentence, best first.

A `Method` also carries what the rest of the package has to know about it, so nothing else asks for a method by name. To
add a method, write a function and a line in METHODS; settings of its own are fields of SearchSettings.

Minimum Bayes risk decoding chooses, of many hypotheses, the one that is most similar to all the others. The likeliest
one can be an outlier; one that the others agree with seldom is. Similarity is a metric between two sentences, computed
for all pairs at once from n-gram counts.

Shapes   H hypotheses   F different n-grams   n an order
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dragoman.config.settings import Registries, check_names, pick, setting
from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES, BeamSearch
from dragoman.decoding.protocol import DecodingConstraints, Job, SearchFactory, SearchResult
from dragoman.decoding.sampling import SampleSearch
from dragoman.decoding.sentence_beam import ConstrainedBeam, DiverseBeam, DiverseSettings, SentenceSearches
from dragoman.errors import UserError

Floats = NDArray[np.float64]
CHRF_ORDER, BLEU_ORDER = 6, 4  # orders of n-grams
CHRF_BETA = 2.0  # weight of recall against precision


def rank_by_agreement(
    found: Sequence[SearchResult], texts: Sequence[str], weights: Sequence[float], metric: str
) -> list[SearchResult]:
    """Rank hypotheses by their weighted mean similarity to all others; of equal texts only the first stays.

    The similarity, from 0 to 1, becomes the score.
    """
    if not found:
        return []
    similarity_HH = pick(MBR_METRICS, metric, "metric of mbr")(texts)
    weight_H = np.array(weights, dtype=np.float64)
    gain_H = (similarity_HH @ (weight_H / weight_H.sum())).tolist()
    first: dict[str, SearchResult] = {}
    for text, one, gain in zip(texts, found, gain_H, strict=True):
        first.setdefault(text, replace(one, score=gain))
    return sorted(first.values(), key=lambda one: -one.score)


def count_ngrams(items: Sequence[Sequence[str]]) -> Floats:
    """Return how often each hypothesis has each n-gram: count_HF."""
    number: dict[str, int] = {}
    indices = [[number.setdefault(item, len(number)) for item in some] for some in items]
    count_HF = np.zeros((len(items), len(number)))
    for row, some in enumerate(indices):
        np.add.at(count_HF[row], some, 1)
    return count_HF


def count_shared_ngrams(count_HF: Floats) -> Floats:
    """Return how many n-grams each pair of hypotheses shares, with multiplicity: match_HH."""
    match_HH = np.empty((len(count_HF), len(count_HF)))
    for row, count_F in enumerate(count_HF):
        there_F = count_F > 0
        match_HH[row] = np.minimum(count_HF[:, there_F], count_F[there_F]).sum(1)
    return match_HH


def pairwise_chrf(texts: Sequence[str]) -> Floats:
    """Return chrF of each hypothesis (row) against each other as its reference (column), as in sacreBLEU, from 0 to 1.

    Precision and recall are means over the orders that both have.
    """
    bare = ["".join(text.split()) for text in texts]
    precision_HH = recall_HH = orders_HH = np.zeros((len(texts), len(texts)))
    for n in range(1, CHRF_ORDER + 1):
        count_HF = count_ngrams([[text[i : i + n] for i in range(len(text) - n + 1)] for text in bare])
        total_H, match_HH = count_HF.sum(1), count_shared_ngrams(count_HF)
        both_HH = (total_H[:, None] > 0) & (total_H > 0)
        safe_H = np.maximum(total_H, 1)
        precision_HH = precision_HH + match_HH / safe_H[:, None]
        recall_HH = recall_HH + match_HH / safe_H
        orders_HH = orders_HH + both_HH
    orders_HH = np.maximum(orders_HH, 1)
    precision_HH, recall_HH = precision_HH / orders_HH, recall_HH / orders_HH
    below_HH = CHRF_BETA**2 * precision_HH + recall_HH
    return (1 + CHRF_BETA**2) * precision_HH * recall_HH / np.where(below_HH > 0, below_HH, 1)


def pairwise_bleu(texts: Sequence[str]) -> Floats:
    """Return sentence BLEU likewise, as in sacreBLEU: 13a tokens, exponential smoothing of orders without a match."""
    from sacrebleu.metrics.bleu import BLEU

    tokenize = BLEU(tokenize="13a").tokenizer
    words = [tokenize(text.rstrip()).split() for text in texts]
    length_H = np.array([len(some) for some in words], dtype=np.float64)
    H = len(texts)
    logs_HH, orders_HH, smooth_HH, any_HH = np.zeros((H, H)), np.zeros((H, H)), np.ones((H, H)), np.zeros((H, H))
    for n in range(1, BLEU_ORDER + 1):
        count_HF = count_ngrams([["\0".join(some[i : i + n]) for i in range(len(some) - n + 1)] for some in words])
        total_H1, match_HH = count_HF.sum(1)[:, None], count_shared_ngrams(count_HF)
        there_HH = np.broadcast_to(total_H1 > 0, (H, H))
        smooth_HH = np.where(match_HH > 0, smooth_HH, smooth_HH / 2)
        precision_HH = np.where(match_HH > 0, match_HH, smooth_HH) / np.maximum(total_H1, 1)
        logs_HH = logs_HH + np.where(there_HH, np.log(precision_HH), 0)
        orders_HH = orders_HH + there_HH
        any_HH = any_HH + match_HH
    brevity_HH = np.minimum(0, 1 - length_H / np.maximum(length_H, 1)[:, None])
    return np.where(any_HH > 0, np.exp(brevity_HH + logs_HH / np.maximum(orders_HH, 1)), 0)


MBR_METRICS: dict[str, Callable[[Sequence[str]], Floats]] = {"chrf": pairwise_chrf, "bleu": pairwise_bleu}

MAX_PARALLEL_SAMPLES = 32  # samples of one sentence that are computed at a time
MAX_WIDTH = 64  # beams of a sentence in constrained search


class SearchSettings(DiverseSettings):
    """The `search` section of a recipe: the settings of all decoding methods together."""

    samples: int = setting(32, "mbr: number of samples; the most similar to the others wins", ge=1, le=10_000)
    candidates: Literal["samples", "beam"] = setting("samples", "mbr: candidates are samples or beam search results")
    metric: str = setting("chrf", "mbr: similarity metric")


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


def check_count(settings: SearchSettings, most: int, origin: str) -> None:
    """Refuse more results than the method can return; `origin` says where they come from, and the remedy."""
    if settings.nbest > most:
        raise UserError(f"{settings.nbest} answers cannot come from {origin}")


def check_beam(settings: SearchSettings) -> None:
    check_count(settings, settings.beam, f"a beam of {settings.beam}; ask for --beam {settings.nbest} or more")


def check_greedy(settings: SearchSettings) -> None:
    check_count(settings, 1, "greedy search; set search.method to beam, diverse or sample")


def check_mbr(settings: SearchSettings) -> None:
    if settings.candidates == "beam":
        return check_beam(settings)
    origin = f"search.samples={settings.samples}; set it to {settings.nbest} or more"
    return check_count(settings, settings.samples, origin)


def check_diverse(settings: SearchSettings) -> None:
    """Raise a UserError if the beam is not a multiple of the number of groups."""
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
    reranks: bool = False  # whether the search must return the full beam when results are deduplicated or reranked
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
    """Return the settings, with those that the method determines replaced."""
    fixed = METHODS[settings.method].fixed
    return settings.model_copy(update=dict(fixed)) if fixed else settings
