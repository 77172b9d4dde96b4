"""Whole runs of a recipe with several seeds: their scores on every test, mean and spread, and how soon they were good.

    python bench/quality.py RECIPE --data DIR --out F.json [--seeds 1 2 3] [--goals 40 41] [a.b=c ...]

`data/...` in the recipe is looked up in DIR. Every seed is a run folder beside F.json, so that a bench that was stopped
goes on where it was; F.json is written after every seed, and further seeds, with the same settings on the same machine,
are added to it. Models are chosen by dev alone, as they always are.

`--goals` asks how many minutes of training it took until the first metric of the first test reached them: at every
validation the clock is read, and afterwards the model that the run folder held at that moment (the best by dev so far)
is scored. The minutes count all that happens between the first step and the validation, earlier validations too;
learning the vocabulary comes before them and is counted apart.
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
from dragoman.inference.loading import copy_weights, load, open_engine
from dragoman.inference.model_card import rank_validation, read_card, read_events
from dragoman.inference.translator import Translator
from dragoman.metrics.metrics import select_best_metric
from dragoman.recipe import read_recipe
from dragoman.run_dir import RunFolder, load_tensors, mean
from dragoman.training.checkpoint import best_file
from tell import ROOT, digest, metrics_of

ALL = "train.keep=1000000"  # the weights of every validation stay, so that they can be scored afterwards


class Bench:
    def __init__(self, recipe: Path, out: Path, data: Path | None, settings: Sequence[str], goals: Sequence[float]):
        self.recipe, self.out, self.settings, self.goals = recipe.resolve(strict=True), out, list(settings), goals
        self.folder = out.with_suffix("")
        self.folder.mkdir(parents=True, exist_ok=True)
        if data and not data.exists():
            raise SystemExit(f"there is no folder {data}; the head of the recipe says where its data come from")
        if data and not (self.folder / "data").exists():
            (self.folder / "data").symlink_to(data.resolve(strict=True))
        self.wall: dict[int, float] = {}  # seconds from start to end, vocabulary and imports and all
        self.found = self.earlier()

    def about(self) -> dict[str, Any]:
        """What seeds must share to be counted together."""
        return {
            "recipe": recipe_name(self.recipe),
            "digest": digest(self.recipe),
            "settings": self.settings,
            "machine": hardware(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def earlier(self) -> dict[int, dict[str, Any]]:
        """The seeds that are in F.json already, if what is wanted of them is there."""
        whole = json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else {}
        same = all(whole.get(name) == value for name, value in self.about().items())
        seeds = whole["seeds"] if same else {}
        return {int(seed): one for seed, one in seeds.items() if "curve" in one or not self.goals}

    def train(self, seed: int) -> bool:
        """Whether it came to its end. It tells its story to a log."""
        begun, fresh = time.monotonic(), not (self.folder / f"seed-{seed}").exists()
        settings = [*self.settings, f"train.seed={seed}", "data.cache=cache", *([ALL] if self.goals else [])]
        train = [sys.executable, "-m", "dragoman", "train", str(self.recipe), "--out", f"seed-{seed}", "--resume"]
        log = self.folder / f"seed-{seed}.log"
        print(f"seed {seed}: training, see {log}", file=sys.stderr, flush=True)
        with log.open("a", encoding="utf-8") as said:
            done = subprocess.run([*train, *settings], cwd=self.folder, stdout=said, stderr=said, check=False)
        if fresh:  # of a run that goes on, who knows
            self.wall[seed] = time.monotonic() - begun
        if done.returncode:
            print(f"seed {seed} failed: {log.read_text(encoding='utf-8')[-2000:]}", file=sys.stderr, flush=True)
        return done.returncode == 0

    def judge(self, seed: int) -> None:
        run = self.folder / f"seed-{seed}"
        about, state = read_card(run), RunFolder(run).state()
        self.found[seed] = {
            "parameters": about["parameters"],
            "pairs": sum(1 for corpus in RunFolder(run).recipe().data.train for _ in read_pairs(corpus)),
            "steps": state["step"],
            "best_step": about["validation"] and about["validation"]["step"],
            "train_seconds": round(state["seconds"], 1),
            "other_seconds": round(self.wall[seed] - state["seconds"], 1) if seed in self.wall else None,
            "tokens": state["tokens"],
            "flops": state["flops"],
            "peak_memory": state["peak_memory"],
            "skipped_steps": state["skipped"],
            "dev": about["validation"],
            "tests": list(scores(run)),
            **({"curve": list(curve(run))} if self.goals else {}),
        }
        self.write()

    def write(self) -> None:
        whole = json.dumps(self.summary(), indent=1, ensure_ascii=False) + "\n"
        self.out.write_text(whole, encoding="utf-8")

    def summary(self) -> dict[str, Any]:
        seeds = [self.found[seed] for seed in sorted(self.found)]
        tests = [spread([one["tests"][place] for one in seeds]) for place in range(len(seeds[0]["tests"]))]
        return {
            "date": date.today().isoformat(),
            **self.about(),
            "parameters": seeds[0]["parameters"],
            "pairs": seeds[0]["pairs"],
            "train_minutes": in_short([one["train_seconds"] / 60 for one in seeds]),
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


def scores(run: Path) -> Iterator[dict[str, Any]]:
    """What the run's model scores on each of its tests, with the search of its recipe."""
    for answered in predict_tests(load(run, engine="torch")):
        result = answered.result()
        result["test"] = short(answered.test.name)
        yield result


def short(test: str) -> str:
    """A corpus by the name of its first file."""
    return Path(test.split(" and ")[0]).name


def curve(run: Path) -> Iterator[dict[str, Any]]:
    """At every validation: the minutes so far, and what the model that was the best by dev until then scores."""
    folder, translator = RunFolder(run), load(run)
    assert isinstance(translator, Translator)
    recipe = translator.recipe
    metric = select_best_metric(recipe.train.metric, recipe.model.task, recipe.data.metrics)
    events = [event for event in read_events(folder.metrics) if event["event"] == "validate"]
    known: dict[tuple[int, ...], float] = {}  # by the checkpoints that a model is the mean of
    for number, event in enumerate(events, 1):
        ranked = sorted(events[:number], key=lambda one: rank_validation(one, recipe), reverse=True)
        steps = tuple(one["step"] for one in ranked[: max(recipe.train.average, 1)])
        if steps not in known:
            weights = mean(load_tensors(best_file(folder, step))[0] for step in steps)
            copy_weights(translator.model, weights, "a checkpoint", "its run")
            name = recipe.data.metrics[:1] or ("bleu",)
            fresh = replace(translator, engine=open_engine("torch", translator))
            answered = next(iter(predict_tests(fresh, EvaluationOptions(metrics=name))))
            known[steps] = answered.result()[name[0]]["value"]
        dev = {key: event[key] for key in ("loss", metric.name if metric else "loss") if key in event}
        yield {"step": event["step"], "minutes": event["seconds"] / 60, "dev": dev, "test": known[steps]}


def reached(seeds: Sequence[dict[str, Any]], goal: float) -> list[float | None]:
    """Of each seed the minutes until the goal; None where it never came there."""
    return [next((point["minutes"] for point in one["curve"] if point["test"] >= goal), None) for one in seeds]


def spread(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The scores of several seeds on one test."""
    names = [name for name, held in results[0].items() if isinstance(held, dict) and "value" in held]
    about = {"test": results[0]["test"], "lines": results[0]["lines"]}
    for name in names:
        values = [result[name]["value"] for result in results]
        about[name] = {**in_short(values), "values": values, "signature": results[0][name]["signature"]}
    return about


def in_short(values: Sequence[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "sd": deviation, "min": min(values), "max": max(values)}


def as_table(found: dict[str, Any]) -> str:
    """Markdown: a row for each test and metric; then how each is counted, and how long it took."""
    lines = ["| test | metric | mean | sd | least to most |", "|---|---|---|---|---|"]
    rows = [(test["test"], name, held) for test in found["tests"] for name, held in metrics_of(test).items()]
    for test, name, held in rows:
        span = f"{held['min']:.2f} to {held['max']:.2f}"
        lines.append(f"| {test} | {name} | {held['mean']:.2f} | {held['sd']:.2f} | {span} |")
    lines += ["", *dict.fromkeys(f"{name}: {held['signature']}" for _, name, held in rows)]
    minutes = found["train_minutes"]
    said = (
        f"\n{len(found['seeds'])} seeds, {found['parameters']:,} parameters, {minutes['mean']:.1f} minutes of training"
    )
    lines.append(f"{said} ({minutes['min']:.1f} to {minutes['max']:.1f}) on {found['machine']}, torch {found['torch']}")
    for goal, times in found.get("reached", {}).items():
        each = ", ".join("never" if one is None else f"{one:.2f}" for one in times)
        lines.append(f"minutes to {goal} on {found['tests'][0]['test']}: {each}")
    return "\n".join(lines)


def main() -> None:
    settings = [given for given in sys.argv[1:] if "=" in given and not given.startswith("-")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="F.json; run folders go beside it")
    parser.add_argument("--data", type=Path, help="the folder that the recipe calls data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--goals", type=float, nargs="+", default=[], help="scores whose time is wanted")
    parser.add_argument("--at-once", type=int, default=1, help="seeds at the same time; clocks mean little then")
    options = parser.parse_args([given for given in sys.argv[1:] if given not in settings])
    read_recipe(options.recipe, settings)  # what is wrong with it is said now
    bench = Bench(options.recipe, options.out, options.data, settings, options.goals)
    left = [seed for seed in options.seeds if seed not in bench.found]
    for begun in range(0, len(left), options.at_once):  # nothing is judged while others train: clocks count
        some = left[begun : begun + options.at_once]
        with ThreadPoolExecutor(options.at_once) as pool:
            whole = list(pool.map(bench.train, some))
        for seed, good in zip(some, whole, strict=True):
            if good:
                bench.judge(seed)
    if not bench.found:
        sys.exit(1)
    print(as_table(bench.summary()))
    sys.exit(not set(options.seeds) <= set(bench.found))


if __name__ == "__main__":
    main()
