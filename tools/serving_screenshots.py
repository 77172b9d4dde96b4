"""Take the screenshots of docs/figures/ from the page of a running server.

    dragoman serve runs/demo
    python tools/serving_screenshots.py http://127.0.0.1:5000 docs/figures

This writes serving-text.png, the alignment of a word; serving-words.png, other words for it, in dark mode; and
serving-phone.png. It needs Playwright (`pip install dragoman[dev]`) and Chromium on the PATH. The server must
translate from English.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

TEXT = "The old woman reads a book because she is tired.\nTwo children play in the garden. The dog sleeps."
WORD = 5  # number of the word that is pointed at


def main(url: str, folder: Path) -> None:
    """Open the page and write the screenshots."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium: install it, for example with `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = open_page(browser, url, "light", 1200, 500)
        page.locator(".word").nth(WORD).hover()
        page.screenshot(path=folder / "serving-text.png")
        page = open_page(browser, url, "dark", 1200, 680)
        page.locator(".word").nth(WORD).click()
        page.locator("#alternatives [role=option]").first.wait_for()
        page.screenshot(path=folder / "serving-words.png")
        page = open_page(browser, url, "light", 360, 740)
        page.screenshot(path=folder / "serving-phone.png")
        browser.close()


def open_page(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    """Return a page on which TEXT is translated."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})  # type: ignore[arg-type]
    page.goto(url)
    page.locator("#version", has_text="Dragoman").wait_for()
    page.fill("#source-text", TEXT)
    page.locator(".output[aria-busy=false] .word").first.wait_for()
    return page


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
