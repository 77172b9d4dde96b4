"""Tests of search settings and decoding constraints of a request."""

from __future__ import annotations

import pytest

from dragoman.data.tokenizers import Tokenizers, TokenizerSettings
from dragoman.decoding.methods import SearchSettings
from dragoman.errors import UserError
from dragoman.inference.constraints import make_constraints
from dragoman.inference.translator import compute_max_tokens, merge_search
from dragoman.types import Line, Pair

RUN_SETTINGS = SearchSettings(beam=6, nbest=2)
BYTES = Tokenizers.train(lambda: [Pair("a", "b")], TokenizerSettings(kind="byte"))


def test_settings_override_those_of_the_run() -> None:
    assert merge_search(RUN_SETTINGS) == RUN_SETTINGS
    assert merge_search(RUN_SETTINGS, {"no_repeat": 3}, beam=5, count=1) == SearchSettings(beam=5, nbest=1, no_repeat=3)
    greedy = merge_search(RUN_SETTINGS, {"method": "greedy"}, count=1)
    assert (greedy.beam, greedy.stop) == (1, "enough")
    for wrong, message in (({"beem": 3}, "did you mean 'beam'"), ({"unknown": "drip"}, "did you mean 'drop'")):
        with pytest.raises(UserError, match=message):
            merge_search(RUN_SETTINGS, wrong)


def test_prefix_and_terms_raise_the_length_limit() -> None:
    search = SearchSettings(max_ratio=1.0, max_extra=2, min_ratio=0.5)
    line = Line("abc", ("dog",), ("cat",), "ab ")
    constraint = make_constraints(line, line.text, 3, BYTES, search, is_first_segment=True)
    assert BYTES.target.decode(constraint.prefix) == "ab"
    assert [term.text for term in constraint.required] == ["dog"]
    assert [term.text for term in constraint.avoid] == ["cat"]
    assert constraint.min_tokens == 2
    assert compute_max_tokens(constraint, 3, search, 100) == (3 + 2 + 1) + 2 + 4  # "dog" and the word boundary after it
    assert compute_max_tokens(constraint, 3, search, 9) == 9
    capped = search.model_copy(update={"max_tokens": 4})
    assert compute_max_tokens(constraint, 3, capped, 100) == 4 + 2 + 4
    assert compute_max_tokens(constraint, 0, capped, 100) == (2 + 1) + 2 + 4  # max_ratio and max_extra allow less
    later = make_constraints(line, "x", 1, BYTES, search, is_first_segment=False)
    assert (later.prefix, later.required, len(later.avoid), later.min_tokens) == ((), (), 1, 1)
    assert (
        compute_max_tokens(
            make_constraints(Line("a"), "a", 1, BYTES, SearchSettings(min_ratio=50.0), is_first_segment=True),
            1,
            search,
            100,
        )
        == 51
    )
