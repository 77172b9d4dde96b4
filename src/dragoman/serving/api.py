"""Dragoman's own API, under /api."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from dataclasses import asdict
from threading import Event
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from dragoman.errors import UserError
from dragoman.inference.word_alignment import align_words
from dragoman.serving.access import authorize, find_owner
from dragoman.serving.errors import RequestError, render_own, to_request_error
from dragoman.serving.fields import RequestFields, describe_record, read_record
from dragoman.serving.glossaries import GlossaryStore
from dragoman.serving.service import AUTO, Service, SourceCode, Translation, TranslationRequest
from dragoman.serving.text_batches import TextBatches
from dragoman.serving.workers import StreamEnd, WorkerPool


class TranslateBody(RequestFields):
    """The body of POST /api/translate and POST /api/stream."""

    model_config = ConfigDict(extra="forbid")

    text: str | Annotated[list[str], Field(min_length=1)] = Field(description="text or texts to translate")
    source: SourceCode = Field(AUTO, description="language of the texts, or auto")
    target: str = Field("", description="language of the translations; may be left out if there is only one")
    model: str = Field("", description="name of a model; by default the first one with these languages")
    beam: int | None = Field(None, ge=1, description="number of hypotheses kept by the search")
    nbest: int = Field(1, ge=1, description="number of translations of each text")
    align: bool = Field(False, description="return alignments")
    prefix: str = Field("", description="beginning of the translation")
    terms: list[str] = Field([], description="words that each translation must contain")
    avoid: list[str] = Field([], description="words that no translation may contain")
    glossary: str = Field("", description="id of a glossary")
    context: list[str] = Field([], description="sentences before the text, oldest first")
    markup: Literal["text", "html", "xml"] = Field("text", description="whether the texts have tags")

    async def make_request(self, glossaries: GlossaryStore, workers: WorkerPool) -> TranslationRequest:
        """Return the request with the glossary that it names; refuse options that texts with tags do not have."""
        if self.markup != "text":
            options = ("nbest", "align", "prefix", "terms", "avoid", "context")
            given = [name for name in options if getattr(self, name) != type(self).model_fields[name].default]
            if given:
                message = f"a text with markup={self.markup} cannot have {' or '.join(given)}; leave it out"
                raise RequestError(400, "not_with_markup", message)
        values: dict[str, Any] = self.model_dump(exclude={"text", "glossary"})
        values |= {name: tuple(values[name]) for name in ("terms", "avoid", "context")}
        values["keep_breaks"] = self.markup != "html"
        if self.glossary:
            values["glossary"] = await workers.run(lambda _: glossaries.find(self.glossary, find_owner()).glossary)
        return TranslationRequest(texts=[self.text] if isinstance(self.text, str) else self.text, **values)


class RouteRecord(BaseModel):
    """What translated a text. In an answer with several texts, each translation has its own."""

    model: str = Field(description="name of the model; empty if the text was not translated")
    source: str = Field(description="language of the text")
    target: str = Field(description="language of the translation")
    detected: dict[str, Any] | None = Field(description="language and confidence, if the source was auto")


class AlternativeRecord(BaseModel):
    """One of the other translations of a text."""

    text: str
    score: float = Field(description="logp after length normalization")


class TranslationRecord(RouteRecord):
    """The translation of one text."""

    text: str = Field(description="the best translation")
    score: float = Field(description="logp after length normalization")
    logp: float = Field(description="natural logarithm of the probability of the translation")
    tokens: list[str] = Field(description="of the translation")
    source_tokens: list[str] = Field(description="of the text")
    alignment: list[list[float]] = Field(description="weights between tokens; rows are tokens of the translation")
    words: list[list[int]] = Field(description="first character of each word of the translation, and its end")
    source_words: list[list[int]] = Field(description="first character of each word of the text, and its end")
    word_alignment: list[list[float]] = Field(description="weights between words; rows are words of the translation")
    warnings: list[str] = Field(description="what may be wrong, in sentences")
    flags: list[str] = Field(description="what may be wrong, in words for programs")
    alternatives: list[AlternativeRecord] = Field(description="other translations, best first")


class TranslateResponse(RouteRecord):
    """The answer of POST /api/translate. Model and languages are those of the first text."""

    translations: list[TranslationRecord] = Field(description="of each text, in order")


def describe_translations(translations: list[Translation], texts: list[str]) -> dict[str, Any]:
    """Return the answer of /api/translate for these texts (TranslateResponse)."""
    pairs = zip(translations, texts, strict=True)
    return {
        **describe_route(translations[0]),
        "translations": [
            {**describe_route(translation), **describe_translation(translation, text)} for translation, text in pairs
        ],
    }


def describe_route(translation: Translation) -> dict[str, Any]:
    """Return model and languages of a translation."""
    return {
        "model": translation.model,
        "source": translation.source,
        "target": translation.target,
        "detected": asdict(translation.detection) if translation.detection else None,
    }


def describe_translation(translation: Translation, text: str) -> dict[str, Any]:
    """Return the best hypothesis and its alternatives; with an alignment, also words and the weights between them."""
    best, *others = translation.hypotheses
    aligned = align_words(text, best) if best.alignment else None
    return {
        "text": best.text,
        "score": best.score,
        "logp": best.logp,
        "tokens": best.tokens,
        "source_tokens": best.source_tokens,
        "alignment": best.alignment,
        "words": aligned.words if aligned else [],  # first character of each word, and the one after its last
        "source_words": aligned.source_words if aligned else [],
        "word_alignment": np.round(aligned.weight_TS, 4).tolist() if aligned and aligned.weight_TS is not None else [],
        "warnings": best.warnings,
        "flags": best.flags,
        "alternatives": [{"text": other.text, "score": other.score} for other in others],
    }


def make_router(service: Service, workers: WorkerPool, batches: TextBatches, glossaries: GlossaryStore) -> APIRouter:
    """Return the routes of our own API."""
    router = APIRouter(prefix="/api")

    # The answer is only described by a record, not validated: alignments can be large. So it is also written in the
    # thread of the request.
    @router.post(
        "/translate", responses={200: {"model": TranslateResponse}}, openapi_extra=describe_record(TranslateBody)
    )
    async def translate(http: Request) -> Response:
        """Translate one or several texts.

        The translations have the order of the texts. Texts may have several lines, which are translated one by one;
        line breaks are kept. Without a source, the language of each text is detected.
        """
        body = await read_record(http, TranslateBody)
        request = await body.make_request(glossaries, workers)
        service.check(request)
        authorize(http, None, request.characters, len(request.texts))

        def write_answer(translations: list[Translation]) -> bytes:
            return to_json(describe_translations(translations, request.texts))

        return Response(await batches.translate(request, write_answer), media_type="application/json")

    @router.post("/stream", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
    async def stream(body: TranslateBody, http: Request) -> StreamingResponse:
        """Translate a text and send each part of the translation as soon as it is final (server-sent events).

        The events are `part` with a text, at the end `done` with the answer of /api/translate, or else `error`.
        """
        request = await body.make_request(glossaries, workers)
        if len(request.texts) != 1 or request.nbest != 1:
            raise RequestError(400, "one_text", "a stream has one translation of one text; use /api/translate for more")
        service.check(request)
        authorize(http, None, request.characters, len(request.texts))

        def work(cancelled: Event) -> Generator[str, None, str]:
            translation = yield from service.stream(request, cancelled)
            return format_event("done", describe_translations([translation], request.texts))

        items = workers.stream(work)
        first = await anext(items)  # errors before the first part are answered with their status

        async def send() -> AsyncIterator[str]:
            item = first
            try:
                while not isinstance(item, StreamEnd):
                    yield format_event("part", {"text": item})
                    item = await anext(items)
                yield item.value
            except (RequestError, UserError) as error:
                yield format_event("error", render_own(to_request_error(error))[1])
            finally:
                await items.aclose()

        return StreamingResponse(send(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    return router


def format_event(name: str, data: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {to_json(data).decode()}\n\n"
