"""Translation on a CPU: all engines of Dragoman beside Hugging Face and CTranslate2, same weights and lines, one run.

    python bench/translate_cpu.py RUN [RUN ...] --source F [--reference F] [--beams 4 1] [--rounds 5] [--out F.json]
    python bench/translate_cpu.py RUN --source F --quick

Everything is counted end to end, from lines to lines, models loaded before. Rounds are interleaved, each in an order
of its own, since what ran before leaves its traces, and the first is thrown away. Speeds are medians; a ratio is the
median of the ratios of single rounds, which other load on the machine disturbs least. Tokens are those of the answers,
end marks counted. An engine or a peer that cannot run the model, or whose precision the CPU does not have, is left out.
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
from translators import System, ctranslate2, describe_machine, huggingface, ours

PEER, FASTEST = "huggingface", "ctranslate2 int8, raw"  # what speeds are compared with
TURN = 2.0  # seconds, at least: who is done sooner translates the same lines again
QUICK: dict[str, Any] = {"lines": 10, "rounds": 1, "beams": [2], "turn": 0.0}  # shows nothing but that it runs
BATCH = 32  # of the peers: best or within 3 % of the best of 16, 32, 64 and 128 for all sizes


def systems(translator: Translator, beam: int) -> dict[str, Callable[[], System]]:
    return {
        PEER: partial(huggingface, translator, beam, BATCH, torch.float32),
        "ctranslate2 float32, raw": partial(ctranslate2, translator, beam, BATCH, "float32"),
        FASTEST: partial(ctranslate2, translator, beam, BATCH, "int8"),
        **{f"dragoman {name}": partial(ours, translator, name, beam) for name in ENGINES},
    }


def compared(
    translator: Translator,
    beam: int,
    lines: Sequence[str],
    references: Sequence[str] | None,
    rounds: int,
    turn: float = TURN,
) -> dict[str, Any]:
    threads = torch.get_num_threads()
    made: dict[str, System] = {}
    for name, make in systems(translator, beam).items():
        try:
            made[name] = make()
        except (UserError, ImportError) as lack:
            print(f"  {name} is left out: {lack}", file=sys.stderr, flush=True)
        torch.set_num_threads(threads)  # opening CTranslate2 changes it
    speeds: dict[str, list[float]] = {name: [] for name in made}
    texts: dict[str, list[str]] = {}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(made), len(made)):
            some = lines if number else lines[: max(len(lines) // 5, 1)]
            begun, passes = time.perf_counter(), 0
            while not passes or time.perf_counter() - begun < turn:
                texts[name] = made[name].translate(some)
                passes += 1
            seconds = (time.perf_counter() - begun) / passes
            tokens = sum(len(ids) + 1 for ids in translator.tokenizers.target.encode_all(texts[name]))
            if number:
                speeds[name].append(tokens / seconds)
        print(f"  round {number} of {rounds}", file=sys.stderr, flush=True)
    found = {}
    for name in made:
        found[name] = {
            "tokens_per_second": round(statistics.median(speeds[name])),
            "of_huggingface": ratio(speeds[name], speeds.get(PEER)),
            "of_raw_ctranslate2_int8": ratio(speeds[name], speeds.get(FASTEST)),
            "rounds": [round(speed) for speed in speeds[name]],
        }
        if PEER in texts:
            same = sum(a == b for a, b in zip(texts[name], texts[PEER], strict=True))
            found[name]["same_text_as_huggingface"] = same / len(lines)
        if references:
            found[name]["bleu"] = round(METRICS["bleu"](texts[name], [references]).value, 2)
    return found


def ratio(one: Sequence[float], other: Sequence[float] | None) -> float | None:
    return None if not other else round(statistics.median(a / b for a, b in zip(one, other, strict=True)), 2)


def table(found: dict[str, Any]) -> str:
    """Markdown, for bench/results."""
    rows = ["| model | beam | engine | tokens/s | x HF | x raw CT2 int8 | same text as HF | BLEU |", "|---" * 8 + "|"]
    for run, beams in found["runs"].items():
        for beam, engines in beams.items():
            rows += [
                f"| {run} | {beam} | {name} | {one['tokens_per_second']:,} | {shown(one['of_huggingface'])} | "
                f"{shown(one['of_raw_ctranslate2_int8'])} | {shown(one.get('same_text_as_huggingface'), '.1%')} | "
                f"{shown(one.get('bleu'))} |"
                for name, one in engines.items()
            ]
    return "\n".join(rows)


def shown(value: float | None, how: str = ".2f") -> str:
    return "" if value is None else format(value, how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--turn", type=float, default=TURN, help="seconds of one turn, at least")
    parser.add_argument("--quick", action="store_true", help="few lines, one round: shows nothing but that it runs")
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
            beam: compared(translator, beam, lines, references, options.rounds, options.turn) for beam in options.beams
        }
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
