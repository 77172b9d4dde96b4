"""Probes during training: `Prober` measures them every train.probe_every steps and writes them to probes.jsonl."""

from __future__ import annotations

from itertools import chain

import torch

from dragoman.data.stream import read_in_order
from dragoman.inspection.probes import PROBE_TOKENS, make_probe_batch, measure_probes
from dragoman.models.base import Model
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.training.logging import MetricsWriter
from dragoman.training.prepare import RunData
from dragoman.types import Batch


class Prober:
    """The writer of probes.jsonl, which has a record (inspection/probes.py) for each measured step.

    All steps are measured on the same small batch of data.dev, or of data.train if there is no dev set.
    """

    def __init__(self, recipe: Recipe, prepared: RunData, folder: RunFolder | None, *, step: int) -> None:
        """Keep the records up to `step`. Without a folder (on ranks other than 0), nothing is measured or written."""
        is_used = folder is not None and (recipe.train.probe_every > 0 or folder.probes_file.exists())
        path = folder.probes_file if folder and is_used else None
        self.records = MetricsWriter(path, step=step, tensorboard=False)
        self.batch: Batch | None = None
        if path and recipe.train.probe_every:
            name, context = recipe.example_format, getattr(recipe.model, "context", 0)  # only language models have one
            stores = [part.store for part in (prepared.dev or prepared.train)]
            first = [read_in_order(store, name, context, PROBE_TOKENS) for store in stores]
            self.batch = make_probe_batch(list(chain.from_iterable(first)), name)

    def __call__(self, model: Model, step: int) -> None:
        """Measure a model and write a record. Only the main process may call this."""
        assert self.batch
        device = next(model.parameters()).device
        with torch.compiler.set_stance("force_eager"):  # layers are compiled for training only
            probes = measure_probes(model, self.batch.to(device))
        self.records.write("probe", step, **probes.to_json())
