"""How much memory does the data path hold on a corpus of millions of pairs?

    python bench/memory.py --pairs 5000000 --keep bench/results/FILE.json

The corpus comes from the phrasebook. Resident memory is read from the kernel after every part of the path: learning the
tokenizer, encoding, and reading batches as training does. What the libraries take when they are imported counts apart.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch

from dragoman.config import Recipe, build
from dragoman.data.stream import Place, Stream, ahead
from dragoman.store import RunFolder
from dragoman.train.prepare import prepare
from dragoman.train.report import Report


def resident(peak: bool = False) -> float:
    """Resident memory in MB, now or at its highest since `forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--keep", type=Path, help="where the result goes")
    asked = parser.parse_args()
    torch.zeros(1)
    imported = resident()
    forget_peak()
    with tempfile.TemporaryDirectory() as folder:
        recipe = build(
            Recipe,
            {
                "data": {"train": {"phrasebook": asked.pairs}, "cache": f"{folder}/cache"},
                "tokenizer": {"size": 3600},
            },
        )
        begun = time.monotonic()
        prepared = prepare(recipe, RunFolder(f"{folder}/run"), Report())
        prepare_peak, prepare_seconds = resident(peak=True), time.monotonic() - begun
        forget_peak()
        begun = time.monotonic()
        prepare(recipe, RunFolder(f"{folder}/run"), Report())
        again_seconds = time.monotonic() - begun
        stream = Stream(prepared.train, prepared.tokenizers, layout="packed", tokens=8192, seed=1)
        batches, tokens = ahead(lambda: stream.batches(Place())), 0
        begun = time.monotonic()
        for _ in range(asked.batches):
            tokens += next(batches)[0].tokens
        stream_seconds = time.monotonic() - begun
        batches.close()
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
            "pairs": asked.pairs,
            "MB when imported": round(imported),
            "MB of the data path while preparing, at most": round(prepare_peak - imported),
            "MB of the data path while training, at most": round(resident(peak=True) - imported),
            "seconds to prepare": round(prepare_seconds),
            "seconds to start again": round(again_seconds, 2),
            "tokens/s that the stream gives": round(tokens / stream_seconds),
        }
    print(json.dumps(result, indent=1))
    if asked.keep:
        asked.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
