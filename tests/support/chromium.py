"""The browser of the tests of pages: Chromium of the system, installed with apt-get where that is possible."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str:
    """Return the path of Chromium or Chrome. Install Debian's package if there is neither; otherwise skip the test."""
    with Path(tempfile.gettempdir(), "dragoman-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes, and one of them installs
        if (path := look_up()) is None and os.geteuid() == 0 and Path("/etc/debian_version").exists():
            install_chromium()
            path = look_up()
    if path is None:
        pytest.skip("there is no Chromium: install it, for example with `apt-get install chromium`")
    return path


def look_up() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def install_chromium() -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"there is no Chromium, and `{' '.join(command)}` failed: {result.stderr.strip()[-300:]}")
