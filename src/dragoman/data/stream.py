"""A seeded, endless stream of batches over one or more corpora; its state is a StreamPosition.

The order of each epoch is a function of (seed, epoch). The shuffled order is divided into windows of SHUFFLE_WINDOW
examples that are packed one after the other. So only one window has to be in memory, and a resumed run repacks at most
one window.

Every process plans the same batches from the lengths of all examples, then reads and collates only its own rows. So
the batches of a run do not depend on the number of processes.

Shapes   N examples, or their slots in a window   P corpora
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.data import sampling_workers as samplers
from dragoman.data.batches import (
    BOUNDED,
    EXAMPLE_FORMATS,
    LAYOUTS,
    BatchPlan,
    RankShard,
    Widths,
    choose_widths,
    count_all_rows,
)
from dragoman.data.features import FEATURES, IntArray, fill_features
from dragoman.data.token_store import TokenStore
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.types import Batch, Example

SHUFFLE_WINDOW = 65_536  # examples that are packed together
RELEASE_EVERY = 8192  # examples after which memory-mapped pages are released
PAIRS_PER_TASK = 1024  # pairs in a task of a worker process, which takes about a tenth of a second


@dataclass(frozen=True)
class StreamPosition:
    """The position of the next batch, from which a stream can be resumed."""

    epoch: int = 0
    window: int = 0
    batch: int = 0
    passed: float = 0.0  # fraction of the epoch before the next batch


class WeightedStore(NamedTuple):
    """A corpus, and how often each of its examples occurs in an epoch."""

    store: TokenStore
    weight: float


class ShuffleWindow(NamedTuple):
    """The indices of examples that are packed together, the position of the window, and that of the next window."""

    begin: StreamPosition
    indices: NDArray[np.uint32]
    after: StreamPosition


class BatchStream:
    """An endless stream of batches. If `sampling` is above 0, every text gets a new random segmentation in each epoch.

    `max_positions`, if given, is the maximum length of a text that the model supports, including <s> or </s>.
    """

    def __init__(
        self,
        parts: Sequence[WeightedStore],
        tokenizers: Tokenizers,
        *,
        layout: str,
        tokens: int,
        seed: int,
        sampling: float = 0.0,
        form: str = "pairs",
        widths: Widths | None = None,
        max_positions: int | None = None,
        shard: RankShard = RankShard(),  # noqa: B008 - a tuple is immutable
    ) -> None:
        self.parts, self.tokenizers, self.form = parts, tokenizers, EXAMPLE_FORMATS[form]
        self.layout = LAYOUTS[layout]
        if max_positions and layout in BOUNDED:
            self.layout = partial(self.layout, max_positions=max_positions)
        self.max_tokens = max_positions - 1 if max_positions else sys.maxsize
        self.tokens, self.seed, self.sampling, self.shard = tokens, seed, sampling, shard
        sizes = zip(self.sizes(0), (part.weight for part in parts), strict=True)
        if not any(int(weight) * size + round(weight % 1 * size) for size, weight in sizes):
            weights = ", ".join(f"{part.weight:g}" for part in parts)
            raise UserError(f"the corpora are too small for their weights ({weights}): no pair is left to train on")
        lengths = [] if widths else [self.form.count_slots(*part.store.lengths(4096)) for part in self.parts]
        self.widths = widths or choose_widths(*(np.concatenate(side) for side in zip(*lengths, strict=True)))

    def sizes(self, epoch: int) -> list[int]:  # noqa: ARG002 - the number of text windows depends on the epoch
        """Return the number of examples of each corpus."""
        return [len(part.store) for part in self.parts]

    def order(self, epoch: int) -> NDArray[np.uint32]:
        """Return the shuffled indices of an epoch. Weight 2.5: all examples occur twice, a random half three times."""
        rng = np.random.default_rng([self.seed, epoch])
        chosen, first = [], 0
        for which, (size, (_, weight)) in enumerate(zip(self.sizes(epoch), self.parts, strict=True)):
            lines = np.arange(first, first + size, dtype=np.uint32)
            extra = weight % 1 * size  # if this is below 0.5, one example is added in some epochs
            count = round(extra) or int(np.random.default_rng([self.seed, epoch, which]).random() < extra)
            extra_lines = rng.permutation(size)[:count] if weight % 1 else np.arange(0)
            chosen += [lines] * int(weight) + [lines[np.sort(extra_lines)]]
            first += size
        order = np.concatenate(chosen)
        rng.shuffle(order)
        return order

    def example(self, index: int, epoch: int) -> Example:
        """Read one example, with a random segmentation if `sampling` is above 0."""
        which, line = self.locate(index, epoch)
        store = self.parts[which].store
        if not self.sampling:
            return store.example(line)
        pair, key = store.pair(line), (self.seed, epoch, index)
        source, target = samplers.sample_pair(
            self.tokenizers, pair, rate=self.sampling, key=key, max_tokens=self.max_tokens
        )
        features = {
            name: FEATURES[name].align(store.record(name, line), pair.source, source, self.tokenizers.source)
            for name in store.features
        }
        return Example(np.asarray(source), np.asarray(target), line, features)

    def locate(self, index: int, epoch: int) -> tuple[int, int]:
        """Return the number of the corpus that contains an example, and the line of the example there."""
        for which, size in enumerate(self.sizes(epoch)):
            if index < size:
                return which, index
            index -= size
        raise IndexError(index)

    def examples(self, indices: NDArray[np.uint32], epoch: int, wanted: Iterable[int]) -> dict[int, Example]:
        """Return the wanted examples of a window by slot, read in file order, so that few pages are mapped."""
        found: dict[int, Example] = {}
        slot_N = np.fromiter(wanted, dtype=np.int64)
        slot_N = slot_N[np.argsort(indices[slot_N], kind="stable")]
        for start in range(0, len(slot_N), RELEASE_EVERY):
            some_N = slot_N[start : start + RELEASE_EVERY]
            found.update(zip(some_N.tolist(), self.read(indices[some_N].astype(np.int64), epoch), strict=True))
            self.forget_pages()
        return found

    def read(self, index_N: NDArray[np.int64], epoch: int) -> Iterable[Example]:
        """Read examples whose indices are sorted."""
        if self.sampling:
            return [self.example(index, epoch) for index in index_N.tolist()]
        rows = self.split_by_store(index_N, epoch)
        return [example for store, some_N, first in rows for example in store.examples(some_N - first)]

    def split_by_store(
        self, index_N: NDArray[np.int64], epoch: int
    ) -> Iterator[tuple[TokenStore, NDArray[np.int64], int]]:
        """Split sorted indices by store; yield each store, its indices and its first index."""
        end_P = np.cumsum(self.sizes(epoch))
        of_parts = np.split(index_N, np.searchsorted(index_N, end_P[:-1]))
        return zip((part.store for part in self.parts), of_parts, [0, *end_P[:-1].tolist()], strict=True)

    def forget_pages(self) -> None:
        for part in self.parts:
            part.store.forget_pages()

    def lengths(self, indices: NDArray[np.uint32], epoch: int) -> tuple[IntArray, IntArray]:
        """Return how many positions these examples need on each side, without reading the examples."""
        length_2N, first = np.zeros((2, len(indices)), dtype=np.int64), 0
        for part, size in zip(self.parts, self.sizes(epoch), strict=True):
            here = (indices >= first) & (indices < first + size)
            length_2N[:, here] = part.store.lengths_of(indices[here].astype(np.int64) - first)
            first += size
        return self.form.count_slots(*length_2N)

    def plan(
        self, window: ShuffleWindow, read: dict[int, Example]
    ) -> tuple[list[BatchPlan], tuple[IntArray, IntArray]]:
        """Plan the batches of a window; return them and the lengths of its examples.

        Lengths are taken from `read`, if the window was already read, or else from the stores.
        """
        epoch, every = window.begin.epoch, range(len(window.indices))
        lengths = self.form.lengths([read[slot] for slot in every]) if read else self.lengths(window.indices, epoch)
        rng = np.random.default_rng([self.seed, epoch, window.begin.window])
        return self.layout(*lengths, tokens=self.tokens, widths=self.widths, rng=rng), lengths

    def read_windows(self, place: StreamPosition) -> Iterator[tuple[ShuffleWindow, dict[int, Example]]]:
        """Yield each window with its examples if segmentations are sampled, or else with no examples.

        The lengths of sampled segmentations are needed for planning. Worker processes sample one window ahead and exit
        when this generator is closed.
        """
        tasks = min(sum(self.sizes(place.epoch)), SHUFFLE_WINDOW) // PAIRS_PER_TASK
        in_workers = self.sampling and not any(part.store.features for part in self.parts)
        if not (count := min(tasks, samplers.count_workers()) if in_workers else 0):
            for window in self.windows(place):
                every = range(len(window.indices) if self.sampling else 0)
                yield window, self.examples(window.indices, window.begin.epoch, every)
            return
        with samplers.SamplingPool(self.tokenizers, count) as pool:
            begun = ((window, self.submit(pool, window)) for window in self.windows(place))
            for (window, collect), _ in pairwise(begun):
                yield window, collect()

    def submit(self, pool: samplers.SamplingPool, window: ShuffleWindow) -> Callable[[], dict[int, Example]]:
        """Submit all examples of a window to the pool; return a function that waits for them."""
        epoch, slot_N = window.begin.epoch, np.argsort(window.indices, kind="stable")
        submitted = []
        for store, index_N, first in self.split_by_store(window.indices[slot_N].astype(np.int64), epoch):
            for start in range(0, len(index_N), PAIRS_PER_TASK):
                some_N = index_N[start : start + PAIRS_PER_TASK]
                line_N = some_N - first
                common = (self.sampling, self.seed, epoch, store.tag, self.max_tokens)
                task = samplers.SamplingTask(*common, some_N.tolist(), *store.texts(line_N))
                submitted.append((line_N, pool.submit(task)))
                store.forget_pages()

        def collect() -> dict[int, Example]:
            examples: list[Example] = []
            for line_N, future in submitted:
                sides = ((np.asarray(side.ids), [0, *side.ends]) for side in future.result())
                source, target = ([ids[start:end] for start, end in pairwise(ends)] for ids, ends in sides)
                examples += map(Example, source, target, line_N.tolist())
            return dict(zip(slot_N.tolist(), examples, strict=True))

        return collect

    def windows(self, place: StreamPosition) -> Iterator[ShuffleWindow]:
        """Yield shuffle windows, starting with the window that contains a position."""
        epoch, window = place.epoch, place.window
        while True:
            order = self.order(epoch)
            count = -(-len(order) // SHUFFLE_WINDOW)
            starts = [
                StreamPosition(epoch, number, passed=number * SHUFFLE_WINDOW / len(order)) for number in range(count)
            ]
            for begin, after in pairwise([*starts[window:], StreamPosition(epoch + 1)]):
                yield ShuffleWindow(begin, order[begin.window * SHUFFLE_WINDOW :][:SHUFFLE_WINDOW], after)
            epoch, window = epoch + 1, 0

    def batches(self, place: StreamPosition) -> Iterator[tuple[Batch, StreamPosition]]:
        """Yield the rows of this rank in each batch, and the position after the batch."""
        at = place.batch
        for window, read in self.read_windows(place):
            begin, indices, after = window
            plans, lengths = self.plan(window, read)
            local = {item for plan in plans[at:] for row in self.shard.select_rows(plan) for item in row}
            read = {item: read[item] for item in local} if read else self.examples(indices, begin.epoch, local)
            covered = (after.passed or 1.0) - begin.passed
            for number, plan in enumerate(plans[at:], at + 1):
                passed = begin.passed + covered * number / len(plans)
                last = number == len(plans)
                yield self.collate(plan, lengths, read), after if last else replace(begin, batch=number, passed=passed)
            at = 0

    def empty_batch(self) -> Batch:
        """Return a batch of one empty row."""
        none_N = np.zeros(0, dtype=np.int64)
        return self.collate(BatchPlan([[]], self.widths), (none_N, none_N), {})

    def collate(self, plan: BatchPlan, lengths: tuple[IntArray, IntArray], examples: dict[int, Example]) -> Batch:
        """Collate the rows of this rank, or an empty row if it has none: every rank takes part in collectives."""
        rows = self.shard.select_rows(plan)
        batch = self.form.collate(BatchPlan(rows or [[]], plan.widths), examples)
        if self.shard.world_size > 1:
            batch = count_all_rows(batch, plan, lengths, self.shard)
        if not any(rows):
            features = fill_features(self.parts[0].store.features, (len(batch.source_BS), plan.widths.source))
            batch = replace(batch, features=features)
        return batch


class TextWindowStream(BatchStream):
    """Batches from long texts, divided into windows of `context` tokens at different offsets in each epoch.

    Every token except the first of a text is predicted once per epoch. The first window has a random length, and the
    last window contains the remaining tokens.
    """

    def __init__(
        self, parts: Sequence[WeightedStore], tokenizers: Tokenizers, *, context: int, **settings: Any
    ) -> None:
        self.context = context
        self.windows_by_epoch: dict[int, list[TextWindows]] = {}  # has the current epoch only
        for part in parts:
            check_text(part.store)
        super().__init__(parts, tokenizers, form="windows", widths=Widths(8, context), **settings)

    def cuts(self, epoch: int) -> list[TextWindows]:
        """Return how the text of each corpus is divided into windows in this epoch."""
        if epoch not in self.windows_by_epoch:
            firsts = np.random.default_rng([self.seed, epoch, self.context]).integers(
                self.context, size=len(self.parts)
            )
            lengths = [part.store.text_length for part in self.parts]
            self.windows_by_epoch = {
                epoch: [TextWindows(n, self.context, int(f) + 1) for n, f in zip(lengths, firsts, strict=True)]
            }
        return self.windows_by_epoch[epoch]

    def sizes(self, epoch: int) -> list[int]:
        return [len(cut) for cut in self.cuts(epoch)]

    def lengths(self, indices: NDArray[np.uint32], epoch: int) -> tuple[IntArray, IntArray]:
        places = (self.locate(int(index), epoch) for index in indices)
        spans = [self.cuts(epoch)[which].span(number) for which, number in places]
        length_N = np.array([end - start for start, end in spans], dtype=np.int64)
        return self.form.count_slots(np.zeros_like(length_N), length_N)

    def example(self, index: int, epoch: int) -> Example:
        which, number = self.locate(index, epoch)
        window = self.parts[which].store.window(*self.cuts(epoch)[which].span(number))
        return Example(window[:0], window, number)

    def read(self, index_N: NDArray[np.int64], epoch: int) -> Iterable[Example]:
        return [self.example(index, epoch) for index in index_N.tolist()]


@dataclass(frozen=True)
class TextWindows:
    """A text of `length` tokens divided into windows; the first predicts `first` tokens, the others `context` each."""

    length: int
    context: int
    first: int

    def __len__(self) -> int:
        return 1 + max(0, -(-(self.length - 1 - self.first) // self.context))

    def span(self, number: int) -> tuple[int, int]:
        """Return start and end of a window, including the token that follows it, which is the first of the next."""
        end = self.first + number * self.context
        return max(end - self.context, 0), min(end, self.length - 1) + 1


def check_text(store: TokenStore) -> None:
    if store.text_length < 2:
        raise UserError("a text needs at least two tokens for training; choose a longer one")


def read_in_order(store: TokenStore, form: str, context: int) -> Iterator[Example]:
    """Yield all examples in the order of the corpus, the same in every validation."""
    if form != "windows":
        yield from (store.example(line) for line in range(len(store)))
        return
    check_text(store)
    cut = TextWindows(store.text_length, context, context)
    for number in range(len(cut)):
        window = store.window(*cut.span(number))
        yield Example(window[:0], window, number)


def prefetch(
    make: Callable[[], Iterator[tuple[Batch, StreamPosition]]], depth: int = 4
) -> Generator[tuple[Batch, StreamPosition], None, None]:
    """Yield the items of `make()`, produced in a thread while the caller computes. Its exceptions are raised here."""
    items: queue.Queue[tuple[Batch, StreamPosition] | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def hand_over(item: tuple[Batch, StreamPosition] | BaseException | None) -> None:
        while not stop.is_set():
            with suppress(queue.Full):
                items.put(item, timeout=0.1)
                return

    def work() -> None:
        try:
            for item in make():
                hand_over(item)
                if stop.is_set():
                    return
            hand_over(None)
        except BaseException as error:
            hand_over(error)

    thread = threading.Thread(target=work, daemon=True, name="batches")
    thread.start()
    try:
        while (item := items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()  # a thread that is still running when the interpreter ends would abort it
