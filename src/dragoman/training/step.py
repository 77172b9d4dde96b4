"""One training step: loss, gradients, update of weights and EMA.

Shapes   B rows   T target width   C model width   N tokens

Randomness is a function of seed, step, batch and row, so no generator state is kept.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.config.settings import TrainSettings
from dragoman.errors import UserError
from dragoman.models.base import Model, collect_tensors
from dragoman.modules.dropout import use_row_slice
from dragoman.process_group import ProcessGroup
from dragoman.training import consistency
from dragoman.training.choices import Choices
from dragoman.training.consistency import CONSISTENCY, passes, twice
from dragoman.training.cuda_graph import CudaGraphs
from dragoman.training.distributed import PARALLEL, is_sharded, to_full, to_local, wrap_learner
from dragoman.training.loss import LOSSES
from dragoman.training.optim import OPTIMIZERS, clip_gradients, compute_gradient_norm, set_learning_rate, step_unless
from dragoman.types import Batch

AVOIDED = ("triton.mix_order_reduction",)  # of what the compiler does: it doubles the time of a norm's gradients


class Learner(nn.Module):
    def __init__(self, model: Model, settings: TrainSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self.loss = LOSSES[settings.loss]
        self.consistency, self.of_both = CONSISTENCY[settings.consistency], consistency.LOSSES[settings.loss]

    def forward(self, batch: Batch) -> Tensor:
        """Return loss, nll and divergence of two passes (0 if there is one), summed over the real target tokens."""
        with use_row_slice(batch.first_row, batch.total_rows, passes(self.settings)):
            if self.consistency:
                batch = twice(batch, self.consistency, self.settings.cut)
            states_BTC = self.model(batch)
        return torch.stack(self.sums(*real(states_BTC, batch)))

    def sums(self, states_NC: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight_VC, smoothing = self.model.project.weight, self.settings.label_smoothing
        if not self.consistency:
            loss, nll = self.loss(states_NC, weight_VC, target_N, smoothing)
            return loss, nll, torch.zeros_like(nll)
        states_2NC, target_N = states_NC.view(2, -1, states_NC.size(-1)), target_N.chunk(2)[0]
        weight = self.settings.consistency_weight
        return self.of_both(states_2NC, weight_VC, target_N, smoothing, self.consistency, weight)

    def compile_layers(self) -> None:
        """Compile layer by layer: all layers of a kind share one compilation."""
        options: dict[str, Any] = {name: False for name in AVOIDED if name in torch._inductor.list_options()}
        for stack in self.model.modules():
            if isinstance(layers := getattr(stack, "layers", None), nn.ModuleList):
                stack.embed = torch.compile(stack.embed, dynamic=False, options=options)  # type: ignore
                for part in (*layers, stack.norm):
                    part.compile(dynamic=False, options=options)
        self.of_both = consistency.compiled(self.of_both)


def real(states_BTC: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The states and the right answers at all places that count.

    A GPU would have to stop and count them; there all places are given, and where none counts the answer is below 0.
    """
    real_BT = batch.target_segment_BT > 0
    if states_BTC.device.type == "cpu":
        return states_BTC[real_BT], batch.target_out_BT[real_BT]
    return states_BTC.flatten(0, 1), torch.where(real_BT, batch.target_out_BT, -1).flatten()


class StepMetrics(NamedTuple):
    """The metrics of one step. On a GPU they may still be computed: reading a number waits for it."""

    numbers_4: Tensor  # loss, nll and divergence of two passes, in nats per target token; norm of the gradients
    lr: float
    tokens: int

    @property
    def loss(self) -> float:
        return self.numbers_4[0].item()

    @property
    def nll(self) -> float:
        return self.numbers_4[1].item()

    @property
    def divergence(self) -> float:
        return self.numbers_4[2].item()

    @property
    def norm(self) -> float:
        return self.numbers_4[3].item()

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def fetch_metrics(pending: Sequence[StepMetrics]) -> list[StepMetrics]:
    """Return the same metrics on the CPU, copied in one transfer."""
    if not pending:
        return []
    numbers_N4 = torch.stack([one.numbers_4 for one in pending]).cpu()
    return [one._replace(numbers_4=numbers_4) for one, numbers_4 in zip(pending, numbers_N4, strict=True)]


class Full(UserError):
    """No room for the optimizer's step: finer parts would not help, and some weights may have moved already."""


class Stepper:
    """A model with its optimizer and the EMA of its weights."""

    def __init__(
        self, model: Model, settings: TrainSettings, choices: Choices, group: ProcessGroup | None = None
    ) -> None:
        self.settings, self.choices, self.group = settings, choices, group or ProcessGroup()
        self.device = torch.device(choices.device)
        self.model = model.to(self.device)
        freeze(model, settings.freeze)
        self.eval_model = (
            copy.deepcopy(model).cpu() if self.group.is_distributed and PARALLEL[settings.parallel].sharded else model
        )
        self.learner = Learner(model, settings)
        self.parallel = wrap_learner(self.learner, settings, self.group)
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.parameters = list(trained.values())
        self.optimizer = OPTIMIZERS[settings.optimizer](trained, settings)
        self.ema = (
            {name: each.detach().clone() for name, each in collect_tensors(model).items()} if settings.ema else {}
        )
        self.count = torch.ones((), device=self.device)  # of target tokens in the step
        self.ema_step = torch.zeros((), device=self.device)  # 1 - decay
        self.cuda_graphs = CudaGraphs(self.train_batch) if choices.capture else None
        if choices.compile:
            self.learner.compile_layers()

    def update(self, batches: Sequence[Batch], step: int, lr: float) -> StepMetrics:
        """Add the gradients of all batches up, as if they were one, and take a step; a non-finite one is not taken."""
        if not self.model.training:  # switching all modules takes a while
            self.model.train()
        set_learning_rate(self.optimizer, lr)
        self.count.fill_(sum(batch.target_tokens for batch in batches))
        self.ema_step.fill_(
            1 - min(self.settings.ema, (1 + step) / (10 + step))
        )  # a lower decay at first, so that the initial weights do not bias the EMA
        if self.cuda_graphs and len(batches) == 1 and self.choices.split == 1:
            torch.manual_seed(seed_of(self.settings.seed, step, 0))
            numbers_4 = self.cuda_graphs(batches[0])
        else:
            numbers_4 = self.train_parts(batches, step)
        return StepMetrics(numbers_4, lr, sum(b.tokens for b in batches))

    def train_parts(self, batches: Sequence[Batch], step: int) -> Tensor:
        self.optimizer.zero_grad()
        sums = torch.zeros(3, device=self.device)
        some = [(number, part) for number, batch in enumerate(batches) for part in parts(batch, self.choices.split)]
        for left, (number, part) in zip(range(len(some) - 1, -1, -1), some, strict=True):
            torch.manual_seed(seed_of(self.settings.seed, step, number))
            with self.parallel.no_sync() if left else nullcontext():
                sums += self.backward(part.to(self.device))
        return self.apply(self.group.all_reduce(sums) / self.count)

    def train_batch(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        return self.apply(self.backward(batch) / self.count)

    def rehearse(self, batch: Batch) -> None:
        """Run one backward pass without a step.

        DDP lays out its buckets by the first backward pass. If that is this one, a resumed run adds gradients in the
        same order as one that was never stopped.
        """
        self.backward(batch.to(self.device))
        self.optimizer.zero_grad()

    def backward(self, batch: Batch) -> Tensor:
        with self.choices.autocast():
            sums = self.parallel(batch)
        loss = (
            self.group.world_size * sums[0] if self.group.is_distributed else sums[0]
        )  # DDP and FSDP average gradients
        (loss / self.count).backward()  # type: ignore[no-untyped-call]
        out: Tensor = sums.detach()
        return out

    def apply(self, means: Tensor) -> Tensor:
        """Clip the gradients and take the step; skip it if the loss or a gradient is not finite. Nothing waits."""
        norm = to_full(compute_gradient_norm(self.parameters))
        numbers_4 = torch.stack([*means, norm.float()])
        found_inf = (~numbers_4[::3].isfinite().all()).float()
        if self.settings.clip:
            clip_gradients(self.parameters, norm, self.settings.clip)
        try:
            step_unless(found_inf, self.optimizer)
        except torch.OutOfMemoryError:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise  # nothing has moved, and there is more room where nothing is recorded
            raise Full(
                "the model, its gradients and what the optimizer keeps do not fit into memory together; make the model "
                "smaller, or share it out among more GPUs with train.parallel=fsdp"
            ) from None
        if self.ema:
            live, ema_step = collect_tensors(self.model), self.ema_step * (1 - found_inf)
            held, now = [to_local(mean) for mean in self.ema.values()], [to_local(live[n].detach()) for n in self.ema]
            torch._foreach_lerp_(held, now, [ema_step] * len(held))
        return numbers_4

    def shrink(self) -> Choices:
        """After running out of memory, discard the gradients and split batches into twice as many parts."""
        self.optimizer.zero_grad()
        self.choices = replace(self.choices, split=self.choices.split * 2, capture=False)
        self.disable_cuda_graphs()
        torch.cuda.empty_cache()
        return self.choices

    def disable_cuda_graphs(self) -> None:
        if self.cuda_graphs:
            self.cuda_graphs.close()
        self.cuda_graphs = None

    def weights(self) -> dict[str, Tensor]:
        """What a user of the model gets: the running mean, if there is one. Everyone must ask; the first gets them, one
        after the other out of the way of what is shared out because it does not fit."""
        found: dict[str, Tensor] = {}
        for name, tensor in (self.ema or collect_tensors(self.model)).items():
            all_of_it = to_full(tensor)
            if self.group.is_main:
                found[name] = all_of_it.cpu() if is_sharded(tensor) else all_of_it
        return found

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """The spare model with the weights that its users get, inside. It may be the one that learns: then it is as it
        was, after."""
        if self.eval_model is not self.model:
            weights = self.weights()
            if self.group.is_main:
                put(self.eval_model.to(self.device), weights)
            yield
            self.eval_model.cpu()
            return
        if not self.ema:
            yield
            return
        live = {name: each.detach().clone() for name, each in collect_tensors(self.model).items()}
        put(self.model, self.ema)
        try:
            yield
        finally:
            put(self.model, live)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors that the next step depends on."""
        return {"model": collect_tensors(self.model), "optimizer": self.optimizer_tensors(), "ema": self.ema}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        names = self.trained_names()
        states = self.optimizer.state_dict()["state"]
        return {f"{names[index]}:{key}": value for index, state in states.items() for key, value in state.items()}

    def trained_names(self) -> list[str]:
        """Return the names of the parameters in the order of the optimizer."""
        names = {id(one): name for name, one in self.model.named_parameters()}
        return [names[id(one)] for group in self.optimizer.param_groups for one in group["params"]]

    def restore(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor], ema: dict[str, Tensor]) -> None:
        """Load what `tensors` returned."""
        put(self.model, weights)
        for name, value in self.ema.items():
            value.copy_(ema[name])
        if self.cuda_graphs and self.cuda_graphs.captured:  # CUDA graphs hold addresses: copy in place
            held = self.optimizer_tensors()
            for name, value in optimizer.items():
                held[name].copy_(value)
            return
        state: dict[int, dict[str, Tensor]] = {}
        index = {name: number for number, name in enumerate(self.trained_names())}
        for name, value in optimizer.items():
            parameter, _, key = name.rpartition(":")
            state.setdefault(index[parameter], {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


@torch.no_grad()
def put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, tensor in collect_tensors(model).items():
        tensor.copy_(weights[name])


def parts(batch: Batch, count: int) -> list[Batch]:
    """The batch cut by rows into so many parts, or as many as it has rows; parts of empty rows are left out."""
    if count == 1:
        return [batch]
    rows = len(batch.source_BS)
    size = -(-rows // count)
    made = []
    for start in range(0, rows, size):
        part = batch.map_tensors(itemgetter(slice(start, start + size)))
        made.append(replace(part, first_row=batch.first_row + start, total_rows=batch.total_rows or rows))
    return [part for part in made if part.target_segment_BT.any()]


def seed_of(seed: int, step: int, batch: int) -> int:
    """What the dropout of a batch of a step is drawn from."""
    return seed * 1_000_003 + step + batch * 1_000_000_007


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"train.freeze: no parameter is called {pattern!r}; names look like {names[0]} and {names[-1]}"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatch(name, pattern) for pattern in patterns))
    if patterns and not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"train.freeze={list(patterns)} leaves nothing to train")
