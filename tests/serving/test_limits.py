"""Tests of the limits of requests and connections, over real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from threading import Event

import httpx
import pytest
from starlette.responses import Response
from starlette.routing import Route

from dragoman.serving.server import MAX_HEADERS
from dragoman.serving.service import Service, Translation, TranslationRequest
from dragoman.serving.settings import ServerSettings
from toy_run import Toy, make_sentences, translate_toy
from toy_server import ToyServer, serve_in_thread

SETTINGS = ServerSettings(
    max_body=10_000,
    max_texts=3,
    max_characters=1000,
    max_connections=20,
    receive_timeout=0.5,
    log_requests=False,
)
SOURCE = make_sentences(1)[0]
HALF = "\ud800"  # of a character: JSON can have it, UTF-8 cannot


@pytest.fixture(scope="module")
def server(toy: Toy) -> Iterator[ToyServer]:
    """Return a server with low limits."""
    with serve_in_thread([toy.run], SETTINGS) as server:
        yield server


def post(server: ToyServer, **body: object) -> httpx.Response:
    return server.client.post("/api/translate", json=body)


def read_status(connection: socket.socket) -> int:
    """Return the status of the next answer; 0 if the connection is closed without one."""
    line = connection.makefile("rb").readline()
    return int(line.split()[1]) if line else 0


def start_request(length: int, *headers: str) -> bytes:
    lines = ["POST /api/translate HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"text": "a" * 1001}, 413, "too_long"),
        ({"text": ["a"] * 4}, 413, "too_long"),
        ({"text": "a" * 20_000}, 413, "too_large"),
        ({"text": "a", "prefix": "a" * 1000}, 413, "too_long"),
        ({"text": "a", "terms": ["a" * 500], "context": ["a" * 500]}, 413, "too_long"),
        ({"text": "a", "avoid": ["a"] * 600, "context": [""] * 401}, 400, "too_many"),
        ({"text": "a", "nbest": 21}, 400, "too_many"),
        ({"text": "a", "beam": 0}, 400, "invalid_field"),
        ({"text": 5}, 400, "invalid_field"),
        ({"text": ["a", 5]}, 400, "invalid_field"),
        ({"text": []}, 400, "invalid_field"),
        ({"texts": "a"}, 400, "missing_field"),
        ({"text": "a", "colour": "blue"}, 400, "unknown_field"),
        ({"text": "a", "model": "none"}, 404, "unknown_model"),
    ],
)
def test_bad_requests_get_a_sentence(server: ToyServer, body: dict[str, object], status: int, code: str) -> None:
    answer = post(server, **body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert 5 < len(error["message"]) < 300
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/translate", {"q": 5, "source": "en", "target": "de"}, "q: should be a string or a list of strings"),
        ("/translate", {"q": ["a", 5], "source": "en", "target": "de"}, "q: should be a string or a list of strings"),
        ("/translate", {"q": "a", "source": 5, "target": "de"}, "source: should be a string"),
        ("/detect", {"q": 5}, "q: should be a string or a list of strings"),
        ("/v2/translate", {"text": ["a", 5], "target_lang": "DE"}, "text[1]: should be a string"),
        ("/v2/translate", {"text": [], "target_lang": "DE"}, "text: should have at least 1 item"),
        ("/v2/translate", {"text": ["a"]}, "target_lang: missing"),
        ("/api/translate", {"text": ["a", 5]}, "text: should be a string or a list of strings"),
        ("/api/translate", {"text": "a", "terms": ["a", 5]}, "terms[1]: should be a string"),
        ("/api/translate", {"text": "a", "beam": "x"}, "beam: should be a valid integer"),
        ("/api/translate", ["a"], "body: should be a JSON object, sent as Content-Type: application/json"),
        (
            "/api/glossaries",
            {"name": "a", "source": "en", "target": "de", "entries": {"ba": 5}},
            "entries['ba']: should be a string",
        ),
    ],
)
def test_wrong_fields_are_described_in_words_of_the_protocol(
    server: ToyServer, path: str, body: object, expected: str
) -> None:
    answer = server.client.post(path, json=body)
    assert (answer.status_code, f'"{expected}"' in answer.text) == (400, True), answer.text


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (
            b"text=hi",
            "application/x-www-form-urlencoded",
            "should be a JSON object, sent as Content-Type: application/json",
        ),
        (b'\xff\xfe{"text"', "application/json", "the body is not valid JSON in UTF-8"),
        (b'{"text": ', "application/json", "the body is not valid JSON: "),
    ],
)
def test_bodies_that_are_no_json_are_told_what_is_wrong(
    server: ToyServer, body: bytes, kind: str, expected: str
) -> None:
    answer = server.client.post("/api/translate", content=body, headers={"Content-Type": kind})
    assert (answer.status_code, expected in answer.json()["error"]["message"]) == (400, True), answer.text


@pytest.mark.parametrize("model_type", ["fast", 5])
def test_the_choices_of_a_field_are_listed(server: ToyServer, model_type: object) -> None:
    answer = server.client.post("/v2/translate", json={"text": "a", "target_lang": "DE", "model_type": model_type})
    assert answer.json()["message"].startswith("model_type: should be 'quality_optimized', ")


def test_lines_do_not_copy_the_context_of_their_request(server: ToyServer) -> None:
    state, texts = server.app.state.server, ["a", "b", "c"]
    service = Service(state.pool, state.settings)
    request = TranslationRequest(texts=[], context=("x", "y"), optional_context=("z",))
    assert all(line.context is request.context for line in service.make_lines(texts, request, 0))
    contexts = [line.context for line in service.make_lines(texts, request, 2)]
    assert contexts == [("y", "z"), ("z", "a"), ("a", "b")]


@pytest.mark.parametrize(
    "change",
    [{"nbest": 2}, {"align": True}, {"prefix": "a"}, {"terms": ["a"]}, {"avoid": ["a"]}, {"context": ["a"]}],
)
def test_options_that_texts_with_tags_do_not_have_are_refused(server: ToyServer, change: dict[str, object]) -> None:
    for path in ("/api/translate", "/api/stream"):
        answer = server.client.post(path, json={"text": "ba <b>del</b>.", "markup": "html", **change})
        [name] = change
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_with_markup")
        assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("change", [{"text": []}, {"text": ["a", "b"]}, {"nbest": 2}])
def test_a_stream_has_one_translation_of_one_text(server: ToyServer, change: dict[str, object]) -> None:
    answer = server.client.post("/api/stream", json={"text": "ba.", **change})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/translate", {"text": "a", "prefix": HALF}),
        ("/api/translate", {"text": "a", "terms": [HALF]}),
        ("/api/stream", {"text": "a", "context": [HALF]}),
        ("/api/words", {"text": "a", "prefix": HALF}),
        ("/api/detect", {"text": HALF}),
        ("/api/glossaries", {"name": "a", "source": "en", "target": "de", "entries": {HALF: "a"}}),
        ("/v2/translate", {"text": [HALF], "target_lang": "DE"}),
        ("/v2/document/a", {"document_key": HALF}),
        ("/translate", {"q": HALF, "source": "en", "target": "de"}),
        ("/detect", {"q": HALF}),
    ],
)
def test_half_characters_are_refused_in_every_field(server: ToyServer, path: str, body: dict[str, object]) -> None:
    headers = {"content-type": "application/json"}
    answer = server.client.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == 400
    assert "surrogate" in answer.text


@pytest.mark.parametrize(
    "body", [b"{", b"[" * 5000, b'{"text": "\xff"}', b"", b"null", b'{"text": "\\ud800"}', b"1e999"]
)
def test_bodies_that_are_not_json_are_refused(server: ToyServer, body: bytes) -> None:
    answer = server.client.post("/api/translate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_body_without_length_is_refused_while_it_arrives(server: ToyServer) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(20):
            sent += 1000
            yield b"x" * 1000

    answer = server.client.post("/api/translate", content=chunks())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_a_large_body_is_refused_before_it_is_sent(server: ToyServer) -> None:
    with server.connect() as connection:
        connection.sendall(start_request(10**15))
        assert read_status(connection) == 413


def test_large_headers_are_refused(server: ToyServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * (MAX_HEADERS + 1))
        assert read_status(connection) == 431


@pytest.mark.parametrize("sent", [b"", b"POST /api/tr", start_request(100), start_request(100) + b"{"])
def test_a_request_that_does_not_arrive_is_given_up(server: ToyServer, sent: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(sent)
        assert read_status(connection) == 408
        assert connection.recv(1) == b""


def test_a_client_that_half_closes_is_not_waited_for(server: ToyServer) -> None:
    with server.connect() as connection:
        connection.sendall(start_request(100))
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        assert connection.recv(1000) == b""


def test_too_many_connections_are_refused(server: ToyServer) -> None:
    server.client.get("/health", headers={"connection": "close"})
    connections = [server.connect() for _ in range(SETTINGS.max_connections)]
    try:
        with server.connect() as late:
            assert read_status(late) == 503
    finally:
        for connection in connections:
            connection.close()
    deadline = time.monotonic() + 30
    while server.server.server_state.connections and time.monotonic() < deadline:
        time.sleep(0.01)
    assert post(server, text=SOURCE).json()["translations"][0]["text"] == translate_toy(SOURCE)


def test_pipelined_requests_are_answered_in_order(server: ToyServer) -> None:
    sources = make_sentences(3, seed=4)
    bodies = [json.dumps({"text": source}).encode() for source in sources]
    with server.connect() as connection:
        connection.sendall(b"".join(start_request(len(body)) + body for body in bodies))
        received = b""
        while received.count(b'"translations"') < 3:
            received += connection.recv(100_000)
    positions = [received.index(translate_toy(source).encode()) for source in sources]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    "headers",
    [
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: -1",
        b"Transfer-Encoding: chunked, identity",
    ],
)
def test_ambiguous_requests_are_refused(server: ToyServer, headers: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /api/translate HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n\r\n0\r\n\r\n")
        assert read_status(connection) in (400, 408)


@pytest.mark.parametrize(
    ("start", "status"), [(b"GET /health HT", 408), (b"GET /health HTTP/1.1\r\nX: " + b"a" * 2 * MAX_HEADERS, 431)]
)
def test_the_second_request_of_a_connection_is_refused_as_the_first(
    server: ToyServer, start: bytes, status: int
) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        first = b""
        while b"}" not in first:
            first += connection.recv(4096)
        assert first.startswith(b"HTTP/1.1 200")
        connection.sendall(start)
        assert read_status(connection) == status


@pytest.fixture
def large_answer(server: ToyServer) -> Iterator[bytes]:
    """Let the server answer GET /large with more than the buffers of a connection hold."""
    body = b"x" * 8_000_000
    server.app.router.routes.insert(0, Route("/large", lambda _: Response(body)))
    yield body
    del server.app.router.routes[0]


def open_slow_connection(server: ToyServer) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return connection


def read_all(connection: socket.socket, pause: float) -> int:
    """Return the number of bytes that come until the connection is closed."""
    count = 0
    try:
        while received := connection.recv(100_000):
            count += len(received)
            time.sleep(pause)
    except ConnectionError:  # the server has aborted the connection
        pass
    return count


def test_a_steady_reader_gets_all_of_a_large_answer(server: ToyServer, large_answer: bytes) -> None:
    start = time.monotonic()
    with open_slow_connection(server) as connection:
        assert read_all(connection, pause=0.03) > len(large_answer)
    assert time.monotonic() - start > 2 * SETTINGS.receive_timeout


def test_an_answer_that_is_not_read_is_given_up(server: ToyServer, large_answer: bytes) -> None:
    connections = server.server.server_state.connections
    before, deadline = set(connections), time.monotonic() + 30
    with open_slow_connection(server) as connection:
        while connections <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        while connections - before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_all(connection, pause=0) < len(large_answer)


def test_empty_lines_do_not_keep_a_connection_open(server: ToyServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in connection.recv(4096)
        connection.sendall(b"\r\n")
        assert connection.recv(4096) == b""


def test_a_late_request_does_not_get_the_answer_of_the_one_before(
    server: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate = Service.translate

    def translate_slowly(service: Service, request: TranslationRequest, cancelled: Event) -> list[Translation]:
        time.sleep(3 * SETTINGS.receive_timeout)
        return translate(service, request, cancelled)

    monkeypatch.setattr(Service, "translate", translate_slowly)
    body = b'{"text": "ba."}'
    with server.connect() as connection:
        connection.sendall(start_request(len(body)) + body + start_request(100) + b"{")
        assert read_status(connection) in (200, 0)


@pytest.mark.parametrize("path", ["/translate", "/api/translate", "/v2/translate", "/translate_file"])
def test_a_client_that_leaves_while_it_sends_is_no_failure(server: ToyServer, path: str) -> None:
    def count(status: int) -> float:
        lines = server.client.get("/metrics").text.splitlines()
        counts = [line for line in lines if line.startswith("dragoman_requests_total") and f'"{status}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in counts)

    deadline = time.monotonic() + 30
    while server.server.server_state.tasks and time.monotonic() < deadline:
        time.sleep(0.01)  # requests of other tests, which the server has not given up yet
    gone, failed = count(499), count(500)
    form = path == "/translate_file"
    content_type = "multipart/form-data; boundary=b" if form else "application/json"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: 100\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head.encode() + (b"--b\r\n" if form else b"{"))
    while count(499) == gone and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (count(499), count(500)) == (gone + 1, failed)
