"""A seeded, endless stream of batches from one or more corpora; its state is a StreamPosition.

The order of each epoch is a function of (seed, epoch). The shuffled order is divided into windows of SHUFFLE_WINDOW
examples, and batches are planned from one window at a time. So only one window has to be in memory, and a resumed run
plans at most one window again.

Every process plans the same batches from the lengths of all examples, then reads and collates only the rows of its
rank. So the batches of a run do not depend on the number of processes.

BatchStream reads sentence pairs; TextWindowStream divides long texts into windows of `context` tokens. An *index*
counts the examples of all corpora, a *line* those of one corpus, and an *item* those of a shuffle window.

Shapes   N examples   P corpora   2 source and target
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
    BOUNDED_LAYOUTS,
    EXAMPLE_FORMATS,
    LAYOUTS,
    BatchPlan,
    RankShard,
    Widths,
    choose_widths,
)
from dragoman.data.features import FEATURES, IntArray
from dragoman.data.token_store import TokenStore, make_examples
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.types import Batch, Example, TokenFeature

SHUFFLE_WINDOW = 65_536  # examples from which batches are planned together
RELEASE_EVERY = 8192  # examples after which memory-mapped pages are released
PAIRS_PER_TASK = 1024  # pairs that a worker process segments in one task; a task takes about 0.1 s


@dataclass(frozen=True)
class StreamPosition:
    """The position of the next batch, from which a stream can be resumed."""

    epoch: int = 0
    window: int = 0  # shuffle window in the epoch
    batch: int = 0  # batch in the window
    passed: float = 0.0  # fraction of the epoch before the next batch


class ExampleStore(Protocol):
    """Examples by line number: a token store (the cached ids of a corpus), or a text, where a line is a window."""

    def __len__(self) -> int: ...

    def get_lengths(self, lines: IntArray, /) -> tuple[IntArray, IntArray]: ...

    def read_examples(self, lines: IntArray, /) -> list[Example]: ...


@dataclass(frozen=True)
class TextWindows:
    """A text divided into windows. `first_length` tokens are predicted in the first window, `context` in the others."""

    tokens: NDArray[np.integer]
    context: int
    first_length: int

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise UserError("a text needs at least two tokens for training; choose a longer one")

    def __len__(self) -> int:
        return 1 + max(0, -(-(len(self.tokens) - 1 - self.first_length) // self.context))

    def spans(self, lines: IntArray) -> tuple[IntArray, IntArray]:
        """Return start and end of these windows. The last token of a window is also the first of the next window."""
        end_N = self.first_length + lines * self.context
        return np.maximum(end_N - self.context, 0), np.minimum(end_N, len(self.tokens) - 1) + 1

    def get_lengths(self, lines: IntArray) -> tuple[IntArray, IntArray]:
        start_N, end_N = self.spans(lines)
        return np.zeros_like(lines), end_N - start_N

    def read_examples(self, lines: IntArray) -> list[Example]:
        windows = [self.tokens[start:end].copy() for start, end in zip(*self.spans(lines), strict=True)]
        return [Example(window[:0], window, line) for window, line in zip(windows, lines.tolist(), strict=True)]


class WeightedStore(NamedTuple):
    """A corpus, and how often each of its examples occurs in an epoch on average."""

    store: TokenStore
    weight: float


class ShuffleWindow(NamedTuple):
    """A part of the shuffled order of an epoch, from which batches are planned together."""

    start: StreamPosition
    indices: NDArray[np.uint32]  # of its examples
    next_start: StreamPosition


class BatchStream:
    """An endless stream of batches from one or more corpora.

    `sampling` above 0 gives every text a new random segmentation in each epoch. `layout` is a name in LAYOUTS, `tokens`
    the maximum number of slots per side of a batch, `example_format` a name in EXAMPLE_FORMATS. The row `widths` are by
    default chosen from the lengths in the corpora. `max_positions`, if given, is the maximum length of a text that the
    model supports, including <s> or </s>.
    """

    def __init__(
        self,
        corpora: Sequence[WeightedStore],
        tokenizers: Tokenizers,
        *,
        layout: str,
        tokens: int,
        seed: int,
        sampling: float = 0.0,
        example_format: str = "pairs",
        widths: Widths | None = None,
        max_positions: int | None = None,
        shard: RankShard = RankShard(),  # noqa: B008 - a tuple is immutable
    ) -> None:
        self.corpora, self.tokenizers, self.format = corpora, tokenizers, EXAMPLE_FORMATS[example_format]
        self.layout = LAYOUTS[layout]
        if max_positions and layout in BOUNDED_LAYOUTS:
            self.layout = partial(self.layout, max_positions=max_positions)
        self.max_tokens = max_positions - 1 if max_positions else sys.maxsize
        self.tokens, self.seed, self.sampling, self.shard = tokens, seed, sampling, shard
        weighted = zip(self.sizes(0), (corpus.weight for corpus in corpora), strict=True)
        if not any(int(weight) * size + round(weight % 1 * size) for size, weight in weighted):
            weights = ", ".join(f"{corpus.weight:g}" for corpus in corpora)
            raise UserError(f"the corpora are too small for their weights ({weights}): no pair is left to train on")
        lengths = [] if widths else [self.format.count_slots(*corpus.store.sample_lengths(4096)) for corpus in corpora]
        self.widths = widths or choose_widths(*(np.concatenate(side) for side in zip(*lengths, strict=True)))

    def stores(self, epoch: int) -> Sequence[ExampleStore]:  # noqa: ARG002 - windows of a text depend on it
        return [corpus.store for corpus in self.corpora]

    def sizes(self, epoch: int) -> list[int]:
        return [len(store) for store in self.stores(epoch)]

    def order(self, epoch: int) -> NDArray[np.uint32]:
        """Return the shuffled indices of an epoch.

        With a weight of 2.5, all examples of a corpus occur twice, and a random half of them three times.
        """
        rng = np.random.default_rng([self.seed, epoch])
        chosen, first = [], 0  # `first`: index of the first example of the corpus
        for number, (size, (_, weight)) in enumerate(zip(self.sizes(epoch), self.corpora, strict=True)):
            index_N = np.arange(first, first + size, dtype=np.uint32)
            expected = weight % 1 * size  # additional examples; if it rounds to 0, one is added with this probability
            count = round(expected) or int(np.random.default_rng([self.seed, epoch, number]).random() < expected)
            extra_lines = rng.permutation(size)[:count] if weight % 1 else np.arange(0)
            chosen += [index_N] * int(weight) + [index_N[np.sort(extra_lines)]]
            first += size
        order = np.concatenate(chosen)
        rng.shuffle(order)
        return order

    def split_by_corpus(self, index_N: NDArray[np.uint32], epoch: int) -> list[IntArray]:
        """Split sorted indices by corpus; return the lines in each corpus."""
        end_P = np.cumsum(self.sizes(epoch))
        parts = np.split(index_N.astype(np.int64), np.searchsorted(index_N, end_P[:-1]))
        return [part_N - first for part_N, first in zip(parts, [0, *end_P[:-1].tolist()], strict=True)]

    def read_examples(self, indices: NDArray[np.uint32], epoch: int, items: Iterable[int]) -> dict[int, Example]:
        """Return these items of a window with the given `indices`. Reading in file order touches few memory pages."""
        found: dict[int, Example] = {}
        item_N = np.fromiter(items, dtype=np.int64)
        item_N = item_N[np.argsort(indices[item_N], kind="stable")]
        for start in range(0, len(item_N), RELEASE_EVERY):
            chunk_N = item_N[start : start + RELEASE_EVERY]
            lines = self.split_by_corpus(indices[chunk_N], epoch)
            examples = (store.read_examples(line_N) for store, line_N in zip(self.stores(epoch), lines, strict=True))
            found.update(zip(chunk_N.tolist(), chain.from_iterable(examples), strict=True))
            for corpus in self.corpora:
                corpus.store.release_pages()
        return found

    def count_slots(self, indices: NDArray[np.uint32], epoch: int) -> tuple[IntArray, IntArray]:
        """Return how many slots of a batch these examples need on each side, without reading the examples."""
        item_N = np.argsort(indices, kind="stable")
        lines = self.split_by_corpus(indices[item_N], epoch)
        length_2N = np.zeros((2, len(indices)), dtype=np.int64)
        length_2N[:, item_N] = np.concatenate(
            [store.get_lengths(line_N) for store, line_N in zip(self.stores(epoch), lines, strict=True)], axis=1
        )
        return self.format.count_slots(*length_2N)

    def plan(
        self, window: ShuffleWindow, examples: dict[int, Example]
    ) -> tuple[list[BatchPlan], tuple[IntArray, IntArray]]:
        """Plan the batches of a window; return them and the lengths of its examples on both sides.

        `examples` has the examples of the window by item if they were already read; otherwise it is empty, and the
        lengths are taken from the stores.
        """
        indices, epoch = window.indices, window.start.epoch
        in_order = [examples[item] for item in range(len(examples))]
        lengths = self.format.count_example_slots(in_order) if examples else self.count_slots(indices, epoch)
        rng = np.random.default_rng([self.seed, epoch, window.start.window])
        return self.layout(*lengths, tokens=self.tokens, widths=self.widths, rng=rng), lengths

    def read_windows(self, position: StreamPosition) -> Iterator[tuple[ShuffleWindow, dict[int, Example]]]:
        """Yield each window with its examples by item; without examples if segmentations are not sampled.

        Planning needs the lengths of sampled segmentations, so these are sampled one window ahead, in worker processes
        that exit when this generator is closed. If there are too few pairs or cores for workers, a thread samples them.
        """
        if not self.sampling:
            yield from ((window, {}) for window in self.shuffle_windows(position))
            return
        tasks = min(sum(self.sizes(position.epoch)), SHUFFLE_WINDOW) // PAIRS_PER_TASK
        with samplers.SamplingPool(self.tokenizers, min(tasks, samplers.count_workers())) as pool:
            submitted = ((window, self.submit(pool, window)) for window in self.shuffle_windows(position))
            for (window, collect), _ in pairwise(submitted):  # `pairwise` submits the next window first
                yield window, collect()

    def submit(self, pool: samplers.SamplingPool, window: ShuffleWindow) -> Callable[[], dict[int, Example]]:
        """Submit all examples of a window to the pool; return a function that returns them by item."""
        epoch, item_N, first = window.start.epoch, np.argsort(window.indices, kind="stable"), 0
        submitted = []
        for (store, _), lines in zip(self.corpora, self.split_by_corpus(window.indices[item_N], epoch), strict=True):
            for start in range(0, len(lines), PAIRS_PER_TASK):
                line_N = lines[start : start + PAIRS_PER_TASK]
                options = (self.sampling, self.seed, epoch, store.tag, self.max_tokens)
                task = samplers.SamplingTask(*options, (line_N + first).tolist(), *store.read_texts(line_N))
                submitted.append((store, line_N, task.sources, pool.submit(task)))
                store.release_pages()
            first += len(store)  # index of the first example of the next corpus

        def collect() -> dict[int, Example]:
            examples: list[Example] = []
            for store, line_N, texts, future in submitted:
                sides = ((np.asarray(side.ids), [0, *side.ends]) for side in future.result())
                source, target = ([ids[start:end] for start, end in pairwise(ends)] for ids, ends in sides)
                features: dict[str, list[TokenFeature]] = {}
                for name in store.features:
                    annotations, align = store.read_annotations(name, line_N), FEATURES[name].align_tokens
                    features[name] = [
                        align(annotation, text.decode(), ids.tolist(), self.tokenizers.source)
                        for annotation, text, ids in zip(annotations, texts, source, strict=True)
                    ]
                examples += make_examples(source, target, line_N, features)
            return dict(zip(item_N.tolist(), examples, strict=True))

        return collect

    def shuffle_windows(self, position: StreamPosition) -> Iterator[ShuffleWindow]:
        """Yield shuffle windows for ever, starting with the window that contains this position."""
        epoch, window = position.epoch, position.window
        while True:
            order = self.order(epoch)
            count = -(-len(order) // SHUFFLE_WINDOW)
            starts = [
                StreamPosition(epoch, number, passed=number * SHUFFLE_WINDOW / len(order)) for number in range(count)
            ]
            for start, next_start in pairwise([*starts[window:], StreamPosition(epoch + 1)]):
                yield ShuffleWindow(start, order[start.window * SHUFFLE_WINDOW :][:SHUFFLE_WINDOW], next_start)
            epoch, window = epoch + 1, 0

    def batches(self, position: StreamPosition) -> Iterator[tuple[Batch, StreamPosition]]:
        """Yield the rows of this rank in each batch, and the position after the batch."""
        first = position.batch  # batches of the first window that precede `position` are skipped
        for window, examples in self.read_windows(position):
            start, indices, next_start = window
            plans, lengths = self.plan(window, examples)
            shards = (plan.rows[slice(*self.shard.row_range(len(plan.rows)))] for plan in plans[first:])
            local = {item for rows in shards for row in rows for item in row}
            examples = {i: examples[i] for i in local} if examples else self.read_examples(indices, start.epoch, local)
            # Fraction of the epoch in this window. `next_start.passed` is 0 if the next window begins a new epoch.
            fraction = (next_start.passed or 1.0) - start.passed
            for number, plan in enumerate(plans[first:], first + 1):
                passed = start.passed + fraction * number / len(plans)
                following = next_start if number == len(plans) else replace(start, batch=number, passed=passed)
                yield self.collate(plan, lengths, examples), following
            first = 0

    def empty_batch(self) -> Batch:
        """Return a batch of one row that has only padding."""
        empty_N = np.zeros(0, dtype=np.int64)
        return self.collate(BatchPlan([[]], self.widths), (empty_N, empty_N), {})

    def collate(self, plan: BatchPlan, lengths: tuple[IntArray, IntArray], examples: dict[int, Example]) -> Batch:
        """Collate the rows of this rank, or an empty row if it has none: every rank takes part in collectives.

        `lengths` are those of all examples in the window. Pairs and tokens are counted over the rows of all ranks.
        """
        start, end = self.shard.row_range(len(plan.rows))
        local_plan = BatchPlan(plan.rows[start:end] or [[]], plan.widths)
        batch = self.format.collate(local_plan, examples, self.corpora[0].store.features)
        if self.shard.world_size > 1:
            items, height = [item for row in plan.rows for item in row], len(plan.rows)
            source_tokens, target_tokens = (int(length_N[items].sum()) for length_N in lengths)
            batch = replace(
                batch,
                pairs=len(items),
                source_tokens=source_tokens,
                target_tokens=target_tokens,
                is_unpacked=max(map(len, plan.rows)) <= 1,
                first_row=min(start, height - 1),  # a rank without rows has one empty row
                total_rows=height,
            )
        return batch


class TextWindowStream(BatchStream):
    """Batches from long texts, which are divided into windows of `context` tokens.

    The first window of a text has a random length, so windows begin at other tokens in each epoch. The last window has
    the remaining tokens. Every token of a text except the first is predicted once per epoch.
    """

    def __init__(
        self, corpora: Sequence[WeightedStore], tokenizers: Tokenizers, *, context: int, **settings: Any
    ) -> None:
        self.context = context
        widths = Widths(8, context)  # windows have no source, so that side is only padding
        super().__init__(corpora, tokenizers, example_format="windows", widths=widths, **settings)

    def stores(self, epoch: int) -> list[TextWindows]:
        rng = np.random.default_rng([self.seed, epoch, self.context])
        first_lengths = (rng.integers(self.context, size=len(self.corpora)) + 1).tolist()
        texts = [corpus.store.target_ids for corpus in self.corpora]
        return [TextWindows(text, self.context, first) for text, first in zip(texts, first_lengths, strict=True)]


def read_in_order(store: TokenStore, example_format: str, context: int, count: int = sys.maxsize) -> list[Example]:
    """Return the first `count` examples in the order of the corpus, for validation; by default, all examples.

    Texts are divided into windows of `context`.
    """
    source = TextWindows(store.target_ids, context, context) if example_format == "windows" else store
    return source.read_examples(np.arange(min(len(source), count)))


def prefetch(
    read_batches: Callable[[], Iterator[tuple[Batch, StreamPosition]]], depth: int = 4
) -> Generator[tuple[Batch, StreamPosition], None, None]:
    """Yield the items of `read_batches()`, which a thread produces while the caller computes.

    At most `depth` items are in the queue. Exceptions in the thread are raised here.
    """
    items: queue.Queue[tuple[Batch, StreamPosition] | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: tuple[Batch, StreamPosition] | BaseException | None) -> None:
        while not stop.is_set():
            with suppress(queue.Full):
                items.put(item, timeout=0.1)
                return

    def work() -> None:
        try:
            for item in read_batches():
                put(item)
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, daemon=True, name="batches")
    thread.start()
    try:
        while (item := items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()  # a thread that still runs when the interpreter exits could crash it
