"""Our subword tokenizers as `tokenizers` holds them, so that AutoTokenizer gives our ids.

It knows SentencePiece's two models: unigram as it is, BPE as the list of merges that leads to the same pieces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dragoman.data.simple_tokenizers import SPACE_MARK
from dragoman.data.subword_tokenizers import ESCAPES, BpeTokenizer, SubwordTokenizer
from dragoman.data.tokenizers import Tokenizers
from dragoman.inference.engines.formats import write_json
from dragoman.types import EOS, SPECIALS, UNK

PAD_TOKEN, UNK_TOKEN, BOS_TOKEN, EOS_TOKEN = SPECIALS


def save_tokenizer(tokenizers: Tokenizers, folder: Path, places: int) -> list[str]:
    """tokenizer.json where it can be, else nothing; back comes why not."""
    tokenizer = tokenizers.source
    if not isinstance(tokenizer, SubwordTokenizer):
        return ["the tokenizer is no bpe or unigram, which is all that Hugging Face reads: encode with tokenizer/"]
    if not tokenizers.joint:
        return ["there are two vocabularies, and Hugging Face reads one: encode and decode with tokenizer/"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "unk_token": UNK_TOKEN,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "model_max_length": places,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # "</s>" in a text is text
    }
    write_json(folder / "tokenizer.json", describe_tokenizer(tokenizer))
    write_json(folder / "tokenizer_config.json", config)
    return []


def describe_tokenizer(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """What we do to a text, step by step: escape, put a mark before every word, cut into pieces, add the end mark."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [describe_special(number, piece) for number, piece in enumerate(SPECIALS)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *({"type": "Replace", "pattern": {"String": each}, "content": code} for each, code in ESCAPES.items()),
                {"type": "Prepend", "prepend": SPACE_MARK},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
            ],
        },
        "pre_tokenizer": None if isinstance(tokenizer, BpeTokenizer) else split_specials(),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": EOS_TOKEN, "type_id": 0}}],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
                {"SpecialToken": {"id": EOS_TOKEN, "type_id": 0}},
            ],
            "special_tokens": {EOS_TOKEN: {"id": EOS_TOKEN, "ids": [EOS], "tokens": [EOS_TOKEN]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                *(
                    {"type": "Replace", "pattern": {"String": code}, "content": each}
                    for each, code in reversed(ESCAPES.items())
                ),
            ],
        },
        "model": describe_bpe(tokenizer) if isinstance(tokenizer, BpeTokenizer) else describe_unigram(tokenizer),
    }


def split_specials() -> dict[str, Any]:
    """Their unigram model would take "</s>" and "<0x41>" in a text for those pieces; a cut after "<" forbids it."""
    names = "|".join(name[1:] for name in SPECIALS)
    pattern = f"<(?={names}|0x[0-9A-F]{{2}}>)"
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def describe_special(number: int, piece: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": piece, "special": True, **flags}


def describe_unigram(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    numbers = list(range(tokenizer.size))
    pieces, scores = tokenizer.processor.id_to_piece(numbers), tokenizer.processor.get_score(numbers)
    vocabulary = [list(pair) for pair in zip(pieces, scores, strict=True)]
    return {"type": "Unigram", "unk_id": UNK, "vocab": vocabulary, "byte_fallback": tokenizer.lossless}


def describe_bpe(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """BPE joins, of all neighbours that make a piece, those that make the earliest: a list of merges in that order."""
    pieces = tokenizer.processor.id_to_piece(list(range(tokenizer.size)))
    ids = tokenizer.sampler.vocabulary.ids
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in ids
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": UNK_TOKEN,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": tokenizer.lossless,
        "ignore_merges": False,
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": merges,
    }
