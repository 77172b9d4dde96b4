"""Statistics of a corpus in one pass: lengths, ratios, repetitions, languages, and what seems wrong.

Memory stays small for millions of pairs: lengths are kept as counts, texts as 64-bit hashes, and a few hundred pairs
are sampled to guess their languages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from random import Random

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dragoman.data.cleaning import LanguageGuesser, Overlap, TextSet
from dragoman.errors import UserError
from dragoman.types import Pair

LANGUAGE_SAMPLE = 500  # pairs whose languages are guessed
RATIO_STEP = 0.02  # ratios are counted in steps of 2 %
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Distribution:
    """The mean, percentiles and largest value of a quantity."""

    mean: float
    p5: float
    median: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, counts: Counter[float]) -> Distribution:
        total = counts.total()
        mean = math.fsum(value * count for value, count in counts.items()) / total
        p5, p50, p95, p99 = compute_percentiles(counts, (0.05, 0.5, 0.95, 0.99))
        return cls(mean, p5, p50, p95, p99, max(counts))


def compute_percentiles(counts: Counter[float], fractions: Sequence[float]) -> list[float]:
    """Return, for each fraction, the smallest value that at least this fraction of all values does not exceed."""
    found, total, passed = [], counts.total(), 0
    values = iter(sorted(counts))
    value = 0.0
    for fraction in fractions:
        while passed < fraction * total:
            value = next(values)
            passed += counts[value]
        found.append(value)
    return found


@dataclass(frozen=True, slots=True)
class SideStatistics:
    words: Distribution
    characters: Distribution
    total_words: int
    total_characters: int
    empty: int
    repeated: int  # lines whose text came before
    longest_line: int  # its number, counted from 1
    languages: dict[str, float]  # fraction of the sample, most frequent first; "" means undecided
    histogram: list[int]  # of lengths in characters, from 0 to the 99th percentile


@dataclass(frozen=True, slots=True)
class CorpusStatistics:
    """What `dragoman data stats` shows. Ratio: target to source length in UTF-8 bytes, fair to every script."""

    pairs: int
    source: SideStatistics
    target: SideStatistics
    ratio: Distribution
    ratio_histogram: list[int]  # of log-ratios, from 1:4 to 4:1; the outer bins include values beyond
    length_correlation: float  # of log-lengths, from -1 to 1; aligned lines have about 0.9, shuffled ones 0
    repeated_pairs: int
    equal_sides: int
    notes: list[str]  # what is worth a look, as sentences
    against: Overlap | None = None  # what is shared with another corpus, where one was named


@dataclass
class SideCounts:
    """Running counts of one side."""

    words: Counter[float] = field(default_factory=Counter)
    characters: Counter[float] = field(default_factory=Counter)
    empty: int = 0
    repeated: int = 0
    longest_line: int = 1
    longest: int = 0
    seen: TextSet = field(default_factory=TextSet)

    def add(self, text: str, number: int) -> None:
        size = len(text)
        self.words[len(text.split())] += 1
        self.characters[size] += 1
        self.empty += not text.strip()
        self.repeated += not self.seen.add(text)
        if size > self.longest:
            self.longest, self.longest_line = size, number

    def summary(self, languages: dict[str, float]) -> SideStatistics:
        characters = Distribution.of(self.characters)
        return SideStatistics(
            words=Distribution.of(self.words),
            characters=characters,
            total_words=int(sum(size * count for size, count in self.words.items())),
            total_characters=int(sum(size * count for size, count in self.characters.items())),
            empty=self.empty,
            repeated=self.repeated,
            longest_line=self.longest_line,
            languages=languages,
            histogram=compute_histogram(self.characters, 0, characters.p99),
        )


def compute_statistics(pairs: Iterable[Pair]) -> CorpusStatistics:
    """Compute the statistics of pairs in one pass.

    print(compute_statistics(read_pairs(CorpusSettings(phrasebook=1000))).notes)
    """
    source, target, both = SideCounts(), SideCounts(), TextSet()
    ratios: Counter[float] = Counter()
    moments = LengthMoments()
    sample: list[Pair] = []
    random = Random(1)
    repeated = equal = number = 0
    for number, pair in enumerate(pairs, 1):
        source.add(pair.source, number)
        target.add(pair.target, number)
        repeated += not both.add(pair.source, pair.target)
        equal += pair.source == pair.target
        x, y = math.log(len(pair.source.encode()) or 1), math.log(len(pair.target.encode()) or 1)
        moments.add(x, y)
        ratios[round((y - x) / RATIO_STEP)] += 1
        if len(sample) < LANGUAGE_SAMPLE:
            sample.append(pair)
        elif (index := random.randrange(number)) < LANGUAGE_SAMPLE:
            sample[index] = pair
    if not number:
        raise UserError("there are no pairs to look at")
    spoken, notes = guess_languages(sample)
    result = CorpusStatistics(
        pairs=number,
        source=source.summary(spoken[0]),
        target=target.summary(spoken[1]),
        ratio=Distribution.of(Counter({math.exp(RATIO_STEP * step): count for step, count in ratios.items()})),
        ratio_histogram=compute_histogram(ratios, -math.log(4) / RATIO_STEP, math.log(4) / RATIO_STEP),
        length_correlation=moments.correlation(),
        repeated_pairs=repeated,
        equal_sides=equal,
        notes=notes,
    )
    return replace(result, notes=[*notes, *list_warnings(result)])


def add_overlap(found: CorpusStatistics, against: Overlap) -> CorpusStatistics:
    """Return the statistics with what the corpus shares with another one, and a note about shared sources."""
    shared = against.shared_sources
    note = (
        f"{shared:,} of {found.pairs:,} sources are also in {against.name}: scores on them say little about new text; "
        "dragoman data split makes parts that share no source"
    )
    return replace(found, against=against, notes=[*found.notes, *([note] if shared else [])])


class LengthMoments:
    """Running sums for the correlation of two quantities."""

    def __init__(self) -> None:
        self.n, self.x, self.y, self.xx, self.yy, self.xy = 0, 0.0, 0.0, 0.0, 0.0, 0.0

    def add(self, x: float, y: float) -> None:
        self.n += 1
        dx, dy = x - self.x, y - self.y  # Welford: against the mean so far, so that nothing cancels
        self.x += dx / self.n
        self.y += dy / self.n
        self.xx += dx * (x - self.x)
        self.yy += dy * (y - self.y)
        self.xy += dx * (y - self.y)

    def correlation(self) -> float:
        return self.xy / math.sqrt(self.xx * self.yy) if self.xx > 0 and self.yy > 0 else 0.0


def guess_languages(sample: Sequence[Pair]) -> tuple[list[dict[str, float]], list[str]]:
    """Return the shares of the languages guessed on each side, and a sentence about them."""
    try:
        languages = LanguageGuesser()
    except UserError as fault:
        return [{}, {}], [str(fault)]
    shares: list[dict[str, float]] = []
    looks: list[str] = []
    for name, texts in (("source", [p.source for p in sample]), ("target", [p.target for p in sample])):
        if not any(texts):  # plain text has targets alone
            shares.append({})
            continue
        counts = Counter(languages.guess(text) for text in texts)
        shares.append({code: count / len(texts) for code, count in counts.most_common(5)})
        best = counts.most_common(1)[0][0]
        looks.append(f"{name} looks like {best or 'no language'} ({counts[best] / len(texts):.0%})")
    return shares, [", ".join(looks)] if looks else []


def list_warnings(found: CorpusStatistics) -> list[str]:
    """Return sentences about what seems wrong."""
    notes = []
    sourced = found.source.empty < found.pairs
    one, other = (next(iter(side.languages), "") for side in (found.source, found.target))
    if one and one == other:
        notes.append(f"both sides look like {one}; is one of the files the wrong one?")
    if sourced and found.pairs >= 100 and found.length_correlation < 0.3:
        notes.append(
            f"long sources do not have long targets (correlation {found.length_correlation:.2f}); "
            "do the lines of the two sides belong together?"
        )
    counts = (
        ("empty sources", found.source.empty if sourced else 0),
        ("empty targets", found.target.empty),
        ("pairs with two equal sides", found.equal_sides),
        ("repeated pairs", found.repeated_pairs),
    )
    notes += [f"{what}: {count:,}" for what, count in counts if count]
    return notes


def compute_histogram(counts: Counter[float], low: float, high: float, bars: int = 20) -> list[int]:
    """Count in equal bins from low to high; the first and the last include values beyond."""
    found = [0] * bars
    for value, count in counts.items():
        bin_index = int((value - low) / ((high - low) or 1) * bars)
        found[min(max(bin_index, 0), bars - 1)] += count
    return found


def render_sparkline(counts: Sequence[int]) -> str:
    """A small figure of bars; only an empty one is blank.

    assert render_sparkline([0, 1, 8]) == " ▁█"
    """
    most = max(counts)
    return "".join(BARS[math.ceil(count / most * len(BARS)) - 1] if count else " " for count in counts)


def render_statistics(found: CorpusStatistics) -> RenderableType:
    """Render the statistics as a table."""
    table = Table(title=f"{found.pairs:,} pairs", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("", "total", "mean", "5 %", "median", "95 %", "99 %", "max", "figure"):
        table.add_column(name, justify="left" if name in ("", "figure") else "right", no_wrap=True)

    def row(name: str, spread: Distribution, total: str, digits: int, figure: str) -> None:
        shown = [f"{value:,.{digits if i else max(digits, 1)}f}" for i, value in enumerate(astuple(spread))]
        table.add_row(name, total, *shown, figure)

    sourced = found.source.empty < found.pairs
    for name, side in [*([("source", found.source)] if sourced else []), ("target", found.target)]:
        row(f"{name} words", side.words, f"{side.total_words:,}", 0, "")
        row(f"{name} characters", side.characters, f"{side.total_characters:,}", 0, render_sparkline(side.histogram))
    if sourced:
        row("target : source bytes", found.ratio, "", 2, render_sparkline(found.ratio_histogram))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("repeated", f"{found.source.repeated:,} sources, {found.target.repeated:,} targets")
    facts.add_row("longest", f"source line {found.source.longest_line:,}, target line {found.target.longest_line:,}")
    if sourced:
        facts.add_row(
            "length correlation", f"{found.length_correlation:.2f} (1: both sides grow together, 0: unrelated)"
        )
    if found.against:
        other = found.against
        facts.add_row("against", Text(f"{other.name}, {other.other_pairs:,} pairs"))
        facts.add_row("shared", f"{other.shared_sources:,} sources, {other.shared_pairs:,} pairs")
        for name, lacks in (("source", other.source), ("target", other.target)):
            such = f", such as {' '.join(lacks.examples)}" if lacks.examples else ""
            told = f"{lacks.unknown:,} of {lacks.words:,} ({lacks.share:.2%}){such}"
            facts.add_row(f"unknown {name} words", Text(told))
    for note in found.notes:
        facts.add_row("note", Text(note))
    return Group(table, facts)
