"""Features: additional input about the tokens of a source, such as their position in a dependency tree.

    Pair.tree        the tree that a file has for a sentence, over words
    Annotation       the tree as numbers, over bytes of the text; stored          Feature.make_annotation
    TokenFeature     a value for each token, and the annotation; stored           Feature.align_tokens
    Batch.features   tensors by name, the input of a position encoding            Feature.collate

A position encoding names the features that it needs (modules/positions.py). To add a feature, write a subclass of
Feature and an entry in FEATURES.

Shapes   B rows   S source width   N tokens of all rows, including every </s>
Trees    W words of a row   K words of all rows, counted from 1; 0 is no word
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.data.tokenizers import Tokenizer
from dragoman.data.trees import remove_spaces
from dragoman.types import UNKNOWN_DISTANCE, Pair, TokenFeature

IntArray = NDArray[np.int64]
Annotation = NDArray[np.int32]  # one-dimensional; its format depends on the feature
NO_ANNOTATION: Annotation = np.zeros(0, np.int32)  # of a sentence whose feature is unknown
MAX_TREE_DISTANCE = 127  # the maximum of int8


class Feature(ABC):
    """A kind of feature. The cache of token ids has two columns of it, whose names and formats must not change."""

    columns: tuple[str, str]  # names of the two columns: values of tokens, annotations of texts
    store_key: str  # part of the cache key of a token store with this feature
    missing_key: str  # key in store.json: number of sentences whose feature is unknown
    missing_message: str  # logged after this number, if it is not 0

    @abstractmethod
    def make_annotation(self, pair: Pair) -> Annotation:
        """Return the annotation of a source, whatever its tokens are; NO_ANNOTATION if nothing is known."""

    @abstractmethod
    def align_tokens(self, annotation: Annotation, text: str, ids: Sequence[int], tokenizer: Tokenizer) -> TokenFeature:
        """Return a value for each token, and the annotation; zeros and NO_ANNOTATION if nothing is known."""

    @abstractmethod
    def collate(
        self, features: Sequence[TokenFeature], example_rows: IntArray, slot_N: IntArray, shape: tuple[int, int]
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a batch of this shape (B, S), also if there are no examples.

        `example_rows` is the row of each example; `slot_N` is the index of each token in the flattened batch.
        """


class TreeFeature(Feature):
    """The position of each token's word in the dependency tree of its sentence.

    The annotation has two numbers for each word: where it begins, in bytes of the text without spaces, and its head.
    The value of a token is the number of its word, from 1; 0 is no word. A batch has two tensors:

    - `tree_depth` (BS) is the depth of a token's word in the tree, 0 if it is unknown.
    - `tree_distance` (BSS) is the number of arcs between the words of two tokens, at most MAX_TREE_DISTANCE. It is
      positive if the second word is to the right of the first, negative if it is to the left, and 0 between tokens of
      the same word. It is UNKNOWN_DISTANCE between sentences, for padding and </s>, and if the tree is unknown.
    """

    columns = ("words", "trees")
    store_key = "trees"
    missing_key = "treeless"
    missing_message = "sentences have no usable tree; the model gets no tree positions for them"

    def make_annotation(self, pair: Pair) -> Annotation:
        """Find where the words begin. A tree whose concatenated words are not the text cannot be used."""
        words = [remove_spaces(word) for word in pair.tree.words] if pair.tree else []
        if not pair.tree or "".join(words) != remove_spaces(pair.source):
            return NO_ANNOTATION
        # Byte offsets, as in `Tokenizer.locate_tokens`: they skip " ", but count other whitespace, which no word has.
        offsets = [0, *accumulate(0 if letter == " " else len(letter.encode()) for letter in pair.source)]
        letter_offsets = [n for n, letter in zip(offsets, pair.source) if not letter.isspace()] + offsets[-1:]
        starts = [letter_offsets[n] for n in accumulate(map(len, words), initial=0)][:-1]
        return np.array([starts, pair.tree.heads], np.int32).T.ravel()

    def align_tokens(self, annotation: Annotation, text: str, ids: Sequence[int], tokenizer: Tokenizer) -> TokenFeature:
        """Return the number of the word that contains the first letter of each token."""
        starts = tokenizer.locate_tokens(text, ids) if len(annotation) else None
        if starts is None:
            return TokenFeature(np.zeros(len(ids), np.int32), NO_ANNOTATION)
        return TokenFeature(np.searchsorted(annotation[::2], starts, side="right").astype(np.int32), annotation)

    def collate(
        self, features: Sequence[TokenFeature], example_rows: IntArray, slot_N: IntArray, shape: tuple[int, int]
    ) -> Mapping[str, Tensor]:
        """Compute the depths of all words and the distances between them.

        The distance of two words is the sum of their depths minus twice the depth of their lowest common ancestor.
        That depth is the number of their common ancestors, if a word counts as its own ancestor. So one matrix product
        of the indicators of ancestors gives all distances.
        """
        # Number the words of all sentences consecutively from 1.
        word_counts = np.array([len(feature.annotation) // 2 for feature in features], np.int64)  # of each sentence
        token_counts = np.array([len(feature.values) + 1 for feature in features], np.int64)  # including </s>
        offsets = np.cumsum(word_counts) - word_counts  # words before each sentence
        eos_word = np.zeros(1, np.int64)  # </s> belongs to no word, numbered 0, whose head is 0
        local_word_N = np.concatenate([eos_word[:0], *(part for f in features for part in (f.values, eos_word))])
        local_head_K = np.concatenate([eos_word, *(feature.annotation[1::2] for feature in features)])
        word_N = np.where(local_word_N, local_word_N + np.repeat(offsets, token_counts), 0)
        head_K = np.where(local_head_K, local_head_K + np.repeat([0, *offsets], [1, *word_counts]), 0)
        row_offsets = offsets[np.searchsorted(example_rows, example_rows)]  # words before the row of each sentence
        # Index of each word among the words of its row.
        column_K = np.arange(-1, len(head_K) - 1) - np.repeat([0, *row_offsets], [1, *word_counts])

        sentence_N = np.repeat(np.arange(1, len(features) + 1), token_counts)
        word_BS = scatter(word_N, slot_N, shape)
        sentence_BS = scatter(np.where(word_N, sentence_N, 0), slot_N, shape)
        ancestor_BSW = torch.zeros(*shape, int(column_K.max()) + 1)  # 1 if word w is an ancestor of the token's word
        ancestor_flat = ancestor_BSW.flatten(0, 1).numpy()
        while word_N.any():  # go from all words to their heads, until all have passed their roots
            known = word_N > 0
            ancestor_flat[slot_N[known], column_K[word_N[known]]] = 1
            word_N = head_K[word_N]
        depth_BS = ancestor_BSW.sum(-1)
        arcs_BSS = depth_BS[:, :, None] + depth_BS[:, None] - 2 * ancestor_BSW @ ancestor_BSW.mT
        distance_BSS = arcs_BSS.clamp(max=MAX_TREE_DISTANCE) * (word_BS[:, None] - word_BS[:, :, None]).sign()
        known_BSS = (sentence_BS[:, None] == sentence_BS[:, :, None]) & (sentence_BS > 0)[:, None]
        distance_BSS = distance_BSS.masked_fill(~known_BSS, UNKNOWN_DISTANCE)
        return {"tree_depth": depth_BS.long(), "tree_distance": distance_BSS.to(torch.int8)}


def scatter(values_N: IntArray, slot_N: IntArray, shape: tuple[int, int]) -> Tensor:
    """Return a matrix with these values at these indices of the flattened matrix, and zeros (PAD) elsewhere."""
    matrix = np.zeros(shape, dtype=np.int64)
    matrix.ravel()[slot_N] = values_N
    return torch.from_numpy(matrix)


FEATURES: dict[str, Feature] = {"tree": TreeFeature()}
