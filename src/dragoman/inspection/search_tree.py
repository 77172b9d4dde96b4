"""The search for a translation: the tree of its hypotheses, and what other searches find.

`trace_search` runs the beam search of a translator and records every step. `compare_searches` adds the results of other
searches. They show why a translation is wrong: either the search missed a better one (a search error), or the model
gives the wrong one the highest score (a model error). An exhaustive search tells the two apart, if it is completed.

Shapes   B slots   W beams   K = 2 * W candidates   N = B * W rows of the model   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.decoding.beam import LENGTH_NORMS, BeamSearch, find_candidates
from dragoman.decoding.exhaustive import NOT_PROVEN
from dragoman.decoding.methods import SEARCH_METHODS, SearchSettings, apply_method_settings
from dragoman.decoding.protocol import NEG_INF, BaseSearchSettings, SearchResult
from dragoman.inference.engines.torch import TorchEngine
from dragoman.inference.postprocess import drop_duplicates
from dragoman.inference.predictor import eval_mode
from dragoman.inference.source_segment import SourceSegment
from dragoman.inference.translator import DecodeOptions, Translator
from dragoman.inspection.records import Prediction, SearchNode, SearchResultText, SearchTrace
from dragoman.types import BOS, EOS, SPECIALS, Hypothesis

MIN_WIDE_BEAM = 16
MAX_EXPANSIONS = 300  # of the exhaustive searches of an inspection, which should take less than a second
MAX_COMPARED_TOKENS = 600  # of a translation that is compared with those of other searches
SAME_SCORE = 1e-4  # scores of the same translation may differ by this much, because batches round differently
UNNORMALIZED = "without length normalisation"


class Candidate(NamedTuple):
    """A continuation that beam search considered at a step."""

    beam: int  # index of the beam that it extends
    token: int
    logp: float
    state: str  # "kept", "finished" or "pruned", as in `SearchNode`


class TracedBeamSearch(BeamSearch):
    """Beam search that adds to `steps`, for the sentence in the first slot, the candidates of each step, best first."""

    def __init__(
        self, steps: list[list[Candidate]], settings: BaseSearchSettings, max_length: int, device: torch.device
    ) -> None:
        super().__init__(settings, max_length, device)
        self.steps = steps

    def extend(self, logp_NV: Tensor) -> tuple[Tensor, Tensor]:
        if not self.state.done_B[0]:
            W = self.width
            candidates = find_candidates(self.state.logp_BW[:1], logp_NV[:W])
            rows = zip(*(field_BK[0].tolist() for field_BK in candidates), strict=True)
            found = [(logp, beam, token) for logp, beam, token in rows if logp > NEG_INF]
            active = [rank for rank, (_, _, token) in enumerate(found) if token != EOS][:W]
            step = []
            for rank, (logp, beam, token) in enumerate(found):
                is_finished = token == EOS and rank < W  # see BeamSearch.extend
                state = "finished" if is_finished else "kept" if rank in active else "pruned"
                step.append(Candidate(beam, token, logp, state))
            self.steps.append(step)
        return super().extend(logp_NV)


def trace_search(translator: Translator, segment: SourceSegment, options: DecodeOptions, title: str) -> SearchTrace:
    """Return the tree of a beam search or greedy search and all hypotheses that it finished.

    The search is that of `Translator.translate_nbest` with the same options. Other methods have no tree: the trace
    has only their results.
    """
    translator, search = use_torch_engine(translator), options.search
    if not SEARCH_METHODS[search.method].is_beam_search:
        note = f"there is no tree: search.method={search.method} is not a plain beam search"
        return make_trace(title, translator.decode_segments([segment], options)[0], [note])
    if SEARCH_METHODS[search.method].needs_full_beam and (search.nbest > 1 or search.coverage):
        search = search.model_copy(update={"nbest": search.beam})
    job = segment.make_job()
    steps: list[list[Candidate]] = []
    engine = translator.engine
    assert isinstance(engine, TorchEngine)
    with eval_mode(translator.model):
        make_search = partial(TracedBeamSearch, steps, search)
        [results] = engine.run([job], make_search, is_plain_beam=not search.no_repeat, observe=None)
        tree = SearchTree(translator, segment, search, steps)
        known = [result.tokens for result in results]
        results += [result for result in tree.list_finished() if result.tokens not in known]
        [pairs] = translator.add_alignments([segment], {0: results}, search.coverage)
    tree.mark_best(pairs[0][0])
    hypotheses = [translator.make_hypothesis(segment, result, alignment, options) for result, alignment in pairs]
    notes = ["the results were reranked by search.coverage after the search"] if search.coverage else []
    return make_trace(title, drop_duplicates(hypotheses), notes, tree.nodes)


class SearchTree:
    """The nodes of a recorded beam search. The first node is the root, the empty prefix."""

    def __init__(
        self, translator: Translator, segment: SourceSegment, search: SearchSettings, steps: list[list[Candidate]]
    ) -> None:
        self.width, prefix = search.beam, segment.constraints.prefix
        norm_T = LENGTH_NORMS[search.length_norm](segment.max_tokens, search.length_penalty)
        name = make_namer(translator)
        self.nodes = [SearchNode(-1, 0, SPECIALS[BOS], 0.0, 0.0, "kept")]
        self.tokens: list[list[int]] = [[]]  # of each node, including EOS
        beams = [0]  # the node of each beam
        for length, step in enumerate(steps, 1):
            detail = "forced prefix" if length <= len(prefix) else ""
            first = len(self.nodes)
            for beam, token, logp, state in step:
                score = float(torch.tensor(logp) / norm_T[length])
                self.nodes.append(SearchNode(beams[beam], length, name(token), logp, score, state, detail))
                self.tokens.append([*self.tokens[beams[beam]], token])
            beams = [node for node, candidate in enumerate(step, first) if candidate.state == "kept"]

    def list_finished(self) -> list[SearchResult]:
        """Return the finished hypotheses that the search kept, best first."""
        finished = [
            SearchResult(tokens[:-1], node.logp, node.score, True)
            for node, tokens in zip(self.nodes, self.tokens, strict=True)
            if node.state == "finished"
        ]
        return sorted(finished, key=lambda result: -result.score)[: self.width]

    def mark_best(self, result: SearchResult) -> None:
        """Mark the nodes of this result and of its prefixes."""
        node = self.tokens.index([*result.tokens, EOS] if result.finished else result.tokens)
        while node >= 0:
            self.nodes[node] = replace(self.nodes[node], state="best")
            node = self.nodes[node].parent


def compare_searches(translator: Translator, segment: SourceSegment, options: DecodeOptions) -> list[SearchTrace]:
    """Return the search of the options with its tree, then the results of other searches for the same sentence.

    Notes say whether a search with the same length normalisation found a better translation. The steps of one sentence
    are so small that several threads mostly wait for each other, so there is only one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_searches(translator, segment, options)
    finally:
        torch.set_num_threads(threads)


def run_searches(translator: Translator, segment: SourceSegment, options: DecodeOptions) -> list[SearchTrace]:
    """Return the traces of `compare_searches`."""
    translator, search = use_torch_engine(translator), options.search
    is_beam_search = SEARCH_METHODS[search.method].is_beam_search
    is_normalized = search.length_norm != "none" and search.length_penalty > 0
    own = trace_search(translator, segment, options, name_search(search))
    traces, rival = [own], own if is_beam_search else None
    plain = apply_method_settings(search.model_copy(update={"method": search.method if is_beam_search else "beam"}))
    greedy = apply_method_settings(search.model_copy(update={"method": "greedy"}))
    wide = search.model_copy(update={"method": "beam", "beam": max(2 * search.beam, MIN_WIDE_BEAM)})
    # Exhaustive search starts from the results of a beam search, here of the wide one.
    exhaustive = wide.model_copy(update={"method": "exhaustive", "max_expansions": MAX_EXPANSIONS, "coverage": 0.0})
    unnormalized = [variant.model_copy(update={"length_norm": "none"}) for variant in (plain, exhaustive)]
    variants = [plain, greedy, wide, exhaustive, *(unnormalized if is_normalized else [])]
    if segment.max_tokens > MAX_COMPARED_TOKENS:
        own.notes.append(f"not compared with other searches: up to {segment.max_tokens} tokens would take too long")
        variants = []
    for variant in variants:
        title = name_search(variant) + (f" {UNNORMALIZED}" if variant.length_norm != search.length_norm else "")
        if any(title == trace.title for trace in traces):
            continue
        rival = None if variant is unnormalized[0] else rival  # other scores cannot be compared with those before
        [hypotheses] = translator.decode_segments([segment], replace(options, search=variant))
        trace = make_trace(title, hypotheses)
        notes = [note for note in trace.notes if note not in own.notes]
        is_proven = variant.method == "exhaustive" and not any(note.startswith(NOT_PROVEN) for note in trace.notes)
        if rival and not search.coverage:
            notes = describe_search_error(trace, rival, is_proven=is_proven) + notes
        rival = rival or trace
        traces.append(replace(trace, notes=notes))
    return traces


def name_search(search: SearchSettings) -> str:
    """Return a title such as "beam 4"."""
    return f"beam {search.beam}" if search.method == "beam" else search.method


def describe_search_error(trace: SearchTrace, rival: SearchTrace, *, is_proven: bool) -> list[str]:
    """Return a note if a search found a better translation than its rival, or proved that there is none."""
    best, found = trace.results[0], rival.results[0]
    if best.score > found.score + SAME_SCORE:
        return [f"search error of {rival.title}: this score is {best.score:.4f}, and it found only {found.score:.4f}"]
    return [f"no search error: no translation has a higher score than that of {rival.title}"] if is_proven else []


def compare_target(
    target: str, predictions: Sequence[Prediction], search: SearchSettings, trace: SearchTrace
) -> SearchTrace:
    """Return a given target as the result of a search, with a note on why the search of `trace` did not find it."""
    logp = sum(prediction.logp for prediction in predictions)
    norm = float(LENGTH_NORMS[search.length_norm](len(predictions), search.length_penalty)[-1])
    given = SearchResultText(target, logp, logp / norm)
    if SEARCH_METHODS[search.method].is_beam_search and not search.coverage:
        return compare_given(given, trace)
    note = f"scores of {trace.title} are not log-probabilities, so that they cannot be compared with this one"
    return SearchTrace("given target", [given], notes=[note])


def compare_given(given: SearchResultText, trace: SearchTrace) -> SearchTrace:
    """Return a given translation as the result of a search, with a note on why the search of `trace` missed it."""
    found = trace.results[0]
    if given.text == found.text:
        note = f"{trace.title} found this translation"
    elif given.score > found.score + SAME_SCORE:
        note = f"search error: its score is higher than that of the translation that {trace.title} found"
    else:
        note = f"model error, if this translation is better: the model gives a higher score to that of {trace.title}"
    return SearchTrace("given target", [given], notes=[note])


def make_trace(
    title: str, hypotheses: Sequence[Hypothesis], notes: Sequence[str] = (), nodes: Sequence[SearchNode] = ()
) -> SearchTrace:
    """Return the trace of a search with these hypotheses; its notes include the warnings of the best one."""
    results = [SearchResultText(hypothesis.text, hypothesis.logp, hypothesis.score) for hypothesis in hypotheses]
    return SearchTrace(title, results, list(nodes), [*notes, *hypotheses[0].warnings])


def use_torch_engine(translator: Translator) -> Translator:
    """Return the translator with a PyTorch engine, whose steps can be recorded and which supports all methods."""
    if isinstance(translator.engine, TorchEngine):
        return translator
    engine = TorchEngine(translator.model, translator.device, translator.tokenizers.target.decode)
    return replace(translator, engine=engine)


def make_namer(translator: Translator) -> Callable[[int], str]:
    """Return a function that names a token of the target."""
    names = translator.tokenizers.target.ids_to_tokens
    return lambda token: SPECIALS[EOS] if token == EOS else names([token])[0]
