"""A phrase-based system of the toy language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from toy_run import run_process, write_corpus

# No test depends on the time of the clock or the locale. Tuning is needed: the toy language reverses the word order.
MODEL: dict[str, Any] = {
    "kind": "smt",
    "order": 3,
    "max_phrase": 4,
    "tuning_rounds": 2,
    "n_best": 20,
    "align": {"hmm": 3},
}


def write_smt_recipe(path: Path, **sections: dict[str, Any]) -> Path:
    recipe: dict[str, dict[str, Any]] = {
        "data": {
            "train": {"source": "train.src", "target": "train.trg"},
            "dev": {"source": "dev.src", "target": "dev.trg"},
            "cache": str(path.parent / "cache"),
        },
        "tokenizer": {"kind": "word"},
        "model": MODEL,
    }
    path.write_text(yaml.safe_dump({name: section | sections.get(name, {}) for name, section in recipe.items()}))
    return path


def train_smt(folder: Path) -> None:
    write_corpus(folder)
    output = run_process("train", write_smt_recipe(folder / "recipe.yaml"), "--out", folder / "run")
    assert output.code == 0, output.err
    assert "tuning round 2" in output.err
