"""Translation of documents and of texts with tags.

    result = translate_document(translator, Path("in.xliff").read_bytes(), "in.xliff")
    Path("out.xliff").write_bytes(result.data)

The units of a document are split into sentences, which are translated in the order of the document. Inline tags are
placed by the alignment (markup_projection.py), and white space between sentences stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dragoman.data.context import ContextWindow
from dragoman.documents.document import MarkedText, Unit
from dragoman.documents.formats import open_document
from dragoman.documents.html import read_fragment
from dragoman.errors import UserError
from dragoman.inference.constraints import Glossary
from dragoman.inference.markup_projection import MAX_WEIGHTS, join_aligned, place_markup
from dragoman.inference.placeholder_tags import hide_placeholders, restore_placeholders
from dragoman.inference.postprocess import (
    FLAG_ADDED,
    FLAG_LOST,
    PairStatistics,
    check_placeholders,
    find_placeholders,
    get_warning_kind,
    has_words,
    locate_sentences,
)
from dragoman.inference.translator import DecodeOptions, Translator
from dragoman.inference.word_alignment import AlignedText, align_words, find_words
from dragoman.types import Hypothesis, Line

BATCH_SEGMENTS = 512  # segments between two reports of progress
# A line break that ends a sentence in texts where lines may be wrapped: after its last mark, before a list or a blank.
LINE_END = re.compile(r"(?<=[.!?:;…。！？])[ \t]*\r?\n|\r?\n(?=[ \t]*(?:[-*•#>|]|\d+[.)]|\r?\n|[ \t]{2,}))|\r?\n\s*\n")
# A tag between two words that is a line break or a tab: other tags can stand inside a word.
BREAK = re.compile(
    r"(?:<|&lt;)(?:\w+:)?(?:br|cr|tab|ptab)\b|\bctype=[\"'](?:lb|x-br)[\"']|\b(?:id|equiv)=[\"']LINE_BREAK\b|"
    r"\bsubType=[\"']xlf:lb[\"']",
    re.IGNORECASE,
)
FOLLOWING = re.compile(r"\s*(\S)")  # the first character of the next word
# A single code of XLIFF or TMX, unless it stands for a value: two of them may belong together without saying so.
SINGLE_CODE = re.compile(r"<(?:\w+:)?(?:x|ph|it|ut)\b(?!.*?(?:INTERPOLATION|[>\"'](?:\{|%|\$)))", re.DOTALL)
MOVED_WARNING = "single codes are in another order; check that none of them belong together"
EMPTY_WARNING = "an empty translation"
Progress = Callable[[int, int], None]  # gets the numbers of translated units and of all units


@dataclass(frozen=True, slots=True)
class DocumentResult:
    """A translated document."""

    data: bytes
    unit_warnings: Mapping[int, tuple[str, ...]]  # by the number of the unit, from 1
    units: int  # translated
    characters: int  # of the source texts of these units, without tags
    skipped: int = 0  # units with a translation, or that must not be translated

    @property
    def warnings(self) -> list[str]:
        """All warnings, each with the number of its unit."""
        return [f"unit {number}: {warning}" for number, all_of in self.unit_warnings.items() for warning in all_of]


@dataclass(frozen=True, slots=True)
class TranslatedUnit:
    """The translation of a unit with its tags, and what may be wrong with it."""

    content: MarkedText
    warnings: tuple[str, ...] = ()


def translate_document(
    translator: Translator,
    data: bytes,
    name: str,
    *,
    options: DecodeOptions | None = None,
    glossary: Glossary | None = None,
    source_language: str = "",
    target_language: str = "",
    progress: Progress = lambda _done, _total: None,
) -> DocumentResult:
    """Return a document with its translations: everything but the translated text keeps its bytes.

    The format follows from `name`, else from the content. The languages are needed by formats that name them, such as
    TMX; by default they are those of the file. `options` are those of `Translator.make_options`.
    """
    document = open_document(data, name, source_language=source_language, target_language=target_language)
    options = options or translator.make_options()
    translated = translate_units(translator, [document.units], options, glossary=glossary, progress=progress)
    warnings = {number: unit.warnings for number, unit in enumerate(translated, 1) if unit.warnings}
    new = document.write([translation.content for translation in translated])
    for number, warning in document.warnings.items():
        warnings[number] = (*warnings.get(number, ()), warning)
    characters = sum(len(unit.text) for unit in document.units)
    return DocumentResult(new, warnings, len(document.units), characters, document.skipped)


def translate_marked(
    translator: Translator,
    texts: Sequence[str],
    kind: str = "html",
    *,
    options: DecodeOptions | None = None,
    glossary: Glossary | None = None,
    ignore_tags: Collection[str] = (),
    splitting_tags: Collection[str] = (),
) -> list[str]:
    """Return the translations of texts with tags of kind "html" or "xml", with the same tags.

    Elements named in `ignore_tags` are not translated. In XML a sentence ends at the tags of `splitting_tags`.
    """
    if kind not in ("html", "xml"):
        raise UserError(f"tags can be of kind html or xml, not {kind!r}")
    documents = [read_fragment(text, kind, ignore_tags, splitting_tags) for text in texts]
    options = options or translator.make_options()
    units = [document.units for document in documents]
    contents = iter(translate_units(translator, units, options, glossary=glossary))
    return [document.write_text([next(contents).content for _ in document.units]) for document in documents]


def translate_units(
    translator: Translator,
    documents: Sequence[Sequence[Unit]],
    options: DecodeOptions,
    *,
    glossary: Glossary | None = None,
    progress: Progress = lambda _done, _total: None,
) -> list[TranslatedUnit]:
    """Return the translations of the units of documents, in their order.

    Context, for models trained with it, are the previous sentences of the same document. If the model loses or adds
    placeholders of a unit, the unit is translated again without them, and they are placed by the alignment.
    """
    translated = translate_units_once(translator, documents, options, glossary, progress)
    units = [unit for document in documents for unit in document]
    changed = [
        index
        for index, unit in enumerate(units)
        if {get_warning_kind(warning) for warning in translated[index].warnings} & {FLAG_LOST, FLAG_ADDED}
        and find_placeholders(unit.text)
    ]
    hidden = [hide_placeholders(units[index]) for index in changed]
    again = translate_units_once(translator, [[unit] for unit, _ in hidden], options, glossary) if hidden else []
    for index, (_, placeholders), unit in zip(changed, hidden, again, strict=True):
        content = restore_placeholders(unit.content, placeholders)
        lost = check_placeholders(units[index].text, content.text, translator.statistics)
        translated[index] = TranslatedUnit(content, tuple(dict.fromkeys([*unit.warnings, *lost])))
    return translated


def translate_units_once(
    translator: Translator,
    documents: Sequence[Sequence[Unit]],
    options: DecodeOptions,
    glossary: Glossary | None,
    progress: Progress = lambda _done, _total: None,
) -> list[TranslatedUnit]:
    """Return the translations of the units of documents; placeholders are part of their texts."""
    units = [unit for document in documents for unit in document]
    spans = [split_unit(unit) for unit in units]
    lines = list(make_lines(documents, iter(spans), options.context, glossary))
    if not any(unit.markup for unit in units):
        options = replace(options, align=False)  # only tags need alignments
    hypotheses: list[Hypothesis] = []
    translated: list[TranslatedUnit] = []
    total, statistics = len(units), translator.statistics
    for start in range(0, len(lines), BATCH_SEGMENTS):
        batch = lines[start : start + BATCH_SEGMENTS]
        hypotheses += [nbest[0] for nbest in translator.translate_nbest(batch, options)]
        while len(translated) < total and len(spans[len(translated)]) <= len(hypotheses):
            index = len(translated)
            count = len(spans[index])
            translated.append(join_unit(units[index], spans[index], hypotheses[:count], statistics))
            del hypotheses[:count]
        progress(len(translated), total)
    translated += [TranslatedUnit(unit.content) for unit in units[len(translated) :]]
    progress(total, total)
    return translated


def make_lines(
    documents: Sequence[Sequence[Unit]],
    spans: Iterator[list[tuple[int, int]]],
    context: int,
    glossary: Glossary | None,
) -> Iterator[Line]:
    """Yield the sentences of documents as lines to translate."""
    for document in documents:
        window = ContextWindow(context)
        for unit in document:
            for start, end in next(spans):
                text = " ".join(unit.text[start:end].split())
                line = Line(text, context=window.advance(text))
                yield glossary.add_terms(line) if glossary else line


def split_unit(unit: Unit) -> list[tuple[int, int]]:
    """Return the start and end of each sentence of a unit; what has no letters is not among them.

    A unit is also split at a line break or a tab that separates words without a space, or precedes a capital or digit.
    """
    text = unit.text
    splits = {0, len(text)}
    if not unit.wraps:
        splits |= {match.end() for match in LINE_END.finditer(text)}
    for tag in unit.markup:
        if BREAK.search(tag.raw):
            previous, following = text[tag.position - 1 : tag.position], FOLLOWING.match(text, tag.position)
            is_glued = previous.isalnum() and text[tag.position : tag.position + 1].isalnum()
            if is_glued or (following and (following[1].isupper() or following[1].isdecimal())):
                splits.add(tag.position)
    sentences = (span for first, last in pairwise(sorted(splits)) for span in locate_sentences(text, first, last))
    return [(start, end) for start, end in sentences if has_words(text[start:end])]


def join_unit(
    unit: Unit,
    spans: Sequence[tuple[int, int]],
    hypotheses: Sequence[Hypothesis],
    statistics: PairStatistics | None = None,
) -> TranslatedUnit:
    """Return the translation of a unit, given those of its sentences. Placeholders are checked in all of it."""
    if not spans:
        return TranslatedUnit(unit.content)
    parts: list[tuple[int, int, AlignedText]] = []
    position = 0
    for (start, end), hypothesis in zip(spans, hypotheses, strict=True):
        if unit.markup:
            parts += list_copies(unit.text, position, start)
            parts.append((start, end, align_sentence(unit.text[start:end], hypothesis)))
        else:  # only tags need the words and their alignment
            parts.append((start, end, AlignedText(hypothesis.text, [], [], None)))
        position = end
    parts += list_copies(unit.text, position, len(unit.text)) if unit.markup else []
    content, warnings = place_markup(unit, join_aligned(parts, unit.text))
    codes = [tag.id for tag in content.markup if tag.partner is None and SINGLE_CODE.match(tag.raw)]
    warnings += [MOVED_WARNING] if codes != sorted(codes) else []
    for hypothesis in hypotheses:
        kinds = {get_warning_kind(warning) for warning in hypothesis.warnings}
        warnings += [*hypothesis.warnings, *(flag for flag in hypothesis.flags if flag not in kinds)]
        warnings += [] if hypothesis.text.strip() else [EMPTY_WARNING]
    warnings = [warning for warning in warnings if get_warning_kind(warning) not in (FLAG_LOST, FLAG_ADDED)]
    warnings += check_placeholders(unit.text, content.text, statistics)
    warnings += [unit.warning] if unit.warning else []
    return TranslatedUnit(content, tuple(dict.fromkeys(warnings)))


def align_sentence(text: str, hypothesis: Hypothesis) -> AlignedText:
    """Return the translation of a sentence with its alignment, unless that would need much memory."""
    if max(len(hypothesis.tokens), len(hypothesis.source_tokens)) ** 2 <= MAX_WEIGHTS:
        return align_words(text, hypothesis)
    return AlignedText(hypothesis.text, find_words(text, set()), find_words(hypothesis.text, set()), None)


def list_copies(text: str, start: int, end: int) -> list[tuple[int, int, AlignedText]]:
    """Return the part of a text that is copied, aligned to itself; nothing if it has no words."""
    words = find_words(text[start:end], set())
    weight_TS = np.eye(len(words)) if len(words) ** 2 <= MAX_WEIGHTS else None
    return [(start, end, AlignedText(text[start:end], words, words, weight_TS))] if words else []
