"""The plan of a sentence: clauses and noun phrases, without word order and without inflection.

Both languages realize the same plan. Each noun phrase and each clause owns a block of 64 node numbers, and each of its
words has a node from this block. Words whose nodes agree up to the last two bits translate each other, and the head of
a word is given as the node of another word. This is how alignments and dependency trees follow from the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dragoman.phrasebook.lexicon import Adjective, Adverbial, Noun, Preposition, Verb

BLOCK_SIZE = 64


class Offset:
    """The nodes of a block, as offsets into it."""

    # of a noun phrase
    NOUN, DETERMINER, ADJECTIVE, COLOUR, PREPOSITION, DEGREE, OF = range(0, 28, 4)
    # of a clause; TIME has two nodes, 52 and 56
    VERB, NOT, AUXILIARY, CONJUNCTION, FREQUENCY, MANNER, COMMA, CLOSING_COMMA = range(0, 32, 4)
    PREDICATE, MORE, THAN, QUESTION_WORD, SENTENCE_ADVERB, TIME, _, STOP = range(32, 64, 4)
    # of a verb, the English particle or the German separable prefix: a translation of the verb as well
    PARTICLE = 2


# Kinds of clauses. In a final clause, such as one with "because", the German verb comes last.
MAIN, FINAL, RELATIVE, QUESTION, INFINITIVE = "main", "final", "relative", "question", "infinitive"


@dataclass(slots=True, eq=False)
class NounPhrase:
    """A noun phrase or a pronoun."""

    node: int
    noun: Noun | None  # of a pronoun, the noun it refers to
    plural: bool = False
    pronoun: str = ""  # I, we, he, she, it, they, who, what, relative; empty for a noun
    antecedent: NounPhrase | None = None
    preposition: Preposition | None = None
    determiner: str = ""
    negation: int = -1  # node of the "not" that German expresses as "kein"
    degree: Adverbial | None = None
    adjective: Adjective | None = None
    colour: Adjective | None = None
    possessor: NounPhrase | None = None  # the writer *of the books*
    postmodifier: NounPhrase | None = None  # the man *with the dogs*
    relative: Clause | None = None

    @property
    def person(self) -> int:
        """Return the index of the verb form that agrees with it: 0 for I, 1 for he, 2 for we."""
        return 2 if self.plural else 0 if self.pronoun == "I" else 1


@dataclass(slots=True, eq=False)
class Clause:
    """A verb with its arguments and adjuncts."""

    node: int
    kind: str
    tense: str
    follows_clause: bool = False  # another clause opens the sentence, which inverts the German word order
    negated: bool = False
    moved: str = ""  # the argument that opens the clause: a relative pronoun, who, what, which book
    question_adverb: str = ""  # where, when, why
    fronted: str = ""  # the adjunct that opens a main clause: time, circumstance or sentence_adverb
    verb: Verb | None = None  # None is "to be"
    modal: str = ""
    subject: NounPhrase | None = None
    accusative: NounPhrase | None = None
    dative: NounPhrase | None = None
    prepositional: NounPhrase | None = None
    predicate: Adjective | None = None
    degree: Adverbial | None = None
    comparison: NounPhrase | None = None
    place: NounPhrase | None = None
    circumstance: NounPhrase | None = None  # despite the rain
    manner: Adjective | None = None
    frequency: Adverbial | None = None
    time: Adverbial | None = None
    sentence_adverb: Adverbial | None = None
    has_kein: bool = False  # the German object expresses the negation
    conjunction: tuple[str, str] = ("", "")
    complement: Clause | None = None  # that ..., whether ..., to ...

    @property
    def head(self) -> int:
        """Return the node of the head: the verb, or with "to be" the predicate."""
        return self.node if self.verb else self.node + Offset.PREDICATE


class SentencePlan(NamedTuple):
    """One or two clauses in the order of the sentence; the root is the main clause, or the first of two."""

    clauses: tuple[Clause, ...]
    root: Clause
