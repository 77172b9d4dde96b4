"""The systems compared by bench/translate_cpu.py and bench/translate_gpu.py: the same weights in several engines.

Every system translates lines with the tokenizer of the run, and can also run the search alone, from ids to ids. All
lines are passed at once, and each system batches them by length, as its users would.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.decoding.protocol import SearchJob
from dragoman.hardware import cpu_features, cpu_name
from dragoman.inference.engines import ctranslate2 as to_ctranslate2
from dragoman.inference.engines import huggingface as to_huggingface
from dragoman.inference.engines.base import list_vocabulary
from dragoman.inference.loading import ENGINES
from dragoman.inference.translator import Translator
from dragoman.types import BOS, EOS, PAD

Ids = list[list[int]]


class System(NamedTuple):
    search: Callable[[Ids], Ids]
    translate: Callable[[Sequence[str]], list[str]]


def describe_machine() -> list[str]:
    """Return what results of CPU engines depend on beside the model."""
    installed = {name: version(name) for name in ("torch", "ctranslate2") if find_spec(name)}
    libraries = [f"{name} {number}" for name, number in installed.items()]
    return [cpu_name(), f"CPU features: {cpu_features()}", f"threads: {torch.get_num_threads()}", *libraries]


def max_length(ids: Sequence[int], translator: Translator) -> int:
    search = translator.recipe.search
    return int(search.max_ratio * len(ids)) + search.max_extra + 1


def make_system(translator: Translator, search: Callable[[Ids], Ids]) -> System:
    source, target = translator.tokenizers.source, translator.tokenizers.target

    def translate(lines: Sequence[str]) -> list[str]:
        return [target.decode(tokens) for tokens in search(source.encode_all(lines))]

    return System(search, translate)


def open_dragoman(translator: Translator, engine: str, beam: int) -> System:
    """Return what `dragoman translate --engine NAME` does."""
    opened = ENGINES[engine](translator, None)
    predictor = replace(translator, engine=opened)
    settings = translator.recipe.search.model_copy(update={"beam": beam, "nbest": 1})

    def search(ids: Ids) -> Ids:
        found = opened.search([SearchJob(each, max_length(each, translator)) for each in ids], settings)
        return [answers[0].tokens for answers in found]

    def translate(lines: Sequence[str]) -> list[str]:
        return [one.text for one in predictor.translate(lines, beam=beam, search={"scores": False}, align=False)]

    return System(search, translate)


def open_huggingface(translator: Translator, beam: int, batch: int, dtype: torch.dtype) -> System:
    """Return `generate` of transformers on the exported model."""
    from transformers import AutoModelForSeq2SeqLM

    with tempfile.TemporaryDirectory() as folder:
        to_huggingface.save_huggingface(translator, Path(folder))
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype).eval().to(translator.device)
    model.generation_config.max_length = None

    @torch.inference_mode()
    def search(ids: Ids) -> Ids:
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        found: Ids = [[] for _ in ids]
        for start in range(0, len(order), batch):
            some = order[start : start + batch]
            source_BS = torch.full((len(some), len(ids[some[0]]) + 1), PAD)
            for row, i in enumerate(some):
                source_BS[row, : len(ids[i]) + 1] = torch.tensor([*ids[i], EOS])
            source_BS = source_BS.to(translator.device)
            generated = model.generate(
                source_BS, attention_mask=(source_BS != PAD).long(), num_beams=beam, do_sample=False,
                early_stopping=beam > 1, length_penalty=1.0, max_new_tokens=max_length(ids[some[0]], translator),
            )  # fmt: skip
            for i, (_, *output) in zip(some, generated.tolist(), strict=True):
                found[i] = [token for token in output[: output.index(EOS) if EOS in output else None] if token != PAD]
        return found

    return make_system(translator, search)


def open_ctranslate2(translator: Translator, beam: int, batch: int, precision: str) -> System:
    """Return CTranslate2 called directly."""
    import ctranslate2 as library

    folder = tempfile.mkdtemp()
    to_ctranslate2.save_ctranslate2(translator, Path(folder), precision, narrow_int8=False)
    threads = torch.get_num_threads()
    model = library.Translator(
        folder, device=translator.device.type, compute_type=precision, inter_threads=threads, intra_threads=1
    )
    source_words, target_words = (
        list_vocabulary(translator.tokenizers.source),
        list_vocabulary(translator.tokenizers.target),
    )
    numbers = {piece: number for number, piece in enumerate(target_words)}

    def search(ids: Ids) -> Ids:
        found = model.translate_batch(
            [[source_words[i] for i in each] for each in ids], beam_size=beam, max_batch_size=batch, length_penalty=1.0,
            max_decoding_length=max(max_length(each, translator) for each in ids),
            suppress_sequences=[[target_words[PAD]], [target_words[BOS]]],
        )  # fmt: skip
        return [[numbers[piece] for piece in one.hypotheses[0]] for one in found]

    return make_system(translator, search)
