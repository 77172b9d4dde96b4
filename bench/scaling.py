"""Measure how time and memory grow with the length of a text, for every attention pattern and a recurrent encoder.

    python bench/scaling.py --keep bench/results/2026-11-15-scaling-cpu

Forward and backward pass of one encoder layer on one text. On a CPU, time is the CPU time of one thread, which does not
depend on other processes, and memory is the peak of PyTorch's allocations during the step. On a GPU, time is elapsed
time, and memory is the peak of the caching allocator. The exponents are slopes of a linear fit to the logarithms, for
texts of at least `--fit` tokens. `--keep` writes a JSON file, a table and a figure (which needs
`pip install 'dragoman[figures]'`).
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.kernels.attention import LONG_SCORES, RowLayout
from dragoman.models.rnn import RecurrentEncoder, RnnSettings
from dragoman.models.transformer import Encoder, TransformerSettings
from dragoman.modules.patterns import PATTERNS

LENGTHS = [2**power for power in range(8, 15)]
KINDS = ["recurrent", *PATTERNS]
EFFICIENT = [name for name in PATTERNS if name != "full"]
LIMIT = 1.2  # maximum exponent of efficient patterns, and of the memory of full attention
VOCABULARY = 1000
Row = dict[str, float]


def build_encoder(kind: str, width: int, length: int) -> nn.Module:
    embedding = nn.Embedding(VOCABULARY, width)
    if kind == "recurrent":
        return RecurrentEncoder(RnnSettings(width=width, layers=1, dropout=0.0), embedding)
    settings = TransformerSettings(
        width=width, heads=width // 16, layers=1, dropout=0.0, attention=kind, max_length=length
    )
    return Encoder(settings, embedding)


def make_step(kind: str, width: int, length: int, device: str) -> Callable[[], None]:
    """Return a function that runs a forward and backward pass over one text."""
    torch.manual_seed(1)
    model = build_encoder(kind, width, length).to(device)
    ids_BT = torch.randint(4, VOCABULARY, (1, length), device=device)
    rows = RowLayout.from_padding_mask(torch.ones_like(ids_BT, dtype=torch.bool))
    weight_C = torch.randn(width, device=device)

    def step() -> None:
        states_BTC: Tensor = model(ids_BT, rows)
        torch.autograd.backward((states_BTC * weight_C).sum())
        model.zero_grad()

    return step


def measure_seconds(step: Callable[[], None], device: str, repeats: int) -> float:
    """Return the median time of a step in seconds."""
    times = []
    for _ in range(repeats + 1):
        start = now(device)
        step()
        times.append(now(device) - start)
    return statistics.median(times[1:])


def now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure_megabytes(step: Callable[[], None], device: str) -> float:
    """Return the peak memory of a step in MB, without the model and its input."""
    if device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return float(np.cumsum(allocated).max()) / 1e6


def measure(kind: str, options: argparse.Namespace) -> list[Row]:
    rows = []
    for length in options.lengths:
        step = make_step(kind, options.width, length, options.device)
        row = {"length": length, "ms": 1000 * measure_seconds(step, options.device, options.repeats)}
        rows.append(row | {"MB": measure_megabytes(step, options.device)})
        print(f"{kind:10} {length:6,} tokens {row['ms']:10.1f} ms {rows[-1]['MB']:9.1f} MB", flush=True)
    return rows


def fit_exponent(rows: list[Row], of: str, least: int) -> float:
    kept = [(row["length"], row[of]) for row in rows if row["length"] >= least]
    lengths, values = np.log(np.array(kept)).T
    slope: float = np.polyfit(lengths, values, 1)[0]
    return round(slope, 3)


def summarize(exponents: dict[str, dict[str, float]]) -> str:
    held = {f"{kind} in {of}": exponents[kind][of] for kind in EFFICIENT for of in ("ms", "MB")}
    held["full in MB"] = exponents["full"]["MB"]
    over = [f"{name} {value}" for name, value in held.items() if value > LIMIT]
    return f"over {LIMIT}: {', '.join(over)}" if over else f"all that should be at most {LIMIT} are"


def table(found: dict[str, list[Row]], exponents: dict[str, dict[str, float]], of: str) -> str:
    lengths = [row["length"] for row in found["full"]]
    lines = [
        f"| {of} | {' | '.join(f'{length:,}' for length in lengths)} | exponent |",
        "|---" * (len(lengths) + 2) + "|",
    ]
    for kind, rows in found.items():
        lines.append(f"| {kind} | {' | '.join(f'{row[of]:,.1f}' for row in rows)} | {exponents[kind][of]:.2f} |")
    return "\n".join(lines)


def figure(found: dict[str, list[Row]], exponents: dict[str, dict[str, float]], file: Path) -> None:
    """Both quantities against length; every line is named at its end, with its exponent."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    shown, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for axis, of, name in zip(axes, ("ms", "MB"), ("time of a step, ms", "memory of a step, MB")):
        ends = {kind: float(np.log(rows[-1][of])) for kind, rows in found.items()}
        bottom, top = (np.log(edge(row[of] for rows in found.values() for row in rows)) for edge in (min, max))
        heights = spread_labels(ends, (top - bottom) / 22)
        for kind, rows in found.items():
            x = [row["length"] for row in rows]
            (line,) = axis.plot(x, [row[of] for row in rows], marker="o", markersize=3.5, linewidth=1.6)
            label = f"{kind} {exponents[kind][of]:.2f}"
            axis.text(x[-1] * 1.15, np.exp(heights[kind]), label, color=line.get_color(), va="center", fontsize=9)
        axis.set(xscale="log", yscale="log", xlabel="tokens of a text", xlim=(x[0] * 0.85, x[-1] * 5))
        axis.set_title(f"{name}, and its exponent", loc="left")
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xticks(x, [f"{length:,}" for length in x], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    shown.savefig(file, metadata={"Date": None})


def spread_labels(ends: dict[str, float], distance: float) -> dict[str, float]:
    """Return heights for labels at the ends of lines, moved up where labels would overlap."""
    heights: dict[str, float] = {}
    for kind in sorted(ends, key=ends.__getitem__):
        heights[kind] = max([ends[kind], *(height + distance for height in heights.values())])
    return heights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fit", type=int, default=1024, help="minimum length of texts in the fit of the exponents")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--machine", default=platform.processor() or platform.machine(), help="name of this machine in the report"
    )
    parser.add_argument("--keep", type=Path, help="write results to this path with suffixes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {kind: measure(kind, options) for kind in KINDS}
    exponents = {kind: {of: fit_exponent(rows, of, options.fit) for of in ("ms", "MB")} for kind, rows in found.items()}
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{options.machine}, {options.device}, torch {torch.__version__}",
        "step": f"forward and backward of one encoder layer, width {options.width}, batch 1, float32",
        "fitted from": f"{options.fit:,} tokens",
        "full attention": f"a CPU holds its scores below {math.isqrt(LONG_SCORES):,} tokens, where that is faster",
        "verdict": summarize(exponents),
    }
    lines = [f"# Scaling, {about['date']}", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    text = "\n".join([*lines, table(found, exponents, "ms"), "", table(found, exponents, "MB"), ""])
    print(text)
    if options.keep:
        result = {**about, "exponents": exponents, "found": found}
        options.keep.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        options.keep.with_suffix(".md").write_text(
            f"{text}\n![time and memory]({options.keep.name}.svg)\n", encoding="utf-8"
        )
        figure(found, exponents, options.keep.with_suffix(".svg"))


if __name__ == "__main__":
    main()
