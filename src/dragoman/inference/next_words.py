"""The words with which a translation can go on after a given beginning, and their probabilities.

    [word, *_] = list_next_words(translator, "A man walks his dog.", "Ein Mann geht", count=5)

A word is spelled by one or several tokens and ends where the next token begins another word. Its probability is that of
its tokens times that of such an end, so the probabilities of all words sum to at most one. The best words are found by
a search that extends the most probable spellings first.

Shapes   V vocabulary   K unfinished spellings
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.data.tokenizers import Tokenizer
from dragoman.decoding.continuous_batching import collate_sources
from dragoman.decoding.protocol import SearchJob
from dragoman.errors import UserError
from dragoman.inference.constraints import SPACELESS_LETTER
from dragoman.inference.phrase_translator import PhraseTranslator
from dragoman.inference.predictor import eval_mode
from dragoman.inference.source_segment import SourceSegment
from dragoman.inference.translator import Translator
from dragoman.types import BOS, EOS, Line

MAX_WORD_TOKENS = 40  # longer spellings are given up; words of bytes have many tokens
PREFIX_STEP = 64  # tokens of the beginning that the model reads between two checks for cancellation
SPARE = 8  # unfinished spellings kept in addition to twice the number of words that is asked for
INSIDE_WORDS = "'’-"  # marks that join two parts of a word, such as "don't" or "well-known"
# The kinds of characters, by which words are told apart; BYTE continues a character, EMPTY is a special token
EMPTY, SPACE, LETTER, JOINT, MARK, SPACELESS, BYTE = range(7)


@dataclass(frozen=True, slots=True)
class NextWord:
    """A word after a beginning. `text` is the beginning with the word."""

    word: str
    text: str
    probability: float


def classify(character: str) -> int:
    """Return the kind of a character."""
    if character.isspace():
        return SPACE
    if character in INSIDE_WORDS:
        return JOINT
    if SPACELESS_LETTER.match(character) and unicodedata.category(character)[0] == "L":
        return SPACELESS
    return LETTER if unicodedata.category(character)[0] in "LMN" else MARK


@lru_cache(maxsize=4)
def classify_tokens(tokenizer: Tokenizer) -> NDArray[np.int8]:
    """Return the kind of the first character of each token; the first byte of a longer character counts as a letter."""
    kinds = []
    for token in tokenizer.token_bytes():
        text = token.decode(errors="replace")
        if not text:
            kinds.append(EMPTY)
        elif text[0] == "\ufffd":
            kinds.append(BYTE if 0x80 <= token[0] < 0xC0 else LETTER)
        else:
            kinds.append(classify(text[0]))
    return np.array(kinds, dtype=np.int8)


def split_by_effect(begin: str, text: str, kind_V: NDArray[np.int8]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which tokens end the word at the end of a text, and which extend it. The word comes after `begin`.

    If the word has not begun, no token ends it, and the tokens with which a word can begin extend it.
    """
    if text.endswith("\ufffd"):  # an incomplete character
        return np.zeros_like(kind_V, dtype=bool), kind_V == BYTE
    last = classify(text[-1]) if text else SPACE
    if last in (LETTER, JOINT):
        others_V = np.isin(kind_V, (SPACE, MARK, SPACELESS) if last == LETTER else (SPACE, MARK))
    else:
        others_V = np.isin(kind_V, (LETTER, JOINT, MARK, SPACELESS))
        if not text or last != SPACE:  # a second space would spell the same word again
            others_V |= kind_V == SPACE
    if len(text.rstrip()) <= len(begin):
        return np.zeros_like(others_V), others_V
    return others_V, ~others_V & (kind_V != EMPTY)


def is_word_end(beginning: str, text: str) -> bool:
    """Return whether the text ends or goes on with a new word after its beginning."""
    after = text[len(beginning) :]
    if not after:
        return True
    kinds = classify(beginning[-1]), classify(after[0])
    return kinds[0] not in (LETTER, JOINT) or kinds[1] not in (LETTER, JOINT)


@torch.inference_mode()
def list_next_words(translator: Translator, line: Line, count: int) -> list[NextWord]:
    """Return up to `count` words that can follow `line.prefix` in the translation of a line, most probable first.

    Each step of the model, and each slice of the beginning, is one piece of work for the engine of the translator,
    which may be shared and cancelled.
    """
    segment = get_single_segment(translator, line)
    tokenizer, model, device = translator.tokenizers.target, translator.model, translator.device
    prefix = segment.constraints.prefix
    steps = min(MAX_WORD_TOKENS, translator.max_tokens - len(prefix))
    if steps < 1:
        raise UserError("the translation is as long as the model allows, so no word can follow")
    begin, kind_V = tokenizer.decode(prefix), classify_tokens(tokenizer)
    words: defaultdict[str, float] = defaultdict(float)  # the beginning with the word -> probability
    spellings: list[tuple[list[int], float]] = [([], 1.0)]  # tokens and probability, most probable first

    @torch.inference_mode()  # which counts for one thread
    def start() -> Any:
        source_BS, real_BS, features = collate_source(segment, device)
        return model.start(source_BS, real_BS, **features)

    @torch.inference_mode()
    def read(state: Any, tokens: Sequence[int]) -> tuple[Tensor, Any]:
        for token in tokens:
            logp_NV, state = model.step(torch.tensor([token], device=device), state)
        return logp_NV, state

    @torch.inference_mode()
    def extend(state: Any, rows: list[int], tokens: list[int]) -> tuple[Tensor, Any]:
        rows_K, token_K = (torch.tensor(values, device=device) for values in (rows, tokens))
        return model.step(token_K, state.select(rows_K))

    with eval_mode(model):
        state, given = translator.engine.run_model(start), (BOS, *prefix)
        for index in range(0, len(given), PREFIX_STEP):
            logp_NV, state = translator.engine.run_model(partial(read, state, given[index : index + PREFIX_STEP]))
        for _ in range(steps):
            p_KV = logp_NV.double().exp().cpu().numpy()[:, : len(kind_V)]
            extended: list[tuple[float, int, int]] = []  # probability, index of the spelling, next token
            for index, (tokens, probability) in enumerate(spellings):
                text = tokenizer.decode([*prefix, *tokens])
                ends_V, extends_V = split_by_effect(begin, text, kind_V[: p_KV.shape[1]])
                if ends_V.any():
                    words[text] += probability * float(p_KV[index, ends_V].sum() + p_KV[index, EOS])
                p_V = np.where(extends_V, p_KV[index], 0.0) * probability
                best_K = np.argpartition(-p_V, min(2 * count + SPARE, len(p_V) - 1))[: 2 * count + SPARE]
                extended += [(float(p_V[token]), index, int(token)) for token in best_K]
            # What is less probable than the words found so far can only lead to words that are even less probable.
            worst = sorted(words.values(), reverse=True)[count - 1] if len(words) >= count else 0.0
            extended = [entry for entry in sorted(extended, reverse=True) if entry[0] > worst][: 2 * count + SPARE]
            if not extended:
                break
            rows, next_tokens = [index for _, index, _ in extended], [token for _, _, token in extended]
            spellings = [([*spellings[index][0], token], probability) for probability, index, token in extended]
            logp_NV, state = translator.engine.run_model(partial(extend, state, rows, next_tokens))
    best = sorted(words.items(), key=lambda item: (-item[1], item[0]))[:count]
    return [NextWord(text[len(begin) :].strip(), text, probability) for text, probability in best if probability]


def collate_source(segment: SourceSegment, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return source and mask of a segment as a batch of one row, and its features as arguments of `model.start`."""
    ids = [*segment.leading_ids, *segment.ids]
    job = SearchJob(ids, 1, features=segment.features)
    source_BS, real_BS, features = collate_sources([job], len(ids) + 1, rows=1)
    moved = {name: tensor.to(device) for name, tensor in features.items()}
    return source_BS.to(device), real_BS.to(device), {"features": moved} if moved else {}


def get_single_segment(translator: Translator, line: Line) -> SourceSegment:
    """Return a line as the model reads it; raise a UserError if the next words of its translation are not defined."""
    if isinstance(translator, PhraseTranslator):
        raise UserError("a phrase-based system has no probabilities of next words; use a neural model")
    segments = translator.make_segments(line, translator.make_options())
    if len(segments) != 1:
        problem = "is longer than any sentence of training" if segments else "is empty"
        raise UserError(f"words can be chosen in one sentence at a time, and the text {problem}; give one sentence")
    return segments[0]
