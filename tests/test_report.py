"""What a run tells: whole records, and lines that neither a pipe nor a terminal stumbles over."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from dragoman.errors import UserError
from dragoman.progress import Report
from dragoman.training import logging as reports
from dragoman.training.logging import Metrics


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_cut_back_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, step=0, board=False)
    for step in (1, 2, 3, 4):
        metrics.write("train", step, loss=1.0 / step)
    metrics.write("validate", 2, loss=0.5)
    metrics.close()
    with path.open("a") as file:
        file.write('{"event": "train", "step": 1, "lo')  # torn by a kill
    again = Metrics(path, step=2, board=False)
    again.write("train", 3, loss=0.0)
    again.close()
    assert [record["step"] for record in records(path)] == [1, 2, 2, 3]
    assert records(path)[-1]["loss"] == 0.0


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m", step=0, board=False)
    metrics.write("train", 1, loss=math.nan, grad_norm=math.inf, lr=0.5, bleu=None, signature="x")
    metrics.close()
    assert records(tmp_path / "m") == [
        {"event": "train", "step": 1, "loss": None, "grad_norm": None, "lr": 0.5, "bleu": None, "signature": "x"}
    ]


def test_a_record_is_on_disk_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m", step=0, board=False)
    metrics.write("train", 1, loss=1.0)
    assert len(records(tmp_path / "m")) == 1
    metrics.close()


def test_records_that_cannot_be_written(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    metrics = Metrics(tmp_path / "m", step=0, board=False)
    assert metrics.file is not None
    metrics.file.close()
    metrics.file = full.open("w")
    with pytest.raises(UserError, match="No space left"):
        metrics.write("train", 1, loss=1.0)
    with pytest.raises(OSError, match="No space"):
        metrics.file.close()
    metrics.file = None


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(reports.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_count_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """On a terminal twice a second, on one line; elsewhere now and then, a line each."""
    clock = Clock(monkeypatch)
    report = Report()
    report.console = Console(stderr=True, force_terminal=terminal, soft_wrap=True)
    seen = []
    for number in report.counted(range(8 * 1024), "reading"):
        clock.now += 8 / 1024  # a thousand in eight seconds
        seen.append(number)
    assert seen == list(range(8 * 1024))
    said = capsys.readouterr().err
    assert said.count("reading: ") == (8 if terminal else 4)
    assert ("\r" in said) is terminal
    assert ("\n" in said) is not terminal
    assert "reading: 2,048 (128/s)" in said


def test_a_short_count_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Report().counted(range(5000), "reading")) == list(range(5000))
    assert capsys.readouterr().err == ""


def test_steps_without_a_terminal_are_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    report = Report()
    report.begin(100, 0)
    for step in range(1, 31):
        clock.now += 1
        report.step(step, f"step {step}")
    report.end()
    assert capsys.readouterr().err.splitlines() == ["step 11", "step 22"]


def test_steps_on_a_terminal_are_a_bar() -> None:
    report = Report()
    held = io.StringIO()
    report.console = Console(file=held, force_terminal=True, width=100)
    report.begin(10, 3)
    report.step(4, "step 4  loss 1.234  0:00:30 left")
    report.end()
    assert "0:00:30 left" in held.getvalue()
    assert report.progress is None


def test_a_quiet_report_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(quiet=True)
    report.say("something")
    report.count("5")
    report.begin(10, 0)
    report.step(1, "step 1")
    report.end()
    assert capsys.readouterr() == ("", "")
