"""How fast does Dragoman train on a CPU, beside its peers? Real tokens per second, in one run, turn by turn.

    python bench/train_cpu.py
    python bench/train_cpu.py --quick
    python bench/train_cpu.py --peer hf=PYTHON --peer joeynmt=PYTHON --peer marian=PYTHON --sizes small --rounds 7

Every contestant is a process of its own (bench/peers/), in the Python given by --peer, and trains the same pairs with
a model of the same size, the same token budget a batch and the same number of threads. They take turns (contest.py),
and the ratio of speeds is taken within a round. What is not installed is skipped, and said.

On a machine that others use at the same time, `--threads 1 --clock cpu` counts the CPU seconds that each was given.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contest import COMPILED, KINDS, OURS, SIZES, Contestant, available, take_turns, write_corpus
from dragoman.hardware import cpu_name

VOCABULARY = 8000  # joint, with the four special tokens
QUICK: dict[str, Any] = {  # a model and a race so small that they show nothing but that it runs
    "rounds": 1, "seconds": 0.1, "sizes": "tiny", "tokens": 256, "pairs": 200, "mean": 8.0, "threads": 1, "only": OURS,
}  # fmt: skip


@contextmanager
def contestants(
    names: list[str], pythons: dict[str, str], task: dict[str, Any], warm: float
) -> Iterator[list[Contestant]]:
    """Built one after the other, each warmed up with a turn that does not count."""
    ready: list[Contestant] = []
    try:
        for name in names:
            plain = name.removesuffix(COMPILED)
            one = {**task, "compiled": name != plain}
            contestant = Contestant(name, pythons[plain], KINDS[plain], one)
            ready.append(contestant)
            try:
                contestant.facts = contestant.answer()
                contestant.train(warm)
            except RuntimeError as error:
                ready.remove(contestant)
                contestant.end()
                print(f"  left out: {error}", flush=True)
        yield ready
    finally:
        for contestant in ready:
            contestant.end()


def race(
    names: list[str], pythons: dict[str, str], task: dict[str, Any], *, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """One row per contestant: its speeds by round, and Dragoman's speed over its own, round by round."""
    with contestants(names, pythons, task, warm=seconds) as ready:
        for said in take_turns(ready, rounds=rounds, seconds=seconds):
            print(f"  {said}", flush=True)
        ours = next((c.rates for c in ready if c.name == OURS), None)
        rows = []
        for contestant in ready:
            ratios = [a / b for a, b in zip(ours, contestant.rates, strict=True)] if ours else []
            rows.append({"name": contestant.name, "rates": contestant.rates, "ratios": ratios, **contestant.facts})
        return rows


def heats(
    names: list[str], pythons: dict[str, str], task: dict[str, Any], *, peers: int, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Dragoman against a few peers at a time, since all of a race are held in memory together."""
    others = [name for name in names if name != OURS]
    ours = [name for name in names if name == OURS]
    rows: list[dict[str, Any]] = []
    for start in range(0, max(len(others), 1), peers):
        rows += race(ours + others[start : start + peers], pythons, task, rounds=rounds, seconds=seconds)
    first = [row for row in rows if row["name"] == OURS][:1]
    for row in first:
        row["rates"] = [rate for other in rows if other["name"] == OURS for rate in other["rates"]]
        row["ratios"] = []
    return first + [row for row in rows if row["name"] != OURS]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| contestant | tokens/s, median | lowest to highest | Dragoman / it, median | lowest to highest |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: -statistics.median(row["rates"])):
        rates, ratios = row["rates"], row["ratios"]
        ratio = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}" if ratios else "|"
        lines.append(
            f"| {row['name']} | {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} | {ratio} |"
        )
    return "\n".join(lines)


def verdict(rows: list[dict[str, Any]]) -> str:
    """Against the peer that is the fastest by median."""
    peers = [row for row in rows if not row["name"].startswith(OURS)]
    if not any(row["ratios"] for row in peers):
        return "no peer to compare with"
    fastest = max(peers, key=lambda row: statistics.median(row["rates"]))
    ratios = fastest["ratios"]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} rounds"
    return f"Dragoman runs at {statistics.median(ratios):.2f} times the fastest peer, {fastest['name']} ({spread})"


def hardware() -> str:
    return f"{cpu_name()}, {os.cpu_count()} cores"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one turn, at least; whole updates are counted")
    parser.add_argument("--sizes", default="small,base", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--precisions", default="float32,bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--tokens", type=int, default=4096, help="of one batch, on the longer side")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--mean", type=float, default=26.0, help="length of a sentence in tokens")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--peers", type=int, default=2, help="at a time beside Dragoman; all are held in memory")
    parser.add_argument("--only", default=",".join(KINDS), help="contestants, by name")
    parser.add_argument("--compiled", default="", help="contestants that also run under torch.compile, by name")
    parser.add_argument("--quick", action="store_true", help="numbers that show nothing; those set beside it hold")
    parser.add_argument("--out", type=Path, help="folder for the results, such as bench/results")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def entrants(here: list[str], compiled: list[str], size: str, precision: str) -> list[str]:
    """Who can train this model, plain and compiled; who cannot do so in this precision is named."""
    able = [name for name in here if SIZES[size]["kind"] in KINDS[name].models]
    for name in able:
        if precision not in KINDS[name].precisions:
            print(f"  {name} is skipped: it {KINDS[name].note}")
    names = [name for name in able if precision in KINDS[name].precisions]
    return names + [f"{name}{COMPILED}" for name in names if name in compiled and KINDS[name].compiles]


def task_of(given: argparse.Namespace, folder: str, size: str, precision: str) -> dict[str, Any]:
    """What every contestant of a race is told."""
    asked = {name: getattr(given, name) for name in ("threads", "clock", "tokens")}
    rules = {"device": "cpu", "overrides": [], "multiple": 1, "dropout": 0.1, "smoothing": 0.1, "clip": 1.0}
    return {**asked, **rules, "folder": folder, "size": SIZES[size], "precision": precision, "vocabulary": VOCABULARY}


def main() -> None:
    given = options()
    pythons = dict(item.split("=", 1) for item in given.peer)
    for name in [*pythons, *given.only.split(","), *filter(None, given.compiled.split(","))]:
        if name not in KINDS:
            raise SystemExit(f"there is no contestant called {name!r} (there are: {', '.join(KINDS)})")
    here = available(given.only.split(","), pythons)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "python": platform.python_version(),
        "settings": {k: str(v) for k, v in vars(given).items() if k not in ("peer", "out")},
        "races": [],
    }
    print(
        f"{report['hardware']}; {given.threads} threads; batches of {given.tokens} tokens a side; {given.rounds} rounds"
    )
    with tempfile.TemporaryDirectory() as folder:
        counts = write_corpus(Path(folder), pairs=given.pairs, mean=given.mean, vocabulary=VOCABULARY)
        print(
            f"{given.pairs} pairs, {counts['source']} source and {counts['target']} target tokens, end marks included"
        )
        for size in given.sizes.split(","):
            for precision in given.precisions.split(","):
                print(f"\n## {size}, {precision}\n", flush=True)
                names = entrants(here, given.compiled.split(","), size, precision)
                task = task_of(given, folder, size, precision)
                rows = heats(names, pythons, task, peers=given.peers, rounds=given.rounds, seconds=given.seconds)
                report["races"].append({"size": size, "precision": precision, "contestants": rows})
                print("\n" + table(rows) + "\n\n" + verdict(rows), flush=True)
    if given.out:
        save(report, given.out)


def save(report: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    place = "-".join(report["hardware"].replace(",", "").lower().split())
    stem = folder / f"{report['date']}-train_cpu-{place}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    parts = [
        f"# Training speed on a CPU, {report['date']}",
        f"{report['hardware']}, Python {report['python']}. How: `bench/train_cpu.py`.",
    ]
    for contest in report["races"]:
        rows = contest["contestants"]
        versions = "; ".join(f"{row['name']} {row.get('version', '')}" for row in rows)
        parts += [
            f"## {contest['size']}, {contest['precision']}",
            table(rows),
            verdict(rows) + ".",
            f"Versions: {versions}.",
        ]
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    print(f"\nwritten to {stem}.json and .md")


if __name__ == "__main__":
    main()
