"""An endless, seeded order of batches over one corpus or several. Its state is a place.

Each epoch is shuffled once, as a function of (seed, epoch); windows of the shuffled order are packed one after the
other, so that no epoch is ever held whole and a resumed run repacks one window at most.

Of several processes each packs the same grids, by the lengths of all pairs, and reads and lays the rows that are its
own: the batches of a run are the same however many work on it.
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
    IntArray,
    RankShare,
    Widths,
    add_unknown_trees,
    choose_widths,
    count_all_rows,
)
from dragoman.data.token_store import TokenStore
from dragoman.data.tokenizers import Tokenizers
from dragoman.data.trees import link_tokens
from dragoman.errors import UserError
from dragoman.types import Batch, Example

SHUFFLE_WINDOW = 65_536  # pairs packed at a time
RELEASE_EVERY = 8192  # pairs read
PAIRS_PER_TASK = 1024  # pairs that a process draws at a time: a tenth of a second


@dataclass(frozen=True)
class StreamPosition:
    """Where the next batch is: enough to go on from."""

    epoch: int = 0
    window: int = 0
    batch: int = 0
    passed: float = 0.0  # share of the epoch that is behind it


class WeightedStore(NamedTuple):
    store: TokenStore
    weight: float


class ShuffleWindow(NamedTuple):
    """Pairs that are packed together, where they begin, and where the next ones do."""

    begin: StreamPosition
    indices: NDArray[np.uint32]
    after: StreamPosition


class BatchStream:
    """Batches from a place on, for ever. `sampling` above 0 draws a new segmentation of every text at every epoch.

    `most` is how many places the model has for a text and the mark that goes with it, if there is an end to them.
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
        most: int | None = None,
        share: RankShare = RankShare(),  # noqa: B008 - a tuple, which nobody can change
    ) -> None:
        self.parts, self.tokenizers, self.form = parts, tokenizers, EXAMPLE_FORMATS[form]
        self.layout = partial(LAYOUTS[layout], most=most) if most and layout in BOUNDED else LAYOUTS[layout]
        self.most = most - 1 if most else sys.maxsize
        self.tokens, self.seed, self.sampling, self.share = tokens, seed, sampling, share
        sizes = zip(self.sizes(0), (part.weight for part in parts), strict=True)
        if not any(int(weight) * size + round(weight % 1 * size) for size, weight in sizes):
            weights = ", ".join(f"{part.weight:g}" for part in parts)
            raise UserError(f"the corpora are too small for their weights ({weights}): no pair is left to train on")
        self.widths = widths or self._widths()

    def _widths(self) -> Widths:
        lengths = [self.form.count_slots(*part.store.lengths(4096)) for part in self.parts]
        return choose_widths(*(np.concatenate(side) for side in zip(*lengths, strict=True)))

    def sizes(self, epoch: int) -> list[int]:  # noqa: ARG002 - windows begin elsewhere at every epoch
        """How many examples each part has."""
        return [len(part.store) for part in self.parts]

    def order(self, epoch: int) -> NDArray[np.uint32]:
        """The pairs of an epoch, shuffled. Weight 2.5 means each pair twice and a random half of them once more."""
        rng = np.random.default_rng([self.seed, epoch])
        chosen, first = [], 0
        for which, (size, (_, weight)) in enumerate(zip(self.sizes(epoch), self.parts, strict=True)):
            lines = np.arange(first, first + size, dtype=np.uint32)
            more = self.more(weight % 1 * size, epoch, which)
            some = rng.permutation(size)[:more] if weight % 1 else np.arange(0)
            chosen += [lines] * int(weight) + [lines[np.sort(some)]]
            first += size
        order = np.concatenate(chosen)
        rng.shuffle(order)
        return order

    def more(self, share: float, epoch: int, which: int) -> int:
        """As many pairs as a share of a corpus is; of less than half a pair, one in some epochs."""
        return round(share) or int(np.random.default_rng([self.seed, epoch, which]).random() < share)

    def example(self, index: int, epoch: int) -> Example:
        which, line = self.locate(index, epoch)
        store = self.parts[which].store
        if not self.sampling:
            return store.example(line)
        pair, key = store.pair(line), (self.seed, epoch, index)
        source, target = samplers.sample_pair(self.tokenizers, pair, rate=self.sampling, key=key, most=self.most)
        links = link_tokens(store.roots(line), pair.source, source, self.tokenizers.source) if store.trees else None
        return Example(np.asarray(source), np.asarray(target), line, links)

    def locate(self, index: int, epoch: int) -> tuple[int, int]:
        """The part that an example is in, and its number there."""
        for which, size in enumerate(self.sizes(epoch)):
            if index < size:
                return which, index
            index -= size
        raise IndexError(index)

    def examples(self, indices: NDArray[np.uint32], epoch: int, wanted: Iterable[int]) -> dict[int, Example]:
        """Some of these examples, by their place. They are read in the order of the files: few pages at a time."""
        found: dict[int, Example] = {}
        place_N = np.fromiter(wanted, dtype=np.int64)
        place_N = place_N[np.argsort(indices[place_N], kind="stable")]
        for start in range(0, len(place_N), RELEASE_EVERY):
            some_N = place_N[start : start + RELEASE_EVERY]
            found.update(zip(some_N.tolist(), self.read(indices[some_N].astype(np.int64), epoch), strict=True))
            self.forget_pages()
        return found

    def read(self, index_N: NDArray[np.int64], epoch: int) -> Iterable[Example]:
        """Examples in the order of the files."""
        if self.sampling:
            return [self.example(index, epoch) for index in index_N.tolist()]
        rows = self.by_part(index_N, epoch)
        return [example for store, some_N, first in rows for example in store.examples(some_N - first)]

    def by_part(self, index_N: NDArray[np.int64], epoch: int) -> Iterator[tuple[TokenStore, NDArray[np.int64], int]]:
        """Indices in the order of the files, by the store that they are in, and the first index of each."""
        end_P = np.cumsum(self.sizes(epoch))
        of_parts = np.split(index_N, np.searchsorted(index_N, end_P[:-1]))
        return zip((part.store for part in self.parts), of_parts, [0, *end_P[:-1].tolist()], strict=True)

    def forget_pages(self) -> None:
        for part in self.parts:
            part.store.forget_pages()

    def lengths(self, indices: NDArray[np.uint32], epoch: int) -> tuple[IntArray, IntArray]:
        """What these examples take in the two grids, where nothing but the stores need be asked."""
        length_2N, first = np.zeros((2, len(indices)), dtype=np.int64), 0
        for part, size in zip(self.parts, self.sizes(epoch), strict=True):
            here = (indices >= first) & (indices < first + size)
            length_2N[:, here] = part.store.lengths_of(indices[here].astype(np.int64) - first)
            first += size
        return self.form.count_slots(*length_2N)

    def planned(
        self, window: ShuffleWindow, read: dict[int, Example]
    ) -> tuple[list[BatchPlan], tuple[IntArray, IntArray]]:
        """The grids of a window, and the lengths that they are made of: of what is read already, if anything is."""
        epoch, every = window.begin.epoch, range(len(window.indices))
        lengths = self.form.lengths([read[place] for place in every]) if read else self.lengths(window.indices, epoch)
        rng = np.random.default_rng([self.seed, epoch, window.begin.window])
        return self.layout(*lengths, tokens=self.tokens, widths=self.widths, rng=rng), lengths

    def sampled(self, place: StreamPosition) -> Iterator[tuple[ShuffleWindow, dict[int, Example]]]:
        """Windows, with all their examples where those are drawn: how long a sample is, none can know before.

        Processes that draw are one window ahead. They end with this generator.
        """
        tasks = min(sum(self.sizes(place.epoch)), SHUFFLE_WINDOW) // PAIRS_PER_TASK
        apart = self.sampling and not any(part.store.trees for part in self.parts)
        if not (count := min(tasks, samplers.count_workers()) if apart else 0):
            for window in self.windows(place):
                every = range(len(window.indices) if self.sampling else 0)
                yield window, self.examples(window.indices, window.begin.epoch, every)
            return
        with samplers.SamplingPool(self.tokenizers, count) as crew:
            begun = ((window, self.begin(crew, window)) for window in self.windows(place))
            for (window, drawn), _ in pairwise(begun):
                yield window, drawn()

    def begin(self, crew: samplers.SamplingPool, window: ShuffleWindow) -> Callable[[], dict[int, Example]]:
        """Have all examples of a window drawn; what is returned waits for them."""
        epoch, place_N = window.begin.epoch, np.argsort(window.indices, kind="stable")
        drawing = []
        for store, index_N, first in self.by_part(window.indices[place_N].astype(np.int64), epoch):
            for start in range(0, len(index_N), PAIRS_PER_TASK):
                some_N = index_N[start : start + PAIRS_PER_TASK]
                line_N = some_N - first
                about = (self.sampling, self.seed, epoch, store.tag, self.most)
                drawing.append((line_N, crew.ask(samplers.SamplingTask(*about, some_N.tolist(), *store.texts(line_N)))))
                store.forget_pages()

        def drawn() -> dict[int, Example]:
            sides = ((map(split_ids, future.result()), line_N.tolist()) for line_N, future in drawing)
            examples = (example for (source, target), lines in sides for example in map(Example, source, target, lines))
            return dict(zip(place_N.tolist(), examples, strict=True))

        return drawn

    def windows(self, place: StreamPosition) -> Iterator[ShuffleWindow]:
        """From the one that a place is in."""
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
        """Each batch, our rows of it, with the place that follows it."""
        at = place.batch
        for window, read in self.sampled(place):
            begin, indices, after = window
            grids, lengths = self.planned(window, read)
            ours = {item for grid in grids[at:] for row in self.share.select_rows(grid) for item in row}
            read = {item: read[item] for item in ours} if read else self.examples(indices, begin.epoch, ours)
            ahead = (after.passed or 1.0) - begin.passed
            for number, grid in enumerate(grids[at:], at + 1):
                passed = begin.passed + ahead * number / len(grids)
                last = number == len(grids)
                yield self.lay(grid, lengths, read), after if last else replace(begin, batch=number, passed=passed)
            at = 0

    def nothing(self) -> Batch:
        """A batch of one empty row."""
        none_N = np.zeros(0, dtype=np.int64)
        return self.lay(BatchPlan([[]], self.widths), (none_N, none_N), {})

    def lay(self, grid: BatchPlan, lengths: tuple[IntArray, IntArray], examples: dict[int, Example]) -> Batch:
        """Our rows of a grid. Where we have none, an empty one, so that all that the others do can be done to it."""
        rows = self.share.select_rows(grid)
        batch = self.form.collate(BatchPlan(rows or [[]], grid.widths), examples)
        if self.share.world > 1:
            batch = count_all_rows(batch, grid, lengths, self.share)
        if batch.depth_BS is None and any(part.store.trees for part in self.parts):
            batch = add_unknown_trees(batch)
        return batch


class TextWindowStream(BatchStream):
    """Batches from long texts, read in windows of `context` tokens that begin at a new place at every epoch.

    Every token but a text's first is predicted once an epoch: the first window is as long as the draw of that epoch
    says, the last as long as what is left.
    """

    def __init__(
        self, parts: Sequence[WeightedStore], tokenizers: Tokenizers, *, context: int, **settings: Any
    ) -> None:
        self.context = context
        self.drawn: dict[int, list[TextWindows]] = {}  # of the epoch at hand
        for part in parts:
            check_text(part.store)
        super().__init__(parts, tokenizers, form="windows", widths=Widths(8, context), **settings)

    def cuts(self, epoch: int) -> list[TextWindows]:
        """How the text of each part is cut at this epoch."""
        if epoch not in self.drawn:
            firsts = np.random.default_rng([self.seed, epoch, self.context]).integers(
                self.context, size=len(self.parts)
            )
            lengths = [part.store.text_length for part in self.parts]
            self.drawn = {
                epoch: [TextWindows(n, self.context, int(f) + 1) for n, f in zip(lengths, firsts, strict=True)]
            }
        return self.drawn[epoch]

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


def split_ids(drawn: samplers.SampledIds) -> list[NDArray[np.uint32]]:
    """The ids of each text."""
    ids, ends = np.asarray(drawn.ids), drawn.ends.tolist()
    return [ids[start:end] for start, end in pairwise([0, *ends])]


@dataclass(frozen=True)
class TextWindows:
    """A text of so many tokens cut into windows; the first predicts `first` tokens, the others `context` each."""

    length: int
    context: int
    first: int

    def __len__(self) -> int:
        return 1 + max(0, -(-(self.length - 1 - self.first) // self.context))

    def span(self, number: int) -> tuple[int, int]:
        """From where to where a window goes, with the token that follows it, which is the first of the next."""
        end = self.first + number * self.context
        return max(end - self.context, 0), min(end, self.length - 1) + 1


def check_text(store: TokenStore) -> None:
    if store.text_length < 2:
        raise UserError("a text of fewer than two tokens has nothing to be predicted from; name a longer one")


def read_in_order(store: TokenStore, form: str, context: int) -> Iterator[Example]:
    """All examples as they stand in the corpus: what is the same at every validation."""
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
    """The same items, made in a thread while the caller computes. What goes wrong there is raised here."""
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
        thread.join()  # a thread that is still at work when the interpreter ends would abort it
