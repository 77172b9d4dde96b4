"""Tests of metrics.jsonl, and of progress on a terminal and in a pipe."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from dragoman import progress
from dragoman.errors import UserError
from dragoman.progress import ITEMS_PER_UPDATE, Report
from dragoman.training.logging import MetricsWriter


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_truncated_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsWriter(path, step=0, tensorboard=False)
    for step in (1, 2, 3, 4):
        metrics.write("train", step, loss=1.0 / step)
    metrics.write("validate", 2, loss=0.5)
    metrics.close()
    with path.open("a") as file:
        file.write('{"event": "train", "step": 1, "lo')  # torn by a kill
    again = MetricsWriter(path, step=2, tensorboard=False)
    again.write("train", 3, loss=0.0)
    again.close()
    assert [record["step"] for record in records(path)] == [1, 2, 2, 3]
    assert records(path)[-1]["loss"] == 0.0


def test_non_finite_numbers_are_written_as_null(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "m", step=0, tensorboard=False)
    metrics.write("train", 1, loss=math.nan, grad_norm=math.inf, lr=0.5, bleu=None, signature="x")
    metrics.close()
    assert records(tmp_path / "m") == [
        {"event": "train", "step": 1, "loss": None, "grad_norm": None, "lr": 0.5, "bleu": None, "signature": "x"}
    ]


def test_record_is_written_to_disk_immediately(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "m", step=0, tensorboard=False)
    metrics.write("train", 1, loss=1.0)
    assert len(records(tmp_path / "m")) == 1
    metrics.close()


def test_write_errors_of_records_are_reported(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    metrics = MetricsWriter(tmp_path / "m", step=0, tensorboard=False)
    assert metrics.file is not None
    metrics.file.close()
    metrics.file = full.open("w")
    with pytest.raises(UserError, match="No space left"):
        metrics.write("train", 1, loss=1.0)
    with pytest.raises(OSError, match="No space"):
        metrics.file.close()
    metrics.file = None


class Clock:
    """A clock that tests advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("terminal", [True, False])
def test_long_iteration_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """On a terminal it is one line; elsewhere a line from time to time."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    seen = []
    for number in Report().progress("reading").iterate(range(8 * ITEMS_PER_UPDATE)):
        clock.now += 8 / ITEMS_PER_UPDATE
        seen.append(number)
    assert seen == list(range(8 * ITEMS_PER_UPDATE))
    shown = capsys.readouterr().err
    assert shown.count("reading") == (8 if terminal else 4)
    assert ("\r" in shown) is terminal
    assert ("\n" in shown) is not terminal
    assert f"reading{'' if terminal else ':'} 512 lines, 32/s" in shown


def test_short_iteration_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Report().progress("reading").iterate(range(5000))) == list(range(5000))
    assert capsys.readouterr().err == ""


def test_steps_without_a_terminal_are_logged_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with Report().progress("training", total=100) as bar:
        for step in range(1, 31):
            clock.now += 1
            bar.set_done(step, f"step {step}")
    assert capsys.readouterr().err.splitlines() == ["step 11", "step 22"]


@pytest.mark.parametrize("width", [40, 100])
def test_steps_on_a_terminal_are_shown_by_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    """The bar is left out on a narrow terminal, since a wrapped line cannot be replaced."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "terminal_width", lambda: width)
    text = "step 4  loss 1.234  0:00:30 left"
    with Report().progress("training", total=10) as bar:
        clock.now += 2
        bar.set_done(4, text)
    bar_text = "training ━━━━━━━━━━────────────── " if width == 100 else ""
    assert capsys.readouterr().err == f"\r{bar_text}{text}\x1b[K\r\x1b[K"


def test_quiet_report_prints_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(quiet=True)
    clock = Clock(monkeypatch)
    report.log("something")
    with report.progress("training", total=10) as bar:
        clock.now += 100
        bar.set_done(1, "step 1")
    assert capsys.readouterr() == ("", "")
