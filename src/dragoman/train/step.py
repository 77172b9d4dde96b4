"""One update of the weights from a few batches. Randomness is a function of seed and step; no state of it is kept."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dragoman.config import TrainSettings
from dragoman.models.base import Model, tensors_of
from dragoman.train.choices import Choices
from dragoman.train.loss import chunked
from dragoman.train.optim import OPTIMIZERS, gradient_norm
from dragoman.types import Batch, Mistake


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did. `loss` and `likelihood` are per target token, in nats."""

    loss: float
    likelihood: float
    norm: float
    lr: float
    tokens: int

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Stepper:
    """A model with its optimizer and the running mean of its weights."""

    def __init__(self, model: Model, settings: TrainSettings, choices: Choices) -> None:
        self.settings, self.choices = settings, choices
        self.device = torch.device(choices.device)
        self.model = model.to(self.device)
        freeze(model, settings.freeze)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[settings.optimizer](self.parameters, settings)
        self.ema = {name: each.detach().clone() for name, each in tensors_of(model).items()} if settings.ema else {}
        self.forward = torch.compile(model) if choices.compile else model

    def update(self, batches: Sequence[Batch], step: int, lr: float) -> Update:
        """Add the gradients of all batches up, as if they were one, and take a step; a non-finite one is not taken."""
        torch.manual_seed(self.settings.seed * 1_000_003 + step)
        self.model.train()
        count = sum(batch.target_tokens for batch in batches)
        sums = torch.zeros(2, device=self.device)
        for batch in batches:
            for part in parts(batch, self.choices.split):
                sums += self.backward(part.to(self.device), count)
        norm = gradient_norm(self.parameters)
        loss, likelihood, size = torch.stack([*(sums / count), norm.float()]).tolist()
        update = Update(loss, likelihood, size, lr, sum(b.tokens for b in batches))
        if update.finite:
            self.apply(norm, update.lr)
        self.optimizer.zero_grad()
        return update

    def backward(self, batch: Batch, count: int) -> Tensor:
        with self.choices.autocast():
            states_BTC = self.forward(batch)
            real_BT = batch.target_segment_BT > 0
            loss, likelihood = chunked(
                states_BTC[real_BT],
                self.model.project.weight,
                batch.target_out_BT[real_BT],
                self.settings.label_smoothing,
            )
        (loss / count).backward()  # type: ignore[no-untyped-call]
        return torch.stack([loss.detach(), likelihood])

    def apply(self, norm: Tensor, lr: float) -> None:
        if self.settings.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self.ema:
            live = tensors_of(self.model)
            torch._foreach_lerp_(list(self.ema.values()), [live[n].detach() for n in self.ema], 1 - self.settings.ema)

    def shrink(self) -> Choices:
        """After running out of memory: drop what is half done, and cut batches finer from now on."""
        self.optimizer.zero_grad()
        torch.cuda.empty_cache()
        self.choices = replace(self.choices, split=self.choices.split * 2)
        return self.choices

    def weights(self) -> dict[str, Tensor]:
        """What a user of the model gets: the running mean, if there is one."""
        return self.ema or tensors_of(self.model)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the weights that its users get, inside; as it was, after."""
        if not self.ema:
            yield
            return
        live = {name: each.detach().clone() for name, each in tensors_of(self.model).items()}
        put(self.model, self.ema)
        try:
            yield
        finally:
            put(self.model, live)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        names = self.trained_names()
        states = self.optimizer.state_dict()["state"]
        return {f"{names[index]}:{key}": value for index, state in states.items() for key, value in state.items()}

    def trained_names(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def restore(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor], ema: dict[str, Tensor]) -> None:
        put(self.model, weights)
        for name, value in self.ema.items():
            value.copy_(ema[name])
        state: dict[int, dict[str, Tensor]] = {}
        index = {name: number for number, name in enumerate(self.trained_names())}
        for name, value in optimizer.items():
            parameter, _, key = name.rpartition(":")
            state.setdefault(index[parameter], {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


@torch.no_grad()
def put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, tensor in tensors_of(model).items():
        tensor.copy_(weights[name])


def parts(batch: Batch, count: int) -> list[Batch]:
    """The batch cut by rows into so many parts, or as many as it has rows; parts of empty rows are left out."""
    if count == 1:
        return [batch]
    names = [n for n in Batch.__slots__ if isinstance(getattr(batch, n), Tensor)]
    chunks = zip(*(getattr(batch, n).chunk(count) for n in names), strict=True)
    cut = [replace(batch, **dict(zip(names, chunk, strict=True))) for chunk in chunks]
    return [part for part in cut if part.target_segment_BT.any()]


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise Mistake(
                f"train.freeze: no parameter is called {pattern!r}; names look like {names[0]} and {names[-1]}"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatch(name, pattern) for pattern in patterns))
    if patterns and not any(p.requires_grad for p in model.parameters()):
        raise Mistake(f"train.freeze={list(patterns)} leaves nothing to train")
