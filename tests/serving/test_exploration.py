"""Words that can follow a beginning, word alignments, inspections, and what the server tells about itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, current_thread
from typing import Any

import pytest
import torch

import dragoman
from dragoman.decoding.beam import BeamSearch
from dragoman.errors import UserError
from dragoman.inference import next_words
from dragoman.inference.engines.torch import TorchEngine
from dragoman.inference.next_words import is_word_end, list_next_words
from dragoman.inference.translator import Translator
from dragoman.serving import exploration
from dragoman.serving.batching import BoundTorchEngine
from dragoman.serving.errors import RequestCancelled, RequestError
from dragoman.serving.exploration import InspectionStore, list_alternatives, render_inspection
from dragoman.serving.service import Service, TranslationRequest
from dragoman.types import Line
from toy_run import Toy, translate_toy
from toy_server import ToyServer

SOURCE = "ba del fo mun!"


@pytest.fixture(scope="module")
def translator(toy: Toy) -> Translator:
    return toy.translator


@pytest.mark.parametrize("words", range(4))
def test_next_words_have_the_probabilities_of_their_tokens(translator: Translator, words: int) -> None:
    """The toy language has no ambiguity, and its words are told apart by the spaces between them."""
    expected = translate_toy(SOURCE)[:-1].split()
    begin = " ".join(expected[:words])
    found = list_next_words(translator, Line(SOURCE, prefix=begin), 5)
    assert found[0].word == expected[words]
    assert found[0].text == " ".join(expected[: words + 1])
    assert found[0].probability > 0.5
    assert [word.probability for word in found] == sorted((word.probability for word in found), reverse=True)
    assert sum(word.probability for word in found) <= 1
    assert len({word.text for word in found}) == len(found) == 5


def test_the_probability_of_a_sentence_is_the_product_of_its_words(translator: Translator) -> None:
    """Each word is spelled in one way only if no spelling but the usual one has a considerable probability."""
    target = translate_toy(SOURCE)
    begin, product = "", 1.0
    while begin != target:
        best = next(
            word for word in list_next_words(translator, Line(SOURCE, prefix=begin), 8) if target.startswith(word.text)
        )
        begin, product = best.text, product * best.probability
    [score] = translator.score([SOURCE], [target])
    assert product == pytest.approx(2.718281828**score.logp, rel=0.05)


def test_fewer_words_are_the_first_of_more(translator: Translator) -> None:
    line = Line(SOURCE, prefix="sa")
    assert [w.word for w in list_next_words(translator, line, 3)] == [
        w.word for w in list_next_words(translator, line, 12)
    ][:3]


def test_a_mark_follows_the_last_word(translator: Translator) -> None:
    begin = translate_toy(SOURCE)[:-1]
    assert list_next_words(translator, Line(SOURCE, prefix=begin), 1)[0].text == begin + "!"


@pytest.mark.parametrize(
    ("beginning", "text", "ends"),
    [
        ("Haus", "Haus", True),
        ("Haus", "Haus.", True),
        ("Haus", "Haus am See", True),
        ("Haus", "Hausboot", False),
        ("Haus", "Haus-Boot", False),
        ("don", "don't", False),
        ("(", "(Haus", True),
        ("今日", "今日は", True),
        ("नमस", "नमस्ते", False),
    ],
)
def test_ends_of_words(beginning: str, text: str, ends: bool) -> None:
    assert is_word_end(beginning, text) == ends


def test_next_words_need_one_sentence(translator: Translator) -> None:
    with pytest.raises(UserError, match="empty"):
        list_next_words(translator, Line("  "), 3)
    with pytest.raises(UserError, match="longer than any sentence"):
        list_next_words(translator, Line("ba del fo. " * 400), 3)


# Routes


def test_words(toy_server: ToyServer, translator: Translator) -> None:
    prefix = "sa ol"
    answer = toy_server.client.post("/api/words", json={"text": SOURCE, "prefix": prefix, "count": 6})
    alternatives = answer.raise_for_status().json()["alternatives"]
    assert 1 <= len(alternatives) <= 6
    assert sum(alternative["probability"] for alternative in alternatives) <= 1
    assert alternatives[0]["text"] == translator.translate([SOURCE])[0].text
    for alternative in alternatives:
        begin = f"{prefix} {alternative['word']}"
        assert alternative["text"].startswith((begin, prefix + alternative["word"]))
        begin = alternative["text"][
            : alternative["text"].index(alternative["word"], len(prefix)) + len(alternative["word"])
        ]
        assert alternative["text"] == translator.translate([Line(SOURCE, prefix=begin)])[0].text


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"text": " "}, 400, "empty_text"),
        ({"text": SOURCE, "count": 0}, 400, "invalid_field"),
        ({"text": SOURCE, "beam": 3}, 400, "unknown_field"),
        ({"text": SOURCE, "model": "none"}, 404, "unknown_model"),
        ({"text": "ba " * 10_000}, 413, "too_long"),
    ],
)
def test_words_that_are_refused(toy_server: ToyServer, body: dict[str, object], status: int, code: str) -> None:
    answer = toy_server.client.post("/api/words", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_an_alignment_comes_with_words(toy_server: ToyServer) -> None:
    text = "ba del fo!\n\n  gri mun."
    body = {"text": text, "align": True}
    [best] = toy_server.client.post("/api/translate", json=body).raise_for_status().json()["translations"]
    assert [text[start:end] for start, end in best["source_words"]] == ["ba", "del", "fo", "!", "gri", "mun", "."]
    words = [best["text"][start:end] for start, end in best["words"]]
    assert words == ["ol", "ebi", "ak", "!", "sa", "tun", "."]
    assert len(best["word_alignment"]) == len(words)
    for row in best["word_alignment"]:
        assert sum(row) == pytest.approx(1, abs=0.001)
    lines = [[*row[:4]] for row in best["word_alignment"][:4]]
    assert all(sum(row) == pytest.approx(1, abs=0.001) for row in lines)  # no line is aligned to another
    [plain] = toy_server.client.post("/api/translate", json={"text": text}).json()["translations"]
    assert (plain["text"], plain["words"], plain["word_alignment"]) == (best["text"], [], [])


def test_inspect(toy_server: ToyServer, toy: Toy) -> None:
    answer = toy_server.client.post("/api/inspect", json={"text": SOURCE})
    assert answer.headers["content-type"].startswith("text/html")
    assert "sandbox allow-scripts" in answer.headers["content-security-policy"]
    assert translate_toy(SOURCE) in answer.text
    name = toy_server.client.get("/api/models").json()[0]["name"]
    assert f"<title>{name}: transformer model</title>" in answer.text
    assert str(toy.run) not in answer.text  # the folder is nothing for clients
    created = toy_server.client.post("/api/inspections", json={"text": SOURCE})
    assert created.status_code == 201
    kept = toy_server.client.get(created.json()["url"])
    assert (kept.status_code, kept.text) == (200, answer.text)
    assert kept.headers["content-security-policy"] == answer.headers["content-security-policy"]
    missing = toy_server.client.get("/inspections/none")
    assert (missing.status_code, "error" in missing.json()) == (404, True)


def test_inspections_expire_and_the_oldest_leave_first() -> None:
    store = InspectionStore(max_bytes=10)
    first, second, third = (store.add(page) for page in ("first", "two", "three"))
    with pytest.raises(RequestError):
        store.get(first)
    assert (store.get(second), store.get(third), store.size) == (b"two", b"three", 8)
    store.add("more than ten")
    assert len(store.pages) == 1  # a page that is too large is still shown
    brief = InspectionStore(lifetime=-1.0)
    name = brief.add("page")
    with pytest.raises(RequestError, match="not kept"):
        brief.get(name)


def test_descriptions(toy_server: ToyServer, translator: Translator) -> None:
    [model] = toy_server.client.get("/api/models").json()
    assert model["parameters"] == translator.parameter_count
    assert model["kind"] == translator.recipe.model.kind
    assert model["directions"] == [{"source": "und", "target": "und"}]
    [language] = toy_server.client.get("/api/languages").json()
    assert (language["code"], language["targets"]) == ("und", ["und"])
    settings = toy_server.client.get("/api/settings").json()
    assert settings["max_characters"] == 20_000
    assert settings["key_required"] is False
    assert settings["version"] == dragoman.__version__
    assert {".txt", ".po", ".html"} <= {suffix for each in settings["document_formats"] for suffix in each["suffixes"]}


def test_detect(toy_server: ToyServer) -> None:
    assert toy_server.client.post("/api/detect", json={"text": "Guten Tag"}).json() == {"languages": []}


def test_the_page_is_there_with_a_strict_policy(toy_server: ToyServer) -> None:
    answer = toy_server.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "'unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "<style" not in answer.text
    assert " style=" not in answer.text
    for name in ("main.js", "page.css", "icon.svg"):
        assert name in answer.text
        assert toy_server.client.get(f"/{name}").status_code == 200


def test_alternatives_are_cancelled_between_two_steps_of_the_model(
    toy_server: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, steps = Event(), list[object]()
    run_model = BoundTorchEngine.run_model

    def count(engine: BoundTorchEngine, work: Callable[[], object]) -> object:
        result = run_model(engine, work)
        steps.append(result)
        if len(steps) == 2:
            cancelled.set()
        return result

    monkeypatch.setattr(BoundTorchEngine, "run_model", count)
    state = toy_server.app.state.server
    with pytest.raises(RequestCancelled):
        list_alternatives(Service(state.pool, state.settings), TranslationRequest(texts=[SOURCE]), 8, cancelled)
    assert len(steps) == 2


def test_a_beginning_is_read_in_slices_that_can_be_cancelled(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(SOURCE, prefix=translate_toy(SOURCE)[:-1])
    expected = list_next_words(translator, line, 3)
    calls, counts = list[object](), list[int]()

    def count(_: TorchEngine, work: Callable[[], Any]) -> Any:
        calls.append(work)
        return work()

    monkeypatch.setattr(TorchEngine, "run_model", count)
    for step in (64, 2):
        monkeypatch.setattr(next_words, "PREFIX_STEP", step)
        calls.clear()
        assert list_next_words(translator, line, 3) == expected
        counts.append(len(calls))
    assert counts[1] > counts[0] + 2


@pytest.mark.parametrize("stage", ["search", "attribution"])
def test_an_inspection_runs_apart_and_ends_when_it_is_cancelled(
    toy_server: ToyServer, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Other requests go on meanwhile, except inspections, of which there is one at a time."""
    state = toy_server.app.state.server
    service, request, cancelled = Service(state.pool, state.settings), TranslationRequest(texts=[SOURCE]), Event()
    [served], is_running, may_go_on, calls = state.pool.models.values(), Event(), Event(), list[int]()

    def note_call(*_: Any) -> None:
        if current_thread().name.startswith("inspection"):
            is_running.set()
            calls.append(len(calls))
            may_go_on.wait(60)

    if stage == "search":
        original = BeamSearch.extend

        def extend(search: BeamSearch, logp_NV: Any) -> Any:
            note_call()
            return original(search, logp_NV)

        monkeypatch.setattr(BeamSearch, "extend", extend)
    hook = served.translator.model.register_forward_pre_hook(note_call) if stage == "attribution" else None
    with ThreadPoolExecutor(
        thread_name_prefix="inspection", initializer=torch.set_num_threads, initargs=(1,)
    ) as threads:
        inspection = threads.submit(render_inspection, service, request, cancelled)
        try:
            assert is_running.wait(60)
            [translation] = service.translate(replace(request, align=True), Event())
            assert translation.hypotheses[0].alignment
        finally:
            cancelled.set()
            may_go_on.set()
        with pytest.raises(RequestCancelled):
            inspection.result()
    if hook:
        hook.remove()
    assert len(calls) <= 2


def test_one_inspection_is_made_at_a_time(toy_server: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    is_running, may_go_on = Event(), Event()

    def wait(*_: Any) -> str:
        is_running.set()
        may_go_on.wait(60)
        return "page"

    monkeypatch.setattr(exploration, "render_inspection", wait)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(toy_server.client.post, "/api/inspect", json={"text": SOURCE})
        assert is_running.wait(60)
        second = toy_server.client.post("/api/inspections", json={"text": SOURCE})
        assert (second.status_code, second.headers["retry-after"]) == (429, "2")
        may_go_on.set()
        assert first.result().text == "page"
    monkeypatch.undo()
    refused = toy_server.client.post("/api/inspect", json={"text": SOURCE, "prefix": "sa " * 400})
    assert (refused.status_code, "1,000 at most" in refused.text) == (400, True)
