"""Small models with matching tokenizers, and the results of Dragoman's beam search, for tests of other engines."""

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
from dragoman.decoding.protocol import NEG_INF, SearchJob, SearchResult
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
    """Return a character tokenizer for both sides, with the vocabulary size of the toy models."""
    one = train_tokenizer([text], TokenizerSettings(kind="char", byte_fallback=False))
    assert one.size == len(text) + 4
    return Tokenizers(one, one)


def model_of(section: Section, **changes: Any) -> Transformer:
    """Return a model with varied outputs: larger embeddings give more peaked probabilities."""
    model = build_small_model({**SMALL_TRANSFORMER, **section, **changes}, dtype=torch.float32).eval()
    assert isinstance(model, Transformer)
    with torch.no_grad():
        model.decoder.embedding.weight.mul_(2)
    return model


def combinations(**menus: Sequence[Any]) -> list[Section]:
    """Return all combinations of one choice per menu. Switches that fit everything alternate between combinations."""
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
    """Return every choice of a Transformer setting that a format does not support, by its text in the message."""
    return {
        f"{name}={format_setting(choice)}": {name: choice}
        for name, menu in TRANSFORMER.items()
        for choice in menu
        if choice not in holds.get(name, menu)
        and (name, choice) != ("decoder_attention", "linformer")  # no model has it
    }


def make_jobs(count: int = 6, *, limit: int = 8, seed: int = 0) -> list[SearchJob]:
    """Return jobs with sources of random tokens; every other job has a higher length limit."""
    rng = np.random.default_rng(seed)
    return [
        SearchJob(rng.integers(4, VOCABULARY, rng.integers(1, 8)).tolist(), limit + i % 2 * 3) for i in range(count)
    ]


@dataclass
class WithoutMarks:
    """A model that masks <pad> and <s> before the softmax, as other engines do."""

    model: Transformer

    def start(self, *source: Any) -> Any:
        return self.model.start(*source)

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        logp_NV, state = self.model.step(token_N, state)
        logp_NV = logp_NV.clone()
        logp_NV[:, [PAD, BOS]] = NEG_INF
        return logp_NV.log_softmax(-1), state


def run_beam_search(model: Any, jobs: Sequence[SearchJob], search: SearchSettings) -> list[list[SearchResult]]:
    """Return the hypotheses of our own beam search, without an engine."""
    source_BS = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor([*job.ids, EOS]) for job in jobs], batch_first=True, padding_value=PAD
    )
    limit_B = torch.tensor([job.max_tokens for job in jobs])
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
    """Return a predictor with this model, as if it was loaded from a run folder."""
    recipe = Recipe(model=model.settings.model_dump(mode="json"))
    return Predictor(model, tokenizers or make_letter_tokenizers(), recipe, 9, torch.device("cpu"))
