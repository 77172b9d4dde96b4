"""A toy text with a known entropy, a toy rule for labels, and recipes for models of them.

In the text every character is followed by one of two characters with equal probability, so the lowest possible loss is
ln 2 per token. The label of a sentence of the toy language is "yes" if it has the word "ba", else "no".
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import yaml

from toy_run import make_sentences, write_lines

NEXT = {"a": "bc", "b": "cd", "c": "de", "d": "ef", "e": "f\n", "f": "\na", "\n": "ab"}
BACKBONES: dict[str, dict[str, object]] = {"transformer": {"layers": 1, "heads": 2}, "rnn": {"layers": 1}}
TRAIN = {
    "device": "cpu", "threads": 1, "precision": "float32", "tokens": 512, "warmup": 20, "lr": 0.01,
    "schedule": "cosine", "label_smoothing": 0.0, "log_every": 10, "save_every": 1000,
}  # fmt: skip


def babble(length: int, seed: int = 1) -> str:
    """Return at least `length` characters of the toy text, up to the end of a line."""
    random, text = Random(seed), "\n"
    while len(text) <= length or text[-1] != "\n":
        text += random.choice(NEXT[text[-1]])
    return text[1:]


def label(sentence: str) -> str:
    return "yes" if "ba" in sentence[:-1].split() else "no"


def write_recipe(path: Path, **sections: object) -> Path:
    path.write_text(yaml.safe_dump(sections))
    return path


def lm_recipe(folder: Path, backbone: str = "transformer", *, documents: str = "file", **train: object) -> Path:
    """Write a text and the recipe of a small language model; the last tenth of the text is for dev and test."""
    (folder / "text").write_bytes(babble(20_000).encode())
    return write_recipe(
        folder / f"{backbone}-{documents}.yaml",
        data={
            "train": {"text": "text", "part": [0.0, 0.9]},
            "dev": {"text": "text", "part": [0.9, 1.0]},
            "test": {"text": "text", "part": [0.9, 1.0]},
            "cache": str(folder / "cache"),
            "documents": documents,
        },
        tokenizer={"kind": "char", "byte_fallback": False},
        model={"kind": "lm", "backbone": backbone, "width": 32, "dropout": 0.0, "context": 24, **BACKBONES[backbone]},
        train={**TRAIN, "steps": 150, "validate_every": 75, **train},
    )


def classifier_recipe(folder: Path, backbone: str = "transformer", **train: object) -> Path:
    """Write TSV files of labels and sentences, and the recipe of a small classifier."""
    many = make_sentences(900)
    for name, some in (("train", many[:700]), ("dev", many[700:800]), ("test", many[800:])):
        write_lines(folder / f"{name}.tsv", (f"{label(sentence)}\t{sentence}" for sentence in some))
    corpora = {name: {"tsv": f"{name}.tsv", "columns": [1, 0]} for name in ("train", "dev", "test")}
    return write_recipe(
        folder / f"{backbone}.yaml",
        data={**corpora, "cache": str(folder / "cache")},
        tokenizer={"kind": "word", "size": 100},
        model={"kind": "classifier", "backbone": backbone, "width": 32, "dropout": 0.0, **BACKBONES[backbone]},
        train={**TRAIN, "steps": 120, "validate_every": 60, **train},
    )
