"""How fast does Dragoman train on a GPU, beside its peers? Real tokens per second, in one run, turn by turn.

    python bench/train_gpu.py --out bench/results/2026-11-15-train-gpu-base-h200
    python bench/train_gpu.py --size lstm
    python bench/train_gpu.py --only hf --variant "plain: train.loss=plain" --variant "wide: train.tokens=50000"
    python bench/train_gpu.py --profile --set train.compile=false
    python bench/train_gpu.py --quick --device cpu

Every contestant is a process of its own (bench/peers/): bf16 with float32 weights, dropout, label smoothing, clipping
and a fused optimizer in all of them. Peers take length-bucketed batches that lie on the GPU already; Dragoman reads,
packs and copies as `dragoman train` does. All start together, so the seconds of a start are those of a busy machine;
then they take turns (contest.py), of which the first two are not counted, and ratios are taken within a round, against
the first of the list. Operations are counted by models/registry.py, without padding, the same for all; --peak is
what products of large matrices reach on the GPU (machine.matrix_speed measures it: 794 on an H200).
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

RACES = {  # the first that is there is what the others are measured by; all of a race are in memory together
    "transformer": ["hf", f"hf{COMPILED}", "torch", OURS],
    "rnn": ["joeynmt", "torch-lstm", OURS],
}
QUICK: dict[str, Any] = {"pairs": 500, "tokens": 512, "vocabulary": 100, "rounds": 2, "seconds": 0.3, "warm": 2}
QUICK_SIZE = {"layers": 1, "width": 32, "inner": 64, "heads": 2}
UNCOUNTED = 2  # rounds at the beginning: peers still meet shapes that are new to them, and are slow
START_SHARE = 0.6  # of the time limit; who is not ready by then is left out


class Entry(NamedTuple):
    name: str
    kind: str
    task: dict[str, Any]


def entries(given: argparse.Namespace, task: dict[str, Any], pythons: dict[str, str]) -> list[Entry]:
    """Who takes part: the usual ones of this kind of model or those asked for, and variants of Dragoman."""
    names = given.only.split(",") if given.only else RACES[task["size"]["kind"]]
    plain = {name: name.removesuffix(COMPILED) for name in names}
    if unknown := [name for name in names if plain[name] not in KINDS]:
        raise SystemExit(f"there is no contestant called {unknown[0]!r} (there are: {', '.join(KINDS)})")
    here = available(dict.fromkeys([*plain.values(), OURS]), pythons)
    ours = dict.fromkeys(names, given.set) | {
        f"{OURS} {name.strip()}": [*given.set, *settings.split()]
        for name, _, settings in (variant.partition(":") for variant in given.variant)
    }
    found = []
    for name, overrides in ours.items():
        kind = plain.get(name, OURS)
        if kind in here:
            found.append(Entry(name, kind, {**task, "compiled": name.endswith(COMPILED), "overrides": overrides}))
    return found


@contextmanager
def started(
    entries: list[Entry], pythons: dict[str, str], *, warm: int, seconds: float, until: float
) -> Iterator[list[Contestant]]:
    """All at once, since compiling takes most of it; each has met enough batches to have compiled for all shapes."""
    held = [Contestant(e.name, pythons[e.kind], KINDS[e.kind], e.task) for e in entries]
    ready = []
    try:
        for contestant in held:
            contestant.tell(0)
            contestant.tell(seconds, warm)
        for contestant in held:
            try:
                built, first, _ = (contestant.answer(max(until - time.monotonic(), 0.1)) for _ in range(3))
            except RuntimeError as error:
                print(f"left out: {error}", flush=True)
                contestant.end(patience=0.1)
                continue
            contestant.facts = {**built, "start": first["at"] - contestant.begun}
            ready.append(contestant)
            print(f"{contestant.name} made its first step after {contestant.facts['start']:.0f} s", flush=True)
        yield ready
    finally:
        for contestant in held:
            contestant.end(patience=5.0)


def rows_of(ready: list[Contestant], peak: float) -> list[dict[str, Any]]:
    """One row per contestant: speeds by round, times the first one's, utilisation, memory, seconds of the start."""
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


def table(rows: list[dict[str, Any]]) -> str:
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


def machine(device: str) -> str:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--tokens", type=int, default=24_576, help="of one batch, on the longer side, with padding")
    parser.add_argument("--multiple", type=int, default=1, help="of which the widths of peers' batches are")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="joint, with the four special tokens")
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--mean", type=float, default=26.0, help="length of a sentence in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one turn, at least; whole updates are counted")
    parser.add_argument("--warm", type=int, default=80, help="updates before the first round, at least")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of the whole race; fewer rounds if need be")
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s of large products in bf16 (an H200: 790)")
    parser.add_argument("--threads", type=int, default=4, help="of each process, on the CPU")
    parser.add_argument("--only", default="", help=f"contestants, of {', '.join(KINDS)}; 'hf{COMPILED}' and so on too")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME: a.b=c ...", help="of Dragoman, added")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a setting of all Dragomans")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="another Python for a peer")
    parser.add_argument("--profile", action="store_true", help="no race: where the time of Dragoman's step goes")
    quick = "a model and a race so small that they show nothing; numbers that are set beside it hold"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, help="where the results go, without a suffix: .json and .md")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def main() -> None:
    given = options()
    begun = time.monotonic()
    size = SIZES[given.size] | ({k: v for k, v in QUICK_SIZE.items() if k in SIZES[given.size]} if given.quick else {})
    names = ("device", "precision", "tokens", "multiple", "vocabulary", "threads")
    asked = {name: getattr(given, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        lengths = {"mean": given.mean, "shortest": 3, "longest": 127}  # and an end mark
        counts = write_corpus(Path(folder), pairs=given.pairs, vocabulary=given.vocabulary, **lengths)
        print(
            f"{machine(given.device)}; {given.size}; {given.pairs:,} pairs, {sum(counts.values()):,} tokens", flush=True
        )
        rules = {"clock": "wall", "dropout": 0.1, "smoothing": 0.1, "clip": 1.0}
        task = {**asked, **rules, "size": size, "folder": folder}
        if given.profile:
            sys.path.insert(0, str(Path(__file__).parent / "peers"))
            from kernels import profiled

            for line in profiled({**task, "compiled": False, "overrides": given.set}, warm=given.warm):
                print(line, flush=True)
            return
        rows = race(given, task, begun)
    if not rows:
        raise SystemExit("nobody took part")
    print("\n" + table(rows), flush=True)
    if given.out:
        save(given, rows)


def race(given: argparse.Namespace, task: dict[str, Any], begun: float) -> list[dict[str, Any]]:
    pythons = dict(item.split("=", 1) for item in given.peer)
    who = entries(given, task, pythons)
    patience = begun + START_SHARE * given.limit
    with started(who, pythons, warm=given.warm, seconds=given.seconds, until=patience) as ready:
        rounds = UNCOUNTED + given.rounds
        for said in take_turns(ready, rounds=rounds, seconds=given.seconds, until=begun + given.limit):
            print(said, flush=True)
        if not ready or len(ready[0].rates) <= UNCOUNTED:
            raise SystemExit(f"no time for a round that counts: the first {UNCOUNTED} do not; raise --limit")
        return rows_of(ready, given.peak)


def save(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    asked = {key: value for key, value in vars(given).items() if key not in ("out", "peer")}
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(given.device), "settings": asked}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".json").write_text(json.dumps({**about, "contestants": rows}, indent=1) + "\n")
    title = (
        f"# Training speed on a GPU, {given.size}, {about['date']}\n\n{about['machine']}. How: `bench/train_gpu.py`."
    )
    given.out.with_suffix(".md").write_text(f"{title}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
