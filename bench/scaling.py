"""How do time and memory grow with the length of a text, for every way to read it?

    python bench/scaling.py --keep bench/results/2026-11-15-scaling-cpu

One encoder layer of each kind reads one text and learns from it: forward and backward. On a CPU, time is that of one
thread at work, so that other processes do not count, and memory is what PyTorch asks for during the step, at its
highest; on a GPU, time is the clock's, and memory what the allocator hands out. A straight line through the
logarithms, from `--fit` tokens on, gives the exponents. `--keep` leaves a JSON file, a table and a figure (which needs
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
LIMIT = 1.2  # of the efficient ones' exponents, and of full attention's in memory
VOCABULARY = 1000
Row = dict[str, float]


def encoder(kind: str, width: int, length: int) -> nn.Module:
    embedding = nn.Embedding(VOCABULARY, width)
    if kind == "recurrent":
        return RecurrentEncoder(RnnSettings(width=width, layers=1, dropout=0.0), embedding)
    settings = TransformerSettings(
        width=width, heads=width // 16, layers=1, dropout=0.0, attention=kind, max_length=length
    )
    return Encoder(settings, embedding)


def learning(kind: str, width: int, length: int, device: str) -> Callable[[], None]:
    """One step: read a text, and learn from it."""
    torch.manual_seed(1)
    model = encoder(kind, width, length).to(device)
    ids_BT = torch.randint(4, VOCABULARY, (1, length), device=device)
    rows = RowLayout.from_padding_mask(torch.ones_like(ids_BT, dtype=torch.bool))
    weight_C = torch.randn(width, device=device)

    def step() -> None:
        states_BTC: Tensor = model(ids_BT, rows)
        torch.autograd.backward((states_BTC * weight_C).sum())
        model.zero_grad()

    return step


def seconds(step: Callable[[], None], device: str, repeats: int) -> float:
    """The median step."""
    taken = []
    for _ in range(repeats + 1):
        begun = now(device)
        step()
        taken.append(now(device) - begun)
    return statistics.median(taken[1:])


def now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def megabytes(step: Callable[[], None], device: str) -> float:
    """What a step holds at its highest, beyond the model and its input."""
    if device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    asked = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return float(np.cumsum(asked).max()) / 1e6


def measured(kind: str, asked: argparse.Namespace) -> list[Row]:
    rows = []
    for length in asked.lengths:
        step = learning(kind, asked.width, length, asked.device)
        row = {"length": length, "ms": 1000 * seconds(step, asked.device, asked.repeats)}
        rows.append(row | {"MB": megabytes(step, asked.device)})
        print(f"{kind:10} {length:6,} tokens {row['ms']:10.1f} ms {rows[-1]['MB']:9.1f} MB", flush=True)
    return rows


def exponent(rows: list[Row], of: str, least: int) -> float:
    kept = [(row["length"], row[of]) for row in rows if row["length"] >= least]
    lengths, values = np.log(np.array(kept)).T
    slope: float = np.polyfit(lengths, values, 1)[0]
    return round(slope, 3)


def verdict(exponents: dict[str, dict[str, float]]) -> str:
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
        places = apart(ends, (top - bottom) / 22)
        for kind, rows in found.items():
            x = [row["length"] for row in rows]
            (line,) = axis.plot(x, [row[of] for row in rows], marker="o", markersize=3.5, linewidth=1.6)
            label = f"{kind} {exponents[kind][of]:.2f}"
            axis.text(x[-1] * 1.15, np.exp(places[kind]), label, color=line.get_color(), va="center", fontsize=9)
        axis.set(xscale="log", yscale="log", xlabel="tokens of a text", xlim=(x[0] * 0.85, x[-1] * 5))
        axis.set_title(f"{name}, and its exponent", loc="left")
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xticks(x, [f"{length:,}" for length in x], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    shown.savefig(file, metadata={"Date": None})


def apart(ends: dict[str, float], least: float) -> dict[str, float]:
    """Places for labels at these heights, moved up where one would lie upon another."""
    places: dict[str, float] = {}
    for kind in sorted(ends, key=ends.__getitem__):
        places[kind] = max([ends[kind], *(place + least for place in places.values())])
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fit", type=int, default=1024, help="the shortest text that counts for the exponents")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--machine", default=platform.processor() or platform.machine(), help="what to call this one")
    parser.add_argument("--keep", type=Path, help="where the results go, without a suffix")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {kind: measured(kind, asked) for kind in KINDS}
    exponents = {kind: {of: exponent(rows, of, asked.fit) for of in ("ms", "MB")} for kind, rows in found.items()}
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{asked.machine}, {asked.device}, torch {torch.__version__}",
        "step": f"forward and backward of one encoder layer, width {asked.width}, batch 1, float32",
        "fitted from": f"{asked.fit:,} tokens",
        "full attention": f"a CPU holds its scores below {math.isqrt(LONG_SCORES):,} tokens, where that is faster",
        "verdict": verdict(exponents),
    }
    lines = [f"# Scaling, {about['date']}", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    text = "\n".join([*lines, table(found, exponents, "ms"), "", table(found, exponents, "MB"), ""])
    print(text)
    if asked.keep:
        result = {**about, "exponents": exponents, "found": found}
        asked.keep.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        asked.keep.with_suffix(".md").write_text(
            f"{text}\n![time and memory]({asked.keep.name}.svg)\n", encoding="utf-8"
        )
        figure(found, exponents, asked.keep.with_suffix(".svg"))


if __name__ == "__main__":
    main()
