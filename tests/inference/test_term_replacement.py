"""Terms of a glossary take the place of the words that stand for their source terms, and no other word changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dragoman.data.tokenizers import ByteTokenizer
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import IndexedResults, SearchJob
from dragoman.inference.constraints import Glossary, match_terms, output_contains
from dragoman.inference.engines.base import Engine
from dragoman.inference.term_replacement import replace_terms
from dragoman.inference.translator import Translator
from dragoman.types import Hypothesis, Line
from toy_run import make_sentences, translate_toy

PAIRS = (("ba", "blarg"), ("mun", "zwei wörter"))
LINES = [line for line in make_sentences(60, seed=41) if line.count("ba") == 1 and line.count("mun") <= 1]


class CountingEngine(Engine):
    """An engine that records the number of jobs of each search, and requires no terms unless `supports_terms`."""

    def __init__(self, engine: Engine, *, supports_terms: bool = True) -> None:
        self.engine, self.supports_terms = engine, supports_terms
        self.searches: list[int] = []

    def iter_results(self, jobs: Sequence[SearchJob], search: SearchSettings) -> IndexedResults:
        self.searches.append(len(jobs))
        return self.engine.iter_results(jobs, search)


def align(source: str, target: str, links: dict[int, int]) -> Hypothesis:
    """Return a hypothesis in which word t of the target is aligned to word links[t] of the source."""
    words = source.split(), target.split()
    alignment = [[float(links.get(t, t) == s) for s in range(len(words[0]))] for t in range(len(words[1]))]
    tokens, source_tokens = ([f"▁{word}" for word in side] for side in (words[1], words[0]))
    return Hypothesis(target, 0.0, tokens, alignment, source_tokens, 0.0)


@pytest.mark.parametrize(
    ("source", "target", "links", "pairs", "expected"),
    [
        ("the dog runs .", "der Hund läuft .", {}, [("dog", "Kerl")], "der Kerl läuft ."),
        ("The DOG runs .", "Der Hund läuft .", {}, [("dog", "Kerl")], "Der Kerl läuft ."),
        ("dogs run .", "Hunde laufen .", {}, [("dogs", "alle"), ("run", "gehen")], "Alle gehen ."),
        ("a cat and a dog", "ein Hund und eine Katze", {1: 4, 4: 1}, [("dog", "X"), ("cat", "Y")], "ein X und eine Y"),
        ("a hot dog", "eine heiße Wurst", {}, [("hot dog", "Hotdog")], "eine Hotdog"),
        ("a dog", "ein Hund", {}, [("dog", "Freund des Hauses")], "ein Freund des Hauses"),
        ("a hot dog", "eine heiße Wurst", {}, [("dog", "Hund"), ("hot dog", "Hotdog")], "eine Hotdog"),
        ("dog sees dog", "Hund sieht Hund", {}, [("dog", "Kerl")], "Kerl sieht Kerl"),
        ("the dog runs", "der Hund läuft", {}, [("dog", "Hund")], "der Hund läuft"),
        ("fire engine", "rotes Feuerwehrauto", {0: 1, 1: 1}, [("engine", "Feuerwehrauto")], "rotes Feuerwehrauto"),
        ("dog sees cat", "Hund sieht Katze", {}, [("dog", "Katze")], "Katze sieht Katze"),
        ("the straße", "der Weg", {}, [("STRASSE", "Pfad")], "der Pfad"),
        ("a dog-house", "ein Zwinger", {}, [("dog", "Hund")], "ein Zwinger"),
        ("a dog", "ein ein", {1: 0}, [("dog", "Hund")], "ein ein"),
        ("go !", "geh !", {}, [("!", "los")], "geh !"),
        ("calls him", "ruft ihn gern an", {1: 1, 2: 1, 3: 0}, [("calls", "grüßt")], "grüßt ihn gern an"),
        ("私 犬", "僕 犬", {}, [("犬", "猫")], "僕 猫"),
    ],
)
def test_where_a_term_goes(
    source: str, target: str, links: dict[int, int], pairs: list[tuple[str, str]], expected: str
) -> None:
    hypothesis = align(source, target, links)
    found = replace_terms(hypothesis, source, match_terms(pairs, source), ByteTokenizer())
    assert found.text == expected
    assert len(found.tokens) == len(found.alignment)
    assert (found == hypothesis) == (expected == target)


def test_only_the_first_pair_of_a_source_term_counts() -> None:
    line = Glossary([("dog", "Hund"), ("dog", "Kerl"), ("a", "ein")], [], []).add_terms(Line("A dog."))
    assert [match.target for match in match_terms(line.terms, line.text)] == ["Hund", "ein"]


def test_other_words_do_not_change(translator: Translator) -> None:
    """A term that the model would never write, one of two words, and both in one line."""
    assert len(LINES) > 10
    lines = [Line(line, terms=PAIRS) for line in LINES]
    plain, found = translator.translate(LINES), translator.translate(lines)
    assert sum(hypothesis.text == translate_toy(line) for line, hypothesis in zip(LINES, plain, strict=True)) > 10
    for line, before, after in zip(LINES, plain, found, strict=True):
        words = before.text.replace("ak", "blarg").replace("sa", "zwei wörter")
        if before.text == translate_toy(line):
            assert (after.text, after.score, after.warnings) == (words, before.score, ())
            assert len(after.tokens) == len(after.alignment)
            assert all(sum(row) == pytest.approx(1) for row in after.alignment)
    unaligned = translator.translate(lines, align=False)
    assert [one.text for one in unaligned] == [one.text for one in found]
    assert not any(one.alignment for one in unaligned)
    nbest = translator.nbest(lines, count=3)
    assert [hypotheses[0].text for hypotheses in nbest] == [one.text for one in found]


def test_other_lines_are_translated_as_before(translator: Translator) -> None:
    lines = [Line("gri ne?", terms=PAIRS), Line("ba del.", terms=PAIRS), Line("fo!")]
    for align in (True, False):
        plain = translator.translate(["gri ne?", "fo!"], align=align)
        assert translator.translate(lines, align=align)[::2] == plain


def test_a_second_search_is_only_for_terms_without_words(translator: Translator) -> None:
    lines = [Line("ba del.", terms=PAIRS), Line("ba del!", terms=(*PAIRS, ("!", "wex"))), Line("gri ne?")]
    counting = CountingEngine(translator.engine)
    found = replace(translator, engine=counting).translate(lines)
    assert counting.searches == [3, 1]
    assert output_contains("wex", found[1].text)
    assert not found[1].warnings
    weaker = CountingEngine(translator.engine, supports_terms=False)
    found = replace(translator, engine=weaker).translate(lines)
    assert weaker.searches == [3]
    assert found[1].text == "ebi blarg!"
    assert found[1].warnings == ("without a term that was asked for: 'wex'",)


def test_a_stream_has_the_same_text(translator: Translator) -> None:
    line = Line("ba del mun.", terms=PAIRS)
    [hypothesis] = translator.translate([line])
    assert "".join(translator.stream(line)) == hypothesis.text


def test_a_required_term_without_a_source_term_replaces_nothing(translator: Translator) -> None:
    """It is a constraint of the search, also beside pairs."""
    [hypothesis] = translator.translate([Line("ba del.", terms=("wex", ("ba", "blarg")))])
    assert output_contains("wex", hypothesis.text)
    assert output_contains("blarg", hypothesis.text)
