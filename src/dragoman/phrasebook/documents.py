"""Documents of the phrasebook: two sentences, of which the second refers to a noun of the first by "it".

    The lamp is old. It is in the kitchen.  |  Die Lampe ist alt. Sie ist in der Küche.

German "it" has the gender of the noun: er, sie or es, as an object ihn, sie or es. The noun is only in the first
sentence, so a translator that reads the second sentence alone has to guess. The first sentence has no other noun to
which the pronoun could refer in either language.

Sentences belong to train, dev or test by the hash of their own content words, as in `generate.py`. So no sentence of
a document is in two of these splits, whatever the seeds and counts. In the split `unseen`, a word of each sentence
appears in a construction from which it is held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import islice
from random import Random

from dragoman.errors import UserError
from dragoman.io import hash_stably
from dragoman.phrasebook.english import English
from dragoman.phrasebook.generate import (
    MAX_REPEATS,
    Phenomenon,
    Phrase,
    SentenceSet,
    analyse,
    check_request,
    is_in_split,
)
from dragoman.phrasebook.german import German
from dragoman.phrasebook.grammar import COORDINATED_TENSES, Grammar, NoFittingWord
from dragoman.phrasebook.realization import BLOCK_SIZE, Clause, NounPhrase, Realizer, SentencePlan
from dragoman.types import Pair

SENTENCES_PER_DOCUMENT = 2
SECOND_ATTEMPTS = 40  # samples of the second sentence; if none of them is of the split, another first one is sampled
CONTEXT_PRONOUN = "context-pronoun"  # name of the phenomenon: a pronoun whose antecedent is in the previous sentence


@dataclass(frozen=True, slots=True)
class DocumentSentence:
    """A sentence pair of a document. Only the second sentence of a document has references to the previous one."""

    phrase: Phrase
    document: int  # number of the document, from 0
    # Position of the pronoun in this sentence, and of its antecedent in the previous sentence, counted from 0.
    source_reference: tuple[int, int] | None = None
    target_reference: tuple[int, int] | None = None


class DocumentGrammar(Grammar):
    """Samples documents. A sentence that is not of the split is rejected at once, before the next one is sampled."""

    def __init__(self, split: str, seed: int) -> None:
        random = Random(hash_stably(f"phrasebook documents {seed} {split}".encode())).random
        super().__init__(random, allow_held_out=split == "unseen")
        self.split = split

    def sample_document(self) -> tuple[SentencePlan, SentencePlan]:
        """Sample two sentences of the split; raise NoFittingWord if none were found."""
        self.new_block = count_from(0, BLOCK_SIZE).__next__
        self.noun_phrases = []
        self.used = set()
        self.content_hash, self.found_held_out = 0, False
        tense = self.pick(COORDINATED_TENSES)
        first = self.sample_clause("main", tense, position="first", front=self.random() < 0.2)
        antecedent = self.sample_antecedent() if self.is_in_split() else None
        if antecedent is None or antecedent.plural or antecedent.noun is None or antecedent.noun.pronoun != "it":
            raise NoFittingWord
        noun_phrases, used = list(self.noun_phrases), set(self.used)
        for _ in range(SECOND_ATTEMPTS):
            self.noun_phrases, self.used = list(noun_phrases), set(used)
            self.content_hash, self.found_held_out = 0, False  # the antecedent is no word of the second sentence
            try:
                second = self.sample_reference(antecedent, tense)
            except NoFittingWord:
                continue
            if self.is_in_split():
                return SentencePlan((first,), first), SentencePlan((second,), second)
        raise NoFittingWord

    def sample_reference(self, antecedent: NounPhrase, tense: str) -> Clause:
        """Sample a clause whose subject or direct object is a pronoun for the antecedent."""
        noun = antecedent.noun
        assert noun is not None
        pronoun = NounPhrase(self.new_block(), noun, pronoun=noun.pronoun, antecedent=antecedent)
        as_object = self.random() < 0.4 and noun in self.lexicon.frames_by_role["accusative"]
        role = "accusative" if as_object else "subject"
        return self.sample_clause("main", tense, "second", front=self.random() < 0.2, role=role, filler=pronoun)

    def is_in_split(self) -> bool:
        """Return whether the words sampled for the current sentence belong to the split (see `convert_plans`)."""
        return self.found_held_out if self.split == "unseen" else is_in_split(self.content_hash, self.split)


def generate_sentences(
    split: str, count: int, *, seed: int = 1, direction: str = "en-de"
) -> Iterator[DocumentSentence]:
    """Yield `count` sentences of documents, in order. No two documents are the same on either side."""
    check_request(split, count, direction)
    return islice(analyse_documents(split, count, seed, direction), count)


def generate_document_phrases(split: str, count: int, *, seed: int = 1, direction: str = "en-de") -> Iterator[Phrase]:
    """Yield the phrases of `generate_sentences`."""
    return (sentence.phrase for sentence in generate_sentences(split, count, seed=seed, direction=direction))


def generate_document_pairs(
    split: str, count: int, *, seed: int = 1, direction: str = "en-de", trees: bool = False
) -> Iterator[Pair]:
    """Yield the pairs of `generate_sentences`, with source trees if `trees` is set. `Pair.document` is the number."""
    for sentence in generate_sentences(split, count, seed=seed, direction=direction):
        phrase = sentence.phrase
        yield Pair(phrase.source, phrase.target, phrase.tree if trees else None, document=str(sentence.document))


def analyse_documents(split: str, count: int, seed: int, direction: str) -> Iterator[DocumentSentence]:
    """Yield the sentences of documents, at least `count`; raise a UserError if the split has not so many."""
    grammar = DocumentGrammar(split, seed)
    seen = [SentenceSet(count), SentenceSet(count)]  # the English and the German documents
    number = repeats = 0
    while number * SENTENCES_PER_DOCUMENT < count:
        repeats += 1
        if repeats > MAX_REPEATS:
            found = number * SENTENCES_PER_DOCUMENT
            raise UserError(f"the split {split!r} of the phrasebook has about {found:,} sentences, not {count:,}")
        try:
            plans = grammar.sample_document()
        except NoFittingWord:
            continue
        realized: list[list[Realizer]] = [[English(), English()], [German(), German()]]
        for side in realized:
            for writer, plan in zip(side, plans, strict=True):
                writer.write(plan)
        slots = [known.find_slot("\n".join(writer.text for writer in side)) for known, side in zip(seen, realized)]
        if any(known.slots[slot] for known, (slot, _) in zip(seen, slots)):
            continue
        for known, (slot, fingerprint) in zip(seen, slots):
            known.slots[slot] = fingerprint
        source, target = realized if direction == "en-de" else realized[::-1]
        source_reference, target_reference = locate_reference(*source), locate_reference(*target)
        yield DocumentSentence(analyse(plans[0], source[0], target[0]), number)
        phrase = analyse(plans[1], source[1], target[1])
        # In place of "pronoun", whose neighbour has to be right too: here only the gender is in question.
        kept = [phenomenon for phenomenon in phrase.phenomena if phenomenon.name != "pronoun"]
        phrase = replace(phrase, phenomena=(*kept, Phenomenon(CONTEXT_PRONOUN, target_reference[:1])))
        yield DocumentSentence(phrase, number, source_reference, target_reference)
        number, repeats = number + 1, 0


def locate_reference(first: Realizer, second: Realizer) -> tuple[int, int]:
    """Return the position of the pronoun in the second sentence, and of its antecedent in the first.

    The reference is removed from the second sentence, whose analysis has positions of that sentence only.
    """
    [(pronoun, antecedent)] = second.references
    second.references = []
    return second.locate_nodes()[pronoun], first.locate_nodes()[antecedent]
