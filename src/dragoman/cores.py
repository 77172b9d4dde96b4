"""How many cores this process may keep busy: in a container often far fewer than the machine has.

PyTorch counts those that are there. With 64 threads and time for two of them, most of that time goes
to waiting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def cores() -> int:
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(there, quota())))


def keep_to_quota() -> None:
    """Let libraries that are loaded from now on, here and in processes begun from here, make no more threads than
    there is time for; unless it was said how many."""
    if math.isfinite(quota()):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))


def quota(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """The cores' worth of time that control groups, the own and all above it, leave to this process."""
    return min(quotas(mounted, own), default=math.inf)


def quotas(mounted: Path, own: Path) -> Iterator[float]:
    """In version 2 one file holds quota and period, in version 1 two do; -1 or max: no limit."""
    for folder in groups(mounted, own):
        held = words(folder / "cpu.max") or words(folder / "cpu.cfs_quota_us") + words(folder / "cpu.cfs_period_us")
        if len(held) == 2 and all(word.isdigit() for word in held) and int(held[1]):
            yield int(held[0]) / int(held[1])


def groups(mounted: Path, own: Path) -> Iterator[Path]:
    """The folders of the control groups that this process is in, from the inmost up; inside a container, the root."""
    for line in own.read_text().splitlines() if own.exists() else []:
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        root = mounted / kinds if kinds else mounted
        inmost = root / path.lstrip("/")
        yield from (folder for folder in (inmost, *inmost.parents) if folder.is_relative_to(root))


def words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
