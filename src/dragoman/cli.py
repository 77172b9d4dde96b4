"""The command line. Each subcommand reads its arguments and calls one function.

Results go to stdout, everything else to stderr. Exit 0: done. Exit 2: the user's mistake, one sentence.
Exit 1: ours. Ctrl-C: 130.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli_data import data
from dragoman.config import build, pick
from dragoman.console import counting, input_lines, output_to, paper, say
from dragoman.outcome import outcome
from dragoman.types import Hypothesis, Mistake

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data, name="data")

Said = tuple[str, Sequence[str]]  # an answer and its warnings
Run = Annotated[Path, typer.Argument(help="a run folder", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
Beam = Annotated[int | None, typer.Option(min=1, help="width of the beam; 1 is greedy; by default the run's own")]
Conllu = Annotated[
    Path | None, typer.Option(help="trees of the lines, for runs with model.position=tree", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="settings to change", show_default=False)
]
SourceFile = Annotated[
    Path | None, typer.Option("--source", help="plain text, one sentence a line", show_default=False)
]


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"dragoman {version('dragoman')}")
        raise typer.Exit


@app.callback()
def main_options(
    _: Annotated[
        bool, typer.Option("--version", help="say which Dragoman this is", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Learn to turn one sequence into another, translation first, and show how."""


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
    conllu: Conllu = None,
    batch: Annotated[int, typer.Option(min=1, help="lines taken at a time; never changes an answer")] = 256,
    as_json: Json = False,
    engine: Annotated[str, typer.Option(help="auto or torch")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
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


def answer_lines(
    answer: Callable[[int, list[str]], Iterator[Said]], input_file: Path | None, output_file: Path | None, batch: int
) -> None:
    """One answer out for every line in. `answer` is given how many lines came before, and some lines."""
    from dragoman.door import kinds

    if input_file is None and sys.stdin.isatty():
        batch = 1  # who types a line waits for its answer
    warned: Counter[str] = Counter()
    with output_to(output_file) as sink, counting(input_file) as tick:
        number = 0
        lines = input_lines(input_file)
        while some := list(islice(lines, batch)):
            for text, warnings in answer(number, some):
                number += 1
                print(text, file=sink)
                for warning in warnings:
                    say(f"line {number}: {warning}")
                warned.update(kinds(warnings))
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
    metric: Annotated[
        list[str] | None,
        typer.Option(help="what to count, may be repeated; by default the run's own", show_default=False),
    ] = None,
    conllu: Conllu = None,
    beam: Beam = None,
    as_json: Json = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
) -> None:
    """Score runs on files, on the phrasebook, or, when neither is named, on their own data.test."""
    from dragoman import evaluation
    from dragoman.loading import load, load_as
    from dragoman.score.metrics import METRICS
    from dragoman.translator import Translator

    files = source is not None or bool(reference)
    if (phrasebook and files) or ((files or conllu) and not source):
        raise Mistake("evaluate takes --source F and --reference F, or --phrasebook SPLIT, or the run's own data.test")
    names = [pick(METRICS, name, "metric").name for name in metric or []]
    texts = evaluation.read_texts(source, reference or []) if source else None
    trees = evaluation.read_trees(conllu, texts[0], source) if source and conllu and texts else None
    results = []
    for run in runs:
        if texts:
            door = load(run, device=device)
            if trees and not getattr(door, "asks_for_trees", False):
                say(f"{run} reads no trees: it is scored without them")
            found = [evaluation.against_references(door, *texts, names=names, beam=beam, trees=trees)]
        elif phrasebook:
            translator = load_as(Translator, run, device=device)
            found = [evaluation.on_phrasebook(translator, phrasebook, count, names=names, beam=beam)]
        else:
            found = list(evaluation.on_own_tests(load(run, device=device), names=names, beam=beam))
        for one in found:
            say_counts(Counter(one["warnings"]))
            results.append({"run": str(run), **one})
            if as_json:
                print(json.dumps(results[-1], ensure_ascii=False))
    if not as_json:
        paper().print(evaluation.table(results))


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="the beginning of the text")] = "",
    input_file: Annotated[
        Path | None, typer.Option("--input", help="instead: one prompt a line", show_default=False)
    ] = None,
    output_file: Annotated[Path | None, typer.Option("--output", help="by default stdout", show_default=False)] = None,
    count: Annotated[int, typer.Option(min=1, help="texts for each prompt")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="the most that a text may add")] = 256,
    temperature: Annotated[float, typer.Option(help="below 1: safer, above 1: bolder; 0: the likeliest tokens")] = 1.0,
    top_k: Annotated[int, typer.Option(help="draw from so many likeliest tokens; 0: from all")] = 0,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest tokens of this probability together")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="of what is drawn")] = 1,
    as_json: Json = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
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


@app.command()
def classify(
    run: Run,
    input_file: Annotated[Path | None, typer.Option("--input", help="by default stdin", show_default=False)] = None,
    output_file: Annotated[Path | None, typer.Option("--output", help="by default stdout", show_default=False)] = None,
    batch: Annotated[int, typer.Option(min=1, help="lines taken at a time; never changes an answer")] = 256,
    as_json: Json = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
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


@app.command()
def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE.yaml|FOLDER ... [a.b=c ...]", help="recipes, settings", show_default=False),
    ],
    out_folder: Annotated[Path, typer.Option("--out", help="where runs and report go")] = Path("runs/compare"),
    seeds: Annotated[int, typer.Option(min=1, help="runs of each recipe: train.seed, then the next ones")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time; speeds are honest with 1 only")] = 1,
    as_json: Json = False,
) -> None:
    """Train several recipes on the same data with the same budget; write one report of them all."""
    from dragoman.compare.compare import compare as run_comparison
    from dragoman.compare.compare import said

    settings = [argument for argument in arguments if "=" in argument and not Path(argument).exists()]
    paths = [Path(argument) for argument in arguments if argument not in settings]
    whole = run_comparison(paths, out=out_folder, overrides=settings, seeds=seeds, jobs=jobs)
    if as_json:
        print(json.dumps(whole, ensure_ascii=False))
    else:
        paper().print(said(whole))
    if failed_runs := [model["name"] for model in whole["models"] if model["failures"]]:
        raise Mistake(f"runs of {', '.join(failed_runs)} failed; the report has the others, and says why")


@app.command(hidden=True)
def compare_one(recipe: Path, run: Path) -> None:
    """One run of a comparison, which starts it: train, judge, write the judgement beside the run."""
    from dragoman.compare.work import work

    work(recipe, run)


@app.command()
def info(run: Run, as_json: Json = False) -> None:
    """A model card: what it is, what it was trained on, what it scored."""
    from dragoman.card import card, card_table

    about = card(run)
    if as_json:
        print(json.dumps(about, ensure_ascii=False))
    else:
        paper().print(card_table(about))


@app.command()
def settings(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION ...] [a.b=c ...]", help="such as model model.kind=rnn", show_default=False),
    ] = None,
) -> None:
    """Every setting with its default and what else it may be, as a recipe to begin with."""
    from dragoman.catalogue import catalogue

    given = arguments or []
    print(catalogue([word for word in given if "=" not in word], [word for word in given if "=" in word]), end="")


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


def main() -> None:
    if sys.stdin is None or sys.stdout is None:
        sys.exit("dragoman: standard input and output must be open; use /dev/null for nothing")
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that files are tidied up
    try:
        code = outcome(typer.main.get_command(app), spread(sys.argv[1:]))
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(code)
