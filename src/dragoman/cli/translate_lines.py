"""What `dragoman translate` does with lines, once its arguments are read: answers in batches, or word by word."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from dragoman.augmentation.jobs import Record, choose_device_of_rank, digest_runs, write_sharded
from dragoman.cli.lines import Input, input_lines, output_to
from dragoman.cli.options import Said, Warned, answer_lines, one_line, say_counts
from dragoman.config.settings import CorpusSettings
from dragoman.data.corpus import fingerprint_corpus
from dragoman.data.trees import TreeReader
from dragoman.errors import UserError
from dragoman.inference.constraints import merge_search, parse_search_overrides, read_dictionary, read_glossary
from dragoman.inference.loading import load_as
from dragoman.inference.postprocess import warning_kinds
from dragoman.inference.translator import NO_TREE, Translator
from dragoman.io import digest_bytes, read_lines
from dragoman.process_group import ProcessGroup, join_process_group
from dragoman.progress import DETAIL, WARNING, Report, log
from dragoman.types import Hypothesis, Line, Tree


@dataclass(frozen=True)
class Order:
    """All that the user says."""

    runs: Sequence[Path]
    overrides: Sequence[str]
    given: Input  # lines, their file, or stdin
    output_file: Path | None
    beam: int | None
    nbest: int | None
    glossary: Path | None
    dictionary: Path | None
    tag: str
    stream: bool
    resume: bool
    conllu: Path | None
    batch: int
    as_json: bool
    engine: str
    device: str

    def check(self, *, kept: bool) -> None:
        """Refuse what does not go together. `kept` answers are those of a file that is done in shards."""
        if self.stream and self.engine not in ("auto", "torch"):
            raise UserError(
                f"--stream watches the search, which --engine {self.engine} does not let one; leave the engine out"
            )
        if self.stream and (self.as_json or self.nbest or self.conllu):
            raise UserError("--stream prints words of one answer as they come; leave --json, --nbest and --conllu out")
        if kept and (self.stream or self.conllu):
            raise UserError("--resume, and torchrun, do a file in shards; leave --stream and --conllu out")
        files = [path for path in (self.given, self.output_file) if isinstance(path, Path) and is_plain(path)]
        if kept and len(files) < 2:
            raise UserError("--resume, and torchrun, need --input F and --output F, which are plain files")

    def about(self) -> dict[str, Any]:
        """What answers depend on, beside the lines and the settings of the search."""
        files = {"glossary": self.glossary, "dictionary": self.dictionary}
        return {
            "model": digest_runs(self.runs),
            **{name: digest_bytes(path.read_bytes()) if path else "" for name, path in files.items()},
            "engine": self.engine,
            "tag": self.tag,
            "json": self.as_json,
        }


def is_plain(path: Path) -> bool:
    return path.is_file() or not path.exists()


def carry_out(order: Order) -> None:
    begun = time.monotonic()
    with join_process_group() as group:
        unknown = {"unknown": "dictionary"} if order.dictionary else {}
        changes = group.run_on_all(lambda: parse_search_overrides(order.overrides, unknown))
        kept = order.resume or group.is_distributed
        group.broadcast(lambda: order.check(kept=kept))
        way = {"device": choose_device_of_rank(order.device, group), "engine": order.engine}
        translator = group.in_rank_order(lambda: load_as(Translator, order.runs, **way))
        if group.is_main:
            engine = "torch" if order.engine == "auto" else order.engine
            log(f"engine {engine}, device {translator.device}, loaded in {time.monotonic() - begun:.1f} s", DETAIL)
        asking = group.run_on_all(lambda: Asking(translator, changes, order))
        if kept:
            asking.answer_file(group)
        elif order.stream:
            asking.stream_lines()
        else:
            asking.answer_lines()


class Asking:
    """A translator, and all that is asked of it but the lines. What cannot work is refused before any is read."""

    def __init__(self, translator: Translator, changes: dict[str, Any], order: Order) -> None:
        self.translator, self.order = translator, order
        translator.encode_tag(order.tag)
        self.settings = merge_search(translator.recipe.search, changes, beam=order.beam, count=order.nbest)
        self.glossary = read_glossary(order.glossary) if order.glossary else None
        self.dictionary = read_dictionary(order.dictionary) if order.dictionary else None

    def answer_lines(self) -> None:
        order = self.order
        name = str(order.given) if isinstance(order.given, Path) else "the input"
        grove = TreeReader(order.conllu, name) if order.conllu else None
        if self.translator.reads_trees and not grove:
            log("no trees were given with --conllu: words are known by their places alone", WARNING)
        flags: Counter[str] = Counter()

        def answer(before: int, lines: list[str]) -> Iterator[Said]:
            trees = [grove.tree_of(line) for line in lines] if grove else None
            for said, best in self.answered(before, lines, trees):
                flags.update(unwarned(best))
                yield said, [one for one in best.warnings if grove or one != NO_TREE]  # said of all lines, above

        answer_lines(answer, order.given, order.output_file, order.batch)
        say_counts(flags)
        if grove:
            grove.end()

    def answered(
        self, before: int, lines: Sequence[str], trees: Sequence[Tree | None] | None = None
    ) -> Iterator[tuple[str, Hypothesis]]:
        """What is said to each line, so many having come before, and the best answer to it."""
        found = self.translator.nbest(
            [self.line(line) for line in lines],
            trees=trees,
            search={**self.settings.model_dump(), "scores": self.order.as_json or self.settings.nbest > 1},
            dictionary=self.dictionary,
            align=self.order.as_json,
        )
        for number, (line, answers) in enumerate(zip(lines, found, strict=True), before + 1):
            yield said_as(number, line, answers, self.settings.nbest, self.order.as_json), answers[0]

    def answer_file(self, group: ProcessGroup) -> None:
        """The same for a file that is too long to be done twice, or by one process."""
        source, output = self.order.given, self.order.output_file
        assert isinstance(source, Path)
        assert output
        counts: Counter[str] = Counter()
        report = Report(quiet=not group.is_main)
        log_above = report.log if group.is_main else log  # above the progress, where there is one
        warned = Warned(log_above, group.world_size)

        def answer(before: int, lines: Sequence[str]) -> list[Record]:
            records = []
            for number, (said, best) in enumerate(self.answered(before, lines), before + 1):
                warned.tell(number, best.warnings)
                records.append({"said": said, "odd": [*warning_kinds(best.warnings), *unwarned(best)]})
            return records

        def said(records: Iterator[Record]) -> Iterator[str]:
            for record in records:
                counts.update(record["odd"])
                yield record["said"] + "\n"

        search = {f"search.{name}": value for name, value in self.settings.model_dump(mode="json").items()}
        mark = group.broadcast(lambda: fingerprint_corpus(CorpusSettings(text=str(source))))
        write_sharded(
            output,
            lambda: read_lines(source),
            answer,
            said,
            about={"input": mark, **self.order.about(), **search},
            batch=self.order.batch,
            group=group,
            report=report,
        )
        say_counts(counts)

    def stream_lines(self) -> None:
        """One line at a time, word by word."""
        warned, flags = Warned(), Counter[str]()
        with output_to(self.order.output_file) as sink:
            for number, line in enumerate(input_lines(self.order.given), 1):
                search = self.settings.model_dump()
                answer = spoken(
                    self.translator.stream(self.line(line), search=search, dictionary=self.dictionary), sink
                )
                warned.tell(number, answer.warnings)
                flags.update(unwarned(answer))
        say_counts(warned.lines + flags)

    def line(self, text: str) -> Line:
        line = Line(text, tag=self.order.tag)
        return self.glossary.line(line) if self.glossary else line


def unwarned(answer: Hypothesis) -> list[str]:
    """The flags of an answer that none of its warnings names already, so that a line is counted once for each."""
    return [flag for flag in answer.flags if flag not in warning_kinds(answer.warnings)]


def spoken(pieces: Generator[str, None, Hypothesis], sink: IO[str]) -> Hypothesis:
    """Print the pieces of an answer as they come, on one line."""
    while True:
        try:
            print(one_line(next(pieces)), end="", file=sink, flush=True)
        except StopIteration as end:
            print(file=sink, flush=True)
            answer: Hypothesis = end.value
            return answer


def said_as(number: int, line: str, answers: list[Hypothesis], nbest: int, as_json: bool) -> str:
    if as_json:
        many = {"nbest": [asdict(one) for one in answers]} if nbest > 1 else {}
        return json.dumps({"source": line, **asdict(answers[0]), **many}, ensure_ascii=False)
    if nbest > 1:
        return "\n".join(f"{number - 1} ||| {one_line(one.text)} ||| {one.score:.4f}" for one in answers)
    return one_line(answers[0].text)
