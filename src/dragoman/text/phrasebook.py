"""The built-in corpus: English and German sentences from a grammar, with the right analysis of each.

    for phrase in phrases("train", 3):
        print(phrase.source, "|", phrase.target)

Sentences are drawn, never stored: any number of them, the same on every machine. They fall into splits by what they
say, not by when they were drawn. A stable hash of the content words, which are the same whichever side one reads, puts
a sentence into train, dev or test; so these never share a sentence on either side, whatever the seeds and counts.
`unseen` holds the sentences in which a word meets a construction that it is held back from everywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from dragoman.config import pick
from dragoman.text.draws import Dropped
from dragoman.text.english import English
from dragoman.text.fingerprints import Fingerprints, both_new
from dragoman.text.german import German
from dragoman.text.grammar import Grammar
from dragoman.text.plan import Plan
from dragoman.text.side import Side
from dragoman.text.words import digest
from dragoman.types import Pair, Tree, UserError

SPLITS = ("train", "dev", "test", "unseen")
DIRECTIONS = ("en-de", "de-en")
SHARES = {"train": (0, 84), "dev": (84, 92), "test": (92, 100)}  # percent of the seen sentences
SENTENCES = 10**18  # there are more than these, without relative clauses, questions and much else
MOST = 1_000_000_000  # phrases of one split at a time: the set of those given has to fit into memory
PATIENCE = 1_000_000  # draws without anything new after which a split counts as exhausted


@dataclass(frozen=True, slots=True)
class Phenomenon:
    """A point of grammar, and the target words (from 0) whose form or place shows that it came out right."""

    name: str
    words: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Phrase:
    """A pair with its analysis. Words count from 0; heads count from 1, as in CoNLL-U, and 0 is the root."""

    source: str
    target: str
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    alignment: tuple[tuple[int, int], ...]
    source_heads: tuple[int, ...]
    target_heads: tuple[int, ...]
    source_coref: tuple[tuple[int, int], ...]  # pronoun, the noun it stands for
    target_coref: tuple[tuple[int, int], ...]
    phenomena: tuple[Phenomenon, ...]
    source_phenomena: tuple[Phenomenon, ...]  # those of the other direction

    @property
    def pair(self) -> Pair:
        return Pair(self.source, self.target)

    @property
    def tree(self) -> Tree:
        return Tree(self.source_words, self.source_heads)

    def reversed(self) -> Phrase:
        """The other direction. Each side carries its own phenomena; English has no endings, so no "adjective"."""
        return replace(
            self,
            source=self.target,
            target=self.source,
            source_words=self.target_words,
            target_words=self.source_words,
            alignment=tuple(sorted((t, s) for s, t in self.alignment)),
            source_heads=self.target_heads,
            target_heads=self.source_heads,
            source_coref=self.target_coref,
            target_coref=self.source_coref,
            phenomena=self.source_phenomena,
            source_phenomena=self.phenomena,
        )


def phrases(split: str, count: int, *, seed: int = 1, direction: str = "en-de") -> Iterator[Phrase]:
    """`count` phrases of a split, no two alike on either side."""
    check(split, count, direction)
    return (
        whole if direction == "en-de" else whole.reversed()
        for whole in (analysed(plan, english, german) for plan, english, german in drawn(split, count, seed))
    )


def pairs(split: str, count: int, *, seed: int = 1, direction: str = "en-de") -> Iterator[Pair]:
    """The texts of `phrases`, in the same order and faster."""
    check(split, count, direction)
    return written(split, count, seed, direction)


def analysed_pairs(split: str, count: int, *, seed: int = 1, direction: str = "en-de") -> Iterator[Pair]:
    """The same with the trees of the sources."""
    return (Pair(p.source, p.target, p.tree) for p in phrases(split, count, seed=seed, direction=direction))


def written(split: str, count: int, seed: int, direction: str) -> Iterator[Pair]:
    forward = direction == "en-de"
    for _, english, german in drawn(split, count, seed):
        yield Pair(english.written, german.written) if forward else Pair(german.written, english.written)


def check(split: str, count: int, direction: str) -> None:
    pick(dict.fromkeys(SPLITS), split, "split of the phrasebook")
    pick(dict.fromkeys(DIRECTIONS), direction, "direction of the phrasebook")
    if count <= 0:
        raise UserError(f"the phrasebook gives one phrase or more, not {count}")
    if count > MOST:
        raise UserError(
            f"the phrasebook gives at most {MOST:,} phrases of a split at a time, not {count:,} "
            f"(it has about {SENTENCES:.0e} sentences)"
        )


def drawn(split: str, count: int, seed: int) -> Iterator[tuple[Plan, Side, Side]]:
    """Plans of one split in words, each new on both sides."""
    grammar = Grammar(Random(digest(f"phrasebook {seed} {split}")).random, seen=split != "unseen")
    sources, targets = Fingerprints(count), Fingerprints(count)
    given = idle = 0
    while given < count:
        idle += 1
        if idle > PATIENCE:
            raise UserError(f"the split {split!r} of the phrasebook has about {given:,} phrases, not {count:,}")
        plan = planned(grammar, split)
        if plan is None:
            continue
        english, german = English(), German()
        english.write(plan)
        german.write(plan)
        if both_new(sources, english.written, targets, german.written):
            given, idle = given + 1, 0
            yield plan, english, german


def planned(grammar: Grammar, split: str) -> Plan | None:
    """The next plan, if it belongs to the split."""
    try:
        plan = grammar.plan()
    except Dropped:
        return None
    if split == "unseen":
        return plan if grammar.found else None
    low, high = SHARES[split]
    return plan if low <= (grammar.total & (2**64 - 1)) * 100 >> 64 < high else None


def analysed(plan: Plan, english: Side, german: Side) -> Phrase:
    source_words, target_words = tuple(english.words), tuple(german.words)
    source_places, target_places = english.places(), german.places()
    target_concepts = german.concepts()
    alignment = sorted(
        {
            (s, t)
            for concept, places in english.concepts().items()
            for t in target_concepts.get(concept, ())
            for s in places
        }
    )
    root = plan.root.head
    return Phrase(
        english.written,
        german.written,
        source_words,
        target_words,
        tuple(alignment),
        english.heads(source_places, root),
        german.heads(target_places, root),
        tuple((source_places[a], source_places[b]) for a, b in english.references),
        tuple((target_places[a], target_places[b]) for a, b in german.references),
        tuple(Phenomenon(name, places) for name, places in german.phenomena(target_places)),
        tuple(Phenomenon(name, places) for name, places in english.phenomena(source_places)),
    )


def split_words(line: str) -> list[str]:
    """A text as words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", line)


def judged(phrase: Phrase, hypothesis: str) -> dict[str, tuple[int, int]]:
    """For each phenomenon of the phrase, how many of its cases the hypothesis has right, and how many there are.

    A case is right if its words occur in the hypothesis in the same order, whatever else differs: words that stand side
    by side in the reference have to stand side by side, others may lie up to two words further apart than there. Where
    the reference itself can be read so in several ways ("ist ... ist"), the hypothesis needs as many. Case is ignored.
    """
    marks: dict[str, tuple[int, int]] = {}
    for phenomenon, good in verdicts(phrase, hypothesis):
        right, total = marks.get(phenomenon.name, (0, 0))
        marks[phenomenon.name] = (right + good, total + 1)
    return marks


def verdicts(phrase: Phrase, hypothesis: str) -> Iterator[tuple[Phenomenon, bool]]:
    """Every phenomenon of the phrase, and whether the hypothesis has it right."""
    reference, row = [word.lower() for word in phrase.target_words], [w.lower() for w in split_words(hypothesis)]
    for phenomenon in phrase.phenomena:
        needed = readings(reference, reference, phenomenon.words)
        yield phenomenon, readings(row, reference, phenomenon.words) >= needed


def readings(row: Sequence[str], reference: Sequence[str], places: tuple[int, ...]) -> int:
    """In how many ways the words at these places of the reference can be found in the row."""
    ways = [int(word == reference[places[0]]) for word in row]
    for before, place in pairwise(places):
        reach = 1 if place == before + 1 else place - before + 2
        word = reference[place]
        ways = [sum(ways[max(0, at - reach) : at]) if found == word else 0 for at, found in enumerate(row)]
    return sum(ways)
