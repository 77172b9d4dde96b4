"""An invented comparison report, for tests of code that reads reports."""

from __future__ import annotations

from typing import Any

from dragoman.compare.measure import MEASUREMENT_VERSION


def measurements_of(quality: float) -> dict[str, Any]:
    bins: list[dict[str, Any]] = [{"low": 1, "high": 4}, {"low": 5, "high": None}]
    rows = [{**one, "lines": 10, "value": quality - n} for n, one in enumerate(bins)]
    curve = [{"step": s, "seconds": s / 2, "flops": s * 1e9, "loss": 5 / s} for s in (10, 20, 30)]
    return {
        "version": MEASUREMENT_VERSION,
        "parameters": 1000,
        "training": {
            "steps": 30, "seconds": 15.0, "tokens": 3000, "flops": 3e10, "peak_memory": 2**30, "device": "cpu",
            "tokens_per_second": 200.0, "skipped": 0, "curve": curve,
        },
        "tests": {
            "test": {
                "lines": 20, "seconds": 2.0, "scores": {"bleu": quality, "chrf": quality + 10}, "signatures": {},
                "lengths": rows, "distances": rows,
                "phenomena": {"agreement": {"right": 5, "total": 10, "percent": 50.0}},
            }
        },
        "speed": {"greedy": 20.0, "beam": 10.0, "width": 4},
        "gradient": {"target": [1.0, 0.5, 0.25], "source": [1.0, 0.1]},
    }  # fmt: skip


def report_of(*, models: int, seeds: int) -> dict[str, Any]:
    """Return a report on models that differ in depth and in residual connections."""
    from dragoman.compare.report import TEXTS, summarise_values

    made = []
    for number in range(models):
        runs = [{"seed": seed + 1, **measurements_of(20.0 + number + seed)} for seed in range(seeds)]
        numbers = {name: summarise_values([column.read(run) for run in runs]) for name, column in TEXTS.columns.items()}
        scores = {
            f"{m} test": summarise_values([run["tests"]["test"]["scores"][m] for run in runs]) for m in ("bleu", "chrf")
        }
        made.append({
            "name": f"model-{number}", "family": ("Transformer", "recurrent")[number % 2], "runs": runs, "failures": [],
            "settings": {"model": {"layers": 2 + number // 2, "residual": number % 2 == 0}},
            "numbers": numbers | scores,
        })  # fmt: skip
    about = {
        "dragoman": "0", "torch": "0", "devices": ["cpu"], "budget": {"steps": 30}, "seeds": list(range(1, seeds + 1)),
        "jobs": 1, "data": {}, "tests": ["test"], "metrics": ["bleu", "chrf"],
    }  # fmt: skip
    return {"title": "A <comparison>", "about": about, "warnings": [], "models": made, "questions": []}
