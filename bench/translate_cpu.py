"""Compare the speed of translation on a CPU: all engines of Dragoman, Hugging Face and CTranslate2, same weights.

    python bench/translate_cpu.py RUN [RUN ...] --source F [--reference F] [--beams 4 1] [--rounds 5] [--out F.json]
    python bench/translate_cpu.py RUN --source F --quick

Speeds are end to end, from lines to lines, without loading. Rounds are interleaved, in random order, and the first
one is not counted. Speeds are medians over the rounds; a ratio is the median of the ratios within each round, which
other load on the machine affects least. Tokens are those of the translations, EOS included. Engines and peers that
cannot run the model, or whose precision the CPU does not support, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dragoman.inference.loading import load_as

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does

import torch

sys.path.insert(0, str(Path(__file__).parent))
from dragoman.errors import UserError
from dragoman.inference.loading import ENGINES
from dragoman.inference.translator import Translator
from dragoman.io import read_lines
from dragoman.metrics.metrics import METRICS
from translators import System, describe_machine, open_ctranslate2, open_dragoman, open_huggingface

PEER, FASTEST = "huggingface", "ctranslate2 int8, raw"  # ratios are relative to these
TURN = 2.0  # minimum seconds of a turn: faster systems translate the same lines again
QUICK: dict[str, Any] = {"lines": 10, "rounds": 1, "beams": [2], "turn": 0.0}  # only checks that the benchmark runs
BATCH = 32  # batch size of the peers: best of 16, 32, 64 and 128, or within 3 % of it, for all sizes


def list_systems(translator: Translator, beam: int) -> dict[str, Callable[[], System]]:
    return {
        PEER: partial(open_huggingface, translator, beam, BATCH, torch.float32),
        "ctranslate2 float32, raw": partial(open_ctranslate2, translator, beam, BATCH, "float32"),
        FASTEST: partial(open_ctranslate2, translator, beam, BATCH, "int8"),
        **{f"dragoman {name}": partial(open_dragoman, translator, name, beam) for name in ENGINES},
    }


def compare(
    translator: Translator,
    beam: int,
    lines: Sequence[str],
    references: Sequence[str] | None,
    rounds: int,
    turn: float = TURN,
) -> dict[str, Any]:
    threads = torch.get_num_threads()
    systems: dict[str, System] = {}
    for name, open_system in list_systems(translator, beam).items():
        try:
            systems[name] = open_system()
        except (UserError, ImportError) as lack:
            print(f"  {name} is left out: {lack}", file=sys.stderr, flush=True)
        torch.set_num_threads(threads)  # opening CTranslate2 changes it
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    texts: dict[str, list[str]] = {}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(systems), len(systems)):
            some = lines if number else lines[: max(len(lines) // 5, 1)]
            start, passes = time.perf_counter(), 0
            while not passes or time.perf_counter() - start < turn:
                texts[name] = systems[name].translate(some)
                passes += 1
            seconds = (time.perf_counter() - start) / passes
            tokens = sum(len(ids) + 1 for ids in translator.tokenizers.target.encode_all(texts[name]))
            if number:
                speeds[name].append(tokens / seconds)
        print(f"  round {number} of {rounds}", file=sys.stderr, flush=True)
    found = {}
    for name in systems:
        found[name] = {
            "tokens_per_second": round(statistics.median(speeds[name])),
            "of_huggingface": median_ratio(speeds[name], speeds.get(PEER)),
            "of_raw_ctranslate2_int8": median_ratio(speeds[name], speeds.get(FASTEST)),
            "rounds": [round(speed) for speed in speeds[name]],
        }
        if PEER in texts:
            same = sum(a == b for a, b in zip(texts[name], texts[PEER], strict=True))
            found[name]["same_text_as_huggingface"] = same / len(lines)
        if references:
            found[name]["bleu"] = round(METRICS["bleu"](texts[name], [references]).value, 2)
    return found


def median_ratio(one: Sequence[float], other: Sequence[float] | None) -> float | None:
    return None if not other else round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 2)


def format_table(found: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    rows = ["| model | beam | engine | tokens/s | x HF | x raw CT2 int8 | same text as HF | BLEU |", "|---" * 8 + "|"]
    for run, beams in found["runs"].items():
        for beam, engines in beams.items():
            rows += [
                f"| {run} | {beam} | {name} | {one['tokens_per_second']:,} | {format_value(one['of_huggingface'])} | "
                f"{format_value(one['of_raw_ctranslate2_int8'])} | "
                f"{format_value(one.get('same_text_as_huggingface'), '.1%')} | {format_value(one.get('bleu'))} |"
                for name, one in engines.items()
            ]
    return "\n".join(rows)


def format_value(value: float | None, how: str = ".2f") -> str:
    return "" if value is None else format(value, how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--turn", type=float, default=TURN, help="minimum seconds of a turn")
    parser.add_argument(
        "--quick", action="store_true", help="few lines and one round, to check that the benchmark runs"
    )
    parser.add_argument("--out", type=Path)
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    lines = list(read_lines(options.source))[: options.lines]
    references = list(read_lines(options.reference))[: options.lines] if options.reference else None
    found: dict[str, Any] = {
        "machine": [*describe_machine(), f"Python {platform.python_version()}"],
        "lines": len(lines),
        "runs": {},
    }
    for run in options.runs:
        translator = load_as(Translator, run, device="cpu")
        found["runs"][run.name] = {
            beam: compare(translator, beam, lines, references, options.rounds, options.turn) for beam in options.beams
        }
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(format_table(found))


if __name__ == "__main__":
    main()
