"""Documents are translated with their structure: tags follow the words that they enclose, and none is lost."""

from __future__ import annotations

import re
import tracemalloc
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.documents.document import MarkedText, Markup, Unit, UnitBuilder, render
from dragoman.documents.formats import open_document
from dragoman.errors import UserError
from dragoman.inference import document_translation
from dragoman.inference.document_translation import (
    EMPTY_WARNING,
    TranslatedUnit,
    join_unit,
    split_unit,
    translate_document,
    translate_marked,
)
from dragoman.inference.markup_projection import (
    LONG_WARNING,
    NOT_NESTED_WARNING,
    ORDER_WARNING,
    nest_tags,
    order_sequences,
    place_markup,
)
from dragoman.inference.postprocess import FLAG_LOST
from dragoman.inference.translator import Translator
from dragoman.inference.word_alignment import AlignedText, align_words, find_words
from dragoman.types import Hypothesis, Pair
from toy_run import Call, Toy, assert_user_error, translate_toy


def make_hypothesis(source: str, target: str, links: dict[int, int]) -> Hypothesis:
    """Return a hypothesis in which target word t is aligned to source word links[t]."""
    words = source.split(), target.split()
    alignment = [[float(links.get(t) == s) for s in range(len(words[0]))] for t in range(len(words[1]))]
    tokens, source_tokens = ([f"▁{word}" for word in side] for side in (words[1], words[0]))
    return Hypothesis(target, 0.0, tokens, alignment if links else [], source_tokens, 0.0)


def project_markup(unit: Unit, hypothesis: Hypothesis) -> tuple[MarkedText, list[str]]:
    """Return the text of a hypothesis with the tags of its source, and warnings."""
    return place_markup(unit, align_words(unit.text, hypothesis))


def place(page: str, target: str, links: dict[int, int]) -> tuple[str, list[str]]:
    [unit] = open_document(page.encode(), "page.html").units
    content, warnings = project_markup(unit, make_hypothesis(unit.text, target, links))
    return render(content, str), warnings


@pytest.mark.parametrize(
    ("source", "target", "links", "expected"),
    [
        ("<b>big red</b> house", "maison grande rouge", {0: 2, 1: 0, 2: 1}, "maison <b>grande rouge</b>"),
        ("<a><b>big</b> red</a> house", "maison rouge grande", {0: 2, 1: 1, 2: 0}, "maison <a>rouge <b>grande</b></a>"),
        ("<b>all words</b>", "tous mots", {0: 0, 1: 1}, "<b>tous mots</b>"),
        ("<i>one</i> <b>two</b>", "zwei eins", {0: 1, 1: 0}, "<b>zwei</b> <i>eins</i>"),
        ("see <img> now", "jetzt sieh", {0: 1, 1: 0}, "<img> jetzt sieh"),
        ("one<img>", "eins", {0: 0}, "eins<img>"),
        ("<img> one two", "zwei eins", {0: 1, 1: 0}, "<img> zwei eins"),
        ("one two <img>", "zwei eins", {0: 1, 1: 0}, "zwei eins <img>"),
        ("one <img>two", "zwei eins", {0: 1, 1: 0}, "<img>zwei eins"),
        ("one <b></b><img> two", "eins zwei", {0: 0, 1: 1}, "eins <b></b><img> zwei"),
        ("one<img> two <br>", "zwei eins", {0: 1, 1: 0}, "zwei eins<img> <br>"),
        ("<b>one <img></b> two", "zwei eins", {0: 1, 1: 0}, "zwei <b>eins <img></b>"),
        ("one <b>two </b>three", "zwei eins drei", {0: 1, 1: 0, 2: 2}, "<b>zwei </b>eins drei"),
        ("<b><a>New</a> car</b> here", "Neuwagen hier", {0: 0, 1: 2}, "<b><a>Neuwagen</a></b> hier"),
        ("<b><a>red</a> car</b> here", "rotes hier Auto", {0: 0, 1: 2, 2: 1}, "<b><a>rotes</a></b> hier Auto"),
        ("here <b>a <a>car</a></b>", "hier Auto", {0: 0, 1: 2}, "hier <b><a>Auto</a></b>"),
    ],
)  # fmt: skip
def test_tags_follow_their_words(source: str, target: str, links: dict[int, int], expected: str) -> None:
    assert place(source, target, links) == (expected, [])


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("one two <code>x</code>.", "eins zwei.", "eins zwei <code>x</code>."),
        ("one <code>x</code>, two.", "eins, zwei.", "eins <code>x</code>, zwei."),
        ("one (<code>x</code> two).", "eins (zwei).", "eins (<code>x</code> zwei)."),
        ("one two<code>1</code>.", "eins zwei.", "eins zwei<code>1</code>."),
        ("one two <img>!", "一二!", "一二 <img>!"),
        ("one <img>two!", "一二!", "一<img>二!"),
    ],
)
def test_objects_beside_marks_keep_their_space(source: str, target: str, expected: str) -> None:
    """A translation has no space before a full stop, even where the source has an object between both."""
    [unit] = open_document(source.encode(), "page.html").units
    assert render(translate_words(unit, target), str) == expected


def translate_words(unit: Unit, target: str) -> MarkedText:
    """Return a target, each word of which is aligned to the word of the unit with the same number, with its tags."""
    words = find_words(target, set(range(len(target))))
    source_words = find_words(unit.text, set())
    return place_markup(unit, AlignedText(target, source_words, words, np.eye(len(words))))[0]


@st.composite
def spaced_units(draw: st.DrawFn) -> Unit:
    """Return a unit with nested tags anywhere, also at both ends, and with or without a space on each side."""
    builder, stack, previous, is_apart = UnitBuilder(), list[str](), "", True
    tokens = draw(st.lists(st.sampled_from(["w", "w", ".", " ", " ", "x", "<", ">"]), max_size=24))
    for number, token in enumerate(tokens):
        if (token == ">" and not stack) or token == previous == " ":
            continue
        if token == "<":
            stack.append(str(number))
            builder.add_tag(f"<{number}>", "open", stack[-1])
        elif token == ">":
            builder.add_tag(f"</{stack[-1]}>", "close", stack.pop())
        elif token == "x":
            builder.add_tag(f"<{number}/>")
        else:
            builder.add_text(token if token != "w" else f"w{number}" if is_apart else f" w{number}")
            is_apart = token != "w"
        previous = token
    for key in reversed(stack):
        builder.add_tag(f"</{key}>", "close", key)
    return builder.build()


@settings(max_examples=1000)
@given(spaced_units(), st.booleans())
def test_a_monotone_translation_keeps_the_places_of_tags_and_spaces(unit: Unit, aligned: bool) -> None:
    spans, hypotheses = split_unit(unit), []
    for start, end in spans:
        text = " ".join(unit.text[start:end].split())
        tokens = [text[first:last] for first, last in find_words(text, set())]
        alignment = np.eye(len(tokens)).tolist() if aligned else []
        hypotheses.append(Hypothesis(text.upper(), 0.0, [each.upper() for each in tokens], alignment, tokens, 0.0))
    translated = join_unit(unit, spans, hypotheses)
    assert render(translated.content, str) == render(unit.content, str).upper()


def find_gaps(content: MarkedText) -> list[list[int | str]]:
    """Return the ids of tags, and the spaces, before the first word, between words and after the last."""
    pieces: list[tuple[int, int, int | str]] = [(tag.position, i, tag.id) for i, tag in enumerate(content.markup)]
    pieces += [(place, len(pieces), " ") for place, character in enumerate(content.text) if character == " "]
    starts = [start for start, _ in find_words(content.text, set())]
    gaps: list[list[int | str]] = [[] for _ in range(len(starts) + 1)]
    for position, _, piece in sorted(pieces, key=lambda each: each[:2]):
        gaps[bisect_left(starts, position)].append(piece)
    return gaps


@settings(max_examples=1000)
@given(spaced_units(), st.integers(1, 8), st.randoms())
def test_white_space_between_words_neither_grows_nor_moves_into_pairs(unit: Unit, length: int, random: Random) -> None:
    """Whatever the order of words: tags that were together keep their spaces, others share one.

    Single tags, and pairs without words, may have spaces of their own.
    """
    source_words, text = find_words(unit.text, set()), " ".join("abcdefgh"[:length])
    weight_TS = np.zeros((length, len(source_words)))
    for row in weight_TS if source_words else ():
        row[random.randrange(len(source_words))] = 1
    content, _ = place_markup(unit, AlignedText(text, source_words, find_words(text, set()), weight_TS))
    tags, source_gaps, gaps = {tag.id: tag for tag in unit.markup}, find_gaps(unit.content), find_gaps(content)
    together = {tuple(each for each in gap if each != " "): gap for gap in source_gaps if " " in gap}
    around_words = {
        tag.id
        for tag in unit.markup
        if tag.partner is not None and unit.text[slice(*sorted((tag.position, tags[tag.partner].position)))].strip()
    }
    for gap in gaps[1:-1]:
        members = [each for each in gap if each != " "]
        if members and tuple(members) in together:
            assert gap == together[tuple(members)]
        elif around_words.issuperset(members):
            assert gap.count(" ") == 1
    adjacent = {pair for gap in source_gaps for pair in pairwise(gap)}
    for before, after in (pair for gap in gaps for pair in pairwise(gap)):
        if (before == " " and after in tags and tags[after].kind == "close") or (
            after == " " and before in tags and tags[before].kind == "open"
        ):
            assert (before, after) in adjacent


@pytest.mark.parametrize(
    ("name", "source", "target", "links", "expected"),
    [
        ("a.md", "**[New](u) car** here", "Neuwagen hier", {0: 0, 1: 2}, "**[Neuwagen](u)** hier"),
        ("a.xlf", "<ph/> <ph/> <pc>a <pc>b</pc></pc>", "B A", {0: 1, 1: 0}, "<ph/> <ph/> <pc><pc>B</pc> A</pc>"),
    ],
)  # fmt: skip
def test_white_space_in_formats(name: str, source: str, target: str, links: dict[int, int], expected: str) -> None:
    file = f'<xliff version="2.0"><file><unit><segment><source>{source}</source></segment></unit></file></xliff>'
    [unit] = open_document((file if name == "a.xlf" else source).encode(), name).units
    translated = join_unit(unit, split_unit(unit), [make_hypothesis(unit.text, target, links)])
    assert (render(translated.content, str), translated.warnings) == (expected, ())


def test_without_an_alignment_tags_in_a_text_are_warned_of() -> None:
    assert place("<b>one two</b>", "eins zwei", {}) == ("<b>eins zwei</b>", [])
    text, warnings = place("one <b>two</b> three", "eins zwei drei", {})
    assert text == "eins <b>zwei</b> drei"
    assert len(warnings) == 1


def test_an_unnested_tag_is_warned_of() -> None:
    text, warnings = place("<b>one <i>two</b> three</i>", "drei zwei eins", {0: 2, 1: 1, 2: 0})
    assert all(tag in text for tag in ("<b>", "<i>", "</b>", "</i>"))
    assert warnings


CUE = "1\n00:00:01,000 --> 00:00:02,000\n{}\n"


@pytest.mark.parametrize(
    ("cue", "expected"),
    [
        (f"a {{\\i{'0' * 5000}1}}b{{\\i0}} c", f"C {{\\i{'0' * 5000}1}}B{{\\i0}} A"),
        ("a {\\i1}b c{\\i0} d e", "E D {\\i1}C B{\\i0} A"),
        ("{\\an8\\i1\\b1}a b{\\b0\\i0} c", "C {\\an8\\i1\\b1}B A{\\b0\\i0}"),
        ("a {\\i1}b {\\b1}c{\\i0} d{\\b0} e", "E D {\\i1}{\\b1}C{\\i0} {\\b0}B A"),
        ("a {\\i1}b <b>c{\\i0} d</b> e", "E <b>D C{\\i1}</b> {\\i0}B A"),
        ("a {\\c&HFF&}b{\\c} c", "C {\\c&HFF&}B{\\c} A"),
    ],
)
def test_overrides_of_subtitles_keep_their_order(cue: str, expected: str) -> None:
    """The words are reversed. Overrides that are not nested keep their order."""
    [unit] = open_document(CUE.format(cue).encode(), "a.srt").units
    words = unit.text.split()
    links = {target: len(words) - 1 - target for target in range(len(words))}
    content, warnings = project_markup(unit, make_hypothesis(unit.text, " ".join(reversed(words)).upper(), links))
    assert (render(content, str), warnings) == (expected, [])


@settings(max_examples=300)
@given(st.lists(st.sets(st.sampled_from("ib"), min_size=1) | st.none(), min_size=2, max_size=9), st.randoms())
def test_styles_of_subtitles_are_switched_on_before_off(switches: list[set[str] | None], random: Random) -> None:
    """Whatever the order of words, each style is on and off in turn, as in the source."""
    states, pieces = {"i": 0, "b": 0}, ["w"]
    for number, letters in enumerate(switches):
        for letter in letters or ():
            states[letter] = 1 - states[letter]
        override = "".join(f"\\{letter}{states[letter]}" for letter in sorted(letters or ()))
        pieces.append(f"{{{override}}}" if letters else f" w{number} ")
    [unit] = open_document(CUE.format("".join(pieces)).encode(), "a.srt").units
    count = len(unit.text.split())
    links = dict(enumerate(random.sample(range(count), count)))
    content, warnings = project_markup(unit, make_hypothesis(unit.text, " ".join("t" * count), links))
    assert not warnings
    for letter in "ib":
        values = re.findall(rf"\\{letter}([01])", render(content, str))
        assert values == ["1", "0"] * (len(values) // 2) + ["1"] * (len(values) % 2)


TAGS = st.recursive(
    st.just("w") | st.just("<img> w"),
    lambda inner: st.tuples(st.sampled_from("abiqs"), st.lists(inner, min_size=1, max_size=3)).map(
        lambda pair: f"<{pair[0]}>{' '.join(pair[1])}</{pair[0]}>"
    ),
    max_leaves=8,
)


@settings(max_examples=300)
@given(st.lists(TAGS, min_size=1, max_size=4).map(" ".join), st.integers(1, 8), st.booleans(), st.data())
def test_no_tag_is_lost_and_pairs_stay_nested(source: str, length: int, aligned: bool, data: st.DataObject) -> None:
    [unit] = open_document(source.encode(), "page.html").units
    words = len(unit.text.split())
    links = {t: data.draw(st.integers(0, words - 1)) for t in range(length)} if aligned else {}
    hypothesis = make_hypothesis(unit.text, " ".join(f"t{t}" for t in range(length)), links)
    content, _ = project_markup(unit, hypothesis)
    assert Counter(tag.id for tag in content.markup) == Counter(tag.id for tag in unit.markup)
    assert content.text.split() == hypothesis.text.split()
    positions = [tag.position for tag in content.markup]
    assert positions == sorted(positions)
    assert all(0 <= position <= len(content.text) for position in positions)
    assert find_parents(content) == find_parents(unit.content)


def find_parents(content: MarkedText) -> dict[int, int | None]:
    """Return the id of the pair around each tag, which also checks that pairs are nested."""
    assert nest_tags(content.markup) is not None
    stack: list[int] = []
    parents: dict[int, int | None] = {}
    for tag in content.markup:
        if tag.kind == "close":
            stack.pop()
        parents[tag.id] = stack[-1] if stack else None
        if tag.kind == "open":
            stack.append(tag.id)
    return parents


def test_very_deep_tags_are_placed_by_position() -> None:
    source = "<b>" * 3000 + "one two" + "</b>" * 3000
    text, warnings = place(source, "zwei eins", {0: 1, 1: 0})
    assert re.sub("<[^>]*>", "", text) == "zwei eins"
    assert (text.count("<b>"), text.count("</b>"), warnings) == (3000, 3000, [NOT_NESTED_WARNING])


@given(st.permutations(range(9)))
def test_sequences_keep_their_order(order: list[int]) -> None:
    """Sequences may overlap: 0, 4; 1, 5 and 2, 6, 8. Tags 3 and 7 are in none."""
    sequences = {0: 0, 4: 0, 1: 1, 5: 1, 2: 2, 6: 2, 8: 2}
    tags = [Markup(place, "", id=number, sequence=sequences.get(number)) for place, number in enumerate(order)]
    ordered = order_sequences(tags)
    assert [tag.position for tag in ordered] == list(range(9))
    for sequence in (None, 0, 1, 2):
        ids = [tag.id for tag in ordered if tag.sequence == sequence]
        members = [number for number in order if sequences.get(number) == sequence]
        assert ids == (members if sequence is None else sorted(members))


@pytest.mark.parametrize(
    ("source", "expected", "warnings"),
    [
        ('a <ph id="1"/>b <ph id="2"/>c', '<ph id="2"/>C <ph id="1"/>B A', []),
        ('a <ph id="1" FIRST/>b <ph id="2" NO/>c', '<ph id="1" FIRST/>C <ph id="2" NO/>B A', []),
        ('a <ph id="1" FIRST/>b <ph id="2" FIRST/>c', '<ph id="2" FIRST/>C <ph id="1" FIRST/>B A', []),
        ('<pc id="1" FIRST>a</pc> <pc NO>b</pc>', '<pc NO>B</pc> <pc id="1" FIRST>A</pc>', [ORDER_WARNING]),
        ('<pc id="1" FIRST>a <ph id="2" NO/></pc>b', 'B <pc id="1" FIRST>A<ph id="2" NO/></pc>', []),
    ],
)  # fmt: skip
def test_codes_of_xliff_keep_their_order(source: str, expected: str, warnings: list[str]) -> None:
    """The words are reversed. Pairs follow their words, with a warning."""

    def spell(text: str) -> str:
        return text.replace("FIRST", 'canReorder="firstNo"').replace("NO", 'canReorder="no"')

    file = f'<xliff version="2.0"><file><unit><segment><source>{spell(source)}</source></segment></unit></file></xliff>'
    [unit] = open_document(file.encode(), "a.xlf").units
    words = unit.text.split()
    links = {target: len(words) - 1 - target for target in range(len(words))}
    target = " ".join(reversed(words)).upper()
    translated, found = project_markup(unit, make_hypothesis(unit.text, target, links))
    assert (render(translated, str), found) == (spell(expected), warnings)


@pytest.mark.parametrize(
    ("tag", "count"),
    [
        ("<w:tab/>", 2),
        ("<w:br/>", 2),
        ('<x id="1" ctype="lb"/>', 2),
        ("<w:noBreakHyphen/>", 1),
        ("<wbr>", 1),
        ("<img>", 1),
    ],
)
def test_only_breaks_and_tabs_end_sentences(tag: str, count: int) -> None:
    assert len(split_unit(Unit("onetwo", (Markup(3, tag),)))) == count


@pytest.mark.parametrize(("text", "count"), [("one Two", 2), ("one two", 1), ("one 2 two", 2)])
def test_breaks_before_capitals_and_digits_end_sentences(text: str, count: int) -> None:
    """Lines of a verse or an address have no marks at their ends, but a break may also stand within a sentence."""
    [unit] = open_document(text.replace(" ", "<br>", 1).encode(), "a.html").units
    assert len(split_unit(unit)) == count
    assert len(split_unit(replace(unit, markup=()))) == 1


def test_warnings_of_a_unit() -> None:
    """Placeholders are checked in the whole unit; a sentence without a translation is reported."""
    unit = Unit("One %1 here. Two %2 there.")
    spans = split_unit(unit)
    moved = [make_hypothesis("a", "Eins %2.", {}), make_hypothesis("a", "Zwei %1.", {})]
    moved = [replace(each, warnings=(f"{FLAG_LOST}: %1", "cut at 9 tokens")) for each in moved]
    assert join_unit(unit, spans, moved).warnings == ("cut at 9 tokens",)
    lost = [make_hypothesis("a", "Eins %1.", {}), make_hypothesis("a", " ", {})]
    assert join_unit(unit, spans, lost).warnings == (EMPTY_WARNING, f"{FLAG_LOST}: %2")


def test_long_units_take_little_memory_and_time() -> None:
    """Their alignment would have the square of the number of words."""
    words = " ".join(map(str, range(15_000)))
    sentence = "one two three four five. "
    for page in (
        f"One two. {words}",
        f"<b>One</b> two. {words}",
        f"<b>One</b> two {words}.",
        f"<b>x</b> {sentence * 1000}",
    ):
        [unit] = open_document(page.encode(), "page.html").units
        spans = split_unit(unit)
        links = [make_hypothesis("a", unit.text[start:end].upper(), {}) for start, end in spans]
        links = [replace(each, source_tokens=each.tokens) for each in links]
        tracemalloc.start()
        translated = join_unit(unit, spans, links)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100 << 20
        assert translated.content.text == unit.text.upper()
        assert len(translated.content.markup) == len(unit.markup)
        assert translated.warnings == ((LONG_WARNING,) if unit.markup else ())


def test_tags_of_long_texts_stay_beside_words() -> None:
    page = "<b>one two</b> <i>three</i> four " * 1000
    [unit] = open_document(page.encode(), "page.html").units
    words = find_words(unit.text, set())
    content, warnings = place_markup(unit, AlignedText(unit.text.upper(), words, words, None))
    assert (
        render(content, str)
        == page.replace("one two", "ONE TWO").replace("three", "THREE").replace("four", "FOUR").strip()
    )
    assert warnings == [LONG_WARNING]


def test_warnings_of_a_file(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PO file has another number of plural forms than its header, and its encoding lacks a letter."""
    header = '"Content-Type: text/plain; charset=ASCII\\n"\n"Plural-Forms: nplurals=2; plural=n!=1;\\n"\n'
    message = 'msgid "ba!"\nmsgid_plural "del!"\nmsgstr[0] ""\n'
    data = f'msgid ""\nmsgstr ""\n{header}\n{message}'.encode()
    assert translate_document(translator, data, "a.po").warnings == [
        "unit 1: 1 plural forms, but the header of the file names 2"
    ]
    monkeypatch.setattr(
        document_translation, "translate_units", lambda *_, **__: [TranslatedUnit(MarkedText("ł"), ("odd",))]
    )
    assert translate_document(translator, data, "a.po").warnings == [
        "unit 1: odd", "unit 1: the file is written in UTF-8, since ascii lacks 'ł'"
    ]  # fmt: skip


PAGE = b'<html lang="en"><h1>ba del <b>fo</b>!</h1>\n<p>gri <a title="ba fo!">mun ne</a>. pol!</p><pre>ba</pre></html>'
PAGE_TRANSLATED = (
    b'<html lang="de"><h1><b>ol</b> ebi ak!</h1>\n<p><a title="ol ak!">wex sa</a> tun. yim!</p><pre>ba</pre></html>'
)


def test_a_page_is_translated(translator: Translator) -> None:
    seen: list[tuple[int, int]] = []
    result = translate_document(
        translator, PAGE, "page.html", target_language="de", progress=lambda *counts: seen.append(counts)
    )
    assert (result.warnings, result.units) == ([], 3)
    tag = re.compile(rb"<[^>]+>")  # where the model puts the link depends on its training
    assert tag.sub(b"", result.data) == tag.sub(b"", PAGE_TRANSLATED)
    assert sorted(tag.findall(result.data)) == sorted(tag.findall(PAGE_TRANSLATED))
    assert result.characters == len("ba del fo!" + "gri mun ne. pol!" + "ba fo!")
    assert seen[-1] == (3, 3)


def test_texts_with_tags_are_translated(translator: Translator) -> None:
    texts = ["ba <b>del</b>!", "", "no tags", "<x>mun</x> ra ne."]
    [html, empty, _, _] = translate_marked(translator, texts)
    assert (html, empty) == ("<b>ebi</b> ak!", "")
    [xml] = translate_marked(translator, ["ba <i>XY</i> <b>del</b>!"], "xml", ignore_tags=["i"])
    assert xml.count("<i>XY</i>") == 1
    assert "<b>ebi</b>" in xml
    with pytest.raises(UserError, match="XML"):
        translate_marked(translator, ["<b>"], "xml")


def test_a_command_translates_a_document(toy: Toy, tmp_path: Path, call: Call) -> None:
    source = tmp_path / "de.po"
    head = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    source.write_text(f'{head}msgid "ba del!"\nmsgstr ""\n\nmsgid "fo"\nmsgstr "done"\n')
    output = tmp_path / "out.po"
    answer = call("translate", toy.run, "--document", source, "--output", output)
    assert answer.code == 0, answer.err
    assert "1 unit (7 characters) translated" in answer.err
    assert "1 left as they were" in answer.err
    assert (
        output.read_text()
        == f'{head}msgid "ba del!"\nmsgstr "{translate_toy("ba del!")}"\n\nmsgid "fo"\nmsgstr "done"\n'
    )
    pairs = list(read_pairs(CorpusSettings(po=str(output))))
    assert pairs == [Pair("ba del!", "ebi ak!"), Pair("fo", "done")]


def test_a_command_refuses_what_a_document_does_not_allow(toy: Toy, tmp_path: Path, call: Call) -> None:
    source = tmp_path / "a.tmx"
    source.write_text("<tmx><body><tu></body></tmx>")
    common = ("translate", toy.run, "--document", source)
    assert_user_error(call(*common), "--output")
    assert_user_error(call(*common, "--output", tmp_path / "b.tmx", "--json"), "--json")
    answer = call(*common, "--output", tmp_path / "b.tmx")
    assert_user_error(answer, "a.tmx", "well-formed", working=True)
    assert not (tmp_path / "b.tmx").exists()
