"""What is known about the request that a task, or the thread that works for it, belongs to."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from dragoman.serving.keys import ApiKey

AsgiMessage = MutableMapping[str, Any]


@dataclass
class RequestContext:
    """A request: what the log and the metrics say about it, and whether its client still waits."""

    id: str
    method: str
    path: str  # without the root path
    receive: Callable[[], Awaitable[AsgiMessage]]  # of ASGI
    is_local: bool  # the client runs on this machine
    start: float = field(default_factory=time.perf_counter)
    key: ApiKey | None = None
    is_counted: bool = False  # for the request limit of the key
    is_unverified: bool = False  # a key is required, and it is not in the header
    texts: int = 0
    characters: int = 0
    body_bytes: int = 0
    has_body: bool = False  # all of it has arrived
    status: int = 0  # of the response that has been started
    path_template: str = ""  # such as /api/models/{name}; the label "route" of metrics and logs

    async def wait_for_disconnect(self) -> None:
        """Return when the client has closed the connection. Only to be called when the body has arrived."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)
