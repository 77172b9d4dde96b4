"""Tests of `dragoman settings`: its output is a valid recipe, and its choices are the entries of the registries."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from dragoman.cli.settings import build_reference, collect_registries, describe_recipe
from dragoman.config.reference import find_settings, load_settings_reference, render_settings
from dragoman.config.settings import parse_settings, parse_yaml
from dragoman.errors import UserError
from dragoman.recipe import Recipe, check_model, list_model_kinds
from dragoman.training.start import check_settings
from toy_run import Call, assert_user_error

KINDS = [(kind, backbone) for kind, backbones in list_model_kinds().items() for backbone in backbones]


def model_section(kind: str, backbone: str) -> dict[str, Any]:
    return {"kind": kind, **({"backbone": backbone} if backbone else {})}


def recipe_of(kind: str, backbone: str) -> Recipe:
    return check_model(parse_settings(Recipe, {"model": model_section(kind, backbone)}))


def show_settings(words: Sequence[str] = (), overrides: Sequence[str] = ()) -> str:
    """Return what `dragoman settings` prints, from the settings classes instead of settings.json."""
    reference, kind = describe_recipe(overrides)
    return render_settings(find_settings(reference, kind, words), kind)


@pytest.mark.parametrize(("kind", "backbone"), KINDS)
def test_the_output_is_a_recipe_of_defaults(kind: str, backbone: str) -> None:
    text = show_settings(overrides=[f"model.{name}={word}" for name, word in model_section(kind, backbone).items()])
    assert check_model(parse_settings(Recipe, parse_yaml(text, "the settings"))) == recipe_of(kind, backbone)


CHOICES = [
    (*kind, section, name)
    for kind in KINDS
    for section, some in collect_registries(recipe_of(*kind)).items()
    for name in some
    if name != "metrics"  # a list of names
]


@pytest.mark.parametrize(("kind", "backbone", "section", "name"), CHOICES)
def test_choices_are_the_names_in_the_message_about_an_unknown_name(
    kind: str, backbone: str, section: str, name: str
) -> None:
    """The message lists the same names as the reference."""
    recipe = recipe_of(kind, backbone)
    registry = collect_registries(recipe)[section][name]
    shown = re.search(rf"^  {name}: .*?  # (\S+( \| \S+)*?)(;|$)", show_settings([section], overrides_of(recipe)), re.M)
    assert (shown[1].split(" | ") if shown else []) == list(registry)
    values = recipe.model_dump(mode="json")
    values["tokenizer"]["kind"] = "word"  # which all kinds of models can use
    values[section] = {**values[section], name: "nonsense"}
    values["tokenizer"]["joint"] = False  # so that there may be two kinds
    values["data"]["train"] = {"phrasebook": 10}
    with pytest.raises(UserError, match="'nonsense'") as caught:
        check_settings(check_model(parse_settings(Recipe, values)))
    listed = re.search(r"\(there are: (.*)\)", str(caught.value))
    assert listed
    assert listed[1].split(", ") == list(registry)


@pytest.mark.parametrize(("kind", "backbone"), KINDS)
def test_every_name_in_a_model_section_has_a_registry(kind: str, backbone: str) -> None:
    record = type(recipe_of(kind, backbone).model)
    assert {name for name, field in record.model_fields.items() if field.annotation is str} == set(record.registries())


def overrides_of(recipe: Recipe) -> list[str]:
    return [f"model.{name}={value}" for name, value in recipe.model.model_dump(include={"kind", "backbone"}).items()]


def test_comments_have_choices_and_descriptions() -> None:
    lines = show_settings().splitlines()
    for words in (
        r"  norm: layer +# layer \| .*; normalization",
        r"  tied: true +# one matrix for target",
        r"  precision: auto +# auto \| float32 \| bf16; ",
        r"  compile: auto +# auto \| true \| false",
        r"  warmup: 1000 +# steps of learning-rate warmup$",
        r"  #   columns: \[0, 1\] +# TSV columns",
    ):
        assert sum(bool(re.match(words, line)) for line in lines) == 1, words


def test_every_setting_has_a_description() -> None:
    rows = [row for settings in build_reference().values() for row in settings if row.name not in ("kind", "backbone")]
    assert [row.path for row in rows if not row.description] == []


def test_sections() -> None:
    assert parse_yaml(show_settings(["train", "search"]), "the settings").keys() == {"train", "search"}
    with pytest.raises(UserError, match="contains 'trian'; did you mean 'train'"):
        show_settings(["trian"])
    with pytest.raises(UserError, match=r"model\.kind called 'transfromer'"):
        show_settings(["model"], ["model.kind=transfromer"])


def test_on_the_command_line(call: Call) -> None:
    answer = call("settings", "model", "model.kind=lm", "model.backbone=rnn")
    assert answer.code == 0
    assert answer.out == show_settings(["model"], ["model.kind=lm", "model.backbone=rnn"])
    assert_user_error(call("settings", "modle"), "did you mean 'model'")


def test_the_reference_is_up_to_date() -> None:
    """If this fails, run `python -m dragoman.cli.settings`."""
    assert load_settings_reference() == build_reference()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["train.minutes"], {"train.minutes"}),
        (["beam"], {"search.beam"}),
        (["seed"], {"train.seed", "search.seed", "data.train.seed"}),
        (["learning_rate"], {"train.lr"}),
        (["steps", "batch_size"], {"train.steps", "train.tokens"}),
        (["rotary"], {"model.position"}),
        (["cell"], {"model.cell"}),
        (["columns"], {"data.train.columns"}),
        (["distortion_limit"], {"model.decoder.distortion_limit"}),
        (["model.align.ibm1"], {"model.align.ibm1"}),
    ],
)
def test_a_word_finds_settings(call: Call, words: list[str], names: set[str]) -> None:
    answer = call("settings", *words, "--json")
    assert answer.code == 0
    assert {json.loads(line)["name"] for line in answer.out.splitlines()} == names
    shown = call("settings", *words).out
    assert all(f" {name.rpartition('.')[2]}: " in shown for name in names)


def test_a_word_is_found_in_descriptions(call: Call) -> None:
    found = [json.loads(line) for line in call("settings", "padding", "--json").out.splitlines()]
    assert found
    assert all("padding" in each["description"] for each in found)


def test_settings_of_another_kind_of_model_follow_its_name(call: Call) -> None:
    assert call("settings", "pool").out.startswith("# with model.kind=classifier")


def test_a_name_with_other_choices_in_another_kind_of_model_finds_both(call: Call) -> None:
    own, _, other = call("settings", "attention").out.partition("# with model.kind=rnn:")
    assert "  attention: full" in own
    assert "  attention: additive" in other


@pytest.mark.parametrize(
    "overrides", [[], ["model.kind=rnn"], ["model.kind=smt"], ["model.kind=lm", "model.backbone=rnn"]]
)
def test_the_command_prints_the_settings_of_the_classes(call: Call, overrides: list[str]) -> None:
    assert call("settings", *overrides).out == show_settings((), overrides)
    assert call("settings", *overrides, "train.steps=7").out == show_settings((), [*overrides, "train.steps=7"])
