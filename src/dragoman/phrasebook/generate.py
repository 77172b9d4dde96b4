"""Generate the built-in corpus: pairs of English and German sentences with a gold analysis of each.

    for phrase in generate_phrases("train", 3):
        print(phrase.source, "|", phrase.target)

The sentences are not stored, but sampled from a grammar, with the same result on every machine. A stable hash of the
content words assigns a pair to train, dev or test. Since both sentences of a pair determine the content words, these
splits never share a sentence on either side, whatever the seeds and counts. In every sentence of the split `unseen`, a
word appears in a construction from which it is held out in the other splits.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar

from dragoman.config.settings import get_entry
from dragoman.errors import UserError
from dragoman.io import digest_bytes, hash_stably
from dragoman.phrasebook.english import English
from dragoman.phrasebook.german import German
from dragoman.phrasebook.grammar import Grammar, NoFittingWord
from dragoman.phrasebook.realization import Realizer, SentencePlan
from dragoman.types import Pair, Tree

PHRASEBOOK_SPLITS = ("train", "dev", "test", "unseen")
DIRECTIONS = ("en-de", "de-en")
PERCENTILES = {"train": (0, 84), "dev": (84, 92), "test": (92, 100)}  # of the hash of the content words
SENTENCE_COUNT = 10**18  # lower bound of the number of possible sentences, without relative clauses, questions and more
MAX_PHRASES = 1_000_000_000  # per call: the hashes of all sentences have to fit into memory
MAX_REPEATS = 1_000_000  # after this many samples in a row without a new sentence, the split counts as exhausted


Converted = TypeVar("Converted")


@dataclass(frozen=True, slots=True)
class Phenomenon:
    """A grammatical phenomenon, such as agreement, and the positions of the words whose form or order shows it."""

    name: str
    words: tuple[int, ...]


class Judged(Protocol):
    """A sentence pair whose translation can be judged by phenomena of the target."""

    @property
    def target_words(self) -> tuple[str, ...]: ...

    @property
    def phenomena(self) -> tuple[Phenomenon, ...]: ...


@dataclass(frozen=True, slots=True)
class Phrase:
    """A sentence pair with its analysis.

    Positions of words count from 0, except for heads: these count from 1, as in CoNLL-U, and the head of the root is 0.
    """

    source: str
    target: str
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    alignment: tuple[tuple[int, int], ...]  # source position, target position
    source_heads: tuple[int, ...]
    target_heads: tuple[int, ...]
    source_coref: tuple[tuple[int, int], ...]  # pronoun, antecedent
    target_coref: tuple[tuple[int, int], ...]
    phenomena: tuple[Phenomenon, ...]  # in the target
    source_phenomena: tuple[Phenomenon, ...]

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
    """Yield the pairs of `generate_phrases`, faster because nothing is analysed unless `trees` adds source trees."""
    check_request(split, count, direction)
    if trees:
        phrases = generate_phrases(split, count, seed=seed, direction=direction)
        return (Pair(phrase.source, phrase.target, phrase.tree) for phrase in phrases)
    return (Pair(source.text, target.text) for _, source, target in realize_plans(split, count, seed, direction))


def check_request(split: str, count: int, direction: str) -> None:
    """Raise a UserError for an unknown split or direction, or a count out of range."""
    get_entry(dict.fromkeys(PHRASEBOOK_SPLITS), split, "split of the phrasebook")
    get_entry(dict.fromkeys(DIRECTIONS), direction, "direction of the phrasebook")
    if count <= 0:
        raise UserError(f"the number of phrases must be at least 1, not {count}")
    if count > MAX_PHRASES:
        raise UserError(
            f"at most {MAX_PHRASES:,} phrases of the phrasebook can be generated at a time, not {count:,} "
            f"(it has about {SENTENCE_COUNT:.0e} sentences)"
        )


def realize_plans(
    split: str, count: int, seed: int, direction: str = "en-de"
) -> Iterator[tuple[SentencePlan, Realizer, Realizer]]:
    """Yield plans of one split with their source and target sentences, without repeating a sentence on either side."""
    return convert_plans(lambda *sentence: sentence, split, count, seed, direction)


def convert_plans(
    convert: Callable[[SentencePlan, Realizer, Realizer], Converted | None],
    split: str,
    count: int,
    seed: int,
    direction: str,
    hash_content: Callable[[SentencePlan], int] | None = None,
) -> Iterator[Converted]:
    """Yield what `convert` makes of plans of one split with their source and target sentences.

    Neither of these sentences is repeated. Plans for which `convert` returns None are skipped. `hash_content` returns
    the number that decides the split; by default, it is the sum of the hashes of the plan's content words.
    """
    random = Random(hash_stably(f"phrasebook {seed} {split}".encode())).random
    grammar = Grammar(random, allow_held_out=split == "unseen")
    sources, targets = SentenceSet(count), SentenceSet(count)
    done = repeats = 0
    while done < count:
        repeats += 1
        if repeats > MAX_REPEATS:
            raise UserError(f"the split {split!r} of the phrasebook has about {done:,} phrases, not {count:,}")
        try:
            plan = grammar.sample_plan()
        except NoFittingWord:
            continue
        content_hash = hash_content(plan) if hash_content else grammar.content_hash
        if split == "unseen":
            # What `convert` makes of a plan may lack the held-out combination; then its words keep it out of train.
            fits = grammar.found_held_out and not (hash_content and is_in_split(content_hash, "train"))
        else:
            fits = is_in_split(content_hash, split)
        if not fits:
            continue
        english, german = English(), German()
        english.write(plan)
        german.write(plan)
        source_slot, source_fingerprint = sources.find_slot(english.text)
        target_slot, target_fingerprint = targets.find_slot(german.text)
        if sources.slots[source_slot] or targets.slots[target_slot]:
            continue
        converted = convert(plan, *((english, german) if direction == "en-de" else (german, english)))
        if converted is not None:
            sources.slots[source_slot], targets.slots[target_slot] = source_fingerprint, target_fingerprint
            done, repeats = done + 1, 0
            yield converted


def is_in_split(content_hash: int, split: str) -> bool:
    """Return whether a sentence whose content words have this sum of hashes belongs to train, dev or test."""
    percentile = (content_hash & (2**64 - 1)) * 100 >> 64  # 0 to 99, from the lower 64 bits
    low, high = PERCENTILES[split]
    return low <= percentile < high


class SentenceSet:
    """A hash set with open addressing that stores a 32-bit fingerprint per sentence, to save memory.

    `slots` has 0 where it is empty. About one new sentence in a billion is skipped as a repetition, since one of the
    slots searched for it has the same fingerprint. The operating system allocates only memory pages in use.
    """

    def __init__(self, count: int) -> None:
        size = 1 << max(10, (count + count // 2).bit_length())  # a power of two, at most two thirds full
        self.mask = size - 1
        self.slots = memoryview(mmap.mmap(-1, 4 * size)).cast("I")

    def find_slot(self, text: str) -> tuple[int, int]:
        """Return the index of the slot for this text, which is empty if the text is new, and its fingerprint."""
        number = hash_stably(text.encode())
        slots, mask = self.slots, self.mask
        fingerprint, slot = (number >> 32) or 1, number & mask
        while slots[slot] and slots[slot] != fingerprint:
            slot = (slot + 1) & mask
        return slot, fingerprint


def analyse(plan: SentencePlan, source: Realizer, target: Realizer) -> Phrase:
    """Return the pair of these sentences with its alignment, trees, coreference and phenomena."""
    source_positions, target_positions = source.locate_nodes(), target.locate_nodes()  # by node of the plan
    target_meanings = target.locate_meanings()  # a meaning is a group of nodes, the same in both languages
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
        source_heads=source.list_heads(source_positions, root=plan.root.head),
        target_heads=target.list_heads(target_positions, root=plan.root.head),
        source_coref=tuple((source_positions[p], source_positions[a]) for p, a in source.references),
        target_coref=tuple((target_positions[p], target_positions[a]) for p, a in target.references),
        phenomena=tuple(Phenomenon(*found) for found in target.locate_phenomena(target_positions)),
        source_phenomena=tuple(Phenomenon(*found) for found in source.locate_phenomena(source_positions)),
    )


def hash_package() -> str:
    """Return a digest of the files of this package, which changes whenever a sentence of the corpus could change."""
    paths = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".tsv"))
    return digest_bytes(*(path.read_bytes() for path in paths), size=64)


def split_words(line: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", line)


def count_correct_phenomena(phrase: Judged, hypothesis: str) -> dict[str, tuple[int, int]]:
    """Return, by name of phenomenon, how many of its occurrences the hypothesis translates correctly, and their number.

    An occurrence is correct if its words occur in the hypothesis in the same order, whatever else differs. Words that
    are adjacent in the reference have to be adjacent; others may be up to two words further apart than in the
    reference. If the reference matches itself in several ways ("ist ... ist"), the hypothesis has to match in as many
    ways. Upper and lower case do not matter.
    """
    counts: dict[str, tuple[int, int]] = {}
    for phenomenon, correct in judge_phenomena(phrase, hypothesis):
        correct_count, total = counts.get(phenomenon.name, (0, 0))
        counts[phenomenon.name] = (correct_count + correct, total + 1)
    return counts


def judge_phenomena(phrase: Judged, hypothesis: str) -> Iterator[tuple[Phenomenon, bool]]:
    """Yield every phenomenon of the phrase, and whether the hypothesis translates it correctly."""
    reference = [word.lower() for word in phrase.target_words]
    words = [word.lower() for word in split_words(hypothesis)]
    for phenomenon in phrase.phenomena:
        needed = count_matches(reference, reference, phenomenon.words)
        yield phenomenon, count_matches(words, reference, phenomenon.words) >= needed


def count_matches(words: Sequence[str], reference: Sequence[str], positions: tuple[int, ...]) -> int:
    """Return in how many ways `words` contains the reference words at these positions.

    After each position, `ways[i]` is the number of ways that match the positions so far and end with `words[i]`.
    """
    ways = [int(word == reference[positions[0]]) for word in words]
    for previous, position in pairwise(positions):
        max_distance = 1 if position == previous + 1 else position - previous + 2
        expected = reference[position]
        ways = [sum(ways[max(0, i - max_distance) : i]) if word == expected else 0 for i, word in enumerate(words)]
    return sum(ways)
