"""Real servers with a toy model, on a free port of this machine, in a thread of the test process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from dragoman.serving.app import make_app
from dragoman.serving.server import Server, listen
from dragoman.serving.settings import ServerSettings
from toy_run import Toy


@dataclass(frozen=True)
class ToyServer:
    """The address of a running server, its application, and a client for it."""

    url: str
    app: FastAPI
    server: Server
    client: httpx.Client

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connect(self) -> socket.socket:
        """Return a raw connection, for requests that no client library would send."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextmanager
def serve_in_thread(
    runs: Sequence[str | Path], settings: ServerSettings | None = None, *, load: bool = True
) -> Iterator[ToyServer]:
    """Serve runs on a free port in a thread, until the end of the context."""
    app = make_app(runs, settings or ServerSettings(log_requests=False), load=load)
    server = Server(app)
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60) as client:
            yield ToyServer(url, app, server, client)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def toy_server(toy: Toy) -> Iterator[ToyServer]:
    """Return a server with default settings; tests that share it leave no models, keys or glossaries behind."""
    with serve_in_thread([toy.run]) as server:
        yield server
