"""Shared by the benchmarks of training speed: model sizes, contestants (bench/peers/), the corpus, taking turns.

Every contestant is a process and trains a model of the same size on the same pairs. In each round every contestant
trains for some seconds while the others wait, so that ratios within a round are fair even if the machine slows down.
Tokens are source and target tokens, with EOS and without BOS and padding.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "kind": "transformer",
        "layers": 1,
        "width": 16,
        "inner": 32,
        "heads": 2,
    },  # for tests
    "small": {"kind": "transformer", "layers": 3, "width": 256, "inner": 1024, "heads": 4},
    "base": {"kind": "transformer", "layers": 6, "width": 512, "inner": 2048, "heads": 8},
    "big": {"kind": "transformer", "layers": 6, "width": 1024, "inner": 4096, "heads": 16},
    "lstm": {"kind": "rnn", "layers": 1, "width": 512, "feeding": True},  # with additive attention
    "lstm-unfed": {"kind": "rnn", "layers": 1, "width": 512, "feeding": False},
}
SPECIALS = 4  # ids reserved for special tokens
OURS = "dragoman"
COMPILED = " compiled"  # suffix of a contestant's name: it runs under torch.compile


class Kind(NamedTuple):
    script: str
    module: str  # must be importable in the contestant's Python
    precisions: tuple[str, ...]  # supported on a CPU
    compiles: bool  # supports torch.compile
    note: str = ""  # why a precision is not supported
    models: tuple[str, ...] = ("transformer",)


KINDS = {
    OURS: Kind("dragoman_train.py", "dragoman", ("float32", "bf16"), True, models=("transformer", "rnn")),
    "torch": Kind("torch_transformer.py", "torch", ("float32", "bf16"), True),
    "torch-lstm": Kind("torch_lstm.py", "torch", ("float32", "bf16"), False, models=("rnn",)),
    "hf": Kind("hf_marian.py", "transformers", ("float32", "bf16"), True),
    "joeynmt": Kind(
        "joey.py", "joeynmt", ("float32",), False, "has half precision on CUDA only", ("transformer", "rnn")
    ),
    "marian": Kind("marian.py", "pymarian", ("float32",), False, "trains in float32 only on a CPU"),
}


def available(names: Iterable[str], pythons: dict[str, str]) -> list[str]:
    """Return the contestants whose Python has the module they need; print the names of the others."""
    installed = []
    for name in names:
        kind = KINDS[name]
        python = pythons.setdefault(name, sys.executable)
        check = f"import importlib.util as u, sys; sys.exit(u.find_spec({kind.module!r}) is None)"
        if subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0:
            installed.append(name)
        else:
            print(f"{name} is skipped: {kind.module} is not installed there; name its Python with --peer {name}=PYTHON")
    return installed


def write_corpus(
    folder: Path, *, pairs: int, mean: float, vocabulary: int, shortest: int = 1, longest: int = 120, seed: int = 1
) -> dict[str, int]:
    """Write pairs of random tokens, as ids and as words; lengths are log-normal and correlated. Return token counts."""
    rng = np.random.default_rng(seed)
    spread, correlation = 0.6, 0.95
    first, second = rng.normal(size=(2, pairs))
    second = correlation * first + (1 - correlation**2) ** 0.5 * second
    lengths = {}
    for side, deviation in (("source", first), ("target", second)):
        length = np.exp(np.log(mean) - spread**2 / 2 + spread * deviation)
        lengths[side] = np.clip(np.round(length), shortest, longest).astype(np.int64)
    arrays = {}
    words = np.array([f"w{i}" for i in range(vocabulary)], dtype=object)
    for side, length in lengths.items():
        arrays[f"{side}_lengths"] = length
        arrays[f"{side}_ids"] = rng.integers(SPECIALS, vocabulary, length.sum())
        sentences = np.split(words[arrays[f"{side}_ids"]], np.cumsum(length)[:-1])
        lines = [" ".join(sentence) + "\n" for sentence in sentences]
        (folder / f"train.{side}").write_text("".join(lines))
        (folder / f"dev.{side}").write_text("".join(lines[:10]))
    np.savez(folder / "pairs.npz", **arrays)
    vocabulary_words = words[SPECIALS:].tolist()
    (folder / "words.txt").write_text("\n".join(vocabulary_words) + "\n")
    (folder / "marian-words.txt").write_text("\n".join(["</s>", "<unk>", *vocabulary_words]) + "\n")
    counts = {side: int(length.sum()) + pairs for side, length in lengths.items()}
    (folder / "counts.json").write_text(json.dumps(counts))
    return counts


class Contestant:
    """A process that trains on request and answers with lines of JSON (bench/peers/turns.py)."""

    def __init__(self, name: str, python: str, kind: Kind, task: dict[str, Any]) -> None:
        self.name, self.clock = name, task["clock"]
        self.log = Path(task["folder"]) / f"{name}.log"
        self.rates: list[float] = []
        self.facts: dict[str, Any] = {}
        self.lines: queue.Queue[str] = queue.Queue()
        threads = str(task["threads"])
        self.start_time = time.time()
        self.process = subprocess.Popen(
            [python, str(HERE / "peers" / kind.script), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )
        threading.Thread(target=self.read_output, daemon=True).start()

    def read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def request(self, seconds: float, updates: int = 1) -> None:
        """Start a turn of at least this length and number of updates; `answer` returns its result."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended: `answer` reports why
            self.process.stdin.write(f"go {seconds} {updates}\n")
            self.process.stdin.flush()

    def answer(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the next answer of the process; raise a RuntimeError if it ends or does not answer in time."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(f"{self.name} did not answer in time") from None
        if not line:
            raise RuntimeError(f"{self.name} ended:\n" + "\n".join(self.log.read_text().splitlines()[-5:]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def train(self, seconds: float) -> float:
        """Train for at least this time; return tokens per second, without padding."""
        self.request(seconds)
        done = self.answer()
        self.facts["peak"] = done.get("peak", 0)
        if done.get("flops"):
            self.facts["flops_per_token"] = done["flops"] / done["tokens"]
        return float(done["tokens"] / done[self.clock])

    def end(self, timeout: float = 20.0) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()


def take_turns(ready: list[Contestant], *, rounds: int, seconds: float, until: float = float("inf")) -> Iterator[str]:
    """Run rounds in which each contestant trains; yield a report. None starts that would end after `until`."""
    longest_round = 0.0
    for number in range(rounds):
        start = time.monotonic()
        if not ready:
            return
        if start + longest_round > until:
            yield f"no time for more than {number} of {rounds} rounds"
            return
        for contestant in (
            ready[number % len(ready) :] + ready[: number % len(ready)]
        ):  # the order changes from round to round
            try:
                contestant.rates.append(contestant.train(seconds))
            except RuntimeError as error:
                ready.remove(contestant)
                contestant.end()
                yield f"left out: {error}"
        longest_round = max(longest_round, time.monotonic() - start)
        yield "  ".join(f"{c.name} {c.rates[-1]:,.0f}" for c in ready)
