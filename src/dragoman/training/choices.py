"""What is decided by looking at the machine. Decided once, saved with every checkpoint, kept on resume:
the same choices on the same machine give the same bits.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from dragoman.config.settings import TrainSettings
from dragoman.errors import UserError
from dragoman.hardware import best_precision, choose_device, hold_memory, make_current
from dragoman.io import cache_folder
from dragoman.process_group import ProcessGroup

SWITCH = 1e-4  # seconds after which Python lets another thread run, if one wants to; it has 5e-3 by itself


@dataclass(frozen=True)
class Choices:
    device: str
    precision: str
    compile: bool
    threads: int
    split: int = 1  # parts that every batch is cut into, because it did not fit into memory whole
    few_shapes: bool = False  # of grids: which pairs share a batch hangs on it, so it stays as it was begun
    capture: bool = False  # updates are recorded and launched whole (training/cuda_graph.py)
    world: int = 1  # processes

    def apply(self) -> None:
        """Make the process run as chosen."""
        torch.set_num_threads(self.threads)
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients are NaN in rows of 64 places (PyTorch issue 196678)
        if self.device == "cpu":
            hold_memory()
        else:  # the thread that makes batches must not keep the one waiting that feeds the GPU
            sys.setswitchinterval(SWITCH)
            make_current(torch.device(self.device))
        if self.compile:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def __str__(self) -> str:
        how = "compiled" if self.compile else "not compiled"
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.device == "cpu" else ""
        split = f", batches in {self.split} parts" if self.split > 1 else ""
        world = f", {self.world} processes" if self.world > 1 else ""
        return f"{self.device}, {self.precision}, {how}{threads}{split}{world}"

    def for_process(self, group: ProcessGroup) -> Choices:
        """The same for one process of several: a GPU of its own, and no updates that are launched whole."""
        if not group.is_distributed:
            return replace(self, world=1)
        device, there = torch.device(self.device), torch.cuda.device_count()
        if device.type == "cuda" and group.local_rank >= there:
            raise UserError(f"this machine has {there} GPUs; start as many processes with --nproc-per-node={there}")
        name = f"cuda:{group.local_rank}" if device.type == "cuda" else self.device
        return replace(self, device=name, split=1, capture=False, world=group.world_size)


def choose(settings: TrainSettings, layout: str = "packed", *, few_shapes: bool = True) -> Choices:
    """For grids of a layout (data/batches.py), which may come in few shapes."""
    device = choose_device(settings.device)
    return Choices(
        device=str(device),
        precision=settings.precision if settings.precision != "auto" else best_precision(device),
        compile=_compile(settings, device, layout),
        threads=settings.threads or torch.get_num_threads(),
        few_shapes=device.type == "cuda" and few_shapes,
        capture=can_capture(device, settings, few_shapes=few_shapes),
    )


def keep_choices(before: Choices, now: Choices, settings: TrainSettings, world: int = 1) -> Choices:
    """Return the choices of the run so far, except for what is now set explicitly or was made for another device."""
    begun = torch.device(before.device)
    index = 0 if world > 1 else begun.index or 0  # of several processes each will have a GPU of its own
    if settings.device == "auto" and begun.type == "cuda" and index >= torch.cuda.device_count():
        raise UserError(
            f"this run was begun on {before.device}, which is not here; add train.device=cpu, or cuda for another GPU, "
            "to go on without it (equal within tolerance from then on, not to the bit)"
        )
    device = torch.device(before.device if settings.device == "auto" else now.device)
    moved = device.type != begun.type
    return Choices(
        device=str(device),
        precision=before.precision if settings.precision == "auto" else now.precision,
        compile=before.compile if settings.compile == "auto" and not moved else now.compile,
        threads=settings.threads or (before if before.world == world else now).threads,
        split=before.split,
        few_shapes=before.few_shapes,
        capture=can_capture(device, settings, few_shapes=before.few_shapes) and before.split == 1,
    )


def can_capture(device: torch.device, settings: TrainSettings, *, few_shapes: bool) -> bool:
    """Return whether steps can run as CUDA graphs, each of which serves one shape of batch."""
    return device.type == "cuda" and few_shapes and settings.accumulate == 1


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: on a GPU by tensors, elsewhere by the whole process, libraries and data included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _compile(settings: TrainSettings, device: torch.device, layout: str) -> bool:
    """On a GPU compiling pays on all but short runs, for grids of few shapes. On a CPU our own kernels are faster."""
    if settings.compile == "auto":
        return device.type == "cuda" and layout == "packed" and (settings.steps == 0 or settings.steps >= 2000)
    able = device.type == "cuda" or any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    if settings.compile and not able:
        raise UserError(
            "train.compile=true needs a C++ compiler (g++ or clang++); install one or set train.compile=false"
        )
    return settings.compile
