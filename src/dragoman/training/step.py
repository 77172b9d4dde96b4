"""One training step: forward and backward pass, clipping, optimizer step and EMA.

`Stepper` takes the steps. It calls `Learner`, which is the model with its loss. On a GPU, `CudaGraphs` captures the
step as a CUDA graph, once for each shape of batch, and replays it with one launch: the kernels of a small model finish
sooner than a CPU can launch them one by one. Randomness is a function of seed, step, batch and row, so no generator
state is kept.

Shapes   B rows   T target width   C model width   P passes (R-Drop: 2)   N tokens of one pass   M tokens of all passes
         3 = loss, nll, divergence between the passes   4 = the same and the gradient norm
"""

from __future__ import annotations

import copy
import fnmatch
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.config.settings import TrainSettings
from dragoman.errors import UserError
from dragoman.models.base import Model, collect_weights
from dragoman.modules.dropout import use_dropout_rows
from dragoman.process_group import ProcessGroup
from dragoman.training.execution import PARALLEL, ExecutionPlan, is_sharded, to_full, to_local
from dragoman.training.loss import (
    CONSISTENCY,
    LOSSES,
    Loss,
    compile_consistency_loss,
    compute_model_loss,
    mask_copied_words,
    repeat_rows,
)
from dragoman.training.optim import OPTIMIZERS, clip_gradients, compute_gradient_norm, set_learning_rate, step_if_finite
from dragoman.types import Batch

WARMUP_CALLS = 3  # eager steps with a shape before its capture: libraries choose kernels, and code is compiled
DISABLED_OPTIMIZATIONS = ("triton.mix_order_reduction",)  # of torch.compile; doubles the time of a norm's backward
Shape = tuple[object, ...]


class CapturedGraph(NamedTuple):
    """A CUDA graph with the tensors that it reads and writes at every replay."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    output: Tensor


class CudaGraphs:
    """Call a function of a batch: eagerly at first, then as one CUDA graph per shape of batch."""

    def __init__(self, function: Callable[[Batch], Tensor]) -> None:
        self.function = function
        self.calls: Counter[Shape] = Counter()
        self.captured: dict[Shape, CapturedGraph] = {}
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.failure = ""  # error message of a failed capture

    def __call__(self, batch: Batch) -> Tensor:
        """Return `function(batch)`. A replayed graph uses the same random numbers as an eager call."""
        shape = shape_of(batch)
        self.calls[shape] += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if shape not in self.captured and not self.failure and self.calls[shape] > WARMUP_CALLS:
                self.capture(shape, batch)
            if captured := self.captured.get(shape):
                for static, new in zip(captured.batch.tensors.values(), batch.tensors.values(), strict=True):
                    static.copy_(new, non_blocking=True)
                captured.graph.replay()
                output = captured.output.clone()
            else:
                output = self.function(batch.to(self.stream.device))
        torch.cuda.current_stream().wait_stream(self.stream)
        return output

    def capture(self, shape: Shape, batch: Batch) -> None:
        """Capture a graph for this shape. If that fails, because the function waits for the GPU, calls stay eager."""
        static_batch, graph = batch.to(self.stream.device), torch.cuda.CUDAGraph()
        pool = next(iter(self.captured.values())).graph.pool() if self.captured else None
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                output = self.function(static_batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.failure = str(error).partition("\n")[0]
            return
        self.captured[shape] = CapturedGraph(graph, static_batch, output)
        gc.collect()
        gc.freeze()  # compilation leaves a million objects, which later garbage collections need not scan


def shape_of(batch: Batch) -> Shape:
    """Return what a CUDA graph of the step depends on: all of the batch except the values in its tensors."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in batch.tensors.items()]
    return (*shapes, batch.is_unpacked, batch.first_row, batch.total_rows)


class Learner(nn.Module):
    """A model with its training loss, as one module that DDP and FSDP can wrap."""

    def __init__(self, model: Model, settings: TrainSettings) -> None:
        super().__init__()
        self.model, self.hidden_fraction, self.mask_copied = model, settings.cut, settings.mask_copied
        self.loss: Loss = LOSSES[settings.loss]
        self.loss_terms = CONSISTENCY[settings.consistency]._replace(
            smoothing=settings.label_smoothing, consistency_weight=settings.consistency_weight
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return loss, nll and divergence (training/loss.py), summed over all target tokens except padding."""
        passes = self.loss_terms.passes
        # A row gets the same dropout mask however the batch is split.
        if self.mask_copied:
            with use_dropout_rows(batch.first_row, batch.total_rows):
                batch = mask_copied_words(batch, len(self.model.project.weight), self.mask_copied)
        with use_dropout_rows(batch.first_row, batch.total_rows, passes):
            batch = repeat_rows(batch, self.loss_terms, self.hidden_fraction)
            states_BTC = self.model(batch)
        states_MC, target_M = select_real_tokens(states_BTC, batch)
        states_PNC, target_N = states_MC.view(passes, -1, states_MC.size(-1)), target_M.chunk(passes)[0]
        return torch.stack(compute_model_loss(self.model, states_PNC, target_N, self.loss_terms, self.loss))

    def compile_layers(self) -> None:
        """Compile each layer separately: all layers of one kind share one compilation."""
        known = torch._inductor.list_options()
        options: dict[str, Any] = {name: False for name in DISABLED_OPTIMIZATIONS if name in known}
        for stack in self.model.modules():  # encoder and decoder are stacks of layers
            if isinstance(layers := getattr(stack, "layers", None), nn.ModuleList):
                stack.embed = torch.compile(stack.embed, dynamic=False, options=options)  # type: ignore
                for part in (*layers, stack.norm):
                    part.compile(dynamic=False, options=options)
        if self.loss_terms.passes == 2:
            self.loss = compile_consistency_loss(self.loss)


def select_real_tokens(states_BTC: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the states and the targets of all tokens except padding.

    On a GPU this would wait for their number, so all positions are returned, with target -1 at padding.
    """
    real_BT = batch.target_segment_BT > 0
    if states_BTC.device.type == "cpu":
        return states_BTC[real_BT], batch.target_out_BT[real_BT]
    return states_BTC.flatten(0, 1), torch.where(real_BT, batch.target_out_BT, -1).flatten()


class PendingStep(NamedTuple):
    """A step that may still be running on the GPU. `fetch_metrics` waits for it."""

    metrics_4: Tensor
    lr: float
    tokens: int  # source and target


class StepMetrics(NamedTuple):
    """The metrics of a finished step. Loss, nll and divergence are in nats per target token."""

    loss: float
    nll: float
    divergence: float
    norm: float  # of all gradients together, before clipping
    lr: float
    tokens: int  # source and target

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def fetch_metrics(pending: Sequence[PendingStep]) -> list[StepMetrics]:
    """Wait for these steps and return their metrics, copied from the GPU in one transfer."""
    rows = torch.stack([step.metrics_4 for step in pending]).tolist() if pending else []
    return [StepMetrics._make([*row, step.lr, step.tokens]) for step, row in zip(pending, rows, strict=True)]


class OptimizerOutOfMemoryError(UserError):
    """The optimizer step does not fit into memory. Splitting batches does not help; some weights may have changed."""


class Stepper:
    """A model with its optimizer and the EMA of its weights; `update` takes a training step.

    `eval_model` is the model to validate: the trained model, or a full copy if the trained model is sharded.
    """

    def __init__(
        self, model: Model, settings: TrainSettings, plan: ExecutionPlan, group: ProcessGroup | None = None
    ) -> None:
        self.settings, self.plan, self.group = settings, plan, group or ProcessGroup()
        self.device = torch.device(plan.device)
        self.model = model.to(self.device)
        freeze_parameters(model, settings.freeze)
        method = PARALLEL[settings.parallel] if self.group.is_distributed else None
        self.sharded = method is not None and method.sharded
        self.eval_model = copy.deepcopy(model).cpu() if self.sharded else model
        self.learner = Learner(model, settings)
        # `module` is the learner, wrapped by DDP or FSDP if there are several processes.
        self.module: nn.Module = method.wrap(self.learner, self.group) if method else self.learner
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.parameters = list(trained.values())
        self.optimizer = OPTIMIZERS[settings.optimizer](trained, settings)
        self.ema = clone_weights(model) if settings.ema else {}
        # CUDA graphs read these two numbers, so they are tensors that are filled in place.
        self.target_tokens = torch.ones((), device=self.device)  # of all processes, in the current step
        self.ema_rate = torch.zeros((), device=self.device)  # 1 - decay of the EMA in the current step
        self.cuda_graphs = CudaGraphs(self.train_batch) if plan.use_cuda_graphs else None
        if plan.compile:
            self.learner.compile_layers()

    def update(self, batches: Sequence[Batch], step: int, lr: float) -> PendingStep:
        """Take a step with the summed gradients of all batches. A non-finite loss or gradient skips it."""
        if not self.model.training:  # `train()` visits all modules, which is slow
            self.model.train()
        set_learning_rate(self.optimizer, lr)
        self.target_tokens.fill_(sum(batch.target_tokens for batch in batches))
        decay = min(self.settings.ema, (1 + step) / (10 + step))  # small at first, so that initial weights fade quickly
        self.ema_rate.fill_(1 - decay)
        if self.cuda_graphs and len(batches) == 1 and self.plan.batch_parts == 1:
            torch.manual_seed(derive_seed(self.settings.seed, step, 0))
            metrics_4 = self.cuda_graphs(batches[0])
        else:
            self.optimizer.zero_grad()
            sums_3 = torch.zeros(3, device=self.device)
            part_count = self.plan.batch_parts
            parts = [(index, part) for index, batch in enumerate(batches) for part in split_batch(batch, part_count)]
            no_sync = getattr(self.module, "no_sync", nullcontext)  # DDP's context to accumulate gradients locally
            for number, (batch_index, part) in enumerate(parts, 1):
                torch.manual_seed(derive_seed(self.settings.seed, step, batch_index))
                with nullcontext() if number == len(parts) else no_sync():
                    sums_3 += self.backward(part.to(self.device))
            metrics_4 = self.apply(self.group.all_reduce(sums_3) / self.target_tokens)
        return PendingStep(metrics_4, lr, sum(b.tokens for b in batches))

    def train_batch(self, batch: Batch) -> Tensor:
        """Take a step with one batch in a single process. CUDA graphs capture this function."""
        self.optimizer.zero_grad()
        return self.apply(self.backward(batch) / self.target_tokens)

    def arrange_ddp_buckets(self, batch: Batch) -> None:
        """Run one backward pass and discard its gradients.

        DDP arranges its gradient buckets after the first backward pass, which changes the order of sums. If that has
        happened before the first step, a resumed run is bit-identical to an uninterrupted one.
        """
        self.backward(batch.to(self.device))
        self.optimizer.zero_grad()

    def backward(self, batch: Batch) -> Tensor:
        """Add the gradients of a batch; return the sums of loss, nll and divergence."""
        with self.plan.autocast():
            sums_3: Tensor = self.module(batch)
        loss = self.group.world_size * sums_3[0]  # DDP and FSDP divide the sum of all gradients by the world size
        (loss / self.target_tokens).backward()  # type: ignore[no-untyped-call]
        return sums_3.detach()

    def apply(self, losses_3: Tensor) -> Tensor:
        """Clip the gradients, then update weights and EMA unless the loss or a gradient is not finite.

        Return the losses and the gradient norm. This method does not wait for the GPU.
        """
        norm = to_full(compute_gradient_norm(self.parameters))
        metrics_4 = torch.stack([*losses_3, norm.float()])
        found_inf = (~metrics_4[::3].isfinite().all()).float()  # 1 if loss (index 0) or norm (index 3) is not finite
        if self.settings.clip:
            clip_gradients(self.parameters, norm, self.settings.clip)
        try:
            step_if_finite(self.optimizer, found_inf)
        except torch.OutOfMemoryError:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise  # capture changes no weight, and an eager step takes less memory
            raise OptimizerOutOfMemoryError(
                "the model, its gradients and the optimizer state do not fit into memory together; make the model "
                "smaller, or shard it over more GPUs with train.parallel=fsdp"
            ) from None
        if self.ema:
            weights, ema_rate = collect_weights(self.model), self.ema_rate * (1 - found_inf)
            ema = [to_local(tensor) for tensor in self.ema.values()]
            current = [to_local(weights[name].detach()) for name in self.ema]
            torch._foreach_lerp_(ema, current, [ema_rate] * len(ema))
        return metrics_4

    def halve_batches(self) -> int:
        """After running out of memory, discard the gradients and split each batch into twice as many parts from now on.

        Return the new number of parts.
        """
        self.optimizer.zero_grad()
        self.plan = replace(self.plan, batch_parts=self.plan.batch_parts * 2, use_cuda_graphs=False)
        self.disable_cuda_graphs()
        torch.cuda.empty_cache()
        return self.plan.batch_parts

    def disable_cuda_graphs(self) -> None:
        """Free all CUDA graphs and undo `gc.freeze`. Later steps run eagerly."""
        if self.cuda_graphs:
            self.cuda_graphs.captured.clear()
            gc.unfreeze()
        self.cuda_graphs = None

    def weights_to_save(self) -> dict[str, Tensor]:
        """Return the EMA if there is one, else the trained weights. Only rank 0 gets them.

        Collective: every rank must call it. Full tensors are moved to the CPU one by one: a GPU may not hold them all.
        """
        weights: dict[str, Tensor] = {}
        for name, tensor in (self.ema or collect_weights(self.model)).items():
            full = to_full(tensor)
            if self.group.is_main:
                weights[name] = full.cpu() if is_sharded(tensor) else full
        return weights

    @contextmanager
    def load_eval_weights(self) -> Iterator[None]:
        """Load `weights_to_save` into `eval_model`. On exit, restore the weights if that is the trained model."""
        if self.eval_model is not self.model:
            weights = self.weights_to_save()
            if self.group.is_main:
                load_weights(self.eval_model.to(self.device), weights)
            yield
            self.eval_model.cpu()
            return
        if not self.ema:
            yield
            return
        trained = clone_weights(self.model)
        load_weights(self.model, self.ema)
        try:
            yield
        finally:
            load_weights(self.model, trained)

    def checkpoint_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"model": collect_weights(self.model), "optimizer": self.optimizer_tensors(), "ema": self.ema}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the state of the optimizer, named such as "encoder.norm.weight:exp_avg"."""
        names = self.list_trained_names()
        states = self.optimizer.state_dict()["state"]
        return {f"{names[index]}:{key}": value for index, state in states.items() for key, value in state.items()}

    def list_trained_names(self) -> list[str]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def restore(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor], ema: dict[str, Tensor]) -> None:
        """Load the tensors of a checkpoint, which `checkpoint_tensors` returned when it was saved."""
        load_weights(self.model, weights)
        for name, value in self.ema.items():
            value.copy_(ema[name])
        if self.cuda_graphs and self.cuda_graphs.captured:  # copy in place: a graph contains the addresses of tensors
            current = self.optimizer_tensors()
            for name, value in optimizer.items():
                current[name].copy_(value)
            return
        state: dict[int, dict[str, Tensor]] = {}
        index = {name: number for number, name in enumerate(self.list_trained_names())}
        for name, value in optimizer.items():
            parameter, _, key = name.rpartition(":")
            state.setdefault(index[parameter], {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def clone_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in collect_weights(model).items()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, tensor in collect_weights(model).items():
        tensor.copy_(weights[name])


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """Split a batch by rows into at most `count` parts, without the parts that contain only padding."""
    if count == 1:
        return [batch]
    rows = len(batch.source_BS)
    size = math.ceil(rows / count)
    parts = []
    for start in range(0, rows, size):
        part = batch.map_tensors(itemgetter(slice(start, start + size)))
        if part.target_segment_BT.any():
            parts.append(replace(part, first_row=batch.first_row + start, total_rows=batch.total_rows or rows))
    return parts


def derive_seed(seed: int, step: int, batch: int) -> int:
    """Return the seed for the dropout masks of one batch of a step. Large primes keep seeds from coinciding."""
    return seed * 1_000_003 + step + batch * 1_000_000_007


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern, such as encoder.*; refuse patterns without a match."""
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
