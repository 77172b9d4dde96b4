"""Token stores: they have the ids of the tokenizer, are written once, and are complete or absent."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.data import token_store as tokens
from dragoman.data.token_store import TokenStore, open_store
from dragoman.data.tokenizers import ByteTokenizer, Tokenizers
from dragoman.errors import UserError
from dragoman.io import cache_entries, create_folder_atomically, lock_folder
from dragoman.types import Pair
from toy_text import ALL, PAIRS, TEXT

KINDS = pytest.mark.parametrize("kind", ALL)


def both(kind: str) -> Tokenizers:
    return Tokenizers(ALL[kind], ALL[kind])


def made(
    cache: Path,
    pairs: Sequence[Pair] = PAIRS,
    *,
    kind: str = "bpe",
    key: str = "corpus",
    max_length: int = 1000,
    text: bool = False,
) -> TokenStore:
    return open_store(lambda: iter(pairs), both(kind), key=key, cache=cache, max_length=max_length, text=text)


def unread() -> Iterator[Pair]:
    raise AssertionError("the corpus was read again")


def complaint(cache: Path, pairs: Sequence[Pair] = PAIRS, **more: object) -> str:
    with pytest.raises(UserError) as caught:
        made(cache, pairs, **more)  # type: ignore[arg-type]
    return str(caught.value)


@KINDS
@pytest.mark.parametrize("text", [False, True])
def test_stored_ids_are_those_of_the_tokenizer(tmp_path: Path, kind: str, text: bool) -> None:
    store = made(tmp_path, kind=kind, text=text)
    assert len(store) == len(PAIRS)
    texts = store.read_texts(np.arange(len(PAIRS)))
    assert texts == (
        [[pair.source.encode() for pair in PAIRS], [pair.target.encode() for pair in PAIRS]] if text else []
    )
    for line, pair in enumerate(PAIRS):
        example = store.read_example(line)
        assert example.source.tolist() == ALL[kind].encode(pair.source)
        assert example.target.tolist() == ALL[kind].encode(pair.target)
        assert example.line == line
    assert store.longest_source == max(len(ALL[kind].encode(pair.source)) for pair in PAIRS)
    assert not store.dropped_counts


@settings(max_examples=40)
@given(st.lists(st.builds(Pair, TEXT, TEXT), min_size=1, max_size=8), st.integers(1, 5))
def test_skipped_pairs_are_counted_and_others_are_stored(pairs: list[Pair], chunk: int) -> None:
    limit = 12
    encode = ALL["byte"].encode
    lengths = [(len(encode(pair.source)), len(encode(pair.target))) for pair in pairs]
    empty = sum(min(both) == 0 for both in lengths)
    long = sum(min(both) > 0 and max(both) > limit for both in lengths)
    fits = [pair for pair, both in zip(pairs, lengths) if min(both) > 0 and max(both) <= limit]
    with TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "ENCODING_CHUNK", chunk)
        if not fits:
            assert f"none of {len(pairs)} pairs can be used" in complaint(
                Path(cache), pairs, kind="byte", max_length=limit, text=True
            )
            assert list(Path(cache).iterdir()) == []
            return
        store = made(Path(cache), pairs, kind="byte", max_length=limit, text=True)
        assert store.dropped_counts == {
            name: count for name, count in (("one side empty", empty), (f"longer than {limit} tokens", long)) if count
        }
        texts = store.read_texts(np.arange(len(store)))
        assert texts == [[pair.source.encode() for pair in fits], [pair.target.encode() for pair in fits]]
        assert [store.read_example(line).source.tolist() for line in range(len(store))] == [
            encode(p.source) for p in fits
        ]
        assert store.longest_source == max(len(encode(pair.source)) for pair in fits)


def test_a_pair_of_max_length_is_kept(tmp_path: Path) -> None:
    pairs = [Pair("a" * 5, "b"), Pair("a" * 6, "b"), Pair("a", "b" * 6), Pair("a", "b" * 5)]
    store = made(tmp_path, pairs, kind="byte", max_length=5)
    assert len(store) == 2
    assert store.dropped_counts == {"longer than 5 tokens": 2}


def test_a_cached_store_is_opened_without_reading_the_corpus(tmp_path: Path) -> None:
    first = made(tmp_path, text=True)
    again = open_store(unread, both("bpe"), key="corpus", cache=tmp_path, max_length=1000, text=True)
    assert len(again) == len(first)
    assert again.digest == first.digest
    lines = np.arange(len(first))
    assert again.read_texts(lines) == first.read_texts(lines)


@pytest.mark.parametrize("change", [{"key": "other"}, {"kind": "char"}, {"max_length": 999}, {"text": True}])
def test_another_corpus_or_tokenizer_is_another_store(tmp_path: Path, change: dict[str, object]) -> None:
    made(tmp_path)
    made(tmp_path, **change)  # type: ignore[arg-type]
    assert len(list(tmp_path.glob("*/store.json"))) == 2


def test_the_digest_depends_on_the_content(tmp_path: Path) -> None:
    """It is equal for equal content of any origin, and differs if a word, the order, a side or a boundary differs."""
    content = [Pair("ab", "cd"), Pair("e", "f")]
    others = [
        [Pair("ab", "cd"), Pair("e", "g")],
        [Pair("e", "f"), Pair("ab", "cd")],
        [Pair("cd", "ab"), Pair("f", "e")],
        [Pair("abe", "cdf")],
        [Pair("a", "c"), Pair("be", "df")],
        [Pair("ab", "cdf"), Pair("e", "f")],
        content[:1],
        [*content, *content],
    ]
    digests = [made(tmp_path, pairs, kind="byte", key=str(i)).digest for i, pairs in enumerate([content, *others])]
    assert len(set(digests)) == len(digests)
    assert made(tmp_path, content, kind="byte", key="elsewhere").digest == digests[0]


@given(st.integers(1, 300), st.integers(1, 50))
def test_lengths_are_those_of_a_spread_sample(count: int, most: int) -> None:
    pairs = [Pair("a" * (i % 7 + 1), "b" * (i % 5 + 1)) for i in range(count)]
    with TemporaryDirectory() as cache:
        source_N, target_N = made(Path(cache), pairs, kind="byte").sample_lengths(most)
    both = list(zip(source_N.tolist(), target_N.tolist()))
    assert len(both) == min(count, most)
    assert set(both) <= {(len(p.source), len(p.target)) for p in pairs}
    if most >= count:
        assert both == [(len(p.source), len(p.target)) for p in pairs]


def test_an_unwritable_cache_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    message = complaint(tmp_path / "file" / "cache")
    assert "data.cache=FOLDER" in message
    assert repr(str(tmp_path / "file" / "cache")) in message


def test_a_full_disk_is_an_error_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens.StoreWriter, "write_chunk", full)
    assert "No space left on device" in complaint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_corpus_leaves_no_files(tmp_path: Path) -> None:
    def broken() -> Iterator[Pair]:
        yield PAIRS[0]
        raise UserError("line 2 is not UTF-8")

    with pytest.raises(UserError, match="line 2"):
        open_store(broken, both("bpe"), key="x", cache=tmp_path, max_length=1000, text=False)
    assert list(tmp_path.iterdir()) == []
    assert len(made(tmp_path, key="x")) == len(PAIRS)


def test_leftovers_of_dead_runs_are_removed_but_not_those_of_live_ones(tmp_path: Path) -> None:
    names = {name: f".a.{name:_<8}.dragoman.tmp" for name in ("dead", "young", "locked")}
    users = ["film.part", ".thesis.tmp", ".notes.dragoman.tmp"]
    for name in [*names.values(), *users]:
        (tmp_path / name).mkdir()
        age = 10.0 if name == names["young"] else 100_000.0
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with lock_folder(tmp_path / names["locked"], "busy"):
        made(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {names["young"], names["locked"], *users}
    assert names["dead"] not in left


def test_cache_entries_are_listed(tmp_path: Path) -> None:
    """Entries are recognized by their names; files of the user are not listed."""
    assert list(cache_entries(tmp_path / "nowhere")) == []
    made(tmp_path)
    key = next(tmp_path.iterdir()).name
    (tmp_path / f".{key}.abcdefgh.dragoman.tmp").mkdir()
    names = {
        f"{key}-tokenizer": "tokenizer",
        f"ctranslate2-{key}": "model for CTranslate2",
        "film.part": "",
        "notes": "",
    }
    for name in names:
        (tmp_path / name).mkdir()
    found = {path.name: kind for kind, path in cache_entries(tmp_path)}
    ours = {name: kind for name, kind in names.items() if kind}
    assert found == {key: "token ids", f".{key}.abcdefgh.dragoman.tmp": "unfinished", **ours}


def test_two_runs_may_write_the_same_store_at_once(tmp_path: Path) -> None:
    first: list[int] = []

    def meanwhile() -> Iterator[Pair]:
        yield PAIRS[0]
        made(tmp_path)
        first.extend(path.stat().st_ino for path in tmp_path.glob("*/store.json"))
        yield from PAIRS[1:]

    store = open_store(meanwhile, both("bpe"), key="corpus", cache=tmp_path, max_length=1000, text=False)
    assert [store.read_example(i).source.tolist() for i in range(3)] == [ALL["bpe"].encode(p.source) for p in PAIRS[:3]]
    assert len(list(tmp_path.iterdir())) == 1
    assert [path.stat().st_ino for path in tmp_path.glob("*/store.json")] == first  # the other run reads from it


def test_of_many_stores_finished_at_once_one_stays(tmp_path: Path) -> None:
    """The first finished store stays; later ones do not replace it, because it may be in use."""
    together = threading.Barrier(8)

    def keep(number: int, folder: Path) -> set[str]:
        def write(beside: Path) -> None:
            (beside / "first").write_text(str(number))
            (beside / "last").write_text(str(number))
            together.wait()

        create_folder_atomically(folder, write=write, required_file="last")
        return {(folder / name).read_text() for name in ("first", "last")}

    with ThreadPoolExecutor(8) as pool:
        for round in range(30):
            found = list(pool.map(keep, range(8), repeat(tmp_path / str(round))))
            assert len(found[0]) == 1
            assert all(each == found[0] for each in found)
    assert len(list(tmp_path.iterdir())) == 30


def test_an_incomplete_store_is_written_again(tmp_path: Path) -> None:
    made(tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "store.json").unlink()
    assert len(made(tmp_path)) == len(PAIRS)


@pytest.mark.parametrize(
    "name", ["source.ids", "target.ids", "source.ends", "target.ends", "source.text", "store.json"]
)
@pytest.mark.parametrize("damage", ["cut", "cut to nothing", "gone"])
def test_a_damaged_store_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    made(tmp_path, text=True)
    (folder,) = tmp_path.iterdir()
    if damage == "gone" and name == "store.json":
        return  # that is one that is not whole
    content = (folder / name).read_bytes()
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content[:-9] if damage == "cut" else b"")
    assert f"{str(folder)!r} are damaged; remove that folder" in complaint(tmp_path, text=True)


def test_ids_take_two_bytes_or_four(tmp_path: Path) -> None:
    class Many(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [2**16 + ord(c) for c in text]

    many = Many()
    many.size = 2**17
    store = open_store(
        lambda: iter([Pair("ab", "c")]), Tokenizers(many, many), key="x", cache=tmp_path, max_length=9, text=False
    )
    assert store.read_example(0).source.tolist() == [2**16 + 97, 2**16 + 98]
    assert store.id_columns[0].values.dtype == np.uint32
    assert made(tmp_path).id_columns[0].values.dtype == np.uint16


def test_released_pages_can_be_read_again(tmp_path: Path) -> None:
    store = made(tmp_path, text=True)
    before = [store.read_example(line).target.tolist() for line in range(len(store))]
    store.release_pages()
    assert [store.read_example(line).target.tolist() for line in range(len(store))] == before
    assert all(isinstance(ids.values.base, np.memmap) for ids in store.id_columns)


def test_store_json_is_json(tmp_path: Path) -> None:
    made(tmp_path)
    (folder,) = tmp_path.iterdir()
    about = json.loads((folder / "store.json").read_text())
    assert about["pairs"] == len(PAIRS)
