"""Commands that map lines to lines: translate, generate, classify.

PyTorch, which takes seconds to import, is imported only after the arguments have been checked.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.lines import (
    Input,
    LineWarnings,
    OutputLine,
    choose_input,
    input_groups,
    input_lines,
    log_counts,
    one_line,
    output_to,
    process_lines,
    split_arguments,
)
from dragoman.cli.options import (
    BatchSize,
    Beam,
    Conllu,
    Device,
    EngineName,
    InputFile,
    Json,
    OutputFile,
    Run,
    Tag,
    Texts,
    check_engine,
    check_input_files,
    check_output,
    check_runs,
)
from dragoman.config.settings import CorpusSettings, SampleSettings, build
from dragoman.errors import UserError
from dragoman.io import digest_bytes, read_lines
from dragoman.progress import DETAIL, WARNING, Report, log
from dragoman.types import Hypothesis, Line, Tree

if TYPE_CHECKING:
    from dragoman.augmentation.jobs import Record
    from dragoman.inference.translator import Translator
    from dragoman.process_group import ProcessGroup


@dataclass(frozen=True)
class TranslateOptions:
    """The arguments and options of `dragoman translate`."""

    run: Run
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT ...] [search.b=c ...]",
            help="lines to translate, not together with --input, and settings of the search to change",
            show_default=False,
        ),
    ] = None
    input_file: InputFile = None
    output_file: OutputFile = None
    beam: Beam = None
    nbest: Annotated[
        int | None, typer.Option(min=1, help="answers to each line, as 'line ||| text ||| score'", show_default="1")
    ] = None
    others: Annotated[
        list[Path] | None,
        typer.Option("--with", help="a further run with the same vocabulary: an ensemble", show_default=False),
    ] = None
    glossary: Annotated[
        Path | None,
        typer.Option(help="terms: 'source<tab>target', '!target' where it must not appear", show_default=False),
    ] = None
    dictionary: Annotated[
        Path | None,
        typer.Option(help="'word<tab>translation' for unknown words of a word vocabulary", show_default=False),
    ] = None
    tag: Tag = ""
    stream: Annotated[bool, typer.Option("--stream", help="print words as soon as they are certain")] = False
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="for huge files: keep answers in OUTPUT.shards, and go on from there; works under torchrun",
        ),
    ] = False
    conllu: Conllu = None
    batch: BatchSize = 1024
    as_json: Json = False
    engine: EngineName = "auto"
    device: Device = "auto"

    @property
    def runs(self) -> list[Path]:
        return [self.run, *(self.others or [])]

    def check(self, *, sharded: bool) -> None:
        """Refuse options that do not go together. `sharded`: the file is translated in resumable shards."""
        if self.stream and self.engine not in ("auto", "torch"):
            raise UserError(f"--stream needs the engine torch, not {self.engine}; leave the engine out")
        if self.stream and (self.as_json or self.nbest or self.conllu):
            raise UserError("--stream prints words of one answer as they come; leave --json, --nbest and --conllu out")
        if sharded and (self.stream or self.conllu):
            raise UserError("--resume, and torchrun, do a file in shards; leave --stream and --conllu out")
        files = [path for path in (self.input_file, self.output_file) if path and (path.is_file() or not path.exists())]
        if sharded and len(files) < 2:
            raise UserError("--resume, and torchrun, need --input F and --output F, which are plain files")


def translate_command(options: TranslateOptions) -> None:
    """Translate lines: as many out as in, in the same order.

    Lines come from --input or from the command line, not from both, or else from stdin, which is answered line by line.
    """
    texts, overrides = split_arguments(options.arguments)
    given = choose_input(texts, options.input_file)
    check_engine(options.engine)
    check_runs(options.runs)
    check_input_files([options.input_file, options.glossary, options.dictionary, options.conllu])
    check_output(options.output_file)
    from dragoman.augmentation.jobs import choose_device_of_rank
    from dragoman.inference.constraints import parse_search_overrides
    from dragoman.inference.loading import load_as
    from dragoman.inference.translator import Translator
    from dragoman.process_group import join_process_group

    start = time.monotonic()
    with join_process_group() as group:
        unknown = {"unknown": "dictionary"} if options.dictionary else {}
        changes = group.run_on_all(lambda: parse_search_overrides(overrides, unknown))
        sharded = options.resume or group.is_distributed
        group.broadcast(lambda: options.check(sharded=sharded))
        device = choose_device_of_rank(options.device, group)
        translator = group.in_rank_order(
            lambda: load_as(Translator, options.runs, device=device, engine=options.engine)
        )
        if group.is_main:
            engine = "torch" if options.engine == "auto" else options.engine
            log(f"engine {engine}, device {translator.device}, loaded in {time.monotonic() - start:.1f} s", DETAIL)
        work = group.run_on_all(lambda: LineTranslator(translator, changes, options))
        if sharded:
            work.translate_file(group)
        elif options.stream:
            work.stream_lines(given)
        else:
            work.translate_lines(given)


class LineTranslator:
    """A translator with the options of the command. What cannot work is refused before a line is read."""

    def __init__(self, translator: Translator, changes: dict[str, Any], options: TranslateOptions) -> None:
        from dragoman.inference.constraints import merge_search, read_dictionary, read_glossary

        self.translator, self.options = translator, options
        translator.encode_tag(options.tag)
        self.settings = merge_search(translator.recipe.search, changes, beam=options.beam, count=options.nbest)
        self.glossary = read_glossary(options.glossary) if options.glossary else None
        self.dictionary = read_dictionary(options.dictionary) if options.dictionary else None

    def make_line(self, text: str) -> Line:
        """Return a line with its tag, and the terms that the glossary has for it."""
        line = Line(text, tag=self.options.tag)
        return self.glossary.line(line) if self.glossary else line

    def translate_batch(
        self, before: int, lines: Sequence[str], trees: Sequence[Tree | None] | None = None
    ) -> Iterator[tuple[str, Hypothesis]]:
        """Yield the output for each line and its best hypothesis; `before` is the number of lines before these."""
        nbest, as_json = self.settings.nbest, self.options.as_json
        found = self.translator.nbest(
            [self.make_line(line) for line in lines],
            trees=trees,
            search={**self.settings.model_dump(), "scores": as_json or nbest > 1},
            dictionary=self.dictionary,
            align=as_json,
        )
        for number, (line, answers) in enumerate(zip(lines, found, strict=True), before):
            if as_json:
                all_of_them = {"nbest": [asdict(one) for one in answers]} if nbest > 1 else {}
                text = json.dumps({"source": line, **asdict(answers[0]), **all_of_them}, ensure_ascii=False)
            elif nbest > 1:
                text = "\n".join(f"{number} ||| {one_line(one.text)} ||| {one.score:.4f}" for one in answers)
            else:
                text = one_line(answers[0].text)
            yield text, answers[0]

    def translate_lines(self, given: Input) -> None:
        """Translate batch by batch."""
        from dragoman.data.trees import TreeReader
        from dragoman.inference.translator import NO_TREE_WARNING

        options = self.options
        reader = TreeReader(options.conllu, str(options.input_file or "the input")) if options.conllu else None
        if self.translator.reads_trees and not reader:
            log("no trees were given with --conllu: words are known by their positions alone", WARNING)
        flags: Counter[str] = Counter()

        def process(before: int, lines: list[str]) -> Iterator[OutputLine]:
            trees = [reader.tree_of(line) for line in lines] if reader else None
            for text, best in self.translate_batch(before, lines, trees):
                flags.update(new_flags(best))
                yield text, [one for one in best.warnings if reader or one != NO_TREE_WARNING]  # logged once, above

        process_lines(process, given, options.output_file, options.batch)
        log_counts(flags)
        if reader:
            reader.end()

    def translate_file(self, group: ProcessGroup) -> None:
        """Translate a file in shards that are kept until all are done, by one process or several."""
        from dragoman.augmentation.jobs import digest_runs, write_sharded
        from dragoman.data.corpus import fingerprint_corpus
        from dragoman.inference.postprocess import warning_kinds

        options, source, output = self.options, self.options.input_file, self.options.output_file
        assert source
        assert output
        counts: Counter[str] = Counter()
        report = Report(quiet=not group.is_main)
        warned = LineWarnings(processes=group.world_size)

        def process(before: int, lines: Sequence[str]) -> list[Record]:
            records = []
            for number, (text, best) in enumerate(self.translate_batch(before, lines), before + 1):
                warned.log(number, best.warnings)
                records.append({"said": text, "odd": [*warning_kinds(best.warnings), *new_flags(best)]})
            return records

        def write(records: Iterator[Record]) -> Iterator[str]:
            for record in records:
                counts.update(record["odd"])
                yield record["said"] + "\n"

        # What the answers depend on. Shards of an earlier call are used if all of it is the same.
        files = {"glossary": options.glossary, "dictionary": options.dictionary}
        about = {
            "input": group.broadcast(lambda: fingerprint_corpus(CorpusSettings(text=str(source)))),
            "model": digest_runs(options.runs),
            **{name: digest_bytes(path.read_bytes()) if path else "" for name, path in files.items()},
            "engine": options.engine,
            "tag": options.tag,
            "json": options.as_json,
            **{f"search.{name}": value for name, value in self.settings.model_dump(mode="json").items()},
        }
        write_sharded(
            output,
            lambda: read_lines(source),
            process,
            write,
            about=about,
            batch=options.batch,
            group=group,
            report=report,
        )
        log_counts(counts)

    def stream_lines(self, given: Input) -> None:
        """Translate one line at a time, and print words as soon as they are certain."""
        warned, flags = LineWarnings(), Counter[str]()
        search = self.settings.model_dump()
        with output_to(self.options.output_file) as sink:
            for number, line in enumerate(input_lines(given), 1):
                words = self.translator.stream(self.make_line(line), search=search, dictionary=self.dictionary)
                while True:
                    try:
                        print(one_line(next(words)), end="", file=sink, flush=True)
                    except StopIteration as end:
                        answer: Hypothesis = end.value
                        break
                print(file=sink, flush=True)
                warned.log(number, answer.warnings)
                flags.update(new_flags(answer))
        log_counts(warned.lines + flags)


def new_flags(answer: Hypothesis) -> list[str]:
    """Return the flags of an answer that none of its warnings names already: a line counts once for each."""
    from dragoman.inference.postprocess import warning_kinds

    return [flag for flag in answer.flags if flag not in warning_kinds(answer.warnings)]


def generate_command(
    run: Run,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT ...]", help="prompts; not together with --input", show_default=False),
    ] = None,
    prompt: Annotated[str, typer.Option(help="the beginning of the text")] = "",
    input_file: Annotated[
        Path | None, typer.Option("-i", "--input", help="instead: one prompt a line; - is stdin", show_default=False)
    ] = None,
    output_file: OutputFile = None,
    count: Annotated[int, typer.Option(min=1, help="texts for each prompt")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="the most that a text may add")] = 256,
    temperature: Annotated[float, typer.Option(help="below 1: safer, above 1: bolder; 0: the likeliest tokens")] = 1.0,
    top_k: Annotated[int, typer.Option(help="draw from so many likeliest tokens; 0: from all")] = 0,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest tokens of this probability together")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="of what is drawn")] = 1,
    as_json: Json = False,
    device: Device = "auto",
) -> None:
    """Let a language model go on from a prompt."""
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    settings = build(SampleSettings, drawing, where="generate")
    prompts = [*([prompt] if prompt else []), *(texts or [])]
    if prompts and input_file:
        raise UserError("generate takes prompts on the command line or by --input F, not both")
    check_runs([run])
    check_input_files([input_file])
    from dragoman.inference.generator import Generator
    from dragoman.inference.loading import load_as

    generator = load_as(Generator, run, device=device)
    between = "---\n" if generator.whole_files else ""  # texts of many lines need a mark between them
    with output_to(output_file) as sink:
        number = 0  # of the prompt
        for some in input_groups(input_file or prompts or [""], 64):
            for found in generator.generate(some, count=count, tokens=tokens, seed=seed, settings=settings):
                for one in found:
                    mark = "" if (number == 0 and one is found[0]) or as_json else between
                    print(mark + (json.dumps(asdict(one), ensure_ascii=False) if as_json else one.text), file=sink)
                number += 1
                for warning in dict.fromkeys(warning for one in found for warning in one.warnings):
                    log(f"prompt {number}: {warning}", WARNING)
            sink.flush()


def classify_command(
    run: Run,
    texts: Texts = None,
    input_file: InputFile = None,
    output_file: OutputFile = None,
    batch: BatchSize = 256,
    as_json: Json = False,
    device: Device = "auto",
) -> None:
    """Put a label on lines: as many out as in, in the same order."""
    given = choose_input(texts, input_file)
    check_runs([run])
    check_input_files([input_file])
    from dragoman.inference.classifier import Classifier
    from dragoman.inference.loading import load_as

    classifier = load_as(Classifier, run, device=device)

    def process(_: int, lines: list[str]) -> Iterator[OutputLine]:
        for line, one in zip(lines, classifier.classify(lines), strict=True):
            record = {"source": line, **asdict(one)}
            yield json.dumps(record, ensure_ascii=False) if as_json else one_line(one.label), one.warnings

    process_lines(process, given, output_file, batch)
