"""The commands that apply a model to lines of text: translate, generate and classify.

PyTorch, which takes seconds to import, is imported only after the arguments have been checked.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, cast

from typer import Argument, Option

from dragoman.cli import line_io
from dragoman.cli import options as opt
from dragoman.config.settings import SampleSettings, parse_settings
from dragoman.errors import UserError
from dragoman.io import digest_bytes, read_bytes
from dragoman.progress import DETAIL, WARNING, ProgressBar, Report, log
from dragoman.types import Hypothesis, Line

if TYPE_CHECKING:
    from dragoman.augmentation.jobs import Record
    from dragoman.inference.directions import Direction
    from dragoman.process_group import ProcessGroup


@dataclass(frozen=True)
class TranslateOptions:
    """The arguments and options of `dragoman translate`, one per field (see `adapt_for_typer` in options.py)."""

    run: opt.Run
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="[TEXT ...] [search.b=c ...]",
            help="text to translate, one line per argument (cannot be combined with --input), and search settings",
        ),
    ] = None
    input_file: opt.InputFile = None
    output_file: opt.OutputFile = None
    document: Annotated[
        Path | None,
        Option(
            help="translate a TMX, PO, XLIFF, SRT, Markdown, HTML, DOCX or text file, and keep its structure; "
            "needs --output"
        ),
    ] = None
    beam: opt.Beam = None
    nbest: Annotated[
        int | None, Option(min=1, help="translations per line, printed as 'line ||| text ||| score'", show_default="1")
    ] = None
    others: opt.OtherRuns = None
    glossary: Annotated[
        Path | None,
        Option(
            help="one term per line: 'source<tab>target' (instead of other translations), 'source<tab>!target' "
            "(forbidden for this source), '!target' (always forbidden)"
        ),
    ] = None
    dictionary: Annotated[
        Path | None,
        Option(help="'word<tab>translation' per line, for unknown words of a word vocabulary"),
    ] = None
    prefix: opt.ForcedPrefix = ""
    tag: opt.Tag = ""  # put before each source as special tokens
    source_language: opt.SourceLanguage = ""
    target_language: opt.TargetLanguage = ""
    context: opt.Context = None
    stream: Annotated[bool, Option("--stream", help="print words as soon as all beam hypotheses agree on them")] = False
    resume: Annotated[
        bool,
        Option(
            "--resume",
            help="for huge files: save translations in OUTPUT.shards and resume from there; works under torchrun",
        ),
    ] = False
    conllu: opt.Conllu = None
    batch: opt.BatchSize = 1024
    as_json: opt.Json = False
    engine: opt.EngineName = "auto"
    device: opt.Device = "auto"


def translate_command(options: TranslateOptions) -> None:
    """Translate lines: one line of output per line of input, in the same order.

    Lines come from the command line or --input, otherwise from stdin, where each is translated as soon as it arrives.
    """
    source: line_io.InputSource = options.input_file
    overrides: list[str] = []
    if options.arguments:
        texts, overrides = line_io.split_arguments(options.arguments)
        source = line_io.choose_input(texts, options.input_file)
    runs = [options.run, *(options.others or [])]
    if options.document:
        check_document_options(options, has_text=source is not None)
    inputs = [options.input_file, options.glossary, options.dictionary, options.conllu, options.document]
    opt.check_arguments(engine=options.engine, runs=runs, inputs=inputs, output=options.output_file)
    if options.resume or opt.is_distributed():
        from dragoman.process_group import join_process_group

        with join_process_group() as group:
            # Rank 0 loads first: an engine may convert the model and cache the result, which the other ranks reuse.
            line_translator = group.run_main_first(lambda: LineTranslator(runs, options, overrides, group))
            line_translator.translate_file(group)
        return
    if options.stream and options.engine not in ("auto", "torch"):
        raise UserError(f"--stream needs the engine torch, not {options.engine}; leave --engine out")
    if options.stream and (options.as_json or options.nbest or options.conllu):
        raise UserError(
            "--stream prints one translation word by word and cannot be combined with --json, --nbest or --conllu"
        )
    line_translator = LineTranslator(runs, options, overrides)
    if options.document:
        write_translated_document(options, line_translator)
        return
    if options.stream:
        line_translator.stream_lines(source)
    else:
        line_io.process_lines(line_translator.translate, source, options.output_file, options.batch)
    if line_translator.tree_reader:
        line_translator.tree_reader.check_end()  # raises a UserError if the file has more trees than there are lines


def check_document_options(options: TranslateOptions, *, has_text: bool) -> None:
    """Raise a UserError for options that a document does not allow, and for a missing output file."""
    others = {
        "text or --input": has_text,
        "--nbest": options.nbest,
        "--json": options.as_json,
        "--stream": options.stream,
        "--resume": options.resume or opt.is_distributed(),
        "--conllu": options.conllu,
        "--prefix": options.prefix,
    }
    if given := [name for name, value in others.items() if value]:
        raise UserError(f"--document cannot be combined with {given[0]}; leave one of them out")
    if not options.output_file:
        raise UserError("--document needs --output, the file for the translated document")


def write_translated_document(options: TranslateOptions, line_translator: LineTranslator) -> None:
    """Translate a document, and log its warnings and what was translated."""
    from dragoman.inference.document_translation import translate_document

    assert options.document
    assert options.output_file
    start, warning_log = time.monotonic(), line_io.WarningLog(item="unit")
    with ProgressBar("translating", unit="units") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.set_done(done)

        result = translate_document(
            line_translator.translator,
            read_bytes(options.document),
            str(options.document),
            options=replace(line_translator.decode_options, align=True),
            glossary=line_translator.glossary,
            source_language=line_translator.direction.source,
            target_language=line_translator.direction.target,
            progress=show,
        )
    for number, warnings in result.unit_warnings.items():
        warning_log.log(number, warnings)
    line_io.log_warning_counts(warning_log.line_counts, "unit")
    with line_io.open_output(options.output_file) as file:
        cast(TextIO, file).buffer.write(result.data)
    skipped = f"; {result.skipped:,} left as they were" if result.skipped else ""
    units = f"{result.units:,} unit{'s' * (result.units != 1)}"
    seconds = time.monotonic() - start
    log(f"{units} ({result.characters:,} characters) translated in {seconds:.1f} s{skipped}")


class LineTranslator:
    """A model with its decoding options and, if given, a glossary and syntax trees, for `dragoman translate`.

    `translate` is for a batch of lines, `translate_file` for --resume and torchrun, `stream_lines` for --stream.
    """

    def __init__(
        self, runs: list[Path], options: TranslateOptions, overrides: Sequence[str], group: ProcessGroup | None = None
    ) -> None:
        """Load the model and the files; raise a UserError for invalid options before any line is read.

        `group` is the process group that translates a file in shards; None if the file is not translated in shards.
        """
        from dragoman.augmentation.jobs import choose_device_of_rank
        from dragoman.data.context import ContextWindow
        from dragoman.data.trees import TreeReader
        from dragoman.inference.constraints import read_dictionary, read_glossary
        from dragoman.inference.loading import load_as
        from dragoman.inference.translator import Translator

        search = line_io.parse_search_overrides(overrides, {"unknown": "dictionary"} if options.dictionary else {})
        if group and (options.stream or options.conllu):
            raise UserError(
                "--resume and torchrun translate a file in shards and cannot be combined with --stream or --conllu"
            )
        paths = [path for path in (options.input_file, options.output_file) if path]
        if group and (len(paths) < 2 or any(path.exists() and not path.is_file() for path in paths)):
            raise UserError("--resume and torchrun require --input F and --output F to be regular files")
        device = choose_device_of_rank(options.device, group) if group else options.device
        log_on_main = Report(quiet=not group.is_main).log if group else log
        start = time.monotonic()
        self.runs, self.options = runs, options
        self.translator = load_as(Translator, runs, device=device, engine=options.engine)
        self.direction = self.choose_direction()
        default_engine = "torch" if self.translator.supports_engines else self.translator.recipe.model.kind
        engine = default_engine if options.engine == "auto" else options.engine
        seconds = time.monotonic() - start
        log_on_main(f"engine {engine}, device {self.translator.device}, loaded in {seconds:.1f} s", DETAIL)
        constraints = {"--glossary": options.glossary, "--prefix": options.prefix}
        given = [name for name, value in constraints.items() if value]
        if given and not self.translator.supports_constraints:
            raise UserError(f"model.kind={self.translator.recipe.model.kind} has no use for {given[0]}; leave it out")
        # The translations of sentences given on the command line are shown with their alignment on a terminal.
        is_typed = bool(options.arguments) and not options.input_file and not options.output_file
        self.draws_alignments = is_typed and sys.stdout.isatty() and not options.as_json and not options.nbest
        decode_options = self.translator.make_options(
            beam=options.beam,
            count=options.nbest,
            search=search,
            dictionary=read_dictionary(options.dictionary) if options.dictionary else None,
            tag=self.direction.tag,
            align=options.as_json or self.draws_alignments,
            context=options.context,
        )
        needs_scores = options.as_json or decode_options.search.nbest > 1
        search_settings = decode_options.search.model_copy(update={"scores": needs_scores})
        self.decode_options = replace(decode_options, search=search_settings)
        self.translator.encode_tag(self.direction.tag)  # raises a UserError if the tag is unknown or missing
        if self.translator.reads_trees and not options.conllu:
            message = "this model was trained with syntax trees, but no --conllu was given; it uses word order only"
            log_on_main(message, WARNING)
        self.window = ContextWindow(self.decode_options.context)  # of the lines translated so far, for later batches
        self.glossary = read_glossary(options.glossary) if options.glossary else None
        input_name = str(options.input_file or "the input")
        self.tree_reader = TreeReader(options.conllu, input_name) if options.conllu else None

    def choose_direction(self) -> Direction:
        """Return the direction given by --from and --to, or that of --tag."""
        from dragoman.inference.directions import Direction, choose_direction

        options = self.options
        if not (options.source_language or options.target_language):
            fitting = [direction for direction in self.translator.directions if direction.tag == options.tag]
            return fitting[0] if len(fitting) == 1 else Direction("", "", options.tag)
        if options.tag:
            raise UserError("--from and --to choose the tag of the lines; leave --tag out")
        return choose_direction(self.translator, options.source_language, options.target_language)

    def make_line(self, item: str | Line) -> Line:
        """Return a line with its context, the forced prefix and the terms of the glossary that apply to it.

        The context of a text is the lines before it, in this batch and in earlier ones.
        """
        line = Line(item, context=self.window.advance(item)) if isinstance(item, str) else item
        line = replace(line, prefix=self.options.prefix)
        return self.glossary.add_terms(line) if self.glossary else line

    def translate(self, offset: int, items: Sequence[str | Line]) -> Iterator[line_io.OutputLine]:
        """Yield the output for each line of a batch. `offset` is the number of lines before the batch.

        Items of a file that is translated in shards have their context already.
        """
        from dragoman.inference.translator import NO_TREE_WARNING
        from dragoman.inspection.attention_maps import render_alignment

        nbest, as_json = self.decode_options.search.nbest, self.options.as_json
        lines = [self.make_line(item) for item in items]
        trees = [self.tree_reader.read_next(line.text) for line in lines] if self.tree_reader else None
        results = self.translator.translate_nbest(lines, self.decode_options, trees=trees)
        for number, (line, hypotheses) in enumerate(zip(lines, results, strict=True), offset):
            best = hypotheses[0]
            if as_json:
                records = [asdict(hypothesis) for hypothesis in hypotheses]
                for record in records:
                    if not record["features"]:  # only log-linear models have them
                        del record["features"]
                nbest_list = {"nbest": records} if nbest > 1 else {}
                text = json.dumps({"source": line.text, **records[0], **nbest_list}, ensure_ascii=False)
            elif nbest > 1:
                rows = [(hypothesis.text.translate(line_io.LINE_BREAKS), hypothesis.score) for hypothesis in hypotheses]
                text = "\n".join(f"{number} ||| {text} ||| {score:.4f}" for text, score in rows)
            else:
                text = best.text.translate(line_io.LINE_BREAKS)
            # Without --conllu all trees are missing, and one warning was logged when the model was loaded.
            warnings = [warning for warning in best.warnings if self.tree_reader or warning != NO_TREE_WARNING]
            drawing = render_alignment(best) if self.draws_alignments and best.alignment else None
            yield line_io.OutputLine(text, warnings, best.flags, drawing)

    def translate_file(self, group: ProcessGroup) -> None:
        """Translate a file in shards, which are divided among the processes and removed when the output is complete."""
        from dragoman.augmentation.jobs import list_dependencies, write_sharded

        options, source, output = self.options, self.options.input_file, self.options.output_file
        assert source
        assert output
        warning_counts: Counter[str] = Counter()  # of the complete file, including shards of an earlier command
        warning_log = line_io.WarningLog(processes=group.world_size)

        def process(offset: int, lines: Sequence[str | Line]) -> list[Record]:
            # "said" is the translation, "odd" the kinds of its warnings and flags. These names are part of the file
            # format: shards of earlier releases have them.
            return [
                {"said": line.text, "odd": warning_log.log(number, line.warnings, line.flags)}
                for number, line in enumerate(self.translate(offset, lines), offset + 1)
            ]

        def format_records(records: Iterator[Record]) -> Iterator[str]:
            for record in records:
                warning_counts.update(record["odd"])
                yield record["said"] + "\n"

        files = {"glossary": options.glossary, "dictionary": options.dictionary}
        digests = {name: digest_bytes(path.read_bytes()) if path else "" for name, path in files.items()}
        other_options = {**digests, "engine": options.engine, "tag": self.direction.tag, "json": options.as_json}
        if options.prefix:  # shards of earlier releases do not name it
            other_options["prefix"] = options.prefix
        if context := self.decode_options.context:
            other_options["context"] = context
        depends = list_dependencies(source, self.runs, self.decode_options.search, group, **other_options)
        write_sharded(
            source,
            output,
            process,
            format_records,
            depends_on=depends,
            batch=options.batch,
            group=group,
            context=context,
        )
        line_io.log_warning_counts(warning_counts)

    def stream_lines(self, source: line_io.InputSource) -> None:
        """Translate one line at a time, and print words as soon as all beam hypotheses agree on them."""
        warning_log = line_io.WarningLog()
        with line_io.open_output(self.options.output_file) as file:
            for number, [text] in enumerate(line_io.read_batches(source, 1), 1):
                # A generator that returns a Hypothesis
                words = self.translator.stream_line(self.make_line(text), self.decode_options)
                while True:
                    try:
                        print(next(words).translate(line_io.LINE_BREAKS), end="", file=file, flush=True)
                    except StopIteration as end:
                        hypothesis: Hypothesis = end.value
                        break
                print(file=file, flush=True)
                warning_log.log(number, hypothesis.warnings, hypothesis.flags)
        line_io.log_warning_counts(warning_log.line_counts)


def generate_command(
    run: opt.Run,
    texts: Annotated[
        list[str] | None, Argument(metavar="[TEXT ...]", help="prompts; cannot be combined with --input")
    ] = None,
    prompt: Annotated[str, Option(help="text to continue")] = "",
    input_file: Annotated[Path | None, Option("-i", "--input", help="file with one prompt per line; -: stdin")] = None,
    output_file: opt.OutputFile = None,
    count: Annotated[int, Option(min=1, help="texts per prompt")] = 1,
    tokens: Annotated[int, Option(min=1, help="maximum number of new tokens")] = 256,
    temperature: Annotated[float, Option(help="sampling temperature; below 1: less random; 0: greedy")] = 1.0,
    top_k: Annotated[int, Option(help="sample from the k most likely tokens; 0: all")] = 0,
    top_p: Annotated[float, Option(help="sample from the smallest set of tokens with this total probability")] = 1.0,
    seed: Annotated[int, Option(min=0, help="random seed for sampling")] = 1,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
) -> None:
    """Continue prompts with a language model."""
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    settings = parse_settings(SampleSettings, values, where="generate")
    prompts = [*([prompt] if prompt else []), *(texts or [])]
    if prompts and input_file:
        raise UserError("generate takes prompts on the command line or by --input F, not both")
    opt.check_arguments(runs=[run], inputs=[input_file])
    from dragoman.inference.loading import load_as
    from dragoman.inference.single_sequence import Generator

    generator = load_as(Generator, run, device=device)
    separator = "---\n" if generator.whole_files else ""  # models trained on whole files generate texts of many lines
    with line_io.open_output(output_file) as file:
        number = 0  # prompts processed
        for batch in line_io.read_batches(input_file or prompts or [""], 64):
            for texts_of_prompt in generator.generate(batch, count=count, tokens=tokens, seed=seed, settings=settings):
                for text in texts_of_prompt:
                    prefix = "" if (number == 0 and text is texts_of_prompt[0]) or as_json else separator
                    print(prefix + (json.dumps(asdict(text), ensure_ascii=False) if as_json else text.text), file=file)
                number += 1
                for warning in dict.fromkeys(warning for text in texts_of_prompt for warning in text.warnings):
                    log(f"prompt {number}: {warning}", WARNING)
            file.flush()


def classify_command(
    run: opt.Run,
    texts: opt.TextArguments = None,
    input_file: opt.InputFile = None,
    output_file: opt.OutputFile = None,
    others: opt.OtherRuns = None,
    batch: opt.BatchSize = 256,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
) -> None:
    """Print the label of each line: one line of output per line of input, in the same order."""
    source = line_io.choose_input(texts, input_file)
    runs = [run, *(others or [])]
    opt.check_arguments(runs=runs, inputs=[input_file])
    from dragoman.inference.loading import load_as
    from dragoman.inference.single_sequence import Classifier

    classifier = load_as(Classifier, runs, device=device)

    def process(_: int, lines: list[str]) -> Iterator[line_io.OutputLine]:
        for line, result in zip(lines, classifier.classify(lines), strict=True):
            record = {"source": line, **asdict(result)}
            text = json.dumps(record, ensure_ascii=False) if as_json else result.label.translate(line_io.LINE_BREAKS)
            yield line_io.OutputLine(text, result.warnings)

    line_io.process_lines(process, source, output_file, batch)
