"""From search results to what users see: flags and warnings, unknown words, reranking, joining and splitting of lines.

Flags point out hypotheses that look wrong, for readers who cannot read them all. Ordinary text must not raise them.
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

from dragoman.data.simple_tokenizers import SPACE_MARK, Tokenizer, WordTokenizer, count_letter_bytes
from dragoman.decoding.protocol import SearchResult
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
MAX_LOOP_WORDS = 40  # in the phrase that is repeated
MIN_COPY_WORDS = 5  # a shorter line may be a name that stays as it is
COPY_SHARE = 0.8  # share of its words that a copy has from the source
RARE_COPIES = 0.01  # share of copies in training below which copies are flagged
RATIO_SMOOTHING = 4  # tokens added to both lengths before they are divided: short lines vary more
RATIO_MARGIN = 1.25  # factor beyond the bounds of the training pairs
OFTEN_REWRITTEN = 0.3  # share of training pairs with changed placeholders from which on they are not checked
MIN_PLACEHOLDER_PAIRS = 10  # fewer training pairs with placeholders than this count as this many
MAX_NAMED = 10  # placeholders in one warning
PLACEHOLDER_MARKS = re.compile(r"[{<%@]|://|www\.")  # a text without any of these has no placeholder, tag or link
# Every alternative begins with a mark of its own or at the beginning of a word, and its repetitions are possessive, so
# that any text is read in linear time.
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
    """What training pairs look like; hypotheses outside of it are flagged. Stored in the header of the weights."""

    least: float  # bounds of target tokens per source token
    most: float
    copies: float  # share of pairs whose target copies the source
    rewritten: float = 0.0  # share, of pairs with placeholders, that have others in the target; earlier runs lack it

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]], texts: Iterable[tuple[str, str]]) -> Self:
        """Measure the lengths of many pairs and the texts of some. One pair in a thousand may be out of bounds."""
        ratios = sorted((target + RATIO_SMOOTHING) / (source + RATIO_SMOOTHING) for source, target in lengths)
        outside = len(ratios) // 2000
        copied, kept = [], []
        for source, target in texts:
            copied.append(is_copy(list_words_casefolded(source), list_words_casefolded(target)))
            if PLACEHOLDER_MARKS.search(source) or PLACEHOLDER_MARKS.search(target):
                found = count_placeholders(source), count_placeholders(target)
                kept += [found[0] == found[1]] if any(found) else []
        rewritten = kept.count(False) / max(len(kept), MIN_PLACEHOLDER_PAIRS)
        return cls(ratios[outside], ratios[-1 - outside], sum(copied) / max(len(copied), 1), rewritten)

    def text(self) -> str:
        return json.dumps([round(value, 4) for value in self])


def find_flags(
    source: str, output: str, lengths: tuple[int, int], statistics: PairStatistics | None
) -> tuple[str, ...]:
    """Return what looks wrong with an output. `lengths` are the tokens of source and output.

    Without statistics of the training pairs, only repetitions are flagged.
    """
    output_words = list_words_casefolded(output)
    repeated = count_loops(output_words)
    copies_are_rare = statistics is not None and statistics.copies < RARE_COPIES
    source_words = list_words_casefolded(source) if repeated or copies_are_rare else []
    flags = [FLAG_REPEATS] if repeated and repeated > count_loops(source_words) else []
    if statistics:
        ratio = (lengths[1] + RATIO_SMOOTHING) / (lengths[0] + RATIO_SMOOTHING)
        if ratio > statistics.most * RATIO_MARGIN:
            flags.append(FLAG_LONG)
        elif ratio < statistics.least / RATIO_MARGIN:
            flags.append(FLAG_SHORT)
        if copies_are_rare and is_copy(source_words, output_words):
            flags.append(FLAG_COPY)
    return tuple(flags)


def count_placeholders(text: str) -> Counter[str]:
    """Count what a translation should keep as it is: placeholders, tags, URLs and e-mail addresses."""
    found: Counter[str] = Counter()
    for match in PLACEHOLDER.finditer(text):
        span = match[0]
        if span[0] not in "{<%$":  # a full stop or a bracket after a link is not part of it
            span = span.rstrip(".,;:!?'")
            if span.endswith(")") and span.count(")") > span.count("("):
                span = span[:-1].rstrip(".,;:!?'")
        found[span] += 1
    del found[SPECIALS[UNK]]
    return found


def check_placeholders(source: str, output: str, statistics: PairStatistics | None) -> list[str]:
    """Return warnings that name the placeholders, tags and links that the output lacks, and those it has too many of.

    There are none where training pairs often differ in them, such as links of a text and its summary.
    """
    if not (PLACEHOLDER_MARKS.search(source) or PLACEHOLDER_MARKS.search(output)):
        return []
    if statistics and statistics.rewritten >= OFTEN_REWRITTEN:
        return []
    given, kept = count_placeholders(source), count_placeholders(output)
    warnings = []
    for flag, names in ((FLAG_LOST, [*(given - kept).elements()]), (FLAG_ADDED, [*(kept - given).elements()])):
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        warnings += [f"{flag}: {', '.join(names[:MAX_NAMED])}{more}"] if names else []
    return warnings


def list_words_casefolded(text: str) -> list[str]:
    return FLAG_WORD.findall(text.casefold())


def count_loops(words: Sequence[str]) -> int:
    """Count phrases repeated too often in a row: three times, or twice if they have four words or more."""
    repeated = len(words) - len(set(words))  # words that came before: loops are made of these
    loops = 0
    for period in range(1, min(MAX_LOOP_WORDS, len(words) // 2, repeated) + 1):
        enough = period * (1 if period >= 4 else 2)
        if enough > repeated or sum(as_before := list(map(eq, words[period:], words))) < enough:
            continue
        same = 0
        for repeats in as_before:
            same = same + 1 if repeats else 0
            loops += same == enough
    return loops


def is_copy(source: Sequence[str], output: Sequence[str]) -> bool:
    """Return whether an output consists of the words of its source and leaves out few of them."""
    if len(source) < MIN_COPY_WORDS or len(output) < MIN_COPY_WORDS:
        return False
    shared = (Counter(source) & Counter(output)).total()
    return shared >= COPY_SHARE * max(len(source), len(output))


def warning_kinds(warnings: Iterable[str]) -> list[str]:
    """Return the warnings of a line without their numbers, each kind once: lines are counted by these."""
    return list(dict.fromkeys(re.split(r" at \d|:| \(", warning)[0] for warning in warnings))


AlignmentRows = list[list[float]]  # by target token: its attention to each source token
MIN_COVERAGE = 1e-4  # of a source token without attention, so that its logarithm is finite
MAX_ALIGNMENT_CELLS = 4_000_000  # a line joined from very many segments has no alignment


def drop_duplicates(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the first hypothesis of each text: different subwords can spell the same text."""
    first: dict[str, Hypothesis] = {}
    for one in hypotheses:
        first.setdefault(one.text, one)
    return list(first.values())


def join_hypotheses(parts: Sequence[Hypothesis]) -> Hypothesis:
    """Return one hypothesis from those of a line's segments; the alignment is block-diagonal."""
    tokens = [token for part in parts for token in part.tokens]
    source_tokens = [token for part in parts for token in part.source_tokens]
    with_eos = sum(len(part.tokens) + 1 for part in parts)
    warnings = [f"longer than any sentence of training: translated in {len(parts)} parts"]
    warnings += dict.fromkeys(warning for part in parts for warning in part.warnings)
    alignment: AlignmentRows = []
    if any(part.alignment for part in parts):
        if len(tokens) * len(source_tokens) <= MAX_ALIGNMENT_CELLS:
            before = 0
            for part in parts:
                after = len(source_tokens) - before - len(part.source_tokens)
                alignment += [[0.0] * before + row + [0.0] * after for row in part.alignment]
                before += len(part.source_tokens)
        else:
            warnings.append("too long for an alignment")
    return Hypothesis(
        text=" ".join(part.text for part in parts),
        score=sum(part.score * (len(part.tokens) + 1) for part in parts) / with_eos,
        tokens=tokens,
        alignment=alignment,
        source_tokens=source_tokens,
        logp=sum(part.logp for part in parts),
        warnings=tuple(warnings),
        flags=tuple(dict.fromkeys(flag for part in parts for flag in part.flags)),
    )


def rerank_by_coverage(
    results: Sequence[tuple[SearchResult, AlignmentRows]], beta: float
) -> list[tuple[SearchResult, AlignmentRows]]:
    """Return results sorted by score plus `beta` times the coverage penalty. Finished ones still come first."""
    scored = [(replace(one, score=one.score + beta * coverage_penalty(rows)), rows) for one, rows in results]
    return sorted(scored, key=lambda pair: (not pair[0].finished, -pair[0].score))


def coverage_penalty(alignment: AlignmentRows) -> float:
    """Return the sum of log(min(attention, 1)) over the source tokens (Wu et al., 2016): 0 if all are covered."""
    return sum(math.log(min(max(sum(column), MIN_COVERAGE), 1.0)) for column in zip(*alignment))


UnknownWordMethod = Callable[[str, Mapping[str, str]], str]  # from a source word and a dictionary to the output


def keep_unknown(word: str, dictionary: Mapping[str, str]) -> str:  # noqa: ARG001 - the registry's signature
    return SPECIALS[UNK]


def copy_source_word(word: str, dictionary: Mapping[str, str]) -> str:  # noqa: ARG001
    """Return the word itself: names and numbers are the same in many languages."""
    return word


def look_up_word(word: str, dictionary: Mapping[str, str]) -> str:
    """Return the dictionary's translation of the word, or of the word in lower case; copy a word it lacks."""
    return dictionary.get(word) or dictionary.get(word.lower()) or word


UNKNOWN_WORD_METHODS: dict[str, UnknownWordMethod | None] = {  # search.unknown
    "drop": None,
    "keep": keep_unknown,
    "copy": copy_source_word,
    "dictionary": look_up_word,
}


def fill_unknowns(
    ids: Sequence[int],
    alignment: AlignmentRows,
    target: Tokenizer,
    words: Sequence[str],
    method: str,
    dictionary: Mapping[str, str],
) -> str:
    """Return the text of tokens of a word vocabulary, with unknown words replaced by one of UNKNOWN_WORD_METHODS.

    `words` has the word of each source token; an unknown word stands for the one with the most attention.
    """
    replace_word = UNKNOWN_WORD_METHODS[method]
    texts = []
    for token, text, row in zip(ids, target.pieces(ids), alignment, strict=True):
        if token == UNK and row and replace_word:
            text = text.replace(SPECIALS[UNK], replace_word(words[row.index(max(row))], dictionary))
        texts.append(text)
    return "".join(texts).replace(SPACE_MARK, " ").removeprefix(" ")


SOURCE_WORD = re.compile(r"\w+(?:['’\-]\w+)*|\S")


def list_source_words(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> list[str]:
    """Return, for each token of a source, the word that it is, or that it begins in."""
    if isinstance(tokenizer, WordTokenizer):
        return [found[0] for found in tokenizer.token.finditer(text)]
    found = [(count_letter_bytes(text[: match.start()]), match[0]) for match in SOURCE_WORD.finditer(text)]
    words, index = [], 0
    for start in tokenizer.starts(text, ids) or [0] * len(ids):
        while index + 1 < len(found) and found[index + 1][0] <= start:
            index += 1
        words.append(found[index][1])
    return words


SENTENCE_END = re.compile(r"[.!?…]+[\"'“”’«»‹›)\]]*(?=\s)|[。！？]+[”’」』)\]]*")
NON_SPACES = re.compile(r"\S+")
NON_SPACE = re.compile(r"\S")


def split_sentences(line: str) -> list[str]:
    """Split a line after punctuation that ends sentences. Nothing is lost but the space between them.

    A full stop after "Dr.", "z. B.", "e.g." or "3." ends none, nor does any mark before a small letter. In doubt the
    line is not split: two sentences in one segment do less harm than half a sentence.
    """
    sentences, start = [], 0
    cased = line != line.lower()
    for mark in SENTENCE_END.finditer(line):
        after = NON_SPACES.search(line, mark.end())
        if cased and after and after[0][0].islower():
            continue
        before = line[max(0, mark.start() - 20) : mark.start()].split(" ")[-1].lstrip("\"'“„«(")
        short = before.isdigit() or len(before) == 1 or "." in before or (len(before) <= 3 and before.istitle())
        if mark[0] != "." or not short:
            sentences.append(line[start : mark.end()])
            start = mark.end()
    return [sentence.strip() for sentence in (*sentences, line[start:]) if sentence.strip()]
