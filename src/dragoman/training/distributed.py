"""A learner shared by several processes: DDP and FSDP2, put around it from outside. The menu is at the foot.

Each process works on its own rows of a grid; both libraries then give every process the mean of all gradients. Where a
tensor is shared out, `whole` and `own` lead from the part that lies here to all of it, and back.

Tensors in a folder, to which every process wrote the parts that it held; any number of processes reads them.

FOLDER/shard-00002-model-00001-of-00001.safetensors ...   which part of a tensor it is stands in each file's header
FOLDER/digests.json                                       by the name of a file
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.nn.parallel import DistributedDataParallel

from dragoman.config.settings import TrainSettings
from dragoman.errors import UserError
from dragoman.io import digest_file
from dragoman.models.transformer import DecoderLayer, EncoderLayer
from dragoman.modules.norms import BatchNorm
from dragoman.process_group import Group
from dragoman.run_dir import read_json, unwritable, write_text
from dragoman.types import Batch


class Alone:
    """One process, which has the learner to itself."""

    sharded = False  # whether a process holds no more than a part of each tensor

    def __init__(self, learner: nn.Module, group: Group) -> None:  # noqa: ARG002 - the menu's shape
        self.around: Any = learner

    def __call__(self, batch: Batch) -> Tensor:
        sums_3: Tensor = self.around(batch)
        return sums_3

    def more_to_come(self) -> AbstractContextManager[None]:
        """Inside, gradients are added up here and not exchanged yet."""
        return nullcontext()

    @staticmethod
    def check(model: nn.Module) -> None:
        """Refuse what it cannot train."""


class Ddp(Alone):
    """Everyone holds the whole model. Gradients are exchanged in buckets, while the next ones are being made."""

    def __init__(self, learner: nn.Module, group: Group) -> None:
        super().__init__(learner, group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions of PyTorch have another name for it
            self.around = DistributedDataParallel(
                learner, process_group=group.tensors, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def more_to_come(self) -> AbstractContextManager[None]:
        held: AbstractContextManager[None] = self.around.no_sync()
        return held

    @staticmethod
    def check(model: nn.Module) -> None:
        if any(isinstance(module, BatchNorm) for module in model.modules()):
            raise UserError(
                "model.norm=batch needs the statistics of a whole batch, of which each process sees some rows; train "
                "in one process, or with another norm, such as layer"
            )


class Fsdp(Alone):
    """Everyone holds a part of each tensor, and all of a layer while it is at work. Gradients are exchanged at once:
    to keep them whole until the last would take the memory that this is to save."""

    sharded = True

    def __init__(self, learner: nn.Module, group: Group) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard  # here, because to import it takes a second or two

        super().__init__(learner, group)
        assert group.tensors
        mesh = DeviceMesh.from_group(group.tensors, next(learner.parameters()).device.type)
        for unit in units(learner):
            fully_shard(unit, mesh=mesh)
        fully_shard(learner, mesh=mesh)

    @staticmethod
    def check(model: nn.Module) -> None:
        Ddp.check(model)
        single = [name for name, parameter in model.named_parameters() if not parameter.dim()]
        if single:
            raise UserError(
                f"train.parallel=fsdp cannot share out {single[0]}, which is a single number; take another model.norm, "
                "such as layer, or train.parallel=ddp"
            )


def units(learner: nn.Module) -> Iterator[nn.Module]:
    """What is fetched and let go of together: layers of which training asks nothing but their `forward`."""
    for module in learner.modules():
        if isinstance(module, EncoderLayer | DecoderLayer):
            yield module


def shared(learner: nn.Module, settings: TrainSettings, group: Group) -> Alone:
    return PARALLEL[settings.parallel](learner, group) if group.several else Alone(learner, group)


def is_shared(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """All of it. Where it is shared out, everyone must ask."""
    all_of_it: Tensor = tensor.full_tensor() if is_shared(tensor) else tensor  # type: ignore[attr-defined]
    return all_of_it


def here(tensor: Tensor) -> Tensor:
    """The part of it that lies here."""
    part: Tensor = tensor.to_local() if is_shared(tensor) else tensor  # type: ignore[attr-defined]
    return part


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """All of a tensor of which everyone has a part, as they have one of another of its shape."""
    from torch.distributed.tensor import DTensor

    mesh, places = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return whole(DTensor.from_local(part, mesh, places, shape=like.shape, stride=like.stride()))


def own(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, shared out like another of its shape."""
    if not is_shared(like) or is_shared(tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, places = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor.to(like.device), mesh, places, src_data_rank=None)


PARALLEL: dict[str, type[Alone]] = {"ddp": Ddp, "fsdp": Fsdp}

DIGESTS = "digests.json"


def save(folder: Path, tensors: Mapping[str, Tensor], group: Group) -> None:
    """Everyone must call it. What was saved is whole when it returns, and not before."""
    group.told(lambda: make(folder))
    try:
        if tensors:
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            save_parts(dict(tensors), storage_writer=writer, process_group=group.prompt)
    except CheckpointException as error:
        raise unwritable(folder, _cause(error)) if group.first else UserError("") from None
    found = digests(folder, group)
    group.told(lambda: write_text(folder / DIGESTS, json.dumps(found, indent=1) + "\n"))


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise unwritable(folder, error) from None


def load(folder: Path, like: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """All tensors of a folder, each shared out as the one in `like` is that has its name (before a colon) and shape."""
    if read_json(folder / DIGESTS) != digests(folder, group):
        raise UserError(
            f"{str(folder)!r} is damaged: its files do not match their digests; copy it again or restore it"
        )
    if not any(folder.glob("*.safetensors")):
        return {}
    try:
        about = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        found = {}
        for name, one in about.items():
            model = like.get(name.rpartition(":")[0] or name)
            same = model is not None and model.shape == one.size  # type: ignore[union-attr]
            new = torch.empty_like(model) if same else torch.empty(one.size)  # type: ignore[arg-type,union-attr]
            found[name] = new.to(one.properties.dtype).detach()  # type: ignore[union-attr]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process reads by itself
            reader, alone = HuggingFaceStorageReader(str(folder)), not group.several
            load_parts(found, storage_reader=reader, process_group=group.prompt, no_dist=alone)
    except (CheckpointException, SafetensorError, OSError, ValueError, KeyError) as error:
        why = _cause(error)
        raise UserError(f"{str(folder)!r} is cut short or damaged ({why}); copy it again or restore it") from None
    return found


def digests(folder: Path, group: Group) -> dict[str, str]:
    """Of all files, each looked at by one process."""
    files = sorted(folder.glob("*.safetensors"))

    def some() -> dict[str, str]:
        return {file.name: digest_file(file) for file in files[group.rank :: group.world]}

    return dict(sorted(pair for part in group.all(some) for pair in part.items()))


def _cause(error: BaseException) -> Exception:
    """What went wrong in the first of the processes in which something did."""
    causes = [failure[0] for failure in getattr(error, "failures", {}).values()] or [error]
    return causes[0] if isinstance(causes[0], Exception) else Exception(str(causes[0]))
