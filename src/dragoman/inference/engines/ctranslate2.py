"""Export to CTranslate2, and CTranslate2 as an engine: the model is converted once into the user's cache.

Its beam search is ours with the stop rule "enough", so results are the same. Two things differ. It has one length limit
for all sentences of a call, see `CTranslate2Engine.iter_results`. And PAD and BOS, never generated, are removed
before probabilities are computed, not after: scores are higher by the little that a model gives to those two.

Shapes   C model width   P positions   V vocabulary   O outputs
"""

from __future__ import annotations

import math
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.config.settings import SampleSettings, SearchSettings, pick
from dragoman.data.tokenizers import Tokenizers
from dragoman.decoding.methods import METHODS, apply_fixed_settings
from dragoman.decoding.protocol import SearchResult
from dragoman.decoding.request import Job
from dragoman.errors import UserError
from dragoman.hardware import cpu_features
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.formats import (
    Holds,
    check_holds,
    check_widths,
    fingerprint_model,
    list_source_vocabulary,
    list_vocabulary,
)
from dragoman.io import keep_folder
from dragoman.models.transformer import Transformer, TransformerStack
from dragoman.modules.attention import SelfAttention
from dragoman.modules.feedforward import FeedForward, Residual, SwiGluFeedForward
from dragoman.modules.positions import Learned, Relative, Sinusoidal, make_sinusoids
from dragoman.types import BOS, EOS, PAD, SPECIALS

CTRANSLATE2 = "CTranslate2"
NARROW_INT8 = 64  # the largest weight in 8 bits whose products cannot saturate: 2 * 255 * 64 < 2**15
TABLE_POSITIONS = 4096  # of the table of sinusoids: the longest source and output, EOS included
CTRANSLATE2_HOLDS: Holds = {
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


def import_ctranslate2() -> Any:
    try:
        import ctranslate2
    except ImportError:
        raise UserError(
            "CTranslate2 is not installed; pip install 'dragoman[ctranslate2]' brings it, --engine torch needs nothing"
        ) from None
    return ctranslate2


def check_ctranslate2(model: nn.Module) -> Transformer:
    transformer = check_holds(model, CTRANSLATE2_HOLDS, CTRANSLATE2)
    check_widths(transformer.settings, CTRANSLATE2)
    return transformer


def max_positions(model: Transformer) -> int:
    """Return the most tokens that a source or an output may have, EOS included."""
    return model.settings.length_limit or TABLE_POSITIONS


def save_ctranslate2(
    model: nn.Module, tokenizers: Tokenizers, folder: Path, quantization: str, *, narrow_int8: bool = False
) -> None:
    """Write model and vocabularies into a folder that `ctranslate2.Translator` opens.

    With `narrow_int8`, weights of 8 bits are kept within 64, so that sums cannot saturate on a CPU without VNNI.
    """
    pick(QUANTIZATIONS, quantization, "quantization")
    spec = make_specification(check_ctranslate2(model), tokenizers)
    weights = copy_weights_by_name(spec)
    spec.optimize(quantization)
    if narrow_int8 and quantization.startswith("int8"):
        narrow_weights(spec, weights)
    spec.save(str(folder))


def copy_weights_by_name(spec: Any) -> dict[str, Any]:
    """Return a copy of each weight that can be quantised, as an array, by its name."""
    spec.validate()
    return {name: value.numpy().copy() for name, value in spec.variables().items() if name.endswith("/weight")}


def narrow_weights(spec: Any, weights: Mapping[str, Any]) -> None:
    """Quantise again what CTranslate2 has quantised to 127, given the weights by name as they were before.

    Its CPU libraries multiply unsigned inputs, at most 255, with these weights, and without VNNI add two products in 16
    signed bits. Weights within 64 leave room for that, see inference/engines/torch.py.
    """
    spec_module = import_ctranslate2().specs.model_spec

    def narrow(layer: Any, name: str, value: Any) -> None:
        if name not in weights or isinstance(value, str):  # not quantised, or the name of a weight that it shares
            return
        weight_OI = weights[name]
        scale_O = NARROW_INT8 / np.maximum(np.abs(weight_OI).max(1), np.float32(1e-12))
        layer.weight = spec_module.NumpyVariable(np.rint(weight_OI * scale_O[:, None]).astype(np.int8))
        layer.weight_scale = spec_module.NumpyVariable(scale_O.astype(np.float32))

    spec_module.visit_spec(spec, narrow)


def make_specification(model: Transformer, tokenizers: Tokenizers) -> Any:
    """Return CTranslate2's specification of the model, filled with its weights."""
    specs, settings = import_ctranslate2().specs, model.settings
    options = {
        "pre_norm": settings.norm_place == "pre",
        "activation": specs.Activation[ACTIVATIONS[settings.activation]],
        "relative_position": settings.position == "relative",
        "ffn_glu": settings.activation == "swiglu",
        "rms_norm": settings.norm == "rms",
        "rotary_dim": 0 if settings.position == "rotary" else None,  # 0: all of a head
        "rotary_interleave": True,  # even and odd features are rotated together
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
    spec.encoder.embeddings[0].weight = copy_float(model.encoder.embedding.weight)
    spec.decoder.embeddings.weight = copy_float(model.decoder.embedding.weight[: model.output_size])
    spec.decoder.projection.weight = copy_float(model.project.weight[: model.output_size])
    spec.register_source_vocabulary(list_source_vocabulary(tokenizers))
    spec.register_target_vocabulary(list_vocabulary(tokenizers.target))
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIALS[1:]
    spec.config.decoder_start_token, spec.config.add_source_eos = spec.config.bos_token, True
    return spec


def fill_stack(spec: Any, stack: TransformerStack) -> None:
    if hasattr(spec, "position_encodings"):
        spec.position_encodings.encodings = position_table(stack)
    if stack.settings.norm_place == "pre":
        fill_norm(spec.layer_norm, stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        fill_attention(layer_spec.self_attention, layer.attention)
        if layer.cross:
            fill_residual(layer_spec.attention, layer.cross)
            cross = layer.cross.sublayer
            fill_products(layer_spec.attention.linear, cross.query, cross.key_value, cross.out)
            set_scale(layer_spec.attention, scaled=stack.settings.scaled)
        assert layer.feedforward
        fill_feedforward(layer_spec.ffn, layer.feedforward)


def position_table(stack: TransformerStack) -> Tensor:
    """Return what is added to the embeddings at each position. CTranslate2 orders sinusoids differently from us."""
    width, embed = stack.settings.width, stack.position
    if isinstance(embed, Learned):
        table_PC: Tensor = copy_float(embed.table.weight) * width**0.5
        return table_PC
    if isinstance(embed, Sinusoidal):
        return make_sinusoids(torch.arange(TABLE_POSITIONS), width)
    return torch.zeros(TABLE_POSITIONS, width)


def fill_attention(spec: Any, attention: Residual[SelfAttention]) -> None:
    own = attention.sublayer
    fill_residual(spec, attention)
    fill_products(spec.linear, own.query_key_value, own.out)
    set_scale(spec, scaled=own.settings.scaled)
    if isinstance(own.relate, Relative):
        spec.relative_position_keys = copy_float(own.relate.key_RD)
        spec.relative_position_values = copy_float(own.relate.value_RD)


def set_scale(spec: Any, *, scaled: bool) -> None:
    if not scaled:
        spec.queries_scale = 1.0


def fill_feedforward(spec: Any, feedforward: Residual[FeedForward]) -> None:
    own = feedforward.sublayer
    fill_residual(spec, feedforward)
    if isinstance(own, SwiGluFeedForward):
        for half, linear in enumerate((spec.linear_0, spec.linear_0_noact)):
            linear.weight, linear.bias = (copy_float(each).chunk(2)[half] for each in (own.wide.weight, own.wide.bias))
    else:
        fill_products([spec.linear_0], own.wide)
    fill_products([spec.linear_1], own.narrow)


def fill_residual(spec: Any, residual: Residual[Any]) -> None:
    fill_norm(spec.layer_norm, residual.norm)


def fill_norm(spec: Any, norm: nn.Module) -> None:
    spec.gamma = copy_float(norm.weight)
    if hasattr(spec, "beta"):
        spec.beta = copy_float(norm.bias)


def fill_products(specs: list[Any], *products: Any) -> None:
    for spec, product in zip(specs, products, strict=True):
        spec.weight, spec.bias = copy_float(product.weight), copy_float(product.bias)


def copy_float(tensor: Any) -> Tensor:
    """Return a float32 copy on the CPU: CTranslate2 quantises in place."""
    out: Tensor = tensor.detach().float().cpu().clone()
    return out


CACHE_VERSION = 1  # raised when the same model is written differently
BATCH_ROWS = {"cpu": 32, "cuda": 256}  # sentences of a batch
QUEUED_BATCHES = 3  # per worker: an interrupted call waits for these
SUPPORTED_SETTINGS = {
    "method",
    "beam",
    "nbest",
    "length_penalty",
    "max_ratio",
    "max_extra",
    "scores",
}  # of the search settings
UNUSED_SETTINGS = {  # those of other methods, and those applied to the results
    *SampleSettings.model_fields, "seed", "samples", "candidates", "metric", "groups", "diversity", "unknown",
    "coverage",
}  # fmt: skip
TINY_PENALTY = 1e-30  # with a length penalty of 0 CTranslate2 stops earlier than our search


class PendingBatch(NamedTuple):
    """Indices of the jobs in a batch, and the futures of their results."""

    indices: list[int]
    futures: list[Any]
    is_retry: bool


class CTranslate2Engine(Engine):
    """The engine of one model, in one precision: float32, int8 or another of QUANTIZATIONS."""

    def __init__(
        self, folder: Path, model: Transformer, tokenizers: Tokenizers, *, device: torch.device, quantization: str
    ) -> None:
        self.max_tokens = max_positions(model)
        self.rows = BATCH_ROWS[device.type]
        threads = torch.get_num_threads()
        self.max_pending = QUEUED_BATCHES * (threads if device.type == "cpu" else 1)
        able = import_ctranslate2().get_supported_compute_types(device.type, device.index or 0)
        self.translator: Any = import_ctranslate2().Translator(
            str(folder),
            device=device.type,
            device_index=device.index or 0,
            compute_type=quantization if quantization in able else "default",
            max_queued_batches=-1,  # `iter_results` limits them itself
            **({"inter_threads": threads, "intra_threads": 1} if device.type == "cpu" else {}),
        )
        torch.set_num_threads(threads)  # CTranslate2 changes it
        self.source, self.target = list_source_vocabulary(tokenizers), list_vocabulary(tokenizers.target)
        self.target_ids = {piece: number for number, piece in enumerate(self.target)}

    @classmethod
    def of(
        cls, model: nn.Module, tokenizers: Tokenizers, *, cache: Path, device: torch.device, quantization: str
    ) -> CTranslate2Engine:
        """Return the engine of a model, which is converted into the cache unless it is there already.

        If the cache cannot be written, the model is converted into a temporary folder, which is removed after opening.
        """
        transformer = check_ctranslate2(model)
        make = partial(
            convert_cached,
            transformer,
            tokenizers,
            quantization=quantization,
            narrow_int8=needs_narrow_int8(device, quantization),
        )
        opened = partial(cls, model=transformer, tokenizers=tokenizers, device=device, quantization=quantization)
        try:
            folder = make(cache=cache.expanduser())
        except OSError:
            try:
                with tempfile.TemporaryDirectory() as spare:
                    return opened(make(cache=Path(spare)))
            except RuntimeError as error:
                raise UserError(
                    f"CTranslate2 cannot open the model in a temporary folder ({error}); use --engine torch"
                ) from None
            except OSError as error:
                raise UserError(
                    f"the model for CTranslate2 cannot be kept in {str(cache)!r}, nor in a temporary folder "
                    f"({error.strerror}); make room for it there, or use --engine torch"
                ) from None
        try:
            return opened(folder)
        except RuntimeError as error:
            raise UserError(
                f"CTranslate2 cannot open {str(folder)!r} ({error}); "
                "remove it, and it is made anew, or use --engine torch"
            ) from None

    def other_precision(self, quantization: str) -> str:
        """Return a note if CTranslate2 computes in another precision than the weights are stored in, else nothing."""
        computed = self.translator.compute_type
        if computed in (quantization, f"{quantization}_float32"):
            return ""
        return f"on this {self.translator.device}, CTranslate2 computes {quantization} as {computed}"

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[SearchResult]]:
        """Return up to `nbest` results for each job, best first; an empty source has an empty one."""
        results = dict(self.iter_results(jobs, search))
        return [results[number] for number in range(len(jobs))]

    def iter_results(self, jobs: Sequence[Job], search: SearchSettings) -> Iterator[tuple[int, list[SearchResult]]]:
        """Yield the index and the results of each job.

        A batch is decoded with the highest length limit in it. A sentence whose results all end within its own limit
        has the same results with that limit. The others are decoded again, grouped by limit.
        """
        for why in (explain_refusal(search), *map(self.lacks, jobs)):
            if why:
                raise UserError(f"{why}; use --engine torch")
        search = apply_fixed_settings(search)
        yield from ((i, []) for i, job in enumerate(jobs) if job.limit <= 0)
        order = sorted((i for i, job in enumerate(jobs) if job.limit > 0), key=lambda i: -len(jobs[i].ids))
        batches = (order[start : start + self.rows] for start in range(0, len(order), self.rows))
        pending = deque(self.submit(jobs, batch, search) for batch in islice(batches, self.max_pending))
        while pending:
            batch, late = pending.popleft(), []
            pending.extend(self.submit(jobs, indices, search) for indices in islice(batches, 1))
            for i, results in self.collect(batch, search):
                if batch.is_retry:
                    yield i, sorted(results, key=lambda one: not one.finished)[: search.nbest]
                elif all(one.finished and len(one.tokens) < jobs[i].limit for one in results):
                    yield i, results
                else:
                    late.append(i)
            late.sort(key=lambda i: jobs[i].limit)
            for _, some in groupby(late, lambda i: jobs[i].limit):
                pending.append(self.submit(jobs, list(some), search, retry=True))

    def submit(
        self, jobs: Sequence[Job], batch: list[int], search: SearchSettings, *, retry: bool = False
    ) -> PendingBatch:
        """Queue a batch. `retry` is for sentences that reach their limit with fewer finished hypotheses than the beam:
        twice the patience then only keeps truncated hypotheses from replacing finished ones."""
        patience = 2 if retry and search.beam > 1 else 1
        futures = self.translator.translate_batch(
            [list(map(self.source.__getitem__, jobs[i].ids)) for i in batch],
            beam_size=search.beam,
            patience=patience,
            num_hypotheses=patience * search.beam if retry else search.nbest,
            length_penalty=search.length_penalty or TINY_PENALTY,
            max_decoding_length=max(jobs[i].limit for i in batch),
            min_decoding_length=0,
            max_input_length=0,
            suppress_sequences=[[self.target[PAD]], [self.target[BOS]]],
            return_scores=needs_scores(search),
            return_end_token=True,
            asynchronous=True,
        )
        return PendingBatch(batch, futures, retry)

    def collect(self, batch: PendingBatch, search: SearchSettings) -> Iterator[tuple[int, list[SearchResult]]]:
        for i, future in zip(batch.indices, batch.futures, strict=True):
            result = future.result()
            each = zip(result.hypotheses, result.scores if needs_scores(search) else [math.nan], strict=True)
            yield i, [self.make_result(*one, search) for one in each]

    def make_result(self, pieces: list[str], score: float, search: SearchSettings) -> SearchResult:
        tokens = list(map(self.target_ids.__getitem__, pieces))
        finished = not tokens or tokens[-1] == EOS
        logp = score * max(len(tokens), 1) ** search.length_penalty
        return SearchResult(tokens[:-1] if finished else tokens, logp, score, finished)

    def lacks(self, job: Job) -> str:
        """Return what CTranslate2 cannot do of a job, or nothing."""
        if job.constraints.any:
            return "CTranslate2 does not support how an answer must begin, nor terms that it must or must not have"
        longest = max(len(job.ids) + 1, job.limit)
        if longest > self.max_tokens:
            return f"CTranslate2 has positions for {self.max_tokens} tokens, and this sentence may need {longest}"
        return ""


def needs_scores(search: SearchSettings) -> bool:
    """Return whether scores are computed: a beam needs them anyway."""
    return search.scores or search.beam > 1


def explain_refusal(search: SearchSettings) -> str:
    """Return why CTranslate2 would not search as we do with these settings, or nothing."""
    wanted = {
        name: getattr(search, name)
        for name in SearchSettings.model_fields
        if name not in SUPPORTED_SETTINGS | UNUSED_SETTINGS
    }
    usual = SearchSettings().model_dump()
    for name, value in wanted.items():
        if value != usual[name]:
            return f"search.{name}={value} is not something that CTranslate2 does"
    return (
        ""
        if METHODS[search.method].is_beam_search
        else f"search.method={search.method} is not something that CTranslate2 does"
    )


def convert_cached(
    model: Transformer, tokenizers: Tokenizers, cache: Path, quantization: str, *, narrow_int8: bool = False
) -> Path:
    """Return the folder of this model in the cache, made now if it is not there yet."""
    key = fingerprint_model(
        model, tokenizers.fingerprint(), model.settings, quantization, CACHE_VERSION, *["narrow"] * narrow_int8
    )
    folder = cache / f"ctranslate2-{key}"

    def write(beside: Path) -> None:
        save_ctranslate2(model, tokenizers, beside, quantization, narrow_int8=narrow_int8)

    if not (folder / "model.bin").exists():
        keep_folder(folder, "model.bin", write)
    return folder


def needs_narrow_int8(device: torch.device, quantization: str) -> bool:
    """Return whether weights of 8 bits must stay within 64, see inference/engines/torch.py."""
    return quantization.startswith("int8") and device.type == "cpu" and not cpu_features().exact_int8
