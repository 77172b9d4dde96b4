"""Which engine answers: the one that was asked for, or, with `auto`, the fastest for this model on this machine.

Engines are raced once, on sentences that are to be translated anyway, when there are enough of them to make up for
it. The verdict is kept in the user's cache. Engines in less than full precision take part, but win only if nearly all
tokens of their answers are those of full precision.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from dragoman.config import SearchSettings, pick
from dragoman.engines.base import Engine, Job, in_order
from dragoman.engines.ctranslate2 import CTranslate2Engine, refused
from dragoman.engines.packed import ready
from dragoman.engines.torch_engine import TorchEngine
from dragoman.exchange.ctranslate2 import checked, library
from dragoman.exchange.held import fingerprint
from dragoman.hardware import best_precision
from dragoman.models.base import Model
from dragoman.search.step import Found
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import UserError

ENOUGH = 128  # sentences from which on a race pays for itself
SAMPLE = 32  # sentences that are raced on
ALIKE = 0.95  # of the tokens must be those of full precision
WORTH = 1.2  # times as fast as full precision another must be
LONGEST = 256  # tokens of a source that is raced on: longer ones say little of the others
RULES = 2  # of the race; raised when verdicts of old are no longer good
FULL = "torch"  # the engine that the others are measured by


class Parts(NamedTuple):
    """What engines are made of."""

    model: Model
    tokenizers: Tokenizers
    device: torch.device
    cache: Path


class Verdict(NamedTuple):
    """How a race went, by the name of an engine; those that cannot run the model are not in it."""

    winner: str
    seconds: dict[str, float]
    alike: dict[str, float]  # the share of tokens that are those of full precision

    def __str__(self) -> str:
        if self.winner == FULL:
            return f"engine: {FULL}{self.why_full()}"
        speed = f"{self.times(self.winner):.1f} times as fast"
        alike = f"{self.alike[self.winner]:.1%} of its tokens are those of full precision"
        return f"engine: {self.winner}, {speed}; {alike} (--engine {FULL} gives all)"

    def times(self, name: str) -> float:
        """How many times as fast as full precision."""
        return self.seconds[FULL] / self.seconds[name]

    def why_full(self) -> str:
        """What kept the fastest engine from winning, where that is another."""
        first = min(self.seconds, key=lambda name: (self.seconds[name], name != FULL))
        if first == FULL:
            return ", the fastest here"
        if self.times(first) < WORTH:
            return f" ({first} is faster, but not {WORTH} times as fast, which is asked for)"
        alike = min(self.alike[first], ALIKE - 0.01)  # never rounded up to what is asked for
        return (
            f" ({first} is {self.times(first):.1f} times as fast, but only {alike:.0%} of its tokens are the same; "
            f"{ALIKE:.0%} are asked for)"
        )


class AutoEngine(Engine):
    """Answers with the engine that was fastest, and with PyTorch as long as there was no race."""

    def __init__(self, parts: Parts, say: Callable[[str], None]) -> None:
        self.parts, self.say = parts, say
        self.opened: dict[str, Engine] = {}
        self.verdicts: dict[str, Verdict | None] = {}
        self.lock = threading.Lock()

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[Found]]:
        return in_order(self.each(jobs, search))

    def each(self, jobs: Sequence[Job], search: SearchSettings) -> Iterator[tuple[int, list[Found]]]:
        """Each job by the fastest engine, or by PyTorch if that one cannot do it, whatever its neighbours ask for."""
        with self.lock:
            engines = self.engines_for(jobs, search)
        for engine in dict.fromkeys(engines):
            numbers = [number for number, one in enumerate(engines) if one is engine]
            for number, answers in engine.each([jobs[i] for i in numbers], search):
                yield numbers[number], answers

    def engines_for(self, jobs: Sequence[Job], search: SearchSettings) -> list[Engine]:
        """One for each job."""
        verdict = self.verdict(jobs, search) if len(self.runners) > 1 else None
        engine = self.winner(verdict.winner if verdict else FULL)
        if not isinstance(engine, CTranslate2Engine):
            return [engine] * len(jobs)
        able = not refused(search)
        return [engine if able and not engine.lacks(job) else self.open(FULL) for job in jobs]

    def winner(self, name: str) -> Engine:
        """PyTorch, where the cache cannot hold or has spoilt the model of another engine."""
        with suppress(UserError):
            return self.open(name)
        return self.open(FULL)

    def open(self, name: str) -> Engine:
        if name not in self.opened:
            self.opened[name] = self.runners[name]()
        return self.opened[name]

    def all_open(self) -> dict[str, Engine]:
        """All but those that the cache has no room for."""
        for name in self.runners:
            with suppress(UserError):
                self.open(name)
        return {name: self.opened[name] for name in self.runners if name in self.opened}

    @cached_property
    def runners(self) -> dict[str, Callable[[], Engine]]:
        """Engines that can run this model: that are installed, and hold all of it."""
        able = {}
        for name, runner in RUNNERS.items():
            with suppress(UserError):
                able[name] = runner(self.parts)
        return able

    def verdict(self, jobs: Sequence[Job], search: SearchSettings) -> Verdict | None:
        """What is remembered of a race with this beam, or what a race says now, if there is enough to translate.

        Races in which CTranslate2 could not take part say nothing of others, and are remembered by themselves.
        """
        alone = bool(refused(search))
        key = f"{search.method}-{search.beam}" + "-alone" * alone + unusual(search)
        distinct = {tuple(job.ids): job for job in jobs if alone or not job.wish.asks}
        jobs = [job for job in distinct.values() if len(job.ids) <= LONGEST]
        if not self.verdicts.get(key):
            path = self.parts.cache.expanduser() / f"engine-{self.model_key}-{key}.json"
            found = remembered(path)
            if not found and len(jobs) >= ENOUGH:
                self.say(f"trying engines on {SAMPLE} sentences, once for this model on this machine")
                found = race(self.all_open(), spread(jobs), search)
                remember(path, found)
            if found:
                self.say(str(found))
            self.verdicts[key] = found
        return self.verdicts[key]

    @cached_property
    def model_key(self) -> str:
        return fingerprint(self.parts.model, machine(), self.parts.device, sorted(RUNNERS), RULES)


def spread(jobs: Sequence[Job]) -> list[Job]:
    """Some of the jobs, short and long as they come."""
    order = sorted(jobs, key=lambda job: len(job.ids))
    return [order[number * len(order) // SAMPLE] for number in range(SAMPLE)]


def race(
    engines: dict[str, Engine],
    jobs: list[Job],
    search: SearchSettings,
    clock: Callable[[], float] = time.perf_counter,
) -> Verdict:
    """Each engine on the same jobs, once to get warm and once by the clock; FULL is the first of them."""
    seconds, alike = {}, {}
    truth: list[list[Found]] = []
    for name, engine in engines.items():
        try:
            engine.search(jobs[:: len(jobs) // 4], search)
            begun = clock()
            found = engine.search(jobs, search)
        except UserError:
            continue  # it cannot do what is asked, and is no choice for it
        seconds[name] = clock() - begun
        truth = truth or found
        alike[name] = likeness(truth, found)
    worth = [name for name in seconds if alike[name] >= ALIKE and seconds[name] * WORTH <= seconds[FULL]]
    return Verdict(min(worth, key=lambda name: seconds[name], default=FULL), seconds, alike)


def unusual(search: SearchSettings) -> str:
    """Limits that are not the usual ones: what is fastest for answers of one token says nothing of others."""
    usual = SearchSettings()
    limits = (search.max_ratio, search.max_extra)
    return "" if limits == (usual.max_ratio, usual.max_extra) else "-{:g}-{:g}".format(*limits)


def likeness(one: list[list[Found]], other: list[list[Found]]) -> float:
    """The share of tokens that the best answers have in common."""
    pairs = [(a[0].tokens, b[0].tokens) for a, b in zip(one, other, strict=True) if a and b]
    common = sum((Counter(a) & Counter(b)).total() for a, b in pairs)
    total = sum(len(a) + len(b) for a, b in pairs)
    return 2 * common / total if total else 1.0


def machine() -> tuple[str, ...]:
    """What decides which engine is fastest, beside the model."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return (names[0] if names else platform.processor(), str(torch.get_num_threads()), torch.__version__, installed())


def installed() -> str:
    try:
        return version("ctranslate2")
    except PackageNotFoundError:
        return ""


def remembered(path: Path) -> Verdict | None:
    """The verdict in a file; None where there is none, or none that can be read."""
    try:
        found = Verdict(**json.loads(path.read_text(encoding="utf-8")))
        whole = {found.winner, FULL} <= found.seconds.keys() & RUNNERS.keys()
        whole = whole and found.seconds.keys() == found.alike.keys() and min(found.alike.values()) >= 0
        return found if whole and min(found.seconds.values()) > 0 and found.alike[found.winner] >= ALIKE else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def remember(path: Path, verdict: Verdict) -> None:
    """Whole or not at all; where the cache cannot be written, the race is run again another day."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(verdict._asdict(), file)
        os.replace(beside, path)
    except OSError:
        return


def by_torch(parts: Parts, precision: str = "float32") -> Callable[[], Engine]:
    model, tokenizers, device, _ = parts
    if precision == "bf16" and best_precision(device) != "bf16":
        raise UserError("this machine has no instructions for bf16")
    if precision == "int8" and (device.type != "cpu" or not torch.cpu._is_vnni_supported()):
        raise UserError("this machine has no instructions for products of 8 bits")
    return lambda: TorchEngine(ready(model, device, precision), device, tokenizers.target.decode)


def by_ctranslate2(parts: Parts, quantization: str = "float32") -> Callable[[], Engine]:
    """It is not opened, which takes a while, before it is known to be able."""
    model, tokenizers, device, cache = parts
    checked(model)
    if device.type == "cuda" and not library().get_cuda_device_count():
        raise UserError("the CTranslate2 that is installed cannot use the GPU; write --device cpu or --engine torch")
    return lambda: CTranslate2Engine.of(model, tokenizers, cache=cache, device=device, quantization=quantization)


RUNNERS: dict[str, Callable[[Parts], Callable[[], Engine]]] = {  # that take part in a race; FULL is the first
    FULL: by_torch,
    "torch-bf16": partial(by_torch, precision="bf16"),
    "torch-int8": partial(by_torch, precision="int8"),
    "ctranslate2": by_ctranslate2,
    "ctranslate2-int8": partial(by_ctranslate2, quantization="int8"),
}


def engine_of(name: str, parts: Parts, say: Callable[[str], None]) -> Engine:
    """The engine that was asked for; what `auto` decides is said."""
    if name == "auto":
        return AutoEngine(parts, say)
    return pick({"auto": by_torch, **RUNNERS}, name, "engine")(parts)()
