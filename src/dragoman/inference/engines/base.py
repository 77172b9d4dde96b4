"""What engines and export formats have in common.

`Engine` is the interface of everything that decodes. The rest is for the export to other libraries: the model settings
that they support and their names of weights (formats.yaml), vocabularies as lists, and templates of files.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from dragoman.config.settings import parse_yaml
from dragoman.data.tokenizers import SubwordTokenizer, Tokenizer
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import IndexedResults, SearchJob, SearchResult
from dragoman.errors import UserError
from dragoman.models.base import collect_weights
from dragoman.models.transformer import Transformer
from dragoman.types import SPECIALS

T = TypeVar("T")
SupportedValues = Mapping[str, Sequence[Any]]  # setting -> values that another library supports
TABLES = parse_yaml(Path(__file__).with_name("formats.yaml").read_text("utf-8"), "formats.yaml")
SUPPORTED_BY_LIBRARY: Mapping[str, SupportedValues] = TABLES["supported"]


class Engine(Protocol):
    """The interface of everything that decodes: a model and the library that runs it."""

    supports_terms: bool = True  # whether a search can require terms

    def iter_results(self, jobs: Sequence[SearchJob], search: SearchSettings) -> IndexedResults:
        """Yield the index of each job and up to `search.nbest` different results, best first; jobs in any order.

        Callers can process early results while an asynchronous engine still decodes other jobs.
        """
        ...

    def search(self, jobs: Sequence[SearchJob], search: SearchSettings) -> list[list[SearchResult]]:
        results = dict(self.iter_results(jobs, search))
        return [results[index] for index in range(len(jobs))]

    def run_model(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which uses the model outside of a search.

        An engine that many threads share limits how many of them do so at the same time.
        """
        return work()


class LayerModule(NamedTuple):
    """A module of a Transformer layer and its names in other libraries, which may split it (see formats.yaml)."""

    path: str
    huggingface: list[str]
    ctranslate2: list[str]
    axis: int  # of the weight: the one whose size is the model width


LAYER_MODULES = [LayerModule(**row) for row in TABLES["layer_modules"]]


def list_layer_modules(layer: nn.Module) -> Iterator[tuple[LayerModule, nn.Module]]:
    """Yield the modules of an encoder or decoder layer with their names in other libraries."""
    for names in LAYER_MODULES:
        if getattr(layer, names.path.partition(".")[0], None):  # an encoder layer has no cross-attention
            yield names, layer.get_submodule(names.path)


def require_exportable(model: nn.Module, library: str, *, equal_head_widths: bool = False) -> Transformer:
    """Return the model if the library supports its settings, or raise a UserError that names the setting.

    With `equal_head_widths`, the widths of queries and values must equal the model width.
    """
    if not isinstance(model, Transformer):
        settings = getattr(model, "settings", None)
        name = f"model.kind={settings.kind}" if settings else "an ensemble"
        raise UserError(f"{name} cannot be exported to {library}, which supports model.kind=transformer")
    supported = {**SUPPORTED_BY_LIBRARY[library]}
    if equal_head_widths:
        supported |= dict.fromkeys(("query_width", "value_width"), (model.settings.width, 0))  # 0: the model width
    for setting, choices in supported.items():
        value = getattr(model.settings, setting)
        if value not in choices:
            raise UserError(
                f"model.{setting}={format_setting(value)} cannot be exported to {library}, "
                f"which supports {' or '.join(map(format_setting, choices))}"
            )
    return model


def format_setting(value: object) -> str:
    """Return a value as users write it in a recipe (YAML)."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def list_vocabulary(tokenizer: Tokenizer, tags: Sequence[str] = ()) -> list[str]:
    """Return all tokens in the order of their ids, then the tags, which precede sources (such as languages).

    Other libraries need distinct tokens, so duplicates get a suffix. Subwords are spelled as in SentencePiece ("▁the").
    """
    if isinstance(tokenizer, SubwordTokenizer):
        tokens = dict.fromkeys(tokenizer.processor.id_to_piece(list(range(tokenizer.size))))
    else:
        tokens = dict.fromkeys(SPECIALS)
        for number in range(len(SPECIALS), tokenizer.size):
            token = tokenizer.ids_to_tokens([number])[0]
            while token in tokens:
                token += f"<{number}>"
            tokens[token] = None
    for tag in tags:
        while (token := f"<{tag}>") in tokens:
            tag += "'"
        tokens[token] = None
    return list(tokens)


def fingerprint_model(model: nn.Module, *values: object) -> str:
    """Return a digest of a model's weights and of further values that a conversion depends on, as a cache key."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=12)
    for name, tensor in sorted(collect_weights(model).items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def render_template(name: str, context: Mapping[str, object]) -> str:
    """Render a Jinja2 template of inference/templates/ as plain text, without HTML escaping."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("dragoman.inference")
    environment = Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"base_name": lambda path: Path(path).name or path, "quote": shlex.quote, "repr": repr}
    return environment.get_template(name).render(context)
