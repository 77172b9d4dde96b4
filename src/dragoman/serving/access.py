"""Access control: requests need keys, within the limits of each key."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from starlette.datastructures import Headers

from dragoman.serving.errors import RequestError
from dragoman.serving.keys import ApiKey, KeyStore
from dragoman.serving.request_context import CURRENT_REQUEST, RequestContext

OPEN_PATHS = (  # need no key
    "/health", "/ready", "/api/settings", "/languages", "/frontend/settings", "/suggest", "/spec",
    "/download_file/{name}",
)  # fmt: skip
# Keys of others are checked before the body is read. LibreTranslate has its key in the body, and pages have none.
KEYED_PREFIXES = ("/api/", "/v2/")
SCHEMES = ("bearer ", "deepl-auth-key ")


class Access:
    """Checks keys. Without a store there are none, and nobody is an administrator."""

    def __init__(self, store: KeyStore | None, *, required: bool) -> None:
        self.store, self.required = store, required
        self.characters = 0  # of all requests since the start

    def identify(self, request: RequestContext, text: str | None) -> None:
        """Set the key of a request; raise a RequestError if it has none or a wrong one, unless keys are optional."""
        if self.store:
            self.store.keep_fresh()
        if request.key is None and text and self.store:
            request.key = self.store.find(text)
        if request.key is None and self.required:
            if text:
                raise RequestError(403, "key_invalid", "this API key is not valid")
            raise RequestError(401, "key_missing", "this server needs an API key")
        if request.key and self.store and not request.is_counted:
            request.is_counted = True
            self.store.take_request(request.key)

    def charge(self, request: RequestContext, characters: int, texts: int) -> None:
        """Count texts and characters of a request, within the limit of its key."""
        if request.key and self.store:
            self.store.take_characters(request.key, characters)
        request.characters += characters
        self.characters += characters
        request.texts += texts

    def refund(self, key: ApiKey | None, characters: int) -> None:
        """Give back the characters of a request that was not answered, or of a document that was not translated."""
        if key and self.store:
            self.store.return_characters(key, characters)
        self.characters -= characters


def read_header_key(headers: Headers) -> str | None:
    """Return the key in the Authorization header: `Bearer KEY`, or `DeepL-Auth-Key KEY`; None if there is none."""
    value = headers.get("authorization", "").strip()
    for scheme in SCHEMES:
        if value.lower().startswith(scheme):
            return value[len(scheme) :].strip()
    return None


def read_query_key(query: bytes) -> str | None:
    """Return the key in a query string, where old clients of DeepL have it: `auth_key=KEY`; None if there is none."""
    return next((value for name, value in parse_qsl(query.decode("latin-1")) if name == "auth_key"), None)


def authorize(request: Request, key: str | None = None, characters: int = 0, texts: int = 1) -> None:
    """Check the key of a request and count its characters; raise a RequestError if it is refused.

    `key` is a key that the body has; otherwise that of the Authorization header counts. May be called again for the
    same request with further characters.
    """
    access: Access = request.app.state.access
    context = get_current_request()
    access.identify(context, key or read_header_key(request.headers))
    if characters:
        access.charge(context, characters, texts)


def require_admin(request: Request) -> None:
    """Raise a RequestError unless the key of the request is that of an administrator."""
    authorize(request)
    key = get_current_request().key
    if key is None or "admin" not in key.rights:
        raise RequestError(403, "not_allowed", "this needs an API key with the right 'admin'")


def get_current_key() -> ApiKey | None:
    """Return the key of the current request; None if it has none."""
    return get_current_request().key


def find_owner() -> str:
    """Return the name of the key of the current request; "" if it has none."""
    key = get_current_key()
    return key.name if key else ""


def get_current_request() -> RequestContext:
    request = CURRENT_REQUEST.get()
    assert request  # RequestMiddleware has set it
    return request


AdminOnly = Annotated[None, Depends(require_admin)]
