"""How far a long work is: a line that gives way on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys

import pytest

from dragoman import console


@pytest.mark.parametrize("seldom", [0.0, 1000.0])
def test_without_a_terminal_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seldom: float
) -> None:
    monkeypatch.setattr(console, "SELDOM", seldom)
    tick = console.ticker("translating", 1000)
    for done in (400, 800, 1000):
        tick(done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", ")[0] for line in lines] == [
        f"translating: {done} of 1,000" for done in (400, 800) if not seldom
    ]
    assert all(line.endswith(" s left") for line in lines)


@pytest.mark.parametrize("quick", [0.0, 1000.0])
def test_on_a_terminal_it_is_gone_in_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quick: float
) -> None:
    monkeypatch.setattr(console, "QUICK", quick)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tick = console.ticker("translating", 1000)
    tick(400)
    tick(1000)
    shown = capsys.readouterr().err
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[K" if not quick else "")
    assert ("400 of 1,000" in shown) == (not quick)
