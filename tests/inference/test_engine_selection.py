"""Engines by name; `auto` depends on nothing but its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dragoman.errors import UserError
from dragoman.inference import loading
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.ctranslate2 import CTranslate2Engine
from dragoman.inference.engines.torch import TorchEngine
from dragoman.inference.loading import ENGINES, EnsembleModel
from toy_exchange import loaded_run, model_of
from toy_models import Section
from toy_run import Call, Toy


def make_engine(name: str, cache: Path, section: Section | None = None) -> Engine:
    return ENGINES[name](loaded_run(model_of(section or {})), cache)


def test_asked_for_by_name(tmp_path: Path) -> None:
    for name, kind in {"auto": TorchEngine, "torch": TorchEngine, "ctranslate2": CTranslate2Engine}.items():
        assert type(make_engine(name, tmp_path)) is kind
    with pytest.raises(UserError, match="norm=scale cannot be exported to CTranslate2"):
        make_engine("ctranslate2", tmp_path, {"norm": "scale"})
    several = replace(loaded_run(model_of({})), model=EnsembleModel([model_of({}), model_of({})]))
    with pytest.raises(UserError, match="an ensemble cannot be exported to CTranslate2"):
        ENGINES["ctranslate2"](several, tmp_path)


def test_an_unknown_engine_is_named(toy: Toy) -> None:
    with pytest.raises(UserError, match="there is no engine called 'torhc'; did you mean 'torch'"):
        loading.load(toy.run, engine="torhc")


def test_auto_is_full_precision_whatever_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "CTranslate2Engine", None)
    assert ENGINES["auto"] is ENGINES["torch"]
    make_engine("auto", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_spoilt_conversion_says_what_to_do(tmp_path: Path) -> None:
    make_engine("ctranslate2", tmp_path)
    (spoilt,) = tmp_path.glob("ctranslate2-*/model.bin")
    spoilt.write_bytes(spoilt.read_bytes()[:1000])
    with pytest.raises(UserError, match="remove it to convert the model again, or use --engine torch"):
        make_engine("ctranslate2", tmp_path)


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_the_default_engine_is_not_announced(toy: Toy, call: Call, engine: str, tmp_path: Path) -> None:
    terms = tmp_path / "terms.tsv"
    terms.write_text("zebra\tZebra\n")
    for extra in ([], ["--glossary", terms]):
        said = call("translate", toy.run, "--engine", engine, *extra, stdin=b"ba del fo.\n")
        assert (said.code, said.err) == (0, "")
