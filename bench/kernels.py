"""Profile a training step: time by kind of work and by kernel. Called by train_gpu.py --profile.

Kernels are classified by their names: matrix products of Muon count as matrix products, most of its other work as
elementwise.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 32  # profiled: twice the interval at which the trainer reads numbers from the device
KINDS = {  # kind of work -> pattern of kernel names; the first match counts
    "exchange between GPUs": r"nccl",
    "attention": r"flash|fmha|attention|attend|sdpa|flex|^_(forward|backward|queries|keys|query|key|score)",
    "loss": r"cross_entropy|softmax|soften|nll_loss|logsumexp|loss",
    "optimizer and norm of the gradient": r"adam|multi_tensor|foreach|lpnorm|lerp|linalg_vector_norm",
    "matrix products": r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitk|matmul|triton_tem|(^|::|_)(add|b|baddb)?mm|linear",
    "copies between host and device": r"^mem(cpy|set)",
    "dropout, norms, elementwise": r"triton|dropout|norm|elementwise|reduce|embedding|index|gather|scatter|copy|aten::"
    r"|^_(draw|slope)",
}
REST = "the rest"


class Kernel(NamedTuple):
    name: str
    ms: float  # of one step
    calls: float


class StepProfiler:
    """Observe updates: some to warm up, some timed, some profiled; then end training by an exception."""

    def __init__(self, warm: int, on_gpu: bool) -> None:
        self.warm, self.on_gpu = warm, on_gpu
        self.updates = self.tokens = 0
        self.flops = self.seconds = 0.0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.record = profile(activities=activities)

    def ready(self, **facts: Any) -> None:
        print(", ".join(f"{name} {fact}" for name, fact in facts.items()), flush=True)

    def before(self) -> None:
        if self.updates == self.warm:
            self.tokens, self.flops, self.seconds = 0, 0.0, self.now()
        elif self.updates == self.warm + STEPS:
            self.seconds = (self.now() - self.seconds) / STEPS
            speed, flops = self.tokens / STEPS / self.seconds, self.flops / STEPS / self.seconds
            print(f"a step takes {self.seconds * 1e3:.2f} ms: {speed:,.0f} tokens/s, {flops / 1e12:.1f} TFLOP/s")
            self.record.start()
        elif self.updates == self.warm + 2 * STEPS:
            self.now()
            self.record.stop()
            raise ProfileComplete

    def after(self, tokens: int, flops: float) -> None:
        self.updates += 1
        self.tokens, self.flops = self.tokens + tokens, self.flops + flops

    def now(self) -> float:
        """Return the time, after waiting for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def kernels(self) -> list[Kernel]:
        """Return the kernels by time, longest first; on a CPU, operators are listed instead of kernels."""
        found = []
        for event in self.record.key_averages():
            is_kernel = event.device_type == torch.profiler.DeviceType.CUDA and not event.key.startswith("##")
            if is_kernel != self.on_gpu or getattr(event, "is_user_annotation", False):
                continue
            spent = event.self_device_time_total if self.on_gpu else event.self_cpu_time_total
            found.append(Kernel(event.key, spent / 1000 / STEPS, event.count / STEPS))
        return sorted((kernel for kernel in found if kernel.ms), key=lambda kernel: -kernel.ms)


class ProfileComplete(Exception):
    """Raised to end training when all steps are profiled."""


def classify_kernel(kernel: str) -> str:
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel.lower())), REST)


def profile_training(task: dict[str, Any], warm: int, top: int = 30) -> Iterator[str]:
    """Profile Dragoman's training step after `warm` other steps; yield the lines of a report."""
    from dragoman_train import train

    profiler = StepProfiler(warm, on_gpu=task["device"] != "cpu")
    try:
        train(task, profiler)
    except ProfileComplete:
        yield from format_report(profiler.kernels(), profiler.seconds * 1000, top)


def format_report(kernels: list[Kernel], wall: float, top: int) -> Iterator[str]:
    """Yield tables by kind of work and by kernel. `wall` is the time of a step without the profiler, in ms."""
    spent: Counter[str] = Counter()
    for kernel in kernels:
        spent[classify_kernel(kernel.name)] += kernel.ms  # type: ignore[assignment]
    busy = sum(spent.values())
    yield ""
    yield "| kind of work | ms per step | fraction |"
    yield "|---|---|---|"
    for kind, ms in spent.most_common():
        yield f"| {kind} | {ms:.2f} | {ms / busy:.1%} |"
    yield f"| all | {busy:.2f} | of {wall:.2f} ms by the clock |"
    yield ""
    yield "| kernel | kind | ms per step | calls |"
    yield "|---|---|---|---|"
    for kernel in kernels[:top]:
        yield f"| {kernel.name[:90]} | {classify_kernel(kernel.name)} | {kernel.ms:.3f} | {kernel.calls:g} |"
