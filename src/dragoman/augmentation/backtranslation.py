"""What one model answered, as pairs for another to learn from. From answers with a fault it would learn the fault.

Back-translation: text without a counterpart, and what a model of the other direction says to it, as pairs.

    backtranslate("runs/de-en", "news.de", "pairs.jsonl")

The text becomes the target, which is real, and the answer the source, which need not be perfect (Sennrich 2016). The
work may be long: it is done in shards beside the output, and by all processes of torchrun.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dragoman.augmentation.jobs import NothingUseful, Record, choose_device_of_rank, digest_runs, write_sharded
from dragoman.config.settings import CorpusSettings
from dragoman.data.corpus import fingerprint_corpus
from dragoman.errors import UserError
from dragoman.inference.constraints import merge_search
from dragoman.inference.loading import load_as
from dragoman.inference.postprocess import warning_kinds
from dragoman.inference.translator import NO_TREE_WARNING, Translator
from dragoman.io import read_lines
from dragoman.process_group import join_process_group
from dragoman.progress import Report
from dragoman.types import Hypothesis


def find_faults(answer: Hypothesis) -> list[str]:
    """Why nobody should learn from an answer. That a model of trees had none for it is no reason."""
    return [*(why for why in answer.warnings if why != NO_TREE_WARNING), *answer.flags]


class UsefulPairs:
    """Counts the records that are good to learn from, and those that are left out, by their first fault.

    `asked` are those of lines with words in them, and `useful` the good ones among these.
    """

    def __init__(self) -> None:
        self.good = self.asked = self.useful = 0
        self.left_out: Counter[str] = Counter()

    def lines(self, records: Iterable[Record]) -> Iterator[str]:
        """The good ones as lines of JSON: source, target."""
        for record in records:
            worded = bool(record["source"].strip() or record["target"].strip())  # nothing answers nothing
            self.asked += worded
            if record["faults"]:
                self.left_out.update(warning_kinds(record["faults"])[:1])
            else:
                self.good += 1
                self.useful += worded
                pair = {"source": record["source"], "target": record["target"]}
                yield json.dumps(pair, ensure_ascii=False) + "\n"

    @property
    def total(self) -> int:
        return self.good + self.left_out.total()

    def __str__(self) -> str:
        why = ", ".join(f"{count:,} {what}" for what, count in self.left_out.items())
        return f"{self.good:,} of {self.total:,} answers" + (f" ({why}: left out)" if why else "")


def suggest_remedy(model: str) -> str:
    """What may help a model, or several that answer as one: "seed-1 and seed-2"."""
    them, their = ("them", "their") if " and " in model else ("it", "its")
    return f"train {them} longer, or look at {their} answers with dragoman translate"


def warn_of_poor_answers(model: str, useful: int, asked: int) -> str:
    """What there is to say where fewer than half of a model's answers are good to learn from, else nothing."""
    if 2 * useful >= asked:
        return ""
    return f"fewer than half of the answers of {model} are good enough to learn from; {suggest_remedy(model)}"


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
) -> UsefulPairs:
    """Write `out`, a corpus {jsonl: out} whose targets are the lines of `text`; what was left out is counted."""
    mono, lessons = Path(text), UsefulPairs()
    with join_process_group() as group:
        report = report or Report(quiet=not group.is_main)
        where = choose_device_of_rank(device, group)
        translator = group.in_rank_order(lambda: load_as(Translator, run, device=where, engine=engine))
        settings = group.run_on_all(lambda: merge_search(translator.recipe.search, search, beam=beam, count=1))
        group.run_on_all(lambda: translator.encode_tag(tag))  # what is not there is refused before any work
        group.broadcast(lambda: check_output_differs(mono, Path(out)))
        mark = group.broadcast(lambda: fingerprint_corpus(CorpusSettings(text=str(mono))))

        def answer(_: int, lines: Sequence[str]) -> list[Record]:
            plainly = {**settings.model_dump(), "scores": False}
            found = translator.translate(lines, search=plainly, tag=tag, align=False)
            pairs = zip(found, lines, strict=True)
            return [
                {"source": one.text, "target": line, "faults": find_faults(one) if one.text.strip() else [EMPTY]}
                for one, line in pairs
            ]

        way = {f"search.{name}": value for name, value in settings.model_dump(mode="json").items()}
        about = {"input": mark, "model": digest_runs([run])}
        about |= {"engine": engine, "tag": tag, **way}
        shared: dict[str, Any] = {"batch": batch, "group": group, "report": report}

        def good(records: Iterator[Record]) -> Iterator[str]:
            yield from lessons.lines(records)
            if lessons.left_out and not lessons.good:  # said here, so that an earlier file is not written over
                raise NothingUseful(
                    f"{lessons}: nothing of {run} is good enough to learn from; {suggest_remedy(str(run))}"
                )

        write_sharded(Path(out), lambda: read_lines(mono), answer, good, about=about, **shared)
        if group.is_main:
            report.log(f"{out}: {lessons}")
            if said := warn_of_poor_answers(str(run), lessons.useful, lessons.asked):
                report.log(said)
    return lessons


def check_output_differs(text: Path, out: Path) -> None:
    if out.exists() and text.exists() and out.samefile(text):
        raise UserError(f"{str(out)!r} is the text itself, which the pairs would replace; choose another --output")
