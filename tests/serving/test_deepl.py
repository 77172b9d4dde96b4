"""The API of DeepL, with the real client deepl and with requests as other clients send them."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import deepl
import httpx
import pytest
from deepl import http_client

from dragoman.errors import UserError
from dragoman.inference.translator import Translator
from dragoman.serving import deepl as deepl_api
from dragoman.serving.deepl import list_targets
from dragoman.serving.document_jobs import DocumentJobs
from dragoman.serving.errors import RequestError
from dragoman.serving.keys import add_key
from dragoman.serving.service import Service, Translation, TranslationRequest
from dragoman.serving.settings import ServerSettings
from toy_run import WORDS, make_sentences, translate_toy
from toy_server import ToyServer, serve_in_thread

SOURCES = make_sentences(3)
TARGETS = [translate_toy(source) for source in SOURCES]
DIRECTION = {"source_lang": "EN", "target_lang": "DE"}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client poll without pauses of 5 s, and not repeat what was refused."""
    sleep = time.sleep
    monkeypatch.setattr("deepl.translator.time.sleep", lambda _: sleep(0.01))
    monkeypatch.setattr(http_client, "max_network_retries", 0)


@pytest.fixture
def client(language_server: ToyServer) -> Iterator[deepl.Translator]:
    with_key = deepl.Translator("any key will do", server_url=language_server.url)
    yield with_key
    for glossary in with_key.list_glossaries():
        with_key.delete_glossary(glossary)
    with_key.close()


def translate(client: deepl.Translator, text: str, **options: Any) -> str:
    result = client.translate_text(text, **{**DIRECTION, **options})
    assert isinstance(result, deepl.TextResult)
    return result.text


def test_one_and_many_texts(client: deepl.Translator) -> None:
    one = client.translate_text(SOURCES[0], source_lang="EN", target_lang="DE")
    assert isinstance(one, deepl.TextResult)
    assert (one.text, one.detected_source_lang, one.billed_characters) == (TARGETS[0], "EN", len(SOURCES[0]))
    many = client.translate_text(SOURCES, source_lang="de", target_lang="en-US", model_type="quality_optimized")
    assert isinstance(many, list)
    assert [result.text for result in many] == TARGETS
    assert many[0].model_type_used == "quality_optimized"
    detected = client.translate_text("This is an English sentence about dogs.", target_lang="DE")
    assert isinstance(detected, deepl.TextResult)
    assert detected.detected_source_lang == "EN"
    assert [translate(client, SOURCES[0], target_lang=code, source_lang="DE") for code in ("EN-GB", "EN-US")]
    same = client.translate_text(SOURCES[0], source_lang="EN", target_lang="EN-GB")
    assert isinstance(same, deepl.TextResult)
    assert (same.text, same.detected_source_lang) == (SOURCES[0], "EN")


def test_languages_and_usage(client: deepl.Translator) -> None:
    assert [(language.code, language.name) for language in client.get_source_languages()] == [
        ("DE", "German"),
        ("EN", "English"),
    ]
    targets = client.get_target_languages()
    assert [language.code for language in targets] == ["DE", "EN-GB", "EN-US"]
    assert not any(language.supports_formality for language in targets)
    pairs = client.get_glossary_languages()
    assert [(pair.source_lang, pair.target_lang) for pair in pairs] == [("de", "en"), ("en", "de")]
    before = client.get_usage().character
    translate(client, SOURCES[0])
    after = client.get_usage().character
    assert before.count is not None
    assert after.count == before.count + len(SOURCES[0])
    assert not after.limit_reached


def test_english_portuguese_and_chinese_have_variants() -> None:
    assert list_targets(["no"]) == {"NB": "Norwegian (Bokmål)"}
    assert list(list_targets(["de", "en", "pt", "pt-BR", "zh-Hans", "zh-Hant"])) == [
        "DE", "EN-GB", "EN-US", "PT-BR", "PT-PT", "ZH", "ZH-HANS", "ZH-HANT",
    ]  # fmt: skip


def test_options(client: deepl.Translator) -> None:
    lines = "\n\n".join(SOURCES)
    assert translate(client, lines) == "\n\n".join(TARGETS)
    assert translate(client, lines, split_sentences="nonewlines") == "\n\n".join(TARGETS)
    wrapped = "ba\ndel. fo"
    expected = f"{translate(client, 'ba del.')} {translate(client, 'fo')}"
    assert translate(client, wrapped, split_sentences="nonewlines") == expected
    assert "\n" not in translate(client, lines, split_sentences=deepl.SplitSentences.OFF)
    assert translate(client, " ".join(SOURCES)) == " ".join(TARGETS)
    options: dict[str, Any]
    for options in (
        {"preserve_formatting": True},
        {"context": "what came before"},
        {"formality": "prefer_more"},
        {"outline_detection": False},
        {"tag_handling_version": "v2"},
    ):
        assert translate(client, SOURCES[0], **options) == TARGETS[0]
    for options in (
        {"formality": "more"},
        {"style_rule": "x"},
        {"custom_instructions": ["be nice"]},
        {"translation_memory": "x"},
        {"split_sentences": "2"},
        {"tag_handling": "markdown"},
    ):
        with pytest.raises(deepl.DeepLException, match="Bad request"):
            translate(client, SOURCES[0], **options)


def test_context_that_no_model_reads_is_not_counted(
    language_server: ToyServer, client: deepl.Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = "\n".join(["what came before"] * 1500)
    assert translate(client, SOURCES[0], context=context) == TARGETS[0]
    state = language_server.app.state.server
    service = Service(state.pool, state.settings)
    assert service.select_context("a\nb\nc") == ()
    monkeypatch.setattr(Translator, "choose_context", lambda *_: 2)
    assert service.select_context("a\nb\nc") == ("b", "c")
    assert service.select_context(" ") == ()


def test_tags(client: deepl.Translator) -> None:
    html = f'<p class="a">{SOURCES[0]}</p><ul><li>{SOURCES[1]}</li></ul>'
    expected = f'<p class="a">{TARGETS[0]}</p><ul><li>{TARGETS[1]}</li></ul>'
    assert translate(client, html, tag_handling="html") == expected
    xml = f"<a><b>{SOURCES[0]}</b><x>ba del</x> {SOURCES[1]}</a>"
    translation = translate(
        client, xml, tag_handling="xml", ignore_tags=["x"], splitting_tags=["a", "b"], non_splitting_tags="x,y"
    )
    assert f"<b>{TARGETS[0]}</b>" in translation
    assert "<x>ba del</x>" in translation
    assert translation.startswith("<a>")
    assert translation.endswith("</a>")
    lines = [translate(client, line) for line in ("ba del", "fo mun")]  # Weblate sends every string as XML
    assert translate(client, "ba del\n  <b>fo mun</b>", tag_handling="xml") == f"{lines[0]}\n  <b>{lines[1]}</b>"
    joined = translate(client, "ba del\n  <b>fo mun</b>", tag_handling="xml", split_sentences="nonewlines")
    assert "\n" not in joined
    html = "<p>ba del\n  <b>fo mun</b></p>\n"
    assert "\n" not in translate(client, html, tag_handling="html").strip()
    kept = translate(client, html, tag_handling="html", split_sentences="1")
    assert kept == f"<p>{lines[0]}\n  <b>{lines[1]}</b></p>\n"
    complete = '<?xml version="1.0"?>\n<k:a xmlns:k="u"><k:x>ba del</k:x><k:s/>{}&#13;\n{}</k:a>'
    text = complete.format(*SOURCES[:2])
    translation = translate(client, text, tag_handling="xml", ignore_tags=["k:x"], splitting_tags=["k:s"])
    assert translation == complete.format(*TARGETS[:2])
    with pytest.raises(deepl.DeepLException, match=r"Bad request.*mismatched tag in line 1, column 7"):
        translate(client, "<a>b</c>", tag_handling="xml", tag_handling_version="v2")


@pytest.mark.parametrize("version", [{}, {"tag_handling_version": "v1"}])
def test_xml_need_not_be_well_formed(language_server: ToyServer, version: dict[str, str]) -> None:
    fields = {"source_lang": "EN", "target_lang": "DE", "tag_handling": "xml", **version}
    layouts = [
        "<b>{}</b> & <i>{}</i>",
        "{}<br>{}",
        "{} < {} &copy; &amp",
        "<a>{}</c><!-- {}",
        "{}\n</b> {}\0 <",
        "&{}<&{}",
    ]
    for layout in layouts:
        answer = language_server.client.post("/v2/translate", json={**fields, "text": [layout.format(*SOURCES)]})
        [translation] = answer.raise_for_status().json()["translations"]
        assert translation.get("tag_handling_version") == version.get("tag_handling_version")
    both = f"<b>{SOURCES[0]}</b>\n&\n{SOURCES[1]}<br>"
    answer = language_server.client.post("/v2/translate", json={**fields, "text": [both]}).json()
    assert answer["translations"][0]["text"] == f"<b>{TARGETS[0]}</b>\n&\n{TARGETS[1]}<br>"


def test_glossaries(client: deepl.Translator) -> None:
    source, target = "ba del.", translate_toy("ba del.")
    assert translate(client, source) == target
    glossary = client.create_glossary("mine", "EN", "DE", {"ba": "wex", "fo": "ak"})
    assert (glossary.name, glossary.ready, glossary.entry_count) == ("mine", True, 2)
    assert (glossary.source_lang, glossary.target_lang) == ("EN", "DE")
    assert translate(client, source, glossary=glossary) == target.replace("ak", "wex")
    assert "wex" in translate(client, source, glossary=glossary.glossary_id)
    csv = client.create_glossary_from_csv("table", "EN", "DE", '"del","yim, yim",en,de\nfo,sa\n')
    assert client.get_glossary_entries(csv) == {"del": "yim, yim", "fo": "sa"}
    both = translate(client, source, glossary_ids=[glossary, csv])
    assert "wex" in both
    assert "yim, yim" in both
    with_both = client.translate_text_with_glossary(source, glossary)
    assert isinstance(with_both, deepl.TextResult)
    assert "wex" in with_both.text
    assert client.get_glossary(glossary.glossary_id).creation_time == glossary.creation_time
    assert [each.name for each in client.list_glossaries()] == ["mine", "table"]
    assert client.get_glossary_entries(glossary.glossary_id) == {"ba": "wex", "fo": "ak"}
    client.delete_glossary(glossary)
    for use in (client.get_glossary, client.delete_glossary, client.get_glossary_entries):
        with pytest.raises(deepl.GlossaryNotFoundException):
            use(glossary.glossary_id)
    with pytest.raises(deepl.DeepLException, match="there is no glossary"):
        translate(client, source, glossary=glossary.glossary_id)
    with pytest.raises(deepl.DeepLException, match="not for de-en"):
        translate(client, source, source_lang="DE", target_lang="EN-GB", glossary=csv.glossary_id)
    with pytest.raises(deepl.DeepLException, match="no model translates"):
        client.create_glossary("french", "EN", "FR", {"a": "b"})
    with pytest.raises(deepl.DeepLException, match="second one for 'a'"):
        client.create_glossary_from_csv("twice", "EN", "DE", "a,b\na,c")


def test_glossaries_are_kept_in_a_folder(language_runs: list[Path], tmp_path: Path) -> None:
    settings = ServerSettings(log_requests=False, glossary_folder=tmp_path)
    with serve_in_thread(language_runs[:1], settings) as server:
        client = deepl.Translator("x", server_url=server.url)
        glossary = client.create_glossary("mine", "EN", "DE", WORDS)
        deleted = client.create_glossary("other", "EN", "DE", WORDS)
        client.delete_glossary(deleted)
        with serve_in_thread(language_runs[:1], settings) as other:
            again = deepl.Translator("x", server_url=other.url)
            assert [each.glossary_id for each in again.list_glossaries()] == [glossary.glossary_id]
            new = client.create_glossary("third", "EN", "DE", WORDS)
            assert again.get_glossary_entries(new.glossary_id) == WORDS
            again.delete_glossary(new)
            with pytest.raises(deepl.GlossaryNotFoundException):
                client.get_glossary(new.glossary_id)
            again.close()
        client.close()


def test_documents(client: deepl.Translator, tmp_path: Path) -> None:
    source, target = tmp_path / "in.html", tmp_path / "out.html"
    layout = "<!DOCTYPE html>\n<h1>{}</h1>\n<p>{}</p>\n<p>{}</p>\n"
    source.write_text(layout.format(*SOURCES))
    status = client.translate_document_from_filepath(source, target, source_lang="EN", target_lang="DE")
    assert status.done
    assert status.billed_characters == sum(map(len, SOURCES))
    assert target.read_text() == layout.format(*TARGETS)
    output = io.BytesIO()  # whose name the client does not send
    client.translate_document(io.BytesIO(SOURCES[0].encode()), output, source_lang="EN", target_lang="DE")
    assert output.getvalue().decode() == TARGETS[0]
    glossary = client.create_glossary("mine", "EN", "DE", {"ba": "wex"})
    handle = client.translate_document_upload(
        b"ba del.", filename="a.txt", source_lang="EN", target_lang="DE", glossary_ids=[glossary]
    )
    client.translate_document_wait_until_done(handle)
    response = client.translate_document_download(handle)
    assert response is not None
    assert b"wex" in response.content
    with pytest.raises(deepl.DeepLException, match="Not found"):
        client.translate_document_get_status(deepl.DocumentHandle(handle.document_id, "wrong"))


def test_documents_that_are_refused(client: deepl.Translator) -> None:
    for options in (
        {"target_lang": "FR"},
        {"output_format": "pdf"},
        {"filename": "a.xyz"},
        {"formality": "more"},
        {"input_document": b"\xff\xfe\xff"},
    ):
        given: dict[str, Any] = {
            "input_document": b"ba",
            "filename": "a.txt",
            "source_lang": "EN",
            "target_lang": "DE",
            **options,
        }
        with pytest.raises(deepl.DeepLException, match="Bad request"):
            client.translate_document_upload(**given)


@contextmanager
def paused(documents: DocumentJobs) -> Iterator[None]:
    """Let the only thread for documents wait until the end of the context."""
    may_go_on = Event()
    documents.executor.submit(may_go_on.wait)
    try:
        yield
    finally:
        may_go_on.set()


def test_a_document_that_fails(language_runs: list[Path]) -> None:
    settings = ServerSettings(log_requests=False, document_threads=1)
    with serve_in_thread(language_runs, settings) as server:
        client = deepl.Translator("x", server_url=server.url)
        with paused(server.app.state.documents):
            handle = client.translate_document_upload(b"ba", filename="a.txt", source_lang="EN", target_lang="DE")
            assert client.translate_document_get_status(handle).status == deepl.DocumentStatus.Status.QUEUED
            with pytest.raises(deepl.DocumentNotReadyException):
                client.translate_document_download(handle)
            server.app.state.server.pool.remove("en-de")
        status = client.translate_document_wait_until_done(handle)
        assert not status.ok
        assert "no model translates" in str(status.error_message)
        with pytest.raises(deepl.DeepLException):
            client.translate_document_download(handle)
        client.close()


def test_every_class_of_errors(language_runs: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "one", characters_per_month=50)
    slow = add_key(file, "two", requests_per_minute=1)
    with serve_in_thread(language_runs, ServerSettings(log_requests=False, keys_file=file)) as server:
        client = deepl.Translator(key, server_url=server.url)
        assert translate(client, SOURCES[0]) == TARGETS[0]
        usage = client.get_usage().character
        assert (usage.count, usage.limit) == (len(SOURCES[0]), 50)
        with pytest.raises(deepl.QuotaExceededException):
            translate(client, "ba " * 20)
        with pytest.raises(deepl.QuotaExceededException):
            client.translate_document_upload(b"ba " * 20, filename="a.txt", source_lang="EN", target_lang="DE")
        stranger = deepl.Translator("wrong", server_url=server.url)
        for call in (stranger.get_usage, stranger.list_glossaries, lambda: translate(stranger, "ba")):
            with pytest.raises(deepl.AuthorizationException):
                call()
        other = deepl.Translator(slow, server_url=server.url)
        assert other.list_glossaries() == []
        with pytest.raises(deepl.TooManyRequestsException):
            other.get_usage()
        with pytest.raises(deepl.GlossaryNotFoundException):
            client.get_glossary("nothing")
        with pytest.raises(deepl.DeepLException, match="'target_lang' not supported: no model translates to fr"):
            translate(client, "ba", target_lang="FR")
        with pytest.raises(deepl.DeepLException, match="'source_lang' not supported: no model translates from fr"):
            translate(client, "ba", source_lang="FR")
        with pytest.raises(deepl.DocumentTranslationException) as error:
            client.translate_document(io.BytesIO(b"ba"), FailingFile(), source_lang="EN", target_lang="DE")
        assert error.value.document_handle.document_id
        legacy = server.client.get("/v2/translate", params={"auth_key": key, "text": "ba", "target_lang": "DE"})
        assert legacy.status_code == 200
        for each in (client, stranger, other):
            each.close()


class FailingFile(io.BytesIO):
    """A file that cannot be written."""

    def write(self, _: Any) -> int:
        raise OSError("the disk is full")


def test_glossaries_belong_to_keys(language_runs: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = [add_key(file, name) for name in ("one", "two")]
    with serve_in_thread(language_runs, ServerSettings(log_requests=False, keys_file=file)) as server:
        one, two = (deepl.Translator(key, server_url=server.url) for key in keys)
        glossary = one.create_glossary("mine", "EN", "DE", {"a": "b"})
        assert two.list_glossaries() == []
        with pytest.raises(deepl.GlossaryNotFoundException):
            two.delete_glossary(glossary)
        assert len(one.list_glossaries()) == 1
        one.close()
        two.close()


def test_forms_are_read(language_server: ToyServer) -> None:
    data = {"text": SOURCES[:2], "target_lang": "de", "source_lang": "en", "tag_handling": "", "outline_detection": "1"}
    answer = language_server.client.post("/v2/translate", data=data)
    expected = [{"detected_source_language": "EN", "text": text} for text in TARGETS[:2]]
    assert answer.json() == {"translations": expected}
    xml = {"text": "<x>ba, fo</x>", "target_lang": "de", "tag_handling": "xml", "ignore_tags": "a,x"}
    answer = language_server.client.post("/v2/translate", data={**xml, "source_lang": "EN"})
    assert answer.json()["translations"][0]["text"] == "<x>ba, fo</x>"
    answer = language_server.client.post("/v2/translate", data={**xml, "source_lang": "EN", "ignore_tags": ["a", "x"]})
    assert answer.json()["translations"][0]["text"] == "<x>ba, fo</x>"
    assert language_server.client.get("/v2/languages?type=target").json()[0]["language"] == "DE"


def test_old_clients_post_their_questions(language_server: ToyServer) -> None:
    client = language_server.client
    assert client.post("/v2/usage").json().keys() == client.get("/v2/usage").json().keys()
    for kind in ("source", "target"):
        expected = client.get("/v2/languages", params={"type": kind}).json()
        assert client.post("/v2/languages", data={"type": kind}).json() == expected


def test_empty_options_are_those_by_default(language_server: ToyServer) -> None:
    options = ["source_lang", "formality", "split_sentences", "show_billed_characters", "model_type", "tag_handling"]
    options += ["outline_detection", "preserve_formatting", "context", "glossary_id", "style_id"]
    data = {"text": "This is an English sentence about dogs.", "target_lang": "DE"} | dict.fromkeys(options, "")
    expected = language_server.client.post("/v2/translate", data={"text": data["text"], "target_lang": "DE"}).json()
    for request in ({"data": data}, {"json": {**data, "text": [data["text"]]}}):
        assert language_server.client.post("/v2/translate", **request).raise_for_status().json() == expected
    empty = {"target_lang": "DE", "source_lang": "", "formality": "", "output_format": "", "filename": ""}
    file = {"file": ("a.txt", b"ba.")}
    assert language_server.client.post("/v2/document", data=empty, files=file).status_code == 200


def test_split_sentences_may_be_a_number(language_server: ToyServer) -> None:
    text = f"{SOURCES[0]}\n{SOURCES[1]}"
    fields = {"text": [text], "source_lang": "EN", "target_lang": "DE"}
    for number, has_break in ((1, True), (0, False)):
        answer = language_server.client.post("/v2/translate", json={**fields, "split_sentences": number})
        assert ("\n" in answer.raise_for_status().json()["translations"][0]["text"]) == has_break
    assert language_server.client.post("/v2/translate", json={**fields, "split_sentences": 2}).status_code == 400


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v2/write/rephrase", 404), ("/v3/glossaries", 404), ("/v3/style_rules", 404), ("/v2/admin/keys", 404)],
)
def test_what_is_not_offered(language_server: ToyServer, path: str, status: int) -> None:
    for method in ("GET", "POST", "DELETE"):
        answer = language_server.client.request(method, path)
        assert answer.status_code == status
        assert isinstance(answer.json()["message"], str)


def test_bad_bodies_are_explained(language_server: ToyServer) -> None:
    good: dict[str, Any] = {"text": ["a"], "target_lang": "DE"}
    bodies: list[object] = [
        {},
        {**good, "text": []},
        {**good, "text": [1]},
        {**good, "target_lang": "xx yy"},
        {"text": ["a"]},
    ]
    for body in bodies:
        answer = language_server.client.post("/v2/translate", json=body)
        assert answer.status_code == 400
        assert all(isinstance(answer.json()[name], str) for name in ("message", "detail"))
    for content in (b"[]", b"{", b'{"text": ["\\ud800"], "target_lang": "DE"}'):
        headers = {"content-type": "application/json"}
        answer = language_server.client.post("/v2/translate", content=content, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["detail"] == ("bad_text" if b"ud800" in content else "invalid_json")
    assert language_server.client.post("/v2/translate", json={**good, "text": ["a" * 30_000]}).status_code == 413


def test_a_long_answer_begins_with_spaces(
    language_runs: list[Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    translate, seconds = Service.translate, 0.02
    monkeypatch.setattr(deepl_api, "SPACE_SECONDS", seconds)
    errors = {"late": RequestError(504, "timeout", ""), "bad": UserError("bad"), "fail": RuntimeError()}

    def translate_slowly(service: Service, request: TranslationRequest, cancelled: Event) -> list[Translation]:
        Event().wait(10 * seconds)  # `time.sleep` does not wait here
        if error := errors.get(request.texts[0]):
            raise error
        return translate(service, request, cancelled)

    monkeypatch.setattr(Service, "translate", translate_slowly)
    data = {"text": SOURCES[0], "target_lang": "de", "source_lang": "en"}
    with serve_in_thread(language_runs, ServerSettings()) as server:
        answer = server.client.post("/v2/translate", data=data)
        assert answer.text.startswith(" ")
        assert answer.json()["translations"][0]["text"] == TARGETS[0]
        for text in errors:
            with pytest.raises(httpx.RemoteProtocolError):
                server.client.post("/v2/translate", data={**data, "text": text})
    log = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["status"] for line in log if line["level"] == "info"] == [200, 504, 400, 500]
    assert [line["error"] for line in log if line["level"] == "error"] == ["RuntimeError"]
