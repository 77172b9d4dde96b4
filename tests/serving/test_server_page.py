"""The page of the server in a real browser: what it shows, with the mouse and with the keyboard."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    FilePayload,
    Locator,
    Page,
    Request,
    Route,
    expect,
    sync_playwright,
)

from chromium import find_chromium
from dragoman.serving.keys import add_key
from dragoman.serving.settings import ServerSettings
from toy_run import Toy, make_sentences, translate_toy
from toy_server import ToyServer, serve_in_thread

SOURCE = "ba del fo mun!"
TARGET = translate_toy(SOURCE)
TEXT = "ba del fo!\n\n  gri mun. ne ra?\n"
SENTENCES = make_sentences(4)
HTML = """<!doctype html>
<html><head><title>{0}</title><style>p {{ color: red }}</style></head>
<body class="a"><!-- ba del. -->
<p id="first">{1}</p><p><a href="https://example.org/?ba=1&amp;del=2">{2}</a></p><hr/>
<img src="ba.png" alt="{3}"></body></html>
"""
PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

#. ba del
#: ba.py:3
msgid "{0}"
msgstr "{1}"

msgctxt "menu"
msgid "{2}"
msgstr "{3}"
"""
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    expect.set_options(timeout=30_000)  # machines of tests are busy
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(toy: Toy) -> Iterator[ToyServer]:
    """Return a server with two models, which are the same."""
    with serve_in_thread({"first": toy.run, "second": toy.run}) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture
def open_page(browser: Browser, server: ToyServer) -> Iterator[Open]:
    """Return a function that opens the page. It may not send a request to another host, nor log an unexpected error."""
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def open_url(
        url: str = "", *, width: int = 1280, text: str = "", faulty: bool = False, ready: bool = True, **options: str
    ) -> Page:
        address = url or server.url
        contexts.append(context := browser.new_context(viewport={"width": width, "height": 800}, **options))  # type: ignore[arg-type]
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()

        def check_message(message: ConsoleMessage) -> None:
            if message.type == "error" and not faulty:
                faults.append(message.text)

        page.on(
            "request",
            lambda r: None if r.url.startswith((address.partition("#")[0], "blob:")) else faults.append(r.url),
        )
        page.on("console", check_message)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.set_default_timeout(20_000)
        page.goto(address)
        if ready:
            expect(page.locator("#version")).not_to_be_empty()
        if text:
            page.fill("#source-text", text)
            expect(get_output(page)).to_have_attribute("aria-busy", "false")
            expect(get_output(page).locator(".word").first).to_be_visible()
        return page

    yield open_url
    for context in contexts:
        context.close()
    assert faults == []


def get_output(page: Page, number: int = 0) -> Locator:
    return page.locator(".output").nth(number)


def get_word(page: Page, word: str) -> Locator:
    return get_output(page).locator(".word", has_text=re.compile(f"^{re.escape(word)}$")).first


def list_aligned(page: Page, selector: str) -> list[str]:
    return page.locator(f"{selector}.aligned").all_inner_texts()


def test_the_limits_of_the_server_are_kept(open_page: Open, toy: Toy) -> None:
    texts = make_sentences(20)
    with serve_in_thread([toy.run], ServerSettings(max_texts=4, max_nbest=3, log_requests=False)) as server:
        page = open_page(server.url, text=" ".join(texts))
        expect(get_output(page)).to_have_text(" ".join(map(translate_toy, texts)))
        page.get_by_role("button", name="Other translations").click()
        expect(page.locator(".others-list button").first).to_be_visible()


def test_translate_keeps_lines_and_follows_the_text(open_page: Open) -> None:
    page = open_page(text=TEXT)
    assert page.evaluate("document.querySelector('.output').textContent") == (
        f"{translate_toy('ba del fo!')}\n\n  {translate_toy('gri mun.')} {translate_toy('ne ra?')}\n"
    )
    expect(page.locator("#counter")).to_have_text("30 / 20,000")
    requests: list[str] = []

    def note_text(request: Request) -> None:
        if request.post_data:
            requests.append(json.loads(request.post_data)["text"])

    page.on("request", note_text)
    page.fill("#source-text", TEXT.replace("ra", "pol"))
    expect(get_output(page)).to_contain_text(translate_toy("ne pol?"))
    assert set(requests) == {"ne pol?"}  # the other sentences are not translated again
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").count("\n") == 3
    page.get_by_role("button", name="Clear").click()
    expect(get_output(page)).to_be_empty()
    expect(page.locator("#source-text")).to_be_focused()


def test_an_outdated_translation_is_marked_and_its_request_cancelled(open_page: Open) -> None:
    page = open_page(text=SOURCE)
    held: list[Route] = []
    page.route("**/api/stream", lambda route: held.append(route))
    page.fill("#source-text", "fo ba!")
    expect(get_output(page).locator(".outdated")).to_have_text(TARGET)
    expect(page.get_by_role("button", name="Copy")).to_be_disabled()
    page.wait_for_timeout(400)
    with page.expect_event("requestfailed", lambda request: "stream" in request.url):
        page.fill("#source-text", "fo del!")
    page.unroute("**/api/stream")
    page.fill("#source-text", "fo mun!")
    expect(get_output(page)).to_have_text(translate_toy("fo mun!"))
    assert held


def test_pointing_at_words_shows_the_alignment(open_page: Open, server: ToyServer) -> None:
    page = open_page(text=SOURCE)
    body = {"text": SOURCE, "align": True}
    [best] = server.client.post("/api/translate", json=body).json()["translations"]
    words = [SOURCE[start:end] for start, end in best["source_words"]]
    for index, (start, end) in enumerate(best["words"]):
        get_output(page).locator(".word").nth(index).hover()
        weights = best["word_alignment"][index]
        shown = [word for word, weight in zip(words, weights, strict=True) if weight >= 0.08]
        assert list_aligned(page, ".source-word") == shown
        assert get_output(page).locator(".pointed").inner_text() == best["text"][start:end]
    box = page.locator(".source-word").nth(1).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    column = [row[1] for row in best["word_alignment"]]
    expected = [best["text"][a:b] for (a, b), weight in zip(best["words"], column, strict=True) if weight >= 0.08]
    assert list_aligned(page, ".word") == expected
    page.mouse.move(5, 5)
    assert page.locator(".aligned, .pointed").count() == 0


def test_another_word_is_forced_and_undone(open_page: Open) -> None:
    page = open_page(text=SOURCE)
    get_word(page, TARGET.split()[1]).click()
    options = page.locator("#alternatives [role=option]")
    expect(options.first).to_contain_text(TARGET.split()[1])
    expect(options.first).to_have_attribute("aria-selected", "true")
    word = options.nth(1).locator(".word-choice").inner_text()
    options.nth(1).click()
    expect(get_output(page)).to_have_text(re.compile(rf"^{TARGET.split()[0]} ?{re.escape(word)}"))
    expect(page.locator(".note.chosen")).to_contain_text(word)
    page.get_by_role("button", name="Undo").click()
    expect(get_output(page)).to_have_text(TARGET)


def test_other_translations(open_page: Open, server: ToyServer) -> None:
    page = open_page(text=SOURCE)
    page.get_by_role("button", name="Other translations").click()
    answer = server.client.post("/api/translate", json={"text": SOURCE, "nbest": 6, "beam": 6}).json()
    others = [other["text"] for other in answer["translations"][0]["alternatives"]]
    expect(page.locator(".others-list button")).to_have_text(others)
    page.locator(".others-list button").first.click()
    expect(get_output(page)).to_have_text(re.compile("^" + re.escape(others[0])))


def test_another_translation_is_chosen_after_the_text_has_changed(open_page: Open) -> None:
    page = open_page(text=f"{SENTENCES[0]} {SENTENCES[1]}")
    page.get_by_role("button", name="Other translations").click()
    expect(page.locator(".others-list button").first).to_be_visible()
    other = page.locator(".others-list button").first
    handle = other.element_handle()
    page.locator("#source-text").press("End")
    page.locator("#source-text").press_sequentially(" ba.")
    assert handle
    handle.evaluate("button => button.click()")
    page.get_by_role("button", name="Look inside").click()
    expect(page.locator("dialog[open], iframe").first).to_be_visible()


def test_a_text_that_is_too_long_is_announced(open_page: Open, toy: Toy) -> None:
    with serve_in_thread([toy.run], ServerSettings(max_characters=20, log_requests=False)) as small:
        page = open_page(small.url, faulty=True)
        page.fill("#source-text", "ba " * 10)
        expect(page.locator("#source-text")).to_have_attribute("aria-invalid", "true")
        expect(page.locator("#status")).to_contain_text("too long")
        page.fill("#source-text", "ba.")
        expect(page.locator("#source-text")).to_have_attribute("aria-invalid", "false")


def test_compare_two_models(open_page: Open) -> None:
    page = open_page(text=SOURCE)
    page.get_by_role("button", name="Compare").click()
    expect(get_output(page, 1)).to_have_text(TARGET)
    models = page.locator(".head select:visible")
    assert [models.nth(index).input_value() for index in range(2)] == ["first", "second"]
    page.get_by_role("button", name="Close", exact=True).click()
    expect(page.locator(".output")).to_have_count(1)


def test_look_inside(open_page: Open) -> None:
    page = open_page(text=SOURCE)
    page.get_by_role("button", name="Look inside").click()
    frame = page.frame_locator("#inspection iframe")
    expect(frame.locator("h2").first).to_have_text("Attention")
    frame.locator(".column.keys button").first.click()
    expect(frame.locator(".readout .badge")).to_have_count(1)
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Open in a new tab").click()
    expect(opened.value.locator("h2").first).to_have_text("Attention")
    page.keyboard.press("Escape")
    expect(page.locator("#inspection")).to_be_hidden()


def test_the_address_keeps_the_text(open_page: Open, server: ToyServer) -> None:
    address = open_page(text=SOURCE).url
    page = open_page(address.replace("first", "second"))
    expect(page.locator("#source-text")).to_have_value(SOURCE)
    expect(page.locator(".head select:visible")).to_have_value("second")
    expect(get_output(page)).to_have_text(TARGET)
    assert address.startswith(server.url)


def test_errors_are_sentences(open_page: Open, toy: Toy) -> None:
    with serve_in_thread([toy.run], ServerSettings(max_characters=40, log_requests=False)) as stopping:
        page = open_page(stopping.url, text=SOURCE, faulty=True)
        page.fill("#source-text", "ba " * 20)
        expect(page.locator("#counter")).to_contain_text("too long")
        expect(get_output(page)).to_be_empty()
        refusals = iter([(429, "1"), (503, "1")])

        def refuse(route: Route) -> None:
            if (refusal := next(refusals, None)) is None:
                route.continue_()
                return
            headers = {"Retry-After": refusal[1], "Content-Type": "application/json"}
            route.fulfill(status=refusal[0], headers=headers, body='{"error": {"code": "busy", "message": "busy"}}')

        page.route("**/api/stream", refuse)
        page.fill("#source-text", "ne ra?")
        expect(page.locator(".translation .problem")).to_have_text("The server is busy. Trying again in 1 s.")
        expect(get_output(page)).to_have_text(translate_toy("ne ra?"))
        expect(page.locator(".translation .problem")).to_be_hidden()
    page.fill("#source-text", "ne ba?")
    problem = page.locator(".translation .problem")
    expect(problem).to_contain_text("The server cannot be reached.")
    expect(problem.get_by_role("button", name="Try again")).to_be_visible()
    page.unroute("**/api/stream")


def test_the_server_asks_for_a_key(open_page: Open, toy: Toy, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "one")
    with serve_in_thread([toy.run], ServerSettings(log_requests=False, keys_file=keys)) as server:
        page = open_page(server.url, ready=False, faulty=True)
        dialog = page.locator("#key-dialog")
        expect(dialog).to_contain_text("This server asks for an API key.")
        fill_key(page, "dragoman-none-none")
        expect(dialog).to_contain_text("This API key is not valid.")
        fill_key(page, key)
        expect(dialog).to_be_hidden()
        page.fill("#source-text", SOURCE)
        expect(get_output(page)).to_have_text(TARGET)
        assert page.evaluate("sessionStorage.getItem('dragoman-key')") == key
        assert page.evaluate("localStorage.length") == 0
        page.get_by_role("tab", name="Documents").click()
        page.get_by_role("button", name="API key").click()
        fill_key(page, "dragoman-none-none")
        page.set_input_files("#file", make_file("a.txt", SOURCE))
        expect(dialog).to_contain_text("This API key is not valid.")  # and the upload waits
        fill_key(page, key)
        assert download(page, "a.txt") == TARGET


def fill_key(page: Page, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Save").click()


def test_keyboard_only(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#source-text")).to_be_focused()
    page.keyboard.type(SOURCE)
    expect(get_output(page)).to_have_text(TARGET)
    reach(page, ".output")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    word = TARGET.split()[1]
    expect(get_word(page, word)).to_be_focused()
    expect(get_word(page, word)).to_have_attribute("role", "button")
    assert list_aligned(page, ".source-word") != []
    page.keyboard.press("Enter")
    expect(page.locator("#alternatives [role=option]").first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#alternatives [role=option]").nth(1)).to_be_focused()
    page.keyboard.press("Escape")
    expect(get_word(page, word)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#alternatives [role=option]").first).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".note.chosen")).to_be_visible()
    reach(page, ".copy")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Copied")).to_be_focused()
    reach(page, "[role=tab]")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Documents")).to_be_focused()
    expect(page.locator("#panel-documents")).to_be_visible()
    reach(page, "#file")


def reach(page: Page, selector: str) -> None:
    """Press the tab key until an element that matches the selector has the focus."""
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("selector => Boolean(document.activeElement?.matches(selector))", selector):
            return
    raise AssertionError(f"{selector} cannot be reached with the tab key")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")])
def test_accessibility(open_page: Open, width: int, scheme: str) -> None:
    page = open_page(text=TEXT, width=width, color_scheme=scheme)
    axe = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    page.evaluate(axe)
    assert find_grave_violations(page) == []
    page.get_by_role("button", name="Compare").click()
    expect(get_output(page, 1)).to_have_attribute("aria-busy", "false")
    get_output(page).locator(".word").nth(1).click()
    expect(page.locator("#alternatives [role=option]").first).to_be_visible()
    assert find_grave_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Documents").click()
    assert find_grave_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def find_grave_violations(page: Page) -> list[tuple[str, str]]:
    """Return the ids and the HTML of serious violations of the rules of axe-core."""
    violations = page.evaluate("axe.run().then(result => result.violations)")
    grave = [violation for violation in violations if violation["impact"] in ("serious", "critical")]
    return [(violation["id"], violation["nodes"][0]["html"][:200]) for violation in grave]


def test_hostile_text_is_shown_as_text(open_page: Open) -> None:
    text = "<img src=x onerror=alert(1)>\u202eba 👩‍👩‍👧 مرحبا fo!"
    page = open_page(text=text)
    expect(page.locator("#mirror")).to_contain_text(text)
    assert page.locator(".output img, #mirror img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


# Documents


def make_file(name: str, text: str) -> FilePayload:
    return {"name": name, "mimeType": "application/octet-stream", "buffer": text.encode()}


def open_documents(open_page: Open, server: ToyServer, **options: Any) -> Page:
    page = open_page(f"{server.url}/#source=en&target=de", **options)
    page.get_by_role("tab", name="Documents").click()
    return page


def download(page: Page, name: str) -> str:
    """Return the text of a translated document, which has the name of its source."""
    with page.expect_download() as started:
        page.get_by_role("button", name=f"Download {name}").click()
    assert started.value.suggested_filename == name
    return Path(started.value.path()).read_text()


def test_a_chosen_file_is_translated(open_page: Open, language_server: ToyServer) -> None:
    page = open_documents(open_page, language_server)
    page.set_input_files("#file", make_file("Grüße.html", HTML.format(*SENTENCES)))
    assert download(page, "Grüße.html") == HTML.format(*map(translate_toy, SENTENCES))
    expect(page.locator(".document .state")).to_have_text("Translated")
    axe = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    page.evaluate(axe)
    assert find_grave_violations(page) == []
    page.reload()  # the list is still there
    page.get_by_role("tab", name="Documents").click()
    expect(page.get_by_role("button", name="Download Grüße.html")).to_be_visible()
    with page.expect_response(lambda response: response.request.method == "DELETE") as answer:
        page.get_by_role("button", name="Remove Grüße.html").click()
    assert answer.value.status == 204
    expect(page.locator(".document")).to_have_count(0)


def test_a_dropped_file_is_translated(open_page: Open, language_server: ToyServer) -> None:
    page = open_page(f"{language_server.url}/#source=en&target=de")
    text = PO.format(SENTENCES[0], "", SENTENCES[1], "Ende")
    script = """text => {
        const data = new DataTransfer();
        data.items.add(new File([text], "de.po"));
        return data;
    }"""
    data = page.evaluate_handle(script, text)
    page.dispatch_event("body", "dragover", {"dataTransfer": data})
    expect(page.locator("#drop")).to_have_class(re.compile("over"))
    page.dispatch_event("body", "drop", {"dataTransfer": data})
    expect(page.locator("#panel-documents")).to_be_visible()
    translated = download(page, "de.po")
    assert PO.format(SENTENCES[0], translate_toy(SENTENCES[0]), SENTENCES[1], "Ende") == translated


def test_documents_that_are_refused_or_have_warnings(open_page: Open, language_server: ToyServer) -> None:
    page = open_documents(open_page, language_server, faulty=True)
    page.set_input_files("#file", {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": b"\xff\xd8\xff\xe0\x00"})
    expect(page.locator(".document .problem")).to_contain_text("photo.jpg")
    expect(page.get_by_role("button", name="Download photo.jpg")).to_be_hidden()
    page.get_by_role("button", name="Remove photo.jpg").click()
    expect(page.locator(".document")).to_have_count(0)
    page.set_input_files("#file", make_file("long.txt", "\n".join(["ba del fo gri " * 20] * 8)))
    notes = page.locator(".document .note")
    expect(notes.first).to_have_text(re.compile(r"^Line 1: The sentence is .*\.$|^Unit 1: The sentence is .*\.$"))
    expect(notes.nth(4)).to_be_visible()
    expect(notes.nth(5)).to_be_hidden()
    page.locator(".document summary").click()
    expect(notes.nth(5)).to_be_visible()


def test_progress_and_cancelling(open_page: Open, language_server: ToyServer) -> None:
    page = open_documents(open_page, language_server)
    page.set_input_files("#file", make_file("many.txt", f"{SENTENCES[0]}\n" * 20_000))
    state = page.locator(".document .state")
    expect(state).to_have_text(re.compile(r"^[\d,]+ of 20,000, \d+ (s|min) left$"))
    assert 0 < float(page.locator(".document progress").get_attribute("value") or 0) < 1
    *_, job = language_server.app.state.documents.jobs.values()
    with page.expect_response(lambda response: response.request.method == "DELETE"):
        page.get_by_role("button", name="Cancel many.txt").click()
    expect(page.locator(".document")).to_have_count(0)
    expect(page.locator("#file")).to_be_focused()
    job.future.exception(30)
    assert job.error == "the document has been deleted"
    assert job.id not in language_server.app.state.documents.jobs


# Languages


def test_the_language_is_detected_and_swapped(open_page: Open, language_server: ToyServer) -> None:
    page = open_page(language_server.url)
    asked: list[tuple[str, str]] = []

    def note_languages(request: Request) -> None:
        if "/api/stream" in request.url:
            body = json.loads(request.post_data or "{}")
            asked.append((body["source"], body["target"]))

    page.on("request", note_languages)
    source, target, note = (
        page.locator(f"#{name}") for name in ("source-language", "target-language", "language-note")
    )
    expect(source).to_have_value("auto")
    expect(page.get_by_role("button", name="Swap languages")).to_be_disabled()
    page.fill("#source-text", "This is an English sentence about a dog.")
    expect(note).to_have_text("Detected: English")
    expect(get_output(page).locator(".word").first).to_be_visible()
    page.fill("#source-text", "Das ist ein deutscher Satz über einen Hund.")
    expect(note).to_have_text("Detected: German")
    expect(target).to_have_value("en")
    expect(get_output(page).locator(".word").first).to_be_visible()
    expect(get_output(page)).to_have_attribute("aria-busy", "false")
    assert asked[-1] == ("de", "en")
    assert ("en", "de") in asked
    source.select_option("en")
    page.fill("#source-text", SOURCE)
    expect(get_output(page)).to_have_text(TARGET)
    page.get_by_role("button", name="Swap languages").click()
    assert (source.input_value(), target.input_value()) == ("de", "en")
    expect(page.locator("#source-text")).to_have_value(TARGET)
    expect(get_output(page)).to_have_attribute("aria-busy", "false")
    assert asked[-1] == ("de", "en")
    expect(note).to_be_empty()


def test_the_language_of_a_document_is_detected_apart_from_the_text(
    open_page: Open, language_server: ToyServer
) -> None:
    page = open_page(language_server.url)
    page.fill("#source-text", "This is an English sentence about a dog.")
    expect(page.locator("#language-note")).to_have_text("Detected: English")
    page.get_by_role("tab", name="Documents").click()
    expect(page.locator("#language-note")).to_be_hidden()
    page.locator("#target-language").select_option("en")
    german = "Das ist ein deutscher Satz über einen Hund."
    page.set_input_files("#file", make_file("a.txt", german))
    assert download(page, "a.txt") != german
    page.set_input_files("#file", make_file("b.txt", "This is an English sentence about a dog."))
    expect(page.locator(".document").first.locator(".note")).to_have_text("This is in the target language already.")
    assert download(page, "b.txt") == "This is an English sentence about a dog."
    page.get_by_role("tab", name="Text").click()
    expect(page.locator("#target-language")).to_have_value("de")
    expect(page.locator("#language-note")).to_have_text("Detected: English")
