"""Example formats: a batch contains its examples for every task, and skipped examples are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.batches import EXAMPLE_FORMATS, LAYOUTS, BatchPlan, Widths, choose_widths
from dragoman.data.token_store import TokenStore, open_store
from dragoman.data.tokenizers import LabelTokenizer, Tokenizers
from dragoman.errors import UserError
from dragoman.types import BOS, EOS, Batch, Example, Pair
from toy_text import ALL

LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
NOTHING = np.zeros(0, dtype=np.int64)


def made(form: str, lengths: list[int], seed: int = 0) -> list[Example]:
    """Return examples of a format, with texts of these lengths."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(4, 30, length) for length in lengths]
    if form == "pairs":
        return [Example(text, rng.integers(4, 30, len(text) % 7 + 1), i) for i, text in enumerate(texts)]
    if form == "labels":
        return [Example(text, rng.integers(0, 3, 1), i) for i, text in enumerate(texts)]
    return [Example(NOTHING, text, i) for i, text in enumerate(texts)]


def segments(ids_BT: torch.Tensor, segment_BT: torch.Tensor) -> list[list[int]]:
    """Return the texts of a batch, row by row."""
    return [
        ids[segment == number].tolist()
        for ids, segment in zip(ids_BT, segment_BT, strict=True)
        for number in range(1, int(segment.max()) + 1)
    ]


def read_back(form: str, batch: Batch) -> list[tuple[list[int], ...]]:
    """Return (source, target input, target output) of every example in a batch."""
    grids = (batch.target_in_BT, batch.target_out_BT)
    target = [segments(grid, batch.target_segment_BT) for grid in grids]
    sourceless = form in ("lines", "windows")
    source = [[] for _ in target[0]] if sourceless else segments(batch.source_BS, batch.source_segment_BS)
    return list(zip(source, *target, strict=True))


def expected(form: str, example: Example) -> tuple[list[int], list[int], list[int]]:
    source, target = example.source.tolist(), example.target.tolist()
    return {
        "pairs": ([*source, EOS], [BOS, *target], [*target, EOS]),
        "labels": ([*source, EOS], [0], target),
        "lines": ([], [BOS, *target], [*target, EOS]),
        "windows": ([], target[:-1], target[1:]),
    }[form]


@LAYOUT
@pytest.mark.parametrize("name", EXAMPLE_FORMATS)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30), tokens=st.sampled_from([64, 200]))
def test_every_example_is_in_one_batch_completely(layout: str, name: str, lengths: list[int], tokens: int) -> None:
    form, examples = EXAMPLE_FORMATS[name], made(name, lengths)
    held = form.count_example_slots(examples)
    grids = LAYOUTS[layout](*held, tokens=tokens, widths=choose_widths(*held), rng=np.random.default_rng(1))
    batches = [form.collate(grid, examples) for grid in grids]
    found = [one for batch in batches for one in read_back(name, batch)]
    assert sorted(found) == sorted(expected(name, example) for example in examples)
    assert sum(batch.target_tokens for batch in batches) == held[1].sum()
    assert sum(batch.source_tokens for batch in batches) == held[0].sum()
    if layout == "padded":
        assert all(batch.is_unpacked for batch in batches)


@pytest.mark.parametrize("name", EXAMPLE_FORMATS)
def test_a_batch_may_be_empty(name: str) -> None:
    batch = EXAMPLE_FORMATS[name].collate(BatchPlan([[], []], Widths(8, 8)), [])
    assert batch.target_tokens == batch.source_tokens == batch.pairs == 0
    assert batch.target_in_BT.shape == (2, 8)
    assert batch.is_unpacked


def test_labels_do_not_widen_rows() -> None:
    """The width of rows follows the texts; the side with one label per text is ignored."""
    rng = np.random.default_rng(0)
    text_N, one_N = rng.integers(2, 40, 2000), np.ones(2000, dtype=np.int64)
    assert choose_widths(text_N, one_N).source == choose_widths(text_N, text_N).source
    assert choose_widths(np.zeros_like(text_N), text_N).target == choose_widths(text_N, text_N).source


def store(cache: Path, form: str, pairs: list[Pair], tokenizers: Tokenizers, max_length: int = 5) -> TokenStore:
    return open_store(
        lambda: iter(pairs), tokenizers, key="k", cache=cache, max_length=max_length, text=False, example_format=form
    )


def test_skipped_examples_are_counted_by_reason(tmp_path: Path) -> None:
    labels = Tokenizers(ALL["byte"], LabelTokenizer.train(["no", "yes"]))
    pairs = [Pair("a", "yes"), Pair("", "yes"), Pair("b", "maybe"), Pair("c" * 9, "no"), Pair("d", " no ")]
    found = store(tmp_path, "labels", pairs, labels)
    assert found.dropped_counts == {
        "without text": 1,
        "with a label that training does not have": 1,
        "longer than 5 tokens": 1,
    }
    assert [found.read_example(i).target.tolist() for i in range(len(found))] == [[1], [0]]
    texts = [Pair("", "ab"), Pair("", ""), Pair("", "c" * 9)]
    both = Tokenizers(ALL["byte"], ALL["byte"])
    lines = store(tmp_path, "lines", texts, both)
    assert lines.dropped_counts == {"empty": 1, "longer than 5 tokens": 1}
    assert lines.characters == 3
    whole = store(tmp_path, "windows", texts, both)
    assert whole.dropped_counts == {}
    encoded = [token for pair in texts for token in (*ALL["byte"].encode(pair.target), EOS)]
    assert whole.target_ids.tolist() == encoded
    assert whole.characters == len(encoded)
    with pytest.raises(UserError, match="none of 1 texts"):
        store(tmp_path / "other", "labels", pairs[1:2], labels)
