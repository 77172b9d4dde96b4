"""Models with a limited number of positions: longer inputs are truncated, and recipes that need more are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dragoman.config.settings import parse_settings
from dragoman.errors import UserError
from dragoman.inference.loading import load
from dragoman.inference.translator import Translator
from dragoman.recipe import Recipe, check_model
from dragoman.types import EOS, Line
from toy_run import SMALL, train_quietly, write_corpus, write_recipe
from toy_sections import settings_of

BOUNDED: list[dict[str, object]] = [{"position": "learned"}, {"attention": "linformer", "rank": 4}]
EVERY = pytest.mark.parametrize("bounded", BOUNDED, ids=str)


@EVERY
def test_recipe_with_too_few_positions_is_refused(bounded: dict[str, object]) -> None:
    def recipe(longest: int) -> Recipe:
        return parse_settings(Recipe, {"data": {"max_length": longest}, "model": {**bounded, "max_length": 100}})

    assert check_model(recipe(99)).model.max_length == 100
    with pytest.raises(UserError, match=r"data\.max_length=100 .* model\.max_length=100"):
        check_model(recipe(100))


def test_other_models_have_unlimited_positions() -> None:
    for model in ({"kind": "transformer"}, {"position": "rotary", "attention": "bigbird"}, {"kind": "rnn"}):
        assert settings_of(model).length_limit is None


@EVERY
def test_long_lines_are_truncated(bounded: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test sources of every length around the limit, translations without EOS, and their alignments."""
    write_corpus(tmp_path, train=40, dev=4)
    model = {**SMALL["model"], **bounded, "max_length": 21}
    sizes = {"steps": 2, "validate_every": 0, "validate_lines": 0, "warmup": 1}
    recipe = write_recipe(
        tmp_path / "recipe.yaml", data={"max_length": 20}, model=model, train={**SMALL["train"], **sizes}
    )
    translator = load(train_quietly(recipe, tmp_path / "run"), device="cpu")
    assert isinstance(translator, Translator)
    lines = [" ".join(["ba"] * count) for count in (1, 5, 10, 15, 18, 19, 20, 21, 22, 40, 600)] + ["q" * 300]
    pieces = [piece for line in lines for piece in translator.split_line(Line(line))]
    assert max(len(piece.ids) for piece in pieces) <= 20
    step = translator.model.step

    def endless(token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        logp_NV, state = step(token_N, state)
        logp_NV[:, EOS] = -1e9
        return logp_NV, state

    monkeypatch.setattr(translator.model, "step", endless)
    for beam in (1, 3):
        found = translator.translate(lines, beam=beam)
        assert any("model.max_length allows" in warning for one in found for warning in one.warnings)
