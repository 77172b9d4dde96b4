"""Compare the speed of translation on a GPU: Dragoman and Hugging Face `generate`, same weights and sentences.

    python bench/translate_gpu.py RUN --source F [--reference F] [--flight 256] [--beams 4 1] [--out F.json]

Each has two speeds: of the search alone, from ids to ids, and end to end, from lines to lines. Rounds are interleaved;
the first one is not counted (compilation, CUDA graphs). Tokens are those of the translations, EOS included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dragoman.inference.loading import load_as

sys.path.insert(0, str(Path(__file__).parent))
from dragoman.inference.translator import Translator
from dragoman.io import read_lines
from dragoman.metrics.metrics import METRICS
from translators import System, open_dragoman, open_huggingface

PEER = "huggingface generate"


def measure(call: Callable[[], Any]) -> tuple[Any, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start


def compare(
    translator: Translator, systems: dict[str, System], lines: Sequence[str], references: Any, rounds: int
) -> dict[str, Any]:
    ids = translator.tokenizers.source.encode_all(lines)
    speeds: dict[str, dict[str, list[float]]] = {name: {"search": [], "lines": []} for name in systems}
    texts = {}
    for number in range(rounds + 1):
        for name, system in systems.items():
            found, seconds = measure(partial(system.search, ids))
            tokens = sum(len(each) + 1 for each in found)
            texts[name], whole = measure(partial(system.translate, lines))
            if number:
                speeds[name]["search"].append(tokens / seconds)
                speeds[name]["lines"].append(tokens / whole)
    result: dict[str, Any] = {}
    for name, kinds in speeds.items():
        same = sum(a == b for a, b in zip(texts[name], texts[PEER], strict=True)) / len(lines)
        result[name] = {"same_text": round(same, 3)}
        for kind, values in kinds.items():
            ratios = [a / b for a, b in zip(values, speeds[PEER][kind], strict=True)]
            result[name][kind] = {
                "tokens_per_second": round(statistics.median(values)),
                "times": round(statistics.median(ratios), 2),
            }
        if references:
            result[name]["bleu"] = round(METRICS["bleu"](texts[name], [references]).value, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--flight", type=int, default=256, help="sentences at a time")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=8, help="the file so many times over")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = list(read_lines(options.source)) * options.repeat
    read = list(read_lines(options.reference)) if options.reference else []
    translator = load_as(Translator, options.run, device="cuda")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": len(lines)}
    for beam in options.beams:
        systems = {
            PEER: open_huggingface(translator, beam, options.flight, torch.bfloat16),
            "dragoman torch-bf16": open_dragoman(translator, "torch-bf16", beam),
        }
        found[f"beam {beam}"] = compare(translator, systems, lines, read * options.repeat, options.rounds)
        print(json.dumps({beam: found[f"beam {beam}"]}), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
