"""The command line: `main` runs the command in sys.argv and turns its errors into messages and exit codes.

Each command is a function that checks its arguments and calls one function of another package. Commands for training,
comparing and describing models are defined here, the others in the modules that this one imports. Commands import
PyTorch inside the function, since the import takes seconds that `--help` should not wait for.

Results go to stdout, messages and progress to stderr. Exit codes: 0 success; 2 user error, explained in one sentence;
1 bug in Dragoman; 130 Ctrl-C; 141 closed pipe; 143 SIGTERM.
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
from typer import Argument, Option

from dragoman import errors
from dragoman.cli import options as opt
from dragoman.cli.align import align_command
from dragoman.cli.data import data
from dragoman.cli.evaluate import evaluate_command, score_command
from dragoman.cli.inspect import inspect_command
from dragoman.cli.keys import keys
from dragoman.cli.lab import lab_command
from dragoman.cli.models import backtranslate_command, cache_command, distil_command, export_command, import_command
from dragoman.cli.serve import serve_command
from dragoman.cli.translate import classify_command, generate_command, translate_command
from dragoman.errors import Stop, UserError
from dragoman.hardware import limit_threads, set_runtime_defaults
from dragoman.progress import ERROR, log, results_console
from dragoman.recipe import find_recipe, list_recipes
from dragoman.run_dir import RunFolder

# Libraries also raise a RuntimeError when memory runs out. Its message then contains one of these texts.
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "can't start new thread",
    "Resource temporarily unavailable",
    "std::bad_alloc",
)

app = opt.CommandGroup()
app.add_typer(data, name="data")
app.add_typer(keys, name="keys")
for command in (
    translate_command,
    generate_command,
    classify_command,
    evaluate_command,
    score_command,
    align_command,
    inspect_command,
    serve_command,
    lab_command,
    distil_command,
    backtranslate_command,
    export_command,
    import_command,
    cache_command,
):
    app.command()(command)


@app.callback(invoke_without_command=True)
def main_options(
    show_version: Annotated[bool, Option("--version", help="print the version")] = False,
) -> None:
    """Train, use and inspect sequence-to-sequence models, above all for translation."""
    if show_version:
        print(f"dragoman {version('dragoman')}")
        raise typer.Exit


@app.command()
def demo_command(overrides: opt.Overrides = None, out_folder: opt.NewRun = Path("runs/demo")) -> None:
    """Train the default model on the built-in corpus, score it, translate with it."""
    from dragoman.cli.demo import run_demo

    run_demo(out_folder, overrides or [], results_console())


@app.command()
def train_command(
    recipe: opt.RecipeFile,
    overrides: opt.Overrides = None,
    *,
    out_folder: opt.NewRun,
    resume: opt.Resume = False,
    init_from: Annotated[Path | None, Option(help="run folder whose weights training starts from")] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="check the recipe and data and print what would be trained; write nothing")
    ] = False,
) -> None:
    """Train a model from a recipe into a run folder."""
    opt.check_arguments(runs=[init_from])
    resumed_run = out_folder if resume and RunFolder(out_folder).load_state() else None  # None: there is no checkpoint
    recipe = opt.check_recipe(recipe, overrides, parent=resumed_run or init_from)
    if dry_run and resume:
        raise UserError("--dry-run describes a new run and cannot be combined with --resume")
    if dry_run:
        from dragoman.training.start import render_dry_run
        from dragoman.training.trainer import dry_run as check_run

        if plan := check_run(recipe, out=out_folder, overrides=overrides or [], init_from=init_from):
            print(render_dry_run(plan))
        return
    from dragoman.training.trainer import train as run_training

    run_training(recipe, out=out_folder, overrides=overrides or [], resume=resume, init_from=init_from)


@app.command()
def fit_command(recipe: opt.RecipeFile, overrides: opt.Overrides = None, as_json: opt.Json = False) -> None:
    """Find the largest batch size (train.tokens) that fits into the memory of this machine's GPU."""
    recipe = opt.check_recipe(recipe, overrides)
    from dragoman.training.start import find_batch_size

    fitted = find_batch_size(recipe, overrides or [])
    memory_use = f"an update takes {fitted.needed / 1e9:.1f} of {fitted.memory / 1e9:.1f} GB"
    print(json.dumps(fitted._asdict()) if as_json else f"train.tokens={fitted.tokens}  # {memory_use}")


@app.command()
def compare_command(
    arguments: Annotated[
        list[str],
        Argument(
            metavar="RECIPE.yaml|FOLDER ... [a.b=c ...]", help="recipes, folders of recipes, and settings to override"
        ),
    ],
    out_folder: Annotated[Path, Option("-o", "--out", help="folder for the runs and the report")] = Path(
        "runs/compare"
    ),
    seeds: Annotated[int, Option(min=1, help="runs per recipe, with the seeds train.seed, train.seed + 1, ...")] = 1,
    jobs: Annotated[int, Option(min=1, help="runs in parallel; measured speeds are reliable only with 1")] = 1,
    as_json: opt.Json = False,
) -> None:
    """Train several recipes on the same data with the same budget, and write one report."""
    overrides = [argument for argument in arguments if "=" in argument and not Path(argument).exists()]
    paths = [find_recipe(Path(argument)) for argument in arguments if argument not in overrides]
    for path in paths:
        if not path.is_dir():
            opt.check_recipe(path, overrides)
    from dragoman.compare.report import format_comparison, run_comparison

    comparison = run_comparison(paths, out=out_folder, overrides=overrides, seeds=seeds, jobs=jobs)
    if as_json:
        print(json.dumps(comparison, ensure_ascii=False))
    else:
        results_console().print(format_comparison(comparison))
    if failed_runs := [model["name"] for model in comparison["models"] if model["failures"]]:
        raise UserError(f"runs of {', '.join(failed_runs)} failed; the report explains why and contains the other runs")


@app.command(hidden=True)
def compare_one(recipe: Path, run: Path) -> None:
    """Train and measure one run. `compare_command` starts this command in a separate process."""
    from dragoman.compare.runs import train_and_measure

    train_and_measure(recipe, run)


@app.command()
def info(
    run: opt.Run,
    as_json: opt.Json = False,
    markdown: Annotated[bool, Option("--markdown", help="print Markdown, for a README.md")] = False,
) -> None:
    """Print the model card: the model, its training data and its scores."""
    opt.check_arguments(runs=[run])
    from dragoman.inference.model_card import make_card_table, read_card, render_card

    if as_json:
        print(json.dumps(read_card(run), ensure_ascii=False))
    elif markdown:
        print(render_card(run), end="")
    else:
        results_console().print(make_card_table(read_card(run)))


@app.command()
def recipes() -> None:
    """List the built-in recipes. train, fit, distil and compare accept these names in place of files."""
    built_in = list(list_recipes())
    width = max((len(name) for name, _ in built_in), default=0)
    for name, description in built_in:
        print(f"{name:{width}}  {description}".rstrip())


@app.command()
def settings(
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="[WORD ...] [a.b=c ...]",
            help="a section, a setting or any word in a description, such as train, lr or dropout; model.kind=rnn "
            "shows the settings of that kind of model",
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Print settings with their defaults, choices and descriptions, as a recipe to start from."""
    from dragoman.config.reference import find_kind, find_settings, load_settings_reference, render_settings

    words = [argument for argument in arguments or [] if "=" not in argument]
    overrides = [argument for argument in arguments or [] if "=" in argument]
    model = dict(item.removeprefix("model.").split("=", 1) for item in overrides)  # such as {"kind": "rnn"}
    if all(item.startswith(("model.kind=", "model.backbone=")) for item in overrides):
        reference = load_settings_reference()
        kind = find_kind(reference, model)
    else:  # settings.json, which load_settings_reference reads, cannot validate the values of other settings
        from dragoman.cli.settings import describe_recipe

        reference, kind = describe_recipe(overrides)
    by_section = find_settings(reference, kind, words)
    if as_json:
        for setting in (setting for section in by_section.values() for setting in section):
            print(json.dumps(setting.to_dict(), ensure_ascii=False))
    else:
        print(render_settings(by_section, kind), end="")


def repeat_options(arguments: list[str]) -> list[str]:
    """Rewrite `--reference A B` as `--reference A --reference B`, as the parser requires. Likewise --hypotheses.

    A folder after such an option is a run folder: the option is not repeated before it.
    """
    result: list[str] = []
    option_to_repeat, needs_value = "", False  # needs_value: the option itself takes the next argument
    for argument in arguments:
        if argument.startswith("-"):
            option = argument.partition("=")[0]
            option_to_repeat = option if option in ("--reference", "--hypotheses") else ""
            needs_value = argument == option
        elif option_to_repeat and not needs_value and not Path(argument).is_dir():
            result.append(option_to_repeat)
        else:
            needs_value = False
        result.append(argument)
    return result


def run_command(command: Any, arguments: list[str]) -> int:
    """Run a command and return its exit code; print one sentence if it fails."""
    # The SIGINT handler of dragoman.errors raises KeyboardInterrupt only while this function can catch it.
    errors.interrupt_is_caught, errors.interrupt_was_raised = True, False
    try:
        with command.make_context("dragoman", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        message, code = explain_error(error)
        if message:
            log(f"dragoman: {message}", ERROR)
        if isinstance(error, SystemExit):
            raise
        return code
    finally:
        errors.interrupt_is_caught = False
    return 0


def explain_error(error: Any) -> tuple[str, int]:
    """Return the message for an error that ends a command (empty: print nothing) and the exit code."""
    message, code = str(error), 2
    if isinstance(error, typer.Exit):
        message, code = "", error.exit_code
    elif isinstance(error, SystemExit):  # the caller raises it again
        message = "stopped by SIGTERM" if error.code == errors.TERMINATED else ""
    elif isinstance(error, Stop):
        code = error.code
    elif isinstance(error, UserError):
        pass  # under torchrun, the message is empty in the processes that do not print it
    elif isinstance(error, BrokenPipeError):  # the reader of the pipe, such as head, has exited
        # Python flushes stdout on exit. Discard what is still buffered: writing it would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        message, code = "", 141  # 128 + SIGPIPE
    elif isinstance(error, OSError):
        with suppress(OSError):
            sys.stdout.close()  # if the disk is full, flushing stdout on exit would raise the error again
        message = (error.strerror or message) + (f": {error.filename!r}" if error.filename else "")
    elif isinstance(error, KeyboardInterrupt | typer.Abort) or errors.interrupt_was_raised:
        # A library may have replaced the KeyboardInterrupt by, for example, an ImportError.
        message, code = "stopped", errors.INTERRUPTED
    elif type(error).__name__ == "NoArgsIsHelpError":  # `dragoman` without arguments prints the help
        error.show()
        message = ""
    elif hasattr(error, "format_message"):  # an error of the command-line parser
        text = " ".join(error.format_message().split()).rstrip(".")
        where = error.ctx.command_path if getattr(error, "ctx", None) else "dragoman"
        message = f"{text[:1].lower()}{text[1:]}; {where} --help lists all options"
    elif (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # of PyTorch
        or (isinstance(error, RuntimeError) and any(text in message for text in OUT_OF_MEMORY_TEXTS))
    ):
        message = "out of memory; free memory that other programs use, or choose a smaller model or smaller batches"
    else:
        traceback.print_exc()
        request = "Please report it with the lines above, the command, and the output of `pip freeze`."
        message, code = f"this is a bug in Dragoman. {request}", 1
    return message, code


def main() -> None:
    """Run the command in sys.argv, and exit with its exit code."""
    if sys.stdin is None or sys.stdout is None:
        print("dragoman: standard input and output must be open; use /dev/null for nothing", file=sys.stderr)
        sys.exit(2)
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    if sys.stderr is not None:
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    if "_DRAGOMAN_COMPLETE" in os.environ:
        app(prog_name="dragoman")  # typer prints completions for the shell, and exits
    set_runtime_defaults()
    limit_threads()
    # Unlike the default action of SIGTERM, SystemExit runs the `finally` blocks that remove temporary files.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(errors.TERMINATED))
    try:
        code = run_command(typer.main.get_command(app), repeat_options(sys.argv[1:]))
    finally:
        signal.signal(signal.SIGTERM, previous)
    sys.exit(code)
