"""TMX: translation memories. Each unit without a text in the target language gets one, after that of the source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dragoman.documents.document import ICU_MESSAGE, Document, MarkedText, Splice, UnitWriter
from dragoman.documents.markup_language import (
    MarkupToken,
    XmlDocument,
    close_empty,
    find_element_end,
    list_children,
    read_xml,
    render_xml,
    tokenize_markup,
)
from dragoman.documents.translation_codes import read_inline
from dragoman.errors import UserError
from dragoman.language_codes import is_same_language


def read_tmx(data: bytes, name: str, source_language: str = "", target_language: str = "") -> Document:
    """Return the units of a TMX file whose target is missing or empty.

    By default the source language is that of the file, and the target language the only other one in it.
    """
    file = read_xml(data, name)
    tokens = list(tokenize_markup(file.text))
    if not any(token.name == "tmx" for token in tokens[:20]):
        raise UserError(f"{name} has no element <tmx>, so it is not TMX; rename it after its format")
    document = XmlDocument(file, source_language=source_language, target_language=target_language)
    variants, index = [], 0
    while index < len(tokens):
        if tokens[index].kind == "open" and tokens[index].name == "tu":
            start, index = index, find_element_end(tokens, index)
            variants.append([child for child in list_children(tokens, start, index) if is_variant(tokens, child)])
        index += 1
    languages = list(dict.fromkeys(get_language(tokens[first]) for children in variants for first, _ in children))
    header = next((token for token in tokens if token.name == "header"), None)
    if not document.source_language and header and header.get("srclang") not in ("", "*all*"):
        document.source_language = header.get("srclang")
    if not document.source_language and languages:
        document.source_language = languages[0]
    others = [code for code in languages if not is_same_language(code, document.source_language)]
    if not document.target_language:
        if not others or not all(is_same_language(code, others[0]) for code in others):
            found = f"the languages {', '.join(others)}" if others else "no other language"
            raise UserError(f"{name} has {found} beside {document.source_language}; choose the target language")
        document.target_language = others[0]
    if languages and not any(is_same_language(code, document.source_language) for code in languages):
        found = ", ".join(languages)
        raise UserError(
            f"{name} has no text in {document.source_language}; choose one of its languages ({found}) as source"
        )
    spellings = Counter(get_language(tokens[first]) for children in variants for first, _ in children)
    spellings[document.target_language] *= len(variants)  # before others if the file has it
    targets = [code for code, _ in spellings.most_common() if is_same_language(code, document.target_language)]
    spelling = next(iter(targets), document.target_language)  # of the target language in this file, such as de-DE
    for children in variants:
        add_translation_unit(document, tokens, children, spelling)
    return document


def is_variant(tokens: Sequence[MarkupToken], child: tuple[int, int]) -> bool:
    return tokens[child[0]].name == "tuv"


def get_language(variant: MarkupToken) -> str:
    """Return the language of a <tuv>; old versions of TMX call the attribute lang."""
    return variant.get("xml:lang") or variant.get("lang")


def find_segment(tokens: Sequence[MarkupToken], variant: tuple[int, int]) -> tuple[int, int] | None:
    return next((child for child in list_children(tokens, *variant) if tokens[child[0]].name == "seg"), None)


def add_translation_unit(
    document: Document, tokens: Sequence[MarkupToken], variants: list[tuple[int, int]], target_language: str
) -> None:
    """Add a <tu> to the units of a document, unless it has no text in the source language or has a translation.

    A new variant has the code `target_language`.
    """

    def find(language: str) -> tuple[int, int] | None:
        same = [child for child in variants if is_same_language(get_language(tokens[child[0]]), language)]
        exact = [child for child in same if get_language(tokens[child[0]]).lower() == language.lower()]
        return next(iter(exact or same), None)

    source, target = find(document.source_language), find(document.target_language)
    segment = find_segment(tokens, source) if source else None
    if not source or not segment:
        document.skipped += bool(variants)
        return
    builder = read_inline(tokens[segment[0] + 1 : segment[1]], document.file.text)
    if not builder.text.strip():
        return
    old = find_segment(tokens, target) if target else None
    is_done = old and any(token.kind != "text" or token.raw.strip() for token in tokens[old[0] + 1 : old[1]])
    if is_done or ICU_MESSAGE.search(builder.text):
        document.skipped += 1
        return

    def make_splices(translation: MarkedText) -> list[Splice]:
        content = f"<seg>{render_xml(translation, builder.spellings)}</seg>"
        if old:
            return [Splice(tokens[old[0]].start, tokens[old[1]].end, content)]
        if target and target[0] == target[1]:
            variant = tokens[target[0]]
            return [Splice(variant.start, variant.end, close_empty(variant, content))]
        if target:
            position = tokens[target[1]].start
            return [Splice(position, position, content)]
        first, last = source
        indent = tokens[first - 1].raw if tokens[first - 1].raw.isspace() else ""
        attribute = "xml:lang" if "xml:lang" in tokens[first].attributes else "lang"
        new = f'{indent}<tuv {attribute}="{target_language}">{content}</tuv>'
        return [Splice(tokens[last].end, tokens[last].end, new)]

    document.add(builder.build(), UnitWriter(make_splices, in_place=False))
