"""A run's model card: what it is, what it was trained on, how long, and what it scored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dragoman.config import CorpusSettings
from dragoman.loading import open_run
from dragoman.models.build import kind_of, parameters
from dragoman.score.metrics import METRICS, Metric, metric_named
from dragoman.store import RunFolder, load_tensors

KEYS = {"train": {"tokens", "seconds"}, "validate": {"loss", "perplexity"}}  # what a record needs


def card(run: str | Path) -> dict[str, Any]:
    folder = RunFolder(run)
    opened = open_run(run, device="cpu")
    recipe, target = opened.recipe, opened.tokenizers.target
    events = list(read_events(folder.metrics))
    trained = [event for event in events if event["event"] == "train"]
    validated = [event for event in events if event["event"] == "validate"]
    task = kind_of(recipe.model).task
    metric = metric_named(recipe.train.metric, task)
    best = max(validated, key=lambda event: goodness(event, metric), default=None)
    last = folder.state() or (trained[-1] if trained else {})  # a folder may come without its checkpoints
    tokens, seconds = last.get("tokens") or 0, last.get("seconds") or 0.0
    return {
        "run": str(folder.path),
        "format": int(folder.format.read_text()),
        "task": task,
        "parameters": parameters(opened.model),
        "model": recipe.model,
        "tokenizer": recipe.tokenizer.model_dump(),
        "vocabulary": {"source": opened.tokenizers.source.size, "target": target.size},
        "tags": [tag for tag in recipe.data.tags if tag],
        "direction": recipe.data.direction if any(c.phrasebook for c in recipe.data.train) else "",
        "data": {name: [corpus_name(c) for c in getattr(recipe.data, name)] for name in ("train", "dev")},
        "labels": target.pieces(range(target.size)) if task == "classify" else [],
        "teacher": folder.teacher(),
        "longest_source": opened.longest,
        "steps": int(load_tensors(folder.model)[1].get("step", 0)),  # none, where it was trained elsewhere
        "tokens_read": tokens,
        "train_seconds": seconds,
        "tokens_per_second": round(tokens / seconds) if seconds else 0,
        "validation": best,
    }


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl. A line that was torn when the machine went down is no record."""
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") in KEYS and KEYS[event["event"]] <= set(event):
                yield event


def goodness(event: dict[str, Any], metric: Metric | None) -> tuple[float, float]:
    """What the run went by, as it did: higher is better, equal scores are settled by the loss."""
    loss = -event["loss"] if event["loss"] is not None else -math.inf
    score = event.get(metric.name) if metric else None
    return (metric.goodness(score) if metric and score is not None else loss), loss


def corpus_name(corpus: CorpusSettings) -> str:
    if corpus.phrasebook:
        return f"phrasebook, {corpus.phrasebook} pairs, seed {corpus.seed}"
    weight = f" (weight {corpus.weight:g})" if corpus.weight != 1 else ""
    return " + ".join(Path(name).name for name in corpus.files) + corpus.chosen + weight


def taught_by(teacher: dict[str, Any]) -> dict[str, str]:
    """Whose student a run is, where it is one."""
    if not teacher:
        return {}
    good = sum(corpus["answers"] for corpus in teacher["corpora"])
    total = good + sum(sum(corpus["left_out"].values()) for corpus in teacher["corpora"])
    return {"student of": f"{teacher['teacher']}, {good:,} of {total:,} answers of a beam of {teacher['beam']}"}


def card_table(about: dict[str, Any]) -> Group:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    model, best = about["model"], about["validation"]
    two = about["task"] == "translate" and not about["tokenizer"]["joint"]
    sizes = list(about["vocabulary"].values())[: 2 if two else 1]
    rows = {
        "run": f"{about['run']} (format {about['format']})",
        "model": f"{model['kind']}, {about['parameters']:,} parameters",
        "settings": ", ".join(f"{k} {v}" for k, v in model.items() if k != "kind"),
        "tokenizer": f"{about['tokenizer']['kind']}, " + " + ".join(f"{size:,}" for size in sizes) + " entries",
        "trained on": "; ".join(about["data"]["train"]) + (f" ({about['direction']})" if about["direction"] else ""),
        **taught_by(about["teacher"]),
        "checked on": "; ".join(about["data"]["dev"]) or "nothing",
        **REACH[about["task"]](about),
        "training": f"{about['steps']:,} steps, {about['tokens_read']:,} tokens, {about['train_seconds']:.0f} s, "
        f"{about['tokens_per_second']:,} tokens/s",
    }
    if best and best["loss"] is not None:
        rows["best on dev"] = f"loss {best['loss']:.4f}, perplexity {best['perplexity']:.2f}"
        for metric in METRICS.values():
            if best.get(metric.name) is not None:
                rows["best on dev"] += f", {metric.shown} {best[metric.name]:.2f} ({best['signature']})"
        if "bits_per_character" in best:
            rows["best on dev"] += f", {best['bits_per_character']:.4f} bits per character"
    for name, value in rows.items():
        table.add_row(name, Text(value, overflow="fold"))
    return Group(table)


REACH: dict[str, Callable[[dict[str, Any]], dict[str, str]]] = {  # what a model of this task was made for
    "translate": lambda about: {
        "longest source": f"{about['longest_source']} tokens; longer input is split into sentences"
    },
    "classify": lambda about: {
        "labels": ", ".join(about["labels"]),
        "longest text": f"{about['longest_source']} tokens; longer input is read with a warning",
    },
    "generate": lambda about: {"context": f"{about['model']['context']} tokens"},
}
