"""Export runs to the formats of others and import them again, each checked by translating a fixed sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dragoman.config.settings import DataSettings, pick
from dragoman.data.corpus import read_pairs
from dragoman.errors import UserError
from dragoman.inference.engines import ctranslate2, huggingface, onnx
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.ctranslate2 import CTranslate2Engine
from dragoman.inference.engines.huggingface import HuggingFaceEngine, import_huggingface
from dragoman.inference.engines.onnx import OnnxEngine
from dragoman.inference.loading import load_as
from dragoman.inference.model_card import render_card
from dragoman.inference.translator import Translator
from dragoman.metrics.metrics import METRICS
from dragoman.phrasebook.generate import generate_pairs
from dragoman.progress import log
from dragoman.run_dir import RunFolder, write_text, write_whole
from dragoman.types import Line

SAMPLE_LINES, SLOW_SAMPLE_LINES = 100, 20  # sentences that are compared, and where that takes long
NEAR_SCORE = 1e-3  # of scores: answers that are no nearer in score than this differ by more than rounding
EXACT_SHARE = 0.99  # the share of translations that must be the same in full precision
MIN_CHRF = 70  # the chrF that translations in less precision must have, the run's own being the reference


class Format(NamedTuple):
    write: Callable[[Translator, Path, str], list[str]]  # what it had to leave out comes back, for people to read
    engine: Callable[[Translator, Path, str], Engine]  # what answers from the folder
    quantizations: tuple[str, ...]
    sample: int = SAMPLE_LINES  # sentences that are compared


class Agreement(NamedTuple):
    """How far translations from a folder are those of the run."""

    beam: int
    lines: int
    same: int
    near: int  # that differ, but are as good within rounding
    gap: float  # the largest difference of scores
    bleu: float = 100.0  # of these translations, those of the run being the references
    chrf: float = 100.0

    def lack(self, *, exact: bool) -> str:
        """Return what is missing for the two to agree, or nothing.

        In full precision the texts must be the same. In less they must be alike: equality says little of a model of
        middling quality, many of whose hypotheses are nearly as good.
        """
        asked = math.ceil(EXACT_SHARE * self.lines)
        if exact:
            return f"{self}; {asked} must be the same" if self.same + self.near < asked else ""
        return f"{self}; chrF must be {MIN_CHRF} at least" if self.chrf < MIN_CHRF else ""

    def __str__(self) -> str:
        near = f" and {self.near} as good within rounding" if self.near else ""
        alike = f", BLEU {self.bleu:.1f} and chrF {self.chrf:.1f} against those of the run" if self.chrf < 100 else ""
        return (
            f"beam {self.beam}: {self.same} of {self.lines} translations are the same{near}{alike}, "
            f"scores at most {self.gap:.2g} apart"
        )


def export(
    run: str | Path,
    *,
    to: str,
    out: str | Path,
    quantization: str = "float32",
    force: bool = False,
    say: Callable[[str], None] = log,
) -> list[Agreement]:
    """Write a run in another format: ctranslate2, huggingface or onnx. Return how its translations compare.

    The folder `out` appears when it is complete and has been compared with the run. With `force` it appears however it
    compares, and what differs is said.

        for agreement in dragoman.export("runs/mine", to="ctranslate2", out="mine-ct2"):
            print(agreement)
    """
    run, out = Path(run), Path(out)
    kind = pick(FORMATS, to, "format")
    if quantization not in kind.quantizations:
        raise UserError(
            f"quantization {quantization!r} is not something that {to} has; it has {', '.join(kind.quantizations)}"
        )
    check_free(out)
    translator = load_as(Translator, run, device="cpu")
    found: list[Agreement] = []

    def write(beside: Path) -> None:
        try:
            beside.mkdir(parents=True)
            for lack in kind.write(translator, beside, quantization):
                say(lack)
            translator.tokenizers.save(beside / "tokenizer")
            RunFolder(beside).save_recipe(translator.recipe)
            if to == "huggingface":
                write_text(beside / "README.md", render_card(run, exported=out.name))
        except OSError as error:
            raise UserError(
                f"cannot write {str(out)!r} ({error.strerror}); make room or choose another folder"
            ) from None
        lines = sample_lines(translator, kind.sample)
        say(f"comparing the translations of {len(lines)} sentences")
        engine = kind.engine(translator, beside, quantization)
        if isinstance(engine, CTranslate2Engine) and (note := engine.other_precision(quantization)):
            say(note)
        theirs = replace(translator, engine=engine)
        try:
            found.extend(compare_translations(translator, theirs, lines))
            check_agreements(
                found, exact=quantization == "float32", override=", and --force (force=True) writes it in any case"
            )
        except Disagreement as difference:
            if not force:
                raise
            say(f"written because of --force: {difference.lack}")
        check_free(out)  # minutes have passed, and what is there now would be replaced

    write_whole(out, write)
    return found


def import_run(folder: Path, out: Path, *, say: Callable[[str], None]) -> list[Agreement]:
    """A run folder from a model that `transformers` has saved; compared with it, where that is installed."""
    check_free(out)
    found: list[Agreement] = []

    def write(beside: Path) -> None:
        import_huggingface(folder, beside)
        try:
            engine = HuggingFaceEngine(folder)
        except UserError as fault:
            say(f"not compared: {fault}")
            return
        ours = load_as(Translator, beside, device="cpu")
        lines = sample_lines(ours, SAMPLE_LINES)
        say(f"comparing the translations of {len(lines)} sentences")
        found.extend(compare_translations(ours, replace(ours, engine=engine), lines))
        check_agreements(found, exact=True)

    write_whole(out, write)
    return found


def check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{str(out)!r} is there already; remove it or choose another folder")
    if not out.absolute().parent.is_dir():
        raise UserError(f"there is no folder {str(out.absolute().parent)!r} to write into; make it first")


def sample_lines(translator: Translator, count: int) -> list[Line]:
    """Sentences of the run's own dev and test corpora, where those are still there; else of the phrasebook."""
    data = translator.recipe.data
    try:
        lines = list(islice(own_lines(data), count))
    except UserError:
        lines = []
    tag = next(iter(data.tags), "")
    return lines or [Line(pair.source, tag=tag) for pair in generate_pairs("test", count, direction=data.direction)]


def own_lines(data: DataSettings) -> Iterator[Line]:
    for split, corpora in (("dev", data.dev), ("test", data.test)):
        for corpus in corpora:
            for pair in read_pairs(corpus, split=split, direction=data.direction):
                if pair.source.strip():
                    yield Line(pair.source, tag=pair.tag)


class Disagreement(UserError):
    """A folder does not translate as its run does."""

    def __init__(self, lack: str, remedy: str) -> None:
        super().__init__(f"nothing was written, since it does not translate as the run does ({lack}); {remedy}")
        self.lack = lack


def check_agreements(found: list[Agreement], *, exact: bool, override: str = "") -> None:
    """Raise a Disagreement where translations agree too little; `override` is what lets the user have it anyway."""
    for lack in filter(None, (each.lack(exact=exact) for each in found)):
        longer = "a model that was trained for longer"
        remedy = f"{longer} usually agrees" if exact else f"quantization float32 or {longer} agrees more often"
        raise Disagreement(lack, remedy + override)


def compare_translations(ours: Translator, theirs: Translator, lines: list[Line]) -> list[Agreement]:
    """Compare greedy translations, and those with the run's own beam."""
    return [compare_at_beam(ours, theirs, lines, beam) for beam in sorted({1, ours.recipe.search.beam})]


def compare_at_beam(ours: Translator, theirs: Translator, lines: list[Line], beam: int) -> Agreement:
    answers = (each.translate(lines, beam=beam, align=False) for each in (ours, theirs))
    pairs = list(zip(*answers, strict=True))
    same = sum(a.text == b.text for a, b in pairs)
    near = sum(a.text != b.text and abs(a.score - b.score) <= NEAR_SCORE for a, b in pairs)
    references, hypotheses = ([one.text for one in side] for side in zip(*pairs, strict=True))
    bleu, chrf = (METRICS[name](hypotheses, [references]).value for name in ("bleu", "chrf"))
    alike = (100.0, 100.0) if same == len(lines) else (bleu, chrf)  # neither metric is 100 for empty texts
    return Agreement(beam, len(lines), same, near, max(abs(a.score - b.score) for a, b in pairs), *alike)


def to_ctranslate2(translator: Translator, folder: Path, quantization: str) -> list[str]:
    """Weights in 8 bits are those for CPUs without VNNI: the folder may be opened on any CPU."""
    ctranslate2.save_ctranslate2(translator.model, translator.tokenizers, folder, quantization, narrow_int8=True)
    return []


def from_ctranslate2(translator: Translator, folder: Path, quantization: str) -> Engine:
    model = ctranslate2.check_ctranslate2(translator.model)
    device = translator.device
    return CTranslate2Engine(folder, model, translator.tokenizers, device=device, quantization=quantization)


def to_huggingface(translator: Translator, folder: Path, quantization: str) -> list[str]:  # noqa: ARG001 - the menu's shape
    return huggingface.save_huggingface(
        translator.model, translator.tokenizers, translator.recipe, folder, translator.longest
    )


def from_huggingface(translator: Translator, folder: Path, quantization: str) -> Engine:  # noqa: ARG001
    return HuggingFaceEngine(folder)


def to_onnx(translator: Translator, folder: Path, quantization: str) -> list[str]:  # noqa: ARG001
    onnx.save_onnx(translator.model, translator.tokenizers, folder)
    return []


def from_onnx(translator: Translator, folder: Path, quantization: str) -> Engine:  # noqa: ARG001
    return OnnxEngine(folder, translator.tokenizers.target.decode)


FORMATS = {
    "ctranslate2": Format(to_ctranslate2, from_ctranslate2, tuple(ctranslate2.QUANTIZATIONS)),
    "huggingface": Format(to_huggingface, from_huggingface, ("float32",)),
    "onnx": Format(to_onnx, from_onnx, ("float32",), SLOW_SAMPLE_LINES),
}
