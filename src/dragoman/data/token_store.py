"""Memory-mapped token ids of a corpus, written once per corpus and tokenizer and cached.

    FOLDER/source.ids  source.ends  target.ids  target.ends  store.json     (and *.text, *.text_ends for sampling)
    source.words  source.words_ends  source.trees  source.trees_ends     for models with tree positions

Pair i is ids[ends[i-1]:ends[i]]. A corpus may be larger than memory, because only the pages in use are held. `words` is
the word of the dependency tree that each token belongs to; `trees` holds where each word begins among the letters of
the text, and its head.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dragoman.data.batches import EXAMPLE_FORMATS
from dragoman.data.tokenizers import Tokenizer, Tokenizers
from dragoman.data.trees import TextTree, link_tokens, locate_words
from dragoman.errors import UserError
from dragoman.io import digest_bytes, keep_folder
from dragoman.types import EOS, Example, Pair, TokenTree

STORED_SIDES = ("source", "target")
TREE_COLUMNS = ("words", "trees")
ENCODED_TOGETHER = 8192  # pairs encoded at a time


class TokenStore:
    """Examples by number. `digest` identifies the content, so that a resumed run can check its data."""

    def __init__(self, folder: Path) -> None:
        try:
            self._open(folder)
            whole = all(
                len(ends) == self.pairs and ends[-1] == len(values)
                for values, ends in zip(
                    (*self.ids, *self.text, *self.trees), (*self.ends, *self.text_ends, *self.tree_ends), strict=True
                )
            )
        except (OSError, ValueError, KeyError):
            whole = False
        if not whole:
            raise UserError(
                f"the token ids in {str(folder)!r} are damaged; remove that folder, and they are made again"
            )

    def _open(self, folder: Path) -> None:
        about = json.loads((folder / "store.json").read_text(encoding="utf-8"))
        self.pairs: int = about["pairs"]
        self.digest: str = about["digest"]
        self.dropped: dict[str, int] = about["dropped"]
        self.longest: int = about["longest"]  # source tokens
        self.characters: int = about.get("characters", 0)  # of the targets, an end of line counted as one
        self.tag: str = about.get("tag", "")  # of every source: its ids stand before those of the text
        self.ids = [_open(folder / f"{side}.ids", about["dtype"]) for side in STORED_SIDES]
        self.ends = [_open(folder / f"{side}.ends", "int64") for side in STORED_SIDES]
        self.text = [_open(folder / f"{side}.text", "uint8") for side in STORED_SIDES] if about["text"] else []
        self.text_ends = (
            [_open(folder / f"{side}.text_ends", "int64") for side in STORED_SIDES] if about["text"] else []
        )
        self.treeless: int | None = about.get("treeless")  # sources without a usable tree; None: trees are not kept
        names = TREE_COLUMNS if self.treeless is not None else ()
        self.trees = [_open(folder / f"source.{name}", "int32") for name in names]
        self.tree_ends = [_open(folder / f"source.{name}_ends", "int64") for name in names]

    def __len__(self) -> int:
        return self.pairs

    def example(self, line: int) -> Example:
        source, target = (_slice(ids, ends, line).copy() for ids, ends in zip(self.ids, self.ends, strict=True))
        links = (
            TokenTree(_slice(self.trees[0], self.tree_ends[0], line).copy(), self.roots(line).heads)
            if self.trees
            else None
        )
        return Example(source, target, line, links)

    def examples(self, lines: NDArray[np.int64]) -> list[Example]:
        """Return many examples, read at once."""
        if self.trees:
            return [self.example(line) for line in lines.tolist()]
        sides = (_slices(ids, ends, lines) for ids, ends in zip(self.ids, self.ends, strict=True))
        return list(map(Example, *sides, lines.tolist()))

    def roots(self, line: int) -> TextTree:
        """Return the tree of a source, where trees are kept."""
        return TextTree(*_slice(self.trees[1], self.tree_ends[1], line).reshape(-1, 2).T.copy())

    def pair(self, line: int) -> Pair:
        """Return the text, where it is kept (to sample a new segmentation at every epoch)."""
        source, target = (
            _slice(text, ends, line).tobytes().decode() for text, ends in zip(self.text, self.text_ends, strict=True)
        )
        return Pair(source, target, tag=self.tag)

    def texts(self, lines: NDArray[np.int64]) -> list[list[bytes]]:
        """Return the texts of both sides of many lines, read at once, in UTF-8."""
        sides = zip(self.text, self.text_ends, strict=True)
        return [[text.tobytes() for text in _slices(text, ends, lines)] for text, ends in sides]

    @property
    def text_length(self) -> int:
        """Return the number of tokens of all targets together, where they are one text."""
        return len(self.ids[1])

    def window(self, start: int, end: int) -> NDArray[Any]:
        """Return the target tokens from start to end, across lines."""
        window: NDArray[Any] = self.ids[1][start:end].copy()
        return window

    def lengths(self, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lengths of at most `most` examples spread over the corpus."""
        return self.lengths_of(np.unique(np.linspace(0, self.pairs - 1, most).astype(np.int64)))

    def lengths_of(self, lines: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lengths of the examples with these numbers."""
        source, target = (e[lines] - np.where(lines > 0, e[lines - 1], 0) for e in self.ends)
        return source, target

    def forget_pages(self) -> None:
        """Release the pages that were read; the operating system keeps them cached while it has memory."""
        for array in (*self.ids, *self.ends, *self.text, *self.text_ends, *self.trees, *self.tree_ends):
            if isinstance(array.base, np.memmap):
                array.base._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def _open(path: Path, dtype: str) -> NDArray[Any]:
    """Map a file as a plain array: slices of a memmap itself take half a kilobyte each."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.zeros(0, dtype)


def _slice(values: NDArray[Any], ends: NDArray[Any], line: int) -> NDArray[Any]:
    return values[ends[line - 1] if line else 0 : ends[line]]


def _slices(values: NDArray[Any], ends: NDArray[Any], lines: NDArray[np.int64]) -> list[NDArray[Any]]:
    last_N = ends[lines]
    length_N = last_N - np.where(lines > 0, ends[lines - 1], 0)
    end_N = np.cumsum(length_N)
    flat = values[np.arange(length_N.sum()) + np.repeat(last_N - end_N, length_N)]
    return [flat[start:end] for start, end in zip((end_N - length_N).tolist(), end_N.tolist(), strict=True)]


@dataclass(frozen=True)
class _Content:
    """What a store holds of a corpus."""

    tokenizers: Tokenizers
    form: str
    max_length: int
    text: bool
    trees: bool

    def key(self, corpus: str) -> str:
        """Return the cache key of the store. Stores of earlier versions are found by it, so it must not change."""
        form = f"|{self.form}" if self.form != "pairs" else ""
        trees = "|trees" if self.trees else ""
        return f"{corpus}|{self.tokenizers.fingerprint()}|{self.max_length}|{self.text}{form}{trees}"

    @property
    def dtype(self) -> str:
        return "uint16" if max(self.tokenizers.sizes.values()) <= 2**16 else "uint32"

    def encode(self, pairs: list[Pair]) -> tuple[list[list[int]], list[list[int]]]:
        """Encode both sides. A tag is put before its source, unless that is empty."""
        source, target = self.tokenizers.source, self.tokenizers.target
        sources = [
            [*self.tokenizers.before(pair.tag), *ids] if ids and pair.tag else ids
            for pair, ids in zip(pairs, source.encode_all([pair.source for pair in pairs]), strict=True)
        ]
        return sources, target.encode_all([pair.target for pair in pairs])


def open_store(
    pairs: Callable[[], Iterator[Pair]],
    tokenizers: Tokenizers,
    *,
    key: str,
    cache: Path,
    max_length: int,
    text: bool,
    trees: bool = False,
    form: str = "pairs",
    name: str = "the corpus",
) -> TokenStore:
    """Open the store of this corpus and tokenizer; write it if it is not cached. Errors call the corpus `name`."""
    content = _Content(tokenizers, form, max_length, text, trees)
    folder = cache / digest_bytes(content.key(key).encode(), size=12)

    def write(beside: Path) -> None:
        with ExitStack() as stack:
            about = _write(beside, stack, pairs(), content, name)
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


def _write(folder: Path, stack: ExitStack, pairs: Iterator[Pair], content: _Content, name: str) -> dict[str, Any]:
    """Write all files but store.json; return the content of that one."""
    form, dtype, text = EXAMPLE_FORMATS[content.form], content.dtype, content.text
    dropped: Counter[str] = Counter()
    digest = hashlib.blake2b(digest_size=16)
    writers = [stack.enter_context(closing(_Writer(folder, side, dtype, text, digest))) for side in STORED_SIDES]
    tree_writer = stack.enter_context(closing(_TreeWriter(folder, digest))) if content.trees else None
    count = seen = longest = characters = 0
    tag = ""
    while chunk := list(islice(pairs, ENCODED_TOGETHER)):
        seen += len(chunk)
        tag = chunk[0].tag  # of a corpus, and so of all its pairs
        encoded = content.encode(chunk)
        reasons = [form.refuse(s, t, content.max_length) for s, t in zip(*encoded, strict=True)]
        dropped.update(reason for reason in reasons if reason)
        usable = [i for i, reason in enumerate(reasons) if not reason]
        kept = [chunk[i] for i in usable]
        sources, targets = ([ids[i] for i in usable] for ids in encoded)
        if form.keeps_eos:
            targets = [[*ids, EOS] for ids in targets]
        for writer, ids, side in zip(writers, (sources, targets), STORED_SIDES, strict=True):
            writer.write(ids, [getattr(pair, side) for pair in kept])
        if tree_writer:
            tree_writer.write(kept, sources, content.tokenizers.source)
        count += len(kept)
        longest = max([longest, *map(len, sources)])
        characters += sum(len(pair.target) + 1 for pair in kept)
    if not count:
        raise UserError(
            f"{name}: none of {seen} {form.noun} can be used ({_said(dropped)}); check the files, or raise "
            "data.max_length"
        )
    about = {"pairs": count, "dtype": dtype, "digest": digest.hexdigest(), "dropped": dict(dropped)}
    treeless = {"treeless": tree_writer.treeless} if tree_writer else {}
    return about | {"text": text, "longest": longest, "characters": characters, "tag": tag} | treeless


def _said(dropped: Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in dropped.items()) or "nothing read"


class _Writer:
    """Writer of one side's ids, their ends and, if wanted, the text itself."""

    def __init__(self, folder: Path, side: str, dtype: str, text: bool, digest: Any) -> None:
        self.dtype, self.digest = dtype, digest
        self.streams = [
            _Stream(folder, side, "ids", "ends"),
            *([_Stream(folder, side, "text", "text_ends")] if text else []),
        ]

    def write(self, ids: list[list[int]], texts: list[str]) -> None:
        arrays = [np.asarray(i, dtype=self.dtype) for i in ids]
        lengths = [len(a) for a in arrays]
        self.digest.update(np.asarray(lengths, np.int64).tobytes())
        self.digest.update(np.concatenate([np.zeros(0, self.dtype), *arrays]).tobytes())
        self.streams[0].write([a.tobytes() for a in arrays], lengths)
        for stream in self.streams[1:]:
            raw = [t.encode() for t in texts]
            stream.write(raw, [len(r) for r in raw])

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


class _TreeWriter:
    """Writer of the trees of the sources, over their tokens and over their letters."""

    def __init__(self, folder: Path, digest: Any) -> None:
        self.digest, self.treeless = digest, 0
        self.streams = [_Stream(folder, "source", name, f"{name}_ends") for name in TREE_COLUMNS]

    def write(self, pairs: list[Pair], ids: list[list[int]], tokenizer: Tokenizer) -> None:
        roots = [locate_words(pair.tree, pair.source) for pair in pairs]
        links = [link_tokens(r, pair.source, i, tokenizer) for r, pair, i in zip(roots, pairs, ids, strict=True)]
        self.treeless += sum(not len(one.head) for one in links)
        columns: list[list[NDArray[Any]]] = [[one.word for one in links], [np.stack(r, 1).ravel() for r in roots]]
        for stream, arrays in zip(self.streams, columns, strict=True):
            raw = [array.tobytes() for array in arrays]
            stream.write(raw, [len(array) for array in arrays])
            self.digest.update(b"".join(raw))

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


class _Stream:
    def __init__(self, folder: Path, side: str, values: str, ends: str) -> None:
        self.values: IO[bytes] = (folder / f"{side}.{values}").open("wb")
        self.ends: IO[bytes] = (folder / f"{side}.{ends}").open("wb")
        self.end = 0

    def write(self, raw: list[bytes], lengths: list[int]) -> None:
        ends = self.end + np.cumsum(lengths, dtype=np.int64)
        self.values.write(b"".join(raw))
        self.ends.write(ends.tobytes())
        self.end = int(ends[-1]) if len(ends) else self.end

    def close(self) -> None:
        self.values.close()
        self.ends.close()
