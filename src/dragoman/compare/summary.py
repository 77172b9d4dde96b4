"""From judgements to one record of the whole comparison: each model's numbers over its seeds.

The record is all that the page shows, and what report.json holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dragoman.compare.judge import metrics
from dragoman.compare.plan import Planned
from dragoman.config import LIMITS, Recipe

Judgement = Mapping[str, Any]
SAME_COST = 1.05  # ratio of FLOPs per token up to which two runs should train equally fast
SAME_SPEED = 1.2  # ratio of tokens per second up to which two such runs had about the same share of the machine
COLUMNS: dict[str, Callable[[Judgement], float | None]] = {
    "parameters": lambda j: j["parameters"],
    "steps": lambda j: j["training"]["steps"],
    "tokens_per_second": lambda j: j["training"]["tokens_per_second"],
    "greedy_per_second": lambda j: j["speed"]["greedy"] if "speed" in j else None,
    "beam_per_second": lambda j: j["speed"]["beam"] if "speed" in j else None,
    "peak_memory": lambda j: j["training"]["peak_memory"],
    "train_seconds": lambda j: j["training"]["seconds"],
    "flops": lambda j: j["training"]["flops"],
    "dev_loss": lambda j: min((p["loss"] for p in j["training"]["curve"] if p["loss"] is not None), default=None),
}

PARTS: dict[str, tuple[object, str]] = {  # of a Transformer, by the setting and its value that leaves them out
    "position": ("none", "positions"),
    "norm": ("none", "normalisation"),
    "residual": (False, "residual connections"),
    "projections": (False, "projections"),
    "scaled": (False, "score scaling"),
    "activation": ("none", "activation"),
}


def summarised(
    runs: Sequence[Planned], judgements: Mapping[Path, Judgement], failures: Mapping[Path, str], *, jobs: int
) -> dict[str, Any]:
    names = list(dict.fromkeys(run.name for run in runs))
    first = runs[0].recipe
    trained = {
        f"{run.name} (seed {run.seed})": judgements[run.folder]["training"] for run in runs if run.folder in judgements
    }
    return {
        "about": {
            "dragoman": version("dragoman"),
            "torch": torch.__version__,
            "devices": sorted({j["training"]["device"] for j in judgements.values()}),
            "budget": {name: getattr(first.train, name) for name in LIMITS if getattr(first.train, name)},
            "seeds": sorted({run.seed for run in runs}),
            "jobs": jobs,
            "data": first.data.model_dump(mode="json", exclude={"cache"}, exclude_defaults=True),
            "tests": test_names(judgements),
            "metrics": list(metrics(first)),
        },
        "warnings": unfair_budgets(trained) if first.train.minutes else [],
        "models": [model(name, [run for run in runs if run.name == name], judgements, failures) for name in names],
    }


def unfair_budgets(trained: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a warning if runs that cost the same per token got unequal training in equal time.

    Their speeds differ because of the machine, not because of the models, so their scores cannot be compared.
    """
    runs = {name: run for name, run in trained.items() if run["tokens"] and run["seconds"]}
    cost = {name: run["flops"] / run["tokens"] for name, run in runs.items()}
    speed = {name: run["tokens_per_second"] or run["tokens"] / run["seconds"] for name, run in runs.items()}
    steps = {name: run["steps"] for name, run in runs.items()}
    groups: list[list[str]] = []
    for name in sorted(cost, key=lambda name: cost[name]):
        if not groups or cost[name] > SAME_COST * cost[groups[-1][0]]:
            groups.append([])
        groups[-1].append(name)
    ends = [(min(group, key=speed.__getitem__), max(group, key=speed.__getitem__)) for group in groups]
    unfair = [(a, b) for a, b in ends if speed[b] > SAME_SPEED * speed[a] and steps[a] != steps[b]]
    if not unfair:
        return []
    slow, fast = max(unfair, key=lambda pair: speed[pair[1]] / speed[pair[0]])
    others = f" So do the speeds in {len(unfair) - 1} more groups of runs." if len(unfair) > 1 else ""
    return [
        f"The budget in minutes is unfair: {slow} trained at {speed[slow]:,.0f} tokens/s ({steps[slow]:,} steps) and "
        f"{fast} at {speed[fast]:,.0f} ({steps[fast]:,} steps). Both need as many FLOPs per token, so these speeds "
        f"differ because of other work on the machine.{others} Set the budget in steps or FLOPs, such as "
        f"train.minutes=0 train.steps={steps[fast]}."
    ]


def test_names(judgements: Mapping[Path, Judgement]) -> list[str]:
    return list(next(iter(judgements.values()))["tests"])


def model(
    name: str, runs: Sequence[Planned], judgements: Mapping[Path, Judgement], failures: Mapping[Path, str]
) -> dict[str, Any]:
    mine = [judgements[run.folder] for run in runs if run.folder in judgements]
    recipe = runs[0].recipe
    return {
        "name": name,
        "family": family(recipe),
        "missing": missing_parts(recipe),
        "settings": recipe.model_dump(mode="json", include={"model", "tokenizer", "train", "search"}),
        "numbers": {column: spread([number(j) for j in mine]) for column, number in COLUMNS.items()}
        | {
            f"{metric} {test}": spread([j["tests"][test]["scores"][metric] for j in mine])
            for test in (mine[0]["tests"] if mine else {})
            for metric in metrics(recipe)
        },
        "runs": [{"seed": run.seed, **judgements[run.folder]} for run in runs if run.folder in judgements],
        "failures": [{"seed": run.seed, "why": failures[run.folder]} for run in runs if run.folder in failures],
    }


def family(recipe: Recipe) -> str:
    """Return the group that a model is shown in: recurrent models and Transformers by their attention."""
    model = recipe.model
    kind, attention = str(model["kind"]), str(model.get("attention", ""))
    if kind == "rnn":
        return "recurrent, one vector" if attention in ("none", "mean") else "recurrent, attention"
    if kind != "transformer":
        return kind
    if missing_parts(recipe):
        return "Transformer, ablated"
    return "Transformer" if attention == "full" else "Transformer, efficient attention"


def missing_parts(recipe: Recipe) -> list[str]:
    """Return what a Transformer was built without."""
    model = recipe.model
    if model["kind"] != "transformer":
        return []
    return [part for setting, (without, part) in PARTS.items() if model[setting] == without]


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, lowest and highest over the seeds; nothing where a seed has no number."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return {"mean": sum(known) / len(known), "low": min(known), "high": max(known)}
