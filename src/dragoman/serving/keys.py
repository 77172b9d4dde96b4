"""API keys: a file with their hashes, limits per key, and how much of them is used.

A key is `dragoman-ID-SECRET`. The file has the id and a salted hash of the secret, so that it tells nobody a key. The
secret has 256 random bits, which no one can guess from a fast hash.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import json
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal
from weakref import ref

from dragoman.config.settings import Amount, AsTuple, Settings, parse_settings, read_text, setting
from dragoman.errors import UserError
from dragoman.io import format_json, lock_folder, write_text
from dragoman.progress import WARNING, log
from dragoman.serving.errors import RequestError

PREFIX = "dragoman"
LOCK_SECONDS = 10.0  # for which a command waits until another one has changed the file of keys
KEY_REFRESH_SECONDS = 3.0  # between two calls of KeyStore.refresh in a server
Right = Literal["admin"]


class ApiKey(Settings):
    """A key in the file of keys: everything but the secret."""

    name: str = setting("", "name of the key in logs and metrics")
    id: str = setting("", "part of the key by which it is found")
    salt: str = setting("", "random text before the secret in the hash")
    digest: str = setting("", "SHA-256 of salt and secret")
    rights: Annotated[tuple[Right, ...], AsTuple] = setting((), "admin: load and remove models")
    requests_per_minute: Amount = setting(0, "limit of requests; 0: none")
    characters_per_month: Amount = setting(0, "limit of characters in a calendar month (UTC); 0: none")
    created: str = setting("", "date")

    def matches(self, secret: str) -> bool:
        """Return whether this is the key with a secret, in a time that does not depend on the secret."""
        return hmac.compare_digest(self.digest, hash_secret(self.salt, secret))


class KeyFile(Settings):
    """The file of keys."""

    keys: Annotated[tuple[ApiKey, ...], AsTuple] = setting((), "the keys")


def hash_secret(salt: str, secret: str) -> str:
    return hashlib.sha256((salt + secret).encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> list[ApiKey]:
    """Return the keys of a file; raise a UserError if it is not one."""
    if not path.exists():
        raise UserError(f"there is no key file {str(path)!r}; make one with: dragoman keys add NAME --keys-file {path}")
    try:
        values = json.loads(read_text(path, "key"))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{str(path)!r} is not a file of API keys; make one with: dragoman keys add NAME") from None
    return list(parse_settings(KeyFile, values, where=str(path)).keys)


def write_keys(path: Path, keys: list[ApiKey]) -> None:
    """Write a file of keys that only its owner can read."""
    write_text(path, format_json(KeyFile(keys=tuple(keys)).model_dump(mode="json")))
    path.chmod(0o600)


def add_key(
    path: Path,
    name: str,
    *,
    rights: tuple[Right, ...] = (),
    requests_per_minute: int = 0,
    characters_per_month: int = 0,
) -> str:
    """Add a key to a file, which is created if there is none; return the key, which is stored nowhere."""
    if not name.strip():
        raise UserError("a key needs a name, by which it can be removed; give one")
    identifier, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
    key = ApiKey(
        name=name,
        id=identifier,
        salt=salt,
        digest=hash_secret(salt, secret),
        rights=rights,
        requests_per_minute=requests_per_minute,
        characters_per_month=characters_per_month,
        created=datetime.now(UTC).date().isoformat(),
    )
    with lock_keys(path):
        keys = read_keys(path) if path.exists() else []
        if any(other.name == name for other in keys):
            message = f"{str(path)!r} has a key called {name!r} already; remove it first, or choose another name"
            raise UserError(message)
        write_keys(path, [*keys, key])
    return f"{PREFIX}-{identifier}-{secret}"


def remove_key(path: Path, name: str) -> None:
    """Remove a key from a file. A server that uses the file refuses the key after a few seconds."""
    read_keys(path)  # a missing file is refused before the lock makes its folder
    with lock_keys(path):
        keys = read_keys(path)
        if not any(key.name == name for key in keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise UserError(f"{str(path)!r} has no key called {name!r} (there are: {known})")
        write_keys(path, [key for key in keys if key.name != name])


@contextmanager
def lock_keys(path: Path) -> Iterator[None]:
    """Let no other command change the file of keys meanwhile; wait for one that does.

    The folder is locked, since the file is replaced by each change.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    with ExitStack() as lock:
        while True:
            try:
                lock.enter_context(lock_folder(path.parent, f"{str(path)!r} is being changed; try again later"))
                break
            except UserError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield


class KeyStore:
    """The keys of a server, with what each has used.

    `refresh`, called every few seconds after `keep_fresh`, reads the file again if it has changed and adds the
    characters counted since the last call to the counts beside the file, which replicas with the same file share.
    Whatever goes wrong there, no character is forgotten: it is in `stored`, `pending` or `added`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.usage_folder = path, path.with_name(path.name + ".usage")
        self.lock, self.refreshing = threading.Lock(), threading.Lock()
        self.modified = -1
        self.keys: dict[str, ApiKey] = {}  # by id
        self.buckets: dict[str, tuple[float, float]] = {}  # by name: requests left in the bucket, and when that was
        self.month = get_month()
        self.stored: Counter[str] = Counter()  # characters of this month by name of key, in the file
        self.pending: Counter[str] = Counter()  # characters that are being written to the file
        self.added: Counter[str] = Counter()  # characters that are not in the file yet
        self.closed = threading.Event()
        self.refresher: threading.Thread | None = None
        self._read_keys()  # before anything is written beside a file that may not exist
        self._write_counts()

    def find(self, text: str) -> ApiKey | None:
        """Return the key, or None if there is no such key."""
        _, _, rest = text.partition("-")
        identifier, _, secret = rest.partition("-")
        key = self.keys.get(identifier)
        return key if key and text.startswith(PREFIX + "-") and key.matches(secret) else None

    def take_request(self, key: ApiKey) -> None:
        """Count a request; raise a RequestError if the key has made too many within a minute."""
        if not key.requests_per_minute:
            return
        with self.lock:
            now, capacity = time.monotonic(), float(key.requests_per_minute)
            left, before = self.buckets.get(key.name, (capacity, now))
            left = min(capacity, left + (now - before) * capacity / 60)
            self.buckets[key.name] = (max(left - 1, 0.0) if left >= 1 else left, now)
        if left < 1:
            message = f"the key {key.name!r} may make {key.requests_per_minute} requests per minute; try again later"
            raise RequestError(429, "rate_limited", message, retry_after=math.ceil((1 - left) * 60 / capacity))

    def take_characters(self, key: ApiKey, characters: int) -> None:
        """Count characters; raise a RequestError, and count none, if that exceeds the month's limit of the key."""
        with self.lock:
            self._begin_month()
            used = self._count(key)
            if key.characters_per_month and used + characters > key.characters_per_month:
                message = (
                    f"the key {key.name!r} has used {used:,} of its {key.characters_per_month:,} characters of this "
                    f"month, and the request has {characters:,}"
                )
                raise RequestError(403, "quota_exceeded", message)
            self.added[key.name] += characters

    def return_characters(self, key: ApiKey, characters: int) -> None:
        """Take back characters that were counted, but none of another month."""
        with self.lock:
            self._begin_month()
            self.added[key.name] -= min(characters, self._count(key))

    def get_usage(self, key: ApiKey) -> tuple[int, int]:
        """Return the characters that a key has used in this month, and its limit (0: none)."""
        with self.lock:
            self._begin_month()
            return self._count(key), key.characters_per_month

    def refresh(self) -> None:
        """Read the file of keys if it has changed, and write the counts of characters; raise what prevents that."""
        with self.refreshing:
            try:
                self._read_keys()
            finally:
                self._write_counts()

    def keep_fresh(self) -> None:
        """Refresh from now on every few seconds in a thread, and when the process ends.

        Requests call this, since a mounted application is not told that the server has started, and since a process
        that is forked from one with a thread has none.
        """
        if self.closed.is_set() or (self.refresher and self.refresher.is_alive()):
            return
        with self.lock:
            if not (self.refresher and self.refresher.is_alive()):
                store = ref(self)
                self.refresher = threading.Thread(
                    target=refresh_regularly, args=(store, self.closed), name="keys", daemon=True
                )
                self.refresher.start()
                atexit.register(refresh_store, store)

    def close(self) -> None:
        """Refresh for the last time."""
        refresh_store(ref(self))
        self.closed.set()

    def _read_keys(self) -> None:
        modified = self.path.stat().st_mtime_ns if self.path.exists() else 0
        if modified != self.modified:
            self.keys = {key.id: key for key in read_keys(self.path)}
            self.modified = modified

    def _write_counts(self) -> None:
        with self.lock:
            self._begin_month()
            month, self.pending, self.added = self.month, self.added, Counter()
            pending = self.pending
        stored, is_locked = None, False
        try:
            with lock_folder(self.usage_folder, "another server writes its counts now"):
                is_locked = True
                file = self.usage_folder / f"{month}.json"
                stored = read_counts(file)
                if pending:
                    stored.update(pending)
                    write_text(file, format_json(stored))
        except BaseException as error:
            stored = None
            if is_locked or not isinstance(error, UserError):  # otherwise the next call finds the folder unlocked
                raise
        finally:
            with self.lock:
                if self.month == month:
                    if stored is None:
                        self.added.update(pending)
                    else:
                        self.stored = stored
                    self.pending = Counter()

    def _count(self, key: ApiKey) -> int:
        return self.stored[key.name] + self.pending[key.name] + self.added[key.name]

    def _begin_month(self) -> None:
        if self.month != get_month():
            self.month = get_month()
            self.stored, self.pending, self.added = Counter(), Counter(), Counter()


def refresh_regularly(store: ref[KeyStore], closed: threading.Event) -> None:
    """Refresh a store every few seconds, until it is closed or nobody uses it."""
    while refresh_store(store):
        closed.wait(KEY_REFRESH_SECONDS)


def refresh_store(reference: ref[KeyStore]) -> bool:
    """Refresh a store, unless it is closed; return whether that is to be repeated."""
    store = reference()
    if store is None or store.closed.is_set():
        return False
    try:
        store.refresh()
    except (UserError, OSError, ValueError) as error:  # the keys read last remain valid, the counts are kept
        log(f"the API keys or their counts could not be refreshed: {error}", WARNING)
    return True


def read_counts(path: Path) -> Counter[str]:
    """Return the characters by name of key in a file, none if there is no file; raise a UserError if it is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return Counter({str(name): int(count) for name, count in values.items()})
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{str(path)!r} has no counts of characters; remove it to count this month from 0") from None


def get_month() -> str:
    return datetime.now(UTC).strftime("%Y-%m")
