"""What the grammar draws from: weighted menus of small words, and for each place in a plan the words that fit it.

A menu says its weights by repetition, so that one even draw respects them. Determiners come in two menus, for the
singular and for the plural.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from dragoman.text import lexicon_verbs, words
from dragoman.text.plan import FINAL, INFINITIVE, MAIN, QUESTION, RELATIVE, Nominal
from dragoman.text.words import Adjective, Frame, Lexicon, Noun

Determiners = tuple[tuple[str, ...], ...]


def weighted(menu: str) -> tuple[str, ...]:
    """ "the*3 a" is the, the, the, a, so that an even draw respects the weights; "-" stands for no word."""
    entries = [entry.partition("*") for entry in menu.split()]
    return tuple("" if name == "-" else name for name, _, times in entries for _ in range(int(times or 1)))


ANY = (
    weighted("the*18 a*8 this*4 every*2 my*3 our*3 his*3 her*3"),
    weighted("the*18 -*5 this*4 two*2 three*2 four five six ten many*3 some*3 several*2 all*2 my*2 our*2 his*2 her*2"),
)
KNOWN = weighted("the*12 this*3 my*2 our*2 his*2 her*2"), weighted("the*12 this*3 my*2 our*2 his*2 her*2")
DENIED = weighted("the*8 a*5 this*2 my our his her"), weighted("the*8 -*5 this*2 my our his her")
OWNING = weighted("the*8 a*3 this*2 my*2 our*2 his*2 her*2"), weighted("the*8 this*2 my our his her")
THE = ("the",), ("the",)
WHICH = ("which",), ("which",)
NOBODY = ("no",), ("the",)
RECEIVING = (
    weighted("the*9 a*4 this*2 every my*2 our*2 his*2 her*2"),
    weighted("the*9 this*2 two three many some my our his her"),
)
BORNE = weighted("the*3 a*3"), weighted("the*3 - two three many")
MASS: dict[Determiners, Determiners] = {
    ANY: (weighted("-*8 the*6 this*2"),),
    DENIED: (weighted("-*6 the*6 this*2"),),
    KNOWN: (weighted("the*6 this*2"),),
}
FAMILY = ("my", "our", "his", "her")
POSSESSIVES = frozenset(FAMILY)
POSSESSED = frozenset(
    weighted("kin small pet vehicle furniture device instrument room house garden text thought problem wedding")
)
MODEST = frozenset(("the", "a", "this", ""))  # determiners that "very old" may follow
LYING = frozenset(("small", "text"))
TAKEN_UP = frozenset(weighted("the a this my our his her two three four five six ten many some several"))

TENSES = weighted("present*9 past*6 perfect*3 future*3")
PAIRED_TENSES = weighted("present*9 past*7 future*2")
LINKS = weighted("but/aber*4 and/und*3")
TEMPORAL = frozenset(("before", "until", "as_soon_as"))  # of events: not of how something is
SUBORDINATORS = weighted("because/weil*5 although/obwohl*3 if/wenn*2 before/bevor*2 until/bis as_soon_as/sobald")
QUESTIONS = weighted("-*4 who what whom which where when why")
MODALS = {"present": weighted("can*3 must*2 want*2 may should*2"), "past": weighted("can must want")}
DENIED_MODALS = {"present": weighted("can*3 want*2 may should*2"), "past": weighted("can want")}
FREE_PRONOUNS = weighted("I*3 we*2 he*2 she*2 they*2")
FAR_PRONOUNS = weighted("I*3 we*2")
OBJECT_PRONOUNS = weighted("I he we")
RECIPIENT_PRONOUNS = weighted("I he she we they")

IN, ON, AT = ("in", "in", words.DATIVE), ("on", "auf", words.DATIVE), ("at", "an", words.DATIVE)
SCENES = {"in": IN, "on": ON, "at": AT}
SEATS = (ON, ("under", "unter", words.DATIVE), ("behind", "hinter", words.DATIVE), ("beside", "neben", words.DATIVE))
WITH = ("with", "mit", words.DATIVE)
DESPITE = ("despite", "trotz", words.GENITIVE)
EVENTS = (("during", "während", words.GENITIVE), ("after", "nach", words.DATIVE))
GERMAN_PRONOUN = {"he": "er", "she": "sie", "they": "sie", "I": "ich", "we": "wir"}
RELATIVE_ROLES = weighted("subject*3 accusative*2 dative prepositional")
KIND_BITS = {MAIN: 0, INFINITIVE: 0, FINAL: words.FINAL, RELATIVE: words.RELATIVE, QUESTION: words.QUESTIONED}
ATTRIBUTE = {"subject": words.ATTRIBUTE_SUBJECT, "accusative": words.ATTRIBUTE_OBJECT}
NOUN_BITS = {
    "subject": words.SUBJECT,
    "accusative": words.OBJECT,
    "dative": words.RECIPIENT,
    "prepositional": words.PREPOSITIONAL,
}


class Stock:
    """Menus of words for each place in a plan, made once."""

    def __init__(self) -> None:
        book = words.lexicon_of()
        self.book = book
        self.frames = tuple(frame for frame in book.frames if not frame.clause)
        self.reporting = tuple(frame for frame in book.frames if frame.clause in ("that", "whether"))
        self.controlling = tuple(frame for frame in book.frames if frame.clause == "to")
        self.active = tuple(frame for frame in self.frames if frame.animate and frame.personal)
        self.chosen = tuple(frame for frame in self.active if not frame.steady)
        plain = [frame for frame in self.frames if not (frame.accusative and frame.dative)]
        self.asking = {
            "who": self.active,
            "what": tuple(f for f in plain if f.accusative and not any("person" in n.tags for n in f.accusative)),
            "whom": tuple(f for f in plain if any("person" in noun.tags for noun in f.accusative or f.dative)),
            "which": tuple(frame for frame in plain if frame.accusative),
            "where": tuple(frame for frame in self.frames if frame.place),
        }
        self.using = {
            "subject": by_noun((frame, frame.subjects) for frame in self.frames),
            "accusative": by_noun((frame, frame.accusative) for frame in plain),
            "dative": by_noun((frame, frame.dative) for frame in plain),
            "prepositional": by_noun((frame, frame.prepositional) for frame in plain),
        }
        self.owned = {noun: book.pool(*noun.owners) for noun in book.nouns if noun.owners}
        self.described = tuple(noun for noun in book.nouns if book.fitting[noun])
        self.alike = {(n, a): alike(book, n, a) for n in book.nouns for a in book.fitting[n] + book.colours[n]}
        self.people, self.names = book.pool("person"), book.pool("name")
        self.carried = book.pool(*lexicon_verbs.CARRIED.split())
        self.scenes, self.seats = book.pool("in", "on", "at"), book.pool("furniture")
        self.weather, self.events = book.pool("weather"), book.pool("event")
        self.times = {tense: words.phrasals(menu) for tense, menu in lexicon_verbs.TIMES.items()}
        self.once = {
            tense: tuple(t for t in menu if t.english[0] not in ("every", "soon")) for tense, menu in self.times.items()
        }
        self.often = words.phrasals(lexicon_verbs.OFTEN)
        self.opinions = words.phrasals(lexicon_verbs.OPINIONS)
        self.degrees = words.phrasals(lexicon_verbs.DEGREES)
        self.manners = tuple(adjective for adjective in book.adjectives if adjective.adverb)
        self.moods = tuple(adjective for adjective in book.adjectives if "person" in adjective.tags)


@cache
def stocked() -> Stock:
    return Stock()


def alike(book: Lexicon, noun: Noun, adjective: Adjective) -> tuple[Noun, ...]:
    """Nouns to compare with: they share a kind, and the adjective fits them too."""
    kinds = noun.tags - {noun.lemma, "goods", "small", "portable", "idea", "in", "on", "at"}
    fit = (other for other in book.nouns if other.tags & kinds and other.tags & adjective.tags)
    return tuple(other for other in fit if not other.mass and other is not noun)


def by_noun(frames: Iterable[tuple[Frame, tuple[Noun, ...]]]) -> dict[Noun, tuple[Frame, ...]]:
    """For each noun, the frames that have a place for it."""
    table: dict[Noun, list[Frame]] = {}
    for frame, nouns in frames:
        for noun in nouns:
            table.setdefault(noun, []).append(frame)
    return {noun: tuple(some) for noun, some in table.items()}


def conjunction(entry: str) -> tuple[str, str]:
    english, _, german = entry.partition("/")
    return english, german


def pronouns(nominal: Nominal) -> tuple[str, str]:
    """The English and the German pronoun that would take this up; German "sie" is one, for she, it and they."""
    noun = nominal.noun
    if noun is None:
        return nominal.pronoun, GERMAN_PRONOUN.get(nominal.pronoun, "")
    if nominal.plural:
        return "they", "sie"
    return noun.pronoun, ("er", "sie", "es")[noun.gender]
