"""What is asked of answers, in the words of search."""

from __future__ import annotations

import pytest

from dragoman.data.tokenizers import Tokenizers, TokenizerSettings
from dragoman.decoding.methods import SearchSettings
from dragoman.errors import UserError
from dragoman.inference.constraints import make_constraints
from dragoman.inference.translator import limit_length, merge_search
from dragoman.types import Line, Pair

OWN = SearchSettings(beam=6, nbest=2)
BYTES = Tokenizers.train(lambda: [Pair("a", "b")], TokenizerSettings(kind="byte"))


def test_settings_are_laid_over_the_runs_own() -> None:
    assert merge_search(OWN) == OWN
    assert merge_search(OWN, {"no_repeat": 3}, beam=5, count=1) == SearchSettings(beam=5, nbest=1, no_repeat=3)
    greedy = merge_search(OWN, {"method": "greedy"}, count=1)
    assert (greedy.beam, greedy.stop) == (1, "enough")
    for wrong, complaint in (({"beem": 3}, "did you mean 'beam'"), ({"unknown": "drip"}, "did you mean 'drop'")):
        with pytest.raises(UserError, match=complaint):
            merge_search(OWN, wrong)


def test_what_is_asked_for_has_room_of_its_own() -> None:
    search = SearchSettings(max_ratio=1.0, max_extra=2, min_ratio=0.5)
    line = Line("abc", ("dog",), ("cat",), "ab ")
    wish = make_constraints(line, line.text, 3, BYTES, search, first=True)
    assert BYTES.target.decode(wish.prefix) == "ab"
    assert [term.text for term in wish.must] == ["dog"]
    assert [term.text for term in wish.avoid] == ["cat"]
    assert wish.minimum == 2
    assert limit_length(wish, 3, search, 100) == (3 + 2 + 1) + 2 + 4  # "dog" and what ends the word
    assert limit_length(wish, 3, search, 9) == 9
    later = make_constraints(line, "x", 1, BYTES, search, first=False)
    assert (later.prefix, later.must, len(later.avoid), later.minimum) == ((), (), 1, 1)
    assert (
        limit_length(
            make_constraints(Line("a"), "a", 1, BYTES, SearchSettings(min_ratio=50.0), first=True), 1, search, 100
        )
        == 51
    )
