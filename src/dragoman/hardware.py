"""What the hardware can do: instructions of the CPU, memory, the precision that is fast, the speed of products.

Everything that chooses a kernel, a precision or an engine by what the CPU can do asks `cpu_features`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch

from dragoman.types import UserError

GROWTH = 64 << 20  # bytes of freed memory that may pile up between two batches
MASK = "DRAGOMAN_CPU_FEATURES"  # the features to use, such as "avx2" or "none"; by default all that the CPU has
ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # oneDNN's own limit, under its new and its old name


@dataclass(frozen=True)
class CpuFeatures:
    """Instructions that matter to results or to speed."""

    avx2: bool = False
    avx512: bool = False
    vnni: bool = False  # x86: products of 8 bits added up in 32 bits (AVX-512 VNNI or AVX-VNNI)
    bf16: bool = False  # products in bf16, on x86 and ARM
    amx: bool = False
    dotprod: bool = False  # ARM: products of 8 bits added up in 32 bits
    i8mm: bool = False  # ARM: the same for matrices

    @property
    def exact_int8(self) -> bool:
        """Whether sums of products of 8-bit numbers are exact.

        Without VNNI, x86 libraries add two products in 16 bits, which saturate (`vpmaddubsw`). AVX-VNNI without AVX-512
        does not count: that every library uses it has not been verified.
        """
        return (self.vnni and self.avx512) or self.dotprod or self.i8mm

    def limited_to(self, names: set[str]) -> CpuFeatures:
        """Return the features that are among `names`."""
        return CpuFeatures(**{name: there and name in names for name, there in asdict(self).items()})

    def __str__(self) -> str:
        return ", ".join(name for name, there in asdict(self).items() if there) or "none"


NAMES = [field.name for field in fields(CpuFeatures)]
FLAGS = {  # the names of each feature in /proc/cpuinfo and in torch.cpu.get_capabilities
    "avx2": {"avx2"},
    "avx512": {"avx512bw", "avx512_bw"},  # oneDNN's first level of AVX-512 has F, BW, VL and DQ, which come together
    "vnni": {"avx512_vnni", "avx_vnni"},
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "amx": {"amx_tile"},
    "dotprod": {"asimddp", "dot"},
    "i8mm": {"i8mm"},
}
LEVELS = {  # what the levels of ONEDNN_MAX_CPU_ISA leave; higher ones leave everything
    "SSE41": set[str](),
    "AVX": set[str](),
    "AVX2": {"avx2"},
    "AVX2_VNNI": {"avx2", "vnni"},
    "AVX2_VNNI_2": {"avx2", "vnni"},
    "AVX512_CORE": {"avx2", "avx512"},
    "AVX512_CORE_VNNI": {"avx2", "avx512", "vnni"},
    "AVX512_CORE_BF16": {"avx2", "avx512", "vnni", "bf16"},
    "AVX512_CORE_FP16": {"avx2", "avx512", "vnni", "bf16"},
    "AVX10_1_512": {"avx2", "avx512", "vnni", "bf16"},
}


def cpu_features(environment: Mapping[str, str] = os.environ) -> CpuFeatures:
    """Return what the CPU has, less what oneDNN is told not to use and what DRAGOMAN_CPU_FEATURES leaves out."""
    found = detect_features(cpu_flags())
    level = next((environment[name] for name in ISA if environment.get(name)), "").upper()
    if level in LEVELS:
        found = found.limited_to(LEVELS[level])
    if wanted := environment.get(MASK, "").strip():
        names = {name.strip() for name in wanted.split(",")} - {"none", ""}
        if unknown := sorted(names.difference(NAMES)):
            raise UserError(f"{MASK} names {unknown[0]!r}, which is no CPU feature; use none or {', '.join(NAMES)}")
        found = found.limited_to(names)
    return found


def detect_features(flags: frozenset[str]) -> CpuFeatures:
    return CpuFeatures(**{name: not names.isdisjoint(flags) for name, names in FLAGS.items()})


@cache
def cpu_flags() -> frozenset[str]:
    """Return the names of the CPU's features, from Linux or, elsewhere, from PyTorch."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    known: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every PyTorch
    return frozenset(name for name, there in known.items() if there is True)


@cache
def cpu_name() -> str:
    """Return the model name of the CPU, for reports only: what a CPU can do is not known by its name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def hold_memory() -> None:
    """Keep blocks that were freed for the next step, where the C library is glibc.

    It hands large ones back to the kernel at once, and fetching fresh pages for every large tensor costs a fifth of
    the speed of the product that fills it.
    """
    trim_threshold, mmap_threshold = -1, -3  # names of glibc's malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


_released = 0  # resident bytes after the last `release_memory`


def release_memory() -> None:
    """Hand freed blocks back to the kernel once the process has grown by GROWTH bytes since the last time.

    After `hold_memory` the C library never does so itself, and lines of many lengths leave blocks of many sizes.
    """
    global _released
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim and resident_memory() > _released + GROWTH:
        trim(0)
        _released = resident_memory()


def resident_memory() -> int:
    """Return the bytes of this process that are in memory; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def memory_of(device: torch.device) -> int:
    """All of its bytes, whoever holds them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def best_precision(device: torch.device) -> str:
    """Return bf16 where there are instructions for it, else float32: emulated bf16 is slower.

    ARM's instructions for bf16 have not been measured, and are used only by name.
    """
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    features = cpu_features()
    return "bf16" if features.bf16 and features.avx512 else "float32"


@cache
def matrix_speed(device: torch.device, precision: str) -> float:
    """Operations a second that a product of large matrices reaches here: what all other speeds can be held against."""
    size = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        product = one @ other
        product[0, 0].item()  # waits until it is there
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best
