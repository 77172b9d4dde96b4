"""Documents and glossaries in our own API: /api/documents and /api/glossaries."""

from __future__ import annotations

from threading import Event
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field

from dragoman.serving.access import find_owner
from dragoman.serving.document_jobs import DocumentJob, DocumentJobs, DocumentRequest, respond_with_document
from dragoman.serving.errors import RequestError
from dragoman.serving.fields import RequestFields, Upload, describe_body, parse_fields, read_form_fields
from dragoman.serving.glossaries import GlossaryStore, StoredGlossary
from dragoman.serving.language_index import parse_code
from dragoman.serving.service import AUTO, Service, SourceCode, TranslationRequest
from dragoman.serving.workers import WorkerPool


class DocumentBody(RequestFields):
    """The fields of POST /api/documents besides the file."""

    model_config = ConfigDict(extra="forbid")

    source: SourceCode = Field(AUTO, description="language of the document, or auto")
    target: str = Field("", description="language of the translation; may be left out if there is only one")
    model: str = Field("", description="name of a model; by default the first one with these languages")
    glossary: str = Field("", description="id of a glossary")


class GlossaryBody(RequestFields):
    """The body of POST /api/glossaries."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="name of the glossary")
    source: str = Field(description="language of the terms")
    target: str = Field(description="language of their translations")
    entries: dict[str, str] = Field(description="terms and their translations")


def make_document_router(
    service: Service, workers: WorkerPool, jobs: DocumentJobs, glossaries: GlossaryStore
) -> APIRouter:
    """Return the routes of documents and glossaries."""
    router = APIRouter(prefix="/api")

    @router.post("/documents", status_code=202, openapi_extra=describe_body(DocumentBody, with_file=True))
    async def upload(http: Request) -> dict[str, Any]:
        """Translate a document; the answer comes at once and has the id by which to ask for the result."""
        raw = await read_form_fields(http)
        file = raw.pop("file", None)
        if not isinstance(file, Upload) or not file.name:
            raise RequestError(400, "missing_field", "file: missing")
        fields = parse_fields(DocumentBody, raw)
        glossary = None
        if fields.glossary:
            glossary = await workers.run(lambda _: glossaries.find(fields.glossary, find_owner()).glossary)
        options = TranslationRequest(
            texts=[], source=fields.source, target=fields.target, model=fields.model, glossary=glossary
        )
        request = DocumentRequest(name=file.name, data=file.data, options=options)
        return describe_document(await jobs.submit(http, request))

    @router.get("/documents/{document_id}")
    async def document(document_id: str) -> dict[str, Any]:
        """Return the progress of a document."""
        return describe_document(jobs.find(document_id, owner=find_owner()))

    @router.get("/documents/{document_id}/result")
    async def document_result(document_id: str) -> Response:
        """Return a translated document."""
        return respond_with_document(jobs.find(document_id, owner=find_owner()))

    @router.delete("/documents/{document_id}", status_code=204)
    async def delete_document(document_id: str) -> None:
        """Forget a document, and stop its translation."""
        jobs.delete(jobs.find(document_id, owner=find_owner()))

    add_own_glossary_routes(router, service, workers, glossaries)
    return router


def add_own_glossary_routes(
    router: APIRouter, service: Service, workers: WorkerPool, glossaries: GlossaryStore
) -> None:
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

    @router.delete("/glossaries/{glossary_id}", status_code=204)
    async def delete_glossary(glossary_id: str) -> None:
        """Delete a glossary."""
        await workers.run(lambda _: glossaries.delete(glossary_id, find_owner()))


def describe_document(job: DocumentJob) -> dict[str, Any]:
    """Return what our API says about a document."""
    return {
        "id": job.id,
        "name": job.name,
        "status": job.status,
        "done": job.done,
        "total": job.total,
        "seconds_left": job.seconds_left,
        "warnings": job.warnings,
        "error": job.error,
    }


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
