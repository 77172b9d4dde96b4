"""Classifiers from the first line to the last: they learn a rule, say what they hold of each label, lose no line."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from dragoman.errors import UserError
from dragoman.inference.loading import load, load_as
from dragoman.inference.single_sequence import Classifier
from dragoman.inspection.sentence import inspect
from dragoman.io import read_lines
from dragoman.models.single_sequence import TransformerClassifierSettings
from dragoman.recipe import read_recipe
from toy_heads import BACKBONES, classifier_recipe, label
from toy_run import (
    Call,
    Toy,
    assert_user_error,
    make_sentences,
    read_run_events,
    read_tensor_files,
    train_quietly,
    write_lines,
)


@pytest.fixture(scope="module", params=BACKBONES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return train_quietly(classifier_recipe(folder, request.param), folder / "run")


@pytest.fixture
def classifier(run: Path) -> Classifier:
    found = load(run, device="cpu")
    assert isinstance(found, Classifier)
    return found


def test_it_learns_the_rule(run: Path, classifier: Classifier) -> None:
    new = make_sentences(1000, seed=9)[-100:]
    right = [one.label == label(line) for line, one in zip(new, classifier.classify(new), strict=True)]
    assert sum(right) >= 98
    best = [event for event in read_run_events(run) if event["event"] == "validate"][-1]
    assert best["accuracy"] >= 98
    assert best["loss"] < 0.2


def test_validation_judges_as_the_door_does(run: Path, classifier: Classifier) -> None:
    dev = [line.split("\t") for line in read_lines(run.parent / "dev.tsv")]
    found = classifier.classify([text for _, text in dev])
    right = sum(one.label == wanted for one, (wanted, _) in zip(found, dev, strict=True))
    accuracies = [event["accuracy"] for event in read_run_events(run) if event["event"] == "validate"]
    assert 100 * right / len(dev) == pytest.approx(max(accuracies))


def test_probabilities_are_those_of_all_labels(classifier: Classifier) -> None:
    for one in classifier.classify(make_sentences(20)):
        assert sum(one.probabilities.values()) == pytest.approx(1)
        assert set(one.probabilities) == {"yes", "no"}
        assert one.probability == one.probabilities[one.label] == max(one.probabilities.values())
        assert next(iter(one.probabilities)) == one.label


def test_the_same_at_every_batch_size_and_in_every_order(classifier: Classifier) -> None:
    lines = [*make_sentences(30, longest=20), "", "ba", "ba " * 40]
    whole = classifier.classify(lines)
    order = Random(1).sample(range(len(lines)), len(lines))
    shuffled = classifier.classify([lines[i] for i in order])
    singly = [classifier.classify([line])[0] for line in lines]
    for found in ([shuffled[order.index(i)] for i in range(len(lines))], singly):
        assert [(one.label, one.warnings) for one in found] == [(one.label, one.warnings) for one in whole]
        for one, other in zip(found, whole, strict=True):  # some CPUs round a row by its position in the batch
            assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)


def test_lines_of_every_length(classifier: Classifier) -> None:
    """An empty line has no label; a long one is read whole, one that no memory holds in parts, and both are said."""
    empty, blank, long, endless = classifier.classify(["", "  ", "ne " * 60, "ne " * 2000])
    assert empty.label == blank.label == ""
    assert empty.probabilities == {}
    assert long.label == endless.label == "no"
    assert long.warnings == (f"longer than any text of training (60 tokens against {classifier.longest_source})",)
    assert [warning.split(" (")[0].split(":")[0] for warning in endless.warnings] == [
        "longer than any text of training",
        "too long for one piece",
    ]
    with pytest.raises(ValueError, match="into a list"):
        classifier.classify("ba")


def test_ensemble_averages_probabilities(
    run: Path, classifier: Classifier, tmp_path_factory: pytest.TempPathFactory, call: Call
) -> None:
    """Of a run and a less trained one with the same vocabulary; other vocabularies and tasks are refused."""
    folder = tmp_path_factory.mktemp("weak")
    weak = train_quietly(classifier_recipe(folder, "transformer", steps=5, seed=2), folder / "run")
    both = load([run, weak], device="cpu")
    assert isinstance(both, Classifier)
    lines = make_sentences(20, seed=3)
    singles = zip(classifier.classify(lines), load_as(Classifier, weak, device="cpu").classify(lines), strict=True)
    means = [(one.probabilities["yes"] + other.probabilities["yes"]) / 2 for one, other in singles]
    assert [one.probabilities["yes"] for one in both.classify(lines)] == pytest.approx(means, abs=1e-5)
    assert len(set(means)) > 1
    answer = call("classify", run, "--with", weak, "--device", "cpu", stdin="\n".join(lines).encode())
    assert answer.out.splitlines() == [one.label for one in both.classify(lines)]
    with pytest.raises(UserError, match="an ensemble cannot be inspected"):
        inspect(both, lines[0])


def test_ensemble_of_different_tasks_is_refused(run: Path, toy: Toy, call: Call) -> None:
    assert_user_error(call("classify", run, "--with", toy.run, "--device", "cpu"), "classify", "translate", "ensemble")


def test_on_the_command_line(run: Path, tmp_path: Path, call: Call) -> None:
    lines = ["ba del.", "", "del ne!"]
    answer = call("classify", run, "--input", write_lines(tmp_path / "in", lines), "--device", "cpu")
    assert answer.out == "yes\n\nno\n"
    answer = call("classify", run, "--json", "--device", "cpu", stdin=b"ba del.\n")
    assert json.loads(answer.out)["label"] == "yes"
    assert json.loads(answer.out)["source"] == "ba del."
    assert "longer than any text" in call("classify", run, "--device", "cpu", stdin=("ba " * 60).encode()).err
    assert_user_error(call("translate", run, "--device", "cpu"), "dragoman classify")
    assert_user_error(call("generate", run, "--device", "cpu"), "dragoman classify")
    assert "yes" in call("info", run).out


def test_evaluation_says_who_was_taken_for_whom(run: Path, tmp_path: Path, call: Call) -> None:
    """Of the corpus that the recipe names, or of files; a label that training never saw is said, and counts."""
    own = json.loads(call("evaluate", run, "--json", "--device", "cpu").out)
    assert own["lines"] == 100
    assert own["accuracy"]["value"] >= 97
    assert sum(map(sum, own["confusion"]["counts"])) == 100
    source = write_lines(tmp_path / "s", ["ba del.", "ne.", "del!"])
    reference = write_lines(tmp_path / "r", ["yes", "yes", "perhaps"])
    answer = call("evaluate", run, "--source", source, "--reference", reference, "--device", "cpu")
    assert "33.33" in answer.out
    assert "as perhaps" in answer.out
    assert "1 line with a reference label that was not in the training data" in answer.err
    assert_user_error(call("evaluate", run, "--source", source, "--device", "cpu"), "--reference")
    assert_user_error(call("evaluate", run, "--phrasebook", "test", "--device", "cpu"), "dragoman classify")


def test_a_resumed_run_ends_as_one_that_never_stopped(tmp_path: Path) -> None:
    recipe = classifier_recipe(tmp_path, steps=8, validate_every=4, save_every=4, schedule="inverse_sqrt")
    whole = train_quietly(recipe, tmp_path / "whole")
    train_quietly(recipe, tmp_path / "run", "train.steps=4")
    again = train_quietly(recipe, tmp_path / "run", resume=True)
    assert read_tensor_files(again) == read_tensor_files(whole)
    assert read_run_events(again) == read_run_events(whole)


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_labels_may_be_numbers_and_stand_anywhere(tmp_path: Path, form: str) -> None:
    classifier_recipe(tmp_path)
    corpus: dict[str, object]
    rows = [line.split("\t") for line in read_lines(tmp_path / "train.tsv")]
    if form == "jsonl":
        records = (
            json.dumps({"id": i, "mark": int(mark == "yes"), "words": text}) for i, (mark, text) in enumerate(rows)
        )
        corpus = {"jsonl": str(write_lines(tmp_path / "train.jsonl", records)), "keys": ["words", "mark"]}
    else:
        lines = (f"{i}\t{text}\t{int(mark == 'yes')}" for i, (mark, text) in enumerate(rows))
        corpus = {"tsv": str(write_lines(tmp_path / "numbered.tsv", lines)), "columns": [1, 2]}
    overrides = [f"data.train={json.dumps(corpus)}", "data.dev=[]", "data.test=[]", "train.steps=2"]
    run = train_quietly(tmp_path / "transformer.yaml", tmp_path / "run", *overrides)
    assert load(run, device="cpu").classify(["ba."])[0].probabilities.keys() == {"0", "1"}


def test_a_label_of_two_lines_is_one_line_out(tmp_path: Path, call: Call) -> None:
    recipe = classifier_recipe(tmp_path, steps=1)
    records = (
        json.dumps({"source": text, "target": f"{mark}\nindeed"}) for text, mark in (("ba", "yes"), ("ne", "no"))
    )
    corpus = f"data.train={{jsonl: {write_lines(tmp_path / 'two.jsonl', records)}}}"
    run = train_quietly(recipe, tmp_path / "run", corpus, "data.dev=[]")
    answer = call("classify", run, stdin=b"ba\nne\n")
    assert [line.partition(" ")[2] for line in answer.out.splitlines()] == ["indeed", "indeed"]


COMPLAINTS: list[tuple[str, list[str], str]] = [
    ("yes\tba\nyes\tne\n", [], "only the label 'yes'"),
    ("", [], "is empty"),
    ("yes\tba\nno\n", [], "line 2 has 1 column"),
    ("\tba\n\tne\n", [], "no label at all"),
    ("yes\tba\nno\tne\n", ["data.train={text: train.tsv}"], "only a language model learns from"),
    ("yes\tba\nno\tne\n", ["model.pool=min"], "no model.pool called 'min'"),
    ("yes\tba\nno\tne\n", ["tokenizer.target_kind=char"], "has one tokenizer"),
    ("yes\tba\nno\tne\n", ["train.metric=accurate"], "did you mean 'accuracy'"),
    ("yes\tba\nno\tne\n", ["train.metric=bleu"], "no metric of models that classify called 'bleu'"),
    ("yes\tba\nno\tne\n", ["data.metrics=[exact, bleu]"], "bleu cannot judge models that classify"),
    ("yes\tba\nno\tne\n", ["model={kind: lm, layers: 1}", "data.metrics=[bleu]"], "bleu cannot judge"),
]


@pytest.mark.parametrize(("content", "overrides", "said"), COMPLAINTS)
def test_bad_input_is_answered_with_a_sentence(
    tmp_path: Path, call: Call, content: str, overrides: list[str], said: str
) -> None:
    recipe = classifier_recipe(tmp_path)
    (tmp_path / "train.tsv").write_text(content)
    answer = call("train", recipe, "--out", tmp_path / "run", *overrides)
    assert_user_error(answer, said, working=True)


def test_labels_of_dev_that_training_lacks_are_said(tmp_path: Path, call: Call) -> None:
    recipe = classifier_recipe(tmp_path, steps=2)
    write_lines(tmp_path / "dev.tsv", ["yes\tba", "perhaps\tne"])
    answer = call("train", recipe, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "dev: 1 texts (1 with a label that training does not have: left out)" in answer.err
    assert isinstance(read_recipe(recipe).model, TransformerClassifierSettings)
