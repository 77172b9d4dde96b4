"""Export to CTranslate2, and CTranslate2 as an engine.

The export fills CTranslate2's specification of a Transformer with our weights, quantises them and saves it. The engine
converts a model once and keeps the result in the user's cache.

CTranslate2's beam search equals ours with search.stop=enough (stop once `beam` hypotheses are finished), with two
differences: (1) CTranslate2 has one length limit per call, which `CTranslate2Engine.iter_results` works around;
(2) PAD and BOS, which are never generated, are masked before the softmax, not after, so scores are slightly higher.

Shapes   O output features   I input features   P positions   C model width   R relative positions   D head width
"""

from __future__ import annotations

import math
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.config.settings import SampleSettings
from dragoman.decoding.methods import SEARCH_METHODS, SearchSettings, apply_method_settings
from dragoman.decoding.protocol import BaseSearchSettings, IndexedResults, SearchJob, SearchResult
from dragoman.errors import UserError
from dragoman.hardware import cpu_features
from dragoman.inference.engines.base import (
    Engine,
    fingerprint_model,
    list_layer_modules,
    list_vocabulary,
    require_exportable,
)
from dragoman.inference.predictor import Predictor
from dragoman.io import cache_folder, create_folder_atomically
from dragoman.models.base import Model
from dragoman.models.transformer import TransformerStack
from dragoman.modules.positions import Learned, Relative, Sinusoidal
from dragoman.types import BOS, EOS, PAD, SPECIALS

NARROW_INT8 = 64  # the largest int8 weight for which two products with a uint8 fit int16: 2 * 255 * 64 < 2**15
TABLE_POSITIONS = 4096  # rows of the sinusoid table: maximum tokens of a source or an output, EOS included
CTRANSLATE2_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "swish": "SWISH",
    "swiglu": "SWISH",
}  # model.activation -> name in CTranslate2
QUANTIZATIONS = ["float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"]
CACHE_VERSION = 1  # increment when the converted files change for an unchanged model
CTRANSLATE2_ROWS = {"cpu": 32, "cuda": 256}
QUEUED_BATCHES = 3  # per worker; few, since an interrupted call waits until all queued batches are done
SUPPORTED_SEARCH_SETTINGS = {
    "method", "beam", "nbest", "length_penalty", "max_ratio", "max_extra", "max_tokens", "scores",
}  # fmt: skip
IGNORED_SEARCH_SETTINGS = {  # settings of other decoding methods, and settings that the caller applies to the results
    *SampleSettings.model_fields, *(SearchSettings.model_fields.keys() - BaseSearchSettings.model_fields.keys()),
    "seed", "unknown", "coverage",
}  # fmt: skip
TINY_PENALTY = 1e-30  # replaces a length penalty of 0, with which CTranslate2 would stop earlier than our search


def import_ctranslate2() -> ModuleType:
    """Return the library, or raise a UserError that tells how to install it."""
    try:
        import ctranslate2
    except ImportError:
        raise UserError(
            "CTranslate2 is not installed; run pip install 'dragoman[ctranslate2]', or use --engine torch"
        ) from None
    return ctranslate2  # type: ignore[no-any-return]


def save_ctranslate2(predictor: Predictor[Model], folder: Path, quantization: str, *, narrow_int8: bool = True) -> None:
    """Write model and vocabularies into a folder that `ctranslate2.Translator` opens."""
    spec = make_specification(predictor)
    quantize_weights(spec, quantization, narrow_int8=narrow_int8)
    spec.save(str(folder))


def quantize_weights(spec: Any, quantization: str, *, narrow_int8: bool) -> None:
    """Quantise the weights of a specification in place.

    `narrow_int8` limits int8 weights to [-64, 64]: without VNNI, x86 libraries add two uint8*int8 products in int16,
    which could otherwise saturate. Exported models need this, since they may run on any CPU.
    """
    spec.validate()
    weights = {name: value.numpy().copy() for name, value in spec.variables().items() if name.endswith("/weight")}
    spec.optimize(quantization)
    spec_module = import_ctranslate2().specs.model_spec

    def narrow(layer: Any, name: str, value: object) -> None:
        if name not in weights or isinstance(value, str):  # a string names the weight that this one is tied to
            return
        weight_OI = weights[name]
        scale_O = NARROW_INT8 / np.maximum(np.abs(weight_OI).max(1), np.float32(1e-12))
        layer.weight = spec_module.NumpyVariable(np.rint(weight_OI * scale_O[:, None]).astype(np.int8))
        layer.weight_scale = spec_module.NumpyVariable(scale_O.astype(np.float32))

    if narrow_int8 and quantization.startswith("int8"):
        spec_module.visit_spec(spec, narrow)


def make_specification(predictor: Predictor[Model]) -> Any:
    """Return CTranslate2's specification of the model, filled with its weights."""
    model = require_exportable(predictor.model, "CTranslate2", equal_head_widths=True)
    specs, settings = import_ctranslate2().specs, model.settings
    options = {
        "pre_norm": settings.norm_place == "pre",
        "activation": specs.Activation[CTRANSLATE2_ACTIVATIONS[settings.activation]],
        "relative_position": settings.position == "relative",
        "ffn_glu": settings.activation == "swiglu",
        "rms_norm": settings.norm == "rms",
        "rotary_dim": 0 if settings.position == "rotary" else None,  # 0: all features of a head are rotated
        "rotary_interleave": True,  # features 2i and 2i+1 form a pair
    }
    alignment = {"alignment_layer": settings.alignment_layer, "alignment_heads": settings.heads}
    spec = specs.TransformerSpec(
        specs.TransformerEncoderSpec(settings.encoder_depth, settings.heads, **options),
        specs.TransformerDecoderSpec(settings.decoder_depth, settings.heads, **alignment, **options),
    )
    fill_stack(spec.encoder, model.encoder)
    fill_stack(spec.decoder, model.decoder)
    spec.encoder.embeddings[0].weight = copy_float(model.encoder.embedding.weight)
    # If source and target share an embedding, tags of sources have its last rows. They are no target tokens.
    spec.decoder.embeddings.weight = copy_float(model.decoder.embedding.weight[: model.output_size])
    spec.decoder.projection.weight = copy_float(model.project.weight[: model.output_size])
    if model.project.bias is not None:
        spec.decoder.projection.bias = copy_float(model.project.bias[: model.output_size])
    spec.register_source_vocabulary(list_vocabulary(predictor.tokenizers.source, predictor.tokenizers.tags))
    spec.register_target_vocabulary(list_vocabulary(predictor.tokenizers.target))
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIALS[1:]
    spec.config.decoder_start_token, spec.config.add_source_eos = spec.config.bos_token, True
    return spec


def fill_stack(spec: Any, stack: TransformerStack) -> None:
    """Copy the weights of an encoder or a decoder into its specification."""
    settings, position = stack.settings, stack.position
    if hasattr(spec, "position_encodings"):
        # Always write the table: CTranslate2's built-in sinusoids use a different feature order.
        table_PC = torch.zeros(TABLE_POSITIONS, settings.width)
        if isinstance(position, Learned):  # our model multiplies these weights by the square root of the width
            table_PC = copy_float(position.table.weight) * settings.width**0.5
        elif isinstance(position, Sinusoidal):
            table_PC = position.compute_sinusoids(torch.arange(TABLE_POSITIONS))
        spec.position_encodings.encodings = table_PC
    if settings.norm_place == "pre":
        fill_parts([spec.layer_norm], stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        for names, module in list_layer_modules(layer):
            fill_parts(list(find_parts(layer_spec, names.ctranslate2)), module)
        if not settings.scaled:  # scores are not divided by the square root of the head width
            for attention in find_parts(layer_spec, ["self_attention", "attention"]):
                attention.queries_scale = 1.0
        if isinstance(relate := layer.attention.sublayer.relate, Relative):
            layer_spec.self_attention.relative_position_keys = copy_float(relate.key_RD)
            layer_spec.self_attention.relative_position_values = copy_float(relate.value_RD)


def find_parts(spec: object, paths: Sequence[str]) -> Iterator[Any]:
    """Yield the parts of a specification at these paths, such as "linear.0" for linear[0].

    Paths that do not exist in this specification are skipped.
    """
    for path in paths:
        part: Any = spec
        for name in path.split("."):
            part = part[int(name)] if name.isdigit() else getattr(part, name, None)
        if part is not None:
            yield part


def fill_parts(parts: list[Any], module: nn.Module) -> None:
    """Copy weight and bias of a linear layer or a norm into parts of a specification, split evenly by output."""
    names = ("gamma", "beta") if hasattr(parts[0], "gamma") else ("weight", "bias")
    for theirs, ours in zip(names, ("weight", "bias"), strict=True):
        if hasattr(parts[0], theirs):  # an RMS norm has no bias
            for part, chunk in zip(parts, copy_float(module.get_parameter(ours)).chunk(len(parts)), strict=True):
                setattr(part, theirs, chunk)


def copy_float(tensor: Tensor) -> Tensor:
    """Return a float32 copy on the CPU: CTranslate2 quantises in place."""
    return tensor.detach().float().cpu().clone()


class PendingBatch(NamedTuple):
    """A submitted batch: the indices of its jobs and CTranslate2's futures of their results."""

    indices: list[int]
    futures: list[Any]
    is_retry: bool


class CTranslate2Engine(Engine):
    """The engine that runs a converted model in CTranslate2, in one of QUANTIZATIONS."""

    supports_terms = False

    def __init__(self, predictor: Predictor[Model], folder: Path, quantization: str) -> None:
        device, threads = predictor.device, torch.get_num_threads()
        self.max_tokens = predictor.recipe.model.length_limit or TABLE_POSITIONS  # per source or output, with EOS
        self.batch_rows = CTRANSLATE2_ROWS[device.type]
        self.max_pending_batches = QUEUED_BATCHES * (threads if device.type == "cpu" else 1)
        library, index = import_ctranslate2(), device.index or 0
        supported_types = library.get_supported_compute_types(device.type, index)
        self.translator: Any = library.Translator(
            str(folder),
            device=device.type,
            device_index=index,
            compute_type=quantization if quantization in supported_types else "default",
            max_queued_batches=-1,  # unlimited, since `iter_results` limits the number of pending batches
            **({"inter_threads": threads, "intra_threads": 1} if device.type == "cpu" else {}),
        )
        torch.set_num_threads(threads)  # CTranslate2 has changed this process-wide number
        self.source_vocabulary = list_vocabulary(predictor.tokenizers.source, predictor.tokenizers.tags)
        self.target_vocabulary = list_vocabulary(predictor.tokenizers.target)
        self.target_ids = {token: number for number, token in enumerate(self.target_vocabulary)}

    @classmethod
    def convert(
        cls, predictor: Predictor[Model], cache: Path | None = None, *, quantization: str = "float32"
    ) -> CTranslate2Engine:
        """Return the engine of a model. The model is converted first, unless the cache contains the converted model.

        The default is the user's cache, not the run's data.cache: a run folder from an untrusted source must not decide
        where files are written. If the cache cannot be written, the model is converted into a temporary folder, which
        is removed as soon as CTranslate2 has loaded the model.
        """
        cache = cache or cache_folder()
        if predictor.device.type == "cuda" and not import_ctranslate2().get_cuda_device_count():
            raise UserError("the installed CTranslate2 cannot use the GPU; use --device cpu or --engine torch")
        with ExitStack() as cleanup:
            try:
                folder = convert_cached(predictor, cache.expanduser(), quantization)
                location, remedy = repr(str(folder)), "remove it to convert the model again, or use --engine torch"
            except OSError:
                location, remedy = "the model in a temporary folder", "use --engine torch"
                try:
                    temporary = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
                    folder = convert_cached(predictor, temporary, quantization)
                except OSError as error:
                    raise UserError(
                        f"the model for CTranslate2 can be written neither to {str(cache)!r} nor to a temporary folder "
                        f"({error.strerror}); make room there, or use --engine torch"
                    ) from None
            try:
                return cls(predictor, folder, quantization)
            except RuntimeError as error:
                raise UserError(f"CTranslate2 cannot open {location} ({error}); {remedy}") from None

    def describe_precision_fallback(self, quantization: str) -> str:
        """Return a message if this device cannot compute in the requested precision, else ""."""
        actual = self.translator.compute_type
        if actual in (quantization, f"{quantization}_float32"):
            return ""
        return f"on this {self.translator.device}, CTranslate2 computes in {actual} instead of {quantization}"

    def iter_results(self, jobs: Sequence[SearchJob], search: SearchSettings) -> IndexedResults:
        """Yield the index and the results of each job. A job with `max_tokens` 0 has no results.

        A batch is decoded with the highest length limit of its jobs. If all results of a sentence end within the
        limit of that sentence, decoding with this lower limit would have given the same results. The other sentences
        are decoded again, in batches of equal limit.
        """
        self.check_supported(jobs, search)
        search = apply_method_settings(search)  # such as beam 1 of greedy search
        yield from ((i, []) for i, job in enumerate(jobs) if job.max_tokens <= 0)
        by_length = sorted((i for i, job in enumerate(jobs) if job.max_tokens > 0), key=lambda i: -len(jobs[i].ids))
        batches = (by_length[start : start + self.batch_rows] for start in range(0, len(by_length), self.batch_rows))
        pending = deque(self.submit(jobs, batch, search) for batch in islice(batches, self.max_pending_batches))
        while pending:
            batch, retries = pending.popleft(), []
            pending.extend(self.submit(jobs, next_batch, search) for next_batch in islice(batches, 1))
            for i, results in self.collect(batch, search):
                if batch.is_retry:
                    yield i, sorted(results, key=lambda result: not result.finished)[: search.nbest]
                elif all(result.finished and len(result.tokens) < jobs[i].max_tokens for result in results):
                    yield i, results
                else:
                    retries.append(i)
            retries.sort(key=lambda i: jobs[i].max_tokens)
            for _, indices in groupby(retries, lambda i: jobs[i].max_tokens):
                pending.append(self.submit(jobs, list(indices), search, retry=True))

    def submit(
        self, jobs: Sequence[SearchJob], batch: list[int], search: SearchSettings, *, retry: bool = False
    ) -> PendingBatch:
        """Submit the jobs with the indices `batch` for asynchronous decoding.

        A `retry` decodes jobs again that have reached their length limit. Its patience of 2 makes CTranslate2 return up
        to 2*beam hypotheses, so that unfinished ones do not displace finished ones.
        """
        patience = 2 if retry and search.beam > 1 else 1
        futures = self.translator.translate_batch(
            [list(map(self.source_vocabulary.__getitem__, jobs[i].ids)) for i in batch],
            target_prefix=[[self.target_vocabulary[token] for token in jobs[i].constraints.prefix] for i in batch],
            beam_size=search.beam,
            patience=patience,
            num_hypotheses=patience * search.beam if retry else search.nbest,
            length_penalty=search.length_penalty or TINY_PENALTY,
            max_decoding_length=max(jobs[i].max_tokens for i in batch),
            min_decoding_length=0,
            max_input_length=0,
            suppress_sequences=[[self.target_vocabulary[PAD]], [self.target_vocabulary[BOS]]],
            return_scores=needs_scores(search),
            return_end_token=True,
            asynchronous=True,
        )
        return PendingBatch(batch, futures, retry)

    def collect(self, batch: PendingBatch, search: SearchSettings) -> IndexedResults:
        """Wait for a batch and yield the results of its jobs. Scores that were not computed are NaN."""
        for i, future in zip(batch.indices, batch.futures, strict=True):
            try:
                translation, results = future.result(), []
            except RuntimeError as error:  # the libraries of CUDA are loaded when the first batch is decoded
                if "cannot be loaded" not in str(error):
                    raise
                raise UserError(
                    f"CTranslate2 cannot use the GPU ({error}); write --device cpu or --engine torch"
                ) from None
            scores = translation.scores if needs_scores(search) else [math.nan]
            for hypothesis, score in zip(translation.hypotheses, scores, strict=True):
                tokens = list(map(self.target_ids.__getitem__, hypothesis))
                finished = not tokens or tokens[-1] == EOS  # no tokens, not even EOS, if the source is empty
                logp = score * max(len(tokens), 1) ** search.length_penalty
                results.append(SearchResult(tokens[:-1] if finished else tokens, logp, score, finished))
            yield i, results

    def check_supported(self, jobs: Sequence[SearchJob], search: SearchSettings) -> None:
        """Raise a UserError if CTranslate2 cannot decode these jobs as our own search does."""
        defaults, supported = SearchSettings(), SUPPORTED_SEARCH_SETTINGS | IGNORED_SEARCH_SETTINGS
        unsupported = [name for name, value in search if name not in supported and value != getattr(defaults, name)]
        unsupported += [] if SEARCH_METHODS[search.method].is_beam_search else ["method"]
        needed_tokens = max((max(len(job.ids) + 1, job.max_tokens) for job in jobs), default=0)
        if unsupported:
            reason = f"does not support search.{unsupported[0]}={getattr(search, unsupported[0])}"
        elif any(has_other_constraints(job) for job in jobs):
            reason = "does not support forced prefixes, or required or forbidden terms"
        elif needed_tokens > self.max_tokens:
            reason = f"has positions for {self.max_tokens} tokens, and a sentence may need {needed_tokens}"
        else:
            return
        raise UserError(f"CTranslate2 {reason}; use --engine torch")


def has_other_constraints(job: SearchJob) -> bool:
    """Return whether a job has constraints besides the language tokens that begin its target.

    Both engines count language tokens as log-probability 0; for other forced tokens they differ.
    """
    others = replace(job.constraints, prefix=job.constraints.prefix[job.constraints.language_tokens :])
    return others.is_constrained


def needs_scores(search: SearchSettings) -> bool:
    """Return whether CTranslate2 computes scores: on request, and always in beam search, which ranks by them."""
    return search.scores or search.beam > 1


def convert_cached(predictor: Predictor[Model], cache: Path, quantization: str) -> Path:
    """Return the folder of the converted model in the cache; convert the model if the folder does not exist."""
    model = require_exportable(predictor.model, "CTranslate2", equal_head_widths=True)
    narrow = quantization.startswith("int8") and predictor.device.type == "cpu" and not cpu_features().exact_int8
    key = fingerprint_model(
        model, predictor.tokenizers.fingerprint(), model.settings, quantization, CACHE_VERSION, *["narrow"] * narrow
    )
    folder = cache / f"ctranslate2-{key}"
    if not (folder / "model.bin").exists():
        save = partial(save_ctranslate2, predictor, quantization=quantization, narrow_int8=narrow)
        create_folder_atomically(folder, write=save, required_file="model.bin")
    return folder
