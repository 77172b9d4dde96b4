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
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

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
)
from dragoman.data.features import FEATURES, IntArray, fill_features
from dragoman.data.token_store import TokenStore, make_examples
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


class ExampleSource(Protocol):
    """Examples by number: a token store, or the windows of a text."""

    def __len__(self) -> int: ...

    def lengths(self, lines: IntArray, /) -> tuple[IntArray, IntArray]: ...

    def examples(self, lines: IntArray, /) -> list[Example]: ...


@dataclass(frozen=True)
class TextWindows:
    """A text divided into windows; the first predicts `first` tokens, the others `context` each."""

    tokens: NDArray[np.integer]
    context: int
    first: int

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise UserError("a text needs at least two tokens for training; choose a longer one")

    def __len__(self) -> int:
        return 1 + max(0, -(-(len(self.tokens) - 1 - self.first) // self.context))

    def spans(self, lines: IntArray) -> tuple[IntArray, IntArray]:
        """Return start and end of windows, including the token that follows, which is the first of the next."""
        end_N = self.first + lines * self.context
        return np.maximum(end_N - self.context, 0), np.minimum(end_N, len(self.tokens) - 1) + 1

    def lengths(self, lines: IntArray) -> tuple[IntArray, IntArray]:
        start_N, end_N = self.spans(lines)
        return np.zeros_like(lines), end_N - start_N

    def examples(self, lines: IntArray) -> list[Example]:
        windows = [self.tokens[start:end].copy() for start, end in zip(*self.spans(lines), strict=True)]
        return [Example(window[:0], window, line) for window, line in zip(windows, lines.tolist(), strict=True)]


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
        lengths = [] if widths else [self.form.count_slots(*part.store.sample_lengths(4096)) for part in self.parts]
        self.widths = widths or choose_widths(*(np.concatenate(side) for side in zip(*lengths, strict=True)))

    def sources(self, epoch: int) -> Sequence[ExampleSource]:  # noqa: ARG002 - text is divided anew in each epoch
        """Return the examples of each corpus."""
        return [part.store for part in self.parts]

    def sizes(self, epoch: int) -> list[int]:
        """Return the number of examples of each corpus."""
        return [len(source) for source in self.sources(epoch)]

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

    def split_by_corpus(self, index_N: NDArray[np.uint32], epoch: int) -> list[IntArray]:
        """Split sorted indices by corpus; return the numbers of the examples in each."""
        end_P = np.cumsum(self.sizes(epoch))
        parts = np.split(index_N.astype(np.int64), np.searchsorted(index_N, end_P[:-1]))
        return [part_N - first for part_N, first in zip(parts, [0, *end_P[:-1].tolist()], strict=True)]

    def examples(self, indices: NDArray[np.uint32], epoch: int, wanted: Iterable[int]) -> dict[int, Example]:
        """Return the wanted examples of a window by slot, read in file order, so that few pages are mapped."""
        found: dict[int, Example] = {}
        slot_N = np.fromiter(wanted, dtype=np.int64)
        slot_N = slot_N[np.argsort(indices[slot_N], kind="stable")]
        for start in range(0, len(slot_N), RELEASE_EVERY):
            some_N = slot_N[start : start + RELEASE_EVERY]
            lines = self.split_by_corpus(indices[some_N], epoch)
            examples = (source.examples(line_N) for source, line_N in zip(self.sources(epoch), lines, strict=True))
            found.update(zip(some_N.tolist(), chain.from_iterable(examples), strict=True))
            for part in self.parts:
                part.store.forget_pages()
        return found

    def lengths(self, indices: NDArray[np.uint32], epoch: int) -> tuple[IntArray, IntArray]:
        """Return how many positions these examples need on each side, without reading the examples."""
        slot_N = np.argsort(indices, kind="stable")
        lines = self.split_by_corpus(indices[slot_N], epoch)
        length_2N = np.zeros((2, len(indices)), dtype=np.int64)
        length_2N[:, slot_N] = np.concatenate(
            [source.lengths(line_N) for source, line_N in zip(self.sources(epoch), lines, strict=True)], axis=1
        )
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

        The lengths of sampled segmentations are needed for planning. Segmentations are sampled one window ahead, in
        worker processes that exit when this generator is closed. If there are too few pairs or cores for workers, a
        thread samples them.
        """
        if not self.sampling:
            yield from ((window, {}) for window in self.windows(place))
            return
        tasks = min(sum(self.sizes(place.epoch)), SHUFFLE_WINDOW) // PAIRS_PER_TASK
        with samplers.SamplingPool(self.tokenizers, min(tasks, samplers.count_workers())) as pool:
            begun = ((window, self.submit(pool, window)) for window in self.windows(place))
            for (window, collect), _ in pairwise(begun):
                yield window, collect()

    def submit(self, pool: samplers.SamplingPool, window: ShuffleWindow) -> Callable[[], dict[int, Example]]:
        """Submit all examples of a window to the pool; return a function that waits for them."""
        epoch, slot_N, first = window.begin.epoch, np.argsort(window.indices, kind="stable"), 0
        submitted = []
        for (store, _), lines in zip(self.parts, self.split_by_corpus(window.indices[slot_N], epoch), strict=True):
            for start in range(0, len(lines), PAIRS_PER_TASK):
                line_N = lines[start : start + PAIRS_PER_TASK]
                common = (self.sampling, self.seed, epoch, store.tag, self.max_tokens)
                task = samplers.SamplingTask(*common, (line_N + first).tolist(), *store.texts(line_N))
                submitted.append((store, line_N, task.sources, pool.submit(task)))
                store.forget_pages()
            first += len(store)

        def collect() -> dict[int, Example]:
            examples: list[Example] = []
            for store, line_N, texts, future in submitted:
                sides = ((np.asarray(side.ids), [0, *side.ends]) for side in future.result())
                source, target = ([ids[start:end] for start, end in pairwise(ends)] for ids, ends in sides)
                features = {
                    name: [
                        FEATURES[name].align(record, text.decode(), ids.tolist(), self.tokenizers.source)
                        for record, text, ids in zip(store.records(name, line_N), texts, source, strict=True)
                    ]
                    for name in store.features
                }
                examples += make_examples(source, target, line_N, features)
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
            shards = (plan.rows[slice(*self.shard.row_range(len(plan.rows)))] for plan in plans[at:])
            local = {item for rows in shards for row in rows for item in row}
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
        start, end = self.shard.row_range(len(plan.rows))
        rows = plan.rows[start:end]
        batch = self.form.collate(BatchPlan(rows or [[]], plan.widths), examples)
        if self.shard.world_size > 1:  # pairs and tokens are counted over the rows of all ranks
            items, height = [item for row in plan.rows for item in row], len(plan.rows)
            source_tokens, target_tokens = (int(length_N[items].sum()) for length_N in lengths)
            batch = replace(
                batch,
                pairs=len(items),
                source_tokens=source_tokens,
                target_tokens=target_tokens,
                unpacked=max(map(len, plan.rows)) <= 1,
                first_row=min(start, height - 1),
                total_rows=height,
            )
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
        super().__init__(parts, tokenizers, form="windows", widths=Widths(8, context), **settings)

    def sources(self, epoch: int) -> list[TextWindows]:
        """Return the windows of each text in this epoch."""
        rng = np.random.default_rng([self.seed, epoch, self.context])
        firsts = rng.integers(self.context, size=len(self.parts)).tolist()
        texts = [part.store.target_ids for part in self.parts]
        return [TextWindows(text, self.context, first + 1) for text, first in zip(texts, firsts, strict=True)]


def read_in_order(store: TokenStore, form: str, context: int) -> list[Example]:
    """Return all examples in the order of the corpus, the same in every validation."""
    source = TextWindows(store.target_ids, context, context) if form == "windows" else store
    return source.examples(np.arange(len(source)))


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
