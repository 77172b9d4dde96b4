"""Requests to search, over small step models and over small real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dragoman.config.settings import SearchSettings
from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.decoding.protocol import Ensemble
from dragoman.decoding.request import DecodingConstraints, Request, SpellingTable, Term
from dragoman.models.registry import build_model
from dragoman.types import EOS, Example
from toy_models import SMALL_RNN, SMALL_TRANSFORMER
from toy_sections import settings_of
from toy_steps import sources

REAL = ("transformer", "rnn", "ensemble")
SIZE = 8  # of the vocabulary: small enough to try everything
PIECES = [b""] * 4 + [b" a", b" b", b"a", b"b", b" ab", b"."]  # a vocabulary that can spell a text in several ways


def term(text: str, pieces: Sequence[bytes] = PIECES) -> Term:
    return SpellingTable(pieces).term(text, [text.encode()], before=True, after=True)


def spelt(ids: Sequence[int]) -> str:
    """A text for tokens: 4 is "a", 5 is "b", and so on."""
    return " ".join(chr(ord("a") + token - EOS - 1) for token in ids)


def asked(
    model: Any,
    firsts: Sequence[int],
    limits: Sequence[int],
    wishes: Sequence[DecodingConstraints] = (),
    **settings: Any,
) -> Request[Any]:
    given = wishes or [DecodingConstraints(text=str(first)) for first in firsts]
    source_BS, keep_BS = sources(*firsts)
    return Request(model, source_BS, keep_BS, torch.tensor(limits), SearchSettings(**settings), given, spelt)


def real(name: str, *, sharp: float = 3.0) -> Any:
    """A small model with weights drawn at random, sharp enough to prefer something."""
    if name == "ensemble":
        return Ensemble([real("transformer"), real("rnn")])
    section = SMALL_RNN if name == "rnn" else SMALL_TRANSFORMER
    torch.manual_seed(5)
    model = build_model(settings_of(section), source_size=SIZE, target_size=SIZE, joint=True).eval()
    with torch.no_grad():
        model.project.weight.mul_(sharp)
    return model


def real_sources(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, list[Example]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (count,), generator=generator).tolist()
    ids = [torch.randint(4, SIZE, (length,), generator=generator).numpy() for length in lengths]
    examples = [Example(some, some[:0], i) for i, some in enumerate(ids)]
    batch = collate_pairs(BatchPlan([[i] for i in range(count)], Widths(16, 1)), examples)
    return batch.source_BS, batch.source_segment_BS > 0, examples


def real_request(
    name: str, count: int, limit: int, wishes: Sequence[DecodingConstraints] = (), **settings: Any
) -> Request[Any]:
    source_BS, keep_BS, _ = real_sources(count)
    given = wishes or [DecodingConstraints(text=str(row)) for row in range(count)]
    return Request(
        real(name), source_BS, keep_BS, torch.full((count,), limit), SearchSettings(**settings), given, spelt
    )
