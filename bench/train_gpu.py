"""Measure how fast Dragoman and its peers train on a GPU, in tokens per second without padding.

    python bench/train_gpu.py --out bench/results/2026-11-15-train-gpu-base-h200
    python bench/train_gpu.py --size lstm
    python bench/train_gpu.py --only hf --variant "plain: train.loss=plain" --variant "wide: train.tokens=50000"
    python bench/train_gpu.py --profile --set train.compile=false
    python bench/train_gpu.py --quick --device cpu

Every contestant is a process (bench/peers/). All train in bf16 with float32 weights, dropout, label smoothing,
gradient clipping and a fused optimizer. Batches of the peers are bucketed by length and already on the GPU; Dragoman
reads, packs and copies its batches as `dragoman train` does. All contestants start at the same time, so start times
are those of a busy machine. Then they take turns (contest.py). The first two rounds are not counted; ratios are taken
within a round, relative to the first contestant. Operations are counted once, for Dragoman's model without padding
(models/registry.py), and used for all contestants. --peak is the speed of large matrix products on the GPU: 790
TFLOP/s on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from contest import COMPILED, KINDS, OURS, SIZES, Contestant, available, take_turns, write_corpus

CONTESTANTS = {  # by kind of model; ratios are relative to the first that is installed
    "transformer": ["hf", f"hf{COMPILED}", "torch", OURS],
    "rnn": ["joeynmt", "torch-lstm", OURS],
}
QUICK: dict[str, Any] = {"pairs": 500, "tokens": 512, "vocabulary": 100, "rounds": 2, "seconds": 0.3, "warm": 2}
QUICK_SIZE = {"layers": 1, "width": 32, "inner": 64, "heads": 2}
UNCOUNTED = 2  # rounds at the beginning, in which peers still compile for new batch shapes
START_FRACTION = 0.6  # of the time limit; contestants that are not ready by then are left out


class Entry(NamedTuple):
    name: str
    kind: str
    task: dict[str, Any]


def list_entries(options: argparse.Namespace, task: dict[str, Any], pythons: dict[str, str]) -> list[Entry]:
    """Return the contestants: those for this kind of model or those of --only, and the variants of Dragoman."""
    names = options.only.split(",") if options.only else CONTESTANTS[task["size"]["kind"]]
    plain = {name: name.removesuffix(COMPILED) for name in names}
    if unknown := [name for name in names if plain[name] not in KINDS]:
        raise SystemExit(f"there is no contestant called {unknown[0]!r} (there are: {', '.join(KINDS)})")
    installed = available(dict.fromkeys([*plain.values(), OURS]), pythons)
    ours = dict.fromkeys(names, options.set) | {
        f"{OURS} {name.strip()}": [*options.set, *settings.split()]
        for name, _, settings in (variant.partition(":") for variant in options.variant)
    }
    entries = []
    for name, overrides in ours.items():
        kind = plain.get(name, OURS)
        if kind in installed:
            entries.append(Entry(name, kind, {**task, "compiled": name.endswith(COMPILED), "overrides": overrides}))
    return entries


@contextmanager
def start_contestants(
    entries: list[Entry], pythons: dict[str, str], *, warm: int, seconds: float, until: float
) -> Iterator[list[Contestant]]:
    """Start all contestants at once and warm them up, until each has compiled for all batch shapes."""
    contestants = [Contestant(e.name, pythons[e.kind], KINDS[e.kind], e.task) for e in entries]
    ready = []
    try:
        for contestant in contestants:
            contestant.request(0)
            contestant.request(seconds, warm)
        for contestant in contestants:
            try:
                built, first, _ = (contestant.answer(max(until - time.monotonic(), 0.1)) for _ in range(3))
            except RuntimeError as error:
                print(f"left out: {error}", flush=True)
                contestant.end(timeout=0.1)
                continue
            contestant.facts = {**built, "start": first["at"] - contestant.start_time}
            ready.append(contestant)
            print(f"{contestant.name} made its first step after {contestant.facts['start']:.0f} s", flush=True)
        yield ready
    finally:
        for contestant in contestants:
            contestant.end(timeout=5.0)


def make_rows(ready: list[Contestant], peak: float) -> list[dict[str, Any]]:
    """Return a row per contestant: speeds, ratios to the first contestant, utilisation, memory and start time."""
    flops = next((c.facts["flops_per_token"] for c in ready if "flops_per_token" in c.facts), None)
    rows = []
    for contestant in ready:
        counted, first = contestant.rates[UNCOUNTED:], ready[0].rates[UNCOUNTED:]
        speed = statistics.median(counted)
        ratios = [a / b for a, b in zip(counted, first, strict=True)]
        rows.append(
            {
                "name": contestant.name,
                "tokens_per_second": round(speed),
                "rates": [round(rate) for rate in counted],
                "uncounted": [round(rate) for rate in contestant.rates[:UNCOUNTED]],
                "times": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "mfu": round(speed * flops / peak / 1e12, 4) if flops else None,
                **{key: value for key, value in contestant.facts.items() if key not in ("ready", "at")},
            }
        )
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"| contestant | tokens/s | lowest to highest | times {rows[0]['name']} | lowest to highest | MFU | "
        "memory, GB | start, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates, ratios = row["rates"], row["ratios"]
        lines.append(
            f"| {row['name']} | {row['tokens_per_second']:,} | {min(rates):,} to {max(rates):,} | {row['times']:.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} | {'' if row['mfu'] is None else format(row['mfu'], '.1%')} | "
            f"{row['peak'] / 1e9:.1f} | {row['start']:.0f} |"
        )
    return "\n".join(lines)


def describe_machine(device: str) -> str:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--tokens", type=int, default=24_576, help="tokens per batch on the longer side, with padding")
    parser.add_argument("--multiple", type=int, default=1, help="widths of the peers' batches are multiples of this")
    parser.add_argument(
        "--vocabulary", type=int, default=32_000, help="size of the joint vocabulary, with special tokens"
    )
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--mean", type=float, default=26.0, help="mean length of a sentence in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="minimum length of a turn")
    parser.add_argument("--warm", type=int, default=80, help="minimum number of updates before the first round")
    parser.add_argument(
        "--limit", type=float, default=150.0, help="time limit in seconds; rounds are left out if necessary"
    )
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s of large products in bf16 (an H200: 790)")
    parser.add_argument("--threads", type=int, default=4, help="CPU threads of each process")
    parser.add_argument("--only", default="", help=f"contestants: {', '.join(KINDS)}, or for example 'hf{COMPILED}'")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME: a.b=c ...", help="add a variant of Dragoman"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="a setting for every Dragoman contestant"
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON", help="the Python that runs a peer"
    )
    parser.add_argument("--profile", action="store_true", help="profile a training step of Dragoman instead")
    quick = "tiny model and few rounds, to check that the benchmark runs; other options override its values"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, help="write results to this path with the suffixes .json and .md")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    start = time.monotonic()
    size = SIZES[options.size] | (
        {k: v for k, v in QUICK_SIZE.items() if k in SIZES[options.size]} if options.quick else {}
    )
    names = ("device", "precision", "tokens", "multiple", "vocabulary", "threads")
    shared = {name: getattr(options, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        lengths = {"mean": options.mean, "shortest": 3, "longest": 127}  # without EOS
        counts = write_corpus(Path(folder), pairs=options.pairs, vocabulary=options.vocabulary, **lengths)
        size_of_corpus = f"{options.pairs:,} pairs, {sum(counts.values()):,} tokens"
        print(f"{describe_machine(options.device)}; {options.size}; {size_of_corpus}", flush=True)
        training = {"clock": "wall", "dropout": 0.1, "smoothing": 0.1, "clip": 1.0}
        task = {**shared, **training, "size": size, "folder": folder}
        if options.profile:
            sys.path.insert(0, str(Path(__file__).parent / "peers"))
            from kernels import profile_training

            for line in profile_training({**task, "compiled": False, "overrides": options.set}, warm=options.warm):
                print(line, flush=True)
            return
        rows = run_rounds(options, task, start)
    if not rows:
        raise SystemExit("no contestant could be started")
    print("\n" + format_table(rows), flush=True)
    if options.out:
        save(options, rows)


def run_rounds(options: argparse.Namespace, task: dict[str, Any], start: float) -> list[dict[str, Any]]:
    """Start the contestants, run the rounds within the time limit and return the rows of the table."""
    pythons = dict(item.split("=", 1) for item in options.peer)
    entries = list_entries(options, task, pythons)
    deadline = start + START_FRACTION * options.limit
    with start_contestants(entries, pythons, warm=options.warm, seconds=options.seconds, until=deadline) as ready:
        rounds = UNCOUNTED + options.rounds
        for report in take_turns(ready, rounds=rounds, seconds=options.seconds, until=start + options.limit):
            print(report, flush=True)
        if not ready or len(ready[0].rates) <= UNCOUNTED:
            raise SystemExit(f"no time for more than the {UNCOUNTED} rounds that are not counted; raise --limit")
        return make_rows(ready, options.peak)


def save(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "peer")}
    about = {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(options.device), "settings": settings}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps({**about, "contestants": rows}, indent=1) + "\n")
    title = (
        f"# Training speed on a GPU, {options.size}, {about['date']}\n\n{about['machine']}. How: `bench/train_gpu.py`."
    )
    options.out.with_suffix(".md").write_text(f"{title}\n\n{format_table(rows)}\n")


if __name__ == "__main__":
    main()
