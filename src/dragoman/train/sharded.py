"""Tensors in a folder, to which every process wrote the parts that it held; any number of processes reads them.

FOLDER/shard-00002-model-00001-of-00001.safetensors ...   which part of a tensor it is stands in each file's header
FOLDER/digests.json                                       by the name of a file
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from dragoman.group import Group
from dragoman.io import digest_file
from dragoman.store import read_json, unwritable, write_text
from dragoman.types import UserError

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
