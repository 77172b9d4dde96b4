"""The routes of our own API that show how a model translates a text."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import ConfigDict, Field

from dragoman.serving.access import authorize
from dragoman.serving.exploration import InspectionStore, list_alternatives
from dragoman.serving.fields import RequestFields
from dragoman.serving.service import AUTO, Service, SourceCode, TranslationRequest
from dragoman.serving.workers import WorkerPool

# An inspection is a page with scripts of its own. In a sandbox it can reach neither this server nor the page around it.
INSPECTION_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
INSPECTION_HEADERS = {"Content-Security-Policy": INSPECTION_POLICY, "Cache-Control": "no-store"}


class SentenceBody(RequestFields):
    """The body of requests about the translation of one text."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(description="text to translate")
    source: SourceCode = Field(AUTO, description="language of the text, or auto")
    target: str = Field("", description="language of the translation; may be left out if there is only one")
    model: str = Field("", description="name of a model; by default the first one with these languages")
    prefix: str = Field("", description="beginning of the translation")

    def make_request(self, service: Service, http: Request) -> TranslationRequest:
        """Return the request, checked and counted."""
        values: dict[str, Any] = self.model_dump(include={"source", "target", "model", "prefix"})
        request = TranslationRequest(texts=[self.text], **values)
        service.check(request)
        authorize(http, None, request.characters)
        return request


class WordsBody(SentenceBody):
    """The body of POST /api/words."""

    count: int = Field(8, ge=1, le=32, description="number of words")


def make_exploration_router(service: Service, workers: WorkerPool) -> APIRouter:
    """Return the routes that show how a model translates one text."""
    router, store = APIRouter(), InspectionStore()

    @router.post("/api/words")
    async def words(body: WordsBody, http: Request) -> dict[str, Any]:
        """Return words that can follow the prefix, each with its probability and the translation with it."""
        request = body.make_request(service, http)
        found = await workers.run(lambda cancelled: list_alternatives(service, request, body.count, cancelled))
        alternatives = [{"word": word.word, "text": text, "probability": word.probability} for word, text in found]
        return {"alternatives": alternatives}

    @router.post("/api/inspect", response_class=HTMLResponse)
    async def inspect(body: SentenceBody, http: Request) -> HTMLResponse:
        """Return a page that shows attention, attributions, next-token probabilities and the search."""
        request = body.make_request(service, http)
        page = await workers.run(lambda cancelled: store.make(service, request, cancelled))
        return HTMLResponse(page, headers=INSPECTION_HEADERS)

    @router.post("/api/inspections", status_code=201)
    async def create_inspection(body: SentenceBody, http: Request) -> dict[str, Any]:
        """Keep the page of /api/inspect for some minutes, and return its address, for which no key is needed.

        The address is relative to that of the server.
        """
        request = body.make_request(service, http)
        page = await workers.run(lambda cancelled: store.make(service, request, cancelled))
        return {"url": f"inspections/{store.add(page)}"}

    @router.get("/inspections/{name}", response_class=HTMLResponse, include_in_schema=False)
    async def get_inspection(name: str) -> HTMLResponse:
        return HTMLResponse(store.get(name), headers=INSPECTION_HEADERS)

    return router
