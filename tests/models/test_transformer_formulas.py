"""Transformers equal a computation from the formulas, with plain loops over layers, tokens and heads.

x, q, k and v are the vectors of one token. The sentence pair is alone in its batch.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dragoman.models.transformer import Transformer, TransformerSettings
from tolerance import assert_same
from toy_batch import examples, in_rows
from toy_models import SMALL_TRANSFORMER, build_small_model, find_refusal

VARIANTS: list[dict[str, Any]] = [
    {},
    {"biases": False},
    {"output_projection": False},
    {"output_projection": False, "biases": False, "query_width": 4, "norm_place": "post"},
    {"projections": False, "biases": False},
    {"norm_epsilon": 0.5},
    *({"residual": residual} for residual in (False, "encoder", "decoder")),
    {"position": "sinusoidal_qkv"},
    {"position": "sinusoidal_qkv", "projections": False},
    {"position": "sinusoidal_qkv", "query_width": 4},
]


def apply_linear(linear: nn.Module, x: Tensor) -> Tensor:
    if isinstance(linear, nn.Identity):
        return x
    product = torch.stack([row @ x for row in linear.get_parameter("weight")])
    return product if linear.bias is None else product + linear.get_parameter("bias")


def make_wave(position: int, width: int) -> Tensor:
    """Return p_i, the sinusoids of a position."""
    angles = [position / 10_000 ** (2 * (i // 2) / width) for i in range(width)]
    return torch.tensor([math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angles)], dtype=torch.float64)


def attend(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], heads: int, *, causal: bool
) -> list[Tensor]:
    outputs = []
    for i, q in enumerate(queries):
        visible = range(i + 1 if causal else len(keys))
        parts = []
        for head in range(heads):
            q_h = q.chunk(heads)[head]
            scores = torch.stack([q_h @ keys[j].chunk(heads)[head] / math.sqrt(len(q_h)) for j in visible])
            weights = scores.exp() / scores.exp().sum()
            parts.append(sum((w * values[j].chunk(heads)[head] for w, j in zip(weights, visible)), torch.zeros(())))
        outputs.append(torch.cat(parts))
    return outputs


class Reference:
    """Computes the states of a model's encoder and decoder, token by token."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.settings = model, model.settings

    def normalize(self, norm: nn.Module, x: Tensor) -> Tensor:
        epsilon = self.settings.norm_epsilon or 1e-5
        centred = x - x.mean()
        return norm.get_parameter("weight") * centred / (centred.square().mean() + epsilon).sqrt() + norm.bias

    def attend_to_self(self, attention: Any, xs: list[Tensor], *, causal: bool) -> list[Tensor]:
        width, value_width = self.settings.query_width or self.settings.width, self.settings.width
        projected = [apply_linear(attention.query_key_value, x) for x in xs]
        parts = [p.split([width, width, value_width]) if self.settings.projections else (p, p, p) for p in projected]
        q, k, v = ([part[n] for part in parts] for n in range(3))
        if self.settings.position == "sinusoidal_qkv":
            q, k, v = ([x + make_wave(i, len(x)) for i, x in enumerate(vectors)] for vectors in (q, k, v))
        return [apply_linear(attention.out, out) for out in attend(q, k, v, self.settings.heads, causal=causal)]

    def attend_to_source(self, attention: Any, xs: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
        queries, width = (
            [apply_linear(attention.query, x) for x in xs],
            self.settings.query_width or self.settings.width,
        )
        pairs = [apply_linear(attention.key_value, h) for h in memory]
        keys, values = ([p[:width] for p in pairs], [p[width:] for p in pairs])
        if not self.settings.projections:
            keys = values = memory
        outs = attend(queries, keys, values, self.settings.heads, causal=False)
        return [apply_linear(attention.out, out) for out in outs]

    def run_stack(self, stack: Any, ids: list[int], memory: list[Tensor] | None) -> list[Tensor]:
        settings, causal = self.settings, memory is not None
        xs = [stack.embedding.weight[token] * settings.width**0.5 for token in ids]
        if settings.position == "sinusoidal":
            xs = [x + make_wave(i, settings.width) for i, x in enumerate(xs)]
        for layer in stack.layers:
            for part in (layer.attention, layer.cross, layer.feedforward):
                if part is None:
                    continue
                pre, inner = settings.norm_place == "pre", part.sublayer
                inputs = [self.normalize(part.norm, x) for x in xs] if pre else xs
                if part is layer.attention:
                    outs = self.attend_to_self(inner, inputs, causal=causal)
                elif part is layer.cross and memory is not None:
                    outs = self.attend_to_source(inner, inputs, memory)
                else:
                    outs = [apply_linear(inner.narrow, apply_linear(inner.wide, x).clamp(min=0)) for x in inputs]
                sides = {True: (False, True), False: (), "encoder": (False,), "decoder": (True,)}[settings.residual]
                xs = [x + out for x, out in zip(xs, outs)] if causal in sides else outs
                xs = xs if pre else [self.normalize(part.norm, x) for x in xs]
        return [self.normalize(stack.norm, x) for x in xs] if settings.norm_place == "pre" else xs


@torch.no_grad()
@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_a_transformer_equals_its_formulas(given: dict[str, Any]) -> None:
    model = build_small_model({**SMALL_TRANSFORMER, **given}).eval()
    assert isinstance(model, Transformer)
    batch, reference = in_rows([[0]], examples(1, seed=5)), Reference(model)
    memory = reference.run_stack(model.encoder, batch.source_BS[0].tolist(), None)
    states = reference.run_stack(model.decoder, batch.target_in_BT[0].tolist(), memory)
    assert_same(model(batch)[0], torch.stack(states), torch.float32)  # in which positions are computed


def test_without_biases_only_norms_have_them() -> None:
    model = build_small_model({**SMALL_TRANSFORMER, "biases": False})
    assert {name.split(".")[-2] for name, _ in model.named_parameters() if name.endswith("bias")} == {"norm"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_projection": False, "value_width": 4}, "model.output_projection=false needs values of the width"),
        (
            {"output_projection": False, "projections": False},
            "model.output_projection has no use in a model with model.p",
        ),
        (
            {"residual": "encoder", "kind": "lm"},
            "model.residual=encoder is a choice between the two sides of model.kind",
        ),
        ({"residual": "sometimes"}, "model.residual: should be 'encoder' or 'decoder' or a valid boolean"),
        ({"norm": "none", "norm_epsilon": 0.1}, "model.norm_epsilon has no use in model.norm=none"),
    ],
)
def test_settings_without_effect_are_refused(given: dict[str, Any], message: str) -> None:
    assert find_refusal({**SMALL_TRANSFORMER, **given}).startswith(message)
    assert TransformerSettings().biases
    assert TransformerSettings().output_projection
