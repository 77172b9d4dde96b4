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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby, islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.config.settings import SampleSettings, SearchSettings
from dragoman.decoding.methods import METHODS, apply_fixed_settings
from dragoman.decoding.protocol import Job, SearchResult
from dragoman.errors import UserError
from dragoman.hardware import cpu_features
from dragoman.inference.engines.base import (
    Engine,
    Holds,
    LoadedModel,
    check_holds,
    fingerprint_model,
    list_layer_modules,
    list_vocabulary,
)
from dragoman.io import keep_folder
from dragoman.models.transformer import TransformerStack
from dragoman.modules.positions import Learned, Relative, Sinusoidal, make_sinusoids
from dragoman.types import BOS, EOS, PAD, SPECIALS

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
QUANTIZATIONS = ["float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"]
CACHE_VERSION = 1  # raised when the same model is written differently
BATCH_ROWS = {"cpu": 32, "cuda": 256}  # sentences of a batch
QUEUED_BATCHES = 3  # per worker: an interrupted call waits for these
SUPPORTED_SETTINGS = {"method", "beam", "nbest", "length_penalty", "max_ratio", "max_extra", "scores"}
UNUSED_SETTINGS = {  # those of other methods, and those applied to the results
    *SampleSettings.model_fields, "seed", "samples", "candidates", "metric", "groups", "diversity", "unknown",
    "coverage",
}  # fmt: skip
TINY_PENALTY = 1e-30  # with a length penalty of 0 CTranslate2 stops earlier than our search


def import_ctranslate2() -> ModuleType:
    """Return the library, or raise a UserError that names its extra."""
    try:
        import ctranslate2
    except ImportError:
        raise UserError(
            "CTranslate2 is not installed; pip install 'dragoman[ctranslate2]' brings it, --engine torch needs nothing"
        ) from None
    return ctranslate2  # type: ignore[no-any-return]


def save_ctranslate2(run: LoadedModel, folder: Path, quantization: str, *, narrow_int8: bool = True) -> None:
    """Write model and vocabularies into a folder that `ctranslate2.Translator` opens."""
    spec = make_specification(run)
    quantize_weights(spec, quantization, narrow_int8=narrow_int8)
    spec.save(str(folder))


def quantize_weights(spec: Any, quantization: str, *, narrow_int8: bool) -> None:
    """Quantise the weights of a specification in place.

    With `narrow_int8`, weights of 8 bits are kept within 64. Libraries for CPUs multiply unsigned inputs, at most 255,
    with these weights, and without VNNI add two products in 16 signed bits, which then cannot saturate. A folder that
    may be opened on any CPU needs that, see inference/engines/torch.py.
    """
    spec.validate()
    weights = {name: value.numpy().copy() for name, value in spec.variables().items() if name.endswith("/weight")}
    spec.optimize(quantization)
    spec_module = import_ctranslate2().specs.model_spec

    def narrow(layer: Any, name: str, value: object) -> None:
        if name not in weights or isinstance(value, str):  # not quantised, or the name of a weight that it shares
            return
        weight_OI = weights[name]
        scale_O = NARROW_INT8 / np.maximum(np.abs(weight_OI).max(1), np.float32(1e-12))
        layer.weight = spec_module.NumpyVariable(np.rint(weight_OI * scale_O[:, None]).astype(np.int8))
        layer.weight_scale = spec_module.NumpyVariable(scale_O.astype(np.float32))

    if narrow_int8 and quantization.startswith("int8"):
        spec_module.visit_spec(spec, narrow)


def make_specification(run: LoadedModel) -> Any:
    """Return CTranslate2's specification of the model, filled with its weights."""
    model = check_holds(run.model, CTRANSLATE2_HOLDS, "CTranslate2", one_width=True)
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
    alignment = {"alignment_layer": settings.alignment_layer, "alignment_heads": settings.heads}
    spec = specs.TransformerSpec(
        specs.TransformerEncoderSpec(settings.encoder_depth, settings.heads, **options),
        specs.TransformerDecoderSpec(settings.decoder_depth, settings.heads, **alignment, **options),
    )
    fill_stack(spec.encoder, model.encoder)
    fill_stack(spec.decoder, model.decoder)
    spec.encoder.embeddings[0].weight = copy_float(model.encoder.embedding.weight)
    spec.decoder.embeddings.weight = copy_float(model.decoder.embedding.weight[: model.output_size])
    spec.decoder.projection.weight = copy_float(model.project.weight[: model.output_size])
    spec.register_source_vocabulary(list_vocabulary(run.tokenizers.source, run.tokenizers.tags))
    spec.register_target_vocabulary(list_vocabulary(run.tokenizers.target))
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIALS[1:]
    spec.config.decoder_start_token, spec.config.add_source_eos = spec.config.bos_token, True
    return spec


def fill_stack(spec: Any, stack: TransformerStack) -> None:
    """Copy the weights of an encoder or a decoder into its specification."""
    settings, embed = stack.settings, stack.position
    if hasattr(spec, "position_encodings"):  # what is added to the embeddings; CTranslate2 orders its own otherwise
        table_PC = torch.zeros(TABLE_POSITIONS, settings.width)
        if isinstance(embed, Learned):
            table_PC = copy_float(embed.table.weight) * settings.width**0.5
        elif isinstance(embed, Sinusoidal):
            table_PC = make_sinusoids(torch.arange(TABLE_POSITIONS), settings.width)
        spec.position_encodings.encodings = table_PC
    if settings.norm_place == "pre":
        fill_parts([spec.layer_norm], stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        for names, module in list_layer_modules(layer):
            fill_parts(list(find_parts(layer_spec, names.ctranslate2)), module)
        own = layer_spec.self_attention
        if not settings.scaled:
            for attention in find_parts(layer_spec, "self_attention attention"):
                attention.queries_scale = 1.0
        if isinstance(relate := layer.attention.sublayer.relate, Relative):
            own.relative_position_keys = copy_float(relate.key_RD)
            own.relative_position_values = copy_float(relate.value_RD)


def find_parts(spec: object, paths: str) -> Iterator[Any]:
    """Yield those parts of a specification that it has, by their paths, such as "linear.0" for linear[0]."""
    for path in paths.split():
        part: Any = spec
        for name in path.split("."):
            part = part[int(name)] if name.isdigit() else getattr(part, name, None)
        if part is not None:
            yield part


def fill_parts(parts: list[Any], module: nn.Module) -> None:
    """Copy weight and bias of a linear layer or a norm; several parts share the outputs of the layer."""
    names = ("gamma", "beta") if hasattr(parts[0], "gamma") else ("weight", "bias")
    for theirs, ours in zip(names, ("weight", "bias"), strict=True):
        if hasattr(parts[0], theirs):  # an RMS norm has no bias
            for part, chunk in zip(parts, copy_float(module.get_parameter(ours)).chunk(len(parts)), strict=True):
                setattr(part, theirs, chunk)


def copy_float(tensor: Tensor) -> Tensor:
    """Return a float32 copy on the CPU: CTranslate2 quantises in place."""
    return tensor.detach().float().cpu().clone()


class TranslationResult(Protocol):
    """What CTranslate2 returns for a sentence: hypotheses in tokens, and their scores unless they were not wanted."""

    hypotheses: list[list[str]]
    scores: list[float]


class TranslationFuture(Protocol):
    """A result that CTranslate2 may still compute."""

    def result(self) -> TranslationResult: ...


class BatchTranslator(Protocol):
    """The part of `ctranslate2.Translator` that the engine uses."""

    device: str
    compute_type: str

    def translate_batch(self, source: list[list[str]], **options: object) -> list[TranslationFuture]: ...


class PendingBatch(NamedTuple):
    """Indices of the jobs in a batch, and the futures of their results."""

    indices: list[int]
    futures: list[TranslationFuture]
    is_retry: bool


class CTranslate2Engine(Engine):
    """The engine of one model, in one precision: float32, int8 or another of QUANTIZATIONS."""

    def __init__(self, run: LoadedModel, folder: Path, quantization: str) -> None:
        device, threads = run.device, torch.get_num_threads()
        self.max_tokens = run.recipe.model.length_limit or TABLE_POSITIONS  # of a source or an output, EOS included
        self.rows = BATCH_ROWS[device.type]
        self.max_pending = QUEUED_BATCHES * (threads if device.type == "cpu" else 1)
        library, index = import_ctranslate2(), device.index or 0
        able = library.get_supported_compute_types(device.type, index)
        self.translator: BatchTranslator = library.Translator(
            str(folder),
            device=device.type,
            device_index=index,
            compute_type=quantization if quantization in able else "default",
            max_queued_batches=-1,  # `iter_results` limits them itself
            **({"inter_threads": threads, "intra_threads": 1} if device.type == "cpu" else {}),
        )
        torch.set_num_threads(threads)  # CTranslate2 changes it
        self.source = list_vocabulary(run.tokenizers.source, run.tokenizers.tags)
        self.target = list_vocabulary(run.tokenizers.target)
        self.target_ids = {piece: number for number, piece in enumerate(self.target)}

    @classmethod
    def convert(cls, run: LoadedModel, cache: Path, *, quantization: str = "float32") -> CTranslate2Engine:
        """Return the engine of a model, which is converted into the cache unless it is there already.

        If the cache cannot be written, the model is converted into a temporary folder, which is removed after opening.
        """
        if run.device.type == "cuda" and not import_ctranslate2().get_cuda_device_count():
            raise UserError(
                "the CTranslate2 that is installed cannot use the GPU; write --device cpu or --engine torch"
            )
        with ExitStack() as held:
            try:
                folder = convert_cached(run, cache.expanduser(), quantization)
                place, remedy = repr(str(folder)), "remove it, and it is made anew, or use --engine torch"
            except OSError:
                place, remedy = "the model in a temporary folder", "use --engine torch"
                try:
                    folder = convert_cached(run, Path(held.enter_context(tempfile.TemporaryDirectory())), quantization)
                except OSError as error:
                    raise UserError(
                        f"the model for CTranslate2 cannot be kept in {str(cache)!r}, nor in a temporary folder "
                        f"({error.strerror}); make room for it there, or use --engine torch"
                    ) from None
            try:
                return cls(run, folder, quantization)
            except RuntimeError as error:
                raise UserError(f"CTranslate2 cannot open {place} ({error}); {remedy}") from None

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
        """Wait for a batch and yield the results of its jobs. Scores that were not computed are NaN."""
        for i, future in zip(batch.indices, batch.futures, strict=True):
            found, results = future.result(), []
            scores = found.scores if needs_scores(search) else [math.nan]
            for pieces, score in zip(found.hypotheses, scores, strict=True):
                tokens = list(map(self.target_ids.__getitem__, pieces))
                finished = not tokens or tokens[-1] == EOS
                logp = score * max(len(tokens), 1) ** search.length_penalty
                results.append(SearchResult(tokens[:-1] if finished else tokens, logp, score, finished))
            yield i, results

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
    usual = SearchSettings()
    refused = [
        name
        for name in SearchSettings.model_fields
        if name not in SUPPORTED_SETTINGS | UNUSED_SETTINGS and getattr(search, name) != getattr(usual, name)
    ]
    if not METHODS[search.method].is_beam_search:
        refused.append("method")
    name = next(iter(refused), "")
    return f"search.{name}={getattr(search, name)} is not something that CTranslate2 does" if name else ""


def convert_cached(run: LoadedModel, cache: Path, quantization: str) -> Path:
    """Return the folder of this model in the cache, made now if it is not there yet."""
    model = check_holds(run.model, CTRANSLATE2_HOLDS, "CTranslate2", one_width=True)
    narrow = quantization.startswith("int8") and run.device.type == "cpu" and not cpu_features().exact_int8
    key = fingerprint_model(
        model, run.tokenizers.fingerprint(), model.settings, quantization, CACHE_VERSION, *["narrow"] * narrow
    )
    folder = cache / f"ctranslate2-{key}"
    if not (folder / "model.bin").exists():
        keep_folder(folder, "model.bin", lambda made: save_ctranslate2(run, made, quantization, narrow_int8=narrow))
    return folder
