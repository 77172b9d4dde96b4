"""Documents that are being translated, and their translations until they expire.

A document is parsed when it arrives, waits in a queue, and is translated part by part by a few threads, so that its
progress is known and it can be cancelled. Nobody has to wait for it: a client that has gone can come back for the
result.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from threading import Event
from typing import Literal
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response

from dragoman.documents.document import Document, LanguageMismatch
from dragoman.documents.formats import open_document
from dragoman.errors import UserError
from dragoman.serving.access import authorize, find_owner, get_current_key, get_current_request
from dragoman.serving.errors import RequestCancelled, RequestError, make_stopping_error, to_request_error
from dragoman.serving.language_index import parse_code
from dragoman.serving.observability import RequestLog
from dragoman.serving.service import AUTO, Service, TranslationRequest
from dragoman.serving.settings import ServerSettings
from dragoman.serving.workers import WorkerPool, wait_for_result

SAMPLE_CHARACTERS = 2000  # by which the language of a document is detected
MAX_FILE_NAME = 120  # characters of the name of a file
MAX_WARNINGS = 100  # that are kept of a document
MEMORY_FACTOR = 3  # bytes of a document in memory, with its units and their translations, for each of its size
NOT_IN_QUOTES = re.compile(r'[^ -~]|["\\%]')  # characters that not all clients read in a quoted file name
Status = Literal["queued", "translating", "done", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRequest:
    """A document, and how to translate it: `options` has everything but the texts."""

    name: str
    data: bytes
    options: TranslationRequest


@dataclass(eq=False, kw_only=True)
class DocumentJob:
    """The translation of a document: waiting, running or finished."""

    name: str
    owner: str  # name of the API key
    options: TranslationRequest
    document: Document | None  # until it is translated
    size: int  # of the document: bytes of the file or characters of its unpacked text, whichever is more
    total: int  # units to translate
    characters: int
    request_id: str  # of the upload, for the log
    path_template: str  # of the upload, for the log
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str = field(default_factory=lambda: secrets.token_hex(32))  # that clients of DeepL have to show
    status: Status = "queued"
    done: int = 0
    warnings: list[str] = field(default_factory=list)
    failure: RequestError | None = None  # with status error: why, as a request that waits is answered
    result: bytes = b""
    started: float = 0.0
    finished: float = 0.0
    cancelled: Event = field(default_factory=Event)
    refund: Callable[[], None]  # gives back the characters to the API key, if it is the server that failed
    task: Future[None] | None = None  # of the executor
    future: Future[None] = field(default_factory=Future)  # done when the job has ended

    @property
    def error(self) -> str:
        """Why the document is not translated; "" unless the status is error."""
        return str(self.failure or "")

    @property
    def bytes_held(self) -> int:
        """The memory that the document takes, roughly: its text, units and translation."""
        return len(self.result) + (MEMORY_FACTOR * self.size if self.document else 0)

    @property
    def seconds_left(self) -> int | None:
        """The expected duration of what remains; None if nothing is known yet."""
        if self.status in ("done", "error"):
            return 0
        if not self.done:
            return None
        return math.ceil((time.monotonic() - self.started) / self.done * (self.total - self.done))

    def end(self, failure: RequestError | None) -> None:
        """Note that the job has ended, and release the document."""
        self.failure, self.status = failure, "error" if failure else "done"
        self.document, self.finished = None, time.monotonic()
        if failure:
            self.refund()
        self.future.set_result(None)


class DocumentJobs:
    """The documents of a server, by id."""

    def __init__(self, service: Service, workers: WorkerPool, settings: ServerSettings, log: RequestLog) -> None:
        self.service, self.workers, self.settings, self.log = service, workers, settings, log
        self.executor = ThreadPoolExecutor(settings.document_threads, thread_name_prefix="document")
        self.lock = threading.RLock()
        self.jobs: dict[str, DocumentJob] = {}  # oldest first
        self.reserved = 0  # bytes for documents that are being parsed
        self.is_stopped = False

    async def submit(self, http: Request, request: DocumentRequest, key: str | None = None) -> DocumentJob:
        """Parse a document and put it into the queue; raise a RequestError if it is refused.

        `key` is the API key of the request, if it is not in the header. The characters of the document are charged.
        """
        name = clean_name(request.name)
        if len(request.data) > self.settings.max_document_bytes:
            limit = self.settings.max_document_bytes
            message = f"the document has {len(request.data):,} bytes, and {limit:,} are allowed"
            raise RequestError(413, "too_large", message)
        reserved = MEMORY_FACTOR * len(request.data)
        with self.lock:
            self._check_capacity(reserved)
            self.reserved += reserved
        try:
            document = await self.workers.run(lambda _: self._open(name, request))
        finally:
            with self.lock:
                self.reserved -= reserved
        job = DocumentJob(
            name=name,
            owner="",  # the key is not known before the request is authorized
            options=request.options,
            document=document,
            size=max(len(request.data), len(document.file.text)),  # of packed formats, the text is larger
            total=len(document.units),
            characters=sum(len(unit.text) for unit in document.units),
            request_id=get_current_request().id,
            path_template=str(http.scope["route"].path),
            refund=lambda: None,
        )
        with self.lock:  # its size is only known now, and others may have taken the memory meanwhile
            self._check_capacity(job.bytes_held)
            authorize(http, key, job.characters, job.total)
            job.owner = find_owner()
            job.refund = partial(http.app.state.access.refund, get_current_key(), job.characters)
            self._expire(job.bytes_held)
            job.task = self.executor.submit(self._run, job)
            self.jobs[job.id] = job
        return job

    async def wait(self, job: DocumentJob) -> None:
        """Return when a job has ended; raise a RequestError if it has failed, or if its client has gone before.

        A job that the client does not wait for any more is deleted.
        """
        job.refund = lambda: None  # an error is that of the request, which is refunded by the middleware
        try:
            await wait_for_result(asyncio.shield(asyncio.wrap_future(job.future)), self.settings.timeout)
        except BaseException:
            self.delete(job)
            raise
        if job.failure:
            raise job.failure

    def find(self, identifier: str, *, owner: str | None = None, key: str | None = None) -> DocumentJob:
        """Return a job; raise a RequestError if there is none of this owner or with this document key.

        With neither, the id is enough: it cannot be guessed.
        """
        self._expire()
        job = self.jobs.get(identifier)
        is_allowed = job and (owner is None or job.owner == owner)
        is_allowed = is_allowed and (key is None or secrets.compare_digest(job.key.encode(), key.encode()))  # type: ignore[union-attr]
        if job is None or not is_allowed:
            raise RequestError(404, "not_found", "there is no such document; its translation may have expired")
        return job

    def delete(self, job: DocumentJob) -> None:
        """Forget a document; if it waits or is being translated, stop that."""
        with self.lock:
            self.jobs.pop(job.id, None)
            job.refund = lambda: None  # what was translated so far has been paid for
            self._cancel(job, RequestError(404, "not_found", "the document has been deleted"))

    def stop(self) -> int:
        """Refuse further documents and cancel all jobs; return how many were not finished."""
        with self.lock:
            self.is_stopped = True
            unfinished = [job for job in self.jobs.values() if not job.finished]
            for job in unfinished:
                self._cancel(job, make_stopping_error())
        self.executor.shutdown(wait=False, cancel_futures=True)
        return len(unfinished)

    def _cancel(self, job: DocumentJob, failure: RequestError) -> None:
        """End a job that waits, and let the thread of one that runs end it."""
        job.failure = failure
        job.cancelled.set()
        if not job.finished and job.task and job.task.cancel():
            job.end(failure)

    def _open(self, name: str, request: DocumentRequest) -> Document:
        """Return the document, in the languages of the model, which are refused before anything is parsed."""
        options = request.options
        route, _ = self.service.choose_route("", options)
        source, target = (route.direction.source, route.direction.target) if route else ("", "")
        if options.source == AUTO:
            source = ""  # that of the file, if it says it
        else:
            source = source or parse_code(options.source, "source")
        target = target or parse_code(options.target, "target")
        try:
            return open_document(request.data, name, source_language=source, target_language=target)
        except LanguageMismatch as error:
            raise UserError(f"{error.problem}; give the languages of the file in the request") from None

    def _check_capacity(self, needed: int) -> None:
        """Raise a RequestError if too many documents wait, or if there cannot be `needed` bytes more. Needs the lock.

        Finished documents do not count, since they give way, but only to a document that is not refused.
        """
        if self.is_stopped:
            raise make_stopping_error()
        unfinished = [job for job in self.jobs.values() if not job.finished]
        if len(unfinished) >= self.settings.max_queued_documents:
            raise RequestError(429, "busy", "the server has too many documents; try again later", retry_after=10)
        if self.reserved + needed + sum(job.bytes_held for job in unfinished) > self.settings.document_memory:
            message = "the documents of the server take all the memory allowed; try again later"
            raise RequestError(429, "busy", message, retry_after=30)

    def _expire(self, needed: int = 0) -> None:
        """Forget the translations that are too old, and the oldest ones if `needed` bytes more are too many."""
        with self.lock:
            oldest = time.monotonic() - self.settings.document_lifetime
            held = needed + sum(job.bytes_held for job in self.jobs.values())
            for job in list(self.jobs.values()):
                if job.finished and (job.finished < oldest or held > self.settings.document_memory):
                    held -= job.bytes_held
                    del self.jobs[job.id]

    def _run(self, job: DocumentJob) -> None:
        """Translate a document, in a thread of the executor."""
        document, failure = job.document, None
        assert document
        job.status, job.started = "translating", time.monotonic()
        try:
            job.result = self._translate(job, document)
        except (RequestError, UserError) as error:
            failure = to_request_error(error)
        except RequestCancelled:
            failure = job.failure or make_stopping_error()
        except Exception as error:
            self.log.log_error(job.request_id, job.path_template, error)
            message = f"the server has failed; its log has more under the request id {job.request_id}"
            failure = RequestError(500, "internal_error", message)
        finally:
            job.end(failure)
            self._expire()

    def _translate(self, job: DocumentJob, document: Document) -> bytes:
        options = job.options
        sample = " ".join(unit.text for unit in document.units[:200])[:SAMPLE_CHARACTERS]

        def report(done: int) -> None:
            job.done = done

        with self.service.lease_models([sample], options) as ([(route, _)], models):
            if route is None:
                job.warnings.append("not translated: already in the target language")
                job.done = job.total
                return document.write([None] * len(document.units))
            model = models[route.model]
            translated = self.service.translate_units(document.units, model, route, options, job.cancelled, report)
        written = document.write([unit.content for unit in translated])
        for number, unit in enumerate(translated, 1):
            texts = [*unit.warnings, *([document.warnings[number]] if number in document.warnings else [])]
            found = [f"{document.units[number - 1].note or f'unit {number}'}: {text}" for text in texts]
            job.warnings += found[: MAX_WARNINGS - len(job.warnings)]
        return written


def clean_name(name: str) -> str:
    """Return the name of a file without folders and control characters, and not too long, but with its suffix."""
    path = PurePath("".join(character for character in name.replace("\\", "/") if character.isprintable()))
    suffix = path.suffix[:20]
    return (path.stem[: MAX_FILE_NAME - len(suffix)] + suffix) or "document"


def respond_with_document(job: DocumentJob, *, not_ready: int = 409) -> Response:
    """Return the translated document as an attachment; raise a RequestError if it is not ready yet, or failed."""
    if job.status == "error":
        raise RequestError(409, "document_failed", job.error)
    if job.status != "done":
        raise RequestError(not_ready, "not_ready", "the document is not translated yet; try again later", retry_after=1)
    ascii_name = NOT_IN_QUOTES.sub("_", job.name)  # for clients that do not know filename*
    disposition = f"attachment; filename=\"{ascii_name}\"; filename*=UTF-8''{quote(job.name, safe='')}"
    return Response(job.result, media_type="application/octet-stream", headers={"content-disposition": disposition})
