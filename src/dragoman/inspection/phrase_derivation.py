"""The inspection of a phrase-based translation: its phrases, features and word links, and the stacks of the search.

Shapes   T target tokens   S source tokens
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dragoman.errors import UserError
from dragoman.inference.phrase_translator import PhraseTranslator
from dragoman.inference.source_segment import SourceSegment
from dragoman.inference.translator import DecodeOptions
from dragoman.inspection.records import (
    AttentionMap,
    Inspection,
    PhraseUse,
    SearchNode,
    SearchResultText,
    SearchTrace,
)
from dragoman.inspection.search_tree import compare_given, make_trace
from dragoman.smt import decoder_kernels as kernels
from dragoman.smt.settings import FEATURE_NAMES
from dragoman.smt.stacks import StackSearch
from dragoman.smt.system import PhraseTranslation
from dragoman.types import BOS, SPECIALS

SHOWN_RESULTS = 5
SHOWN_HYPOTHESES = 8  # of each stack, in the tree of the search


def inspect_phrases(
    translator: PhraseTranslator, segment: SourceSegment, options: DecodeOptions, target: str | None, notes: list[str]
) -> Inspection:
    """Return the phrases of a phrase-based translation, or of a given target, and the search for a translation.

    A target that the phrases of the model cannot produce is refused.
    """
    system = translator.model
    words = system.casing[0].truecase(system.tokenizer.split(segment.text))
    search = StackSearch.run(system.decoder, words, options.search.beam)
    trace = trace_stacks(translator, segment, options, search)
    searches = [trace]
    if target is None:
        [[translation]] = system.translate([segment.text], stack=options.search.beam)
        notes = [*notes, *translator.make_phrase_hypothesis(segment, translation, options).warnings]
        surface = system.casing[1].recase(translation.derivation.words)
    else:
        surface = system.tokenizer.split(target)
        [(_, derivation)] = system.force([(segment.text, target)])
        if derivation is None or not surface:
            raise UserError(f"the phrases of the model cannot produce the target {target!r}; leave it out")
        source_tokens = system.format_tokens(system.tokenizer.split(segment.text))
        translation = PhraseTranslation(target, system.format_tokens(surface), source_tokens, derivation)
        search = StackSearch.run(system.decoder, words, target=system.casing[1].truecase(surface))
        given = SearchResultText(target, derivation.score, derivation.score)
        searches.append(compare_given(given, trace))
    weight_TS = np.array(translation.alignment(), np.float32)
    values = zip(FEATURE_NAMES, translation.derivation.features.tolist(), system.decoder.weights.tolist(), strict=True)
    return Inspection(
        run=translator.run,
        kind=translator.recipe.model.kind,
        source=segment.text,
        target=translation.text,
        is_given=target is not None,
        tokens={"source": translation.source_tokens, "target": translation.tokens},
        attentions=[AttentionMap("cross", "Word links", "target", "source", weight_TS[None, None], 0)],
        searches=searches,
        phrases=list_phrases(translator, segment.text, translation, surface, search),
        features={name: (value, weight) for name, value, weight in values},
        notes=notes,
    )


def list_phrases(
    translator: PhraseTranslator, source: str, translation: PhraseTranslation, surface: list[str], search: StackSearch
) -> list[PhraseUse]:
    """Return the phrases of a translation in target order. `surface` are its tokens as they stand in the text."""
    system, first = translator.model, 0
    source_words = system.tokenizer.split(source)
    phrases = []
    for phrase, values in zip(translation.derivation.phrases, search.split_features().tolist(), strict=True):
        end = first + len(phrase.words)
        source_text = system.join_tokens(source_words[phrase.start : phrase.end])
        features = dict(zip(FEATURE_NAMES, values, strict=True))
        target_text = system.join_tokens(surface[first:end])
        phrases.append(PhraseUse(source_text, target_text, (phrase.start, phrase.end), (first, end), features))
        first = end
    return phrases


def trace_stacks(
    translator: PhraseTranslator, segment: SourceSegment, options: DecodeOptions, search: StackSearch
) -> SearchTrace:
    """Return the search for a translation, with the best hypotheses of each stack and all that these extend."""
    settings = options.search.model_copy(update={"nbest": min(SHOWN_RESULTS, options.search.beam)})
    [hypotheses] = translator.decode_segments([segment], replace(options, search=settings, align=False))
    length, counts, shown = len(search.words), [], {0}
    for size in range(length + 1):
        kept, recombined, pruned = search.list_kept(size)
        counts.append(f"{size}: {len(kept)}/{recombined}/{pruned}")
        shown |= set(kept[:SHOWN_HYPOTHESES])
    for ancestor in [*shown, *search.best]:
        while ancestor > 0:
            shown.add(ancestor)
            ancestor = search.steps[ancestor][0]
    numbers = {row: number for number, row in enumerate(sorted(shown))}  # parents come before their children
    join, nodes = translator.model.join_tokens, []
    for row in numbers:
        parent, start, end = search.steps[row]
        covered = int(search.covered[row])
        state = "best" if row in (0, *search.best) else "finished" if covered == length else "kept"
        phrase = join(search.read_phrase(row).words) if row else SPECIALS[BOS]
        score, total = search.score[row, [kernels.SCORE, kernels.TOTAL]].tolist()
        detail = join(search.words[start:end])
        nodes.append(SearchNode(numbers.get(parent, -1), covered, phrase, score, total, state, detail))
    notes = [
        f"the tree has the {SHOWN_HYPOTHESES} best hypotheses of each stack and all that they extend; their score "
        "includes the estimated score of the rest",
        f"hypotheses kept/recombined/pruned, by covered words: {', '.join(counts)}",
    ]
    return make_trace(f"stacks of {options.search.beam}", hypotheses, notes, nodes)
