"""Word alignment: which words of two sentences are translations of each other, learned from sentence pairs alone.

    aligner = train_aligner(source_lines, target_lines)
    for links in aligner.align(source_lines, target_lines): ...

All models are trained in both directions at once by expectation maximisation. They share a translation table, which has
an entry for every two words that occur in one pair, and differ in how a position is chosen:

    ibm1       every position is as likely as any other (Brown 1993)
    ibm2       a table p(i | j, I)
    diagonal   one number, the tension towards the diagonal, instead of that table (Dyer 2013)
    hmm        depends on the distance from the position of the word before (Vogel 1996)

Each starts from the translation table of the one before it. With `agree`, the two directions are trained to agree: a
link counts by the product of both posteriors (Liang, Taskar and Klein 2006). That costs nothing and halves the errors,
but what rises from iteration to iteration is then no longer the likelihood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dragoman.config.settings import parse_settings
from dragoman.errors import UserError
from dragoman.hardware import usable_cores
from dragoman.smt import alignment_kernels as kernels
from dragoman.smt.alignment_kernels import Block, PositionCounts, Positions, Side, WordTable
from dragoman.smt.compiled import Array
from dragoman.smt.settings import AGREEMENT, AlignerSettings
from dragoman.smt.symmetrization import SYMMETRIZATIONS, Links

KINDS = {"ibm1": kernels.MODEL1, "ibm2": kernels.MODEL2, "diagonal": kernels.DIAGONAL, "hmm": kernels.HMM}
BLOCK_CELLS = 40_000_000  # that are held at a time, with two numbers of four bytes each
RUNS = 8  # parts of a block that threads work on
PRUNE_BELOW = 1e-6  # entries less likely than this in both directions are dropped after two iterations of IBM Model 1
PRIOR_LENGTH = 64  # sentences up to this length have a table of their own in IBM Model 2
SMALLEST_SUM = 1e-30  # keeps divisions by nothing from failing
HMM_LENGTH = 1000  # longer sentences are aligned by IBM Model 1, whose memory does not grow with their square


class Progress(NamedTuple):
    """What is known after an iteration."""

    kind: str
    iteration: int
    log_likelihood: float  # of both directions, per word
    entries: int  # of the translation table


class Aligner:
    """A trained alignment model of two languages, for new pairs as well as for those that it learned from."""

    def __init__(
        self,
        words: tuple[dict[str, int], dict[str, int]],
        table: WordTable,
        positions: Positions,
        settings: AlignerSettings,
    ) -> None:
        self.words, self.table, self.positions, self.settings = words, table, positions, settings
        self.threads = usable_cores()

    def encode(self, lines: Iterable[str], side: int) -> Side:
        """Return the word ids of tokenised lines; unknown words get one that is in no row of the table."""
        words, unknown = self.words[side], len(self.words[side])
        return make_side([[words.get(word, unknown) for word in tokenize_line(line, self.settings)] for line in lines])

    def align(self, source: Iterable[str], target: Iterable[str], *, at_a_time: int = 10_000) -> Iterator[Links]:
        """Yield the links of each pair as (source, target) positions, in order."""
        pairs = zip(source, target, strict=True)
        while some := list(islice(pairs, at_a_time)):
            sides = self.encode((one for one, _ in some), 0), self.encode((two for _, two in some), 1)
            for block in split_blocks(*sides):
                found = self.link(block)
                sizes = np.diff(block.source.starts), np.diff(block.target.starts)
                for first, i, j in zip(block.first_cell[:-1], *sizes, strict=True):
                    yield [(int(a), int(b)) for a, b in np.argwhere(found[first : first + i * j].reshape(i, j))]

    def link(self, block: Block) -> Array:
        """Return for every cell of a block whether it is a link."""
        settings, positions = self.settings, self.positions
        if block.longest > HMM_LENGTH:
            positions = positions._replace(kind=kernels.MODEL1)
        if settings.symmetrize == AGREEMENT:
            forward, backward, _ = self.infer(block, positions)
            return forward * backward >= settings.threshold**2
        cells, out = self.read(block), np.zeros(int(block.first_cell[-1]), np.bool_)
        heuristic = SYMMETRIZATIONS[settings.symmetrize]
        self.run(
            np.diff(block.first_cell), kernels.link_pairs, block, self.table, positions, heuristic, then=(*cells, out)
        )
        return out

    def read(self, block: Block) -> tuple[Array, Array]:
        """Return the translation probabilities of every cell in both directions."""
        size = int(block.first_cell[-1])
        cells = np.empty(size, np.float32), np.empty(size, np.float32)
        self.run(np.diff(block.row_starts), kernels.visit_rows, block, self.table, False, then=cells)
        return cells

    def infer(
        self, block: Block, positions: Positions, *, agree: bool = False, counts: PositionCounts | None = None
    ) -> tuple[Array, Array, float]:
        """Return the posteriors of every cell in both directions, and the log-likelihood; add to the counts."""
        cells = self.read(block)

        def work(first: int, last: int) -> tuple[float, PositionCounts]:
            made = empty_counts(self.table, positions)
            return kernels.infer_pairs(block, self.table, positions, agree, first, last, *cells, made), made

        likelihood = 0.0
        for found, made in self.run(np.diff(block.first_cell), work):
            likelihood += found
            for total, part in zip(counts or (), made if counts else (), strict=True):
                total += part
        return *cells, likelihood

    def iterate(self, source: Side, target: Side, tick: Callable[[int], object] = id) -> float:
        """Make one iteration of expectation maximisation; return the log-likelihood before it, per word."""
        expected = self.table._replace(
            forward=np.zeros_like(self.table.forward), backward=np.zeros_like(self.table.backward)
        )
        counts = empty_counts(self.table, self.positions)
        likelihood = 0.0
        for block in split_blocks(source, target):
            *cells, found = self.infer(block, self.positions, agree=self.settings.agree, counts=counts)
            self.run(np.diff(block.row_starts), kernels.visit_rows, block, expected, True, then=cells)
            likelihood += found
            tick(int(block.first_cell[-1]))
        self.table = normalise_table(expected, counts)
        self.positions = update_positions(self.positions, counts)
        return likelihood / max(len(source.ids) + len(target.ids), 1)

    def run(self, weights: Array, work: Callable[..., Any], *before: Any, then: Sequence[Any] = ()) -> list[Any]:
        """Call `work(*before, first, last, *then)` in threads, on runs of about the same weight; return all results.

        How many runs there are does not depend on the threads, so sums over them are the same on every machine.
        """
        total = np.concatenate([[0], np.cumsum(weights)])
        cuts = np.searchsorted(total, np.linspace(0, total[-1], RUNS + 1)[1:-1])
        edges = [0, *(int(cut) for cut in cuts), len(weights)]
        with ThreadPoolExecutor(self.threads) as pool:
            futures = [pool.submit(work, *before, *run, *then) for run in pairwise(edges)]
            return [future.result() for future in futures]

    def save(self, folder: Path) -> None:
        """Write the model into a folder: tensors, words and settings."""
        arrays = {**self.table._asdict(), "parameters": self.positions.parameters, "priors": self.positions.priors}
        save_file(arrays, folder / "aligner.safetensors")
        for name, words in zip(("source", "target"), self.words, strict=True):
            (folder / f"{name}.words").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        about = {"kind": list(KINDS)[self.positions.kind], "settings": self.settings.model_dump()}
        (folder / "aligner.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Aligner:
        """Read a model that `save` wrote."""
        try:
            about = json.loads((folder / "aligner.json").read_text(encoding="utf-8"))
            settings, kind = parse_settings(AlignerSettings, about["settings"]), KINDS[about["kind"]]
            arrays = load_file(folder / "aligner.safetensors")
            positions = Positions(kind, settings.null, arrays.pop("parameters"), arrays.pop("priors"))
            table = WordTable(**arrays)
            texts = [(folder / f"{name}.words").read_text(encoding="utf-8") for name in ("source", "target")]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(f"{str(folder)!r} holds no alignment model that can be read: {error}") from error
        words = [{word: index for index, word in enumerate(text.split("\n")[:-1])} for text in texts]
        return cls((words[0], words[1]), table, positions, settings)


def train_aligner(
    source: Iterable[str],
    target: Iterable[str],
    settings: AlignerSettings | None = None,
    *,
    report: Callable[[Progress], object] = id,
    show: Callable[[float], object] = id,
) -> Aligner:
    """Learn to align from tokenised lines. `report` gets every iteration, `show` the share that is done."""
    settings = settings or AlignerSettings()
    settings.check()
    words: tuple[dict[str, int], dict[str, int]] = ({}, {})
    sides: tuple[list[list[int]], list[list[int]]] = ([], [])
    for pair in zip(source, target, strict=True):
        lists = [tokenize_line(line, settings) for line in pair]
        if not all(0 < len(each) <= settings.max_length for each in lists):
            continue
        for ids, known, each in zip(sides, words, lists, strict=True):
            ids.append([known.setdefault(word, len(known)) for word in each])
    if not sides[0]:
        raise UserError(f"there is no pair to learn from: all are empty or longer than {settings.max_length} words")
    one, two = make_side(sides[0]), make_side(sides[1])
    del sides
    aligner = Aligner(words, WordTable(*[np.zeros(0)] * 6), initial_positions("ibm1", settings), settings)
    aligner.table = list_word_pairs(one, two, (len(words[0]), len(words[1])), aligner.run)
    done, cells = 0, int((np.diff(one.starts) * np.diff(two.starts)).sum())
    total = cells * sum(getattr(settings, kind) for kind in KINDS)

    def tick(count: int) -> None:
        nonlocal done
        done += count
        show(done / total)

    for kind in KINDS:
        iterations = getattr(settings, kind)
        if iterations:
            aligner.positions = initial_positions(kind, settings)
        for iteration in range(1, iterations + 1):
            likelihood = aligner.iterate(one, two, tick)
            if kind == "ibm1" and iteration == 2:
                aligner.table = prune_table(aligner.table)
            report(Progress(kind, iteration, likelihood, len(aligner.table.columns)))
    return aligner


def tokenize_line(line: str, settings: AlignerSettings) -> list[str]:
    """Return the words of a tokenised line."""
    return (line.lower() if settings.lowercase else line).split()


def make_side(sentences: Sequence[Sequence[int]]) -> Side:
    """Join sentences of word ids."""
    starts = np.concatenate([[0], np.cumsum([len(each) for each in sentences], dtype=np.int64)])
    return Side(np.fromiter((word for each in sentences for word in each), np.int32, int(starts[-1])), starts)


def split_blocks(source: Side, target: Side) -> Iterator[Block]:
    """Yield all pairs in blocks of a bounded number of cells."""
    cells = np.concatenate([[0], np.cumsum(np.diff(source.starts) * np.diff(target.starts))])
    first, pairs = 0, len(cells) - 1
    while first < pairs:
        last = max(int(np.searchsorted(cells, cells[first] + BLOCK_CELLS, side="right")) - 1, first + 1)
        yield make_block(*(take(side, first, last) for side in (source, target)))
        first = last


def take(side: Side, first: int, last: int) -> Side:
    """Return the sentences from `first` to before `last`."""
    starts = side.starts[first : last + 1]
    return Side(side.ids[starts[0] : starts[-1]], starts - starts[0])


def make_block(source: Side, target: Side) -> Block:
    """Group the source words of some pairs."""
    sizes = np.diff(source.starts), np.diff(target.starts)
    first_cell = np.concatenate([[0], np.cumsum(sizes[0] * sizes[1])])
    order = np.argsort(source.ids, kind="stable")
    rows, begin = np.unique(source.ids[order], return_index=True)
    pairs = np.searchsorted(source.starts, order, side="right") - 1
    longest = int(max(side.max(initial=1) for side in sizes))
    row_starts = np.concatenate([begin, [len(order)]])
    return Block(source, target, first_cell, rows, row_starts, pairs, order - source.starts[pairs], longest)


def list_word_pairs(source: Side, target: Side, words: tuple[int, int], run: Callable[..., Any]) -> WordTable:
    """Return a uniform table over all pairs of words that occur in one sentence pair."""
    occurrences = np.bincount(source.ids, minlength=words[0])
    order = np.argsort(source.ids, kind="stable")
    row_pairs = (np.searchsorted(source.starts, order, side="right") - 1).astype(np.int32)
    rows = np.concatenate([[0], np.cumsum(occurrences)]), row_pairs, target, words[1]
    counts = np.zeros(words[0], np.int64)
    run(occurrences, kernels.list_cooccurrences, *rows, then=(counts, np.zeros(0, np.int32)))
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = np.empty(int(starts[-1]), np.int32)
    run(occurrences, kernels.list_cooccurrences, *rows, then=(starts, columns))
    uniform = [np.full(len(columns), 1.0 / count, np.float32) for count in (words[1], words[0])]
    nulls = [np.append(np.full(count, 1.0 / count), kernels.MISSING) for count in (words[1], words[0])]
    return WordTable(np.append(starts, starts[-1]), columns, *uniform, *nulls)  # the last row is that of unknown words


def normalise_table(expected: WordTable, counts: PositionCounts) -> WordTable:
    """Return probabilities in proportion to expected counts."""
    rows = np.repeat(np.arange(len(expected.starts) - 1), np.diff(expected.starts))
    row_sums = np.bincount(rows, expected.forward, len(expected.null_source))
    column_sums = np.bincount(expected.columns, expected.backward, len(expected.null_target))
    forward = expected.forward / np.maximum(row_sums, SMALLEST_SUM)[rows]
    backward = expected.backward / np.maximum(column_sums, SMALLEST_SUM)[expected.columns]
    nulls = [null / max(null[:-1].sum(), SMALLEST_SUM) for null in (counts.null_target, counts.null_source)]
    for null in nulls:
        null[-1] = kernels.MISSING
    return WordTable(expected.starts, expected.columns, forward.astype(np.float32), backward.astype(np.float32), *nulls)


def prune_table(table: WordTable) -> WordTable:
    """Drop what both directions hold to be very unlikely."""
    keep = (table.forward > PRUNE_BELOW) | (table.backward > PRUNE_BELOW)
    starts = np.concatenate([[0], np.cumsum(keep)])[table.starts]
    return table._replace(
        starts=starts, columns=table.columns[keep], forward=table.forward[keep], backward=table.backward[keep]
    )


def initial_positions(kind: str, settings: AlignerSettings) -> Positions:
    """Return a model before its first iteration: all positions alike, or near to where they usually are."""
    parameters = np.ones((2, kernels.BUCKETS))
    if kind == "diagonal":
        parameters *= 4.0
    elif kind == "hmm":
        parameters *= np.exp(-np.abs(np.arange(kernels.BUCKETS) - kernels.WINDOW - 2.0) / 2)  # most jumps are by 1
    length = PRIOR_LENGTH if kind == "ibm2" else 1
    return Positions(KINDS[kind], settings.null, parameters, np.ones((2, length, length, length)))


def empty_counts(table: WordTable, positions: Positions) -> PositionCounts:
    """Return counts of nothing."""
    nulls = np.zeros(len(table.null_target)), np.zeros(len(table.null_source))
    return PositionCounts(*nulls, np.zeros((2, 2, kernels.BUCKETS)), np.zeros_like(positions.priors))


def update_positions(positions: Positions, counts: PositionCounts) -> Positions:
    """Return the model that makes the counts likeliest."""
    parameters, priors = positions.parameters.copy(), positions.priors.copy()
    for direction in range(2):
        expected, norms = counts.parameters[direction]
        if positions.kind == kernels.HMM:
            # How often a jump was made, divided by how often it could have been made. Because jump probabilities are
            # normalised over the positions of a sentence, this maximises a lower bound that touches the likelihood
            # (Hunter 2004), so the likelihood never falls.
            jumps = np.maximum(expected, 1e-6) / np.maximum(norms, 1e-6)
            parameters[direction] = jumps / jumps.sum()
        elif positions.kind == kernels.DIAGONAL:
            newton = expected[0] / max(expected[1], 1e-9)
            parameters[direction] = np.clip(parameters[direction] + 0.5 * newton, 0.1, 50.0)
        elif positions.kind == kernels.MODEL2:
            sums = counts.priors[direction].sum(2, keepdims=True)
            shares = counts.priors[direction] / np.maximum(sums, SMALLEST_SUM)
            priors[direction] = np.where(sums > 0, shares, priors[direction])
    return positions._replace(parameters=parameters, priors=priors)
