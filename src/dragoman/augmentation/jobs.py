"""Work that is too long to be done twice: answers are kept in shards, each written once, by one of several processes.

    FOLDER/000000/answers.jsonl  FOLDER/000001/answers.jsonl  ...

A shard is whole or not there, and says what it answers. A work that was killed goes on with the shards that are not
there; one that is damaged, or answers something else, is made again. Under torchrun every process makes its share.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dragoman.errors import UserError
from dragoman.io import digest_bytes, digest_file, is_temporary, keep_folder, lock_folder
from dragoman.process_group import ProcessGroup
from dragoman.progress import ProgressBar, Report
from dragoman.run_dir import RunFolder, read_json, write_text, write_whole

ShardItem = TypeVar("ShardItem")
SHARD_SIZE = 4096  # items whose answers are kept together
ANSWERS, ABOUT = "answers.jsonl", "about.json"

Record = dict[str, Any]  # an answer, and what there is to say about it


@dataclass(frozen=True)
class ShardedJob(Generic[ShardItem]):
    """Items, which can be read again and again, and their answers in a folder, one record for each item."""

    folder: Path
    items: Callable[[], Iterator[ShardItem]]
    answer: Callable[[int, Sequence[ShardItem]], list[Record]]  # is told how many items came before, and given some
    batch: int  # items that it is given at a time

    def make(self, group: ProcessGroup, bar: ProgressBar) -> int:
        """The shards that fall to this process and are not there yet. How many there are in all comes back."""
        items, number = self.items(), 0
        while some := list(islice(items, SHARD_SIZE)):
            if number % group.world_size == group.rank:
                if read_shard(self.file(number), digest_items(some)) is not None:
                    bar.skip(len(some))
                else:
                    shutil.rmtree(self.file(number).parent, ignore_errors=True)  # damaged
                    self.keep(number, some, bar)
            number += 1
        return number

    def keep(self, number: int, some: Sequence[ShardItem], bar: ProgressBar) -> None:
        records: list[Record] = []
        for start in range(0, len(some), self.batch):
            part = some[start : start + self.batch]
            records += self.answer(number * SHARD_SIZE + start, part)
            bar.advance(len(part))
        body = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        head = json.dumps({"of": digest_items(some), "digest": digest_bytes(body)}).encode() + b"\n"

        def write(beside: Path) -> None:
            (beside / ANSWERS).write_bytes(head + body)

        try:
            keep_folder(self.file(number).parent, ANSWERS, write)
        except OSError as error:
            raise UserError(
                f"answers cannot be kept in {str(self.folder)!r} ({error.strerror}); those that are there are whole: "
                "make room, and start it again"
            ) from None

    def records(self, count: int) -> Iterator[Record]:
        """All answers, in the order of the items, once so many shards are made."""
        for number in range(count):
            found = read_shard(self.file(number))
            if found is None:
                raise UserError(
                    f"{str(self.file(number))!r} is missing or damaged; start it again, and it is made again"
                )
            yield from found

    def file(self, number: int) -> Path:
        return self.folder / f"{number:06}" / ANSWERS


def read_shard(file: Path, of: str = "") -> list[Record] | None:
    """The records of a shard; nothing, where there is none, or a damaged one, or one that answers something else."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        head, _, body = file.read_bytes().partition(b"\n")
        said = json.loads(head)
        if said["digest"] == digest_bytes(body) and of in ("", said["of"]):
            return [json.loads(line) for line in body.decode().split("\n")[:-1]]
    return None


def digest_items(items: Sequence[Any]) -> str:
    return digest_bytes(repr(items).encode())


def digest_runs(runs: Iterable[str | Path]) -> str:
    """The same for models that answer alike: their weights, vocabularies and settings."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in map(RunFolder, runs):
        digest.update(bytes.fromhex(digest_file(folder.model)))
        digest.update(
            json.dumps(folder.recipe().model.model_dump(mode="json", exclude_unset=True), sort_keys=True).encode()
        )
    return digest.hexdigest()


def count_own_items(total: int, group: ProcessGroup) -> int:
    """How many of all items are in shards that fall to this process."""
    firsts = range(group.rank * SHARD_SIZE, total, group.world_size * SHARD_SIZE)
    return sum(min(SHARD_SIZE, total - first) for first in firsts)


def choose_device_of_rank(name: str, group: ProcessGroup) -> str:
    """Of several processes on a machine with several GPUs, each takes its own."""
    return f"cuda:{group.local_rank}" if name == "auto" and group.is_distributed and torch.cuda.is_available() else name


class NothingUseful(UserError):
    """All answers are there, and none is of use: no file is written, and nobody will want to go on from here."""


@contextmanager
def open_shards_beside(output: Path, about: Mapping[str, Any]) -> Iterator[Path]:
    """The folder of shards for a file that is to be written. `about` is all that answers depend on: the shards of
    another work are in the way. Gone when the work is done."""
    folder = output.with_name(output.name + ".shards")
    refusal = f"another command works in {str(folder)!r}; wait for it, or choose another --output"
    done = False
    with ExitStack() as held:
        try:
            held.enter_context(lock_folder(folder, refusal))
        except OSError as error:
            raise UserError(f"cannot write {str(folder)!r} ({error.strerror}); choose another --output") from None
        check_only_shards(folder)
        try:
            check_same_job(folder, json.loads(json.dumps(about)))
            yield folder
            done = True
        except NothingUseful:
            done = True
            raise
        finally:
            if done or not has_answers(folder):
                shutil.rmtree(folder, ignore_errors=True)


def check_only_shards(folder: Path) -> None:
    """Refuse a folder that holds anything but shards: it would be removed in the end."""
    for path in folder.iterdir():
        if not (path.name == ABOUT or re.fullmatch(r"\d{6}", path.name) or is_temporary(path)):
            raise UserError(
                f"{str(folder)!r} holds {path.name!r}, which is no part of a resumable job; move the folder away, or "
                "choose another --output"
            )


def has_answers(folder: Path) -> bool:
    return any(folder.glob(f"*/{ANSWERS}"))


def check_same_job(folder: Path, about: dict[str, Any]) -> None:
    path = folder / ABOUT
    before = read_json(path) if path.exists() and has_answers(folder) else about
    for name in [*about, *before]:
        if before.get(name) != about.get(name):
            raise UserError(
                f"{str(folder)!r} holds answers that were made with another {name}; repeat that command to go on with "
                "it, or remove the folder"
            )
    write_text(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def write_sharded(
    output: Path,
    items: Callable[[], Iterator[ShardItem]],
    answer: Callable[[int, Sequence[ShardItem]], list[Record]],
    said: Callable[[Iterator[Record]], Iterator[str]],
    *,
    about: Mapping[str, Any],
    batch: int,
    group: ProcessGroup,
    report: Report,
) -> None:
    """A file of what is `said` of the answers to all items. It appears when it is whole; until then the answers are
    kept in shards beside it, and whoever starts the same work again goes on with them."""
    output = output.resolve()
    count_first = sys.stderr.isatty() and group.is_main  # elsewhere nobody needs the time left
    total = sum(1 for _ in report.progress("counting").iterate(items())) if count_first else 0

    def write(beside: Path) -> None:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(said(shards.records(count)))

    def make() -> int:
        with report.progress("translating", total=count_own_items(total, group), unit="sources") as bar:
            return shards.make(group, bar)

    with ExitStack() as held:
        folder = group.broadcast(lambda: held.enter_context(open_shards_beside(output, about)))
        shards = ShardedJob(folder, items, answer, batch)
        count = group.run_on_all(make)
        group.broadcast(lambda: write_whole(output, write))
