"""Routes that are called directly answer what FastAPI's routing would."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dragoman.serving import direct_routes
from dragoman.serving.direct_routes import DIRECT_PATHS
from dragoman.serving.settings import ServerSettings
from toy_run import Toy
from toy_server import ToyServer, serve_in_thread

FIELDS: dict[str, dict[str, Any]] = {
    "/api/translate": {"text": ["ba wex", "😀"], "nbest": 2},
    "/translate": {"q": "ba wex", "source": "en", "target": "de"},
    "/v2/translate": {"text": ["ba wex"], "target_lang": "DE"},
}
WRONG_BODIES = (b"", b"{", b"[" * 100_000, b"[]", b"null", b'{"text": "\xff"}', b'{"text": 5, "q": 5}', b"x" * 3000)
KINDS = ("application/json; charset=utf-8", "application/x-www-form-urlencoded", "text/plain")


def list_requests(path: str) -> list[dict[str, Any]]:
    """Return requests of all kinds: right and wrong ones, and other methods than POST."""
    right = {"content": json.dumps(FIELDS[path]).encode(), "headers": {"content-type": "application/json"}}
    requests = [{"method": method, "url": path, **right} for method in ("POST", "GET", "HEAD", "PUT", "OPTIONS")]
    requests += [
        {"method": "POST", "url": path, "content": body, "headers": {"content-type": kind}}
        for body in WRONG_BODIES
        for kind in KINDS
    ]
    unknown = {**FIELDS[path], "target": "xx-unknown", "target_lang": "xx-unknown", "unknown": 1}
    requests += [{"method": "POST", "url": path, "json": unknown}, {"method": "POST", "url": path + "/", **right}]
    return [*requests, {"method": "POST", "url": path, "data": FIELDS[path]}]


def answer_all(server: ToyServer, path: str) -> list[tuple[int, dict[str, str], bytes]]:
    """Return status, headers and body of each answer, without what differs from request to request."""
    answers = [server.client.request(**request) for request in list_requests(path)]
    changing = ("date", "x-request-id")
    return [
        (each.status_code, {name: value for name, value in each.headers.items() if name not in changing}, each.content)
        for each in answers
    ]


@pytest.mark.parametrize("path", DIRECT_PATHS)
def test_direct_routes_answer_like_routes(toy: Toy, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(log_requests=False, max_body=200_000)
    with serve_in_thread([toy.run], settings) as direct:
        found, metrics = answer_all(direct, path), direct.client.get("/metrics").text
    monkeypatch.setattr(direct_routes, "DIRECT_PATHS", ())
    with serve_in_thread([toy.run], settings) as routed:
        expected, expected_metrics = answer_all(routed, path), routed.client.get("/metrics").text
    assert found == expected
    assert [status for status, _, _ in found[:1]] == [200]
    assert list_request_counts(metrics) == list_request_counts(expected_metrics)


def list_request_counts(metrics: str) -> list[str]:
    """Return the lines of the metrics that count requests by method, route and status."""
    return sorted(line for line in metrics.splitlines() if line.startswith("dragoman_requests_total"))


def test_all_direct_paths_have_handlers(toy_server: ToyServer) -> None:
    [added] = [layer for layer in toy_server.app.user_middleware if "handlers" in layer.kwargs]
    assert list(added.kwargs["handlers"]) == list(DIRECT_PATHS)  # type: ignore[call-overload]
