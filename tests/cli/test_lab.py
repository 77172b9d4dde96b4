"""The command `dragoman lab`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman.cli.main import main
from dragoman.labs.registry import EXPERIMENTS


def run_lab(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["dragoman", "lab", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_without_names_it_lists_the_experiments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_lab(monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in EXPERIMENTS)


def test_an_unknown_name_gets_a_suggestion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lab("recurrent-power", monkeypatch=monkeypatch) == 2
    assert "did you mean 'recurrent-powers'" in capsys.readouterr().err
    assert run_lab("--all", "reach", monkeypatch=monkeypatch) == 2


def test_a_run_writes_its_page_and_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = str(tmp_path / "labs"), tmp_path / "report"
    arguments = ("recurrent-powers", "--quick", "--out", out, "--report", str(report), "--json")
    assert run_lab(*arguments, monkeypatch=monkeypatch) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "confirmed"
    assert (report / "recurrent-powers.html").exists()
    assert (report / "index.html").exists()
