"""Run folders of every format there has been: they load, and translate as they did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman import load
from dragoman.inference.single_sequence import Classifier
from dragoman.run_dir import FORMAT

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(GOLDEN.glob("run-*"))


def test_there_is_one_of_every_format() -> None:
    assert {int((folder / "FORMAT").read_text()) for folder in FOLDERS} == set(range(1, FORMAT + 1))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_answers_as_it_did(folder: Path) -> None:
    answers = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    opened, sources = load(folder, device="cpu"), [answer["source"] for answer in answers]
    if isinstance(opened, Classifier):
        for verdict, answer in zip(opened.classify(sources), answers, strict=True):
            assert verdict.label == answer["label"]
            assert verdict.probabilities == pytest.approx(answer["probabilities"], abs=1e-4)
        return
    found = opened.translate(sources)
    assert [one.text for one in found] == [answer["text"] for answer in answers]
    assert [one.score for one in found] == pytest.approx([answer["score"] for answer in answers], abs=2e-3)
