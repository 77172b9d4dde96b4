"""The labels of a classifier, as a tokenizer: a label is one id, and there is nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from dragoman.config import TokenizerSettings
from dragoman.text.symbols import Tokenizer, to_json
from dragoman.types import UserError

MOST = 10_000  # labels; whoever has more has named the wrong column


class Labels(Tokenizer):
    """Ids are counted from 0, in the order of the labels' own letters; there are no marks among them."""

    lossless = False

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.ids = {name: i for i, name in enumerate(names)}
        self.size = len(self.names)

    @classmethod
    def train(cls, lines: Iterable[str], settings: TokenizerSettings | None = None) -> Labels:  # noqa: ARG003
        """Every label there is. Spaces around it do not count."""
        names: set[str] = set()
        for line in lines:
            names.add(line.strip())
            if len(names) > MOST:
                raise UserError(f"there are more than {MOST} different labels; check columns or keys of data.train")
        names.discard("")
        if len(names) < 2:
            only = f"only the label {min(names)!r}" if names else "no label at all"
            raise UserError(f"data.train has {only}, but a classifier needs two or more; check its columns or keys")
        return cls(sorted(names))

    def encode(self, text: str) -> list[int]:
        """The label's id; nothing, where it is not among the known ones."""
        found = self.ids.get(text.strip())
        return [] if found is None else [found]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.pieces(ids))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self.names[i] for i in ids]

    def content(self) -> bytes:
        return to_json({"labels": self.names})

    @classmethod
    def from_content(cls, content: bytes) -> Labels:
        return cls(json.loads(content)["labels"])
