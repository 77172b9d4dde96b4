"""The batch stream: pairs occur according to their weight, in an order given by seed and epoch, from any position."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from dragoman.data import stream as stream_module
from dragoman.data.batches import LAYOUTS, RankShard, Widths
from dragoman.data.stream import BatchStream, StreamPosition, WeightedStore, prefetch
from dragoman.data.token_store import TokenStore, open_store
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.types import BOS, Batch, Example, Pair
from pairs import parametrize_pairwise
from toy_batch import examples, in_rows
from toy_text import ALL, PAIRS

LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
Item = tuple[Batch, StreamPosition]


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "SHUFFLE_WINDOW", 37)


def tokenizers(kind: str) -> Tokenizers:
    return Tokenizers(ALL[kind], ALL[kind])


def store(cache: Path, pairs: list[Pair], kind: str = "char") -> TokenStore:
    return open_store(
        lambda: iter(pairs),
        tokenizers(kind),
        key=str(hash(tuple(pairs))),
        cache=cache / "cache",
        max_length=500,
        text=True,
    )


def make(cache: Path, *, kind: str = "char", pairs: list[Pair] = PAIRS, **settings: object) -> BatchStream:
    given = {"layout": "packed", "tokens": 512, "seed": 3} | settings
    return BatchStream([WeightedStore(store(cache, pairs, kind), 1.0)], tokenizers(kind), **given)  # type: ignore[arg-type]


def epoch_of(stream: BatchStream, epoch: int) -> list[Item]:
    items = []
    for batch, place in stream.batches(StreamPosition(epoch)):
        items.append((batch, place))
        if place.epoch != epoch:
            return items
    raise AssertionError


def texts(batch: Batch, kind: str = "char") -> Iterator[Pair]:
    """Yield the pairs of a batch, decoded from its tensors."""
    for r in range(len(batch.source_BS)):
        for number in range(1, int(batch.source_segment_BS[r].max()) + 1):
            source = batch.source_BS[r][batch.source_segment_BS[r] == number].tolist()
            target = batch.target_in_BT[r][batch.target_segment_BT[r] == number].tolist()
            assert target[0] == BOS
            yield Pair(ALL[kind].decode(source[:-1]), ALL[kind].decode(target[1:]))


def equal(one: Batch, other: Batch) -> bool:
    numbers = {*Batch.__slots__} - {*one.tensors, "features"}
    return (
        one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
        and all(getattr(one, name) == getattr(other, name) for name in numbers)
    )


@LAYOUT
@pytest.mark.parametrize("sampling", [0.0, 0.3])
@pytest.mark.usefixtures("small_windows")
def test_an_epoch_has_every_pair_once(tmp_path: Path, layout: str, sampling: float) -> None:
    stream = make(tmp_path, layout=layout, kind="bpe", sampling=sampling)
    for epoch in (0, 5):
        found = Counter(pair for batch, _ in epoch_of(stream, epoch) for pair in texts(batch, "bpe"))
        assert found == Counter(PAIRS)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.5, 0.5), (3.0, 0.25), (0.1, 2.0)])
@pytest.mark.usefixtures("small_windows")
def test_weights_set_how_often_examples_occur(tmp_path: Path, weights: tuple[float, float]) -> None:
    """2.5: every pair twice, and a random half of them once more; 0.5: a random half."""
    halves = [PAIRS[:80], PAIRS[80:]]
    parts = [WeightedStore(store(tmp_path, half), weight) for half, weight in zip(halves, weights)]
    stream = BatchStream(parts, tokenizers("char"), layout="packed", tokens=512, seed=3)
    chosen = []
    for epoch in (0, 1):
        found = Counter(pair for batch, _ in epoch_of(stream, epoch) for pair in texts(batch))
        for half, weight in zip(halves, weights):
            counts = Counter(found[pair] for pair in half)
            more = round(weight % 1 * len(half))
            assert counts == Counter({int(weight): len(half) - more, int(weight) + 1: more}) - Counter()
        chosen.append(found)
    assert (chosen[0] != chosen[1]) == any(weight % 1 for weight in weights)


def test_less_than_half_a_pair_is_added_in_some_epochs(tmp_path: Path) -> None:
    parts = [WeightedStore(store(tmp_path, PAIRS[:80]), 1.0), WeightedStore(store(tmp_path, PAIRS[80:82]), 0.2)]
    stream = BatchStream(parts, tokenizers("char"), layout="packed", tokens=512, seed=3)
    counts = Counter(len(stream.order(epoch)) - 80 for epoch in range(500))
    assert set(counts) == {0, 1}
    assert 150 < counts[1] < 250  # two fifths of them
    assert {int(index) for epoch in range(50) for index in stream.order(epoch)} == set(range(82))


def test_weights_that_leave_no_pair_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"weights \(0.001\)"):
        BatchStream(
            [WeightedStore(store(tmp_path, PAIRS), 0.001)], tokenizers("char"), layout="packed", tokens=512, seed=3
        )


@LAYOUT
@pytest.mark.parametrize("sampling", [0.0, 0.3])
@pytest.mark.usefixtures("small_windows")
def test_a_stream_resumed_anywhere_yields_the_same_batches(tmp_path: Path, layout: str, sampling: float) -> None:
    def begin() -> BatchStream:
        return make(tmp_path, layout=layout, kind="unigram", sampling=sampling, tokens=256)

    whole = list(islice(begin().batches(StreamPosition()), 60))
    places = [StreamPosition(), *(place for _, place in whole)]
    assert {place.epoch for place in places} >= {0, 1}
    assert max(place.window for place in places) > 2
    for at in range(0, 50, 7):
        rest = islice(begin().batches(replace(places[at])), 10)
        for (batch, place), (other, other_place) in zip(rest, whole[at:]):
            assert equal(batch, other)
            assert place == other_place


def test_examples_are_returned_by_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read in file order, and pages are released in between."""
    monkeypatch.setattr(stream_module, "RELEASE_EVERY", 5)
    stream = make(tmp_path, kind="bpe")
    indices = np.array([7, 3, 199, 3, 0, 42, 7, 150, 8, 9, 1, 2], np.uint32)
    wanted = [0, 1, 2, 3, 4, 6, 7, 9, 11]
    examples = stream.read_examples(indices, 2, wanted)
    assert sorted(examples) == wanted
    for place, found in examples.items():
        expected = stream.corpora[0].store.read_example(int(indices[place]))
        assert found.source.tolist() == expected.source.tolist()
        assert found.target.tolist() == expected.target.tolist()
        assert found.line == indices[place]


@parametrize_pairwise({"world": [2, 3, 7], "layout": [*LAYOUTS], "sampling": [0.0, 0.3]})
@pytest.mark.usefixtures("small_windows")
def test_the_rows_of_all_ranks_are_the_batches_of_one_process(
    tmp_path: Path, layout: str, sampling: float, world: int
) -> None:
    """Every number of processes has the same batches, divided by rows; each process counts the pairs of all rows."""
    shares = [RankShard(rank, world) for rank in range(world)]
    streams = [
        make(tmp_path, layout=layout, kind="bpe", sampling=sampling, shard=each) for each in (RankShard(), *shares)
    ]
    idle = 0
    for (whole, place), *parts in islice(zip(*(stream.batches(StreamPosition()) for stream in streams)), 12):
        height = len(whole.source_BS)
        cuts = [share.row_range(height) for share in shares]
        assert {after for _, after in parts} == {place}
        assert [cut[0] for cut in cuts] + [height] == [0] + [cut[1] for cut in cuts]
        for (part, _), (start, end) in zip(parts, cuts):
            assert part.total_rows == height
            assert end == start or part.first_row == start
            assert end > start or not part.source_segment_BS.any()
            idle += end == start
        for name, tensor in whole.tensors.items():
            rows = [part.tensors[name][: end - start] for (part, _), (start, end) in zip(parts, cuts)]
            assert torch.equal(torch.cat(rows), tensor), name
        for name in {*Batch.__slots__} - {*whole.tensors, "features", "first_row", "total_rows"}:
            assert {getattr(part, name) for part, _ in parts} == {getattr(whole, name)}, name
    assert idle or (layout, world) != ("packed", 7)


def test_positions_never_repeat(tmp_path: Path) -> None:
    places = [place for _, place in islice(make(tmp_path).batches(StreamPosition()), 100)]
    order = [(place.epoch, place.window, place.batch) for place in places]
    assert order == sorted(set(order))


@LAYOUT
def test_epochs_and_seeds_differ(tmp_path: Path, layout: str) -> None:
    def first(seed: int, epoch: int) -> list[Pair]:
        stream = make(tmp_path, layout=layout, seed=seed)
        return [pair for batch, _ in epoch_of(stream, epoch) for pair in texts(batch)]

    orders = [first(seed, epoch) for seed, epoch in ((3, 0), (3, 1), (4, 0))]
    assert orders[0] == first(3, 0)
    assert all(one != other for i, one in enumerate(orders) for other in orders[:i])
    shared = sum(a == b for a, b in zip(orders[0], orders[1]))
    assert shared < len(PAIRS) / 4  # shuffled, not rotated or nudged


def read_epoch(stream: BatchStream, epoch: int) -> list[Example]:
    """Return the examples of an epoch in the order of the corpus."""
    window, examples = next(stream.read_windows(StreamPosition(epoch)))
    examples = examples or stream.read_examples(window.indices, epoch, range(len(window.indices)))
    return [examples[slot] for slot in np.argsort(window.indices).tolist()]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_segmentations_differ_between_epochs_and_sides(tmp_path: Path, kind: str) -> None:
    same = [Pair(pair.source, pair.source) for pair in PAIRS]
    stream, plain = (make(tmp_path, kind=kind, pairs=same, sampling=rate) for rate in (0.3, 0.0))

    def cuts(some: BatchStream, epoch: int, side: str) -> list[list[int]]:
        return [getattr(example, side).tolist() for example in read_epoch(some, epoch)]

    assert cuts(stream, 0, "source") == cuts(stream, 0, "source")
    assert cuts(plain, 0, "source") == cuts(plain, 1, "target")
    for one, other in ((0, "target"), (1, "source")):
        differing = sum(a != b for a, b in zip(cuts(stream, 0, "source"), cuts(stream, one, other)))
        assert differing > len(same) / 2


def test_sampling_does_not_change_tokenizers_with_one_segmentation(tmp_path: Path) -> None:
    sampled, plain = (make(tmp_path, kind="char", sampling=rate) for rate in (0.3, 0.0))
    for one, other in zip(read_epoch(sampled, 4), read_epoch(plain, 0), strict=True):
        assert one.source.tolist() == other.source.tolist()


def test_widths_are_chosen_from_the_corpus_unless_given(tmp_path: Path) -> None:
    chosen = make(tmp_path).widths
    assert all(
        batch.source_BS.size(1) % chosen.source == 0 for batch, _ in islice(make(tmp_path).batches(StreamPosition()), 9)
    )
    given = make(tmp_path, widths=Widths(256, 320))
    assert all(batch.source_BS.size(1) == 256 for batch, _ in islice(given.batches(StreamPosition()), 3))


def items(count: int) -> Iterator[Item]:
    some = examples(count)
    for i in range(count):
        yield in_rows([[i]], some), StreamPosition(0, 0, i + 1)


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


@pytest.mark.parametrize("depth", [1, 4, 100])
def test_prefetch_yields_the_same_items_and_ends(depth: int) -> None:
    got = list(prefetch(lambda: items(20), depth))
    assert [place for _, place in got] == [place for _, place in items(20)]
    assert all(equal(batch, other) for (batch, _), (other, _) in zip(got, items(20)))
    assert not running()


def test_prefetch_reads_at_most_depth_items_ahead() -> None:
    made: list[int] = []

    def count() -> Iterator[Item]:
        for i, item in enumerate(items(50)):
            made.append(i)
            yield item

    stream = prefetch(count, 3)
    next(stream)
    limit = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 5  # one taken, three waiting, one in hand
    stream.close()
    assert not running()


@pytest.mark.parametrize("error", [UserError("a deleted file"), KeyError("x"), KeyboardInterrupt()])
def test_prefetch_raises_the_exception_of_its_thread(error: BaseException) -> None:
    def breaking() -> Iterator[Item]:
        yield from items(2)
        raise error

    stream = prefetch(breaking)
    assert len(list(islice(stream, 2))) == 2
    with pytest.raises(type(error)) as caught:
        next(stream)
    assert caught.value is error
    assert not running()


def test_prefetch_ends_its_thread_when_it_is_closed() -> None:
    def endless() -> Iterator[Item]:
        while True:
            yield from items(3)

    stream = prefetch(endless)
    next(stream)
    assert len(running()) == 1
    stream.close()
    assert not running()


def test_an_epoch_is_shuffled_whole(tmp_path: Path) -> None:
    """The complete order is shuffled, differently for every seed and epoch; it takes four bytes per pair."""
    orders = [make(tmp_path, seed=seed).order(epoch) for seed, epoch in ((3, 0), (3, 1), (4, 0))]
    for i, order in enumerate(orders):
        assert order.dtype == np.uint32
        assert sorted(order.tolist()) == list(range(len(PAIRS)))
        for other in [np.arange(len(PAIRS)), *orders[:i]]:
            assert (order == other).mean() < 0.1
