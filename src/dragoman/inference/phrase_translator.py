"""The translator of a phrase-based system (model.kind=smt), with the interface of all translators.

    translator = dragoman.load("runs/phrase-based")
    translator.translate(["A man walks his dog."])

Lines are split, and probable errors are flagged, as with neural models. The beam is the maximum number of hypotheses
per stack (partial translations of equally many source words). Scores are weighted sums of features, not
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.inference import postprocess
from dragoman.inference.predictor import Predictor, parse_header
from dragoman.inference.source_segment import SourceSegment
from dragoman.inference.streaming import BeamObserver
from dragoman.inference.translator import (
    DecodeOptions,
    Translator,
    check_scored_pairs,
    merge_search,
    refuse_unused_search_settings,
)
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder, read_header
from dragoman.smt.settings import SmtSettings
from dragoman.smt.system import WEIGHTS, PhraseSystem, PhraseTranslation, load_system
from dragoman.types import Hypothesis, Line, PairScore, Tree


@dataclass(frozen=True, slots=True, repr=False)
class PhraseTranslator(Translator):
    """A phrase-based system and the tokenizers of its words."""

    model: PhraseSystem  # type: ignore[assignment]
    supports_engines: ClassVar[bool] = False
    supports_constraints: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Predictor.__post_init__(self)  # super() does not work in dataclasses with slots

    @property
    def parameter_count(self) -> int:
        return self.model.parameter_count

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
        """Return the options of a call. The default of the beam is model.decoder.stack, not search.beam.

        Raise a UserError for options that phrase-based systems do not support.
        """
        if dictionary is not None:
            raise UserError("model.kind=smt copies unknown words and does not look them up; leave the dictionary out")
        refuse_unused_search_settings(search or {})
        stack = beam or (search or {}).get("beam") or self.model.settings.decoder.stack
        settings = merge_search(self.recipe.search, search, beam=stack, count=count)
        return DecodeOptions(settings, {}, tag, align, self.choose_context(context))

    def make_segments(
        self,
        line: str | Line,
        options: DecodeOptions,
        ids: list[int] | None = None,
        *,
        tree: Tree | None = None,
        line_index: int = 0,
    ) -> list[SourceSegment]:
        if isinstance(line, Line) and (line.terms or line.avoid or line.prefix):
            raise UserError("model.kind=smt cannot be given words of the translation; leave terms and prefixes out")
        return Translator.make_segments(self, line, options, ids, tree=tree, line_index=line_index)

    def decode_segments(
        self, segments: Sequence[SourceSegment], options: DecodeOptions, observe: BeamObserver | None = None
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each segment. `observe` is not called: words are final at the end of the search."""
        del observe

        def translate() -> list[list[PhraseTranslation]]:
            texts = (segment.text for segment in segments)
            return list(self.model.translate(texts, n_best=options.search.nbest, stack=options.search.beam))

        nbest_lists = self.engine.run_model(translate) if self.engine else translate()
        return [
            [self.make_phrase_hypothesis(segment, translation, options) for translation in translations]
            for segment, translations in zip(segments, nbest_lists, strict=True)
        ]

    def make_phrase_hypothesis(
        self, segment: SourceSegment, translation: PhraseTranslation, options: DecodeOptions
    ) -> Hypothesis:
        """Return the hypothesis of a translation. Its flags mark probable errors."""
        text, score = translation.text, translation.derivation.score
        lengths = len(translation.source_tokens), len(translation.tokens)
        warnings = postprocess.check_placeholders(segment.text, text, self.statistics)
        flags = postprocess.find_flags(segment.text, text, lengths, self.statistics)
        return Hypothesis(
            text=text,
            score=score,
            tokens=translation.tokens,
            alignment=translation.alignment() if options.align else [],
            source_tokens=translation.source_tokens,
            logp=score,
            warnings=tuple(warnings),
            flags=(*flags, *dict.fromkeys(map(postprocess.get_warning_kind, warnings))),
            features=translation.features,
        )

    def score(
        self,
        sources: Sequence[str | Line],
        targets: Sequence[str],
        *,
        trees: Sequence[Tree | None] | None = None,
        tag: str = "",
        context: int | None = None,
    ) -> list[PairScore]:
        """Return the score of the best derivation of each target from its source (forced decoding).

        A target that the phrase table cannot produce has no score (nan), with a warning.
        """
        sources, targets = check_scored_pairs(sources, targets)
        self.check_trees(trees, len(sources))
        self.encode_tag(tag)  # only a check: raises a UserError if the tag is unknown
        self.choose_context(context)  # likewise
        texts = [source if isinstance(source, str) else source.text for source in sources]
        scores = []
        for tokens, derivation in self.model.force(zip(texts, targets, strict=True)):
            if derivation:
                scores.append(PairScore(derivation.score, derivation.score / max(len(tokens), 1), tokens, []))
            else:
                warning = "without a score: the phrases of the model cannot produce the target"
                scores.append(PairScore(float("nan"), float("nan"), tokens, [], (warning,)))
        return scores


def open_phrase_translator(folder: RunFolder, recipe: Recipe) -> PhraseTranslator:
    assert isinstance(recipe.model, SmtSettings)
    if not (folder.path / WEIGHTS).exists():
        raise UserError(f"training of {str(folder.path)!r} is not finished; continue it with dragoman train --resume")
    header = read_header(folder.model_file)
    tokenizers = Tokenizers.load(folder.tokenizer_folder, fingerprint=header.get("tokenizer", ""))
    system = load_system(folder.path, recipe.model, tokenizers)
    longest_source, statistics = parse_header(header, folder.model_file)
    device, run = torch.device("cpu"), str(folder.path)
    return PhraseTranslator(system, tokenizers, recipe, longest_source, device, statistics=statistics, run=run)
