"""Tests of a server in operation: start, stop and kill under load, health, metrics and logs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

import dragoman
from dragoman.errors import UserError
from dragoman.serving.app import create_app
from dragoman.serving.errors import RequestCancelled
from dragoman.serving.server import describe_server, serve
from dragoman.serving.service import Service
from dragoman.serving.settings import ServerSettings
from dragoman.serving.state import name_runs
from toy_run import Call, Toy, assert_user_error, make_sentences, start_process
from toy_server import ToyServer, serve_in_thread

SOURCES = make_sentences(200, seed=3)


def test_settings_and_options_exclude_each_other(toy: Toy) -> None:
    with pytest.raises(UserError, match="not both: port"):
        serve(toy.run, settings=ServerSettings(), port=9)


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def serve_as_process(toy: Toy, port: int, *options: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start `dragoman serve`, and wait until it is ready. Nobody reads its log, which could fill the pipe."""
    with start_process("serve", f"toy={toy.run}", "--port", port, "--no-log-requests", *options) as running:
        assert running.stdout
        line = running.stdout.readline().decode()
        assert line == f"Dragoman serves toy at http://127.0.0.1:{port} (no API key is required)\n", running.poll()
        yield running


class Load:
    """Clients that translate in a loop, each request on a connection of its own, until they are told to stop."""

    def __init__(self, toy: Toy, port: int, clients: int = 6) -> None:
        results = toy.translator.translate(SOURCES)
        self.expected = {source: result.text for source, result in zip(SOURCES, results, strict=True)}
        self.url = f"http://127.0.0.1:{port}/api/translate"
        self.answers: list[tuple[str, httpx.Response]] = []  # translations
        self.refusals: list[httpx.Response] = []
        self.errors: list[httpx.TransportError] = []
        self.is_over = threading.Event()
        self.threads = [threading.Thread(target=self.send, args=(number,)) for number in range(clients)]

    def send(self, number: int) -> None:
        with httpx.Client(headers={"connection": "close"}, timeout=60) as client:
            while not self.is_over.is_set():
                source = SOURCES[number % len(SOURCES)]
                number += 1
                try:
                    answer = client.post(self.url, json={"text": source})
                    if answer.status_code == 200:
                        self.answers.append((source, answer))
                    else:
                        self.refusals.append(answer)
                except httpx.TransportError as error:
                    self.errors.append(error)
                    time.sleep(0.01)

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join()

    def wait_for_answers(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.answers) < count:
            assert time.monotonic() < deadline, self.errors[-1:]
            time.sleep(0.005)

    def check(self) -> None:
        """Assert that every answer is right, and that other requests were refused properly."""
        for source, answer in self.answers:
            assert answer.json()["translations"][0]["text"] == self.expected[source]
        assert {answer.status_code for answer in self.refusals} <= {503}


def test_sigterm_under_load_loses_no_answer(toy: Toy) -> None:
    port = find_free_port()
    with serve_as_process(toy, port) as running, Load(toy, port) as load:
        load.wait_for_answers(30)
        assert not load.errors
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    load.check()
    # There is no server any more, or the connection was reset, as the kernel does if the request has not been read. A
    # request that was read and not answered would be a RemoteProtocolError, and a slow one a ReadTimeout.
    assert {type(error) for error in load.errors} <= {httpx.ConnectError, httpx.ReadError}


def test_the_start_names_the_languages_of_models(language_server: ToyServer, toy_server: ToyServer) -> None:
    lines = describe_server(language_server.server.state, "http://x").splitlines()
    assert lines[0] == "Dragoman serves en-de, de-en at http://x (no API key is required)"
    assert lines[1:] == ["  en-de: English to German (en-de)", "  de-en: German to English (de-en)"]
    assert describe_server(toy_server.server.state, "http://x").endswith(": unknown languages")


def test_a_server_that_is_killed_and_restarted_under_load(toy: Toy) -> None:
    port = find_free_port()
    with Load(toy, port) as load:
        with serve_as_process(toy, port) as running:
            load.wait_for_answers(20)
            running.kill()
            running.wait(60)
        before = len(load.answers)
        with serve_as_process(toy, port):
            load.wait_for_answers(before + 20)
            load.is_over.set()
            for thread in load.threads:
                thread.join()
    load.check()
    assert load.errors  # of the time in which there was no server


def test_ctrl_c_ends_with_its_exit_code(toy: Toy) -> None:
    with serve_as_process(toy, find_free_port()) as running:
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        assert running.stderr.read().decode().splitlines()[-1] == "dragoman: stopped"


def test_a_stop_has_a_time_limit(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are not finished by then are answered with an error, not dropped."""
    started = threading.Event()

    def translate_slowly(_: Service, __: object, cancelled: threading.Event) -> None:
        started.set()
        cancelled.wait(60)
        raise RequestCancelled

    monkeypatch.setattr(Service, "translate", translate_slowly)
    answers: list[httpx.Response] = []
    with serve_in_thread([toy.run], ServerSettings(stop_timeout=0.2, log_requests=False)) as server:
        post = threading.Thread(
            target=lambda: answers.append(httpx.post(server.url + "/api/translate", json={"text": "a"}))
        )
        post.start()
        assert started.wait(30)
        server.server.should_exit = True
        post.join(30)
    assert [answer.status_code for answer in answers] == [503]
    assert server.server.cancelled_requests == 1


def test_a_server_that_drains_is_not_ready(toy: Toy) -> None:
    port = find_free_port()
    with (
        serve_as_process(toy, port, "--drain-seconds", 1) as running,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        assert client.get("/ready").status_code == 200
        running.send_signal(signal.SIGTERM)
        while (ready := client.get("/ready")).status_code == 200:
            pass
        assert (ready.status_code, ready.json()) == (503, {"status": "stopping"})
        assert ready.headers["connection"] == "close"
        assert client.post("/api/translate", json={"text": SOURCES[0]}).status_code == 200
        assert client.get("/health").status_code == 200
        assert running.wait(60) == 0


def test_nothing_is_translated_before_the_models_are_loaded(toy: Toy) -> None:
    with serve_in_thread([toy.run], load=False) as server:
        assert server.client.get("/health").status_code == 200
        assert (server.client.get("/ready").status_code, server.client.get("/ready").json()["status"]) == (
            503,
            "loading",
        )
        refusal = server.client.post("/api/translate", json={"text": SOURCES[0]})
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "loading")
        assert int(refusal.headers["retry-after"]) > 0
        server.app.state.server.load_models()
        assert server.client.get("/ready").status_code == 200
        assert server.client.post("/api/translate", json={"text": SOURCES[0]}).status_code == 200


def test_metrics(toy_server: ToyServer) -> None:
    before = read_metrics(toy_server)
    toy_server.client.post("/api/translate", json={"text": SOURCES[:3]})
    toy_server.client.post("/api/translate", json={"text": 5})
    toy_server.client.get("/some/path/of/a/scanner")
    for method in ("PROPFIND", "TRACE"):
        toy_server.client.request(method, "/some/path/of/a/scanner")
    after = read_metrics(toy_server)
    grown = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    assert grown['dragoman_requests_total{method="POST",route="/api/translate",status="200"}'] == 1
    assert grown['dragoman_requests_total{method="POST",route="/api/translate",status="400"}'] == 1
    assert grown['dragoman_requests_total{method="GET",route="unknown",status="404"}'] == 1
    assert sum(grown[name] for name in grown if 'method="other"' in name and "_total" in name) == 2
    assert not [name for name in grown if "PROPFIND" in name]
    assert grown['dragoman_request_seconds_count{route="/api/translate"}'] == 2
    assert grown['dragoman_texts_total{route="/api/translate"}'] == 3
    assert grown['dragoman_characters_total{route="/api/translate"}'] == sum(map(len, SOURCES[:3]))
    assert grown['dragoman_sentences_total{model="run"}'] == 3
    assert grown['dragoman_decoding_steps_total{model="run"}'] <= grown['dragoman_decoding_slots_total{model="run"}']
    assert after["dragoman_ready"] == 1
    assert "dragoman_requests_waiting" in after


def read_metrics(server: ToyServer) -> dict[str, float]:
    text = server.client.get("/metrics").text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_logs_have_no_texts(toy: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_in_thread([toy.run], ServerSettings()) as server:
        capsys.readouterr()
        answer = server.client.post("/api/translate", json={"text": SOURCES[5]}, headers={"x-request-id": "my-id.1"})
        assert answer.headers["x-request-id"] == "my-id.1"
        server.client.get("/health")

        def fail(*_: object) -> None:
            raise RuntimeError(f"cannot translate {SOURCES[5]}")

        monkeypatch.setattr(Service, "translate", fail)
        failed = server.client.post("/api/translate", json={"text": SOURCES[5]}, headers={"x-request-id": "a\tb"})
    assert failed.status_code == 500
    identifier = failed.headers["x-request-id"]
    assert identifier in failed.json()["error"]["message"]
    text = capsys.readouterr().err
    first, error, last = (json.loads(line) for line in text.splitlines())
    assert SOURCES[5] not in text
    assert {"id": "my-id.1", "method": "POST", "route": "/api/translate", "status": 200}.items() <= first.items()
    assert (first["characters"], first["key"]) == (len(SOURCES[5]), None)
    assert (error["id"], error["level"], error["error"]) == (identifier, "error", "RuntimeError")
    assert any(line.endswith("in fail") for line in error["traceback"])
    assert last["status"] == 500


def test_headers_of_every_answer(toy_server: ToyServer) -> None:
    for path in ("/health", "/nothing", "/metrics", "/api/translate"):
        headers = toy_server.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-request-id"]
        assert "access-control-allow-origin" not in headers


def test_pages_of_allowed_origins_may_call(toy: Toy) -> None:
    settings = ServerSettings(cors=("https://example.org",), log_requests=False)
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with serve_in_thread([toy.run], settings) as server:
        for origin, allowed in (("https://example.org", "https://example.org"), ("https://evil.example", None)):
            answer = server.client.options("/api/translate", headers={"origin": origin, **preflight})
            assert answer.headers.get("access-control-allow-origin") == allowed
            error = server.client.post("/api/translate", json={}, headers={"origin": origin})
            status = 400 if allowed else 403
            assert (error.status_code, error.headers.get("access-control-allow-origin")) == (status, allowed)


@pytest.mark.parametrize(
    ("path", "keys"), [("/nothing", ["error"]), ("/translate/x", ["error"]), ("/v2/nothing", ["message", "detail"])]
)
def test_errors_have_the_form_of_the_protocol(toy_server: ToyServer, path: str, keys: list[str]) -> None:
    answer = toy_server.client.post(path)
    assert answer.status_code == 404
    assert list(answer.json()) == keys
    assert isinstance(answer.json()["error"], dict) if path == "/nothing" else True


def test_bad_arguments_of_the_command(call: Call, toy: Toy, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    assert_user_error(call("serve", tmp_path / "none"), "none")
    assert_user_error(call("serve", toy.run, f"{toy.run.name}={toy.run}"), "NAME=RUN")
    assert_user_error(call("serve", toy.run, "--host", "0.0.0.0"), "--open-access")
    used = tmp_path / "used"
    used.touch()
    for folder in (used, used / "below"):
        assert_user_error(call("serve", toy.run, "--glossary-folder", folder), "should be a folder", str(folder))
    assert_user_error(call("serve", toy.run, "--settings", settings), "settings.yaml")
    settings.write_text("prot: 5\n")
    assert_user_error(call("serve", toy.run, "--settings", settings), "settings.yaml", "'port'")
    settings.write_text("timeout: soon\n")
    assert_user_error(call("serve", toy.run, "--settings", settings), "timeout", "number", "soon")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings.write_text(f"port: {port}\n")
        assert_user_error(call("serve", toy.run, "--settings", settings), str(port), "taken")


def test_a_model_that_cannot_be_loaded_ends_the_command(call: Call, toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("FORMAT", "config.yaml"):
        (run / name).write_bytes((toy.run / name).read_bytes())
    with pytest.raises(UserError):
        create_app([run], ServerSettings(open_access=True))
    assert_user_error(call("serve", run, "--port", 0), "run", working=True)


def test_names_of_models(toy: Toy) -> None:
    assert name_runs(toy.run) == name_runs(str(toy.run)) == name_runs([toy.run]) == {toy.run.name: toy.run}
    assert name_runs({"a": toy.run}) == name_runs([f"a={toy.run}"]) == {"a": toy.run}
    with pytest.raises(UserError, match="nothing to serve"):
        name_runs([])


def test_serve_from_python_refuses_unknown_options(toy: Toy) -> None:
    with pytest.raises(UserError, match="'port'"):
        dragoman.serve(toy.run, prot=5)
    with suppress(UserError), socket.create_server(("127.0.0.1", 0)) as taken:
        dragoman.serve(toy.run, port=taken.getsockname()[1])
