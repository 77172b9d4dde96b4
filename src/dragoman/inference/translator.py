"""The Translator, which turns lines of text into translations (hypotheses).

    translator = dragoman.load("runs/demo")
    translator.translate(["A man walks his dog."])

`Translator.translate_nbest` is the complete pipeline: it splits lines into segments that are short enough for the
model, an engine decodes the segments, and the search results become hypotheses with text, warnings and alignments.
`Translator.stream` translates one line and yields its words while the search is still running.

Shapes   B rows of a batch, or sentences   S source width   T target width   W beam width
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from dragoman.config.settings import get_entry, parse_settings, suggest_name
from dragoman.data.context import attach_to_lines, encode_contexts
from dragoman.data.features import FEATURES
from dragoman.data.tokenizers import WordTokenizer
from dragoman.data.trees import find_tree_error
from dragoman.decoding.methods import SEARCH_METHODS, SearchSettings, apply_method_settings, check_search_settings
from dragoman.decoding.protocol import DecodingConstraints, SearchResult
from dragoman.errors import UserError
from dragoman.inference import postprocess
from dragoman.inference.constraints import list_unmet_constraints, make_constraints, match_terms
from dragoman.inference.directions import Direction, list_directions
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.torch import TorchEngine
from dragoman.inference.postprocess import AlignmentRows, join_hypotheses
from dragoman.inference.predictor import Predictor, bucket_widths, check_lines, eval_mode, score_pairs
from dragoman.inference.source_segment import SourceSegment
from dragoman.inference.streaming import BeamObserver, stream_text
from dragoman.inference.term_replacement import replace_terms
from dragoman.models.base import Seq2Seq
from dragoman.types import UNK, Example, Hypothesis, Line, Pair, PairScore, Tree

NO_TREE_WARNING = "read without a tree"


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """The options of one call, merged with the settings of the run, and checked."""

    search: SearchSettings
    dictionary: Mapping[str, str]
    tag: str = ""  # such as a language
    align: bool = True
    context: int = 0  # number of previous sentences that the model reads before each line


@dataclass(frozen=True, slots=True, repr=False)
class Translator(Predictor[Seq2Seq]):
    """A sequence-to-sequence model and the engine that decodes with it; by default PyTorch in float32."""

    engine: Engine = None  # type: ignore[assignment]  # set in __post_init__
    supports_engines: ClassVar[bool] = True  # whether the model can be decoded by different engines
    supports_constraints: ClassVar[bool] = True  # whether words of a translation can be required or forbidden

    def __post_init__(self) -> None:
        Predictor.__post_init__(self)  # super() does not work in dataclasses with slots
        if self.engine is None:
            engine = TorchEngine(self.model, self.device, self.tokenizers.target.decode)
            object.__setattr__(self, "engine", engine)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions that the model translates in, with the tag of each (inference/directions.py)."""
        return list_directions(self.recipe, self.tokenizers)

    def translate(
        self,
        lines: Sequence[str | Line],
        *,
        beam: int | None = None,
        search: Mapping[str, Any] | None = None,
        dictionary: Mapping[str, str] | None = None,
        tag: str = "",
        trees: Sequence[Tree | None] | None = None,
        align: bool = True,
        context: int | None = None,
    ) -> list[Hypothesis]:
        """Return the best translation of each line, in the order of the lines. An empty line stays empty.

        `beam` and `search`, such as {"no_repeat": 3}, override search settings of the run. `dictionary` has
        translations of source words, for search.unknown=dictionary. `tag`, for models trained with tags, is the tag
        of all lines that have none. A `Line` can have constraints on its translation. `trees`, for models with
        model.position=tree, has a tree or None for each line. Without `align` the hypotheses have no alignments,
        which is faster. `context`, for models trained with data.context, is the number of previous lines that the
        model reads before each line; by default as many as in training. An empty line starts a new document.
        """
        options = self.make_options(
            beam=beam, search=search, dictionary=dictionary, tag=tag, align=align, context=context
        )
        return [hypotheses[0] for hypotheses in self.translate_nbest(lines, options, trees=trees)]

    def nbest(
        self,
        lines: Sequence[str | Line],
        *,
        count: int | None = None,
        beam: int | None = None,
        search: Mapping[str, Any] | None = None,
        dictionary: Mapping[str, str] | None = None,
        tag: str = "",
        trees: Sequence[Tree | None] | None = None,
        align: bool = True,
        context: int | None = None,
    ) -> list[list[Hypothesis]]:
        """Return up to `count` different translations of each line, best first; only one if the line had to be split.

        The default of `count` is search.nbest of the run. For the other arguments see `translate`.
        """
        options = self.make_options(
            beam=beam, count=count, search=search, dictionary=dictionary, tag=tag, align=align, context=context
        )
        return self.translate_nbest(lines, options, trees=trees)

    def make_options(
        self,
        *,
        beam: int | None = None,
        count: int | None = 1,
        search: Mapping[str, Any] | None = None,
        dictionary: Mapping[str, str] | None = None,
        tag: str = "",
        align: bool = True,
        context: int | None = None,
    ) -> DecodeOptions:
        """Return the search settings of the run with overrides, and the other options of a call.

        Raise a UserError if the model does not support them.
        """
        settings = merge_search(self.recipe.search, search, beam=beam, count=count, aligns=self.model.aligns)
        unknown = settings.unknown
        if unknown != "drop" and not isinstance(self.tokenizers.target, WordTokenizer):
            raise UserError(f"search.unknown={unknown} needs a word vocabulary, which this run lacks; leave it out")
        if (unknown == "dictionary") != (dictionary is not None):
            raise UserError("search.unknown=dictionary and a dictionary require each other; give both or neither")
        return DecodeOptions(settings, dictionary or {}, tag, align, self.choose_context(context))

    def choose_context(self, count: int | None) -> int:
        """Return the number of context sentences: `count` or, if it is None, as many as in training."""
        trained = self.recipe.data.context
        if count is None:
            return trained
        if not 0 <= count <= trained:
            problem = f"was trained with data.context={trained}" if trained else "was trained without data.context"
            raise UserError(f"this model {problem}, so its context cannot be {count} sentences; leave it out")
        return count

    def translate_nbest(
        self, lines: Sequence[str | Line], options: DecodeOptions, *, trees: Sequence[Tree | None] | None = None
    ) -> list[list[Hypothesis]]:
        """Return the n best hypotheses for each line, best first."""
        lines = attach_to_lines(check_lines(lines, "translate", types=(str, Line)), options.context)
        trees = self.check_trees(trees, len(lines))
        texts = [line if isinstance(line, str) else line.text for line in lines]
        segments: list[SourceSegment] = []
        for index, ids in enumerate(self.tokenizers.source.encode_all(texts)):
            segments += self.make_segments(lines[index], options, ids, tree=trees[index], line_index=index)
        by_line: list[list[list[Hypothesis]]] = [[] for _ in lines]  # n-best lists of the segments of each line
        for segment, hypotheses in zip(segments, self.decode_segments(segments, options), strict=True):
            by_line[segment.line_index].append(hypotheses)
        return [
            postprocess.drop_duplicates(parts[0])[: options.search.nbest]
            if len(parts) == 1
            else [join_hypotheses([hypotheses[0] for hypotheses in parts])]
            for parts in by_line
        ]

    def stream(
        self,
        line: str | Line,
        *,
        beam: int | None = None,
        search: Mapping[str, Any] | None = None,
        dictionary: Mapping[str, str] | None = None,
        tag: str = "",
    ) -> Generator[str, None, Hypothesis]:
        """Yield the translation of a line in parts, each as soon as the search cannot change it any more.

        The parts joined together equal the result of `translate`; the generator returns the hypothesis. Some options
        can change the text until the end of the search: a method other than beam and greedy, required terms, coverage,
        replaced unknown words, an engine other than torch. The text then comes in one part per segment of the line.
        """
        return self.stream_line(line, self.make_options(beam=beam, search=search, dictionary=dictionary, tag=tag))

    def stream_line(self, line: str | Line, options: DecodeOptions) -> Generator[str, None, Hypothesis]:
        """Yield the translation of a line in parts and return the hypothesis, as `stream` does."""
        parts: list[Hypothesis] = []
        for segment in self.make_segments(line, options):
            if parts:
                yield " "
            work = partial(self.decode_segments, [segment], options)
            parts.append((yield from stream_text(work, self.tokenizers.target.decode)))
        return join_hypotheses(parts)

    def score(
        self,
        sources: Sequence[str | Line],
        targets: Sequence[str],
        *,
        trees: Sequence[Tree | None] | None = None,
        tag: str = "",
        context: int | None = None,
    ) -> list[PairScore]:
        """Return the log-probability of each target as the translation of its source. Long lines are not split.

        `context` is as for `translate`. A source may be a `Line` with a context.
        """
        sources, targets = check_scored_pairs(sources, targets)
        sources = attach_to_lines(sources, self.choose_context(context))
        scores = score_pairs(self, self.make_examples(sources, targets, trees=trees, tag=tag))
        count = len(self.tokenizers.target_tag_ids(self.choose_tag(tag)))
        return [drop_language_tokens(score, count) for score in scores] if count else scores

    def make_examples(
        self,
        sources: Sequence[str | Line],
        targets: Sequence[str],
        *,
        trees: Sequence[Tree | None] | None = None,
        tag: str = "",
    ) -> list[Example]:
        """Return sources and given targets as examples, for a forward pass. Lines of spaces are empty.

        A source has context only if it is a `Line` with context.
        """
        trees = self.check_trees(trees, len(sources))
        lines = [Line(source) if isinstance(source, str) else source for source in sources]
        texts = [line.text if line.text.strip() else "" for line in lines]
        tag_ids, language_ids = self.encode_tag(tag), self.tokenizers.target_tag_ids(self.choose_tag(tag))
        target_ids = self.tokenizers.target.encode_all([target if target.strip() else "" for target in targets])
        target_ids = [[*language_ids, *ids] if language_ids and ids else ids for ids in target_ids]
        examples = []
        for index, ids in enumerate(self.tokenizers.source.encode_all(texts)):
            leading_ids = self.encode_leading(tag_ids, self.check_context(lines[index]), ids) if ids else ()
            segment = SourceSegment(texts[index], ids, lines[index], index, leading_ids)
            if self.reads_trees:
                segment = self._add_tree(segment, trees[index], is_full_line=True)
            examples.append(segment.make_example(target_ids[index]))
        return examples

    def encode_tag(self, tag: str) -> Sequence[int]:
        """Return the ids that precede a source with this tag; raise a UserError if it is unknown, or missing."""
        return self.tokenizers.tag_ids(self.choose_tag(tag))

    def choose_tag(self, tag: str) -> str:
        """Return the tag; raise a UserError if it is unknown, or missing and required.

        If `tag` is empty and all training data had the same tag, that tag is the default.
        """
        needs_direction = not self.recipe.data.train and len(self.directions) > 1
        if needs_direction and not tag:
            raise UserError(
                "this model translates in several directions; give the tag of one (Translator.directions lists them; "
                "--from and --to on the command line)"
            )
        if not (tag or self.tokenizers.tags or any(self.recipe.data.tags)):
            return tag
        if tag and self.tokenizers.knows_tag(tag):  # the language tokens of a published model
            return tag
        known = self.recipe.data.tags  # includes "" if some of the training data had no tag
        names = [name for name in known if name]
        if not tag and names and "" not in known:
            if len(names) > 1:
                raise UserError(f"this model was trained with tags; choose one of: {', '.join(names)}")
            [tag] = names
        if tag and tag not in names:
            choices = f"{suggest_name(tag, names)} (there are: {', '.join(names)})"
            raise UserError(f"this model has no tag {tag!r}{choices if names else '; it was trained without tags'}")
        return tag

    def check_context(self, line: Line) -> Sequence[str]:
        """Return the context of a line; raise a UserError if the model cannot use it."""
        if line.context and not self.recipe.data.context:
            raise UserError("this model was trained without data.context; leave the context of the lines out")
        return line.context or ()

    def encode_leading(self, tag_ids: Sequence[int], context: Sequence[str], ids: Sequence[int]) -> Sequence[int]:
        """Return the ids that precede those of a sentence: its tag, and as much of its context as fits.

        As in training, tag, context and sentence together have at most data.max_length tokens.
        """
        if not context:
            return tag_ids
        context_budget = self.recipe.data.max_length - len(tag_ids) - len(ids)
        return [*tag_ids, *encode_contexts(self.tokenizers, [context], [context_budget])[0]]

    @property
    def reads_trees(self) -> bool:
        """Whether dependency trees are an input of the model (model.position=tree)."""
        return "tree" in self.recipe.model.source_features

    def check_trees(self, trees: Sequence[Tree | None] | None, lines: int) -> Sequence[Tree | None]:
        """Return a tree or None for each line; raise a UserError if the trees do not suit the model or the lines."""
        if trees is None:
            return [None] * lines
        if not self.reads_trees:
            raise UserError("this model does not use trees (only models with model.position=tree do); leave them out")
        if len(trees) != lines:
            raise UserError(f"there are {lines} lines but {len(trees)} trees; give a tree or None for each line")
        for number, tree in enumerate(trees, 1):
            if tree and (problem := find_tree_error(tree)):
                raise UserError(f"the tree of line {number} is not a tree: {problem}")
        return trees

    def make_segments(
        self,
        line: str | Line,
        options: DecodeOptions,
        ids: list[int] | None = None,
        *,
        tree: Tree | None = None,
        line_index: int = 0,
    ) -> list[SourceSegment]:
        """Return the segments of a line, each with its tag, context, constraints and length limit.

        The context of a line that is split goes on in the line: it includes the segments before.
        """
        line = Line(line) if isinstance(line, str) else line
        tag, search = self.choose_tag(line.tag or options.tag), options.search
        tag_ids, language_ids = self.tokenizers.tag_ids(tag), self.tokenizers.target_tag_ids(tag)
        context = list(self.check_context(line))
        segments: list[SourceSegment] = []
        for segment in self.split_line(line, ids, tree=tree, line_index=line_index):
            constraints = DecodingConstraints(seed_text=segment.text)
            if line.terms or line.avoid or line.prefix or search.min_ratio:
                constraints = make_constraints(
                    line, segment.text, len(segment.ids), self.tokenizers, search, is_first_segment=not segments
                )
            if language_ids:
                constraints = replace(
                    constraints, prefix=(*language_ids, *constraints.prefix), language_tokens=len(language_ids)
                )
            max_tokens = compute_max_tokens(constraints, len(segment.ids), search, self.max_tokens)
            sentences = context[-options.context :] if options.context else []
            leading_ids = self.encode_leading(tag_ids, sentences, segment.ids)
            segment = segment._replace(leading_ids=leading_ids, constraints=constraints, max_tokens=max_tokens)
            if line.terms and self.model.aligns:
                segment = segment._replace(matches=match_terms(line.terms, segment.text))
            segments.append(segment)
            context.append(segment.text)
        return segments

    def split_line(
        self, line: Line, ids: list[int] | None = None, *, tree: Tree | None = None, line_index: int = 0
    ) -> list[SourceSegment]:
        """Return the line as one segment, or as one per sentence if it is longer than any source in training.

        A sentence of more than `max_segment_tokens` tokens, usually a greater limit, is also split: between words, or
        inside an overlong word.
        """
        text, encode = line.text, self.tokenizers.source.encode
        if not text.strip():
            return []
        ids = encode(text) if ids is None else ids
        if len(ids) <= min(self.longest_source, self.max_segment_tokens):
            segments = [SourceSegment(text, ids, line, line_index)]
        else:
            texts = postprocess.split_sentences(text) if len(ids) > self.longest_source else [text]
            for unit in (postprocess.NON_SPACES, postprocess.NON_SPACE):  # first between words, then between characters
                texts = [part for text in texts for part in self._split_text(text, unit)]
            segments = [SourceSegment(part, encode(part), line, line_index) for part in texts]
        if self.reads_trees:
            segments = [self._add_tree(segment, tree, is_full_line=len(segments) == 1) for segment in segments]
        return segments

    def _split_text(self, text: str, unit: re.Pattern[str]) -> list[str]:
        """Split a text of more than `max_segment_tokens` tokens into parts of at most `longest_source` tokens.

        `unit` matches what must not be split: a word or a character.
        """
        encode = self.tokenizers.source.encode
        if len(encode(text)) <= self.max_segment_tokens:
            return [text]
        first, *others = (match.span() for match in unit.finditer(text))
        spans = [first]
        for start, end in others:
            if len(encode(text[spans[-1][0] : end])) > self.longest_source:
                spans.append((start, end))
            else:
                spans[-1] = (spans[-1][0], end)
        return [text[start:end] for start, end in spans]

    def _add_tree(self, segment: SourceSegment, tree: Tree | None, *, is_full_line: bool) -> SourceSegment:
        """Return the segment with the tree of its line, or with a warning that the model reads it without a tree."""
        annotation = FEATURES["tree"].make_annotation(Pair(segment.text, "", tree if is_full_line else None))
        feature = FEATURES["tree"].align_tokens(annotation, segment.text, segment.ids, self.tokenizers.source)
        segment = segment._replace(features={"tree": feature})
        if len(feature.annotation):  # empty if there is no usable tree
            return segment
        reason = ": its words do not spell the line" if is_full_line else ": the line was split"
        return segment._replace(warning=NO_TREE_WARNING + (reason if tree else ""))

    def decode_segments(
        self, segments: Sequence[SourceSegment], options: DecodeOptions, observe: BeamObserver | None = None
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each segment.

        A conditional term replaces words after the search. Where no words are aligned to its source term, the segment
        is decoded again, with the term as a constraint of the search. For `observe` see `search_segments`.
        """
        hypotheses = self.search_segments(segments, options, observe)
        unmet = [i for i, segment in enumerate(segments) if segment.needs_constraints(hypotheses[i][0].text)]
        if unmet and self.engine.supports_terms:
            constrained = [segments[i]._replace(matches=()) for i in unmet]
            for index, nbest in zip(unmet, self.search_segments(constrained, options), strict=True):
                hypotheses[index] = nbest
        return hypotheses

    def search_segments(
        self, segments: Sequence[SourceSegment], options: DecodeOptions, observe: BeamObserver | None = None
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each segment, found by one search.

        `observe`, for a single segment, is called with the beam after each step if the common prefix of its hypotheses
        is final: nothing reorders or changes hypotheses after the search. Without alignments, each result becomes text
        as soon as it is found, while the engine decodes other jobs.
        """
        search, engine = options.search, self.engine
        jobs = [segment.make_job() for segment in segments]
        hypotheses: list[list[Hypothesis]] = [[] for _ in segments]
        with eval_mode(self.model):
            is_final = SEARCH_METHODS[search.method].is_beam_search and search.unknown == "drop" and not search.coverage
            if observe and isinstance(engine, TorchEngine) and is_final and not segments[0].constraints.required:
                results = engine.iter_results(jobs, search, observe)
            else:
                # Get all results of the beam: some may have the same text, and reranking changes their order.
                if SEARCH_METHODS[search.method].needs_full_beam and (search.nbest > 1 or search.coverage > 0):
                    search = search.model_copy(update={"nbest": search.beam})
                results = engine.iter_results(jobs, search)
            needs_alignments = options.align or search.coverage > 0 or search.unknown != "drop"
            unaligned: dict[int, list[SearchResult]] = {}
            for index, nbest in results:
                if needs_alignments or segments[index].matches:
                    unaligned[index] = nbest
                else:
                    hypotheses[index] = [self.make_hypothesis(segments[index], result, [], options) for result in nbest]
            indices = sorted(unaligned)
            chosen, found = [segments[i] for i in indices], dict(enumerate(unaligned[i] for i in indices))
            if chosen:
                aligned = engine.run_model(partial(self.add_alignments, chosen, found, search.coverage))
                for index, pairs in zip(indices, aligned, strict=True):
                    hypotheses[index] = [self.make_hypothesis(segments[index], *pair, options) for pair in pairs]
        return hypotheses

    @torch.inference_mode()
    def add_alignments(
        self, segments: Sequence[SourceSegment], results: Mapping[int, list[SearchResult]], coverage: float
    ) -> list[list[tuple[SearchResult, AlignmentRows]]]:
        """Return each result with its alignment: cross-attention weights from a forward pass over the hypothesis.

        With `coverage`, the weight of the coverage penalty, sort the results of each segment by score and penalty.
        Alignments are empty if the model has no attention over source tokens.
        """
        all_results = [(index, result) for index in range(len(segments)) for result in results[index]]
        alignments: list[AlignmentRows] = [[] for _ in all_results]
        examples = [segments[n].make_example(result.tokens) for n, result in all_results] if self.model.aligns else []
        for indices, batch in self.iter_batches(examples, bucket_widths):
            weight_BTS = self.model.compute_alignment(batch).cpu()
            for row, i in enumerate(indices):
                start, end = len(segments[all_results[i][0]].leading_ids), len(examples[i].source)
                first = segments[all_results[i][0]].constraints.language_tokens
                weight_TS = weight_BTS[row, first : len(examples[i].target), start:end]  # without tag and context
                alignments[i] = (weight_TS / weight_TS.sum(-1, keepdim=True).clamp(min=1e-9)).tolist()
        aligned: list[list[tuple[SearchResult, AlignmentRows]]] = [[] for _ in segments]
        for (index, result), alignment in zip(all_results, alignments, strict=True):
            aligned[index].append((result, alignment))
        return [postprocess.rerank_by_coverage(pairs, coverage) for pairs in aligned] if coverage else aligned

    def make_hypothesis(
        self, segment: SourceSegment, result: SearchResult, alignment: AlignmentRows, options: DecodeOptions
    ) -> Hypothesis:
        """Return the hypothesis of a search result: text, subwords, alignment, warnings and flags.

        Warnings say what went wrong, such as a cut. Flags are short signs of probable errors, for counting.
        """
        source, target, unknown = self.tokenizers.source, self.tokenizers.target, options.search.unknown
        if count := segment.constraints.language_tokens:
            result = replace(result, tokens=result.tokens[count:])
        source_length, length = len(segment.ids), len(result.tokens)
        if UNK in result.tokens and unknown != "drop":
            replace_word = postprocess.UNKNOWN_WORD_METHODS[unknown]
            words = postprocess.list_source_words(source, segment.text, segment.ids)
            replacements = [replace_word(word, options.dictionary) for word in words]
            rows = alignment or [[]] * len(result.tokens)
            copied = segment.ids if self.recipe.neural_model.copying else ()
            text = postprocess.fill_unknowns(result.tokens, rows, target, replacements, copied)
        else:
            text = target.decode(result.tokens)
        hypothesis = Hypothesis(
            text,
            score=result.score,
            tokens=target.ids_to_tokens(result.tokens),
            alignment=alignment,
            source_tokens=source.ids_to_tokens(segment.ids),
            logp=result.logp,
        )
        if segment.matches:
            hypothesis = replace_terms(hypothesis, segment.text, segment.matches, target)
            text = hypothesis.text
        warnings = [warning for warning in (segment.warning, result.warning) if warning]
        if source_length > self.longest_source:
            compared = f"{source_length} tokens against {self.longest_source}"
            warnings.append(f"longer than any sentence of training ({compared})")
        if not result.finished:
            limits = "model.max_length allows" if length == self.max_tokens else "search.max_ratio and max_extra allow"
            if options.search.max_tokens and options.search.max_tokens <= length < self.max_tokens:
                limits = "search.max_tokens allows"
            warnings.append(f"cut at {length} tokens, the most that {limits}")
        flags = list(postprocess.find_flags(segment.text, text, (source_length, length), self.statistics))
        flags += [postprocess.FLAG_UNKNOWN] if UNK in result.tokens and unknown == "drop" else []
        placeholder_warnings = postprocess.check_placeholders(segment.text, text, self.statistics)
        if segment.constraints.is_constrained:
            warnings += list_unmet_constraints(segment.line, segment.constraints, text)
        return replace(
            hypothesis,
            alignment=hypothesis.alignment if options.align else [],
            warnings=(*warnings, *placeholder_warnings),
            flags=(*flags, *dict.fromkeys(map(postprocess.get_warning_kind, placeholder_warnings))),
        )


def check_scored_pairs(sources: Sequence[str | Line], targets: Sequence[str]) -> tuple[list[str | Line], list[str]]:
    """Return sources and targets as lists; raise a UserError if they cannot be scored."""
    sources = check_lines(sources, "score", "source", types=(str, Line))
    targets = check_lines(targets, "score", "target")
    if len(sources) != len(targets):
        raise UserError(f"there are {len(sources)} sources but {len(targets)} targets; give one for each source")
    for number, source in enumerate(sources):
        if isinstance(source, Line) and source != Line(source.text, context=source.context):
            raise UserError(f"score takes texts with their context, but source {number} of the list is {source!r}")
    return sources, targets


def drop_language_tokens(score: PairScore, count: int) -> PairScore:
    """Return the score of a target without its first tokens, which are given with the source."""
    logps, tokens = score.token_logps[count:], score.tokens[count:]
    if not logps or len(score.tokens) <= count:  # too long for the model, or empty
        return score
    return replace(score, logp=sum(logps), mean=sum(logps) / len(tokens), tokens=tokens, token_logps=logps)


def refuse_unused_search_settings(names: Iterable[str]) -> None:
    """Raise a UserError for a search setting that a phrase-based system does not use."""
    if unused := [name for name in names if name not in ("beam", "nbest", "scores")]:
        raise UserError(f"search.{unused[0]} has no effect on a model of kind smt; leave it out")


def merge_search(
    run_settings: SearchSettings,
    changes: Mapping[str, Any] | None = None,
    *,
    beam: int | None = None,
    count: int | None = None,
    aligns: bool = True,
) -> SearchSettings:
    """Return the search settings of a run with overrides; raise a UserError if they are invalid.

    `aligns`: whether the model's attention distinguishes source tokens, which some settings need.
    """
    given = {name: value for name, value in (("beam", beam), ("nbest", count)) if value is not None}
    settings = parse_settings(SearchSettings, {**run_settings.model_dump(), **(changes or {}), **given}, where="search")
    check_search_settings(settings)
    get_entry(postprocess.UNKNOWN_WORD_METHODS, settings.unknown, "search.unknown")
    need_alignment = [f"search.coverage={settings.coverage:g}"] if settings.coverage else []
    need_alignment += [f"search.unknown={settings.unknown}"] if settings.unknown in ("copy", "dictionary") else []
    if need_alignment and not aligns:
        raise UserError(
            f"{need_alignment[0]} needs the source word that each target word attends to, which this model's attention "
            "(none or mean) does not give; leave it out, or train with another model.attention, such as additive"
        )
    return apply_method_settings(settings)  # such as beam 1 of greedy search


def compute_max_tokens(constraints: DecodingConstraints, tokens: int, search: SearchSettings, model_limit: int) -> int:
    """Return the maximum number of tokens, EOS included, of the translation of a source with `tokens` tokens.

    The tokens of a forced prefix and of required terms are added to the limit of the search settings. `model_limit` is
    the maximum that the model's positions allow.
    """
    limit = max(int(search.max_ratio * tokens) + search.max_extra, constraints.min_tokens) + 1
    limit = min(limit, search.max_tokens or limit)
    return min(limit + len(constraints.prefix) + constraints.needed_tokens, model_limit)
