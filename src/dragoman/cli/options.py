"""Checks of a command line that need no model. They come before PyTorch is imported, which takes seconds.

Under torchrun they are left out: every process would print the same error, and some machines may lack the files that
only the main process reads. What is wrong is then found when the processes have met.

Options that several commands have, and the loop from lines to answers that they share.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman.cli.lines import Input, input_groups, input_lines, is_stdin, output_to
from dragoman.config.messages import near
from dragoman.config.recipe_files import list_recipes
from dragoman.config.settings import CorpusSettings, SearchSettings, pick
from dragoman.errors import UserError
from dragoman.progress import DETAIL, ERROR, INFO, WARNING, ProgressBar, is_shown, log, set_verbosity
from dragoman.recipe import Recipe, read_recipe
from dragoman.run_dir import RunFolder

ENGINES = (
    "auto",
    "torch",
    "torch-bf16",
    "torch-int8",
    "ctranslate2",
    "ctranslate2-int8",
)  # inference/engines/select.py
FORMATS = ("ctranslate2", "huggingface", "onnx")  # inference/export.py


def is_distributed() -> bool:
    """Tell whether this is one of several processes that torchrun started."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def check_runs(runs: Iterable[str | Path | None]) -> None:
    """Refuse a path that does not exist, is not a run folder, or holds a run of a later version of Dragoman."""
    for run in runs:
        if run is not None and not is_distributed():
            RunFolder(run).check()


def check_files(paths: Iterable[Path | None]) -> None:
    """Refuse a file to read that is not there. What is in it is another matter."""
    for path in paths:
        if path is None or is_stdin(path) or is_distributed():
            continue
        try:
            path.stat()
        except FileNotFoundError:
            raise UserError(f"there is no file {str(path)!r}") from None
        except (OSError, ValueError) as error:  # a null character in the name is a ValueError
            raise UserError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if path.is_dir():
            raise UserError(f"{str(path)!r} is a folder, but a text file is wanted")


def check_output(path: Path | None) -> None:
    """Refuse a file to write in a folder that is not there."""
    if path and not is_distributed() and not path.absolute().parent.is_dir():
        raise UserError(f"cannot write {str(path)!r}: there is no such folder")


def check_engine(name: str) -> None:
    pick(dict.fromkeys(ENGINES), name, "engine")


def check_recipe(path: Path, overrides: Iterable[str] = (), *, parent: Path | None = None) -> None:
    """Refuse a recipe that cannot be read with `a.b=c` laid over it, or names a file which is not there.

    `parent` is the run folder that has the settings of the model which the recipe leaves out.
    """
    if is_distributed():
        return
    if not path.exists():
        names = [name for name, _ in list_recipes()]
        raise UserError(f"there is no recipe file {str(path)!r}{near(str(path), names)}; dragoman recipes lists ours")
    recipe = read_recipe(path, overrides, parent=RunFolder(parent).recipe() if parent else None)
    corpora: list[CorpusSettings] = [*recipe.data.train, *recipe.data.dev, *recipe.data.test]
    for file in (Path(name) for corpus in corpora for name in corpus.files):
        try:
            check_files([file])
        except UserError as error:  # names the recipe, which may be one of several
            beside = path.absolute().parent / file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            also = "" if beside == file else f", nor {str(beside)!r} beside the recipe"
            raise UserError(f"{path}: {error}{also}") from None


SETTING = re.compile(r"(?:(\w+)\.)?(\w+)=\S*")
FEW = 10  # warnings of a kind that are said in full
Said = tuple[str, Sequence[str]]  # an answer and its warnings
Run = Annotated[Path, typer.Argument(help="a run folder", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]
Beam = Annotated[int | None, typer.Option(min=1, help="width of the beam; 1 is greedy; by default the run's own")]
Conllu = Annotated[
    Path | None, typer.Option(help="trees of the lines, for runs with model.position=tree", show_default=False)
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TEXT ...]", help="lines; not together with --input", show_default=False),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="settings to change", show_default=False)
]
SourceFile = Annotated[
    Path | None, typer.Option("--source", help="plain text, one sentence a line", show_default=False)
]
InputFile = Annotated[Path | None, typer.Option("-i", "--input", help="by default, or as -, stdin", show_default=False)]
OutputFile = Annotated[Path | None, typer.Option("-o", "--output", help="by default stdout", show_default=False)]
Batch = Annotated[
    int,
    typer.Option(
        min=1,
        max=1_000_000,
        help="maximum lines per batch; torch engines give the same text for any value",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        help="inference engine: auto (= torch in float32), torch, torch-bf16 or torch-int8 (faster, less precise), "
        "ctranslate2 or ctranslate2-int8 (the model is converted; fastest on a CPU)"
    ),
]
Tag = Annotated[
    str, typer.Option(help="for runs that were trained with tags, such as de for German", show_default=False)
]
Device = Annotated[
    str,
    typer.Option(help="where to compute: cpu, cuda (a GPU), cuda:1 (the second GPU); auto is a GPU if there is one"),
]
Quiet = Annotated[
    int,
    typer.Option(
        "-q", "--quiet", count=True, help="no progress and no notes; -qq: no warnings either", show_default=False
    ),
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="print more about what is done, and how")]


class Commands(typer.Typer):
    """A group of commands, each of which has -h, -q and -v."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"]},
            **options,
        )

    def command(self, *names: Any, **options: Any) -> Callable[[Any], Any]:
        add = super().command(*names, **options)

        def decorate(function: Any) -> Any:
            add(with_verbosity(function))
            return function

        return decorate


def with_verbosity(function: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options -q and -v, read from a signature to which they are added."""

    @wraps(function)
    def command(*, quiet: int = 0, verbose: bool = False, **arguments: Any) -> None:
        levels = {0: DETAIL if verbose else INFO, 1: WARNING}
        set_verbosity(levels.get(quiet, ERROR))
        function(**arguments)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter("quiet", keyword, default=0, annotation=Quiet),
        inspect.Parameter("verbose", keyword, default=False, annotation=Verbose),
    ]
    signature = inspect.signature(function, eval_str=True)
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in command.__signature__.parameters.items()}  # type: ignore[attr-defined]
    return command


def answer_lines(
    answer: Callable[[int, list[str]], Iterator[Said]], given: Input, output_file: Path | None, batch: int
) -> None:
    """One answer out for every line in. `answer` is given how many lines came before, and some lines."""
    warned, begun = Warned(), time.monotonic()
    is_file = isinstance(given, Path) and not is_stdin(given)
    total = sum(1 for _ in input_lines(given)) if is_file and sys.stderr.isatty() and is_shown(INFO) else 0
    bar = ProgressBar("answering", total=total, unit="lines", visible=total > 0)
    with output_to(output_file) as sink, bar:
        number = 0
        for some in input_groups(given, batch):
            for text, warnings in answer(number, some):
                number += 1
                print(text, file=sink)
                warned.tell(number, warnings)
            sink.flush()
            bar.update(number)
    say_counts(warned.lines)
    log(f"{number:,} line{'s' * (number != 1)} in {time.monotonic() - begun:.1f} s", DETAIL)


def given_lines(texts: Sequence[str] | None, input_file: Path | None) -> Input:
    """Return the lines that stand on the command line, else the file, else stdin."""
    if not texts:
        return input_file
    if input_file is not None:
        raise UserError("text stands on the command line and --input names a file; leave one of them out")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{text!r} is not text in UTF-8") from None
        if len(text) < 256 and "\n" not in text and Path(text).is_file():
            log(f"{text!r} is taken as text; --input {text} would read the file of that name", WARNING)
    return [line for text in texts for line in text.split("\n")]


def split_arguments(arguments: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return texts and settings.

    A setting is one word, such as `search.beam=8`, that begins with a section. Those of other sections than search are
    returned as well, and refused by whoever reads them; 'x = 5' and 'a.py=b' are texts.
    """
    texts: list[str] = []
    settings: list[str] = []
    for argument in arguments or []:
        match = SETTING.fullmatch(argument)
        section, name = match.groups() if match else ("", "")
        if name in SearchSettings.model_fields and section not in Recipe.model_fields:
            right = f"search.{name}={argument.partition('=')[2]}"
            raise UserError(f"{argument!r} is not a setting of search; did you mean {right!r}?")
        (settings if section in Recipe.model_fields else texts).append(argument)
    return texts, settings


class Warned:
    """Says what there is to say of lines: the first few of each kind in full, then that others are only counted.

    Of several processes each says its share of them.
    """

    def __init__(self, say: Callable[[str, int], None] = log, processes: int = 1) -> None:
        self.say, self.few = say, max(FEW // processes, 1)
        self.lines: Counter[str] = Counter()  # of each kind

    def tell(self, number: int, warnings: Sequence[str]) -> None:
        from dragoman.inference.postprocess import warning_kinds

        self.lines.update(warning_kinds(warnings))
        for warning in warnings:
            if self.lines[warning_kinds([warning])[0]] <= self.few:
                self.say(f"line {number}: {warning}", WARNING)
        for kind in warning_kinds(warnings):
            if self.lines[kind] == self.few + 1:
                self.say(
                    f"further lines {kind} are only counted; answers with --json have the warnings of every line",
                    WARNING,
                )


def say_counts(warned: Counter[str]) -> None:
    if warned:
        log("; ".join(f"{count} line{'s' * (count > 1)} {what}" for what, count in warned.items()), WARNING)


def one_line(text: str) -> str:
    """A line break inside an answer would break the promise of one line out for one line in."""
    return text.replace("\r", " ").replace("\n", " ")
