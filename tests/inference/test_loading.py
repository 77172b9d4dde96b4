"""Which door a run opens: the one of its task, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.errors import UserError
from dragoman.inference.engines import ctranslate2
from dragoman.inference.loading import PREDICTORS, load_as, open_run
from dragoman.models.registry import MODEL_KINDS
from toy_heads import classifier_recipe, lm_recipe
from toy_run import SMALL, train_quietly, write_corpus, write_recipe


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of every task, hardly trained."""
    folder = tmp_path_factory.mktemp("doors")
    write_corpus(folder)
    recipes = {
        "translate": write_recipe(folder / "recipe.yaml", **SMALL),
        "generate": lm_recipe(folder),
        "classify": classifier_recipe(folder),
    }
    return {
        task: train_quietly(recipe, folder / task, "train.steps=1", "data.dev=[]") for task, recipe in recipes.items()
    }


def test_a_run_does_not_choose_where_files_are_written(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are converted into the cache of the user, whatever the run folder's data.cache names."""
    caches: list[Path] = []

    def convert_cached(_run: object, cache: Path, _quantization: str) -> Path:
        caches.append(cache)
        raise UserError("not converted")

    monkeypatch.setattr(ctranslate2, "convert_cached", convert_cached)
    with pytest.raises(UserError, match="not converted"):
        dragoman.load(runs["translate"], device="cpu", engine="ctranslate2")
    assert caches == [tmp_path / "home" / ".cache" / "dragoman"]


def test_every_task_of_a_model_has_a_door() -> None:
    assert {kind.task for backbones in MODEL_KINDS.values() for kind in backbones.values()} == set(PREDICTORS)


@pytest.mark.parametrize("task", PREDICTORS)
def test_a_run_opens_the_door_of_its_task(runs: dict[str, Path], task: str) -> None:
    found = dragoman.load(runs[task], device="cpu")
    assert type(found) is PREDICTORS[task]
    assert callable(getattr(found, task))
    assert open_run(runs[task], device="cpu").recipe == found.recipe
    predictors: dict[str, Any] = {**PREDICTORS}
    for name, predictor in predictors.items():
        if name == task:
            assert type(load_as(predictor, runs[task], device="cpu")) is predictor
        else:
            with pytest.raises(UserError, match=f"was trained to {task}; use dragoman {task}"):
                load_as(predictor, runs[task], device="cpu")


def test_a_run_may_begin_with_another_of_its_task(runs: dict[str, Path], tmp_path: Path) -> None:
    for task in ("generate", "classify"):
        recipe = lm_recipe(tmp_path) if task == "generate" else classifier_recipe(tmp_path)
        run = train_quietly(recipe, tmp_path / task, "train.steps=1", "data.dev=[]", init_from=runs[task])
        assert open_run(run, device="cpu").tokenizers.fingerprint() == (
            open_run(runs[task], device="cpu").tokenizers.fingerprint()
        )
