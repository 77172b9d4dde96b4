"""Languages: the directions of a recipe, the choice between them, codes, and the detection of a text's language."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.config.settings import parse_settings
from dragoman.errors import UserError
from dragoman.inference import languages
from dragoman.inference.languages import (
    LANGUAGE_NAMES,
    Direction,
    choose_direction,
    describe_directions,
    detect_language,
    list_directions,
)
from dragoman.language_codes import LANGUAGES, find_code, match_language, name_language, normalize_code
from dragoman.phrasebook.generate import generate_pairs
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


def test_codes_have_one_notation() -> None:
    same = {"DE": "de", "deu_Latn": "de", "ger": "de", "zh": "zh-Hans", "zh-CN": "zh-Hans", "zho_Hant": "zh-Hant",
            "iw": "he", "en_us": "en-US", "srp_Cyrl": "sr", "sr-Latn": "sr-Latn", "": "", "tlh": "tlh"}  # fmt: skip
    assert {code: normalize_code(code) for code in same} == same
    assert [find_code(code) for code in LANGUAGES] == list(LANGUAGES)
    assert [name_language(code) for code in ("de", "de-AT", "zh-Hant", "tlh")] == [
        "German",
        "German (AT)",
        "Chinese (traditional)",
        "tlh",
    ]
    assert LANGUAGE_NAMES["pt-BR"] == "Portuguese (Brazil)"


def test_the_nearest_language_is_matched() -> None:
    assert match_language("pt-BR", ["en", "pt"]) == "pt"
    assert match_language("pt", ["en", "pt-BR", "pt-PT"]) == "pt-BR"
    assert match_language("PT-pt", ["pt", "pt-BR", "pt-PT"]) == "pt-PT"
    assert match_language("zh", ["zh-Hant", "zh-Hans"]) == "zh-Hans"
    assert match_language("fr", ["en", "de"]) is None


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


GREETINGS = {
    "en": "This is a short sentence about the weather.", "de": "Das ist ein kurzer Satz über das Wetter.",
    "fr": "Ceci est une petite phrase sur le temps.", "el": "Αυτή είναι μια σύντομη πρόταση.",
    "ru": "Это короткое предложение о погоде.", "ja": "これは天気についての短い文です。",
    "ko": "이것은 날씨에 대한 짧은 문장입니다.",
    "zh-Hans": "这是一个关于天气的简短句子。",
    "zh-Hant": "這是一個關於天氣的簡短句子。", "ar": "هذه جملة قصيرة عن الطقس.",
    "he": "זה משפט קצר על מזג האוויר.", "hi": "यह मौसम के बारे में एक छोटा वाक्य है।",
    "th": "นี่คือประโยคสั้นๆ เกี่ยวกับสภาพอากาศ",
}  # fmt: skip


@pytest.mark.parametrize("code", GREETINGS)
def test_a_language_is_detected_among_all_candidates(code: str) -> None:
    found = detect_language(GREETINGS[code], list(GREETINGS))
    assert found[0][0] == code
    assert found[0][1] > 0.8
    assert sorted(other for other, _ in found) == sorted(GREETINGS)
    assert sum(confidence for _, confidence in found) <= 1 + 1e-9
    assert [c for _, c in found] == sorted((c for _, c in found), reverse=True)


def test_a_region_does_not_hide_a_language() -> None:
    portuguese = "Esta é uma frase curta sobre o tempo de hoje."
    code, confidence = detect_language(portuguese, ["en", "pt-BR"])[0]
    assert (code, confidence > 0.9) == ("pt-BR", True)
    assert detect_language(portuguese)[0][0] == "pt"


def test_a_text_in_another_language_gives_little_confidence() -> None:
    assert detect_language(GREETINGS["fr"], ["en", "de"])[0][1] < 0.2
    assert detect_language(GREETINGS["ru"], ["en", "de"])[0][1] == 0.0


def test_confidence_is_calibrated() -> None:
    """On beginnings of sentences of one to five words, answers of confidence c are right in about c of the cases."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for number, pair in enumerate(generate_pairs("test", 200)):
        for code, text in (("en", pair.source), ("de", pair.target)):
            found, confidence = detect_language(" ".join(text.split()[: 1 + number % 5]), ["en", "de"])[0]
            bins.setdefault(min(int(confidence * 5), 4), []).append((confidence, found == code))
    error = sum(abs(sum(confidence - right for confidence, right in entries)) for entries in bins.values()) / 400
    assert error < 0.1


@pytest.mark.parametrize("text", ["", " ", "🙂", "12:30", "!?", "\ud800", "\x00", "ͤ", "a", "ß", "Ok 👍"])
def test_hardly_a_text(text: str) -> None:
    found = detect_language(text, ["en", "de"])
    assert sorted(code for code, _ in found) == ["de", "en"]
    assert all(0 <= confidence <= 1 for _, confidence in found)
    detect_language(text)
    if not any(map(str.isalpha, text)):
        assert found == [("en", 0.0), ("de", 0.0)]


def test_scripts_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    languages.make_guesser.cache_clear()
    assert detect_language(GREETINGS["el"], ["en", "el", "ru"])[0] == ("el", 0.99)
    with pytest.raises(UserError, match="pip install"):
        detect_language(GREETINGS["de"], ["en", "de"])


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
    code = "import sys, dragoman.inference.languages; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_threads_load_one_guesser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model takes tens of megabytes: 64 threads of a server that loaded it at once took gigabytes."""
    loaded = []

    def load_slowly() -> str:
        loaded.append(Event().wait(0.05))
        return "guesser"

    monkeypatch.setattr(languages, "make_guesser", lru_cache(maxsize=1)(load_slowly))
    with ThreadPoolExecutor(8) as pool:
        assert set(map(str, pool.map(lambda _: languages.load_guesser(), range(8)))) == {"guesser"}
    assert len(loaded) == 1
