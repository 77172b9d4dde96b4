"""Metrics: score lines of text against one or several references.

Every score has a signature that states how it was computed, as in sacreBLEU. `hypotheses` is a list of lines of plain
text; `references` is a list of such lists, each as long as `hypotheses`. A metric counts something in each line
(count_NK), and its score is a function of the sums of these counts over lines. That function computes many scores at
once, which makes a thousand bootstrap resamples cheap (significance.py).

To add a metric, write one function from lines to a CountedScore, and add its entry in METRICS and its name in
docs/tasks.md.

Shapes   N lines   K counts of a metric   T sums of counts, such as one per bootstrap trial   G orders of n-grams
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from operator import eq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.config.settings import get_entry, update_metric_name
from dragoman.errors import UserError
from dragoman.types import Score, Tree

FloatArray = NDArray[np.float64]
Lines = Sequence[str]

KANA, HAN, HANGUL = "\u3040-\u30ff", "\u3400-\u4dbf\u4e00-\u9fff", "\uac00-\ud7af"
EAST_ASIAN_FRACTION = 0.3  # of letters and digits: a text with more is Japanese, Chinese or Korean
MIN_TOKENIZED_LINES = 100  # a text with this many lines that end in " ." counts as tokenized
SPACELESS_LANGUAGES = ("ja", "zh")  # written without spaces between words
WORD_OR_CHARACTER = re.compile(rf"[{KANA}{HAN}]|[^\W{KANA}{HAN}]+")  # a kana or Han character, or a word
LANGUAGE_TOKENIZERS = {"": "13a", "zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}  # of sacreBLEU
BLEU_TOKENIZERS = {  # sacreBLEU's tokenizers that need no network -> the extra of this package that they need
    **dict.fromkeys(("13a", "intl", "zh", "char", "none"), ""),
    **dict.fromkeys(("ja-mecab", "ko-mecab"), "mecab"),
}
MOSES_LANGUAGES = ("cs", "de", "en", "fr")  # of Multi30k, whose papers compute BLEU on text tokenized by Moses
LIBRARIES = {"moses": "sacremoses", "rouge": "rouge_score"}  # extra of this package -> the library it installs
MAX_SUBWORD_FRACTION = 0.05  # of tokens with a subword marker: far more in subword text, about 0 in plain text
UNTRAINED_SCORE = 1.0  # scores below 1 (error rates above 99) are noise, so such models are compared by the loss
BLEU_ORDERS = 4  # n-grams of 1 to 4 words
TINY = 1e-300  # replaces 0 before a logarithm
RECALL_WEIGHT = 2.0  # beta of chrF: recall counts twice as much as precision


def extract_words(line: str) -> list[str]:
    """Return the words of a line, without punctuation. Each kana or Han character counts as a word."""
    return WORD_OR_CHARACTER.findall(line)


def detect_east_asian_language(lines: Iterable[str]) -> str:
    """Return "ja", "zh" or "ko" for a text in Japanese, Chinese or Korean script, else ""."""
    text = "".join(lines)
    kana, han, hangul = (len(re.findall(f"[{script}]", text)) for script in (KANA, HAN, HANGUL))
    if kana + han + hangul <= EAST_ASIAN_FRACTION * len(re.findall(r"\w", text)):
        return ""
    if hangul > kana + han:
        return "ko"
    return "ja" if kana > 0.1 * han else "zh"  # Japanese text mixes kana with Han characters, Chinese has no kana


def make_sacrebleu(tokenize: str, references: Iterable[Iterable[str]], *, lowercase: bool = False) -> Any:
    """Return sacreBLEU's BLEU with a tokenizer of BLEU_TOKENIZERS, or for "" the tokenizer of the references' language.

    Splitting Japanese and Korean into words needs a dictionary. If it is missing, "" splits into characters instead.
    """
    from sacrebleu.metrics.bleu import BLEU

    name = tokenize or LANGUAGE_TOKENIZERS[detect_east_asian_language(line for lines in references for line in lines)]
    extra = get_entry(BLEU_TOKENIZERS, name, "tokenizer of BLEU")
    try:
        return BLEU(tokenize=name, lowercase=lowercase, force=True)  # force: no warning about tokenized text
    except (RuntimeError, ImportError):  # the dictionary is missing
        if tokenize:
            raise UserError(f"{name} needs a dictionary, which is missing; pip install 'dragoman[{extra}]'") from None
        return BLEU(tokenize="char", lowercase=lowercase, force=True)


def looks_tokenized(lines: Iterable[str]) -> bool:
    """Return whether a text looks tokenized: many lines end in a full stop after a space. sacreBLEU checks the same."""
    return sum(line.endswith(" .") for line in lines) >= MIN_TOKENIZED_LINES


def tokenize_moses(lines: Sequence[str], language: str) -> list[str]:
    """Lower-case lines, normalize punctuation and tokenize as the Moses scripts do. Words with hyphens stay whole.

    For Multi30k's raw test sets in English and German, the result equals the tokenized files of Multi30k byte for byte,
    which are also the references of Wu et al. 2021 (docs/recipes.md).
    """
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [tokenizer.tokenize(normalizer.normalize(line.lower()), return_str=True) for line in lines]


def compute_f1(correct: int, predicted: int, expected: int) -> dict[str, float]:
    """Return precision, recall and their harmonic mean, in per cent; 0 where nothing was predicted or expected."""
    return {
        "precision": 100 * correct / max(predicted, 1),
        "recall": 100 * correct / max(expected, 1),
        "f1": 200 * correct / max(predicted + expected, 1),
    }


def count_confusion(predicted: Sequence[str], expected: Sequence[str]) -> dict[str, Any]:
    """Return the confusion matrix, and for each label precision, recall and F1, in per cent.

    `counts[i][j]` texts of labels[i] were predicted as labels[j]. "f1" is the macro average: every label has the same
    weight, however rare.
    """
    counts = Counter(zip(expected, predicted, strict=True))
    times_predicted, times_expected = Counter(predicted), Counter(expected)
    labels = sorted({*predicted, *expected})
    by_label: dict[str, dict[str, float]] = {}
    for label in labels:
        scores = compute_f1(counts[label, label], times_predicted[label], times_expected[label])
        by_label[label] = {**scores, "texts": times_expected[label]}
    return {
        "labels": labels,
        "counts": [[counts[true_label, label] for label in labels] for true_label in labels],
        "each": by_label,
        "f1": sum(scores["f1"] for scores in by_label.values()) / max(len(labels), 1),
    }


def divide_or(part: FloatArray, whole: FloatArray, otherwise: FloatArray | float = 0.0) -> FloatArray:
    """Return part / whole elementwise, and `otherwise` where whole is 0."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), otherwise)


def compute_percentages(total_TK: FloatArray) -> FloatArray:
    """Return the first count in per cent of the second; 100 if only the second is 0, and 0 if both are."""
    part_T, whole_T = total_TK[..., 0], total_TK[..., 1]
    return 100 * divide_or(part_T, whole_T, np.where(part_T > 0, 1.0, 0.0))


def compute_bleu(total_TK: FloatArray) -> FloatArray:
    """Compute BLEU from counts: length, reference length, then matching n-grams and all n-grams of each order.

    Exponential smoothing, as in sacreBLEU: the first order without a match counts as half a match, the next one as a
    quarter, and so on.
    """
    length_T, reference_T = total_TK[..., 0], total_TK[..., 1]
    matches_TG, all_TG = total_TK[..., 2 : 2 + BLEU_ORDERS], total_TK[..., 2 + BLEU_ORDERS :]
    smoothed_TG = np.where(matches_TG == 0, 0.5 ** np.cumsum(matches_TG == 0, -1), matches_TG)
    log_brevity_T = np.where(length_T < reference_T, 1 - divide_or(reference_T, length_T), 0.0)
    log_precision_T = np.log(np.maximum(divide_or(smoothed_TG, all_TG), TINY)).mean(-1)
    defined_T = (matches_TG > 0).any(-1) & (all_TG > 0).all(-1)
    return np.where(defined_T, 100 * np.exp(log_precision_T + log_brevity_T), 0.0)


def decompose_bleu(total_K: FloatArray) -> dict[str, Any]:
    """Return the factors of BLEU: n-gram precisions in per cent, and the brevity penalty with both lengths in tokens.

    sacreBLEU computes them from the same counts as `compute_bleu`, with the same smoothing.
    """
    from sacrebleu.metrics.bleu import BLEU

    length, reference_length, *counts = total_K.astype(int).tolist()
    matches, totals = counts[:BLEU_ORDERS], counts[BLEU_ORDERS:]
    score = BLEU.compute_bleu(matches, totals, length, reference_length, smooth_method="exp")
    return {
        "precisions": score.precisions,
        "brevity_penalty": score.bp,
        "hypothesis_length": length,
        "reference_length": reference_length,
    }


def compute_chrf(total_TK: FloatArray) -> FloatArray:
    """Compute chrF from three counts per order: n-grams of the hypothesis, of the reference, and in both.

    Precision and recall are means over the orders. Orders for which one side has no n-gram are left out.
    """
    hypothesis_TG, reference_TG, both_TG = (total_TK[..., n::3] for n in range(3))
    orders_T = np.maximum(((hypothesis_TG > 0) & (reference_TG > 0)).sum(-1), 1)
    precision_T = divide_or(both_TG, hypothesis_TG).sum(-1) / orders_T
    recall_T = divide_or(both_TG, reference_TG).sum(-1) / orders_T
    beta_squared = RECALL_WEIGHT**2
    return 100 * divide_or((1 + beta_squared) * precision_T * recall_T, beta_squared * precision_T + recall_T)


class CountedScore(NamedTuple):
    """A score, its signature, and the counts of every line. The score is a function of the sums of these counts."""

    value: float
    signature: str
    count_NK: FloatArray


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: how it counts, and its properties. METRICS has one instance for each name.

    `count` returns the score and the counts per line. `compute_scores` turns sums of such counts into scores, many at
    once: of all lines, of some of them, or of resamples.
    """

    name: str
    title: str
    count: Callable[[Lines, Sequence[Lines]], CountedScore]
    compute_scores: Callable[[FloatArray], FloatArray] = compute_percentages
    higher_is_better: bool = True
    scores_labels: bool = False  # compares complete lines, so it can score the labels of a classifier too
    extra: str = ""  # the extra of this package that installs the metric's library
    decompose: Callable[[FloatArray], dict[str, Any]] | None = None  # factors of the score, from sums of counts
    monotonic: bool = True  # whether further references never make a score worse

    @property
    def missing_library(self) -> str:
        """Return a message that tells what to install if the metric's library is missing, else ""."""
        library = LIBRARIES.get(self.extra)
        if not library or find_spec(library):
            return ""
        return f"{self.name} needs {library}, which is not installed; pip install 'dragoman[{self.extra}]' installs it"

    def __call__(self, hypotheses: Lines, references: Sequence[Lines]) -> Score:
        """Return the score of lines from any system; refuse subword text."""
        refuse_subwords(hypotheses)
        return self.compute(hypotheses, references)

    def compute(self, hypotheses: Lines, references: Sequence[Lines]) -> Score:
        """Return the score of a model's own output, which may look like subword text early in training."""
        counted = self.check_and_count(hypotheses, references)
        return Score(self.name, counted.value, counted.signature)

    def check_and_count(self, hypotheses: Lines, references: Sequence[Lines]) -> CountedScore:
        """Return the score and the counts of every line. Refuse references that do not match the hypotheses."""
        if not hypotheses:
            raise UserError("there are no hypotheses to score")
        if not references:
            raise UserError("there is no reference to score against")
        for number, reference in enumerate(references, 1):
            if isinstance(reference, str):
                raise UserError("references must be a list of lists of lines; put a single list into another list")
            if len(reference) != len(hypotheses):
                raise UserError(
                    f"reference {number} of {len(references)} has {len(reference)} line{'s' * (len(reference) != 1)}, "
                    f"but there are {len(hypotheses)} hypotheses; line n of each must belong together"
                )
        if self.missing_library:
            raise UserError(self.missing_library)
        return self.count(hypotheses, references)

    def goodness(self, value: float) -> float:
        """Return the score with the sign that makes higher better: error rates are negated."""
        return value if self.higher_is_better else -value

    @property
    def floor(self) -> float:
        """Return the goodness of an untrained model. Below it, differences of scores mean nothing."""
        return self.goodness(UNTRAINED_SCORE if self.higher_is_better else 100 - UNTRAINED_SCORE)


def count_bleu(
    hypotheses: Lines, references: Sequence[Lines], *, tokenize: str = "", lowercase: bool = False
) -> CountedScore:
    """Compute BLEU: precision of n-grams up to 4 words, with a penalty for short outputs. 100 is perfect.

    The tokenizer depends on the language of the references, unless `tokenize` names one. The signature names it.
    """
    return count_by_sacrebleu(make_sacrebleu(tokenize, references, lowercase=lowercase), hypotheses, references)


def count_bleu_moses(language: str, hypotheses: Lines, references: Sequence[Lines]) -> CountedScore:
    """Compute BLEU on lower-cased text tokenized by Moses, as papers do with fairseq's BLEU4 and multi-bleu.

    Those do not smooth. sacreBLEU does, but only if an order has no match, which does not happen for usable systems.
    """
    tokenize = partial(tokenize_moses, language=language)
    counted = count_bleu(tokenize(hypotheses), [tokenize(lines) for lines in references], tokenize="none")
    signature = counted.signature.replace("case:mixed", "case:lc").replace("tok:none", f"tok:norm+moses-{language}")
    return counted._replace(signature=f"{signature}|sacremoses:{version('sacremoses')}")


def count_by_sacrebleu_default(name: str, hypotheses: Lines, references: Sequence[Lines]) -> CountedScore:
    """Compute a metric of sacreBLEU with its default settings.

    CHRF is the F-score of character n-grams up to 6, with beta 2 (chrF2); 100 is perfect. TER is the number of edits,
    including phrase shifts, per hundred words of the reference; 0 is perfect.
    """
    from sacrebleu.metrics import METRICS as SACREBLEU_METRICS

    return count_by_sacrebleu(SACREBLEU_METRICS[name](), hypotheses, references)


def count_by_sacrebleu(metric: Any, hypotheses: Lines, references: Sequence[Lines]) -> CountedScore:
    """Compute the score of sacreBLEU's `corpus_score`, but in two steps, in order to get the counts of every line."""
    counts = metric._extract_corpus_statistics(list(hypotheses), [list(reference) for reference in references])
    value = metric._aggregate_and_compute(counts).score
    return CountedScore(float(value), str(metric.get_signature()), np.array(counts, dtype=np.float64))


def make_percentage_score(counts: Iterable[tuple[float, float]], signature: str) -> CountedScore:
    """Return the score of (part, whole) counts per line: the sum of the parts in per cent of the sum of the wholes."""
    count_N2 = np.array(list(counts), dtype=np.float64)
    return CountedScore(float(compute_percentages(count_N2.sum(0))), signature, count_N2)


def count_rouge(kind: str, hypotheses: Lines, references: Sequence[Lines]) -> CountedScore:
    """Compute ROUGE: F1 of stemmed words, word pairs or the longest common subsequence, averaged over lines.

    100 is perfect. With several references, the best score of each line counts.
    """
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer([kind], use_stemmer=True)
    lines = zip(hypotheses, zip(*references, strict=True), strict=True)
    f1_scores = [scorer.score_multi(list(targets), line)[kind].fmeasure for line, targets in lines]
    signature = f"nrefs:{len(references)}|case:lc|stem:porter|mean:f1|version:rouge-score {version('rouge-score')}"
    return make_percentage_score(((f1, 1) for f1 in f1_scores), signature)


def count_exact_matches(hypotheses: Lines, references: Sequence[Lines]) -> CountedScore:
    """Compute the percentage of lines that equal a reference. Several spaces equal one. 100 is perfect."""
    lines = zip(hypotheses, zip(*references, strict=True), strict=True)
    counts = [(line.split() in [target.split() for target in targets], 1) for line, targets in lines]
    return make_percentage_score(counts, f"nrefs:{len(references)}|case:mixed|space:one|unit:line")


def count_line_errors(hypotheses: Lines, references: Sequence[Lines]) -> CountedScore:
    """Compute the percentage of lines that differ from every reference. 0 is perfect.

    Where a line is a word and its tokens are phones, as in grapheme-to-phoneme conversion, the field calls this the
    word error rate.
    """
    _, signature, correct_N2 = count_exact_matches(hypotheses, references)
    return make_percentage_score(((1 - correct, 1) for correct, _ in correct_N2), signature)


def count_word_errors(hypotheses: Lines, references: Sequence[Lines]) -> CountedScore:
    """Compute insertions, deletions and substitutions of words (tokens between spaces) per 100 words of the reference.

    0 is perfect. With several references, each line is compared with the one that needs the fewest edits.
    """
    counts = []
    for line, *targets in zip(hypotheses, *references, strict=True):
        words = [target.split() for target in targets]
        counts.append(min((compute_edit_distance(line.split(), target), len(target)) for target in words))
    return make_percentage_score(counts, f"nrefs:{len(references)}|case:mixed|edits:ins+del+sub|per:reference")


def count_attachments(hypotheses: Lines, references: Sequence[Lines]) -> CountedScore:
    """Compute the unlabelled attachment score: the percentage of words with the right head. 100 is perfect.

    Lines are dependency trees in brackets (Tree.to_brackets). If a hypothesis has not as many words as the
    reference, none of its heads is right. With several references, the best score of each line counts.
    """
    counts = []
    for line, *targets in zip(hypotheses, *references, strict=True):
        found = list(zip(*Tree.from_brackets(line)))
        trees = [list(zip(*Tree.from_brackets(target))) for target in targets]
        right = [sum(map(eq, found, tree)) if len(found) == len(tree) else 0 for tree in trees]
        counts.append(max(zip(right, map(len, trees)), key=lambda count: (count[0] / max(count[1], 1), -count[1])))
    return make_percentage_score(counts, f"nrefs:{len(references)}|case:mixed|labels:no|punct:yes")


def compute_edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    distances = list(range(len(second) + 1))  # of a prefix of `first` from every prefix of `second`
    for i, token in enumerate(first, 1):
        row = [i]
        for j, second_token in enumerate(second):
            row.append(min(distances[j] + (token != second_token), distances[j + 1] + 1, row[j] + 1))
        distances = row
    return distances[-1]


def compute_metrics(hypotheses: Lines, references: Sequence[Lines], names: Sequence[str] = ()) -> list[Score]:
    """Return the scores of a model's own output by the named metrics, by default BLEU, chrF and TER."""
    return [metric.compute(hypotheses, references) for metric in select_metrics(names)]


def select_metrics(names: Sequence[str], *, tokenize: str = "") -> list[Metric]:
    """Return the metrics of these names. BLEU uses the tokenizer `tokenize`, if one is named.

    A metric whose library is missing is refused here, before any work is done.
    """
    metrics = [get_entry(METRICS, update_metric_name(name), "metric") for name in names or DEFAULT_METRICS]
    if message := next(filter(None, (metric.missing_library for metric in metrics)), ""):
        raise UserError(message)
    bleu = replace(METRICS["bleu"], count=partial(count_bleu, tokenize=tokenize))
    return [bleu if tokenize and metric.name == "bleu" else metric for metric in metrics]


def choose_checkpoint_metric(name: str, task: str, data_metrics: Sequence[str] = ()) -> Metric | None:
    """Return the metric that selects the best checkpoint; None for the loss. `name` is train.metric.

    "auto" means the first metric of `data_metrics` (data.metrics), or else BEST_METRIC of the task. A language
    model has no outputs to compare with a reference, so its only metric is the loss.
    """
    choices: dict[str, Metric | None] = {"loss": None, **metrics_for_task(task)}
    auto = next((first for first in data_metrics[:1] if first in choices), BEST_METRIC[task])
    return get_entry({"auto": choices[auto], **choices}, update_metric_name(name), f"metric of models that {task}")


def explain_wer(names: Iterable[str], target_kind: str) -> str:
    """Return a note if `wer` is not the word error rate in the usual sense, because the target tokens may be phones."""
    if "wer" not in names or target_kind != "space":
        return ""
    return (
        "wer counts the tokens between spaces: where a line is a word and its tokens are phones "
        "(tokenizer.target_kind=space), that is the phone error rate, and the word error rate is line_error_rate"
    )


def metrics_for_task(task: str) -> dict[str, Metric]:
    if task == "classify":
        return {name: metric for name, metric in METRICS.items() if metric.scores_labels}
    return METRICS if task == "translate" else {}


def refuse_subwords(hypotheses: Lines) -> None:
    """Refuse text in which many tokens begin with '▁' (SentencePiece) or end in '@@' (subword-nmt)."""
    tokens = [token for line in hypotheses for token in line.split()]
    marked = sum(token.startswith("▁") or token.endswith("@@") for token in tokens)
    if marked > MAX_SUBWORD_FRACTION * len(tokens):
        raise UserError(
            "the hypotheses look like subword text ('▁' or '@@' marks); detokenise them first, "
            "because scores of subword text are not comparable with other scores"
        )


bleu_metric = partial(Metric, compute_scores=compute_bleu, decompose=decompose_bleu)
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        bleu_metric("bleu", "BLEU", count_bleu),
        bleu_metric("bleu_tokens", "BLEU, tokenized", partial(count_bleu, tokenize="none")),
        bleu_metric("bleu_tokens_lc", "BLEU, tokens lc", partial(count_bleu, tokenize="none", lowercase=True)),
        *(
            bleu_metric(f"bleu_moses_{code}", f"BLEU lc {code}", partial(count_bleu_moses, code), extra="moses")
            for code in MOSES_LANGUAGES
        ),
        Metric("chrf", "chrF", partial(count_by_sacrebleu_default, "CHRF"), compute_chrf),
        # TER divides by the mean reference length, so a further reference can make the score worse.
        Metric("ter", "TER", partial(count_by_sacrebleu_default, "TER"), higher_is_better=False, monotonic=False),
        *(Metric(f"rouge{n}", f"ROUGE-{n}", partial(count_rouge, f"rouge{n}"), extra="rouge") for n in "12L"),
        Metric("exact", "exact match", count_exact_matches, scores_labels=True),
        Metric("accuracy", "accuracy", count_exact_matches, scores_labels=True),
        Metric("line_error_rate", "line error rate", count_line_errors, higher_is_better=False, scores_labels=True),
        Metric("wer", "word errors", count_word_errors, higher_is_better=False),
        Metric("per", "phone errors", count_word_errors, higher_is_better=False),
        Metric("uas", "attachment score", count_attachments),
    )
}
DEFAULT_METRICS = ("bleu", "chrf", "ter")  # of `evaluate`, for translations
BEST_METRIC = {"translate": "bleu", "classify": "accuracy", "generate": "loss"}  # selects the best checkpoint, by task
