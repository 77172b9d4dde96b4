"""A learner shared by several processes: DDP and FSDP2, put around it from outside. The menu is at the foot.

Each process works on its own rows of a grid; both libraries then give every process the mean of all gradients. Where a
tensor is shared out, `whole` and `own` lead from the part that lies here to all of it, and back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dragoman.config import TrainSettings
from dragoman.group import Group
from dragoman.models.transformer import DecoderLayer, EncoderLayer
from dragoman.nn.norm import BatchNorm
from dragoman.types import Batch, UserError


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
