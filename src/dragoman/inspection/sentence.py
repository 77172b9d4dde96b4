"""The inspection of one sentence: attention, next-token distributions, attributions and the search.

    inspection = dragoman.inspect(dragoman.load("runs/demo"), "A man walks his dog.")
    inspection.save("page.html")

`SentenceBatch` holds the input of a model for one sentence; all parts of an inspection start from it. The model reads
the target as if it had generated it (teacher forcing), so one forward pass has the state of every step.

Shapes   S source tokens   T target tokens   H heads   Q queries   K keys   L layers   V vocabulary or labels
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dragoman.data.batches import EXAMPLE_FORMATS, BatchPlan, Widths
from dragoman.data.tokenizers import name_tokens
from dragoman.decoding.protocol import SearchResult
from dragoman.errors import UserError
from dragoman.inference.loading import EnsembleModel
from dragoman.inference.phrase_translator import PhraseTranslator
from dragoman.inference.predictor import MAX_TOKENS_WITH_EOS, Predictor, eval_mode
from dragoman.inference.single_sequence import NO_LABEL, Classifier, ClassifierEnsemble, Generator
from dragoman.inference.source_segment import SourceSegment
from dragoman.inference.translator import DecodeOptions, Translator
from dragoman.inspection.attention import record_attention
from dragoman.inspection.attribution import compute_attributions
from dragoman.inspection.phrase_derivation import inspect_phrases
from dragoman.inspection.records import AttentionMap, Inspection, Prediction
from dragoman.inspection.search_tree import compare_searches, compare_target
from dragoman.models.base import Model
from dragoman.models.transformer import TransformerSettings
from dragoman.modules.patterns import PATTERNS
from dragoman.types import BOS, EOS, SPECIALS, Batch, Example, Hypothesis, Line

Part = TypeVar("Part")
TOP_TOKENS = 8  # alternatives that are shown for each predicted token
ATTENTION_TITLES = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "Attention to the source",
}


@dataclass(frozen=True, slots=True)
class SentenceBatch:
    """A sentence as a batch with one row and no padding, and the names of its tokens."""

    model: Model
    batch: Batch
    tokens: Mapping[str, Sequence[str]]  # "source", "input" of the decoder, "target"; see Inspection.tokens
    output_size: int  # number of tokens, or labels, that the model can predict
    name_output: Callable[[int], str]  # returns the name of such a token

    @torch.no_grad()
    def compute_logp(self) -> Tensor:
        """Return the log-probabilities of every predicted token: logp_TV."""
        logits_TV: Tensor = self.model.compute_logits(self.model(self.batch)[0])[:, : self.output_size]
        return logits_TV.float().log_softmax(-1)


def inspect(
    predictor: Translator | Generator | Classifier,
    text: str,
    *,
    target: str | None = None,
    prefix: str = "",
    tag: str = "",
    part: int = 1,
    search: Mapping[str, Any] | None = None,
    context: Sequence[str] = (),
) -> Inspection:
    """Return what a model does with a text.

    `target` is a translation to examine (of a language model: the text that follows directly, with its space); by
    default, the model's own translation, which starts with `prefix`. `search` overrides search settings. A long line is
    translated in parts, of which an inspection shows one: `part`, counted from 1. `context` has the sentences before
    the text, oldest first, for models trained with data.context.
    """
    if not text.strip():
        raise UserError("there is nothing to inspect: the text is empty; give a sentence")
    if isinstance(predictor.model, EnsembleModel | ClassifierEnsemble):
        raise UserError("an ensemble cannot be inspected; inspect its runs one by one")
    if not isinstance(predictor, Translator):
        if prefix or search or tag or context:
            raise UserError("a prefix, a tag, context and search settings are for translation models; leave them out")
        if isinstance(predictor, Classifier):
            return inspect_label(predictor, text, target, part=part)
        if part != 1:
            raise UserError("a language model reads the end of a long text, not parts of it; leave the part out")
        return inspect_language_model(predictor, text, target)
    if target is not None and prefix:
        raise UserError("a target and a prefix exclude each other: the prefix starts a translation that is searched")
    line = Line(text, prefix=prefix, tag=tag, context=tuple(context))
    return inspect_translation(predictor, line, target, part=part, search=search)


def inspect_translation(
    translator: Translator, line: Line, target: str | None, *, part: int, search: Mapping[str, Any] | None
) -> Inspection:
    """Return the inspection of a translation by a sequence-to-sequence model or a phrase-based system."""
    options = translator.make_options(search=search)
    segments = translator.make_segments(line, options)
    segment, notes = choose_part(segments, part)
    if target is not None and len(segments) > 1:
        raise UserError(
            f"the source has {sum(len(s.ids) for s in segments)} tokens and is translated in {len(segments)} parts, so "
            "a target cannot be examined; give a shorter source with its target"
        )
    if isinstance(translator, PhraseTranslator):
        return inspect_phrases(translator, segment, options, target, notes)
    if target is None:
        result, hypothesis = find_translation(translator, segment, options)
        ids, target_text = result.tokens, hypothesis.text
        notes += hypothesis.warnings
    else:
        ids, target_text = translator.tokenizers.target.encode(target), target
    sentence = make_translation_batch(translator, segment, ids)
    searches = compare_searches(translator, segment, options)
    with eval_mode(translator.model):
        attributions, attribution_notes = compute_attributions(sentence)
        predictions = compute_predictions(sentence)
        if target is not None:
            searches.append(compare_target(target, predictions, options.search, searches[0]))
        return Inspection(
            run=translator.run,
            kind=translator.recipe.model.kind,
            source=segment.text,
            target=target_text,
            is_given=target is not None,
            tokens=sentence.tokens,
            attentions=compute_attention_maps(sentence),
            predictions=predictions,
            attributions=attributions,
            searches=searches,
            notes=notes + attribution_notes,
        )


def find_translation(
    translator: Translator, segment: SourceSegment, options: DecodeOptions
) -> tuple[SearchResult, Hypothesis]:
    """Return the best translation of a segment, the same as that of `Translator.translate`, with its token ids."""
    job = segment.make_job()
    search = options.search
    if search.coverage:  # all hypotheses of the beam are ranked again
        search = search.model_copy(update={"nbest": search.beam})
    with eval_mode(translator.model):
        results = dict(translator.engine.iter_results([job], search))
        [pairs] = translator.add_alignments([segment], results, search.coverage)
    result, alignment = pairs[0]
    return result, translator.make_hypothesis(segment, result, alignment, options)


def choose_part(parts: Sequence[Part], number: int) -> tuple[Part, list[str]]:
    """Return the part with this number, counted from 1, and a note if there are several."""
    if not 1 <= number <= len(parts):
        count = f"{len(parts)} part{'s' * (len(parts) > 1)}"
        raise UserError(f"there is no part {number}: the text is read in {count}, counted from 1; choose another")
    note = f"the text is too long for one piece: this is part {number} of {len(parts)} (choose another with --part)"
    return parts[number - 1], [note] if len(parts) > 1 else []


def make_translation_batch(translator: Translator, segment: SourceSegment, target: Sequence[int]) -> SentenceBatch:
    """Return a source with a target as the input of a sequence-to-sequence model."""
    tokenizers = translator.tokenizers
    example = segment.make_example(target)
    length = max(len(example.source), len(example.target)) + 1
    if length > min(MAX_TOKENS_WITH_EOS, translator.max_tokens + 1):
        raise UserError(f"{length} tokens are too many for the model; give a shorter sentence")
    target_names = tokenizers.target.ids_to_tokens(target)
    tokens = {
        **name_source(translator, example.source.tolist()),
        "input": [SPECIALS[BOS], *target_names],
        "target": [*target_names, SPECIALS[EOS]],
    }
    batch = collate_sentence(example, "pairs").to(translator.device)
    return SentenceBatch(translator.model, batch, tokens, *describe_outputs(translator))


def name_source(predictor: Predictor[Model], ids: Sequence[int]) -> dict[str, Sequence[str]]:
    """Return the names of the tokens of a source, and of the projected keys if its encoder attends to those."""
    tokenizers = predictor.tokenizers
    names: dict[str, Sequence[str]] = {"source": name_tokens(tokenizers.source, [*ids, EOS], tokenizers.tags)}
    settings = predictor.recipe.model
    if isinstance(settings, TransformerSettings) and not PATTERNS[settings.attention].keys_are_tokens:
        names["projected"] = [f"key {number + 1}" for number in range(settings.rank)]
    return names


def describe_outputs(predictor: Predictor[Model]) -> tuple[int, Callable[[int], str]]:
    """Return the number of tokens or labels that a model can predict, and a function that names them."""
    tokenizers = predictor.tokenizers
    names = tokenizers.target.ids_to_tokens
    return tokenizers.sizes["target_size"], lambda token: SPECIALS[token] if token in (BOS, EOS) else names([token])[0]


def collate_sentence(example: Example, form: str) -> Batch:
    """Return a batch of one row that is as wide as the example."""
    collator = EXAMPLE_FORMATS[form]
    source_N, target_N = collator.count_example_slots([example])
    return collator.collate(BatchPlan([[0]], Widths(int(source_N[0]), int(target_N[0]))), [example])


def inspect_language_model(generator: Generator, text: str, target: str | None) -> Inspection:
    """Return the inspection of how a language model predicts each token of a text and its continuation."""
    full_text, tokenizer = text + (target or ""), generator.tokenizers.target
    if generator.whole_files:
        first, ids = EOS, generator.encode_lines(full_text.split("\n"))[:-1]
    else:
        first, ids = BOS, tokenizer.encode(full_text)
    limit = generator.model.settings.context if generator.model.settings.has_fixed_context else MAX_TOKENS_WITH_EOS
    notes = []
    if len(ids) + 1 > limit:
        notes = [f"only the last {limit - 1} of {len(ids)} tokens are shown, as many as the model reads at a time"]
        ids = ids[1 - limit :]
    batch = collate_sentence(Example(NO_LABEL[:0], np.array(ids, dtype=np.int64), 0), "lines")
    batch.target_in_BT[0, 0] = first  # a model of complete files starts after the end of a line
    names = tokenizer.ids_to_tokens(ids)
    tokens = {"input": [SPECIALS[first], *names], "target": [*names, SPECIALS[EOS]]}
    sentence = SentenceBatch(generator.model, batch.to(generator.device), tokens, *describe_outputs(generator))
    with eval_mode(generator.model):
        attributions, attribution_notes = compute_attributions(sentence)
        return Inspection(
            run=generator.run,
            kind=generator.recipe.model.kind,
            source="",
            target=full_text,
            is_given=True,
            tokens=tokens,
            attentions=compute_attention_maps(sentence),
            predictions=compute_predictions(sentence),
            attributions=attributions,
            notes=notes + attribution_notes,
        )


def inspect_label(classifier: Classifier, text: str, target: str | None, *, part: int) -> Inspection:
    """Return the inspection of the label of a text; `target` is another label to examine."""
    parts = classifier.split_ids(text)
    ids, notes = choose_part(parts, part)
    labels = classifier.tokenizers.target.ids_to_tokens(range(classifier.tokenizers.sizes["target_size"]))
    if target is not None and target not in labels:
        raise UserError(f"the model has no label {target!r}; its labels are: {', '.join(labels)}")
    batch = collate_sentence(Example(np.array(ids, dtype=np.int64), NO_LABEL, 0), "labels").to(classifier.device)
    tokens = name_source(classifier, ids)
    sentence = SentenceBatch(classifier.model, batch, tokens, *describe_outputs(classifier))
    with eval_mode(classifier.model):
        label = labels.index(target) if target is not None else int(sentence.compute_logp()[0].argmax())
        sentence = replace(sentence, tokens={**tokens, "target": [labels[label]]})
        sentence.batch.target_out_BT[0, 0] = label
        attributions, attribution_notes = compute_attributions(sentence)
        return Inspection(
            run=classifier.run,
            kind=classifier.recipe.model.kind,
            source=text if len(parts) == 1 else classifier.tokenizers.source.decode(ids),
            target=labels[label],
            is_given=target is not None,
            tokens=sentence.tokens,
            attentions=compute_attention_maps(sentence),
            predictions=compute_predictions(sentence),
            attributions=attributions,
            notes=notes + attribution_notes,
        )


@torch.no_grad()
def compute_attention_maps(sentence: SentenceBatch) -> list[AttentionMap]:
    """Return the attention weights of every part, layer and head of a model."""
    with record_attention(sentence.model) as recorded:
        sentence.model(sentence.batch)
    maps = []
    for part, title in ATTENTION_TITLES.items():
        if not (weights := recorded.get(part)):
            continue
        weight_LHQK = torch.stack([weight_BHQK[0] for weight_BHQK in weights]).float().cpu().numpy()
        queries = "source" if part == "encoder" else "input"
        keys = "input" if part == "decoder" else "source"
        if part == "encoder" and "projected" in sentence.tokens:
            keys = "projected"
        best_layer = getattr(sentence.model.settings, "alignment_layer", 0) if part == "cross" else None
        maps.append(AttentionMap(part, title, queries, keys, weight_LHQK, best_layer))
    return maps


def compute_predictions(sentence: SentenceBatch) -> list[Prediction]:
    """Return the distribution of every predicted token."""
    logp_TV, name = sentence.compute_logp(), sentence.name_output
    predictions = []
    for logp_V, token in zip(logp_TV, sentence.batch.target_out_BT[0].tolist(), strict=True):
        entropy = -float((logp_V.exp() * logp_V.clamp(min=-1e4)).sum()) / math.log(2)
        top_logp, top_index = logp_V.topk(min(TOP_TOKENS, sentence.output_size))
        top = [(name(i), math.exp(p)) for i, p in zip(top_index.tolist(), top_logp.tolist(), strict=True)]
        rank = 1 + int((logp_V > logp_V[token]).sum())
        predictions.append(Prediction(name(token), float(logp_V[token]), rank, entropy, top))
    return predictions
