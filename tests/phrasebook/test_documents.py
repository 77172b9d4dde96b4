"""Documents of the phrasebook: the pronoun of a second sentence has the gender of a noun of the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.data.preparation import write_phrasebook
from dragoman.phrasebook.documents import (
    CONTEXT_PRONOUN,
    DocumentSentence,
    generate_document_pairs,
    generate_document_phrases,
    generate_sentences,
)
from dragoman.phrasebook.generate import PHRASEBOOK_SPLITS, count_correct_phenomena, generate_pairs
from dragoman.phrasebook.lexicon import load_lexicon

GENDERS = {noun.forms[1][0][0]: noun.gender for noun in load_lexicon().nouns}  # German nominative singular
FORMS = {"er": 0, "ihn": 0, "sie": 1, "es": 2}


@pytest.fixture(scope="module")
def sentences() -> dict[str, list[DocumentSentence]]:
    return {split: list(generate_sentences(split, 800)) for split in PHRASEBOOK_SPLITS}


def test_the_pronoun_has_the_gender_of_its_antecedent(sentences: dict[str, list[DocumentSentence]]) -> None:
    found = set()
    for some in sentences.values():
        for first, second in zip(some[::2], some[1::2], strict=True):
            assert first.document == second.document
            assert first.source_reference is None
            assert second.source_reference is not None
            assert second.target_reference is not None
            (english, _), (german, antecedent) = second.source_reference, second.target_reference
            assert second.phrase.source_words[english].lower() == "it"
            form = second.phrase.target_words[german].lower()
            noun = first.phrase.target_words[antecedent]
            assert GENDERS.get(noun, FORMS[form]) == FORMS[form]  # other cases may have other forms
            assert not set(FORMS) & {word.lower() for i, word in enumerate(second.phrase.target_words) if i != german}
            found.add(form)
    assert found == set(FORMS)


def test_the_measure_tells_right_pronouns_from_wrong_ones(sentences: dict[str, list[DocumentSentence]]) -> None:
    for sentence in sentences["test"]:
        if sentence.target_reference:
            words = list(sentence.phrase.target_words)
            assert count_correct_phenomena(sentence.phrase, " ".join(words))[CONTEXT_PRONOUN] == (1, 1)
            words[sentence.target_reference[0]] = "ihm"
            assert count_correct_phenomena(sentence.phrase, " ".join(words))[CONTEXT_PRONOUN] == (0, 1)


def test_no_sentence_is_in_two_splits(sentences: dict[str, list[DocumentSentence]]) -> None:
    """Neither of two splits of documents, nor of documents and other sentences of the phrasebook."""
    books = {split: {pair.source for pair in generate_pairs(split, 2000)} for split in PHRASEBOOK_SPLITS}
    texts = {split: {sentence.phrase.source for sentence in some} for split, some in sentences.items()}
    for a in PHRASEBOOK_SPLITS:
        for b in PHRASEBOOK_SPLITS:
            assert a == b or not texts[a] & (texts[b] | books[b])


def test_a_corpus_does_not_depend_on_its_size() -> None:
    whole = list(generate_document_pairs("train", 60))
    assert list(generate_document_pairs("train", 31)) == whole[:31]
    assert [pair.source for pair in whole] == [phrase.source for phrase in generate_document_phrases("train", 60)]
    swapped = [(pair.target, pair.source) for pair in generate_document_pairs("train", 60, direction="de-en")]
    assert swapped == [(pair.source, pair.target) for pair in whole]
    documents = [
        (pair.source, pair.context) for pair in read_pairs(CorpusSettings(phrasebook=60, documents=True), context=2)
    ]
    assert documents[::2] == [(pair.source, ()) for pair in whole[::2]]
    assert documents[1::2] == [(b.source, (a.source,)) for a, b in zip(whole[::2], whole[1::2], strict=True)]


def test_files_of_documents_are_read_as_the_same_documents(tmp_path: Path) -> None:
    out = tmp_path / "book"
    write_phrasebook(out, count=20, split="train", seed=1, gold=True, conllu=True, links=True, documents=True)
    corpus = CorpusSettings(source=f"{out}.en", target=f"{out}.de", conllu=f"{out}.en.conllu")
    read = [pair for pair in read_pairs(corpus, context=1, trees=True) if pair.source]
    generated = read_pairs(CorpusSettings(phrasebook=20, documents=True), context=1, trees=True)
    assert [(p.source, p.target, p.context, p.tree) for p in read] == [
        (p.source, p.target, p.context, p.tree) for p in generated
    ]
    gold = [json.loads(line) for line in (tmp_path / "book.jsonl").read_text().splitlines()]
    assert [row["document"] for row in gold] == [number // 2 for number in range(20)]
    for first, second in zip(gold[::2], gold[1::2], strict=True):
        assert first["source_reference"] is None
        assert second["source_words"][second["source_reference"][0]].lower() == "it"
    lengths = {len((tmp_path / f"book.{name}").read_text().split("\n")) for name in ("en", "de", "words.en", "align")}
    assert lengths == {20 + 9 + 1}
