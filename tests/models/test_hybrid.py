"""A Transformer encoder with a recurrent decoder. Tests of all kinds of model are in test_model_contract.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dragoman.errors import UserError
from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.kernels.attention import RowLayout
from dragoman.models.registry import build_model
from dragoman.models.rnn import Hybrid, HybridSettings
from dragoman.modules.attention_scores import SCORES
from dragoman.modules.recurrent import CELLS
from dragoman.recipe import Recipe, check_model
from dragoman.training.start import check_settings
from tolerance import assert_same
from toy_batch import VOCABULARY
from toy_models import SMALL_HYBRID, collate_rows, make_examples
from toy_run import make_sentences, train_quietly, translate_toy, write_corpus, write_recipe
from toy_sections import settings_of

REGISTRIES: dict[str, Iterable[str]] = {"cell": CELLS, "score": SCORES}


def build_hybrid(**given: Any) -> Hybrid:
    recipe = check_model(Recipe.model_validate({"model": {**SMALL_HYBRID, **given}}))
    model = build_model(
        recipe.neural_model, source_size=VOCABULARY, target_size=VOCABULARY, joint=recipe.tokenizer.joint
    )
    assert isinstance(model, Hybrid)
    return model.double().eval()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("decoder_width", [0, 6])
def test_attention_covers_exactly_the_source_of_each_sentence(score: str, decoder_width: int) -> None:
    model, examples = build_hybrid(score=score, decoder_width=decoder_width), make_examples(SMALL_HYBRID)
    batch = collate_rows(SMALL_HYBRID, [[item] for item in range(6)], examples, spare=3)
    weight_BTS = model.compute_alignment(batch)
    padding_BTS = (batch.source_segment_BS == 0)[:, None].expand_as(weight_BTS)
    assert_same(weight_BTS.sum(-1), torch.ones_like(weight_BTS[..., 0]))
    assert not weight_BTS[padding_BTS].any()


def test_the_decoder_starts_from_the_mean_of_the_encoder_states() -> None:
    """Padding is ignored. A row without tokens gives zeros, not NaN."""
    model, examples = build_hybrid(), make_examples(SMALL_HYBRID, 2)
    batch = collate_rows(SMALL_HYBRID, [[0], [1], []], examples, spare=4)
    memory_BSC, [(mean_BC,)] = model.encoder.encode(batch.source_BS, RowLayout.from_source(batch))
    for row, example in enumerate(examples):
        assert_same(mean_BC[row], memory_BSC[row, : len(example.source) + 1].mean(0))
    assert not mean_BC[2].any()


@pytest.mark.parametrize(
    ("given", "tables"),
    [
        ({}, 1),
        ({"decoder_width": 6}, 1),
        ({"embedding_width": 6}, 2),
        ({"tied": False}, 3),
    ],
)
def test_embeddings_are_shared_if_their_widths_are_equal(given: dict[str, Any], tables: int) -> None:
    model = build_hybrid(**given)
    matrices = (model.encoder.embedding.weight, model.decoder.embedding.weight, model.project.weight)
    assert len({id(matrix) for matrix in matrices}) == tables


def test_the_decoder_has_one_layer_by_default() -> None:
    """The number of encoder layers does not matter."""
    depths = [
        (len(model.encoder.layers), len(model.decoder.stack.cells))
        for model in (build_hybrid(layers=3), build_hybrid(encoder_layers=4), build_hybrid(decoder_layers=2))
    ]
    assert depths == [(3, 1), (4, 1), (2, 2)]


@pytest.mark.parametrize("setting", REGISTRIES)
def test_an_unknown_name_is_refused_with_a_suggestion(setting: str) -> None:
    first = next(iter(REGISTRIES[setting]))
    with pytest.raises(UserError) as caught:
        settings_of({"kind": "hybrid", setting: first + "x"})
    assert f"there is no model.{setting} called {first + 'x'!r}; did you mean {first!r}?" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decoder_attention": "local"}, r"model\.decoder_attention has no use in a hybrid"),
        ({"score": "dot", "score_width": 5}, r"model\.score_width has no use in model\.score=dot"),
        ({"score": "none", "context_place": "input"}, r"model\.context_place=input needs attention to the source"),
        ({"decoder_layers": 0}, r"model\.decoder_layers: should be greater than or equal to 1"),
        ({"width": 10, "heads": 4}, r"model\.width must be a multiple of model\.heads"),
        ({"bidirectional": True}, r"there is no setting 'model\.bidirectional'"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings_of({"kind": "hybrid", **given})


def test_build_model_makes_a_hybrid() -> None:
    assert settings_of({"kind": "hybrid"}).layout == "padded"
    assert HybridSettings(width=64, decoder_width=32).make_decoder_settings().width == 32
    with pytest.raises(UserError, match=r"train\.compile=true is of no use to recurrent models"):
        check_settings(check_model(Recipe.model_validate({"model": {"kind": "hybrid"}, "train": {"compile": True}})))


def test_a_hybrid_learns_a_toy_language(tmp_path: Path) -> None:
    """Train on files, load the run folder and search: most unseen sentences are translated correctly."""
    write_corpus(tmp_path, train=400)
    path = write_recipe(tmp_path / "recipe.yaml")
    recipe = yaml.safe_load(path.read_text())
    sizes = {"layers": 1, "width": 64, "heads": 4, "decoder_width": 48, "embedding_width": 32}
    model = {"kind": "hybrid", "cell": "gru", "dropout": 0.0, **sizes}
    path.write_text(yaml.safe_dump({**recipe, "model": model}))
    run = train_quietly(path, tmp_path / "run", "train.steps=250", "train.validate_every=0")
    unseen = make_sentences(30, seed=77)
    found = load_as(Translator, run).translate(unseen)
    correct = sum(hypothesis.text == translate_toy(text) for hypothesis, text in zip(found, unseen, strict=True))
    assert correct >= 20
    assert all(abs(sum(row) - 1) < 1e-4 for hypothesis in found for row in hypothesis.alignment)
