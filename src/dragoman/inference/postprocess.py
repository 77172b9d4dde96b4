"""Processing of texts before and after the search.

In the order of this file: flags and warnings about hypotheses, n-best lists and joining of segments, reranking by
coverage, replacement of unknown words, and splitting of lines into sentences.

A flag marks a hypothesis that is probably wrong, for users who cannot read all of them. Good translations have none.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import eq
from typing import NamedTuple, Self

from dragoman.data.subwords import SPACE_MARK
from dragoman.data.tokenizers import Tokenizer, WordTokenizer, count_letter_bytes
from dragoman.decoding.protocol import SearchResult
from dragoman.types import SPECIALS, UNK, Hypothesis

FLAG_REPEATS = "with repetitions"
FLAG_LONG = "far too long"
FLAG_SHORT = "far too short"
FLAG_COPY = "copying the source"
FLAG_UNKNOWN = "with unknown words left out"
FLAG_LOST = "with placeholders, tags or links missing from the translation"
FLAG_ADDED = "with placeholders, tags or links not in the source"
# A CJK character, or a word of another script, which may contain apostrophes and hyphens.
FLAG_WORD = re.compile(r"[\u2e80-\ua4cf\uac00-\ud7af]|[^\W\u2e80-\ua4cf\uac00-\ud7af]+(?:['’\-]\w+)*")
MAX_LOOP_WORDS = 40  # maximum length of a repeated phrase
MIN_COPY_WORDS = 5  # a shorter line may be a name, which is rightly copied
MIN_COPIED_FRACTION = 0.8  # minimum fraction of words that a copy and its source have in common
RARE_COPIES = 0.01  # copies are flagged only if a smaller fraction of the training pairs are copies
RATIO_SMOOTHING = 4  # tokens added to both lengths before dividing, since ratios of short lines vary more
RATIO_MARGIN = 1.25  # a length ratio is flagged if it exceeds the bounds of the training pairs by this factor
OFTEN_REWRITTEN = 0.3  # placeholders are not checked if at least this fraction of the training pairs changes them
MIN_PLACEHOLDER_PAIRS = 10  # minimum denominator of this fraction: very few pairs with placeholders prove little
MAX_LISTED = 10  # maximum number of placeholders that one warning lists
PLACEHOLDER_MARKS = re.compile(
    r"[{<%@]|://|www\.|[:$][a-z_]"
)  # a text without any of these has no placeholder, tag or link
# Matching takes linear time on any text: every alternative starts with a distinct character or at the start of a word,
# and its repetitions are possessive (they never backtrack).
PLACEHOLDER = re.compile(
    r"""
      (?<!\w)(?:(?:https?|ftp)://|www\.) (?:[\-.~:/?#\[\]@!$&'()*+,;=%] | [^\W\u2e80-\ua4cf\uac00-\ud7af])++
    | (?<![A-Za-z0-9.+\-_]) [A-Za-z0-9.+\-_]++ @ [A-Za-z0-9\-]++ (?:\.[A-Za-z0-9\-]++)++  # an e-mail address
    | </?[A-Za-z][\w:.\-]*+ (?:\s[^<>]*+)? /?>                                            # <b>, </b>, <a href="x">
    | \{\{[^{}]*+\}\} | \{%[^{}%]*+%\} | [$%]\{[^{}]*+\}                                  # {{x}}, {% x %}, ${x}
    | \{[ ]?[\w.\-\[\]]*+ (?:[:,!][\w.:,!\-\[\]<>^+\#%' ]*+ | [ ])?\}  # {name}, {0:>3}, {0, number}
    | (?<![\w%]) %[A-Za-z_]\w++% | (?<![\w:/.]) :[a-z_]\w++ (?!:) | (?<![\w$]) \$[a-z_]\w++  # %name%, :name, $name
    | (?<![\d%]) % (?:\([\w.]++\)|<\w++>|\d++\$)? [\-+\#0]*+ \d*+ (?:\.\d++)? (?:hh?|ll?|z)? [sdifgeuxXcrn@] (?!\w)
    | (?<![\d%]) %L?\d{1,2}+ (?!\w)  # as %s before; %1, %L2
    """,
    re.VERBOSE,
)


class PairStatistics(NamedTuple):
    """Statistics of the training pairs; hypotheses that deviate from them are flagged.

    They are stored in the header of the weights, as a JSON list of the fields.
    """

    min_ratio: float  # minimum and maximum of target tokens per source token
    max_ratio: float
    copies: float  # fraction of pairs whose target copies the source
    rewritten: float = 0.0  # fraction of pairs with placeholders whose target changes them; 0 in runs of old releases

    @classmethod
    def measure(cls, lengths: Iterable[tuple[int, int]], texts: Iterable[tuple[str, str]]) -> Self:
        """Compute the statistics from the token lengths of pairs and the texts of a sample of pairs.

        Outliers are ignored: one pair in a thousand is below the minimum or above the maximum.
        """
        ratios = sorted((target + RATIO_SMOOTHING) / (source + RATIO_SMOOTHING) for source, target in lengths)
        outside = len(ratios) // 2000  # number of pairs below the minimum, and of pairs above the maximum
        copied, unchanged = [], []
        for source, target in texts:
            copied.append(is_copy(extract_casefolded_words(source), extract_casefolded_words(target)))
            if PLACEHOLDER_MARKS.search(source) or PLACEHOLDER_MARKS.search(target):
                counts = count_placeholders(source), count_placeholders(target)
                unchanged += [counts[0] == counts[1]] if any(counts) else []
        rewritten = unchanged.count(False) / max(len(unchanged), MIN_PLACEHOLDER_PAIRS)
        return cls(ratios[outside], ratios[-1 - outside], sum(copied) / max(len(copied), 1), rewritten)

    def to_json(self) -> str:
        """Return the statistics as they are stored in the header of the weights."""
        return json.dumps([round(value, 4) for value in self])


def find_flags(
    source: str, output: str, lengths: tuple[int, int], statistics: PairStatistics | None
) -> tuple[str, ...]:
    """Return the flags of an output. `lengths` are the numbers of tokens of source and output.

    Without statistics of the training pairs, only repetitions are flagged.
    """
    output_words = extract_casefolded_words(output)
    repeated = count_loops(output_words)
    copies_are_rare = statistics is not None and statistics.copies < RARE_COPIES
    source_words = extract_casefolded_words(source) if repeated or copies_are_rare else []
    flags = [FLAG_REPEATS] if repeated and repeated > count_loops(source_words) else []
    if statistics:
        ratio = (lengths[1] + RATIO_SMOOTHING) / (lengths[0] + RATIO_SMOOTHING)
        if ratio > statistics.max_ratio * RATIO_MARGIN:
            flags.append(FLAG_LONG)
        elif ratio < statistics.min_ratio / RATIO_MARGIN:
            flags.append(FLAG_SHORT)
        if copies_are_rare and is_copy(source_words, output_words):
            flags.append(FLAG_COPY)
    return tuple(flags)


def find_placeholders(text: str) -> list[tuple[int, int]]:
    """Return where the parts of a text are that a translation should copy: placeholders, tags, URLs and e-mails."""
    spans = []
    for match in PLACEHOLDER.finditer(text):
        span = match[0]
        if span[0] not in "{<%$":  # a link or an address, without the punctuation or bracket that follows it
            span = span.rstrip(".,;:!?'")
            if span.endswith(")") and span.count(")") > span.count("("):
                span = span[:-1].rstrip(".,;:!?'")
        if span != SPECIALS[UNK]:  # <unk>, which looks like an HTML tag
            spans.append((match.start(), match.start() + len(span)))
    return spans


def count_placeholders(text: str) -> Counter[str]:
    """Count the placeholders, tags, URLs and e-mail addresses of a text, which a translation should copy."""
    return Counter(text[start:end] for start, end in find_placeholders(text))


def check_placeholders(source: str, output: str, statistics: PairStatistics | None) -> list[str]:
    """Return a warning that lists missing placeholders, tags and links, and one that lists added ones.

    There are no warnings if they often differ within the training pairs, as between a text and its summary.
    """
    if not (PLACEHOLDER_MARKS.search(source) or PLACEHOLDER_MARKS.search(output)):
        return []
    if statistics and statistics.rewritten >= OFTEN_REWRITTEN:
        return []
    source_counts, output_counts = count_placeholders(source), count_placeholders(output)
    warnings = []
    lost, added = source_counts - output_counts, output_counts - source_counts
    for flag, names in ((FLAG_LOST, [*lost.elements()]), (FLAG_ADDED, [*added.elements()])):
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        warnings += [f"{flag}: {', '.join(names[:MAX_LISTED])}{more}"] if names else []
    return warnings


def extract_casefolded_words(text: str) -> list[str]:
    """Return the words of a text without punctuation, so that words can be compared regardless of case."""
    return FLAG_WORD.findall(text.casefold())


def count_loops(words: Sequence[str]) -> int:
    """Count phrases that occur too often in a row: three times, or twice if they have four words or more.

    A phrase of n words is repeated where words equal those n positions earlier, for long enough without interruption.
    """
    repeated = len(words) - len(set(words))  # words that occurred earlier; a loop consists of such words
    loops = 0
    for length in range(1, min(MAX_LOOP_WORDS, len(words) // 2, repeated) + 1):
        required = length * (1 if length >= 4 else 2)  # words that repeat the first occurrence of the phrase
        matches = list(map(eq, words[length:], words))
        if required > repeated or sum(matches) < required:
            continue
        consecutive = 0
        for match in matches:
            consecutive = consecutive + 1 if match else 0
            loops += consecutive == required
    return loops


def is_copy(source: Sequence[str], output: Sequence[str]) -> bool:
    """Return whether an output consists mostly of the words of its source."""
    if len(source) < MIN_COPY_WORDS or len(output) < MIN_COPY_WORDS:
        return False
    shared = (Counter(source) & Counter(output)).total()
    return shared >= MIN_COPIED_FRACTION * max(len(source), len(output))


def get_warning_kind(warning: str) -> str:
    """Return a warning up to its first number or detail, for counting: "cut" for "cut at 256 tokens"."""
    return re.split(r" at \d|:| \(", warning)[0]


AlignmentRows = list[list[float]]  # for each target token, its attention weights over the source tokens
MIN_COVERAGE = 1e-4  # minimum coverage of a source token, so that its logarithm is finite
MAX_ALIGNMENT_CELLS = 4_000_000  # a line of very many segments, with a larger alignment matrix, has no alignment


def drop_duplicates(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the first hypothesis of each distinct text: different subwords can spell the same text."""
    by_text: dict[str, Hypothesis] = {}
    for hypothesis in hypotheses:
        by_text.setdefault(hypothesis.text, hypothesis)
    return list(by_text.values())


def join_hypotheses(parts: Sequence[Hypothesis]) -> Hypothesis:
    """Join the hypotheses of a line's segments into one; the alignment becomes block-diagonal.

    Without segments (an empty line), return an empty hypothesis.
    """
    if len(parts) <= 1:
        return parts[0] if parts else Hypothesis("")
    tokens = [token for part in parts for token in part.tokens]
    source_tokens = [token for part in parts for token in part.source_tokens]
    token_count = sum(len(part.tokens) + 1 for part in parts)  # EOS included
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
        score=sum(part.score * (len(part.tokens) + 1) for part in parts) / token_count,
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
    """Add `beta` times the coverage penalty to the scores, and sort: finished results first, then by score."""
    rescored = [(replace(result, score=result.score + beta * coverage_penalty(rows)), rows) for result, rows in results]
    return sorted(rescored, key=lambda pair: (not pair[0].finished, -pair[0].score))


def coverage_penalty(alignment: AlignmentRows) -> float:
    """Return the sum of log(min(attention, 1)) over the source tokens (Wu et al., 2016): 0 if all are covered."""
    return sum(math.log(min(max(sum(column), MIN_COVERAGE), 1.0)) for column in zip(*alignment))


# Value of search.unknown -> function of the aligned source word and a dictionary that returns the replacement of <unk>.
# Copying suits names and numbers, which are the same in many languages, and words that are not in the dictionary.
UNKNOWN_WORD_METHODS: dict[str, Callable[[str, Mapping[str, str]], str]] = {
    "drop": lambda _, __: "",
    "keep": lambda _, __: SPECIALS[UNK],
    "copy": lambda word, _: word,
    "dictionary": lambda word, dictionary: dictionary.get(word) or dictionary.get(word.lower()) or word,
}


def fill_unknowns(
    ids: Sequence[int],
    alignment: AlignmentRows,
    target: Tokenizer,
    replacements: Sequence[str],
    copied: Sequence[int] = (),
) -> str:
    """Return the text of tokens of a word vocabulary, with <unk> replaced.

    `replacements` has an entry for each source token; the entry of the token with the most attention is used. `copied`
    has the source tokens of a copying model: an <unk> is a copy of one of their <unk>, if there is any.
    """
    texts = target.ids_to_tokens(ids)
    for index, (token, row) in enumerate(zip(ids, alignment, strict=True)):
        if token == UNK and row:
            if UNK in copied:
                row = [weight if source == UNK else -1.0 for weight, source in zip(row, copied, strict=True)]
            texts[index] = texts[index].replace(SPECIALS[UNK], replacements[row.index(max(row))])
    return "".join(texts).replace(SPACE_MARK, " ").removeprefix(" ")


SOURCE_WORD = re.compile(r"\w+(?:['’\-]\w+)*|\S")  # a word, or a single punctuation mark


def list_source_words(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> list[str]:
    """Return, for each source token, the word that contains its first character."""
    if isinstance(tokenizer, WordTokenizer):
        return [match[0] for match in tokenizer.token_pattern.finditer(text)]
    matches = list(SOURCE_WORD.finditer(text))
    word_starts = [count_letter_bytes(text[: match.start()]) for match in matches]  # without spaces, as `locate_tokens`
    words, index = [], 0
    for start in tokenizer.locate_tokens(text, ids) or [0] * len(ids):
        while index + 1 < len(matches) and word_starts[index + 1] <= start:
            index += 1
        words.append(matches[index][0])
    return words


SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'“”’«»‹›)\]]*+(?=\s)|[。！？]+[”’」』)\]]*")
NON_SPACES = re.compile(r"\S+")
NON_SPACE = re.compile(r"\S")


def split_sentences(line: str) -> list[str]:
    """Split a line after punctuation that ends a sentence, and remove the space between sentences.

    Full stops in "Dr.", "z. B.", "e.g." or "3." do not end a sentence, nor does punctuation before a lower-case letter.
    If in doubt, do not split: two sentences in one segment do less harm than half a sentence.
    """
    sentences, start = [], 0
    has_capitals = line != line.lower()
    for mark in SENTENCE_END.finditer(line):
        after = NON_SPACE.search(line, mark.end())
        if has_capitals and after and after[0].islower():
            continue
        # The word before the mark, or its end if it is long: only short words can be abbreviations
        word = re.split(r"[ \t\r\n]", line[max(0, mark.start() - 20) : mark.start()])[-1].lstrip("\"'“„«(")
        is_abbreviation = len(word) == 1 or (len(word) <= 3 and word.istitle()) or "." in word
        if mark[0] != "." or not (is_abbreviation or word.isdigit()):
            sentences.append(line[start : mark.end()])
            start = mark.end()
    return [sentence.strip() for sentence in (*sentences, line[start:]) if sentence.strip()]


def locate_sentences(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each sentence between two offsets of a text."""
    for sentence in split_sentences(text[start:end]):
        start = text.index(sentence, start, end)
        yield start, start + len(sentence)
        start += len(sentence)


def has_words(text: str) -> bool:
    """Return whether a text has letters besides placeholders and addresses, so that there is something to translate."""
    return any(map(str.isalpha, PLACEHOLDER.sub("", text)))
