"""Folders that are made once for all pytest-xdist workers of a test session."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> tuple[Path, Path]:
    """Return the folder that `make` filled, and a copy of it for this worker, which tests may write into.

    The first worker that calls this function makes the original folder; the others wait for it.
    """
    own = factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    original, made = root / f"once-{name}", root / f"once-{name}.made"
    with (root / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(original, ignore_errors=True)  # left by a worker that failed
            original.mkdir()
            make(original)
            made.touch()
    return original, Path(shutil.copytree(original, factory.mktemp(name), dirs_exist_ok=True))
