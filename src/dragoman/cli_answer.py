"""Commands that turn lines into answers: translate, generate, classify."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli_options import (
    Batch,
    Beam,
    Conllu,
    Device,
    InputFile,
    Json,
    OutputFile,
    Run,
    Said,
    answer_lines,
    one_line,
)
from dragoman.config import build, pick
from dragoman.console import input_lines, output_to, say
from dragoman.types import Hypothesis, Mistake


def translate(
    run: Run,
    input_file: InputFile = None,
    output_file: OutputFile = None,
    beam: Beam = None,
    nbest: Annotated[int, typer.Option(min=1, help="answers to each line, as 'line ||| text ||| score'")] = 1,
    conllu: Conllu = None,
    batch: Batch = 256,
    as_json: Json = False,
    engine: Annotated[str, typer.Option(help="auto or torch")] = "auto",
    device: Device = "auto",
) -> None:
    """Translate lines: as many out as in, in the same order."""
    from dragoman.loading import load_as
    from dragoman.text.trees import Grove
    from dragoman.translator import TREELESS, Translator

    pick({"auto": 0, "torch": 0}, engine, "engine")
    translator = load_as(Translator, run, device=device)
    grove = Grove(conllu, str(input_file or "the input")) if conllu else None
    if translator.asks_for_trees and not grove:
        say("no trees were given with --conllu: words are known by their places alone")

    def answer(before: int, lines: list[str]) -> Iterator[Said]:
        trees = [grove.tree_of(line) for line in lines] if grove else None
        found = translator.nbest(lines, count=nbest, beam=beam, trees=trees)
        for number, (line, answers) in enumerate(zip(lines, found, strict=True), before + 1):
            warnings = [one for one in answers[0].warnings if grove or one != TREELESS]  # said of all lines, above
            yield said_as(number, line, answers, nbest, as_json), warnings

    answer_lines(answer, input_file, output_file, batch)
    if grove:
        grove.end()


def said_as(number: int, line: str, answers: list[Hypothesis], nbest: int, as_json: bool) -> str:
    if as_json:
        many = {"nbest": [asdict(one) for one in answers]} if nbest > 1 else {}
        return json.dumps({"source": line, **asdict(answers[0]), **many}, ensure_ascii=False)
    if nbest > 1:
        return "\n".join(f"{number - 1} ||| {one_line(one.text)} ||| {one.score:.4f}" for one in answers)
    return one_line(answers[0].text)


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="the beginning of the text")] = "",
    input_file: Annotated[
        Path | None, typer.Option("--input", help="instead: one prompt a line", show_default=False)
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
    from dragoman.generator import Generator
    from dragoman.loading import load_as
    from dragoman.search.sample import SampleSettings

    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    settings = build(SampleSettings, drawing, where="generate")
    if prompt and input_file:
        raise Mistake("generate takes --prompt TEXT or --input F, not both")
    generator = load_as(Generator, run, device=device)
    prompts = input_lines(input_file) if input_file else iter([prompt])
    between = "---\n" if generator.whole_files else ""  # texts of many lines need a mark between them
    with output_to(output_file) as sink:
        number = 0  # of the prompt
        while some := list(islice(prompts, 64)):
            for texts in generator.generate(some, count=count, tokens=tokens, seed=seed, settings=settings):
                for one in texts:
                    mark = "" if (number == 0 and one is texts[0]) or as_json else between
                    print(mark + (json.dumps(asdict(one), ensure_ascii=False) if as_json else one.text), file=sink)
                number += 1
                for warning in dict.fromkeys(warning for one in texts for warning in one.warnings):
                    say(f"prompt {number}: {warning}")
            sink.flush()


def classify(
    run: Run,
    input_file: InputFile = None,
    output_file: OutputFile = None,
    batch: Batch = 256,
    as_json: Json = False,
    device: Device = "auto",
) -> None:
    """Put a label on lines: as many out as in, in the same order."""
    from dragoman.classifier import Classifier
    from dragoman.loading import load_as

    classifier = load_as(Classifier, run, device=device)

    def answer(_: int, lines: list[str]) -> Iterator[Said]:
        for line, one in zip(lines, classifier.classify(lines), strict=True):
            record = {"source": line, **asdict(one)}
            yield json.dumps(record, ensure_ascii=False) if as_json else one_line(one.label), one.warnings

    answer_lines(answer, input_file, output_file, batch)
