"""Sentence plans, and the part of their realization that English and German share.

A plan describes a sentence independently of the language. `Realizer` turns a plan into tokens in the word order of one
language; its subclasses are `English` and `German`. Each token has a node, an integer id that identifies what the token
stands for in the plan, and the node of its head. Tokens of the two languages with the same meaning have equal
`node >> 2` (see below), so the word alignment and the dependency trees follow from the nodes.

Each noun phrase and clause has a block of 64 node ids. Its attribute `node` is the first id of the block, and `Offset`
names the ids within the block. Offsets are multiples of 4: `node >> 2` identifies the meaning, and the low two bits
distinguish the words that express this meaning together, such as "more" and "expensive".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from dragoman.phrasebook.lexicon import CASES, Adjective, Adverbial, Noun, Preposition, Verb

BLOCK_SIZE = 64  # node ids per noun phrase or clause


class Offset:
    """Offsets of the nodes in the block of a noun phrase or a clause."""

    # Noun phrases:
    NOUN, DETERMINER, ADJECTIVE, COLOUR, PREPOSITION, DEGREE, OF = range(0, 28, 4)
    # Clauses. The words of a time, such as "last week", have one meaning each: TIME and TIME + 4.
    VERB, NOT, AUXILIARY, CONJUNCTION, FREQUENCY, MANNER, COMMA, CLOSING_COMMA = range(0, 32, 4)
    PREDICATE, PREDICATE_DEGREE, THAN, QUESTION_WORD, SENTENCE_ADVERB, TIME, _, STOP = range(32, 64, 4)
    # An English particle or a German separable prefix is part of the meaning of the verb:
    PARTICLE = 2


# "subordinate" is a clause with a conjunction such as "because"; the German finite verb is at its end.
ClauseKind = Literal["main", "subordinate", "relative", "question", "infinitive"]


@dataclass(slots=True, eq=False)
class NounPhrase:
    """A noun phrase or a pronoun."""

    node: int
    noun: Noun | None  # of a pronoun: the noun of its antecedent
    plural: bool = False
    pronoun: str = ""  # I, we, he, she, it, they, who, what, or "relative" for any relative pronoun; empty for a noun
    antecedent: NounPhrase | None = None  # the noun phrase of the sentence to which a pronoun refers
    preposition: Preposition | None = None
    determiner: str = ""  # in English
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
    """A verb with its arguments and adjuncts.

    The keys of `phrases` are the roles subject, dative, accusative, prepositional, place (also for company: "with my
    friend") and circumstance ("despite the rain"). The keys of `adverbials` are time, frequency, manner,
    sentence_adverb ("unfortunately") and question_adverb ("where"). `opening` is the key of the phrase or adverbial at
    the beginning of the clause: a relative pronoun, a question word, or an adjunct before the subject. It is empty in
    clauses with the usual word order.
    """

    node: int
    kind: ClauseKind
    tense: str  # present, past, perfect or future
    phrases: dict[str, NounPhrase]
    adverbials: dict[str, Adverbial]
    follows_clause: bool = False  # a subordinate clause precedes: in German, the verb then precedes the subject
    question_word: str = ""  # for sampling only: it is also among the phrases or adverbials
    opening: str = ""
    negated: bool = False
    has_kein: bool = False  # German negates the object with "kein" instead of the verb with "nicht"
    verb: Verb | None = None  # None means "to be"
    modal: str = ""  # in English
    predicate: Adjective | None = None
    degree: Adverbial | None = None
    comparison: NounPhrase | None = None
    conjunction: tuple[str, str] = ("", "")  # English, German
    complement: Clause | None = None  # that ..., whether ..., to ...

    @property
    def subject(self) -> NounPhrase:
        """Return the subject. An infinitive has the subject of the clause that it depends on."""
        return self.phrases["subject"]

    @property
    def head(self) -> int:
        """Return the node of the head of the clause: the verb or, in a clause with "to be", the predicate."""
        return self.node if self.verb else self.node + Offset.PREDICATE


class SentencePlan(NamedTuple):
    """A sentence of one or two clauses, in this order. `root` is the main clause, or the first of two main clauses."""

    clauses: tuple[Clause, ...]
    root: Clause


# Placeholders in the nodes of a phenomenon (a tested point of grammar): the word before the first, after the last node.
PREVIOUS_WORD, NEXT_WORD = -1, -2
ADVERBIAL_OFFSETS = {
    "frequency": Offset.FREQUENCY,
    "manner": Offset.MANNER,
    "sentence_adverb": Offset.SENTENCE_ADVERB,
    "question_adverb": Offset.QUESTION_WORD,
}

# Word, node, node of the head. For the head of a clause, the third is unused: see `Realizer.governors`.
PlanToken = tuple[str, int, int]


class Realizer(ABC):
    """Writes one sentence and records its analysis. Each subclass has the inflection and word order of a language."""

    __slots__ = ("agreements", "also_means", "governors", "nouns", "phenomena", "references", "text", "tokens", "words")

    index: ClassVar[int]  # index of this language in (English, German) pairs
    than: ClassVar[str]
    genitive: ClassVar[str]  # preposition before a possessor
    commas_enclose_clauses: ClassVar[bool]  # whether commas enclose every relative and complement clause

    def __init__(self) -> None:
        self.tokens: list[PlanToken] = []
        self.also_means: dict[int, int] = {}  # node of a word -> node of its second meaning: im, cannot, kein
        self.governors: dict[int, int] = {}  # node of the head of a clause -> node that the clause depends on
        self.phenomena: list[tuple[str, tuple[int, ...]]] = []  # name, nodes
        self.nouns: list[tuple[int, bool]] = []  # node, whether it is plural
        self.agreements: list[tuple[int, int, bool]] = []  # nodes of subject and finite verb, whether they are plural
        self.references: list[tuple[int, int]] = []  # nodes of pronoun and antecedent

    @abstractmethod
    def is_comma_before(self, clause: Clause) -> bool:
        """Return whether a comma separates the second clause of a sentence from the first."""

    @abstractmethod
    def write_predication(self, clause: Clause, head: int) -> None:
        """Write subject, verb, arguments and adjuncts. The caller has already written the opening."""

    @abstractmethod
    def write_premodifiers(self, phrase: NounPhrase, noun: Noun, case: int) -> None:
        """Write the determiner and the adjectives of a noun phrase."""

    @abstractmethod
    def inflect_pronoun(self, phrase: NounPhrase, case: int) -> str:
        """Return the form of a pronoun in this case."""

    def write(self, plan: SentencePlan) -> None:
        """Write the sentence: the root clause, and before or after it the other clause, if there is one."""
        first, root, last = plan.clauses[0], plan.root, plan.clauses[-1]
        if first is not root:
            self.write_clause(first, root.head)
            self.add_punctuation(",", first.node + Offset.COMMA, first.head)
        self.write_clause(root)
        if last is not root:
            if self.is_comma_before(last):
                self.add_punctuation(",", last.node + Offset.COMMA, last.head)
            self.write_clause(last, root.head)
        self.add_punctuation("?" if root.kind == "question" else ".", root.node + Offset.STOP, root.head)
        self.join_words()

    def join_words(self) -> None:
        """Set `words` and `text` from the tokens."""
        self.words = [token[0] for token in self.tokens]
        self.words[0] = self.words[0][0].upper() + self.words[0][1:]
        self.text = " ".join(self.words[:-1]).replace(" ,", ",") + self.words[-1]

    def write_clause(self, clause: Clause, governor: int = 0) -> None:
        """Write a clause that depends on the node `governor`, which the root clause does not need."""
        head, opening, complement = clause.head, clause.opening, clause.complement
        self.governors[head] = governor
        if conjunction := clause.conjunction[self.index]:
            self.add_words(conjunction, clause.node + Offset.CONJUNCTION, head)
        if opening in clause.phrases:
            self.write_noun_phrase(clause.phrases[opening], opening, head)
        elif opening:
            self.write_adverbial(clause, opening, head)
        self.write_predication(clause, head)
        if complement:
            if self.commas_enclose_clauses:
                self.add_punctuation(",", complement.node + Offset.COMMA, complement.head)
            self.write_clause(complement, head)

    def write_constituents(self, clause: Clause, names: Iterable[str], head: int) -> None:
        """Write those of the named phrases and adverbials that the clause has, except for the opening."""
        phrases, adverbials, opening = clause.phrases, clause.adverbials, clause.opening
        if len(phrases) == 1 and not adverbials:  # nothing but the subject
            return
        for name in names:
            if name in phrases and name != opening:
                self.write_noun_phrase(phrases[name], name, head)
            elif adverbials and name in adverbials and name != opening:
                self.write_adverbial(clause, name, head)

    def write_adverbial(self, clause: Clause, name: str, head: int) -> None:
        """Write an adverbial. The last word of a time is its head; in other adverbials the first word is."""
        first, *others = clause.adverbials[name][self.index]
        if name == "time":
            last = clause.node + Offset.TIME + 4 * len(others)
            for position, word in enumerate((first, *others), -len(others)):
                self.add(word, last + 4 * position, last if position else head)
        else:
            node = clause.node + ADVERBIAL_OFFSETS[name]
            self.add(first, node, head)
            self.add_words(" ".join(others), node + 1, node)

    def write_predicate(self, clause: Clause, adjective: Adjective) -> None:
        """Write the predicate adjective with its degree or comparison: very old, older than the cat."""
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
        self.write_noun_phrase(clause.comparison, "subject", node + Offset.PREDICATE)

    def write_noun_phrase(self, phrase: NounPhrase, role: str, head: int) -> None:
        """Write a noun phrase in the case of its preposition or, if it has none, of its role."""
        node, preposition = phrase.node, phrase.preposition
        case = preposition.case if preposition else CASES[role]
        if preposition:
            self.add_words((preposition.english, preposition.german)[self.index], node + Offset.PREPOSITION, node)
        if phrase.pronoun:
            self.add(self.inflect_pronoun(phrase, case), node, head)
            if phrase.pronoun == "relative":
                self.record_phenomenon("relative", PREVIOUS_WORD, node)
            elif phrase.antecedent is not None:
                self.references.append((node, phrase.antecedent.node))
                self.record_phenomenon("pronoun", PREVIOUS_WORD, node)
            return
        assert phrase.noun is not None
        self.write_premodifiers(phrase, phrase.noun, case)
        self.tokens.append((phrase.noun.forms[self.index][phrase.plural][case], node, head))
        self.nouns.append((node, phrase.plural))
        if phrase.possessor:
            self.add_words(self.genitive, phrase.possessor.node + Offset.OF, phrase.possessor.node)
            self.write_noun_phrase(phrase.possessor, "possessor", node)
        if phrase.postmodifier:
            self.write_noun_phrase(phrase.postmodifier, "postmodifier", node)
        if phrase.relative:
            relative = phrase.relative
            if self.commas_enclose_clauses:
                self.add_punctuation(",", relative.node + Offset.COMMA, relative.head)
            self.write_clause(relative, node)
            if self.commas_enclose_clauses:
                self.add_punctuation(",", relative.node + Offset.CLOSING_COMMA, relative.head)

    def add(self, word: str, node: int, head: int) -> None:
        self.tokens.append((word, node, head))

    def add_words(self, text: str, node: int, head: int) -> None:
        """Add the words of `text`, if there are any, with consecutive nodes and the same head."""
        for offset, word in enumerate(text.split()):
            self.tokens.append((word, node + offset, head))

    def add_punctuation(self, mark: str, node: int, head: int) -> None:
        """Add a punctuation mark. If the last token is a comma, the mark replaces it."""
        if self.tokens[-1][0] == ",":
            self.tokens.pop()
        self.tokens.append((mark, node, head))

    def record_phenomenon(self, phenomenon: str, *nodes: int) -> None:
        self.phenomena.append((phenomenon, nodes))

    def locate_nodes(self) -> dict[int, int]:
        return {token[1]: position for position, token in enumerate(self.tokens)}

    def list_heads(self, positions: dict[int, int], root: int) -> tuple[int, ...]:
        """Return the position of each word's head, counted from 1; the root has 0."""
        governors = self.governors
        return tuple([0 if node == root else positions[governors.get(node, head)] + 1 for _, node, head in self.tokens])

    def locate_meanings(self) -> dict[int, list[int]]:
        """Return the positions of the words that express each meaning (`node >> 2`)."""
        table: dict[int, list[int]] = {}
        for position, (_, node, _) in enumerate(self.tokens):
            table.setdefault(node >> 2, []).append(position)
            if node in self.also_means:
                table.setdefault(self.also_means[node] >> 2, []).append(position)
        return table

    def locate_phenomena(self, positions: dict[int, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each phenomenon with the positions of the words that a right translation contains (generate.py).

        Subject-verb agreement counts only if a noun of the other number (an attractor) stands between subject and verb.
        """
        nouns = [(positions[node], plural) for node, plural in self.nouns]
        for subject, finite, plural in self.agreements:
            first, last = positions.get(subject, -1), positions.get(finite, -1)
            if 0 <= first < last and any(first < i < last and other != plural for i, other in nouns):
                yield "agreement", (first, last - 1, last)  # the verb must follow the same word as in the reference
        for name, nodes in self.phenomena:
            found = [positions[node] for node in nodes if node >= 0]
            if nodes[0] == PREVIOUS_WORD and found[0] > 0:
                found.insert(0, found[0] - 1)
            elif nodes[0] == PREVIOUS_WORD or nodes[-1] == NEXT_WORD:  # the first word has no previous one
                found.append(found[-1] + 1)
            yield name, tuple(found)
