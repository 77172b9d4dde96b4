"""Measure a trained run for the report of a comparison.

The measurements are: scores, also by source length; speed, size and training cost; the learning curve; gradient norms
by the distance between tokens; and, for the phrasebook, the accuracy of grammatical agreement by the distance between
the words that must agree. They are written as JSON beside the run folder, with all that the report shows about the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.data.corpus import CorpusSettings, collect_references, phrasebook_direction, read_pairs
from dragoman.evaluation.report import select_scores
from dragoman.evaluation.systems import EvaluationSet, SystemOutput, predict_lines, read_test_corpus, score_phenomena
from dragoman.inference.loading import load
from dragoman.inference.model_card import read_events
from dragoman.inference.predictor import eval_mode
from dragoman.inference.translator import Translator
from dragoman.inspection.gradient_flow import measure_gradient_flow
from dragoman.metrics.metrics import compute_metrics
from dragoman.phrasebook.documents import generate_document_phrases
from dragoman.phrasebook.generate import Phrase, generate_phrases, judge_phenomena
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.types import Line, Pair

Bin = tuple[int, int | None]  # inclusive bounds; None: no upper bound
MEASUREMENT_VERSION = 2  # runs measured by another version are measured again
# Default metrics by task, if data.metrics is empty; the first one is plotted.
TASK_METRICS = {"translate": ("bleu", "chrf"), "classify": ("accuracy",), "generate": ("loss", "perplexity")}
TIMED_SENTENCES = 256  # translated greedily to measure speed
GRADIENT_SENTENCES = 64
MIN_BIN_FRACTION = 0.02  # fraction of all lines; a smaller bin is merged with the previous one
# Number of words of the source, split at spaces.
LENGTH_BINS = ((1, 4), (5, 8), (9, 12), (13, 16), (17, 20), (21, 30), (31, 40), (41, 60), (61, None))
# Distance between the first and the last of the words that must agree, as the difference of their positions.
DISTANCE_BINS = ((1, 1), (2, 2), (3, 4), (5, 6), (7, 8), (9, None))


def measure_run(run: Path, *, device: str) -> dict[str, Any]:
    predictor = load(run, device=device)
    result = {"version": MEASUREMENT_VERSION, "parameters": predictor.parameter_count, "training": read_training(run)}
    if isinstance(predictor, Translator):
        return result | measure_translator(predictor)
    tests = {
        name: describe_scores(predict_lines(predictor, read_test_corpus(predictor, corpus)))
        for name, corpus in list_test_corpora(predictor.recipe).items()
    }
    return result | {"tests": tests}


def describe_scores(output: SystemOutput) -> dict[str, Any]:
    result = output.result()
    scores = select_scores(result).items()
    return {
        "lines": result["lines"],
        "scores": {metric: score["value"] for metric, score in scores},
        "signatures": {metric: score["signature"] for metric, score in scores},
    }


def read_training(run: Path) -> dict[str, Any]:
    """Return the cost of training and the learning curve: the validation loss, with the seconds and FLOPs spent so far.

    The speed is the median of the logged speeds, which slow first steps and pauses for validation do not change.
    """
    folder = RunFolder(run)
    if folder.load_recipe().model.kind == "smt":  # no steps, and no loss to plot
        spent = folder.load_provenance()["training"]
        return {
            "steps": 0,
            "flops": 0.0,
            "skipped": 0,
            "device": "cpu",
            "tokens_per_second": None,
            "curve": [],
            **spent,
        }
    state, curve, speeds = folder.load_state(), [], []
    spent = {"seconds": 0.0, "flops": 0.0}
    for event in read_events(folder.metrics_file):
        if event["event"] == "train":
            spent = {name: event.get(name) for name in spent}
            speeds.append(event["tokens_per_second"])
        else:
            curve.append({"step": event["step"], **spent, "loss": event["loss"]})
    return {
        "steps": state["step"],
        **{key: state[key] for key in ("seconds", "tokens", "flops", "peak_memory", "skipped")},
        "device": state["choices"]["device"],  # choices: what training decided about the execution
        "tokens_per_second": float(np.median(speeds)) if speeds else None,
        "curve": curve,
    }


def choose_metrics(recipe: Recipe) -> Sequence[str]:
    """Return the metrics in a recipe's data.metrics, or the default metrics of its task."""
    return recipe.data.metrics or TASK_METRICS[recipe.model.task]


def list_test_corpora(recipe: Recipe) -> dict[str, CorpusSettings]:
    """Return the test corpora, or the dev corpora if there are none, by names that fit into a table heading."""
    split = "test" if recipe.data.test else "dev"
    corpora: dict[str, CorpusSettings] = {}
    for corpus in getattr(recipe.data, split):
        corpus_split = corpus.split or split
        name = corpus_split if corpus.phrasebook else Path(corpus.files[0]).name + corpus.selection_text
        key = name if name not in corpora else f"{name} ({len(corpora) + 1})"
        corpora[key] = corpus.model_copy(update={"split": corpus_split})
    return corpora


def measure_translator(translator: Translator) -> dict[str, Any]:
    """Return quality, speed and gradients of a translation model."""
    direction, metrics = translator.recipe.data.direction, choose_metrics(translator.recipe)
    corpora = list_test_corpora(translator.recipe)
    read = partial(
        read_pairs, direction=direction, trees=translator.reads_trees, context=translator.recipe.data.context
    )
    tests = {name: list(read(corpus, split=corpus.split)) for name, corpus in corpora.items()}
    all_pairs = [pair for pairs in tests.values() for pair in pairs]
    translate_pairs(translator, all_pairs[:8])  # warm up: the first call is slow
    results: dict[str, dict[str, Any]] = {}
    for name, pairs in tests.items():
        start = time.monotonic()
        texts = translate_pairs(translator, pairs)
        seconds = time.monotonic() - start
        test = EvaluationSet([pair.source for pair in pairs], collect_references(pairs))
        results[name] = {
            **describe_scores(SystemOutput(test, texts, metrics)),
            "seconds": seconds,
            "lengths": measure_lengths(pairs, texts, metrics[0]),
        }
        count = corpora[name].phrasebook  # the number of generated pairs; 0 for files
        if count and corpora[name].view == "translation":
            split, seed = corpora[name].split, corpora[name].seed
            corpus_direction = phrasebook_direction(corpora[name], direction)
            generate = generate_document_phrases if corpora[name].documents else generate_phrases
            phrases = list(generate(split, count, seed=seed, direction=corpus_direction))
            results[name]["phenomena"] = score_phenomena(phrases, texts)
            results[name]["distances"] = measure_distances(phrases, texts)
    timed_pairs, start = all_pairs[:TIMED_SENTENCES], time.monotonic()
    translate_pairs(translator, timed_pairs, beam=1)
    speed = {  # sentences per second, with greedy search and with the beam size of the recipe
        "greedy": len(timed_pairs) / (time.monotonic() - start),
        "beam": len(all_pairs) / sum(result["seconds"] for result in results.values()),
        "width": translator.recipe.search.beam,
    }
    measured = {"tests": results, "speed": speed}
    if translator.recipe.model.kind == "smt":  # has no gradients
        return measured
    return {**measured, "gradient": measure_gradients(translator, all_pairs[:GRADIENT_SENTENCES])}


def translate_pairs(translator: Translator, pairs: Sequence[Pair], *, beam: int | None = None) -> list[str]:
    """Translate the sources, with their tags and, if the model uses them, their contexts and trees."""
    trees = [pair.tree for pair in pairs] if translator.reads_trees else None
    lines = [Line(pair.source, tag=pair.tag, context=pair.context) for pair in pairs]
    return [hypothesis.text for hypothesis in translator.translate(lines, beam=beam, trees=trees, align=False)]


def measure_lengths(pairs: Sequence[Pair], texts: Sequence[str], metric: str) -> list[dict[str, Any]]:
    """Return the score by source length: the metric on the sentences in each bin of LENGTH_BINS."""

    def score(indices: Sequence[int]) -> float:
        references = collect_references([pairs[index] for index in indices])
        return compute_metrics([texts[index] for index in indices], references, [metric])[0].value

    return measure_bins([len(pair.source.split()) for pair in pairs], LENGTH_BINS, score)


def measure_distances(phrases: Sequence[Phrase], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the percentage of correct grammatical phenomena, by the distance between their first and last word."""
    judgements = [  # the distance, and whether the phenomenon is translated correctly
        (max(phenomenon.words) - min(phenomenon.words), correct)
        for phrase, text in zip(phrases, texts, strict=True)
        for phenomenon, correct in judge_phenomena(phrase, text)
    ]

    def score(indices: Sequence[int]) -> float:
        return 100 * sum(judgements[index][1] for index in indices) / len(indices)

    return measure_bins([distance for distance, _ in judgements], DISTANCE_BINS, score)


def measure_bins(
    numbers: Sequence[int], bins: Sequence[Bin], score: Callable[[Sequence[int]], float]
) -> list[dict[str, Any]]:
    """Return the score of the items in each bin. An item belongs to the bin that contains its number in `numbers`.

    `score` is called with the indices of the items in a bin. A bin with too few items is merged with the previous one.
    """
    contents: list[tuple[Bin, list[int]]] = []  # the bins that are not empty, with the indices of their items
    for low, high in bins:
        items = [index for index, number in enumerate(numbers) if low <= number and (high is None or number <= high)]
        if items and contents and len(items) < MIN_BIN_FRACTION * len(numbers):
            (previous_low, _), previous_items = contents.pop()
            contents.append(((previous_low, high), previous_items + items))
        elif items:
            contents.append(((low, high), items))
    # The key "lines" has the number of items, which may also be phenomena.
    return [{"low": low, "high": high, "lines": len(items), "value": score(items)} for (low, high), items in contents]


def measure_gradients(translator: Translator, pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """Return gradient norms by token distance (inspection/gradient_flow.py), for the first segment of each line."""
    examples = [
        segment.make_example(translator.tokenizers.target.encode(pair.target))
        for index, pair in enumerate(pairs)
        for segment in islice(translator.split_line(Line(pair.source), tree=pair.tree, line_index=index), 1)
    ]
    lengths = [(len(example.source) + 1, len(example.target) + 1) for example in examples]  # EOS included
    plan = BatchPlan([[index] for index in range(len(examples))], Widths(*map(max, zip(*lengths, strict=True))))
    batch = collate_pairs(plan, examples).to(translator.device)
    with eval_mode(translator.model), torch.enable_grad():
        flow = measure_gradient_flow(translator.model, batch)
    return {"target": flow.target, "source": flow.source}
