"""Tests of input from a pipe, whose writer may wait for the output of a line before it writes the next one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from dragoman import io as file_io
from dragoman.cli import line_io
from dragoman.errors import UserError
from toy_run import Call, Toy, make_sentences, start_process


def test_line_is_translated_before_the_next_arrives(toy: Toy) -> None:
    lines = make_sentences(3, seed=5)
    with start_process("translate", toy.run, "--engine", "torch", "--device", "cpu", stdin=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        answers = []
        for line in lines:
            running.stdin.write(line.encode() + b"\n")
            running.stdin.flush()
            answers.append(running.stdout.readline().decode().rstrip("\n"))
        running.stdin.close()
        assert running.wait() == 0
    assert answers == [one.text for one in toy.translator.translate(lines)]


class Pipe:
    """A pipe in place of stdin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reading, self.writing = os.pipe()
        self.file = os.fdopen(reading, "rb")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(self.file))

    def write(self, text: bytes) -> None:
        os.write(self.writing, text)

    def close(self) -> None:
        os.close(self.writing)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    found = Pipe(monkeypatch)
    yield found
    found.file.close()


def test_batch_has_the_lines_that_have_arrived(pipe: Pipe) -> None:
    groups = line_io.read_batches(None, 3)
    pipe.write(b"one\ntwo\nhal")
    assert next(groups) == ["one", "two"]
    pipe.write(b"f\r\nfour\nfive\nsix\nseven\n\n")
    assert next(groups) == ["half", "four", "five"]
    assert next(groups) == ["six", "seven", ""]
    pipe.write(b"no line feed")
    pipe.close()
    assert list(groups) == [["no line feed"]]


def test_long_line_arrives_in_many_chunks(pipe: Pipe) -> None:
    groups = line_io.read_batches(None, 2)
    pipe.write(b"a" * 60_000)
    arriving = b"b" * 60_000 + b"\nnext\n"
    reader = line_io.StreamLines(pipe.file)
    assert not reader.has_next()
    pipe.write(arriving)
    assert list(islice(reader, 2)) == [b"a" * 60_000 + b"b" * 60_000 + b"\n", b"next\n"]
    pipe.close()
    assert list(groups) == []


def test_endless_line_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream without line breaks, only a little more than the limit is read."""
    with Path("/dev/zero").open("rb") as endless:
        reader = line_io.StreamLines(endless, longest=1 << 20)
        assert 1 << 20 < len(next(iter(reader))) <= (1 << 20) + (1 << 16)
        monkeypatch.setattr(line_io, "LONGEST_LINE", 1 << 20)
        monkeypatch.setattr(file_io.decode_lines, "__kwdefaults__", {"longest": 1 << 20})
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))
        with pytest.raises(UserError, match="the input line 1 has more than the 1 MiB allowed"):
            next(line_io.read_batches(None, 2))


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_lines_are_the_same_for_every_batch_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int) -> None:
    text = "\ufeffone\r\n\ntwo\u2028still two\n\x0c\nlast".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    (tmp_path / "file").write_bytes(text)
    found = [list(line_io.read_batches(path, size)) for path in (None, tmp_path / "file")]
    assert found[0] == found[1]
    assert [line for group in found[0] for line in group] == ["one", "", "two\u2028still two", "\x0c", "last"]
    assert max(map(len, found[0])) <= size


def test_dash_is_stdin(toy: Toy, call: Call) -> None:
    line = make_sentences(1, seed=6)[0].encode() + b"\n"
    assert call("translate", toy.run, "-i", "-", stdin=line) == call("translate", toy.run, stdin=line)
