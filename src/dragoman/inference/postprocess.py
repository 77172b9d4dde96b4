"""What about an answer looks odd: flags for a reader who cannot read them all. Ordinary text must not raise them.

What becomes of answers once they are found: ranked by what they looked at, unknown words filled in, texts that
differ, the parts of a line in one.

Where sentences end: a line that is too long for a model is cut there.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import eq
from typing import NamedTuple, Self

from dragoman.config.settings import SearchSettings
from dragoman.data.simple_tokenizers import SPACE_MARK, Tokenizer, WordTokenizer, count_letter_bytes
from dragoman.decoding.protocol import SearchResult
from dragoman.errors import UserError
from dragoman.types import SPECIALS, UNK, Hypothesis

FLAG_REPEATS, FLAG_LONG, FLAG_SHORT, FLAG_COPY, FLAG_UNKNOWN, FLAG_LOST, FLAG_ADDED = (
    "with repetitions",
    "far too long",
    "far too short",
    "copying the source",
    "with unknown words left out",
    "with placeholders, tags or links missing from the translation",
    "with placeholders, tags or links not in the source",
)
FLAG_WORD = re.compile(r"[\u2e80-\ua4cf\uac00-\ud7af]|[^\W\u2e80-\ua4cf\uac00-\ud7af]+(?:['’\-]\w+)*")
MAX_LOOP_WORDS = 40  # words of what is repeated
MIN_COPY_WORDS = 5  # words: so short a line may well be a name that stays as it is
COPY_SHARE = 0.8  # share of its words that a copy has from the source
RARE_COPIES = 0.01  # share of copies in training below which a copy is odd
RATIO_SMOOTHING = 4  # tokens that are added to both sides before they are compared: short lines vary more
RATIO_MARGIN = 1.25  # times beyond the most that training had
OFTEN_REWRITTEN = (
    0.3  # share of training pairs with other placeholders than their source, from which on that is no fault
)
MIN_PLACEHOLDER_PAIRS = 10  # training pairs with placeholders, below which they say little
MAX_NAMED = 10  # placeholders that a warning names
PLACEHOLDER_MARKS = re.compile(r"[{<%@]|://|www\.")  # a text without any of these has no placeholder, tag or link
# Every alternative begins with a mark of its own or where a word begins, and its repetitions are possessive: a text is
# read in linear time, whatever it holds.
PLACEHOLDER = re.compile(
    r"""
      (?<!\w)(?:(?:https?|ftp)://|www\.) (?:[\-.~:/?#\[\]@!$&'()*+,;=%] | [^\W\u2e80-\ua4cf\uac00-\ud7af])++
    | (?<![A-Za-z0-9.+\-_]) [A-Za-z0-9.+\-_]++ @ [A-Za-z0-9\-]++ (?:\.[A-Za-z0-9\-]++)++  # an e-mail address
    | </?[A-Za-z][\w:.\-]*+ (?:\s[^<>]*+)? /?>                                            # <b>, </b>, <a href="x">
    | \{\{[^{}]*+\}\} | [$%]\{[^{}]*+\} | \{[\w.:,!\-]*+\}                               # {{x}}, ${x}, {name}, {0}
    | (?<![\d%]) % (?:\([\w.]++\)|\d++\$)? [\-+\#0]*+ \d*+ (?:\.\d++)? (?:hh?|ll?|z)? [sdifgeuxXc@] (?!\w)  # %s
    """,
    re.VERBOSE,
)


class PairStatistics(NamedTuple):
    """What pairs of training look like: bounds of target tokens to source tokens, how many copy their source, and how
    many of those with placeholders, tags or links have others in the target (runs of earlier releases do not say)."""

    least: float
    most: float
    copies: float
    rewritten: float = 0.0

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]], texts: Iterable[tuple[str, str]]) -> Self:
        """Learn from the lengths of many pairs and the texts of some. One pair in a thousand may be out of bounds."""
        ratios = sorted(length_ratio(source, target) for source, target in lengths)
        outside = len(ratios) // 2000
        copied, kept = [], []
        for source, target in texts:
            copied.append(is_copy(split_words(source), split_words(target)))
            if PLACEHOLDER_MARKS.search(source) or PLACEHOLDER_MARKS.search(target):
                found = count_placeholders(source), count_placeholders(target)
                kept += [found[0] == found[1]] if any(found) else []
        rewritten = kept.count(False) / max(len(kept), MIN_PLACEHOLDER_PAIRS)
        return cls(ratios[outside], ratios[-1 - outside], sum(copied) / max(len(copied), 1), rewritten)

    def text(self) -> str:
        return json.dumps([round(value, 4) for value in self])

    @classmethod
    def read(cls, text: str) -> Self:
        return cls(*json.loads(text))


def length_ratio(source: int, target: int) -> float:
    return (target + RATIO_SMOOTHING) / (source + RATIO_SMOOTHING)


def find_flags(source: str, answer: str, tokens: tuple[int, int], usual: PairStatistics | None) -> tuple[str, ...]:
    """`tokens` are how many the source and the answer have. Without knowledge of training, only loops are odd."""
    said = split_words(answer)
    again, copying = count_loops(said), usual is not None and usual.copies < RARE_COPIES
    given = split_words(source) if again or copying else []
    found = [FLAG_REPEATS] if again and again > count_loops(given) else []
    if usual:
        share = length_ratio(*tokens)
        found += (
            [FLAG_LONG]
            if share > usual.most * RATIO_MARGIN
            else [FLAG_SHORT]
            if share < usual.least / RATIO_MARGIN
            else []
        )
        found += [FLAG_COPY] if copying and is_copy(given, said) else []
    return tuple(found)


def count_placeholders(text: str) -> Counter[str]:
    """Count what a translation keeps as it is: placeholders, tags, URLs and e-mail addresses."""
    found: Counter[str] = Counter()
    for match in PLACEHOLDER.finditer(text):
        span = match[0]
        if span[0] not in "{<%$":  # a full stop or a bracket behind a link is not part of it
            span = span.rstrip(".,;:!?'")
            if span.endswith(")") and span.count(")") > span.count("("):
                span = span[:-1].rstrip(".,;:!?'")
        found[span] += 1
    del found[SPECIALS[UNK]]
    return found


def check_placeholders(source: str, answer: str, usual: PairStatistics | None) -> list[str]:
    """Name the placeholders, tags and links of the source that the answer lacks, and those that it has too many of.

    None are named where training pairs often have others in the target, such as links of a text in its summary.
    """
    if not (PLACEHOLDER_MARKS.search(source) or PLACEHOLDER_MARKS.search(answer)) or (
        usual and usual.rewritten >= OFTEN_REWRITTEN
    ):
        return []
    given, said = count_placeholders(source), count_placeholders(answer)
    warnings = []
    for flag, names in ((FLAG_LOST, list((given - said).elements())), (FLAG_ADDED, list((said - given).elements()))):
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        warnings += [f"{flag}: {', '.join(names[:MAX_NAMED])}{more}"] if names else []
    return warnings


def split_words(text: str) -> list[str]:
    return FLAG_WORD.findall(text.casefold())


def count_loops(said: Sequence[str]) -> int:
    """How often a run of words is said too often in a row: three times, or twice where it is of four words or more."""
    again = len(said) - len(set(said))  # words that were said before, of which loops are made
    found = 0
    for period in range(1, min(MAX_LOOP_WORDS, len(said) // 2, again) + 1):
        enough = period * (1 if period >= 4 else 2)
        if enough > again or sum(as_before := list(map(eq, said[period:], said))) < enough:
            continue
        same = 0
        for repeated in as_before:
            same = same + 1 if repeated else 0
            found += same == enough
    return found


def is_copy(source: Sequence[str], answer: Sequence[str]) -> bool:
    """Whether an answer is made of the words of its source, and leaves few of them out."""
    if len(source) < MIN_COPY_WORDS or len(answer) < MIN_COPY_WORDS:
        return False
    shared = (Counter(source) & Counter(answer)).total()
    return shared >= COPY_SHARE * max(len(source), len(answer))


AlignmentRows = list[list[float]]  # of every target token: how much it looked at each source token
MIN_COVERAGE = 1e-4  # what no word looked at, so that its logarithm is no more than bad
MAX_ALIGNMENT_CELLS = 4_000_000  # of an alignment; a line of very many parts goes without


def drop_duplicates(answers: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Without those whose text came before: one text can be spelt in several ways."""
    first: dict[str, Hypothesis] = {}
    for one in answers:
        first.setdefault(one.text, one)
    return list(first.values())


def join_hypotheses(parts: Sequence[Hypothesis]) -> Hypothesis:
    """One answer from the answers to a line's sentences; alignments stand on the diagonal."""
    tokens = [token for part in parts for token in part.tokens]
    source_tokens = [token for part in parts for token in part.source_tokens]
    ends = sum(len(part.tokens) + 1 for part in parts)
    warnings = [f"longer than any sentence of training: translated in {len(parts)} parts"]
    warnings += dict.fromkeys(warning for part in parts for warning in part.warnings)
    aligned = any(part.alignment for part in parts)
    small = len(tokens) * len(source_tokens) <= MAX_ALIGNMENT_CELLS
    return Hypothesis(
        text=" ".join(part.text for part in parts),
        score=sum(part.score * (len(part.tokens) + 1) for part in parts) / ends,
        tokens=tokens,
        alignment=join_alignments(parts, len(source_tokens)) if small and aligned else [],
        source_tokens=source_tokens,
        logp=sum(part.logp for part in parts),
        warnings=(*warnings, *(["too long for an alignment"] if aligned and not small else [])),
        flags=tuple(dict.fromkeys(flag for part in parts for flag in part.flags)),
    )


def join_alignments(parts: Sequence[Hypothesis], width: int) -> list[list[float]]:
    alignment, before = [], 0
    for part in parts:
        after = width - before - len(part.source_tokens)
        alignment += [[0.0] * before + row + [0.0] * after for row in part.alignment]
        before += len(part.source_tokens)
    return alignment


def rerank_by_coverage(
    found: Sequence[tuple[SearchResult, AlignmentRows]], beta: float
) -> list[tuple[SearchResult, AlignmentRows]]:
    """Answers ranked anew: worse by `beta` times what they did not look at, the sum of log(min(looks, 1)) over the
    source (Wu 2016). Whole answers still come before cut ones."""
    scored = [(replace(one, score=one.score + beta * coverage_penalty(look)), look) for one, look in found]
    return sorted(scored, key=lambda pair: (not pair[0].finished, -pair[0].score))


def coverage_penalty(look: AlignmentRows) -> float:
    return sum(math.log(min(max(sum(column), MIN_COVERAGE), 1.0)) for column in zip(*look))


UnknownWordMethod = Callable[[str, Mapping[str, str]], str]  # the source word and a dictionary in, what to say out
ReplaceUnknown = Callable[[str], str]  # the same with a dictionary in hand


def keep_unknown(word: str, dictionary: Mapping[str, str]) -> str:  # noqa: ARG001 - the menu's shape
    return SPECIALS[UNK]


def copy_source_word(word: str, dictionary: Mapping[str, str]) -> str:  # noqa: ARG001
    """Names and numbers are the same in many languages."""
    return word


def look_up_word(word: str, dictionary: Mapping[str, str]) -> str:
    """What the dictionary has for it, or for it in small letters; what it does not have is copied."""
    return dictionary.get(word) or dictionary.get(word.lower()) or word


def check_unknown(name: str, tokenizer: Tokenizer, dictionary: Mapping[str, str] | None) -> None:
    if name != "drop" and not isinstance(tokenizer, WordTokenizer):
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


def unknown_replacer(name: str, dictionary: Mapping[str, str]) -> ReplaceUnknown | None:
    """Return the function that gives the output for an unknown source word, or None where such words are left out."""
    unknown = UNKNOWN_WORD_METHODS[name]
    return (lambda word: unknown(word, dictionary)) if unknown else None


def fill_unknowns(
    ids: Sequence[int], looks: AlignmentRows, target: Tokenizer, words: Sequence[str], say: ReplaceUnknown
) -> str:
    """The text of an answer of a word vocabulary, with something said for every unknown word: `words` are those of the
    source, one for each of its tokens, and the one most looked at is the one that was meant."""
    shown = []
    for token, piece, look in zip(ids, target.pieces(ids), looks, strict=True):
        unknown = token == UNK and look
        shown.append(piece.replace(SPECIALS[UNK], say(words[look.index(max(look))])) if unknown else piece)
    return "".join(shown).replace(SPACE_MARK, " ").removeprefix(" ")


SOURCE_WORD = re.compile(r"\w+(?:['’\-]\w+)*|\S")


def source_words(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> list[str]:
    """For each token of a source, the word that it is, or that it begins in."""
    if isinstance(tokenizer, WordTokenizer):
        return [found[0] for found in tokenizer.token.finditer(text)]
    found = [(count_letter_bytes(text[: match.start()]), match[0]) for match in SOURCE_WORD.finditer(text)]
    words, place = [], 0
    for start in tokenizer.starts(text, ids) or [0] * len(ids):
        while place + 1 < len(found) and found[place + 1][0] <= start:
            place += 1
        words.append(found[place][1])
    return words


UNKNOWN_WORD_METHODS: dict[str, UnknownWordMethod | None] = {
    "drop": None,
    "keep": keep_unknown,
    "copy": copy_source_word,
    "dictionary": look_up_word,
}

SENTENCE_END = re.compile(r"[.!?…]+[\"'“”’«»‹›)\]]*(?=\s)|[。！？]+[”’」』)\]]*")
NON_SPACES = re.compile(r"\S+")
NON_SPACE = re.compile(r"\S")


def split_sentences(line: str) -> list[str]:
    """A line cut after marks that end sentences. Nothing is lost but the space between them."""
    found, begun = [], 0
    cased = line != line.lower()
    for mark in SENTENCE_END.finditer(line):
        if ends_sentence(line, mark, cased):
            found.append(line[begun : mark.end()])
            begun = mark.end()
    return [sentence.strip() for sentence in (*found, line[begun:]) if sentence.strip()]


def ends_sentence(line: str, mark: re.Match[str], cased: bool) -> bool:
    """Whether a mark ends a sentence: not after "Dr.", "z. B.", "e.g." or "3.", nor where small letters go on.

    In doubt it does not: two sentences together do less harm than half of one.
    """
    after = NON_SPACES.search(line, mark.end())
    if cased and after and after[0][0].islower():
        return False
    before = line[max(0, mark.start() - 20) : mark.start()].split(" ")[-1].lstrip("\"'“„«(")
    short = before.isdigit() or len(before) == 1 or "." in before or (len(before) <= 3 and before.istitle())
    return mark[0] != "." or not short


def warning_kinds(warnings: Iterable[str]) -> list[str]:
    """Warnings of a line without their numbers, each kind once: what lines are counted by."""
    return list(dict.fromkeys(re.split(r" at \d|:| \(", warning)[0] for warning in warnings))
