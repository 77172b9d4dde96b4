"""Conventions that every command follows: -h, -q, -v, short options, completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from dragoman import progress as console
from dragoman.cli import main as cli
from dragoman.errors import UserError
from dragoman.inference.loading import load_as
from dragoman.inference.single_sequence import Classifier
from dragoman.progress import Report
from toy_run import Call, Toy, assert_user_error, command, make_sentences, train_quietly, write_lines

LEVELS = {"error": console.ERROR, "warning": console.WARNING, "note": console.INFO, "detail": console.DETAIL}


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    inner = getattr(group, "commands", {})
    if not inner:
        yield path
    for name, each in inner.items():
        yield from leaves(each, (*path, name))


COMMANDS = list(leaves(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_the_usual_options(call: Call, path: tuple[str, ...]) -> None:
    answer = call(*path, "-h")
    assert (answer.code, answer.err) == (0, "")
    for option in ("-q, --quiet", "-v, --verbose", "-h, --help"):
        assert option in answer.out


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_files_have_short_options(call: Call, path: tuple[str, ...]) -> None:
    text = call(*path, "-h").out
    for long, short in {"--input": "-i", "--output": "-o", "--out": "-o"}.items():
        assert f"  {long} " not in text, f"{long} without {short}"


@pytest.fixture
def verbosity() -> Iterator[None]:
    yield
    console.set_verbosity(console.INFO)


@pytest.mark.usefixtures("verbosity")
@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_verbosity_level_shows_more_important_messages(capsys: pytest.CaptureFixture[str], level: int) -> None:
    console.set_verbosity(level)
    report = Report()
    for name, each in LEVELS.items():
        console.log(f"said {name}", each)
        report.log(f"reported {name}", each)
    shown = [name for name, each in LEVELS.items() if each <= level]
    assert capsys.readouterr().err.splitlines() == [f"{how} {name}" for name in shown for how in ("said", "reported")]


@pytest.mark.parametrize(("options", "expected"), [([], {"note", "warning"}), (["-q"], {"warning"}), (["-qq"], set())])
def test_quiet_hides_notes_and_then_warnings(small: Path, call: Call, options: list[str], expected: set[str]) -> None:
    run = small.parent / "run"
    answer = call("train", small, "-o", run, "train.steps=2", "train.warmup=9", *options)
    assert (answer.code, answer.out) == (0, "")
    found = {"note": "done: 2 steps" in answer.err, "warning": "inside its warm-up" in answer.err}
    assert {name for name, there in found.items() if there} == expected
    if not expected:
        assert answer.err == ""


def test_errors_are_never_hidden(tmp_path: Path, call: Call) -> None:
    answer = call("train", tmp_path / "none.yaml", "-o", tmp_path / "run", "-qq")
    assert answer.code == 2
    assert "none.yaml" in answer.err


def test_quiet_does_not_affect_the_next_command(small: Path, call: Call) -> None:
    call("train", small, "-o", small.parent / "one", "train.steps=1", "-qq")
    assert "done: 1 step," in call("train", small, "-o", small.parent / "two", "train.steps=1").err


def test_short_options_name_the_files(toy: Toy, tmp_path: Path, call: Call) -> None:
    lines = write_lines(tmp_path / "in", make_sentences(3, seed=4))
    long = call("translate", toy.run, "--input", lines)
    assert call("translate", toy.run, "-i", lines, "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out").read_text() == long.out


def test_shell_completion() -> None:
    asked = {"_DRAGOMAN_COMPLETE": "complete_bash", "COMP_WORDS": "dragoman tra", "COMP_CWORD": "1"}
    answer = subprocess.run(command(), env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert set(answer.stdout.split()) == {"train", "translate"}


def test_verbose_prints_more(toy: Toy, call: Call) -> None:
    plain, verbose = (call("translate", toy.run, "ba!", "--device", "cpu", *more) for more in ([], ["-v"]))
    assert plain.out == verbose.out
    for words in ("engine torch, device cpu", "1 line in"):
        assert words in verbose.err
        assert words not in plain.err


# texts on the command line


def test_texts_on_the_command_line_are_translated(toy: Toy, tmp_path: Path, call: Call) -> None:
    texts = [
        *make_sentences(2, seed=8),
        "x=5 ba!",
        "a=b",
        "data.x = 3 is assigned",
        "train.py=main file",
        "search.a b=c",
    ]
    piped = call("translate", toy.run, stdin="".join(f"{text}\n" for text in texts).encode())
    assert call("translate", toy.run, *texts) == piped
    assert call("translate", toy.run, "\n".join(texts)) == piped
    narrow = call("translate", toy.run, *texts, "search.beam=1", "--json")
    assert [json.loads(line)["source"] for line in narrow.out.splitlines()] == texts
    assert_user_error(call("translate", toy.run, "ba!", "beam=1"), "did you mean 'search.beam=1'")
    assert_user_error(call("translate", toy.run, "ba!", "serach.beam=1"), "did you mean 'search.beam=1'")
    assert_user_error(call("translate", toy.run, "ba!", "search.bean=1"), "search.bean", "beam")
    assert_user_error(call("translate", toy.run, "ba!", "train.lr=1"), "'train.lr=1' cannot be changed here")
    assert_user_error(call("translate", toy.run, "ba \udcff!"), "UTF-8")
    lines = write_lines(tmp_path / "in", texts)
    assert_user_error(call("translate", toy.run, "ba!", "-i", lines), "--input")
    assert "to read the file of that name" in call("translate", toy.run, lines).err


def test_error_for_another_task_names_the_run(toy: Toy, call: Call) -> None:
    """The message has plain names of one or several runs, not the repr of a list or a Path."""
    for wanted in ("classify", "generate"):
        assert_user_error(call(wanted, toy.run), f"the model in '{toy.run}' does not {wanted}")
    with pytest.raises(UserError, match=f"the model in '{toy.run}', '{toy.run}' does not classify"):
        load_as(Classifier, [toy.run, toy.run])


def test_output_that_ends_with_a_slash_is_refused(tmp_path: Path, call: Call, toy: Toy) -> None:
    """`Path` drops the final slash, so a file of that name would be written."""
    refused = call("translate", toy.run, "--output", f"{tmp_path}/new/", "a line")
    assert refused.code == 2
    assert f"'{tmp_path}/new/' is the name of a folder; name a file, such as '{tmp_path}/new/output.txt'" in refused.err
    assert not (tmp_path / "new").exists()


def test_run_folder_whose_name_is_not_utf8_is_refused(tmp_path: Path, call: Call, toy: Toy) -> None:
    run = tmp_path / "r\udcffn"
    shutil.copytree(toy.run, run)
    refused = call("info", run)
    assert refused.code == 2
    assert "is not valid UTF-8; rename it" in refused.err
    assert "damaged" not in refused.err
    with pytest.raises(UserError, match="is not valid UTF-8"):
        train_quietly(toy.run / "config.yaml", tmp_path / "o\udcff")
