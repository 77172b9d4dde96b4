"""Small models and jobs for the tests of engines."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from dragoman.decoding.protocol import SearchJob
from dragoman.models.base import Seq2Seq
from dragoman.models.registry import build_model
from toy_sections import settings_of

SIZE = 40  # vocabulary size
TRANSFORMERS: list[dict[str, Any]] = [
    {},
    {"norm_place": "post"},
    {"position": "rotary"},
    {"position": "learned"},
    {"position": "relative"},
    {"decoder_attention": "local", "window": 3},
    {"query_width": 64, "value_width": 16},
    {"copying": True},
]
MODELS: list[dict[str, Any]] = [
    *TRANSFORMERS,
    {"kind": "rnn", "cell": "lstm", "attention": "additive"},
    {"kind": "rnn", "cell": "gru", "attention": "dot", "input_feeding": False},
    {"kind": "hybrid", "cell": "lstm"},
    {"kind": "rnn", "cell": "gru", "attention": "additive", "copying": True},
]


def model_of(**settings: Any) -> Seq2Seq:
    """Return a model with scaled random weights, whose outputs vary and sometimes end with EOS."""
    base: dict[str, Any] = {"kind": "transformer", "layers": 2, "width": 32, "dropout": 0.0, **settings}
    if base["kind"] != "rnn":
        base = {"heads": 2, **base}
    if base["kind"] == "hybrid":
        del base["layers"]
    torch.manual_seed(3)
    model = build_model(settings_of(base), source_size=SIZE, target_size=SIZE, joint=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    assert isinstance(model, Seq2Seq)
    return model.eval()


def random_jobs(count: int, size: int = SIZE, *, longest: int = 40) -> list[SearchJob]:
    random = Random(7)
    sources = [[random.randrange(4, size) for _ in range(random.randint(1, longest))] for _ in range(count)]
    return [SearchJob(ids, random.randint(1, len(ids) + 12)) for ids in sources]
