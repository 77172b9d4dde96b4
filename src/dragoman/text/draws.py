"""Draws of single words and of noun phrases, from the menus of `stock.py`.

Draws use `random()` alone, whose sequence Python promises to keep. A word may be held back from one construction
(`words.held`); every draw asks `may` first, so that the seen splits never show the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dragoman.text import stock, words
from dragoman.text.plan import BLOCK, Nominal
from dragoman.text.stock import Determiners
from dragoman.text.words import Adjective, Frame, Noun, Verb

T = TypeVar("T")


class Dropped(Exception):
    """The plan came to a place where no word may stand; draw another."""


class Draws:
    """Draws of single words. With `seen`, no word meets what it is held back from; else `found` says if one did."""

    def __init__(self, random: Callable[[], float], *, seen: bool) -> None:
        self.random = random
        self.seen = seen
        self.stock = stock.stocked()
        self.start()

    def start(self) -> None:
        self.found = False
        self.total = 0  # sum of the content words' numbers: either side of the pair tells it
        self.last = -BLOCK
        self.nominals: list[Nominal] = []
        self.used: set[object] = set()

    def pick(self, menu: Sequence[T]) -> T:
        return menu[int(self.random() * len(menu))]

    def block(self) -> int:
        self.last += BLOCK
        return self.last

    def may(self, word: Noun | Verb | Adjective, bits: int) -> bool:
        """Whether the word may stand in this construction; outside the seen splits it may, and that is noted."""
        if word.held & bits:
            if self.seen:
                return False
            self.found = True
        return True

    def take(self, menu: Sequence[Noun], bits: int) -> Noun:
        for _ in range(12):
            noun = menu[int(self.random() * len(menu))]
            if noun not in self.used and self.may(noun, bits):
                self.used.add(noun)
                self.total += noun.number
                return noun
        raise Dropped

    def frame(self, menu: Sequence[Frame], bits: int) -> Frame:
        for _ in range(12):
            frame = menu[int(self.random() * len(menu))]
            if frame.verb not in self.used and self.may(frame.verb, bits):
                return frame
        raise Dropped


class Nominals(Draws):
    """Draws of noun phrases."""

    def nominal(self, menu: Sequence[Noun], role: str, determiners: Determiners, wide: bool = False) -> Nominal:
        """A noun with its determiner and perhaps adjectives; `wide` lets a genitive or "with ..." follow it."""
        noun = self.take(menu, stock.NOUN_BITS.get(role, 0))
        nominal = Nominal(self.block(), noun, not noun.mass and self.random() < 0.36)
        self.nominals.append(nominal)
        fitting = stock.MASS.get(determiners, determiners) if noun.mass else determiners
        nominal.determiner = self.pick(fitting[nominal.plural])
        if nominal.determiner in stock.POSSESSIVES and not noun.tags & stock.POSSESSED:
            nominal.determiner = "the"
        elif nominal.determiner == "a" and "family" in noun.tags:
            nominal.determiner = self.pick(stock.FAMILY)
        if self.random() < 0.34:
            self.colour_in(nominal, stock.ATTRIBUTE.get(role, words.ATTRIBUTE_OTHER))
        if wide and self.random() < 0.3 and nominal.determiner in ("the", "this", "a"):
            self.extend(nominal)
        return nominal

    def colour_in(self, nominal: Nominal, bits: int) -> None:
        """An attribute: of quality, of colour, or one of each in this order."""
        noun, book = nominal.noun, self.stock.book
        assert noun is not None
        if nominal.plural:
            bits |= words.ATTRIBUTE_PLURAL
        colours = book.colours[noun]
        if colours and self.random() < 0.3:
            nominal.colour = self.adjective(colours, bits)
        if nominal.colour is None or self.random() < 0.25:
            nominal.adjective = self.adjective(book.fitting[noun], bits)
            if nominal.adjective and self.random() < 0.12 and nominal.determiner in stock.MODEST:
                nominal.degree = self.pick(self.stock.degrees)

    def adjective(self, menu: Sequence[Adjective], bits: int) -> Adjective | None:
        if not menu:
            return None
        chosen = menu[int(self.random() * len(menu))]
        if chosen in self.used or chosen.lemma in self.used or not self.may(chosen, bits):
            return None
        self.used.add(chosen)
        self.used.update(chosen.opposites)
        self.total += chosen.number
        return chosen

    def extend(self, nominal: Nominal) -> None:
        """The writer *of the books*, the man *with the dogs*."""
        noun = nominal.noun
        assert noun is not None
        if noun in self.stock.owned and self.random() < 0.7:
            nominal.determiner = "the"
            nominal.owner = self.nominal(self.stock.owned[noun], "owner", stock.OWNING)
        elif "person" in noun.tags:
            nominal.with_ = self.nominal(self.stock.carried, "prepositional", stock.BORNE)
            nominal.with_.preposition = stock.WITH
        elif noun.tags & stock.LYING and "furniture" not in noun.tags:
            nominal.with_ = self.nominal(self.stock.seats, "prepositional", stock.KNOWN)
            nominal.with_.preposition = self.pick(stock.SEATS)

    def someone(self, frame_subjects: Sequence[Noun], personal: bool, far: bool, denied: bool, wide: bool) -> Nominal:
        """A subject: a pronoun, a name or a noun phrase."""
        drawn = self.random()
        if personal and drawn < 0.13:
            return self.bare(self.pick(stock.FAR_PRONOUNS if far else stock.FREE_PRONOUNS))
        if personal and drawn < 0.24:
            nominal = Nominal(self.block(), self.take(self.stock.names, 0))
            self.nominals.append(nominal)
            return nominal
        determiners = stock.KNOWN if denied else stock.NOBODY if drawn > 0.97 else stock.ANY
        return self.nominal(frame_subjects, "subject", determiners, wide)

    def bare(self, pronoun: str) -> Nominal:
        nominal = Nominal(self.block(), None, pronoun in ("we", "they"), pronoun)
        self.nominals.append(nominal)
        return nominal
