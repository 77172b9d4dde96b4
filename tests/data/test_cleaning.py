"""Cleaning: dropped pairs are counted by reason, kept pairs obey all rules, and every rule can apply."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.cleaning import CleanSettings, clean_pairs
from dragoman.errors import UserError
from dragoman.types import Pair

ENGLISH = "A man walks his dog through the park in the morning."
GERMAN = "Ein Mann geht am Morgen mit seinem Hund durch den Park."
OFF = CleanSettings.model_validate({"max_words": 0, "max_characters": 0, "max_ratio": 0, "drop_duplicates": False})
DROPPED = {  # for each reason: settings, and a pair that they drop for this reason and no other
    "empty": (OFF, Pair("a dog", " \t")),
    "equal": (OFF.model_copy(update={"drop_equal": True}), Pair("a dog", "a dog ")),
    "short": (OFF.model_copy(update={"min_words": 2}), Pair("a dog", "Hund")),
    "long": (OFF.model_copy(update={"max_words": 3}), Pair("a dog", "a b c d")),
    "ratio": (OFF.model_copy(update={"max_ratio": 3.0}), Pair("dog", "12345 7890")),
    "duplicate": (OFF.model_copy(update={"drop_duplicates": True}), Pair(ENGLISH, GERMAN)),
    "language": (OFF.model_copy(update={"source_language": "en"}), Pair(GERMAN, ENGLISH)),
}
GOOD = Pair(ENGLISH, GERMAN)
WORDS = st.lists(st.sampled_from(["a", "dog", "Hund", "日本語", "", " "]), max_size=6).map(" ".join)
SETTINGS = st.builds(
    CleanSettings,
    min_words=st.integers(0, 2),
    max_words=st.integers(0, 4),
    max_characters=st.integers(0, 12),
    max_ratio=st.sampled_from([0.0, 1.0, 2.0]),
    drop_duplicates=st.booleans(),
    drop_equal=st.booleans(),
)


@pytest.mark.parametrize("reason", DROPPED)
def test_every_rule_drops_a_pair_only_if_it_is_on(reason: str) -> None:
    settings, bad = DROPPED[reason]
    counts: Counter[str] = Counter()
    first = GOOD if reason != "long" else Pair("a dog", "ein Hund")
    assert list(clean_pairs([first, bad], settings, counts)) == [first]
    assert counts == {"kept": 1, reason: 1}
    if reason != "empty":
        assert list(clean_pairs([first, bad], OFF, counts)) == [first, bad]


def test_max_characters_limits_text_without_spaces() -> None:
    settings = OFF.model_copy(update={"max_characters": 5})
    assert list(clean_pairs([Pair("日本語日本", "a"), Pair("日本語日本語", "a")], settings, Counter())) == [
        Pair("日本語日本", "a")
    ]


@given(st.lists(st.builds(Pair, WORDS, WORDS)), SETTINGS)
def test_every_pair_is_kept_or_counted_as_dropped(pairs: list[Pair], settings: CleanSettings) -> None:
    counts: Counter[str] = Counter()
    kept = list(clean_pairs(pairs, settings, counts))
    assert counts["kept"] == len(kept)
    assert counts.total() == len(pairs)
    assert set(counts) <= {"kept", *DROPPED}
    rest = iter(pairs)
    assert all(pair in rest for pair in kept), "in order"
    assert list(clean_pairs(kept, settings, Counter())) == kept, "clean stays clean"


@given(st.lists(st.builds(Pair, WORDS, WORDS)), SETTINGS)
def test_kept_pairs_obey_every_rule(pairs: list[Pair], settings: CleanSettings) -> None:
    kept = list(clean_pairs(pairs, settings, Counter()))
    for pair in kept:
        sizes = [len(side.split()) for side in (pair.source, pair.target)]
        lengths = sorted(len(side.encode()) for side in (pair.source, pair.target))
        assert min(sizes) >= max(1, settings.min_words)
        assert not settings.max_words or max(sizes) <= settings.max_words
        assert not settings.max_characters or max(len(pair.source), len(pair.target)) <= settings.max_characters
        assert not settings.max_ratio or lengths[1] <= settings.max_ratio * lengths[0]
        assert not settings.drop_equal or pair.source != pair.target
    assert not settings.drop_duplicates or len(set(kept)) == len(kept)


def test_an_unknown_language_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"source_language 'eng' .*did you mean 'en'"):
        clean_pairs([], CleanSettings.model_validate({"source_language": "eng"}), Counter())
