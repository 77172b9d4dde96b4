"""The fields of a request, wherever they stand: in JSON, a form or the query string."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from fastapi import Request
from pydantic import BaseModel, ValidationError, model_validator
from starlette.exceptions import HTTPException

from dragoman.serving.errors import EXPECTED_TYPES, RequestError, describe_invalid

_M = TypeVar("_M", bound=BaseModel)
URL_ENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
MAX_FORM_FIELDS = 2000


class RequestFields(BaseModel):
    """The base of the fields of all requests: none of them has half a character (a surrogate), as JSON allows."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_surrogates(cls, values: Any) -> Any:
        rest = [values]
        while rest:
            value = rest.pop()
            if isinstance(value, dict):
                rest += [*value, *value.values()]
            elif isinstance(value, list):
                rest += value
            elif isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise RequestError(400, "bad_text", "a text has a surrogate, which is half a character") from None
        return values


class Upload(NamedTuple):
    """A file in a form."""

    name: str
    data: bytes


def is_json(request: Request) -> bool:
    """Return whether the body of a request is said to be JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


async def read_json_body(request: Request) -> Any:
    """Return the JSON value in the body of a request."""
    try:
        return json.loads(await request.body())
    except json.JSONDecodeError as error:
        message = f"the body is not valid JSON: {error.msg} at character {error.pos}"
        raise RequestError(400, "invalid_json", message) from None
    except UnicodeDecodeError:
        raise RequestError(400, "invalid_json", "the body is not valid JSON in UTF-8") from None
    except ValueError:
        raise RequestError(400, "invalid_json", "the body has a number with too many digits") from None


async def read_record(request: Request, model: type[_M]) -> _M:
    """Return the JSON object in the body of a request as a record, as FastAPI does for an argument of a handler."""
    if not await request.body():
        raise RequestError(400, "missing_field", "body: missing")
    value = await read_json_body(request) if is_json(request) else None
    if not isinstance(value, dict):
        raise RequestError(400, "invalid_field", f"body: should {EXPECTED_TYPES['model_attributes_type']}")
    return parse_fields(model, value)


async def read_form(request: Request) -> list[tuple[str, str | Upload]]:
    """Return the form in the body of a request; an empty one if the body is no form. Accept one on GET, too."""
    media_type = request.headers.get("content-type", "").lower()
    if not media_type.startswith(MULTIPART):
        body = await request.body()  # what follows a body tells whether the client still waits
        return [*parse_pairs(body, "the form")] if media_type.startswith(URL_ENCODED) else []
    try:
        async with request.form(max_files=8, max_fields=MAX_FORM_FIELDS, max_part_size=2_000_000) as form:
            return [
                (name, value if isinstance(value, str) else Upload(value.filename or "", await value.read()))
                for name, value in form.multi_items()
            ]
    except (HTTPException, UnicodeError, ValueError) as error:
        if isinstance(error, HTTPException) and error.status_code != 400:  # from the limits of all requests
            raise
        raise RequestError(400, "bad_form", "the body is not a valid form") from None


def parse_pairs(data: bytes, place: str) -> list[tuple[str, str]]:
    """Return the fields of a form or a query string, which are UTF-8 and may be so without percent signs."""
    try:
        return parse_qsl(data.decode(), keep_blank_values=True, errors="strict", max_num_fields=MAX_FORM_FIELDS)
    except UnicodeError:
        raise RequestError(400, "bad_form", f"{place} is not valid UTF-8") from None
    except ValueError:
        raise RequestError(400, "bad_form", f"{place} has more than {MAX_FORM_FIELDS} fields") from None


async def read_fields(request: Request, lists: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields of a request as a dict: those of a JSON object, or else of the query and the form together.

    Of a form, the fields in `lists` are lists, since they may be repeated. Of others, the first value counts.
    """
    if not is_json(request):
        return await read_form_fields(request, lists)
    value = await read_json_body(request)
    if not isinstance(value, dict):
        raise RequestError(400, "invalid_json", "Invalid JSON format: the body must be an object")
    return value


async def read_form_fields(request: Request, lists: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields of the query and the form together, as `read_fields` does. Documents come in forms only."""
    fields: dict[str, Any] = {}
    query = parse_pairs(request.scope.get("query_string", b""), "the query string")
    for name, value in [*query, *await read_form(request)]:
        if name in lists:
            fields.setdefault(name, []).append(value)
        else:
            fields.setdefault(name, value)
    return fields


def parse_fields(model: type[_M], fields: Mapping[str, Any]) -> _M:
    """Return the fields as a record; raise a RequestError that names the first one that is wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise describe_invalid([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None


def describe_record(model: type[BaseModel]) -> dict[str, Any]:
    """Return what OpenAPI says about a body that is read with `read_record`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def describe_body(model: type[BaseModel], *, with_file: bool = False) -> dict[str, Any]:
    """Return what OpenAPI says about a body that is read with `read_fields`: JSON or a form, or one with a file."""
    schema = model.model_json_schema()
    if with_file:
        file = {"type": "string", "format": "binary", "description": "the document"}
        schema["properties"] = {"file": file, **schema["properties"]}
        schema["required"] = ["file", *schema.get("required", [])]
        content = {"multipart/form-data": {"schema": schema}}
    else:
        content = {name: {"schema": schema} for name in ("application/json", "application/x-www-form-urlencoded")}
    return {"requestBody": {"required": True, "content": content}}
