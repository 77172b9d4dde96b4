"""Back-translation: text without a counterpart, and what a model of the other direction says to it, as pairs.

    backtranslate("runs/de-en", "news.de", "pairs.jsonl")

The text becomes the target, which is real, and the answer the source, which need not be perfect (Sennrich 2016). The
work may be long: it is done in shards beside the output, and by all processes of torchrun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dragoman.answers.asking import settings_for
from dragoman.config import CorpusSettings
from dragoman.group import joined
from dragoman.lessons import Lessons, doubt, faults, remedy
from dragoman.loading import load_as
from dragoman.shards import Record, Worthless, digest_of_runs, own_device, write_sharded
from dragoman.text.corpus import fingerprint, read_lines
from dragoman.train.report import Report
from dragoman.translator import Translator
from dragoman.types import UserError

EMPTY = "empty"


def backtranslate(
    run: str | Path,
    text: str | Path,
    out: str | Path,
    *,
    search: Mapping[str, Any] | None = None,
    beam: int | None = None,
    tag: str = "",
    batch: int = 1024,
    engine: str = "auto",
    device: str = "auto",
    report: Report | None = None,
) -> Lessons:
    """Write `out`, a corpus {jsonl: out} whose targets are the lines of `text`; what was left out is counted."""
    mono, lessons = Path(text), Lessons()
    with joined() as group:
        report = report or Report(quiet=not group.first)
        where = own_device(device, group)
        translator = group.in_turn(lambda: load_as(Translator, run, device=where, engine=engine))
        settings = group.each(lambda: settings_for(translator.recipe.search, search, beam=beam, count=1))
        group.each(lambda: translator.before(tag))  # what is not there is refused before any work
        group.told(lambda: check_apart(mono, Path(out)))
        mark = group.told(lambda: fingerprint(CorpusSettings(text=str(mono))))

        def answer(_: int, lines: Sequence[str]) -> list[Record]:
            plainly = {**settings.model_dump(), "scores": False}
            found = translator.translate(lines, search=plainly, tag=tag, align=False)
            pairs = zip(found, lines, strict=True)
            return [
                {"source": one.text, "target": line, "faults": faults(one) if one.text.strip() else [EMPTY]}
                for one, line in pairs
            ]

        way = {f"search.{name}": value for name, value in settings.model_dump(mode="json").items()}
        about = {"input": mark, "model": digest_of_runs([run])}
        about |= {"engine": engine, "tag": tag, **way}
        shared: dict[str, Any] = {"batch": batch, "group": group, "report": report}

        def good(records: Iterator[Record]) -> Iterator[str]:
            yield from lessons.lines(records)
            if lessons.left_out and not lessons.good:  # said here, so that an earlier file is not written over
                raise Worthless(f"{lessons}: nothing of {run} is good enough to learn from; {remedy(str(run))}")

        write_sharded(Path(out), lambda: read_lines(mono), answer, good, about=about, **shared)
        if group.first:
            report.say(f"{out}: {lessons}")
            if said := doubt(str(run), lessons.useful, lessons.asked):
                report.say(said)
    return lessons


def check_apart(text: Path, out: Path) -> None:
    if out.exists() and text.exists() and out.samefile(text):
        raise UserError(f"{str(out)!r} is the text itself, which the pairs would replace; choose another --output")
