"""Routes for those who run a server: health, metrics, and the models that are loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ConfigDict, Field

from dragoman.run_dir import RunFolder
from dragoman.serving.access import AdminOnly, authorize, get_current_request
from dragoman.serving.errors import RequestError
from dragoman.serving.fields import RequestFields
from dragoman.serving.observability import ServerMetrics
from dragoman.serving.state import ServerState

ModelName = Annotated[str, PathParameter(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="name of a model")]


class ModelBody(RequestFields):
    """The body of PUT /api/models/{name}."""

    model_config = ConfigDict(extra="forbid")

    run: str = Field(description="run folder, on the machine of the server", min_length=1, max_length=4096)


def make_admin_router(server: ServerState, metrics: ServerMetrics) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["operation"])

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Say that the server runs; it may not be ready yet."""
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"description": "not ready"}})
    async def ready(response: Response) -> dict[str, str]:
        """Say whether the server accepts requests: all models are loaded, and it is not about to stop."""
        if server.is_ready():
            return {"status": "ready"}
        response.status_code = 503
        return {"status": "stopping" if server.is_stopping else "loading"}

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def read_metrics(request: Request) -> Response:
        """Return metrics for Prometheus. If keys are required, other machines need one."""
        if not get_current_request().is_local:
            authorize(request)
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.put("/api/models/{name}", tags=["models"])
    async def load_model(name: ModelName, body: ModelBody, _: AdminOnly) -> dict[str, Any]:
        """Load a run folder, and serve it in place of the model that has the name. Running requests finish."""
        async with server.models_lock:
            try:
                RunFolder(Path(body.run)).check_format()
            except ValueError as error:  # a UserError, or a null character in the path
                raise RequestError(400, "bad_run", str(error)) from None
            replaced = name in server.pool.models
            await asyncio.to_thread(server.pool.load, name, Path(body.run))
        return {"name": name, "replaced": replaced}

    @router.delete("/api/models/{name}", status_code=204, tags=["models"])
    async def remove_model(name: ModelName, _: AdminOnly) -> Response:
        """Remove a model. Running requests finish."""
        async with server.models_lock:
            if name not in server.pool.models:
                raise RequestError(404, "unknown_model", f"there is no model {name[:100]!r}")
            if len(server.pool.models) == 1:
                raise RequestError(409, "last_model", "the last model cannot be removed; load another one first")
            await asyncio.to_thread(server.pool.remove, name)
        return Response(status_code=204)

    return router
