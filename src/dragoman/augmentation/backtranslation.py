"""Back-translation: training pairs from monolingual text (Sennrich et al., 2016).

    backtranslate("runs/de-en", "news.de", "pairs.jsonl")

A model of the opposite direction translates the text. The text becomes the target side, and its translation, which need
not be perfect, becomes the source side. Pairs whose translation has a known fault, such as repeated words, are left
out. The job is resumable, and processes of torchrun divide its shards (jobs.py). Distillation uses the same filter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dragoman.augmentation import jobs
from dragoman.augmentation.jobs import Record
from dragoman.errors import UserError
from dragoman.inference.loading import load_as
from dragoman.inference.postprocess import get_warning_kind
from dragoman.inference.translator import NO_TREE_WARNING, Translator
from dragoman.process_group import join_process_group
from dragoman.progress import Report
from dragoman.types import Hypothesis, Line


def find_faults(hypothesis: Hypothesis) -> list[str]:
    """Return the reasons why no model should learn from a translation. A missing syntax tree of its source is none."""
    return [*(warning for warning in hypothesis.warnings if warning != NO_TREE_WARNING), *hypothesis.flags]


class TranslationFilter:
    """Select the pairs that a model can learn from, and count the pairs that are left out.

    `accepted` counts the pairs without a fault, `nonblank` those with words on either side. `accepted_nonblank` shows
    how good the model is, since the translation of an empty line is always empty.
    """

    def __init__(self) -> None:
        self.accepted = self.nonblank = self.accepted_nonblank = 0
        self.left_out: Counter[str] = Counter()  # pairs by the kind of their first fault

    def format_lines(self, records: Iterable[Record]) -> Iterator[str]:
        """Yield the pairs without a fault as lines of JSON, and count all pairs."""
        for record in records:
            pair = {"source": record["source"], "target": record["target"]}
            has_words = any(text.strip() for text in pair.values())  # an empty line has an empty translation
            self.nonblank += has_words
            if record["faults"]:
                self.left_out[get_warning_kind(record["faults"][0])] += 1
            else:
                self.accepted += 1
                self.accepted_nonblank += has_words
                yield json.dumps(pair, ensure_ascii=False) + "\n"

    def __str__(self) -> str:
        faults = ", ".join(f"{count:,} {kind}" for kind, count in self.left_out.items())
        total = self.accepted + self.left_out.total()
        return f"{self.accepted:,} of {total:,} translations" + (f" ({faults}: left out)" if faults else "")


def suggest_remedy(model: str) -> str:
    """Return advice about a model whose translations have faults. The name of an ensemble is "A and B"."""
    them, their = ("them", "their") if " and " in model else ("it", "its")
    return f"train {them} longer, or look at {their} translations with dragoman translate"


def warn_of_poor_translations(model: str, accepted: int, total: int) -> str:
    """Return a warning if fewer than half of a model's `total` translations are accepted, else an empty string."""
    if 2 * accepted >= total:
        return ""
    return f"fewer than half of the translations by {model} are good enough to learn from; {suggest_remedy(model)}"


def check_output(text: Path, out: Path) -> None:
    """Raise a UserError if the corpus would replace the text that it is made of."""
    if out.exists() and text.exists() and out.samefile(text):
        raise UserError(f"{str(out)!r} is the text itself, which the pairs would replace; choose another --output")


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
) -> TranslationFilter:
    """Write the JSONL corpus `out`, whose targets are the lines of `text`. Return the filter, which has counted pairs.

    `run` is the run folder of a model of the opposite direction. `search`, `beam` and `tag` are as for
    `Translator.translate`; `batch` is the number of lines that are translated together.
    """
    text, out, pair_filter = Path(text), Path(out), TranslationFilter()
    with join_process_group() as group:
        report = report or Report(quiet=not group.is_main)
        device = jobs.choose_device_of_rank(device, group)
        translator = group.run_main_first(lambda: load_as(Translator, run, device=device, engine=engine))
        options = group.fail_together(lambda: translator.make_options(beam=beam, search=search, tag=tag, align=False))
        group.fail_together(lambda: translator.encode_tag(tag))  # raises a UserError now if the tag is unknown
        group.run_on_main(lambda: check_output(text, out))
        options_without_scores = replace(options, search=options.search.model_copy(update={"scores": False}))

        def translate(_offset: int, lines: Sequence[str | Line]) -> list[Record]:
            nbest_lists = translator.translate_nbest(lines, options_without_scores)
            texts = [line if isinstance(line, str) else line.text for line in lines]
            return [
                {"source": best.text, "target": text, "faults": find_faults(best) if best.text.strip() else ["empty"]}
                for text, (best, *_) in zip(texts, nbest_lists, strict=True)
            ]

        def format_pairs(records: Iterator[Record]) -> Iterator[str]:
            yield from pair_filter.format_lines(records)
            if pair_filter.left_out and not pair_filter.accepted:  # an error here keeps the old contents of `out`
                raise jobs.NoUsableRecords(
                    f"{pair_filter}: no translation by {run} is good enough to learn from; {suggest_remedy(str(run))}"
                )

        jobs.write_sharded(
            text,
            out,
            translate,
            format_pairs,
            depends_on=jobs.list_dependencies(text, [run], options.search, group, engine=engine, tag=tag),
            batch=batch,
            group=group,
            context=options.context,
            report=report,
        )
        if group.is_main:
            report.log(f"{out}: {pair_filter}")
            if warning := warn_of_poor_translations(str(run), pair_filter.accepted_nonblank, pair_filter.nonblank):
                report.log(warning)
    return pair_filter
