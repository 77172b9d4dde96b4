"""Plans of sentences, and the part of their realization that English and German share.

A realizer writes tokens in the word order of its language. Each token has a node and the node of its head. From these
follow the word alignment, the dependency tree and the words that show each grammatical phenomenon.

A node is an integer id. Each noun phrase or clause owns a block of 64 ids, and its own `node` is the first of them; an
`Offset` names a meaning in the block. Meanings are 4 apart, so `node >> 2` is the meaning and the low two bits tell
apart words that share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from dragoman.phrasebook.lexicon import (
    ACCUSATIVE,
    DATIVE,
    GENITIVE,
    NOMINATIVE,
    Adjective,
    Adverbial,
    Noun,
    Preposition,
    Verb,
)

BLOCK_SIZE = 64  # node ids of a noun phrase or clause


class Offset:
    """Offsets of the meanings in a block of node ids."""

    # In the block of a noun phrase:
    NOUN, DETERMINER, ADJECTIVE, COLOUR, PREPOSITION, DEGREE, OF = range(0, 28, 4)
    # In the block of a clause. Times of two words, such as "last week", use the meanings at TIME and TIME + 4:
    VERB, NOT, AUXILIARY, CONJUNCTION, FREQUENCY, MANNER, COMMA, CLOSING_COMMA = range(0, 32, 4)
    PREDICATE, PREDICATE_DEGREE, THAN, QUESTION_WORD, SENTENCE_ADVERB, TIME, _, STOP = range(32, 64, 4)
    # The English particle or the German separable prefix shares the meaning of its verb, but has its own node:
    PARTICLE = 2


# Kinds of clauses. In a verb-final clause, such as one with "because", the German verb comes last.
MAIN, VERB_FINAL, RELATIVE, QUESTION, INFINITIVE = "main", "final", "relative", "question", "infinitive"


@dataclass(slots=True, eq=False)
class NounPhrase:
    """A noun phrase or a pronoun."""

    node: int
    noun: Noun | None  # if this is a pronoun, the noun that it refers to
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
        """Return the index of the verb form that agrees with this subject: 0 for I, 1 for he, 2 for we."""
        return 2 if self.plural else 0 if self.pronoun == "I" else 1


@dataclass(slots=True, eq=False)
class Clause:
    """A verb with its arguments and adjuncts."""

    node: int
    kind: str
    tense: str
    follows_clause: bool = False  # another clause comes first in the sentence, which inverts the German word order
    negated: bool = False
    moved: str = ""  # the argument that comes first in the clause: a relative pronoun, who, what, which book
    question_adverb: str = ""  # where, when, why
    fronted: str = ""  # the adjunct that comes first in a main clause: time, circumstance or sentence_adverb
    verb: Verb | None = None  # None means "to be"
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
    has_kein: bool = False  # German negates the object with "kein" instead of the verb with "nicht"
    conjunction: tuple[str, str] = ("", "")
    complement: Clause | None = None  # that ..., whether ..., to ...

    @property
    def head(self) -> int:
        """Return the node of the head: the verb, or with "to be" the predicate."""
        return self.node if self.verb else self.node + Offset.PREDICATE


class SentencePlan(NamedTuple):
    """One or two clauses in the order of the sentence; `root` is the main clause, or the first of two main clauses."""

    clauses: tuple[Clause, ...]
    root: Clause


# Placeholders in the list of nodes of a phenomenon: the word before the first node, the word after the last node.
PREVIOUS_WORD, NEXT_WORD = -1, -2
CASES = {"subject": NOMINATIVE, "accusative": ACCUSATIVE}  # other arguments are dative or have a preposition
MARKS = (",", ".", "?")
QUESTION_ADVERBS = {"where": ("where", "wo"), "when": ("when", "wann"), "why": ("why", "warum")}

Token = tuple[str, int, int]  # word, node, node of the head; `Realizer.governors` overrides it for heads of clauses


class Realizer(ABC):
    """Writes one sentence. Subclasses implement the inflection and the word order of one language."""

    __slots__ = ("agreements", "fused", "governors", "nouns", "phenomena", "references", "text", "tokens", "words")

    index: ClassVar[int]  # position of this language in (English, German) pairs
    than: ClassVar[str]
    genitive: ClassVar[str]  # preposition before a possessor
    encloses_clauses: ClassVar[bool]  # whether commas enclose every relative and complement clause

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.fused: dict[int, int] = {}  # node of a word -> second node that it expresses: im, cannot, kein
        self.governors: dict[int, int] = {}  # node of the head of a clause -> node that the clause depends on
        self.phenomena: list[tuple[str, tuple[int, ...]]] = []  # name, nodes
        self.nouns: list[tuple[int, bool]] = []  # node, plural
        self.agreements: list[tuple[int, int, bool]] = []  # subject, finite verb, plural
        self.references: list[tuple[int, int]] = []  # pronoun, antecedent
        self.words: list[str] = []
        self.text = ""

    # ---- differences between the languages

    @abstractmethod
    def is_comma_before(self, clause: Clause) -> bool:
        """Return whether a comma separates the second clause of a sentence from the first."""

    @abstractmethod
    def write_predication(self, clause: Clause) -> None:
        """Write subject, verb, arguments and adjuncts, except for the constituent that `write_opening` has written."""

    @abstractmethod
    def write_premodifiers(self, phrase: NounPhrase, noun: Noun, case: int) -> None:
        """Write the determiner and the adjectives of a noun phrase."""

    @abstractmethod
    def inflect_pronoun(self, phrase: NounPhrase, case: int) -> str: ...

    # ---- sentences and clauses

    def write(self, plan: SentencePlan) -> None:
        """Write the sentence. A comma before another punctuation mark is left out."""
        root = plan.root
        for clause in plan.clauses:
            if clause is root:
                self.write_clause(clause, 0)
                continue
            first = clause is plan.clauses[0]
            if not first and self.is_comma_before(clause):
                self.add(",", clause.node + Offset.COMMA, clause.head)
            self.write_conjunction(clause)
            self.write_clause(clause, root.head)
            if first:
                self.add(",", clause.node + Offset.COMMA, clause.head)
        self.add("?" if root.kind == QUESTION else ".", root.node + Offset.STOP, root.head)
        words = [token[0] for token in self.tokens]
        for position in range(len(words) - 2, -1, -1):
            if words[position] == "," and words[position + 1] in MARKS:
                del words[position], self.tokens[position]
        words[0] = words[0][0].upper() + words[0][1:]
        self.words = words
        self.text = " ".join(words).replace(" ,", ",").replace(" .", ".").replace(" ?", "?")

    def write_clause(self, clause: Clause, governor: int) -> None:
        """Write a clause that depends on the node `governor`."""
        self.governors[clause.head] = governor
        self.write_opening(clause)
        self.write_predication(clause)
        complement = clause.complement
        if complement:
            if self.encloses_clauses:
                self.add(",", complement.node + Offset.COMMA, complement.head)
            if complement.kind == VERB_FINAL:
                self.write_conjunction(complement)
            self.write_clause(complement, clause.head)

    def write_conjunction(self, clause: Clause) -> None:
        self.add_words(clause.conjunction[self.index], clause.node + Offset.CONJUNCTION, clause.head)

    def write_opening(self, clause: Clause) -> None:
        """Write the argument, question word or adjunct that comes first in the clause, if any."""
        if clause.moved:
            self.write_constituent(clause, clause.moved)
        elif clause.question_adverb:
            word = QUESTION_ADVERBS[clause.question_adverb][self.index]
            self.add(word, clause.node + Offset.QUESTION_WORD, clause.head)
        elif clause.fronted:
            self.write_constituent(clause, clause.fronted)

    def write_rest(self, clause: Clause, *names: str) -> None:
        """Write the named arguments and adjuncts that the clause has, except those written by `write_opening`."""
        for name in names:
            if getattr(clause, name) is not None and name != clause.moved and name != clause.fronted:
                self.write_constituent(clause, name)

    def write_constituent(self, clause: Clause, name: str) -> None:
        constituent, node, head = getattr(clause, name), clause.node, clause.head
        if isinstance(constituent, NounPhrase):
            self.write_noun_phrase(constituent, CASES.get(name, DATIVE), head)
        elif isinstance(constituent, Adverbial):
            first, *others = constituent[self.index]
            if name != "time":
                node += Offset.FREQUENCY if name == "frequency" else Offset.SENTENCE_ADVERB
                self.add(first, node, head)
                self.add_words(" ".join(others), node + 1, node)
                return
            # each word of a time has its own meaning, and the last word is the head of the others
            last = node + Offset.TIME + 4 * len(others)
            for position, word in enumerate((first, *others), -len(others)):
                self.add(word, last + 4 * position, last if position else head)
        elif name == "manner":
            self.add(constituent.adverb[self.index], node + Offset.MANNER, head)
        else:
            self.write_predicate(clause, constituent)

    def write_predicate(self, clause: Clause, adjective: Adjective) -> None:
        """Write the adjective after the verb: very old, older than the cat."""
        node = clause.node
        if clause.degree:
            self.add(clause.degree[self.index][0], node + Offset.PREDICATE_DEGREE, node + Offset.PREDICATE)
        if clause.comparison is None:
            self.add(adjective.positive[self.index], node + Offset.PREDICATE, node)
            return
        *more, comparative = adjective.comparative[self.index].split()
        self.add_words(" ".join(more), node + Offset.PREDICATE + 1, node + Offset.PREDICATE)
        self.add(comparative, node + Offset.PREDICATE, node)
        self.add(self.than, node + Offset.THAN, clause.comparison.node)
        self.write_noun_phrase(clause.comparison, NOMINATIVE, node + Offset.PREDICATE)

    # ---- noun phrases

    def write_noun_phrase(self, phrase: NounPhrase, case: int, head: int) -> None:
        node = phrase.node
        if phrase.preposition:
            case = phrase.preposition.case
            self.add_words(phrase.preposition[:2][self.index], node + Offset.PREPOSITION, node)
        if phrase.pronoun:
            self.add(self.inflect_pronoun(phrase, case), node, head)
            if phrase.pronoun == "relative":
                self.note("relative", PREVIOUS_WORD, node)
            elif phrase.antecedent is not None:
                self.references.append((node, phrase.antecedent.node))
                self.note("pronoun", PREVIOUS_WORD, node)
            return
        assert phrase.noun is not None
        self.write_premodifiers(phrase, phrase.noun, case)
        self.add(phrase.noun.forms[self.index][phrase.plural][case], node, head)
        self.nouns.append((node, phrase.plural))
        if phrase.possessor:
            self.add_words(self.genitive, phrase.possessor.node + Offset.OF, phrase.possessor.node)
            self.write_noun_phrase(phrase.possessor, GENITIVE, node)
        if phrase.postmodifier:
            self.write_noun_phrase(phrase.postmodifier, DATIVE, node)
        if phrase.relative:
            relative = phrase.relative
            if self.encloses_clauses:
                self.add(",", relative.node + Offset.COMMA, relative.head)
            self.write_clause(relative, node)
            if self.encloses_clauses:
                self.add(",", relative.node + Offset.CLOSING_COMMA, relative.head)

    # ---- tokens and phenomena

    def add(self, word: str, node: int, head: int) -> None:
        self.tokens.append((word, node, head))

    def add_words(self, text: str, node: int, head: int) -> None:
        """Add the words of `text` (there may be none), all with the same head."""
        for offset, word in enumerate(text.split()):
            self.tokens.append((word, node + offset, head))

    def note(self, phenomenon: str, *nodes: int) -> None:
        self.phenomena.append((phenomenon, nodes))

    def note_agreement(self, subject: NounPhrase, finite: int) -> None:
        if not subject.pronoun:
            self.agreements.append((subject.node, finite, subject.plural))

    # ---- analysis of the finished sentence

    def locate_nodes(self) -> dict[int, int]:
        """Return the position of each node's word."""
        return {token[1]: position for position, token in enumerate(self.tokens)}

    def list_heads(self, positions: dict[int, int], root: int) -> tuple[int, ...]:
        """Return the position of each word's head, counted from 1; the root has 0."""
        governors = self.governors
        return tuple(0 if node == root else positions[governors.get(node, head)] + 1 for _, node, head in self.tokens)

    def locate_meanings(self) -> dict[int, list[int]]:
        """Return the positions of the words that express each meaning (`node >> 2`)."""
        table: dict[int, list[int]] = {}
        for position, (_, node, _) in enumerate(self.tokens):
            table.setdefault(node >> 2, []).append(position)
            if node in self.fused:
                table.setdefault(self.fused[node] >> 2, []).append(position)
        return table

    def locate_phenomena(self, positions: dict[int, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each phenomenon and the positions that show it.

        Agreement of subject and verb is reported only if a noun of the other number (an attractor) stands between them.
        """
        nouns = [(positions[node], plural) for node, plural in self.nouns]
        for subject, finite, plural in self.agreements:
            first, last = positions.get(subject, -1), positions.get(finite, -1)
            if 0 <= first < last and any(first < at < last and number != plural for at, number in nouns):
                yield "agreement", (first, last - 1, last) if last - 1 > first else (first, last)
        for name, nodes in self.phenomena:
            found = [positions[node] for node in nodes if node >= 0]
            if nodes[0] == PREVIOUS_WORD and found[0] > 0:
                found.insert(0, found[0] - 1)
            elif nodes[0] == PREVIOUS_WORD or nodes[-1] == NEXT_WORD:
                found.append(found[-1] + 1)
            yield name, tuple(found)
