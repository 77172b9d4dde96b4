"""The law of all engines: a line has one translation, in any batch, in any order, with any cache, from any API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from dragoman.errors import UserError
from dragoman.hardware import cpu_features
from dragoman.inference.loading import ENGINES, load
from dragoman.inference.translator import Translator
from toy_run import Call, Toy, make_sentences, write_lines

LINES = make_sentences(160, seed=9)
SUPPORTED = [name for name in ENGINES if name != "torch-bf16" or cpu_features().bf16]  # others are refused
DIFFERENT = [name for name in SUPPORTED if name != "torch"]  # which is auto
NEAR = {"ctranslate2": 1e-4, "ctranslate2-int8": 0.05}  # scores that may change places: it rounds by the batch

Scored = list[tuple[str, float]]


def in_batches(translator: Translator, order: Sequence[int], size: int) -> Scored:
    """Return text and score of each line, given so many at a time in some order."""
    found: dict[int, tuple[str, float]] = {}
    for start in range(0, len(order), size):
        some = order[start : start + size]
        given = translator.translate([LINES[i] for i in some], align=False)
        found.update({i: (one.text, one.score) for i, one in zip(some, given, strict=True)})
    return [found[i] for i in sorted(found)]


def same(found: Scored, expected: Scored, near: float) -> bool:
    """Return whether all are equal to the bit or, for engines that round by the batch, but for near-ties."""
    if not near:
        return found == expected
    return all(abs(a - b) <= near for (_, a), (_, b) in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", DIFFERENT)
def test_company_order_and_caches_change_nothing(name: str, toy: Toy, tmp_path: Path) -> None:
    if name.startswith("ctranslate2"):
        pytest.importorskip("ctranslate2", reason="CTranslate2 has no wheel for every platform")
    plain, near = toy.translator, NEAR.get(name, 0.0)
    cold = replace(plain, engine=ENGINES[name](plain, tmp_path / "cache"))
    numbers = list(range(len(LINES)))
    expected = in_batches(cold, numbers, 1024)
    assert len({text for text, _ in expected}) > 120
    warm = replace(plain, engine=ENGINES[name](plain, tmp_path / "cache"))
    shuffled = Random(1).sample(numbers, len(numbers))
    for order, size in ((numbers, 7), (shuffled, 1024), (numbers, 60)):
        assert same(in_batches(warm, order, size), expected, near), size
    assert same(in_batches(warm, numbers[:20], 1), expected[:20], near)


def test_the_command_line_and_python_agree_at_every_batch_size(toy: Toy, call: Call, tmp_path: Path) -> None:
    """By default, and however little or much is asked for at a time."""
    source = write_lines(tmp_path / "lines", LINES)
    said = {size: call("translate", toy.run, "--input", source, "--batch", size) for size in (7, 100, 1024)}
    assert {answer.code for answer in said.values()} == {0}
    assert said[7].out == said[100].out == said[1024].out
    translator = load(toy.run, device="cpu", engine="auto")
    texts = said[1024].out.splitlines()
    assert [translator.translate([line])[0].text for line in LINES[:20]] == texts[:20]
    assert [one.text for one in toy.translator.translate(LINES, align=False)] == texts


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in SUPPORTED])
def test_what_is_not_supported_is_refused(name: str, toy: Toy, call: Call) -> None:
    said = call("translate", toy.run, "--engine", name, stdin=b"ba del fo.\n")
    assert said.code == 2
    assert "no instructions for bf16" in said.err
    with pytest.raises(UserError, match="no instructions for bf16"):
        load(toy.run, device="cpu", engine=name)
