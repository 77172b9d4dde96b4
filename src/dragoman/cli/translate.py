"""Commands that turn lines into answers: translate, generate, classify."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.lines import input_groups, output_to
from dragoman.cli.options import (
    Batch,
    Beam,
    Conllu,
    Device,
    Engine,
    InputFile,
    Json,
    OutputFile,
    Run,
    Said,
    Tag,
    Texts,
    answer_lines,
    check_engine,
    check_files,
    check_runs,
    given_lines,
    one_line,
    split_arguments,
)
from dragoman.config.settings import SampleSettings, build
from dragoman.errors import UserError
from dragoman.progress import WARNING, log

TextsAndSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TEXT ...] [search.b=c ...]",
        help="lines to translate, not together with --input, and settings of the search to change",
        show_default=False,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT ...]", help="prompts; not together with --input", show_default=False),
]
NBest = Annotated[
    int | None, typer.Option(min=1, help="answers to each line, as 'line ||| text ||| score'", show_default="1")
]
Others = Annotated[
    list[Path] | None,
    typer.Option("--with", help="a further run with the same vocabulary: they answer as one", show_default=False),
]
Glossary = Annotated[
    Path | None,
    typer.Option(help="terms: 'source<tab>target', '!target' where it must not appear", show_default=False),
]
Dictionary = Annotated[
    Path | None,
    typer.Option(help="'word<tab>translation' for unknown words of a word vocabulary", show_default=False),
]
Stream = Annotated[bool, typer.Option("--stream", help="print words as soon as they are certain")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="for huge files: keep answers in OUTPUT.shards, and go on from there; works under torchrun"
    ),
]


def translate(
    run: Run,
    arguments: TextsAndSettings = None,
    input_file: InputFile = None,
    output_file: OutputFile = None,
    beam: Beam = None,
    nbest: NBest = None,
    others: Others = None,
    glossary: Glossary = None,
    dictionary: Dictionary = None,
    tag: Tag = "",
    stream: Stream = False,
    resume: Resume = False,
    conllu: Conllu = None,
    batch: Batch = 1024,
    as_json: Json = False,
    engine: Engine = "auto",
    device: Device = "auto",
) -> None:
    """Translate lines: as many out as in, in the same order.

    Lines come from --input or from the command line, not from both, or else from stdin, which is answered line by line.
    """
    texts, settings = split_arguments(arguments)
    given = given_lines(texts, input_file)
    check_engine(engine)
    check_runs([run, *(others or [])])
    check_files([input_file, glossary, dictionary, conllu])
    from dragoman.cli.translate_lines import Order, carry_out

    carry_out(
        Order(
            [run, *(others or [])],
            settings,
            given,
            output_file,
            beam=beam,
            nbest=nbest,
            glossary=glossary,
            dictionary=dictionary,
            tag=tag,
            stream=stream,
            resume=resume,
            conllu=conllu,
            batch=batch,
            as_json=as_json,
            engine=engine,
            device=device,
        )
    )


def generate(
    run: Run,
    texts: Prompts = None,
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
    check_files([input_file])
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


def classify(
    run: Run,
    texts: Texts = None,
    input_file: InputFile = None,
    output_file: OutputFile = None,
    batch: Batch = 256,
    as_json: Json = False,
    device: Device = "auto",
) -> None:
    """Put a label on lines: as many out as in, in the same order."""
    given = given_lines(texts, input_file)
    check_runs([run])
    check_files([input_file])
    from dragoman.inference.classifier import Classifier
    from dragoman.inference.loading import load_as

    classifier = load_as(Classifier, run, device=device)

    def answer(_: int, lines: list[str]) -> Iterator[Said]:
        for line, one in zip(lines, classifier.classify(lines), strict=True):
            record = {"source": line, **asdict(one)}
            yield json.dumps(record, ensure_ascii=False) if as_json else one_line(one.label), one.warnings

    answer_lines(answer, given, output_file, batch)
