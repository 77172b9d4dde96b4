"""Token stores: the token ids of a corpus in memory-mapped files, written once per corpus and tokenizer.

    FOLDER/source.ids  source.ends  target.ids  target.ends  store.json
    *.text  *.text_ends                                                     to sample new segmentations
    source.words  source.words_ends  source.trees  source.trees_ends        for models with tree positions

The tokens of line i are ids[ends[i-1]:ends[i]]; the other columns are stored likewise. A store may be larger than
memory, because the operating system loads only the pages in use. A feature of the source tokens (features.py) has two
columns: values of tokens, and annotations that do not depend on the tokenizer.

`open_store` returns the TokenStore of a corpus. If it is not cached, a StoreWriter writes it first.

Shapes   N examples
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.data.batches import EXAMPLE_FORMATS, ExampleFormat
from dragoman.data.context import STORED_SEPARATOR, encode_contexts
from dragoman.data.features import FEATURES, Annotation
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.io import create_folder_atomically, digest_bytes
from dragoman.types import EOS, Example, Pair, TokenFeature

STORED_SIDES = ("source", "target")
ENCODING_CHUNK = 8192  # number of pairs that are tokenized at a time


def name_ends_file(column: str) -> str:
    """Return the name of the file with the end of each line of a column."""
    side, kind = column.split(".")
    return f"{side}.ends" if kind == "ids" else f"{column}_ends"


class StoredColumn:
    """One column of a store: the concatenated values of all lines, and the end of each line in them."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.values = map_array(folder / name, dtype)
        self.ends = map_array(folder / name_ends_file(name), "int64")

    def read(self, lines: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return the values of each of these lines, gathered in a single indexing operation."""
        length_N = self.lengths(lines)
        end_N = np.cumsum(length_N)  # ends of the lines in `gathered`
        gathered = self.values[np.arange(length_N.sum()) + np.repeat(self.ends[lines] - end_N, length_N)]
        return [gathered[start:end] for start, end in pairwise([0, *end_N.tolist()])]

    def lengths(self, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self.ends[lines] - np.where(lines > 0, self.ends[lines - 1], 0)
        return lengths


def map_array(path: Path, dtype: str) -> NDArray[Any]:
    """Map a file into memory. The result is a plain array, because a slice of a np.memmap takes half a kilobyte."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.zeros(0, dtype)


def make_examples(
    sources: Sequence[NDArray[Any]],
    targets: Sequence[NDArray[Any]],
    lines: NDArray[np.int64],
    features: Mapping[str, Sequence[TokenFeature]],
) -> list[Example]:
    """Return one example per line, given both sides and, by name, the features of the sources."""
    features_N = [dict(zip(features, values, strict=True)) for values in zip(*features.values(), strict=True)]
    return list(map(Example, sources, targets, lines.tolist(), features_N or repeat({})))


class TokenStore:
    """The examples of a corpus by line number, as `open_store` returns them. `digest` identifies the content."""

    def __init__(self, folder: Path) -> None:
        try:
            metadata = json.loads((folder / "store.json").read_text(encoding="utf-8"))
            self.example_count: int = metadata["pairs"]
            self.digest: str = metadata["digest"]
            self.dropped_counts: dict[str, int] = metadata["dropped"]  # number of pairs left out, by reason
            self.longest_source: int = metadata["longest"]  # with its tag, without context
            self.documents: int = metadata.get("documents", 0)  # number of sources without context
            self.shortened_contexts: int = metadata.get("shortened", 0)  # number of contexts that did not fit in full
            self.characters: int = metadata.get("characters", 0)  # of all targets, including the ends of lines
            self.tag: str = metadata.get("tag", "")  # its ids precede those of every source
            self.id_columns = [StoredColumn(folder, f"{side}.ids", metadata["dtype"]) for side in STORED_SIDES]
            self.text_columns = [
                StoredColumn(folder, f"{side}.text", "uint8") for side in STORED_SIDES if metadata["text"]
            ]
            stored = {name: feature for name, feature in FEATURES.items() if feature.missing_key in metadata}
            # Number of sources for which a feature is unknown, by name of the feature.
            self.missing_counts = {name: int(metadata[feature.missing_key]) for name, feature in stored.items()}
            self.features = {
                name: [StoredColumn(folder, f"source.{column}", "int32") for column in feature.columns]
                for name, feature in stored.items()
            }
            self.columns = [*self.id_columns, *self.text_columns, *chain.from_iterable(self.features.values())]
            complete = all(len(c.ends) == self.example_count and c.ends[-1] == len(c.values) for c in self.columns)
        except (OSError, ValueError, KeyError):
            complete = False
        if not complete:
            raise UserError(
                f"the token ids in {str(folder)!r} are damaged; remove that folder, and they will be computed again"
            )

    def __len__(self) -> int:
        return self.example_count

    def read_example(self, line: int) -> Example:
        return self.read_examples(np.array([line]))[0]

    def read_examples(self, lines: NDArray[np.int64]) -> list[Example]:
        source, target = (ids.read(lines) for ids in self.id_columns)
        features = {
            name: list(map(TokenFeature, *(column.read(lines) for column in columns)))
            for name, columns in self.features.items()
        }
        return make_examples(source, target, lines, features)

    def read_annotations(self, feature: str, lines: NDArray[np.int64]) -> list[Annotation]:
        """Return the annotations of a feature for these sources, from which values of new tokens can be computed."""
        return self.features[feature][1].read(lines)

    def read_texts(self, lines: NDArray[np.int64]) -> list[list[bytes]]:
        """Return the texts of both sides in UTF-8, if the store has them to sample a new segmentation every epoch."""
        return [[text.tobytes() for text in side.read(lines)] for side in self.text_columns]

    @property
    def target_ids(self) -> NDArray[Any]:
        return self.id_columns[1].values

    def sample_lengths(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lengths of at most `count` examples at equal distances in the corpus."""
        return self.get_lengths(np.unique(np.linspace(0, self.example_count - 1, count).astype(np.int64)))

    def get_lengths(self, lines: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        source_N, target_N = (ids.lengths(lines) for ids in self.id_columns)
        return source_N, target_N

    def release_pages(self) -> None:
        """Release the mapped pages that were read. They stay in the page cache as long as there is free memory."""
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
    context: int = 0,
    example_format: str = "pairs",
    name: str = "the corpus",
) -> TokenStore:
    """Open the store of this corpus and tokenizer, and write it first if it is not cached.

    `key` identifies the corpus and `name` names it in messages. With `text`, the texts are stored too. Examples with
    more than `max_length` tokens on a side are left out; the context of a source, up to `context` sentences, is
    shortened instead.
    """
    # Stores that earlier versions wrote are found by this key, so its format must not change.
    parts = [key, tokenizers.fingerprint(), str(max_length), str(text)]
    parts += [example_format] if example_format != "pairs" else []
    parts += [FEATURES[feature].store_key for feature in features]
    parts += [f"context {context}"] if context else []
    folder = cache / digest_bytes("|".join(parts).encode(), size=12)

    def write(temporary: Path) -> None:
        with StoreWriter(temporary, tokenizers, text=text, features=features) as writer:
            metadata = writer.write(pairs(), EXAMPLE_FORMATS[example_format], max_length, name)
        (temporary / "store.json").write_text(json.dumps(metadata), encoding="utf-8")

    if not (folder / "store.json").exists():
        try:
            create_folder_atomically(folder, write=write, required_file="store.json")
        except OSError as error:
            raise UserError(
                f"token ids cannot be written to {str(cache)!r} ({error.strerror}); "
                "free disk space there, or choose another folder with data.cache=FOLDER"
            ) from None
    return TokenStore(folder)


class StoreWriter(ExitStack):
    """Writer of all files of a token store except store.json."""

    def __init__(self, folder: Path, tokenizers: Tokenizers, *, text: bool, features: Sequence[str]) -> None:
        super().__init__()
        self.tokenizers, self.has_text = tokenizers, text
        self.features = [FEATURES[name] for name in features]
        self.dtype = "uint16" if max(tokenizers.sizes.values()) <= 2**16 else "uint32"
        self.digest = hashlib.blake2b(digest_size=16)
        self.missing = {feature.missing_key: 0 for feature in self.features}  # number of sources without the feature
        columns = [f"{side}.{kind}" for kind in ("ids", *(["text"] if text else [])) for side in STORED_SIDES]
        columns += [f"source.{column}" for feature in self.features for column in feature.columns]
        names = [name for column in columns for name in (column, name_ends_file(column))]
        self.files = {name: self.enter_context((folder / name).open("wb")) for name in names}
        self.last_ends = dict.fromkeys(columns, 0)  # number of values written to each column

    def write(self, pairs: Iterator[Pair], format_: ExampleFormat, max_length: int, name: str) -> dict[str, Any]:
        """Write the pairs that need not be skipped; return the content of store.json. `name` is for messages."""
        dropped: Counter[str] = Counter()
        count = longest = characters = documents = shortened = 0
        tag = ""
        while chunk := list(islice(pairs, ENCODING_CHUNK)):
            tag = chunk[0].tag  # all pairs of a corpus have the same tag
            tag_ids, begin_ids = self.tokenizers.tag_ids(tag), self.tokenizers.target_tag_ids(tag)
            sources = self.tokenizers.source.encode_all([pair.source for pair in chunk])
            targets = self.tokenizers.target.encode_all([pair.target for pair in chunk])
            targets = [[*begin_ids, *ids] if begin_ids and ids else ids for ids in targets]
            context_budgets = [max_length - len(tag_ids) - len(ids) for ids in sources]  # in tokens
            contexts = encode_contexts(self.tokenizers, [pair.context for pair in chunk], context_budgets)
            kept: list[tuple[Pair, list[int], list[int]]] = []  # pair, source ids, target ids
            for pair, context, ids, target in zip(chunk, contexts, sources, targets, strict=True):
                source = [*tag_ids, *ids] if ids else ids
                if reason := format_.find_reason_to_skip(source, target, max_length):
                    dropped[reason] += 1
                    continue
                longest = max(longest, len(source))
                if pair.context:
                    source = [*tag_ids, *context, *ids]
                    separator = context[-1] if context else -1
                    shortened += context.count(separator) < len(pair.context)
                documents += not pair.context
                kept.append((pair, source, [*target, EOS] if format_.stores_eos else target))
            self.write_chunk(kept)
            count += len(kept)
            characters += sum(len(pair.target) + 1 for pair, _, _ in kept)
        if not count:
            reasons = [f"{number} {reason}" for reason, number in dropped.items()] or ["nothing read"]
            raise UserError(
                f"{name}: none of {dropped.total()} {format_.noun} can be used ({', '.join(reasons)}); "
                "check the files, or raise data.max_length"
            )
        metadata = {"pairs": count, "dtype": self.dtype, "digest": self.digest.hexdigest(), "dropped": dict(dropped)}
        metadata |= {"text": self.has_text, "longest": longest, "characters": characters, "tag": tag}
        metadata |= {"documents": documents, "shortened": shortened}
        return metadata | self.missing

    def write_chunk(self, kept: list[tuple[Pair, list[int], list[int]]]) -> None:
        """Append pairs, given with the token ids of both sides, to all columns. The digest covers ids and features."""
        pairs = [pair for pair, _, _ in kept]
        sides = {"source": [source for _, source, _ in kept], "target": [target for _, _, target in kept]}
        columns: dict[str, Sequence[NDArray[Any] | bytes]] = {}
        for side, tokens in sides.items():
            ids = columns[f"{side}.ids"] = [np.asarray(line, dtype=self.dtype) for line in tokens]
            self.digest.update(np.asarray(list(map(len, ids)), np.int64).tobytes() + b"".join(map(bytes, ids)))
            if self.has_text:
                contexts = [pair.context if side == "source" else () for pair in pairs]
                columns[f"{side}.text"] = [
                    STORED_SEPARATOR.join(map(str.encode, [*context, getattr(pair, side)]))
                    for pair, context in zip(pairs, contexts, strict=True)
                ]
        for feature in self.features:
            annotations = [feature.make_annotation(pair) for pair in pairs]
            aligned = [
                feature.align_tokens(annotation, pair.source, source, self.tokenizers.source)
                for annotation, pair, source in zip(annotations, pairs, sides["source"], strict=True)
            ]
            self.missing[feature.missing_key] += sum(not len(annotation) for _, annotation in aligned)
            arrays_by_column: list[Sequence[NDArray[Any]]] = [[values for values, _ in aligned], annotations]
            for column, arrays in zip(feature.columns, arrays_by_column, strict=True):
                columns[f"source.{column}"] = arrays
                self.digest.update(b"".join(map(bytes, arrays)))
        for column, lines in columns.items():
            self.files[column].write(b"".join(map(bytes, lines)))
            ends = np.cumsum([self.last_ends[column], *map(len, lines)], dtype=np.int64)
            self.files[name_ends_file(column)].write(ends[1:].tobytes())
            self.last_ends[column] = int(ends[-1])
