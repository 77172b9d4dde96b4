"""The page of an inspection, in a real browser: what it shows, with the mouse and with the keyboard."""

from __future__ import annotations

import base64
import importlib.resources
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Locator,
    Page,
    Request,
    expect,
    sync_playwright,
)

from chromium import find_chromium
from dragoman.inspection.attention_maps import merge_into_words
from dragoman.inspection.page import pack_matrix, render_frame, render_page, render_png
from dragoman.inspection.records import Attribution, Inspection
from dragoman.types import Hypothesis
from toy_inspection import (
    HOSTILE,
    SOURCE,
    TARGET,
    make_classifier,
    make_hostile,
    make_inspection,
    make_long,
    make_phrases,
    make_translation,
)

TRANSLATION = make_translation()
CROSS = TRANSLATION.attentions[2]
KINDS = {
    "translation": TRANSLATION,
    "classifier": make_classifier(),
    "phrases": make_phrases(),
    "hostile": make_hostile(),
}
SECTIONS = {  # list of an inspection -> id of its section
    "attentions": "attention",
    "attributions": "attribution",
    "predictions": "predictions",
    "searches": "search",
    "phrases": "phrases",
}
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens an inspection or HTML. No page may send a request, log an error or open a dialog."""
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def check_request(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "about:")):
            faults.append(request.url)

    def check_message(message: ConsoleMessage) -> None:
        if message.type == "error":
            faults.append(message.text)

    def refuse_dialog(dialog: Dialog) -> None:
        faults.append(dialog.message)
        dialog.dismiss()

    def open_html(content: Inspection | str, *, width: int = 1280, **options: Any) -> Page:
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(content if isinstance(content, str) else render_page(content), encoding="utf-8")
        contexts.append(context := browser.new_context(viewport={"width": width, "height": 800}, **options))
        page = context.new_page()
        page.on("request", check_request)
        page.on("console", check_message)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", refuse_dialog)
        page.set_default_timeout(10_000)
        page.goto(path.as_uri())
        return page

    yield open_html
    for context in contexts:
        context.close()
    assert faults == []


def list_tokens(parent: Locator) -> list[str]:
    return parent.locator(".token").all_text_contents()


def count_lines(page: Page) -> int:
    return sum(int(count) for count in page.eval_on_selector_all(".base path", "all => all.map(e => e.dataset.count)"))


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.textContent || document.activeElement.getAttribute('aria-label')"))


# The data


@pytest.mark.parametrize("signed", [False, True])
def test_packed_values_are_within_half_a_step(signed: bool) -> None:
    values = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32) * [[[1.0]], [[1e-6]], [[1e6]]]
    values = values if signed else np.abs(values)
    values[1, 2] = 0.0
    packed = pack_matrix(values, signed=signed)
    steps = np.frombuffer(base64.b64decode(packed["steps"]), np.int8 if signed else np.uint8).reshape(values.shape)
    scales = np.frombuffer(base64.b64decode(packed["scales"]), "<f4").reshape(*values.shape[:-1], 1)
    assert (np.abs(steps * scales - values) <= 0.5001 * scales).all()
    np.testing.assert_allclose(scales[..., 0], np.abs(values).max(-1) / (127 if signed else 255), rtol=1e-6)


def test_values_that_are_not_finite_are_reported(open_page: Open) -> None:
    weight = CROSS.weight_LHQK.copy()
    weight[0, 0, 0, :3] = np.nan
    page = open_page(replace(TRANSLATION, attentions=[replace(CROSS, weight_LHQK=weight)]))
    expect(page.locator("#attention .warning")).to_have_text(
        "cross-attention: 3 values are not finite and are shown as 0"
    )


def test_every_section_is_shown_only_with_data(open_page: Open) -> None:
    small = make_inspection(SOURCE, TARGET, range(len(TARGET)), layers=2, heads=2)
    full = replace(small, searches=TRANSLATION.searches, phrases=make_phrases().phrases)
    for name, section in SECTIONS.items():
        nothing: dict[str, Any] = {name: []}
        without = open_page(replace(full, **nothing))
        shown = without.eval_on_selector_all("main > section", "all => all.map(e => e.id)")
        assert shown == [other for other in SECTIONS.values() if other != section]
        assert without.locator("nav a").count() == len(shown)
    nothing = {name: [] for name in SECTIONS}
    page = open_page(replace(full, tokens={}, notes=[], source="", target="", **nothing))
    expect(page.locator("dd")).to_have_text(["(empty)", "(empty)"])
    assert page.locator("section").count() == 0


def test_a_page_of_30_words_is_small() -> None:
    tokens = [f"▁w{index}" for index in range(40)]
    inspection = make_inspection(tokens, tokens, range(40), layers=3, heads=4)
    assert len(render_page(replace(inspection, searches=TRANSLATION.searches)).encode()) < 300_000


# Attention


def test_best_layer_is_opened_first(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    assert CROSS.best_layer is not None
    expect(page.get_by_role("combobox", name="layer")).to_have_value(str(CROSS.best_layer))
    expect(page.get_by_role("radio", name="cross-attention")).to_be_checked()
    expect(page.locator(".thumbnail[aria-pressed=true]")).to_have_attribute("title", "layer 3, mean of heads")
    assert list_tokens(page.locator(".column.queries")) == ["<s>", *TARGET[:-1]]
    assert list_tokens(page.locator(".column.keys")) == SOURCE
    layers, heads = CROSS.weight_LHQK.shape[:2]
    assert page.locator(".thumbnail").count() == layers * (heads + 1)


def test_a_cell_shows_its_weight(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    page.get_by_role("button", name="layer 2, head 5").click()
    query, key = 6, 10
    page.locator(".area").hover(position={"x": 20 * key + 10, "y": 20 * query + 10})
    weight = CROSS.weight_LHQK[1, 4, query, key]
    readout = page.locator(".readout")
    expect(readout.locator("b")).to_have_text(f"{weight:.3f}")
    assert list_tokens(readout) == ["▁river", "▁burn", "ann"]  # the query, the token that it predicts, and the key


@pytest.mark.parametrize("side", ["queries", "keys"])
def test_a_token_shows_its_largest_weights(open_page: Open, side: str) -> None:
    page = open_page(TRANSLATION)
    page.locator(f".column.{side} button").nth(3).hover()
    weight_QK = CROSS.weight_LHQK[CROSS.best_layer].mean(0)
    weights = weight_QK[3] if side == "queries" else weight_QK[:, 3]
    expected = [f"{weight:.3f}" for weight in sorted(weights, reverse=True)[:6]]
    shown = page.locator(".readout b").all_text_contents()
    assert [float(text) for text in shown] == pytest.approx([float(text) for text in expected], abs=0.0021)
    assert page.locator(".overlay path").count() == (weights >= 0.05).sum()
    page.locator("h1").hover()
    assert page.locator(".overlay path").count() == 0


def test_a_pinned_token_stays_until_escape(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    buttons = page.locator(".column.keys button")
    buttons.nth(2).click()
    buttons.nth(5).hover()
    assert list_tokens(page.locator(".readout"))[0] == SOURCE[2]
    expect(buttons.nth(2)).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Escape")
    expect(buttons.nth(2)).to_have_attribute("aria-pressed", "false")
    page.locator(".area").click(position={"x": 10, "y": 30})
    page.locator("h1").hover()
    assert list_tokens(page.locator(".readout")) == ["▁The", "▁old", "▁Das"]
    page.locator(".area").click(position={"x": 10, "y": 30})
    expect(page.locator(".readout .badge")).to_have_count(0)


def test_the_filter_leaves_lines_from_a_weight_on(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    page.get_by_role("combobox", name="head").select_option(label="1")
    weights = CROSS.weight_LHQK[CROSS.best_layer, 0]
    for minimum in (0.3, 0.9, 0.0):
        page.get_by_role("slider").fill(str(minimum))
        assert abs(count_lines(page) - (weights > minimum).sum()) <= (np.abs(weights - minimum) < 0.002).sum()
        pixels = "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
        painted = sum(opacity > 0 for opacity in page.locator(".area canvas").evaluate(pixels)[3::4])
        assert painted <= count_lines(page)


def test_parts_layers_and_heads(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    for attention in TRANSLATION.attentions:
        page.locator(".choice span", has_text=attention.title).click()
        page.get_by_role("combobox", name="layer").select_option(label="1")
        page.get_by_role("combobox", name="head").select_option(label="3")
        page.get_by_role("slider").fill("0.2")
        weights = attention.weight_LHQK[0, 2]
        assert abs(count_lines(page) - (weights >= 0.2).sum()) <= (np.abs(weights - 0.2) < 0.002).sum()
        assert list_tokens(page.locator(".names.keys")) == list(TRANSLATION.tokens[attention.keys])
        expect(page.locator(".thumbnail[aria-pressed=true]")).to_have_attribute("title", "layer 1, head 3")


def test_subwords_are_merged_as_in_the_terminal(open_page: Open) -> None:
    weights = CROSS.weight_LHQK[2].mean(0)
    hypothesis = Hypothesis("", 0.0, ["<s>", *TARGET[:-1]], weights.tolist(), SOURCE, 0.0)
    sources, targets, expected = merge_into_words(hypothesis)
    page = open_page(TRANSLATION)
    page.get_by_label("merge subwords into words").check()
    assert list_tokens(page.locator(".column.keys")) == sources
    assert list_tokens(page.locator(".column.queries")) == targets
    for query, key in ((0, 0), (7, 7), (len(targets) - 1, len(sources) - 1)):
        page.locator(".area").hover(position={"x": 20 * key + 10, "y": 20 * query + 10})
        assert float(page.locator(".readout b").inner_text()) == pytest.approx(expected[query, key], abs=0.004)


# Attribution, predictions, search and phrases


def test_attributions_of_a_token_beside_attention(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    page.locator(".chooser button").nth(6).click()
    section = page.locator("#attribution")
    rows = section.locator("tbody").first.locator("tr")
    for column, attribution in enumerate(TRANSLATION.attributions):
        assert attribution.value_TS is not None
        values = attribution.value_TS[6]
        for position, value in enumerate(values):
            cell = rows.nth(position + 1).locator("td").nth(column)
            assert float(cell.inner_text().replace("−", "-")) == pytest.approx(
                value, abs=float(np.abs(values).max()) / 90
            )
            assert ("negative" in (cell.get_attribute("class") or "")) == (value < 0 and cell.inner_text()[0] == "−")
    attention = rows.nth(SOURCE.index("br") + 1).locator("td").last
    assert float(attention.inner_text()) == pytest.approx(
        CROSS.weight_LHQK[2].mean(0)[6, SOURCE.index("br")], abs=0.003
    )


def test_a_language_model_has_attributions_of_its_prefix_only(open_page: Open) -> None:
    prefix = TRANSLATION.attributions[0].prefix_TT
    tokens = {name: TRANSLATION.tokens[name] for name in ("input", "target")}
    page = open_page(
        replace(TRANSLATION, tokens=tokens, attentions=[], attributions=[Attribution("a", "a", None, prefix)])
    )
    assert page.locator("#attribution tbody").count() == 1
    assert list_tokens(page.locator("#attribution tbody")) == TRANSLATION.tokens["input"]


def test_steps_with_a_more_probable_token_are_marked(open_page: Open) -> None:
    predictions = list(TRANSLATION.predictions)
    predictions[3] = replace(predictions[3], token="▁near", rank=7, logp=-math.inf)
    page = open_page(replace(TRANSLATION, predictions=predictions))
    rows = page.locator(".steps tbody tr")
    assert rows.count() == len(predictions)
    for step, prediction in enumerate(predictions):
        marks = rows.nth(step).locator(".badge").all_inner_texts()
        assert marks == ([f"the model would have said {prediction.top[0][0]}"] if prediction.rank > 1 else [])
        expect(rows.nth(step).locator("td").nth(1)).to_have_text(f"{100 * math.exp(prediction.logp):.1f} %")
    assert page.locator(".bar-column").count() == len(predictions)


def test_a_classifier_shows_its_labels(open_page: Open) -> None:
    page = open_page(make_classifier())
    assert page.locator("#predictions h2").inner_text() == "Label"
    assert list_tokens(page.locator(".labels")) == ["positive", "neutral", "negative"]


def test_searches_side_by_side(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    results = page.locator(".results tbody tr")
    assert results.count() == sum(len(trace.results) for trace in TRANSLATION.searches)
    assert page.locator(".choice [name=trace]").count() == 2  # the exhaustive search has no nodes
    trace = TRANSLATION.searches[1]
    kept = [node for node in trace.nodes if node.state != "pruned"]
    assert page.locator(".lattice .box:not(.count)").count() == len(kept)
    page.locator(".choice span", has_text="beam 1").click()
    assert page.get_by_role("tree").get_attribute("aria-label") == "beam 1"


def test_the_tree_opens_the_best_path_and_its_competitors(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    nodes = TRANSLATION.searches[1].nodes
    best = {index for index, node in enumerate(nodes) if node.state == "best"}
    items = page.locator("[role=treeitem]:visible")
    assert items.count() == 1 + sum(node.parent in best for node in nodes)
    assert page.locator("[role=treeitem][aria-expanded=true]").count() == len(best) - 1
    closed = page.locator("[role=treeitem][aria-expanded=false]").first
    before = items.count()
    closed.locator("> .node").click()
    assert items.count() > before
    page.keyboard.press("ArrowLeft")
    assert items.count() == before


def test_phrases_are_linked(open_page: Open) -> None:
    inspection = make_phrases()
    page = open_page(inspection)
    above, below = page.locator(".phrase-row").all()
    words = "Er hat gestern das␣Haus verkauft .".replace("␣", " ")
    assert " ".join(list_tokens(above)) == words  # "hat" is in no phrase, but it is shown
    assert list_tokens(below) == [phrase.target for phrase in inspection.phrases]
    above.locator(".phrase", has_text="das Haus").hover()
    assert page.locator(".phrase.selected").all_inner_texts() == ["das Haus", "the house"]
    assert page.locator(".phrase-figure path.selected").count() == 1
    assert page.locator("#phrases tbody tr").count() == len(inspection.phrases)
    heads = page.locator("#phrases thead th").all_inner_texts()
    assert heads == ["source", "target", "source words", *inspection.phrases[0].features]


# The keyboard


def test_all_of_it_with_the_keyboard(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    reach(page, "input[name=part]")
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("radio", name="decoder")).to_be_checked()
    page.keyboard.press("ArrowRight")
    reach(page, "input[type=range]")
    before = count_lines(page)
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    assert count_lines(page) < before
    reach(page, ".thumbnail")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    expect(page.locator(".thumbnail[aria-pressed=true]")).to_have_attribute("title", "layer 2, head 2")
    reach(page, ".column button")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    assert (focused(page), list_tokens(page.locator(".readout"))[0]) == (SOURCE[1], SOURCE[1])
    expect(page.locator(".column.keys button").nth(1)).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Escape")
    assert list_tokens(page.locator(".readout")) == []
    reach(page, ".area")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert list_tokens(page.locator(".readout")) == ["▁The", "▁old", "▁Haus"]
    expect(page.locator(".readout .badge")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator(".readout .badge")).to_have_count(0)
    reach(page, ".chooser button")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".chooser [aria-pressed=true]")).to_have_text(TARGET[1])


def test_the_tree_with_the_keyboard(open_page: Open) -> None:
    page = open_page(TRANSLATION)
    reach(page, "[role=treeitem]")
    assert page.locator("[role=tree] [tabindex='0']").count() == 1
    items = page.locator("[role=treeitem]:visible")
    before = items.count()
    page.keyboard.press("ArrowLeft")  # closes the root
    assert items.count() == 1
    page.keyboard.press("ArrowRight")  # opens it as it was
    assert items.count() == before
    page.keyboard.press("ArrowRight")  # goes to its first extension, which is closed
    page.keyboard.press("Enter")
    assert items.count() > before
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")  # goes back to the root
    assert focused(page).startswith("start")
    page.keyboard.press("End")
    assert focused(page).startswith(TARGET[-1])
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    assert focused(page).startswith("start")
    assert page.locator("[role=tree] [tabindex='0']").count() == 1


def reach(page: Page, selector: str) -> None:
    """Press the tab key until an element that matches the selector has the focus."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} cannot be reached with the tab key")


# Sizes, media and hosts


def test_200_tokens(open_page: Open) -> None:
    page = open_page(make_long(), width=360)
    timing = page.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
    assert timing < 10_000  # milliseconds, on a busy machine
    page.get_by_role("slider").fill("0")
    assert count_lines(page) > 10_000
    assert page.locator(".base path").count() <= 12
    page.get_by_role("button", name="layer 6, head 8").click()
    page.locator(".column.keys button").nth(150).hover()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_needs_no_horizontal_scrolling(open_page: Open, kind: str) -> None:
    page = open_page(KINDS[kind], width=360)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("kind", ["everything", "classifier", "hostile"])
def test_accessibility(open_page: Open, kind: str) -> None:
    """In dark mode, only the colours are different."""
    everything = replace(TRANSLATION, phrases=make_phrases().phrases)
    page = open_page({**KINDS, "everything": everything}[kind], color_scheme="light")
    page.locator(".column.keys button").nth(2).click()
    page.evaluate(importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    assert find_grave_violations(page) == []
    page.emulate_media(color_scheme="dark")
    expect(page.locator("body")).to_have_css("background-color", "rgb(21, 24, 28)")
    assert find_grave_violations(page, "color-contrast", "link-in-text-block") == []


def find_grave_violations(page: Page, *rules: str) -> list[tuple[str, str]]:
    """Return the ids and the HTML of serious violations of some or all rules of axe-core."""
    options = {"runOnly": {"type": "rule", "values": rules}} if rules else {}
    violations = page.evaluate("options => axe.run(options).then(result => result.violations)", options)
    grave = [violation for violation in violations if violation["impact"] in ("serious", "critical")]
    return [(violation["id"], violation["nodes"][0]["html"][:200]) for violation in grave]


def test_dark_mode_follows_the_system(open_page: Open) -> None:
    page = open_page(TRANSLATION, color_scheme="light")
    expect(page.locator("body")).to_have_css("background-color", "rgb(255, 255, 255)")
    light = page.evaluate("document.querySelector('.area canvas').toDataURL()")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("body")).to_have_css("background-color", "rgb(21, 24, 28)")
    # Canvases are painted again, in the colours of dark mode
    page.wait_for_function("light => document.querySelector('.area canvas').toDataURL() !== light", arg=light)


def test_print_shows_everything_in_black_on_white(open_page: Open) -> None:
    page = open_page(TRANSLATION, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 30, 33)"
    expect(page.locator("#attention .controls")).to_be_hidden()
    cut = "all => all.filter(e => getComputedStyle(e).overflowY !== 'visible').length"
    assert page.eval_on_selector_all(".scrolls", cut) == 0
    assert page.pdf().startswith(b"%PDF")


def test_hostile_text_is_shown_as_text(open_page: Open) -> None:
    page = open_page(make_hostile())
    plain = open_page(make_phrases())
    for tag in ("script", "img"):
        assert page.locator(tag).count() == plain.locator(tag).count()
    shown = list_tokens(page.locator(".column.keys"))
    assert page.locator(".column.keys .token").evaluate_all("all => all.map(e => e.title)") == HOSTILE
    for token, text in zip(HOSTILE, shown, strict=True):
        if (
            token.replace(" ", "x").replace("\u200d", "").isprintable()
            and token == token.strip()
            and "  " not in token
            and token
        ):
            assert text == token
    assert shown[5] == "⟨U+202E⟩evil⟨U+202C⟩"
    assert shown[7] == "a␀b␉c␊d⟨U+2028⟩e"
    assert shown[8] == "␣␣two␣␣spaces␣"
    assert shown[9] == "(empty)"
    widths = page.locator(".token").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    assert max(widths) < 500  # 5,000 characters are shortened
    assert page.locator(".results td").nth(2).inner_text() == "−∞"
    assert "alert" in page.title()


def test_a_notebook_shows_the_page_in_a_frame(open_page: Open) -> None:
    html = make_hostile()._repr_html_()
    assert html == render_frame(make_hostile())
    page = open_page(f"<!doctype html><h1>Notebook</h1><div>{html}</div><p>after</p>")
    frame = page.frame_locator("iframe")
    expect(frame.locator("h2").first).to_have_text("Attention")
    frame.locator(".column.keys button").nth(3).click()
    expect(frame.locator(".readout .badge")).to_have_count(1)
    expect(page.locator("p")).to_have_text("after")


def test_figures_as_png(tmp_path: Path) -> None:
    names = ["attention-encoder", "attention-decoder", "attention-cross", "alignment", "entropy"]
    names += [f"attribution-{name}{part}" for name in ("occlusion", "gradient") for part in ("", "-prefix")]
    paths = render_png(make_inspection(SOURCE, TARGET, range(len(TARGET)), layers=2, heads=2), tmp_path / "new" / "one")
    assert [path.stem for path in paths] == names
    assert all(imread(path).std() > 0.02 for path in paths)  # none is blank
    assert [path.stem for path in render_png(make_classifier(), tmp_path)] == [
        "attention-encoder",
        "entropy",
        "attribution-gradient",
    ]
    assert render_png(make_hostile(), tmp_path / "hostile")
    assert render_png(make_phrases(), tmp_path) == []
