"""Word alignment: which words of two sentences are translations of each other, learned from sentence pairs alone.

    aligner = train_aligner(source_lines, target_lines)
    for links in aligner.align(source_lines, target_lines): ...

All models are trained in both directions by expectation maximisation (EM). They share a translation table, which has an
entry for every two words that occur in the same sentence pair, and differ in the probability of positions:

    ibm1       all positions are equally likely (Brown et al. 1993)
    ibm2       a table p(i | j, I)
    diagonal   instead of that table, one parameter: the tension towards the diagonal (Dyer et al. 2013)
    hmm        depends on the distance from the position of the previous word (Vogel et al. 1996)

Each model starts from the translation table of the one trained before it. With `agree`, the two directions are trained
jointly: a link counts by the product of its posteriors in both directions (Liang, Taskar and Klein 2006). That takes no
more time and halves the errors, but EM then no longer maximises the likelihood, which may fall.
"""

from __future__ import annotations

import json
from array import array
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
from dragoman.smt.settings import AGREEMENT, ALIGNER_FILE, MAX_LENGTH, AlignerSettings
from dragoman.smt.symmetrization import SYMMETRIZATIONS, Links

KINDS = {"ibm1": kernels.MODEL1, "ibm2": kernels.MODEL2, "diagonal": kernels.DIAGONAL, "hmm": kernels.HMM}
BLOCK_CELLS = 40_000_000  # maximum number of cells, (source, target) positions of a pair, in memory: 8 bytes each
TASKS = 8  # number of parts that the work on a block is divided into, for threads
PRUNE_BELOW = 1e-6  # entries less likely than this in both directions are dropped after two iterations of IBM Model 1
PRIOR_LENGTH = 64  # IBM Model 2 has position probabilities for sentences shorter than this; others are uniform
MIN_NULL = 1e-3
RAREST_JUMP = 1e-7  # minimum probability of a jump of the HMM, relative to the most likely jump


class IterationReport(NamedTuple):
    """The result of one iteration of EM."""

    kind: str
    iteration: int
    log_likelihood: float  # of both directions, per word
    entries: int  # number of entries of the translation table


class Aligner:
    """A trained alignment model of two languages, for its training pairs as well as for new ones."""

    def __init__(
        self,
        words: tuple[dict[str, int], dict[str, int]],
        table: WordTable,
        positions: Positions,
        settings: AlignerSettings,
    ) -> None:
        self.words, self.table, self.positions, self.settings = words, table, positions, settings
        self.threads = usable_cores()
        self.skipped_pairs = 0  # training pairs that were not used because they were empty or too long

    def encode(self, lines: Iterable[str], side: int) -> Side:
        """Return the word ids of tokenised lines (side 0: source, 1: target); all unknown words get the same id."""
        return self.encode_words((tokenize_line(line, self.settings) for line in lines), side)

    def encode_words(self, sentences: Iterable[Sequence[str]], side: int) -> Side:
        """Return the ids of the words of sentences; all unknown words get the same id."""
        ids, unknown = self.words[side], len(self.words[side])
        return make_side([ids.get(word, unknown) for word in sentence] for sentence in sentences)

    def align(self, source: Iterable[str], target: Iterable[str], *, chunk: int = 10_000) -> Iterator[Links]:
        """Yield the links of each pair of tokenised lines as (source, target) positions, `chunk` pairs at a time."""
        pairs = zip(source, target, strict=True)
        while lines := list(islice(pairs, chunk)):
            word_pairs = [[tokenize_line(line, self.settings) for line in pair] for pair in lines]
            parts = [split_long_pair(len(source), len(target)) for source, target in word_pairs]
            all_parts = [(pair, part) for pair, ranges in zip(word_pairs, parts, strict=True) for part in ranges]
            sides = [
                self.encode_words((pair[side][slice(*part[side])] for pair, part in all_parts), side) for side in (0, 1)
            ]
            links = self.align_encoded(sides[0], sides[1])
            for ranges in parts:
                yield [(i + i_range[0], j + j_range[0]) for i_range, j_range in ranges for i, j in next(links)]

    def align_encoded(self, source: Side, target: Side) -> Iterator[Links]:
        """Yield the links of each pair, given word ids."""
        for block in split_blocks(source, target):
            linked_cells = np.flatnonzero(self.link(block))
            edges = np.searchsorted(linked_cells, block.first_cell)  # of the links of each pair
            pairs = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
            target_lengths = np.diff(block.target.starts)[pairs]
            i, j = np.divmod(linked_cells - block.first_cell[pairs], target_lengths)
            links = list(zip(i.tolist(), j.tolist(), strict=True))
            for first, last in pairwise(edges.tolist()):
                yield links[first:last]

    def link(self, block: Block) -> Array:
        """Return for every cell of a block whether it is a link."""
        settings, positions = self.settings, self.positions
        if settings.symmetrize == AGREEMENT:
            forward, backward, _ = self.infer(block, positions)
            return forward * backward >= settings.threshold**2
        cells, out = self.read_cells(block), np.zeros(int(block.first_cell[-1]), np.bool_)
        arguments = block, self.table, positions, SYMMETRIZATIONS[settings.symmetrize]
        self.run_threads(np.diff(block.first_cell), kernels.link_pairs, *arguments, outputs=(*cells, out))
        return out

    def read_cells(self, block: Block) -> tuple[Array, Array]:
        size = int(block.first_cell[-1])
        cells = np.empty(size, np.float32), np.empty(size, np.float32)
        self.run_threads(np.diff(block.row_starts), kernels.visit_rows, block, self.table, False, outputs=cells)
        return cells

    def infer(
        self, block: Block, positions: Positions, *, agree: bool = False, counts: PositionCounts | None = None
    ) -> tuple[Array, Array, float]:
        """Return the posteriors of every cell in both directions, and the log-likelihood; add to the counts."""
        cells = self.read_cells(block)

        def infer_range(first: int, last: int) -> tuple[float, PositionCounts]:
            local_counts = empty_counts(self.table, positions)
            arguments = block, self.table, positions, agree, first, last, *cells, local_counts
            return kernels.infer_pairs(*arguments), local_counts

        log_likelihood = 0.0
        for partial, local_counts in self.run_threads(np.diff(block.first_cell), infer_range):
            log_likelihood += partial
            for total, local in zip(counts, local_counts, strict=True) if counts else ():
                total += local
        return *cells, log_likelihood

    def iterate(self, source: Side, target: Side, on_progress: Callable[[int], object] = lambda _: None) -> float:
        """Run one iteration of EM; return the log-likelihood before it, per word.

        `on_progress` gets the number of cells of every finished block.
        """
        expected = self.table._replace(
            forward=np.zeros_like(self.table.forward), backward=np.zeros_like(self.table.backward)
        )
        counts = empty_counts(self.table, self.positions)
        log_likelihood = 0.0
        for block in split_blocks(source, target):
            *cells, partial = self.infer(block, self.positions, agree=self.settings.agree, counts=counts)
            self.run_threads(np.diff(block.row_starts), kernels.visit_rows, block, expected, True, outputs=cells)
            log_likelihood += partial
            on_progress(int(block.first_cell[-1]))
        self.table = normalise_table(expected, counts)
        self.positions = update_positions(self.positions, counts)
        if self.settings.estimate_null and self.positions.kind == kernels.HMM:
            words = len(target.ids), len(source.ids)  # that each direction generates
            self.positions = self.positions._replace(p_null=np.clip(counts.p_null / words, MIN_NULL, 1 - MIN_NULL))
        return log_likelihood / max(len(source.ids) + len(target.ids), 1)

    def run_threads(
        self, weights: Array, work: Callable[..., Any], *inputs: Any, outputs: Sequence[Any] = ()
    ) -> list[Any]:
        """Call `work(*inputs, first, last, *outputs)` in threads, on ranges of similar weight; return all results.

        The number of ranges does not depend on the number of threads, so sums over them are equal on every machine.
        """
        sums = np.concatenate([[0], np.cumsum(weights)])
        inner_edges = np.searchsorted(sums, np.linspace(0, sums[-1], TASKS + 1)[1:-1])
        edges = [0, *inner_edges.tolist(), len(weights)]
        with ThreadPoolExecutor(self.threads) as pool:
            futures = [pool.submit(work, *inputs, *part, *outputs) for part in pairwise(edges)]
            return [future.result() for future in futures]

    def save(self, folder: Path) -> None:
        positions = {name: value for name, value in self.positions._asdict().items() if name != "kind"}
        save_file({**self.table._asdict(), **positions}, folder / "aligner.safetensors")
        for name, words in zip(("source", "target"), self.words, strict=True):
            (folder / f"{name}.words").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        about = {"kind": list(KINDS)[self.positions.kind], "settings": self.settings.model_dump()}
        (folder / ALIGNER_FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Aligner:
        """Read a model that `save` wrote; raise a UserError if it is damaged."""
        try:
            about = json.loads((folder / ALIGNER_FILE).read_text(encoding="utf-8"))
            settings, kind = parse_settings(AlignerSettings, about["settings"]), KINDS[about["kind"]]
            arrays = load_file(folder / "aligner.safetensors")
            positions = Positions(kind, *(arrays.pop(name) for name in ("p_null", "parameters", "priors")))
            table = WordTable(**arrays)
            texts = [(folder / f"{name}.words").read_text(encoding="utf-8") for name in ("source", "target")]
            words = [{word: index for index, word in enumerate(text.split("\n")[:-1])} for text in texts]
            check_saved_model(table, positions, words)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            problem = f"{str(folder)!r} has no alignment model that can be read ({error})"
            raise UserError(f"{problem}; copy it again, or train it again with --save") from error
        return cls((words[0], words[1]), table, positions, settings)


def train_aligner(
    source: Iterable[str],
    target: Iterable[str],
    settings: AlignerSettings | None = None,
    *,
    report: Callable[[IterationReport], object] = lambda _: None,
    show: Callable[[float], object] = lambda _: None,
) -> Aligner:
    """Train an alignment model on tokenised lines.

    `report` is called after every iteration, `show` with the fraction of the work that is done.
    """
    settings = settings or AlignerSettings()
    settings.check()
    words, (source_side, target_side), skipped_pairs = encode_training_pairs(source, target, settings)
    empty_table = WordTable(*[np.zeros(0)] * 6)
    aligner = Aligner(words, empty_table, initial_positions("ibm1", settings), settings)
    aligner.skipped_pairs = skipped_pairs
    aligner.table = list_word_pairs(source_side, target_side, (len(words[0]), len(words[1])), aligner.run_threads)
    done, cells = 0, int((np.diff(source_side.starts) * np.diff(target_side.starts)).sum())
    total = cells * sum(getattr(settings, kind) for kind in KINDS)

    def add_progress(count: int) -> None:
        nonlocal done
        done += count
        show(done / total)

    for kind in KINDS:
        iterations = getattr(settings, kind)
        if iterations:
            aligner.positions = initial_positions(kind, settings)
        for iteration in range(1, iterations + 1):
            log_likelihood = aligner.iterate(source_side, target_side, add_progress)
            if kind == "ibm1" and iteration == 2:
                aligner.table = prune_table(aligner.table)
            report(IterationReport(kind, iteration, log_likelihood, len(aligner.table.columns)))
    return aligner


def encode_training_pairs(
    source: Iterable[str], target: Iterable[str], settings: AlignerSettings
) -> tuple[tuple[dict[str, int], dict[str, int]], tuple[Side, Side], int]:
    """Return vocabularies, the word ids of pairs that are neither empty nor too long, and the number of other pairs."""
    skipped = 0
    words: tuple[dict[str, int], dict[str, int]] = ({}, {})
    ids, lengths = (array("i"), array("i")), (array("q", [0]), array("q", [0]))  # sentence 0 starts at 0
    for pair in zip(source, target, strict=True):
        sentences = [tokenize_line(line, settings) for line in pair]
        if not all(0 < len(sentence) <= settings.max_length for sentence in sentences):
            skipped += 1
            continue
        for side, sentence in enumerate(sentences):
            known = words[side]
            ids[side].extend([known.setdefault(word, len(known)) for word in sentence])
            lengths[side].append(len(sentence))
    if not ids[0]:
        raise UserError(f"there is no pair to train on: all are empty or longer than {settings.max_length} words")
    sides = [Side(np.array(ids[side], np.int32), np.cumsum(lengths[side])) for side in (0, 1)]
    return words, (sides[0], sides[1]), skipped


def check_saved_model(table: WordTable, positions: Positions, words: Sequence[dict[str, int]]) -> None:
    """Raise a ValueError if arrays do not fit each other or the vocabularies: kernels do not check their indices."""
    sizes = [len(vocabulary) for vocabulary in words]
    entries = len(table.columns)
    lengths = {
        "starts": (table.starts, sizes[0] + 2),
        "forward": (table.forward, entries),
        "backward": (table.backward, entries),
        "null_target": (table.null_target, sizes[1] + 1),
        "null_source": (table.null_source, sizes[0] + 1),
        "p_null": (positions.p_null, 2),
        "parameters": (positions.parameters, 2),
        "priors": (positions.priors, 2),
    }
    for name, (values, length) in lengths.items():
        if len(values) != length:
            raise ValueError(f"{name} has {len(values)} entries instead of {length}")
    if positions.parameters.shape != (2, kernels.BUCKETS) or positions.priors.ndim != 4:
        raise ValueError("the position parameters have a wrong shape")
    in_order = table.starts[0] == 0 and table.starts[-1] == entries and (np.diff(table.starts) >= 0).all()
    if not in_order or (entries and not (0 <= table.columns.min() <= table.columns.max() < sizes[1])):
        raise ValueError("the translation table has entries of words that do not exist")


def tokenize_line(line: str, settings: AlignerSettings) -> list[str]:
    return (line.lower() if settings.lowercase else line).split()


def split_long_pair(source: int, target: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the ranges of positions that are aligned together, given the lengths of a pair.

    That is one range per side unless a sentence is longer than MAX_LENGTH; then both are divided into the same number
    of parts of equal length.
    """
    parts = max(-(-source // MAX_LENGTH), -(-target // MAX_LENGTH), 1)
    edges = [[length * part // parts for part in range(parts + 1)] for length in (source, target)]
    return list(zip(pairwise(edges[0]), pairwise(edges[1]), strict=True))


def make_side(sentences: Iterable[Sequence[int]]) -> Side:
    ids, starts = array("i"), array("q", [0])
    for sentence in sentences:
        ids.extend(sentence)
        starts.append(len(ids))
    return Side(np.array(ids, np.int32), np.array(starts, np.int64))


def split_blocks(source: Side, target: Side) -> Iterator[Block]:
    cells = np.concatenate([[0], np.cumsum(np.diff(source.starts) * np.diff(target.starts))])
    first, pairs = 0, len(cells) - 1
    while first < pairs:
        last = max(int(np.searchsorted(cells, cells[first] + BLOCK_CELLS, side="right")) - 1, first + 1)
        yield make_block(*(slice_sentences(side, first, last) for side in (source, target)))
        first = last


def slice_sentences(side: Side, first: int, last: int) -> Side:
    starts = side.starts[first : last + 1]
    return Side(side.ids[starts[0] : starts[-1]], starts - starts[0])


def make_block(source: Side, target: Side) -> Block:
    """Group the occurrences of each source word in these pairs."""
    lengths = np.diff(source.starts), np.diff(target.starts)
    first_cell = np.concatenate([[0], np.cumsum(lengths[0] * lengths[1])])
    order = np.argsort(source.ids, kind="stable")
    rows, begin = np.unique(source.ids[order], return_index=True)
    pairs = np.searchsorted(source.starts, order, side="right") - 1
    longest = int(max(side.max(initial=1) for side in lengths))
    row_starts = np.concatenate([begin, [len(order)]])
    return Block(source, target, first_cell, rows, row_starts, pairs, order - source.starts[pairs], longest)


def list_word_pairs(source: Side, target: Side, words: tuple[int, int], run_threads: Callable[..., Any]) -> WordTable:
    """Return a uniform table over all pairs of words that occur in the same sentence pair."""
    occurrences = np.bincount(source.ids, minlength=words[0])
    order = np.argsort(source.ids, kind="stable")
    row_pairs = (np.searchsorted(source.starts, order, side="right") - 1).astype(np.int32)
    inputs = np.concatenate([[0], np.cumsum(occurrences)]), row_pairs, target, words[1]
    # The first call counts the entries of each row; the second writes them.
    counts = np.zeros(words[0], np.int64)
    run_threads(occurrences, kernels.list_cooccurrences, *inputs, outputs=(counts, np.zeros(0, np.int32)))
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = np.empty(int(starts[-1]), np.int32)
    run_threads(occurrences, kernels.list_cooccurrences, *inputs, outputs=(starts, columns))
    uniform = [np.full(len(columns), 1.0 / count, np.float32) for count in (words[1], words[0])]
    nulls = [np.append(np.full(count, 1.0 / count), kernels.MISSING) for count in (words[1], words[0])]
    return WordTable(np.append(starts, starts[-1]), columns, *uniform, *nulls)  # the last row is that of unknown words


def normalise_table(expected: WordTable, counts: PositionCounts) -> WordTable:
    """Return probabilities in proportion to expected counts, which are overwritten."""
    kernels.normalise_rows_and_columns(expected)
    nulls = [null / max(null[:-1].sum(), kernels.SMALLEST_SUM) for null in (counts.null_target, counts.null_source)]
    for null in nulls:
        null[-1] = kernels.MISSING
    return expected._replace(null_target=nulls[0], null_source=nulls[1])


def prune_table(table: WordTable) -> WordTable:
    keep = (table.forward > PRUNE_BELOW) | (table.backward > PRUNE_BELOW)
    starts = np.concatenate([[0], np.cumsum(keep)])[table.starts]
    return table._replace(
        starts=starts, columns=table.columns[keep], forward=table.forward[keep], backward=table.backward[keep]
    )


def initial_positions(kind: str, settings: AlignerSettings) -> Positions:
    """Return the position model before its first iteration: uniform, or favouring the diagonal or short jumps."""
    parameters = np.ones((2, kernels.BUCKETS))
    if kind == "diagonal":
        parameters *= 4.0  # the initial tension of fast_align
    elif kind == "hmm":
        parameters *= np.exp(-np.abs(np.arange(kernels.BUCKETS) - kernels.WINDOW - 2.0) / 2)  # most jumps are by 1
    length = PRIOR_LENGTH if kind == "ibm2" else 1
    return Positions(KINDS[kind], np.full(2, settings.null), parameters, np.ones((2, length, length, length)))


def empty_counts(table: WordTable, positions: Positions) -> PositionCounts:
    nulls = np.zeros(len(table.null_target)), np.zeros(len(table.null_source))
    return PositionCounts(*nulls, np.zeros(2), np.zeros((2, 2, kernels.BUCKETS)), np.zeros_like(positions.priors))


def update_positions(positions: Positions, counts: PositionCounts) -> Positions:
    """Return the position model that maximises the likelihood of the expected counts."""
    parameters, priors = positions.parameters.copy(), positions.priors.copy()
    for direction in range(2):
        expected, norms = counts.parameters[direction]
        if positions.kind == kernels.HMM:
            # Expected number of jumps, divided by the expected number of occasions for them. Since jump probabilities
            # are normalised over the positions of a sentence, there is no closed form; this maximises a lower bound
            # that is tight at the old parameters (Hunter 2004), so the likelihood never falls.
            possible = norms > 0  # other jumps are longer than any sentence
            jumps = np.where(possible, expected, 0.0) / np.where(possible, norms, 1.0)
            jumps = np.maximum(jumps, RAREST_JUMP * jumps.max(initial=1e-30))
            parameters[direction] = jumps / jumps.sum()
        elif positions.kind == kernels.DIAGONAL:
            gradient, curvature = expected[:2]
            newton_step = gradient / max(curvature, 1e-9)
            parameters[direction] = np.clip(parameters[direction] + 0.5 * newton_step, 0.1, 50.0)
        elif positions.kind == kernels.MODEL2:
            sums = counts.priors[direction].sum(2, keepdims=True)
            shares = counts.priors[direction] / np.maximum(sums, kernels.SMALLEST_SUM)
            priors[direction] = np.where(sums > 0, shares, priors[direction])
    return positions._replace(parameters=parameters, priors=priors)
