"""The inspection of a sentence shows what the model does: the same texts, probabilities and alignments."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import dragoman
from dragoman.errors import UserError
from dragoman.inference.single_sequence import Classifier, Generator
from dragoman.inference.translator import Translator
from dragoman.inspection.neurons import encode_pairs, find_top_activations
from dragoman.inspection.sentence import inspect
from dragoman.types import Pair
from toy_heads import lm_recipe
from toy_run import Call, Toy, train_quietly

GOLDEN = Path(__file__).parents[1] / "golden"
HOSTILE = ['<script>alert(1)</script> & "quotes"', "שלום עולם", "Z̸͓̙͌a̶l̵g̷o̴", "\u202eevil\u202c", "👩‍👩‍👧‍👦"]


@pytest.fixture(scope="module", params=["run-1", "run-2-rnn", "run-3"])
def golden(request: pytest.FixtureRequest) -> Translator:
    translator = dragoman.load(GOLDEN / request.param, device="cpu")
    assert isinstance(translator, Translator)
    return translator


def read_sources(translator: Translator) -> list[str]:
    answers = json.loads((Path(translator.run) / "answers.json").read_text(encoding="utf-8"))
    return [answer["source"] for answer in answers if answer["source"]]


def test_it_shows_the_translation_and_its_probabilities(golden: Translator) -> None:
    for source in read_sources(golden)[:3]:
        [hypothesis] = golden.translate([source])
        inspection = inspect(golden, source)
        assert inspection.target == hypothesis.text
        assert list(inspection.tokens["target"][:-1]) == hypothesis.tokens
        assert sum(prediction.logp for prediction in inspection.predictions) == pytest.approx(hypothesis.logp, abs=1e-3)
        for prediction in inspection.predictions:
            most_probable, probability = prediction.top[0]
            assert (prediction.rank == 1) == (most_probable == prediction.token)
            assert math.exp(prediction.logp) <= probability + 1e-6


def test_it_examines_a_given_target(golden: Translator) -> None:
    source, other = read_sources(golden)[:2]
    [given] = golden.score([source], [other])
    inspection = inspect(golden, source, target=other)
    assert inspection.is_given
    assert [prediction.logp for prediction in inspection.predictions] == pytest.approx(given.token_logps, abs=1e-4)
    assert any(prediction.rank > 1 for prediction in inspection.predictions)


def test_the_layer_of_the_alignment_has_the_alignment(golden: Translator) -> None:
    source = read_sources(golden)[0]
    [hypothesis] = golden.translate([source])
    [cross] = [attention for attention in inspect(golden, source).attentions if attention.name == "cross"]
    assert cross.best_layer is not None
    weight_TS = cross.weight_LHQK[cross.best_layer].mean(0)[: len(hypothesis.tokens), :-1]
    expected_TS = weight_TS / weight_TS.sum(-1, keepdims=True)  # an alignment leaves out EOS
    np.testing.assert_allclose(np.array(hypothesis.alignment), expected_TS, atol=1e-4)


def test_a_prefix_is_continued(golden: Translator) -> None:
    [hypothesis] = golden.translate([source := read_sources(golden)[0]])
    first = hypothesis.text.split()[0]
    assert inspect(golden, source, prefix=first).target.startswith(first)


def test_a_classifier_shows_its_label() -> None:
    classifier = dragoman.load(GOLDEN / "run-2-classifier", device="cpu")
    assert isinstance(classifier, Classifier)
    text = json.loads((GOLDEN / "run-2-classifier/answers.json").read_text(encoding="utf-8"))[0]["source"]
    [verdict] = classifier.classify([text])
    inspection = inspect(classifier, text)
    [prediction] = inspection.predictions
    assert inspection.target == verdict.label
    assert dict(prediction.top) == pytest.approx(verdict.probabilities, abs=1e-4)
    other = min(verdict.probabilities, key=verdict.probabilities.__getitem__)
    [prediction] = inspect(classifier, text, target=other).predictions
    assert math.exp(prediction.logp) == pytest.approx(verdict.probabilities[other], abs=1e-4)
    with pytest.raises(UserError, match="the model has no label 'nonsense'; its labels are"):
        inspect(classifier, text, target="nonsense")


@pytest.mark.parametrize("documents", ["file", "line"])
def test_a_language_model_shows_every_token(tmp_path: Path, documents: str) -> None:
    run = train_quietly(lm_recipe(tmp_path, documents=documents), tmp_path / "run", "train.steps=20")
    generator = dragoman.load(run, device="cpu")
    assert isinstance(generator, Generator)
    inspection = inspect(generator, "abcab")
    assert [prediction.token for prediction in inspection.predictions[:-1]] == list("abcab")
    loss = -sum(prediction.logp for prediction in inspection.predictions) / len(inspection.predictions)
    if documents == "line":
        assert loss == pytest.approx(generator.measure(["abcab"]).loss, abs=1e-4)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_becomes_a_page(toy: Toy, text: str) -> None:
    page = inspect(toy.translator, text).to_html()
    assert "<script>alert" not in page


def test_a_long_text_is_shown_in_parts(toy: Toy) -> None:
    text = "ba del fo. " * 500
    first, second = (inspect(toy.translator, text, part=part) for part in (1, 2))
    [note, *_] = first.notes
    assert "this is part 1 of" in note
    assert len(first.source) < len(text)
    assert second.source
    with pytest.raises(UserError, match="there is no part 100000"):
        inspect(toy.translator, text, part=100_000)


def test_what_cannot_be_inspected_is_refused(toy: Toy) -> None:
    for text, options, message in (
        (" ", {}, "there is nothing to inspect"),
        ("ba del.", {"target": "x", "prefix": "y"}, "exclude each other"),
        ("ba del. " * 2000, {"target": "x"}, "a target cannot be examined"),
    ):
        with pytest.raises(UserError, match=message):
            inspect(toy.translator, text, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="an ensemble cannot be inspected"):
        inspect(dragoman.load([toy.run, toy.run]), "ba del.")


def test_tags_are_source_tokens(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    corpora = "[{phrasebook: 200, tag: de}, {phrasebook: 200, reverse: true, tag: en}]"
    recipe.write_text(
        f"data: {{train: {corpora}, cache: {tmp_path}}}\n"
        "tokenizer: {size: 400}\n"
        "model: {kind: transformer, width: 16, heads: 2, layers: 1}\n"
        "train: {steps: 2, tokens: 512, device: cpu}\n"
        "search: {max_ratio: 0.5}\n"
    )
    translator = dragoman.load(train_quietly(recipe, tmp_path / "run"), device="cpu")
    assert inspect(translator, "The dog barks.", tag="de").tokens["source"][0] == "<de>"
    pairs = [Pair("The dog barks.", "Der Hund bellt.", tag="de")]
    examples, _ = encode_pairs(translator, pairs)
    assert find_top_activations(translator, examples)


def test_the_command_writes_page_figures_and_data(toy: Toy, call: Call, tmp_path: Path) -> None:
    page, figures = tmp_path / "page.html", tmp_path / "figures"
    result = call("inspect", toy.run, "ba del fo.", "--out", page, "--png", figures, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["target"] == toy.translator.translate(["ba del fo."])[0].text
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.read_bytes()[:4] for path in figures.iterdir()] == [b"\x89PNG"] * len(list(figures.iterdir()))
    assert list(figures.iterdir())
    for arguments, message in (
        (("ba", "del"), "inspect takes one sentence, not 2"),
        (("ba", "--out", tmp_path), "it is a folder; name a file"),
        (("ba", "--png", page), "is a file; name a folder for the figures"),
        (("--training", "--tag", "x"), "--tag belongs to the files"),
        (("--heads", "--training"), "exclude each other"),
        (("ba", "--heads"), "--heads shows a model"),
        (("ba", "--ablate"), "belong to --heads"),
    ):
        refused = call("inspect", toy.run, *arguments)
        assert (refused.code, message in refused.err) == (2, True), refused.err
