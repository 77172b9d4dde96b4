"""What becomes of answers: ranked by what they looked at, unknown words filled in."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.data.tokenizers import TOKENIZERS, Tokenizers, TokenizerSettings, train_tokenizer
from dragoman.decoding.protocol import SearchResult
from dragoman.errors import UserError
from dragoman.inference.loading import EnsembleModel
from dragoman.inference.postprocess import (
    FLAG_UNKNOWN,
    UNKNOWN_WORD_METHODS,
    count_placeholders,
    coverage_penalty,
    fill_unknowns,
    list_source_words,
    rerank_by_coverage,
    split_sentences,
)
from dragoman.inference.translator import Translator
from dragoman.models.registry import build_model
from dragoman.modules.attention_scores import SCORES
from dragoman.recipe import Recipe, check_model
from dragoman.types import UNK, Example, Pair
from toy_run import train_quietly

LINES = ["the old man walks.", "ba del, (fo) gri!", "the dog's ball"]
WORDS = [["the", "old", "man", "walks", "."], ["ba", "del", ",", "(", "fo", ")", "gri", "!"], ["the", "dog's", "ball"]]
GOING_BY_ALIGNMENT: list[tuple[dict[str, object], dict[str, str] | None]] = [
    ({"unknown": "copy"}, None),
    ({"unknown": "dictionary"}, {"a": "b"}),
    ({"coverage": 0.2}, None),
]
ASKED = ["the man walks a dog", "Ada met Bob", "a b c d e f g h"]


def answer(score: float, *, finished: bool = True) -> SearchResult:
    return SearchResult([4], score, score, finished)


def test_coverage_ranks_by_what_was_looked_at() -> None:
    """Two answers to a source of two tokens; the likelier one never looked at the second."""
    half, whole = [[1.0, 0.0], [0.9, 0.1]], [[0.9, 0.1], [0.1, 0.9]]
    pairs = [(answer(-1.0), half), (answer(-1.2), whole)]
    assert coverage_penalty(whole) == 0
    assert coverage_penalty(half) == pytest.approx(math.log(0.1))
    assert [one.score for one, _ in rerank_by_coverage(pairs, 0.01)] == pytest.approx(
        [-1.0 + 0.01 * math.log(0.1), -1.2]
    )
    assert [one.score for one, _ in rerank_by_coverage(pairs, 1.0)] == pytest.approx([-1.2, -1.0 + math.log(0.1)])
    assert rerank_by_coverage([(answer(-9.0), half), (answer(-0.1, finished=False), whole)], 1.0)[0][0].finished


def test_nothing_looked_at_is_bad_but_not_the_end() -> None:
    assert coverage_penalty([[1.0, 0.0]]) == pytest.approx(math.log(1e-4))
    assert coverage_penalty([]) == 0


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_word_behind_every_token(kind: str) -> None:
    """Read off the text; a token of several letters belongs to the word that it begins in."""
    tokenizer = train_tokenizer(LINES * 20, TokenizerSettings(kind=kind, size=286))
    for line, words in zip(LINES, WORDS, strict=True):
        ids = tokenizer.encode(line)
        found = list_source_words(tokenizer, line, ids)
        assert len(found) == len(ids)
        assert list(dict.fromkeys(found)) == (words if kind != "space" else line.split())


def test_unknown_words_are_filled_in_where_they_stand() -> None:
    tokenizer = train_tokenizer(["der Mann (geht) geht."], TokenizerSettings(kind="word", size=20))
    ids = tokenizer.encode("der Zwerg (Gimli) geht.")
    assert ids.count(UNK) == 2
    alignment = [[float(i == j) for j in range(len(ids))] for i in range(len(ids))]
    words = ["the", "dwarf", "(", "Gimli", ")", "walks", "."]

    def text(name: str, **dictionary: str) -> str:
        replacements = [UNKNOWN_WORD_METHODS[name](word, dictionary) for word in words]
        return fill_unknowns(ids, alignment, tokenizer, replacements)

    assert text("keep") == "der <unk> (<unk>) geht."
    assert text("copy") == "der dwarf (Gimli) geht."
    assert text("dictionary", dwarf="Zwerg") == "der Zwerg (Gimli) geht."
    assert text("dictionary", gimli="Sohn Glóins") == "der dwarf (Sohn Glóins) geht."
    assert text("drop") == "der  () geht."
    assert set(UNKNOWN_WORD_METHODS) == {"drop", "keep", "copy", "dictionary"}


def test_a_copying_model_copies_the_unknown_word_with_most_attention() -> None:
    """An <unk> that was copied from the source is never a word that the model knows."""
    tokenizer = train_tokenizer(["wo liegt"], TokenizerSettings(kind="word", size=20))
    words, source_ids = ["wo", "Ulm", "liegt", "Köln"], [4, UNK, 5, UNK]
    alignment = [[0.1, 0.2, 0.6, 0.1], [0.1, 0.1, 0.5, 0.3]]
    assert fill_unknowns([UNK, UNK], alignment, tokenizer, words) == "liegt liegt"
    assert fill_unknowns([UNK, UNK], alignment, tokenizer, words, source_ids) == "Ulm Köln"


@given(ids=st.lists(st.integers(4, 11), max_size=9))
def test_where_nothing_is_unknown_the_text_is_the_text(ids: list[int]) -> None:
    for kind in ("word", "space", "code"):
        tokenizer = train_tokenizer(["der Mann , ( geht ) . !"], TokenizerSettings(kind=kind, size=8))
        assert fill_unknowns(ids, [[1.0]] * len(ids), tokenizer, ["x"]) == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def forgetful() -> Translator:
    """A model that was never taught, with so few words that it says <unk> at every turn."""
    pairs = [Pair("the man walks", "der Mann geht"), Pair("a dog", "ein Hund")]
    tokenizers = Tokenizers.train(lambda: pairs, TokenizerSettings(kind="word", size=8, joint=False))
    recipe = check_model(Recipe.model_validate({"model": {"layers": 1, "width": 16, "heads": 2}}))
    for seed in range(100):
        torch.manual_seed(seed)
        model = build_model(
            recipe.neural_model,
            source_size=tokenizers.source.size,
            target_size=tokenizers.target.size,
            joint=recipe.tokenizer.joint,
        )
        found = Translator(model.eval(), tokenizers, recipe, 20, torch.device("cpu"))  # type: ignore[arg-type]
        if all(FLAG_UNKNOWN in one.flags for one in found.translate(ASKED)):
            return found
    raise AssertionError


def test_unknown_words_through_the_door(forgetful: Translator) -> None:
    dropped = forgetful.translate(ASKED)
    kept = forgetful.translate(ASKED, search={"unknown": "keep"})
    copied = forgetful.translate(ASKED, search={"unknown": "copy"})
    looked = forgetful.translate(ASKED, search={"unknown": "dictionary"}, dictionary={"Ada": "Eva", "b": "B"})
    assert any("<unk>" in one.text for one in kept)
    for line, one, two, three, four in zip(ASKED, dropped, kept, copied, looked, strict=True):
        assert two.text.replace("<unk>", "").split() == one.text.split()
        assert (FLAG_UNKNOWN in one.flags) == ("<unk>" in two.text)
        assert FLAG_UNKNOWN not in three.flags
        assert set(three.text.split()) <= {*line.split(), *one.text.split()}
        assert len(three.text.split()) == len(two.text.split())
        assert four.text == " ".join({"Ada": "Eva", "b": "B"}.get(word, word) for word in three.text.split())


def test_what_does_not_fit_is_refused(forgetful: Translator) -> None:
    for search, dictionary in (({"unknown": "dictionary"}, None), ({"unknown": "copy"}, {"a": "b"})):
        with pytest.raises(UserError, match="require each other"):
            forgetful.translate(["a"], search=search, dictionary=dictionary)
    with pytest.raises(UserError, match="did you mean 'copy'"):
        forgetful.translate(["a"], search={"unknown": "copi"})


def translator_of(pairs: list[Pair], **model: object) -> Translator:
    """A recurrent model with a small word vocabulary that was never taught."""
    tokenizers = Tokenizers.train(lambda: pairs, TokenizerSettings(kind="word", size=8, joint=False))
    recipe = check_model(Recipe.model_validate({"model": {"layers": 1, "width": 16, **model}}))
    torch.manual_seed(1)
    model_ = build_model(recipe.neural_model, **tokenizers.sizes, joint=recipe.tokenizer.joint)
    return Translator(model_.eval(), tokenizers, recipe, 20, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [("rnn", "attention"), ("hybrid", "score")])
@pytest.mark.parametrize("attention", SCORES)
def test_attention_that_cannot_tell_words_apart_gives_no_alignment(kind: tuple[str, str], attention: str) -> None:
    """An even spread over the source is no alignment: nothing is copied by it, and nothing ranked by it."""
    more = {"heads": 2} if kind[0] == "hybrid" else {}
    pairs = [Pair("the man walks", "der Mann geht"), Pair("a dog", "ein Hund")]
    translator = translator_of(pairs, kind=kind[0], **{kind[1]: attention}, **more)
    tells = SCORES[attention].aligns
    assert translator.model.aligns == tells
    assert all(bool(one.alignment) == bool(tells and one.tokens) for one in translator.translate(ASKED))
    translator.translate(ASKED, search={"unknown": "keep"})  # needs no alignment
    for search, dictionary in GOING_BY_ALIGNMENT:
        if tells:
            translator.translate(ASKED, search=search, dictionary=dictionary)
            continue
        with pytest.raises(UserError, match="does not give; leave it out"):
            translator.translate(ASKED, search=search, dictionary=dictionary)
        with pytest.raises(UserError, match="does not give; leave it out"):
            list(translator.stream(ASKED[0], search=search, dictionary=dictionary))


def test_an_ensemble_aligns_by_those_who_can() -> None:
    able, unable = (translator_of([Pair("a b", "c d")], kind="rnn", attention=name).model for name in ("dot", "none"))
    batch = collate_pairs(BatchPlan([[0]], Widths(4, 4)), [Example(np.array([4, 5]), np.array([4, 5]), 0)])
    assert torch.equal(EnsembleModel([able, unable]).compute_alignment(batch), able.compute_alignment(batch))
    assert not EnsembleModel([unable, unable]).aligns


def test_a_recipe_whose_search_needs_an_alignment_is_refused(small: Path, tmp_path: Path) -> None:
    model = ["model={kind: rnn, width: 16, attention: none}", "search.coverage=0.2"]
    with pytest.raises(UserError, match=r"search\.coverage=0\.2 needs the source word"):
        train_quietly(small, tmp_path / "run", *model)


@pytest.mark.parametrize(
    "span",
    ["%1", "%L2", "%r", "%(a)r", "%<name>s", "%<cost>.2f", "{% raw %}", "{%- if x -%}", "{0, number}", "{x!r:>10}",
     "{:^+8.2f}", "{a[0].b}", "{ name }"],
)  # fmt: skip
def test_placeholders_of_more_formats(span: str) -> None:
    assert count_placeholders(f"a {span}, b") == {span: 1}


@pytest.mark.parametrize("text", ["5 %", "100%1", "%%1", "%123", "{two words}", "{a, {b", "{% x", "a%b"])
def test_text_that_only_looks_like_a_placeholder(text: str) -> None:
    assert not count_placeholders(text)


@pytest.mark.parametrize("line", ["A" + "." * 100_000 + "x", "A" + ".'" * 50_000 + "x", "Ab" + "。a" * 50_000])
def test_splitting_sentences_takes_linear_time(line: str) -> None:
    start = time.process_time()
    assert "".join(split_sentences(line)) == line
    assert time.process_time() - start < 5  # a quadratic search takes minutes


@pytest.mark.parametrize(
    ("line", "sentences"),
    [
        ("One... Two?! Three.” Four. five.", ["One...", "Two?!", "Three.”", "Four. five."]),
        ("One.) (Two.) 3. Three 。四", ["One.)", "(Two.)", "3. Three 。", "四"]),
        ("a.b. C", ["a.b. C"]),
        ("He asked\nDr. Brown. Three\n4. Five", ["He asked\nDr. Brown.", "Three\n4. Five"]),
    ],
)
def test_sentences_end_with_punctuation(line: str, sentences: list[str]) -> None:
    assert split_sentences(line) == sentences
