"""How training runs on this machine: device, precision, compilation, threads, CUDA graphs, processes.

The plan is made once, saved with every checkpoint and reused on resume. With the same plan, a run on the CPU of the
same machine gives bit-identical results.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from dragoman.config.settings import TrainSettings
from dragoman.errors import UserError
from dragoman.hardware import best_precision, choose_device, keep_freed_memory, set_current_gpu
from dragoman.io import cache_folder
from dragoman.process_group import ProcessGroup

SWITCH_SECONDS = 1e-4  # interval after which Python switches threads; the default is 5e-3
COMPILE_STEPS = 2000  # compilation pays off in runs with at least this many steps


@dataclass(frozen=True)
class ExecutionPlan:
    """How one process trains.

    With `bucketed_shapes`, batches are padded to a small set of shapes, which CUDA graphs need. This changes which
    pairs share a batch, so a resumed run must not change it. Aliases are the names of fields in state.json.
    """

    device: str
    precision: str
    compile: bool
    threads: int
    batch_parts: Annotated[int, Field(alias="split")] = 1  # into which a batch is split to fit into memory
    bucketed_shapes: Annotated[bool, Field(alias="few_shapes")] = False
    use_cuda_graphs: Annotated[bool, Field(alias="capture")] = False  # steps run as CUDA graphs (training/step.py)
    world_size: Annotated[int, Field(alias="world")] = 1  # number of processes

    def apply(self) -> None:
        """Set the number of threads, the memory allocator and the current GPU of this process."""
        torch.set_num_threads(self.threads)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it can give NaN gradients (PyTorch issue 196678)
        if self.device == "cpu":
            keep_freed_memory()
        else:  # the thread that collates batches must not delay the thread that launches kernels
            sys.setswitchinterval(SWITCH_SECONDS)
            set_current_gpu(torch.device(self.device))
        if self.compile:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which matrix products are computed in the planned precision."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def __str__(self) -> str:
        compiled = "compiled" if self.compile else "not compiled"
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.device == "cpu" else ""
        parts = f", batches in {self.batch_parts} parts" if self.batch_parts > 1 else ""
        processes = f", {self.world_size} processes" if self.world_size > 1 else ""
        return f"{self.device}, {self.precision}, {compiled}{threads}{parts}{processes}"


def plan_execution(
    settings: TrainSettings,
    layout: str = "packed",
    *,
    can_bucket_shapes: bool = True,
    resumed_plan: ExecutionPlan | None = None,
    group: ProcessGroup | None = None,
) -> ExecutionPlan:
    """Return the plan for this process.

    Explicit settings win; otherwise the plan of the resumed run; otherwise the fastest choice for this machine.
    `layout` is the layout of the batches (data/batches.py), and `can_bucket_shapes` whether they can be padded to a
    small set of shapes.
    """
    group = group or ProcessGroup()
    if resumed_plan and settings.device == "auto":
        device = torch.device(resumed_plan.device)
        index = 0 if group.is_distributed else device.index or 0  # with several processes, the rank decides
        if device.type == "cuda" and index >= torch.cuda.device_count():
            raise UserError(
                f"this run was started on {resumed_plan.device}, which this machine does not have; set "
                "train.device=cpu, or train.device=cuda for another GPU, to continue (results will then match the "
                "original run only approximately, not bit for bit)"
            )
    else:
        device = choose_device(settings.device)
    on_gpu, parts = device.type == "cuda", resumed_plan.batch_parts if resumed_plan and not group.is_distributed else 1
    precision: str = settings.precision
    if precision == "auto":
        precision = resumed_plan.precision if resumed_plan else best_precision(device)
    if settings.compile != "auto":
        compiled = settings.compile
        if compiled and not on_gpu and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise UserError(
                "train.compile=true needs a C++ compiler (g++ or clang++); install one or set train.compile=false"
            )
    elif resumed_plan and torch.device(resumed_plan.device).type == device.type:
        compiled = resumed_plan.compile
    else:  # on a CPU, eager mode with the kernels of this project is faster than compiled code
        compiled = on_gpu and layout == "packed" and (settings.steps == 0 or settings.steps >= COMPILE_STEPS)
    same_world = resumed_plan and resumed_plan.world_size == group.world_size
    bucketed_shapes = resumed_plan.bucketed_shapes if resumed_plan else on_gpu and can_bucket_shapes
    name, gpus = str(device), torch.cuda.device_count()
    if on_gpu and group.is_distributed:
        if group.local_rank >= gpus:
            raise UserError(
                f"this machine has {gpus} GPUs, but more processes were started on it; "
                f"use torchrun --nproc-per-node={gpus}"
            )
        name = f"cuda:{group.local_rank}"
    return ExecutionPlan(
        device=name,
        precision=precision,
        compile=compiled,
        threads=settings.threads or (resumed_plan.threads if resumed_plan and same_world else torch.get_num_threads()),
        batch_parts=parts,
        bucketed_shapes=bucketed_shapes,
        use_cuda_graphs=on_gpu and bucketed_shapes and settings.accumulate == parts == group.world_size == 1,
        world_size=group.world_size,
    )


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the tensors on a GPU, or on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
