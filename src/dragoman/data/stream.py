"""An endless, seeded order of batches over one corpus or several. Its state is three integers.

Each epoch is shuffled once, as a function of (seed, epoch); windows of the shuffled order are packed one after the
other, so that no epoch is ever held whole and a resumed run repacks one window at most.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.data.batch import LAYOUTS, Widths, choose_widths, lay
from dragoman.data.tokens import TokenStore
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import Batch, Example, Mistake

WINDOW = 65_536  # pairs packed at a time
FORGET_AFTER = 8192  # pairs read


@dataclass(frozen=True)
class Place:
    """Where the next batch is: enough to go on from."""

    epoch: int = 0
    window: int = 0
    batch: int = 0

    def state(self) -> dict[str, int]:
        return asdict(self)


class Weighted(NamedTuple):
    store: TokenStore
    weight: float


class Stream:
    """Batches from a place on, for ever. `sampling` above 0 draws a new segmentation of every text at every epoch."""

    def __init__(
        self,
        parts: Sequence[Weighted],
        tokenizers: Tokenizers,
        *,
        layout: str,
        tokens: int,
        seed: int,
        sampling: float = 0.0,
        widths: Widths | None = None,
    ) -> None:
        self.parts, self.tokenizers, self.layout = parts, tokenizers, LAYOUTS[layout]
        self.tokens, self.seed, self.sampling = tokens, seed, sampling
        self.first = np.cumsum([0, *(len(p.store) for p in parts)])
        if not sum(int(weight) * len(store) + round(weight % 1 * len(store)) for store, weight in parts):
            weights = ", ".join(f"{part.weight:g}" for part in parts)
            raise Mistake(f"the corpora are too small for their weights ({weights}): no pair is left to train on")
        self.widths = widths or self._widths()

    def _widths(self) -> Widths:
        lengths = [part.store.lengths(4096) for part in self.parts]
        return choose_widths(*(np.concatenate(side) for side in zip(*lengths, strict=True)))

    def order(self, epoch: int) -> NDArray[np.uint32]:
        """The pairs of an epoch, shuffled. Weight 2.5 means each pair twice and a random half of them once more."""
        rng = np.random.default_rng([self.seed, epoch])
        chosen = []
        for first, (store, weight) in zip(self.first, self.parts):
            lines = np.arange(first, first + len(store), dtype=np.uint32)
            some = rng.permutation(len(store))[: round(weight % 1 * len(store))] if weight % 1 else np.arange(0)
            chosen += [lines] * int(weight) + [lines[np.sort(some)]]
        order = np.concatenate(chosen)
        rng.shuffle(order)
        return order

    def example(self, index: int, epoch: int) -> Example:
        which = int(np.searchsorted(self.first, index, side="right")) - 1
        store, line = self.parts[which].store, index - int(self.first[which])
        if not self.sampling:
            return store.example(line)
        pair, key = store.pair(line), (self.seed, epoch, index)
        source = self.tokenizers.source.sample(pair.source, rate=self.sampling, key=key)
        other = (~self.seed, epoch, index)  # no seed of a source: a word on both sides is not cut alike
        target = self.tokenizers.target.sample(pair.target, rate=self.sampling, key=other)
        return Example(np.asarray(source), np.asarray(target), line)

    def examples(self, indices: NDArray[np.uint32], epoch: int) -> list[Example]:
        """These examples. They are read in the order of the files, so that few pages are held at a time."""
        found: dict[int, Example] = {}
        for place in np.argsort(indices, kind="stable").tolist():
            found[place] = self.example(int(indices[place]), epoch)
            if len(found) % FORGET_AFTER == 0:
                self.forget_pages()
        self.forget_pages()
        return [found[place] for place in range(len(indices))]

    def forget_pages(self) -> None:
        for part in self.parts:
            part.store.forget_pages()

    def batches(self, place: Place) -> Iterator[tuple[Batch, Place]]:
        """Each batch with the place that follows it."""
        epoch, window, at = place.epoch, place.window, place.batch
        while True:
            order = self.order(epoch)
            windows = -(-len(order) // WINDOW)
            while window < windows:
                examples = self.examples(order[window * WINDOW : (window + 1) * WINDOW], epoch)
                lengths = [np.array([len(getattr(e, side)) + 1 for e in examples]) for side in ("source", "target")]
                rng = np.random.default_rng([self.seed, epoch, window])
                grids = self.layout(*lengths, tokens=self.tokens, widths=self.widths, rng=rng)
                for number, grid in enumerate(grids[at:], at + 1):
                    last = number == len(grids)
                    after = Place(epoch, window, number) if not last else Place(epoch, window + 1, 0)
                    if last and window + 1 == windows:
                        after = Place(epoch + 1, 0, 0)
                    yield lay(grid, examples), after
                window, at = window + 1, 0
            epoch, window = epoch + 1, 0


def ahead(
    make: Callable[[], Iterator[tuple[Batch, Place]]], depth: int = 4
) -> Generator[tuple[Batch, Place], None, None]:
    """The same items, made in a thread while the caller computes. What goes wrong there is raised here."""
    items: queue.Queue[tuple[Batch, Place] | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def hand_over(item: tuple[Batch, Place] | BaseException | None) -> None:
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
