"""The files in deploy/ are valid, and have only options that the command has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dragoman.serving.settings import ServerSettings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NOT_OF_SERVE = {"no-cache-dir", "constraint", "system", "uid", "home-dir", "create-home", "from"}
NOT_OF_SERVE |= {"start-period", "from-file"}


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_options_exist(path: Path) -> None:
    flags = set(re.findall(r"--([a-z][a-z-]+)", path.read_text(encoding="utf-8"))) - NOT_OF_SERVE
    assert flags <= {name.replace("_", "-") for name in ServerSettings.model_fields}


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_grace_is_longer_than_the_stop_of_a_server(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    documents = [document for document in yaml.safe_load_all(text) if document]
    assert documents
    grace = re.search(r"(?:stop_grace_period|terminationGracePeriodSeconds): (\d+)", text)
    waits = re.findall(r'--(?:drain|stop-timeout), "(\d+)"', text)
    assert len(waits) == 2
    assert int(grace[1]) > sum(map(int, waits)) + 5


def test_a_client_stays_with_its_server() -> None:
    """Only the server that has a document or an inspection can return it."""
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    [upstream] = re.findall(r"upstream \w+ \{(.*?)\}", text, re.DOTALL)
    assert re.search(r"^\s*hash \$remote_addr consistent;", upstream, re.MULTILINE)
    assert "least_conn" not in upstream
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    [service] = [document for document in documents if document["kind"] == "Service"]
    assert service["spec"]["sessionAffinity"] == "ClientIP"


def test_paths_of_probes_are_served() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"path: (/\w+), port", text)) == {"/ready", "/health"}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    text = (DEPLOY / "dragoman.service").read_text(encoding="utf-8")
    unit = tmp_path / "dragoman.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE), encoding="utf-8")
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert "dragoman.service" not in checked.stderr, checked.stderr
    assert checked.returncode == 0
