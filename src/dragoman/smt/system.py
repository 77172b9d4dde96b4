"""A phrase-based translation system: trained in stages in a folder, loaded from it, raw text in and out.

    train_system(pairs, dev_pairs, SmtSettings(), folder)
    for [best] in load_system(folder).translate(["Ein Hund läuft."]):
        print(best.text)

Stages, with the files that they write:

    prepare   smt.json, casing.json     settings; how words are usually written
    align     alignment.safetensors     which words are translations of each other
    phrases   phrases/                  phrase pairs with their scores
    lm        lm.arpa                   n-grams of the target language
    tune      weights.json              weights of the log-linear model, and how tuning found them

Every file is written atomically, and a stage whose file is there is skipped. Stages read what earlier ones wrote, not
what is in memory. So training that was stopped at any moment goes on at the last finished stage (within tuning, at the
last finished round), and the result is the same to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, tee
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dragoman.config.settings import AsTuple, Settings, build, setting
from dragoman.data.tokenizers import TOKENIZERS, WordTokenizer
from dragoman.errors import UserError
from dragoman.io import digest_bytes, read_lines, remove_abandoned, write_atomically, write_text
from dragoman.progress import Report
from dragoman.smt.alignment import AlignerSettings, make_side, train_aligner
from dragoman.smt.casing import Truecaser
from dragoman.smt.compiled import Array
from dragoman.smt.decoder import (
    DEFAULT_WEIGHTS,
    FEATURE_NAMES,
    NOISY_CHANNEL,
    REORDERING,
    DecoderSettings,
    Derivation,
    NgramScorer,
    PhraseDecoder,
)
from dragoman.smt.ngram import read_arpa, train_ngrams, write_arpa
from dragoman.smt.phrases import PhraseTable, build_table
from dragoman.smt.tuning import TuningRound, TuningState, tune_weights
from dragoman.types import SPECIALS, Hypothesis, Pair

PRESETS = {"log-linear": DEFAULT_WEIGHTS, "noisy-channel": NOISY_CHANNEL}


class SmtSettings(Settings):
    """A phrase-based system. Its score is a weighted sum of features; the names are those of `weights`."""

    kind: Literal["smt"] = "smt"
    align: AlignerSettings = setting(AlignerSettings(threshold=0.3), "word alignment, from which phrases are extracted")
    max_phrase: int = setting(7, "maximum length of a phrase in words", ge=1, le=20)
    phrase_options: int = setting(30, "number of translations kept per source phrase, the likeliest", ge=1)
    order: int = setting(5, "order of the n-gram language model", ge=1, le=10)
    prune: Annotated[tuple[int, ...], AsTuple] = setting(
        (), "highest count of n-grams to drop, per order; the last applies to all higher orders"
    )
    lm_text: str = setting("", "file with additional target-language text, one sentence per line")
    reordering: bool = setting(True, "lexicalized reordering: score the orientation of neighbouring phrases")
    decoder: DecoderSettings = setting(DecoderSettings(), "limits of the decoder's search")
    preset: Literal["log-linear", "noisy-channel"] = setting(
        "log-linear", "initial weights: of all features, or 1 for p(source | target) and p(target)"
    )
    weights: dict[str, float] = setting({}, "weights of single features, which replace those of the preset")
    tuning_rounds: int = setting(4, "rounds of batch MIRA on the dev set; 0: no tuning", ge=0)
    n_best: int = setting(100, "number of translations per sentence that tuning learns from", ge=2)

    def initial_weights(self) -> Array:
        """Return the weights before tuning."""
        weights = PRESETS[self.preset].copy()
        if not self.reordering:
            weights[REORDERING] = 0.0
        for name, value in self.weights.items():
            if name not in FEATURE_NAMES:
                raise UserError(f"there is no feature {name!r} to weight; there are {', '.join(FEATURE_NAMES)}")
            weights[FEATURE_NAMES.index(name)] = value
        return weights


@dataclass(frozen=True)
class SmtTranslation:
    """A translation with all that explains it."""

    text: str
    tokens: list[str]
    source_tokens: list[str]
    score: float
    features: dict[str, float]
    links: list[tuple[int, int]]  # (source token, target token)
    derivation: Derivation

    def as_hypothesis(self) -> Hypothesis:
        """Return the record that every kind of model gives."""
        alignment = np.zeros((len(self.tokens), len(self.source_tokens)))
        for i, j in self.links:
            alignment[j, i] = 1.0
        empty = alignment.sum(1) == 0
        alignment[empty] = 1.0  # a word without a link comes from no source word more than from another
        alignment /= np.maximum(alignment.sum(1, keepdims=True), 1.0)
        return Hypothesis(self.text, self.score, self.tokens, alignment.tolist(), self.source_tokens, self.score)


class PhraseSystem:
    """A trained system: text to tokens, tokens to the best derivations, and back to text."""

    def __init__(
        self,
        decoder: PhraseDecoder,
        casing: tuple[Truecaser, Truecaser],
        tokenizer: type[WordTokenizer],
        curve: Sequence[TuningRound] = (),
    ) -> None:
        self.decoder, self.casing, self.tokenizer, self.curve = decoder, casing, tokenizer, curve

    def translate(self, lines: Iterable[str], *, n_best: int = 1) -> Iterator[list[SmtTranslation]]:
        """Yield up to `n_best` different translations of each line, the best first; several lines at a time."""
        originals, copies = tee(self.tokenizer.split(line) for line in lines)
        sentences = (self.casing[0].truecase(tokens) for tokens in copies)
        # Several derivations may have the same words, so more of them are needed than different translations.
        for derivations in self.decoder.decode_all(sentences, n_best if n_best == 1 else 5 * n_best):
            source = next(originals)
            best: dict[str, SmtTranslation] = {}
            for derivation in derivations:
                tokens = self.casing[1].recase(derivation.words)
                text = join_tokens(tokens, self.tokenizer)
                if text not in best and len(best) < n_best:
                    values = dict(zip(FEATURE_NAMES, derivation.features.tolist(), strict=True))
                    best[text] = SmtTranslation(
                        text, tokens, source, derivation.score, values, derivation.links, derivation
                    )
            yield list(best.values())


def join_tokens(tokens: Sequence[str], tokenizer: type[WordTokenizer]) -> str:
    """Return the text of tokens that `tokenizer.split` made."""
    first = len(SPECIALS)
    return tokenizer.from_symbols(tokens).decode(range(first, first + len(tokens)))


def train_system(
    pairs: Iterable[Pair],
    dev_pairs: Iterable[Pair],
    settings: SmtSettings,
    folder: Path,
    *,
    tokenizer: str = "word",
    seed: int = 1,
    report: Report | None = None,
) -> PhraseSystem:
    """Train a system, or go on where an earlier call with the same pairs and settings was stopped.

    `tokenizer` is `word`, or `space` for text that is tokenised already. Pairs with an empty side are left out.
    """
    report = report or Report(quiet=True)
    weights = settings.initial_weights()
    split = find_tokenizer(tokenizer).split
    sides = [[split(text) for text in texts] for texts in _list_sides(pairs)]
    dev = [[split(text) for text in texts] for texts in _list_sides(dev_pairs)]
    if not sides[0]:
        raise UserError("a phrase-based system needs pairs to learn from; all of these have an empty side")
    digest = digest_bytes(*("\n".join(map(" ".join, side)).encode() for side in (*sides, *dev)))
    about = {"settings": settings.model_dump(mode="json"), "tokenizer": tokenizer, "seed": seed, "data": digest}
    if not (folder / "smt.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "smt.json", _as_json(about))
    elif json.loads((folder / "smt.json").read_bytes()) != about:
        raise UserError(f"{str(folder)!r} has a system with other settings or data; choose another folder")

    remove_abandoned(folder, age=0.0)  # what a killed training was writing

    def stage(name: str, write: Callable[[Path], object]) -> Path:
        if not (folder / name).exists():
            write_atomically(folder / name, write)
        return folder / name

    casers = [Truecaser.train(side) for side in sides]
    stage("casing.json", lambda path: path.write_text(_as_json([vars(each) for each in casers]), encoding="utf-8"))
    source, target = ([caser.truecase(tokens) for tokens in side] for caser, side in zip(casers, sides, strict=True))
    links = stage("alignment.safetensors", lambda path: align_pairs(source, target, settings.align, report, path))
    stage("phrases", lambda path: extract_phrases(source, target, load_file(links), settings, report, path))
    stage("lm.arpa", lambda path: train_language_model(target, casers[1], split, settings, report, path))
    ratios = [sum(map(len, two)) / max(sum(map(len, one)), 1) for one, two in (sides, dev)]
    dev = [[caser.truecase(tokens) for tokens in side] for caser, side in zip(casers, dev, strict=True)]

    def tune(path: Path) -> None:
        state = None
        if dev[0] and settings.tuning_rounds:
            decoder = load_decoder(folder, settings, weights)
            state = tune_decoder(decoder, dev, ratios[0] / ratios[1], settings, seed, report, folder)
        best = state.best.weights if state else weights
        curve = [{**each._asdict(), "weights": each.weights.tolist()} for each in state.curve] if state else []
        path.write_text(
            _as_json({"weights": dict(zip(FEATURE_NAMES, best.tolist(), strict=True)), "curve": curve}), "utf-8"
        )

    stage("weights.json", tune)
    (folder / "tuning.safetensors").unlink(missing_ok=True)
    return load_system(folder)


def align_pairs(
    source: list[list[str]], target: list[list[str]], settings: AlignerSettings, report: Report, path: Path
) -> None:
    """Learn to align the pairs, and write the links of each."""
    lines = [" ".join(tokens) for tokens in source], [" ".join(tokens) for tokens in target]
    with report.progress("learning to align", total=len(source), unit="pairs") as bar:
        aligner = train_aligner(
            *lines,
            settings,
            report=lambda one: report.log(
                f"{one.kind} {one.iteration}: log-likelihood {one.log_likelihood:.4f} a word"
            ),
            show=lambda share: bar.update(int(share * len(source))),
        )
    with report.progress("aligning", total=len(source), unit="pairs") as bar:
        links = list(bar.iterate(aligner.align(*lines)))
    flat = np.array(list(chain.from_iterable(links)), np.int32).reshape(-1, 2)
    starts = np.concatenate([[0], np.cumsum([len(some) for some in links])])
    save_file({"starts": starts, "source": flat[:, 0].copy(), "target": flat[:, 1].copy()}, path)


def extract_phrases(
    source: list[list[str]],
    target: list[list[str]],
    links: dict[str, Array],
    settings: SmtSettings,
    report: Report,
    folder: Path,
) -> None:
    """Extract and score the phrase pairs of aligned text; write the table, and the words of both languages."""
    words: list[dict[str, int]] = [{}, {}]
    ids = [
        [[known.setdefault(token, len(known)) for token in tokens] for tokens in side]
        for known, side in zip(words, (source, target), strict=True)
    ]
    table = build_table(
        make_side(ids[0]),
        make_side(ids[1]),
        (len(words[0]), len(words[1])),
        (links["starts"], links["source"].astype(np.int64), links["target"].astype(np.int64)),
        longest=settings.max_phrase,
        limit=settings.phrase_options,
    )
    report.log(f"{len(table.target):,} phrase pairs")
    folder.mkdir()
    table.save(folder / "table.safetensors")
    for name, known in zip(("source", "target"), words, strict=True):
        (folder / f"{name}.words").write_text("".join(f"{word}\n" for word in known), encoding="utf-8")


def train_language_model(
    target: list[list[str]],
    caser: Truecaser,
    split: Callable[[str], list[str]],
    settings: SmtSettings,
    report: Report,
    path: Path,
) -> None:
    """Estimate n-grams of the target side and of further text, and write them as ARPA."""
    more = read_lines(Path(settings.lm_text)) if settings.lm_text else iter(())
    further = (caser.truecase(split(line)) for line in more if line.strip())
    model = train_ngrams(map(" ".join, chain(target, further)), settings.order, prune=settings.prune)
    report.log("n-grams by order: " + ", ".join(f"{len(order.word):,}" for order in model.orders))
    with path.open("w", encoding="utf-8") as lines:
        write_arpa(model, lines)


def tune_decoder(
    decoder: PhraseDecoder,
    dev: list[list[list[str]]],
    length_factor: float,
    settings: SmtSettings,
    seed: int,
    report: Report,
    folder: Path,
) -> TuningState:
    """Tune the weights on dev pairs. The folder keeps the state after every round, from which the next call goes on."""
    path = folder / "tuning.safetensors"

    def translate(weights: Array) -> list[list[Derivation]]:
        decoder.set_weights(weights)
        with report.progress("translating the dev set", total=len(dev[0]), unit="sentences") as bar:
            return list(bar.iterate(decoder.decode_all(dev[0], settings.n_best)))

    def keep(state: TuningState) -> None:
        write_atomically(path, state.save)
        last = state.curve[-1]
        report.log(
            f"tuning {len(state.curve) - 1}: BLEU {100 * last.bleu:.2f} on the dev set, {last.candidates:,} candidates"
        )

    return tune_weights(
        translate,
        dev[1],
        decoder.weights,
        rounds=settings.tuning_rounds,
        length_factor=length_factor,
        seed=seed,
        state=TuningState.load(path) if path.exists() else None,
        keep=keep,
    )


def load_decoder(folder: Path, settings: SmtSettings, weights: Array) -> PhraseDecoder:
    """Read the phrase table and the language model."""
    words = [
        (folder / "phrases" / f"{name}.words").read_text("utf-8").split("\n")[:-1] for name in ("source", "target")
    ]
    ids = {word: index for index, word in enumerate(words[0])}
    table = PhraseTable.load(folder / "phrases" / "table.safetensors")
    lm = NgramScorer(read_arpa(folder / "lm.arpa"))
    return PhraseDecoder(ids, words[1], table, lm, weights, settings.decoder)


def load_system(folder: Path) -> PhraseSystem:
    """Read a system that `train_system` made."""
    try:
        about, casing, tuned = (
            json.loads((folder / f"{name}.json").read_bytes()) for name in ("smt", "casing", "weights")
        )
        weights = np.array([tuned["weights"][name] for name in FEATURE_NAMES])
        decoder = load_decoder(folder, build(SmtSettings, about["settings"]), weights)
        casers = [Truecaser(tuple(each["forms"]), each["capitals"]) for each in casing]
        curve = [TuningRound(**{**each, "weights": np.array(each["weights"])}) for each in tuned["curve"]]
    except FileNotFoundError as error:
        raise UserError(f"the system in {str(folder)!r} is not finished: {error.filename!r} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{str(folder)!r} holds no phrase-based system that can be read: {error}") from error
    return PhraseSystem(decoder, (casers[0], casers[1]), find_tokenizer(about["tokenizer"]), curve)


def find_tokenizer(kind: str) -> type[WordTokenizer]:
    """Return a tokenizer whose tokens are words."""
    found = TOKENIZERS.get(kind)
    if found is None or not issubclass(found, WordTokenizer):
        raise UserError(f"a phrase-based system translates words: its tokenizer is word or space, not {kind}")
    return found


def _list_sides(pairs: Iterable[Pair]) -> tuple[list[str], list[str]]:
    """Return sources and targets of the pairs that have both."""
    kept = [pair for pair in pairs if pair.source.strip() and pair.target.strip()]
    return [pair.source for pair in kept], [pair.target for pair in kept]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
