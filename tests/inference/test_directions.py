"""Directions: those of a recipe, the choice between them, and the language codes that users give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.config.settings import parse_settings
from dragoman.errors import UserError
from dragoman.inference.directions import (
    Direction,
    choose_direction,
    describe_directions,
    list_directions,
)
from dragoman.language_codes import LANGUAGES
from dragoman.recipe import Recipe
from toy_run import (
    Call,
    Toy,
    assert_user_error,
    make_sentences,
    train_quietly,
    translate_toy,
    write_lines,
    write_recipe,
)


def directions_of(**data: object) -> list[str]:
    recipe = parse_settings(Recipe, {"data": data})
    return [f"{direction}{direction.tag and ' ' + direction.tag}" for direction in list_directions(recipe)]


def test_languages_are_named_by_settings_files_or_the_phrasebook() -> None:
    named = {"source": "a/train.en.gz", "target": "a/train.de"}
    plain = {"source": "a/train.src", "target": "a/train.trg"}
    assert directions_of(train=named) == ["en-de"]
    assert directions_of(train={**named, "reverse": True}) == ["de-en"]
    assert directions_of(train=named, both_ways=True) == ["en-de", "de-en"]
    assert directions_of(train=named, target_language="de-AT") == ["en-de-AT"]
    assert directions_of(train={"source": "train.eng.xz", "target": "train.pt_BR.zst"}) == ["en-pt-BR"]
    assert directions_of(train={"source": "train.modern.xz", "target": "train.original.xz"}) == ["?-?"]
    assert directions_of(train=plain) == ["?-?"]
    assert directions_of(train=plain, source_language="EN", target_language="por_br") == ["en-pt-BR"]
    assert directions_of(train={"phrasebook": 10}) == ["en-de"]
    assert directions_of(train={"phrasebook": 10}, direction="de-en") == ["de-en"]
    assert directions_of(train={"phrasebook": 10, "view": "simplify"}) == ["en-en"]
    assert list_directions(parse_settings(Recipe, {"data": {"train": {"text": "a"}}, "model": {"kind": "lm"}})) == ()


def test_tags_name_target_languages() -> None:
    tsv = {"tsv": "a.tsv"}
    many = [{**tsv, "tag": "de"}, {**tsv, "reverse": True, "tag": "en"}, {"tsv": "b.tsv", "tag": "fr formal"}]
    assert directions_of(train=many, source_language="en") == ["en-de de", "?-en en", "en-fr fr formal"]
    both = directions_of(train=many[:2], source_language="en", target_language="de")
    assert both == ["en-de de", "de-en en"]
    kinds = [{"phrasebook": 10, "tag": "formal"}, {"phrasebook": 10, "seed": 2, "tag": "plain"}]
    assert directions_of(train=kinds) == ["en-de formal", "en-de plain"]
    swapped = [{"phrasebook": 10, "tag": "de"}, {"phrasebook": 10, "reverse": True, "tag": "en"}]
    assert directions_of(train=swapped) == ["en-de de", "de-en en"]


@pytest.mark.parametrize("code", ["english", "e", "en-", "de_", "deutsch-land", "<en>", "en de"])
def test_bad_codes_are_refused(code: str) -> None:
    with pytest.raises(UserError, match=r"data.source_language: should be a language code, such as en") as caught:
        directions_of(source_language=code)
    assert code in str(caught.value)


MANY = (Direction("en", "de", "de"), Direction("en", "pt-BR", "pt"), Direction("de", "en", "en"))


def choose(directions: tuple[Direction, ...], *codes: str) -> Direction:
    translator: Any = SimpleNamespace(directions=directions)
    return choose_direction(translator, *codes)


def test_a_direction_is_chosen_by_its_languages() -> None:
    assert choose(MANY, "en", "de") == MANY[0]
    assert choose(MANY, "en-GB", "PT") == MANY[1]
    assert choose(MANY, "", "en") == choose(MANY, "de", "") == MANY[2]
    assert choose(MANY[:1]) == MANY[0]
    assert choose((Direction("", ""),), "en", "de") == Direction("", "")
    same_languages = (Direction("en", "de", "formal"), Direction("en", "de", "plain"))
    assert choose(same_languages, "en", "de") == same_languages[0]
    for codes, message in {
        ("fr", "de"): r"does not translate from fr \(French\); it translates from en \(English\), de \(German\)",
        ("de", "pt"): r"does not translate from German to pt \(Portuguese\); it translates to en \(English\)",
        ("en", ""): r"choose its target language: de \(German\), pt-BR \(Portuguese \(Brazil\)\)",
        ("", ""): "choose its source language: en",
        ("english", ""): "'english' is not a language code",
    }.items():
        with pytest.raises(UserError, match=message):
            choose(MANY, *codes)


def test_directions_in_words() -> None:
    assert describe_directions(MANY[:1]) == "English to German (en-de)"
    assert describe_directions((Direction("", ""),)) == ""
    every = tuple(Direction(one, other) for one in list(LANGUAGES)[:9] for other in list(LANGUAGES)[:9] if one != other)
    assert describe_directions(every) == "9 languages to 9"


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained in two directions, and says so by tags."""
    folder = tmp_path_factory.mktemp("tagged")
    sources = make_sentences(30)
    write_lines(folder / "a.tsv", [f"{source}\t{translate_toy(source)}" for source in sources])
    corpus = {"tsv": str(folder / "a.tsv")}
    train = [{**corpus, "tag": "de"}, {**corpus, "reverse": True, "tag": "en"}]
    recipe = write_recipe(
        folder / "recipe.yaml",
        data={"train": train, "dev": [], "source_language": "en", "target_language": "de"},
        tokenizer={"size": 300},
        model={"layers": 1, "width": 16, "heads": 2},
        train={"steps": 2, "tokens": 256},
    )
    return train_quietly(recipe, folder / "run")


def test_languages_on_the_command_line(tagged: Path, call: Call) -> None:
    by_tag = call("translate", tagged, "--tag", "en", stdin=b"hello you\n")
    by_language = call("translate", tagged, "--from", "de", "--to", "en-GB", stdin=b"hello you\n")
    assert by_language.code == by_tag.code == 0, by_language.err
    assert by_language.out == by_tag.out
    assert_user_error(call("translate", tagged, "--to", "fr", stdin=b"a\n"), "fr (French)", "en (English)")
    assert_user_error(call("translate", tagged, "--to", "de", "--tag", "de", stdin=b"a\n"), "--tag")
    card = call("info", tagged)
    assert "English to German (en-de), German to English (de-en)" in card.out


def test_a_translator_knows_its_directions(tagged: Path, toy: Toy) -> None:
    import dragoman

    translator = dragoman.load(tagged)
    assert isinstance(translator, dragoman.Translator)
    assert translator.directions == (Direction("en", "de", "de"), Direction("de", "en", "en"))
    assert toy.translator.directions == (Direction("", ""),)


def test_languages_may_be_corrected_when_a_run_is_resumed(tagged: Path, tmp_path: Path) -> None:
    """They change no token, so that a run may be resumed with other ones."""
    recipe = tagged.parent / "recipe.yaml"
    run = train_quietly(recipe, tmp_path / "run")
    train_quietly(recipe, run, "data.target_language=de-AT", "train.steps=3", resume=True)


def test_the_module_is_imported_quickly() -> None:
    code = "import sys, dragoman.inference.directions; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
