"""Train a recipe with several seeds and report its scores on every test: mean, spread, and time to given scores.

    python bench/quality.py RECIPE --data DIR --out F.json [--seeds 1 2 3] [--goals 40 41] [a.b=c ...]

Paths `data/...` in the recipe are looked up in DIR. Every seed has a run folder next to F.json, so a benchmark that was
stopped resumes. F.json is written after every seed, and further seeds with the same settings on the same machine are
added to it. Models are selected on the development set, as in any training.

`--goals` are scores of the first metric on the first test, for which the minutes of training are reported. At every
validation the elapsed time is recorded, and after training the model that was the best on dev at that time is scored.
The minutes include everything after the first step, earlier validations too; preparing the vocabulary is counted
separately.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from dragoman.data.corpus import read_pairs
from dragoman.evaluation.systems import EvaluationOptions, predict_tests
from dragoman.hardware import cpu_name
from dragoman.inference.loading import ENGINES, copy_weights, load
from dragoman.inference.model_card import rank_validation, read_card, read_events
from dragoman.inference.translator import Translator
from dragoman.metrics.metrics import choose_checkpoint_metric
from dragoman.recipe import read_recipe
from dragoman.run_dir import RunFolder, average_weights, load_tensors
from dragoman.training.checkpoint import best_file
from publish_results import ROOT, hash_recipe, select_metrics

KEEP_ALL = "train.keep=1000000"  # keep the weights of every validation, to score them afterwards


class Bench:
    def __init__(self, recipe: Path, out: Path, data: Path | None, settings: Sequence[str], goals: Sequence[float]):
        self.recipe, self.out, self.settings, self.goals = recipe.resolve(strict=True), out, list(settings), goals
        self.folder = out.with_suffix("")
        self.folder.mkdir(parents=True, exist_ok=True)
        if data and not data.exists():
            raise SystemExit(f"there is no folder {data}; the head of the recipe says where its data come from")
        if data and not (self.folder / "data").exists():
            (self.folder / "data").symlink_to(data.resolve(strict=True))
        self.wall: dict[int, float] = {}  # seed -> seconds of the whole process, with imports and vocabulary
        self.found = self.read_earlier()

    def about(self) -> dict[str, Any]:
        """Return what must be equal for seeds to be counted together."""
        return {
            "recipe": recipe_name(self.recipe),
            "digest": hash_recipe(self.recipe),
            "settings": self.settings,
            "machine": hardware(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def read_earlier(self) -> dict[int, dict[str, Any]]:
        """Return the results by seed that are already in F.json, if they belong to the same settings."""
        whole = json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else {}
        same = all(whole.get(name) == value for name, value in self.about().items())
        seeds = whole["seeds"] if same else {}
        return {int(seed): one for seed, one in seeds.items() if "curve" in one or not self.goals}

    def train(self, seed: int) -> bool:
        """Train with this seed, with output to a log file; return whether it succeeded."""
        start, fresh = time.monotonic(), not (self.folder / f"seed-{seed}").exists()
        settings = [*self.settings, f"train.seed={seed}", "data.cache=cache", *([KEEP_ALL] if self.goals else [])]
        train = [sys.executable, "-m", "dragoman", "train", str(self.recipe), "--out", f"seed-{seed}", "--resume"]
        log = self.folder / f"seed-{seed}.log"
        print(f"seed {seed}: training, see {log}", file=sys.stderr, flush=True)
        with log.open("a", encoding="utf-8") as output:
            done = subprocess.run([*train, *settings], cwd=self.folder, stdout=output, stderr=output, check=False)
        if fresh:  # the total time of a resumed run is unknown
            self.wall[seed] = time.monotonic() - start
        if done.returncode:
            print(f"seed {seed} failed: {log.read_text(encoding='utf-8')[-2000:]}", file=sys.stderr, flush=True)
        return done.returncode == 0

    def score(self, seed: int) -> None:
        """Score a finished run and add it to the results."""
        run = self.folder / f"seed-{seed}"
        about, state = read_card(run), RunFolder(run).load_state()
        self.found[seed] = {
            "parameters": about["parameters"],
            "pairs": sum(1 for corpus in RunFolder(run).load_recipe().data.train for _ in read_pairs(corpus)),
            "steps": state["step"],
            "best_step": about["validation"] and about["validation"]["step"],
            "train_seconds": round(state["seconds"], 1),
            "other_seconds": round(self.wall[seed] - state["seconds"], 1) if seed in self.wall else None,
            "tokens": state["tokens"],
            "flops": state["flops"],
            "peak_memory": state["peak_memory"],
            "skipped_steps": state["skipped"],
            "dev": about["validation"],
            "tests": list(score_tests(run)),
            **({"curve": list(score_curve(run))} if self.goals else {}),
        }
        self.write()

    def write(self) -> None:
        whole = json.dumps(self.summary(), indent=1, ensure_ascii=False) + "\n"
        self.out.write_text(whole, encoding="utf-8")

    def summary(self) -> dict[str, Any]:
        seeds = [self.found[seed] for seed in sorted(self.found)]
        tests = [summarize_test([one["tests"][place] for one in seeds]) for place in range(len(seeds[0]["tests"]))]
        return {
            "date": date.today().isoformat(),
            **self.about(),
            "parameters": seeds[0]["parameters"],
            "pairs": seeds[0]["pairs"],
            "train_minutes": summarize([one["train_seconds"] / 60 for one in seeds]),
            "tests": tests,
            **({"reached": {f"{goal:g}": reached(seeds, goal) for goal in self.goals}} if self.goals else {}),
            "seeds": {str(seed): self.found[seed] for seed in sorted(self.found)},
        }


def recipe_name(recipe: Path) -> str:
    return str(recipe.relative_to(ROOT)) if recipe.is_relative_to(ROOT) else recipe.name


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} cores"


def score_tests(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the scores of a run on each of its tests, decoded as its recipe says."""
    for answered in predict_tests(load(run, engine="torch")):
        result = answered.result()
        result["test"] = shorten_name(answered.test.name)
        yield result


def shorten_name(test: str) -> str:
    """Return the name of the first file of a corpus."""
    return Path(test.split(" and ")[0]).name


def score_curve(run: Path) -> Iterator[dict[str, Any]]:
    """Yield for every validation the minutes so far and the test score of the best model on dev until then."""
    folder, translator = RunFolder(run), load(run)
    assert isinstance(translator, Translator)
    recipe = translator.recipe
    metric = choose_checkpoint_metric(recipe.train.metric, recipe.model.task, recipe.data.metrics)
    events = [event for event in read_events(folder.metrics_file) if event["event"] == "validate"]
    known: dict[tuple[int, ...], float] = {}  # steps of the averaged checkpoints -> score
    for number, event in enumerate(events, 1):
        ranked = sorted(events[:number], key=lambda one: rank_validation(one, recipe), reverse=True)
        steps = tuple(one["step"] for one in ranked[: max(recipe.train.average, 1)])
        if steps not in known:
            weights = average_weights(load_tensors(best_file(folder, step))[0] for step in steps)
            copy_weights(translator.model, weights, "a checkpoint", "its run")
            name = recipe.data.metrics[:1] or ("bleu",)
            fresh = replace(translator, engine=ENGINES["torch"](translator, None))
            answered = next(iter(predict_tests(fresh, EvaluationOptions(metrics=name))))
            known[steps] = answered.result()[name[0]]["value"]
        dev = {key: event[key] for key in ("loss", metric.name if metric else "loss") if key in event}
        yield {"step": event["step"], "minutes": event["seconds"] / 60, "dev": dev, "test": known[steps]}


def reached(seeds: Sequence[dict[str, Any]], goal: float) -> list[float | None]:
    """Return for each seed the minutes until the goal was reached, or None."""
    return [next((point["minutes"] for point in one["curve"] if point["test"] >= goal), None) for one in seeds]


def summarize_test(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the scores of several seeds on one test."""
    names = [name for name, held in results[0].items() if isinstance(held, dict) and "value" in held]
    about = {"test": results[0]["test"], "lines": results[0]["lines"]}
    for name in names:
        values = [result[name]["value"] for result in results]
        about[name] = {**summarize(values), "values": values, "signature": results[0][name]["signature"]}
    return about


def summarize(values: Sequence[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "sd": deviation, "min": min(values), "max": max(values)}


def as_table(found: dict[str, Any]) -> str:
    """Return a Markdown table with a row per test and metric, followed by signatures and training times."""
    lines = ["| test | metric | mean | sd | range |", "|---|---|---|---|---|"]
    rows = [(test["test"], name, held) for test in found["tests"] for name, held in select_metrics(test).items()]
    for test, name, held in rows:
        span = f"{held['min']:.2f} to {held['max']:.2f}"
        lines.append(f"| {test} | {name} | {held['mean']:.2f} | {held['sd']:.2f} | {span} |")
    lines += ["", *dict.fromkeys(f"{name}: {held['signature']}" for _, name, held in rows)]
    minutes = found["train_minutes"]
    runs = (
        f"\n{len(found['seeds'])} seeds, {found['parameters']:,} parameters, {minutes['mean']:.1f} minutes of training"
    )
    lines.append(f"{runs} ({minutes['min']:.1f} to {minutes['max']:.1f}) on {found['machine']}, torch {found['torch']}")
    for goal, times in found.get("reached", {}).items():
        each = ", ".join("never" if one is None else f"{one:.2f}" for one in times)
        lines.append(f"minutes to {goal} on {found['tests'][0]['test']}: {each}")
    return "\n".join(lines)


def main() -> None:
    settings = [given for given in sys.argv[1:] if "=" in given and not given.startswith("-")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="F.json; run folders are created next to it")
    parser.add_argument("--data", type=Path, help="the folder for paths data/... in the recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--goals", type=float, nargs="+", default=[], help="scores to report the time for")
    parser.add_argument(
        "--at-once", type=int, default=1, help="seeds to train at the same time; times are then not comparable"
    )
    options = parser.parse_args([given for given in sys.argv[1:] if given not in settings])
    read_recipe(options.recipe, settings)  # report errors in the recipe before training
    bench = Bench(options.recipe, options.out, options.data, settings, options.goals)
    left = [seed for seed in options.seeds if seed not in bench.found]
    for first in range(0, len(left), options.at_once):  # no scoring during training, which is timed
        some = left[first : first + options.at_once]
        with ThreadPoolExecutor(options.at_once) as pool:
            succeeded = list(pool.map(bench.train, some))
        for seed, good in zip(some, succeeded, strict=True):
            if good:
                bench.score(seed)
    if not bench.found:
        sys.exit(1)
    print(as_table(bench.summary()))
    sys.exit(not set(options.seeds) <= set(bench.found))


if __name__ == "__main__":
    main()
