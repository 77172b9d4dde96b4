"""Packing: from examples to batches of fixed shape.

Sentences differ in length, but compiled code and CUDA graphs need tensors of few shapes. So all rows of a batch have
the same width, and each row contains several complete sentence pairs:

    source_BS           a  dog  </s> | two  men  walk  </s> | <pad>
    source_segment_BS   1   1    1   |  2    2    2     2   |   0
    source_position_BS  0   1    2   |  0    1    2     3   |   0

Segment ids restrict attention to the sentence, positions restart in every sentence, and nothing is truncated. Pairs
are chosen for a row by their lengths (best fit among PACKED_TOGETHER pairs), which takes some CPU time. A few per cent
of the slots are padding (`choose_widths` aims at less than 1 - FULL_ENOUGH).

There are two steps: a *layout* (LAYOUTS) plans which examples share which row, from their lengths alone, and a collate
function, chosen by the task's ExampleFormat (EXAMPLE_FORMATS), writes a planned batch out as tensors. Lengths are
counted as slots of the batch: a source with its </s>, a target with its <s> or its </s>.

Shapes   B rows   S source width   T target width   N examples, or tokens of all rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dragoman.data.features import FEATURES, IntArray, scatter
from dragoman.types import BOS, EOS, PAD, Batch, Example

Examples = Sequence[Example] | Mapping[int, Example]  # indexed by the numbers in a BatchPlan


CELLS_PER_WIDTH = 128  # resolution at which lengths are compared when rows are filled
FULL_ENOUGH = 0.935  # required fraction of slots that are not padding
DOUBLING_COST = 0.015  # how much fuller rows of twice the width must be, since attention then costs more
PACKED_TOGETHER = 8192  # pairs that are packed together: enough to fill rows well, few enough to be fast
UNBOUNDED = 1 << 20  # slots, more than any sentence needs
# 8, 10, 12, 14, 16, 20, ...
BUCKET_WIDTHS = np.array([2.0**octave * part for octave in range(1, 20) for part in (4, 5, 6, 7)])


class Widths(NamedTuple):
    """Row widths of the two sides, in tokens."""

    source: int
    target: int

    def scale(self, factor: int) -> Widths:
        return Widths(self.source * factor, self.target * factor)


class BatchPlan(NamedTuple):
    """The numbers of the examples in each row of a batch."""

    rows: list[list[int]]
    widths: Widths


class RankShard(NamedTuple):
    """The rows of every batch that one rank of `world_size` processes computes. A single process has all of them."""

    rank: int = 0
    world_size: int = 1

    def row_range(self, height: int) -> tuple[int, int]:
        """Return the first row of this rank and the first row after it."""
        return height * self.rank // self.world_size, height * (self.rank + 1) // self.world_size


class BestFitTable:
    """Items that are not in a row yet, and a table of the best item for each size of gap.

    Lengths are rounded up to cells, CELLS_PER_WIDTH per row (fewer if a row is narrower). `best_ST[s, t]` is the best
    item length for a gap of s source and t target cells. The table is rebuilt only when no item of the length in the
    table is left.
    """

    def __init__(self, length_2N: NDArray[np.int64], widths: Widths) -> None:
        self.length_2N, self.widths = length_2N, widths
        self.cells = [min(CELLS_PER_WIDTH, width) for width in widths]
        S, T = (count + 1 for count in self.cells)
        self.shape = (S, T)
        fullness_ST = sum(np.ix_(*(np.arange(n) / max(n - 1, 1) for n in self.shape)))
        self.rank_ST = np.round(fullness_ST * 1000).astype(np.int64) * S * T + np.arange(S * T).reshape(S, T)
        source_N, target_N = (
            -(-length_N * n // w) for length_N, n, w in zip(length_2N, self.cells, widths, strict=True)
        )
        self.cell_N = (source_N * T + target_N).tolist()
        self.left: dict[int, list[int]] = {}
        self.there_ST = np.zeros(self.shape, dtype=bool)  # cells with items left
        self.best_ST = self.rebuild()

    def put(self, items: Iterable[int]) -> None:
        """Add items; those added last are taken first."""
        for item in items:
            self.left.setdefault(self.cell_N[item], []).append(item)
        self.there_ST.ravel()[list(self.left)] = True
        self.best_ST = self.rebuild()

    def rebuild(self) -> NDArray[np.int64]:
        """Return the rank of the longest item that fits into each gap, or -1. The rank modulo the size is its cell."""
        rank_ST = np.where(self.there_ST, self.rank_ST, -1)
        return np.maximum.accumulate(np.maximum.accumulate(rank_ST, 0), 1)

    def take(self, cell: int) -> int:
        """Remove and return the last item of a cell."""
        item = self.left[cell].pop()
        if not self.left[cell]:
            self.there_ST.ravel()[cell] = False
        return item

    def take_best(self, source: int, target: int) -> int | None:
        """Remove and return the item that fills a gap of this size best, or None if nothing fits."""
        (S, T), widths = self.cells, self.widths
        where = min(source * S // widths.source, S), min(target * T // widths.target, T)
        while (rank := int(self.best_ST[where])) >= 0:
            if self.left[cell := rank % self.best_ST.size]:
                return self.take(cell)
            self.best_ST = self.rebuild()
        return None


def pack_rows(source_N: IntArray, target_N: IntArray, widths: Widths) -> list[BatchPlan]:
    """Fill one row after the other: start with the longest remaining pair, then add the pairs that fit best.

    Pairs wider than a row go to rows of twice, four times, ... the width, which are also filled with shorter pairs.
    """
    length_2N = np.stack([source_N, target_N])
    ratio_N = (length_2N / np.array(widths)[:, None]).max(0)
    doublings_N = np.ceil(np.log2(np.maximum(ratio_N, 1.0))).astype(int).tolist()
    order = np.argsort(-ratio_N, kind="stable").tolist()
    table = BestFitTable(length_2N, widths)
    table.put(item for item in reversed(order) if not doublings_N[item])
    groups = [BatchPlan([], widths.scale(2**k)) for k in range(max(doublings_N, default=0) + 1)]
    lengths, placed = length_2N.T.tolist(), [False] * len(order)
    for first in order:
        if placed[first]:
            continue
        if not doublings_N[first]:
            table.take(table.cell_N[first])  # the item that was added to its cell last
        group, row, item = groups[doublings_N[first]], [], first
        source, target = group.widths
        while item is not None:
            row.append(item)
            placed[item] = True
            source, target = source - lengths[item][0], target - lengths[item][1]
            item = table.take_best(source, target)
        group.rows.append(row)
    return groups


def choose_widths(source_N: IntArray, target_N: IntArray) -> Widths:
    """Return the narrowest widths whose rows are full enough; if there are none, the best trade-off.

    The longer side gets a power of two, the other follows the ratio of lengths in the corpus. A sample is packed with
    each candidate. A side that is empty, or has a single label per text, is ignored.
    """
    if source_N.sum() < target_N.sum():
        target, source = choose_widths(target_N, source_N)
        return Widths(source, target)
    source_N, target_N = source_N[:PACKED_TOGETHER], target_N[:PACKED_TOGETHER]
    ratio = target_N.sum() / source_N.sum()
    worth: dict[Widths, float] = {}
    for doubled, source in enumerate((64, 128, 256, 512)):
        targets = {min(max(8, round(source * ratio * slack / 8) * 8), source) for slack in (0.97, 1.0, 1.03)}
        fill: dict[Widths, float] = {}  # fraction of slots that are not padding, on the emptier side
        for widths in (Widths(source, target) for target in sorted(targets)):
            slots_2 = sum(len(group.rows) * np.array(group.widths) for group in pack_rows(source_N, target_N, widths))
            fill_2 = np.array([source_N.sum(), target_N.sum()]) / slots_2
            fill[widths] = float(fill_2[0] if target_N.max() <= 1 else fill_2.min())
        best = max(fill, key=fill.__getitem__)
        if fill[best] >= FULL_ENOUGH:
            return best
        worth[best] = fill[best] - DOUBLING_COST * doubled
    return max(worth, key=worth.__getitem__)


def plan_packed(
    source_N: IntArray, target_N: IntArray, *, tokens: int, widths: Widths, rng: np.random.Generator, heights: int = 8
) -> list[BatchPlan]:
    """Plan packed rows in random order.

    All batches of a width have the same shape, except that the last may have fewer rows, in steps of 1/`heights`. With
    `heights` 1, narrow rows are joined to fill the last batch of wide rows, so that it has the same shape too.
    """
    rows_by_times: dict[int, list[list[int]]] = {1: []}  # by their width as a multiple of `widths`
    for start in range(0, len(source_N), PACKED_TOGETHER):
        for group in pack_rows(
            source_N[start : start + PACKED_TOGETHER], target_N[start : start + PACKED_TOGETHER], widths
        ):
            rows = rows_by_times.setdefault(group.widths.source // widths.source, [])
            rows.extend([start + i for i in row] for row in group.rows)
    plans, narrow = [], rows_by_times[1]
    rng.shuffle(narrow)
    for times, rows in sorted(rows_by_times.items(), reverse=True):
        wide = widths.scale(times)
        height = max(1, tokens // max(wide))
        while heights == 1 and times > 1 and len(rows) % height and len(narrow) >= times:
            rows.append([item for _ in range(times) for item in narrow.pop()])
        rng.shuffle(rows)
        for start in range(0, len(rows), height):
            filled = rows[start : start + height]
            step = -(-height // heights)  # heights are multiples of `step`: few shapes, few empty rows
            rows_needed = min(height, -(-len(filled) // step) * step)
            plans.append(BatchPlan(filled + [[]] * (rows_needed - len(filled)), wide))
    rng.shuffle(plans)
    return plans


def plan_padded(
    source_N: IntArray,
    target_N: IntArray,
    *,
    tokens: int,
    widths: Widths,  # noqa: ARG001 - each batch is as wide as its longest pair
    rng: np.random.Generator,
) -> list[BatchPlan]:
    """Plan one pair per row. Pairs of similar length share a batch, so that there is little padding.

    Pairs are sorted by the longer side, then by the difference of the sides, alternately ascending and descending, so
    that neighbours stay similar where one length ends and the next begins.
    """
    noise = rng.random(len(source_N))
    longer_N, more_N = np.maximum(source_N, target_N), source_N - target_N
    order = np.lexsort((noise, np.where(longer_N % 2, more_N, -more_N), longer_N)).tolist()
    plans: list[BatchPlan] = []
    rows: list[list[int]] = []
    wide = Widths(0, 0)
    for item in order:
        lengths = Widths(int(source_N[item]), int(target_N[item]))
        wider = Widths(max(wide.source, lengths.source), max(wide.target, lengths.target))
        if rows and (len(rows) + 1) * max(wider) > tokens:
            plans.append(BatchPlan(rows, wide))
            rows, wider = [], lengths
        rows.append([item])
        wide = wider
    if rows:
        plans.append(BatchPlan(rows, wide))
    rng.shuffle(plans)
    return plans


def plan_stepped(
    source_N: IntArray,
    target_N: IntArray,
    *,
    tokens: int,
    widths: Widths,
    rng: np.random.Generator,
    max_positions: int = UNBOUNDED,
) -> list[BatchPlan]:
    """Plan one pair per row in batches of few shapes, for CUDA graphs, which are captured once per shape.

    Widths are taken from BUCKET_WIDTHS, the two sides in the ratio of `widths`, and are at most `max_positions`, the
    maximum length that the model supports. Rows that do not fill a batch go into a wider one.
    """
    length_2N, ratio_2 = np.stack([source_N, target_N]), np.array(widths) / max(widths)
    need_N = (length_2N / ratio_2[:, None]).max(0)
    step_N = np.searchsorted(BUCKET_WIDTHS, need_N - 1e-6)
    order = rng.permutation(len(step_N))
    plans: list[BatchPlan] = []
    rows: list[list[int]] = []
    for step in np.unique(step_N).tolist():
        rows += [[item] for item in order[step_N[order] == step].tolist()]
        longest_2 = length_2N[:, [row[0] for row in rows]].max(1)  # a sampled segmentation may exceed `max_positions`
        stepped_2 = np.maximum(np.minimum(np.ceil(BUCKET_WIDTHS[step] * ratio_2 - 1e-6), max_positions), longest_2)
        wide = Widths(*stepped_2.astype(int).tolist())
        height = max(1, tokens // max(wide))
        while len(rows) >= height:
            plans.append(BatchPlan(rows[:height], wide))
            del rows[:height]
    if rows:
        plans.append(BatchPlan(rows + [[]] * (height - len(rows)), wide))
    rng.shuffle(plans)
    return plans


Layout = Callable[..., list[BatchPlan]]
LAYOUTS: dict[str, Layout] = {
    "packed": plan_packed,
    "level": partial(plan_packed, heights=1),  # for CUDA graphs, which are captured once per shape
    "padded": plan_padded,
    "stepped": plan_stepped,
}
BOUNDED = {"stepped"}  # layouts with rows wider than their texts, which must respect `max_positions`


class FlatSide(NamedTuple):
    """The concatenated tokens of one side, and the index of each token in the flattened batch."""

    token: IntArray
    segment: IntArray
    position: IntArray
    slot: IntArray


def flatten_side(ids: Sequence[NDArray[np.integer]], plan: BatchPlan, width: int, *, eos: bool) -> FlatSide:
    """Concatenate one side of the examples of a plan, without a loop over tokens, each with </s> if `eos` is set."""
    sizes = [len(row) for row in plan.rows]
    first_N = np.repeat(np.cumsum(sizes) - sizes, sizes).astype(np.int64)  # the first example of the same row
    end = np.full(int(eos), EOS)
    length_N = np.array([len(i) + eos for i in ids], dtype=np.int64)
    token = np.concatenate([end[:0], *(part for i in ids for part in (i, end))]).astype(np.int64)
    before_N = np.cumsum(length_N) - length_N
    start_N = np.repeat(np.arange(len(sizes)), sizes) * width + before_N - before_N[first_N]
    position = np.arange(len(token)) - np.repeat(before_N, length_N)
    segment = np.repeat(np.arange(len(ids)) - first_N + 1, length_N)
    return FlatSide(token, segment, position, np.repeat(start_N, length_N) + position)


@dataclass(frozen=True)
class ExampleFormat:
    """What the examples of a task look like in a token store and in a batch.

    A source ends with </s>. A target is predicted from the tokens before it, `first_input` before its first token. If
    `first_input` is None, the first token of the target is that input and is not predicted.
    """

    noun: str  # name of the examples in messages
    empty_source: str  # why an example without a source is left out; "": the format has no sources
    empty_target: str  # why an example without a target is left out; "": every line of a text is kept
    target_eos: bool = True  # a target ends with </s>
    first_input: int | None = BOS
    keeps_eos: bool = False  # the store has the </s> of every line, because a text continues from line to line

    def refuse(self, source: Sequence[int], target: Sequence[int], max_length: int) -> str:
        """Return why an example is left out of training, or ""."""
        if not target and self.empty_target:
            return self.empty_target
        if not source and self.empty_source:
            return self.empty_source
        longest = max(len(source) if self.empty_source else 0, len(target) if self.empty_target else 0)
        return f"longer than {max_length} tokens" if longest > max_length else ""

    def count_slots(self, source_N: IntArray, target_N: IntArray) -> tuple[IntArray, IntArray]:
        """Return how many slots of a batch examples need on each side, given their lengths in the store."""
        return source_N + bool(self.empty_source), target_N + self.target_eos - (self.first_input is None)

    def lengths(self, examples: Sequence[Example]) -> tuple[IntArray, IntArray]:
        """Return how many slots these examples need on each side."""
        return self.count_slots(*(np.array([len(getattr(e, side)) for e in examples]) for side in ("source", "target")))

    def collate(self, plan: BatchPlan, examples: Examples) -> Batch:
        """Write a planned batch out as tensors."""
        planned = [examples[item] for row in plan.rows for item in row]
        has_source, predicts_all = bool(self.empty_source), self.first_input is not None
        sources = [e.source if has_source else e.source[:0] for e in planned]
        targets = [e.target if predicts_all else e.target[1:] for e in planned]
        source = flatten_side(sources, plan, plan.widths.source, eos=has_source)
        target = flatten_side(targets, plan, plan.widths.target, eos=self.target_eos)
        target_in = np.roll(target.token, 1)
        first_in = [int(e.target[0]) if self.first_input is None else self.first_input for e in planned]
        target_in[target.position == 0] = first_in
        source_shape, target_shape = ((len(plan.rows), width) for width in plan.widths)
        features: dict[str, Tensor] = {}
        for name in planned[0].features if planned else ():
            row_N = np.repeat(np.arange(len(plan.rows)), list(map(len, plan.rows)))
            features |= FEATURES[name].pack([e.features[name] for e in planned], row_N, source.slot, source_shape)
        return Batch(
            source_BS=scatter(source.token, source.slot, source_shape),
            source_segment_BS=scatter(source.segment, source.slot, source_shape),
            source_position_BS=scatter(source.position, source.slot, source_shape),
            target_in_BT=scatter(target_in, target.slot, target_shape),
            target_out_BT=scatter(target.token, target.slot, target_shape),
            target_segment_BT=scatter(target.segment, target.slot, target_shape),
            target_position_BT=scatter(target.position, target.slot, target_shape),
            pairs=len(planned),
            source_tokens=len(source.token),
            target_tokens=len(target.token),
            unpacked=max(map(len, plan.rows), default=0) <= 1,
            features=features,
        )


EXAMPLE_FORMATS = {
    "pairs": ExampleFormat("pairs", "one side empty", "one side empty"),
    # Slot n of a target row is the label of text n in the source row. Labels are not predicted from one another.
    "labels": ExampleFormat(
        "texts", "without text", "with a label that training does not have", target_eos=False, first_input=PAD
    ),
    "lines": ExampleFormat("lines", "", "empty"),
    # Windows of a long text, each with the token that follows it.
    "windows": ExampleFormat("lines", "", "", target_eos=False, first_input=None, keeps_eos=True),
}
collate_pairs = EXAMPLE_FORMATS["pairs"].collate
