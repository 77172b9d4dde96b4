"""The routes of our own API that tell what the server can do, and in which language a text is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from dragoman.serving.access import authorize
from dragoman.serving.descriptions import describe_languages, describe_model, describe_settings
from dragoman.serving.fields import RequestFields
from dragoman.serving.service import Service, TranslationRequest
from dragoman.serving.workers import WorkerPool


class DetectBody(RequestFields):
    """The body of POST /api/detect."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(description="text whose language is wanted")


def make_description_router(service: Service, workers: WorkerPool) -> APIRouter:
    """Return the routes that tell what the server can do, and in which language a text is."""
    router = APIRouter(prefix="/api")

    @router.get("/models")
    async def models() -> list[dict[str, Any]]:
        """Return the models, in the order in which they are chosen."""
        return [describe_model(model) for model in list(service.pool.models.values())]

    @router.get("/languages")
    async def languages() -> list[dict[str, Any]]:
        """Return all languages and, for each, those into which it is translated."""
        return describe_languages(service.languages)

    @router.get("/settings")
    async def settings() -> dict[str, Any]:
        """Return the limits of requests, and what the server supports."""
        return describe_settings(service.settings)

    @router.post("/detect")
    async def detect(body: DetectBody, http: Request) -> dict[str, Any]:
        """Return the languages of the models, best first, with the probability that the text is in each."""
        service.check(TranslationRequest(texts=[body.text]))
        authorize(http)
        found = await workers.run(lambda _: service.detect(body.text))
        return {"languages": [{"language": d.language, "confidence": round(d.confidence, 4)} for d in found]}

    return router
