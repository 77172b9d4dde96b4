"""Words as they become certain: none is taken back, and together they are the answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.decoding.beam import BeamState
from dragoman.decoding.methods import SEARCH_METHODS
from dragoman.errors import UserError
from dragoman.inference.streaming import BeamObserver, find_certain_prefix, keep_complete_words, stream_text
from dragoman.inference.translator import Translator
from dragoman.types import Hypothesis, Line
from toy_requests import beam_search
from toy_run import Call, Toy, make_sentences, translate_toy
from toy_steps import Toy as Steps
from toy_steps import sources


def streamed(translator: Translator, line: str | Line, **options: Any) -> tuple[list[str], Hypothesis]:
    pieces, stream = [], translator.stream(line, **options)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


@settings(max_examples=40)
@given(seed=st.integers(0, 5000), width=st.integers(1, 4), limit=st.integers(1, 9), sharp=st.sampled_from([4.0, 15.0]))
def test_what_is_certain_stays(seed: int, width: int, limit: int, sharp: float) -> None:
    seen: list[list[int]] = []

    def watch(beams: BeamState) -> None:
        seen.append(find_certain_prefix(beams))

    model = Steps(seed=seed, sharp=sharp)
    [found] = beam_search(model, *sources(4), torch.tensor([limit]), width=width, watch=watch)
    for tokens in seen:
        assert found[0].tokens[: len(tokens)] == tokens
    assert [len(tokens) for tokens in seen] == sorted(map(len, seen))
    if width == 1:
        assert [len(tokens) for tokens in seen] == [min(i + 1, len(found[0].tokens)) for i in range(len(seen))]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", ""),
        ("a", ""),
        ("a b", "a"),
        ("ab cd ef", "ab cd"),
        ("ab ", "ab"),
        ("你好吗", "你好"),
        ("a 你好", "a 你"),
        ("a\ufffd", ""),
    ],
)
def test_words_that_can_still_grow_are_held_back(text: str, part: str) -> None:
    assert keep_complete_words(text) == part


@pytest.mark.parametrize("beam", [1, 4])
def test_together_they_are_the_answer(translator: Translator, beam: int) -> None:
    lines = [*make_sentences(12, seed=41, longest=7), " ".join(make_sentences(12, seed=42)), "", " ", "🎉", "ba\0del."]
    for line, one in zip(lines, translator.translate(lines, beam=beam), strict=True):
        pieces, answer = streamed(translator, line, beam=beam)
        assert "".join(pieces) == one.text
        assert answer == one
        assert all(pieces)


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_every_method_can_be_streamed(translator: Translator, method: str) -> None:
    search = {"method": method, "samples": 4, "no_repeat": 2}
    [one] = translator.translate(["ba del fo gri."], search=search)
    pieces, answer = streamed(translator, "ba del fo gri.", search=search)
    assert "".join(pieces) == one.text
    assert answer == one


@pytest.mark.parametrize(
    "line", [Line("ba del fo.", ("yim",)), Line("ba del fo.", (), ("ebi",)), Line("ba.", prefix="zu")]
)
def test_what_is_asked_of_a_line_holds(translator: Translator, line: Line) -> None:
    [one] = translator.translate([line])
    pieces, answer = streamed(translator, line)
    assert "".join(pieces) == one.text
    assert answer == one


def test_words_come_one_by_one(translator: Translator) -> None:
    line = "ba del fo gri mun."
    pieces, _ = streamed(translator, line, beam=1)
    assert "".join(pieces) == translate_toy(line)
    assert len(pieces) == 5


def test_whoever_stops_listening_stops_the_work(translator: Translator) -> None:
    before, steps = threading.active_count(), 0

    def endless(watch: BeamObserver) -> list[list[Hypothesis]]:
        nonlocal steps
        shown: list[BeamState] = []
        beam_search(Steps(), *sources(4), torch.tensor([5]), width=1, watch=shown.append)
        while steps < 100_000:
            steps += 1
            watch(shown[-1])
        return [translator.translate(["ba."])]

    stream = stream_text(endless, lambda tokens: "a b " * len(tokens))
    assert next(stream)
    stream.close()
    assert 0 < steps < 100_000
    assert threading.active_count() == before


def test_a_mistake_comes_through(translator: Translator) -> None:
    with pytest.raises(UserError, match="did you mean 'greedy'"):
        next(translator.stream("ba.", search={"method": "gredy"}))
    with pytest.raises(UserError, match="must not be empty"):
        next(translator.stream(Line("ba.", (" ",))))


def test_on_the_command_line(toy: Toy, call: Call) -> None:
    lines = [*make_sentences(5, seed=43), "", " ".join(make_sentences(12, seed=44))]
    raw = "\n".join(lines).encode()
    whole, streaming = call("translate", toy.run, stdin=raw), call("translate", toy.run, "--stream", stdin=raw)
    assert streaming.code == 0
    assert streaming.out == whole.out
    assert streaming.err == whole.err
    refused = call("translate", toy.run, "--stream", "--json", stdin=raw)
    assert (refused.code, refused.out) == (2, "")
