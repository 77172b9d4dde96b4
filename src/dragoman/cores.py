"""How many cores this process may keep busy: in a container often far fewer than the machine has.

PyTorch counts those that are there. With 64 threads and time for two of them, most of that time goes
to waiting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

THREADS = "OMP_NUM_THREADS"  # what PyTorch and others ask for the number of theirs
_kept = ""  # what `keep_to_quota` has put there


def cores() -> int:
    return max(1, math.ceil(min(there(), quota())))


def there() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_to_quota() -> None:
    """Let libraries that are loaded from now on, here and in processes begun from here, make no more threads than
    there is time for; unless it was said how many."""
    global _kept
    if quota() < there() and THREADS not in os.environ:
        os.environ[THREADS] = _kept = str(cores())


def shared_by(processes: int) -> dict[str, str]:
    """The environment for one of so many processes that run side by side: left to themselves, each would take all
    cores. What was said by others than us stays."""
    said = os.environ.get(THREADS, _kept) != _kept
    return dict(os.environ) if said or processes == 1 else {**os.environ, THREADS: str(max(1, cores() // processes))}


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
    for _, kinds, path in (line.split(":", 2) for line in words(own) if line.count(":") > 1):
        if kinds and "cpu" not in kinds.split(","):
            continue
        root = mounted / "cpu" if kinds else mounted  # also where it is mounted as cpu,cpuacct
        inmost = root / path.lstrip("/")
        yield from (folder for folder in (inmost, *inmost.parents) if folder.is_relative_to(root))


def words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
