"""Glossaries in our own API: /api/glossaries."""

from __future__ import annotations

from threading import Event
from typing import Any

from fastapi import APIRouter
from pydantic import ConfigDict, Field

from dragoman.serving.access import find_owner
from dragoman.serving.fields import RequestFields
from dragoman.serving.glossaries import GlossaryStore, StoredGlossary
from dragoman.serving.language_index import parse_code
from dragoman.serving.service import Service
from dragoman.serving.workers import WorkerPool


class GlossaryBody(RequestFields):
    """The body of POST /api/glossaries."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="name of the glossary")
    source: str = Field(description="language of the terms")
    target: str = Field(description="language of their translations")
    entries: dict[str, str] = Field(description="terms and their translations")


def make_glossary_router(service: Service, workers: WorkerPool, glossaries: GlossaryStore) -> APIRouter:
    """Return the routes of glossaries."""
    router = APIRouter(prefix="/api")

    @router.get("/glossaries")
    async def list_glossaries() -> list[dict[str, Any]]:
        """Return the glossaries of the key, without their entries."""
        found = await workers.run(lambda _: glossaries.list(find_owner()))
        return [describe_glossary(glossary) for glossary in found]

    @router.post("/glossaries", status_code=201)
    async def create_glossary(body: GlossaryBody) -> dict[str, Any]:
        """Store a glossary."""
        source, target = parse_code(body.source, "source"), parse_code(body.target, "target")
        service.languages.find_route(source, target, "")

        def create(_: Event) -> StoredGlossary:
            return glossaries.create(body.name, source, target, body.entries.items(), find_owner())

        return describe_glossary(await workers.run(create))

    @router.get("/glossaries/{glossary_id}")
    async def glossary(glossary_id: str) -> dict[str, Any]:
        """Return a glossary with its entries."""
        found = await workers.run(lambda _: glossaries.find(glossary_id, find_owner()))
        return {**describe_glossary(found), "entries": dict(found.entries)}

    @router.delete("/glossaries/{glossary_id}", status_code=204, response_model=None)
    async def delete_glossary(glossary_id: str) -> None:
        """Delete a glossary."""
        await workers.run(lambda _: glossaries.delete(glossary_id, find_owner()))

    return router


def describe_glossary(glossary: StoredGlossary) -> dict[str, Any]:
    """Return what our API says about a glossary."""
    return {
        "id": glossary.id,
        "name": glossary.name,
        "source": glossary.source,
        "target": glossary.target,
        "created": glossary.created,
        "count": len(glossary.entries),
    }
