"""Measure the memory of the data pipeline on a corpus of millions of pairs.

    python bench/memory.py --pairs 5000000 --keep bench/results/FILE.json

The corpus is first written from the phrasebook, by other processes, into two plain files. Resident memory is read from
the kernel after each part of the pipeline: training the tokenizer, encoding, and reading batches as in training. Memory
used by imported libraries is reported separately.
"""

import argparse
import json
import platform
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from dragoman.config.settings import parse_settings
from dragoman.data.preparation import write_phrasebook
from dragoman.data.stream import BatchStream, StreamPosition, prefetch
from dragoman.progress import Report
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.training.prepare import prepare_data


def read_resident(peak: bool = False) -> float:
    """Return resident memory in MB: the current value, or the peak since `reset_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def write(part: tuple[str, int, int]) -> None:
    prefix, count, seed = part
    write_phrasebook(Path(prefix), count=count, split="train", seed=seed, gold=False, conllu=False)


def write_corpus(folder: str, pairs: int, workers: int) -> dict[str, str]:
    """Write two files with this number of pairs. Parts of different seeds may have a few pairs in common."""
    parts = [(f"{folder}/part{seed}", pairs // workers, seed) for seed in range(workers)]
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(write, parts))
    for side in ("en", "de"):
        with Path(f"{folder}/all.{side}").open("wb") as whole:
            for prefix, _, _ in parts:
                whole.write(Path(f"{prefix}.{side}").read_bytes())
                Path(f"{prefix}.{side}").unlink()
    return {"source": f"{folder}/all.en", "target": f"{folder}/all.de"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2, help="processes that write the corpus")
    parser.add_argument("--keep", type=Path, help="write the result to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write_corpus(folder, options.pairs, options.workers)
        torch.zeros(1)
        imported = read_resident()
        reset_peak()
        recipe = parse_settings(
            Recipe,
            {
                "data": {"train": files, "cache": f"{folder}/cache"},
                "tokenizer": {"size": 3600},
            },
        )
        start = time.monotonic()
        prepared = prepare_data(recipe, RunFolder(f"{folder}/run"), Report())
        prepare_peak, prepare_seconds = read_resident(peak=True), time.monotonic() - start
        reset_peak()
        start = time.monotonic()
        prepare_data(recipe, RunFolder(f"{folder}/run"), Report())
        again_seconds = time.monotonic() - start
        stream = BatchStream(prepared.train, prepared.tokenizers, layout="packed", tokens=8192, seed=1)
        batches, tokens = prefetch(lambda: stream.batches(StreamPosition())), 0
        start = time.monotonic()
        for _ in range(options.batches):
            tokens += next(batches)[0].tokens
        stream_seconds = time.monotonic() - start
        batches.close()
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
            "pairs": options.pairs,
            "MB when imported": round(imported),
            "MB of the data path while preparing, at most": round(prepare_peak - imported),
            "MB of the data path while training, at most": round(read_resident(peak=True) - imported),
            "seconds to prepare": round(prepare_seconds),
            "seconds to start again": round(again_seconds, 2),
            "tokens/s that the stream gives": round(tokens / stream_seconds),
        }
    print(json.dumps(result, indent=1))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
