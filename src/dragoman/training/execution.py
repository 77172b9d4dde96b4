"""How training runs on this machine: device, precision, compilation, threads, CUDA graphs, processes.

The plan is made once, saved with every checkpoint and kept on resume: on the same machine it gives the same bits.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from dragoman.config.settings import TrainSettings
from dragoman.errors import UserError
from dragoman.hardware import best_precision, choose_device, hold_memory, make_current
from dragoman.io import cache_folder
from dragoman.process_group import ProcessGroup

SWITCH_SECONDS = 1e-4  # after which Python lets another thread run; its own default is 5e-3
COMPILE_STEPS = 2000  # compiling pays in runs that are at least this long


@dataclass(frozen=True)
class ExecutionPlan:
    device: str
    precision: str
    compile: bool
    threads: int
    split: int = 1  # parts that every batch is split into, because it did not fit into memory
    few_shapes: bool = False  # of batches; it decides which pairs share a batch, so a run keeps it
    capture: bool = False  # steps run as CUDA graphs (training/step.py)
    world: int = 1  # processes

    def apply(self) -> None:
        """Configure this process."""
        torch.set_num_threads(self.threads)
        torch.backends.cuda.enable_cudnn_sdp(False)  # NaN gradients in rows of 64 positions (PyTorch issue 196678)
        if self.device == "cpu":
            hold_memory()
        else:  # the thread that collates batches must not delay the one that launches kernels
            sys.setswitchinterval(SWITCH_SECONDS)
            make_current(torch.device(self.device))
        if self.compile:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which matrix products have the planned precision."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def __str__(self) -> str:
        how = "compiled" if self.compile else "not compiled"
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.device == "cpu" else ""
        split = f", batches in {self.split} parts" if self.split > 1 else ""
        world = f", {self.world} processes" if self.world > 1 else ""
        return f"{self.device}, {self.precision}, {how}{threads}{split}{world}"


def plan_execution(
    settings: TrainSettings,
    layout: str = "packed",
    *,
    few_shapes: bool = True,
    before: ExecutionPlan | None = None,
    group: ProcessGroup | None = None,
) -> ExecutionPlan:
    """Return how this process trains: as the settings say, else as the resumed run did `before`, else the fastest way.

    `layout` is that of the batches (data/batches.py), and `few_shapes` tells whether they can come in few shapes.
    """
    group = group or ProcessGroup()
    if before and settings.device == "auto":
        device = torch.device(before.device)
        index = 0 if group.is_distributed else device.index or 0  # each of several processes has its own GPU
        if device.type == "cuda" and index >= torch.cuda.device_count():
            raise UserError(
                f"this run was begun on {before.device}, which is not here; add train.device=cpu, or cuda for another "
                "GPU, to go on without it (equal within tolerance from then on, not to the bit)"
            )
    else:
        device = choose_device(settings.device)
    on_gpu, split = device.type == "cuda", before.split if before and not group.is_distributed else 1
    precision: str = settings.precision
    if precision == "auto":
        precision = before.precision if before else best_precision(device)
    if settings.compile != "auto":
        compiled = settings.compile
        if compiled and not on_gpu and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise UserError(
                "train.compile=true needs a C++ compiler (g++ or clang++); install one or set train.compile=false"
            )
    elif before and torch.device(before.device).type == device.type:
        compiled = before.compile
    else:  # on a CPU our own kernels are faster
        compiled = on_gpu and layout == "packed" and (settings.steps == 0 or settings.steps >= COMPILE_STEPS)
    same_world = before and before.world == group.world_size
    few_shapes = before.few_shapes if before else on_gpu and few_shapes
    name, gpus = str(device), torch.cuda.device_count()
    if on_gpu and group.is_distributed:
        if group.local_rank >= gpus:
            raise UserError(f"this machine has {gpus} GPUs; start as many processes with --nproc-per-node={gpus}")
        name = f"cuda:{group.local_rank}"
    return ExecutionPlan(
        device=name,
        precision=precision,
        compile=compiled,
        threads=settings.threads or (before.threads if before and same_world else torch.get_num_threads()),
        split=split,
        few_shapes=few_shapes,
        capture=on_gpu and few_shapes and settings.accumulate == split == group.world_size == 1,
        world=group.world_size,
    )


def peak_memory(device: torch.device) -> int:
    """Return the most bytes held so far: on a GPU by tensors, elsewhere by the process with its libraries and data."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
