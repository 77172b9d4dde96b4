"""Dragoman learns to turn one sequence into another, translation first, and shows how it did so.

import dragoman
dragoman.train("recipe.yaml", out="run")
translator = dragoman.load("run")
translator.translate(["A man walks his dog."])
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dragoman.callable_module import CallableModule

if TYPE_CHECKING:
    from dragoman.api import evaluate as evaluate
    from dragoman.api import score as score
    from dragoman.api import train as train
    from dragoman.classifier import Classifier as Classifier
    from dragoman.classifier import Verdict as Verdict
    from dragoman.config import Recipe as Recipe
    from dragoman.config import SampleSettings as SampleSettings
    from dragoman.export import export as export
    from dragoman.generator import Continuation as Continuation
    from dragoman.generator import Generator as Generator
    from dragoman.loading import load as load
    from dragoman.translator import Translator as Translator
    from dragoman.types import Hypothesis as Hypothesis
    from dragoman.types import Line as Line
    from dragoman.types import Pair as Pair
    from dragoman.types import PairScore as PairScore
    from dragoman.types import Score as Score
    from dragoman.types import UserError as UserError

for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # oneDNN, and PyTorch in every thread, keep a kernel for each shape of a matrix product, 1,024 of them by default:
    # half a gigabyte after some thousand lines of many lengths.
    os.environ.setdefault(_name, "128")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin ruin a crowded machine (docs/LOG.md)

_HOMES = {
    "Classifier": "classifier",
    "Continuation": "generator",
    "Generator": "generator",
    "Hypothesis": "types",
    "Line": "types",
    "UserError": "types",
    "Pair": "types",
    "PairScore": "types",
    "Recipe": "config",
    "SampleSettings": "config",
    "Score": "types",
    "Translator": "translator",
    "Verdict": "classifier",
    "evaluate": "api",
    "load": "loading",
}
__all__ = [
    "Classifier",
    "Continuation",
    "Generator",
    "Hypothesis",
    "Line",
    "Pair",
    "PairScore",
    "Recipe",
    "SampleSettings",
    "Score",
    "Translator",
    "UserError",
    "Verdict",
    "evaluate",
    "export",
    "load",
    "score",
    "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names are fetched from their rooms when first asked for, so that `import dragoman` is quick."""
    if name == "__version__":
        return import_module("importlib.metadata").version("dragoman")  # slow to import
    if name == "export":
        return import_module("dragoman.export")  # can be called
    if name not in _HOMES:
        raise AttributeError(f"module 'dragoman' has no attribute {name!r}")
    return getattr(import_module(f"dragoman.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


for _name in ("train", "score"):  # packages that are empty, so this is quick; export.py does so itself
    import_module(f"dragoman.{_name}").__class__ = CallableModule
