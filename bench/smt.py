"""Train a phrase-based system and leave out each group of features in turn: BLEU, words per second, time and size.

    python bench/smt.py --train F.en F.de --dev F.en F.de --test F.en F.de [--test ...] --out F.json --work DIR

Files are tokenised, lower-cased text, compressed or not; for Multi30k these are `data/task1/tok`. BLEU is computed on
these tokens, which for Multi30k is what `bleu_moses_de` reports of raw text. All variants use one alignment and one
phrase table; weights are tuned again for each, with the same seed, unless the variant is one without tuning. DIR keeps
the alignment, the table, the language models and the tuned weights, so that a benchmark that was stopped goes on.

F.json and a table F.md are written after every variant.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from dragoman.hardware import cpu_name, usable_cores
from dragoman.io import read_lines, write_atomically, write_text
from dragoman.metrics.metrics import count_bleu
from dragoman.smt.alignment import make_side, train_aligner
from dragoman.smt.compiled import Array
from dragoman.smt.decoder import NgramScorer, PhraseDecoder
from dragoman.smt.ngram import read_arpa, train_ngrams, write_arpa
from dragoman.smt.phrases import PhraseTable, build_table
from dragoman.smt.settings import (
    FEATURE_NAMES,
    LM_NAME,
    PHRASE_FEATURES,
    PRESETS,
    REORDERING_NAMES,
    DecoderSettings,
    SmtSettings,
)
from dragoman.smt.tuning import TuningState, tune_weights

Corpus = tuple[list[list[str]], list[list[str]]]


@dataclass(frozen=True)
class Variant:
    """A system with one group of features left out or one setting changed."""

    name: str
    left_out: tuple[str, ...] = ()  # features without a weight
    order: int = 5
    preset: str = "log-linear"
    tuned: bool = True
    distortion_limit: int = DecoderSettings().distortion_limit

    def initial_weights(self) -> Array:
        weights = {name: value for name, value in PRESETS[self.preset].items() if name not in self.left_out}
        return np.array([weights.get(name, 0.0) for name in FEATURE_NAMES])


VARIANTS = [
    Variant("all features"),
    Variant("no tuning", tuned=False),
    Variant("noisy channel (no tuning)", preset="noisy-channel", tuned=False),
    Variant("no reordering features", left_out=REORDERING_NAMES),
    Variant("no lexical weights", left_out=PHRASE_FEATURES[2:]),
    Variant("no backward probabilities", left_out=PHRASE_FEATURES[1::2]),
    Variant("language model of order 3", order=3),
    Variant("distortion limit 0", distortion_limit=0),
    Variant("no language model", left_out=(LM_NAME,)),
]


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.work, self.out, self.arguments = arguments.work, arguments.out, arguments
        self.work.mkdir(parents=True, exist_ok=True)
        self.train, self.dev = read_corpus(arguments.train), read_corpus(arguments.dev)
        self.tests = {Path(files[0]).name.split(".")[0]: read_corpus(files) for files in arguments.test}
        self.results: dict[str, dict[str, Any]] = {}
        record = self.work / "stages.json"
        self.stages: dict[str, dict[str, float]] = json.loads(record.read_text("utf-8")) if record.exists() else {}
        self.words: list[dict[str, int]] = [{}, {}]
        self.ids = [
            [[known.setdefault(word, len(known)) for word in words] for words in side]
            for known, side in zip(self.words, self.train, strict=True)
        ]
        if self.out.exists():
            self.results = json.loads(self.out.read_text("utf-8"))["variants"]

    def run_stage(self, name: str, write: Callable[[Path], object]) -> Path:
        """Write a file unless it is there, and record its seconds and its size."""
        path: Path = self.work / name
        if not path.exists():
            start = time.perf_counter()
            write_atomically(path, write)
            seconds = time.perf_counter() - start
            self.stages[name] = {"seconds": round(seconds, 1), "megabytes": round(path.stat().st_size / 1e6, 1)}
            write_text(self.work / "stages.json", json.dumps(self.stages))
            print(f"{name}: {seconds:.1f} s", flush=True)
        return path

    def align(self, path: Path) -> None:
        """Align the training pairs and write their links."""
        source, target = ([" ".join(words) for words in side] for side in self.train)
        aligner = train_aligner(source, target, SmtSettings().align)
        links = list(aligner.align(source, target))
        flat = np.array([link for pair in links for link in pair], np.int64).reshape(-1, 2)
        starts = np.concatenate([[0], np.cumsum([len(pair) for pair in links])])
        save_file({"starts": starts, "source": flat[:, 0].copy(), "target": flat[:, 1].copy()}, path)

    def extract(self, alignment: Path, path: Path) -> None:
        """Extract and score the phrase pairs."""
        links = load_file(alignment)
        sides = make_side(self.ids[0]), make_side(self.ids[1])
        sizes = len(self.words[0]), len(self.words[1])
        build_table(*sides, sizes, (links["starts"], links["source"], links["target"])).save(path, {})

    def train_lm(self, order: int, path: Path) -> None:
        """Train a language model on the target side."""
        with path.open("w", encoding="utf-8") as file:
            write_arpa(train_ngrams((" ".join(words) for words in self.train[1]), order), file)

    def make_decoder(self, variant: Variant, weights: Array) -> PhraseDecoder:
        alignment = self.run_stage("alignment.safetensors", self.align)
        table = self.run_stage("table.safetensors", lambda path: self.extract(alignment, path))
        arpa = self.run_stage(f"lm{variant.order}.arpa", lambda path: self.train_lm(variant.order, path))
        settings = DecoderSettings(distortion_limit=variant.distortion_limit)
        lm = NgramScorer(read_arpa(arpa))
        return PhraseDecoder(self.words[0], list(self.words[1]), PhraseTable.load(table), lm, weights, settings)

    def tune(self, decoder: PhraseDecoder, variant: Variant) -> tuple[Array, int, float | None]:
        """Return the tuned weights of a variant, the number of rounds and the seconds (None if interrupted)."""
        path = self.work / f"tuning {variant.name}.safetensors"
        start, resumed = time.perf_counter(), path.exists()
        ratios = [sum(map(len, target)) / sum(map(len, source)) for source, target in (self.train, self.dev)]

        def translate(weights: Array) -> list[Any]:
            decoder.set_weights(weights)
            return list(decoder.decode_all(self.dev[0], self.arguments.n_best))

        def keep(state: TuningState) -> None:
            write_atomically(path, state.save)
            print(f"{variant.name}, round {len(state.curve) - 1}: {100 * state.curve[-1].bleu:.2f}", flush=True)

        state = tune_weights(
            translate, self.dev[1], decoder.weights, rounds=self.arguments.rounds,
            length_factor=ratios[0] / ratios[1], seed=self.arguments.seed,
            state=TuningState.load(path) if resumed else None, keep=keep,
        )  # fmt: skip
        return state.best.weights, len(state.curve) - 1, None if resumed else round(time.perf_counter() - start, 1)

    def run(self, variant: Variant) -> None:
        """Tune and score a variant."""
        decoder = self.make_decoder(variant, variant.initial_weights())
        result: dict[str, Any] = {}
        if variant.tuned:
            weights, result["rounds"], result["tuning_seconds"] = self.tune(decoder, variant)
            decoder.set_weights(weights)
        words = seconds = 0.0
        for name, (source, target) in {"dev": self.dev, **self.tests}.items():
            next(decoder.decode_all(source[:1]))  # compile outside the measurement
            start = time.perf_counter()
            outputs = [" ".join(best.words) for [best, *_] in decoder.decode_all(source)]
            seconds, words = seconds + time.perf_counter() - start, words + sum(map(len, source))
            references = [" ".join(reference) for reference in target]
            result[name] = round(count_bleu(outputs, [references], tokenize="none").value, 2)
        result["words_per_second"] = round(words / seconds)
        result["weights"] = dict(zip(FEATURE_NAMES, np.round(decoder.weights, 4).tolist(), strict=True))
        self.results[variant.name] = result
        print(variant.name, {name: value for name, value in result.items() if name != "weights"}, flush=True)
        self.write()

    def write(self) -> None:
        """Write all results so far as JSON and as a table."""
        about = {
            "date": str(date.today()), "machine": cpu_name(), "cores": usable_cores(),
            "load": [round(value, 1) for value in os.getloadavg()], "python": platform.python_version(),
            "pairs": len(self.train[0]), "rounds": self.arguments.rounds, "n_best": self.arguments.n_best,
            "seed": self.arguments.seed,
        }  # fmt: skip
        write_text(self.out, json.dumps({**about, "stages": self.stages, "variants": self.results}, indent=1) + "\n")
        columns = ["dev", *self.tests, "words_per_second", "tuning_seconds"]
        rows = [["system", *columns]] + [
            [name, *(str(result.get(column) or "-") for column in columns)] for name, result in self.results.items()
        ]
        stages = [["file", "seconds", "MB"]] + [
            [name, str(stage["seconds"]), str(stage["megabytes"])] for name, stage in self.stages.items()
        ]
        head = f"# Phrase-based system, {about['pairs']:,} pairs\n\nBLEU of tokens; "
        conditions = f"{about['cores']} cores, {about['machine']}, load {about['load'][0]}; seed {about['seed']}."
        text = f"{head}{conditions}\n\n{render_table(rows)}\n{render_table(stages)}"
        write_text(self.out.with_suffix(".md"), text)


def read_corpus(files: Sequence[str]) -> Corpus:
    source, target = ([line.split() for line in read_lines(Path(file))] for file in files)
    if len(source) != len(target):
        raise SystemExit(f"{files[0]} has {len(source):,} lines, {files[1]} has {len(target):,}")
    return source, target


def render_table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("train", "dev"):
        parser.add_argument(f"--{name}", nargs=2, required=True, metavar="FILE")
    parser.add_argument("--test", nargs=2, action="append", required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of tuning")
    parser.add_argument("--n-best", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    bench = Bench(parser.parse_args())
    for variant in VARIANTS:
        if variant.name not in bench.results:
            bench.run(variant)


if __name__ == "__main__":
    main()
