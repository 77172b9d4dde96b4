"""The files in deploy/ are valid, and have only options that the command has."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml

from dragoman.serving.app import create_app
from dragoman.serving.middleware import UPLOAD_PATHS
from dragoman.serving.settings import ServerSettings
from toy_run import Toy

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NOT_OF_SERVE = {"no-cache-dir", "constraint", "system", "uid", "home-dir", "create-home", "from"}
NOT_OF_SERVE |= {"start-period", "from-file", "rm", "entrypoint"}


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_options_exist(path: Path) -> None:
    flags = set(re.findall(r"--([a-z][a-z-]+)", path.read_text(encoding="utf-8"))) - NOT_OF_SERVE
    assert flags <= {name.replace("_", "-") for name in ServerSettings.model_fields}


@pytest.mark.parametrize(
    ("name", "first"),
    [("uvicorn", "0.45"), ("fastapi", "0.115.7"), ("starlette", "0.44"), ("python-multipart", "0.0.18")],
)
def test_the_extra_allows_no_versions_without_what_the_server_uses(name: str, first: str) -> None:
    """These have the hook for each request, Starlette 0.44, the limit of form parts, and its present import name."""
    extras = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"{name}>={first}" in extras["optional-dependencies"]["serve"]


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_grace_is_longer_than_the_stop_of_a_server(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    documents = [document for document in yaml.safe_load_all(text) if document]
    assert documents
    grace = re.search(r"(?:stop_grace_period|terminationGracePeriodSeconds): (\d+)", text)
    waits = re.findall(r'--(?:drain-seconds|stop-timeout), "(\d+)"', text)
    assert len(waits) == 2
    assert int(grace[1]) > sum(map(int, waits)) + 5


def test_the_addresses_of_clients_are_known_behind_the_gateway() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for name, service in compose["services"].items():
        if name != "gateway":
            assert service["environment"] == {"FORWARDED_ALLOW_IPS": "*"}
            assert "ports" not in service  # nobody else reaches it


def test_a_replica_never_reads_half_a_file_of_keys(tmp_path: Path) -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    [pod] = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
    [start] = pod["initContainers"]
    for name in ("secret", "state"):
        (tmp_path / name).mkdir()
    shell, flag, script = start["command"]
    script = re.sub("/(secret|state)/", rf"{tmp_path}/\1/", script)
    for text in ("first", "second"):
        (tmp_path / "secret" / "keys.json").write_text(text)
        subprocess.run([shell, flag, script], check=True, env={"HOSTNAME": text, "PATH": os.environ["PATH"]})
        assert [path.name for path in (tmp_path / "state").iterdir()] == ["keys.json"]
        assert (tmp_path / "state" / "keys.json").read_text() == "first"


def test_a_client_stays_with_its_server() -> None:
    """Only the server that has a document or an inspection can return it."""
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    [upstream] = re.findall(r"upstream \w+ \{(.*?)\}", text, re.DOTALL)
    assert re.search(r"^\s*hash \$remote_addr consistent;", upstream, re.MULTILINE)
    assert "least_conn" not in upstream
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    [service] = [document for document in documents if document["kind"] == "Service"]
    assert service["spec"]["sessionAffinity"] == "ClientIP"


def test_replicas_share_keys_and_glossaries() -> None:
    """Otherwise each has counts of its own, and a removed key remains valid for the others."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    servers = [service for service in compose["services"].values() if service["image"] == "dragoman"]
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))
    [pod] = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
    [container] = pod["containers"]
    for arguments in (*(server["command"] for server in servers), container["args"]):
        for option in ("--keys-file", "--glossary-folder"):
            assert arguments[arguments.index(option) + 1].startswith("/state/")
    assert [("state:/state" in server["volumes"]) for server in servers] == [True, True]
    [mounted] = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/state"]
    [claim] = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if volume["name"] == mounted]
    [modes] = [
        each["spec"]["accessModes"]
        for each in documents
        if each["kind"] == "PersistentVolumeClaim" and each["metadata"]["name"] == claim["claimName"]
    ]
    assert modes == ["ReadWriteMany"]


def test_a_gateway_repeats_only_what_changes_nothing() -> None:
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    [(pattern, options)] = re.findall(r"location ~ (\S+) \{(.*?)\}", text, re.DOTALL)
    assert "proxy_next_upstream error;" in options
    changing = (*UPLOAD_PATHS, "/api/glossaries", "/v2/glossaries/id", "/api/models/chat", "/api/documents/id")
    for path in changing:
        assert re.search(pattern, path), path
    for path in ("/api/translate", "/translate", "/v2/translate", "/api/documents2"):
        assert not re.search(pattern, path), path


def test_a_gateway_logs_no_texts_and_keeps_the_port() -> None:
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    [logged] = re.findall(r"log_format (.*);", text)
    assert not {"$request", "$args", "$request_uri", "$query_string", "$uri"} & set(re.findall(r"\$\w+", logged))
    [(pattern, shown)] = re.findall(r"^ +~(\S+) (\S+);", text, re.MULTILINE)
    for path in ("/download_file/0123.a.txt", "/inspections/secret"):
        match = re.match(pattern.replace("?<", "?P<"), path)
        assert match
        assert shown.replace("$kept", match["kept"]) == f"/{path.split('/')[1]}/..."
    assert re.search(r"access_log \S+ path;", text)
    assert re.search(r"error_log \S+ crit;", text)
    assert "proxy_set_header Host $http_host;" in text


def test_paths_of_probes_are_served(toy: Toy) -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    text += (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    paths = set(re.findall(r"path: (/\w+), port", text)) | set(re.findall(r"127\.0\.0\.1:5000(/\w+)", text))
    app = create_app([toy.run], ServerSettings(open_access=True, log_requests=False))

    async def request() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://10.0.0.7:5000") as client:
            return [(await client.get(path)).status_code for path in paths]

    assert paths
    assert set(asyncio.run(request())) == {200}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    text = (DEPLOY / "dragoman.service").read_text(encoding="utf-8")
    unit = tmp_path / "dragoman.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE), encoding="utf-8")
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert "dragoman.service" not in checked.stderr, checked.stderr
    assert checked.returncode == 0
