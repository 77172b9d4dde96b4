"""The plan of a sentence: who does what, when, to whom, in what kind of clause; no word order and no endings.

Each nominal and each clause owns a block of 64 node numbers. Both languages name their words by these nodes: words
whose nodes agree up to the last two bits translate each other, and a word's head is the node it hangs on.
"""

from __future__ import annotations

from dragoman.text.words import Adjective, Noun, Phrasal, Verb

BLOCK = 64
# Nodes of a nominal, as offsets into its block.
NOUN, DETERMINER, ADJECTIVE, COLOUR, PREPOSITION, DEGREE, OF = range(0, 28, 4)
# Nodes of a clause.
VERB, NOT, HELPER, CONJUNCTION, OFTEN, MANNER, COMMA, END, PREDICATE, MORE, THAN, ASKED, OPINION = range(0, 52, 4)
WHEN = 52  # two nodes: 52 and 56
STOP = 60

MAIN, FINAL, RELATIVE, QUESTION, INFINITIVE = "main", "final", "relative", "question", "infinitive"


class Nominal:
    """A noun phrase or a pronoun, with all that hangs on it."""

    __slots__ = (
        "adjective", "antecedent", "colour", "degree", "determiner", "negation", "node", "noun", "owner", "plural",
        "preposition", "pronoun", "relative", "with_",
    )  # fmt: skip

    def __init__(self, node: int, noun: Noun | None, plural: bool = False, pronoun: str = "") -> None:
        self.node = node
        self.noun = noun
        self.plural = plural
        self.pronoun = pronoun  # I, we, he, she, it, they, who, what, relative; nothing for a noun phrase
        self.determiner = ""
        self.negation = -1  # the node of the "not" that German says as "kein"
        self.adjective: Adjective | None = None
        self.colour: Adjective | None = None
        self.degree: Phrasal | None = None
        self.owner: Nominal | None = None  # the writer *of the books*
        self.with_: Nominal | None = None  # the man *with the dogs*
        self.relative: Clause | None = None
        self.antecedent: Nominal | None = None
        self.preposition: tuple[str, str, int] | None = None  # English, German, case


class Clause:
    """A verb with everything around it."""

    __slots__ = (
        "accusative", "asked", "clause", "comparison", "conjunction", "dative", "degree", "front", "inverted", "kind",
        "manner", "modal", "moved", "negated", "node", "often", "opinion", "place", "predicate", "prepositional",
        "setting", "silent", "subject", "tense", "verb", "when",
    )  # fmt: skip

    def __init__(self, node: int, kind: str, tense: str) -> None:
        self.node = node
        self.kind = kind
        self.tense = tense
        self.verb: Verb | None = None  # None is "to be"
        self.subject: Nominal | None = None
        self.accusative: Nominal | None = None
        self.dative: Nominal | None = None
        self.prepositional: Nominal | None = None
        self.moved = ""  # the role of what opens the clause: a relative pronoun, who, what, which book
        self.asked = ""  # where, when, why
        self.place: Nominal | None = None
        self.setting: Nominal | None = None  # despite the rain
        self.predicate: Adjective | None = None
        self.degree: Phrasal | None = None
        self.comparison: Nominal | None = None
        self.modal = ""
        self.negated = False
        self.silent = False  # "kein" has said the negation already
        self.often: Phrasal | None = None
        self.when: Phrasal | None = None
        self.manner: Adjective | None = None
        self.opinion: Phrasal | None = None
        self.front = ""  # when, setting or opinion: what opens a main clause instead of the subject
        self.inverted = False  # a whole clause opens the sentence
        self.conjunction = ("", "")
        self.clause: Clause | None = None  # that ..., whether ..., to ...

    @property
    def head(self) -> int:
        """The node that the clause hangs by: the verb, or with "to be" the predicate."""
        return self.node if self.verb else self.node + PREDICATE


class Plan:
    """One or two clauses, in the order in which they are said."""

    __slots__ = ("clauses", "root")

    def __init__(self, *clauses: Clause, root: Clause) -> None:
        self.clauses = clauses
        self.root = root
