"""Small models with tokenizers that fit them, and what our own search answers: what other engines are measured by."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.data.tokenizers import Tokenizers, TokenizerSettings, train_tokenizer
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import NEVER, Job, SearchResult
from dragoman.inference.engines.base import SupportedValues, format_setting
from dragoman.inference.predictor import Predictor
from dragoman.models.transformer import Transformer
from dragoman.modules.feedforward import NORM_PLACES
from dragoman.recipe import Recipe
from dragoman.types import BOS, EOS, PAD
from toy_batch import VOCABULARY
from toy_models import SMALL_TRANSFORMER, TRANSFORMER, Section, build_small_model
from toy_requests import beam_search

LETTERS = (string.ascii_lowercase + string.digits)[: VOCABULARY - 4]


def make_letter_tokenizers(text: str = LETTERS) -> Tokenizers:
    """One vocabulary for both sides, as large as that of the toy models."""
    one = train_tokenizer([text], TokenizerSettings(kind="char", byte_fallback=False))
    assert one.size == len(text) + 4
    return Tokenizers(one, one)


def model_of(section: Section, **changes: Any) -> Transformer:
    """A model that says several different things: larger embeddings make it surer of itself."""
    model = build_small_model({**SMALL_TRANSFORMER, **section, **changes}, dtype=torch.float32).eval()
    assert isinstance(model, Transformer)
    with torch.no_grad():
        model.decoder.embedding.weight.mul_(2)
    return model


def combinations(**menus: Sequence[Any]) -> list[Section]:
    """All ways to choose one from each menu; the switches, which go with anything, take turns."""
    found: list[Section] = [{}]
    for name, menu in {**menus, "norm_place": [*NORM_PLACES]}.items():
        found = [{**section, name: choice} for section in found for choice in menu]
    return [
        {
            **section,
            "tied": bool(i // 2 & 1),
            "scaled": i % 3 > 0,
            "shared": i % 5 == 0,
            "encoder_layers": 1 + i // 3 % 2,
        }
        for i, section in enumerate(found)
    ]


def list_unsupported(holds: SupportedValues) -> dict[str, Section]:
    """Every choice of a Transformer that a format cannot hold, by the words that name it."""
    return {
        f"{name}={format_setting(choice)}": {name: choice}
        for name, menu in TRANSFORMER.items()
        for choice in menu
        if choice not in holds.get(name, menu) and (name, choice) != ("decoder_attention", "linformer")  # none has it
    }


def make_jobs(count: int = 6, *, limit: int = 8, seed: int = 0) -> list[Job]:
    """Sources of random tokens; every other one may be answered at more length."""
    rng = np.random.default_rng(seed)
    return [Job(rng.integers(4, VOCABULARY, rng.integers(1, 8)).tolist(), limit + i % 2 * 3) for i in range(count)]


@dataclass
class WithoutMarks:
    """The model as other engines see it: <pad> and <s> are out before probabilities are made."""

    model: Transformer

    def start(self, *source: Any) -> Any:
        return self.model.start(*source)

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        logp_NV, state = self.model.step(token_N, state)
        logp_NV = logp_NV.clone()
        logp_NV[:, [PAD, BOS]] = NEVER
        return logp_NV.log_softmax(-1), state


def run_beam_search(model: Any, jobs: Sequence[Job], search: SearchSettings) -> list[list[SearchResult]]:
    """Return the hypotheses of our own beam search, without an engine."""
    source_BS = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor([*job.ids, EOS]) for job in jobs], batch_first=True, padding_value=PAD
    )
    limit_B = torch.tensor([job.limit for job in jobs])
    return beam_search(
        model,
        source_BS,
        source_BS != PAD,
        limit_B,
        width=search.beam,
        nbest=search.nbest,
        alpha=search.length_penalty,
    )


def assert_same(ours: list[list[SearchResult]], theirs: list[list[SearchResult]], tolerance: float = 1e-4) -> None:
    assert [[one.tokens for one in some] for some in theirs] == [[one.tokens for one in some] for some in ours]
    for a, b in zip((one for some in ours for one in some), (one for some in theirs for one in some), strict=True):
        assert a.finished == b.finished
        assert abs(a.score - b.score) < tolerance
        assert abs(a.logp - b.logp) < tolerance * 20


def loaded_run(model: Any, tokenizers: Tokenizers | None = None) -> Predictor[Any]:
    """The model as if it came from a run folder."""
    recipe = Recipe(model=model.settings.model_dump(mode="json"))
    return Predictor(model, tokenizers or make_letter_tokenizers(), recipe, 9, torch.device("cpu"))
