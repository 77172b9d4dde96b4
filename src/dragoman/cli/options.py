"""What the commands share: checks of arguments, declarations of options, and the group that commands are added to.

Arguments are checked before PyTorch is imported, which takes seconds. Under torchrun these checks are skipped: every
process would print the same error, and some machines may lack the files that only rank 0 reads. Errors are then
reported after the processes have joined their process group.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from dragoman.cli.line_io import STDIN_PATHS
from dragoman.config.settings import get_entry, suggest_name
from dragoman.data.corpus import CorpusSettings
from dragoman.errors import UserError
from dragoman.progress import DETAIL, ERROR, INFO, WARNING, set_verbosity
from dragoman.recipe import UNREAD_SECTIONS, find_recipe, list_recipes, read_recipe
from dragoman.run_dir import RunFolder

# Copies of the names in inference/loading.py and inference/export.py, since importing those modules imports PyTorch.
ENGINE_NAMES = ("auto", "torch", "torch-bf16", "torch-int8", "ctranslate2", "ctranslate2-int8")
FORMAT_NAMES = ("ctranslate2", "huggingface", "onnx")


def is_distributed() -> bool:
    """Return whether torchrun started this process together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def check_arguments(
    *,
    runs: Iterable[str | Path | None] = (),
    inputs: Iterable[Path | None] = (),
    output: Path | None = None,
    engine: str = "auto",
) -> None:
    """Raise a UserError for an unknown engine, an invalid run folder, an unreadable input or a missing output folder.

    None and "-" as an input stand for stdin. The contents of the files are not checked.
    """
    get_entry(dict.fromkeys(ENGINE_NAMES), engine, "engine")  # raises a UserError that suggests a similar name
    if is_distributed():
        return
    for run in runs:
        if run is not None:
            RunFolder(run).check_format()
    for path in inputs:
        if path in STDIN_PATHS:
            continue
        assert path
        try:
            path.stat()
        except FileNotFoundError:
            raise UserError(f"there is no file {str(path)!r}") from None
        except (OSError, ValueError) as error:  # a null character in the name is a ValueError
            raise UserError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if path.is_dir():
            raise UserError(f"{str(path)!r} is a folder; name a text file")
    if output and output.is_dir():
        raise UserError(f"cannot write {str(output)!r}: it is a folder; name a file")
    if output and not output.absolute().parent.is_dir():
        raise UserError(f"cannot write {str(output)!r}: there is no folder {str(output.parent)!r}; create it first")


def parse_output_file(text: str) -> Path:
    """Return the path of a file to write; refuse text that ends with a slash, which `Path` would drop."""
    if text.endswith("/"):
        raise typer.BadParameter(f"{text!r} is the name of a folder; name a file, such as {text + 'output.txt'!r}")
    return Path(text)


def check_recipe(path: Path, overrides: Iterable[str] | None = None, *, parent: Path | None = None) -> Path:
    """Return the path of a recipe file; `path` may also be the name of a built-in recipe.

    Raise a UserError if the recipe, with the overrides `a.b=c`, is invalid or names a file that does not exist.
    `parent` is the run folder whose model settings the recipe inherits.
    """
    path = find_recipe(path)
    if is_distributed():
        return path
    if not path.exists():
        names = [name for name, _ in list_recipes()]
        raise UserError(
            f"there is no recipe file {str(path)!r}{suggest_name(str(path), names)}; "
            "`dragoman recipes` lists the built-in ones"
        )
    # First read without the sections UNREAD_SECTIONS, which need PyTorch, so that a missing file is reported at once.
    recipe = read_recipe(path, overrides or (), unread=UNREAD_SECTIONS)
    corpora: list[CorpusSettings] = [*recipe.data.train, *recipe.data.dev, *recipe.data.test]
    for file in (Path(name) for corpus in corpora for name in corpus.files):
        try:
            check_arguments(inputs=[file])
        except UserError as error:  # add the name of the recipe, since `compare` reads several recipes
            # A relative path in a recipe may start at the working folder or at the folder of the recipe.
            sibling = path.absolute().parent / file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            also_missing = "" if sibling == file else f", nor {str(sibling)!r} next to the recipe"
            raise UserError(f"{path}: {error}{also_missing}") from None
    read_recipe(path, overrides or (), parent=RunFolder(parent).load_recipe() if parent else None)
    return path


Run = Annotated[Path, Argument(help="a run folder")]
OtherRuns = Annotated[list[Path] | None, Option("--with", help="another run with the same vocabulary, for an ensemble")]
NewRun = Annotated[Path, Option("-o", "--out", help="the run folder to create")]
RecipeFile = Annotated[Path, Argument(help="a recipe in YAML, or one that comes with Dragoman")]
Overrides = Annotated[list[str] | None, Argument(metavar="[a.b=c ...]", help="settings to override")]
Resume = Annotated[bool, Option("--resume", help="resume training from the last checkpoint")]
Json = Annotated[bool, Option("--json", help="print JSON instead of text")]
Beam = Annotated[int | None, Option(min=1, help="beam width; 1 is greedy search; default: the run's setting")]
Conllu = Annotated[
    Path | None, Option(help="CoNLL-U file with a dependency tree per input line (only for model.position=tree)")
]
TextArguments = Annotated[
    list[str] | None,
    Argument(metavar="[TEXT ...]", help="text to process, one line per argument; cannot be combined with --input"),
]
InputFile = Annotated[Path | None, Option("-i", "--input", help="input file; - or omitted: stdin")]
OUTPUT_PATH: Any = {"parser": parse_output_file, "metavar": "<path>"}  # keyword arguments of Option for output files
OutputFile = Annotated[Path | None, Option("-o", "--output", help="output file; omitted: stdout", **OUTPUT_PATH)]
BatchSize = Annotated[
    int, Option(min=1, max=1_000_000, help="maximum lines per batch; torch engines give the same text for any value")
]
EngineName = Annotated[
    str,
    Option(
        help="inference engine: auto (= torch in float32), torch, torch-bf16 or torch-int8 (faster, less precise), "
        "ctranslate2 or ctranslate2-int8 (the model is converted; fastest on a CPU)"
    ),
]
ForcedPrefix = Annotated[str, Option(help="every translation starts with this text; the search continues it")]
Tag = Annotated[str, Option(help="tag before each input, if trained with tags, such as de for German output")]
SourceLanguage = Annotated[
    str, Option("--from", help="language of the input, such as de; for models with several directions")
]
TargetLanguage = Annotated[str, Option("--to", help="language of the output; instead of --tag")]
Context = Annotated[
    int | None,
    Option(
        min=0,
        help="previous sentences that a model trained with data.context reads; default: as in training; 0: none. "
        "An empty line starts a new document",
    ),
]
Device = Annotated[
    str, Option(help="device: cpu, cuda (a GPU), cuda:1 (the second GPU); auto is a GPU if available, else the CPU")
]
Quiet = Annotated[
    int,
    Option(
        "-q", "--quiet", count=True, help="show no progress and no notes; -qq: no warnings either", show_default=False
    ),
]
Verbose = Annotated[bool, Option("-v", "--verbose", help="print more details")]


class CommandGroup(typer.Typer):
    """A group of commands that all have the options -h, -q and -v, such as `dragoman` or `dragoman data`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"]},
            **options,
        )

    def command(self, *names: Any, **options: Any) -> Callable[[Any], Any]:
        """Return a decorator that adds a command, named after the function without the suffix `_command`."""
        register = super().command(*names, **options)
        return lambda function: register(adapt_for_typer(function))


def adapt_for_typer(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command for typer: add -q and -v, and replace each dataclass parameter by its fields.

    Typer declares one option for each parameter in the signature of the wrapper, so each field becomes an option. When
    the command runs, the wrapper builds the dataclass from the values of these options.
    """
    dataclasses: dict[str, Any] = {}  # parameters of `function` that are dataclasses, by name
    parameters: list[inspect.Parameter] = []

    def command(*, quiet: Quiet = 0, verbose: Verbose = False, **arguments: Any) -> None:
        levels = {0: DETAIL if verbose else INFO, 1: WARNING}
        set_verbosity(levels.get(quiet, ERROR))
        instances = {
            name: dataclass(**{field.name: arguments.pop(field.name) for field in fields(dataclass)})
            for name, dataclass in dataclasses.items()
        }
        function(**instances, **arguments)

    *quiet_and_verbose, _ = inspect.signature(command, eval_str=True).parameters.values()  # _ is **arguments
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if is_dataclass(parameter.annotation):
            dataclasses[name] = parameter.annotation
            parameters += inspect.signature(dataclasses[name], eval_str=True).parameters.values()
        else:
            parameters.append(parameter)
    # A signature does not allow a parameter without a default after one with a default, unless both are keyword-only.
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*parameters, *quiet_and_verbose)]
    update_wrapper(command, function)
    command.__name__ = function.__name__.removesuffix("_command")
    command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword_only}
    return command
