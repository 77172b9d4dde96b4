"""A Transformer encoder with a recurrent decoder. The laws of all models are in test_model_contract.py."""

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

MENUS: dict[str, Iterable[str]] = {"cell": CELLS, "score": SCORES}


def model_of(**given: Any) -> Hybrid:
    whole = check_model(Recipe.model_validate({"model": {**SMALL_HYBRID, **given}}))
    model = build_model(whole.model, source_size=VOCABULARY, target_size=VOCABULARY, joint=whole.tokenizer.joint)
    assert isinstance(model, Hybrid)
    return model.double().eval()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("decoder_width", [0, 6])
def test_every_token_looks_at_its_own_source_and_all_of_it(score: str, decoder_width: int) -> None:
    model, examples = model_of(score=score, decoder_width=decoder_width), make_examples(SMALL_HYBRID)
    batch = collate_rows(SMALL_HYBRID, [[item] for item in range(6)], examples, spare=3)
    look_BTS = model.alignment(batch)
    padding_BTS = (batch.source_segment_BS == 0)[:, None].expand_as(look_BTS)
    assert_same(look_BTS.sum(-1), torch.ones_like(look_BTS[..., 0]))
    assert not look_BTS[padding_BTS].any()


def test_the_decoder_starts_from_the_mean_of_what_was_read() -> None:
    """Of real tokens alone; a row without any gives zeros, not NaN."""
    model, examples = model_of(), make_examples(SMALL_HYBRID, 2)
    batch = collate_rows(SMALL_HYBRID, [[0], [1], []], examples, spare=4)
    memory_BSC, mean_BC = model.encoder.encode(batch.source_BS, RowLayout.from_source(batch))
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
def test_tables_are_one_where_their_widths_are(given: dict[str, Any], tables: int) -> None:
    model = model_of(**given)
    matrices = (model.encoder.embedding.weight, model.decoder.embedding.weight, model.project.weight)
    assert len({id(matrix) for matrix in matrices}) == tables


def test_the_decoder_is_one_cell_unless_more_are_asked_for() -> None:
    """However deep the encoder is."""
    depths = [
        (len(model.encoder.layers), len(model.decoder.stack.cells))
        for model in (model_of(layers=3), model_of(encoder_layers=4), model_of(decoder_layers=2))
    ]
    assert depths == [(3, 1), (4, 1), (2, 2)]


@pytest.mark.parametrize("setting", MENUS)
def test_an_unknown_name_is_answered_with_the_menu(setting: str) -> None:
    first = next(iter(MENUS[setting]))
    with pytest.raises(UserError) as caught:
        settings_of({"kind": "hybrid", setting: first + "x"})
    assert f"there is no model.{setting} called {first + 'x'!r}; did you mean {first!r}?" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decoder_attention": "local"}, r"model\.decoder_attention has no use in a hybrid"),
        ({"score": "dot", "score_width": 5}, r"model\.score_width has no use in model\.score=dot"),
        ({"decoder_layers": 0}, r"model\.decoder_layers: should be greater than or equal to 1"),
        ({"width": 10, "heads": 4}, r"model\.width must be a multiple of model\.heads"),
        ({"bidirectional": True}, r"there is no setting 'model\.bidirectional'"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        settings_of({"kind": "hybrid", **given})


def test_it_is_a_kind_of_model() -> None:
    assert settings_of({"kind": "hybrid"}).layout == "padded"
    assert HybridSettings(width=64, decoder_width=32).make_decoder_settings().width == 32
    with pytest.raises(UserError, match=r"train\.compile=true is of no use to recurrent models"):
        check_settings(check_model(Recipe.model_validate({"model": {"kind": "hybrid"}, "train": {"compile": True}})))


def test_it_learns_a_language(tmp_path: Path) -> None:
    """Through files, training, a run folder and search: most of what it never saw comes out right."""
    write_corpus(tmp_path, train=400)
    path = write_recipe(tmp_path / "recipe.yaml")
    whole = yaml.safe_load(path.read_text())
    sizes = {"layers": 1, "width": 64, "heads": 4, "decoder_width": 48, "embedding_width": 32}
    model = {"kind": "hybrid", "cell": "gru", "dropout": 0.0, **sizes}
    path.write_text(yaml.safe_dump({**whole, "model": model}))
    run = train_quietly(path, tmp_path / "run", "train.steps=250", "train.validate_every=0")
    new = make_sentences(30, seed=77)
    found = load_as(Translator, run).translate(new)
    right = sum(one.text == translate_toy(text) for one, text in zip(found, new, strict=True))
    assert right >= 20
    assert all(abs(sum(row) - 1) < 1e-4 for one in found for row in one.alignment)
