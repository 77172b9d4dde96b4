"""Translation on a GPU: Dragoman's engine beside Hugging Face `generate`, the same weights and sentences, in one run.

    python bench/translate_gpu.py RUN --source F [--reference F] [--flight 256] [--beams 4 1] [--out F.json]

Rounds are interleaved; the first of each is thrown away (compilation, capture, libraries getting warm). Tokens are
those of the answers, end marks counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from dragoman.loading import load
from dragoman.score.metrics import METRICS
from translators import huggingface, ours


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--flight", type=int, default=256)
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=1, help="the file so many times over")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = options.source.read_text(encoding="utf-8").splitlines() * options.repeat
    references = (
        options.reference.read_text(encoding="utf-8").splitlines() * options.repeat if options.reference else None
    )
    translator = load(options.run, device="cuda")
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": len(lines), "beams": {}}
    for beam in options.beams:
        translates = {
            "huggingface": huggingface(translator, beam, options.flight, torch.bfloat16),
            "dragoman bf16": ours(translator, "torch-bf16", beam),
        }
        found["beams"][beam] = compare(translator, translates, lines, references, options.rounds)
        print(json.dumps({beam: found["beams"][beam]}), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def compare(translator, translates, lines, references, rounds):
    speeds = {name: [] for name in translates}
    texts = {}
    for number in range(rounds):
        for name, translate in translates.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            texts[name] = translate(lines)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
            tokens = sum(len(ids) + 1 for ids in translator.tokenizers.target.encode_all(texts[name]))
            if number:
                speeds[name].append(tokens / seconds)
    first = next(iter(translates))
    result = {}
    for name, values in speeds.items():
        ratios = [a / b for a, b in zip(values, speeds[first], strict=True)]
        result[name] = {
            "tokens_per_second": round(statistics.median(values)),
            "times": round(statistics.median(ratios), 2),
            "same_text": sum(a == b for a, b in zip(texts[name], texts[first], strict=True)) / len(lines),
        }
        if references:
            result[name]["bleu"] = round(METRICS["bleu"](texts[name], [references]).value, 2)
    return result


if __name__ == "__main__":
    main()
