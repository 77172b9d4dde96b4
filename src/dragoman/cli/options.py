"""Options that several commands share, records of options, and checks of arguments.

Arguments are checked before PyTorch is imported, which takes seconds. Under torchrun these checks are left out: every
process would print the same error, and some machines may lack the files that only the main process reads. Errors are
then found after the processes have joined their group.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dragoman.cli.lines import STDIN
from dragoman.config.settings import pick, suggest_name
from dragoman.data.corpus import CorpusSettings
from dragoman.errors import UserError
from dragoman.progress import DETAIL, ERROR, INFO, WARNING, set_verbosity
from dragoman.recipe import list_recipes, read_recipe
from dragoman.run_dir import RunFolder

ENGINE_NAMES = (
    "auto",
    "torch",
    "torch-bf16",
    "torch-int8",
    "ctranslate2",
    "ctranslate2-int8",
)  # inference/loading.py
FORMAT_NAMES = ("ctranslate2", "huggingface", "onnx")  # inference/export.py


def is_distributed() -> bool:
    """Return whether this is one of several processes that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def check_arguments(
    *,
    runs: Iterable[str | Path | None] = (),
    inputs: Iterable[Path | None] = (),
    output: Path | None = None,
    engine: str = "auto",
) -> None:
    """Refuse an unknown engine, what is no run folder, files that cannot be read, and an output without a folder.

    The content of the files is not checked.
    """
    pick(dict.fromkeys(ENGINE_NAMES), engine, "engine")
    if is_distributed():
        return
    for run in runs:
        if run is not None:
            RunFolder(run).check()
    for path in inputs:
        if path in STDIN:
            continue
        assert path
        try:
            path.stat()
        except FileNotFoundError:
            raise UserError(f"there is no file {str(path)!r}") from None
        except (OSError, ValueError) as error:  # a null character in the name is a ValueError
            raise UserError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if path.is_dir():
            raise UserError(f"{str(path)!r} is a folder, but a text file is wanted")
    if output and not output.absolute().parent.is_dir():
        raise UserError(f"cannot write {str(output)!r}: there is no such folder")


def parse_output_file(text: str) -> Path:
    """Return the path of a file to write; refuse a name with a slash at the end, which is that of a folder."""
    if text.endswith("/"):
        raise typer.BadParameter(f"{text!r} is the name of a folder; name a file, such as {text + 'output.txt'!r}")
    return Path(text)


def check_recipe(path: Path, overrides: Iterable[str] = (), *, parent: Path | None = None) -> None:
    """Refuse a recipe that is not valid with the overrides `a.b=c`, or that names a file which does not exist.

    `parent` is the run folder whose model settings the recipe inherits.
    """
    if is_distributed():
        return
    if not path.exists():
        names = [name for name, _ in list_recipes()]
        raise UserError(
            f"there is no recipe file {str(path)!r}{suggest_name(str(path), names)}; dragoman recipes lists ours"
        )
    recipe = read_recipe(path, overrides, parent=RunFolder(parent).recipe() if parent else None)
    corpora: list[CorpusSettings] = [*recipe.data.train, *recipe.data.dev, *recipe.data.test]
    for file in (Path(name) for corpus in corpora for name in corpus.files):
        try:
            check_arguments(inputs=[file])
        except UserError as error:  # names the recipe, which may be one of several
            beside = path.absolute().parent / file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            also = "" if beside == file else f", nor {str(beside)!r} beside the recipe"
            raise UserError(f"{path}: {error}{also}") from None


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
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", parser=parse_output_file, metavar="<path>", help="by default stdout", show_default=False
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        min=1,
        max=1_000_000,
        help="maximum lines per batch; torch engines give the same text for any value",
    ),
]
EngineName = Annotated[
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


KEYWORD = inspect.Parameter.KEYWORD_ONLY


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
        """Add a command, which is called as its function without the suffix `_command`."""

        def decorate(function: Any) -> Any:
            own = function.__name__.removesuffix("_command").replace("_", "-")
            super(Commands, self).command(*(names or (own,)), **options)(with_verbosity(function))
            return function

        return decorate


def with_verbosity(function: Callable[..., None]) -> Callable[..., None]:
    """Return the command as typer reads it: with -q and -v, and a dataclass parameter replaced by its fields.

    Each field of such a dataclass is one option, declared once: its annotation says how typer reads it.
    """
    signature = inspect.signature(function, eval_str=True)
    records: dict[str, Any] = {
        name: one.annotation for name, one in signature.parameters.items() if is_dataclass(one.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += read_fields(records[name]) if name in records else [parameter.replace(kind=KEYWORD)]
    parameters.append(inspect.Parameter("quiet", KEYWORD, default=0, annotation=Quiet))
    parameters.append(inspect.Parameter("verbose", KEYWORD, default=False, annotation=Verbose))

    @wraps(function)
    def command(*, quiet: int, verbose: bool, **arguments: Any) -> None:
        levels = {0: DETAIL if verbose else INFO, 1: WARNING}
        set_verbosity(levels.get(quiet, ERROR))
        built = {
            name: record(**{field.name: arguments.pop(field.name) for field in fields(record)})
            for name, record in records.items()
        }
        function(**built, **arguments)

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def read_fields(record: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as keyword parameters."""
    hints = get_type_hints(record, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            KEYWORD,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(record)
    ]
