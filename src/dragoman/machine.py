"""What this machine does best."""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache

import torch


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


def memory_of(device: torch.device) -> int:
    """All of its bytes, whoever holds them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def best_precision(device: torch.device) -> str:
    """bf16 where there are instructions for it: elsewhere it is emulated, and slower than float32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if fast else "float32"


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
