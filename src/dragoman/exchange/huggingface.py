"""A Transformer as `transformers` holds it: MarianMT where the norm comes after, Pegasus where it comes before.

Both lay sines and cosines in halves, where ours take turns. So the features of the model are put into their order,
through every weight that reads or writes them; no number changes.

Shapes   C model width   I inner width   V vocabulary   P places
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dragoman.config import Recipe
from dragoman.exchange.held import Holds, check_widths, held, write_json
from dragoman.exchange.huggingface_tokenizer import save_tokenizer
from dragoman.models.transformer import DecoderLayer, EncoderLayer, Stack, Transformer
from dragoman.nn.position import sinusoids
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import BOS, EOS, PAD, UserError

NAME = "Hugging Face"
PLACES = 1024  # that its table of sinusoids has at least
HOLDS: Holds = {
    "norm": ("layer",),
    "activation": ("relu", "gelu"),
    "position": ("sinusoidal",),
    "attention": ("full",),
    "decoder_attention": ("full",),
    "residual": (True,),
    "projections": (True,),
    "scaled": (True,),
}


class Weight(NamedTuple):
    """A tensor of ours, or a part of one, and what it is called there; `axis` is the one that counts features."""

    name: str
    tensor: Tensor
    axis: int | None


def halves(width: int) -> Tensor:
    """Ours in their order: first the features that a sine is added to, then those of the cosines."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def theirs(weight: Weight, order_C: Tensor) -> Tensor:
    """As they hold it. With the inverse order, what they hold as we do."""
    tensor = weight.tensor.detach().float().cpu()
    return tensor.clone() if weight.axis is None else tensor.index_select(weight.axis, order_C)


def weights(model: Transformer) -> Iterator[Weight]:
    """Every weight of the model with its name there: the table that export and import both read."""
    yield from in_stack("model.encoder.", model.encoder)
    yield from in_stack("model.decoder.", model.decoder)
    source, target = model.encoder.embedding.weight, model.decoder.embedding.weight
    if source is target:
        yield Weight("model.shared.weight", target, 1)
    else:
        yield Weight("model.encoder.embed_tokens.weight", source, 1)
        yield Weight("model.decoder.embed_tokens.weight", target, 1)
    if model.project.weight is not target:
        yield Weight("lm_head.weight", model.project.weight, 1)


def in_stack(prefix: str, stack: Stack) -> Iterator[Weight]:
    if stack.settings.norm_place == "pre":
        yield from both(f"{prefix}layer_norm.", stack.norm)
    for number, layer in enumerate(stack.layers):
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        yield from in_layer(f"{prefix}layers.{number}.", layer)


def in_layer(prefix: str, layer: EncoderLayer | DecoderLayer) -> Iterator[Weight]:
    own = layer.attention.sublayer
    yield from parts(f"{prefix}self_attn.", own.query_key_value, "q_proj.", "k_proj.", "v_proj.")
    yield from both(f"{prefix}self_attn.out_proj.", own.out)
    yield from both(f"{prefix}self_attn_layer_norm.", layer.attention.norm)
    if isinstance(layer, DecoderLayer):
        assert layer.cross
        cross = layer.cross.sublayer
        yield from parts(f"{prefix}encoder_attn.", cross.query, "q_proj.")
        yield from parts(f"{prefix}encoder_attn.", cross.key_value, "k_proj.", "v_proj.")
        yield from both(f"{prefix}encoder_attn.out_proj.", cross.out)
        yield from both(f"{prefix}encoder_attn_layer_norm.", layer.cross.norm)
    assert layer.feedforward
    yield from parts(prefix, layer.feedforward.sublayer.wide, "fc1.")
    yield from both(f"{prefix}fc2.", layer.feedforward.sublayer.narrow)
    yield from both(f"{prefix}final_layer_norm.", layer.feedforward.norm)


def both(prefix: str, module: Any) -> Iterator[Weight]:
    """Of what writes features: weight and bias count them along the first axis."""
    yield Weight(f"{prefix}weight", module.weight, 0)
    yield Weight(f"{prefix}bias", module.bias, 0)


def parts(prefix: str, product: Any, *names: str) -> Iterator[Weight]:
    """Of a product that reads features, cut into as many products as there are names."""
    for name, weight, bias in zip(names, product.weight.chunk(len(names)), product.bias.chunk(len(names)), strict=True):
        yield Weight(f"{prefix}{name}weight", weight, 1)
        yield Weight(f"{prefix}{name}bias", bias, None)


def checked(model: nn.Module) -> Transformer:
    transformer = held(model, HOLDS, NAME)
    check_widths(transformer.settings, NAME)
    if transformer.settings.norm_place == "pre" and transformer.encoder.embedding is not transformer.decoder.embedding:
        raise UserError(
            "model.norm_place=pre with two tables of embeddings cannot be exported to Hugging Face: Pegasus has one; "
            "train with tokenizer.joint=true and model.tied=true, or with model.norm_place=post"
        )
    return transformer


def save(model: nn.Module, tokenizers: Tokenizers, recipe: Recipe, folder: Path, longest: int) -> list[str]:
    """A folder that `transformers` opens; back comes what it cannot hold, for people to read."""
    transformer = checked(model)
    if tokenizers.tags:
        raise UserError(
            f"Hugging Face's tokenizers have no place for tags ({', '.join(tokenizers.tags)}), which are no text; "
            "export to ctranslate2 or onnx"
        )
    order_C = halves(transformer.settings.width)
    tensors = {weight.name: theirs(weight, order_C) for weight in weights(transformer)}
    places = max(PLACES, 1 + answer_length(recipe, longest))
    if transformer.settings.norm_place == "pre":  # Pegasus misses them where MarianMT makes them itself
        for side in ("encoder", "decoder"):
            waves_PC = sinusoids(torch.arange(places), transformer.settings.width)
            tensors[f"model.{side}.embed_positions.weight"] = waves_PC.index_select(1, order_C)
    tensors["final_logits_bias"] = torch.zeros(1, len(transformer.project.weight))
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    write_json(folder / "config.json", configuration(transformer, places, longest))
    write_json(folder / "generation_config.json", generation(recipe, longest))
    return save_tokenizer(tokenizers, folder, places)


def answer_length(recipe: Recipe, longest: int) -> int:
    return int(recipe.search.max_ratio * longest) + recipe.search.max_extra + 1


def configuration(model: Transformer, places: int, longest: int) -> dict[str, Any]:
    settings = model.settings
    post = settings.norm_place == "post"
    shared = model.encoder.embedding is model.decoder.embedding
    inner = model.encoder.layers[0].feedforward.sublayer.wide.out_features  # type: ignore[union-attr]
    config = {
        "architectures": ["MarianMTModel" if post else "PegasusForConditionalGeneration"],
        "model_type": "marian" if post else "pegasus",
        "is_encoder_decoder": True,
        "vocab_size": len(model.encoder.embedding.weight),
        "d_model": settings.width,
        "encoder_layers": settings.encoder_depth,
        "decoder_layers": settings.decoder_depth,
        "encoder_attention_heads": settings.heads,
        "decoder_attention_heads": settings.heads,
        "encoder_ffn_dim": inner,
        "decoder_ffn_dim": inner,
        "activation_function": settings.activation,
        "dropout": settings.dropout,
        "scale_embedding": True,
        "max_position_embeddings": places,
        "tie_word_embeddings": settings.tied,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
        "longest_source": longest,  # that it was trained on: for the way back
        "dtype": "float32",
    }
    sides = {
        "share_encoder_decoder_embeddings": shared,
        "decoder_vocab_size": len(model.decoder.embedding.weight),
    }
    return {**config, **(sides if post else {})}


def generation(recipe: Recipe, longest: int) -> dict[str, Any]:
    """Our search, as far as they have it: one limit for all answers stands in for limits by the source's length."""
    search = recipe.search
    return {
        "num_beams": search.beam,
        "length_penalty": search.length_penalty,
        "early_stopping": search.beam > 1,
        "max_length": answer_length(recipe, longest) + 1,  # the begin mark is counted there
        "suppress_tokens": [PAD, BOS],
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }
