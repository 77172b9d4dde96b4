"""From a run folder to what it can do: `load` opens the door that fits the run's task.

dragoman.load("runs/demo").translate(["A man walks his dog."])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from dragoman.answers.flags import Usual
from dragoman.classifier import Classifier
from dragoman.door import Door, choose_device
from dragoman.engines.choose import Parts, engine_of
from dragoman.ensemble import together
from dragoman.generator import Generator
from dragoman.io import cache_folder
from dragoman.models.base import Model, tensors_of
from dragoman.models.build import build_model, kind_of
from dragoman.models.old import renamed
from dragoman.store import RunFolder, load_tensors, naming
from dragoman.text.tokenizer import Tokenizers
from dragoman.translator import Translator
from dragoman.types import UserError

D = TypeVar("D", Translator, Generator, Classifier)


def open_run(run: str | Path, *, device: str = "auto") -> Door[Model]:
    """The model in a run folder. It needs nothing else, and nothing in the folder is run."""
    folder = RunFolder(run)
    recipe = folder.recipe()
    if not folder.model.exists():
        raise UserError(why_no_model(folder))
    weights, about = load_tensors(folder.model)
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise UserError(
                f"{str(folder.model)!r} has weights that are not finite, in {name!r}; restore it, or train it again"
            )
    tokenizers = Tokenizers.load(folder.tokenizer)
    if about.get("tokenizer") != tokenizers.fingerprint():
        raise UserError(f"{str(folder.tokenizer)!r} is damaged, or not the tokenizer that the model was trained with")
    with naming(folder.config):
        model = build_model(recipe, **tokenizers.sizes)
    put_weights(model, renamed(weights, folder.check()), repr(str(folder.model)), "its config.yaml")
    where = choose_device(device)
    longest, usual = read_notes(about, folder.model)
    return Door(model.to(where).eval(), tokenizers, recipe, longest, where, usual=usual, run=str(run))


def read_notes(about: Mapping[str, str], path: Path) -> tuple[int, Usual | None]:
    """Return the length of the longest source in training and the usual ratios, from the header of the weights."""
    try:
        longest, usual = int(about["longest"]), Usual.read(about["usual"]) if "usual" in about else None
        if longest in range(1 << 31) and (usual is None or all(map(math.isfinite, usual))):
            return longest, usual
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        pass
    raise UserError(f"the notes in the header of {str(path)!r} are damaged; copy it again or restore it")


def why_no_model(folder: RunFolder) -> str:
    """The first checkpoint comes with a model, so where there is one, the model was taken away."""
    if folder.state():
        return f"{str(folder.model)!r} is missing; restore it, or make it again: dragoman train --resume"
    return f"{str(folder.path)!r} has no model yet: training has not come to its first checkpoint"


Runs = str | Path | Sequence[str | Path]


def runs_of(run: Runs) -> list[str | Path]:
    return [run] if isinstance(run, str | Path) else list(run)


def load(run: Runs, *, device: str = "auto", engine: str = "auto") -> Translator | Generator | Classifier:
    """Load a run folder as a Translator, a Generator or a Classifier, by what the model was trained to do.

    Several runs with one vocabulary are loaded as one translator, which averages their probabilities. `engine` is what
    a translator computes with, as `--engine` on the command line (docs/exchange.md).

        translator = dragoman.load("runs/demo")
        [hypothesis] = translator.translate(["A man walks his dog."])
        print(hypothesis.text)
    """
    runs = runs_of(run)
    if not runs:
        raise UserError("there is no run to load; name a run folder, or several")
    doors = [open_run(one, device=device) for one in runs]
    opened = doors[0] if len(doors) == 1 else together(doors, [str(one) for one in runs])
    door = DOORS[kind_of(opened.recipe.model).task]
    parts = (opened.model, opened.tokenizers, opened.recipe, opened.longest, opened.device)
    name = ", ".join(str(one) for one in runs)
    found = door(*parts, usual=opened.usual, run=name)  # type: ignore[arg-type]
    return with_engine(found, engine) if isinstance(found, Translator) else found


def with_engine(translator: Translator, name: str) -> Translator:
    """Return the translator with an engine. Converted models go to the user's cache, not to the folder that the run's
    data.cache names: a run may come from anybody and must not decide where files are written."""
    parts = Parts(translator.model, translator.tokenizers, translator.device, cache_folder())
    return replace(translator, engine=engine_of(name, parts))


def load_as(door: type[D], run: Runs, *, device: str = "auto", engine: str = "auto") -> D:
    """Load a run as `load` does, and refuse one of another task than `door` is for."""
    found = load(run, device=device, engine=engine)
    if isinstance(found, door):
        return found
    wanted, there = (next(task for task, each in DOORS.items() if issubclass(one, each)) for one in (door, type(found)))
    names = ", ".join(repr(str(one)) for one in runs_of(run))
    raise UserError(f"the model in {names} does not {wanted}: it was trained to {there}; use dragoman {there}")


def put_weights(model: nn.Module, weights: dict[str, Tensor], name: str, place: str) -> None:
    own = tensors_of(model)
    for one in sorted(set(own) ^ set(weights)):
        raise UserError(f"{name} does not fit {place}: tensor {one!r} is only in one of them")
    for one, tensor in own.items():
        if tensor.shape != weights[one].shape:
            sizes = [" x ".join(map(str, held[one].shape)) for held in (weights, own)]
            raise UserError(f"{name} does not fit {place}: tensor {one!r} is {sizes[0]} there and {sizes[1]} here")
    with torch.no_grad():
        for one, tensor in own.items():
            tensor.copy_(weights[one])


DOORS: dict[str, type[Translator] | type[Generator] | type[Classifier]] = {  # by the task of a model's kind
    "translate": Translator,
    "generate": Generator,
    "classify": Classifier,
}
