"""Train and score the recipes of recipes/tasks on real data, beside published figures.

    python bench/tasks.py scan-simple scan-simple-transformer geo --data data --out runs/tasks
    python bench/tasks.py --data F --out F --at-once 4 --seeds 1 2 3 --minutes 30 --set train.threads=2

Without names, all tasks are run. Most tasks have a recipe for a Transformer and one for an LSTM, with the same data,
tokenizer and metric: NAME is the recipe NAME.yaml, and NAME-lstm or NAME-transformer is the other one. NAME-smt is a
phrase-based system.

Every run is trained and scored in separate processes, --at-once of them at a time. Finished runs are not repeated and
interrupted ones are resumed, so the command can be repeated. After --minutes, running ones save a checkpoint and end;
no run is started that took longer, with another seed, than the time that is left. OUT/NAME-SEED.json is the result of a
run; OUT/tasks.json and OUT/tasks.md are rewritten after every run. --data is a folder that contains scan,
g2p-sigmorphon2020 and so on.

Published figures marked "unchecked" are quoted from memory: compare them with the paper before relying on them. Of the
others, the source names where they were read, if that was not the paper.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.config.settings import update_metric_name
from dragoman.metrics.metrics import METRICS
from dragoman.recipe import read_recipe

RECIPES = Path(__file__).resolve().parent.parent / "recipes" / "tasks"
LM_METRICS = {"loss", "perplexity", "bits_per_character"}  # of language models: not in METRICS
LOWER = LM_METRICS | {name for name, metric in METRICS.items() if not metric.higher_is_better}  # lower is better


class Task(NamedTuple):
    recipe: str
    published: tuple[dict[str, str], ...]  # for each corpus of data.test: metric -> published figures
    source: str
    settings: tuple[str, ...] = ()
    parent: str = ""  # the task whose model is fine-tuned
    others: tuple[str, ...] = ()  # further recipes: RECIPE-lstm.yaml, RECIPE-transformer.yaml, RECIPE-smt.yaml

    @property
    def path(self) -> Path:
        return RECIPES / f"{self.recipe}.yaml"


GORMAN = "baselines of Gorman et al. 2020 as quoted by Prabhu and Kann 2020, Table 4"


def g2p(language: str, lstm: str, transformer: str) -> Task:
    """Return a task; `lstm` and `transformer` are published word and phone error rates, such as 28.00/6.53."""
    one, other = lstm.split("/"), transformer.split("/")
    figures = [f"{a} (LSTM), {b} (Transformer)" for a, b in zip(one, other, strict=True)]
    folder = "data/g2p-sigmorphon2020"
    settings = tuple(f"data.{split}.tsv={folder}/{split}/{language}_{split}.tsv" for split in ("train", "dev", "test"))
    published = {"line_error_rate": figures[0], "per": figures[1]}
    return Task("g2p", (published,), GORMAN, settings, others=("transformer",))


def babi(task: int, exact: str, bleu: str, *settings: str) -> Task:
    files = [f"data.{split}.dialogue=data/dialog-babi/task{task}.{split}.txt.xz" for split in ("train", "dev", "test")]
    figures = {"exact": exact, **({"bleu": bleu} if bleu else {})}
    return Task("babi", (figures,), "Madotto et al. 2018 (unchecked)", (*files, *settings), others=("lstm",))


CHREN = "Zhang, Frey and Bansal 2020, best systems"
LAKE = "Lake and Baroni 2018, overall best model and best of all"
FINEGAN = "Finegan-Dollak et al. 2018, question split: copying as quoted by NLP-progress, attention unchecked"
YIN = "Yin and Neubig 2017 (unchecked); TranX: README of pcyin/tranX"
JHAMTANI = "Jhamtani et al. 2017 (its abstract: 31+, about 6 above the strongest baseline; the digits are unchecked)"
PEGASUS = "Zhang et al. 2020: Transformer-base as quoted by others, PEGASUS (Mixed & Stochastic) by its README"
FIRST_TASKS = {
    "scan-simple": Task("scan-simple", ({"exact": "99.7; 99.8 (best)"},), LAKE, others=("transformer",)),
    "scan-length": Task("scan-length", ({"exact": "13.8; 20.8 (best)"},), LAKE, others=("transformer",)),
    "scan-jump": Task("scan-jump", ({"exact": "0.08; 1.2 (best)"},), LAKE, others=("transformer",)),
    "geo": Task("geo", ({"exact": "63 (attention), 71 (copying)"},), FINEGAN, others=("transformer",)),
    "atis": Task("atis", ({"exact": "46 (attention), 51 (copying)"},), FINEGAN, others=("transformer",)),
    "g2p-ady": g2p("ady", "28.00/6.53", "28.44/6.49"),
    "g2p-arm": g2p("arm", "14.67/3.49", "14.22/3.29"),
    "g2p-bul": g2p("bul", "31.11/5.94", "34.00/7.89"),
    "g2p-dut": g2p("dut", "16.44/2.94", "15.78/2.89"),
    "g2p-fre": g2p("fre", "6.22/1.32", "6.89/1.72"),
    "g2p-geo": g2p("geo", "26.44/5.14", "28.00/5.43"),
    "g2p-hin": g2p("hin", "6.67/1.47", "9.56/2.40"),
    "g2p-hun": g2p("hun", "5.33/1.18", "5.33/1.28"),
    "g2p-jpn": g2p("jpn", "7.56/1.79", "7.33/1.86"),
    "g2p-kor": g2p("kor", "46.89/16.78", "43.78/17.50"),
    "django": Task("django", ({"exact": "45.1 (seq2seq), 71.6 (syntax-driven), 77.2 (TranX)"},), YIN, others=("lstm",)),
    "shakespeare": Task(
        "shakespeare", ({"bleu_tokens_lc": "31.26 (copying), 24.39 (statistical)"},), JHAMTANI, others=("lstm", "smt")
    ),
    "aeslc": Task(
        "aeslc",
        ({"rouge1": "15.04; 37.68 (pretrained)", "rouge2": "7.39; 21.25", "rougeL": "14.93; 36.51"},),
        PEGASUS,
        others=("lstm",),
    ),
    "parsing": Task("parsing", ({}, {}), "the phrasebook; nothing is published", others=("lstm",)),
    "babi-5": babi(5, "98.8 (seq2seq), 98.4 (attention)", ""),
    "babi-6": babi(6, "46.4 (seq2seq), 46.0 (attention)", "55.0 (seq2seq), 56.6 (attention)", "data.max_length=2048"),
    "sst2": Task(
        "sst2", ({"accuracy": "83.5, with the phrases"},), "CNN-rand, harvardnlp/sent-conv-torch", others=("lstm",)
    ),
    "lm-char": Task(
        "lm-char",
        ({"loss": "1.4697"},),
        "nanoGPT, its README: 200 random batches of the part that chooses the checkpoint",
        others=("lstm",),
    ),
    "chren-en": Task("chren-en", ({"bleu": "15.8"}, {"bleu": "6.5"}), CHREN),
    "chren-en-outside": Task("chren-en-outside", ({}, {"bleu": "6.5"}), CHREN, parent="chren-en"),
}


def with_variants(tasks: dict[str, Task]) -> dict[str, Task]:
    """Return the tasks, each followed by the same task with its other recipes."""
    found = {}
    for name, task in tasks.items():
        found[name] = task
        for other in task.others:
            found[f"{name}-{other}"] = task._replace(recipe=f"{task.recipe}-{other}")
    return found


TASKS = with_variants(FIRST_TASKS)


class Bench:
    """A folder with a run and a result for every task and seed."""

    def __init__(
        self, out: Path, data: Path, seeds: Sequence[int], settings: Sequence[str], *, minutes: float = 0
    ) -> None:
        """Use the folder `out`. Without `minutes`, there is no time limit."""
        self.out, self.seeds, self.settings = out, seeds, settings
        self.deadline = time.monotonic() + 60 * minutes if minutes else math.inf
        self.lock = threading.Lock()  # of the tables and of `processes`
        self.processes: set[subprocess.Popen[str]] = set()  # those that are running
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "data").exists():
            (out / "data").symlink_to(data.resolve(strict=True))

    def result(self, name: str, seed: int) -> Path:
        return self.out / f"{name}-{seed}.json"

    def run_all(self, jobs: Sequence[tuple[str, int]], at_once: int) -> None:
        """Run these tasks and seeds, some at a time. At the deadline, end those that are running."""
        with ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(self.run, *job) for job in jobs]
            left = None if self.deadline == math.inf else max(0.0, self.deadline - time.monotonic())
            wait(futures, timeout=left)
            with self.lock:
                for process in self.processes:
                    process.terminate()  # training then saves a checkpoint
        for future in futures:
            future.result()

    def run(self, name: str, seed: int) -> None:
        """Train and score a run and write its result. A failure is reported and does not stop other runs."""
        if self.result(name, seed).exists():
            return
        task, run, start = TASKS[name], f"{name}-{seed}", time.monotonic()
        if start + max((one["run_seconds"] for one in self.results(name)), default=0.0) >= self.deadline:
            print(f"{run}: not started, since there is too little time left", file=sys.stderr)
            return
        settings = [*task.settings, f"train.seed={seed}", "data.cache=cache", *self.settings]
        parent = ["--init-from", f"{task.parent}-{seed}"] if task.parent else []
        try:
            self.command(run, "train", str(task.path), *settings, "--out", run, "--resume", *parent)
            tests = [json.loads(line) for line in self.command(run, "evaluate", run, "--json").splitlines()]
            card = json.loads(self.command(run, "info", run, "--json"))
        except subprocess.CalledProcessError as error:
            late = time.monotonic() >= self.deadline
            reason = "stopped at the time limit" if late else f"failed with code {error.returncode}"
            print(f"{run}: {reason}, see {self.out / run}.log", file=sys.stderr)
            return
        found = {
            "seconds": card["train_seconds"],
            "run_seconds": time.monotonic() - start,  # with start-up and scoring, without time before an interruption
            "parameters": card["parameters"],
            "validation": card["validation"],
            "tests": tests,
        }
        self.result(name, seed).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        with self.lock:
            self.write_tables()
        print(f"{run}: done", file=sys.stderr)

    def command(self, run: str, *arguments: str) -> str:
        """Run a command of Dragoman; return its standard output and append its messages to the log of the run."""
        whole = [sys.executable, "-m", "dragoman", *arguments]
        with (self.out / f"{run}.log").open("a", encoding="utf-8") as log:
            with self.lock:  # so that no process is started after the running ones were ended
                if time.monotonic() >= self.deadline:
                    raise subprocess.CalledProcessError(-signal.SIGTERM, whole)
                process = subprocess.Popen(whole, cwd=self.out, stdout=subprocess.PIPE, stderr=log, text=True)
                self.processes.add(process)
            output, _ = process.communicate()
        with self.lock:
            self.processes.remove(process)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, whole)
        return output

    def results(self, name: str) -> list[dict[str, Any]]:
        """Return the results of all finished seeds of a task."""
        files = sorted(self.out.glob(f"{name}-[0-9]*.json"))
        return [read_result(file) for file in files if file.stem.removeprefix(name)[1:].isdigit()]

    def write_tables(self) -> None:
        rows = [row for name in TASKS for row in self.rows(name)]
        whole = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
        (self.out / "tasks.json").write_text(whole, encoding="utf-8")
        (self.out / "tasks.md").write_text(as_markdown(rows), encoding="utf-8")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return a row for every test corpus and metric of a task, over all finished seeds."""
        runs = self.results(name)
        if not runs:
            return []
        rows, model = [], read_recipe(TASKS[name].path).model
        title = "phrases" if model.kind == "smt" else getattr(model, "cell", "").upper() or "Transformer"
        for index, test in enumerate(runs[0]["tests"]):
            metrics = [key for key, held in test.items() if isinstance(held, dict) and "value" in held]
            published = TASKS[name].published[index] if index < len(TASKS[name].published) else {}
            for metric in metrics:
                values = [run["tests"][index][metric]["value"] for run in runs]
                rows.append({
                    "task": name,
                    "model": title,
                    "test": Path(str(test.get("test", "")).split(" and ")[0]).name,
                    "metric": metric,
                    "better": "lower" if metric in LOWER else "higher",
                    "reached": statistics.mean(values),
                    "values": values,
                    "published": published.get(metric, ""),
                    "source": TASKS[name].source if metric in published else "",
                    "signature": test[metric].get("signature", ""),
                    "seconds": statistics.mean(run["seconds"] for run in runs),
                    "parameters": runs[0]["parameters"],
                })  # fmt: skip
        return rows


def read_result(file: Path) -> dict[str, Any]:
    """Return a stored result, with the current names of its metrics. Earlier releases stored fewer values."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    tests = [{update_metric_name(name): value for name, value in test.items()} for test in found["tests"]]
    return {"run_seconds": found["seconds"], **found, "tests": tests}


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    columns = ("task", "model", "test", "metric", "reached", "runs", "published", "source", "seconds", "parameters")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        digits = 4 if row["metric"] == "loss" else 2
        low, high = (f"{end(row['values']):.{digits}f}" for end in (min, max))
        figure, spread = f"{row['reached']:.{digits}f}", f" ({low} to {high})" if len(row["values"]) > 1 else ""
        metric = f"{row['metric']}{' ↓' * (row['better'] == 'lower')}"
        cells = [row["task"], row["model"], row["test"], metric, figure + spread]
        cells += [str(len(row["values"])), row["published"], row["source"]]
        lines.append("| " + " | ".join([*cells, f"{row['seconds']:.0f}", f"{row['parameters']:,}"]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TASK", help=f"tasks: {', '.join(TASKS)}; default: all")
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds the corpora")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and tables")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", help="settings for all of them")
    parser.add_argument("--minutes", type=float, default=0, help="stop after this time; default: no limit")
    arguments = parser.parse_args()
    names = arguments.names or list(TASKS)
    for name in names:
        if name not in TASKS:
            parser.error(f"there is no task called {name!r}; there are {', '.join(TASKS)}")
    wanted = dict.fromkeys(name for one in names for name in (TASKS[one].parent, one) if name)
    bench = Bench(arguments.out, arguments.data, arguments.seeds, arguments.set, minutes=arguments.minutes)
    for later in (False, True):  # runs that are fine-tuned from another come after it
        jobs = [(n, s) for s in arguments.seeds for n in wanted if bool(TASKS[n].parent) == later]
        bench.run_all(jobs, arguments.at_once)
    bench.write_tables()
    print((arguments.out / "tasks.md").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
