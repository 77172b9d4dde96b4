"""The processes of one command: a single process, or several that torchrun started.

With one process, the methods of `ProcessGroup` need no communication. With several they are collectives: all ranks must
call the same methods in the same order. Rank 0, the main process, logs and writes. An error in one process ends all of
them, with one message.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dragoman.errors import Stop, UserError
from dragoman.io import digest_bytes
from dragoman.progress import log

T = TypeVar("T")
PREPARATION_TIMEOUT = timedelta(days=30)  # of collectives before training: rank 0 may take long to prepare data
DEFAULT_START_MINUTES = 10.0  # within which all processes must have started
CONNECT_TIMEOUT = timedelta(seconds=1)  # of one attempt to connect to torchrun's key-value store
EXCHANGE_TIMEOUT = timedelta(seconds=30)  # to exchange addresses once all processes have started
SILENT_SECONDS = 3.0  # a process waits this long for others before it logs a message
# A Gloo thread that has finished a collective needs the GIL to free its tensors. Destroying the group at that moment
# leads to a deadlock, since the destructor waits for the thread while it holds the GIL. Exiting without destroying the
# group aborts the process, which is acceptable only after a failure.
SETTLE_SECONDS = 0.5  # pause before the group is destroyed, in which such threads finish


@dataclass(frozen=True)
class ProcessGroup:
    """Rank, world size and, during training, two communication groups: one for control, one for tensors."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes of this machine: the index of its GPU
    timeout_minutes: float = 0.0  # of the control group
    control_group: dist.ProcessGroup | None = None  # Gloo, for Python objects, decisions and errors
    tensor_group: dist.ProcessGroup | None = None  # NCCL on GPUs, for gradients and weights

    @property
    def is_main(self) -> bool:
        """Whether this process logs and writes for all."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def with_device_and_timeout(self, device: torch.device, minutes: float) -> ProcessGroup:
        """Return a copy with new communication groups for the device, whose collectives time out after `minutes`."""
        if not self.is_distributed:
            return self
        timeout = timedelta(minutes=minutes)
        control = dist.new_group(backend="gloo", timeout=timeout)
        tensors = control
        if device.type == "cuda":  # NCCL ends a process without a message, so the control group must time out first
            torch.cuda.set_device(device)
            tensors = dist.new_group(backend="nccl", timeout=2 * timeout, device_id=device)
        return replace(self, timeout_minutes=minutes, control_group=control, tensor_group=tensors)

    def gather_results(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on all ranks and return all results, by rank.

        If a rank raises a UserError, all ranks raise one. Only that of the lowest failed rank has a message, so that it
        is shown once.
        """
        if not self.is_distributed:
            return [work()]
        value: T | None = None
        own_error: UserError | None = None
        try:
            value = work()
        except UserError as error:
            own_error = error
        results: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(results, (own_error is not None, value), group=self.control_group)
        except RuntimeError:
            if own_error:
                raise own_error from None
            raise
        failed = [rank for rank, (has_failed, _) in enumerate(results) if has_failed]
        if failed:
            raise own_error if own_error and failed[0] == self.rank else UserError("")
        return [result for _, result in results]

    def fail_together(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks and return the result of this rank. A UserError on one rank ends all ranks."""
        results: list[T] = []
        self.gather_results(lambda: results.append(work()))
        return results[0]

    def run_on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only and return its result on all ranks."""
        result: Any = self.gather_results(lambda: work() if self.is_main else None)[0]
        return result  # type: ignore[no-any-return]

    def run_main_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, then on other machines' first ranks, then on the rest, which reuse written files."""
        if not self.is_distributed:
            return work()
        own_stage = 0 if self.is_main else 1 if self.local_rank == 0 else 2

        def run_in_stage(stage: int) -> list[T]:
            return [work()] if stage == own_stage else []

        return [self.fail_together(partial(run_in_stage, stage)) for stage in range(3)][own_stage][0]

    def user_error(self, message: str) -> UserError:
        """Return an error for all ranks to raise at once; only that of rank 0 has the message, so it is shown once."""
        return UserError(message if self.is_main else "")

    def gather_numbers(self, *numbers: float) -> list[list[float]]:
        if not self.is_distributed:
            return [list(numbers)]
        local = torch.tensor(numbers, dtype=torch.float64)
        gathered = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(gathered, local, group=self.control_group)
        return [numbers_of_rank.tolist() for numbers_of_rank in gathered]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.is_distributed:
            dist.all_reduce(tensor, group=self.tensor_group)
        return tensor

    @contextmanager
    def handle_peer_failure(self) -> Iterator[None]:
        """If another process fails or hangs, end this one with a message instead of a traceback."""
        try:
            yield
        except RuntimeError as error:
            message = str(error).lower()
            if not self.is_distributed or not (isinstance(error, dist.DistError) or "gloo" in message):
                raise
            if "timed out" in message or "timeout" in message:
                reason = (
                    f"waited {self.timeout_minutes:g} minutes for another one, which hangs or cannot be reached: check "
                    "its output, its machine and the network; if it was only slow, raise train.timeout"
                )
            else:
                reason = "lost the connection to another one, whose output may show the cause"
            hint = "What was saved before is intact: continue with --resume"
            raise Stop(f"process {self.rank} of {self.world_size} {reason}. {hint}", 1) from None


@contextmanager
def join_process_group(minutes: Callable[[], float] = lambda: DEFAULT_START_MINUTES) -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started for this command; without torchrun, yield a group of one process.

    All processes must have started within `minutes()`, which is called only if there are several processes.
    """
    launched = dist.is_available() and dist.is_torchelastic_launched()
    world_size = int(os.environ["WORLD_SIZE"]) if launched else 1
    if world_size == 1:
        yield ProcessGroup()
        return
    joins_here = not dist.is_initialized()  # otherwise a caller has joined, and will leave the group
    if joins_here:
        rank = int(os.environ["RANK"])
        wait = PeerWait(rank, world_size, minutes())
        store = connect_to_store(rank, wait)
        name = agree_on_name(store, rank, world_size, wait)
        store.set_timeout(EXCHANGE_TIMEOUT)
        store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PREPARATION_TIMEOUT)
    group = ProcessGroup(dist.get_rank(), world_size, int(os.environ["LOCAL_RANK"]))
    succeeded = False
    try:
        with group.handle_peer_failure():
            yield group
        succeeded = True
    finally:
        # If CUDA is initialized, NCCL is in use. After a failure it would wait for the other processes, so the group is
        # not destroyed: the process ends with an error in any case.
        if joins_here and (succeeded or not torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            time.sleep(SETTLE_SECONDS)
            dist.destroy_process_group()


def connect_to_store(rank: int, wait: PeerWait) -> Any:
    """Connect to the key-value store through which the processes find each other; start its server if necessary.

    Usually torchrun runs the server; otherwise rank 0 does. Every call into PyTorch is short, because Python handles
    signals only between calls.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while True:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=is_server, timeout=CONNECT_TIMEOUT, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistError as error:
            if is_server:
                reason = str(error).partition("\n")[0]
                raise UserError(
                    f"process 0 cannot open a server at {host}:{port} ({reason}); set another MASTER_PORT"
                ) from None
            wait.check("process 0")


class PeerWait:
    """A wait for other processes: `check` logs a message after SILENT_SECONDS and raises an error after `minutes`."""

    def __init__(self, rank: int, world_size: int, minutes: float) -> None:
        self.start, self.minutes, self.name = time.monotonic(), minutes, f"process {rank} of {world_size}"
        self.is_silent = True

    def check(self, missing: str) -> None:
        """Log once that this process waits for `missing`, or raise an error, if it has waited long enough."""
        waited, where = time.monotonic() - self.start, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if waited > 60 * self.minutes:
            raise UserError(
                f"{self.name} waited {self.minutes:g} minutes for {missing} at {where}; check their output, or start "
                "all WORLD_SIZE processes"
            )
        if self.is_silent and waited > SILENT_SECONDS:
            self.is_silent = False
            log(f"waiting for {missing} at {where}")


def agree_on_name(store: Any, rank: int, world_size: int, wait: PeerWait) -> str:
    """Return a name for this attempt to start the job that all of its processes agree on.

    torchrun keeps one store for all attempts, so the addresses of a failed attempt are still in it. Without a new name,
    a process could wait in vain for a dead process at its old address.
    """
    own_id = uuid.uuid4().hex
    store.set(f"id/{rank}", own_id)
    while True:
        missing = sum(not store.check([f"id/{other}"]) for other in range(world_size))
        if rank == 0 and not missing:
            store.set("all_ids", ",".join(store.get(f"id/{other}").decode() for other in range(world_size)))
        all_ids = store.get("all_ids").decode() if store.check(["all_ids"]) else ""
        if own_id in all_ids:  # otherwise these are the ids of an earlier attempt
            name = digest_bytes(all_ids.encode(), size=8)
            store.set(f"{name}/{rank}", "agreed")
            missing = sum(not store.check([f"{name}/{other}"]) for other in range(world_size))
            if not missing:
                return name
        wait.check(f"{missing or 'some'} process{'es' * (missing != 1)}")
        time.sleep(0.02)
