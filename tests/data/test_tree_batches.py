"""Trees in batches and in the encoder: distances against a search in the tree, and the fallback without a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.data.features import MAX_TREE_DISTANCE
from dragoman.errors import UserError
from dragoman.kernels.attention import AttentionMask, RowLayout, attend_reference
from dragoman.models.transformer import Transformer, TransformerSettings
from dragoman.modules.patterns import AttentionSettings
from dragoman.modules.positions import POSITIONS
from dragoman.types import UNKNOWN_DISTANCE, Batch, Example, TokenFeature
from tolerance import assert_different, assert_same
from toy_batch import VOCABULARY, examples, in_rows
from toy_sections import settings_of
from toy_trees import arcs, heads, to_root


@st.composite
def sources(draw: st.DrawFn, *, most: int = 7) -> Example:
    """A sentence whose words have no, one or several tokens, with or without a tree."""
    found = draw(heads(most=most))
    words = [word for word in range(1, len(found) + 1) for _ in range(draw(st.integers(0, 2)))] or [1]
    if draw(st.integers(0, 3)) == 0:
        found, words = (), [0] * len(words)
    return Example(np.full(len(words), 7), np.full(2, 8), 0, tree_of(words, found))


def tree_of(words: Sequence[int], heads: Sequence[int]) -> dict[str, TokenFeature]:
    """Return the feature of tokens that belong to these words; the offsets of words are arbitrary."""
    annotation = np.stack([np.zeros(len(heads), np.int32), np.array(heads, np.int32)], 1).ravel()
    return {"tree": TokenFeature(np.array(words, np.int32), annotation)}


def words_and_heads(example: Example) -> tuple[list[int], list[int]]:
    values, annotation = example.features["tree"]
    return values.tolist(), annotation[1::2].tolist()


def expected(example: Example, one: int, other: int) -> int:
    """Return the distance between two tokens of a sentence, by following the heads."""
    words, found = words_and_heads(example)
    words = [*words, 0]
    if not words[one] or not words[other]:
        return UNKNOWN_DISTANCE
    length = arcs(words[one], words[other], found)
    return length if words[other] > words[one] else -length


@given(st.lists(st.lists(sources(), max_size=3), min_size=1, max_size=3).filter(any), st.integers(0, 3))
def test_tree_distances_equal_those_of_a_search(rows: list[list[Example]], spare: int) -> None:
    some = [example for row in rows for example in row]
    numbers = iter(range(len(some)))
    width = max(sum(len(e.source) + 1 for e in row) for row in rows) + spare
    batch = collate_pairs(BatchPlan([[next(numbers) for _ in row] for row in rows], Widths(width, 9)), some)
    depth = torch.zeros(len(rows), width, dtype=torch.long)
    ways = torch.full((len(rows), width, width), UNKNOWN_DISTANCE, dtype=torch.int8)
    for r, row in enumerate(rows):
        at = 0
        for example in row:
            words, found = words_and_heads(example)
            for one, word in enumerate(words):
                depth[r, at + one] = len(to_root(word, found)) - 1
                for other in range(len(example.source)):
                    ways[r, at + one, at + other] = expected(example, one, other)
            at += len(example.source) + 1
    assert torch.equal(batch.features["tree_depth"], depth)
    assert torch.equal(batch.features["tree_distance"], ways)
    assert batch.features["tree_distance"].dtype == torch.int8


@given(heads(), st.randoms())
def test_the_order_of_words_changes_only_the_sign_of_distances(found: tuple[int, ...], random: Any) -> None:
    order = list(range(len(found)))
    random.shuffle(order)
    moved = [0] * len(found)
    for word, place in enumerate(order):
        moved[place] = order[found[word] - 1] + 1 if found[word] else 0
    one, other = grid([found]), grid([moved])
    assert torch.equal(one.features["tree_depth"][0, :-1], other.features["tree_depth"][0, order])
    assert torch.equal(
        one.features["tree_distance"][0, :-1, :-1].abs(), other.features["tree_distance"][0][order][:, order].abs()
    )


def grid(trees: Sequence[Sequence[int]], widths: Widths | None = None) -> Batch:
    """Return a batch with one sentence per row and one token per word."""
    some = [tree_example(found, number) for number, found in enumerate(trees)]
    return in_rows([[number] for number in range(len(some))], some, widths)


def tree_example(found: Sequence[int], seed: int = 0) -> Example:
    rng, words = np.random.default_rng(seed), np.arange(1, len(found) + 1)
    source, target = rng.integers(4, VOCABULARY, len(found)), rng.integers(4, VOCABULARY, 5)
    return Example(source, target, 0, tree_of(words.tolist(), found))


def test_long_distances_are_clamped() -> None:
    batch = grid([range(300)])
    assert batch.features["tree_depth"][0, :-1].tolist() == list(range(1, 301))
    assert batch.features["tree_distance"][0, 0, 100:300].tolist() == [
        min(n, MAX_TREE_DISTANCE) for n in range(100, 300)
    ]
    assert batch.features["tree_distance"][0, 299, :100].tolist() == [-MAX_TREE_DISTANCE] * 100


def test_examples_without_features_make_batches_without() -> None:
    batch = in_rows([[0, 1]], examples(2))
    assert not batch.features


def model_of(position: str, *, seed: int = 0, **given: Any) -> Transformer:
    torch.manual_seed(seed)
    made = TransformerSettings(layers=2, width=8, heads=2, dropout=0.0, reach=3, position=position, **given)
    return Transformer(made, source_size=VOCABULARY, target_size=VOCABULARY, joint=True).double()


CHAIN, STAR, DEEP = (0, 1, 2, 3, 4), (2, 0, 2, 2, 2), (5, 1, 2, 5, 0)


def test_a_tree_changes_the_encoder_output() -> None:
    model = model_of("tree")
    batch = grid([CHAIN])
    for found in (STAR, DEEP):
        other = grid([found])
        assert_different(model(batch), model(replace(batch, features=other.features)))
        for name, tensor in other.features.items():
            assert_different(model(batch), model(replace(batch, features={**batch.features, name: tensor})))


def test_without_a_tree_it_is_the_sinusoidal_model() -> None:
    """This holds for any weights of depths and distances; missing and unusable trees are equivalent."""
    model, plain = model_of("tree"), model_of("sinusoidal", seed=1)
    learned = model.state_dict()
    plain.load_state_dict({name: learned[name] for name in plain.state_dict()})
    own = set(learned) - set(plain.state_dict())
    assert len(own) == 1 + 2 * 2  # the depths, and keys and values of the ways in each layer of the encoder
    assert all(name.startswith("encoder.") for name in own)
    some = [tree_example(CHAIN, 1), tree_example(STAR, 2)]
    without = [example._replace(features=tree_of([0] * 5, ())) for example in some]
    batch = in_rows([[0, 1]], [example._replace(features={}) for example in some])
    assert_same(model(batch), plain(batch))
    assert_same(model(in_rows([[0, 1]], without)), plain(batch))
    assert_different(model(in_rows([[0, 1]], some)), plain(batch))


def test_vectors_of_zero_are_the_sinusoidal_model_too() -> None:
    model, plain = model_of("tree"), model_of("sinusoidal", seed=1)
    learned = model.state_dict()
    plain.load_state_dict({name: learned[name] for name in plain.state_dict()})
    with torch.no_grad():
        for name in set(learned) - set(plain.state_dict()):
            learned[name].zero_()
    batch = grid([CHAIN, STAR])
    assert_same(model(batch), plain(batch))


@settings(max_examples=20)
@given(st.lists(heads(most=5), min_size=4, max_size=4), st.permutations(range(4)), st.integers(0, 4), st.integers(0, 3))
def test_packed_equals_unpacked_with_trees(
    trees: list[tuple[int, ...]], items: list[int], cut: int, spare: int
) -> None:
    model, some = model_of("tree"), [tree_example(found, n) for n, found in enumerate(trees)]
    rows = [items[:cut], items[cut:]]
    widths = Widths(max(sum(len(some[i].source) + 1 for i in row) for row in rows) + spare, 24 + spare)
    batch = in_rows(rows, some, widths)
    states = model(batch)
    for r, row in enumerate(rows):
        for number, item in enumerate(row, 1):
            assert_same(states[r][batch.target_segment_BT[r] == number], model(in_rows([[item]], some))[0])


def attended(q: Tensor, gap: Tensor, reach: int) -> tuple[Tensor, Any]:
    relate = POSITIONS["tree"].attention(AttentionSettings(width=8, heads=2, reach=reach)).double()
    rows = RowLayout(torch.ones(q.size(0), q.size(2)), torch.zeros(1), features={"tree_distance": gap})
    return relate.attend(
        attend_reference, q, q, q, AttentionMask(relative_position=relate.compute_relative_in_rows(rows))
    ), relate


def test_each_distance_has_a_vector_except_unknown_ones() -> None:
    """Written out for every pair, as in the paper's formulas (Shaw 2018, equations 3 and 4)."""
    torch.manual_seed(3)
    q = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    gap = torch.tensor(
        [[[0, 1, -2, UNKNOWN_DISTANCE], [-1, 0, 9, 2], [2, -9, 0, UNKNOWN_DISTANCE], [UNKNOWN_DISTANCE] * 4]],
        dtype=torch.int8,
    )
    found, relate = attended(q, gap, reach=2)
    key, value = (torch.zeros(4, 4, 4, dtype=torch.float64) for _ in range(2))
    for i in range(4):
        for j in range(4):
            way = int(gap[0, i, j])
            if way != UNKNOWN_DISTANCE:
                key[i, j], value[i, j] = (table[max(-2, min(2, way)) + 2] for table in (relate.key_RD, relate.value_RD))
    score = torch.einsum("bhqd,bhqkd->bhqk", q, q[:, :, None] + key) * 4**-0.5
    assert_same(found, torch.einsum("bhqk,bhqkd->bhqd", score.softmax(-1), q[:, :, None] + value))


def test_only_depths_that_occur_get_gradients() -> None:
    model = model_of("tree")
    batch = grid([CHAIN])
    model(batch).square().sum().backward()
    slope = model.encoder.position.table.weight.grad
    assert isinstance(slope, Tensor)
    assert (slope.abs().sum(1) > 0).tolist() == [True, True, True]  # depths 4 and 5 count as 3
    model.zero_grad()
    model(grid([STAR])).square().sum().backward()
    slope = model.encoder.position.table.weight.grad
    assert isinstance(slope, Tensor)
    assert (slope.abs().sum(1) > 0).tolist() == [True, True, False]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rnn": ({"kind": "rnn", "position": "tree"}, r"there is no setting 'model\.position'"),
    "lm": ({"kind": "lm", "position": "tree"}, r"model\.position=tree needs trees beside texts"),
    "classifier": ({"kind": "classifier", "position": "tree"}, r"model\.position=tree needs trees beside texts"),
    "odd width": ({"width": 7, "heads": 1, "position": "tree"}, r"model\.position=tree needs an even model\.width"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_tree_support_refuse_trees(name: str) -> None:
    section, sentence = REFUSED[name]
    with pytest.raises(UserError, match=sentence):
        settings_of(section)


@pytest.mark.parametrize("pattern", ["linformer", "bigbird", "local"])
def test_patterns_without_tree_support_refuse_trees(pattern: str) -> None:
    with pytest.raises(UserError, match=rf"model\.attention={pattern} does not support .* model\.position=tree"):
        settings_of({"position": "tree", "attention": pattern})
