"""The hardware: CPU features and quotas, threads, devices, precision and memory.

Kernels, precisions and engines are chosen according to `cpu_features`. The CPU quota of a container is often far below
the number of cores of the machine. PyTorch still starts one thread per core, and 64 threads on a quota of two cores
spend most of their time waiting, so `limit_threads` sets the number of threads. PyTorch is imported inside functions,
because commands that do not use it should start quickly.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.errors import UserError

if TYPE_CHECKING:
    import torch

RELEASE_THRESHOLD = 64 << 20  # bytes: growth of the process after which freed memory is returned to the system
# Environment variable: the CPU features to use, such as "avx2" or "none"; all by default
FEATURES_VARIABLE = "DRAGOMAN_CPU_FEATURES"
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # environment variables: oneDNN's limit, new and old name


@dataclass(frozen=True)
class CpuFeatures:
    """CPU instructions that affect results or speed."""

    avx2: bool = False
    avx512: bool = False
    vnni: bool = False  # x86: int8 products accumulated in int32 (AVX-512 VNNI or AVX-VNNI)
    bf16: bool = False  # products in bf16, on x86 and ARM
    amx: bool = False  # x86: products of small matrices (tiles)
    dotprod: bool = False  # ARM: int8 products accumulated in int32
    i8mm: bool = False  # ARM: the same for matrices

    @property
    def exact_int8(self) -> bool:
        """Whether sums of int8 products are exact.

        Without VNNI, x86 libraries add two products in int16, which saturates (`vpmaddubsw`). AVX-VNNI without AVX-512
        does not count, since it is not verified that every library uses it.
        """
        return (self.vnni and self.avx512) or self.dotprod or self.i8mm

    def limited_to(self, names: set[str]) -> CpuFeatures:
        return CpuFeatures(**{name: present and name in names for name, present in asdict(self).items()})

    def __str__(self) -> str:
        return ", ".join(name for name, present in asdict(self).items() if present) or "none"


FEATURE_FLAGS = {  # feature -> its names in /proc/cpuinfo and in torch.cpu.get_capabilities
    "avx2": {"avx2"},
    "avx512": {"avx512bw", "avx512_bw"},  # oneDNN requires F, BW, VL and DQ, which all CPUs with BW have
    "vnni": {"avx512_vnni", "avx_vnni"},
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "amx": {"amx_tile"},
    "dotprod": {"asimddp", "dot"},
    "i8mm": {"i8mm"},
}
ISA_FEATURES = {  # value of ONEDNN_MAX_CPU_ISA -> features that oneDNN may still use; higher levels allow all
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
    """Return the features of the CPU that oneDNN may use and DRAGOMAN_CPU_FEATURES allows."""
    features = detect_features(read_cpu_flags())
    isa_level = next((environment[name] for name in ISA_VARIABLES if environment.get(name)), "").upper()
    if isa_level in ISA_FEATURES:
        features = features.limited_to(ISA_FEATURES[isa_level])
    if allowed := environment.get(FEATURES_VARIABLE, "").strip():
        names = {name.strip() for name in allowed.split(",")} - {"none", ""}
        if unknown := sorted(names.difference(FEATURE_FLAGS)):
            known = ", ".join(FEATURE_FLAGS)
            raise UserError(f"{FEATURES_VARIABLE} names {unknown[0]!r}, not a CPU feature; use none or {known}")
        features = features.limited_to(names)
    return features


def detect_features(flags: frozenset[str]) -> CpuFeatures:
    return CpuFeatures(**{name: not names.isdisjoint(flags) for name, names in FEATURE_FLAGS.items()})


def read_cpuinfo(*names: str) -> str:
    """Return the first value in /proc/cpuinfo with one of these names; an empty string if there is none."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


@cache
def read_cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags as /proc/cpuinfo names them or, without that file, as PyTorch does."""
    import torch

    if flags := read_cpuinfo("flags", "Features"):
        return frozenset(flags.split())
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # not in older PyTorch
    return frozenset(name for name, present in capabilities.items() if present is True)


def cpu_name() -> str:
    """Return the model name of the CPU, for reports only. What a CPU can do is read from `cpu_features`."""
    return read_cpuinfo("model name") or platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the system. Does nothing with other C libraries.

    By default glibc returns large blocks at once. The system then has to provide new pages for every large tensor,
    which makes the matrix product that fills the tensor a fifth slower.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(mmap_threshold, 1 << 30)  # bytes from which blocks come from mmap and are unmapped when freed
        mallopt(trim_threshold, (1 << 31) - 1)  # the largest int: keep all free memory at the end of the heap


_resident_after_release = 0  # resident bytes after the last `release_memory`


def release_memory() -> None:
    """Return freed memory to the system if the process has grown by RELEASE_THRESHOLD bytes since the last release.

    After `keep_freed_memory` glibc never returns memory by itself, and tensors of many lengths leave free blocks that
    later tensors do not fit into.
    """
    global _resident_after_release
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim and resident_memory() > _resident_after_release + RELEASE_THRESHOLD:
        trim(0)  # 0: leave no free memory at the end of the heap
        _resident_after_release = resident_memory()


def resident_memory() -> int:
    """Return the resident memory of this process in bytes; 0 if unknown."""
    words = read_words(Path("/proc/self/statm"))  # numbers of pages: total, resident, ...
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else 0


def total_memory(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def best_precision(device: torch.device) -> str:
    """Return "bf16" if the device has instructions for it, else "float32", because emulated bf16 is slower.

    The default on ARM is float32: the speed of its bf16 instructions has not been measured.
    """
    import torch

    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    features = cpu_features()
    return "bf16" if features.bf16 and features.avx512 else "float32"


@cache
def measure_matmul_flops(device: torch.device, precision: str) -> float:
    """Return the FLOP/s of a product of large matrices: the denominator of the device utilization in training logs."""
    import torch

    size = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")  # seconds of the fastest of five products
    for _ in range(5):
        start = time.perf_counter()
        product = left @ right
        product[0, 0].item()  # wait for the GPU
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best  # each of the size**2 results takes `size` multiplications and additions


THREADS_VARIABLE = "OMP_NUM_THREADS"  # environment variable that PyTorch and other libraries read
_limited_threads = ""  # the value of THREADS_VARIABLE that `limit_threads` set; "" if it set none


def usable_cores() -> int:
    """Return how many cores this process can use: those it may run on, up to its CPU quota."""
    return max(1, math.ceil(min(available_cores(), cpu_quota())))


def available_cores() -> int:
    """Return how many cores this process may run on (its CPU affinity), regardless of its quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_runtime_defaults() -> None:
    """Set environment variables that PyTorch and its libraries read on import, unless the user has set them."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        # oneDNN, and PyTorch in every thread, cache one kernel for each shape of a matrix product. The default of
        # 1,024 kernels takes half a gigabyte after a few thousand sentences of different lengths.
        os.environ.setdefault(name, "128")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow down other processes (docs/LOG.md)


def limit_threads() -> None:
    """Set OMP_NUM_THREADS to the CPU quota, unless the user has set it.

    Libraries imported later and subprocesses read this variable.
    """
    global _limited_threads
    if THREADS_VARIABLE not in os.environ and cpu_quota() < available_cores():
        os.environ[THREADS_VARIABLE] = _limited_threads = str(usable_cores())


def thread_limited_environment(processes: int) -> dict[str, str]:
    """Return the environment for one of several processes that share the cores.

    If the user has set the number of threads, it is kept.
    """
    set_by_user = os.environ.get(THREADS_VARIABLE, _limited_threads) != _limited_threads  # not by `limit_threads`
    threads = {} if set_by_user or processes == 1 else {THREADS_VARIABLE: str(max(1, usable_cores() // processes))}
    return {**os.environ, **threads}


def cpu_quota(mount: Path = Path("/sys/fs/cgroup"), memberships: Path = Path("/proc/self/cgroup")) -> float:
    """Return the CPU quota in cores: the minimum over the control group (cgroup) of this process and its ancestors.

    cgroup v2 has quota and period in one file (cpu.max), v1 in two; -1 or max means no limit. `mount` is where cgroups
    are mounted; `memberships` is the file that lists the cgroups of this process. Inside a container, the container's
    cgroup is the root.
    """
    quotas = [math.inf]
    for _, controllers, path in (line.split(":", 2) for line in read_words(memberships) if line.count(":") > 1):
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / "cpu" if controllers else mount  # v2 lists no controllers; v1 links cpu to cpu,cpuacct
        innermost = root / path.lstrip("/")
        for folder in (innermost, *innermost.parents):
            version_1 = read_words(folder / "cpu.cfs_quota_us") + read_words(folder / "cpu.cfs_period_us")
            limits = read_words(folder / "cpu.max") or version_1
            if folder.is_relative_to(root) and len(limits) == 2 and all(map(str.isdigit, limits)) and int(limits[1]):
                quotas.append(int(limits[0]) / int(limits[1]))
    return min(quotas)


def read_words(file: Path) -> list[str]:
    """Return the words of a text file; an empty list if it cannot be read."""
    try:
        return file.read_text().split()
    except OSError:
        return []


BATCH_ROWS = {"cpu": 8, "cuda": 64}  # rows of a batch in inference, by supported type of device


def choose_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is a GPU if available. Raise a UserError for an unusable device."""
    import torch

    if name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise UserError(f"there is no device called {name!r}; write auto, cpu, cuda or cuda:1") from None
        if device.type not in BATCH_ROWS:
            raise UserError(f"device {name!r} is not supported; write auto, cpu, cuda or cuda:1")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"there is no device {name!r}; this machine has {torch.cuda.device_count()} CUDA devices")
        set_current_gpu(device)
    if device.type == "cuda" and find_spec("triton") is None:  # Dragoman's kernels need it
        raise UserError("a GPU needs Triton, which is not installed; run pip install triton, or choose the device cpu")
    return device


def set_current_gpu(device: torch.device) -> None:
    """Make this the current GPU: streams, CUDA graphs and Triton kernels use it, wherever their tensors are."""
    import torch

    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
