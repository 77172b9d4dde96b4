"""The processes of one command: this one by itself, or several that torchrun started.

By itself every verb does nothing and costs nothing. Of several, all call the same verbs in the same order; the first
one speaks and writes, and what it says is true of all. What goes wrong in one ends them all, with one sentence.
"""

from __future__ import annotations

import hashlib
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
from dragoman.progress import log

T = TypeVar("T")
PATIENCE = timedelta(days=30)  # before they are at work: however long it takes one process to prepare the data
MEETING = 10.0  # minutes within which all processes have started
ATTEMPT = timedelta(seconds=1)  # of a connection
EXCHANGE = timedelta(seconds=30)  # of addresses, once all have met: a process that died since is not waited for
SILENT = 3.0  # seconds to wait for other processes without a message
SAVED = "What was saved before is whole: go on with --resume"
# Gloo groups are kept until the process exits: the destructor joins their threads while it holds the GIL, and a thread
# that just finished a collective may be waiting for the GIL to free its tensors, which would be a deadlock.
GLOO_GROUPS: list[Any] = []


@dataclass(frozen=True)
class Group:
    """`prompt` carries what is agreed on, `tensors` gradients and weights. Both are there once they are at work."""

    rank: int = 0
    world: int = 1
    local: int = 0  # the number of this process on its machine, and so of its GPU
    minutes: float = 0.0  # that `prompt` waits
    prompt: dist.ProcessGroup | None = None
    tensors: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.world > 1

    def at_work(self, device: torch.device, minutes: float) -> Group:
        """The same processes, which from now on wait at most so long for each other."""
        if not self.several:
            return self
        patience = timedelta(minutes=minutes)
        prompt = dist.new_group(backend="gloo", timeout=patience)
        GLOO_GROUPS.append(prompt)
        tensors = prompt
        if device.type == "cuda":  # NCCL ends a process without a word, so `prompt` must be the first to lose patience
            torch.cuda.set_device(device)
            tensors = dist.new_group(backend="nccl", timeout=2 * patience, device_id=device)
        return replace(self, minutes=minutes, prompt=prompt, tensors=tensors)

    def all(self, work: Callable[[], T]) -> list[T]:
        """Everyone does it; what came of it in each, by rank. Until they are at work, no one loses patience.

        A mistake of one is everybody's, but it is said once: where it has no words, another process has them.
        """
        if not self.several:
            return [work()]
        value: T | None = None
        mistake: UserError | None = None
        try:
            value = work()
        except UserError as error:
            mistake = error
        answers: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(answers, (mistake is not None, value), group=self.prompt)
        except RuntimeError:
            if mistake:
                raise mistake from None
            raise
        wrong = [rank for rank, (failed, _) in enumerate(answers) if failed]
        if wrong:
            raise mistake if mistake and wrong[0] == self.rank else UserError("")
        return [answer for _, answer in answers]

    def each(self, work: Callable[[], T]) -> T:
        """What comes of it here, when all have done it."""
        kept: list[T] = []
        self.all(lambda: kept.append(work()))
        return kept[0]

    def told(self, work: Callable[[], T]) -> T:
        """What comes of it in the first process, the only one that does it."""
        found: Any = self.all(lambda: work() if self.first else None)[0]
        return found  # type: ignore[no-any-return]

    def in_turn(self, work: Callable[[], T]) -> T:
        """The first process does it, then the first of each other machine, then all others, who find what was left."""
        if not self.several:
            return work()
        own = 0 if self.first else 1 if self.local == 0 else 2

        def at(turn: int) -> list[T]:
            return [work()] if turn == own else []

        return [self.each(partial(at, turn)) for turn in range(3)][own][0]

    def mistake(self, sentence: str) -> UserError:
        """One that all processes make at the same moment: the first has the words."""
        return UserError(sentence if self.first else "")

    def numbers(self, *own: float) -> list[list[float]]:
        """These numbers of every process, by rank."""
        if not self.several:
            return [list(own)]
        mine = torch.tensor(own, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine, group=self.prompt)
        return [one.tolist() for one in found]

    def sum(self, tensor: Tensor) -> Tensor:
        """Of all processes, in place."""
        if self.several:
            dist.all_reduce(tensor, group=self.tensors)
        return tensor

    @contextmanager
    def company(self) -> Iterator[None]:
        """Another process that is gone, or hangs, ends this one with a sentence."""
        try:
            yield
        except RuntimeError as error:
            said = str(error).lower()
            if not self.several or not (isinstance(error, dist.DistError) or "gloo" in said):
                raise
            late = "timed out" in said or "timeout" in said
            raise Stop(f"{self._waited() if late else self._lost()}. {SAVED}", 1) from None

    def _waited(self) -> str:
        return (
            f"process {self.rank} of {self.world} waited {self.minutes:g} minutes for another one, which hangs or "
            "cannot be reached: look at its last lines, its machine and the network; or, if it was at work, raise "
            "train.timeout"
        )

    def _lost(self) -> str:
        return f"process {self.rank} of {self.world} has lost another one, whose own last lines may say why"


@contextmanager
def joined(minutes: Callable[[], float] = lambda: MEETING) -> Iterator[Group]:
    """Join all processes that torchrun started for this command, within these minutes; without torchrun stay alone."""
    launched = dist.is_available() and dist.is_torchelastic_launched()
    world = int(os.environ["WORLD_SIZE"]) if launched else 1
    if world == 1:
        yield Group()
        return
    own = not dist.is_initialized()  # else a command around this one has joined already, and will part
    if own:
        rank = int(os.environ["RANK"])
        waiting = Waiting(rank, world, minutes())
        store = connect(rank, waiting)
        name = meet(store, rank, world, waiting)
        store.set_timeout(EXCHANGE)
        store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
        GLOO_GROUPS.append(dist.group.WORLD)
    group = Group(dist.get_rank(), world, int(os.environ["LOCAL_RANK"]))
    well = False
    try:
        with group.company():
            yield group
        well = True
    finally:
        if own and (well or not torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]  # NCCL would wait
            dist.destroy_process_group()


def connect(rank: int, waiting: Waiting) -> Any:
    """Connect to the key-value store that the processes meet at, or serve it.

    torchrun serves it itself; otherwise rank 0 does. Calls into PyTorch are short: signals are handled between them.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while True:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=serve, timeout=ATTEMPT, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistError as error:
            if serve:
                why = str(error).partition("\n")[0]
                raise UserError(
                    f"the processes cannot meet at {host}:{port} ({why}); set another MASTER_PORT"
                ) from None
            waiting.check("process 0")


class Waiting:
    """A wait for other processes: it logs a message after some seconds and ends with an error after some minutes."""

    def __init__(self, rank: int, world: int, minutes: float) -> None:
        self.begun, self.minutes, self.own = time.monotonic(), minutes, f"process {rank} of {world}"
        self.silent = True

    def check(self, missing: str) -> None:
        waited, where = time.monotonic() - self.begun, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if waited > 60 * self.minutes:
            raise UserError(
                f"{self.own} waited {self.minutes:g} minutes for {missing} at {where}; check their output, or start "
                "all WORLD_SIZE processes"
            )
        if self.silent and waited > SILENT:
            self.silent = False
            log(f"waiting for {missing} at {where}")


def meet(store: Any, rank: int, world: int, waiting: Waiting) -> str:
    """Return a name that all processes agree on for this start of theirs, and for no other.

    torchrun keeps one store for all attempts of a job, and an attempt that failed has left its addresses there. A
    process that took one of those for the address of a live process would wait for it in vain.
    """
    own = uuid.uuid4().hex
    store.set(f"here/{rank}", own)
    while True:
        missing = sum(not store.check([f"here/{other}"]) for other in range(world))
        if rank == 0 and not missing:
            store.set("all", ",".join(store.get(f"here/{other}").decode() for other in range(world)))
        everyone = store.get("all").decode() if store.check(["all"]) else ""
        if own in everyone:  # else it is what an attempt before this one agreed upon
            name = hashlib.blake2b(everyone.encode(), digest_size=8).hexdigest()
            store.set(f"{name}/{rank}", "agreed")
            missing = sum(not store.check([f"{name}/{other}"]) for other in range(world))
            if not missing:
                return name
        waiting.check(f"{missing or 'some'} process{'es' * (missing != 1)}")
        time.sleep(0.02)
