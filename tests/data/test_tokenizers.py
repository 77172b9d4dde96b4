"""Laws of every tokenizer in the registry, such as round trips and deterministic training."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.tokenizers import (
    TOKENIZERS,
    Tokenizer,
    Tokenizers,
    TokenizerSettings,
    sample_reservoir,
    train_tokenizer,
)
from dragoman.errors import UserError
from dragoman.types import SPECIALS, UNK, Pair
from toy_text import ALL, LINES, ODD, PAIRS, SIZES, TEXT

KINDS = st.sampled_from(sorted(TOKENIZERS))
LOSSLESS = [kind for kind in TOKENIZERS if ALL[kind].lossless]
LOSSY = [kind for kind in TOKENIZERS if not ALL[kind].lossless]
kinds = pytest.mark.parametrize("kind", TOKENIZERS)


@given(st.sampled_from(LOSSLESS), TEXT)
def test_lossless_tokenizers_decode_to_the_same_text(kind: str, text: str) -> None:
    tokenizer = ALL[kind]
    ids = tokenizer.encode(text)
    assert all(len(SPECIALS) <= i < tokenizer.size for i in ids)
    assert tokenizer.decode(ids) == text


@given(st.sampled_from(LOSSY), TEXT)
def test_lossy_tokenizers_encode_unknown_words_as_unk(kind: str, text: str) -> None:
    """Every id is a known word or <unk>."""
    tokenizer = ALL[kind]
    ids = tokenizer.encode(text)
    assert all(i == UNK or len(SPECIALS) <= i < tokenizer.size for i in ids)
    assert not text.strip() or ids


@given(KINDS, TEXT)
def test_encode_all_equals_encode(kind: str, text: str) -> None:
    ids = ALL[kind].encode(text)
    assert ALL[kind].encode_all([text, "", text]) == [ids, [], ids]


@kinds
def test_only_word_tokenizers_are_lossy(kind: str) -> None:
    assert ALL[kind].lossless == (kind not in ("word", "space", "code"))


@kinds
def test_word_tokenizers_decode_their_training_text(kind: str) -> None:
    tokenizer = ALL[kind]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_all(LINES)] == LINES


@given(KINDS, TEXT, st.lists(st.integers(0, 3), max_size=5))
def test_specials_decode_to_nothing_and_pieces_match_ids(kind: str, text: str, specials: list[int]) -> None:
    tokenizer = ALL[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*specials, *ids, *specials]) == tokenizer.decode(ids)
    assert len(tokenizer.ids_to_tokens([*specials, *ids])) == len(specials) + len(ids)


@given(KINDS, st.data())
def test_any_ids_can_be_decoded_and_shown(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1)))
    tokenizer.decode(ids).encode()
    assert all(tokenizer.ids_to_tokens(ids))


@kinds
def test_a_space_is_shown(kind: str) -> None:
    tokenizer = ALL[kind]
    shown = "".join(tokenizer.ids_to_tokens(tokenizer.encode("The dog, it")))
    assert shown.removeprefix("▁") == "The▁dog,▁it"


@kinds
def test_every_vocabulary_begins_with_the_specials(kind: str) -> None:
    assert [piece.lstrip("▁") for piece in ALL[kind].ids_to_tokens(range(4))] == list(SPECIALS)


@kinds
def test_the_same_text_gives_the_same_tokenizer(kind: str) -> None:
    settings = TokenizerSettings(kind=kind, size=SIZES[kind])
    assert train_tokenizer(iter(LINES), settings).content == ALL[kind].content


@given(KINDS, TEXT, st.floats(0, 0.9), st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**9)))
def test_a_sampled_segmentation_decodes_to_the_same_text(
    kind: str, text: str, rate: float, key: tuple[int, int, int]
) -> None:
    tokenizer = ALL[kind]
    ids = tokenizer.sample(text, rate=rate, key=key)
    assert ids == tokenizer.sample(text, rate=rate, key=key)
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text))
    assert tokenizer.sample(text, rate=0.0, key=key) == tokenizer.encode(text)


@kinds
@pytest.mark.parametrize("joint", [True, False])
def test_tokenizers_are_saved_and_loaded(kind: str, joint: bool, tmp_path: Path) -> None:
    settings = TokenizerSettings(kind=kind, size=330, joint=joint)
    tokenizers = Tokenizers.train(lambda: PAIRS, settings)
    assert tokenizers.joint == joint
    tokenizers.save(tmp_path / "deep" / "tokenizer")
    loaded = Tokenizers.load(tmp_path / "deep" / "tokenizer")
    assert loaded.joint == joint
    assert loaded.fingerprint() == tokenizers.fingerprint()
    for side in ("source", "target"):
        before, after = getattr(tokenizers, side), getattr(loaded, side)
        assert type(after) is type(before)
        assert (after.size, after.lossless) == (before.size, before.lossless)
        assert after.encode_all(LINES + ODD) == before.encode_all(LINES + ODD)
        assert after.sample(LINES[0], rate=0.3, key=(1, 2, 3)) == before.sample(LINES[0], rate=0.3, key=(1, 2, 3))


@kinds
def test_a_tokenizer_can_be_sent_to_a_worker(kind: str) -> None:
    copy: Tokenizer = pickle.loads(pickle.dumps(ALL[kind]))
    assert copy.encode_all(LINES) == ALL[kind].encode_all(LINES)
    assert copy.sample(LINES[0], rate=0.3, key=(1, 2, 3)) == ALL[kind].sample(LINES[0], rate=0.3, key=(1, 2, 3))


def test_different_tokenizers_have_different_fingerprints() -> None:
    prints = {Tokenizers(a, b).fingerprint() for a in ALL.values() for b in ALL.values()}
    assert len(prints) == len(ALL) ** 2


@kinds
def test_a_damaged_folder_is_refused(kind: str, tmp_path: Path) -> None:
    Tokenizers(ALL[kind], ALL[kind]).save(tmp_path)
    index, [part] = tmp_path / "tokenizer.json", [p for p in tmp_path.iterdir() if p.name != "tokenizer.json"]
    whole, names = part.read_bytes(), index.read_bytes()
    part.write_bytes(whole[:-3])
    with pytest.raises(UserError, match=f"{part.name} is damaged"):
        Tokenizers.load(tmp_path)
    part.unlink()
    with pytest.raises(UserError, match=part.name):
        Tokenizers.load(tmp_path)
    part.write_bytes(whole)
    for wrong in (names[:-5], b"[]", b"{}", b'{"joint": 3}', b"\xff"):
        index.write_bytes(wrong)
        with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
            Tokenizers.load(tmp_path)
    index.write_text(json.dumps({"joint": {**json.loads(names)["joint"], "kind": "runes"}}))
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        Tokenizers.load(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizers.load(tmp_path / "nowhere")


def test_each_side_may_have_its_own_kind_and_size(tmp_path: Path) -> None:
    pairs = [Pair("fun", "f ʌ n"), Pair("phone", "f oʊ n"), Pair("tiny", "t aɪ n i")]
    settings = TokenizerSettings(kind="char", joint=False, target_kind="space", target_size=8)
    both = Tokenizers.train(lambda: pairs, settings)
    assert (type(both.source), type(both.target)) == (TOKENIZERS["char"], TOKENIZERS["space"])
    assert [both.target.decode(both.target.encode(pair.target)) for pair in pairs] == [p.target for p in pairs]
    both.save(tmp_path)
    assert Tokenizers.load(tmp_path).fingerprint() == both.fingerprint()
    for other in ({"target_kind": "space"}, {"target_size": 9}):
        with pytest.raises(UserError, match=r"set tokenizer\.joint=false"):
            Tokenizers.train(lambda: pairs, TokenizerSettings(kind="char", **other))


def test_an_unknown_kind_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="did you mean 'unigram'"):
        train_tokenizer(LINES, TokenizerSettings(kind="unigrams"))


@given(st.integers(0, 30), st.integers(1, 10), st.integers(0, 5))
def test_reservoir_sampling_is_deterministic_and_has_the_right_size(total: int, count: int, seed: int) -> None:
    drawn, seen = sample_reservoir(range(total), count, seed)
    assert seen == total
    assert len(set(drawn)) == min(total, count)
    assert set(drawn) <= set(range(total))
    assert drawn == sample_reservoir(iter(range(total)), count, seed)[0]


def test_reservoir_sampling_is_uniform() -> None:
    counts = [0] * 20
    for seed in range(2000):
        for item in sample_reservoir(range(20), 5, seed)[0]:
            counts[item] += 1
    assert all(400 < count < 600 for count in counts)


def test_sampling_of_training_lines_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("dragoman.data.tokenizers.MAX_TRAINING_LINES", 100)
    train_tokenizer(LINES, TokenizerSettings(kind="char"), log=said.append)
    assert said == ["the tokenizer learns from 100 of 400 lines, sampled at random"]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
def test_without_byte_fallback_unknown_characters_are_unk(kind: str) -> None:
    tokenizer = train_tokenizer(LINES, TokenizerSettings(kind=kind, size=120, byte_fallback=False))
    assert not tokenizer.lossless
    assert UNK in tokenizer.encode("日")
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_all(LINES)] == LINES
