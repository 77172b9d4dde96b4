"""The API of LibreTranslate 1.9, at the paths and with the answers that its clients know.

Fields come as JSON, as a form or in the query string, the key in the field `api_key`. Errors are `{"error": "text"}`
with status 400, 403, 429 or 500 (errors.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import to_json

from dragoman.documents.formats import list_suffixes
from dragoman.serving.access import authorize
from dragoman.serving.descriptions import describe_languages
from dragoman.serving.document_jobs import DocumentJobs, DocumentRequest, respond_with_document
from dragoman.serving.errors import RequestError
from dragoman.serving.fields import (
    RequestFields,
    Upload,
    describe_body,
    is_json,
    parse_fields,
    read_fields,
    read_form_fields,
)
from dragoman.serving.language_index import UNDETERMINED, name_code, parse_code
from dragoman.serving.service import AUTO, Detection, Service, Translation, TranslationRequest
from dragoman.serving.text_batches import TextBatches
from dragoman.serving.workers import WorkerPool

LIBRETRANSLATE, LIBRETRANSLATE_VERSION = "LibreTranslate", "1.9.6"  # in OpenAPI documents
TEXT_FORMATS = ("text", "html")
ECHO_LANGUAGE = "en"  # as which LibreTranslate detects a text without letters


def parse_alternatives(value: Any) -> int:
    """Return a number of alternatives as LibreTranslate reads it: none if it is empty or negative."""
    try:
        return max(int(value or 0), 0)
    except (ValueError, TypeError, OverflowError):
        message = "Invalid request: alternatives parameter is not a number"
        raise RequestError(400, "invalid_field", message) from None


class TranslateFields(RequestFields):
    """The fields of POST /translate."""

    model_config = ConfigDict(extra="ignore")

    q: str | list[str] = Field(description="text to translate, or in JSON a list of texts")
    source: str = Field(description="language of the text, or auto")
    target: str = Field(description="language of the translation")
    format: Annotated[str, BeforeValidator(lambda value: value or "text")] = Field("text", description="text or html")
    alternatives: Annotated[int, BeforeValidator(parse_alternatives)] = Field(
        0, description="number of further translations; there are none with format=html"
    )
    api_key: str | None = Field(None, description="API key")


class DetectFields(RequestFields):
    """The fields of POST /detect."""

    model_config = ConfigDict(extra="ignore")

    q: str | list[str] = Field(description="text whose language is to be detected, or in JSON a list of texts")
    api_key: str | None = Field(None, description="API key")


class FileFields(RequestFields):
    """The fields of POST /translate_file besides the file."""

    model_config = ConfigDict(extra="ignore")

    source: str = Field(description="language of the file, or auto")
    target: str = Field(description="language of the translation")
    api_key: str | None = Field(None, description="API key")


def make_libretranslate_router(
    service: Service, workers: WorkerPool, batches: TextBatches, jobs: DocumentJobs
) -> APIRouter:
    """Return the routes of LibreTranslate."""
    router = APIRouter(tags=[LIBRETRANSLATE])

    @router.post("/translate", openapi_extra=describe_body(TranslateFields))
    async def translate(http: Request) -> Response:
        """Translate a text, or a list of texts."""
        raw = require_fields(await read_fields(http), "q", "source", "target")
        if not is_json(http):  # forms have CRLF
            raw["q"] = raw["q"].replace("\r\n", "\n").replace("\r", "\n")
        fields = parse_fields(TranslateFields, raw)
        request = make_request(service, fields)
        authorize(http, fields.api_key, request.characters, len(request.texts))

        def write_answer(translations: list[Translation]) -> bytes:
            return to_json(describe_for_libretranslate(fields, translations))

        return Response(await batches.translate(request, write_answer), media_type="application/json")

    @router.post("/detect", openapi_extra=describe_body(DetectFields))
    async def detect(http: Request) -> list[dict[str, Any]]:
        """Return the languages that a text may be in, best first; of a list, those of all texts together."""
        fields = parse_fields(DetectFields, require_fields(await read_fields(http), "q"))
        texts = [fields.q] if isinstance(fields.q, str) else fields.q
        check_limits(service, texts)
        authorize(http, fields.api_key)
        found = await workers.run(lambda _: detect_languages(service, texts))
        likely = [detection for detection in found if round(100 * detection.confidence) > 0]
        return [describe_detection(detection) for detection in likely] or [describe_detection(None)]

    @router.get("/languages")
    async def languages() -> list[dict[str, Any]]:
        """Return all languages and the target languages of each: also itself, in which a text is unchanged."""
        listed = [
            {**language, "targets": sorted({language["code"], *language["targets"]})}
            for language in describe_languages(service.languages)
        ]
        return sorted(listed, key=lambda language: (language["code"] == UNDETERMINED, language["code"]))

    @router.post("/suggest")
    async def suggest() -> Response:
        """Refuse suggestions of better translations, which are not collected."""
        return JSONResponse({"error": "Suggestions are disabled on this server."}, 403)

    @router.get("/frontend/settings")
    async def frontend_settings() -> dict[str, Any]:
        """Return limits, formats and default languages."""
        return describe_frontend(service)

    @router.get("/spec")
    async def spec(http: Request) -> dict[str, Any]:
        """Return the OpenAPI document of the routes of LibreTranslate."""
        return describe_routes(http.app.openapi())

    add_file_routes(router, service, jobs)
    return router


def add_file_routes(router: APIRouter, service: Service, jobs: DocumentJobs) -> None:
    @router.post("/translate_file", openapi_extra=describe_body(FileFields, with_file=True))
    async def translate_file(http: Request) -> dict[str, Any]:
        """Translate a document; the answer has the address of the translated one."""
        raw = await read_form_fields(http)
        file = raw.pop("file", None)
        if not isinstance(file, Upload) or not file.name:
            raise RequestError(400, "missing_field", "Invalid request: missing file parameter")
        fields = parse_fields(FileFields, require_fields(raw, "source", "target"))
        source, target = check_source(service, fields.source), check_target(service, fields.source, fields.target)
        authorize(http, fields.api_key)
        options = TranslationRequest(texts=[], source=source, target=target)
        request = DocumentRequest(name=file.name, data=file.data, options=options)
        job = await jobs.submit(http, request, fields.api_key)
        await jobs.wait(job)
        # Not `base_url`: below another application in which this one is mounted, that is the address of the outer one.
        root = quote(str(http.scope.get("root_path", "")).rstrip("/"))
        url = http.url.replace(path=f"{root}/download_file/{job.id}.{quote(job.name)}", query="")
        return {"translatedFileUrl": str(url)}

    @router.get("/download_file/{name}")
    async def download_file(name: str) -> Response:
        """Return a translated document. Its address cannot be guessed, so that no key is needed."""
        return respond_with_document(jobs.find(name.partition(".")[0]))


def require_fields(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the fields; raise a RequestError if one of these is missing, empty or a file, which is the same."""
    for name in names:
        if not fields.get(name) or isinstance(fields[name], Upload):
            raise RequestError(400, "missing_field", f"Invalid request: missing {name} parameter")
    return fields


def make_request(service: Service, fields: TranslateFields) -> TranslationRequest:
    """Return what to translate; raise a RequestError in the words of LibreTranslate if that is not possible."""
    if fields.format not in TEXT_FORMATS:
        raise RequestError(400, "bad_format", f"{fields.format[:20]} format is not supported")
    limit = service.settings.max_nbest - 1
    if fields.alternatives > limit:
        raise RequestError(400, "too_many", f"Invalid request: alternatives parameter must be <= {limit}")
    texts = [fields.q] if isinstance(fields.q, str) else fields.q
    check_limits(service, texts)
    return TranslationRequest(
        texts=texts,
        source=check_source(service, fields.source),
        target=check_target(service, fields.source, fields.target),
        nbest=fields.alternatives + 1,
        markup=fields.format,
        keep_breaks=fields.format != "html",
        split_sentences=True,
        copy_wordless=True,
    )


def detect_languages(service: Service, texts: list[str]) -> list[Detection]:
    """Return the languages of texts, best first, with the mean of their probabilities, weighted by length."""
    total, sums = max(sum(map(len, texts)), 1), defaultdict[str, float](float)
    for text in texts:
        for detection in service.detect(text):
            sums[detection.language] += detection.confidence * len(text) / total
    return [Detection(*each) for each in sorted(sums.items(), key=lambda item: -item[1])]


def check_limits(service: Service, texts: list[str]) -> None:
    """Raise a RequestError in the words of LibreTranslate for too many texts, or for one that is too long."""
    settings = service.settings
    longest = max(map(len, texts))
    for size, limit in ((len(texts), settings.max_texts), (longest, settings.max_characters)):
        if size > limit:
            message = f"Invalid request: request ({size}) exceeds text limit ({limit})"
            raise RequestError(413, "too_long", message)


def check_source(service: Service, code: str) -> str:
    """Return a source language, or auto; raise a RequestError in the words of LibreTranslate if no model knows it."""
    if code.strip().lower() == AUTO:
        return AUTO
    try:
        is_known = service.languages.is_known(parse_code(code, "source"))
    except RequestError:
        is_known = False
    if not is_known:
        raise RequestError(400, "unsupported_source", f"{code[:20]} is not supported")
    return code


def check_target(service: Service, source: str, target: str) -> str:
    """Return a target language; raise a RequestError in the words of LibreTranslate if no model has it."""
    index, code = service.languages, ""
    try:
        code = parse_code(target, "target")
        if source.strip().lower() == AUTO:
            index.match_target(code, "")
        else:
            index.find_route_unless_same(parse_code(source, "source"), code, "")
    except RequestError as error:
        if error.code == "missing_target":
            raise
        if source.strip().lower() == AUTO or not (code and index.is_known(code)):
            raise RequestError(400, "unsupported_target", f"{target[:20]} is not supported") from None
        names = [f"{name_code(parse_code(each, 'source'))} ({each})" for each in (target, source)]
        message = f"{names[0]} is not available as a target language from {names[1]}"
        raise RequestError(400, "unsupported_pair", message) from None
    return target


def describe_routes(document: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an OpenAPI document with these routes. Clients recognise LibreTranslate by its title."""
    paths = {
        path: operations
        for path, operations in document["paths"].items()
        if any(LIBRETRANSLATE in operation.get("tags", []) for operation in operations.values())
    }
    info = {
        "title": LIBRETRANSLATE,
        "version": LIBRETRANSLATE_VERSION,
        "description": "The API of LibreTranslate, served by Dragoman; /openapi.json describes its other routes.",
    }
    components = {"securitySchemes": document["components"]["securitySchemes"]}
    return {"openapi": document["openapi"], "info": info, "paths": paths, "components": components}


def describe_frontend(service: Service) -> dict[str, Any]:
    """Return the answer of GET /frontend/settings."""
    settings, offered = service.settings, service.languages.list_languages()
    first = offered[0] if offered else None
    target = first.targets[0] if first else ""
    return {
        "charLimit": settings.max_characters,
        "frontendTimeout": 500,
        "apiKeys": settings.keys_file is not None,
        "keyRequired": settings.key_required,
        "suggestions": False,
        "filesTranslation": True,
        "supportedFilesFormat": list_suffixes(),
        "language": {
            "source": {"code": first.code if first else AUTO, "name": first.name if first else "Auto Detect"},
            "target": {"code": target, "name": name_code(target)},
        },
    }


def describe_for_libretranslate(fields: TranslateFields, translations: list[Translation]) -> dict[str, Any]:
    """Return the answer of POST /translate. What was one text in the request is no list in the answer."""
    texts = [translation.text for translation in translations]
    detections = [describe_detection(translation.detection) for translation in translations]
    alternatives = [list_other_texts(translation) for translation in translations]
    is_list = isinstance(fields.q, list)
    answer: dict[str, Any] = {"translatedText": texts if is_list else texts[0]}
    if fields.source.strip().lower() == AUTO:
        answer["detectedLanguage"] = detections if is_list else detections[0]
    if fields.alternatives > 0:
        answer["alternatives"] = alternatives if is_list else alternatives[0]
    return answer


def list_other_texts(translation: Translation) -> list[str]:
    """Return the texts of the other hypotheses, each once: neither empty ones nor the translation itself."""
    others = dict.fromkeys(other.text for other in translation.hypotheses[1:] if other.text.strip())
    return [text for text in others if text != translation.text]


def describe_detection(detection: Detection | None) -> dict[str, Any]:
    """Return a language and a confidence between 0 and 100, whole as a float: clients may fail at fractions."""
    if detection is None or not detection.confidence:
        return {"confidence": 0.0, "language": ECHO_LANGUAGE}
    return {"confidence": float(math.floor(100 * detection.confidence + 0.5)), "language": detection.language}
