"""Measure how translation quality grows with the number of training pairs, for statistical and neural systems.

    python bench/data_sizes.py --data DIR --out F.json [--systems transformer lstm smt] [--sizes 100 300] [--jobs 4]
    python bench/data_sizes.py --draw F.json G.json --figure curve.svg

DIR has Multi30k: train.en, train.de, val.en, val.de, test_2016_flickr.en and .de. Each seed shuffles the training
pairs and takes the first n of them, so the subsets of one seed are nested and all systems learn from the same pairs.
The seed also initializes the neural models. Systems are the recipes of recipes/translation/; with few pairs the neural
ones get fewer subwords and fewer steps (SMALL_DATA), and of all checkpoints the best on dev is kept, as in any
training. The development set has 1,014 pairs at every size.

Finished runs are in F.json and are not repeated. `--limit` stops starting new runs after so many seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.io import read_lines, write_text

ROOT = Path(__file__).parents[1]
RECIPES = {"transformer": "multi30k-tiny", "lstm": "multi30k-lstm", "smt": "multi30k-smt"}
NAMES = {"transformer": "Transformer", "lstm": "LSTM with attention", "smt": "phrase-based SMT"}
SIZES = (100, 300, 1_000, 3_000, 10_000, 29_000)
SMALL_DATA = {  # number of pairs -> subwords and steps of the neural systems, chosen once, before any test was scored
    100: (500, 800),
    300: (1000, 1000),
    1_000: (2000, 1500),
    3_000: (4000, 2500),
    10_000: (8000, 4500),
    29_000: (10000, 6000),
}
TEST = "test_2016_flickr"
METRICS = ("bleu_moses_de", "bleu", "chrf")


class Job(NamedTuple):
    """One system trained on one subset."""

    system: str
    size: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.system}-{self.size}-seed{self.seed}"


def write_subset(data: Path, folder: Path, size: int, seed: int) -> list[Path]:
    """Write the first `size` pairs of the training text as this seed shuffles it; return the two files."""
    files = [folder / f"train-{size}-seed{seed}.{side}" for side in ("en", "de")]
    if not all(file.exists() for file in files):
        sides = [list(read_lines(data / f"train.{side}")) for side in ("en", "de")]
        order = random.Random(seed).sample(range(len(sides[0])), size)
        for file, lines in zip(files, sides, strict=True):
            write_text(file, "".join(f"{lines[index]}\n" for index in order))
    return files


def list_settings(job: Job, data: Path, subset: Sequence[Path]) -> list[str]:
    """Return the overrides of the recipe for this subset and seed."""
    dev = [data / f"val.{side}" for side in ("en", "de")]
    settings = [
        f"data.train={{source: {subset[0]}, target: {subset[1]}}}",
        f"data.dev={{source: {dev[0]}, target: {dev[1]}}}",
        "data.test=[]",
        f"train.seed={job.seed}",
    ]
    if job.system != "smt":
        subwords, steps = SMALL_DATA[job.size]
        schedule = {"steps": steps, "warmup": steps // 7, "validate_every": steps // 10}
        settings += [f"tokenizer.size={subwords}", *(f"train.{name}={value}" for name, value in schedule.items())]
    return settings


def run_job(job: Job, data: Path, folder: Path) -> dict[str, Any] | None:
    """Train and evaluate one system; return its scores, or None if a command failed."""
    subset = write_subset(data, folder, job.size, job.seed)
    run, log = folder / job.name, folder / f"{job.name}.log"
    recipe = ROOT / "recipes" / "translation" / f"{RECIPES[job.system]}.yaml"
    cache = f"data.cache={folder / 'cache'}"
    train = ["train", recipe, "--out", run, "--resume", *list_settings(job, data, subset), cache]
    test = ["--source", data / f"{TEST}.en", "--reference", data / f"{TEST}.de"]
    evaluate = ["evaluate", run, *test, *(part for name in METRICS for part in ("--metric", name)), "--json"]
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as output:
        for command in (train, evaluate):
            arguments = [sys.executable, "-m", "dragoman", *map(str, command)]
            done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=output, text=True, check=False)
            if done.returncode:
                print(f"{job.name} failed; see {log}", file=sys.stderr, flush=True)
                return None
    found = json.loads(done.stdout.splitlines()[-1])
    scores = {name: found[name]["value"] for name in METRICS}
    print(f"{job.name}: {scores} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return {**job._asdict(), "scores": scores, "seconds": round(time.monotonic() - start, 1)}


def measure(options: argparse.Namespace) -> None:
    """Run all jobs that are not in the output file yet, several at a time, and write the file after each."""
    out: Path = options.out
    folder = out.with_suffix("").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    known = {(one["system"], one["size"], one["seed"]) for one in found}
    order = [Job(*parts) for size in options.sizes[::-1] for seed in options.seeds for parts in
             ((system, size, seed) for system in options.systems)]  # fmt: skip
    begun = time.monotonic()

    def work(job: Job) -> None:
        if time.monotonic() - begun < options.limit and (result := run_job(job, options.data.resolve(), folder)):
            found.append(result)
            write_text(out, json.dumps(sorted(found, key=str), indent=1) + "\n")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, [job for job in order if job not in known]))


def read_series(files: Sequence[Path], metric: str) -> Iterator[tuple[str, dict[int, list[float]]]]:
    """Yield each system with its scores by number of pairs, one score per seed."""
    series: dict[str, dict[int, list[float]]] = {system: defaultdict(list) for system in RECIPES}
    for file in files:
        for one in json.loads(file.read_text(encoding="utf-8")):
            series[one["system"]][one["size"]].append(one["scores"][metric])
    yield from ((system, scores) for system, scores in series.items() if scores)


def draw(files: Sequence[Path], figure: Path, metric: str) -> None:
    """Draw the mean of each system, and the range of its seeds, over the number of pairs; print them as a table."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dragoman"}
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
    sizes: list[int] = sorted({size for _, scores in read_series(files, metric) for size in scores})
    print("| pairs | " + " | ".join(f"{size:,}" for size in sizes) + " |\n|---|" + "---|" * len(sizes))
    for system, scores in read_series(files, metric):
        x = sorted(scores)
        means = [sum(scores[size]) / len(scores[size]) for size in x]
        (line,) = axis.plot(x, means, marker="o", markersize=4, label=NAMES[system])
        axis.fill_between(x, [min(scores[s]) for s in x], [max(scores[s]) for s in x], alpha=0.18, lw=0)
        axis.annotate(
            NAMES[system], (x[-1], means[-1]), (6, 0), textcoords="offset points", color=line.get_color(), va="center"
        )
        cells = {
            size: f"{mean:.1f} ± {(max(scores[size]) - min(scores[size])) / 2:.1f}" for size, mean in zip(x, means)
        }
        print(f"| {NAMES[system]} | " + " | ".join(cells.get(size, "") for size in sizes) + " |")
    axis.set(xscale="log", xlabel="training pairs", ylabel="BLEU on test_2016", xlim=(80, 160_000), ylim=(0, None))
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    canvas.savefig(figure, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--systems", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), choices=SIZES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1))
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no run is started")
    parser.add_argument("--draw", nargs="+", type=Path, default=[], help="result files to draw, instead of measuring")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--metric", default=METRICS[0])
    options = parser.parse_args()
    if options.draw:
        draw(options.draw, options.figure, options.metric)
    else:
        measure(options)


if __name__ == "__main__":
    main()
