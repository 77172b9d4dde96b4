"""Guess the language of a text, with py3langid (an extra)."""

from __future__ import annotations

from typing import Any

from dragoman.types import UserError

DOUBT = 5.0  # of a log-probability: how much likelier another language must be before a text is called foreign


class Languages:
    """What py3langid thinks of texts.

    languages = Languages()
    assert languages.guess("Ein Mann geht mit seinem Hund.") == "de"
    """

    def __init__(self) -> None:
        try:
            import py3langid
        except ImportError:
            raise UserError("to guess languages, install the extra: pip install 'dragoman[clean]'") from None
        self.langid: Any = py3langid
        self.codes: frozenset[str] = frozenset(code for code, _ in py3langid.rank("a"))

    def guess(self, text: str) -> str:
        """A code such as "en", or "" for a text that gives no hint, such as a number."""
        code, score = self.langid.classify(text)
        return str(code) if score > -1e38 else ""

    def foreign(self, text: str, code: str) -> bool:
        """Whether the text is clearly in another language than `code`. Short texts get the benefit of the doubt."""
        if self.guess(text) in ("", code):
            return False
        scores = dict(self.langid.rank(text))
        return bool(max(scores.values()) - scores[code] > DOUBT)
