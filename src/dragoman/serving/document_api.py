"""Documents in our own API: /api/documents."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field

from dragoman.serving.access import find_owner
from dragoman.serving.document_jobs import DocumentJob, DocumentJobs, DocumentRequest, respond_with_document
from dragoman.serving.errors import RequestError
from dragoman.serving.fields import RequestFields, Upload, describe_body, parse_fields, read_form_fields
from dragoman.serving.glossaries import GlossaryStore
from dragoman.serving.service import AUTO, SourceCode, TranslationRequest
from dragoman.serving.workers import WorkerPool


class DocumentBody(RequestFields):
    """The fields of POST /api/documents besides the file."""

    model_config = ConfigDict(extra="forbid")

    source: SourceCode = Field(AUTO, description="language of the document, or auto")
    target: str = Field("", description="language of the translation; may be left out if there is only one")
    model: str = Field("", description="name of a model; by default the first one with these languages")
    glossary: str = Field("", description="id of a glossary")


def make_document_router(workers: WorkerPool, jobs: DocumentJobs, glossaries: GlossaryStore) -> APIRouter:
    """Return the routes of documents."""
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

    @router.delete("/documents/{document_id}", status_code=204, response_model=None)
    async def delete_document(document_id: str) -> None:
        """Forget a document, and stop its translation."""
        jobs.delete(jobs.find(document_id, owner=find_owner()))

    return router


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
