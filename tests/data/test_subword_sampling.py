"""Laws of sampling: no rate is SentencePiece's own way, more rate is more pieces, and the chances are the true ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data import subwords
from dragoman.data.subwords import SubwordVocabulary, escape, generate_uniform, segment_bpe, segment_unigram
from dragoman.data.tokenizers import BpeTokenizer, SubwordTokenizer, TokenizerSettings, train_tokenizer
from dragoman.types import UNK
from toy_text import ALL, LINES, TEXT

BPE, UNIGRAM = ALL["bpe"], ALL["unigram"]
NO_BYTES = train_tokenizer(LINES, TokenizerSettings(kind="bpe", size=120, byte_fallback=False))
WORD = "grideltorverpolmun"
kinds = pytest.mark.parametrize("kind", ["bpe", "unigram"])


def without_dropping(tokenizer: BpeTokenizer, text: str) -> list[int]:
    words = escape(text).split(" ") if text else []
    lexicon = tokenizer.sampler.vocabulary
    return [i for w in words for i in lexicon.to_ids(segment_bpe("▁" + w, lexicon, 0.0, generate_uniform("")))]


@given(TEXT | st.lists(st.sampled_from(LINES)).map("".join))
def test_bpe_that_drops_nothing_is_that_of_sentencepiece(text: str) -> None:
    for tokenizer in (BPE, NO_BYTES):
        assert isinstance(tokenizer, BpeTokenizer)
        assert without_dropping(tokenizer, text) == tokenizer.encode(text)


@given(st.text("abcdog ", max_size=40))
def test_unigram_that_hardly_spreads_is_as_probable_as_that_of_sentencepiece(text: str) -> None:
    def score(ids: list[int]) -> float:
        assert isinstance(UNIGRAM, SubwordTokenizer)
        return math.fsum(UNIGRAM.processor.get_score(ids))

    assert score(UNIGRAM.sample(text, rate=1e-9, key=(1, 1, 1))) == pytest.approx(score(UNIGRAM.encode(text)), rel=1e-5)


@kinds
def test_pieces_grow_with_the_rate(kind: str) -> None:
    def count_pieces(rate: float) -> int:
        return sum(len(ALL[kind].sample(line, rate=rate, key=(1, 1, n))) for n, line in enumerate(LINES))

    counts = [count_pieces(rate) for rate in (0.0, 0.1, 0.3, 0.6, 0.9)]
    assert counts == sorted(counts)
    assert len(set(counts)) == len(counts)


@kinds
def test_seed_epoch_and_line_each_change_the_pieces(kind: str) -> None:
    text = " ".join(LINES[:10])
    keys = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
    assert len({tuple(ALL[kind].sample(text, rate=0.3, key=key)) for key in keys}) == len(keys)


@kinds
def test_a_sample_does_not_depend_on_what_was_sampled_before(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subwords, "CACHED_VARIANTS", 8)
    tokenizer = type(ALL[kind])(ALL[kind].content)
    forwards = [tokenizer.sample(line, rate=0.3, key=(1, 1, n)) for n, line in enumerate(LINES)]
    tokenizer.sample(LINES[0], rate=0.7, key=(1, 1, 1))
    backwards = [ALL[kind].sample(line, rate=0.3, key=(1, 1, n)) for n, line in reversed([*enumerate(LINES)])]
    assert forwards == backwards[::-1]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subwords, "CACHED_VARIANTS", 100)
    tokenizer = BpeTokenizer(BPE.content)
    for n in range(500):
        tokenizer.sample(f"word{n} {'x' * 1000}", rate=0.5, key=(1, 1, n))
    cache = tokenizer.sampler.encode_cached.cache_info()
    assert cache.currsize == 100
    assert cache.hits + cache.misses == 500  # words, without the long ones


def cuts(word: str) -> Iterator[tuple[str, ...]]:
    if not word:
        yield ()
    for end in range(1, len(word) + 1):
        for rest in cuts(word[end:]):
            yield (word[:end], *rest)


@pytest.mark.parametrize("rate", [0.015, 0.05, 0.2])
def test_unigram_draws_each_way_as_often_as_it_should(rate: float) -> None:
    scores = {"a": -3.0, "b": -4.0, "ab": -5.0, "ba": -6.0, "aba": -7.5}
    lexicon = SubwordVocabulary(dict.fromkeys(scores, 9), scores, ())
    alpha = (1 - rate) / (50 * rate)
    word, count = "ababa", 4000
    ways = {way: math.exp(alpha * sum(scores[p] for p in way)) for way in cuts(word) if all(p in scores for p in way)}
    drawn = Counter(tuple(segment_unigram(word, lexicon, rate, generate_uniform(f"{rate} {n}"))) for n in range(count))
    assert set(drawn) <= set(ways)
    for way, weight in ways.items():
        chance = weight / sum(ways.values())
        assert abs(drawn[way] / count - chance) < 5 * math.sqrt(chance * (1 - chance) / count) + 1e-3


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_bpe_drops_each_merge_as_often_as_it_should(rate: float) -> None:
    scores = {"a": -9.0, "b": -9.0, "ab": 0.0, "abab": -1.0}
    lexicon = SubwordVocabulary(dict.fromkeys(scores, 9), scores, ())
    count = 4000
    drawn = Counter(tuple(segment_bpe("abab", lexicon, rate, generate_uniform(f"{rate} {n}"))) for n in range(count))
    keep = 1 - rate
    expected = {
        ("abab",): keep**3,
        ("ab", "ab"): keep**2 * rate,
        ("ab", "a", "b"): keep * rate,
        ("a", "b", "ab"): keep * rate,
        ("a", "b", "a", "b"): rate**2,
    }
    assert set(drawn) <= set(expected)
    for way, chance in expected.items():
        assert abs(drawn[way] / count - chance) < 5 * math.sqrt(chance * (1 - chance) / count)


def test_all_variants_of_a_word_are_met() -> None:
    tokenizer = ALL["unigram"]
    ways = {tuple(tokenizer.sample(WORD, rate=0.9, key=(1, epoch, 1))) for epoch in range(1000)}
    assert isinstance(tokenizer, SubwordTokenizer)
    sampler = tokenizer.sampler
    variants = {tuple(sampler.encode_word(WORD, v, 0.9)) for v in range(subwords.SEGMENTATIONS_PER_WORD)}
    assert ways == variants
    assert len(ways) > 20


def test_a_run_of_unknown_characters_is_one_unknown() -> None:
    assert SubwordVocabulary({"a": 7}, {"a": 0.0}, ()).to_ids(["a", "日", "本", "a", "日"]) == [7, UNK, 7, UNK]
