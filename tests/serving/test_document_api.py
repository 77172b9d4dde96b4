"""Documents and glossaries in our own API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, current_thread
from typing import Any

import pytest

from document_files import pack_docx
from dragoman.documents.document import MarkedText
from dragoman.inference.constraints import Glossary
from dragoman.inference.document_translation import TranslatedUnit
from dragoman.serving import glossaries as glossary_module
from dragoman.serving.document_jobs import DocumentJobs
from dragoman.serving.errors import RequestError
from dragoman.serving.glossaries import GlossaryStore
from dragoman.serving.keys import add_key
from dragoman.serving.service import Service
from dragoman.serving.settings import ServerSettings
from toy_run import make_sentences, translate_toy
from toy_server import ToyServer, serve_in_thread

SOURCES = make_sentences(3)
TARGETS = [translate_toy(source) for source in SOURCES]


def upload(server: ToyServer, text: str, name: str = "a.txt", **fields: str) -> Any:
    data = {"source": "en", "target": "de", **fields}
    return server.client.post("/api/documents", data=data, files={"file": (name, text.encode())})


def wait(server: ToyServer, identifier: str) -> Any:
    while (job := server.client.get(f"/api/documents/{identifier}").json())["status"] in ("queued", "translating"):
        time.sleep(0.01)
    return job


def test_a_document_is_translated_and_deleted(language_server: ToyServer) -> None:
    answer = upload(language_server, "\n\n".join(SOURCES), "../Grüße.txt")
    assert answer.status_code == 202
    job = wait(language_server, answer.json()["id"])
    assert (job["status"], job["done"], job["total"], job["seconds_left"]) == ("done", 3, 3, 0)
    assert job["name"] == "Grüße.txt"
    path = f"/api/documents/{job['id']}"
    result = language_server.client.get(f"{path}/result")
    assert result.text == "\n\n".join(TARGETS)
    expected = "attachment; filename=\"Gr__e.txt\"; filename*=UTF-8''Gr%C3%BC%C3%9Fe.txt"
    assert result.headers["content-disposition"] == expected
    assert language_server.client.delete(path).status_code == 204
    assert language_server.client.get(path).status_code == 404


def test_documents_are_refused(language_server: ToyServer) -> None:
    for fields in ({"target": "fr"}, {"source": "fr"}, {"colour": "red"}, {"name": "a.xyz"}):
        answer = upload(language_server, "ba", **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    assert upload(language_server, "ba", glossary="none").status_code == 404
    assert language_server.client.post("/api/documents", json={"file": "x"}).status_code == 400


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.xlf", '<xliff><file source-language="fr" target-language="es"></file></xliff>', "is from fr to es"),
        ("a.po", 'msgid ""\nmsgstr "Language: es\\n"\n', "is to es"),
    ],
)
def test_files_in_other_languages_are_refused(language_server: ToyServer, name: str, text: str, problem: str) -> None:
    """In the words of a client, which has no options of the command line."""
    client, files = language_server.client, {"file": (name, text.encode())}
    for path, source, target in (
        ("/api/documents", "source", "target"), ("/translate_file", "source", "target"),
        ("/v2/document", "source_lang", "target_lang"),
    ):  # fmt: skip
        answer = client.post(path, data={source: "en", target: "de"}, files=files)
        expected = f"{name} {problem}, but would be translated from en to de; give the languages of the file"
        assert (answer.status_code, expected in answer.text) == (400, True)


def test_limits_of_documents(language_runs: list[Path]) -> None:
    settings = ServerSettings(log_requests=False, document_threads=1, max_queued_documents=2, document_lifetime=0.05)
    with serve_in_thread(language_runs, settings) as server:
        may_go_on = Event()
        server.app.state.documents.executor.submit(may_go_on.wait)
        first, second = (upload(server, "ba.").json()["id"] for _ in range(2))
        busy = upload(server, "ba.")
        assert busy.status_code == 429
        assert int(busy.headers["retry-after"]) > 0
        assert server.client.get(f"/api/documents/{first}/result").status_code == 409
        assert server.client.delete(f"/api/documents/{second}").status_code == 204
        assert upload(server, "ba.").status_code == 202  # there is room again
        may_go_on.set()
        while server.client.get(f"/api/documents/{first}").status_code != 404:  # translated, and then expired
            time.sleep(0.01)


def hold(server: ToyServer) -> Event:
    """Keep the only thread for documents busy until the event is set."""
    may_go_on = Event()
    server.app.state.documents.executor.submit(may_go_on.wait)
    return may_go_on


def test_documents_that_arrive_together_are_limited(language_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    both_are_parsed, parse = Barrier(2), DocumentJobs._open

    def parse_together(jobs: DocumentJobs, *arguments: Any) -> Any:
        both_are_parsed.wait(30)
        return parse(jobs, *arguments)

    monkeypatch.setattr(DocumentJobs, "_open", parse_together)
    settings = ServerSettings(log_requests=False, document_threads=1, max_queued_documents=1)
    with serve_in_thread(language_runs, settings) as server, ThreadPoolExecutor(2) as clients:
        may_go_on = hold(server)
        answers = [clients.submit(upload, server, "ba.") for _ in range(2)]
        assert sorted(answer.result().status_code for answer in answers) == [202, 429]
        may_go_on.set()


def test_documents_that_are_parsed_together_have_room(
    language_runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_parsed, may_go_on, parse = Event(), Event(), DocumentJobs._open

    def parse_slowly(jobs: DocumentJobs, *arguments: Any) -> Any:
        is_parsed.set()
        may_go_on.wait(30)
        return parse(jobs, *arguments)

    monkeypatch.setattr(DocumentJobs, "_open", parse_slowly)
    settings = ServerSettings(log_requests=False, document_memory=500)
    with serve_in_thread(language_runs, settings) as server, ThreadPoolExecutor(1) as clients:
        first = clients.submit(upload, server, "ba." * 50)
        assert is_parsed.wait(30)
        assert upload(server, "ba." * 50).status_code == 429
        may_go_on.set()
        assert first.result().status_code == 202
        assert server.app.state.documents.reserved == 0


def test_a_refused_document_takes_no_room_from_others(language_runs: list[Path], tmp_path: Path) -> None:
    rich, poor = (add_key(tmp_path / "keys.json", name, characters_per_month=n) for name, n in (("a", 1000), ("b", 10)))
    settings = ServerSettings(log_requests=False, document_memory=1000, keys_file=tmp_path / "keys.json")
    with serve_in_thread(language_runs, settings) as server:
        client = server.client
        client.headers["authorization"] = f"Bearer {rich}"
        first = upload(server, "ba. " * 70).json()["id"]
        assert wait(server, first)["status"] == "done"
        client.headers["authorization"] = f"Bearer {poor}"
        assert upload(server, "ba. " * 80).status_code == 403
        assert upload(server, "ba. " * 100).status_code == 429  # no room even without the other document
        client.headers["authorization"] = f"Bearer {rich}"
        assert client.get(f"/api/documents/{first}").status_code == 200
        assert upload(server, "ba. " * 80).status_code == 202
        assert client.get(f"/api/documents/{first}").status_code == 404


def test_a_file_whose_client_has_gone_is_not_translated(language_runs: list[Path]) -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="source"\r\n\r\nen\r\n'
        b'--x\r\nContent-Disposition: form-data; name="target"\r\n\r\nde\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nba.\r\n--x--\r\n'
    )
    head = "POST /translate_file HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    with serve_in_thread(language_runs, ServerSettings(log_requests=False, document_threads=1, timeout=2)) as server:
        may_go_on, jobs = hold(server), server.app.state.documents.jobs
        with server.connect() as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not jobs:
                time.sleep(0.01)
            [job] = jobs.values()
        while jobs:
            time.sleep(0.01)
        assert job.task.cancelled()
        files, data = {"file": ("a.txt", b"ba.")}, {"source": "en", "target": "de"}
        answer = server.client.post("/translate_file", data=data, files=files)
        assert (answer.status_code, "2 s" in answer.text) == (504, True)
        assert not jobs
        may_go_on.set()


def test_a_deleted_document_does_not_wait(language_runs: list[Path]) -> None:
    with serve_in_thread(language_runs, ServerSettings(log_requests=False, document_threads=1)) as server:
        may_go_on = hold(server)
        identifier = upload(server, "ba.").json()["id"]
        job = server.app.state.documents.find(identifier)
        server.client.delete(f"/api/documents/{identifier}")
        assert job.task.cancelled()
        assert job.document is None
        may_go_on.set()


def test_packed_documents_count_with_their_unpacked_size(language_runs: list[Path]) -> None:
    packed = pack_docx(f"<w:document><w:p><w:r><w:t>{'ba ' * 30_000}</w:t></w:r></w:p></w:document>", "<w:ftr/>")
    files, fields = {"file": ("a.docx", packed)}, {"source": "en", "target": "de"}
    settings = ServerSettings(log_requests=False, document_memory=100_000)
    assert 3 * len(packed) < settings.document_memory
    with serve_in_thread(language_runs, settings) as server:
        assert server.client.post("/api/documents", data=fields, files=files).status_code == 429
        assert not server.app.state.documents.jobs


def test_documents_get_the_languages_of_the_model(language_server: ToyServer) -> None:
    """A TMX file of one language has none that could be the target."""
    unit = f'<tu><tuv xml:lang="en"><seg>{SOURCES[0]}</seg></tuv></tu>'
    text = f'<tmx version="1.4"><header srclang="en"/><body>{unit}</body></tmx>'
    for fields in ({"target": ""}, {"source": "auto", "target": "DE_at"}):
        job = wait(language_server, upload(language_server, text, "a.tmx", **fields).json()["id"])
        assert (job["status"], job["error"]) == ("done", "")
        result = language_server.client.get(f"/api/documents/{job['id']}/result").text
        assert f'<tuv xml:lang="de"><seg>{TARGETS[0]}</seg></tuv>' in result


def test_failures_of_the_server_are_logged(
    language_runs: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("cannot translate ba.")

    monkeypatch.setattr(Service, "translate_units", fail)
    files = {"file": ("a.txt", b"ba.")}
    with serve_in_thread(language_runs, ServerSettings()) as server:
        capsys.readouterr()
        answer = server.client.post("/translate_file", data={"source": "en", "target": "de"}, files=files)
    assert answer.status_code == 500
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    [error] = [line for line in logged if line["level"] == "error"]
    assert (error["id"], error["error"]) == (answer.headers["x-request-id"], "RuntimeError")
    assert error["route"] == "/translate_file"
    assert error["id"] in answer.json()["error"]


def test_a_stop_answers_those_who_wait_for_a_document(language_runs: list[Path]) -> None:
    settings = ServerSettings(log_requests=False, document_threads=1, stop_timeout=0.2)
    data, files = {"source": "en", "target": "de"}, {"file": ("a.txt", b"ba.")}
    with serve_in_thread(language_runs, settings) as server, ThreadPoolExecutor(1) as clients:
        may_go_on = hold(server)
        answer = clients.submit(server.client.post, "/translate_file", data=data, files=files)
        while not server.app.state.documents.jobs:
            time.sleep(0.01)
        server.server.should_exit = True
        assert answer.result(30).status_code == 503
        may_go_on.set()
    assert server.server.cancelled_requests >= 1


def test_glossaries_are_used_in_threads_of_requests(
    language_server: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since they can be large, and may have to be read from files."""
    threads, make_index = list[str](), Glossary.__init__

    def note_thread(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            threads.append(current_thread().name)
            return method(*arguments)

        return call

    for name in ("create", "find", "list", "delete"):
        monkeypatch.setattr(GlossaryStore, name, note_thread(getattr(GlossaryStore, name)))
    monkeypatch.setattr(Glossary, "__init__", note_thread(make_index))
    body: dict[str, Any] = {"name": "mine", "source": "en", "target": "de", "entries": {"ba": "wex"}}
    client = language_server.client
    path = f"/api/glossaries/{client.post('/api/glossaries', json=body).json()['id']}"
    assert client.get(path).status_code == client.get("/api/glossaries").status_code == 200
    request = {"text": "ba.", "source": "en", "target": "de", "glossary": path.rpartition("/")[2]}
    assert client.post("/api/translate", json=request).status_code == 200
    wait(language_server, upload(language_server, "ba del.", glossary=request["glossary"]).json()["id"])
    own = len(threads)
    path = path.replace("/api", "/v2")
    for found in (client.get("/v2/glossaries"), client.get(path), client.get(f"{path}/entries")):
        assert found.status_code == 200
    deepl = {"text": ["ba."], "source_lang": "EN", "target_lang": "DE", "glossary_id": request["glossary"]}
    assert client.post("/v2/translate", json=deepl).status_code == 200
    assert client.delete(path).status_code == 204
    assert (own, len(threads)) == (6, 12)
    assert {name.partition("_")[0] for name in threads} == {"request"}


def test_the_memory_of_glossaries_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glossary_module, "MAX_STORED", 1000)
    for store in (GlossaryStore(), GlossaryStore(tmp_path)):
        first = store.create("a", "en", "de", [("ba", "wex")], "")
        second = store.create("b", "en", "de", [(f"ba{number}", "wex") for number in range(4)], "")
        assert store.size == first.size + second.size == 2 + 5 * 150 + len("bawex") + 4 * len("ba0wex")
        with pytest.raises(RequestError, match="no room"):
            store.create("c", "en", "de", [("ba", "wex"), ("bo", "wex")], "")
        store.delete(second.id, "")
        assert store.size == first.size
    (tmp_path / f"{first.id}.json").unlink()
    assert store.list("") == []
    assert store.size == 0


def test_glossaries(language_server: ToyServer) -> None:
    client = language_server.client
    body = {"name": "mine", "source": "en", "target": "de", "entries": {"ba": "wex"}}
    glossary = client.post("/api/glossaries", json=body).json()
    path = f"/api/glossaries/{glossary['id']}"
    assert client.get("/api/glossaries").json() == [glossary]
    assert client.get(path).json() == {**glossary, "entries": {"ba": "wex"}}
    request = {"text": "ba del.", "source": "en", "target": "de"}
    plain, constrained = (
        client.post("/api/translate", json={**request, "glossary": used}).json()["translations"][0]["text"]
        for used in ("", glossary["id"])
    )
    assert "wex" in constrained
    assert "wex" not in plain
    job = wait(language_server, upload(language_server, "ba del.", glossary=glossary["id"]).json()["id"])
    assert "wex" in client.get(f"/api/documents/{job['id']}/result").text
    assert client.delete(path).status_code == 204
    assert client.get(path).status_code == 404
    assert client.post("/api/translate", json={**request, "glossary": glossary["id"]}).status_code == 404
    assert client.post("/api/glossaries", json={**body, "entries": {}}).status_code == 400
    assert client.post("/api/glossaries", json={**body, "target": "fr"}).status_code == 400


def test_markup_of_texts(language_server: ToyServer) -> None:
    body = {"text": f"<p>{SOURCES[0]}</p>", "source": "en", "target": "de", "markup": "html"}
    answer = language_server.client.post("/api/translate", json=body).json()
    assert answer["translations"][0]["text"] == f"<p>{TARGETS[0]}</p>"


def test_warnings_of_writing_are_kept(language_server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "translate_units", lambda *_: [TranslatedUnit(MarkedText("é", ()))])
    po = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=ASCII\\n"\n\nmsgid "ba."\nmsgstr ""\n'
    job = wait(language_server, upload(language_server, po, "a.po").json()["id"])
    assert job["status"] == "done"
    [warning] = job["warnings"]
    assert "UTF-8" in warning
