"""How a model translates one text: the words that can follow a beginning, and the inspection of a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

from dragoman.inference.engines.torch import TorchEngine
from dragoman.inference.next_words import NextWord, is_word_end, list_next_words
from dragoman.inference.phrase_translator import PhraseTranslator
from dragoman.inference.translator import Translator
from dragoman.inspection.page import render_page
from dragoman.inspection.sentence import inspect
from dragoman.serving.errors import RequestError
from dragoman.serving.service import Service, TranslationRequest
from dragoman.types import Line


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
        lines = [replace(line, begin=word.text) for word in words]
        hypotheses = translator.translate(lines, beam=request.beam, align=False, context=0)
    found = zip(words, (hypothesis.text for hypothesis in hypotheses), strict=True)
    return [(word, text) for word, text in found if text.startswith(word.text) and is_word_end(word.text, text)]


def render_inspection(service: Service, request: TranslationRequest, cancelled: Event) -> str:
    """Return the inspection of the first part of a text as a page."""
    with lease_for_line(service, request, cancelled) as (translator, line):
        own: Any = None  # the search is recorded, and so is not one of the shared engine
        if not isinstance(translator, PhraseTranslator):
            own = TorchEngine(translator.model, translator.device, translator.tokenizers.target.decode)
        inspected = replace(translator, engine=own)
        inspection = translator.engine.run_model(lambda: inspect(inspected, line.text, prefix=line.begin, tag=line.tag))
    return render_page(inspection)
