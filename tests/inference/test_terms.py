"""A term's machine says the same as a look at the text, however the text is spelt in tokens."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.tokenizers import TOKENIZERS, TokenizerSettings, train_tokenizer
from dragoman.decoding.protocol import UNREACHABLE, Term, TokenByteTable
from dragoman.inference.constraints import TermCompiler, output_contains

SPELT = [b""] * 4 + [
    b" a",
    b" b",
    b"a",
    b"b",
    b" ab",
    b"ba",
    b".",
    b" ",
    b"a b",
    "“".encode(),
    b"\xe2",
    b"\x80",
    b"\x9c",
]
LINES = ["a dog and a hot dog run.", "ein Hund und ein heißer Hund laufen.", "Dogs, cats & birds: (all) of them!"] * 20


def run(term: Term, ids: list[int]) -> tuple[bool, int]:
    """Whether the term has been said when the text ends here, and the tokens that it still takes if it goes on."""
    state = 0
    for token in ids:
        state = int(term.next_SV[state, token])
    return bool(term.complete_at_end_S[state]), int(term.missing_S[state])


@given(
    ids=st.lists(st.integers(4, len(SPELT) - 1), max_size=8),
    body=st.sampled_from(["a", "ab", "aba", "a b", "b a b", "ba"]),
    before=st.booleans(),
    after=st.booleans(),
)
def test_the_machine_agrees_with_a_look_at_the_text(ids: list[int], body: str, before: bool, after: bool) -> None:
    term = TokenByteTable(SPELT).build_term(body, [body.encode()], before=before, after=after)
    text = b"".join(SPELT[i] for i in ids).decode(errors="surrogateescape")
    half = re.search("[\udc80-\udcff]", text)  # half a character has no look of its own
    edge = r"[\s.“]"
    pattern = (f"(?:^|(?<={edge}))" if before else "") + re.escape(body) + (f"(?:$|(?={edge}))" if after else "")
    if not half:
        assert run(term, ids)[0] == bool(re.search(pattern, text))


@given(ids=st.lists(st.integers(4, 12), max_size=6), body=st.sampled_from(["ab", "aba", "a b"]))
def test_what_is_left_is_the_shortest_way(ids: list[int], body: str) -> None:
    """One token can bring the term nearer by one at most, and some token does."""
    term = TokenByteTable(SPELT).build_term(body, [body.encode()], before=True, after=True)
    left = run(term, ids)[1]
    after = [run(term, [*ids, token])[1] for token in range(4, len(SPELT))]
    assert min(after) == max(left - 1, 0)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["dog", "hot dog", "Hund", "heißer Hund", "(all)", "cats & birds"])
def test_every_kind_of_vocabulary_spells_it(kind: str, text: str) -> None:
    """In a sentence as in one that only looks like it."""
    tokenizer = train_tokenizer(LINES, TokenizerSettings(kind=kind, size=290))
    term = TermCompiler(tokenizer).get(text)
    assert term.is_spellable or not tokenizer.splits_punctuation
    for line in (f"a {text} runs", text, f"the {text}", "a hotdog", "heißer Hunde", "dogs", "a dog, a hot bird", ""):
        ids = tokenizer.encode(line)
        if tokenizer.decode(ids) == line:
            assert run(term, ids)[0] == output_contains(text, line), line


def test_a_term_of_unknown_words_cannot_be_said() -> None:
    tokenizer = train_tokenizer(LINES, TokenizerSettings(kind="word", size=290))
    term = TermCompiler(tokenizer).get("zebra")
    assert not term.is_spellable
    assert term.missing_S[0] == UNREACHABLE
    assert not run(term, tokenizer.encode("a dog and a hot dog"))[0]


@pytest.mark.parametrize(
    ("text", "line", "there"), [("犬", "私の犬です", True), ("dog", "hotdog", False), ("C++", "C++.", True)]
)
def test_words_end_where_their_script_says(text: str, line: str, there: bool) -> None:
    tokenizer = train_tokenizer(LINES, TokenizerSettings(kind="byte"))
    assert run(TermCompiler(tokenizer).get(text), tokenizer.encode(line))[0] == output_contains(text, line) == there


def test_the_last_terms_are_kept() -> None:
    speller = TermCompiler(train_tokenizer(LINES, TokenizerSettings(kind="byte")))
    assert speller.get("dog") is speller.get("dog")
    assert speller.get("dog") is not speller.get("dog", all_caps=True)
