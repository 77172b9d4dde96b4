"""CTranslate2 as an engine: the model is converted once into the user's cache, and asked in batches of like lengths.

Its beam search is ours with the stop rule "enough", so answers are the same. Two things differ. It has one limit for
all sentences of a call, see `CTranslate2Engine.search`. And <pad> and <s>, which may not be answered, are taken out
before probabilities are made, not after: scores are higher by the little that a model gives to those two.
"""

from __future__ import annotations

import math
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dragoman.config import SampleSettings, SearchSettings
from dragoman.engines.base import Engine, Job, in_order
from dragoman.exchange.ctranslate2 import checked, library, places, save
from dragoman.exchange.held import fingerprint, source_vocabulary, vocabulary
from dragoman.hardware import cpu_features
from dragoman.io import keep_folder
from dragoman.models.transformer import Transformer
from dragoman.search.step import Found
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import BOS, EOS, PAD, UserError

LAYOUT = 1  # of the folders in the cache; raised when the same model is written in another way
ROWS = {"cpu": 32, "cuda": 256}  # sentences of a batch
AHEAD = 3  # batches for each worker that are asked at a time: who stops waits for those
METHODS = ("beam", "greedy")
FOLLOWED = {"method", "beam", "nbest", "length_penalty", "max_ratio", "max_extra", "scores"}  # of the search settings
IDLE = {  # those of other methods, and those that are seen to when answers have been found
    *SampleSettings.model_fields, "seed", "samples", "candidates", "metric", "groups", "diversity", "unknown",
    "coverage",
}  # fmt: skip
NOT_QUITE_ZERO = 1e-30  # at a length penalty of 0 CTranslate2 stops before it has looked at all that we look at


class Asked(NamedTuple):
    """Jobs by number, and what will be their answers."""

    batch: list[int]
    coming: list[Any]
    again: bool


class CTranslate2Engine(Engine):
    """The engine of one model, in one precision: float32, int8 or another of QUANTIZATIONS."""

    def __init__(
        self, folder: Path, model: Transformer, tokenizers: Tokenizers, *, device: torch.device, quantization: str
    ) -> None:
        self.places = places(model)
        self.rows = ROWS[device.type]
        threads = torch.get_num_threads()
        self.ahead = AHEAD * (threads if device.type == "cpu" else 1)
        able = library().get_supported_compute_types(device.type, device.index or 0)
        self.translator: Any = library().Translator(
            str(folder),
            device=device.type,
            device_index=device.index or 0,
            compute_type=quantization if quantization in able else "default",
            max_queued_batches=-1,  # `each` sees to it that few are
            **({"inter_threads": threads, "intra_threads": 1} if device.type == "cpu" else {}),
        )
        torch.set_num_threads(threads)  # CTranslate2 has changed it
        self.source, self.target = source_vocabulary(tokenizers), vocabulary(tokenizers.target)
        self.target_ids = {piece: number for number, piece in enumerate(self.target)}

    @classmethod
    def of(
        cls, model: nn.Module, tokenizers: Tokenizers, *, cache: Path, device: torch.device, quantization: str
    ) -> CTranslate2Engine:
        """Return the engine of a model, which is converted into the cache unless it is there already.

        Where the cache cannot be written, it is converted into a temporary folder, which goes when the model is open.
        """
        transformer = checked(model)
        make = partial(
            converted, transformer, tokenizers, quantization=quantization, narrow_int8=narrow_on(device, quantization)
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
        """Return what to say where CTranslate2 computes in another precision than the model is kept in, or nothing."""
        computed = self.translator.compute_type
        if computed in (quantization, f"{quantization}_float32"):
            return ""
        return f"on this {self.translator.device}, CTranslate2 computes {quantization} as {computed}"

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[Found]]:
        """For every job up to `nbest` answers, best first; an empty source has an empty answer."""
        return in_order(self.each(jobs, search))

    def each(self, jobs: Sequence[Job], search: SearchSettings) -> Iterator[tuple[int, list[Found]]]:
        """A batch is asked with the highest limit in it. What came to its end within its own limit is what that limit
        would have given: it is the best of all that end by then. The others are asked again, each with its own.
        """
        for why in (refused(search), *map(self.lacks, jobs)):
            if why:
                raise UserError(f"{why}; use --engine torch")
        search = search.model_copy(update={"beam": 1}) if search.method == "greedy" else search
        yield from ((i, []) for i, job in enumerate(jobs) if job.limit <= 0)
        order = sorted((i for i, job in enumerate(jobs) if job.limit > 0), key=lambda i: -len(jobs[i].ids))
        batches = (order[start : start + self.rows] for start in range(0, len(order), self.rows))
        waiting = deque(self.ask(jobs, batch, search) for batch in islice(batches, self.ahead))
        while waiting:
            asked, late = waiting.popleft(), []
            waiting.extend(self.ask(jobs, batch, search) for batch in islice(batches, 1))
            for i, answers in self.answers(asked, search):
                if asked.again:
                    yield i, sorted(answers, key=lambda one: not one.finished)[: search.nbest]
                elif all(one.finished and len(one.tokens) < jobs[i].limit for one in answers):
                    yield i, answers
                else:
                    late.append(i)
            late.sort(key=lambda i: jobs[i].limit)
            for _, some in groupby(late, lambda i: jobs[i].limit):
                waiting.append(self.ask(jobs, list(some), search, again=True))

    def ask(self, jobs: Sequence[Job], batch: list[int], search: SearchSettings, *, again: bool = False) -> Asked:
        """`again` is for sentences that reach their limit, fewer than a beam of answers being whole: twice the patience
        then changes nothing but that cut answers do not push whole ones off the list."""
        patience = 2 if again and search.beam > 1 else 1
        coming = self.translator.translate_batch(
            [list(map(self.source.__getitem__, jobs[i].ids)) for i in batch],
            beam_size=search.beam,
            patience=patience,
            num_hypotheses=patience * search.beam if again else search.nbest,
            length_penalty=search.length_penalty or NOT_QUITE_ZERO,
            max_decoding_length=max(jobs[i].limit for i in batch),
            min_decoding_length=0,
            max_input_length=0,
            suppress_sequences=[[self.target[PAD]], [self.target[BOS]]],
            return_scores=with_scores(search),
            return_end_token=True,
            asynchronous=True,
        )
        return Asked(batch, coming, again)

    def answers(self, asked: Asked, search: SearchSettings) -> Iterator[tuple[int, list[Found]]]:
        for i, coming in zip(asked.batch, asked.coming, strict=True):
            result = coming.result()
            each = zip(result.hypotheses, result.scores if with_scores(search) else [math.nan], strict=True)
            yield i, [self.found(*one, search) for one in each]

    def found(self, pieces: list[str], score: float, search: SearchSettings) -> Found:
        tokens = list(map(self.target_ids.__getitem__, pieces))
        finished = not tokens or tokens[-1] == EOS
        logp = score * max(len(tokens), 1) ** search.length_penalty
        return Found(tokens[:-1] if finished else tokens, logp, score, finished)

    def lacks(self, job: Job) -> str:
        """What of a job CTranslate2 cannot do; nothing, where it can do all."""
        if job.wish.asks:
            return "how an answer begins and which terms it has is not something that CTranslate2 can be asked for"
        longest = max(len(job.ids) + 1, job.limit)
        if longest > self.places:
            return f"CTranslate2 has places for {self.places} tokens of a sentence or answer, which may need {longest}"
        return ""


def with_scores(search: SearchSettings) -> bool:
    """A beam makes them anyway."""
    return search.scores or search.beam > 1


def refused(search: SearchSettings) -> str:
    """What of the settings CTranslate2 would do otherwise than we do; nothing, where it does the same."""
    wanted = {name: getattr(search, name) for name in SearchSettings.model_fields if name not in FOLLOWED | IDLE}
    usual = SearchSettings().model_dump()
    for name, value in wanted.items():
        if value != usual[name]:
            return f"search.{name}={value} is not something that CTranslate2 does"
    return "" if search.method in METHODS else f"search.method={search.method} is not something that CTranslate2 does"


def converted(
    model: Transformer, tokenizers: Tokenizers, cache: Path, quantization: str, *, narrow_int8: bool = False
) -> Path:
    """Return the folder of this model in the cache, made now if it is not there yet."""
    key = fingerprint(model, tokenizers.fingerprint(), model.settings, quantization, LAYOUT, *["narrow"] * narrow_int8)
    folder = cache / f"ctranslate2-{key}"

    def write(beside: Path) -> None:
        save(model, tokenizers, beside, quantization, narrow_int8=narrow_int8)

    if not (folder / "model.bin").exists():
        keep_folder(folder, "model.bin", write)
    return folder


def narrow_on(device: torch.device, quantization: str) -> bool:
    """Return whether weights of 8 bits must stay within 64, see engines/packed.py."""
    return quantization.startswith("int8") and device.type == "cpu" and not cpu_features().exact_int8
