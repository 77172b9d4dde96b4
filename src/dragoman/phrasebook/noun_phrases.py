"""Random noun phrases: the lower half of the grammar.

Draws use `random()` alone, whose sequence Python promises to keep. A word may be held out from one construction; every
draw checks that first, so the two never meet outside the split `unseen`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dragoman.phrasebook.lexicon import DATIVE, Adjective, Frame, Noun, Preposition, Verb, load_lexicon
from dragoman.phrasebook.realization import BLOCK_SIZE, NounPhrase

Choice = TypeVar("Choice")


def expand_weights(menu: str) -> tuple[str, ...]:
    """Return the entries of "the*3 a", each repeated according to its weight; "-" is the empty string."""
    entries = [entry.partition("*") for entry in menu.split()]
    return tuple("" if name == "-" else name for name, _, weight in entries for _ in range(int(weight or 1)))


DETERMINER_MENUS = {  # for the singular, for the plural, and for mass nouns if they differ from the singular
    name: tuple(map(expand_weights, menus))
    for name, *menus in (
        (
            "any",
            "the*18 a*8 this*4 every*2 my*3 our*3 his*3 her*3",
            "the*18 -*5 this*4 two*2 three*2 four five six ten many*3 some*3 several*2 all*2 my*2 our*2 his*2 her*2",
            "-*8 the*6 this*2",
        ),
        ("definite", *["the*12 this*3 my*2 our*2 his*2 her*2"] * 2, "the*6 this*2"),
        ("negated", "the*8 a*5 this*2 my our his her", "the*8 -*5 this*2 my our his her", "-*6 the*6 this*2"),
        ("possessor", "the*8 a*3 this*2 my*2 our*2 his*2 her*2", "the*8 this*2 my our his her"),
        (
            "recipient",
            "the*9 a*4 this*2 every my*2 our*2 his*2 her*2",
            "the*9 this*2 two three many some my our his her",
        ),
        ("carried", "the*3 a*3", "the*3 - two three many"),
        ("the", "the", "the"),
        ("which", "which", "which"),
        ("no", "no", "the"),
    )
}
POSSESSIVES = ("my", "our", "his", "her")
POSSESSABLE = frozenset(  # tags of nouns that may follow a possessive
    {"kin", "small", "pet", "vehicle", "furniture", "device", "instrument", "room", "house", "garden"}
    | {"text", "thought", "problem", "wedding"}
)

SUBJECT_PRONOUNS = expand_weights("I*3 we*2 he*2 she*2 they*2")
FIRST_PERSON = expand_weights("I*3 we*2")
WITH = Preposition("with", "mit", DATIVE)
ON = Preposition("on", "auf", DATIVE)
AROUND_FURNITURE = (
    ON,
    Preposition("under", "unter", DATIVE),
    Preposition("behind", "hinter", DATIVE),
    Preposition("beside", "neben", DATIVE),
)


class NoFittingWord(Exception):
    """No word may fill a position of the plan; the caller draws another plan."""


class NounPhraseGrammar:
    """Draws words and noun phrases.

    `content_hash` is the sum of the hashes of the content words, which either language reveals. Unless
    `allow_held_out`, no word meets the construction it is held out from; else `found_held_out` says whether one did.
    """

    def __init__(self, random: Callable[[], float], *, allow_held_out: bool) -> None:
        self.random = random
        self.allow_held_out = allow_held_out
        self.lexicon = load_lexicon()
        self.reset()

    def reset(self) -> None:
        """Forget the last sentence."""
        self.found_held_out = False
        self.content_hash = 0
        self.last_node = -BLOCK_SIZE
        self.noun_phrases: list[NounPhrase] = []
        self.used: set[object] = set()  # nouns, verbs, adjectives, and the lemmas of these adjectives' opposites

    def pick(self, menu: Sequence[Choice]) -> Choice:
        return menu[int(self.random() * len(menu))]

    def new_block(self) -> int:
        self.last_node += BLOCK_SIZE
        return self.last_node

    def is_allowed(self, word: Noun | Verb | Adjective, *constructions: str) -> bool:
        """Return whether the word may appear in these constructions, and note if it is held out from one."""
        if word.held_out and word.held_out in constructions:
            if not self.allow_held_out:
                return False
            self.found_held_out = True
        return True

    def draw_noun(self, menu: Sequence[Noun], role: str) -> Noun:
        for _ in range(12):
            noun = self.pick(menu)
            if noun not in self.used and self.is_allowed(noun, role):
                self.used.add(noun)
                self.content_hash += noun.hash
                return noun
        raise NoFittingWord

    def draw_frame(self, menu: Sequence[Frame], *constructions: str) -> Frame:
        for _ in range(12):
            frame = self.pick(menu)
            if frame.verb not in self.used and self.is_allowed(frame.verb, *constructions):
                return frame
        raise NoFittingWord

    def draw_adjective(self, menu: Sequence[Adjective], *constructions: str) -> Adjective | None:
        """Draw an adjective that contradicts none before it, or None if the one drawn may not be used."""
        if not menu:
            return None
        adjective = self.pick(menu)
        if adjective in self.used or adjective.lemma in self.used or not self.is_allowed(adjective, *constructions):
            return None
        self.used.add(adjective)
        self.used.update(adjective.opposites)
        self.content_hash += adjective.hash
        return adjective

    def draw_noun_phrase(
        self, menu: Sequence[Noun], role: str, determiners: str, *, extend: bool = False
    ) -> NounPhrase:
        """Draw a noun with its determiner and perhaps adjectives; `extend` allows a genitive or "with ..." after it."""
        noun = self.draw_noun(menu, role)
        phrase = NounPhrase(self.new_block(), noun, not noun.mass and self.random() < 0.36)
        self.noun_phrases.append(phrase)
        menus = DETERMINER_MENUS[determiners]
        phrase.determiner = self.pick(menus[2 if noun.mass and len(menus) > 2 else phrase.plural])
        if phrase.determiner in POSSESSIVES and not noun.tags & POSSESSABLE:
            phrase.determiner = "the"
        elif phrase.determiner == "a" and "family" in noun.tags:
            phrase.determiner = self.pick(POSSESSIVES)
        if self.random() < 0.34:
            self.add_adjectives(phrase, noun, role)
        if extend and self.random() < 0.3 and phrase.determiner in ("the", "this", "a"):
            self.add_postmodifier(phrase, noun)
        return phrase

    def add_adjectives(self, phrase: NounPhrase, noun: Noun, role: str) -> None:
        """Add an adjective of quality, one of colour, or one of each."""
        constructions = [role if role in ("subject", "accusative") else "other"]
        if phrase.plural:
            constructions.append("plural")
        colours = self.lexicon.colours[noun]
        if colours and self.random() < 0.3:
            phrase.colour = self.draw_adjective(colours, *constructions)
        if phrase.colour is None or self.random() < 0.25:
            phrase.adjective = self.draw_adjective(self.lexicon.qualities[noun], *constructions)
            if phrase.adjective and self.random() < 0.12 and phrase.determiner in ("the", "a", "this", ""):
                phrase.degree = self.pick(self.lexicon.adverbials["degree"])

    def add_postmodifier(self, phrase: NounPhrase, noun: Noun) -> None:
        """Add a genitive or a prepositional phrase: the writer of the books, the man with the dogs."""
        lexicon = self.lexicon
        if noun in lexicon.possessors and self.random() < 0.7:
            phrase.determiner = "the"
            phrase.possessor = self.draw_noun_phrase(lexicon.possessors[noun], "possessor", "possessor")
        elif "person" in noun.tags:
            phrase.postmodifier = self.draw_noun_phrase(lexicon.carried, "prepositional", "carried")
            phrase.postmodifier.preposition = WITH
        elif noun.tags & {"small", "text"} and "furniture" not in noun.tags:
            phrase.postmodifier = self.draw_noun_phrase(lexicon.furniture, "prepositional", "definite")
            phrase.postmodifier.preposition = self.pick(AROUND_FURNITURE)

    def draw_subject(
        self, nouns: Sequence[Noun], *, personal: bool, second: bool, negated: bool, extend: bool
    ) -> NounPhrase:
        """Draw a pronoun, a name or a noun phrase. In the second clause "he" would be ambiguous, "I" is not."""
        chance = self.random()
        if personal and chance < 0.13:
            return self.add_pronoun(self.pick(FIRST_PERSON if second else SUBJECT_PRONOUNS))
        if personal and chance < 0.24:
            phrase = NounPhrase(self.new_block(), self.draw_noun(self.lexicon.names, "name"))
            self.noun_phrases.append(phrase)
            return phrase
        determiners = "definite" if negated else "no" if chance > 0.97 else "any"
        return self.draw_noun_phrase(nouns, "subject", determiners, extend=extend)

    def add_pronoun(self, pronoun: str) -> NounPhrase:
        phrase = NounPhrase(self.new_block(), None, pronoun in ("we", "they"), pronoun)
        self.noun_phrases.append(phrase)
        return phrase
