"""What bench/translate_cpu.py and bench/translate_gpu.py set side by side: the same weights behind several engines.

Every one of them takes lines and gives lines: all read and write text through the run's own tokenizer. They are handed
all lines at once, and each batches as is best for it: by length, which is what a user of theirs would write.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dragoman.engines.choose import RUNNERS, AutoEngine, Parts
from dragoman.exchange import ctranslate2 as to_ctranslate2
from dragoman.exchange import huggingface as to_huggingface
from dragoman.translator import Translator
from dragoman.types import BOS, EOS, PAD

Translate = Callable[[Sequence[str]], list[str]]


def limit_of(ids: Sequence[int], translator: Translator) -> int:
    search = translator.recipe.search
    return int(search.max_ratio * len(ids)) + search.max_extra + 1


def ours(translator: Translator, engine: str, beam: int) -> Translate:
    """`dragoman translate --engine NAME`, from lines to lines."""
    parts = Parts(translator.model, translator.tokenizers, translator.device, Path("~/.cache/dragoman"))
    made = (
        AutoEngine(parts, lambda text: print(text, file=sys.stderr)) if engine == "auto" else RUNNERS[engine](parts)()
    )
    door = replace(translator, engine=made)

    def translate(lines: Sequence[str]) -> list[str]:
        return [one.text for one in door.translate(lines, beam=beam, align=False)]

    return translate


def huggingface(translator: Translator, beam: int, batch: int, dtype: torch.dtype) -> Translate:
    """`generate` of transformers, on the exported model."""
    from transformers import AutoModelForSeq2SeqLM

    with tempfile.TemporaryDirectory() as folder:
        to_huggingface.save(
            translator.model, translator.tokenizers, translator.recipe, Path(folder), translator.longest
        )
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype).eval().to(translator.device)
    source, target = translator.tokenizers.source, translator.tokenizers.target

    @torch.inference_mode()
    def translate(lines: Sequence[str]) -> list[str]:
        ids = source.encode_all(lines)
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        texts = [""] * len(lines)
        for start in range(0, len(order), batch):
            some = order[start : start + batch]
            width = len(ids[some[0]]) + 1
            source_BS = torch.full((len(some), width), PAD)
            for row, i in enumerate(some):
                source_BS[row, : len(ids[i]) + 1] = torch.tensor([*ids[i], EOS])
            source_BS = source_BS.to(translator.device)
            made = model.generate(
                source_BS, attention_mask=(source_BS != PAD).long(), num_beams=beam, do_sample=False,
                early_stopping=beam > 1, length_penalty=1.0, max_new_tokens=limit_of(ids[some[0]], translator),
            )  # fmt: skip
            for i, row in zip(some, made.tolist(), strict=True):
                said = row[1:]
                texts[i] = target.decode([t for t in said[: said.index(EOS) if EOS in said else None] if t != PAD])
        return texts

    return translate


def ctranslate2(translator: Translator, beam: int, batch: int, precision: str) -> Translate:
    """CTranslate2 called directly."""
    import ctranslate2

    folder = tempfile.mkdtemp()
    to_ctranslate2.save(translator.model, translator.tokenizers, Path(folder), precision)
    threads = torch.get_num_threads()
    model = ctranslate2.Translator(
        folder, device=translator.device.type, compute_type=precision, inter_threads=threads, intra_threads=1
    )
    source, target = translator.tokenizers.source, translator.tokenizers.target
    from dragoman.exchange.held import vocabulary

    pieces, said = vocabulary(source), vocabulary(target)
    numbers = {piece: number for number, piece in enumerate(said)}

    def translate(lines: Sequence[str]) -> list[str]:
        ids = source.encode_all(lines)
        found = model.translate_batch(
            [[pieces[i] for i in each] for each in ids], beam_size=beam, max_batch_size=batch, length_penalty=1.0,
            max_decoding_length=max(limit_of(each, translator) for each in ids),
            suppress_sequences=[[said[PAD]], [said[BOS]]],
        )  # fmt: skip
        return [target.decode([numbers[piece] for piece in one.hypotheses[0]]) for one in found]

    return translate
