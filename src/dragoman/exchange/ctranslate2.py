"""A Transformer as CTranslate2 holds it: one specification, filled by hand, and the folder that is made of it.

Shapes   C model width   P places   V vocabulary   O outputs
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.config import pick
from dragoman.exchange.held import Holds, check_widths, held, source_vocabulary, vocabulary
from dragoman.models.transformer import DecoderLayer, EncoderLayer, Stack, Transformer
from dragoman.nn.attention import SelfAttention
from dragoman.nn.block import FeedForward, Residual, SwiGlu
from dragoman.nn.position import Learned, Relative, Sinusoidal, sinusoids
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import SPECIALS, UserError

NAME = "CTranslate2"
NARROW = 64  # the largest weight in 8 bits whose products cannot saturate: 2 * 255 * 64 < 2**15
PLACES = 4096  # of a table of sinusoids: the longest source and the longest answer, their marks counted
HOLDS: Holds = {
    "norm": ("layer", "rms"),
    "activation": ("relu", "gelu", "swiglu"),
    "position": ("none", "sinusoidal", "learned", "relative", "rotary"),
    "attention": ("full",),
    "decoder_attention": ("full",),
    "residual": (True,),
    "projections": (True,),
}
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swiglu": "SWISH"}
QUANTIZATIONS = {  # how weights are kept; CTranslate2 computes in the nearest that the machine can
    "float32": "as they were trained",
    "int8": "in 8 bits, the rest as it is",
    "int8_float32": "in 8 bits, the rest in 32",
    "int8_float16": "in 8 bits, the rest in 16",
    "int8_bfloat16": "in 8 bits, the rest in 16 with the range of 32",
    "int16": "in 16 bits, as integers",
    "float16": "in 16 bits",
    "bfloat16": "in 16 bits with the range of 32",
}


def library() -> Any:
    try:
        import ctranslate2
    except ImportError:
        raise UserError(
            "CTranslate2 is not installed; pip install 'dragoman[ctranslate2]' brings it, --engine torch needs nothing"
        ) from None
    return ctranslate2


def checked(model: nn.Module) -> Transformer:
    transformer = held(model, HOLDS, NAME)
    check_widths(transformer.settings, NAME)
    return transformer


def places(model: Transformer) -> int:
    """Tokens that a source or an answer may have, its mark counted."""
    return model.settings.most or PLACES


def save(
    model: nn.Module, tokenizers: Tokenizers, folder: Path, quantization: str, *, narrow_int8: bool = False
) -> None:
    """Write model and vocabularies into a folder that `ctranslate2.Translator` opens.

    With `narrow_int8`, weights of 8 bits are kept within 64, so that sums cannot saturate on a CPU without VNNI.
    """
    pick(QUANTIZATIONS, quantization, "quantization")
    spec = specification(checked(model), tokenizers)
    weights = weights_of(spec)
    spec.optimize(quantization)
    if narrow_int8 and quantization.startswith("int8"):
        narrow_weights(spec, weights)
    spec.save(str(folder))


def weights_of(spec: Any) -> dict[str, Any]:
    """Return a copy of each weight that can be quantised, as an array, by its name."""
    spec.validate()
    return {name: value.numpy().copy() for name, value in spec.variables().items() if name.endswith("/weight")}


def narrow_weights(spec: Any, weights: Mapping[str, Any]) -> None:
    """Quantise again what CTranslate2 has quantised to 127, given the weights by name as they were before.

    Its CPU libraries multiply unsigned inputs, at most 255, with these weights, and without VNNI add two products in 16
    signed bits. Weights within 64 leave room for that, see engines/packed.py.
    """
    spec_module = library().specs.model_spec

    def narrow(layer: Any, name: str, value: Any) -> None:
        if name not in weights or isinstance(value, str):  # not quantised, or the name of a weight that it shares
            return
        weight_OI = weights[name]
        scale_O = NARROW / np.maximum(np.abs(weight_OI).max(1), np.float32(1e-12))
        layer.weight = spec_module.NumpyVariable(np.rint(weight_OI * scale_O[:, None]).astype(np.int8))
        layer.weight_scale = spec_module.NumpyVariable(scale_O.astype(np.float32))

    spec_module.visit_spec(spec, narrow)


def specification(model: Transformer, tokenizers: Tokenizers) -> Any:
    """All weights in the places that CTranslate2 has for them."""
    specs, settings = library().specs, model.settings
    options = {
        "pre_norm": settings.norm_place == "pre",
        "activation": specs.Activation[ACTIVATIONS[settings.activation]],
        "relative_position": settings.position == "relative",
        "ffn_glu": settings.activation == "swiglu",
        "rms_norm": settings.norm == "rms",
        "rotary_dim": 0 if settings.position == "rotary" else None,  # 0: all of a head
        "rotary_interleave": True,  # even and odd are turned together
    }
    depth = settings.decoder_depth
    spec = specs.TransformerSpec(
        specs.TransformerEncoderSpec(settings.encoder_depth, settings.heads, **options),
        specs.TransformerDecoderSpec(
            depth,
            settings.heads,
            alignment_layer=settings.alignment_layer,
            alignment_heads=settings.heads,
            **options,
        ),
    )
    fill_stack(spec.encoder, model.encoder)
    fill_stack(spec.decoder, model.decoder)
    spec.encoder.embeddings[0].weight = number(model.encoder.embedding.weight)
    spec.decoder.embeddings.weight = number(model.decoder.embedding.weight[: model.spoken])
    spec.decoder.projection.weight = number(model.project.weight[: model.spoken])
    spec.register_source_vocabulary(source_vocabulary(tokenizers))
    spec.register_target_vocabulary(vocabulary(tokenizers.target))
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIALS[1:]
    spec.config.decoder_start_token, spec.config.add_source_eos = spec.config.bos_token, True
    return spec


def fill_stack(spec: Any, stack: Stack) -> None:
    if hasattr(spec, "position_encodings"):
        spec.position_encodings.encodings = place_table(stack)
    if stack.settings.norm_place == "pre":
        fill_norm(spec.layer_norm, stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        fill_attention(layer_spec.self_attention, layer.attention)
        if isinstance(layer, DecoderLayer):
            assert layer.cross
            fill_residual(layer_spec.attention, layer.cross)
            cross = layer.cross.sublayer
            fill_products(layer_spec.attention.linear, cross.query, cross.key_value, cross.out)
            set_scale(layer_spec.attention, scaled=stack.settings.scaled)
        assert layer.feedforward
        fill_feedforward(layer_spec.ffn, layer.feedforward)


def place_table(stack: Stack) -> Tensor:
    """What is added to embeddings, place by place. CTranslate2's own waves are laid out otherwise than ours."""
    width, embed = stack.settings.width, stack.position
    if isinstance(embed, Learned):
        table_PC: Tensor = number(embed.table.weight) * width**0.5
        return table_PC
    if isinstance(embed, Sinusoidal):
        return sinusoids(torch.arange(PLACES), width)
    return torch.zeros(PLACES, width)


def fill_attention(spec: Any, attention: Residual[SelfAttention]) -> None:
    own = attention.sublayer
    fill_residual(spec, attention)
    fill_products(spec.linear, own.query_key_value, own.out)
    set_scale(spec, scaled=own.settings.scaled)
    if isinstance(own.relate, Relative):
        spec.relative_position_keys = number(own.relate.key_RD)
        spec.relative_position_values = number(own.relate.value_RD)


def set_scale(spec: Any, *, scaled: bool) -> None:
    if not scaled:
        spec.queries_scale = 1.0


def fill_feedforward(spec: Any, feedforward: Residual[FeedForward]) -> None:
    own = feedforward.sublayer
    fill_residual(spec, feedforward)
    if isinstance(own, SwiGlu):
        for half, place in enumerate((spec.linear_0, spec.linear_0_noact)):
            place.weight, place.bias = (number(each).chunk(2)[half] for each in (own.wide.weight, own.wide.bias))
    else:
        fill_products([spec.linear_0], own.wide)
    fill_products([spec.linear_1], own.narrow)


def fill_residual(spec: Any, residual: Residual[Any]) -> None:
    fill_norm(spec.layer_norm, residual.norm)


def fill_norm(spec: Any, norm: nn.Module) -> None:
    spec.gamma = number(norm.weight)
    if hasattr(spec, "beta"):
        spec.beta = number(norm.bias)


def fill_products(specs: list[Any], *products: Any) -> None:
    for spec, product in zip(specs, products, strict=True):
        spec.weight, spec.bias = number(product.weight), number(product.bias)


def number(tensor: Any) -> Tensor:
    """A copy, since CTranslate2 quantises in place."""
    out: Tensor = tensor.detach().float().cpu().clone()
    return out
