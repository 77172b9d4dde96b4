"""What becomes of answers once they are found: ranked by what they looked at, unknown words filled in, texts that
differ, the parts of a line in one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dragoman.config import SearchSettings
from dragoman.search.step import Found
from dragoman.text.symbols import SPACE, Tokenizer, Word, letters
from dragoman.types import SPECIALS, UNK, Hypothesis, UserError

Look = list[list[float]]  # of every target token: how much it looked at each source token
LEAST_LOOK = 1e-4  # what no word looked at, so that its logarithm is no more than bad
CELLS = 4_000_000  # of an alignment; a line of very many parts goes without


def different(answers: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Without those whose text came before: one text can be spelt in several ways."""
    first: dict[str, Hypothesis] = {}
    for one in answers:
        first.setdefault(one.text, one)
    return list(first.values())


def joined(parts: Sequence[Hypothesis]) -> Hypothesis:
    """One answer from the answers to a line's sentences; alignments stand on the diagonal."""
    tokens = [token for part in parts for token in part.tokens]
    source_tokens = [token for part in parts for token in part.source_tokens]
    ends = sum(len(part.tokens) + 1 for part in parts)
    warnings = [f"longer than any sentence of training: translated in {len(parts)} parts"]
    warnings += dict.fromkeys(warning for part in parts for warning in part.warnings)
    aligned = any(part.alignment for part in parts)
    small = len(tokens) * len(source_tokens) <= CELLS
    return Hypothesis(
        text=" ".join(part.text for part in parts),
        score=sum(part.score * (len(part.tokens) + 1) for part in parts) / ends,
        tokens=tokens,
        alignment=diagonal(parts, len(source_tokens)) if small and aligned else [],
        source_tokens=source_tokens,
        logp=sum(part.logp for part in parts),
        warnings=(*warnings, *(["too long for an alignment"] if aligned and not small else [])),
        flags=tuple(dict.fromkeys(flag for part in parts for flag in part.flags)),
    )


def diagonal(parts: Sequence[Hypothesis], width: int) -> list[list[float]]:
    alignment, before = [], 0
    for part in parts:
        after = width - before - len(part.source_tokens)
        alignment += [[0.0] * before + row + [0.0] * after for row in part.alignment]
        before += len(part.source_tokens)
    return alignment


def by_coverage(found: Sequence[tuple[Found, Look]], beta: float) -> list[tuple[Found, Look]]:
    """Answers ranked anew: worse by `beta` times what they did not look at, the sum of log(min(looks, 1)) over the
    source (Wu 2016). Whole answers still come before cut ones."""
    scored = [(replace(one, score=one.score + beta * missed(look)), look) for one, look in found]
    return sorted(scored, key=lambda pair: (not pair[0].finished, -pair[0].score))


def missed(look: Look) -> float:
    return sum(math.log(min(max(sum(column), LEAST_LOOK), 1.0)) for column in zip(*look))


Unknown = Callable[[str, Mapping[str, str]], str]  # the source word and a dictionary in, what to say out
Say = Callable[[str], str]  # the same with a dictionary in hand


def keep(word: str, dictionary: Mapping[str, str]) -> str:  # noqa: ARG001 - the menu's shape
    return SPECIALS[UNK]


def copy(word: str, dictionary: Mapping[str, str]) -> str:  # noqa: ARG001
    """Names and numbers are the same in many languages."""
    return word


def look_up(word: str, dictionary: Mapping[str, str]) -> str:
    """What the dictionary has for it, or for it in small letters; what it does not have is copied."""
    return dictionary.get(word) or dictionary.get(word.lower()) or word


def check_unknown(name: str, tokenizer: Tokenizer, dictionary: Mapping[str, str] | None) -> None:
    if name != "drop" and not isinstance(tokenizer, Word):
        raise UserError(f"search.unknown={name} is for word vocabularies, and this run has none; leave it out")
    if (name == "dictionary") != (dictionary is not None):
        raise UserError("search.unknown=dictionary and a dictionary belong together; give both, or neither")


def check_alignment(settings: SearchSettings, *, aligns: bool) -> None:
    """Refuse settings that go by the alignment where the model's attention gives none."""
    needs = [f"search.coverage={settings.coverage:g}"] if settings.coverage else []
    needs += [f"search.unknown={settings.unknown}"] if settings.unknown in ("copy", "dictionary") else []
    if needs and not aligns:
        raise UserError(
            f"{needs[0]} needs the source word that each target word attends to, which this model's attention "
            "(none or mean) does not give; leave it out, or train with another model.attention, such as additive"
        )


def saying(name: str, dictionary: Mapping[str, str]) -> Say | None:
    """Return the function that gives the output for an unknown source word, or None where such words are left out."""
    unknown = UNKNOWN[name]
    return (lambda word: unknown(word, dictionary)) if unknown else None


def filled_in(ids: Sequence[int], looks: Look, target: Tokenizer, words: Sequence[str], say: Say) -> str:
    """The text of an answer of a word vocabulary, with something said for every unknown word: `words` are those of the
    source, one for each of its tokens, and the one most looked at is the one that was meant."""
    shown = []
    for token, piece, look in zip(ids, target.pieces(ids), looks, strict=True):
        unknown = token == UNK and look
        shown.append(piece.replace(SPECIALS[UNK], say(words[look.index(max(look))])) if unknown else piece)
    return "".join(shown).replace(SPACE, " ").removeprefix(" ")


WORD = re.compile(r"\w+(?:['’\-]\w+)*|\S")


def source_words(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> list[str]:
    """For each token of a source, the word that it is, or that it begins in."""
    if isinstance(tokenizer, Word):
        return [found[0] for found in tokenizer.token.finditer(text)]
    found = [(letters(text[: match.start()]), match[0]) for match in WORD.finditer(text)]
    words, place = [], 0
    for start in tokenizer.starts(text, ids) or [0] * len(ids):
        while place + 1 < len(found) and found[place + 1][0] <= start:
            place += 1
        words.append(found[place][1])
    return words


UNKNOWN: dict[str, Unknown | None] = {"drop": None, "keep": keep, "copy": copy, "dictionary": look_up}
