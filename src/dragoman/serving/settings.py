"""The settings of `dragoman serve`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dragoman.config.settings import AsTuple, Settings, setting


class ServerSettings(Settings):
    """All limits and options of a server. By default, only this machine reaches it, without API keys."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(5000, "port to listen on; 0: any free port", ge=0, le=65535)
    engine: str = setting("auto", "inference engine, as for dragoman translate")
    device: str = setting("auto", "device of the models")
    batching: bool = setting(True, "decode sentences of different requests together")
    threads: int = setting(64, "requests that are processed at the same time", ge=1, le=10_000)
    queue: int = setting(512, "requests that may wait for a thread; further ones are refused with status 429", ge=0)
    timeout: float = setting(120.0, "seconds after which a request is given up", gt=0)
    receive_timeout: float = setting(30.0, "seconds in which a request must arrive, plus 1 per 10 kB received", gt=0)
    stop_timeout: float = setting(30.0, "seconds for unfinished requests when the server stops", gt=0)
    drain_seconds: float = setting(0.0, "seconds to go on accepting requests, but not to be ready, after SIGTERM", ge=0)
    max_connections: int = setting(1000, "open connections; further ones are refused with status 503", ge=1)
    max_body: int = setting(2_000_000, "bytes of a request, documents excepted", ge=1)
    max_document_bytes: int = setting(20_000_000, "bytes of a document", ge=1)
    max_texts: int = setting(1024, "texts of a request", ge=1)
    max_characters: int = setting(20_000, "characters of a request, all texts together", ge=1)
    max_nbest: int = setting(20, "translations per text, and hypotheses of the beam", ge=1)
    cors: Annotated[tuple[str, ...], AsTuple] = setting((), "origins whose pages may call the server; * for all")
    allowed_hosts: Annotated[tuple[str, ...], AsTuple] = setting(
        (), "further host names that clients may use, if only this machine reaches the server and needs no key"
    )
    keys_file: Annotated[Path, Field(strict=False)] | None = setting(
        None, "file of API keys (dragoman keys add); every request then needs one"
    )
    open_access: bool = setting(False, "serve other machines without API keys; with a file of keys: keys are optional")
    glossary_folder: Annotated[Path, Field(strict=False)] | None = setting(
        None, "folder of the glossaries of clients, which servers may share; by default they are kept in memory only"
    )
    document_threads: int = setting(2, "documents that are translated at the same time", ge=1, le=1000)
    max_queued_documents: int = setting(100, "documents that may wait or be translated; further ones are refused", ge=1)
    document_memory: int = setting(1_000_000_000, "bytes of memory for all documents and their translations", ge=1)
    document_lifetime: float = setting(3600.0, "seconds for which a translated document can be fetched", gt=0)
    log_requests: bool = setting(True, "write a line of JSON to stderr for each request, without its texts")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def trusts_machine(self) -> bool:
        """Whether a request is trusted because it comes from this machine, where a browser may send it for any page."""
        return self.is_local and not self.open_access and self.keys_file is None

    @property
    def key_required(self) -> bool:
        """Whether every request needs an API key: if there is a file of them, or if other machines reach the server."""
        return not self.open_access and (self.keys_file is not None or not self.is_local)
