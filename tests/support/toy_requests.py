"""Decoding requests for toy step models (toy_steps.py) and for small real models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.decoding.continuous_batching import run_batch
from dragoman.decoding.methods import Request, SearchSettings, decode
from dragoman.decoding.protocol import (
    DecodingConstraints,
    Ensemble,
    SearchJob,
    SearchResult,
    Term,
    TokenByteTable,
    forbid_invalid_tokens,
)
from dragoman.decoding.sentence_beam import SentenceBeam, SentenceSearches
from dragoman.models.registry import build_model
from dragoman.types import BOS, EOS, Example
from toy_models import SMALL_RNN, SMALL_TRANSFORMER
from toy_sections import settings_of
from toy_steps import sources

REAL = ("transformer", "rnn", "ensemble")
SIZE = 8  # vocabulary size, small enough for exhaustive search
PIECES = [b""] * 4 + [b" a", b" b", b"a", b"b", b" ab", b"."]  # a vocabulary that can spell a text in several ways


def term(text: str, pieces: Sequence[bytes] = PIECES) -> Term:
    return TokenByteTable(pieces).build_term(text, [text.encode()], before=True, after=True)


def spelt(ids: Sequence[int]) -> str:
    """Return the text of tokens: token 4 is "a", 5 is "b", and so on."""
    return " ".join(chr(ord("a") + token - EOS - 1) for token in ids)


def make_request(
    model: Any,
    source_BS: torch.Tensor,
    real_BS: torch.Tensor,
    limits: Sequence[int],
    constraints: Sequence[DecodingConstraints],
    watch: Callable[[Any], None] = lambda _: None,
    **settings: Any,
) -> Request:
    jobs = [SearchJob([], limit, constraint) for limit, constraint in zip(limits, constraints, strict=True)]
    run = partial(run_batch, model, source_BS, real_BS, observe=watch)
    return Request(jobs, SearchSettings(**settings), run, spelt)


def beam_search(
    model: Any,
    source_BS: torch.Tensor,
    real_BS: torch.Tensor,
    limit_B: torch.Tensor,
    *,
    width: int = 4,
    alpha: float = 1.0,
    norm: str = "length",
    **options: Any,
) -> list[list[SearchResult]]:
    """Run beam search on one batch; width 1 is greedy search."""
    constraints = [DecodingConstraints()] * len(limit_B)
    settings = {"beam": width, "length_penalty": alpha, "length_norm": norm, **options}
    return decode(make_request(model, source_BS, real_BS, limit_B.tolist(), constraints, **settings))


def take_likeliest(model: Any, source_BS: torch.Tensor, real_BS: torch.Tensor, limit: int) -> list[list[int]]:
    """Return the likeliest token at every step, without the search code: the tokens before EOS, at most `limit`."""
    state, token_B = model.start(source_BS, real_BS), torch.full((len(source_BS),), BOS)
    columns = []
    with torch.inference_mode():
        for _ in range(limit):
            logp_BV, state = model.step(token_B, state)
            token_B = forbid_invalid_tokens(logp_BV).argmax(-1)
            columns.append(token_B.tolist())
    return [[*row, EOS][: [*row, EOS].index(EOS)] for row in zip(*columns, strict=True)]


def search_reference(request: Request) -> list[list[SearchResult]]:
    """Run the reference implementation of beam search."""
    settings = request.settings
    return request.run(request.jobs, partial(SentenceSearches, SentenceBeam, settings, settings.beam))


def make_toy_request(
    model: Any,
    firsts: Sequence[int],
    limits: Sequence[int],
    constraints: Sequence[DecodingConstraints] = (),
    **settings: Any,
) -> Request:
    given = constraints or [DecodingConstraints(seed_text=str(first)) for first in firsts]
    return make_request(model, *sources(*firsts), limits, given, **settings)


def real(name: str, *, sharp: float = 3.0) -> Any:
    """Return a small random model; `sharp` scales its logits, so that probabilities are not uniform."""
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
    name: str, count: int, limit: int, constraints: Sequence[DecodingConstraints] = (), **settings: Any
) -> Request:
    source_BS, real_BS, _ = real_sources(count)
    given = constraints or [DecodingConstraints(seed_text=str(row)) for row in range(count)]
    return make_request(real(name), source_BS, real_BS, [limit] * count, given, **settings)
