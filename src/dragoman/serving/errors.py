"""The one error that request handlers raise, and the forms in which the clients of each protocol expect it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from dragoman.errors import UserError


class RequestError(Exception):
    """An error response: HTTP status, a code for programs, a sentence for people."""

    def __init__(self, status: int, code: str, message: str, *, retry_after: int = 0) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after = retry_after  # seconds; 0: a repeated request would fail as well


def make_stopping_error() -> RequestError:
    """Return the error of what a server that stops does not finish."""
    return RequestError(503, "stopping", "the server is stopping", retry_after=1)


class RequestCancelled(Exception):
    """Raised in the thread of a request whose client has gone, or whose time is over."""


class ResponseAborted(Exception):
    """Raised in the middle of an answer, so that the server closes the connection and the client sees the end missing.

    The status is for the log and the metrics, since another one has been sent.
    """

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


Rendered = tuple[int, dict[str, Any]]  # status and body


def render_own(error: RequestError) -> Rendered:
    """Return an error as our own API answers it."""
    message = explain(error, where=": Authorization: Bearer KEY")
    return error.status, {"error": {"code": error.code, "message": message}}


# Clients recognise errors of keys by their words.
LIBRETRANSLATE_MESSAGES = {
    "key_missing": "Please contact the server operator to get an API key",
    "key_invalid": "Invalid API key",
}


def render_libretranslate(error: RequestError) -> Rendered:
    """Return an error with the statuses of LibreTranslate: a missing key is a bad request, a used-up quota is 403."""
    status = {401: 400, 404: 400, 413: 400}.get(error.status, error.status) if error.code != "not_found" else 404
    message = LIBRETRANSLATE_MESSAGES.get(error.code, error.message)
    return status, {"error": ("Slowdown: " if status == 429 else "") + message}


def render_deepl(error: RequestError) -> Rendered:
    """Return an error with the statuses of DeepL, whose clients know 403 for keys and 456 for quotas."""
    status = {"quota_exceeded": 456, "key_missing": 403}.get(error.code, error.status)
    message = explain(error, where=": Authorization: DeepL-Auth-Key KEY")
    if field := {"unsupported_source": "source_lang", "unsupported_target": "target_lang"}.get(error.code):
        message = f"Value for '{field}' not supported: {message}"
    return status, {"message": message, "detail": error.code}


def explain(error: RequestError, *, where: str) -> str:
    """Return the message of an error; if a key is missing, with the place where the protocol has it."""
    return error.message + where if error.code == "key_missing" else error.message


LIBRETRANSLATE_PATHS = (
    "/translate", "/detect", "/languages", "/translate_file", "/download_file", "/suggest", "/frontend", "/spec",
)  # fmt: skip
ERROR_RENDERERS: dict[tuple[str, ...], Callable[[RequestError], Rendered]] = {  # by the first part of the path
    ("/v1", "/v2", "/v3"): render_deepl,
    LIBRETRANSLATE_PATHS: render_libretranslate,
}


def render_error(path: str, error: RequestError) -> Rendered:
    """Return status and body of an error in the form of the protocol that the path belongs to."""
    first = "/" + path.lstrip("/").partition("/")[0]
    for paths, render in ERROR_RENDERERS.items():
        if first in paths:
            return render(error)
    return render_own(error)


# By what pydantic calls them.
UNION_MEMBERS = {"str": "be a string", "list[str]": "be a list of strings"}
EXPECTED_TYPES = {
    "string_type": "be a string",
    "list_type": "be a list",
    "dict_type": "be an object",
    "model_attributes_type": "be a JSON object, sent as Content-Type: application/json",
}


def describe_invalid(errors: Sequence[Any]) -> RequestError:
    """Return the error for a request that pydantic refused: one sentence about the first wrong field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return RequestError(
            400, "invalid_json", f"the body is not valid JSON: {reason} at character {first['loc'][-1]}"
        )
    name, *inside = (first["loc"] if len(first["loc"]) > 1 else (*first["loc"], "body"))[1:]
    if first["type"] == "extra_forbidden":
        return RequestError(400, "unknown_field", f"there is no field {name[:100]!r}")
    if first["type"] == "missing":
        return RequestError(400, "missing_field", f"{name}: missing")
    # Inside of a field come the types of a union, which concern all errors of the field, or indexes and keys.
    if not inside or inside[0] in UNION_MEMBERS or str(inside[0]).startswith("literal["):
        others = [error for error in errors if [*error["loc"][1:2]] == [name] or len(error["loc"]) == 1]
        expected = " or ".join(dict.fromkeys(map(describe_expected, others))).replace(" or be ", " or ")
    else:
        name, expected = f"{name}[{inside[0]!r:.60}]", describe_expected(first)
    return RequestError(400, "invalid_field", f"{name}: should {expected}")


def describe_expected(error: Any) -> str:
    """Return what should be in the place of an error of pydantic, as what follows `should`."""
    member = (*error["loc"], "", "", "")[2]  # of a union, or else something within the field
    if member in UNION_MEMBERS and error["type"] != "too_short":
        return UNION_MEMBERS[member]
    message = str(error["msg"]).partition(" should ")[2] or "be valid"
    return EXPECTED_TYPES.get(error["type"]) or re.split(", unable| after validation", message)[0]


def to_request_error(error: Exception) -> RequestError:
    """Return the RequestError for an error of FastAPI, or for bad input that the toolkit refuses."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserError):
        return RequestError(400, "bad_request", str(error))
    if str(getattr(error, "detail", "")) == "There was an error parsing the body":  # FastAPI, of bytes that are no text
        return RequestError(400, "invalid_json", "the body is not valid JSON in UTF-8")
    headers = getattr(error, "headers", None) or {}
    status: int = getattr(error, "status_code")  # noqa: B009 - an HTTPException; commands import this file without FastAPI
    codes = {404: "not_found", 413: "too_large", 429: "busy"}
    detail = "there is nothing at this path" if status == 404 else str(getattr(error, "detail", ""))
    retry_after = int(headers.get("Retry-After", 0))
    return RequestError(status, codes.get(status, "bad_request"), detail, retry_after=retry_after)
