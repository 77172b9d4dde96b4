"""Train tiny models and compare every loss, gradient norm and final weight with an earlier commit, bit by bit.

python tools/golden_training.py --write FILE       train each model and record its numbers
python tools/golden_training.py --compare FILE     train the models of FILE again; exit 1 if any bit differs
python tools/golden_training.py --compare FILE --tolerance 1e-6     for commits that change arithmetic on purpose

There is a run for each kind of model, for each choice of its settings (norm, position, cell, ...), and for training
settings that change the arithmetic. A run is named by its settings, and only the public interface is used, so a file
written by one commit can be compared with any other commit. To measure another checkout, put its `src` first on
PYTHONPATH. Bits depend on the CPU and on the version of PyTorch, so compare on the machine that wrote the file.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

import dragoman

RECIPE = """
data: {train: {phrasebook: 400}, dev: {phrasebook: 16}}
tokenizer: {kind: bpe, size: 320}
train:
  {steps: 20, tokens: 128, lr: 1e-2, warmup: 5, log_every: 1, validate_lines: 0, metric: loss,
   device: cpu, threads: 1, precision: float32, compile: false}
"""
SMALL_MODEL = {  # used as far as a kind of model has these settings
    "layers": 1,
    "width": 16,
    "heads": 2,
    "window": 4,
    "block": 4,
    "rank": 4,
    "context": 32,
}
# Data for classifiers
LABELLED_DATA = ["data.train={tsv: labelled.tsv}", "data.dev={tsv: labelled.tsv}", "tokenizer.kind=char"]
# Settings with one run per choice, in addition to all settings of the section model
VARIED_SETTINGS = {"train.optimizer", "train.schedule", "train.loss", "train.consistency", "tokenizer.kind"}
REQUIRED_SETTINGS = {  # other settings without which a setting has no effect
    "model.nonlinearity": ["model.cell=vanilla"],
    "model.kernel": ["model.dropout=0"],
    "train.optimizer": ["train.weight_decay=0.1"],
}
COMBINED_SETTINGS = [  # runs that change several settings; the first trains like the demo
    "model.position=rotary train.optimizer=muon train.weight_decay=0.1 train.schedule=cosine",
    "train.precision=bf16",
    "train.accumulate=2",
    "train.ema=0.9",
    "train.label_smoothing=0",
    "train.optimizer=adamw train.weight_decay=0.1",
    "train.clip=0",
    "train.average=2 train.validate_every=5",
    "train.freeze=[encoder.*]",
    "train.optimizer=sgd train.clip=0.1 train.accumulate=2",
    "train.optimizer=muon train.accumulate=2 train.ema=0.9",
    "train.consistency=rdrop train.accumulate=2",
    "data.both_ways=true tokenizer.sampling=0.2",
    "model.tied=false tokenizer.joint=false",
    "model.layers=2 model.shared=true",
    "model.encoder_layers=2 model.decoder_layers=1 model.query_width=8 model.value_width=32",
    "model.source_word_dropout=0.2 model.target_word_dropout=0.2 model.layer_dropout=0.2",
    "model.head_dropout=0.2 model.activation_dropout=0.2",
    "model.kind=rnn model.layers=2 model.input_feeding=true",
    "model.kind=rnn model.bidirectional=false model.tied=false",
    "model.kind=rnn train.optimizer=muon train.ema=0.9",
    "model.kind=rnn train.consistency=rdrop train.accumulate=2",
    "model.kind=lm train.optimizer=muon train.accumulate=2",
    "model.kind=classifier train.consistency=rdrop",
    "model.kind=classifier model.backbone=rnn model.pool=last",
    "model.kind=classifier model.backbone=rnn model.pool=last_token",
]


@cache
def list_settings(*overrides: str) -> list[dict[str, Any]]:
    """Return all settings for a kind of model, with defaults and choices, as `dragoman settings` prints them."""
    command = [sys.executable, "-m", "dragoman", "settings", "--json", *overrides]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def list_variants() -> Iterator[str]:
    """Yield the settings of each run: every kind of model, and every choice with the first kind that has it."""
    seen: set[str] = set()
    kinds = next(setting["choices"] for setting in list_settings() if setting["name"] == "model.kind")
    for kind in (f"model.kind={name}" for name in kinds):
        yield kind
        for setting in list_settings(kind):
            name = setting["name"]
            if name == "model.kind" or (setting["section"] != "model" and name not in VARIED_SETTINGS):
                continue
            for choice in (f"{name}={value}" for value in setting["choices"] if value != setting["default"]):
                if choice not in seen or name == "model.backbone":
                    seen.add(choice)
                    yield " ".join([kind, choice, *REQUIRED_SETTINGS.get(name, ())])
    yield from COMBINED_SETTINGS


def train_run(variant: str, folder: Path) -> dict[str, Any]:
    """Train one model; return the loss and gradient norm of each step, the dev losses, and a digest of the weights."""
    overrides = variant.split()
    kinds = [override for override in overrides if override.startswith(("model.kind=", "model.backbone="))]
    known = {setting["name"] for setting in list_settings(*kinds)}
    small = [f"model.{name}={value}" for name, value in SMALL_MODEL.items() if f"model.{name}" in known]
    data = LABELLED_DATA if "model.kind=classifier" in overrides else []
    run = folder / hashlib.sha256(variant.encode()).hexdigest()[:16]
    with redirect_stderr(io.StringIO()):
        dragoman.train(folder / "recipe.yaml", out=run, overrides=[*small, *data, *overrides])
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [event for event in events if event["event"] == "train"]
    return {
        "loss": [write_float(event["loss"]) for event in steps],
        "grad_norm": [write_float(event["grad_norm"]) for event in steps],
        "dev_loss": [write_float(event["loss"]) for event in events if event["event"] == "validate"],
        "weights": digest_weights(run / "model.safetensors"),
    }


def write_float(value: float | None) -> str:
    """Return a number in hexadecimal, without rounding. None stands for infinity or NaN in metrics.jsonl."""
    return float("nan" if value is None else value).hex()


def digest_weights(path: Path) -> str:
    """Return a digest of the names, types, shapes and values of all tensors, independent of their order in the file."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train_all(variants: list[str]) -> dict[str, dict[str, Any]]:
    """Train every variant in a temporary folder, which also has the cache; return the results of `train_run`."""
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, random = Path(temporary), Random(1)
        (folder / "recipe.yaml").write_text(RECIPE.replace("data: {", f"data: {{cache: {folder / 'cache'}, "))
        lines = [" ".join(random.choices(["dog", "cat", "sees", "old", "house"], k=6)) for _ in range(200)]
        labelled = "".join(f"{line}\t{'more' if line.count('dog') > 1 else 'less'}\n" for line in lines)
        (folder / "labelled.tsv").write_text(labelled)
        for number, variant in enumerate(variants, 1):
            print(f"\r{number}/{len(variants)} {variant}\x1b[K", end="", file=sys.stderr, flush=True)
            try:
                results[variant] = train_run(variant, folder)
            except Exception as error:  # report the failure and continue with the other runs
                results[variant] = {"error": f"{type(error).__name__}: {error}"}
    print("\r\x1b[K", end="", file=sys.stderr)
    return results


def relative_difference(first: str, second: str) -> float:
    """Return the difference between two numbers, as written by `write_float`, relative to the larger one."""
    a, b = float.fromhex(first), float.fromhex(second)
    if first == second:  # also if both are NaN
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def describe_difference(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> str:
    """Return what differs by more than the tolerance, or "". With a tolerance, weights are not compared."""
    if "error" in now:
        return str(now["error"])
    worst, parts = 0.0, []
    for name, unit in (("loss", "step"), ("grad_norm", "step"), ("dev_loss", "validation")):
        if len(before[name]) != len(now[name]):
            return f"{len(now[name])} numbers of {name} instead of {len(before[name])}"
        differences = [relative_difference(*pair) for pair in zip(before[name], now[name], strict=True)]
        worst = max([worst, *differences])
        first = next((n for n, difference in enumerate(differences, 1) if difference > tolerance), None)
        parts += [f"{name} from {unit} {first} on"] if first else []
    if not tolerance and before["weights"] != now["weights"]:
        parts.append("final weights")
    return f"{', '.join(parts)}; largest relative difference {worst:.1e}" if parts else ""


def describe_machine() -> dict[str, str]:
    """Return what results depend on besides the code: PyTorch's version and the CPU's instruction set."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--write", type=Path, metavar="FILE")
    task.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--tolerance", type=float, default=0.0, help="accepted relative difference")
    parser.add_argument("--only", default="", metavar="TEXT", help="train only runs whose settings contain this text")
    arguments = parser.parse_args()
    if arguments.write:
        results = train_all([variant for variant in list_variants() if arguments.only in variant])
        for variant in [name for name, run in results.items() if "error" in run]:
            print(f"left out: {variant}: {results.pop(variant)['error']}")
        contents = {"machine": describe_machine(), "runs": results}
        arguments.write.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        print(f"{len(results)} runs of {Path(dragoman.__file__).parent} written to {arguments.write}")
        return
    reference = json.loads(arguments.compare.read_text(encoding="utf-8"))
    if reference["machine"] != describe_machine():
        print(f"written on another machine: {reference['machine']}; this machine: {describe_machine()}")
    results = train_all([variant for variant in reference["runs"] if arguments.only in variant])
    differing = 0
    for variant, now in results.items():
        if difference := describe_difference(reference["runs"][variant], now, arguments.tolerance):
            differing += 1
            print(f"differs: {variant}: {difference}")
    how = f"within {arguments.tolerance:g}" if arguments.tolerance else "to the bit"
    print(f"{len(results) - differing} of {len(results)} runs are equal {how}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
