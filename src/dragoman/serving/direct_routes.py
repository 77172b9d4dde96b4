"""The routes that translate texts, called without FastAPI's routing, dependencies and error handling.

These take about as long per request as batched decoding takes per sentence with a small model. FastAPI still describes
the routes, and would give the same answers. What an embedding application adds to these three paths has no effect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from dragoman.serving.middleware import App, Receive, Scope, Send
from dragoman.serving.request_context import CURRENT_REQUEST

DIRECT_PATHS = ("/api/translate", "/translate", "/v2/translate")
Handler = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """Middleware that calls the handlers of DIRECT_PATHS for POST requests, and `app` for all others."""

    def __init__(self, app: App, *, handlers: dict[str, Handler]) -> None:
        self.app, self.handlers = app, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = CURRENT_REQUEST.get()
        handler = self.handlers.get(request.path) if request and request.method == "POST" else None
        if request is None or handler is None:
            await self.app(scope, receive, send)
            return
        request.path_template = request.path
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)


def find_direct_handlers(routers: Iterable[APIRouter]) -> dict[str, Handler]:
    """Return the handlers of the direct paths. Each takes the request as its only argument, and reads it itself."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    return {
        route.path: route.endpoint for route in routes if route.path in DIRECT_PATHS and "POST" in (route.methods or ())
    }
