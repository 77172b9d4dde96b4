"""The ASGI application: all protocols, what every request passes through, and how errors look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.routing import Match

from dragoman.errors import UserError
from dragoman.serving.access import Access, get_current_request
from dragoman.serving.admin import make_admin_router
from dragoman.serving.api import make_router
from dragoman.serving.deepl import make_deepl_router
from dragoman.serving.description_api import make_description_router
from dragoman.serving.direct_routes import DirectRoutes, find_direct_handlers
from dragoman.serving.document_api import make_document_router
from dragoman.serving.document_jobs import DocumentJobs
from dragoman.serving.errors import RequestError, describe_invalid, to_request_error
from dragoman.serving.exploration_api import make_exploration_router
from dragoman.serving.glossaries import GlossaryStore
from dragoman.serving.glossary_api import make_glossary_router
from dragoman.serving.keys import KeyStore
from dragoman.serving.libretranslate import make_libretranslate_router
from dragoman.serving.middleware import RequestMiddleware, format_error
from dragoman.serving.model_pool import ModelPool
from dragoman.serving.observability import RequestLog, ServerMetrics
from dragoman.serving.openapi import describe_api
from dragoman.serving.service import Service
from dragoman.serving.settings import ServerSettings
from dragoman.serving.state import Runs, ServerState, name_runs
from dragoman.serving.text_batches import TextBatches
from dragoman.serving.workers import WorkerPool

PAGE_FOLDER = Path(__file__).parent / "page"


class PageFiles(StaticFiles):
    """The files of the page. Browsers ask for a newer version of each, since versions must not be mixed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response

    async def get_response(self, path: str, scope: MutableMapping[str, Any]) -> Response:
        """Return a file; refuse other methods, unless there is no file: then the path is unknown."""
        response = await super().get_response(path, {**scope, "method": "GET"})
        if scope["method"] != "GET":
            raise HTTPException(405, headers={"Allow": "GET, HEAD"})
        return response


def create_app(runs: Runs, settings: ServerSettings | None = None) -> FastAPI:
    """Return the application that serves these runs, with loaded models, for any ASGI server.

    Whom that server lets in is unknown here, whatever `settings.host` says, so the settings must have either API keys
    or open access.

        app = create_app(["runs/demo"], ServerSettings(keys_file="keys.json"))
    """
    settings = settings or ServerSettings()
    if settings.keys_file is None and not settings.open_access:
        raise UserError(
            "the application does not know who reaches it, so it needs API keys: make one with "
            "'dragoman keys add NAME' and give the file as keys_file, or set open_access"
        )
    return make_app(runs, settings)


def make_app(runs: Runs, settings: ServerSettings, *, load: bool = True) -> FastAPI:
    """Return the application for a server that listens on `settings.host`; `run_server` is that server.

    Without `load`, the models are not loaded before `app.state.server.load_models` is called; until then, requests are
    refused with status 503.
    """
    if settings.key_required and settings.keys_file is None:
        raise UserError(
            f"on {settings.host}, other machines reach this server, so it needs API keys: make one with "
            "'dragoman keys add NAME' and give the file as keys_file (--keys-file), or set open_access (--open-access)"
        )
    pool = ModelPool(engine=settings.engine, device=settings.device, batching=settings.batching)
    workers = WorkerPool(threads=settings.threads, queue=settings.queue, timeout=settings.timeout)
    keys = KeyStore(settings.keys_file) if settings.keys_file else None
    server = ServerState(name_runs(runs), settings, pool, workers, keys)
    app = FastAPI(title="Dragoman", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=stop_at_end)
    app.state.server = server
    app.state.access = Access(keys, required=settings.key_required)
    metrics = ServerMetrics(pool, workers, server.is_ready)
    request_log = RequestLog(enabled=settings.log_requests)
    service = Service(pool, settings)
    app.state.documents = DocumentJobs(service, workers, settings, request_log)
    app.include_router(make_admin_router(server, metrics))
    routers = make_routers(service, workers, app.state.documents)
    for router in routers:
        app.include_router(router)
    if PAGE_FOLDER.is_dir():
        # Not mounted at "/": there it would match every path, also those that routes know with another method.
        app.router.default = PageFiles(directory=PAGE_FOLDER, html=True)
    for kind in (RequestError, UserError, HTTPException):
        app.add_exception_handler(kind, render_exception)
    app.add_exception_handler(RequestValidationError, render_invalid)
    app.add_middleware(DirectRoutes, handlers=find_direct_handlers(routers))
    app.add_middleware(
        RequestMiddleware,
        settings=settings,
        access=app.state.access,
        metrics=metrics,
        log=request_log,
        is_ready=server.is_ready,
        is_stopping=lambda: server.is_stopping,
    )
    if settings.cors:
        headers = ["Authorization", "Content-Type", "X-Request-ID"]
        methods = ["GET", "POST", "PUT", "DELETE"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors),
            allow_methods=methods,
            allow_headers=headers,
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    describe_api(app)
    if load:
        server.load_models()
    return app


def make_routers(service: Service, workers: WorkerPool, jobs: DocumentJobs) -> list[APIRouter]:
    """Return the routes of all protocols."""
    glossaries, batches = GlossaryStore(service.settings.glossary_folder), TextBatches(service, workers)
    return [
        make_router(service, workers, batches, glossaries),
        make_document_router(workers, jobs, glossaries),
        make_glossary_router(service, workers, glossaries),
        make_exploration_router(service, workers),
        make_description_router(service, workers),
        make_libretranslate_router(service, workers, batches, jobs),
        make_deepl_router(service, workers, batches, jobs, glossaries),
    ]


@asynccontextmanager
async def stop_at_end(app: FastAPI) -> AsyncIterator[None]:
    """At the end of the application, stop its work and write the counts of keys.

    An application that is mounted in another one is not told about its end.
    """
    server: ServerState = app.state.server
    yield
    server.is_stopping = True
    server.workers.stop()
    app.state.documents.stop()
    await asyncio.to_thread(server.pool.close)
    if server.keys:
        await asyncio.to_thread(server.keys.close)


def render_exception(request: Request, error: Exception) -> Response:
    """Answer with an error in the form of the protocol of the path."""
    context = get_current_request()
    given: dict[str, str] = {}
    if isinstance(error, HTTPException) and error.status_code == 405:
        given["Allow"] = allowed = list_methods(request) or (error.headers or {})["Allow"]
        error = RequestError(405, "method_not_allowed", f"this path does not take {context.method}, but {allowed}")
    status, headers, body = format_error(context.path, to_request_error(error))
    return Response(body, status, {**given, **{name.decode(): value.decode() for name, value in headers}})


def list_methods(request: Request) -> str:
    """Return the methods of all routes of a path, since FastAPI names those of the first one; "" if it has none."""
    found = [
        method
        for method in ("GET", "POST", "PUT", "DELETE")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
    return ", ".join("GET, HEAD" if method == "GET" else method for method in found)


def render_invalid(request: Request, error: Exception) -> Response:
    """Answer a request that FastAPI or pydantic refused."""
    assert isinstance(error, RequestValidationError)
    return render_exception(request, describe_invalid(error.errors()))
