"""A model card says what is in the folder, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from dragoman.card import card, card_table, corpus_name, goodness, read_events
from dragoman.config import CorpusSettings
from dragoman.score.metrics import metric_named
from dragoman.store import FORMAT
from toy_run import Call, Toy, events, quietly

pytest_plugins = ["toy_fixtures"]


def said(about: dict[str, object]) -> str:
    console = Console(width=10_000)
    with console.capture() as held:
        console.print(card_table(about))
    return held.get()


def test_numbers_are_those_of_the_run(toy: Toy) -> None:
    about = card(toy.run)
    records = events(toy.run)
    assert about["parameters"] == sum(tensor.numel() for tensor in load_file(toy.run / "model.safetensors").values())
    assert about["steps"] == 330
    assert about["format"] == FORMAT
    assert about["vocabulary"] == {"source": 310, "target": 310}
    assert about["tokens_read"] == [r["tokens"] for r in records if r["event"] == "train"][-1]
    assert about["train_seconds"] > 0
    assert about["longest_source"] == toy.translator.longest
    best = max((r for r in records if r["event"] == "validate"), key=lambda r: r["bleu"])
    assert about["validation"]["bleu"] == best["bleu"]
    assert json.loads(json.dumps(about)) == about


def test_the_table_says_it_all(toy: Toy) -> None:
    about = card(toy.run)
    text = said(about)
    for part in (f"{about['parameters']:,} parameters", "width 64", "310 entries", "dev.src + dev.trg", "nrefs:1"):
        assert part in text
    assert "▁" not in text


def test_best_is_what_the_run_went_by(small: Path, tmp_path: Path) -> None:
    """By loss where the recipe says so, and without a dev set there is none."""
    run = quietly(small, tmp_path / "run", "train.metric=loss", "train.validate_every=1", "train.steps=4")
    losses = [r["loss"] for r in events(run) if r["event"] == "validate"]
    assert card(run)["validation"]["loss"] == min(losses)
    alone = quietly(small, tmp_path / "alone", "data.dev=[]", "train.steps=2")
    assert card(alone)["validation"] is None
    assert "nothing" in said(card(alone))
    assert "best on dev" not in said(card(alone))


@pytest.mark.parametrize(
    ("better", "worse", "metric"),
    [
        ({"bleu": 2.0, "loss": 9.0}, {"bleu": 1.0, "loss": 1.0}, "bleu"),
        ({"bleu": 1.0, "loss": 1.0}, {"bleu": 2.0, "loss": 9.0}, "loss"),
        ({"bleu": 0.0, "loss": 1.0}, {"bleu": 0.0, "loss": 2.0}, "bleu"),
        ({"bleu": None, "loss": 1.0}, {"bleu": None, "loss": 2.0}, "bleu"),
        ({"bleu": None, "loss": 1.0}, {"bleu": None, "loss": None}, "bleu"),
        ({"ter": 1.0, "loss": 9.0}, {"ter": 2.0, "loss": 1.0}, "ter"),
        ({"loss": 1.0}, {"loss": 2.0}, "auto"),
    ],
)
def test_what_is_better(better: dict[str, float], worse: dict[str, float], metric: str) -> None:
    entry = metric_named(metric, "translate")
    assert goodness(better, entry) > goodness(worse, entry)


def test_a_card_without_records(toy: Toy, tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "nothing")) == []
    (tmp_path / "torn").write_text(
        '{"event": "train", "tokens": 1, "seconds": 1}\n{"event": "validate"}\n[1]\n\n{"event": "tr'
    )
    assert list(read_events(tmp_path / "torn")) == [{"event": "train", "tokens": 1, "seconds": 1}]
    assert "0 tokens" in said({**card(toy.run), "tokens_read": 0, "validation": None})


def test_names_of_corpora() -> None:
    assert corpus_name(CorpusSettings(source="/a/b/train.en", target="c/train.de")) == "train.en + train.de"
    assert corpus_name(CorpusSettings(tsv="/a/b.tsv", weight=2.5)) == "b.tsv (weight 2.5)"
    assert corpus_name(CorpusSettings(text="/a/b.txt", part=(0.0, 0.5))) == "b.txt (part [0.0, 0.5])"
    assert corpus_name(CorpusSettings(phrasebook=500, seed=3)) == "phrasebook, 500 pairs, seed 3"


def test_a_path_in_brackets_is_shown_as_it_is(toy: Toy, tmp_path: Path, call: Call) -> None:
    (tmp_path / "[red]run[x]").symlink_to(toy.run)
    assert str(tmp_path / "[red]run[x]") in call("info", tmp_path / "[red]run[x]").out
