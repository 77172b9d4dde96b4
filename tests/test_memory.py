"""Memory that a long process holds."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from dragoman import hardware

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p


@pytest.mark.skipif(not hasattr(LIBC, "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_goes_back_once_much_of_it_has_piled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are still in use stand between those that were freed, as they do after lines of many lengths."""
    size, count = 64 << 10, 3000
    hardware.keep_freed_memory()
    monkeypatch.setattr(hardware, "_resident_after_release", 0)
    hardware.release_memory()
    before = hardware.resident_memory()
    blocks = [LIBC.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for number, block in enumerate(blocks):
        if number % 100:
            LIBC.free(ctypes.c_void_p(block))
    assert hardware.resident_memory() > before + size * count // 2
    hardware.release_memory()
    assert hardware.resident_memory() < before + size * count // 4
    for block in blocks[::100]:
        LIBC.free(ctypes.c_void_p(block))


@pytest.mark.parametrize("given", ["", "7"])
def test_few_kernels_are_kept_for_shapes_seen_once(given: str) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    others = {name: value for name, value in os.environ.items() if name not in names}
    code = f"import dragoman, os; dragoman.UserError; print(*(os.environ[name] for name in {names}))"
    chosen = dict.fromkeys(names, given) if given else {}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=others | chosen, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == [given or "128"] * 2
