"""A run folder on disk: files written atomically, a format number, and digests that detect damage.

    config.yaml  model.safetensors  tokenizer/  metrics.jsonl  checkpoints/  FORMAT
    probes.jsonl (gradients and activations during training, if train.probe_every is set)
    provenance.json (data counts, versions, dates, the parent run)  scores.jsonl (results of `evaluate`)

A run folder contains only tensors, text and JSON, so loading it never executes code from it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from dragoman.config.settings import format_settings, parse_settings, parse_yaml, prefix_errors
from dragoman.errors import UserError
from dragoman.io import (
    HEADER_KEY,
    digest_bytes,
    refuse_special_file,
    report_write_errors,
    write_atomically,
    write_text,
)
from dragoman.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 3  # version of the run folders that this release writes
MAX_DIGITS = 100  # of a format number: int() raises an error for thousands of digits
DIGEST_LINE = "# digest: "
CHANGED = "changed by hand"  # written by the user in place of the digest, to accept a changed config.yaml


def save_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write tensors and metadata, with a digest of both in the header of the file.

    All metadata are in one header entry: safetensors writes several entries in random order, and equal runs must give
    equal bytes.
    """
    from safetensors.torch import save_file

    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = json.dumps({**metadata, "digest": _digest(stored, metadata)}, sort_keys=True)

    def write(temporary: Path) -> None:
        try:
            save_file(stored, str(temporary), {HEADER_KEY: header})
        except SafetensorError as error:
            raise OSError(str(error)) from None

    write_atomically(path, write)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file; raise a UserError if it is missing or damaged."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            metadata = json.loads((file.metadata() or {})[HEADER_KEY])
            digest = metadata.pop("digest")
    except FileNotFoundError:
        raise UserError(f"{str(path)!r} is missing, so the run folder is incomplete") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is cut short or damaged ({error}); copy it again or restore it") from None
    if digest != _digest(tensors, metadata):
        raise UserError(f"{str(path)!r} is damaged: its contents do not match its digest; copy it again or restore it")
    return tensors, metadata


def read_header(path: Path) -> dict[str, str]:
    """Return the metadata and the digest in the header of a file of tensors, without reading the tensors."""
    try:
        with safe_open(str(path), framework="np") as file:  # "np" does not import PyTorch
            metadata = json.loads((file.metadata() or {})[HEADER_KEY])
            return {**metadata, "digest": str(metadata["digest"])}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is cut short or damaged ({error}); copy it again or restore it") from None


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return a digest of the metadata and of all names, shapes, dtypes and values of the tensors."""
    import torch

    parts: list[bytes | memoryview] = [json.dumps(metadata, sort_keys=True).encode()]
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        parts.append(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        parts.append(tensor.flatten().view(torch.uint8).numpy().data)
    return digest_bytes(*parts)


def average_weights(checkpoints: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of the weights of several checkpoints, summed in float64 in the given order."""
    first, *others = checkpoints
    total = {name: tensor.double() for name, tensor in first.items()}
    for weights in others:
        for name, tensor in weights.items():
            total[name] += tensor
    return {name: (tensor / (1 + len(others))).to(first[name].dtype) for name, tensor in total.items()}


class RunFolder:
    """Paths of the files in a run folder, and methods that read and write them."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.model_file = self.path / "model.safetensors"
        self.tokenizer_folder = self.path / "tokenizer"
        self.metrics_file = self.path / "metrics.jsonl"
        self.probes_file = self.path / "probes.jsonl"
        self.scores_file = self.path / "scores.jsonl"
        self.checkpoints_folder = self.path / "checkpoints"
        self.provenance_file = self.path / "provenance.json"
        self.distilled_folder = self.path / "distilled"  # of a student: translations by its teacher model
        self.format_file = self.path / "FORMAT"

    def create(self, recipe: Recipe) -> None:
        """Create the folder. FORMAT is written first, so that even an interrupted start leaves a valid run folder."""
        self.check_name()
        with report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.format_file, f"{FORMAT}\n")
            self.checkpoints_folder.mkdir(exist_ok=True)
        self.save_recipe(recipe)

    def discard(self) -> None:
        """Remove a run that failed at its start: the files written so far, and the folder if nothing else is in it."""
        for folder in (self.tokenizer_folder, self.checkpoints_folder, self.path / "tensorboard"):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            files = (self.format_file, self.config_file, self.metrics_file, self.probes_file, self.provenance_file)
            for file in files:
                file.unlink(missing_ok=True)
            self.path.rmdir()

    def save_recipe(self, recipe: Recipe) -> None:
        """Write config.yaml. Its last line is the digest of the lines before."""
        text = format_settings(recipe)
        write_text(self.config_file, f"{text}{DIGEST_LINE}{digest_bytes(text.encode())}\n")

    def check_name(self) -> None:
        """Refuse a path that is not valid UTF-8, which safetensors cannot open."""
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise UserError(f"the path {str(self.path)!r} of a run folder is not valid UTF-8; rename it") from None

    def check_format(self) -> int:
        """Return the format number; raise a UserError if this is no run folder or a newer release wrote it.

        Checkpoints are not checked: a training process may remove them at any time.
        """
        if not self.path.is_dir():
            note = ": it is a file; dragoman train makes run folders from recipes" if self.path.exists() else ""
            raise UserError(f"there is no run folder {str(self.path)!r}{note}")
        self.check_name()
        records = (self.metrics_file, self.probes_file, self.scores_file)
        files = (self.format_file, self.config_file, self.model_file, *records)
        for path in (*files, *self.tokenizer_folder.rglob("*")):
            refuse_special_file(path)
        if not self.format_file.is_file():
            raise UserError(f"{str(self.path)!r} is not a run folder: it has no FORMAT file")
        number = self.format_file.read_bytes().strip()
        if not number.isdigit() or len(number) > MAX_DIGITS or not int(number):
            raise UserError(f"{str(self.format_file)!r} is damaged: it must contain a number, such as {FORMAT}")
        if int(number) > FORMAT:
            raise UserError(
                f"{str(self.path)!r} has format {int(number)}, but this Dragoman reads up to {FORMAT}; update Dragoman"
            )
        return int(number)

    def load_recipe(self) -> Recipe:
        """Return the recipe in config.yaml; raise a UserError if the file was damaged or changed."""
        version, name = self.check_format(), repr(str(self.config_file))
        try:
            text = self.config_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{name} is missing or damaged, so the run folder is incomplete") from None
        body, separator, digest = text.rpartition(DIGEST_LINE)
        if not separator:
            raise UserError(f"{name} is cut short: it must end with a line {DIGEST_LINE!r}; restore it")
        if digest.strip() not in (CHANGED, digest_bytes(body.encode())):
            raise UserError(
                f"{name} was changed after it was written; restore it, or, if you changed it on purpose, "
                f"make its last line {DIGEST_LINE + CHANGED!r}"
            )
        values = parse_yaml(body, str(self.config_file))
        if version < 3:
            values = upgrade_settings(values)
        with prefix_errors(name):
            recipe = parse_settings(Recipe, values)
            if digest.strip() == CHANGED:  # other recipes were checked before they were written
                recipe.model.check()
            return recipe

    def load_state(self) -> dict[str, Any]:
        """Return the training state (state.json) of the newest checkpoint; empty if there is none."""
        newest = max(self.checkpoints_folder.glob(f"step-{'[0-9]' * 10}/state.json"), default=None)
        return read_json(newest) if newest else {}

    def load_teacher_record(self) -> dict[str, Any]:
        """Return the description of the teacher model of a distilled run; empty for other runs."""
        path = self.distilled_folder / "teacher.json"
        return read_json(path) if path.exists() else {}

    def load_provenance(self) -> dict[str, Any]:
        """Return the contents of provenance.json (training/checkpoint.py); empty for runs of earlier releases."""
        return read_json(self.provenance_file) if self.provenance_file.exists() else {}

    def add_scores(self, scores: Mapping[str, Any]) -> None:
        """Append the result of an evaluation to scores.jsonl; do nothing if the folder is read-only."""
        with suppress(OSError), self.scores_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(scores, ensure_ascii=False) + "\n")

    def save_model(self, weights: Mapping[str, Tensor], *, tokenizer: str, **metadata: str) -> None:
        """Write model.safetensors with metadata; `tokenizer` is the fingerprint of its tokenizers."""
        save_tensors(self.model_file, weights, tokenizer=tokenizer, **metadata)


def upgrade_settings(values: Any) -> Any:
    """Convert the settings of a run folder with a format below 3.

    `pool: last` of a bidirectional recurrent classifier meant the states at the last token, where the backward cell has
    read only that token. This is now called `last_token`, so that those runs classify as before.
    """
    model = values.get("model") if isinstance(values, dict) else None
    if isinstance(model, dict) and (model.get("kind"), model.get("backbone")) == ("classifier", "rnn"):
        pools_last = model.get("bidirectional") and model.get("pool") == "last"
        return {**values, "model": {**model, "pool": "last_token"}} if pools_last else values
    return values


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object of a run folder; raise a UserError if the file is missing, damaged or not a regular file."""
    refuse_special_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{str(path)!r} is missing, so the run folder is incomplete") from None
    except (ValueError, OSError):
        raise UserError(f"{str(path)!r} is damaged; restore it") from None
    if not isinstance(value, dict):
        raise UserError(f"{str(path)!r} is damaged; restore it")
    return value
