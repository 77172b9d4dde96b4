"""What a server says about itself: its models, its languages and its limits."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from dragoman.documents.formats import DOCUMENT_FORMATS
from dragoman.language_codes import name_language
from dragoman.serving.language_index import UNDETERMINED, LanguageIndex
from dragoman.serving.model_pool import ServedModel
from dragoman.serving.settings import ServerSettings

PUBLIC_LIMITS = ("max_texts", "max_characters", "max_nbest", "max_body", "max_document_bytes")


def describe_model(model: ServedModel) -> dict[str, Any]:
    """Return what a client may know about a model."""
    translator = model.translator
    recipe, tokenizers = translator.recipe, translator.tokenizers
    directions = dict.fromkeys((direction.source, direction.target) for direction in translator.directions)
    return {
        "name": model.name,
        "kind": recipe.model.kind,
        "directions": [{"source": a or UNDETERMINED, "target": b or UNDETERMINED} for a, b in directions],
        "parameters": translator.parameter_count,
        "engine": type(model.engine.engine).__name__.removesuffix("Engine").lower() if model.engine.engine else "",
        "card": {
            "settings": recipe.model.model_dump(mode="json", exclude_unset=True),
            "tokenizer": recipe.tokenizer.model_dump(mode="json"),
            "vocabulary": {"source": tokenizers.source.size, "target": tokenizers.target.size},
            "context": recipe.data.context,
            "longest_source": translator.longest_source,
        },
    }


def describe_languages(index: LanguageIndex) -> list[dict[str, Any]]:
    """Return all languages and, for each, those into which it is translated: none, if it is only a target."""
    sources = [asdict(language) for language in index.list_languages()]
    known = {source["code"] for source in sources}
    targets = [code for code in index.list_targets() if code not in known]
    return [*sources, *({"code": code, "name": name_language(code), "targets": ()} for code in targets)]


def describe_settings(settings: ServerSettings) -> dict[str, Any]:
    """Return the limits of requests, and what the server supports."""
    return {
        **{name: getattr(settings, name) for name in PUBLIC_LIMITS},
        "key_required": settings.key_required,
        "document_formats": [{"name": each.title, "suffixes": each.suffixes} for each in DOCUMENT_FORMATS.values()],
        "version": version("dragoman"),
    }
