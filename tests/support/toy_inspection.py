"""Inspections made by hand: of a translation, of long and of hostile texts, of a classifier and of phrases.

`python tests/support/toy_inspection.py PAGE` writes the page of `make_translation`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dragoman.inspection.records import (
    AttentionMap,
    Attribution,
    Floats,
    Inspection,
    PhraseUse,
    Prediction,
    SearchNode,
    SearchResultText,
    SearchTrace,
)

SOURCE = ["▁Das", "▁alte", "▁Haus", "▁am", "▁Fluss", "▁ist", "▁gestern", "▁ab", "ge", "br", "ann", "t", "."]
TARGET = ["▁The", "▁old", "▁house", "▁by", "▁the", "▁river", "▁burn", "ed", "▁down", "▁yesterday", ".", "</s>"]
ALIGNMENT = [0, 1, 2, 3, 3, 4, 10, 9, 7, 6, 12, 12]  # for each target token, its source token
ALTERNATIVES = ["▁A", "▁ancient", "▁building", "▁on", "▁a", "▁stream", "▁was", "t", "▁out", "▁last", "!", "."]
SMT_SOURCE, SMT_TARGET = "Er hat gestern das Haus verkauft .", "He sold the house yesterday ."
HOSTILE = [
    "<script>alert(1)</script>",
    "▁<img src=x onerror=alert(1)>",
    "▁</script><script>alert(2)</script>",
    "\"'&amp;{{ 7*7 }}{% x %}",
    "▁שלום",
    "\u202eevil\u202c",
    "Z̸̡̛̤͑a̷̧͝l̵̢̛g̶o̴",
    "a\x00b\tc\nd\u2028e",
    "  two  spaces ",
    "",
    "▁",
    "long" * 1250,
    "👨‍👩‍👧",
    "__proto__",
]


def make_attention(
    queries: int, keys: int, peaks: Sequence[float], *, layers: int, heads: int, causal: bool = False
) -> Floats:
    """Return random attention weights: heads look at the peak of a query, near it, at the first key or everywhere."""
    random = np.random.default_rng(queries + keys + layers)
    distance_QK = np.abs(np.arange(keys)[None] - np.asarray(peaks)[:, None])
    logit_LHQK = random.normal(0, 0.6, (layers, heads, queries, keys))
    for layer in range(layers):
        for head in range(heads):
            sharpness = [3.5, 1.5, 0.5, 0.1][(head + layer) % 4] * (0.4 + layer / max(1, layers - 1))
            shift = (head % 3 - 1) * (head > 3)
            logit_LHQK[layer, head] -= sharpness * np.abs(distance_QK + shift)
            logit_LHQK[layer, head, :, 0] += 2.5 * ((head + layer) % 4 == 3)
    if causal:
        logit_LHQK[..., np.triu(np.ones((queries, keys), dtype=bool), 1)] = -np.inf
    weight_LHQK = np.exp(logit_LHQK - logit_LHQK.max(-1, keepdims=True))
    weight_LHQK /= weight_LHQK.sum(-1, keepdims=True)
    return np.asarray(weight_LHQK, dtype=np.float32)


def make_inspection(
    source: Sequence[str], target: Sequence[str], peaks: Sequence[float], *, layers: int = 4, heads: int = 8
) -> Inspection:
    """Return an inspection with attention, attributions and predictions of these tokens."""
    inputs = ["<s>", *target[:-1]]
    length, width = len(target), len(source)
    encoder = make_attention(width, width, range(width), layers=layers, heads=heads)
    decoder = make_attention(length, length, range(length), layers=layers, heads=heads, causal=True)
    cross = make_attention(length, width, peaks, layers=layers, heads=heads)
    random = np.random.default_rng(0)
    noise_TS = random.normal(0, 0.08, (length, width)).astype(np.float32)
    prefix_TT = np.tril(decoder[-1, 0] - random.uniform(0, 0.3, (length, length))).astype(np.float32)
    entropies = random.gamma(2.0, 0.8, length)
    predictions = []
    for step, token in enumerate(target):
        other = ALTERNATIVES[step % len(ALTERNATIVES)]
        share = float(np.clip(0.95 - entropies[step] / 6, 0.1, 0.95))
        rest = 1 - share
        top = [(token, share), (other, rest * 0.6), ("▁it", rest * 0.2), ("▁this", rest * 0.1)]
        top.sort(key=lambda pair: -pair[1])
        rank = 1 + [name for name, _ in top].index(token)
        predictions.append(Prediction(token, math.log(share), rank, float(entropies[step]), top))
    return Inspection(
        run="runs/de-en",
        kind="transformer",
        source=" ".join(source),
        target=" ".join(target),
        is_given=False,
        tokens={"source": source, "input": inputs, "target": target},
        attentions=[
            AttentionMap("encoder", "encoder", "source", "source", encoder),
            AttentionMap("decoder", "decoder", "input", "input", decoder),
            AttentionMap("cross", "cross-attention", "input", "source", cross, best_layer=layers - 2),
        ],
        predictions=predictions,
        attributions=[
            Attribution("occlusion", "occlusion", cross[-2].mean(0) * 3 + noise_TS, prefix_TT),
            Attribution("gradient", "gradient × input", cross[-1, 0] * 0.02 + noise_TS / 20, prefix_TT / 30),
        ],
    )


def make_search(target: Sequence[str], width: int = 3) -> SearchTrace:
    """Return a beam search whose best path is the target: at each step, `width` are kept and as many are pruned."""
    nodes = [SearchNode(-1, 0, "", 0.0, 0.0, "best")]
    best, rivals = 0, [0]
    for step, token in enumerate(target, 1):
        parent = nodes[best]
        logp = parent.logp - 0.25 - 0.1 * (step % 3)
        nodes.append(SearchNode(best, step, token, logp, logp / step, "best"))
        best = len(nodes) - 1
        kept = []
        for number in range(1, 2 * width):
            origin = rivals[number % len(rivals)]
            rival = nodes[origin].logp - 0.6 - 0.35 * number
            word = ALTERNATIVES[(step - 1 + (number - 1) * 5) % len(ALTERNATIVES)]
            is_end = step > 3 and number == 1 and step % 5 == 0
            state = "finished" if is_end else "kept" if number < width else "pruned"
            nodes.append(SearchNode(origin, step, "</s>" if is_end else word, rival, rival / step, state))
            if state == "kept":
                kept.append(len(nodes) - 1)
        rivals = [best, *kept]
    text = "The old house by the river burned down yesterday."
    results = [
        SearchResultText(text, nodes[best].logp, nodes[best].score),
        SearchResultText("A building by the river burned out last night.", nodes[best].logp - 2.1, -0.61),
    ]
    return SearchTrace(
        f"beam {width}", results, nodes, ["a length penalty of 1.0 divides log p by the number of tokens"]
    )


def make_translation() -> Inspection:
    """Return an inspection with all sections of a neural model."""
    greedy = replace(make_search(TARGET, 1), title="beam 1", notes=[])
    best = SearchResultText("The old house by the river burned down yesterday.", -3.6, -0.3)
    return replace(
        make_inspection(SOURCE, TARGET, ALIGNMENT),
        source="Das alte Haus am Fluss ist gestern abgebrannt.",
        target="The old house by the river burned down yesterday.",
        searches=[greedy, make_search(TARGET, 4), SearchTrace("exhaustive", [best])],
        notes=["The source was split into 13 tokens; 2 of them are rare in the training data."],
    )


def make_long(length: int = 200) -> Inspection:
    """Return an inspection of 200 tokens, 6 layers and 8 heads."""
    source = [f"{'▁' if index % 3 else ''}w{index}" for index in range(length)]
    target = [f"▁t{index}" for index in range(length)]
    inspection = make_inspection(source, target, range(length), layers=6)
    return replace(inspection, searches=[make_search(target)])


def make_hostile() -> Inspection:
    """Return an inspection whose tokens look like HTML, change the direction of text, or are very long."""
    inspection = make_inspection(HOSTILE, HOSTILE, range(len(HOSTILE)), layers=2, heads=2)
    text = "".join(HOSTILE)
    search = make_search(HOSTILE)
    search = replace(
        search, title=HOSTILE[0], results=[SearchResultText(text, -math.inf, math.nan)], notes=[HOSTILE[1]]
    )
    phrases = [PhraseUse(token, token, (i, i + 1), (i, i + 1), {HOSTILE[0]: 1.0}) for i, token in enumerate(HOSTILE)]
    return replace(
        inspection,
        run=HOSTILE[2],
        kind=HOSTILE[1],
        source=text,
        target=text,
        searches=[search],
        phrases=phrases,
        notes=[text],
    )


def make_classifier() -> Inspection:
    """Return an inspection of a classifier, which has neither a decoder nor a search."""
    source = ["▁What", "▁a", "▁wonder", "ful", "▁film", "!"]
    attention = make_attention(len(source), len(source), range(len(source)), layers=2, heads=2)
    label = Prediction("positive", math.log(0.9), 1, 0.6, [("positive", 0.9), ("neutral", 0.07), ("negative", 0.03)])
    value_TS = np.array([[0.1, -0.2, 0.8, 0.4, 0.1, 0.3]], dtype=np.float32)
    return Inspection(
        run="runs/mood",
        kind="classifier",
        source="What a wonderful film!",
        target="positive",
        is_given=False,
        tokens={"source": source, "target": ["positive"]},
        attentions=[AttentionMap("encoder", "encoder", "source", "source", attention)],
        predictions=[label],
        attributions=[Attribution("gradient", "gradient × input", value_TS)],
    )


def make_phrases() -> Inspection:
    """Return an inspection of a phrase-based system."""
    source, target = (
        ["Er", "hat", "gestern", "das", "Haus", "verkauft", "."],
        ["He", "sold", "the", "house", "yesterday", "."],
    )
    pairs = [((0, 1), (0, 1)), ((5, 6), (1, 2)), ((3, 5), (2, 4)), ((2, 3), (4, 5)), ((6, 7), (5, 6))]
    phrases = [
        PhraseUse(
            " ".join(source[slice(*there)]),
            " ".join(target[slice(*here)]),
            there,
            here,
            {
                "p(t|s)": -0.3 - 0.1 * here[0],
                "p(s|t)": -0.4,
                "lm": -1.2 * (here[1] - here[0]),
                "distortion": -float(here[0] % 3),
            },
        )
        for there, here in pairs
    ]
    nodes = [SearchNode(-1, 0, "", 0.0, 0.0, "best")]
    for number, phrase in enumerate(phrases):
        step = nodes[-1].step + phrase.source_span[1] - phrase.source_span[0]
        nodes.append(SearchNode(number, step, phrase.target, -1.1 * step, -1.2 * step, "best", phrase.source))
    text = " ".join(target)
    search = SearchTrace("stack decoding", [SearchResultText(text, -7.7, -8.4)], nodes)
    return Inspection(
        "runs/smt",
        "smt",
        " ".join(source),
        text,
        False,
        {"source": source, "target": target},
        searches=[search],
        phrases=phrases,
    )


if __name__ == "__main__":
    make_translation().save(sys.argv[1])
