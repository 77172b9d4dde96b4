"""Tests of API keys: who needs one, what it may do, and what it has used."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from dragoman.errors import UserError
from dragoman.io import lock_folder, write_text
from dragoman.serving import keys as key_module
from dragoman.serving import middleware
from dragoman.serving.app import create_app, make_app
from dragoman.serving.errors import RequestError
from dragoman.serving.keys import KeyStore, add_key, read_keys, remove_key
from dragoman.serving.service import Service
from dragoman.serving.settings import ServerSettings
from toy_run import Call, Toy, assert_user_error, make_sentences
from toy_server import ToyServer, serve_in_thread

TEXT = make_sentences(1)[0]


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def server(toy: Toy, keys_file: Path) -> Iterator[ToyServer]:
    """Return a server that requires keys."""
    add_key(keys_file, "first")
    with serve_in_thread([toy.run], ServerSettings(keys_file=keys_file, log_requests=False)) as server:
        yield server


def make_key(server: ToyServer, name: str, **limits: object) -> str:
    """Add a key while the server runs."""
    store = server.app.state.server.keys
    key = add_key(store.path, name, **limits)  # type: ignore[arg-type]
    store.refresh()
    return key


def translate(server: ToyServer, authorization: str = "", text: str = TEXT) -> httpx.Response:
    headers = {"authorization": authorization} if authorization else {}
    return server.client.post("/api/translate", json={"text": text}, headers=headers)


def test_a_missing_file_of_keys_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no key file .*; make one with: dragoman keys add NAME"):
        read_keys(tmp_path / "keys.json")


def test_a_key_is_required(server: ToyServer) -> None:
    key = make_key(server, "a")
    assert translate(server, f"Bearer {key}").status_code == 200
    assert translate(server, f"DeepL-Auth-Key {key}").status_code == 200
    missing, wrong = translate(server), translate(server, f"Bearer {key}x")
    assert (missing.status_code, missing.json()["error"]["code"]) == (401, "key_missing")
    assert missing.headers["www-authenticate"] == "Bearer"
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (403, "key_invalid")
    assert translate(server, "Bearer " + "-" * 1000).status_code == 403
    assert translate(server, "Basic abc").status_code == 401


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/api/translate", {"text": TEXT}, "needs an API key: Authorization: Bearer KEY"),
        ("/translate", {"q": TEXT, "source": "en", "target": "de"}, "contact the server operator to get an API key"),
        ("/v2/translate", {"text": [TEXT], "target_lang": "DE"}, "needs an API key: Authorization: DeepL-Auth-Key KEY"),
    ],
)
def test_a_missing_key_is_asked_for_as_the_protocol_sends_it(
    server: ToyServer, path: str, body: dict[str, object], place: str
) -> None:
    assert f'{place}"' in server.client.post(path, json=body).text


def test_a_request_without_key_is_refused_before_its_body_is_read(server: ToyServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /api/translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n")
        assert connection.makefile("rb").readline().split()[1] == b"401"


def test_what_needs_no_key(server: ToyServer) -> None:
    for path in ("/health", "/ready", "/openapi.json", "/metrics"):
        assert server.client.get(path).status_code == 200


def test_a_removed_key_is_refused(server: ToyServer) -> None:
    key = make_key(server, "gone")
    assert translate(server, f"Bearer {key}").status_code == 200
    store = server.app.state.server.keys
    remove_key(store.path, "gone")
    store.refresh()
    assert translate(server, f"Bearer {key}").status_code == 403


def test_the_file_tells_nobody_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "a")
    assert key.split("-", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert KeyStore(path).find(key) == read_keys(path)[0]
    assert KeyStore(path).find(key[:-1] + ("a" if key[-1] != "a" else "b")) is None


def test_keys_that_are_added_and_removed_at_once_are_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "old")
    with ThreadPoolExecutor(9) as commands:
        removed = commands.submit(remove_key, path, "old")
        added = [commands.submit(add_key, path, f"key {number}") for number in range(8)]
    removed.result()
    assert all(change.result() for change in added)
    assert {key.name for key in read_keys(path)} == {f"key {number}" for number in range(8)}


def test_a_key_needs_a_name(call: Call, tmp_path: Path) -> None:
    for name in ("", " "):
        assert_user_error(call("keys", "add", name, "--keys-file", tmp_path / "keys.json"), "name")
    assert not [*tmp_path.iterdir()]


def test_requests_per_minute(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("dragoman.serving.keys.time.monotonic", lambda: now)
    header = f"Bearer {make_key(server, 'few', requests_per_minute=2)}"
    assert [translate(server, header).status_code for _ in range(3)] == [200, 200, 429]
    answer = translate(server, header)
    assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("rate_limited", "30")
    now += 31
    assert [translate(server, header).status_code for _ in range(2)] == [200, 429]


def test_characters_per_month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "a", characters_per_month=100)
    [key] = read_keys(path)
    store, replica = KeyStore(path), KeyStore(path)
    store.take_characters(key, 60)
    with pytest.raises(RequestError, match="60 of its 100 characters") as refusal:
        store.take_characters(key, 41)
    assert (refusal.value.status, refusal.value.code) == (403, "quota_exceeded")
    store.refresh()
    replica.take_characters(key, 15)
    replica.refresh()
    store.refresh()
    assert store.get_usage(key) == replica.get_usage(key) == KeyStore(path).get_usage(key) == (75, 100)
    monkeypatch.setattr(key_module, "get_month", lambda: "2999-01")
    assert store.get_usage(key) == (0, 100)
    store.take_characters(key, 100)


@pytest.mark.parametrize("damage", ["{", '{"a": "many"}', "[]"])
def test_characters_wait_until_the_damaged_file_of_counts_is_gone(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "a")
    [key] = read_keys(path)
    store = KeyStore(path)
    file = store.usage_folder / f"{key_module.get_month()}.json"
    file.write_text(damage)
    store.take_characters(key, 60)
    for _ in range(2):
        with pytest.raises(UserError, match=r"\.json.*remove it"):
            store.refresh()
    assert store.get_usage(key)[0] == 60
    with pytest.raises(UserError, match="remove it"):
        KeyStore(path)
    file.unlink()
    store.refresh()
    assert KeyStore(path).get_usage(key)[0] == 60


def test_characters_wait_until_they_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "a")
    [key] = read_keys(path)
    store = KeyStore(path)
    store.take_characters(key, 60)

    def fail(file: Path, _: str) -> None:
        raise UserError(f"cannot write {file}")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(key_module, "write_text", fail)
        with pytest.raises(UserError, match="cannot write"):
            store.refresh()
    with lock_folder(store.usage_folder, ""):
        store.refresh()  # another server writes, which is no error
    assert (store.get_usage(key)[0], KeyStore(path).get_usage(key)[0]) == (60, 0)
    path.rename(tmp_path / "moved.json")
    with pytest.raises(UserError, match=r"keys\.json"):
        store.refresh()
    (tmp_path / "moved.json").rename(path)
    assert KeyStore(path).get_usage(key)[0] == 60  # written, although there was no file of keys


def test_characters_count_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "a", characters_per_month=100)
    [key] = read_keys(path)
    store = KeyStore(path)
    store.take_characters(key, 60)
    write = write_text
    used = []

    def spend(file: Path, text: str) -> None:
        with pytest.raises(RequestError, match="60 of its 100"):
            store.take_characters(key, 41)
        store.take_characters(key, 10)
        used.append(store.get_usage(key)[0])
        write(file, text)

    monkeypatch.setattr(key_module, "write_text", spend)
    store.refresh()
    assert [*used, store.get_usage(key)[0]] == [70, 70]


def test_a_missing_file_of_keys_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json"):
        KeyStore(tmp_path / "folder" / "none.json")
    assert not [*tmp_path.iterdir()]


def test_the_server_counts_characters(server: ToyServer) -> None:
    key = make_key(server, "counted", characters_per_month=2 * len(TEXT))
    assert [translate(server, f"Bearer {key}").status_code for _ in range(3)] == [200, 200, 403]
    store = server.app.state.server.keys
    assert store.get_usage(store.find(key)) == (2 * len(TEXT), 2 * len(TEXT))


def test_a_refused_request_costs_nothing(server: ToyServer) -> None:
    key = make_key(server, "refused", characters_per_month=1000)
    assert translate(server, f"Bearer {key}", "a" * 30_000).status_code == 413
    store = server.app.state.server.keys
    assert store.get_usage(store.find(key))[0] == 0


def test_a_failed_request_costs_nothing(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_key(server, "failed", characters_per_month=1000)
    store, header = server.app.state.server.keys, f"Bearer {key}"

    errors: list[Exception] = [RuntimeError(), RequestError(429, "busy", ""), RequestError(404, "unknown_model", "")]
    with monkeypatch.context() as broken:
        broken.setattr(Service, "translate", Mock(side_effect=errors))
        for _ in errors:
            assert translate(server, header).status_code >= 400
            assert store.get_usage(store.find(key))[0] == 0
    server.client.post("/api/detect", json={"text": TEXT}, headers={"authorization": header}).raise_for_status()
    assert store.get_usage(store.find(key))[0] == 0
    assert translate(server, header).status_code == 200
    store.refresh()
    store.return_characters(store.find(key), 2 * len(TEXT))  # more than there are in this month
    assert store.get_usage(store.find(key))[0] == 0


def test_models_are_loaded_and_removed_by_administrators(server: ToyServer, toy: Toy) -> None:
    admin = {"authorization": f"Bearer {make_key(server, 'root', rights=('admin',))}"}
    other = {"authorization": f"Bearer {make_key(server, 'user')}"}
    put, client = {"run": str(toy.run)}, server.client
    assert client.put("/api/models/second", json=put, headers=other).status_code == 403
    answer = client.put("/api/models/second", json=put, headers=admin)
    assert (answer.status_code, answer.json()) == (200, {"name": "second", "replaced": False})
    body = {"text": TEXT, "model": "second"}
    assert client.post("/api/translate", json=body, headers=other).json()["model"] == "second"
    assert client.put("/api/models/second", json=put, headers=admin).json()["replaced"]
    assert client.put("/api/models/third", json={"run": "/nothing"}, headers=admin).status_code == 400
    assert client.put("/api/models/a%20b", json=put, headers=admin).status_code == 400
    assert client.delete("/api/models/second", headers=other).status_code == 403
    assert client.delete("/api/models/second", headers=admin).status_code == 204
    assert client.delete("/api/models/second", headers=admin).status_code == 404
    assert client.post("/api/translate", json=body, headers=other).status_code == 404
    assert client.delete(f"/api/models/{toy.run.name}", headers=admin).status_code == 409


def test_other_machines_need_keys_unless_access_is_open(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dragoman keys add"):
        make_app([toy.run], ServerSettings(host="0.0.0.0"), load=False)
    add_key(tmp_path / "keys.json", "a")
    for required, options in (
        (False, {}),
        (False, {"host": "localhost"}),
        (False, {"host": "::1"}),
        (False, {"host": "0.0.0.0", "open_access": True}),
        (True, {"host": "0.0.0.0", "keys_file": tmp_path / "keys.json"}),
        (True, {"keys_file": tmp_path / "keys.json"}),
        (False, {"keys_file": tmp_path / "keys.json", "open_access": True}),
    ):
        settings = ServerSettings.model_validate(options)
        assert settings.key_required == required
        make_app([toy.run], settings, load=False)


def test_applications_for_other_servers_need_keys_unless_access_is_open(toy: Toy, tmp_path: Path) -> None:
    for settings in (None, ServerSettings(), ServerSettings(host="localhost")):
        with pytest.raises(UserError, match="dragoman keys add"):
            create_app([toy.run], settings)
    add_key(tmp_path / "keys.json", "a")
    assert create_app([toy.run], ServerSettings(keys_file=tmp_path / "keys.json")).state.access.required
    assert not create_app([toy.run], ServerSettings(open_access=True)).state.access.required


def test_the_commands(call: Call, tmp_path: Path) -> None:
    file = ("--keys-file", tmp_path / "keys.json")
    answer = call("keys", "add", "alice", "--admin", "--requests-per-minute", 5, *file)
    assert answer.code == 0
    key = answer.out.strip()
    found = KeyStore(tmp_path / "keys.json").find(key)
    assert found is not None
    assert (found.name, found.rights, found.requests_per_minute) == ("alice", ("admin",), 5)
    assert "alice" in call("keys", "list", *file).out
    record = json.loads(call("keys", "list", "--json", *file).out)
    assert record["requests_per_minute"] == 5
    assert not {"digest", "salt"} & record.keys()
    assert_user_error(call("keys", "add", "alice", *file), "alice", "already")
    assert_user_error(call("keys", "remove", "bob", *file), "bob", "alice")
    assert call("keys", "remove", "alice", *file).code == 0
    assert read_keys(tmp_path / "keys.json") == []
    (tmp_path / "keys.json").write_text("{")
    assert_user_error(call("keys", "list", *file), "keys.json")


def test_a_failed_document_costs_nothing(server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    key, file = make_key(server, "documents", characters_per_month=1000), {"file": ("a.txt", TEXT.encode())}
    store, headers = server.app.state.server.keys, {"authorization": f"Bearer {key}"}

    def upload(path: str) -> httpx.Response:
        return server.client.post(path, data={"source": "en", "target": "de"}, files=file, headers=headers)

    def translate_document() -> str:
        """Return the status of a document when it is finished."""
        path = f"/api/documents/{upload('/api/documents').json()['id']}"
        while (status := server.client.get(path, headers=headers).json()["status"]) in ("queued", "translating"):
            time.sleep(0.01)
        return str(status)

    with monkeypatch.context() as broken:
        broken.setattr(Service, "translate_units", Mock(side_effect=RuntimeError))
        assert translate_document() == "error"
        assert store.get_usage(store.find(key))[0] == 0
        assert upload("/translate_file").status_code == 500  # of which the middleware gives back the characters
        assert store.get_usage(store.find(key))[0] == 0
    assert translate_document() == "done"
    assert store.get_usage(store.find(key))[0] == len(TEXT)


def test_bodies_with_their_keys_in_them_are_limited(toy: Toy, keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose key is not known before their body has arrived cannot take the memory of the others."""
    monkeypatch.setattr(middleware, "MAX_UNVERIFIED", 0)  # so one document of the largest size is allowed
    settings = ServerSettings(keys_file=keys_file, max_document_bytes=1, max_body=10**6, log_requests=False)
    key, text = add_key(keys_file, "in-body"), "ba. " * 50_000
    with serve_in_thread([toy.run], settings) as server:
        form = {"q": text, "source": "en", "target": "de", "api_key": key}
        refused = server.client.post("/translate", data=form)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        verified = server.client.post("/translate", data=form, headers={"authorization": f"Bearer {key}"})
        assert verified.status_code == 400  # too many characters
        assert server.client.post("/translate", data={**form, "q": "ba."}).status_code == 200
