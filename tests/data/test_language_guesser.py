"""Language identification, and the error message if its dependency is not installed."""

from __future__ import annotations

import sys

import pytest

from dragoman.data.cleaning import LanguageGuesser
from dragoman.errors import UserError

ENGLISH = "A man walks his dog through the park in the morning."
GERMAN = "Ein Mann geht am Morgen mit seinem Hund durch den Park."


def test_languages_are_identified() -> None:
    languages = LanguageGuesser()
    assert [languages.guess(ENGLISH), languages.guess(GERMAN)] == ["en", "de"]
    assert languages.is_foreign(ENGLISH, "de")
    assert languages.is_foreign(GERMAN, "en")
    assert not languages.is_foreign(GERMAN, "de")


@pytest.mark.parametrize("text", ["", "12:30", "Hi."])
def test_a_text_without_evidence_is_not_foreign(text: str) -> None:
    languages = LanguageGuesser()
    assert not any(languages.is_foreign(text, code) for code in languages.codes)


def test_the_error_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(UserError, match=r"pip install 'dragoman\[clean\]'"):
        LanguageGuesser()
