"""Packing: from examples to batches of fixed shape.

Sentences differ in length, but compiled and captured GPU work wants tensors of few shapes. So a batch is a matrix of
rows of one width, and whole sentence pairs lie side by side in a row until it is full:

    source_BS           a  dog  </s> | two  men  walk  </s> | <pad>
    source_segment_BS   1   1    1   |  2    2    2     2   |   0
    source_position_BS  0   1    2   |  0    1    2     3   |   0

Segment ids keep attention inside a sentence; positions restart with every sentence; nothing is ever truncated. The
cost: pairs are chosen for a row by their lengths (best fit, within PACKED_TOGETHER pairs), which takes some CPU time,
and a few per cent of the slots stay padding (`choose_widths` looks for less than 1 - FULL_ENOUGH).

Two steps: a *layout* (LAYOUTS) plans which examples share which row, from their lengths alone, and a collate
function, chosen by the task's ExampleFormat (EXAMPLE_FORMATS), writes a planned batch out as tensors. Lengths are
counted as slots of the batch: a source with its </s>, a target with its <s> or its </s>.

Shapes   B rows   S source width   T target width   N examples, or tokens of all rows
Trees    W words of a row   K words of all rows, counted from 1; 0 is no word
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.types import BOS, EOS, PAD, UNKNOWN_DISTANCE, Batch, Example, TokenTree

Key = TypeVar("Key")
MAX_TREE_DISTANCE = 127
Numbers = NDArray[np.int64]


def collate_trees(
    links: Sequence[TokenTree], row: Numbers, place_N: Numbers, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """depth_BS and tree_BSS of sentences in these rows; `place_N` is where each token lies, every </s> among them.

    Two words have as many ancestors in common, themselves included, as the lowest that they share is deep. So one
    matrix product gives all ways at once.
    """
    word_N, head_K, column_K = _numbered(links, row)
    sentence_N = np.repeat(np.arange(1, len(links) + 1), [len(one.word) + 1 for one in links])
    word_BS, sentence_BS = (_grid(each, place_N, shape) for each in (word_N, np.where(word_N, sentence_N, 0)))
    ancestor_BSW = torch.zeros(*shape, int(column_K.max()) + 1)
    flat = ancestor_BSW.flatten(0, 1).numpy()
    while word_N.any():
        known = word_N > 0
        flat[place_N[known], column_K[word_N[known]]] = 1
        word_N = head_K[word_N]
    depth_BS = ancestor_BSW.sum(-1)
    arcs_BSS = depth_BS[:, :, None] + depth_BS[:, None] - 2 * ancestor_BSW @ ancestor_BSW.mT
    way_BSS = arcs_BSS.clamp(max=MAX_TREE_DISTANCE) * (word_BS[:, None] - word_BS[:, :, None]).sign()
    known_BSS = (sentence_BS[:, None] == sentence_BS[:, :, None]) & (sentence_BS > 0)[:, None]
    return depth_BS.long(), way_BSS.masked_fill(~known_BSS, UNKNOWN_DISTANCE).to(torch.int8)


def add_unknown_trees(batch: Batch) -> Batch:
    """A grid of which no tree is known, for a model that asks for trees."""
    depth_BS = torch.zeros_like(batch.source_BS)
    tree_BSS = torch.full((*depth_BS.shape, depth_BS.size(1)), UNKNOWN_DISTANCE, dtype=torch.int8)
    return replace(batch, depth_BS=depth_BS, tree_BSS=tree_BSS)


def _numbered(links: Sequence[TokenTree], row: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """All words numbered through: the word of each token, and of each word its head and its column in its row."""
    size = np.array([len(one.head) for one in links])
    before = np.cumsum(size) - size
    own_N = np.concatenate([part for one in links for part in (one.word.astype(np.int64), [0])])
    own_K = np.concatenate([[0], *(one.head.astype(np.int64) for one in links)])
    word_N = np.where(own_N, own_N + np.repeat(before, [len(one.word) + 1 for one in links]), 0)
    head_K = np.where(own_K, own_K + np.repeat([0, *before], [1, *size]), 0)
    first = before[np.searchsorted(row, row)]  # of the row
    column_K = np.arange(-1, len(head_K) - 1) - np.repeat([0, *first], [1, *size])
    return word_N, head_K, column_K


def _grid(values_N: Numbers, place_N: Numbers, shape: tuple[int, int]) -> Tensor:
    out = np.zeros(shape, dtype=np.int64)
    out.ravel()[place_N] = values_N
    return torch.from_numpy(out)


def round_to_bucket(length: int) -> int:
    """The next of 16, 32, 64, 128, ...: a width that depends on the sentence alone."""
    width = 16
    while width < length:
        width *= 2
    return width


def group_by_key(items: Iterable[int], key: Callable[[int], Key], size: int) -> Iterator[tuple[Key, list[int]]]:
    """Items of one key together, at most `size` at a time, in the order they came."""
    groups: dict[Key, list[int]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    for value, some in groups.items():
        rest = iter(some)
        while chunk := list(islice(rest, size)):
            yield value, chunk


IntArray = NDArray[np.int64]
Examples = Sequence[Example] | Mapping[int, Example]  # by number
CELLS_PER_WIDTH = (
    128  # that a row's width is divided into when pairs are laid side by side; a narrower one is not divided
)
FULL_ENOUGH = 0.935  # of the places hold a token
DOUBLING_COST = 0.015  # how much fuller rows of twice the width must be, since attention costs grow with it
PACKED_TOGETHER = 8192  # pairs packed together: enough to fill rows, few enough to try every row
MANY = 1 << 20  # places: more than any sentence needs
BUCKET_WIDTHS = np.array(
    [2.0**octave * part for octave in range(1, 20) for part in (4, 5, 6, 7)]
)  # 8, 10, 12, 14, 16, 20, ...


class Widths(NamedTuple):
    source: int
    target: int

    def times(self, factor: int) -> Widths:
        return Widths(self.source * factor, self.target * factor)


class BatchPlan(NamedTuple):
    """A planned batch: which examples lie in which row."""

    rows: list[list[int]]
    widths: Widths


class RankShare(NamedTuple):
    """Which rows of every grid are ours: those of one process out of several. By itself: all."""

    rank: int = 0
    world: int = 1

    def cut(self, height: int) -> tuple[int, int]:
        """From which row to which."""
        return height * self.rank // self.world, height * (self.rank + 1) // self.world

    def rows(self, grid: BatchPlan) -> list[list[int]]:
        return grid.rows[slice(*self.cut(len(grid.rows)))]


class RowGroup(NamedTuple):
    """Rows of one width."""

    widths: Widths
    rows: list[list[int]]


class BestFitTable:
    """Items that are not laid yet, by how many grains of a row's width each of their sides takes.

    What fits best into a given room is looked up in a table. It is made anew only when it names what has run out.
    """

    def __init__(self, length_2N: NDArray[np.int64], widths: Widths) -> None:
        self.length_2N, self.widths = length_2N, widths
        self.grains = [min(CELLS_PER_WIDTH, width) for width in widths]
        S, T = (count + 1 for count in self.grains)
        self.shape = (S, T)
        fullness_ST = sum(np.ix_(*(np.arange(n) / max(n - 1, 1) for n in self.shape)))
        self.rank_ST = np.round(fullness_ST * 1000).astype(np.int64) * S * T + np.arange(S * T).reshape(S, T)
        source_N, target_N = (
            -(-length_N * n // w) for length_N, n, w in zip(length_2N, self.grains, widths, strict=True)
        )
        self.cell_N = (source_N * T + target_N).tolist()
        self.left: dict[int, list[int]] = {}
        self.there_ST = np.zeros(self.shape, dtype=bool)  # cells with something left
        self.best_ST = self.look()

    def put(self, items: Iterable[int]) -> None:
        """Those that are put in last are taken first."""
        for item in items:
            self.left.setdefault(self.cell_N[item], []).append(item)
        self.there_ST.ravel()[list(self.left)] = True
        self.best_ST = self.look()

    def look(self) -> NDArray[np.int64]:
        """For every room, the cell that fills it most, of those with something left."""
        rank_ST = np.where(self.there_ST, self.rank_ST, -1)
        return np.maximum.accumulate(np.maximum.accumulate(rank_ST, 0), 1)

    def take(self, cell: int) -> int:
        item = self.left[cell].pop()
        if not self.left[cell]:
            self.there_ST.ravel()[cell] = False
        return item

    def fitting(self, source: int, target: int) -> int | None:
        """What fills this room most is taken out; None if there is nothing that fits."""
        (S, T), widths = self.grains, self.widths
        where = min(source * S // widths.source, S), min(target * T // widths.target, T)
        while (rank := int(self.best_ST[where])) >= 0:
            if self.left[cell := rank % self.best_ST.size]:
                return self.take(cell)
            self.best_ST = self.look()
        return None


def pack_rows(source_N: IntArray, target_N: IntArray, widths: Widths) -> list[RowGroup]:
    """Row by row, each begun with the longest pair that is left and filled with what fits best.

    Pairs wider than a row go to shelves of twice, four times, ... the width; shorter ones fill what is left there.
    """
    length_2N = np.stack([source_N, target_N])
    share_N = (length_2N / np.array(widths)[:, None]).max(0)
    own_N = np.ceil(np.log2(np.maximum(share_N, 1.0))).astype(int).tolist()
    order = np.argsort(-share_N, kind="stable").tolist()
    stock = BestFitTable(length_2N, widths)
    stock.put(item for item in reversed(order) if not own_N[item])
    shelves = [RowGroup(widths.times(2**k), []) for k in range(max(own_N, default=0) + 1)]
    lengths, laid = length_2N.T.tolist(), [False] * len(order)
    for first in order:
        if laid[first]:
            continue
        if not own_N[first]:
            stock.take(stock.cell_N[first])  # it is the one of its cell that was put in last
        shelf, row, item = shelves[own_N[first]], [], first
        source, target = shelf.widths
        while item is not None:
            row.append(item)
            laid[item] = True
            source, target = source - lengths[item][0], target - lengths[item][1]
            item = stock.fitting(source, target)
        shelf.rows.append(row)
    return shelves


def choose_widths(source_N: IntArray, target_N: IntArray) -> Widths:
    """The narrowest rows with both grids full enough; where there are none, the fullest that are worth their width.

    The longer side gets a power of two, the other what the corpus' own ratio of lengths asks for. Judged by packing a
    sample. A side that has nothing, or a single label for each text, is not judged.
    """
    if source_N.sum() < target_N.sum():
        target, source = choose_widths(target_N, source_N)
        return Widths(source, target)
    source_N, target_N = source_N[:PACKED_TOGETHER], target_N[:PACKED_TOGETHER]
    ratio = target_N.sum() / source_N.sum()
    worth: dict[Widths, float] = {}
    for doubled, source in enumerate((64, 128, 256, 512)):
        targets = {min(max(8, round(source * ratio * slack / 8) * 8), source) for slack in (0.97, 1.0, 1.03)}
        fill = {Widths(source, target): _fill(source_N, target_N, Widths(source, target)) for target in sorted(targets)}
        best = max(fill, key=fill.__getitem__)
        if fill[best] >= FULL_ENOUGH:
            return best
        worth[best] = fill[best] - DOUBLING_COST * doubled
    return max(worth, key=worth.__getitem__)


def _fill(source_N: IntArray, target_N: IntArray, widths: Widths) -> float:
    shelves = pack_rows(source_N, target_N, widths)
    room = sum(len(s.rows) * np.array(s.widths) for s in shelves)
    fill_2 = np.array([source_N.sum(), target_N.sum()]) / room
    return float(fill_2[0] if target_N.max() <= 1 else fill_2.min())


def plan_packed(
    source_N: IntArray, target_N: IntArray, *, tokens: int, widths: Widths, rng: np.random.Generator, heights: int = 8
) -> list[BatchPlan]:
    """Full rows in random order. All grids of a width have one shape, but for the last, some eighths of it."""
    rows_by_times: dict[int, list[list[int]]] = {1: []}  # by how many times as wide as the narrowest they are
    for start in range(0, len(source_N), PACKED_TOGETHER):
        for shelf in pack_rows(
            source_N[start : start + PACKED_TOGETHER], target_N[start : start + PACKED_TOGETHER], widths
        ):
            rows = rows_by_times.setdefault(shelf.widths.source // widths.source, [])
            rows.extend([start + i for i in row] for row in shelf.rows)
    grids, narrow = [], rows_by_times[1]
    rng.shuffle(narrow)
    for times, rows in sorted(rows_by_times.items(), reverse=True):
        wide = widths.times(times)
        height = max(1, tokens // max(wide))
        while heights == 1 and times > 1 and len(rows) % height and len(narrow) >= times:
            rows.append([item for _ in range(times) for item in narrow.pop()])
        rng.shuffle(rows)
        for start in range(0, len(rows), height):
            some = rows[start : start + height]
            grids.append(BatchPlan(some + [[]] * (_few_heights(len(some), height, heights) - len(some)), wide))
    rng.shuffle(grids)
    return grids


def _few_heights(rows: int, height: int, heights: int) -> int:
    """As many eighths of a full grid as hold these rows: few shapes, little emptiness."""
    eighth = -(-height // heights)
    return min(height, -(-rows // eighth) * eighth)


def plan_level(
    source_N: IntArray, target_N: IntArray, *, tokens: int, widths: Widths, rng: np.random.Generator
) -> list[BatchPlan]:
    """The same rows, and all grids of a width have one shape: for work that is recorded once for each shape.

    Where wide rows do not fill their last grid, narrow ones are put end to end to fill it.
    """
    return plan_packed(source_N, target_N, tokens=tokens, widths=widths, rng=rng, heights=1)


def plan_padded(
    source_N: IntArray,
    target_N: IntArray,
    *,
    tokens: int,
    widths: Widths,  # noqa: ARG001 - each grid is as wide as its longest
    rng: np.random.Generator,
) -> list[BatchPlan]:
    """One pair per row, pairs of like length together, so that little is padding.

    They are sorted by the longer side, then by how far the sides differ, to and fro, so that neighbours are alike there
    too where one length ends and the next begins.
    """
    noise = rng.random(len(source_N))
    longer_N, more_N = np.maximum(source_N, target_N), source_N - target_N
    order = np.lexsort((noise, np.where(longer_N % 2, more_N, -more_N), longer_N)).tolist()
    grids: list[BatchPlan] = []
    rows: list[list[int]] = []
    wide = Widths(0, 0)
    for item in order:
        own = Widths(int(source_N[item]), int(target_N[item]))
        wider = Widths(max(wide.source, own.source), max(wide.target, own.target))
        if rows and (len(rows) + 1) * max(wider) > tokens:
            grids.append(BatchPlan(rows, wide))
            rows, wider = [], own
        rows.append([item])
        wide = wider
    if rows:
        grids.append(BatchPlan(rows, wide))
    rng.shuffle(grids)
    return grids


def plan_stepped(
    source_N: IntArray, target_N: IntArray, *, tokens: int, widths: Widths, rng: np.random.Generator, most: int = MANY
) -> list[BatchPlan]:
    """One pair per row, in grids of few shapes: for work that is recorded once for each shape.

    Widths go up in steps, the two sides in the ratio of `widths`, as far as a model has places. What does not fill a
    grid goes into wider ones.
    """
    length_2N, ratio_2 = np.stack([source_N, target_N]), np.array(widths) / max(widths)
    need_N = (length_2N / ratio_2[:, None]).max(0)
    step_N = np.searchsorted(BUCKET_WIDTHS, need_N - 1e-6)
    order = rng.permutation(len(step_N))
    grids: list[BatchPlan] = []
    rows: list[list[int]] = []
    for step in np.unique(step_N).tolist():
        rows += [[item] for item in order[step_N[order] == step].tolist()]
        longest_2 = length_2N[:, [item for row in rows for item in row]].max(1)  # samples may outgrow all places
        stepped_2 = np.maximum(np.minimum(np.ceil(BUCKET_WIDTHS[step] * ratio_2 - 1e-6), most), longest_2)
        wide = Widths(*stepped_2.astype(int).tolist())
        height = max(1, tokens // max(wide))
        while len(rows) >= height:
            grids.append(BatchPlan(rows[:height], wide))
            del rows[:height]
    if rows:
        grids.append(BatchPlan(rows + [[]] * (height - len(rows)), wide))
    rng.shuffle(grids)
    return grids


def collate_pairs(grid: BatchPlan, examples: Examples) -> Batch:
    """Pairs: a source with its </s>, and a target that begins with <s> as input and ends with </s> as output."""
    places = _Places(grid, examples)
    source = places.side([e.source for e in places.examples], grid.widths.source, end=True)
    target = places.side([e.target for e in places.examples], grid.widths.target, end=True)
    return _batch(places, source, target, np.where(target.position == 0, BOS, np.roll(target.token, 1)))


def collate_lines(grid: BatchPlan, examples: Examples) -> Batch:
    """Texts without a source: the same with nothing in the source grid."""
    places = _Places(grid, examples)
    source = places.side([e.source[:0] for e in places.examples], grid.widths.source)
    target = places.side([e.target for e in places.examples], grid.widths.target, end=True)
    return _batch(places, source, target, np.where(target.position == 0, BOS, np.roll(target.token, 1)))


def collate_windows(grid: BatchPlan, examples: Examples) -> Batch:
    """Windows of a long text, each with the token that follows it: the last does not go in, the first not out."""
    places = _Places(grid, examples)
    source = places.side([e.source[:0] for e in places.examples], grid.widths.source)
    target = places.side([e.target[1:] for e in places.examples], grid.widths.target)
    before = places.side([e.target[:-1] for e in places.examples], grid.widths.target)
    return _batch(places, source, target, before.token)


def collate_labels(grid: BatchPlan, examples: Examples) -> Batch:
    """Texts and their labels: the n-th place of a target row is the label of the n-th text in the source row."""
    places = _Places(grid, examples)
    source = places.side([e.source for e in places.examples], grid.widths.source, end=True)
    target = places.side([e.target for e in places.examples], grid.widths.target)
    return _batch(places, source, target, np.full_like(target.token, PAD))


def count_all_rows(batch: Batch, grid: BatchPlan, lengths: tuple[IntArray, IntArray], share: RankShare) -> Batch:
    """Our rows, as the part of a grid that they are: what is counted is counted over all of its rows."""
    height, items = len(grid.rows), [item for row in grid.rows for item in row]
    source_N, target_N = lengths
    return replace(
        batch,
        pairs=len(items),
        source_tokens=int(source_N[items].sum()),
        target_tokens=int(target_N[items].sum()),
        alone=max(map(len, grid.rows)) <= 1,
        first=min(share.cut(height)[0], height - 1),
        height=height,
    )


class _Places:
    """Which row and segment each example of a grid lies in."""

    def __init__(self, grid: BatchPlan, examples: Examples) -> None:
        self.examples = [examples[item] for row in grid.rows for item in row]
        sizes = [len(row) for row in grid.rows]
        self.height = len(sizes)
        self.alone = max(sizes, default=0) <= 1
        self.row_N = np.repeat(np.arange(len(sizes)), sizes)
        self.first_N = np.repeat(np.cumsum(sizes) - sizes, sizes).astype(np.int64)
        self.segment_N = np.arange(len(self.examples)) - self.first_N + 1

    def side(self, ids: Sequence[NDArray[np.integer]], width: int, *, end: bool = False) -> _Side:
        """One side on flat arrays: where a token goes is its segment's start plus its position."""
        mark = np.full(int(end), EOS)
        length_N = np.array([len(i) + end for i in ids], dtype=np.int64)
        flat = np.concatenate([mark[:0], *(part for i in ids for part in (i, mark))])
        before_N = np.cumsum(length_N) - length_N
        start_N = self.row_N * width + before_N - before_N[self.first_N]
        position = np.arange(len(flat)) - np.repeat(before_N, length_N)
        place = np.repeat(start_N, length_N) + position
        segment = np.repeat(self.segment_N, length_N)
        return _Side(flat.astype(np.int64), segment, position, place, (self.height, width))


class _Side(NamedTuple):
    """The tokens of one side, one after the other, and the place of each in a grid of this shape."""

    token: NDArray[np.int64]
    segment: NDArray[np.int64]
    position: NDArray[np.int64]
    place: NDArray[np.int64]
    shape: tuple[int, int]

    def grid(self, values: NDArray[np.int64]) -> torch.Tensor:
        out = np.full(self.shape, PAD, dtype=np.int64)
        out.ravel()[self.place] = values
        return torch.from_numpy(out)


def _batch(places: _Places, source: _Side, target: _Side, target_in: NDArray[np.int64]) -> Batch:
    links = [one.links for one in places.examples if one.links]
    depth_BS, tree_BSS = collate_trees(links, places.row_N, source.place, source.shape) if links else (None, None)
    return Batch(
        source_BS=source.grid(source.token),
        source_segment_BS=source.grid(source.segment),
        source_position_BS=source.grid(source.position),
        target_in_BT=target.grid(target_in),
        target_out_BT=target.grid(target.token),
        target_segment_BT=target.grid(target.segment),
        target_position_BT=target.grid(target.position),
        pairs=len(places.examples),
        source_tokens=len(source.token),
        target_tokens=len(target.token),
        alone=places.alone,
        depth_BS=depth_BS,
        tree_BSS=tree_BSS,
    )


Layout = Callable[..., list[BatchPlan]]
LAYOUTS: dict[str, Layout] = {
    "packed": plan_packed,
    "level": plan_level,
    "padded": plan_padded,
    "stepped": plan_stepped,
}
BOUNDED = {"stepped"}  # those that make grids wider than their texts, so that they must know how wide they may be

Ids = Sequence[int]


@dataclass(frozen=True)
class ExampleFormat:
    noun: str  # what its examples are called
    refuse: Callable[[Ids, Ids, int], str]  # why source and target are left out, given data.max_length; or nothing
    held: Callable[[IntArray, IntArray], tuple[IntArray, IntArray]]  # how many places of the two grids they take
    lay: Callable[[BatchPlan, Examples], Batch]
    closed: bool = False  # the store keeps the </s> of every line: one text goes on from line to line

    def lengths(self, examples: Sequence[Example]) -> tuple[IntArray, IntArray]:
        """What these examples take in the two grids."""
        return self.held(*(np.array([len(getattr(e, side)) for e in examples]) for side in ("source", "target")))


def too_long(most: int, max_length: int) -> str:
    return f"longer than {max_length} tokens" if most > max_length else ""


def refuse_pair(source: Ids, target: Ids, max_length: int) -> str:
    return too_long(max(len(source), len(target)), max_length) if source and target else "one side empty"


def refuse_label(source: Ids, target: Ids, max_length: int) -> str:
    if not target:
        return "with a label that training does not have"
    return too_long(len(source), max_length) if source else "without text"


def refuse_line(source: Ids, target: Ids, max_length: int) -> str:  # noqa: ARG001 - there is no source
    return too_long(len(target), max_length) if target else "empty"


EXAMPLE_FORMATS = {
    "pairs": ExampleFormat(
        "pairs", refuse_pair, lambda source_N, target_N: (source_N + 1, target_N + 1), collate_pairs
    ),
    "labels": ExampleFormat("texts", refuse_label, lambda source_N, target_N: (source_N + 1, target_N), collate_labels),
    "lines": ExampleFormat("lines", refuse_line, lambda source_N, target_N: (source_N, target_N + 1), collate_lines),
    "windows": ExampleFormat(
        "lines", lambda *_: "", lambda source_N, target_N: (source_N, target_N - 1), collate_windows, closed=True
    ),
}
