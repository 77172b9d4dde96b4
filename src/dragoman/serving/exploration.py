"""How a model translates one text: the words that can follow a beginning, and the inspection of a sentence.

A browser cannot send an API key with a link. So the page of an inspection is made by a request with a key and kept for
some minutes under a random name (`InspectionStore`), and whoever has the name may read it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

from torch import nn

from dragoman.decoding.continuous_batching import Observer
from dragoman.decoding.protocol import Results, SearchFactory, SearchJob
from dragoman.inference.engines.torch import TorchEngine
from dragoman.inference.next_words import NextWord, is_word_end, list_next_words
from dragoman.inference.phrase_translator import PhraseTranslator
from dragoman.inference.translator import Translator
from dragoman.inspection.page import render_page
from dragoman.inspection.records import Inspection
from dragoman.inspection.sentence import inspect
from dragoman.serving.errors import RequestCancelled, RequestError
from dragoman.serving.service import Service, TranslationRequest
from dragoman.types import Line

LIFETIME = 15 * 60.0  # seconds for which the page of an inspection is kept
MAX_PAGE_BYTES = 100_000_000  # bytes of all pages together; the oldest pages leave first
INSPECTED_PREFIX = 1000  # characters of a prefix whose translation is inspected


@contextmanager
def lease_for_line(
    service: Service, request: TranslationRequest, cancelled: Event
) -> Iterator[tuple[Translator, Line]]:
    """Yield the model for the text of a request, and the text as a line."""
    [text] = request.texts
    if not text.strip():
        raise RequestError(400, "empty_text", "the text is empty; give a sentence")
    [line] = service.make_lines([text.strip()], request, 0)
    with service.lease_models(request.texts, request) as ([(route, _)], models):
        if route is None:
            raise RequestError(400, "same_language", "the text is in the target language already")
        model = models[route.model]
        translator = replace(model.bind(cancelled), run=model.name)  # clients need not know the folder of the run
        yield translator, replace(line, tag=route.direction.tag)


def list_alternatives(
    service: Service, request: TranslationRequest, count: int, cancelled: Event
) -> list[tuple[NextWord, str]]:
    """Return words that can follow the prefix of a request, most probable first, each with the translation with it.

    A word is left out if the best translation with it goes on with a longer word.
    """
    with lease_for_line(service, request, cancelled) as (translator, line):
        words = list_next_words(translator, line, count)
        lines = [replace(line, prefix=word.text) for word in words]
        hypotheses = translator.translate(lines, beam=request.beam, align=False, context=0)
    found = zip(words, (hypothesis.text for hypothesis in hypotheses), strict=True)
    return [(word, text) for word, text in found if text.startswith(word.text) and is_word_end(word.text, text)]


def render_inspection(service: Service, request: TranslationRequest, cancelled: Event) -> str:
    """Return the inspection of the first part of a text as a page.

    It takes seconds, so it does not run in the threads of the model, where all alignments would wait for it.
    """
    if len(request.prefix) > INSPECTED_PREFIX:
        message = f"the prefix has {len(request.prefix):,} characters; an inspection takes {INSPECTED_PREFIX:,} at most"
        raise RequestError(400, "too_long", message)
    with lease_for_line(service, request, cancelled) as (translator, line):

        def make_inspection() -> Inspection:
            return inspect(translator, line.text, prefix=line.prefix, tag=line.tag)

        if isinstance(translator, PhraseTranslator):
            run_model, without_engine = translator.engine.run_model, dict[str, Any](engine=None)
            translator = replace(translator, **without_engine)
            return render_page(run_model(make_inspection))
        # The search is traced, which those of the shared engine cannot be.
        engine = CancellableEngine(translator.model, translator.device, translator.tokenizers.target.decode)
        engine.cancelled = cancelled
        translator = replace(translator, engine=engine)
        with cancel_model(translator.model, cancelled):
            return render_page(make_inspection())


class CancellableEngine(TorchEngine):
    """An engine whose searches raise RequestCancelled at the next step once `cancelled` is set."""

    cancelled: Event

    def run(
        self, jobs: Sequence[SearchJob], make_search: SearchFactory, *, is_plain_beam: bool, observe: Observer | None
    ) -> Results:
        def check(*state: Any) -> None:
            raise_if_set(self.cancelled)
            if observe:
                observe(*state)

        return super().run(jobs, make_search, is_plain_beam=is_plain_beam, observe=check)


@contextmanager
def cancel_model(model: nn.Module, cancelled: Event) -> Iterator[None]:
    """Let each forward pass of this thread raise RequestCancelled within the block once `cancelled` is set."""
    thread = threading.get_ident()

    def check(*_: object) -> None:
        if threading.get_ident() == thread:
            raise_if_set(cancelled)

    hook = model.register_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def raise_if_set(cancelled: Event) -> None:
    if cancelled.is_set():
        raise RequestCancelled


class InspectionStore:
    """Pages of inspections by name, oldest first. One page at a time is made, since that takes a core for seconds."""

    def __init__(self, lifetime: float = LIFETIME, max_bytes: int = MAX_PAGE_BYTES) -> None:
        self.lifetime, self.max_bytes = lifetime, max_bytes
        self.is_making = threading.Lock()
        self.lock = threading.Lock()
        self.pages: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # name -> time of expiry, page
        self.size = 0

    def make(self, service: Service, request: TranslationRequest, cancelled: Event) -> str:
        """Return the page of an inspection; raise a RequestError if another one is being made."""
        if not self.is_making.acquire(blocking=False):
            raise RequestError(429, "busy", "another sentence is being inspected; try again later", retry_after=2)
        try:
            return render_inspection(service, request, cancelled)
        finally:
            self.is_making.release()

    def add(self, page: str) -> str:
        """Keep a page and return its name."""
        name, content = secrets.token_urlsafe(16), page.encode()
        with self.lock:
            self.pages[name] = (time.monotonic() + self.lifetime, content)
            self.size += len(content)
            while len(self.pages) > 1 and self.size > self.max_bytes:
                self.remove_oldest()
        return name

    def get(self, name: str) -> bytes:
        """Return a page; raise a RequestError if it is not there any more."""
        with self.lock:
            while self.pages and next(iter(self.pages.values()))[0] < time.monotonic():
                self.remove_oldest()
            if name not in self.pages:
                raise RequestError(404, "not_found", "this inspection is not kept any more; ask for it again")
            return self.pages[name][1]

    def remove_oldest(self) -> None:
        _, (_, content) = self.pages.popitem(last=False)
        self.size -= len(content)
