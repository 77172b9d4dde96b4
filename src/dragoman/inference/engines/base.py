"""Shared by engines and export formats: protocols, checks of the model, vocabularies, names of weights."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from dragoman.data.tokenizers import SubwordTokenizer, Tokenizer
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import Job, SearchResult
from dragoman.errors import UserError
from dragoman.models.base import collect_tensors
from dragoman.models.transformer import Transformer
from dragoman.types import SPECIALS

SupportedValues = Mapping[str, Sequence[Any]]  # model setting -> values that an export format supports


class Engine(Protocol):
    """Decode jobs with a model, whatever library runs it."""

    def iter_results(self, jobs: Sequence[Job], search: SearchSettings) -> Iterator[tuple[int, list[SearchResult]]]:
        """Yield the index of each job and up to `search.nbest` different results, best first; jobs in any order.

        Callers can process early results while an asynchronous engine still decodes other jobs.
        """
        ...

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[SearchResult]]:
        """Return the results of all jobs, in the order of the jobs."""
        results = dict(self.iter_results(jobs, search))
        return [results[index] for index in range(len(jobs))]


class LayerModule(NamedTuple):
    """A module of a Transformer layer and its names in other libraries, which may split it into several modules.

    `axis` is the axis of its weight whose size is the model width: 0 for the outputs, 1 for the inputs.
    """

    path: str
    huggingface: str
    ctranslate2: str
    axis: int


LAYER_MODULES = [
    LayerModule(
        "attention.sublayer.query_key_value",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attention.linear.0",
        axis=1,
    ),
    LayerModule("attention.sublayer.out", "self_attn.out_proj", "self_attention.linear.1", axis=0),
    LayerModule("attention.norm", "self_attn_layer_norm", "self_attention.layer_norm", axis=0),
    LayerModule("cross.sublayer.query", "encoder_attn.q_proj", "attention.linear.0", axis=1),
    LayerModule("cross.sublayer.key_value", "encoder_attn.k_proj encoder_attn.v_proj", "attention.linear.1", axis=1),
    LayerModule("cross.sublayer.out", "encoder_attn.out_proj", "attention.linear.2", axis=0),
    LayerModule("cross.norm", "encoder_attn_layer_norm", "attention.layer_norm", axis=0),
    LayerModule("feedforward.sublayer.wide", "fc1", "ffn.linear_0 ffn.linear_0_noact", axis=1),
    LayerModule("feedforward.sublayer.narrow", "fc2", "ffn.linear_1", axis=0),
    LayerModule("feedforward.norm", "final_layer_norm", "ffn.layer_norm", axis=0),
]


def list_layer_modules(layer: nn.Module) -> Iterator[tuple[LayerModule, nn.Module]]:
    """Yield the modules of an encoder or decoder layer with their names in other libraries."""
    for names in LAYER_MODULES:
        if getattr(layer, names.path.partition(".")[0], None):  # an encoder layer has no cross-attention
            yield names, layer.get_submodule(names.path)


def require_exportable(
    model: nn.Module, supported: SupportedValues, name: str, *, equal_head_widths: bool = False
) -> Transformer:
    """Return the model if the format called `name` supports it, or raise a UserError that names the setting.

    With `equal_head_widths`, the widths of queries and values must equal the model width.
    """
    if not isinstance(model, Transformer):
        kind = getattr(model, "settings", None)
        what = f"model.kind={kind.kind}" if kind else "an ensemble"
        raise UserError(f"{what} cannot be exported to {name}, which supports model.kind=transformer")
    settings = model.settings
    for setting, choices in supported.items():
        value = getattr(settings, setting)
        if value not in choices:
            raise UserError(
                f"model.{setting}={format_setting(value)} cannot be exported to {name}, "
                f"which supports {' or '.join(map(format_setting, choices))}"
            )
    for setting in ("query_width", "value_width") if equal_head_widths else ():
        value = getattr(settings, setting)
        if value not in (0, settings.width):
            raise UserError(
                f"model.{setting}={value} cannot be exported to {name}, which supports only the model width, "
                f"{settings.width}"
            )
    return model


def format_setting(value: object) -> str:
    """Return a value as it is written in a recipe (YAML)."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def list_vocabulary(tokenizer: Tokenizer, tags: Sequence[str] = ()) -> list[str]:
    """Return the tokens in the order of their ids, then the tags. Duplicates are made unique by a suffix.

    Tokens of SentencePiece keep its spelling, such as "▁the".
    """
    if isinstance(tokenizer, SubwordTokenizer):
        tokens = dict.fromkeys(tokenizer.processor.id_to_piece(list(range(tokenizer.size))))
    else:
        tokens = dict.fromkeys(SPECIALS)
        for number in range(len(SPECIALS), tokenizer.size):
            piece = tokenizer.pieces([number])[0]
            while piece in tokens:
                piece += f"<{number}>"
            tokens[piece] = None
    for tag in tags:
        while (piece := f"<{tag}>") in tokens:
            tag += "'"
        tokens[piece] = None
    return list(tokens)


def fingerprint_model(model: nn.Module, *about: object) -> str:
    """Return a digest of a model's weights and of the values in `about`."""
    digest = hashlib.blake2b(repr(about).encode(), digest_size=12)
    for name, tensor in sorted(collect_tensors(model).items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def render_template(name: str, context: Mapping[str, object]) -> str:
    """Render a file of inference/templates/ without HTML escaping."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("dragoman.inference")
    environment = Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"base_name": lambda path: Path(path).name or path, "quote": shlex.quote, "repr": repr}
    return environment.get_template(name).render(context)
