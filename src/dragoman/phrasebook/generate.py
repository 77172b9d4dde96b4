"""Generate the built-in corpus: English and German sentences from a grammar, with a gold analysis of each.

    for phrase in generate_phrases("train", 3):
        print(phrase.source, "|", phrase.target)

Sentences are drawn, not stored: any number of them, the same on every machine. A stable hash of the content words,
which are known from either language, assigns a sentence to train, dev or test. Hence these splits never share a
sentence on either side, whatever the seeds and counts. In every sentence of `unseen`, a word appears in a construction
from which it is held out in the other splits.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from dragoman.config.settings import pick
from dragoman.errors import UserError
from dragoman.io import digest_bytes, hash_stably
from dragoman.phrasebook.english import English
from dragoman.phrasebook.german import German
from dragoman.phrasebook.grammar import Grammar, NoFittingWord
from dragoman.phrasebook.realization import Realizer, SentencePlan
from dragoman.types import Pair, Tree

SPLITS = ("train", "dev", "test", "unseen")
DIRECTIONS = ("en-de", "de-en")
PERCENTILES = {"train": (0, 84), "dev": (84, 92), "test": (92, 100)}  # of the content hash
SENTENCE_COUNT = 10**18  # a lower bound: relative clauses, questions and more are not counted
MAX_PHRASES = 1_000_000_000  # of one split at a time: their hashes have to fit into memory
MAX_REPEATS = 1_000_000  # draws in a row without a new sentence after which a split counts as exhausted


@dataclass(frozen=True, slots=True)
class Phenomenon:
    """A point of grammar, and the target words (from 0) whose form or position shows that it is right."""

    name: str
    words: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Phrase:
    """A sentence pair with its analysis. Words count from 0; heads count from 1, as in CoNLL-U, and 0 is the root."""

    source: str
    target: str
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    alignment: tuple[tuple[int, int], ...]
    source_heads: tuple[int, ...]
    target_heads: tuple[int, ...]
    source_coref: tuple[tuple[int, int], ...]  # pronoun, antecedent
    target_coref: tuple[tuple[int, int], ...]
    phenomena: tuple[Phenomenon, ...]
    source_phenomena: tuple[Phenomenon, ...]  # phenomena of the opposite direction

    @property
    def pair(self) -> Pair:
        return Pair(self.source, self.target)

    @property
    def tree(self) -> Tree:
        return Tree(self.source_words, self.source_heads)


def generate_phrases(split: str, count: int, *, seed: int = 1, direction: str = "en-de") -> Iterator[Phrase]:
    """Yield `count` phrases of a split, no two with the same source or the same target."""
    check_request(split, count, direction)
    return (analyse(*sentence) for sentence in realize_plans(split, count, seed, direction))


def generate_pairs(
    split: str, count: int, *, seed: int = 1, direction: str = "en-de", trees: bool = False
) -> Iterator[Pair]:
    """Yield the texts of `generate_phrases`, faster; with `trees`, as slowly, the source trees too."""
    check_request(split, count, direction)
    if trees:
        phrases = generate_phrases(split, count, seed=seed, direction=direction)
        return (Pair(phrase.source, phrase.target, phrase.tree) for phrase in phrases)
    return (Pair(source.text, target.text) for _, source, target in realize_plans(split, count, seed, direction))


def check_request(split: str, count: int, direction: str) -> None:
    pick(dict.fromkeys(SPLITS), split, "split of the phrasebook")
    pick(dict.fromkeys(DIRECTIONS), direction, "direction of the phrasebook")
    if count <= 0:
        raise UserError(f"the phrasebook gives one phrase or more, not {count}")
    if count > MAX_PHRASES:
        raise UserError(
            f"the phrasebook gives at most {MAX_PHRASES:,} phrases of a split at a time, not {count:,} "
            f"(it has about {SENTENCE_COUNT:.0e} sentences)"
        )


def realize_plans(
    split: str, count: int, seed: int, direction: str = "en-de"
) -> Iterator[tuple[SentencePlan, Realizer, Realizer]]:
    """Yield plans of one split with their source and target sentences, each new in both languages."""
    random = Random(hash_stably(f"phrasebook {seed} {split}".encode())).random
    grammar = Grammar(random, allow_held_out=split == "unseen")
    sources, targets = SentenceSet(count), SentenceSet(count)
    low, high = PERCENTILES.get(split, (0, 100))
    found = repeats = 0
    while found < count:
        repeats += 1
        if repeats > MAX_REPEATS:
            raise UserError(f"the split {split!r} of the phrasebook has about {found:,} phrases, not {count:,}")
        try:
            plan = grammar.draw_plan()
        except NoFittingWord:
            continue
        percentile = (grammar.content_hash & (2**64 - 1)) * 100 >> 64
        if not (grammar.found_held_out if split == "unseen" else low <= percentile < high):
            continue
        english, german = English(), German()
        english.write(plan)
        german.write(plan)
        source_slot, source_print = sources.find_slot(english.text)
        target_slot, target_print = targets.find_slot(german.text)
        if not sources.slots[source_slot] and not targets.slots[target_slot]:
            sources.slots[source_slot], targets.slots[target_slot] = source_print, target_print
            found, repeats = found + 1, 0
            yield (plan, english, german) if direction == "en-de" else (plan, german, english)


class SentenceSet:
    """A hash set with open addressing that stores a 32-bit fingerprint per sentence, to save memory.

    Two sentences collide about once in a billion; then one of them counts as a repetition and is left out, which does
    no harm. The system provides memory only for slots in use.
    """

    def __init__(self, count: int) -> None:
        size = 1 << max(10, (count + count // 2).bit_length())
        self.mask = size - 1
        self.slots = memoryview(mmap.mmap(-1, 4 * size)).cast("I")

    def find_slot(self, text: str) -> tuple[int, int]:
        """Return the slot of this text, whose value is 0 if the text is new, and its fingerprint."""
        number = hash_stably(text.encode())
        slots, mask = self.slots, self.mask
        fingerprint, slot = (number >> 32) or 1, number & mask
        while slots[slot] and slots[slot] != fingerprint:
            slot = (slot + 1) & mask
        return slot, fingerprint


def analyse(plan: SentencePlan, source: Realizer, target: Realizer) -> Phrase:
    """Return the sentences with alignment, trees, coreference and phenomena."""
    source_positions, target_positions = source.locate_nodes(), target.locate_nodes()
    target_meanings = target.locate_meanings()
    alignment = {
        (s, t)
        for meaning, positions in source.locate_meanings().items()
        for t in target_meanings.get(meaning, ())
        for s in positions
    }
    return Phrase(
        source=source.text,
        target=target.text,
        source_words=tuple(source.words),
        target_words=tuple(target.words),
        alignment=tuple(sorted(alignment)),
        source_heads=source.list_heads(source_positions, plan.root.head),
        target_heads=target.list_heads(target_positions, plan.root.head),
        source_coref=tuple((source_positions[a], source_positions[b]) for a, b in source.references),
        target_coref=tuple((target_positions[a], target_positions[b]) for a, b in target.references),
        phenomena=tuple(Phenomenon(*found) for found in target.locate_phenomena(target_positions)),
        source_phenomena=tuple(Phenomenon(*found) for found in source.locate_phenomena(source_positions)),
    )


def hash_package() -> str:
    """Return a digest of the files of this package: grammar and lexicon, and so every sentence."""
    paths = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".tsv"))
    return digest_bytes(*(path.read_bytes() for path in paths), size=64)


# ---- judging translations


def split_words(line: str) -> list[str]:
    """Split a text into words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", line)


def count_correct_phenomena(phrase: Phrase, hypothesis: str) -> dict[str, tuple[int, int]]:
    """Return for each phenomenon of the phrase how many of its cases the hypothesis has right, and how many there are.

    A case is right if its words occur in the hypothesis in the same order, whatever else differs: words that are
    adjacent in the reference have to be adjacent, others may be up to two words further apart than there. If the
    reference itself matches in several ways ("ist ... ist"), the hypothesis has to match in as many. Case is ignored.
    """
    counts: dict[str, tuple[int, int]] = {}
    for phenomenon, correct in judge_phenomena(phrase, hypothesis):
        right, total = counts.get(phenomenon.name, (0, 0))
        counts[phenomenon.name] = (right + correct, total + 1)
    return counts


def judge_phenomena(phrase: Phrase, hypothesis: str) -> Iterator[tuple[Phenomenon, bool]]:
    """Yield every phenomenon of the phrase, and whether the hypothesis has it right."""
    reference = [word.lower() for word in phrase.target_words]
    words = [word.lower() for word in split_words(hypothesis)]
    for phenomenon in phrase.phenomena:
        needed = count_matches(reference, reference, phenomenon.words)
        yield phenomenon, count_matches(words, reference, phenomenon.words) >= needed


def count_matches(words: Sequence[str], reference: Sequence[str], positions: tuple[int, ...]) -> int:
    """Return in how many ways `words` contains the reference words at these positions."""
    ways = [int(word == reference[positions[0]]) for word in words]
    for before, position in pairwise(positions):
        reach = 1 if position == before + 1 else position - before + 2
        wanted = reference[position]
        ways = [sum(ways[max(0, at - reach) : at]) if word == wanted else 0 for at, word in enumerate(words)]
    return sum(ways)
