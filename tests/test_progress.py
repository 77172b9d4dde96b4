"""Progress on a terminal and elsewhere, and files that commands write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from dragoman import progress
from dragoman.cli import line_io
from dragoman.errors import UserError
from toy_run import files


@pytest.mark.parametrize("seldom", [0.0, 1000.0])
def test_without_a_terminal_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seldom: float
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", seldom)
    with progress.ProgressBar("translating", total=1000, unit="lines") as bar:
        for done in (400, 800):
            bar.set_done(done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" lines, ")[0] for line in lines] == [
        f"translating: {done // 10}%, {done} of 1,000" for done in (400, 800) if not seldom
    ]
    assert all(line.endswith(" s left") for line in lines)


@pytest.mark.parametrize("quick", [0.0, 1000.0])
def test_on_a_terminal_it_is_gone_in_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quick: float
) -> None:
    monkeypatch.setattr(progress, "MIN_SHOWN_SECONDS", quick)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.ProgressBar("translating", total=1000, unit="lines") as bar:
        bar.set_done(400)
        bar.set_done(1000)
    shown = capsys.readouterr().err
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[K" if not quick else "")
    assert ("400 of 1,000" in shown) == (not quick)


HALVES = """
import os, pathlib, sys
from dragoman.cli.line_io import open_output

with open_output(pathlib.Path(sys.argv[1])) as sink:
    sink.write(f"{os.getpid()}\\n" * 1000)
    sink.flush()
    print("half", flush=True)
    sys.stdin.readline()
    sink.write(f"{os.getpid()}\\n" * 1000)
"""


def test_two_commands_that_write_one_file(tmp_path: Path) -> None:
    """Each ends well, and the file is complete output of one of them at any time."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", HALVES, str(out)]
    first, second = (subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(2))
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
    assert not out.exists()
    for process in (first, second):
        process.communicate("go on\n")
        assert process.returncode == 0
        assert out.read_text() == f"{process.pid}\n" * 2000
    assert files(tmp_path) == ["out"]


def test_output_leaves_files_of_the_user_alone(tmp_path: Path) -> None:
    """A file called OUT.part is not touched, and a link of that name is not followed."""
    (tmp_path / "out.part").write_text("precious")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "other.part").symlink_to("victim")
    for name in ("out", "other"):
        with line_io.open_output(tmp_path / name) as sink:
            sink.write("answers\n")
    assert (tmp_path / "out.part").read_text() == (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "out").read_text() == (tmp_path / "other").read_text() == "answers\n"
    assert not (tmp_path / "other").is_symlink()


def test_output_goes_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/real")
    with line_io.open_output(tmp_path / "link") as sink:
        sink.write("answers\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "real").read_text() == "answers\n"


def test_output_that_cannot_be_written_is_named_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for name in ("file/out", "nowhere/out"):
        with pytest.raises(UserError, match=f"cannot write '{name}' "), line_io.open_output(Path(name)):
            pass


def test_output_to_what_leads_to_a_pipe(tmp_path: Path) -> None:
    """/dev/stdout of a command in a pipe has a name that cannot be opened by its target."""
    code = "from pathlib import Path; from dragoman.cli import line_io\n"
    code += "with line_io.open_output(Path('/dev/stdout')) as sink: print('through', file=sink)"
    done = subprocess.run([sys.executable, "-c", code], stdout=PIPE, check=True)
    assert done.stdout == b"through\n"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="loop"), line_io.open_output(tmp_path / "loop"):
        pass
