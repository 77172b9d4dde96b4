"""How training is executed: the plan for a machine, data parallelism by DDP or FSDP2, and sharded checkpoints.

The plan (device, precision, compilation, threads, CUDA graphs, processes) is made once, saved with every checkpoint and
reused on resume. On the CPU of one machine, runs with the same plan are bit-identical.

If there are several processes, each computes some rows of a batch, and DDP or FSDP averages the gradients over all
processes. If tensors are sharded, `to_full` and `shard_like` convert between the local shard and the full tensor. The
tensors of a sharded checkpoint are a folder that any number of processes can read:

FOLDER/shard-00002-model-00001-of-00001.safetensors ...   the header of a file names the slices of tensors in it
FOLDER/digests.json                                       digests of these files, by file name
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.nn.parallel import DistributedDataParallel

from dragoman.errors import UserError
from dragoman.hardware import best_precision, choose_device, keep_freed_memory, set_current_gpu
from dragoman.io import cache_folder, digest_file, report_write_errors, write_text
from dragoman.models.transformer import TransformerLayer
from dragoman.modules.norms import BatchNorm
from dragoman.process_group import ProcessGroup
from dragoman.recipe import Recipe
from dragoman.run_dir import read_json

SWITCH_SECONDS = 1e-4  # interval at which Python switches threads; its default is 5e-3
DIGESTS = "digests.json"
COMPILE_STEPS = 2000  # compilation saves time in runs with at least this many steps


@dataclass(frozen=True)
class ExecutionPlan:
    """How one process trains.

    With `bucketed_shapes`, batches are padded to a small set of shapes, which CUDA graphs need. This changes which
    pairs share a batch, so a resumed run must keep it. A field with an alias has that name in state.json.
    """

    device: str
    precision: str
    compile: bool
    threads: int
    batch_parts: Annotated[int, Field(alias="split")] = 1  # number of parts into which a batch is split to save memory
    bucketed_shapes: Annotated[bool, Field(alias="few_shapes")] = False
    use_cuda_graphs: Annotated[bool, Field(alias="capture")] = False  # steps run as CUDA graphs (training/step.py)
    world_size: Annotated[int, Field(alias="world")] = 1

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
    recipe: Recipe, *, resumed_plan: ExecutionPlan | None = None, group: ProcessGroup | None = None
) -> ExecutionPlan:
    """Return the plan for this process.

    Explicit settings take precedence. Otherwise a resumed run keeps its plan, and a new run uses what is fastest on
    this machine.
    """
    settings, group = recipe.train, group or ProcessGroup()
    if resumed_plan and settings.device == "auto":
        device = torch.device(resumed_plan.device)
        index = 0 if group.is_distributed else device.index or 0  # with several processes, the local rank is the index
        if device.type == "cuda" and index >= torch.cuda.device_count():
            raise UserError(
                f"this run was started on {resumed_plan.device}, which this machine does not have; set "
                "train.device=cpu, or train.device=cuda for another GPU, to continue (results will then match the "
                "original run only approximately, not bit for bit)"
            )
    else:
        device = choose_device(settings.device)
    on_gpu = device.type == "cuda"
    parts = resumed_plan.batch_parts if resumed_plan and not group.is_distributed else 1
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
    else:  # on a CPU, eager code with this project's kernels is faster than compiled code
        is_long = settings.steps == 0 or settings.steps >= COMPILE_STEPS
        compiled = on_gpu and recipe.model.layout == "packed" and is_long
    same_world = resumed_plan and resumed_plan.world_size == group.world_size
    bucketed_shapes = resumed_plan.bucketed_shapes if resumed_plan else on_gpu and recipe.can_bucket_shapes
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


@dataclass(frozen=True)
class ParallelMethod:
    """A way to train one model in several processes, an entry of the registry PARALLEL."""

    wrap: Callable[[nn.Module, ProcessGroup], nn.Module]  # returns a module that averages gradients over all processes
    check: Callable[[nn.Module], None]  # raises a UserError for a model that the method cannot train
    sharded: bool = False  # whether every process has only a shard of each parameter


def wrap_ddp(learner: nn.Module, group: ProcessGroup) -> nn.Module:
    """Keep the full model in every process. Gradients are averaged in buckets during the backward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of PyTorch rename an argument
        return DistributedDataParallel(
            learner, process_group=group.tensor_group, broadcast_buffers=False, gradient_as_bucket_view=True
        )


def check_ddp(model: nn.Module) -> None:
    if any(isinstance(module, BatchNorm) for module in model.modules()):
        raise UserError(
            "model.norm=batch needs the statistics of a full batch, but each process has only some rows; train in one "
            "process, or use another norm, such as layer"
        )


def wrap_fsdp(learner: nn.Module, group: ProcessGroup) -> nn.Module:
    """Keep a shard of each parameter in every process, and the full parameters of a layer only while it is computed.

    Gradients are exchanged after every part of a batch: keeping them unsharded would take the memory that this saves.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard  # a slow import

    assert group.tensor_group
    mesh = DeviceMesh.from_group(group.tensor_group, next(learner.parameters()).device.type)
    for module in learner.modules():
        if isinstance(module, TransformerLayer):  # in training only their `forward` is called, as FSDP requires
            fully_shard(module, mesh=mesh)
    fully_shard(learner, mesh=mesh)  # in place
    return learner


def check_fsdp(model: nn.Module) -> None:
    """Refuse batch norm and parameters without a dimension to shard."""
    check_ddp(model)
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.dim()]:
        raise UserError(
            f"train.parallel=fsdp cannot shard {scalars[0]}, which is a single number; use another model.norm, such as "
            "layer, or train.parallel=ddp"
        )


PARALLEL = {"ddp": ParallelMethod(wrap_ddp, check_ddp), "fsdp": ParallelMethod(wrap_fsdp, check_fsdp, sharded=True)}


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def to_full(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective if it is sharded: every rank must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gather_like(part: Tensor, like: Tensor) -> Tensor:
    """Return the full tensor from its local shard `part`; `like` is a tensor sharded in the same way. Collective."""
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return to_full(DTensor.from_local(part, mesh, placements, shape=like.shape, stride=like.stride()))


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor as `like` is sharded. If `like` has no shards or another shape, return the full tensor."""
    if not is_sharded(like) or is_sharded(tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)


def save_sharded(folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Write the local shards of all tensors. Collective: when it returns, the files of all ranks are complete."""

    def make_folder() -> None:
        with report_write_errors(folder):
            folder.mkdir(parents=True)

    group.run_on_main(make_folder)
    try:
        if tensors:
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            save_parts(dict(tensors), storage_writer=writer, process_group=group.control_group)
    except CheckpointException as error:
        if not group.is_main:
            raise UserError("") from None  # the main process shows the message
        with report_write_errors(folder):
            raise _cause(error) from None
    digests = digest_files(folder, group)
    group.run_on_main(lambda: write_text(folder / DIGESTS, json.dumps(digests, indent=1) + "\n"))


def load_sharded(folder: Path, like: Mapping[str, Tensor], group: ProcessGroup) -> dict[str, Tensor]:
    """Return all tensors of a folder, each sharded like the tensor of the model that it belongs to.

    `like` has the tensors of the model by name. An optimizer state is named after its parameter, such as
    "project.weight:exp_avg". A tensor that has another shape than its parameter is not sharded.
    """
    if read_json(folder / DIGESTS) != digest_files(folder, group):
        raise UserError(f"{str(folder)!r} is damaged: its files do not match their digests; copy or restore it again")
    if not any(folder.glob("*.safetensors")):
        return {}
    try:
        metadata: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        tensors = {}
        for name, stored in metadata.items():
            parameter = like.get(name.rpartition(":")[0] or name)
            same_shape = parameter is not None and parameter.shape == stored.size
            empty = torch.empty_like(parameter) if same_shape else torch.empty(stored.size)  # type: ignore[arg-type]
            tensors[name] = empty.to(stored.properties.dtype).detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about reading in a single process
            reader, single = HuggingFaceStorageReader(str(folder)), not group.is_distributed
            load_parts(tensors, storage_reader=reader, process_group=group.control_group, no_dist=single)
    except (CheckpointException, SafetensorError, OSError, ValueError, KeyError) as error:
        why = _cause(error)
        raise UserError(f"{str(folder)!r} is cut short or damaged ({why}); copy it again or restore it") from None
    return tensors


def digest_files(folder: Path, group: ProcessGroup) -> dict[str, str]:
    """Return the digests of all files, each computed by one process."""
    files = sorted(folder.glob("*.safetensors"))[group.rank :: group.world_size]
    digests = group.gather_results(lambda: {file.name: digest_file(file) for file in files})
    return dict(sorted(item for rank_digests in digests for item in rank_digests.items()))


def _cause(error: BaseException) -> OSError:
    causes = [failure[0] for failure in getattr(error, "failures", {}).values()] or [error]
    return causes[0] if isinstance(causes[0], OSError) else OSError(str(causes[0]))
