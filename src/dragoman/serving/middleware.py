"""What every request passes through: limits, keys, headers, errors, metrics and the log."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from dragoman.errors import UserError
from dragoman.serving.access import KEYED_PREFIXES, OPEN_PATHS, Access, read_header_key, read_query_key
from dragoman.serving.errors import RequestError, ResponseAborted, render_error, to_request_error
from dragoman.serving.observability import RequestLog, ServerMetrics
from dragoman.serving.request_context import CURRENT_REQUEST, AsgiMessage, RequestContext
from dragoman.serving.settings import ServerSettings
from dragoman.serving.workers import CLIENT_GONE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; frame-src 'self' blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
UPLOAD_PATHS = ("/api/documents", "/v2/document", "/translate_file")
MULTIPART_ALLOWANCE = 100_000  # bytes of a form around the document
MAX_BODIES = 500_000_000  # bytes of the bodies of all unfinished requests, unless one document may have more
MAX_UNVERIFIED = (
    100_000_000  # bytes of those whose key, which the server requires, is not in the header but in the body
)
LOCAL_ADDRESSES = ("127.0.0.1", "::1", "localhost")
PORT = re.compile(r":\d+$")
PROBES = ("/health", "/ready")  # which tell nothing, and whose clients may send no Host
TEXT_IN_URL = "/v2/translate"  # the path that translates on GET, so that any link or image could use it
BEFORE_READY = re.compile(r"/(health|ready|metrics|openapi\.json|api/settings)?$|.*\.(html|js|css|svg|png|ico)$")


class BodyRefused(HTTPException):
    """Raised while a body is read: FastAPI passes this kind of error on, and makes others a 400."""


class RequestMiddleware:
    """What requests pass through before they reach their routes; only CORS, if there is any, lies further out."""

    def __init__(
        self,
        app: App,
        *,
        settings: ServerSettings,
        access: Access,
        metrics: ServerMetrics,
        log: RequestLog,
        is_ready: Callable[[], bool],
        is_stopping: Callable[[], bool],
    ) -> None:
        self.app, self.settings, self.access, self.metrics, self.log = app, settings, access, metrics, log
        self.is_ready, self.is_stopping = is_ready, is_stopping
        self.allowed_hosts = {"localhost", "127.0.0.1", "[::1]", settings.host, *map(str.lower, settings.allowed_hosts)}
        self.trusts_machine, self.key_required = settings.trusts_machine, settings.key_required
        self.max_bodies = max(MAX_BODIES, settings.max_document_bytes + MULTIPART_ALLOWANCE)
        # Of all unfinished requests; only used by the thread of the event loop.
        self.body_bytes = self.unverified_bytes = 0
        self.max_unverified = max(MAX_UNVERIFIED, settings.max_document_bytes + MULTIPART_ALLOWANCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given_id = headers.get("x-request-id", "")
        client = (scope.get("client") or ("",))[0]
        request = RequestContext(
            id=given_id if REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex,
            method=scope["method"],
            path=find_route_path(scope),
            receive=receive,
            is_local=client in LOCAL_ADDRESSES or client.startswith("127."),
        )
        if request.method == "HEAD":
            scope = {**scope, "method": "GET"}  # routes only know GET; the body is left out when the answer is sent
        limit = self._find_limit(request.path, headers)
        respond = self._add_headers(request, send)

        token = CURRENT_REQUEST.set(request)
        try:
            self._admit(request, headers, scope.get("query_string", b""), limit)
            await self.app(scope, self._limit_body(request, receive, limit), respond)
        except (RequestError, UserError, HTTPException) as error:  # of direct routes and of `_admit`
            await self._answer_error(request, to_request_error(error), respond)
        except RecursionError:
            too_deep = RequestError(400, "too_deep", "the body is nested too deeply")
            await self._answer_error(request, too_deep, respond)
        except Exception as error:
            while isinstance(error, ExceptionGroup):  # some versions of Starlette stream in a group of tasks
                error = error.exceptions[0]
            if isinstance(error, ResponseAborted):
                request.status = error.status
                raise error from None
            request.path_template = find_path_template(scope, request)
            self.log.log_error(request.id, request.path_template, error)
            message = f"the server has failed; its log has more under the request id {request.id}"
            await self._answer_error(request, RequestError(500, "internal_error", message), respond)
        finally:
            CURRENT_REQUEST.reset(token)
            self.body_bytes -= request.body_bytes
            self.unverified_bytes -= request.body_bytes * request.is_unverified
            if request.characters and not 200 <= request.status < 400:  # 0: there was nobody to answer
                self.access.refund(request.key, request.characters)
            request.path_template = find_path_template(scope, request)
            seconds = time.perf_counter() - request.start
            self.metrics.observe(request, seconds)
            self.log.log_request(request, seconds)

    def _find_limit(self, path: str, headers: Headers) -> int:
        """Return how many bytes the body of a request may have."""
        if path in UPLOAD_PATHS and headers.get("content-type", "").lower().startswith("multipart/form-data"):
            return self.settings.max_document_bytes + MULTIPART_ALLOWANCE
        return self.settings.max_body

    def _limit_body(self, request: RequestContext, receive: Receive, limit: int) -> Receive:
        """Return a `receive` that refuses bodies beyond the limits of the request and of the server."""

        async def receive_limited() -> AsgiMessage:
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                request.body_bytes += size
                self.body_bytes += size
                request.has_body = not message.get("more_body", False)
                if request.is_unverified:
                    self.unverified_bytes += size
                if request.body_bytes > limit:
                    raise BodyRefused(413, f"the request has more than the {limit:,} bytes allowed")
                if self.body_bytes > self.max_bodies:
                    busy = "the requests of the server take all the memory allowed; try again later"
                    raise BodyRefused(429, busy, {"Retry-After": "10"})
                if self.unverified_bytes > self.max_unverified and request.is_unverified:
                    busy = "requests without a key in the header take all the memory allowed for them; try again later"
                    raise BodyRefused(429, busy, {"Retry-After": "10"})
            elif not request.has_body:
                raise BodyRefused(CLIENT_GONE, "the client has closed the connection")
            return message

        return receive_limited

    def _admit(self, request: RequestContext, headers: Headers, query: bytes, limit: int) -> None:
        """Raise a RequestError for a request that need not be read: too large, without its key, or too early."""
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > limit:
            raise RequestError(
                413, "too_large", f"the request has {int(length[:20]):,} bytes, and {limit:,} are allowed"
            )
        if self.trusts_machine and request.path not in PROBES:
            self._refuse_foreign_pages(request, headers)
        path, key = request.path, read_header_key(headers)
        if path.startswith(KEYED_PREFIXES) and path not in OPEN_PATHS:
            self.access.identify(request, key or read_query_key(query))
        elif key and self.access.store:
            request.key = self.access.store.find(key)  # if it is wrong, the body may have another one
        request.is_unverified = self.key_required and request.key is None
        if not self.is_ready() and not self.is_stopping() and not BEFORE_READY.match(path):
            raise RequestError(503, "loading", "the models are being loaded; try again later", retry_after=5)

    def _refuse_foreign_pages(self, request: RequestContext, headers: Headers) -> None:
        """Raise a RequestError for a request that a browser on this machine sends for a page of another server.

        Such a page may give its own host name the address of this machine (DNS rebinding), so that the browser takes
        this server for that of the page.
        """
        host = PORT.sub("", headers.get("host", "").lower())
        if host not in self.allowed_hosts:
            host = host[:100]
            message = f"this server is not called {host!r}; use localhost, or start it with --allowed-hosts {host}"
            raise RequestError(403, "host_not_allowed", message)
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
        if site in ("same-origin", "none") or {"*", origin} & set(self.settings.cors):  # none: typed by the user
            return
        is_foreign = site != "" or (origin and origin.partition("://")[2] != headers["host"].lower())
        # What a page only loads or links to tells it nothing, unless it says that it wants to read it (Origin).
        is_link = not origin and request.method in ("GET", "HEAD", "OPTIONS") and request.path != TEXT_IN_URL
        if is_foreign and not is_link:
            message = "pages of other origins may not call this server; start it with --cors ORIGIN to allow one"
            raise RequestError(403, "origin_not_allowed", message)

    def _add_headers(self, request: RequestContext, send: Send) -> Send:
        """Return a `send` that adds the headers of every response, notes its status, and has no body for HEAD."""

        async def send_with_headers(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                headers = list(message.get("headers", []))
                headers += [*SECURITY_HEADERS, (b"x-request-id", request.id.encode())]
                if not any(name == b"content-security-policy" for name, _ in headers):
                    headers.append((b"content-security-policy", CONTENT_SECURITY_POLICY.encode()))
                if self.is_stopping():
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            elif request.method == "HEAD":
                message = {"type": "http.response.body", "more_body": message.get("more_body", False)}
            await send(message)

        return send_with_headers

    async def _answer_error(self, request: RequestContext, error: RequestError, send: Send) -> None:
        """Answer with an error; if the answer has begun, abort it, so that the client sees that it is incomplete."""
        if request.status:
            request.status = error.status  # for the log, the metrics and the refund
            raise ResponseAborted(error.status) from None
        status, headers, body = format_error(request.path, error)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def format_error(path: str, error: RequestError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an error in the form of the protocol of the path."""
    status, content = render_error(path, error)
    body = json.dumps(content, ensure_ascii=True).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retry_after:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return status, headers, body


def find_route_path(scope: Scope) -> str:
    """Return the path of a request without the root path, under which a proxy or another application has mounted us."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    is_below = root and (path == root or path.startswith(root + "/"))
    return path[len(root) :] or "/" if is_below else path


def find_path_template(scope: Scope, request: RequestContext) -> str:
    """Return the template of the path of a request, for metrics and logs: there are unlimited numbers of paths."""
    if request.path_template:  # of a direct route; `route` may be that of an application around this one
        return request.path_template
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    return "page" if request.status in (200, 304) else "unknown"
