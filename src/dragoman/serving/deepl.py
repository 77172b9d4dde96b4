"""The API of DeepL, version 2, with the answers that its client libraries know: texts, documents and glossaries.

The key stands in the header (`Authorization: DeepL-Auth-Key KEY`) or, as with old clients, in the query string as
`auth_key`. It is checked before the body is read, so a key in a form is refused.
Errors are `{"message": ..., "detail": ...}`, both texts (errors.py). Language codes are upper-case in answers. English
and Portuguese are targets as EN-GB, EN-US, PT-BR and PT-PT only, since clients refuse EN and PT.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from threading import Event
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import to_json

from dragoman.errors import UserError
from dragoman.inference.constraints import Glossary
from dragoman.serving.access import Access, authorize, find_owner, get_current_key, read_query_key
from dragoman.serving.document_jobs import DocumentJob, DocumentJobs, DocumentRequest, respond_with_document
from dragoman.serving.errors import RequestError, ResponseAborted, to_request_error
from dragoman.serving.fields import (
    RequestFields,
    Upload,
    describe_body,
    parse_fields,
    read_fields,
    read_form_fields,
)
from dragoman.serving.glossaries import (
    GlossaryStore,
    StoredGlossary,
    format_entries,
    merge_glossaries,
    parse_entries,
)
from dragoman.serving.language_index import UNDETERMINED, name_code, parse_code
from dragoman.serving.service import AUTO, Service, Translation, TranslationRequest
from dragoman.serving.text_batches import TextBatches
from dragoman.serving.workers import WorkerPool

UNLIMITED = 1_000_000_000_000  # characters: what DeepL says to accounts without a limit
MAX_GLOSSARIES_PER_REQUEST = 5
SPACE_SECONDS = 4.0  # between the spaces before an answer that takes long
LISTS_OF_NAMES = ("glossary_ids", "splitting_tags", "non_splitting_tags", "ignore_tags")  # may be repeated in forms
TARGET_VARIANTS = {  # target languages as clients know them
    "en": {"EN-GB": "English (British)", "EN-US": "English (American)"},
    "pt": {"PT-BR": "Portuguese (Brazilian)", "PT-PT": "Portuguese (European)"},
    "no": {"NB": "Norwegian (Bokmål)"},
    "zh-Hans": {"ZH": "Chinese (simplified)", "ZH-HANS": "Chinese (simplified)"},
}


def split_commas(value: Any) -> Any:
    """Return a list of names: a JSON array as it is, and a text or the values of a form field at their commas."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return [name.strip() for text in texts for name in text.split(",") if name.strip()]
    return value


def write_number(value: Any) -> Any:
    """Return the digits of a number, which JSON may have in place of a string."""
    return str(value) if isinstance(value, int) else value


NameList = Annotated[list[str], BeforeValidator(split_commas)]
Formality = Literal["default", "more", "less", "prefer_more", "prefer_less"]
ModelType = Literal["quality_optimized", "prefer_quality_optimized", "latency_optimized"]


class LanguageFields(RequestFields):
    """The fields that texts and documents share."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    target_lang: str = Field(min_length=1, description="language of the translation, such as DE or EN-GB")
    source_lang: str = Field("", description="language of the text; detected if it is missing")
    formality: Formality = Field("default", description="the models have no degrees of formality")
    glossary_id: str = Field("", description="glossary to use; needs source_lang")
    glossary_ids: NameList = Field([], description="glossaries to use, the first ones first; need source_lang")
    style_id: str = Field("", description="not offered")
    translation_memory_id: str = Field("", description="not offered")


class TextFields(LanguageFields):
    """The fields of POST /v2/translate."""

    text: list[str] = Field(min_length=1, description="texts to translate")
    context: str = Field("", description="text before, for models that read context; it is not translated")
    show_billed_characters: bool = False
    split_sentences: Annotated[Literal["0", "1", "nonewlines"] | None, BeforeValidator(write_number)] = Field(
        None,
        description="where sentences end: 1 at marks and line breaks, nonewlines (HTML by default) at marks, 0 nowhere",
    )
    preserve_formatting: bool = False
    model_type: ModelType | None = None
    tag_handling: Literal["xml", "html"] | None = Field(None, description="whether the texts have tags")
    tag_handling_version: Literal["v1", "v2"] | None = Field(
        None, description="v2: refuse XML that is not well-formed, in which otherwise what is no tag is text"
    )
    outline_detection: bool = True
    splitting_tags: NameList = Field([], description="XML elements at which sentences end")
    non_splitting_tags: NameList = Field([], description="XML elements at which no sentence ends")
    ignore_tags: NameList = Field([], description="XML elements that are not translated")
    custom_instructions: list[str] = Field([], description="not offered")


class DocumentFields(LanguageFields):
    """The fields of POST /v2/document besides the file."""

    filename: str = ""
    output_format: str = Field("", description="must be the format of the document, if given")


class GlossaryFields(RequestFields):
    """The fields of POST /v2/glossaries."""

    name: str
    source_lang: str = Field(min_length=1)
    target_lang: str = Field(min_length=1)
    entries: str = Field(description="pairs of terms, one in each line")
    entries_format: Literal["tsv", "csv"]


class DocumentKeyFields(RequestFields):
    """The field of requests for a document."""

    document_key: str = Field(description="as returned by POST /v2/document")


def make_deepl_router(
    service: Service, workers: WorkerPool, batches: TextBatches, jobs: DocumentJobs, glossaries: GlossaryStore
) -> APIRouter:
    """Return the routes of DeepL."""
    router = APIRouter(prefix="/v2", tags=["DeepL"])
    add_text_routes(router, service, workers, batches, glossaries)
    add_document_routes(router, service, workers, jobs, glossaries)
    add_glossary_routes(router, service, workers, glossaries)
    return router


async def respond_in_time(task: asyncio.Task[bytes]) -> Response:
    """Return the JSON that a task returns. If that takes long, the answer begins with spaces, so that clients wait.

    Official clients repeat a request if nothing has come for ten seconds.
    """
    try:
        await asyncio.wait({task}, timeout=SPACE_SECONDS)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        return Response(task.result(), media_type="application/json")

    async def send() -> AsyncIterator[bytes]:
        try:
            while not task.done():
                yield b" "
                await asyncio.wait({task}, timeout=SPACE_SECONDS)
            yield task.result()
        except (RequestError, UserError) as error:
            raise ResponseAborted(to_request_error(error).status) from None
        finally:
            task.cancel()

    return StreamingResponse(send(), media_type="application/json")


def add_text_routes(
    router: APIRouter, service: Service, workers: WorkerPool, batches: TextBatches, glossaries: GlossaryStore
) -> None:
    @router.get("/translate", include_in_schema=False)  # of old clients, with everything in the query string
    @router.post("/translate", openapi_extra=describe_body(TextFields))
    async def translate_texts(http: Request) -> Response:
        """Translate texts."""
        raw = await read_fields(http, lists=("text", "custom_instructions", *LISTS_OF_NAMES))
        if isinstance(raw.get("text"), str):
            raw["text"] = [raw["text"]]
        fields = parse_fields(TextFields, drop_empty(raw))
        if fields.custom_instructions:
            raise RequestError(400, "not_offered", "custom_instructions are not offered; leave them out")
        request = make_text_request(service, fields, await find_glossary(workers, glossaries, fields))
        service.check(request)
        authorize(http, read_query_key(http.url.query.encode()), request.characters, len(request.texts))

        def write_answer(translations: list[Translation]) -> bytes:
            pairs = zip(fields.text, translations, strict=True)
            return to_json({"translations": [describe_for_deepl(text, found, fields) for text, found in pairs]})

        task = asyncio.create_task(batches.translate(request, write_answer))
        return await respond_in_time(task)

    @router.post("/usage", include_in_schema=False)  # of old clients
    @router.get("/usage")
    async def usage(http: Request) -> dict[str, Any]:
        """Return the characters that the key has used, and how many it may use."""
        access: Access = http.app.state.access
        key = get_current_key()
        used, limit = access.store.get_usage(key) if key and access.store else (access.characters, 0)
        return {"character_count": used, "character_limit": limit or UNLIMITED}

    @router.post("/languages", include_in_schema=False)
    @router.get("/languages")
    async def languages(http: Request) -> list[dict[str, Any]]:
        """Return the source languages or, with type=target, the target languages. Clients send `type` as a form."""
        kind = (await read_form_fields(http)).get("type", "source")
        if kind == "source":
            known = {
                base_code(language.code): language.name
                for language in service.languages.list_languages()
                if language.code != UNDETERMINED
            }
            return [{"language": code, "name": name} for code, name in sorted(known.items())]
        if kind == "target":
            targets = list_targets(service.languages.list_targets())
            return [{"language": code, "name": name, "supports_formality": False} for code, name in targets.items()]
        raise RequestError(400, "bad_request", "type is either source or target")


def add_document_routes(
    router: APIRouter, service: Service, workers: WorkerPool, jobs: DocumentJobs, glossaries: GlossaryStore
) -> None:
    @router.post("/document", openapi_extra=describe_body(DocumentFields, with_file=True))
    async def upload_document(http: Request) -> dict[str, str]:
        """Translate a document, for which clients need not wait."""
        raw = await read_form_fields(http, LISTS_OF_NAMES)
        file = raw.pop("file", None)
        if not isinstance(file, Upload):
            raise RequestError(400, "missing_field", "file: missing")
        fields = parse_fields(DocumentFields, drop_empty(raw))
        name = fields.filename or file.name or "document"
        output_format = fields.output_format.lower().lstrip(".")
        if output_format and not name.lower().endswith(f".{output_format}"):
            raise RequestError(400, "not_offered", "output_format: documents keep their format")
        source, target = parse_languages(service, fields)
        glossary = await find_glossary(workers, glossaries, fields)
        options = TranslationRequest(texts=[], source=source, target=target, glossary=glossary)
        job = await jobs.submit(http, DocumentRequest(name=name, data=file.data, options=options))
        return {"document_id": job.id, "document_key": job.key}

    @router.post("/document/{document_id}", openapi_extra=describe_body(DocumentKeyFields))
    async def document_status(document_id: str, http: Request) -> dict[str, Any]:
        """Return whether a document is translated."""
        return describe_job(jobs.find(document_id, key=await read_document_key(http)))

    @router.post("/document/{document_id}/result", openapi_extra=describe_body(DocumentKeyFields))
    async def document_result(document_id: str, http: Request) -> Response:
        """Return a translated document."""
        job = jobs.find(document_id, key=await read_document_key(http))
        return respond_with_document(job, not_ready=503)


def add_glossary_routes(router: APIRouter, service: Service, workers: WorkerPool, glossaries: GlossaryStore) -> None:
    @router.get("/glossary-language-pairs")
    async def glossary_language_pairs() -> dict[str, Any]:
        """Return the pairs of languages that glossaries can have."""
        pairs = {
            (base_code(language.code).lower(), base_code(target).lower())
            for language in service.languages.list_languages()
            for target in language.targets
            if UNDETERMINED not in (language.code, target)
        }
        return {"supported_languages": [{"source_lang": s, "target_lang": t} for s, t in sorted(pairs)]}

    @router.post("/glossaries", status_code=201, openapi_extra=describe_body(GlossaryFields))
    async def create_glossary(http: Request) -> dict[str, Any]:
        """Store a glossary."""
        fields = parse_fields(GlossaryFields, await read_fields(http))
        source, target = parse_code(fields.source_lang, "source"), parse_code(fields.target_lang, "target")
        service.languages.find_route(source, target, "")

        def create(_: Event) -> StoredGlossary:
            entries = parse_entries(fields.entries, fields.entries_format)
            codes = base_code(source).lower(), base_code(target).lower()
            return glossaries.create(fields.name, *codes, entries, find_owner())

        return describe_deepl_glossary(await workers.run(create))

    @router.get("/glossaries")
    async def list_glossaries() -> dict[str, Any]:
        """Return the glossaries of the key."""
        found = await workers.run(lambda _: glossaries.list(find_owner()))
        return {"glossaries": [describe_deepl_glossary(glossary) for glossary in found]}

    @router.get("/glossaries/{glossary_id}")
    async def get_glossary(glossary_id: str) -> dict[str, Any]:
        """Return what is known about a glossary, without its entries."""
        return describe_deepl_glossary(await workers.run(lambda _: glossaries.find(glossary_id, find_owner())))

    @router.get("/glossaries/{glossary_id}/entries")
    async def get_glossary_entries(glossary_id: str) -> Response:
        """Return the entries of a glossary as tab-separated values."""
        text = await workers.run(lambda _: format_entries(glossaries.find(glossary_id, find_owner())))
        return PlainTextResponse(text, media_type="text/tab-separated-values")

    @router.delete("/glossaries/{glossary_id}", status_code=204, response_model=None)
    async def delete_glossary(glossary_id: str) -> None:
        """Delete a glossary."""
        await workers.run(lambda _: glossaries.delete(glossary_id, find_owner()))


def drop_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without those that are null or empty, which clients send for what is not given."""
    return {name: value for name, value in fields.items() if value is not None and value != ""}


async def read_document_key(http: Request) -> str:
    return parse_fields(DocumentKeyFields, await read_fields(http)).document_key


def parse_languages(service: Service, fields: LanguageFields) -> tuple[str, str]:
    """Return source and target of a request; raise a RequestError for what no model can do."""
    if fields.formality in ("more", "less"):
        message = "'formality' is not supported for the given 'target_lang'; leave it out, or use prefer_more"
        raise RequestError(400, "not_offered", message)
    for name in ("style_id", "translation_memory_id"):
        if getattr(fields, name):
            raise RequestError(400, "not_offered", f"{name} is not offered; leave it out")
    source, target = fields.source_lang or AUTO, fields.target_lang
    if source != AUTO:
        service.languages.find_route_unless_same(parse_code(source, "source"), parse_code(target, "target"), "")
    else:
        service.languages.match_target(parse_code(target, "target"), "")
    return source, target


def make_text_request(service: Service, fields: TextFields, glossary: Glossary | None) -> TranslationRequest:
    """Return what to translate; raise a RequestError for what no model can do."""
    source, target = parse_languages(service, fields)
    split_sentences = fields.split_sentences or ("nonewlines" if fields.tag_handling == "html" else "1")
    return TranslationRequest(
        texts=fields.text,
        source=source,
        target=target,
        glossary=glossary,
        optional_context=service.select_context(fields.context),
        markup=fields.tag_handling or "text",
        keep_breaks=split_sentences == "1",
        split_sentences=split_sentences != "0",
        copy_wordless=True,
        ignore_tags=tuple(fields.ignore_tags),
        splitting_tags=tuple(set(fields.splitting_tags) - set(fields.non_splitting_tags)),
        is_strict=fields.tag_handling_version == "v2",
    )


async def find_glossary(workers: WorkerPool, glossaries: GlossaryStore, fields: LanguageFields) -> Glossary | None:
    """Return the terms of the glossaries that a request names; raise a RequestError if they have other languages."""
    identifiers = [*filter(None, [fields.glossary_id]), *fields.glossary_ids]
    if not identifiers:
        return None
    if len(identifiers) > MAX_GLOSSARIES_PER_REQUEST:
        raise RequestError(400, "bad_glossary", f"a request may name {MAX_GLOSSARIES_PER_REQUEST} glossaries at most")
    if not fields.source_lang:
        raise RequestError(400, "missing_field", "source_lang is required with a glossary")
    wanted = tuple(base_code(code).lower() for code in (fields.source_lang, fields.target_lang))

    def find(_: Event) -> Glossary | None:
        found = [glossaries.find(identifier, find_owner()) for identifier in identifiers]
        for glossary in found:
            has = tuple(base_code(code).lower() for code in (glossary.source, glossary.target))
            if has != wanted:
                message = f"glossary {glossary.id} is for {'-'.join(has)}, not for {'-'.join(wanted)}"
                raise RequestError(400, "bad_glossary", message)
        return merge_glossaries(found)

    return await workers.run(find)


def base_code(code: str) -> str:
    """Return a language code in the notation of DeepL for sources and glossaries: upper-case, without the variant."""
    base = code.strip().replace("_", "-").partition("-")[0].upper()
    return "NB" if base == "NO" else base


def list_targets(codes: Sequence[str]) -> dict[str, str]:
    """Return target languages under the codes, with names, by which clients of DeepL know them."""
    named = {
        variant: name
        for code in codes
        for variant, name in TARGET_VARIANTS.get(code, {code.upper(): name_code(code)}).items()
    }
    return dict(sorted(named.items()))


def describe_for_deepl(text: str, translation: Translation, fields: TextFields) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "detected_source_language": base_code(translation.source or fields.source_lang or UNDETERMINED),
        "text": translation.text,
    }
    if fields.show_billed_characters:
        answer["billed_characters"] = len(text)
    if fields.tag_handling_version:
        answer["tag_handling_version"] = fields.tag_handling_version
    if fields.model_type:
        answer["model_type_used"] = fields.model_type.removeprefix("prefer_")
    return answer


def describe_job(job: DocumentJob) -> dict[str, Any]:
    answer: dict[str, Any] = {"document_id": job.id, "status": job.status}
    if job.status == "error":
        answer["error_message"] = job.error
    elif job.status == "done":
        answer["billed_characters"] = job.characters
    elif job.seconds_left is not None:
        answer["seconds_remaining"] = job.seconds_left
    return answer


def describe_deepl_glossary(glossary: StoredGlossary) -> dict[str, Any]:
    return {
        "glossary_id": glossary.id,
        "name": glossary.name,
        "ready": True,
        "source_lang": glossary.source,
        "target_lang": glossary.target,
        "creation_time": glossary.created,
        "entry_count": len(glossary.entries),
    }
