"""Metrics: lines of text against one or several references, with a signature that names the way of counting.

`hypotheses` is a list of lines of plain text; `references` is a list of such lists, each as long as `hypotheses`.
A metric counts something in each line (line_NK), and its score is a function of the sums of these counts. That
function works on many sums at once, which makes a thousand bootstrap resamples cheap (significance.py).

To add a metric: one function from lines to a CountedScore, its entry in METRICS, and its name in docs/tasks.md.

Shapes   N lines, in n-gram counts the orders   K counts of a metric   T sums of counts, one for each trial
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.config.settings import metric_name, pick
from dragoman.errors import UserError
from dragoman.types import Score

Array = NDArray[np.float64]
TextLines = Sequence[str]

KANA, HAN, HANGUL = "\u3040-\u30ff", "\u3400-\u4dbf\u4e00-\u9fff", "\uac00-\ud7af"
EASTERN_SHARE = 0.3  # of all letters and digits: from here on a text is Japanese, Chinese or Korean
TOKENIZED_LINES = 100  # lines that end in a separate full stop: from here on a text is taken for one in tokens
SPACELESS_LANGUAGES = ("ja", "zh")
WORD_OR_SIGN = re.compile(rf"[{KANA}{HAN}]|[^\W{KANA}{HAN}]+")  # one sign of these scripts, or a word of others
BY_SCRIPT = {"": "13a", "zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}  # sacreBLEU's tokenizers of these languages
BLEU_TOKENIZERS = {  # those of sacreBLEU that need no network, and the extra that installs what they need
    **dict.fromkeys(("13a", "intl", "zh", "char", "none"), ""),
    **dict.fromkeys(("ja-mecab", "ko-mecab"), "mecab"),
}
MOSES_LANGUAGES = ("cs", "de", "en", "fr")  # of Multi30k, whose papers count BLEU on tokens of Moses
LIBRARIES = {"moses": "sacremoses", "rouge": "rouge_score"}  # by the extra that installs them
SUBWORD_SHARE = 0.05  # of the tokens; it is far higher in subword text, and about 0 in plain text
UNTRAINED_SCORE = 1.0  # of 100: with a score below it, or an error rate above 99, the loss tells models apart
BLEU_ORDERS = 4  # the longest n-grams of BLEU
TINY = 1e-300  # a number whose logarithm is finite
BETA = 2.0  # of chrF: the weight of recall against precision


def extract_words(line: str) -> list[str]:
    """Return the words of a line, without punctuation."""
    return WORD_OR_SIGN.findall(line)


def detect_eastern_script(lines: Iterable[str]) -> str:
    """Return ja, zh or ko for a text in such a script, else ""."""
    text = "".join(lines)
    kana, han, hangul = (len(re.findall(f"[{script}]", text)) for script in (KANA, HAN, HANGUL))
    if kana + han + hangul <= EASTERN_SHARE * len(re.findall(r"\w", text)):
        return ""
    if hangul > kana + han:
        return "ko"
    return "ja" if kana > 0.1 * han else "zh"


def make_sacrebleu(tokenize: str, references: Iterable[Iterable[str]]) -> Any:
    """Return sacreBLEU's BLEU with a tokenizer of BLEU_TOKENIZERS, or with "" that of the references' script.

    Japanese and Korean words need a dictionary; without it "" means single characters.
    """
    from sacrebleu.metrics.bleu import BLEU

    name = tokenize or BY_SCRIPT[detect_eastern_script(line for lines in references for line in lines)]
    extra = pick(BLEU_TOKENIZERS, name, "tokenizer of BLEU")
    try:
        return BLEU(tokenize=name, force=True)  # no warning of its own: see `looks_tokenized`
    except (RuntimeError, ImportError):  # the dictionary is missing
        if tokenize:
            raise UserError(f"{name} needs a dictionary that is not there; pip install 'dragoman[{extra}]'") from None
        return BLEU(tokenize="char", force=True)


def looks_tokenized(lines: Iterable[str]) -> bool:
    """Return whether a text looks tokenized: in many lines the full stop stands apart, as sacreBLEU decides."""
    return sum(line.endswith(" .") for line in lines) >= TOKENIZED_LINES


def tokenize_moses(lines: Sequence[str], language: str) -> list[str]:
    """Tokenize lines as the Moses scripts do: lower case, normalized punctuation, tokens; dashes stay in words.

    From Multi30k's raw test sets this makes, to the byte, the text in tokens that comes with them, in English and in
    German, and so the references of Wu et al. 2021 (docs/recipes.md).
    """
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    plain, cut = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [cut.tokenize(plain.normalize(line.lower()), return_str=True) for line in lines]


def compute_f1(correct: int, predicted: int, expected: int) -> dict[str, float]:
    """Return precision, recall and their harmonic mean, in per cent; 0 where nothing was predicted or expected."""
    return {
        "precision": 100 * correct / max(predicted, 1),
        "recall": 100 * correct / max(expected, 1),
        "f1": 200 * correct / max(predicted + expected, 1),
    }


def count_confusion(found: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    """Return the confusion matrix, and for each label precision, recall and F1, in per cent.

    `counts[i][j]` texts of labels[i] were predicted as labels[j]. The mean of F1 weighs every
    label alike, however rare.
    """
    counts, given, there = Counter(zip(wanted, found, strict=True)), Counter(found), Counter(wanted)
    labels = sorted({*given, *there})
    each = {
        label: {**compute_f1(counts[label, label], given[label], there[label]), "texts": there[label]}
        for label in labels
    }
    return {
        "labels": labels,
        "counts": [[counts[right, label] for label in labels] for right in labels],
        "each": each,
        "f1": sum(one["f1"] for one in each.values()) / max(len(each), 1),
    }


def divide_or(part: Array, whole: Array, otherwise: Array | float = 0.0) -> Array:
    """Return part / whole, and `otherwise` where whole is 0."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), otherwise)


def compute_percentages(total_TK: Array) -> Array:
    """Return 100 * count 0 / count 1; 100 where count 1 is 0 and count 0 is not."""
    part_T, whole_T = total_TK[..., 0], total_TK[..., 1]
    return 100 * divide_or(part_T, whole_T, np.where(part_T > 0, 1.0, 0.0))


def compute_bleu(total_TK: Array) -> Array:
    """Compute BLEU from counts: length, reference length, then matching n-grams and all n-grams of each order.

    An order without a hit counts as half a hit, the next such one as a quarter, and so on.
    """
    length_T, wanted_T = total_TK[..., 0], total_TK[..., 1]
    right_TN, all_TN = total_TK[..., 2 : 2 + BLEU_ORDERS], total_TK[..., 2 + BLEU_ORDERS :]
    missed_TN = np.cumsum(right_TN == 0, -1)
    hits_TN = np.where(right_TN == 0, 0.5**missed_TN, right_TN)
    short_T = np.where(length_T < wanted_T, 1 - divide_or(wanted_T, length_T), 0.0)
    log_T = np.log(np.maximum(divide_or(hits_TN, all_TN), TINY)).mean(-1)
    some_T = (right_TN > 0).any(-1) & (all_TN > 0).all(-1)
    return np.where(some_T, 100 * np.exp(log_T + short_T), 0.0)


def split_bleu(total_K: Array) -> dict[str, Any]:
    """Return the factors of BLEU from the same counts, by sacreBLEU: n-gram precisions in per cent, smoothed where an
    order has no match, and the brevity penalty, with the lengths in tokens behind it."""
    from sacrebleu.metrics.bleu import BLEU

    length, wanted, *counts = total_K.astype(int).tolist()
    score = BLEU.compute_bleu(counts[:BLEU_ORDERS], counts[BLEU_ORDERS:], length, wanted, smooth_method="exp")
    return {
        "precisions": score.precisions,
        "brevity_penalty": score.bp,
        "hypothesis_length": length,
        "reference_length": wanted,
    }


def compute_chrf(total_TK: Array) -> Array:
    """Compute chrF from counts of each order: n-grams, n-grams of the reference, n-grams in both.

    Orders that one side lacks are left out.
    """
    given_TN, wanted_TN, both_TN = (total_TK[..., n::3] for n in range(3))
    orders_T = np.maximum(((given_TN > 0) & (wanted_TN > 0)).sum(-1), 1)
    right_T, covered_T = (divide_or(both_TN, side_TN).sum(-1) / orders_T for side_TN in (given_TN, wanted_TN))
    return 100 * divide_or((1 + BETA**2) * right_T * covered_T, BETA**2 * right_T + covered_T)


class CountedScore(NamedTuple):
    """A score, how it was counted, and the counts of every line, whose sums the score is a function of."""

    value: float
    signature: str
    line_NK: Array


@dataclass(frozen=True, slots=True)
class Metric:
    """An entry of METRICS, with its properties.

    `values` turns sums of counts into scores, for many sums at once: of all lines, of some of them, of resamples.
    """

    name: str
    shown: str  # its name in tables
    count: Callable[[TextLines, Sequence[TextLines]], CountedScore]
    values: Callable[[Array], Array] = compute_percentages
    higher: bool = True  # higher is better
    labels: bool = False  # compares whole lines, so it can score labels too
    extra: str = ""  # of this package: installs the library that the metric needs
    parts: Callable[[Array], dict[str, Any]] | None = None  # components of the score, from the sum of all lines
    best_reference: bool = True  # a further reference never makes a score worse

    @property
    def missing_library(self) -> str:
        """Return what to install where its library is missing, else ""."""
        library = LIBRARIES.get(self.extra)
        if not library or find_spec(library):
            return ""
        return f"{self.name} needs {library}, which is not there; pip install 'dragoman[{self.extra}]' brings it"

    def __call__(self, hypotheses: TextLines, references: Sequence[TextLines]) -> Score:
        """Return the score of lines from any system; refuse subword text."""
        refuse_subwords(hypotheses)
        return self.compute(hypotheses, references)

    def compute(self, hypotheses: TextLines, references: Sequence[TextLines]) -> Score:
        """Return the score of a model's own output, which may look like subword text early in training."""
        counted = self.counted(hypotheses, references)
        return Score(self.name, counted.value, counted.signature)

    def counted(self, hypotheses: TextLines, references: Sequence[TextLines]) -> CountedScore:
        """Return the score with the counts of every line; refuse lines and references that do not match up."""
        if not hypotheses:
            raise UserError("there are no hypotheses to score")
        if not references:
            raise UserError("there is no reference to score against")
        for number, reference in enumerate(references, 1):
            if isinstance(reference, str):
                raise UserError(
                    "references must be a list of lists of lines; put a single reference into a list of its own"
                )
            if len(reference) != len(hypotheses):
                raise UserError(
                    f"reference {number} of {len(references)} has {len(reference)} line{'s' * (len(reference) != 1)}, "
                    f"but there are {len(hypotheses)} hypotheses; line by line they must belong together"
                )
        if self.missing_library:
            raise UserError(self.missing_library)
        return self.count(hypotheses, references)

    def goodness(self, value: float) -> float:
        """Return a value of which higher is better, whatever the metric."""
        return value if self.higher else -value

    @property
    def floor(self) -> float:
        """Return the goodness of an untrained model: below it, scores do not tell models apart."""
        return self.goodness(UNTRAINED_SCORE if self.higher else 100 - UNTRAINED_SCORE)


def count_bleu(hypotheses: TextLines, references: Sequence[TextLines], *, tokenize: str = "") -> CountedScore:
    """Count word n-grams up to 4 that occur in a reference, with a penalty for short outputs. 100 is perfect.

    The tokenizer depends on the script of the references, unless `tokenize` names one; the signature has its name.
    """
    return count_by_sacrebleu(make_sacrebleu(tokenize, references), hypotheses, references)


def count_bleu_moses(language: str, hypotheses: TextLines, references: Sequence[TextLines]) -> CountedScore:
    """Count BLEU on lower-cased text in tokens of Moses, as papers do with fairseq's BLEU4 and multi-bleu.

    Those do not smooth. sacreBLEU does, but only where an order has no match, which no usable system has.
    """
    tokenize = partial(tokenize_moses, language=language)
    counted = count_bleu(tokenize(hypotheses), [tokenize(lines) for lines in references], tokenize="none")
    signature = counted.signature.replace("case:mixed", "case:lc").replace("tok:none", f"tok:norm+moses-{language}")
    return counted._replace(signature=f"{signature}|sacremoses:{version('sacremoses')}")


def count_by_default(name: str, hypotheses: TextLines, references: Sequence[TextLines]) -> CountedScore:
    """Count by a metric of sacreBLEU in its default settings.

    CHRF counts character n-grams up to 6; recall counts double (chrF2), and 100 is perfect. TER counts edits, phrase
    shifts among them, per hundred words of the reference; 0 is perfect.
    """
    from sacrebleu.metrics import METRICS as SACREBLEU_METRICS

    return count_by_sacrebleu(SACREBLEU_METRICS[name](), hypotheses, references)


def count_by_sacrebleu(metric: Any, hypotheses: TextLines, references: Sequence[TextLines]) -> CountedScore:
    """Do what sacreBLEU's `corpus_score` does, in two steps that expose the counts of every line."""
    counts = metric._extract_corpus_statistics(list(hypotheses), [list(reference) for reference in references])
    value = metric._aggregate_and_compute(counts).score
    return CountedScore(float(value), str(metric.get_signature()), np.array(counts, dtype=np.float64))


def make_percentage_score(counts: Iterable[tuple[float, float]], signature: str) -> CountedScore:
    """Return the score of (part, whole) pairs, one for each line: the sum of the parts in per cent of the wholes."""
    line_N2 = np.array(list(counts), dtype=np.float64)
    return CountedScore(float(compute_percentages(line_N2.sum(0))), signature, line_N2)


def count_rouge(kind: str, hypotheses: TextLines, references: Sequence[TextLines]) -> CountedScore:
    """Compute F1 of stemmed words, word pairs or longest common subsequences, averaged over lines. 100 is perfect.

    With several references, each line counts by the one that it is nearest to.
    """
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer([kind], use_stemmer=True)
    rows = zip(hypotheses, zip(*references, strict=True), strict=True)
    found = [scorer.score_multi(list(row), line)[kind].fmeasure for line, row in rows]
    signature = f"nrefs:{len(references)}|case:lc|stem:porter|mean:f1|version:rouge-score {version('rouge-score')}"
    return make_percentage_score(((share, 1) for share in found), signature)


def count_exact(hypotheses: TextLines, references: Sequence[TextLines]) -> CountedScore:
    """Count the lines in a hundred that equal a reference; runs of spaces count as one. 100 is perfect."""
    rows = zip(hypotheses, zip(*references, strict=True), strict=True)
    right = [line.split() in [reference.split() for reference in row] for line, row in rows]
    return make_percentage_score(((one, 1) for one in right), f"nrefs:{len(references)}|case:mixed|space:one|unit:line")


def count_line_errors(hypotheses: TextLines, references: Sequence[TextLines]) -> CountedScore:
    """Count the lines in a hundred that differ from every reference: 100 minus `count_exact`. 0 is perfect.

    Where a line is a word and its tokens are phones, as in grapheme-to-phoneme conversion, the field calls this the
    word error rate.
    """
    _, signature, right_N2 = count_exact(hypotheses, references)
    return make_percentage_score(((1 - right, 1) for right, _ in right_N2), signature)


def count_word_errors(hypotheses: TextLines, references: Sequence[TextLines]) -> CountedScore:
    """Count words (tokens between spaces) to add, drop or change, per hundred of the reference. 0 is perfect.

    With several references, each line counts by the one that needs the fewest edits.
    """
    counts = []
    for line, *row in zip(hypotheses, *references, strict=True):
        words = [reference.split() for reference in row]
        counts.append(min((compute_edit_distance(line.split(), reference), len(reference)) for reference in words))
    return make_percentage_score(counts, f"nrefs:{len(references)}|case:mixed|edits:ins+del+sub|per:reference")


def compute_edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the Levenshtein distance of two token sequences."""
    above = list(range(len(other) + 1))
    for i, token in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other):
            row.append(min(above[j] + (token != wanted), above[j + 1] + 1, row[j] + 1))
        above = row
    return above[-1]


def compute_metrics(hypotheses: TextLines, references: Sequence[TextLines], names: Sequence[str] = ()) -> list[Score]:
    """Score a model's own output by the metrics `names`; by default those usual for translations."""
    return [metric.compute(hypotheses, references) for metric in select_metrics(names)]


def select_metrics(names: Sequence[str], *, tokenize: str = "") -> list[Metric]:
    """Return the metrics of these names, BLEU with this tokenizer where one is named.

    A metric whose library is missing is refused before any work is done.
    """
    found = [pick(METRICS, metric_name(name), "metric") for name in names or DEFAULT_METRICS]
    if lack := next(filter(None, (metric.missing_library for metric in found)), ""):
        raise UserError(lack)
    bleu = replace(METRICS["bleu"], count=partial(count_bleu, tokenize=tokenize))
    return [bleu if tokenize and metric.name == "bleu" else metric for metric in found]


def select_best_metric(name: str, task: str, own: Sequence[str] = ()) -> Metric | None:
    """Return the metric that `train.metric` names; None where it is the loss that counts.

    `auto` is the first of a recipe's `own` metrics (data.metrics), or else the usual one of the task. A language model
    outputs nothing that could be compared with a reference, so it has only the loss.
    """
    choices: dict[str, Metric | None] = {"loss": None, **metrics_for_task(task)}
    auto = choices[own[0]] if own and own[0] in choices else choices[AUTO_METRIC[task]]
    return pick({"auto": auto, **choices}, metric_name(name), f"metric of models that {task}")


def note_on_wer(names: Iterable[str], target_kind: str) -> str:
    """Return a note where `wer` is not the word error rate in the usual sense, given the kind of target tokenizer."""
    if "wer" not in names or target_kind != "space":
        return ""
    return (
        "wer counts the tokens between spaces: where a line is a word and its tokens are phones "
        "(tokenizer.target_kind=space), that is the phone error rate, and the word error rate is line_error_rate"
    )


def metrics_for_task(task: str) -> dict[str, Metric]:
    """Return the metrics that apply to the output of a task."""
    if task == "classify":
        return {name: metric for name, metric in METRICS.items() if metric.labels}
    return METRICS if task == "translate" else {}


def refuse_subwords(hypotheses: TextLines) -> None:
    """Refuse text in which too many tokens begin with '▁' or end in '@@'."""
    tokens = [token for line in hypotheses for token in line.split()]
    marked = sum(token.startswith("▁") or token.endswith("@@") for token in tokens)
    if marked > SUBWORD_SHARE * len(tokens):
        raise UserError(
            "the hypotheses look like subword text ('▁' or '@@' marks); detokenise them first, "
            "since a score counted on subwords cannot be compared with any other"
        )


bleu_metric = partial(Metric, values=compute_bleu, parts=split_bleu)
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        bleu_metric("bleu", "BLEU", count_bleu),
        bleu_metric("bleu_tokens", "BLEU of tokens", partial(count_bleu, tokenize="none")),
        *(
            bleu_metric(f"bleu_moses_{code}", f"BLEU lc {code}", partial(count_bleu_moses, code), extra="moses")
            for code in MOSES_LANGUAGES
        ),
        Metric("chrf", "chrF", partial(count_by_default, "CHRF"), compute_chrf),
        # Errors are counted per word of the mean reference.
        Metric("ter", "TER", partial(count_by_default, "TER"), higher=False, best_reference=False),
        *(Metric(f"rouge{n}", f"ROUGE-{n}", partial(count_rouge, f"rouge{n}"), extra="rouge") for n in "12L"),
        Metric("exact", "exact match", count_exact, labels=True),
        Metric("accuracy", "accuracy", count_exact, labels=True),
        Metric("line_error_rate", "line error rate", count_line_errors, higher=False, labels=True),
        Metric("wer", "word errors", count_word_errors, higher=False),
        Metric("per", "phone errors", count_word_errors, higher=False),
    )
}
DEFAULT_METRICS = ("bleu", "chrf", "ter")  # of `evaluate`, for translations
AUTO_METRIC = {"translate": "bleu", "classify": "accuracy", "generate": "loss"}  # what "best" means, by the task
