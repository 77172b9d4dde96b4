"""Model settings from a dictionary, as in the model section of a recipe."""

from __future__ import annotations

from typing import Any

from dragoman.config.settings import parse_settings
from dragoman.recipe import Recipe


def settings_of(section: dict[str, Any]) -> Any:
    """Return the validated settings of a model section."""
    settings = parse_settings(Recipe, {"model": section}).model
    settings.check()
    return settings
