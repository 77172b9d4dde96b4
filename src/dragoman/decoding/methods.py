"""Decoding methods: beam, greedy, diverse, constrained and exhaustive search, sampling, minimum Bayes risk (MBR).

A method is a function that takes a `Request` and returns the results of every sentence, best first. SEARCH_METHODS
lists all methods with their properties, so that no other module compares the names of methods. To add a method, write a
function, add its settings to SearchSettings and add a line to SEARCH_METHODS.

MBR decoding returns the hypothesis that is most similar to all other hypotheses of a sentence. The most probable
hypothesis can be an outlier; a hypothesis that resembles the others rarely is. The similarity is a sentence-level
metric, computed for all pairs of hypotheses at once from n-gram counts.

Shapes   H hypotheses   F distinct n-grams
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dragoman.config.settings import Registries, check_names, get_entry, setting
from dragoman.decoding.beam import LENGTH_NORMS, STOP_RULES, BeamSearch
from dragoman.decoding.exhaustive import EXHAUSTIVE_ROWS, NOT_PROVEN, ExhaustiveSearch
from dragoman.decoding.protocol import DecodingConstraints, SearchFactory, SearchJob, SearchResult
from dragoman.decoding.sampling import SampleSearch
from dragoman.decoding.sentence_beam import ConstrainedBeam, DiverseBeam, DiverseSettings, SentenceSearches
from dragoman.errors import UserError

CHRF_ORDER, BLEU_ORDER = 6, 4  # maximum length of n-grams
CHRF_BETA = 2.0  # recall has beta times the weight of precision


def rank_by_agreement(
    results: Sequence[SearchResult], texts: Sequence[str], weights: Sequence[float], metric: str
) -> list[SearchResult]:
    """Rank the hypotheses of a sentence by their weighted mean similarity to all hypotheses.

    Of several hypotheses with the same text, only the first is returned. The mean similarity, from 0 to 1, replaces the
    score.
    """
    if not results:
        return []
    similarity_HH = get_entry(MBR_METRICS, metric, "metric of mbr")(texts)
    weight_H = np.array(weights, dtype=np.float64)
    mean_H = (similarity_HH @ (weight_H / weight_H.sum())).tolist()
    by_text: dict[str, SearchResult] = {}
    for text, result, mean in zip(texts, results, mean_H, strict=True):
        by_text.setdefault(text, replace(result, score=mean))
    return sorted(by_text.values(), key=lambda result: -result.score)


def count_ngrams(ngram_lists: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """Return count_HF: how often each n-gram occurs in each hypothesis, given a list of n-grams per hypothesis."""
    index: dict[str, int] = {}  # n-gram -> column of count_HF
    column_lists = [[index.setdefault(ngram, len(index)) for ngram in ngrams] for ngrams in ngram_lists]
    count_HF = np.zeros((len(ngram_lists), len(index)))
    for row, columns in enumerate(column_lists):
        np.add.at(count_HF[row], columns, 1)
    return count_HF


def count_shared_ngrams(count_HF: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return match_HH: how many n-grams each pair of hypotheses shares, counted with multiplicity."""
    match_HH = np.empty((len(count_HF), len(count_HF)))
    for row, count_F in enumerate(count_HF):
        present_F = count_F > 0
        match_HH[row] = np.minimum(count_HF[:, present_F], count_F[present_F]).sum(1)
    return match_HH


def pairwise_chrf(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return the chrF of each hypothesis (row) with each hypothesis as its reference (column), from 0 to 1.

    It equals that of sacreBLEU: whitespace is ignored, and precision and recall are means over the n-gram lengths that
    occur in both texts.
    """
    unspaced = ["".join(text.split()) for text in texts]
    precision_HH = recall_HH = orders_HH = np.zeros((len(texts), len(texts)))
    for n in range(1, CHRF_ORDER + 1):
        count_HF = count_ngrams([[text[i : i + n] for i in range(len(text) - n + 1)] for text in unspaced])
        total_H, match_HH = count_HF.sum(1), count_shared_ngrams(count_HF)
        both_HH = (total_H[:, None] > 0) & (total_H > 0)
        divisor_H = np.maximum(total_H, 1)
        precision_HH = precision_HH + match_HH / divisor_H[:, None]
        recall_HH = recall_HH + match_HH / divisor_H
        orders_HH = orders_HH + both_HH
    orders_HH = np.maximum(orders_HH, 1)
    precision_HH, recall_HH = precision_HH / orders_HH, recall_HH / orders_HH
    denominator_HH = CHRF_BETA**2 * precision_HH + recall_HH
    return (1 + CHRF_BETA**2) * precision_HH * recall_HH / np.where(denominator_HH > 0, denominator_HH, 1)


def pairwise_bleu(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return the sentence BLEU of each hypothesis (row) with each hypothesis as its reference (column), from 0 to 1.

    It equals that of sacreBLEU with 13a tokens and exponential smoothing: for the k-th n-gram length without a match,
    the number of matches is taken as 1 / 2**k.
    """
    from sacrebleu.metrics.bleu import BLEU

    tokenize = BLEU(tokenize="13a").tokenizer
    word_lists = [tokenize(text.rstrip()).split() for text in texts]
    length_H = np.array([len(words) for words in word_lists], dtype=np.float64)
    H = len(texts)
    log_sum_HH, orders_HH, matches_HH = np.zeros((3, H, H))
    smooth_HH = np.ones((H, H))
    for n in range(1, BLEU_ORDER + 1):
        ngram_lists = [["\0".join(words[i : i + n]) for i in range(len(words) - n + 1)] for words in word_lists]
        count_HF = count_ngrams(ngram_lists)
        total_H1, match_HH = count_HF.sum(1)[:, None], count_shared_ngrams(count_HF)
        has_ngrams_HH = np.broadcast_to(total_H1 > 0, (H, H))
        smooth_HH = np.where(match_HH > 0, smooth_HH, smooth_HH / 2)
        precision_HH = np.where(match_HH > 0, match_HH, smooth_HH) / np.maximum(total_H1, 1)
        log_sum_HH += np.where(has_ngrams_HH, np.log(precision_HH), 0)
        orders_HH += has_ngrams_HH
        matches_HH += match_HH
    log_brevity_HH = np.minimum(0, 1 - length_H / np.maximum(length_H, 1)[:, None])
    return np.where(matches_HH > 0, np.exp(log_brevity_HH + log_sum_HH / np.maximum(orders_HH, 1)), 0)


MBR_METRICS: dict[str, Callable[[Sequence[str]], NDArray[np.float64]]] = {"chrf": pairwise_chrf, "bleu": pairwise_bleu}

MAX_PARALLEL_SAMPLES = 32  # samples of one sentence that are decoded at the same time
MIN_CONSTRAINED_BEAMS, MAX_CONSTRAINED_BEAMS = 8, 64  # per sentence, if settings.beam is not larger


class SearchSettings(DiverseSettings):
    """The settings of all decoding methods together: the section `search` of a recipe, the configuration of a model."""

    samples: int = setting(32, "mbr: number of samples; the most similar to the others wins", ge=1, le=10_000)
    candidates: Literal["samples", "beam"] = setting("samples", "mbr: candidates are samples or beam search results")
    metric: str = setting("chrf", "mbr: similarity metric")
    max_expansions: int = setting(
        20_000, "exhaustive: maximum number of prefixes of a sentence that are extended by all tokens", ge=1
    )


@dataclass(frozen=True)
class Request:
    """Jobs to decode, and the functions of an engine that decoding methods need."""

    jobs: Sequence[SearchJob]
    settings: SearchSettings
    run: Callable[[Sequence[SearchJob], SearchFactory], list[list[SearchResult]]]  # runs a search
    decode: Callable[[Sequence[int]], str]  # converts token ids to text

    def skip_except(self, chosen: Sequence[bool]) -> Request:
        """Return this request with a limit of 0 tokens for the jobs that are not chosen: they get no results."""
        pairs = zip(self.jobs, chosen, strict=True)
        return replace(self, jobs=[job if is_chosen else job._replace(max_tokens=0) for job, is_chosen in pairs])


def decode(request: Request) -> list[list[SearchResult]]:
    """Return up to `settings.nbest` results per job, decoded by the method `settings.method`.

    Sentences with required terms are decoded by constrained beam search. If it finds no result with all terms, the
    sentence is decoded by the method of the settings, and the caller must check which terms the text contains.
    """
    request = replace(request, settings=apply_method_settings(request.settings))
    method = SEARCH_METHODS[request.settings.method]
    if not any(job.constraints.required for job in request.jobs):
        return method.decode(request)
    constrained = decode_constrained(request)
    if method.is_exact:
        warning = f"{NOT_PROVEN}: sentences with required terms are decoded by beam search"
        constrained = [[replace(result, warning=warning) for result in results] for results in constrained]
    fallback = method.decode(request.skip_except([not results for results in constrained]))
    return [results or others for results, others in zip(constrained, fallback, strict=True)]


def decode_constrained(request: Request) -> list[list[SearchResult]]:
    """Return the results that contain all required terms; an empty list for jobs without required terms or results.

    Sentences that need the same number of beams are decoded together.
    """
    settings, results = request.settings, [list[SearchResult]() for _ in request.jobs]
    widths = [choose_width(job.constraints, settings.beam) for job in request.jobs]
    for width in sorted(set(widths) - {0}):
        jobs = request.skip_except([job_width == width for job_width in widths]).jobs
        new_results = request.run(jobs, partial(SentenceSearches, ConstrainedBeam, settings, width))
        results = [old or new for old, new in zip(results, new_results, strict=True)]
    return results


def choose_width(constraints: DecodingConstraints, beam: int) -> int:
    """Return the number of beams for constrained search, or 0 if the vocabulary can spell no required term.

    Longer terms need more beams, because ConstrainedBeam keeps beams for each number of missing tokens. The
    number depends on the constraints of the sentence only, so that other sentences of a batch do not change its result.
    """
    if not constraints.spellable_terms:
        return 0
    width = max(beam, MIN_CONSTRAINED_BEAMS)
    while width < min(beam + constraints.needed_tokens, MAX_CONSTRAINED_BEAMS):
        width *= 2  # so that few different widths occur
    return width


def decode_beam(request: Request) -> list[list[SearchResult]]:
    """Run beam search. Greedy search is a beam of 1 that stops at its first result."""
    return request.run(request.jobs, partial(BeamSearch, request.settings))


def decode_diverse(request: Request) -> list[list[SearchResult]]:
    settings = request.settings
    return request.run(request.jobs, partial(SentenceSearches, DiverseBeam, settings, settings.beam))


def decode_samples(request: Request) -> list[list[SearchResult]]:
    """Return `nbest` samples in the order of their numbers, decoded at most MAX_PARALLEL_SAMPLES at a time."""
    settings, results = request.settings, [list[SearchResult]() for _ in request.jobs]
    W = min(settings.nbest, MAX_PARALLEL_SAMPLES)
    for first in range(0, settings.nbest, W):
        sampled = request.run(request.jobs, partial(SampleSearch, settings, range(first, first + W)))
        results = [(old + new)[: settings.nbest] for old, new in zip(results, sampled, strict=True)]
    return results


def decode_mbr(request: Request) -> list[list[SearchResult]]:
    """Run MBR decoding. The candidates are samples, or the results of beam search weighted by their probability."""
    settings, use_beam = request.settings, request.settings.candidates == "beam"
    count = settings.beam if use_beam else settings.samples
    candidate_request = replace(request, settings=settings.model_copy(update={"nbest": count}))
    ranked = []
    for candidates in decode_beam(candidate_request) if use_beam else decode_samples(candidate_request):
        max_logp = max((candidate.logp for candidate in candidates), default=0.0)
        # The most probable samples occur most often, so samples have equal weights.
        weights = [math.exp(candidate.logp - max_logp) if use_beam else 1.0 for candidate in candidates]
        texts = [request.decode(candidate.tokens) for candidate in candidates]
        ranked.append(rank_by_agreement(candidates, texts, weights, settings.metric)[: settings.nbest])
    return ranked


def decode_exhaustively(request: Request) -> list[list[SearchResult]]:
    """Run exhaustive search, which starts with the results of beam search, in rounds until all sentences are done."""
    settings = request.settings
    beam_settings = settings.model_copy(update={"nbest": min(settings.nbest, settings.beam)})
    beam_results = decode_beam(replace(request, settings=beam_settings))
    request = replace(request, jobs=[job._replace() for job in request.jobs])  # copies, so that their ids are distinct
    searches = [
        ExhaustiveSearch(job, settings, settings.max_expansions, results)
        for job, results in zip(request.jobs, beam_results, strict=True)
    ]
    by_job = {id(job): search for job, search in zip(request.jobs, searches, strict=True)}
    idle = ExhaustiveSearch(SearchJob([], 0), settings, 0, [])  # of free slots and of sentences that are done
    start = lambda job, *_: by_job.get(id(job), idle).start_round()  # noqa: E731
    while any(pending := [search.is_pending for search in searches]):
        request.run(request.skip_except(pending).jobs, partial(SentenceSearches, start, settings, EXHAUSTIVE_ROWS))
    return [search.results() for search in searches]


def check_beam(settings: SearchSettings) -> None:
    beam, nbest, finish = settings.beam, settings.nbest, settings.finish
    if nbest > beam:
        raise UserError(f"{nbest} answers cannot come from a beam of {beam}; ask for --beam {nbest} or more")
    if finish and settings.stop != "enough":
        raise UserError(
            f"search.finish has no use with search.stop={settings.stop}; set stop to enough, or finish to 0"
        )
    if finish and not nbest <= finish <= beam:
        raise UserError(
            f"search.finish={finish} must be at least the number of answers and at most the beam, {nbest} to {beam}"
        )


def check_greedy(settings: SearchSettings) -> None:
    if settings.nbest > 1:
        advice = "set search.method to beam, diverse or sample"
        raise UserError(f"{settings.nbest} answers cannot come from greedy search; {advice}")


def check_mbr(settings: SearchSettings) -> None:
    """Refuse an `nbest` larger than the number of candidates."""
    samples, nbest = settings.samples, settings.nbest
    if settings.candidates == "beam":
        check_beam(
            settings.model_copy(update={"nbest": max(nbest, settings.beam)})
        )  # all hypotheses of the beam are candidates
    elif nbest > samples:
        raise UserError(f"{nbest} answers cannot come from search.samples={samples}; set it to {nbest} or more")


def check_diverse(settings: SearchSettings) -> None:
    """Refuse an `nbest` larger than the beam, and a beam that is not a multiple of the number of groups."""
    check_beam(settings)
    if settings.finish:
        raise UserError(
            "search.finish has no use with search.method=diverse, whose groups stop separately; leave it out"
        )
    beam, groups = settings.beam, settings.groups
    if beam % groups:
        multiple = groups * (beam // groups + 1)
        raise UserError(f"a beam of {beam} cannot be split into search.groups={groups}; ask for --beam {multiple}")


def check_exhaustive(settings: SearchSettings) -> None:
    """Refuse a coverage penalty, which is not part of the score that is maximized."""
    if settings.coverage:
        raise UserError("search.coverage reranks the results of beam search; set it to 0 for search.method=exhaustive")


@dataclass(frozen=True)
class Method:
    """A decoding method and its properties."""

    decode: Callable[[Request], list[list[SearchResult]]]
    check: Callable[[SearchSettings], None] = lambda _: None  # raises a UserError for settings that cannot work
    is_beam_search: bool = False  # plain beam search, which CUDA graphs, CTranslate2 and streaming support
    needs_full_beam: bool = False  # whether later deduplication and reranking need all results of the beam
    is_exact: bool = False  # no hypothesis has a higher score than the result, unless the result has a warning
    fixed: Mapping[str, Any] = field(default_factory=dict)  # values of settings that the method overrides


SEARCH_METHODS = {
    "beam": Method(decode_beam, check_beam, is_beam_search=True, needs_full_beam=True),
    "greedy": Method(decode_beam, check_greedy, is_beam_search=True, fixed={"beam": 1, "stop": "enough", "finish": 0}),
    "sample": Method(decode_samples),
    "mbr": Method(decode_mbr, check_mbr),
    "diverse": Method(decode_diverse, check_diverse),
    "exhaustive": Method(decode_exhaustively, check_exhaustive, is_exact=True),
}
SEARCH_REGISTRIES: Registries = {
    "method": SEARCH_METHODS,
    "length_norm": LENGTH_NORMS,
    "stop": STOP_RULES,
    "metric": MBR_METRICS,
}


def check_search_settings(settings: SearchSettings) -> None:
    """Raise a UserError for settings that are unknown or that the method does not support."""
    check_names(SEARCH_REGISTRIES, settings, "search")
    SEARCH_METHODS[settings.method].check(settings)


def apply_method_settings(settings: SearchSettings) -> SearchSettings:
    """Return the settings, in which the fixed values of the method replace those of the user."""
    fixed = SEARCH_METHODS[settings.method].fixed
    return settings.model_copy(update=dict(fixed)) if fixed else settings
