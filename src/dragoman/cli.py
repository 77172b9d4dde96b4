"""The command line. Each subcommand reads its arguments and calls one function.

Results go to stdout, everything else to stderr. Exit 0: done. Exit 2: the user's mistake, one sentence.
Exit 1: ours. Ctrl-C: 130.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console

from dragoman.config import CorpusSettings, build, pick
from dragoman.types import Hypothesis, Mistake, Stop

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Learn to turn one sequence into another, translation first, and show how.",
)
data = typer.Typer(no_args_is_help=True, help="Look at, filter and make corpora.")
app.add_typer(data, name="data")
said = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

Run = Annotated[Path, typer.Argument(help="a run folder", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
Beam = Annotated[int | None, typer.Option(min=1, help="width of the beam; 1 is greedy; by default the run's own")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="settings to change", show_default=False)
]
SourceFile = Annotated[
    Path | None, typer.Option("--source", help="plain text, one sentence a line", show_default=False)
]
TargetFile = Annotated[Path | None, typer.Option("--target", help="its translations, line by line", show_default=False)]
TsvFile = Annotated[Path | None, typer.Option("--tsv", help="source and target in columns", show_default=False)]
JsonlFile = Annotated[Path | None, typer.Option("--jsonl", help="objects with source and target", show_default=False)]


@app.command()
def demo(
    overrides: Overrides = None,
    out_folder: Annotated[Path, typer.Option("--out", help="where the run goes")] = Path("runs/demo"),
) -> None:
    """Train the default model on the built-in corpus, score it, translate with it."""
    from dragoman.demo import demo as run_demo

    run_demo(out_folder, overrides or [], paper())


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="a recipe in YAML", show_default=False)],
    overrides: Overrides = None,
    out_folder: Annotated[Path, typer.Option("--out", help="the run folder to make", show_default=False)] = ...,  # type: ignore[assignment]
    resume: Annotated[bool, typer.Option("--resume", help="go on exactly where the run was")] = False,
    init_from: Annotated[
        Path | None, typer.Option(help="a run whose weights to begin with", show_default=False)
    ] = None,
) -> None:
    """Train a model from a recipe into a run folder."""
    from dragoman.train.trainer import train as run_training

    run_training(recipe, out=out_folder, overrides=overrides or [], resume=resume, init_from=init_from)


@app.command()
def translate(
    run: Run,
    input_file: Annotated[Path | None, typer.Option("--input", help="by default stdin", show_default=False)] = None,
    output_file: Annotated[Path | None, typer.Option("--output", help="by default stdout", show_default=False)] = None,
    beam: Beam = None,
    nbest: Annotated[int, typer.Option(min=1, help="answers to each line, as 'line ||| text ||| score'")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="lines taken at a time; never changes an answer")] = 256,
    as_json: Json = False,
    engine: Annotated[str, typer.Option(help="auto or torch")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
) -> None:
    """Translate lines: as many out as in, in the same order."""
    from dragoman.translator import kinds, load

    pick({"auto": 0, "torch": 0}, engine, "engine")
    translator = load(run, device=device)
    if input_file is None and sys.stdin.isatty():
        batch = 1  # who types a line waits for its answer
    warned: Counter[str] = Counter()
    with output_to(output_file) as sink, counting(input_file) as tick:
        number = 0
        lines = input_lines(input_file)
        while some := list(islice(lines, batch)):
            for line, answers in zip(some, translator.nbest(some, count=nbest, beam=beam), strict=True):
                number += 1
                print(said_as(number, line, answers, nbest, as_json), file=sink)
                for warning in answers[0].warnings:
                    say(f"line {number}: {warning}")
                warned.update(kinds(answers[0].warnings))
            sink.flush()
            tick(number)
    say_counts(warned)


def say_counts(warned: Counter[str]) -> None:
    if warned:
        say("; ".join(f"{count} line{'s' * (count > 1)} {what}" for what, count in warned.items()))


def said_as(number: int, line: str, answers: list[Hypothesis], nbest: int, as_json: bool) -> str:
    if as_json:
        many = {"nbest": [asdict(one) for one in answers]} if nbest > 1 else {}
        return json.dumps({"source": line, **asdict(answers[0]), **many}, ensure_ascii=False)
    if nbest > 1:
        return "\n".join(f"{number - 1} ||| {one_line(one.text)} ||| {one.score:.4f}" for one in answers)
    return one_line(answers[0].text)


def one_line(text: str) -> str:
    """A line break inside an answer would break the promise of one line out for one line in."""
    return text.replace("\r", " ").replace("\n", " ")


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="run folders", show_default=False)],
    source: SourceFile = None,
    reference: Annotated[
        list[Path] | None, typer.Option(help="one or several, line by line", show_default=False)
    ] = None,
    phrasebook: Annotated[str, typer.Option(metavar="SPLIT", help="instead of files: dev, test or unseen")] = "",
    count: Annotated[int, typer.Option(min=1, help="sentences of the phrasebook")] = 1000,
    beam: Beam = None,
    as_json: Json = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
) -> None:
    """Score runs: BLEU, chrF and TER, each with its signature; on the phrasebook also by phenomenon."""
    from dragoman import evaluation
    from dragoman.translator import load

    files = source is not None or bool(reference)
    if bool(phrasebook) == files or (files and not (source and reference)):
        raise Mistake("evaluate needs either --source F and --reference F, or --phrasebook SPLIT")
    texts = evaluation.read_texts(source, reference) if source and reference else None
    results = []
    for run in runs:
        translator = load(run, device=device)
        if texts:
            found = evaluation.against_references(translator, *texts, beam=beam)
        else:
            found = evaluation.on_phrasebook(translator, phrasebook, count, beam=beam)
        say_counts(Counter(found["warnings"]))
        results.append({"run": str(run), **found})
        if as_json:
            print(json.dumps(results[-1], ensure_ascii=False))
    if not as_json:
        paper().print(evaluation.table(results))


@app.command()
def info(run: Run, as_json: Json = False) -> None:
    """A model card: what it is, what it was trained on, what it scored."""
    from dragoman.card import card, card_table

    about = card(run)
    if as_json:
        print(json.dumps(about, ensure_ascii=False))
    else:
        paper().print(card_table(about))


@data.command()
def stats(
    source: SourceFile = None,
    target: TargetFile = None,
    tsv: TsvFile = None,
    jsonl: JsonlFile = None,
    as_json: Json = False,
) -> None:
    """Counts, lengths, ratios, duplicates, languages: what a corpus is like, and what is odd about it."""
    from dragoman.text.corpus import read_pairs
    from dragoman.text.stats import render
    from dragoman.text.stats import stats as look
    from dragoman.train.report import Report

    found = look(Report().counted(read_pairs(corpus_from(source, target, tsv, jsonl)), "reading"))
    if as_json:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        paper().print(render(found))


@data.command()
def clean(
    source: SourceFile = None,
    target: TargetFile = None,
    tsv: TsvFile = None,
    jsonl: JsonlFile = None,
    out_prefix: Annotated[
        Path, typer.Option("--out", help="writes OUT.source and OUT.target", show_default=False)
    ] = ...,  # type: ignore[assignment]
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[name=value ...]", help="what to drop, such as max_ratio=3", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Filter pairs by length, ratio, duplicates and language; say how many went, and why."""
    from dragoman.corpora import clean_files

    counts = clean_files(corpus_from(source, target, tsv, jsonl), out_prefix, settings or [])
    if as_json:
        print(json.dumps(dict(counts)))
    else:
        total = sum(counts.values())
        for reason, count in counts.most_common():
            print(f"{reason:>20}  {count:>10,}  {100 * count / total:6.2f} %")


@data.command()
def phrasebook(
    out_prefix: Annotated[Path, typer.Option("--out", help="writes OUT.en and OUT.de", show_default=False)] = ...,  # type: ignore[assignment]
    count: Annotated[int, typer.Option(min=1, help="pairs")] = 20000,
    split: Annotated[str, typer.Option(help="train, dev, test or unseen")] = "train",
    seed: Annotated[int, typer.Option()] = 1,
    gold: Annotated[
        bool, typer.Option("--gold", help="also OUT.jsonl: alignments, trees, coreference, phenomena")
    ] = False,
) -> None:
    """Make English-German pairs from the built-in grammar."""
    from dragoman.corpora import write_phrasebook

    write_phrasebook(out_prefix, count=count, split=split, seed=seed, gold=gold)
    say(f"{count:,} pairs in {out_prefix}.en and {out_prefix}.de")


def corpus_from(source: Path | None, target: Path | None, tsv: Path | None, jsonl: Path | None) -> CorpusSettings:
    given = {"source": source, "target": target, "tsv": tsv, "jsonl": jsonl}
    corpus = build(CorpusSettings, {name: str(path) for name, path in given.items() if path is not None})
    corpus.check("the command")
    return corpus


def say(message: str) -> None:
    """A message, on a line of its own even where a count of lines is running."""
    said.print(("\r\x1b[K" if said.is_terminal else "") + message, markup=False)


def paper() -> Console:
    """stdout. Tables are fitted to a terminal, and elsewhere as wide as they are: wrapped lines break programs."""
    return Console(highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 10_000)


def input_lines(path: Path | None) -> Iterator[str]:
    """Lines of a file or of stdin. Only a line feed ends a line, with or without a carriage return."""
    from dragoman.text.corpus import lines_of, read_lines

    return read_lines(path) if path is not None else lines_of(sys.stdin.buffer, "the input")


@contextmanager
def output_to(path: Path | None) -> Iterator[IO[str]]:
    """stdout, or a file that takes its name only when it is whole. A pipe or a device is written to as it is."""
    if path is None:
        yield sys.stdout
        return
    path = path.resolve()
    beside = path if path.exists() and not path.is_file() else path.with_name(path.name + ".part")
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(beside, path)
    except OSError as error:
        raise Mistake(f"cannot write {str(path)!r} ({error.strerror})") from None
    finally:
        if beside != path:
            beside.unlink(missing_ok=True)


@contextmanager
def counting(path: Path | None) -> Iterator[Any]:
    """Lines done, speed and time left on a terminal, when the input is a file."""
    begun = time.monotonic()
    total = sum(1 for _ in input_lines(path)) if path is not None and sys.stderr.isatty() else 0

    def tick(done: int) -> None:
        if total:
            speed = done / (time.monotonic() - begun)
            sys.stderr.write(
                f"\r{done:,} of {total:,} lines, {speed:,.1f}/s, {(total - done) / speed:.0f} s left\x1b[K"
            )
            sys.stderr.flush()

    yield tick
    if total:
        sys.stderr.write("\n")


def spread(arguments: list[str]) -> list[str]:
    """`--reference A B` as `--reference A --reference B`, which is all that the parser understands.

    A folder is no reference: it is a run that stands behind the references.
    """
    result: list[str] = []
    spreading = named = False
    for argument in arguments:
        if argument.startswith("-"):
            spreading = argument.partition("=")[0] == "--reference"
            named = argument == "--reference"
        elif spreading and not named and not Path(argument).is_dir():
            result.append("--reference")
        else:
            named = False
        result.append(argument)
    return result


def outcome(arguments: list[str]) -> int:
    """Run a command. What comes of it is an exit code, and a sentence where it is not done."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("dragoman", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return int(end.exit_code)
    except Mistake as mistake:
        say(f"dragoman: {mistake}")
        return 2
    except Stop as stop:
        say(f"dragoman: {stop}")
        return stop.code
    except (KeyboardInterrupt, typer.Abort):
        say("dragoman: stopped")
        return 130
    except BrokenPipeError:  # the reader has gone, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        say(f"dragoman: {error.strerror or error}" + (f": {error.filename!r}" if error.filename else ""))
        with suppress(OSError):
            sys.stdout.close()  # what it still holds cannot be written either
        return 2
    except Exception as error:
        return misused(error) if hasattr(error, "format_message") else failed()
    return 0


def misused(error: Any) -> int:
    """A command line that the parser does not understand."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        message = " ".join(error.format_message().split()).rstrip(".")
        where = error.ctx.command_path if getattr(error, "ctx", None) else "dragoman"
        say(f"dragoman: {message[:1].lower()}{message[1:]}; {where} --help shows what there is")
    return 2


def failed() -> int:
    traceback.print_exc()
    say(
        "dragoman: this is our fault, not yours. Please report it with the lines above, the command, and the "
        "output of `pip freeze`."
    )
    return 1


def main() -> None:
    if sys.stdin is None or sys.stdout is None:
        sys.exit("dragoman: standard input and output must be open; use /dev/null for nothing")
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that files are tidied up
    try:
        code = outcome(spread(sys.argv[1:]))
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(code)
