"""Inspections that are shown in a browser: pages under names that nobody can guess, for a few minutes.

A browser cannot send an API key with a link. So a page is made by a request with a key and kept under a random name,
and whoever has the name may read it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict

from dragoman.serving.errors import RequestError

LIFETIME = 15 * 60.0  # seconds
MAX_BYTES = 100_000_000  # of all pages together; the oldest pages leave first


class InspectionStore:
    """Pages by name, oldest first."""

    def __init__(self, lifetime: float = LIFETIME, max_bytes: int = MAX_BYTES) -> None:
        self.lifetime, self.max_bytes = lifetime, max_bytes
        self.lock = threading.Lock()
        self.pages: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # name -> time of expiry, page
        self.size = 0

    def add(self, page: str) -> str:
        """Keep a page and return its name."""
        name, content = secrets.token_urlsafe(16), page.encode()
        with self.lock:
            self.pages[name] = (time.monotonic() + self.lifetime, content)
            self.size += len(content)
            while len(self.pages) > 1 and self.size > self.max_bytes:
                self.remove_oldest()
        return name

    def get(self, name: str) -> bytes:
        """Return a page; raise a RequestError if it is not there any more."""
        with self.lock:
            while self.pages and next(iter(self.pages.values()))[0] < time.monotonic():
                self.remove_oldest()
            if name not in self.pages:
                raise RequestError(404, "not_found", "this inspection is not kept any more; ask for it again")
            return self.pages[name][1]

    def remove_oldest(self) -> None:
        _, (_, content) = self.pages.popitem(last=False)
        self.size -= len(content)
