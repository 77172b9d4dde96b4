"""Cores that a process may use, by its control groups."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from dragoman import hardware as cores

CPU = "cpu,cpuacct"


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if (folder / CPU).exists():  # as systems have it, whatever the order of the two names in a process's own list
        (folder / "cpu").symlink_to(CPU)
    return folder


CPU = "cpu,cpuacct"


VERSION_2 = "0::/pod/app\n"
VERSION_1 = "12:memory:/pod\n4:cpuacct,cpu:/pod/app\n1:name=systemd:/pod\n"


@pytest.mark.parametrize(
    ("own", "files", "wanted"),
    [
        (VERSION_2, {"pod/app/cpu.max": "150000 100000\n"}, 1.5),
        (VERSION_2, {"pod/app/cpu.max": "max 100000\n", "pod/cpu.max": "400000 100000\n"}, 4.0),
        (VERSION_2, {"pod/app/cpu.max": "800000 100000\n", "pod/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/elsewhere\n", {"cpu.max": "200000 100000\n"}, 2.0),  # a container sees its own group as the root
        (VERSION_1, {f"{CPU}/pod/app/cpu.cfs_quota_us": "300000", f"{CPU}/pod/app/cpu.cfs_period_us": "100000"}, 3.0),
        (VERSION_1, {f"{CPU}/cpu.cfs_quota_us": "-1\n", f"{CPU}/cpu.cfs_period_us": "100000\n"}, math.inf),
        (VERSION_2, {"cpu.max": "nonsense"}, math.inf),
        (VERSION_2, {"cpu.max": "100000 0"}, math.inf),
        ("", {}, math.inf),
        ("nonsense\n", {"cpu.max": "100000 100000"}, math.inf),
    ],
)  # fmt: skip
def test_the_tightest_quota_counts(own: str, files: dict[str, str], wanted: float, tmp_path: Path) -> None:
    mounted = written(tmp_path / "cgroup", files)
    held = written(tmp_path, {"own": own}) / "own"
    assert cores.cpu_quota(mounted, held) == wanted
    assert cores.cpu_quota(mounted, tmp_path / "missing") == math.inf


@pytest.mark.parametrize(("quota", "wanted"), [(0.2, 1), (1.5, 2), (1000.0, None), (math.inf, None)])
def test_parts_of_a_core_count_as_one(quota: float, wanted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert cores.usable_cores() == (wanted or 64)


def test_threads_keep_to_the_quota_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 64)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 3.0)
    monkeypatch.setattr(cores, "_limited_threads", "")
    monkeypatch.setenv(cores.THREADS_VARIABLE, "7")
    cores.limit_threads()
    assert os.environ[cores.THREADS_VARIABLE] == "7"
    assert cores.thread_limited_environment(2)[cores.THREADS_VARIABLE] == "7"
    monkeypatch.delenv(cores.THREADS_VARIABLE)
    cores.limit_threads()
    assert os.environ[cores.THREADS_VARIABLE] == "3"
    assert [cores.thread_limited_environment(jobs)[cores.THREADS_VARIABLE] for jobs in (1, 2, 3, 5)] == [
        "3",
        "1",
        "1",
        "1",
    ]


def test_without_a_quota_only_neighbours_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 64.0)
    monkeypatch.setattr(cores, "_limited_threads", "")
    monkeypatch.setenv(cores.THREADS_VARIABLE, "")
    monkeypatch.delenv(cores.THREADS_VARIABLE)
    cores.limit_threads()
    assert cores.THREADS_VARIABLE not in os.environ
    assert cores.THREADS_VARIABLE not in cores.thread_limited_environment(1)
    assert cores.thread_limited_environment(3)[cores.THREADS_VARIABLE] == "2"
