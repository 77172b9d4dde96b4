"""Translators for experiments: trained on pairs of the phrasebook, small enough for many runs.

translator = train_translator(list_pairs("train", 2000, setup), "Transformer", "demo", 1, setup, steps=200)
test = list_pairs("test", 200, setup)
bleu = score_texts(translate_texts(translator, test), test)["bleu"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from dragoman.io import write_text
from dragoman.labs.experiment import Setup
from dragoman.labs.small_models import train_run
from dragoman.metrics.metrics import compute_metrics
from dragoman.phrasebook.generate import generate_pairs
from dragoman.types import Hypothesis, Pair

SMT, TRANSFORMER = "SMT", "Transformer"
# Those of Sutskever (2014) and of Luong (2015)
NO_ATTENTION, LSTM_ATTENTION = "LSTM without attention", "LSTM with attention"
RECURRENT: Mapping[str, Any] = {"kind": "rnn", "cell": "lstm", "layers": 1, "dropout": 0.2}
SYSTEMS: Mapping[str, Mapping[str, Any]] = {  # model sections without the width
    SMT: {"kind": "smt"},
    NO_ATTENTION: {**RECURRENT, "attention": "none"},
    LSTM_ATTENTION: {**RECURRENT, "attention": "dot", "input_feeding": True},
    TRANSFORMER: {"kind": "transformer", "layers": 2, "heads": 4, "position": "rotary", "dropout": 0.1},
}
QUICK_WORDS = 5  # maximum length of the sentences of quick versions
LONGER_QUICK_WORDS = 7  # the same where shorter sentences lack what is measured, such as names
SAMPLED_PER_PAIR = 1_000  # maximum number of pairs of the phrasebook that are sampled for one that is kept


@cache
def list_pairs(
    split: str,
    count: int,
    setup: Setup,
    *,
    seed: int = 1,
    keep: Callable[[Pair], bool] | None = None,
    longest: int = QUICK_WORDS,
) -> tuple[Pair, ...]:
    """Return `count` pairs of the phrasebook that `keep` accepts, in quick versions of at most `longest` words."""

    def fits(pair: Pair) -> bool:
        return (keep is None or keep(pair)) and (not setup.quick or len(pair.source.split()) <= longest)

    sampled = SAMPLED_PER_PAIR * count if setup.quick or keep else count
    return tuple(islice(filter(fits, generate_pairs(split, sampled, seed=seed)), count))


def write_pairs(pairs: Sequence[Pair], path: Path) -> dict[str, str]:
    """Write pairs as a TSV file, with their documents if they have some, and return the corpus as in a recipe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    has_documents = any(pair.document for pair in pairs)
    columns = ([p.source, p.target, *([p.document] if has_documents else [])] for p in pairs)
    write_text(path, "".join("\t".join(row) + "\n" for row in columns))
    return {"tsv": str(path), **({"document_id": "2"} if has_documents else {})}


def train_translator(
    pairs: Sequence[Pair],
    system: str,
    name: str,
    seed: int,
    setup: Setup,
    *,
    steps: int,
    dev: Sequence[Pair] = (),
    context: int = 0,
    tokenizer: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    init_from: Path | None = None,
) -> Any:
    """Train one of SYSTEMS on pairs and return the translator.

    Quick versions have words as tokens, because then short sentences are learned in a hundred steps. `tokenizer`,
    `model` and `train` override settings. With `dev` pairs, the checkpoint with the lowest loss on them is used,
    otherwise the last one. `context` is the number of previous sentences that the model reads.
    """
    folder = setup.folder / "corpora"
    data: dict[str, Any] = {"context": context, "train": write_pairs(pairs, folder / f"{name}-{seed}.tsv")}
    if dev:
        data["dev"] = write_pairs(dev, folder / f"{name}-{seed}-dev.tsv")
    if system == SMT:
        recipe: dict[str, Any] = {"tokenizer": {"kind": "word", "joint": False}, "model": SYSTEMS[SMT], "train": {}}
        return train_run({"data": data, **recipe}, name, seed, setup)
    sizes: dict[str, Any] = setup.pick({"width": 64, "layers": 1, "dropout": 0.0}, {"width": 256})
    if system == TRANSFORMER:
        sizes["feedforward_width"] = setup.pick(128, 512)
    schedule = {
        "steps": steps,
        "tokens": setup.pick(512, 2048),
        "optimizer": "muon",
        "lr": setup.pick(3e-2, 1e-2),
        "warmup": max(steps // 10, 1),
        "schedule": "cosine",
        "validate_every": max(steps // 8, 1) if dev else 0,
        "validate_lines": 0,
        **({"metric": "loss"} if dev else {}),
    }
    recipe = {
        "data": data,
        "tokenizer": {"kind": setup.pick("word", "bpe"), "size": 3000, **(tokenizer or {})},
        "model": {**SYSTEMS[system], **sizes, **(model or {})},
        "train": {**schedule, **(train or {})},
    }
    return train_run(recipe, name, seed, setup, init_from=init_from)


def translate_sources(translator: Any, pairs: Sequence[Pair], **search: Any) -> list[Hypothesis]:
    """Translate the sources of pairs; `search` overrides search settings."""
    found: list[Hypothesis] = translator.translate([pair.source for pair in pairs], search=search, align=False)
    return found


def translate_texts(translator: Any, pairs: Sequence[Pair], **search: Any) -> list[str]:
    """Return the texts of `translate_sources`."""
    return [found.text for found in translate_sources(translator, pairs, **search)]


def score_texts(texts: Sequence[str], pairs: Sequence[Pair]) -> dict[str, float]:
    """Return BLEU, chrF and the percentage of exact translations, given one reference per text."""
    scores = compute_metrics(texts, [[pair.target for pair in pairs]], ("bleu", "chrf", "exact"))
    return {score.name: score.value for score in scores}
