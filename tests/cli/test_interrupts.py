"""Ctrl-C at any time gives exit code 130, one sentence and no traceback. A closed stream gives exit code 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dragoman import errors
from dragoman.cli.main import run_command

INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
AT_EXIT = f"""
import atexit, sys
from dragoman.__main__ import main
atexit.register(lambda: exec({INTERRUPT!r}))
sys.argv = ["dragoman", "--version"]
main()
"""


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python as from a terminal, where Ctrl-C is not ignored."""
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=listen, **options)


@pytest.mark.parametrize("module", ["typer", "rich", "yaml"])
def test_interrupt_during_imports(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = run("-m", "dragoman", "--help", env={**os.environ, "PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dragoman: stopped\n")


def test_interrupt_during_shutdown() -> None:
    done = run("-c", AT_EXIT)
    assert (done.returncode, done.stderr) == (130, "dragoman: stopped\n")
    assert done.stdout.startswith("dragoman ")


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    errors.handle_interrupts()
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("made", [KeyboardInterrupt, ImportError, SystemError])
def test_interrupt_that_a_library_replaces(made: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    class Command:
        def make_context(self, *_: object) -> Any:
            return nullcontext()

        def invoke(self, _: object) -> None:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):
                    pass  # the signal is handled between two instructions
            except KeyboardInterrupt as error:
                raise made from error

    assert run_command(Command(), []) == 130
    assert capsys.readouterr().err == "dragoman: stopped\n"


def test_ignored_sigint_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    errors.handle_interrupts()
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN


@pytest.mark.parametrize("stream", [0, 1])
def test_closed_stream_is_a_user_error(stream: int) -> None:
    code = (
        f"import os, sys; os.close({stream}); os.execv(sys.executable, [sys.executable, '-m', 'dragoman', '--version'])"
    )
    done = run("-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dragoman: standard input and output must be open; use /dev/null for nothing\n"


class Interrupted:
    """An object during whose destruction Ctrl-C comes."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_a_destructor_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python only prints exceptions that are raised there."""
    monkeypatch.setattr(errors, "interrupt_is_caught", True)
    monkeypatch.setattr(errors, "interrupt_was_raised", False)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        errors.handle_interrupts()
        Interrupted()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)
    finally:
        signal.signal(signal.SIGINT, handler)
