"""For names that other toolkits use, messages suggest the names in Dragoman."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dragoman.config.settings import SETTING_SYNONYMS, VALUE_SYNONYMS, get_entry, parse_settings
from dragoman.data.corpus import CorpusSettings
from dragoman.data.tokenizers import TOKENIZERS
from dragoman.errors import UserError
from dragoman.inference.export import EXPORT_FORMATS
from dragoman.inference.loading import ENGINES
from dragoman.modules.attention_scores import SCORES
from dragoman.modules.positions import POSITIONS
from dragoman.recipe import Recipe, list_model_kinds
from dragoman.training.optim import OPTIMIZERS, SCHEDULES
from toy_sections import settings_of

REGISTRIES: list[Mapping[str, Any]] = [
    list_model_kinds(), TOKENIZERS, OPTIMIZERS, SCHEDULES, SCORES, POSITIONS, ENGINES, EXPORT_FORMATS,
]  # fmt: skip


def list_settings(section: str) -> set[str]:
    """Return the settings of a section; for the model, those of all kinds."""
    if section == "model":
        return {name for kinds in list_model_kinds().values() for kind in kinds.values() for name in kind.model_fields}
    return set(type(getattr(Recipe(), section)).model_fields) if section else set(CorpusSettings.model_fields)


@pytest.mark.parametrize("target", sorted(set(SETTING_SYNONYMS.values())))
def test_a_synonym_leads_to_a_setting(target: str) -> None:
    section, _, name = target.rpartition(".")
    assert name in list_settings(section)


@pytest.mark.parametrize("name", VALUE_SYNONYMS)
def test_a_synonym_of_a_value_leads_to_a_registry(name: str) -> None:
    target = VALUE_SYNONYMS[name]
    assert any(target in registry for registry in REGISTRIES)
    for registry in REGISTRIES:
        if target in registry and name not in registry:
            with pytest.raises(UserError, match=f"did you mean '{target}'"):
                get_entry(registry, name, "entry")


@pytest.mark.parametrize("name", [name for name, target in SETTING_SYNONYMS.items() if "." in target])
def test_a_synonym_is_recognized_in_its_section_in_others_and_at_the_top_level(name: str) -> None:
    target = SETTING_SYNONYMS[name]
    section = target.partition(".")[0]
    others = ("search", "train", "data")  # a name may be a synonym in one section and a setting of another one
    other = next(other for other in others if other != section and name not in list_settings(other))
    values: list[dict[str, Any]] = [{name: 1}, {other: {name: 1}}]
    if section != "model" and f"{section}.{name}" != target:
        values.append({section: {name: 1}})
    for each in values:
        with pytest.raises(UserError, match=f"; did you mean '{target}'\\?"):
            parse_settings(Recipe, each)


@pytest.mark.parametrize(
    ("model", "suggested"),
    [
        ({"hidden_size": 64}, "model.width"),
        ({"vocab_size": 64}, "tokenizer.size"),
        ({"lr": 64}, "train.lr"),
        ({"kind": "rnn", "hidden_size": 64}, "model.width"),
        ({"kind": "rnn", "num_layers": 64}, "model.layers"),
        ({"kind": "lm", "block_size": 64}, "model.context"),
    ],
)
def test_synonyms_in_a_model_section(model: dict[str, Any], suggested: str) -> None:
    with pytest.raises(UserError, match=f"did you mean '{suggested}'"):
        settings_of(model)


def test_settings_of_other_kinds_of_model_are_not_suggested() -> None:
    with pytest.raises(UserError, match=r"no setting 'model.num_heads'") as caught:
        settings_of({"kind": "rnn", "num_heads": 8})
    assert "model.heads" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [("lr", "'train.lr'"), ("seed", "'train.seed' or 'search.seed'"), ("joint", "'tokenizer.joint'")],
)
def test_a_setting_of_another_section_is_found(name: str, suggested: str) -> None:
    for values in ({name: 1}, {"data": {name: 1}}):
        with pytest.raises(UserError, match=f"did you mean {suggested}\\?"):
            parse_settings(Recipe, values)


def test_synonyms_of_source_and_target_of_a_corpus() -> None:
    with pytest.raises(UserError, match=r"'data.train.0.src'; did you mean 'source'"):
        parse_settings(Recipe, {"data": {"train": {"src": "a", "target": "b"}}})


def test_the_message_names_an_unknown_kind_of_model_once() -> None:
    with pytest.raises(UserError) as caught:
        settings_of({"kind": "bort"})
    assert str(caught.value).startswith("there is no model.kind called 'bort'")
