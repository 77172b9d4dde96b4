"""A phrase-based translation system from text to text: `SystemTrainer` trains it in stages, `load_system` loads it.

Stages, with the files that they write:

    prepare   tokenizer/, casing.json                  the words of both languages, and how they are usually written
    align     checkpoints/alignment.safetensors        which words are translations of each other
    phrases   model.safetensors                        phrase pairs with their scores
    lm        lm.arpa                                  n-grams of the target language
    tune      weights.json                             weights of the log-linear model, and how tuning found them

Every file is written atomically, and a stage whose file exists is skipped. Stages read the files of earlier stages, not
their results in memory. So training that was interrupted continues after the last finished stage (within tuning, after
the last finished round), and the result is the same to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, tee
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dragoman.data.tokenizers import Tokenizer, Tokenizers, WordTokenizer
from dragoman.errors import UserError
from dragoman.io import (
    digest_bytes,
    digest_file,
    format_json,
    read_lines,
    remove_abandoned,
    write_atomically,
    write_text,
)
from dragoman.progress import Report
from dragoman.smt.alignment import IterationReport, make_side, train_aligner
from dragoman.smt.casing import Truecaser
from dragoman.smt.compiled import Array
from dragoman.smt.decoder import Derivation, NgramScorer, PhraseDecoder
from dragoman.smt.ngram import read_arpa, train_ngrams, write_arpa
from dragoman.smt.phrases import PhraseTable, build_table
from dragoman.smt.settings import FEATURE_NAMES, SmtSettings
from dragoman.smt.tuning import TuningRound, TuningState, tune_weights
from dragoman.types import SPECIALS

TABLE, LM_FILE = "model.safetensors", "lm.arpa"
TOKENIZER, CASING, WEIGHTS = "tokenizer", "casing.json", "weights.json"
INPUTS, LINKS, TUNING = "inputs.json", "alignment.safetensors", "tuning.safetensors"  # in checkpoints/
Sentences = list[list[str]]
MetricsFunction = Callable[[str, int, Mapping[str, float | str]], object]  # stage, iteration, values


@dataclass(frozen=True)
class PhraseTranslation:
    """A translation by a phrase-based system: the text, and the derivation that explains it."""

    text: str
    tokens: list[str]  # spelled as they stand in the text, with a mark for the space before a word
    source_tokens: list[str]
    derivation: Derivation

    @property
    def features(self) -> dict[str, float]:
        return dict(zip(FEATURE_NAMES, self.derivation.features.tolist(), strict=True))

    def alignment(self) -> list[list[float]]:
        """Return a row for each target token, with equal weights on its linked source tokens; all rows sum to one.

        A token without links has equal weights on all source tokens.
        """
        weights = np.zeros((len(self.tokens), len(self.source_tokens)))
        for i, j in self.derivation.links:
            weights[j, i] = 1.0
        weights[weights.sum(1) == 0] = 1.0
        rows: list[list[float]] = (weights / np.maximum(weights.sum(1, keepdims=True), 1.0)).tolist()
        return rows


class PhraseSystem:
    """A trained system: text to tokens, tokens to the best derivations, and back to text."""

    def __init__(
        self,
        settings: SmtSettings,
        decoder: PhraseDecoder,
        casing: tuple[Truecaser, Truecaser],
        tokenizer: type[WordTokenizer],
    ) -> None:
        self.settings, self.decoder, self.casing, self.tokenizer = settings, decoder, casing, tokenizer

    @property
    def parameter_count(self) -> int:
        """The number of learned values: scores of phrase pairs, n-gram probabilities and weights."""
        table, lm = self.decoder.table, self.decoder.lm.trie
        return table.features.size + table.reordering.size + lm.log_prob.size + lm.backoff.size + len(FEATURE_NAMES)

    def translate(
        self, lines: Iterable[str], *, n_best: int = 1, stack: int | None = None
    ) -> Iterator[list[PhraseTranslation]]:
        """Yield up to `n_best` different translations of each line, the best first.

        `stack` is the maximum number of hypotheses per stack; by default that of the settings.
        """
        originals, copies = tee(self.tokenizer.split(line) for line in lines)
        sentences = (self.casing[0].truecase(tokens) for tokens in copies)
        # Several derivations may have the same words, so more of them are needed than different translations.
        derivation_count = n_best if n_best == 1 else 5 * n_best
        for derivations in self.decoder.decode_all(sentences, derivation_count, stack):
            source = self.format_tokens(next(originals))
            best: dict[str, PhraseTranslation] = {}
            for derivation in derivations:
                tokens = self.casing[1].recase(derivation.words)
                text = self.join_tokens(tokens)
                if text not in best and len(best) < n_best:
                    best[text] = PhraseTranslation(text, self.format_tokens(tokens), source, derivation)
            yield list(best.values())

    def force(self, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[list[str], Derivation | None]]:
        """Yield the target tokens of each pair of texts, and the best derivation of exactly these tokens, if any."""
        tokens = ([self.tokenizer.split(text) for text in pair] for pair in pairs)
        cased = ([caser.truecase(side) for caser, side in zip(self.casing, pair, strict=True)] for pair in tokens)
        for_decoder, for_caller = tee(cased)
        for derivation in self.decoder.force_all((source, target) for source, target in for_decoder):
            yield self.format_tokens(next(for_caller)[1]), derivation

    def join_tokens(self, tokens: Sequence[str]) -> str:
        return self.tokenizer.from_symbols(tokens).decode(range(len(SPECIALS), len(SPECIALS) + len(tokens)))

    def format_tokens(self, tokens: Sequence[str]) -> list[str]:
        """Return tokens as they stand in a text, with a mark for the space before a word."""
        return self.tokenizer.from_symbols(tokens).ids_to_tokens(range(len(SPECIALS), len(SPECIALS) + len(tokens)))


class SystemTrainer:
    """The training of one system in a folder.

    `about` has texts for the header of the phrase table. `write_metrics` is called after every iteration of a stage,
    `before_stage` with the name of a stage before it begins, so that metrics of an interrupted attempt can be removed.
    """

    def __init__(
        self,
        folder: Path,
        settings: SmtSettings,
        tokenizer: type[WordTokenizer],
        *,
        seed: int = 1,
        report: Report | None = None,
        about: Mapping[str, str] | None = None,
        write_metrics: MetricsFunction = lambda *_: None,
        before_stage: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.folder, self.settings, self.tokenizer, self.seed = folder, settings, tokenizer, seed
        self.report, self.about = report or Report(quiet=True), dict(about or {})
        self.write_metrics, self.before_stage = write_metrics, before_stage
        self.checkpoints = folder / "checkpoints"

    def train(self, pairs: tuple[list[str], list[str]], dev_pairs: tuple[list[str], list[str]]) -> None:
        """Train a system on sources and targets, or go on where an earlier call with the same pairs was stopped."""
        split = self.tokenizer.split
        sides = [[split(text) for text in texts] for texts in pairs]
        dev = [[split(text) for text in texts] for texts in dev_pairs]
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.check_inputs(digest_bytes(*("\n".join(map(" ".join, side)).encode() for side in (*sides, *dev))))
        for folder in (self.folder, self.checkpoints):
            remove_abandoned(folder, age=0.0)  # what a killed training was writing
        casers = [Truecaser.train(side) for side in sides]
        source, target = ([caser.truecase(tokens) for tokens in side] for caser, side in zip(casers, sides))
        self.run_stage(
            "prepare",
            self.folder / CASING,
            lambda path: path.write_text(format_json([vars(caser) for caser in casers]), "utf-8"),
        )
        self.run_stage("prepare", self.folder / TOKENIZER, lambda path: self.make_tokenizers(source, target).save(path))
        self.run_stage("align", self.checkpoints / LINKS, lambda path: self.align_pairs(source, target, path))
        self.run_stage("phrases", self.folder / TABLE, lambda path: self.extract_phrases(source, target, path))
        self.run_stage("lm", self.folder / LM_FILE, lambda path: self.train_language_model(target, casers[1], path))
        # A dev set has longer or shorter references than the training text, which tuning corrects (see tuning.py).
        ratios = [sum(map(len, targets)) / max(sum(map(len, sources)), 1) for sources, targets in (sides, dev)]
        length_factor = ratios[0] / ratios[1] if ratios[1] else 1.0
        dev = [[caser.truecase(tokens) for tokens in side] for caser, side in zip(casers, dev, strict=True)]
        self.run_stage("tune", self.folder / WEIGHTS, lambda path: self.tune_weights(dev, length_factor, path))
        (self.checkpoints / TUNING).unlink(missing_ok=True)

    def check_inputs(self, data_digest: str) -> None:
        """Save settings and digests of the data; refuse to continue training that was begun with others."""
        path = self.checkpoints / INPUTS
        inputs: dict[str, Any] = {"settings": self.settings.model_dump(mode="json"), "data": data_digest}
        inputs |= {"tokenizer": self.tokenizer.__name__, "seed": self.seed}
        if self.settings.lm_text:
            inputs["lm_text"] = digest_file(Path(self.settings.lm_text))
        if not path.exists():
            write_text(path, format_json(inputs))
        elif read_system_file(path) != json.loads(format_json(inputs)):
            raise UserError(
                f"{str(self.folder)!r} was begun with other settings or data; restore them, or choose another folder"
            )

    def run_stage(self, stage: str, path: Path, write: Callable[[Path], object]) -> None:
        """Write the file or folder of a stage, unless an earlier call has."""
        if not path.exists():
            self.before_stage(stage)
            write_atomically(path, write)

    def make_tokenizers(self, source: Sentences, target: Sentences) -> Tokenizers:
        words = [list(dict.fromkeys(chain.from_iterable(side))) for side in (source, target)]
        return Tokenizers(self.tokenizer.from_symbols(words[0]), self.tokenizer.from_symbols(words[1]))

    def align_pairs(self, source: Sentences, target: Sentences, path: Path) -> None:
        """Learn to align the pairs, and write the links of each."""
        lines = [" ".join(tokens) for tokens in source], [" ".join(tokens) for tokens in target]

        def log_iteration(progress: IterationReport) -> None:
            values: dict[str, float | str] = {"model": progress.kind, "log_likelihood": progress.log_likelihood}
            self.write_metrics("align", progress.iteration, values)
            self.report.log(
                f"{progress.kind} {progress.iteration}: log-likelihood {progress.log_likelihood:.4f} per word"
            )

        with self.report.progress("learning to align", total=len(source), unit="pairs") as bar:
            show = lambda fraction: bar.set_done(int(fraction * len(source)))  # noqa: E731
            aligner = train_aligner(*lines, self.settings.align, report=log_iteration, show=show)
        with self.report.progress("aligning", total=len(source), unit="pairs") as bar:
            links = list(bar.iterate(aligner.align(*lines)))
        flat = np.array(list(chain.from_iterable(links)), np.int32).reshape(-1, 2)
        starts = np.concatenate([[0], np.cumsum([len(links_of_pair) for links_of_pair in links])])
        save_file({"starts": starts, "source": flat[:, 0].copy(), "target": flat[:, 1].copy()}, path)

    def extract_phrases(self, source: Sentences, target: Sentences, path: Path) -> None:
        """Extract and score the phrase pairs of the aligned text, and write them as a table."""
        tokenizers, links = Tokenizers.load(self.folder / TOKENIZER), load_file(self.checkpoints / LINKS)
        word_ids = [get_word_ids(side) for side in (tokenizers.source, tokenizers.target)]
        ids = [
            [[ids_of_side[token] for token in tokens] for tokens in side]
            for ids_of_side, side in zip(word_ids, (source, target), strict=True)
        ]
        table = build_table(
            make_side(ids[0]),
            make_side(ids[1]),
            (tokenizers.source.size, tokenizers.target.size),
            (links["starts"], links["source"].astype(np.int64), links["target"].astype(np.int64)),
            longest=self.settings.max_phrase,
            limit=self.settings.phrase_options,
        )
        self.report.log(f"{len(table.target):,} phrase pairs")
        self.write_metrics("phrases", 1, {"phrase_pairs": len(table.target)})
        table.save(path, {**self.about, "tokenizer": tokenizers.fingerprint()})

    def train_language_model(self, target: Sentences, caser: Truecaser, path: Path) -> None:
        """Estimate n-grams of the target side and of `lm_text`, and write them as an ARPA file."""
        extra = read_lines(Path(self.settings.lm_text)) if self.settings.lm_text else iter(())
        extra_sentences = (caser.truecase(self.tokenizer.split(line)) for line in extra if line.strip())
        lines = map(" ".join, chain(target, extra_sentences))
        model = train_ngrams(lines, self.settings.order, prune=self.settings.prune)
        sizes = [len(order.word) for order in model.orders]
        self.report.log("n-grams by order: " + ", ".join(f"{size:,}" for size in sizes))
        self.write_metrics("lm", 1, {f"{order}-grams": size for order, size in enumerate(sizes, 1)})
        with path.open("w", encoding="utf-8") as file:
            write_arpa(model, file)

    def tune_weights(self, dev: list[Sentences], length_factor: float, path: Path) -> None:
        """Tune the weights on the dev pairs, if there are any, and write the best. Each finished round is kept."""
        weights, curve = np.array(self.settings.initial_weights()), []
        if not dev[0] and self.settings.tuning_rounds:
            self.report.log("there are no dev pairs, so the weights of model.preset and model.weights are not tuned")
        if dev[0] and self.settings.tuning_rounds:
            decoder = load_decoder(self.folder, self.settings, Tokenizers.load(self.folder / TOKENIZER), weights)
            kept = self.checkpoints / TUNING

            def translate(weights: Array) -> list[list[Derivation]]:
                decoder.set_weights(weights)
                with self.report.progress("translating the dev set", total=len(dev[0]), unit="sentences") as bar:
                    return list(bar.iterate(decoder.decode_all(dev[0], self.settings.n_best)))

            def write_round(number: int, done: TuningRound) -> None:
                self.write_metrics("tune", number, {"bleu": 100 * done.bleu, "candidates": done.candidates})

            def keep(state: TuningState) -> None:
                write_atomically(kept, state.save)
                last, number = state.curve[-1], len(state.curve) - 1
                write_round(number, last)
                found = f"BLEU {100 * last.bleu:.2f} on the dev set, {last.candidates:,} different translations so far"
                self.report.log(f"tuning round {number}: {found}" if number else f"before tuning: {found}")

            state = TuningState.load(kept) if kept.exists() else None
            for number, finished_round in enumerate(state.curve if state else ()):  # removed by `before_stage`
                write_round(number, finished_round)
            rounds, seed = self.settings.tuning_rounds, self.seed
            tuned = tune_weights(
                translate,
                dev[1],
                weights,
                rounds=rounds,
                length_factor=length_factor,
                seed=seed,
                state=state,
                keep=keep,
            )
            weights = tuned.best.weights
            curve = [{**finished._asdict(), "weights": finished.weights.tolist()} for finished in tuned.curve]
        named_weights = dict(zip(FEATURE_NAMES, weights.tolist(), strict=True))
        path.write_text(format_json({"weights": named_weights, "curve": curve}), "utf-8")


def load_decoder(folder: Path, settings: SmtSettings, tokenizers: Tokenizers, weights: Array) -> PhraseDecoder:
    table, lm = PhraseTable.load(folder / TABLE), NgramScorer(read_arpa(folder / LM_FILE))
    target_words = [*SPECIALS, *get_word_ids(tokenizers.target)]
    return PhraseDecoder(get_word_ids(tokenizers.source), target_words, table, lm, weights, settings.decoder)


def get_word_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the id of each word of a word tokenizer, in the order of the ids."""
    assert isinstance(tokenizer, WordTokenizer)
    return tokenizer.ids


def read_system_file(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{str(path)!r} is damaged ({error}); copy it again or restore it") from error


def load_system(folder: Path, settings: SmtSettings, tokenizers: Tokenizers) -> PhraseSystem:
    """Read a system that `SystemTrainer` wrote."""
    for name in (CASING, WEIGHTS, TABLE, LM_FILE):
        if not (folder / name).is_file():
            raise UserError(f"{str(folder / name)!r} is missing, so the run folder is incomplete; copy it again")
    try:
        casing, tuned = (read_system_file(folder / name) for name in (CASING, WEIGHTS))
        weights = np.array([float(tuned["weights"][name]) for name in FEATURE_NAMES])
        casers = [Truecaser(tuple(caser["forms"]), caser["capitals"]) for caser in casing]
        if not np.isfinite(weights).all():
            raise ValueError(f"{WEIGHTS} has weights that are not finite")
        decoder = load_decoder(folder, settings, tokenizers, weights)
        return PhraseSystem(settings, decoder, (casers[0], casers[1]), type(tokenizers.target))  # type: ignore[arg-type]
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
        raise UserError(f"{str(folder)!r} is damaged ({error}); copy it again or restore it") from error
