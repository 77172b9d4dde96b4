"""A model card says what is in the folder, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from dragoman.config.settings import TrainSettings
from dragoman.data.corpus import CorpusSettings
from dragoman.inference.model_card import (
    make_card_table,
    name_corpus,
    rank_validation,
    read_card,
    read_events,
    render_card,
)
from dragoman.modules.patterns import PATTERNS
from dragoman.modules.positions import POSITIONS
from dragoman.recipe import Recipe, list_model_kinds
from dragoman.run_dir import FORMAT, RunFolder, read_header
from toy_run import Call, Toy, assert_user_error, read_run_events, train_quietly
from toy_sections import settings_of


def said(about: dict[str, object]) -> str:
    console = Console(width=10_000)
    with console.capture() as held:
        console.print(make_card_table(about))
    return held.get()


def test_numbers_are_those_of_the_run(toy: Toy) -> None:
    about = read_card(toy.run)
    records = read_run_events(toy.run)
    assert about["parameters"] == sum(tensor.numel() for tensor in load_file(toy.run / "model.safetensors").values())
    assert about["steps"] == 330
    assert about["format"] == FORMAT
    assert about["vocabulary"] == {"source": 310, "target": 310}
    assert about["tokens_read"] == [r["tokens"] for r in records if r["event"] == "train"][-1]
    assert about["train_seconds"] > 0
    assert about["longest_source"] == toy.translator.longest_source
    best = max((r for r in records if r["event"] == "validate"), key=lambda r: r["bleu"])
    assert about["validation"]["bleu"] == best["bleu"]
    assert json.loads(json.dumps(about)) == about


def test_the_table_says_it_all(toy: Toy) -> None:
    about = read_card(toy.run)
    text = said(about)
    for part in (
        f"{about['parameters']:,} parameters",
        "width 64",
        "310 shared entries",
        "dev.src + dev.trg",
        "nrefs:1",
        "; greedy search)",
    ):
        assert part in text
    assert "▁" not in text


def test_best_is_what_the_run_went_by(small: Path, tmp_path: Path) -> None:
    """By loss where the recipe says so, and without a dev set there is none."""
    run = train_quietly(small, tmp_path / "run", "train.metric=loss", "train.validate_every=1", "train.steps=4")
    losses = [r["loss"] for r in read_run_events(run) if r["event"] == "validate"]
    assert read_card(run)["validation"]["loss"] == min(losses)
    alone = train_quietly(small, tmp_path / "alone", "data.dev=[]", "train.steps=2")
    assert read_card(alone)["validation"] is None
    assert "nothing" in said(read_card(alone))
    assert "best on dev" not in said(read_card(alone))


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
    recipe = Recipe(train=TrainSettings(metric=metric))
    assert rank_validation(better, recipe) > rank_validation(worse, recipe)


def test_only_sequences_have_a_perplexity(toy: Toy) -> None:
    """A classifier predicts one label."""
    about = read_card(toy.run)
    assert "perplexity" in said(about)
    assert "perplexity" not in said({**about, "task": "classify"})


def test_a_card_without_records(toy: Toy, tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "nothing")) == []
    (tmp_path / "torn").write_text(
        '{"event": "train", "tokens": 1, "seconds": 1}\n{"event": "validate"}\n[1]\n\n{"event": "tr'
    )
    assert list(read_events(tmp_path / "torn")) == [{"event": "train", "tokens": 1, "seconds": 1}]
    assert "0 tokens" in said({**read_card(toy.run), "tokens_read": 0, "validation": None})


def test_names_of_corpora() -> None:
    assert name_corpus(CorpusSettings(source="/a/b/train.en", target="c/train.de")) == "train.en + train.de"
    assert name_corpus(CorpusSettings(tsv="/a/b.tsv", weight=2.5)) == "b.tsv (weight 2.5)"
    assert name_corpus(CorpusSettings(text="/a/b.txt", part=(0.0, 0.5))) == "b.txt (part [0.0, 0.5])"
    assert name_corpus(CorpusSettings(phrasebook=500, seed=3)) == "phrasebook, 500 pairs, seed 3"


def test_a_path_in_brackets_is_shown_as_it_is(toy: Toy, tmp_path: Path, call: Call) -> None:
    (tmp_path / "[red]run[x]").symlink_to(toy.run)
    assert str(tmp_path / "[red]run[x]") in call("info", tmp_path / "[red]run[x]").out


def test_a_card_counts_what_the_run_learned_from(toy: Toy) -> None:
    about = read_card(toy.run)
    assert [(one["split"], one["count"]) for one in about["corpora"]] == [("train", 2000), ("dev", 100)]
    assert "train.src + train.trg (2,000 pairs)" in said(about)
    assert all(about["versions"].values())
    assert about["started"] <= about["ended"]
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC to \d{4}-", said(about))
    assert about["epochs"] > 1


def test_a_card_of_an_earlier_release_says_what_is_unknown(toy: Toy, tmp_path: Path) -> None:
    """Neither provenance nor checkpoints: the card says so instead of guessing."""
    lost = shutil.ignore_patterns("provenance.json", "checkpoints", "scores.jsonl")
    old = shutil.copytree(toy.run, tmp_path / "old", ignore=lost)
    about = read_card(old)
    assert [one["count"] for one in about["corpora"]] == [None, None]
    assert "unknown number of pairs" in said(about)
    assert about["parent"] is None
    assert render_card(old).count("unknown") == 4  # two corpora, dates, versions


def test_a_fine_tuned_run_names_its_parents(small: Path, tmp_path: Path) -> None:
    """Path and digest of the parent, and of the parent's parent, survive a resume and the loss of both."""
    first = train_quietly(small, tmp_path / "first", "train.steps=2")
    second = train_quietly(small, tmp_path / "second", "train.steps=2", init_from=first)
    third = train_quietly(small, tmp_path / "third", "train.steps=2", init_from=second)
    digests = [read_header(RunFolder(run).model_file)["digest"] for run in (first, second)]
    shutil.rmtree(first)
    shutil.rmtree(second)
    train_quietly(small, third, "train.steps=3", resume=True)
    parent = read_card(third)["parent"]
    assert (parent["run"], parent["digest"], parent["steps"]) == (str(second), digests[1], 2)
    assert (parent["parent"]["run"], parent["parent"]["digest"]) == (str(first), digests[0])
    assert parent["parent"]["parent"] is None
    assert f"second after 2 steps, weights {digests[1][:12]}; before that first" in render_card(third)
    assert str(tmp_path) not in render_card(third)


def test_only_settings_that_apply_are_shown(toy: Toy) -> None:
    for backbones in list_model_kinds().values():
        for backbone, kind in backbones.items():
            model = kind().model_dump(mode="json")
            shown = settings_of({**model, **({"backbone": backbone} if backbone else {})}).get_effective_settings()
            assert not {"rank", "random_blocks", "window", "reach", "max_length"} & set(shown)
            assert not {"encoder_layers", "decoder_layers"} & set(shown) or "layers" not in shown
    several = settings_of({"kind": "transformer", "encoder_layers": 2, "decoder_layers": 3}).get_effective_settings()
    assert "layers" not in several
    assert (several["encoder_layers"], several["decoder_layers"]) == (2, 3)
    assert "rank" not in said(read_card(toy.run))
    for name in PATTERNS:
        assert set(PATTERNS[name].uses) <= set(settings_of({"attention": name}).get_effective_settings())
    for name in POSITIONS:
        assert set(POSITIONS[name].uses) <= set(settings_of({"position": name}).get_effective_settings())


def test_a_card_in_markdown(toy: Toy, tmp_path: Path, call: Call) -> None:
    """Sections as tables, whatever is in a name, and how to use it; what evaluate finds is among the scores."""
    run = shutil.copytree(toy.run, tmp_path / "a|b", ignore=shutil.ignore_patterns("scores.jsonl"))
    assert call("evaluate", run, "--source", toy.folder / "dev.src", "--reference", toy.folder / "dev.trg").code == 0
    assert call("evaluate", run, "--source", toy.folder / "dev.src", "--reference", toy.folder / "dev.trg").code == 0
    answer = call("info", run, "--markdown")
    assert answer.code == 0, answer.err
    text = answer.out
    assert text.startswith("# a|b\n\nA transformer model that translates")
    for title in ("## Model", "## Data", "## Training", "## Scores", "## Use"):
        assert title in text
    assert "a\\|b" in text
    assert text.count("| test ") == 1  # the newest result of a test stands for all
    assert "chrF" in text
    assert "dragoman translate 'a|b' < input.txt" in text
    assert str(tmp_path) not in text
    text = render_card(run, exported="x y")
    assert "dragoman import 'x y' --out 'a|b'\ndragoman translate 'a|b' < input.txt" in text


def test_scores_of_other_engines_and_metrics_stand_side_by_side(toy: Toy, tmp_path: Path, call: Call) -> None:
    run = shutil.copytree(toy.run, tmp_path / "run", ignore=shutil.ignore_patterns("scores.jsonl"))
    files = ["--source", toy.folder / "dev.src", "--reference", toy.folder / "dev.trg"]
    for options in (["--metric", "bleu"], ["--metric", "chrf"], ["--engine", "ctranslate2", "--metric", "bleu"]):
        assert call("evaluate", run, *files, *options).code == 0
    first, second = read_card(run)["tests"]
    assert (first["engine"], set(first["scores"])) == ("torch", {"bleu", "chrf"})
    assert (second["engine"], set(second["scores"])) == ("ctranslate2", {"bleu"})
    text = render_card(run)
    assert "| test dev.src |" in text
    assert "| test dev.src (2) |" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("provenance.json", '{"corpora": [{"split": "train"}, {}]}'),
        ("provenance.json", '{"corpora": 3}'),
        ("provenance.json", '{"parent": {"digest": "x"}}'),
        ("provenance.json", '{"parent": "run"}'),
        ("provenance.json", '{"started": 3}'),
        ("scores.jsonl", '{"scores": {"bleu": 3}, "test": "x"}'),
        ("scores.jsonl", '{"scores": {"bleu": {"value": "x"}}, "test": "x"}'),
        ("scores.jsonl", '{"scores": 3}'),
    ],
)
def test_a_tampered_record_is_refused(toy: Toy, tmp_path: Path, call: Call, name: str, text: str) -> None:
    run = shutil.copytree(toy.run, tmp_path / "run")
    (run / name).write_text(text)
    assert_user_error(call("info", run), name, "damaged")


def test_scores_do_not_need_a_folder_that_can_be_written_to(toy: Toy, tmp_path: Path, call: Call) -> None:
    run = shutil.copytree(toy.run, tmp_path / "run", ignore=shutil.ignore_patterns("scores.jsonl"))
    (run / "scores.jsonl").mkdir()  # in the way, as a disk that is read-only would be
    assert call("evaluate", run, "--source", toy.folder / "dev.src", "--reference", toy.folder / "dev.trg").code == 0


def test_records_of_earlier_releases_are_read_under_todays_names(tmp_path: Path) -> None:
    old = {"event": "train", "step": 1, "tokens": 1, "seconds": 1, "likelihood": 2.0, "norm": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    [record] = read_events(tmp_path / "metrics.jsonl")
    assert (record["nll"], record["grad_norm"]) == (2.0, 3.0)
    assert not {"likelihood", "norm"} & set(record)
