"""Export of runs to the formats of other libraries, and import from Hugging Face.

Both translate a sample of sentences with the original and with the written model, and compare the translations
(`Agreement`). Nothing is written if they differ too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dragoman.config.settings import get_entry
from dragoman.data.corpus import DataSettings, read_pairs
from dragoman.errors import UserError
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.ctranslate2 import QUANTIZATIONS, CTranslate2Engine, save_ctranslate2
from dragoman.inference.engines.huggingface import HuggingFaceEngine, import_huggingface, save_huggingface
from dragoman.inference.engines.onnx import OnnxEngine, save_onnx
from dragoman.inference.loading import load_as
from dragoman.inference.model_card import render_card
from dragoman.inference.predictor import Predictor
from dragoman.inference.translator import Translator
from dragoman.io import write_atomically, write_text
from dragoman.metrics.metrics import METRICS
from dragoman.models.base import Model
from dragoman.phrasebook.generate import generate_pairs
from dragoman.progress import log
from dragoman.run_dir import RunFolder
from dragoman.types import Line

SAMPLE_LINES, SLOW_SAMPLE_LINES = 100, 20  # sentences whose translations are compared; fewer for slow engines
SCORE_TOLERANCE = 1e-3  # different translations whose scores differ by at most this are equally good up to rounding
MIN_EQUAL_FRACTION = 0.99  # minimum fraction of equal or equally good translations in float32
MIN_CHRF = 70  # minimum chrF of translations of a quantised model, with the translations of the run as references


class Format(NamedTuple):
    """An export format. The arguments of `save` and `engine` are the model of a run, a folder and a quantization."""

    save: Callable[[Predictor[Model], Path, str], list[str] | None]  # returns messages about what was not exported
    engine: Callable[[Predictor[Model], Path, str], Engine]
    quantizations: Sequence[str] = ("float32",)
    sample: int = SAMPLE_LINES


EXPORT_FORMATS = {
    "ctranslate2": Format(save_ctranslate2, CTranslate2Engine, QUANTIZATIONS),
    "huggingface": Format(
        lambda predictor, folder, _: save_huggingface(predictor, folder),
        lambda _, folder, __: HuggingFaceEngine(folder),
    ),
    "onnx": Format(
        lambda predictor, folder, _: save_onnx(predictor, folder),
        lambda predictor, folder, _: OnnxEngine(predictor, folder),
        sample=SLOW_SAMPLE_LINES,
    ),
}


class Agreement(NamedTuple):
    """How well the translations of an exported model agree with those of the run."""

    beam: int
    lines: int
    same: int
    near: int  # number of translations with different texts, but scores that are equal up to rounding
    gap: float  # maximum difference between the scores of two translations of a sentence
    bleu: float = 100.0  # of the exported model's translations, with those of the run as references
    chrf: float = 100.0

    def explain_failure(self, *, exact: bool) -> str:
        """Return why the translations do not agree well enough, or "" if they do.

        In float32 (`exact`), nearly all texts must be equal. In other quantizations they must be similar: a mediocre
        model has many hypotheses with nearly equal scores, so requiring equal texts would be too strict.
        """
        required = math.ceil(MIN_EQUAL_FRACTION * self.lines)
        if exact:
            return f"{self}; {required} must be the same" if self.same + self.near < required else ""
        return f"{self}; chrF must be {MIN_CHRF} at least" if self.chrf < MIN_CHRF else ""

    def __str__(self) -> str:
        near = f" and {self.near} as good within rounding" if self.near else ""
        scores = f", BLEU {self.bleu:.1f} and chrF {self.chrf:.1f} against those of the run" if self.chrf < 100 else ""
        return (
            f"beam {self.beam}: {self.same} of {self.lines} translations are the same{near}{scores}, "
            f"scores at most {self.gap:.2g} apart"
        )


class Disagreement(UserError):
    """An exported model does not translate like its run."""


def export(
    run: str | Path, *, to: str, out: str | Path, quantization: str = "float32", force: bool = False
) -> list[Agreement]:
    """Write a run in another format: ctranslate2, huggingface or onnx. Return how well its translations agree.

    The folder `out` is created only after the translations have been compared. With `force` it is created even if they
    differ too much, and a message describes the difference.

        for agreement in dragoman.export("runs/mine", to="ctranslate2", out="mine-ct2"):
            print(agreement)
    """
    run, out = Path(run), Path(out)
    export_format = get_entry(EXPORT_FORMATS, to, "format")
    if quantization not in export_format.quantizations:
        raise UserError(
            f"{to} does not support quantization {quantization!r}; it supports {', '.join(export_format.quantizations)}"
        )
    check_output_folder(out)
    translator = load_as(Translator, run, device="cpu")
    agreements: list[Agreement] = []

    def write(folder: Path) -> None:
        try:
            folder.mkdir(parents=True)
            for note in export_format.save(translator, folder, quantization) or ():
                log(note)
            translator.tokenizers.save(folder / "tokenizer")
            RunFolder(folder).save_recipe(translator.recipe)
            if to == "huggingface":
                write_text(folder / "README.md", render_card(run, exported=out.name))
        except OSError as error:
            raise UserError(
                f"cannot write {str(out)!r} ({error.strerror}); make room or choose another folder"
            ) from None
        engine = export_format.engine(translator, folder, quantization)
        if isinstance(engine, CTranslate2Engine) and (note := engine.describe_precision_fallback(quantization)):
            log(note)
        agreements.extend(compare_translations(translator, engine, export_format.sample))
        check_agreements(agreements, exact=quantization == "float32", force=force)
        check_output_folder(out)  # again, since another command may have written there in the meantime

    write_atomically(out, write)
    return agreements


def import_run(
    folder: Path, out: Path, *, licence: str = "", source_language: str = "", target_language: str = ""
) -> list[Agreement]:
    """Write a run folder from a model saved by `transformers`; compare translations if that library is installed.

    The licence and the languages of a published model are read from its folder unless they are given.
    """
    check_output_folder(out)
    agreements: list[Agreement] = []

    def write(run: Path) -> None:
        id_map = import_huggingface(
            folder, run, licence=licence, source_language=source_language, target_language=target_language
        )
        try:
            engine = HuggingFaceEngine(folder, id_map)
        except UserError as error:
            log(f"translations are not compared: {error}")
            return
        translator = load_as(Translator, run, device="cpu")
        agreements.extend(compare_translations(translator, engine, SLOW_SAMPLE_LINES if id_map else SAMPLE_LINES))
        check_agreements(agreements, exact=True)

    write_atomically(out, write)
    return agreements


def check_output_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{str(out)!r} exists already; remove it or choose another folder")
    if not out.absolute().parent.is_dir():
        raise UserError(f"there is no folder {str(out.absolute().parent)!r} to write into; create it first")


def sample_lines(data: DataSettings, count: int, tag: str = "") -> list[Line]:
    """Return sentences of the run's dev and test corpora or, if their files are missing, of the built-in phrasebook."""
    sources = (
        Line(pair.source, tag=pair.tag, context=pair.context)
        for split, corpora in (("dev", data.dev), ("test", data.test))
        for corpus in corpora
        for pair in read_pairs(corpus, split=split, direction=data.direction, context=data.context)
        if pair.source.strip()
    )
    try:
        lines = list(islice(sources, count))
    except UserError:
        lines = []
    tag = next(iter(data.tags), "") or tag  # any tag (such as a target language) of the model; the phrasebook has none
    return lines or [Line(pair.source, tag=tag) for pair in generate_pairs("test", count, direction=data.direction)]


def compare_translations(ours: Translator, engine: Engine, count: int) -> Iterator[Agreement]:
    """Translate sample lines with both engines, with beam 1 and with the beam of the run, and compare the results."""
    lines = sample_lines(ours.recipe.data, count, tag=ours.directions[0].tag)
    log(f"comparing the translations of {len(lines)} sentences")
    theirs = replace(ours, engine=engine)
    for beam in sorted({1, ours.recipe.search.beam}):
        results = [translator.translate(lines, beam=beam, align=False) for translator in (ours, theirs)]
        gaps = [abs(our.score - their.score) for our, their in zip(*results, strict=True)]
        same = [our.text == their.text for our, their in zip(*results, strict=True)]
        near = sum(not equal and gap <= SCORE_TOLERANCE for equal, gap in zip(same, gaps, strict=True))
        agreement = Agreement(beam, len(lines), sum(same), near, max(gaps))
        if not all(same):  # equal texts count as 100; the metrics of empty texts are lower even if these are equal
            references, hypotheses = ([hypothesis.text for hypothesis in side] for side in results)
            bleu, chrf = (METRICS[name](hypotheses, [references]).value for name in ("bleu", "chrf"))
            agreement = agreement._replace(bleu=bleu, chrf=chrf)
        yield agreement


def check_agreements(agreements: Sequence[Agreement], *, exact: bool, force: bool | None = None) -> None:
    """Raise a Disagreement if translations agree too little; with `force`, only log it.

    `force` is None for imports, which do not have this option.
    """
    for reason in filter(None, (agreement.explain_failure(exact=exact) for agreement in agreements)):
        if force:
            log(f"written because of --force: {reason}")
            return
        better = "a model that was trained for longer"
        remedy = f"{better} usually agrees" if exact else f"quantization float32 or {better} agrees more often"
        override = "" if force is None else ", and --force (force=True) writes it in any case"
        raise Disagreement(
            f"nothing was written, since translations of the new model differ ({reason}); {remedy}{override}"
        )
