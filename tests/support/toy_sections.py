"""The model section of a recipe as a record."""

from __future__ import annotations

from typing import Any

from dragoman.config.settings import build
from dragoman.recipe import Recipe


def settings_of(section: dict[str, Any]) -> Any:
    """Return a model section as the record of its kind, checked."""
    settings = build(Recipe, {"model": section}).model
    settings.check()
    return settings
