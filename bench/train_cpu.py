"""Measure how fast Dragoman and its peers train on a CPU, in tokens per second without padding.

    python bench/train_cpu.py
    python bench/train_cpu.py --quick
    python bench/train_cpu.py --peer hf=PYTHON --peer joeynmt=PYTHON --peer marian=PYTHON --sizes small --rounds 7

Every contestant is a process (bench/peers/) in the Python options by --peer. All train a model of the same size on
the same pairs, with the same number of tokens per batch and the same number of threads. They take turns (contest.py),
and ratios are taken within a round. Contestants that are not installed are skipped, with a message.

On a machine with other load, `--threads 1 --clock cpu` counts CPU seconds instead of seconds.
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

VOCABULARY = 8000  # size of the joint vocabulary, with special tokens
QUICK: dict[str, Any] = {  # only checks that the benchmark runs
    "rounds": 1, "seconds": 0.1, "sizes": "tiny", "tokens": 256, "pairs": 200, "mean": 8.0, "threads": 1, "only": OURS,
}  # fmt: skip


@contextmanager
def start_contestants(
    names: list[str], pythons: dict[str, str], task: dict[str, Any], warm: float
) -> Iterator[list[Contestant]]:
    """Start the contestants one after the other; each has a warm-up turn that is not counted."""
    ready: list[Contestant] = []
    try:
        for name in names:
            plain = name.removesuffix(COMPILED)
            own_task = {**task, "compiled": name != plain}
            contestant = Contestant(name, pythons[plain], KINDS[plain], own_task)
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


def run_rounds(
    names: list[str], pythons: dict[str, str], task: dict[str, Any], *, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Return a row per contestant: its speed in each round, and the ratio of Dragoman's speed to it."""
    with start_contestants(names, pythons, task, warm=seconds) as ready:
        for report in take_turns(ready, rounds=rounds, seconds=seconds):
            print(f"  {report}", flush=True)
        ours = next((c.rates for c in ready if c.name == OURS), None)
        rows = []
        for contestant in ready:
            ratios = [a / b for a, b in zip(ours, contestant.rates, strict=True)] if ours else []
            rows.append({"name": contestant.name, "rates": contestant.rates, "ratios": ratios, **contestant.facts})
        return rows


def run_groups(
    names: list[str], pythons: dict[str, str], task: dict[str, Any], *, peers: int, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Run Dragoman against a few peers at a time: all contestants of a group are in memory together."""
    others = [name for name in names if name != OURS]
    ours = [name for name in names if name == OURS]
    rows: list[dict[str, Any]] = []
    for start in range(0, max(len(others), 1), peers):
        rows += run_rounds(ours + others[start : start + peers], pythons, task, rounds=rounds, seconds=seconds)
    first = [row for row in rows if row["name"] == OURS][:1]
    for row in first:
        row["rates"] = [rate for other in rows if other["name"] == OURS for rate in other["rates"]]
        row["ratios"] = []
    return first + [row for row in rows if row["name"] != OURS]


def format_table(rows: list[dict[str, Any]]) -> str:
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


def summarize(rows: list[dict[str, Any]]) -> str:
    """Return a sentence that compares Dragoman with the peer of the highest median speed."""
    peers = [row for row in rows if not row["name"].startswith(OURS)]
    if not any(row["ratios"] for row in peers):
        return "no peer to compare with"
    fastest = max(peers, key=lambda row: statistics.median(row["rates"]))
    ratios = fastest["ratios"]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} rounds"
    return f"Dragoman runs at {statistics.median(ratios):.2f} times the fastest peer, {fastest['name']} ({spread})"


def hardware() -> str:
    return f"{cpu_name()}, {os.cpu_count()} cores"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="minimum length of a turn")
    parser.add_argument("--sizes", default="small,base", help=f"sizes: {', '.join(SIZES)}")
    parser.add_argument("--precisions", default="float32,bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per batch on the longer side")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--mean", type=float, default=26.0, help="mean length of a sentence in tokens")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"the Python that runs a peer: {', '.join(KINDS)}",
    )
    parser.add_argument("--peers", type=int, default=2, help="peers in memory at a time, beside Dragoman")
    parser.add_argument("--only", default=",".join(KINDS), help="names of contestants")
    parser.add_argument("--compiled", default="", help="names of contestants that also run under torch.compile")
    parser.add_argument(
        "--quick", action="store_true", help="check that the benchmark runs; other options override its values"
    )
    parser.add_argument("--out", type=Path, help="folder for the results, such as bench/results")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def list_names(installed: list[str], compiled: list[str], size: str, precision: str) -> list[str]:
    """Return the contestants that can train this model, with compiled variants; print those without this precision."""
    able = [name for name in installed if SIZES[size]["kind"] in KINDS[name].models]
    for name in able:
        if precision not in KINDS[name].precisions:
            print(f"  {name} is skipped: it {KINDS[name].note}")
    names = [name for name in able if precision in KINDS[name].precisions]
    return names + [f"{name}{COMPILED}" for name in names if name in compiled and KINDS[name].compiles]


def make_task(options: argparse.Namespace, folder: str, size: str, precision: str) -> dict[str, Any]:
    """Return the task of every contestant (bench/peers/turns.py)."""
    shared = {name: getattr(options, name) for name in ("threads", "clock", "tokens")}
    training = {"device": "cpu", "overrides": [], "multiple": 1, "dropout": 0.1, "smoothing": 0.1, "clip": 1.0}
    return {
        **shared,
        **training,
        "folder": folder,
        "size": SIZES[size],
        "precision": precision,
        "vocabulary": VOCABULARY,
    }


def main() -> None:
    options = parse_options()
    pythons = dict(item.split("=", 1) for item in options.peer)
    for name in [*pythons, *options.only.split(","), *filter(None, options.compiled.split(","))]:
        if name not in KINDS:
            raise SystemExit(f"there is no contestant called {name!r} (there are: {', '.join(KINDS)})")
    installed = available(options.only.split(","), pythons)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "python": platform.python_version(),
        "settings": {k: str(v) for k, v in vars(options).items() if k not in ("peer", "out")},
        "races": [],
    }
    print(f"{report['hardware']}; {options.threads} threads; {options.tokens} tokens per batch and side")
    with tempfile.TemporaryDirectory() as folder:
        counts = write_corpus(Path(folder), pairs=options.pairs, mean=options.mean, vocabulary=VOCABULARY)
        print(f"{options.pairs} pairs, {counts['source']} source and {counts['target']} target tokens, EOS included")
        for size in options.sizes.split(","):
            for precision in options.precisions.split(","):
                print(f"\n## {size}, {precision}\n", flush=True)
                names = list_names(installed, options.compiled.split(","), size, precision)
                task = make_task(options, folder, size, precision)
                rows = run_groups(
                    names, pythons, task, peers=options.peers, rounds=options.rounds, seconds=options.seconds
                )
                report["races"].append({"size": size, "precision": precision, "contestants": rows})
                print("\n" + format_table(rows) + "\n\n" + summarize(rows), flush=True)
    if options.out:
        save(report, options.out)


def save(report: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine = "-".join(report["hardware"].replace(",", "").lower().split())
    stem = folder / f"{report['date']}-train_cpu-{machine}"
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
            format_table(rows),
            summarize(rows) + ".",
            f"Versions: {versions}.",
        ]
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    print(f"\nwritten to {stem}.json and .md")


if __name__ == "__main__":
    main()
