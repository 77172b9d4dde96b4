"""The command line. Each command reads its arguments and calls one function.

Results go to stdout, messages and progress to stderr. Exit codes are 0: done; 2: an error of the user, explained in
one sentence; 1: an error of Dragoman; 130: Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman import errors
from dragoman.cli.align import align_command
from dragoman.cli.data import data
from dragoman.cli.evaluate import evaluate_command, score_command
from dragoman.cli.models import backtranslate_command, cache_command, distil_command, export_command, import_command
from dragoman.cli.options import Commands, Json, Overrides, Run, check_arguments, check_recipe
from dragoman.cli.translate import classify_command, generate_command, translate_command
from dragoman.errors import Stop, UserError
from dragoman.hardware import limit_threads, set_runtime_defaults
from dragoman.progress import ERROR, log, results_console
from dragoman.recipe import find_recipe, list_recipes
from dragoman.run_dir import RunFolder

OUT_OF_MEMORY = (  # parts of messages
    "can't allocate memory",
    "can't start new thread",
    "Resource temporarily unavailable",
    "std::bad_alloc",
)
TERMINATED = 128 + signal.SIGTERM

app = Commands()
app.add_typer(data, name="data")
COMMANDS = (
    translate_command,
    generate_command,
    classify_command,
    evaluate_command,
    score_command,
    align_command,
    distil_command,
    backtranslate_command,
    export_command,
    import_command,
    cache_command,
)
for command in COMMANDS:
    app.command()(command)


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
def demo_command(
    overrides: Overrides = None,
    out_folder: Annotated[Path, typer.Option("-o", "--out", help="where the run goes")] = Path("runs/demo"),
) -> None:
    """Train the default model on the built-in corpus, score it, translate with it."""
    from dragoman.cli.demo import run_demo

    run_demo(out_folder, overrides or [], results_console())


@app.command()
def train_command(
    recipe: Annotated[
        Path, typer.Argument(help="a recipe in YAML, or one that comes with Dragoman", show_default=False)
    ],
    overrides: Overrides = None,
    out_folder: Annotated[Path, typer.Option("-o", "--out", help="the run folder to make", show_default=False)] = ...,  # type: ignore[assignment]
    resume: Annotated[bool, typer.Option("--resume", help="go on exactly where the run was")] = False,
    init_from: Annotated[
        Path | None, typer.Option(help="a run whose weights to begin with", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="read and check everything, print what would be trained, write nothing")
    ] = False,
) -> None:
    """Train a model from a recipe into a run folder."""
    recipe = find_recipe(recipe)
    check_arguments(runs=[init_from])
    begun = out_folder if resume and RunFolder(out_folder).state() else None  # else it was killed before a checkpoint
    check_recipe(recipe, overrides or [], parent=begun or init_from)
    if dry_run and resume:
        raise UserError("--dry-run shows a new run; leave --resume out")
    if dry_run:
        from dragoman.training.planning import dry_run as check_run
        from dragoman.training.planning import render

        if found := check_run(recipe, out=out_folder, overrides=overrides or [], init_from=init_from):
            print(render(found))
        return
    from dragoman.training.trainer import train as run_training

    run_training(recipe, out=out_folder, overrides=overrides or [], resume=resume, init_from=init_from)


@app.command()
def fit_command(
    recipe: Annotated[
        Path, typer.Argument(help="a recipe in YAML, or one that comes with Dragoman", show_default=False)
    ],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Find the largest batches of a recipe that fit into the memory of this machine's GPU."""
    recipe = find_recipe(recipe)
    check_recipe(recipe, overrides or [])
    from dragoman.training.planning import fit as find_fit

    found = find_fit(recipe, overrides or [])
    of_all = f"an update takes {found.needed / 1e9:.1f} of {found.memory / 1e9:.1f} GB"
    print(json.dumps(found._asdict()) if as_json else f"train.tokens={found.tokens}  # {of_all}")


@app.command()
def compare_command(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE.yaml|FOLDER ... [a.b=c ...]", help="recipes, folders of them, settings", show_default=False
        ),
    ],
    out_folder: Annotated[Path, typer.Option("-o", "--out", help="where runs and report go")] = Path("runs/compare"),
    seeds: Annotated[int, typer.Option(min=1, help="runs of each recipe: train.seed, then the next ones")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time; speeds are honest with 1 only")] = 1,
    as_json: Json = False,
) -> None:
    """Train several recipes on the same data with the same budget; write one report of them all."""
    settings = [argument for argument in arguments if "=" in argument and not Path(argument).exists()]
    paths = [find_recipe(Path(argument)) for argument in arguments if argument not in settings]
    for path in paths:
        if not path.is_dir():
            check_recipe(path, settings)
    from dragoman.compare.report import format_comparison, run_comparison

    whole = run_comparison(paths, out=out_folder, overrides=settings, seeds=seeds, jobs=jobs)
    if as_json:
        print(json.dumps(whole, ensure_ascii=False))
    else:
        results_console().print(format_comparison(whole))
    if failed_runs := [model["name"] for model in whole["models"] if model["failures"]]:
        raise UserError(f"runs of {', '.join(failed_runs)} failed; the report has the others, and says why")


@app.command(hidden=True)
def compare_one(recipe: Path, run: Path) -> None:
    """Train and measure one run; `compare_command` starts this in a process of its own."""
    from dragoman.compare.runs import run_one

    run_one(recipe, run)


@app.command()
def info(
    run: Run,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="as Markdown, for a README.md")] = False,
) -> None:
    """A model card: what it is, what it was trained on, what it scored."""
    check_arguments(runs=[run])
    from dragoman.inference.model_card import make_card_table, read_card, render_card

    if as_json:
        print(json.dumps(read_card(run), ensure_ascii=False))
    elif markdown:
        print(render_card(run), end="")
    else:
        results_console().print(make_card_table(read_card(run)))


@app.command()
def recipes() -> None:
    """List the recipes that come with Dragoman; train, fit, distil and compare know them by these names."""
    found = list(list_recipes())
    width = max((len(name) for name, _ in found), default=0)
    for name, about in found:
        print(f"{name:{width}}  {about}".rstrip())


@app.command()
def settings(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD ...] [a.b=c ...]",
            help="a section, a setting or any word in a description, such as train, lr or dropout; model.kind=rnn "
            "shows the settings of that kind of model",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print settings with their defaults, choices and meanings, as a recipe to begin with."""
    from dragoman.config.reference import find_settings, kind_in, load_reference, render_settings

    given = arguments or []
    words, changes = [word for word in given if "=" not in word], [word for word in given if "=" in word]
    model = dict(item.removeprefix("model.").split("=", 1) for item in changes)
    if all(item.startswith(("model.kind=", "model.backbone=")) for item in changes):
        reference = load_reference()
        kind = kind_in(reference, model)
    else:  # values that have to be checked
        from dragoman.cli.settings import describe_recipe

        reference, kind = describe_recipe(changes)
    found = find_settings(reference, kind, words)
    if as_json:
        for setting in (each for some in found.values() for each in some):
            print(json.dumps(setting.record(), ensure_ascii=False))
    else:
        print(render_settings(found, kind), end="")


def repeat_options(arguments: list[str]) -> list[str]:
    """Return `--reference A B` as `--reference A --reference B`, which is what the parser understands.

    A folder is not a reference but a run that follows the references.
    """
    result: list[str] = []
    repeated, named = "", False
    for argument in arguments:
        if argument.startswith("-"):
            option = argument.partition("=")[0]
            repeated, named = option if option in ("--reference", "--hypotheses") else "", argument == option
        elif repeated and not named and not Path(argument).is_dir():
            result.append(repeated)
        else:
            named = False
        result.append(argument)
    return result


def run_command(command: Any, arguments: list[str]) -> int:
    """Run a command and return its exit code; print one sentence if it fails."""
    errors.interrupt_is_caught, errors.interrupt_was_raised = True, False
    try:
        with command.make_context("dragoman", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return int(end.exit_code)
    except (UserError, Stop) as end:
        if str(end):  # else another process of this command prints it
            log(f"dragoman: {end}", ERROR)
        return end.code if isinstance(end, Stop) else 2
    except SystemExit as end:
        if end.code == TERMINATED:
            log("dragoman: stopped by SIGTERM", ERROR)
        raise
    except (KeyboardInterrupt, typer.Abort):
        log("dragoman: stopped", ERROR)
        return errors.INTERRUPTED
    except BrokenPipeError:  # the reader has gone, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        log(f"dragoman: {error.strerror or error}" + (f": {error.filename!r}" if error.filename else ""), ERROR)
        with suppress(OSError):
            sys.stdout.close()  # what it still holds cannot be written either
        return 2
    except Exception as error:
        return report_error(error)
    finally:
        errors.interrupt_is_caught = False
    return 0


def report_error(error: Any) -> int:
    """Print a message about an error that is no UserError, and return the exit code."""
    if errors.interrupt_was_raised:  # a library that was being imported, for example, made an ImportError of it
        log("dragoman: stopped", ERROR)
        return errors.INTERRUPTED
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    if hasattr(error, "format_message"):  # the parser does not understand the command line
        message = " ".join(error.format_message().split()).rstrip(".")
        where = error.ctx.command_path if getattr(error, "ctx", None) else "dragoman"
        log(f"dragoman: {message[:1].lower()}{message[1:]}; {where} --help shows what there is", ERROR)
        return 2
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # the latter: PyTorch
    if out_of_memory or (isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)):
        advice = "free what others hold, or ask for less: a smaller model, or smaller batches"
        log(f"dragoman: out of memory; {advice}", ERROR)
        return 2
    traceback.print_exc()
    log(
        "dragoman: this is our fault, not yours. Please report it with the lines above, the command, and the "
        "output of `pip freeze`.",
        ERROR,
    )
    return 1


def main() -> None:
    """Run the command in sys.argv, and exit with its code."""
    if sys.stdin is None or sys.stdout is None:
        print("dragoman: standard input and output must be open; use /dev/null for nothing", file=sys.stderr)
        sys.exit(2)
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    if sys.stderr is not None:
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    if "_DRAGOMAN_COMPLETE" in os.environ:
        app(prog_name="dragoman")  # prints completions for the shell
    set_runtime_defaults()
    limit_threads()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # removes temporary files
    try:
        code = run_command(typer.main.get_command(app), repeat_options(sys.argv[1:]))
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(code)
