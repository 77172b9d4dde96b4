"""Statistics of a corpus, computed in one pass, with notes about likely errors.

`compute_statistics` returns the numbers as a CorpusStatistics, and `render_statistics` shows them as a table. Memory
stays small for millions of pairs: lengths are stored as counts, texts as 64-bit hashes, and only LANGUAGE_SAMPLE pairs
are kept to identify their languages.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dragoman.data.cleaning import LanguageGuesser, TextSet
from dragoman.data.overlap import DomainShift, Overlap, OverlapCounter, PairSample
from dragoman.errors import UserError
from dragoman.types import Pair

LANGUAGE_SAMPLE = 500  # number of pairs, sampled at random, whose languages are guessed
RATIO_STEP = 0.02  # width of the bins in which log-ratios of lengths are counted: 2 %
MIN_CORRELATION = 0.3  # a lower correlation of lengths leads to a warning
MIN_PAIRS_FOR_CORRELATION = 100  # the correlation of fewer pairs is too uncertain for a warning
BARS = "▁▂▃▄▅▆▇█"  # of histograms, by height


@dataclass(frozen=True, slots=True)
class Distribution:
    """The mean, some percentiles and the maximum of a quantity."""

    mean: float
    p5: float
    median: float
    p95: float
    p99: float
    max: float

    @classmethod
    def from_counts(cls, counts: Counter[float]) -> Distribution:
        """Return the distribution of a quantity, given how often each of its values occurs."""
        mean = math.fsum(value * count for value, count in counts.items()) / counts.total()
        p5, median, p95, p99 = compute_percentiles(counts, (0.05, 0.5, 0.95, 0.99))
        return cls(mean, p5, median, p95, p99, max(counts))


def compute_percentiles(counts: Counter[float], fractions: Sequence[float]) -> list[float]:
    """Return, for each fraction, the smallest value that at least this fraction of all values does not exceed."""
    values = sorted(counts)
    cumulative = list(accumulate(counts[value] for value in values))
    return [values[bisect_left(cumulative, fraction * cumulative[-1])] for fraction in fractions]


@dataclass(frozen=True, slots=True)
class SideStatistics:
    words: Distribution  # of the lengths in words
    characters: Distribution  # of the lengths in characters
    total_words: int
    total_characters: int
    empty: int
    repeated: int  # number of texts that equal an earlier text
    longest_line: int  # line number of the longest text, counted from 1
    languages: dict[str, float]  # language code: fraction of the sample, most frequent first; "" means undecided
    histogram: list[int]  # of lengths in characters, from 0 to the 99th percentile


@dataclass(frozen=True, slots=True)
class CorpusStatistics:
    """The output of `dragoman data stats`.

    A ratio is the length of the target divided by that of the source, both in UTF-8 bytes, which compare well between
    scripts.
    """

    pairs: int
    source: SideStatistics
    target: SideStatistics
    ratio: Distribution
    ratio_histogram: list[int]  # of log-ratios, from 1:4 to 4:1; the first and last bin include values beyond
    length_correlation: float  # of log-lengths, from -1 to 1; aligned lines have about 0.9, shuffled ones 0
    repeated_pairs: int
    equal_sides: int
    notes: list[str]  # sentences about languages and likely errors
    against: Overlap | None = None  # overlap with another corpus, if the user named one

    @property
    def has_sources(self) -> bool:
        return self.source.empty < self.pairs


class SideCounts:
    """Running counts over the texts of one side; `summarize` computes the statistics from them."""

    def __init__(self) -> None:
        self.words: Counter[float] = Counter()  # number of texts by their length in words
        self.characters: Counter[float] = Counter()  # number of texts by their length in characters
        self.seen = TextSet()
        self.longest = (0, -1)  # length of the longest text and minus its line number: of equal lengths, the first wins

    def add(self, text: str, line: int) -> None:
        self.words[len(text.split())] += 1
        self.characters[len(text)] += 1
        self.seen.add(text)
        self.longest = max(self.longest, (len(text), -line))

    def summarize(self, languages: dict[str, float]) -> SideStatistics:
        characters = Distribution.from_counts(self.characters)
        return SideStatistics(
            words=Distribution.from_counts(self.words),
            characters=characters,
            total_words=int(sum(size * count for size, count in self.words.items())),
            total_characters=int(sum(size * count for size, count in self.characters.items())),
            empty=self.words[0],
            repeated=self.words.total() - self.seen.count,
            longest_line=-self.longest[1],
            languages=languages,
            histogram=compute_histogram(self.characters, 0, characters.p99),
        )


class RunningCorrelation:
    """The correlation of two quantities x and y, updated by Welford's method, which is numerically stable."""

    def __init__(self) -> None:
        self.n, self.mean_x, self.mean_y = 0, 0.0, 0.0
        self.xx, self.yy, self.xy = 0.0, 0.0, 0.0  # sums of products of deviations from the means

    def add(self, x: float, y: float) -> None:
        self.n += 1
        dx, dy = x - self.mean_x, y - self.mean_y
        self.mean_x += dx / self.n
        self.mean_y += dy / self.n
        self.xx += dx * (x - self.mean_x)
        self.yy += dy * (y - self.mean_y)
        self.xy += dx * (y - self.mean_y)

    def compute(self) -> float:
        """Return the correlation, or 0 if x or y is constant."""
        return self.xy / math.sqrt(self.xx * self.yy) if self.xx > 0 and self.yy > 0 else 0.0


def compute_statistics(pairs: Iterable[Pair], against: OverlapCounter | None = None) -> CorpusStatistics:
    """Compute the statistics of pairs in one pass, and their overlap with another corpus if `against` is given.

    print(compute_statistics(read_pairs(CorpusSettings(phrasebook=1000))).notes)
    """
    source, target, seen = SideCounts(), SideCounts(), TextSet()
    log_ratios: Counter[float] = Counter()  # in units of RATIO_STEP
    correlation = RunningCorrelation()
    sample = PairSample(LANGUAGE_SAMPLE)
    equal = count = 0
    for count, pair in enumerate(pairs, 1):
        source.add(pair.source, count)
        target.add(pair.target, count)
        seen.add(pair.source, pair.target)
        equal += pair.source == pair.target
        log_source, log_target = (math.log(len(text.encode()) or 1) for text in (pair.source, pair.target))
        correlation.add(log_source, log_target)
        log_ratios[round((log_target - log_source) / RATIO_STEP)] += 1
        sample.add(pair)
        if against:
            against.count(pair)
    if not count:
        raise UserError("the corpus has no pairs; check its files")
    (source_languages, target_languages), notes = guess_languages(sample.pairs)
    ratios = Counter({math.exp(RATIO_STEP * step): number for step, number in log_ratios.items()})
    result = CorpusStatistics(
        pairs=count,
        source=source.summarize(source_languages),
        target=target.summarize(target_languages),
        ratio=Distribution.from_counts(ratios),
        ratio_histogram=compute_histogram(log_ratios, -math.log(4) / RATIO_STEP, math.log(4) / RATIO_STEP),
        length_correlation=correlation.compute(),
        repeated_pairs=count - seen.count,
        equal_sides=equal,
        notes=notes,
        against=against.compute_overlap() if against else None,
    )
    return replace(result, notes=[*notes, *list_warnings(result)])


def guess_languages(sample: Sequence[Pair]) -> tuple[list[dict[str, float]], list[str]]:
    """Return the fraction of each language on the source and the target side, and notes about them."""
    try:
        languages = LanguageGuesser()
    except UserError as error:  # py3langid is not installed
        return [{}, {}], [str(error)]
    fractions: list[dict[str, float]] = []
    descriptions: list[str] = []
    for name in ("source", "target"):
        texts = [getattr(pair, name) for pair in sample]
        counts = Counter(map(languages.guess, texts)) if any(texts) else Counter()  # plain text has no sources
        fractions.append({code: count / len(texts) for code, count in counts.most_common(5)})
        if fractions[-1]:
            code, fraction = next(iter(fractions[-1].items()))  # the most frequent language
            descriptions.append(f"{name} looks like {code or 'no language'} ({fraction:.0%})")
    return fractions, [", ".join(descriptions)] if descriptions else []


def list_warnings(stats: CorpusStatistics) -> list[str]:
    """Return sentences about likely errors in a corpus."""
    notes = []
    source_language, target_language = (next(iter(side.languages), "") for side in (stats.source, stats.target))
    if source_language and source_language == target_language:
        notes.append(f"both sides look like {source_language}; is one of the files the wrong one?")
    enough = stats.has_sources and stats.pairs >= MIN_PAIRS_FOR_CORRELATION
    if enough and stats.length_correlation < MIN_CORRELATION:
        notes.append(
            f"long sources do not have long targets (correlation {stats.length_correlation:.2f}); "
            "do the lines of the two sides belong together?"
        )
    counts = (
        ("empty sources", stats.source.empty if stats.has_sources else 0),
        ("empty targets", stats.target.empty),
        ("pairs with two equal sides", stats.equal_sides),
        ("repeated pairs", stats.repeated_pairs),
    )
    notes += [f"{what}: {count:,}" for what, count in counts if count]
    if stats.against and stats.against.shared_sources:
        notes.append(
            f"{stats.against.shared_sources:,} of {stats.pairs:,} sources are also in {stats.against.name}: "
            "scores on them say little about new text; dragoman data split makes parts that share no source"
        )
    return notes


def compute_histogram(counts: Counter[float], low: float, high: float, bars: int = 20) -> list[int]:
    """Count values in `bars` equal bins from `low` to `high`; the first and the last bin include values beyond."""
    histogram = [0] * bars
    for value, count in counts.items():
        bin_index = int((value - low) / ((high - low) or 1) * bars)
        histogram[min(max(bin_index, 0), bars - 1)] += count
    return histogram


def render_sparkline(counts: Sequence[int]) -> str:
    """Draw counts as a line of block characters; only a count of 0 is blank.

    assert render_sparkline([0, 1, 8]) == " ▁█"
    """
    highest = max(counts)
    return "".join(BARS[math.ceil(count / highest * len(BARS)) - 1] if count else " " for count in counts)


def describe_shift(shift: DomainShift) -> str:
    return (
        f"{shift.ratio:.2f} times that of unseen lines of the other corpus "
        f"({shift.perplexity:,.0f} : {shift.held_out_perplexity:,.0f}; 1: same domain)"
    )


def render_statistics(stats: CorpusStatistics) -> RenderableType:
    """Render the statistics as a table."""
    table = Table(title=f"{stats.pairs:,} pairs", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("", "total", "mean", "5 %", "median", "95 %", "99 %", "max", "figure"):
        table.add_column(name, justify="left" if name in ("", "figure") else "right", no_wrap=True)

    def add_row(name: str, distribution: Distribution, total: str, digits: int, figure: str) -> None:
        mean, *others = astuple(distribution)
        values = [f"{mean:,.{max(digits, 1)}f}", *(f"{value:,.{digits}f}" for value in others)]
        table.add_row(name, total, *values, figure)

    for name, side in (("source", stats.source), ("target", stats.target)):
        if side is stats.target or stats.has_sources:
            figure = render_sparkline(side.histogram)
            add_row(f"{name} words", side.words, f"{side.total_words:,}", 0, "")
            add_row(f"{name} characters", side.characters, f"{side.total_characters:,}", 0, figure)
    if stats.has_sources:
        add_row("target : source bytes", stats.ratio, "", 2, render_sparkline(stats.ratio_histogram))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("repeated", f"{stats.source.repeated:,} sources, {stats.target.repeated:,} targets")
    facts.add_row("longest", f"source line {stats.source.longest_line:,}, target line {stats.target.longest_line:,}")
    if stats.has_sources:
        facts.add_row(
            "length correlation", f"{stats.length_correlation:.2f} (1: both sides grow together, 0: unrelated)"
        )
    if stats.against:
        other = stats.against
        facts.add_row("against", Text(f"{other.name}, {other.other_pairs:,} pairs"))
        facts.add_row("shared", f"{other.shared_sources:,} sources, {other.shared_pairs:,} pairs")
        for name, words in (("source", other.source), ("target", other.target)):
            examples = f", such as {' '.join(words.examples)}" if words.examples else ""
            rates = [
                f"{unknown:,} of {total:,} ({unknown / max(total, 1):.2%})"
                for unknown, total in ((words.unknown, words.words), (words.unknown_types, words.types))
            ]
            facts.add_row(f"{name} words not shared", Text(f"{rates[0]}; different ones: {rates[1]}{examples}"))
            if words.shift:
                facts.add_row(f"{name} perplexity", Text(describe_shift(words.shift)))
    for note in stats.notes:
        facts.add_row("note", Text(note))
    return Group(table, facts)
