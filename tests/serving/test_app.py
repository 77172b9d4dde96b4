"""Tests of what all requests pass through."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from threading import Event, current_thread
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from dragoman.serving import api, keys, middleware
from dragoman.serving.api import TranslateResponse
from dragoman.serving.app import create_app, make_app
from dragoman.serving.keys import KeyStore, add_key, read_keys, remove_key
from dragoman.serving.settings import ServerSettings
from toy_run import Toy, make_sentences, translate_toy
from toy_server import ToyServer


def send(app: ASGIApp, method: str, path: str, *, root: str = "", **request: Any) -> httpx.Response:
    """Return the answer of an application in this process."""

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return await client.request(method, path, **request)

    return asyncio.run(answer())


def test_the_answer_is_described(toy_server: ToyServer) -> None:
    """Every field of the answer is in the OpenAPI document."""
    document = toy_server.client.get("/openapi.json").json()
    assert {"/api/translate", "/translate", "/v2/translate", "/v2/document"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    content = document["paths"]["/api/translate"]["post"]["responses"]["200"]["content"]["application/json"]
    assert content["schema"]["$ref"].endswith("/TranslateResponse")
    answer = toy_server.client.post("/api/translate", json={"text": make_sentences(2), "nbest": 2, "align": True})
    assert answer.json().keys() == schemas["TranslateResponse"]["properties"].keys()
    for translation in answer.json()["translations"]:
        assert translation.keys() == schemas["TranslationRecord"]["properties"].keys()
        assert translation["alternatives"][0].keys() == schemas["AlternativeRecord"]["properties"].keys()
        TranslateResponse.model_validate(answer.json())


@pytest.mark.parametrize("path", ["/api/translate", "/api/stream"])
def test_answers_are_described_in_threads_of_requests(
    toy_server: ToyServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since alignments can be large, and the event loop serves everybody."""
    threads, describe = list[str](), api.describe_translations

    def note_thread(*arguments: Any) -> dict[str, Any]:
        threads.append(current_thread().name)
        return describe(*arguments)

    monkeypatch.setattr(api, "describe_translations", note_thread)
    answer = toy_server.client.post(path, json={"text": "ba del fo!", "align": True})
    assert "ol ebi ak!" in answer.raise_for_status().text
    assert [name.partition("_")[0] for name in threads] == ["request"]


def test_each_translation_has_its_languages(language_server: ToyServer) -> None:
    texts = ["The house is old and the garden is large.", "Das Haus ist alt und der Garten ist sehr schön."]
    body = {"text": texts, "source": "auto"}
    codes = []
    for text, target in zip(texts, ("de", "en"), strict=True):
        answer = language_server.client.post("/api/translate", json={**body, "text": texts, "target": target}).json()
        codes.append([(each["source"], each["target"], each["model"]) for each in answer["translations"]])
        assert answer["translations"][texts.index(text)]["detected"]["language"] == ("en", "de")[texts.index(text)]
    assert codes == [[("en", "de", "en-de"), ("de", "de", "")], [("en", "en", ""), ("de", "en", "de-en")]]


def test_no_source_is_one_that_is_detected(language_server: ToyServer) -> None:
    body = {"text": "The house is old and the garden is large.", "source": "", "target": "de"}
    answer = language_server.client.post("/api/translate", json=body).raise_for_status().json()
    assert answer["detected"]["language"] == "en"
    data = {"source": "", "target": "de"}
    file = {"file": ("a.txt", body["text"].encode())}
    assert language_server.client.post("/api/documents", data=data, files=file).status_code == 202


@pytest.mark.parametrize("name", ["beam", "nbest"])
def test_the_option_above_the_limit_is_named(toy_server: ToyServer, name: str) -> None:
    error = toy_server.client.post("/api/translate", json={"text": "a", name: 21}).json()["error"]
    assert error == {"code": "too_many", "message": f"{name}: should be at most 20"}


def test_a_text_is_translated(toy_server: ToyServer) -> None:
    [source] = make_sentences(1)
    answer = toy_server.client.post("/api/translate", json={"text": source})
    assert answer.status_code == 200
    assert answer.json()["translations"][0]["text"] == translate_toy(source)


@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_root_path_changes_nothing(toy: Toy, tmp_path: Path, is_mounted: bool) -> None:
    """Neither that of an application in which this one is mounted, nor that of a server behind a proxy."""
    add_key(tmp_path / "keys.json", "a")
    app = create_app([toy.run], ServerSettings(keys_file=tmp_path / "keys.json", max_body=1000, log_requests=False))
    outer, root = (Starlette(routes=[Mount("/mt", app)]), "") if is_mounted else (app, "/mt")

    def post(path: str, **request: Any) -> httpx.Response:
        return send(outer, "POST", f"/mt{path}", root=root, **request)

    assert post("/api/translate", json={"text": "ba."}).json()["error"]["code"] == "key_missing"
    assert list(post("/v2/nothing").json()) == ["message", "detail"]
    fields, file = {"source": "en", "target": "de"}, {"file": ("a.txt", b"ba." * 1000)}
    assert "API key" in post("/translate_file", data=fields, files=file).json()["error"]  # not too large
    key = {"Authorization": f"Bearer {add_key(tmp_path / 'keys.json', 'b')}"}
    app.state.server.keys.refresh()
    assert post("/translate", json={"q": "ba.", "source": "en", "target": "de"}, headers=key).status_code == 200
    assert 'route="/translate",status="200"' in send(outer, "GET", "/mt/metrics", root=root, headers=key).text
    app.state.server.is_loaded = False
    assert send(outer, "GET", "/mt/health", root=root).status_code == 200


def test_a_mounted_application_refreshes_keys_and_writes_counts(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although Starlette does not run the lifespan of an application that is mounted."""
    monkeypatch.setattr(keys, "KEY_REFRESH_SECONDS", 0.01)
    file = tmp_path / "keys.json"
    header = {"authorization": f"Bearer {add_key(file, 'a')}"}
    app = create_app([toy.run], ServerSettings(keys_file=file, log_requests=False))
    outer = Starlette(routes=[Mount("/mt", app)])

    def request() -> int:
        return send(outer, "POST", "/mt/api/translate", json={"text": "ba."}, headers=header).status_code

    def wait_for(is_done: Callable[[], bool]) -> None:
        for _ in range(1000):
            if is_done():
                return
            Event().wait(0.01)
        raise AssertionError

    assert request() == 200
    wait_for(lambda: KeyStore(file).get_usage(read_keys(file)[0])[0] == len("ba."))
    remove_key(file, "a")
    wait_for(lambda: request() == 403)
    app.state.server.keys.close()


@pytest.mark.parametrize(
    ("is_mounted", "root", "prefix"),
    [(True, "", "/mt"), (False, "/mt", "/mt"), (True, "/a b", "/a b/mt"), (False, "", "")],
)
def test_links_lead_to_the_application(toy: Toy, is_mounted: bool, root: str, prefix: str) -> None:
    app: ASGIApp = create_app([toy.run], ServerSettings(open_access=True, log_requests=False))
    outer = Starlette(routes=[Mount("/mt", app)]) if is_mounted else app

    def request(method: str, url: str, **options: Any) -> httpx.Response:
        return send(outer, method, url, root=root, **options)

    fields, file = {"source": "en", "target": "de"}, {"file": ("a b.txt", b"ba.")}
    answer = request("POST", f"{prefix}/translate_file?x=1", data=fields, files=file)
    link = answer.json()["translatedFileUrl"]
    assert link.startswith(f"http://testserver{quote(prefix)}/download_file/")
    assert request("GET", link).text == translate_toy("ba.")
    inspection = request("POST", f"{prefix}/api/inspections", json={"text": "ba."}).json()["url"]
    page = httpx.URL(f"http://testserver{prefix}/")
    assets = re.findall(r'(?:href|src)="([^"#]+)"', request("GET", str(page)).text)
    assert {"main.js", "page.css"} <= set(assets)
    for each in (*assets, inspection):
        assert request("GET", str(page.join(each))).status_code == 200
    [server] = request("GET", f"{prefix}/openapi.json").json().get("servers", [{"url": ""}])
    assert server["url"] == prefix


def test_head_is_get_without_a_body(toy: Toy) -> None:
    """For monitors and load balancers; also of errors, and for servers that send what the application gives them."""
    app = create_app([toy.run], ServerSettings(open_access=True, log_requests=False))
    paths = ("/health", "/ready", "/languages", "/v2/usage", "/api/models", "/frontend/settings", "/", "/main.js")
    for path in (*paths, "/api/documents/none", "/nothing"):
        head, get = (send(app, method, path) for method in ("HEAD", "GET"))
        assert head.content == b"" != get.content
        assert head.status_code == get.status_code == (200 if path in paths else 404)
        assert head.headers["content-length"] == get.headers["content-length"]
        assert head.headers["content-type"] == get.headers["content-type"]
    app.state.server.is_loaded = False
    assert send(app, "HEAD", "/ready").status_code == 503
    assert send(app, "HEAD", "/metrics").status_code == 200
    counted = 'dragoman_requests_total{method="HEAD",route="/health",status="200"} 1.0'
    assert counted in send(app, "GET", "/metrics").text


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/translate", "POST"),
        ("HEAD", "/translate", "POST"),
        ("DELETE", "/languages", "GET, HEAD"),
        ("GET", "/api/translate", "POST"),
        ("DELETE", "/api/glossaries", "GET, HEAD, POST"),
        ("PUT", "/api/documents/x", "GET, HEAD, DELETE"),
        ("PUT", "/v2/translate", "GET, HEAD, POST"),
        ("PATCH", "/v2/glossaries/x", "GET, HEAD, DELETE"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/main.js", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
    ],
)
def test_a_path_says_which_methods_it_takes(toy: Toy, method: str, path: str, allowed: str) -> None:
    app = create_app([toy.run], ServerSettings(open_access=True, log_requests=False))
    for prefix, outer in (("", app), ("/mt", Starlette(routes=[Mount("/mt", app)]))):
        answer = send(outer, method, prefix + path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        keys = {"/v2/": ["message", "detail"]}.get(path[:4], ["error"])
        assert method == "HEAD" or list(answer.json()) == keys
    unknown = send(app, method, f"{path.rstrip('/')}/no/such/path")
    assert (unknown.status_code, "allow" in unknown.headers) == (404, False)


def test_only_uploads_may_be_large(toy: Toy) -> None:
    app = create_app([toy.run], ServerSettings(open_access=True, max_body=1000, log_requests=False))
    file = {"file": ("a.txt", b"ba.\n" * 1000)}
    assert send(app, "POST", "/translate_file", data={"source": "en", "target": "de"}, files=file).status_code == 200
    assert send(app, "POST", "/translate_file", json={"source": "en" * 1000}).status_code == 400
    assert send(app, "POST", "/api/documents", json={"source": "en" * 1000}).status_code == 413
    assert send(app, "POST", "/v2/documents", files=file).status_code == 413
    refused = send(app, "POST", "/translate_file", json={"source": "en"})
    assert "missing file" in refused.json()["error"]


def test_the_bodies_of_all_requests_are_limited(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_BODIES", 0)  # so one document of the largest size is allowed
    settings = ServerSettings(open_access=True, max_document_bytes=1, max_body=10**6, log_requests=False)
    app, text = create_app([toy.run], settings), "ba. " * 50_000
    for path, request in (("/api/translate", {"json": {"text": text}}), ("/translate", {"files": {"q": (None, text)}})):
        answer = send(app, "POST", path, **request)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "10")
        assert "memory" in answer.text
    assert send(app, "POST", "/api/translate", json={"text": "ba."}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, None),
        ({"host": "LOCALHOST:5000"}, None),
        ({"host": "[::1]:5000"}, None),
        ({"host": "mt.example"}, None),
        ({"host": "evil.example:5000"}, "host_not_allowed"),
        ({"host": "127.0.0.1.evil.example"}, "host_not_allowed"),
        ({"host": ""}, "host_not_allowed"),
        ({"sec-fetch-site": "same-origin"}, None),
        ({"sec-fetch-site": "cross-site", "origin": "https://good.example"}, None),
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, "origin_not_allowed"),
        ({"sec-fetch-site": "cross-site"}, "origin_not_allowed"),
        ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:8000"}, "origin_not_allowed"),
        ({"sec-fetch-site": "none", "origin": "moz-extension://x"}, None),
        ({"origin": "http://127.0.0.1"}, None),  # old browsers say nothing more
        ({"host": "LOCALHOST:5000", "origin": "http://localhost:5000"}, None),
        ({"host": "localhost:5000", "origin": "http://localhost:8000"}, "origin_not_allowed"),
        ({"origin": "https://evil.example"}, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"origin": "https://good.example"}, None),
    ],
)
def test_pages_of_other_servers_cannot_use_a_local_server(toy: Toy, headers: dict[str, str], code: str | None) -> None:
    settings = ServerSettings(allowed_hosts=("mt.example",), cors=("https://good.example",), log_requests=False)
    app = make_app([toy.run], settings, load=False)
    answer = send(app, "POST", "/api/detect", json={}, headers={"host": "127.0.0.1", **headers})
    assert answer.json()["error"]["code"] == (code or "loading")
    for method, path in (("GET", "/v2/translate?text=a&target_lang=de"), ("HEAD", "/v2/translate"), ("GET", "/")):
        is_refused = send(app, method, path, headers={"host": "127.0.0.1", **headers}).status_code == 403
        is_link = path == "/" and "origin" not in headers  # on another page
        assert is_refused == (code == "host_not_allowed" if is_link else code is not None)
    assert send(app, "GET", "/health", headers={"host": "127.0.0.1", **headers}).status_code == 200
    assert send(app, "GET", "/ready", headers={"host": "127.0.0.1", **headers}).status_code == 503


def test_applications_for_other_servers_have_any_host(toy: Toy) -> None:
    app = create_app([toy.run], ServerSettings(open_access=True, log_requests=False))
    assert send(app, "POST", "/api/translate", json={"text": "ba."}).status_code == 200
