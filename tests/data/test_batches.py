"""Layouts and collation: every token is in exactly one slot, sentences stay separate, and there is little padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dragoman.data.batches import (
    LAYOUTS,
    MAX_STEPS_PER_ROW,
    BatchPlan,
    Widths,
    choose_widths,
    collate_pairs,
    pack_rows,
    plan_bucketed,
    plan_packed,
    plan_padded,
)
from dragoman.data.features import FEATURES
from dragoman.phrasebook.generate import generate_pairs
from dragoman.types import BOS, EOS, PAD, Batch, Example
from toy_batch import examples, in_rows, log_normal

Lengths = NDArray[np.int64]

LENGTH = st.integers(2, 40) | st.integers(2, 300)  # with the end mark
LENGTHS = st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=60)
WIDTHS = st.builds(Widths, st.integers(8, 96), st.integers(8, 96))
KINDS = pytest.mark.parametrize("layout", LAYOUTS)


def planned(
    layout: str, lengths: Sequence[tuple[int, int]], widths: Widths, tokens: int, seed: int = 0
) -> tuple[list[BatchPlan], Lengths, Lengths]:
    source_N, target_N = np.array(lengths).T
    rng = np.random.default_rng(seed)
    return LAYOUTS[layout](source_N, target_N, tokens=tokens, widths=widths, rng=rng), source_N, target_N


@KINDS
@given(lengths=LENGTHS, widths=WIDTHS, tokens=st.integers(64, 2000))
def test_every_pair_is_in_exactly_one_row_that_is_wide_enough(
    layout: str, lengths: list[tuple[int, int]], widths: Widths, tokens: int
) -> None:
    grids, source_N, target_N = planned(layout, lengths, widths, tokens)
    assert sorted(item for grid in grids for row in grid.rows for item in row) == list(range(len(lengths)))
    for grid in grids:
        assert any(grid.rows)
        for row in grid.rows:
            assert source_N[row].sum() <= grid.widths.source
            assert target_N[row].sum() <= grid.widths.target


@KINDS
@given(lengths=LENGTHS, widths=WIDTHS, tokens=st.integers(64, 2000))
def test_only_batches_of_a_single_row_exceed_the_token_budget(
    layout: str, lengths: list[tuple[int, int]], widths: Widths, tokens: int
) -> None:
    for grid in planned(layout, lengths, widths, tokens)[0]:
        assert len(grid.rows) * max(grid.widths) <= tokens or len(grid.rows) == 1


@KINDS
@given(lengths=LENGTHS, widths=WIDTHS, seed=st.integers(0, 100))
def test_a_layout_is_a_function_of_its_seed(
    layout: str, lengths: list[tuple[int, int]], widths: Widths, seed: int
) -> None:
    assert planned(layout, lengths, widths, 500, seed)[0] == planned(layout, lengths, widths, 500, seed)[0]


@KINDS
def test_another_seed_gives_another_order(layout: str) -> None:
    source_N, target_N = log_normal(500, mean=12, spread=0.4, ratio=1.1, noise=0.2)
    lengths = list(zip(source_N, target_N))
    one, two = (planned(layout, lengths, Widths(64, 64), 512, seed)[0] for seed in (1, 2))
    assert one != two
    alike = {frozenset(map(tuple, grid.rows)) for grid in one} & {frozenset(map(tuple, grid.rows)) for grid in two}
    assert len(alike) < len(one) / 2  # not the same grids in another order


@KINDS
def test_batches_are_in_random_order(layout: str) -> None:
    source_N, target_N = log_normal(2000, mean=40, spread=0.6, ratio=1.1, noise=0.2)
    widths = [grid.widths for grid in planned(layout, list(zip(source_N, target_N)), Widths(64, 64), 512)[0]]
    assert len(set(widths)) > 2
    wider = sum(one < other for one, other in pairwise(widths))
    narrower = sum(one > other for one, other in pairwise(widths))
    assert min(wider, narrower) > 4  # not one width after the other


@given(lengths=LENGTHS, widths=WIDTHS, tokens=st.integers(64, 2000))
def test_packed_rows_have_few_shapes(lengths: list[tuple[int, int]], widths: Widths, tokens: int) -> None:
    """Widths are the given ones times 1, 2, 4, ...; all batches of a width but the last have the same height."""
    grids, source_N, target_N = planned("packed", lengths, widths, tokens)
    for grid in grids:
        factor = grid.widths.source // widths.source
        assert grid.widths == widths.scale(factor)
        assert factor & (factor - 1) == 0
        if factor > 1:  # a grid this wide is there for pairs that need it
            half, items = widths.scale(factor // 2), [item for row in grid.rows for item in row]
            assert any(source_N[item] > half.source or target_N[item] > half.target for item in items)
    for one in {grid.widths for grid in grids}:
        heights = sorted((len(grid.rows) for grid in grids if grid.widths == one), reverse=True)
        full = max(1, tokens // max(one))
        assert heights[:-1] == [full] * (len(heights) - 1)
        assert heights[-1] == full or heights[-1] % -(-full // 8) == 0


@given(lengths=LENGTHS, widths=WIDTHS)
def test_no_two_half_empty_rows(lengths: list[tuple[int, int]], widths: Widths) -> None:
    """What would fit into a row with a grain to spare is put there: no row is begun for a pair that had room before.

    Pairs wider than a row are not asked: each of them begins one of its own.
    """
    source_N, target_N = np.array(lengths).T
    spare = np.array([0 if width <= MAX_STEPS_PER_ROW else width / MAX_STEPS_PER_ROW * 2 for width in widths])
    before = np.zeros((0, 2))
    for shelf in reversed(pack_rows(source_N, target_N, widths)):
        for row in shelf.rows:
            first = np.array([source_N[row[0]], target_N[row[0]]])
            assert (first > widths).any() or not (before >= first + spare).all(1).any()
            room = np.array(shelf.widths) - [source_N[row].sum(), target_N[row].sum()]
            assert (room >= 0).all()
            before = np.vstack([before, room])


def test_a_gap_is_filled_with_the_pair_that_fits_best() -> None:
    source_N, target_N = np.array([[6, 6], [4, 3], [4, 4], [3, 4], [1, 1]]).T
    assert pack_rows(source_N, target_N, Widths(10, 10)) == [BatchPlan([[0, 2], [1, 3, 4]], Widths(10, 10))]


def test_short_pairs_fill_the_row_of_a_long_pair() -> None:
    shelves = pack_rows(np.array([3, 20, 3, 3, 3]), np.array([3, 17, 3, 3, 3]), Widths(8, 8))
    assert [(shelf.widths.source, shelf.rows) for shelf in shelves] == [(8, []), (16, []), (32, [[1, 0, 2, 3, 4]])]


@given(lengths=LENGTHS, tokens=st.integers(64, 2000))
def test_padded_rows_hold_one_pair_each(lengths: list[tuple[int, int]], tokens: int) -> None:
    grids, source_N, target_N = planned("padded", lengths, Widths(64, 64), tokens)
    for grid in grids:
        items = [item for row in grid.rows for item in row]
        assert all(len(row) == 1 for row in grid.rows)
        for width, length_N in zip(grid.widths, (source_N, target_N)):
            assert width == length_N[items].max()


@given(lengths=LENGTHS, widths=WIDTHS, tokens=st.integers(64, 2000))
def test_stepped_rows_hold_one_pair_each(lengths: list[tuple[int, int]], widths: Widths, tokens: int) -> None:
    """The shape of a batch is a function of its width; only one batch has empty rows."""
    grids, _, _ = planned("padded_bucketed", lengths, widths, tokens)
    assert all(len(row) <= 1 for grid in grids for row in grid.rows)
    assert sum([] in grid.rows for grid in grids) <= 1
    heights = {(grid.widths, len(grid.rows)) for grid in grids}
    assert len(heights) == len({grid.widths for grid in grids})
    for grid in grids:
        assert len(grid.rows) * max(grid.widths) <= max(tokens, max(grid.widths))


def fill(grids: list[BatchPlan], source_N: Lengths, target_N: Lengths) -> tuple[float, float]:
    room = sum(len(grid.rows) * np.array(grid.widths) for grid in grids)
    return source_N.sum() / room[0], target_N.sum() / room[1]


CORPORA = {
    "news": log_normal(20_000, mean=26, spread=0.6, ratio=1.1, noise=0.2),
    "captions": log_normal(20_000, mean=14, spread=0.3, ratio=1.0, noise=0.2),
    "phrasebook": log_normal(20_000, mean=8, spread=0.35, ratio=1.05, noise=0.15),
    "longer target": log_normal(20_000, mean=26, spread=0.6, ratio=1.6, noise=0.3),
    "longer source": log_normal(20_000, mean=30, spread=0.5, ratio=0.6, noise=0.2),
    "characters": log_normal(20_000, mean=70, spread=0.5, ratio=1.15, noise=0.1),
}


@cache
def chosen(name: str) -> Widths:
    return choose_widths(*CORPORA[name])


@pytest.mark.parametrize("name", CORPORA)
def test_packed_rows_have_little_padding(name: str) -> None:
    lengths = CORPORA[name]
    grids = plan_packed(*lengths, tokens=8192, widths=chosen(name), rng=np.random.default_rng(0))
    assert sorted(item for grid in grids for row in grid.rows for item in row) == list(range(20_000))
    assert min(fill(grids, *lengths)) >= 0.93


@pytest.mark.parametrize(
    ("name", "least"), [("news", 0.93), ("captions", 0.95), ("phrasebook", 0.96), ("longer target", 0.85)]
)
def test_padded_batches_have_pairs_of_similar_length(name: str, least: float) -> None:
    lengths = CORPORA[name]
    sorted_in = plan_padded(*lengths, tokens=2048, widths=Widths(64, 64), rng=np.random.default_rng(0))
    assert min(fill(sorted_in, *lengths)) >= least


@pytest.mark.parametrize("name", CORPORA)
def test_stepped_rows_have_few_shapes_and_little_padding(name: str) -> None:
    """This also holds over many windows, whose longest texts differ."""
    lengths = CORPORA[name]
    grids = plan_bucketed(*lengths, tokens=4096, widths=chosen(name), rng=np.random.default_rng(0))
    assert min(fill(grids, *lengths)) >= 0.8
    shapes = {(grid.widths, len(grid.rows)) for grid in grids}
    for start in range(0, 20_000, 1000):
        some = [side[start : start + 1000] for side in lengths]
        grids = plan_bucketed(*some, tokens=4096, widths=chosen(name), rng=np.random.default_rng(0))
        shapes |= {(grid.widths, len(grid.rows)) for grid in grids}
    assert len(shapes) <= 25


@given(lengths=LENGTHS, widths=WIDTHS, tokens=st.integers(64, 2000))
def test_stepped_rows_are_not_wider_than_max_positions(
    lengths: list[tuple[int, int]], widths: Widths, tokens: int
) -> None:
    source_N, target_N = np.array(lengths).T
    most = max(source_N.max(), target_N.max())
    grids = plan_bucketed(
        source_N, target_N, tokens=tokens, widths=widths, rng=np.random.default_rng(0), max_positions=most
    )
    assert max(max(grid.widths) for grid in grids) <= most


def test_padded_batches_of_the_phrasebook_have_little_padding() -> None:
    """A token has about four characters."""
    some = [(len(pair.source) // 4 + 2, len(pair.target) // 4 + 2) for pair in generate_pairs("train", 16_000)]
    source_N, target_N = np.array(some).T
    grids = plan_padded(source_N, target_N, tokens=4096, widths=Widths(64, 64), rng=np.random.default_rng(0))
    places = sum(len(grid.rows) * sum(grid.widths) for grid in grids)
    assert (source_N.sum() + target_N.sum()) / places >= 0.95


@pytest.mark.parametrize("name", CORPORA)
def test_widths_follow_the_corpus(name: str) -> None:
    source_N, target_N = CORPORA[name]
    widths = chosen(name)
    assert max(widths) % 64 == 0
    assert widths.target % 8 == 0
    assert widths.target / widths.source == pytest.approx(target_N.sum() / source_N.sum(), rel=0.1)
    assert widths.source <= max(128, 4 * source_N.mean())  # attention costs grow with it


@pytest.mark.parametrize("ratio", [0.8, 0.9, 0.95, 1.0, 1.034, 1.07, 1.15, 1.3])
def test_short_sentences_get_narrow_rows_whatever_their_ratio(ratio: float) -> None:
    lengths = log_normal(4000, mean=14, spread=0.35, ratio=ratio, noise=0.15)
    widths = choose_widths(*lengths)
    assert widths.source <= 128
    grids = plan_packed(*lengths, tokens=2048, widths=widths, rng=np.random.default_rng(0))
    assert min(fill(grids, *lengths)) >= 0.93


@pytest.mark.parametrize("ratio", [0.8, 1.034, 1.15, 1.3])
def test_rows_that_cannot_be_full_are_narrow(ratio: float) -> None:
    """If the lengths of the two sides are hardly correlated, wider rows gain little and cost more."""
    assert choose_widths(*log_normal(3000, mean=14, spread=0.35, ratio=ratio, noise=0.25)).source <= 128


@given(LENGTHS)
def test_widths_can_be_chosen_for_any_lengths(lengths: list[tuple[int, int]]) -> None:
    source_N, target_N = np.array(lengths).T
    widths = choose_widths(source_N, target_N)
    assert min(widths) >= 8
    assert fill(
        plan_packed(source_N, target_N, tokens=1, widths=widths, rng=np.random.default_rng(0)), source_N, target_N
    )


IDS = st.lists(st.integers(4, 60), min_size=1, max_size=7)


@st.composite
def laid(draw: st.DrawFn) -> tuple[Batch, list[list[int]], list[Example]]:
    """A batch, its planned rows and their examples; some rows are empty, and some are not full."""
    some = [
        Example(np.array(source, np.uint16), np.array(target, np.uint16), line)
        for line, (source, target) in enumerate(draw(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=8)))
    ]
    items = draw(st.permutations(range(len(some))))
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=4)))
    rows = [list(items[a:b]) for a, b in zip([0, *cuts], [*cuts, len(items)])]
    spare = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    widths = Widths(
        *(
            max(sum(len(getattr(some[i], side)) + 1 for i in row) for row in rows) + more
            for side, more in zip(("source", "target"), spare)
        )
    )
    return collate_pairs(BatchPlan(rows, widths), some), rows, some


@given(laid())
def test_a_batch_contains_the_tokens_of_its_examples(case: tuple[Batch, list[list[int]], list[Example]]) -> None:
    """Both sides of a pair are in the same row with the same segment number, each token at its position."""
    batch, rows, some = case
    for r, row in enumerate(rows):
        for number, item in enumerate(row, 1):
            source, target = some[item].source.tolist(), some[item].target.tolist()
            here = batch.source_segment_BS[r] == number
            assert batch.source_BS[r][here].tolist() == [*source, EOS]
            assert batch.source_position_BS[r][here].tolist() == list(range(len(source) + 1))
            here = batch.target_segment_BT[r] == number
            assert batch.target_in_BT[r][here].tolist() == [BOS, *target]
            assert batch.target_out_BT[r][here].tolist() == [*target, EOS]
            assert batch.target_position_BT[r][here].tolist() == list(range(len(target) + 1))
        assert batch.source_segment_BS[r].max() == batch.target_segment_BT[r].max() == len(row)


@given(laid())
def test_slots_without_a_token_are_padding(case: tuple[Batch, list[list[int]], list[Example]]) -> None:
    batch, rows, some = case
    empty_BS, empty_BT = batch.source_segment_BS == 0, batch.target_segment_BT == 0
    for grid in (batch.source_BS, batch.source_position_BS):
        assert (grid[empty_BS] == PAD).all()
    for grid in (batch.target_in_BT, batch.target_out_BT, batch.target_position_BT):
        assert (grid[empty_BT] == PAD).all()
    assert int((~empty_BS).sum()) == batch.source_tokens == sum(len(e.source) + 1 for e in some)
    assert int((~empty_BT).sum()) == batch.target_tokens == sum(len(e.target) + 1 for e in some)
    assert batch.pairs == len(some)
    assert batch.tokens == batch.source_tokens + batch.target_tokens
    assert len(batch.source_BS) == len(batch.target_in_BT) == len(rows)


@given(laid())
def test_rows_are_filled_from_the_left(case: tuple[Batch, list[list[int]], list[Example]]) -> None:
    batch = case[0]
    for segment in (batch.source_segment_BS, batch.target_segment_BT):
        order = torch.where(segment == 0, 1000, segment)
        assert torch.equal(order, order.sort(dim=1).values)


def test_moving_a_batch_moves_all_tensors() -> None:
    empty = collate_pairs(BatchPlan([[], []], Widths(8, 8)), [], FEATURES)
    batch = replace(in_rows([[0, 1], [2]], examples(3)), features=empty.features)
    moved = batch.to(torch.device("meta"))
    assert all(tensor.device.type == "meta" for tensor in moved.tensors.values())
    assert batch.tensors.keys() == moved.tensors.keys() > {"source_BS", *batch.features}
    for name in {*batch.__slots__} - {*batch.tensors, "features"}:
        assert getattr(batch, name) == getattr(moved, name)
    assert {name: t.shape for name, t in batch.tensors.items()} == {name: t.shape for name, t in moved.tensors.items()}
