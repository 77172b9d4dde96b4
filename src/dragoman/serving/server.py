"""Running an application with uvicorn: limits of connections, the start, and a stop that finishes what has begun."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dragoman.config.settings import parse_settings
from dragoman.errors import UserError
from dragoman.inference.directions import describe_directions
from dragoman.progress import WARNING, log
from dragoman.serving.app import make_app
from dragoman.serving.document_jobs import DocumentJobs
from dragoman.serving.errors import ResponseAborted
from dragoman.serving.model_pool import tune_garbage_collection
from dragoman.serving.settings import ServerSettings
from dragoman.serving.state import Runs, ServerState

MAX_HEADERS = 64 * 1024  # bytes of request line and headers
MAX_DISCARDED = 32_000_000  # bytes of a body that are received after the request was refused, so that it sees why
BYTES_PER_SECOND = 10_000  # a body that arrives faster than this is not late
UNSENT_BYTES = 128 * 1024  # of an answer that the system takes before it sends them
FIRST_REQUEST_SECONDS = 1.0  # for which a server that stops waits for the request of a new connection
ANSWER_SECONDS = 1.0  # time for the answers to requests that are cancelled when the server stops
KEEP_ALIVE_SECONDS = 75  # longer than load balancers keep idle connections, so that they close them first
TICKS_PER_CHECK = 5  # of 0.1 s


class Transfer:
    """A request that arrives, or an answer that is read by the client."""

    def __init__(self) -> None:
        self.start = self.last = time.monotonic()  # of the transfer, and of its last bytes
        self.size = 0  # bytes so far

    def add(self, size: int) -> None:
        self.size += size
        self.last = time.monotonic()

    def is_late(self, now: float, allowed: float) -> bool:
        """Return whether nothing came for `allowed` seconds, or too little since the start."""
        return now - self.last > allowed or now - self.start > allowed + self.size / BYTES_PER_SECOND


class LimitedProtocol(HttpToolsProtocol):
    """A connection with limits on headers, on the time in which a request arrives, and on unread answers."""

    limits = ServerSettings()  # replaced in a subclass for each server

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.arriving: Transfer | None = Transfer()  # None: no request is arriving
        self.unread: Transfer | None = None  # an answer that the client has not read yet, if it is a large one
        self.buffered = 0  # bytes of the unread answer that are still here
        self.discarded = 0  # bytes of the request
        self.in_headers = True
        self.answering: Any = None  # the request that is being answered; `cycle` is the last one received
        if connected := transport.get_extra_info("socket"):
            # Otherwise megabytes leave the buffer at once, and then for long nothing tells that the client reads.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if len(self.connections) > self.limits.max_connections:
            self.refuse(503, "too many connections; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.answering is not None and not self.answering.response_complete:
            self.answering.disconnected = True
            self.answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.arriving is None and (self.cycle is None or self.cycle.response_complete):
            self.arriving = Transfer()  # empty lines between requests: uvicorn does not wait for the next one any more
        if self.arriving is None:
            return
        self.arriving.add(len(data))
        if self.in_headers and self.arriving.size > MAX_HEADERS:
            self.refuse(431, "the headers are too large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.arriving, self.in_headers = Transfer(), True
        self.discarded = 0

    def on_headers_complete(self) -> None:
        self.in_headers = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self.discarded += len(body)
            if self.discarded > MAX_DISCARDED:
                self.transport.close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.arriving = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread, self.buffered = Transfer(), self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread = None

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.answering = cycle
        super()._start_asgi_task(cycle, app)

    def shutdown(self) -> None:
        """Begin to stop. A new connection has a moment for its first request, which may be on its way."""
        if self.cycle is None:
            self.loop.call_later(FIRST_REQUEST_SECONDS, super().shutdown)
        else:
            super().shutdown()

    def close_if_late(self, now: float) -> None:
        """Close the connection if the request arrives, or the answer is read, too slowly."""
        allowed = self.limits.receive_timeout
        if self.unread:
            buffered = self.transport.get_write_buffer_size()
            if buffered < self.buffered:
                self.unread.add(self.buffered - buffered)
                self.buffered = buffered
            if self.unread.is_late(now, allowed):
                self.transport.abort()
        elif self.arriving and self.flow.read_paused:
            self.arriving = Transfer()  # it is the server that does not read
        elif self.arriving and self.arriving.is_late(now, allowed):
            self.refuse(408, "the request took too long to arrive")

    def refuse(self, status: int, reason: str) -> None:
        """Answer in plain text, unless an answer has begun, and close the connection."""
        # `cycle` is the request whose body arrives; while headers arrive, an answer to an earlier one must have ended.
        current = self.answering
        if self.in_headers:
            is_free = current is None or current.response_complete
        else:
            is_free = current is self.cycle and not current.response_started
        if is_free:
            body = reason.encode()
            head = f"HTTP/1.1 {status} \r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.arriving = None
        self.transport.close()


def is_unexpected(record: logging.LogRecord) -> bool:
    """Return whether uvicorn should log an error: not one that was raised to close a connection."""
    return not (record.exc_info and isinstance(record.exc_info[1], ResponseAborted))


class Server(uvicorn.Server):
    """A server of one application, which stops on SIGTERM and Ctrl-C when it has finished what has begun."""

    def __init__(self, app: FastAPI) -> None:
        self.state: ServerState = app.state.server
        self.documents: DocumentJobs = app.state.documents
        settings = self.state.settings
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Protocol", (LimitedProtocol,), {"limits": settings}),
                ws="none",
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                log_level="error",  # clients cause its warnings
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(settings.stop_timeout + ANSWER_SECONDS) + 1,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(is_unexpected)
        self.signal = 0  # that stopped the server
        self.cancelled_requests = 0
        self.drain_ends = 0.0  # when the server stops accepting requests after SIGTERM

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT in the main thread. Unlike uvicorn's, this does not raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin to stop; a second signal ends the wait for unfinished requests."""
        if self.signal:
            self.force_exit = self.should_exit = True
            return
        self.signal, self.state.is_stopping = sig, True
        if sig == signal.SIGTERM and self.state.settings.drain_seconds:
            self.drain_ends = time.monotonic() + self.state.settings.drain_seconds
        else:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        if self.drain_ends and now > self.drain_ends:
            self.should_exit = True
        if counter % TICKS_PER_CHECK == 0:
            self.close_late_connections(now)
        return await super().on_tick(counter)

    def close_late_connections(self, now: float) -> None:
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedProtocol)
            connection.close_if_late(now)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and finish running requests; cancel them when the time for it is over."""
        self.state.is_stopping = True

        async def cancel_late() -> None:
            deadline = time.monotonic() + self.state.settings.stop_timeout
            while (now := time.monotonic()) < deadline:
                self.close_late_connections(now)
                await asyncio.sleep(0.1)
            self.cancelled_requests = self.state.workers.stop() + self.documents.stop()

        task = asyncio.create_task(cancel_late())
        await super().shutdown(sockets)
        task.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise a UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except PermissionError:
        raise UserError(
            f"port {port} needs privileges that this user lacks; choose one above 1023 with --port"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is taken; choose another one with --port, or --port 0 for any free one"
            raise UserError(message) from None
        raise UserError(f"cannot listen on {host!r}: {os.strerror(error.errno) if error.errno else error}") from None


def serve(runs: Runs, *, settings: ServerSettings | None = None, **options: Any) -> None:
    """Serve runs until SIGTERM or Ctrl-C. Options are those of `dragoman serve`, such as port.

    dragoman.serve("runs/demo", port=8000)
    dragoman.serve({"news": "runs/news", "chat": "runs/chat"}, max_characters=5000)
    """
    if settings and options:
        raise UserError(f"give settings or options, not both: {', '.join(options)} would be ignored")
    run_server(runs, settings or parse_settings(ServerSettings, options, where="serve"))


def run_server(runs: Runs, settings: ServerSettings, announce: Callable[[str], None] = log) -> Server:
    """Serve runs; return the server when it has stopped. The port is open while the models are being loaded."""
    app = make_app(runs, settings, load=False)
    server = Server(app)
    errors: list[BaseException] = []

    with listen(settings.host, settings.port) as listening, tune_garbage_collection(server.state.pool):
        port = listening.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host

        def load() -> None:
            try:
                server.state.load_models(lambda name: log(f"loading {name} ..."))
                announce(describe_server(server.state, f"http://{host}:{port}"))
            except BaseException as error:
                errors.append(error)
                server.should_exit = True

        threading.Thread(target=load, daemon=True).start()
        server.run([listening])
    if errors:
        raise errors[0]
    if server.cancelled_requests:
        log(f"{server.cancelled_requests} requests were not finished within {settings.stop_timeout:g} s", WARNING)
    return server


def describe_server(state: ServerState, url: str) -> str:
    """Return what a user wants to know when the server is ready: address, and models with their languages."""
    keys = "an API key is required" if state.settings.key_required else "no API key is required"
    models = list(state.pool.models.values())
    lines = [f"Dragoman serves {', '.join(model.name for model in models)} at {url} ({keys})"]
    for model in models:
        languages = describe_directions(model.translator.directions) or "unknown languages"
        lines.append(f"  {model.name}: {languages}")
    return "\n".join(lines)
