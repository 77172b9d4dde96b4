"""Runs of copying models: they write names that no training pair contains, and all commands agree on probabilities."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import yaml

from dragoman import export, inspect
from dragoman.errors import UserError
from dragoman.inference.loading import load, load_as
from dragoman.inference.translator import Translator
from dragoman.types import Hypothesis
from toy_run import train_quietly, write_lines

QUESTIONS = {  # question -> query
    "where is {} ?": 'place( "{}" )',
    "how big is {} ?": 'size( "{}" )',
    "which river is near {} ?": 'near( river , "{}" )',
    "how far is {} from {} ?": 'distance( "{}" , "{}" )',
}
MODELS: dict[str, dict[str, object]] = {
    "rnn": {"kind": "rnn", "width": 48, "dropout": 0.1},
    "transformer": {"layers": 1, "width": 48, "heads": 2, "dropout": 0.1},
}


def make_pairs(count: int, names: list[str], seed: int) -> list[tuple[str, str]]:
    random, pairs = Random(seed), []
    for _ in range(count):
        question, query = random.choice(list(QUESTIONS.items()))
        used = random.sample(names, 2)
        pairs.append((question.format(*used), query.format(*used)))
    return pairs


def make_names(count: int, first_letter: str) -> list[str]:
    random = Random(first_letter)
    return [first_letter + "".join(random.choices("abcdefgh", k=6)) for _ in range(count)]


TRAIN = make_pairs(400, make_names(60, "x"), seed=1)
TEST = make_pairs(40, make_names(30, "y"), seed=2)


def train_run(folder: Path, model: dict[str, object], *, copying: bool) -> Path:
    for name, pairs in (("train", TRAIN), ("dev", TRAIN[:5])):
        write_lines(folder / f"{name}.src", [source for source, _ in pairs])
        write_lines(folder / f"{name}.trg", [target for _, target in pairs])
    recipe = {
        "data": {
            "train": {"source": "train.src", "target": "train.trg"}, "cache": str(folder / "cache"),
            "dev": {"source": "dev.src", "target": "dev.trg"},
        },
        "tokenizer": {"kind": "code"},
        "model": {**model, "copying": copying},
        "train": {
            "device": "cpu", "threads": 1, "precision": "float32", "tokens": 512, "steps": 200, "lr": 5e-3,
            "warmup": 20, "schedule": "cosine", "validate_every": 200, **({"mask_copied": 0.3} if copying else {}),
        },
        "search": {"unknown": "copy"},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return train_quietly(folder / "recipe.yaml", folder / f"run-{copying}")


def count_right(run: Path) -> int:
    found = load_as(Translator, run, device="cpu").translate([source for source, _ in TEST])
    return sum(one.text == target for one, (_, target) in zip(found, TEST, strict=True))


@pytest.fixture(scope="module", params=MODELS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp(request.param), MODELS[request.param], copying=True)


def test_names_that_are_in_no_training_pair_are_copied(run: Path) -> None:
    assert count_right(run) >= 0.9 * len(TEST)


def test_without_copying_unknown_names_are_mostly_wrong(tmp_path: Path) -> None:
    assert count_right(train_run(tmp_path, MODELS["rnn"], copying=False)) < 0.3 * len(TEST)


def check_scores(translator: Translator, source: str, hypotheses: list[Hypothesis]) -> None:
    """Assert that scoring agrees with the search, except for texts with <unk>, which are scored as other tokens."""
    for one in hypotheses:
        if any("<unk>" in token for token in one.tokens):
            continue
        assert translator.score([source], [one.text])[0].logp == pytest.approx(one.logp, abs=1e-3)


def test_search_scoring_and_inspection_have_the_same_probabilities(run: Path) -> None:
    translator, source = load_as(Translator, run, device="cpu"), TRAIN[0][0]
    for search in ({"beam": 4, "nbest": 3}, {"method": "greedy"}, {"method": "sample", "temperature": 1.0}):
        [hypotheses] = translator.nbest([source], search=search)
        check_scores(translator, source, hypotheses)
    inspection = inspect(translator, source, target=TRAIN[0][1])
    logp = translator.score([source], [TRAIN[0][1]])[0].logp
    assert sum(prediction.logp for prediction in inspection.predictions) == pytest.approx(logp, abs=1e-3)


def test_an_ensemble_and_other_precisions_copy_too(run: Path) -> None:
    sources = [source for source, _ in TEST]
    expected = [one.text for one in load_as(Translator, run, device="cpu").translate(sources)]
    both = load([run, run], device="cpu")
    assert isinstance(both, Translator)
    assert [one.text for one in both.translate(sources)] == expected
    check_scores(both, TRAIN[0][0], both.translate([TRAIN[0][0]]))
    quantized = load_as(Translator, run, device="cpu", engine="torch-int8").translate(sources)
    same = sum(one.text == text for one, text in zip(quantized, expected, strict=True))
    assert same >= 0.9 * len(expected)


@pytest.mark.parametrize("library", ["ctranslate2", "huggingface", "onnx"])
def test_no_other_library_can_copy(library: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.(copying=true|kind=rnn) cannot be exported"):
        export(run, to=library, out=tmp_path / "out")
