"""A run's model card: what it is, what it was trained on, how long, and what it scored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dragoman.config import CorpusSettings
from dragoman.models.build import parameters
from dragoman.store import RunFolder, load_tensors
from dragoman.translator import load

KEYS = {"train": {"tokens", "seconds"}, "validate": {"loss", "perplexity", "bleu", "signature"}}  # what a record needs


def card(run: str | Path) -> dict[str, Any]:
    folder = RunFolder(run)
    translator = load(run, device="cpu")
    recipe = translator.recipe
    events = list(read_events(folder.metrics))
    trained = [event for event in events if event["event"] == "train"]
    validated = [event for event in events if event["event"] == "validate"]
    best = max(validated, key=lambda event: goodness(event, recipe.train.metric), default=None)
    last = folder.state() or (trained[-1] if trained else {})  # a folder may come without its checkpoints
    tokens, seconds = last.get("tokens") or 0, last.get("seconds") or 0.0
    return {
        "run": str(folder.path),
        "format": int(folder.format.read_text()),
        "parameters": parameters(translator.model),
        "model": recipe.model,
        "tokenizer": recipe.tokenizer.model_dump(),
        "vocabulary": {"source": translator.tokenizers.source.size, "target": translator.tokenizers.target.size},
        "direction": recipe.data.direction if any(c.phrasebook for c in recipe.data.train) else "",
        "data": {name: [corpus_name(c) for c in getattr(recipe.data, name)] for name in ("train", "dev")},
        "longest_source": translator.longest,
        "steps": int(load_tensors(folder.model)[1]["step"]),
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


def goodness(event: dict[str, Any], metric: str) -> tuple[float, float]:
    """What the run went by, as it did: higher is better, equal BLEU is settled by the loss."""
    loss = -event["loss"] if event["loss"] is not None else -math.inf
    return (event["bleu"] if metric == "bleu" and event["bleu"] is not None else loss), loss


def corpus_name(corpus: CorpusSettings) -> str:
    if corpus.phrasebook:
        return f"phrasebook, {corpus.phrasebook} pairs, seed {corpus.seed}"
    names = [Path(name).name for name in (corpus.source, corpus.target, corpus.tsv, corpus.jsonl) if name]
    return " + ".join(names) + (f" (weight {corpus.weight:g})" if corpus.weight != 1 else "")


def card_table(about: dict[str, Any]) -> Group:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    model, best = about["model"], about["validation"]
    sizes = list(about["vocabulary"].values())[: 1 if about["tokenizer"]["joint"] else 2]
    rows = {
        "run": f"{about['run']} (format {about['format']})",
        "model": f"{model['kind']}, {about['parameters']:,} parameters",
        "settings": ", ".join(f"{k} {v}" for k, v in model.items() if k != "kind"),
        "tokenizer": f"{about['tokenizer']['kind']}, " + " + ".join(f"{size:,}" for size in sizes) + " entries",
        "trained on": "; ".join(about["data"]["train"]) + (f" ({about['direction']})" if about["direction"] else ""),
        "checked on": "; ".join(about["data"]["dev"]) or "nothing",
        "longest source": f"{about['longest_source']} tokens; longer input is split into sentences",
        "training": f"{about['steps']:,} steps, {about['tokens_read']:,} tokens, {about['train_seconds']:.0f} s, "
        f"{about['tokens_per_second']:,} tokens/s",
    }
    if best and best["loss"] is not None:
        rows["best on dev"] = f"loss {best['loss']:.4f}, perplexity {best['perplexity']:.2f}"
        if best["bleu"] is not None:
            rows["best on dev"] += f", BLEU {best['bleu']:.2f} ({best['signature']})"
    for name, value in rows.items():
        table.add_row(name, Text(value, overflow="fold"))
    return Group(table)
