"""Detection of the language of a text among candidates."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Event

import pytest

from dragoman.errors import UserError
from dragoman.inference import language_detection
from dragoman.inference.language_detection import detect_language
from dragoman.phrasebook.generate import generate_pairs

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
    language_detection.make_guesser.cache_clear()
    assert detect_language(GREETINGS["el"], ["en", "el", "ru"])[0] == ("el", 0.99)
    with pytest.raises(UserError, match="pip install"):
        detect_language(GREETINGS["de"], ["en", "de"])


def test_threads_load_one_guesser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model takes tens of megabytes: 64 threads of a server that loaded it at once took gigabytes."""
    loaded = []

    def load_slowly() -> str:
        loaded.append(Event().wait(0.05))
        return "guesser"

    monkeypatch.setattr(language_detection, "make_guesser", lru_cache(maxsize=1)(load_slowly))
    with ThreadPoolExecutor(8) as pool:
        assert set(map(str, pool.map(lambda _: language_detection.load_guesser(), range(8)))) == {"guesser"}
    assert len(loaded) == 1
