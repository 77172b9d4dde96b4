"""What a search is asked: some sentences of one grid, what may be said to each, and how to look.

Shapes   B sentences   S source width
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from dragoman.config import SearchSettings
from dragoman.search.beam import Beams
from dragoman.search.step import S, StepModel
from dragoman.search.terms import Term


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of the answer to one sentence, beyond that it be likely."""

    prefix: tuple[int, ...] = ()  # tokens that it begins with
    must: tuple[Term, ...] = ()  # terms that appear in it
    avoid: tuple[Term, ...] = ()  # terms that do not
    minimum: int = 0  # tokens that it has at least, its end mark not counted
    text: str = ""  # of the source: what is drawn for a sentence depends on it, and not on its place in a batch

    @property
    def asks(self) -> bool:
        """Whether anything is asked at all."""
        return bool(self.prefix or self.must or self.avoid or self.minimum)


@dataclass(frozen=True)
class Request(Generic[S]):
    """Sentences side by side. `limit_B` is the most tokens an answer may have, its end mark counted; 0: no answer."""

    model: StepModel[S]
    source_BS: Tensor
    keep_BS: Tensor
    limit_B: Tensor
    settings: SearchSettings
    wishes: Sequence[Wish]
    decode: Callable[[Sequence[int]], str]  # the text that tokens spell
    watch: Callable[[Beams], None] | None = None  # is shown the beams of a beam search after every step

    @property
    def device(self) -> torch.device:
        return self.source_BS.device

    @property
    def longest(self) -> int:
        return max(self.limit_B.tolist(), default=0)

    def only(self, chosen: Sequence[bool]) -> Request[S]:
        """The same grid, with answers for these rows alone: shapes stay, so answers do not change."""
        keep_B = torch.tensor(list(chosen), device=self.device)
        return replace(self, limit_B=torch.where(keep_B, self.limit_B, 0))


def key_of(seed: int, text: str, number: int) -> list[int]:
    """What the draws for the `number`-th sample of a sentence are made from."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
    return [seed, number, *memoryview(digest).cast("I")]
