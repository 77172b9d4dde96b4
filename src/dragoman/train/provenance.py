"""Where a run comes from: RUN/provenance.json holds data counts, versions, dates and the run it was fine-tuned from.

It is written when training begins, so that the model card (card.py) need not read the corpora again.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dragoman.data.forms import FORMS
from dragoman.store import RunFolder, load_tensors, read_digest, write_text
from dragoman.train.prepare import Prepared


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def record_start(folder: RunFolder, prepared: Prepared, form: str, *, init_from: str, resumed: bool) -> None:
    """Write provenance.json. A resumed run keeps the one that it has."""
    if resumed and folder.provenance_file.exists():
        return
    counts = [len(part.store) for part in (*prepared.train, *prepared.dev)]
    left_out = [dict(part.store.dropped) for part in (*prepared.train, *prepared.dev)]
    splits = ["train"] * len(prepared.train) + ["dev"] * len(prepared.dev)
    about = {
        "dragoman": version("dragoman"),
        "torch": torch.__version__,
        "started": None if resumed else now(),  # of a run that an earlier release began it is unknown
        "unit": FORMS[form].noun,
        "corpora": [
            {"split": split, "count": count, "left_out": dropped}
            for split, count, dropped in zip(splits, counts, left_out, strict=True)
        ],
        "parent": describe_parent(Path(init_from)) if init_from else None,
    }
    write(folder, about)


def record_end(folder: RunFolder, *, trained: bool) -> None:
    """Note when training ended and with which versions. A run that had ended before and took no step keeps its note."""
    about = folder.provenance()
    if not trained and about.get("ended"):
        return
    write(folder, {**about, "dragoman": version("dragoman"), "torch": torch.__version__, "ended": now()})


def describe_parent(run: Path) -> dict[str, Any]:
    """Return which run a new one begins with: its path, its weights' digest, its steps and its own parent."""
    folder = RunFolder(run)
    return {
        "run": str(run.absolute()),
        "digest": read_digest(folder.model),
        "steps": int(load_tensors(folder.model)[1].get("step", 0)),
        "teacher": folder.teacher().get("teacher"),
        "parent": folder.provenance().get("parent"),
    }


def write(folder: RunFolder, about: dict[str, Any]) -> None:
    write_text(folder.provenance_file, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
