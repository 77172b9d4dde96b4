"""Memory-mapped token ids of a corpus, written once per corpus and tokenizer and cached.

    FOLDER/source.ids  source.ends  target.ids  target.ends  store.json
    *.text  *.text_ends                                                     for sampling
    source.words  source.words_ends  source.trees  source.trees_ends        for models with tree positions

Pair i is ids[ends[i-1]:ends[i]]. A corpus may be larger than memory, because only the pages in use are held. A feature
of the source tokens (data/features.py) has two files: the values of tokens, and records that do not depend on them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dragoman.data.batches import EXAMPLE_FORMATS, ExampleFormat
from dragoman.data.features import FEATURES, FeatureRecord
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.io import digest_bytes, keep_folder
from dragoman.types import EOS, Example, Pair, TokenFeature

STORED_SIDES = ("source", "target")
ENCODED_TOGETHER = 8192  # pairs encoded at a time


class StoredColumn:
    """The concatenated values of all lines, and the end of each line."""

    def __init__(self, folder: Path, name: str, dtype: str, ends: str = "") -> None:
        self.values = map_array(folder / name, dtype)
        self.ends = map_array(folder / (ends or f"{name}_ends"), "int64")

    def __getitem__(self, line: int) -> NDArray[Any]:
        values: NDArray[Any] = self.values[self.ends[line - 1] if line else 0 : self.ends[line]].copy()
        return values

    def read(self, lines: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return the values of many lines, read at once."""
        last_N, length_N = self.ends[lines], self.lengths(lines)
        end_N = np.cumsum(length_N)
        flat = self.values[np.arange(length_N.sum()) + np.repeat(last_N - end_N, length_N)]
        return [flat[start:end] for start, end in zip((end_N - length_N).tolist(), end_N.tolist(), strict=True)]

    def lengths(self, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many values these lines have."""
        lengths: NDArray[np.int64] = self.ends[lines] - np.where(lines > 0, self.ends[lines - 1], 0)
        return lengths


def map_array(path: Path, dtype: str) -> NDArray[Any]:
    """Map a file as a plain array: slices of a memmap itself take half a kilobyte each."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.zeros(0, dtype)


class TokenStore:
    """Examples by number. `digest` identifies the content, so that a resumed run can check its data."""

    def __init__(self, folder: Path) -> None:
        try:
            about = json.loads((folder / "store.json").read_text(encoding="utf-8"))
            self.pairs: int = about["pairs"]
            self.digest: str = about["digest"]
            self.dropped: dict[str, int] = about["dropped"]
            self.longest: int = about["longest"]  # source tokens
            self.characters: int = about.get("characters", 0)  # of the targets, an end of line counted as one
            self.tag: str = about.get("tag", "")  # its ids precede those of every source
            self.ids = [StoredColumn(folder, f"{side}.ids", about["dtype"], f"{side}.ends") for side in STORED_SIDES]
            self.text = (
                [StoredColumn(folder, f"{side}.text", "uint8") for side in STORED_SIDES] if about["text"] else []
            )
            stored = {name: feature for name, feature in FEATURES.items() if feature.missing_key in about}
            self.missing = {name: int(about[feature.missing_key]) for name, feature in stored.items()}  # sentences
            self.features = {
                name: [StoredColumn(folder, f"source.{file}", "int32") for file in feature.files]
                for name, feature in stored.items()
            }
            self.columns = [*self.ids, *self.text, *(column for both in self.features.values() for column in both)]
            complete = all(len(c.ends) == self.pairs and c.ends[-1] == len(c.values) for c in self.columns)
        except (OSError, ValueError, KeyError):
            complete = False
        if not complete:
            raise UserError(
                f"the token ids in {str(folder)!r} are damaged; remove that folder, and they are made again"
            )

    def __len__(self) -> int:
        return self.pairs

    def example(self, line: int) -> Example:
        features = {name: TokenFeature(*(column[line] for column in both)) for name, both in self.features.items()}
        source, target = (ids[line] for ids in self.ids)
        return Example(source, target, line, features)

    def examples(self, lines: NDArray[np.int64]) -> list[Example]:
        """Return many examples, read at once."""
        if self.features:
            return [self.example(line) for line in lines.tolist()]
        return list(map(Example, *(ids.read(lines) for ids in self.ids), lines.tolist()))

    def record(self, feature: str, line: int) -> FeatureRecord:
        """Return what a feature keeps of a source whatever its tokens are."""
        return self.features[feature][1][line]

    def pair(self, line: int) -> Pair:
        """Return the text, where it is kept (to sample a new segmentation at every epoch)."""
        source, target = (text[line].tobytes().decode() for text in self.text)
        return Pair(source, target, tag=self.tag)

    def texts(self, lines: NDArray[np.int64]) -> list[list[bytes]]:
        """Return the texts of both sides of many lines, read at once, in UTF-8."""
        return [[text.tobytes() for text in side.read(lines)] for side in self.text]

    @property
    def text_length(self) -> int:
        """Return the number of tokens of all targets together, where they are one text."""
        return len(self.ids[1].values)

    def window(self, start: int, end: int) -> NDArray[Any]:
        """Return the target tokens from start to end, across lines."""
        window: NDArray[Any] = self.ids[1].values[start:end].copy()
        return window

    def lengths(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lengths of at most `most` examples spread over the corpus."""
        return self.lengths_of(np.unique(np.linspace(0, self.pairs - 1, most).astype(np.int64)))

    def lengths_of(self, lines: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lengths of the examples with these numbers."""
        source, target = (ids.lengths(lines) for ids in self.ids)
        return source, target

    def forget_pages(self) -> None:
        """Release the pages that were read; the operating system keeps them cached while it has memory."""
        for array in (array for column in self.columns for array in (column.values, column.ends)):
            if isinstance(array.base, np.memmap):
                array.base._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def open_store(
    pairs: Callable[[], Iterator[Pair]],
    tokenizers: Tokenizers,
    *,
    key: str,
    cache: Path,
    max_length: int,
    text: bool,
    features: Sequence[str] = (),
    form: str = "pairs",
    name: str = "the corpus",
) -> TokenStore:
    """Open the store of this corpus and tokenizer; write it if it is not cached. Errors call the corpus `name`."""
    # Stores of earlier versions are found by this key, so it must not change.
    parts = [key, tokenizers.fingerprint(), str(max_length), str(text), *([form] if form != "pairs" else [])]
    key = "|".join([*parts, *(FEATURES[feature].store_key for feature in features)])
    folder = cache / digest_bytes(key.encode(), size=12)

    def write(beside: Path) -> None:
        writer = StoreWriter(beside, tokenizers, EXAMPLE_FORMATS[form], max_length, text=text, features=features)
        with closing(writer):
            about = writer.write(pairs(), name)
        (beside / "store.json").write_text(json.dumps(about), encoding="utf-8")

    if not (folder / "store.json").exists():
        try:
            keep_folder(folder, "store.json", write)
        except OSError as error:
            raise UserError(
                f"token ids cannot be kept in {str(cache)!r} ({error.strerror}); "
                "free some room there or name another folder with data.cache=FOLDER"
            ) from None
    return TokenStore(folder)


class StoreWriter:
    """Writer of all files of a token store except store.json."""

    def __init__(
        self,
        folder: Path,
        tokenizers: Tokenizers,
        form: ExampleFormat,
        max_length: int,
        *,
        text: bool,
        features: Sequence[str],
    ) -> None:
        self.tokenizers, self.form, self.max_length = tokenizers, form, max_length
        self.dtype = "uint16" if max(tokenizers.sizes.values()) <= 2**16 else "uint32"
        self.digest = hashlib.blake2b(digest_size=16)
        self.ids = [ColumnWriter(folder, f"{side}.ids", f"{side}.ends") for side in STORED_SIDES]
        self.text = [ColumnWriter(folder, f"{side}.text") for side in STORED_SIDES] if text else []
        self.features = {
            name: [ColumnWriter(folder, f"source.{file}") for file in FEATURES[name].files] for name in features
        }
        self.missing = dict.fromkeys(features, 0)

    def close(self) -> None:
        for writer in (*self.ids, *self.text, *(one for both in self.features.values() for one in both)):
            writer.close()

    def write(self, pairs: Iterator[Pair], corpus: str) -> dict[str, Any]:
        """Write all pairs that the format does not refuse; return the content of store.json."""
        dropped: Counter[str] = Counter()
        count = seen = longest = characters = 0
        tag = ""
        while chunk := list(islice(pairs, ENCODED_TOGETHER)):
            seen += len(chunk)
            tag = chunk[0].tag  # of a corpus, and so of all its pairs
            encoded = self.encode(chunk)
            reasons = [self.form.refuse(s, t, self.max_length) for s, t in zip(*encoded, strict=True)]
            dropped.update(reason for reason in reasons if reason)
            usable = [i for i, reason in enumerate(reasons) if not reason]
            kept = [chunk[i] for i in usable]
            sources, targets = ([ids[i] for i in usable] for ids in encoded)
            if self.form.keeps_eos:
                targets = [[*ids, EOS] for ids in targets]
            self.write_ids(sources, targets)
            for side, writer in zip(STORED_SIDES, self.text):
                writer.write([getattr(pair, side).encode() for pair in kept])
            self.write_features(kept, sources)
            count += len(kept)
            longest = max([longest, *map(len, sources)])
            characters += sum(len(pair.target) + 1 for pair in kept)
        if not count:
            reasons = [f"{n} {reason}" for reason, n in dropped.items()] or ["nothing read"]
            raise UserError(
                f"{corpus}: none of {seen} {self.form.noun} can be used ({', '.join(reasons)}); check the files, or "
                "raise data.max_length"
            )
        about = {"pairs": count, "dtype": self.dtype, "digest": self.digest.hexdigest(), "dropped": dict(dropped)}
        missing = {FEATURES[name].missing_key: number for name, number in self.missing.items()}
        about |= {"text": bool(self.text), "longest": longest, "characters": characters, "tag": tag}
        return about | missing

    def encode(self, pairs: list[Pair]) -> tuple[list[list[int]], list[list[int]]]:
        """Encode both sides. A tag is put before its source, unless that is empty."""
        sources = [
            [*self.tokenizers.tag_ids(pair.tag), *ids] if ids and pair.tag else ids
            for pair, ids in zip(pairs, self.tokenizers.source.encode_all([pair.source for pair in pairs]), strict=True)
        ]
        return sources, self.tokenizers.target.encode_all([pair.target for pair in pairs])

    def write_ids(self, *sides: list[list[int]]) -> None:
        for writer, ids in zip(self.ids, sides, strict=True):
            arrays = [np.asarray(i, dtype=self.dtype) for i in ids]
            self.digest.update(np.asarray([len(a) for a in arrays], np.int64).tobytes())
            self.digest.update(np.concatenate([np.zeros(0, self.dtype), *arrays]).tobytes())
            writer.write(arrays)

    def write_features(self, pairs: list[Pair], ids: list[list[int]]) -> None:
        for name, writers in self.features.items():
            feature, tokenizer = FEATURES[name], self.tokenizers.source
            records = [feature.locate(pair) for pair in pairs]
            aligned = [
                feature.align(record, pair.source, i, tokenizer)
                for record, pair, i in zip(records, pairs, ids, strict=True)
            ]
            self.missing[name] += sum(not len(one.record) for one in aligned)
            columns: list[list[NDArray[Any]]] = [[one.values for one in aligned], records]
            for writer, arrays in zip(writers, columns, strict=True):
                self.digest.update(b"".join(map(bytes, arrays)))
                writer.write(arrays)


class ColumnWriter:
    """Writer of a StoredColumn."""

    def __init__(self, folder: Path, name: str, ends: str = "") -> None:
        self.values: IO[bytes] = (folder / name).open("wb")
        self.ends: IO[bytes] = (folder / (ends or f"{name}_ends")).open("wb")
        self.end = 0

    def write(self, lines: Sequence[NDArray[Any] | bytes]) -> None:
        ends = self.end + np.cumsum([len(line) for line in lines], dtype=np.int64)
        self.values.write(b"".join(map(bytes, lines)))
        self.ends.write(ends.tobytes())
        self.end = int(ends[-1]) if len(ends) else self.end

    def close(self) -> None:
        self.values.close()
        self.ends.close()
