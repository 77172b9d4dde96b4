"""What a word is where no spaces stand between words: how BLEU cuts lines, by the script that they are written in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from dragoman.config import pick
from dragoman.types import UserError

KANA, HAN, HANGUL = "\u3040-\u30ff", "\u3400-\u4dbf\u4e00-\u9fff", "\uac00-\ud7af"
EASTERN = 0.3  # of all letters and digits: from here on a text is Japanese, Chinese or Korean
APART = 100  # lines that end in a separate full stop: from here on a text is taken for one in tokens
SPACELESS = ("ja", "zh")
WORD = re.compile(rf"[{KANA}{HAN}]|[^\W{KANA}{HAN}]+")  # a sign of these scripts; of others what marks and spaces cut


def words(line: str) -> list[str]:
    """The words of a line, without marks between them."""
    return WORD.findall(line)


def eastern(lines: Iterable[str]) -> str:
    """ja, zh or ko where a text is written so, by its script alone; nothing where it is not."""
    text = "".join(lines)
    kana, han, hangul = (len(re.findall(f"[{script}]", text)) for script in (KANA, HAN, HANGUL))
    if kana + han + hangul <= EASTERN * len(re.findall(r"\w", text)):
        return ""
    if hangul > kana + han:
        return "ko"
    return "ja" if kana > 0.1 * han else "zh"


def bleu_of(tokenize: str, references: Iterable[Iterable[str]], *, lowercase: bool = False) -> Any:
    """sacreBLEU's BLEU, which cuts lines as `tokenize` says: a name of TOKENIZERS, or "" for what fits the references.

    Japanese and Korean words need a dictionary; where it is not there, "" means single signs.
    """
    from sacrebleu.metrics.bleu import BLEU

    name = tokenize or BY_SCRIPT[eastern(line for lines in references for line in lines)]
    extra = pick(TOKENIZERS, name, "way to cut lines for BLEU")
    try:
        return BLEU(tokenize=name, lowercase=lowercase, force=True)  # its word on text in tokens is ours to say
    except (RuntimeError, ImportError):  # what sacreBLEU says when a dictionary is missing
        if tokenize:
            raise UserError(f"{name} needs a dictionary that is not there; pip install 'dragoman[{extra}]'") from None
        return BLEU(tokenize="char", lowercase=lowercase, force=True)


def in_tokens(lines: Iterable[str]) -> bool:
    """Whether a text looks cut into tokens: in many lines the full stop stands apart, as sacreBLEU tells it."""
    return sum(line.endswith(" .") for line in lines) >= APART


def moses(lines: Sequence[str], language: str) -> list[str]:
    """Lines as the Moses scripts make tokens of them: lower case, plain punctuation, then cut; dashes stay in words.

    From Multi30k's raw test sets this makes, to the byte, the text in tokens that comes with them, in English and in
    German, and so the references of Wu et al. 2021 (docs/recipes.md).
    """
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    plain, cut = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [cut.tokenize(plain.normalize(line.lower()), return_str=True) for line in lines]


BY_SCRIPT = {"": "13a", "zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}  # as sacreBLEU would, were it told the language
TOKENIZERS = {  # those of sacreBLEU that need no network, and the extra that brings what they need
    "13a": "",
    "intl": "",
    "zh": "",
    "char": "",
    "none": "",
    "ja-mecab": "mecab",
    "ko-mecab": "mecab",
}
