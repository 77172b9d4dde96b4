"""A run's model card: what it is, what it was trained on, how long, and what it scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from dragoman.config import CorpusSettings
from dragoman.models.build import parameters
from dragoman.store import RunFolder, load_tensors
from dragoman.translator import load


def card(run: str | Path) -> dict[str, Any]:
    folder = RunFolder(run)
    translator = load(run, device="cpu")
    recipe = translator.recipe
    events = (
        [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
        if folder.metrics.exists()
        else []
    )
    trained = [event for event in events if event["event"] == "train"]
    validated = [event for event in events if event["event"] == "validate"]
    best = max(validated, key=lambda e: e["bleu"] if e["bleu"] is not None else -e["loss"], default=None)
    last = trained[-1] if trained else {}
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
        "tokens_read": last.get("tokens", 0),
        "train_seconds": last.get("seconds", 0.0),
        "tokens_per_second": last.get("tokens_per_second", 0),
        "validation": best,
    }


def corpus_name(corpus: CorpusSettings) -> str:
    if corpus.phrasebook:
        return f"phrasebook, {corpus.phrasebook} pairs, seed {corpus.seed}"
    names = [Path(name).name for name in (corpus.source, corpus.target, corpus.tsv, corpus.jsonl) if name]
    return " + ".join(names) + (f" (weight {corpus.weight:g})" if corpus.weight != 1 else "")


def card_table(about: dict[str, Any]) -> Group:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    model, best = about["model"], about["validation"]
    rows = {
        "run": f"{about['run']} (format {about['format']})",
        "model": f"{model['kind']}, {about['parameters']:,} parameters",
        "settings": ", ".join(f"{k} {v}" for k, v in model.items() if k != "kind"),
        "tokenizer": f"{about['tokenizer']['kind']}, {about['vocabulary']['source']:,} + {about['vocabulary']['target']:,} entries"
        + (" (one and the same)" if about["tokenizer"]["joint"] else ""),
        "trained on": "; ".join(about["data"]["train"]) + (f" ({about['direction']})" if about["direction"] else ""),
        "checked on": "; ".join(about["data"]["dev"]) or "nothing",
        "longest source": f"{about['longest_source']} tokens; longer input is split into sentences",
        "training": f"{about['steps']:,} steps, {about['tokens_read']:,} tokens, {about['train_seconds']:.0f} s, "
        f"{about['tokens_per_second']:,} tokens/s",
    }
    if best:
        said = f"loss {best['loss']:.4f}, perplexity {best['perplexity']:.2f}"
        rows["best on dev"] = said + (
            f", BLEU {best['bleu']:.2f} ({best['signature']})" if best["bleu"] is not None else ""
        )
    for name, value in rows.items():
        table.add_row(name, value)
    return Group(table)
