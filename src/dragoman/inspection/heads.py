"""What each attention head of a translation model attends to, measured over a corpus with a gold analysis.

    report = score_heads(dragoman.load("runs/demo"), make_phrasebook_corpus(500))
    report.save("heads.html")

A score (HEAD_SCORES) names the gold keys of a query, such as the dependency head of a word. Queries and keys are words:
weights are summed over the tokens of a key and averaged over the tokens of a query. EOS, BOS and tags are keys of their
own, never queries. A head is judged by its percentage, that of queries whose highest-weighted key is gold, and by the
mean weight on gold keys. Queries without a gold key that they can attend to are not counted; in a decoder, a query can
attend only to earlier words and itself. Three baselines need no analysis of the sentence: the chance that a random
token belongs to a gold key, which is also the mean weight of uniform attention; the best fixed offset from the query
("two words to the left"); and the best fixed position ("the second word"). A head has learned a relation only if it
beats all of them.

The queries of a decoder's self-attention are the steps that read a word, unless the score says that they predict it.
The queries of attention to the source are always the steps that predict a word.

Shapes   L layers   H heads   Q query tokens   K key tokens   J query words   I key words, then BOS or EOS, then tags
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dragoman.data.corpus import CorpusSettings, phrasebook_direction, read_pairs
from dragoman.data.trees import remove_spaces
from dragoman.errors import UserError
from dragoman.inference.attention_alignment import find_words_of_tokens
from dragoman.inference.loading import EnsembleModel
from dragoman.inference.predictor import MAX_ATTENTION_CELLS, MAX_TOKENS_WITH_EOS, bucket_widths, eval_mode
from dragoman.inference.translator import Translator
from dragoman.inspection.attention import record_attention
from dragoman.inspection.attention_maps import is_punctuation
from dragoman.inspection.records import Floats, to_plain
from dragoman.io import format_json, write_text
from dragoman.phrasebook.generate import Phrase, generate_phrases, split_words
from dragoman.progress import ProgressBar
from dragoman.types import Example, Tree

WordPairs = tuple[tuple[int, int], ...]
GoldKeys = dict[int, set[int]]  # query word -> its gold keys; the index after the last word is BOS or EOS
WordIndex = NDArray[np.int64]  # the key (word, special token or tag) of each token
SELF_ATTENTION = ("encoder", "decoder")


# ---- corpora


@dataclass(frozen=True, slots=True)
class AnalysedPair:
    """A sentence pair, its words and what is known about them. The words spell the sentence without its spaces.

    Positions count from 0, except for heads, which count from 1 as in CoNLL-U. None: the analysis is unknown.
    """

    source: str
    target: str
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    source_heads: tuple[int, ...] | None = None
    target_heads: tuple[int, ...] | None = None
    links: WordPairs | None = None  # source position, target position
    source_coref: WordPairs = ()  # pronoun, antecedent
    target_coref: WordPairs = ()

    def words_read_by(self, part: str) -> tuple[str, ...]:
        """Return the words that are the queries of a part of the model."""
        return self.source_words if part == "encoder" else self.target_words


def analyse_phrase(phrase: Phrase) -> AnalysedPair:
    """Return a phrase of the phrasebook with its gold analysis of both languages."""
    return AnalysedPair(
        source=phrase.source,
        target=phrase.target,
        source_words=phrase.source_words,
        target_words=phrase.target_words,
        source_heads=phrase.source_heads,
        target_heads=phrase.target_heads,
        links=phrase.alignment,
        source_coref=phrase.source_coref,
        target_coref=phrase.target_coref,
    )


def make_phrasebook_corpus(
    count: int, *, split: str = "test", seed: int = 1, direction: str = "en-de"
) -> list[AnalysedPair]:
    """Return pairs of the phrasebook with their gold analysis."""
    return [analyse_phrase(phrase) for phrase in generate_phrases(split, count, seed=seed, direction=direction)]


def get_phrasebook_direction(translator: Translator) -> str:
    """Return the direction of the phrasebook in which a model was trained; refuse models of other texts."""
    data = translator.recipe.data
    corpus = next((corpus for corpus in data.train if corpus.phrasebook and corpus.view == "translation"), None)
    if corpus is None:
        raise UserError(
            f"the model in {translator.run!r} was not trained to translate the phrasebook, so its heads cannot be "
            "scored there; give a corpus in its languages with --source, --target and --conllu"
        )
    return phrasebook_direction(corpus, data.direction)


def read_head_corpus(source: Path, target: Path, conllu: Path | None, count: int) -> tuple[list[AnalysedPair], int]:
    """Return the first `count` pairs of two parallel files, with the trees of a CoNLL-U file, and the number of pairs.

    Without trees, words are split from punctuation. The whole CoNLL-U file is compared with the source.
    """
    settings = CorpusSettings(source=str(source), target=str(target), conllu=str(conllu or ""))
    pairs: list[AnalysedPair] = []
    total = 0
    for total, pair in enumerate(read_pairs(settings, trees=True), 1):
        words = tuple(map(remove_spaces, pair.tree.words)) if pair.tree else tuple(split_words(pair.source))
        if pair.tree and "".join(words) != remove_spaces(pair.source):
            raise UserError(
                f"the words of {conllu} and line {total} of {source} differ: {' '.join(words)[:60]!r} and "
                f"{pair.source[:60]!r}; parse exactly the lines of the source"
            )
        if len(pairs) < count:
            heads = pair.tree.heads if pair.tree else None
            pairs.append(AnalysedPair(pair.source, pair.target, words, tuple(split_words(pair.target)), heads))
    return pairs, total


# ---- scores


def find_offset(offset: int, pair: AnalysedPair, part: str) -> GoldKeys:
    """Return for each word the word at a fixed offset."""
    size = len(pair.words_read_by(part))
    return {query: {query + offset} for query in range(size) if 0 <= query + offset < size}


def find_delimiters(pair: AnalysedPair, part: str) -> GoldKeys:
    """Return for each word that is not punctuation all punctuation of the keys, and BOS or EOS."""
    keys = pair.target_words if part == "decoder" else pair.source_words
    gold = {index for index, word in enumerate(keys) if is_punctuation(word)} | {len(keys)}
    return {query: gold for query, word in enumerate(pair.words_read_by(part)) if not is_punctuation(word)}


def find_links(pair: AnalysedPair, part: str) -> GoldKeys:  # noqa: ARG001 - the part is always "cross"
    """Return for each target word the source words that it is linked with."""
    gold: GoldKeys = {}
    for source, target in pair.links or ():
        gold.setdefault(target, set()).add(source)
    return gold


def find_syntactic_heads(pair: AnalysedPair, part: str) -> GoldKeys:
    """Return for each word its dependency head; the root has none."""
    heads = (pair.source_heads if part == "encoder" else pair.target_heads) or ()
    return {query: {head - 1} for query, head in enumerate(heads) if head}


def find_antecedents(pair: AnalysedPair, part: str) -> GoldKeys:
    """Return for each pronoun its antecedent or, in attention to the source, the source words linked with it."""
    coref = pair.source_coref if part == "encoder" else pair.target_coref
    if part != "cross":
        return {pronoun: {antecedent} for pronoun, antecedent in coref}
    links = find_links(pair, part)
    return {pronoun: links.get(antecedent, set()) for pronoun, antecedent in coref}


class HeadScore(NamedTuple):
    """What a head may attend to: the gold keys of each query, and the parts of a model for which they are defined."""

    title: str
    find_gold: Callable[[AnalysedPair, str], GoldKeys]
    parts: tuple[str, ...]
    has_fixed_rule: bool = False  # a rule that ignores the words finds all gold keys: only chance can be the baseline
    predicts: bool = False  # in the decoder, queries are the steps that predict a word, not those that read it

    def choose_view(self, part: str) -> tuple[str, bool]:
        """Return the key of `WordWeights`: the part, and whether queries are steps that predict a word."""
        return part, self.predicts or part == "cross"


HEAD_SCORES = {
    "previous": HeadScore("previous word", partial(find_offset, -1), SELF_ATTENTION, has_fixed_rule=True),
    "next": HeadScore("next word", partial(find_offset, 1), ("encoder",), has_fixed_rule=True),
    "same": HeadScore("same word", partial(find_offset, 0), SELF_ATTENTION, has_fixed_rule=True),
    "delimiter": HeadScore("punctuation, BOS or EOS", find_delimiters, (*SELF_ATTENTION, "cross"), has_fixed_rule=True),
    "alignment": HeadScore("aligned word", find_links, ("cross",)),
    "syntax": HeadScore("syntactic head", find_syntactic_heads, SELF_ATTENTION),
    "antecedent": HeadScore("antecedent of a pronoun", find_antecedents, (*SELF_ATTENTION, "cross")),
    "predicted": HeadScore("antecedent of the next pronoun", find_antecedents, ("decoder",), predicts=True),
}


class HeadCounts:
    """Counts of one score over the queries of a corpus, which are added one sentence at a time."""

    def __init__(self, score: HeadScore, part: str) -> None:
        self.score, self.part = score, part
        self.queries = 0
        self.chance = 0.0  # sum over the queries of the weight of uniform attention on gold keys
        self.offsets: Counter[int] = Counter()  # gold key minus query
        self.positions: Counter[int] = Counter()  # gold key
        self.hits_LH: Any = 0  # queries whose highest-weighted key is gold
        self.weight_LH: Any = 0.0  # sum over the queries of the weight on gold keys

    def add(self, pair: AnalysedPair, weight_LHJI: Floats, uniform_JI: Floats) -> None:
        """Count the queries of a sentence. Keys to which uniform attention gives no weight cannot be attended to."""
        gold_JI = np.zeros(uniform_JI.shape, dtype=bool)
        for query, keys in self.score.find_gold(pair, self.part).items():
            gold_JI[query, list(keys)] = True
        gold_JI &= uniform_JI > 0
        self.queries += int(gold_JI.any(1).sum())
        self.chance += float(uniform_JI[gold_JI].sum())
        queries, keys_of_queries = gold_JI[:, :-2].nonzero()  # without BOS, EOS and tags
        self.offsets.update((keys_of_queries - queries).tolist())
        self.positions.update(keys_of_queries.tolist())
        self.hits_LH = self.hits_LH + gold_JI[np.arange(len(gold_JI)), weight_LHJI.argmax(-1)].sum(-1)
        self.weight_LH = self.weight_LH + weight_LHJI[..., gold_JI].sum(-1, dtype=np.float64)

    def compute_scores(self, name: str) -> ScoredHeads:
        """Return the scores of all heads."""
        chance = 100 * self.chance / self.queries
        baselines = {"chance": chance}
        if not self.score.has_fixed_rule:
            baselines |= {f"offset {n:+d}": 100 * count / self.queries for n, count in self.offsets.most_common(1)}
            baselines |= {f"word {n + 1}": 100 * count / self.queries for n, count in self.positions.most_common(1)}
        best = max(baselines, key=lambda kind: baselines[kind])
        return ScoredHeads(
            name=name,
            title=self.score.title,
            part=self.part,
            queries=self.queries,
            chance=chance,
            baseline=baselines[best],
            baseline_kind=best,
            baselines=baselines,
            percent_LH=np.asarray(100 * self.hits_LH / self.queries, dtype=np.float32),
            weight_LH=np.asarray(self.weight_LH / self.queries, dtype=np.float32),
        )


# ---- results


@dataclass(frozen=True, slots=True)
class ScoredHeads:
    """One score of all heads of one part of a model."""

    name: str  # in HEAD_SCORES
    title: str
    part: str  # "encoder", "decoder" or "cross"
    queries: int  # number of queries that were counted
    chance: float  # in per cent
    baseline: float  # the best of `baselines`
    baseline_kind: str  # "chance", "offset -1" or "word 2", counted from 1
    baselines: dict[str, float]  # in per cent: chance, the best fixed offset and the best fixed position
    percent_LH: Floats  # of the queries, the highest-weighted key is gold
    weight_LH: Floats  # mean weight on gold keys, from 0 to 1

    def rank_heads(self) -> list[tuple[int, int]]:
        """Return layer and head, counted from 0, of all heads, best first."""
        order = np.argsort(-self.percent_LH, axis=None, kind="stable").tolist()
        return [divmod(index, self.percent_LH.shape[1]) for index in order]

    def compute_gains(self) -> Floats:
        """Return how far each head is from the baseline towards 100 %: gain_LH, negative below the baseline."""
        return (self.percent_LH - np.float32(self.baseline)) / np.float32(max(100 - self.baseline, 1e-6))


@dataclass(frozen=True, slots=True)
class Ablation:
    """Loss and BLEU of a model without each head, minus those of the complete model."""

    loss: float  # of the complete model: mean negative log-probability of a target token, EOS included
    bleu: float
    signature: str  # of BLEU
    loss_change_LH: dict[str, Floats]  # by part
    bleu_change_LH: dict[str, Floats]


@dataclass(frozen=True, slots=True)
class HeadReport:
    """What the attention heads of a model attend to."""

    run: str
    corpus: str
    pairs: int  # number of pairs that were scored
    scores: list[ScoredHeads]
    ablation: Ablation | None = None
    notes: tuple[str, ...] = ()  # what could not be scored and why

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The number of layers and of heads per layer, by part of the model."""
        shapes = {table.part: table.percent_LH.shape for table in self.scores}
        return {part: (shapes[part][0], shapes[part][1]) for part in ("encoder", "decoder", "cross") if part in shapes}

    def to_json(self) -> dict[str, Any]:
        """Return the report as dictionaries, lists, numbers and texts."""
        data: dict[str, Any] = to_plain(self)
        return data

    def save(self, path: str | Path) -> None:
        """Write the report as an HTML page, or as data if the file name ends in .json."""
        from dragoman.inspection.head_report import render_heads_page

        is_json = Path(path).suffix == ".json"
        write_text(Path(path), format_json(self.to_json()) if is_json else render_heads_page(self))


def score_heads(
    translator: Translator,
    corpus: Sequence[AnalysedPair],
    *,
    corpus_name: str = "",
    tag: str = "",
    ablate: bool = False,
) -> HeadReport:
    """Return what every attention head of a translation model attends to, over a corpus.

    `ablate` also computes BLEU and loss without each head.
    """
    check_has_heads(translator)
    if not corpus:
        raise UserError("there is nothing to score the heads on: the corpus is empty; give at least one pair")
    corpus = [normalise_spaces(pair) for pair in corpus]
    all_counts: dict[tuple[str, str], HeadCounts] = {}  # by name of the score and part
    scored: list[int] = []
    with ProgressBar("scoring heads", total=len(corpus)) as bar:
        for index, attention in iter_word_attention(translator, corpus, tag):
            scored.append(index)
            for name, score in HEAD_SCORES.items():
                for part in score.parts:
                    if (view := score.choose_view(part)) in attention:
                        counts = all_counts.setdefault((name, part), HeadCounts(score, part))
                        counts.add(corpus[index], *attention[view])
            bar.set_done(len(scored))
    notes = []
    if len(scored) < len(corpus):
        reasons = "empty, too long, or not spelled by the tokens of the model"
        notes.append(f"{len(corpus) - len(scored)} of {len(corpus)} pairs were left out: {reasons}")
    if not scored:
        raise UserError(f"the heads of {translator.run!r} cannot be scored: {notes[0]}; give other pairs")
    tables = [
        all_counts[name, part].compute_scores(name)
        for name, score in HEAD_SCORES.items()
        for part in score.parts
        if (name, part) in all_counts and all_counts[name, part].queries
    ]
    found, parts = {(table.name, table.part) for table in tables}, {part for _, part in all_counts}
    without_gold = [
        f"{score.title} ({part})"
        for name, score in HEAD_SCORES.items()
        for part in score.parts
        if part in parts and (name, part) not in found
    ]
    notes += [f"no queries with gold for: {', '.join(without_gold)}"] if without_gold else []
    report = HeadReport(translator.run, corpus_name, len(scored), tables, notes=tuple(notes))
    if not ablate:
        return report
    from dragoman.inspection.head_ablation import ablate_heads

    ablation, ablation_notes = ablate_heads(translator, [corpus[i] for i in sorted(scored)], report.sizes, tag=tag)
    return replace(report, ablation=ablation, notes=(*report.notes, *ablation_notes))


def check_has_heads(translator: Translator) -> None:
    """Refuse models without attention weights between words."""
    if isinstance(translator.model, EnsembleModel):
        raise UserError("the heads of an ensemble cannot be scored; score those of its runs one by one")
    if translator.recipe.model.kind == "smt":
        raise UserError(f"the model in {translator.run!r} is a phrase-based system and has no attention heads")


def normalise_spaces(pair: AnalysedPair) -> AnalysedPair:
    """Return the pair with single spaces in its texts, since tokens are located by bytes without spaces."""
    return replace(pair, source=" ".join(pair.source.split()), target=" ".join(pair.target.split()))


def list_trees(translator: Translator, corpus: Sequence[AnalysedPair]) -> list[Tree | None] | None:
    """Return the trees of the sources if the model reads trees, else None."""
    if not translator.reads_trees:
        return None
    return [Tree(pair.source_words, pair.source_heads) if pair.source_heads else None for pair in corpus]


# ---- attention between words

# (part, whether queries are steps that predict) -> weights of all heads, and those of uniform attention
WordWeights = dict[tuple[str, bool], tuple[Floats, Floats]]


@torch.no_grad()
def iter_word_attention(
    translator: Translator, corpus: Sequence[AnalysedPair], tag: str
) -> Iterator[tuple[int, WordWeights]]:
    """Yield the index of each pair that fits into the model, and its attention between words."""
    texts = [pair.source for pair in corpus], [pair.target for pair in corpus]
    examples = translator.make_examples(*texts, trees=list_trees(translator, corpus), tag=tag)
    tag_length = len(translator.encode_tag(tag))
    maximum = min(MAX_TOKENS_WITH_EOS - 1, translator.max_tokens)
    fitting = [
        index
        for index, example in enumerate(examples)
        if len(example.source) and len(example.target) and max(len(example.source), len(example.target)) <= maximum
    ]
    batches = translator.iter_batches([examples[i] for i in fitting], bucket_widths, max_cells=MAX_ATTENTION_CELLS)
    with eval_mode(translator.model):
        for rows, batch in batches:
            with record_attention(translator.model) as recorded:
                translator.model(batch)
            weights = {part: torch.stack(layers, 1).float().cpu().numpy() for part, layers in recorded.items()}
            if not weights:
                raise UserError(f"the model in {translator.run!r} has no attention heads")
            widths = {"encoder": batch.source_BS.size(1), "decoder": batch.target_in_BT.size(1)}
            if any(weights[part].shape[-1] != widths[part] for part in widths if part in weights):
                raise UserError(
                    f"the heads of {translator.run!r} do not attend to words, but to projections of the whole "
                    "sentence (model.attention=linformer); score a model with another pattern"
                )
            for row, number in enumerate(rows):
                index = fitting[number]
                token_weights = {part: weight[row] for part, weight in weights.items()}
                words = number_tokens(translator, corpus[index], examples[index], tag_length)
                if words is not None:
                    yield index, merge_all_parts(token_weights, corpus[index], *words)


def number_tokens(
    translator: Translator, pair: AnalysedPair, example: Example, tag_length: int
) -> tuple[WordIndex, WordIndex] | None:
    """Return the word of each token of source and target, with the tags before the source and without EOS and BOS."""
    tokenizers = translator.tokenizers
    source_ids, target_ids = example.source[tag_length:].tolist(), example.target.tolist()
    source = find_words_of_tokens(tokenizers.source, pair.source, pair.source_words, source_ids)
    target = find_words_of_tokens(tokenizers.target, pair.target, pair.target_words, target_ids)
    if source is None or target is None:
        return None
    tags = np.full(tag_length, len(pair.source_words) + 1)
    return np.concatenate([tags, source]), target


def merge_all_parts(
    weights: dict[str, Floats], pair: AnalysedPair, source_N: WordIndex, target_N: WordIndex
) -> WordWeights:
    """Return the attention between words of all parts, given weight_LHQK of each part, which may have padding."""
    source_end, target_end = [len(pair.source_words)], [len(pair.target_words)]
    source = np.concatenate([source_N, source_end])  # EOS is last
    read, predicted = np.concatenate([target_end, target_N]), np.concatenate([target_N, target_end])
    uniform_cross = np.full((len(read), len(source)), 1 / len(source), dtype=np.float32)
    causal = np.tri(len(read), dtype=np.float32)
    uniform_decoder = causal / causal.sum(1, keepdims=True)
    views = {
        ("encoder", False): (source, source, np.full((len(source), len(source)), 1 / len(source), dtype=np.float32)),
        ("decoder", False): (read, read, uniform_decoder),
        ("decoder", True): (predicted, read, uniform_decoder),
        ("cross", True): (predicted, source, uniform_cross),
    }
    sizes = {"encoder": source_end, "decoder": target_end, "cross": source_end}
    merged: WordWeights = {}
    for (part, predicts), (queries, keys, uniform_QK) in views.items():
        if part in weights:
            weight_LHQK = weights[part][..., : len(queries), : len(keys)]
            counts = len(pair.words_read_by(part)), sizes[part][0] + 2
            merged[part, predicts] = (
                merge_token_weights(weight_LHQK, queries, keys, counts),
                merge_token_weights(uniform_QK, queries, keys, counts),
            )
    return merged


def merge_token_weights(weight_QK: Floats, queries: WordIndex, keys: WordIndex, sizes: tuple[int, int]) -> Floats:
    """Return weights between words: summed over the tokens of a key and averaged over the tokens of a query.

    `queries` and `keys` have the word of each token, and `sizes` is (J, I). Tokens of `queries` with an index of J or
    more belong to no word and are left out. A word without tokens has zeros. There may be axes before Q and K.
    """
    J, I = sizes
    query_JQ = (np.arange(J)[:, None] == queries).astype(np.float32)
    query_JQ /= np.maximum(query_JQ.sum(1, keepdims=True), 1)
    key_KI = (keys[:, None] == np.arange(I)).astype(np.float32)
    merged: Floats = query_JQ @ weight_QK @ key_KI
    return merged
