"""The OpenAPI document: what FastAPI derives from the routes, with the errors and the keys that all of them share."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from dragoman.serving.access import OPEN_PATHS
from dragoman.serving.errors import RequestError, render_error

ERRORS = {
    "400": "the request is invalid",
    "401": "an API key is missing",
    "403": "the API key is not valid, or not allowed to do this",
    "404": "there is no such thing",
    "413": "the request is too large",
    "429": "too many requests; Retry-After says when to try again",
    "500": "the server has failed",
    "503": "the server is not ready",
    "504": "the request took too long",
}
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
    "deepl": {
        "type": "apiKey",
        "in": "header",
        "name": "Authorization",
        "description": "Authorization: DeepL-Auth-Key KEY",
    },
}
STRING_SCHEMA = {"type": "string"}


def describe_api(app: FastAPI) -> None:
    """Complete the OpenAPI document of an application when it is first asked for."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            complete_document(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def complete_document(document: dict[str, Any]) -> None:
    """Add errors and keys to each operation, and remove FastAPI's own form of validation errors."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    components["securitySchemes"] = KEY_SCHEMES
    for path, operations in document["paths"].items():
        schema = describe_error_body(path)
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status, description in ERRORS.items():
                content = {"application/json": {"schema": schema}}
                responses.setdefault(status, {"description": description, "content": content})
            if path not in OPEN_PATHS:
                operation["security"] = [{}, {"deepl" if path.startswith("/v2") else "bearer": []}]


def describe_error_body(path: str) -> dict[str, Any]:
    """Return the JSON schema of an error in the form of the protocol of the path."""
    _, example = render_error(path, RequestError(400, "code", "message"))
    return describe_strings(example)


def describe_strings(value: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of objects with the same keys and strings as values."""
    properties = {
        key: describe_strings(item) if isinstance(item, dict) else STRING_SCHEMA for key, item in value.items()
    }
    return {"type": "object", "properties": properties, "required": list(value)}
