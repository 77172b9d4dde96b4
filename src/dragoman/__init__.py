"""Dragoman trains and runs sequence-to-sequence models, above all for translation, and shows how they work.

import dragoman
dragoman.train("recipe.yaml", out="run")
dragoman.load("run").translate(["A man walks his dog."])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.config.settings import SampleSettings as SampleSettings
    from dragoman.errors import UserError as UserError
    from dragoman.evaluation.systems import evaluate as evaluate
    from dragoman.inference.export import export as export
    from dragoman.inference.loading import load as load
    from dragoman.inference.loading import score as score
    from dragoman.inference.single_sequence import Classifier as Classifier
    from dragoman.inference.single_sequence import Continuation as Continuation
    from dragoman.inference.single_sequence import Generator as Generator
    from dragoman.inference.single_sequence import Verdict as Verdict
    from dragoman.inference.translator import Translator as Translator
    from dragoman.inspection.records import Inspection as Inspection
    from dragoman.inspection.sentence import inspect as inspect
    from dragoman.recipe import Recipe as Recipe
    from dragoman.serving.server import serve as serve
    from dragoman.training.trainer import train as train
    from dragoman.types import Hypothesis as Hypothesis
    from dragoman.types import Line as Line
    from dragoman.types import Pair as Pair
    from dragoman.types import PairScore as PairScore
    from dragoman.types import Score as Score

_EXPORTS = {  # module -> its public names
    "config.settings": "SampleSettings",
    "errors": "UserError",
    "evaluation.systems": "evaluate",
    "inference.export": "export",
    "inference.loading": "load score",
    "inference.single_sequence": "Classifier Continuation Generator Verdict",
    "inference.translator": "Translator",
    "inspection.records": "Inspection",
    "inspection.sentence": "inspect",
    "recipe": "Recipe",
    "serving.server": "serve",
    "training.trainer": "train",
    "types": "Hypothesis Line Pair PairScore Score",
}
_MODULE_OF_NAME = {name: module for module, names in _EXPORTS.items() for name in names.split()}
__all__ = sorted(_MODULE_OF_NAME)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import dragoman` is quick and has no side effects."""
    if name == "__version__":
        return import_module("importlib.metadata").version("dragoman")  # importlib.metadata is slow to import
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'dragoman' has no attribute {name!r}")
    import_module("dragoman.hardware").set_runtime_defaults()  # PyTorch reads these environment variables on import
    return getattr(import_module(f"dragoman.{_MODULE_OF_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF_NAME, "__version__"])
