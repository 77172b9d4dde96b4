"""Helpers of the export formats: checks of what a format can hold, vocabularies, fingerprints, JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dragoman.data.subword_tokenizers import SubwordTokenizer
from dragoman.data.tokenizers import Tokenizer, Tokenizers
from dragoman.errors import UserError
from dragoman.models.base import collect_tensors
from dragoman.models.settings import TransformerSettings
from dragoman.models.transformer import Transformer
from dragoman.types import SPECIALS

Holds = Mapping[str, Sequence[Any]]  # the values that a format can hold, by model setting


def check_holds(model: nn.Module, holds: Holds, name: str) -> Transformer:
    """Return the model if the format called `name` can hold it, or raise a UserError that names the setting."""
    if not isinstance(model, Transformer):
        settings = getattr(model, "settings", None)
        what = f"model.kind={settings.kind}" if settings else "what several runs say as one"
        raise UserError(f"{what} cannot be exported to {name}, which holds model.kind=transformer")
    settings = model.settings
    for setting, choices in holds.items():
        value = getattr(settings, setting)
        if value not in choices:
            raise UserError(
                f"model.{setting}={format_setting(value)} cannot be exported to {name}, "
                f"which holds {' or '.join(format_setting(choice) for choice in choices)}"
            )
    return model


def check_widths(settings: TransformerSettings, name: str) -> None:
    """Refuse query and value widths that differ from the model width, for formats that have one width."""
    for setting in ("query_width", "value_width"):
        value = getattr(settings, setting)
        if value not in (0, settings.width):
            raise UserError(
                f"model.{setting}={value} cannot be exported to {name}, which holds the width of the model, "
                f"{settings.width}"
            )


def format_setting(value: Any) -> str:
    """Return a value as a recipe writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def list_vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Return the subwords in the order of their ids, all different; SentencePiece's as SentencePiece writes them."""
    if isinstance(tokenizer, SubwordTokenizer):
        pieces: list[str] = tokenizer.processor.id_to_piece(list(range(tokenizer.size)))
        return pieces
    found = dict.fromkeys(SPECIALS)
    for number in range(len(SPECIALS), tokenizer.size):
        piece = tokenizer.pieces([number])[0]
        while piece in found:
            piece += f"<{number}>"
        found[piece] = None
    return list(found)


def list_source_vocabulary(tokenizers: Tokenizers) -> list[str]:
    """Return the subwords that a model reads, followed by its tags."""
    found = dict.fromkeys(list_vocabulary(tokenizers.source))
    for tag in tokenizers.tags:
        while (piece := f"<{tag}>") in found:
            tag += "'"
        found[piece] = None
    return list(found)


def fingerprint_model(model: nn.Module, *about: object) -> str:
    """Return a digest of a model's weights and of the values in `about`."""
    digest = hashlib.blake2b(repr(about).encode(), digest_size=12)
    for name, tensor in sorted(collect_tensors(model).items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
