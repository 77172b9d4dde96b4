"""How fast does Dragoman train on a CPU, beside its peers? Real tokens per second, in one run, turn by turn.

    python bench/train_cpu.py
    python bench/train_cpu.py --peer hf=PYTHON --peer joeynmt=PYTHON --peer marian=PYTHON --sizes small --rounds 7

Every contestant is a process of its own (bench/peers/), in the Python given by --peer, and trains the same pairs with
a model of the same size, the same token budget a batch and the same number of threads. They take turns: in each round
every contestant trains for --seconds while the others stand still, and the ratio of speeds is taken within the round,
so that a machine that slows down slows all. Tokens are source and target tokens with their end marks, without begin
marks and without padding. What is not installed is skipped, and said.

On a machine that others use at the same time, `--threads 1 --clock cpu` counts the CPU seconds that each was given.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
SIZES: dict[str, dict[str, Any]] = {
    "small": {"kind": "transformer", "layers": 3, "width": 256, "inner": 1024, "heads": 4},
    "base": {"kind": "transformer", "layers": 6, "width": 512, "inner": 2048, "heads": 8},
    "lstm": {"kind": "rnn", "layers": 1, "width": 512, "feeding": True},  # with additive attention
    "lstm-unfed": {"kind": "rnn", "layers": 1, "width": 512, "feeding": False},
}
VOCABULARY = 8000  # joint, with the four special tokens
SPECIALS = 4
OURS = "dragoman"


class Kind(NamedTuple):
    script: str
    module: str  # what must be importable in its Python
    precisions: tuple[str, ...]
    compiles: bool
    note: str = ""
    models: tuple[str, ...] = ("transformer",)


KINDS = {
    OURS: Kind("dragoman_stepper.py", "dragoman", ("float32", "bf16"), True, models=("transformer", "rnn")),
    "torch": Kind("torch_transformer.py", "torch", ("float32", "bf16"), True),
    "hf": Kind("hf_marian.py", "transformers", ("float32", "bf16"), True),
    "joeynmt": Kind(
        "joey.py", "joeynmt", ("float32",), False, "has half precision on CUDA only", ("transformer", "rnn")
    ),
    "marian": Kind("marian.py", "pymarian", ("float32",), False, "trains in float32 only on a CPU"),
}


def write_corpus(folder: Path, *, pairs: int, mean: float, seed: int = 1) -> dict[str, int]:
    """Pairs of random tokens with log-normal lengths that go together, as ids and as words."""
    rng = np.random.default_rng(seed)
    spread, together = 0.6, 0.95
    first, second = rng.normal(size=(2, pairs))
    second = together * first + (1 - together**2) ** 0.5 * second
    lengths = {}
    for side, deviation in (("source", first), ("target", second)):
        length = np.exp(np.log(mean) - spread**2 / 2 + spread * deviation)
        lengths[side] = np.clip(np.round(length), 1, 120).astype(np.int64)
    stored = {}
    for side, length in lengths.items():
        stored[f"{side}_lengths"] = length
        stored[f"{side}_ids"] = rng.integers(SPECIALS, VOCABULARY, length.sum())
        sentences = np.split(stored[f"{side}_ids"], np.cumsum(length)[:-1])
        lines = [" ".join(f"w{i}" for i in ids) + "\n" for ids in sentences]
        (folder / f"train.{side}").write_text("".join(lines))
        (folder / f"dev.{side}").write_text("".join(lines[:10]))
    np.savez(folder / "pairs.npz", **stored)
    words = [f"w{i}" for i in range(SPECIALS, VOCABULARY)]
    (folder / "words.txt").write_text("\n".join(words) + "\n")
    (folder / "marian-words.txt").write_text("\n".join(["</s>", "<unk>", *words]) + "\n")
    counts = {side: int(length.sum()) + pairs for side, length in lengths.items()}
    (folder / "counts.json").write_text(json.dumps(counts))
    return counts


class Contestant:
    """A process that trains when told to."""

    def __init__(self, name: str, python: str, task: dict[str, Any], log: Path) -> None:
        self.name, self.log, self.clock = name, log, task["clock"]
        self.rates: list[float] = []
        kind = KINDS[name.removesuffix(" compiled")]
        threads = str(task["threads"])
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self.process = subprocess.Popen(
            [python, str(HERE / "peers" / kind.script), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
        )
        self.facts = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} gave up:\n" + "\n".join(self.log.read_text().splitlines()[-5:]))
        found: dict[str, Any] = json.loads(line)
        return found

    def train(self, seconds: float) -> float:
        """Real tokens per second over at least so many seconds of whole updates."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"go {seconds}\n")
        self.process.stdin.flush()
        done = self.answer()
        return float(done["tokens"] / done[self.clock])

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def contestants(
    names: list[str], pythons: dict[str, str], task: dict[str, Any], warm: float
) -> Iterator[list[Contestant]]:
    """Built one after the other, each warmed up with a turn that does not count."""
    ready: list[Contestant] = []
    try:
        for name in names:
            plain = name.removesuffix(" compiled")
            one = {**task, "compiled": name != plain}
            log = Path(task["folder"]) / f"{name}.log"
            try:
                contestant = Contestant(name, pythons[plain], one, log)
                ready.append(contestant)
                contestant.train(warm)
            except RuntimeError as error:
                ready = [c for c in ready if c.name != name]
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
        for turn in range(rounds):
            for contestant in ready[turn % len(ready) :] + ready[: turn % len(ready)]:  # nobody is always first
                try:
                    contestant.rates.append(contestant.train(seconds))
                except RuntimeError as error:
                    ready.remove(contestant)
                    print(f"  left out: {error}", flush=True)
            print("  " + "  ".join(f"{c.name} {c.rates[-1]:,.0f}" for c in ready), flush=True)
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
    info = Path("/proc/cpuinfo")
    found = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{found[0] if found else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def available(pythons: dict[str, str]) -> list[str]:
    found = []
    for name, kind in KINDS.items():
        python = pythons.setdefault(name, sys.executable)
        check = f"import importlib.util as u, sys; sys.exit(u.find_spec({kind.module!r}) is None)"
        if subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0:
            found.append(name)
        else:
            print(f"{name} is skipped: {kind.module} is not installed there; name its Python with --peer {name}=PYTHON")
    return found


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
    parser.add_argument("--out", type=Path, help="folder for the results, such as bench/results")
    return parser.parse_args()


def main() -> None:
    given = options()
    pythons = dict(item.split("=", 1) for item in given.peer)
    for name in [*pythons, *given.only.split(","), *filter(None, given.compiled.split(","))]:
        if name not in KINDS:
            raise SystemExit(f"there is no contestant called {name!r} (there are: {', '.join(KINDS)})")
    here = [name for name in available(pythons) if name in given.only.split(",")]
    report = {
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
        counts = write_corpus(Path(folder), pairs=given.pairs, mean=given.mean)
        print(
            f"{given.pairs} pairs, {counts['source']} source and {counts['target']} target tokens, end marks included"
        )
        for size in given.sizes.split(","):
            for precision in given.precisions.split(","):
                able = [name for name in here if SIZES[size]["kind"] in KINDS[name].models]
                names = [name for name in able if precision in KINDS[name].precisions]
                names += [
                    f"{name} compiled" for name in names if name in given.compiled.split(",") and KINDS[name].compiles
                ]
                print(f"\n## {size}, {precision}\n", flush=True)
                for name in able:
                    if precision not in KINDS[name].precisions:
                        print(f"  {name} is skipped: it {KINDS[name].note}")
                task = {
                    "folder": folder,
                    "size": SIZES[size],
                    "precision": precision,
                    "threads": given.threads,
                    "clock": given.clock,
                    "tokens": given.tokens,
                    "vocabulary": VOCABULARY,
                    "dropout": 0.1,
                    "smoothing": 0.1,
                    "clip": 1.0,
                }
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
