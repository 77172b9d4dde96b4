"""Compare the speed of two checkouts of Dragoman, round by round: is this commit slower than that one?

    git worktree add ../before 31601d4
    python bench/before_after.py ../before train --size base --rounds 12
    python bench/before_after.py ../before translate RUN --source F --engines torch torch-int8 --beams 4 1

Each checkout runs in processes of its own. In every round both do the same work, one after the other and in changing
order, so that a slow minute of a shared machine affects both. The result is the median over the rounds of the ratio
after / before, with its range; the first two rounds are not counted. The run folder is loaded by both checkouts, so
train it with the older one. Training takes turns as in bench/train_gpu.py, with the script of each checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contest import KINDS, OURS, SIZES, Contestant, take_turns, write_corpus

HERE = Path(__file__).resolve().parent
UNCOUNTED = 2  # rounds at the beginning, in which caches and the compiler are still warming up
TRANSLATE = """
import json, os, sys, time
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does
import dragoman
run, source, device, engine, beam, seconds = sys.argv[1:]
lines = open(source, encoding="utf-8").read().split("\\n")[:-1]
translator = dragoman.load(run, device=device, engine=engine)
for _ in sys.stdin:
    start, passes = time.perf_counter(), 0
    while not passes or time.perf_counter() - start < float(seconds):
        texts = [hyp.text for hyp in translator.translate(lines, beam=int(beam), search={"scores": False}, align=False)]
        passes += 1
    elapsed = (time.perf_counter() - start) / passes
    print(json.dumps({"rate": sum(map(len, texts)) / elapsed, "texts": texts}), flush=True)
"""


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment in which `import dragoman` imports this checkout."""
    return {**os.environ, "PYTHONPATH": str(checkout / "src")}


def summarize(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Summarize the counted rounds: median rates, and median and range of the ratios within a round."""
    summary: dict[str, Any] = {name: round(statistics.median(values[UNCOUNTED:])) for name, values in rates.items()}
    for name in rates:
        if name != "after":
            ratios = [after / other for other, after in zip(rates[name], rates["after"], strict=True)][UNCOUNTED:]
            low, middle, high = (round(value, 3) for value in (min(ratios), statistics.median(ratios), max(ratios)))
            summary[f"after / {name}"] = {"median": middle, "range": [low, high], "rounds": len(ratios)}
    return summary


def compare_training(checkouts: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Let `dragoman train` of both checkouts take turns; rates are real tokens per second."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), pairs=options.pairs, mean=26.0, vocabulary=options.vocabulary)
        task = {
            "folder": folder, "size": SIZES[options.size], "device": options.device, "precision": options.precision,
            "tokens": options.tokens, "vocabulary": options.vocabulary, "threads": options.threads, "clock": "wall",
            "dropout": 0.1, "smoothing": 0.1, "clip": 1.0, "compiled": False, "overrides": [], "multiple": 1,
        }  # fmt: skip
        contestants = []
        for name, checkout in checkouts.items():
            kind = KINDS[OURS]._replace(script=str(checkout / "bench" / "peers" / KINDS[OURS].script))
            os.environ["PYTHONPATH"] = environment(checkout)["PYTHONPATH"]
            contestants.append(Contestant(name, sys.executable, kind, task))
        contestants += [Contestant(peer, sys.executable, KINDS[peer], task) for peer in options.peers]
        for contestant in contestants:
            contestant.answer()
            contestant.request(0.0, options.warm)
            contestant.answer()
        for report in take_turns(list(contestants), rounds=options.rounds + UNCOUNTED, seconds=options.seconds):
            print(report, flush=True)
        for contestant in contestants:
            contestant.end()
        return summarize({contestant.name: contestant.rates for contestant in contestants})


def compare_translation(
    checkouts: dict[str, Path], options: argparse.Namespace, engine: str, beam: int
) -> dict[str, Any]:
    """Translate a file with both checkouts in turn; rates are characters per second, from lines to lines."""
    workers = {}
    for name, checkout in checkouts.items():
        given = (options.run, options.source, options.device, engine, beam, options.seconds)
        workers[name] = subprocess.Popen(
            [sys.executable, "-c", TRANSLATE, *map(str, given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(checkout),
        )  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in workers}
    texts: dict[str, list[str]] = {}
    for number in range(options.rounds + UNCOUNTED):
        for name in sorted(workers, reverse=bool(number % 2)):
            stdin, stdout = workers[name].stdin, workers[name].stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write("go\n")
            stdin.flush()
            line = stdout.readline()
            if not line:
                raise SystemExit(f"{name} ended with status {workers[name].wait()}")
            answer = json.loads(line)
            rates[name].append(answer["rate"])
            texts[name] = answer["texts"]
    for worker in workers.values():
        worker.communicate()
    same = sum(a == b for a, b in zip(texts["before"], texts["after"], strict=True)) / len(texts["before"])
    return {**summarize(rates), "same_text": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="minimum length of a turn")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    work = parser.add_subparsers(dest="work", required=True)
    train = work.add_parser("train")
    train.add_argument("--size", choices=list(SIZES), default="base")
    train.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    train.add_argument("--tokens", type=int, default=24_576, help="tokens per batch, on the longer side")
    train.add_argument("--vocabulary", type=int, default=32_000)
    train.add_argument("--pairs", type=int, default=100_000)
    train.add_argument("--threads", type=int, default=4)
    train.add_argument("--peers", nargs="*", default=[], choices=list(KINDS), help="peers that take turns as well")
    train.add_argument("--warm", type=int, default=80, help="updates before the first round")
    translate = work.add_parser("translate")
    translate.add_argument("run", type=Path)
    translate.add_argument("--source", type=Path, required=True)
    translate.add_argument("--engines", nargs="+", default=["torch"])
    translate.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": HERE.parent}
    started = time.time()
    results = {}
    if options.work == "train":
        results[f"train {options.size}"] = compare_training(checkouts, options)
    else:
        for engine in options.engines:
            for beam in options.beams:
                name = f"translate {options.run.name}, {engine}, beam {beam}"
                results[name] = compare_translation(checkouts, options, engine, beam)
                print(name, json.dumps(results[name]), flush=True)
    found = {"machine": platform.processor() or platform.machine(), "device": options.device, "results": results}
    print(json.dumps({**found, "seconds": round(time.time() - started)}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
