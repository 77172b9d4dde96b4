"""Word alignment from the attention of a translation model, for pairs of which both sides are given.

The model reads the target as if it generated it (teacher forcing). A word is a run of characters between spaces, and
has one or more tokens: attention weights are summed over the tokens of a source word and averaged over the tokens of a
target word.

Shapes   B rows of a batch   S source width   T target width   I source words   J target words
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dragoman.data.tokenizers import Tokenizer
from dragoman.errors import UserError
from dragoman.inference.predictor import MAX_ATTENTION_CELLS, MAX_TOKENS_WITH_EOS, bucket_widths, eval_mode
from dragoman.inference.translator import Translator

Weights = NDArray[np.float64]


class WordAttention(NamedTuple):
    """The attention weights of target words on source words, all zero if a warning says why they are unknown."""

    weight_JI: Weights
    warning: str = ""


class AttentionAligner:
    """Computes the attention between words with one layer of a model.

    `layer` is counted from 1; None is the layer that is best as a word alignment. With `shift`, the weights of a target
    word are those of the step that reads it, not of the step that predicts it. `tag`, such as a language, precedes
    every source in the input of the model.
    """

    def __init__(self, translator: Translator, *, layer: int | None = None, shift: bool = False, tag: str = "") -> None:
        if not translator.model.aligns:
            raise UserError(
                f"the model in {translator.run!r} has no attention that distinguishes source words (model.attention is "
                "none or mean), so it cannot align; use a statistical method such as joint-hmm"
            )
        layers = translator.model.attention_layers
        if layer is not None and not 1 <= layer <= layers:
            raise UserError(
                f"--layer {layer}: the model in {translator.run!r} has {layers} layer{'s' * (layers > 1)} with "
                f"attention to the source; choose one from 1 to {layers}"
            )
        self.translator, self.shift, self.tag = translator, shift, tag
        self.layer = None if layer is None else layer - 1

    @torch.inference_mode()
    def compute(self, sources: Sequence[str], targets: Sequence[str]) -> list[WordAttention]:
        """Return the attention of each pair. Pairs with an empty side or too many tokens have zeros."""
        translator = self.translator
        sides = [[" ".join(line.split()) for line in lines] for lines in (sources, targets)]
        examples = translator.make_examples(*sides, tag=self.tag)
        maximum = min(MAX_TOKENS_WITH_EOS - 1, translator.max_tokens)
        results = [WordAttention(np.zeros((len(t.split()), len(s.split())))) for s, t in zip(*sides, strict=True)]
        fitting = []
        for index, example in enumerate(examples):
            length = max(len(example.source), len(example.target))
            if length > maximum:
                warning = f"without links: {length} tokens, but the maximum of the model is {maximum}"
                results[index] = results[index]._replace(warning=warning)
            elif len(example.source) and len(example.target):
                fitting.append(index)
        tag_length = len(translator.encode_tag(self.tag))
        batches = translator.iter_batches([examples[i] for i in fitting], bucket_widths, max_cells=MAX_ATTENTION_CELLS)
        with eval_mode(translator.model):
            for indices, batch in batches:
                weight_BTS = translator.model.compute_alignment(batch, self.layer).double().cpu()
                for row, index in enumerate(fitting[i] for i in indices):
                    example = examples[index]
                    steps = slice(int(self.shift), len(example.target) + int(self.shift))
                    weight_TS = weight_BTS[row, steps, tag_length : len(example.source)].numpy()
                    ids = example.source[tag_length:].tolist(), example.target.tolist()
                    results[index] = self.merge_tokens(weight_TS, (sides[0][index], sides[1][index]), ids)
        return results

    def merge_tokens(
        self, weight_TS: Weights, texts: tuple[str, str], ids: tuple[list[int], list[int]]
    ) -> WordAttention:
        """Return the weights between words, given those between the tokens of both texts."""
        tokenizers = self.translator.tokenizers.source, self.translator.tokenizers.target
        source_words, target_words = (
            find_words_of_tokens(tokenizer, text, text.split(" "), token_ids)
            for tokenizer, text, token_ids in zip(tokenizers, texts, ids, strict=True)
        )
        sizes = len(texts[1].split()), len(texts[0].split())
        if source_words is None or target_words is None:
            return WordAttention(np.zeros(sizes), "without links: the tokens do not spell the words of the line")
        weight_TS = weight_TS / np.maximum(weight_TS.sum(-1, keepdims=True), 1e-9)  # </s> and tag are left out
        return WordAttention(merge_weights(weight_TS, source_words, target_words, sizes))


def find_words_of_tokens(
    tokenizer: Tokenizer, text: str, words: Sequence[str], ids: Sequence[int]
) -> NDArray[np.int64] | None:
    """Return the index of the word in which each token begins; None if the tokens do not spell the text.

    The concatenated `words` are the text without its spaces. Offsets are bytes, without spaces.
    """
    starts = tokenizer.locate_tokens(text, ids)
    if starts is None:
        return None
    word_starts = [0, *accumulate(len(word.encode()) for word in words[:-1])]
    return np.searchsorted(word_starts, starts, side="right") - 1


def merge_weights(
    weight_TS: Weights, source_words: NDArray[np.int64], target_words: NDArray[np.int64], sizes: tuple[int, int]
) -> Weights:
    """Return weight_JI: sums over the tokens of source words and means over the tokens of target words.

    `source_words` and `target_words` have the word index of each token; `sizes` is (J, I). A word without tokens has
    zeros.
    """
    J, I = sizes
    weight_TI = np.zeros((len(weight_TS), I))
    np.add.at(weight_TI.T, source_words, weight_TS.T)
    weight_JI = np.zeros((J, I))
    np.add.at(weight_JI, target_words, weight_TI)
    return weight_JI / np.maximum(np.bincount(target_words, minlength=J), 1)[:, None]
