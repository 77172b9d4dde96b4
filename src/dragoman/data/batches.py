"""Batches of fixed shape from examples of different lengths.

Compiled code and CUDA graphs need tensors of few shapes. So all rows of a batch have the same width, and in a packed
batch each row contains several complete sentence pairs:

    source_BS           a  dog  </s> | two  men  walk  </s> | <pad>
    source_segment_BS   1   1    1   |  2    2    2     2   |   0
    source_position_BS  0   1    2   |  0    1    2     3   |   0

Segment ids restrict attention to the sentence, positions restart in every sentence, and nothing is truncated. Rows are
filled by best fit: the pair is added that fills the gap best. A few per cent of the slots (entries of a tensor) remain
padding (MIN_FILL).

There are two steps. A *layout* (LAYOUTS) plans which examples share which row, from their lengths alone. Then the
ExampleFormat of the task (EXAMPLE_FORMATS) collates a planned batch: it writes the examples into tensors. Lengths are
counted in slots: those of sentence pairs include the </s> of each side.

Shapes   B rows   S source width   T target width   N examples   2 source and target
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
MAX_STEPS_PER_ROW = 128  # when rows are filled, lengths are compared in steps of 1/128 of a row
MIN_FILL = 0.935  # fraction of slots that are not padding, required by `choose_widths` if possible
DOUBLING_COST = 0.015  # a doubled width must increase the fill by more than this, because attention then costs more
PACKING_CHUNK = 8192  # number of pairs packed at a time: enough to fill rows well, few enough to be fast
UNLIMITED_POSITIONS = 1 << 20  # default of `max_positions`: more than any sentence needs
# 8, 10, 12, 14, 16, 20, ...: four widths from each power of two to the next
BUCKET_WIDTHS = np.array([2.0**octave * quarter for octave in range(1, 20) for quarter in (4, 5, 6, 7)])


class Widths(NamedTuple):
    """The width of a row on each side, in slots."""

    source: int
    target: int

    def scale(self, factor: int) -> Widths:
        """Return both widths multiplied by a factor."""
        return Widths(self.source * factor, self.target * factor)


class BatchPlan(NamedTuple):
    """The examples in each row of a batch, as indices, and the widths of the rows."""

    rows: list[list[int]]
    widths: Widths


class RankShard(NamedTuple):
    """The part of every batch that one rank of `world_size` processes computes. By default it is the full batch."""

    rank: int = 0
    world_size: int = 1

    def row_range(self, height: int) -> tuple[int, int]:
        """Return the range of this rank's rows, as start and end, in a batch of `height` rows."""
        return height * self.rank // self.world_size, height * (self.rank + 1) // self.world_size


class BestFitTable:
    """The items (pairs, by index) that are not in a row yet, with a table of the best item for each size of gap.

    Lengths are rounded up to steps, MAX_STEPS_PER_ROW per row (fewer in a narrow row). Items of the same lengths share
    a cell of the table and are interchangeable. `best_ST[s, t]` is the preference of the best item for a gap of s
    source and t target steps. The table is rebuilt only when the cell of that item has become empty.

    Shapes   S and T: lengths of source and target in steps, from 0 to the full width   N items
    """

    def __init__(self, length_2N: NDArray[np.int64], widths: Widths) -> None:
        self.widths = widths
        self.steps_per_row = [min(MAX_STEPS_PER_ROW, width) for width in widths]
        S, T = self.shape = (self.steps_per_row[0] + 1, self.steps_per_row[1] + 1)
        # Longer items are preferred (to 1/1000 of a row). The preference modulo S * T is the index of the cell.
        # relative_ST: source plus target length, as fractions of a row.
        relative_ST = sum(np.ix_(*(np.arange(n) / max(n - 1, 1) for n in self.shape)))
        self.preference_ST = np.round(relative_ST * 1000).astype(np.int64) * S * T + np.arange(S * T).reshape(S, T)
        sides = zip(length_2N, self.steps_per_row, widths, strict=True)
        # In steps; -(-a // b) is a / b, rounded up.
        source_N, target_N = (-(-length_N * steps // width) for length_N, steps, width in sides)
        self.cell_N = (source_N * T + target_N).tolist()
        self.items_by_cell: dict[int, list[int]] = {}
        self.available_ST = np.zeros(self.shape, dtype=bool)  # cells that have items
        self.best_ST = self.find_best()

    def put(self, items: Iterable[int]) -> None:
        """Add items. Of the items in a cell, the last added is taken first."""
        for item in items:
            self.items_by_cell.setdefault(self.cell_N[item], []).append(item)
        self.available_ST.ravel()[list(self.items_by_cell)] = True
        self.best_ST = self.find_best()

    def find_best(self) -> NDArray[np.int64]:
        """Return the preference of the best item that fits into each gap, or -1 if no item fits."""
        preference_ST = np.where(self.available_ST, self.preference_ST, -1)
        return np.maximum.accumulate(np.maximum.accumulate(preference_ST, 0), 1)

    def take(self, cell: int) -> int:
        item = self.items_by_cell[cell].pop()
        if not self.items_by_cell[cell]:
            self.available_ST.ravel()[cell] = False
        return item

    def take_best(self, source: int, target: int) -> int | None:
        """Remove and return the best item for a gap of so many source and target slots, or None if no item fits."""
        sides = zip((source, target), self.steps_per_row, self.widths, strict=True)
        gap = tuple(min(slots * steps // width, steps) for slots, steps, width in sides)
        while (preference := int(self.best_ST[gap])) >= 0:
            if self.items_by_cell[cell := preference % self.best_ST.size]:
                return self.take(cell)
            self.best_ST = self.find_best()
        return None


def pack_rows(source_N: IntArray, target_N: IntArray, widths: Widths) -> list[BatchPlan]:
    """Fill one row after the other: start with the longest remaining pair, then add the pairs that fit best.

    Pairs wider than a row go to rows of 2, 4, 8, ... times the width, which are also filled with shorter pairs. The
    result has one plan for each of these widths.
    """
    length_2N = np.stack([source_N, target_N])
    relative_length_N = (length_2N / np.array(widths)[:, None]).max(0)  # 1: as long as a row
    doublings_N = np.ceil(np.log2(np.maximum(relative_length_N, 1.0))).astype(int).tolist()
    order = np.argsort(-relative_length_N, kind="stable").tolist()
    table = BestFitTable(length_2N, widths)
    table.put(item for item in reversed(order) if not doublings_N[item])
    plans = [BatchPlan([], widths.scale(2**k)) for k in range(max(doublings_N, default=0) + 1)]
    lengths, is_packed = length_2N.T.tolist(), [False] * len(order)
    for first in order:
        if is_packed[first]:
            continue
        if not doublings_N[first]:
            table.take(table.cell_N[first])  # removes `first` itself, the last item of its cell
        plan, row, item = plans[doublings_N[first]], [], first
        source_gap, target_gap = plan.widths
        while item is not None:
            row.append(item)
            is_packed[item] = True
            source_gap, target_gap = source_gap - lengths[item][0], target_gap - lengths[item][1]
            item = table.take_best(source_gap, target_gap)
        plan.rows.append(row)
    return plans


def choose_widths(source_N: IntArray, target_N: IntArray) -> Widths:
    """Return the narrowest widths with a fill of at least MIN_FILL; if there are none, the best trade-off.

    The longer side gets a power of two, the other side follows the ratio of the lengths in the corpus. Each candidate
    is tried on a sample of pairs. The fill of a side that is empty, or has one label per text, is ignored.
    """
    if source_N.sum() < target_N.sum():
        target, source = choose_widths(target_N, source_N)  # as if the longer side were the source
        return Widths(source, target)
    source_N, target_N = source_N[:PACKING_CHUNK], target_N[:PACKING_CHUNK]
    ratio = target_N.sum() / source_N.sum()
    utility: dict[Widths, float] = {}  # fill of the best candidate of each source width, minus the cost of its width
    for doublings, source in enumerate((64, 128, 256, 512)):
        # Target widths to try: multiples of 8 near the ratio of the lengths.
        targets = {min(max(8, round(source * ratio * slack / 8) * 8), source) for slack in (0.97, 1.0, 1.03)}
        fill: dict[Widths, float] = {}  # fraction of slots that are not padding, on the side with more padding
        for widths in (Widths(source, target) for target in sorted(targets)):
            slots_2 = sum(len(plan.rows) * np.array(plan.widths) for plan in pack_rows(source_N, target_N, widths))
            fill_2 = np.array([source_N.sum(), target_N.sum()]) / slots_2
            fill[widths] = float(fill_2[0] if target_N.max() <= 1 else fill_2.min())
        best = max(fill, key=fill.__getitem__)
        if fill[best] >= MIN_FILL:
            return best
        utility[best] = fill[best] - DOUBLING_COST * doublings
    return max(utility, key=utility.__getitem__)


def plan_packed(
    source_N: IntArray,
    target_N: IntArray,
    *,
    tokens: int,
    widths: Widths,
    rng: np.random.Generator,
    distinct_heights: int = 8,
) -> list[BatchPlan]:
    """Plan packed rows in random order, in batches of about `tokens` slots per side.

    All batches of a width have the same shape, except that the last may have fewer rows: its number of rows is one of
    `distinct_heights` equally spaced numbers. If that is 1, narrow rows are joined to fill the last batch of wide rows.
    """
    rows_by_factor: dict[int, list[list[int]]] = {1: []}  # factor: width of the rows as a multiple of `widths`
    for start in range(0, len(source_N), PACKING_CHUNK):
        end = start + PACKING_CHUNK
        for plan in pack_rows(source_N[start:end], target_N[start:end], widths):
            rows = rows_by_factor.setdefault(plan.widths.source // widths.source, [])
            rows.extend([start + i for i in row] for row in plan.rows)
    plans, narrow_rows = [], rows_by_factor[1]
    rng.shuffle(narrow_rows)
    for factor, rows in sorted(rows_by_factor.items(), reverse=True):
        scaled = widths.scale(factor)
        height = max(1, tokens // max(scaled))
        while distinct_heights == 1 and factor > 1 and len(rows) % height and len(narrow_rows) >= factor:
            rows.append([item for _ in range(factor) for item in narrow_rows.pop()])
        rng.shuffle(rows)
        for start in range(0, len(rows), height):
            filled = rows[start : start + height]
            step = -(
                -height // distinct_heights
            )  # the number of rows is a multiple of `step`: few shapes, few empty rows
            rows_needed = min(height, -(-len(filled) // step) * step)
            plans.append(BatchPlan(filled + [[]] * (rows_needed - len(filled)), scaled))
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

    Pairs are sorted by the length of the longer side, then by the difference of both lengths, in ascending order for
    odd lengths and in descending order for even ones. So the last pair of one length is similar to the first of the
    next. Pairs with the same lengths are in random order.
    """
    random_N = rng.random(len(source_N))
    longer_N, difference_N = np.maximum(source_N, target_N), source_N - target_N
    order = np.lexsort((random_N, np.where(longer_N % 2, difference_N, -difference_N), longer_N)).tolist()
    plans: list[BatchPlan] = []
    rows: list[list[int]] = []
    current = Widths(0, 0)  # widths of `rows`
    for item in order:
        lengths = Widths(int(source_N[item]), int(target_N[item]))
        extended = Widths(max(current.source, lengths.source), max(current.target, lengths.target))
        if rows and (len(rows) + 1) * max(extended) > tokens:
            plans.append(BatchPlan(rows, current))
            rows, extended = [], lengths
        rows.append([item])
        current = extended
    if rows:
        plans.append(BatchPlan(rows, current))
    rng.shuffle(plans)
    return plans


def plan_bucketed(
    source_N: IntArray,
    target_N: IntArray,
    *,
    tokens: int,
    widths: Widths,
    rng: np.random.Generator,
    max_positions: int = UNLIMITED_POSITIONS,
) -> list[BatchPlan]:
    """Plan one pair per row in batches of few shapes, for CUDA graphs, which are captured once per shape.

    The width of the longer side is one of BUCKET_WIDTHS, the other side follows in the ratio of `widths`. Both are at
    most `max_positions`, the maximum length that the model supports. Pairs left over go into a wider batch.
    """
    length_2N, ratio_2 = np.stack([source_N, target_N]), np.array(widths) / max(widths)
    needed_N = (length_2N / ratio_2[:, None]).max(0)  # minimum bucket width for each pair
    bucket_N = np.searchsorted(BUCKET_WIDTHS, needed_N - 1e-6)  # 1e-6 is a tolerance for rounding errors
    order = rng.permutation(len(bucket_N))
    plans: list[BatchPlan] = []
    rows: list[list[int]] = []
    for bucket in np.unique(bucket_N).tolist():
        rows += [[item] for item in order[bucket_N[order] == bucket].tolist()]
        longest_2 = length_2N[:, [row[0] for row in rows]].max(1)  # a sampled segmentation may exceed `max_positions`
        width_2 = np.maximum(np.minimum(np.ceil(BUCKET_WIDTHS[bucket] * ratio_2 - 1e-6), max_positions), longest_2)
        batch_widths = Widths(*width_2.astype(int).tolist())
        height = max(1, tokens // max(batch_widths))
        while len(rows) >= height:
            plans.append(BatchPlan(rows[:height], batch_widths))
            del rows[:height]
    if rows:
        plans.append(BatchPlan(rows + [[]] * (height - len(rows)), batch_widths))
    rng.shuffle(plans)
    return plans


Layout = Callable[..., list[BatchPlan]]  # a function such as `plan_padded`
LAYOUTS: dict[str, Layout] = {
    "packed": plan_packed,
    "packed_bucketed": partial(plan_packed, distinct_heights=1),  # one shape per width, for CUDA graphs
    "padded": plan_padded,
    "padded_bucketed": plan_bucketed,
}
BOUNDED_LAYOUTS = {"padded_bucketed"}  # their rows may be wider than the longest text, so `max_positions` limits them


class FlatSide(NamedTuple):
    """One side of all examples of a batch, with an entry for each token."""

    token: IntArray
    segment: IntArray  # number of the example in its row, from 1
    position: IntArray  # in the example, from 0
    slot: IntArray  # index in the flattened batch


def flatten_side(ids: Sequence[NDArray[np.integer]], plan: BatchPlan, width: int, *, eos: bool) -> FlatSide:
    """Concatenate one side of the examples of a plan, each with </s> if `eos` is set, without a loop over tokens.

    `ids` are the tokens of each example, in the order of the plan; `width` is the row width of this side.
    """
    counts = [len(row) for row in plan.rows]  # examples of each row
    first_N = np.repeat(np.cumsum(counts) - counts, counts).astype(np.int64)  # index of the first example of the row
    end = np.full(int(eos), EOS)  # empty if `eos` is False
    length_N = np.array([len(tokens) + eos for tokens in ids], dtype=np.int64)
    # `end[:0]`, an empty array, because np.concatenate needs at least one array.
    token = np.concatenate([end[:0], *(part for tokens in ids for part in (tokens, end))]).astype(np.int64)
    offset_N = np.cumsum(length_N) - length_N  # start of each example in `token`
    slot_N = np.repeat(np.arange(len(counts)), counts) * width + offset_N - offset_N[first_N]  # start in the batch
    position = np.arange(len(token)) - np.repeat(offset_N, length_N)
    segment = np.repeat(np.arange(len(ids)) - first_N + 1, length_N)
    return FlatSide(token, segment, position, np.repeat(slot_N, length_N) + position)


@dataclass(frozen=True)
class ExampleFormat:
    """How the examples of a task are stored and collated. EXAMPLE_FORMATS has one instance for each format.

    A source ends with </s>. Each target token is predicted from the previous ones, the first from `first_input`. If
    `first_input` is None, the first token of the target is only an input and is not predicted.
    """

    noun: str  # what messages call the examples
    empty_source: str  # reason to leave out an example without a source; not used without `has_source`
    empty_target: str  # reason to leave out an example without a target; "": every line of a text is kept
    has_source: bool = True
    target_eos: bool = True  # whether a target ends with </s>
    first_input: int | None = BOS
    stores_eos: bool = False  # whether the cached ids of a line end with </s>, because a window has several lines

    def find_reason_to_skip(self, source: Sequence[int], target: Sequence[int], max_length: int) -> str:
        """Return the reason to leave an example out of training, or "" to keep it."""
        if not target and self.empty_target:
            return self.empty_target
        if not source and self.has_source:
            return self.empty_source
        # If empty targets are kept, the text is divided into windows, so a target cannot be too long.
        longest = max(len(source) if self.has_source else 0, len(target) if self.empty_target else 0)
        return f"longer than {max_length} tokens" if longest > max_length else ""

    def count_slots(self, source_N: IntArray, target_N: IntArray) -> tuple[IntArray, IntArray]:
        """Return how many slots examples need on each side of a batch, given their stored lengths."""
        return source_N + self.has_source, target_N + self.target_eos - (self.first_input is None)

    def count_example_slots(self, examples: Sequence[Example]) -> tuple[IntArray, IntArray]:
        return self.count_slots(*(np.array([len(getattr(e, side)) for e in examples]) for side in ("source", "target")))

    def collate(self, plan: BatchPlan, examples: Examples, feature_names: Iterable[str] | None = None) -> Batch:
        """Write a planned batch into tensors.

        By default, the batch has the features of its examples; `feature_names` is needed if there may be no examples.
        """
        planned = [examples[item] for row in plan.rows for item in row]
        predicts_all = self.first_input is not None
        sources = [e.source if self.has_source else e.source[:0] for e in planned]
        targets = [e.target if predicts_all else e.target[1:] for e in planned]
        source = flatten_side(sources, plan, plan.widths.source, eos=self.has_source)
        target = flatten_side(targets, plan, plan.widths.target, eos=self.target_eos)
        target_in = np.roll(target.token, 1)  # the previous token; the first of each example is replaced below
        first_in = [int(e.target[0]) if self.first_input is None else self.first_input for e in planned]
        target_in[target.position == 0] = first_in
        source_shape, target_shape = ((len(plan.rows), width) for width in plan.widths)
        if feature_names is None:
            feature_names = planned[0].features if planned else ()
        row_N = np.repeat(np.arange(len(plan.rows)), list(map(len, plan.rows)))
        features: dict[str, Tensor] = {}
        for name in feature_names:
            values = [e.features[name] for e in planned]
            features |= FEATURES[name].collate(values, example_rows=row_N, slot_N=source.slot, shape=source_shape)
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
            is_unpacked=max(map(len, plan.rows), default=0) <= 1,
            features=features,
        )


EXAMPLE_FORMATS = {
    "pairs": ExampleFormat("pairs", "one side empty", "one side empty"),
    # Slot n of a target row is the label of text n in the source row. Labels are not predicted from previous labels.
    "labels": ExampleFormat(
        "texts", "without text", "with a label that training does not have", target_eos=False, first_input=PAD
    ),
    "lines": ExampleFormat("lines", "", "empty", has_source=False),
    # Windows of a long text. The first token of the next window is also the last target of a window.
    "windows": ExampleFormat("lines", "", "", has_source=False, target_eos=False, first_input=None, stores_eos=True),
}
collate_pairs = EXAMPLE_FORMATS["pairs"].collate
