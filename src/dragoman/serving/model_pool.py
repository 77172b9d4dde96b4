"""The loaded models of a server. Requests lease a model, so that it can be replaced or removed while they run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.serving.batching import SharedEngine, share_engine
from dragoman.serving.errors import RequestError
from dragoman.types import Line

COLLECTION_THRESHOLD = 10_000  # new objects after which those of them that are garbage are collected
WARMUP_TEXT = "a"  # translated before a model is served: the first translation of a process takes longer


@dataclass(eq=False)
class ServedModel:
    """A loaded translator under the name by which requests choose it."""

    name: str
    run: Path
    translator: Translator  # with an engine that all requests share; for a request that can be cancelled, see `bind`
    engine: SharedEngine
    leases: int = field(default=0, init=False)  # number of requests that use it
    retired: bool = field(default=False, init=False)  # whether it is closed after the last of them

    def bind(self, cancelled: threading.Event) -> Translator:
        """Return the translator for one request: it raises RequestCancelled once `cancelled` is set."""
        return replace(self.translator, engine=self.engine.bind(cancelled))

    def warm_up(self) -> None:
        """Translate a text; raise a UserError if the engine does not support the search settings of the run."""
        tag = next(filter(None, self.translator.recipe.data.tags), "")
        self.translator.translate_nbest([Line(WARMUP_TEXT, tag=tag)], self.translator.make_options())


class ModelPool:
    """Models by name. The first one that fits a request's languages is used if the request names none."""

    def __init__(self, *, engine: str = "auto", device: str = "auto", batching: bool = True) -> None:
        self.engine, self.device, self.batching = engine, device, batching
        self.threads = torch.get_num_threads()  # of this thread; those that decode have a single one
        self.lock = threading.Lock()
        self.models: dict[str, ServedModel] = {}
        self.freezes_objects = False  # see `tune_garbage_collection`

    def load(self, name: str, run: str | Path) -> ServedModel:
        """Load a run and serve it under this name, in place of the model that had the name before.

        Until the new model is loaded and has translated a text, requests use the old one. Running requests finish with
        the old model.
        """
        torch.set_num_threads(self.threads)  # CTranslate2 gets as many workers
        translator = load_as(Translator, run, device=self.device, engine=self.engine)
        engine = share_engine(translator, self.threads, batching=self.batching)
        translator = replace(translator, engine=engine.bind(threading.Event()))
        model = ServedModel(name, Path(run), translator, engine)
        try:
            model.warm_up()
        except BaseException:
            engine.close()
            raise
        with self.lock:
            old = self.models.get(name)
            self.models[name] = model
        if old:
            self.retire(old)
            del old
        if self.freezes_objects:
            freeze_objects()
        return model

    def remove(self, name: str) -> None:
        """Stop serving a model. Running requests finish with it."""
        with self.lock:
            model = self.get(name)
            del self.models[name]
        self.retire(model)

    def get(self, name: str) -> ServedModel:
        if name not in self.models:
            raise RequestError(404, "unknown_model", f"there is no model {name!r}; GET /api/models lists them")
        return self.models[name]

    def retire(self, model: ServedModel) -> None:
        with self.lock:
            model.retired = True
            is_unused = not model.leases
        if is_unused:
            model.engine.close()

    @contextmanager
    def lease(self, name: str) -> Iterator[ServedModel]:
        """Yield the model of this name; it stays usable until the end, even if it is replaced meanwhile."""
        with self.lock:
            model = self.get(name)
            model.leases += 1
        try:
            yield model
        finally:
            with self.lock:
                model.leases -= 1
                is_last = model.retired and not model.leases
            if is_last:
                model.engine.close()

    def close(self) -> None:
        """Remove all models."""
        for name in list(self.models):
            self.remove(name)


@contextmanager
def tune_garbage_collection(pool: ModelPool) -> Iterator[None]:
    """Let garbage collections be short and rare, in a process that only serves the models of a pool.

    Libraries and models have a million objects. A collection that visits all of them would stop the requests for a
    tenth of a second, so whatever exists when a model has been loaded is exempt. What requests create is seldom part of
    a cycle.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTION_THRESHOLD, *thresholds[1:])
    pool.freezes_objects = True
    try:
        yield
    finally:
        pool.freezes_objects = False
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def freeze_objects() -> None:
    """Collect all garbage, then exempt what is left from collections until the next call."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
