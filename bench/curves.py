"""Compare the loss curves of the fast training path with those of the reference path, over several seeds.

    python bench/curves.py --out runs/curves --keep bench/results/2026-11-15-curves-h200
    python bench/curves.py --recipe recipes/multi30k-en-de.yaml --set data.train.source=F ... --out runs/curves
    python bench/curves.py --again bench/results/2026-11-15-curves-h200.json

The same recipe is trained on two paths: "fast", as it is, and "readable", with the reference attention, the plain loss,
float32 and no compilation. Curves are smoothed over --smooth steps. The criterion: at every step, the means of the two
paths differ by less than the spread of seeds, the distance between the lowest and the highest readable run. The spread
is smoothed over five times as many steps, because three curves cross by chance. The exit code is 1 if it is violated.
With three seeds and many steps, the criterion can also be violated by chance. A control estimates how often: with
further seeds of the readable path, for each choice of three seeds, the mean of the others is tested in the same way.
The control is reported and drawn, and does not change the exit code.

On a GPU, both paths use CUDA graphs (training/step.py) and the dropout kernel (kernels/rowwise_triton.py), which have
no setting to switch them off, so this benchmark does not test them.

Finished runs are not repeated and interrupted ones are resumed. --keep writes a JSON file, a short report and a figure
(which needs `pip install 'dragoman[figures]'`); --again makes report and figure from the JSON file.

Shapes   P paths   S seeds   K points of a curve   C choices of seeds
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
PATHS: dict[str, list[str]] = {
    "readable": ["model.kernel=reference", "train.loss=plain", "train.precision=float32", "train.compile=false"],
    "fast": [],
}
COLOURS = {"readable": "#3465a4", "fast": "#ce5c00"}
OTHER_LIMITS = ("epochs", "minutes", "flops", "patience")  # limits of a run other than train.steps
LOG_EVERY = 10  # steps between two points of a curve
SPREAD_SMOOTHING = 5  # times the smoothing of the curves
Curves = NDArray[np.float64]


class Run(NamedTuple):
    path: str
    seed: int
    folder: Path

    def settings(self, options: argparse.Namespace) -> list[str]:
        """Return the overrides of this run. It ends after --steps steps, whatever limits the recipe has."""
        ends = [f"train.steps={options.steps}", *(f"train.{end}=0" for end in OTHER_LIMITS)]
        validation = [f"train.validate_every={options.steps}", "train.validate_lines=0", "train.metric=loss"]
        other = [f"train.save_every={options.steps}", f"train.log_every={LOG_EVERY}", f"train.seed={self.seed}"]
        return [*ends, *validation, *other, *options.set, *PATHS[self.path]]

    def train(self, options: argparse.Namespace) -> str:
        """Train the run; return the last line of its log."""
        command = [sys.executable, "-m", "dragoman", "train", options.recipe, "--out", str(self.folder), "--resume"]
        done = subprocess.run([*command, *self.settings(options)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{self.folder} failed:\n{done.stderr[-2000:]}")
        return f"{self.path}, seed {self.seed}: {done.stderr.splitlines()[-1]}"

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def train_all(options: argparse.Namespace) -> dict[str, Any]:
    """Train all runs, --at-once at a time; return the losses that the trainer logged."""
    seeds = {"readable": [*options.seeds, *options.control], "fast": options.seeds}
    runs = [Run(path, seed, options.out / f"{path}-{seed}") for path in PATHS for seed in seeds[path]]
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.at_once) as pool:
        for line in pool.map(lambda run: run.train(options), runs):
            print(line, flush=True)
    logged = {run: run.events("train") for run in runs}
    losses = {run: [round(event["loss"], 5) for event in events] for run, events in logged.items()}
    control, runs = (
        [run for run in runs if run.seed in options.control],
        [run for run in runs if run.seed in options.seeds],
    )
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{options.machine}, Python {platform.python_version()}",
        "recipe": Path(options.recipe).name,
        "settings": [item for item in options.set if not item.startswith("data.")],  # without paths of this machine
        "readable": PATHS["readable"],
        "seeds": options.seeds,
        "steps": [event["step"] for event in logged[runs[0]]],
        "loss": {p: [losses[r] for r in runs if r.path == p] for p in PATHS},
        "control": {"seeds": options.control, "loss": [losses[r] for r in control]},
        "dev_loss": {p: [r.events("validate")[-1]["loss"] for r in runs if r.path == p] for p in PATHS},
        "tokens_per_second": {
            p: [int(np.median([e["tokens_per_second"] for e in logged[r]])) for r in runs if r.path == p] for p in PATHS
        },
    }
    return found


def smooth_curves(values: Curves, points: int) -> Curves:
    """Return the moving average over `points` points along the last axis, over fewer at the ends."""
    ones = np.ones(min(points, values.shape[-1]))
    count_K = np.convolve(np.ones(values.shape[-1]), ones, "same")
    return np.apply_along_axis(lambda row: np.convolve(row, ones, "same") / count_K, -1, values)


class Comparison(NamedTuple):
    step_K: Curves
    curves: dict[str, Curves]  # path -> smoothed losses, one row per seed
    differs_K: Curves  # difference between the means of the two paths
    spread_K: Curves  # distance between the lowest and the highest readable seed
    pair: float  # largest difference between two runs of the same seed
    control_CK: Curves  # like ratio_K, for each choice of readable seeds against the other readable seeds

    @property
    def ratio_K(self) -> Curves:
        return self.differs_K / self.spread_K

    @property
    def max_ratio(self) -> float:
        return float(self.ratio_K.max())

    @property
    def passed(self) -> bool:
        return self.max_ratio < 1

    def __str__(self) -> str:
        at, largest = int(self.ratio_K.argmax()), int(self.differs_K.argmax())
        verdict = "less" if self.passed else "MORE"
        text = (
            f"The two paths differ {verdict} than seeds do: by at most {self.max_ratio:.2f} of their spread, at step "
            f"{self.step_K[at]:.0f}, where the means differ by {self.differs_K[at]:.4f} nats and seeds by "
            f"{self.spread_K[at]:.4f}. The largest difference of the means is {self.differs_K[largest]:.4f} (seeds: "
            f"{self.spread_K[largest]:.4f}), the average one {self.differs_K.mean():.4f} (seeds: "
            f"{self.spread_K.mean():.4f}); two runs of one seed are at most {self.pair:.4f} apart."
        )
        if len(self.control_CK):
            most_C = self.control_CK.max(1)
            text += (
                f" The control: of {len(most_C)} choices of seeds of the readable path, against its others, "
                f"{(most_C >= 1).sum()} break the same rule and {(most_C > self.max_ratio).sum()} "
                f"by more than the two paths do. At most they differ by {most_C.min():.2f} to {most_C.max():.2f} of "
                f"their spread (median {np.median(most_C):.2f}), on average over the curve by "
                f"{self.control_CK.mean():.2f}, and the two paths by {self.ratio_K.mean():.2f}."
            )
        return text


def compare(found: dict[str, Any], smooth: int) -> Comparison:
    points = max(smooth // LOG_EVERY, 1)
    steps = np.array(found["steps"], dtype=float)
    curves = {path: smooth_curves(np.array(rows), points) for path, rows in found["loss"].items()}
    readable_SK, fast_SK = curves["readable"], curves["fast"]

    def spread(of_SK: Curves) -> Curves:
        return smooth_curves(np.ptp(of_SK, axis=0), SPREAD_SMOOTHING * points)

    others = found.get("control", {}).get("loss", [])
    all_SK = np.concatenate([readable_SK, smooth_curves(np.array(others), points)]) if others else readable_SK
    control = []
    for chosen in combinations(range(len(all_SK)), len(readable_SK)) if others else ():
        own_SK, rest_SK = all_SK[list(chosen)], np.delete(all_SK, chosen, axis=0)
        control.append(np.abs(rest_SK.mean(0) - own_SK.mean(0)) / spread(own_SK))
    return Comparison(
        steps,
        curves,
        differs_K=np.abs(fast_SK.mean(0) - readable_SK.mean(0)),
        spread_K=spread(readable_SK),
        pair=float(np.abs(fast_SK - readable_SK).max()),
        control_CK=np.array(control),
    )


def report(found: dict[str, Any], made: Comparison) -> str:
    lines = [
        f"# Loss curves of the fast and the readable path, {found['date']}",
        f"{found['machine']}; `{found['recipe']}` {' '.join(found['settings'])}, {found['steps'][-1]:,} steps, seeds "
        f"{', '.join(map(str, found['seeds']))}. Readable: `{' '.join(found['readable'])}`. How: `bench/curves.py`.",
        str(made),
        "| path | loss at the end, by seed | dev loss | tokens/s |\n|---|---|---|---|",
    ]
    for path, curve_SK in made.curves.items():
        cells = (
            ", ".join(f"{value:.4f}" for value in curve_SK[:, -1]),
            ", ".join(f"{value:.4f}" for value in found["dev_loss"][path]),
            ", ".join(f"{value:,}" for value in found["tokens_per_second"][path]),
        )
        lines[-1] += f"\n| {path} | {' | '.join(cells)} |"
    return "\n\n".join(lines) + "\n"


def draw(made: Comparison, file: Path) -> None:
    """Draw the mean and range of the seeds of each path, and below the difference of the means by the spread."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    for path, curve_SK in made.curves.items():
        above.fill_between(made.step_K, curve_SK.min(0), curve_SK.max(0), color=COLOURS[path], alpha=0.25, linewidth=0)
        above.plot(made.step_K, curve_SK.mean(0), color=COLOURS[path], label=f"{path}: mean, lowest to highest seed")
    below.plot(made.step_K, made.ratio_K, color=COLOURS["fast"], label="difference of the two means", zorder=3)
    below.axhline(1, color=COLOURS["readable"], linestyle="dashed", label="spread of the readable seeds")
    for number, ratio_K in enumerate(made.control_CK):
        label = "the same of readable seeds among themselves" if number == 0 else None
        below.plot(made.step_K, ratio_K, color="#888a85", linewidth=0.5, alpha=0.5, label=label)
    above.set(ylabel="training loss, nats per token")
    below.set(
        ylabel="part of the spread", xlabel="step", ylim=(0, 1.5 * max(made.max_ratio, made.control_CK.max(initial=1)))
    )
    for axis in (above, below):
        axis.legend(frameon=False)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    shown.savefig(file, dpi=80, metadata={"Software": None})


def keep(found: dict[str, Any], made: Comparison, stem: Path) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    text = report(found, made)
    try:
        draw(made, stem.with_suffix(".png"))
        text += f"\n![curves]({stem.name}.png)\n"
    except ImportError:
        print(f"no figure: matplotlib is not installed; make it elsewhere with --again {stem}.json", file=sys.stderr)
    stem.with_suffix(".md").write_text(text, encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "phrasebook-en-de.yaml"))
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="a.b=c", help="settings of all runs")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--control", type=int, nargs="*", default=[4, 5, 6], help="further seeds of the readable path")
    parser.add_argument("--smooth", type=int, default=100, help="steps")
    parser.add_argument("--at-once", type=int, default=1, help="runs")
    parser.add_argument("--machine", default=platform.processor() or platform.machine(), help="what to call this one")
    parser.add_argument("--out", type=Path, default=Path("runs/curves"), help="folder of the runs")
    parser.add_argument("--keep", type=Path, help="where the results go, without a suffix")
    parser.add_argument("--again", type=Path, metavar="JSON", help="kept results, to be reported and drawn anew")
    options = parser.parse_args()
    if {*options.seeds} & {*options.control}:
        parser.error("--control needs other seeds than --seeds")
    if len(set(options.seeds)) < 2:
        parser.error("--seeds needs two at least: the two paths are compared with the spread of the seeds")
    return options


def main() -> None:
    options = parse_options()
    found = json.loads(options.again.read_text(encoding="utf-8")) if options.again else train_all(options)
    made = compare(found, options.smooth)
    print(report(found, made))
    if stem := options.keep or (options.again and options.again.with_suffix("")):
        keep(found, made, stem)
    sys.exit(not made.passed)


if __name__ == "__main__":
    main()
