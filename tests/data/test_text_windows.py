"""Windows of a long text: every token is predicted once per epoch, and a stream can be resumed at any position."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data import stream as stream_module
from dragoman.data.stream import StreamPosition, TextWindows, TextWindowStream, WeightedStore, read_in_order
from dragoman.data.token_store import TokenStore, open_store
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.types import Pair
from toy_text import ALL, LINES

BOTH = Tokenizers(ALL["char"], ALL["char"])


def text(cache: Path, lines: list[str]) -> TokenStore:
    return open_store(
        lambda: (Pair("", line) for line in lines),
        BOTH,
        key=str(hash(tuple(lines))),
        cache=cache,
        max_length=3,
        text=False,
        example_format="windows",
    )


def windows(*stores: TokenStore, context: int = 50, seed: int = 3, weights: tuple[float, ...] = ()) -> TextWindowStream:
    parts = [
        WeightedStore(store, weight) for store, weight in zip(stores, weights or (1.0,) * len(stores), strict=True)
    ]
    return TextWindowStream(parts, BOTH, context=context, layout="padded", tokens=400, seed=seed)


@given(length=st.integers(2, 300), context=st.integers(1, 40), first=st.integers(1, 40))
def test_windows_predict_every_token_but_the_first_once(length: int, context: int, first: int) -> None:
    cut = TextWindows(np.arange(length), context, min(first, context))
    numbers = np.arange(len(cut))
    windows = [example.target.tolist() for example in cut.read_examples(numbers)]
    assert [place for window in windows for place in window[1:]] == list(range(1, length))
    assert all(1 <= len(window) - 1 <= context for window in windows)
    assert cut.get_lengths(numbers)[1].tolist() == list(map(len, windows))


def test_an_epoch_predicts_every_token_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "SHUFFLE_WINDOW", 37)
    stores = [text(tmp_path, LINES[:150]), text(tmp_path, LINES[150:200])]
    stream = windows(*stores)
    wanted = Counter(token for store in stores for token in store.target_ids[1:].tolist())
    begun = set()
    for epoch in (0, 1, 7):
        found: Counter[int] = Counter()
        for batch, place in stream.batches(StreamPosition(epoch)):
            assert batch.is_unpacked
            assert batch.target_out_BT.size(1) <= 56
            real_BT = batch.target_segment_BT > 0
            assert torch.equal(batch.target_in_BT[:, 1:][real_BT[:, 1:]], batch.target_out_BT[:, :-1][real_BT[:, 1:]])
            found.update(batch.target_out_BT[real_BT].tolist())
            if place.epoch != epoch:
                break
        assert found == wanted
        begun.add(stream.stores(epoch)[0].first_length)
    assert len(begun) > 1


def test_weights_set_how_often_examples_occur(tmp_path: Path) -> None:
    stream = windows(text(tmp_path, LINES[:100]), text(tmp_path, LINES[100:200]), weights=(2.0, 0.5))
    sizes = stream.sizes(4)
    counts = Counter(stream.order(4).tolist())
    assert all(counts[index] == 2 for index in range(sizes[0]))
    assert sum(counts[index] for index in range(sizes[0], sum(sizes))) == round(sizes[1] / 2)


def test_a_stream_resumed_anywhere_yields_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "SHUFFLE_WINDOW", 19)
    store = text(tmp_path, LINES)
    whole = list(islice(windows(store).batches(StreamPosition()), 90))
    places = [StreamPosition(), *(place for _, place in whole)]
    assert {place.epoch for place in places} >= {0, 1}
    for at in range(0, 80, 9):
        rest = islice(windows(store).batches(replace(places[at])), 8)
        for (batch, place), (other, other_place) in zip(rest, whole[at:]):
            assert torch.equal(batch.target_in_BT, other.target_in_BT)
            assert place == other_place
    other_seed = next(windows(store, seed=4).batches(StreamPosition()))[0]
    assert not torch.equal(whole[0][0].target_in_BT, other_seed.target_in_BT)


def test_validation_reads_the_text_in_order(tmp_path: Path) -> None:
    store = text(tmp_path, LINES[:20])
    found = [token for example in read_in_order(store, "windows", 16) for token in example.target[1:].tolist()]
    assert found == store.target_ids[1:].tolist()


def test_a_text_with_nothing_to_predict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least two tokens"):
        windows(text(tmp_path, [""]))
