"""Word alignment from attention: tokens are merged into words, and layers and shifted steps can be chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dragoman.data.tokenizers import BpeTokenizer, ByteTokenizer, CharTokenizer, TokenizerSettings, WordTokenizer
from dragoman.errors import UserError
from dragoman.inference.attention_alignment import AttentionAligner, find_words_of_tokens, merge_weights
from dragoman.smt.symmetrization import link_by_attention
from dragoman.types import Batch
from toy_run import Toy, make_sentences, translate_toy

LINES = ["ba del, fo!", "a bc d"]


@pytest.mark.parametrize("kind", [BpeTokenizer, ByteTokenizer, CharTokenizer, WordTokenizer])
def test_tokens_belong_to_words_between_spaces(kind: Any) -> None:
    """A punctuation mark belongs to the word that it touches."""
    tokenizer = kind.train([*make_sentences(50), *LINES], TokenizerSettings(size=300))
    for text in LINES:
        ids = tokenizer.encode(text)
        words = find_words_of_tokens(tokenizer, text, text.split(" "), ids)
        assert words is not None
        assert sorted(set(words.tolist())) == list(range(len(text.split())))
        for word, expected in enumerate(text.split()):
            spelt = tokenizer.decode([i for i, number in zip(ids, words, strict=True) if number == word])
            assert spelt.replace(" ", "") == expected


def test_source_tokens_add_up_and_target_tokens_average() -> None:
    weight_TS = np.array([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.125, 0.125, 0.75]])
    weight_JI = merge_weights(weight_TS, np.array([0, 0, 1]), np.array([0, 0, 2]), (3, 2))
    np.testing.assert_array_equal(weight_JI, [[0.875, 0.125], [0.0, 0.0], [0.25, 0.75]])


def test_links_by_hand() -> None:
    """Target word 1 has no tokens, so it has no weights and no link."""
    weight_JI = np.array([[0.9, 0.1], [0.0, 0.0], [0.4, 0.6]])
    assert link_by_attention(weight_JI, "union", 0.3) == [(0, 0), (1, 2)]
    assert link_by_attention(weight_JI, "threshold", 0.4) == [(0, 0), (0, 2), (1, 2)]
    assert link_by_attention(np.zeros((0, 3)), "union", 0.3) == []


def test_shifted_weights_are_those_of_the_next_step(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose step t attends to source token t gives the diagonal, and shifted by one token otherwise."""
    translator = toy.translator
    asked: list[int | None] = []

    def alignment(batch: Batch, layer: int | None = None) -> Tensor:
        asked.append(layer)
        return torch.eye(batch.target_in_BT.size(1), batch.source_BS.size(1)).repeat(len(batch.source_BS), 1, 1)

    monkeypatch.setattr(translator.model, "compute_alignment", alignment)
    line = "ba ba ba ba"
    ids = translator.tokenizers.source.encode(line)
    if len(ids) == 4:
        [plain] = AttentionAligner(translator, layer=1).compute([line], [line])
        [shifted] = AttentionAligner(translator, shift=True).compute([line], [line])
        np.testing.assert_array_equal(plain.weight_JI, np.eye(4))
        np.testing.assert_array_equal(shifted.weight_JI, np.eye(4, k=1))
        assert asked == [0, None]


def test_every_pair_gets_weights_of_its_size(toy: Toy) -> None:
    """The result for a pair does not depend on the other pairs; empty sides and overlong pairs have no weights."""
    aligner = AttentionAligner(toy.translator)
    sources = [*make_sentences(20), "", "ba", "ba " * 5000]
    targets = [*map(translate_toy, sources[:20]), "ak", " ", "ak"]
    found = aligner.compute(sources, targets)
    for source, target, attention in zip(sources, targets, found, strict=True):
        assert attention.weight_JI.shape == (len(target.split()), len(source.split()))
    assert "maximum of the model" in found[-1].warning
    assert [attention.warning for attention in found[:-1]] == [""] * 22
    np.testing.assert_allclose(found[0].weight_JI.sum(1), 1, atol=1e-6)
    for attention, source, target in zip(found[:5], sources, targets, strict=False):
        [alone] = aligner.compute([source], [target])
        np.testing.assert_array_equal(alone.weight_JI, attention.weight_JI)


def test_layers_that_do_not_exist_are_refused(toy: Toy) -> None:
    with pytest.raises(UserError, match=r"--layer 3.*choose one from 1 to 1"):
        AttentionAligner(toy.translator, layer=3)
