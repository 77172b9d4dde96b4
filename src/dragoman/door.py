"""What every front door shares: a model that is ready to answer, and grids that make its answers repeatable.

How floats round depends on the shapes they are computed in. So every grid here has a fixed number of rows, and a
width that a text's own length decides; rows with nothing to do run empty. The answer to a line is the same
alone, in a batch of any size and in any order.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from typing import Generic, TypeVar

import torch
from torch import nn

from dragoman.answers.flags import Usual
from dragoman.config import Recipe
from dragoman.models.base import Model
from dragoman.models.build import most_tokens, parameters
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import Line, UserError

T = TypeVar("T")
M = TypeVar("M", bound=Model)
ROWS = {"cpu": 8, "cuda": 64}  # texts of one grid
WHOLE = 512  # tokens up to which a text is kept whole, however short those of training were


@dataclass(frozen=True, slots=True, repr=False)
class Door(Generic[M]):
    """A model with its tokenizers. `longest` is the longest source, in tokens, that it was trained on."""

    model: M
    tokenizers: Tokenizers
    recipe: Recipe
    longest: int
    device: torch.device
    usual: Usual | None = field(default=None, kw_only=True)  # what its pairs of training look like, where that is known
    run: str = field(default="", kw_only=True, compare=False)  # the folder that it was loaded from
    places: int = field(init=False)  # tokens that a text may have at most, its mark and its tags not counted

    def __post_init__(self) -> None:
        most = most_tokens(self.recipe.model)
        tags = max((len(tag.split()) for tag in self.recipe.data.tags), default=0)
        object.__setattr__(self, "places", sys.maxsize if most is None else most - 1 - tags)

    def __repr__(self) -> str:
        """Return such as Translator('runs/demo', transformer, 3.8 M parameters, cpu)."""
        size = f"{parameters(self.model) / 1e6:.1f} M parameters"
        return f"{type(self).__name__}({self.run!r}, {self.recipe.model['kind']}, {size}, {self.device})"

    @property
    def rows(self) -> int:
        return ROWS[self.device.type]

    @property
    def whole(self) -> int:
        """Tokens up to which a text is kept whole."""
        return min(max(self.longest, WHOLE), self.places)


class evaluating:
    """Dropout off inside, and back as it was after."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.was = model, model.training

    def __enter__(self) -> None:
        if self.was:  # to tell all parts of a model takes milliseconds
            self.model.eval()

    def __exit__(self, *_: object) -> None:
        if self.was:
            self.model.train()


class uncollected:
    """No garbage collection inside: thousands of answers are many small lists, none of which is garbage, and looking
    through them again and again takes longer than making them."""

    def __enter__(self) -> None:
        self.was = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was:
            gc.enable()


def check_lines(lines: Iterable[str | Line], verb: str) -> list[str | Line]:
    """Return the lines as a list; refuse one line instead of several, and what is no text."""
    return _checked(lines, verb, "item", (str, Line))


def check_texts(texts: Iterable[str], verb: str, noun: str = "item") -> list[str]:
    """Do the same where a `Line`, which says how to translate a text, is of no use. Messages call a text `noun`."""
    return _checked(texts, verb, noun, (str,))


def _checked(lines: Iterable[T], verb: str, noun: str, types: tuple[type, ...]) -> list[T]:
    if isinstance(lines, str | Line) or not isinstance(lines, Iterable):
        raise UserError(f"{verb} takes a list of lines; put a single line into a list of its own")
    found = list(lines)
    for number, line in enumerate(found):
        if not isinstance(line, types):
            raise UserError(f"{verb} takes lines of text, but {noun} {number} of the list is {line!r}, not a str")
    return found


def rung(length: int) -> int:
    """The next of 16, 32, 64, 128, ...: a width that depends on the sentence alone."""
    width = 16
    while width < length:
        width *= 2
    return width


def grouped(items: Iterable[int], key: Callable[[int], T], size: int) -> Iterator[tuple[T, list[int]]]:
    """Items of one key together, at most `size` at a time, in the order they came."""
    groups: dict[T, list[int]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    for value, some in groups.items():
        rest = iter(some)
        while chunk := list(islice(rest, size)):
            yield value, chunk


def kinds(warnings: Iterable[str]) -> list[str]:
    """Warnings of a line without their numbers, each kind once: what lines are counted by."""
    return list(dict.fromkeys(re.split(r" at \d|:| \(", warning)[0] for warning in warnings))


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return with_triton(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"there is no device called {name!r}; write auto, cpu, cuda or cuda:1") from None
    if device.type not in ROWS:
        raise UserError(f"device {name!r} is not one that Dragoman runs on; write auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not there; this machine has {torch.cuda.device_count()} CUDA devices")
    make_current(device)
    return with_triton(device)


def make_current(device: torch.device) -> None:
    """Streams, graphs and kernels of our own lie on the GPU that is current, whatever their tensors are on."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def with_triton(device: torch.device) -> torch.device:
    """Our kernels for a GPU are written in Triton, which PyTorch brings along on Linux."""
    if device.type == "cuda" and find_spec("triton") is None:
        raise UserError(
            "a GPU needs triton, which is not installed; pip install triton brings it, or choose the device cpu"
        )
    return device
