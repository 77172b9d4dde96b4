"""Exit codes. 0: done. 2: the user's error, in one sentence. 1: an error of Dragoman. 130: Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

import typer

from dragoman.cli import interrupts
from dragoman.errors import Stop, UserError
from dragoman.progress import ERROR, log

OUT_OF_MEMORY = (
    "can't allocate memory",
    "can't start new thread",
    "Resource temporarily unavailable",
    "std::bad_alloc",
)
TERMINATED = 128 + signal.SIGTERM


def run_command(command: Any, arguments: list[str]) -> int:
    """Run a command and return its exit code; print one sentence where it failed."""
    try:
        with interrupts.catching():
            with command.make_context("dragoman", arguments) as context:
                command.invoke(context)
            sys.stdout.flush()
    except typer.Exit as end:
        return int(end.exit_code)
    except (UserError, Stop) as end:
        if str(end):  # else another process of this command says it
            log(f"dragoman: {end}", ERROR)
        return end.code if isinstance(end, Stop) else 2
    except SystemExit as end:
        if end.code == TERMINATED:
            log("dragoman: stopped by SIGTERM", ERROR)
        raise
    except (KeyboardInterrupt, typer.Abort):
        log("dragoman: stopped", ERROR)
        return interrupts.STOPPED
    except BrokenPipeError:  # the reader has gone, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        log(f"dragoman: {error.strerror or error}" + (f": {error.filename!r}" if error.filename else ""), ERROR)
        with suppress(OSError):
            sys.stdout.close()  # what it still holds cannot be written either
        return 2
    except Exception as error:
        if interrupts.came():  # while a library was imported, for example, which made an ImportError of it
            log("dragoman: stopped", ERROR)
            return interrupts.STOPPED
        if is_out_of_memory(error):
            log(
                "dragoman: out of memory; free what others hold, or ask for less: a smaller model, or smaller batches",
                ERROR,
            )
            return 2
        return report_usage_error(error) if hasattr(error, "format_message") else report_bug()
    return 0


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether memory ran out: in Python, in PyTorch (not imported for this) or for a new thread."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY))


def report_usage_error(error: Any) -> int:
    """Print what the parser does not understand in a command line, and return the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        message = " ".join(error.format_message().split()).rstrip(".")
        where = error.ctx.command_path if getattr(error, "ctx", None) else "dragoman"
        log(f"dragoman: {message[:1].lower()}{message[1:]}; {where} --help shows what there is", ERROR)
    return 2


def report_bug() -> int:
    """Print a traceback and how to report it, and return the exit code."""
    traceback.print_exc()
    log(
        "dragoman: this is our fault, not yours. Please report it with the lines above, the command, and the "
        "output of `pip freeze`.",
        ERROR,
    )
    return 1
