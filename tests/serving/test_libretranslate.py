"""The API of LibreTranslate, with the real client libretranslatepy and with requests as other clients send them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import pytest
from libretranslatepy import LibreTranslateAPI  # type: ignore[import-untyped]

from dragoman.inference.directions import Direction
from dragoman.serving.keys import add_key
from dragoman.serving.language_index import LanguageIndex, Route
from dragoman.serving.service import Service, Translation, TranslationRequest, split_text
from dragoman.serving.settings import ServerSettings
from dragoman.types import Hypothesis
from toy_run import make_sentences, translate_toy
from toy_server import ToyServer, serve_in_thread

SOURCES = make_sentences(3)
TARGETS = [translate_toy(source) for source in SOURCES]


def post(server: ToyServer, path: str = "/translate", **fields: Any) -> Any:
    answer = server.client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: ToyServer, status: int = 400, path: str = "/translate", **fields: Any) -> str:
    answer = server.client.post(path, json=fields)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    return str(answer.json()["error"])


def test_the_client_translates_detects_and_lists_languages(language_server: ToyServer) -> None:
    client = LibreTranslateAPI(language_server.url)
    assert [client.translate(source, "en", "de") for source in SOURCES] == TARGETS
    assert client.translate(SOURCES[0], "de", "en") == TARGETS[0]
    assert client.detect("Der Hund schläft im Garten.")[0] == {"confidence": 100.0, "language": "de"}
    assert client.languages() == [
        {"code": "de", "name": "German", "targets": ["de", "en"]},
        {"code": "en", "name": "English", "targets": ["de", "en"]},
    ]
    assert client.translate(SOURCES[0], "en", "en") == SOURCES[0]


def test_a_server_with_one_direction_lists_both_languages(language_runs: list[Path]) -> None:
    """Weblate, Dialect and others choose the target among the languages that are listed."""
    with serve_in_thread(language_runs[:1], ServerSettings(log_requests=False)) as server:
        client = LibreTranslateAPI(server.url)
        assert client.languages() == [
            {"code": "de", "name": "German", "targets": ["de"]},
            {"code": "en", "name": "English", "targets": ["de", "en"]},
        ]
        assert client.translate(SOURCES[0], "en", "de") == TARGETS[0]
        for code in ("en", "de"):
            assert client.translate(SOURCES[0], code, code) == SOURCES[0]
        expected = "English (en) is not available as a target language from German (de)"
        assert refused(server, q="a", source="de", target="en") == expected
        assert refused(server, q="a", source="auto", target="en") == "en is not supported"
        for source, target in (("fr", "fr"), ("xx", "de")):
            assert refused(server, q="a", source=source, target=target) == f"{source} is not supported"
        files = {"file": ("a.txt", SOURCES[0].encode())}
        answer = server.client.post("/translate_file", data={"source": "de", "target": "de"}, files=files)
        assert server.client.get(answer.json()["translatedFileUrl"]).text == SOURCES[0]


def test_the_client_sees_errors(language_server: ToyServer) -> None:
    client = LibreTranslateAPI(language_server.url, "any key will do")
    assert client.translate(SOURCES[0], "en", "de") == TARGETS[0]
    for arguments in (("", "en", "de"), ("a", "xx", "de"), ("a", "en", "fr"), ("a" * 30_000, "en", "de")):
        with pytest.raises(HTTPError) as error:
            client.translate(*arguments)
        assert error.value.code == 400
        error.value.close()


def test_a_json_request_may_have_a_list(language_server: ToyServer) -> None:
    answer = post(language_server, q=SOURCES, source="en", target="de")
    assert answer == {"translatedText": TARGETS}
    answer = post(language_server, q=SOURCES[:2], source="EN", target="DE", alternatives=2)
    assert answer["translatedText"] == TARGETS[:2]
    assert all(1 <= len(alternatives) <= 2 for alternatives in answer["alternatives"])
    answer = post(language_server, q=SOURCES[0], source="en", target="de", alternatives=10)
    assert len(set(answer["alternatives"]) - {TARGETS[0]}) == len(answer["alternatives"]) > 1


def test_alternatives_differ(language_server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hypotheses = [Hypothesis(text) for text in ("one", "two", "", "one", " ", "two", "three")]
    found = Translation(hypotheses, "en", "de", "en-de")
    monkeypatch.setattr(Service, "translate", lambda *_: [found])
    answer = post(language_server, q="a", source="en", target="de", alternatives=6)
    assert answer == {"translatedText": "one", "alternatives": ["two", "three"]}


@pytest.mark.parametrize(
    "options", [{"format": None}, {"format": ""}, {"alternatives": None}, {"alternatives": ""}, {"alternatives": -1}]
)
def test_empty_options_are_those_by_default(language_server: ToyServer, options: dict[str, Any]) -> None:
    answer = post(language_server, q=SOURCES[0], source="en", target="de", **options)
    assert answer == {"translatedText": TARGETS[0]}


def test_html_has_no_alternatives(language_server: ToyServer) -> None:
    html = f"<p>{SOURCES[0]}</p>"
    answer = post(language_server, q=html, source="en", target="de", format="html", alternatives=2)
    assert answer == {"translatedText": f"<p>{TARGETS[0]}</p>", "alternatives": []}


def test_the_source_language_is_detected(language_server: ToyServer) -> None:
    text = "This is an English sentence about a dog."
    answer = post(language_server, q=text, source="auto", target="de")
    assert answer["detectedLanguage"] == {"confidence": 100.0, "language": "en"}
    answer = post(language_server, q=[text, "\U0001f600 \u2764\ufe0f"], source="auto", target="de")
    assert answer["detectedLanguage"][1] == {"confidence": 0.0, "language": "en"}
    assert answer["translatedText"][1] == "\U0001f600 \u2764\ufe0f"
    german = "Das ist schon ein deutscher Satz über einen Hund."
    answer = post(language_server, q=german, source="auto", target="de")
    assert answer == {"translatedText": german, "detectedLanguage": {"confidence": 100.0, "language": "de"}}


def test_a_list_of_texts_has_one_list_of_languages(language_server: ToyServer) -> None:
    """As in LibreTranslate; long texts count more than short ones."""
    texts = ["Das ist schon ein deutscher Satz über einen Hund, und zwar ein langer.", "This is a dog."]
    first, second = post(language_server, "/detect", q=texts)
    assert (first["language"], second["language"]) == ("de", "en")
    assert first["confidence"] + second["confidence"] == 100
    assert first["confidence"] > 70


def test_a_request_may_have_a_thousand_texts(language_server: ToyServer) -> None:
    """As json-autotranslate sends them."""
    texts = ["1"] * 1000
    assert post(language_server, q=texts, source="en", target="de") == {"translatedText": texts}


def test_the_limit_of_characters_is_that_of_each_text(language_server: ToyServer) -> None:
    texts = ["\u2764" * 15_000] * 2
    assert post(language_server, q=texts, source="en", target="de") == {"translatedText": texts}


def test_lines_and_spaces_are_kept(language_server: ToyServer) -> None:
    layout = "  {}\n\n\t{} \r\n{}\n"
    answer = post(language_server, q=layout.format(*SOURCES), source="en", target="de")
    assert answer["translatedText"] == layout.format(*TARGETS)


def test_sentences_are_translated_one_by_one(language_server: ToyServer) -> None:
    """Other than by our own API, which gives the model whole lines, as `dragoman translate` does."""
    layout = "{}  {} {}\n"
    text = layout.format(*SOURCES)
    assert post(language_server, q=text, source="en", target="de")["translatedText"] == layout.format(*TARGETS)
    own = post(language_server, "/api/translate", text=text, source="en", target="de")["translations"][0]["text"]
    [whole] = language_server.app.state.server.pool.models["en-de"].translator.translate([text.strip()])
    assert own == whole.text + "\n"


@pytest.mark.parametrize(
    "text", ["123", " --- ", "%s", "{0}", "{{count}}", "https://example.org/ba", "ba@example.org", "1.\n2."]
)
def test_what_has_no_words_is_copied(language_server: ToyServer, text: str) -> None:
    assert post(language_server, q=text, source="en", target="de") == {"translatedText": text}
    fields = {"text": [text], "source_lang": "EN", "target_lang": "DE"}
    for options in ({}, {"split_sentences": "0"}):
        assert post(language_server, "/v2/translate", **fields, **options)["translations"][0]["text"] == text


def test_mastodon_sends_html(language_server: ToyServer) -> None:
    html = f"<p>{SOURCES[0]}</p><p><a href='https://example.org/ba'>{SOURCES[1]}</a></p>"
    answer = post(language_server, q=[html], source="en", target="de", format="html")
    expected = f"<p>{TARGETS[0]}</p><p><a href='https://example.org/ba'>{TARGETS[1]}</a></p>"
    assert answer == {"translatedText": [expected]}


def test_fields_may_stand_in_the_query_string(language_server: ToyServer) -> None:
    """As deep-translator sends them, without a body."""
    fields = {"q": SOURCES[0], "source": "en", "target": "de", "api_key": "x"}
    answer = language_server.client.post("/translate", params=fields)
    assert answer.json() == {"translatedText": TARGETS[0]}


def test_forms_are_utf8(language_server: ToyServer) -> None:
    """With percent signs or, as `curl -d` sends them, without."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    for content in ("q=\u2764&source=en&target=de".encode(), b"q=%E2%9D%A4&source=en&target=de"):
        answer = language_server.client.post("/translate", content=content, headers=headers)
        assert answer.json() == {"translatedText": "\u2764"}
    for content in (b"q=Gr\xfc\xdfe&source=en&target=de", b"q=%FC&source=en&target=de"):
        answer = language_server.client.post("/translate", content=content, headers=headers)
        assert (answer.status_code, answer.json()) == (400, {"error": "the form is not valid UTF-8"})
    many = language_server.client.post("/translate", content=b"q=a&" * 3000, headers=headers)
    assert (many.status_code, many.json()) == (400, {"error": "the form has more than 2000 fields"})


def test_form_line_breaks_are_normalized(language_server: ToyServer) -> None:
    fields = {"q": "\r\n".join(SOURCES), "source": "en", "target": "de"}
    assert language_server.client.post("/translate", data=fields).json() == {"translatedText": "\n".join(TARGETS)}
    files = {name: (None, value) for name, value in fields.items()}
    assert language_server.client.post("/translate", files=files).json() == {"translatedText": "\n".join(TARGETS)}


def test_errors_have_the_words_of_libretranslate(language_server: ToyServer) -> None:
    good: dict[str, Any] = {"q": "a", "source": "en", "target": "de"}
    for name in good:
        assert refused(language_server, **{**good, name: ""}) == f"Invalid request: missing {name} parameter"
    assert refused(language_server, **{**good, "q": []}) == "Invalid request: missing q parameter"
    assert refused(language_server, **{**good, "source": "xx"}) == "xx is not supported"
    assert refused(language_server, **{**good, "target": "fr"}) == "fr is not supported"
    assert refused(language_server, **{**good, "format": "pdf"}) == "pdf format is not supported"
    expected = "Invalid request: alternatives parameter must be <= 19"
    assert refused(language_server, **good, alternatives=20) == expected
    for number in ("x", "1.5", [1]):
        expected = "Invalid request: alternatives parameter is not a number"
        assert refused(language_server, **good, alternatives=number) == expected
    answer = language_server.client.post("/translate", data={"source": "en", "target": "de"}, files={"q": b"a"})
    assert (answer.status_code, answer.json()) == (400, {"error": "Invalid request: missing q parameter"})
    for text, numbers in (("a" * 30_000, (30_000, 20_000)), (["a"] * 1500, (1500, 1024))):
        expected = "Invalid request: request ({}) exceeds text limit ({})".format(*numbers)
        assert refused(language_server, **{**good, "q": text}) == expected
    expected = "Invalid request: request (30000) exceeds text limit (20000)"
    assert refused(language_server, path="/detect", q="a" * 30_000) == expected
    assert refused(language_server, **{**good, "q": 1})
    assert refused(language_server, **{**good, "q": [["a"]]})
    for body in (b"[1]", b"{", b"\xff", b'{"q": "\\ud800", "source": "en", "target": "de"}', b"[" * 100_000):
        answer = language_server.client.post("/translate", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, body[:20]
        assert answer.json()["error"]
    assert refused(language_server, 403, "/suggest", q="a", s="b", source="en", target="de")


def test_a_pair_without_a_model_is_refused(language_server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    index = LanguageIndex({"a": [Direction("en", "de"), Direction("fr", "it")]})
    monkeypatch.setattr(Service, "languages", index)
    expected = "Italian (it) is not available as a target language from English (en)"
    assert refused(language_server, q="a", source="en", target="it") == expected


def test_settings_and_languages_of_the_frontend(language_server: ToyServer) -> None:
    answer = language_server.client.get("/frontend/settings").json()
    assert answer["charLimit"] == 20_000
    assert not answer["keyRequired"]
    assert answer["filesTranslation"]
    assert {".txt", ".html", ".docx"} <= set(answer["supportedFilesFormat"])
    assert answer["language"] == {
        "source": {"code": "de", "name": "German"},
        "target": {"code": "en", "name": "English"},
    }


def test_dialect_recognises_the_server_by_its_specification(language_server: ToyServer) -> None:
    document = language_server.client.get("/spec").raise_for_status().json()
    assert document["info"]["title"] == "LibreTranslate"
    assert "Dragoman" in document["info"]["description"]
    assert {"/translate", "/detect", "/languages", "/spec"} < document["paths"].keys()
    assert not any(path.startswith(("/api/", "/v2/")) for path in document["paths"])
    assert "#/components/schemas" not in json.dumps(document)


def test_a_file_is_translated(language_server: ToyServer) -> None:
    text = "\n\n".join(SOURCES) + "\n"
    files = {"file": ("Größe 1.txt", text.encode())}
    answer = language_server.client.post("/translate_file", data={"source": "en", "target": "de"}, files=files)
    url = answer.json()["translatedFileUrl"]
    assert url.startswith(f"{language_server.url}/download_file/")
    assert url.endswith(quote(".Größe 1.txt"))
    downloaded = language_server.client.get(url)
    assert downloaded.text == "\n\n".join(TARGETS) + "\n"
    assert "attachment" in downloaded.headers["content-disposition"]
    assert language_server.client.get("/download_file/nothing.txt").status_code == 404
    for files, message in (({"file": ("a.xyz", b"a")}, "a.xyz"), ({"other": ("a.txt", b"a")}, "missing file")):
        answer = language_server.client.post("/translate_file", data={"source": "en", "target": "de"}, files=files)
        assert answer.status_code == 400
        assert message in answer.json()["error"]


def test_keys_are_fields(language_runs: list[Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "one", characters_per_month=100)
    slow = add_key(keys, "two", requests_per_minute=1)
    with serve_in_thread(language_runs, ServerSettings(log_requests=False, keys_file=keys)) as server:
        client = LibreTranslateAPI(server.url, key)
        assert client.translate(SOURCES[0], "en", "de") == TARGETS[0]
        assert client.detect("Hund")
        assert client.languages()
        assert server.client.get("/spec").status_code == 200  # needs no key
        good: dict[str, Any] = {"q": SOURCES[0], "source": "en", "target": "de"}
        assert refused(server, 400, **good) == "Please contact the server operator to get an API key"
        assert refused(server, 403, **good, api_key="wrong") == "Invalid API key"
        assert "characters" in refused(server, 403, **{**good, "q": "ba " * 50}, api_key=key)
        assert post(server, **good, api_key=slow) == {"translatedText": TARGETS[0]}
        assert refused(server, 429, **good, api_key=slow).startswith("Slowdown: ")
        files = {"file": ("a.txt", SOURCES[0].encode())}
        answer = server.client.post("/translate_file", data={"source": "en", "target": "de"}, files=files)
        assert answer.status_code == 400
        data = {"source": "en", "target": "de", "api_key": key}
        assert server.client.post("/translate_file", data=data, files=files).status_code == 200


def test_a_model_of_unknown_languages_takes_all(toy_server: ToyServer) -> None:
    assert toy_server.client.get("/languages").json() == [
        {"code": "und", "name": "Unknown language", "targets": ["und"]}
    ]
    client = LibreTranslateAPI(toy_server.url)
    for source, target in (("en", "de"), ("auto", "fr"), ("und", "und")):
        assert client.translate(SOURCES[0], source, target) == TARGETS[0]
    request = TranslationRequest(texts=[], copy_wordless=True)
    assert split_text("123", request, Route("", Direction("", ""))).lines == ("123",)  # it may well translate numbers
    assert client.detect("Hund") == [{"confidence": 0.0, "language": "en"}]


def test_the_body_of_a_get_request_is_skipped(language_server: ToyServer) -> None:
    answer = language_server.client.request("GET", "/languages", data={"api_key": "x"})
    assert json.loads(answer.text)[0]["code"] == "de"
