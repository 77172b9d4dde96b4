"""Run every test with one thread, for a fixed order of summation, and with a home directory of its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

pytest_plugins = ["toy_fixtures", "toy_server"]

settings.register_profile("dragoman", deadline=None, database=None, derandomize=True, print_blob=True)
settings.load_profile("dragoman")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start files with slow tests first, so that no worker starts one when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))


@pytest.fixture(autouse=True, scope="session")
def _quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the caches of fixtures that outlive a test in a folder of the session, not in the user's home."""
    torch.set_num_threads(1)
    gc.freeze()  # imported modules are never garbage
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        yield


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own home directory, for caches, and the same random numbers."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    torch.manual_seed(0)
