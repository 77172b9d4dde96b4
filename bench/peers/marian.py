"""Marian: its own process, which stands still between turns. Its log names every update and its labels.

Marian counts target tokens (with their end marks); source tokens are added by the corpus' own ratio.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from turns import Turns, task

# "... : Cost 9.01 * 4,012 @ 3,998 after 8,010 : ...": labels per update, labels in this update, labels so far
LABELS = re.compile(r"after ([\d,]+) : Time")


def command(asked: dict[str, Any], folder: Path) -> list[str]:
    size = asked["size"]
    options: dict[str, Any] = {
        "model": folder / f"marian-{size['width']}.npz",
        "type": "transformer",
        "enc-depth": size["layers"],
        "dec-depth": size["layers"],
        "dim-emb": size["width"],
        "transformer-dim-ffn": size["inner"],
        "transformer-heads": size["heads"],
        "transformer-dropout": asked["dropout"],
        "label-smoothing": asked["smoothing"],
        "clip-norm": asked["clip"],
        "optimizer": "adam",
        "learn-rate": 0.0001,
        "mini-batch-words": asked["tokens"],
        "mini-batch": 1000,
        "maxi-batch": 1000,
        "maxi-batch-sort": "trg",
        "max-length": 512,
        "workspace": 3000,
        "cpu-threads": asked["threads"],
        "disp-freq": "1u",
        "save-freq": "1000000u",
        "valid-freq": "1000000u",
        "after": "1000000u",
        "seed": 1,
    }
    words = str(folder / "marian-words.txt")
    sides = ["--train-sets", str(folder / "train.source"), str(folder / "train.target"), "--vocabs", words, words]
    flags = ["--tied-embeddings-all", "--sync-sgd", "--disp-label-counts", "--overwrite"]
    program = str(Path(sys.executable).parent / "pymarian")
    named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [program, "train", *named, *sides, *flags]


class Marian:
    def __init__(self, asked: dict[str, Any]) -> None:
        folder = Path(asked["folder"])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command(asked, folder), stderr=subprocess.PIPE, text=True, env=environment)
        counts = json.loads((folder / "counts.json").read_text())
        self.both = (counts["source"] + counts["target"]) / counts["target"]
        self.recent: list[str] = []

    def next_update(self) -> tuple[float, float, int]:
        """When the next update was logged, by the clock and by its own use of the CPU, and target tokens so far."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.recent = [*self.recent[-20:], line]
            found = LABELS.search(line)
            if found:
                return time.perf_counter(), self.used(), int(found[1].replace(",", ""))
        raise SystemExit("marian ended: " + "".join(self.recent))

    def used(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def train(self, seconds: float) -> dict[str, float]:
        """Timed from one log line to another, so that the update that was standing half done does not count."""
        self.process.send_signal(signal.SIGCONT)
        self.next_update()  # it may have been logged before the process stood still
        begun, begun_cpu, before = self.next_update()
        ended, ended_cpu, after, updates = begun, begun_cpu, before, 0
        while ended - begun < seconds:
            ended, ended_cpu, after = self.next_update()
            updates += 1
        self.process.send_signal(signal.SIGSTOP)
        tokens = (after - before) * self.both
        return {"tokens": tokens, "wall": ended - begun, "cpu": ended_cpu - begun_cpu, "updates": updates}


def main() -> None:
    asked, turns = task(), Turns()
    marian = Marian(asked)
    try:
        marian.next_update()
        marian.process.send_signal(signal.SIGSTOP)
        turns.ready(version=version("pymarian"))
        while True:
            turns.say(**marian.train(turns.wait()[0]))
    finally:
        marian.process.kill()


if __name__ == "__main__":
    main()
