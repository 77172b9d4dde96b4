"""Resumable jobs: long computations over many items, saved in shards that one or several processes write.

    FOLDER/about.json  FOLDER/000000/answers.jsonl  FOLDER/000001/answers.jsonl  ...

A shard file has one header line, with a digest of the items that the shard was made from and a digest of the records,
and then one JSON record per item. A shard is written atomically, so it is complete or absent. A job that was killed
resumes with the missing shards; a shard that is damaged, or was made from other items, is computed again. Under
torchrun the processes divide the shards.

`ShardedJob` computes the shards in any folder. `write_sharded` runs such a job over the lines of a file, with the
shards in a folder next to the output file; about.json records what they depend on, such as the model.
"""

from __future__ import annotations

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

from dragoman import io
from dragoman.config.settings import Settings
from dragoman.data.context import ContextWindow
from dragoman.data.corpus import CorpusSettings, fingerprint_corpus
from dragoman.errors import UserError
from dragoman.process_group import ProcessGroup
from dragoman.progress import ProgressBar, Report
from dragoman.run_dir import RunFolder, read_json
from dragoman.types import Line

ShardItem = TypeVar("ShardItem")
PHRASE_SYSTEM_FILES = ("casing.json", "lm.arpa", "weights.json")  # of phrase-based systems, beside model.safetensors
SHARD_SIZE = 4096
RECORDS_FILE, DEPENDENCIES_FILE = "answers.jsonl", "about.json"  # fixed names: jobs of earlier releases can resume

Record = dict[str, Any]  # the result for one item, as a JSON object


class NoUsableRecords(UserError):
    """The job is complete, but none of its records can be used: no file is written, and the shards are removed."""


@dataclass(frozen=True)
class ShardedJob(Generic[ShardItem]):
    """A computation that makes one record per item, and the folder of its shards."""

    folder: Path
    read_items: Callable[[], Iterator[ShardItem]]  # iterates over all items, from the beginning
    process: Callable[[int, Sequence[ShardItem]], list[Record]]  # (offset of the batch, its items) -> records
    batch: int

    def run(self, group: ProcessGroup, bar: ProgressBar) -> int:
        """Compute the missing shards of this process. Return the total number of shards, of all processes."""
        items, number = self.read_items(), 0
        while shard := list(islice(items, SHARD_SIZE)):
            if number % group.world_size == group.rank:  # the shards are divided among the processes
                digest = io.digest_bytes(repr(shard).encode())
                if read_shard(self.get_shard_file(number), digest) is not None:
                    bar.skip(len(shard))
                else:
                    self.make_shard(number, shard, digest, bar)
            number += 1
        return number

    def make_shard(self, number: int, items: Sequence[ShardItem], digest: str, bar: ProgressBar) -> None:
        """Process the items of a shard and write their records. `digest` is that of the items."""
        path = self.get_shard_file(number)
        shutil.rmtree(path.parent, ignore_errors=True)
        records: list[Record] = []
        for start in range(0, len(items), self.batch):
            batch_items = items[start : start + self.batch]
            records += self.process(number * SHARD_SIZE + start, batch_items)
            bar.advance(len(batch_items))
        body = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        header = json.dumps({"of": digest, "digest": io.digest_bytes(body)})  # digests of the items and of the records

        def write(folder: Path) -> None:
            (folder / RECORDS_FILE).write_bytes(header.encode() + b"\n" + body)

        try:
            io.create_folder_atomically(path.parent, write=write, required_file=RECORDS_FILE)
        except OSError as error:
            raise UserError(
                f"cannot write translations to {str(self.folder)!r} ({error.strerror}); the finished shards there are "
                "complete: make room, and repeat the command"
            ) from None

    def read_records(self, count: int) -> Iterator[Record]:
        """Yield the records of all items, in the order of the items. `count` is the number of shards."""
        for path in map(self.get_shard_file, range(count)):
            records = read_shard(path)
            if records is None:
                raise UserError(f"{str(path)!r} is missing or damaged; repeat the command to compute it again")
            yield from records

    def get_shard_file(self, number: int) -> Path:
        return self.folder / f"{number:06}" / RECORDS_FILE


def read_shard(path: Path, digest: str = "") -> list[Record] | None:
    """Return the records of a shard; None if it is missing or damaged, or if its items have another digest.

    Without `digest`, the items are not checked.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        first_line, _, body = path.read_bytes().partition(b"\n")
        header = json.loads(first_line)
        if header["digest"] == io.digest_bytes(body) and digest in ("", header["of"]):
            return [json.loads(line) for line in body.decode().split("\n")[:-1]]
    return None


def digest_runs(runs: Iterable[str | Path]) -> str:
    """Return a digest of the files of the models and the model settings of runs.

    A weight file contains a digest of the vocabularies, so the result depends on the vocabularies too.
    """
    parts: list[bytes] = []
    for folder in map(RunFolder, runs):
        model = folder.load_recipe().model.model_dump(mode="json", exclude_unset=True)
        phrase_files = filter(Path.exists, (folder.path / name for name in PHRASE_SYSTEM_FILES))
        parts += [bytes.fromhex(io.digest_file(path)) for path in (folder.model_file, *phrase_files)]
        parts.append(json.dumps(model, sort_keys=True).encode())
    return io.digest_bytes(*parts)


def list_dependencies(
    source: Path, runs: Iterable[str | Path], search: Settings, group: ProcessGroup, **options: Any
) -> dict[str, Any]:
    """Return everything that the translations of a file depend on, for `write_sharded`."""
    return {
        "input": group.run_on_main(lambda: fingerprint_corpus(CorpusSettings(text=str(source)))),
        "model": digest_runs(runs),
        **options,
        **{f"search.{name}": value for name, value in search.model_dump(mode="json").items()},
    }


def count_local_items(total: int, group: ProcessGroup) -> int:
    starts = range(group.rank * SHARD_SIZE, total, group.world_size * SHARD_SIZE)
    return sum(min(SHARD_SIZE, total - start) for start in starts)


def choose_device_of_rank(name: str, group: ProcessGroup) -> str:
    """Return the device of this process: with `auto`, each of several processes on a machine uses its own GPU."""
    return f"cuda:{group.local_rank}" if name == "auto" and group.is_distributed and torch.cuda.is_available() else name


@contextmanager
def open_shards_beside(output: Path, depends_on: Mapping[str, Any]) -> Iterator[Path]:
    """Lock and yield the folder of shards for an output file; remove the folder when the job is done.

    `depends_on` is everything that the records depend on. If the folder has shards of a job with other dependencies, or
    unrelated files, which would be removed with it, raise a UserError. If the job fails, the folder is kept if it has
    shards to resume from.
    """
    folder = output.with_name(output.name + ".shards")
    busy_message = f"another command works in {str(folder)!r}; wait for it, or choose another --output"
    with ExitStack() as locks:
        try:
            locks.enter_context(io.lock_folder(folder, busy_message))
        except OSError as error:
            raise UserError(f"cannot write {str(folder)!r} ({error.strerror}); choose another --output") from None
        for path in folder.iterdir():
            if not (path.name == DEPENDENCIES_FILE or re.fullmatch(r"\d{6}", path.name) or io.is_temporary(path)):
                raise UserError(
                    f"{str(folder)!r} holds {path.name!r}, which is not part of a resumable job; move the folder away, "
                    "or choose another --output"
                )
        current = json.loads(json.dumps(depends_on))  # tuples become lists, as in the file
        dependencies_file = folder / DEPENDENCIES_FILE
        previous = read_json(dependencies_file) if dependencies_file.exists() and has_shards(folder) else current
        for name in [*current, *previous]:
            if previous.get(name) != current.get(name):
                raise UserError(
                    f"{str(folder)!r} holds translations that were made with another {name}; repeat that command "
                    "to resume it, or remove the folder"
                )
        resumable = False
        try:
            io.write_text(dependencies_file, io.format_json(depends_on))
            yield folder
        except BaseException as error:
            resumable = has_shards(folder) and not isinstance(error, NoUsableRecords)
            raise
        finally:
            if not resumable:
                shutil.rmtree(folder, ignore_errors=True)


def has_shards(folder: Path) -> bool:
    return any(folder.glob(f"*/{RECORDS_FILE}"))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file atomically, from an iterator of lines."""

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)

    io.write_atomically(path, write)


def write_sharded(
    source: Path,
    output: Path,
    process: Callable[[int, Sequence[str | Line]], list[Record]],
    format_records: Callable[[Iterator[Record]], Iterator[str]],
    *,
    depends_on: Mapping[str, Any],
    batch: int,
    group: ProcessGroup,
    context: int = 0,
    report: Report | None = None,
) -> None:
    """Process the lines of the file `source`, and write the formatted records to the file `output`.

    With `context`, each line comes with the lines before it, up to this number, whatever the shards and batches are.
    `output` is written at the end, atomically. Until then the records are in shards next to it, and repeating the same
    command resumes with these shards. `depends_on` is the result of `list_dependencies`.
    """
    output = output.resolve()

    def read_items() -> Iterator[str | Line]:
        window = ContextWindow(context)
        for text in io.read_lines(source):
            yield Line(text, context=window.advance(text)) if context else text

    report = report or Report(quiet=not group.is_main)
    shows_time_left = sys.stderr.isatty() and group.is_main  # on a terminal; this needs the total
    total = sum(1 for _ in report.progress("counting").iterate(read_items())) if shows_time_left else 0
    with ExitStack() as locks:
        folder = group.run_on_main(lambda: locks.enter_context(open_shards_beside(output, depends_on)))
        job = ShardedJob(folder, read_items, process, batch)
        with report.progress("translating", total=count_local_items(total, group), unit="sources") as bar:
            count = group.fail_together(lambda: job.run(group, bar))
        group.run_on_main(lambda: write_lines(output, format_records(job.read_records(count))))
