"""Train a phrase-based system (model.kind=smt) into a run folder: check the recipe, read the corpora, run the stages.

Interrupted training resumes after the last finished stage (smt/system.py), with `--resume` as for neural models.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.config.settings import prefix_errors
from dragoman.data.tokenizers import TOKENIZERS, WordTokenizer
from dragoman.errors import UserError
from dragoman.inference.postprocess import PairStatistics
from dragoman.io import format_json, read_lines, write_text
from dragoman.progress import Report
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.smt.settings import SmtSettings
from dragoman.training.checkpoint import format_current_time
from dragoman.training.execution import peak_memory
from dragoman.training.prepare import STATISTICS_LENGTHS, STATISTICS_TEXTS, check_files, read_corpus
from dragoman.training.start import TrainRequest, check_settings, continue_recipe, holds_run, lock_run
from dragoman.types import ParallelTexts


class LoadedCorpora(NamedTuple):
    """The pairs of a run, and how many pairs of each corpus are used and left out."""

    train: ParallelTexts
    dev: ParallelTexts
    counts: list[dict[str, Any]]  # as in provenance.json

    @property
    def words(self) -> int:
        """The number of words of the training text on both sides, split at spaces."""
        return sum(len(text.split()) for side in self.train for text in side)


def train_phrase_system(request: TrainRequest, report: Report) -> Path:
    """Train the recipe of a phrase-based system, or resume its training; return the run folder."""
    folder = request.folder
    resumed = check_run_folder(folder, resume=request.resume)
    recipe = read_phrase_recipe(request, report)
    if resumed:
        recipe = continue_recipe(folder.load_recipe(), recipe, report)
    with lock_run(folder, discard=not resumed):
        folder.create(recipe)
        run_stages(recipe, folder, report)
    return folder.path


def read_phrase_recipe(request: TrainRequest, report: Report) -> Recipe:
    """Read and check the recipe and the beginning of its files; log which of its settings have no effect."""
    if request.init_from is not None:
        raise UserError("model.kind=smt cannot start from the weights of another run; leave --init-from out")
    recipe = request.read_recipe(None)
    check_settings(recipe)
    check_files(recipe)
    assert isinstance(recipe.model, SmtSettings)
    if recipe.model.lm_text:
        with prefix_errors("model.lm_text"):
            next(read_lines(Path(recipe.model.lm_text)), None)
    used = {"train": {"seed", "device"}, "tokenizer": {"kind", "target_kind", "joint"}}
    sections = {name: getattr(recipe, name).model_dump(exclude_defaults=True) for name in used}
    if unused := [f"{section}.{name}" for section in used for name in sections[section] if name not in used[section]]:
        report.log(f"model.kind=smt does not use {', '.join(unused)}")
    return recipe


def check_run_folder(folder: RunFolder, *, resume: bool) -> bool:
    """Return whether the folder has a phrase-based run to resume; refuse a folder with anything else in it."""
    name = str(folder.path)
    has_begun = folder.metrics_file.exists() or folder.model_file.exists()  # else it failed before any stage
    if not holds_run(folder) or not has_begun:
        return False
    if not resume:
        raise UserError(f"{name!r} already holds a run; add --resume to continue it, or choose another --out")
    if (kind := folder.load_recipe().model.kind) != "smt":
        raise UserError(f"{name!r} holds a run with model.kind={kind}; choose another --out")
    return True


def run_stages(recipe: Recipe, folder: RunFolder, report: Report) -> None:
    """Read the corpora and run all stages that are not finished; keep the time and memory they took."""
    from dragoman.smt.system import WEIGHTS, SystemTrainer  # compiles with Numba, which takes seconds to import

    assert isinstance(recipe.model, SmtSettings)
    if (folder.path / WEIGHTS).exists():
        report.log("this run is already finished")
        return
    start, corpora = time.monotonic(), read_corpora(recipe, report)
    provenance: dict[str, Any] = {"started": format_current_time(), "unit": "pairs", "corpora": corpora.counts}
    provenance = folder.load_provenance() or provenance
    earlier_seconds = provenance.get("training", {}).get("seconds", 0.0)  # of training that was interrupted
    metrics = StageMetrics(folder.metrics_file)

    def save_provenance(**about: str) -> None:
        memory = peak_memory(torch.device("cpu"))
        seconds = earlier_seconds + time.monotonic() - start
        training = {"seconds": seconds, "tokens": corpora.words, "peak_memory": memory}
        about |= {"dragoman": version("dragoman")}
        write_text(folder.provenance_file, format_json({**provenance, **about, "training": training}))

    def begin_stage(stage: str) -> None:
        metrics.remove(stage)
        save_provenance()

    tokenizer = find_word_tokenizer(recipe.tokenizer.kind)
    lengths = [[len(tokenizer.split(text)) for text in side] for side in corpora.train]
    statistics = PairStatistics.measure(
        zip(*(side[:: max(len(side) // STATISTICS_LENGTHS, 1)] for side in lengths), strict=True),
        zip(*(side[:: max(len(side) // STATISTICS_TEXTS, 1)] for side in corpora.train), strict=True),
    )
    SystemTrainer(
        folder.path,
        recipe.model,
        tokenizer,
        seed=recipe.train.seed,
        report=report,
        # Inference warns of longer sources and, by the statistics, of unusual translations.
        about={"longest": str(max(lengths[0])), "usual": statistics.to_json()},
        write_metrics=metrics.write,
        before_stage=begin_stage,
    ).train(corpora.train, corpora.dev)
    save_provenance(ended=format_current_time())
    report.log(f"the run is in {folder.path}")


class StageMetrics:
    """The writer of metrics.jsonl: one record for each iteration of a stage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, stage: str, step: int, values: Mapping[str, float | str]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": stage, "step": step, **values}) + "\n")

    def remove(self, stage: str) -> None:
        """Remove the records of a stage that begins again, and an incomplete last line of a killed process."""
        kept = []
        for line in self.path.read_text(encoding="utf-8").split("\n") if self.path.exists() else []:
            with suppress(ValueError):
                if json.loads(line)["event"] != stage:
                    kept.append(line + "\n")
        write_text(self.path, "".join(kept))


def read_corpora(recipe: Recipe, report: Report) -> LoadedCorpora:
    """Read all pairs of the recipe; leave out those with an empty side or more than data.max_length words."""
    split_words = find_word_tokenizer(recipe.tokenizer.kind).split
    texts: dict[str, ParallelTexts] = {"train": ([], []), "dev": ([], [])}
    counts = []
    for split, (sources, targets) in texts.items():
        for corpus in getattr(recipe.data, split):
            left_out: Counter[str] = Counter()
            before = len(sources)
            for pair in report.progress(f"reading {split}", unit="pairs").iterate(read_corpus(recipe, corpus, split)):
                if not (pair.source.strip() and pair.target.strip()):
                    left_out["with an empty side"] += 1
                elif max(len(split_words(pair.source)), len(split_words(pair.target))) > recipe.data.max_length:
                    left_out[f"longer than {recipe.data.max_length} words"] += 1
                else:
                    sources.append(pair.source)
                    targets.append(pair.target)
            reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
            used = len(sources) - before
            report.log(f"{split}, {corpus.title}: {used:,} pairs" + (f" ({reasons}: left out)" if reasons else ""))
            counts.append({"split": split, "count": used, "left_out": dict(left_out)})
    if not texts["train"][0]:
        raise UserError(
            "data.train has no pairs to learn from: all have an empty side or are too long; name another corpus, or "
            "raise data.max_length"
        )
    return LoadedCorpora(texts["train"], texts["dev"], counts)


def describe_phrase_run(request: TrainRequest, report: Report) -> dict[str, Any]:
    """Check a recipe and its data, and return what would be trained (`dragoman train --dry-run`)."""
    check_run_folder(request.folder, resume=False)
    recipe = read_phrase_recipe(request, report)
    corpora = read_corpora(recipe, report)
    return {
        "model": recipe.model.kind,
        "train_examples": len(corpora.train[0]),
        "train_tokens": corpora.words,
        "dev_examples": len(corpora.dev[0]),
    }


def find_word_tokenizer(kind: str) -> type[WordTokenizer]:
    found = TOKENIZERS[kind]
    assert issubclass(found, WordTokenizer)
    return found
