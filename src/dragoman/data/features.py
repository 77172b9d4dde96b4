"""Features: what is known about the tokens of a source beside their ids, such as their places in a dependency tree.

    Pair.tree        what a file tells about the words of a sentence
    record           the same over the bytes of the text, kept with it           Feature.locate
    TokenFeature     the same over the tokens that a tokenizer makes of it       Feature.align
    Batch.features   tensors by name, which a position encoding reads            Feature.pack, Feature.fill

A position encoding names the features that it needs (modules/positions.py). To add a feature, write a subclass of
Feature and a line in FEATURES.

Shapes   B rows   S source width   N tokens of all rows, every </s> included
Trees    W words of a row   K words of all rows, counted from 1; 0 is no word
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.data.tokenizers import Tokenizer
from dragoman.data.trees import remove_spaces
from dragoman.types import UNKNOWN_DISTANCE, Pair, TokenFeature

IntArray = NDArray[np.int64]
FeatureRecord = NDArray[np.int32]  # of one sentence, flat
EMPTY_RECORD: FeatureRecord = np.zeros(0, np.int32)  # of a sentence about which nothing is known
MAX_TREE_DISTANCE = 127  # fits a byte


class Feature(ABC):
    """One feature. A token store keeps it in two files, whose names and formats must not change."""

    files: tuple[str, str]  # of the values of tokens and of the records
    store_key: str  # part of the cache key of a store that has the feature
    missing_key: str  # in store.json: how many sentences lack it
    missing_message: str  # logged after that number

    @abstractmethod
    def locate(self, pair: Pair) -> FeatureRecord:
        """Return what is known about the source, without regard to its tokens; EMPTY_RECORD if nothing."""

    @abstractmethod
    def align(self, record: FeatureRecord, text: str, ids: Sequence[int], tokenizer: Tokenizer) -> TokenFeature:
        """Return a value for each token, and the record; zeros and EMPTY_RECORD where nothing is known."""

    @abstractmethod
    def pack(
        self, features: Sequence[TokenFeature], row: IntArray, slot_N: IntArray, shape: tuple[int, int]
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a batch of this shape.

        `row` is the row of each example; `slot_N` is the index of each token in the flattened batch.
        """

    @abstractmethod
    def fill(self, shape: tuple[int, int]) -> Mapping[str, Tensor]:
        """Return the tensors of a batch about which nothing is known."""


class TreeFeature(Feature):
    """The place of each token's word in the dependency tree of its sentence.

    A record holds two numbers for each word: the bytes before it, without spaces, and its head. The value of a token
    is its word, counted from 1. In a batch, `tree_depth` (BS) is the depth of a token's word, 0 where no tree is known,
    and `tree_distance` (BSS) is the number of arcs between two words of a sentence, positive where the second stands to
    the right of the first and negative where it stands to the left; 0 between the tokens of one word; at most
    MAX_TREE_DISTANCE. It is UNKNOWN_DISTANCE between sentences, at padding, at </s>, and where no tree is known.
    """

    files = ("words", "trees")
    store_key = "trees"
    missing_key = "treeless"
    missing_message = "sentences have no usable tree; their words are known by place alone"

    def locate(self, pair: Pair) -> FeatureRecord:
        """Locate the words in the text; a tree whose words do not spell it cannot be used."""
        words = [remove_spaces(word) for word in pair.tree.words] if pair.tree else []
        if not pair.tree or "".join(words) != remove_spaces(pair.source):
            return EMPTY_RECORD
        before = [0, *accumulate(0 if letter == " " else len(letter.encode()) for letter in pair.source)]
        letters = [n for n, letter in zip(before, pair.source) if not letter.isspace()] + before[-1:]
        starts = [letters[n] for n in accumulate(map(len, words), initial=0)][:-1]
        return np.array([starts, pair.tree.heads], np.int32).T.ravel()

    def align(self, record: FeatureRecord, text: str, ids: Sequence[int], tokenizer: Tokenizer) -> TokenFeature:
        """Return the word that the first letter of each token lies in."""
        starts = tokenizer.starts(text, ids) if len(record) else None
        if starts is None:
            return TokenFeature(np.zeros(len(ids), np.int32), EMPTY_RECORD)
        return TokenFeature(np.searchsorted(record[::2], starts, side="right").astype(np.int32), record)

    def pack(
        self, features: Sequence[TokenFeature], row: IntArray, slot_N: IntArray, shape: tuple[int, int]
    ) -> Mapping[str, Tensor]:
        """Compute depths and distances.

        Two words have as many ancestors in common, themselves included, as the lowest that they share is deep. So one
        matrix product gives all distances at once.
        """
        # Number the words of all sentences consecutively: the word of each token, each word's head and its column.
        size = np.array([len(one.record) // 2 for one in features])
        tokens = [len(one.values) + 1 for one in features]
        before = np.cumsum(size) - size
        own_N = np.concatenate([part for one in features for part in (one.values.astype(np.int64), [0])])
        own_K = np.concatenate([[0], *(one.record[1::2].astype(np.int64) for one in features)])
        word_N = np.where(own_N, own_N + np.repeat(before, tokens), 0)
        head_K = np.where(own_K, own_K + np.repeat([0, *before], [1, *size]), 0)
        first = before[np.searchsorted(row, row)]  # word of the row
        column_K = np.arange(-1, len(head_K) - 1) - np.repeat([0, *first], [1, *size])

        sentence_N = np.repeat(np.arange(1, len(features) + 1), tokens)
        word_BS = scatter(word_N, slot_N, shape)
        sentence_BS = scatter(np.where(word_N, sentence_N, 0), slot_N, shape)
        ancestor_BSW = torch.zeros(*shape, int(column_K.max()) + 1)
        flat = ancestor_BSW.flatten(0, 1).numpy()
        while word_N.any():
            known = word_N > 0
            flat[slot_N[known], column_K[word_N[known]]] = 1
            word_N = head_K[word_N]
        depth_BS = ancestor_BSW.sum(-1)
        arcs_BSS = depth_BS[:, :, None] + depth_BS[:, None] - 2 * ancestor_BSW @ ancestor_BSW.mT
        distance_BSS = arcs_BSS.clamp(max=MAX_TREE_DISTANCE) * (word_BS[:, None] - word_BS[:, :, None]).sign()
        known_BSS = (sentence_BS[:, None] == sentence_BS[:, :, None]) & (sentence_BS > 0)[:, None]
        distance_BSS = distance_BSS.masked_fill(~known_BSS, UNKNOWN_DISTANCE)
        return {"tree_depth": depth_BS.long(), "tree_distance": distance_BSS.to(torch.int8)}

    def fill(self, shape: tuple[int, int]) -> Mapping[str, Tensor]:
        distance_BSS = torch.full((*shape, shape[1]), UNKNOWN_DISTANCE, dtype=torch.int8)
        return {"tree_depth": torch.zeros(shape, dtype=torch.long), "tree_distance": distance_BSS}


def scatter(values_N: IntArray, slot_N: IntArray, shape: tuple[int, int]) -> Tensor:
    """Return a matrix with these values at these slots and zeros, which are PAD, elsewhere."""
    out = np.zeros(shape, dtype=np.int64)
    out.ravel()[slot_N] = values_N
    return torch.from_numpy(out)


FEATURES: dict[str, Feature] = {"tree": TreeFeature()}


def fill_features(names: Iterable[str], shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return the tensors of these features for a batch about which nothing is known."""
    return {name: tensor for each in names for name, tensor in FEATURES[each].fill(shape).items()}
