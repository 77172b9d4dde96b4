"""Tests of what all requests pass through."""

from __future__ import annotations

from dragoman.serving.api import TranslateAnswer
from toy_run import make_sentences, translate_toy
from toy_server import ToyServer


def test_the_answer_is_described(toy_server: ToyServer) -> None:
    """Every field of the answer is in the OpenAPI document."""
    document = toy_server.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    content = document["paths"]["/api/translate"]["post"]["responses"]["200"]["content"]["application/json"]
    assert content["schema"]["$ref"].endswith("/TranslateAnswer")
    answer = toy_server.client.post("/api/translate", json={"text": make_sentences(2), "nbest": 2, "align": True})
    assert answer.json().keys() == schemas["TranslateAnswer"]["properties"].keys()
    for translation in answer.json()["translations"]:
        assert translation.keys() == schemas["AnsweredTranslation"]["properties"].keys()
        assert translation["alternatives"][0].keys() == schemas["AnsweredAlternative"]["properties"].keys()
        TranslateAnswer.model_validate(answer.json())


def test_each_translation_has_its_languages(language_server: ToyServer) -> None:
    texts = ["The house is old and the garden is large.", "Das Haus ist alt und der Garten ist sehr schön."]
    body = {"text": texts, "source": "auto"}
    codes = []
    for text, target in zip(texts, ("de", "en"), strict=True):
        answer = language_server.client.post("/api/translate", json={**body, "text": texts, "target": target}).json()
        codes.append([(each["source"], each["target"], each["model"]) for each in answer["translations"]])
        assert answer["translations"][texts.index(text)]["detected"]["language"] == ("en", "de")[texts.index(text)]
    assert codes == [[("en", "de", "en-de"), ("de", "de", "")], [("en", "en", ""), ("de", "en", "de-en")]]


def test_a_text_is_translated(toy_server: ToyServer) -> None:
    [source] = make_sentences(1)
    answer = toy_server.client.post("/api/translate", json={"text": source})
    assert answer.status_code == 200
    assert answer.json()["translations"][0]["text"] == translate_toy(source)
